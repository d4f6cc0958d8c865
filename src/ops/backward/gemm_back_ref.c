/* gemm_back_ref.c - reference gradients of GEMMs in plain C. */
#include "ops/backward/backward_internal.h"
#include "ops/ref/act_internal.h"

/* dw[i, :] += left[i] * right[:] */
static void add_outer(float *dw, const float *left, const float *right, int32_t n_rows,
                      int32_t cols) {
    for (int32_t i = 0; i < n_rows; i++) {
        for (int32_t c = 0; c < cols; c++) {
            dw[(int64_t)i * cols + c] = fmaf(left[i], right[c], dw[(int64_t)i * cols + c]);
        }
    }
}

void hd_weight_grad_ref(hd_stream *s, const hd_weight_grad_args *a) {
    const int64_t left_row = stride_of(a->left, (int64_t)a->heads * a->left_head);
    const int64_t right_row = stride_of(a->right, (int64_t)a->heads * a->right_head);
    (void)s;
    for (int32_t r = 0; r < a->rows; r++) {
        for (int32_t h = 0; h < a->heads; h++) {
            const int64_t first = a->first_row + (int64_t)h * a->head_rows;
            add_outer(a->dw + first * a->cols,
                      act_in(a->left) + r * left_row + (int64_t)h * a->left_head,
                      act_in(a->right) + r * right_row + (int64_t)h * a->right_head, a->n_rows,
                      a->cols);
        }
    }
}

void hd_grouped_weight_grad_ref(hd_stream *s, const hd_grouped_weight_grad_args *a) {
    (void)s;
    for (int32_t e = 0; e < a->n_slots; e++) {
        float *dw = a->dw + (int64_t)e * a->n_rows * a->cols;
        for (int32_t p = a->offset[e]; p < a->offset[e + 1]; p++) {
            const int64_t row = a->assignment ? a->assignment[p] / a->top_k : p;
            add_outer(dw, act_in(a->g) + (int64_t)p * a->n_rows, act_in(a->x) + row * a->cols,
                      a->n_rows, a->cols);
        }
    }
}

void hd_grouped_gemm_back_ref(hd_stream *s, const hd_grouped_gemm_back_args *a) {
    (void)s;
    for (int32_t e = 0; e < a->w->n; e++) {
        const hd_weight *w = &a->w->slots[e];
        for (int32_t p = a->offset[e]; p < a->offset[e + 1]; p++) {
            const float *g = act_in(a->g) + (int64_t)p * w->rows;
            for (int32_t c = 0; c < w->cols; c++) {
                double sum = 0.0;
                for (int32_t i = 0; i < w->rows; i++) {
                    sum += (double)g[i] * (double)hd_weight_at(w, i, c);
                }
                a->dx[(int64_t)p * w->cols + c] = (float)sum;
            }
        }
    }
}
