/* activations.c - the memory plan of a step's activations, for the largest step.
 *
 * x, h and y live through a layer, the choices of experts until the next step. What layers of
 * V4.1 share lives through the step. Buffers that
 * other ranks write into live through the step. Attention, feed-forward and head scratch are
 * never alive together, nor is Engram's, so they start at the same offset.
 *
 * Of what lives through a layer a micro-batch has its rows. What it leaves at a stage that yields is its
 * own. All other scratch is free again when the next micro-batch runs, on the same stream, so they
 * share it: steps in two micro-batches need half of it. */
#include "base/checked.h"
#include "model/rows_internal.h"

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

static void place_heads(model_activations *t, hd_arena *a, const hd_model *m, int64_t n) {
    int32_t width;
    model_head_columns(m, &width);
    t->o_low = take(a, m, n * width);
}

static void place_attention(model_activations *t, hd_arena *a, const hd_model *m, int64_t n) {
    const hd_model_spec *c = m->env.spec;
    const int64_t heads = m->shard->n_heads;
    const bool mla = !hd_is_hybrid(c);
    t->q_low = t->q_low_raw = take(a, m, n * c->q_rank);
    t->q = take(a, m, n * heads * (mla ? c->nope_dim + c->rope_dim : c->head_dim));
    t->q_wide = take(a, m, mla ? n * heads * (c->kv_rank + c->rope_dim) : 0);
    t->kv = t->kv_raw = take(a, m, n * (mla ? c->kv_rank + c->rope_dim : c->head_dim));
    t->context = take(a, m, n * heads * (mla ? c->kv_rank : c->head_dim));
    if (m->n_micro == 1 || !model_gathers_heads(m)) place_heads(t, a, m, n);
}

static void place_selected(model_activations *t, hd_arena *a, const hd_model *m, int64_t n) {
    t->selected = take_i32(a, n * m->env.spec->index_topk);
}

static void place_compressor(model_activations *t, hd_arena *a, const hd_model *m, int64_t n) {
    t->compress_kv = take_f32(a, n * 2 * m->env.spec->head_dim);
    t->compress_gate = take_f32(a, n * 2 * m->env.spec->head_dim);
}

/* Of all kinds of layers. */
static void place_any_attention(model_activations *t, hd_arena *a, const hd_model *m,
                                int64_t n) {
    const hd_model_spec *c = m->env.spec;
    const bool hybrid = hd_is_hybrid(c), shared = c->family == HD_FAMILY_V41;
    place_attention(t, a, m, n);
    t->index_q = take(a, m, n * c->index_heads * c->index_dim);
    t->index_k = take(a, m, n * c->index_dim);
    t->index_weight = take_f32(a, n * c->index_heads);
    if (!shared) place_selected(t, a, m, n);
    t->latent = take_f32(a, shared ? n * c->head_dim : 0);
    place_compressor(t, a, m, hybrid ? n : 0);
    t->index_kv = take_f32(a, hybrid ? n * 2 * c->index_dim : 0);
    t->index_gate = take_f32(a, hybrid ? n * 2 * c->index_dim : 0);
}

static void place_engram(model_activations *t, hd_arena *a, const hd_model *m, int64_t rows) {
    const hd_model_spec *c = m->env.spec;
    const hd_engram_spec *e = &c->engram;
    const int64_t n = e->n_layers ? rows : 0;
    t->engram_rows = take_f32(a, n * e->columns * e->head_dim);
    t->engram_kv = take_f32(a, n * (c->hc_mult + 1) * c->hidden);
}

/* What layers of V4.1 leave for later layers. */
static void place_shared(model_activations *t, hd_arena *a, const hd_model *m) {
    const hd_model_spec *c = m->env.spec;
    const int64_t n = c->family == HD_FAMILY_V41 ? m->limits.rows : 0;
    t->pre = take_f32(a, n * c->hc_mult);
    t->classes = take_i32(a, n * c->engram.max_ngram);
    t->pool_blocks = take_i32(a, n * c->pool_blocks);
    if (n) t->selected = take_i32(a, n * c->index_topk);
}

static int64_t wider(int64_t a, int64_t b) {
    return a > b ? a : b;
}

/* Elements of an MLP's rows between its GEMMs: dense or shared, of so many rows. */
static int64_t inter_elements(const hd_model *m, int64_t rows) {
    const hd_model_spec *c = m->env.spec;
    return rows * wider(c->dense_inter, c->n_shared * c->moe_inter);
}

static int64_t mlp_rows(const hd_model *m, int64_t rows) {
    return wider(model_most_rows(m, HD_GROUP_DENSE, (int32_t)rows),
                 model_most_rows(m, HD_GROUP_ETP, (int32_t)rows));
}

static void place_mlp(model_activations *t, hd_arena *a, const hd_model *m, int64_t rows) {
    const int64_t n = mlp_rows(m, rows);
    const int64_t inter = wider(m->shard->dense_inter.n, m->shard->shared_inter.n);
    t->gate = take(a, m, n * inter);
    t->up = take(a, m, n * inter);
    if (!model_gathers_columns(m, HD_GROUP_DENSE)) t->inter = t->gate;
}

/* Rows that this rank's experts compute at once, by choice. */
static int64_t expert_places(const hd_model *m, int64_t rows) {
    const int64_t own =
        model_most_rows(m, HD_GROUP_ETP, (int32_t)rows) * (int64_t)m->env.spec->route.top_k;
    if (!m->in_rows) return own;
    return m->env.stage ? hd_max_i64(m->in_rows, own) : m->in_rows;
}

/* Rows of several attention groups. */
static void place_foreign(model_activations *t, hd_arena *a, const hd_model *m, int32_t rows) {
    const int64_t dense = model_most_rows(m, HD_GROUP_DENSE, rows);
    const int64_t moe = model_most_rows(m, HD_GROUP_ETP, rows), hidden = m->env.spec->hidden;
    if (model_rows_are_foreign(m, HD_GROUP_DENSE)) {
        t->dense_x = take(a, m, dense * hidden);
        t->dense_y = take(a, m, dense * hidden);
    }
    if (!model_rows_are_foreign(m, HD_GROUP_ETP)) return;
    t->moe_x = take(a, m, moe * hidden);
    t->moe_y = take(a, m, moe * hidden);
    t->moe_tokens = take_i32(a, moe);
    t->moe_phases = take_i32(a, moe);
}

/* What a micro-batch keeps of a feed-forward block while others run. */
static void place_kept_ffn(model_activations *t, hd_arena *a, const hd_model *m, int64_t rows) {
    const hd_model_spec *c = m->env.spec;
    const int64_t assigned =
        model_most_rows(m, HD_GROUP_ETP, (int32_t)rows) * (int64_t)c->route.top_k;
    t->expert_weight = take_f32(a, assigned);
    t->offset = take_i32(a, hd_shard_slots(m->shard) + 1);
    t->first = take_i32(a, model_splits(m) ? hd_shard_slots(m->shard) : 0);
    const int64_t counts = (int64_t)m->shard->parallel.ep * c->route.n_experts;
    t->counts = take_i32(a, model_splits_together(m) ? counts : 0);
    t->assignment = take_i32(a, assigned);
    t->place = take_i32(a, assigned);
    if (!m->in_rows) t->expert_y = take(a, m, assigned * m->shard->moe_out.n);
    if (model_gathers_columns(m, HD_GROUP_DENSE)) {
        t->inter = take(a, m, inter_elements(m, mlp_rows(m, rows)));
    }
    if (model_gathers_columns(m, HD_GROUP_ETP)) {
        t->expert_inter = take(a, m, expert_places(m, rows) * c->moe_inter);
    }
    place_foreign(t, a, m, (int32_t)rows);
}

static void place_ffn(model_activations *t, hd_arena *a, const hd_model *m, int64_t rows) {
    const hd_model_spec *c = m->env.spec;
    const hd_shard *shard = m->shard;
    const int64_t n = model_most_rows(m, HD_GROUP_ETP, (int32_t)rows);
    const int64_t assigned = n * c->route.top_k, places = expert_places(m, rows);
    t->router = take_f32(a, n * c->route.n_experts);
    const bool predicts = m->env.stage && hd_expert_stage_predicts(m->env.stage);
    t->next_expert = take_i32(a, predicts ? assigned : 0);
    t->next_weight = take_f32(a, predicts ? assigned : 0);
    if (m->n_micro == 1) place_kept_ffn(t, a, m, rows);
    place_mlp(t, a, m, rows);
    t->expert_gate = take(a, m, places * shard->moe_inter.n);
    t->expert_up = take(a, m, places * shard->moe_inter.n);
    if (!model_gathers_columns(m, HD_GROUP_ETP)) t->expert_inter = t->expert_gate;
}

/* Places the buffers that other ranks may write or read while this one computes. */
static void place_received(model_activations *t, hd_arena *a, const hd_model *m, int64_t rows) {
    const int64_t hidden = m->env.spec->hidden, in = m->in_rows, out = m->shard->moe_out.n;
    const int64_t n = model_most_rows(m, HD_GROUP_ETP, (int32_t)rows);
    if (!in) return;
    t->expert_y = take(a, m, n * m->env.spec->route.top_k * out);
    t->in_x = take(a, m, in * hidden);
    /* Results take the place of the rows, which the next dispatch sends anew: after a combine nobody reads
     * them any more (comm/comm.h). Emulated ranks send nothing, and their rows stay. */
    t->in_y = m->env.comm->one_round ? take(a, m, in * out) : t->in_x;
    t->in_weight = take_f32(a, in);
    t->in_offset = take_i32(a, m->shard->n_experts + 1);
    t->n_rounds = take_i32(a, 1);
    if (!m->shard->parallel.fp8_rows) return;
    const hd_group_format f = {.group = hd_quant_x_group(&m->env.spec->quant)};
    t->packed = hd_arena_take(a, (size_t)n * hd_packed_row_bytes(f, m->env.spec->hidden), 64);
}

void model_place_micro(model_activations *t, hd_arena *a, const hd_model *m, int64_t rows) {
    place_received(t, a, m, rows);
    if (m->n_micro == 1) return;
    const size_t kept = a->used;
    if (model_gathers_heads(m)) place_heads(t, a, m, rows);
    const size_t end = a->used;
    hd_arena_rewind(a, kept);
    place_kept_ffn(t, a, m, rows);
    if (a->used < end) hd_arena_take(a, end - a->used, 1);
}

/* Of the complete step. */
static void place_head(model_activations *t, hd_arena *a, const hd_model *m, int64_t rows) {
    const hd_model_spec *c = m->env.spec;
    const int64_t n = m->limits.rows, streams = model_streams(c);
    (void)rows;
    t->logit_x = take(a, m, m->limits.logits * streams * c->hidden);
    t->merged = take(a, m, (int64_t)m->limits.logits * c->hidden);
    t->logit_pre = take_f32(a, (int64_t)m->limits.logits * c->hc_mult);
    if (model_rows_are_foreign(m, HD_GROUP_HEAD)) {
        const int64_t logits = model_most_rows(m, HD_GROUP_HEAD, m->limits.logits);
        t->head_x = take(a, m, logits * c->hidden);
        t->head_logits = take_f32(a, logits * c->vocab);
    }
    if (m->dspark) {
        const int64_t logits = m->limits.logits, seqs = logits / c->dspark.block;
        t->mixed = take(a, m, logits * c->hidden);
        t->markov = take(a, m, seqs * c->dspark.rank);
        t->bigram = take_f32(a, seqs * c->vocab);
        t->confidence = take_f32(a, logits + seqs);
        return;
    }
    t->mixed = t->merged;
    t->paired = take(a, m, n * (streams > 2 ? streams : 2) * c->hidden);
}

/* An indexer has no gradients, so that nothing but its choice is kept. */
static void place_kept_attention(model_activations *t, hd_arena *a, const hd_model *m,
                                 const hd_layer_spec *layer) {
    const hd_model_spec *c = m->env.spec;
    const int64_t n = m->limits.rows;
    const hd_attention kind = layer->attention;
    place_attention(t, a, m, n);
    t->q_low_raw = take(a, m, n * c->q_rank);
    if (!hd_is_hybrid(c)) t->kv_raw = take(a, m, n * (c->kv_rank + c->rope_dim));
    if (kind == HD_ATTN_CSA || kind == HD_ATTN_MLA_SPARSE) place_selected(t, a, m, n);
    if (layer->compress_ratio) place_compressor(t, a, m, n);
}

void model_place_block(model_activations *t, hd_arena *a, const hd_model *m,
                       const hd_layer_spec *layer, int32_t block) {
    const hd_model_spec *c = m->env.spec;
    const int64_t n = m->limits.rows, hc = c->hc_mult, assigned = n * c->route.top_k;
    t->h = take(a, m, n * c->hidden);
    t->y = take(a, m, n * c->hidden);
    t->post = take_f32(a, n * hc);
    t->comb = take_f32(a, n * hc * hc);
    if (!block) {
        place_kept_attention(t, a, m, layer);
        return;
    }
    place_ffn(t, a, m, n);
    t->choices = take_i32(a, assigned);
    t->inter = take(a, m, n * wider(m->shard->dense_inter.n, m->shard->shared_inter.n));
    t->expert_inter = take(a, m, assigned * m->shard->moe_inter.n);
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
    t->taps = take(a, m, m->dspark ? n * c->dspark.n_taps * c->hidden : 0);
    t->choices = take_i32(a, m->n_choices);
    t->slots = take_i32(a, m->limits.keeps_slots ? m->n_choices : 0);
    place_shared(t, a, m);
    model_place_micro(t, a, m, m->whole_rows);
    static void (*const places[])(model_activations *, hd_arena *, const hd_model *,
                                  int64_t) = {place_engram, place_any_attention, place_ffn,
                                              place_head};
    const size_t scratch = a->used;
    size_t end = scratch;
    for (size_t i = 0; i < HD_LEN(places); i++) {
        hd_arena_rewind(a, scratch);
        places[i](t, a, m, m->whole_rows);
        if (a->used > end) end = a->used;
    }
    hd_arena_take(a, end - a->used, 1); /* what follows starts after the longest */
}

static void move_rows(hd_rows *x, int64_t elements) {
    if (x->data) *x = hd_rows_at(*x, elements);
}

void model_move_activations(model_activations *t, const model_activations *whole,
                            const hd_model *m, int32_t row) {
    const hd_model_spec *c = m->env.spec;
    const int64_t hc = c->hc_mult, n = row;
    t->x = whole->x;
    t->h = whole->h;
    t->y = whole->y;
    t->taps = whole->taps;
    move_rows(&t->x, n * model_streams(c) * c->hidden);
    move_rows(&t->h, n * c->hidden);
    move_rows(&t->y, n * c->hidden);
    move_rows(&t->taps, n * c->dspark.n_taps * c->hidden);
    t->cos_sin = whole->cos_sin + n * c->rope_dim;
    t->cos_sin_compress = whole->cos_sin_compress + n * c->rope_dim;
    t->post = whole->post + n * hc;
    t->comb = whole->comb + n * hc * hc;
    if (c->family != HD_FAMILY_V41) return;
    t->pre = whole->pre + n * hc;
    t->classes = whole->classes + n * c->engram.max_ngram;
    t->pool_blocks = whole->pool_blocks + n * c->pool_blocks;
    t->selected = whole->selected + n * c->index_topk;
}
