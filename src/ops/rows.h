/* rows.h - operators on whole rows: embedding, gather, add. */
#ifndef HD_OPS_ROWS_H
#define HD_OPS_ROWS_H

#include "ops/types.h"

HD_BEGIN_C

/* out[r, i, :] = table[tokens[r], :] for i < copies */
typedef struct hd_embed_args {
    hd_act *out; /* [rows, copies, cols] */
    const hd_weight *table;
    const int32_t *tokens; /* [rows] */
    int32_t rows, copies;
} hd_embed_args;

/* out[i, :] = x[index[i], :] */
typedef struct hd_gather_args {
    hd_act *out;          /* [rows, cols] */
    const hd_act *x;      /* [*, cols] */
    const int32_t *index; /* [rows] */
    int32_t rows, cols;
} hd_gather_args;

/* x[r, :] += y[r / repeat, :] */
typedef struct hd_add_args {
    hd_act *x;       /* [rows, cols] */
    const hd_act *y; /* [rows / repeat, cols] */
    int32_t rows, cols, repeat;
} hd_add_args;

HD_END_C

#endif
