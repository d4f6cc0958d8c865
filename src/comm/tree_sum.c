/* tree_sum.c - see tree_sum.h. */
#include "comm/tree_sum.h"

#include <string.h>

void hd_tree_sum(float *out, const float *const *x, int32_t m, int64_t at, int32_t n) {
    if (m == 1) {
        memcpy(out, x[0] + at, (size_t)n * sizeof *out);
        return;
    }
    int32_t half = 1;
    while (2 * half < m) half *= 2;
    float right[HD_TREE_SUM_BLOCK];
    hd_tree_sum(out, x, half, at, n);
    hd_tree_sum(right, x + half, m - half, at, n);
    for (int32_t i = 0; i < n; i++) out[i] += right[i];
}
