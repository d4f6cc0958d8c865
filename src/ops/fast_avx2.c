/* fast_avx2.c - products in whole numbers with AVX2: the loops of fast_loops_internal.h, the inner
 * ones 32 numbers at a time. */
#include "ops/fast_loops_internal.h"

#include <immintrin.h>

static inline __m256i load32(const void *src) {
    return _mm256_loadu_si256((const __m256i *)src);
}

static inline void read_e2m1(int8_t *out, const uint8_t *src, int32_t n) {
    const __m128i doubled =
        _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    const __m128i nibble = _mm_set1_epi8(0x0f);
    int32_t i = 0;
    for (; i + 32 <= n; i += 32) {
        const __m128i v = _mm_loadu_si128((const __m128i *)(const void *)(src + i / 2));
        const __m128i even = _mm_shuffle_epi8(doubled, _mm_and_si128(v, nibble)),
                      odd = _mm_shuffle_epi8(doubled,
                                             _mm_and_si128(_mm_srli_epi16(v, 4), nibble));
        _mm_storeu_si128((__m128i *)(void *)(out + i), _mm_unpacklo_epi8(even, odd));
        _mm_storeu_si128((__m128i *)(void *)(out + i + 16), _mm_unpackhi_epi8(even, odd));
    }
    read_e2m1_numbers(out + i, src + i / 2, n - i);
}

/* Eight numbers: the bits of E4M3 in their places of F16 are the value times 2^-8. */
static inline __m256i whole_of(__m128i code, __m256 by) {
    const __m128i wide = _mm_cvtepu8_epi16(code);
    const __m128i magnitude = _mm_and_si128(wide, _mm_set1_epi16(0x7f));
    const __m128i sign = _mm_slli_epi16(_mm_sub_epi16(wide, magnitude), 8);
    const __m128i half = _mm_or_si128(sign, _mm_slli_epi16(magnitude, 7));
    return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_cvtph_ps(half), by));
}

static inline void read_e4m3(int8_t *out, const uint8_t *src, int32_t n, uint32_t e) {
    const __m256 by = _mm256_set1_ps(hd_f32_from_bits((127 + 8 + 13 - e) << 23));
    int32_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const __m128i v = _mm_loadu_si128((const __m128i *)(const void *)(src + i));
        const __m256i a = whole_of(v, by), b = whole_of(_mm_srli_si128(v, 8), by);
        const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
        _mm_storeu_si128(
            (__m128i *)(void *)(out + i),
            _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
    }
    read_e4m3_numbers(out + i, src + i, n - i, e);
}

static inline uint32_t largest_e4m3(const uint8_t *src, int32_t n) {
    const __m256i magnitude = _mm256_set1_epi8(0x7f);
    __m256i most = _mm256_setzero_si256();
    int32_t i = 0;
    for (; i + 32 <= n; i += 32) {
        most = _mm256_max_epu8(most, _mm256_and_si256(load32(src + i), magnitude));
    }
    uint8_t byte[32];
    _mm256_storeu_si256((__m256i *)(void *)byte, most);
    const uint32_t end = largest_code(src + i, n - i), all = largest_code(byte, 32);
    return all > end ? all : end;
}

/* Neighbors' products fit 16 bits because no number of W is beyond 120. */
static inline __m256i dot_block(const int8_t *x, const int8_t *w) {
    const __m256i number = load32(w);
    const __m256i pairs =
        _mm256_maddubs_epi16(_mm256_abs_epi8(number), _mm256_sign_epi8(load32(x), number));
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}

static inline void dot_step(int32_t sum[8], const int8_t *x, int64_t x_stride,
                            const int8_t *w) {
    const __m256i ab = _mm256_hadd_epi32(dot_block(x, w), dot_block(x + x_stride, w + 32)),
                  cd = _mm256_hadd_epi32(dot_block(x + 2 * x_stride, w + 64),
                                         dot_block(x + 3 * x_stride, w + 96));
    _mm256_storeu_si256((__m256i *)(void *)sum, _mm256_hadd_epi32(ab, cd));
}

static void multiply(const fast_product *p) {
    static const fast_loops loops = {read_e2m1, read_e4m3, largest_e4m3, dot_step};
    multiply_rows(p, &loops);
}

const fast_kernels fast_avx2 = {.quantize = quantize_row, .multiply = multiply};
