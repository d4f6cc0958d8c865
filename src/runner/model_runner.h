/* model_runner.h - a model that runs steps: memory, forward pass, choosing, drafting.
 *
 * The runner behind a real scheduler. Owns the model's activations, the KV pools and the
 * sampling state of every running slot. Owned by one step thread. */
#ifndef HD_RUNNER_MODEL_RUNNER_H
#define HD_RUNNER_MODEL_RUNNER_H

#include "runner/runner.h"
#include "kv/cache.h"
#include "model/model.h"
#include "ops/ops.h"
#include "grammar/grammar.h"

typedef struct hd_model_runner hd_model_runner;

typedef struct hd_model_runner_options {
    int32_t n_slots;   /* running requests */
    int32_t step_rows; /* rows of one step */
    int32_t positions; /* the longest sequence */
    int32_t seq_pages; /* page table entries of one sequence */
    int32_t n_pages[HD_N_KV_GROUPS];
    int32_t n_snapshots;
    int32_t n_ids;       /* token ids that may be chosen; at most the vocabulary */
    int32_t max_drafts;  /* 0: the MTP layer is not run */
    int32_t sample_rows; /* logits rows of one step: chosen and scored; 0: all slots' choices */
    const hd_grammar_vocab *vocab; /* of the masks; NULL: no request has a guide */
    int32_t expert_rows;           /* of hd_model_limits */
    hd_acceptance forced;          /* of drafts, for benchmarks, which have no guides then */
    bool
        fixed_steps; /* steps in which all decode have fixed shapes, one graph launch each where
                         the device records, and the host is one ahead; docs/graphs.md */
} hd_model_runner_options;

enum { HD_MAX_BIAS = 1024 }; /* biased and banned tokens of one request */

/* What steers a reply beside its numbers: reasoning, then text of the grammar. Ids that a
 * tokenizer does not have are -1. A reply that does not begin inside the reasoning may enter it by
 * its first token, if think is given. Where the grammar has calls, a marker that opens them ends
 * the reasoning as unthink does, and free content. */
typedef struct hd_constraint {
    bool reasoning;            /* the reply begins inside the reasoning */
    int32_t think, unthink;    /* the tokens that begin and end reasoning */
    int32_t max_reasoning;     /* tokens before unthink is forced; 0: no bound */
    const hd_grammar *grammar; /* of the tokens that follow, or NULL: free */
    bool free;                 /* content is free, and held from where calls open */
    const int32_t *forced;     /* [n_forced] the first of them, whatever the model says */
    int32_t n_forced;
    int32_t relaxed_top;      /* inside reasoning a draft also stands when it is among this */
    float relaxed_delta;      /* many tokens and at most this less probable than the first */
    const int32_t *ban;       /* [n_ban] may not come at positions before ban_until, unless */
    int32_t n_ban, ban_until; /* nothing else may */
} hd_constraint;

/* What a request asks of the sampler. bias and ban are copied; guide and what it points at stay
 * the caller's and must outlive the slot's use. */
typedef struct hd_request_sampling {
    hd_sampling params; /* counts_row, bias_at, ban_at, relaxed_top and relaxed_delta are filled
                           in by the executor */
    const hd_logit_bias *bias;       /* [params.n_bias] */
    const int32_t *ban;              /* [params.n_ban] ids forbidden before params.ban_until */
    const hd_constraint *constraint; /* NULL: none */
} hd_request_sampling;

/* env must outlive the executor. */
hd_status hd_model_runner_open(hd_model_runner **out, const hd_model_env *env,
                               const hd_model_runner_options *options, hd_err *err);
void hd_model_runner_close(hd_model_runner *x); /* NULL is fine */

/* A request takes a slot: tokens[n], of which the first n_prompt are its prompt. */
void hd_model_runner_enter(hd_model_runner *x, int32_t slot,
                           const hd_request_sampling *choosing, const int32_t *tokens,
                           int32_t n, int32_t n_prompt);

/* Off: steps of fixed shape are queued op by op, to be looked at one by one. On at open. */
void hd_model_runner_use_graphs(hd_model_runner *x, bool on);

/* Fills every page with made-up values, for measuring after contexts that nobody computed. */
hd_status hd_model_runner_fill_kv(hd_model_runner *x, hd_err *err);

hd_runner hd_model_runner_interface(hd_model_runner *x);

enum { HD_GAP_BINS = 64, HD_GAP_NS = 500 };

/* Sums over the steps of fixed shape since open. A gap is the time that the device spent
 * between two steps of which the later was queued, as a graph, before the earlier was over. */
typedef struct hd_model_runner_times {
    int64_t steps, graph_steps; /* all; those that were one graph launch */
    int64_t step_ns;            /* of the device in all of them */
    int64_t busy_ns, gap_ns;    /* of the device, in and between graphs */
    int64_t gaps[HD_GAP_BINS];  /* of HD_GAP_NS each; the last: or longer */
    int64_t host_ns, wait_ns;   /* in runs that had one: at work; waiting */
    int64_t graphs, record_ns;  /* recorded; the host's time for it, not in host_ns */
} hd_model_runner_times;

const hd_model_runner_times *hd_model_runner_read_times(const hd_model_runner *x);

/* Memory of the device but for weights and the cache's pages: activations, scratch of ops, what
 * travels in a step, sampling state, and graphs as they are recorded. */
size_t hd_model_runner_bytes(const hd_model_runner *x);

/* Rows every routed expert has computed so far, load[layer * n_experts + expert] of the spec's
 * n_layers (not the MTP layer's), read from the device; on the step thread. */
hd_status hd_model_runner_read_experts(hd_model_runner *x, int64_t *load, hd_err *err);

#endif
