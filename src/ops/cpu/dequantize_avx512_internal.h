/* dequantize_avx512_internal.h - AVX-512: dequantizes OPS_LANES elements at src, times a
 * prepared scale if there is one. */
#ifndef HD_OPS_CPU_DEQUANTIZE_AVX512_INTERNAL_H
#define HD_OPS_CPU_DEQUANTIZE_AVX512_INTERNAL_H

#include <string.h>

#include "ops/cpu/e4m3_internal.h"
#include "ops/cpu/lanes_avx512_internal.h"

/* Sixteen accumulators and their operands fit the registers. */
enum { SMALL_M_X_ROWS = 4 };

static inline int32_t small_m_w_rows(int32_t bits, int32_t n_x) {
    (void)bits;
    (void)n_x;
    return OPS_TILE_ROWS;
}

typedef struct scaled {
    __m512 by; /* the scale, or a table of 16 scaled values */
} scaled;

static inline scaled no_scale(float scale) {
    (void)scale;
    return (scaled){_mm512_setzero_ps()};
}

static inline lanes dequantize_f32(const uint8_t *src, scaled s) {
    (void)s;
    return _mm512_loadu_ps(src);
}

static inline lanes dequantize_bf16(const uint8_t *src, scaled s) {
    (void)s;
    const __m256i half = _mm256_loadu_si256((const __m256i *)(const void *)src);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

/* Through F16: see e4m3_internal.h. */
static inline bool e4m3_scales_fit(const float *scale, int32_t n, int32_t block) {
    return e4m3_scales_below(0x1p120f, scale, n, block);
}

static inline bool e4m3_has_nan(const uint8_t *code, int32_t n) {
    uint8_t largest = 0;
    for (int32_t i = 0; i < n; i++) {
        const uint8_t magnitude = code[i] & 0x7f;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest == 0x7f;
}

static inline scaled e4m3_scale(float scale) {
    return (scaled){_mm512_set1_ps(scale * 256.0f)};
}

static inline lanes dequantize_e4m3(const uint8_t *src, scaled s) {
    const __m256i byte =
        _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(const void *)src));
    const __m256i bits =
        _mm256_and_si256(_mm256_slli_epi16(byte, 7), _mm256_set1_epi16((int16_t)0xbf80));
    return _mm512_mul_ps(_mm512_cvtph_ps(bits), s.by);
}

static inline scaled e2m1_scale(float scale) {
    const __m512 values = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f,
                                         -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
    return (scaled){_mm512_mul_ps(values, _mm512_set1_ps(scale))};
}

/* Each lane shifts its own code out of its half of the eight bytes; the table lookup reads
 * four bits of it. */
static inline lanes dequantize_e2m1(const uint8_t *src, scaled s) {
    const __m512i half = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    const __m512i shift =
        _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    int64_t eight;
    memcpy(&eight, src, sizeof eight);
    const __m512i both = _mm512_permutexvar_epi32(half, _mm512_set1_epi64(eight));
    return _mm512_permutexvar_ps(_mm512_srlv_epi32(both, shift), s.by);
}

#endif
