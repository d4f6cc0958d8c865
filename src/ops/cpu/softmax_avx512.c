/* softmax_avx512.c - AVX-512: softmax loops of attention, 16 lanes at a time. It takes the
 * same steps in the same order as AVX2, so the bits are the same. */
#include "ops/cpu/lanes_avx512_internal.h"

typedef __m512 wide;
typedef __m512i wide_int;
#define WIDE(op) _mm512_##op

static inline wide round_wide(wide x) {
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

/* 2^e */
static inline wide power_wide(wide_int e) {
    const __m512i biased = _mm512_add_epi32(e, _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(biased, 23));
}

#include "ops/cpu/exp_internal.h"

/* Reduces by a tree: halves are added to halves. */
static inline float reduce_lanes(__m512 sum) {
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
        const __m512 e = exp_wide(_mm512_sub_ps(_mm512_maskz_loadu_ps(live, x + i), by));
        _mm512_mask_storeu_ps(x + i, live, e);
        sum = _mm512_add_ps(sum, _mm512_maskz_mov_ps(live, e));
    }
    return reduce_lanes(sum);
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
