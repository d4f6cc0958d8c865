/* test_ops_gemm.c - GEMMs with every stored format. */
#include "ops/ops_fixture.h"

#include <string.h>

/* Sums of at most 1100 products in 16 parts: the depth of a part is 69 roundings of 2^-24,
 * which partly cancel. */
static const double product_tolerance = 2e-6;

/* x loses what exceeds the eight bits of bfloat16; matrices lose nothing. */
static double fast_tolerance(const weight_format *f) {
    const bool taken = f->type == HD_E4M3
                           ? f->block_cols == 0 || f->block_cols == 32 || f->block_cols == 128
                       : f->type == HD_E2M1 ? f->block_cols == 16 || f->block_cols == 32
                                            : f->type == HD_BF16 && f->block_cols == 0;
    return taken ? 0.03 : 0.0;
}

/* The same on a GPU. */
static const double gpu_fast_tolerance = 0.03;

/* ---- linear ---- */

static void run_linear(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                       int32_t n, void *const *out) {
    hd_linear_args a = *(const hd_linear_args *)c->args;
    a.out.data = out[0];
    a.x = hd_rows_at(a.x, first * (a.x.stride ? a.x.stride : a.w->cols));
    a.rows = n;
    ops->linear(s, &a);
}

typedef void check_fn(const op_case *c);

/* Elements of a matrix: up to 1 (E2M1: 6); E4M3 up to its limit in two of three segments; any
 * bits. */
typedef enum elements { SMALL, LARGE, ANY_BITS } elements;

/* Segments as --precision fast reads them: each element times 256, except those that are then
 * no number. */
static void enlarge(hd_weight *w) {
    const int64_t n = (int64_t)w->rows * w->cols;
    const uint8_t *small = w->data;
    uint8_t *code = take((size_t)n);
    for (int64_t i = 0; i < n; i++) {
        code[i] = small[i];
        if (i % w->cols / 128 % 3 == 2) continue;
        code[i] |= 0x40;
        if ((code[i] & 0x7f) == 0x7f) code[i] ^= 1;
    }
    w->data = code;
}

static void linear_shape(const weight_format *f, int32_t rows, int32_t outs, int32_t cols,
                         elements what, check_fn *check) {
    hd_weight *w = take_weight(f, outs, cols, what == ANY_BITS);
    if (what == LARGE && f->type == HD_E4M3) enlarge(w);
    const bool strided = rows % 2 == 0;
    const int32_t x_stride = w->cols + (strided ? 3 : 0);
    const hd_rows x = hd_f32(take_random((int64_t)rows * x_stride, 1.0f));
    const hd_linear_args a = {.w = w,
                              .x = hd_rows_strided(x, strided ? x_stride : 0),
                              .out = hd_rows_strided(hd_f32(NULL), strided ? outs + 7 : 0)};
    check(&(op_case){.name = f->name,
                     .rows = rows,
                     .n_outs = 1,
                     .width = {strided ? outs + 7 : outs},
                     .tolerance = {product_tolerance},
                     .fast_tolerance = fast_tolerance(f),
                     .gpu_fast_tolerance = gpu_fast_tolerance,
                     .args = &a,
                     .run = run_linear});
}

void op_linear(void **state) {
    (void)state;
    static const struct {
        int32_t rows, outs, cols;
    } shapes[] = {
        {0,   5,    16  }, /* no rows are no error */
        {1,   1,    1   }, /* the narrowest */
        {1,   5,    48  }, /* the decode case, off the tile */
        {2,   3,    16  },
        {3,   7,    130 }, /* a ragged block at the edge */
        {33,  9,    514 }, /* a ragged tile */
        {65,  6,    31  }, /* a ragged block of rows */
        {66,  130,  17  },
        {1,   131,  1100}, /* several tiles, several tasks */
        {3,   170,  1030},
        {1,   33,   512 }, /* complete segments of a row, as in checkpoints */
        {2,   70,   1088},
        {5,   64,   320 },
        {12,  20,   128 },
        {20,  33,   192 },
        {34,  65,   576 },
        {70,  130,  128 },
        {4,   11,   1043}, /* numbers of rows that share registers */
        {7,   6,    271 },
        {16,  9,    145 },
        {257, 520,  40  }, /* several blocks of rows in a task */
        {7,   4323, 128 }, /* a GPU's warps have rows of W of their own */
    };
    for (int32_t f = 0; f < n_weight_formats; f++) {
        for (size_t i = 0; i < HD_LEN(shapes); i++) {
            linear_shape(&weight_formats[f], shapes[i].rows, shapes[i].outs, shapes[i].cols,
                         false, check_op);
        }
        /* All codes of E4M3: some rows of W have a NaN. The scales of other formats would make
         * infinity minus infinity, which depends on the order of a sum. */
        if (weight_formats[f].type == HD_E4M3 && weight_formats[f].scale_type == HD_F32) {
            linear_shape(&weight_formats[f], 2, 97, 80, ANY_BITS, check_op);
        }
        if (weight_formats[f].type == HD_E4M3 && weight_formats[f].scale_type == HD_NONE) {
            linear_shape(&weight_formats[f], 1, 97, 144, ANY_BITS, check_op);
            linear_shape(&weight_formats[f], 5, 97, 150, ANY_BITS, check_op);
        }
    }
}

/* Numbers of rows, columns and scales with code of their own in --precision fast: rows without
 * a tile, ranges of columns, scales that are or are not read as stored. */
void fast_products(void **state) {
    (void)state;
    static const struct {
        int32_t rows, outs, cols;
    } shapes[] = {
        {1,  35,  256  },
        {1,  7,   8200 }, /* whole rows, */
        {1,  18,  12900}, /* and pieces */
        {2,  33,  4736 },
        {3,  20,  2816 },
        {4,  18,  2304 },
        {5,  49,  1536 },
        {6,  16,  1664 },
        {7,  130, 1280 },
        {8,  35,  2304 },
        {8,  17,  1060 },
        {9,  34,  1152 },
        {13, 21,  520  },
    };
    for (int32_t f = 0; f < n_weight_formats; f++) {
        if (fast_tolerance(&weight_formats[f]) == 0.0) continue;
        for (size_t i = 0; i < HD_LEN(shapes); i++) {
            for (elements what = SMALL; what <= ANY_BITS; what++) {
                linear_shape(&weight_formats[f], shapes[i].rows, shapes[i].outs, shapes[i].cols,
                             what, check_fast_bits);
            }
        }
    }
}

/* ---- linear_heads ---- */

static void run_heads(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                      int32_t n, void *const *out) {
    hd_linear_heads_args a = *(const hd_linear_heads_args *)c->args;
    a.out.data = out[0];
    a.x = hd_rows_at(a.x, first * (a.x.stride ? a.x.stride : a.heads * a.x_head));
    a.rows = n;
    ops->linear_heads(s, &a);
}

typedef struct heads_shape {
    int32_t rows, heads, n_rows, first_row, head_rows, cols;
} heads_shape;

static void heads_format(const weight_format *f, const heads_shape *sh, bool transpose) {
    const int32_t w_rows = sh->heads * sh->head_rows;
    const hd_weight *w = take_weight(f, w_rows, sh->cols, false);
    const int32_t x_head = (transpose ? sh->n_rows : w->cols) + sh->rows % 3;
    const int32_t out_head = (transpose ? w->cols : sh->n_rows) + sh->rows % 2;
    const bool strided = sh->rows != 3;
    const int32_t x_stride = sh->heads * x_head + (strided ? 1 : 0);
    const int32_t out_stride = sh->heads * out_head + (strided ? 2 : 0);
    const hd_rows x = hd_f32(take_random((int64_t)sh->rows * x_stride, 1.0f));
    const hd_linear_heads_args a = {.out =
                                        hd_rows_strided(hd_f32(NULL), strided ? out_stride : 0),
                                    .x = hd_rows_strided(x, strided ? x_stride : 0),
                                    .w = w,
                                    .heads = sh->heads,
                                    .n_rows = sh->n_rows,
                                    .first_row = sh->first_row,
                                    .head_rows = sh->head_rows,
                                    .out_head = out_head,
                                    .x_head = x_head,
                                    .transpose = transpose};
    check_op(&(op_case){.name = f->name,
                        .rows = sh->rows,
                        .n_outs = 1,
                        .width = {out_stride},
                        .tolerance = {product_tolerance},
                        .fast_tolerance = transpose ? 0.0 : fast_tolerance(f),
                        .gpu_fast_tolerance = gpu_fast_tolerance,
                        .args = &a,
                        .run = run_heads});
}

void op_linear_heads(void **state) {
    (void)state;
    static const heads_shape shapes[] = {
        {0,   3, 4,   0,   4,   16 },
        {1,   1, 1,   0,   1,   1  },
        {3,   3, 5,   3,   8,   48 }, /* the second half of every head */
        {33,  2, 9,   0,   9,   67 },
        {65,  2, 12,  12,  24,  70 },
        {257, 2, 12,  12,  24,  70 },
        {131, 1, 130, 0,   130, 33 },
        {1,   2, 128, 0,   256, 540}, /* as in MLA: a block of scales per half */
        {1,   2, 128, 128, 256, 540},
    };
    for (int32_t f = 0; f < n_weight_formats; f++) {
        for (size_t i = 0; i < HD_LEN(shapes); i++) {
            heads_format(&weight_formats[f], &shapes[i], false);
            heads_format(&weight_formats[f], &shapes[i], true);
        }
    }
}

/* ---- grouped_gemm ---- */

enum { EXPERTS = 5, TOP_K = 3 };

static void run_grouped(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                        int32_t n, void *const *out) {
    hd_grouped_gemm_args a = *(const hd_grouped_gemm_args *)c->args;
    (void)first;
    (void)n;
    a.out = hd_f32(out[0]);
    ops->grouped_gemm(s, &a);
}

/* A place gets what linear computes for its row alone; the other rows of the expert do not
 * matter. */
static void check_places_on(const hd_grouped_gemm_args *a, const op_case *c,
                            const hd_ops *ops) {
    const int32_t cols = a->w->shape.cols, outs = a->w->shape.rows;
    float *alone = take_nan(outs);
    void *all[MAX_OUTS];
    run_op(c, ops, fix.stream[1], 0, 1, all);
    for (int32_t e = 0; e < a->w->n; e++) {
        for (int32_t i = a->offset[e]; i < a->offset[e + 1]; i++) {
            const int32_t row = a->assignment ? a->assignment[i] / a->top_k : i;
            hd_linear_args one = {.out = hd_f32(alone),
                                  .x = hd_rows_at(a->x, (int64_t)row * cols),
                                  .w = &a->w->slots[e],
                                  .rows = 1};
            hd_stream *s = stream_for(ops, fix.stream[0]);
            ops->linear(s, &one);
            finish("a place alone", s);
            check_bits("a place alone", (const float *)all[0] + (int64_t)i * outs, alone, outs);
        }
    }
}

static void check_places(const hd_grouped_gemm_args *a, const op_case *c) {
    if (fix.brief) return; /* linear has cases of its own */
    for (int32_t t = 0; t < fix.n_tables; t++) {
        if (fix.gpu_alone && !stream_for(&fix.table[t], NULL)) continue;
        check_places_on(a, c, &fix.table[t]);
    }
    for (fast_form f = 0; f < FAST_FORMS; f++) {
        for (int32_t t = 0; t < fix.n_fast[f]; t++) check_places_on(a, c, &fix.fast[f][t]);
    }
}

/* gpu_alone: for shapes that are too large for the others. */
static void grouped_on(const weight_format *f, const int32_t *counts, int32_t outs,
                       int32_t cols, bool assigned, bool gpu_alone) {
    hd_weight *w = take(EXPERTS * sizeof *w);
    int32_t *offset = take_ints(EXPERTS + 1);
    for (int32_t e = 0; e < EXPERTS; e++) {
        w[e] = *take_weight(f, outs, cols, false);
        offset[e + 1] = offset[e] + counts[e];
    }
    const int32_t places = offset[EXPERTS];
    int32_t *assignment = take_ints(places);
    for (int32_t i = 0; i < places; i++) assignment[i] = random_below(10 * TOP_K);
    const int32_t x_rows = places > 10 ? places : 10;
    hd_expert_table table;
    hd_expert_table_init(&table, w, EXPERTS);
    hd_grouped_gemm_args a = {
        .x = hd_f32(take_random((int64_t)x_rows * w->cols, 1.0f)),
        .w = &table,
        .offset = offset,
        .assignment = assigned ? assignment : NULL,
        .top_k = TOP_K,
        .n_places = places,
    };
    op_case c = {.name = f->name,
                 .rows = 1,
                 .n_outs = 1,
                 .width = {places * outs},
                 .tolerance = {product_tolerance},
                 .fast_tolerance = fast_tolerance(f),
                 .gpu_fast_tolerance = gpu_fast_tolerance,
                 .all_rows = true,
                 .args = &a,
                 .run = run_grouped};
    if (gpu_alone) {
        check_on_gpu(&c);
        if (!fix.brief) check_places_on(&a, &c, &fix.gpu_fast);
    } else {
        check_op(&c);
        check_places(&a, &c);
    }
}

static void grouped_shape(const weight_format *f, const int32_t *counts, int32_t outs,
                          int32_t cols, bool assigned) {
    grouped_on(f, counts, outs, cols, assigned, false);
}

void op_grouped_gemm(void **state) {
    (void)state;
    static const int32_t counts[][EXPERTS] = {
        {0, 0, 0,  0, 0 }, /* no tokens */
        {0, 0, 33, 0, 0 }, /* all to one expert */
        {7, 0, 1,  0, 4 }, /* some have none */
        {1, 1, 1,  1, 1 },
        {0, 2, 70, 0, 65}, /* more than one block */
    };
    for (int32_t f = 0; f < n_weight_formats; f++) {
        for (size_t i = 0; i < HD_LEN(counts); i++) {
            grouped_shape(&weight_formats[f], counts[i], 9, 48, i % 2);
            grouped_shape(&weight_formats[f], counts[i], 6, 131, !(i % 2));
        }
    }
    grouped_shape(weight_format_of(FP4_E8M0), counts[2], 150, 1056, true);
    for (int32_t f = 0; f < n_weight_formats; f++) {
        for (size_t i = 1; i < HD_LEN(counts); i++) {
            grouped_shape(&weight_formats[f], counts[i], 37, 320, i % 2);
        }
    }
    /* Rows so short that each of a GPU's warps has groups of its own. */
    static const int32_t short_rows[] = {BF16_PLAIN, FP4_E8M0, NVFP4_E4M3};
    for (size_t f = 0; f < HD_LEN(short_rows) && fix.gpu; f++) {
        grouped_shape(weight_format_of(short_rows[f]), counts[3], 13603, 128, true);
    }
}

/* FP4 with rows of x in a GPU's shared memory, all of a tile or only as many as fit: places have the bits of
 * rows alone. */
void few_places_on_gpu(void **state) {
    (void)state;
    static const int32_t counts[][EXPERTS] = {
        {7, 0, 1, 0, 4},
        {1, 1, 1, 1, 1},
    };
    static const int32_t formats[] = {FP4_E8M0, NVFP4_E4M3};
    for (size_t f = 0; f < HD_LEN(formats) && fix.gpu; f++) {
        const weight_format *format = weight_format_of(formats[f]);
        grouped_on(format, counts[0], 13603, 512, true, true);
        for (size_t i = 0; i < HD_LEN(counts); i++) {
            grouped_on(format, counts[i], 871, 1280, true, true);
            grouped_on(format, counts[i], 871, 7168, true, true);
        }
    }
}
