/* dtype.c - exact conversions of single elements. Fast dequantization is in ops/. */
#include "base/dtype.h"

#include <assert.h>
#include <math.h>

static const struct {
    const char *name;
    int32_t bits;
} dtypes[HD_N_DTYPES] = {
    [HD_NONE] = {"none",    0 },
      [HD_F32] = {"F32",     32},
      [HD_F16] = {"F16",     16},
    [HD_BF16] = {"BF16",    16},
      [HD_E4M3] = {"F8_E4M3", 8 },
      [HD_E8M0] = {"F8_E8M0", 8 },
    [HD_E2M1] = {"F4_E2M1", 4 },
      [HD_I8] = {"I8",      8 },
      [HD_U8] = {"U8",      8 },
    [HD_I32] = {"I32",     32},
      [HD_I64] = {"I64",     64},
};

int32_t hd_dtype_bits(hd_dtype t) {
    return dtypes[t].bits;
}

const char *hd_dtype_name(hd_dtype t) {
    return dtypes[t].name;
}

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

static float element_at(const hd_weight *w, int32_t row, int32_t col) {
    const uint8_t *data = w->data;
    size_t i = (size_t)row * (size_t)w->cols + (size_t)col;
    float f;
    uint16_t half;
    switch (w->type) {
    case HD_F32:
        memcpy(&f, data + 4 * i, sizeof f);
        return f;
    case HD_F16:
        memcpy(&half, data + 2 * i, sizeof half);
        return hd_f16_to_f32(half);
    case HD_BF16:
        memcpy(&half, data + 2 * i, sizeof half);
        return hd_bf16_to_f32(half);
    case HD_E4M3:
        return hd_e4m3_to_f32(data[i]);
    case HD_E2M1:
        return hd_e2m1_to_f32((uint8_t)(data[i / 2] >> (4 * (i & 1))));
    case HD_NONE:
    case HD_E8M0:
    case HD_I8:
    case HD_U8:
    case HD_I32:
    case HD_I64:
    case HD_N_DTYPES:
        break;
    }
    assert(false && "not a matrix element type");
    return NAN;
}

static float scale_at(const hd_weight *w, int32_t row, int32_t col) {
    if (!w->scale) return 1.0f;
    const uint8_t *scale = w->scale;
    size_t per_row = ((size_t)w->cols + (size_t)w->block_cols - 1) / (size_t)w->block_cols;
    size_t i = (size_t)(row / w->block_rows) * per_row + (size_t)(col / w->block_cols);
    float f;
    uint16_t half;
    switch (w->scale_type) {
    case HD_F32:
        memcpy(&f, scale + 4 * i, sizeof f);
        return f;
    case HD_BF16:
        memcpy(&half, scale + 2 * i, sizeof half);
        return hd_bf16_to_f32(half);
    case HD_E8M0:
        return hd_e8m0_to_f32(scale[i]);
    case HD_E4M3:
        return hd_e4m3_to_f32(scale[i]);
    case HD_NONE:
    case HD_F16:
    case HD_E2M1:
    case HD_I8:
    case HD_U8:
    case HD_I32:
    case HD_I64:
    case HD_N_DTYPES:
        break;
    }
    assert(false && "not a scale type");
    return NAN;
}

float hd_weight_at(const hd_weight *w, int32_t row, int32_t col) {
    float v = element_at(w, row, col);
    return w->scale ? v * (scale_at(w, row, col) * w->global) : v;
}
