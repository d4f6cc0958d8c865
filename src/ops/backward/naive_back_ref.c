/* naive_back_ref.c - reference gradients of naive MLA attention in plain C. */
#include <string.h>

#include "ops/backward/backward_internal.h"
#include "ops/ref/act_internal.h"

/* Element c of head `head` of the key of a row. */
static double made_key(const hd_attention_naive_back_args *a, int32_t row, int32_t head,
                       int32_t c) {
    const int64_t made = ((int64_t)row * a->heads + head) * (a->nope_dim + a->v_dim);
    return (double)(c < a->nope_dim
                        ? a->made[made + c]
                        : act_in(a->rotated)[row * stride_of(a->rotated, a->rope_dim) + c -
                                             a->nope_dim]);
}

static double made_score(const hd_attention_naive_back_args *a, int32_t row, int32_t key,
                         int32_t head) {
    const int32_t k_dim = a->nope_dim + a->rope_dim;
    const float *q = act_in(a->q) + ((int64_t)row * a->heads + head) * k_dim;
    double sum = 0.0;
    for (int32_t c = 0; c < k_dim; c++) sum += (double)q[c] * made_key(a, key, head, c);
    return sum * (double)a->scale;
}

/* One head of a row with the keys [first, row]. */
static void naive_query_back(const hd_attention_naive_back_args *a, int32_t first, int32_t row,
                             int32_t head, double *dq) {
    const int32_t k_dim = a->nope_dim + a->rope_dim, wide = a->nope_dim + a->v_dim;
    const int64_t at = (int64_t)row * a->heads + head;
    const float *q = act_in(a->q) + at * k_dim, *g = act_in(a->g) + at * a->v_dim;
    const double delta = ops_dot64(act_in(a->out) + at * a->v_dim, g, a->v_dim);
    double top = -(double)INFINITY, total = 0.0;
    for (int32_t j = first; j <= row; j++) top = fmax(top, made_score(a, row, j, head));
    for (int32_t j = first; j <= row; j++) total += exp(made_score(a, row, j, head) - top);
    memset(dq, 0, (size_t)k_dim * sizeof *dq);
    for (int32_t j = first; j <= row; j++) {
        const int64_t key = (int64_t)j * a->heads + head;
        float *dmade = a->dmade + key * wide, *drotated = a->part + key * a->rope_dim;
        const double p = exp(made_score(a, row, j, head) - top) / total;
        const double along = ops_dot64(g, a->made + key * wide + a->nope_dim, a->v_dim);
        const double ds = p * (along - delta) * (double)a->scale;
        for (int32_t c = 0; c < k_dim; c++) {
            float *dk = c < a->nope_dim ? dmade + c : drotated + c - a->nope_dim;
            dq[c] += ds * made_key(a, j, head, c);
            *dk += (float)(ds * (double)q[c]);
        }
        for (int32_t c = 0; c < a->v_dim; c++)
            dmade[a->nope_dim + c] += (float)(p * (double)g[c]);
    }
    for (int32_t c = 0; c < k_dim; c++) a->dq[at * k_dim + c] = (float)dq[c];
}

void hd_attention_naive_back_ref(hd_stream *s, const hd_attention_naive_back_args *a) {
    const int32_t k_dim = a->nope_dim + a->rope_dim;
    const size_t n = (size_t)a->seqs.first_row[a->seqs.n] * (size_t)a->heads;
    double *dq = hd_stream_scratch(s, 0, (size_t)k_dim * sizeof *dq);
    memset(a->dmade, 0, n * (size_t)(a->nope_dim + a->v_dim) * sizeof *a->dmade);
    memset(a->part, 0, n * (size_t)a->rope_dim * sizeof *a->part);
    for (int32_t q = 0; q < a->seqs.n; q++) {
        const int32_t first = a->seqs.first_row[q];
        for (int32_t row = first; row < a->seqs.first_row[q + 1]; row++) {
            for (int32_t h = 0; h < a->heads; h++) naive_query_back(a, first, row, h, dq);
        }
    }
    for (int32_t row = 0; row < a->seqs.first_row[a->seqs.n]; row++) {
        float *to = act(a->drotated) + row * stride_of(a->drotated, a->rope_dim);
        for (int32_t c = 0; c < a->rope_dim; c++) {
            double sum = 0.0;
            for (int32_t h = 0; h < a->heads; h++)
                sum += (double)a->part[((int64_t)row * a->heads + h) * a->rope_dim + c];
            to[c] = (float)sum;
        }
    }
}
