/* exchange.h - what the ranks of data parallel training exchange: arrays that are summed or gathered by
 * slices, and bytes of rank 0.
 *
 * Large arrays travel in parts. Sums are trees over the ranks in their order (comm/comm.h), so that
 * their bits depend on the number of ranks alone. */
#ifndef HD_TRAIN_EXCHANGE_H
#define HD_TRAIN_EXCHANGE_H

#include "comm/comm.h"

typedef struct train_ranks {
    const hd_comm *comm; /* NULL: this rank is alone */
    hd_stream *stream;
} train_ranks;

/* x [n] of each rank: elements first .. first + own - 1 become the sum over the ranks; the others are
 * undefined then. */
hd_status train_ranks_sum(const train_ranks *r, float *x, int64_t n, int64_t first, int64_t own,
                          hd_err *err);

/* slice [own] of each rank is put to its place, `first`, in to [n]; to NULL: this rank needs no
 * others. */
hd_status train_ranks_gather(const train_ranks *r, const float *slice, int64_t first,
                             int64_t own, float *to, int64_t n, hd_err *err);

/* block [bytes] of each rank, rank after rank, into all; bytes is a multiple of 4. */
hd_status train_ranks_collect(const train_ranks *r, const void *block, int64_t bytes, void *all,
                              hd_err *err);

/* Rank 0's bytes. */
hd_status train_ranks_broadcast(const train_ranks *r, void *data, size_t bytes, hd_err *err);

#endif
