/* model_runner_internal.h - the model runner's memory, shared by its files.
 *
 * model_runner.c holds requests and eager steps, sampling.c the logits rows, draft.c MTP
 * drafting, commands.c forward passes of several ranks, decode_graph.c steps of a fixed shape,
 * overlap.c the overlap schedule. */
#ifndef HD_RUNNER_MODEL_RUNNER_INTERNAL_H
#define HD_RUNNER_MODEL_RUNNER_INTERNAL_H

#include "runner/model_runner.h"
#include "runner/decode_graph_internal.h"
#include "runner/constraint_internal.h"

/* Entries of a slot in the bias pool: biased tokens, then banned ones, which are stop tokens
 * and ends of sequence. */
enum { RUNNER_BIAS_ENTRIES = HD_MAX_BIAS + HD_MAX_STOP_TOKENS + HD_MAX_EOS };

/* Sampler inputs and outputs: one block with the same layout on the host and on the device,
 * in three parts. Prompt log-probability rows come first, then sampling rows, both in the
 * order of the sequence inputs. */
typedef struct runner_sampler_buffers {
    /* per request; written when it enters a slot */
    hd_sampling *params; /* [n_slots + 1] the last one is for padding rows */
    hd_logit_bias *bias; /* [n_slots, RUNNER_BIAS_ENTRIES] */

    int32_t *draft_mask; /* [n_slots] mask row of each sequence's draft */

    /* per logits row; written in every step */
    int32_t *slot, *position, *input, *n_drafted, *given, *draft, *mask_row;
    int32_t *first_row; /* [n_slots + 1] for verify: first row of each sampling sequence */
    int32_t *count_row, *count_token; /* accepted tokens to add to the penalty counts */

    /* written by the sampler */
    int32_t *token, *accepted, *next, *top_id;
    float *logprob, *top_logprob;

    size_t rows_at, outs_at, end; /* byte offsets of the parts */
} runner_sampler_buffers;

typedef struct runner_mirrored {
    void *host, *device;
    size_t bytes;
} runner_mirrored;

/* Logits rows of a sequence input, and how many of its drafts a benchmark accepts at most. */
typedef struct runner_input_rows {
    int32_t first_prompt, first_sampled, most_accepted;
} runner_input_rows;

struct hd_model_runner {
    hd_model_env env;
    hd_model_runner_options o;
    hd_model *model;
    hd_kv *kv;
    hd_batch batch, chain; /* the step's rows; one row per sequence for further drafts */
    runner_mirrored sampling, mask;
    runner_sampler_buffers host, device; /* views of `sampling` */
    /* Alternatives that the outputs of a step point at. */
    hd_alternative *tops;        /* [n_slots, HD_MAX_STEP_TOKENS, HD_MAX_ALTERNATIVES] */
    hd_alternative *prompt_tops; /* [n_rows, HD_MAX_ALTERNATIVES] */
    uint16_t *counts;            /* [n_slots, vocab] device memory */
    int32_t n_rows;              /* logits rows of a step, at most */
    int32_t n_drafts;            /* 0 without an MTP layer */

    /* all zero without a vocabulary; then there are no constraints */
    runner_masks masks;
    /* [n_slots + 1] constraint states; the last one is scratch for drafts */
    runner_constraint *constraints;

    runner_input_rows *places; /* [n_slots] by sequence input */
    int32_t *drafting;         /* [n_slots] sequences that draft, most drafts first */
    runner_decode_graphs fixed;
    uint8_t *command; /* of the leader to its followers; NULL: alone */
    size_t command_bytes;
    runner_mirrored loads; /* [row parts, layers * experts] int64, if ranks divide the rows */
};

/* Returns a mask row: one per logits row, then the constant one of RUNNER_NO_EOS. */
static inline uint32_t *runner_mask_at(const hd_model_runner *x, int32_t row) {
    return (uint32_t *)x->mask.host + (int64_t)row * x->masks.words;
}

/* Returns the mask row of a logits row: the next free one if it was just written, the
 * constant one, or -1 for none. */
static inline int32_t runner_mask_row(const hd_model_runner *x, runner_token_limit limit,
                                      int32_t *used) {
    return limit == RUNNER_BY_MASK ? (*used)++ : limit == RUNNER_NO_EOS ? x->n_rows : -1;
}

/* Uploads the first `used` mask rows. */
static inline void runner_upload_masks(hd_model_runner *x, int32_t used) {
    hd_stream_upload(x->env.stream, x->mask.device, x->mask.host,
                     (size_t)used * (size_t)x->masks.words * sizeof(uint32_t));
}

/* Uploads the per-row part of the sampler inputs. */
static inline void runner_upload_rows(hd_model_runner *x) {
    const runner_sampler_buffers *h = &x->host;
    hd_stream_upload(x->env.stream, (uint8_t *)x->sampling.device + h->rows_at,
                     (const uint8_t *)x->sampling.host + h->rows_at, h->outs_at - h->rows_at);
}

/* Sets the status of a sequence if its token is an error code of the sampler. */
static inline void runner_note_failure(hd_seq_output *c, int32_t token) {
    if (token == HD_TOKEN_NONE) c->status = HD_EINVAL;
    if (token == HD_TOKEN_BROKEN) c->status = HD_EDEVICE;
}

/* Writes alternatives of n rows, which the sampler wrote with a stride of
 * HD_MAX_ALTERNATIVES, to out[n, n_top]. */
static inline void runner_pair_tops(hd_alternative *out, const int32_t *ids,
                                    const float *logprobs, int32_t n, int32_t n_top) {
    for (int32_t i = 0; i < n; i++) {
        for (int32_t k = 0; k < n_top; k++) {
            const int32_t at = i * HD_MAX_ALTERNATIVES + k;
            *out++ = (hd_alternative){ids[at], logprobs[at]};
        }
    }
}

/* Shows the alternatives of a sequence's tokens. ids, logprobs: those of its first row. */
static inline void runner_show_tops(const hd_model_runner *x, int32_t slot, const int32_t *ids,
                                    const float *logprobs, hd_step_tokens *step) {
    step->n_top = x->host.params[slot].n_top;
    hd_alternative *out = x->tops + (int64_t)slot * HD_MAX_STEP_TOKENS * HD_MAX_ALTERNATIVES;
    runner_pair_tops(out, ids, logprobs, step->n_tokens, step->n_top);
    step->top = out;
}

/* model_runner.c: runs a step of any sequence inputs; operators are queued one by one
 * (eager). */
hd_status runner_run_eager(hd_model_runner *x, const hd_seq_input *inputs, int32_t n,
                           hd_seq_output *outputs, hd_err *err);

/* commands.c: what every rank of a group does, in the leader's order. */
typedef enum runner_pass {
    RUNNER_STEP,       /* of x->batch */
    RUNNER_DRAFT,      /* of x->batch */
    RUNNER_DRAFT_AGAIN /* of x->chain */
} runner_pass;

hd_status runner_commands_open(hd_model_runner *x, hd_err *err);

/* Uploads the batch and runs the forward pass, here and on the followers. */
void runner_forward(hd_model_runner *x, runner_pass pass);
void runner_copy_pages(hd_model_runner *x, const hd_page_copy *copies, int32_t n);

/* Gathers every rank's expert loads into x->loads, here and on the followers. */
void runner_gather_loads(hd_model_runner *x);

/* model_runner.c */
hd_status runner_mirrored_open(runner_mirrored *t, hd_device *d, size_t bytes, const char *what,
                               hd_err *err);
void runner_mirrored_close(runner_mirrored *t, hd_device *d);
static inline size_t runner_n_loads(const hd_model_runner *x) {
    return (size_t)x->env.spec->n_layers * (size_t)x->env.spec->route.n_experts;
}

/* sampling.c: builds the batch; then, while the device runs the forward pass, writes the
 * sampler inputs and samples. */
void runner_build_batch(hd_model_runner *x, const hd_seq_input *inputs, int32_t n);
hd_status runner_sample(hd_model_runner *x, const hd_seq_input *inputs, int32_t n,
                        hd_seq_output *outputs, hd_err *err);

/* draft.c: computes the next drafts of sequences that want some. */
hd_status runner_draft(hd_model_runner *x, const hd_seq_input *inputs, int32_t n,
                       hd_seq_output *outputs, hd_err *err);

#endif
