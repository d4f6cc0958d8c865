/* shard_internal.h - a rank's shard of a stored matrix, as a stored matrix. */
#ifndef HD_WEIGHTS_SHARD_INTERNAL_H
#define HD_WEIGHTS_SHARD_INTERNAL_H

#include "base/dtype.h"
#include "base/memory.h"
#include "weights/placement.h"

/* Copies of column slices, which cannot be viewed in place, one block after the other. */
typedef struct weights_pieces {
    hd_block *blocks;
    size_t n, cap;
    size_t taken; /* below n: blocks are taken again, in the same order and of the same sizes */
} weights_pieces;

/* A further block of memory. NULL: none is left. */
void *weights_take_piece(weights_pieces *p, size_t bytes, hd_err *err);

/* Narrows *w to the slice, whose columns must be complete scale blocks, as in plans. Columns, and
 * the scales of rows that begin inside a block, are copied into a piece. */
hd_status weights_shard(hd_weight *w, const hd_slice *slice, weights_pieces *pieces,
                        hd_err *err);

/* Gives the memory of large blocks back to the system until they are written again; returns the
 * bytes. */
size_t weights_pieces_discard(weights_pieces *p);

void weights_pieces_deinit(weights_pieces *p); /* an all-zero one is fine */

#endif
