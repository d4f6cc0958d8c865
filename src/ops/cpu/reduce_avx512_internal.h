/* reduce_avx512_internal.h - AVX-512: reduces sixteen registers of 16 sums to one, all by
 * the same tree: in every four (0 + 2) + (1 + 3), and these four ((0 + 1) + (2 + 3)). */
#ifndef HD_OPS_CPU_REDUCE_AVX512_INTERNAL_H
#define HD_OPS_CPU_REDUCE_AVX512_INTERNAL_H

#include <immintrin.h>

/* In each 128-bit lane, the sums of that lane of four registers. */
static inline __attribute__((always_inline)) __m512 reduce_lanes(const __m512 v[4]) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]),
                                    _mm512_unpackhi_ps(v[0], v[1])),
                 cd = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]),
                                    _mm512_unpackhi_ps(v[2], v[3]));
    return _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
}

/* Lanes 0 + 1 and 2 + 3 of both. */
static inline __attribute__((always_inline)) __m512 reduce_pairs(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

/* Element i: the sum of v[i]. */
static inline __attribute__((always_inline)) __m512 reduce_sums(const __m512 v[16]) {
    return reduce_pairs(reduce_pairs(reduce_lanes(v), reduce_lanes(v + 4)),
                        reduce_pairs(reduce_lanes(v + 8), reduce_lanes(v + 12)));
}

#endif
