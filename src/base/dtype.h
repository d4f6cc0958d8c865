/* dtype.h - number formats of checkpoints and caches: element types, stored formats, and
 * hd_weight, a stored matrix.
 *
 * A number format is a row of one of two tables. hd_dtypes has a row per element type: name,
 * bits, reference decode and encode. hd_formats has a row per format of a stored matrix (BF16,
 * FP8, FP4, NVFP4): element type, block, scale types, names in files. Loaders, summaries,
 * random weights, benchmarks and tests walk these rows.
 *
 * Sources: IEEE 754; OCP 8-bit Floating Point (E4M3, no infinities, 0x7f is NaN); OCP
 * Microscaling Formats (E2M1, E8M0). All decoding is exact. Encoding rounds to nearest, ties
 * to even, and saturates if the format has no infinity. */
#ifndef HD_BASE_DTYPE_H
#define HD_BASE_DTYPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "base/random_fill.h"
#include "base/status.h"

HD_BEGIN_C

/* ---- element types ---- */

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

/* A code is the bit pattern of one element. Codes are packed in little-endian order of bits,
 * so element i begins at bit i * bits. */
typedef struct hd_dtype_row {
    const char *name;      /* in messages and reports: "BF16", "F4_E2M1" */
    const char *file_name; /* in safetensors files: "BF16", "F4" */
    int32_t bits;
    /* Reference conversions; NULL for integers. decode ignores bits above the code. */
    float (*decode)(uint32_t code);
    uint32_t (*encode)(float f);
    uint32_t sign;    /* the sign's bit; 0: no negative numbers */
    uint32_t largest; /* code of the largest number; above are only infinity and NaN */
    /* Random numbers of either sign, as a repeated pattern: the bits of random_set, and random
     * bits where random_keep has a bit. Their root mean square is random_rms. */
    uint32_t random_keep, random_set;
    double random_rms; /* 0: no random matrices */
} hd_dtype_row;

extern const hd_dtype_row hd_dtypes[HD_N_DTYPES];

int32_t hd_dtype_bits(hd_dtype t);
const char *hd_dtype_name(hd_dtype t);
size_t hd_dtype_bytes(hd_dtype t, int64_t n); /* of n elements that end on a whole byte */

/* Element i of an array as float; at any address. */
float hd_dtype_at(hd_dtype t, const void *data, int64_t i);

/* The pattern that repeats one number, if the type has 8 bits or more. */
hd_random_fill hd_dtype_repeat(hd_dtype t, float f);

/* The pattern of random numbers between f and 2 f of either sign, f a power of two. Types of
 * 8 bits or less have scales for that: their pattern is the row's. */
hd_random_fill hd_dtype_random(hd_dtype t, float f);

/* ---- formats of stored matrices ---- */

typedef enum hd_format {
    HD_FORMAT_NONE, /* a config declares none */
    HD_FORMAT_F32,
    HD_FORMAT_F16,
    HD_FORMAT_BF16,
    HD_FORMAT_FP8,   /* E4M3 in blocks, 128 x 128 or as the config declares */
    HD_FORMAT_MXFP8, /* E4M3, E8M0 scale per 32 columns */
    HD_FORMAT_FP4,   /* MXFP4: E2M1, E8M0 scale per 32 columns */
    HD_FORMAT_NVFP4, /* E2M1, E4M3 scale per 16 columns and one global scale */
    HD_N_FORMATS
} hd_format;

enum { HD_FORMAT_TYPES = 4, HD_FORMAT_NAMES = 3 };

typedef struct hd_format_row {
    const char *name; /* "BF16", "FP8" */
    const char *key;  /* the config's word: "bfloat16", "fp8" */
    hd_dtype type;
    /* dtypes of the data tensor in files; I8 and U8 are bytes of packed elements. HD_NONE ends
     * this list and the next. */
    hd_dtype file_types[HD_FORMAT_TYPES];
    hd_dtype scale_types[HD_FORMAT_TYPES]; /* none: no scales */
    int32_t block_rows, block_cols;
    bool block_declared; /* the config's weight_block_size replaces the block */
    bool zero_scales;    /* a zero scale is valid: all elements of its block are zero */
    int32_t n_scalars;   /* F32 scalars beside: global scale and input scale */
    /* Names of the scale tensor, and of the global scale (NULL: none), after the name of the
     * data tensor without ".weight". NULL ends the list. */
    const char *scale_names[HD_FORMAT_NAMES];
    const char *global_name;
} hd_format_row;

extern const hd_format_row hd_formats[HD_N_FORMATS];

/* How one matrix is stored: its data array and its scales. */
typedef struct hd_stored_format {
    hd_dtype type;
    hd_dtype scale_type; /* HD_NONE: no scales */
    int32_t block_rows, block_cols;
    int32_t n_scalars; /* F32 scalars beside */
} hd_stored_format;

/* Whether a list of a row contains t. */
bool hd_format_lists(const hd_dtype types[HD_FORMAT_TYPES], hd_dtype t);

/* A row's block and first scale type. */
hd_stored_format hd_format_stored(hd_format f);

/* Sizes of a matrix [rows, cols] or a part of it. */
size_t hd_stored_data_bytes(const hd_stored_format *f, int32_t rows, int32_t cols);
int64_t hd_stored_scales(const hd_stored_format *f, int32_t rows, int32_t cols);
size_t hd_stored_scale_bytes(const hd_stored_format *f, int32_t rows, int32_t cols);

/* A stored matrix W [rows, cols], row-major, possibly quantized:
 *
 *     W[r, c] = element[r, c] * scale[r / block_rows, c / block_cols] * global
 *
 * Blocks at the right and lower edge may be smaller. The struct owns nothing: the arrays lie
 * in the mapped checkpoint and may be unaligned for their type. */
typedef struct hd_weight {
    const void *data;
    const void *scale; /* [ceil(rows / block_rows), ceil(cols / block_cols)]; NULL: no scales */
    hd_dtype type;     /* a row of complete bytes: of E2M1, cols is even */
    hd_dtype scale_type;
    int32_t rows, cols;
    int32_t block_rows, block_cols; /* 128 x 128, 1 x 32, 1 x 16; 0 without scales */
    float global;                   /* 1 except for NVFP4 */
    bool power_scales; /* the model's scales are powers of two, those of activations too */
    int32_t x_group;   /* columns of x that share a scale where x is rounded; 0: 128 */
} hd_weight;

hd_stored_format hd_weight_format(const hd_weight *w); /* of its row, but for the block */

/* Returns one element of the dequantized matrix; fast versions are tested against it. */
float hd_weight_at(const hd_weight *w, int32_t row, int32_t col);

/* ---- single conversions ---- */

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

uint16_t hd_f32_to_f16(float f); /* beyond 65504: infinity */
uint16_t hd_f32_to_bf16(float f);
uint8_t hd_f32_to_e4m3(float f); /* saturates at 448; NaN stays NaN */
uint8_t hd_f32_to_e2m1(float f); /* saturates at 6 */
uint8_t hd_f32_to_e8m0(float f); /* the nearest power of two; NaN if f is negative or NaN */

HD_END_C

#endif
