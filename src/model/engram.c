/* engram.c - V4.1's Engram: rows of a large table that the last tokens choose, added to the
 * residual streams; models.md 2.20. The table stays where the checkpoint is mapped, and may be far
 * larger than the memory: as soon as a step knows its tokens, their rows of all tables are asked
 * for. */
#include "base/checked.h"
#include "model/model_internal.h"

/* A table of random weights may have fewer rows: every column has its share of them. */
static hd_engram_hash hash_of(const hd_model *m, int32_t i) {
    const hd_engram_spec *e = &m->env.spec->engram;
    const hd_weight *t = hd_weights_matrix(m->env.weights, e->layers[i], HD_ENGRAM_TABLE);
    hd_engram_hash h = e->hash[i];
    const int32_t each = t ? t->rows / e->columns : 0;
    for (int32_t c = 0; c < e->columns && each && t->rows < e->rows[i]; c++) {
        h.primes[c] = hd_min_i32(h.primes[c], each);
        h.first_row[c] = c * each;
    }
    return h;
}

void model_upload_engram(hd_model *m) {
    const hd_model_spec *c = m->env.spec;
    const hd_engram_spec *e = &c->engram;
    if (e->n_layers == 0) return;
    for (int32_t i = 0; i < e->n_layers; i++) {
        const hd_engram_hash hash = hash_of(m, i);
        hd_stream_upload(m->env.stream, &m->engram_hash[i], &hash, sizeof hash);
    }
    hd_stream_upload(m->env.stream, m->token_classes, hd_weights_token_classes(m->env.weights),
                     (size_t)c->vocab * sizeof *m->token_classes);
}

void model_classify_tokens(const model_step *s) {
    const hd_model_env *env = &s->m->env;
    const hd_engram_spec *e = &env->spec->engram;
    if (e->n_layers == 0 || s->b->n_rows == 0) return;
    env->ops->ngram_classes(
        s->stream,
        &(hd_ngram_classes_args){
            .out = s->t->classes,
            .history = model_pool(s, e->layers[0], HD_POOL_TOKENS),
            .tokens = s->b->device.tokens,
            .class_of = s->m->token_classes,
            .seqs = {s->b->n_seqs, s->b->device.first_row, s->b->device.pos, s->b->most_rows},
            .n = e->max_ngram,
            .pad = e->pad
    });
}

static hd_engram_embed_args embed_args(const model_step *s, int32_t layer) {
    const hd_model_env *env = &s->m->env;
    const hd_engram_spec *e = &env->spec->engram;
    const hd_engram_hash *hash = &s->m->engram_hash[env->spec->layers[layer].engram];
    return (hd_engram_embed_args){.out = s->t->engram_rows,
                                  .classes = s->t->classes,
                                  .table =
                                      hd_weights_matrix(env->weights, layer, HD_ENGRAM_TABLE),
                                  .multipliers = hash->multipliers,
                                  .primes = hash->primes,
                                  .first_row = hash->first_row,
                                  .rows = s->b->n_rows,
                                  .max_ngram = e->max_ngram,
                                  .heads = e->heads};
}

/* ---- rows asked for ahead ---- */

/* Bytes of a row of a table, and of its scales, if it has some of its own. */
static size_t data_bytes(const hd_weight *t) {
    return hd_dtype_bytes(t->type, t->cols);
}

static size_t scale_bytes(const hd_weight *t) {
    if (!t->scale || t->block_rows != 1) return 0;
    return hd_dtype_bytes(t->scale_type, hd_ceil_div(t->cols, t->block_cols));
}

/* The host reads a table in place only where device memory is host memory. */
hd_status model_open_prefetch(hd_model *m, hd_err *err) {
    const hd_engram_spec *e = &m->env.spec->engram;
    if (e->n_layers == 0 || !hd_device_is_host(m->env.device)) return HD_OK;
    for (int32_t i = 0; i < e->n_layers; i++) {
        const hd_weight *t = hd_weights_matrix(m->env.weights, e->layers[i], HD_ENGRAM_TABLE);
        if (!t->data) return HD_OK; /* shapes without values */
        hd_prefetch_at_random(t->data, (size_t)t->rows * data_bytes(t));
        if (scale_bytes(t)) {
            hd_prefetch_at_random(t->scale, (size_t)t->rows * scale_bytes(t));
        }
    }
    const int64_t rows = m->limits.rows, most = rows * e->n_layers * e->columns * 2;
    return hd_prefetch_open(&m->prefetch, (int32_t)hd_min_i64(most, INT32_MAX), err);
}

/* Adds a row and its scales for every column of a step's rows. Returns how many pieces. */
static int32_t add_pieces(const model_step *s, int32_t layer, hd_prefetch_piece *out) {
    const hd_engram_embed_args a = embed_args(s, layer);
    const size_t data = data_bytes(a.table), scale = scale_bytes(a.table);
    int32_t n = 0;
    for (int64_t r = 0; r < a.rows; r++) {
        for (int32_t c = 0; c < s->m->env.spec->engram.columns; c++) {
            const size_t row = (size_t)hd_engram_row(&a, a.classes + r * a.max_ngram, c);
            out[n++] = (hd_prefetch_piece){(const uint8_t *)a.table->data + row * data, data};
            if (!scale) continue;
            out[n++] =
                (hd_prefetch_piece){(const uint8_t *)a.table->scale + row * scale, scale};
        }
    }
    return n;
}

void model_prefetch_engram(const model_step *s) {
    const hd_model *m = s->m;
    const hd_engram_spec *e = &m->env.spec->engram;
    const int32_t rows = s->b->n_rows;
    int32_t n = 0;
    if (!m->prefetch) return;
    hd_prefetch_piece *list =
        hd_prefetch_list(m->prefetch, rows * e->n_layers * e->columns * 2);
    if (!list || rows == 0) return;
    for (int32_t l = 0; l < e->n_layers; l++) n += add_pieces(s, e->layers[l], list + n);
    hd_prefetch_start(m->prefetch, n);
}

hd_prefetch_stats hd_model_engram_stats(const hd_model *m) {
    return m->prefetch ? hd_prefetch_read_stats(m->prefetch) : (hd_prefetch_stats){0};
}

void model_engram(const model_step *s, int32_t layer) {
    const hd_model_env *env = &s->m->env;
    const hd_model_spec *c = env->spec;
    const int32_t n = s->b->n_rows;
    if (n == 0) return;
    const hd_engram_embed_args rows = embed_args(s, layer);
    env->ops->engram_embed(s->stream, &rows);
    model_linear(s, layer, HD_ENGRAM_KV, hd_f32(s->t->engram_kv), hd_f32(s->t->engram_rows), n);
    env->ops->engram_gate(
        s->stream,
        &(hd_engram_gate_args){.x = s->t->x,
                               .kv = s->t->engram_kv,
                               .q_weight = hd_weights_vector(env->weights, layer, HD_ENGRAM_Q),
                               .k_weight = hd_weights_vector(env->weights, layer, HD_ENGRAM_K),
                               .rows = n,
                               .cols = c->hidden,
                               .hc = c->hc_mult,
                               .eps = c->norm_eps});
}
