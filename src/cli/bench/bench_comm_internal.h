/* bench_comm_internal.h - what bench_comm.c, bench_comm_experts.c and bench_comm_peer.c share. */
#ifndef HD_CLI_BENCH_BENCH_COMM_INTERNAL_H
#define HD_CLI_BENCH_BENCH_COMM_INTERNAL_H

#include <stddef.h>

#include "base/status.h"
#include "comm/comm.h"

enum { COMM_SIZES = 7, COMM_MAX_ROUNDS = 10000 };
enum { COMM_EXPERT_ROWS = 128, COMM_EXPERT_COLS = 4096, COMM_EXPERT_TOP_K = 8 };

extern const size_t comm_sizes[COMM_SIZES]; /* bytes */

/* Times of rounds; `us` has COMM_MAX_ROUNDS places. */
typedef void comm_round_fn(void *ctx, size_t bytes);

/* Median time of a call in microseconds, after as many calls to warm up as a tenth. */
double comm_median_us(comm_round_fn *fn, void *ctx, size_t bytes, int rounds);

/* Fewer rounds for more bytes. */
int comm_rounds(int rounds, size_t bytes);

/* One copy of memory by one thread; us[COMM_SIZES]. */
hd_status comm_time_memcpy(double *us, int rounds, hd_err *err);

/* Half a round trip of a message over a plain TCP socket between two processes of this host. */
hd_status comm_time_socket(double *us, int rounds, hd_err *err);

/* A dispatch and a combine, and a copy of what a dispatch brings: `bytes`, a row for each choice. Of other ranks' rows, each
 * once, come `once` bytes, and `back` are the results that other ranks have. */
typedef struct comm_experts {
    double dispatch_us, combine_us, copy_us;
    size_t bytes, once, back;
} comm_experts;

/* Before other exchanges: the others learn where the rows lie. All ranks call it; HD_GROUP_EP has all of them. */
hd_status comm_time_experts(const hd_comm *comm, hd_device *device, hd_stream *stream,
                            int rounds, comm_experts *out, hd_err *err);

#endif
