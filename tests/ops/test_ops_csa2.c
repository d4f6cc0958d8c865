/* test_ops_csa2.c - V4.1's operators: groups and their entries, the pool of candidates,
 * hyper-connections in one pass, Engram. */
#include "ops/ops_fixture.h"

#include <math.h>
#include <string.h>

/* ---- rows that are kept ---- */

enum { KEPT_ROWS = 9, KEPT_WORDS = 1100, ALL_ROWS = 14 };

static void run_keep(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                     int32_t n, void *const *out) {
    hd_keep_rows_args a = *(const hd_keep_rows_args *)c->args;
    a.x = take_copy(a.x, sizeof(float) * ALL_ROWS * KEPT_WORDS);
    a.kept += first;
    a.rows = n;
    ops->keep_rows(s, &a);
    finish("keep_rows", s);
    memcpy(out[0], a.x, (size_t)n * (size_t)a.words * sizeof(float));
}

/* Rows that stay, that move by one, and that move onto others which move too. */
void op_keep_rows(void **state) {
    static const int32_t kept[KEPT_ROWS] = {0, 1, 3, 4, 5, 8, 9, 12, 13};
    (void)state;
    for (int32_t words = 1; words <= KEPT_WORDS; words += KEPT_WORDS - 1) {
        hd_keep_rows_args a = {.x = take_random(ALL_ROWS * KEPT_WORDS, 1.0f),
                               .kept = take_copy(kept, sizeof kept),
                               .words = words};
        check_op(&(op_case){.name = "keep_rows",
                            .rows = KEPT_ROWS,
                            .n_outs = 1,
                            .width = {words},
                            .tolerance = {0},
                            .not_recorded = true,
                            .args = &a,
                            .run = run_keep});
    }
}

/* ---- groups ---- */

enum { PAGE = 4, GROUP_WIDTH = 20, GROUP_ROWS = 11 };

typedef struct group_case {
    hd_group_latents_args a;
    const float *state; /* before the step */
    int32_t state_size;
} group_case;

static void run_groups(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                       int32_t n, void *const *out) {
    const group_case *t = c->args;
    hd_group_latents_args a = t->a;
    float *state = take_copy(t->state, (size_t)t->state_size * sizeof *state);
    (void)first;
    a.out = out[0];
    a.state.rows = hd_f32(state);
    ops->group_latents(s, &a);
    finish("group_latents", s);
    for (int32_t r = 0; r < n; r++) {
        const int32_t pos = a.seqs.pos[r];
        const float *kept = state + (pos / PAGE * PAGE + pos % PAGE) * a.state.width;
        memcpy((float *)out[1] + r * a.state.width, kept, (size_t)a.state.width * sizeof *kept);
    }
}

/* Steps that begin inside a group and end inside one; the first row's partner is in the state. */
void op_group_latents(void **state) {
    (void)state;
    for (int32_t ratio = 2; ratio <= 3; ratio++) {
        const int32_t size = 5 * PAGE * 2 * GROUP_WIDTH;
        int32_t *table = take_ints(5), *first_row = take_ints(2), *pos = take_ints(GROUP_ROWS);
        for (int32_t i = 0; i < 5; i++) table[i] = i;
        for (int32_t r = 0; r < GROUP_ROWS; r++) pos[r] = 5 + r;
        first_row[1] = GROUP_ROWS;
        group_case t = {
            .a = {.kv = take_random(GROUP_ROWS * GROUP_WIDTH, 1.0f),
                  .gate = take_random(GROUP_ROWS * GROUP_WIDTH, 3.0f),
                  .state = {.table = table,
                            .table_stride = 5,
                            .page_tokens = PAGE,
                            .ring = PAGE,
                            .width = 2 * GROUP_WIDTH},
                  .seqs = {1, first_row, pos, GROUP_ROWS},
                  .ratio = ratio},
            .state = take_random(size, 1.0f),
            .state_size = size
        };
        check_op(&(op_case){
            .name = "group_latents",
            .rows = GROUP_ROWS,
            .n_outs = 2,
            .width = {GROUP_WIDTH, 2 * GROUP_WIDTH},
            .tolerance = {1e-6,        0              },
            .all_rows = true,
            .not_recorded = true,
            .args = &t,
            .run = run_groups
        });
    }
}

enum { STORE_ROWS = 12, STORE_WIDTH = 10 };

/* Entries of a GPU's narrower precisions are bfloat16: rounded once, from what the others have. */
static void store_narrow(const hd_store_groups_args *wide, const hd_ops *ops, hd_stream *s,
                         float *out) {
    hd_store_groups_args a = *wide;
    const int32_t n_entries = 64;
    a.entries = narrow_pages(&wide->entries, 1, &n_entries);
    ops->store_groups(s, &a);
    finish("store_groups", s);
    for (int32_t r = 0; r < a.rows; r++) {
        if ((a.pos[r] + 1) % a.ratio) continue;
        const float *there = page_entry(&wide->entries, 0, a.pos[r] / a.ratio);
        const uint16_t *entry = (const uint16_t *)a.entries.rows.data +
                                (there - (const float *)wide->entries.rows.data);
        for (int32_t c = 0; c < STORE_WIDTH; c++) {
            out[r * STORE_WIDTH + c] = hd_dtypes[HD_BF16].decode(entry[c]);
        }
    }
}

static void run_store(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                      int32_t n, void *const *out) {
    hd_store_groups_args a = *(const hd_store_groups_args *)c->args;
    a.x += (int64_t)first * STORE_WIDTH;
    a.seq += first;
    a.pos += first;
    a.rows = n;
    memset(out[0], 0, (size_t)n * STORE_WIDTH * sizeof(float));
    if (ops->kv_type == HD_BF16) {
        store_narrow(&a, ops, s, out[0]);
        return;
    }
    ops->store_groups(s, &a);
    finish("store_groups", s);
    for (int32_t r = 0; r < n; r++) {
        if ((a.pos[r] + 1) % a.ratio) continue;
        memcpy((float *)out[0] + r * STORE_WIDTH, page_entry(&a.entries, 0, a.pos[r] / a.ratio),
               STORE_WIDTH * sizeof(float));
    }
}

void op_store_groups(void **state) {
    (void)state;
    for (int32_t ratio = 1; ratio <= 2; ratio++) {
        const int32_t n_entries = 64;
        int32_t *pos = take_ints(STORE_ROWS);
        for (int32_t r = 0; r < STORE_ROWS; r++) pos[r] = 3 + r;
        hd_store_groups_args a = {.entries = take_pages(1, &n_entries, PAGE, STORE_WIDTH, 1.0f),
                                  .x = take_random(STORE_ROWS * STORE_WIDTH, 1.0f),
                                  .freq = take_random(3, 1.0f),
                                  .seq = take_ints(STORE_ROWS),
                                  .pos = pos,
                                  .ratio = ratio,
                                  .pairs = 3};
        check_op(&(op_case){.name = "store_groups",
                            .rows = STORE_ROWS,
                            .n_outs = 1,
                            .width = {STORE_WIDTH},
                            .tolerance = {1e-6},
                            .gpu_fast_tolerance = 4e-3,
                            .not_recorded = true,
                            .args = &a,
                            .run = run_store});
    }
}

/* Entries with a format are what it makes of those without, in float32 and in bfloat16. */
void groups_are_rounded(void **state) {
    (void)state;
    enum { ROWS = 9, WIDTH = 300, PAIRS = 20 };
    static const hd_group_format formats[] = {
        {HD_E2M1, HD_E4M3, 16, 0},
        {HD_E2M1, HD_E8M0, 32, 0}
    };
    const int32_t n_entries = ROWS;
    int32_t *pos = take_ints(ROWS);
    for (int32_t r = 0; r < ROWS; r++) pos[r] = 2 * r + 1;
    const hd_paged wide = take_pages(1, &n_entries, PAGE, WIDTH, 1.0f);
    const hd_paged narrow = narrow_pages(&wide, 1, &n_entries);
    hd_store_groups_args a = {.x = take_random(ROWS * WIDTH, 1.0f),
                              .freq = take_random(PAIRS, 1.0f),
                              .seq = take_ints(ROWS),
                              .pos = pos,
                              .rows = ROWS,
                              .ratio = 2,
                              .pairs = PAIRS};
    for (int32_t t = 0; t < 2 * fix.n_tables; t++) {
        const hd_ops *ops = &fix.table[t / 2];
        hd_stream *s = stream_for(ops, fix.stream[1]);
        float *want = take_nan(ROWS * WIDTH), got[WIDTH];
        a.entries = wide;
        ops->store_groups(s, &a);
        finish("store_groups", s);
        for (int32_t e = 0; e < ROWS; e++) {
            memcpy(want + e * WIDTH, page_entry(&wide, 0, e), WIDTH * sizeof *want);
        }
        fix.table[0].round_rows(fix.stream[0], &(hd_round_rows_args){.x = hd_f32(want),
                                                                     .format = formats[t % 2],
                                                                     .rows = ROWS,
                                                                     .cols = WIDTH});
        for (int k = 0; k < 2; k++) {
            a.entries = k ? narrow : wide;
            a.entries.format = formats[t % 2];
            ops->store_groups(s, &a);
            finish("store_groups", s);
            for (int32_t e = 0; e < ROWS; e++) {
                const float *there = page_entry(&wide, 0, e);
                const int64_t at = there - (const float *)wide.rows.data;
                for (int32_t c = 0; c < WIDTH; c++) {
                    got[c] = k ? hd_dtype_at(HD_BF16, narrow.rows.data, at + c) : there[c];
                }
                check_bits(ops->name, got, want + e * WIDTH, WIDTH);
            }
        }
    }
}

/* ---- the pool ---- */

enum { TOPK_ROWS = 7, TOPK_KEYS = 90, HEADS = 3, KEY_WIDTH = 16, TOPK = 6, BLOCKS = 4 };

static void run_topk(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                     int32_t n, void *const *out) {
    hd_pool_topk_args a = *(const hd_pool_topk_args *)c->args;
    const size_t bytes = (size_t)n * (size_t)a.n_blocks * sizeof(int32_t);
    a.out = out[0];
    if (!a.makes_pool) memcpy(out[1], a.blocks + (int64_t)first * a.n_blocks, bytes);
    a.blocks = out[1];
    a.q = hd_rows_at(a.q, (int64_t)first * a.heads * a.keys.width);
    a.weight += (int64_t)first * a.heads;
    a.seq += first;
    a.pos += first;
    a.rows = n;
    ops->pool_topk(s, &a);
}

void op_pool_topk(void **state) {
    (void)state;
    const int32_t n_keys = TOPK_KEYS;
    static const int32_t at[TOPK_ROWS] = {0, 3, 10, 40, 41, 63, TOPK_KEYS - 1};
    int32_t *pos = take_copy(at, sizeof at), *blocks = take_ints(TOPK_ROWS * BLOCKS);
    for (int32_t i = 0; i < TOPK_ROWS * BLOCKS; i++) {
        const int32_t last = pos[i / BLOCKS] / 5, block = i % BLOCKS * 3;
        blocks[i] = block <= last ? block : -1;
    }
    for (int32_t makes = 0; makes < 2; makes++) {
        hd_pool_topk_args a = {.blocks = blocks,
                               .q = hd_f32(take_random(TOPK_ROWS * HEADS * KEY_WIDTH, 1.0f)),
                               .weight = take_random(TOPK_ROWS * HEADS, 1.0f),
                               .keys = take_pages(1, &n_keys, PAGE, KEY_WIDTH, 1.0f),
                               .seq = take_ints(TOPK_ROWS),
                               .pos = pos,
                               .heads = HEADS,
                               .ratio = 1,
                               .top_k = TOPK,
                               .n_blocks = BLOCKS,
                               .block = 5,
                               .scale = 0.25f,
                               .makes_pool = makes};
        check_op(&(op_case){
            .name = "pool_topk",
            .rows = TOPK_ROWS,
            .n_outs = 2,
            .width = {TOPK, BLOCKS},
            .tolerance = {0,    0     },
            .args = &a,
            .run = run_topk
        });
    }
}

static float *take_whole(int64_t n) {
    float *x = take((size_t)n * sizeof *x);
    for (int64_t i = 0; i < n; i++) x[i] = (float)(random_below(5) - 2);
    return x;
}

/* Whole numbers have the same scores in every precision, and many that are equal. More keys than one
 * block of a GPU searches alone; rows that keep all keys, all blocks, or neither. */
void pools_are_those_of_whole_numbers(void **state) {
    enum { ROWS = 5, KEYS = 15001, WIDE = 128, KEEP = 40, SIZE = 8, KEPT_BLOCKS = 1500 };
    static const int32_t at[ROWS] = {5, 300, 11990, 12031, KEYS - 1};
    const int32_t n_keys = KEYS;
    (void)state;
    if (!fix.gpu) return;
    for (int32_t heads = 32; heads <= 64; heads += 32) {
        hd_pool_topk_args a = {.q = hd_f32(take_whole(ROWS * heads * WIDE)),
                               .weight = take_whole(ROWS * heads),
                               .keys = take_pages(1, &n_keys, 64, WIDE, 1.0f),
                               .seq = take_ints(ROWS),
                               .pos = take_copy(at, sizeof at),
                               .heads = heads,
                               .ratio = 1,
                               .top_k = KEEP,
                               .n_blocks = KEPT_BLOCKS,
                               .block = SIZE,
                               .scale = 0.25f,
                               .makes_pool = true};
        for (int32_t u = 0; u < KEYS; u++) {
            memcpy(page_entry(&a.keys, 0, u), take_whole(WIDE), WIDE * sizeof(float));
        }
        int32_t *blocks = take_ints(ROWS * KEPT_BLOCKS);
        for (int32_t makes = 1; makes >= 0; makes--) {
            a.makes_pool = makes;
            const op_case c = {
                .name = "pool_topk, whole numbers",
                .rows = ROWS,
                .n_outs = 2,
                .width = {KEEP, KEPT_BLOCKS},
                .tolerance = {0,    0          },
                .args = &a,
                .run = run_topk
            };
            void *want[MAX_OUTS];
            check_on_gpu(&c);
            run_op(&c, &fix.table[0], fix.stream[0], 0, ROWS, want);
            check_gpu_table(&c, &fix.gpu_fast, 0.0, want);
            memcpy(blocks, want[1], sizeof *blocks * ROWS * KEPT_BLOCKS);
            a.blocks = blocks;
        }
        forget_all(NULL);
    }
}

/* Equal scores: the lower key and the lower block; the newest block is always in the pool. */
void pool_breaks_ties_downwards(void **state) {
    static const float one = 1.0f, key[8] = {1, 2, 2, 2, 2, 1, 2, 0};
    static const int32_t last = 7;
    (void)state;
    int32_t *zero = take_ints(1), *out = take_ints(3), *blocks = take_ints(2);
    hd_pool_topk_args a = {
        .out = out,
        .blocks = blocks,
        .q = hd_f32(take_copy(&one, sizeof one)),
        .weight = take_copy(&one, sizeof one),
        .keys = {.rows = hd_f32(take_copy(key, sizeof key)),
                 .table = zero,
                 .table_stride = 1,
                 .page_entries = 8,
                 .width = 1},
        .seq = zero,
        .pos = take_copy(&last, sizeof last),
        .rows = 1,
        .heads = 1,
        .ratio = 1,
        .top_k = 3,
        .n_blocks = 2,
        .block = 2,
        .scale = 1.0f
    };
    for (int32_t t = 0; t < fix.n_tables; t++) {
        hd_stream *s = stream_for(&fix.table[t], fix.stream[0]);
        a.makes_pool = true;
        fix.table[t].pool_topk(s, &a);
        finish("pool_topk", s);
        assert_memory_equal(out, ((int32_t[]){1, 2, 3}), 3 * sizeof *out);
        assert_memory_equal(blocks, ((int32_t[]){0, 3}), 2 * sizeof *blocks);
        a.makes_pool = false;
        fix.table[t].pool_topk(s, &a);
        finish("pool_topk", s);
        assert_memory_equal(out, ((int32_t[]){0, 1, 6}), 3 * sizeof *out);
    }
}

/* ---- hyper-connections in one pass ---- */

typedef struct single_case {
    hd_hc_single_args a;
    const float *pre;
} single_case;

static void run_single(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                       int32_t n, void *const *out) {
    const single_case *t = c->args;
    hd_hc_single_args a = t->a;
    memcpy(out[3], t->pre + (int64_t)first * a.hc, (size_t)n * (size_t)a.hc * sizeof(float));
    a.out = hd_f32(out[0]);
    a.post = out[1];
    a.comb = out[2];
    a.pre = out[3];
    a.x = hd_rows_at(a.x, (int64_t)first * a.hc * a.cols);
    a.rows = n;
    ops->hc_single(s, &a);
}

static const struct {
    int32_t rows, hc, cols;
    bool first;
} single_shapes[] = {
    {0,  4, 16,  false},
    {1,  4, 5,   true },
    {33, 4, 48,  false},
    {9,  3, 700, false},
};

void op_hc_single(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(single_shapes); i++) {
        const int32_t rows = single_shapes[i].rows, hc = single_shapes[i].hc;
        const int32_t cols = single_shapes[i].cols, wide = hc * cols, n = 2 * hc + hc * hc;
        const single_case t = {
            .a = {.x = hd_f32(take_random((int64_t)rows * wide, 2.0f)),
                  .fn = take_random((int64_t)n * wide, 0.2f),
                  .scale = take_random(3, 1.5f),
                  .base = take_random(n, 1.0f),
                  .cols = cols,
                  .hc = hc,
                  .iters = 20,
                  .norm_eps = 1e-20f,
                  .eps = 1e-6f,
                  .first = single_shapes[i].first},
            .pre = take_random((int64_t)rows * hc, 1.0f)
        };
        check_op(&(op_case){
            .name = "hc_single",
            .rows = rows,
            .n_outs = 4,
            .width = {cols, hc,   hc * hc, hc  },
            .tolerance = {4e-6, 4e-6, 1e-5,    4e-6},
            .args = &t,
            .run = run_single
        });
    }
}

static void run_mix(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first, int32_t n,
                    void *const *out) {
    hd_hc_mix_args a = *(const hd_hc_mix_args *)c->args;
    a.out = hd_f32(out[0]);
    a.x = hd_rows_at(a.x, (int64_t)first * a.hc * a.cols);
    a.pre += (int64_t)first * a.hc;
    a.rows = n;
    ops->hc_mix(s, &a);
}

void op_hc_mix(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(single_shapes); i++) {
        const int32_t rows = single_shapes[i].rows, hc = single_shapes[i].hc;
        const int32_t cols = single_shapes[i].cols;
        hd_hc_mix_args a = {.x = hd_f32(take_random((int64_t)rows * hc * cols, 2.0f)),
                            .pre = take_random((int64_t)rows * hc, 1.0f),
                            .cols = cols,
                            .hc = hc};
        check_op(&(op_case){.name = "hc_mix",
                            .rows = rows,
                            .n_outs = 1,
                            .width = {cols},
                            .tolerance = {2e-6},
                            .args = &a,
                            .run = run_mix});
    }
}

/* ---- Engram ---- */

enum { TOKENS = 9, NGRAM = 3, VOCAB = 50 };

typedef struct classes_case {
    hd_ngram_classes_args a;
    const int32_t *history;
    int32_t size;
} classes_case;

static void run_classes(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                        int32_t n, void *const *out) {
    const classes_case *t = c->args;
    hd_ngram_classes_args a = t->a;
    int32_t *history = take_copy(t->history, (size_t)t->size * sizeof *history);
    (void)first;
    a.out = out[0];
    a.history.rows = (hd_rows){.data = history, .type = HD_I32};
    ops->ngram_classes(s, &a);
    finish("ngram_classes", s);
    for (int32_t r = 0; r < n; r++) ((int32_t *)out[1])[r] = history[a.seqs.pos[r]];
}

/* A step that begins a text, and one that continues it. */
void op_ngram_classes(void **state) {
    (void)state;
    for (int32_t start = 0; start < 6; start += 5) {
        int32_t *tokens = take_ints(TOKENS), *pos = take_ints(TOKENS),
                *class_of = take_ints(VOCAB);
        int32_t *first_row = take_ints(2), *table = take_ints(4),
                *history = take_ints(4 * PAGE);
        for (int32_t i = 0; i < TOKENS; i++) tokens[i] = random_below(VOCAB);
        for (int32_t i = 0; i < TOKENS; i++) pos[i] = start + i;
        for (int32_t i = 0; i < VOCAB; i++) class_of[i] = i / 2;
        for (int32_t i = 0; i < 4; i++) table[i] = i;
        for (int32_t i = 0; i < 4 * PAGE; i++) history[i] = random_below(VOCAB);
        first_row[1] = TOKENS;
        classes_case t = {
            .a = {.history =
                      {.table = table, .table_stride = 4, .page_entries = PAGE, .width = 1},
                  .tokens = tokens,
                  .class_of = class_of,
                  .seqs = {1, first_row, pos, TOKENS},
                  .n = NGRAM,
                  .pad = 4},
            .history = history,
            .size = 4 * PAGE
        };
        check_op(&(op_case){
            .name = "ngram_classes",
            .rows = TOKENS,
            .n_outs = 2,
            .width = {NGRAM, 1},
            .tolerance = {0,     0},
            .all_rows = true,
            .not_recorded = true,
            .args = &t,
            .run = run_classes
        });
    }
}

static void run_engram(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                       int32_t n, void *const *out) {
    hd_engram_embed_args a = *(const hd_engram_embed_args *)c->args;
    a.out = out[0];
    a.classes += (int64_t)first * a.max_ngram;
    a.rows = n;
    ops->engram_embed(s, &a);
}

void op_engram_embed(void **state) {
    (void)state;
    static const int32_t primes[4] = {11, 13, 17, 19}, first_row[4] = {0, 11, 24, 41};
    static const int64_t multipliers[NGRAM] = {76632096046245, 4839876093313, 35959672319349};
    for (int32_t i = 0; i < n_weight_formats; i++) {
        int32_t *classes = take_ints(TOKENS * NGRAM);
        for (int32_t k = 0; k < TOKENS * NGRAM; k++) classes[k] = random_below(VOCAB);
        const hd_weight *table = take_weight(&weight_formats[i], 60, 64, false);
        hd_engram_embed_args a = {.classes = classes,
                                  .table = table,
                                  .multipliers = take_copy(multipliers, sizeof multipliers),
                                  .primes = take_copy(primes, sizeof primes),
                                  .first_row = take_copy(first_row, sizeof first_row),
                                  .max_ngram = NGRAM,
                                  .heads = 2};
        check_op(&(op_case){.name = "engram_embed",
                            .rows = TOKENS,
                            .n_outs = 1,
                            .width = {4 * table->cols},
                            .tolerance = {0},
                            .args = &a,
                            .run = run_engram});
    }
}

typedef struct gate_case {
    hd_engram_gate_args a;
    const float *x;
} gate_case;

static void run_gate(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                     int32_t n, void *const *out) {
    const gate_case *t = c->args;
    hd_engram_gate_args a = t->a;
    memcpy(out[0], t->x + (int64_t)first * c->width[0],
           (size_t)n * (size_t)c->width[0] * sizeof(float));
    a.x = hd_f32(out[0]);
    a.kv += (int64_t)first * (a.hc + 1) * a.cols;
    a.rows = n;
    ops->engram_gate(s, &a);
}

void op_engram_gate(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(single_shapes); i++) {
        const int32_t rows = single_shapes[i].rows, hc = single_shapes[i].hc;
        const int32_t cols = single_shapes[i].cols;
        const gate_case t = {
            .a = {.kv = take_random((int64_t)rows * (hc + 1) * cols, 1.0f),
                  .q_weight = take_random((int64_t)hc * cols, 1.0f),
                  .k_weight = take_random((int64_t)hc * cols, 1.0f),
                  .cols = cols,
                  .hc = hc,
                  .eps = 1e-20f},
            .x = take_random((int64_t)rows * hc * cols, 1.0f)
        };
        check_op(&(op_case){.name = "engram_gate",
                            .rows = rows,
                            .n_outs = 1,
                            .width = {hc * cols},
                            .tolerance = {1e-6},
                            .args = &t,
                            .run = run_gate});
    }
}

/* The published gates: s = 0.04, -0.04 and 0. */
void gates_know_their_answers(void **state) {
    static const float score[] = {0.04f, -0.04f, 0.0f},
                       gate[] = {0.549834f, 0.450166f, 0.50025f}, ones[] = {1.0f, 1.0f};
    (void)state;
    float *x = take(sizeof *x);
    const float *kv = take_copy(ones, sizeof ones), *k = take_copy(ones, sizeof *ones);
    for (int32_t t = 0; t < fix.n_tables; t++) {
        hd_stream *s = stream_for(&fix.table[t], fix.stream[0]);
        for (size_t i = 0; i < HD_LEN(score); i++) {
            const hd_engram_gate_args a = {.x = hd_f32(x),
                                           .kv = kv,
                                           .q_weight = take_copy(&score[i], sizeof *score),
                                           .k_weight = k,
                                           .rows = 1,
                                           .cols = 1,
                                           .hc = 1,
                                           .eps = 1e-20f};
            *x = 1.0f;
            fix.table[t].engram_gate(s, &a);
            finish("engram_gate", s);
            assert_true(fabsf(*x - 1.0f - gate[i]) < 1e-6f);
        }
    }
}
