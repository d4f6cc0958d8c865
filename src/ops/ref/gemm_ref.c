/* gemm_ref.c - reference GEMMs (linear, per head, grouped) in plain C, accumulated in
 * double. */
#include "ops/ref/act_internal.h"
#include "ops/ref/ref_internal.h"

static float dot_row(const hd_weight *w, int32_t row, const float *x) {
    double sum = 0.0;
    for (int32_t c = 0; c < w->cols; c++) sum += (double)x[c] * (double)hd_weight_at(w, row, c);
    return (float)sum;
}

void hd_linear_ref(hd_stream *s, const hd_linear_args *a) {
    (void)s;
    for (int32_t r = 0; r < a->rows; r++) {
        const float *x = act_in(a->x) + r * stride_of(a->x, a->w->cols);
        float *y = act(a->out) + r * stride_of(a->out, a->w->rows);
        for (int32_t o = 0; o < a->w->rows; o++) y[o] = dot_row(a->w, o, x);
    }
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
    (void)s;
    for (int32_t r = 0; r < a->rows; r++) {
        for (int32_t h = 0; h < a->heads; h++) {
            const float *x = act_in(a->x) + r * x_row + (int64_t)h * a->x_head;
            float *y = act(a->out) + r * out_row + (int64_t)h * a->out_head;
            int32_t row0 = a->first_row + h * a->head_rows;
            if (a->transpose) {
                for (int32_t c = 0; c < a->w->cols; c++) {
                    y[c] = dot_column(a->w, row0, a->n_rows, c, x);
                }
            } else {
                for (int32_t o = 0; o < a->n_rows; o++) y[o] = dot_row(a->w, row0 + o, x);
            }
        }
    }
}

void hd_grouped_gemm_ref(hd_stream *s, const hd_grouped_gemm_args *a) {
    (void)s;
    for (int32_t e = 0; e < a->w->n; e++) {
        const hd_weight *w = &a->w->slots[e];
        for (int32_t i = a->offset[e]; i < a->offset[e + 1]; i++) {
            int32_t row = a->assignment ? a->assignment[i] / a->top_k : i;
            const float *x = act_in(a->x) + (int64_t)row * w->cols;
            float *y = act(a->out) + (int64_t)i * w->rows;
            for (int32_t o = 0; o < w->rows; o++) y[o] = dot_row(w, o, x);
        }
    }
}
