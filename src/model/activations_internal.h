/* activations_internal.h - what the stages of a forward pass leave for each other. */
#ifndef HD_MODEL_ACTIVATIONS_INTERNAL_H
#define HD_MODEL_ACTIVATIONS_INTERNAL_H

#include "ops/ops.h"

/* Every activation of a step or of one of its micro-batches; activations.c decides which of them share
 * memory. n = rows; heads, inter and groups are those of this rank's shard. */
typedef struct model_activations {
    int32_t micro;    /* number of the micro-batch */
    int32_t *choices; /* [n_choices] experts of a step's rows, a layer after the other */
    int32_t *slots;   /* of each choice, if limits.keeps_slots */
    int32_t *drafted; /* where those of its drafts begin */
    hd_rows x; /* [n, streams, hidden] the residual; one stream without hyper-connections */
    hd_rows h; /* [n, hidden] a block's normed input; after the last layer, the final state */
    hd_rows y; /* [n, hidden] a block's result */
    float *cos_sin, *cos_sin_compress; /* [n, 2, pairs] */
    float *post, *comb;                /* [n, hc], [n, hc, hc] */
    float *pre;                        /* V4.1 [n, hc] the mixture for the next block */

    /* attention */
    hd_rows q_low;        /* [n, q_rank] */
    hd_rows q_low_raw;    /* MLA: before its norm; q_low, but where gradients follow */
    hd_rows q;            /* [n, heads, nope + rope]; V4: [n, heads, head_dim] */
    hd_rows q_wide;       /* MLA [n, heads, kv_rank + rope]: absorbed query | rotated query */
    hd_rows kv;           /* [n, kv_rank + rope]; V4 [n, head_dim] */
    hd_rows kv_raw;       /* MLA: before its norm and rotation; likewise kv */
    hd_rows context;      /* [n, heads, kv_rank]; V4 [n, heads, head_dim] */
    hd_rows o_low;        /* MLA [n, heads, v]; V4 [n, o_groups, o_rank]; of all ranks that
                            share the heads, unless they sum */
    hd_rows index_q;      /* [n, index_heads, index_dim] */
    hd_rows index_k;      /* [n, index_dim] */
    float *index_weight;  /* [n, index_heads] */
    int32_t *selected;    /* [n, index_topk]; V4.1: lives through the layers that reuse it */
    int32_t *pool_blocks; /* V4.1 [n, pool_blocks], likewise */
    float *latent;        /* V4.1 [n, head_dim] of the row's group */
    float *compress_kv, *compress_gate; /* [n, 2 * head_dim] */
    float *index_kv, *index_gate;       /* [n, 2 * index_dim] of the indexer's compressor */

    /* V4.1's Engram */
    int32_t *classes;   /* [n, max_ngram] of the last tokens; lives through the step */
    float *engram_rows; /* [n, columns * head_dim] */
    float *engram_kv;   /* [n, (hc + 1) * hidden] */

    /* feed-forward; n: model_most_rows() of the ranks that share it */
    float *router;                        /* [n, experts] */
    int32_t *expert;                      /* [n, top_k] of this layer, in choices */
    float *expert_weight;                 /* [n, top_k] */
    int32_t next_layer;                   /* whose experts are predicted, or -1 */
    int32_t *next_expert;                 /* [n, top_k] of it */
    float *next_weight;                   /* [n, top_k] */
    int32_t *offset, *assignment, *place; /* [slots + 1], [n * top_k], [n * top_k] */
    int32_t *first;                       /* [slots] of moe_split */
    int32_t *counts;                      /* [ranks, experts] of moe_count */
    hd_rows gate, up;                     /* [n, inter] dense or shared */
    hd_rows inter;                        /* gate, or of all ranks that share the MLP */
    hd_rows expert_gate, expert_up;       /* [n * top_k, moe_inter] */
    hd_rows expert_inter;                 /* expert_gate, or of all ranks that share experts */
    hd_rows expert_y;                     /* [n * top_k, this rank's columns of hidden] */
    /* rows of several attention groups, if ranks of several share an MLP or experts */
    hd_rows dense_x, dense_y, moe_x, moe_y; /* [n, hidden] */
    int32_t *moe_tokens, *moe_phases;       /* [n] */
    /* Rows received under expert parallelism. Then expert_gate and expert_up have in_rows
     * rows, and expert_y holds the results that were sent back. */
    hd_rows in_x, in_y; /* [in_rows, hidden], [in_rows, this rank's columns of hidden] */
    float *in_weight;   /* [in_rows] */
    int32_t *in_offset; /* [slots of this rank + 1] */
    int32_t *n_rounds;  /* [1] in which they come */
    /* [n] of hd_packed_row_bytes, that this rank sends; NULL: it sends float32 */
    uint8_t *packed;

    /* head and MTP input */
    hd_rows logit_x;  /* [logits, streams, hidden] */
    hd_rows merged;   /* [logits, hidden] */
    float *logit_pre; /* V4.1 [logits, hc] */
    hd_rows paired;   /* V3 MTP [n, 2 * hidden]; V4 MTP [n, streams, hidden] */
    float *logits;    /* [logits, vocab] */
    /* rows of several attention groups, if ranks of several share the LM head */
    hd_rows head_x;     /* [n, hidden] */
    float *head_logits; /* [n, vocab] */

    /* DSpark */
    hd_rows taps;      /* [n, taps, hidden] the mean of the streams at every tap */
    hd_rows mixed;     /* [logits, hidden] the streams' mixture before the norm; or merged */
    hd_rows markov;    /* [logits / block, rank] embedding of the token before a draft */
    float *bigram;     /* [logits / block, vocab] logits of the Markov head */
    float *confidence; /* [logits], and the part of the token before [logits / block] */
} model_activations;

#endif
