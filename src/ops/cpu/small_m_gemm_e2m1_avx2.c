/* small_m_gemm_e2m1_avx2.c - AVX2: small-M GEMM with FP4, two times OPS_LANES columns at
 * once. It looks bytes up instead of floats, so that the steps before the scales are shared
 * by more columns. */
#include "ops/cpu/inline_internal.h"
#include "ops/cpu/small_m_gemm_internal.h"
#include "ops/cpu/dequantize_avx2_internal.h"

enum { X_ROWS = 4, STEP = 2 * OPS_LANES };

/* STEP columns as bf16, which represents all values of FP4: the lower half of 32 bits is
 * column i, the upper one column i + 8. */
typedef struct pairs {
    __m256i part[2]; /* OPS_LANES columns each */
} pairs;

/* Codes are first reordered to the order in which their bytes are used. */
INLINE pairs pair_columns(__m128i codes) {
    const __m256i order =
        _mm256_setr_epi8(0, 4, 0, 4, 1, 5, 1, 5, 8, 12, 8, 12, 9, 13, 9, 13, 2, 6, 2, 6, 3, 7,
                         3, 7, 10, 14, 10, 14, 11, 15, 11, 15);
    const __m256i low = _mm256_set1_epi64x((int64_t)0xc0804000c0800000);
    const __m256i high = _mm256_setr_epi64x(0x404040403f3f3f00, (int64_t)0xc0c0c0c0bfbfbf80,
                                            0x404040403f3f3f00, (int64_t)0xc0c0c0c0bfbfbf80);
    const __m256i both = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(codes), order);
    const __m256i code = _mm256_and_si256(
        _mm256_blend_epi16(both, _mm256_srli_epi16(both, 4), 0xaa), _mm256_set1_epi8(0x0f));
    const __m256i of_low = _mm256_shuffle_epi8(low, code);
    const __m256i of_high = _mm256_shuffle_epi8(high, code);
    return (pairs){
        {_mm256_unpacklo_epi8(of_low, of_high), _mm256_unpackhi_epi8(of_low, of_high)}
    };
}

INLINE lanes scale_pairs(__m256i part, float scale) {
    const __m256 by = _mm256_set1_ps(scale);
    const __m256i upper = _mm256_set1_epi32((int32_t)0xffff0000);
    return (lanes){_mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32(part, 16)), by),
                   _mm256_mul_ps(_mm256_castsi256_ps(_mm256_and_si256(part, upper)), by)};
}

/* A row of W with n_x rows of x; all but the pointers are compile-time constants. */
typedef struct group {
    const uint8_t *src;
    const float *scale, *x[X_ROWS];
    int32_t n_x, block;
} group;

/* Adds the columns [c, c + n_parts * OPS_LANES). */
INLINE void step(lanes sum[X_ROWS], group g, int32_t c, int32_t n_parts) {
    const __m128i *src = (const __m128i *)(const void *)(g.src + (uint32_t)c / 2);
    const pairs wide = pair_columns(n_parts == 2 ? _mm_loadu_si128(src) : _mm_loadl_epi64(src));
    UNROLL for (int32_t h = 0; h < n_parts; h++) {
        const int32_t at = c + h * OPS_LANES;
        const lanes w = scale_pairs(wide.part[h], g.scale[(uint32_t)at / (uint32_t)g.block]);
        UNROLL for (int32_t k = 0; k < g.n_x; k++) {
            sum[k] = add_product(sum[k], load_lanes(g.x[k] + at), w);
        }
    }
}

/* Multiplies row w of W with n_x rows of x from i on. */
INLINE void small_m_row(const ops_small_m_args *m, int32_t w, int32_t i, int32_t n_x,
                        int32_t block) {
    const int32_t each = OPS_TILE_ROWS * OPS_LANES;
    float *acc = m->acc + i * each + w * OPS_LANES;
    group g = {.src = m->src[w], .scale = m->scale[w], .n_x = n_x, .block = block};
    lanes sum[X_ROWS];
    coming next = comes_next(m, 4, w, 1, i, n_x);
    UNROLL for (int32_t k = 0; k < n_x; k++) {
        g.x[k] = m->x[i + k];
        sum[k] = load_lanes(acc + k * each);
    }
    int32_t c = 0;
    for (; c + STEP <= m->n; c += STEP) {
        if (c % 128 == 0) prefetch(&next);
        step(sum, g, c, 2);
    }
    if (c < m->n) step(sum, g, c, 1);
    UNROLL for (int32_t k = 0; k < n_x; k++) store_lanes(acc + k * each, sum[k]);
}

INLINE void small_m_rows(const ops_small_m_args *m, int32_t i, int32_t n_x, int32_t block) {
    for (int32_t w = 0; w < OPS_TILE_ROWS; w++) small_m_row(m, w, i, n_x, block);
}

/* Takes as many rows of x at a time as there are registers for. */
INLINE void small_m(const ops_small_m_args *m, int32_t block) {
    int32_t i = 0;
    for (; i + 4 <= m->n_x; i += 4) small_m_rows(m, i, 4, block);
    if (m->n_x - i == 3) small_m_rows(m, i, 3, block);
    if (m->n_x - i == 2) small_m_rows(m, i, 2, block);
    if (m->n_x - i == 1) small_m_rows(m, i, 1, block);
}

bool ops_small_m_e2m1_avx2(const ops_small_m_args *m) {
    if (m->block == 16) {
        small_m(m, 16);
    } else if (m->block == 32) {
        small_m(m, 32);
    } else {
        small_m(m, m->block);
    }
    return true;
}
