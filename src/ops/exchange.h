/* exchange.h - kernels by which the ranks of a host exchange rows between GPUs.
 *
 * Each rank has a block of device memory that the kernels of all others write. A kernel's block of
 * threads pushes what it has into the blocks of the members of the group, then raises a flag there,
 * waits for their flags, and reads its own memory. Blocks with the same number wait for each other, and
 * for no other one. So all members must make the same calls of a group in the same
 * order, of the same sizes where the arguments say so. Flags are counters that only grow, and each
 * part of the memory is written by turns in two halves: who has come to an exchange has finished the
 * one before, so nobody waits at its end. Few words travel without a flag behind them: each has the count of its
 * exchange beside it, so that no thread waits until its writes have arrived.
 *
 * A table that computes on a GPU has these functions (hd_ops.exchange); comm/peers.c calls them. */
#ifndef HD_OPS_EXCHANGE_H
#define HD_OPS_EXCHANGE_H

#include <stdbool.h>

#include "device/device.h"
#include "ops/norm.h"

HD_BEGIN_C

enum {
    HD_EXCHANGE_MAX_RANKS = 16,
    HD_EXCHANGE_BLOCKS = 64,       /* of threads, at most */
    HD_EXCHANGE_SHARED_BLOCKS = 4, /* where ranks share a GPU */
    HD_EXCHANGE_GROUPS = 8,        /* a rank is in one group of each of so many kinds */
    HD_EXCHANGE_SLOTS = 4096,      /* of all members of a dispatch */
    HD_EXCHANGE_INFLIGHT = 4,      /* dispatches between their arrival and the combine */
    HD_EXCHANGE_NORM_ROWS = 16,    /* with a norm, at most */
    HD_EXCHANGE_NORM_MEMBERS = 4,
    HD_EXCHANGE_NORM_COLS = 8192,
    HD_EXCHANGE_MAX_SECONDS = 60 /* that a kernel waits for another rank */
};

/* What a kernel tells the host of its rank, in pinned host memory. */
typedef struct hd_exchange_state {
    int32_t ended; /* by the host: 1: kernels stop waiting and leave their results undefined */
    int32_t late;  /* by a kernel: 1 + the member that did not come in time */
    int32_t too_many; /* by a dispatch: rows that arrive, of which so many have no room */
} hd_exchange_state;

/* The members of a group, as one of them sees them. */
typedef struct hd_exchange_peers {
    void *memory
        [HD_EXCHANGE_MAX_RANKS]; /* [n] of member k, which this GPU can reach; zero at first */
    /* [n] bytes to add to a pointer of member k: in another process it has other addresses */
    int64_t shift[HD_EXCHANGE_MAX_RANKS];
    hd_exchange_state *state;
    int32_t n, index, group; /* group: its kind */
    int32_t blocks;          /* at most; the same on all ranks */
} hd_exchange_peers;

/* x [rows, cols]: this member has columns first .. first + own - 1; afterwards all have all.
 * rows and cols are the same on all members. */
typedef struct hd_exchange_gather_args {
    float *x;
    int32_t rows, cols, first, own;
} hd_exchange_gather_args;

/* x [n] becomes the sum over the members as comm/comm.h orders it, at first .. first + own - 1.
 * n is the same on all members. */
typedef struct hd_exchange_sum_args {
    float *x;
    int64_t n, first, own;
} hd_exchange_sum_args;

/* Fused: the sum of norm.y over the members, or the gather of its columns, then add_norm
 * (ops/norm.h), with their bits; norm.y is undefined then. At most HD_EXCHANGE_NORM_ROWS, _MEMBERS and _COLS. All
 * calls of a rank have the same members. */
typedef struct hd_exchange_norm_args {
    hd_add_norm_args norm;
    bool sums; /* else columns first .. first + own - 1 of norm.y are this member's */
    int32_t first, own;
} hd_exchange_norm_args;

/* hd_dispatch_args and hd_combine_args of comm/comm.h, which describe the arrays. place: which of
 * the dispatches that are under way; a combine has that of its dispatch. Of the rows that a member
 * sends to another the most of that member from round * most on travel; INT32_MAX: all. The members
 * read each other's x, weight, offset, assignment and in_y where they lie. With a group x are rows that
 * pack_rows wrote, of so many columns for a scale. */
typedef struct hd_exchange_dispatch_args {
    const void *x;
    const float *weight;
    const int32_t *offset, *assignment;
    float *in_x, *in_weight;
    int32_t *in_offset;
    int32_t cols, top_k, in_rows, n_slots, place;
    int32_t group, row_bytes, row_scales;       /* group 0: x is float32 */
    int32_t round, most[HD_EXCHANGE_MAX_RANKS]; /* [n] */
} hd_exchange_dispatch_args;

typedef struct hd_exchange_combine_args {
    const float *in_y;
    float *y;
    const int32_t *offset; /* of the dispatch */
    int32_t cols, n_slots, place;
    int32_t round, most; /* of this member */
} hd_exchange_combine_args;

typedef struct hd_exchange_ops {
    size_t bytes; /* of each member's memory */
    void (*gather)(hd_stream *s, const hd_exchange_peers *p, const hd_exchange_gather_args *a);
    void (*sum)(hd_stream *s, const hd_exchange_peers *p, const hd_exchange_sum_args *a);
    /* NULL: there is none */
    void (*norm)(hd_stream *s, const hd_exchange_peers *p, const hd_exchange_norm_args *a);
    void (*dispatch)(hd_stream *s, const hd_exchange_peers *p,
                     const hd_exchange_dispatch_args *a);
    void (*combine)(hd_stream *s, const hd_exchange_peers *p,
                    const hd_exchange_combine_args *a);
    void (*reset)(hd_stream *s, void *memory); /* of this rank: no exchange was ever made */
} hd_exchange_ops;

HD_END_C

#endif
