/* bind.c - determines how one tensor is stored: plain, FP8 blocks, packed FP4 or NVFP4.
 *
 * The dtype of the data and the names beside it decide (models.md 3.7 to 3.10), because
 * files mix formats and configs do not always declare it. The rows of hd_formats say which
 * dtypes and names belong to which format.
 *
 * Plain experts may also be stacked: gate_up_proj [experts, gate rows then up rows, columns]
 * and down_proj [experts, rows, columns]. */
#include "weights/bind_internal.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/checked.h"

enum { MAX_NAME = 1100 };

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

static const hd_tensor *find_scale(const binding *b, const hd_format_row *row) {
    const hd_tensor *t = NULL;
    for (int i = 0; i < HD_FORMAT_NAMES && row->scale_names[i] && !t; i++) {
        t = find_beside(b, row->scale_names[i]);
    }
    return t;
}

/* A sentence's list: "a, b or c". */
typedef struct choices {
    char text[200];
} choices;

static void add(choices *c, const char *separator, const char *name) {
    const size_t used = strlen(c->text);
    snprintf(c->text + used, sizeof c->text - used, "%s%s", used ? separator : "", name);
}

static choices scale_types_of(const hd_format_row *row) {
    choices c = {""};
    for (int i = 0; i < HD_FORMAT_TYPES && row->scale_types[i] != HD_NONE; i++) {
        const bool last = i + 1 == HD_FORMAT_TYPES || row->scale_types[i + 1] == HD_NONE;
        add(&c, last ? " or " : ", ", hd_dtype_name(row->scale_types[i]));
    }
    return c;
}

/* Names of scales for data of a dtype, by format. */
static choices scale_names_for(hd_dtype dtype) {
    choices c = {""};
    for (int f = 0; f < HD_N_FORMATS; f++) {
        const hd_format_row *row = &hd_formats[f];
        if (!hd_format_lists(row->file_types, dtype)) continue;
        for (int i = 0; i < HD_FORMAT_NAMES && row->scale_names[i]; i++) {
            add(&c, i == 0 ? ", or " : " or ", row->scale_names[i]);
        }
        if (row->global_name) add(&c, " and ", row->global_name);
    }
    return c;
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
    const hd_tensor *scale = find_scale(b, &hd_formats[HD_FORMAT_FP8]);
    HD_TRY(check_shape(b, data, "shape mismatch", b->decl->rank == 2 ? b->decl->rows : 0,
                       b->decl->cols));
    if (!scale) return HD_OK;
    return weights_misfit(b->checkpoint, data, b->err,
                          "dtype mismatch: %s is not quantized, yet %.100s lies beside it",
                          data->dtype_name, scale->name);
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

/* Checks scale, the tensor beside the data, and sets the blocks. */
static hd_status bind_scale(const binding *b, const hd_tensor *scale) {
    const hd_quant_spec *q = &b->spec->quant;
    const hd_format_row *row = b->out->format;
    const bool declared = row->block_declared && q->block_rows > 0 && q->block_cols > 0;
    hd_weight *w = &b->out->weight;
    w->block_rows = declared ? q->block_rows : row->block_rows;
    w->block_cols = declared ? q->block_cols : row->block_cols;
    if (!hd_format_lists(row->scale_types, scale->dtype)) {
        return weights_misfit(b->checkpoint, scale, b->err, "bad scale: dtype %s, must be %s",
                              scale->dtype_name, scale_types_of(row).text);
    }
    if (row->global_name) HD_TRY(read_global(b, find_beside(b, row->global_name)));
    HD_TRY(check_shape(b, scale, "bad scale", hd_ceil_div(w->rows, w->block_rows),
                       hd_ceil_div(w->cols, w->block_cols)));
    b->out->scale = scale;
    w->scale = scale->data;
    w->scale_type = scale->dtype;
    w->power_scales = q->scale_ue8m0 || scale->dtype == HD_E8M0;
    w->x_group = hd_quant_x_group(q);
    return HD_OK;
}

/* A file counts elements, or the bytes into which they are packed. */
static hd_status bind_quantized(const binding *b, const hd_tensor *data) {
    const hd_format_row *row = b->out->format;
    const int32_t bits = hd_dtype_bits(row->type);
    const int64_t row_bits = (int64_t)b->decl->cols * bits;
    const bool packed = bits < hd_dtype_bits(data->dtype);
    b->out->weight.type = row->type;
    if (row_bits % 8) {
        return weights_misfit(b->checkpoint, data, b->err,
                              "dtype mismatch: %d columns of %d bits do not fill whole bytes",
                              b->decl->cols, bits);
    }
    HD_TRY(check_shape(b, data, "shape mismatch", b->decl->rows,
                       packed ? row_bits / 8 : b->decl->cols));
    const hd_tensor *scale = find_scale(b, row);
    if (scale) return bind_scale(b, scale);
    return weights_misfit(b->checkpoint, data, b->err,
                          "bad scale: %s needs a scale tensor beside it: %s", data->dtype_name,
                          scale_names_for(data->dtype).text);
}

/* The format whose files have this dtype: the one whose global scale lies beside the data, else
 * the first without a global scale. */
static const hd_format_row *find_format(const binding *b, hd_dtype dtype) {
    const hd_format_row *found = NULL;
    for (int f = 0; f < HD_N_FORMATS; f++) {
        const hd_format_row *row = &hd_formats[f];
        if (!hd_format_lists(row->file_types, dtype)) continue;
        if (!row->global_name && !found) found = row;
        if (row->global_name && find_beside(b, row->global_name)) return row;
    }
    return found;
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
    case HD_DSPARK_CONFIDENCE:
    case HD_ENGRAM_Q:
    case HD_ENGRAM_K:
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
    out->format = d->role == HD_ENGRAM_TABLE && data->dtype == HD_E4M3
                      ? &hd_formats[HD_FORMAT_MXFP8]
                      : find_format(&b, data->dtype);
    if (!out->format) return refuse_dtype(&b, data, "F32, F16, BF16 or a quantized type");
    if (out->format->scale_types[0] == HD_NONE) return bind_plain(&b, data);
    if (weights_is_small(d)) return refuse_dtype(&b, data, "F32, F16 or BF16");
    return bind_quantized(&b, data);
}
