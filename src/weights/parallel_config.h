/* parallel_config.h - parallel layout: tensor, data and expert parallelism, and one rank's
 * shard.
 *
 * A parallel config sizes the groups. A shard follows from it for one rank: how many heads,
 * columns, experts and vocabulary rows it computes. Model code reads its widths from the
 * shard, and weights are sharded by it; both agree because one function derives it. */
#ifndef HD_WEIGHTS_PARALLEL_CONFIG_H
#define HD_WEIGHTS_PARALLEL_CONFIG_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "weights/spec.h"

/* Sizes of the groups. Every field but redundant is at least 1. The world has tp * dp ranks,
 * numbered with tp fastest:
 *
 *     attention    dp groups of tp consecutive ranks, which have their rows in common; a group
 *                  shards the heads, or with whole_heads each rank computes all of them
 *     experts      etp consecutive ranks shard an expert, ep such groups divide the experts,
 *                  and all of it repeats world / (ep * etp) times
 *     dense MLPs   groups of dense_tp consecutive ranks; 1 is data parallel (also shared
 *                  experts): ranks with rows in common divide the rows
 *     LM head      groups of head_tp consecutive ranks shard the vocabulary
 *
 * The ep groups hold n_experts + redundant expert slots, the same number each; when a model
 * opens, slot s is a replica of expert s % n_experts. */
typedef struct hd_parallel_config {
    int32_t tp, dp;
    int32_t ep, etp;
    int32_t dense_tp, head_tp;
    int32_t redundant;
    bool whole_heads;
} hd_parallel_config;

hd_parallel_config hd_parallel_single(void); /* one rank */
hd_parallel_config hd_parallel_tensor(
    int32_t tp); /* everything sharded over tp ranks, rows in common */
/* Data-parallel attention; complete experts over ep ranks (expert parallelism). */
hd_parallel_config hd_parallel_expert(int32_t ep, int32_t redundant);

/* Complete experts over ep ranks with rows in common: tp, 1 or ep, of them share the heads; dense
 * MLPs are complete. The LM head is shared if its rows can be divided. */
hd_parallel_config hd_parallel_common(int32_t tp, int32_t ep, const hd_model_spec *spec);

/* Number of parts that the heads are divided into. */
int32_t hd_parallel_head_parts(const hd_parallel_config *l);

int32_t hd_parallel_world(const hd_parallel_config *l);
hd_status hd_parallel_check(const hd_parallel_config *l, hd_err *err);

/* The groups that a rank belongs to. HD_GROUP_DP: the ranks with the same tp index;
 * HD_GROUP_EP: the ranks that together hold every expert slot once. */
typedef enum hd_group {
    HD_GROUP_TP,
    HD_GROUP_DP,
    HD_GROUP_EP,
    HD_GROUP_ETP,
    HD_GROUP_DENSE,
    HD_GROUP_HEAD,
    HD_N_GROUPS
} hd_group;

/* Members of a group: member i is rank first + i * stride. */
typedef struct hd_rank_group {
    int32_t first, stride, n;
    int32_t index; /* which member the rank is */
} hd_rank_group;

hd_rank_group hd_parallel_group(const hd_parallel_config *l, int32_t rank, hd_group group);

/* A rank's index in each of the groups. */
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
    int32_t shared_inter;       /* columns of the shared experts, all together */
    int32_t moe_inter;          /* columns of a routed expert */
    int32_t expert0, n_experts; /* expert slots of routed experts, in every MoE layer */
    int32_t vocab0, vocab;      /* rows of the LM head */
} hd_shard;

/* Returns the shard of a rank of the layout's world. It does not check divisibility: the
 * plan (placement.h) does, and its error names the tensor. */
hd_shard hd_shard_of(const hd_parallel_config *l, int32_t rank, const hd_model_spec *spec);

/* Returns the number of expert slots of all ranks of the group. */
int32_t hd_shard_slots(const hd_shard *s);

/* Returns the shard's slot that holds an expert when a model opens, or -1. */
int32_t hd_shard_slot(const hd_shard *s, int32_t expert, int32_t n_experts);

#endif
