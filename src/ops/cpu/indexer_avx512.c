/* indexer_avx512.c - AVX-512: the lightning indexer's scores with 16 keys per register. It
 * takes the same steps in the same order as AVX2, so the bits are the same. */
#include "ops/cpu/kernels_internal.h"

#include <immintrin.h>

enum { LANES = 16, HEADS = 8 };
_Static_assert(OPS_TRANSPOSE_KEYS == 2 * LANES, "keys are two registers");

/* All keys of a block. */
typedef struct pair {
    __m512 a, b;
} pair;

static inline pair load_pair(const float *at) {
    return (pair){_mm512_loadu_ps(at), _mm512_loadu_ps(at + LANES)};
}

static inline pair add_product(pair sum, float x, pair key) {
    const __m512 each = _mm512_set1_ps(x);
    return (pair){_mm512_fmadd_ps(each, key.a, sum.a), _mm512_fmadd_ps(each, key.b, sum.b)};
}

static inline pair add_head(pair sum, const ops_index *x, int32_t head, pair dot) {
    const __m512 by = _mm512_set1_ps(x->weight[head] * x->scale), zero = _mm512_setzero_ps();
    return (pair){_mm512_fmadd_ps(by, _mm512_max_ps(dot.a, zero), sum.a),
                  _mm512_fmadd_ps(by, _mm512_max_ps(dot.b, zero), sum.b)};
}

/* Adds the dot products of heads [head, head + HEADS), interleaved to hide latency. */
static inline pair add_heads(pair sum, const ops_index *x, int32_t head) {
    const int64_t w = x->width;
    const float *q = x->q + head * w, *r = q + 4 * w;
    pair d0 = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    pair d1 = d0, d2 = d0, d3 = d0, d4 = d0, d5 = d0, d6 = d0, d7 = d0;
    for (int64_t c = 0; c < w; c++) {
        const pair k = load_pair(x->keys + c * OPS_TRANSPOSE_KEYS);
        d0 = add_product(d0, q[c], k);
        d1 = add_product(d1, q[c + w], k);
        d2 = add_product(d2, q[c + 2 * w], k);
        d3 = add_product(d3, q[c + 3 * w], k);
        d4 = add_product(d4, r[c], k);
        d5 = add_product(d5, r[c + w], k);
        d6 = add_product(d6, r[c + 2 * w], k);
        d7 = add_product(d7, r[c + 3 * w], k);
    }
    sum = add_head(add_head(sum, x, head, d0), x, head + 1, d1);
    sum = add_head(add_head(sum, x, head + 2, d2), x, head + 3, d3);
    sum = add_head(add_head(sum, x, head + 4, d4), x, head + 5, d5);
    return add_head(add_head(sum, x, head + 6, d6), x, head + 7, d7);
}

void ops_index_scores_avx512(const ops_index *x) {
    pair sum = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    int32_t h = 0;
    for (; h + HEADS <= x->heads; h += HEADS) sum = add_heads(sum, x, h);
    for (; h < x->heads; h++) {
        pair d = {_mm512_setzero_ps(), _mm512_setzero_ps()};
        for (int32_t c = 0; c < x->width; c++) {
            d = add_product(d, x->q[(int64_t)h * x->width + c],
                            load_pair(x->keys + (int64_t)c * OPS_TRANSPOSE_KEYS));
        }
        sum = add_head(sum, x, h, d);
    }
    _mm512_storeu_ps(x->score, sum.a);
    _mm512_storeu_ps(x->score + LANES, sum.b);
}
