/* backward.h - backward operators: the gradients of the operators of ops.h; and the optimizer's.
 *
 * They have a table of their own, because serving never runs them. The contract is that of
 * ops.h. Names: g is the gradient of a forward output; dx, dq, ... are gradients of forward
 * inputs, float32. Gradients of activations are written. Gradients of parameters are added
 * to, and left out where they are NULL: row by row in ascending order, each sum in one float32 accumulator that starts at the
 * stored value. A GPU sums chunks of rows and adds those sums in order (hd_row_sums). So they do not depend
 * on threads, nor on how sequences are divided into calls, as long as they come in the same order (design
 * D8).
 *
 * There is no operator where a forward one does it: the input gradient of linear is
 * linear_heads with `transpose` (or linear_back), that of linear_heads is linear_heads with the other
 * `transpose`, that of rope is rope with the other `inverse`, and the experts' input
 * gradients of a token are summed by moe_combine. Formulas: docs/training.md. */
#ifndef HD_OPS_BACKWARD_H
#define HD_OPS_BACKWARD_H

#include "base/expert_table.h"
#include "base/router_rule.h"
#include "ops/attention_back.h"
#include "ops/indexer_back.h"
#include "ops/linear.h"
#include "ops/optimizer.h"
#include "ops/row_sums.h"
#include "ops/types.h"

HD_BEGIN_C

/* dw[first_row + h * head_rows + i, c] += left[r, h, i] * right[r, h, c] for r = 0, 1, ...
 * Of out = x W^T left is g and right is x; of out = x W (transpose) left is x and right g. */
typedef struct hd_weight_grad_args {
    float *dw;     /* [*, cols] */
    hd_rows left;  /* [rows, heads, n_rows] with left_head elements between heads */
    hd_rows right; /* [rows, heads, cols] with right_head elements between heads */
    int32_t rows, heads, n_rows, cols, first_row, head_rows;
    int32_t left_head, right_head;
    hd_row_sums sums;
} hd_weight_grad_args;

/* dw[s, i, c] += g[p, i] * x[row of p, c] for the places p of slot s, in ascending order. The
 * row of place p is assignment[p] / top_k, or p if assignment is NULL. */
typedef struct hd_grouped_weight_grad_args {
    float *dw;                          /* [n_slots, n_rows, cols] */
    hd_rows g;                          /* [n places, n_rows] */
    hd_rows x;                          /* [*, cols] */
    const int32_t *offset, *assignment; /* offset: [n_slots + 1] */
    int32_t n_slots, n_rows, cols, top_k;
    int32_t rows;          /* of the batch */
    const int32_t *choice; /* [n places] choice / top_k is the row of the batch */
    hd_row_sums sums;      /* of the rows of the batch */
} hd_grouped_weight_grad_args;

/* dx[p, :] = g[p, :] W_s for the places p of slot s */
typedef struct hd_grouped_gemm_back_args {
    float *dx; /* [n places, w->shape.cols] */
    hd_rows g; /* [n places, w->shape.rows] */
    const hd_expert_table *w;
    const int32_t *offset; /* [w->n + 1] */
    int32_t n_places;      /* an upper bound that the host knows */
} hd_grouped_gemm_back_args;

/* With r = 1 / sqrt(mean(x^2) + eps) and u = weight g: dx = r u - x r^3 <u, x> / cols, and
 * dweight += g x r; docs/training.md. */
typedef struct hd_rms_norm_back_args {
    hd_rows dx;          /* [rows, cols], may be g */
    float *dweight;      /* [cols] */
    hd_rows g, x;        /* [rows, cols]; x before the norm */
    const float *weight; /* [cols], NULL: ones */
    double *scale;       /* [rows] for the operator's own use; needed with dweight */
    int32_t rows, cols;
    float eps;
    hd_row_sums sums;
} hd_rms_norm_back_args;

/* dtable[tokens[r], :] += g[r, i, :] for i < copies */
typedef struct hd_embed_back_args {
    float *dtable; /* [vocab, cols] */
    hd_rows g;     /* [rows, copies, cols] */
    const int32_t *tokens;
    int32_t rows, copies, cols;
} hd_embed_back_args;

/* dx[index[i], :] = g[i, :], other rows zero; no index occurs twice */
typedef struct hd_gather_back_args {
    float *dx; /* [x_rows, cols] */
    hd_rows g; /* [rows, cols] */
    const int32_t *index;
    int32_t rows, x_rows, cols;
} hd_gather_back_args;

/* Gradients of swiglu; docs/training.md. A clamped element has none. */
typedef struct hd_swiglu_back_args {
    float *dgate, *dup; /* [rows, cols]; dgate may be g */
    float *dweight;     /* at assignment[r], or at r; NULL if weight is */
    hd_rows g, gate, up;
    const float *weight;
    const int32_t *assignment;
    int32_t rows, cols;
    float limit;
} hd_swiglu_back_args;

/* Gradient of the router's logits from that of the selected weights; docs/training.md. The
 * selection has none. */
typedef struct hd_moe_topk_back_args {
    float *dlogits;        /* [rows, n_experts] */
    const float *dweight;  /* [rows, top_k] */
    const float *logits;   /* [rows, n_experts] */
    const int32_t *expert; /* [rows, top_k] */
    int32_t rows;
    hd_router_rule rule;
} hd_moe_topk_back_args;

/* dy[place[t, j], :] = weight[t, j] * g[t, :] and dweight[t, j] = <g[t, :], y[place[t, j], :]>.
 * The gradient of the shared expert's result is g itself. */
typedef struct hd_moe_combine_back_args {
    float *dy;      /* [rows * top_k, cols] by sorted place, not y */
    float *dweight; /* [rows, top_k]; NULL if weight is */
    hd_rows g;      /* [rows, cols] */
    hd_rows y;      /* [rows * top_k, cols]; read with weight */
    const float *weight;
    const int32_t *place;
    int32_t rows, cols, top_k;
} hd_moe_combine_back_args;

/* Gradients of compress for complete sequences; docs/training.md. Rows of incomplete blocks have
 * gradient zero. */
typedef struct hd_compress_back_args {
    float *dkv, *dgate; /* [rows, coff * width] */
    float *dape;        /* [ratio, coff * width] */
    float *dnorm;       /* [width] */
    float
        *g; /* [n entries, width]: entry e of sequence s is row first_entry[s] + e; destroyed */
    const float *kv;   /* [rows, coff * width] */
    const float *gate; /* likewise, as before compress: without ape */
    const float *ape;  /* [ratio, coff * width] */
    const float *norm;
    const float *freq; /* [pairs] */
    const int32_t *first_entry;
    hd_seqs seqs;
    int32_t rows, width, ratio, pairs; /* rows of all sequences */
    bool overlap;
    float eps;
    float *parts; /* as of hd_row_sums */
    int64_t n_parts;
} hd_compress_back_args;

/* dy[r, :] = sum_j post[r, j] g[r, j, :]; dpost[r, j] = <g[r, j, :], y[r, :]>;
 * dcomb[r, i, j] = <x[r, i, :], g[r, j, :]>; dx[r, i, :] = sum_j comb[r, i, j] g[r, j, :];
 * docs/training.md */
typedef struct hd_hc_post_back_args {
    float *dx;            /* [rows, hc, cols], may be g */
    float *dy;            /* [rows, cols] */
    float *dpost, *dcomb; /* [rows, hc], [rows, hc, hc] */
    hd_rows g, x;         /* [rows, hc, cols]; x before hc_post */
    hd_rows y;            /* [rows, cols] */
    const float *post, *comb;
    int32_t rows, cols, hc;
} hd_hc_post_back_args;

/* Gradients of hc_pre; docs/training.md. n = 2 * hc + hc * hc mixing values. The gradient of fn is
 * weight_grad(dmix, x); those of base and scale are added here. */
typedef struct hd_hc_pre_back_args {
    float *dx;             /* [rows, hc, cols], added to */
    float *dmix;           /* [rows, n] gradient of fn x, before the norm */
    float *dscale, *dbase; /* [3], [n] */
    float *part;           /* [rows, 3 + n] for the operator's own use */
    hd_rows g;             /* [rows, cols] */
    const float *dpost, *dcomb;
    hd_rows x; /* [rows, hc, cols] */
    const float *fn, *scale, *base;
    int32_t rows, cols, hc, iters;
    float norm_eps, eps;
    hd_row_sums sums;
} hd_hc_pre_back_args;

/* Gradients of hc_head, likewise with hc mixing values. */
typedef struct hd_hc_head_back_args {
    float *dx;             /* [rows, hc, cols], written */
    float *dmix;           /* [rows, hc] */
    float *dscale, *dbase; /* [1], [hc] */
    float *part;           /* [rows, 1 + hc] for the operator's own use */
    hd_rows g;             /* [rows, cols] */
    hd_rows x;
    const float *fn, *scale, *base;
    int32_t rows, cols, hc;
    float norm_eps, eps;
    hd_row_sums sums;
} hd_hc_head_back_args;

/* The loss at the logits l, with p = softmax(l / temperature), in place:
 *     logits = (factor (p - [target]) + entropy_factor p (log p + H)) / temperature
 *     logprob = log p[target],  entropy = H = -sum p log p
 * logprob has the bits that the operator `sample` reports for a token that is drawn at this
 * temperature (mode tempered) or given. factor is the derivative of the loss by -logprob, entropy_factor that by -H. */
typedef struct hd_cross_entropy_args {
    float *logits;               /* [rows, vocab] */
    float *logprob, *entropy;    /* [rows] */
    const int32_t *target;       /* [rows] */
    const float *factor;         /* [rows]; NULL: the logits stay as they are */
    const float *entropy_factor; /* [rows]; NULL: zeros */
    const float *temperature;    /* [rows]; NULL: ones */
    int32_t rows, vocab;
} hd_cross_entropy_args;

#define HD_BACKWARD_OP_LIST(X) \
    X(weight_grad)             \
    X(grouped_weight_grad)     \
    X(grouped_gemm_back)       \
    X(rms_norm_back)           \
    X(embed_back)              \
    X(gather_back)             \
    X(swiglu_back)             \
    X(moe_topk_back)           \
    X(moe_combine_back)        \
    X(attention_back)          \
    X(attention_naive_back)    \
    X(compress_back)           \
    X(indexer_back)            \
    X(layer_norm_back)         \
    X(hc_post_back)            \
    X(hc_pre_back)             \
    X(hc_head_back)            \
    X(cross_entropy)           \
    X(sum_squares) X(adamw) X(muon) X(round_weights)

#define X(op) typedef void hd_##op##_fn(hd_stream *s, const hd_##op##_args *a);
HD_BACKWARD_OP_LIST(X)
#undef X

typedef struct hd_backward_ops {
#define X(op) hd_##op##_fn *op;
    HD_BACKWARD_OP_LIST(X)
#undef X
    /* linear_heads with `transpose`, in another order of sums; NULL: linear_heads has to do */
    void (*linear_back)(hd_stream *s, const hd_linear_heads_args *a);
} hd_backward_ops;

/* Fills the table of the reference: one thread, sums of activations' gradients in float64. */
void hd_backward_init_ref(hd_backward_ops *t);

/* The same with the faster operators of a CPU, whose flags are those of base/cpu.h. They use
 * its threads and sum in float32. */
void hd_backward_init_cpu(hd_backward_ops *t, uint32_t cpu_flags);

/* The same for a GPU, in builds with CUDA: of attention and GEMMs sums are in float32. */
void hd_backward_init_cuda(hd_backward_ops *t);

HD_END_C

#endif
