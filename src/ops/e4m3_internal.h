/* e4m3_internal.h - E4M3 by way of F16: the bits of a code in their places of F16 are its value times
 * 2^-8, subnormals included. Only NaN, all ones below the sign, comes out as a number. */
#ifndef HD_OPS_E4M3_INTERNAL_H
#define HD_OPS_E4M3_INTERNAL_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

/* Whether n codes can go that way, and 2^8 into their scales: no NaN, no scale that overflows. */
static inline bool e4m3_fits_f16(const uint8_t *code, int32_t n, const float *scale,
                                 int32_t block) {
    for (int32_t i = 0, b = 0; i < n; b++) {
        if (!(fabsf(scale[b]) < 0x1p120f)) return false;
        i = n - i < block ? n : i + block;
    }
    uint8_t largest = 0;
    for (int32_t i = 0; i < n; i++) {
        const uint8_t magnitude = code[i] & 0x7f;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest != 0x7f;
}

#endif
