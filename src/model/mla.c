/* mla.c - multi-head latent attention (MLA), absorbed or naive, and V3.2's sparse attention.
 *
 * DeepSeek-V2 report, section 2.1, with W_UK absorbed into the query (models.md 2.4): q .
 * (W_uk c) = (W_uk^T q) . c, so keys and values are read as the cached latent itself. If
 * enabled, rows that are many compared with the keys they read use the naive form, which
 * computes keys and values of the latents. The lightning indexer is models.md 2.6. */
#include <math.h>

#include "model/beside_internal.h"
#include "model/rows_internal.h"

static void norm_query(const model_step *s, int32_t layer) {
    const float *weight = hd_weights_vector(s->m->env.weights, layer, HD_Q_A_NORM);
    s->m->env.ops->rms_norm(s->stream, &(hd_rms_norm_args){.out = s->t->q_low,
                                                           .x = s->t->q_low_raw,
                                                           .weight = weight,
                                                           .rows = s->b->n_rows,
                                                           .cols = s->m->env.spec->q_rank,
                                                           .eps = model_inner_eps});
}

/* Norms and rotates the latents: kv from kv_raw. */
static void finish_latents(const model_step *s, int32_t layer) {
    const hd_model_spec *c = s->m->env.spec;
    const int32_t n = s->b->n_rows;
    if (s->t->kv_raw.data != s->t->kv.data) {
        const size_t bytes = (size_t)n * (size_t)(c->kv_rank + c->rope_dim) * sizeof(float);
        hd_stream_copy(s->stream, s->t->kv.data, s->t->kv_raw.data, bytes);
    }
    s->m->env.ops->norm_rope(
        s->stream, &(hd_norm_rope_args){
                       .x = s->t->kv,
                       .weight = hd_weights_vector(s->m->env.weights, layer, HD_KV_A_NORM),
                       .cos_sin = s->t->cos_sin,
                       .rows = n,
                       .heads = 1,
                       .head_width = c->kv_rank + c->rope_dim,
                       .norm_cols = c->kv_rank,
                       .rope_at = c->kv_rank,
                       .pairs = c->rope_dim / 2,
                       .half_split = c->rope_half_split,
                       .eps = model_inner_eps});
}

static void keep_latents(const model_step *s, int32_t layer) {
    s->m->env.ops->kv_store(s->stream,
                            &(hd_kv_store_args){.pool = model_pool(s, layer, HD_POOL_LATENT),
                                                .x = s->t->kv,
                                                .seq = s->b->device.seq,
                                                .pos = s->b->device.pos,
                                                .rows = s->b->n_rows});
    model_forget_entries(s, layer, HD_POOL_LATENT);
}

static bool selects(const model_step *s, int32_t layer) {
    return s->m->env.spec->layers[layer].attention == HD_ATTN_MLA_SPARSE;
}

/* Products of the layer's input: keys are what every rank stores, queries those of its own rows. */
static void project_input(const model_step *s, int32_t layer, bool keys, bool queries) {
    const hd_model_spec *c = s->m->env.spec;
    const bool index = selects(s, layer);
    const model_activations *t = s->t;
    const model_product of_h[] = {
        {c->q_rank ? HD_Q_A : HD_Q, c->q_rank ? t->q_low_raw : t->q, !queries          },
        {HD_KV_A,                   t->kv_raw,                       !keys             },
        {HD_INDEX_K,                t->index_k,                      !keys || !index   },
        {HD_INDEX_WEIGHTS,          hd_f32(t->index_weight),         !queries || !index},
    };
    model_linear_set(s, layer, t->h, of_h, HD_LEN(of_h));
}

static void project_low_rank(const model_step *s, int32_t layer) {
    const hd_model_spec *c = s->m->env.spec;
    const bool index = selects(s, layer);
    const model_activations *t = s->t;
    const model_product of_q_low[] = {
        {HD_Q_B,       t->q,       false },
        {HD_INDEX_Q_B, t->index_q, !index},
    };
    if (!c->q_rank) return;
    norm_query(s, layer);
    model_linear_set(s, layer, t->q_low, of_q_low, HD_LEN(of_q_low));
}

void model_rope_index(const model_step *s, hd_rows x, int32_t heads, bool inverse) {
    const hd_model_spec *c = s->m->env.spec;
    s->m->env.ops->rope(s->stream, &(hd_rope_args){.out = x,
                                                   .x = x,
                                                   .cos_sin = s->t->cos_sin,
                                                   .rows = s->b->n_rows,
                                                   .heads = heads,
                                                   .pairs = c->rope_dim / 2,
                                                   .out_head = c->index_dim,
                                                   .x_head = c->index_dim,
                                                   .half_split = true,
                                                   .inverse = inverse});
}

/* Norms and rotates the index keys. */
static void finish_index_keys(const model_step *s, int32_t layer) {
    const hd_model_spec *c = s->m->env.spec;
    const hd_weights *w = s->m->env.weights;
    s->m->env.ops->layer_norm(
        s->stream, &(hd_layer_norm_args){.out = s->t->index_k,
                                         .x = s->t->index_k,
                                         .weight = hd_weights_vector(w, layer, HD_INDEX_K_NORM),
                                         .bias = hd_weights_vector(w, layer, HD_INDEX_K_BIAS),
                                         .rows = s->b->n_rows,
                                         .cols = c->index_dim,
                                         .eps = model_inner_eps});
    model_rope_index(s, s->t->index_k, 1, false);
}

/* Keys and queries of the rank's own rows; the others gather the keys. */
static void project_part(const model_step *s, int32_t layer) {
    model_part own;
    if (!model_own_part(s, layer, &own)) return;
    project_input(&own.step, layer, true, true);
    finish_latents(&own.step, layer);
    if (selects(s, layer)) finish_index_keys(&own.step, layer);
    project_low_rank(&own.step, layer);
}

/* All products of the layer's input, then those of the query's low rank; beside them the
 * latents. */
static void project(const model_step *s, int32_t layer) {
    const bool divided = model_divides_rows(s);
    model_part own;
    if (model_gathers_keys(s)) {
        project_part(s, layer);
        return;
    }
    project_input(s, layer, true, !divided);
    model_fork(s);
    const model_step beside = model_beside(s);
    finish_latents(&beside, layer);
    keep_latents(&beside, layer);
    if (!model_own_part(s, layer, &own)) return;
    if (divided) project_input(&own.step, layer, false, true);
    project_low_rank(&own.step, layer);
}

/* Finished latents and index keys. */
static void gather_keys(const model_step *s, int32_t layer) {
    const hd_model_spec *c = s->m->env.spec;
    if (!model_gathers_keys(s)) return;
    model_gather_part(s, layer, s->t->kv, c->kv_rank + c->rope_dim);
    model_gather_part(s, layer, s->t->index_k, selects(s, layer) ? c->index_dim : 0);
}

static void keep_gathered(const model_step *s, int32_t layer) {
    if (!model_gathers_keys(s)) return;
    model_fork(s);
    const model_step beside = model_beside(s);
    keep_latents(&beside, layer);
}

/* ---- rows by form ---- */

/* Rows of complete sequences whose attention has the same form. */
typedef struct span {
    int32_t seq, n_seqs, row, n;
    int64_t keys; /* of all of them, unless the whole step is absorbed */
    bool naive;
} span;

/* A GPU computes a tile of rows at once, and keeps the keys that a span makes: of so many, or of one
 * sequence, in the operators' scratch. */
enum { GPU_ROWS = 128, SPAN_KEYS = 1 << 17 };

/* The step's rows where the host can read them. */
static const hd_batch_view *rows_of(const model_step *s) {
    return hd_device_is_host(s->m->env.device) ? &s->b->device : &s->b->host;
}

/* Returns the keys of sequence `seq`, those of its own rows included. */
static int32_t keys_of(const model_step *s, int32_t seq) {
    const hd_batch_view *b = rows_of(s);
    return b->first_row[seq + 1] > b->first_row[seq] ? b->pos[b->first_row[seq + 1] - 1] + 1
                                                     : 0;
}

/* Returns whether the naive form takes fewer products for sequence `seq`. A GPU's graphs are of
 * fewer rows than it may take. */
static bool naive_pays(const model_step *s, int32_t seq) {
    const hd_model_spec *c = s->m->env.spec;
    const hd_batch_view *b = rows_of(s);
    const int32_t first = b->first_row[seq], end = b->first_row[seq + 1];
    if (!hd_device_is_host(s->m->env.device) && end - first < GPU_ROWS) return false;
    const int64_t before = b->pos[end - 1] + 1 - (end - first); /* keys of earlier steps */
    const int64_t made = c->nope_dim + c->v_dim; /* elements made of a latent, for one head */
    const int64_t narrower = 2 * c->kv_rank - made;
    int64_t seen = 0;
    for (int32_t r = first; r < end; r++) seen += b->pos[r] + 1;
    return seen * narrower > before * c->kv_rank * made;
}

static bool is_absorbed(const model_step *s) {
    return s->m->env.mla == HD_MLA_ABSORBED ||
           (!hd_device_is_host(s->m->env.device) && s->b->most_rows < GPU_ROWS);
}

/* Returns the first span from sequence `seq` on; it is empty after the last sequence. */
static span span_from(const model_step *s, int32_t seq) {
    const hd_batch *b = s->b;
    if (is_absorbed(s)) return (span){.n_seqs = seq == 0 ? b->n_seqs : 0, .n = b->n_rows};
    const int32_t *first_row = rows_of(s)->first_row;
    span p = {.seq = seq, .row = first_row[seq]};
    for (; seq < b->n_seqs; seq++, p.n_seqs++) {
        const bool naive = naive_pays(s, seq);
        const int64_t keys = p.keys + keys_of(s, seq);
        if (seq > p.seq && (naive != p.naive || (naive && keys > SPAN_KEYS))) break;
        p.naive = naive;
        p.keys = keys;
    }
    p.n = first_row[seq] - p.row;
    return p;
}

/* Runs fn on the step's spans of one form. */
static void on_spans(const model_step *s, int32_t layer, bool naive,
                     void (*fn)(const model_step *s, int32_t layer, const span *p)) {
    for (span p = span_from(s, 0); p.n_seqs > 0; p = span_from(s, p.seq + p.n_seqs)) {
        if (p.naive == naive) fn(s, layer, &p);
    }
}

/* ---- the absorbed form ---- */

static int32_t wide_dim(const model_step *s) {
    return s->m->env.spec->kv_rank + s->m->env.spec->rope_dim;
}

static int32_t narrow_dim(const model_step *s) {
    return s->m->env.spec->nope_dim + s->m->env.spec->rope_dim;
}

/* Row `row` of activations that have `width` elements for each head. */
static hd_rows heads_at(const model_step *s, hd_rows x, int32_t row, int32_t width) {
    return hd_rows_at(x, (int64_t)row * s->m->shard->n_heads * width);
}

/* Writes the rotated part of queries with `from` elements before it to queries with `to`. */
static void rope_query(const model_step *s, const span *p, hd_rows out, int32_t to) {
    const hd_model_spec *c = s->m->env.spec;
    const int32_t heads = s->m->shard->n_heads, narrow = narrow_dim(s);
    s->m->env.ops->rope(
        s->stream,
        &(hd_rope_args){.out = hd_rows_at(out, to),
                        .x = hd_rows_at(heads_at(s, s->t->q, p->row, narrow), c->nope_dim),
                        .cos_sin = s->t->cos_sin + (int64_t)p->row * c->rope_dim,
                        .rows = p->n,
                        .heads = heads,
                        .pairs = c->rope_dim / 2,
                        .out_head = to + c->rope_dim,
                        .x_head = narrow,
                        .half_split = c->rope_half_split});
}

/* q_wide = [W_uk^T q_nope | rope(q_rope)] per head */
static void absorb_span(const model_step *s, int32_t layer, const span *p) {
    const hd_model_spec *c = s->m->env.spec;
    const int32_t heads = s->m->shard->n_heads, narrow = narrow_dim(s), wide = wide_dim(s);
    hd_rows q_wide = heads_at(s, s->t->q_wide, p->row, wide);
    s->m->env.ops->linear_heads(
        s->stream,
        &(hd_linear_heads_args){.out = q_wide,
                                .x = heads_at(s, s->t->q, p->row, narrow),
                                .w = hd_weights_matrix(s->m->env.weights, layer, HD_KV_B),
                                .rows = p->n,
                                .heads = heads,
                                .n_rows = c->nope_dim,
                                .head_rows = c->nope_dim + c->v_dim,
                                .out_head = wide,
                                .x_head = narrow,
                                .transpose = true});
    rope_query(s, p, q_wide, c->kv_rank);
}

static void absorb(const model_step *s, int32_t layer) {
    model_part own;
    if (!model_own_part(s, layer, &own)) return;
    on_spans(&own.step, layer, false, absorb_span);
}

static void index_tokens(const model_step *s, int32_t layer) {
    const hd_model_spec *c = s->m->env.spec;
    hd_paged keys = model_pool(s, layer, HD_POOL_INDEX);
    if (!model_gathers_keys(s)) finish_index_keys(s, layer);
    s->m->env.ops->kv_store(s->stream, &(hd_kv_store_args){.pool = keys,
                                                           .x = s->t->index_k,
                                                           .seq = s->b->device.seq,
                                                           .pos = s->b->device.pos,
                                                           .rows = s->b->n_rows});
    model_part own;
    if (!model_own_part(s, layer, &own)) return;
    model_rope_index(&own.step, own.step.t->index_q, c->index_heads, false);
    model_indexer_topk(&own.step, layer, keys, 1);
}

static void attention_absorbed(const model_step *s, const span *p, int32_t layer,
                               const int32_t *selected) {
    const hd_model_spec *c = s->m->env.spec;
    model_attention(s, layer,
                    &(hd_attention_args){.out = heads_at(s, s->t->context, p->row, c->kv_rank),
                                         .q = heads_at(s, s->t->q_wide, p->row, wide_dim(s)),
                                         .entries = model_pool(s, layer, HD_POOL_LATENT),
                                         .selected = selected,
                                         .seq = s->b->device.seq + p->row,
                                         .pos = s->b->device.pos + p->row,
                                         .rows = p->n,
                                         .heads = s->m->shard->n_heads,
                                         .k_dim = wide_dim(s),
                                         .v_dim = c->kv_rank,
                                         .ratio = 1,
                                         .n_selected = selected ? c->index_topk : 0,
                                         .scale = s->m->softmax_scale});
}

static void attention_span(const model_step *s, int32_t layer, const span *p) {
    attention_absorbed(s, p, layer, NULL);
}

/* Naive attention: rotated queries with keys and values computed from the latents. It writes
 * o_low, which the absorbed form computes in values_span. */
static void attention_naive_span(const model_step *s, int32_t layer, const span *p) {
    const hd_model_spec *c = s->m->env.spec;
    const hd_batch_view *b = &s->b->device;
    hd_paged latents = model_pool(s, layer, HD_POOL_LATENT);
    latents.table += (int64_t)p->seq * latents.table_stride;
    rope_query(s, p, heads_at(s, s->t->q, p->row, narrow_dim(s)), c->nope_dim);
    s->m->env.ops->attention_naive(
        s->stream, &(hd_attention_naive_args){
                       .out = model_head_values(s, 0),
                       .q = s->t->q,
                       .latents = latents,
                       .w = hd_weights_matrix(s->m->env.weights, layer, HD_KV_B),
                       .seqs = {p->n_seqs, b->first_row + p->seq, b->pos, 0},
                       .most_rows = p->n,
                       .most_keys = (int32_t)p->keys,
                       .heads = s->m->shard->n_heads,
                       .nope_dim = c->nope_dim,
                       .rope_dim = c->rope_dim,
                       .v_dim = c->v_dim,
                       .scale = s->m->softmax_scale
    });
}

static void attention_all(const model_step *s, int32_t layer) {
    model_join(s);
    model_part own;
    if (!model_own_part(s, layer, &own)) return;
    on_spans(&own.step, layer, false, attention_span);
    on_spans(&own.step, layer, true, attention_naive_span);
}

static void attention_selected(const model_step *s, int32_t layer) {
    model_join(s);
    model_part own;
    if (!model_own_part(s, layer, &own)) return;
    const span all = span_from(&own.step, 0); /* sparse attention has only the absorbed form */
    attention_absorbed(&own.step, &all, layer, own.step.t->selected);
}

/* o_low = W_uv context */
static void values_span(const model_step *s, int32_t layer, const span *p) {
    const hd_model_spec *c = s->m->env.spec;
    const int32_t heads = s->m->shard->n_heads;
    s->m->env.ops->linear_heads(
        s->stream,
        &(hd_linear_heads_args){.out = model_head_values(s, p->row),
                                .x = heads_at(s, s->t->context, p->row, c->kv_rank),
                                .w = hd_weights_matrix(s->m->env.weights, layer, HD_KV_B),
                                .rows = p->n,
                                .heads = heads,
                                .n_rows = c->v_dim,
                                .first_row = c->nope_dim,
                                .head_rows = c->nope_dim + c->v_dim,
                                .out_head = c->v_dim,
                                .x_head = c->kv_rank});
}

static void values(const model_step *s, int32_t layer) {
    model_part own;
    if (!model_own_part(s, layer, &own)) return;
    on_spans(&own.step, layer, false, values_span);
}

const model_stage model_mla_stages[] = {
    {"attn_in",      model_attn_in,      HD_LANE_COMPUTE, NULL,                  false},
    {"project",      project,            HD_LANE_COMPUTE, NULL,                  false},
    {"gather keys",  gather_keys,        HD_LANE_COMM,    model_may_gather_keys, false},
    {"keep keys",    keep_gathered,      HD_LANE_COMPUTE, model_may_gather_keys, false},
    {"absorb",       absorb,             HD_LANE_COMPUTE, NULL,                  false},
    {"attention",    attention_all,      HD_LANE_COMPUTE, NULL,                  false},
    {"values",       values,             HD_LANE_COMPUTE, NULL,                  false},
    {"gather heads", model_gather_heads, HD_LANE_COMM,    model_gathers_heads,   true },
    {"output",       model_attn_output,  HD_LANE_COMPUTE, NULL,                  false},
    {"join heads",   model_join_heads,   HD_LANE_COMM,    model_shares_heads,    true },
    {"gather rows",  model_gather_parts, HD_LANE_COMM,    model_may_divide_rows, true },
    {NULL,           NULL,               HD_LANE_COMPUTE, NULL,                  false},
};

const model_stage model_mla_sparse_stages[] = {
    {"attn_in",      model_attn_in,      HD_LANE_COMPUTE, NULL,                  false},
    {"project",      project,            HD_LANE_COMPUTE, NULL,                  false},
    {"gather keys",  gather_keys,        HD_LANE_COMM,    model_may_gather_keys, false},
    {"keep keys",    keep_gathered,      HD_LANE_COMPUTE, model_may_gather_keys, false},
    {"absorb",       absorb,             HD_LANE_COMPUTE, NULL,                  false},
    {"index",        index_tokens,       HD_LANE_COMPUTE, NULL,                  false},
    {"attention",    attention_selected, HD_LANE_COMPUTE, NULL,                  false},
    {"values",       values,             HD_LANE_COMPUTE, NULL,                  false},
    {"gather heads", model_gather_heads, HD_LANE_COMM,    model_gathers_heads,   true },
    {"output",       model_attn_output,  HD_LANE_COMPUTE, NULL,                  false},
    {"join heads",   model_join_heads,   HD_LANE_COMM,    model_shares_heads,    true },
    {"gather rows",  model_gather_parts, HD_LANE_COMM,    model_may_divide_rows, true },
    {NULL,           NULL,               HD_LANE_COMPUTE, NULL,                  false},
};
