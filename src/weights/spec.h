/* spec.h - the model configuration: what a config.json declares, in one immutable struct.
 *
 * Both spellings are read: the flat form of the official releases (rope_theta, rope_scaling,
 * compress_ratios, num_hash_layers) and the nested form of the Hugging Face library 5.x
 * (rope_parameters, layer_types, mlp_layer_types, compress_rates). No code above this header
 * reads JSON, and no size of a released model is fixed. */
#ifndef HD_WEIGHTS_SPEC_H
#define HD_WEIGHTS_SPEC_H

#include <stdbool.h>
#include <stdint.h>

#include "base/dtype.h"
#include "base/router_rule.h"
#include "base/status.h"
#include "hadal_types.h"

typedef enum hd_family {
    HD_FAMILY_V2,  /* V2, V2-Lite: MLA, softmax router */
    HD_FAMILY_V3,  /* V3, R1, V3.1, Moonlight: MLA, sigmoid router with bias, MTP */
    HD_FAMILY_V32, /* V3.2: V3 with the lightning indexer */
    HD_FAMILY_V4,  /* V4: hyper-connections, window + compressed attention, hash layers */
    HD_FAMILY_V41, /* V4.1: V4 with shared caches, shared indexers and Engram tables */
    HD_N_FAMILIES
} hd_family;

const char *hd_family_name(hd_family f); /* "deepseek_v2", ... */

/* Kinds of attention, with name and description. A layer of a kind runs the stages
 * model_NAME_stages of model/. MLA reads every earlier token, MLA_SPARSE the index_topk best
 * by the indexer. WINDOW, CSA (ratio 4) and HCA (128) are V4's, WINDOW and the rest V4.1's:
 * CSA2_FULL writes a cache that it shares with later layers, and chooses entries of it;
 * REINDEX chooses others of the same cache; REUSE reads what an earlier layer chose. */
#define HD_ATTENTION_KINDS(X)                                              \
    X(HD_ATTN_MLA, mla, "latent (MLA)")                                    \
    X(HD_ATTN_MLA_SPARSE, mla_sparse, "latent, sparse")                    \
    X(HD_ATTN_WINDOW, window, "window only")                               \
    X(HD_ATTN_CSA, csa, "window + chosen compressed (CSA)")                \
    X(HD_ATTN_HCA, hca, "window + all compressed (HCA)")                   \
    X(HD_ATTN_CSA2_FULL, csa2_full, "shared cache, writing (CSA2)")        \
    X(HD_ATTN_CSA2_REINDEX, csa2_reindex, "shared cache, choosing (CSA2)") \
    X(HD_ATTN_CSA2_REUSE, csa2_reuse, "shared cache, reading (CSA2)")

typedef enum hd_attention {
#define X(kind, name, description) kind,
    HD_ATTENTION_KINDS(X)
#undef X
} hd_attention;

#define X(kind, name, description) +1
enum { HD_N_ATTENTION_KINDS = HD_ATTENTION_KINDS(X) };
#undef X

const char *hd_attention_name(hd_attention a);        /* "mla", ... */
const char *hd_attention_description(hd_attention a); /* "latent (MLA)", ... */

typedef enum hd_mlp { HD_MLP_DENSE, HD_MLP_MOE, HD_MLP_MOE_HASH } hd_mlp;

typedef struct hd_layer_spec {
    hd_attention attention;
    hd_mlp mlp;
    int32_t compress_ratio; /* tokens per compressed entry; 0 without compressor */
    /* CSA2: the layer whose shared cache this one reads */
    int32_t kv_layer;
    int32_t engram; /* index in hd_engram_spec, or -1 */
} hd_layer_spec;

/* Rotary embedding with YaRN; models.md 2.1.4 and 2.1.5. factor 1 means no scaling. */
typedef struct hd_rope_spec {
    double theta;
    double factor;
    double original_len;
    double beta_fast, beta_slow;
    double mscale, mscale_all_dim; /* 0: absent; both 0 for V4 */
    double magnitude;              /* cos and sin are multiplied by this; derived, mostly 1 */
} hd_rope_spec;

/* quantization_config as declared. The dtype of each tensor decides how it is really stored. */
typedef enum hd_quant_method { HD_QUANT_NONE, HD_QUANT_FP8, HD_QUANT_MODELOPT } hd_quant_method;

typedef struct hd_quant_spec {
    hd_quant_method method;
    int32_t block_rows, block_cols; /* weight_block_size, 128 x 128; 0 without FP8 */
    bool scale_ue8m0;               /* scale_fmt "ue8m0": scales are powers of two */
    hd_format experts; /* of routed experts; HD_FORMAT_NONE: like the other matrices */
} hd_quant_spec;

/* Columns of x that share a scale in the model's own program: those of a block, of V4.1 32. */
static inline int32_t hd_quant_x_group(const hd_quant_spec *q) {
    return q->block_cols == 32 ? 32 : 128;
}

/* What drafts; its layers follow the main ones. */
typedef enum hd_drafter {
    HD_DRAFTER_NONE,
    HD_DRAFTER_MTP,   /* V3, V3.2, V4: one layer drafts one token after the other */
    HD_DRAFTER_DSPARK /* dated V4 releases: stages draft a block of tokens in one pass */
} hd_drafter;

const char *hd_drafter_name(hd_drafter d); /* "none", "mtp", "dspark" */

/* Where a DSpark drafter takes the residual of a main layer. */
typedef enum hd_tap_side { HD_TAP_OUTPUT, HD_TAP_INPUT } hd_tap_side;

enum { HD_MAX_TAPS = 16 };

typedef struct hd_dspark_spec {
    int32_t block;                     /* drafts of one pass, at most HD_MAX_DRAFTS */
    int32_t filler;                    /* token of the rows whose token is still unknown */
    int32_t rank;                      /* of the Markov head */
    int32_t n_taps, taps[HD_MAX_TAPS]; /* main layers, ascending */
    hd_tap_side side;
} hd_dspark_spec;

/* V4.1's Engram tables: rows that hashes of the last tokens choose; models.md 2.20. */
enum { HD_MAX_ENGRAM_LAYERS = 4, HD_MAX_NGRAM = 8, HD_MAX_ENGRAM_COLUMNS = 64 };

/* What hashes the n-grams of one layer. A column is a head of an order, lower orders first. */
typedef struct hd_engram_hash {
    int64_t multipliers[HD_MAX_NGRAM];
    int32_t primes[HD_MAX_ENGRAM_COLUMNS];
    int32_t first_row[HD_MAX_ENGRAM_COLUMNS]; /* of a column's rows in the table */
} hd_engram_hash;

typedef struct hd_engram_spec {
    int32_t n_layers; /* 0: none */
    int32_t layers[HD_MAX_ENGRAM_LAYERS], rows[HD_MAX_ENGRAM_LAYERS];
    int32_t max_ngram;                /* orders 2 to max_ngram */
    int32_t heads, head_dim, columns; /* columns = heads * orders */
    int32_t vocab;                    /* primes are above it */
    int32_t pad;                      /* token before the first one */
    int32_t classes;                  /* of tokens, by their normalized text */
    hd_engram_hash hash[HD_MAX_ENGRAM_LAYERS];
} hd_engram_spec;

/* The image tower of V4.1, whose tensors files have and nothing runs. */
typedef struct hd_vision_spec {
    int32_t n_layers; /* 0: none */
    int32_t hidden, inter, patch, downsample;
} hd_vision_spec;

enum { HD_MAX_EOS = 8 };

typedef struct hd_model_spec {
    hd_family family;
    char architecture[64];
    int32_t vocab, hidden, n_layers;
    int32_t n_mtp; /* layers of the drafter: num_nextn_predict_layers, or DSpark's stages */
    hd_drafter drafter;    /* not NONE if n_mtp > 0 */
    hd_dspark_spec dspark; /* all zero for other drafters */
    bool drafter_apart; /* its tensors are in a folder of their own (config/drafter_folder.h) */
    int32_t max_positions;
    float norm_eps;
    bool tied_embeddings;
    hd_dtype dtype; /* torch_dtype: of tensors that are not quantized; F32, F16 or BF16 */

    int32_t n_heads;
    int32_t q_rank; /* 0: no low-rank query (V2-Lite) */
    int32_t rope_dim;
    hd_rope_spec rope;          /* main; V4: layers without compressor */
    hd_rope_spec rope_compress; /* V4: layers with compressor */
    double softmax_scale;       /* of the main attention, YaRN's correction included */

    /* MLA families */
    int32_t kv_rank, nope_dim, v_dim;
    bool rope_half_split; /* V3 with rope_interleave false; no release has it */

    /* V4 attention */
    int32_t head_dim, window, o_groups, o_rank;
    int32_t csa_ratio, hca_ratio; /* 4 and 128; 0 when no layer uses it */
    int32_t n_hash_layers;        /* layers with HD_MLP_MOE_HASH */

    /* indexer of V3.2 and V4; 0 heads: none */
    int32_t index_heads, index_dim, index_topk;

    /* V4.1: the later indexers choose inside the best blocks of entries of one layer */
    int32_t pool_layer; /* that layer; -1: none */
    int32_t pool_blocks, pool_block;
    hd_engram_spec engram;
    hd_vision_spec vision;

    /* feed-forward */
    int32_t dense_inter, moe_inter;
    int32_t n_shared; /* shared experts, run as one MLP of n_shared * moe_inter; 0: none */
    hd_router_rule route;
    int32_t draft_experts, draft_top_k; /* of route in the drafter's layers */
    float swiglu_limit;                 /* 0: no clamp */

    /* V4 hyper-connections; hc_mult 0: plain residual */
    int32_t hc_mult, hc_sinkhorn_iters;
    float hc_eps;

    hd_quant_spec quant;

    int32_t bos, n_eos, eos[HD_MAX_EOS]; /* bos -1: none */
    double temperature, top_p;           /* generation_config.json, else 1 and 1 */
    double min_p, repetition_penalty;    /* likewise, 0 and 1 */
    int32_t top_k;                       /* likewise, 0: all */

    int32_t n_notices;
    char notices[8][160]; /* warnings for the user: what was ignored or clamped */

    hd_layer_spec *layers; /* [n_layers + n_mtp], those of the drafter last; owned */
} hd_model_spec;

/* Reads MODEL_DIR/config.json and, if present, generation_config.json beside it. path may
 * also name a config file; then that file alone is read. A value that cannot be computed
 * exactly is refused (HD_EFORMAT, HD_EUNSUPPORTED) with file, key, value and range. A value
 * that does not matter is ignored with a notice. The caller owns *out (hd_model_spec_close). */
hd_status hd_model_spec_open(hd_model_spec **out, const char *path, hd_err *err);
void hd_model_spec_close(hd_model_spec *s); /* NULL is fine */

/* Keeps the first n layers at most, with their Engram tables, and those of the drafter after them. */
void hd_model_spec_keep_layers(hd_model_spec *s, int32_t n);

/* Whether its layers are hybrid: a window of vectors and compressed entries, V4's and V4.1's. */
static inline bool hd_is_hybrid(const hd_model_spec *s) {
    return s->family == HD_FAMILY_V4 || s->family == HD_FAMILY_V41;
}

/* Whether an Engram table is read before a layer. */
static inline bool hd_has_engram(const hd_model_spec *s, int32_t layer) {
    return s->engram.n_layers > 0 && s->layers[layer].engram >= 0;
}

/* Returns the router's rule in a layer. */
static inline hd_router_rule hd_layer_route(const hd_model_spec *s, int32_t layer) {
    hd_router_rule rule = s->route;
    if (layer < s->n_layers) return rule;
    rule.n_experts = s->draft_experts;
    rule.top_k = s->draft_top_k;
    return rule;
}

/* Returns the config key of a number on which the forward pass depends and that differs, or
 * NULL if the same weights would compute the same in both. MTP layers, formats and sampling
 * defaults may differ. */
const char *hd_model_spec_difference(const hd_model_spec *a, const hd_model_spec *b);

#endif
