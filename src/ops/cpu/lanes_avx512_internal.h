/* lanes_avx512_internal.h - AVX-512: the OPS_LANES partial sums of a dot product in one
 * register. */
#ifndef HD_OPS_CPU_LANES_AVX512_INTERNAL_H
#define HD_OPS_CPU_LANES_AVX512_INTERNAL_H

#include <immintrin.h>

#include "ops/cpu/kernels_internal.h"

typedef __m512 lanes;

static inline lanes load_lanes(const float *at) {
    return _mm512_loadu_ps(at);
}

static inline void store_lanes(float *at, lanes x) {
    _mm512_storeu_ps(at, x);
}

static inline lanes add_product(lanes sum, lanes x, lanes w) {
    return _mm512_fmadd_ps(x, w, sum);
}

/* Ones in the first n lanes; n may be negative or beyond OPS_LANES. */
static inline __mmask16 first_lanes(int32_t n) {
    return (__mmask16)(n >= OPS_LANES ? 0xffffu : n > 0 ? (1u << n) - 1u : 0u);
}

#endif
