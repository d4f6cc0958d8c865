/* kernels_plain.c - the inner loops in portable C, which a compiler can vectorize for any
 * target. */
#include "ops/cpu/kernels_internal.h"

#include <math.h>
#include <string.h>

/* The reduction tree: halves are added to halves. */
static float reduce_lanes(const float *lane) {
    float sum[OPS_LANES];
    memcpy(sum, lane, sizeof sum);
    for (int32_t half = OPS_LANES / 2; half > 0; half /= 2) {
        for (int32_t l = 0; l < half; l++) sum[l] += sum[l + half];
    }
    return sum[0];
}

static void add_products(float *restrict lane, const float *restrict x, const float *restrict y,
                         int32_t n) {
    float sum[OPS_LANES];
    memcpy(sum, lane, sizeof sum);
    int32_t c = 0;
    for (; c + OPS_LANES <= n; c += OPS_LANES) {
        for (int32_t l = 0; l < OPS_LANES; l++) sum[l] += x[c + l] * y[c + l];
    }
    for (int32_t l = 0; c + l < n; l++) sum[l] += x[c + l] * y[c + l];
    memcpy(lane, sum, sizeof sum);
}

static double square_sum(const float *x, int32_t n) {
    double lane[OPS_LANES] = {0}, sum = 0.0;
    for (int32_t c = 0; c < n; c++) lane[c % OPS_LANES] += (double)x[c] * (double)x[c];
    for (int32_t l = 0; l < OPS_LANES; l++) sum += lane[l];
    return sum;
}

static void dots(float *acc, const float *const *x, int32_t n_x, int64_t at,
                 const float *const *w, int32_t n) {
    for (int32_t i = 0; i < n_x; i++) {
        for (int32_t j = 0; j < OPS_TILE_ROWS; j++) {
            add_products(acc + (i * OPS_TILE_ROWS + j) * OPS_LANES, x[i] + at, w[j], n);
        }
    }
}

static void reduce(float *out, int64_t out_stride, const float *acc, int32_t n_x, int32_t n_w) {
    for (int32_t i = 0; i < n_x; i++) {
        for (int32_t j = 0; j < n_w; j++) {
            out[i * out_stride + j] = reduce_lanes(acc + (i * OPS_TILE_ROWS + j) * OPS_LANES);
        }
    }
}

static void add_scaled(float *restrict out, const float *restrict x, float scale, int32_t n) {
    for (int32_t c = 0; c < n; c++) out[c] += scale * x[c];
}

static void mix(const ops_mix *m) {
    for (int32_t j = 0; j < m->n_out; j++) {
        for (int32_t i = 0; i < m->n_rows; i++) {
            add_scaled(m->out + j * m->out_stride, m->row[i] + m->at,
                       m->coef[j * m->coef_stride + i], m->cols);
        }
    }
}

static float max(const float *x, int32_t n) {
    float top = -INFINITY;
    for (int32_t i = 0; i < n; i++) top = x[i] > top ? x[i] : top;
    return top;
}

static float exp_sum(float *x, int32_t n, float shift) {
    float lane[OPS_LANES] = {0};
    for (int32_t i = 0; i < n; i++) {
        x[i] = expf(x[i] - shift);
        lane[i % OPS_LANES] += x[i];
    }
    return reduce_lanes(lane);
}

static void blend(float *out, const float *sum, float down, int32_t n) {
    for (int32_t i = 0; i < n; i++) out[i] = out[i] * down + sum[i];
}

static void transpose(float *out, const float *const *row, int32_t cols) {
    for (int32_t u = 0; u < OPS_TRANSPOSE_KEYS; u++) {
        for (int32_t c = 0; c < cols; c++) out[c * OPS_TRANSPOSE_KEYS + u] = row[u][c];
    }
}

static void index_scores(const ops_index *x) {
    float sum[OPS_TRANSPOSE_KEYS] = {0};
    for (int32_t h = 0; h < x->heads; h++) {
        const float by = x->weight[h] * x->scale;
        float dot[OPS_TRANSPOSE_KEYS] = {0};
        for (int32_t c = 0; c < x->width; c++) {
            add_scaled(dot, x->keys + c * OPS_TRANSPOSE_KEYS, x->q[(int64_t)h * x->width + c],
                       OPS_TRANSPOSE_KEYS);
        }
        for (int32_t u = 0; u < OPS_TRANSPOSE_KEYS; u++) {
            sum[u] += dot[u] > 0.0f ? by * dot[u] : 0.0f;
        }
    }
    memcpy(x->score, sum, sizeof sum);
}

/* ---- stored formats: element i of src ---- */

typedef float dequantize_fn(const uint8_t *src, int32_t i);

static inline float dequantize_f32(const uint8_t *src, int32_t i) {
    float f;
    memcpy(&f, src + (size_t)i * sizeof f, sizeof f);
    return f;
}

static inline uint16_t half_at(const uint8_t *src, int32_t i) {
    uint16_t half;
    memcpy(&half, src + (size_t)i * sizeof half, sizeof half);
    return half;
}

static inline float dequantize_f16(const uint8_t *src, int32_t i) {
    return hd_f16_to_f32(half_at(src, i));
}

static inline float dequantize_bf16(const uint8_t *src, int32_t i) {
    return hd_bf16_to_f32(half_at(src, i));
}

/* A small float's bits, placed in a float32, are its value times a power of two, subnormals
 * included; NaN of E4M3, all ones below the sign, becomes a number. */
static inline float dequantize_e4m3(const uint8_t *src, int32_t i) {
    const uint32_t b = src[i], magnitude = b & 0x7fu;
    float f = hd_f32_from_bits((b & 0x80u) << 24 | magnitude << 20) * 0x1p120f;
    return magnitude == 0x7fu ? NAN : f;
}

static inline float dequantize_e8m0(const uint8_t *src, int32_t i) {
    return hd_e8m0_to_f32(src[i]);
}

static inline float dequantize_e2m1(const uint8_t *src, int32_t i) {
    const uint32_t code = (uint32_t)src[i / 2] >> (4 * (i & 1));
    return hd_f32_from_bits((code & 8u) << 28 | (code & 7u) << 22) * 0x1p126f;
}

/* One loop for all formats; dequantize is a compile-time constant. */
static inline void decode(float *restrict out, const uint8_t *restrict src, int32_t n,
                          const float *scale, int32_t block, dequantize_fn *dequantize) {
    for (int32_t i = 0; i < n; scale++) {
        const int32_t end = n - i < block ? n : i + block;
        for (; i < end; i++) out[i] = dequantize(src, i) * *scale;
    }
}

static void decode_f32(float *out, const uint8_t *src, int32_t n, const float *scale,
                       int32_t block) {
    decode(out, src, n, scale, block, dequantize_f32);
}

static void decode_f16(float *out, const uint8_t *src, int32_t n, const float *scale,
                       int32_t block) {
    decode(out, src, n, scale, block, dequantize_f16);
}

static void decode_bf16(float *out, const uint8_t *src, int32_t n, const float *scale,
                        int32_t block) {
    decode(out, src, n, scale, block, dequantize_bf16);
}

static void decode_e4m3(float *out, const uint8_t *src, int32_t n, const float *scale,
                        int32_t block) {
    decode(out, src, n, scale, block, dequantize_e4m3);
}

static void decode_e8m0(float *out, const uint8_t *src, int32_t n, const float *scale,
                        int32_t block) {
    decode(out, src, n, scale, block, dequantize_e8m0);
}

static void decode_e2m1(float *out, const uint8_t *src, int32_t n, const float *scale,
                        int32_t block) {
    decode(out, src, n, scale, block, dequantize_e2m1);
}

#define PLAIN                                                                                  \
    .square_sum = square_sum, .dots = dots, .reduce = reduce, .mix = mix, .max = max,          \
    .exp_sum = exp_sum, .blend = blend, .transpose = transpose, .index_scores = index_scores,  \
    .weigh = ops_weigh_plain,                                                                  \
    .dequantize = {[HD_F32] = decode_f32,   [HD_F16] = decode_f16,   [HD_BF16] = decode_bf16,  \
                   [HD_E4M3] = decode_e4m3, [HD_E8M0] = decode_e8m0, [HD_E2M1] = decode_e2m1}, \
    .near_rows = 12

const ops_kernels ops_kernels_plain = {PLAIN};
