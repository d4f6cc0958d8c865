/* softmax_avx512.c - the loops around attention's products, 16 lanes at a time. Same steps in the
 * same order as AVX2, same bits. */
#include "ops/lanes_avx512_internal.h"

/* kernels_avx2.c says how. */
static inline __m512 exp16(__m512 x) {
    x = _mm512_min_ps(_mm512_set1_ps(89.0f), _mm512_max_ps(_mm512_set1_ps(-104.0f), x));
    const __m512 k = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(0x1.715476p+0f)),
                                          _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_fnmadd_ps(k, _mm512_set1_ps(0x1.62e430p-1f), x);
    r = _mm512_fnmadd_ps(k, _mm512_set1_ps(-0x1.05c610p-29f), r);
    __m512 p = _mm512_set1_ps(1.0f / 5040);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 720));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    const __m512i bias = _mm512_set1_epi32(127);
    const __m512i whole = _mm512_cvtps_epi32(k), half = _mm512_srai_epi32(whole, 1);
    const __m512i rest = _mm512_sub_epi32(whole, half);
    const __m512 f = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(half, bias), 23));
    const __m512 g = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(rest, bias), 23));
    return _mm512_mul_ps(_mm512_mul_ps(p, f), g);
}

/* A tree of halves onto halves. */
static inline float fold_lanes(__m512 sum) {
    const __m256 eight =
        _mm256_add_ps(_mm512_castps512_ps256(sum), _mm512_extractf32x8_ps(sum, 1));
    const __m128 four =
        _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

float ops_exp_sum_avx512(float *x, int32_t n, float shift) {
    const __m512 by = _mm512_set1_ps(shift);
    __m512 sum = _mm512_setzero_ps();
    for (int32_t i = 0; i < n; i += OPS_LANES) {
        const __mmask16 live = first_lanes(n - i);
        const __m512 e = exp16(_mm512_sub_ps(_mm512_maskz_loadu_ps(live, x + i), by));
        _mm512_mask_storeu_ps(x + i, live, e);
        sum = _mm512_add_ps(sum, _mm512_maskz_mov_ps(live, e));
    }
    return fold_lanes(sum);
}

void ops_blend_avx512(float *out, const float *sum, float down, int32_t n) {
    const __m512 by = _mm512_set1_ps(down);
    for (int32_t i = 0; i < n; i += OPS_LANES) {
        const __mmask16 live = first_lanes(n - i);
        const __m512 old = _mm512_maskz_loadu_ps(live, out + i);
        _mm512_mask_storeu_ps(out + i, live,
                              _mm512_fmadd_ps(old, by, _mm512_maskz_loadu_ps(live, sum + i)));
    }
}
