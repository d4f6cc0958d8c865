/* hybrid_back.c - backwards through V4's attention and its compressor. The indexer has no
 * gradient by it: indexer_back.c. */
#include "model/backward/backward_internal.h"

/* From d.y to d.context, the gradient of the attention's own result, which is rotated. */
static void back_output(const back_step *k, int32_t layer) {
    const model_step *s = k->s;
    const hd_model_spec *c = s->m->env.spec;
    const backward_activations *d = &k->b->d;
    const int32_t n = s->b->n_rows, heads = s->m->shard->n_heads,
                  groups = s->m->shard->o_groups;
    const int32_t wide = heads * c->head_dim / groups, tail = c->head_dim - c->rope_dim;
    back_linear(k, layer, HD_O_B, d->o_low, false, hd_f32(d->y), s->t->o_low, n);
    const hd_linear_heads_args forward = {
        .x = s->t->context,
        .w = hd_weights_matrix(s->m->env.weights, layer, HD_O_A),
        .rows = n,
        .heads = groups,
        .n_rows = c->o_rank,
        .head_rows = c->o_rank,
        .out_head = c->o_rank,
        .x_head = wide};
    back_heads(k, layer, HD_O_A, &forward, d->context, d->o_low);
    /* the forward pass undid the rotation of both */
    model_rope(s, model_hybrid_rope(s, layer), hd_f32(d->context), tail, heads, c->head_dim);
    model_rope(s, model_hybrid_rope(s, layer), s->t->context, tail, heads, c->head_dim);
}

static void back_attention(const back_step *k, int32_t layer) {
    const model_step *s = k->s;
    const hd_model_spec *c = s->m->env.spec;
    const hd_layer_spec *kind = &c->layers[layer];
    const backward_activations *d = &k->b->d;
    const bool choose = kind->attention == HD_ATTN_CSA;
    k->b->ops->attention_back(
        s->stream,
        &(hd_attention_back_args){.dq = d->q,
                                  .drecent = d->kv,
                                  .dentries = d->entries,
                                  .dsink = hd_gradients_at(k->g, layer, HD_SINK),
                                  .lse = d->lse,
                                  .delta = d->delta,
                                  .g = hd_f32(d->context),
                                  .out = s->t->context,
                                  .q = s->t->q,
                                  .recent = model_pool(s, layer, HD_POOL_SLIDING),
                                  .entries = model_pool(s, layer, HD_POOL_COMPRESSED),
                                  .selected = choose ? s->t->selected : NULL,
                                  .sink = hd_weights_vector(s->m->env.weights, layer, HD_SINK),
                                  .first_entry = d->first_entry,
                                  .seqs = back_seqs(k),
                                  .rows = s->b->n_rows,
                                  .heads = s->m->shard->n_heads,
                                  .k_dim = c->head_dim,
                                  .v_dim = c->head_dim,
                                  .window = c->window,
                                  .ratio = kind->compress_ratio,
                                  .n_selected = choose ? c->index_topk : 0,
                                  .scale = s->m->softmax_scale,
                                  .parts = d->parts,
                                  .n_parts = d->n_parts});
}

/* From d.q to d.h. The query has a norm without weights, per head, behind its projections. */
static void back_query(const back_step *k, int32_t layer) {
    const model_step *s = k->s;
    const hd_model_spec *c = s->m->env.spec;
    const backward_activations *d = &k->b->d;
    const int32_t n = s->b->n_rows, heads = s->m->shard->n_heads;
    back_rope(k, model_hybrid_rope(s, layer), d->q, c->head_dim - c->rope_dim, heads,
              c->head_dim);
    model_linear(s, layer, HD_Q_B, s->t->q, s->t->q_low, n);
    k->b->ops->rms_norm_back(s->stream, &(hd_rms_norm_back_args){.dx = hd_f32(d->q),
                                                                 .g = hd_f32(d->q),
                                                                 .x = s->t->q,
                                                                 .rows = n * heads,
                                                                 .cols = c->head_dim,
                                                                 .eps = c->norm_eps});
    back_low_query(k, layer, c->norm_eps);
}

/* From d.kv, the gradient of the window's entries, to d.h. */
static void back_window(const back_step *k, int32_t layer) {
    const model_step *s = k->s;
    const hd_model_spec *c = s->m->env.spec;
    const backward_activations *d = &k->b->d;
    const int32_t n = s->b->n_rows;
    back_rope(k, model_hybrid_rope(s, layer), d->kv, c->head_dim - c->rope_dim, 1, c->head_dim);
    model_linear(s, layer, HD_KV, s->t->kv, s->t->h, n);
    back_norm(k, layer, HD_KV_NORM, hd_f32(d->kv), hd_f32(d->kv), s->t->kv, n, c->head_dim,
              c->norm_eps);
    back_linear(k, layer, HD_KV, d->h, true, hd_f32(d->kv), s->t->h, n);
}

/* From d.entries to d.h. */
static void back_compress(const back_step *k, int32_t layer) {
    const model_step *s = k->s;
    const hd_model_spec *c = s->m->env.spec;
    const hd_layer_spec *kind = &c->layers[layer];
    const hd_weights *w = s->m->env.weights;
    const backward_activations *d = &k->b->d;
    const int32_t n = s->b->n_rows;
    /* the compressor has added its position bias since */
    model_linear(s, layer, HD_COMP_GATE, hd_f32(s->t->compress_gate), s->t->h, n);
    k->b->ops->compress_back(
        s->stream, &(hd_compress_back_args){
                       .dkv = d->compress_kv,
                       .dgate = d->compress_gate,
                       .dape = hd_gradients_at(k->g, layer, HD_COMP_APE),
                       .dnorm = hd_gradients_at(k->g, layer, HD_COMP_NORM),
                       .g = d->entries,
                       .kv = s->t->compress_kv,
                       .gate = s->t->compress_gate,
                       .ape = hd_weights_vector(w, layer, HD_COMP_APE),
                       .norm = hd_weights_vector(w, layer, HD_COMP_NORM),
                       .freq = s->m->freq_compress,
                       .first_entry = d->first_entry,
                       .seqs = {s->b->n_seqs, s->b->device.first_row, s->b->device.pos, 0},
                       .rows = s->b->n_rows,
                       .width = c->head_dim,
                       .ratio = kind->compress_ratio,
                       .pairs = c->rope_dim / 2,
                       .overlap = kind->attention == HD_ATTN_CSA,
                       .eps = c->norm_eps,
                       .parts = d->parts,
                       .n_parts = d->n_parts
    });
    back_linear(k, layer, HD_COMP_KV, d->h, true, hd_f32(d->compress_kv), s->t->h, n);
    back_linear(k, layer, HD_COMP_GATE, d->h, true, hd_f32(d->compress_gate), s->t->h, n);
}

/* The first entry of each sequence in d.entries. */
static void place_entries(const back_step *k, int32_t ratio) {
    const hd_batch *b = k->s->b;
    int32_t first = 0, *of = k->b->first_entry;
    for (int32_t i = 0; i < b->n_seqs; i++) {
        of[i] = first;
        if (ratio) first += (b->host.first_row[i + 1] - b->host.first_row[i]) / ratio;
    }
    hd_stream_upload(k->s->stream, k->b->d.first_entry, of, (size_t)b->n_seqs * sizeof *of);
}

void back_hybrid(const back_step *k, int32_t layer) {
    const int32_t ratio = k->s->m->env.spec->layers[layer].compress_ratio;
    place_entries(k, ratio);
    back_output(k, layer);
    back_attention(k, layer);
    if (k->s->m->env.spec->layers[layer].attention == HD_ATTN_CSA) {
        back_indexer(k, layer,
                     &(back_indexed){.queries = k->s->t->q,
                                     .entries = model_pool(k->s, layer, HD_POOL_COMPRESSED),
                                     .first_entry = k->b->d.first_entry,
                                     .k_dim = k->s->m->env.spec->head_dim,
                                     .ratio = ratio});
    }
    back_query(k, layer);
    back_window(k, layer);
    if (ratio) back_compress(k, layer);
}
