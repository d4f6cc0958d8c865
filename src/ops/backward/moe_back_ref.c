/* moe_back_ref.c - reference gradients of the router and of the combination in plain C. */
#include <string.h>

#include "ops/backward/backward_internal.h"
#include "ops/ref/act_internal.h"

/* The score of logit l, and its derivative; softmax is in softmax_back(). */
static double score_of(hd_score rule, double l, double *slope) {
    if (rule == HD_SCORE_SIGMOID) {
        const double s = 1.0 / (1.0 + exp(-l));
        *slope = s * (1.0 - s);
        return s;
    }
    const double s = sqrt(l > 20.0 ? l : log1p(exp(l)));
    *slope = s > 0.0 ? 1.0 / (1.0 + exp(-l)) / (2.0 * s) : 0.0;
    return s;
}

/* softmax over all experts: score[e], then dlogits from the gradient ds of the scores */
static void softmax_scores(const float *l, double *score, int32_t n) {
    double top = -(double)INFINITY, total = 0.0;
    for (int32_t e = 0; e < n; e++) top = fmax(top, (double)l[e]);
    for (int32_t e = 0; e < n; e++) total += score[e] = exp((double)l[e] - top);
    for (int32_t e = 0; e < n; e++) score[e] /= total;
}

static void softmax_back(float *dlogits, const double *score, const double *ds, int32_t n) {
    double along = 0.0;
    for (int32_t e = 0; e < n; e++) along += ds[e] * score[e];
    for (int32_t e = 0; e < n; e++) dlogits[e] = (float)(score[e] * (ds[e] - along));
}

static void router_row(const hd_moe_topk_back_args *a, int32_t r, double *score, double *ds) {
    const int32_t n = a->rule.n_experts, k = a->rule.top_k;
    const float *l = a->logits + (int64_t)r * n, *dw = a->dweight + (int64_t)r * k;
    const int32_t *expert = a->expert + (int64_t)r * k;
    double *slope = ds + n, total = 0.0, along = 0.0;
    const bool softmax = a->rule.score == HD_SCORE_SOFTMAX;
    if (softmax) softmax_scores(l, score, n);
    for (int32_t e = 0; e < n && !softmax; e++) {
        score[e] = score_of(a->rule.score, (double)l[e], &slope[e]);
    }
    for (int32_t e = 0; e < n; e++) ds[e] = 0.0;
    for (int32_t j = 0; j < k; j++) total += score[expert[j]];
    total += 1e-20;
    for (int32_t j = 0; j < k; j++) along += (double)dw[j] * score[expert[j]] / total;
    for (int32_t j = 0; j < k; j++) {
        const double d = a->rule.normalize ? ((double)dw[j] - along) / total : (double)dw[j];
        ds[expert[j]] += (double)a->rule.scale * d;
    }
    float *dlogits = a->dlogits + (int64_t)r * n;
    if (softmax) {
        softmax_back(dlogits, score, ds, n);
        return;
    }
    for (int32_t e = 0; e < n; e++) dlogits[e] = (float)(ds[e] == 0.0 ? 0.0 : ds[e] * slope[e]);
}

void hd_moe_topk_back_ref(hd_stream *s, const hd_moe_topk_back_args *a) {
    const size_t n = (size_t)a->rule.n_experts;
    double *scratch = hd_stream_scratch(s, 0, 3 * n * sizeof *scratch);
    for (int32_t r = 0; r < a->rows; r++) router_row(a, r, scratch, scratch + n);
}

void hd_moe_combine_back_ref(hd_stream *s, const hd_moe_combine_back_args *a) {
    (void)s;
    for (int32_t t = 0; t < a->rows; t++) {
        const float *g = act_in(a->g) + (int64_t)t * a->cols;
        for (int32_t j = 0; j < a->top_k; j++) {
            const int64_t choice = (int64_t)t * a->top_k + j;
            const int64_t at = (int64_t)a->place[choice] * a->cols;
            const float weight = a->weight ? a->weight[choice] : 1.0f;
            double along = 0.0;
            for (int32_t c = 0; c < a->cols; c++) {
                if (a->weight) along += (double)g[c] * (double)act_in(a->y)[at + c];
                a->dy[at + c] = weight * g[c];
            }
            if (a->dweight) a->dweight[choice] = (float)along;
        }
    }
}
