/* csa2.c - V4.1 attention: a window of raw KV vectors plus chosen entries of a shared cache.
 *
 * models.md 2.18 and 2.19. A FULL layer makes entries and index keys of groups of tokens, which
 * the layers after it read too. Index lists are shared as well: a REUSE layer reads what the last
 * layer with an indexer chose. Projections and attention are those of hybrid.c. */
#include "model/beside_internal.h"
#include "model/hybrid_internal.h"

/* t->latent = the normed latent of every row's group; in groups of one, of the row itself. */
static void make_latents(const model_step *s, int32_t layer) {
    const hd_model_spec *c = s->m->env.spec;
    const model_activations *t = s->t;
    const int32_t ratio = c->layers[layer].compress_ratio, n = s->b->n_rows;
    const float *of_rows = t->compress_kv;
    if (ratio > 1) {
        const int32_t *const tables[HD_N_KV_GROUPS] = {s->b->device.tables[0],
                                                       s->b->device.tables[1]};
        s->m->env.ops->group_latents(
            s->stream,
            &(hd_group_latents_args){
                .out = t->latent,
                .state = hd_kv_state(s->kv, layer, false, tables, s->b->limits.table_stride),
                .kv = t->compress_kv,
                .gate = t->compress_gate,
                .seqs = {s->b->n_seqs, s->b->device.first_row, s->b->device.pos,
                         s->b->most_rows},
                .ratio = ratio
        });
        of_rows = t->latent;
    }
    model_norm(s, layer, HD_COMP_NORM, hd_f32(t->latent), hd_f32(of_rows), n, c->head_dim);
}

static void store_groups(const model_step *s, int32_t layer, hd_pool_kind pool, hd_rows x) {
    const hd_model_spec *c = s->m->env.spec;
    s->m->env.ops->store_groups(
        s->stream, &(hd_store_groups_args){.entries = model_pool(s, layer, pool),
                                           .x = x.data,
                                           .freq = s->m->freq_compress,
                                           .seq = s->b->device.seq,
                                           .pos = s->b->device.pos,
                                           .rows = s->b->n_rows,
                                           .ratio = c->layers[layer].compress_ratio,
                                           .pairs = c->rope_dim / 2});
}

/* The index key comes from the latent before its rotation. */
static void write_entries(const model_step *s, int32_t layer) {
    const model_activations *t = s->t;
    const int32_t n = s->b->n_rows;
    const hd_rows latent = hd_f32(t->latent);
    make_latents(s, layer);
    model_linear(s, layer, HD_INDEX_K, t->index_k, latent, n);
    model_norm(s, layer, HD_INDEX_K_NORM, t->index_k, t->index_k, n, s->m->env.spec->index_dim);
    store_groups(s, layer, HD_POOL_INDEX, t->index_k);
    store_groups(s, layer, HD_POOL_COMPRESSED, latent);
    model_forget_entries(s, layer, HD_POOL_COMPRESSED);
}

/* Layers after the pool's choose inside it; they all read its layer's cache. */
static void choose_entries(const model_step *s, int32_t layer) {
    const hd_model_spec *c = s->m->env.spec;
    const hd_layer_spec *kind = &c->layers[layer];
    const hd_paged keys = model_pool(s, kind->kv_layer, HD_POOL_INDEX);
    const model_activations *t = s->t;
    model_rope(s, t->cos_sin_compress, t->index_q, c->index_dim - c->rope_dim, c->index_heads,
               c->index_dim);
    if (s->m->env.ops->precision == HD_OFFICIAL) {
        s->m->env.ops->round_rows(s->stream,
                                  &(hd_round_rows_args){.x = t->index_q,
                                                        .format = keys.format,
                                                        .rows = s->b->n_rows * c->index_heads,
                                                        .cols = c->index_dim});
    }
    if (c->pool_layer < 0 || layer < c->pool_layer) {
        model_indexer_topk(s, layer, keys, kind->compress_ratio);
        return;
    }
    s->m->env.ops->pool_topk(s->stream,
                             &(hd_pool_topk_args){.out = t->selected,
                                                  .blocks = t->pool_blocks,
                                                  .q = t->index_q,
                                                  .weight = t->index_weight,
                                                  .keys = keys,
                                                  .seq = s->b->device.seq,
                                                  .pos = s->b->device.pos,
                                                  .rows = s->b->n_rows,
                                                  .heads = c->index_heads,
                                                  .ratio = kind->compress_ratio,
                                                  .top_k = c->index_topk,
                                                  .n_blocks = c->pool_blocks,
                                                  .block = c->pool_block,
                                                  .scale = s->m->index_scale,
                                                  .makes_pool = layer == c->pool_layer});
    model_replay_keys(s, layer);
}

static const model_stage full_keys[] = {
    {"attn_in", model_attn_in,     HD_LANE_COMPUTE, NULL, false},
    {"keys",    model_hybrid_keys, HD_LANE_COMPUTE, NULL, false},
    {"entries", write_entries,     HD_LANE_COMPUTE, NULL, false},
    {NULL,      NULL,              HD_LANE_COMPUTE, NULL, false},
};

static const model_stage keys[] = {
    {"attn_in", model_attn_in,     HD_LANE_COMPUTE, NULL, false},
    {"keys",    model_hybrid_keys, HD_LANE_COMPUTE, NULL, false},
    {NULL,      NULL,              HD_LANE_COMPUTE, NULL, false},
};

const model_stage *model_key_stages(const hd_layer_spec *layer) {
    switch (layer->attention) {
    case HD_ATTN_CSA2_FULL:
        return full_keys;
    case HD_ATTN_CSA2_REINDEX:
    case HD_ATTN_CSA2_REUSE:
        return keys;
    default:
        return NULL;
    }
}

const model_stage model_csa2_full_stages[] = {
    {"queries",      model_hybrid_queries,   HD_LANE_COMPUTE, NULL,                false},
    {"index",        choose_entries,         HD_LANE_COMPUTE, NULL,                false},
    {"attention",    model_hybrid_attention, HD_LANE_COMPUTE, NULL,                false},
    {"values",       model_hybrid_values,    HD_LANE_COMPUTE, NULL,                false},
    {"gather heads", model_gather_heads,     HD_LANE_COMM,    model_gathers_heads, true },
    {"output",       model_attn_output,      HD_LANE_COMPUTE, NULL,                false},
    {"join heads",   model_join_heads,       HD_LANE_COMM,    model_shares_heads,  true },
    {NULL,           NULL,                   HD_LANE_COMPUTE, NULL,                false},
};

const model_stage model_csa2_reindex_stages[] = {
    {"queries",      model_hybrid_queries,   HD_LANE_COMPUTE, NULL,                false},
    {"index",        choose_entries,         HD_LANE_COMPUTE, NULL,                false},
    {"attention",    model_hybrid_attention, HD_LANE_COMPUTE, NULL,                false},
    {"values",       model_hybrid_values,    HD_LANE_COMPUTE, NULL,                false},
    {"gather heads", model_gather_heads,     HD_LANE_COMM,    model_gathers_heads, true },
    {"output",       model_attn_output,      HD_LANE_COMPUTE, NULL,                false},
    {"join heads",   model_join_heads,       HD_LANE_COMM,    model_shares_heads,  true },
    {NULL,           NULL,                   HD_LANE_COMPUTE, NULL,                false},
};

const model_stage model_csa2_reuse_stages[] = {
    {"queries",      model_hybrid_queries,   HD_LANE_COMPUTE, NULL,                false},
    {"attention",    model_hybrid_attention, HD_LANE_COMPUTE, NULL,                false},
    {"values",       model_hybrid_values,    HD_LANE_COMPUTE, NULL,                false},
    {"gather heads", model_gather_heads,     HD_LANE_COMM,    model_gathers_heads, true },
    {"output",       model_attn_output,      HD_LANE_COMPUTE, NULL,                false},
    {"join heads",   model_join_heads,       HD_LANE_COMM,    model_shares_heads,  true },
    {NULL,           NULL,                   HD_LANE_COMPUTE, NULL,                false},
};
