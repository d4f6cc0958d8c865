/* parts.c - context parallelism: which rows of a step's attention a rank computes.
 *
 * Each rank has a run of neighboring rows. Later rows read more keys, so runs are not equally long: in every
 * layer they have equal work, as the layer's sizes say. All ranks know all positions, and find the same
 * borders. No bit depends on them. */
#include <assert.h>

#include "base/checked.h"
#include "model/rows_internal.h"

/* Steps without a prompt are not divided, nor those that rebuild windows, in which most rows are dropped. */
enum { MOST_DECODED = HD_MAX_DRAFTS + 1 };

bool model_may_divide_rows(const hd_model *m) {
    return m->shard->parallel.cp > 1;
}

bool model_divides_rows(const model_step *s) {
    const int32_t part = s->m->env.cp_part ? s->m->env.cp_part : HD_LEAST_CP_PART;
    return model_may_divide_rows(s->m) && !s->rest->rebuilds &&
           s->b->most_rows > MOST_DECODED && s->b->n_rows >= s->m->shard->parallel.cp * part;
}

bool model_may_gather_keys(const hd_model *m) {
    return model_may_divide_rows(m) && !m->env.comm->slower_than_products;
}

bool model_gathers_keys(const model_step *s) {
    return model_may_gather_keys(s->m) && model_divides_rows(s);
}

/* ---- where parts begin ---- */

/* Multiplications of a row's attention in a layer, of all heads: `row` of its products, `key` for each vector
 * and entry that it reads, `score` for each entry that its indexer compares. */
typedef struct row_work {
    int64_t row, key, score;
    int32_t window, ratio, selected; /* 0: no window; no entries; every entry is read */
} row_work;

static row_work work_of(const hd_model_spec *c, int32_t layer) {
    const hd_layer_spec *kind = &c->layers[layer];
    const bool csa = kind->attention == HD_ATTN_CSA, hca = kind->attention == HD_ATTN_HCA;
    const bool selects = csa || kind->attention == HD_ATTN_MLA_SPARSE;
    const int64_t hidden = c->hidden, q_rank = c->q_rank, heads = c->n_heads;
    row_work w = {.ratio = 1};
    if (selects) {
        w.selected = c->index_topk;
        w.score = (int64_t)c->index_heads * c->index_dim;
        w.row = hidden * c->index_heads + q_rank * w.score;
    }
    if (hd_is_hybrid(c)) {
        const int64_t keys = c->head_dim + (csa ? 4 * (c->head_dim + c->index_dim) : 0) +
                             (hca ? 2 * c->head_dim : 0);
        w.row += hidden * (q_rank + keys + (int64_t)c->o_groups * c->o_rank) +
                 heads * c->head_dim * (q_rank + c->o_rank);
        w.key = 2 * heads * c->head_dim;
        w.window = c->window;
        w.ratio = kind->compress_ratio;
    } else {
        const int64_t key = c->kv_rank + c->rope_dim, q = heads * (c->nope_dim + c->rope_dim);
        w.row += hidden * (q_rank + key + (selects ? c->index_dim : 0) + heads * c->v_dim) +
                 (q_rank ? q_rank : hidden) * q + heads * c->kv_rank * (c->nope_dim + c->v_dim);
        w.key = heads * (key + c->kv_rank);
    }
    return w;
}

/* Sums of min(i, most) and of i / ratio over i = 1 .. n. */
static int64_t sum_of_least(int64_t n, int64_t most) {
    const int64_t k = hd_min_i64(n, most);
    return k * (k + 1) / 2 + (n - k) * most;
}

static int64_t sum_of_quotients(int64_t n, int64_t ratio) {
    const int64_t q = n / ratio;
    return ratio * q * (q - 1) / 2 + q * (n - ratio * q + 1);
}

/* Of the first n positions of a sequence. */
static int64_t work_before(const row_work *w, int64_t n) {
    const int64_t all = w->row * n + w->key * sum_of_least(n, w->window);
    if (!w->ratio) return all;
    const int64_t seen = sum_of_quotients(n, w->ratio);
    const int64_t end = w->selected ? hd_min_i64(n, (int64_t)w->selected * w->ratio) : n;
    const int64_t read = sum_of_quotients(end, w->ratio) + (n - end) * w->selected;
    return all + w->key * read + w->score * seen;
}

/* Of the first n rows of the step, of which sequences have neighboring positions. */
static int64_t work_of_rows(const row_work *w, const hd_batch *b, int32_t n) {
    const hd_batch_view *v = &b->host;
    int64_t all = 0;
    for (int32_t q = 0; q < b->n_seqs && v->first_row[q] < n; q++) {
        const int32_t first = v->first_row[q], end = hd_min_i32(v->first_row[q + 1], n);
        if (first == end) continue;
        assert(v->pos[end - 1] == v->pos[first] + end - 1 - first);
        all += work_before(w, v->pos[end - 1] + 1) - work_before(w, v->pos[first]);
    }
    return all;
}

/* Returns the first row of a part: the work of those before it is nearest to that of the parts before it. */
static int32_t first_of(const row_work *w, const hd_batch *b, int64_t all, int32_t part,
                        int32_t parts) {
    const int64_t before = all / parts * part + all % parts * part / parts;
    int32_t low = 0, high = b->n_rows;
    while (low < high) {
        const int32_t middle = low + (high - low) / 2;
        if (work_of_rows(w, b, middle) < before) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    if (low == 0) return 0;
    const int64_t above = work_of_rows(w, b, low) - before;
    return before - work_of_rows(w, b, low - 1) < above ? low - 1 : low;
}

hd_extent model_part_of(const hd_model_spec *c, const hd_batch *b, int32_t layer, int32_t part,
                        int32_t parts) {
    const row_work w = work_of(c, layer);
    const int64_t all = work_of_rows(&w, b, b->n_rows);
    const int32_t first = first_of(&w, b, all, part, parts);
    const int32_t end = part + 1 < parts ? first_of(&w, b, all, part + 1, parts) : b->n_rows;
    return (hd_extent){first, end - first};
}

hd_extent model_own_rows(const model_step *s, int32_t layer) {
    const hd_rank_group g =
        hd_parallel_group(&s->m->shard->parallel, s->m->shard->rank, HD_GROUP_CP);
    return model_part_of(s->m->env.spec, s->b, layer, g.index, g.n);
}

/* ---- a rank's part of a step ---- */

static void move_rows(hd_rows *x, int64_t elements) {
    if (x->data) *x = hd_rows_at(*x, elements);
}

bool model_own_part(const model_step *s, int32_t layer, model_part *to) {
    to->step = *s;
    to->first = 0;
    if (!model_divides_rows(s)) return s->b->n_rows > 0;
    const hd_model_spec *c = s->m->env.spec;
    const hd_extent own = model_own_rows(s, layer);
    const int64_t first = own.first, heads = s->m->shard->n_heads;
    const bool mla = !hd_is_hybrid(c);
    const int64_t kv = mla ? c->kv_rank + c->rope_dim : c->head_dim;
    int32_t width;
    model_head_columns(s->m, &width);
    to->first = own.first;
    to->batch = *s->b;
    to->batch.n_rows = own.n;
    to->batch.device.seq += first;
    to->batch.device.pos += first;
    to->batch.device.last += first;
    to->t = *s->t;
    model_activations *t = &to->t;
    move_rows(&t->h, first * c->hidden);
    move_rows(&t->y, first * c->hidden);
    move_rows(&t->q_low, first * c->q_rank);
    move_rows(&t->q_low_raw, first * c->q_rank);
    move_rows(&t->q, first * heads * (mla ? c->nope_dim + c->rope_dim : c->head_dim));
    move_rows(&t->q_wide, first * heads * (c->kv_rank + c->rope_dim));
    move_rows(&t->context, first * heads * (mla ? c->kv_rank : c->head_dim));
    move_rows(&t->o_low, first * width);
    move_rows(&t->kv, first * kv);
    move_rows(&t->kv_raw, first * kv);
    move_rows(&t->index_k, first * c->index_dim);
    move_rows(&t->index_q, first * c->index_heads * c->index_dim);
    if (t->index_weight) t->index_weight += first * c->index_heads;
    if (t->selected) t->selected += first * c->index_topk;
    t->cos_sin += first * c->rope_dim;
    t->cos_sin_compress += first * c->rope_dim;
    to->step.b = &to->batch;
    to->step.t = t;
    return own.n > 0;
}
