/* indexer_back.h - backward operators of the lightning indexer, which a loss of its own trains: see
 * backward.h. */
#ifndef HD_OPS_INDEXER_BACK_H
#define HD_OPS_INDEXER_BACK_H

#include "ops/row_sums.h"

HD_BEGIN_C

/* Gradients of the indexer's own loss, factor times the sum over rows of KL(p || softmax(score)), over the
 * keys that a row selected: score is that of indexer_topk, and p, a constant, what attention gives these
 * keys, summed over its heads, normalized. Sequences are complete, as of attention_back. */
typedef struct hd_indexer_back_args {
    float *dq;         /* [rows, heads, keys.width] */
    float *dweight;    /* [rows, heads] */
    float *dkeys;      /* [n keys, keys.width]: key e of sequence s is row first_entry[s] + e */
    float *divergence; /* [rows] KL is added to; 0 of rows without keys */
    hd_rows q;
    const float *weight;
    hd_paged keys;
    const int32_t *selected; /* [rows, top_k] as of indexer_topk */
    /* of attention: queries [rows, attention_heads, k_dim], and attention_back's lse */
    hd_rows attention_q;
    hd_paged entries;
    const float *lse;
    const int32_t *first_entry; /* [seqs.n] */
    hd_seqs seqs;
    float *shares, *slopes; /* [rows, top_k] for the operator's own use; shares: on a CPU */
    int32_t rows, heads, ratio, top_k, attention_heads, k_dim;
    float scale, attention_scale, factor;
} hd_indexer_back_args;

/* Gradients of layer_norm, in place, with x before it; docs/training.md. */
typedef struct hd_layer_norm_back_args {
    hd_rows g;              /* [rows, cols]; becomes that of x */
    float *dweight, *dbias; /* [cols] */
    hd_rows x;              /* [rows, cols] */
    const float *weight;
    double *stats; /* [rows, 2] for the operator's own use, on a GPU */
    int32_t rows, cols;
    float eps;
    hd_row_sums sums;
} hd_layer_norm_back_args;

HD_END_C

#endif
