/* entry_ref.c - cached entries as float32, bfloat16, and FP8 with scales: hd_entry_scales in ops/types.h. */
#include <string.h>

#include "ops/ref/act_internal.h"
#include "ops/ref/ref_internal.h"

static const float LEAST = 1e-4f, LARGEST = 448.0f; /* magnitudes of a group and of E4M3 */

/* The smallest power of two that is not less. NaN and infinity: NaN. */
static uint8_t scale_above(float x) {
    int exponent;
    const float mantissa = frexpf(x, &exponent);
    if (!isfinite(x)) return UINT8_MAX;
    return (uint8_t)(exponent - (mantissa == 0.5f) + 127);
}

static uint8_t encode_group(uint8_t *code, const float *x, int32_t n) {
    float most = LEAST;
    for (int32_t i = 0; i < n; i++) {
        if (!(fabsf(x[i]) <= most)) most = fabsf(x[i]);
        if (isnan(most)) break;
    }
    const uint8_t scale = scale_above(most / LARGEST);
    const float s = hd_e8m0_to_f32(scale);
    for (int32_t i = 0; i < n; i++) code[i] = hd_f32_to_e4m3(x[i] / s);
    return scale;
}

static void encode(const hd_paged *p, uint8_t *to, const float *x) {
    const int32_t codes = p->width - p->scales.plain, group = p->scales.group;
    uint8_t *plain = to + codes, *scale = plain + 2 * p->scales.plain, *at = scale;
    for (int32_t i = 0; i < codes; i += group) {
        *at++ = encode_group(to + i, x + i, codes - i < group ? codes - i : group);
    }
    memset(at, 0, hd_paged_entry_bytes(p) - (size_t)(at - to));
    for (int32_t i = 0; i < p->scales.plain; i++) {
        const uint16_t b = hd_f32_to_bf16(x[codes + i]);
        memcpy(plain + 2 * i, &b, sizeof b);
    }
}

static void decode(const hd_paged *p, float *out, const uint8_t *from) {
    const int32_t codes = p->width - p->scales.plain;
    const uint8_t *plain = from + codes, *scale = plain + 2 * p->scales.plain;
    for (int32_t i = 0; i < codes; i++) {
        out[i] = hd_e4m3_to_f32(from[i]) * hd_e8m0_to_f32(scale[i / p->scales.group]);
    }
    for (int32_t i = 0; i < p->scales.plain; i++) {
        out[codes + i] = hd_dtype_at(HD_BF16, plain, i);
    }
}

const float *ops_read_entry(const hd_paged *p, int32_t seq, int32_t entry, float *room) {
    if (p->rows.type == HD_F32) return paged_entry(p, seq, entry);
    const uint8_t *from = paged_bytes(p, seq, entry);
    if (p->rows.type == HD_E4M3) {
        decode(p, room, from);
    } else {
        for (int32_t i = 0; i < p->width; i++) room[i] = hd_dtype_at(p->rows.type, from, i);
    }
    return room;
}

float *ops_entry_room(const hd_paged *p, int32_t seq, int32_t entry, float *room) {
    return p->rows.type == HD_F32 ? paged_entry(p, seq, entry) : room;
}

void ops_write_entry(const hd_paged *p, int32_t seq, int32_t entry, const float *from) {
    uint8_t *to = paged_bytes(p, seq, entry);
    if (p->rows.type == HD_E4M3) {
        encode(p, to, from);
    } else if (p->rows.type == HD_F32) {
        if ((const uint8_t *)from != to) memcpy(to, from, (size_t)p->width * sizeof *from);
    } else {
        for (int32_t i = 0; i < p->width; i++) {
            const uint16_t b = hd_f32_to_bf16(from[i]);
            memcpy(to + 2 * i, &b, sizeof b);
        }
    }
}
