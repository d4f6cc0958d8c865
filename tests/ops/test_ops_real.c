/* test_ops_real.c - operators at the widths of the released models (op_shapes.h) on a GPU
 * against the reference; GEMMs also on a CPU, with few rows of W. */
#include "ops/ops_fixture.h"

#include <math.h>
#include <string.h>

#include "cli/bench/op_shapes.h"

/* sums of up to 16384 products of either sign */
static const double product_tolerance = 4e-6;

/* bfloat16 has eight bits; scales differ between blocks, and some blocks are all of an
 * output */
static const double fast_product_tolerance = 0.03, fast_attention_tolerance = 0.02;

static hd_rows take_acts(int64_t n, float spread) {
    return hd_f32(take_random(n, spread));
}

/* ---- the table ---- */

static bool is(const op_shape *s, const char *op) {
    return strcmp(s->op, op) == 0;
}

static bool is_v4(const op_shape *s) {
    return s->config && strcmp(s->config, "v4_flash") == 0;
}

/* V4's FP8 has powers of two as scales. */
static const weight_format *format_of(const op_shape *s) {
    if (s->format == HD_FORMAT_FP8) return weight_format_of(is_v4(s) ? FP8_E8M0 : FP8_F32);
    return weight_format_of(FORMAT_ID(s->format, hd_formats[s->format].scale_types[0]));
}

/* As many rows of W as the reference multiplies in reasonable time. */
static int32_t fewer(int32_t outs, int64_t rows, int32_t cols, int32_t products) {
    const int64_t most = products / (rows * cols);
    return most < outs ? (int32_t)most : outs;
}

enum { GPU_PRODUCTS = 1 << 24, CPU_PRODUCTS = 1 << 19 };

/* ---- products ---- */

static void run_linear(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                       int32_t n, void *const *out) {
    hd_linear_args a = *(const hd_linear_args *)c->args;
    a.out = hd_f32(out[0]);
    a.x = hd_rows_at(a.x, (int64_t)first * a.w->cols);
    a.rows = n;
    ops->linear(s, &a);
}

typedef void check_fn(const op_case *c);

static void linear_case(const op_shape *s, int32_t rows, int32_t products, check_fn *check) {
    const int32_t outs = fewer(s->outs, rows, s->cols, products);
    const hd_weight *w = take_weight(format_of(s), outs, s->cols, false);
    const hd_linear_args a = {.w = w, .x = take_acts((int64_t)rows * s->cols, 1.0f)};
    check(&(op_case){.name = s->name,
                     .rows = rows,
                     .n_outs = 1,
                     .width = {outs},
                     .tolerance = {product_tolerance},
                     .fast_tolerance = fast_product_tolerance,
                     .gpu_fast_tolerance = fast_product_tolerance,
                     .args = &a,
                     .run = run_linear});
    forget_all(NULL);
}

void real_linear(void **state) {
    (void)state;
    static const int32_t rows[] = {1, 7, 33, 129};
    for (int32_t i = 0; i < n_op_shapes; i++) {
        const op_shape *s = &op_shapes[i];
        if (!is(s, "linear")) continue;
        linear_case(s, 3, CPU_PRODUCTS, check_op);
        for (size_t k = 0; k < HD_LEN(rows) && fix.gpu; k++) {
            linear_case(s, rows[k], GPU_PRODUCTS, check_on_gpu);
        }
    }
}

static void run_heads(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                      int32_t n, void *const *out) {
    hd_linear_heads_args a = *(const hd_linear_heads_args *)c->args;
    a.out = hd_f32(out[0]);
    a.x = hd_rows_at(a.x, (int64_t)first * a.heads * a.x_head);
    a.rows = n;
    ops->linear_heads(s, &a);
}

/* V3's keys and values, which are halves of a head's rows, and V4's groups of the output. */
static void heads_case(const op_shape *s, int32_t rows, int32_t heads) {
    const int32_t n_rows = s->outs / s->n, parts = s->parts ? s->parts : 1;
    hd_linear_heads_args a = {.heads = heads < s->n ? heads : s->n,
                              .n_rows = n_rows,
                              .head_rows = n_rows * parts,
                              .transpose = s->top_k > 0};
    a.first_row = a.transpose ? 0 : n_rows * (parts - 1);
    a.w = take_weight(format_of(s), a.heads * a.head_rows, s->cols, false);
    a.x_head = a.transpose ? n_rows : s->cols;
    a.out_head = a.transpose ? s->cols : n_rows;
    a.x = take_acts((int64_t)rows * a.heads * a.x_head, 1.0f);
    check_on_gpu(&(op_case){.name = s->name,
                            .rows = rows,
                            .n_outs = 1,
                            .width = {a.heads * a.out_head},
                            .tolerance = {product_tolerance},
                            .gpu_fast_tolerance = fast_product_tolerance,
                            .args = &a,
                            .run = run_heads});
    forget_all(NULL);
}

void real_linear_heads(void **state) {
    (void)state;
    for (int32_t i = 0; i < n_op_shapes && fix.gpu; i++) {
        const op_shape *s = &op_shapes[i];
        if (!is(s, "linear_heads")) continue;
        heads_case(s, 3, 16);
        heads_case(s, 70, is_v4(s) ? 1 : 5);
    }
}

static void run_grouped(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                        int32_t n, void *const *out) {
    hd_grouped_gemm_args a = *(const hd_grouped_gemm_args *)c->args;
    (void)first;
    (void)n;
    a.out = hd_f32(out[0]);
    ops->grouped_gemm(s, &a);
}

enum { EXPERTS = 6, TOP_K = 2 };

/* Rows have random experts; one expert has no row, one has many. */
static void grouped_case(const op_shape *s, int32_t rows, int32_t products, check_fn *check) {
    const int32_t places = rows * TOP_K, outs = fewer(s->outs, places, s->cols, products);
    hd_weight *w = take(EXPERTS * sizeof *w);
    int32_t *offset = take_ints(EXPERTS + 1), *assignment = take_ints(places);
    for (int32_t e = 0; e < EXPERTS; e++) {
        w[e] = *take_weight(format_of(s), outs, s->cols, false);
        const int32_t left = places - offset[e], own = e == 2 ? 0 : (left + 1) / 2;
        offset[e + 1] = e + 1 == EXPERTS ? places : offset[e] + own;
    }
    for (int32_t k = 0; k < places; k++) assignment[k] = (k * 7 + 3) % places;
    hd_expert_table table;
    hd_expert_table_init(&table, w, EXPERTS);
    const hd_grouped_gemm_args a = {.x = take_acts((int64_t)rows * s->cols, 1.0f),
                                    .w = &table,
                                    .offset = offset,
                                    .assignment = assignment,
                                    .top_k = TOP_K,
                                    .n_places = places};
    check(&(op_case){.name = s->name,
                     .rows = 1,
                     .n_outs = 1,
                     .width = {places * outs},
                     .tolerance = {product_tolerance},
                     .fast_tolerance = fast_product_tolerance,
                     .gpu_fast_tolerance = fast_product_tolerance,
                     .all_rows = true,
                     .args = &a,
                     .run = run_grouped});
    forget_all(NULL);
}

void real_linear_grouped(void **state) {
    (void)state;
    static const int32_t rows[] = {1, 9, 95};
    for (int32_t i = 0; i < n_op_shapes; i++) {
        const op_shape *s = &op_shapes[i];
        if (!is(s, "grouped_gemm")) continue;
        grouped_case(s, 3, CPU_PRODUCTS, check_op);
        for (size_t k = 0; k < HD_LEN(rows) && fix.gpu; k++) {
            grouped_case(s, rows[k], GPU_PRODUCTS, check_on_gpu);
        }
    }
}

/* ---- keys ---- */

/* Rows of one sequence, each a few positions behind the one before, the first at pos. */
static void attention_case(const op_shape *s, int32_t rows, int32_t last) {
    const int32_t n_tokens = last + 1, window = is_v4(s) ? 128 : 0;
    int32_t *pos = take_ints(rows), *selected = NULL;
    for (int32_t r = 0; r < rows; r++) pos[r] = last - 131 * r;
    hd_attention_args a = {.q = take_acts((int64_t)rows * s->outs * s->cols, 1.0f),
                           .sink = window ? take_random(s->outs, 2.0f) : NULL,
                           .seq = take_ints(rows),
                           .pos = pos,
                           .heads = s->outs,
                           .k_dim = s->cols,
                           .v_dim = 512,
                           .window = window,
                           .ratio = !is_v4(s)  ? 1
                                    : s->top_k ? 4
                                               : 128,
                           .n_selected = s->top_k,
                           .scale = 1.0f / sqrtf((float)s->cols)};
    const int32_t entries = n_tokens / a.ratio;
    a.entries = take_pages(1, &entries, 64, s->cols, 1.0f);
    attention_lists lists = {.narrow_entries = narrow_pages(&a.entries, 1, &entries)};
    if (window) {
        a.recent = take_pages(1, &n_tokens, 64, s->cols, 1.0f);
        lists.narrow_recent = narrow_pages(&a.recent, 1, &n_tokens);
    }
    if (s->top_k) {
        selected = take_ints((int64_t)rows * s->top_k);
        for (int32_t i = 0; i < rows * s->top_k; i++) {
            selected[i] = i % s->top_k * ((entries - 400) / s->top_k);
        }
        a.selected = selected;
    }
    lists.a = a;
    check_on_gpu(&(op_case){.name = s->name,
                            .rows = rows,
                            .n_outs = 1,
                            .width = {s->outs * 512},
                            .tolerance = {4e-6},
                            .gpu_fast_tolerance = fast_attention_tolerance,
                            .args = &lists,
                            .run = run_attention_lists});
    forget_all(NULL);
}

/* The reference of all keys takes long: few heads see many. */
void real_attention(void **state) {
    (void)state;
    for (int32_t i = 0; i < n_op_shapes && fix.gpu; i++) {
        const op_shape *s = &op_shapes[i];
        if (!is(s, "attention")) continue;
        if (is_v4(s)) {
            attention_case(s, 3, 9000);
            attention_case(s, 9, 5000);
        } else if (s->outs > 16) {
            attention_case(s, 2, s->top_k || s->n > 4096 ? 4500 : s->n);
        } else {
            attention_case(s, 1, 12345);
        }
    }
}

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

/* Small integers, so that sums are exact and there are many ties. */
static void round_all(float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) x[i] = rintf(x[i]);
}

static void select_case(const op_shape *s, int32_t n_keys) {
    enum { ROWS = 3 };
    const int64_t n_q = (int64_t)ROWS * s->outs * s->cols;
    int32_t *pos = take_ints(ROWS);
    float *q = take_random(n_q, 1.4f);
    float *weight = take_random((int64_t)ROWS * s->outs, 2.4f);
    hd_paged keys = take_pages(1, &n_keys, 64, s->cols, 1.4f);
    round_all(q, n_q);
    round_all(weight, (int64_t)ROWS * s->outs);
    for (int32_t e = 0; e < n_keys; e++) round_all(page_entry(&keys, 0, e), s->cols);
    for (int32_t r = 0; r < ROWS; r++) pos[r] = n_keys - 1 - r;
    const hd_indexer_topk_args a = {.q = hd_f32(q),
                                    .weight = weight,
                                    .keys = keys,
                                    .seq = take_ints(ROWS),
                                    .pos = pos,
                                    .heads = s->outs,
                                    .ratio = 1,
                                    .top_k = s->top_k,
                                    .scale = 0.25f};
    check_on_gpu(&(op_case){.name = s->name,
                            .rows = ROWS,
                            .n_outs = 1,
                            .width = {s->top_k},
                            .gpu_fast_tolerance = 1e-9, /* likewise: integers */
                            .args = &a,
                            .run = run_select});
    forget_all(NULL);
}

void real_index_select(void **state) {
    (void)state;
    for (int32_t i = 0; i < n_op_shapes && fix.gpu; i++) {
        const op_shape *s = &op_shapes[i];
        if (!is(s, "indexer_topk")) continue;
        select_case(s, s->top_k - 1);
        select_case(s, s->top_k + 1);
        select_case(s, (s->n < 16000 ? s->n : 16000) + 1);
    }
}

/* ---- hyper-connections ---- */

static void run_pre(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first, int32_t n,
                    void *const *out) {
    hd_hc_pre_args a = *(const hd_hc_pre_args *)c->args;
    a.out = hd_f32(out[0]);
    a.post = out[1];
    a.comb = out[2];
    a.x = hd_rows_at(a.x, (int64_t)first * a.hc * a.cols);
    a.rows = n;
    ops->hc_pre(s, &a);
}

void real_hc_pre(void **state) {
    (void)state;
    static const int32_t rows[] = {2, 67};
    for (int32_t i = 0; i < n_op_shapes && fix.gpu; i++) {
        const op_shape *s = &op_shapes[i];
        const int64_t all = (int64_t)s->n * s->cols, mixes = 2 * s->n + s->n * s->n;
        if (!is(s, "hc_pre")) continue;
        for (size_t k = 0; k < HD_LEN(rows); k++) {
            const hd_hc_pre_args a = {.x = take_acts(rows[k] * all, 2.0f),
                                      .fn = take_random(mixes * all, 0.02f),
                                      .scale = take_random(3, 1.5f),
                                      .base = take_random(mixes, 1.0f),
                                      .cols = s->cols,
                                      .hc = s->n,
                                      .iters = 20,
                                      .norm_eps = 1e-6f,
                                      .eps = 1e-6f};
            check_on_gpu(&(op_case){
                .name = s->name,
                .rows = rows[k],
                .n_outs = 3,
                .width = {s->cols, s->n, s->n * s->n},
                .tolerance = {4e-6,    4e-6, 1e-5       },
                .args = &a,
                .run = run_pre
            });
            forget_all(NULL);
        }
    }
}

/* ---- what a device refuses ---- */

/* A launch that needs more than a multiprocessor has is an error of the stream, and only of
 * that launch: the next ones are computed. */
void refusals_are_reported(void **state) {
    (void)state;
    if (!fix.gpu) return;
    const hd_ops *ops = &fix.table[fix.n_tables - 1];
    float *x = take_random(4096, 1.0f), *out = take_nan(4096);
    int32_t *zeros = take_ints(64);
    hd_err err = {0};
    const hd_paged keys = {.rows = hd_f32(x), .table = zeros, .page_entries = 1, .width = 1};
    ops->attention(fix.gpu_stream, &(hd_attention_args){.out = hd_f32(out),
                                                        .q = hd_f32(x),
                                                        .entries = keys,
                                                        .seq = zeros,
                                                        .pos = zeros,
                                                        .rows = 1,
                                                        .heads = 1,
                                                        .k_dim = 4096,
                                                        .v_dim = 4096,
                                                        .ratio = 1,
                                                        .scale = 1.0f});
    assert_int_equal(hd_stream_sync(fix.gpu_stream, &err), HD_EUNSUPPORTED);
    assert_non_null(strstr(err.msg, "attention"));
    zeros[0] = 0;
    ops->moe_combine(fix.gpu_stream, &(hd_moe_combine_args){.out = hd_f32(out),
                                                            .y = hd_f32(x),
                                                            .place = zeros,
                                                            .rows = 1,
                                                            .cols = 1,
                                                            .top_k = 1 << 20});
    err = (hd_err){0};
    assert_int_equal(hd_stream_sync(fix.gpu_stream, &err), HD_EDEVICE);
    assert_non_null(strstr(err.msg, "moe_combine"));
    ops->rms_norm(
        fix.gpu_stream,
        &(hd_rms_norm_args){
            .out = hd_f32(out), .x = hd_f32(x), .rows = 2, .cols = 2048, .eps = 1e-6f});
    finish("rms_norm behind a refusal", fix.gpu_stream);
    for (int32_t i = 0; i < 4096; i++) assert_true(isfinite(out[i]));
}
