/* linear.h - GEMMs with one stored (quantized) matrix, and with one small matrix per head. */
#ifndef HD_OPS_LINEAR_H
#define HD_OPS_LINEAR_H

#include "ops/types.h"

HD_BEGIN_C

/* GEMM: out = x W^T. out may be float32 if other activations are narrower. */
typedef struct hd_linear_args {
    hd_rows out; /* [rows, w->rows] */
    hd_rows x;   /* [rows, w->cols] */
    const hd_weight *w;
    int32_t rows;
} hd_linear_args;

#define HD_ROWS_linear(T) T(out, STRIDED) T(x, STRIDED)

/* Batched GEMM with one small matrix per head, all in one tensor: head h uses W_h = rows
 * [first_row + h * head_rows, + n_rows) of w.
 *     plain:     out[r, h, :] = x[r, h, :] W_h^T   x: w->cols elements, out: n_rows
 *     transpose: out[r, h, :] = x[r, h, :] W_h     x: n_rows elements,  out: w->cols
 * Used for MLA's absorbed key (transposed) and value projections, and for V4's grouped
 * output projection. */
typedef struct hd_linear_heads_args {
    hd_rows out; /* [rows, heads, *] with out_head elements between heads */
    hd_rows x;   /* [rows, heads, *] with x_head elements between heads */
    const hd_weight *w;
    int32_t rows, heads, n_rows, first_row, head_rows;
    int32_t out_head, x_head;
    bool transpose;
} hd_linear_heads_args;

#define HD_ROWS_linear_heads(T) T(out, STRIDED) T(x, STRIDED)

#define HD_LINEAR_OPS(X) X(linear) X(linear_heads)

HD_END_C

#endif
