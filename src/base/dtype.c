/* dtype.c - the tables of number formats, and exact conversions of single elements. Fast
 * dequantization is in ops/. */
#include "base/dtype.h"

#include <assert.h>
#include <math.h>

#include "base/checked.h"

/* ---- single conversions ---- */

float hd_f16_to_f32(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    uint32_t exponent = (h >> 10) & 31u, mantissa = h & 0x3ffu;
    if (exponent == 0) {
        float f = (float)mantissa * 0x1p-24f;
        return sign ? -f : f;
    }
    if (exponent == 31) return hd_f32_from_bits(sign | 0x7f800000u | mantissa << 13);
    return hd_f32_from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}

float hd_e4m3_to_f32(uint8_t b) {
    uint32_t sign = (uint32_t)(b & 0x80u) << 24;
    uint32_t exponent = (b >> 3) & 15u, mantissa = b & 7u;
    if (exponent == 15 && mantissa == 7) return hd_f32_from_bits(sign | 0x7fc00000u);
    if (exponent == 0) {
        float f = (float)mantissa * 0x1p-9f;
        return sign ? -f : f;
    }
    return hd_f32_from_bits(sign | (exponent + 120) << 23 | mantissa << 20);
}

float hd_e2m1_to_f32(uint8_t nibble) {
    static const float values[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                     -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
    return values[nibble & 15];
}

uint16_t hd_f32_to_f16(float f) {
    const uint32_t bits = hd_f32_bits(f), sign = bits >> 16 & 0x8000u;
    const float a = fabsf(f);
    if (isnan(a)) return (uint16_t)(sign | 0x7e00u);
    if (a >= 65520.0f) return (uint16_t)(sign | 0x7c00u);
    if (a < 0x1p-14f) return (uint16_t)(sign | (uint32_t)lrintf(a * 0x1p24f));
    uint32_t m = hd_f32_bits(a);
    m += 0xfffu + (m >> 13 & 1u);
    return (uint16_t)(sign | ((m >> 13) - (112u << 10)));
}

uint16_t hd_f32_to_bf16(float f) {
    uint32_t bits = hd_f32_bits(f);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40u); /* NaN */
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

uint8_t hd_f32_to_e4m3(float f) {
    uint32_t bits = hd_f32_bits(f);
    uint8_t sign = (uint8_t)(bits >> 24 & 0x80u);
    float a = fabsf(f);
    if (isnan(a)) return (uint8_t)(sign | 0x7fu);
    if (a >= 448.0f) return (uint8_t)(sign | 0x7eu);
    if (a < 0x1p-6f) return (uint8_t)(sign | (uint8_t)lrintf(a * 0x1p9f)); /* 8 is 2^-6 */
    uint32_t m = hd_f32_bits(a);
    m += 0x7ffffu + (m >> 20 & 1u);
    return (uint8_t)(sign | (uint8_t)((m >> 20) - (120u << 3)));
}

uint8_t hd_f32_to_e2m1(float f) {
    /* Midpoints between neighbors; a tie goes to the even code. */
    static const float mid[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
    uint8_t sign = signbit(f) ? 8 : 0, code = 0;
    float a = fabsf(f);
    while (code < 7 && (a > mid[code] || (a == mid[code] && (code & 1)))) code++;
    return (uint8_t)(sign | code);
}

uint8_t hd_f32_to_e8m0(float f) {
    if (isnan(f) || signbit(f)) return 255;
    if (f == 0) return 0;
    if (isinf(f)) return 254;
    const long power = 127 + lroundf(log2f(f));
    return (uint8_t)(power < 0 ? 0 : power > 254 ? 254 : power);
}

/* ---- element types ---- */

#define CONVERSIONS(name, type)                 \
    static float name##_decode(uint32_t code) { \
        return hd_##name##_to_f32((type)code);  \
    }                                           \
    static uint32_t name##_encode(float f) {    \
        return hd_f32_to_##name(f);             \
    }
CONVERSIONS(f16, uint16_t)
CONVERSIONS(bf16, uint16_t)
CONVERSIONS(e4m3, uint8_t)
CONVERSIONS(e8m0, uint8_t)
CONVERSIONS(e2m1, uint8_t)

/* Random numbers of types without scales have any sign and mantissa, and one exponent: they
 * lie between 1 and 2. Those of E4M3 have every other exponent of the upper half, because
 * checkpoints scale blocks up to the type's limit. */
#define RMS_1_TO_2 1.5275

#define INTEGER(t, n) \
    { .name = #t, .file_name = #t, .bits = n }

const hd_dtype_row hd_dtypes[HD_N_DTYPES] = {
    [HD_F32] = {.name = "F32",
                .file_name = "F32",
                .bits = 32,
                .decode = hd_f32_from_bits,
                .encode = hd_f32_bits,
                .sign = 0x80000000u,
                .largest = 0x7f7fffff,
                .random_keep = 0x807fffffu,
                .random_set = 0x3f800000,
                .random_rms = RMS_1_TO_2},
    [HD_F16] = {.name = "F16",
                .file_name = "F16",
                .bits = 16,
                .decode = f16_decode,
                .encode = f16_encode,
                .sign = 0x8000,
                .largest = 0x7bff,
                .random_keep = 0x83ff83ffu,
                .random_set = 0x3c003c00,
                .random_rms = RMS_1_TO_2},
    [HD_BF16] = {.name = "BF16",
                .file_name = "BF16",
                .bits = 16,
                .decode = bf16_decode,
                .encode = bf16_encode,
                .sign = 0x8000,
                .largest = 0x7f7f,
                .random_keep = 0x807f807fu,
                .random_set = 0x3f803f80,
                .random_rms = RMS_1_TO_2},
    [HD_E4M3] = {.name = "F8_E4M3",
                .file_name = "F8_E4M3",
                .bits = 8,
                .decode = e4m3_decode,
                .encode = e4m3_encode,
                .sign = 0x80,
                .largest = 0x7e,
                .random_keep = 0xb7b7b7b7u,
                .random_set = 0x40404040,
                .random_rms = 96.9},
    [HD_E8M0] = {.name = "F8_E8M0",
                .file_name = "F8_E8M0",
                .bits = 8,
                .decode = e8m0_decode,
                .encode = e8m0_encode,
                .largest = 0xfe},
    [HD_E2M1] = {.name = "F4_E2M1",
                .file_name = "F4",
                .bits = 4,
                .decode = e2m1_decode,
                .encode = e2m1_encode,
                .sign = 8,
                .largest = 7,
                .random_keep = 0xffffffffu,
                .random_rms = 2.93},
    [HD_I8] = INTEGER(I8, 8),
    [HD_U8] = INTEGER(U8, 8),
    [HD_I32] = INTEGER(I32, 32),
    [HD_I64] = INTEGER(I64, 64),
    [HD_NONE] = {.name = "none"      },
};

int32_t hd_dtype_bits(hd_dtype t) {
    return hd_dtypes[t].bits;
}

const char *hd_dtype_name(hd_dtype t) {
    return hd_dtypes[t].name;
}

size_t hd_dtype_bytes(hd_dtype t, int64_t n) {
    return (size_t)n * (size_t)hd_dtypes[t].bits / 8;
}

/* The code of element i, of at most 32 bits; with bits of the next one above it. */
static uint32_t code_at(const uint8_t *data, int64_t i, int32_t bits) {
    const int64_t bit = i * bits;
    const uint8_t *p = data + bit / 8;
    uint32_t code = 0;
    uint16_t half;
    switch (bits) {
    case 32:
        memcpy(&code, p, sizeof code);
        return code;
    case 16:
        memcpy(&half, p, sizeof half);
        return half;
    default: /* 8 or less, in one byte or across two */
        code = p[0];
        if (bit % 8 + bits > 8) code |= (uint32_t)p[1] << 8;
        return code >> (bit % 8);
    }
}

float hd_dtype_at(hd_dtype t, const void *data, int64_t i) {
    const hd_dtype_row *row = &hd_dtypes[t];
    assert(row->decode && "not a float type");
    return row->decode(code_at(data, i, row->bits));
}

hd_random_fill hd_dtype_repeat(hd_dtype t, float f) {
    const hd_dtype_row *row = &hd_dtypes[t];
    assert(row->encode && 32 % row->bits == 0);
    uint32_t word = row->encode(f);
    for (int32_t bits = row->bits; bits < 32; bits *= 2) word |= word << bits;
    return (hd_random_fill){.set = word};
}

hd_random_fill hd_dtype_random(hd_dtype t, float f) {
    const hd_dtype_row *row = &hd_dtypes[t];
    const uint32_t set = row->bits > 8 ? hd_dtype_repeat(t, f).set : row->random_set;
    return (hd_random_fill){.keep = row->random_keep, .set = set};
}

/* ---- formats of stored matrices ---- */

#define LIST(...) \
    { __VA_ARGS__ }
#define PLAIN(word, t)                                                    \
    {                                                                     \
        .name = #t, .key = word, .type = HD_##t, .file_types = { HD_##t } \
    }

const hd_format_row hd_formats[HD_N_FORMATS] = {
    [HD_FORMAT_NVFP4] = {.name = "NVFP4",
                         .key = "nvfp4",
                         .type = HD_E2M1,
                         .file_types = LIST(HD_E2M1, HD_I8, HD_U8),
                         .scale_types = LIST(HD_E4M3),
                         .block_rows = 1,
                         .block_cols = 16,
                         .zero_scales = true,
                         .n_scalars = 2,
                         .scale_names = LIST(".weight_scale"),
                         .global_name = ".weight_scale_2"},
    [HD_FORMAT_FP8] = {.name = "FP8",
                         .key = "fp8",
                         .type = HD_E4M3,
                         .file_types = LIST(HD_E4M3),
                         .scale_types = LIST(HD_F32, HD_BF16, HD_E8M0),
                         .block_rows = 128,
                         .block_cols = 128,
                         .block_declared = true,
                         .scale_names = LIST(".weight_scale_inv", ".scale")},
    [HD_FORMAT_MXFP8] = {.name = "MXFP8",
                         .key = "mxfp8",
                         .type = HD_E4M3,
                         .file_types = LIST(HD_E4M3),
                         .scale_types = LIST(HD_E8M0),
                         .block_rows = 1,
                         .block_cols = 32,
                         .scale_names = LIST(".scale", ".weight_scale_inv")},
    [HD_FORMAT_FP4] = {.name = "FP4",
                         .key = "fp4",
                         .type = HD_E2M1,
                         .file_types = LIST(HD_E2M1, HD_I8, HD_U8),
                         .scale_types = LIST(HD_E8M0),
                         .block_rows = 1,
                         .block_cols = 32,
                         .scale_names = LIST(".scale", ".weight_scale_inv")},
    [HD_FORMAT_BF16] = PLAIN("bfloat16", BF16),
    [HD_FORMAT_F16] = PLAIN("float16", F16),
    [HD_FORMAT_F32] = PLAIN("float32", F32),
    [HD_FORMAT_NONE] = {.name = "none"            },
};

hd_stored_format hd_format_stored(hd_format f) {
    const hd_format_row *row = &hd_formats[f];
    return (hd_stored_format){.type = row->type,
                              .scale_type = row->scale_types[0],
                              .block_rows = row->block_rows,
                              .block_cols = row->block_cols,
                              .n_scalars = row->n_scalars};
}

size_t hd_stored_data_bytes(const hd_stored_format *f, int32_t rows, int32_t cols) {
    return (size_t)rows * (size_t)hd_ceil_div((int64_t)cols * hd_dtypes[f->type].bits, 8);
}

int64_t hd_stored_scales(const hd_stored_format *f, int32_t rows, int32_t cols) {
    if (f->scale_type == HD_NONE) return 0;
    return hd_ceil_div(rows, f->block_rows) * hd_ceil_div(cols, f->block_cols);
}

size_t hd_stored_scale_bytes(const hd_stored_format *f, int32_t rows, int32_t cols) {
    return hd_dtype_bytes(f->scale_type, hd_stored_scales(f, rows, cols));
}

bool hd_format_lists(const hd_dtype types[HD_FORMAT_TYPES], hd_dtype t) {
    for (int i = 0; i < HD_FORMAT_TYPES && types[i] != HD_NONE; i++) {
        if (types[i] == t) return true;
    }
    return false;
}

/* ---- stored matrices ---- */

hd_stored_format hd_weight_format(const hd_weight *w) {
    hd_stored_format f = {.type = w->type,
                          .scale_type = w->scale ? w->scale_type : HD_NONE,
                          .block_rows = w->block_rows,
                          .block_cols = w->block_cols};
    for (int k = 0; k < HD_N_FORMATS; k++) {
        const hd_format_row *row = &hd_formats[k];
        if (row->type == w->type && hd_format_lists(row->scale_types, w->scale_type)) {
            f.n_scalars = row->n_scalars;
        }
    }
    return f;
}

float hd_weight_at(const hd_weight *w, int32_t row, int32_t col) {
    const float v = hd_dtype_at(w->type, w->data, (int64_t)row * w->cols + col);
    if (!w->scale) return v;
    const int64_t per_row = hd_ceil_div(w->cols, w->block_cols);
    const int64_t i = row / w->block_rows * per_row + col / w->block_cols;
    return v * (hd_dtype_at(w->scale_type, w->scale, i) * w->global);
}
