/* attention.h - attention over the paged KV cache, and the lightning indexer (sparse
 * attention top-k). */
#ifndef HD_OPS_ATTENTION_H
#define HD_OPS_ATTENTION_H

#include "ops/types.h"

HD_BEGIN_C

/* Lightning indexer (V3.2's and V4's sparse attention); models.md 2.6 (ratio 1) and 2.11
 * (compressed keys). Row r sees n = (pos[r] + 1) / ratio keys and scores each:
 *     score[u] = sum_h weight[r, h] * scale * max(0, q[r, h] . key[u])
 * It keeps the top_k best, the lower index on a tie, in ascending order; the rest of a row
 * is -1. Rows that see at most top_k keys take all of them. */
typedef struct hd_indexer_topk_args {
    int32_t *out;        /* [rows, top_k] */
    hd_rows q;           /* [rows, heads, keys.width] */
    const float *weight; /* [rows, heads] */
    hd_paged keys;
    const int32_t *seq, *pos; /* [rows] */
    int32_t rows, heads, ratio, top_k;
    float scale;
} hd_indexer_topk_args;

#define HD_ROWS_indexer_topk(T) T(q, PLAIN) T(keys.rows, KEYS)

/* Paged attention: softmax attention of each row over two lists of keys, in this order:
 *     window:  positions max(0, pos - window + 1) .. pos of `recent`   (window 0: none), none before
 *              window_from of the sequence
 *     entries: e < (pos + 1) / ratio of `entries`, or only selected ones (ratio 0: none)
 * The first v_dim elements of an entry are its value. The sink adds exp(sink[h]) to the
 * denominator only. MLA (absorbed, MQA): entries with ratio 1, k_dim = latent + rope, v_dim
 * = latent (models.md 2.4). V4: both lists, k_dim = v_dim (2.9). Both lists have one type. */
typedef struct hd_attention_args {
    hd_rows out; /* [rows, heads, v_dim] */
    hd_rows q;   /* [rows, heads, k_dim] */
    hd_paged recent, entries;
    const int32_t *selected; /* [rows, n_selected] entry numbers, -1 at the end; NULL: all */
    const float *sink;       /* [heads] or NULL */
    const int32_t *seq, *pos;
    const int32_t
        *window_from; /* of every sequence a position, at most those of its rows; NULL: 0 */
    int32_t rows, heads, k_dim, v_dim, window, ratio, n_selected;
    float scale;
} hd_attention_args;

#define HD_ROWS_attention(T) \
    T(out, PLAIN) T(q, PLAIN) T(recent.rows, POOL) T(entries.rows, POOL)

/* Naive MLA (MHA, for long prefill): softmax attention with keys and values computed from
 * the cached latents for every head; models.md 2.4. With W_h = rows [h * (nope_dim + v_dim),
 * + nope_dim + v_dim) of w:
 *     [key | value] of entry e and head h = W_h latent[e], the key followed by its rotated part
 * A row sees the entries up to its own position. */
typedef struct hd_attention_naive_args {
    hd_rows out;      /* [rows, heads, v_dim] */
    hd_rows q;        /* [rows, heads, nope_dim + rope_dim], the last rope_dim rotated */
    hd_paged latents; /* width = w->cols + rope_dim: latent | rotated key of all heads */
    const hd_weight *w;
    hd_seqs seqs; /* first_row counts from row 0 of out and q */
    /* of all sequences together, at most: for a GPU, whose launches cannot depend on seqs */
    int32_t most_rows, most_keys;
    int32_t heads, nope_dim, rope_dim, v_dim;
    float scale;
} hd_attention_naive_args;

#define HD_ROWS_attention_naive(T) T(out, STRIDED) T(q, PLAIN) T(latents.rows, POOL)

#define HD_ATTENTION_OPS(X) X(indexer_topk) X(attention)

HD_END_C

#endif
