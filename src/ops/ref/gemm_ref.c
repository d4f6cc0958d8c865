/* gemm_ref.c - reference GEMMs (linear, per head, grouped) in plain C, accumulated in
 * double. */
#include "ops/ref/act_internal.h"
#include "ops/ref/ref_internal.h"
#include "ops/x_format.h"

/* Rows that are multiplied together, so that an element of w is decoded once for all of them. */
enum { TOGETHER = 16 };

typedef struct row_set {
    const float *x[TOGETHER];
    float *y[TOGETHER];
    int32_t n;
    hd_group_format format; /* what rows of x are rounded to, in `rounded` */
    float *rounded;         /* [TOGETHER, cols], or NULL: they are not */
} row_set;

static row_set rounding_set(hd_stream *s, const hd_weight *w, hd_group_format f) {
    row_set set = {.format = f};
    const size_t bytes = (size_t)TOGETHER * (size_t)w->cols * sizeof *set.rounded;
    if (f.group > 0 || f.plain > 0) set.rounded = hd_stream_scratch(s, 0, bytes);
    return set;
}

static row_set official_set(hd_stream *s, const hd_weight *w) {
    return rounding_set(s, w, hd_x_format(w));
}

/* Products of rows [row0, row0 + outs) of w; empties the set. */
static void multiply_rows(row_set *set, const hd_weight *w, int32_t row0, int32_t outs) {
    if (set->n == 0) return;
    for (int32_t o = 0; o < outs; o++) {
        double sum[TOGETHER] = {0.0};
        for (int32_t c = 0; c < w->cols; c++) {
            const double v = (double)hd_weight_at(w, row0 + o, c);
            for (int32_t i = 0; i < set->n; i++) sum[i] += (double)set->x[i][c] * v;
        }
        for (int32_t i = 0; i < set->n; i++) set->y[i][o] = (float)sum[i];
    }
    set->n = 0;
}

static void add_row(row_set *set, int32_t cols, const float *x, float *y) {
    if (set->rounded) {
        float *rounded = set->rounded + (int64_t)set->n * cols;
        ops_round_columns(set->format, rounded, x, cols);
        x = rounded;
    }
    set->x[set->n] = x;
    set->y[set->n++] = y;
}

static void linear(const hd_linear_args *a, row_set set) {
    for (int32_t r = 0; r < a->rows; r++) {
        add_row(&set, a->w->cols, act_in(a->x) + r * stride_of(a->x, a->w->cols),
                act(a->out) + r * stride_of(a->out, a->w->rows));
        if (set.n == TOGETHER) multiply_rows(&set, a->w, 0, a->w->rows);
    }
    multiply_rows(&set, a->w, 0, a->w->rows);
}

void hd_linear_ref(hd_stream *s, const hd_linear_args *a) {
    (void)s;
    linear(a, (row_set){.n = 0});
}

void hd_linear_ref_official(hd_stream *s, const hd_linear_args *a) {
    linear(a, official_set(s, a->w));
}

static float dot_column(const hd_weight *w, int32_t row0, int32_t n, int32_t col,
                        const float *x, bool narrows) {
    double sum = 0.0;
    for (int32_t i = 0; i < n; i++) {
        const float v = narrows ? ops_bf16(x[i]) : x[i];
        sum += (double)v * (double)hd_weight_at(w, row0 + i, col);
    }
    return (float)sum;
}

/* narrows: rows of x of transposed matrices become bfloat16. */
static void linear_heads(const hd_linear_heads_args *a, row_set set, bool narrows) {
    const int64_t x_row = stride_of(a->x, (int64_t)a->heads * a->x_head);
    const int64_t out_row = stride_of(a->out, (int64_t)a->heads * a->out_head);
    for (int32_t h = 0; h < a->heads; h++) {
        const int32_t row0 = a->first_row + h * a->head_rows;
        for (int32_t r = 0; r < a->rows; r++) {
            const float *x = act_in(a->x) + r * x_row + (int64_t)h * a->x_head;
            float *y = act(a->out) + r * out_row + (int64_t)h * a->out_head;
            if (a->transpose) {
                for (int32_t c = 0; c < a->w->cols; c++) {
                    y[c] = dot_column(a->w, row0, a->n_rows, c, x, narrows);
                }
                continue;
            }
            add_row(&set, a->w->cols, x, y);
            if (set.n == TOGETHER) multiply_rows(&set, a->w, row0, a->n_rows);
        }
        multiply_rows(&set, a->w, row0, a->n_rows);
    }
}

void hd_linear_heads_ref(hd_stream *s, const hd_linear_heads_args *a) {
    (void)s;
    linear_heads(a, (row_set){.n = 0}, false);
}

/* One matrix per head: the official programs multiply these in bfloat16, whatever they are stored as. */
void hd_linear_heads_ref_official(hd_stream *s, const hd_linear_heads_args *a) {
    const int32_t plain = !a->transpose && hd_narrows_x(a->w) ? a->w->cols : 0;
    linear_heads(a, rounding_set(s, a->w, (hd_group_format){.plain = plain}),
                 hd_narrows_transposed_x(a->w, a->first_row, a->head_rows, a->n_rows));
}

static void grouped_gemm(const hd_grouped_gemm_args *a, row_set set) {
    for (int32_t e = 0; e < a->w->n; e++) {
        const hd_weight *w = &a->w->slots[e];
        for (int32_t i = a->offset[e]; i < a->offset[e + 1]; i++) {
            const int32_t row = a->assignment ? a->assignment[i] / a->top_k : i;
            add_row(&set, w->cols, act_in(a->x) + (int64_t)row * w->cols,
                    act(a->out) + (int64_t)i * w->rows);
            if (set.n == TOGETHER) multiply_rows(&set, w, 0, w->rows);
        }
        multiply_rows(&set, w, 0, w->rows);
    }
}

void hd_grouped_gemm_ref(hd_stream *s, const hd_grouped_gemm_args *a) {
    (void)s;
    grouped_gemm(a, (row_set){.n = 0});
}

void hd_grouped_gemm_ref_official(hd_stream *s, const hd_grouped_gemm_args *a) {
    grouped_gemm(a, official_set(s, &a->w->shape));
}
