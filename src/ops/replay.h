/* replay.h - keeps what rows chose, experts or keys, beside the pages of their prefix. */
#ifndef HD_OPS_REPLAY_H
#define HD_OPS_REPLAY_H

#include "ops/types.h"

HD_BEGIN_C

/* Where a layer keeps its choices: those of row r lie at the entry of its position in the
 * sequence's FULL page. Host memory that the device writes to. */
typedef struct hd_replay_log {
    uint8_t
        *data; /* [pages * page_tokens, row_bytes] from this layer's part on; NULL: nowhere */
    const int32_t *seq, *pos; /* [rows] */
    const int32_t *table;     /* [n_seqs, table_stride] block table */
    int32_t table_stride, page_tokens;
    int32_t row_bytes;    /* of all layers of a position */
    int32_t number_bytes; /* of a choice: 1, 2 or 4, little-endian */
} hd_replay_log;

/* Keeps choice[r, 0 .. top_k) of every row, cut to the log's number_bytes. */
typedef struct hd_replay_store_args {
    const int32_t *choice; /* [rows, top_k] */
    hd_replay_log log;     /* data is not NULL */
    int32_t rows, top_k;
} hd_replay_store_args;

#define HD_ROWS_replay_store(T)

#define HD_REPLAY_OPS(X) X(replay_store)

HD_END_C

#endif
