/* mla.c - multi-head latent attention in the absorbed form, and V3.2's sparse variant.
 *
 * DeepSeek-V2 report, section 2.1, with W_UK absorbed into the query (models.md 2.4):
 * q . (W_uk c) = (W_uk^T q) . c, so keys and values are read as the cached latent itself.
 * The lightning indexer is models.md 2.6. */
#include <math.h>

#include "model/model_internal.h"

/* The norms inside the attention, whatever rms_norm_eps says: so it is in the official code,
 * in the code shipped with the checkpoints and in the library. Only Moonlight's config says
 * something else (models.md 8, D1). */
static const float inner_eps = 1e-6f;

/* The first cols of every row, in place; stride elements between rows. */
static void norm_latent(const model_step *s, int32_t layer, hd_role role, hd_act *x,
                        int32_t cols, int32_t stride) {
    s->m->env.ops->rms_norm(
        s->m->env.stream,
        &(hd_rms_norm_args){.out = x,
                            .x = x,
                            .weight = hd_weights_vector(s->m->env.weights, layer, role),
                            .rows = s->b->n_rows,
                            .cols = cols,
                            .out_stride = stride,
                            .x_stride = stride,
                            .eps = inner_eps});
}

static void project(const model_step *s, int32_t layer) {
    const hd_model_spec *c = s->m->env.spec;
    model_acts *t = s->t;
    const int32_t n = s->b->n_rows, wide = c->kv_rank + c->rope_dim;
    if (c->q_rank) {
        model_linear(s, layer, HD_Q_A, t->q_low, t->h, n);
        norm_latent(s, layer, HD_Q_A_NORM, t->q_low, c->q_rank, c->q_rank);
        model_linear(s, layer, HD_Q_B, t->q, t->q_low, n);
    } else {
        model_linear(s, layer, HD_Q, t->q, t->h, n);
    }
    model_linear(s, layer, HD_KV_A, t->kv, t->h, n);
    norm_latent(s, layer, HD_KV_A_NORM, t->kv, c->kv_rank, wide);
    model_rope(s, t->cos_sin, t->kv, c->kv_rank, 1, wide);
    s->m->env.ops->store(s->m->env.stream,
                         &(hd_store_args){.pool = model_pool(s, layer, HD_POOL_LATENT),
                                          .x = t->kv,
                                          .seq = s->b->device.seq,
                                          .pos = s->b->device.pos,
                                          .rows = n});
}

/* q_wide = [W_uk^T q_nope | rope(q_rope)] per head */
static void absorb(const model_step *s, int32_t layer) {
    const hd_model_spec *c = s->m->env.spec;
    model_acts *t = s->t;
    const int32_t narrow = c->nope_dim + c->rope_dim, wide = c->kv_rank + c->rope_dim;
    s->m->env.ops->linear_heads(
        s->m->env.stream,
        &(hd_linear_heads_args){.out = t->q_wide,
                                .x = t->q,
                                .w = hd_weights_matrix(s->m->env.weights, layer, HD_KV_B),
                                .rows = s->b->n_rows,
                                .heads = s->m->share->n_heads,
                                .n_rows = c->nope_dim,
                                .head_rows = c->nope_dim + c->v_dim,
                                .out_stride = s->m->share->n_heads * wide,
                                .out_head = wide,
                                .x_stride = s->m->share->n_heads * narrow,
                                .x_head = narrow,
                                .transpose = true});
    s->m->env.ops->rope(s->m->env.stream,
                        &(hd_rope_args){.out = model_at(s, t->q_wide, c->kv_rank),
                                        .x = model_at(s, t->q, c->nope_dim),
                                        .cos_sin = t->cos_sin,
                                        .rows = s->b->n_rows,
                                        .heads = s->m->share->n_heads,
                                        .pairs = c->rope_dim / 2,
                                        .out_stride = s->m->share->n_heads * wide,
                                        .out_head = wide,
                                        .x_stride = s->m->share->n_heads * narrow,
                                        .x_head = narrow,
                                        .half_split = c->rope_half_split});
}

/* The indexer rotates its first rope_dim elements in half-split pairs. */
static void rope_index(const model_step *s, hd_act *x, int32_t heads) {
    const hd_model_spec *c = s->m->env.spec;
    s->m->env.ops->rope(s->m->env.stream, &(hd_rope_args){.out = x,
                                                          .x = x,
                                                          .cos_sin = s->t->cos_sin,
                                                          .rows = s->b->n_rows,
                                                          .heads = heads,
                                                          .pairs = c->rope_dim / 2,
                                                          .out_stride = heads * c->index_dim,
                                                          .out_head = c->index_dim,
                                                          .x_stride = heads * c->index_dim,
                                                          .x_head = c->index_dim,
                                                          .half_split = true});
}

static void index_tokens(const model_step *s, int32_t layer) {
    const hd_model_spec *c = s->m->env.spec;
    const hd_weights *w = s->m->env.weights;
    const hd_ops *op = s->m->env.ops;
    model_acts *t = s->t;
    const int32_t n = s->b->n_rows;
    hd_paged keys = model_pool(s, layer, HD_POOL_INDEX);
    model_linear(s, layer, HD_INDEX_Q_B, t->index_q, t->q_low, n);
    model_linear(s, layer, HD_INDEX_K, t->index_k, t->h, n);
    op->layer_norm(s->m->env.stream,
                   &(hd_layer_norm_args){.out = t->index_k,
                                         .x = t->index_k,
                                         .weight = hd_weights_vector(w, layer, HD_INDEX_K_NORM),
                                         .bias = hd_weights_vector(w, layer, HD_INDEX_K_BIAS),
                                         .rows = n,
                                         .cols = c->index_dim,
                                         .eps = inner_eps});
    rope_index(s, t->index_q, c->index_heads);
    rope_index(s, t->index_k, 1);
    op->store(s->m->env.stream, &(hd_store_args){.pool = keys,
                                                 .x = t->index_k,
                                                 .seq = s->b->device.seq,
                                                 .pos = s->b->device.pos,
                                                 .rows = n});
    model_linear_f32(s, layer, HD_INDEX_WEIGHTS, t->index_weight, t->h, n);
    model_index_select(s, keys, 1);
}

static void attend(const model_step *s, int32_t layer, const int32_t *selected) {
    const hd_model_spec *c = s->m->env.spec;
    s->m->env.ops->attend(s->m->env.stream,
                          &(hd_attend_args){.out = s->t->context,
                                            .q = s->t->q_wide,
                                            .entries = model_pool(s, layer, HD_POOL_LATENT),
                                            .selected = selected,
                                            .seq = s->b->device.seq,
                                            .pos = s->b->device.pos,
                                            .rows = s->b->n_rows,
                                            .heads = s->m->share->n_heads,
                                            .k_dim = c->kv_rank + c->rope_dim,
                                            .v_dim = c->kv_rank,
                                            .ratio = 1,
                                            .n_selected = selected ? c->index_topk : 0,
                                            .scale = s->m->softmax_scale});
}

static void attend_all(const model_step *s, int32_t layer) {
    attend(s, layer, NULL);
}

static void attend_selected(const model_step *s, int32_t layer) {
    attend(s, layer, s->t->selected);
}

/* y = W_o [W_uv context] */
static void output(const model_step *s, int32_t layer) {
    const hd_model_spec *c = s->m->env.spec;
    model_acts *t = s->t;
    s->m->env.ops->linear_heads(
        s->m->env.stream,
        &(hd_linear_heads_args){.out = t->o_low,
                                .x = t->context,
                                .w = hd_weights_matrix(s->m->env.weights, layer, HD_KV_B),
                                .rows = s->b->n_rows,
                                .heads = s->m->share->n_heads,
                                .n_rows = c->v_dim,
                                .first_row = c->nope_dim,
                                .head_rows = c->nope_dim + c->v_dim,
                                .out_stride = s->m->share->n_heads * c->v_dim,
                                .out_head = c->v_dim,
                                .x_stride = s->m->share->n_heads * c->kv_rank,
                                .x_head = c->kv_rank});
    model_linear(s, layer, HD_O, t->y, t->o_low, s->b->n_rows);
}

const model_stage model_mla_stages[] = {
    {"attn_in",  model_attn_in,   false},
    {"project",  project,         false},
    {"absorb",   absorb,          false},
    {"attend",   attend_all,      false},
    {"output",   output,          false},
    {"reduce",   model_reduce,    true },
    {"residual", model_block_out, false},
    {NULL,       NULL,            false},
};

const model_stage model_mla_sparse_stages[] = {
    {"attn_in",  model_attn_in,   false},
    {"project",  project,         false},
    {"absorb",   absorb,          false},
    {"index",    index_tokens,    false},
    {"attend",   attend_selected, false},
    {"output",   output,          false},
    {"reduce",   model_reduce,    true },
    {"residual", model_block_out, false},
    {NULL,       NULL,            false},
};
