/* test_ops_resident.c - entries that are fetched into a buffer when rows choose them: what a row then
 * reads is what the pool has, also after the pool was written, and a plain list says which entries
 * are where. */
#include "ops/ops_fixture.h"

#include <stdlib.h>
#include <string.h>

enum { SEQS = 3, PAGE = 4, MOST_ROWS = 5, RATIO = 2, MOST_CHOICES = 2048 };
static const int32_t seq_entries[SEQS] = {37, 20, 51}, many_entries[SEQS] = {900, 1200, 700};

typedef enum how { ANY, ALL_SAME, STORM, FEW } how; /* what rows choose */

typedef struct resident_case {
    hd_paged pool;
    const int32_t *entries; /* [SEQS] of the pool */
    int32_t n_pool;         /* entries of the pool, those of no sequence among them */
    int32_t n, top_k, rows, passes;
    bool writes;                   /* entries change between passes */
    const int32_t *seq, *selected; /* [passes, rows], [passes, rows, top_k] */
    const int32_t *written;        /* [passes] position in sequence 0 */
} resident_case;

/* ---- a plain list of rows ---- */

typedef struct plain {
    int32_t entry, row;
    int64_t age; /* passes since it was read */
} plain;

static int oldest_first(const void *x, const void *y) {
    const plain *a = x, *b = y;
    if (a->age != b->age) return a->age < b->age ? 1 : -1;
    return a->row - b->row;
}

static int by_row(const void *x, const void *y) {
    return ((const plain *)x)->row - ((const plain *)y)->row;
}

static int32_t find(const plain *all, int32_t n, int32_t entry) {
    for (int32_t i = 0; i < n; i++) {
        if (all[i].entry == entry) return i;
    }
    return -1;
}

static int32_t pool_entry(const resident_case *t, int32_t seq, int32_t e) {
    return (int32_t)(page_entry(&t->pool, seq, e) - (float *)t->pool.rows.data) / t->pool.width;
}

/* Brings `wanted` into `all`, which is in order of rows. Returns how many were missing. */
static int32_t pass_plainly(plain *all, int32_t n, const int32_t *wanted, int32_t n_wanted) {
    int32_t missing[MOST_CHOICES], n_missing = 0;
    for (int32_t i = 0; i < n; i++) {
        if (all[i].age < HD_RESIDENT_AGES - 1) all[i].age++;
    }
    for (int32_t i = 0; i < n_wanted; i++) {
        const int32_t at = find(all, n, wanted[i]);
        if (at >= 0) {
            all[at].age = 0;
            continue;
        }
        int32_t k = 0;
        while (k < n_missing && missing[k] != wanted[i]) k++;
        if (k == n_missing) missing[n_missing++] = wanted[i];
    }
    qsort(all, (size_t)n, sizeof *all, oldest_first);
    qsort(all, (size_t)n_missing, sizeof *all, by_row);
    for (int32_t i = 0; i < n_missing; i++) {
        all[i].entry = missing[i];
        all[i].age = 0;
    }
    qsort(all, (size_t)n, sizeof *all, by_row);
    return n_missing;
}

/* ---- the operator ---- */

static void *take_zeros(size_t bytes) {
    return memset(take(bytes), 0, bytes);
}

static hd_resident take_buffer(const resident_case *t) {
    const size_t n = (size_t)t->n, word = sizeof(int32_t);
    return (hd_resident){
        .rows = hd_f32(take_nan((int64_t)t->n * t->pool.width)),
        .n = t->n,
        .row_of = take_zeros((size_t)t->n_pool * word),
        .owner = take_zeros(n * word),
        .used = take_zeros(n * sizeof(int64_t)),
        .state = take_zeros(sizeof(hd_resident_state)),
        .counts = take_zeros(sizeof(hd_resident_counts)),
        .missed = take_ints(t->n),
        .victim = take_ints(t->n),
    };
}

/* The group of sequence 0 that ends at a position has other values. */
static void write_entry(const resident_case *t, const hd_ops *ops, hd_stream *s,
                        const hd_paged *pool, const hd_resident *b, int32_t pass, plain *list) {
    const int32_t seq = 0, *pos = &t->written[pass], entry = *pos / RATIO;
    ops->forget_entries(s, &(hd_forget_entries_args){.entries = *pool,
                                                     .row_of = b->row_of,
                                                     .seq = take_copy(&seq, sizeof seq),
                                                     .pos = take_copy(pos, sizeof *pos),
                                                     .rows = 1,
                                                     .ratio = RATIO});
    finish("forget_entries", s);
    if ((*pos + 1) % RATIO) return;
    for (int32_t c = 0; c < pool->width; c++) page_entry(pool, seq, entry)[c] += 1.0f;
    const int32_t at = find(list, t->n, pool_entry(t, seq, entry));
    if (at >= 0) list[at].entry = -1;
}

static void check_rows(const resident_case *t, const hd_paged *pool, const hd_resident *b,
                       int32_t pass, const int32_t *out, const plain *list) {
    const int32_t *seq = t->seq + pass * t->rows;
    const int32_t *selected = t->selected + pass * t->rows * t->top_k;
    for (int32_t i = 0; i < t->rows * t->top_k; i++) {
        const int32_t e = selected[i];
        if (e < 0) {
            assert_int_equal(out[i], -1);
            continue;
        }
        const int32_t at = find(list, t->n, pool_entry(t, seq[i / t->top_k], e));
        assert_int_equal(out[i], at);
        check_bits("entry", (float *)b->rows.data + (int64_t)at * pool->width,
                   page_entry(pool, seq[i / t->top_k], e), pool->width);
    }
}

static int32_t wanted_of(const resident_case *t, int32_t pass, int32_t *out) {
    int32_t n = 0;
    for (int32_t i = 0; i < t->rows * t->top_k; i++) {
        const int32_t e = t->selected[pass * t->rows * t->top_k + i];
        const int32_t seq = t->seq[pass * t->rows + i / t->top_k];
        if (e >= 0) out[n++] = pool_entry(t, seq, e);
    }
    return n;
}

static void run_resident(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                         int32_t n, void *const *out) {
    const resident_case *t = c->args;
    const hd_resident b = take_buffer(t);
    hd_paged pool = t->pool;
    plain *list = calloc((size_t)t->n, sizeof *list);
    int32_t *wanted = take_ints((int64_t)t->rows * t->top_k);
    int64_t selected = 0, fetched = 0;
    (void)first, (void)n;
    pool.rows = hd_f32(
        take_copy(pool.rows.data, sizeof(float) * (size_t)t->n_pool * (size_t)pool.width));
    for (int32_t i = 0; i < t->n; i++) list[i] = (plain){.entry = -1, .row = i};
    for (int32_t p = 0; p < t->passes; p++) {
        int32_t *rows = (int32_t *)out[0] + p * t->rows * t->top_k;
        if (t->writes) write_entry(t, ops, s, &pool, &b, p, list);
        ops->resident(s, &(hd_resident_args){.out = rows,
                                             .selected = t->selected + p * t->rows * t->top_k,
                                             .entries = pool,
                                             .buffer = b,
                                             .seq = t->seq + p * t->rows,
                                             .rows = t->rows,
                                             .top_k = t->top_k});
        finish("resident", s);
        const int32_t n_wanted = wanted_of(t, p, wanted);
        selected += n_wanted;
        fetched += pass_plainly(list, t->n, wanted, n_wanted);
        check_rows(t, &pool, &b, p, rows, list);
        assert_int_equal(b.counts->selected, selected);
        assert_int_equal(b.counts->fetched, fetched);
    }
    free(list);
}

static int by_number(const void *x, const void *y) {
    return *(const int32_t *)x - *(const int32_t *)y;
}

/* Ascending entries, then -1. */
static void choose(const resident_case *t, how h, int32_t pass, int32_t row, int32_t seq,
                   int32_t *out) {
    const int32_t all = t->entries[seq];
    const int32_t n = h == FEW ? random_below(t->top_k + 1) : t->top_k;
    bool taken[MOST_CHOICES] = {false};
    for (int32_t i = 0; i < t->top_k; i++) {
        out[i] = -1;
        if (i >= n) continue;
        int32_t e = h == ANY || h == FEW ? random_below(all)
                    : h == ALL_SAME      ? i
                                         : (pass * t->rows + row) * t->top_k + i;
        while (taken[e % all]) e++;
        taken[e % all] = true;
        out[i] = e % all;
    }
    qsort(out, (size_t)n, sizeof *out, by_number);
}

static void check_case(how h, int32_t width, int32_t n, int32_t top_k, int32_t rows,
                       int32_t passes, bool writes) {
    const int32_t *entries = rows > MOST_ROWS ? many_entries : seq_entries;
    resident_case t = {.pool = take_pages(SEQS, entries, PAGE, width, 1.0f),
                       .entries = entries,
                       .n = n,
                       .top_k = top_k,
                       .rows = rows,
                       .passes = passes,
                       .writes = writes};
    t.n_pool = PAGE; /* of the page that belongs to no sequence */
    for (int32_t s = 0; s < SEQS; s++) t.n_pool += (entries[s] + PAGE - 1) / PAGE * PAGE;
    int32_t *seq = take_ints(passes * rows), *written = take_ints(passes);
    int32_t *selected = take_ints((int64_t)passes * rows * top_k);
    for (int32_t p = 0; p < passes; p++) {
        written[p] = random_below(RATIO * entries[0]);
        for (int32_t r = 0; r < rows; r++) {
            const int32_t i = p * rows + r;
            seq[i] = h == ALL_SAME ? 0 : random_below(SEQS);
            choose(&t, h, p, r, seq[i], selected + (int64_t)i * top_k);
        }
    }
    t.seq = seq;
    t.selected = selected;
    t.written = written;
    check_op(&(op_case){.name = "resident",
                        .rows = passes * rows,
                        .n_outs = 1,
                        .width = {top_k},
                        .tolerance = {0},
                        .all_rows = true,
                        .not_recorded = true,
                        .args = &t,
                        .run = run_resident});
}

/* Buffers from one pass's needs to all entries; rows that choose the same, others, few or none. */
void op_resident(void **state) {
    (void)state;
    for (how h = ANY; h <= FEW; h++) {
        check_case(h, 8, 4, 4, 1, 40, true);
        check_case(h, 5, 20, 4, 5, 30, true);
        check_case(h, 8, 33, 7, 3, 30, true);
        check_case(h, 3, 112, 6, MOST_ROWS, 30, true);
    }
    check_case(ANY, 1, 12, 2, 1, HD_RESIDENT_AGES + 60, false); /* rows as old as can be */
    for (how h = ANY; h <= FEW; h++) check_case(h, 8, 1700, 40, 40, 5, true); /* many threads */
}

/* A pass that needs more rows than there are is refused, and changes nothing. */
void resident_refuses_too_much(void **state) {
    (void)state;
    const int32_t selected[4] = {0, 1, 2, 3}, seq[2] = {0, 0};
    resident_case t = {
        .pool = take_pages(SEQS, seq_entries, PAGE, 4, 1.0f), .n_pool = 128, .n = 3};
    const hd_resident b = take_buffer(&t);
    for (int32_t i = 0; i < fix.n_tables; i++) {
        hd_err err = {0};
        hd_stream *s = stream_for(&fix.table[i], fix.stream[0]);
        fix.table[i].resident(
            s, &(hd_resident_args){.out = take_ints(4),
                                   .selected = take_copy(selected, sizeof selected),
                                   .entries = t.pool,
                                   .buffer = b,
                                   .seq = take_copy(seq, sizeof seq),
                                   .rows = 2,
                                   .top_k = 2});
        assert_int_equal(hd_stream_sync(s, &err), HD_EINVAL);
        assert_non_null(strstr(err.msg, "2 rows of 2 choices for a buffer of 3"));
        assert_int_equal(b.state->pass, 0);
    }
}

/* ---- entries that are written ---- */

enum { FORGET_ROWS = 9 };

static void run_forget(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                       int32_t n, void *const *out) {
    hd_forget_entries_args a = *(const hd_forget_entries_args *)c->args;
    a.row_of = take_ints(128);
    a.seq += first;
    a.pos += first;
    a.rows = n;
    ops->forget_entries(s, &a);
    finish("forget_entries", s);
    for (int32_t r = 0; r < n; r++) {
        const int32_t at = (int32_t)(page_entry(&a.entries, a.seq[r], a.pos[r] / a.ratio) -
                                     (float *)a.entries.rows.data);
        ((int32_t *)out[0])[r] = a.row_of[at / a.entries.width];
        assert_int_equal(a.row_of[at / a.entries.width],
                         (a.pos[r] + 1) % a.ratio == 0 ? -1 : 0);
    }
}

/* Each group has one row here. */
void op_forget_entries(void **state) {
    (void)state;
    for (int32_t ratio = 1; ratio <= 4; ratio++) {
        int32_t *seq = take_ints(FORGET_ROWS), *pos = take_ints(FORGET_ROWS);
        for (int32_t r = 0; r < FORGET_ROWS; r++) {
            seq[r] = r % SEQS;
            pos[r] = r * ratio + random_below(ratio);
        }
        const hd_forget_entries_args a = {.entries =
                                              take_pages(SEQS, seq_entries, PAGE, 4, 1.0f),
                                          .seq = seq,
                                          .pos = pos,
                                          .ratio = ratio};
        check_op(&(op_case){.name = "forget_entries",
                            .rows = FORGET_ROWS,
                            .n_outs = 1,
                            .width = {1},
                            .tolerance = {0},
                            .not_recorded = true,
                            .args = &a,
                            .run = run_forget});
    }
}
