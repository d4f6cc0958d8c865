/* kernels_avx2.c - AVX2: inner loops with 8 floats per register and fused multiply-adds.
 * Lanes 0-7 and 8-15 of a sum are two registers. A partial vector is loaded under a mask, so
 * that it adds zeros and touches nothing beyond. */
#include "ops/cpu/lanes_avx2_internal.h"

#define UNROLL _Pragma("GCC unroll 8")

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

enum { X_ROWS = 3, HALF = OPS_LANES / 2 };

/* Multiplies n_x rows of x with the tile, lanes [from, from + n_halves * HALF) of their
 * sums: all sums of several rows would not fit the registers. `next`: as many rows to
 * prefetch meanwhile, or NULL. n_x, n_halves and the presence of `next` are compile-time
 * constants. */
static inline __attribute__((always_inline)) void dots_rows(float *acc, const float *const *x,
                                                            int32_t n_x, int64_t at,
                                                            const float *const *w, int32_t n,
                                                            int32_t from, int32_t n_pairs,
                                                            const float *const *next) {
    const int32_t each = OPS_TILE_ROWS * OPS_LANES;
    __m256 sum[X_ROWS][OPS_TILE_ROWS][2];
    const float *to[X_ROWS];
    UNROLL for (int i = 0; i < n_x; i++) {
        to[i] = x[i] + at;
        UNROLL for (int j = 0; j < OPS_TILE_ROWS; j++) {
            const float *lane = acc + i * each + j * OPS_LANES + from;
            UNROLL for (int h = 0; h < n_pairs; h++) {
                sum[i][j][h] = _mm256_loadu_ps(lane + 8 * h);
            }
        }
    }
    int32_t c = from;
    for (; c + n_pairs * HALF <= n; c += OPS_LANES) {
        UNROLL for (int i = 0; i < n_x && next; i++) {
            _mm_prefetch((const char *)(next[i] + at + c), _MM_HINT_T0);
        }
        UNROLL for (int j = 0; j < OPS_TILE_ROWS; j++) {
            UNROLL for (int h = 0; h < n_pairs; h++) {
                const __m256 y = _mm256_loadu_ps(w[j] + c + 8 * h);
                UNROLL for (int i = 0; i < n_x; i++) {
                    sum[i][j][h] =
                        _mm256_fmadd_ps(_mm256_loadu_ps(to[i] + c + 8 * h), y, sum[i][j][h]);
                }
            }
        }
    }
    UNROLL for (int h = 0; h < n_pairs && c < n; h++, c += HALF) {
        const __m256i live = first_lanes(n - c);
        UNROLL for (int j = 0; j < OPS_TILE_ROWS; j++) {
            const __m256 y = _mm256_maskload_ps(w[j] + c, live);
            UNROLL for (int i = 0; i < n_x; i++) {
                sum[i][j][h] =
                    _mm256_fmadd_ps(_mm256_maskload_ps(to[i] + c, live), y, sum[i][j][h]);
            }
        }
    }
    UNROLL for (int i = 0; i < n_x; i++) {
        UNROLL for (int j = 0; j < OPS_TILE_ROWS; j++) {
            float *lane = acc + i * each + j * OPS_LANES + from;
            UNROLL for (int h = 0; h < n_pairs; h++) {
                _mm256_storeu_ps(lane + 8 * h, sum[i][j][h]);
            }
        }
    }
}

static void dots(float *acc, const float *const *x, int32_t n_x, int64_t at,
                 const float *const *w, int32_t n) {
    const int32_t each = OPS_TILE_ROWS * OPS_LANES;
    int32_t i = 0;
    for (; n_x - i == 3 || n_x - i > 4; i += 3) {
        const float *const *next = n_x - i >= 6 ? x + i + 3 : x + i;
        dots_rows(acc + i * each, x + i, 3, at, w, n, 0, 1, NULL);
        dots_rows(acc + i * each, x + i, 3, at, w, n, HALF, 1, next);
    }
    for (; n_x - i >= 2; i += 2) {
        dots_rows(acc + i * each, x + i, 2, at, w, n, 0, 1, NULL);
        dots_rows(acc + i * each, x + i, 2, at, w, n, HALF, 1, NULL);
    }
    if (i < n_x) dots_rows(acc + i * each, x + i, 1, at, w, n, 0, 2, NULL);
}

/* Reduces the four sums of a tile together: after a transpose the last two halvings are two
 * additions of complete registers. */
void ops_reduce_avx2(float *out, int64_t out_stride, const float *acc, int32_t n_x,
                     int32_t n_w) {
    for (int32_t i = 0; i < n_x; i++) {
        __m128 four[OPS_TILE_ROWS];
        for (int j = 0; j < OPS_TILE_ROWS; j++) {
            const float *lane = acc + (i * OPS_TILE_ROWS + j) * OPS_LANES;
            four[j] = reduce_to_four(_mm256_loadu_ps(lane), _mm256_loadu_ps(lane + 8));
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

/* The part of a mix that stays in registers during the walk over the rows: MIX_OUT rows of
 * MIX_WIDE registers of columns, or one row of twice as many. */
enum { MIX_OUT = 3, MIX_WIDE = 4 };

/* n_out and wide are compile-time constants. */
static inline __attribute__((always_inline)) void mix_rows(const ops_mix *m, int32_t first,
                                                           int32_t n_out, int32_t col,
                                                           int32_t wide) {
    __m256 sum[MIX_OUT][2 * MIX_WIDE];
    float *out[MIX_OUT];
    const float *coef[MIX_OUT];
    UNROLL for (int j = 0; j < n_out; j++) {
        out[j] = m->out + (first + j) * m->out_stride + col;
        coef[j] = m->coef + (first + j) * m->coef_stride;
        UNROLL for (int k = 0; k < wide; k++) sum[j][k] = _mm256_loadu_ps(out[j] + 8 * k);
    }
    for (int32_t i = 0; i < m->n_rows; i++) {
        const float *row = m->row[i] + m->at + col;
        __m256 by[MIX_OUT];
        UNROLL for (int j = 0; j < n_out; j++) by[j] = _mm256_set1_ps(coef[j][i]);
        UNROLL for (int k = 0; k < wide; k++) {
            const __m256 x = _mm256_loadu_ps(row + 8 * k);
            UNROLL for (int j = 0; j < n_out; j++) {
                sum[j][k] = _mm256_fmadd_ps(by[j], x, sum[j][k]);
            }
        }
    }
    UNROLL for (int j = 0; j < n_out; j++) {
        UNROLL for (int k = 0; k < wide; k++) _mm256_storeu_ps(out[j] + 8 * k, sum[j][k]);
    }
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
    const int32_t step = 8 * MIX_WIDE, int16 = m->cols - m->cols % step;
    int32_t j = 0;
    for (; m->n_out - j == 3 || m->n_out - j > 4; j += 3) {
        for (int32_t col = 0; col < int16; col += step) mix_rows(m, j, 3, col, MIX_WIDE);
    }
    for (; m->n_out - j >= 2; j += 2) {
        for (int32_t col = 0; col < int16; col += step) mix_rows(m, j, 2, col, MIX_WIDE);
    }
    for (int32_t col = 0; col < int16 && j < m->n_out; col += 2 * step) {
        if (int16 - col > step) {
            mix_rows(m, j, 1, col, 2 * MIX_WIDE);
        } else {
            mix_rows(m, j, 1, col, MIX_WIDE);
        }
    }
    for (j = 0; j < m->n_out; j++) {
        float *out = m->out + j * m->out_stride;
        const float *coef = m->coef + j * m->coef_stride;
        for (int32_t col = int16; col < m->cols; col += 8) mix_end(m, out, coef, col);
    }
}

#define AVX2                                                                                \
    .square_sum = ops_square_sum_avx2, .dots = dots, .reduce = ops_reduce_avx2, .mix = mix, \
    .max = ops_max_avx2, .exp_sum = ops_exp_sum_avx2, .blend = ops_blend_avx2,              \
    .transpose = ops_transpose_avx2, .index_scores = ops_index_scores_avx2,                 \
    .weigh = ops_weigh_avx2,                                                                \
    .dequantize =                                                                           \
        {[HD_F32] = ops_dequantize_f32_avx2,   [HD_F16] = ops_dequantize_f16_avx2,          \
         [HD_BF16] = ops_dequantize_bf16_avx2, [HD_E4M3] = ops_dequantize_e4m3_avx2,        \
         [HD_E8M0] = ops_dequantize_e8m0_avx2, [HD_E2M1] = ops_dequantize_e2m1_avx2},       \
    .small_m = {[HD_F32] = ops_small_m_f32_avx2,                                            \
                [HD_BF16] = ops_small_m_bf16_avx2,                                          \
                [HD_E4M3] = ops_small_m_e4m3_avx2,                                          \
                [HD_E2M1] = ops_small_m_e2m1_avx2},                                         \
    .small_m_rows = 8, .small_m_near = 8192, .near_rows = 64

const ops_kernels ops_kernels_avx2 = {AVX2};
const ops_kernels ops_kernels_int16 = {AVX2, .fast = &fast_int16_avx2};
