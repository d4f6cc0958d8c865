/* entry_ref.c - numbers in groups with scales (ops/group_format.h): cached entries, and rows that are
 * rounded. */
#include <string.h>

#include "ops/ref/act_internal.h"
#include "ops/ref/ref_internal.h"

/* NaN if one of them is. */
static float largest_of(const float *x, int32_t n) {
    float most = 0.0f;
    for (int32_t i = 0; i < n && !isnan(most); i++) {
        if (!(fabsf(x[i]) <= most)) most = fabsf(x[i]);
    }
    return most;
}

/* The scale of the group that begins at column `at` of `end`, and how many columns it has. */
static float scale_at(hd_group_format f, const float *x, int32_t at, int32_t end, int32_t *n) {
    *n = end - at < f.group ? end - at : f.group;
    return hd_group_scale(f, largest_of(x + at, *n));
}

void ops_round_columns(hd_group_format f, float *out, const float *x, int32_t cols) {
    const int32_t end = cols - f.plain;
    for (int32_t at = 0, n; at < end; at += n) {
        const float scale = scale_at(f, x, at, end, &n);
        for (int32_t i = at; i < at + n; i++) out[i] = hd_group_number(f, x[i], scale);
    }
    for (int32_t i = end; i < cols; i++) out[i] = hd_bf16_to_f32(hd_f32_to_bf16(x[i]));
}

static void encode(const hd_paged *p, uint8_t *to, const float *x) {
    const hd_group_format f = p->format;
    const int32_t codes = p->width - f.plain;
    uint8_t *plain = to + hd_dtype_bytes(f.code, codes), *at = plain + 2 * f.plain;
    memset(to, 0, hd_paged_entry_bytes(p));
    for (int32_t c = 0, n; c < codes; c += n) {
        const float scale = scale_at(f, x, c, codes, &n);
        *at++ = (uint8_t)hd_dtypes[f.scale_type].encode(scale);
        for (int32_t i = c; i < c + n; i++) {
            const uint32_t code = hd_dtypes[f.code].encode(x[i] / scale);
            if (f.code == HD_E2M1) {
                to[i / 2] |= (uint8_t)(code << 4 * (i % 2));
            } else {
                to[i] = (uint8_t)code;
            }
        }
    }
    for (int32_t i = 0; i < f.plain; i++) {
        const uint16_t b = hd_f32_to_bf16(x[codes + i]);
        memcpy(plain + 2 * i, &b, sizeof b);
    }
}

static void decode(const hd_paged *p, float *out, const uint8_t *from) {
    const hd_group_format f = p->format;
    const int32_t codes = p->width - f.plain;
    const uint8_t *plain = from + hd_dtype_bytes(f.code, codes), *scale = plain + 2 * f.plain;
    for (int32_t i = 0; i < codes; i++) {
        out[i] = hd_dtype_at(f.code, from, i) * hd_dtype_at(f.scale_type, scale, i / f.group);
    }
    for (int32_t i = 0; i < f.plain; i++) out[codes + i] = hd_dtype_at(HD_BF16, plain, i);
}

const float *ops_read_entry(const hd_paged *p, int32_t seq, int32_t entry, float *room) {
    if (p->rows.type == HD_F32) return paged_entry(p, seq, entry);
    const uint8_t *from = paged_bytes(p, seq, entry);
    if (hd_is_packed(p->rows.type)) {
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
    float rounded[HD_MAX_ENTRY_COLS];
    if (hd_is_packed(p->rows.type)) {
        encode(p, to, from);
        return;
    }
    if (p->format.code) {
        ops_round_columns(p->format, rounded, from, p->width);
        from = rounded;
    }
    if (p->rows.type == HD_F32) {
        if ((const uint8_t *)from != to) memcpy(to, from, (size_t)p->width * sizeof *from);
        return;
    }
    for (int32_t i = 0; i < p->width; i++) {
        const uint16_t b = hd_f32_to_bf16(from[i]);
        memcpy(to + 2 * i, &b, sizeof b);
    }
}

void hd_round_rows_ref(hd_stream *s, const hd_round_rows_args *a) {
    (void)s;
    for (int64_t r = 0; r < a->rows; r++) {
        float *x = act(a->x) + r * a->cols;
        ops_round_columns(a->format, x, x, a->cols);
    }
}

void hd_pack_rows_ref(hd_stream *s, const hd_pack_rows_args *a) {
    const size_t bytes = hd_packed_row_bytes(a->format, a->cols);
    (void)s;
    for (int64_t r = 0; r < a->rows; r++) {
        const float *x = act_in(a->x) + r * a->cols;
        uint8_t *to = (uint8_t *)a->out + (size_t)r * bytes, *at;
        at = to + hd_packed_row_scales(a->cols);
        memset(to, 0, bytes);
        for (int32_t c = 0, n; c < a->cols; c += n) {
            const float scale = scale_at(a->format, x, c, a->cols, &n);
            for (int32_t i = c; i < c + n; i++) to[i] = (uint8_t)hd_round_e4m3(x[i] / scale);
            memcpy(at, &scale, sizeof scale);
            at += sizeof scale;
        }
    }
}

void hd_unpack_row(float *x, const void *packed, hd_group_format format, int32_t cols) {
    const uint8_t *codes = packed, *at = codes + hd_packed_row_scales(cols);
    for (int32_t c = 0; c < cols; c += format.group, at += sizeof(float)) {
        const int32_t end = cols - c < format.group ? cols : c + format.group;
        float scale;
        memcpy(&scale, at, sizeof scale);
        for (int32_t i = c; i < end; i++) x[i] = hd_rounded_e4m3(codes[i]) * scale;
    }
}
