/* bind.c - determines how one tensor is stored: plain, FP8 blocks, packed FP4 or NVFP4.
 *
 * The dtype of the data and the names beside it decide (models.md 3.7 to 3.10), because
 * files mix formats and configs do not always declare it:
 *
 *     F32, F16, BF16  alone
 *     F8_E4M3         X.weight_scale_inv or X.scale, one per block of 128 x 128
 *     I8, F4          X.scale, F8_E8M0, one per 32 columns; two elements per byte
 *     U8, F4          X.weight_scale, F8_E4M3, one per 16 columns; X.weight_scale_2, one F32
 *
 * Plain experts may also be stacked: gate_up_proj [experts, gate rows then up rows, columns]
 * and down_proj [experts, rows, columns]. */
#include "weights/bind_internal.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/checked.h"

enum { FP8_BLOCK = 128, FP4_GROUP = 32, NVFP4_GROUP = 16, MAX_NAME = 1100 };

static const char weight_end[] = ".weight";

typedef struct binding {
    weights_bound *out;
    const hd_checkpoint *checkpoint;
    const hd_model_spec *spec;
    const hd_tensor_decl *decl;
    hd_err *err;
} binding;

hd_status weights_misfit(const hd_checkpoint *c, const hd_tensor *t, hd_err *err,
                         const char *fmt, ...) {
    char why[300];
    va_list args;
    va_start(args, fmt);
    vsnprintf(why, sizeof why, fmt, args);
    va_end(args);
    return HD_FAIL(err, HD_EFORMAT, "%s: tensor %.200s: %s",
                   hd_checkpoint_shard_path(c, t->shard), t->name, why);
}

/* ---- shapes ---- */

static void shape_text(char *out, size_t cap, const int64_t *shape, int32_t rank) {
    size_t used = (size_t)snprintf(out, cap, "[");
    for (int32_t i = 0; i < rank && used < cap; i++) {
        used += (size_t)snprintf(out + used, cap - used, "%s%lld", i ? ", " : "",
                                 (long long)shape[i]);
    }
    if (used < cap) snprintf(out + used, cap - used, "]");
}

/* why: "shape mismatch" or "bad scale". */
static hd_status expect_shape(const binding *b, const hd_tensor *t, const char *why,
                              const int64_t *want, int32_t rank) {
    bool same = t->rank == rank;
    for (int32_t i = 0; same && i < rank; i++) same = t->shape[i] == want[i];
    if (same) return HD_OK;
    char have[100], need[60];
    shape_text(have, sizeof have, t->shape, t->rank);
    shape_text(need, sizeof need, want, rank);
    return weights_misfit(b->checkpoint, t, b->err, "%s: shape %s in the file, must be %s", why,
                          have, need);
}

/* Requires [rows, cols], or [cols] if rows is 0. */
static hd_status check_shape(const binding *b, const hd_tensor *t, const char *why,
                             int64_t rows, int64_t cols) {
    const int64_t want[2] = {rows > 0 ? rows : cols, cols};
    return expect_shape(b, t, why, want, rows > 0 ? 2 : 1);
}

/* ---- the tensors beside a tensor ---- */

/* The name without ".weight", or all of it, followed by tail. */
static const hd_tensor *find_beside(const binding *b, const char *tail) {
    char name[MAX_NAME];
    const char *own = b->out->data->name;
    size_t n = strlen(own), end = sizeof weight_end - 1;
    if (n >= end && strcmp(own + n - end, weight_end) == 0) n -= end;
    int len = snprintf(name, sizeof name, "%.*s%s", (int)n, own, tail);
    if (len < 0 || len >= (int)sizeof name) return NULL;
    return hd_checkpoint_find(b->checkpoint, name);
}

static const hd_tensor *find_block_scale(const binding *b) {
    const hd_tensor *t = find_beside(b, ".weight_scale_inv");
    return t ? t : find_beside(b, ".scale");
}

static hd_status missing_scale(const binding *b, const hd_tensor *data, const char *names) {
    return weights_misfit(b->checkpoint, data, b->err,
                          "bad scale: %s needs a scale tensor beside it: %s", data->dtype_name,
                          names);
}

static hd_status use_scale(const binding *b, const hd_tensor *scale, int32_t block_rows,
                           int32_t block_cols) {
    hd_weight *w = &b->out->weight;
    HD_TRY(check_shape(b, scale, "bad scale", hd_ceil_div(w->rows, block_rows),
                       hd_ceil_div(w->cols, block_cols)));
    b->out->scale = scale;
    w->scale = scale->data;
    w->scale_type = scale->dtype;
    w->power_scales = b->spec->quant.scale_ue8m0 || scale->dtype == HD_E8M0;
    w->block_rows = block_rows;
    w->block_cols = block_cols;
    return HD_OK;
}

static hd_status bad_scale_type(const binding *b, const hd_tensor *scale, const char *must) {
    return weights_misfit(b->checkpoint, scale, b->err, "bad scale: dtype %s, must be %s",
                          scale->dtype_name, must);
}

/* ---- the formats ---- */

/* Binds one expert's matrix in a tensor that stacks all experts. */
static hd_status bind_stacked(const binding *b, const hd_tensor *data) {
    const hd_tensor_decl *d = b->decl;
    const int64_t parts = d->role == HD_EXPERT_DOWN ? 1 : 2;
    const int64_t want[3] = {b->spec->route.n_experts, parts * d->rows, d->cols};
    HD_TRY(expect_shape(b, data, "shape mismatch", want, 3));
    const size_t matrix = data->bytes / (size_t)(parts * want[0]);
    const int64_t at = d->expert * parts + (d->role == HD_EXPERT_UP);
    b->out->weight.data = data->data + (size_t)at * matrix;
    return HD_OK;
}

static hd_status bind_plain(const binding *b, const hd_tensor *data) {
    if (b->decl->expert >= 0 && data->rank == 3) return bind_stacked(b, data);
    const hd_tensor *scale = find_block_scale(b);
    HD_TRY(check_shape(b, data, "shape mismatch", b->decl->rank == 2 ? b->decl->rows : 0,
                       b->decl->cols));
    if (!scale) return HD_OK;
    return weights_misfit(b->checkpoint, data, b->err,
                          "dtype mismatch: %s is not quantized, yet %.100s lies beside it",
                          data->dtype_name, scale->name);
}

static hd_status bind_fp8(const binding *b, const hd_tensor *data) {
    const hd_quant_spec *q = &b->spec->quant;
    const hd_tensor *scale = find_block_scale(b);
    HD_TRY(check_shape(b, data, "shape mismatch", b->decl->rows, b->decl->cols));
    if (!scale) return missing_scale(b, data, ".weight_scale_inv or .scale");
    if (scale->dtype != HD_F32 && scale->dtype != HD_BF16 && scale->dtype != HD_E8M0) {
        return bad_scale_type(b, scale, "F32, BF16 or F8_E8M0");
    }
    return use_scale(b, scale, q->block_rows > 0 ? q->block_rows : FP8_BLOCK,
                     q->block_cols > 0 ? q->block_cols : FP8_BLOCK);
}

static hd_status read_global(const binding *b, const hd_tensor *global) {
    hd_weight *w = &b->out->weight;
    bool scalar = global->dtype == HD_F32 && global->bytes == sizeof w->global;
    if (scalar) memcpy(&w->global, global->data, sizeof w->global);
    if (!scalar || !(w->global > 0 && isfinite(w->global))) {
        return weights_misfit(b->checkpoint, global, b->err,
                              "bad scale: must be one positive F32 number");
    }
    b->out->global = global;
    return HD_OK;
}

/* packed: the file counts bytes of two elements, else elements. */
static hd_status bind_fp4(const binding *b, const hd_tensor *data, bool packed) {
    const hd_tensor *global = find_beside(b, ".weight_scale_2");
    const hd_tensor *scale = global ? find_beside(b, ".weight_scale") : find_block_scale(b);
    int32_t cols = b->decl->cols;
    b->out->weight.type = HD_E2M1;
    if (cols % 2) {
        return weights_misfit(b->checkpoint, data, b->err,
                              "dtype mismatch: %d columns cannot be packed in pairs", cols);
    }
    HD_TRY(check_shape(b, data, "shape mismatch", b->decl->rows, packed ? cols / 2 : cols));
    if (!scale) {
        return missing_scale(b, data, ".scale, or .weight_scale and .weight_scale_2");
    }
    if (!global) {
        if (scale->dtype != HD_E8M0) return bad_scale_type(b, scale, "F8_E8M0");
        return use_scale(b, scale, 1, FP4_GROUP);
    }
    if (scale->dtype != HD_E4M3) return bad_scale_type(b, scale, "F8_E4M3");
    HD_TRY(read_global(b, global));
    return use_scale(b, scale, 1, NVFP4_GROUP);
}

static hd_status refuse_dtype(const binding *b, const hd_tensor *data, const char *must) {
    return weights_misfit(b->checkpoint, data, b->err, "dtype mismatch: %s, must be %s",
                          data->dtype_name, must);
}

static hd_status bind_table(const binding *b, const hd_tensor *data) {
    if (data->dtype != HD_I64 && data->dtype != HD_I32) {
        return refuse_dtype(b, data, "I64 or I32");
    }
    return check_shape(b, data, "shape mismatch", b->decl->rows, b->decl->cols);
}

bool weights_is_small(const hd_tensor_decl *d) {
    switch (d->role) {
    case HD_HC_HEAD_FN:
    case HD_HC_ATTN_FN:
    case HD_HC_FFN_FN:
    case HD_COMP_APE:
    case HD_INDEX_COMP_APE:
        return true;
    default:
        return d->rank == 1;
    }
}

hd_status weights_bind(weights_bound *out, const hd_checkpoint *c, const hd_model_spec *spec,
                       const hd_tensor_decl *d, const hd_tensor *data, hd_err *err) {
    const binding b = {out, c, spec, d, err};
    *out = (weights_bound){
        .data = data,
        .weight = {.data = data->data,
                   .type = data->dtype,
                   .rows = d->rows,
                   .cols = d->cols,
                   .global = 1.0f}
    };
    if (d->role == HD_ROUTER_HASH) return bind_table(&b, data);
    switch (data->dtype) {
    case HD_F32:
    case HD_F16:
    case HD_BF16:
        return bind_plain(&b, data);
    case HD_E4M3:
    case HD_I8:
    case HD_U8:
    case HD_E2M1:
        if (weights_is_small(d)) return refuse_dtype(&b, data, "F32, F16 or BF16");
        if (data->dtype == HD_E4M3) return bind_fp8(&b, data);
        return bind_fp4(&b, data, data->dtype != HD_E2M1);
    case HD_NONE:
    case HD_E8M0:
    case HD_I32:
    case HD_I64:
    case HD_N_DTYPES:
        break;
    }
    return refuse_dtype(&b, data, "F32, F16, BF16 or a quantized type");
}

/* ---- scale values ---- */

static const char *fault_of(float v) {
    if (isnan(v)) return "NaN";
    if (isinf(v)) return "infinite";
    if (v == 0) return "zero";
    return v < 0 ? "negative" : NULL;
}

/* Returns whether an E4M3 scale is negative or NaN. It is one pass without branches, because
 * the scales of a large NVFP4 model are tens of gigabytes. */
static bool any_bad_e4m3(const uint8_t *data, size_t n) {
    uint8_t bad = 0;
    for (size_t i = 0; i < n; i++) bad |= data[i] > 0x7e;
    return bad;
}

/* Returns the index of the first bad scale in [0, n), or n. */
static size_t find_bad(const hd_tensor *t, size_t n, const char **fault) {
    const uint8_t *data = t->data;
    if (t->dtype == HD_E4M3 && !any_bad_e4m3(data, n)) return n;
    for (size_t i = 0; i < n; i++) {
        float f = 1;
        uint16_t half;
        if (t->dtype == HD_F32) {
            memcpy(&f, data + 4 * i, sizeof f);
        } else if (t->dtype == HD_BF16) {
            memcpy(&half, data + 2 * i, sizeof half);
            f = hd_bf16_to_f32(half);
        } else if (data[i] > 0x7e) { /* E4M3 */
            f = (data[i] & 0x7f) == 0x7f ? NAN : -1.0f;
        }
        *fault = fault_of(f);
        if (*fault) return i;
    }
    return n;
}

/* E8M0 has one invalid code, NaN. NVFP4 exporters let the scale of a very small group
 * underflow to zero, which means that the group is zero: that is valid. */
hd_status weights_check_scales(const hd_checkpoint *c, const weights_bound *b, hd_err *err) {
    const hd_tensor *t = b->scale;
    if (!t || t->bytes == 0) return HD_OK;
    const char *fault = NULL;
    size_t n = t->bytes * 8 / (size_t)hd_dtype_bits(t->dtype), i = n;
    if (t->dtype == HD_E8M0) {
        const uint8_t *bad = memchr(t->data, 0xff, n);
        if (bad) i = (size_t)(bad - t->data);
        fault = "NaN";
    } else {
        i = find_bad(t, n, &fault);
    }
    if (i == n) return HD_OK;
    return weights_misfit(c, t, err, "bad scale: [%lld, %lld] is %s",
                          (long long)i / (long long)t->shape[1],
                          (long long)i % (long long)t->shape[1], fault);
}
