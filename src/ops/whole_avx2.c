/* whole_avx2.c - products in whole numbers, 16 to a register. */
#include <stdbool.h>

#include "ops/fast_rows_internal.h"

typedef __m256i words, totals;

enum { WORDS = 16, TILE_X = 2, TILE_W = 4 };

INLINE words spread_table(const int8_t table[16]) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)table));
}

#include "ops/whole_tables_internal.h"

INLINE words load_words(const void *at) {
    return _mm256_loadu_si256(at);
}

INLINE void store_words(void *at, words w) {
    _mm256_storeu_si256(at, w);
}

/* Which four bytes of FP4 lane l holds in the parts of a half: read_chunk's shuffle. */
INLINE int32_t four_of(int32_t lane, int32_t half) {
    return lane / 4 * 4 + lane % 4 / 2 * 8 + lane % 2 * 2 + half;
}

/* 512 times FP4, whose codes become the high bytes of words: four parts of every other four bytes, so
 * that the two that a block of 16 has fall into one lane. */
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

/* 32 times FP8, rounded, halves up, where a subnormal is nothing; of a small segment 512 times, exactly. */
INLINE void read_e4m3(words part[2], const tables *t, const uint8_t *src, bool small) {
    const __m256i nibble = _mm256_set1_epi8(15), zero = _mm256_setzero_si256();
    const __m256i codes = load_words(src), codes_low = _mm256_and_si256(codes, nibble),
                  codes_high = _mm256_and_si256(_mm256_srli_epi16(codes, 4), nibble);
    __m256i fraction = _mm256_shuffle_epi8(t->fraction, codes_low);
    if (small) {
        const __m256i none =
            _mm256_cmpeq_epi8(_mm256_and_si256(codes, _mm256_set1_epi8(0x78)), zero);
        fraction = _mm256_sub_epi8(
            fraction, _mm256_and_si256(none, _mm256_shuffle_epi8(t->excess, codes_low)));
    }
    const __m256i low = _mm256_shuffle_epi8(small ? t->small_low : t->low, codes_high),
                  high = _mm256_shuffle_epi8(small ? t->small_high : t->high, codes_high);
    part[0] = _mm256_mulhrs_epi16(_mm256_unpacklo_epi8(zero, fraction),
                                  _mm256_unpacklo_epi8(low, high));
    part[1] = _mm256_mulhrs_epi16(_mm256_unpackhi_epi8(zero, fraction),
                                  _mm256_unpackhi_epi8(low, high));
}

INLINE void read_chunk(words part[4], const tables *t, const uint8_t *src, int32_t chunk,
                       bool small, kind k) {
    if (k.type == HD_E4M3) {
        read_e4m3(part, t, src + 32 * chunk, small);
    } else {
        read_e2m1(part, t, src, chunk);
    }
}

INLINE __m256i magnitudes(const uint8_t *src) {
    return _mm256_and_si256(load_words(src), _mm256_set1_epi8(0x7f));
}

INLINE bool any(__m256i mask) {
    return _mm256_movemask_epi8(mask) != 0;
}

INLINE magnitude magnitude_of(const uint8_t *src) {
    const __m256i most =
        _mm256_max_epu8(_mm256_max_epu8(magnitudes(src), magnitudes(src + 32)),
                        _mm256_max_epu8(magnitudes(src + 64), magnitudes(src + 96)));
    if (!any(_mm256_cmpgt_epi8(most, _mm256_set1_epi8(BELOW_32)))) return SMALL;
    return any(_mm256_cmpeq_epi8(most, _mm256_set1_epi8(NO_NUMBER))) ? BROKEN : LARGE;
}

INLINE totals no_totals(void) {
    return _mm256_setzero_si256();
}

/* Loaded once, not again for every product that it is in. */
INLINE words hold(words w) {
    __asm__("" : "+x"(w));
    return w;
}

INLINE totals add_products(totals sum, words w, words x) {
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(w, x));
    __asm__("" : "+x"(sum)); /* in this order: any other takes more registers */
    return sum;
}

/* Totals of a segment times both scales. */
INLINE __m256 add_totals(__m256 sum, totals part, __m256 spread, float x_scale, kind k) {
    (void)k;
    const __m256 by = _mm256_mul_ps(spread, _mm256_set1_ps(x_scale));
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(part), by, sum);
}

/* Those of TILE_W rows of W. */
INLINE void add_tile_totals(float *sums, const totals part[TILE_W], const float *spread,
                            float x_scale, kind k) {
    UNROLL for (int32_t b = 0; b < TILE_W; b++) {
        const __m256 sum = _mm256_loadu_ps(sums + 8 * b), by = _mm256_loadu_ps(spread + 8 * b);
        _mm256_storeu_ps(sums + 8 * b, add_totals(sum, part[b], by, x_scale, k));
    }
}

#include "ops/whole_loops_internal.h"

const fast_kernels fast_whole_avx2 = {.round = round_row, .multiply = multiply};
