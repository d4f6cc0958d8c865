/* memory.h - the memory of a rank that does not exist yet, by the plans with which an engine opens
 * one: placement of tensors, capacities (engine/sizes.h), activations of the model runner. */
#ifndef HD_CAPACITY_MEMORY_H
#define HD_CAPACITY_MEMORY_H

#include "capacity/gpu.h"
#include "engine/sizes.h"
#include "weights/summary.h"

typedef struct hd_rank_memory_args {
    const hd_model_spec *spec;
    const hd_parallel_config *parallel;
    const hd_engine_sizes *sizes;
    hd_dtype act_type, kv_type;    /* of activations and of entries that attention reads */
    int32_t threads;               /* of a CPU rank, each with scratch; 1 for a GPU */
    bool graphs;                   /* decode graphs, as a GPU's rank has */
    const hd_grammar_vocab *vocab; /* as in hd_model_runner_options */
    int32_t n_micro;               /* micro-batches of a step; 0: one */
    const hd_gpu *gpu; /* of ranks that are processes; NULL: threads, which have no messages */
} hd_rank_memory_args;

/* Bytes of the rank that has most of each. */
typedef struct hd_rank_memory {
    int64_t weights[HD_N_PARAM_GROUPS];
    int64_t spare; /* of the routed experts: in slots that hold copies */
    int64_t
        staged; /* room for routed experts of two layers that other ranks or the host hold */
    int64_t kv, activations;
    /* host memory: window snapshots, HiSparse's entries; Engram tables, which the ranks of a host share */
    int64_t snapshots, entries, tables;
    /* host memory: what the rank shares with the others (comm/shm.h); 0 if they are on several nodes, whose
     * messages UCX carries. A rank on a CPU has it in the memory of the other parts. */
    int64_t messages;
} hd_rank_memory;

/* HD_EUNSUPPORTED, with the tensor's name, if the layout cannot divide the model. */
hd_status hd_rank_memory_of(hd_rank_memory *out, const hd_rank_memory_args *a, hd_err *err);

int64_t hd_rank_memory_weights(const hd_rank_memory *m);
int64_t hd_rank_memory_total(const hd_rank_memory *m); /* of the device */

#endif
