/* group_format.h - numbers that share a scale, by groups of columns: cached entries, and rows of x that
 * --precision official rounds.
 *
 * A number is a code times the scale of its group. The scale of a group is its largest magnitude, but at
 * least `least`, over the largest code; of E8M0 it is the next power of two that is not smaller, of E4M3
 * the nearest. A group with a NaN or an infinity is NaN. */
#ifndef HD_OPS_GROUP_FORMAT_H
#define HD_OPS_GROUP_FORMAT_H

#include <float.h>
#include <math.h>

#include "base/dtype.h"
#include "base/round_codes.h"

HD_BEGIN_C

typedef struct hd_group_format {
    hd_dtype code;       /* E4M3 or E2M1; HD_NONE: there are no groups */
    hd_dtype scale_type; /* E8M0, E4M3, or in rounding F32 */
    int32_t group;       /* columns */
    int32_t plain;       /* of the last columns, which are bfloat16 instead */
} hd_group_format;

/* Groups of x in products with w: as the model's own program rounds them. Without a code it does not, or
 * the columns are no whole groups, as a rank's part may be. */
static inline hd_group_format hd_format_of_x(const hd_weight *w) {
    const int32_t group = w->x_group ? w->x_group : 128;
    const bool powers = w->power_scales || w->scale_type == HD_E8M0;
    const bool known = w->type == HD_E4M3 || (w->type == HD_E2M1 && w->scale_type == HD_E8M0);
    if (!w->scale || !known || w->cols % group)
        return (hd_group_format){HD_NONE, HD_NONE, 0, 0};
    return (hd_group_format){HD_E4M3, powers ? HD_E8M0 : HD_F32, group, 0};
}

/* Bytes of `width` columns that are stored so: codes, [plain] bfloat16, a byte for each scale, and zeros
 * up to a multiple of 4. */
static inline size_t hd_group_bytes(hd_group_format f, int32_t width) {
    const int32_t codes = width - f.plain;
    const int32_t scales = f.group > 0 ? (codes + f.group - 1) / f.group : 0;
    const size_t bytes = hd_dtype_bytes(f.code, codes) + (size_t)(2 * f.plain + scales);
    return (bytes + 3) / 4 * 4;
}

/* Rows that travel to the experts of other ranks: codes of E4M3, zeros up to a multiple of 4, a float32 for
 * the scale of each group, whatever its type, and zeros up to a multiple of 16. */
static inline size_t hd_packed_row_scales(int32_t cols) {
    return ((size_t)cols + 3) / 4 * 4;
}

static inline size_t hd_packed_row_bytes(hd_group_format f, int32_t cols) {
    const size_t scales = ((size_t)cols + (size_t)f.group - 1) / (size_t)f.group;
    return (hd_packed_row_scales(cols) + scales * sizeof(float) + 15) / 16 * 16;
}

/* The scale of a group whose largest magnitude is `most`. */
HD_ROUND_FN float hd_group_scale(hd_group_format f, float most) {
    const bool wide = f.code == HD_E4M3;
    const float largest = wide ? 448.0f : 6.0f;
    const float least = wide ? 1e-4f : f.scale_type == HD_E8M0 ? 6 * 0x1p-126f : 6 * 0x1p-9f;
    const float scale = (most > least ? most : least) / largest;
    if (!(most <= FLT_MAX)) return NAN;
    if (f.scale_type == HD_E8M0) return hd_round_power_up(scale);
    return f.scale_type == HD_E4M3 ? hd_rounded_e4m3(hd_round_e4m3(scale)) : scale;
}

/* The number nearest to x. */
HD_ROUND_FN float hd_group_number(hd_group_format f, float x, float scale) {
    return f.code == HD_E4M3 ? hd_rounded_e4m3(hd_round_e4m3(x / scale)) * scale
                             : hd_rounded_e2m1(hd_round_e2m1(x / scale, true)) * scale;
}

HD_END_C

#endif
