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

/* Fused: several linear with the same rows, out[i] = x w[i]^T. */
enum { HD_MAX_SET = 8 };

typedef struct hd_linear_set_args {
    hd_rows out[HD_MAX_SET]; /* [rows, w[i]->rows] */
    hd_rows x;               /* [rows, cols] */
    const hd_weight *w[HD_MAX_SET];
    int32_t n, rows;
} hd_linear_set_args;

/* clang-format off */
#define HD_ROWS_linear_set(T)                                                                  \
    T(x, STRIDED) T(out[0], STRIDED) T(out[1], STRIDED) T(out[2], STRIDED) T(out[3], STRIDED)  \
    T(out[4], STRIDED) T(out[5], STRIDED) T(out[6], STRIDED) T(out[7], STRIDED)
/* clang-format on */

/* Fused: two linear and swiglu (moe.h), out = swiglu(x gate_w^T, x up_w^T). */
typedef struct hd_linear_swiglu_args {
    hd_rows out; /* [rows, gate_w->rows] */
    hd_rows gate,
        up;    /* the same products, before swiglu; gate may be out, which replaces them */
    hd_rows x; /* [rows, gate_w->cols] */
    const hd_weight *gate_w, *up_w;
    int32_t rows;
    float limit;
} hd_linear_swiglu_args;

#define HD_ROWS_linear_swiglu(T) T(out, STRIDED) T(gate, PLAIN) T(up, PLAIN) T(x, STRIDED)

#define HD_LINEAR_OPS(X) X(linear) X(linear_heads) X(linear_set) X(linear_swiglu)

HD_END_C

#endif
