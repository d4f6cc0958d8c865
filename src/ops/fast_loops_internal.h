/* fast_loops_internal.h - rows of x in whole numbers, and numbers of W one at a time, in portable
 * C: for plain products, and for what is left where AVX2 takes 32 at once. */
#ifndef HD_OPS_FAST_LOOPS_INTERNAL_H
#define HD_OPS_FAST_LOOPS_INTERNAL_H

#include <math.h>
#include <string.h>

#include "base/checked.h"
#include "ops/fast_internal.h"

#ifdef __clang__ /* gcc does not fuse in ISO C */
#pragma STDC FP_CONTRACT OFF
#endif

/* ---- x ---- */

static inline uint32_t largest_bits(const float *x, int32_t n) {
    uint32_t largest = 0;
    for (int32_t i = 0; i < n; i++) {
        const uint32_t bits = hd_f32_bits(x[i]) & 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

/* Gives the block's scale. */
static inline float quantize_block(int8_t *restrict code, const float *restrict x) {
    const uint32_t bits = largest_bits(x, FAST_BLOCK);
    if (bits < FAST_TINY || bits >= FAST_HUGE) {
        memset(code, 0, FAST_BLOCK);
        return bits < FAST_TINY ? 0.0f : NAN;
    }
    const float largest = hd_f32_from_bits(bits), inverse = 127.0f / largest;
    for (int32_t i = 0; i < FAST_BLOCK; i++) {
        code[i] = (int8_t)hd_f32_bits(x[i] * inverse + FAST_ROUND);
    }
    return largest * FAST_PART;
}

static inline void quantize_row(const fast_x *x, int32_t row, const float *from, int32_t n,
                                int32_t group) {
    (void)group;
    for (int32_t b = 0; b < x->blocks; b++) {
        const int32_t at = (row / x->side * x->blocks + b) * x->side + row % x->side;
        float block[FAST_BLOCK] = {0};
        const int32_t live = hd_min_i32(FAST_BLOCK, n - b * FAST_BLOCK);
        if (live > 0) memcpy(block, from + b * FAST_BLOCK, (size_t)live * sizeof *block);
        x->scale[at] = quantize_block(x->code + at * FAST_BLOCK, block);
    }
}

/* ---- W ---- */

static inline uint32_t largest_code(const uint8_t *src, int32_t n) {
    uint32_t largest = 0;
    for (int32_t i = 0; i < n; i++) {
        const uint32_t magnitude = src[i] & 0x7fu;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

static inline void read_e2m1_numbers(int8_t *out, const uint8_t *src, int32_t n) {
    static const int8_t doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    for (int32_t i = 0; i < n; i += 2) {
        out[i] = doubled[src[i / 2] & 15];
        out[i + 1] = doubled[src[i / 2] >> 4];
    }
}

static inline void read_e4m3_numbers(int8_t *out, const uint8_t *src, int32_t n, uint32_t e) {
    for (int32_t i = 0; i < n; i++) {
        const int32_t v = fast_e4m3[e][src[i] & 0x7fu] - FAST_E4M3_OFFSET;
        out[i] = (int8_t)(src[i] & 0x80u ? -v : v);
    }
}

#endif
