/* optimizer_ref.c - the optimizer's operators in plain C. */
#include <float.h>
#include <string.h>

#include "base/checked.h"
#include "base/round_codes.h"
#include "ops/backward/backward_internal.h"

/* ---- sums of squares ---- */

double back_square_sum(const float *x, int64_t n) {
    double lane[HD_SQUARES_LANES] = {0};
    int64_t i = 0;
    for (; i + HD_SQUARES_LANES <= n; i += HD_SQUARES_LANES) {
        for (int l = 0; l < HD_SQUARES_LANES; l++)
            lane[l] += (double)x[i + l] * (double)x[i + l];
    }
    for (int l = 0; i + l < n; l++) lane[l] += (double)x[i + l] * (double)x[i + l];
    for (int k = HD_SQUARES_LANES / 2; k > 0; k /= 2) {
        for (int l = 0; l < k; l++) lane[l] += lane[l + k];
    }
    return lane[0];
}

void hd_sum_squares_ref(hd_stream *s, const hd_sum_squares_args *a) {
    (void)s;
    for (int64_t at = 0; at < a->n; at += HD_SQUARES_BLOCK) {
        a->sums[at / HD_SQUARES_BLOCK] =
            back_square_sum(a->x + at, hd_min_i64(HD_SQUARES_BLOCK, a->n - at));
    }
}

/* ---- AdamW ---- */

void back_adamw_range(const hd_adamw_args *a, int64_t begin, int64_t end) {
    float *restrict master = a->master, *restrict first = a->first,
                    *restrict second = a->second;
    const float *restrict grad = a->grad;
    for (int64_t i = begin; i < end; i++) {
        const float g = grad[i] * a->clip;
        first[i] = a->beta1 * first[i] + (1.0f - a->beta1) * g;
        second[i] = a->beta2 * second[i] + (1.0f - a->beta2) * g * g;
        const float size = sqrtf(second[i] * a->correction2) + a->eps;
        master[i] = master[i] * a->keep - a->rate * (first[i] * a->correction1) / size;
    }
}

void hd_adamw_ref(hd_stream *s, const hd_adamw_args *a) {
    (void)s;
    back_adamw_range(a, 0, a->n);
}

/* ---- Muon ---- */

enum { NEWTON_SCHULZ_STEPS = 5, GRAM_LANES = 16 };

/* out[n, n] = x x^T of x [n, k]: lane l adds the products of columns l, l + GRAM_LANES, ... of whole
 * groups; then the other columns, and the lanes to them, in order. */
static void gram(float *restrict out, const float *restrict x, int32_t n, int32_t k) {
    for (int32_t i = 0; i < n; i++) {
        for (int32_t j = 0; j <= i; j++) {
            const float *a = x + (int64_t)i * k, *b = x + (int64_t)j * k;
            float part[GRAM_LANES] = {0}, sum = 0.0f;
            int32_t c = 0;
            for (; c + GRAM_LANES <= k; c += GRAM_LANES) {
                for (int l = 0; l < GRAM_LANES; l++) part[l] += a[c + l] * b[c + l];
            }
            for (; c < k; c++) sum += a[c] * b[c];
            for (int l = 0; l < GRAM_LANES; l++) sum += part[l];
            out[(int64_t)i * n + j] = out[(int64_t)j * n + i] = sum;
        }
    }
}

/* out[n, k] = alpha y + a y of a [n, n] and y [n, k], in order of a's columns */
static void multiply(float *restrict out, const float *restrict a, const float *restrict y,
                     int32_t n, int32_t k, float alpha) {
    for (int32_t i = 0; i < n; i++) {
        float *row = out + (int64_t)i * k;
        for (int32_t c = 0; c < k; c++) row[c] = alpha * y[(int64_t)i * k + c];
        for (int32_t j = 0; j < n; j++) {
            const float f = a[(int64_t)i * n + j];
            for (int32_t c = 0; c < k; c++) row[c] += f * y[(int64_t)j * k + c];
        }
    }
}

/* Replaces x [n, k], n <= k, by a nearly semi-orthogonal matrix. b: [n, k], a, c: [n, n]. */
static void orthogonalize(float *x, float *b, float *a, float *c, int32_t n, int32_t k) {
    const double square = back_square_sum(x, (int64_t)n * k);
    const float inverse = (float)(1.0 / (sqrt(square) + 1e-7));
    for (int64_t i = 0; i < (int64_t)n * k; i++) x[i] *= inverse;
    for (int step = 0; step < NEWTON_SCHULZ_STEPS; step++) {
        gram(a, x, n, k);
        multiply(c, a, a, n, n, 0.0f);
        for (int64_t i = 0; i < (int64_t)n * n; i++) c[i] = -4.7750f * a[i] + 2.0315f * c[i];
        multiply(b, c, x, n, k, 3.4445f);
        memcpy(x, b, (size_t)n * (size_t)k * sizeof *x);
    }
}

/* The momentum of one matrix, looked ahead, with the shorter side as rows. */
static void look_ahead(float *x, const hd_muon_args *a, float *first, const float *grad) {
    for (int32_t r = 0; r < a->rows; r++) {
        for (int32_t c = 0; c < a->cols; c++) {
            const int64_t i = (int64_t)r * a->cols + c;
            const float g = grad[i] * a->clip;
            first[i] = a->momentum * first[i] + g;
            x[a->rows <= a->cols ? i : (int64_t)c * a->rows + r] = g + a->momentum * first[i];
        }
    }
}

void back_muon_matrix(const hd_muon_args *m, int32_t at, float *x) {
    const int32_t rows = m->rows, cols = m->cols, n = hd_min_i32(rows, cols);
    const int64_t size = (int64_t)rows * cols;
    float *b = x + size, *a = b + size, *c = a + (int64_t)n * n,
          *master = m->master + at * size;
    look_ahead(x, m, m->first + at * size, m->grad + at * size);
    orthogonalize(x, b, a, c, n, hd_max_i32(rows, cols));
    for (int32_t r = 0; r < rows; r++) {
        for (int32_t k = 0; k < cols; k++) {
            const int64_t i = (int64_t)r * cols + k;
            const float u = x[rows <= cols ? i : (int64_t)k * rows + r];
            master[i] = master[i] * m->keep - m->rate * u;
        }
    }
}

void hd_muon_ref(hd_stream *s, const hd_muon_args *a) {
    float *scratch = hd_stream_scratch(s, 0, hd_muon_scratch(a->rows, a->cols));
    for (int32_t i = 0; i < a->n; i++) back_muon_matrix(a, i, scratch);
}

/* ---- rounding ---- */

static float largest_of(hd_dtype t) {
    return hd_dtypes[t].decode(hd_dtypes[t].largest);
}

static void put_code(hd_dtype t, uint8_t *to, int64_t at, uint32_t code) {
    const size_t bytes = (size_t)hd_dtypes[t].bits / 8;
    memcpy(to + (size_t)at * bytes, &code, bytes);
}

/* Returns whether all fit. */
static bool round_plain(const hd_round_weights_args *a, int32_t k) {
    const hd_dtype type = a->like.type;
    bool fits = true;
    for (int64_t i = 0; i < (int64_t)a->like.rows * a->like.cols; i++) {
        const uint32_t code = hd_dtypes[type].encode(a->values[k][i]);
        const float rounded = hd_dtypes[type].decode(code);
        fits = fits && fabsf(rounded) <= largest_of(type);
        put_code(a->widened ? HD_F32 : type, a->data[k], i,
                 a->widened ? hd_f32_bits(rounded) : code);
    }
    return fits;
}

static void put_element(const hd_weight *like, uint8_t *data, int64_t at, float value,
                        float s) {
    if (like->type == HD_E4M3) {
        data[at] = (uint8_t)hd_round_e4m3(value / s);
        return;
    }
    const bool signed_zeros = like->scale_type == HD_E4M3;
    const uint32_t code = hd_round_e2m1(value / s, signed_zeros && value < 0);
    data[at / 2] = (uint8_t)(at % 2 ? (data[at / 2] & 15u) | code << 4 : code);
}

/* One block, whose scale is number `at`. */
static bool round_block(const hd_round_weights_args *a, int32_t k, int32_t row, int32_t col,
                        int64_t at) {
    const hd_weight *w = &a->like;
    const int32_t rows = hd_min_i32(row + w->block_rows, w->rows);
    const int32_t cols = hd_min_i32(col + w->block_cols, w->cols);
    const float largest = largest_of(w->type);
    const float global = w->scale_type == HD_E4M3 ? w->global : 0.0f;
    float amax = 0.0f;
    bool fits = true;
    for (int32_t r = row; r < rows; r++) {
        for (int32_t c = col; c < cols; c++) {
            const float x = fabsf(a->values[k][(int64_t)r * w->cols + c]);
            fits = fits && x <= FLT_MAX;
            amax = x > amax ? x : amax;
        }
    }
    const hd_dtype_row *scale = &hd_dtypes[w->scale_type];
    const uint32_t code = scale->encode(hd_round_scale(amax, largest, global, w->power_scales));
    const float s = fmaxf(scale->decode(code) * (global != 0.0f ? global : 1.0f), FLT_MIN);
    put_code(w->scale_type, a->scale[k], at, code);
    for (int32_t r = row; r < rows; r++) {
        for (int32_t c = col; c < cols; c++) {
            const int64_t i = (int64_t)r * w->cols + c;
            put_element(w, a->data[k], i, a->values[k][i], s);
        }
    }
    return fits && (global == 0.0f || amax <= 7.0f * largest_of(HD_E4M3) * global);
}

static bool round_matrix(const hd_round_weights_args *a, int32_t k) {
    const hd_weight *w = &a->like;
    int64_t at = 0;
    bool fits = true;
    if (w->scale_type == HD_NONE) return round_plain(a, k);
    for (int32_t r = 0; r < w->rows; r += w->block_rows) {
        for (int32_t c = 0; c < w->cols; c += w->block_cols) {
            fits = round_block(a, k, r, c, at++) && fits;
        }
    }
    return fits;
}

void hd_round_weights_ref(hd_stream *s, const hd_round_weights_args *a) {
    (void)s;
    for (int32_t k = 0; k < a->n; k++) {
        if (!round_matrix(a, k)) a->bad[k] = 1;
    }
}
