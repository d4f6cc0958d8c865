/* e4m3_internal.h - dequantizes FP8 (E4M3) through a wider format: a code's bits, placed in
 * F16, are its value times 2^-8, in F32 times 2^-120, subnormals included. Only NaN, all
 * ones below the sign, becomes a number. */
#ifndef HD_OPS_CPU_E4M3_INTERNAL_H
#define HD_OPS_CPU_E4M3_INTERNAL_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

/* Returns whether the missing power of two can be multiplied into the scales of n codes
 * without overflow. */
static inline bool e4m3_scales_below(float limit, const float *scale, int32_t n,
                                     int32_t block) {
    for (int32_t i = 0, b = 0; i < n; b++) {
        if (!(fabsf(scale[b]) < limit)) return false;
        i = n - i < block ? n : i + block;
    }
    return true;
}

#endif
