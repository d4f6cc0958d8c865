/* test_ops_compress.c - the compressor over steps of every size: one call, chunks, tokens,
 * many sequences and one, in any order, with gaps between positions and without, leave the
 * same entries and the same state. */
#include "ops/ops_fixture.h"

#include <math.h>
#include <string.h>

#include "base/checked.h"

enum { SEQS = 3, MAX_CHUNKS = 8, PAGE_ENTRIES = 3 };

typedef struct compress_shape {
    const char *name;
    int32_t ratio, width, pairs, ring, page_tokens;
    bool overlap;
    int32_t tokens[SEQS];
} compress_shape;

/* How the steps are divided: step i has chunk[i % n_chunks] tokens of every sequence; place i
 * of a step is sequence order[i], of n_seqs. */
typedef struct walk {
    int32_t n_chunks, chunk[MAX_CHUNKS];
    int32_t n_seqs, order[SEQS];
    /* Steps with gaps, instead of chunks. Each block of `ratio` positions is divided into
     * parts, and step i takes part i of every block. Or, with a run, step 0 takes all, and
     * step i takes run i - 1 of every n_parts runs again. */
    int32_t n_parts, run;
    /* Positions before `begin` are in no step, and their state is nowhere; entries before `from` are not
     * made. */
    int32_t begin, from;
} walk;

typedef struct world {
    const compress_shape *sh;
    const float *kv[SEQS], *gate[SEQS]; /* [tokens, wide] */
    const float *ape, *norm, *freq;
    hd_paged entries;
    int32_t *ring_table;
    int32_t entries_size, ring_stride, state_size, wide;
    const walk *way;
} world;

static world take_world(const compress_shape *sh) {
    world w = {.sh = sh, .wide = (sh->overlap ? 2 : 1) * sh->width};
    int32_t n_entries[SEQS], pages = 1, longest = 0, n_ring = 0;
    for (int32_t s = 0; s < SEQS; s++) {
        const int32_t n = sh->tokens[s];
        w.kv[s] = take_random((int64_t)n * w.wide, 1.0f);
        w.gate[s] = take_random((int64_t)n * w.wide, 3.0f);
        n_entries[s] = n / sh->ratio;
        pages += (n_entries[s] + PAGE_ENTRIES - 1) / PAGE_ENTRIES;
        longest = n > longest ? n : longest;
    }
    w.ape = take_random((int64_t)sh->ratio * w.wide, 1.0f);
    w.norm = take_random(sh->width, 2.0f);
    w.freq = take_random(sh->pairs, 1.0f);
    w.entries = take_pages(SEQS, n_entries, PAGE_ENTRIES, sh->width, 1.0f);
    w.entries_size = pages * PAGE_ENTRIES * sh->width;
    w.ring_stride = longest / sh->page_tokens + 1;
    w.ring_table = take_ints((int64_t)SEQS * w.ring_stride);
    for (int32_t i = SEQS * w.ring_stride; i-- > 0;) w.ring_table[i] = n_ring++;
    w.state_size = n_ring * sh->ring * 2 * w.wide;
    return w;
}

static int32_t *reordered(const int32_t *table, int32_t stride, const walk *way) {
    int32_t *copy = take_ints((int64_t)way->n_seqs * stride);
    for (int32_t i = 0; i < way->n_seqs; i++) {
        memcpy(copy + i * stride, table + way->order[i] * stride,
               (size_t)stride * sizeof *copy);
    }
    return copy;
}

/* Pages before the first position of a walk are nowhere. */
static int32_t *rings_of(const world *w) {
    const int32_t begin = w->way->begin / w->sh->page_tokens;
    int32_t *table = reordered(w->ring_table, w->ring_stride, w->way);
    for (int32_t i = 0; i < w->way->n_seqs * w->ring_stride; i++) {
        if (i % w->ring_stride < begin) table[i] = -1;
    }
    return table;
}

typedef struct step {
    int32_t *first_row, *pos; /* [SEQS + 1], [rows] */
    float *kv, *gate;
} step;

/* Whether step i has position p; positions below `done` were in the chunks before. */
static bool has_position(const world *w, int32_t i, int32_t p, int32_t done) {
    const walk *way = w->way;
    if (p < way->begin) return false;
    if (way->run) return i == 0 || p / way->run % way->n_parts == i - 1;
    if (way->n_parts) return p % w->sh->ratio * way->n_parts / w->sh->ratio == i;
    return p >= done && p < done + way->chunk[i % way->n_chunks];
}

static int32_t find_rows(const world *w, int32_t i, step *t, int32_t done) {
    int32_t n = 0;
    for (int32_t q = 0; q < w->way->n_seqs; q++) {
        for (int32_t p = 0; p < w->sh->tokens[w->way->order[q]]; p++) {
            if (!has_position(w, i, p, done)) continue;
            if (t->pos) t->pos[n] = p;
            n++;
        }
        t->first_row[q + 1] = n;
    }
    return n;
}

static step take_step(const world *w, int32_t i, int32_t done) {
    const size_t bytes = (size_t)w->wide * sizeof(float);
    step t = {.first_row = take_ints(SEQS + 1)};
    const int64_t rows = find_rows(w, i, &t, done);
    t.pos = take_ints(rows);
    find_rows(w, i, &t, done);
    t.kv = take_nan(rows * w->wide);
    t.gate = take_nan(rows * w->wide);
    for (int32_t q = 0; q < w->way->n_seqs; q++) {
        for (int64_t r = t.first_row[q]; r < t.first_row[q + 1]; r++) {
            const int64_t from = (int64_t)t.pos[r] * w->wide;
            memcpy(t.kv + r * w->wide, w->kv[w->way->order[q]] + from, bytes);
            memcpy(t.gate + r * w->wide, w->gate[w->way->order[q]] + from, bytes);
        }
    }
    return t;
}

static int32_t longest_of(const world *w) {
    int32_t longest = 0;
    for (int32_t q = 0; q < w->way->n_seqs; q++) {
        const int32_t n = w->sh->tokens[w->way->order[q]];
        longest = n > longest ? n : longest;
    }
    return longest;
}

static void run_compress(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                         int32_t n, void *const *out) {
    const world *w = c->args;
    const compress_shape *sh = w->sh;
    (void)first;
    (void)n;
    hd_compress_args a = {
        .entries = w->entries,
        .state = {.rows = hd_f32(out[1]),
                  .table = rings_of(w),
                  .table_stride = w->ring_stride,
                  .page_tokens = sh->page_tokens,
                  .ring = sh->ring,
                  .width = 2 * w->wide},
        .ape = w->ape,
        .norm = w->norm,
        .freq = w->freq,
        .ratio = sh->ratio,
        .pairs = sh->pairs,
        .overlap = sh->overlap,
        .eps = 1e-6f
    };
    int32_t *from = take_ints(SEQS);
    for (int32_t q = 0; q < w->way->n_seqs; q++) from[q] = w->way->from;
    if (w->way->from) a.entries_from = from;
    a.entries.rows.data = out[0];
    a.entries.table = reordered(w->entries.table, w->entries.table_stride, w->way);
    const int32_t n_steps = w->way->n_parts + (w->way->run > 0), longest = longest_of(w);
    for (int32_t i = 0, done = 0; i == 0 || (n_steps ? i < n_steps : done < longest); i++) {
        const int32_t chunk = n_steps ? longest : w->way->chunk[i % w->way->n_chunks];
        step t = take_step(w, i, done);
        a.kv = t.kv;
        a.gate = t.gate;
        a.seqs = (hd_seqs){w->way->n_seqs, t.first_row, t.pos, i % 3 == 2 ? 0 : chunk};
        ops->compress(s, &a);
        done += chunk;
    }
}

static op_case case_of(const world *w) {
    return (op_case){
        .name = w->sh->name,
        .rows = 1,
        .n_outs = 2,
        .width = {w->entries_size, w->state_size},
        .tolerance = {4e-6,            1e-6         },
        .all_rows = true,
        .not_recorded = true,
        .args = w,
        .run = run_compress
    };
}

/* Sequences computed one after another leave in one pool what they leave together. */
static void check_alone(const world *w, const hd_ops *ops, void *const *want) {
    op_case c = case_of(w);
    for (int32_t s = 0; s < SEQS; s++) {
        world one = *w;
        const walk alone = {
            .n_chunks = 3, .chunk = {1 + s, 5, 2},
                 .n_seqs = 1, .order = {s   }
        };
        void *got[MAX_OUTS];
        one.way = &alone;
        c.args = &one;
        run_op(&c, ops, fix.stream[1], 0, 1, got);
        hd_paged a = w->entries, b = w->entries;
        a.rows.data = got[0];
        b.rows.data = want[0];
        for (int32_t e = 0; e < w->sh->tokens[s] / w->sh->ratio; e++) {
            check_bits("a sequence alone", page_entry(&a, s, e), page_entry(&b, s, e),
                       w->sh->width);
        }
    }
}

/* Entries from a position on need no earlier state than that of their own slots; those before stay. */
static void check_from(const world *w, const hd_ops *ops, void *const *want) {
    const compress_shape *sh = w->sh;
    const int32_t slots = (sh->overlap ? 2 : 1) * sh->ratio;
    for (int32_t from = slots; from < sh->tokens[0]; from += 2 * sh->ratio) {
        world late = *w;
        const walk way = {
            .n_chunks = 3,
            .chunk = {5, from, 7},
            .n_seqs = SEQS,
            .order = {0, 2,    1},
            .begin = from - slots,
            .from = from
        };
        void *got[MAX_OUTS];
        late.way = &way;
        const op_case c = case_of(&late);
        if (ops == &fix.table[0]) check_op(&c);
        run_op(&c, ops, fix.stream[2], 0, 1, got);
        for (int32_t s = 0; s < SEQS; s++) {
            hd_paged a = w->entries, b = w->entries;
            a.rows.data = got[0];
            b.rows.data = want[0];
            for (int32_t e = 0; e < sh->tokens[s] / sh->ratio; e++) {
                const float *entry = page_entry(&a, s, e);
                if (e * sh->ratio < from) {
                    assert_true(isnan(entry[0]));
                } else {
                    check_bits("an entry behind", entry, page_entry(&b, s, e), sh->width);
                }
            }
        }
    }
}

static void compress_case(const compress_shape *sh) {
    static const walk ways[] = {
        {1, {1000},                3, {0, 1, 2}, 0, 0,  0, 0}, /* at once, and in another order */
        {1, {1000},                3, {2, 0, 1}, 0, 0,  0, 0},
        {1, {1},                   3, {1, 2, 0}, 0, 0,  0, 0}, /* token by token */
        {1, {7},                   3, {0, 1, 2}, 0, 0,  0, 0},
        {1, {128},                 3, {0, 1, 2}, 0, 0,  0, 0},
        {6, {129, 1, 0, 3, 64, 2}, 3, {2, 1, 0}, 0, 0,  0, 0},
        {0, {0},                   3, {0, 1, 2}, 2, 0,  0, 0}, /* with gaps */
        {0, {0},                   3, {2, 0, 1}, 3, 0,  0, 0},
        {0, {0},                   3, {0, 2, 1}, 2, 3,  0, 0},
        {0, {0},                   3, {1, 0, 2}, 3, 19, 0, 0},
    };
    world w = take_world(sh);
    for (size_t i = 0; i < HD_LEN(ways); i++) {
        w.way = &ways[i];
        const op_case c = case_of(&w);
        check_op(&c);
    }
    for (int32_t t = 0; t < fix.n_tables; t++) {
        void *want[MAX_OUTS], *got[MAX_OUTS];
        for (size_t i = 0; i < HD_LEN(ways); i++) {
            w.way = &ways[i];
            const op_case c = case_of(&w);
            run_op(&c, &fix.table[t], fix.stream[i % N_THREADS], 0, 1, i ? got : want);
            if (i == 0) continue;
            /* only a ring of a whole page still has what is before a gap */
            if (w.way->n_parts && sh->ring < sh->page_tokens) continue;
            check_bits("entries of another walk", got[0], want[0], w.entries_size);
            check_bits("state of another walk", got[1], want[1], w.state_size);
        }
        check_alone(&w, &fix.table[t], want);
        check_from(&w, &fix.table[t], want);
    }
}

void op_compress(void **state) {
    static const compress_shape shapes[] = {
        {"ratio 4",          4,   20,  3,  4,   4,   false, {37, 4, 3}     },
        {"ratio 4, overlap", 4,   32,  8,  8,   16,  true,  {66, 8, 0}     },
        {"ratio 3, overlap", 3,   17,  1,  6,   12,  true,  {31, 2, 50}    },
        {"ratio 1",          1,   9,   2,  2,   4,   false, {5, 1, 12}     },
        {"ratio 128",        128, 40,  4,  128, 128, false, {300, 128, 127}},
        {"wide, roomy ring", 4,   257, 16, 16,  32,  true,  {41, 64, 5}    },
        {"V4's pages",       4,   32,  8,  16,  128, true,  {300, 64, 131} },
        {"ring of the page", 4,   32,  8,  16,  16,  true,  {66, 8, 31}    },
        {"nothing",          4,   16,  4,  8,   16,  true,  {0, 0, 0}      },
    };
    for (size_t i = 0; i < HD_LEN(shapes); i++) {
        compress_case(&shapes[i]);
        forget_all(state);
    }
}
