/* dtype.h - number formats of checkpoints (BF16, FP8, FP4), and hd_weight, a stored matrix.
 *
 * Sources: IEEE 754; OCP 8-bit Floating Point (E4M3, no infinities, 0x7f is NaN); OCP
 * Microscaling Formats (E2M1, E8M0). All decoding is exact. Encoding rounds to nearest, ties
 * to even, and saturates if the format has no infinity. */
#ifndef HD_BASE_DTYPE_H
#define HD_BASE_DTYPE_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "base/status.h"

HD_BEGIN_C

typedef enum hd_dtype {
    HD_NONE, /* no such array */
    HD_F32,
    HD_F16,
    HD_BF16,
    HD_E4M3, /* 8-bit float */
    HD_E8M0, /* 8-bit power of two: 2^(b - 127), 255 is NaN */
    HD_E2M1, /* 4-bit float, two per byte, even column in the low nibble */
    HD_I8,
    HD_U8,
    HD_I32,
    HD_I64,
    HD_N_DTYPES
} hd_dtype;

int32_t hd_dtype_bits(hd_dtype t);
const char *hd_dtype_name(hd_dtype t); /* "BF16", "F8_E4M3", ... as safetensors spells them */

/* A stored matrix W [rows, cols], row-major, possibly quantized:
 *
 *     W[r, c] = element[r, c] * scale[r / block_rows, c / block_cols] * global
 *
 * Blocks at the right and lower edge may be smaller. The struct owns nothing: the arrays lie
 * in the mapped checkpoint and may be unaligned for their type. */
typedef struct hd_weight {
    const void *data;
    const void *scale; /* [ceil(rows / block_rows), ceil(cols / block_cols)]; NULL: no scales */
    hd_dtype type;     /* F32, F16, BF16, E4M3 or E2M1 (cols even) */
    hd_dtype scale_type; /* NONE, F32, BF16, E8M0 or E4M3 */
    int32_t rows, cols;
    int32_t block_rows, block_cols; /* 128 x 128, 1 x 32, 1 x 16; 0 without scales */
    float global;                   /* 1 except for NVFP4 */
    bool power_scales; /* the model's scales are powers of two, those of activations too */
} hd_weight;

/* Returns one element of the dequantized matrix; fast versions are tested against it. */
float hd_weight_at(const hd_weight *w, int32_t row, int32_t col);

static inline float hd_f32_from_bits(uint32_t bits) {
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static inline uint32_t hd_f32_bits(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

static inline float hd_bf16_to_f32(uint16_t b) {
    return hd_f32_from_bits((uint32_t)b << 16);
}

/* 2^(b - 127). b = 0 is a subnormal float, so setting the exponent field is not enough. */
static inline float hd_e8m0_to_f32(uint8_t b) {
    if (b == 0) return hd_f32_from_bits(0x00400000u);
    if (b == 255) return hd_f32_from_bits(0x7fc00000u);
    return hd_f32_from_bits((uint32_t)b << 23);
}

float hd_f16_to_f32(uint16_t h);
float hd_e4m3_to_f32(uint8_t b);
float hd_e2m1_to_f32(uint8_t nibble); /* low four bits */

uint16_t hd_f32_to_bf16(float f);
uint8_t hd_f32_to_e4m3(float f); /* saturates at 448; NaN stays NaN */
uint8_t hd_f32_to_e2m1(float f); /* saturates at 6 */

HD_END_C

#endif
