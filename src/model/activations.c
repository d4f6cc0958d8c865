/* activations.c - the memory plan of a micro-batch's activations, for the largest step.
 *
 * x, h and y live through a layer. Buffers that other ranks write into live through the
 * step. Attention, feed-forward and head scratch are never alive together, so the three
 * start at the same offset. */
#include "model/model_internal.h"

static hd_rows take(hd_arena *a, const hd_model *m, int64_t n) {
    const hd_ops *ops = m->env.ops;
    const size_t bytes = (size_t)n * (size_t)hd_act_bytes(ops);
    return (hd_rows){.data = n ? hd_arena_take(a, bytes, 64) : NULL, .type = ops->act_type};
}

static float *take_f32(hd_arena *a, int64_t n) {
    return n ? hd_arena_take(a, (size_t)n * sizeof(float), 64) : NULL;
}

static int32_t *take_i32(hd_arena *a, int64_t n) {
    return n ? hd_arena_take(a, (size_t)n * sizeof(int32_t), 64) : NULL;
}

static void place_attention(model_activations *t, hd_arena *a, const hd_model *m) {
    const hd_model_spec *c = m->env.spec;
    const int64_t n = m->limits.rows, heads = m->shard->n_heads, groups = m->shard->o_groups;
    const bool mla = c->family != HD_FAMILY_V4;
    t->q_low = take(a, m, n * c->q_rank);
    t->q = take(a, m, n * heads * (mla ? c->nope_dim + c->rope_dim : c->head_dim));
    t->q_wide = take(a, m, mla ? n * heads * (c->kv_rank + c->rope_dim) : 0);
    t->kv = take(a, m, n * (mla ? c->kv_rank + c->rope_dim : c->head_dim));
    t->context = take(a, m, n * heads * (mla ? c->kv_rank : c->head_dim));
    t->o_low = take(a, m, n * (mla ? heads * c->v_dim : groups * c->o_rank));
    t->index_q = take(a, m, n * c->index_heads * c->index_dim);
    t->index_k = take(a, m, n * c->index_dim);
    t->index_weight = take_f32(a, n * c->index_heads);
    t->selected = take_i32(a, n * c->index_topk);
    /* the compressor of the attention, then that of the indexer */
    const int32_t entry = c->index_dim > c->head_dim ? c->index_dim : c->head_dim;
    t->compress_kv = take_f32(a, mla ? 0 : n * 2 * entry);
    t->compress_gate = take_f32(a, mla ? 0 : n * 2 * entry);
}

static void place_ffn(model_activations *t, hd_arena *a, const hd_model *m) {
    const hd_model_spec *c = m->env.spec;
    const hd_shard *shard = m->shard;
    const int64_t n = m->limits.rows, assigned = n * c->route.top_k, in = m->in_rows;
    const int64_t places = in ? in : assigned;
    const int32_t shared = shard->shared_inter;
    const int32_t inter = shard->dense_inter > shared ? shard->dense_inter : shared;
    t->router = take_f32(a, n * c->route.n_experts);
    t->expert = take_i32(a, assigned);
    t->expert_weight = take_f32(a, assigned);
    t->offset = take_i32(a, hd_shard_slots(shard) + 1);
    t->assignment = take_i32(a, assigned);
    t->place = take_i32(a, assigned);
    t->gate = take(a, m, n * inter);
    t->up = take(a, m, n * inter);
    t->expert_gate = take(a, m, places * shard->moe_inter);
    t->expert_up = take(a, m, places * shard->moe_inter);
    if (!in) t->expert_y = take(a, m, assigned * c->hidden);
}

/* Places the buffers that other ranks may write or read while this one computes. */
static void place_received(model_activations *t, hd_arena *a, const hd_model *m) {
    const int64_t hidden = m->env.spec->hidden, in = m->in_rows;
    if (!in) return;
    t->expert_y = take(a, m, m->limits.rows * m->env.spec->route.top_k * hidden);
    t->in_x = take(a, m, in * hidden);
    t->in_y = take(a, m, in * hidden);
    t->in_weight = take_f32(a, in);
    t->in_offset = take_i32(a, m->shard->n_experts + 1);
}

static void place_head(model_activations *t, hd_arena *a, const hd_model *m) {
    const hd_model_spec *c = m->env.spec;
    const int64_t n = m->limits.rows, streams = model_streams(c);
    t->logit_x = take(a, m, m->limits.logits * streams * c->hidden);
    t->merged = take(a, m, (int64_t)m->limits.logits * c->hidden);
    t->paired = take(a, m, n * (streams > 2 ? streams : 2) * c->hidden);
}

void model_place_activations(model_activations *t, hd_arena *a, const hd_model *m) {
    const hd_model_spec *c = m->env.spec;
    const int64_t n = m->limits.rows, hc = c->hc_mult;
    t->x = take(a, m, n * model_streams(c) * c->hidden);
    t->h = take(a, m, n * c->hidden);
    t->y = take(a, m, n * c->hidden);
    t->cos_sin = take_f32(a, n * c->rope_dim);
    t->cos_sin_compress = take_f32(a, n * c->rope_dim);
    t->post = take_f32(a, n * hc);
    t->comb = take_f32(a, n * hc * hc);
    t->logits = take_f32(a, (int64_t)m->limits.logits * c->vocab);
    place_received(t, a, m);
    static void (*const places[])(model_activations *, hd_arena *,
                                  const hd_model *) = {place_attention, place_ffn, place_head};
    const size_t scratch = a->used;
    size_t end = scratch;
    for (size_t i = 0; i < HD_LEN(places); i++) {
        hd_arena_rewind(a, scratch);
        places[i](t, a, m);
        if (a->used > end) end = a->used;
    }
    hd_arena_take(a, end - a->used, 1); /* the next micro-batch starts after the longest */
}
