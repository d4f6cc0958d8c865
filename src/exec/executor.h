/* executor.h - a model that runs steps: memory, forward pass, choosing, drafting.
 *
 * The runner behind a real scheduler. Owns the model's activations, the KV pools and the
 * sampling state of every running slot. Owned by one step thread. */
#ifndef HD_EXEC_EXECUTOR_H
#define HD_EXEC_EXECUTOR_H

#include "exec/exec.h"
#include "kv/cache.h"
#include "model/model.h"
#include "ops/ops.h"

typedef struct hd_executor hd_executor;

typedef struct hd_executor_options {
    int32_t n_slots;     /* running requests */
    int32_t step_rows;   /* rows of one step */
    int32_t positions;   /* the longest sequence */
    int32_t lease_pages; /* page table entries of one sequence */
    int32_t n_pages[HD_N_LIFETIMES];
    int32_t n_snapshots;
    int32_t n_ids;      /* token ids that may be chosen; at most the vocabulary */
    int32_t max_drafts; /* 0: the MTP layer is not run */
} hd_executor_options;

enum { HD_MAX_BIAS = 1024 }; /* biased and banned tokens of one request */

/* What a request asks of the sampler; bias and ban are copied. */
typedef struct hd_choosing {
    hd_sampling params;        /* counts_row, bias_at, ban_at are filled in by the executor */
    const hd_logit_bias *bias; /* [params.n_bias] */
    const int32_t *ban;        /* [params.n_ban] ids forbidden before params.ban_until */
} hd_choosing;

/* env must outlive the executor. */
hd_status hd_executor_open(hd_executor **out, const hd_model_env *env,
                           const hd_executor_options *options, hd_err *err);
void hd_executor_close(hd_executor *x); /* NULL is fine */

/* A request takes a slot: tokens[n], of which the first n_prompt are its prompt. */
void hd_executor_enter(hd_executor *x, int32_t slot, const hd_choosing *choosing,
                       const int32_t *tokens, int32_t n, int32_t n_prompt);

hd_runner hd_executor_runner(hd_executor *x);

size_t hd_executor_bytes(const hd_executor *x); /* activations and sampling state */

#endif
