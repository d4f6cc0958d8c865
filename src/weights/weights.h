/* weights.h - the tensors a family is made of, and where they lie in a checkpoint.
 *
 * A *role* names what a tensor is for; a schema lists, for one model spec, every tensor with
 * its role, its name in the file, its shape and how it may be cut between ranks. Opening a
 * checkpoint binds the schema to mapped safetensors files: each matrix becomes an hd_weight
 * that points into the map, in whatever format the file holds. Tensors are found by their own
 * dtype and siblings (scale, weight_scale_inv, weight_scale_2), never by the config's word. */
#ifndef HD_WEIGHTS_WEIGHTS_H
#define HD_WEIGHTS_WEIGHTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "device/device.h"
#include "base/dtype.h"
#include "base/status.h"
#include "weights/parallel_config.h"
#include "weights/routing.h"
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
    /* indexer; INDEX_K and its norm V3.2 only */                                     \
    X(INDEX_Q_B)     /* [index_heads * index_dim, q_rank] */                          \
    X(INDEX_K)       /* [index_dim, hidden] */                                        \
    X(INDEX_K_NORM)  /* [index_dim] */                                                \
    X(INDEX_K_BIAS)  /* [index_dim] */                                                \
    X(INDEX_WEIGHTS) /* [index_heads, hidden] */                                      \
    /* V4 attention */                                                                \
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
    /* feed-forward */                                                                \
    X(DENSE_GATE) /* [dense_inter, hidden] */                                         \
    X(DENSE_UP)                                                                       \
    X(DENSE_DOWN)  /* [hidden, dense_inter] */                                        \
    X(ROUTER)      /* [experts, hidden] */                                            \
    X(ROUTER_BIAS) /* [experts] */                                                    \
    X(ROUTER_HASH) /* [vocab, top_k] integers */                                      \
    X(SHARED_GATE) /* [n_shared * moe_inter, hidden] */                               \
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
    X(MTP_H_PROJ)      /* V4 [hidden, hidden] */

typedef enum hd_role {
#define X(role) HD_##role,
    HD_ROLE_LIST(X)
#undef X
        HD_N_ROLES
} hd_role;

const char *hd_role_name(hd_role r); /* "Q_A" */

enum { HD_GLOBAL = -1 }; /* the layer of tensors that belong to no layer */

/* ---- the schema ---- */

/* How the ranks of a group share a tensor. Cuts fall on whole heads, experts and
 * quantization blocks, or the plan is refused. */
typedef enum hd_shard_axis {
    HD_SHARD_NONE,       /* every rank holds all of it */
    HD_SHARD_HEAD_ROWS,  /* rows by attention head, over tp */
    HD_SHARD_HEAD_COLS,  /* columns by attention head, over tp */
    HD_SHARD_GROUP_ROWS, /* rows by output-projection group, over tp (V4 O_A) */
    HD_SHARD_GROUP_COLS, /* columns by that group (V4 O_B) */
    HD_SHARD_DENSE_ROWS, /* rows of a dense or shared MLP, over dense_tp */
    HD_SHARD_DENSE_COLS,
    HD_SHARD_EXPERT,    /* whole experts over ep; inside one by rows or columns over etp */
    HD_SHARD_VOCAB_ROWS /* rows of the LM head, over head_tp */
} hd_shard_axis;

typedef struct hd_tensor_decl {
    const char *name; /* as in the file, of the data tensor ("layers.3.attn.wq_a.weight") */
    hd_role role;
    int32_t layer;      /* HD_GLOBAL, or 0 .. n_layers + n_mtp - 1 */
    int32_t expert;     /* -1 unless role is EXPERT_* */
    int32_t rows, cols; /* logical shape; vectors: rows = 1 */
    int32_t rank;       /* dimensions in the file: 1 for vectors, 2 for matrices */
    hd_shard_axis shard_axis;
    bool optional;  /* may be absent: MTP layers, or a duplicate */
    bool duplicate; /* an MTP layer's copy of EMBED or HEAD, or HEAD when embeddings are tied:
                       the same bytes as the main one, which serves where this is absent */
} hd_tensor_decl;

typedef struct hd_schema {
    hd_tensor_decl *decls;
    int32_t n;
    char *names; /* all names, one behind the other */
} hd_schema;

/* Every tensor of the model, in layer order: first EMBED, then the layers, the tensors of the
 * head, then the MTP layers. Refused when the spec describes more than a few million tensors
 * or 2^60 elements. Owned by the caller. */
hd_status hd_schema_open(hd_schema *out, const hd_model_spec *spec, hd_err *err);
void hd_schema_close(hd_schema *s);

/* ---- bound weights ---- */

typedef struct hd_weights hd_weights;
typedef struct hd_checkpoint hd_checkpoint; /* safetensors.h */

/* Maps MODEL_DIR's safetensors (single file or index), checks every header against the rules
 * of the format and every tensor against the schema, and binds them. Missing, misshapen or
 * unreadable tensors are named. MTP layers whose tensors are all absent are left out: then
 * hd_weights_n_mtp() is smaller than spec->n_mtp. The spec must outlive the weights. Every
 * scale is read and must be a positive number. */
hd_status hd_weights_open(hd_weights **out, const char *model_dir, const hd_model_spec *spec,
                          hd_err *err);
void hd_weights_close(hd_weights *w); /* NULL is fine */

typedef struct hd_dummy_options {
    hd_parallel_config parallel; /* all zero: one rank */
    int32_t rank;
    hd_routing routing; /* MODEL: routers by their logits, hash layers uniformly */
    hd_device *device;  /* where they are made; NULL: host memory, to be uploaded */
    hd_stream *stream;  /* of that device */
} hd_dummy_options;

/* Made-up weights of a spec, in the formats it declares, for measuring: matrices keep the size
 * of activations, norms are ones, and every opening gives the same values. options NULL: all
 * of them on the host. */
hd_status hd_weights_open_dummy(hd_weights **out, const hd_model_spec *spec,
                                const hd_dummy_options *options, hd_err *err);

/* One rank's share of whole weights in host memory. What is cut by rows is seen in place, what
 * is cut by columns copied; `whole` must outlive it. */
hd_status hd_weights_open_shards(hd_weights **out, const hd_weights *whole,
                                 const hd_parallel_config *parallel, int32_t rank, hd_err *err);

/* What of the model these weights are: everything, unless cut or made so. */
const hd_shard *hd_weights_shard(const hd_weights *w);

/* Who is told how far an upload is; may be called some thousand times. */
typedef struct hd_upload_watch {
    void (*moved)(void *ctx, size_t done, size_t total); /* bytes; NULL: nobody */
    void *ctx;
} hd_upload_watch;

/* Copies what ops read into memory of the stream's device, where that is not the host's, and
 * leads matrices, experts, vectors and tables there; waits for it. The device owns the memory.
 * watch NULL: nobody is told. */
hd_status hd_weights_upload(hd_weights *w, hd_device *d, hd_stream *s,
                            const hd_upload_watch *watch, hd_err *err);

int32_t hd_weights_n_mtp(const hd_weights *w);
size_t hd_weights_bytes(const hd_weights *w); /* of all tensors, as they are stored */

/* A matrix, or NULL when this layer has none of that role. Where an MTP layer has no EMBED or
 * HEAD of its own, or the model no HEAD because it is tied, the one that serves instead. */
const hd_weight *hd_weights_matrix(const hd_weights *w, int32_t layer, hd_role role);

/* [share's n_experts] matrices of one MoE layer, by slot; role EXPERT_GATE, EXPERT_UP or EXPERT_DOWN. */
const hd_weight *hd_weights_experts(const hd_weights *w, int32_t layer, hd_role role);

/* A small tensor (norm, bias, sink, position bias, hyper-connection) widened to float32 in
 * row-major order, or NULL. Owned by the weights, or in the map if it is float32 there. */
const float *hd_weights_vector(const hd_weights *w, int32_t layer, hd_role role);

/* ROUTER_HASH, or the choices drawn for dummies, as [vocab, top_k] expert ids, checked to be in
 * range, or NULL. */
const int32_t *hd_weights_table(const hd_weights *w, int32_t layer);

/* ---- looking at a checkpoint that may not be whole ---- */

/* Like hd_weights_open, but a tensor that is missing or does not fit is only noted, and no
 * scale is read. Files that break the rules of their format are refused all the same. */
hd_status hd_weights_survey(hd_weights **out, const char *model_dir, const hd_model_spec *spec,
                            hd_err *err);

/* What hd_weights_open would fail with (scales apart); code HD_OK when all is well. */
const hd_err *hd_weights_problem(const hd_weights *w);

const hd_schema *hd_weights_schema(const hd_weights *w);
const hd_checkpoint *hd_weights_checkpoint(const hd_weights *w); /* NULL: dummies */

/* Whether schema->decls[decl] is wanted but absent from the files. */
bool hd_weights_missing(const hd_weights *w, int32_t decl);

/* schema->decls[decl] as it is stored, vectors as one row; NULL when missing or misfit. */
const hd_weight *hd_weights_stored(const hd_weights *w, int32_t decl);

/* Reads every scale of decls[decl]: none may be zero, negative, infinite or NaN. */
hd_status hd_weights_check_scales(const hd_weights *w, int32_t decl, hd_err *err);

/* Reads every value of decls[decl]: none may be infinite or NaN. */
hd_status hd_weights_check_values(const hd_weights *w, int32_t decl, hd_err *err);

typedef enum hd_use {
    HD_USE_UNKNOWN, /* no part of this model */
    HD_USE_DATA,
    HD_USE_SCALE,  /* beside a quantized tensor */
    HD_USE_IGNORED /* known, and of no use here: calibration of activations and caches */
} hd_use;

/* What tensor i of the checkpoint is for. *decl is its place in the schema, or -1. */
hd_use hd_weights_use(const hd_weights *w, int32_t i, int32_t *decl);

#endif
