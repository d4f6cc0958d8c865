/* whole_vnni.c - products in whole numbers, 32 to a register, with AVX-512's dot products of them. */
#include <stdbool.h>

#include "ops/fast_rows_internal.h"

typedef __m512i words, totals;

enum { WORDS = 32, TILE_X = 4, TILE_W = 4 };

INLINE words spread_table(const int8_t table[16]) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(const void *)table));
}

#include "ops/whole_tables_internal.h"

INLINE words load_words(const void *at) {
    return _mm512_loadu_si512(at);
}

INLINE void store_words(void *at, words w) {
    _mm512_storeu_si512(at, w);
}

/* Which four bytes of FP4 lane l holds. */
INLINE int32_t four_of(int32_t lane, int32_t half) {
    (void)half; /* there is one */
    return lane;
}

INLINE void read_e2m1(words part[4], const tables *t, const uint8_t *src) {
    const __m512i nibble = _mm512_set1_epi8(15), odd = _mm512_set1_epi16((int16_t)0xff00);
    const __m512i codes = load_words(src);
    const __m512i low = _mm512_shuffle_epi8(t->e2m1, _mm512_and_si512(codes, nibble)),
                  high = _mm512_shuffle_epi8(
                      t->e2m1, _mm512_and_si512(_mm512_srli_epi16(codes, 4), nibble));
    part[0] = _mm512_slli_epi16(low, 8);
    part[1] = _mm512_slli_epi16(high, 8);
    part[2] = _mm512_and_si512(low, odd);
    part[3] = _mm512_and_si512(high, odd);
}

/* 32 times FP8, rounded, halves up, where a subnormal is nothing; of a small segment 512 times, exactly. */
INLINE void read_e4m3(words part[2], const tables *t, const uint8_t *src, bool small) {
    const __m512i nibble = _mm512_set1_epi8(15), zero = _mm512_setzero_si512();
    const __m512i codes = load_words(src), codes_low = _mm512_and_si512(codes, nibble),
                  codes_high = _mm512_and_si512(_mm512_srli_epi16(codes, 4), nibble);
    __m512i fraction = _mm512_shuffle_epi8(t->fraction, codes_low);
    if (small) {
        const __mmask64 none = _mm512_testn_epi8_mask(codes, _mm512_set1_epi8(0x78));
        fraction = _mm512_mask_sub_epi8(fraction, none, fraction,
                                        _mm512_shuffle_epi8(t->excess, codes_low));
    }
    const __m512i low = _mm512_shuffle_epi8(small ? t->small_low : t->low, codes_high),
                  high = _mm512_shuffle_epi8(small ? t->small_high : t->high, codes_high);
    part[0] = _mm512_mulhrs_epi16(_mm512_unpacklo_epi8(zero, fraction),
                                  _mm512_unpacklo_epi8(low, high));
    part[1] = _mm512_mulhrs_epi16(_mm512_unpackhi_epi8(zero, fraction),
                                  _mm512_unpackhi_epi8(low, high));
}

INLINE void read_chunk(words part[4], const tables *t, const uint8_t *src, int32_t chunk,
                       bool small, kind k) {
    if (k.type == HD_E4M3) {
        read_e4m3(part, t, src + 64 * chunk, small);
    } else {
        read_e2m1(part, t, src);
    }
}

INLINE __m512i magnitudes(const uint8_t *src) {
    return _mm512_and_si512(load_words(src), _mm512_set1_epi8(0x7f));
}

INLINE magnitude magnitude_of(const uint8_t *src) {
    const __m512i most = _mm512_max_epu8(magnitudes(src), magnitudes(src + 64));
    if (!_mm512_cmpgt_epi8_mask(most, _mm512_set1_epi8(BELOW_32))) return SMALL;
    return _mm512_cmpeq_epi8_mask(most, _mm512_set1_epi8(NO_NUMBER)) ? BROKEN : LARGE;
}

INLINE totals no_totals(void) {
    return _mm512_setzero_si512();
}

/* There are registers enough for the compiler to do so itself. */
INLINE words hold(words w) {
    return w;
}

INLINE totals add_products(totals sum, words w, words x) {
    return _mm512_dpwssd_epi32(sum, w, x);
}

/* A segment's eight totals: of FP4 sums of the two lanes that a block of 16 has, of FP8 of both halves. */
INLINE __m256i settle(totals sum, kind k) {
    const __m256i low = _mm512_castsi512_si256(sum), high = _mm512_extracti64x4_epi64(sum, 1);
    if (k.type == HD_E4M3) return _mm256_add_epi32(low, high);
    const __m256 a = _mm256_castsi256_ps(low), b = _mm256_castsi256_ps(high);
    return _mm256_add_epi32(_mm256_castps_si256(_mm256_shuffle_ps(a, b, 0x88)),
                            _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xdd)));
}

/* Of two rows of W. */
INLINE __m512i settle_two(totals first, totals second, kind k) {
    const __m512i low = _mm512_shuffle_i64x2(first, second, 0x44),
                  high = _mm512_shuffle_i64x2(first, second, 0xee);
    if (k.type == HD_E4M3) return _mm512_add_epi32(low, high);
    const __m512 a = _mm512_castsi512_ps(low), b = _mm512_castsi512_ps(high);
    return _mm512_add_epi32(_mm512_castps_si512(_mm512_shuffle_ps(a, b, 0x88)),
                            _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0xdd)));
}

/* Totals of a segment times both scales. */
INLINE __m256 add_totals(__m256 sum, totals part, __m256 spread, float x_scale, kind k) {
    const __m256 by = _mm256_mul_ps(spread, _mm256_set1_ps(x_scale));
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(settle(part, k)), by, sum);
}

/* Those of TILE_W rows of W. */
INLINE void add_tile_totals(float *sums, const totals part[TILE_W], const float *spread,
                            float x_scale, kind k) {
    UNROLL for (int32_t b = 0; b < TILE_W; b += 2) {
        const __m512 by =
            _mm512_mul_ps(_mm512_loadu_ps(spread + 8 * b), _mm512_set1_ps(x_scale));
        const __m512 whole = _mm512_cvtepi32_ps(settle_two(part[b], part[b + 1], k));
        _mm512_storeu_ps(sums + 8 * b,
                         _mm512_fmadd_ps(whole, by, _mm512_loadu_ps(sums + 8 * b)));
    }
}

#include "ops/whole_loops_internal.h"

const fast_kernels fast_whole_vnni = {.round = round_row, .multiply = multiply};
