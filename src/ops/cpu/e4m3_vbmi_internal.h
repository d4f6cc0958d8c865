/* e4m3_vbmi_internal.h - AVX-512 VBMI: dequantizes FP8 to bf16, which represents all its
 * values, by byte lookups. */
#ifndef HD_OPS_CPU_E4M3_VBMI_INTERNAL_H
#define HD_OPS_CPU_E4M3_VBMI_INTERNAL_H

#include <immintrin.h>
#include <stdint.h>

/* The two bytes of a magnitude's bf16, for codes 0-63 and 64-127. */
typedef struct e4m3_table {
    __m512i high[2], low[2];
} e4m3_table;

static inline e4m3_table make_e4m3_table(void) {
    uint8_t codes[64];
    for (int i = 0; i < 64; i++) codes[i] = (uint8_t)i;
    const __m512i nibble = _mm512_set1_epi8(0x0f);
    e4m3_table t;
    for (int i = 0; i < 2; i++) { /* normal numbers: the exponent's bias goes from 7 to 127 */
        const __m512i m =
            _mm512_add_epi8(_mm512_loadu_si512(codes), _mm512_set1_epi8((char)(i * 64)));
        const __m512i upper = _mm512_and_si512(_mm512_srli_epi16(m, 4), nibble);
        t.high[i] = _mm512_add_epi8(upper, _mm512_set1_epi8(0x3c));
        t.low[i] = _mm512_slli_epi16(_mm512_and_si512(m, nibble), 4);
    }
    /* codes 0-7: multiples of 2^-9; code 127: NaN */
    const long long high = 0x3c3c3c3c3b3b3b00, low = 0x60402000c0800000;
    const __mmask64 last = (__mmask64)1 << 63;
    t.high[0] = _mm512_mask_mov_epi8(t.high[0], 0xff, _mm512_set1_epi64(high));
    t.low[0] = _mm512_mask_mov_epi8(t.low[0], 0xff, _mm512_set1_epi64(low));
    t.high[1] = _mm512_mask_mov_epi8(t.high[1], last, _mm512_set1_epi8(0x7f));
    t.low[1] = _mm512_mask_mov_epi8(t.low[1], last, _mm512_set1_epi8((char)0xc0));
    return t;
}

/* The first eight of every 16 codes, and the others. */
typedef struct e4m3_pairs {
    __m512i first, second;
} e4m3_pairs;

static inline e4m3_pairs bf16_of_e4m3(const e4m3_table *t, __m512i codes) {
    const __m512i magnitude = _mm512_permutex2var_epi8(t->high[0], codes, t->high[1]);
    const __m512i low = _mm512_permutex2var_epi8(t->low[0], codes, t->low[1]);
    const __m512i sign = _mm512_set1_epi8((char)0x80);
    const __m512i high =
        _mm512_ternarylogic_epi32(magnitude, codes, sign, 0xf8); /* a | b & c */
    return (e4m3_pairs){_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
}

#endif
