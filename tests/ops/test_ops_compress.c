/* test_ops_compress.c - the compressor over steps of every size. One call, chunks, single
 * tokens, many sequences and one, in any order, leave the same entries and the same state. */
#include "ops/ops_fixture.h"

#include <string.h>

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

typedef struct step {
    int32_t *first_row, *start; /* [SEQS + 1], [SEQS] */
    float *kv, *gate;
} step;

/* The next rows of every sequence; the caller advances the number of rows before. */
static step take_step(const world *w, const int32_t *done, int32_t chunk) {
    step t = {.first_row = take_ints(SEQS + 1), .start = take_ints(SEQS)};
    for (int32_t i = 0; i < w->way->n_seqs; i++) {
        const int32_t left = w->sh->tokens[w->way->order[i]] - done[i];
        t.start[i] = done[i];
        t.first_row[i + 1] = t.first_row[i] + (left < chunk ? left : chunk);
    }
    const int64_t rows = t.first_row[w->way->n_seqs];
    t.kv = take_nan(rows * w->wide);
    t.gate = take_nan(rows * w->wide);
    for (int32_t i = 0; i < w->way->n_seqs; i++) {
        const int64_t from = (int64_t)t.start[i] * w->wide,
                      to = (int64_t)t.first_row[i] * w->wide;
        const size_t bytes =
            (size_t)(t.first_row[i + 1] - t.first_row[i]) * (size_t)w->wide * sizeof(float);
        memcpy(t.kv + to, w->kv[w->way->order[i]] + from, bytes);
        memcpy(t.gate + to, w->gate[w->way->order[i]] + from, bytes);
    }
    return t;
}

static void run_compress(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                         int32_t n, void *const *out) {
    const world *w = c->args;
    const compress_shape *sh = w->sh;
    int32_t done[SEQS] = {0};
    (void)first;
    (void)n;
    hd_compress_args a = {
        .entries = w->entries,
        .state = {.data = out[1],
                  .table = reordered(w->ring_table, w->ring_stride, w->way),
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
    a.entries.data = out[0];
    a.entries.table = reordered(w->entries.table, w->entries.table_stride, w->way);
    for (int32_t i = 0, rows = -1; rows != 0; i++) {
        const int32_t chunk = w->way->chunk[i % w->way->n_chunks];
        step t = take_step(w, done, chunk);
        rows = t.first_row[w->way->n_seqs] + (chunk == 0); /* an empty step is not the end */
        a.kv = t.kv;
        a.gate = t.gate;
        a.seqs = (hd_seqs){w->way->n_seqs, t.first_row, t.start, i % 3 == 2 ? 0 : chunk};
        ops->compress(s, &a);
        for (int32_t q = 0; q < w->way->n_seqs; q++) {
            done[q] += t.first_row[q + 1] - t.first_row[q];
        }
    }
}

static op_case case_of(const world *w) {
    return (op_case){
        .name = w->sh->name,
        .rows = 1,
        .n_outs = 2,
        .width = {w->entries_size, w->state_size},
        .tolerance = {4e-6,            1e-6         },
        .int16 = true,
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
        a.data = got[0];
        b.data = want[0];
        for (int32_t e = 0; e < w->sh->tokens[s] / w->sh->ratio; e++) {
            check_bits("a sequence alone", page_entry(&a, s, e), page_entry(&b, s, e),
                       w->sh->width);
        }
    }
}

static void compress_case(const compress_shape *sh) {
    static const walk ways[] = {
        {1, {1000},                3, {0, 1, 2}}, /* all at once, and in another order */
        {1, {1000},                3, {2, 0, 1}},
        {1, {1},                   3, {1, 2, 0}}, /* token by token */
        {1, {7},                   3, {0, 1, 2}},
        {1, {128},                 3, {0, 1, 2}},
        {6, {129, 1, 0, 3, 64, 2}, 3, {2, 1, 0}},
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
            check_bits("entries of another walk", got[0], want[0], w.entries_size);
            check_bits("state of another walk", got[1], want[1], w.state_size);
        }
        check_alone(&w, &fix.table[t], want);
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
        {"nothing",          4,   16,  4,  8,   16,  true,  {0, 0, 0}      },
    };
    for (size_t i = 0; i < HD_LEN(shapes); i++) {
        compress_case(&shapes[i]);
        forget_all(state);
    }
}
