/* tail.c - layers with tails compute only the last positions of a prompt (kv.h): after the keys of
 * every position are stored, the rows that the next layer does not need are dropped.
 *
 * The host knows which rows these are, so the batch shrinks and every array of its rows with it. The
 * rows that are left keep their order. What is stored, sampled and drafted is the same, bit for bit,
 * as if all rows went on: they are rows that nothing reads. Several attention groups compute all
 * rows, because they would have to agree on the rows that are left. */
#include <assert.h>

#include "base/checked.h"
#include "model/beside_internal.h"

void model_place_rest(hd_model *m, hd_arena *device, hd_arena *host) {
    const size_t rows = (size_t)m->limits.rows, logits = (size_t)m->limits.logits;
    const size_t n = (size_t)m->pages.tail.n, each = sizeof(int32_t);
    for (int32_t i = 0; i < m->n_micro; i++) {
        model_rest *r = &m->rest[i];
        hd_batch_view *v = &r->batch.device;
        int32_t **const of_rows[] = {&v->tokens, &v->pos, &v->seq, &v->phase};
        for (size_t k = 0; k < HD_LEN(of_rows); k++) {
            *of_rows[k] = hd_arena_take(device, rows * each, 64);
        }
        r->kept_device = hd_arena_take(device, n * rows * each, 64);
        r->logit_rows_device = hd_arena_take(device, n * logits * each, 64);
        r->rows = hd_arena_take(host, rows * each, 64);
        r->kept = hd_arena_take(host, n * rows * each, 64);
        r->logit_rows = hd_arena_take(host, n * logits * each, 64);
    }
}

bool model_drops_rows(const hd_model *m, int32_t layer) {
    const hd_kv_tail *tail = &m->pages.tail;
    return layer + 1 >= tail->first && layer + 1 < tail->first + tail->n;
}

/* ---- which rows ---- */

/* Writes the rows that layer tail.first + i needs, by their numbers before it. Returns how many. */
static int32_t choose_rows(model_rest *r, const hd_batch *whole, const hd_kv_shape *pages,
                           int32_t i, int32_t before, int32_t *kept) {
    const hd_batch_view *v = &whole->host;
    int32_t n = 0;
    for (int32_t k = 0; k < before; k++) {
        const int32_t row = r->on ? r->rows[k] : k;
        if (!hd_kv_is_needed(pages, i, &v->ends[v->seq[row]], v->pos[row])) continue;
        kept[n] = k;
        r->rows[n++] = row;
    }
    return n;
}

/* The rows that need logits are among those that are left, in no order. */
static void number_logits(const model_rest *r, const hd_batch *whole, int32_t n, int32_t *out) {
    for (int32_t k = 0; k < whole->n_logits; k++) {
        int32_t low = 0, high = n - 1;
        while (low < high) {
            const int32_t middle = (low + high) / 2;
            if (r->rows[middle] < whole->host.logit_rows[k]) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        assert(r->rows[low] == whole->host.logit_rows[k]);
        out[k] = low;
    }
}

/* ---- the arrays of the rows ---- */

/* The first time, rows are taken from the step's batch, which keeps all of them. */
static void copy_batch(const model_step *s, const hd_batch *whole) {
    const hd_batch_view *from = &whole->device;
    hd_batch_view *to = &s->rest->batch.device;
    const int32_t *const all[] = {from->tokens, from->pos, from->seq, from->phase};
    int32_t *const own[] = {to->tokens, to->pos, to->seq, to->phase};
    hd_batch left = *whole;
    for (size_t i = 0; i < HD_LEN(all); i++) {
        hd_stream_copy(s->stream, own[i], all[i], (size_t)whole->n_rows * sizeof *all[i]);
    }
    left.host = (hd_batch_view){0};
    left.device = *to;
    left.device.tables[HD_KV_FULL] = from->tables[HD_KV_FULL];
    left.device.tables[HD_KV_WINDOW] = from->tables[HD_KV_WINDOW];
    s->rest->batch = left;
}

static int32_t words_of(hd_rows x, int32_t cols) {
    return (int32_t)((int64_t)cols * hd_dtype_bits(x.type) / 32);
}

/* In place; x may be NULL. */
static void keep(const model_step *s, const int32_t *kept, int32_t n, void *x, int32_t words) {
    if (!x || !words) return;
    s->m->env.ops->keep_rows(
        s->stream, &(hd_keep_rows_args){.x = x, .kept = kept, .rows = n, .words = words});
}

/* What the rest of this layer and the later ones read of a row. */
static void keep_rows(const model_step *s, const int32_t *kept, int32_t n) {
    const hd_model_spec *c = s->m->env.spec;
    const model_activations *t = s->t;
    const hd_batch_view *v = &s->rest->batch.device;
    const int32_t hc = c->hc_mult;
    keep(s, kept, n, v->tokens, 1);
    keep(s, kept, n, v->pos, 1);
    keep(s, kept, n, v->seq, 1);
    keep(s, kept, n, v->phase, 1);
    keep(s, kept, n, t->x.data, words_of(t->x, hc * c->hidden));
    keep(s, kept, n, t->h.data, words_of(t->h, c->hidden));
    keep(s, kept, n, t->pre, hc);
    keep(s, kept, n, t->post, hc);
    keep(s, kept, n, t->comb, hc * hc);
    keep(s, kept, n, t->selected, c->index_topk);
    keep(s, kept, n, t->pool_blocks, c->pool_blocks);
    keep(s, kept, n, t->taps.data, words_of(t->taps, c->dspark.n_taps * c->hidden));
}

/* The host arrays of every layer are its own, as the device may read them later. */
void model_drop_rows(model_step *s, int32_t layer) {
    const hd_model *m = s->m;
    model_rest *r = s->rest;
    const hd_batch *whole = s->whole;
    if (!model_drops_rows(m, layer) || !whole->host.ends || whole->group_rows) return;
    const int32_t i = layer + 1 - m->pages.tail.first;
    const int64_t row0 = (int64_t)i * m->limits.rows, logit0 = (int64_t)i * m->limits.logits;
    int32_t *kept = r->kept + row0, *logit_rows = r->logit_rows + logit0;
    const int32_t n = choose_rows(r, whole, &m->pages, i, s->b->n_rows, kept);
    if (n == s->b->n_rows) return;
    model_join(s); /* what runs beside may read what moves */
    if (!r->on) copy_batch(s, whole);
    r->on = true;
    number_logits(r, whole, n, logit_rows);
    hd_stream_upload(s->stream, r->kept_device + row0, kept, (size_t)n * sizeof *kept);
    hd_stream_upload(s->stream, r->logit_rows_device + logit0, logit_rows,
                     (size_t)whole->n_logits * sizeof *logit_rows);
    keep_rows(s, r->kept_device + row0, n);
    r->batch.n_rows = n;
    r->batch.device.logit_rows = r->logit_rows_device + logit0;
    s->b = &r->batch;
    model_rope_tables(s);
}
