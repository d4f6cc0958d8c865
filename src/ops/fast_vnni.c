/* fast_vnni.c - products in whole numbers with AVX-512's byte look-ups and dot products of
 * unsigned W and signed x. One row of x meets W as it lies, row after row, and sums of 16 rows
 * are folded together; several meet a panel in which 4 columns of 16 rows are a register. */
#include "base/checked.h"
#include "ops/fast_internal.h"

#include <immintrin.h>
#include <math.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

enum { HALF = 64 /* bytes of a register */ };

/* ---- x ---- */

/* Of 16 columns the even ones first, as the nibbles of FP4 lie. */
INLINE __m128i order_of(__m128i code, hd_dtype type) {
    const __m128i pairs = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    return type == HD_E2M1 ? _mm_shuffle_epi8(code, pairs) : code;
}

INLINE __m512i whole_of(__m512 x, __m512 inverse) {
    return _mm512_cvtps_epi32(_mm512_mul_ps(x, inverse));
}

INLINE void quantize_block(const fast_x *x, int64_t at, __m512 a, __m512 b, hd_dtype type,
                           int32_t offset) {
    const __m512i sign = _mm512_set1_epi32(0x7fffffff);
    const __m512i larger = _mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(a), sign),
                                            _mm512_and_si512(_mm512_castps_si512(b), sign));
    const uint32_t bits = (uint32_t)_mm512_reduce_max_epu32(larger);
    __m512i first = _mm512_setzero_si512(), second = first;
    float scale = 0.0f;
    if (bits >= FAST_HUGE) {
        scale = NAN;
    } else if (bits >= FAST_TINY) {
        const float largest = hd_f32_from_bits(bits);
        const __m512 inverse = _mm512_set1_ps(127.0f / largest);
        first = whole_of(a, inverse);
        second = whole_of(b, inverse);
        scale = largest / 127.0f;
    }
    __m128i *code = (__m128i *)(void *)(x->code + at * FAST_BLOCK);
    _mm_storeu_si128(code, order_of(_mm512_cvtepi32_epi8(first), type));
    _mm_storeu_si128(code + 1, order_of(_mm512_cvtepi32_epi8(second), type));
    x->scale[at] = scale;
    x->bias[2 * at] = -offset * _mm512_reduce_add_epi32(first);
    x->bias[2 * at + 1] = -offset * _mm512_reduce_add_epi32(second);
}

INLINE __mmask16 first_lanes(int32_t n) {
    return (__mmask16)(n >= 16 ? 0xffffu : n > 0 ? (1u << n) - 1u : 0u);
}

INLINE void quantize_row(const fast_x *x, int32_t row, const float *from, int32_t n,
                         hd_dtype type, int32_t offset) {
    const int64_t base = (int64_t)(row / x->side) * x->blocks * x->side + row % x->side;
    for (int32_t b = 0; b < x->blocks; b++) {
        const int32_t left = n - b * FAST_BLOCK;
        const float *at = from + b * FAST_BLOCK;
        const __m512 first = _mm512_maskz_loadu_ps(first_lanes(left), at);
        const __m512 second = _mm512_maskz_loadu_ps(first_lanes(left - 16), at + 16);
        quantize_block(x, base + (int64_t)b * x->side, first, second, type, offset);
    }
}

static void quantize(const fast_x *x, int32_t row, const float *from, int32_t n,
                     hd_dtype type) {
    if (type == HD_E2M1) {
        quantize_row(x, row, from, n, HD_E2M1, FAST_E2M1_OFFSET);
    } else {
        quantize_row(x, row, from, n, HD_E4M3, FAST_E4M3_OFFSET);
    }
}

/* ---- 16 rows of 16 elements, turned ---- */

/* Four registers with 128-bit lane l of all four in the l-th. */
INLINE void turn_lanes(__m512i *a, __m512i *b, __m512i *c, __m512i *d) {
    const __m512i ab = _mm512_shuffle_i32x4(*a, *b, 0x44),
                  cd = _mm512_shuffle_i32x4(*c, *d, 0x44),
                  ab2 = _mm512_shuffle_i32x4(*a, *b, 0xee),
                  cd2 = _mm512_shuffle_i32x4(*c, *d, 0xee);
    *a = _mm512_shuffle_i32x4(ab, cd, 0x88);
    *b = _mm512_shuffle_i32x4(ab, cd, 0xdd);
    *c = _mm512_shuffle_i32x4(ab2, cd2, 0x88);
    *d = _mm512_shuffle_i32x4(ab2, cd2, 0xdd);
}

/* r[d] = the d-th 32 bits of all 16. */
INLINE void turn(__m512i r[16]) {
    __m512i t[16];
    UNROLL for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    UNROLL for (int i = 0; i < 16; i += 4) {
        r[i / 4] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i / 4 + 4] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i / 4 + 8] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i / 4 + 12] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    UNROLL for (int c = 0; c < 16; c += 4) turn_lanes(r + c, r + c + 1, r + c + 2, r + c + 3);
    UNROLL for (int i = 0; i < 4; i++) {
        UNROLL for (int j = i + 1; j < 4; j++) {
            const __m512i swap = r[4 * i + j];
            r[4 * i + j] = r[4 * j + i];
            r[4 * j + i] = swap;
        }
    }
}

/* ---- sums of 16 rows ---- */

/* s[0 .. 3]: rows 4 i + (0, 1, 2, 3) in a 128-bit lane, the sum of that lane of each. */
INLINE void fold_lanes(__m512i s[4], const __m512i r[16]) {
    UNROLL for (int i = 0; i < 4; i++) {
        const __m512i *q = r + 4 * i;
        const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(q[0], q[1]),
                                            _mm512_unpackhi_epi32(q[0], q[1]));
        const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(q[2], q[3]),
                                            _mm512_unpackhi_epi32(q[2], q[3]));
        s[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    }
}

/* s[l]: all rows, the sum of their lane l. */
INLINE void fold_quarters(__m512i s[4], const __m512i r[16]) {
    fold_lanes(s, r);
    turn_lanes(s, s + 1, s + 2, s + 3);
}

/* s[0], s[1]: all rows, the sums of their halves. */
INLINE void fold_halves(__m512i s[2], const __m512i r[16]) {
    __m512i q[4];
    fold_lanes(q, r);
    const __m512i low = _mm512_add_epi32(_mm512_shuffle_i32x4(q[0], q[1], 0x88),
                                         _mm512_shuffle_i32x4(q[0], q[1], 0xdd)),
                  high = _mm512_add_epi32(_mm512_shuffle_i32x4(q[2], q[3], 0x88),
                                          _mm512_shuffle_i32x4(q[2], q[3], 0xdd));
    s[0] = _mm512_shuffle_i32x4(low, high, 0x88);
    s[1] = _mm512_shuffle_i32x4(low, high, 0xdd);
}

INLINE __m512i pick(__m512i a, __m512i b, int odd) {
    const __m512 x = _mm512_castsi512_ps(a), y = _mm512_castsi512_ps(b);
    return _mm512_castps_si512(odd ? _mm512_shuffle_ps(x, y, 0xdd)
                                   : _mm512_shuffle_ps(x, y, 0x88));
}

/* s[l]: all rows, the sum of elements 2 l and 2 l + 1. */
INLINE void fold_pairs(__m512i s[8], const __m512i r[16]) {
    __m512i first[4], second[4];
    UNROLL for (int i = 0; i < 4; i++) {
        const __m512i *q = r + 4 * i;
        const __m512i ab = _mm512_add_epi32(pick(q[0], q[1], 0), pick(q[0], q[1], 1)),
                      cd = _mm512_add_epi32(pick(q[2], q[3], 0), pick(q[2], q[3], 1));
        first[i] = pick(ab, cd, 0);
        second[i] = pick(ab, cd, 1);
    }
    turn_lanes(first, first + 1, first + 2, first + 3);
    turn_lanes(second, second + 1, second + 2, second + 3);
    UNROLL for (int l = 0; l < 4; l++) {
        s[2 * l] = first[l];
        s[2 * l + 1] = second[l];
    }
}

/* ---- W ---- */

/* In the order of memory and into the second cache, as meet_internal.h does. */
INLINE void prefetch(const fast_product *p, int64_t at, int lines) {
    const char *next = (const char *)p->src[0] + p->ahead + FAST_ROWS * at;
    for (int j = 0; j < lines * FAST_ROWS; j++) _mm_prefetch(next + HALF * j, _MM_HINT_T1);
}

INLINE __m512i load_bytes(const uint8_t *src, int64_t left) {
    if (left >= HALF) return _mm512_loadu_si512(src);
    return _mm512_maskz_loadu_epi8(left > 0 ? ((__mmask64)1 << left) - 1 : 0, src);
}

/* [groups, FAST_ROWS] from rows of scales. */
INLINE void turn_scales(const fast_product *p, int32_t groups) {
    for (int32_t g = 0; g < groups; g += 16) {
        __m512i r[16];
        UNROLL for (int j = 0; j < 16; j++) {
            r[j] = _mm512_loadu_si512(p->scale + j * FAST_GROUPS + g);
        }
        turn(r);
        UNROLL for (int j = 0; j < 16; j++) {
            _mm512_store_si512(p->scales + (g + j) * FAST_ROWS, r[j]);
        }
    }
}

INLINE __m512i e2m1_numbers(__m512i code, int high) {
    const __m512i numbers = _mm512_broadcast_i32x4(_mm_setr_epi8(
        12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)); /* doubled, and offset */
    const __m512i nibble = _mm512_set1_epi8(0x0f);
    if (high) code = _mm512_srli_epi16(code, 4);
    return _mm512_shuffle_epi8(numbers, _mm512_and_si512(code, nibble));
}

/* The exponents of 128 columns of all rows, and what they make of the group's scales. */
INLINE void find_exponents(const fast_product *p, int32_t c, int32_t exponent[FAST_ROWS]) {
    _Alignas(64) uint32_t power[FAST_ROWS];
    const __m512i magnitude = _mm512_set1_epi8(0x7f);
    for (int j = 0; j < FAST_ROWS; j++) {
        const uint8_t *src = p->src[j] + c;
        const __m512i both = _mm512_max_epu8(
            _mm512_and_si512(load_bytes(src, p->n - c), magnitude),
            _mm512_and_si512(load_bytes(src + HALF, p->n - c - HALF), magnitude));
        const __m256i half =
            _mm256_max_epu8(_mm512_castsi512_si256(both), _mm512_extracti64x4_epi64(both, 1));
        __m128i most =
            _mm_max_epu8(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
        most = _mm_max_epu8(most, _mm_srli_epi16(most, 8));
        most = _mm_minpos_epu16(_mm_andnot_si128(most, _mm_set1_epi16(0xff)));
        const int32_t largest = 0xff - (_mm_cvtsi128_si32(most) & 0xff);
        const int32_t e = largest < 8 ? 1 : largest >> 3;
        exponent[j] = e;
        power[j] = largest == 0x7f ? 0x7fc00000u : (uint32_t)(e + 114) << 23;
    }
    float *scale = p->scales + c / p->group * FAST_ROWS;
    _mm512_store_ps(scale, _mm512_mul_ps(_mm512_load_ps(scale), _mm512_load_ps(power)));
}

INLINE __m512i e4m3_numbers(__m512i code, int32_t e) {
    const uint8_t *table = fast_e4m3 + 8 * (15 - e);
    __m512i low = _mm512_loadu_si512(table);
    if (__builtin_expect(e < 8, 0)) {
        long long least;
        __builtin_memcpy(&least, fast_e4m3_least[e], sizeof least);
        low = _mm512_mask_set1_epi64(low, 1, least);
    }
    const __m512i number =
        _mm512_permutex2var_epi8(low, code, _mm512_loadu_si512(table + HALF));
    return _mm512_mask_sub_epi8(number, _mm512_movepi8_mask(code), _mm512_setzero_si512(),
                                number);
}

/* ---- one row of x ---- */

INLINE __m512 scaled(__m512i sum, __m512 by) {
    return _mm512_mul_ps(_mm512_cvtepi32_ps(sum), by);
}

INLINE __m512i unbiased(__m512i sum, int32_t bias) {
    return _mm512_add_epi32(sum, _mm512_set1_epi32(bias));
}

INLINE __m512 load_out(const fast_product *p, int64_t row, __mmask16 live) {
    if (!p->more) return _mm512_setzero_ps();
    return _mm512_maskz_loadu_ps(live, p->out + row * p->out_stride);
}

/* 128 columns of FP4: element 4 l + i of a register is column 8 l + 2 i, or the one after it. */
INLINE __m512 meet_e2m1_step(__m512 acc, const fast_product *p, int32_t c, int32_t group) {
    const __m512i even = _mm512_setr_epi64(0, 2, 4, 6, 8, 10, 12, 14);
    const __m512i odd = _mm512_setr_epi64(1, 3, 5, 7, 9, 11, 13, 15);
    const int8_t *code = p->x->code + c;
    const __m512i x0 = _mm512_loadu_si512(code), x1 = _mm512_loadu_si512(code + HALF);
    const __m512i evens = _mm512_permutex2var_epi64(x0, even, x1),
                  odds = _mm512_permutex2var_epi64(x0, odd, x1);
    __m512i r[16], s[8];
    UNROLL for (int j = 0; j < 16; j++) {
        const __m512i v = load_bytes(p->src[j] + c / 2, (p->n - c) / 2);
        r[j] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), e2m1_numbers(v, 0), evens);
        r[j] = _mm512_dpbusd_epi32(r[j], e2m1_numbers(v, 1), odds);
    }
    const float *w = p->scales + c / group * FAST_ROWS, *by = p->x->scale + c / FAST_BLOCK;
    const int32_t *bias = p->x->bias + c / 16;
    if (group == 32) {
        fold_quarters(s, r);
        UNROLL for (int b = 0; b < 4; b++) {
            const __m512 product = scaled(unbiased(s[b], bias[2 * b] + bias[2 * b + 1]),
                                          _mm512_load_ps(w + b * FAST_ROWS));
            acc = _mm512_add_ps(acc, _mm512_mul_ps(product, _mm512_set1_ps(by[b])));
        }
        return acc;
    }
    fold_pairs(s, r);
    UNROLL for (int b = 0; b < 4; b++) {
        const __m512 product = _mm512_add_ps(
            scaled(unbiased(s[2 * b], bias[2 * b]), _mm512_load_ps(w + 2 * b * FAST_ROWS)),
            scaled(unbiased(s[2 * b + 1], bias[2 * b + 1]),
                   _mm512_load_ps(w + (2 * b + 1) * FAST_ROWS)));
        acc = _mm512_add_ps(acc, _mm512_mul_ps(product, _mm512_set1_ps(by[b])));
    }
    return acc;
}

INLINE void meet_e2m1(const fast_product *p, int32_t group) {
    const __mmask16 live = first_lanes(p->n_w);
    __m512 acc = load_out(p, 0, live);
    for (int32_t c = 0; c < p->n; c += FAST_STEP) {
        prefetch(p, c / 2, 1);
        acc = meet_e2m1_step(acc, p, c, group);
    }
    _mm512_mask_storeu_ps(p->out, live, acc);
}

static void meet_e4m3(const fast_product *p) {
    const __mmask16 live = first_lanes(p->n_w);
    __m512 acc = load_out(p, 0, live);
    for (int32_t c = 0; c < p->n; c += FAST_STEP) {
        int32_t exponent[FAST_ROWS];
        __m512 part = _mm512_setzero_ps();
        prefetch(p, c, 2);
        find_exponents(p, c, exponent);
        for (int32_t h = 0; h < 2; h++) {
            const int32_t at = c + h * HALF;
            const __m512i x = _mm512_loadu_si512(p->x->code + at);
            const float *by = p->x->scale + at / FAST_BLOCK;
            const int32_t *bias = p->x->bias + at / 16;
            __m512i r[16], s[2];
            UNROLL for (int j = 0; j < 16; j++) {
                const __m512i v = load_bytes(p->src[j] + at, p->n - at);
                r[j] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), e4m3_numbers(v, exponent[j]),
                                           x);
            }
            fold_halves(s, r);
            const __m512 first =
                             scaled(unbiased(s[0], bias[0] + bias[1]), _mm512_set1_ps(by[0])),
                         second =
                             scaled(unbiased(s[1], bias[2] + bias[3]), _mm512_set1_ps(by[1]));
            part = h ? _mm512_add_ps(part, first) : first;
            part = _mm512_add_ps(part, second);
        }
        const __m512 w = _mm512_load_ps(p->scales + c / FAST_STEP * FAST_ROWS);
        acc = _mm512_add_ps(acc, _mm512_mul_ps(part, w));
    }
    _mm512_mask_storeu_ps(p->out, live, acc);
}

/* ---- several rows of x ---- */

/* Registers of four columns, in the order in which the numbers of x lie. */
static void panel_e2m1(const fast_product *p) {
    for (int32_t c = 0; c < p->n; c += FAST_STEP) {
        uint8_t *panel = p->panel + (int64_t)c * FAST_ROWS;
        __m512i r[16];
        prefetch(p, c / 2, 1);
        UNROLL for (int j = 0; j < 16; j++) {
            r[j] = load_bytes(p->src[j] + c / 2, (p->n - c) / 2);
        }
        turn(r);
        UNROLL for (int d = 0; d < 16; d++) {
            uint8_t *to = panel + (d / 2 * 4 + d % 2) * HALF;
            _mm512_store_si512(to, e2m1_numbers(r[d], 0));
            _mm512_store_si512(to + 2 * HALF, e2m1_numbers(r[d], 1));
        }
    }
}

static void panel_e4m3(const fast_product *p) {
    for (int32_t c = 0; c < p->n; c += FAST_STEP) {
        int32_t exponent[FAST_ROWS];
        prefetch(p, c, 2);
        find_exponents(p, c, exponent);
        for (int32_t at = c; at < c + FAST_STEP; at += HALF) {
            __m512i r[16];
            UNROLL for (int j = 0; j < 16; j++) {
                r[j] = e4m3_numbers(load_bytes(p->src[j] + at, p->n - at), exponent[j]);
            }
            turn(r);
            UNROLL for (int d = 0; d < 16; d++) {
                _mm512_store_si512(p->panel + (at / 4 + d) * HALF, r[d]);
            }
        }
    }
}

/* The sums of a half block for n rows of x, which begin with the bias. */
INLINE void dot_half(__m512i *sum, const uint8_t *panel, const int8_t *x, int32_t n) {
    UNROLL for (int d = 0; d < 4; d++) {
        const __m512i w = _mm512_load_si512(panel + d * HALF);
        UNROLL for (int32_t t = 0; t < n; t++) {
            int32_t four;
            __builtin_memcpy(&four, x + t * FAST_BLOCK + 4 * d, sizeof four);
            sum[t] = _mm512_dpbusd_epi32(sum[t], w, _mm512_set1_epi32(four));
        }
    }
}

/* Block b of n rows of x, from number `at` of them on. */
INLINE void add_block(__m512 *acc, __m512 *part, const fast_product *p, int32_t b, int64_t at,
                      int32_t n, int32_t group) {
    const uint8_t *panel = p->panel + (int64_t)b * FAST_BLOCK * FAST_ROWS;
    const int8_t *code = p->x->code + at * FAST_BLOCK;
    const int32_t *bias = p->x->bias + 2 * at;
    const float *by = p->x->scale + at;
    const float *scale = p->scales + b * FAST_BLOCK / group * FAST_ROWS;
    const __m512 w = _mm512_load_ps(scale);
    __m512i sum[FAST_SIDE];
    UNROLL for (int32_t t = 0; t < n; t++) {
        sum[t] = _mm512_set1_epi32(group == 16 ? bias[2 * t] : bias[2 * t] + bias[2 * t + 1]);
    }
    dot_half(sum, panel, code, n);
    if (group == 16) {
        const __m512 w2 = _mm512_load_ps(scale + FAST_ROWS);
        UNROLL for (int32_t t = 0; t < n; t++) {
            part[t] = scaled(sum[t], w);
            sum[t] = _mm512_set1_epi32(bias[2 * t + 1]);
        }
        dot_half(sum, panel + 4 * HALF, code + 16, n);
        UNROLL for (int32_t t = 0; t < n; t++) {
            const __m512 product = _mm512_add_ps(part[t], scaled(sum[t], w2));
            acc[t] = _mm512_add_ps(acc[t], _mm512_mul_ps(product, _mm512_set1_ps(by[t])));
        }
        return;
    }
    dot_half(sum, panel + 4 * HALF, code + 16, n);
    UNROLL for (int32_t t = 0; t < n; t++) {
        const __m512 x = _mm512_set1_ps(by[t]);
        if (group == 32) {
            acc[t] = _mm512_add_ps(acc[t], _mm512_mul_ps(scaled(sum[t], w), x));
        } else {
            const __m512 product = scaled(sum[t], x);
            part[t] = b % 4 ? _mm512_add_ps(part[t], product) : product;
            if (b % 4 == 3) acc[t] = _mm512_add_ps(acc[t], _mm512_mul_ps(part[t], w));
        }
    }
}

INLINE void multiply_side(const fast_product *p, int32_t i, int32_t n, int32_t group) {
    const __mmask16 live = first_lanes(p->n_w);
    const fast_x *x = p->x;
    __m512 acc[FAST_SIDE], part[FAST_SIDE];
    UNROLL for (int32_t t = 0; t < n; t++) acc[t] = load_out(p, i + t, live);
    int64_t at = (int64_t)(i / FAST_SIDE) * x->blocks * FAST_SIDE + i % FAST_SIDE;
    for (int32_t b = 0; b < x->blocks; b += 4) {
        UNROLL for (int32_t q = 0; q < 4; q++, at += FAST_SIDE) {
            add_block(acc, part, p, b + q, at, n, group);
        }
    }
    UNROLL for (int32_t t = 0; t < n; t++) {
        _mm512_mask_storeu_ps(p->out + (i + t) * p->out_stride, live, acc[t]);
    }
}

INLINE void multiply_panel(const fast_product *p, int32_t group) {
    int32_t i = 0;
    for (; i + 8 <= p->n_x; i += 8) multiply_side(p, i, 8, group);
    for (; i + 4 <= p->n_x; i += 4) multiply_side(p, i, 4, group);
    for (; i + 2 <= p->n_x; i += 2) multiply_side(p, i, 2, group);
    if (i < p->n_x) multiply_side(p, i, 1, group);
}

static void multiply_e4m3(const fast_product *p) {
    if (p->x->side == 1) {
        meet_e4m3(p);
    } else {
        panel_e4m3(p);
        multiply_panel(p, 128);
    }
}

static void multiply_e2m1_16(const fast_product *p) {
    if (p->x->side == 1) {
        meet_e2m1(p, 16);
    } else {
        panel_e2m1(p);
        multiply_panel(p, 16);
    }
}

static void multiply_e2m1_32(const fast_product *p) {
    if (p->x->side == 1) {
        meet_e2m1(p, 32);
    } else {
        panel_e2m1(p);
        multiply_panel(p, 32);
    }
}

static void multiply(const fast_product *p) {
    turn_scales(p, p->x->blocks * FAST_BLOCK / p->group);
    if (p->type == HD_E4M3) {
        multiply_e4m3(p);
    } else if (p->group == 16) {
        multiply_e2m1_16(p);
    } else {
        multiply_e2m1_32(p);
    }
}

const fast_kernels fast_vnni = {.quantize = quantize, .multiply = multiply};
