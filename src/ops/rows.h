/* rows.h - operators on whole rows: embedding, gather, add, rounding, packing. */
#ifndef HD_OPS_ROWS_H
#define HD_OPS_ROWS_H

#include "ops/types.h"

HD_BEGIN_C

/* out[r, i, :] = table[tokens[r], :] for i < copies */
typedef struct hd_embed_args {
    hd_rows out; /* [rows, copies, cols] */
    const hd_weight *table;
    const int32_t *tokens; /* [rows] */
    int32_t rows, copies;
} hd_embed_args;

#define HD_ROWS_embed(T) T(out, PLAIN)

/* out[i, :] = x[index[i], :] */
typedef struct hd_gather_args {
    hd_rows out;          /* [rows, cols] */
    hd_rows x;            /* [*, cols] */
    const int32_t *index; /* [rows] */
    int32_t rows, cols;
} hd_gather_args;

#define HD_ROWS_gather(T) T(out, PLAIN) T(x, PLAIN)

/* x[r, :] += y[r / repeat, :] */
typedef struct hd_add_args {
    hd_rows x; /* [rows, cols] */
    hd_rows y; /* [rows / repeat, cols] */
    int32_t rows, cols, repeat;
} hd_add_args;

#define HD_ROWS_add(T) T(x, PLAIN) T(y, PLAIN)

/* x becomes the nearest numbers of a format, row by row. */
typedef struct hd_round_rows_args {
    hd_rows x; /* [rows, cols] */
    hd_group_format format;
    int32_t rows, cols;
} hd_round_rows_args;

#define HD_ROWS_round_rows(T) T(x, PLAIN)

/* out = the rows of x as they travel to experts (hd_packed_row_bytes): read back, they are what round_rows
 * makes of x. */
typedef struct hd_pack_rows_args {
    void *out;              /* [rows] of hd_packed_row_bytes(format, cols), aligned to 16 */
    hd_rows x;              /* [rows, cols] */
    hd_group_format format; /* E4M3 in groups of 32, 64 or 128 */
    int32_t rows, cols;
} hd_pack_rows_args;

#define HD_ROWS_pack_rows(T) T(x, PLAIN)

/* x [cols] = a row that pack_rows wrote. On the host; it may lie anywhere. */
void hd_unpack_row(float *x, const void *packed, hd_group_format format, int32_t cols);

#define HD_ROWS_OPS(X) X(embed) X(gather) X(add) X(round_rows) X(pack_rows)

HD_END_C

#endif
