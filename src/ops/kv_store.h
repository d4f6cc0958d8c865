/* kv_store.h - writes the paged KV cache: latents, window entries, compressed entries. */
#ifndef HD_OPS_KV_STORE_H
#define HD_OPS_KV_STORE_H

#include "ops/types.h"

HD_BEGIN_C

/* pool entry (seq[r], pos[r]) = x[r, 0 .. pool.width) */
typedef struct hd_kv_store_args {
    hd_paged pool;
    hd_rows x; /* [rows, pool.width] */
    const int32_t *seq, *pos;
    int32_t rows;
} hd_kv_store_args;

#define HD_ROWS_kv_store(T) T(pool.rows, POOL) T(x, STRIDED)

/* V4's KV compressor; models.md 2.10. For every block of `ratio` positions that ends in this
 * step it computes one entry: per-channel softmax over the block, RMS norm, and rotary
 * embedding at the block's first position. With `overlap` the softmax is over the previous
 * block's first half of channels and this block's second half. The entry is stored at
 * position / ratio. Positions that are not in the step come from `state`, as it is before the
 * step; then `state` receives the step's own positions. State rows are [kv | gate + ape], each coff * width
 * wide, coff = overlap ? 2 : 1. Entries that end before a sequence's entries_from are left as they are, and
 * nothing is read for them. */
typedef struct hd_compress_args {
    hd_paged entries;  /* width = the entry's width */
    hd_ring state;     /* width = 2 * coff * entries.width; ring >= coff * ratio */
    float *kv;         /* [rows, coff * width] */
    float *gate;       /* [rows, coff * width]; overwritten */
    const float *ape;  /* [ratio, coff * width] */
    const float *norm; /* [width] */
    const float *freq; /* [pairs] */
    hd_seqs seqs;
    const int32_t *entries_from; /* [seqs.n] positions; NULL: all entries are made */
    int32_t ratio, pairs;        /* the last 2 * pairs elements are rotated, interleaved */
    bool overlap;
    float eps;
} hd_compress_args;

#define HD_ROWS_compress(T) T(entries.rows, POOL) T(state.rows, STATE)

#define HD_KV_STORE_OPS(X) X(kv_store) X(compress)

HD_END_C

#endif
