/* ipc_device.c - see ipc_device.h. */
#define _GNU_SOURCE
#include "fakes/ipc_device.h"

#include <assert.h>
#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/status.h"
#include "comm/tree_sum.h"
#include "device/device_internal.h"
#include "ops/ref/ref_internal.h"
#include "ops/rows.h"

/* ---- memory ---- */

enum { MAX_BLOCKS = 256, GPU = 7 };

typedef struct shared_handle {
    int32_t pid, fd;
    uint64_t bytes;
} shared_handle;

static struct {
    void *at;
    const hd_device *owner;
    size_t bytes;
    int fd;
    bool shared, released;
} blocks[MAX_BLOCKS];

static struct {
    const void *at;
    size_t bytes;
} opened[MAX_BLOCKS];

static backend_table table;
static const backend_table *cpu;

static int32_t find(const void *p) {
    for (int32_t i = 0; i < MAX_BLOCKS; i++) {
        if (blocks[i].at == p) return i;
    }
    return -1;
}

static hd_status alloc(hd_device *d, void **out, size_t bytes, bool on_host, const char *what,
                       hd_err *err) {
    if (on_host) return cpu->alloc(d, out, bytes, on_host, what, err);
    const int32_t i = find(NULL);
    const int fd = i < 0 ? -1 : memfd_create(what, MFD_CLOEXEC);
    void *at = MAP_FAILED;
    if (fd >= 0 && ftruncate(fd, (off_t)bytes) == 0)
        at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) return HD_FAIL(err, HD_ENOMEM, "%s: full", what);
    blocks[i].at = *out = at;
    blocks[i].owner = d;
    blocks[i].bytes = bytes;
    blocks[i].fd = fd;
    blocks[i].shared = blocks[i].released = false;
    return HD_OK;
}

static void free_block(int32_t i) {
    munmap(blocks[i].at, blocks[i].bytes);
    close(blocks[i].fd);
    blocks[i].at = NULL;
}

static void release(hd_device *d, void *p) {
    const int32_t i = find(p);
    if (i < 0) {
        cpu->release(d, p);
        return;
    }
    blocks[i].released = true;
    if (!blocks[i].shared) free_block(i);
}

static hd_status share(hd_device *d, void *p, uint8_t *handle, uint8_t *gpu, hd_err *err) {
    const int32_t i = find(p);
    (void)d;
    if (i < 0) return HD_FAIL(err, HD_EINVAL, "no block");
    blocks[i].shared = true;
    const shared_handle h = {getpid(), blocks[i].fd, blocks[i].bytes};
    memset(handle, 0, HD_SHARED_HANDLE_BYTES);
    memcpy(handle, &h, sizeof h);
    memset(gpu, GPU, HD_GPU_ID_BYTES);
    return HD_OK;
}

static void end_sharing(hd_device *d) {
    for (int32_t i = 0; i < MAX_BLOCKS; i++) {
        const bool own = blocks[i].at && blocks[i].owner == d;
        if (own && blocks[i].shared && blocks[i].released) free_block(i);
    }
}

static void close_device(hd_device *d) {
    for (int32_t i = 0; i < MAX_BLOCKS; i++) {
        if (blocks[i].at && blocks[i].owner == d) free_block(i);
    }
    cpu->close(d);
}

/* Its operators are a CPU's. */
static hd_status read_host(hd_device *d, const void *host, size_t bytes, hd_err *err) {
    (void)d, (void)host, (void)bytes, (void)err;
    return HD_OK;
}

static hd_status check_access(const hd_device *d, const uint8_t *gpu, hd_err *err) {
    (void)d;
    return gpu[0] == GPU
               ? HD_OK
               : HD_FAIL(err, HD_EUNSUPPORTED, "GPU 0 cannot read the memory of GPU 1");
}

static hd_status open_shared(hd_device *d, const void **out, size_t *bytes,
                             const uint8_t *handle, hd_err *err) {
    shared_handle h;
    char path[64];
    int32_t i = 0;
    (void)d;
    memcpy(&h, handle, sizeof h);
    snprintf(path, sizeof path, "/proc/%d/fd/%d", h.pid, h.fd);
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    void *at =
        fd < 0 ? MAP_FAILED : mmap(NULL, h.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd >= 0) close(fd);
    while (i < MAX_BLOCKS && opened[i].at) i++;
    if (at == MAP_FAILED || i == MAX_BLOCKS) return HD_FAIL(err, HD_EFORMAT, "opens nothing");
    opened[i].at = *out = at;
    opened[i].bytes = *bytes = h.bytes;
    return HD_OK;
}

static void close_shared(hd_device *d, const void *p) {
    (void)d;
    for (int32_t i = 0; i < MAX_BLOCKS; i++) {
        if (opened[i].at != p) continue;
        munmap((void *)(uintptr_t)p, opened[i].bytes);
        opened[i].at = NULL;
    }
}

int32_t ipc_device_blocks(void) {
    int32_t n = 0;
    for (int32_t i = 0; i < MAX_BLOCKS; i++) n += blocks[i].at != NULL;
    return n;
}

int32_t ipc_device_opened(void) {
    int32_t n = 0;
    for (int32_t i = 0; i < MAX_BLOCKS; i++) n += opened[i].at != NULL;
    return n;
}

hd_device *ipc_device_open(void) {
    hd_device *d;
    if (hd_device_open_cpu(&d, &(hd_cpu_options){.n_threads = 1}, NULL) != HD_OK) return NULL;
    cpu = d->table;
    table = *cpu;
    table.close = close_device;
    table.read_host = table.pin_host = read_host;
    table.alloc = alloc;
    table.release = release;
    table.share = share;
    table.end_sharing = end_sharing;
    table.check_access = check_access;
    table.open_shared = open_shared;
    table.close_shared = close_shared;
    table.host_memory = false;
    d->table = &table;
    return d;
}

/* ---- exchanges ---- */

enum { RANKS = HD_EXCHANGE_MAX_RANKS, REGION = 1 << 14 };

typedef struct pointers {
    const float *rows, *weight;
    const int32_t *offset, *assignment;
} pointers;

typedef struct rank_memory {
    struct {
        _Atomic uint32_t came[RANKS];
        uint32_t ticket;
        pointers from[2][RANKS];
    } at[HD_EXCHANGE_GROUPS];
    bool over; /* this rank has given up an exchange, and makes no other */
    int32_t in_first[HD_EXCHANGE_INFLIGHT][HD_EXCHANGE_SLOTS];
    float region[HD_EXCHANGE_GROUPS][2][RANKS][REGION];
} rank_memory;

static rank_memory *memory_of(const hd_exchange_peers *p, int32_t k) {
    return p->memory[k];
}

static const void *at_member(const hd_exchange_peers *p, int32_t k, const void *of_member) {
    return (const char *)of_member + p->shift[k];
}

/* False: the exchange is given up. */
static bool sync_members(const hd_exchange_peers *p, uint32_t ticket) {
    rank_memory *own = memory_of(p, p->index);
    own->over = true; /* until all have come */
    for (int32_t k = 0; k < p->n; k++) {
        atomic_store(&memory_of(p, k)->at[p->group].came[p->index], ticket);
    }
    for (int32_t k = 0; k < p->n; k++) {
        while ((int32_t)(atomic_load(&own->at[p->group].came[k]) - ticket) < 0) {
            if (__atomic_load_n(&p->state->ended, __ATOMIC_SEQ_CST)) return false;
            sched_yield();
        }
    }
    own->at[p->group].ticket = ticket;
    own->over = false;
    return true;
}

static bool is_over(const hd_exchange_peers *p) {
    return memory_of(p, p->index)->over;
}

static uint32_t next_ticket(const hd_exchange_peers *p) {
    return memory_of(p, p->index)->at[p->group].ticket + 1;
}

/* Where member `from` puts what it has for member k. */
static float *region(const hd_exchange_peers *p, int32_t k, int32_t from, uint32_t ticket) {
    return memory_of(p, k)->region[p->group][ticket % 2][from];
}

/* Elements first .. first + n - 1, at most REGION. False: given up. */
static bool gather_some(const hd_exchange_peers *p, const hd_exchange_gather_args *a,
                        int64_t first, int64_t n) {
    const uint32_t ticket = next_ticket(p);
    for (int32_t k = 0; k < p->n; k++) {
        for (int64_t i = 0; i < n; i++) {
            const int64_t col = (first + i) % a->cols - a->first;
            if (k != p->index && col >= 0 && col < a->own)
                region(p, k, 0, ticket)[i] = a->x[first + i];
        }
    }
    if (!sync_members(p, ticket)) return false;
    for (int64_t i = 0; i < n && p->n > 1; i++) {
        const int64_t col = (first + i) % a->cols - a->first;
        if (col < 0 || col >= a->own) a->x[first + i] = region(p, p->index, 0, ticket)[i];
    }
    return true;
}

static void gather(hd_stream *s, const hd_exchange_peers *p, const hd_exchange_gather_args *a) {
    const int64_t n = (int64_t)a->rows * a->cols;
    (void)s;
    if (is_over(p)) return;
    for (int64_t i = 0; i < n; i += REGION) {
        if (!gather_some(p, a, i, n - i < REGION ? n - i : REGION)) return;
    }
}

static bool sum_some(const hd_exchange_peers *p, float *x, int64_t n) {
    const uint32_t ticket = next_ticket(p);
    const float *terms[RANKS];
    float block[HD_TREE_SUM_BLOCK];
    for (int32_t k = 0; k < p->n; k++) {
        memcpy(region(p, k, p->index, ticket), x, (size_t)n * sizeof *x);
    }
    if (!sync_members(p, ticket)) return false;
    for (int32_t k = 0; k < p->n; k++) terms[k] = region(p, p->index, k, ticket);
    for (int64_t i = 0; i < n; i += HD_TREE_SUM_BLOCK) {
        const int32_t some = n - i < HD_TREE_SUM_BLOCK ? (int32_t)(n - i) : HD_TREE_SUM_BLOCK;
        hd_tree_sum(block, terms, p->n, i, some);
        memcpy(x + i, block, (size_t)some * sizeof *block);
    }
    return true;
}

/* All of it, where a part is asked for: the rest is undefined. */
static void sum(hd_stream *s, const hd_exchange_peers *p, const hd_exchange_sum_args *a) {
    (void)s;
    if (is_over(p)) return;
    for (int64_t i = 0; i < a->n; i += REGION) {
        if (!sum_some(p, a->x + i, a->n - i < REGION ? a->n - i : REGION)) return;
    }
}

static void norm(hd_stream *s, const hd_exchange_peers *p, const hd_exchange_norm_args *a) {
    const hd_add_norm_args *n = &a->norm;
    if (a->sums) {
        const int64_t all = (int64_t)n->rows * n->cols;
        sum(s, p, &(hd_exchange_sum_args){n->y.data, all, 0, all});
    } else {
        gather(s, p, &(hd_exchange_gather_args){n->y.data, n->rows, n->cols, a->first, a->own});
    }
    if (!is_over(p)) hd_add_norm_ref(s, n);
}

static const pointers *exchange_pointers(const hd_exchange_peers *p, pointers own) {
    const uint32_t ticket = next_ticket(p);
    for (int32_t k = 0; k < p->n; k++) {
        memory_of(p, k)->at[p->group].from[ticket % 2][p->index] = own;
    }
    if (!sync_members(p, ticket)) return NULL;
    return memory_of(p, p->index)->at[p->group].from[ticket % 2];
}

/* Of the places from which a member sends to a slot, those of the round. */
static int32_t begin_of(int32_t at, int32_t base, int32_t round, int32_t most) {
    const int64_t begin = base + (int64_t)round * most;
    return at > begin ? at : begin < INT32_MAX ? (int32_t)begin : INT32_MAX;
}

static int32_t end_of(int32_t at, int32_t base, int32_t round, int32_t most) {
    const int64_t end = base + (int64_t)(round + 1) * most;
    return at < end ? at : (int32_t)end;
}

static int32_t count_rows(const hd_exchange_peers *p, const pointers *from,
                          const hd_exchange_dispatch_args *a) {
    int32_t n = 0;
    for (int32_t k = 0; k < p->n; k++) {
        const int32_t *offset = at_member(p, k, from[k].offset);
        const int32_t base = offset[p->index * a->n_slots];
        const int32_t end = offset[(p->index + 1) * a->n_slots];
        const int32_t begin = begin_of(base, base, a->round, a->most[k]);
        const int32_t some = end_of(end, base, a->round, a->most[k]) - begin;
        n += some > 0 ? some : 0;
    }
    return n;
}

static void take_row(const hd_exchange_dispatch_args *a, float *to, const void *x,
                     int64_t row) {
    const hd_group_format format = {.code = HD_E4M3, .group = a->group};
    if (a->group) {
        hd_unpack_row(to, (const uint8_t *)x + row * a->row_bytes, format, a->cols);
    } else {
        memcpy(to, (const float *)x + row * a->cols, (size_t)a->cols * sizeof *to);
    }
}

static void dispatch(hd_stream *s, const hd_exchange_peers *p,
                     const hd_exchange_dispatch_args *a) {
    if (is_over(p)) return;
    const pointers *from =
        exchange_pointers(p, (pointers){a->x, a->weight, a->offset, a->assignment});
    int32_t *first = memory_of(p, p->index)->in_first[a->place], n = 0;
    (void)s;
    if (!from) return;
    const int32_t all = count_rows(p, from, a);
    const bool fits = all <= a->in_rows;
    if (!fits) p->state->too_many = all;
    for (int32_t e = 0; e < a->n_slots; e++) {
        a->in_offset[e] = n;
        for (int32_t k = 0; k < p->n; k++) {
            const int32_t *offset = at_member(p, k, from[k].offset);
            const int32_t *assignment = at_member(p, k, from[k].assignment);
            const float *weight = at_member(p, k, from[k].weight),
                        *x = at_member(p, k, from[k].rows);
            const int32_t slot = p->index * a->n_slots + e;
            const int32_t base = offset[p->index * a->n_slots];
            const int32_t end = end_of(offset[slot + 1], base, a->round, a->most[k]);
            first[e * p->n + k] = fits ? n : -1;
            for (int32_t i = begin_of(offset[slot], base, a->round, a->most[k]);
                 i < end && fits; i++, n++) {
                const int32_t choice = assignment[i];
                a->in_weight[n] = weight[choice];
                take_row(a, a->in_x + (int64_t)n * a->cols, x, choice / a->top_k);
            }
        }
    }
    a->in_offset[a->n_slots] = n;
}

static void combine(hd_stream *s, const hd_exchange_peers *p,
                    const hd_exchange_combine_args *a) {
    if (is_over(p)) return;
    const pointers *from = exchange_pointers(p, (pointers){.rows = a->in_y});
    (void)s;
    if (!from) return;
    for (int32_t q = 0; q < a->n_slots * p->n; q++) {
        const int32_t k = q / a->n_slots, e = q % a->n_slots;
        const int32_t there = memory_of(p, k)->in_first[a->place][e * p->n + p->index];
        const int32_t base = a->offset[k * a->n_slots];
        const int32_t begin = begin_of(a->offset[q], base, a->round, a->most);
        const int32_t n = end_of(a->offset[q + 1], base, a->round, a->most) - begin;
        const float *y = at_member(p, k, from[k].rows);
        if (there < 0 || n <= 0) continue;
        memcpy(a->y + (int64_t)begin * a->cols, y + (int64_t)there * a->cols,
               (size_t)n * (size_t)a->cols * sizeof *y);
    }
}

static void reset(hd_stream *s, void *memory) {
    (void)s;
    memset(memory, 0, sizeof(rank_memory));
}

const hd_exchange_ops ipc_device_exchange = {.bytes = sizeof(rank_memory),
                                             .gather = gather,
                                             .sum = sum,
                                             .norm = norm,
                                             .dispatch = dispatch,
                                             .combine = combine,
                                             .reset = reset};
