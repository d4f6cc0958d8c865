/* model_runner_internal.h - the model runner's memory, shared by its files.
 *
 * model_runner.c holds requests and eager steps, sampling.c the logits rows, draft.c the
 * drafts of eager steps, draft_*.c the drafters, commands.c forward passes of several ranks,
 * decode_graph.c steps of a fixed shape, overlap.c the overlap schedule, route_record.c which
 * experts rows chose. */
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
    int32_t *before;     /* [n_slots] the token before the draft */

    /* per logits row; written in every step */
    int32_t *slot, *position, *input, *n_drafted, *given, *draft, *mask_row;
    int32_t *first_row; /* [n_slots + 1] for verify: first row of each sampling sequence */
    int32_t *count_row, *count_token; /* accepted tokens to add to the penalty counts */

    /* written by the sampler */
    int32_t *token, *accepted, *next, *top_id;
    float *logprob, *top_logprob;
    float *confidence; /* [n_slots] of the drafts of one place */

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

/* A drafter: computes the logits of drafts, one place of all sequences at a time. Place 0 is
 * computed after every step, also if no sequence drafts, because it keeps the KV entries of
 * the drafter complete. Both functions return device memory that is valid until the next
 * call. */
typedef struct runner_drafter {
    /* Computes the logits [n, vocab] of draft `place` of sequences x->drafting[0, n), which have
     * `place` drafts so far. x->batch holds the rows of the step; its next_tokens and
     * logit_rows are set, and not uploaded. n may be 0 while other attention groups draft. */
    hd_status (*propose)(hd_model_runner *x, const hd_seq_input *inputs, int32_t n,
                         const hd_seq_output *outputs, int32_t place, hd_draft_logits *out,
                         hd_err *err);
    /* Runs RUNNER_DRAFT over x->batch, or again over x->chain, which is uploaded; on every
     * rank. */
    void (*pass)(hd_model_runner *x, hd_batch *batch, bool again);
    /* Queues what propose does in a graph step, after commit_step, or prepare_draft of the place
     * before. Returns the logits [z->n, vocab]. */
    hd_draft_logits (*queue)(hd_model_runner *x, const runner_graph_inputs *o,
                             const runner_graph_shape *z, int32_t place);
} runner_drafter;

extern const runner_drafter runner_drafter_mtp;    /* draft_mtp.c */
extern const runner_drafter runner_drafter_dspark; /* draft_dspark.c */

/* Experts that are copied between devices; all zero in host memory. */
typedef struct runner_copies {
    hd_stream *stream;        /* beside the steps */
    hd_device_event *flipped; /* in the stream of steps: the last flip */
    hd_device_event *copied;  /* behind the last copy */
    runner_mirrored sums;     /* [most] uint64, of the copies that this rank sends or gets */
    struct runner_move_order *list; /* [n] since the last flip or drop, of all ranks */
    int32_t n, most;
} runner_copies;

/* Memory for moves of experts between ranks; all zero where they cannot move. */
typedef struct runner_moves {
    uint8_t *packed;           /* [bytes] an expert on its way */
    size_t bytes;              /* of the largest */
    int32_t *map;              /* [slots] verified */
    int32_t verified;          /* the layer of the map; -1: none */
    struct runner_vote *votes; /* [ranks] */
    uint64_t told;             /* checksum of the order that is carried out */
    runner_copies copies;
} runner_moves;

struct hd_model_runner {
    hd_model_env env;
    hd_model_runner_options o;
    hd_model *model;
    hd_kv *kv;
    hd_batch batch, chain; /* the step's rows; the drafter's rows of every sequence */
    runner_mirrored sampling, mask;
    runner_sampler_buffers host, device; /* views of `sampling` */
    /* Alternatives that the outputs of a step point at. */
    hd_alternative *tops;          /* [n_slots, HD_MAX_STEP_TOKENS, top_stride] */
    hd_alternative *prompt_tops;   /* [n_rows, top_stride] */
    uint16_t *counts;              /* [n_slots, vocab] device memory */
    int32_t n_rows;                /* logits rows of a step, at most */
    int32_t n_drafts;              /* of a sequence in one step, at most; 0: nothing drafts */
    const runner_drafter *drafter; /* if n_drafts > 0 */

    runner_masks masks; /* all zero without a vocabulary; then there are no constraints */
    /* [n_slots + 1] constraint states; the last one is scratch for drafts */
    runner_constraint *constraints;

    runner_input_rows *places; /* [n_slots] by sequence input */
    int32_t *drafting;         /* [n_slots] sequences that draft, most drafts first */
    hd_recorder *recorder;     /* NULL: no pass is recorded */
    int32_t *choices;          /* experts that the rows of a pass chose; NULL without experts */
    int64_t choices_at;        /* of the step's choices, where those of the next draft begin */
    runner_decode_graphs fixed;
    uint8_t *command; /* of the leader to its followers; NULL: alone */
    size_t command_bytes;
    int32_t n_groups; /* attention groups */
    void *words;      /* [n_groups] what each says; NULL: one group, or a follower */
    /* [n_groups] of the pass; in the command */
    int32_t *group_rows, *group_logits;
    bool has_rows, fetches; /* any group had rows in this pass; it fetches experts */
    double row_ns; /* what a row of an eager step takes that exchanges rows; 0: not known */
    int32_t draft_places;  /* drafts of a sequence that any group makes in this step, at most */
    runner_mirrored loads; /* [ranks, layers * experts] int64; all zero: alone */
    runner_moves moves;
};

/* Returns what the rows of a sequence are for. */
static inline hd_row_phase runner_phase(const hd_seq_input *w) {
    if (w->n_sample != w->n) return HD_ROW_PREFILL;
    return w->n > 1 ? HD_ROW_VERIFY : HD_ROW_DECODE;
}

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

/* Writes alternatives of n rows, which the sampler wrote with its stride, to out[n, n_top]. */
static inline void runner_pair_tops(const hd_model_runner *x, hd_alternative *out,
                                    const int32_t *ids, const float *logprobs, int32_t n,
                                    int32_t n_top) {
    for (int32_t i = 0; i < n; i++) {
        for (int32_t k = 0; k < n_top; k++) {
            const int32_t at = i * x->o.top_stride + k;
            *out++ = (hd_alternative){ids[at], logprobs[at]};
        }
    }
}

/* Shows the alternatives of a sequence's tokens. ids, logprobs: those of its first row. */
static inline void runner_show_tops(const hd_model_runner *x, int32_t slot, const int32_t *ids,
                                    const float *logprobs, hd_step_tokens *step) {
    step->n_top = x->host.params[slot].n_top;
    hd_alternative *out = x->tops + (int64_t)slot * HD_MAX_STEP_TOKENS * x->o.top_stride;
    runner_pair_tops(x, out, ids, logprobs, step->n_tokens, step->n_top);
    step->top = out;
}

/* model_runner.c: runs a step of any inputs, operator by operator (eager). */
hd_status runner_run_eager(hd_model_runner *x, const hd_seq_input *inputs, int32_t n,
                           hd_seq_output *outputs, hd_err *err);
/* Behind it and what was in flight: counts it in the times. */
void runner_note_eager(hd_model_runner *x, const hd_seq_input *inputs, int32_t n);

/* commands.c: what every rank of a group does, in the leader's order. */
typedef enum runner_pass {
    RUNNER_STEP,       /* of x->batch */
    RUNNER_DRAFT,      /* of x->batch */
    RUNNER_DRAFT_AGAIN /* of x->chain */
} runner_pass;

hd_status runner_commands_open(hd_model_runner *x, hd_err *err);

/* Uploads the batch and runs the forward pass, here and on the followers; nothing runs if no
 * attention group has rows. */
hd_status runner_forward(hd_model_runner *x, runner_pass pass, hd_err *err);
void runner_copy_pages(hd_model_runner *x, const hd_page_copy *copies, int32_t n);

/* Lets the followers launch a graph step with these inputs; tells them the seed of a slot, by which
 * acceptance is forced. Nothing without followers that have graphs. */
void runner_command_launch(hd_model_runner *x, const runner_graph_shape *shape,
                           const void *inputs, size_t bytes);
void runner_command_seed(hd_model_runner *x, int32_t slot, uint64_t seed);

/* Gathers every rank's expert loads into x->loads, here and on the followers. */
void runner_gather_loads(hd_model_runner *x);

/* model_runner.c */
hd_status runner_mirrored_open(runner_mirrored *t, hd_device *d, size_t bytes, const char *what,
                               hd_err *err);
void runner_mirrored_close(runner_mirrored *t, hd_device *d);
static inline size_t runner_n_loads(const hd_model_runner *x) {
    return (size_t)hd_model_n_expert_rows(x->env.spec);
}

/* sampling.c: builds the batch; then, while the device runs the forward pass, writes the
 * sampler inputs and samples. */
void runner_build_batch(hd_model_runner *x, const hd_seq_input *inputs, int32_t n);
hd_status runner_sample(hd_model_runner *x, const hd_seq_input *inputs, int32_t n,
                        hd_seq_output *outputs, hd_err *err);

/* route_record.c: adds the rows of the eager step that ended last to the recorder, if there is
 * one; those of its drafts at `place`, of n sequences; or those of a sequence input that a graph
 * step computed, and of its drafts. */
hd_status runner_record_step(hd_model_runner *x, hd_err *err);
hd_status runner_record_drafts(hd_model_runner *x, int32_t place, int32_t n, hd_err *err);
void runner_record_graph_rows(hd_model_runner *x, const runner_inflight_step *f,
                              const hd_seq_input *w, const hd_seq_output *c);
int64_t runner_n_choices(const hd_model_runner *x, const runner_graph_shape *z);
int64_t runner_most_choices(const hd_model_runner *x); /* of an eager step, or of drafts */

/* draft.c: computes the next drafts of sequences that want some. */
hd_status runner_draft(hd_model_runner *x, const hd_seq_input *inputs, int32_t n,
                       hd_seq_output *outputs, hd_err *err);

#endif
