/* csa2.h - V4.1's operators: shared entries and their indexer, hyper-connections in one pass,
 * Engram tables, rows that later layers need no more. */
#ifndef HD_OPS_CSA2_H
#define HD_OPS_CSA2_H

#include "ops/types.h"

#ifdef __CUDACC__
#define HD_ENGRAM_FN static inline __host__ __device__
#else
#define HD_ENGRAM_FN static inline
#endif

HD_BEGIN_C

/* The latents of groups of `ratio` tokens; models.md 2.18. For every row r whose position ends a
 * group, out[r] is per channel the softmax of the group's gates times their kv; other rows are
 * zero. Positions that are not in the step come from `state`, as it is before the step; then
 * `state` receives the step's own positions, as rows [kv | gate]. */
typedef struct hd_group_latents_args {
    float *out;             /* [rows, width] */
    hd_ring state;          /* width = 2 * width of out; ring >= ratio */
    const float *kv, *gate; /* [rows, width] */
    hd_seqs seqs;
    int32_t ratio;
} hd_group_latents_args;

#define HD_ROWS_group_latents(T) T(state.rows, STATE)

/* For every row whose position ends a group of `ratio` tokens: entry pos / ratio of the row's
 * sequence = x[r], its last 2 * pairs elements rotated (interleaved) at the position of the
 * group's first token. */
typedef struct hd_store_groups_args {
    hd_paged entries;
    const float *x;    /* [rows, entries.width] */
    const float *freq; /* [pairs] */
    const int32_t *seq, *pos;
    int32_t rows, ratio, pairs;
} hd_store_groups_args;

#define HD_ROWS_store_groups(T) T(entries.rows, POOL)

/* The lightning indexer (attention.h) with a pool of candidates; models.md 2.19. Keys are cut
 * into blocks of `block`, the last of a row maybe shorter.
 *     makes_pool: blocks[r] = the n_blocks best of the row's blocks, by their best key and then by
 *                 their number, in ascending order and then -1; the block of the last visible
 *                 key is always among them. The row chooses among all of its keys.
 *     else:       the row chooses among the keys of the blocks in blocks[r]. */
typedef struct hd_pool_topk_args {
    int32_t *out;        /* [rows, top_k], as of indexer_topk */
    int32_t *blocks;     /* [rows, n_blocks] */
    hd_rows q;           /* [rows, heads, keys.width] */
    const float *weight; /* [rows, heads] */
    hd_paged keys;
    const int32_t *seq, *pos; /* [rows] */
    int32_t rows, heads, ratio, top_k, n_blocks, block;
    float scale;
    bool makes_pool;
} hd_pool_topk_args;

#define HD_ROWS_pool_topk(T) T(q, PLAIN) T(keys.rows, KEYS)

/* Hyper-connections in one pass; models.md 2.17. The streams are mixed into out by `pre`, which
 * the block before left, or out is the first stream if `first`; then post, comb and pre are
 * computed from the streams as by hc_pre (mhc.h). */
typedef struct hd_hc_single_args {
    hd_rows out;        /* [rows, cols] */
    float *pre;         /* [rows, hc] */
    float *post, *comb; /* [rows, hc], [rows, hc, hc] */
    hd_rows x;          /* [rows, hc, cols] */
    const float *fn, *scale, *base;
    int32_t rows, cols, hc, iters;
    float norm_eps, eps;
    bool first;
} hd_hc_single_args;

#define HD_ROWS_hc_single(T) T(out, PLAIN) T(x, PLAIN)

/* out[r, :] = sum_i pre[r, i] * x[r, i, :] */
typedef struct hd_hc_mix_args {
    hd_rows out;      /* [rows, cols] */
    hd_rows x;        /* [rows, hc, cols] */
    const float *pre; /* [rows, hc] */
    int32_t rows, cols, hc;
} hd_hc_mix_args;

#define HD_ROWS_hc_mix(T) T(out, PLAIN) T(x, PLAIN)

/* out[r, i] = the class of the token i positions before row r, which is in the step or in
 * `history`; before position 0 that of `pad`. Then `history` receives the step's tokens. */
typedef struct hd_ngram_classes_args {
    int32_t *out;            /* [rows, n] */
    hd_paged history;        /* of integers, width 1, an entry per position */
    const int32_t *tokens;   /* [rows] */
    const int32_t *class_of; /* [vocab] */
    hd_seqs seqs;
    int32_t n, pad;
} hd_ngram_classes_args;

#define HD_ROWS_ngram_classes(T)

/* The rows of an Engram table that hashes of the last tokens choose; models.md 2.20. */
typedef struct hd_engram_embed_args {
    float *out;             /* [rows, columns, table->cols] */
    const int32_t *classes; /* [rows, max_ngram] of ngram_classes */
    const hd_weight *table;
    const int64_t *multipliers;        /* [max_ngram] */
    const int32_t *primes, *first_row; /* [columns] */
    int32_t rows, max_ngram, heads;    /* columns = heads * (max_ngram - 1) */
} hd_engram_embed_args;

#define HD_ROWS_engram_embed(T)

/* Returns the row of the table that column c reads for classes [max_ngram]. */
HD_ENGRAM_FN int32_t hd_engram_row(const hd_engram_embed_args *a, const int32_t *classes,
                                   int32_t c) {
    const int32_t order = c / a->heads + 2;
    int64_t hash = classes[0] * a->multipliers[0];
    for (int32_t i = 1; i < order; i++) hash ^= classes[i] * a->multipliers[i];
    return a->first_row[c] + (int32_t)(hash % a->primes[c]);
}

/* x[r, i, :] += g_i * value of row r, where g_i compares stream i with key i; models.md 2.20. */
typedef struct hd_engram_gate_args {
    hd_rows x;       /* [rows, hc, cols] */
    const float *kv; /* [rows, hc + 1, cols]: a key for each stream, then the value */
    const float *q_weight, *k_weight; /* [hc, cols] */
    int32_t rows, cols, hc;
    float eps;
} hd_engram_gate_args;

#define HD_ROWS_engram_gate(T) T(x, PLAIN)

/* x[i, :] = x[kept[i], :], in place. */
typedef struct hd_keep_rows_args {
    void *x;             /* [any, words] of 4 bytes each */
    const int32_t *kept; /* [rows] ascending */
    int32_t rows, words;
} hd_keep_rows_args;

#define HD_ROWS_keep_rows(T)

#define HD_CSA2_OPS(X) \
    X(keep_rows)       \
    X(group_latents)   \
    X(store_groups)    \
    X(pool_topk)       \
    X(hc_single)       \
    X(hc_mix)          \
    X(ngram_classes)   \
    X(engram_embed)    \
    X(engram_gate)

HD_END_C

#endif
