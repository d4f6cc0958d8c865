/* dot_bf16_internal.h - AVX-512 BF16: rounds floats to bf16, and computes dot products of
 * pairs. */
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

#endif
