/* torch_tensors.c - from a pickle's tree to tensors: what each is, and where its bytes lie. */
#include "weights/torch/torch_tensors.h"

#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "weights/torch/pickle.h"
#include "weights/torch/remote_internal.h"

enum { MAX_SHM = 255 };

static const char *const bucket_modules[] = {
    "sglang.srt.weight_sync.tensor_bucket",
    "sglang.srt.utils.patch_torch",
    "sglang.srt.patch_torch",
};

/* SGLang's senders name the GPU by its UUID, and the function that knows it. */
static const char *const patch_modules[] = {"sglang.srt.utils.patch_torch",
                                            "sglang.srt.patch_torch"};

typedef struct reader {
    hd_pickle *p;
    torch_remotes remotes;
    hd_err *err;
} reader;

static hd_status refuse(const reader *r, const char *name, const char *why) {
    return torch_refuse(&r->remotes, name, why);
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

static const torch_dtype *dtype_of(const hd_pickle_value *v) {
    for (size_t i = 0; v && i < torch_n_dtypes; i++) {
        if (hd_pickle_is_name(v, "torch", torch_dtypes[i].theirs)) return &torch_dtypes[i];
    }
    return NULL;
}

/* Sets shape, dtype and bytes. */
static hd_status describe(const reader *r, torch_remote *f, const hd_pickle_value *shape,
                          const torch_dtype *dtype) {
    hd_tensor *t = &f->tensor;
    if (!dtype) return torch_remote_set_type(&r->remotes, f, NULL);
    if (!read_shape(r, shape, t->shape, &t->rank)) return refuse(r, t->name, "bad shape");
    return torch_remote_set_type(&r->remotes, f, dtype);
}

static bool is_count(const hd_pickle_value *v) {
    return v && v->kind == HD_PICKLE_INT && v->number >= 0;
}

static bool is_bytes(const hd_pickle_value *v, size_t least, size_t most) {
    const bool text = v && (v->kind == HD_PICKLE_BYTES || v->kind == HD_PICKLE_TEXT);
    return text && v->n >= least && v->n <= most;
}

/* ---- one tensor ---- */

/* Says what stands where a storage's name in shared memory should. */
static hd_status refuse_storage(const reader *r, const char *name, const hd_pickle_value *v) {
    const hd_pickle_value *what = v ? hd_pickle_item(r->p, v, 0) : NULL;
    const bool named = what && what->kind == HD_PICKLE_NAME;
    return HD_FAIL(r->err, HD_EFORMAT,
                   "update: tensor %.200s: %.200s is not read here: share storages by name "
                   "(torch.multiprocessing.set_sharing_strategy(\"file_system\"))%s",
                   name, named ? what->text : "its storage",
                   r->remotes.device ? ", or on the GPU" : ", on the CPU");
}

static hd_status read_storage(const reader *r, torch_remote *f,
                              const hd_pickle_value *untyped) {
    static const char module[] = "torch.multiprocessing.reductions";
    if (!is_call(r, untyped, module, "rebuild_storage_filename")) {
        return refuse_storage(r, f->tensor.name, untyped);
    }
    const hd_pickle_value *shm = argument(r, untyped, 2), *size = argument(r, untyped, 3);
    if (!is_bytes(shm, 1, MAX_SHM) || memchr(shm->text, 0, shm->n) || !is_count(size)) {
        return refuse(r, f->tensor.name, "bad storage: its name or its size");
    }
    f->shm = (torch_text){shm->text, shm->n};
    f->storage_bytes = (size_t)size->number;
    return HD_OK;
}

static bool is_contiguous(const torch_remote *f) {
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
static hd_status read_view(const reader *r, torch_remote *f, const hd_pickle_value *strides,
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

/* Where a tensor's first element lies: elements behind the beginning of its storage. */
static hd_status read_place(const reader *r, torch_remote *f, const hd_pickle_value *offset,
                            const hd_pickle_value *strides, const torch_dtype *dtype) {
    HD_TRY(read_view(r, f, strides, (size_t)dtype->bytes));
    if (!is_count(offset) ||
        !hd_mul_size((size_t)offset->number, (size_t)dtype->bytes, &f->offset)) {
        return refuse(r, f->tensor.name, "bad offset");
    }
    return HD_OK;
}

/* ---- memory of a GPU ---- */

/* Returns what the sender calls memory that cudaMalloc made, or NULL: 64 bytes, which newer PyTorch
 * puts behind its version and a letter. */
static const uint8_t *handle_of(const hd_pickle_value *v) {
    enum { BEFORE = 2 };
    const bool plain = is_bytes(v, HD_SHARED_HANDLE_BYTES, HD_SHARED_HANDLE_BYTES);
    const bool headed =
        is_bytes(v, BEFORE + HD_SHARED_HANDLE_BYTES, BEFORE + HD_SHARED_HANDLE_BYTES) &&
        v->text[1] == 'c';
    if (!plain && !headed) return NULL;
    return (const uint8_t *)v->text + (headed ? BEFORE : 0);
}

/* PyTorch frees what it shared when nobody counts as its user any more. */
static hd_status read_counter(const reader *r, torch_remote *f, const hd_pickle_value *file,
                              const hd_pickle_value *place) {
    static const char begin[] = "/torch_";
    const size_t n = sizeof begin - 1;
    if (!is_bytes(file, n + 1, MAX_SHM) || memcmp(file->text, begin, n) != 0 ||
        memchr(file->text, 0, file->n) || memchr(file->text + 1, '/', file->n - 1) ||
        !is_count(place) || place->number >= 10000) {
        return refuse(r, f->tensor.name, "bad counter of users");
    }
    f->counter = (torch_text){file->text, file->n};
    f->counter_at = (size_t)place->number;
    return HD_OK;
}

static hd_status read_event(const reader *r, torch_remote *f, const hd_pickle_value *event,
                            const hd_pickle_value *wait) {
    if (!wait || wait->kind != HD_PICKLE_BOOL) return refuse(r, f->tensor.name, "bad event");
    if (!wait->number) return HD_OK;
    if (!is_bytes(event, HD_SHARED_HANDLE_BYTES, HD_SHARED_HANDLE_BYTES)) {
        return refuse(r, f->tensor.name, "bad event: must have 64 bytes");
    }
    f->event = (const uint8_t *)event->text;
    return HD_OK;
}

/* rebuild_cuda_tensor(class, size, stride, offset, storage class, dtype, device, handle, bytes of
 * the storage, its place behind the handle's memory, requires_grad, counter file, its place,
 * event, whether to wait for it) */
static hd_status read_cuda_tensor(const reader *r, torch_remote *f, const hd_pickle_value *v) {
    const torch_dtype *dtype = dtype_of(argument(r, v, 5));
    const hd_pickle_value *size = argument(r, v, 8), *at = argument(r, v, 9);
    HD_TRY(describe(r, f, argument(r, v, 1), dtype));
    if (!is_count(size) || !is_count(at)) return refuse(r, f->tensor.name, "bad storage");
    f->storage_bytes = (size_t)size->number;
    f->storage_at = (size_t)at->number;
    HD_TRY(read_place(r, f, argument(r, v, 3), argument(r, v, 2), dtype));
    if (f->storage_bytes == 0) return HD_OK;
    f->handle = handle_of(argument(r, v, 7));
    if (!f->handle) {
        return refuse(r, f->tensor.name,
                      "a CUDA handle of another kind than cudaMalloc's: share memory that "
                      "does not lie in expandable segments");
    }
    HD_TRY(read_counter(r, f, argument(r, v, 11), argument(r, v, 12)));
    return read_event(r, f, argument(r, v, 13), argument(r, v, 14));
}

static bool is_cuda_tensor(const reader *r, const hd_pickle_value *v) {
    for (size_t i = 0; i < HD_LEN(patch_modules); i++) {
        if (is_call(r, v, patch_modules[i], "_rebuild_cuda_tensor_modified")) return true;
    }
    return is_call(r, v, "torch.multiprocessing.reductions", "rebuild_cuda_tensor");
}

/* rebuild_tensor(class, rebuild_typed_storage(storage, dtype), (offset, size, stride, ...)) */
static hd_status read_tensor(const reader *r, torch_remote *f, const hd_pickle_value *v) {
    static const char module[] = "torch.multiprocessing.reductions";
    if (r->remotes.device && is_cuda_tensor(r, v)) return read_cuda_tensor(r, f, v);
    if (!is_call(r, v, module, "rebuild_tensor")) return refuse_storage(r, f->tensor.name, v);
    const hd_pickle_value *storage = argument(r, v, 1), *where = argument(r, v, 2);
    if (!is_call(r, storage, module, "rebuild_typed_storage") || !where ||
        where->kind != HD_PICKLE_TUPLE) {
        return refuse_storage(r, f->tensor.name, storage);
    }
    const torch_dtype *dtype = dtype_of(argument(r, storage, 1));
    HD_TRY(describe(r, f, hd_pickle_item(r->p, where, 1), dtype));
    HD_TRY(read_storage(r, f, argument(r, storage, 0)));
    return read_place(r, f, hd_pickle_item(r->p, where, 0), hd_pickle_item(r->p, where, 2),
                      dtype);
}

/* Makes room for one more tensor of this name. */
static hd_status new_tensor(reader *r, const hd_pickle_value *name, torch_remote **out) {
    const bool text = name && name->kind == HD_PICKLE_TEXT;
    return torch_remotes_add(&r->remotes, out,
                             text ? (torch_text){name->text, name->n} : (torch_text){0});
}

/* ---- the two forms ---- */

static hd_status read_list(reader *r, const hd_pickle_value *list) {
    if (list->kind != HD_PICKLE_LIST && list->kind != HD_PICKLE_TUPLE) {
        return HD_FAIL(r->err, HD_EFORMAT, "update: must be a list of (name, tensor)");
    }
    int32_t at = list->first;
    for (const hd_pickle_value *pair; (pair = hd_pickle_next(r->p, &at));) {
        torch_remote *f;
        if (pair->kind != HD_PICKLE_TUPLE || pair->n != 2) {
            return HD_FAIL(r->err, HD_EFORMAT, "update: must be a list of (name, tensor)");
        }
        HD_TRY(new_tensor(r, hd_pickle_item(r->p, pair, 0), &f));
        HD_TRY(read_tensor(r, f, hd_pickle_item(r->p, pair, 1)));
        HD_TRY(torch_remote_check(&r->remotes, f));
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
static hd_status read_part(reader *r, const torch_remote *whole, size_t item_bytes,
                           const hd_pickle_value *v) {
    const hd_pickle_value *state = is_metadata(r, v) ? hd_pickle_item(r->p, v, 2) : NULL;
    torch_remote *f;
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
    torch_remote part = *whole;
    part.tensor = f->tensor;
    part.span = f->span;
    part.offset += from;
    *f = part;
    return HD_OK;
}

static hd_status read_bucket(reader *r, const hd_pickle_value *root) {
    const hd_pickle_value *flat = hd_pickle_get(r->p, root, "flattened_tensor");
    const hd_pickle_value *parts = hd_pickle_get(r->p, root, "metadata");
    torch_remote whole = {.tensor = {.name = "flattened_tensor"}};
    if (!flat || !parts || parts->kind != HD_PICKLE_LIST) {
        return HD_FAIL(r->err, HD_EFORMAT,
                       "update: a bucket has flattened_tensor and a list, metadata");
    }
    HD_TRY(read_tensor(r, &whole, flat));
    if (whole.item_bytes) return refuse(r, whole.tensor.name, "a bucket must be contiguous");
    HD_TRY(torch_remote_check(&r->remotes, &whole));
    size_t items = 1;
    for (int32_t i = 0; i < whole.tensor.rank; i++) items *= (size_t)whole.tensor.shape[i];
    int32_t at = parts->first;
    for (const hd_pickle_value *v; (v = hd_pickle_next(r->p, &at));) {
        HD_TRY(read_part(r, &whole, items ? whole.tensor.bytes / items : 1, v));
        whole.counter = (torch_text){0}; /* one part waits and counts for all */
        whole.event = NULL;
    }
    return HD_OK;
}

hd_status hd_torch_tensors_read(hd_checkpoint **out, const uint8_t *pickle, size_t n,
                                bool flattened, hd_device *device, hd_err *err) {
    reader r = {
        .remotes = {.device = device, .err = err},
          .err = err
    };
    *out = NULL;
    HD_TRY(hd_pickle_open(&r.p, pickle, n, err));
    const hd_pickle_value *root = hd_pickle_root(r.p);
    hd_status st = flattened ? read_bucket(&r, root) : read_list(&r, root);
    if (st == HD_OK) st = torch_remotes_read(out, &r.remotes);
    torch_remotes_deinit(&r.remotes);
    hd_pickle_close(r.p);
    return st;
}
