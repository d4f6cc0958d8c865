/* test_ops_real.c - operators at the widths of V3 and V4, and odd widths of that size, on a GPU
 * against the reference. */
#include "ops/ops_fixture.h"

#include <math.h>
#include <string.h>

enum { E4M3 = 6, E2M1 = 9, BF16 = 2 }; /* of weight_formats */

/* sums of up to 16384 products of either sign */
static const double product_tolerance = 4e-6;

/* bfloat16 has eight bits; scales differ between blocks, and some blocks are all of an
 * output */
static const double fast_product_tolerance = 0.03, fast_attention_tolerance = 0.02;

static const hd_act *act_at(const hd_act *x, int64_t n) {
    return (const hd_act *)((const float *)(const void *)x + n);
}

static const hd_act *take_acts(int64_t n, float spread) {
    return (const hd_act *)(const void *)take_random(n, spread);
}

/* ---- products ---- */

static void run_linear(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                       int32_t n, void *const *out) {
    hd_linear_args a = *(const hd_linear_args *)c->args;
    a.out_f32 = out[0];
    a.x = act_at(a.x, (int64_t)first * a.w->cols);
    a.rows = n;
    ops->linear(s, &a);
}

void real_linear(void **state) {
    (void)state;
    static const struct {
        int32_t format, rows, outs, cols;
    } shapes[] = {
        {E4M3, 1,   2112, 7168 },
        {E4M3, 7,   2112, 7168 },
        {E4M3, 3,   7168, 2048 },
        {E4M3, 1,   1024, 16384},
        {E4M3, 129, 384,  7168 },
        {E4M3, 17,  4096, 1024 },
        {E4M3, 33,  520,  4096 },
        {BF16, 5,   2048, 4096 },
        {BF16, 70,  256,  7168 },
        {E2M1, 9,   512,  4096 },
        {E2M1, 65,  257,  2048 },
    };
    for (size_t i = 0; i < HD_LEN(shapes); i++) {
        const hd_weight *w = take_weight(&weight_formats[shapes[i].format], shapes[i].outs,
                                         shapes[i].cols, false);
        const hd_linear_args a = {
            .w = w, .x = take_acts((int64_t)shapes[i].rows * shapes[i].cols, 1.0f)};
        check_on_gpu(&(op_case){.name = "linear, real widths",
                                .rows = shapes[i].rows,
                                .n_outs = 1,
                                .width = {shapes[i].outs},
                                .tolerance = {product_tolerance},
                                .gpu_fast_tolerance = fast_product_tolerance,
                                .args = &a,
                                .run = run_linear});
    }
}

static void run_heads(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                      int32_t n, void *const *out) {
    hd_linear_heads_args a = *(const hd_linear_heads_args *)c->args;
    a.out = out[0];
    a.x = act_at(a.x, (int64_t)first * a.x_stride);
    a.rows = n;
    ops->linear_heads(s, &a);
}

/* V3's keys and values, two halves of one matrix, and V4's groups of the output projection. */
void real_linear_heads(void **state) {
    (void)state;
    static const struct {
        int32_t rows, heads, n_rows, first_row, head_rows, cols;
        bool transpose;
    } shapes[] = {
        {3,  16, 128,  0,   256,  512,  true },
        {70, 5,  128,  0,   256,  512,  true },
        {3,  16, 128,  128, 256,  512,  false},
        {70, 5,  128,  128, 256,  512,  false},
        {2,  2,  1024, 0,   1024, 4096, false},
    };
    for (size_t i = 0; i < HD_LEN(shapes); i++) {
        hd_linear_heads_args a = {.heads = shapes[i].heads,
                                  .n_rows = shapes[i].n_rows,
                                  .first_row = shapes[i].first_row,
                                  .head_rows = shapes[i].head_rows,
                                  .transpose = shapes[i].transpose};
        const int32_t rows = shapes[i].rows, cols = shapes[i].cols;
        a.w = take_weight(&weight_formats[E4M3], a.heads * a.head_rows, cols, false);
        a.x_head = a.transpose ? a.n_rows : cols;
        a.out_head = a.transpose ? cols : a.n_rows;
        a.x_stride = a.heads * a.x_head;
        a.out_stride = a.heads * a.out_head;
        a.x = take_acts((int64_t)rows * a.x_stride, 1.0f);
        check_on_gpu(&(op_case){.name = "linear_heads, real widths",
                                .rows = rows,
                                .n_outs = 1,
                                .width = {a.out_stride},
                                .tolerance = {product_tolerance},
                                .gpu_fast_tolerance = fast_product_tolerance,
                                .args = &a,
                                .run = run_heads});
    }
}

static void run_grouped(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                        int32_t n, void *const *out) {
    hd_grouped_gemm_args a = *(const hd_grouped_gemm_args *)c->args;
    (void)first;
    (void)n;
    a.out = out[0];
    ops->grouped_gemm(s, &a);
}

/* Rows have random experts; one expert has no row, one has many. */
void real_linear_grouped(void **state) {
    (void)state;
    enum { EXPERTS = 6, TOP_K = 2 };
    static const struct {
        int32_t format, rows, outs, cols;
    } shapes[] = {
        {E2M1, 1,  512, 4096},
        {E2M1, 21, 264, 4096},
        {E4M3, 9,  200, 7168},
        {E4M3, 95, 136, 2048},
    };
    for (size_t i = 0; i < HD_LEN(shapes); i++) {
        const int32_t places = shapes[i].rows * TOP_K;
        hd_weight *w = take(EXPERTS * sizeof *w);
        int32_t *offset = take_ints(EXPERTS + 1), *assignment = take_ints(places);
        for (int32_t e = 0; e < EXPERTS; e++) {
            w[e] = *take_weight(&weight_formats[shapes[i].format], shapes[i].outs,
                                shapes[i].cols, false);
            const int32_t left = places - offset[e], own = e == 2 ? 0 : (left + 1) / 2;
            offset[e + 1] = e + 1 == EXPERTS ? places : offset[e] + own;
        }
        for (int32_t k = 0; k < places; k++) assignment[k] = (k * 7 + 3) % places;
        const hd_grouped_gemm_args a = {
            .x = take_acts((int64_t)shapes[i].rows * shapes[i].cols, 1.0f),
            .w = w,
            .offset = offset,
            .assignment = assignment,
            .n_experts = EXPERTS,
            .top_k = TOP_K,
            .n_places = places};
        check_on_gpu(&(op_case){.name = "grouped_gemm, real widths",
                                .rows = 1,
                                .n_outs = 1,
                                .width = {places * shapes[i].outs},
                                .tolerance = {product_tolerance},
                                .gpu_fast_tolerance = fast_product_tolerance,
                                .int16 = true,
                                .args = &a,
                                .run = run_grouped});
    }
}

/* ---- keys ---- */

static void run_attention(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                          int32_t n, void *const *out) {
    hd_attention_args a = *(const hd_attention_args *)c->args;
    a.out = out[0];
    a.q = act_at(a.q, (int64_t)first * a.heads * a.k_dim);
    if (a.selected) a.selected += (int64_t)first * a.n_selected;
    a.seq += first;
    a.pos += first;
    a.rows = n;
    ops->attention(s, &a);
}

typedef struct attention_shape {
    const char *name;
    int32_t rows, heads, width, pos, window, ratio, n_selected;
} attention_shape;

/* Rows of one sequence, each a few positions after the one before. */
static void attention_case(const attention_shape *sh) {
    const int32_t n_tokens = sh->pos + 1;
    int32_t *pos = take_ints(sh->rows), *selected = NULL;
    for (int32_t r = 0; r < sh->rows; r++) pos[r] = sh->pos - 131 * r;
    hd_attention_args a = {.q = take_acts((int64_t)sh->rows * sh->heads * sh->width, 1.0f),
                           .sink = sh->window ? take_random(sh->heads, 2.0f) : NULL,
                           .seq = take_ints(sh->rows),
                           .pos = pos,
                           .heads = sh->heads,
                           .k_dim = sh->width,
                           .v_dim = 512,
                           .window = sh->window,
                           .ratio = sh->ratio,
                           .n_selected = sh->n_selected,
                           .scale = 1.0f / sqrtf((float)sh->width)};
    const int32_t entries = n_tokens / sh->ratio;
    a.entries = take_pages(1, &entries, 64, sh->width, 1.0f);
    if (sh->window) a.recent = take_pages(1, &n_tokens, 64, sh->width, 1.0f);
    if (sh->n_selected) {
        selected = take_ints((int64_t)sh->rows * sh->n_selected);
        for (int32_t i = 0; i < sh->rows * sh->n_selected; i++) {
            selected[i] = i % sh->n_selected * ((entries - 400) / sh->n_selected);
        }
        a.selected = selected;
    }
    check_on_gpu(&(op_case){.name = sh->name,
                            .rows = sh->rows,
                            .n_outs = 1,
                            .width = {sh->heads * 512},
                            .tolerance = {4e-6},
                            .gpu_fast_tolerance = fast_attention_tolerance,
                            .args = &a,
                            .run = run_attention});
}

void real_attention(void **state) {
    (void)state;
    static const attention_shape shapes[] = {
        {"V3, all keys",         2, 128, 576, 4096,  0,   1,   0   },
        {"V3, all of many keys", 1, 16,  576, 12345, 0,   1,   0   },
        {"V3.2, selected",       2, 128, 576, 4500,  0,   1,   2048},
        {"V4, selected",         3, 64,  512, 9000,  128, 4,   512 },
        {"V4, all entries",      2, 16,  512, 9000,  128, 128, 0   },
        {"a few rows more",      9, 64,  512, 5000,  128, 4,   512 },
    };
    for (size_t i = 0; i < HD_LEN(shapes); i++) attention_case(&shapes[i]);
}

static void run_select(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                       int32_t n, void *const *out) {
    hd_indexer_topk_args a = *(const hd_indexer_topk_args *)c->args;
    a.out = out[0];
    a.q = act_at(a.q, (int64_t)first * a.heads * a.keys.width);
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

void real_index_select(void **state) {
    (void)state;
    enum { SELECT_ROWS = 3, SELECT_HEADS = 64, SELECT_WIDTH = 128 };
    static const struct {
        int32_t keys, top_k;
    } shapes[] = {
        {511,   512 },
        {513,   512 },
        {7501,  512 },
        {16001, 2048},
    };
    for (size_t i = 0; i < HD_LEN(shapes); i++) {
        const int64_t n_q = SELECT_ROWS * SELECT_HEADS * SELECT_WIDTH;
        int32_t *pos = take_ints(SELECT_ROWS);
        float *q = take_random(n_q, 1.4f);
        float *weight = take_random(SELECT_ROWS * SELECT_HEADS, 2.4f);
        hd_paged keys = take_pages(1, &shapes[i].keys, 64, SELECT_WIDTH, 1.4f);
        round_all(q, n_q);
        round_all(weight, SELECT_ROWS * SELECT_HEADS);
        for (int32_t e = 0; e < shapes[i].keys; e++) {
            round_all(page_entry(&keys, 0, e), SELECT_WIDTH);
        }
        for (int32_t r = 0; r < SELECT_ROWS; r++) pos[r] = shapes[i].keys - 1 - r;
        const hd_indexer_topk_args a = {.q = (const hd_act *)(const void *)q,
                                        .weight = weight,
                                        .keys = keys,
                                        .seq = take_ints(SELECT_ROWS),
                                        .pos = pos,
                                        .heads = SELECT_HEADS,
                                        .ratio = 1,
                                        .top_k = shapes[i].top_k,
                                        .scale = 0.25f};
        check_on_gpu(&(op_case){.name = "indexer_topk, real widths",
                                .rows = SELECT_ROWS,
                                .n_outs = 1,
                                .width = {shapes[i].top_k},
                                .gpu_fast_tolerance = 1e-9, /* likewise: integers */
                                .args = &a,
                                .run = run_select});
    }
}

/* ---- hyper-connections ---- */

static void run_pre(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first, int32_t n,
                    void *const *out) {
    hd_hc_pre_args a = *(const hd_hc_pre_args *)c->args;
    a.out = out[0];
    a.post = out[1];
    a.comb = out[2];
    a.x = act_at(a.x, (int64_t)first * a.hc * a.cols);
    a.rows = n;
    ops->hc_pre(s, &a);
}

void real_hc_pre(void **state) {
    (void)state;
    static const int32_t rows[] = {2, 67};
    for (size_t i = 0; i < HD_LEN(rows); i++) {
        const hd_hc_pre_args a = {.x = take_acts((int64_t)rows[i] * 4 * 4096, 2.0f),
                                  .fn = take_random(24 * 4 * 4096, 0.02f),
                                  .scale = take_random(3, 1.5f),
                                  .base = take_random(24, 1.0f),
                                  .cols = 4096,
                                  .hc = 4,
                                  .iters = 20,
                                  .norm_eps = 1e-6f,
                                  .eps = 1e-6f};
        check_on_gpu(&(op_case){
            .name = "hc_pre, real widths",
            .rows = rows[i],
            .n_outs = 3,
            .width = {4096, 4,    16  },
            .tolerance = {4e-6, 4e-6, 1e-5},
            .args = &a,
            .run = run_pre
        });
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
    const hd_paged keys = {
        .data = (hd_act *)(void *)x, .table = zeros, .page_entries = 1, .width = 1};
    ops->attention(fix.gpu_stream, &(hd_attention_args){.out = (hd_act *)(void *)out,
                                                        .q = (const hd_act *)(const void *)x,
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
    ops->moe_combine(fix.gpu_stream,
                     &(hd_moe_combine_args){.out = (hd_act *)(void *)out,
                                            .y = (const hd_act *)(const void *)x,
                                            .place = zeros,
                                            .rows = 1,
                                            .cols = 1,
                                            .top_k = 1 << 20});
    err = (hd_err){0};
    assert_int_equal(hd_stream_sync(fix.gpu_stream, &err), HD_EDEVICE);
    assert_non_null(strstr(err.msg, "moe_combine"));
    ops->rms_norm(fix.gpu_stream, &(hd_rms_norm_args){.out = (hd_act *)(void *)out,
                                                      .x = (const hd_act *)(const void *)x,
                                                      .rows = 2,
                                                      .cols = 2048,
                                                      .eps = 1e-6f});
    finish("rms_norm behind a refusal", fix.gpu_stream);
    for (int32_t i = 0; i < 4096; i++) assert_true(isfinite(out[i]));
}
