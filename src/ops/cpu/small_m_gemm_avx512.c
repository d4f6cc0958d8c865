/* small_m_gemm_avx512.c - AVX-512: small-M GEMM (decode) with stored rows, 16 elements per
 * register. */
#include "ops/cpu/dequantize_avx512_internal.h"

#include "ops/cpu/small_m_gemm_loops_internal.h"

bool ops_small_m_f32_avx512(const ops_small_m_args *m) {
    return small_m_f32(m);
}

bool ops_small_m_bf16_avx512(const ops_small_m_args *m) {
    return small_m_bf16(m);
}

bool ops_small_m_e4m3_avx512(const ops_small_m_args *m) {
    return small_m_e4m3(m);
}

bool ops_small_m_e2m1_avx512(const ops_small_m_args *m) {
    return small_m_e2m1(m, dequantize_e2m1);
}
