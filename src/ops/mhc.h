/* mhc.h - V4's manifold-constrained hyper-connections (mHC): mixing of residual streams. */
#ifndef HD_OPS_MHC_H
#define HD_OPS_MHC_H

#include "ops/types.h"

HD_BEGIN_C

/* V4's hyper-connections before a block; models.md 2.8. Mixes hc streams into one row, and
 * computes the weights that add the block's result back. */
typedef struct hd_hc_pre_args {
    hd_rows out;        /* [rows, cols] */
    float *post;        /* [rows, hc] */
    float *comb;        /* [rows, hc, hc] */
    hd_rows x;          /* [rows, hc, cols] */
    const float *fn;    /* [2 * hc + hc * hc, hc * cols] */
    const float *scale; /* [3] */
    const float *base;  /* [2 * hc + hc * hc] */
    int32_t rows, cols, hc, iters;
    float norm_eps, eps;
} hd_hc_pre_args;

#define HD_ROWS_hc_pre(T) T(out, PLAIN) T(x, PLAIN)

/* x[r, j, :] = post[r, j] * y[r, :] + sum_i comb[r, i, j] * x[r, i, :], in place */
typedef struct hd_hc_post_args {
    hd_rows x; /* [rows, hc, cols] */
    hd_rows y; /* [rows, cols] */
    const float *post, *comb;
    int32_t rows, cols, hc;
} hd_hc_post_args;

#define HD_ROWS_hc_post(T) T(x, PLAIN) T(y, PLAIN)

/* Mixes the streams into one row for the LM head; models.md 2.8, HC_head. */
typedef struct hd_hc_head_args {
    hd_rows out;        /* [rows, cols] */
    hd_rows x;          /* [rows, hc, cols] */
    const float *fn;    /* [hc, hc * cols] */
    const float *scale; /* [1] */
    const float *base;  /* [hc] */
    int32_t rows, cols, hc;
    float norm_eps, eps;
} hd_hc_head_args;

#define HD_ROWS_hc_head(T) T(out, PLAIN) T(x, PLAIN)

/* out[r, :] = mean_i x[r, i, :] */
typedef struct hd_hc_mean_args {
    hd_rows out; /* [rows, cols] */
    hd_rows x;   /* [rows, hc, cols] */
    int32_t rows, cols, hc;
} hd_hc_mean_args;

#define HD_ROWS_hc_mean(T) T(out, STRIDED) T(x, PLAIN)

/* Fused, between two blocks: hc_post with the result y of the block before, unless y is none;
 * hc_pre, or hc_single (csa2.h) if there is a pre; rms_norm of the mixture. post and comb are read,
 * then written. */
typedef struct hd_hc_next_args {
    hd_rows out;        /* [rows, cols] */
    hd_rows x;          /* [rows, hc, cols] */
    hd_rows y;          /* [rows, cols] or none */
    float *post, *comb; /* [rows, hc], [rows, hc, hc] */
    float *pre;         /* [rows, hc] of hc_single, or NULL */
    const float *fn;    /* these three as of hc_pre */
    const float *scale;
    const float *base;
    const float *weight; /* [cols] of the norm */
    int32_t rows, cols, hc, iters;
    float norm_eps, eps; /* norm_eps: of both norms */
    bool first;          /* of hc_single */
} hd_hc_next_args;

#define HD_ROWS_hc_next(T) T(out, PLAIN) T(x, PLAIN) T(y, PLAIN)

#define HD_MHC_OPS(X) X(hc_pre) X(hc_post) X(hc_head) X(hc_mean) X(hc_next)

HD_END_C

#endif
