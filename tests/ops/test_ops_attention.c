/* test_ops_attention.c - attention and the indexer on ragged sequences in scattered pages. */
#include "ops/ops_fixture.h"

#include <math.h>
#include <string.h>

enum { SEQS = 4, ROWS = 33 };

/* Positions of the first rows: before, on and after the edges of blocks, pages and windows. The
 * others are random below `longest`. */
static const int32_t positions[] = {0,  1,  2,  3,  4,   6,   7,   8,   63,  64,  65,
                                    66, 95, 96, 99, 126, 127, 128, 191, 255, 256, 299};

typedef struct rows_of {
    int32_t *seq, *pos;
    int32_t n_tokens[SEQS]; /* each sequence has the length that its last row needs */
} rows_of;

static rows_of take_rows(int32_t longest) {
    rows_of r = {.seq = take_ints(ROWS), .pos = take_ints(ROWS)};
    for (int32_t i = 0; i < ROWS; i++) {
        r.seq[i] = random_below(SEQS);
        r.pos[i] = i < (int32_t)HD_LEN(positions) ? positions[i] : random_below(longest);
        if (r.pos[i] >= r.n_tokens[r.seq[i]]) r.n_tokens[r.seq[i]] = r.pos[i] + 1;
    }
    return r;
}

/* Rows whose windows begin at a position of each sequence, and whose own are soon behind it. */
static rows_of take_cut_rows(int32_t window, int32_t *from) {
    rows_of r = {.seq = take_ints(ROWS), .pos = take_ints(ROWS)};
    for (int32_t s = 0; s < SEQS; s++) from[s] = s * 61;
    for (int32_t i = 0; i < ROWS; i++) {
        r.seq[i] = random_below(SEQS);
        r.pos[i] = from[r.seq[i]] + random_below(window + 9);
        if (r.pos[i] >= r.n_tokens[r.seq[i]]) r.n_tokens[r.seq[i]] = r.pos[i] + 1;
    }
    return r;
}

/* What lies before them is NaN. */
static void spoil(const hd_paged *wide, const hd_paged *narrow, const rows_of *r,
                  const int32_t *from) {
    for (int32_t s = 0; s < SEQS; s++) {
        for (int32_t e = 0; e < from[s] && e < r->n_tokens[s]; e++) {
            float *x = page_entry(wide, s, e);
            const int64_t at = x - (const float *)wide->rows.data;
            memset(x, 0xff, (size_t)wide->width * sizeof *x);
            memset((uint16_t *)narrow->rows.data + at, 0xff, (size_t)wide->width * 2);
        }
    }
}

/* narrow: NULL, or the same entries rounded. */
static hd_paged take_entries(const rows_of *r, int32_t ratio, int32_t page, int32_t width,
                             float spread, hd_paged *narrow) {
    int32_t n[SEQS];
    for (int32_t s = 0; s < SEQS; s++) n[s] = ratio ? r->n_tokens[s] / ratio : 0;
    const hd_paged pages = take_pages(SEQS, n, page, width, spread);
    if (narrow) *narrow = narrow_pages(&pages, SEQS, n);
    return pages;
}

/* ---- attention ---- */

typedef enum sink_kind { NO_SINK, SMALL_SINK, HIGH_SINK, LOW_SINK, INF_SINK } sink_kind;

typedef struct attention_shape {
    const char *name;
    int32_t rows, heads, k_dim, v_dim, window, ratio, n_selected; /* n_selected 0: all */
    sink_kind sink;
    float spread;    /* of queries and keys */
    int32_t longest; /* position, at most; the first few rows go to 300; 0: windows are cut */
} attention_shape;

static const float *take_sink(sink_kind kind, int32_t heads) {
    if (kind == NO_SINK) return NULL;
    float *sink = take_random(heads, 2.0f);
    for (int32_t h = 0; h < heads; h++) {
        if (kind == HIGH_SINK) sink[h] += 80.0f;
        if (kind == LOW_SINK) sink[h] -= 80.0f;
        if (kind == INF_SINK) sink[h] = -INFINITY;
    }
    return sink;
}

/* Ascending entries among the visible ones, with gaps; rows have different lengths. */
static const int32_t *take_selected(const rows_of *r, int32_t ratio, int32_t n_selected) {
    int32_t *all = take_ints((int64_t)ROWS * n_selected);
    for (int32_t i = 0; i < ROWS; i++) {
        const int32_t visible = (r->pos[i] + 1) / ratio;
        int32_t n = 0;
        for (int32_t e = 0; e < visible && n < n_selected; e++) {
            if (random_below(3) > 0) all[i * n_selected + n++] = e;
        }
        while (n < n_selected) all[i * n_selected + n++] = -1;
    }
    return all;
}

/* From the reference that rounds the same: of an element, of the root mean square. Weights are rounded relative to the
 * largest score of all keys there and to the largest so far here, which is another one behind the first tile. Of
 * random keys, whose sum is as small as its terms, two such roundings are 1.1e-3. */
static const double official_tolerance = 1.2e-2, official_mean = 2e-3;

static void attention_case(const attention_shape *sh) {
    int32_t *from = take_ints(SEQS);
    const rows_of r = sh->longest ? take_rows(sh->longest) : take_cut_rows(sh->window, from);
    hd_attention_args a = {
        .q = hd_f32(take_random((int64_t)ROWS * sh->heads * sh->k_dim, sh->spread)),
        .sink = take_sink(sh->sink, sh->heads),
        .seq = r.seq,
        .pos = r.pos,
        .heads = sh->heads,
        .k_dim = sh->k_dim,
        .v_dim = sh->v_dim,
        .window = sh->window,
        .ratio = sh->ratio,
        .n_selected = sh->n_selected,
        .scale = 1.0f / sqrtf((float)sh->k_dim)};
    attention_lists lists = {0};
    if (sh->window) {
        a.recent = take_entries(&r, 1, 5, sh->k_dim, sh->spread, &lists.narrow_recent);
    }
    if (sh->longest == 0) {
        a.window_from = from;
        spoil(&a.recent, &lists.narrow_recent, &r, from);
    }
    if (sh->ratio) {
        a.entries =
            take_entries(&r, sh->ratio, 3, sh->k_dim, sh->spread, &lists.narrow_entries);
    }
    if (sh->n_selected) a.selected = take_selected(&r, sh->ratio, sh->n_selected);
    /* Scores of size up to spread^2 have an error of 2^-24 of themselves times the depth of
     * their sums; exp makes that a relative error of the weights. The distance to a sink that
     * is 80 larger has the same error, in any order of evaluation. */
    const double tolerance = sh->spread > 2.0f ? 1e-4 : sh->sink == HIGH_SINK ? 2e-5 : 4e-6;
    const double fast = 8192 * tolerance; /* of 22 bits 8 remain */
    const bool on_gpu = sh->k_dim <= 576;
    lists.a = a;
    check_op(&(op_case){.name = sh->name,
                        .rows = sh->rows,
                        .n_outs = 1,
                        .fast_tolerance = fast,
                        .fast_near = true,
                        .official_tolerance = on_gpu ? official_tolerance : 0.0,
                        .official_mean = official_mean,
                        .width = {sh->heads * sh->v_dim},
                        .tolerance = {tolerance},
                        .cpu_only = sh->k_dim > 576,
                        .args = &lists,
                        .run = run_attention_lists});
}

void op_attention(void **state) {
    (void)state;
    static const attention_shape shapes[] = {
        {"nothing",          0,    3,   24,   16,   0,   1,   0,  NO_SINK,    1.0f,  300  },
        {"one head",         ROWS, 1,   1,    1,    0,   1,   0,  NO_SINK,    1.0f,  300  },
        {"MLA",              ROWS, 3,   24,   16,   0,   1,   0,  NO_SINK,    1.0f,  300  },
        {"MLA, real widths", 12,   17,  576,  512,  0,   1,   0,  NO_SINK,    1.0f,  300  },
        {"MLA, selected",    ROWS, 5,   48,   33,   0,   1,   70, NO_SINK,    1.0f,  300  },
        {"window of one",    ROWS, 3,   20,   20,   1,   0,   0,  NO_SINK,    1.0f,  300  },
        {"window",           ROWS, 3,   20,   20,   7,   0,   0,  SMALL_SINK, 1.0f,  300  },
        {"window, ratio 4",  ROWS, 16,  36,   36,   32,  4,   0,  SMALL_SINK, 1.0f,  300  },
        {"cut windows",      ROWS, 3,   20,   20,   7,   0,   0,  SMALL_SINK, 1.0f,  0    },
        {"cut, ratio 2",     ROWS, 17,  64,   64,   128, 2,   0,  SMALL_SINK, 1.0f,  0    },
        {"cut, real widths", 12,   17,  512,  512,  128, 2,   0,  SMALL_SINK, 1.0f,  0    },
        {"heads of a rank",  ROWS, 16,  512,  512,  128, 2,   0,  SMALL_SINK, 1.0f,  300  },
        {"ratio 4 alone",    ROWS, 4,   16,   16,   0,   4,   0,  NO_SINK,    1.0f,  300  },
        {"with a sink",      ROWS, 4,   16,   16,   0,   4,   0,  SMALL_SINK, 1.0f,  300  },
        {"ratio 128",        ROWS, 40,  33,   33,   128, 128, 0,  SMALL_SINK, 1.0f,  300  },
        {"ratio 3",          ROWS, 18,  17,   17,   64,  3,   0,  NO_SINK,    1.0f,  300  },
        {"V4, selected",     ROWS, 8,   64,   64,   32,  4,   16, SMALL_SINK, 1.0f,  300  },
        {"sink near +80",    ROWS, 4,   16,   16,   9,   4,   0,  HIGH_SINK,  1.0f,  300  },
        {"sink near -80",    ROWS, 4,   16,   16,   9,   4,   0,  LOW_SINK,   1.0f,  300  },
        {"sink of -inf",     ROWS, 4,   16,   16,   9,   4,   0,  INF_SINK,   1.0f,  300  },
        {"sharp",            ROWS, 4,   64,   64,   9,   1,   0,  NO_SINK,    16.0f, 300  },
        {"many heads",       ROWS, 128, 20,   20,   7,   4,   0,  SMALL_SINK, 1.0f,  300  },
        {"more than a few",  ROWS, 72,  36,   33,   40,  1,   0,  NO_SINK,    1.0f,  300  },
        {"several parts",    ROWS, 3,   12,   9,    0,   1,   0,  NO_SINK,    1.0f,  3900 },
        {"parts, a window",  ROWS, 17,  8,    8,    700, 1,   0,  SMALL_SINK, 1.0f,  3000 },
        {"most parts",       ROWS, 1,   5,    5,    9,   1,   0,  SMALL_SINK, 1.0f,  20000},
        {"wide values",      12,   9,   1030, 1030, 5,   1,   0,  NO_SINK,    1.0f,  300  },
    };
    for (size_t i = 0; i < HD_LEN(shapes); i++) attention_case(&shapes[i]);
}

/* Rows of MLA with few heads, as many as fill a GPU, which then computes several in a block: consecutive
 * ones of sequences, across the length from which on a part of a row's keys is larger. */
void many_rows_on_gpu(void **state) {
    enum { MANY = 1250 };
    (void)state;
    static const struct {
        int32_t rows, first;
    } of[SEQS] = {
        {700, 0   },
        {1,   0   },
        {449, 250 },
        {100, 4040}
    };
    for (int32_t heads = 1; heads < 17; heads += 5) {
        int32_t *seq = take_ints(MANY), *pos = take_ints(MANY), n[SEQS], at = 0;
        for (int32_t s = 0; s < SEQS; s++) {
            n[s] = of[s].first + of[s].rows;
            for (int32_t i = 0; i < of[s].rows; i++, at++) {
                seq[at] = s;
                pos[at] = of[s].first + i;
            }
        }
        assert_int_equal(at, MANY);
        attention_lists lists = {
            .a = {.q = hd_f32(take_random((int64_t)MANY * heads * 24, 1.0f)),
                  .seq = seq,
                  .pos = pos,
                  .heads = heads,
                  .k_dim = 24,
                  .v_dim = 16,
                  .ratio = 1,
                  .scale = 0.2f}
        };
        lists.a.entries = take_pages(SEQS, n, 16, 24, 1.0f);
        lists.narrow_entries = narrow_pages(&lists.a.entries, SEQS, n);
        check_on_gpu(&(op_case){.name = "MLA, many rows",
                                .rows = MANY,
                                .n_outs = 1,
                                .width = {heads * 16},
                                .tolerance = {4e-6},
                                .gpu_fast_tolerance = 8192 * 4e-6,
                                .args = &lists,
                                .run = run_attention_lists});
    }
}

/* ---- attention_naive ---- */

/* Sequence s has n_rows[s] rows of the step, from position start[s] on. After every third row
 * `gap` positions are missing. */
typedef struct naive_shape {
    const char *name;
    const weight_format *format; /* NULL: F32 */
    int32_t heads, rank, nope_dim, rope_dim, v_dim;
    int32_t start[SEQS], n_rows[SEQS], gap;
} naive_shape;

static int32_t naive_position(const naive_shape *sh, int32_t seq, int32_t row) {
    return sh->start[seq] + row + row / 3 * sh->gap;
}

/* Of a GPU, where queries, keys, values and weights have eight bits: of the worst of 100,000 elements
 * with few keys, five times the root mean square. */
static const double narrow_naive = 0.06;

typedef struct naive_case {
    const naive_shape *sh;
    hd_attention_naive_args a;
    hd_paged narrow;          /* the latents for tables whose entries are bfloat16 */
    int32_t *first_row, *pos; /* of a call: [SEQS + 1], [rows] */
} naive_case;

/* Rows [first, first + n) of the shape: the rows of each sequence among them. */
static void run_naive(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                      int32_t n, void *const *out) {
    const naive_case *t = c->args;
    hd_attention_naive_args a = t->a;
    if (ops->kv_type == HD_BF16) a.latents = t->narrow;
    for (int32_t i = 0, before = 0; i < SEQS; before += t->sh->n_rows[i++]) {
        const int32_t end = before + t->sh->n_rows[i];
        const int32_t from = before > first ? before : first;
        const int32_t to = end < first + n ? end : first + n;
        t->first_row[i + 1] = t->first_row[i] + (to > from ? to - from : 0);
        for (int32_t r = from; r < to; r++) {
            t->pos[r - first] = naive_position(t->sh, i, r - before);
        }
        if (to > from) a.most_keys += t->pos[to - 1 - first] + 1;
    }
    a.out = hd_f32(out[0]);
    a.q = hd_rows_at(a.q, (int64_t)first * a.heads * (a.nope_dim + a.rope_dim));
    a.seqs = (hd_seqs){.n = SEQS, .first_row = t->first_row, .pos = t->pos};
    a.most_rows = n;
    ops->attention_naive(s, &a);
}

static int32_t naive_rows(const naive_shape *sh) {
    int32_t rows = 0;
    for (int32_t s = 0; s < SEQS; s++) rows += sh->n_rows[s];
    return rows;
}

static void naive_tokens(const naive_shape *sh, int32_t *n_tokens) {
    for (int32_t s = 0; s < SEQS; s++) {
        n_tokens[s] = sh->n_rows[s] ? naive_position(sh, s, sh->n_rows[s] - 1) + 1 : 0;
    }
}

static naive_case take_naive(const naive_shape *sh) {
    int32_t n_tokens[SEQS];
    const int32_t rows = naive_rows(sh), k_dim = sh->nope_dim + sh->rope_dim;
    const int32_t stored = sh->heads * (sh->nope_dim + sh->v_dim);
    const weight_format *format = sh->format ? sh->format : weight_format_of(F32_PLAIN);
    const hd_weight *w = take_weight(format, stored, sh->rank, false);
    naive_tokens(sh, n_tokens);
    return (naive_case){
        .sh = sh,
        .a = {.q = hd_f32(take_random((int64_t)rows * sh->heads * k_dim, 1.0f)),
              .latents = take_pages(SEQS, n_tokens, 5, w->cols + sh->rope_dim, 1.0f),
              .w = w,
              .heads = sh->heads,
              .nope_dim = sh->nope_dim,
              .rope_dim = sh->rope_dim,
              .v_dim = sh->v_dim,
              .scale = 1.0f / sqrtf((float)k_dim)},
        .first_row = take_ints(SEQS + 1),
        .pos = take_ints(rows)
    };
}

static bool naive_fits_gpu(const naive_shape *sh) {
    return fix.gpu_fast.attention_naive && sh->rank == 512 && sh->nope_dim == 128 &&
           sh->rope_dim == 64 && sh->v_dim == 128;
}

static op_case naive_op_case(naive_case *t, double tolerance) {
    int32_t n_tokens[SEQS];
    naive_tokens(t->sh, n_tokens);
    t->narrow = narrow_pages(&t->a.latents, SEQS, n_tokens);
    return (op_case){.name = t->sh->name,
                     .rows = naive_rows(t->sh),
                     .n_outs = 1,
                     .width = {t->sh->heads * t->sh->v_dim},
                     .tolerance = {tolerance},
                     .gpu_fast_tolerance = naive_fits_gpu(t->sh) ? narrow_naive : 0.0,
                     .cpu_only = true,
                     .args = t,
                     .run = run_naive};
}

/* Formats with scales make keys so large that scores are as sharp as in attention's case. */
static void naive_attention_case(const naive_shape *sh) {
    naive_case t = take_naive(sh);
    const op_case c = naive_op_case(&t, sh->format ? 1e-4 : 1e-5);
    check_op(&c);
}

void op_attention_naive(void **state) {
    static const naive_shape shapes[] = {
        {"nothing",           NULL, 2, 16,  8,   4,  8,   {0, 0, 0, 0},      {0, 0, 0, 0},    0 },
        {"one of each",       NULL, 1, 1,   1,   1,  1,   {0, 3, 0, 1},      {1, 1, 3, 2},    0 },
        {"edges of blocks",   NULL, 3, 20,  7,   6,  9,   {0, 62, 63, 64},   {3, 4, 2, 70},   0 },
        {"with cached keys",  NULL, 2, 32,  16,  8,  12,  {130, 0, 200, 61}, {5, 0, 67, 9},   0 },
        {"more than a share", NULL, 1, 16,  8,   4,  8,   {40, 0, 0, 0},     {300, 0, 1, 33}, 0 },
        {"wide values",       NULL, 2, 24,  8,   4,  40,  {0, 10, 0, 0},     {20, 3, 0, 0},   0 },
        {"real widths",       NULL, 2, 512, 128, 64, 128, {0, 64, 0, 0},     {20, 3, 0, 0},   0 },
        {"wider than any",    NULL, 1, 16,  8,   4,  300, {0, 10, 0, 0},     {20, 3, 0, 0},   0 },
        {"gaps",              NULL, 2, 20,  7,   6,  9,   {0, 62, 63, 200},  {3, 40, 2, 70},  5 },
        {"gaps over blocks",  NULL, 1, 16,  8,   4,  8,   {40, 0, 1, 0},     {130, 0, 33, 4}, 70},
        {"gaps, wide",        NULL, 1, 16,  8,   4,  300, {0, 10, 0, 0},     {20, 3, 0, 0},   9 },
    };
    for (size_t i = 0; i < HD_LEN(shapes); i++) {
        naive_attention_case(&shapes[i]);
        forget_all(state);
    }
    for (int32_t f = 0; f < n_weight_formats; f++) {
        naive_attention_case(&(naive_shape){
            "stored formats",
            &weight_formats[f],
            2,
            48,
            14,
            6,
            10,
            {70, 0, 3, 0 },
            {4,  9, 0, 30},
            0
        });
        forget_all(state);
    }
}

/* ---- attention_naive on a GPU, against a CPU ---- */

typedef enum naive_input {
    RANDOM,
    EQUAL_SCORES,
    NAN_LATENT,
    INF_LATENT,
    INF_ROTATED
} naive_input;

/* Latents that bfloat16 has, so that both sides read the same; scores are of size one. */
static void make_even(naive_case *t) {
    const hd_dtype_row *bf16 = &hd_dtypes[HD_BF16];
    int32_t n_tokens[SEQS];
    naive_tokens(t->sh, n_tokens);
    t->a.scale *= 0.3f;
    for (int32_t s = 0; s < SEQS; s++) {
        for (int32_t e = 0; e < n_tokens[s]; e++) {
            float *x = page_entry(&t->a.latents, s, e);
            for (int32_t c = 0; c < t->a.latents.width; c++) {
                x[c] = bf16->decode(bf16->encode(x[c]));
            }
        }
    }
}

/* What is special is in the middle of a tile, so that rows before it share a tile with it. */
static void make_special(naive_case *t, naive_input input) {
    int32_t n_tokens[SEQS];
    const int64_t n_q = (int64_t)naive_rows(t->sh) * t->sh->heads * 192;
    naive_tokens(t->sh, n_tokens);
    if (input == EQUAL_SCORES) memset(t->a.q.data, 0, (size_t)n_q * sizeof(float));
    for (int32_t s = 0; s < SEQS && input > EQUAL_SCORES; s++) {
        if (n_tokens[s] == 0) continue;
        float *latent = page_entry(&t->a.latents, s, n_tokens[s] / 2);
        latent[input == INF_ROTATED ? 512 + 3 : 17] = input == NAN_LATENT ? NAN : INFINITY;
    }
}

static void naive_gpu_case(const naive_shape *sh, naive_input input) {
    naive_case t = take_naive(sh);
    void *want[MAX_OUTS], *got[MAX_OUTS];
    make_even(&t);
    make_special(&t, input);
    const op_case c = naive_op_case(&t, 0.0);
    const int32_t cpu = fix.n_tables - 2; /* the last is the GPU's */
    run_op(&c, &fix.table[cpu], fix.stream[N_THREADS - 1], 0, c.rows, want);
    check_gpu_table(&c, &fix.gpu_fast, narrow_naive, want);
    run_op(&c, &fix.gpu_official, fix.gpu_stream, 0, c.rows, got);
    check_mean(sh->name, got[0], want[0], (int64_t)c.rows * c.width[0], 0.01);
}

void naive_on_gpu(void **state) {
    static const naive_shape shapes[] = {
        {"ragged",         NULL, 3, 512, 128, 64, 128, {0, 0, 0, 0},      {129, 7, 0, 200}, 0},
        {"cached keys",    NULL, 1, 512, 128, 64, 128, {130, 0, 250, 61}, {129, 0, 260, 7}, 0},
        {"gaps",           NULL, 2, 512, 128, 64, 128, {0, 62, 63, 200},  {3, 140, 2, 70},  5},
        {"a prompt alone", NULL, 5, 512, 128, 64, 128, {0, 0, 0, 0},      {0, 0, 0, 257},   0},
        {"4,097 keys",     NULL, 2, 512, 128, 64, 128, {4090, 0, 0, 127}, {7, 0, 1, 129},   0},
    };
    static const int32_t formats[] = {FP8_F32, FP8_E8M0, BF16_PLAIN, NVFP4_E4M3, E4M3_ODD};
    if (!fix.gpu || fix.brief || !fix.gpu_fast.attention_naive) return;
    for (size_t i = 0; i < HD_LEN(shapes); i++) {
        naive_gpu_case(&shapes[i], RANDOM);
        forget_all(state);
    }
    for (naive_input input = EQUAL_SCORES; input <= INF_ROTATED; input++) {
        naive_gpu_case(&shapes[0], input);
        forget_all(state);
    }
    for (size_t f = 0; f < HD_LEN(formats); f++) {
        naive_shape sh = shapes[1];
        sh.format = weight_format_of(formats[f]);
        naive_gpu_case(&sh, RANDOM);
        forget_all(state);
    }
}

/* ---- indexer_topk ---- */

static void run_select(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                       int32_t n, void *const *out) {
    hd_indexer_topk_args a = *(const hd_indexer_topk_args *)c->args;
    a.out = out[0];
    a.q = hd_rows_at(a.q, (int64_t)first * a.heads * a.keys.width);
    a.weight += (int64_t)first * a.heads;
    a.seq += first;
    a.pos += first;
    a.rows = n;
    ops->indexer_topk(s, &a);
}

/* Small integers: products and sums are exact in any order, and there are many ties. */
static void round_all(float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) x[i] = rintf(x[i]);
}

typedef struct select_shape {
    int32_t rows, heads, width, ratio, top_k;
    bool int16_numbers;
    float spread;    /* 0: all scores tie */
    int32_t longest; /* position, at most; the first few rows go to 300 */
} select_shape;

static void select_case(const select_shape *sh) {
    const rows_of r = take_rows(sh->longest);
    const int64_t n_q = (int64_t)ROWS * sh->heads * sh->width, n_w = (int64_t)ROWS * sh->heads;
    float *q = take_random(n_q, sh->spread), *weight = take_random(n_w, 2.4f);
    hd_paged keys = take_entries(&r, sh->ratio, 7, sh->width, 2.4f, NULL);
    if (sh->int16_numbers) {
        round_all(q, n_q);
        round_all(weight, n_w);
        for (int32_t s = 0; s < SEQS; s++) {
            for (int32_t e = 0; e < r.n_tokens[s] / sh->ratio; e++) {
                round_all(page_entry(&keys, s, e), sh->width);
            }
        }
    }
    hd_indexer_topk_args a = {.q = hd_f32(q),
                              .weight = weight,
                              .keys = keys,
                              .seq = r.seq,
                              .pos = r.pos,
                              .heads = sh->heads,
                              .ratio = sh->ratio,
                              .top_k = sh->top_k,
                              .scale = 0.25f};
    const bool exact = sh->int16_numbers && sh->width <= 256; /* a GPU also uses few bits */
    check_op(&(op_case){.name = sh->int16_numbers ? "indexer_topk, ties" : "indexer_topk",
                        .gpu_fast_tolerance = exact ? 1e-9 : 0.0,
                        .rows = sh->rows,
                        .n_outs = 1,
                        .width = {sh->top_k},
                        .cpu_only = sh->width > 256,
                        .args = &a,
                        .run = run_select});
}

void op_indexer_topk(void **state) {
    (void)state;
    static const select_shape shapes[] = {
        {0,    3,  16,  1,   8,   true,  1.4f, 300  },
        {ROWS, 1,  1,   1,   1,   true,  1.4f, 300  },
        {ROWS, 3,  7,   1,   16,  true,  1.4f, 300  },
        {ROWS, 16, 20,  1,   64,  true,  1.4f, 300  },
        {ROWS, 5,  33,  1,   255, true,  0.6f, 300  }, /* most are zero: ties */
        {ROWS, 5,  33,  1,   299, true,  0.0f, 300  }, /* all are equal: the lowest win */
        {ROWS, 4,  33,  1,   400, true,  1.4f, 300  }, /* everything fits */
        {ROWS, 4,  16,  4,   9,   true,  1.4f, 300  },
        {ROWS, 4,  16,  128, 1,   true,  1.4f, 300  },
        {ROWS, 64, 128, 1,   48,  false, 2.0f, 300  }, /* real numbers, far enough apart */
        {ROWS, 17, 48,  4,   16,  false, 2.0f, 300  },
        {ROWS, 3,  7,   1,   20,  true,  1.4f, 6000 }, /* the threshold rises over many parts */
        {ROWS, 2,  5,   1,   900, true,  0.6f, 9000 },
        {ROWS, 2,  5,   1,   700, true,  0.0f, 5000 },
        {ROWS, 9,  40,  4,   64,  true,  1.4f, 20000},
        {3,    1,  520, 1,   9,   true,  1.4f, 300  }, /* too wide to be transposed */
    };
    for (size_t i = 0; i < HD_LEN(shapes); i++) select_case(&shapes[i]);
}
