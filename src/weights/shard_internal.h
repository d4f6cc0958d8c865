/* shard_internal.h - a rank's shard of a stored matrix, as a stored matrix. */
#ifndef HD_WEIGHTS_SHARD_INTERNAL_H
#define HD_WEIGHTS_SHARD_INTERNAL_H

#include "base/dtype.h"
#include "weights/placement.h"

/* Copies of column slices, which cannot be viewed in place, one block after the other. */
typedef struct weights_pieces {
    void **blocks;
    size_t n, cap;
} weights_pieces;

/* Narrows *w to the slice, which must consist of complete scale blocks, as in plans. Columns
 * are copied into a piece. */
hd_status weights_shard(hd_weight *w, const hd_slice *slice, weights_pieces *pieces,
                        hd_err *err);

void weights_pieces_deinit(weights_pieces *p); /* an all-zero one is fine */

#endif
