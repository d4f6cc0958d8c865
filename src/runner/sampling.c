/* sampling.c - builds the batch, samples its logits rows and reads prompt log-probabilities
 * back.
 *
 * Masks are made while the device runs the forward pass. Rows after a sequence's drafts are
 * described as if every draft before them were accepted, because they count only then. */
#include <assert.h>
#include <string.h>

#include "base/checked.h"
#include "base/philox.h"
#include "runner/model_runner_internal.h"

enum { DRAW_FORCED = 2 }; /* high counter word; the draws of tokens have 1 */

/* ---- before the forward pass ---- */

/* Marks the last `n` rows before `end` as logits rows. */
static void want_logits(hd_batch *b, int32_t end, int32_t n) {
    for (int32_t row = end - n; row < end; row++) b->host.logit_rows[b->n_logits++] = row;
}

/* Where choices of every position are kept, every layer computes every position; but for windows that
 * are rebuilt, whose positions were computed before, and those of a replay. */
static hd_kv_ends ends_of(const hd_model_runner *x, const hd_seq_input *w) {
    if (w->ends.windows_from > 0) return w->ends;
    if (x->o.replay[HD_REPLAY_EXPERTS] || x->o.replay[HD_REPLAY_KEYS] || x->recorder) {
        return (hd_kv_ends){.rebuilt = w->ends.rebuilt};
    }
    return w->ends;
}

void runner_build_batch(hd_model_runner *x, const hd_seq_input *inputs, int32_t n) {
    hd_batch *b = &x->batch;
    hd_batch_reset(b);
    for (int32_t i = 0; i < n; i++) {
        const hd_seq_input *w = &inputs[i];
        assert(w->n_prompt_logprobs + w->n_sample <= w->n && w->n_sample <= HD_MAX_STEP_TOKENS);
        hd_batch_add(b, &(hd_batch_seq){
                            .tokens = w->tokens,
                            .n = w->n,
                            .start = w->start,
                            .after = w->after,
                            .phase = runner_phase(w),
                            .ends = ends_of(x, w),
                            .pages = {w->pages[0], w->pages[1]},
                            .n_pages = w->n_pages
        });
    }
    for (int32_t i = 0; i < n; i++) {
        x->places[i].first_prompt = b->n_logits;
        want_logits(b, b->host.first_row[i + 1] - inputs[i].n_sample,
                    inputs[i].n_prompt_logprobs);
    }
    for (int32_t i = 0; i < n; i++) {
        x->places[i].first_sampled = b->n_logits;
        want_logits(b, b->host.first_row[i + 1], inputs[i].n_sample);
    }
    assert(b->n_logits <= x->n_rows);
}

/* ---- during the forward pass ---- */

/* Writes the sampler inputs of a logits row; at: its index among the sequence's tokens. */
static void write_row(hd_model_runner *x, int32_t row, const hd_seq_input *w, int32_t at) {
    const runner_sampler_buffers *v = &x->host;
    v->slot[row] = w->slot;
    v->position[row] = w->start + at + 1;
    v->input[row] = w->tokens[at];
    v->n_drafted[row] = 0;
    v->given[row] = v->draft[row] = v->mask_row[row] = -1;
}

static void write_prompt_rows(hd_model_runner *x, const hd_seq_input *w, int32_t first) {
    for (int32_t k = 0; k < w->n_prompt_logprobs; k++) {
        const int32_t at = w->n - w->n_sample - w->n_prompt_logprobs + k;
        write_row(x, first + k, w, at);
        x->host.given[first + k] = at + 1 < w->n ? w->tokens[at + 1] : w->after;
        assert(x->host.given[first + k] >= 0);
    }
}

/* Returns how many of n drafts a benchmark accepts (forced acceptance). */
static int32_t forced(const hd_model_runner *x, int32_t slot, int32_t position, int32_t n) {
    const uint64_t seed = x->host.params[slot].seed;
    const float luck = hd_philox_unit(hd_philox_at(seed, DRAW_FORCED, (uint64_t)position).v[0]);
    int32_t verifiable = 0;
    while (verifiable < n && luck < x->o.forced.least[verifiable]) verifiable++;
    return verifiable;
}

static void write_sampled_rows(hd_model_runner *x, const hd_seq_input *w,
                               runner_input_rows *place) {
    const int32_t first = place->first_sampled, first_at = w->n - w->n_sample;
    place->most_accepted = HD_MAX_DRAFTS;
    for (int32_t k = 0; k < w->n_sample; k++) {
        write_row(x, first + k, w, first_at + k);
        x->host.n_drafted[first + k] = k;
    }
    if (x->o.forced.least[0] <= 0.0f || !w->n_sample) return;
    place->most_accepted = forced(x, w->slot, w->start + first_at + 1, w->n_sample - 1);
    for (int32_t k = 0; k < place->most_accepted; k++) {
        x->host.given[first + k] = w->tokens[first_at + k + 1];
    }
}

/* Writes the masks of a sequence's sampling rows; *used counts mask rows. */
static void write_limits(hd_model_runner *x, const hd_seq_input *w, int32_t first,
                         int32_t *used) {
    runner_constraint *trial = &x->constraints[x->o.n_slots];
    const runner_sampler_buffers *v = &x->host;
    runner_constraint_copy(trial, &x->constraints[w->slot]);
    for (int32_t k = 0; trial->constraint && k < w->n_sample; k++) {
        const int32_t row = first + k, *next = w->tokens + w->n - w->n_sample + k + 1;
        const runner_token_limit limit = runner_constraint_limit(
            trial, &x->masks, v->position[row], runner_mask_at(x, *used));
        v->mask_row[row] = runner_mask_row(x, limit, used);
        if (k + 1 == w->n_sample) return;
        if (limit != RUNNER_ANY_TOKEN &&
            !runner_mask_has(runner_mask_at(x, v->mask_row[row]), *next)) {
            return; /* the draft will be rejected, and rows after it do not count */
        }
        if (trial->reasoning) v->draft[row] = *next;
        runner_constraint_advance(trial, &x->masks, *next);
    }
}

/* Writes the sampler inputs of every logits row. Returns the number of sequences that
 * sample. */
static int32_t write_rows(hd_model_runner *x, const hd_seq_input *inputs, int32_t n) {
    int32_t groups = 0, masks = 0;
    x->host.first_row[0] = x->batch.n_logits;
    for (int32_t i = 0; i < n; i++) {
        const int32_t first = x->places[i].first_sampled;
        write_prompt_rows(x, &inputs[i], x->places[i].first_prompt);
        write_sampled_rows(x, &inputs[i], &x->places[i]);
        if (!inputs[i].n_sample) continue;
        if (x->constraints) write_limits(x, &inputs[i], first, &masks);
        x->host.first_row[groups++] = first;
        x->host.first_row[groups] = first + inputs[i].n_sample;
    }
    runner_upload_rows(x);
    runner_upload_masks(x, masks);
    return groups;
}

/* ---- after the forward pass ---- */

static hd_status sample(hd_model_runner *x, int32_t groups, hd_err *err) {
    const runner_sampler_buffers *d = &x->device;
    x->env.ops->sample(x->env.stream, &(hd_sample_args){.token = d->token,
                                                        .logprob = d->logprob,
                                                        .top_id = d->top_id,
                                                        .top_logprob = d->top_logprob,
                                                        .logits = hd_model_logits(x->model),
                                                        .params = d->params,
                                                        .slot = d->slot,
                                                        .position = d->position,
                                                        .bias = d->bias,
                                                        .mask = x->mask.device,
                                                        .mask_row = d->mask_row,
                                                        .counts = x->counts,
                                                        .input = d->input,
                                                        .n_drafted = d->n_drafted,
                                                        .given = d->given,
                                                        .draft = d->draft,
                                                        .rows = x->batch.n_logits,
                                                        .vocab = x->env.spec->vocab,
                                                        .n_ids = x->o.n_ids,
                                                        .top_stride = x->o.top_stride});
    x->env.ops->verify(x->env.stream, &(hd_verify_args){.accepted = d->accepted,
                                                        .next = d->next,
                                                        .token = d->token,
                                                        .input = d->input,
                                                        .first_row = d->first_row,
                                                        .n = groups});
    hd_stream_download(x->env.stream, (uint8_t *)x->sampling.host + d->outs_at,
                       (const uint8_t *)x->sampling.device + d->outs_at, d->end - d->outs_at);
    return hd_stream_sync(x->env.stream, err);
}

static void collect_prompt(const hd_model_runner *x, const hd_seq_input *w,
                           const runner_input_rows *place, hd_seq_output *c) {
    const int32_t first = place->first_prompt, n = w->n_prompt_logprobs;
    const int64_t at = (int64_t)first * x->o.top_stride;
    c->prompt = (hd_prompt_logprobs){.logprobs = x->host.logprob + first,
                                     .top = x->prompt_tops + at,
                                     .n = n,
                                     .n_top = x->host.params[w->slot].n_top};
    for (int32_t k = 0; k < n; k++) runner_note_failure(c, x->host.token[first + k]);
    runner_pair_tops(x, x->prompt_tops + at, x->host.top_id + at, x->host.top_logprob + at, n,
                     c->prompt.n_top);
}

/* Collects accepted drafts and one more token, and advances the constraint. */
static void collect_tokens(hd_model_runner *x, const hd_seq_input *w,
                           const runner_input_rows *place, int32_t accepted, hd_seq_output *c) {
    const int32_t first = place->first_sampled;
    hd_step_tokens *step = &c->step;
    step->n_tokens = hd_min_i32(accepted, place->most_accepted) + 1;
    for (int32_t k = 0; k < step->n_tokens; k++) {
        const int32_t token = step->tokens[k] = x->host.token[first + k];
        step->logprobs[k] = x->host.logprob[first + k];
        runner_note_failure(c, token);
        if (x->constraints)
            runner_constraint_advance(&x->constraints[w->slot], &x->masks, token);
    }
    runner_show_tops(x, w->slot, x->host.top_id + (int64_t)first * x->o.top_stride,
                     x->host.top_logprob + (int64_t)first * x->o.top_stride, step);
}

/* Collects the output of each sequence, and adds accepted tokens to the penalty counts in
 * use. */
static void collect(hd_model_runner *x, const hd_seq_input *inputs, int32_t n,
                    hd_seq_output *outputs) {
    int32_t group = 0, counted = 0;
    for (int32_t i = 0; i < n; i++) {
        const hd_seq_input *w = &inputs[i];
        hd_seq_output *c = &outputs[i];
        *c = (hd_seq_output){.status = HD_OK};
        if (w->n_prompt_logprobs) collect_prompt(x, w, &x->places[i], c);
        if (!w->n_sample) continue;
        collect_tokens(x, w, &x->places[i], x->host.accepted[group++], c);
        if (!hd_has_penalty(&x->host.params[w->slot])) continue;
        for (int32_t k = 0; k < c->step.n_tokens; k++) {
            x->host.count_row[counted] = w->slot;
            x->host.count_token[counted++] = c->step.tokens[k];
        }
    }
    if (!counted) return;
    runner_upload_rows(x);
    x->env.ops->count_tokens(x->env.stream,
                             &(hd_count_tokens_args){.counts = x->counts,
                                                     .row = x->device.count_row,
                                                     .token = x->device.count_token,
                                                     .n = counted,
                                                     .vocab = x->env.spec->vocab});
}

hd_status runner_sample(hd_model_runner *x, const hd_seq_input *inputs, int32_t n,
                        hd_seq_output *outputs, hd_err *err) {
    const int32_t groups = write_rows(x, inputs, n);
    HD_TRY(sample(x, groups, err));
    collect(x, inputs, n, outputs);
    return HD_OK;
}
