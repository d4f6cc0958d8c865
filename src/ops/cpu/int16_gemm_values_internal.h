/* int16_gemm_values_internal.h - int16 GEMM: values as integers. Tables convert codes of FP8
 * and FP4; a segment of x is rounded. */
#ifndef HD_OPS_CPU_INT16_GEMM_VALUES_INTERNAL_H
#define HD_OPS_CPU_INT16_GEMM_VALUES_INTERNAL_H

#include <math.h>
#include <stdbool.h>

#include "ops/cpu/gemm_fast_rows_internal.h"

/* ---- W ---- */

/* FP8 codes without their sign: the largest below 32, and NaN. */
enum { BELOW_32 = 0x5f, NO_NUMBER = 0x7f };

/* Units of the integers of W: for FP4 and small FP8, and for larger FP8. */
static const float fine = 0x1p-9f, coarse = 0x1p-5f;

/* Twice an element of FP4. */
static const int8_t int16_e2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

/* ---- x ---- */

/* Magnitude of x, at most: 16 products with the largest of W fit 31 bits. */
enum { LIMIT = 8191 };

/* A segment of x whose magnitudes are all below it counts as zero. */
static const float least_x = 0x1p-100f;

/* Compares magnitudes by their bits, so that NaN is the largest. */
INLINE float largest_of(const float *x) {
    const __m256i unsign = _mm256_set1_epi32(INT32_MAX);
    __m256i top = _mm256_setzero_si256();
    for (int32_t i = 0; i < FAST_SEGMENT; i += 8) {
        const __m256i bits = _mm256_castps_si256(_mm256_loadu_ps(x + i));
        top = _mm256_max_epu32(top, _mm256_and_si256(bits, unsign));
    }
    __m128i four = _mm_max_epu32(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1));
    four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
    four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0xb1));
    return _mm_cvtss_f32(_mm_castsi128_ps(four));
}

/* Rounds a segment, of which n columns exist. Returns its divisor. */
INLINE float round_segment(int32_t int16[FAST_SEGMENT], const float *x, int32_t n) {
    float end[FAST_SEGMENT];
    if (n < FAST_SEGMENT) {
        memset(end, 0, sizeof end);
        if (n > 0) memcpy(end, x, (size_t)n * sizeof *x);
        x = end;
    }
    const float largest = largest_of(x);
    const float by = largest < least_x ? 0.0f : (float)LIMIT / largest;
    for (int32_t i = 0; i < FAST_SEGMENT; i += 8) {
        const __m256 y = _mm256_mul_ps(_mm256_loadu_ps(x + i), _mm256_set1_ps(by));
        _mm256_storeu_si256((__m256i *)(void *)(int16 + i), _mm256_cvtps_epi32(y));
    }
    return largest / (float)LIMIT;
}

#endif
