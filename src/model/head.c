/* head.c - the embedding at the start of the forward pass, and the LM head at its end. */
#include "model/model_internal.h"

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
    if (s->m->env.spec->family == HD_FAMILY_V4) {
        make_rope_table(s, s->t->cos_sin_compress, s->m->freq_compress, 1.0f);
    }
}

void model_start(const model_step *s) {
    const hd_model_env *env = &s->m->env;
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

/* merged = the logits rows of norm(HC_head(x)); x itself stays for the MTP layer. */
static void merge_streams(const model_step *s, int32_t layer) {
    const hd_model_spec *c = s->m->env.spec;
    const hd_weights *w = s->m->env.weights;
    model_activations *t = s->t;
    gather(s, t->logit_x, t->x, c->hc_mult * c->hidden);
    s->m->env.ops->hc_head(
        s->stream, &(hd_hc_head_args){.out = t->merged,
                                      .x = t->logit_x,
                                      .fn = hd_weights_vector(w, layer, HD_HC_HEAD_FN),
                                      .scale = hd_weights_vector(w, layer, HD_HC_HEAD_SCALE),
                                      .base = hd_weights_vector(w, layer, HD_HC_HEAD_BASE),
                                      .rows = s->b->n_logits,
                                      .cols = c->hidden,
                                      .hc = c->hc_mult,
                                      .norm_eps = c->norm_eps,
                                      .eps = c->hc_eps});
    model_norm(s, layer, HD_FINAL_NORM, t->merged, t->merged, s->b->n_logits, c->hidden);
}

/* Computes this rank's part of the vocabulary for every row. */
static void project_vocab(const model_step *s) {
    const hd_model_env *env = &s->m->env;
    float *own = s->t->logits + s->m->shard->vocab0;
    env->ops->linear(s->stream,
                     &(hd_linear_args){.out = hd_rows_strided(hd_f32(own), env->spec->vocab),
                                       .x = s->t->merged,
                                       .w = hd_weights_matrix(env->weights, HD_GLOBAL, HD_HEAD),
                                       .rows = s->b->n_logits});
}

/* layer: HD_GLOBAL for the main model, or an MTP layer with its own final norm. The LM head
 * is the main model's in both cases. */
static void head(const model_step *s, int32_t layer) {
    const hd_model_spec *c = s->m->env.spec;
    model_activations *t = s->t;
    if (c->hc_mult) {
        merge_streams(s, layer);
    } else {
        model_norm(s, layer, HD_FINAL_NORM, t->h, t->x, s->b->n_rows, c->hidden);
        gather(s, t->merged, t->h, c->hidden);
    }
    project_vocab(s);
}

static bool gathers(const hd_model *m) {
    return m->shard->vocab < m->env.spec->vocab;
}

/* Gathers the other ranks' parts of the vocabulary. */
static void gather_words(const model_step *s, int32_t layer) {
    const hd_shard *shard = s->m->shard;
    (void)layer;
    hd_comm_all_gather(s->m->env.comm, s->stream,
                       &(hd_all_gather_args){.group = HD_GROUP_HEAD,
                                             .x = s->t->logits,
                                             .rows = s->b->n_logits,
                                             .cols = s->m->env.spec->vocab,
                                             .first = shard->vocab0,
                                             .own = shard->vocab});
}

const model_stage model_head_stages[] = {
    {"head",         head,         HD_LANE_COMPUTE, NULL,    false},
    {"gather_words", gather_words, HD_LANE_COMM,    gathers, false},
    {NULL,           NULL,         HD_LANE_COMPUTE, NULL,    false},
};
