/* lanes_avx2_internal.h - the OPS_LANES parts of a sum in two registers. For AVX2 files only. */
#ifndef HD_OPS_LANES_AVX2_INTERNAL_H
#define HD_OPS_LANES_AVX2_INTERNAL_H

#include <immintrin.h>

#include "ops/kernels_internal.h"

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

#endif
