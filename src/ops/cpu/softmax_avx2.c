/* softmax_avx2.c - AVX2: softmax loops of attention (max, exp and sum, rescale), 8 lanes at
 * a time. */
#include <math.h>

#include "ops/cpu/lanes_avx2_internal.h"

typedef __m256 wide;
typedef __m256i wide_int;
#define WIDE(op) _mm256_##op

static inline wide round_wide(wide x) {
    return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

/* 2^e */
static inline wide power_wide(wide_int e) {
    const __m256i biased = _mm256_add_epi32(e, _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
}

#include "ops/cpu/exp_internal.h"

static inline float reduce_lanes(__m256 low, __m256 high) {
    __m128 four = reduce_to_four(low, high);
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

float ops_max_avx2(const float *x, int32_t n) {
    const __m256 none = _mm256_set1_ps(-INFINITY);
    __m256 top = none;
    int32_t i = 0;
    for (; i + 8 <= n; i += 8) top = _mm256_max_ps(top, _mm256_loadu_ps(x + i));
    __m256i live = first_lanes(n - i);
    __m256 end =
        _mm256_blendv_ps(none, _mm256_maskload_ps(x + i, live), _mm256_castsi256_ps(live));
    float lane[8], best = -INFINITY;
    _mm256_storeu_ps(lane, _mm256_max_ps(top, end));
    for (int l = 0; l < 8; l++) best = lane[l] > best ? lane[l] : best;
    return best;
}

static inline __m256 exp_step(float *x, __m256i live, __m256 shift) {
    __m256 e = exp_wide(_mm256_sub_ps(_mm256_maskload_ps(x, live), shift));
    _mm256_maskstore_ps(x, live, e);
    return _mm256_and_ps(e, _mm256_castsi256_ps(live));
}

float ops_exp_sum_avx2(float *x, int32_t n, float shift) {
    __m256 low = _mm256_setzero_ps(), high = low, by = _mm256_set1_ps(shift);
    for (int32_t i = 0; i < n; i += OPS_LANES) {
        low = _mm256_add_ps(low, exp_step(x + i, first_lanes(n - i), by));
        if (n - i > 8)
            high = _mm256_add_ps(high, exp_step(x + i + 8, first_lanes(n - i - 8), by));
    }
    return reduce_lanes(low, high);
}

void ops_blend_avx2(float *out, const float *sum, float down, int32_t n) {
    const __m256 by = _mm256_set1_ps(down);
    for (int32_t i = 0; i < n; i += 8) {
        const __m256i live = first_lanes(n - i);
        const __m256 old = _mm256_maskload_ps(out + i, live);
        _mm256_maskstore_ps(out + i, live,
                            _mm256_fmadd_ps(old, by, _mm256_maskload_ps(sum + i, live)));
    }
}
