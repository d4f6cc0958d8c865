/* test_ops_hc.c - hyper-connections. */
#include "ops/ops_fixture.h"

#include <string.h>

typedef struct hc_shape {
    int32_t rows, hc, cols, iters;
} hc_shape;

static const hc_shape shapes[] = {
    {0,  4,         16,  20},
    {1,  4,         5,   20},
    {33, 4,         48,  20},
    {9,  4,         700, 20}, /* several tiles of columns */
    {33, 1,         17,  3 },
    {10, 2,         33,  1 },
    {33, 3,         257, 7 },
    {3,  HD_MAX_HC, 20,  20},
};

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

void op_hc_pre(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(shapes); i++) {
        const hc_shape *sh = &shapes[i];
        const int32_t wide = sh->hc * sh->cols, n = 2 * sh->hc + sh->hc * sh->hc;
        hd_hc_pre_args a = {.x = hd_f32(take_random((int64_t)sh->rows * wide, 2.0f)),
                            .fn = take_random((int64_t)n * wide, 0.2f),
                            .scale = take_random(3, 1.5f),
                            .base = take_random(n, 1.0f),
                            .cols = sh->cols,
                            .hc = sh->hc,
                            .iters = sh->iters,
                            .norm_eps = 1e-6f,
                            .eps = 1e-6f};
        /* The mixing values are sums of hc * cols products. Sigmoid and the normalization of
         * rows and columns do not increase their error much. */
        check_op(&(op_case){
            .name = "hc_pre",
            .rows = sh->rows,
            .n_outs = 3,
            .width = {sh->cols, sh->hc, sh->hc * sh->hc},
            .tolerance = {4e-6,     4e-6,   1e-5           },
            .args = &a,
            .run = run_pre
        });
    }
}

typedef struct post_case {
    hd_hc_post_args a;
    const float *x;
} post_case;

static void run_post(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                     int32_t n, void *const *out) {
    const post_case *t = c->args;
    hd_hc_post_args a = t->a;
    memcpy(out[0], t->x + (int64_t)first * c->width[0],
           (size_t)n * (size_t)c->width[0] * sizeof(float));
    a.x = hd_f32(out[0]);
    a.y = hd_rows_at(a.y, (int64_t)first * a.cols);
    a.post += (int64_t)first * a.hc;
    a.comb += (int64_t)first * a.hc * a.hc;
    a.rows = n;
    ops->hc_post(s, &a);
}

void op_hc_post(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(shapes); i++) {
        const hc_shape *sh = &shapes[i];
        const int64_t rows = sh->rows;
        post_case t = {
            .a = {.y = hd_f32(take_random(rows * sh->cols, 1.0f)),
                  .post = take_random(rows * sh->hc, 2.0f),
                  .comb = take_random(rows * sh->hc * sh->hc, 1.0f),
                  .cols = sh->cols,
                  .hc = sh->hc},
            .x = take_random(rows * sh->hc * sh->cols, 1.0f)
        };
        check_op(&(op_case){.name = "hc_post",
                            .rows = sh->rows,
                            .n_outs = 1,
                            .width = {sh->hc * sh->cols},
                            .tolerance = {1e-6},
                            .args = &t,
                            .run = run_post});
    }
}

static void run_mean(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                     int32_t n, void *const *out) {
    hd_hc_mean_args a = *(const hd_hc_mean_args *)c->args;
    memset(out[0], 0, (size_t)n * (size_t)c->width[0] * sizeof(float));
    a.out = hd_rows_strided(hd_f32((float *)out[0] + 2), a.cols + 3);
    a.x = hd_rows_at(a.x, (int64_t)first * a.hc * a.cols);
    a.rows = n;
    ops->hc_mean(s, &a);
}

void op_hc_mean(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(shapes); i++) {
        const hc_shape *sh = &shapes[i];
        hd_hc_mean_args a = {
            .x = hd_f32(take_random((int64_t)sh->rows * sh->hc * sh->cols, 2.0f)),
            .cols = sh->cols,
            .hc = sh->hc};
        check_op(&(op_case){.name = "hc_mean",
                            .rows = sh->rows,
                            .n_outs = 1,
                            .width = {sh->cols + 3},
                            .tolerance = {1e-6},
                            .args = &a,
                            .run = run_mean});
    }
}

static void run_head(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                     int32_t n, void *const *out) {
    hd_hc_head_args a = *(const hd_hc_head_args *)c->args;
    a.out = hd_f32(out[0]);
    a.x = hd_rows_at(a.x, (int64_t)first * a.hc * a.cols);
    a.rows = n;
    ops->hc_head(s, &a);
}

void op_hc_head(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(shapes); i++) {
        const hc_shape *sh = &shapes[i];
        const int32_t wide = sh->hc * sh->cols;
        hd_hc_head_args a = {.x = hd_f32(take_random((int64_t)sh->rows * wide, 2.0f)),
                             .fn = take_random((int64_t)sh->hc * wide, 0.2f),
                             .scale = take_random(1, 1.5f),
                             .base = take_random(sh->hc, 1.0f),
                             .cols = sh->cols,
                             .hc = sh->hc,
                             .norm_eps = 1e-6f,
                             .eps = 1e-6f};
        check_op(&(op_case){.name = "hc_head",
                            .rows = sh->rows,
                            .n_outs = 1,
                            .width = {sh->cols},
                            .tolerance = {4e-6},
                            .args = &a,
                            .run = run_head});
    }
}
