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
    float *part;        /* [n, 3 + mixing values] for hc_pre_back and hc_head_back */
    double *norm_scale; /* [n, streams] for rms_norm_back */
    float *parts;       /* [n_parts] of hd_row_sums, on a GPU */
    int64_t n_parts;

    /* attention */
    float *q_low, *q_low_raw; /* [n, q_rank]; raw: the forward value before the norm */
    float *q, *q_wide, *context, *o_low, *kv, *entries;
    float *made, *dmade, *rotated_part; /* naive MLA: as of hd_attention_naive_back_args */
    float *compress_kv, *compress_gate;
    float *lse, *delta; /* [n, heads] */
    /* of the indexer: [n, index_heads, index_dim], [n, index_heads], [n, index_dim], [n, 2 * index_dim] */
    float *index_q, *index_weight, *index_keys, *index_kv, *index_gate;
    float *index_shares, *index_slopes; /* [n, index_topk]; shares: on a CPU */
    double *index_stats;                /* [n, 2] on a GPU */
    int32_t *first_entry;               /* [seqs] */

    /* feed-forward */
    float *gate, *up, *router, *expert_weight;
    float *expert_gate, *expert_up, *expert_y, *expert_x;

    /* head */
    float *merged, *logit_x, *logit_mix;
    int32_t *first_logit; /* [logits + 1] of each piece of a part */

    float *paired; /* V3's MTP layer [n, 2 * hidden] */
} backward_activations;

/* Activations of one block that backwards need not be computed again. */
typedef struct kept_block {
    bool kept;
    model_activations t;
} kept_block;

struct hd_backward {
    hd_model *m;
    const hd_backward_ops *ops;
    float *kept;        /* [layers, 2, rows, streams, hidden] the residual before each block */
    kept_block *blocks; /* [layers, 2] */
    hd_backward_options o; /* drafts: layers include the MTP layer */
    /* [rows, streams, hidden] after the main model's layers; NULL without drafts */
    float *last;
    backward_activations d;
    int32_t *row;         /* [rows] 0, 1, ... */
    int32_t *first_entry; /* [seqs] d.first_entry on the host */
    int32_t *first_logit; /* [logits + 1] d.first_logit on the host */
    hd_replay_count replayed;
    void *block;
    size_t bytes;
};

/* One batch on its way back; g NULL: only its losses. */
typedef struct back_step {
    const hd_backward *b;
    const model_step *s;
    const hd_gradients *g;
    float indexer;     /* factor of the indexers' loss; 0: none */
    float *divergence; /* [rows] of hd_loss */
    bool detached;     /* what the MTP layer shares with the main model gets no gradient */
    hd_seqs logits;    /* pieces of the logits rows, where the step's rows are those */
} back_step;

/* Whether gradients of MLA are those of its naive form, which takes fewer products. */
bool backward_is_naive(const hd_backward *b);

/* The residual that a block began with: 0 attention, 1 feed-forward. */
float *backward_kept(const hd_backward *b, int32_t layer, int32_t block);

/* The activations of a block on its way back; NULL: they are computed again, among those of the
 * step. */
model_activations *backward_block(const hd_backward *b, int32_t layer, int32_t block);

/* The step's sequences, with the rows of the longest. */
hd_seqs back_seqs(const back_step *k);

/* How the step's rows are summed, which may be rows of logits. */
hd_row_sums back_sums(const back_step *k);

/* The gradient of a matrix of out = x W^T: dw += g^T x, unless dw is NULL. */
void back_matrix(const back_step *k, float *dw, hd_rows g, hd_rows x, int32_t rows,
                 int32_t n_rows, int32_t cols);

/* The gradients of linear_heads as it was called: its matrix has that role, g is the gradient of
 * its result, dx receives that of its input. */
void back_heads(const back_step *k, int32_t layer, hd_role role,
                const hd_linear_heads_args *forward, float *dx, const float *g);

/* dx = g W, for out = x W^T */
void back_input(const back_step *k, int32_t layer, hd_role role, hd_rows dx, hd_rows g,
                int32_t rows);

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

/* From d.q to d.h, of a query with a low rank; eps: of the norm between both projections. */
void back_low_query(const back_step *k, int32_t layer, float eps);

/* The gradients of a layer's indexer, if the step has any, of what attention_back left. Its queries
 * [rows, heads, k_dim] see `entries`, of which entry e of sequence s is row first_entry[s] + e. */
typedef struct back_indexed {
    hd_rows queries;
    hd_paged entries;
    const int32_t *first_entry;
    int32_t k_dim, ratio;
} back_indexed;
void back_indexer(const back_step *k, int32_t layer, const back_indexed *of);

/* The blocks: from d.y to d.h, after the forward stages of the block have run. */
typedef void back_block_fn(const back_step *k, int32_t layer);
back_block_fn back_mla, back_mla_sparse, back_hybrid, back_dense, back_moe;

/* From d.y back through norm and residual, around `block`. */
void back_through(const back_step *k, int32_t layer, int32_t block, back_block_fn *fn);

/* head_back.c: logits, loss, and unless k->g is NULL d.x after the last layer, which is added to what
 * d.x has. layer: HD_GLOBAL, or the MTP layer. host_rows: the batch's logits rows in host memory. */
void back_head(const back_step *k, int32_t layer, const hd_batch *batch,
               const int32_t *host_rows, const hd_loss *loss);
void back_clear_residual(const back_step *k); /* d.x = 0 */

/* mtp_back.c: x and, of V3, h as they are before the MTP layer; x alone; and from d.x after its
 * input to d.x before it. */
void back_mtp_again(const back_step *k);
void back_mtp_leave(const back_step *k);
void back_mtp_start(const back_step *k, int32_t layer);

#endif
