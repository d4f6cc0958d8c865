/* parameters.c - which tensors are trained, and their arrays. */
#include "train/parameters.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "weights/summary.h"

/* A second copy in the files of a tensor that is trained (an MTP layer's embedding). */
typedef struct copy {
    const hd_tensor_decl *decl;
    int32_t parameter;
} copy;

struct hd_parameters {
    const hd_model_spec *spec;
    hd_parameters_options o;
    const hd_weights *w;
    hd_gradients *gradients;
    hd_parameter *all;
    int32_t *decls; /* [n] indices into the schema */
    int64_t *at;    /* [n] places in the order of all elements */
    int32_t n;
    copy *copies;
    int32_t n_copies;
    hd_device *device;
    hd_stream *stream;
    int64_t elements, summed;
    int64_t first, own; /* the slice */
    float *block;       /* [HD_N_PARAMETER_ARRAYS, own], device memory */
    /* of new weights in place: what writes them, and [n + n_copies] whether they fit, on the device and here */
    const hd_backward_ops *ops;
    int32_t *bad, *host_bad;
};

/* ---- what is frozen ---- */

static const struct {
    const char *word;
    hd_param_group group;
} groups[] = {
    {"embedding",         HD_PARAM_GROUP_EMBEDDING },
    {"head",              HD_PARAM_GROUP_HEAD      },
    {"attention",         HD_PARAM_GROUP_ATTENTION },
    {"compressors",       HD_PARAM_GROUP_COMPRESSOR},
    {"hyper-connections", HD_PARAM_GROUP_HYPER     },
    {"dense",             HD_PARAM_GROUP_DENSE     },
    {"router",            HD_PARAM_GROUP_ROUTER    },
    {"experts",           HD_PARAM_GROUP_EXPERTS   },
    {"shared",            HD_PARAM_GROUP_SHARED    },
    {"norms",             HD_PARAM_GROUP_NORMS     },
};

static bool group_named(uint32_t *out, const char *word, size_t n) {
    for (size_t i = 0; i < HD_LEN(groups); i++) {
        if (strlen(groups[i].word) != n || memcmp(groups[i].word, word, n) != 0) continue;
        *out |= 1u << groups[i].group;
        return true;
    }
    return n == 4 && memcmp(word, "none", n) == 0;
}

hd_status hd_frozen_of(uint32_t *out, const char *words, hd_err *err) {
    *out = 0;
    for (const char *at = words; at && *at;) {
        const size_t n = strcspn(at, ",");
        if (!group_named(out, at, n)) {
            return HD_FAIL(err, HD_EINVAL,
                           "cannot freeze '%.*s': known are embedding, head, attention, "
                           "compressors, hyper-connections, dense, router, experts, shared, "
                           "norms and none",
                           (int)n, at);
        }
        at += n + (at[n] == ',');
    }
    return HD_OK;
}

/* Whether the options leave it to training. */
static bool changes(const hd_parameters *p, const hd_tensor_decl *d) {
    const bool among = d->layer < p->spec->n_layers || p->o.drafts;
    return among && !(p->o.frozen >> hd_param_group_of(d->role) & 1);
}

static bool trains(void *ctx, const hd_tensor_decl *d) {
    const hd_parameters *p = ctx;
    const bool of_indexer = hd_param_group_of(d->role) == HD_PARAM_GROUP_INDEXER;
    return changes(p, d) && (of_indexer ? p->o.indexer : hd_gradients_exist(d));
}

/* ---- the list ---- */

static bool is_vector(const hd_parameters *p, const hd_tensor_decl *d) {
    return hd_weights_vector(p->w, d->layer, d->role) != NULL;
}

static hd_update_kind kind_of(const hd_parameters *p, const hd_tensor_decl *d) {
    const bool table = d->role == HD_EMBED || d->role == HD_HEAD || d->role == HD_ROUTER;
    return d->rank == 2 && !table && !is_vector(p, d) ? p->o.matrices : HD_UPDATE_ADAMW;
}

static const hd_tensor_decl *decl_of(const hd_parameters *p, int32_t parameter) {
    return &hd_weights_schema(p->w)->decls[p->decls[parameter]];
}

/* NULL: it is not trained. */
static const float *gradient_of(const hd_parameters *p, const hd_tensor_decl *d) {
    const float *grad = hd_gradients_at(p->gradients, d->layer, d->role);
    return grad && d->expert > 0 ? grad + d->expert * (int64_t)d->rows * d->cols : grad;
}

static void add(hd_parameters *p, int32_t decl) {
    const hd_tensor_decl *d = &hd_weights_schema(p->w)->decls[decl];
    p->decls[p->n] = decl;
    p->all[p->n++] = (hd_parameter){.name = d->name,
                                    .grad = gradient_of(p, d),
                                    .rows = d->rows,
                                    .cols = d->cols,
                                    .stack = d->role == HD_O_A ? p->spec->o_groups : 1,
                                    .kind = kind_of(p, d),
                                    .decays = d->rank == 2 && !is_vector(p, d)};
    p->elements += (int64_t)d->rows * d->cols;
}

/* A copy of the embedding or the head trains with it. */
static void add_copy(hd_parameters *p, const hd_tensor_decl *d) {
    const float *grad = gradient_of(p, d);
    for (int32_t i = 0; grad && i < p->n; i++) {
        if (p->all[i].grad != grad) continue;
        p->copies[p->n_copies++] = (copy){d, i};
        return;
    }
}

static void add_bias(hd_parameters *p, int32_t decl) {
    const hd_tensor_decl *d = &hd_weights_schema(p->w)->decls[decl];
    p->decls[p->n] = decl;
    p->all[p->n++] = (hd_parameter){
        .name = d->name, .rows = d->rows, .cols = d->cols, .kind = HD_UPDATE_BALANCE};
    p->elements += (int64_t)d->rows * d->cols;
}

typedef struct placed_decl {
    const float *grad;
    int32_t decl;
} placed_decl;

static int by_place(const void *a, const void *b) {
    const float *x = ((const placed_decl *)a)->grad, *y = ((const placed_decl *)b)->grad;
    return (x > y) - (x < y);
}

/* In the order of the gradients, so that neighbors are neighbors in memory. */
static hd_status add_trained(hd_parameters *p, hd_err *err) {
    const hd_schema *schema = hd_weights_schema(p->w);
    placed_decl *all = calloc((size_t)schema->n + 1, sizeof *all);
    int32_t n = 0;
    if (!all) return HD_FAIL(err, HD_ENOMEM, "no memory for the list of parameters");
    for (int32_t i = 0; i < schema->n; i++) {
        const hd_tensor_decl *d = &schema->decls[i];
        if (d->duplicate || !hd_gradients_at(p->gradients, d->layer, d->role)) continue;
        if (trains(p, d)) all[n++] = (placed_decl){gradient_of(p, d), i};
    }
    qsort(all, (size_t)n, sizeof *all, by_place);
    for (int32_t i = 0; i < n; i++) add(p, all[i].decl);
    free(all);
    return HD_OK;
}

static hd_status list(hd_parameters *p, hd_err *err) {
    const hd_schema *schema = hd_weights_schema(p->w);
    HD_TRY(add_trained(p, err));
    for (int32_t i = 0; i < schema->n && p->o.biases; i++) {
        const hd_tensor_decl *d = &schema->decls[i];
        if (d->role == HD_ROUTER_BIAS && !hd_weights_missing(p->w, i) && changes(p, d)) {
            add_bias(p, i);
        }
    }
    for (int32_t i = 0; i < schema->n; i++) {
        if (schema->decls[i].duplicate && hd_weights_stored(p->w, i)) {
            add_copy(p, &schema->decls[i]);
        }
    }
    return HD_OK;
}

/* ---- their arrays ---- */

static int64_t size_of(const hd_parameter *q) {
    return (int64_t)q->rows * q->cols;
}

/* The order of all elements: that of the gradients, then the biases. */
static void place(hd_parameters *p) {
    int64_t n;
    const float *all = hd_gradients_all(p->gradients, &n);
    for (int32_t i = 0; i < p->n; i++) {
        const hd_parameter *q = &p->all[i];
        if (!q->grad) continue;
        p->at[i] = q->grad - all;
        p->summed = hd_max_i64(p->summed, p->at[i] + size_of(q));
    }
    int64_t end = p->summed;
    for (int32_t i = 0; i < p->n; i++) {
        if (p->all[i].grad) continue;
        p->at[i] = end;
        end += size_of(&p->all[i]);
    }
    assert(end == p->elements);
}

/* Where the slice of a rank begins: Muon's matrices are not divided. */
static int64_t cut(const hd_parameters *p, int32_t rank) {
    const int64_t at = p->elements * rank / hd_max_i32(p->o.n_ranks, 1);
    for (int32_t i = 0; i < p->n; i++) {
        const int64_t first = p->at[i], size = size_of(&p->all[i]);
        if (p->all[i].kind != HD_UPDATE_MUON || at <= first || at >= first + size) continue;
        return 2 * (at - first) < size ? first : first + size;
    }
    return at;
}

/* The masters of a parameter become the stored values; room [q->n]. */
static void read_stored(const hd_parameters *p, int32_t decl, const hd_parameter *q,
                        float *room) {
    const hd_weight *w = hd_weights_stored(p->w, decl);
    for (int64_t i = 0; i < q->n; i++) {
        const int64_t at = q->begin + i;
        room[i] = hd_weight_at(w, (int32_t)(at / w->cols), (int32_t)(at % w->cols));
    }
    hd_stream_upload(p->stream, q->master, room, (size_t)q->n * sizeof *room);
}

/* Points a parameter to its elements in arrays, which begin with element `first`. */
static void point(hd_parameter *q, float *const *arrays, int64_t at) {
    q->master = arrays[HD_PARAMETER_MASTER] + at;
    q->first = q->kind == HD_UPDATE_BALANCE ? NULL : arrays[HD_PARAMETER_FIRST] + at;
    q->second = q->kind == HD_UPDATE_ADAMW ? arrays[HD_PARAMETER_SECOND] + at : NULL;
}

/* Points a parameter to its part of the slice. */
static void point_to_slice(const hd_parameters *p, int32_t i) {
    float *arrays[HD_N_PARAMETER_ARRAYS];
    hd_parameter *q = &p->all[i];
    const int64_t from = hd_max_i64(p->at[i], p->first);
    const int64_t to = hd_min_i64(p->at[i] + size_of(q), p->first + p->own);
    for (int k = 0; k < HD_N_PARAMETER_ARRAYS; k++) arrays[k] = p->block + k * p->own;
    q->n = hd_max_i64(to - from, 0);
    q->begin = q->n ? from - p->at[i] : 0;
    if (q->grad) q->grad += q->begin;
    point(q, arrays, q->n ? from - p->first : 0);
}

static hd_status take_arrays(hd_parameters *p, hd_err *err) {
    const size_t bytes = (size_t)p->own * HD_N_PARAMETER_ARRAYS * sizeof *p->block;
    void *block;
    int64_t largest = 0;
    HD_TRY(hd_device_alloc(p->device, &block, bytes, "masters and moments", err));
    p->block = block;
    for (int32_t i = 0; i < p->n; i++) {
        point_to_slice(p, i);
        largest = hd_max_i64(largest, p->all[i].n);
    }
    float *room = malloc((size_t)largest * sizeof *room + 1);
    if (!room) return HD_FAIL(err, HD_ENOMEM, "no memory for the masters of a weight");
    for (int32_t i = 0; i < p->n; i++) read_stored(p, p->decls[i], &p->all[i], room);
    free(room);
    return HD_OK;
}

/* What a GPU says of new weights. */
static hd_status take_bad(hd_parameters *p, hd_err *err) {
    const size_t bytes = (size_t)(p->n + p->n_copies) * sizeof *p->bad;
    void *bad, *host_bad;
    if (hd_device_is_host(p->device)) return HD_OK;
    HD_TRY(hd_device_alloc(p->device, &bad, bytes, "marks of new weights", err));
    p->bad = bad;
    HD_TRY(hd_device_alloc_host(p->device, &host_bad, bytes, "marks of new weights", err));
    p->host_bad = host_bad;
    return HD_OK;
}

static hd_status open_all(hd_parameters *p, hd_device *d, hd_err *err) {
    const size_t n = (size_t)hd_weights_schema(p->w)->n + 1;
    HD_TRY(hd_gradients_open(&p->gradients, p->w, d, trains, p, err));
    p->all = calloc(n, sizeof *p->all);
    p->decls = calloc(n, sizeof *p->decls);
    p->at = calloc(n, sizeof *p->at);
    p->copies = calloc(n, sizeof *p->copies);
    if (!p->all || !p->decls || !p->at || !p->copies) {
        return HD_FAIL(err, HD_ENOMEM, "no memory for the list of parameters");
    }
    HD_TRY(list(p, err));
    if (p->n == 0) return HD_FAIL(err, HD_EINVAL, "nothing is trained: all is frozen");
    place(p);
    p->first = cut(p, p->o.rank);
    p->own = cut(p, p->o.rank + 1) - p->first;
    if (p->o.shapes_only) return HD_OK;
    HD_TRY(take_arrays(p, err));
    return take_bad(p, err);
}

hd_status hd_parameters_open(hd_parameters **out, const hd_model_spec *spec,
                             const hd_weights *w, hd_device *d, hd_stream *s,
                             const hd_backward_ops *ops, const hd_parameters_options *o,
                             hd_err *err) {
    *out = NULL;
    hd_parameters *p = calloc(1, sizeof *p);
    if (!p) return HD_FAIL(err, HD_ENOMEM, "no memory for parameters");
    p->spec = spec;
    p->w = w;
    p->o = *o;
    p->device = d;
    p->stream = s;
    p->ops = ops;
    const hd_status st = open_all(p, d, err);
    if (st == HD_OK) {
        *out = p;
    } else {
        hd_parameters_close(p);
    }
    return st;
}

void hd_parameters_close(hd_parameters *p) {
    if (!p) return;
    hd_device_release(p->device, p->block);
    hd_device_release(p->device, p->bad);
    hd_device_release(p->device, p->host_bad);
    hd_gradients_close(p->gradients);
    free(p->all);
    free(p->decls);
    free(p->at);
    free(p->copies);
    free(p);
}

const hd_gradients *hd_parameters_gradients(const hd_parameters *p) {
    return p->gradients;
}

const hd_parameter *hd_parameters_all(const hd_parameters *p, int32_t *n) {
    *n = p->n;
    return p->all;
}

bool hd_parameters_is_draft(const hd_parameters *p, int32_t i) {
    return decl_of(p, i)->layer >= p->spec->n_layers;
}

int64_t hd_parameters_count(const hd_parameters *p) {
    return p->elements;
}

void hd_parameters_clear_gradients(hd_parameters *p, hd_stream *s) {
    int64_t n;
    float *all = hd_gradients_all(p->gradients, &n);
    hd_stream_clear(s, all, (size_t)n * sizeof *all);
}

hd_status hd_parameters_finish_gradients(hd_parameters *p, const hd_ops *ops, hd_stream *s,
                                         hd_err *err) {
    hd_gradients_join_drafts(p->gradients, ops, s);
    return hd_stream_sync(s, err);
}

/* ---- the routers' biases ---- */

static void balance_layer(float *master, const hd_parameter *q, const int64_t *selected,
                          double rate) {
    int64_t all = 0;
    for (int32_t e = 0; e < q->cols; e++) all += selected[e];
    for (int64_t i = 0; i < q->n; i++) {
        const int64_t more =
            selected[q->begin + i] * q->cols - all; /* than the mean, times n */
        if (more) master[i] += more > 0 ? (float)-rate : (float)rate;
    }
}

/* room: of the elements behind the gradients */
static hd_status balance_all(hd_parameters *p, const int64_t *selected, double rate,
                             float *room, hd_err *err) {
    for (int32_t i = 0; i < p->n; i++) {
        const hd_parameter *q = &p->all[i];
        const size_t bytes = (size_t)q->n * sizeof *room;
        if (q->kind != HD_UPDATE_BALANCE) continue;
        hd_stream_download(p->stream, room, q->master, bytes);
        HD_TRY(hd_stream_sync(p->stream, err));
        balance_layer(room, q, selected + (int64_t)decl_of(p, i)->layer * q->cols, rate);
        hd_stream_upload(p->stream, q->master, room, bytes);
    }
    return HD_OK;
}

hd_status hd_parameters_balance(hd_parameters *p, const int64_t *selected, double rate,
                                hd_err *err) {
    float *room = malloc((size_t)(p->elements - p->summed) * sizeof *room + 1);
    if (!room) return HD_FAIL(err, HD_ENOMEM, "no memory for the routers' biases");
    const hd_status st = balance_all(p, selected, rate, room, err);
    free(room);
    return st;
}

/* ---- back to the stored formats ---- */

static hd_tensor tensor_of(const hd_tensor_decl *d, const void *data) {
    hd_tensor t = {.name = d->name,
                   .dtype_name = hd_dtypes[HD_F32].file_name,
                   .dtype = HD_F32,
                   .rank = d->rank,
                   .data = data,
                   .bytes = (size_t)d->rows * (size_t)d->cols * sizeof(float)};
    if (d->rank == 1) {
        t.shape[0] = d->cols;
    } else {
        t.shape[0] = d->rows;
        t.shape[1] = d->cols;
    }
    return t;
}

/* The masters as tensors; copies point to those of their parameters. */
static void fill(const hd_parameters *p, hd_tensor *tensors, const hd_map *masters) {
    const float *all = masters->data ? (const float *)(const void *)masters->data : p->block;
    for (int32_t i = 0; i < p->n; i++) {
        tensors[i] = tensor_of(decl_of(p, i), all + p->at[i]);
    }
    for (int32_t i = 0; i < p->n_copies; i++) {
        const copy *c = &p->copies[i];
        tensors[p->n + i] = tensor_of(c->decl, tensors[c->parameter].data);
    }
}

static hd_status collect(const hd_parameters *p, hd_map *masters, hd_checkpoint **out,
                         hd_err *err) {
    const int32_t n = p->n + p->n_copies;
    hd_tensor *tensors = calloc((size_t)n, sizeof *tensors);
    if (!tensors) {
        hd_map_close(masters);
        return HD_FAIL(err, HD_ENOMEM, "no memory for a list of weights");
    }
    fill(p, tensors, masters);
    const hd_status st =
        hd_checkpoint_of_tensors(out, tensors, n, masters, "trained weights", err);
    free(tensors);
    return st;
}

float *hd_parameters_slice(const hd_parameters *p, hd_parameter_array which, int64_t *first,
                           int64_t *n) {
    *first = p->first;
    *n = p->own;
    return p->block + which * p->own;
}

float *hd_parameters_gradient_slice(const hd_parameters *p, int64_t *n) {
    int64_t all;
    float *grads = hd_gradients_all(p->gradients, &all);
    const int64_t first = hd_min_i64(p->first, p->summed);
    *n = hd_min_i64(p->first + p->own, p->summed) - first;
    return grads + first;
}

int64_t hd_parameters_summed(const hd_parameters *p) {
    return p->summed;
}

void hd_parameters_set(const hd_parameters *p, int32_t i, hd_parameter_array which,
                       const float *values) {
    const hd_parameter *q = &p->all[i];
    float *const arrays[] = {q->master, q->first, q->second};
    hd_stream_upload(p->stream, arrays[which], values + q->begin,
                     (size_t)q->n * sizeof *values);
}

void hd_parameters_list(const hd_parameters *p, float *const *whole, hd_parameter *out) {
    for (int32_t i = 0; i < p->n; i++) {
        out[i] = p->all[i];
        out[i].grad = NULL;
        out[i].begin = 0;
        out[i].n = size_of(&out[i]);
        point(&out[i], whole, p->at[i]);
    }
}

hd_status hd_parameters_update(const hd_parameters *p, hd_map *masters, hd_weights_update **out,
                               hd_err *err) {
    hd_checkpoint *c;
    *out = NULL;
    HD_TRY(collect(p, masters, &c, err));
    hd_weights_update *u;
    hd_status st = hd_weights_update_open(&u, p->w, err);
    if (st != HD_OK) {
        hd_checkpoint_close(c);
        return st;
    }
    st = hd_weights_update_add(u, c, &(hd_weights_update_rule){.n_threads = p->o.threads}, err);
    if (st == HD_OK) {
        *out = u;
    } else {
        hd_weights_update_close(u);
    }
    return st;
}

/* ---- new weights in place ---- */

/* Arrays of updatable weights are memory of this process, whatever points to them. */
static uint8_t *writable(const void *p) {
    return (uint8_t *)(uintptr_t)p;
}

/* How a tensor is stored, and where operators read it. widened: as float32, whatever is stored. */
static hd_weight read_of(const hd_parameters *p, int32_t decl, bool *widened) {
    const hd_tensor_decl *d = &hd_weights_schema(p->w)->decls[decl];
    hd_weight w = *hd_weights_stored(p->w, decl);
    const float *vector = d->expert < 0 ? hd_weights_vector(p->w, d->layer, d->role) : NULL;
    const hd_weight *read = d->expert < 0
                                ? hd_weights_matrix(p->w, d->layer, d->role)
                                : hd_weights_held_expert(p->w, d->layer, d->role, d->expert);
    *widened = vector != NULL;
    w.scale_type = w.scale ? w.scale_type : HD_NONE;
    w.data = vector ? (const void *)vector : read->data;
    w.scale = vector ? NULL : read->scale;
    return w;
}

static bool same_format(const hd_weight *a, const hd_weight *b) {
    return a->type == b->type && a->scale_type == b->scale_type && a->rows == b->rows &&
           a->cols == b->cols && a->block_rows == b->block_rows &&
           a->block_cols == b->block_cols && a->global == b->global &&
           a->power_scales == b->power_scales;
}

/* Tensor i of those that an update has: parameters, then copies. */
static int32_t decl_at(const hd_parameters *p, int32_t i) {
    return i < p->n ? p->decls[i]
                    : (int32_t)(p->copies[i - p->n].decl - hd_weights_schema(p->w)->decls);
}

static const float *master_at(const hd_parameters *p, int32_t i) {
    return p->all[i < p->n ? i : p->copies[i - p->n].parameter].master;
}

/* Rounds tensor i and its neighbors of the same format; returns how many. */
static int32_t round_some(const hd_parameters *p, int32_t i, hd_stream *s) {
    hd_round_weights_args a = {.bad = p->bad + i};
    for (; i + a.n < p->n + p->n_copies && a.n < HD_ROUND_MOST; a.n++) {
        bool widened;
        const hd_weight w = read_of(p, decl_at(p, i + a.n), &widened);
        if (a.n == 0) {
            a.like = w;
            a.widened = widened;
        } else if (widened != a.widened || !same_format(&a.like, &w)) {
            break;
        }
        a.data[a.n] = writable(w.data);
        a.scale[a.n] = writable(w.scale);
        a.values[a.n] = master_at(p, i + a.n);
    }
    p->ops->round_weights(s, &a);
    return a.n;
}

static hd_status round_in_place(void *ctx, hd_stream *s, hd_err *err) {
    const hd_parameters *p = ctx;
    const int32_t n = p->n + p->n_copies;
    hd_stream_clear(s, p->bad, (size_t)n * sizeof *p->bad);
    for (int32_t i = 0; i < n;) i += round_some(p, i, s);
    hd_stream_download(s, p->host_bad, p->bad, (size_t)n * sizeof *p->bad);
    HD_TRY(hd_stream_sync(s, err));
    for (int32_t i = 0; i < n; i++) {
        if (!p->host_bad[i]) continue;
        return HD_FAIL(err, HD_EFORMAT,
                       "trained weights: tensor %s: a value that is no finite "
                       "number, or larger than its format can hold",
                       hd_weights_schema(p->w)->decls[decl_at(p, i)].name);
    }
    return HD_OK;
}

hd_status hd_parameters_update_in_place(hd_parameters *p, hd_weights_update **out,
                                        hd_err *err) {
    return hd_weights_update_open_in_place(out, p->w, round_in_place, p, err);
}
