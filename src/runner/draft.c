/* draft.c - speculative drafts of eager steps, whichever drafter proposes them.
 *
 * The drafter computes the logits of one draft of every sequence at a time, and the next
 * draft follows the token that was taken. */
#include "base/checked.h"
#include "runner/model_runner_internal.h"

/* Sets the token after every row, so that the MTP layer's KV entries stay complete. Rows of
 * rejected drafts get any token, as they will be written again. Sequences that want drafts,
 * most drafts first, keep one logits row each: that of their last accepted token. */
static int32_t plan_drafts(hd_model_runner *x, const hd_seq_input *inputs, int32_t n,
                           const hd_seq_output *outputs) {
    hd_batch *b = &x->batch;
    int32_t drafting = 0;
    for (int32_t i = 0; i < n; i++) {
        const hd_seq_input *w = &inputs[i];
        const hd_seq_output *c = &outputs[i];
        const int32_t first = b->host.first_row[i + 1] - w->n_sample;
        for (int32_t k = 0; k < w->n_sample; k++) {
            const bool good = k < c->step.n_tokens && c->step.tokens[k] >= 0;
            b->host.next_tokens[first + k] = good ? c->step.tokens[k] : 0;
        }
        if (!w->want_drafts || !w->n_sample || c->status != HD_OK) continue;
        int32_t at = drafting++;
        for (; at > 0 && inputs[x->drafting[at - 1]].want_drafts < w->want_drafts; at--) {
            x->drafting[at] = x->drafting[at - 1];
        }
        x->drafting[at] = i;
    }
    b->n_logits = drafting;
    for (int32_t k = 0; k < drafting; k++) {
        const int32_t i = x->drafting[k];
        b->host.logit_rows[k] =
            b->host.first_row[i + 1] - inputs[i].n_sample + outputs[i].step.n_tokens - 1;
    }
    return drafting;
}

/* Returns the constraint's limit of a sequence's next draft, if those before it are
 * accepted. */
static runner_token_limit limit_draft(hd_model_runner *x, const hd_seq_input *w,
                                      const hd_seq_output *c, uint32_t *mask) {
    runner_constraint *trial = &x->constraints[x->o.n_slots];
    const int32_t sampled_from = w->start + w->n - w->n_sample + 1;
    runner_constraint_copy(trial, &x->constraints[w->slot]);
    for (int32_t k = 0; k < c->n_drafts; k++) {
        runner_constraint_advance(trial, &x->masks, c->drafts[k]);
    }
    return runner_constraint_limit(trial, &x->masks,
                                   sampled_from + c->step.n_tokens + c->n_drafts, mask);
}

/* Writes masks for drafts, because drafts that a constraint forbids would be rejected. Masks
 * are made while the device computes. Returns false if there are none. */
static bool write_masks(hd_model_runner *x, const hd_seq_input *inputs, int32_t n,
                        const hd_seq_output *outputs) {
    int32_t used = 0, limited = 0;
    for (int32_t k = 0; x->constraints && k < n; k++) {
        const int32_t i = x->drafting[k];
        const runner_token_limit limit =
            limit_draft(x, &inputs[i], &outputs[i], runner_mask_at(x, used));
        x->host.draft_mask[k] = runner_mask_row(x, limit, &used);
        limited += limit != RUNNER_ANY_TOKEN;
    }
    if (!limited) return false;
    hd_stream_upload(x->env.stream, x->device.draft_mask, x->host.draft_mask,
                     (size_t)n * sizeof *x->host.draft_mask);
    runner_upload_masks(x, used);
    return true;
}

/* Takes the argmax token of each logits row as the next draft of its sequence. */
static hd_status take_drafts(hd_model_runner *x, const hd_seq_input *inputs, int32_t n,
                             hd_draft_logits of, hd_seq_output *outputs, hd_err *err) {
    const bool masked = write_masks(x, inputs, n, outputs);
    x->env.ops->argmax(x->env.stream, &(hd_argmax_args){.token = x->device.token,
                                                        .logits = of.logits,
                                                        .mask = masked ? x->mask.device : NULL,
                                                        .mask_row = x->device.draft_mask,
                                                        .rows = n,
                                                        .vocab = x->env.spec->vocab,
                                                        .n_ids = x->o.n_ids});
    hd_stream_download(x->env.stream, x->host.token, x->device.token,
                       (size_t)n * sizeof(int32_t));
    if (of.confidence) {
        hd_stream_download(x->env.stream, x->host.confidence, of.confidence,
                           (size_t)n * sizeof *of.confidence);
    }
    HD_TRY(hd_stream_sync(x->env.stream, err));
    for (int32_t k = 0; k < n; k++) {
        hd_seq_output *c = &outputs[x->drafting[k]];
        if (of.confidence) c->confidence[c->n_confidence++] = x->host.confidence[k];
        c->drafts[c->n_drafts++] = x->host.token[k];
    }
    return HD_OK;
}

/* Counts the sequences, of the first n that draft, that want another draft. */
static int32_t count_wanting(const hd_model_runner *x, const hd_seq_input *inputs, int32_t n,
                             const hd_seq_output *outputs) {
    int32_t wanting = 0;
    while (wanting < n) {
        const int32_t i = x->drafting[wanting];
        if (hd_min_i32(inputs[i].want_drafts, x->n_drafts) <= outputs[i].n_drafts) break;
        wanting++;
    }
    return wanting;
}

hd_status runner_draft(hd_model_runner *x, const hd_seq_input *inputs, int32_t n,
                       hd_seq_output *outputs, hd_err *err) {
    int32_t rows = plan_drafts(x, inputs, n, outputs);
    x->draft_places = rows ? hd_min_i32(inputs[x->drafting[0]].want_drafts, x->n_drafts) : 0;
    for (int32_t place = 0; place == 0 || place < x->draft_places; place++) {
        hd_draft_logits of;
        HD_TRY(x->drafter->propose(x, inputs, rows, outputs, place, &of, err));
        if (rows) HD_TRY(take_drafts(x, inputs, rows, of, outputs, err));
        HD_TRY(runner_record_drafts(x, place, rows, err));
        rows = count_wanting(x, inputs, rows, outputs);
    }
    return HD_OK;
}
