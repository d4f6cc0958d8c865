/* device_cpu.c - the CPU device: host memory, and a thread pool that acts as a stream. */
#include <assert.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "device/device.h"
#include "device/device_internal.h"
#include "base/checked.h"
#include "base/checksum.h"
#include "base/memory.h"
#include "base/progress.h"

enum { ALIGN = 256, MAX_BLOCKS = 256 };

typedef struct cpu_device {
    hd_device base;
    hd_thread_pool *pool;
    bool untouched;              /* as in hd_cpu_options */
    hd_block blocks[MAX_BLOCKS]; /* allocated blocks */
} cpu_device;

typedef struct cpu_stream {
    hd_stream base;
    hd_block scratch;
} cpu_stream;

static void close_device(hd_device *base) {
    cpu_device *d = (cpu_device *)base;
    for (int i = 0; i < MAX_BLOCKS; i++) hd_block_deinit(&d->blocks[i]);
    hd_thread_pool_close(d->pool);
    free(d);
}

static hd_status alloc(hd_device *base, void **out, size_t bytes, bool on_host,
                       const char *what, hd_err *err) {
    cpu_device *d = (cpu_device *)base;
    (void)on_host;
    *out = NULL;
    size_t padded;
    if (!hd_add_size(bytes, ALIGN, &padded)) {
        padded = bytes; /* more than exists: refused below, with both numbers */
    }
    for (int i = 0; i < MAX_BLOCKS; i++) {
        hd_block *b = &d->blocks[i];
        if (b->data) continue;
        HD_TRY((d->untouched ? hd_block_init_untouched : hd_block_init)(b, padded, what, err));
        uintptr_t at = (uintptr_t)b->data;
        *out = (uint8_t *)b->data + ((0 - at) & (ALIGN - 1));
        return HD_OK;
    }
    return HD_FAIL(err, HD_ENOMEM, "%s: more than %d blocks of device memory", what,
                   MAX_BLOCKS);
}

static size_t free_bytes(const hd_device *d) {
    (void)d;
    return hd_memory_free();
}

static hd_block *block_of(hd_device *base, const void *p) {
    cpu_device *d = (cpu_device *)base;
    for (int i = 0; i < MAX_BLOCKS; i++) {
        const uint8_t *start = d->blocks[i].data;
        if (start && (const uint8_t *)p >= start && (const uint8_t *)p < start + ALIGN) {
            return &d->blocks[i];
        }
    }
    assert(false && "memory that this device never gave out");
    return NULL;
}

static void release(hd_device *base, void *p) {
    hd_block_deinit(block_of(base, p));
}

static size_t discard(hd_device *base, void *p) {
    return hd_block_discard(block_of(base, p));
}

static hd_status open_stream(hd_stream **out, hd_device *d, bool urgent, hd_err *err) {
    (void)urgent; /* operators are done when they are queued */
    cpu_stream *s = calloc(1, sizeof *s);
    if (!s) return HD_FAIL(err, HD_ENOMEM, "no memory for a stream");
    s->base.device = d;
    s->base.workers = hd_thread_pool_size(((cpu_device *)d)->pool);
    *out = &s->base;
    return HD_OK;
}

static void close_stream(hd_stream *base) {
    cpu_stream *s = (cpu_stream *)base;
    hd_block_deinit(&s->scratch);
    free(s);
}

static void upload(hd_stream *s, void *device, const void *host, size_t bytes) {
    (void)s;
    memcpy(device, host, bytes);
}

static void download(hd_stream *s, void *host, const void *device, size_t bytes) {
    (void)s;
    memcpy(host, device, bytes);
}

static void wait_for_nothing(hd_stream *s) {
    (void)s;
}

static hd_status reserve(hd_stream *base, size_t bytes_per_worker, hd_err *err) {
    cpu_stream *s = (cpu_stream *)base;
    size_t each, all;
    if (!hd_align_size(bytes_per_worker, HD_CACHE_LINE, &each) ||
        !hd_mul_size(each, (size_t)base->workers, &all)) {
        return HD_FAIL(err, HD_ENOMEM, "op scratch of %zu bytes per worker", bytes_per_worker);
    }
    hd_block_deinit(&s->scratch);
    base->scratch = NULL;
    base->scratch_each = 0;
    HD_TRY(hd_block_init(&s->scratch, all, "op scratch", err));
    base->scratch = s->scratch.data;
    base->scratch_each = each;
    return HD_OK;
}

/* ---- random fill ---- */

enum { RANDOM_FILL_WORDS = 1 << 17 }; /* words of a task */

static void clear(hd_stream *s, void *device, size_t bytes) {
    (void)s;
    memset(device, 0, bytes);
}

typedef struct random_fill_job {
    uint64_t *to;
    size_t n;
    hd_random_fill random_fill;
} random_fill_job;

static void make_random_fill(const void *arg, int32_t task, int32_t worker) {
    const random_fill_job *job = arg;
    const size_t first = (size_t)task * RANDOM_FILL_WORDS;
    const size_t end = job->n - first < RANDOM_FILL_WORDS ? job->n : first + RANDOM_FILL_WORDS;
    (void)worker;
    for (size_t i = first; i < end; i++) job->to[i] = hd_random_fill_word(&job->random_fill, i);
}

static void random_fill(hd_stream *s, void *device, size_t bytes,
                        const hd_random_fill *random_fill) {
    const random_fill_job job = {device, (bytes + sizeof(uint64_t) - 1) / sizeof(uint64_t),
                                 *random_fill};
    hd_stream_tasks(s, (int32_t)((job.n + RANDOM_FILL_WORDS - 1) / RANDOM_FILL_WORDS),
                    make_random_fill, &job);
}

static void checksum(hd_stream *s, uint64_t *sum, uint64_t first, const void *device,
                     size_t bytes) {
    (void)s;
    *sum += hd_checksum_blocks(first, device, bytes);
}

/* ---- events: everything before one is done when it is recorded, so it is a time ---- */

/* Streams of several threads may share an event: who reads the time also sees the memory that
 * was written before it. */
typedef struct cpu_device_event {
    hd_device_event base;
    _Atomic int64_t ns;
} cpu_device_event;

static hd_status open_device_event(hd_device_event **out, hd_device *d, bool timed,
                                   hd_err *err) {
    (void)timed;
    cpu_device_event *m = calloc(1, sizeof *m);
    if (!m) return HD_FAIL(err, HD_ENOMEM, "no memory for a mark");
    m->base.device = d;
    *out = &m->base;
    return HD_OK;
}

static void close_device_event(hd_device_event *m) {
    free(m);
}

static void set_device_event(hd_stream *s, hd_device_event *m) {
    (void)s;
    atomic_store_explicit(&((cpu_device_event *)m)->ns, hd_now_ns(), memory_order_release);
}

static int64_t time_of(const hd_device_event *m) {
    return atomic_load_explicit(&((const cpu_device_event *)m)->ns, memory_order_acquire);
}

static void wait_event(hd_stream *s, const hd_device_event *m) {
    (void)s;
    (void)time_of(m);
}

static void wait_for_device_event(hd_stream *s, hd_device_event *m) {
    wait_event(s, m);
}

static bool event_is_done(hd_device_event *m) {
    (void)time_of(m);
    return true;
}

static double event_seconds(const hd_device_event *from, const hd_device_event *to) {
    return (double)(time_of(to) - time_of(from)) * 1e-9;
}

static void busy(hd_stream *s, int32_t microseconds) {
    (void)s;
    (void)microseconds;
}

static const backend_table table = {
    .close = close_device,
    .alloc = alloc,
    .free_bytes = free_bytes,
    .release = release,
    .discard = discard,
    .open_stream = open_stream,
    .close_stream = close_stream,
    .upload = upload,
    .download = download,
    .wait = wait_for_nothing,
    .reserve = reserve,
    .open_device_event = open_device_event,
    .close_device_event = close_device_event,
    .device_event = set_device_event,
    .wait_for = wait_for_device_event,
    .wait_event = wait_event,
    .event_is_done = event_is_done,
    .event_seconds = event_seconds,
    .copy = upload, /* host and device memory are the same */
    .clear = clear,
    .random_fill = random_fill,
    .checksum = checksum,
    .busy = busy,
    .host_memory = true,
};

hd_status hd_device_open_cpu(hd_device **out, const hd_cpu_options *options, hd_err *err) {
    *out = NULL;
    cpu_device *d = calloc(1, sizeof *d);
    if (!d) return HD_FAIL(err, HD_ENOMEM, "no memory for a device");
    d->base.table = &table;
    d->untouched = options->untouched;
    hd_status st = hd_thread_pool_open(&d->pool, options->n_threads, options->pin, err);
    if (st != HD_OK) {
        close_device(&d->base);
        return st;
    }
    *out = &d->base;
    return HD_OK;
}

void hd_device_bind_thread(const hd_device *d) {
    if (d->table == &table) hd_thread_pool_bind_owner(((const cpu_device *)d)->pool);
}

void hd_stream_tasks(hd_stream *s, int32_t n_tasks, hd_task_fn *fn, const void *arg) {
    hd_thread_pool_run(((cpu_device *)s->device)->pool, n_tasks, fn, arg);
}
