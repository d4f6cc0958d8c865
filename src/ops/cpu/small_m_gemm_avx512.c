/* small_m_gemm_avx512.c - few rows of x against stored rows, 16 elements to a register. */
#include "ops/cpu/dequantize_avx512_internal.h"

#include "ops/cpu/small_m_gemm_loops_internal.h"

bool ops_meet_f32_avx512(const ops_meeting *m) {
    return meet_f32(m);
}

bool ops_meet_bf16_avx512(const ops_meeting *m) {
    return meet_bf16(m);
}

bool ops_meet_e4m3_avx512(const ops_meeting *m) {
    return meet_e4m3(m);
}

bool ops_meet_e2m1_avx512(const ops_meeting *m) {
    return meet_e2m1(m, widen_e2m1);
}
