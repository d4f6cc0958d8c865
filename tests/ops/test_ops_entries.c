/* test_ops_entries.c - cached entries that are not float32: what is stored, and that operators read it as
 * they read a float32 pool of the same numbers, bit for bit. */
#include "ops/ops_fixture.h"

#include <math.h>
#include <string.h>

#include "base/cpu.h"
#include "ops/backward.h"

enum { SEQS = 3, PAGE = 5, HEADS = 5 };
static const int32_t seq_entries[SEQS] = {70, 1, 131};

typedef struct entry_format {
    hd_dtype type;
    int32_t width;
    hd_group_format format;
} entry_format;

#define FP8(group, plain) \
    { HD_E4M3, HD_E8M0, group, plain }
#define FP4(scale, group) \
    { HD_E2M1, scale, group, 0 }

static const entry_format formats[] = {
    {HD_BF16,      24,                       {HD_NONE, HD_NONE, 0, 0}},
    {       HD_BF16,          33, {HD_NONE, HD_NONE, 0, 0}                        },
    { HD_E4M3,      33,                            FP8(16,                         8)}, /* groups of 16 and 9 */
    { HD_E4M3,      40,                           FP8(64,                         16)}, /* a group of 24 */
    { HD_E4M3,      80,                            FP8(64,                         0)},
    { HD_E4M3,     128,                           FP8(128,                         0)}, /* keys of the indexer */
    { HD_E4M3,      512,                           FP8(64,                         64)}, /* V4 */
    { HD_E4M3,     576,                          FP8(128,                         64)}, /* MLA */
    { HD_E4M3,      512,                            FP8(32,                         0)}, /* V4.1: window vectors, entries, keys */
    { HD_E2M1, 512,                      FP4(HD_E4M3,                         16)},
    { HD_E2M1, 128,                      FP4(HD_E8M0,                         32)},
    { HD_E2M1, 42,                      FP4(HD_E4M3,                         16)}, /* groups of 16, 16 and 10 */
    { HD_E2M1, 70,                      FP4(HD_E8M0,                         32)},
};

static bool is_gpu(const hd_ops *ops) {
    return stream_for(ops, NULL) != NULL;
}

/* Whether a table has cached entries of a format: a GPU has no E2M1. */
static bool has_format(const hd_ops *ops, const entry_format *f) {
    return !is_gpu(ops) || f->type != HD_E2M1;
}

/* Runs test on every table of every precision that has the format. */
static void on_tables(void (*test)(const hd_ops *ops, const entry_format *f)) {
    for (size_t i = 0; i < HD_LEN(formats); i++) {
        for (int32_t t = 0; t < fix.n_tables; t++) {
            if (has_format(&fix.table[t], &formats[i])) test(&fix.table[t], &formats[i]);
        }
        for (int k = 0; k < FAST_FORMS; k++) {
            for (int32_t t = 1; t < fix.n_fast[k]; t++) test(&fix.fast[k][t], &formats[i]);
        }
        if (fix.gpu && has_format(&fix.gpu_fast, &formats[i])) test(&fix.gpu_fast, &formats[i]);
        forget_all(NULL);
    }
}

/* ---- pools ---- */

/* Of a pool of take_pages(). */
static int32_t n_rows(void) {
    int32_t pages = 1;
    for (int32_t s = 0; s < SEQS; s++) pages += (seq_entries[s] + PAGE - 1) / PAGE;
    return pages * PAGE;
}

static hd_paged empty_pool(const hd_paged *like, const entry_format *f) {
    hd_paged p = *like;
    p.width = f->width;
    p.format = f->format;
    p.rows = (hd_rows){.type = f->type};
    const size_t bytes = (size_t)n_rows() * hd_paged_entry_bytes(&p);
    p.rows.data = memset(take(bytes), 0xff, bytes);
    return p;
}

static const uint8_t *bytes_of(const hd_paged *p, int32_t seq, int32_t e) {
    const int32_t page = p->table[seq * p->table_stride + e / p->page_entries];
    const size_t row = (size_t)page * (size_t)p->page_entries + (size_t)(e % p->page_entries);
    return (const uint8_t *)p->rows.data + row * hd_paged_entry_bytes(p);
}

/* Of entries in groups. */
static const uint8_t *plain_of(const hd_paged *p, const uint8_t *entry) {
    return entry + hd_dtype_bytes(p->format.code, p->width - p->format.plain);
}

static const uint8_t *scales_of(const hd_paged *p, const uint8_t *entry) {
    return plain_of(p, entry) + 2 * p->format.plain;
}

/* Column c of an entry, as ops/group_format.h describes it. */
static float column(const hd_paged *p, const uint8_t *entry, int32_t c) {
    const hd_group_format f = p->format;
    const int32_t codes = p->width - f.plain;
    if (p->rows.type == HD_BF16) return hd_dtype_at(HD_BF16, entry, c);
    if (c >= codes) return hd_dtype_at(HD_BF16, plain_of(p, entry), c - codes);
    return hd_dtype_at(f.code, entry, c) *
           hd_dtype_at(f.scale_type, scales_of(p, entry), c / f.group);
}

typedef struct pools {
    hd_paged wide, packed, decoded; /* decoded: packed as float32 */
} pools;

/* Groups have magnitudes of their own. */
static void fill_wide(const hd_paged *p) {
    for (int32_t s = 0; s < SEQS; s++) {
        for (int32_t e = 0; e < seq_entries[s]; e++) {
            float *x = page_entry(p, s, e);
            for (int32_t c = 0; c < p->width; c++) {
                x[c] = ldexpf(x[c], c / 16 * 7 % 5 - 2 - (e % 7 == 3 ? 30 : 0));
            }
            if (e % 11 == 5) memset(x, 0, (size_t)p->width * sizeof *x);
        }
    }
}

static void store(const hd_ops *ops, const hd_paged *wide, const hd_paged *to, int32_t stride) {
    hd_stream *stream = stream_for(ops, fix.stream[1]);
    for (int32_t s = 0; s < SEQS; s++) {
        const int32_t n = seq_entries[s];
        int32_t *seq = take_ints(n), *pos = take_ints(n);
        float *x = take_nan((int64_t)n * stride);
        for (int32_t e = 0; e < n; e++) {
            seq[e] = s;
            pos[e] = e;
            memcpy(x + (int64_t)e * stride, page_entry(wide, s, e),
                   (size_t)wide->width * sizeof *x);
        }
        ops->kv_store(stream, &(hd_kv_store_args){.pool = *to,
                                                  .x = hd_rows_strided(hd_f32(x), stride),
                                                  .seq = seq,
                                                  .pos = pos,
                                                  .rows = n});
        finish("kv_store", stream);
    }
}

static pools take_pools(const hd_ops *ops, const entry_format *f) {
    pools p = {.wide = take_pages(SEQS, seq_entries, PAGE, f->width, 1.0f)};
    fill_wide(&p.wide);
    p.packed = empty_pool(&p.wide, f);
    store(ops, &p.wide, &p.packed, f->width + 3);
    p.decoded = p.wide;
    p.decoded.rows.data = take_nan((int64_t)n_rows() * f->width);
    for (int32_t s = 0; s < SEQS; s++) {
        for (int32_t e = 0; e < seq_entries[s]; e++) {
            float *x = page_entry(&p.decoded, s, e);
            const uint8_t *entry = bytes_of(&p.packed, s, e);
            for (int32_t c = 0; c < f->width; c++) x[c] = column(&p.packed, entry, c);
        }
    }
    return p;
}

/* ---- what is stored ---- */

/* A power of two is the least one with room for the largest magnitude; E4M3 is the nearest. */
static void check_scale(hd_group_format f, double most, double s) {
    const double largest = f.code == HD_E4M3 ? 448.0 : 6.0;
    if (f.scale_type == HD_E8M0) {
        assert_true(most <= largest * s && most > largest * s / 2);
        return;
    }
    for (uint32_t code = 0; code <= hd_dtypes[HD_E4M3].largest; code++) {
        const double other = (double)hd_dtypes[HD_E4M3].decode(code);
        assert_true(fabs(most / largest - s) <= fabs(most / largest - other) * (1 + 1e-6));
    }
}

static void check_group(const hd_paged *p, const float *x, const uint8_t *entry, int32_t first,
                        int32_t n) {
    const hd_group_format f = p->format;
    const double s = (double)hd_dtype_at(f.scale_type, scales_of(p, entry), first / f.group);
    double most = f.code == HD_E4M3         ? (double)1e-4f
                  : f.scale_type == HD_E8M0 ? 6.0 * 0x1p-126
                                            : 6.0 * 0x1p-9;
    for (int32_t c = first; c < first + n; c++) most = fmax(most, fabs((double)x[c]));
    check_scale(f, most, s);
    for (int32_t c = first; c < first + n; c++) {
        const double off = fabs((double)x[c] - (double)column(p, entry, c));
        for (uint32_t other = 0; other < 1u << hd_dtype_bits(f.code); other++) {
            const double y = s * (double)hd_dtypes[f.code].decode(other);
            if (fabs((double)x[c] - y) < off * (1 - 1e-6))
                fail_msg("code %u is nearer than column %d", other, c);
        }
    }
}

/* Every table stores the bytes of the reference. */
static void check_bytes(const pools *p, const entry_format *f) {
    const hd_paged want = empty_pool(&p->wide, f);
    store(&fix.table[0], &p->wide, &want, f->width);
    for (int32_t s = 0; s < SEQS; s++) {
        for (int32_t e = 0; e < seq_entries[s]; e++) {
            assert_memory_equal(bytes_of(&p->packed, s, e), bytes_of(&want, s, e),
                                hd_paged_entry_bytes(&want));
        }
    }
}

static void check_stored(const hd_ops *ops, const entry_format *f) {
    const pools p = take_pools(ops, f);
    check_bytes(&p, f);
    const bool packed = hd_is_packed(f->type);
    const int32_t codes = packed ? f->width - f->format.plain : 0, group = f->format.group;
    for (int32_t s = 0; s < SEQS; s++) {
        for (int32_t e = 0; e < seq_entries[s]; e += 3) {
            const float *x = page_entry(&p.wide, s, e);
            const uint8_t *entry = bytes_of(&p.packed, s, e);
            for (int32_t c = 0; c < codes; c += group) {
                check_group(&p.packed, x, entry, c, codes - c < group ? codes - c : group);
            }
            for (int32_t c = codes; c < f->width; c++) {
                const uint16_t want = hd_f32_to_bf16(x[c]);
                assert_int_equal(hd_f32_to_bf16(column(&p.packed, entry, c)), want);
            }
            if (!packed) continue;
            const uint8_t *end = scales_of(&p.packed, entry) + (codes + group - 1) / group;
            while (end < entry + hd_paged_entry_bytes(&p.packed)) assert_int_equal(*end++, 0);
        }
    }
}

void entries_are_the_nearest(void **state) {
    (void)state;
    on_tables(check_stored);
}

/* ---- numbers that are rounded, but not packed ---- */

/* The format in a pool of another type, and rows of a pass, have the numbers of packed entries. */
static void check_rounded(const hd_ops *ops, hd_stream *s, const entry_format *f,
                          hd_dtype type) {
    const pools p = take_pools(&fix.table[0], f);
    const int32_t n = seq_entries[0];
    int32_t *seq = take_ints(n), *pos = take_ints(n);
    float *x = take_nan((int64_t)n * f->width), *want = take_nan((int64_t)n * f->width);
    for (int32_t e = 0; e < n; e++) {
        const uint8_t *entry = bytes_of(&p.packed, 0, e);
        pos[e] = e;
        memcpy(x + e * f->width, page_entry(&p.wide, 0, e), (size_t)f->width * sizeof *x);
        for (int32_t c = 0; c < f->width; c++)
            want[e * f->width + c] = column(&p.packed, entry, c);
    }
    const hd_paged to = empty_pool(&p.wide, &(entry_format){type, f->width, f->format});
    ops->kv_store(
        s, &(hd_kv_store_args){.pool = to, .x = hd_f32(x), .seq = seq, .pos = pos, .rows = n});
    finish("kv_store", s);
    for (int32_t e = 0; e < n; e++) {
        float got[HD_MAX_ENTRY_COLS];
        const uint8_t *entry = bytes_of(&to, 0, e);
        for (int32_t c = 0; c < f->width; c++) got[c] = hd_dtype_at(type, entry, c);
        check_bits("a rounded entry", got, want + e * f->width, f->width);
    }
    ops->round_rows(s, &(hd_round_rows_args){
                           .x = hd_f32(x), .format = f->format, .rows = n, .cols = f->width});
    finish("round_rows", s);
    check_bits("rounded rows", x, want, (int64_t)n * f->width);
}

/* A GPU rounds whole groups of 16 and 32. */
static bool on_gpu(const entry_format *f) {
    const hd_group_format g = f->format;
    return fix.gpu && g.plain == 0 && (g.group == 16 || g.group == 32);
}

void entries_are_rounded(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(formats); i++) {
        if (!hd_is_packed(formats[i].type)) continue;
        for (hd_dtype type = HD_F32; type <= HD_BF16; type++) {
            if (type == HD_F16) continue;
            for (int32_t t = 0; t < fix.n_tables; t++) {
                if (is_gpu(&fix.table[t])) continue;
                check_rounded(&fix.table[t], fix.stream[1], &formats[i], type);
            }
            if (on_gpu(&formats[i]))
                check_rounded(&fix.gpu_official, fix.gpu_stream, &formats[i], type);
        }
    }
}

void entry_sizes(void **state) {
    (void)state;
    static const struct {
        entry_format f;
        size_t bytes;
    } sizes[] = {
        {{HD_E4M3, 512, FP8(64, 64)},      584 },
        {{HD_E4M3, 576, FP8(128, 64)},     644 },
        {{HD_E4M3, 128, FP8(128, 0)},      132 },
        {{HD_E4M3, 512, FP8(32, 0)},       528 },
        {{HD_E2M1, 512, FP4(HD_E4M3, 16)}, 288 },
        {{HD_E2M1, 128, FP4(HD_E8M0, 32)}, 68  },
        {{HD_BF16, 576, FP8(128, 64)},     1152}, /* what is rounded and not packed */
        {{HD_F32, 576, FP4(HD_E4M3, 16)},  2304},
    };
    for (size_t i = 0; i < HD_LEN(sizes); i++) {
        const entry_format *f = &sizes[i].f;
        assert_int_equal(hd_entry_bytes(f->type, f->width, f->format), sizes[i].bytes);
    }
}

/* A group with NaN or infinity is NaN: nothing that overflowed looks like a number. */
void entries_keep_nan(void **state) {
    (void)state;
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    static const entry_format all[] = {
        {HD_E4M3, 40, FP8(16,      8) },
        {HD_E2M1, 40, FP4(HD_E4M3, 16)},
        {HD_E2M1, 40, FP4(HD_E8M0, 16)}
    };
    for (size_t k = 0; k < HD_LEN(all); k++) {
        const entry_format *f = &all[k];
        const hd_paged wide = take_pages(SEQS, seq_entries, PAGE, f->width, 1.0f);
        for (int32_t i = 0; i < 3; i++) page_entry(&wide, 2, i)[20] = bad[i];
        const hd_paged packed = empty_pool(&wide, f);
        for (int32_t t = 0; t < fix.n_tables; t++) {
            if (!has_format(&fix.table[t], f)) continue;
            store(&fix.table[t], &wide, &packed, f->width);
            for (int32_t i = 0; i < 3; i++) {
                const uint8_t *entry = bytes_of(&packed, 2, i);
                for (int32_t c = 0; c < f->width; c++) {
                    assert_int_equal(isnan(column(&packed, entry, c)), c >= 16 && c < 32);
                }
            }
        }
    }
}

/* ---- what is read ---- */

typedef struct query {
    const float *q, *weight;
    int32_t *seq, *pos;
    const int32_t *selected;
    int32_t rows;
} query;

static query take_query(const entry_format *f) {
    enum { ROWS = 9, SELECTED = 6 };
    query x = {.q = take_random((int64_t)ROWS * HEADS * f->width, 1.0f),
               .weight = take_random((int64_t)ROWS * HEADS, 1.0f),
               .seq = take_ints(ROWS),
               .pos = take_ints(ROWS),
               .rows = ROWS};
    int32_t *selected = take_ints(ROWS * SELECTED);
    for (int32_t r = 0; r < ROWS; r++) {
        x.seq[r] = r % 3 == 1 ? 1 : r % 3;
        x.pos[r] = random_below(seq_entries[x.seq[r]]);
        for (int32_t i = 0; i < SELECTED; i++) {
            selected[r * SELECTED + i] = i * 7 <= x.pos[r] ? i * 7 : -1;
        }
    }
    x.selected = selected;
    return x;
}

static void run_attention(const hd_ops *ops, hd_stream *cpu, const hd_paged *pool,
                          const query *x, bool selected, float *out) {
    hd_stream *s = stream_for(ops, cpu);
    const hd_attention_args a = {.out = hd_f32(out),
                                 .q = hd_f32(x->q),
                                 .recent = *pool,
                                 .entries = *pool,
                                 .selected = selected ? x->selected : NULL,
                                 .seq = x->seq,
                                 .pos = x->pos,
                                 .rows = x->rows,
                                 .heads = HEADS,
                                 .k_dim = pool->width,
                                 .v_dim = pool->width - 3,
                                 .window = 67,
                                 .ratio = 1,
                                 .n_selected = 6,
                                 .scale = 0.3f};
    ops->attention(s, &a);
    finish("attention", s);
}

static void check_attention(const hd_ops *ops, const entry_format *f) {
    const pools p = take_pools(ops, f);
    const query x = take_query(f);
    const int64_t n = (int64_t)x.rows * HEADS * (f->width - 3);
    float *want = take_nan(n), *got = take_nan(n);
    for (int selected = 0; selected < 2; selected++) {
        run_attention(ops, fix.stream[0], &p.decoded, &x, selected, want);
        for (int i = 0; i < (is_gpu(ops) ? 1 : N_THREADS); i++) {
            run_attention(ops, fix.stream[i], &p.packed, &x, selected, got);
            check_bits(ops->name, got, want, n);
        }
    }
}

static void run_naive(const hd_ops *ops, const hd_paged *pool, const query *x,
                      const hd_weight *w, float *out) {
    enum { ROPE = 8, NOPE = 12, VALUES = 20 };
    const int32_t first_row[] = {0, 0, 0, 6}, pos[] = {3, 4, 66, 67, 80, 130};
    const hd_attention_naive_args a = {
        .out = hd_f32(out),
        .q = hd_f32(x->q),
        .latents = *pool,
        .w = w,
        .seqs = {.n = SEQS, .first_row = first_row, .pos = pos},
        .most_rows = 6,
        .most_keys = 131,
        .heads = 1,
        .nope_dim = NOPE,
        .rope_dim = ROPE,
        .v_dim = VALUES,
        .scale = 0.3f
    };
    ops->attention_naive(fix.stream[1], &a);
    finish("attention_naive", fix.stream[1]);
}

/* On a GPU it has one width: test_ops_entries_gpu.c. */
static void check_naive(const hd_ops *ops, const entry_format *f) {
    if (f->width < 24 || is_gpu(ops)) return;
    const pools p = take_pools(ops, f);
    const query x = take_query(f);
    const hd_weight *w = take_weight(weight_format_of(F32_PLAIN), 32, f->width - 8, false);
    float *want = take_nan(6 * 20), *got = take_nan(6 * 20);
    run_naive(ops, &p.decoded, &x, w, want);
    run_naive(ops, &p.packed, &x, w, got);
    check_bits(ops->name, got, want, 6 * 20);
}

static void choose(const hd_ops *ops, hd_stream *cpu, const hd_paged *keys, const query *x,
                   int32_t *out) {
    hd_stream *s = stream_for(ops, cpu);
    const hd_indexer_topk_args a = {.out = out,
                                    .q = hd_f32(x->q),
                                    .weight = x->weight,
                                    .keys = *keys,
                                    .seq = x->seq,
                                    .pos = x->pos,
                                    .rows = x->rows,
                                    .heads = HEADS,
                                    .ratio = 1,
                                    .top_k = 7,
                                    .scale = 0.25f};
    ops->indexer_topk(s, &a);
    finish("indexer_topk", s);
}

static void choose_pool(const hd_ops *ops, const hd_paged *keys, const query *x, int32_t *out) {
    hd_stream *s = stream_for(ops, fix.stream[1]);
    const hd_pool_topk_args a = {.out = out,
                                 .blocks = take_ints(9 * 4),
                                 .q = hd_f32(x->q),
                                 .weight = x->weight,
                                 .keys = *keys,
                                 .seq = x->seq,
                                 .pos = x->pos,
                                 .rows = x->rows,
                                 .heads = HEADS,
                                 .ratio = 1,
                                 .top_k = 7,
                                 .n_blocks = 4,
                                 .block = 8,
                                 .scale = 0.25f,
                                 .makes_pool = true};
    ops->pool_topk(s, &a);
    finish("pool_topk", s);
}

static void check_choices(const hd_ops *ops, const entry_format *f) {
    if (is_gpu(ops) && (f->type == HD_BF16 || f->width > 256)) return; /* no keys of a GPU */
    const pools p = take_pools(ops, f);
    const query x = take_query(f);
    int32_t *want = take_ints(9 * 7), *got = take_ints(9 * 7);
    choose(ops, fix.stream[0], &p.decoded, &x, want);
    for (int i = 0; i < (is_gpu(ops) ? 1 : N_THREADS); i++) {
        choose(ops, fix.stream[i], &p.packed, &x, got);
        assert_memory_equal(got, want, 9 * 7 * sizeof *got);
    }
    choose_pool(ops, &p.decoded, &x, want);
    choose_pool(ops, &p.packed, &x, got);
    assert_memory_equal(got, want, 9 * 7 * sizeof *got);
}

void packed_entries_are_read(void **state) {
    (void)state;
    on_tables(check_attention);
    on_tables(check_naive);
    on_tables(check_choices);
}

/* ---- gradients: of every position of every sequence ---- */

typedef struct slopes {
    float *dq, *drecent, *dentries;
    int64_t n_q, n_keys;
} slopes;

static slopes go_back(const hd_ops *ops, const hd_backward_ops *back, const hd_paged *pool) {
    enum { ROWS = 70 + 1 + 131 };
    static int32_t first_row[SEQS + 1], seq[ROWS], pos[ROWS];
    for (int32_t s = 0; s < SEQS; s++) {
        first_row[s + 1] = first_row[s] + seq_entries[s];
        for (int32_t p = 0; p < seq_entries[s]; p++) {
            seq[first_row[s] + p] = s;
            pos[first_row[s] + p] = p;
        }
    }
    const int32_t k_dim = pool->width, v_dim = k_dim - 3;
    const int64_t n_out = (int64_t)ROWS * HEADS * v_dim;
    slopes x = {.n_q = (int64_t)ROWS * HEADS * k_dim, .n_keys = (int64_t)ROWS * k_dim};
    float *q = take_nan(x.n_q), *g = take_nan(n_out), *out = take_nan(n_out);
    for (int64_t i = 0; i < x.n_q; i++) q[i] = sinf((float)i);
    for (int64_t i = 0; i < n_out; i++) g[i] = cosf((float)i);
    x.dq = take_nan(x.n_q);
    x.drecent = take_nan(x.n_keys);
    x.dentries = take_nan(x.n_keys);
    const query all = {.q = q, .seq = seq, .pos = pos, .rows = ROWS};
    run_attention(ops, fix.stream[1], pool, &all, false, out);
    const hd_attention_back_args a = {
        .dq = x.dq,
        .drecent = x.drecent,
        .dentries = x.dentries,
        .lse = take_nan(ROWS * HEADS),
        .delta = take_nan(ROWS * HEADS),
        .g = hd_f32(g),
        .out = hd_f32(out),
        .q = hd_f32(q),
        .recent = *pool,
        .entries = *pool,
        .first_entry = first_row,
        .seqs = {.n = SEQS, .first_row = first_row, .pos = pos, .most_rows = 131},
        .rows = ROWS,
        .heads = HEADS,
        .k_dim = k_dim,
        .v_dim = v_dim,
        .window = 67,
        .ratio = 1,
        .scale = 0.3f
    };
    back->attention_back(fix.stream[1], &a);
    finish("attention_back", fix.stream[1]);
    return x;
}

void gradients_read_packed_entries(void **state) {
    (void)state;
    hd_backward_ops tables[2];
    hd_backward_init_ref(&tables[0]);
    hd_backward_init_cpu(&tables[1], hd_cpu_features());
    for (size_t i = 0; i < 4; i++) { /* the narrow ones: the reference is slow */
        const pools p = take_pools(&fix.table[0], &formats[i]);
        for (size_t t = 0; t < HD_LEN(tables); t++) {
            const slopes want = go_back(&fix.table[0], &tables[t], &p.decoded);
            const slopes got = go_back(&fix.table[0], &tables[t], &p.packed);
            check_bits("dq", got.dq, want.dq, want.n_q);
            check_bits("drecent", got.drecent, want.drecent, want.n_keys);
            check_bits("dentries", got.dentries, want.dentries, want.n_keys);
        }
    }
}

/* ---- operators that make entries: what they store is what kv_store stores of their float32 ---- */

static const float freq[] = {1.0f, 0.1f};

static void compress(const hd_ops *ops, const hd_paged *entries, int32_t tokens) {
    hd_stream *s = stream_for(ops, fix.stream[1]);
    const int32_t width = entries->width;
    int32_t *pos = take_ints(tokens), *first_row = take_ints(2);
    for (int32_t i = 0; i < tokens; i++) pos[i] = i;
    first_row[1] = tokens;
    float *kv = take_nan((int64_t)tokens * width), *gate = take_nan((int64_t)tokens * width);
    float *ape = take_nan(4 * (int64_t)width), *norm = take_nan(width);
    for (int64_t i = 0; i < (int64_t)tokens * width; i++) {
        kv[i] = sinf((float)i);
        gate[i] = cosf((float)i);
    }
    for (int32_t i = 0; i < 4 * width; i++) ape[i] = 0.25f * (float)(i % 3);
    for (int32_t i = 0; i < width; i++) norm[i] = 1.0f + (float)(i % 5);
    const hd_ring state = {.rows = hd_f32(take_nan((int64_t)tokens * 2 * width)),
                           .table = take_ints(1),
                           .table_stride = 1,
                           .page_tokens = tokens,
                           .ring = tokens,
                           .width = 2 * width};
    const hd_compress_args a = {
        .entries = *entries,
        .state = state,
        .kv = kv,
        .gate = gate,
        .ape = ape,
        .norm = norm,
        .freq = take_copy(freq, sizeof freq),
        .seqs = {.n = 1, .first_row = first_row, .pos = pos},
        .ratio = 4,
        .pairs = 2,
        .eps = 1e-6f
    };
    ops->compress(s, &a);
    finish("compress", s);
}

static void store_groups(const hd_ops *ops, const hd_paged *entries, int32_t tokens) {
    hd_stream *s = stream_for(ops, fix.stream[1]);
    int32_t *seq = take_ints(tokens), *pos = take_ints(tokens);
    float *x = take_nan((int64_t)tokens * entries->width);
    for (int32_t i = 0; i < tokens; i++) pos[i] = i;
    for (int64_t i = 0; i < (int64_t)tokens * entries->width; i++) x[i] = sinf((float)i);
    ops->store_groups(s, &(hd_store_groups_args){.entries = *entries,
                                                 .x = x,
                                                 .freq = take_copy(freq, sizeof freq),
                                                 .seq = seq,
                                                 .pos = pos,
                                                 .rows = tokens,
                                                 .ratio = 4,
                                                 .pairs = 2});
    finish("store_groups", s);
}

static void check_made(const hd_ops *ops, const entry_format *f) {
    static void (*const makers[])(const hd_ops *, const hd_paged *, int32_t) = {compress,
                                                                                store_groups};
    for (size_t i = 0; i < HD_LEN(makers); i++) {
        const hd_paged wide = take_pages(SEQS, seq_entries, PAGE, f->width, 1.0f);
        const hd_paged got = empty_pool(&wide, f), want = empty_pool(&wide, f);
        makers[i](ops, &wide, 4 * 30);
        makers[i](ops, &got, 4 * 30);
        store(ops, &wide, &want, f->width);
        for (int32_t e = 0; e < 30; e++) {
            assert_memory_equal(bytes_of(&got, 0, e), bytes_of(&want, 0, e),
                                hd_paged_entry_bytes(&got));
        }
    }
}

void made_entries_are_packed(void **state) {
    (void)state;
    on_tables(check_made);
}

/* HiSparse copies entries as they are. */
static void check_buffer(const hd_ops *ops, const entry_format *f) {
    hd_stream *s = stream_for(ops, fix.stream[1]);
    const pools p = take_pools(ops, f);
    const size_t bytes = hd_paged_entry_bytes(&p.packed);
    const query x = take_query(f);
    enum { ROOM = 54 };
    int32_t *out = take_ints(ROOM);
    hd_resident b = {
        .rows = {.data = take(ROOM * bytes), .type = f->type},
        .n = ROOM,
        .row_of = take_ints(n_rows()),
        .owner = take_ints(ROOM),
        .used = memset(take(ROOM * sizeof(int64_t)), 0, ROOM * sizeof(int64_t)),
        .state = memset(take(sizeof(hd_resident_state)), 0, sizeof(hd_resident_state)),
        .counts = take(sizeof(hd_resident_counts)),
        .missed = take_ints(ROOM),
        .victim = take_ints(ROOM)
    };
    ops->resident(s, &(hd_resident_args){.out = out,
                                         .selected = x.selected,
                                         .entries = p.packed,
                                         .buffer = b,
                                         .seq = x.seq,
                                         .rows = x.rows,
                                         .top_k = 6});
    finish("resident", s);
    for (int32_t i = 0; i < x.rows * 6; i++) {
        if (x.selected[i] < 0) continue;
        assert_memory_equal((const uint8_t *)b.rows.data + (size_t)out[i] * bytes,
                            bytes_of(&p.packed, x.seq[i / 6], x.selected[i]), bytes);
    }
}

void packed_entries_are_fetched(void **state) {
    (void)state;
    on_tables(check_buffer);
}
