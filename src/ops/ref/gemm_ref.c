/* gemm_ref.c - reference GEMMs (linear, per head, grouped) in plain C, accumulated in
 * double. */
#include "ops/ref/act_internal.h"
#include "ops/ref/ref_internal.h"

/* Rows that are multiplied together, so that an element of w is decoded once for all of them. */
enum { TOGETHER = 16 };

typedef struct row_set {
    const float *x[TOGETHER];
    float *y[TOGETHER];
    int32_t n;
    hd_group_format format; /* with a code: rows of x are rounded to it */
    float *rounded;         /* [TOGETHER, cols] */
} row_set;

static row_set official_set(hd_stream *s, const hd_weight *w) {
    row_set set = {.format = hd_format_of_x(w)};
    const size_t bytes = (size_t)TOGETHER * (size_t)w->cols * sizeof *set.rounded;
    if (set.format.code) set.rounded = hd_stream_scratch(s, 0, bytes);
    return set;
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
    if (set->format.code) {
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
                        const float *x) {
    double sum = 0.0;
    for (int32_t i = 0; i < n; i++)
        sum += (double)x[i] * (double)hd_weight_at(w, row0 + i, col);
    return (float)sum;
}

void hd_linear_heads_ref(hd_stream *s, const hd_linear_heads_args *a) {
    const int64_t x_row = stride_of(a->x, (int64_t)a->heads * a->x_head);
    const int64_t out_row = stride_of(a->out, (int64_t)a->heads * a->out_head);
    row_set set = {.n = 0};
    (void)s;
    for (int32_t h = 0; h < a->heads; h++) {
        const int32_t row0 = a->first_row + h * a->head_rows;
        for (int32_t r = 0; r < a->rows; r++) {
            const float *x = act_in(a->x) + r * x_row + (int64_t)h * a->x_head;
            float *y = act(a->out) + r * out_row + (int64_t)h * a->out_head;
            if (a->transpose) {
                for (int32_t c = 0; c < a->w->cols; c++) {
                    y[c] = dot_column(a->w, row0, a->n_rows, c, x);
                }
                continue;
            }
            add_row(&set, a->w->cols, x, y);
            if (set.n == TOGETHER) multiply_rows(&set, a->w, row0, a->n_rows);
        }
        multiply_rows(&set, a->w, row0, a->n_rows);
    }
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
