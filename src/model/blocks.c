/* blocks.c - the residual around a block (plain or hyper-connections), and operator helpers. */
#include <string.h>

#include "model/rows_internal.h"

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

void model_linear_set(const model_step *s, int32_t layer, hd_rows x, const model_product *p,
                      int32_t n) {
    hd_linear_set_args a = {.x = x, .rows = s->b->n_rows};
    for (int32_t i = 0; i < n; i++) {
        if (p[i].without) continue;
        a.out[a.n] = p[i].out;
        a.w[a.n++] = hd_weights_matrix(s->m->env.weights, layer, p[i].role);
    }
    s->m->env.ops->linear_set(s->stream, &a);
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

hd_replay_log model_replay_log(const model_step *s, hd_replay kind, int32_t layer,
                               int32_t first) {
    hd_replay_log log =
        hd_replay_log_of(hd_kv_replay(s->kv, kind), layer, s->b->device.tables[HD_KV_FULL],
                         s->b->limits.table_stride);
    log.seq = s->b->device.seq + first;
    log.pos = s->b->device.pos + first;
    return log;
}

/* The keys that are replayed in this layer, if any, replace the indexer's own. */
static void take_keys(const model_step *s, int32_t layer) {
    const hd_model_spec *c = s->m->env.spec;
    const model_replay *replay = s->replay;
    const int32_t index =
        replay && replay->keys ? hd_replay_layer(c, HD_REPLAY_KEYS, layer) : -1;
    if (index < 0) return;
    const size_t row = (size_t)c->index_topk, rows = (size_t)s->b->n_rows;
    const int32_t *given = replay->keys + (size_t)index * rows * row;
    for (size_t r = 0; r < rows; r++) {
        const int32_t *own = s->t->selected + r * row;
        *replay->other_keys += memcmp(own, given + r * row, row * sizeof *own) != 0;
    }
    *replay->indexed += s->b->n_rows;
    memcpy(s->t->selected, given, rows * row * sizeof *given);
}

void model_replay_keys(const model_step *s, int32_t layer) {
    const hd_replay_log log = model_replay_log(s, HD_REPLAY_KEYS, layer, 0);
    take_keys(s, layer);
    if (!log.data) return;
    s->m->env.ops->replay_store(s->stream,
                                &(hd_replay_store_args){.choice = s->t->selected,
                                                        .log = log,
                                                        .rows = s->b->n_rows,
                                                        .top_k = s->m->env.spec->index_topk});
}

void model_indexer_topk(const model_step *s, int32_t layer, hd_paged keys, int32_t ratio) {
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
    model_replay_keys(s, layer);
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

/* Whether a layer adds the result of its feed-forward block itself: at the end of a pass, or
 * where a drafter or Engram reads the residual after it. Else the next block's first stage does. */
static bool completes_residual(const model_step *s, int32_t layer) {
    const hd_model *m = s->m;
    const hd_model_spec *c = m->env.spec;
    if (s->apart || layer + 1 >= c->n_layers || hd_has_engram(c, layer + 1)) return true;
    return m->dspark && (model_has_tap(c, layer, HD_TAP_OUTPUT) ||
                         model_has_tap(c, layer + 1, HD_TAP_INPUT));
}

/* x = post y + comb x, per row */
static void add_to_streams(const model_step *s, hd_rows y) {
    const hd_model_spec *c = s->m->env.spec;
    s->m->env.ops->hc_post(s->stream, &(hd_hc_post_args){.x = s->t->x,
                                                         .y = y,
                                                         .post = s->t->post,
                                                         .comb = s->t->comb,
                                                         .rows = s->b->n_rows,
                                                         .cols = c->hidden,
                                                         .hc = c->hc_mult});
}

static hd_group group_of_ffn(const model_step *s, int32_t layer) {
    return s->m->env.spec->layers[layer].mlp == HD_MLP_DENSE ? HD_GROUP_DENSE : HD_GROUP_ETP;
}

bool model_heads_join_later(const model_step *s) {
    return model_joins_later(s, HD_GROUP_ATTENTION);
}

bool model_ffn_joins_later(const model_step *s, int32_t layer) {
    return !completes_residual(s, layer) && model_joins_later(s, group_of_ffn(s, layer));
}

/* The group that completes the result of the block before, together with the residual and the norm;
 * HD_N_GROUPS: it is complete. */
static hd_group joins_heads(const model_step *s) {
    return model_heads_join_later(s) ? HD_GROUP_ATTENTION : HD_N_GROUPS;
}

static hd_group joins_ffn(const model_step *s, int32_t layer) {
    return model_ffn_joins_later(s, layer) ? group_of_ffn(s, layer) : HD_N_GROUPS;
}

/* The columns of a block's result that this rank computes. */
static hd_extent own_columns(const model_step *s, hd_group group) {
    const hd_shard *shard = s->m->shard;
    return group == HD_GROUP_ATTENTION ? shard->o_out
           : group == HD_GROUP_DENSE   ? shard->dense_out
                                       : shard->moe_out;
}

static void add_norm(const model_step *s, hd_group joins, const hd_add_norm_args *a) {
    const hd_model_env *env = &s->m->env;
    if (joins == HD_N_GROUPS) {
        env->ops->add_norm(s->stream, a);
        return;
    }
    const hd_extent own = own_columns(s, joins);
    const bool sums = s->m->shard->parallel.sum_in_ranks;
    hd_comm_join_norm(env->comm, env->ops, s->stream,
                      &(hd_join_norm_args){joins, sums, own.first, own.n, *a});
}

/* x += y, the result of the block before, unless y is none; then h = norm(x). With
 * hyper-connections x are streams, and h is the norm of their mixture. */
static void block_in(const model_step *s, int32_t layer, hd_role norm, hd_role hc_fn, hd_rows y,
                     hd_group joins) {
    const hd_model_spec *c = s->m->env.spec;
    const hd_weights *w = s->m->env.weights;
    model_activations *t = s->t;
    if (s->b->n_rows == 0) return;
    if (!c->hc_mult) {
        add_norm(s, joins,
                 &(hd_add_norm_args){.out = t->h,
                                     .x = t->x,
                                     .y = y,
                                     .weight = hd_weights_vector(w, layer, norm),
                                     .rows = s->b->n_rows,
                                     .cols = c->hidden,
                                     .eps = c->norm_eps});
        return;
    }
    const bool attends = hc_fn == HD_HC_ATTN_FN;
    const hd_role base = attends ? HD_HC_ATTN_BASE : HD_HC_FFN_BASE;
    const hd_role scale = attends ? HD_HC_ATTN_SCALE : HD_HC_FFN_SCALE;
    s->m->env.ops->hc_next(
        s->stream,
        &(hd_hc_next_args){.out = t->h,
                           .x = t->x,
                           .y = y,
                           .post = t->post,
                           .comb = t->comb,
                           .pre = t->pre,
                           .fn = hd_weights_vector(w, layer, hc_fn),
                           .scale = hd_weights_vector(w, layer, scale),
                           .base = hd_weights_vector(w, layer, base),
                           .weight = hd_weights_vector(w, layer, norm),
                           .rows = s->b->n_rows,
                           .cols = c->hidden,
                           .hc = c->hc_mult,
                           .iters = c->hc_sinkhorn_iters,
                           .norm_eps = c->norm_eps,
                           .eps = c->hc_eps,
                           .first = attends && (layer == 0 || layer == c->n_layers)});
}

static const hd_rows nothing; /* the block before has added its result */

void model_attn_in(const model_step *s, int32_t layer) {
    const bool complete = layer == 0 || completes_residual(s, layer - 1);
    block_in(s, layer, HD_ATTN_NORM, HD_HC_ATTN_FN, complete ? nothing : s->t->y,
             complete ? HD_N_GROUPS : joins_ffn(s, layer - 1));
}

void model_ffn_in(const model_step *s, int32_t layer) {
    block_in(s, layer, HD_FFN_NORM, HD_HC_FFN_FN, s->apart ? nothing : s->t->y, joins_heads(s));
}

/* ---- ranks that share the heads ---- */

bool model_shares_heads(const hd_model *m) {
    return model_shares(m, HD_GROUP_ATTENTION);
}

bool model_gathers_heads(const hd_model *m) {
    return model_gathers_columns(m, HD_GROUP_ATTENTION);
}

hd_extent model_head_columns(const hd_model *m, int32_t *width) {
    const hd_model_spec *c = m->env.spec;
    const hd_shard *shard = m->shard;
    const bool v4 = hd_is_hybrid(c);
    const int32_t each = v4 ? c->o_rank : c->v_dim;
    const hd_extent own = {(v4 ? shard->o_group0 : shard->head0) * each,
                           (v4 ? shard->o_groups : shard->n_heads) * each};
    *width = model_gathers_heads(m) ? (v4 ? c->o_groups : c->n_heads) * each : own.n;
    return own;
}

hd_rows model_head_values(const model_step *s, int32_t row) {
    int32_t width;
    const hd_extent own = model_head_columns(s->m, &width);
    return model_columns_at(hd_rows_at(s->t->o_low, (int64_t)row * width), own, width);
}

/* y = W o_low */
void model_attn_output(const model_step *s, int32_t layer) {
    const hd_model_spec *c = s->m->env.spec;
    model_part own;
    if (!model_own_part(s, layer, &own)) return;
    const hd_rows y = model_columns_at(own.step.t->y, s->m->shard->o_out, c->hidden);
    model_linear(s, layer, hd_is_hybrid(c) ? HD_O_B : HD_O, y, own.step.t->o_low,
                 own.step.b->n_rows);
}

void model_gather_heads(const model_step *s, int32_t layer) {
    int32_t width;
    const hd_extent own = model_head_columns(s->m, &width);
    model_part part;
    if (!model_own_part(s, layer, &part)) return;
    model_gather_columns(s, HD_GROUP_ATTENTION, part.step.t->o_low, part.step.b->n_rows, own,
                         width);
}

void model_join_heads(const model_step *s, int32_t layer) {
    model_part own;
    if (model_heads_join_later(s) || !model_own_part(s, layer, &own)) return;
    model_join_result(s, HD_GROUP_ATTENTION, own.step.t->y, own.step.b->n_rows,
                      s->m->shard->o_out);
}

void model_block_out(const model_step *s, int32_t layer) {
    const hd_model_spec *c = s->m->env.spec;
    const model_activations *t = s->t;
    if (!completes_residual(s, layer) || s->b->n_rows == 0) return;
    if (c->hc_mult) {
        add_to_streams(s, t->y);
        return;
    }
    s->m->env.ops->add(
        s->stream,
        &(hd_add_args){
            .x = t->x, .y = t->y, .rows = s->b->n_rows, .cols = c->hidden, .repeat = 1});
}
