/* round_codes.h - codes of E4M3 and E2M1 of a quotient value / scale, and scales of blocks, as the
 * checkpoints' exporters round them (weights/quantize.h): the same bits on a host and on a GPU.
 *
 * The functions have no branches, so that compilers vectorize loops over them. */
#ifndef HD_BASE_ROUND_CODES_H
#define HD_BASE_ROUND_CODES_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/dtype.h"

#ifdef __CUDACC__
#define HD_ROUND_FN static inline __host__ __device__
#else
#define HD_ROUND_FN static inline
#endif

HD_ROUND_FN uint32_t hd_round_bits(float f) {
#ifdef __CUDA_ARCH__
    return __float_as_uint(f);
#else
    return hd_f32_bits(f);
#endif
}

HD_ROUND_FN float hd_round_number(uint32_t bits) {
#ifdef __CUDA_ARCH__
    return __uint_as_float(bits);
#else
    return hd_f32_from_bits(bits);
#endif
}

/* The exporters' bound: a block of zeros has a scale, too. */
#define HD_ROUND_LEAST 1e-12f

/* To nearest, ties to even; saturates at 448. Below 2^-6 steps are 2^-9, as those of float32 from
 * 2^14 on. */
HD_ROUND_FN uint32_t hd_round_e4m3(float f) {
    const float steps = 0x1p14f, a = fabsf(f);
    const uint32_t m = hd_round_bits(a), sign = hd_round_bits(f) >> 24 & 0x80u;
    const uint32_t low = hd_round_bits(a + steps) - hd_round_bits(steps);
    const uint32_t high = ((m + 0x7ffffu + (m >> 20 & 1u)) >> 20) - (120u << 3);
    const uint32_t magnitude = a < 0x1p-6f ? low : high;
    return sign | (a >= 448.0f ? 0x7eu : magnitude);
}

/* negative: of numbers that round to zero, whether the zero keeps its sign. */
HD_ROUND_FN uint32_t hd_round_e2m1(float f, bool negative) {
    const float a = fabsf(f);
    const uint32_t magnitude = (uint32_t)(a > 0.25f) + (uint32_t)(a >= 0.75f) +
                               (uint32_t)(a > 1.25f) + (uint32_t)(a >= 1.75f) +
                               (uint32_t)(a > 2.5f) + (uint32_t)(a >= 3.5f) +
                               (uint32_t)(a > 5.0f);
    const uint32_t sign = hd_round_bits(f) >> 28 & 8u;
    return magnitude || negative ? sign | magnitude : 0;
}

/* The numbers of such codes. */
HD_ROUND_FN float hd_rounded_e4m3(uint32_t code) {
    const uint32_t m = code & 0x7fu, sign = (code & 0x80u) << 24;
    const float least = (float)m * 0x1p-9f;
    return hd_round_number(sign | (m < 8 ? hd_round_bits(least) : (m + (120u << 3)) << 20));
}

HD_ROUND_FN float hd_rounded_e2m1(uint32_t code) {
    const uint32_t m = code & 7u, sign = (code & 8u) << 28;
    const uint32_t high = ((m >> 1) + 126u) << 23 | (m & 1u) << 22;
    return hd_round_number(sign | (m < 2 ? hd_round_bits((float)m * 0.5f) : high));
}

/* The power of two that is x or the next one above; x is normal. */
HD_ROUND_FN float hd_round_power_up(float x) {
    return hd_round_number((hd_round_bits(x) + 0x007fffffu) & 0x7f800000u);
}

/* The scale of a block before it is stored. largest: of the elements' type; global 0: the matrix has
 * none. */
HD_ROUND_FN float hd_round_scale(float amax, float largest, float global, bool power) {
    if (global != 0.0f) return amax > 0 ? amax / (largest * global) : 1.0f;
    const float s = fmaxf(amax, HD_ROUND_LEAST) / largest;
    return power ? hd_round_power_up(s) : s;
}

#endif
