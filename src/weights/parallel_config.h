/* parallel_config.h - how the ranks of a world share a model, and what one of them has of it.
 *
 * A layout names the groups; a share is what follows from it for one rank: how many heads,
 * columns, experts and words it computes. Model code reads its widths from the share, weights
 * are cut by it, and both agree because there is one function that derives it. */
#ifndef HD_WEIGHTS_PARALLEL_CONFIG_H
#define HD_WEIGHTS_PARALLEL_CONFIG_H

#include <stdint.h>

#include "base/status.h"
#include "weights/spec.h"

/* Every field but redundant is at least 1. The world has tp * dp ranks, numbered with tp
 * fastest:
 *
 *     attention    dp groups of tp consecutive ranks; heads are cut over a group
 *     experts      etp consecutive ranks share an expert, ep such groups share the experts,
 *                  and all of it repeats world / (ep * etp) times
 *     dense MLPs   groups of dense_tp consecutive ranks; 1 is data parallel (shared experts
 *                  follow them)
 *     output head  groups of head_tp consecutive ranks cut the vocabulary
 *
 * The ep groups hold n_experts + redundant slots, as many each; slot s is a copy of expert
 * s % n_experts. */
typedef struct hd_parallel_config {
    int32_t tp, dp;
    int32_t ep, etp;
    int32_t dense_tp, head_tp;
    int32_t redundant;
} hd_parallel_config;

hd_parallel_config hd_parallel_single(void); /* one rank */
hd_parallel_config hd_parallel_tensor(
    int32_t tp); /* everything cut over tp ranks, rows in common */
/* Rows and attention data parallel, whole experts over ep ranks. */
hd_parallel_config hd_parallel_expert(int32_t ep, int32_t redundant);

int32_t hd_parallel_world(const hd_parallel_config *l);
hd_status hd_parallel_check(const hd_parallel_config *l, hd_err *err);

/* Where a rank stands in each of the groups. */
typedef struct hd_rank_coords {
    int32_t tp, dp, ep, etp, dense, head;
} hd_rank_coords;

hd_rank_coords hd_parallel_coords(const hd_parallel_config *l, int32_t rank);

typedef struct hd_shard {
    hd_parallel_config parallel;
    int32_t rank;
    int32_t head0, n_heads;     /* attention heads */
    int32_t o_groups;           /* V4's output groups */
    int32_t dense_inter;        /* columns of dense MLPs */
    int32_t shared_inter;       /* of the shared experts, all together */
    int32_t moe_inter;          /* of a routed expert */
    int32_t expert0, n_experts; /* slots of routed experts, in every MoE layer */
    int32_t vocab0, vocab;      /* rows of the output head */
} hd_shard;

/* rank is one of the layout's world. Cuts that leave a rest are not judged here: the plan
 * (placement.h) refuses them by the tensor's name. */
hd_shard hd_shard_of(const hd_parallel_config *l, int32_t rank, const hd_model_spec *spec);

/* Which of a share's slots holds an expert, or -1. */
int32_t hd_shard_slot(const hd_shard *s, int32_t expert, int32_t n_experts);

#endif
