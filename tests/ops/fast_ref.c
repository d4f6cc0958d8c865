/* fast_ref.c - reference of --precision fast: its orders of summation and its roundings. */
#include "ops/fast_ref.h"

#include <math.h>

#include "ops/ref/act_internal.h"

enum { SEGMENT = 128, SUMS = 16, STEPS = 4 };

/* ---- stored elements ---- */

static float scale_at(const hd_weight *w, int32_t row, int32_t col) {
    if (!w->scale) return 1.0f;
    const int32_t per_row = (w->cols + w->block_cols - 1) / w->block_cols;
    const int64_t i = (int64_t)(row / w->block_rows) * per_row + col / w->block_cols;
    return hd_dtype_at(w->scale_type, w->scale, i) * w->global;
}

static float element_at(const hd_weight *w, int32_t row, int32_t col) {
    hd_weight plain = *w;
    plain.scale = NULL;
    plain.global = 1.0f;
    return col < w->cols ? hd_weight_at(&plain, row, col) : 0.0f;
}

/* Whether the columns of a sum have several scales in a segment. */
static bool is_fine(const hd_weight *w) {
    return w->type == HD_E4M3 && w->block_cols == 32;
}

/* ---- bfloat16 ---- */

/* Returns the two columns of a segment that sum `lane` adds in step q. */
static void pair_of(int32_t pair[2], hd_dtype type, int32_t lane, int32_t q) {
    switch (type) {
    case HD_E2M1:
        pair[0] = 8 * lane + q;
        pair[1] = pair[0] + 4;
        return;
    case HD_E4M3:
        pair[0] = q / 2 * 64 + lane / 4 * 16 + q % 2 * 8 + lane % 4 * 2;
        break;
    default:
        pair[0] = q * 32 + lane * 2;
    }
    pair[1] = pair[0] + 1;
}

static float rounded(const float *x, int32_t n, int32_t col) {
    return col < n ? hd_bf16_to_f32(hd_f32_to_bf16(x[col])) : 0.0f;
}

static float dot_bf16(const hd_weight *w, int32_t row, const float *x) {
    float sum[SUMS] = {0};
    for (int32_t c = 0; c < w->cols; c += SEGMENT) {
        for (int32_t lane = 0; lane < SUMS; lane++) {
            const int32_t steps = is_fine(w) ? STEPS / 2 : STEPS;
            for (int32_t first = 0; first < STEPS; first += steps) {
                float part = 0.0f;
                int32_t pair[2];
                for (int32_t q = first; q < first + steps; q++) {
                    pair_of(pair, w->type, lane, q);
                    for (int32_t second = 1; second >= 0; second--) {
                        const int32_t col = c + pair[second];
                        part = fmaf(rounded(x, w->cols, col), element_at(w, row, col), part);
                    }
                }
                /* All columns of a part share a scale; beyond the row's end nothing is added. */
                pair_of(pair, w->type, lane, first);
                if (c + pair[0] >= w->cols) continue;
                const float scale = scale_at(w, row, c + pair[0]);
                sum[lane] =
                    w->type == HD_BF16 ? sum[lane] + part : fmaf(part, scale, sum[lane]);
            }
        }
    }
    float four[4];
    for (int32_t i = 0; i < 4; i++) {
        const float *s = sum + 4 * i;
        four[i] = (s[0] + s[2]) + (s[1] + s[3]);
    }
    return (four[0] + four[1]) + (four[2] + four[3]);
}

/* ---- 16-bit integers ---- */

enum { INT16_SUMS = 8, LIMIT = 8191 };

/* Returns the largest magnitude of a segment; NaN and infinity count as larger than any
 * number. */
static float largest(const float *x, int32_t n) {
    uint32_t top = 0;
    for (int32_t i = 0; i < n; i++) {
        const uint32_t bits = hd_f32_bits(x[i]) & INT32_MAX;
        top = bits > top ? bits : top;
    }
    return hd_f32_from_bits(top);
}

/* Returns the sum of its segment that column `col` is added to. */
static int32_t sum_of(hd_dtype type, int32_t col) {
    static const int32_t of_block[INT16_SUMS] = {0, 1, 4, 5, 2, 3, 6, 7};
    return type == HD_E2M1 ? of_block[col / 16] : col % 32 / 16 * 4 + col % 8 / 2;
}

/* Writes columns [col, col + n) of a row, each times 512, or times 32 and rounded, halves up.
 * Returns the factor that undoes it; NaN or infinity if an element has no number. */
static float int16_elements(int32_t *out, const hd_weight *w, int32_t row, int32_t col,
                            int32_t n) {
    float element[SEGMENT], most = 0.0f;
    for (int32_t i = 0; i < n; i++) {
        element[i] = element_at(w, row, col + i);
        if (isnan(element[i])) return NAN;
        most = fmaxf(most, fabsf(element[i]));
    }
    const bool coarse = w->type == HD_E4M3 && most >= 32.0f;
    for (int32_t i = 0; i < n; i++) {
        out[i] = coarse ? (int32_t)floorf(element[i] * 32.0f + 0.5f)
                        : (int32_t)(element[i] * 512.0f);
    }
    return coarse ? 0x1p-5f : 0x1p-9f;
}

/* as `exact` computes it */
static float dot_exact(const hd_weight *w, int32_t row, const float *x) {
    float sum[SUMS] = {0};
    for (int32_t c = 0; c < w->cols; c++) {
        sum[c % SUMS] = fmaf(x[c], element_at(w, row, c), sum[c % SUMS]);
    }
    for (int32_t half = SUMS / 2; half > 0; half /= 2) {
        for (int32_t i = 0; i < half; i++) sum[i] += sum[i + half];
    }
    return sum[0];
}

static float dot_int16(const hd_weight *w, int32_t row, const float *x) {
    float sums[2][INT16_SUMS] = {{0}}; /* of even and odd segments */
    if (w->type == HD_BF16) return dot_exact(w, row, x);
    for (int32_t c = 0; c < w->cols; c += SEGMENT) {
        const int32_t n = w->cols - c < SEGMENT ? w->cols - c : SEGMENT;
        const float top = largest(x + c, n), by = top < 0x1p-100f ? 0.0f : (float)LIMIT / top;
        int32_t element[SEGMENT] = {0};
        float *sum = sums[c / SEGMENT % 2];
        const float unit = int16_elements(element, w, row, c, n);
        const int32_t span = is_fine(w) ? 32 : SEGMENT;
        for (int32_t first = 0; first < SEGMENT; first += span) {
            int32_t count[INT16_SUMS] = {0};
            float scale[INT16_SUMS] = {0};
            for (int32_t i = first; i < n && i < first + span; i++) {
                const int32_t s = sum_of(w->type, i);
                count[s] += (int32_t)lrintf(x[c + i] * by) * element[i];
                scale[s] = scale_at(w, row, c + i);
            }
            for (int32_t s = 0; s < INT16_SUMS; s++) {
                sum[s] = fmaf((float)count[s], scale[s] * unit * (top / (float)LIMIT), sum[s]);
            }
        }
    }
    float sum[INT16_SUMS];
    for (int32_t s = 0; s < INT16_SUMS; s++) sum[s] = sums[0][s] + sums[1][s];
    return ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
}

/* ---- operators ---- */

typedef float dot_fn(const hd_weight *w, int32_t row, const float *x);

static void linear(dot_fn *dot, const hd_linear_args *a) {
    for (int32_t r = 0; r < a->rows; r++) {
        const float *x = act_in(a->x) + r * stride_of(a->x, a->w->cols);
        float *y = act(a->out) + r * stride_of(a->out, a->w->rows);
        for (int32_t o = 0; o < a->w->rows; o++) y[o] = dot(a->w, o, x);
    }
}

static void linear_heads(dot_fn *dot, const hd_linear_heads_args *a) {
    const int64_t x_row = stride_of(a->x, (int64_t)a->heads * a->x_head);
    const int64_t out_row = stride_of(a->out, (int64_t)a->heads * a->out_head);
    for (int32_t r = 0; r < a->rows; r++) {
        for (int32_t h = 0; h < a->heads; h++) {
            const float *x = act_in(a->x) + r * x_row + (int64_t)h * a->x_head;
            float *y = act(a->out) + r * out_row + (int64_t)h * a->out_head;
            const int32_t first = a->first_row + h * a->head_rows;
            for (int32_t o = 0; o < a->n_rows; o++) y[o] = dot(a->w, first + o, x);
        }
    }
}

static void grouped_gemm(dot_fn *dot, const hd_grouped_gemm_args *a) {
    for (int32_t e = 0; e < a->w->n; e++) {
        const hd_weight *w = &a->w->slots[e];
        for (int32_t i = a->offset[e]; i < a->offset[e + 1]; i++) {
            const int32_t row = a->assignment ? a->assignment[i] / a->top_k : i;
            const float *x = act_in(a->x) + (int64_t)row * w->cols;
            float *y = act(a->out) + (int64_t)i * w->rows;
            for (int32_t o = 0; o < w->rows; o++) y[o] = dot(w, o, x);
        }
    }
}

/* Operators have no context, so each form has a function. */
#define ENTRY(op, form)                                              \
    static void op##_##form(hd_stream *s, const hd_##op##_args *a) { \
        (void)s;                                                     \
        op(dot_##form, a);                                           \
    }
ENTRY(linear, bf16)
ENTRY(linear_heads, bf16)
ENTRY(grouped_gemm, bf16)
ENTRY(linear, int16)
ENTRY(linear_heads, int16)
ENTRY(grouped_gemm, int16)

void fast_ref_table(hd_ops *t, fast_form form) {
    hd_ops_init_ref(t, HD_EXACT);
    t->name = form == FAST_BF16 ? "ref, fast in bf16" : "ref, fast in whole numbers";
    t->linear = form == FAST_BF16 ? linear_bf16 : linear_int16;
    t->linear_heads = form == FAST_BF16 ? linear_heads_bf16 : linear_heads_int16;
    t->grouped_gemm = form == FAST_BF16 ? grouped_gemm_bf16 : grouped_gemm_int16;
}
