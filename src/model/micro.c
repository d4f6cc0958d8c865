/* micro.c - a step in several micro-batches (two-batch overlap): while rows of one travel, another
 * computes.
 *
 * A micro-batch is a run of neighboring rows. A sequence that is cut continues in the next one: it has
 * written its keys of a layer before the next one reads them, because both run there one after the
 * other, on one stream. So no bit depends on where a step is cut. Ranks of all attention groups cut
 * alike, and one with fewer rows than micro-batches has some without rows. */
#include <assert.h>
#include <stdlib.h>

#include "base/checked.h"
#include "model/rows_internal.h"

_Static_assert((int)HD_MAX_MICRO == (int)HD_COMM_MAX_INFLIGHT,
               "each may have rows on their way");

/* Whether some steps drop rows, which moves those that are left, and so are not cut. */
static bool has_whole_steps(const hd_model *m) {
    return m->pages.tail.n > 0 && m->shard->parallel.dp == 1;
}

/* Draft blocks, and where the device alone knows the rows whole sequences, stay together. */
void model_plan_micro(hd_model *m) {
    const int32_t rows = m->limits.rows, from = m->limits.micro_from;
    const int32_t together = HD_MAX_DRAFTS + 1;
    m->n_micro = rows < from ? 1 : hd_max_i32(m->limits.n_micro, 1);
    const int32_t part = (int32_t)hd_ceil_div(rows, m->n_micro) + together;
    m->micro_rows = m->n_micro > 1 ? hd_min_i32(part, rows) : rows;
    m->whole_rows =
        has_whole_steps(m) ? rows : hd_max_i32(m->micro_rows, hd_min_i32(from, rows));
}

hd_status model_open_micro(hd_model *m, hd_err *err) {
    const size_t groups = (size_t)m->shard->parallel.dp;
    m->micro_group_rows = calloc(HD_MAX_MICRO * groups, sizeof *m->micro_group_rows);
    return m->micro_group_rows ? HD_OK : HD_FAIL(err, HD_ENOMEM, "no memory for micro-batches");
}

/* Whether a layer may drop rows of the step, so that those that are left move (tail.c). */
static bool drops_rows(const hd_model *m, const hd_batch *b) {
    if (!has_whole_steps(m) || !b->host.ends) return false;
    if (m->pages.tail.rebuilds) return hd_batch_rebuilds(b);
    for (int32_t r = 0; r < b->n_rows; r++) {
        const hd_kv_ends *ends = &b->host.ends[b->host.seq[r]];
        if (!hd_kv_is_needed(&m->pages, m->pages.tail.n - 1, ends, b->host.pos[r])) return true;
    }
    return false;
}

int32_t hd_model_n_micro(const hd_model *m, const hd_batch *b) {
    const int32_t least = hd_max_i32(m->n_micro, m->limits.micro_from);
    int32_t rows = b->n_rows;
    for (int32_t i = 0; b->group_rows && i < m->shard->parallel.dp; i++) {
        rows = hd_max_i32(rows, b->group_rows[i]);
    }
    if (m->n_micro == 1 || drops_rows(m, b)) return 1;
    return rows >= least || rows > m->whole_rows ? m->n_micro : 1;
}

static void cut_groups(const hd_model *m, const hd_batch *whole, int32_t i) {
    const int32_t dp = m->shard->parallel.dp;
    int32_t *rows = m->micro_group_rows + i * dp;
    for (int32_t k = 0; whole->group_rows && k < dp; k++) {
        const int32_t n = whole->group_rows[k];
        rows[k] = hd_batch_micro_row(whole, n, i + 1) - hd_batch_micro_row(whole, n, i);
    }
}

static int32_t experts_of_rows(const model_step *s, int32_t layer) {
    return model_step_rows(s, HD_GROUP_ETP).n * hd_layer_route(s->m->env.spec, layer).top_k;
}

void model_place_choices(const model_step *whole, model_step *steps, int32_t n, int32_t layer) {
    int32_t *at = whole->t->expert;
    for (int32_t i = 0; i < n; i++) {
        steps[i].t->expert = at;
        at += experts_of_rows(&steps[i], layer);
    }
}

void model_keep_choices(const model_step *whole, const model_step *last, int32_t layer) {
    whole->t->expert = last->t->expert + experts_of_rows(last, layer);
    assert(whole->t->expert <= whole->t->choices + whole->m->n_choices);
}

int32_t model_cut(hd_model *m, const model_step *whole, model_step steps[HD_MAX_MICRO]) {
    const int32_t n = hd_max_i32(1, whole->b->n_micro);
    assert(n <= m->n_micro && (n > 1 || whole->b->n_rows <= m->whole_rows));
    for (int32_t i = 0; n > 1 && i < n; i++) {
        hd_batch *b = &m->micro_batch[i];
        *b = hd_batch_micro(whole->b, i);
        assert(b->n_rows <= m->micro_rows);
        cut_groups(m, whole->b, i);
        if (whole->b->group_rows)
            b->group_rows = m->micro_group_rows + i * m->shard->parallel.dp;
        model_move_activations(&m->micro[i], whole->t, m,
                               hd_batch_micro_row(whole->b, whole->b->n_rows, i));
        steps[i] = *whole;
        steps[i].b = steps[i].whole = b;
        steps[i].t = &m->micro[i];
        steps[i].cut = true;
        steps[i].lane_change = m->lane_change[i];
        steps[i].fork = m->fork[i];
        steps[i].join = m->join[i];
    }
    return n;
}

int64_t hd_model_own_choices(hd_model *m, const hd_batch *b, int64_t at, int32_t layers,
                             float *out) {
    const int32_t top_k = m->env.spec->route.top_k, n_experts = m->env.spec->route.n_experts;
    const bool all = hd_model_routes_all(m);
    model_step whole = model_step_of(m, NULL, b), steps[HD_MAX_MICRO];
    const int32_t n = model_cut(m, &whole, steps);
    for (int32_t k = 0; k < layers * n; k++) {
        const int32_t i = k % n;
        const model_rows r = model_step_rows(n > 1 ? &steps[i] : &whole, HD_GROUP_ETP);
        const int32_t first = n > 1 ? hd_batch_micro_row(b, b->n_rows, i) : 0;
        const int32_t row = first + (all ? r.first : r.own_row), rows = all ? r.n : r.own;
        float *to = out + ((int64_t)(k / n) * b->n_rows + row) * top_k;
        const int64_t from = at + (int64_t)(all ? 0 : r.own_first) * top_k;
        for (int32_t c = 0; c < rows * top_k; c++) {
            const int32_t slot = m->limits.keeps_slots ? m->acts.slots[from + c] : -1;
            to[c] = (float)HD_CHOICE(m->acts.choices[from + c], slot, n_experts);
        }
        at += (int64_t)r.n * top_k;
    }
    return at;
}
