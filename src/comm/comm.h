/* comm.h - the points of a forward pass where ranks meet.
 *
 * A model that holds a share of the weights (weights/parallel_config.h) computes parts. At four points
 * it hands them to whoever stands behind this table: partial sums are reduced over the ranks
 * that have rows in common, the parts of a row gathered, and rows go to the ranks of their
 * experts and come back. Every entry queues on the stream and returns; which ranks take part
 * follows from the share. */
#ifndef HD_COMM_COMM_H
#define HD_COMM_COMM_H

#include <stdint.h>

#include "device/device.h"
#include "ops/ops.h"

/* x [n] of each rank of a tp group becomes the sum over the group. */
typedef struct hd_comm_all_reduce {
    hd_act *x;
    int64_t n;
} hd_comm_all_reduce;

/* x [rows, cols], of which this rank has written columns first .. first + own - 1 of every row;
 * then all have all. */
typedef struct hd_gather_columns {
    float *x;
    int32_t rows, cols, first, own;
} hd_gather_columns;

/* A copy of a row goes to each of the experts that it chose. Places are those of the permute
 * op over all experts of the model: place i, of expert e where offset[e] <= i < offset[e + 1],
 * is row assignment[i] / top_k of x with weight[assignment[i]]. What arrives is grouped by the
 * slots of experts that this rank holds: slot e has places in_offset[e] .. in_offset[e + 1] - 1
 * of in_x and in_weight, at most in_rows in all. */
typedef struct hd_comm_dispatch {
    int32_t layer;
    const hd_act *x; /* [rows, cols] */
    const float *weight;
    const int32_t *offset, *assignment;
    int32_t rows, cols, top_k, n_experts;
    hd_act *in_x;       /* [in_rows, cols] */
    float *in_weight;   /* [in_rows] */
    int32_t *in_offset; /* [slots + 1] */
    int32_t in_rows, n_slots;
} hd_comm_dispatch;

/* The way back: in_y by place of what arrived, y by place of what was sent. */
typedef struct hd_comm_combine {
    const hd_act *in_y; /* [in_rows, cols] */
    hd_act *y;          /* [rows * top_k, cols] */
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
