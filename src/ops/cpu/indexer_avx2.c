/* indexer_avx2.c - AVX2: the lightning indexer's scores with 8 keys per register. A lane is
 * a key, so nothing is reduced across lanes, and every key takes the same steps wherever it
 * lies. */
#include "ops/cpu/kernels_internal.h"

#include <immintrin.h>
#include <string.h>

enum { LANES = 8, HEADS = 4 };

/* Transposes eight columns of eight rows. */
static void transpose_eight(float *out, const float *const *row, int32_t col) {
    __m256 r[LANES], s[LANES], t[LANES];
    for (int i = 0; i < LANES; i++) r[i] = _mm256_loadu_ps(row[i] + col);
    for (int i = 0; i < LANES; i += 2) {
        s[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        s[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < LANES; i += 4) {
        t[i] = _mm256_shuffle_ps(s[i], s[i + 2], 0x44);
        t[i + 1] = _mm256_shuffle_ps(s[i], s[i + 2], 0xee);
        t[i + 2] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0x44);
        t[i + 3] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        float *to = out + (int64_t)(col + i) * OPS_TRANSPOSE_KEYS;
        _mm256_storeu_ps(to, _mm256_permute2f128_ps(t[i], t[i + 4], 0x20));
        _mm256_storeu_ps(to + 4 * OPS_TRANSPOSE_KEYS,
                         _mm256_permute2f128_ps(t[i], t[i + 4], 0x31));
    }
}

void ops_transpose_avx2(float *out, const float *const *row, int32_t cols) {
    for (int32_t u = 0; u < OPS_TRANSPOSE_KEYS; u += LANES) {
        int32_t c = 0;
        for (; c + LANES <= cols; c += LANES) transpose_eight(out + u, row + u, c);
        for (; c < cols; c++) {
            for (int32_t i = 0; i < LANES; i++) {
                out[(int64_t)c * OPS_TRANSPOSE_KEYS + u + i] = row[u + i][c];
            }
        }
    }
}

/* Two registers of keys. */
typedef struct pair {
    __m256 a, b;
} pair;

static inline pair load_pair(const float *at) {
    return (pair){_mm256_loadu_ps(at), _mm256_loadu_ps(at + LANES)};
}

static inline pair add_product(pair sum, const float *x, pair key) {
    const __m256 each = _mm256_broadcast_ss(x);
    return (pair){_mm256_fmadd_ps(each, key.a, sum.a), _mm256_fmadd_ps(each, key.b, sum.b)};
}

static inline pair add_head(pair sum, const ops_index *x, int32_t head, pair dot) {
    const __m256 by = _mm256_set1_ps(x->weight[head] * x->scale), zero = _mm256_setzero_ps();
    return (pair){_mm256_fmadd_ps(by, _mm256_max_ps(dot.a, zero), sum.a),
                  _mm256_fmadd_ps(by, _mm256_max_ps(dot.b, zero), sum.b)};
}

static pair score_pair(const ops_index *x, const float *key) {
    pair sum = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    const int64_t width = x->width;
    int32_t h = 0;
    for (; h + HEADS <= x->heads; h += HEADS) {
        const float *q = x->q + h * width;
        pair d0 = {_mm256_setzero_ps(), _mm256_setzero_ps()}, d1 = d0, d2 = d0, d3 = d0;
        for (int64_t c = 0; c < width; c++) {
            const pair k = load_pair(key + c * OPS_TRANSPOSE_KEYS);
            d0 = add_product(d0, q + c, k);
            d1 = add_product(d1, q + c + width, k);
            d2 = add_product(d2, q + c + 2 * width, k);
            d3 = add_product(d3, q + c + 3 * width, k);
        }
        sum = add_head(add_head(sum, x, h, d0), x, h + 1, d1);
        sum = add_head(add_head(sum, x, h + 2, d2), x, h + 3, d3);
    }
    for (; h < x->heads; h++) {
        pair d = {_mm256_setzero_ps(), _mm256_setzero_ps()};
        for (int64_t c = 0; c < width; c++) {
            d = add_product(d, x->q + h * width + c, load_pair(key + c * OPS_TRANSPOSE_KEYS));
        }
        sum = add_head(sum, x, h, d);
    }
    return sum;
}

void ops_index_scores_avx2(const ops_index *x) {
    for (int32_t u = 0; u < OPS_TRANSPOSE_KEYS; u += 2 * LANES) {
        const pair sum = score_pair(x, x->keys + u);
        _mm256_storeu_ps(x->score + u, sum.a);
        _mm256_storeu_ps(x->score + u + LANES, sum.b);
    }
}
