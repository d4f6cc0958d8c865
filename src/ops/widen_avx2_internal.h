/* widen_avx2_internal.h - stored formats: OPS_LANES elements from the first bytes of src, times a scale
 * where one is prepared. For AVX2 files only. */
#ifndef HD_OPS_WIDEN_AVX2_INTERNAL_H
#define HD_OPS_WIDEN_AVX2_INTERNAL_H

#include <string.h>

#include "ops/lanes_avx2_internal.h"

typedef struct scaled {
    __m256 by; /* the scale, or a table of 8 scaled values */
} scaled;

static inline lanes widen_f32(const uint8_t *src, scaled s) {
    (void)s;
    return load_lanes((const float *)(const void *)src);
}

static inline __m256 widen_halves(__m128i half) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

static inline lanes widen_bf16(const uint8_t *src, scaled s) {
    (void)s;
    const __m128i *half = (const __m128i *)(const void *)src;
    return (lanes){widen_halves(_mm_loadu_si128(half)),
                   widen_halves(_mm_loadu_si128(half + 1))};
}

/* By way of F16: e4m3_internal.h. */
static inline scaled e4m3_scale(float scale) {
    return (scaled){_mm256_set1_ps(scale * 256.0f)};
}

static inline lanes widen_e4m3(const uint8_t *src, scaled s) {
    const __m256i byte =
        _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(const void *)src));
    const __m256i bits =
        _mm256_and_si256(_mm256_slli_epi16(byte, 7), _mm256_set1_epi16((int16_t)0xbf80));
    return (lanes){_mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(bits)), s.by),
                   _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(bits, 1)), s.by)};
}

/* The magnitudes, scaled; their own codes are laid over the bits where widen_eight will lay a code
 * again, sign and all, so that only the sign is left. */
static inline scaled e2m1_scale(float scale) {
    const __m256 values = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
    const __m256i place = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256 code = _mm256_castsi256_ps(_mm256_slli_epi32(place, 28));
    return (scaled){_mm256_xor_ps(_mm256_mul_ps(values, _mm256_set1_ps(scale)), code)};
}

/* Each lane shifts its own code out of the four bytes; the look-up reads three bits of it. */
static inline __m256 widen_eight(const uint8_t *src, scaled s) {
    const __m256i shift = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    int32_t codes;
    memcpy(&codes, src, sizeof codes);
    const __m256i code = _mm256_srlv_epi32(_mm256_set1_epi32(codes), shift);
    return _mm256_xor_ps(_mm256_permutevar8x32_ps(s.by, code),
                         _mm256_castsi256_ps(_mm256_slli_epi32(code, 28)));
}

static inline lanes widen_e2m1(const uint8_t *src, scaled s) {
    return (lanes){widen_eight(src, s), widen_eight(src + 4, s)};
}

#endif
