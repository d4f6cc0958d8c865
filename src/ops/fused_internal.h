/* fused_internal.h - the arguments of the operators that a fused one stands for, in their order: a
 * backend without a kernel of its own runs those. */
#ifndef HD_OPS_FUSED_INTERNAL_H
#define HD_OPS_FUSED_INTERNAL_H

#include "ops/ops.h"

HD_BEGIN_C

/* Product i of a linear_set. */
static inline hd_linear_args ops_set_linear(const hd_linear_set_args *a, int32_t i) {
    const hd_linear_args p = {.out = a->out[i], .x = a->x, .w = a->w[i], .rows = a->rows};
    return p;
}

/* The two products of a linear_swiglu. */
static inline hd_linear_args ops_gate_linear(const hd_linear_swiglu_args *a, bool up) {
    const hd_linear_args p = {
        .out = up ? a->up : a->gate, .x = a->x, .w = up ? a->up_w : a->gate_w, .rows = a->rows};
    return p;
}

static inline hd_swiglu_args ops_linear_swiglu(const hd_linear_swiglu_args *a) {
    const hd_swiglu_args p = {.out = a->out,
                              .gate = a->gate,
                              .up = a->up,
                              .weight = NULL,
                              .assignment = NULL,
                              .rows = a->rows,
                              .cols = a->gate_w->rows,
                              .limit = a->limit};
    return p;
}

/* The same of a grouped_swiglu. */
static inline hd_grouped_gemm_args ops_gate_grouped(const hd_grouped_swiglu_args *a, bool up) {
    const hd_grouped_gemm_args p = {.out = up ? a->up : a->gate,
                                    .x = a->x,
                                    .w = up ? a->up_w : a->gate_w,
                                    .offset = a->offset,
                                    .assignment = a->assignment,
                                    .top_k = a->top_k,
                                    .n_places = a->n_places};
    return p;
}

static inline hd_swiglu_args ops_grouped_swiglu(const hd_grouped_swiglu_args *a) {
    const hd_swiglu_args p = {.out = a->out,
                              .gate = a->gate,
                              .up = a->up,
                              .weight = a->weight,
                              .assignment = a->assignment,
                              .rows = a->n_places,
                              .cols = a->gate_w->shape.rows,
                              .limit = a->limit};
    return p;
}

static inline hd_add_args ops_norm_add(const hd_add_norm_args *a) {
    const hd_add_args p = {.x = a->x, .y = a->y, .rows = a->rows, .cols = a->cols, .repeat = 1};
    return p;
}

static inline hd_rms_norm_args ops_add_rms_norm(const hd_add_norm_args *a) {
    const hd_rms_norm_args p = {.out = a->out,
                                .x = a->x,
                                .weight = a->weight,
                                .rows = a->rows,
                                .cols = a->cols,
                                .eps = a->eps};
    return p;
}

static inline hd_rms_norm_args ops_rope_rms_norm(const hd_norm_rope_args *a) {
    const hd_rms_norm_args p = {.out = hd_rows_strided(a->x, a->head_width),
                                .x = hd_rows_strided(a->x, a->head_width),
                                .weight = a->weight,
                                .rows = a->rows * a->heads,
                                .cols = a->norm_cols,
                                .eps = a->eps};
    return p;
}

static inline hd_rope_args ops_norm_rope(const hd_norm_rope_args *a) {
    const hd_rope_args p = {.out = hd_rows_at(a->x, a->rope_at),
                            .x = hd_rows_at(a->x, a->rope_at),
                            .cos_sin = a->cos_sin,
                            .rows = a->rows,
                            .heads = a->heads,
                            .pairs = a->pairs,
                            .out_head = a->head_width,
                            .x_head = a->head_width,
                            .half_split = a->half_split,
                            .inverse = false};
    return p;
}

static inline hd_hc_post_args ops_next_post(const hd_hc_next_args *a) {
    const hd_hc_post_args p = {.x = a->x,
                               .y = a->y,
                               .post = a->post,
                               .comb = a->comb,
                               .rows = a->rows,
                               .cols = a->cols,
                               .hc = a->hc};
    return p;
}

static inline hd_hc_pre_args ops_next_pre(const hd_hc_next_args *a) {
    const hd_hc_pre_args p = {.out = a->out,
                              .post = a->post,
                              .comb = a->comb,
                              .x = a->x,
                              .fn = a->fn,
                              .scale = a->scale,
                              .base = a->base,
                              .rows = a->rows,
                              .cols = a->cols,
                              .hc = a->hc,
                              .iters = a->iters,
                              .norm_eps = a->norm_eps,
                              .eps = a->eps};
    return p;
}

static inline hd_hc_single_args ops_next_single(const hd_hc_next_args *a) {
    const hd_hc_single_args p = {.out = a->out,
                                 .pre = a->pre,
                                 .post = a->post,
                                 .comb = a->comb,
                                 .x = a->x,
                                 .fn = a->fn,
                                 .scale = a->scale,
                                 .base = a->base,
                                 .rows = a->rows,
                                 .cols = a->cols,
                                 .hc = a->hc,
                                 .iters = a->iters,
                                 .norm_eps = a->norm_eps,
                                 .eps = a->eps,
                                 .first = a->first};
    return p;
}

static inline hd_rms_norm_args ops_next_rms_norm(const hd_hc_next_args *a) {
    const hd_rms_norm_args p = {.out = a->out,
                                .x = a->out,
                                .weight = a->weight,
                                .rows = a->rows,
                                .cols = a->cols,
                                .eps = a->norm_eps};
    return p;
}

/* The coefficients of an hc_single, but for pre, and its mixture. */
static inline hd_hc_pre_args ops_single_pre(const hd_hc_single_args *a) {
    const hd_hc_pre_args p = {.out = a->out,
                              .post = a->post,
                              .comb = a->comb,
                              .x = a->x,
                              .fn = a->fn,
                              .scale = a->scale,
                              .base = a->base,
                              .rows = a->rows,
                              .cols = a->cols,
                              .hc = a->hc,
                              .iters = a->iters,
                              .norm_eps = a->norm_eps,
                              .eps = a->eps};
    return p;
}

static inline hd_hc_mix_args ops_single_mix(const hd_hc_single_args *a) {
    const hd_hc_mix_args p = {
        .out = a->out, .x = a->x, .pre = a->pre, .rows = a->rows, .cols = a->cols, .hc = a->hc};
    return p;
}

/* Runs them. RUN(op, args) calls one. */
#define OPS_RUN_linear_set(RUN, a)                       \
    for (int32_t i = 0; i < (a)->n; i++) {               \
        const hd_linear_args one = ops_set_linear(a, i); \
        RUN(linear, &one);                               \
    }

#define OPS_RUN_linear_swiglu(RUN, a)                       \
    const hd_linear_args gate = ops_gate_linear(a, false);  \
    const hd_linear_args up = ops_gate_linear(a, true);     \
    const hd_swiglu_args activation = ops_linear_swiglu(a); \
    RUN(linear, &gate);                                     \
    RUN(linear, &up);                                       \
    RUN(swiglu, &activation);

#define OPS_RUN_grouped_swiglu(RUN, a)                            \
    const hd_grouped_gemm_args gate = ops_gate_grouped(a, false); \
    const hd_grouped_gemm_args up = ops_gate_grouped(a, true);    \
    const hd_swiglu_args activation = ops_grouped_swiglu(a);      \
    RUN(grouped_gemm, &gate);                                     \
    RUN(grouped_gemm, &up);                                       \
    RUN(swiglu, &activation);

#define OPS_RUN_add_norm(RUN, a)                       \
    const hd_add_args sum = ops_norm_add(a);           \
    const hd_rms_norm_args norm = ops_add_rms_norm(a); \
    if ((a)->y.data) RUN(add, &sum);                   \
    RUN(rms_norm, &norm);

#define OPS_RUN_norm_rope(RUN, a)                       \
    const hd_rms_norm_args norm = ops_rope_rms_norm(a); \
    const hd_rope_args rotation = ops_norm_rope(a);     \
    RUN(rms_norm, &norm);                               \
    RUN(rope, &rotation);

#define OPS_RUN_hc_next(RUN, a)                          \
    const hd_hc_post_args post = ops_next_post(a);       \
    const hd_hc_pre_args pre = ops_next_pre(a);          \
    const hd_hc_single_args single = ops_next_single(a); \
    const hd_rms_norm_args norm = ops_next_rms_norm(a);  \
    if ((a)->y.data) RUN(hc_post, &post);                \
    if ((a)->pre) {                                      \
        RUN(hc_single, &single);                         \
    } else {                                             \
        RUN(hc_pre, &pre);                               \
    }                                                    \
    RUN(rms_norm, &norm);

/* What --precision official computes in its own way: products. */
#define OPS_OFFICIAL_LIST(X) \
    X(linear)                \
    X(linear_set)            \
    X(linear_swiglu)         \
    X(grouped_gemm)          \
    X(grouped_swiglu)

/* The fused operators. */
#define OPS_FUSED_LIST(X) \
    X(linear_set)         \
    X(linear_swiglu)      \
    X(grouped_swiglu)     \
    X(add_norm)           \
    X(norm_rope)          \
    X(hc_next)

HD_END_C

#endif
