/* comm.h - collective communication between ranks: all-reduce, all-gather, MoE dispatch and
 * combine.
 *
 * A model that holds a shard of the weights (weights/parallel_config.h) computes parts of
 * the result. Partial sums are all-reduced over a tensor-parallel group, and columns of a
 * row are gathered. With expert parallelism rows are dispatched to the ranks of their
 * experts and combined again. Every entry queues on the stream and returns. The shard
 * determines which ranks take part. */
#ifndef HD_COMM_COMM_H
#define HD_COMM_COMM_H

#include <stdint.h>

#include "device/device.h"
#include "ops/ops.h"

/* All-reduce: x [n] of each rank of a tp group becomes the sum over the group. */
typedef struct hd_comm_all_reduce {
    hd_rows x;
    int64_t n;
} hd_comm_all_reduce;

/* All-gather: of x [rows, cols] this rank has written columns first .. first + own - 1 of
 * every row; afterwards every rank has all columns. */
typedef struct hd_gather_columns {
    float *x;
    int32_t rows, cols, first, own;
} hd_gather_columns;

/* Dispatch: sends a copy of each row to the slot of each expert that it chose. Places are
 * those of moe_permute over all expert slots of the world, of which rank r of the group has
 * slots r * n_slots .. (r + 1) * n_slots - 1: place i, of slot s with offset[s] <= i <
 * offset[s + 1], is row assignment[i] / top_k of x with weight[assignment[i]]. Received rows
 * are grouped by the slots of this rank: its slot k has places in_offset[k] ..
 * in_offset[k + 1] - 1 of in_x and in_weight, at most in_rows in all. */
typedef struct hd_comm_dispatch {
    int32_t layer;
    hd_rows x; /* [rows, cols] */
    const float *weight;
    const int32_t *offset, *assignment;
    int32_t rows, cols, top_k;
    hd_rows in_x;       /* [in_rows, cols] */
    float *in_weight;   /* [in_rows] */
    int32_t *in_offset; /* [n_slots + 1] */
    int32_t in_rows, n_slots;
} hd_comm_dispatch;

/* Combine: in_y holds results by place of the received rows, y gets them by place of the
 * sent rows. */
typedef struct hd_comm_combine {
    hd_rows in_y; /* [in_rows, cols] */
    hd_rows y;    /* [rows * top_k, cols] */
    int32_t rows, cols, top_k, in_rows;
} hd_comm_combine;

typedef struct hd_comm {
    void *ctx;
    void (*all_reduce)(void *ctx, hd_stream *s, const hd_comm_all_reduce *a);
    void (*all_gather)(void *ctx, hd_stream *s, const hd_gather_columns *a);
    void (*dispatch)(void *ctx, hd_stream *s, const hd_comm_dispatch *a);
    void (*combine)(void *ctx, hd_stream *s, const hd_comm_combine *a);
} hd_comm;

#endif
