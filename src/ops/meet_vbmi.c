/* meet_vbmi.c - few rows of x against FP8 and FP4, 64 columns at a time: byte and word look-ups
 * turn codes into bf16, which holds all their values, and a bf16 is the upper half of a
 * float. Same steps in the same order as decode and dots, same bits. */
#include "ops/lanes_avx512_internal.h"
#include "ops/meet_internal.h"

enum { STEP = 64, MAX_BLOCKS = 4096 / 32, SPARE_BLOCKS = MAX_BLOCKS + 16 /* are read */ };

/* 64 columns of a row: 0-15, 16-31, 32-47, 48-63. */
typedef struct quad {
    __m512 a, b, c, d;
} quad;

/* Even halves of `first` are columns 0-15, odd ones 16-31, and so on. */
static inline quad widen_halves(__m512i first, __m512i second) {
    const __m512i odd = _mm512_set1_epi32((int32_t)0xffff0000u);
    return (quad){_mm512_castsi512_ps(_mm512_slli_epi32(first, 16)),
                  _mm512_castsi512_ps(_mm512_and_si512(first, odd)),
                  _mm512_castsi512_ps(_mm512_slli_epi32(second, 16)),
                  _mm512_castsi512_ps(_mm512_and_si512(second, odd))};
}

/* Codes of columns [c, c + n) of a row as a register, n <= STEP; nothing beyond is read. */
static inline __m512i load_bytes(const uint8_t *src, int32_t n) {
    if (n == STEP) return _mm512_loadu_si512(src);
    return _mm512_maskz_loadu_epi8(((__mmask64)1 << n) - 1, src);
}

/* ---- E4M3 ---- */

/* Places of the 64 codes so that unpacking bytes to halves leaves columns as widen_halves wants
 * them: lane 4 q + i gets columns 4 q + i + {0, 16, 32, 48}. */
static const uint8_t e4m3_order[STEP] = {
    0,  16, 1,  17, 2,  18, 3,  19, 32, 48, 33, 49, 34, 50, 35, 51, 4,  20, 5,  21, 6,  22,
    7,  23, 36, 52, 37, 53, 38, 54, 39, 55, 8,  24, 9,  25, 10, 26, 11, 27, 40, 56, 41, 57,
    42, 58, 43, 59, 12, 28, 13, 29, 14, 30, 15, 31, 44, 60, 45, 61, 46, 62, 47, 63};

/* The two bytes of a magnitude's bf16, for codes 0-63 and 64-127. */
typedef struct e4m3_table {
    __m512i order, high[2], low[2];
} e4m3_table;

static e4m3_table make_e4m3_table(void) {
    uint8_t codes[STEP];
    for (int i = 0; i < STEP; i++) codes[i] = (uint8_t)i;
    const __m512i nibble = _mm512_set1_epi8(0x0f);
    e4m3_table t = {.order = _mm512_loadu_si512(e4m3_order)};
    for (int i = 0; i < 2; i++) { /* normal numbers: the exponent's bias goes from 7 to 127 */
        const __m512i m =
            _mm512_add_epi8(_mm512_loadu_si512(codes), _mm512_set1_epi8((char)(i * STEP)));
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

static inline quad widen_e4m3(const e4m3_table *t, const uint8_t *src, int32_t n, float scale) {
    const __m512i v = _mm512_permutexvar_epi8(t->order, load_bytes(src, n));
    const __m512i magnitude = _mm512_permutex2var_epi8(t->high[0], v, t->high[1]);
    const __m512i low = _mm512_permutex2var_epi8(t->low[0], v, t->low[1]);
    const __m512i sign = _mm512_set1_epi8((char)0x80);
    const __m512i high = _mm512_ternarylogic_epi32(magnitude, v, sign, 0xf8); /* a | b & c */
    const quad q =
        widen_halves(_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high));
    const __m512 by = _mm512_set1_ps(scale);
    return (quad){_mm512_mul_ps(q.a, by), _mm512_mul_ps(q.b, by), _mm512_mul_ps(q.c, by),
                  _mm512_mul_ps(q.d, by)};
}

static inline void store_quad(float *out, quad q, int32_t n) {
    if (n == STEP) {
        _mm512_storeu_ps(out, q.a);
        _mm512_storeu_ps(out + 16, q.b);
        _mm512_storeu_ps(out + 32, q.c);
        _mm512_storeu_ps(out + 48, q.d);
        return;
    }
    const __mmask64 live = ((__mmask64)1 << n) - 1;
    _mm512_mask_storeu_ps(out, (__mmask16)live, q.a);
    _mm512_mask_storeu_ps(out + 16, (__mmask16)(live >> 16), q.b);
    _mm512_mask_storeu_ps(out + 32, (__mmask16)(live >> 32), q.c);
    _mm512_mask_storeu_ps(out + 48, (__mmask16)(live >> 48), q.d);
}

void ops_decode_e4m3_vbmi(float *out, const uint8_t *src, int32_t n, const float *scale,
                          int32_t block) {
    const e4m3_table table = make_e4m3_table();
    for (int32_t i = 0; i < n; scale++) {
        const int32_t end = n - i < block ? n : i + block;
        for (; i + STEP <= end; i += STEP) {
            store_quad(out + i, widen_e4m3(&table, src + i, STEP, *scale), STEP);
        }
        if (i < end) store_quad(out + i, widen_e4m3(&table, src + i, end - i, *scale), end - i);
        i = end;
    }
}

/* ---- E2M1 ---- */

/* Byte b of lane l holds column l + 16 {0, 2, 1, 3}[b], in its upper half where l is odd. */
static const uint8_t e2m1_order[STEP] = {
    0,  16, 8,  24, 0,  16, 8,  24, 1,  17, 9,  25, 1,  17, 9,  25, 2,  18, 10, 26, 2,  18,
    10, 26, 3,  19, 11, 27, 3,  19, 11, 27, 4,  20, 12, 28, 4,  20, 12, 28, 5,  21, 13, 29,
    5,  21, 13, 29, 6,  22, 14, 30, 6,  22, 14, 30, 7,  23, 15, 31, 7,  23, 15, 31};

/* bf16 of the 16 codes, twice: a look-up reads five bits. */
static const uint16_t e2m1_values[2 * 16] = {
    0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80,
    0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0, 0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040,
    0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};

/* The 64 codes as two registers of look-up indices: columns 0-31 and 32-63. */
typedef struct e2m1_codes {
    __m512i first, second;
} e2m1_codes;

static inline e2m1_codes spread_e2m1(const uint8_t *src, int32_t n) {
    const __m512i odd = _mm512_setr_epi32(0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4);
    const __m512i order = _mm512_loadu_si512(e2m1_order);
    const __m256i bytes = n == STEP ? _mm256_loadu_si256((const __m256i *)(const void *)src)
                                    : _mm256_maskz_loadu_epi8(((__mmask32)1 << n / 2) - 1, src);
    const __m512i v =
        _mm512_srlv_epi32(_mm512_permutexvar_epi8(order, _mm512_castsi256_si512(bytes)), odd);
    return (e2m1_codes){v, _mm512_srli_epi32(v, 8)};
}

/* Two blocks whose scales are powers of two, given as e2m1_shift does: the table's exponents
 * move instead of four products. */
static inline quad widen_e2m1_shifted(const uint8_t *src, int32_t n, const uint32_t *shift) {
    const __mmask32 nonzero = 0xfefefefe;
    const __m512i t = _mm512_loadu_si512(e2m1_values);
    const e2m1_codes v = spread_e2m1(src, n);
    const __m512i t0 =
        _mm512_mask_add_epi16(t, nonzero, t, _mm512_set1_epi32((int32_t)shift[0]));
    const __m512i t1 =
        _mm512_mask_add_epi16(t, nonzero, t, _mm512_set1_epi32((int32_t)shift[1]));
    return widen_halves(_mm512_permutexvar_epi16(v.first, t0),
                        _mm512_permutexvar_epi16(v.second, t1));
}

/* Four blocks of any scales. */
static inline quad widen_e2m1_scaled(const uint8_t *src, int32_t n, const float *scale) {
    const __m512i t = _mm512_loadu_si512(e2m1_values);
    const e2m1_codes v = spread_e2m1(src, n);
    const quad q = widen_halves(_mm512_permutexvar_epi16(v.first, t),
                                _mm512_permutexvar_epi16(v.second, t));
    return (quad){_mm512_mul_ps(q.a, _mm512_set1_ps(scale[0])),
                  _mm512_mul_ps(q.b, _mm512_set1_ps(scale[1])),
                  _mm512_mul_ps(q.c, _mm512_set1_ps(scale[2])),
                  _mm512_mul_ps(q.d, _mm512_set1_ps(scale[3]))};
}

/* Powers of two as what they add to a bf16's exponent, in both halves; false where one is none
 * or an element would leave the normal numbers. */
static bool e2m1_shifts(uint32_t *shift, const float *scale, int32_t n) {
    __mmask16 bad = 0;
    for (int32_t i = 0; i < n; i += 16) {
        const __mmask16 live = (__mmask16)(n - i >= 16 ? 0xffffu : (1u << (n - i)) - 1u);
        const __m512i bits = _mm512_maskz_loadu_epi32(live, scale + i);
        const __m512i exponent = _mm512_srli_epi32(bits, 23);
        bad |= _mm512_mask_test_epi32_mask(live, bits, _mm512_set1_epi32((int32_t)0x807fffff));
        bad |= _mm512_mask_cmplt_epu32_mask(live, exponent, _mm512_set1_epi32(2));
        bad |= _mm512_mask_cmpgt_epu32_mask(live, exponent, _mm512_set1_epi32(252));
        const __m512i half = _mm512_sub_epi32(bits, _mm512_set1_epi32(0x3f800000));
        _mm512_storeu_si512(shift + i, _mm512_or_si512(half, _mm512_srli_epi32(half, 16)));
    }
    return bad == 0;
}

/* ---- the loop ---- */

typedef enum how { E4M3, E2M1_SHIFTED, E2M1_SCALED } how;

typedef struct meeting {
    const ops_meeting *m;
    e4m3_table table;                      /* E4M3 */
    const uint32_t (*shift)[SPARE_BLOCKS]; /* E2M1_SHIFTED: [OPS_TILE_ROWS] */
} meeting;

static inline __attribute__((always_inline)) quad widen(const meeting *g, how h, int32_t j,
                                                        int32_t c, int32_t n, int32_t block) {
    const ops_meeting *m = g->m;
    switch (h) {
    case E4M3:
        return widen_e4m3(&g->table, m->src[j] + c, n, m->scale[j][block]);
    case E2M1_SHIFTED:
        return widen_e2m1_shifted(m->src[j] + c / 2, n, g->shift[j] + c / 32);
    case E2M1_SCALED:
        break;
    }
    return widen_e2m1_scaled(m->src[j] + c / 2, n, m->scale[j] + c / 16);
}

/* The sum goes on over the first n of 64 columns; n is a multiple of 16. */
static inline __attribute__((always_inline)) __m512 add_quad(__m512 sum, quad w, const float *x,
                                                             int32_t n) {
    sum = _mm512_fmadd_ps(_mm512_loadu_ps(x), w.a, sum);
    if (n > 16) sum = _mm512_fmadd_ps(_mm512_loadu_ps(x + 16), w.b, sum);
    if (n > 32) sum = _mm512_fmadd_ps(_mm512_loadu_ps(x + 32), w.c, sum);
    if (n > 48) sum = _mm512_fmadd_ps(_mm512_loadu_ps(x + 48), w.d, sum);
    return sum;
}

/* Up to four rows of x from columns c to c + n; h, n_x and mostly n are constants here. `block`
 * is that of c, where a step lies in one. */
static inline __attribute__((always_inline)) void step(four sum[4], const meeting *g, how h,
                                                       const float *const *x, int32_t n_x,
                                                       int32_t c, int32_t n, int32_t block) {
    const quad w0 = widen(g, h, 0, c, n, block);
    for (int32_t i = 0; i < n_x; i++) sum[i].a = add_quad(sum[i].a, w0, x[i] + c, n);
    const quad w1 = widen(g, h, 1, c, n, block);
    for (int32_t i = 0; i < n_x; i++) sum[i].b = add_quad(sum[i].b, w1, x[i] + c, n);
    const quad w2 = widen(g, h, 2, c, n, block);
    for (int32_t i = 0; i < n_x; i++) sum[i].c = add_quad(sum[i].c, w2, x[i] + c, n);
    const quad w3 = widen(g, h, 3, c, n, block);
    for (int32_t i = 0; i < n_x; i++) sum[i].d = add_quad(sum[i].d, w3, x[i] + c, n);
}

static inline __attribute__((always_inline)) void meet_rows(const meeting *g, how h, float *acc,
                                                            const float *const *x,
                                                            int32_t n_x) {
    const int32_t each = OPS_TILE_ROWS * OPS_LANES, n = g->m->n;
    four sum[4];
    for (int32_t i = 0; i < n_x; i++) sum[i] = load_sums(acc + i * each);
    const int32_t length = h == E4M3 ? g->m->block : n;
    for (int32_t c = 0, block = 0; c < n; block++) {
        const int32_t end = n - c < length ? n : c + length;
        for (; c + STEP <= end; c += STEP) {
            if (h == E4M3 || c % (2 * STEP) == 0)
                prefetch(g->m, 0, OPS_TILE_ROWS, h == E4M3 ? c : c / 2);
            step(sum, g, h, x, n_x, c, STEP, block);
        }
        if (c == end) continue;
        step(sum, g, h, x, n_x, c, end - c, block);
        c = end;
    }
    for (int32_t i = 0; i < n_x; i++) store_sums(acc + i * each, sum[i]);
}

static inline __attribute__((always_inline)) void meet(const meeting *g, how h) {
    const int32_t each = OPS_TILE_ROWS * OPS_LANES;
    const ops_meeting *m = g->m;
    int32_t i = 0;
    for (; i + 4 <= m->n_x; i += 4) meet_rows(g, h, m->acc + i * each, m->x + i, 4);
    for (; i + 2 <= m->n_x; i += 2) meet_rows(g, h, m->acc + i * each, m->x + i, 2);
    if (i < m->n_x) meet_rows(g, h, m->acc + i * each, m->x + i, 1);
}

bool ops_meet_e4m3_vbmi(const ops_meeting *m) {
    if (m->block % STEP != 0) return ops_meet_e4m3_avx512(m);
    meeting g = {.m = m, .table = make_e4m3_table()};
    meet(&g, E4M3);
    return true;
}

static bool find_shifts(const ops_meeting *m, uint32_t shift[][SPARE_BLOCKS]) {
    if (m->block != 32 || m->n > 32 * MAX_BLOCKS) return false;
    for (int32_t j = 0; j < OPS_TILE_ROWS; j++) {
        if (!e2m1_shifts(shift[j], m->scale[j], (m->n + 31) / 32)) return false;
    }
    return true;
}

bool ops_meet_e2m1_vbmi(const ops_meeting *m) {
    uint32_t shift[OPS_TILE_ROWS][SPARE_BLOCKS];
    if (find_shifts(m, shift)) {
        meet(&(meeting){.m = m, .shift = (const uint32_t(*)[SPARE_BLOCKS])shift}, E2M1_SHIFTED);
    } else if (m->block == 16) {
        meet(&(meeting){.m = m}, E2M1_SCALED);
    } else {
        return ops_meet_e2m1_avx512(m);
    }
    return true;
}
