/* comm.h - collective communication between ranks: all-reduce, reduce-scatter, all-gather,
 * broadcast, MoE dispatch and combine.
 *
 * A rank that holds a shard of the model (weights/parallel_config.h) computes parts of the
 * result. Partial sums are all-reduced over a group, and columns of a row are gathered. With
 * expert parallelism rows are dispatched to the ranks of their experts and combined again.
 * An hd_comm is one rank's end: a table of functions, filled by a backend (comm/local.h,
 * comm/peers.h, comm/ucx.h, comm/emulated.h). Every call queues on the stream and returns; a failure stays on
 * the stream. All members of a group make the same calls in the same order. comm.c counts them. */
#ifndef HD_COMM_COMM_H
#define HD_COMM_COMM_H

#include <stdint.h>

#include "hadal_types.h"
#include "device/device.h"
#include "ops/ops.h"
#include "weights/parallel_config.h"

/* Micro-batches whose rows may travel at once: those between dispatch_send and
 * combine_arrive. */
enum { HD_COMM_MAX_INFLIGHT = 4 };

/* x [n] of each member becomes the sum over the group, or its elements first .. first + own - 1
 * do (reduce-scatter, where the others are then undefined). The sum is a binary tree over the
 * members in order: with 2^k members, sum(0, 2^k) = sum(0, 2^(k-1)) + sum(2^(k-1), 2^k). Terms
 * that are added by the same tree inside the members have the same bits on 1, 2, 4 and 8. */
typedef struct hd_all_reduce_args {
    hd_group group;
    hd_rows x; /* contiguous */
    int64_t n;
} hd_all_reduce_args;

typedef struct hd_reduce_scatter_args {
    hd_group group;
    hd_rows x; /* contiguous */
    int64_t n, first, own;
} hd_reduce_scatter_args;

/* All-gather: of x [rows, cols] this rank has written columns first .. first + own - 1 of
 * every row; afterwards every member has all columns. */
typedef struct hd_all_gather_args {
    hd_group group;
    float *x;
    int32_t rows, cols, first, own;
    bool on_host; /* x is host memory; the call is complete when it returns */
} hd_all_gather_args;

/* Fused: norm.y [rows, cols] is completed, by an all-reduce if it is a sum of each member, or by an all-gather of
 * columns, of which this rank has first .. first + own - 1; then add_norm. norm.y is undefined afterwards. The
 * bits are those of the calls one after the other, which is what backends without a kernel for it make. */
typedef struct hd_join_norm_args {
    hd_group group;
    bool sums;
    int32_t first, own;
    hd_add_norm_args norm;
} hd_join_norm_args;

/* Broadcast of host memory: `bytes` bytes of member 0 are copied to every other member. All pass
 * the same `bytes`. Unlike the other calls it is complete when it returns. */
typedef struct hd_broadcast_args {
    hd_group group;
    void *data;
    size_t bytes;
} hd_broadcast_args;

/* Dispatch over HD_GROUP_EP: each row goes to the slot of each expert that it chose. Places are
 * those of moe_permute over all expert slots of the group, of which member r has slots
 * r * n_slots .. (r + 1) * n_slots - 1: place i, of slot s with offset[s] <= i < offset[s + 1],
 * is row assignment[i] / top_k of x with weight[assignment[i]]. Received rows are grouped by the
 * slots of this rank: its slot k has places in_offset[k] .. in_offset[k + 1] - 1 of in_x and
 * in_weight, at most in_rows in all; more fail the step of every rank. send and arrive take the
 * same arguments. Sends arrive in their order. What send reads, and in_offset, must not change
 * until combine_arrive.
 *
 * With a format, of which the code is E4M3, x are rows that pack_rows wrote in it: these travel, and in_x is
 * what they are as float32. All members have the same columns for a scale.
 *
 * With `most` the rows travel in rounds, each a dispatch and a combine of its own: round r has, of
 * the rows that member k sends to another, which are sorted by slot, the most[k] from r * most[k]
 * on. All members have the same `most`; its sum is at most in_rows. */
typedef struct hd_dispatch_args {
    int32_t layer;
    hd_rows x;              /* [rows, cols] */
    hd_group_format format; /* no code: x is float32 */
    const float *weight;
    const int32_t *offset, *assignment;
    int32_t rows, cols, top_k;
    hd_rows in_x;       /* [in_rows, cols] */
    float *in_weight;   /* [in_rows] */
    int32_t *in_offset; /* [n_slots + 1] */
    int32_t in_rows, n_slots;
    const int32_t
        *most; /* [members] host memory, at least 1 where a member has rows; NULL: all */
    int32_t round;
    /* Set by arrive, equal on all members; NULL without `most`. GPUs do not set it: the host, which could not
     * read it without waiting, makes as many rounds as there may be. */
    int32_t *rounds;
} hd_dispatch_args;

/* Combine, of dispatches in their order: in_y holds results by place of the received rows, y
 * gets them by place of the sent rows. in_y must not change until arrive is done, on GPUs until
 * the rank's next exchange of HD_GROUP_EP is: the others may not have read it before. */
typedef struct hd_combine_args {
    hd_rows in_y; /* [in_rows, cols] */
    hd_rows y;    /* [rows * top_k, cols] */
    int32_t rows, cols, top_k, in_rows;
} hd_combine_args;

/* A backend's functions; ctx is that of the rank. */
typedef struct hd_comm_table {
    void (*all_reduce)(void *ctx, hd_stream *s, const hd_all_reduce_args *a);
    void (*reduce_scatter)(void *ctx, hd_stream *s, const hd_reduce_scatter_args *a);
    void (*all_gather)(void *ctx, hd_stream *s, const hd_all_gather_args *a);
    void (*broadcast)(void *ctx, hd_stream *s, const hd_broadcast_args *a);
    void (*dispatch_send)(void *ctx, hd_stream *s, const hd_dispatch_args *a);
    void (*dispatch_arrive)(void *ctx, hd_stream *s, const hd_dispatch_args *a);
    void (*combine_send)(void *ctx, hd_stream *s, const hd_combine_args *a);
    void (*combine_arrive)(void *ctx, hd_stream *s, const hd_combine_args *a);
    /* NULL or false: it is not made here */
    bool (*join_norm)(void *ctx, hd_stream *s, const hd_join_norm_args *a);
    /* NULL: the others reach all memory of the rank, or none */
    hd_status (*share_rows)(void *ctx, hd_stream *s, void *block, size_t bytes, hd_err *err);
    void (*begin_pass)(void *ctx); /* NULL: nothing is numbered by passes */
    void (*abort)(void *ctx, const char *why);
    const char *(*ended)(void *ctx);
} hd_comm_table;

typedef struct comm_figures comm_figures; /* comm/figures_internal.h */

typedef struct hd_comm {
    const hd_comm_table *table;
    void *ctx;
    int32_t rank;
    hd_rank_group groups[HD_N_GROUPS];
    bool one_round; /* no other rank sends anything: all that arrives has room */
    /* dispatch_send alone queues that rows travel, combine_arrive alone that results do */
    bool one_sided;
    /* a column of some rows arrives later than every rank has computed it: between GPUs */
    bool slower_than_products;
    /* few rows take less time by hd_comm_join_norm than by the calls that it stands for */
    bool joins_norms;
    comm_figures *figures; /* NULL: exchanges are not counted */
} hd_comm;

/* Returns the end of a rank, with its groups. For backends. */
static inline hd_comm hd_comm_of(const hd_comm_table *table, void *ctx,
                                 const hd_parallel_config *parallel, int32_t rank) {
    hd_comm c = {.table = table, .ctx = ctx, .rank = rank};
    for (int g = 0; g < HD_N_GROUPS; g++) {
        c.groups[g] = hd_parallel_group(parallel, rank, (hd_group)g);
    }
    return c;
}

void hd_comm_all_reduce(const hd_comm *c, hd_stream *s, const hd_all_reduce_args *a);
void hd_comm_reduce_scatter(const hd_comm *c, hd_stream *s, const hd_reduce_scatter_args *a);
void hd_comm_all_gather(const hd_comm *c, hd_stream *s, const hd_all_gather_args *a);
void hd_comm_broadcast(const hd_comm *c, hd_stream *s, const hd_broadcast_args *a);
void hd_comm_join_norm(const hd_comm *c, const hd_ops *ops, hd_stream *s,
                       const hd_join_norm_args *a);
void hd_comm_dispatch_send(const hd_comm *c, hd_stream *s, const hd_dispatch_args *a);
void hd_comm_dispatch_arrive(const hd_comm *c, hd_stream *s, const hd_dispatch_args *a);
void hd_comm_combine_send(const hd_comm *c, hd_stream *s, const hd_combine_args *a);
void hd_comm_combine_arrive(const hd_comm *c, hd_stream *s, const hd_combine_args *a);

/* Says where the rows of dispatches and combines will lie: what a send reads, in_offset apart, is
 * in this block of device memory, which stays until the rank's communication ends. All ranks of a
 * layout with ep above 1 call it before their first step, each with its own block. */
hd_status hd_comm_share_rows(const hd_comm *c, hd_stream *s, void *block, size_t bytes,
                             hd_err *err);

/* Around a forward pass, on the rank's thread: counts it, and its time without exchanges. c may be
 * NULL. */
int64_t hd_comm_begin_pass(const hd_comm *c);
void hd_comm_end_pass(const hd_comm *c, int64_t begun);

/* What the rank has counted so far; zeros if it does not count. Any thread. */
void hd_comm_read_figures(const hd_comm *c, hd_rank_figures *out);

/* Ends communication of all ranks: calls that wait and all later ones fail their stream with
 * HD_EPEER and why. Any thread may call it. When it returns, no other rank reads or writes
 * this rank's memory. A rank that ends before the others must call it. */
static inline void hd_comm_abort(const hd_comm *c, const char *why) {
    c->table->abort(c->ctx, why);
}

/* Returns why communication has ended, or NULL. Any thread may call it. */
static inline const char *hd_comm_ended(const hd_comm *c) {
    return c->table->ended(c->ctx);
}

#endif
