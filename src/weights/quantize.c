/* quantize.c - rounding to FP8, FP4 and NVFP4, one row of blocks at a time: convert to float32, find
 * each block's scale, encode.
 *
 * The loops over LANES columns have no branches and a fixed length, so that compilers vectorize
 * them; the last columns of a row are filled up with zeros. Codes are those of base/dtype.c. */
#include "weights/quantize.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/round_codes.h"

enum { LANES = 16 };

static float largest_of(hd_dtype t) {
    return hd_dtypes[t].decode(hd_dtypes[t].largest);
}

static bool has_global(const hd_weight *like) {
    return like->scale_type == HD_E4M3;
}

bool hd_can_quantize(const hd_weight *like) {
    if (!like->scale || like->block_rows < 1 || like->block_cols < 1) return false;
    if (like->type == HD_E4M3) return true;
    return like->type == HD_E2M1 && (like->scale_type == HD_E8M0 || has_global(like));
}

/* Part of a row of blocks: columns col0 .. col0 + cols of rows rows of floats. */
typedef struct block {
    const float *values;
    int32_t stride, rows, col0, cols;
} block;

/* LANES columns, or the last ones and zeros in place of further ones. */
static const float *lanes_of(const float *row, int32_t c, int32_t cols, float *last) {
    if (c + LANES <= cols) return row + c;
    memset(last, 0, LANES * sizeof *last);
    memcpy(last, row + c, (size_t)(cols - c) * sizeof *last);
    return last;
}

static void take_amax(float *restrict most, const float *restrict x) {
    for (int k = 0; k < LANES; k++) {
        const float a = fabsf(x[k]);
        most[k] = a > most[k] ? a : most[k];
    }
}

static float amax_of(const block *b) {
    float most[LANES] = {0}, last[LANES], amax = 0;
    for (int32_t r = 0; r < b->rows; r++) {
        const float *row = b->values + (int64_t)r * b->stride + b->col0;
        for (int32_t c = 0; c < b->cols; c += LANES) {
            take_amax(most, lanes_of(row, c, b->cols, last));
        }
    }
    for (int k = 0; k < LANES; k++) amax = most[k] > amax ? most[k] : amax;
    return amax;
}

static float scale_of(const hd_weight *like, float amax) {
    return hd_round_scale(amax, largest_of(like->type), has_global(like) ? like->global : 0.0f,
                          like->power_scales);
}

/* Returns the scale that is stored, times the global one. */
static float put_scale(const hd_weight *like, uint8_t *scale, int64_t at, float amax) {
    const hd_dtype_row *row = &hd_dtypes[like->scale_type];
    const uint32_t code = row->encode(scale_of(like, amax));
    memcpy(scale + (size_t)at * (size_t)row->bits / 8, &code, (size_t)row->bits / 8);
    return row->decode(code) * (has_global(like) ? like->global : 1.0f);
}

/* Halfway between E2M1's 6 and the 8 that it lacks, by the largest scale. */
static float most_of(const hd_weight *like) {
    return has_global(like) ? 7.0f * largest_of(like->scale_type) * like->global : INFINITY;
}

static void encode_e4m3(uint32_t *restrict code, const float *restrict x, float s) {
    for (int k = 0; k < LANES; k++) code[k] = hd_round_e4m3(x[k] / s);
}

/* signed_zeros: of negative numbers that round to zero, as NVFP4's exporter writes them; FP4's
 * writes zeros without sign. s is not 0. */
static void encode_e2m1(uint32_t *restrict code, const float *restrict x, float s,
                        bool signed_zeros) {
    for (int k = 0; k < LANES; k++) {
        code[k] = hd_round_e2m1(x[k] / s, signed_zeros && x[k] < 0);
    }
}

static void put_bytes(uint8_t *restrict out, const uint32_t *restrict code) {
    for (int k = 0; k < LANES; k++) out[k] = (uint8_t)code[k];
}

static void put_pairs(uint8_t *restrict out, const uint32_t *restrict code) {
    for (int k = 0; k < LANES / 2; k++) out[k] = (uint8_t)(code[2 * k] | code[2 * k + 1] << 4);
}

/* Columns of rows of a block, LANES at a time. */
static void put_block(const hd_weight *like, const block *b, uint8_t *out, float s) {
    const int32_t per_byte = like->type == HD_E4M3 ? 1 : 2; /* codes */
    const bool signed_zeros = has_global(like);
    float last[LANES];
    uint32_t code[LANES];
    uint8_t bytes[LANES];
    for (int32_t r = 0; r < b->rows; r++) {
        const int64_t at = (int64_t)r * b->stride + b->col0;
        for (int32_t c = 0; c < b->cols; c += LANES) {
            const float *x = lanes_of(b->values + at, c, b->cols, last);
            if (per_byte == 1) {
                encode_e4m3(code, x, s);
                put_bytes(bytes, code);
            } else { /* the even column in the low half */
                encode_e2m1(code, x, s, signed_zeros);
                put_pairs(bytes, code);
            }
            memcpy(out + (at + c) / per_byte, bytes,
                   (size_t)(hd_min_i32(LANES, b->cols - c) / per_byte));
        }
    }
}

static void f32_lanes(uint32_t *restrict out, const uint16_t *restrict half) {
    for (int k = 0; k < LANES; k++) out[k] = (uint32_t)half[k] << 16;
}

/* Elements first .. first + n as float32. */
static void take_f32(float *out, hd_dtype type, const void *values, int64_t first, int64_t n) {
    const uint8_t *from = (const uint8_t *)values + hd_dtype_bytes(type, first);
    int64_t i = 0;
    if (type == HD_F32) {
        memcpy(out, from, (size_t)n * sizeof *out);
        return;
    }
    for (; type == HD_BF16 && i + LANES <= n; i += LANES) {
        uint16_t half[LANES];
        uint32_t whole[LANES];
        memcpy(half, from + 2 * i, sizeof half);
        f32_lanes(whole, half);
        memcpy(out + i, whole, sizeof whole);
    }
    for (; i < n; i++) out[i] = hd_dtype_at(type, values, first + i);
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
        take_f32(band, type, values, first, n);
        for (int32_t c = 0; c < cols; c += like->block_cols) {
            const block b = {band, cols, rows, c, hd_min_i32(like->block_cols, cols - c)};
            const int64_t at = r / like->block_rows * per_row + c / like->block_cols;
            const float amax = amax_of(&b);
            /* of a scale that rounds to zero the exporter has infinite quotients, which are 0 again */
            const float s = fmaxf(put_scale(like, scale, at, amax), FLT_MIN);
            if (amax > most_of(like)) {
                free(band);
                return HD_FAIL(err, HD_EFORMAT,
                               "too large: %g, but the global scale, %g, stays", (double)amax,
                               (double)like->global);
            }
            put_block(like, &b, data + hd_dtype_bytes(like->type, first), s);
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
