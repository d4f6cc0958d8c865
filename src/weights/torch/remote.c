/* remote.c - see remote_internal.h. */
#include "weights/torch/remote_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/checked.h"
#include "base/shared_count.h"

/* PyTorch puts a count of users before a storage's bytes. Counts of users of a GPU's memory lie
 * behind such a head, too. */
enum { MAX_TENSORS = 1000000, MAX_NAME = 1024, MAX_SHM = 255, HEADER = 64, ALIGN = 256 };

const torch_dtype torch_dtypes[] = {
    {"float32",          "F32",     HD_F32,  4},
    {"float16",          "F16",     HD_F16,  2},
    {"bfloat16",         "BF16",    HD_BF16, 2},
    {"float8_e4m3fn",    "F8_E4M3", HD_E4M3, 1},
    {"float8_e8m0fnu",   "F8_E8M0", HD_E8M0, 1},
    {"float4_e2m1fn_x2", "U8",      HD_U8,   1}, /* a byte of two elements, as in files */
    {"uint8",            "U8",      HD_U8,   1},
    {"int8",             "I8",      HD_I8,   1},
    {"int32",            "I32",     HD_I32,  4},
    {"int64",            "I64",     HD_I64,  8},
    {"float64",          "F64",     HD_NONE, 8},
};
const size_t torch_n_dtypes = HD_LEN(torch_dtypes);

hd_status torch_refuse(const torch_remotes *r, const char *name, const char *why) {
    return HD_FAIL(r->err, HD_EFORMAT, "update: tensor %.200s: %s", name, why);
}

/* ---- the list ---- */

static hd_status make_room(torch_remotes *r) {
    if (r->n < r->cap) return HD_OK;
    const size_t cap = r->cap ? 2 * r->cap : 64;
    torch_remote *more = realloc(r->list, cap * sizeof *more);
    if (more) r->list = more;
    char **names = more ? realloc(r->names, cap * sizeof *names) : NULL;
    if (names) r->names = names;
    if (!names) return HD_FAIL(r->err, HD_ENOMEM, "no memory for %zu tensors", cap);
    r->cap = cap;
    return HD_OK;
}

hd_status torch_remotes_add(torch_remotes *r, torch_remote **out, torch_text name) {
    if (!name.at || name.n == 0 || name.n > MAX_NAME) {
        return torch_refuse(r, "(without one)", "bad name: must be a text of 1 to 1024 bytes");
    }
    for (size_t i = 0; i < name.n; i++) {
        if ((unsigned char)name.at[i] < 0x20) {
            return torch_refuse(r, "(unreadable)", "bad name: contains control characters");
        }
    }
    if (r->n == MAX_TENSORS) return torch_refuse(r, "(any)", "too many tensors");
    HD_TRY(make_room(r));
    char *copy = calloc(1, name.n + 1);
    if (!copy) return HD_FAIL(r->err, HD_ENOMEM, "no memory for a tensor's name");
    r->names[r->n] = memcpy(copy, name.at, name.n);
    *out = &r->list[r->n++];
    **out = (torch_remote){.tensor = {.name = copy}};
    return HD_OK;
}

hd_status torch_remote_set_type(const torch_remotes *r, torch_remote *f,
                                const torch_dtype *dtype) {
    hd_tensor *t = &f->tensor;
    if (!dtype) return torch_refuse(r, t->name, "a dtype that is not known here");
    size_t bytes = (size_t)dtype->bytes;
    for (int32_t i = 0; i < t->rank; i++) {
        if (!hd_mul_size(bytes, (size_t)t->shape[i], &bytes)) {
            return torch_refuse(r, t->name, "shape overflow: more bytes than exist");
        }
    }
    t->dtype = dtype->type;
    t->dtype_name = dtype->file_name;
    t->bytes = f->span = bytes;
    return HD_OK;
}

hd_status torch_remote_check(const torch_remotes *r, const torch_remote *f) {
    if (f->offset <= f->storage_bytes && f->span <= f->storage_bytes - f->offset) {
        return HD_OK;
    }
    return torch_refuse(r, f->tensor.name, "data past the end of its storage");
}

/* ---- the bytes ---- */

/* Copies the elements of a view in row-major order: the last axis, then those before it as a
 * counter of places. */
static void copy_view(const torch_remote *f, uint8_t *to, const uint8_t *from) {
    const hd_tensor *t = &f->tensor;
    const int32_t last = t->rank - 1;
    const size_t item = f->item_bytes, step = (size_t)f->stride[last] * item;
    int64_t place[HD_MAX_RANK] = {0};
    for (const uint8_t *end = to + t->bytes; to < end;) {
        const uint8_t *row = from;
        for (int32_t i = 0; i < last; i++) row += (size_t)(place[i] * f->stride[i]) * item;
        for (int64_t i = 0; i < t->shape[last]; i++, to += item) {
            memcpy(to, row + (size_t)i * step, item);
        }
        for (int32_t i = last - 1; i >= 0 && ++place[i] == t->shape[i]; i--) place[i] = 0;
    }
}

static void copy_one(const torch_remote *f, uint8_t *to, const uint8_t *from) {
    if (f->item_bytes) {
        copy_view(f, to, from);
    } else {
        memcpy(to, from, f->tensor.bytes);
    }
}

/* Memory of another process on the GPU. */
typedef struct opened {
    const uint8_t *handle, *at;
    size_t bytes;
} opened;

/* A reading of all tensors: of one shared memory at a time, since tensors of one storage follow each
 * other, and of all memories of a GPU, which one message has few of. */
typedef struct reading {
    const torch_remotes *r;
    char shm[MAX_SHM + 1]; /* what storage has; "": nothing */
    hd_map storage;
    opened *gpu;
    size_t n_gpu;
    hd_stream *s;           /* NULL: no tensor is on a GPU */
    uint8_t *staged, *next; /* memory of the GPU for the tensors on it; NULL: it has no room */
} reading;

static hd_status read_shared(reading *k, const torch_remote *f, uint8_t *to) {
    char name[MAX_SHM + 1] = "";
    memcpy(name, f->shm.at, f->shm.n);
    if (strcmp(k->shm, name) != 0) {
        hd_map_close(&k->storage);
        k->shm[0] = '\0';
        HD_TRY(hd_map_read_shared(&k->storage, name, k->r->err));
        memcpy(k->shm, name, sizeof name);
    }
    if (k->storage.bytes < HEADER || k->storage.bytes - HEADER < f->storage_bytes) {
        return torch_refuse(k->r, f->tensor.name, "its shared memory is too small");
    }
    copy_one(f, to, k->storage.data + HEADER + f->offset);
    return HD_OK;
}

/* Opens the memory of a handle, once. */
static hd_status open_gpu(reading *k, const torch_remote *f, const opened **out) {
    const void *at;
    hd_err why = {0};
    for (size_t i = 0; i < k->n_gpu; i++) {
        *out = &k->gpu[i];
        if (memcmp(k->gpu[i].handle, f->handle, HD_SHARED_HANDLE_BYTES) == 0) return HD_OK;
    }
    opened *more = realloc(k->gpu, (k->n_gpu + 1) * sizeof *more);
    if (!more) return HD_FAIL(k->r->err, HD_ENOMEM, "no memory for handles");
    k->gpu = more;
    opened *o = &more[k->n_gpu];
    *o = (opened){.handle = f->handle};
    if (hd_device_open_shared(k->r->device, &at, &o->bytes, f->handle, &why) != HD_OK) {
        return torch_refuse(k->r, f->tensor.name, why.msg);
    }
    o->at = at;
    k->n_gpu++;
    *out = o;
    return HD_OK;
}

/* A view that is not contiguous comes with all that it skips. */
static hd_status download_view(reading *k, const torch_remote *f, uint8_t *to,
                               const uint8_t *from) {
    uint8_t *all = malloc(f->span);
    if (!all) return HD_FAIL(k->r->err, HD_ENOMEM, "no memory for a tensor's view");
    hd_stream_download(k->s, all, from, f->span);
    const hd_status st = hd_stream_sync(k->s, k->r->err);
    if (st == HD_OK) copy_view(f, to, all);
    free(all);
    return st;
}

static size_t aligned(size_t n) {
    return (n + ALIGN - 1) / ALIGN * ALIGN;
}

static bool is_staged(const torch_remote *f) {
    return f->handle && !f->item_bytes;
}

static hd_status read_gpu(reading *k, torch_remote *f, uint8_t *to) {
    const opened *o = NULL;
    HD_TRY(open_gpu(k, f, &o));
    if (f->storage_at > o->bytes || f->storage_bytes > o->bytes - f->storage_at) {
        return torch_refuse(k->r, f->tensor.name, "its memory on the GPU is too small");
    }
    const uint8_t *from = o->at + f->storage_at + f->offset;
    if (f->event) hd_stream_wait_shared(k->s, f->event);
    if (!is_staged(f)) return download_view(k, f, to, from);
    if (k->staged) {
        hd_stream_copy(k->s, k->next, from, f->tensor.bytes);
        f->tensor.on_device = from = k->next;
        k->next += aligned(f->tensor.bytes);
    }
    hd_stream_download(k->s, to, from, f->tensor.bytes);
    return HD_OK;
}

/* Memory for what comes from a GPU, where it has room: without it, the host's copy is used. */
static hd_status open_reading(reading *k, const torch_remotes *r) {
    size_t on_gpu = 0;
    void *staged;
    hd_err none = {0};
    *k = (reading){.r = r};
    for (size_t i = 0; i < r->n; i++) {
        if (r->list[i].handle && !k->s) HD_TRY(hd_stream_open(&k->s, r->device, r->err));
        if (is_staged(&r->list[i])) on_gpu += aligned(r->list[i].tensor.bytes);
    }
    if (on_gpu && hd_device_alloc(r->device, &staged, on_gpu, "an update", &none) == HD_OK) {
        k->staged = k->next = staged;
    }
    return HD_OK;
}

static void close_reading(reading *k) {
    for (size_t i = 0; i < k->n_gpu; i++) hd_device_close_shared(k->r->device, k->gpu[i].at);
    if (k->staged) hd_device_release(k->r->device, k->staged);
    free(k->gpu);
    hd_stream_close(k->s);
    hd_map_close(&k->storage);
}

static hd_status read_all(reading *k, uint8_t *to) {
    hd_status st = HD_OK;
    for (size_t i = 0; i < k->r->n && st == HD_OK; i++) {
        torch_remote *f = &k->r->list[i];
        f->tensor.data = to;
        if (f->tensor.bytes == 0) continue;
        st = f->handle ? read_gpu(k, f, to) : read_shared(k, f, to);
        to += f->tensor.bytes;
    }
    if (!k->s) return st;
    const hd_status last = hd_stream_sync(k->s, st == HD_OK ? k->r->err : NULL);
    return st == HD_OK ? last : st;
}

/* Makes a checkpoint of the bytes that came, and hands it the GPU's memory. */
static hd_status collect(reading *k, hd_map *map, hd_checkpoint **out) {
    const torch_remotes *r = k->r;
    hd_tensor *list = calloc(r->n + 1, sizeof *list);
    if (!list) {
        hd_map_close(map);
        return HD_FAIL(r->err, HD_ENOMEM, "no memory for %zu tensors", r->n);
    }
    for (size_t i = 0; i < r->n; i++) list[i] = r->list[i].tensor;
    const hd_status st =
        hd_checkpoint_of_tensors(out, list, (int32_t)r->n, map, "update", r->err);
    free(list);
    if (st != HD_OK) return st;
    if (k->staged) hd_checkpoint_keep_device(*out, r->device, k->staged);
    k->staged = NULL;
    return HD_OK;
}

hd_status torch_remotes_read(hd_checkpoint **out, torch_remotes *r) {
    reading k;
    hd_map map;
    size_t bytes = 0;
    for (size_t i = 0; i < r->n; i++) bytes += r->list[i].tensor.bytes;
    HD_TRY(hd_map_take(&map, bytes, "update", r->err));
    hd_status st = open_reading(&k, r);
    if (st == HD_OK) st = read_all(&k, hd_map_writable(&map));
    if (st == HD_OK) {
        st = collect(&k, &map, out);
    } else {
        hd_map_close(&map);
    }
    close_reading(&k);
    return st;
}

/* ---- counts of users ---- */

static void release_counter(const torch_remote *f) {
    char name[MAX_SHM + 1] = "";
    if (!f->counter.at) return;
    memcpy(name, f->counter.at, f->counter.n);
    hd_shared_count_down(name, HEADER + f->counter_at * sizeof(int64_t), sizeof(int64_t));
}

static int by_place(const void *a, const void *b) {
    const torch_text *x = a, *y = b;
    return x->at < y->at ? -1 : x->at > y->at;
}

/* Tensors of one storage name it once in the message: by the same text. The last user of a storage
 * removes its name. */
static void release_storages(const torch_remotes *r) {
    torch_text *names = calloc(r->n + 1, sizeof *names);
    size_t n = 0;
    for (size_t i = 0; names && i < r->n; i++) {
        if (r->list[i].shm.at) names[n++] = r->list[i].shm;
    }
    if (n) qsort(names, n, sizeof *names, by_place);
    for (size_t i = 0; i < n; i++) {
        char name[MAX_SHM + 1] = "";
        if (i > 0 && names[i].at == names[i - 1].at) continue;
        memcpy(name, names[i].at, names[i].n);
        if (hd_shared_count_down(name, 0, sizeof(int32_t)) == 0) shm_unlink(name);
    }
    free(names);
}

void torch_remotes_deinit(torch_remotes *r) {
    release_storages(r);
    for (size_t i = 0; i < r->n; i++) {
        release_counter(&r->list[i]);
        free(r->names[i]);
    }
    free(r->names);
    free(r->list);
}
