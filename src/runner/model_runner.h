/* model_runner.h - runs steps of a model: forward pass, sampling, draft verification, MTP
 * drafting.
 *
 * The model runner is the scheduler's runner in production. It owns the model's activations,
 * the KV pools and the sampling state of every slot. The step thread owns it. */
#ifndef HD_RUNNER_MODEL_RUNNER_H
#define HD_RUNNER_MODEL_RUNNER_H

#include "runner/runner.h"
#include "kv/handover.h"
#include "model/model.h"
#include "ops/ops.h"
#include "grammar/grammar.h"
#include "moe/recorder.h"

typedef struct hd_model_runner hd_model_runner;

/* What a rank does in its attention group. The leader, member 0, samples and drafts; each
 * of its forward passes and page copies goes to the followers as a command, a block of bytes, and
 * runs on all ranks. A follower has no sampling state. Leaders of several groups run at the same
 * time, also without inputs: all their passes are the same. */
typedef enum hd_runner_role {
    HD_RUNNER_ALONE,
    HD_RUNNER_LEADS,
    HD_RUNNER_FOLLOWS
} hd_runner_role;

typedef struct hd_model_runner_options {
    int32_t n_slots;   /* running requests at most */
    int32_t step_rows; /* rows of one batch */
    int32_t positions; /* the longest sequence */
    int32_t seq_pages; /* block table entries of one sequence */
    int32_t n_pages[HD_N_KV_GROUPS];
    int32_t n_host[HD_N_KV_GROUPS];
    int32_t resident;   /* as in hd_kv_options */
    int32_t n_ids;      /* token ids that may be sampled; at most the vocabulary */
    int32_t max_drafts; /* drafts per sequence and step; 0: the MTP layer is not run */
    /* logits rows of one step, for sampling and prompt log-probabilities; 0: as many as all
     * slots can sample at */
    int32_t sample_rows;
    int32_t top_stride; /* alternatives of one token at most; 0: none */
    /* vocabulary of the grammar masks; NULL: no request has a constraint */
    const hd_grammar_vocab *vocab;
    int32_t expert_rows; /* these of hd_model_limits */
    int32_t n_micro, micro_from;
    hd_acceptance forced; /* forced acceptance of drafts, for benchmarks without constraints */
    /* Decode steps have fixed shapes (decode graphs). Each is one graph launch if the device
     * can capture, and the host is one step ahead (overlap schedule); docs/graphs.md. */
    bool fixed_steps;
    bool replay[HD_N_REPLAYS]; /* choices are kept: hd_model_runner_read_replay() */
    hd_runner_role role;       /* not ALONE: env has comm, and steps are not fixed */
    /* The env's weights if experts may move between the ranks; or NULL. */
    hd_weights *movable;
    /* Of a follower: called for hd_model_runner_renew(), for exchanges with the leader. */
    hd_status (*renew)(void *ctx, hd_err *err);
    void *renew_ctx;
    /* Of ranks that share experts and have a stage: in an eager step in which a rank has so many rows or more
     * all fetch experts; HD_FETCH_BY_TIME: as many as take as long as the fetches. 0: never. */
    int32_t fetch_from;
} hd_model_runner_options;

enum { HD_FETCH_BY_TIME = -1 };

/* A constraint on the tokens of an answer: reasoning budget, forced tokens, grammar. Ids
 * that a tokenizer does not have are -1. If `think` is set, an answer that does not begin
 * inside the reasoning may enter it by its first token. If the grammar has tool calls, a
 * marker that opens them ends the reasoning, as `unthink` does, and ends free content. */
typedef struct hd_constraint {
    bool reasoning;            /* the answer begins inside the reasoning */
    int32_t think, unthink;    /* tokens that begin and end the reasoning */
    int32_t max_reasoning;     /* reasoning tokens before unthink is forced; 0: no limit */
    const hd_grammar *grammar; /* of the tokens after the reasoning, or NULL: unconstrained */
    bool free;                 /* content is unconstrained until tool calls open */
    /* [n_forced] first tokens after the reasoning, whatever the model prefers */
    const int32_t *forced;
    int32_t n_forced;
    /* Relaxed acceptance: inside the reasoning a draft is also accepted if it is among the
     * relaxed_top best tokens and at most relaxed_delta less probable than the best. */
    int32_t relaxed_top;
    float relaxed_delta;
    /* [n_ban] tokens banned at positions before ban_until, unless no other token is allowed */
    const int32_t *ban;
    int32_t n_ban, ban_until;
} hd_constraint;

/* Sampling parameters of a request. bias and ban are copied. The constraint and what it
 * points to stay the caller's and must outlive the request's use of the slot. */
typedef struct hd_request_sampling {
    /* counts_row, bias_at, ban_at, relaxed_top and relaxed_delta are set by the model runner */
    hd_sampling params;
    const hd_logit_bias *bias;       /* [params.n_bias] */
    const int32_t *ban;              /* [params.n_ban] ids banned before params.ban_until */
    const hd_constraint *constraint; /* NULL: none */
} hd_request_sampling;

/* Opens a model runner and allocates all its memory. env must outlive it. */
hd_status hd_model_runner_open(hd_model_runner **out, const hd_model_env *env,
                               const hd_model_runner_options *options, hd_err *err);
void hd_model_runner_close(hd_model_runner *x); /* NULL is fine */

/* A follower's thread: runs the leader's commands until it ends them, which returns HD_OK. If a
 * command fails, here or elsewhere, communication of all ranks is aborted. Options but
 * the role must be those of the leader. */
hd_status hd_model_runner_follow(hd_model_runner *x, hd_err *err);

/* Of the leader, between two runs: when it returns, the followers have ended what came before, and
 * read no weights until the next run. */
hd_status hd_model_runner_rest(hd_model_runner *x, hd_err *err);

/* Of the leader, between two runs: followers call what their options say. */
void hd_model_runner_renew(hd_model_runner *x);

/* The leader ends the followers' hd_model_runner_follow(). Nothing may run afterwards. */
void hd_model_runner_end(hd_model_runner *x);

/* Sets the sampling state of a slot for a request: tokens[n], of which the first n_prompt
 * are its prompt. */
void hd_model_runner_enter(hd_model_runner *x, int32_t slot,
                           const hd_request_sampling *sampling, const int32_t *tokens,
                           int32_t n, int32_t n_prompt);

/* Drops what was queued ahead: steps that follow compute everything anew. Between two runs. */
void hd_model_runner_forget_steps(hd_model_runner *x);

/* Returns its KV pages: between two runs they may be copied on the runner's stream. */
hd_kv *hd_model_runner_kv(hd_model_runner *x);

/* Of the leader: the pages of all ranks of its attention group. Copy NULL: it has no followers. */
hd_page_ranks hd_model_runner_page_ranks(hd_model_runner *x);

/* Gives the memory of all KV pages back, see hd_kv_discard(). Between two runs, after
 * hd_model_runner_forget_steps(). */
hd_status hd_model_runner_discard_kv(hd_model_runner *x, size_t *bytes, hd_err *err);
hd_status hd_model_runner_restore_kv(hd_model_runner *x, hd_err *err);

/* See hd_kv_host_page(). */
void *hd_model_runner_host_page(const hd_model_runner *x, hd_kv_group group, hd_host_page host,
                                size_t *bytes);

/* Turns graph launches on or off. If off, steps of fixed shape are queued operator by
 * operator, for profiling. They are on after open. */
void hd_model_runner_use_graphs(hd_model_runner *x, bool on);

/* Fills every KV page with random values, to measure steps after contexts that were not
 * computed. */
hd_status hd_model_runner_fill_kv(hd_model_runner *x, hd_err *err);

hd_runner hd_model_runner_interface(hd_model_runner *x);

/* Sums over the steps of fixed shape since open. A gap is device time between two steps of
 * which the later was queued, as a graph, before the earlier was finished. */
typedef struct hd_model_runner_times {
    int64_t steps, graph_steps; /* all steps; steps that were one graph launch */
    int64_t step_ns;            /* device time of all steps */
    int64_t busy_ns, gap_ns;    /* device time inside graphs, and between them */
    int64_t gaps[HD_GAP_BINS];  /* histogram of gaps */
    int64_t host_ns, wait_ns;   /* host time in runs with such a step: working; waiting */
    int64_t graphs, record_ns;  /* graphs captured; host time of the captures, not in host_ns */
    /* steps with prompts beside decoding, also eager ones; device time between them and the step
     * before, on devices with graphs */
    int64_t mixed_steps, mixed_gap_ns;
    /* of them those that were queued before the step before was finished */
    int64_t mixed_ahead;
    int64_t micro_steps;    /* of any shape: in several micro-batches */
    int32_t graph_launches; /* kernels and copies of the graph captured last */
    int64_t fetch_steps;    /* eager steps that fetched experts (fetch_from) */
    int32_t fetch_from;     /* rows from which on the next one does; INT32_MAX: not known yet */
} hd_model_runner_times;

const hd_model_runner_times *hd_model_runner_read_times(const hd_model_runner *x);

/* Returns device memory without weights and KV pages: activations, scratch of operators,
 * inputs and outputs of a step, sampling state, and captured graphs. */
size_t hd_model_runner_bytes(const hd_model_runner *x);

/* Returns the bytes that the leader broadcasts with every forward pass; 0 of a runner that is alone. */
size_t hd_model_runner_command_bytes(const hd_model_runner *x);

/* Copies what the layers chose for positions first .. first + n - 1 to out
 * [n, hd_replay_shape.row_bytes]. pages: the FULL block table of their sequence, as of the last
 * step. Call it on the step thread. */
void hd_model_runner_read_replay(const hd_model_runner *x, hd_replay kind, const int32_t *pages,
                                 int32_t first, int32_t n, uint8_t *out);

/* See hd_kv_read_resident(). */
hd_resident_counts hd_model_runner_read_resident(const hd_model_runner *x);

hd_prefetch_stats hd_model_runner_engram_stats(const hd_model_runner *x); /* any thread */

/* Reads hd_model_expert_rows() from the device. Of several ranks: those of the leader's attention
 * group, and each row counts on every rank (etp) that computed a part. Call it on the step
 * thread. */
hd_status hd_model_runner_read_experts(hd_model_runner *x, int64_t *rows, hd_err *err);

/* ---- experts that move between ranks: expert_moves.c ---- */

typedef struct hd_expert_move {
    int32_t layer, expert;
    int32_t from, to; /* members of HD_GROUP_EP */
} hd_expert_move;

/* Moves of experts: calls of the leader, on the step thread between two steps. HD_EPEER or
 * HD_EDEVICE: communication has ended, as after a failed step. Any other failure is a rank's
 * refusal: no map has changed, and what was staged should be dropped. */

/* Copies an expert to a rank, which keeps it beside those in its slots. On devices the copy is queued
 * beside the steps. */
hd_status hd_model_runner_stage_expert(hd_model_runner *x, const hd_expert_move *m,
                                       hd_err *err);

/* Asks every rank whether it has what a map [slots] needs and has version `version` of the layer's
 * map. HD_EAGAIN: experts are still being copied between devices; ask again after a step. Then every rank flips to it between the same two steps, and has the next version. */
hd_status hd_model_runner_verify_map(hd_model_runner *x, int32_t layer, const int32_t *map,
                                     uint32_t version, hd_err *err);
hd_status hd_model_runner_flip_map(hd_model_runner *x, int32_t layer, uint32_t version,
                                   hd_err *err);

/* Frees staged experts that no slot holds, on all ranks. layer: any with experts. */
hd_status hd_model_runner_drop_staged(hd_model_runner *x, int32_t layer, hd_err *err);

/* Of every rank, while none runs: waits for copies of experts between devices; and forgets what was
 * staged, after a failure. */
void hd_model_runner_await_moves(hd_model_runner *x);
void hd_model_runner_forget_moves(hd_model_runner *x);

/* Whether rows can be recorded: not if GPUs divide them. */
bool hd_model_runner_records_rows(const hd_model_runner *x);

/* Adds the rows of all later steps to a recorder, PER_PASS or PER_TOKEN, which must outlive them;
 * NULL: no more. On the step thread. Steps that rebuild windows (hd_kv_ends) are not recorded. */
void hd_model_runner_record(hd_model_runner *x, hd_recorder *r);

#endif
