/* indexer_back.c - gradients of the indexers by their own loss: how far their choice is from attention.
 * Nothing of the model beside them gets any. */
#include "model/backward/backward_internal.h"

/* d.index_q, d.index_weight and d.index_keys */
static void back_scores(const back_step *k, int32_t layer, const back_indexed *of) {
    const model_step *s = k->s;
    const hd_model_spec *c = s->m->env.spec;
    const backward_activations *d = &k->b->d;
    k->b->ops->indexer_back(
        s->stream, &(hd_indexer_back_args){
                       .dq = d->index_q,
                       .dweight = d->index_weight,
                       .dkeys = d->index_keys,
                       .divergence = k->divergence,
                       .q = s->t->index_q,
                       .weight = s->t->index_weight,
                       .keys = model_pool(s, layer, HD_POOL_INDEX),
                       .selected = s->t->selected,
                       .attention_q = of->queries,
                       .entries = of->entries,
                       .lse = d->lse,
                       .first_entry = of->first_entry,
                       .seqs = {s->b->n_seqs, s->b->device.first_row, s->b->device.pos, 0},
                       .shares = d->index_shares,
                       .slopes = d->index_slopes,
                       .rows = s->b->n_rows,
                       .heads = c->index_heads,
                       .ratio = of->ratio,
                       .top_k = c->index_topk,
                       .attention_heads = s->m->shard->n_heads,
                       .k_dim = of->k_dim,
                       .scale = s->m->index_scale,
                       .attention_scale = s->m->softmax_scale,
                       .factor = k->indexer
    });
}

/* ---- V4: queries are rotated at their end, and keys have a compressor of their own ---- */

static void back_compressed_keys(const back_step *k, int32_t layer) {
    const model_step *s = k->s;
    const hd_model_spec *c = s->m->env.spec;
    const hd_weights *w = s->m->env.weights;
    const backward_activations *d = &k->b->d;
    const int32_t n = s->b->n_rows;
    /* the compressor has added its position bias since */
    model_linear(s, layer, HD_INDEX_COMP_GATE, hd_f32(s->t->index_gate), s->t->h, n);
    k->b->ops->compress_back(
        s->stream, &(hd_compress_back_args){
                       .dkv = d->index_kv,
                       .dgate = d->index_gate,
                       .dape = hd_gradients_at(k->g, layer, HD_INDEX_COMP_APE),
                       .dnorm = hd_gradients_at(k->g, layer, HD_INDEX_COMP_NORM),
                       .g = d->index_keys,
                       .kv = s->t->index_kv,
                       .gate = s->t->index_gate,
                       .ape = hd_weights_vector(w, layer, HD_INDEX_COMP_APE),
                       .norm = hd_weights_vector(w, layer, HD_INDEX_COMP_NORM),
                       .freq = s->m->freq_compress,
                       .first_entry = d->first_entry,
                       .seqs = {s->b->n_seqs, s->b->device.first_row, s->b->device.pos, 0},
                       .rows = n,
                       .width = c->index_dim,
                       .ratio = c->layers[layer].compress_ratio,
                       .pairs = c->rope_dim / 2,
                       .overlap = true,
                       .eps = c->norm_eps,
                       .parts = d->parts,
                       .n_parts = d->n_parts
    });
    back_matrix(k, hd_gradients_at(k->g, layer, HD_INDEX_COMP_KV), hd_f32(d->index_kv), s->t->h,
                n, 2 * c->index_dim, c->hidden);
    back_matrix(k, hd_gradients_at(k->g, layer, HD_INDEX_COMP_GATE), hd_f32(d->index_gate),
                s->t->h, n, 2 * c->index_dim, c->hidden);
}

/* ---- V3.2: both are rotated at their beginning, and keys have a layer norm ---- */

static void back_token_keys(const back_step *k, int32_t layer) {
    const model_step *s = k->s;
    const hd_model_spec *c = s->m->env.spec;
    const backward_activations *d = &k->b->d;
    const int32_t n = s->b->n_rows;
    model_rope_index(s, hd_f32(d->index_keys), 1, true);
    model_linear(s, layer, HD_INDEX_K, s->t->index_k, s->t->h, n); /* before the norm */
    k->b->ops->layer_norm_back(
        s->stream, &(hd_layer_norm_back_args){
                       .g = hd_f32(d->index_keys),
                       .dweight = hd_gradients_at(k->g, layer, HD_INDEX_K_NORM),
                       .dbias = hd_gradients_at(k->g, layer, HD_INDEX_K_BIAS),
                       .x = s->t->index_k,
                       .weight = hd_weights_vector(s->m->env.weights, layer, HD_INDEX_K_NORM),
                       .stats = d->index_stats,
                       .rows = n,
                       .cols = c->index_dim,
                       .eps = model_inner_eps,
                       .sums = back_sums(k)});
    back_matrix(k, hd_gradients_at(k->g, layer, HD_INDEX_K), hd_f32(d->index_keys), s->t->h, n,
                c->index_dim, c->hidden);
}

void back_indexer(const back_step *k, int32_t layer, const back_indexed *of) {
    const model_step *s = k->s;
    const hd_model_spec *c = s->m->env.spec;
    const backward_activations *d = &k->b->d;
    const int32_t n = s->b->n_rows, wide = c->index_heads * c->index_dim;
    float *dq = hd_gradients_at(k->g, layer, HD_INDEX_Q_B);
    if (k->indexer <= 0.0f || !dq) return;
    back_scores(k, layer, of);
    if (hd_is_hybrid(c)) {
        back_rope(k, s->t->cos_sin_compress, d->index_q, c->index_dim - c->rope_dim,
                  c->index_heads, c->index_dim);
        back_compressed_keys(k, layer);
    } else {
        model_rope_index(s, hd_f32(d->index_q), c->index_heads, true);
        back_token_keys(k, layer);
    }
    back_matrix(k, dq, hd_f32(d->index_q), s->t->q_low, n, wide, c->q_rank);
    back_matrix(k, hd_gradients_at(k->g, layer, HD_INDEX_WEIGHTS), hd_f32(d->index_weight),
                s->t->h, n, c->index_heads, c->hidden);
}
