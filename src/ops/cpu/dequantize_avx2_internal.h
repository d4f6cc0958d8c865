/* dequantize_avx2_internal.h - AVX2: dequantizes OPS_LANES elements at src, times a prepared
 * scale if there is one. */
#ifndef HD_OPS_CPU_DEQUANTIZE_AVX2_INTERNAL_H
#define HD_OPS_CPU_DEQUANTIZE_AVX2_INTERNAL_H

#include <string.h>

#include "ops/cpu/e4m3_internal.h"
#include "ops/cpu/lanes_avx2_internal.h"

typedef struct scaled {
    __m256 by; /* the scale, or a table of 8 scaled values */
} scaled;

static inline lanes dequantize_f32(const uint8_t *src, scaled s) {
    (void)s;
    return load_lanes((const float *)(const void *)src);
}

static inline __m256 dequantize_pairs(__m128i half) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

static inline lanes dequantize_bf16(const uint8_t *src, scaled s) {
    (void)s;
    const __m128i *half = (const __m128i *)(const void *)src;
    return (lanes){dequantize_pairs(_mm_loadu_si128(half)),
                   dequantize_pairs(_mm_loadu_si128(half + 1))};
}

/* Through F32: see e4m3_internal.h. Its subnormals are slow but rare in checkpoints;
 * conversions from F16 take two steps each. */
static inline scaled e4m3_scale(float scale) {
    return (scaled){_mm256_set1_ps(scale * 0x1p120f)};
}

static inline __m256 dequantize_eight_e4m3(const uint8_t *src, scaled s) {
    const __m256i code =
        _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)src));
    const __m256i bits =
        _mm256_and_si256(_mm256_slli_epi32(code, 20), _mm256_set1_epi32((int32_t)0x87f00000));
    return _mm256_mul_ps(_mm256_castsi256_ps(bits), s.by);
}

static inline lanes dequantize_e4m3(const uint8_t *src, scaled s) {
    return (lanes){dequantize_eight_e4m3(src, s), dequantize_eight_e4m3(src + 8, s)};
}

static inline __m256i larger_magnitude(__m256i largest, const uint8_t *code) {
    const __m256i codes = _mm256_loadu_si256((const __m256i *)(const void *)code);
    return _mm256_max_epu8(largest, _mm256_and_si256(codes, _mm256_set1_epi8(0x7f)));
}

static inline bool e4m3_scales_fit(const float *scale, int32_t n, int32_t block) {
    return e4m3_scales_below(0x1p8f, scale, n, block);
}

/* Four steps at a time, as this runs before every product. */
static inline bool e4m3_has_nan(const uint8_t *code, int32_t n) {
    __m256i largest[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(),
                          _mm256_setzero_si256(), _mm256_setzero_si256()};
    int32_t i = 0;
    for (; i + 128 <= n; i += 128) {
        for (int32_t j = 0; j < 4; j++) {
            largest[j] = larger_magnitude(largest[j], code + i + 32 * j);
        }
    }
    for (; i < n; i += 32) {
        uint8_t end[32] = {0};
        memcpy(end, code + i, (size_t)(n - i < 32 ? n - i : 32));
        largest[0] = larger_magnitude(largest[0], end);
    }
    const __m256i all = _mm256_max_epu8(_mm256_max_epu8(largest[0], largest[1]),
                                        _mm256_max_epu8(largest[2], largest[3]));
    const __m256i nan = _mm256_cmpeq_epi8(all, _mm256_set1_epi8(0x7f));
    return !_mm256_testz_si256(nan, nan);
}

/* The scaled magnitudes. Their own codes are XORed over the bits where widen_eight will
 * apply a code again, sign included, so that only the sign remains. */
static inline scaled e2m1_scale(float scale) {
    const __m256 values = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
    const __m256i place = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256 code = _mm256_castsi256_ps(_mm256_slli_epi32(place, 28));
    return (scaled){_mm256_xor_ps(_mm256_mul_ps(values, _mm256_set1_ps(scale)), code)};
}

/* Each lane shifts its own code out of the four bytes; the table lookup reads three bits of
 * it. */
static inline __m256 dequantize_eight(const uint8_t *src, scaled s) {
    const __m256i shift = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    int32_t codes;
    memcpy(&codes, src, sizeof codes);
    const __m256i code = _mm256_srlv_epi32(_mm256_set1_epi32(codes), shift);
    return _mm256_xor_ps(_mm256_permutevar8x32_ps(s.by, code),
                         _mm256_castsi256_ps(_mm256_slli_epi32(code, 28)));
}

static inline lanes dequantize_e2m1(const uint8_t *src, scaled s) {
    return (lanes){dequantize_eight(src, s), dequantize_eight(src + 4, s)};
}

#endif
