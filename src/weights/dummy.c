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
#include "weights/summary.h"

enum { ALIGN = 256 };

/* Root mean squares of random codes: E4M3 with every other exponent of the upper half, since
 * checkpoints scale blocks up to the format's limit; E2M1; and numbers of either sign
 * between 1 and 2. */
static const double rms_e4m3 = 96.9, rms_e2m1 = 2.93, rms_plain = 1.5275;

/* ---- sizes ---- */

/* The declared format; F16 becomes BF16, which has the same size, and small tensors get the
 * type they are read as. */
static hd_stored_format format_of(const hd_model_spec *spec, const hd_tensor_decl *d) {
    hd_stored_format f = hd_declared_format(spec, d);
    if (f.type == HD_F16) f.type = HD_BF16;
    if (weights_is_small(d)) f.type = HD_F32;
    return f;
}

static size_t data_bytes(const hd_slice *slice, const hd_stored_format *f) {
    return (size_t)slice->rows * (size_t)slice->cols * (size_t)hd_dtype_bits(f->type) / 8;
}

static size_t n_scales(const hd_slice *slice, const hd_stored_format *f) {
    if (f->scale_type == HD_NONE) return 0;
    return (size_t)hd_ceil_div(slice->rows, f->block_rows) *
           (size_t)hd_ceil_div(slice->cols, f->block_cols);
}

static size_t aligned(size_t n) {
    return (n + ALIGN - 1) / ALIGN * ALIGN;
}

static size_t bytes_of(const hd_slice *slice, const hd_stored_format *f) {
    const size_t scale = n_scales(slice, f) * (size_t)hd_dtype_bits(f->scale_type) / 8;
    return aligned(data_bytes(slice, f)) + aligned(scale);
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

/* The fill pattern of numbers `v`; with `drawn`, of numbers between v and 2 v of either
 * sign, v a power of two. */
static hd_random_fill pattern(hd_dtype type, float v, bool drawn) {
    const uint32_t half = hd_f32_to_bf16(v);
    if (type == HD_F32) {
        return (hd_random_fill){.keep = drawn ? 0x807fffffu : 0, .set = hd_f32_bits(v)};
    }
    return (hd_random_fill){.keep = drawn ? 0x807f807fu : 0, .set = half << 16 | half};
}

/* All scales of a tensor are one power of two, or one number if the type can represent it. */
static hd_random_fill scale_pattern(hd_dtype type, double value) {
    uint32_t code;
    if (type == HD_F32 || type == HD_BF16) return pattern(type, (float)value, false);
    code = type == HD_E8M0 ? (uint32_t)(127 + (int)lround(log2(value)))
                           : hd_f32_to_e4m3((float)value);
    return (hd_random_fill){.set = code * 0x01010101u};
}

static hd_random_fill data_pattern(const hd_tensor_decl *d, hd_dtype type, double wanted) {
    if (d->rank == 1) return pattern(type, (float)is_one(d), false);
    if (type == HD_E2M1) return (hd_random_fill){.keep = 0xffffffffu};
    if (type == HD_E4M3) return (hd_random_fill){.keep = 0xb7b7b7b7u, .set = 0x40404040u};
    return pattern(type, ldexpf(1.0f, (int)lround(log2(wanted / rms_plain))), true);
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
    return 1 / sqrt((double)d->cols) / (stored->type == HD_E2M1 ? rms_e2m1 : rms_e4m3);
}

static void fill(hd_stream *s, uint8_t *data, const hd_tensor_decl *d, const hd_slice *slice,
                 const hd_stored_format *stored, uint64_t seed) {
    const size_t n = data_bytes(slice, stored);
    hd_random_fill codes = data_pattern(d, stored->type, 1 / sqrt((double)d->cols));
    codes.seed = seed;
    make(s, data, n, &codes);
    if (stored->scale_type == HD_NONE) return;
    const double size = stored->scale_type == HD_E4M3 ? 1 : scale_size(d, stored);
    const hd_random_fill scales = scale_pattern(stored->scale_type, size);
    const size_t each = (size_t)hd_dtype_bits(stored->scale_type) / 8;
    make(s, data + aligned(n), n_scales(slice, stored) * each, &scales);
}

/* Binds a tensor to bytes at `data`, its scales at `scale`. */
static void bind_to(weights_bound *b, const uint8_t *data, const uint8_t *scale,
                    const hd_tensor_decl *d, const hd_slice *slice,
                    const hd_stored_format *stored) {
    const bool plain = stored->scale_type == HD_NONE, global = stored->scale_type == HD_E4M3;
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
    return slice->rows > 0 && d->role != HD_ROUTER_HASH;
}

static hd_status take_block(weights_dummies *out, size_t total, hd_err *err) {
    if (out->device)
        return hd_device_alloc(out->device, &out->on_device, total, "weights", err);
    return hd_block_init(&out->block, total, "dummy weights", err);
}

hd_status weights_dummies_init(weights_dummies *out, weights_bound *bound,
                               const weights_dummies_args *a, hd_err *err) {
    const hd_schema *schema = a->schema;
    size_t total = ALIGN;
    *out = (weights_dummies){.device = a->device};
    for (int32_t i = 0; i < schema->n; i++) {
        const hd_stored_format stored = format_of(a->spec, &schema->decls[i]);
        const hd_slice *slice = &a->slices[i];
        if (is_held(&schema->decls[i], slice) && !a->shapes_only)
            total += bytes_of(slice, &stored);
    }
    out->tensors = calloc((size_t)schema->n + 1, sizeof *out->tensors);
    if (!out->tensors) return HD_FAIL(err, HD_ENOMEM, "no memory for dummy weights");
    HD_TRY(take_block(out, total, err));
    uint8_t *at = a->device ? out->on_device : out->block.data;
    for (int32_t i = 0; i < schema->n; i++) {
        const hd_tensor_decl *d = &schema->decls[i];
        const hd_stored_format stored = format_of(a->spec, d);
        const hd_slice *slice = &a->slices[i];
        if (!is_held(d, slice)) continue;
        const size_t n = data_bytes(slice, &stored);
        bind_to(&bound[i], at, a->shapes_only ? at : at + aligned(n), d, slice, &stored);
        describe(&out->tensors[i], d, &bound[i], n);
        bound[i].data = &out->tensors[i];
        if (a->shapes_only) continue;
        fill(a->device ? a->stream : NULL, at, d, slice, &stored, (uint64_t)i);
        at += bytes_of(slice, &stored);
    }
    out->bytes = total;
    return a->device ? hd_stream_sync(a->stream, err) : HD_OK;
}

void weights_dummies_deinit(weights_dummies *d) {
    hd_block_deinit(&d->block);
    free(d->tensors);
    *d = (weights_dummies){0};
}
