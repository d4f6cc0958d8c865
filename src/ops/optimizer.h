/* optimizer.h - operators of the optimizer, in the table of backward.h: sums of squares, AdamW, Muon,
 * and rounding to stored formats. Formulas: docs/training.md.
 *
 * All have one order of float32 and float64 operations, without fused ones, so that every backend has
 * the same bits. */
#ifndef HD_OPS_OPTIMIZER_H
#define HD_OPS_OPTIMIZER_H

#include "ops/types.h"

HD_BEGIN_C

enum { HD_SQUARES_BLOCK = 1 << 16, HD_SQUARES_LANES = 256 };

/* sums[b] = the sum of the squares of elements [b * HD_SQUARES_BLOCK, ...) of x: lane l adds those of
 * elements l, l + HD_SQUARES_LANES, ... of the block in order, in float64; then lane l and lane l + k are
 * added for k = 128, 64, ..., 1. */
typedef struct hd_sum_squares_args {
    double *sums;   /* [ceil(n / HD_SQUARES_BLOCK)] */
    const float *x; /* [n] */
    int64_t n;
} hd_sum_squares_args;

/* g = clip grad; first = beta1 first + (1 - beta1) g; second = beta2 second + (1 - beta2) g g;
 * master = keep master - rate (first correction1) / (sqrt(second correction2) + eps) */
typedef struct hd_adamw_args {
    float *master, *first, *second; /* [n] */
    const float *grad;
    int64_t n;
    float clip, rate, keep, beta1, beta2, eps;
    float correction1, correction2; /* 1 / (1 - beta^t) */
} hd_adamw_args;

/* Of each of n matrices, one after another: g = clip grad; first = momentum first + g; master = keep
 * master - rate x, with x the matrix g + momentum first made nearly orthogonal by five Newton-Schulz
 * steps, whose inverse length is found as in sum_squares with one block. The stream's scratch is at least
 * hd_muon_scratch(): of a CPU for each worker; of a GPU in all, which has as many matrices at once as fit. */
typedef struct hd_muon_args {
    float *master, *first; /* [n, rows, cols] */
    const float *grad;
    int32_t n, rows, cols;
    float clip, rate, keep, momentum;
} hd_muon_args;

static inline size_t hd_muon_scratch(int32_t rows, int32_t cols) {
    const size_t size = (size_t)rows * (size_t)cols;
    const size_t side = (size_t)(rows < cols ? rows : cols);
    return 2 * (size + side * side) * sizeof(float);
}

enum { HD_ROUND_MOST = 64 }; /* matrices of one call */

/* Rounds n matrices [rows, cols] of one format as weights/quantize.h does. */
typedef struct hd_round_weights_args {
    uint8_t *data[HD_ROUND_MOST], *scale[HD_ROUND_MOST]; /* receive the arrays */
    const float *values[HD_ROUND_MOST];
    int32_t *bad; /* [n] set to 1: a value is no finite number, or too large for the format */
    int32_t n;
    hd_weight like; /* shape, format and global scale; data and scale are not read */
    bool widened;   /* of a plain type: data receives the rounded numbers as float32 */
} hd_round_weights_args;

HD_END_C

#endif
