/* blocks.c - the residual around a block (plain or hyper-connections), and operator helpers. */
#include "model/model_internal.h"

void model_norm(const model_step *s, int32_t layer, hd_role role, hd_rows out, hd_rows x,
                int32_t rows, int32_t cols) {
    s->m->env.ops->rms_norm(s->stream, &(hd_rms_norm_args){.out = out,
                                                           .x = x,
                                                           .weight = hd_weights_vector(
                                                               s->m->env.weights, layer, role),
                                                           .rows = rows,
                                                           .cols = cols,
                                                           .eps = s->m->env.spec->norm_eps});
}

void model_linear(const model_step *s, int32_t layer, hd_role role, hd_rows out, hd_rows x,
                  int32_t rows) {
    s->m->env.ops->linear(
        s->stream, &(hd_linear_args){.out = out,
                                     .x = x,
                                     .w = hd_weights_matrix(s->m->env.weights, layer, role),
                                     .rows = rows});
}

/* Rotates rope_dim elements from `at` of every head of x [rows, heads, head_width], in place
 * (RoPE). */
void model_rope(const model_step *s, const float *cos_sin, hd_rows x, int32_t at, int32_t heads,
                int32_t head_width) {
    hd_rows first = hd_rows_at(x, at);
    s->m->env.ops->rope(s->stream,
                        &(hd_rope_args){.out = first,
                                        .x = first,
                                        .cos_sin = cos_sin,
                                        .rows = s->b->n_rows,
                                        .heads = heads,
                                        .pairs = s->m->env.spec->rope_dim / 2,
                                        .out_head = head_width,
                                        .x_head = head_width,
                                        .half_split = s->m->env.spec->rope_half_split});
}

void model_indexer_topk(const model_step *s, hd_paged keys, int32_t ratio) {
    const hd_model_spec *c = s->m->env.spec;
    s->m->env.ops->indexer_topk(s->stream, &(hd_indexer_topk_args){.out = s->t->selected,
                                                                   .q = s->t->index_q,
                                                                   .weight = s->t->index_weight,
                                                                   .keys = keys,
                                                                   .seq = s->b->device.seq,
                                                                   .pos = s->b->device.pos,
                                                                   .rows = s->b->n_rows,
                                                                   .heads = c->index_heads,
                                                                   .ratio = ratio,
                                                                   .top_k = c->index_topk,
                                                                   .scale = s->m->index_scale});
}

void model_mix_streams(const model_step *s, int32_t layer, hd_role fn, hd_rows out, hd_rows x) {
    const hd_model_spec *c = s->m->env.spec;
    const hd_weights *w = s->m->env.weights;
    const hd_role base = fn == HD_HC_ATTN_FN ? HD_HC_ATTN_BASE : HD_HC_FFN_BASE;
    const hd_role scale = fn == HD_HC_ATTN_FN ? HD_HC_ATTN_SCALE : HD_HC_FFN_SCALE;
    s->m->env.ops->hc_pre(s->stream,
                          &(hd_hc_pre_args){.out = out,
                                            .post = s->t->post,
                                            .comb = s->t->comb,
                                            .x = x,
                                            .fn = hd_weights_vector(w, layer, fn),
                                            .scale = hd_weights_vector(w, layer, scale),
                                            .base = hd_weights_vector(w, layer, base),
                                            .rows = s->b->n_rows,
                                            .cols = c->hidden,
                                            .hc = c->hc_mult,
                                            .iters = c->hc_sinkhorn_iters,
                                            .norm_eps = c->norm_eps,
                                            .eps = c->hc_eps});
}

/* h = norm(x), or with hyper-connections norm of the streams' mixture. */
static void block_in(const model_step *s, int32_t layer, hd_role norm, hd_role hc_fn) {
    const bool mixes = s->m->env.spec->hc_mult != 0;
    if (mixes) model_mix_streams(s, layer, hc_fn, s->t->y, s->t->x);
    model_norm(s, layer, norm, s->t->h, mixes ? s->t->y : s->t->x, s->b->n_rows,
               s->m->env.spec->hidden);
}

void model_attn_in(const model_step *s, int32_t layer) {
    block_in(s, layer, HD_ATTN_NORM, HD_HC_ATTN_FN);
}

void model_ffn_in(const model_step *s, int32_t layer) {
    block_in(s, layer, HD_FFN_NORM, HD_HC_FFN_FN);
}

bool model_reduces_heads(const hd_model *m) {
    return hd_parallel_head_parts(&m->shard->parallel) > 1;
}

void model_all_reduce(const model_step *s, int32_t layer) {
    const hd_model_env *env = &s->m->env;
    (void)layer;
    hd_comm_all_reduce(env->comm, s->stream,
                       &(hd_all_reduce_args){.group = HD_GROUP_TP,
                                             .x = s->t->y,
                                             .n = (int64_t)s->b->n_rows * env->spec->hidden});
}

void model_block_out(const model_step *s, int32_t layer) {
    const hd_model_spec *c = s->m->env.spec;
    const model_activations *t = s->t;
    (void)layer;
    if (c->hc_mult) {
        s->m->env.ops->hc_post(s->stream, &(hd_hc_post_args){.x = t->x,
                                                             .y = t->y,
                                                             .post = t->post,
                                                             .comb = t->comb,
                                                             .rows = s->b->n_rows,
                                                             .cols = c->hidden,
                                                             .hc = c->hc_mult});
        return;
    }
    s->m->env.ops->add(
        s->stream,
        &(hd_add_args){
            .x = t->x, .y = t->y, .rows = s->b->n_rows, .cols = c->hidden, .repeat = 1});
}
