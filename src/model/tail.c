/* tail.c - layers with tails compute only the last positions before an end (kv.h): after what every
 * position leaves is stored, the rows that the next layer does not need are dropped.
 *
 * The host knows which rows these are, so the batch shrinks and every array of its rows with it. The
 * rows that are left keep their order. What is stored, sampled and drafted is the same, bit for bit,
 * as if all rows went on: they are rows that nothing reads. Several attention groups compute all
 * rows, because they would have to agree on the rows that are left. */
#include <assert.h>
#include <string.h>

#include "base/checked.h"
#include "model/beside_internal.h"

/* Numbers of the rows that are left, on the host or on the device. */
typedef struct numbers {
    int32_t *kept;       /* [rows] among the rows before */
    int32_t *logit_rows; /* [logits] of them those that need logits */
    int32_t *first_row;  /* [rows + 1] of every sequence */
} numbers;

static size_t n_numbers(const hd_model *m) {
    return 2 * (size_t)m->limits.rows + (size_t)m->limits.logits + 1;
}

static numbers numbers_at(const hd_model *m, int32_t *base, int32_t i) {
    int32_t *at = base + (size_t)i * n_numbers(m);
    return (numbers){at, at + m->limits.rows, at + m->limits.rows + m->limits.logits};
}

void model_place_rest(hd_model *m, hd_arena *device, hd_arena *host) {
    const size_t rows = (size_t)m->limits.rows, each = sizeof(int32_t);
    const size_t all = ((size_t)m->pages.tail.n + 1) * n_numbers(m);
    model_rest *r = &m->rest;
    hd_batch_view *v = &r->batch.device;
    int32_t **const of_rows[] = {&v->tokens, &v->next_tokens, &v->pos, &v->seq, &v->phase};
    for (size_t k = 0; k < HD_LEN(of_rows); k++) {
        *of_rows[k] = hd_arena_take(device, rows * each, 64);
    }
    r->device = hd_arena_take(device, all * each, 64);
    r->host = hd_arena_take(host, all * each, 64);
    r->rows = hd_arena_take(host, rows * each, 64);
}

static bool drops_rows(const model_step *s, int32_t layer) {
    const hd_kv_tail *tail = &s->m->pages.tail;
    if (!s->whole->host.ends || s->whole->group_rows) return false;
    if (tail->rebuilds && !s->rest->rebuilds) return false;
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

/* Of the n rows that are left the first that is not before a row of the step's batch. */
static int32_t first_from(const model_rest *r, int32_t n, int32_t row) {
    int32_t low = 0, high = n;
    while (low < high) {
        const int32_t middle = (low + high) / 2;
        if (r->rows[middle] < row) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

/* The rows that need logits are among those that are left, in no order. */
static void number_logits(const model_rest *r, const hd_batch *whole, int32_t n, int32_t *out) {
    for (int32_t k = 0; k < whole->n_logits; k++) {
        out[k] = first_from(r, n, whole->host.logit_rows[k]);
        assert(out[k] < n && r->rows[out[k]] == whole->host.logit_rows[k]);
    }
}

static void number_seqs(const model_rest *r, const hd_batch *whole, int32_t n, int32_t *out) {
    for (int32_t q = 0; q <= whole->n_seqs; q++) {
        out[q] = first_from(r, n, whole->host.first_row[q]);
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
    left.device.rebuilt = from->rebuilt;
    left.device.windows_from = from->windows_from;
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

/* Uploads numbers i, and returns where they are. Those of every layer have a place of their own, as the
 * device may read them later. */
static numbers upload(const model_step *s, int32_t i) {
    const size_t bytes = n_numbers(s->m) * sizeof(int32_t);
    const numbers host = numbers_at(s->m, s->rest->host, i);
    const numbers device = numbers_at(s->m, s->rest->device, i);
    hd_stream_upload(s->stream, device.kept, host.kept, bytes);
    return device;
}

void model_drop_rows(model_step *s, int32_t layer) {
    const hd_model *m = s->m;
    model_rest *r = s->rest;
    const hd_batch *whole = s->whole;
    if (!drops_rows(s, layer)) return;
    const int32_t i = layer + 1 - m->pages.tail.first;
    const numbers host = numbers_at(m, r->host, i);
    const int32_t n = choose_rows(r, whole, &m->pages, i, s->b->n_rows, host.kept);
    if (n == s->b->n_rows) return;
    model_join(s); /* what runs beside may read what moves */
    if (!r->on) copy_batch(s, whole);
    r->on = true;
    number_logits(r, whole, n, host.logit_rows);
    number_seqs(r, whole, n, host.first_row);
    const numbers device = upload(s, i);
    keep_rows(s, device.kept, n);
    r->batch.n_rows = n;
    r->batch.device.logit_rows = device.logit_rows;
    r->batch.device.first_row = device.first_row;
    s->b = &r->batch;
    model_rope_tables(s);
}

/* The rows that need logits, and the tokens after rows, are known since the step. */
void model_draft_rest(model_step *s) {
    const hd_model *m = s->m;
    const hd_batch *whole = s->whole;
    model_rest *r = s->rest;
    if (!r->on) return;
    const int32_t n = r->batch.n_rows, i = m->pages.tail.n;
    const numbers host = numbers_at(m, r->host, i);
    memcpy(host.kept, r->rows, (size_t)n * sizeof *r->rows);
    number_logits(r, whole, n, host.logit_rows);
    const numbers device = upload(s, i);
    int32_t *next = r->batch.device.next_tokens;
    hd_stream_copy(s->stream, next, whole->device.next_tokens,
                   (size_t)whole->n_rows * sizeof *next);
    keep(s, device.kept, n, next, 1);
    r->batch.n_logits = whole->n_logits;
    r->batch.device.logit_rows = device.logit_rows;
    s->b = &r->batch;
}
