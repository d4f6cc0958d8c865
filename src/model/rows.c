/* rows.c - the rows that ranks compute together outside the attention, and the exchanges of their
 * columns.
 *
 * A rank owns an equal part of the rows of its attention group. Ranks that share an MLP, experts
 * or the LM head compute the rows that they own together. If these are rows of one attention
 * group, each of them has them already; if not, they are gathered first and return afterwards.
 * At the end the attention group gathers the rows that its other ranks computed. */
#include "model/rows_internal.h"

#include "base/checked.h"

static const hd_parallel_config *layout(const hd_model *m) {
    return &m->shard->parallel;
}

static hd_rank_group group_at(const hd_model *m, hd_group group) {
    return hd_parallel_group(layout(m), m->shard->rank, group);
}

bool model_shares(const hd_model *m, hd_group group) {
    return group_at(m, group).n > 1;
}

bool model_gathers_columns(const hd_model *m, hd_group group) {
    return model_shares(m, group) && !layout(m)->sum_in_ranks;
}

bool model_rows_are_foreign(const hd_model *m, hd_group group) {
    return layout(m)->tp % group_at(m, group).n != 0;
}

bool model_rows_are_few(const hd_model *m, hd_group group) {
    return group_at(m, group).n % layout(m)->tp != 0;
}

int32_t model_most_rows(const hd_model *m, hd_group group, int32_t rows) {
    if (!model_rows_are_foreign(m, group)) return rows;
    return group_at(m, group).n * (int32_t)hd_ceil_div(rows, layout(m)->tp);
}

/* ---- which rows ---- */

/* The part of its attention group's rows that a rank owns. */
static hd_extent owned(const hd_parallel_config *l, int32_t rank, int32_t rows) {
    const int32_t i = rank % l->tp;
    const int32_t first = (int32_t)((int64_t)rows * i / l->tp);
    return (hd_extent){first, (int32_t)((int64_t)rows * (i + 1) / l->tp) - first};
}

model_rows model_rows_of(const model_step *s, hd_group group, int32_t rows,
                         const int32_t *group_rows) {
    const hd_parallel_config *l = layout(s->m);
    const hd_rank_group g = group_at(s->m, group);
    const hd_extent own = owned(l, s->m->shard->rank, rows);
    model_rows r = {
        .own_row = own.first, .own = own.n, .foreign = model_rows_are_foreign(s->m, group)};
    for (int32_t k = 0; k < g.n; k++) {
        const int32_t rank = g.first + k, n = group_rows ? group_rows[rank / l->tp] : rows;
        if (k == g.index) r.own_first = r.n;
        r.n += owned(l, rank, n).n;
    }
    r.first = own.first - r.own_first;
    return r;
}

int32_t model_rows_of_rank(const model_step *s, hd_group group, int32_t rank) {
    const hd_parallel_config *l = layout(s->m);
    const hd_rank_group g = hd_parallel_group(l, rank, group);
    const int32_t *group_rows = s->b->group_rows;
    int32_t n = 0;
    for (int32_t k = 0; k < g.n; k++) {
        const int32_t one = g.first + k * g.stride;
        n += owned(l, one, group_rows ? group_rows[one / l->tp] : s->b->n_rows).n;
    }
    return n;
}

model_rows model_step_rows(const model_step *s, hd_group group) {
    return model_rows_of(s, group, s->b->n_rows, s->b->group_rows);
}

hd_rows model_rows_in(const model_rows *r, hd_rows batch, hd_rows gathered, int32_t cols) {
    return r->foreign ? gathered : hd_rows_at(batch, (int64_t)r->first * cols);
}

/* ---- exchanges ---- */

static int64_t bytes_of(hd_rows x, int64_t elements) {
    return elements * hd_dtype_bits(x.type) / 8;
}

static int32_t words_of(hd_rows x, int32_t elements) {
    return (int32_t)(bytes_of(x, elements) / (int64_t)sizeof(float));
}

static void copy_rows(hd_stream *s, hd_rows to, int32_t to_row, hd_rows from, int32_t from_row,
                      int32_t n, int32_t cols) {
    if (n == 0) return;
    hd_stream_copy(s, hd_rows_at(to, (int64_t)to_row * cols).data,
                   hd_rows_at(from, (int64_t)from_row * cols).data,
                   (size_t)bytes_of(from, (int64_t)n * cols));
}

/* x [n, words]: this rank has rows first .. first + own - 1, of `words` floats each. */
static void gather_rows(const model_step *s, hd_group group, void *x, int32_t n, int32_t words,
                        hd_extent own) {
    hd_comm_all_gather(s->m->env.comm, s->stream,
                       &(hd_all_gather_args){.group = group,
                                             .x = x,
                                             .rows = 1,
                                             .cols = n * words,
                                             .first = own.first * words,
                                             .own = own.n * words});
}

void model_fetch_rows(const model_step *s, hd_group group, const model_rows *r,
                      hd_rows gathered, hd_rows batch, int32_t cols) {
    copy_rows(s->stream, gathered, r->own_first, batch, r->own_row, r->own, cols);
    gather_rows(s, group, gathered.data, r->n, words_of(gathered, cols),
                (hd_extent){r->own_first, r->own});
}

void model_gather_ints(const model_step *s, hd_group group, int32_t *x, int32_t n, int32_t each,
                       hd_extent own) {
    _Static_assert(sizeof(int32_t) == sizeof(float), "integers travel as the bits of floats");
    gather_rows(s, group, x, n, each, own);
}

void model_fetch_ints(const model_step *s, hd_group group, const model_rows *r,
                      int32_t *gathered, const int32_t *batch) {
    if (r->own) {
        hd_stream_copy(s->stream, gathered + r->own_first, batch + r->own_row,
                       (size_t)r->own * sizeof *gathered);
    }
    model_gather_ints(s, group, gathered, r->n, 1, (hd_extent){r->own_first, r->own});
}

/* The rows of an attention group lie together. */
void model_return_rows(const model_step *s, hd_group group, const model_rows *r, hd_rows batch,
                       hd_rows gathered, int32_t rows, int32_t cols) {
    if (model_rows_are_few(s->m, group)) {
        copy_rows(s->stream, batch, r->own_row, gathered, r->own_first, r->own, cols);
    } else {
        copy_rows(s->stream, batch, 0, gathered, r->own_first - r->own_row, rows, cols);
    }
}

void model_spread_rows(const model_step *s, hd_rows batch, int32_t rows, int32_t cols) {
    const hd_extent own = owned(layout(s->m), s->m->shard->rank, rows);
    gather_rows(s, HD_GROUP_TP, batch.data, rows, words_of(batch, cols), own);
}

void model_gather_part(const model_step *s, int32_t layer, hd_rows x, int32_t cols) {
    if (cols == 0) return;
    gather_rows(s, HD_GROUP_CP, x.data, s->b->n_rows, words_of(x, cols),
                model_own_rows(s, layer));
}

void model_gather_parts(const model_step *s, int32_t layer) {
    if (model_divides_rows(s)) model_gather_part(s, layer, s->t->y, s->m->env.spec->hidden);
}

hd_rows model_columns_at(hd_rows x, hd_extent own, int32_t all) {
    return own.n == all ? x : hd_rows_strided(hd_rows_at(x, own.first), all);
}

void model_gather_columns(const model_step *s, hd_group group, hd_rows x, int32_t rows,
                          hd_extent own, int32_t all) {
    hd_comm_all_gather(s->m->env.comm, s->stream,
                       &(hd_all_gather_args){.group = group,
                                             .x = x.data,
                                             .rows = rows,
                                             .cols = words_of(x, all),
                                             .first = words_of(x, own.first),
                                             .own = words_of(x, own.n)});
}

/* The group has the rows of all of an attention group, and its members in their order. */
bool model_joins_later(const model_step *s, hd_group group) {
    const hd_parallel_config *l = layout(s->m);
    return s->m->env.comm && s->m->env.comm->joins_norms && !s->m->env.spec->hc_mult &&
           !s->apart && !s->cut && model_shares(s->m, group) &&
           group_at(s->m, group).n == l->tp;
}

void model_join_result(const model_step *s, hd_group group, hd_rows y, int32_t rows,
                       hd_extent own) {
    const int32_t hidden = s->m->env.spec->hidden;
    if (!layout(s->m)->sum_in_ranks) {
        model_gather_columns(s, group, y, rows, own, hidden);
        return;
    }
    hd_comm_all_reduce(
        s->m->env.comm, s->stream,
        &(hd_all_reduce_args){.group = group, .x = y, .n = (int64_t)rows * hidden});
}
