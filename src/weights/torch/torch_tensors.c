/* torch_tensors.c - from a pickle's tree to tensors: first what each is and where its bytes
 * lie, then one copy of all of them. */
#include "weights/torch/torch_tensors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "weights/torch/pickle.h"

/* PyTorch puts a count of users before a storage's bytes. */
enum { MAX_TENSORS = 1000000, MAX_NAME = 1024, MAX_SHM = 255, HEADER = 64 };

static const struct {
    const char *theirs; /* in the module torch */
    const char *file_name;
    hd_dtype type; /* HD_NONE: known, and of no use here */
    int32_t bytes;
} dtypes[] = {
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

static const char *const bucket_modules[] = {
    "sglang.srt.weight_sync.tensor_bucket",
    "sglang.srt.utils.patch_torch",
    "sglang.srt.patch_torch",
};

/* A tensor before its bytes are there. */
typedef struct found {
    hd_tensor tensor; /* name in the reader's names */
    char shm[MAX_SHM + 1];
    size_t offset, storage_bytes; /* of its first byte; of all of the storage */
    int64_t stride[HD_MAX_RANK];  /* elements; of a view that is not contiguous */
    size_t item_bytes;            /* of an element of such a view; 0: it is contiguous */
    size_t span;                  /* from its first byte to behind its last in the storage */
} found;

typedef struct reader {
    hd_pickle *p;
    found *list;
    size_t n, cap;
    char **names;
    hd_err *err;
} reader;

static hd_status refuse(const reader *r, const char *name, const char *why) {
    return HD_FAIL(r->err, HD_EFORMAT, "update: tensor %.200s: %s", name, why);
}

/* ---- values ---- */

static bool is_call(const reader *r, const hd_pickle_value *v, const char *module,
                    const char *name) {
    return v && v->kind == HD_PICKLE_CALL &&
           hd_pickle_is_name(hd_pickle_item(r->p, v, 0), module, name);
}

static const hd_pickle_value *argument(const reader *r, const hd_pickle_value *call, size_t i) {
    return hd_pickle_item(r->p, hd_pickle_item(r->p, call, 1), i);
}

/* A tuple of counts, or torch.Size of one. */
static bool read_shape(const reader *r, const hd_pickle_value *v, int64_t *shape,
                       int32_t *rank) {
    if (is_call(r, v, "torch", "Size")) v = argument(r, v, 0);
    if (!v || (v->kind != HD_PICKLE_TUPLE && v->kind != HD_PICKLE_LIST) || v->n > HD_MAX_RANK) {
        return false;
    }
    int32_t at = v->first;
    *rank = 0;
    for (const hd_pickle_value *k; (k = hd_pickle_next(r->p, &at));) {
        if (k->kind != HD_PICKLE_INT || k->number < 0) return false;
        shape[(*rank)++] = k->number;
    }
    return true;
}

static int dtype_of(const hd_pickle_value *v) {
    for (size_t i = 0; v && i < HD_LEN(dtypes); i++) {
        if (hd_pickle_is_name(v, "torch", dtypes[i].theirs)) return (int)i;
    }
    return -1;
}

/* Sets shape, dtype and bytes. */
static hd_status describe(const reader *r, found *f, const hd_pickle_value *shape, int dtype) {
    hd_tensor *t = &f->tensor;
    if (dtype < 0) return refuse(r, t->name, "a dtype that is not known here");
    if (!read_shape(r, shape, t->shape, &t->rank)) return refuse(r, t->name, "bad shape");
    size_t bytes = (size_t)dtypes[dtype].bytes;
    for (int32_t i = 0; i < t->rank; i++) {
        if (!hd_mul_size(bytes, (size_t)t->shape[i], &bytes)) {
            return refuse(r, t->name, "shape overflow: more bytes than exist");
        }
    }
    t->dtype = dtypes[dtype].type;
    t->dtype_name = dtypes[dtype].file_name;
    t->bytes = f->span = bytes;
    return HD_OK;
}

/* ---- one tensor ---- */

/* Says what stands where a storage's name in shared memory should. */
static hd_status refuse_storage(const reader *r, const char *name, const hd_pickle_value *v) {
    const hd_pickle_value *what = v ? hd_pickle_item(r->p, v, 0) : NULL;
    const bool named = what && what->kind == HD_PICKLE_NAME;
    return HD_FAIL(r->err, HD_EFORMAT,
                   "update: tensor %.200s: %.200s is not read here: share storages by name "
                   "(torch.multiprocessing.set_sharing_strategy(\"file_system\"))",
                   name, named ? what->text : "its storage");
}

static hd_status read_storage(const reader *r, found *f, const hd_pickle_value *untyped) {
    static const char module[] = "torch.multiprocessing.reductions";
    if (!is_call(r, untyped, module, "rebuild_storage_filename")) {
        return refuse_storage(r, f->tensor.name, untyped);
    }
    const hd_pickle_value *shm = argument(r, untyped, 2), *size = argument(r, untyped, 3);
    const bool text = shm && (shm->kind == HD_PICKLE_BYTES || shm->kind == HD_PICKLE_TEXT);
    if (!text || shm->n == 0 || shm->n > MAX_SHM || memchr(shm->text, 0, shm->n) || !size ||
        size->kind != HD_PICKLE_INT || size->number < 0) {
        return refuse(r, f->tensor.name, "bad storage: its name or its size");
    }
    memcpy(f->shm, shm->text, shm->n);
    f->shm[shm->n] = '\0';
    f->storage_bytes = (size_t)size->number;
    return HD_OK;
}

static bool is_contiguous(const found *f) {
    const hd_tensor *t = &f->tensor;
    int64_t step = 1;
    for (int32_t i = t->rank - 1; i >= 0; i--) {
        if (t->shape[i] > 1 && f->stride[i] != step) return false;
        step *= t->shape[i];
    }
    return true;
}

/* A view may skip elements of its storage, or turn them. One that is larger repeats some: that is no
 * weight, and could be of any size. */
static hd_status read_view(const reader *r, found *f, const hd_pickle_value *strides,
                           size_t item_bytes) {
    hd_tensor *t = &f->tensor;
    int32_t n;
    if (!read_shape(r, strides, f->stride, &n) || n != t->rank) {
        return refuse(r, t->name, "bad strides");
    }
    if (t->bytes == 0 || is_contiguous(f)) return HD_OK;
    if (t->bytes > f->storage_bytes) return refuse(r, t->name, "larger than its storage");
    f->item_bytes = f->span = item_bytes;
    for (int32_t i = 0; i < n; i++) {
        size_t far;
        if (!hd_mul_size((size_t)(t->shape[i] - 1), (size_t)f->stride[i], &far) ||
            !hd_mul_size(far, item_bytes, &far) || !hd_add_size(f->span, far, &f->span)) {
            return refuse(r, t->name, "bad strides: they reach farther than any memory");
        }
    }
    return HD_OK;
}

/* rebuild_tensor(class, rebuild_typed_storage(storage, dtype), (offset, size, stride, ...)) */
static hd_status read_tensor(const reader *r, found *f, const hd_pickle_value *v) {
    static const char module[] = "torch.multiprocessing.reductions";
    if (!is_call(r, v, module, "rebuild_tensor")) return refuse_storage(r, f->tensor.name, v);
    const hd_pickle_value *storage = argument(r, v, 1), *where = argument(r, v, 2);
    if (!is_call(r, storage, module, "rebuild_typed_storage") || !where ||
        where->kind != HD_PICKLE_TUPLE) {
        return refuse_storage(r, f->tensor.name, storage);
    }
    const int dtype = dtype_of(argument(r, storage, 1));
    const hd_pickle_value *offset = hd_pickle_item(r->p, where, 0);
    HD_TRY(describe(r, f, hd_pickle_item(r->p, where, 1), dtype));
    HD_TRY(read_storage(r, f, argument(r, storage, 0)));
    HD_TRY(read_view(r, f, hd_pickle_item(r->p, where, 2), (size_t)dtypes[dtype].bytes));
    if (offset->kind != HD_PICKLE_INT || offset->number < 0 ||
        !hd_mul_size((size_t)offset->number, (size_t)dtypes[dtype].bytes, &f->offset)) {
        return refuse(r, f->tensor.name, "bad offset");
    }
    return HD_OK;
}

static hd_status check_span(const reader *r, const found *f) {
    if (f->offset <= f->storage_bytes && f->span <= f->storage_bytes - f->offset) {
        return HD_OK;
    }
    return refuse(r, f->tensor.name, "data past the end of its storage");
}

/* Makes room for one more tensor of this name. */
static hd_status new_tensor(reader *r, const hd_pickle_value *name, found **out) {
    if (!name || name->kind != HD_PICKLE_TEXT || name->n == 0 || name->n > MAX_NAME) {
        return refuse(r, "(without one)", "bad name: must be a text of 1 to 1024 bytes");
    }
    for (size_t i = 0; i < name->n; i++) {
        if ((unsigned char)name->text[i] < 0x20) {
            return refuse(r, "(unreadable)", "bad name: contains control characters");
        }
    }
    if (r->n == MAX_TENSORS) return refuse(r, "(any)", "too many tensors");
    if (r->n == r->cap) {
        const size_t cap = r->cap ? 2 * r->cap : 64;
        found *more = realloc(r->list, cap * sizeof *more);
        if (more) r->list = more;
        char **names = more ? realloc(r->names, cap * sizeof *names) : NULL;
        if (names) r->names = names;
        if (!names) return HD_FAIL(r->err, HD_ENOMEM, "no memory for %zu tensors", cap);
        r->cap = cap;
    }
    char *copy = calloc(1, name->n + 1);
    if (!copy) return HD_FAIL(r->err, HD_ENOMEM, "no memory for a tensor's name");
    r->names[r->n] = memcpy(copy, name->text, name->n);
    *out = &r->list[r->n++];
    **out = (found){.tensor = {.name = copy}};
    return HD_OK;
}

/* ---- the two forms ---- */

static hd_status read_list(reader *r, const hd_pickle_value *list) {
    if (list->kind != HD_PICKLE_LIST && list->kind != HD_PICKLE_TUPLE) {
        return HD_FAIL(r->err, HD_EFORMAT, "update: must be a list of (name, tensor)");
    }
    int32_t at = list->first;
    for (const hd_pickle_value *pair; (pair = hd_pickle_next(r->p, &at));) {
        found *f;
        if (pair->kind != HD_PICKLE_TUPLE || pair->n != 2) {
            return HD_FAIL(r->err, HD_EFORMAT, "update: must be a list of (name, tensor)");
        }
        HD_TRY(new_tensor(r, hd_pickle_item(r->p, pair, 0), &f));
        HD_TRY(read_tensor(r, f, hd_pickle_item(r->p, pair, 1)));
        HD_TRY(check_span(r, f));
    }
    return HD_OK;
}

static bool is_metadata(const reader *r, const hd_pickle_value *v) {
    for (size_t i = 0; i < HD_LEN(bucket_modules); i++) {
        if (is_call(r, v, bucket_modules[i], "FlattenedTensorMetadata")) return true;
    }
    return false;
}

/* A part: its place counts elements of the flattened tensor. */
static hd_status read_part(reader *r, const found *whole, size_t item_bytes,
                           const hd_pickle_value *v) {
    const hd_pickle_value *state = is_metadata(r, v) ? hd_pickle_item(r->p, v, 2) : NULL;
    found *f;
    if (!state) return HD_FAIL(r->err, HD_EFORMAT, "update: metadata of another kind");
    const hd_pickle_value *start = hd_pickle_get(r->p, state, "start_idx");
    const hd_pickle_value *shape = hd_pickle_get(r->p, state, "shape");
    HD_TRY(new_tensor(r, hd_pickle_get(r->p, state, "name"), &f));
    HD_TRY(describe(r, f, shape, dtype_of(hd_pickle_get(r->p, state, "dtype"))));
    size_t from = 0;
    if (!start || start->kind != HD_PICKLE_INT || start->number < 0 ||
        !hd_mul_size((size_t)start->number, item_bytes, &from) || from > whole->tensor.bytes ||
        f->tensor.bytes > whole->tensor.bytes - from) {
        return refuse(r, f->tensor.name, "data past the end of the bucket");
    }
    memcpy(f->shm, whole->shm, sizeof f->shm);
    f->storage_bytes = whole->storage_bytes;
    f->offset = whole->offset + from;
    return HD_OK;
}

static hd_status read_bucket(reader *r, const hd_pickle_value *root) {
    const hd_pickle_value *flat = hd_pickle_get(r->p, root, "flattened_tensor");
    const hd_pickle_value *parts = hd_pickle_get(r->p, root, "metadata");
    found whole = {.tensor = {.name = "flattened_tensor"}};
    if (!flat || !parts || parts->kind != HD_PICKLE_LIST) {
        return HD_FAIL(r->err, HD_EFORMAT,
                       "update: a bucket has flattened_tensor and a list, metadata");
    }
    HD_TRY(read_tensor(r, &whole, flat));
    if (whole.item_bytes) return refuse(r, whole.tensor.name, "a bucket must be contiguous");
    HD_TRY(check_span(r, &whole));
    size_t items = 1;
    for (int32_t i = 0; i < whole.tensor.rank; i++) items *= (size_t)whole.tensor.shape[i];
    int32_t at = parts->first;
    for (const hd_pickle_value *v; (v = hd_pickle_next(r->p, &at));) {
        HD_TRY(read_part(r, &whole, items ? whole.tensor.bytes / items : 1, v));
    }
    return HD_OK;
}

/* ---- the bytes ---- */

/* Copies the elements of a view in row-major order: the last axis, then those before it as a
 * counter of places. */
static void copy_view(const found *f, uint8_t *to, const uint8_t *from) {
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

static void copy_one(const found *f, uint8_t *to, const uint8_t *from) {
    if (f->item_bytes) {
        copy_view(f, to, from);
    } else {
        memcpy(to, from, f->tensor.bytes);
    }
}

/* Copies every tensor; tensors of one storage follow each other, and it is read once. */
static hd_status copy_all(reader *r, hd_map *to) {
    const char *open = NULL;
    hd_map storage = {0};
    size_t bytes = 0;
    hd_status st = HD_OK;
    for (size_t i = 0; i < r->n; i++) bytes += r->list[i].tensor.bytes;
    HD_TRY(hd_map_take(to, bytes, "update", r->err));
    uint8_t *at = hd_map_writable(to);
    for (size_t i = 0; i < r->n && st == HD_OK; i++) {
        found *f = &r->list[i];
        f->tensor.data = at;
        if (f->tensor.bytes == 0) continue;
        if (!open || strcmp(open, f->shm) != 0) {
            hd_map_close(&storage);
            st = hd_map_read_shared(&storage, f->shm, r->err);
            open = f->shm;
        }
        if (st == HD_OK &&
            (storage.bytes < HEADER || storage.bytes - HEADER < f->storage_bytes)) {
            st = refuse(r, f->tensor.name, "its shared memory is too small");
        }
        if (st == HD_OK) copy_one(f, at, storage.data + HEADER + f->offset);
        at += f->tensor.bytes;
    }
    hd_map_close(&storage);
    if (st != HD_OK) hd_map_close(to);
    return st;
}

static hd_status collect(reader *r, hd_checkpoint **out) {
    hd_map map;
    hd_tensor *list = calloc(r->n + 1, sizeof *list);
    if (!list) return HD_FAIL(r->err, HD_ENOMEM, "no memory for %zu tensors", r->n);
    hd_status st = copy_all(r, &map);
    for (size_t i = 0; i < r->n; i++) list[i] = r->list[i].tensor;
    if (st == HD_OK) {
        st = hd_checkpoint_of_tensors(out, list, (int32_t)r->n, &map, "update", r->err);
    }
    free(list);
    return st;
}

hd_status hd_torch_tensors_read(hd_checkpoint **out, const uint8_t *pickle, size_t n,
                                bool flattened, hd_err *err) {
    reader r = {.err = err};
    *out = NULL;
    HD_TRY(hd_pickle_open(&r.p, pickle, n, err));
    const hd_pickle_value *root = hd_pickle_root(r.p);
    hd_status st = flattened ? read_bucket(&r, root) : read_list(&r, root);
    if (st == HD_OK) st = collect(&r, out);
    for (size_t i = 0; i < r.n; i++) free(r.names[i]);
    free(r.names);
    free(r.list);
    hd_pickle_close(r.p);
    return st;
}
