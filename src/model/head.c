/* head.c - the embedding at the start of the forward pass, and the LM head at its end. */
#include "model/rows_internal.h"

static void make_rope_table(const model_step *s, float *out, const float *freq, float scale) {
    s->m->env.ops->rope_table(s->stream,
                              &(hd_rope_table_args){.out = out,
                                                    .position = s->b->device.pos,
                                                    .freq = freq,
                                                    .rows = s->b->n_rows,
                                                    .pairs = s->m->env.spec->rope_dim / 2,
                                                    .scale = scale});
}

void model_rope_tables(const model_step *s) {
    make_rope_table(s, s->t->cos_sin, s->m->freq, s->m->rope_scale);
    if (hd_is_hybrid(s->m->env.spec)) {
        make_rope_table(s, s->t->cos_sin_compress, s->m->freq_compress, 1.0f);
    }
}

void model_start(const model_step *s) {
    const hd_model_env *env = &s->m->env;
    if (s->b->n_rows == 0) return;
    env->ops->embed(s->stream, &(hd_embed_args){.out = s->t->x,
                                                .table = hd_weights_matrix(env->weights,
                                                                           HD_GLOBAL, HD_EMBED),
                                                .tokens = s->b->device.tokens,
                                                .rows = s->b->n_rows,
                                                .copies = model_streams(env->spec)});
    model_rope_tables(s);
}

static void gather(const model_step *s, hd_rows out, hd_rows x, int32_t cols) {
    s->m->env.ops->gather(s->stream, &(hd_gather_args){.out = out,
                                                       .x = x,
                                                       .index = s->b->device.logit_rows,
                                                       .rows = s->b->n_logits,
                                                       .cols = cols});
}

/* V4: a matrix of the head says how the streams are mixed. */
static void mix_by_head(const model_step *s, int32_t layer) {
    const hd_model_spec *c = s->m->env.spec;
    const hd_weights *w = s->m->env.weights;
    const model_activations *t = s->t;
    s->m->env.ops->hc_head(
        s->stream, &(hd_hc_head_args){.out = t->mixed,
                                      .x = t->logit_x,
                                      .fn = hd_weights_vector(w, layer, HD_HC_HEAD_FN),
                                      .scale = hd_weights_vector(w, layer, HD_HC_HEAD_SCALE),
                                      .base = hd_weights_vector(w, layer, HD_HC_HEAD_BASE),
                                      .rows = s->b->n_logits,
                                      .cols = c->hidden,
                                      .hc = c->hc_mult,
                                      .norm_eps = c->norm_eps,
                                      .eps = c->hc_eps});
}

/* V4.1: the last block has predicted the mixture. */
static void mix_predicted(const model_step *s) {
    const hd_model_spec *c = s->m->env.spec;
    const model_activations *t = s->t;
    gather(s, hd_f32(t->logit_pre), hd_f32(t->pre), c->hc_mult);
    s->m->env.ops->hc_mix(s->stream, &(hd_hc_mix_args){.out = t->mixed,
                                                       .x = t->logit_x,
                                                       .pre = t->logit_pre,
                                                       .rows = s->b->n_logits,
                                                       .cols = c->hidden,
                                                       .hc = c->hc_mult});
}

/* merged = the logits rows of the mixed streams' norm; x itself stays for the drafter. */
static void merge_streams(const model_step *s, int32_t layer) {
    const hd_model_spec *c = s->m->env.spec;
    const model_activations *t = s->t;
    gather(s, t->logit_x, t->x, c->hc_mult * c->hidden);
    if (c->family == HD_FAMILY_V41) {
        mix_predicted(s);
    } else {
        mix_by_head(s, layer);
    }
    model_norm(s, layer, HD_FINAL_NORM, t->merged, t->mixed, s->b->n_logits, c->hidden);
}

/* layer: HD_GLOBAL for the main model, or an MTP layer with its own final norm. The LM head
 * is the main model's in both cases. */
static void head(const model_step *s, int32_t layer) {
    const hd_model_spec *c = s->m->env.spec;
    model_activations *t = s->t;
    if (s->b->n_rows == 0) return;
    if (c->hc_mult) {
        merge_streams(s, layer);
    } else {
        model_norm(s, layer, HD_FINAL_NORM, t->h, t->x, s->b->n_rows, c->hidden);
        gather(s, t->merged, t->h, c->hidden);
    }
}

/* ---- ranks that share the vocabulary ---- */

static model_rows head_rows(const model_step *s) {
    return model_rows_of(s, HD_GROUP_HEAD, s->b->n_logits, s->b->group_logits);
}

static hd_rows logits_of(const model_step *s, const model_rows *rows) {
    return model_rows_in(rows, hd_f32(s->t->logits), hd_f32(s->t->head_logits),
                         s->m->env.spec->vocab);
}

static bool has_foreign(const hd_model *m) {
    return model_rows_are_foreign(m, HD_GROUP_HEAD);
}

static bool spreads(const hd_model *m) {
    return model_rows_are_few(m, HD_GROUP_HEAD);
}

static void fetch(const model_step *s, int32_t layer) {
    const model_rows rows = head_rows(s);
    (void)layer;
    model_fetch_rows(s, HD_GROUP_HEAD, &rows, s->t->head_x, s->t->merged,
                     s->m->env.spec->hidden);
}

/* Computes this rank's part of the vocabulary for every row. */
static void project_vocab(const model_step *s, int32_t layer) {
    const hd_model_env *env = &s->m->env;
    const hd_shard *shard = s->m->shard;
    const model_rows rows = head_rows(s);
    const hd_extent own = {shard->vocab0, shard->vocab};
    const hd_rows x = model_rows_in(&rows, s->t->merged, s->t->head_x, env->spec->hidden);
    (void)layer;
    if (rows.n == 0) return;
    env->ops->linear(
        s->stream,
        &(hd_linear_args){.out = model_columns_at(logits_of(s, &rows), own, env->spec->vocab),
                          .x = x,
                          .w = hd_weights_matrix(env->weights, HD_GLOBAL, HD_HEAD),
                          .rows = rows.n});
}

static bool gathers(const hd_model *m) {
    return m->shard->vocab < m->env.spec->vocab;
}

/* Gathers the other ranks' parts of the vocabulary. */
static void gather_words(const model_step *s, int32_t layer) {
    const hd_shard *shard = s->m->shard;
    const model_rows rows = head_rows(s);
    (void)layer;
    hd_comm_all_gather(s->m->env.comm, s->stream,
                       &(hd_all_gather_args){.group = HD_GROUP_HEAD,
                                             .x = logits_of(s, &rows).data,
                                             .rows = rows.n,
                                             .cols = s->m->env.spec->vocab,
                                             .first = shard->vocab0,
                                             .own = shard->vocab});
}

static void return_words(const model_step *s, int32_t layer) {
    const model_rows rows = head_rows(s);
    (void)layer;
    model_return_rows(s, HD_GROUP_HEAD, &rows, hd_f32(s->t->logits), logits_of(s, &rows),
                      s->b->n_logits, s->m->env.spec->vocab);
}

static void spread_words(const model_step *s, int32_t layer) {
    (void)layer;
    model_spread_rows(s, hd_f32(s->t->logits), s->b->n_logits, s->m->env.spec->vocab);
}

const model_stage model_head_stages[] = {
    {"head",         head,          HD_LANE_COMPUTE, NULL,        false},
    {"fetch",        fetch,         HD_LANE_COMM,    has_foreign, false},
    {"vocabulary",   project_vocab, HD_LANE_COMPUTE, NULL,        false},
    {"gather_words", gather_words,  HD_LANE_COMM,    gathers,     false},
    {"return",       return_words,  HD_LANE_COMM,    has_foreign, false},
    {"spread",       spread_words,  HD_LANE_COMM,    spreads,     false},
    {NULL,           NULL,          HD_LANE_COMPUTE, NULL,        false},
};
