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
    float *host_gradients; /* those of the device, or a copy in pinned memory */
    int64_t elements, summed;
    int64_t first, own; /* the slice */
    float *block;       /* [HD_N_PARAMETER_ARRAYS, own] */
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

static bool trains(void *ctx, const hd_tensor_decl *d) {
    const hd_parameters *p = ctx;
    const bool among = d->layer < p->spec->n_layers || p->o.drafts;
    return among && !(p->o.frozen >> hd_param_group_of(d->role) & 1);
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

/* In host memory; NULL: it is not trained. */
static const float *gradient_of(const hd_parameters *p, const hd_tensor_decl *d) {
    int64_t n;
    const float *all = hd_gradients_all(p->gradients, &n);
    const float *grad = hd_gradients_at(p->gradients, d->layer, d->role);
    return grad ? p->host_gradients + (grad - all) : NULL;
}

static void add(hd_parameters *p, int32_t decl) {
    const hd_tensor_decl *d = &hd_weights_schema(p->w)->decls[decl];
    const float *grad = gradient_of(p, d);
    const int64_t n = (int64_t)d->rows * d->cols;
    p->decls[p->n] = decl;
    p->all[p->n++] = (hd_parameter){.name = d->name,
                                    .grad = grad + (d->expert > 0 ? d->expert * n : 0),
                                    .rows = d->rows,
                                    .cols = d->cols,
                                    .stack = d->role == HD_O_A ? p->spec->o_groups : 1,
                                    .kind = kind_of(p, d),
                                    .decays = d->rank == 2 && !is_vector(p, d)};
    p->elements += n;
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

static void list(hd_parameters *p) {
    const hd_schema *schema = hd_weights_schema(p->w);
    for (int32_t i = 0; i < schema->n; i++) {
        const hd_tensor_decl *d = &schema->decls[i];
        if (d->duplicate || !hd_gradients_at(p->gradients, d->layer, d->role)) continue;
        if (trains(p, d)) add(p, i);
    }
    for (int32_t i = 0; i < schema->n && p->o.biases; i++) {
        const hd_tensor_decl *d = &schema->decls[i];
        if (d->role == HD_ROUTER_BIAS && !hd_weights_missing(p->w, i) && trains(p, d)) {
            add_bias(p, i);
        }
    }
    for (int32_t i = 0; i < schema->n; i++) {
        if (schema->decls[i].duplicate && hd_weights_stored(p->w, i)) {
            add_copy(p, &schema->decls[i]);
        }
    }
}

/* ---- their arrays ---- */

static int64_t size_of(const hd_parameter *q) {
    return (int64_t)q->rows * q->cols;
}

/* The order of all elements: that of the gradients, then the biases. */
static void place(hd_parameters *p) {
    for (int32_t i = 0; i < p->n; i++) {
        const hd_parameter *q = &p->all[i];
        if (!q->grad) continue;
        p->at[i] = q->grad - p->host_gradients;
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

static void read_stored(const hd_parameters *p, int32_t decl, const hd_parameter *q) {
    const hd_weight *w = hd_weights_stored(p->w, decl);
    for (int64_t i = 0; i < q->n; i++) {
        const int64_t at = q->begin + i;
        q->master[i] = hd_weight_at(w, (int32_t)(at / w->cols), (int32_t)(at % w->cols));
    }
}

/* Points a parameter to its elements in arrays, which begin with element `first`. */
static void point(hd_parameter *q, float *const *arrays, int64_t at) {
    q->master = arrays[HD_PARAMETER_MASTER] + at;
    q->first = q->kind == HD_UPDATE_BALANCE ? NULL : arrays[HD_PARAMETER_FIRST] + at;
    q->second = q->kind == HD_UPDATE_ADAMW ? arrays[HD_PARAMETER_SECOND] + at : NULL;
}

static hd_status take_arrays(hd_parameters *p, hd_err *err) {
    float *arrays[HD_N_PARAMETER_ARRAYS];
    p->first = cut(p, p->o.rank);
    p->own = cut(p, p->o.rank + 1) - p->first;
    if (p->o.shapes_only) return HD_OK;
    p->block = calloc((size_t)p->own * HD_N_PARAMETER_ARRAYS + 1, sizeof *p->block);
    if (!p->block) {
        return HD_FAIL(err, HD_ENOMEM, "no memory for the masters and moments of %lld weights",
                       (long long)p->own);
    }
    for (int k = 0; k < HD_N_PARAMETER_ARRAYS; k++) arrays[k] = p->block + k * p->own;
    for (int32_t i = 0; i < p->n; i++) {
        hd_parameter *q = &p->all[i];
        const int64_t from = hd_max_i64(p->at[i], p->first);
        const int64_t to = hd_min_i64(p->at[i] + size_of(q), p->first + p->own);
        q->n = hd_max_i64(to - from, 0);
        q->begin = q->n ? from - p->at[i] : 0;
        if (q->grad) q->grad += q->begin;
        point(q, arrays, q->n ? from - p->first : 0);
        read_stored(p, p->decls[i], q);
    }
    return HD_OK;
}

static hd_status open_host_gradients(hd_parameters *p, hd_err *err) {
    int64_t n;
    void *host;
    p->host_gradients = hd_gradients_all(p->gradients, &n);
    if (hd_device_is_host(p->device)) return HD_OK;
    p->host_gradients = NULL;
    HD_TRY(hd_device_alloc_host(p->device, &host, (size_t)n * sizeof *p->host_gradients,
                                "gradients on the host", err));
    p->host_gradients = host;
    return HD_OK;
}

static hd_status open_all(hd_parameters *p, hd_device *d, hd_err *err) {
    const size_t n = (size_t)hd_weights_schema(p->w)->n + 1;
    HD_TRY(hd_gradients_open(&p->gradients, p->w, d, trains, p, err));
    HD_TRY(open_host_gradients(p, err));
    p->all = calloc(n, sizeof *p->all);
    p->decls = calloc(n, sizeof *p->decls);
    p->at = calloc(n, sizeof *p->at);
    p->copies = calloc(n, sizeof *p->copies);
    if (!p->all || !p->decls || !p->at || !p->copies) {
        return HD_FAIL(err, HD_ENOMEM, "no memory for the list of parameters");
    }
    list(p);
    if (p->n == 0) return HD_FAIL(err, HD_EINVAL, "nothing is trained: all is frozen");
    place(p);
    return take_arrays(p, err);
}

hd_status hd_parameters_open(hd_parameters **out, const hd_model_spec *spec,
                             const hd_weights *w, hd_device *d, const hd_parameters_options *o,
                             hd_err *err) {
    *out = NULL;
    hd_parameters *p = calloc(1, sizeof *p);
    if (!p) return HD_FAIL(err, HD_ENOMEM, "no memory for parameters");
    p->spec = spec;
    p->w = w;
    p->o = *o;
    p->device = d;
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
    if (!hd_device_is_host(p->device)) hd_device_release(p->device, p->host_gradients);
    hd_gradients_close(p->gradients);
    free(p->all);
    free(p->decls);
    free(p->at);
    free(p->copies);
    free(p->block);
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
    int64_t n;
    const float *all = hd_gradients_all(p->gradients, &n);
    hd_gradients_join_drafts(p->gradients, ops, s);
    if (all != p->host_gradients) {
        hd_stream_download(s, p->host_gradients, all, (size_t)n * sizeof *all);
    }
    return hd_stream_sync(s, err);
}

/* ---- the routers' biases ---- */

static void balance_layer(const hd_parameter *q, const int64_t *selected, double rate) {
    int64_t all = 0;
    for (int32_t e = 0; e < q->cols; e++) all += selected[e];
    for (int64_t i = 0; i < q->n; i++) {
        const int64_t more =
            selected[q->begin + i] * q->cols - all; /* than the mean, times n */
        if (more) q->master[i] += more > 0 ? (float)-rate : (float)rate;
    }
}

void hd_parameters_balance(hd_parameters *p, const int64_t *selected, double rate) {
    for (int32_t i = 0; i < p->n; i++) {
        const hd_parameter *q = &p->all[i];
        const hd_tensor_decl *d = &hd_weights_schema(p->w)->decls[p->decls[i]];
        if (q->kind != HD_UPDATE_BALANCE) continue;
        balance_layer(q, selected + (int64_t)d->layer * q->cols, rate);
    }
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
    const float *all = (const float *)(const void *)masters->data;
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

float *hd_parameters_host_gradients(const hd_parameters *p, int64_t *n) {
    *n = p->summed;
    return p->host_gradients;
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
