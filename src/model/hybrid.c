/* hybrid.c - V4 attention, and what V4.1 has in common with it: a sliding window of raw KV vectors plus compressed KV entries.
 *
 * models.md 2.9 to 2.11. One vector per token is key and value of every head. CSA layers
 * select entries with an indexer that has its own compressor; HCA layers read all entries. */
#include <math.h>

#include "model/beside_internal.h"
#include "model/hybrid_internal.h"

const float *model_hybrid_rope(const model_step *s, int32_t layer) {
    bool compressed = s->m->env.spec->layers[layer].compress_ratio != 0;
    return compressed ? s->t->cos_sin_compress : s->t->cos_sin;
}

/* RMS norm of every head, then its rotation. weight: NULL for ones. */
static void norm_rope(const model_step *s, int32_t layer, const float *weight, hd_rows x,
                      int32_t heads) {
    const hd_model_spec *c = s->m->env.spec;
    s->m->env.ops->norm_rope(s->stream,
                             &(hd_norm_rope_args){.x = x,
                                                  .weight = weight,
                                                  .cos_sin = model_hybrid_rope(s, layer),
                                                  .rows = s->b->n_rows,
                                                  .heads = heads,
                                                  .head_width = c->head_dim,
                                                  .norm_cols = c->head_dim,
                                                  .rope_at = c->head_dim - c->rope_dim,
                                                  .pairs = c->rope_dim / 2,
                                                  .half_split = c->rope_half_split,
                                                  .eps = c->norm_eps});
}

/* Norms and rotates the window vectors kv. */
static void finish_window(const model_step *s, int32_t layer) {
    norm_rope(s, layer, hd_weights_vector(s->m->env.weights, layer, HD_KV_NORM), s->t->kv, 1);
}

/* Stores the finished vectors in this layer's window. */
static void keep_window(const model_step *s, int32_t layer) {
    s->m->env.ops->kv_store(s->stream,
                            &(hd_kv_store_args){.pool = model_pool(s, layer, HD_POOL_SLIDING),
                                                .x = s->t->kv,
                                                .seq = s->b->device.seq,
                                                .pos = s->b->device.pos,
                                                .rows = s->b->n_rows});
}

static void store_window(const model_step *s, int32_t layer) {
    finish_window(s, layer);
    keep_window(s, layer);
}

void model_store_window(const model_step *s, int32_t layer) {
    model_linear(s, layer, HD_KV, s->t->kv, s->t->h, s->b->n_rows);
    store_window(s, layer);
}

/* Rotates the heads of the query; V4 norms each of them first, V4.1 does not. */
static void rotate_query(const model_step *s, int32_t layer) {
    const hd_model_spec *c = s->m->env.spec;
    const int32_t heads = s->m->shard->n_heads;
    if (c->family == HD_FAMILY_V4) {
        norm_rope(s, layer, NULL, s->t->q, heads);
    } else {
        model_rope(s, model_hybrid_rope(s, layer), s->t->q, c->head_dim - c->rope_dim, heads,
                   c->head_dim);
    }
}

/* What the kinds of layers compute beside queries and window vectors. */
typedef struct parts {
    bool entries, gates; /* compressed entries, of more than one token */
    bool own_index;      /* entries of the indexer with a compressor of their own */
    bool selects;        /* has an indexer */
    bool reads_selected; /* of the entries those that an indexer chose */
} parts;

static parts parts_of(const hd_layer_spec *layer) {
    const bool gates = layer->compress_ratio > 1;
    static const parts kinds[HD_N_ATTENTION_KINDS] = {
        [HD_ATTN_CSA] = {true,  true,  true,  true,  true },
        [HD_ATTN_HCA] = {true,  true,  false, false, false},
        [HD_ATTN_CSA2_FULL] = {true,  true,  false, true,  true },
        [HD_ATTN_CSA2_REINDEX] = {false, false, false, true,  true },
        [HD_ATTN_CSA2_REUSE] = {false, false, false, false, true },
    };
    parts p = kinds[layer->attention];
    p.gates = p.gates && gates;
    return p;
}

/* Whether a layer's compressors are queued beside, and its indexer waits for them. */
static bool compresses_beside(const model_step *s, int32_t layer) {
    const hd_attention kind = s->m->env.spec->layers[layer].attention;
    return model_runs_beside(s) && (kind == HD_ATTN_CSA || kind == HD_ATTN_HCA);
}

/* Products of the input: keys are what positions leave for later ones, queries the rest. apart: those that
 * compressors and the indexer read are queued beside. */
static void project(const model_step *s, int32_t layer, bool keys, bool queries, bool apart) {
    enum { AT_ONCE = 2 }; /* what the stages that come next read */
    const parts p = parts_of(&s->m->env.spec->layers[layer]);
    const model_activations *t = s->t;
    const model_product of_h[] = {
        {HD_Q_A,             t->q_low_raw,             !queries              },
        {HD_KV,              t->kv,                    !keys                 },
        {HD_COMP_KV,         hd_f32(t->compress_kv),   !keys || !p.entries   },
        {HD_COMP_GATE,       hd_f32(t->compress_gate), !keys || !p.gates     },
        {HD_INDEX_COMP_KV,   hd_f32(t->index_kv),      !keys || !p.own_index },
        {HD_INDEX_COMP_GATE, hd_f32(t->index_gate),    !keys || !p.own_index },
        {HD_INDEX_WEIGHTS,   hd_f32(t->index_weight),  !queries || !p.selects},
    };
    if (!apart || !keys) {
        model_linear_set(s, layer, t->h, of_h, HD_LEN(of_h));
        return;
    }
    model_fork(s);
    const model_step beside = model_beside(s);
    model_linear_set(&beside, layer, t->h, of_h + AT_ONCE, HD_LEN(of_h) - AT_ONCE);
    model_linear_set(s, layer, t->h, of_h, AT_ONCE);
}

/* Elements of a row of the compressors' inputs. */
typedef struct inputs {
    int32_t entries, index;
} inputs;

static inputs inputs_of(const model_step *s, int32_t layer) {
    const hd_model_spec *c = s->m->env.spec;
    const parts p = parts_of(&c->layers[layer]);
    const int32_t tokens = c->layers[layer].attention == HD_ATTN_CSA ? 2 : 1;
    return (inputs){p.entries ? tokens * c->head_dim : 0,
                    p.own_index ? tokens * c->index_dim : 0};
}

/* The products of the query's low rank run beside what becomes of the keys. */
static void store_beside(const model_step *s, int32_t layer) {
    model_fork(s);
    const model_step beside = model_beside(s);
    store_window(&beside, layer);
}

static void make_queries(const model_step *s, int32_t layer) {
    const hd_model_spec *c = s->m->env.spec;
    const model_activations *t = s->t;
    const model_product of_q_low[] = {
        {HD_Q_B,       t->q,       false                               },
        {HD_INDEX_Q_B, t->index_q, !parts_of(&c->layers[layer]).selects},
    };
    model_norm(s, layer, HD_Q_A_NORM, t->q_low, t->q_low_raw, s->b->n_rows, c->q_rank);
    model_linear_set(s, layer, t->q_low, of_q_low, HD_LEN(of_q_low));
    rotate_query(s, layer);
}

/* Keys and queries of the rank's own rows; the others gather the keys. */
static void project_part(const model_step *s, int32_t layer) {
    const inputs k = inputs_of(s, layer);
    model_part own;
    if (!model_own_part(s, layer, &own)) return;
    own.t.compress_kv += (int64_t)own.first * k.entries;
    own.t.compress_gate += (int64_t)own.first * k.entries;
    own.t.index_kv += (int64_t)own.first * k.index;
    own.t.index_gate += (int64_t)own.first * k.index;
    project(&own.step, layer, true, true, false);
    finish_window(&own.step, layer);
    make_queries(&own.step, layer);
}

void model_hybrid_project(const model_step *s, int32_t layer) {
    const bool divided = model_divides_rows(s);
    model_part own;
    if (model_gathers_keys(s)) {
        project_part(s, layer);
        return;
    }
    project(s, layer, true, !divided, compresses_beside(s, layer));
    store_beside(s, layer);
    if (!model_own_part(s, layer, &own)) return;
    if (divided) project(&own.step, layer, false, true, false);
    make_queries(&own.step, layer);
}

/* Finished window vectors, and the inputs of compressors, which every rank keeps for later steps: an entry reads
 * rows of several ranks. */
static void gather_keys(const model_step *s, int32_t layer) {
    if (!model_gathers_keys(s)) return;
    const inputs k = inputs_of(s, layer);
    const model_activations *t = s->t;
    model_gather_part(s, layer, t->kv, s->m->env.spec->head_dim);
    model_gather_part(s, layer, hd_f32(t->compress_kv), k.entries);
    model_gather_part(s, layer, hd_f32(t->compress_gate), k.entries);
    model_gather_part(s, layer, hd_f32(t->index_kv), k.index);
    model_gather_part(s, layer, hd_f32(t->index_gate), k.index);
}

static void keep_gathered(const model_step *s, int32_t layer) {
    if (!model_gathers_keys(s)) return;
    model_fork(s);
    const model_step beside = model_beside(s);
    keep_window(&beside, layer);
}

void model_hybrid_keys(const model_step *s, int32_t layer) {
    project(s, layer, true, false, compresses_beside(s, layer));
    store_beside(s, layer);
}

void model_hybrid_queries(const model_step *s, int32_t layer) {
    project(s, layer, false, true, false);
    make_queries(s, layer);
}

/* The tensors of one compressor: the attention's own, or the indexer's. */
typedef struct compressor {
    hd_role ape, norm;
    hd_pool_kind pool;
    bool of_index;
} compressor;

static const compressor of_attention = {HD_COMP_APE, HD_COMP_NORM, HD_POOL_COMPRESSED, false};
static const compressor of_index = {HD_INDEX_COMP_APE, HD_INDEX_COMP_NORM, HD_POOL_INDEX, true};

static void run_compressor(const model_step *s, int32_t layer, const compressor *k) {
    const hd_model_spec *c = s->m->env.spec;
    const hd_weights *w = s->m->env.weights;
    const hd_layer_spec *kind = &c->layers[layer];
    const int32_t *const tables[HD_N_KV_GROUPS] = {s->b->device.tables[0],
                                                   s->b->device.tables[1]};
    s->m->env.ops->compress(
        s->stream,
        &(hd_compress_args){
            .entries = model_pool(s, layer, k->pool),
            .state = hd_kv_state(s->kv, layer, k->of_index, tables, s->b->limits.table_stride),
            .kv = k->of_index ? s->t->index_kv : s->t->compress_kv,
            .gate = k->of_index ? s->t->index_gate : s->t->compress_gate,
            .ape = hd_weights_vector(w, layer, k->ape),
            .norm = hd_weights_vector(w, layer, k->norm),
            .freq = s->m->freq_compress,
            .seqs = {s->b->n_seqs, s->b->device.first_row, s->b->device.pos, s->b->most_rows},
            .entries_from = s->rest->rebuilds ? s->b->device.rebuilt : NULL,
            .ratio = kind->compress_ratio,
            .pairs = c->rope_dim / 2,
            .overlap = kind->attention == HD_ATTN_CSA,
            .eps = c->norm_eps
    });
}

static void compress(const model_step *s, int32_t layer) {
    const model_step beside = model_beside(s);
    run_compressor(&beside, layer, &of_attention);
    model_forget_entries(&beside, layer, HD_POOL_COMPRESSED);
}

/* The indexer's entries may still be made beside. */
static void choose_entries(const model_step *s, int32_t layer) {
    const hd_model_spec *c = s->m->env.spec;
    model_part own;
    const bool any = model_own_part(s, layer, &own);
    if (any) {
        model_rope(&own.step, own.step.t->cos_sin_compress, own.step.t->index_q,
                   c->index_dim - c->rope_dim, c->index_heads, c->index_dim);
    }
    model_join(s);
    if (!any) return;
    model_indexer_topk(&own.step, layer, model_pool(s, layer, HD_POOL_INDEX),
                       c->layers[layer].compress_ratio);
}

static void index_entries(const model_step *s, int32_t layer) {
    const model_step beside = model_beside(s);
    run_compressor(&beside, layer, &of_index);
    choose_entries(s, layer);
}

/* ---- where windows are rebuilt: all kinds of layers of V4 ---- */

static void rebuild_states(const model_step *s, int32_t layer) {
    const parts p = parts_of(&s->m->env.spec->layers[layer]);
    const model_step beside = model_beside(s);
    if (p.own_index) run_compressor(&beside, layer, &of_index);
    if (p.entries) compress(s, layer);
}

static void rebuild_choices(const model_step *s, int32_t layer) {
    if (parts_of(&s->m->env.spec->layers[layer]).selects) choose_entries(s, layer);
}

/* Of layers with tails and the one before them, where a replay cuts windows; else NULL. */
static const int32_t *window_from(const model_step *s, int32_t layer) {
    const hd_kv_tail *tail = &s->m->pages.tail;
    const bool own = layer + 1 >= tail->first && layer < tail->first + tail->n;
    if (!own || tail->rebuilds || tail->n == 0) return NULL;
    const bool cuts = hd_batch_cuts_windows(s->whole, s->m->env.spec->window);
    return cuts ? s->b->device.windows_from : NULL;
}

static void run_attention(const model_step *s, int32_t layer) {
    const hd_model_spec *c = s->m->env.spec;
    const hd_layer_spec *kind = &c->layers[layer];
    const bool choose = parts_of(kind).reads_selected;
    const int32_t entries_of = c->family == HD_FAMILY_V41 ? kind->kv_layer : layer;
    const int32_t block = s->b->block; /* the window before it, and all of its rows */
    model_attention(
        s, entries_of,
        &(hd_attention_args){.out = s->t->context,
                             .q = s->t->q,
                             .recent = model_pool(s, layer, HD_POOL_SLIDING),
                             .entries = model_pool(s, entries_of, HD_POOL_COMPRESSED),
                             .selected = choose ? s->t->selected : NULL,
                             .sink = hd_weights_vector(s->m->env.weights, layer, HD_SINK),
                             .seq = s->b->device.seq,
                             .pos = block ? s->b->device.last : s->b->device.pos,
                             .window_from = window_from(s, layer),
                             .rows = s->b->n_rows,
                             .heads = s->m->shard->n_heads,
                             .k_dim = c->head_dim,
                             .v_dim = c->head_dim,
                             .window = c->window + block,
                             .ratio = kind->compress_ratio,
                             .n_selected = choose ? c->index_topk : 0,
                             .scale = s->m->softmax_scale});
}

void model_hybrid_attention(const model_step *s, int32_t layer) {
    model_part own;
    model_join(s);
    if (model_own_part(s, layer, &own)) run_attention(&own.step, layer);
}

static void make_values(const model_step *s, int32_t layer) {
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
        &(hd_linear_heads_args){.out = model_head_values(s, 0),
                                .x = t->context,
                                .w = hd_weights_matrix(s->m->env.weights, layer, HD_O_A),
                                .rows = s->b->n_rows,
                                .heads = s->m->shard->o_groups,
                                .n_rows = c->o_rank,
                                .head_rows = c->o_rank,
                                .out_head = c->o_rank,
                                .x_head = all / s->m->shard->o_groups});
}

void model_hybrid_values(const model_step *s, int32_t layer) {
    model_part own;
    if (model_own_part(s, layer, &own)) make_values(&own.step, layer);
}

const model_stage model_rebuild_keys[] = {
    {"attn_in",  model_attn_in,     HD_LANE_COMPUTE, NULL, false},
    {"keys",     model_hybrid_keys, HD_LANE_COMPUTE, NULL, false},
    {"compress", rebuild_states,    HD_LANE_COMPUTE, NULL, false},
    {NULL,       NULL,              HD_LANE_COMPUTE, NULL, false},
};

const model_stage model_rebuild_queries[] = {
    {"queries",      model_hybrid_queries,   HD_LANE_COMPUTE, NULL,                false},
    {"index",        rebuild_choices,        HD_LANE_COMPUTE, NULL,                false},
    {"attention",    model_hybrid_attention, HD_LANE_COMPUTE, NULL,                false},
    {"values",       model_hybrid_values,    HD_LANE_COMPUTE, NULL,                false},
    {"gather heads", model_gather_heads,     HD_LANE_COMM,    model_gathers_heads, true },
    {"output",       model_attn_output,      HD_LANE_COMPUTE, NULL,                false},
    {"join heads",   model_join_heads,       HD_LANE_COMM,    model_shares_heads,  true },
    {NULL,           NULL,                   HD_LANE_COMPUTE, NULL,                false},
};

const model_stage model_window_stages[] = {
    {"attn_in",      model_attn_in,          HD_LANE_COMPUTE, NULL,                  false},
    {"project",      model_hybrid_project,   HD_LANE_COMPUTE, NULL,                  false},
    {"gather keys",  gather_keys,            HD_LANE_COMM,    model_may_gather_keys, false},
    {"keep keys",    keep_gathered,          HD_LANE_COMPUTE, model_may_gather_keys, false},
    {"attention",    model_hybrid_attention, HD_LANE_COMPUTE, NULL,                  false},
    {"values",       model_hybrid_values,    HD_LANE_COMPUTE, NULL,                  false},
    {"gather heads", model_gather_heads,     HD_LANE_COMM,    model_gathers_heads,   true },
    {"output",       model_attn_output,      HD_LANE_COMPUTE, NULL,                  false},
    {"join heads",   model_join_heads,       HD_LANE_COMM,    model_shares_heads,    true },
    {"gather rows",  model_gather_parts,     HD_LANE_COMM,    model_may_divide_rows, true },
    {NULL,           NULL,                   HD_LANE_COMPUTE, NULL,                  false},
};

const model_stage model_hca_stages[] = {
    {"attn_in",      model_attn_in,          HD_LANE_COMPUTE, NULL,                  false},
    {"project",      model_hybrid_project,   HD_LANE_COMPUTE, NULL,                  false},
    {"gather keys",  gather_keys,            HD_LANE_COMM,    model_may_gather_keys, false},
    {"keep keys",    keep_gathered,          HD_LANE_COMPUTE, model_may_gather_keys, false},
    {"compress",     compress,               HD_LANE_COMPUTE, NULL,                  false},
    {"attention",    model_hybrid_attention, HD_LANE_COMPUTE, NULL,                  false},
    {"values",       model_hybrid_values,    HD_LANE_COMPUTE, NULL,                  false},
    {"gather heads", model_gather_heads,     HD_LANE_COMM,    model_gathers_heads,   true },
    {"output",       model_attn_output,      HD_LANE_COMPUTE, NULL,                  false},
    {"join heads",   model_join_heads,       HD_LANE_COMM,    model_shares_heads,    true },
    {"gather rows",  model_gather_parts,     HD_LANE_COMM,    model_may_divide_rows, true },
    {NULL,           NULL,                   HD_LANE_COMPUTE, NULL,                  false},
};

const model_stage model_csa_stages[] = {
    {"attn_in",      model_attn_in,          HD_LANE_COMPUTE, NULL,                  false},
    {"project",      model_hybrid_project,   HD_LANE_COMPUTE, NULL,                  false},
    {"gather keys",  gather_keys,            HD_LANE_COMM,    model_may_gather_keys, false},
    {"keep keys",    keep_gathered,          HD_LANE_COMPUTE, model_may_gather_keys, false},
    {"index",        index_entries,          HD_LANE_COMPUTE, NULL,                  false},
    {"compress",     compress,               HD_LANE_COMPUTE, NULL,                  false},
    {"attention",    model_hybrid_attention, HD_LANE_COMPUTE, NULL,                  false},
    {"values",       model_hybrid_values,    HD_LANE_COMPUTE, NULL,                  false},
    {"gather heads", model_gather_heads,     HD_LANE_COMM,    model_gathers_heads,   true },
    {"output",       model_attn_output,      HD_LANE_COMPUTE, NULL,                  false},
    {"join heads",   model_join_heads,       HD_LANE_COMM,    model_shares_heads,    true },
    {"gather rows",  model_gather_parts,     HD_LANE_COMM,    model_may_divide_rows, true },
    {NULL,           NULL,                   HD_LANE_COMPUTE, NULL,                  false},
};
