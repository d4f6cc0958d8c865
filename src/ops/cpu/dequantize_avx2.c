/* dequantize_avx2.c - AVX2: dequantizes rows of stored formats to floats. A partial vector
 * at the end is read through a copy, so that nothing beyond it is touched. */
#include "ops/cpu/dequantize_avx2_internal.h"

typedef scaled prepare_fn(float scale);
typedef lanes dequantize_fn(const uint8_t *src, scaled s);

static inline scaled same_scale(float scale) {
    return (scaled){_mm256_set1_ps(scale)};
}

static inline lanes times(lanes x, scaled s) {
    return (lanes){_mm256_mul_ps(x.low, s.by), _mm256_mul_ps(x.high, s.by)};
}

static inline lanes scale_f32(const uint8_t *src, scaled s) {
    return times(dequantize_f32(src, s), s);
}

static inline lanes scale_bf16(const uint8_t *src, scaled s) {
    return times(dequantize_bf16(src, s), s);
}

static inline lanes scale_f16(const uint8_t *src, scaled s) {
    const __m128i *half = (const __m128i *)(const void *)src;
    return times((lanes){_mm256_cvtph_ps(_mm_loadu_si128(half)),
                         _mm256_cvtph_ps(_mm_loadu_si128(half + 1))},
                 s);
}

/* A byte is the exponent; 0 is the subnormal 2^-127, 255 is NaN. */
static inline __m256 power_of_two(const uint8_t *src) {
    const __m256i byte =
        _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)src));
    const __m256i low = _mm256_cmpeq_epi32(byte, _mm256_setzero_si256());
    const __m256i nan = _mm256_cmpeq_epi32(byte, _mm256_set1_epi32(255));
    const __m256i extra =
        _mm256_and_si256(_mm256_or_si256(low, nan), _mm256_set1_epi32(0x00400000));
    return _mm256_castsi256_ps(_mm256_or_si256(_mm256_slli_epi32(byte, 23), extra));
}

static inline lanes scale_e8m0(const uint8_t *src, scaled s) {
    return times((lanes){power_of_two(src), power_of_two(src + 8)}, s);
}

/* Any codes and any scale. */
static inline lanes scale_e4m3(const uint8_t *src, scaled s) {
    const __m128i codes = _mm_loadu_si128((const __m128i *)(const void *)src);
    const __m128i magnitude = _mm_set1_epi8(0x7f);
    const __m128i nan = _mm_cmpeq_epi8(_mm_and_si128(codes, magnitude), magnitude);
    const __m256 low = _mm256_castsi256_ps(_mm256_cvtepi8_epi32(nan)),
                 high = _mm256_castsi256_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(nan, 8)));
    const lanes w = dequantize_e4m3(src, e4m3_scale(1.0f));
    return times((lanes){_mm256_or_ps(w.low, low), _mm256_or_ps(w.high, high)}, s);
}

/* One loop for all formats with `bits` per element; prepare and dequantize are compile-time
 * constants. */
static inline __attribute__((always_inline)) void decode(float *out, const uint8_t *src,
                                                         int32_t n, const float *scale,
                                                         int32_t block, int32_t bits,
                                                         prepare_fn *prepare,
                                                         dequantize_fn *dequantize) {
    int32_t i = 0;
    for (; n - i >= OPS_LANES; scale++) {
        const int32_t end = n - i < block ? n : i + block;
        const scaled s = prepare(*scale);
        for (; i + OPS_LANES <= end; i += OPS_LANES) {
            store_lanes(out + i, dequantize(src + (int64_t)i * bits / 8, s));
        }
        if (i < end) break; /* the partial vector belongs to this block */
    }
    if (i == n) return;
    uint8_t end_src[4 * OPS_LANES] = {0};
    float end_out[OPS_LANES];
    memcpy(end_src, src + (int64_t)i * bits / 8, (size_t)((n - i) * bits + 7) / 8);
    store_lanes(end_out, dequantize(end_src, prepare(*scale)));
    memcpy(out + i, end_out, (size_t)(n - i) * sizeof *out);
}

void ops_dequantize_f32_avx2(float *out, const uint8_t *src, int32_t n, const float *scale,
                             int32_t block) {
    decode(out, src, n, scale, block, 32, same_scale, scale_f32);
}

void ops_dequantize_f16_avx2(float *out, const uint8_t *src, int32_t n, const float *scale,
                             int32_t block) {
    decode(out, src, n, scale, block, 16, same_scale, scale_f16);
}

void ops_dequantize_bf16_avx2(float *out, const uint8_t *src, int32_t n, const float *scale,
                              int32_t block) {
    decode(out, src, n, scale, block, 16, same_scale, scale_bf16);
}

void ops_dequantize_e4m3_avx2(float *out, const uint8_t *src, int32_t n, const float *scale,
                              int32_t block) {
    if (e4m3_scales_fit(scale, n, block) && !e4m3_has_nan(src, n)) {
        decode(out, src, n, scale, block, 8, e4m3_scale, dequantize_e4m3);
    } else {
        decode(out, src, n, scale, block, 8, same_scale, scale_e4m3);
    }
}

void ops_dequantize_e8m0_avx2(float *out, const uint8_t *src, int32_t n, const float *scale,
                              int32_t block) {
    decode(out, src, n, scale, block, 8, same_scale, scale_e8m0);
}

void ops_dequantize_e2m1_avx2(float *out, const uint8_t *src, int32_t n, const float *scale,
                              int32_t block) {
    decode(out, src, n, scale, block, 4, e2m1_scale, dequantize_e2m1);
}
