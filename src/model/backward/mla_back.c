/* mla_back.c - backwards through MLA in its absorbed form, and V3.2's sparse attention. */
#include "model/backward/backward_internal.h"

/* From d.q to d.h: the query's projections. */
static void back_query(const back_step *k, int32_t layer) {
    const model_step *s = k->s;
    const hd_model_spec *c = s->m->env.spec;
    const backward_activations *d = &k->b->d;
    const int32_t n = s->b->n_rows;
    if (!c->q_rank) {
        back_linear(k, layer, HD_Q, d->h, false, hd_f32(d->q), s->t->h, n);
        return;
    }
    back_low_query(k, layer, model_inner_eps);
}

/* From d.entries, the gradient of the stored latents, to d.h. */
static void back_latents(const back_step *k, int32_t layer) {
    const model_step *s = k->s;
    const hd_model_spec *c = s->m->env.spec;
    const backward_activations *d = &k->b->d;
    const int32_t n = s->b->n_rows, wide = c->kv_rank + c->rope_dim;
    const hd_rows latents = hd_rows_strided(hd_f32(d->entries), wide);
    back_rope(k, s->t->cos_sin, d->entries, c->kv_rank, 1, wide);
    if (s->t->kv_raw.data == s->t->kv.data)
        model_linear(s, layer, HD_KV_A, s->t->kv, s->t->h, n);
    back_norm(k, layer, HD_KV_A_NORM, latents, latents, hd_rows_strided(s->t->kv_raw, wide), n,
              c->kv_rank, model_inner_eps);
    back_linear(k, layer, HD_KV_A, d->h, true, hd_f32(d->entries), s->t->h, n);
}

static void back_attention(const back_step *k, int32_t layer, const int32_t *selected) {
    const model_step *s = k->s;
    const hd_model_spec *c = s->m->env.spec;
    const backward_activations *d = &k->b->d;
    k->b->ops->attention_back(
        s->stream, &(hd_attention_back_args){.dq = d->q_wide,
                                             .dentries = d->entries,
                                             .lse = d->lse,
                                             .delta = d->delta,
                                             .g = hd_f32(d->context),
                                             .out = s->t->context,
                                             .q = s->t->q_wide,
                                             .entries = model_pool(s, layer, HD_POOL_LATENT),
                                             .selected = selected,
                                             .first_entry = s->b->device.first_row,
                                             .seqs = back_seqs(k),
                                             .rows = s->b->n_rows,
                                             .heads = s->m->shard->n_heads,
                                             .k_dim = c->kv_rank + c->rope_dim,
                                             .v_dim = c->kv_rank,
                                             .ratio = 1,
                                             .n_selected = selected ? c->index_topk : 0,
                                             .scale = s->m->softmax_scale});
}

/* The rotated part of the absorbed query's gradient, unrotated, into that of the query. */
static void back_rotated_query(const back_step *k) {
    const model_step *s = k->s;
    const hd_model_spec *c = s->m->env.spec;
    const backward_activations *d = &k->b->d;
    s->m->env.ops->rope(s->stream, &(hd_rope_args){.out = hd_f32(d->q + c->nope_dim),
                                                   .x = hd_f32(d->q_wide + c->kv_rank),
                                                   .cos_sin = s->t->cos_sin,
                                                   .rows = s->b->n_rows,
                                                   .heads = s->m->shard->n_heads,
                                                   .pairs = c->rope_dim / 2,
                                                   .out_head = c->nope_dim + c->rope_dim,
                                                   .x_head = c->kv_rank + c->rope_dim,
                                                   .half_split = c->rope_half_split,
                                                   .inverse = true});
}

/* ---- the naive form ---- */

/* d.q, d.dmade and the rotated part of d.entries, of d.o_low */
static void back_naive_attention(const back_step *k, hd_rows rotated) {
    const model_step *s = k->s;
    const hd_model_spec *c = s->m->env.spec;
    const backward_activations *d = &k->b->d;
    const int32_t heads = s->m->shard->n_heads;
    k->b->ops->attention_naive_back(
        s->stream, &(hd_attention_naive_back_args){
                       .dq = d->q,
                       .dmade = d->dmade,
                       .drotated = hd_rows_strided(hd_f32(d->entries + c->kv_rank),
                                                   c->kv_rank + c->rope_dim),
                       .part = d->rotated_part,
                       .lse = d->lse,
                       .delta = d->delta,
                       .g = hd_f32(d->o_low),
                       .out = s->t->o_low,
                       .q = s->t->q,
                       .made = d->made,
                       .rotated = rotated,
                       .seqs = {s->b->n_seqs, s->b->device.first_row, s->b->device.pos, 0},
                       .rows = s->b->n_rows,
                       .heads = heads,
                       .nope_dim = c->nope_dim,
                       .rope_dim = c->rope_dim,
                       .v_dim = c->v_dim,
                       .scale = s->m->softmax_scale
    });
    back_rope(k, s->t->cos_sin, d->q, c->nope_dim, heads, c->nope_dim + c->rope_dim);
}

/* From d.o_low to d.q and d.entries. Keys and values are made of the latents again, and queries
 * rotated, as the absorbed form did not. */
static void back_naive(const back_step *k, int32_t layer) {
    const model_step *s = k->s;
    const hd_model_spec *c = s->m->env.spec;
    const backward_activations *d = &k->b->d;
    const hd_weight *w = hd_weights_matrix(s->m->env.weights, layer, HD_KV_B);
    const int32_t n = s->b->n_rows, wide = c->kv_rank + c->rope_dim;
    const hd_rows latents = hd_rows_strided(s->t->kv, wide);
    model_linear(s, layer, HD_KV_B, hd_f32(d->made), latents, n);
    model_rope(s, s->t->cos_sin, s->t->q, c->nope_dim, s->m->shard->n_heads,
               c->nope_dim + c->rope_dim);
    back_naive_attention(k, hd_rows_at(latents, c->kv_rank));
    back_matrix(k, hd_gradients_at(k->g, layer, HD_KV_B), hd_f32(d->dmade), latents, n, w->rows,
                w->cols);
    back_input(k, layer, HD_KV_B, hd_rows_strided(hd_f32(d->entries), wide), hd_f32(d->dmade),
               n);
}

/* ---- the block ---- */

static void back_absorbed(const back_step *k, int32_t layer, const int32_t *selected) {
    const model_step *s = k->s;
    const hd_model_spec *c = s->m->env.spec;
    const backward_activations *d = &k->b->d;
    const hd_linear_heads_args half = {.w =
                                           hd_weights_matrix(s->m->env.weights, layer, HD_KV_B),
                                       .rows = s->b->n_rows,
                                       .heads = s->m->shard->n_heads,
                                       .head_rows = c->nope_dim + c->v_dim};
    hd_linear_heads_args keys = half, values = half;
    values.x = s->t->context;
    values.n_rows = c->v_dim;
    values.first_row = c->nope_dim;
    values.out_head = c->v_dim;
    values.x_head = c->kv_rank;
    keys.x = s->t->q;
    keys.n_rows = c->nope_dim;
    keys.out_head = c->kv_rank + c->rope_dim;
    keys.x_head = c->nope_dim + c->rope_dim;
    keys.transpose = true;
    /* of the two halves of KV_B: out = x W_h^T for values, out = x W_h for absorbed keys */
    back_heads(k, layer, HD_KV_B, &values, d->context, d->o_low);
    back_attention(k, layer, selected);
    if (selected) {
        back_indexer(k, layer,
                     &(back_indexed){.queries = s->t->q_wide,
                                     .entries = model_pool(s, layer, HD_POOL_LATENT),
                                     .first_entry = s->b->device.first_row,
                                     .k_dim = c->kv_rank + c->rope_dim,
                                     .ratio = 1});
    }
    back_heads(k, layer, HD_KV_B, &keys, d->q, d->q_wide);
    back_rotated_query(k);
}

static void back(const back_step *k, int32_t layer, const int32_t *selected) {
    const model_step *s = k->s;
    const backward_activations *d = &k->b->d;
    back_linear(k, layer, HD_O, d->o_low, false, hd_f32(d->y), s->t->o_low, s->b->n_rows);
    if (backward_is_naive(k->b)) {
        back_naive(k, layer);
    } else {
        back_absorbed(k, layer, selected);
    }
    back_query(k, layer);
    back_latents(k, layer);
}

void back_mla(const back_step *k, int32_t layer) {
    back(k, layer, NULL);
}

void back_mla_sparse(const back_step *k, int32_t layer) {
    back(k, layer, k->s->t->selected);
}
