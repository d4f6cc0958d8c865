/* small_m_gemm_avx2.c - few rows of x against stored rows, 8 elements to a register; FP4 is in small_m_gemm_e2m1_avx2.c. */
#include "ops/cpu/dequantize_avx2_internal.h"

/* Up to eight sums and what is on its way to them fit the registers. Where an element takes more
 * steps than loading x does, x is what is loaded again. */
enum { MEET_X_ROWS = 4 };

static inline int32_t meet_w_rows(int32_t bits, int32_t n_x) {
    const int32_t most = bits < 16 ? 1 : 2; /* rows of x that meet two of W */
    return n_x > most ? 1 : 2;
}

static inline scaled no_scale(float scale) {
    (void)scale;
    return (scaled){_mm256_setzero_ps()};
}

#include "ops/cpu/small_m_gemm_loops_internal.h"

bool ops_meet_f32_avx2(const ops_meeting *m) {
    return meet_f32(m);
}

bool ops_meet_bf16_avx2(const ops_meeting *m) {
    return meet_bf16(m);
}

bool ops_meet_e4m3_avx2(const ops_meeting *m) {
    return meet_e4m3(m);
}
