/* head_back.c - the loss at the logits, and backwards through the LM head. */
#include "model/backward/backward_internal.h"

/* dx += g at the rows of the logits */
static void scatter(const back_step *k, const float *g, int32_t cols) {
    const model_step *s = k->s;
    const backward_activations *d = &k->b->d;
    k->b->ops->gather_back(s->stream, &(hd_gather_back_args){.dx = d->term,
                                                             .g = hd_f32(g),
                                                             .index = s->b->device.logit_rows,
                                                             .rows = s->b->n_logits,
                                                             .x_rows = s->b->n_rows,
                                                             .cols = cols});
    back_add(k, d->x, d->term, s->b->n_rows, cols);
}

/* From d.merged to d.x through the final norm and the streams' mixture. */
static void back_streams(const back_step *k, int32_t layer) {
    const model_step *s = k->s;
    const hd_model_spec *c = s->m->env.spec;
    const hd_weights *w = s->m->env.weights;
    const backward_activations *d = &k->b->d;
    const int32_t hc = c->hc_mult, wide = hc * c->hidden, n = s->b->n_logits;
    const float *fn = hd_weights_vector(w, layer, HD_HC_HEAD_FN);
    const float *scale = hd_weights_vector(w, layer, HD_HC_HEAD_SCALE);
    const float *base = hd_weights_vector(w, layer, HD_HC_HEAD_BASE);
    float *dfn = hd_gradients_at(k->g, layer, HD_HC_HEAD_FN);
    s->m->env.ops->hc_head(s->stream,
                           &(hd_hc_head_args){hd_f32(d->mixed), s->t->logit_x, fn, scale, base,
                                              n, c->hidden, hc, c->norm_eps, c->hc_eps});
    back_norm(k, layer, HD_FINAL_NORM, hd_f32(d->merged), hd_f32(d->merged), hd_f32(d->mixed),
              n, c->hidden, c->norm_eps);
    k->b->ops->hc_head_back(
        s->stream,
        &(hd_hc_head_back_args){.dx = d->logit_x,
                                .dmix = d->logit_mix,
                                .dscale = hd_gradients_at(k->g, layer, HD_HC_HEAD_SCALE),
                                .dbase = hd_gradients_at(k->g, layer, HD_HC_HEAD_BASE),
                                .part = d->part,
                                .g = hd_f32(d->merged),
                                .x = s->t->logit_x,
                                .fn = fn,
                                .scale = scale,
                                .base = base,
                                .rows = n,
                                .cols = c->hidden,
                                .hc = hc,
                                .norm_eps = c->norm_eps,
                                .eps = c->hc_eps,
                                .sums = back_sums(k)});
    back_matrix(k, dfn, hd_f32(d->logit_mix), s->t->logit_x, n, hc, wide);
    scatter(k, d->logit_x, wide);
}

/* From d.merged to d.x through the final norm. */
static void back_final_norm(const back_step *k, int32_t layer) {
    const model_step *s = k->s;
    const hd_model_spec *c = s->m->env.spec;
    const backward_activations *d = &k->b->d;
    s->m->env.ops->gather(s->stream, &(hd_gather_args){.out = hd_f32(d->mixed),
                                                       .x = s->t->x,
                                                       .index = s->b->device.logit_rows,
                                                       .rows = s->b->n_logits,
                                                       .cols = c->hidden});
    back_norm(k, layer, HD_FINAL_NORM, hd_f32(d->merged), hd_f32(d->merged), hd_f32(d->mixed),
              s->b->n_logits, c->hidden, c->norm_eps);
    scatter(k, d->merged, c->hidden);
}

/* From the gradient of the logits to d.merged. The MTP layer has the main model's matrix. */
static void back_vocabulary(const back_step *k, int32_t layer) {
    const model_step *s = k->s;
    const hd_model_spec *c = s->m->env.spec;
    const bool drafts = layer != HD_GLOBAL;
    float *dw = drafts ? hd_gradients_of_drafts(k->g, HD_HEAD)
                       : hd_gradients_at(k->g, HD_GLOBAL, HD_HEAD);
    if (!(drafts && k->detached)) {
        back_matrix(k, dw, hd_f32(s->t->logits), s->t->merged, s->b->n_logits, c->vocab,
                    c->hidden);
    }
    back_input(k, HD_GLOBAL, HD_HEAD, hd_f32(k->b->d.merged), hd_f32(s->t->logits),
               s->b->n_logits);
}

/* Logits rows [first, first + n) of the batch. */
static void back_part(const back_step *k, int32_t layer, const hd_loss *loss, int32_t first) {
    const model_step *s = k->s;
    const hd_model_spec *c = s->m->env.spec;
    model_step step = *s;
    model_run_stages(&step, 1, model_head_stages, "step", layer, false);
    k->b->ops->cross_entropy(
        s->stream, &(hd_cross_entropy_args){
                       .logits = s->t->logits,
                       .logprob = loss->logprob + first,
                       .entropy = loss->entropy + first,
                       .target = loss->target + first,
                       .factor = k->g ? loss->factor + first : NULL,
                       .entropy_factor =
                           k->g && loss->entropy_factor ? loss->entropy_factor + first : NULL,
                       .temperature = loss->temperature ? loss->temperature + first : NULL,
                       .rows = s->b->n_logits,
                       .vocab = c->vocab});
    if (!k->g) return;
    back_vocabulary(k, layer);
    if (c->hc_mult) {
        back_streams(k, layer);
    } else {
        back_final_norm(k, layer);
    }
}

void back_clear_residual(const back_step *k) {
    const hd_model_spec *c = k->s->m->env.spec;
    const size_t n = (size_t)k->s->b->n_rows * (size_t)model_streams(c) * (size_t)c->hidden;
    hd_stream_clear(k->s->stream, k->b->d.x, n * sizeof(float));
}

/* The end of the piece from logits row `first` on: rows of one sequence, as many as a GPU sums at most. A
 * CPU sums them all. */
static int32_t piece_end(const back_step *k, const hd_batch *batch, const int32_t *host_rows,
                         int32_t first) {
    const int32_t *seq = batch->host.seq;
    int32_t end = first + 1;
    if (hd_device_is_host(k->s->m->env.device)) return batch->n_logits;
    while (end < batch->n_logits && end - first < HD_SUM_ROWS &&
           seq[host_rows[end]] == seq[host_rows[first]]) {
        end++;
    }
    return end;
}

/* Logits rows from `first` on, at most `most`, in whole pieces where one fits; their borders. */
static hd_seqs next_part(const back_step *k, const hd_batch *batch, const int32_t *host_rows,
                         int32_t first) {
    const int32_t most = k->s->m->limits.logits;
    int32_t *border = k->b->first_logit, n = 0, end = first;
    border[0] = 0;
    while (end < batch->n_logits && end - first < most) {
        const int32_t next = piece_end(k, batch, host_rows, end);
        if (next - first > most && n > 0) break;
        end = next - first > most ? first + most : next;
        border[++n] = end - first;
    }
    return (hd_seqs){.n = n, .first_row = border};
}

/* The logits of a batch never exist all at once: parts of limits.logits rows. */
void back_head(const back_step *k, int32_t layer, const hd_batch *batch,
               const int32_t *host_rows, const hd_loss *loss) {
    const model_step *s = k->s;
    for (int32_t first = 0; first < batch->n_logits;) {
        hd_batch part = *batch;
        model_step step = *s;
        back_step at = *k;
        at.logits = next_part(k, batch, host_rows, first);
        part.n_logits = at.logits.first_row[at.logits.n];
        part.device.logit_rows += first;
        hd_stream_upload(s->stream, k->b->d.first_logit, at.logits.first_row,
                         ((size_t)at.logits.n + 1) * sizeof(int32_t));
        at.logits.first_row = k->b->d.first_logit;
        step.b = &part;
        at.s = &step;
        back_part(&at, layer, loss, first);
        first += part.n_logits;
    }
}
