/* int16_gemm_avx2.c - AVX2: int16 GEMM (--precision fast), 16 integers per register. */
#include "ops/cpu/int16_gemm_values_internal.h"

typedef __m256i words, totals;
typedef __m256 floats;

enum { WORDS = 16, LANES = 8, TILE_X = 2, TILE_W = 4, FEW = 4 };

/* An FP8 value is a product. Its low four bits, the fraction and the exponent's lowest bit,
 * are one factor, 8 to 30; here 4 times that. */
static const int8_t int16_fraction[16] = {32, 36, 40, 44, 48, 52,  56,  60,
                                          64, 72, 80, 88, 96, 104, 112, 120};

/* Excess of a subnormal's factor: it has no implicit bit, and its neighbour's exponent. */
static const int8_t int16_excess[16] = {32, 28, 24, 20, 16, 12, 8, 4};

/* Its high four, the sign and the rest of the exponent, are a power of four, of two bytes; */
static const int8_t int16_low[16] = {1, 4, 16, 64, 0, 0, 0, 0, -1, -4, -16, -64, 0, 0, 0, 0},
                    int16_high[16] = {0,  0,  0,  0,  1,  4,  16,  64,
                                      -1, -1, -1, -1, -1, -4, -16, -64};

/* 16 times that, of small elements. */
static const int8_t int16_small_low[16] = {16,  64,  0, 0, 0, 0, 0, 0,
                                           -16, -64, 0, 0, 0, 0, 0, 0},
                    int16_small_high[16] = {0,  0,  1,  4,  16,  64,  0, 0,
                                            -1, -1, -1, -4, -16, -64, 0, 0};

typedef struct tables {
    words e2m1, fraction, excess, low, high, small_low, small_high;
} tables;

INLINE words spread_table(const int8_t table[16]) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)table));
}

INLINE tables make_tables(void) {
    return (tables){spread_table(int16_e2m1),      spread_table(int16_fraction),
                    spread_table(int16_excess),    spread_table(int16_low),
                    spread_table(int16_high),      spread_table(int16_small_low),
                    spread_table(int16_small_high)};
}

INLINE words load_words(const void *at) {
    return _mm256_loadu_si256(at);
}

INLINE void store_words(void *at, words w) {
    _mm256_storeu_si256(at, w);
}

INLINE floats load_floats(const float *at) {
    return _mm256_loadu_ps(at);
}

INLINE void store_floats(float *at, floats f) {
    _mm256_storeu_ps(at, f);
}

INLINE floats no_floats(void) {
    return _mm256_setzero_ps();
}

INLINE void copy_filled(uint8_t *to, const uint8_t *from, int32_t n, int32_t all) {
    memset(to, 0, (size_t)all);
    memcpy(to, from, (size_t)n);
}

/* ---- W ---- */

/* Converts FP4 to 512 times its value; codes become the high bytes of int16. The four parts
 * take every other four bytes, so that both halves of a block of 16 fall into one lane. */
INLINE void read_e2m1(words part[4], const tables *t, const uint8_t *src, int32_t half) {
    const __m256i nibble = _mm256_set1_epi8(15), odd = _mm256_set1_epi16((int16_t)0xff00);
    const __m256 a = _mm256_castsi256_ps(load_words(src)),
                 b = _mm256_castsi256_ps(load_words(src + 32));
    const __m256i codes = _mm256_castps_si256(half ? _mm256_shuffle_ps(a, b, 0xdd)
                                                   : _mm256_shuffle_ps(a, b, 0x88));
    const __m256i low = _mm256_shuffle_epi8(t->e2m1, _mm256_and_si256(codes, nibble)),
                  high = _mm256_shuffle_epi8(
                      t->e2m1, _mm256_and_si256(_mm256_srli_epi16(codes, 4), nibble));
    part[0] = _mm256_slli_epi16(low, 8);
    part[1] = _mm256_slli_epi16(high, 8);
    part[2] = _mm256_and_si256(low, odd);
    part[3] = _mm256_and_si256(high, odd);
}

/* The range of a group of FP8: whether an element is 32 or more, or is NaN. */
typedef enum sizes { SMALL, LARGE, BROKEN } sizes;

INLINE __m256i magnitudes(const uint8_t *src) {
    return _mm256_and_si256(load_words(src), _mm256_set1_epi8(0x7f));
}

INLINE bool any(__m256i mask) {
    return _mm256_movemask_epi8(mask) != 0;
}

INLINE sizes sizes_of(const uint8_t *src, kind k) {
    if (k.type != HD_E4M3) return SMALL;
    const __m256i most =
        _mm256_max_epu8(_mm256_max_epu8(magnitudes(src), magnitudes(src + 32)),
                        _mm256_max_epu8(magnitudes(src + 64), magnitudes(src + 96)));
    if (!any(_mm256_cmpgt_epi8(most, _mm256_set1_epi8(BELOW_32)))) return SMALL;
    return any(_mm256_cmpeq_epi8(most, _mm256_set1_epi8(NO_NUMBER))) ? BROKEN : LARGE;
}

INLINE bool are_large(sizes size) {
    return size != SMALL;
}

/* Converts FP8 to 32 times its value, rounded, halves up, with subnormals as 0; if not
 * large, to 512 times its value, exactly. */
INLINE void read_e4m3(words part[2], const tables *t, const uint8_t *src, bool large) {
    const __m256i nibble = _mm256_set1_epi8(15), zero = _mm256_setzero_si256();
    const __m256i codes = load_words(src), codes_low = _mm256_and_si256(codes, nibble),
                  codes_high = _mm256_and_si256(_mm256_srli_epi16(codes, 4), nibble);
    __m256i fraction = _mm256_shuffle_epi8(t->fraction, codes_low);
    if (!large) {
        const __m256i none =
            _mm256_cmpeq_epi8(_mm256_and_si256(codes, _mm256_set1_epi8(0x78)), zero);
        fraction = _mm256_sub_epi8(
            fraction, _mm256_and_si256(none, _mm256_shuffle_epi8(t->excess, codes_low)));
    }
    const __m256i low = _mm256_shuffle_epi8(large ? t->low : t->small_low, codes_high),
                  high = _mm256_shuffle_epi8(large ? t->high : t->small_high, codes_high);
    part[0] = _mm256_mulhrs_epi16(_mm256_unpacklo_epi8(zero, fraction),
                                  _mm256_unpacklo_epi8(low, high));
    part[1] = _mm256_mulhrs_epi16(_mm256_unpackhi_epi8(zero, fraction),
                                  _mm256_unpackhi_epi8(low, high));
}

INLINE void read_chunk(words part[4], const tables *t, const uint8_t *src, int32_t chunk,
                       sizes size, bool large, kind k) {
    (void)size;
    if (k.type == HD_E4M3) {
        read_e4m3(part, t, src + 32 * chunk, large);
    } else {
        read_e2m1(part, t, src, chunk);
    }
}

/* Returns the scales of the sums of a group's span, in the order of the stored elements. */
INLINE floats spread_scales(const float *at, sizes size, int32_t span, kind k) {
    floats spread;
    if (k.type == HD_E4M3) {
        const float unit = size == SMALL ? fine : size == LARGE ? coarse : NAN;
        return _mm256_mul_ps(_mm256_set1_ps(at[span]), _mm256_set1_ps(unit));
    }
    if (k.block == 32) {
        spread = _mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_loadu_ps(at)),
                                          _mm256_setr_epi32(0, 0, 2, 2, 1, 1, 3, 3));
    } else {
        spread = _mm256_permutevar8x32_ps(_mm256_loadu_ps(at),
                                          _mm256_setr_epi32(0, 1, 4, 5, 2, 3, 6, 7));
    }
    return _mm256_mul_ps(spread, _mm256_set1_ps(fine));
}

INLINE floats spread_x_scales(const float *at, kind k) {
    (void)k;
    return _mm256_set1_ps(*at);
}

/* ---- accumulation and reduction ---- */

INLINE totals no_totals(void) {
    return _mm256_setzero_si256();
}

/* Keeps a register loaded, instead of reloading it for every product. */
INLINE words hold(words w) {
    __asm__("" : "+x"(w));
    return w;
}

INLINE totals add_products(totals sum, words w, words x) {
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(w, x));
    __asm__("" : "+x"(sum)); /* this order takes the fewest registers */
    return sum;
}

/* Adds the totals of a group times both scales. */
INLINE floats add_totals(floats sum, totals part, floats spread, floats of_x) {
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(part), _mm256_mul_ps(spread, of_x), sum);
}

/* Returns the sums of a row of W, those of even and odd segments added. */
INLINE __m256 halve(const float *sums, kind k) {
    (void)k;
    return _mm256_add_ps(load_floats(sums), load_floats(sums + 8));
}

#include "ops/cpu/int16_gemm_loops_internal.h"

const fast_kernels fast_int16_avx2 = {.round = round_row, .multiply = multiply};
