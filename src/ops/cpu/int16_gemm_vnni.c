/* int16_gemm_vnni.c - AVX-512 VNNI: int16 GEMM (--precision fast), 32 integers per register.
 * A group is two segments, each of which has half of the lanes: for FP8 the lower and the
 * upper eight, for FP4 every other two. */
#include "ops/cpu/int16_gemm_values_internal.h"

typedef __m512i words, totals;
typedef __m512 floats;

enum { WORDS = 32, LANES = 16, TILE_X = 4, TILE_W = 4, FEW = 8 };

INLINE words load_words(const void *at) {
    return _mm512_loadu_si512(at);
}

INLINE void store_words(void *at, words w) {
    _mm512_storeu_si512(at, w);
}

INLINE floats load_floats(const float *at) {
    return _mm512_loadu_ps(at);
}

INLINE void store_floats(float *at, floats f) {
    _mm512_storeu_ps(at, f);
}

INLINE floats no_floats(void) {
    return _mm512_setzero_ps();
}

INLINE void copy_filled(uint8_t *to, const uint8_t *from, int32_t n, int32_t all) {
    UNROLL for (int32_t b = 0; b < all; b += 64, n -= 64) {
        const __mmask64 there = n >= 64 ? UINT64_MAX : n > 0 ? (UINT64_C(1) << n) - 1 : 0;
        store_words(to + b, _mm512_maskz_loadu_epi8(there, from + b));
    }
}

/* ---- W ---- */

/* A sign and an exponent of FP8 as a power of two, without the sign; the subnormals' only
 * for small elements, otherwise 0. */
typedef struct tables {
    words e2m1, large, small;
} tables;

INLINE tables make_tables(void) {
    int16_t large[WORDS], small[WORDS];
    for (int32_t e = 0; e < 16; e++) {
        large[e] = (int16_t)(e ? 1 << (e - 1) : 0);
        small[e] = (int16_t)(e == 0 ? 16 : e < 12 ? 1 << (e + 3) : 0);
        large[e + 16] = (int16_t)-large[e];
        small[e + 16] = (int16_t)-small[e];
    }
    const __m128i e2m1 = _mm_loadu_si128((const __m128i *)(const void *)int16_e2m1);
    return (tables){_mm512_broadcast_i32x4(e2m1), load_words(large), load_words(small)};
}

/* Converts FP4 to 512 times its value; codes become the high bytes of int16. The four parts
 * take every other four bytes, so that both halves of a block of 16 fall into one lane. */
INLINE void read_e2m1(words part[4], const tables *t, const uint8_t *src, int32_t chunk) {
    const __m512i nibble = _mm512_set1_epi8(15), odd = _mm512_set1_epi16((int16_t)0xff00);
    const __m512 a = _mm512_castsi512_ps(load_words(src)),
                 b = _mm512_castsi512_ps(load_words(src + 64));
    const __m512i codes = _mm512_castps_si512(chunk ? _mm512_shuffle_ps(a, b, 0xdd)
                                                    : _mm512_shuffle_ps(a, b, 0x88));
    const __m512i low = _mm512_shuffle_epi8(t->e2m1, _mm512_and_si512(codes, nibble)),
                  high = _mm512_shuffle_epi8(
                      t->e2m1, _mm512_and_si512(_mm512_srli_epi16(codes, 4), nibble));
    part[0] = _mm512_slli_epi16(low, 8);
    part[1] = _mm512_slli_epi16(high, 8);
    part[2] = _mm512_and_si512(low, odd);
    part[3] = _mm512_and_si512(high, odd);
}

/* Loads 32 codes of either segment. */
INLINE words read_codes(const uint8_t *src, int32_t chunk) {
    const __m256i *at = (const __m256i *)(const void *)(src + 32 * chunk);
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256(at)),
                              _mm256_loadu_si256(at + FAST_SEGMENT / 32), 1);
}

/* Ranges of FP8 segments: which have no element of 32 or more, and which contain NaN. */
typedef struct sizes {
    bool small[2], broken[2];
} sizes;

INLINE sizes sizes_of(const uint8_t *src, kind k) {
    if (k.type != HD_E4M3)
        return (sizes){
            {false, false},
            {false, false}
        };
    __m512i most = _mm512_setzero_si512();
    UNROLL for (int32_t i = 0; i < 4; i++) {
        const __m512i unsign = _mm512_set1_epi8(0x7f);
        most = _mm512_max_epu8(most, _mm512_and_si512(read_codes(src, i), unsign));
    }
    const uint64_t large = _mm512_cmpgt_epi8_mask(most, _mm512_set1_epi8(BELOW_32)),
                   broken = _mm512_cmpeq_epi8_mask(most, _mm512_set1_epi8(NO_NUMBER));
    return (sizes){
        {(uint32_t)large == 0,  large >> 32 == 0 },
        {(uint32_t)broken != 0, broken >> 32 != 0}
    };
}

INLINE bool are_large(sizes s) {
    return !(s.small[0] | s.small[1] | s.broken[0] | s.broken[1]);
}

/* Converts FP8 to 32 times its value, rounded, halves up, with subnormals as 0; a small
 * segment to 512 times its value, exactly. It multiplies 2^11 times the fraction with its
 * implicit bit by the power. `up` moves the fraction's bits there, `down` moves sign and
 * exponent to an index. */
INLINE words read_e4m3(const tables *t, words up, words down, __mmask32 none, sizes size,
                       bool large) {
    words fraction = _mm512_ternarylogic_epi32(up, _mm512_set1_epi16(0x3800),
                                               _mm512_set1_epi16(0x4000), 0xea);
    words power = _mm512_permutexvar_epi16(down, t->large);
    if (!large) {
        const __mmask32 small =
            (size.small[0] ? 0xffffu : 0) | (size.small[1] ? 0xffff0000u : 0);
        fraction = _mm512_mask_sub_epi16(fraction, none, fraction, _mm512_set1_epi16(0x4000));
        power = _mm512_mask_permutexvar_epi16(power, small, down, t->small);
    }
    return _mm512_mulhrs_epi16(fraction, power);
}

/* Like AVX2's unpacked bytes: eight columns in one part, the next eight in the other. */
INLINE void read_chunk(words part[4], const tables *t, const uint8_t *src, int32_t chunk,
                       sizes size, bool large, kind k) {
    if (k.type == HD_E2M1) {
        read_e2m1(part, t, src, chunk);
        return;
    }
    const __m512i eight_on = _mm512_broadcast_i32x4(
        _mm_setr_epi8(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15));
    const __m512i codes = _mm512_shuffle_epi8(read_codes(src, chunk), eight_on),
                  exponent = _mm512_set1_epi16(0x78);
    const __m512i odd = _mm512_srli_epi16(codes, 8);
    part[0] = read_e4m3(t, _mm512_slli_epi16(codes, 11), _mm512_srli_epi16(codes, 3),
                        _mm512_testn_epi16_mask(codes, exponent), size, large);
    part[1] = read_e4m3(t, _mm512_slli_epi16(codes, 3), _mm512_srli_epi16(codes, 11),
                        _mm512_testn_epi16_mask(odd, exponent), size, large);
}

/* Returns the scales of the sums of a group's span, in the order of the stored elements. */
INLINE floats spread_scales(const float *at, sizes size, int32_t span, kind k) {
    if (k.type == HD_E4M3) {
        const __m512 scales =
            _mm512_mask_blend_ps(0xff00, _mm512_set1_ps(at[span]),
                                 _mm512_set1_ps(at[FAST_SEGMENT / k.block + span]));
        if (are_large(size)) return _mm512_mul_ps(scales, _mm512_set1_ps(coarse));
        float unit[2];
        for (int32_t i = 0; i < 2; i++) {
            unit[i] = size.broken[i] ? NAN : size.small[i] ? fine : coarse;
        }
        return _mm512_mul_ps(scales, _mm512_mask_blend_ps(0xff00, _mm512_set1_ps(unit[0]),
                                                          _mm512_set1_ps(unit[1])));
    }
    floats spread;
    if (k.block == 32) {
        spread = _mm512_permutexvar_ps(
            _mm512_setr_epi32(0, 0, 4, 4, 1, 1, 5, 5, 2, 2, 6, 6, 3, 3, 7, 7),
            _mm512_castps256_ps512(_mm256_loadu_ps(at)));
    } else {
        spread = _mm512_permutexvar_ps(
            _mm512_setr_epi32(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15),
            _mm512_loadu_ps(at));
    }
    return _mm512_mul_ps(spread, _mm512_set1_ps(fine));
}

INLINE floats spread_x_scales(const float *at, kind k) {
    const __m128i two = _mm_loadl_epi64((const __m128i *)(const void *)at);
    const __m512i lane =
        k.type == HD_E4M3 ? _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1)
                          : _mm512_setr_epi32(0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1);
    return _mm512_permutexvar_ps(lane, _mm512_castsi512_ps(_mm512_castsi128_si512(two)));
}

/* ---- accumulation and reduction ---- */

INLINE totals no_totals(void) {
    return _mm512_setzero_si512();
}

/* There are enough registers for the compiler to do so itself. */
INLINE words hold(words w) {
    return w;
}

INLINE totals add_products(totals sum, words w, words x) {
    return _mm512_dpwssd_epi32(sum, w, x);
}

/* Adds the totals of a group times both scales. */
INLINE floats add_totals(floats sum, totals part, floats spread, floats of_x) {
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(part), _mm512_mul_ps(spread, of_x), sum);
}

/* Returns the sums of a row of W, those of even and odd segments added, FP4's in AVX2's
 * order. */
INLINE __m256 halve(const float *sums, kind k) {
    floats s = load_floats(sums);
    if (k.type == HD_E2M1) {
        s = _mm512_permutexvar_ps(
            _mm512_setr_epi32(0, 1, 8, 9, 4, 5, 12, 13, 2, 3, 10, 11, 6, 7, 14, 15), s);
    }
    return _mm256_add_ps(_mm512_castps512_ps256(s), _mm512_extractf32x8_ps(s, 1));
}

#include "ops/cpu/int16_gemm_loops_internal.h"

const fast_kernels fast_int16_vnni = {.round = round_row, .multiply = multiply};
