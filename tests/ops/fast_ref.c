/* fast_ref.c - the orders and the roundings of --precision fast, one output at a time. */
#include "ops/fast_ref.h"

#include <math.h>

#include "ops/act_internal.h"

enum { SEGMENT = 128, SUMS = 16, STEPS = 4 };

/* The two columns of a segment that sum `lane` takes in step q. */
static void pair_of(int32_t pair[2], hd_dtype type, int32_t lane, int32_t q) {
    switch (type) {
    case HD_E2M1:
        pair[0] = 8 * lane + q;
        pair[1] = pair[0] + 4;
        return;
    case HD_E4M3:
        pair[0] = q / 2 * 64 + lane / 4 * 16 + q % 2 * 8 + lane % 4 * 2;
        break;
    default:
        pair[0] = q * 32 + lane * 2;
    }
    pair[1] = pair[0] + 1;
}

static float scale_at(const hd_weight *w, int32_t row, int32_t col) {
    if (!w->scale) return 1.0f;
    const int32_t per_row = (w->cols + w->block_cols - 1) / w->block_cols;
    const hd_weight scales = {.data = w->scale,
                              .type = w->scale_type,
                              .rows = row / w->block_rows + 1,
                              .cols = per_row,
                              .global = 1.0f};
    const int32_t r = row / w->block_rows, c = col / w->block_cols;
    const float stored =
        w->scale_type == HD_E8M0
            ? hd_e8m0_to_f32(((const uint8_t *)w->scale)[(int64_t)r * per_row + c])
            : hd_weight_at(&scales, r, c);
    return stored * w->global;
}

static float element_at(const hd_weight *w, int32_t row, int32_t col) {
    hd_weight plain = *w;
    plain.scale = NULL;
    plain.global = 1.0f;
    return col < w->cols ? hd_weight_at(&plain, row, col) : 0.0f;
}

static float rounded(const float *x, int32_t n, int32_t col) {
    return col < n ? hd_bf16_to_f32(hd_f32_to_bf16(x[col])) : 0.0f;
}

static float dot(const hd_weight *w, int32_t row, const float *x) {
    float sum[SUMS] = {0};
    for (int32_t c = 0; c < w->cols; c += SEGMENT) {
        for (int32_t lane = 0; lane < SUMS; lane++) {
            float part = 0.0f;
            int32_t pair[2];
            for (int32_t q = 0; q < STEPS; q++) {
                pair_of(pair, w->type, lane, q);
                for (int32_t second = 1; second >= 0; second--) {
                    const int32_t col = c + pair[second];
                    part = fmaf(rounded(x, w->cols, col), element_at(w, row, col), part);
                }
            }
            /* All columns of a sum share a scale; beyond the row's end nothing is added. */
            pair_of(pair, w->type, lane, 0);
            if (c + pair[0] >= w->cols) continue;
            const float scale = scale_at(w, row, c + pair[0]);
            sum[lane] = w->type == HD_BF16 ? sum[lane] + part : fmaf(part, scale, sum[lane]);
        }
    }
    float four[4];
    for (int32_t i = 0; i < 4; i++) {
        const float *s = sum + 4 * i;
        four[i] = (s[0] + s[2]) + (s[1] + s[3]);
    }
    return (four[0] + four[1]) + (four[2] + four[3]);
}

static void linear(hd_stream *s, const hd_linear_args *a) {
    (void)s;
    for (int32_t r = 0; r < a->rows; r++) {
        const float *x = act_in(a->x) + r * stride_or(a->x_stride, a->w->cols);
        float *y =
            (a->out ? act(a->out) : a->out_f32) + r * stride_or(a->out_stride, a->w->rows);
        for (int32_t o = 0; o < a->w->rows; o++) y[o] = dot(a->w, o, x);
    }
}

static void linear_heads(hd_stream *s, const hd_linear_heads_args *a) {
    (void)s;
    for (int32_t r = 0; r < a->rows; r++) {
        for (int32_t h = 0; h < a->heads; h++) {
            const float *x = act_in(a->x) + (int64_t)r * a->x_stride + (int64_t)h * a->x_head;
            float *y = act(a->out) + (int64_t)r * a->out_stride + (int64_t)h * a->out_head;
            const int32_t first = a->first_row + h * a->head_rows;
            for (int32_t o = 0; o < a->n_rows; o++) y[o] = dot(a->w, first + o, x);
        }
    }
}

static void linear_grouped(hd_stream *s, const hd_linear_grouped_args *a) {
    (void)s;
    for (int32_t e = 0; e < a->n_experts; e++) {
        const hd_weight *w = &a->w[e];
        for (int32_t i = a->offset[e]; i < a->offset[e + 1]; i++) {
            const int32_t row = a->assignment ? a->assignment[i] / a->top_k : i;
            const float *x = act_in(a->x) + (int64_t)row * w->cols;
            float *y = act(a->out) + (int64_t)i * w->rows;
            for (int32_t o = 0; o < w->rows; o++) y[o] = dot(w, o, x);
        }
    }
}

void fast_ref_table(hd_ops *t) {
    hd_ops_init_ref(t);
    t->name = "ref, fast";
    t->linear = linear;
    t->linear_heads = linear_heads;
    t->linear_grouped = linear_grouped;
}
