/* kernels_avx2.c - the inner loops with 8 floats to a register and fused steps. Lanes 0-7 and
 * 8-15 of a sum are two registers; a ragged end is loaded under a mask, so that it adds zeros
 * and touches nothing. */
#include "ops/kernels_internal.h"

#include <immintrin.h>
#include <math.h>
#include <string.h>

/* Ones in the first n of 8 lanes; n may be negative or beyond 8. */
static inline __m256i first_lanes(int32_t n) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane);
}

/* Lanes 0-3 of the result: a tree of halves onto halves, up to four lanes. */
static inline __m128 fold_to_four(__m256 low, __m256 high) {
    __m256 sum = _mm256_add_ps(low, high);
    return _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
}

static inline float fold_lanes(__m256 low, __m256 high) {
    __m128 four = fold_to_four(low, high);
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

static inline __m256d add_squares(__m256d sum, __m128 x) {
    const __m256d wide = _mm256_cvtps_pd(x);
    return _mm256_fmadd_pd(wide, wide, sum);
}

double ops_square_sum_avx2(const float *x, int32_t n) {
    __m256d sum[4] = {_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(),
                      _mm256_setzero_pd()};
    for (int32_t c = 0; c < n; c += OPS_LANES) {
        const __m256 low = _mm256_maskload_ps(x + c, first_lanes(n - c));
        const __m256 high = n - c > 8 ? _mm256_maskload_ps(x + c + 8, first_lanes(n - c - 8))
                                      : _mm256_setzero_ps();
        sum[0] = add_squares(sum[0], _mm256_castps256_ps128(low));
        sum[1] = add_squares(sum[1], _mm256_extractf128_ps(low, 1));
        sum[2] = add_squares(sum[2], _mm256_castps256_ps128(high));
        sum[3] = add_squares(sum[3], _mm256_extractf128_ps(high, 1));
    }
    double lane[4];
    _mm256_storeu_pd(
        lane, _mm256_add_pd(_mm256_add_pd(sum[0], sum[1]), _mm256_add_pd(sum[2], sum[3])));
    return (lane[0] + lane[1]) + (lane[2] + lane[3]);
}

/* One row of x against the tile: acc [OPS_TILE_ROWS, OPS_LANES]. */
static void dots_row(float *acc, const float *x, const float *const *w, int32_t n) {
    __m256 low[OPS_TILE_ROWS], high[OPS_TILE_ROWS];
    for (int j = 0; j < OPS_TILE_ROWS; j++) {
        low[j] = _mm256_loadu_ps(acc + j * OPS_LANES);
        high[j] = _mm256_loadu_ps(acc + j * OPS_LANES + 8);
    }
    int32_t c = 0;
    for (; c + OPS_LANES <= n; c += OPS_LANES) {
        __m256 x0 = _mm256_loadu_ps(x + c), x1 = _mm256_loadu_ps(x + c + 8);
        for (int j = 0; j < OPS_TILE_ROWS; j++) {
            low[j] = _mm256_fmadd_ps(x0, _mm256_loadu_ps(w[j] + c), low[j]);
            high[j] = _mm256_fmadd_ps(x1, _mm256_loadu_ps(w[j] + c + 8), high[j]);
        }
    }
    if (c < n) {
        __m256i m0 = first_lanes(n - c), m1 = first_lanes(n - c - 8);
        __m256 x0 = _mm256_maskload_ps(x + c, m0), x1 = _mm256_maskload_ps(x + c + 8, m1);
        for (int j = 0; j < OPS_TILE_ROWS; j++) {
            low[j] = _mm256_fmadd_ps(x0, _mm256_maskload_ps(w[j] + c, m0), low[j]);
            high[j] = _mm256_fmadd_ps(x1, _mm256_maskload_ps(w[j] + c + 8, m1), high[j]);
        }
    }
    for (int j = 0; j < OPS_TILE_ROWS; j++) {
        _mm256_storeu_ps(acc + j * OPS_LANES, low[j]);
        _mm256_storeu_ps(acc + j * OPS_LANES + 8, high[j]);
    }
}

static void dots(float *acc, const float *const *x, int32_t n_x, int64_t at,
                 const float *const *w, int32_t n) {
    for (int32_t i = 0; i < n_x; i++) {
        dots_row(acc + i * OPS_TILE_ROWS * OPS_LANES, x[i] + at, w, n);
    }
}

/* Folds the four sums of a tile together: after a transpose the last two halvings are two
 * additions of whole registers. */
void ops_fold_avx2(float *out, int64_t out_stride, const float *acc, int32_t n_x, int32_t n_w) {
    for (int32_t i = 0; i < n_x; i++) {
        __m128 four[OPS_TILE_ROWS];
        for (int j = 0; j < OPS_TILE_ROWS; j++) {
            const float *lane = acc + (i * OPS_TILE_ROWS + j) * OPS_LANES;
            four[j] = fold_to_four(_mm256_loadu_ps(lane), _mm256_loadu_ps(lane + 8));
        }
        _MM_TRANSPOSE4_PS(four[0], four[1], four[2], four[3]);
        __m128 sum = _mm_add_ps(_mm_add_ps(four[0], four[2]), _mm_add_ps(four[1], four[3]));
        float *to = out + i * out_stride;
        if (n_w == OPS_TILE_ROWS) {
            _mm_storeu_ps(to, sum);
        } else {
            _mm_maskstore_ps(to, _mm256_castsi256_si128(first_lanes(n_w)), sum);
        }
    }
}

enum { MIX_WIDE = 4 }; /* registers of columns that mix keeps while it walks the rows */

static void mix_wide(const ops_mix *m, float *out, const float *coef, int32_t col) {
    __m256 sum[MIX_WIDE];
    for (int k = 0; k < MIX_WIDE; k++) sum[k] = _mm256_loadu_ps(out + col + 8 * k);
    for (int32_t i = 0; i < m->n_rows; i++) {
        const float *row = m->row[i] + m->at + col;
        __m256 c = _mm256_set1_ps(coef[i]);
        for (int k = 0; k < MIX_WIDE; k++) {
            sum[k] = _mm256_fmadd_ps(c, _mm256_loadu_ps(row + 8 * k), sum[k]);
        }
    }
    for (int k = 0; k < MIX_WIDE; k++) _mm256_storeu_ps(out + col + 8 * k, sum[k]);
}

static void mix_end(const ops_mix *m, float *out, const float *coef, int32_t col) {
    const __m256i live = first_lanes(m->cols - col);
    __m256 sum = _mm256_maskload_ps(out + col, live);
    for (int32_t i = 0; i < m->n_rows; i++) {
        __m256 x = _mm256_maskload_ps(m->row[i] + m->at + col, live);
        sum = _mm256_fmadd_ps(_mm256_set1_ps(coef[i]), x, sum);
    }
    _mm256_maskstore_ps(out + col, live, sum);
}

static void mix(const ops_mix *m) {
    for (int32_t j = 0; j < m->n_out; j++) {
        float *out = m->out + j * m->out_stride;
        const float *coef = m->coef + j * m->coef_stride;
        int32_t col = 0;
        for (; col + 8 * MIX_WIDE <= m->cols; col += 8 * MIX_WIDE) mix_wide(m, out, coef, col);
        for (; col < m->cols; col += 8) mix_end(m, out, coef, col);
    }
}

float ops_max_avx2(const float *x, int32_t n) {
    const __m256 none = _mm256_set1_ps(-INFINITY);
    __m256 top = none;
    int32_t i = 0;
    for (; i + 8 <= n; i += 8) top = _mm256_max_ps(top, _mm256_loadu_ps(x + i));
    __m256i live = first_lanes(n - i);
    __m256 end =
        _mm256_blendv_ps(none, _mm256_maskload_ps(x + i, live), _mm256_castsi256_ps(live));
    float lane[8], best = -INFINITY;
    _mm256_storeu_ps(lane, _mm256_max_ps(top, end));
    for (int l = 0; l < 8; l++) best = lane[l] > best ? lane[l] : best;
    return best;
}

/* exp(x) to 1 ulp: x = k ln 2 + r with |r| <= ln 2 / 2, a polynomial of degree 7 in r, and
 * 2^k in two factors so that subnormal results and infinity come out right. The operand order
 * of min and max lets NaN through. */
static inline __m256 exp8(__m256 x) {
    x = _mm256_min_ps(_mm256_set1_ps(89.0f), _mm256_max_ps(_mm256_set1_ps(-104.0f), x));
    __m256 k = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(0x1.715476p+0f)),
                               _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(k, _mm256_set1_ps(0x1.62e430p-1f), x);
    r = _mm256_fnmadd_ps(k, _mm256_set1_ps(-0x1.05c610p-29f), r);
    __m256 p = _mm256_set1_ps(1.0f / 5040);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 720));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 120));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 24));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 6));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.5f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
    const __m256i bias = _mm256_set1_epi32(127);
    __m256i whole = _mm256_cvtps_epi32(k), half = _mm256_srai_epi32(whole, 1);
    __m256i rest = _mm256_sub_epi32(whole, half);
    __m256 f = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
    __m256 g = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23));
    return _mm256_mul_ps(_mm256_mul_ps(p, f), g);
}

static inline __m256 exp_step(float *x, __m256i live, __m256 shift) {
    __m256 e = exp8(_mm256_sub_ps(_mm256_maskload_ps(x, live), shift));
    _mm256_maskstore_ps(x, live, e);
    return _mm256_and_ps(e, _mm256_castsi256_ps(live));
}

float ops_exp_sum_avx2(float *x, int32_t n, float shift) {
    __m256 low = _mm256_setzero_ps(), high = low, by = _mm256_set1_ps(shift);
    for (int32_t i = 0; i < n; i += OPS_LANES) {
        low = _mm256_add_ps(low, exp_step(x + i, first_lanes(n - i), by));
        if (n - i > 8)
            high = _mm256_add_ps(high, exp_step(x + i + 8, first_lanes(n - i - 8), by));
    }
    return fold_lanes(low, high);
}

static void blend(float *out, const float *sum, float down, int32_t n) {
    const __m256 by = _mm256_set1_ps(down);
    for (int32_t i = 0; i < n; i += 8) {
        const __m256i live = first_lanes(n - i);
        const __m256 old = _mm256_maskload_ps(out + i, live);
        _mm256_maskstore_ps(out + i, live,
                            _mm256_fmadd_ps(old, by, _mm256_maskload_ps(sum + i, live)));
    }
}

/* ---- stored formats: 8 elements from the first bytes of src ---- */

typedef __m256 widen_fn(const uint8_t *src);

static inline __m256 widen_f32(const uint8_t *src) {
    return _mm256_loadu_ps((const float *)(const void *)src);
}

static inline __m256 widen_f16(const uint8_t *src) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)src));
}

static inline __m256 widen_bf16(const uint8_t *src) {
    __m128i half = _mm_loadu_si128((const __m128i *)(const void *)src);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

/* The bits of E4M3 in their places of F16 are the value times 2^-8, subnormals included. Only
 * NaN, all ones below the sign, comes out as a number. */
static inline __m256 widen_e4m3(const uint8_t *src) {
    __m128i byte = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)(const void *)src));
    __m128i magnitude = _mm_and_si128(byte, _mm_set1_epi16(0x7f));
    __m128i sign = _mm_slli_epi16(_mm_sub_epi16(byte, magnitude), 8);
    __m128i nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7f));
    __m128i bits = _mm_or_si128(_mm_or_si128(sign, _mm_slli_epi16(magnitude, 7)),
                                _mm_and_si128(nan, _mm_set1_epi16(0x7e00)));
    return _mm256_mul_ps(_mm256_cvtph_ps(bits), _mm256_set1_ps(256.0f));
}

/* A byte is the exponent; 0 is the subnormal 2^-127, 255 is NaN. */
static inline __m256 widen_e8m0(const uint8_t *src) {
    __m256i byte = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)src));
    __m256i low = _mm256_cmpeq_epi32(byte, _mm256_setzero_si256());
    __m256i nan = _mm256_cmpeq_epi32(byte, _mm256_set1_epi32(255));
    __m256i extra = _mm256_and_si256(_mm256_or_si256(low, nan), _mm256_set1_epi32(0x00400000));
    return _mm256_castsi256_ps(_mm256_or_si256(_mm256_slli_epi32(byte, 23), extra));
}

/* Four bytes hold eight codes, the even element in the low nibble: each lane shifts its own
 * out of the 32 bits; three bits look up the magnitude, the fourth is the sign. */
static inline __m256 widen_e2m1(const uint8_t *src) {
    int32_t four;
    memcpy(&four, src, sizeof four);
    const __m256i shift = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    const __m256 magnitude = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
    __m256i code = _mm256_srlv_epi32(_mm256_set1_epi32(four), shift);
    __m256i sign = _mm256_slli_epi32(_mm256_and_si256(code, _mm256_set1_epi32(8)), 28);
    return _mm256_or_ps(_mm256_permutevar8x32_ps(magnitude, code), _mm256_castsi256_ps(sign));
}

/* One loop for all formats: `bits` an element, widen is a constant where this is inlined. */
static inline void decode(float *out, const uint8_t *src, int32_t n, const float *scale,
                          int32_t block, widen_fn *widen, int32_t bits) {
    int32_t i = 0;
    for (; n - i >= 8; scale++) {
        const int32_t end = n - i < block ? n : i + block;
        const __m256 by = _mm256_set1_ps(*scale);
        for (; i + 8 <= end; i += 8) {
            _mm256_storeu_ps(out + i, _mm256_mul_ps(widen(src + (int64_t)i * bits / 8), by));
        }
        if (i < end) break; /* the ragged end belongs to this block */
    }
    if (i == n) return;
    uint8_t end_src[32] = {0};
    float end_out[8];
    memcpy(end_src, src + (int64_t)i * bits / 8, (size_t)((n - i) * bits + 7) / 8);
    _mm256_storeu_ps(end_out, _mm256_mul_ps(widen(end_src), _mm256_set1_ps(*scale)));
    memcpy(out + i, end_out, (size_t)(n - i) * sizeof *out);
}

void ops_decode_f32_avx2(float *out, const uint8_t *src, int32_t n, const float *scale,
                         int32_t block) {
    decode(out, src, n, scale, block, widen_f32, 32);
}

void ops_decode_f16_avx2(float *out, const uint8_t *src, int32_t n, const float *scale,
                         int32_t block) {
    decode(out, src, n, scale, block, widen_f16, 16);
}

void ops_decode_bf16_avx2(float *out, const uint8_t *src, int32_t n, const float *scale,
                          int32_t block) {
    decode(out, src, n, scale, block, widen_bf16, 16);
}

void ops_decode_e4m3_avx2(float *out, const uint8_t *src, int32_t n, const float *scale,
                          int32_t block) {
    decode(out, src, n, scale, block, widen_e4m3, 8);
}

void ops_decode_e8m0_avx2(float *out, const uint8_t *src, int32_t n, const float *scale,
                          int32_t block) {
    decode(out, src, n, scale, block, widen_e8m0, 8);
}

void ops_decode_e2m1_avx2(float *out, const uint8_t *src, int32_t n, const float *scale,
                          int32_t block) {
    decode(out, src, n, scale, block, widen_e2m1, 4);
}

#define AVX2                                                                                 \
    .square_sum = ops_square_sum_avx2, .dots = dots, .fold = ops_fold_avx2, .mix = mix,      \
    .max = ops_max_avx2, .exp_sum = ops_exp_sum_avx2, .blend = blend, .turn = ops_turn_avx2, \
    .index_scores = ops_index_scores_avx2, .weigh = ops_weigh_avx2,                          \
    .decode = {[HD_F32] = ops_decode_f32_avx2,   [HD_F16] = ops_decode_f16_avx2,             \
               [HD_BF16] = ops_decode_bf16_avx2, [HD_E4M3] = ops_decode_e4m3_avx2,           \
               [HD_E8M0] = ops_decode_e8m0_avx2, [HD_E2M1] = ops_decode_e2m1_avx2}

const ops_kernels ops_kernels_avx2 = {AVX2};
const ops_kernels ops_kernels_avx2_fast = {AVX2, .fast = &fast_avx2};
