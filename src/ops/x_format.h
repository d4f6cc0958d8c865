/* x_format.h - what rows of x become in products of --precision official, on a GPU and in the reference:
 * the model's own groups (ops/group_format.h), or bfloat16, or nothing.
 *
 * Bfloat16 is what the tensor cores take where a matrix has no groups: whole spans of columns, whose scales
 * are one for a span or powers of two (cuda/weight_internal.cuh, mma_fits). F32 and F16 matrices, and spans
 * that are not whole, are multiplied by float32. */
#ifndef HD_OPS_X_FORMAT_H
#define HD_OPS_X_FORMAT_H

#include "ops/group_format.h"

HD_BEGIN_C

static inline bool hd_is_power_of_two(int32_t n) {
    return n > 0 && (n & (n - 1)) == 0;
}

/* Whether x is bfloat16 in products with w that round it to no groups. */
static inline bool hd_narrows_x(const hd_weight *w) {
    enum { SPAN = 64, GROUP = 16 };
    const bool packed = w->type == HD_E2M1;
    if (w->type != HD_BF16 && w->type != HD_E4M3 && !packed) return false;
    if (w->cols % (packed ? 2 * SPAN : SPAN)) return false;
    if (!w->scale) return true;
    if (!hd_is_power_of_two(w->block_rows) || !hd_is_power_of_two(w->block_cols) ||
        w->block_cols < GROUP) {
        return false;
    }
    if (packed) return w->scale_type == HD_E8M0 || w->scale_type == HD_E4M3;
    return w->type == HD_BF16 || w->block_cols % SPAN == 0 || w->scale_type == HD_E8M0;
}

/* The same for the transpose of n rows of w from row `first` on, `step` further for every head. */
static inline bool hd_narrows_transposed_x(const hd_weight *w, int32_t first, int32_t step,
                                           int32_t n) {
    enum { SPAN = 64 };
    if (w->type == HD_E2M1 || !hd_narrows_x(w) || n % SPAN) return false;
    return !w->scale || (w->block_cols % SPAN == 0 && w->block_rows % SPAN == 0 &&
                         first % SPAN == 0 && step % SPAN == 0);
}

/* As a group_format: all columns plain. Without group and plain columns: float32. */
static inline hd_group_format hd_x_format(const hd_weight *w) {
    const hd_group_format own = hd_format_of_x(w);
    if (own.group > 0) return own;
    return (hd_group_format){HD_NONE, HD_NONE, 0, hd_narrows_x(w) ? w->cols : 0};
}

HD_END_C

#endif
