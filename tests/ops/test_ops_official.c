/* test_ops_official.c - --precision official: GEMMs with x rounded as the official programs round it, and
 * attention and the indexer with bfloat16.
 *
 * The test rounds inputs again, as docs/numerics.md says, and the reference of `exact` computes with them:
 * the same bits as the reference of `official`. On a GPU the remaining difference is the order of float32
 * sums, and what tensor cores drop of a sum of 128 FP8 products. One row, seven, all rows and a captured
 * graph must have the same bits. */
#include "ops/ops_fixture.h"
#include "ops/wgmma_probe.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum {
    SPAN = 128, /* columns that share a scale; 32 in V4.1 */
    EXPERTS = 6,
    TOP_K = 2,
    FEW = 8,          /* rows of an expert, for the tiles of the smallest batches */
    MOST_PLACES = 250 /* the shape that the reference computes */
};

/* Of |want| + rms, of an element. The tensor cores keep 13 bits of a sum of 128 FP8 products, and outliers shift
 * the rest of a span out of them; sums of bfloat16 lose nothing but their order. */
static const double fp8_tolerance = 1.5e-3, outlier_tolerance = 2e-3, bf16_tolerance = 4e-6;

typedef enum spread { EVEN, NARROW, OUTLIERS, SPREADS } spread;

/* ---- x as the GPU multiplies it ---- */

static float scale_for(float most, bool powers) {
    const float scale = fmaxf(most, 1e-4f) / 448.0f;
    int exponent;
    if (!powers) return scale;
    const float fraction = frexpf(scale, &exponent); /* [0.5, 1) */
    return ldexpf(1.0f, fraction > 0.5f ? exponent : exponent - 1);
}

static void round_span(float *x, int32_t n, bool powers) {
    float most = 0.0f;
    for (int32_t i = 0; i < n; i++) most = fmaxf(most, fabsf(x[i]));
    const float scale = scale_for(most, powers);
    for (int32_t i = 0; i < n; i++) x[i] = hd_e4m3_to_f32(hd_f32_to_e4m3(x[i] / scale)) * scale;
}

static void round_to_bf16(float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) x[i] = hd_bf16_to_f32(hd_f32_to_bf16(x[i]));
}

static float *rounded(const float *x, int64_t n, const hd_weight *w) {
    float *y = take_copy(x, (size_t)n * sizeof *y);
    if (w->type == HD_BF16 || w->scale_type == HD_E4M3) {
        if (w->cols % 64 == 0) round_to_bf16(y, n); /* whole spans */
        return y;
    }
    const int32_t group = w->x_group ? w->x_group : SPAN;
    for (int64_t i = 0; i < n; i += group)
        round_span(y + i, group, w->power_scales || w->scale_type == HD_E8M0);
    return y;
}

static float *take_x(int64_t n, spread how) {
    float *x = take_random(n, 1.0f);
    for (int64_t i = 0; i < n; i++) {
        const int64_t span = i / SPAN;
        if (how == NARROW) x[i] = 1.0f + 0x1p-6f * x[i];
        if (how == OUTLIERS && i % 517 == 3) x[i] *= 4096.0f;
        if (how != NARROW)
            x[i] *= span % 37 == 5 ? 0.0f : ldexpf(1.0f, (int)(span * 7 % 11) - 5);
    }
    return x;
}

/* A stored matrix of a model whose x is rounded in groups of so many columns. */
static const hd_weight *take_official(int32_t format, int32_t outs, int32_t cols, bool powers,
                                      int32_t group) {
    hd_weight *w = take_copy(take_aligned(format, outs, cols, powers), sizeof *w);
    w->x_group = group == SPAN ? 0 : group;
    return w;
}

/* Of products with w: rows of x are numbers of bfloat16, or meet the FP8 instructions. */
static double tolerance_of(const hd_weight *w, spread how) {
    const bool v41_fp8 = w->type == HD_E4M3 && w->x_group == 32;
    if (hd_format_of_x(w).code == HD_NONE || v41_fp8) return bf16_tolerance;
    return how == OUTLIERS ? outlier_tolerance : fp8_tolerance;
}

/* A GPU alone is compared with the numbers that are rounded here. */
static void check(op_case *c, const void *rounded_args, double within) {
    void *want[MAX_OUTS], *got[MAX_OUTS];
    hd_ops official;
    op_case exact = *c;
    exact.args = rounded_args;
    fix.poisoned = false;
    run_op(&exact, &fix.table[0], fix.stream[0], 0, c->rows, want);
    if (!fix.gpu_alone) {
        hd_ops_init_ref(&official, HD_OFFICIAL);
        run_op(c, &official, fix.stream[0], 0, c->rows, got);
        check_bits(c->name, got[0], want[0], (int64_t)c->rows * c->width[0]);
    }
    check_gpu_official(c, within, 1e-3, want);
}

/* ---- one matrix ---- */

static void run_linear(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                       int32_t n, void *const *out) {
    hd_linear_args a = *(const hd_linear_args *)c->args;
    a.out = hd_f32(out[0]);
    a.x = hd_rows_at(a.x, (int64_t)first * a.w->cols);
    a.rows = n;
    ops->linear(s, &a);
}

static void linear_shape(int32_t format, int32_t rows, int32_t outs, int32_t cols, spread how,
                         int32_t group) {
    const hd_weight *w = take_official(format, outs, cols, rows % 2, group);
    const int64_t n = (int64_t)rows * cols;
    const float *x = take_x(n, how);
    const hd_linear_args a = {.w = w, .x = hd_f32(x)},
                         r = {.w = w, .x = hd_f32(rounded(x, n, w))};
    check(&(op_case){.name = "linear",
                     .rows = rows,
                     .n_outs = 1,
                     .width = {outs},
                     .args = &a,
                     .run = run_linear},
          &r, tolerance_of(w, how));
    forget_all(NULL);
}

void official_linear(void **state) {
    (void)state;
    static const struct {
        int32_t format, rows, outs, cols, group;
    } shapes[] = {
        {FP8_F32,    7,   264,  640,  SPAN}, /* an edge of W, five spans */
        {FP8_32,     7,   264,  288,  32  }, /* a rank's part */
        {BF16_PLAIN, 7,   264,  640,  SPAN},
        {NVFP4_E4M3, 7,   264,  640,  SPAN},
        {BF16_PLAIN, 3,   33,   96,   SPAN}, /* not rounded */
        {BF16_PLAIN, 17,  512,  4096, SPAN},
        {BF16_PLAIN, 129, 200,  896,  SPAN},
        {NVFP4_E4M3, 129, 200,  896,  SPAN},
        {NVFP4_E4M3, 1,   1024, 7168, SPAN},
        {FP8_F32,    1,   2112, 7168, SPAN},
        {FP8_E8M0,   17,  512,  4096, SPAN},
        {FP8_F32,    65,  1536, 384,  SPAN},
        {FP8_E8M0,   129, 200,  896,  SPAN},
        {FP8_F32,    261, 456,  512,  SPAN},
        {E4M3_ODD,   7,   40,   256,  SPAN}, /* not the kernels' */
        {FP8_F32,    3,   129,  256,  SPAN},
        {FP4_E8M0,   9,   64,   512,  SPAN},
        {FP8_32,     1,   1280, 5120, 32  },
        {FP8_32,     17,  512,  1280, 32  },
        {FP8_32,     65,  96,   2304, 32  },
        {FP8_32,     129, 200,  96,   32  },
        {FP8_32,     3,   33,   64,   32  },
        {FP4_E8M0,   9,   64,   544,  32  },
    };
    const size_t n = fix.brief || !fix.gpu ? 5 : HD_LEN(shapes);
    for (size_t i = 0; i < n; i++) {
        for (spread how = EVEN; how < SPREADS; how++)
            linear_shape(shapes[i].format, shapes[i].rows, shapes[i].outs, shapes[i].cols, how,
                         shapes[i].group);
    }
}

/* ---- one matrix per head ---- */

static void run_heads(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                      int32_t n, void *const *out) {
    hd_linear_heads_args a = *(const hd_linear_heads_args *)c->args;
    a.out = hd_f32(out[0]);
    a.x = hd_rows_at(a.x, (int64_t)first * a.heads * a.x_head);
    a.rows = n;
    ops->linear_heads(s, &a);
}

/* FP8 is multiplied in bfloat16 here, and so is the transpose. n_rows: of a head's 256. */
void official_linear_heads(void **state) {
    (void)state;
    enum { HEADS = 3, HEAD_ROWS = 256 };
    static const int32_t formats[] = {FP8_F32, BF16_PLAIN, FP8_E8M0};
    static const struct {
        int32_t rows, n_rows, first_row, cols;
        bool transpose, narrows;
    } shapes[] = {
        {3,   128, 0,   512, false, true }, /* MLA's values */
        {3,   128, 128, 512, true,  true }, /* and keys */
        {3,   96,  128, 512, true,  false}, /* no whole spans */
        {3,   128, 0,   480, false, false},
        {40,  128, 128, 512, false, true },
        {40,  128, 0,   512, true,  true },
        {300, 128, 128, 512, false, true },
        {300, 128, 0,   512, true,  true },
    };
    const size_t n = fix.brief || !fix.gpu ? 4 : HD_LEN(shapes);
    for (size_t i = 0; i < HD_LEN(formats) * n; i++) {
        const hd_weight *w = take_aligned(formats[i / n], HEADS * HEAD_ROWS, shapes[i % n].cols,
                                          formats[i / n] == FP8_E8M0);
        const bool transpose = shapes[i % n].transpose;
        hd_linear_heads_args a = {.w = w,
                                  .heads = HEADS,
                                  .n_rows = shapes[i % n].n_rows,
                                  .first_row = shapes[i % n].first_row,
                                  .head_rows = HEAD_ROWS,
                                  .transpose = transpose};
        a.x_head = transpose ? a.n_rows : w->cols;
        a.out_head = transpose ? w->cols : a.n_rows;
        const int64_t many = (int64_t)shapes[i % n].rows * HEADS * a.x_head;
        float *x = take_random(many, 1.0f), *narrow = take_copy(x, (size_t)many * sizeof *x);
        if (shapes[i % n].narrows) round_to_bf16(narrow, many);
        a.x = hd_f32(x);
        hd_linear_heads_args r = a;
        r.x = hd_f32(narrow);
        check(&(op_case){.name = "linear_heads",
                         .rows = shapes[i % n].rows,
                         .n_outs = 1,
                         .width = {HEADS * a.out_head},
                         .args = &a,
                         .run = run_heads},
              &r, bf16_tolerance);
        forget_all(NULL);
    }
}

/* ---- experts ---- */

static void run_grouped(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                        int32_t n, void *const *out) {
    hd_grouped_gemm_args a = *(const hd_grouped_gemm_args *)c->args;
    (void)first;
    (void)n;
    a.out = hd_f32(out[0]);
    ops->grouped_gemm(s, &a);
}

/* An expert alone gives its rows the bits that they have among other experts, and so do a few of its rows, and
 * one matrix. */
static void check_alone(const hd_grouped_gemm_args *all, const float *x, const float *got) {
    const int32_t outs = all->w->shape.rows, cols = all->w->shape.cols;
    for (int32_t e = 0; e < all->w->n; e++) {
        const int32_t first = all->offset[e], n = all->offset[e + 1] - first;
        float *rows = take((size_t)n * (size_t)cols * sizeof *rows);
        int32_t *offset = take_ints(2);
        void *out[MAX_OUTS];
        for (int32_t i = 0; i < n; i++) {
            const int32_t place = first + i;
            const int64_t from = all->assignment ? all->assignment[place] / TOP_K : place;
            memcpy(rows + (int64_t)i * cols, x + from * cols, (size_t)cols * sizeof *rows);
        }
        offset[1] = n;
        const hd_linear_args one = {.w = &all->w->slots[e], .x = hd_f32(rows)};
        hd_expert_table table;
        hd_expert_table_init(&table, &all->w->slots[e], 1);
        const hd_grouped_gemm_args alone = {
            .x = hd_f32(rows), .w = &table, .offset = offset, .top_k = 1, .n_places = n};
        op_case c = {.name = "one expert",
                     .rows = 1,
                     .n_outs = 1,
                     .width = {n * outs},
                     .args = &alone,
                     .run = run_grouped};
        if (n == 0) continue;
        run_op(&c, &fix.gpu_official, fix.gpu_stream, 0, 1, out);
        check_bits("an expert alone", got + (int64_t)first * outs, out[0], (int64_t)n * outs);
        if (n > FEW && all->n_places > MOST_PLACES) { /* which meet no reference */
            hd_grouped_gemm_args some = alone;
            int32_t *few = take_ints(2);
            few[1] = FEW;
            some.offset = few;
            some.n_places = FEW;
            op_case s = c;
            s.width[0] = FEW * outs;
            s.args = &some;
            run_op(&s, &fix.gpu_official, fix.gpu_stream, 0, 1, out);
            check_bits("a few rows", got + (int64_t)first * outs, out[0], (int64_t)FEW * outs);
        }
        if (all->w->shape.type != HD_E4M3) continue;
        c.rows = n;
        c.width[0] = outs;
        c.args = &one;
        c.run = run_linear;
        run_op(&c, &fix.gpu_official, fix.gpu_stream, 0, n, out);
        check_bits("one matrix", got + (int64_t)first * outs, out[0], (int64_t)n * outs);
    }
}

static void grouped_shape(int32_t format, const int32_t *counts, int32_t outs, int32_t cols,
                          spread how, bool assigned, int32_t group) {
    int32_t *offset = take_ints(EXPERTS + 1);
    hd_weight *w = take(EXPERTS * sizeof *w);
    for (int32_t e = 0; e < EXPERTS; e++) {
        offset[e + 1] = offset[e] + counts[e];
        w[e] = *take_official(format, outs, cols, false, group);
    }
    const int32_t places = offset[EXPERTS], rows = assigned ? places / TOP_K : places;
    int32_t *assignment = take_ints(places);
    for (int32_t k = 0; k < places; k++) assignment[k] = (k * 7 + 3) % places;
    const int64_t n = (int64_t)rows * cols;
    const float *x = take_x(n, how);
    hd_expert_table table;
    hd_expert_table_init(&table, w, EXPERTS);
    const hd_grouped_gemm_args a = {.x = hd_f32(x),
                                    .w = &table,
                                    .offset = offset,
                                    .assignment = assigned ? assignment : NULL,
                                    .top_k = TOP_K,
                                    .n_places = places};
    hd_grouped_gemm_args r = a;
    op_case c = {.name = "grouped_gemm",
                 .rows = 1,
                 .n_outs = 1,
                 .width = {places * outs},
                 .all_rows = true,
                 .args = &a,
                 .run = run_grouped};
    void *out[MAX_OUTS];
    if (places <= MOST_PLACES) {
        r.x = hd_f32(rounded(x, n, w));
        check(&c, &r, tolerance_of(w, how));
    }
    if (fix.gpu) run_op(&c, &fix.gpu_official, fix.gpu_stream, 0, 1, out);
    if (fix.gpu && !fix.brief) check_alone(&a, x, out[0]);
    forget_all(NULL);
}

void official_grouped_gemm(void **state) {
    (void)state;
    static const int32_t counts[][EXPERTS] = {
        {0, 0, 0, 42, 0,  0  }, /* all to one */
        {3, 0, 1, 2,  14, 0  },
        {0, 9, 0, 33, 70, 130},
    };
    static const struct {
        int32_t format, group;
    } kinds[] = {
        {FP8_F32,    SPAN},
        {FP8_E8M0,   SPAN},
        {FP4_E8M0,   SPAN},
        {FP4_E8M0,   32  }, /* V4.1 */
        {FP8_32,     32  },
        {BF16_PLAIN, SPAN},
        {NVFP4_E4M3, SPAN},
    };
    for (size_t f = 0; f < HD_LEN(kinds); f++) {
        for (size_t i = 0; i < (fix.brief || !fix.gpu ? 1 : HD_LEN(counts)); i++) {
            for (spread how = EVEN; how < SPREADS; how++) {
                const int32_t format = kinds[f].format, group = kinds[f].group;
                grouped_shape(format, counts[i], 264, group == 32 ? 288 : 640, how, i % 2,
                              group);
                if (fix.brief || !fix.gpu || how != (f + i) % SPREADS) continue;
                grouped_shape(format, counts[i], 512, 1024, how, !(i % 2), group);
            }
        }
    }
}

/* Rows and places that the scratch does not hold at once have the bits of those that it does. */
void official_little_scratch(void **state) {
    (void)state;
    enum { ROWS = 1300, OUTS = 40, COLS = 288 };
    static const int32_t counts[EXPERTS] = {300, 0, 161, 600, 5, 234};
    hd_stream *little;
    if (!fix.gpu || fix.brief) return;
    assert_int_equal(hd_stream_open(&little, fix.gpu, NULL), HD_OK);
    assert_int_equal(hd_stream_reserve(little, 4096, NULL), HD_OK);
    const float *x = take_x((int64_t)ROWS * COLS, EVEN);
    const hd_linear_args one = {.w = take_official(FP8_32, OUTS, COLS, true, 32),
                                .x = hd_f32(x)};
    int32_t *offset = take_ints(EXPERTS + 1), *assignment = take_ints(ROWS);
    hd_weight *w = take(EXPERTS * sizeof *w);
    for (int32_t e = 0; e < EXPERTS; e++) {
        offset[e + 1] = offset[e] + counts[e];
        w[e] = *take_official(FP4_E8M0, OUTS, COLS, false, 32);
    }
    for (int32_t k = 0; k < ROWS; k++) assignment[k] = (k * 7 + 3) % ROWS;
    hd_expert_table table;
    hd_expert_table_init(&table, w, EXPERTS);
    const hd_grouped_gemm_args many = {.x = hd_f32(x),
                                       .w = &table,
                                       .offset = offset,
                                       .assignment = assignment,
                                       .top_k = 1,
                                       .n_places = ROWS};
    const op_case cases[] = {
        {.name = "linear",       .rows = ROWS, .width = {OUTS}, .args = &one, .run = run_linear},
        {.name = "grouped_gemm",
         .rows = 1,
         .width = {ROWS * OUTS},
         .args = &many,
         .run = run_grouped                                                                    },
    };
    for (size_t i = 0; i < HD_LEN(cases); i++) {
        op_case c = cases[i];
        void *want[MAX_OUTS], *got[MAX_OUTS];
        c.n_outs = 1;
        fix.poisoned = false;
        run_op(&c, &fix.gpu_official, fix.gpu_stream, 0, c.rows, want);
        run_op(&c, &fix.gpu_official, little, 0, c.rows, got);
        check_bits(c.name, got[0], want[0], (int64_t)ROWS * OUTS);
    }
    hd_stream_close(little);
    forget_all(NULL);
}

/* Rows of a large batch have the bits of a small one, although each shape selects another
 * tile. */
void official_tiles(void **state) {
    (void)state;
    static const struct {
        int32_t format, rows, outs, cols;
    } shapes[] = {
        {FP8_F32,    1000, 4232,  384 }, /* of 192 x 128 */
        {FP8_F32,    400,  8200,  256 }, /* 128 x 128 */
        {FP8_F32,    128,  24576, 256 }, /* 128 x 192 */
        {FP8_F32,    300,  456,   512 }, /* 128 x 64 */
        {FP8_F32,    64,   17000, 256 }, /* 64 x 128 */
        {BF16_PLAIN, 200,  17000, 128 }, /* rounded: 128 x 128 */
        {BF16_PLAIN, 200,  17100, 128 }, /* a pair of them */
        {MXFP8_E8M0, 100,  8300,  192 }, /* 128 x 64 */
        {BF16_PLAIN, 100,  8192,  192 }, /* a pair of them */
        {BF16_PLAIN, 97,   456,   1088}, /* slices */
        {MXFP8_E8M0, 129,  264,   2048},
    };
    static const int32_t counts[][EXPERTS] = {
        {700, 0,  161, 300, 5,   90},
        {130, 20, 90,  100, 150, 60},
    };
    if (!fix.gpu || fix.brief) return;
    for (size_t i = 0; i < HD_LEN(shapes); i++) {
        const int32_t rows = shapes[i].rows, outs = shapes[i].outs, few = 16;
        const hd_weight *w = take_aligned(shapes[i].format, outs, shapes[i].cols, false);
        const hd_linear_args a = {.w = w, .x = hd_f32(take_x((int64_t)rows * w->cols, EVEN))};
        const op_case c = {.name = "linear",
                           .rows = rows,
                           .n_outs = 1,
                           .width = {outs},
                           .args = &a,
                           .run = run_linear};
        const int32_t firsts[] = {0, rows / 2 - 7, rows - few};
        void *all[MAX_OUTS], *some[MAX_OUTS];
        const hd_ops *tables[] = {&fix.gpu_official, &fix.gpu_fast};
        fix.poisoned = false;
        for (size_t k = 0; k < HD_LEN(firsts) * HD_LEN(tables); k++) {
            const hd_ops *ops = tables[k / HD_LEN(firsts)];
            const int32_t first = firsts[k % HD_LEN(firsts)];
            if (first == 0) run_op(&c, ops, fix.gpu_stream, 0, rows, all);
            run_op(&c, ops, fix.gpu_stream, first, few, some);
            check_bits("many rows", (const float *)all[0] + (int64_t)first * outs, some[0],
                       (int64_t)few * outs);
        }
        forget_all(NULL);
    }
    for (size_t i = 0; i < HD_LEN(counts); i++) {
        grouped_shape(FP8_F32, counts[i], 264, 640, EVEN, true, SPAN);
        grouped_shape(FP4_E8M0, counts[i], 264, 1024, EVEN, true, SPAN);
    }
}

/* ---- attention and the indexer ---- */

enum { SEEN = 37, WIDTH = 40, HEADS = 3, ROWS = 9 };

/* One head's output as docs/numerics.md says it, of n keys [n, WIDTH] that are rounded, as is q. */
static void narrow_attention(const float *q, const float *key, int32_t n, float scale,
                             float *out) {
    float score[SEEN], top = -INFINITY;
    double total = 0.0, sum[WIDTH] = {0.0};
    for (int32_t e = 0; e < n; e++) {
        double dot = 0.0;
        for (int32_t c = 0; c < WIDTH; c++) dot += (double)q[c] * (double)key[e * WIDTH + c];
        score[e] = (float)(dot * (double)scale);
        top = fmaxf(top, score[e]);
    }
    for (int32_t e = 0; e < n; e++) {
        float weight = expf(score[e] - top);
        total += (double)weight;
        round_to_bf16(&weight, 1);
        for (int32_t c = 0; c < WIDTH; c++)
            sum[c] += (double)weight * (double)key[e * WIDTH + c];
    }
    for (int32_t c = 0; c < WIDTH; c++) out[c] = (float)(sum[c] / total);
}

/* Rows of one sequence that see all entries up to their own; keys of float32. */
void official_attention(void **state) {
    (void)state;
    const int32_t n_entries[] = {SEEN};
    int32_t *seq = take_ints(ROWS), *pos = take_ints(ROWS), *best[2];
    float *q = take_random((int64_t)ROWS * HEADS * WIDTH, 2.0f), *head_weight;
    float *got = take_nan((int64_t)ROWS * HEADS * WIDTH), *want = take_nan(WIDTH);
    float *key = take((size_t)SEEN * WIDTH * sizeof *key);
    const hd_paged pages = take_pages(1, n_entries, 5, WIDTH, 2.0f);
    const hd_paged narrow = narrow_pages(&pages, 1, n_entries);
    hd_ops exact, official;
    hd_ops_init_ref(&exact, HD_EXACT);
    hd_ops_init_ref(&official, HD_OFFICIAL);
    for (int32_t i = 0; i < ROWS; i++) pos[i] = SEEN - ROWS + i;
    hd_attention_args a = {.out = hd_f32(got),
                           .q = hd_f32(q),
                           .seq = seq,
                           .pos = pos,
                           .rows = ROWS,
                           .heads = HEADS,
                           .k_dim = WIDTH,
                           .v_dim = WIDTH,
                           .ratio = 1,
                           .entries = pages,
                           .scale = 0.3f};
    official.attention(fix.stream[0], &a);
    finish("attention", fix.stream[0]);
    for (int32_t e = 0; e < SEEN; e++)
        memcpy(key + e * WIDTH, page_entry(&pages, 0, e), WIDTH * sizeof *key);
    float *wide = take_copy(q, (size_t)(ROWS * HEADS * WIDTH) * sizeof *q);
    round_to_bf16(key, SEEN * WIDTH);
    round_to_bf16(q, ROWS * HEADS * WIDTH);
    for (int32_t i = 0; i < ROWS * HEADS; i++) {
        narrow_attention(q + i * WIDTH, key, pos[i / HEADS] + 1, a.scale, want);
        check_bits("attention", got + i * WIDTH, want, WIDTH);
    }
    head_weight = take_random(ROWS * HEADS, 1.0f);
    hd_indexer_topk_args x = {.keys = pages,
                              .weight = head_weight,
                              .seq = seq,
                              .pos = pos,
                              .rows = ROWS,
                              .heads = HEADS,
                              .ratio = 1,
                              .top_k = 20,
                              .scale = 1.0f};
    for (int i = 0; i < 2; i++) {
        best[i] = take_ints(ROWS * 20);
        x.out = best[i];
        x.q = hd_f32(i ? q : wide);
        (i ? &exact : &official)->indexer_topk(fix.stream[0], &x);
        finish("indexer", fix.stream[0]);
        x.keys = narrow;
    }
    check_bits("indexer", best[0], best[1], ROWS * 20);
}

/* Matrices whose x is rounded to bfloat16: the bits of `fast`. */
void official_leaves_the_rest(void **state) {
    (void)state;
    static const int32_t formats[] = {BF16_PLAIN, NVFP4_E4M3};
    if (!fix.gpu) return;
    for (size_t f = 0; f < HD_LEN(formats); f++) {
        const hd_weight *w = take_aligned(formats[f], 128, 512, false);
        const hd_linear_args a = {.w = w, .x = hd_f32(take_x(7 * 512, EVEN))};
        const op_case c = {.name = weight_format_of(formats[f])->name,
                           .rows = 7,
                           .n_outs = 1,
                           .width = {128},
                           .args = &a,
                           .run = run_linear};
        void *want[MAX_OUTS], *got[MAX_OUTS];
        run_op(&c, &fix.gpu_fast, fix.gpu_stream, 0, c.rows, want);
        run_op(&c, &fix.gpu_official, fix.gpu_stream, 0, c.rows, got);
        check_bits(c.name, got[0], want[0], 7 * 128);
    }
}

/* ---- the instructions ---- */

#ifdef HD_CUDA
/* Rows of E4M3 or bfloat16 codes. */
static uint8_t *take_codes(bool e4m3, int32_t rows, spread how) {
    const int32_t n = rows * WGMMA_PROBE_BYTES / (e4m3 ? 1 : 2);
    uint8_t *codes = take((size_t)(rows * WGMMA_PROBE_BYTES));
    const float *x = take_x(n, how);
    for (int32_t i = 0; i < n; i++) {
        const float v = how == EVEN ? x[i] * 8.0f : x[i];
        const uint16_t wide = hd_f32_to_bf16(v);
        if (e4m3) {
            codes[i] = hd_f32_to_e4m3(v);
        } else {
            memcpy(codes + 2 * i, &wide, sizeof wide);
        }
    }
    return codes;
}

static wgmma_probe_counts probe_instructions(bool e4m3) {
    wgmma_probe_counts counts = {0};
    for (int i = 0; i < 4 * SPREADS; i++) {
        float *base = take_nan((int64_t)WGMMA_PROBE_A * WGMMA_PROBE_B);
        const uint8_t *a = take_codes(e4m3, WGMMA_PROBE_A, (spread)(i % SPREADS));
        const uint8_t *b = take_codes(e4m3, WGMMA_PROBE_B, (spread)(i / 2 % SPREADS));
        const char *why = wgmma_probe(e4m3, a, b, base, &counts);
        if (why) fail_msg("%s", why);
        int32_t other = 0;
        for (int32_t k = 0; k < WGMMA_PROBE_A * WGMMA_PROBE_B; k++) other += base[k] != 0.0f;
        assert_true(other > WGMMA_PROBE_A * WGMMA_PROBE_B / 2);
        forget_all(NULL);
    }
    print_message(
        "%s: %lld outputs, other bits by width %d, registers %d, exchange %d, mma.sync %d\n",
        e4m3 ? "E4M3" : "BF16", (long long)counts.compared, counts.widths, counts.registers,
        counts.exchanged, counts.mma_sync);
    return counts;
}
#endif

/* What design D8 asks of Hopper: tiles of every shape give a row the same bits. mma.sync has those of wgmma in
 * bfloat16; in E4M3 it has not, which is why FP8 rows always meet wgmma. */
void official_instructions(void **state) {
    (void)state;
#ifdef HD_CUDA
    if (!fix.gpu || fix.brief || hd_device_cuda_path(fix.gpu) != HD_CUDA_SM90) return;
    for (int e4m3 = 0; e4m3 < 2; e4m3++) {
        const wgmma_probe_counts n = probe_instructions(e4m3);
        assert_int_equal(n.widths + n.registers + n.exchanged, 0);
        assert_true(e4m3 ? n.mma_sync > 0 : n.mma_sync == 0);
    }
#endif
}
