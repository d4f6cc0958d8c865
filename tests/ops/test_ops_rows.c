/* test_ops_rows.c - row-wise operators: embed, gather, add, norms, rope, kv_store, replay_store,
 * swiglu. */
#include "ops/ops_fixture.h"

#include <math.h>
#include <string.h>

/* widths around the sizes of registers and tasks, and one that needs several tasks */
static const int32_t widths[] = {1, 2, 7, 8, 15, 16, 17, 31, 33, 48, 255, 256, 257, 1030, 4100};
static const int32_t row_counts[] = {0, 1, 33};

/* ---- embed: also the exact test of every format's decoder ---- */

static void run_embed(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                      int32_t n, void *const *out) {
    hd_embed_args a = *(const hd_embed_args *)c->args;
    a.out = hd_f32(out[0]);
    a.tokens += first;
    a.rows = n;
    ops->embed(s, &a);
}

static void embed_format(const weight_format *f, int32_t cols, int32_t rows, int32_t copies) {
    int32_t *tokens = take_ints(rows);
    const hd_weight *w = take_weight(f, 41, cols, true);
    for (int32_t i = 0; i < rows; i++) tokens[i] = random_below(w->rows);
    hd_embed_args a = {.table = w, .tokens = tokens, .copies = copies};
    check_op(&(op_case){.name = f->name,
                        .rows = rows,
                        .n_outs = 1,
                        .width = {w->cols * copies},
                        .args = &a,
                        .run = run_embed});
}

void op_embed(void **state) {
    (void)state;
    for (int32_t f = 0; f < n_weight_formats; f++) {
        for (size_t i = 0; i < HD_LEN(widths); i++) {
            embed_format(&weight_formats[f], widths[i], row_counts[i % 3], 1 + (int32_t)i % 4);
        }
        embed_format(&weight_formats[f], 1200, 33, 1);
    }
}

/* ---- gather, add ---- */

static void run_gather(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                       int32_t n, void *const *out) {
    hd_gather_args a = *(const hd_gather_args *)c->args;
    a.out = hd_f32(out[0]);
    a.index += first;
    a.rows = n;
    ops->gather(s, &a);
}

void op_gather(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(widths); i++) {
        const int32_t rows = row_counts[i % 3], cols = widths[i];
        int32_t *index = take_ints(rows);
        for (int32_t r = 0; r < rows; r++) index[r] = random_below(9);
        hd_gather_args a = {
            .x = hd_f32(take_random(9 * cols, 1.0f)), .index = index, .cols = cols};
        check_op(&(op_case){.name = "gather",
                            .rows = rows,
                            .n_outs = 1,
                            .width = {cols},
                            .args = &a,
                            .run = run_gather});
    }
}

typedef struct add_case {
    hd_add_args a;
    const float *x; /* the values before */
} add_case;

/* A row of the case is one row of y. */
static void run_add(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first, int32_t n,
                    void *const *out) {
    const add_case *t = c->args;
    hd_add_args a = t->a;
    memcpy(out[0], t->x + (int64_t)first * c->width[0],
           (size_t)n * (size_t)c->width[0] * sizeof(float));
    a.x = hd_f32(out[0]);
    a.y = hd_rows_at(a.y, (int64_t)first * a.cols);
    a.rows = n * a.repeat;
    ops->add(s, &a);
}

void op_add(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(widths); i++) {
        const int32_t rows = row_counts[i % 3], cols = widths[i], repeat = 1 + (int32_t)i % 4;
        add_case t = {
            .a = {.y = hd_f32(take_random((int64_t)rows * cols, 1.0f)),
                  .cols = cols,
                  .repeat = repeat},
            .x = take_random((int64_t)rows * repeat * cols, 1.0f)
        };
        check_op(&(op_case){.name = "add",
                            .rows = rows,
                            .n_outs = 1,
                            .width = {repeat * cols},
                            .args = &t,
                            .run = run_add});
    }
}

/* ---- numbers of a format; more of them in test_ops_entries.c ---- */

typedef struct round_case {
    hd_round_rows_args a;
    const float *x; /* the values before */
} round_case;

static void run_round_rows(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                           int32_t n, void *const *out) {
    const round_case *t = c->args;
    hd_round_rows_args a = t->a;
    memcpy(out[0], t->x + (int64_t)first * a.cols, (size_t)n * (size_t)a.cols * sizeof(float));
    a.x = hd_f32(out[0]);
    a.rows = n;
    ops->round_rows(s, &a);
}

void op_round_rows(void **state) {
    (void)state;
    static const hd_group_format formats[] = {
        {HD_E2M1, HD_E8M0, 32,  0},
        {HD_E2M1, HD_E4M3, 16,  0},
        {HD_E4M3, HD_E8M0, 32,  0},
        {HD_E4M3, HD_F32,  32,  0},
        {HD_E4M3, HD_E8M0, 128, 0},
        {HD_E4M3, HD_E8M0, 64,  8}
    };
    static const int32_t cols[] = {128, 32, 16, 1, 33, 300, 512};
    for (size_t f = 0; f < HD_LEN(formats); f++) {
        for (size_t i = 0; i < HD_LEN(cols); i++) {
            const int32_t rows = row_counts[i % 3];
            const int64_t n = (int64_t)rows * cols[i];
            if (cols[i] <= formats[f].plain) continue;
            float *x = take_random(n, 1.0f);
            for (int64_t k = 0; k < n; k++) x[k] = ldexpf(x[k], (int)(k / 16 * 5 % 9) - 4);
            round_case t = {
                .a = {.format = formats[f], .cols = cols[i]},
                  .x = x
            };
            check_op(&(op_case){.name = "round_rows",
                                .rows = rows,
                                .n_outs = 1,
                                .width = {cols[i]},
                                .args = &t,
                                .run = run_round_rows});
        }
    }
}

static void run_pack_rows(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                          int32_t n, void *const *out) {
    hd_pack_rows_args a = *(const hd_pack_rows_args *)c->args;
    a.out = out[0];
    a.x = hd_rows_at(a.x, (int64_t)first * a.cols);
    a.rows = n;
    ops->pack_rows(s, &a);
}

/* What comes back is what round_rows makes of the row, NaN and infinity too. */
static void check_packed(hd_pack_rows_args a, const float *x) {
    const size_t n = (size_t)a.cols, bytes = hd_packed_row_bytes(a.format, a.cols);
    uint8_t *packed = malloc((size_t)a.rows * bytes + 1);
    float *want = malloc((size_t)a.rows * n * sizeof *want + 1), *got = malloc(n * sizeof *got);
    assert_true(packed && want && got);
    memcpy(want, x, (size_t)a.rows * n * sizeof *x);
    a.out = packed;
    fix.table[0].pack_rows(fix.stream[0], &a);
    fix.table[0].round_rows(fix.stream[0], &(hd_round_rows_args){.x = hd_f32(want),
                                                                 .format = a.format,
                                                                 .rows = a.rows,
                                                                 .cols = a.cols});
    finish("pack_rows", fix.stream[0]);
    for (int32_t r = 0; r < a.rows; r++) {
        hd_unpack_row(got, packed + (size_t)r * bytes, a.format, a.cols);
        for (size_t i = 0; i < n; i++) {
            const float w = want[(size_t)r * n + i];
            assert_true(isnan(w) ? isnan(got[i]) : memcmp(&got[i], &w, sizeof w) == 0);
        }
    }
    free(packed);
    free(want);
    free(got);
}

void op_pack_rows(void **state) {
    (void)state;
    static const hd_group_format formats[] = {
        {HD_E4M3, HD_E8M0, 128, 0},
        {HD_E4M3, HD_F32,  128, 0},
        {HD_E4M3, HD_E8M0, 32,  0},
        {HD_E4M3, HD_F32,  64,  0}
    };
    for (size_t f = 0; f < HD_LEN(formats); f++) {
        for (size_t i = 0; i < HD_LEN(widths); i++) {
            const int32_t rows = row_counts[i % 3], cols = widths[i];
            const int64_t n = (int64_t)rows * cols;
            float *x = take_random(n, 1.0f);
            for (int64_t k = 0; k < n; k++) x[k] = ldexpf(x[k], (int)(k / 16 * 5 % 9) - 4);
            hd_pack_rows_args a = {.x = hd_f32(x), .format = formats[f], .cols = cols};
            check_op(&(op_case){
                .name = "pack_rows",
                .rows = rows,
                .n_outs = 1,
                .width = {(int32_t)(hd_packed_row_bytes(formats[f], cols) / sizeof(float))},
                .args = &a,
                .run = run_pack_rows});
            a.rows = rows;
            check_packed(a, x);
            if (n == 0) continue;
            x[n - 1] = i % 2 ? INFINITY : NAN;
            check_packed(a, x);
        }
    }
}

/* ---- norms ---- */

typedef struct norm_case {
    hd_rms_norm_args rms;
    hd_layer_norm_args layer;
    const float *x;
    int32_t x_stride;
    bool in_place;
} norm_case;

/* In place: the input is copied to the place of the output. */
static hd_rows norm_input(const norm_case *t, int32_t first, int32_t n, void *out) {
    const float *x = t->x + (int64_t)first * t->x_stride;
    if (!t->in_place) return hd_f32(x);
    memcpy(out, x, (size_t)n * (size_t)t->x_stride * sizeof *x);
    return hd_f32(out);
}

static void run_rms_norm(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                         int32_t n, void *const *out) {
    const norm_case *t = c->args;
    hd_rms_norm_args a = t->rms;
    a.x = hd_rows_strided(norm_input(t, first, n, out[0]), a.out.stride);
    a.out.data = out[0];
    a.rows = n;
    ops->rms_norm(s, &a);
}

void op_rms_norm(void **state) {
    (void)state;
    const float spreads[] = {1.0f, 1e-4f, 1e4f,
                             0.0f}; /* eps is relevant, irrelevant, and all there is */
    for (size_t i = 0; i < HD_LEN(widths); i++) {
        for (int kind = 0; kind < 4; kind++) {
            const int32_t rows = row_counts[(i + (size_t)kind) % 3], cols = widths[i];
            const bool strided = kind == 1 || kind == 3;
            const int32_t stride = strided ? cols + 5 : cols;
            norm_case t = {
                .x = take_random((int64_t)rows * stride, spreads[(i + (size_t)kind) % 4]),
                .x_stride = stride,
                .in_place = kind >= 2,
                .rms = {.weight = i % 2 ? take_random(cols, 2.0f) : NULL,
                        .cols = cols,
                        .out = hd_rows_strided(hd_f32(NULL), strided ? stride : 0),
                        .eps = 1e-6f}
            };
            /* 2^-24 times the depth of a sum of cols / 16 terms, and three roundings */
            check_op(&(op_case){.name = "rms_norm",
                                .rows = rows,
                                .n_outs = 1,
                                .width = {stride},
                                .tolerance = {1e-6},
                                .args = &t,
                                .run = run_rms_norm});
        }
    }
}

static void run_layer_norm(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                           int32_t n, void *const *out) {
    const norm_case *t = c->args;
    hd_layer_norm_args a = t->layer;
    a.x = norm_input(t, first, n, out[0]);
    a.out = hd_f32(out[0]);
    a.rows = n;
    ops->layer_norm(s, &a);
}

void op_layer_norm(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(widths); i++) {
        const int32_t rows = row_counts[i % 3], cols = widths[i];
        norm_case t = {
            .x = take_random((int64_t)rows * cols, 3.0f),
            .x_stride = cols,
            .in_place = i % 2,
            .layer = {.weight = take_random(cols, 2.0f),
                      .bias = take_random(cols, 1.0f),
                      .cols = cols,
                      .eps = 1e-6f}
        };
        check_op(&(op_case){.name = "layer_norm",
                            .rows = rows,
                            .n_outs = 1,
                            .width = {cols},
                            .tolerance = {1e-6},
                            .args = &t,
                            .run = run_layer_norm});
    }
}

/* ---- rotary embedding ---- */

static void run_rope_table(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                           int32_t n, void *const *out) {
    hd_rope_table_args a = *(const hd_rope_table_args *)c->args;
    a.out = out[0];
    a.position += first;
    a.rows = n;
    ops->rope_table(s, &a);
}

void op_rope_table(void **state) {
    (void)state;
    for (int32_t pairs = 1; pairs < 40; pairs += 6) {
        const int32_t rows = pairs == 7 ? 0 : 33;
        int32_t *position = take_ints(rows);
        for (int32_t r = 0; r < rows; r++) position[r] = random_below(1000000);
        hd_rope_table_args a = {.position = position,
                                .freq = take_random(pairs, 1.0f),
                                .pairs = pairs,
                                .scale = pairs % 2 ? 1.0f : 0.7f};
        check_op(&(op_case){.name = "rope_table",
                            .rows = rows,
                            .n_outs = 1,
                            .width = {2 * pairs},
                            .tolerance = {1e-6},
                            .args = &a,
                            .run = run_rope_table});
    }
}

typedef struct rope_case {
    hd_rope_args a;
    const float *x; /* [rows, width of the output] */
    bool in_place;
} rope_case;

static void run_rope(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                     int32_t n, void *const *out) {
    const rope_case *t = c->args;
    const float *x = t->x + (int64_t)first * c->width[0];
    hd_rope_args a = t->a;
    memcpy(out[0], x, (size_t)n * (size_t)c->width[0] * sizeof *x);
    a.out = hd_f32(out[0]);
    a.x = t->in_place ? a.out : hd_f32(x);
    a.cos_sin += (int64_t)first * 2 * a.pairs;
    a.rows = n;
    ops->rope(s, &a);
}

void op_rope(void **state) {
    (void)state;
    for (int32_t kind = 0; kind < 16; kind++) {
        const int32_t rows = row_counts[kind % 3], heads = 1 + kind % 5, pairs = 1 + kind * 2;
        const int32_t head = 2 * pairs + kind % 4; /* some elements are not rotated */
        rope_case t = {
            .a = {.cos_sin = take_random((int64_t)rows * 2 * pairs, 1.0f),
                  .heads = heads,
                  .pairs = pairs,
                  .out_head = head,
                  .x_head = head,
                  .half_split = kind & 1,
                  .inverse = kind & 2},
            .x = take_random((int64_t)rows * heads * head, 1.0f),
            .in_place = kind & 4
        };
        check_op(&(op_case){.name = "rope",
                            .rows = rows,
                            .n_outs = 1,
                            .width = {heads * head},
                            .tolerance = {1e-6},
                            .args = &t,
                            .run = run_rope});
    }
}

/* ---- store ---- */

typedef struct store_case {
    hd_kv_store_args a;
    int32_t n_entries; /* of the whole pool */
} store_case;

static void run_store(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                      int32_t n, void *const *out) {
    const store_case *t = c->args;
    hd_kv_store_args a = t->a;
    (void)first;
    a.pool.rows.data = out[0];
    a.rows = n ? c->rows * t->n_entries : 0; /* all rows, into the whole pool */
    ops->kv_store(s, &a);
}

/* A pool of bfloat16 gets the entries of one of float32, rounded, and no other. */
static void check_narrow_store(const store_case *t, int64_t n) {
    hd_kv_store_args a = t->a;
    float *wide = take_nan(n);
    uint16_t *narrow = take((size_t)n * sizeof *narrow);
    memset(narrow, 0xff, (size_t)n * sizeof *narrow);
    a.rows = t->n_entries;
    a.pool.rows = hd_f32(wide);
    fix.gpu_fast.kv_store(fix.gpu_stream, &a);
    a.pool.rows = (hd_rows){.data = narrow, .type = HD_BF16};
    fix.gpu_fast.kv_store(fix.gpu_stream, &a);
    assert_int_equal(hd_stream_sync(fix.gpu_stream, NULL), HD_OK);
    for (int64_t i = 0; i < n; i++) {
        assert_int_equal(narrow[i],
                         isnan(wide[i]) ? 0xffff : hd_dtypes[HD_BF16].encode(wide[i]));
    }
}

void op_kv_store(void **state) {
    (void)state;
    enum { SEQS = 3, PER_SEQ = 23 };
    const int32_t n_entries[SEQS] = {PER_SEQ, PER_SEQ, PER_SEQ};
    for (int32_t width = 1; width < 1500; width = 3 * width + 1) {
        const int32_t rows = SEQS * PER_SEQ;
        int32_t *seq = take_ints(rows), *pos = take_ints(rows);
        for (int32_t r = 0; r < rows;
             r++) { /* 29 and 69 have no common divisor: all entries, shuffled */
            seq[r] = r * 29 % rows / PER_SEQ;
            pos[r] = r * 29 % rows % PER_SEQ;
        }
        const int32_t stride = width % 2 ? width : width + 3;
        const hd_rows x = hd_f32(take_random((int64_t)rows * stride, 1.0f));
        store_case t = {
            .a =
                {
                    .pool = take_pages(SEQS, n_entries, 5, width, 1.0f),
                    .x = hd_rows_strided(x, width % 2 ? 0 : stride),
                    .seq = seq,
                    .pos = pos,
                    },
            .n_entries = rows
        };
        const int32_t n_pages = SEQS * ((PER_SEQ + 4) / 5) + 1;
        check_op(&(op_case){.name = "kv_store",
                            .rows = 1,
                            .n_outs = 1,
                            .width = {n_pages * 5 * width},
                            .all_rows = true,
                            .args = &t,
                            .run = run_store});
        if (fix.gpu) check_narrow_store(&t, (int64_t)n_pages * 5 * width);
    }
}

/* ---- choices ---- */

typedef struct replay_case {
    hd_replay_store_args a;
    int32_t n_rows;
} replay_case;

static void run_replay(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                       int32_t n, void *const *out) {
    const replay_case *t = c->args;
    hd_replay_store_args a = t->a;
    (void)first;
    a.log.data =
        (uint8_t *)out[0] + a.log.number_bytes * a.top_k; /* the second of two layers */
    a.rows = n ? t->n_rows : 0;
    ops->replay_store(s, &a);
}

/* Little-endian numbers at the row of the position's entry, and nothing else. */
static void check_replay(const op_case *c) {
    const replay_case *t = c->args;
    const hd_replay_log *log = &t->a.log;
    const int32_t bytes = log->number_bytes, k = t->a.top_k;
    uint8_t *got = take((size_t)c->width[0] * 4), *want = take((size_t)c->width[0] * 4);
    memset(got, 0xa5, (size_t)c->width[0] * 4);
    memset(want, 0xa5, (size_t)c->width[0] * 4);
    run_replay(c, &fix.table[0], fix.stream[0], 0, 1, (void *const[]){got});
    finish("replay_store", fix.stream[0]);
    for (int32_t r = 0; r < t->n_rows; r++) {
        const int32_t pos = log->pos[r], in_page = pos % log->page_tokens;
        const int32_t page =
            log->table[log->seq[r] * log->table_stride + pos / log->page_tokens];
        uint8_t *row = want + (page * log->page_tokens + in_page) * log->row_bytes + bytes * k;
        for (int32_t j = 0; j < k; j++)
            memcpy(row + j * bytes, &t->a.choice[r * k + j], (size_t)bytes);
    }
    assert_memory_equal(got, want, (size_t)c->width[0] * 4);
}

void op_replay_store(void **state) {
    (void)state;
    enum { SEQS = 3, PER_SEQ = 23, PAGE = 5, ROWS = SEQS * PER_SEQ };
    const int32_t n_entries[SEQS] = {PER_SEQ, PER_SEQ, PER_SEQ};
    for (int32_t bytes = 1; bytes <= 4; bytes *= 2) {
        const int32_t k = 4 + 4 * bytes;
        int32_t *seq = take_ints(ROWS), *pos = take_ints(ROWS);
        int32_t *choice = take_ints((int64_t)ROWS * k);
        for (int32_t r = 0; r < ROWS; r++) {
            seq[r] = r * 29 % ROWS / PER_SEQ;
            pos[r] = r * 29 % ROWS % PER_SEQ;
        }
        for (int32_t i = 0; i < ROWS * k; i++) choice[i] = i % 7 ? i * 1234567 : -1;
        const hd_paged pages = take_pages(SEQS, n_entries, PAGE, 1, 1.0f);
        const replay_case t = {
            .a = {.choice = choice,
                  .log = {.seq = seq,
                          .pos = pos,
                          .table = pages.table,
                          .table_stride = pages.table_stride,
                          .page_tokens = PAGE,
                          .row_bytes = 2 * k * bytes,
                          .number_bytes = bytes},
                  .top_k = k},
            .n_rows = ROWS
        };
        const int32_t n_pages = SEQS * ((PER_SEQ + PAGE - 1) / PAGE) + 1;
        const op_case c = {.name = "replay_store",
                           .rows = 1,
                           .n_outs = 1,
                           .width = {n_pages * PAGE * 2 * k * bytes / 4},
                           .all_rows = true,
                           .args = &t,
                           .run = run_replay};
        check_replay(&c);
        check_op(&c);
    }
}

/* ---- swiglu ---- */

typedef struct swiglu_case {
    hd_swiglu_args a;
    const float *gate;
    bool in_place;
} swiglu_case;

static void run_swiglu(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                       int32_t n, void *const *out) {
    const swiglu_case *t = c->args;
    const float *gate = t->gate + (int64_t)first * t->a.cols;
    hd_swiglu_args a = t->a;
    if (t->in_place) memcpy(out[0], gate, (size_t)n * (size_t)a.cols * sizeof *gate);
    a.out = hd_f32(out[0]);
    a.gate = t->in_place ? a.out : hd_f32(gate);
    a.up = hd_rows_at(a.up, (int64_t)first * a.cols);
    if (a.weight) a.assignment += first;
    a.rows = n;
    ops->swiglu(s, &a);
}

void op_swiglu(void **state) {
    (void)state;
    const float spreads[] = {1.0f, 30.0f, 200.0f}; /* exp overflows beyond 88 */
    for (size_t i = 0; i < HD_LEN(widths); i++) {
        const int32_t rows = row_counts[i % 3], cols = widths[i];
        const float spread = spreads[i / 3 % 3];
        int32_t *assignment = take_ints(rows);
        for (int32_t r = 0; r < rows; r++) assignment[r] = random_below(40);
        swiglu_case t = {
            .a = {.up = hd_f32(take_random((int64_t)rows * cols, spread)),
                  .weight = i % 2 ? take_random(40, 1.0f) : NULL,
                  .assignment = i % 2 ? assignment : NULL,
                  .cols = cols,
                  .limit = i % 4 < 2 ? 0.0f : 0.4f * spread},
            .gate = take_random((int64_t)rows * cols, spread),
            .in_place = i % 5 == 0
        };
        check_op(&(op_case){.name = "swiglu",
                            .rows = rows,
                            .n_outs = 1,
                            .width = {cols},
                            .tolerance = {1e-6},
                            .args = &t,
                            .run = run_swiglu});
    }
}
