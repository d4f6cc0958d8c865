/* linear.h - GEMMs with one stored (quantized) matrix, and with one small matrix per head. */
#ifndef HD_OPS_LINEAR_H
#define HD_OPS_LINEAR_H

#include "ops/types.h"

HD_BEGIN_C

/* GEMM: out = x W^T. Exactly one of out and out_f32 is set. */
typedef struct hd_linear_args {
    hd_act *out;     /* [rows, w->rows] */
    float *out_f32;  /* [rows, w->rows] */
    const hd_act *x; /* [rows, w->cols] */
    const hd_weight *w;
    int32_t rows, out_stride, x_stride;
} hd_linear_args;

/* Batched GEMM with one small matrix per head, all in one tensor: head h uses W_h = rows
 * [first_row + h * head_rows, + n_rows) of w.
 *     plain:     out[r, h, :] = x[r, h, :] W_h^T   x: w->cols elements, out: n_rows
 *     transpose: out[r, h, :] = x[r, h, :] W_h     x: n_rows elements,  out: w->cols
 * Used for MLA's absorbed key (transposed) and value projections, and for V4's grouped
 * output projection. */
typedef struct hd_linear_heads_args {
    hd_act *out;     /* [rows, heads, *] with out_head elements between heads */
    const hd_act *x; /* [rows, heads, *] with x_head elements between heads */
    const hd_weight *w;
    int32_t rows, heads, n_rows, first_row, head_rows;
    int32_t out_stride, out_head, x_stride, x_head;
    bool transpose;
} hd_linear_heads_args;

HD_END_C

#endif
