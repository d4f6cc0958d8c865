/* small_m_gemm_vbmi.c - AVX-512 VBMI: small-M GEMM with FP4, whose codes one instruction
 * shifts into their lanes. */
#include "ops/cpu/dequantize_avx512_internal.h"

#include "ops/cpu/small_m_gemm_loops_internal.h"

/* Each lane's low byte begins with its own four bits of the eight bytes; the lookup reads no
 * more of it. */
static inline lanes shift_e2m1(const uint8_t *src, scaled s) {
    const __m512i bit =
        _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60);
    int64_t eight;
    memcpy(&eight, src, sizeof eight);
    return _mm512_permutexvar_ps(_mm512_multishift_epi64_epi8(bit, _mm512_set1_epi64(eight)),
                                 s.by);
}

bool ops_small_m_e2m1_vbmi(const ops_small_m_args *m) {
    return small_m_e2m1(m, shift_e2m1);
}
