/* dspark.c - DSpark: stages that draft a block of tokens in one pass; models.md 2.16.
 *
 * Stages are window layers. Their keys before the block are not those of their own earlier
 * rows: every position that a step computes leaves the residual of some main layers (taps),
 * and one projection of it gives the keys of all stages. In the block every row attends to
 * every other. A Markov head adds what the token before says about each draft. */
#include "model/model_internal.h"

static int32_t tap_of(const hd_dspark_spec *d, int32_t layer) {
    int32_t i = 0;
    while (i < d->n_taps && d->taps[i] != layer) i++;
    return i;
}

bool model_has_tap(const hd_model_spec *spec, int32_t layer, hd_tap_side side) {
    const hd_dspark_spec *d = &spec->dspark;
    return side == d->side && tap_of(d, layer) < d->n_taps;
}

void model_tap(const model_step *s, int32_t layer) {
    const hd_model_spec *c = s->m->env.spec;
    const hd_dspark_spec *d = &c->dspark;
    const hd_rows out = hd_rows_at(s->t->taps, (int64_t)tap_of(d, layer) * c->hidden);
    s->m->env.ops->hc_mean(
        s->stream, &(hd_hc_mean_args){.out = hd_rows_strided(out, d->n_taps * c->hidden),
                                      .x = s->t->x,
                                      .rows = s->b->n_rows,
                                      .cols = c->hidden,
                                      .hc = c->hc_mult});
}

static int32_t last_stage(const hd_model *m) {
    return m->env.spec->n_layers + m->env.spec->n_mtp - 1;
}

static void absorb(const model_step *s) {
    const hd_model *m = s->m;
    const int32_t first = m->env.spec->n_layers, n = s->b->n_rows;
    if (n == 0) return;
    model_linear(s, first, HD_DSPARK_PROJ, s->t->y, s->t->taps, n);
    model_norm(s, first, HD_DSPARK_NORM, s->t->h, s->t->y, n, m->env.spec->hidden);
    for (int32_t l = first; l <= last_stage(m); l++) model_store_window(s, l);
}

void hd_model_absorb(hd_model *m, const hd_kv *kv, const hd_batch *batch) {
    model_step steps[HD_MAX_MICRO], s = model_step_of(m, kv, batch);
    if (s.rest->on) s.b = &s.rest->batch; /* the rows that the last layer had */
    const int32_t n = model_cut(m, &s, steps);
    model_probe(m, "draft", "keys");
    for (int32_t i = 0; i < n; i++) absorb(n > 1 ? &steps[i] : &s);
}

void model_open_confidence(hd_model *m) {
    const hd_model_spec *c = m->env.spec;
    const float *w = hd_weights_vector(m->env.weights, last_stage(m), HD_DSPARK_CONFIDENCE);
    const hd_weight row = {
        .data = w, .type = HD_F32, .rows = 1, .cols = c->hidden, .global = 1};
    m->confidence_of_row = m->confidence_of_token = row;
    m->confidence_of_token.data = w + c->hidden;
    m->confidence_of_token.cols = c->dspark.rank;
}

static void confide(const model_step *s, float *out, hd_rows x, const hd_weight *w,
                    int32_t rows) {
    s->m->env.ops->linear(s->stream,
                          &(hd_linear_args){.out = hd_f32(out), .x = x, .w = w, .rows = rows});
}

void hd_model_draft_block(hd_model *m, const hd_kv *kv, const hd_batch *batch) {
    const int32_t last = last_stage(m);
    model_step s = model_step_of(m, kv, batch);
    assert(m->dspark);
    model_probe(m, "draft", "start");
    s.t->expert = s.t->drafted;
    model_start(&s);
    model_run_layers(m, &s, m->env.spec->n_layers, last);
    model_run_head(&s, "draft", last);
    model_probe(m, "draft", "confidence");
    confide(&s, s.t->confidence, s.t->mixed, &m->confidence_of_row, s.b->n_logits);
}

static void add(const model_step *s, float *x, const float *y, int32_t rows, int32_t cols) {
    s->m->env.ops->add(
        s->stream,
        &(hd_add_args){
            .x = hd_f32(x), .y = hd_f32(y), .rows = rows, .cols = cols, .repeat = 1});
}

hd_draft_logits hd_model_draft_place(hd_model *m, int32_t place, const int32_t *before,
                                     int32_t n, int32_t n_seqs) {
    const hd_model_spec *c = m->env.spec;
    model_activations *t = &m->acts;
    const model_step s = {.m = m, .t = t, .stream = m->env.stream};
    const int32_t last = last_stage(m), at = place * n_seqs;
    float *logits = t->logits + (int64_t)at * c->vocab, *confidence = t->confidence + at;
    float *of_token = t->confidence + m->limits.logits;
    model_probe(m, "draft", "markov");
    m->env.ops->embed(m->env.stream,
                      &(hd_embed_args){.out = t->markov,
                                       .table = hd_weights_matrix(m->env.weights, last,
                                                                  HD_DSPARK_MARKOV_EMBED),
                                       .tokens = before,
                                       .rows = n,
                                       .copies = 1});
    model_linear(&s, last, HD_DSPARK_MARKOV_HEAD, hd_f32(t->bigram), t->markov, n);
    add(&s, logits, t->bigram, n, c->vocab);
    confide(&s, of_token, t->markov, &m->confidence_of_token, n);
    add(&s, confidence, of_token, n, 1);
    model_probe(m, "draft", "choose");
    return (hd_draft_logits){logits, confidence};
}
