/* fast_vnni.c - products in whole numbers with AVX-512's byte look-ups and dot products of
 * unsigned W and signed x. One row of x meets W as it lies, row after row, and sums of 16 rows
 * are folded together; several meet a panel in which 4 columns of 16 rows are a register. */
#include "base/checked.h"
#include "ops/fast_internal.h"

#include <immintrin.h>
#include <math.h>

#define INLINE static inline __attribute__((always_inline))
/* One for each kind of product, or their frames add up. */
#define OUTLINE static __attribute__((noinline))
#define UNROLL  _Pragma("GCC unroll 16")

enum { HALF = 64 /* bytes of a register */, FEW = 4 /* rows of x that do without a panel */ };

/* ---- x ---- */

INLINE __mmask16 first_lanes(int32_t n) {
    return (__mmask16)(n >= 16 ? 0xffffu : n > 0 ? (1u << n) - 1u : 0u);
}

/* Where four registers of whole numbers go when two steps have packed them: 64 columns in order,
 * or of every 16 the even ones first, as the nibbles of FP4 lie. */
static const uint8_t in_order[HALF] = {
    0,  1,  2,  3,  16, 17, 18, 19, 32, 33, 34, 35, 48, 49, 50, 51, 4,  5,  6,  7,  20, 21,
    22, 23, 36, 37, 38, 39, 52, 53, 54, 55, 8,  9,  10, 11, 24, 25, 26, 27, 40, 41, 42, 43,
    56, 57, 58, 59, 12, 13, 14, 15, 28, 29, 30, 31, 44, 45, 46, 47, 60, 61, 62, 63};
static const uint8_t even_first[HALF] = {
    0,  2,  16, 18, 32, 34, 48, 50, 1,  3,  17, 19, 33, 35, 49, 51, 4,  6,  20, 22, 36, 38,
    52, 54, 5,  7,  21, 23, 37, 39, 53, 55, 8,  10, 24, 26, 40, 42, 56, 58, 9,  11, 25, 27,
    41, 43, 57, 59, 12, 14, 28, 30, 44, 46, 60, 62, 13, 15, 29, 31, 45, 47, 61, 63};

INLINE __m512i magnitude_bits(__m512 x) {
    return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff));
}

/* The largest magnitude of each of four blocks, as bits. */
INLINE __m128i largest_of(const __m512 v[8]) {
    __m512i m[4];
    UNROLL for (int b = 0; b < 4; b++) {
        m[b] = _mm512_max_epi32(magnitude_bits(v[2 * b]), magnitude_bits(v[2 * b + 1]));
    }
    const __m512i t = _mm512_max_epi32(_mm512_unpacklo_epi32(m[0], m[1]),
                                       _mm512_unpackhi_epi32(m[0], m[1])),
                  u = _mm512_max_epi32(_mm512_unpacklo_epi32(m[2], m[3]),
                                       _mm512_unpackhi_epi32(m[2], m[3])),
                  all = _mm512_max_epi32(_mm512_unpacklo_epi64(t, u),
                                         _mm512_unpackhi_epi64(t, u));
    const __m256i half =
        _mm256_max_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
    return _mm_max_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

/* Scales of four blocks, and what their columns are multiplied by. */
INLINE void scales_of(float scale[4], float inverse[4], const __m512 v[8]) {
    const __m128i bits = largest_of(v);
    const __m128 largest = _mm_castsi128_ps(bits);
    const __mmask8 tiny = _mm_cmplt_epi32_mask(bits, _mm_set1_epi32(FAST_TINY)),
                   huge = _mm_cmpge_epi32_mask(bits, _mm_set1_epi32(FAST_HUGE)),
                   usual = (__mmask8) ~(tiny | huge);
    _mm_storeu_ps(inverse, _mm_maskz_div_ps(usual, _mm_set1_ps(127.0f), largest));
    const __m128 by = _mm_maskz_mul_ps((__mmask8)~tiny, largest, _mm_set1_ps(FAST_PART));
    _mm_storeu_ps(scale, _mm_mask_mov_ps(by, huge, _mm_set1_ps(NAN)));
}

/* Columns 64 h .. 64 h + 63. */
INLINE __m512i whole_of(const __m512 v[8], const float inverse[4], int h,
                        const uint8_t *order) {
    __m512i q[4];
    UNROLL for (int i = 0; i < 4; i++) {
        const __m512 by = _mm512_set1_ps(inverse[2 * h + i / 2]);
        q[i] = _mm512_cvtps_epi32(_mm512_mul_ps(v[4 * h + i], by));
    }
    const __m512i packed =
        _mm512_packs_epi16(_mm512_packs_epi32(q[0], q[1]), _mm512_packs_epi32(q[2], q[3]));
    return _mm512_permutexvar_epi8(_mm512_loadu_si512(order), packed);
}

/* What W's offset makes of the sums of 16 columns: [4 h] and [4 h + 1] of the h-th of the first
 * 64 columns and of the others. */
INLINE void halves_of(int32_t half[16], __m512i first, __m512i second, int32_t offset) {
    const __m512i none = _mm512_setzero_si512(), one = _mm512_set1_epi8(1);
    const __m512i a = _mm512_dpbusd_epi32(none, one, first),
                  b = _mm512_dpbusd_epi32(none, one, second),
                  two = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b),
                                         _mm512_unpackhi_epi32(a, b)),
                  all = _mm512_add_epi32(two, _mm512_shuffle_epi32(two, _MM_PERM_BADC));
    _mm512_storeu_si512(half, _mm512_mullo_epi32(all, _mm512_set1_epi32(-offset)));
}

/* Four blocks, the first with number `at`. */
INLINE void quantize_step(const fast_x *x, int64_t at, const __m512 v[8], int32_t group) {
    const uint8_t *order = group == 128 ? in_order : even_first;
    const int64_t side = x->side;
    float scale[4], inverse[4];
    int32_t half[16];
    scales_of(scale, inverse, v);
    const __m512i code[2] = {whole_of(v, inverse, 0, order), whole_of(v, inverse, 1, order)};
    halves_of(half, code[0], code[1], group == 128 ? FAST_E4M3_OFFSET : FAST_E2M1_OFFSET);
    UNROLL for (int b = 0; b < 4; b++, at += side) {
        const int32_t *h = half + b % 2 * 8 + b / 2;
        x->bias[2 * at] = group == 16 ? h[0] : h[0] + h[4];
        x->bias[2 * at + 1] = group == 16 ? h[4] : 0;
        x->scale[at] = scale[b];
        const __m256i part = b % 2 ? _mm512_extracti64x4_epi64(code[b / 2], 1)
                                   : _mm512_castsi512_si256(code[b / 2]);
        _mm256_storeu_si256((__m256i *)(void *)(x->code + at * FAST_BLOCK), part);
    }
}

INLINE void quantize_row(const fast_x *x, int32_t row, const float *from, int32_t n,
                         int32_t group) {
    int64_t at = (int64_t)(row / x->side) * x->blocks * x->side + row % x->side;
    for (int32_t c = 0; c < n; c += FAST_STEP, at += 4 * x->side) {
        __m512 v[8];
        UNROLL for (int i = 0; i < 8; i++) {
            v[i] = n - c >= FAST_STEP
                       ? _mm512_loadu_ps(from + c + 16 * i)
                       : _mm512_maskz_loadu_ps(first_lanes(n - c - 16 * i), from + c + 16 * i);
        }
        quantize_step(x, at, v, group);
    }
}

static void quantize(const fast_x *x, int32_t row, const float *from, int32_t n,
                     int32_t group) {
    if (group == 128) {
        quantize_row(x, row, from, n, 128);
    } else if (group == 32) {
        quantize_row(x, row, from, n, 32);
    } else {
        quantize_row(x, row, from, n, 16);
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

/* ---- sums of four rows, and then of 16 ---- */

/* In each 128-bit lane the sums of that lane of the four. */
INLINE __m512i fold_lanes(const __m512i q[4]) {
    const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(q[0], q[1]),
                                        _mm512_unpackhi_epi32(q[0], q[1])),
                  cd = _mm512_add_epi32(_mm512_unpacklo_epi32(q[2], q[3]),
                                        _mm512_unpackhi_epi32(q[2], q[3]));
    return _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
}

INLINE __m512i pick(__m512i a, __m512i b, int odd) {
    const __m512 x = _mm512_castsi512_ps(a), y = _mm512_castsi512_ps(b);
    return _mm512_castps_si512(odd ? _mm512_shuffle_ps(x, y, 0xdd)
                                   : _mm512_shuffle_ps(x, y, 0x88));
}

/* Likewise of the lane's first and of its second half, each with what is in its place of `bias`
 * for two rows, where no number is too large for 16 bits. */
INLINE void fold_half_lanes(__m512i *first, __m512i *second, const __m512i q[4], __m512i bias) {
    const __m512i one = _mm512_set1_epi16(1);
    const __m512i ab = _mm512_dpwssd_epi32(bias, _mm512_packs_epi32(q[0], q[1]), one),
                  cd = _mm512_dpwssd_epi32(bias, _mm512_packs_epi32(q[2], q[3]), one);
    *first = pick(ab, cd, 0);
    *second = pick(ab, cd, 1);
}

/* s[0], s[1]: all rows, the sums of lanes 0 and 1, and of 2 and 3. */
INLINE void fold_halves(__m512i s[2], const __m512i lanes[4]) {
    const __m512i low = _mm512_add_epi32(_mm512_shuffle_i32x4(lanes[0], lanes[1], 0x88),
                                         _mm512_shuffle_i32x4(lanes[0], lanes[1], 0xdd)),
                  high = _mm512_add_epi32(_mm512_shuffle_i32x4(lanes[2], lanes[3], 0x88),
                                          _mm512_shuffle_i32x4(lanes[2], lanes[3], 0xdd));
    s[0] = _mm512_shuffle_i32x4(low, high, 0x88);
    s[1] = _mm512_shuffle_i32x4(low, high, 0xdd);
}

/* ---- scales of W: [groups, FAST_ROWS] ---- */

/* Any scales at all. */
static void read_scales(const fast_product *p) {
    const int32_t groups = fast_padded_groups(p);
    for (int32_t j = 0; j < FAST_ROWS; j++) {
        fast_read_scales(p->scale_row, p, j);
        for (int32_t g = 0; g < groups; g++) p->scales[g * FAST_ROWS + j] = p->scale_row[g];
    }
}

/* The same for all rows: a block of 128 rows, or none. */
static void spread_scales(const fast_product *p) {
    const int32_t groups = fast_padded_groups(p);
    fast_read_scales(p->scale_row, p, 0);
    for (int32_t g = 0; g < groups; g++) {
        _mm512_store_ps(p->scales + g * FAST_ROWS, _mm512_set1_ps(p->scale_row[g]));
    }
}

/* How a byte becomes a float: it is moved to the place of `bits`, and then multiplied. */
typedef struct byte_scale {
    int32_t place;
    uint32_t bits;
    float by;
} byte_scale;

/* False for what the moved bits do not say: signs, NaN, and the least power of two. */
INLINE bool are_plain(const __m512i r[16], __mmask64 live, hd_dtype type) {
    const __m512i odd = _mm512_set1_epi8(type == HD_E8M0 ? (char)0xff : 0x7f);
    __mmask64 other = 0;
    UNROLL for (int j = 0; j < 16; j++) {
        other |= _mm512_mask_cmpge_epu8_mask(live, r[j], odd);
        if (type == HD_E8M0) other |= _mm512_mask_testn_epi8_mask(live, r[j], r[j]);
    }
    return other == 0;
}

INLINE __m512 byte_scales(__m512i four, int i, byte_scale f) {
    const int32_t left = f.place - 8 * i;
    const __m512i moved = left >= 0 ? _mm512_sll_epi32(four, _mm_cvtsi32_si128(left))
                                    : _mm512_srl_epi32(four, _mm_cvtsi32_si128(-left));
    const __m512i bits = _mm512_and_si512(moved, _mm512_set1_epi32((int32_t)f.bits));
    return _mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(f.by));
}

/* Scales of one byte, one row of them per row. */
INLINE bool turn_scales(const fast_product *p, hd_dtype type) {
    const int32_t groups = fast_groups(p), padded = fast_padded_groups(p);
    const float by = fast_scale_by(p->w);
    const byte_scale f = type == HD_E8M0 ? (byte_scale){23, 0x7f800000u, by}
                                         : (byte_scale){20, 0x07f00000u, by * 0x1p120f};
    const __mmask64 live = groups == 64 ? ~(__mmask64)0 : ((__mmask64)1 << groups) - 1;
    __m512i r[16];
    if (p->w->block_rows != 1 || !(f.by < INFINITY)) return false;
    const int64_t per_row = hd_ceil_div(p->w->cols, p->group);
    const uint8_t *first = fast_scales(p, 0);
    UNROLL for (int j = 0; j < 16; j++) {
        r[j] = _mm512_maskz_loadu_epi8(live, first + (j < p->n_w ? j : 0) * per_row);
    }
    if (!are_plain(r, live, type)) return false;
    turn(r);
    UNROLL for (int d = 0; d < 16; d++) {
        if (4 * d >= padded) return true;
        UNROLL for (int i = 0; i < 4; i++) {
            _mm512_store_ps(p->scales + (4 * d + i) * FAST_ROWS, byte_scales(r[d], i, f));
        }
    }
    return true;
}

static void find_scales(const fast_product *p) {
    const hd_weight *w = p->w;
    if (!w->scale || p->row / w->block_rows == (p->row + p->n_w - 1) / w->block_rows) {
        spread_scales(p);
    } else if (!(w->scale_type == HD_E8M0 && turn_scales(p, HD_E8M0)) &&
               !(w->scale_type == HD_E4M3 && turn_scales(p, HD_E4M3))) {
        read_scales(p);
    }
}

/* ---- W ---- */

/* 16 rows of W, read a step at a time. A step in which they end is read from a copy that goes on
 * with zeros. */
typedef struct rows {
    const uint8_t *at[FAST_ROWS];
    const char *next, *want; /* what will be wanted, and of it in a step */
    uint8_t end[FAST_ROWS][FAST_STEP];
} rows;

INLINE void find_rows(rows *r, const fast_product *p) {
    const int64_t bytes = fast_row_bytes(p->w);
    r->at[0] = fast_row(p, 0);
    for (int j = 1; j < FAST_ROWS; j++) r->at[j] = r->at[0] + (j < p->n_w ? j : 0) * bytes;
    r->next = (const char *)r->at[0] + p->ahead;
}

/* Gives the place of a step's bytes in r->at, of `left` bytes from `at` on. */
INLINE int64_t next_step(rows *r, int64_t at, int64_t left, int64_t step) {
    r->want = r->next + FAST_ROWS * at;
    if (left >= step) return at;
    for (int j = 0; j < FAST_ROWS; j++) {
        __builtin_memset(r->end[j], 0, FAST_STEP);
        __builtin_memcpy(r->end[j], r->at[j] + at, (size_t)left);
        r->at[j] = r->end[j];
    }
    return 0;
}

/* Line i of what follows, in the order of memory, as meet_internal.h does. One at a time between
 * other instructions, as many at once would be waited for; but before what reads all of a step. */
INLINE void fetch(const rows *r, int i) {
    _mm_prefetch(r->want + HALF * i, _MM_HINT_T0);
}

/* A look-up reads six bits, so the table repeats and nothing need be masked. */
INLINE __m512i e2m1_numbers(__m512i code, int high) {
    const __m512i numbers = _mm512_broadcast_i32x4(_mm_setr_epi8(
        12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)); /* doubled, and offset */
    return _mm512_permutexvar_epi8(high ? _mm512_srli_epi16(code, 4) : code, numbers);
}

/* The largest magnitude in 128 bytes of each of 16 rows. */
INLINE __m512i largest_codes(const rows *r, int64_t at) {
    const __m512i magnitude = _mm512_set1_epi8(0x7f);
    __m512i m[16];
    UNROLL for (int j = 0; j < 16; j++) {
        const uint8_t *src = r->at[j] + at;
        m[j] = _mm512_max_epu8(_mm512_and_si512(_mm512_loadu_si512(src), magnitude),
                               _mm512_and_si512(_mm512_loadu_si512(src + HALF), magnitude));
    }
    UNROLL for (int j = 0; j < 8; j++) { /* halves of two rows */
        m[j] = _mm512_max_epu8(_mm512_shuffle_i32x4(m[2 * j], m[2 * j + 1], 0x44),
                               _mm512_shuffle_i32x4(m[2 * j], m[2 * j + 1], 0xee));
    }
    UNROLL for (int j = 0; j < 4; j++) { /* quarters of four */
        m[j] = _mm512_max_epu8(_mm512_shuffle_i32x4(m[2 * j], m[2 * j + 1], 0x88),
                               _mm512_shuffle_i32x4(m[2 * j], m[2 * j + 1], 0xdd));
    }
    UNROLL for (int j = 0; j < 2; j++) {
        m[j] = _mm512_max_epu8(_mm512_unpacklo_epi32(m[2 * j], m[2 * j + 1]),
                               _mm512_unpackhi_epi32(m[2 * j], m[2 * j + 1]));
    }
    __m512i v =
        _mm512_max_epu8(_mm512_unpacklo_epi64(m[0], m[1]), _mm512_unpackhi_epi64(m[0], m[1]));
    v = _mm512_max_epu8(v, _mm512_srli_epi32(v, 16));
    v = _mm512_max_epu8(v, _mm512_srli_epi32(v, 8));
    const __m512i order =
        _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_epi32(order, _mm512_and_si512(v, _mm512_set1_epi32(0xff)));
}

/* Finds what 128 columns of 16 rows are looked up in, and what their exponents make of the
 * group's scales. */
INLINE void find_tables(const uint8_t *table[FAST_ROWS], const rows *r, int64_t at,
                        float *scale) {
    const __m512i largest = largest_codes(r, at);
    const __m512i e = _mm512_max_epi32(_mm512_srli_epi32(largest, 3), _mm512_set1_epi32(1));
    const __mmask16 nan = _mm512_cmpeq_epi32_mask(largest, _mm512_set1_epi32(0x7f));
    const __m512i power = _mm512_slli_epi32(_mm512_add_epi32(e, _mm512_set1_epi32(114)), 23);
    const __m512 by = _mm512_mask_mov_ps(_mm512_castsi512_ps(power), nan, _mm512_set1_ps(NAN));
    _mm512_store_ps(scale, _mm512_mul_ps(_mm512_load_ps(scale), by));
    uint32_t exponent[FAST_ROWS];
    _mm512_storeu_si512(exponent, e);
    for (int j = 0; j < FAST_ROWS; j++) table[j] = fast_e4m3[exponent[j]];
}

INLINE __m512i e4m3_numbers(__m512i code, __m512i low, __m512i high) {
    const __m512i number = _mm512_permutex2var_epi8(low, code, high);
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

/* The sums of 128 columns of FP4, without W's offset: s[b] of block b, or of half a block. Byte
 * 4 l + i of a register holds columns 8 l + 2 i and the one after it, so a lane's sum is below
 * 24 * 127 * 8. */
INLINE void sums_e2m1(__m512i s[8], const rows *r, int64_t at, const int8_t *code,
                      const int32_t *halves, int32_t group) {
    const __m512i twice = _mm512_setr_epi32(0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5, 6, 7, 6, 7);
    const __m256i eight = _mm256_loadu_si256((const __m256i *)(const void *)halves);
    const __m512i bias = _mm512_permutexvar_epi32(twice, _mm512_castsi256_si512(eight));
    const __m512i even = _mm512_setr_epi64(0, 2, 4, 6, 8, 10, 12, 14);
    const __m512i odd = _mm512_setr_epi64(1, 3, 5, 7, 9, 11, 13, 15);
    const __m512i x0 = _mm512_loadu_si512(code), x1 = _mm512_loadu_si512(code + HALF);
    const __m512i evens = _mm512_permutex2var_epi64(x0, even, x1),
                  odds = _mm512_permutex2var_epi64(x0, odd, x1);
    __m512i first[4], second[4];
    UNROLL for (int i = 0; i < 4; i++) {
        __m512i q[4];
        UNROLL for (int j = 0; j < 4; j++) {
            const __m512i v = _mm512_loadu_si512(r->at[4 * i + j] + at);
            fetch(r, 4 * i + j);
            q[j] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), e2m1_numbers(v, 0), evens);
            q[j] = _mm512_dpbusd_epi32(q[j], e2m1_numbers(v, 1), odds);
        }
        fold_half_lanes(first + i, second + i, q, bias);
        if (group == 32) s[i] = _mm512_add_epi32(first[i], second[i]);
    }
    if (group == 32) {
        turn_lanes(s, s + 1, s + 2, s + 3);
        return;
    }
    turn_lanes(first, first + 1, first + 2, first + 3);
    turn_lanes(second, second + 1, second + 2, second + 3);
    UNROLL for (int l = 0; l < 4; l++) {
        s[2 * l] = first[l];
        s[2 * l + 1] = second[l];
    }
}

INLINE void meet_e2m1(const fast_product *p, int32_t group) {
    const __mmask16 live = first_lanes(p->n_w);
    const int8_t *code = p->x->code + p->x_col;
    const float *by = p->x->scale + p->x_col / FAST_BLOCK, *w = p->scales;
    __m512 acc = load_out(p, 0, live);
    rows r;
    find_rows(&r, p);
    for (int32_t c = 0; c < p->n; c += FAST_STEP) {
        __m512i s[8];
        const int64_t at = next_step(&r, c / 2, (p->n - c) / 2, HALF);
        sums_e2m1(s, &r, at, code + c, p->x->bias + (p->x_col + c) / 16, group);
        UNROLL for (int b = 0; b < 4; b++, by++) {
            __m512 product;
            if (group == 32) {
                product = scaled(s[b], _mm512_load_ps(w));
            } else {
                product = _mm512_add_ps(scaled(s[2 * b], _mm512_load_ps(w)),
                                        scaled(s[2 * b + 1], _mm512_load_ps(w + FAST_ROWS)));
            }
            acc = _mm512_add_ps(acc, _mm512_mul_ps(product, _mm512_set1_ps(*by)));
            w += FAST_BLOCK / group * FAST_ROWS;
        }
    }
    _mm512_mask_storeu_ps(p->out, live, acc);
}

/* The sums of 128 columns of FP8: s[b] of block b. */
INLINE void sums_e4m3(__m512i s[4], const rows *r, int64_t at, const uint8_t *const *table,
                      const int8_t *code) {
    const __m512i x0 = _mm512_loadu_si512(code), x1 = _mm512_loadu_si512(code + HALF);
    __m512i first[4], second[4];
    UNROLL for (int i = 0; i < 4; i++) {
        __m512i a[4], b[4];
        UNROLL for (int j = 0; j < 4; j++) {
            const uint8_t *src = r->at[4 * i + j] + at, *t = table[4 * i + j];
            const __m512i low = _mm512_load_si512(t), high = _mm512_load_si512(t + HALF),
                          none = _mm512_setzero_si512();
            a[j] =
                _mm512_dpbusd_epi32(none, e4m3_numbers(_mm512_loadu_si512(src), low, high), x0);
            b[j] = _mm512_dpbusd_epi32(
                none, e4m3_numbers(_mm512_loadu_si512(src + HALF), low, high), x1);
        }
        first[i] = fold_lanes(a);
        second[i] = fold_lanes(b);
    }
    fold_halves(s, first);
    fold_halves(s + 2, second);
}

OUTLINE void meet_e4m3(const fast_product *p) {
    const __mmask16 live = first_lanes(p->n_w);
    const int8_t *code = p->x->code + p->x_col;
    const float *by = p->x->scale + p->x_col / FAST_BLOCK;
    const int32_t *bias = p->x->bias + p->x_col / 16;
    float *w = p->scales;
    __m512 acc = load_out(p, 0, live);
    rows r;
    find_rows(&r, p);
    for (int32_t c = 0; c < p->n; c += FAST_STEP, w += FAST_ROWS) {
        const int64_t at = next_step(&r, c, p->n - c, FAST_STEP);
        const uint8_t *table[FAST_ROWS];
        __m512i s[4];
        UNROLL for (int i = 0; i < 32; i++) fetch(&r, i);
        find_tables(table, &r, at, w);
        sums_e4m3(s, &r, at, table, code + c);
        __m512 part = scaled(unbiased(s[0], bias[0]), _mm512_set1_ps(by[0]));
        UNROLL for (int b = 1; b < 4; b++) {
            const __m512i sum = unbiased(s[b], bias[2 * b]);
            part = _mm512_add_ps(part, scaled(sum, _mm512_set1_ps(by[b])));
        }
        acc = _mm512_add_ps(acc, _mm512_mul_ps(part, _mm512_load_ps(w)));
        by += 4;
        bias += 8;
    }
    _mm512_mask_storeu_ps(p->out, live, acc);
}

/* ---- several rows of x ---- */

/* Numbers of W, four columns of 16 rows a register: in a panel, or, without one, as turned codes
 * of FP4. In 16 columns they lie as the numbers of x do: of codes the low halves first. */
typedef struct numbers {
    const uint8_t *panel;
    const __m512i *code;
} numbers;

INLINE __m512i number_of(numbers w, int d) {
    if (!w.code) return _mm512_load_si512(w.panel + d * HALF);
    return e2m1_numbers(w.code[d / 4 * 2 + d % 2], d / 2 % 2);
}

/* The codes of a step, turned. */
INLINE void turn_e2m1(__m512i v[16], rows *r, const fast_product *p, int32_t c) {
    const int64_t at = next_step(r, c / 2, (p->n - c) / 2, HALF);
    UNROLL for (int j = 0; j < 16; j++) v[j] = _mm512_loadu_si512(r->at[j] + at);
    turn(v);
}

OUTLINE void panel_e2m1(const fast_product *p) {
    rows r;
    find_rows(&r, p);
    for (int32_t c = 0; c < p->n; c += FAST_STEP) {
        uint8_t *panel = p->panel + (int64_t)c * FAST_ROWS;
        __m512i v[16];
        turn_e2m1(v, &r, p, c);
        UNROLL for (int h = 0; h < 8; h++) {
            fetch(&r, 2 * h);
            fetch(&r, 2 * h + 1);
            UNROLL for (int d = 0; d < 4; d++) {
                const numbers w = {.code = v + 2 * h};
                _mm512_store_si512(panel + (4 * h + d) * HALF, number_of(w, d));
            }
        }
    }
}

OUTLINE void panel_e4m3(const fast_product *p) {
    const uint8_t *table[FAST_ROWS];
    rows r;
    find_rows(&r, p);
    for (int32_t c = 0; c < p->n; c += FAST_STEP) {
        const int64_t at = next_step(&r, c, p->n - c, FAST_STEP);
        find_tables(table, &r, at, p->scales + c / FAST_STEP * FAST_ROWS);
        for (int32_t h = 0; h < FAST_STEP; h += HALF) {
            uint8_t *to = p->panel + (int64_t)(c + h) * FAST_ROWS;
            __m512i v[16];
            UNROLL for (int j = 0; j < 16; j++) {
                const uint8_t *t = table[j];
                __asm__("" : "+r"(t)); /* or all tables are kept in memory between halves */
                v[j] = e4m3_numbers(_mm512_loadu_si512(r.at[j] + at + h), _mm512_load_si512(t),
                                    _mm512_load_si512(t + HALF));
            }
            turn(v);
            UNROLL for (int d = 0; d < 16; d++) {
                fetch(&r, h / 4 + d);
                _mm512_store_si512(to + d * HALF, v[d]);
            }
        }
    }
}

/* The sums of half h of a block for n rows of x, which begin with the bias. */
INLINE void dot_half(__m512i *sum, numbers w, const int8_t *x, int32_t n, int h) {
    UNROLL for (int d = 4 * h; d < 4 * h + 4; d++) {
        const __m512i number = number_of(w, d);
        UNROLL for (int32_t t = 0; t < n; t++) {
            int32_t four;
            __builtin_memcpy(&four, x + t * FAST_BLOCK + 4 * d, sizeof four);
            sum[t] = _mm512_dpbusd_epi32(sum[t], number, _mm512_set1_epi32(four));
        }
    }
}

/* Block b of n rows of x, from number `at` of them on. */
INLINE void add_block(__m512 *acc, __m512 *part, const fast_product *p, int32_t b, int64_t at,
                      int32_t n, int32_t group, numbers from) {
    const int8_t *code = p->x->code + at * FAST_BLOCK;
    const int32_t *bias = p->x->bias + 2 * at;
    const float *by = p->x->scale + at;
    const float *scale = p->scales + b * FAST_BLOCK / group * FAST_ROWS;
    const __m512 w = _mm512_load_ps(scale);
    __m512i sum[FAST_SIDE];
    UNROLL for (int32_t t = 0; t < n; t++) {
        sum[t] = _mm512_set1_epi32(bias[2 * t]);
    }
    dot_half(sum, from, code, n, 0);
    if (group == 16) {
        const __m512 w2 = _mm512_load_ps(scale + FAST_ROWS);
        UNROLL for (int32_t t = 0; t < n; t++) {
            part[t] = scaled(sum[t], w);
            sum[t] = _mm512_set1_epi32(bias[2 * t + 1]);
        }
        dot_half(sum, from, code, n, 1);
        UNROLL for (int32_t t = 0; t < n; t++) {
            const __m512 product = _mm512_add_ps(part[t], scaled(sum[t], w2));
            acc[t] = _mm512_add_ps(acc[t], _mm512_mul_ps(product, _mm512_set1_ps(by[t])));
        }
        return;
    }
    dot_half(sum, from, code, n, 1);
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

/* The number of row i's first block. */
INLINE int64_t first_block(const fast_product *p, int32_t i) {
    const int64_t block = (int64_t)(i / FAST_SIDE) * p->x->blocks + p->x_col / FAST_BLOCK;
    return block * FAST_SIDE + i % FAST_SIDE;
}

INLINE void load_sums(__m512 *acc, const fast_product *p, int32_t i, int32_t n) {
    UNROLL for (int32_t t = 0; t < n; t++) acc[t] = load_out(p, i + t, first_lanes(p->n_w));
}

INLINE void store_sums(const fast_product *p, int32_t i, int32_t n, const __m512 *acc) {
    UNROLL for (int32_t t = 0; t < n; t++) {
        _mm512_mask_storeu_ps(p->out + (i + t) * p->out_stride, first_lanes(p->n_w), acc[t]);
    }
}

INLINE void multiply_side(const fast_product *p, int32_t i, int32_t n, int32_t group) {
    __m512 acc[FAST_SIDE], part[FAST_SIDE];
    int64_t at = first_block(p, i);
    load_sums(acc, p, i, n);
    for (int32_t b = 0; b * FAST_BLOCK < p->n; b += 4) {
        UNROLL for (int32_t q = 0; q < 4; q++, at += FAST_SIDE) {
            const numbers w = {.panel = p->panel + (int64_t)(b + q) * FAST_BLOCK * FAST_ROWS};
            add_block(acc, part, p, b + q, at, n, group, w);
        }
    }
    store_sums(p, i, n, acc);
}

/* Few rows of x meet the numbers where they come up: a panel would cost more than it serves. */
INLINE void meet_few_e2m1(const fast_product *p, int32_t n, int32_t group) {
    __m512 acc[FEW], part[FEW];
    rows r;
    find_rows(&r, p);
    int64_t at = first_block(p, 0);
    load_sums(acc, p, 0, n);
    for (int32_t c = 0; c < p->n; c += FAST_STEP) {
        __m512i v[16];
        turn_e2m1(v, &r, p, c);
        UNROLL for (int32_t q = 0; q < 4; q++, at += FAST_SIDE) {
            const numbers w = {.code = v + 4 * q};
            UNROLL for (int i = 0; i < 4; i++) fetch(&r, 4 * q + i);
            add_block(acc, part, p, c / FAST_BLOCK + q, at, n, group, w);
        }
    }
    store_sums(p, 0, n, acc);
}

INLINE void multiply_panel(const fast_product *p, int32_t group) {
    int32_t i = 0;
    for (; i + 8 <= p->n_x; i += 8) multiply_side(p, i, 8, group);
    for (; i + 4 <= p->n_x; i += 4) multiply_side(p, i, 4, group);
    for (; i + 2 <= p->n_x; i += 2) multiply_side(p, i, 2, group);
    if (i < p->n_x) multiply_side(p, i, 1, group);
}

OUTLINE void multiply_e4m3(const fast_product *p) {
    if (p->x->side == 1) {
        meet_e4m3(p);
    } else {
        panel_e4m3(p);
        multiply_panel(p, 128);
    }
}

INLINE void multiply_e2m1(const fast_product *p, int32_t group) {
    switch (p->n_x) {
    case 1:
        meet_e2m1(p, group);
        break;
    case 2:
        meet_few_e2m1(p, 2, group);
        break;
    case 3:
        meet_few_e2m1(p, 3, group);
        break;
    case FEW:
        meet_few_e2m1(p, FEW, group);
        break;
    default:
        panel_e2m1(p);
        multiply_panel(p, group);
    }
}

OUTLINE void multiply_e2m1_16(const fast_product *p) {
    multiply_e2m1(p, 16);
}

OUTLINE void multiply_e2m1_32(const fast_product *p) {
    multiply_e2m1(p, 32);
}

static void multiply(const fast_product *p) {
    for (int32_t i = 0; i < p->n_x; i++) { /* rows far apart, which nothing else foresees */
        _mm_prefetch((const char *)(p->out + i * p->out_stride), _MM_HINT_T0);
    }
    find_scales(p);
    if (p->group == 128) {
        multiply_e4m3(p);
    } else if (p->group == 16) {
        multiply_e2m1_16(p);
    } else {
        multiply_e2m1_32(p);
    }
}

const fast_kernels fast_vnni = {.quantize = quantize, .multiply = multiply};
