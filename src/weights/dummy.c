/* dummy.c - random (dummy) weights of one rank's shard, in the formats the config declares.
 *
 * Codes are random bits by a seed per tensor, generated where they are used: on a GPU
 * nothing passes through the host. A matrix of c columns has elements of mean square about 1
 * / c, so that activations neither vanish nor overflow. Tensors that operators read as
 * float32 are float32 here. */
#include "weights/dummy_internal.h"

#include <math.h>
#include <stdlib.h>

#include "base/checked.h"
#include "base/thread_pool.h"
#include "weights/summary.h"

/* A step reads a few rows of an Engram table, and rows of random numbers are alike: it has no more. */
enum { ALIGN = 256, MOST_TABLE_ROWS = 1 << 20 };

/* ---- sizes ---- */

/* The declared format; small tensors get the type they are read as. */
static hd_stored_format format_of(const hd_model_spec *spec, const hd_tensor_decl *d) {
    hd_stored_format f = hd_declared_format(spec, d);
    if (weights_is_small(d)) f.type = HD_F32;
    return f;
}

static size_t aligned(size_t n) {
    return (n + ALIGN - 1) / ALIGN * ALIGN;
}

static size_t bytes_of(const hd_slice *slice, const hd_stored_format *f) {
    return aligned(hd_stored_data_bytes(f, slice->rows, slice->cols)) +
           aligned(hd_stored_scale_bytes(f, slice->rows, slice->cols));
}

/* ---- values ---- */

/* For vectors: norms and the strengths of hyper-connections are 1, biases are 0. */
static bool is_one(const hd_tensor_decl *d) {
    switch (d->role) {
    case HD_INDEX_K_BIAS:
    case HD_SINK:
    case HD_ROUTER_BIAS:
    case HD_HC_HEAD_BASE:
    case HD_HC_ATTN_BASE:
    case HD_HC_FFN_BASE:
        return false;
    default:
        return true;
    }
}

/* The pattern of a tensor's elements. A matrix with scales has codes of any size; without, the
 * numbers have a root mean square of about `wanted`. */
static hd_random_fill data_pattern(const hd_tensor_decl *d, hd_dtype type, double wanted) {
    const double units = wanted / hd_dtypes[type].random_rms;
    if (d->rank == 1) return hd_dtype_repeat(type, is_one(d));
    return hd_dtype_random(type, ldexpf(1.0f, (int)lround(log2(units))));
}

/* Generates the bytes: in memory of the stream's device, or the host's. */
static void make(hd_stream *s, uint8_t *to, size_t bytes, const hd_random_fill *random_fill) {
    if (s) {
        hd_stream_random_fill(s, to, bytes, random_fill);
        return;
    }
    for (size_t i = 0; i * sizeof(uint64_t) < bytes; i++) {
        const uint64_t word = hd_random_fill_word(random_fill, i);
        memcpy(to + i * sizeof word, &word, sizeof word);
    }
}

/* Returns the scale of a matrix in a block format. */
static double scale_size(const hd_tensor_decl *d, const hd_stored_format *stored) {
    return 1 / sqrt((double)d->cols) / hd_dtypes[stored->type].random_rms;
}

/* An array of a tensor: its elements, and its scales if it has some. */
typedef struct array {
    uint8_t *data, *scale;
} array;

static void fill(hd_stream *s, array to, const hd_tensor_decl *d, const hd_slice *slice,
                 const hd_stored_format *stored, uint64_t seed) {
    const size_t n = hd_stored_data_bytes(stored, slice->rows, slice->cols);
    hd_random_fill codes = data_pattern(d, stored->type, 1 / sqrt((double)d->cols));
    codes.seed = seed;
    make(s, to.data, n, &codes);
    if (stored->scale_type == HD_NONE) return;
    const float size = stored->n_scalars > 0 ? 1.0f : (float)scale_size(d, stored);
    const hd_random_fill scales = hd_dtype_repeat(stored->scale_type, size);
    make(s, to.scale, hd_stored_scale_bytes(stored, slice->rows, slice->cols), &scales);
}

void weights_dummies_make(const hd_model_spec *spec, const hd_tensor_decl *d, int32_t decl,
                          hd_stream *s, uint8_t *data, uint8_t *scale) {
    const hd_stored_format stored = format_of(spec, d);
    const hd_slice all = {.rows = d->rows, .cols = d->cols};
    fill(s, (array){data, scale}, d, &all, &stored, (uint64_t)decl);
}

/* Binds a tensor to bytes at `data`, its scales at `scale`. */
static void bind_to(weights_bound *b, const uint8_t *data, const uint8_t *scale,
                    const hd_tensor_decl *d, const hd_slice *slice,
                    const hd_stored_format *stored) {
    const bool plain = stored->scale_type == HD_NONE, global = stored->n_scalars > 0;
    b->weight = (hd_weight){.data = data,
                            .scale = plain ? NULL : scale,
                            .type = stored->type,
                            .scale_type = stored->scale_type,
                            .rows = slice->rows,
                            .cols = slice->cols,
                            .block_rows = stored->block_rows,
                            .block_cols = stored->block_cols,
                            .global = global ? (float)scale_size(d, stored) : 1.0f,
                            .power_scales = stored->scale_type == HD_E8M0};
}

static void describe(hd_tensor *t, const hd_tensor_decl *d, const weights_bound *b,
                     size_t bytes) {
    *t = (hd_tensor){
        .name = d->name,
        .dtype_name = hd_dtype_name(b->weight.type),
        .dtype = b->weight.type,
        .rank = d->rank,
        .shape = {d->rank == 2 ? b->weight.rows : b->weight.cols, b->weight.cols},
        .data = b->weight.data,
        .bytes = bytes
    };
}

/* Returns whether this rank holds bytes of a tensor. Tables of integers are made elsewhere. */
static bool is_held(const hd_tensor_decl *d, const hd_slice *slice) {
    return slice->rows > 0 && d->role != HD_ROUTER_HASH && !d->unused;
}

static hd_slice slice_of(const weights_dummies_args *a, int32_t i) {
    hd_slice slice = a->slices[i];
    if (a->schema->decls[i].role == HD_ENGRAM_TABLE) {
        slice.rows = hd_min_i32(slice.rows, MOST_TABLE_ROWS);
    }
    return slice;
}

/* Where tensors lie: Engram tables in host memory, as those of files do. */
enum { OWN, ON_HOST, N_PLACES };

static int place_of(const weights_dummies_args *a, int32_t i) {
    return a->device && a->schema->decls[i].role == HD_ENGRAM_TABLE ? ON_HOST : OWN;
}

static hd_status take_block(weights_dummies *out, uint8_t *at[N_PLACES],
                            const size_t total[N_PLACES], hd_err *err) {
    void *block = NULL;
    if (!out->device) {
        HD_TRY((out->experts_later ? hd_block_init_untouched : hd_block_init)(
            &out->block, total[OWN], "dummy weights", err));
        at[OWN] = out->block.data;
        return HD_OK;
    }
    HD_TRY(hd_device_alloc(out->device, &block, total[OWN], "weights", err));
    at[OWN] = block;
    if (total[ON_HOST] == 0) return HD_OK;
    HD_TRY(hd_device_alloc_host(out->device, &block, total[ON_HOST], "Engram tables", err));
    at[ON_HOST] = block;
    return HD_OK;
}

/* Values in host memory: a tensor each for the threads. */
typedef struct host_fill {
    const weights_dummies_args *a;
    const weights_bound *bound;
    uint8_t *block;
} host_fill;

static hd_status fill_on_host(const void *arg, int32_t i, hd_err *err) {
    const host_fill *f = arg;
    const hd_tensor_decl *d = &f->a->schema->decls[i];
    const hd_stored_format stored = format_of(f->a->spec, d);
    const hd_slice slice = slice_of(f->a, i);
    (void)err;
    if (!is_held(d, &slice) || (f->a->experts_later && d->expert >= 0)) return HD_OK;
    uint8_t *at = f->block + ((const uint8_t *)f->bound[i].weight.data - f->block);
    const size_t n = hd_stored_data_bytes(&stored, slice.rows, slice.cols);
    fill(NULL, (array){at, at + aligned(n)}, d, &slice, &stored, (uint64_t)i);
    return HD_OK;
}

hd_status weights_dummies_init(weights_dummies *out, weights_bound *bound,
                               const weights_dummies_args *a, hd_err *err) {
    const hd_schema *schema = a->schema;
    size_t total[N_PLACES] = {ALIGN, 0};
    uint8_t *next[N_PLACES] = {0};
    *out = (weights_dummies){.device = a->device, .experts_later = a->experts_later};
    for (int32_t i = 0; i < schema->n; i++) {
        const hd_stored_format stored = format_of(a->spec, &schema->decls[i]);
        const hd_slice slice = slice_of(a, i);
        if (is_held(&schema->decls[i], &slice) && !a->shapes_only)
            total[place_of(a, i)] += bytes_of(&slice, &stored);
    }
    out->tensors = calloc((size_t)schema->n + 1, sizeof *out->tensors);
    if (!out->tensors) return HD_FAIL(err, HD_ENOMEM, "no memory for dummy weights");
    HD_TRY(take_block(out, next, total, err));
    for (int32_t i = 0; i < schema->n; i++) {
        const hd_tensor_decl *d = &schema->decls[i];
        const hd_stored_format stored = format_of(a->spec, d);
        const hd_slice slice = slice_of(a, i);
        if (!is_held(d, &slice)) continue;
        const size_t n = hd_stored_data_bytes(&stored, slice.rows, slice.cols);
        uint8_t *at = next[a->shapes_only ? OWN : place_of(a, i)];
        bind_to(&bound[i], at, a->shapes_only ? at : at + aligned(n), d, &slice, &stored);
        bound[i].weight.x_group = hd_quant_x_group(&a->spec->quant);
        describe(&out->tensors[i], d, &bound[i], n);
        bound[i].data = &out->tensors[i];
        if (a->shapes_only) continue;
        if (a->device) {
            fill(a->stream, (array){at, at + aligned(n)}, d, &slice, &stored, (uint64_t)i);
        }
        next[place_of(a, i)] += bytes_of(&slice, &stored);
    }
    out->bytes = total[OWN] + total[ON_HOST];
    if (a->device) return hd_stream_sync(a->stream, err);
    const host_fill f = {a, bound, out->block.data};
    return a->shapes_only ? HD_OK : hd_tasks_run(0, schema->n, fill_on_host, &f, err);
}

void weights_dummies_deinit(weights_dummies *d) {
    hd_block_deinit(&d->block);
    free(d->tensors);
    *d = (weights_dummies){0};
}
