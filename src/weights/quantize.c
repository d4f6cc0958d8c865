/* quantize.c - rounding to FP8 and FP4, one row of blocks at a time: convert to float32, find
 * each block's scale, encode. */
#include "weights/quantize.h"

#include <math.h>
#include <stdlib.h>

#include "base/checked.h"

static const float LEAST = 1e-12f; /* the exporters' bound: a block of zeros has a scale, too */

static float largest_of(hd_dtype t) {
    return hd_dtypes[t].decode(hd_dtypes[t].largest);
}

bool hd_can_quantize(const hd_weight *like) {
    if (!like->scale || like->block_rows < 1 || like->block_cols < 1) return false;
    if (like->type == HD_E4M3) return true;
    return like->type == HD_E2M1 && like->scale_type == HD_E8M0;
}

static float power_of_two_up(float x) {
    int exponent;
    const float mantissa = frexpf(x, &exponent);
    return ldexpf(1.0f, exponent - (mantissa == 0.5f));
}

/* Part of a row of blocks: columns col0 .. col0 + cols of rows rows of floats. */
typedef struct block {
    const float *values;
    int32_t stride, rows, col0, cols;
} block;

static float amax_of(const block *b) {
    float amax = 0;
    for (int32_t r = 0; r < b->rows; r++) {
        const float *row = b->values + (int64_t)r * b->stride + b->col0;
        for (int32_t c = 0; c < b->cols; c++) amax = fmaxf(amax, fabsf(row[c]));
    }
    return amax;
}

static uint32_t put_scale(const hd_weight *like, uint8_t *scale, int64_t at, float amax) {
    const hd_dtype_row *row = &hd_dtypes[like->scale_type];
    float s = fmaxf(amax, LEAST) / largest_of(like->type);
    if (like->power_scales) s = power_of_two_up(s);
    const uint32_t code = row->encode(s);
    memcpy(scale + (size_t)at * (size_t)row->bits / 8, &code, (size_t)row->bits / 8);
    return code;
}

static void put_e4m3(const block *b, uint8_t *out, float s) {
    for (int32_t r = 0; r < b->rows; r++) {
        const int64_t at = (int64_t)r * b->stride + b->col0;
        for (int32_t c = 0; c < b->cols; c++) {
            out[at + c] = hd_f32_to_e4m3(b->values[at + c] / s);
        }
    }
}

/* The code of zero has no sign. */
static uint8_t e2m1_of(float f) {
    const uint8_t code = hd_f32_to_e2m1(f);
    return code == 8 ? 0 : code;
}

/* Blocks of an even number of columns: two codes per byte, the even column in the low one. */
static void put_e2m1(const block *b, uint8_t *out, float s) {
    for (int32_t r = 0; r < b->rows; r++) {
        const int64_t at = (int64_t)r * b->stride + b->col0;
        for (int32_t c = 0; c < b->cols; c += 2) {
            const uint8_t low = e2m1_of(b->values[at + c] / s);
            const uint8_t high = e2m1_of(b->values[at + c + 1] / s);
            out[(at + c) / 2] = (uint8_t)(low | high << 4);
        }
    }
}

hd_status hd_quantize(const hd_weight *like, uint8_t *data, uint8_t *scale, hd_dtype type,
                      const void *values, hd_err *err) {
    const int32_t cols = like->cols, height = hd_min_i32(like->block_rows, like->rows);
    const int64_t per_row = hd_ceil_div(cols, like->block_cols);
    float *band = calloc((size_t)height * (size_t)cols + 1, sizeof *band);
    if (!band) return HD_FAIL(err, HD_ENOMEM, "no memory to quantize %d columns", cols);
    for (int32_t r = 0; r < like->rows; r += like->block_rows) {
        const int32_t rows = hd_min_i32(like->block_rows, like->rows - r);
        const int64_t first = (int64_t)r * cols, n = (int64_t)rows * cols;
        for (int64_t i = 0; i < n; i++) band[i] = hd_dtype_at(type, values, first + i);
        for (int32_t c = 0; c < cols; c += like->block_cols) {
            const block b = {band, cols, rows, c, hd_min_i32(like->block_cols, cols - c)};
            const int64_t at = r / like->block_rows * per_row + c / like->block_cols;
            const uint32_t code = put_scale(like, scale, at, amax_of(&b));
            const float s = hd_dtypes[like->scale_type].decode(code);
            if (like->type == HD_E4M3) {
                put_e4m3(&b, data + first, s);
            } else {
                put_e2m1(&b, data + first / 2, s);
            }
        }
    }
    free(band);
    return HD_OK;
}

bool hd_convert(hd_dtype to, uint8_t *out, hd_dtype from, const void *values, int64_t n) {
    const hd_dtype_row *row = &hd_dtypes[to];
    const size_t bytes = (size_t)row->bits / 8;
    const float largest = largest_of(to);
    bool fits = true;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t code = row->encode(hd_dtype_at(from, values, i));
        fits = fits && fabsf(row->decode(code)) <= largest;
        memcpy(out + (size_t)i * bytes, &code, bytes);
    }
    return fits;
}
