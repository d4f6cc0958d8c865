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
 *     attention    dp groups of tp consecutive ranks, which have their rows in common; each
 *                  head_parts consecutive ranks of a group shard the heads; with cp (context
 *                  parallelism) the tp / head_parts ranks that have the same heads divide the
 *                  rows, else each computes all
 *     experts      etp consecutive ranks shard an expert, ep such groups divide the experts,
 *                  and all of it repeats world / (ep * etp) times
 *     dense MLPs   groups of dense_tp consecutive ranks; 1 is data parallel (also shared
 *                  experts)
 *     LM head      groups of head_tp consecutive ranks shard the vocabulary
 *
 * Outside the attention a rank owns an equal part of the rows of its attention group, and the
 * ranks that share an MLP, expert or head compute the rows that they own together.
 *
 * A second GEMM of a block (output projection, down projection) reads columns that several
 * ranks computed. They gather these columns, and each computes a part of the result's columns:
 * every sum has the terms and the order that it has on one rank. With sum_in_ranks each rank
 * multiplies its own columns instead, and partial sums are reduced, in another order.
 *
 * The ep groups hold n_experts + redundant expert slots, the same number each; when a model
 * opens, slot s is a replica of expert s % n_experts.
 *
 * dwdp (distributed weight data parallelism): dwdp consecutive ranks divide the memory of the experts that
 * each of them computes. A rank fetches those that it does not hold (model/expert_fetch.h). Then all other
 * sizes but dp and ep are 1. With ep 1 a rank computes all experts of its own rows, and ranks exchange no
 * rows; beside its part a rank holds the first experts of the next rank's, copies of all ranks together. With
 * ep groups of dwdp ranks each group computes a part of the experts, and a rank exchanges rows with those
 * that have its number in the other groups. */
typedef struct hd_parallel_config {
    int32_t tp, dp;
    int32_t ep, etp;
    int32_t dense_tp, head_tp;
    int32_t redundant;
    int32_t dwdp;       /* divides dp; 0: 1 */
    int32_t head_parts; /* divides tp; 0: tp */
    bool sum_in_ranks;  /* etp and dense_tp must be tp, or 1 */
    bool fp8_rows;      /* rows travel to experts as E4M3 (ops/group_format.h) */
    int32_t cp;         /* tp / head_parts, or 0 or 1: rows are not divided */
    int32_t copies;     /* with dwdp: experts that a second rank holds, or a third */
} hd_parallel_config;

hd_parallel_config hd_parallel_single(void); /* one rank */
hd_parallel_config hd_parallel_tensor(
    int32_t tp); /* everything sharded over tp ranks, rows in common */
/* Data-parallel attention; complete experts over ep ranks (expert parallelism). */
hd_parallel_config hd_parallel_expert(int32_t ep, int32_t redundant);

/* One group of n ranks. copies: at most as many that every rank lacks an expert. */
hd_parallel_config hd_parallel_dwdp(int32_t n, int32_t copies, const hd_model_spec *spec);
/* ep groups of n ranks; redundant slots if ep does not divide the experts. */
hd_parallel_config hd_parallel_dwdp_groups(int32_t n, int32_t ep, const hd_model_spec *spec);

/* As many ranks as the larger of tp * dp and ep, which must be a multiple of the other, in dp
 * attention groups, whose number must divide it. tp ranks of a group share the heads and dense
 * MLPs, all ranks what ep leaves of each expert, those of a group the LM head. Fewer share the
 * heads if there are fewer. Experts get redundant slots if ep does not divide them. */
hd_parallel_config hd_parallel_common(int32_t tp, int32_t dp, int32_t ep,
                                      const hd_model_spec *spec);
/* The same with cp times as many ranks in a group, of which every tp ranks share the heads. */
hd_parallel_config hd_parallel_context(int32_t tp, int32_t cp, int32_t dp, int32_t ep,
                                       const hd_model_spec *spec);

/* Number of parts that the heads are divided into. */
int32_t hd_parallel_head_parts(const hd_parallel_config *l);

int32_t hd_parallel_world(const hd_parallel_config *l);

/* Whether ranks exchange rows or columns in a step. Ranks that do not need no hd_comm. */
bool hd_parallel_exchanges(const hd_parallel_config *l);
hd_status hd_parallel_check(const hd_parallel_config *l, hd_err *err);

/* The groups that a rank belongs to. HD_GROUP_DP: the ranks with the same tp index;
 * HD_GROUP_EP: the ranks that together compute every expert slot once. */
typedef enum hd_group {
    HD_GROUP_TP,
    HD_GROUP_DP,
    HD_GROUP_EP,
    HD_GROUP_ETP,
    HD_GROUP_DENSE,
    HD_GROUP_HEAD,
    HD_GROUP_ATTENTION, /* the head_parts ranks that together hold every attention head once */
    HD_GROUP_CP,        /* the ranks of an attention group with the same heads */
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
    int32_t tp, dp, ep, etp, dense, head, attention;
} hd_rank_coords;

hd_rank_coords hd_parallel_coords(const hd_parallel_config *l, int32_t rank);

/* A part of n things: first .. first + n - 1. */
typedef struct hd_extent {
    int32_t first, n;
} hd_extent;

/* Returns part `index` of `parts` of n rows or columns. Parts have whole blocks of 128, or of a
 * smaller power of two where the largest would exceed the mean by more than an eighth. */
hd_extent hd_extent_of(int32_t n, int32_t index, int32_t parts);

typedef struct hd_shard {
    hd_parallel_config parallel;
    int32_t rank;
    int32_t head0, n_heads;     /* attention heads */
    int32_t o_group0, o_groups; /* V4's output groups */
    hd_extent dense_inter;      /* columns of dense MLPs */
    hd_extent shared_inter;     /* columns of the shared experts, all together */
    hd_extent moe_inter;        /* columns of a routed expert */
    /* columns of the hidden state that this rank computes of the attention's result, of a
     * dense MLP's and of an expert's; all with sum_in_ranks */
    hd_extent o_out, dense_out, moe_out;
    int32_t expert0, n_experts; /* expert slots of routed experts, in every MoE layer */
    hd_extent held;        /* of these slots, those in this rank's memory: with dwdp a part */
    int32_t vocab0, vocab; /* rows of the LM head */
} hd_shard;

/* Returns the shard of a rank of the layout's world. It does not check divisibility: the
 * plan (placement.h) does, and its error names the tensor. */
hd_shard hd_shard_of(const hd_parallel_config *l, int32_t rank, const hd_model_spec *spec);

/* Whether slot i of n is in `held`, which goes on at slot 0 behind the last one. */
bool hd_shard_holds(hd_extent held, int32_t i, int32_t n);

/* Returns the number of expert slots of all ranks of the group. */
int32_t hd_shard_slots(const hd_shard *s);

/* Returns the shard's slot that holds an expert when a model opens, or -1. */
int32_t hd_shard_slot(const hd_shard *s, int32_t expert, int32_t n_experts);

#endif
