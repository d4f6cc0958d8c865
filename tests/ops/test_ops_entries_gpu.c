/* test_ops_entries_gpu.c - cached E4M3 at the real models' widths on a GPU: what is read has the bits of a pool
 * of the same numbers in bfloat16 or, of the indexer's keys, float32; in slices and as a graph. */
#include "ops/ops_fixture.h"

#include <math.h>
#include <string.h>

enum { SEQS = 3, PAGE = 64, V_DIM = 512 };

/* The two pools of a list of entries. */
typedef struct pool_pair {
    hd_paged packed, plain;
} pool_pair;

static const hd_group_format mla = {HD_E4M3, HD_E8M0, 128, 64}, v4 = {HD_E4M3, HD_E8M0, 64, 64},
                             keys_of_indexer = {HD_E4M3, HD_E8M0, 128, 0};

/* Every 37th entry has magnitudes for which a scale has two factors, and every 41st is small. */
static void fill(float *x, int32_t width, int32_t e) {
    fill_random(x, width, 2.0f);
    const int power = e % 37 == 11 ? 25 : e % 41 == 7 ? -28 : 0;
    for (int32_t c = 0; c < width; c++) x[c] = ldexpf(x[c], power + c / 64 % 3);
}

static size_t pool_rows(const hd_paged *p, const int32_t *n) {
    int32_t last = 0;
    for (int32_t s = 0; s < SEQS; s++) {
        for (int32_t i = 0; i * PAGE < n[s]; i++) {
            const int32_t page = p->table[s * p->table_stride + i];
            last = page > last ? page : last;
        }
    }
    return (size_t)(last + 1) * PAGE;
}

/* Stores n[s] entries of every sequence on the GPU, and reads them with the reference. */
static pool_pair take_pair(const int32_t *n, int32_t width, hd_group_format format,
                           hd_dtype plain) {
    const hd_paged wide = take_pages(SEQS, n, PAGE, width, 1.0f);
    pool_pair p = {.packed = wide};
    p.packed.rows = (hd_rows){.type = HD_E4M3};
    p.packed.format = format;
    const size_t bytes = pool_rows(&wide, n) * hd_paged_entry_bytes(&p.packed);
    p.packed.rows.data = memset(take(bytes), 0xff, bytes);
    int32_t rows = 0, at = 0;
    for (int32_t s = 0; s < SEQS; s++) rows += n[s];
    int32_t *seq = take_ints(rows), *pos = take_ints(rows);
    float *x = take_nan((int64_t)rows * width);
    for (int32_t s = 0; s < SEQS; s++) {
        for (int32_t e = 0; e < n[s]; e++, at++) {
            seq[at] = s;
            pos[at] = e;
            fill(x + (int64_t)at * width, width, e);
        }
    }
    fix.gpu_fast.kv_store(
        fix.gpu_stream,
        &(hd_kv_store_args){
            .pool = p.packed, .x = hd_f32(x), .seq = seq, .pos = pos, .rows = rows});
    finish("kv_store", fix.gpu_stream);
    const int32_t codes = width - format.plain;
    for (int32_t i = 0; i < rows; i++) {
        const int32_t page = wide.table[seq[i] * wide.table_stride + pos[i] / PAGE];
        const uint8_t *from =
            (const uint8_t *)p.packed.rows.data +
            ((size_t)page * PAGE + (size_t)(pos[i] % PAGE)) * hd_paged_entry_bytes(&p.packed);
        float *to = page_entry(&wide, seq[i], pos[i]);
        for (int32_t c = 0; c < width; c++) {
            const uint8_t scale = from[codes + 2 * format.plain + c / format.group];
            to[c] = c < codes ? hd_e4m3_to_f32(from[c]) * hd_e8m0_to_f32(scale)
                              : hd_dtype_at(HD_BF16, from + codes, c - codes);
        }
    }
    p.plain = plain == HD_BF16 ? narrow_pages(&wide, SEQS, n) : wide;
    return p;
}

/* ---- attention ---- */

typedef struct attention_shape {
    const char *name;
    int32_t width, heads, window, ratio, n_selected, n_tokens[SEQS], rows;
    int32_t run; /* rows of one sequence behind each other */
} attention_shape;

typedef struct attention_pools {
    hd_attention_args a;
    pool_pair recent, entries;
    bool packed;
} attention_pools;

static void run_attention(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                          int32_t n, void *const *out) {
    const attention_pools *t = c->args;
    hd_attention_args a = t->a;
    a.recent = t->packed ? t->recent.packed : t->recent.plain;
    a.entries = t->packed ? t->entries.packed : t->entries.plain;
    a.out = hd_f32(out[0]);
    a.q = hd_rows_at(a.q, (int64_t)first * a.heads * a.k_dim);
    if (a.selected) a.selected += (int64_t)first * a.n_selected;
    a.seq += first;
    a.pos += first;
    a.rows = n;
    ops->attention(s, &a);
}

/* Ascending entries that the row sees, -1 behind them; every third row has few. */
static void choose(int32_t *to, int32_t n, int32_t seen, int32_t row) {
    const int32_t step = seen > n ? seen / n : 1;
    for (int32_t i = 0; i < n; i++) {
        const int32_t e = i * step + row % step;
        to[i] = e < seen && (row % 3 != 1 || i < 5) ? e : -1;
    }
}

static attention_pools take_attention(const attention_shape *sh) {
    const hd_group_format format = sh->width == 576 ? mla : v4;
    int32_t *seq = take_ints(sh->rows), *pos = take_ints(sh->rows);
    int32_t *selected = take_ints((int64_t)sh->rows * sh->n_selected), n_entries[SEQS];
    for (int32_t s = 0; s < SEQS; s++) n_entries[s] = sh->n_tokens[s] / sh->ratio;
    for (int32_t r = 0; r < sh->rows; r++) {
        seq[r] = r / sh->run % SEQS;
        const int32_t last = sh->n_tokens[seq[r]] - 1;
        pos[r] = r < SEQS ? last : r == SEQS ? 0 : last - random_below(last / 3 + 1);
        if (sh->n_selected) {
            choose(selected + r * sh->n_selected, sh->n_selected, (pos[r] + 1) / sh->ratio, r);
        }
    }
    attention_pools t = {
        .entries = take_pair(n_entries, sh->width, format, HD_BF16),
        .a = {.q = hd_f32(take_random((int64_t)sh->rows * sh->heads * sh->width, 1.0f)),
              .selected = sh->n_selected ? selected : NULL,
              .sink = sh->window ? take_random(sh->heads, 2.0f) : NULL,
              .seq = seq,
              .pos = pos,
              .heads = sh->heads,
              .k_dim = sh->width,
              .v_dim = V_DIM,
              .window = sh->window,
              .ratio = sh->ratio,
              .n_selected = sh->n_selected,
              .scale = 0.04f}
    };
    if (sh->window) t.recent = take_pair(sh->n_tokens, sh->width, format, HD_BF16);
    return t;
}

static void attention_case(const attention_shape *sh) {
    attention_pools t = take_attention(sh);
    const op_case c = {.name = sh->name,
                       .rows = sh->rows,
                       .n_outs = 1,
                       .width = {sh->heads * V_DIM},
                       .args = &t,
                       .run = run_attention};
    void *want[MAX_OUTS];
    run_op(&c, &fix.gpu_fast, fix.gpu_stream, 0, c.rows, want);
    t.packed = true;
    check_gpu_table(&c, &fix.gpu_fast, 0.0, want);
    check_gpu_table(&c, &fix.gpu_official, 0.0, want);
    forget_all(NULL);
}

void packed_attention_on_gpu(void **state) {
    (void)state;
    static const attention_shape shapes[] = {
        {"MLA, 128 heads",            576, 128, 0,   1,   0,   {1, 63, 64},      5,   1 },
        {"MLA, parts",                576, 128, 0,   1,   0,   {65, 3100, 130},  7,   1 },
        {"MLA, 40 heads",             576, 40,  0,   1,   0,   {200, 7, 129},    9,   1 },
        {"MLA, 16 heads",             576, 16,  0,   1,   0,   {65, 700, 2},     9,   1 },
        {"MLA, 4 heads, one page",    576, 4,   0,   1,   0,   {64, 40, 9},      30,  10},
        {"MLA, rows share a block",   576, 4,   0,   1,   0,   {65, 700, 2},     300, 20},
        {"MLA, two rows of 16 heads", 576, 16,  0,   1,   0,   {65, 700, 2},     300, 7 },
        {"V3.2, selected",            576, 128, 0,   1,   130, {1, 900, 128},    7,   1 },
        {"V4, window and selected",   512, 64,  128, 4,   96,  {3, 1300, 129},   9,   1 },
        {"V4, window and all",        512, 64,  128, 128, 0,   {127, 5000, 128}, 7,   1 },
        {"V4, window and all, parts", 512, 33,  128, 4,   0,   {9, 16000, 5},    4,   1 },
        {"V4, 16 heads",              512, 16,  128, 4,   96,  {3, 1300, 129},   9,   1 },
        {"V4, 16 heads, all",         512, 16,  128, 128, 0,   {127, 9000, 128}, 4,   1 },
    };
    if (!fix.gpu) return;
    for (size_t i = 0; i < HD_LEN(shapes); i++) attention_case(&shapes[i]);
}

/* ---- the indexer ---- */

typedef struct indexer_pools {
    hd_indexer_topk_args a;
    pool_pair keys;
    bool packed;
} indexer_pools;

static void run_indexer(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                        int32_t n, void *const *out) {
    const indexer_pools *t = c->args;
    hd_indexer_topk_args a = t->a;
    a.keys = t->packed ? t->keys.packed : t->keys.plain;
    a.out = out[0];
    a.q = hd_rows_at(a.q, (int64_t)first * a.heads * a.keys.width);
    a.weight += (int64_t)first * a.heads;
    a.seq += first;
    a.pos += first;
    a.rows = n;
    ops->indexer_topk(s, &a);
}

static void indexer_case(int32_t heads, int32_t rows, const int32_t *n_keys, int32_t top_k) {
    enum { WIDTH = 128 };
    int32_t *seq = take_ints(rows), *pos = take_ints(rows);
    for (int32_t r = 0; r < rows; r++) {
        seq[r] = r / 4 % SEQS; /* four of one sequence share keys */
        pos[r] = n_keys[seq[r]] - 1 - r % 4;
        if (pos[r] < 0) pos[r] = 0;
    }
    indexer_pools t = {
        .keys = take_pair(n_keys, WIDTH, keys_of_indexer, HD_F32),
        .a = {.q = hd_f32(take_random((int64_t)rows * heads * WIDTH, 1.0f)),
              .weight = take_random((int64_t)rows * heads, 1.0f),
              .seq = seq,
              .pos = pos,
              .heads = heads,
              .ratio = 1,
              .top_k = top_k,
              .scale = 0.1f}
    };
    const op_case c = {.name = "packed keys",
                       .rows = rows,
                       .n_outs = 1,
                       .width = {top_k},
                       .args = &t,
                       .run = run_indexer};
    void *want[MAX_OUTS];
    run_op(&c, &fix.gpu_fast, fix.gpu_stream, 0, c.rows, want);
    t.packed = true;
    check_gpu_table(&c, &fix.gpu_fast, 0.0, want);
    forget_all(NULL);
}

void packed_keys_on_gpu(void **state) {
    (void)state;
    static const int32_t n_keys[][SEQS] = {
        {1,   63,   64 },
        {130, 5000, 129}
    };
    if (!fix.gpu) return;
    for (size_t i = 0; i < HD_LEN(n_keys); i++) {
        indexer_case(64, 13, n_keys[i], 50);
        indexer_case(64, 1, n_keys[i], 50);
        indexer_case(32, 5, n_keys[i], 50);
    }
}

/* ---- the naive form ---- */

typedef struct naive_pools {
    hd_attention_naive_args a;
    pool_pair latents;
    bool packed;
} naive_pools;

static void run_naive(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                      int32_t n, void *const *out) {
    const naive_pools *t = c->args;
    hd_attention_naive_args a = t->a;
    (void)first, (void)n;
    a.latents = t->packed ? t->latents.packed : t->latents.plain;
    a.out = hd_f32(out[0]);
    ops->attention_naive(s, &a);
}

void packed_naive_on_gpu(void **state) {
    (void)state;
    enum { HEADS = 3, NOPE = 128, ROPE = 64, VALUES = 128, RANK = 512 };
    static const int32_t n_tokens[SEQS] = {300, 7, 129}, n_rows[SEQS] = {140, 7, 1};
    if (!fix.gpu || fix.brief) return;
    int32_t rows = 0, keys = 0, *first_row = take_ints(SEQS + 1), *pos = take_ints(148);
    for (int32_t s = 0; s < SEQS; s++) {
        for (int32_t r = 0; r < n_rows[s]; r++) pos[rows++] = n_tokens[s] - n_rows[s] + r;
        first_row[s + 1] = rows;
        keys += n_tokens[s];
    }
    naive_pools t = {
        .latents = take_pair(n_tokens, RANK + ROPE, mla, HD_BF16),
        .a = {.q = hd_f32(take_random((int64_t)rows * HEADS * (NOPE + ROPE), 1.0f)),
              .w = take_weight(weight_format_of(FP8_F32), HEADS * (NOPE + VALUES), RANK, false),
              .seqs = {.n = SEQS, .first_row = first_row, .pos = pos},
              .most_rows = rows,
              .most_keys = keys,
              .heads = HEADS,
              .nope_dim = NOPE,
              .rope_dim = ROPE,
              .v_dim = VALUES,
              .scale = 0.02f}
    };
    const op_case c = {.name = "packed latents",
                       .rows = rows,
                       .n_outs = 1,
                       .width = {HEADS * VALUES},
                       .all_rows = true,
                       .args = &t,
                       .run = run_naive};
    void *want[MAX_OUTS];
    run_op(&c, &fix.gpu_fast, fix.gpu_stream, 0, c.rows, want);
    t.packed = true;
    check_gpu_table(&c, &fix.gpu_fast, 0.0, want);
}
