/* hc_ref.c - reference of V4's hyper-connections (mHC) in plain C; models.md 2.8. */
#include "ops/fused_internal.h"
#include "ops/ref/act_internal.h"
#include "ops/ref/ref_internal.h"

/* fn x / rms(x): one mixing value per row of fn, over all streams at once. */
static void mix_values(double *m, const float *x, const float *fn, int32_t n, int32_t wide,
                       float norm_eps) {
    double square = 0.0;
    for (int32_t c = 0; c < wide; c++) square += (double)x[c] * (double)x[c];
    double rms = 1.0 / sqrt(square / wide + (double)norm_eps);
    for (int32_t i = 0; i < n; i++) {
        double sum = 0.0;
        for (int32_t c = 0; c < wide; c++)
            sum += (double)fn[(int64_t)i * wide + c] * (double)x[c];
        m[i] = sum * rms;
    }
}

static double sigmoid64(double x) {
    return 1.0 / (1.0 + exp(-x));
}

static void weigh_streams(float *out, const float *x, const double *pre, int32_t hc,
                          int32_t cols) {
    for (int32_t c = 0; c < cols; c++) {
        double sum = 0.0;
        for (int32_t i = 0; i < hc; i++) sum += pre[i] * (double)x[(int64_t)i * cols + c];
        out[c] = (float)sum;
    }
}

/* Divides rows (step = 1) or columns (step = hc) by their sums plus eps. */
static void normalize(double *comb, int32_t hc, bool rows, double eps) {
    for (int32_t line = 0; line < hc; line++) {
        double sum = 0.0;
        for (int32_t k = 0; k < hc; k++) sum += comb[rows ? line * hc + k : k * hc + line];
        for (int32_t k = 0; k < hc; k++)
            comb[rows ? line * hc + k : k * hc + line] /= sum + eps;
    }
}

/* Sinkhorn-Knopp towards a doubly stochastic matrix, starting from a softmax of each row. */
static void sinkhorn(double *comb, int32_t hc, int32_t iters, double eps) {
    for (int32_t i = 0; i < hc; i++) {
        double *row = comb + (int64_t)i * hc, top = row[0], sum = 0.0;
        for (int32_t j = 1; j < hc; j++) top = fmax(top, row[j]);
        for (int32_t j = 0; j < hc; j++) sum += row[j] = exp(row[j] - top);
        for (int32_t j = 0; j < hc; j++) row[j] = row[j] / sum + eps;
    }
    normalize(comb, hc, false, eps);
    for (int32_t k = 1; k < iters; k++) {
        normalize(comb, hc, true, eps);
        normalize(comb, hc, false, eps);
    }
}

/* Computes pre, post and comb of one row. */
static void weigh_row(const hd_hc_pre_args *a, int32_t r, double *pre) {
    const int32_t hc = a->hc, n = 2 * hc + hc * hc, wide = hc * a->cols;
    double m[2 * HD_MAX_HC + HD_MAX_HC * HD_MAX_HC], *comb = m + 2 * hc;
    mix_values(m, act_in(a->x) + (int64_t)r * wide, a->fn, n, wide, a->norm_eps);
    for (int32_t i = 0; i < hc; i++) {
        pre[i] = sigmoid64(m[i] * (double)a->scale[0] + (double)a->base[i]) + (double)a->eps;
        double post = m[hc + i] * (double)a->scale[1] + (double)a->base[hc + i];
        a->post[(int64_t)r * hc + i] = (float)(2.0 * sigmoid64(post));
    }
    for (int32_t k = 0; k < hc * hc; k++) {
        comb[k] = comb[k] * (double)a->scale[2] + (double)a->base[2 * hc + k];
    }
    sinkhorn(comb, hc, a->iters, (double)a->eps);
    for (int32_t k = 0; k < hc * hc; k++) {
        a->comb[(int64_t)r * hc * hc + k] = (float)comb[k];
    }
}

void hd_hc_pre_ref(hd_stream *s, const hd_hc_pre_args *a) {
    (void)s;
    for (int32_t r = 0; r < a->rows; r++) {
        double pre[HD_MAX_HC];
        weigh_row(a, r, pre);
        weigh_streams(act(a->out) + (int64_t)r * a->cols,
                      act_in(a->x) + (int64_t)r * a->hc * a->cols, pre, a->hc, a->cols);
    }
}

void hd_hc_mix_ref(hd_stream *s, const hd_hc_mix_args *a) {
    (void)s;
    for (int64_t r = 0; r < a->rows; r++) {
        double pre[HD_MAX_HC];
        for (int32_t i = 0; i < a->hc; i++) pre[i] = (double)a->pre[r * a->hc + i];
        weigh_streams(act(a->out) + r * a->cols, act_in(a->x) + r * a->hc * a->cols, pre, a->hc,
                      a->cols);
    }
}

void hd_hc_single_ref(hd_stream *s, const hd_hc_single_args *a) {
    const hd_hc_pre_args coefficients = ops_single_pre(a);
    const hd_hc_mix_args mixture = ops_single_mix(a);
    for (int64_t r = 0; r < a->rows; r++) {
        for (int32_t i = 0; a->first && i < a->hc; i++) a->pre[r * a->hc + i] = i == 0;
    }
    hd_hc_mix_ref(s, &mixture);
    for (int32_t r = 0; r < a->rows; r++) {
        double pre[HD_MAX_HC];
        weigh_row(&coefficients, r, pre);
        for (int32_t i = 0; i < a->hc; i++) a->pre[(int64_t)r * a->hc + i] = (float)pre[i];
    }
}

void hd_hc_post_ref(hd_stream *s, const hd_hc_post_args *a) {
    (void)s;
    const int32_t hc = a->hc;
    for (int32_t r = 0; r < a->rows; r++) {
        float *x = act(a->x) + (int64_t)r * hc * a->cols;
        const float *y = act_in(a->y) + (int64_t)r * a->cols;
        const float *post = a->post + (int64_t)r * hc, *comb = a->comb + (int64_t)r * hc * hc;
        for (int32_t c = 0; c < a->cols; c++) {
            double mixed[HD_MAX_HC];
            for (int32_t j = 0; j < hc; j++) {
                mixed[j] = (double)post[j] * (double)y[c];
                for (int32_t i = 0; i < hc; i++) {
                    mixed[j] += (double)comb[i * hc + j] * (double)x[(int64_t)i * a->cols + c];
                }
            }
            for (int32_t j = 0; j < hc; j++) x[(int64_t)j * a->cols + c] = (float)mixed[j];
        }
    }
}

void hd_hc_mean_ref(hd_stream *s, const hd_hc_mean_args *a) {
    (void)s;
    for (int64_t r = 0; r < a->rows; r++) {
        const float *x = act_in(a->x) + r * a->hc * a->cols;
        float *out = act(a->out) + r * stride_of(a->out, a->cols);
        for (int32_t c = 0; c < a->cols; c++) {
            double sum = 0;
            for (int32_t i = 0; i < a->hc; i++) sum += (double)x[(int64_t)i * a->cols + c];
            out[c] = (float)(sum / a->hc);
        }
    }
}

void hd_hc_head_ref(hd_stream *s, const hd_hc_head_args *a) {
    (void)s;
    const int32_t hc = a->hc, wide = hc * a->cols;
    double m[HD_MAX_HC];
    for (int32_t r = 0; r < a->rows; r++) {
        const float *x = act_in(a->x) + (int64_t)r * wide;
        mix_values(m, x, a->fn, hc, wide, a->norm_eps);
        for (int32_t i = 0; i < hc; i++) {
            m[i] = sigmoid64(m[i] * (double)a->scale[0] + (double)a->base[i]) + (double)a->eps;
        }
        weigh_streams(act(a->out) + (int64_t)r * a->cols, x, m, hc, a->cols);
    }
}
