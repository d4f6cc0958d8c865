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
typedef struct exec_view {
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
} exec_view;

typedef struct exec_twin {
    void *host, *device;
    size_t bytes;
} exec_twin;

/* Where a work's rows are, and how many of its drafts a benchmark accepts. */
typedef struct exec_place {
    int32_t first_score, first_choice, most_accepted;
} exec_place;

struct hd_executor {
    hd_model_env env;
    hd_executor_options o;
    hd_model *model;
    hd_kv *kv;
    hd_batch batch, chain; /* the step; one row per draft that goes further */
    exec_twin sampling, mask;
    exec_view host, device; /* of sampling */
    uint16_t *counts;       /* [n_slots, vocab] device memory */
    int32_t n_rows;         /* logits rows that a step may have */
    int32_t n_drafts;       /* 0 without an MTP layer */

    exec_masks masks;    /* without a vocabulary all zero, and there are no replies */
    exec_reply *replies; /* [n_slots + 1] the last to try drafts with */

    exec_place *places; /* [n_slots] by work */
    int32_t *drafting;  /* [n_slots] works that draft, the most wanting first */
    exec_fixed fixed;
};

/* Rows of masks: one per logits row, and the constant one of EXEC_NO_END behind them. */
static inline uint32_t *exec_mask_at(const hd_executor *x, int32_t row) {
    return (uint32_t *)x->mask.host + (int64_t)row * x->masks.words;
}

/* The row of masks that a row of logits goes by: the next free one if it was just written, the
 * constant one, or none. */
static inline int32_t exec_mask_row(const hd_executor *x, exec_limit limit, int32_t *used) {
    return limit == EXEC_BY_MASK ? (*used)++ : limit == EXEC_NO_END ? x->n_rows : -1;
}

/* Sends the first `used` rows of masks. */
static inline void exec_upload_masks(hd_executor *x, int32_t used) {
    hd_stream_upload(x->env.stream, x->mask.device, x->mask.host,
                     (size_t)used * (size_t)x->masks.words * sizeof(uint32_t));
}

/* Sends the rows part. */
static inline void exec_upload_rows(hd_executor *x) {
    const exec_view *h = &x->host;
    hd_stream_upload(x->env.stream, (uint8_t *)x->sampling.device + h->rows_at,
                     (const uint8_t *)x->sampling.host + h->rows_at, h->outs_at - h->rows_at);
}

/* What a token that is none means for its request. */
static inline void exec_note_failure(hd_chosen *c, int32_t token) {
    if (token == HD_TOKEN_NONE) c->status = HD_EINVAL;
    if (token == HD_TOKEN_BROKEN) c->status = HD_EDEVICE;
}

/* model_runner.c: a step of any works, whose ops are queued one by one. */
hd_status exec_run_free(hd_executor *x, const hd_work *works, int32_t n, hd_chosen *chosen,
                        hd_err *err);

/* sampling.c: lays the step out; then, while the device computes it, what its rows choose by. */
void exec_lay_batch(hd_executor *x, const hd_work *works, int32_t n);
hd_status exec_choose(hd_executor *x, const hd_work *works, int32_t n, hd_chosen *chosen,
                      hd_err *err);

/* draft.c: the next drafts of works that want some. */
hd_status exec_draft(hd_executor *x, const hd_work *works, int32_t n, hd_chosen *chosen,
                     hd_err *err);

#endif
