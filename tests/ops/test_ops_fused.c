/* test_ops_fused.c - fused operators: near the reference, and on every table, whatever its precision,
 * the bits of the operators that they stand for. */
#include "ops/ops_fixture.h"

#include <math.h>
#include <string.h>

#include "ops/fused_internal.h"

enum { EXPERTS = 6, TOP_K = 2 };

/* Asks every table for the bits of `parts` from c; not of brief tests. */
static void same_as_parts(const op_case *c, const op_case *parts) {
    const hd_ops *more[] = {&fix.gpu_fast, &fix.gpu_official};
    const int32_t n_more = fix.gpu ? 2 : 0;
    for (int32_t t = 0; t < fix.n_tables + n_more; t++) {
        const hd_ops *ops = t < fix.n_tables ? &fix.table[t] : more[t - fix.n_tables];
        hd_stream *s = t < fix.n_tables ? stream_for(ops, fix.stream[0]) : fix.gpu_stream;
        void *got[MAX_OUTS], *want[MAX_OUTS];
        fix.poisoned = false;
        run_op(c, ops, s, 0, c->rows, got);
        run_op(parts, ops, s, 0, c->rows, want);
        for (int32_t i = 0; i < c->n_outs; i++) {
            check_bits(ops->name, got[i], want[i], (int64_t)c->rows * c->width[i]);
        }
    }
}

static void check_fused(op_case *c,
                        void (*run_parts)(const op_case *c, const hd_ops *ops, hd_stream *s,
                                          int32_t first, int32_t n, void *const *out)) {
    op_case parts = *c;
    parts.run = run_parts;
    check_op(c);
    same_as_parts(c, &parts);
    forget_all(NULL);
}

/* Rows with zeros, numbers far larger than the rest, and in every fifth row a NaN or an infinity. */
static float *take_hard(int32_t rows, int32_t cols, bool broken) {
    float *x = take_random((int64_t)rows * cols, 1.0f);
    for (int64_t i = 0; i < (int64_t)rows * cols; i++) {
        if (i % 517 == 3) x[i] *= 4096.0f;
        if (i / 128 % 37 == 5) x[i] = 0.0f;
    }
    for (int32_t r = 3; broken && r < rows; r += 5) {
        x[(int64_t)r * cols + cols / 3] = r % 2 ? NAN : INFINITY;
    }
    return x;
}

/* Of swiglu, whose clamp leaves small outputs of large sums. */
static const double hard_tolerance = 5e-4;

#define PART(part, args) ops->part(s, args)

/* ---- linear_set ---- */

static hd_linear_set_args set_at(const op_case *c, int32_t first, int32_t n, void *const *out) {
    hd_linear_set_args a = *(const hd_linear_set_args *)c->args;
    a.x = hd_rows_at(a.x, (int64_t)first * a.w[0]->cols);
    a.rows = n;
    for (int32_t i = 0; i < a.n; i++) a.out[i] = hd_f32(out[i]);
    return a;
}

static void run_set(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first, int32_t n,
                    void *const *out) {
    const hd_linear_set_args a = set_at(c, first, n, out);
    ops->linear_set(s, &a);
}

static void run_set_parts(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                          int32_t n, void *const *out) {
    const hd_linear_set_args a = set_at(c, first, n, out);
    OPS_RUN_linear_set(PART, &a)
}

enum { SETS = 4 }; /* matrices of a linear_set */

void op_linear_set(void **state) {
    (void)state;
    static const int32_t sets[][SETS] = {
        {FP8_F32,    FP8_F32,  BF16_PLAIN, BF16_PLAIN},
        {BF16_PLAIN, FP8_E8M0, BF16_PLAIN, FP8_E8M0  },
        {E4M3_ODD,   FP8_F32,  F32_PLAIN,  BF16_PLAIN},
        {FP4_E8M0,   FP8_F32,  NVFP4_E4M3, FP8_F32   },
        {MXFP8_E8M0, FP8_F32,  MXFP8_E8M0, BF16_PLAIN},
    };
    static const int32_t outs[SETS] = {264, 136, 64, 40}, rows[] = {4, 1, 7, 17, 65, 0};
    for (size_t i = 0; i < HD_LEN(sets) * HD_LEN(rows); i++) {
        const int32_t *set = sets[i % HD_LEN(sets)], n = rows[i / HD_LEN(sets)], cols = 640;
        hd_linear_set_args a = {.x = hd_f32(take_hard(n, cols, false)), .n = SETS};
        op_case c = {.name = "linear_set", .rows = n, .n_outs = SETS, .run = run_set};
        for (int32_t k = 0; k < SETS; k++) {
            a.w[k] = take_aligned(set[k], outs[k], cols, false);
            c.width[k] = outs[k];
            c.tolerance[k] = 2e-6;
        }
        c.args = &a;
        if (fix.brief && i >= HD_LEN(sets)) break;
        check_fused(&c, run_set_parts);
    }
}

/* ---- linear_swiglu ---- */

/* Rows of `cols` in the middle of the wider ones of an output, the rest zeroed; or the output. */
static hd_rows inside(float *out, int64_t rows, int64_t width, int32_t cols) {
    const int64_t before = (width - cols) / 2;
    if (before == 0) return hd_f32(out);
    for (int64_t i = 0; i < rows * width; i++) {
        const int64_t column = i % width;
        if (column < before || column >= before + cols) out[i] = 0.0f;
    }
    return hd_rows_strided(hd_f32(out + before), width);
}

static hd_linear_swiglu_args gated_at(const op_case *c, int32_t first, int32_t n,
                                      void *const *out) {
    hd_linear_swiglu_args a = *(const hd_linear_swiglu_args *)c->args;
    a.x = hd_rows_at(a.x, (int64_t)first * a.gate_w->cols);
    a.rows = n;
    a.out = inside(out[0], n, c->width[0], a.gate_w->rows);
    if (!a.gate.data) a.gate = a.out;
    return a;
}

static void run_gated(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                      int32_t n, void *const *out) {
    const hd_linear_swiglu_args a = gated_at(c, first, n, out);
    ops->linear_swiglu(s, &a);
}

static void run_gated_parts(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                            int32_t n, void *const *out) {
    const hd_linear_swiglu_args a = gated_at(c, first, n, out);
    OPS_RUN_linear_swiglu(PART, &a)
}

void op_linear_swiglu(void **state) {
    (void)state;
    static const struct {
        int32_t format, rows, outs, cols;
    } shapes[] = {
        {FP8_F32,    4,   512,  640 },
        {FP8_E8M0,   1,   264,  1024},
        {FP8_F32,    16,  1160, 384 }, /* tiles of 16 */
        {FP8_E8M0,   7,   2200, 256 }, /* of 32 */
        {FP8_F32,    17,  136,  512 }, /* many rows */
        {FP8_F32,    65,  136,  256 },
        {FP8_F32,    130, 264,  384 }, /* gate and up in one tile */
        {BF16_PLAIN, 5,   72,   512 },
        {E4M3_ODD,   3,   40,   256 },
        {FP4_E8M0,   4,   64,   512 },
    };
    enum { PADS = 12 }; /* columns of other ranks in every second case */
    for (size_t i = 0; i < (fix.brief ? 2 : HD_LEN(shapes)); i++) {
        const int32_t rows = shapes[i].rows, outs = shapes[i].outs, cols = shapes[i].cols;
        const int32_t pads = i % 2 ? PADS : 0;
        const hd_linear_swiglu_args a = {
            .x = hd_f32(take_hard(rows, cols, false)),
            .gate = pads ? hd_f32(take_nan((int64_t)rows * outs)) : (hd_rows){0},
            .up = hd_f32(take_nan((int64_t)rows * outs)),
            .gate_w = take_aligned(shapes[i].format, outs, cols, false),
            .up_w = take_aligned(shapes[i].format, outs, cols, false),
            .limit = i % 2 ? 10.0f : 0.0f};
        check_fused(&(op_case){.name = "linear_swiglu",
                               .rows = rows,
                               .n_outs = 1,
                               .width = {outs + pads},
                               .tolerance = {hard_tolerance},
                               .args = &a,
                               .run = run_gated},
                    run_gated_parts);
    }
}

/* ---- grouped_swiglu ---- */

static void place_experts(const op_case *c, hd_grouped_swiglu_args *a, void *const *out) {
    const int32_t width = c->width[0] / a->n_places;
    a->out = inside(out[0], a->n_places, width, a->gate_w->shape.rows);
    if (!a->gate.data) a->gate = a->out;
}

static void run_experts(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                        int32_t n, void *const *out) {
    hd_grouped_swiglu_args a = *(const hd_grouped_swiglu_args *)c->args;
    (void)first;
    (void)n;
    place_experts(c, &a, out);
    ops->grouped_swiglu(s, &a);
}

static void run_experts_parts(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                              int32_t n, void *const *out) {
    hd_grouped_swiglu_args a = *(const hd_grouped_swiglu_args *)c->args;
    (void)first;
    (void)n;
    place_experts(c, &a, out);
    OPS_RUN_grouped_swiglu(PART, &a)
}

static void take_table(hd_expert_table *to, int32_t format, int32_t outs, int32_t cols) {
    hd_weight *w = take(EXPERTS * sizeof *w);
    for (int32_t e = 0; e < EXPERTS; e++) w[e] = *take_aligned(format, outs, cols, false);
    hd_expert_table_init(to, w, EXPERTS);
}

static void experts_shape(int32_t format, const int32_t *counts, int32_t outs, int32_t cols,
                          bool assigned, float limit, int32_t pads) {
    int32_t *offset = take_ints(EXPERTS + 1);
    hd_expert_table gate, up;
    for (int32_t e = 0; e < EXPERTS; e++) offset[e + 1] = offset[e] + counts[e];
    const int32_t places = offset[EXPERTS], rows = assigned ? places / TOP_K : places;
    int32_t *assignment = take_ints(places);
    for (int32_t k = 0; k < places; k++) assignment[k] = (k * 7 + 3) % places;
    take_table(&gate, format, outs, cols);
    take_table(&up, format, outs, cols);
    const hd_grouped_swiglu_args a = {
        .x = hd_f32(take_hard(rows, cols, false)),
        .gate = pads ? hd_f32(take_nan((int64_t)places * outs)) : (hd_rows){0},
        .up = hd_f32(take_nan((int64_t)places * outs)),
        .gate_w = &gate,
        .up_w = &up,
        .offset = offset,
        .assignment = assigned ? assignment : NULL,
        .weight = limit != 0.0f ? take_random(places, 1.0f) : NULL,
        .top_k = TOP_K,
        .n_places = places,
        .limit = limit};
    check_fused(&(op_case){.name = "grouped_swiglu",
                           .rows = 1,
                           .n_outs = 1,
                           .width = {places * (outs + pads)},
                           .tolerance = {hard_tolerance * (cols > 1024 ? cols / 1024 : 1)},
                           .all_rows = true,
                           .args = &a,
                           .run = run_experts},
                run_experts_parts);
}

void op_grouped_swiglu(void **state) {
    (void)state;
    static const int32_t counts[][EXPERTS] = {
        {3, 0, 1,  2,  4,  0 },
        {0, 0, 0,  42, 0,  0 }, /* all to one */
        {1, 1, 10, 0,  0,  1 },
        {0, 9, 0,  33, 7,  37},
        {0, 9, 0,  60, 70, 51}, /* more places than the fused kernels take */
    };
    static const int32_t formats[] = {FP8_F32, FP4_E8M0, FP8_E8M0, BF16_PLAIN, NVFP4_E4M3};
    for (size_t f = 0; f < HD_LEN(formats); f++) {
        for (size_t i = 0; i < (fix.brief ? 1 : HD_LEN(counts)); i++) {
            experts_shape(formats[f], counts[i], 136, 512, i % 2, i % 3 ? 10.0f : 0.0f,
                          i % 2 ? 0 : 8);
        }
    }
    if (fix.brief) return;
    for (int32_t each = 36; fix.gpu && each < 180; each += 64) { /* gate and up in one tile */
        const int32_t many[EXPERTS] = {each, 2 * each, 0, each + 7, each - 9, each + 2};
        experts_shape(FP8_F32, many, 200, 256, each == 100, 10.0f, 0);
    }
    experts_shape(FP4_E8M0, counts[0], 264, 1024, true, 2.0f, 0);
    /* Columns of real models, whose scales fill a block's shared memory, and every height of a tile. */
    static const int32_t real[][EXPERTS] = {
        {3,  0,  1,  2,  4,  0 },
        {9,  7,  8,  0,  11, 9 },
        {14, 13, 15, 17, 12, 19},
    };
    for (size_t i = 0; i < HD_LEN(real); i++) {
        experts_shape(FP4_E8M0, real[i], 72, 4096, true, 10.0f, 0);
        experts_shape(FP4_E8M0, real[i], 72, 7168, true, 10.0f, 0);
    }
}

/* ---- add_norm ---- */

typedef struct add_norm_case {
    hd_add_norm_args a;
    const float *x; /* the values before */
} add_norm_case;

static hd_add_norm_args add_norm_at(const op_case *c, int32_t first, int32_t n,
                                    void *const *out) {
    const add_norm_case *t = c->args;
    const size_t bytes = (size_t)n * (size_t)t->a.cols * sizeof(float);
    hd_add_norm_args a = t->a;
    if (n) memcpy(out[1], t->x + (int64_t)first * a.cols, bytes);
    a.out = hd_f32(out[0]);
    a.x = hd_f32(out[1]);
    if (a.y.data) a.y = hd_rows_at(a.y, (int64_t)first * a.cols);
    a.rows = n;
    return a;
}

static void run_add_norm(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                         int32_t n, void *const *out) {
    const hd_add_norm_args a = add_norm_at(c, first, n, out);
    ops->add_norm(s, &a);
}

static void run_add_norm_parts(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                               int32_t n, void *const *out) {
    const hd_add_norm_args a = add_norm_at(c, first, n, out);
    OPS_RUN_add_norm(PART, &a)
}

void op_add_norm(void **state) {
    (void)state;
    static const int32_t widths[] = {7168, 1, 33, 256, 1030, 2048, 2049, 4100};
    for (size_t i = 0; i < HD_LEN(widths); i++) {
        const int32_t rows = i == 2 ? 0 : 7, cols = widths[i];
        add_norm_case t = {
            .a = {.weight = take_random(cols, 2.0f), .cols = cols, .eps = 1e-6f},
            .x = take_hard(rows, cols, i % 2)
        };
        if (i % 3) t.a.y = hd_f32(take_hard(rows, cols, false));
        check_fused(
            &(op_case){
                .name = "add_norm",
                .rows = rows,
                .n_outs = 2,
                .width = {cols, cols},
                .tolerance = {2e-6, 1e-6},
                .args = &t,
                .run = run_add_norm
        },
            run_add_norm_parts);
    }
}

/* ---- norm_rope ---- */

typedef struct norm_rope_case {
    hd_norm_rope_args a;
    const float *x; /* the values before */
} norm_rope_case;

static hd_norm_rope_args norm_rope_at(const op_case *c, int32_t first, int32_t n,
                                      void *const *out) {
    const norm_rope_case *t = c->args;
    const size_t bytes = (size_t)n * (size_t)c->width[0] * sizeof(float);
    hd_norm_rope_args a = t->a;
    if (n) memcpy(out[0], t->x + (int64_t)first * c->width[0], bytes);
    a.x = hd_f32(out[0]);
    a.cos_sin += (int64_t)first * 2 * a.pairs;
    a.rows = n;
    return a;
}

static void run_norm_rope(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                          int32_t n, void *const *out) {
    const hd_norm_rope_args a = norm_rope_at(c, first, n, out);
    ops->norm_rope(s, &a);
}

static void run_norm_rope_parts(const op_case *c, const hd_ops *ops, hd_stream *s,
                                int32_t first, int32_t n, void *const *out) {
    const hd_norm_rope_args a = norm_rope_at(c, first, n, out);
    OPS_RUN_norm_rope(PART, &a)
}

void op_norm_rope(void **state) {
    (void)state;
    static const struct {
        int32_t rows, heads, width, norm_cols, rope_at, pairs;
        bool half_split;
    } shapes[] = {
        {7,   16, 512,  512,  448, 32,  false}, /* V4's queries */
        {7,   1,  576,  512,  512, 32,  false}, /* V3's latents */
        {0,   2,  64,   64,   0,   32,  true },
        {5,   3,  41,   40,   8,   16,  true },
        {9,   2,  700,  300,  290, 10,  false}, /* the rotation begins within the norm */
        {3,   1,  2560, 2500, 100, 300, false}, /* wider than the fused kernel takes */
        {70,  16, 512,  512,  448, 32,  false}, /* a warp per head */
        {140, 8,  320,  300,  290, 12,  false},
    };
    for (size_t i = 0; i < HD_LEN(shapes); i++) {
        const int32_t rows = shapes[i].rows, width = shapes[i].heads * shapes[i].width;
        const norm_rope_case t = {
            .a = {.weight = i % 2 ? take_random(shapes[i].norm_cols, 2.0f) : NULL,
                  .cos_sin = take_random((int64_t)rows * 2 * shapes[i].pairs, 1.0f),
                  .heads = shapes[i].heads,
                  .head_width = shapes[i].width,
                  .norm_cols = shapes[i].norm_cols,
                  .rope_at = shapes[i].rope_at,
                  .pairs = shapes[i].pairs,
                  .half_split = shapes[i].half_split,
                  .eps = 1e-6f},
            .x = take_hard(rows, width, true)
        };
        check_fused(&(op_case){.name = "norm_rope",
                               .rows = rows,
                               .n_outs = 1,
                               .width = {width},
                               .tolerance = {2e-6},
                               .args = &t,
                               .run = run_norm_rope},
                    run_norm_rope_parts);
    }
}

/* ---- hc_next ---- */

typedef struct next_case {
    hd_hc_next_args a;
    const float *x, *post, *comb, *pre; /* the values before */
} next_case;

enum { OF_OUT, OF_POST, OF_COMB, OF_X, OF_PRE };

static hd_hc_next_args next_at(const op_case *c, int32_t first, int32_t n, void *const *out) {
    const next_case *t = c->args;
    const float *before[] = {NULL, t->post, t->comb, t->x, t->pre};
    hd_hc_next_args a = t->a;
    for (int32_t i = OF_POST; i < c->n_outs && n; i++) {
        memcpy(out[i], before[i] + (int64_t)first * c->width[i],
               (size_t)n * (size_t)c->width[i] * sizeof(float));
    }
    a.out = hd_f32(out[OF_OUT]);
    a.post = out[OF_POST];
    a.comb = out[OF_COMB];
    a.x = hd_f32(out[OF_X]);
    a.pre = c->n_outs > OF_PRE ? out[OF_PRE] : NULL;
    if (a.y.data) a.y = hd_rows_at(a.y, (int64_t)first * a.cols);
    a.rows = n;
    return a;
}

static void run_next(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                     int32_t n, void *const *out) {
    const hd_hc_next_args a = next_at(c, first, n, out);
    ops->hc_next(s, &a);
}

static void run_next_parts(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                           int32_t n, void *const *out) {
    const hd_hc_next_args a = next_at(c, first, n, out);
    OPS_RUN_hc_next(PART, &a)
}

/* single: V4.1's form. */
static void next_cases(bool single) {
    static const struct {
        int32_t rows, hc, cols;
        bool first;
    } shapes[] = {
        {4,  4, 4096, false},
        {1,  4, 256,  false},
        {7,  4, 512,  true },
        {0,  4, 256,  false},
        {5,  4, 768,  false}, /* a stretch that is not whole */
        {8,  4, 256,  false}, /* as many rows as the fused kernel takes */
        {65, 4, 256,  false}, /* and more */
        {3,  4, 2304, true },
        {2,  4, 7168, false},
        {66, 4, 2560, false},
        {9,  4, 7168, true },
        {6,  4, 300,  false},
        {6,  2, 256,  false},
    };
    for (size_t i = 0; i < (fix.brief ? 3 : HD_LEN(shapes)); i++) {
        const int32_t rows = shapes[i].rows, hc = shapes[i].hc, cols = shapes[i].cols;
        const int32_t n = 2 * hc + hc * hc;
        const double wide = hc * cols > 10000 ? 2.0 : 1.0; /* sums of so many columns */
        const next_case t = {
            .a = {.y = shapes[i].first ? (hd_rows){0}
                                       : hd_f32(take_random((int64_t)rows * cols, 1.0f)),
                  .fn = take_random((int64_t)n * hc * cols, 0.2f),
                  .scale = take_random(3, 1.5f),
                  .base = take_random(n, 1.0f),
                  .weight = take_random(cols, 2.0f),
                  .cols = cols,
                  .hc = hc,
                  .iters = 20,
                  .norm_eps = 1e-6f,
                  .eps = 1e-6f,
                  .first = shapes[i].first},
            .x = take_hard(rows, hc * cols, i == 4),
            .post = take_random((int64_t)rows * hc, 2.0f),
            .comb = take_random((int64_t)rows * hc * hc, 1.0f),
            .pre = take_random((int64_t)rows * hc, 1.0f)
        };
        check_fused(
            &(op_case){
                .name = "hc_next",
                .rows = rows,
                .n_outs = single ? 5 : 4,
                .width = {cols,        hc,          hc * hc,     hc * cols,   hc         },
                .tolerance = {1e-5 * wide, 1e-5 * wide, 2e-5 * wide, 1e-6 * wide, 1e-5 * wide},
                .args = &t,
                .run = run_next
        },
            run_next_parts);
    }
}

void op_hc_next(void **state) {
    (void)state;
    next_cases(false);
    next_cases(true);
}
