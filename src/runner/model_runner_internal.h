/* model_runner_internal.h - the executor's memory, shared by its files: requests and the run of a
 * step (model_runner.c), rows that choose (sampling.c), drafts (draft.c), steps of a fixed shape
 * (decode_graph.c) and turns made of them (overlap.c). */
#ifndef HD_RUNNER_MODEL_RUNNER_INTERNAL_H
#define HD_RUNNER_MODEL_RUNNER_INTERNAL_H

#include "runner/model_runner.h"
#include "runner/decode_graph_internal.h"
#include "runner/constraint_internal.h"

/* What goes to the sampler and comes back: one block, laid out alike on the host and on the
 * device, in three parts. All scored rows come first, then the choosing ones, both in the order
 * of the works. */
typedef struct runner_sampler_buffers {
    /* of every request; written when it enters */
    hd_sampling *params; /* [n_slots + 1] the last is nobody's */
    hd_logit_bias *bias; /* [n_slots, HD_MAX_BIAS] */

    int32_t *draft_mask; /* [n_slots] row of masks of every draft in the making */

    /* of every logits row; written in every step */
    int32_t *slot, *position, *input, *n_drafted, *given, *draft, *mask_row;
    int32_t *first_row;               /* [n_slots + 1] of verify: rows of each choosing work */
    int32_t *count_row, *count_token; /* accepted tokens to count */

    /* written by the sampler */
    int32_t *token, *accepted, *next, *top_id;
    float *logprob, *top_logprob;

    size_t rows_at, outs_at, end; /* where the parts begin, in bytes */
} runner_sampler_buffers;

typedef struct runner_mirrored {
    void *host, *device;
    size_t bytes;
} runner_mirrored;

/* Where a work's rows are, and how many of its drafts a benchmark accepts. */
typedef struct runner_input_rows {
    int32_t first_score, first_choice, most_accepted;
} runner_input_rows;

struct hd_model_runner {
    hd_model_env env;
    hd_model_runner_options o;
    hd_model *model;
    hd_kv *kv;
    hd_batch batch, chain; /* the step; one row per draft that goes further */
    runner_mirrored sampling, mask;
    runner_sampler_buffers host, device; /* of sampling */
    uint16_t *counts;                    /* [n_slots, vocab] device memory */
    int32_t n_rows;                      /* logits rows that a step may have */
    int32_t n_drafts;                    /* 0 without an MTP layer */

    runner_masks masks;         /* without a vocabulary all zero, and there are no replies */
    runner_constraint *replies; /* [n_slots + 1] the last to try drafts with */

    runner_input_rows *places; /* [n_slots] by work */
    int32_t *drafting;         /* [n_slots] works that draft, the most wanting first */
    runner_decode_graphs fixed;
};

/* Rows of masks: one per logits row, and the constant one of RUNNER_NO_EOS behind them. */
static inline uint32_t *runner_mask_at(const hd_model_runner *x, int32_t row) {
    return (uint32_t *)x->mask.host + (int64_t)row * x->masks.words;
}

/* The row of masks that a row of logits goes by: the next free one if it was just written, the
 * constant one, or none. */
static inline int32_t runner_mask_row(const hd_model_runner *x, runner_token_limit limit,
                                      int32_t *used) {
    return limit == RUNNER_BY_MASK ? (*used)++ : limit == RUNNER_NO_EOS ? x->n_rows : -1;
}

/* Sends the first `used` rows of masks. */
static inline void runner_upload_masks(hd_model_runner *x, int32_t used) {
    hd_stream_upload(x->env.stream, x->mask.device, x->mask.host,
                     (size_t)used * (size_t)x->masks.words * sizeof(uint32_t));
}

/* Sends the rows part. */
static inline void runner_upload_rows(hd_model_runner *x) {
    const runner_sampler_buffers *h = &x->host;
    hd_stream_upload(x->env.stream, (uint8_t *)x->sampling.device + h->rows_at,
                     (const uint8_t *)x->sampling.host + h->rows_at, h->outs_at - h->rows_at);
}

/* What a token that is none means for its request. */
static inline void runner_note_failure(hd_seq_output *c, int32_t token) {
    if (token == HD_TOKEN_NONE) c->status = HD_EINVAL;
    if (token == HD_TOKEN_BROKEN) c->status = HD_EDEVICE;
}

/* model_runner.c: a step of any works, whose ops are queued one by one. */
hd_status runner_run_eager(hd_model_runner *x, const hd_seq_input *inputs, int32_t n,
                           hd_seq_output *outputs, hd_err *err);

/* sampling.c: lays the step out; then, while the device computes it, what its rows choose by. */
void runner_build_batch(hd_model_runner *x, const hd_seq_input *inputs, int32_t n);
hd_status runner_sample(hd_model_runner *x, const hd_seq_input *inputs, int32_t n,
                        hd_seq_output *outputs, hd_err *err);

/* draft.c: the next drafts of works that want some. */
hd_status runner_draft(hd_model_runner *x, const hd_seq_input *inputs, int32_t n,
                       hd_seq_output *outputs, hd_err *err);

#endif
