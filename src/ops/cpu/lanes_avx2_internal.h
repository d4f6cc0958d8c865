/* lanes_avx2_internal.h - AVX2: the OPS_LANES partial sums of a dot product in two
 * registers. */
#ifndef HD_OPS_CPU_LANES_AVX2_INTERNAL_H
#define HD_OPS_CPU_LANES_AVX2_INTERNAL_H

#include <immintrin.h>

#include "ops/cpu/kernels_internal.h"

typedef struct lanes {
    __m256 low, high;
} lanes;

static inline lanes load_lanes(const float *at) {
    return (lanes){_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8)};
}

static inline void store_lanes(float *at, lanes x) {
    _mm256_storeu_ps(at, x.low);
    _mm256_storeu_ps(at + 8, x.high);
}

static inline lanes add_product(lanes sum, lanes x, lanes w) {
    return (lanes){_mm256_fmadd_ps(x.low, w.low, sum.low),
                   _mm256_fmadd_ps(x.high, w.high, sum.high)};
}

/* Ones in the first n of 8 lanes; n may be negative or beyond 8. */
static inline __m256i first_lanes(int32_t n) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane);
}

/* Returns lanes 0-3 of the result: halves are added to halves, down to four lanes. */
static inline __m128 reduce_to_four(__m256 low, __m256 high) {
    __m256 sum = _mm256_add_ps(low, high);
    return _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
}

#endif
