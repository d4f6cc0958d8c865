/* hybrid.c - V4 attention: a sliding window of raw KV vectors plus compressed KV entries.
 *
 * models.md 2.9 to 2.11. One vector per token is key and value of every head. CSA layers
 * select entries with an indexer that has its own compressor; HCA layers read all entries. */
#include <math.h>

#include "model/model_internal.h"

const float *model_hybrid_rope(const model_step *s, int32_t layer) {
    bool compressed = s->m->env.spec->layers[layer].compress_ratio != 0;
    return compressed ? s->t->cos_sin_compress : s->t->cos_sin;
}

static void project(const model_step *s, int32_t layer) {
    const hd_model_spec *c = s->m->env.spec;
    model_activations *t = s->t;
    const int32_t n = s->b->n_rows, tail = c->head_dim - c->rope_dim;
    model_linear(s, layer, HD_Q_A, t->q_low, t->h, n);
    model_norm(s, layer, HD_Q_A_NORM, t->q_low, t->q_low, n, c->q_rank);
    model_linear(s, layer, HD_Q_B, t->q, t->q_low, n);
    s->m->env.ops->rms_norm(s->stream, &(hd_rms_norm_args){.out = t->q,
                                                           .x = t->q,
                                                           .rows = n * s->m->shard->n_heads,
                                                           .cols = c->head_dim,
                                                           .eps = c->norm_eps});
    model_rope(s, model_hybrid_rope(s, layer), t->q, tail, s->m->shard->n_heads, c->head_dim);
    model_linear(s, layer, HD_KV, t->kv, t->h, n);
    model_norm(s, layer, HD_KV_NORM, t->kv, t->kv, n, c->head_dim);
    model_rope(s, model_hybrid_rope(s, layer), t->kv, tail, 1, c->head_dim);
    s->m->env.ops->kv_store(s->stream,
                            &(hd_kv_store_args){.pool = model_pool(s, layer, HD_POOL_SLIDING),
                                                .x = t->kv,
                                                .seq = s->b->device.seq,
                                                .pos = s->b->device.pos,
                                                .rows = n});
}

/* The tensors of one compressor: the attention's own, or the indexer's. */
typedef struct compressor {
    hd_role kv, gate, ape, norm;
    hd_pool_kind pool;
    bool of_index;
} compressor;

static const compressor of_attention = {HD_COMP_KV,   HD_COMP_GATE,       HD_COMP_APE,
                                        HD_COMP_NORM, HD_POOL_COMPRESSED, false};
static const compressor of_index = {HD_INDEX_COMP_KV,   HD_INDEX_COMP_GATE, HD_INDEX_COMP_APE,
                                    HD_INDEX_COMP_NORM, HD_POOL_INDEX,      true};

static void run_compressor(const model_step *s, int32_t layer, const compressor *k) {
    const hd_model_spec *c = s->m->env.spec;
    const hd_weights *w = s->m->env.weights;
    const hd_layer_spec *kind = &c->layers[layer];
    const int32_t *const tables[HD_N_KV_GROUPS] = {s->b->device.tables[0],
                                                   s->b->device.tables[1]};
    model_linear(s, layer, k->kv, hd_f32(s->t->compress_kv), s->t->h, s->b->n_rows);
    model_linear(s, layer, k->gate, hd_f32(s->t->compress_gate), s->t->h, s->b->n_rows);
    s->m->env.ops->compress(
        s->stream,
        &(hd_compress_args){
            .entries = model_pool(s, layer, k->pool),
            .state = hd_kv_state(s->kv, layer, k->of_index, tables, s->b->limits.table_stride),
            .kv = s->t->compress_kv,
            .gate = s->t->compress_gate,
            .ape = hd_weights_vector(w, layer, k->ape),
            .norm = hd_weights_vector(w, layer, k->norm),
            .freq = s->m->freq_compress,
            .seqs = {s->b->n_seqs, s->b->device.first_row, s->b->device.pos, s->b->most_rows},
            .ratio = kind->compress_ratio,
            .pairs = c->rope_dim / 2,
            .overlap = kind->attention == HD_ATTN_CSA,
            .eps = c->norm_eps
    });
}

static void compress(const model_step *s, int32_t layer) {
    run_compressor(s, layer, &of_attention);
}

static void index_entries(const model_step *s, int32_t layer) {
    const hd_model_spec *c = s->m->env.spec;
    run_compressor(s, layer, &of_index);
    model_linear(s, layer, HD_INDEX_Q_B, s->t->index_q, s->t->q_low, s->b->n_rows);
    model_rope(s, s->t->cos_sin_compress, s->t->index_q, c->index_dim - c->rope_dim,
               c->index_heads, c->index_dim);
    model_linear(s, layer, HD_INDEX_WEIGHTS, hd_f32(s->t->index_weight), s->t->h, s->b->n_rows);
    model_indexer_topk(s, model_pool(s, layer, HD_POOL_INDEX), c->layers[layer].compress_ratio);
}

static void hybrid_attention(const model_step *s, int32_t layer) {
    const hd_model_spec *c = s->m->env.spec;
    const hd_layer_spec *kind = &c->layers[layer];
    const bool choose = kind->attention == HD_ATTN_CSA;
    s->m->env.ops->attention(
        s->stream,
        &(hd_attention_args){.out = s->t->context,
                             .q = s->t->q,
                             .recent = model_pool(s, layer, HD_POOL_SLIDING),
                             .entries = model_pool(s, layer, HD_POOL_COMPRESSED),
                             .selected = choose ? s->t->selected : NULL,
                             .sink = hd_weights_vector(s->m->env.weights, layer, HD_SINK),
                             .seq = s->b->device.seq,
                             .pos = s->b->device.pos,
                             .rows = s->b->n_rows,
                             .heads = s->m->shard->n_heads,
                             .k_dim = c->head_dim,
                             .v_dim = c->head_dim,
                             .window = c->window,
                             .ratio = kind->compress_ratio,
                             .n_selected = choose ? c->index_topk : 0,
                             .scale = s->m->softmax_scale});
}

/* y = W_ob [W_oa per group of heads], after the rotation is undone at the query's position */
static void output(const model_step *s, int32_t layer) {
    const hd_model_spec *c = s->m->env.spec;
    model_activations *t = s->t;
    const int32_t all = s->m->shard->n_heads * c->head_dim;
    hd_rows tail = hd_rows_at(t->context, c->head_dim - c->rope_dim);
    s->m->env.ops->rope(s->stream, &(hd_rope_args){.out = tail,
                                                   .x = tail,
                                                   .cos_sin = model_hybrid_rope(s, layer),
                                                   .rows = s->b->n_rows,
                                                   .heads = s->m->shard->n_heads,
                                                   .pairs = c->rope_dim / 2,
                                                   .out_head = c->head_dim,
                                                   .x_head = c->head_dim,
                                                   .inverse = true});
    s->m->env.ops->linear_heads(
        s->stream,
        &(hd_linear_heads_args){.out = t->o_low,
                                .x = t->context,
                                .w = hd_weights_matrix(s->m->env.weights, layer, HD_O_A),
                                .rows = s->b->n_rows,
                                .heads = s->m->shard->o_groups,
                                .n_rows = c->o_rank,
                                .head_rows = c->o_rank,
                                .out_head = c->o_rank,
                                .x_head = all / s->m->shard->o_groups});
    model_linear(s, layer, HD_O_B, t->y, t->o_low, s->b->n_rows);
}

const model_stage model_window_stages[] = {
    {"attn_in",   model_attn_in,    HD_LANE_COMPUTE, NULL,                false},
    {"project",   project,          HD_LANE_COMPUTE, NULL,                false},
    {"attention", hybrid_attention, HD_LANE_COMPUTE, NULL,                false},
    {"output",    output,           HD_LANE_COMPUTE, NULL,                false},
    {"reduce",    model_all_reduce, HD_LANE_COMM,    model_reduces_heads, true },
    {"streams",   model_block_out,  HD_LANE_COMPUTE, NULL,                false},
    {NULL,        NULL,             HD_LANE_COMPUTE, NULL,                false},
};

const model_stage model_hca_stages[] = {
    {"attn_in",   model_attn_in,    HD_LANE_COMPUTE, NULL,                false},
    {"project",   project,          HD_LANE_COMPUTE, NULL,                false},
    {"compress",  compress,         HD_LANE_COMPUTE, NULL,                false},
    {"attention", hybrid_attention, HD_LANE_COMPUTE, NULL,                false},
    {"output",    output,           HD_LANE_COMPUTE, NULL,                false},
    {"reduce",    model_all_reduce, HD_LANE_COMM,    model_reduces_heads, true },
    {"streams",   model_block_out,  HD_LANE_COMPUTE, NULL,                false},
    {NULL,        NULL,             HD_LANE_COMPUTE, NULL,                false},
};

const model_stage model_csa_stages[] = {
    {"attn_in",   model_attn_in,    HD_LANE_COMPUTE, NULL,                false},
    {"project",   project,          HD_LANE_COMPUTE, NULL,                false},
    {"compress",  compress,         HD_LANE_COMPUTE, NULL,                false},
    {"index",     index_entries,    HD_LANE_COMPUTE, NULL,                false},
    {"attention", hybrid_attention, HD_LANE_COMPUTE, NULL,                false},
    {"output",    output,           HD_LANE_COMPUTE, NULL,                false},
    {"reduce",    model_all_reduce, HD_LANE_COMM,    model_reduces_heads, true },
    {"streams",   model_block_out,  HD_LANE_COMPUTE, NULL,                false},
    {NULL,        NULL,             HD_LANE_COMPUTE, NULL,                false},
};
