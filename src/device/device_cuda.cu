/* device_cuda.cu - the CUDA device: one GPU, its memory, pinned host memory, streams and
 * graphs.
 *
 * Uploads go through a ring of pinned pieces. The caller's bytes are free at once, and
 * copies overlap with the host that fills the next pieces, also from a mapped checkpoint.
 * Several threads fill pieces, because one thread reads memory more slowly than the bus
 * transfers it. Graphs are made by stream capture. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/device_internal.h"
#include "device/cuda.cuh"
#include "device/gpu_list.h"
#include "device/memory_cuda.cuh"
#include "base/checksum.h"
#include "base/cores.h"
#include "base/terminal.h"

namespace {

constexpr int PIECES = 32, FILLED_AT_ONCE = PIECES / 2, MAX_FILLERS = 8, BLOCKS_PER_SM = 1;
constexpr size_t PIECE_BYTES = 1 << 19;

enum memory_kind { ON_DEVICE, ON_HOST, OF_CALLER };

struct memory {
    void *at;
    memory_kind kind; /* OF_CALLER: host memory that operators read in place */
    cuda_pages pages; /* bytes 0: of cudaMalloc */
    bool shared,
        released; /* other processes may have it open; it is freed when they have not */
};

struct cuda_device {
    hd_device base;
    int ordinal, n_sms;
    bool overlaps;        /* launches, hd_cuda_overlaps_launches() */
    bool discards;        /* blocks can be discarded */
    uint64_t readers;     /* bits of other GPUs that use pages of this one */
    pthread_mutex_t lock; /* guards the next: updates of weights take memory beside the steps */
    memory *blocks;       /* [n_blocks, cap_blocks] */
    size_t n_blocks, cap_blocks;
    void *kept; /* object attached by the operators */
    void (*close_kept)(void *kept);
};

struct cuda_stream {
    hd_stream base;
    cudaStream_t queue;
    uint8_t *pieces; /* [PIECES, PIECE_BYTES] pinned */
    cudaEvent_t sent[PIECES];
    int next;
    hd_thread_pool *fillers; /* threads that fill pieces; idle except in long uploads */
};

struct cuda_mark {
    hd_device_event base;
    cudaEvent_t event;
};

struct cuda_graph {
    hd_graph base;
    cudaGraphExec_t exec;
};

/* Of this thread: what was made current last. */
thread_local const cuda_device *current;

cuda_device *device_of(hd_stream *s) {
    return reinterpret_cast<cuda_device *>(s->device);
}

cuda_stream *stream_of(hd_stream *s) {
    return reinterpret_cast<cuda_stream *>(s);
}

hd_status fail(hd_err *err, hd_status code, const char *what, cudaError_t status) {
    return HD_FAIL(err, code, "%s: %s", what, cudaGetErrorString(status));
}

/* Records a failed call on the stream. */
void note(hd_stream *s, const char *what, cudaError_t status) {
    if (status == cudaSuccess) return;
    char text[300];
    snprintf(text, sizeof text, "%s: %s", what, cudaGetErrorString(status));
    hd_stream_fail(s, HD_EDEVICE, text);
}

/* ---- memory ---- */

void free_block(memory m) {
    switch (m.kind) {
    case ON_DEVICE:
        if (m.pages.bytes) {
            cudaDeviceSynchronize(); /* as cudaFree does */
            cuda_pages_free(&m.pages);
        } else {
            cudaFree(m.at);
        }
        return;
    case ON_HOST:
        cudaFreeHost(m.at);
        return;
    case OF_CALLER:
        cudaHostUnregister(m.at);
        return;
    }
}

void close_device(hd_device *base) {
    cuda_device *d = reinterpret_cast<cuda_device *>(base);
    cudaSetDevice(d->ordinal);
    if (d->kept) d->close_kept(d->kept);
    for (size_t i = 0; i < d->n_blocks; i++) free_block(d->blocks[i]);
    free(d->blocks);
    pthread_mutex_destroy(&d->lock);
    free(d);
}

bool make_room(cuda_device *d) {
    if (d->n_blocks < d->cap_blocks) return true;
    const size_t cap = d->cap_blocks ? 2 * d->cap_blocks : 64;
    void *more = realloc(d->blocks, cap * sizeof *d->blocks);
    if (!more) return false;
    d->blocks = static_cast<memory *>(more);
    d->cap_blocks = cap;
    return true;
}

/* Notes a block, or frees it if there is no memory to note it. */
bool keep_block(cuda_device *d, memory m) {
    pthread_mutex_lock(&d->lock);
    const bool room = make_room(d);
    if (room) d->blocks[d->n_blocks++] = m;
    pthread_mutex_unlock(&d->lock);
    if (!room) free_block(m);
    return room;
}

size_t free_bytes(const hd_device *base) {
    size_t free = 0, all = 0;
    cudaSetDevice(reinterpret_cast<const cuda_device *>(base)->ordinal);
    cudaMemGetInfo(&free, &all);
    return free;
}

/* Small blocks are not worth pages of their own. */
constexpr size_t PAGES_FROM = 8 << 20;

cudaError_t take(memory *m, const cuda_device *d, size_t bytes) {
    if (m->kind == ON_HOST) return cudaMallocHost(&m->at, bytes);
    if (!d->discards || bytes < PAGES_FROM) return cudaMalloc(&m->at, bytes);
    const cudaError_t status = cuda_pages_take(&m->pages, d->ordinal, d->readers, bytes);
    if (status == cudaSuccess || status == cudaErrorMemoryAllocation) {
        m->at = reinterpret_cast<void *>(m->pages.at);
        return status;
    }
    return cudaMalloc(&m->at, bytes); /* a driver without pages: nothing is given back */
}

hd_status alloc(hd_device *base, void **out, size_t bytes, bool on_host, const char *what,
                hd_err *err) {
    cuda_device *d = reinterpret_cast<cuda_device *>(base);
    const size_t size = bytes ? bytes : 1;
    memory m = {nullptr, on_host ? ON_HOST : ON_DEVICE, {}, false, false};
    *out = nullptr;
    cudaSetDevice(d->ordinal);
    cudaError_t status = take(&m, d, size);
    if (status == cudaErrorMemoryAllocation) {
        cudaGetLastError(); /* not sticky: the next call may succeed */
        char wanted[32], left[32];
        hd_bytes_text(wanted, sizeof wanted, static_cast<double>(bytes));
        if (on_host) {
            return HD_FAIL(err, HD_ENOMEM, "%s: no pinned host memory for %s", what, wanted);
        }
        hd_bytes_text(left, sizeof left, static_cast<double>(free_bytes(base)));
        return HD_FAIL(err, HD_ENOMEM, "%s: no memory for %s; the GPU has %s free", what,
                       wanted, left);
    }
    if (status != cudaSuccess) return fail(err, HD_EDEVICE, what, status);
    if (on_host) {
        memset(m.at, 0, size);
    } else {
        status = cudaMemset(m.at, 0, size);
        if (status == cudaSuccess) status = cudaDeviceSynchronize(); /* before any stream */
    }
    if (status != cudaSuccess) {
        free_block(m);
        return fail(err, HD_EDEVICE, what, status);
    }
    if (!keep_block(d, m)) {
        return HD_FAIL(err, HD_ENOMEM, "%s: no memory to note it", what);
    }
    *out = m.at;
    return HD_OK;
}

/* A block's entry; blocks do not move while it is used: nobody takes or releases memory meanwhile. */
memory *block_of(cuda_device *d, const void *p) {
    for (size_t i = 0; i < d->n_blocks; i++) {
        if (d->blocks[i].at == p) return &d->blocks[i];
    }
    return nullptr;
}

/* Pinned host memory stays. */
size_t discard(hd_device *base, void *p) {
    cuda_device *d = reinterpret_cast<cuda_device *>(base);
    memory *m = block_of(d, p);
    if (!m || !m->pages.mapped) return 0;
    cudaSetDevice(d->ordinal);
    cudaDeviceSynchronize();
    return cuda_pages_unmap(&m->pages) == cudaSuccess ? m->pages.bytes : 0;
}

hd_status restore(hd_device *base, void *p, hd_err *err) {
    cuda_device *d = reinterpret_cast<cuda_device *>(base);
    memory *m = block_of(d, p);
    if (!m || !m->pages.bytes || m->pages.mapped) return HD_OK;
    cudaSetDevice(d->ordinal);
    cudaError_t status = cuda_pages_map(&m->pages, d->ordinal, d->readers);
    if (status == cudaErrorMemoryAllocation) {
        char wanted[32], left[32];
        hd_bytes_text(wanted, sizeof wanted, static_cast<double>(m->pages.bytes));
        hd_bytes_text(left, sizeof left, static_cast<double>(free_bytes(base)));
        return HD_FAIL(err, HD_ENOMEM, "no memory for %s again; the GPU has %s free", wanted,
                       left);
    }
    if (status == cudaSuccess) status = cudaMemset(m->at, 0, m->pages.bytes);
    if (status == cudaSuccess) status = cudaDeviceSynchronize();
    return status == cudaSuccess ? HD_OK : fail(err, HD_EDEVICE, "memory", status);
}

void keep_addresses(hd_device *base) {
    reinterpret_cast<cuda_device *>(base)->discards = true;
}

bool is_pinned(const uint8_t *p) {
    cudaPointerAttributes a = {};
    if (cudaPointerGetAttributes(&a, p) != cudaSuccess) cudaGetLastError();
    return a.type == cudaMemoryTypeHost;
}

/* Whole pages. Neighbors share the pages at their ends, and other devices of this process the rest, so
 * some may be pinned already. */
cudaError_t pin(cuda_device *d, const void *host, size_t bytes) {
    constexpr uintptr_t PAGE = 4096;
    uintptr_t begin = (uintptr_t)host / PAGE * PAGE;
    uintptr_t end = ((uintptr_t)host + bytes + PAGE - 1) / PAGE * PAGE;
    if (is_pinned(reinterpret_cast<const uint8_t *>(begin))) begin += PAGE;
    if (end > begin && is_pinned(reinterpret_cast<const uint8_t *>(end) - 1)) end -= PAGE;
    if (end <= begin) return cudaSuccess;
    void *first = reinterpret_cast<void *>(begin);
    const cudaError_t status = cudaHostRegister(
        first, end - begin, cudaHostRegisterPortable | cudaHostRegisterReadOnly);
    if (status != cudaSuccess) cudaGetLastError();
    if (status == cudaSuccess && !keep_block(d, {first, OF_CALLER, {}, false, false})) {
        return cudaErrorMemoryAllocation;
    }
    return status == cudaErrorHostMemoryAlreadyRegistered ? cudaSuccess : status;
}

/* Pinned pages are read in microseconds. Others a GPU may read too, but each first by a fault. */
hd_status read_host(hd_device *base, const void *host, size_t bytes, hd_err *err) {
    cuda_device *d = reinterpret_cast<cuda_device *>(base);
    int any = 0, same_address = 0;
    if (bytes == 0) return HD_OK;
    cudaSetDevice(d->ordinal);
    cudaDeviceGetAttribute(&any, cudaDevAttrPageableMemoryAccess, d->ordinal);
    cudaDeviceGetAttribute(&same_address, cudaDevAttrCanUseHostPointerForRegisteredMem,
                           d->ordinal);
    const cudaError_t status = same_address ? pin(d, host, bytes) : cudaErrorNotSupported;
    if (status == cudaSuccess || any) return HD_OK;
    return fail(err, HD_EUNSUPPORTED, "pinning host memory", status);
}

hd_status pin_host(hd_device *base, const void *host, size_t bytes, hd_err *err) {
    cuda_device *d = reinterpret_cast<cuda_device *>(base);
    cudaSetDevice(d->ordinal);
    const cudaError_t status = bytes ? pin(d, host, bytes) : cudaSuccess;
    return status == cudaSuccess ? HD_OK : fail(err, HD_EDEVICE, "pinning", status);
}

void release(hd_device *base, void *p) {
    cuda_device *d = reinterpret_cast<cuda_device *>(base);
    cudaSetDevice(d->ordinal);
    memory found = {};
    pthread_mutex_lock(&d->lock);
    for (size_t i = 0; i < d->n_blocks; i++) {
        if (d->blocks[i].at != p) continue;
        d->blocks[i].released = true;
        if (d->blocks[i].shared) break;
        found = d->blocks[i];
        d->blocks[i] = d->blocks[--d->n_blocks];
        break;
    }
    pthread_mutex_unlock(&d->lock);
    if (found.at) free_block(found);
}

/* ---- memory of other processes ---- */

hd_status share(hd_device *base, void *p, uint8_t *handle, uint8_t *gpu, hd_err *err) {
    cuda_device *d = reinterpret_cast<cuda_device *>(base);
    cudaIpcMemHandle_t h = {};
    cudaDeviceProp about = {};
    cudaSetDevice(d->ordinal);
    cudaError_t status = cudaIpcGetMemHandle(&h, p);
    if (status == cudaSuccess) status = cudaGetDeviceProperties(&about, d->ordinal);
    if (status != cudaSuccess) {
        cudaGetLastError(); /* not sticky */
        return fail(err, HD_EDEVICE, "memory of this GPU cannot be shared by CUDA IPC", status);
    }
    static_assert(sizeof about.uuid == HD_GPU_ID_BYTES, "UUIDs travel as 16 bytes");
    memcpy(handle, &h, sizeof h);
    memcpy(gpu, &about.uuid, sizeof about.uuid);
    pthread_mutex_lock(&d->lock);
    block_of(d, p)->shared = true;
    pthread_mutex_unlock(&d->lock);
    return HD_OK;
}

void end_sharing(hd_device *base) {
    cuda_device *d = reinterpret_cast<cuda_device *>(base);
    cudaSetDevice(d->ordinal);
    pthread_mutex_lock(&d->lock);
    for (size_t i = d->n_blocks; i-- > 0;) {
        if (!d->blocks[i].shared || !d->blocks[i].released) continue;
        free_block(d->blocks[i]);
        d->blocks[i] = d->blocks[--d->n_blocks];
    }
    pthread_mutex_unlock(&d->lock);
}

hd_status check_access(const hd_device *base, const uint8_t *gpu, hd_err *err) {
    const int own = reinterpret_cast<const cuda_device *>(base)->ordinal;
    int n = 0;
    cudaGetDeviceCount(&n);
    for (int i = 0; i < n; i++) {
        cudaDeviceProp about = {};
        int can = i == own;
        if (cudaGetDeviceProperties(&about, i) != cudaSuccess) continue;
        if (memcmp(&about.uuid, gpu, sizeof about.uuid) != 0) continue;
        if (!can) cudaDeviceCanAccessPeer(&can, own, i);
        if (can) return HD_OK;
        return HD_FAIL(err, HD_EUNSUPPORTED, "GPU %d cannot read the memory of GPU %d", own, i);
    }
    return HD_OK;
}

hd_status open_shared(hd_device *base, const void **out, size_t *bytes, const uint8_t *handle,
                      hd_err *err) {
    static_assert(sizeof(cudaIpcMemHandle_t) == HD_SHARED_HANDLE_BYTES &&
                      sizeof(cudaIpcEventHandle_t) == HD_SHARED_HANDLE_BYTES,
                  "handles travel as 64 bytes");
    cudaIpcMemHandle_t h;
    void *p = nullptr;
    CUdeviceptr start = 0;
    size_t all = 0;
    memcpy(&h, handle, sizeof h);
    cudaSetDevice(reinterpret_cast<cuda_device *>(base)->ordinal);
    cudaError_t status = cudaIpcOpenMemHandle(&p, h, cudaIpcMemLazyEnablePeerAccess);
    if (status == cudaSuccess) {
        status = cuda_range_of(&start, &all, p);
        if (status != cudaSuccess) cudaIpcCloseMemHandle(p);
    }
    if (status != cudaSuccess) {
        cudaGetLastError(); /* not sticky */
        return fail(err, HD_EFORMAT, "a CUDA IPC handle that opens nothing here", status);
    }
    *bytes = all - (reinterpret_cast<CUdeviceptr>(p) - start);
    *out = p;
    return HD_OK;
}

void close_shared(hd_device *base, const void *p) {
    cudaSetDevice(reinterpret_cast<cuda_device *>(base)->ordinal);
    cudaIpcCloseMemHandle(const_cast<void *>(p));
}

void wait_shared(hd_stream *s, const uint8_t *event) {
    cudaIpcEventHandle_t h;
    cudaEvent_t opened = nullptr;
    memcpy(&h, event, sizeof h);
    cudaStream_t queue = hd_cuda_stream(s);
    cudaError_t status = cudaIpcOpenEventHandle(&opened, h);
    if (status == cudaSuccess) {
        status = cudaStreamWaitEvent(queue, opened, 0);
        cudaEventDestroy(opened);
    }
    if (status != cudaSuccess) cudaGetLastError();
    note(s, "an event of another process", status);
}

bool is_same(const hd_device *base, const hd_device *other) {
    return reinterpret_cast<const cuda_device *>(base)->ordinal ==
           reinterpret_cast<const cuda_device *>(other)->ordinal;
}

/* Pages are shown to each GPU by name, those to come (readers) and those that there are. */
cudaError_t show_pages(cuda_device *to_read, int reader) {
    cudaError_t status = cudaSuccess;
    pthread_mutex_lock(&to_read->lock);
    to_read->readers |= UINT64_C(1) << reader;
    for (size_t i = 0; i < to_read->n_blocks && status == cudaSuccess; i++) {
        const cuda_pages *p = &to_read->blocks[i].pages;
        if (p->mapped) status = cuda_pages_show(p, reader);
    }
    pthread_mutex_unlock(&to_read->lock);
    return status;
}

hd_status enable_peer_access(hd_device *base, hd_device *other_base, hd_err *err) {
    cuda_device *to_read = reinterpret_cast<cuda_device *>(other_base);
    const int own = reinterpret_cast<cuda_device *>(base)->ordinal, other = to_read->ordinal;
    int can = 0;
    if (own == other) return HD_OK;
    cudaDeviceCanAccessPeer(&can, own, other);
    if (!can) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "GPU %d cannot read the memory of GPU %d", own,
                       other);
    }
    cudaSetDevice(own);
    cudaError_t status = cudaDeviceEnablePeerAccess(other, 0);
    if (status == cudaErrorPeerAccessAlreadyEnabled) {
        cudaGetLastError();
        status = cudaSuccess;
    }
    if (status == cudaSuccess) status = show_pages(to_read, own);
    return status == cudaSuccess ? HD_OK
                                 : fail(err, HD_EDEVICE, "memory of another GPU", status);
}

/* ---- streams ---- */

void close_stream(hd_stream *base) {
    cuda_stream *s = stream_of(base);
    cudaSetDevice(device_of(base)->ordinal);
    if (s->queue) cudaStreamSynchronize(s->queue);
    for (cudaEvent_t e : s->sent) {
        if (e) cudaEventDestroy(e);
    }
    if (s->queue) cudaStreamDestroy(s->queue);
    hd_thread_pool_close(s->fillers);
    hd_device_release(base->device, s->pieces);
    hd_device_release(base->device, base->scratch);
    free(s);
}

hd_status open_parts(cuda_stream *s, bool urgent, hd_err *err) {
    void *pieces;
    int least, greatest;
    HD_TRY(hd_device_alloc_host(s->base.device, &pieces, PIECES * PIECE_BYTES, "upload ring",
                                err));
    s->pieces = static_cast<uint8_t *>(pieces);
    const int32_t cores = hd_cores_count();
    HD_TRY(hd_thread_pool_open(&s->fillers, cores < MAX_FILLERS ? cores : MAX_FILLERS, false,
                               err));
    cudaError_t status = cudaDeviceGetStreamPriorityRange(&least, &greatest);
    if (status == cudaSuccess) {
        status = cudaStreamCreateWithPriority(&s->queue, cudaStreamNonBlocking,
                                              urgent ? greatest : least);
    }
    for (int i = 0; i < PIECES && status == cudaSuccess; i++) {
        status = cudaEventCreateWithFlags(&s->sent[i], cudaEventDisableTiming);
    }
    return status == cudaSuccess ? HD_OK : fail(err, HD_EDEVICE, "a stream", status);
}

hd_status open_stream(hd_stream **out, hd_device *base, bool urgent, hd_err *err) {
    cuda_device *d = reinterpret_cast<cuda_device *>(base);
    cuda_stream *s = static_cast<cuda_stream *>(calloc(1, sizeof *s));
    if (!s) return HD_FAIL(err, HD_ENOMEM, "no memory for a stream");
    s->base.device = base;
    s->base.workers = d->n_sms * BLOCKS_PER_SM;
    hd_status st = open_parts(s, urgent, err);
    if (st != HD_OK) {
        close_stream(&s->base);
        return st;
    }
    *out = &s->base;
    return HD_OK;
}

/* The next pieces of the ring and their source. */
struct filling {
    uint8_t *piece[FILLED_AT_ONCE];
    const uint8_t *from;
    size_t bytes; /* total bytes */
};

size_t bytes_of(const filling &f, int32_t i) {
    const size_t behind = f.bytes - (size_t)i * PIECE_BYTES;
    return behind < PIECE_BYTES ? behind : PIECE_BYTES;
}

void fill_piece(const void *arg, int32_t i, int32_t) {
    const filling &f = *static_cast<const filling *>(arg);
    memcpy(f.piece[i], f.from + (size_t)i * PIECE_BYTES, bytes_of(f, i));
}

/* Uploads at most FILLED_AT_ONCE pieces; returns the bytes uploaded. */
size_t upload_some(hd_stream *base, uint8_t *to, const uint8_t *from, size_t bytes) {
    cuda_stream *s = stream_of(base);
    const size_t most = FILLED_AT_ONCE * PIECE_BYTES;
    filling f = {{}, from, bytes < most ? bytes : most};
    const int first = s->next, n = (int)((f.bytes + PIECE_BYTES - 1) / PIECE_BYTES);
    for (int i = 0; i < n; i++) {
        const int at = (first + i) % PIECES;
        f.piece[i] = s->pieces + (size_t)at * PIECE_BYTES;
        /* wait until its last copy is done */
        note(base, "upload", cudaEventSynchronize(s->sent[at]));
    }
    if (n == 1) {
        fill_piece(&f, 0, 0);
    } else {
        hd_thread_pool_run(s->fillers, n, fill_piece, &f);
    }
    for (int i = 0; i < n; i++) {
        note(base, "upload",
             cudaMemcpyAsync(to + (size_t)i * PIECE_BYTES, f.piece[i], bytes_of(f, i),
                             cudaMemcpyDefault, s->queue)); /* Engram tables: to the host */
        note(base, "upload", cudaEventRecord(s->sent[(first + i) % PIECES], s->queue));
    }
    s->next = (first + n) % PIECES;
    return f.bytes;
}

void upload(hd_stream *base, void *device, const void *host, size_t bytes) {
    const uint8_t *from = static_cast<const uint8_t *>(host);
    uint8_t *to = static_cast<uint8_t *>(device);
    cudaSetDevice(device_of(base)->ordinal);
    for (size_t done = 0; done < bytes;) {
        done += upload_some(base, to + done, from + done, bytes - done);
    }
}

void download(hd_stream *base, void *host, const void *device, size_t bytes) {
    cudaStream_t queue = hd_cuda_stream(base);
    note(base, "download", cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, queue));
}

void copy(hd_stream *base, void *to, const void *from, size_t bytes) {
    cudaStream_t queue = hd_cuda_stream(base);
    note(base, "copy", cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, queue));
}

void wait_all(hd_stream *base) {
    note(base, "the GPU", cudaStreamSynchronize(hd_cuda_stream(base)));
}

hd_status reserve(hd_stream *base, size_t bytes_per_worker, hd_err *err) {
    const size_t each = (bytes_per_worker + 255) / 256 * 256;
    void *scratch;
    hd_device_release(base->device, base->scratch);
    base->scratch = nullptr;
    base->scratch_each = 0;
    HD_TRY(hd_device_alloc(base->device, &scratch, each * (size_t)base->workers, "op scratch",
                           err));
    base->scratch = static_cast<uint8_t *>(scratch);
    base->scratch_each = each;
    return HD_OK;
}

/* ---- random fill ---- */

constexpr int RANDOM_FILL_BLOCK = 256, RANDOM_FILL_BLOCKS_PER_SM = 8;

void clear(hd_stream *base, void *device, size_t bytes) {
    note(base, "clear", cudaMemsetAsync(device, 0, bytes, hd_cuda_stream(base)));
}

__global__ void make_random_fill(uint64_t *to, size_t n, hd_random_fill random_fill) {
    const size_t step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        to[i] = hd_random_fill_word(&random_fill, i);
    }
}

void random_fill(hd_stream *s, void *device, size_t bytes, const hd_random_fill *random_fill) {
    const size_t n = (bytes + sizeof(uint64_t) - 1) / sizeof(uint64_t);
    const size_t most = (size_t)device_of(s)->n_sms * RANDOM_FILL_BLOCKS_PER_SM;
    const size_t blocks = (n + RANDOM_FILL_BLOCK - 1) / RANDOM_FILL_BLOCK;
    make_random_fill<<<(unsigned)(blocks < most ? blocks : most), RANDOM_FILL_BLOCK, 0,
                       hd_cuda_stream(s)>>>(static_cast<uint64_t *>(device), n, *random_fill);
    note(s, "random fill", cudaGetLastError());
}

/* ---- checksums ---- */

/* Few, so that they leave room for the steps beside them. */
constexpr int CHECKSUM_THREADS = 128, CHECKSUM_BLOCKS = 32;

__global__ void sum_blocks(unsigned long long *sum, uint64_t first, const uint8_t *data,
                           size_t bytes) {
    const size_t n = (bytes + HD_CHECKSUM_BLOCK - 1) / HD_CHECKSUM_BLOCK;
    const size_t step = (size_t)gridDim.x * blockDim.x;
    unsigned long long own = 0;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        const size_t at = i * HD_CHECKSUM_BLOCK, left = bytes - at;
        own += hd_checksum(first + i, data + at,
                           left < HD_CHECKSUM_BLOCK ? left : HD_CHECKSUM_BLOCK);
    }
    if (own) atomicAdd(sum, own);
}

void checksum(hd_stream *s, uint64_t *sum, uint64_t first, const void *device, size_t bytes) {
    cudaStream_t queue = hd_cuda_stream(s);
    static_assert(sizeof(unsigned long long) == sizeof *sum, "an atomic sum of 64 bits");
    sum_blocks<<<CHECKSUM_BLOCKS, CHECKSUM_THREADS, 0, queue>>>(
        reinterpret_cast<unsigned long long *>(sum), first,
        static_cast<const uint8_t *>(device), bytes);
    note(s, "a checksum", cudaGetLastError());
}

/* ---- events ---- */

hd_status open_device_event(hd_device_event **out, hd_device *base, bool timed, hd_err *err) {
    cuda_mark *m = static_cast<cuda_mark *>(calloc(1, sizeof *m));
    if (!m) return HD_FAIL(err, HD_ENOMEM, "no memory for a mark");
    m->base.device = base;
    cudaSetDevice(reinterpret_cast<cuda_device *>(base)->ordinal);
    const unsigned flags = timed ? cudaEventDefault : cudaEventDisableTiming;
    const cudaError_t status = cudaEventCreateWithFlags(&m->event, flags);
    if (status != cudaSuccess) {
        free(m);
        return fail(err, HD_EDEVICE, "a mark", status);
    }
    *out = &m->base;
    return HD_OK;
}

void close_device_event(hd_device_event *base) {
    cuda_mark *m = reinterpret_cast<cuda_mark *>(base);
    cudaEventDestroy(m->event);
    free(m);
}

void set_device_event(hd_stream *s, hd_device_event *base) {
    cuda_mark *m = reinterpret_cast<cuda_mark *>(base);
    note(s, "a mark", cudaEventRecord(m->event, hd_cuda_stream(s)));
}

void wait_for(hd_stream *s, hd_device_event *base) {
    cuda_mark *m = reinterpret_cast<cuda_mark *>(base);
    note(s, "the GPU", cudaEventSynchronize(m->event));
}

/* In a capture this is an edge of the graph, and s joins the capture. */
void wait_event(hd_stream *s, const hd_device_event *base) {
    const cuda_mark *m = reinterpret_cast<const cuda_mark *>(base);
    note(s, "waiting for a stream", cudaStreamWaitEvent(hd_cuda_stream(s), m->event, 0));
}

/* One that failed is done: waiting for its stream says so. */
bool event_is_done(hd_device_event *base) {
    cuda_mark *m = reinterpret_cast<cuda_mark *>(base);
    cudaSetDevice(reinterpret_cast<cuda_device *>(base->device)->ordinal);
    if (cudaEventQuery(m->event) != cudaErrorNotReady) return true;
    cudaGetLastError(); /* that it is not ready is no error */
    return false;
}

double event_seconds(const hd_device_event *from, const hd_device_event *to) {
    float ms = 0;
    cudaEventElapsedTime(&ms, reinterpret_cast<const cuda_mark *>(from)->event,
                         reinterpret_cast<const cuda_mark *>(to)->event);
    return (double)ms * 1e-3;
}

__global__ void spin(uint64_t ns) {
    const uint64_t begun = hd_cuda_clock_ns();
    while (hd_cuda_clock_ns() - begun < ns) {
    }
}

void busy(hd_stream *s, int32_t microseconds) {
    spin<<<1, 1, 0, hd_cuda_stream(s)>>>((uint64_t)microseconds * 1000);
    note(s, "busy", cudaGetLastError());
}

/* ---- graphs ---- */

void record(hd_stream *s) {
    note(s, "recording",
         cudaStreamBeginCapture(hd_cuda_stream(s), cudaStreamCaptureModeThreadLocal));
}

hd_status recorded(hd_stream *s, hd_graph **out, hd_err *err) {
    cudaGraph_t ops = nullptr;
    cudaGraphExec_t exec = nullptr;
    cudaError_t status = cudaStreamEndCapture(hd_cuda_stream(s), &ops);
    const size_t free_before = free_bytes(s->device);
    size_t nodes = 0;
    if (status == cudaSuccess) status = cudaGraphGetNodes(ops, nullptr, &nodes);
    if (status == cudaSuccess) status = cudaGraphInstantiate(&exec, ops, 0);
    if (ops) cudaGraphDestroy(ops);
    if (status == cudaSuccess) status = cudaGraphUpload(exec, hd_cuda_stream(s));
    cuda_graph *g = nullptr;
    if (status == cudaSuccess) g = static_cast<cuda_graph *>(calloc(1, sizeof *g));
    if (!g) {
        if (exec) cudaGraphExecDestroy(exec);
        if (status == cudaSuccess) return HD_FAIL(err, HD_ENOMEM, "no memory for a graph");
        cudaGetLastError();
        return fail(err, HD_EDEVICE, "recording a step", status);
    }
    const size_t free_after = free_bytes(s->device);
    g->base.device = s->device;
    g->base.bytes = free_before > free_after ? free_before - free_after : 0;
    g->base.launches = (int32_t)nodes;
    g->exec = exec;
    *out = &g->base;
    return HD_OK;
}

void close_graph(hd_graph *base) {
    cuda_graph *g = reinterpret_cast<cuda_graph *>(base);
    cudaSetDevice(reinterpret_cast<cuda_device *>(base->device)->ordinal);
    cudaGraphExecDestroy(g->exec);
    free(g);
}

void launch(hd_stream *s, const hd_graph *base) {
    const cuda_graph *g = reinterpret_cast<const cuda_graph *>(base);
    note(s, "a recorded step", cudaGraphLaunch(g->exec, hd_cuda_stream(s)));
}

const backend_table table = {
    .close = close_device,
    .alloc = alloc,
    .read_host = read_host,
    .pin_host = pin_host,
    .free_bytes = free_bytes,
    .release = release,
    .keep_addresses = keep_addresses,
    .discard = discard,
    .restore = restore,
    .share = share,
    .end_sharing = end_sharing,
    .check_access = check_access,
    .open_shared = open_shared,
    .close_shared = close_shared,
    .wait_shared = wait_shared,
    .is_same = is_same,
    .enable_peer_access = enable_peer_access,
    .open_stream = open_stream,
    .close_stream = close_stream,
    .upload = upload,
    .download = download,
    .wait = wait_all,
    .reserve = reserve,
    .open_device_event = open_device_event,
    .close_device_event = close_device_event,
    .device_event = set_device_event,
    .wait_for = wait_for,
    .wait_event = wait_event,
    .event_is_done = event_is_done,
    .event_seconds = event_seconds,
    .busy = busy,
    .record = record,
    .recorded = recorded,
    .close_graph = close_graph,
    .launch = launch,
    .copy = copy,
    .clear = clear,
    .random_fill = random_fill,
    .checksum = checksum,
    .host_memory = false,
};

} // namespace

cudaStream_t hd_cuda_stream(hd_stream *s) {
    current = device_of(s);
    cudaSetDevice(current->ordinal);
    return stream_of(s)->queue;
}

bool hd_cuda_is_sm90(void) {
    return current->base.cuda_path == HD_CUDA_SM90;
}

bool hd_cuda_overlaps_launches(void) {
    return current->overlaps;
}

/* On a GPU that has more than generic kernels may use. */
static bool is_beyond_generic(const void *kernel, size_t bytes) {
    cudaFuncAttributes a = {};
    if (hd_cuda_is_sm90()) return false;
    cudaFuncGetAttributes(&a, kernel);
    return a.sharedSizeBytes + bytes > HD_CUDA_SHARED_GENERIC;
}

/* By kernel and GPU, at the place of their hash or behind it. */
static struct {
    const void *kernel;
    int gpu;
    size_t bytes;
} allowed[1 << 12];
static pthread_mutex_t allowing = PTHREAD_MUTEX_INITIALIZER;

void hd_cuda_allow_shared(const void *kernel, size_t bytes) {
    constexpr size_t N = sizeof allowed / sizeof allowed[0];
    int gpu = 0;
    cudaGetDevice(&gpu);
    size_t at = ((uintptr_t)kernel / 16 + (size_t)gpu * 61) % N, seen = 1;
    pthread_mutex_lock(&allowing);
    while (seen < N && allowed[at].kernel &&
           (allowed[at].kernel != kernel || allowed[at].gpu != gpu)) {
        at = (at + 1) % N;
        seen++;
    }
    const bool is_known = allowed[at].kernel == kernel && allowed[at].gpu == gpu;
    if ((!is_known || allowed[at].bytes < bytes) && !is_beyond_generic(kernel, bytes)) {
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                             cudaSharedmemCarveoutMaxShared);
        allowed[at] = {kernel, gpu, bytes};
    }
    pthread_mutex_unlock(&allowing);
}

void hd_cuda_attach(hd_device *base, void *thing, void (*close)(void *thing)) {
    cuda_device *d = reinterpret_cast<cuda_device *>(base);
    d->kept = thing;
    d->close_kept = close;
}

void *hd_cuda_attached(hd_stream *s) {
    return device_of(s)->kept;
}

void hd_cuda_check(hd_stream *s, const char *op) {
    note(s, op, cudaGetLastError());
}

extern "C" hd_status hd_device_open_cuda(hd_device **out, int32_t ordinal, hd_cuda_path path,
                                         hd_err *err) {
    int n = 0, major = 0, minor = 0;
    *out = nullptr;
    hd_cuda_begin();
    cudaError_t status = cudaGetDeviceCount(&n);
    if (status != cudaSuccess || n == 0) {
        cudaGetLastError();
        return HD_FAIL(err, HD_EDEVICE, "no CUDA device: %s",
                       status == cudaSuccess ? "none is shown" : cudaGetErrorString(status));
    }
    if (ordinal < 0 || ordinal >= n) {
        return HD_FAIL(err, HD_EINVAL, "no CUDA device %d: there are %d", ordinal, n);
    }
    cuda_device *d = static_cast<cuda_device *>(calloc(1, sizeof *d));
    if (!d) return HD_FAIL(err, HD_ENOMEM, "no memory for a device");
    d->base.table = &table;
    d->ordinal = ordinal;
    status = cudaSetDevice(ordinal);
    if (status == cudaSuccess) status = cudaFree(nullptr); /* creates the context */
    cudaDeviceGetAttribute(&d->n_sms, cudaDevAttrMultiProcessorCount, ordinal);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal);
    if (status != cudaSuccess) {
        free(d);
        return fail(err, HD_EDEVICE, "the GPU does not open", status);
    }
    d->overlaps = major >= 9;
    d->base.cuda_path = path;
    const hd_status st =
        hd_cuda_path_choose(&d->base.cuda_path, hd_cuda_archs(), ordinal, major, minor, err);
    if (st != HD_OK) {
        free(d);
        return st;
    }
    pthread_mutex_init(&d->lock, nullptr);
    *out = &d->base;
    return HD_OK;
}
