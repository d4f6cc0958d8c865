/* resident.h - entries that attention reads by choice and that lie in host memory: a buffer on the
 * device holds those that were chosen lately (HiSparse, docs/kv.md). */
#ifndef HD_OPS_RESIDENT_H
#define HD_OPS_RESIDENT_H

#include "ops/types.h"

HD_BEGIN_C

typedef struct hd_resident_counts {
    int64_t selected,
        fetched; /* entries that rows selected; of them, those that were fetched */
} hd_resident_counts;

/* Of a buffer, in device memory: passes so far and their counts; then those of a pass. */
typedef struct hd_resident_state {
    int64_t pass;
    hd_resident_counts all;
    int32_t n_selected, n_lacking; /* choices; those of entries that the buffer lacks */
    int32_t n_missed;              /* these entries */
} hd_resident_state;

/* A pool's buffer. Row r holds entry owner[r] - 1 of the pool, if row_of has r for that entry. All
 * zero: it is empty. */
typedef struct hd_resident {
    hd_rows rows;    /* [n, width of the pool], of its type */
    int32_t n;       /* 0: there is no buffer, and all entries lie on the device */
    int32_t *row_of; /* [entries of the pool] -1: nowhere */
    int32_t *owner;  /* [n] 1 + the entry; 0: none */
    int64_t *used;   /* [n] the last pass that read the row */
    hd_resident_state *state;
    hd_resident_counts *counts; /* of all passes, in memory of the host */
    /* [n] of the pass: the entries that it fetches, and the rows that take them. One buffer after the
     * other may use the same. */
    int32_t *missed, *victim;
} hd_resident;

enum { HD_RESIDENT_AGES = 1024 }; /* ages of rows that are told apart */

/* out[r, i] = the buffer's row with entry selected[r, i] of the row's sequence, or -1 where that is
 * -1. One call is a pass. It fetches entries that the buffer lacks, each once, in the order in which the
 * rows choose them. They go into the rows that were read longest ago, of equal age the lowest, in
 * ascending order; no row that this pass reads is among them. Age is counted in passes, up to
 * HD_RESIDENT_AGES - 1. rows * top_k must be at most buffer.n. */
typedef struct hd_resident_args {
    int32_t *out;            /* [rows, top_k] */
    const int32_t *selected; /* [rows, top_k] */
    hd_paged entries;        /* in memory of the host */
    hd_resident buffer;
    const int32_t *seq; /* [rows] */
    int32_t rows, top_k;
} hd_resident_args;

#define HD_ROWS_resident(T) T(entries.rows, POOL) T(buffer.rows, POOL)

/* For entries that a step writes: row_of = -1 of entry pos / ratio of every row whose position ends a
 * group of `ratio` positions. */
typedef struct hd_forget_entries_args {
    hd_paged entries;
    int32_t *row_of;
    const int32_t *seq, *pos; /* [rows] */
    int32_t rows, ratio;
} hd_forget_entries_args;

#define HD_ROWS_forget_entries(T)

#define HD_RESIDENT_OPS(X) X(resident) X(forget_entries)

HD_END_C

#endif
