/* dot_bf16_internal.h - AVX-512 BF16: rounds floats to bf16, computes dot products of pairs,
 * and reduces their sums. */
#ifndef HD_OPS_CPU_DOT_BF16_INTERNAL_H
#define HD_OPS_CPU_DOT_BF16_INTERNAL_H

#include "ops/cpu/inline_internal.h"
#include "ops/cpu/lanes_avx512_internal.h"

enum { PART = 32 /* elements of a register */ };

/* Rounds PART floats, of which n exist; the rest are zeros. */
INLINE __m512i round_part(const float *from, int32_t n) {
    const __m512 low = _mm512_maskz_loadu_ps(first_lanes(n), from),
                 high = _mm512_maskz_loadu_ps(first_lanes(n - 16), from + 16);
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

/* In each lane the second product of a pair is added and then the first, each with rounding. */
INLINE __m512 add_pairs(__m512 sum, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

/* In each 128-bit lane, the sums of that lane of four registers. */
INLINE __m512 reduce_lanes(const __m512 v[4]) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]),
                                    _mm512_unpackhi_ps(v[0], v[1])),
                 cd = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]),
                                    _mm512_unpackhi_ps(v[2], v[3]));
    return _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
}

/* Lanes 0 + 1 and 2 + 3 of both. */
INLINE __m512 reduce_pairs(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

/* Element i: the sum of v[i], all by the same tree: in every four (0 + 2) + (1 + 3), and these
 * four ((0 + 1) + (2 + 3)). */
INLINE __m512 reduce_sums(const __m512 v[16]) {
    return reduce_pairs(reduce_pairs(reduce_lanes(v), reduce_lanes(v + 4)),
                        reduce_pairs(reduce_lanes(v + 8), reduce_lanes(v + 12)));
}

#endif
