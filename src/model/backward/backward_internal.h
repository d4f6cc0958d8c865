/* backward_internal.h - memory and helpers of the backward pass. */
#ifndef HD_MODEL_BACKWARD_BACKWARD_INTERNAL_H
#define HD_MODEL_BACKWARD_BACKWARD_INTERNAL_H

#include "model/backward.h"
#include "model/model_internal.h"

/* Gradients of activations; named as in model_activations. n = rows. */
typedef struct backward_activations {
    float *x;     /* [n, streams, hidden] of the residual */
    float *y, *h; /* [n, hidden] of a block's result and of its input */
    float *term;  /* [n, streams, hidden] one term of a sum */
    float *mixed; /* [n, hidden] the forward value before a block's norm */
    float *post, *comb, *mix;

    /* attention */
    float *q_low, *q_low_raw; /* [n, q_rank]; raw: the forward value before the norm */
    float *q, *q_wide, *context, *o_low, *kv, *entries;
    float *compress_kv, *compress_gate;
    float *lse, *delta;   /* [n, heads] */
    int32_t *first_entry; /* [seqs] */

    /* feed-forward */
    float *gate, *up, *router, *expert_weight;
    float *expert_gate, *expert_up, *expert_y, *expert_x;

    /* head */
    float *merged, *logit_x, *logit_mix;
} backward_activations;

struct hd_backward {
    hd_model *m;
    const hd_backward_ops *ops;
    float *kept; /* [layers, 2, rows, streams, hidden] the residual before each block */
    backward_activations d;
    void *block;
    size_t bytes;
};

/* One batch on its way back. */
typedef struct back_step {
    const hd_backward *b;
    const model_step *s;
    const hd_gradients *g;
} back_step;

/* The residual that a block began with: 0 attention, 1 feed-forward. */
float *backward_kept(const hd_backward *b, int32_t layer, int32_t block);

/* dx = g W, or dx += g W with `more`; and W's gradient, for out = x W^T. */
void back_linear(const back_step *k, int32_t layer, hd_role role, float *dx, bool more,
                 hd_rows g, hd_rows x, int32_t rows);

/* x += y */
void back_add(const back_step *k, float *x, const float *y, int32_t rows, int32_t cols);

/* The gradient of model_norm(); dx may be g. */
void back_norm(const back_step *k, int32_t layer, hd_role role, hd_rows dx, hd_rows g,
               hd_rows x, int32_t rows, int32_t cols, float eps);

/* Rotates gradients back: the inverse of model_rope(). */
void back_rope(const back_step *k, const float *cos_sin, float *x, int32_t at, int32_t heads,
               int32_t head_width);

/* The blocks: from d.y to d.h, after the forward stages of the block have run. */
typedef void back_block_fn(const back_step *k, int32_t layer);
back_block_fn back_mla, back_mla_sparse, back_hybrid, back_dense, back_moe;

/* From d.y back through norm and residual, around `block`. */
void back_through(const back_step *k, int32_t layer, int32_t block, back_block_fn *fn);

/* head.c: logits, loss, and d.x after the last layer */
void back_head(const back_step *k, const hd_batch *batch, const hd_loss *loss);

#endif
