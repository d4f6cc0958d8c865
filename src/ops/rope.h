/* rope.h - rotary position embedding (RoPE). */
#ifndef HD_OPS_ROPE_H
#define HD_OPS_ROPE_H

#include "ops/types.h"

HD_BEGIN_C

/* angle[r, i] = position[r] * freq[i]; out[r] = cos(angle) then sin(angle), times scale */
typedef struct hd_rope_table_args {
    float *out;              /* [rows, 2, pairs] */
    const int32_t *position; /* [rows] */
    const float *freq;       /* [pairs] */
    int32_t rows, pairs;
    float scale;
} hd_rope_table_args;

#define HD_ROWS_rope_table(T)

/* Rotates 2 * pairs elements of every head; models.md 2.1.4. Pairs are interleaved (x[2i],
 * x[2i+1]), or with half_split (x[i], x[i + pairs]). Other elements are unchanged. */
typedef struct hd_rope_args {
    hd_rows out;          /* first rotated element of row 0, head 0; may be x */
    hd_rows x;            /* likewise */
    const float *cos_sin; /* [rows, 2, pairs] of rope_table */
    int32_t rows, heads, pairs;
    int32_t out_head, x_head; /* elements between heads */
    bool half_split, inverse;
} hd_rope_args;

#define HD_ROWS_rope(T) T(out, STRIDED) T(x, STRIDED)

/* Fused: rms_norm of the first norm_cols elements of every head, in place, then rope of 2 * pairs
 * elements from rope_at on. */
typedef struct hd_norm_rope_args {
    hd_rows x;            /* [rows, heads, head_width] */
    const float *weight;  /* [norm_cols], NULL: ones */
    const float *cos_sin; /* [rows, 2, pairs] of rope_table */
    int32_t rows, heads, head_width, norm_cols, rope_at, pairs;
    bool half_split;
    float eps;
} hd_norm_rope_args;

#define HD_ROWS_norm_rope(T) T(x, PLAIN)

#define HD_ROPE_OPS(X) X(rope_table) X(rope) X(norm_rope)

HD_END_C

#endif
