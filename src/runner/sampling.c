/* sampling.c - the rows of a step that choose or score tokens: laid out, sampled, read back.
 *
 * Masks are made while the device computes the forward pass. The rows behind a work's drafts
 * are described as if every draft before them stood, because they count only then. */
#include <assert.h>
#include <string.h>

#include "base/checked.h"
#include "base/philox.h"
#include "runner/model_runner_internal.h"

enum { DRAW_FORCED = 2 }; /* high counter word; the draws of tokens have 1 */

/* ---- before the forward pass ---- */

/* The last `n` of the rows from `first` to `end` want logits. */
static void want_logits(hd_batch *b, int32_t end, int32_t n) {
    for (int32_t row = end - n; row < end; row++) b->host.logit_rows[b->n_logits++] = row;
}

void exec_lay_batch(hd_executor *x, const hd_work *works, int32_t n) {
    hd_batch *b = &x->batch;
    hd_batch_reset(b);
    for (int32_t i = 0; i < n; i++) {
        const hd_work *w = &works[i];
        assert(w->n_score + w->n_choose <= w->n && w->n_choose <= HD_MAX_CHOSEN);
        hd_batch_add(b, &(hd_batch_seq){
                            .tokens = w->tokens,
                            .n = w->n,
                            .start = w->start,
                            .after = w->after,
                            .pages = {w->pages[0], w->pages[1]},
                            .n_pages = w->n_pages
        });
    }
    for (int32_t i = 0; i < n; i++) {
        x->places[i].first_score = b->n_logits;
        want_logits(b, b->host.first_row[i + 1] - works[i].n_choose, works[i].n_score);
    }
    for (int32_t i = 0; i < n; i++) {
        x->places[i].first_choice = b->n_logits;
        want_logits(b, b->host.first_row[i + 1], works[i].n_choose);
    }
    assert(b->n_logits <= x->n_rows);
    hd_batch_upload(b, x->env.stream);
}

/* ---- while it runs ---- */

/* What every logits row says of itself; at: its place among the work's tokens. */
static void lay_row(hd_executor *x, int32_t row, const hd_work *w, int32_t at) {
    const exec_view *v = &x->host;
    v->slot[row] = w->slot;
    v->position[row] = w->start + at + 1;
    v->input[row] = w->tokens[at];
    v->n_drafted[row] = 0;
    v->given[row] = v->draft[row] = v->mask_row[row] = -1;
}

static void lay_scores(hd_executor *x, const hd_work *w, int32_t first) {
    for (int32_t k = 0; k < w->n_score; k++) {
        const int32_t at = w->n - w->n_choose - w->n_score + k;
        lay_row(x, first + k, w, at);
        x->host.given[first + k] = at + 1 < w->n ? w->tokens[at + 1] : w->after;
        assert(x->host.given[first + k] >= 0);
    }
}

/* How many of n drafts a benchmark accepts. */
static int32_t forced(const hd_executor *x, int32_t slot, int32_t position, int32_t n) {
    const uint64_t seed = x->host.params[slot].seed;
    const float luck = hd_philox_unit(hd_philox_at(seed, DRAW_FORCED, (uint64_t)position).v[0]);
    int32_t standing = 0;
    while (standing < n && luck < x->o.forced.least[standing]) standing++;
    return standing;
}

static void lay_choices(hd_executor *x, const hd_work *w, exec_place *place) {
    const int32_t first = place->first_choice, first_at = w->n - w->n_choose;
    place->most_accepted = HD_MAX_DRAFTS;
    for (int32_t k = 0; k < w->n_choose; k++) {
        lay_row(x, first + k, w, first_at + k);
        x->host.n_drafted[first + k] = k;
    }
    if (x->o.forced.least[0] <= 0.0f || !w->n_choose) return;
    place->most_accepted = forced(x, w->slot, w->start + first_at + 1, w->n_choose - 1);
    for (int32_t k = 0; k < place->most_accepted; k++) {
        x->host.given[first + k] = w->tokens[first_at + k + 1];
    }
}

/* Limits the choosing rows of a work by its guide; *used counts the rows of masks. */
static void lay_limits(hd_executor *x, const hd_work *w, int32_t first, int32_t *used) {
    exec_reply *trial = &x->replies[x->o.n_slots];
    const exec_view *v = &x->host;
    exec_reply_copy(trial, &x->replies[w->slot]);
    for (int32_t k = 0; trial->guide && k < w->n_choose; k++) {
        const int32_t row = first + k, *next = w->tokens + w->n - w->n_choose + k + 1;
        const exec_limit limit =
            exec_reply_limit(trial, &x->masks, v->position[row], exec_mask_at(x, *used));
        v->mask_row[row] = exec_mask_row(x, limit, used);
        if (k + 1 == w->n_choose) return;
        if (limit != EXEC_FREE && !exec_mask_has(exec_mask_at(x, v->mask_row[row]), *next)) {
            return; /* the draft cannot stand, and what is behind it cannot be reached */
        }
        if (trial->reasoning) v->draft[row] = *next;
        exec_reply_advance(trial, &x->masks, *next);
    }
}

/* Describes every logits row. Gives the number of works that choose. */
static int32_t lay_rows(hd_executor *x, const hd_work *works, int32_t n) {
    int32_t groups = 0, masks = 0;
    x->host.first_row[0] = x->batch.n_logits;
    for (int32_t i = 0; i < n; i++) {
        const int32_t first = x->places[i].first_choice;
        lay_scores(x, &works[i], x->places[i].first_score);
        lay_choices(x, &works[i], &x->places[i]);
        if (!works[i].n_choose) continue;
        if (x->replies) lay_limits(x, &works[i], first, &masks);
        x->host.first_row[groups++] = first;
        x->host.first_row[groups] = first + works[i].n_choose;
    }
    exec_upload_rows(x);
    exec_upload_masks(x, masks);
    return groups;
}

/* ---- behind it ---- */

static hd_status sample(hd_executor *x, int32_t groups, hd_err *err) {
    const exec_view *d = &x->device;
    x->env.ops->sample(x->env.stream, &(hd_sample_args){.token = d->token,
                                                        .logprob = d->logprob,
                                                        .top_id = d->top_id,
                                                        .top_logprob = d->top_logprob,
                                                        .logits = hd_model_logits(x->model, 0),
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
                                                        .n_ids = x->o.n_ids});
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

/* Points at a work's rows of alternatives, ended by an id of -1. */
static void show_top(const hd_executor *x, int32_t slot, int32_t first, int32_t n,
                     const int32_t **ids, const float **logprobs) {
    const int32_t n_top = x->host.params[slot].n_top;
    if (n_top <= 0 || n == 0) return;
    *ids = x->host.top_id + (int64_t)first * HD_MAX_TOP_LOGPROBS;
    *logprobs = x->host.top_logprob + (int64_t)first * HD_MAX_TOP_LOGPROBS;
    for (int32_t row = first; row < first + n; row++) {
        int32_t *id = x->host.top_id + (int64_t)row * HD_MAX_TOP_LOGPROBS;
        for (int32_t i = n_top; i < HD_MAX_TOP_LOGPROBS; i++) id[i] = -1;
    }
}

static void collect_scores(const hd_executor *x, const hd_work *w, const exec_place *place,
                           hd_chosen *c) {
    const int32_t first = place->first_score;
    for (int32_t k = 0; k < w->n_score; k++) exec_note_failure(c, x->host.token[first + k]);
    if (w->n_score) c->scores = x->host.logprob + first;
    show_top(x, w->slot, first, w->n_score, &c->score_top_ids, &c->score_top_logprobs);
}

/* Accepted drafts and one token more; the reply moves past them. */
static void collect_tokens(hd_executor *x, const hd_work *w, const exec_place *place,
                           int32_t accepted, hd_chosen *c) {
    c->n_tokens = hd_min_i32(accepted, place->most_accepted) + 1;
    for (int32_t k = 0; k < c->n_tokens; k++) {
        c->tokens[k] = x->host.token[place->first_choice + k];
        c->logprobs[k] = x->host.logprob[place->first_choice + k];
        exec_note_failure(c, c->tokens[k]);
        if (x->replies) exec_reply_advance(&x->replies[w->slot], &x->masks, c->tokens[k]);
    }
    show_top(x, w->slot, place->first_choice, c->n_tokens, &c->top_ids, &c->top_logprobs);
}

/* What each work has won, and the accepted tokens into the counts where these matter. */
static void collect(hd_executor *x, const hd_work *works, int32_t n, hd_chosen *chosen) {
    int32_t group = 0, counted = 0;
    for (int32_t i = 0; i < n; i++) {
        const hd_work *w = &works[i];
        hd_chosen *c = &chosen[i];
        *c = (hd_chosen){.status = HD_OK};
        collect_scores(x, w, &x->places[i], c);
        if (!w->n_choose) continue;
        collect_tokens(x, w, &x->places[i], x->host.accepted[group++], c);
        if (!hd_has_penalty(&x->host.params[w->slot])) continue;
        for (int32_t k = 0; k < c->n_tokens; k++) {
            x->host.count_row[counted] = w->slot;
            x->host.count_token[counted++] = c->tokens[k];
        }
    }
    if (!counted) return;
    exec_upload_rows(x);
    x->env.ops->count_tokens(x->env.stream,
                             &(hd_count_tokens_args){.counts = x->counts,
                                                     .row = x->device.count_row,
                                                     .token = x->device.count_token,
                                                     .n = counted,
                                                     .vocab = x->env.spec->vocab});
}

hd_status exec_choose(hd_executor *x, const hd_work *works, int32_t n, hd_chosen *chosen,
                      hd_err *err) {
    const int32_t groups = lay_rows(x, works, n);
    HD_TRY(sample(x, groups, err));
    collect(x, works, n, chosen);
    return HD_OK;
}
