/* schema.h - the schema of a model spec: every tensor with its role (its purpose), its name in
 * the file, its shape and its shard axis. */
#ifndef HD_WEIGHTS_SCHEMA_H
#define HD_WEIGHTS_SCHEMA_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "weights/spec.h"

/* X(role). "V4" etc. name the families that have it. Shapes are [out, in]. */
#define HD_ROLE_LIST(X)                                                               \
    /* once per model; in an MTP layer: its own copies */                             \
    X(EMBED)         /* [vocab, hidden] */                                            \
    X(HEAD)          /* [vocab, hidden] */                                            \
    X(FINAL_NORM)    /* [hidden]; MTP: shared_head.norm, mtp.N.norm */                \
    X(HC_HEAD_FN)    /* V4 [hc, hc * hidden] */                                       \
    X(HC_HEAD_BASE)  /* V4 [hc] */                                                    \
    X(HC_HEAD_SCALE) /* V4 [1] */                                                     \
    /* every layer */                                                                 \
    X(ATTN_NORM) /* [hidden] */                                                       \
    X(FFN_NORM)  /* [hidden] */                                                       \
    /* MLA; Q_A, Q_A_NORM, Q_B also V4 */                                             \
    X(Q)         /* [heads * (nope + rope), hidden] when q_rank is 0 */               \
    X(Q_A)       /* [q_rank, hidden] */                                               \
    X(Q_A_NORM)  /* [q_rank] */                                                       \
    X(Q_B)       /* [heads * (nope + rope), q_rank]; V4 [heads * head_dim, q_rank] */ \
    X(KV_A)      /* [kv_rank + rope, hidden] */                                       \
    X(KV_A_NORM) /* [kv_rank] */                                                      \
    X(KV_B)      /* [heads * (nope + v), kv_rank] */                                  \
    X(O)         /* [hidden, heads * v] */                                            \
    /* indexer; INDEX_K and its norm V3.2 and V4.1, there [index_dim, head_dim] */    \
    X(INDEX_Q_B)     /* [index_heads * index_dim, q_rank] */                          \
    X(INDEX_K)       /* [index_dim, hidden] */                                        \
    X(INDEX_K_NORM)  /* [index_dim] */                                                \
    X(INDEX_K_BIAS)  /* [index_dim] */                                                \
    X(INDEX_WEIGHTS) /* [index_heads, hidden] */                                      \
    /* V4 and V4.1 attention; V4.1's compressors have coff 1 and no APE */            \
    X(KV)              /* [head_dim, hidden] */                                       \
    X(KV_NORM)         /* [head_dim] */                                               \
    X(SINK)            /* [heads] */                                                  \
    X(O_A)             /* [o_groups * o_rank, heads / o_groups * head_dim] */         \
    X(O_B)             /* [hidden, o_groups * o_rank] */                              \
    X(COMP_APE)        /* [ratio, coff * head_dim]; coff 2 for CSA, 1 for HCA */      \
    X(COMP_KV)         /* [coff * head_dim, hidden] */                                \
    X(COMP_GATE)       /* [coff * head_dim, hidden] */                                \
    X(COMP_NORM)       /* [head_dim] */                                               \
    X(INDEX_COMP_APE)  /* [ratio, 2 * index_dim] */                                   \
    X(INDEX_COMP_KV)   /* [2 * index_dim, hidden] */                                  \
    X(INDEX_COMP_GATE) /* [2 * index_dim, hidden] */                                  \
    X(INDEX_COMP_NORM) /* [index_dim] */                                              \
    X(HC_ATTN_FN)      /* [2 * hc + hc * hc, hc * hidden] */                          \
    X(HC_ATTN_BASE)    /* [2 * hc + hc * hc] */                                       \
    X(HC_ATTN_SCALE)   /* [3] */                                                      \
    X(HC_FFN_FN)                                                                      \
    X(HC_FFN_BASE)                                                                    \
    X(HC_FFN_SCALE)                                                                   \
    /* V4.1's Engram tables; columns = orders * heads */                              \
    X(ENGRAM_TABLE) /* [rows, head_dim] */                                            \
    X(ENGRAM_KV)    /* [(hc + 1) * hidden, columns * head_dim] */                     \
    X(ENGRAM_Q)     /* [hc, hidden] */                                                \
    X(ENGRAM_K)     /* [hc, hidden] */                                                \
    /* feed-forward */                                                                \
    X(DENSE_GATE) /* [dense_inter, hidden] */                                         \
    X(DENSE_UP)                                                                       \
    X(DENSE_DOWN)        /* [hidden, dense_inter] */                                  \
    X(ROUTER)            /* [experts, hidden] */                                      \
    X(ROUTER_BIAS)       /* [experts] */                                              \
    X(ROUTER_IMAGE_BIAS) /* [experts] of positions in an image; unused */             \
    X(ROUTER_HASH)       /* [vocab, top_k] integers */                                \
    X(SHARED_GATE)       /* [n_shared * moe_inter, hidden] */                         \
    X(SHARED_UP)                                                                      \
    X(SHARED_DOWN)                                                                    \
    X(EXPERT_GATE) /* [moe_inter, hidden], one per expert */                          \
    X(EXPERT_UP)                                                                      \
    X(EXPERT_DOWN) /* [hidden, moe_inter] */                                          \
    /* MTP layers */                                                                  \
    X(MTP_EMBED_NORM)  /* [hidden]: enorm */                                          \
    X(MTP_HIDDEN_NORM) /* [hidden]: hnorm */                                          \
    X(MTP_PROJ)        /* V3 [hidden, 2 * hidden]: embedding half first */            \
    X(MTP_E_PROJ)      /* V4 [hidden, hidden] */                                      \
    X(MTP_H_PROJ)      /* V4 [hidden, hidden] */                                      \
    /* DSpark: the first stage's input, the last one's heads */                       \
    X(DSPARK_PROJ)         /* [hidden, taps * hidden] */                              \
    X(DSPARK_NORM)         /* [hidden] */                                             \
    X(DSPARK_MARKOV_EMBED) /* [vocab, rank] */                                        \
    X(DSPARK_MARKOV_HEAD)  /* [vocab, rank] */                                        \
    X(DSPARK_CONFIDENCE)   /* [1, hidden + rank] */                                   \
    X(VISION)              /* any tensor of V4.1's image tower; unused */

typedef enum hd_role {
#define X(role) HD_##role,
    HD_ROLE_LIST(X)
#undef X
        HD_N_ROLES
} hd_role;

const char *hd_role_name(hd_role r); /* "Q_A" */

enum { HD_GLOBAL = -1 }; /* the layer of tensors that belong to no layer */

/* How the ranks of a group share a tensor. The second GEMMs of a block (ATTENTION_OUT, DENSE_OUT,
 * experts' down) are shared by rows, or with sum_in_ranks by the columns that their input has on
 * each rank. */
typedef enum hd_shard_axis {
    HD_SHARD_NONE,          /* every rank holds all of it */
    HD_SHARD_HEAD_ROWS,     /* rows by attention head */
    HD_SHARD_HEAD_VECTOR,   /* one element for each attention head */
    HD_SHARD_GROUP_ROWS,    /* rows by output-projection group (V4 O_A) */
    HD_SHARD_ATTENTION_OUT, /* the attention's last projection */
    HD_SHARD_DENSE_ROWS,    /* rows of a dense or shared MLP, over dense_tp */
    HD_SHARD_DENSE_OUT,     /* its down projection */
    HD_SHARD_EXPERT,        /* experts over ep, each over etp */
    HD_SHARD_VOCAB_ROWS     /* rows of the LM head, over head_tp */
} hd_shard_axis;

typedef struct hd_tensor_decl {
    const char *name; /* name of the data tensor in the file ("layers.3.attn.wq_a.weight") */
    hd_role role;
    int32_t layer;      /* HD_GLOBAL, or 0 .. n_layers + n_mtp - 1 */
    int32_t expert;     /* -1 unless role is EXPERT_* */
    int32_t rows, cols; /* logical shape; vectors: rows = 1 */
    int32_t rank;       /* dimensions in the file: 1 for vectors, 2 for matrices */
    hd_shard_axis shard_axis;
    bool optional; /* may be absent: MTP layers, or a duplicate */
    bool unused;   /* may be absent, and is only counted: nothing reads it */
    /* an MTP layer's copy of EMBED or HEAD, or HEAD with tied embeddings: the same bytes as
     * the main tensor, which is used if this one is absent */
    bool duplicate;
} hd_tensor_decl;

typedef struct hd_schema {
    hd_tensor_decl *decls;
    int32_t n;
    char *names; /* all names, one after the other */
} hd_schema;

/* Lists every tensor of the model in layer order: first EMBED, then the layers, the tensors
 * of the head, then the MTP layers. Fails if the spec describes more than a few million
 * tensors or 2^60 elements. The caller owns *out. */
hd_status hd_schema_open(hd_schema *out, const hd_model_spec *spec, hd_err *err);
void hd_schema_close(hd_schema *s);

#endif
