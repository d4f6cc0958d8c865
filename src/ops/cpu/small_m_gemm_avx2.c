/* small_m_gemm_avx2.c - AVX2: small-M GEMM (decode) with stored rows, 8 elements per
 * register; FP4 is in small_m_gemm_e2m1_avx2.c. */
#include "ops/cpu/dequantize_avx2_internal.h"

/* Up to eight accumulators and their operands fit the registers. If dequantizing an element
 * takes more steps than loading x, x is what is loaded again. */
enum { SMALL_M_X_ROWS = 4 };

static inline int32_t small_m_w_rows(int32_t bits, int32_t n_x) {
    const int32_t most = bits < 16 ? 1 : 2; /* rows of x per two rows of W */
    return n_x > most ? 1 : 2;
}

static inline scaled no_scale(float scale) {
    (void)scale;
    return (scaled){_mm256_setzero_ps()};
}

#include "ops/cpu/small_m_gemm_loops_internal.h"

bool ops_small_m_f32_avx2(const ops_small_m_args *m) {
    return small_m_f32(m);
}

bool ops_small_m_bf16_avx2(const ops_small_m_args *m) {
    return small_m_bf16(m);
}

bool ops_small_m_e4m3_avx2(const ops_small_m_args *m) {
    return small_m_e4m3(m);
}
