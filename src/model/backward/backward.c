/* backward.c - the backward pass: its memory, and the way through the layers and back. */
#include <assert.h>
#include <stdlib.h>
#include "model/backward/backward_internal.h"

/* ---- memory ---- */

enum { GPU_PARTS = 16 << 20 }; /* floats: sums of a matrix's gradient over parts of the rows */

static float *take(hd_arena *a, int64_t n) {
    return n ? hd_arena_take(a, (size_t)n * sizeof(float), 64) : NULL;
}

static int64_t larger(int64_t a, int64_t b) {
    return a > b ? a : b;
}

/* Rounded latents are in the cache alone. */
bool backward_is_naive(const hd_backward *b) {
    const hd_dtype kv = b->m->env.ops->kv_type;
    if (kv != HD_NONE && kv != HD_F32) return false;
    for (int32_t l = 0; l < b->m->env.spec->n_layers; l++) {
        if (b->m->env.spec->layers[l].attention != HD_ATTN_MLA) return false;
    }
    return true;
}

static void place_mla(hd_backward *b, hd_arena *a) {
    const hd_model_spec *c = b->m->env.spec;
    backward_activations *d = &b->d;
    const int64_t n = (int64_t)b->m->limits.rows * b->m->shard->n_heads;
    if (backward_is_naive(b)) {
        d->made = take(a, n * (c->nope_dim + c->v_dim));
        d->dmade = take(a, n * (c->nope_dim + c->v_dim));
        d->rotated_part = take(a, n * c->rope_dim);
        return;
    }
    d->q_wide = take(a, n * (c->kv_rank + c->rope_dim));
    d->context = take(a, n * c->kv_rank);
}

static void place_indexer(hd_backward *b, hd_arena *a) {
    const hd_model_spec *c = b->m->env.spec;
    backward_activations *d = &b->d;
    const int64_t n = b->o.indexer ? b->m->limits.rows : 0;
    const int64_t pairs = hd_is_hybrid(c) ? 2 * n * c->index_dim : 0;
    d->index_q = take(a, n * c->index_heads * c->index_dim);
    d->index_weight = take(a, n * c->index_heads);
    d->index_keys = take(a, n * c->index_dim);
    d->index_kv = take(a, pairs);
    d->index_gate = take(a, pairs);
    const bool on_host = hd_device_is_host(b->m->env.device);
    d->index_shares = take(a, on_host ? n * c->index_topk : 0);
    d->index_slopes = take(a, n * c->index_topk);
    if (on_host) return;
    d->index_stats = hd_arena_take(a, 2 * (size_t)n * sizeof *d->index_stats, 64);
}

static void place_attention(hd_backward *b, hd_arena *a) {
    const hd_model *m = b->m;
    backward_activations *d = &b->d;
    const hd_model_spec *c = m->env.spec;
    const int64_t n = m->limits.rows, heads = m->shard->n_heads;
    const bool mla = c->family != HD_FAMILY_V4;
    const int64_t wide = mla ? c->kv_rank + c->rope_dim : c->head_dim;
    d->q_low = take(a, n * c->q_rank);
    d->q_low_raw = take(a, n * c->q_rank);
    d->q = take(a, n * heads * (mla ? c->nope_dim + c->rope_dim : c->head_dim));
    if (mla) {
        place_mla(b, a);
    } else {
        d->context = take(a, n * heads * c->head_dim);
    }
    d->o_low = take(a, n * (mla ? heads * c->v_dim : m->shard->o_groups * c->o_rank));
    d->kv = take(a, mla ? 0 : n * wide);
    d->entries = take(a, n * wide);
    d->compress_kv = take(a, mla ? 0 : n * 2 * wide);
    d->compress_gate = take(a, mla ? 0 : n * 2 * wide);
    d->lse = take(a, n * heads);
    d->delta = take(a, n * heads);
    d->first_entry = hd_arena_take(a, (size_t)n * sizeof *d->first_entry, 64);
    place_indexer(b, a);
}

static void place_ffn(hd_backward *b, hd_arena *a) {
    const hd_model *m = b->m;
    backward_activations *d = &b->d;
    const hd_model_spec *c = m->env.spec;
    const int64_t n = m->limits.rows, places = n * c->route.top_k;
    const int64_t inter = larger(m->shard->dense_inter.n, m->shard->shared_inter.n);
    d->gate = take(a, n * inter);
    d->up = take(a, n * inter);
    d->router = take(a, n * c->route.n_experts);
    d->expert_weight = take(a, places);
    d->expert_gate = take(a, places * m->shard->moe_inter.n);
    d->expert_up = take(a, places * m->shard->moe_inter.n);
    d->expert_y = take(a, places * c->hidden);
    d->expert_x = take(a, places * c->hidden);
}

static void place_head(hd_backward *b, hd_arena *a) {
    const hd_model *m = b->m;
    backward_activations *d = &b->d;
    const hd_model_spec *c = m->env.spec;
    const int64_t n = m->limits.logits;
    d->merged = take(a, n * c->hidden);
    d->logit_x = take(a, c->hc_mult ? n * c->hc_mult * c->hidden : 0);
    d->logit_mix = take(a, n * c->hc_mult);
    d->first_logit = hd_arena_take(a, ((size_t)n + 1) * sizeof *d->first_logit, 64);
}

static void place_mtp(hd_backward *b, hd_arena *a) {
    const hd_model *m = b->m;
    const bool pairs = b->o.drafts && !m->env.spec->hc_mult;
    b->d.paired = take(a, pairs ? 2 * (int64_t)m->limits.rows * m->env.spec->hidden : 0);
}

static int64_t residual_size(const hd_model *m) {
    const hd_model_spec *c = m->env.spec;
    return (int64_t)m->limits.rows * model_streams(c) * c->hidden;
}

static int32_t n_blocks(const hd_backward *b) {
    return 2 * (b->m->env.spec->n_layers + b->o.drafts);
}

static bool has_indexer(const hd_layer_spec *layer) {
    return layer->attention == HD_ATTN_CSA || layer->attention == HD_ATTN_MLA_SPARSE;
}

/* The last blocks are kept, as many as fit, but for those whose indexer is trained: of it only the choice
 * is kept. */
static void place_kept(hd_backward *b, hd_arena *a) {
    int64_t left = b->o.keep_bytes;
    for (int32_t i = n_blocks(b) - 1; i >= 0; i--) {
        kept_block *k = &b->blocks[i];
        const hd_layer_spec *layer = &b->m->env.spec->layers[i / 2];
        hd_arena alone = hd_arena_measure();
        k->t = b->m->acts;
        if (b->o.indexer && i % 2 == 0 && has_indexer(layer)) continue;
        model_place_block(&k->t, &alone, b->m, layer, i % 2);
        left -= (int64_t)alone.peak;
        k->kept = left >= 0;
        if (!k->kept) return;
        model_place_block(&k->t, a, b->m, layer, i % 2);
    }
}

static void place_all(hd_backward *b, hd_arena *a) {
    const hd_model *m = b->m;
    const hd_model_spec *c = m->env.spec;
    const int64_t n = m->limits.rows, hc = c->hc_mult;
    backward_activations *d = &b->d;
    b->kept = take(a, n_blocks(b) * residual_size(m));
    place_kept(b, a);
    b->row = hd_arena_take(a, (size_t)n * sizeof *b->row, 64);
    b->last = take(a, b->o.drafts ? residual_size(m) : 0);
    d->x = take(a, residual_size(m));
    d->term = take(a, residual_size(m));
    d->y = take(a, n * c->hidden);
    d->h = take(a, n * c->hidden);
    d->mixed = take(a, larger(n, m->limits.logits) * c->hidden);
    d->post = take(a, n * hc);
    d->comb = take(a, n * hc * hc);
    d->mix = take(a, n * (2 * hc + hc * hc));
    d->part = take(a, hc ? larger(n, m->limits.logits) * (3 + 2 * hc + hc * hc) : 0);
    d->norm_scale = hd_arena_take(
        a, (size_t)larger(n * model_streams(c), m->limits.logits) * sizeof *d->norm_scale, 64);
    static void (*const places[])(hd_backward *, hd_arena *) = {place_attention, place_ffn,
                                                                place_head, place_mtp};
    d->n_parts = hd_device_is_host(m->env.device) ? 0 : GPU_PARTS;
    d->parts = take(a, d->n_parts);
    const size_t scratch = a->used;
    size_t end = scratch;
    for (size_t i = 0; i < HD_LEN(places); i++) {
        hd_arena_rewind(a, scratch);
        places[i](b, a);
        if (a->used > end) end = a->used;
    }
    hd_arena_take(a, end - a->used, 1);
}

static hd_status check(const hd_model *m, const hd_backward_options *o, hd_err *err) {
    if (o->indexer && !m->env.spec->index_topk) {
        return HD_FAIL(err, HD_EINVAL, "--indexer-loss: this model has no indexer");
    }
    if (hd_parallel_world(&m->shard->parallel) > 1) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "training needs the complete model on one rank");
    }
    if (m->env.ops->act_type != HD_F32) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "training needs float32 activations, not %s",
                       hd_dtype_name(m->env.ops->act_type));
    }
    if (m->env.spec->family == HD_FAMILY_V41) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "%s cannot be trained",
                       hd_family_name(m->env.spec->family));
    }
    if (m->env.mla == HD_MLA_ABSORBED) return HD_OK;
    return HD_FAIL(err, HD_EUNSUPPORTED, "training needs mla absorbed");
}

static hd_status open_block(hd_backward *b, hd_err *err) {
    hd_arena a = hd_arena_measure();
    place_all(b, &a);
    b->bytes = a.peak;
    HD_TRY(hd_device_alloc(b->m->env.device, &b->block, b->bytes, "gradients", err));
    a = hd_arena_over(b->block, b->bytes);
    place_all(b, &a);
    assert(!a.full);
    return HD_OK;
}

static hd_status open_rows(hd_backward *b, hd_err *err) {
    const size_t bytes = (size_t)b->m->limits.rows * sizeof *b->row;
    b->first_entry = malloc(bytes);
    b->first_logit = malloc(((size_t)b->m->limits.logits + 1) * sizeof *b->first_logit);
    if (!b->first_entry || !b->first_logit)
        return HD_FAIL(err, HD_ENOMEM, "no memory for a backward pass");
    /* until a step needs it, it has the numbers of rows */
    for (int32_t i = 0; i < b->m->limits.rows; i++) b->first_entry[i] = i;
    hd_stream_upload(b->m->env.stream, b->row, b->first_entry, bytes);
    return HD_OK;
}

hd_status hd_backward_open(hd_backward **out, hd_model *m, const hd_backward_ops *ops,
                           const hd_backward_options *o, hd_err *err) {
    *out = NULL;
    HD_TRY(check(m, o, err));
    hd_backward *b = calloc(1, sizeof *b);
    if (!b) return HD_FAIL(err, HD_ENOMEM, "no memory for a backward pass");
    b->m = m;
    b->ops = ops;
    b->o = *o;
    b->blocks = calloc((size_t)n_blocks(b), sizeof *b->blocks);
    hd_status st = b->blocks ? open_block(b, err)
                             : HD_FAIL(err, HD_ENOMEM, "no memory for a backward pass");
    if (st == HD_OK) st = open_rows(b, err);
    if (st == HD_OK) {
        *out = b;
    } else {
        hd_backward_close(b);
    }
    return st;
}

void hd_backward_close(hd_backward *b) {
    if (!b) return;
    hd_device_release(b->m->env.device, b->block);
    free(b->first_entry);
    free(b->first_logit);
    free(b->blocks);
    free(b);
}

hd_replay_count hd_backward_replayed(const hd_backward *b) {
    return b->replayed;
}

size_t hd_backward_bytes(const hd_backward *b) {
    return b->bytes;
}

/* ---- the pass ---- */

float *backward_kept(const hd_backward *b, int32_t layer, int32_t block) {
    return b->kept + (2 * (int64_t)layer + block) * residual_size(b->m);
}

static void copy_residual(const hd_backward *b, const model_step *s, float *to,
                          const float *from) {
    const hd_model_spec *c = b->m->env.spec;
    const size_t n = (size_t)s->b->n_rows * (size_t)model_streams(c) * (size_t)c->hidden;
    hd_stream_copy(s->stream, to, from, n * sizeof *to);
}

static void count_in(model_replay *r, hd_replay_count *count) {
    r->routed = &count->routed;
    r->indexed = &count->indexed;
    r->other_experts = &count->other_experts;
    r->other_keys = &count->other_keys;
}

static model_replay replay_of(hd_backward *b, const hd_loss *loss) {
    model_replay r = {.experts = loss->routes, .row = b->row, .keys = loss->keys};
    count_in(&r, &b->replayed);
    return r;
}

static void run_block(model_step *s, int32_t layer, int32_t block) {
    const hd_layer_spec *kind = &s->m->env.spec->layers[layer];
    s->t->expert = s->t->choices; /* nobody reads those of other layers */
    model_run_stages(s, 1, block ? model_ffn_stages(kind) : model_attention_stages(kind),
                     block ? "ffn" : "attention", layer, !block);
    if (!block) model_block_out(s, layer); /* of the other it is a stage */
}

model_activations *backward_block(const hd_backward *b, int32_t layer, int32_t block) {
    kept_block *k = &b->blocks[2 * layer + block];
    return k->kept ? &k->t : NULL;
}

/* keep: the residual before every block, and of some blocks all activations */
static void run_layer(const hd_backward *b, const model_step *s, int32_t layer, bool keep) {
    for (int32_t block = 0; block < 2; block++) {
        model_step of_block = *s;
        model_activations *own = keep ? backward_block(b, layer, block) : NULL;
        if (own) of_block.t = own;
        if (keep) copy_residual(b, s, backward_kept(b, layer, block), s->t->x.data);
        run_block(&of_block, layer, block);
    }
}

static void forward(const hd_backward *b, model_step *s, bool keep) {
    model_start(s);
    for (int32_t l = 0; l < b->m->env.spec->n_layers; l++) run_layer(b, s, l, keep);
}

static back_block_fn *block_of(const hd_layer_spec *kind, int32_t block) {
    if (block) return kind->mlp == HD_MLP_DENSE ? back_dense : back_moe;
    if (kind->attention == HD_ATTN_MLA) return back_mla;
    return kind->attention == HD_ATTN_MLA_SPARSE ? back_mla_sparse : back_hybrid;
}

/* Computes a block again from its kept input. What is replayed has been counted. */
static void run_again(const back_step *k, model_step *s, int32_t layer, int32_t block) {
    hd_replay_count counted = {0};
    model_replay replay;
    if (s->replay) {
        replay = *s->replay;
        count_in(&replay, &counted);
        s->replay = &replay;
    }
    copy_residual(k->b, s, s->t->x.data, backward_kept(k->b, layer, block));
    run_block(s, layer, block);
    s->replay = k->s->replay;
}

/* Goes back through the blocks, of which those that are not kept are first computed again. */
static void back_layer(const back_step *k, const model_step *s, int32_t layer) {
    const hd_layer_spec *kind = &s->m->env.spec->layers[layer];
    for (int32_t block = 1; block >= 0; block--) {
        model_step of_block = *s;
        back_step back = *k;
        model_activations *own = backward_block(k->b, layer, block);
        back.s = &of_block;
        if (own) {
            of_block.t = own;
        } else {
            run_again(k, &of_block, layer, block);
        }
        back_through(&back, layer, block, block_of(kind, block));
    }
}

/* The MTP layer, forward and back: d.x is then the gradient of the main model's last residual. */
static void back_drafts(const back_step *k, model_step *s, const hd_batch *batch,
                        const hd_loss *loss) {
    const hd_draft_loss *drafts = &loss->drafts;
    const int32_t layer = s->m->env.spec->n_layers;
    assert(k->b->o.drafts);
    const hd_loss own = {.target = drafts->target,
                         .factor = drafts->factor,
                         .logprob = drafts->logprob,
                         .entropy = loss->entropy};
    hd_batch rows = *batch;
    rows.n_logits = drafts->n;
    rows.device.logit_rows = (int32_t *)(uintptr_t)drafts->rows;
    copy_residual(k->b, s, k->b->last, s->t->x.data);
    back_mtp_again(k);
    model_mtp_start(s, layer, false);
    run_layer(k->b, s, layer, true);
    back_head(k, layer, &rows, drafts->host_rows, &own);
    back_layer(k, s, layer);
    back_mtp_start(k, layer);
    if (k->detached) back_clear_residual(k);
    back_mtp_leave(k);
}

static void back_embedding(const back_step *k) {
    const model_step *s = k->s;
    const hd_model_spec *c = s->m->env.spec;
    float *dtable = hd_gradients_at(k->g, HD_GLOBAL, HD_EMBED);
    if (!dtable) return;
    k->b->ops->embed_back(s->stream, &(hd_embed_back_args){.dtable = dtable,
                                                           .g = hd_f32(k->b->d.x),
                                                           .tokens = s->b->device.tokens,
                                                           .rows = s->b->n_rows,
                                                           .copies = model_streams(c),
                                                           .cols = c->hidden});
}

void hd_backward_score(hd_backward *b, const hd_kv *kv, hd_batch *batch, const hd_loss *loss) {
    hd_batch rows = *batch;
    rows.n_logits = 0; /* the head has its own parts */
    const model_replay replay = replay_of(b, loss);
    model_step s = model_step_of(b->m, kv, &rows);
    s.apart = true;
    if (loss->routes || loss->keys) s.replay = &replay;
    const back_step k = {.b = b, .s = &s};
    forward(b, &s, false);
    back_head(&k, HD_GLOBAL, batch, batch->host.logit_rows, loss);
}

void hd_backward_step(hd_backward *b, const hd_kv *kv, hd_batch *batch, const hd_loss *loss,
                      const hd_gradients *g) {
    hd_batch rows = *batch;
    rows.n_logits = 0; /* the head has its own parts */
    const model_replay replay = replay_of(b, loss);
    model_step s = model_step_of(b->m, kv, &rows);
    s.apart = true;
    if (loss->routes || loss->keys) s.replay = &replay;
    const back_step k = {.b = b,
                         .s = &s,
                         .g = g,
                         .indexer = loss->indexer,
                         .divergence = loss->divergence,
                         .detached = loss->drafts.detached};
    if (loss->divergence)
        hd_stream_clear(s.stream, loss->divergence, (size_t)batch->n_rows * sizeof(float));
    forward(b, &s, true);
    back_clear_residual(&k);
    if (loss->drafts.rows) back_drafts(&k, &s, batch, loss);
    back_head(&k, HD_GLOBAL, batch, batch->host.logit_rows, loss);
    for (int32_t l = b->m->env.spec->n_layers - 1; l >= 0; l--) back_layer(&k, &s, l);
    back_embedding(&k);
}
