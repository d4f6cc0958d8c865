/* dwdp_sim.h - DWDP beside expert parallelism on paper: ranks that fetch a layer's missing experts
 * while they compute, over links that they share.
 *
 * A rank copies one slice after the other, or one of each peer at once. A slice takes its bytes from
 * the link of its peer, which all that read there at the moment share equally. While a rank
 * copies, it computes `slowdown` times as long. Layer l + depth is fetched once layer l - 1 is done.
 * Ranks of expert parallelism wait in every layer for the slowest and exchange rows. */
#ifndef HD_MOE_DWDP_SIM_H
#define HD_MOE_DWDP_SIM_H

#include <stdint.h>

#include "base/status.h"

enum { HD_DWDP_SIM_MAX_RANKS = 72 };

/* From which peers slices come. */
typedef enum hd_dwdp_order {
    HD_DWDP_SAME,      /* all of one peer, then the next: every rank in the same order */
    HD_DWDP_STAGGERED, /* the same, but each rank begins at the one behind itself */
    HD_DWDP_SLICED,    /* a slice of each peer in turn, as fetch_order.h deals them */
    /* the same with slices of all peers under way together: no link has more readers than each of
     * them has peers, so all get what their own link can take */
    HD_DWDP_TOGETHER,
    HD_DWDP_N_COPY_KINDS
} hd_dwdp_order;

typedef struct hd_dwdp_sim_args {
    int32_t ranks, layers, depth;
    double compute_us;  /* of one layer, without copies */
    double jitter;      /* deviation of it, by rank and layer, as a part of it */
    double slowdown;    /* of computing while a copy runs; 1: none */
    double exchange_us; /* of a layer, in expert parallelism */
    double fetch_us;    /* to copy what one layer lacks, over a link of its own */
    int32_t slices;     /* of what a layer lacks from one peer */
    hd_dwdp_order order;
    uint64_t seed;
} hd_dwdp_sim_args;

/* A context layer of R1 on 4 GB200, 8K prompts (TensorRT-LLM, blog 19). */
hd_dwdp_sim_args hd_dwdp_sim_default(void);

/* Means over ranks and layers. */
typedef struct hd_dwdp_sim_result {
    double ep_us, ep_wait_us; /* a layer; of it waiting for the slowest rank */
    double dwdp_us;           /* a layer */
    double exposed_us;        /* of it waiting for experts */
    double copy_us;           /* time in which copies of a layer run */
} hd_dwdp_sim_result;

/* HD_EINVAL names an argument that is out of range. */
hd_status hd_dwdp_simulate(hd_dwdp_sim_result *out, const hd_dwdp_sim_args *a, hd_err *err);

#endif
