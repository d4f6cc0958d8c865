/* schema.c - lists every tensor of a model: role, name in the file, shape, shard axis.
 *
 * One function per part of a layer declares its tensors in both families of names (Hugging
 * Face names for V2, V3 and V3.2, the official ones for V4). It runs twice: once to count,
 * once to write. Shapes are those of models.md 3.2 to 3.5. */
#include "weights/schema.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"

enum { MAX_TENSORS = 1 << 22, MAX_NAME = 128 };

static const char *const role_names[HD_N_ROLES] = {
#define X(role) #role,
    HD_ROLE_LIST(X)
#undef X
};

const char *hd_role_name(hd_role r) {
    return r >= 0 && r < HD_N_ROLES ? role_names[r] : "unknown";
}

/* Collects the tensors; decls and names are NULL while counting. */
typedef struct sink {
    const hd_model_spec *spec;
    hd_tensor_decl *decls;
    char *names;
    size_t n, name_bytes, elements;
    bool too_big;
    char prefix[64]; /* of the current layer, with its dot */
    int32_t layer, expert;
    bool optional, unused;
} sink;

typedef struct shape {
    int64_t rows, cols;
    int32_t rank;
} shape;

static shape matrix(int64_t rows, int64_t cols) {
    return (shape){rows, cols, 2};
}

static shape vector(int64_t n) {
    return (shape){1, n, 1};
}

static void put(sink *k, hd_role role, const char *name, shape s, hd_shard_axis shard_axis) {
    char full[MAX_NAME];
    size_t elements = 0;
    int len = snprintf(full, sizeof full, "%s%s", k->prefix, name);
    assert(len > 0 && len < (int)sizeof full);
    assert(s.rows > 0 && s.cols > 0 && s.rows <= INT32_MAX && s.cols <= INT32_MAX);
    if (!hd_mul_size((size_t)s.rows, (size_t)s.cols, &elements) ||
        !hd_add_size(k->elements, elements, &k->elements) || k->elements > (size_t)1 << 60 ||
        k->n >= MAX_TENSORS) {
        k->too_big = true;
        return;
    }
    if (k->decls) {
        char *copy = k->names + k->name_bytes;
        memcpy(copy, full, (size_t)len + 1);
        bool main_head = k->layer == HD_GLOBAL && role == HD_HEAD;
        bool duplicate = (main_head && k->spec->tied_embeddings) ||
                         (k->layer != HD_GLOBAL && (role == HD_HEAD || role == HD_EMBED));
        k->decls[k->n] = (hd_tensor_decl){.name = copy,
                                          .role = role,
                                          .layer = k->layer,
                                          .expert = k->expert,
                                          .rows = (int32_t)s.rows,
                                          .cols = (int32_t)s.cols,
                                          .rank = s.rank,
                                          .shard_axis = shard_axis,
                                          .optional = k->optional || duplicate,
                                          .unused = k->unused,
                                          .duplicate = duplicate};
    }
    k->n++;
    k->name_bytes += (size_t)len + 1;
}

/* gate, up and down of one MLP under its names in this family. */
static void put_mlp(sink *k, hd_role gate, hd_role up, hd_role down, const char *where,
                    int64_t inter, hd_shard_axis rows, hd_shard_axis cols) {
    bool v4 = hd_is_hybrid(k->spec);
    int64_t hidden = k->spec->hidden;
    char name[96];
    snprintf(name, sizeof name, "%s%s.weight", where, v4 ? "w1" : "gate_proj");
    put(k, gate, name, matrix(inter, hidden), rows);
    snprintf(name, sizeof name, "%s%s.weight", where, v4 ? "w3" : "up_proj");
    put(k, up, name, matrix(inter, hidden), rows);
    snprintf(name, sizeof name, "%s%s.weight", where, v4 ? "w2" : "down_proj");
    put(k, down, name, matrix(hidden, inter), cols);
}

/* A tensor that only the files have. */
static void put_unused(sink *k, hd_role role, const char *name, shape s) {
    k->unused = true;
    put(k, role, name, s, HD_SHARD_NONE);
    k->unused = false;
}

static void put_moe(sink *k, bool hash) {
    const hd_model_spec *s = k->spec;
    const hd_router_rule rule = hd_layer_route(s, k->layer);
    bool v4 = hd_is_hybrid(s);
    const char *room = v4 ? "ffn" : "mlp";
    char name[96];
    snprintf(name, sizeof name, "%s.gate.weight", room);
    put(k, HD_ROUTER, name, matrix(rule.n_experts, s->hidden), HD_SHARD_NONE);
    if (hash) {
        put(k, HD_ROUTER_HASH, "ffn.gate.tid2eid", matrix(s->vocab, s->route.top_k),
            HD_SHARD_NONE);
    } else if (s->family != HD_FAMILY_V2) {
        put(k, HD_ROUTER_BIAS, v4 ? "ffn.gate.bias" : "mlp.gate.e_score_correction_bias",
            vector(rule.n_experts), HD_SHARD_NONE);
    }
    if (s->family == HD_FAMILY_V41) {
        put_unused(k, HD_ROUTER_IMAGE_BIAS, "ffn.gate.bias_vl", vector(rule.n_experts));
    }
    for (int32_t e = 0; e < rule.n_experts && !k->too_big; e++) {
        k->expert = e;
        snprintf(name, sizeof name, "%s.experts.%d.", room, e);
        put_mlp(k, HD_EXPERT_GATE, HD_EXPERT_UP, HD_EXPERT_DOWN, name, s->moe_inter,
                HD_SHARD_EXPERT, HD_SHARD_EXPERT);
    }
    k->expert = -1;
    if (s->n_shared == 0) return;
    snprintf(name, sizeof name, "%s.shared_experts.", room);
    put_mlp(k, HD_SHARED_GATE, HD_SHARED_UP, HD_SHARED_DOWN, name,
            (int64_t)s->n_shared * s->moe_inter, HD_SHARD_DENSE_ROWS, HD_SHARD_DENSE_OUT);
}

/* ---- V2, V3, V3.2 ---- */

static void put_mla(sink *k) {
    const hd_model_spec *s = k->spec;
    int64_t q_out = (int64_t)s->n_heads * (s->nope_dim + s->rope_dim);
    int64_t kv_out = (int64_t)s->n_heads * (s->nope_dim + s->v_dim);
    if (s->q_rank == 0) {
        put(k, HD_Q, "self_attn.q_proj.weight", matrix(q_out, s->hidden), HD_SHARD_HEAD_ROWS);
    } else {
        put(k, HD_Q_A, "self_attn.q_a_proj.weight", matrix(s->q_rank, s->hidden),
            HD_SHARD_NONE);
        put(k, HD_Q_A_NORM, "self_attn.q_a_layernorm.weight", vector(s->q_rank), HD_SHARD_NONE);
        put(k, HD_Q_B, "self_attn.q_b_proj.weight", matrix(q_out, s->q_rank),
            HD_SHARD_HEAD_ROWS);
    }
    put(k, HD_KV_A, "self_attn.kv_a_proj_with_mqa.weight",
        matrix(s->kv_rank + s->rope_dim, s->hidden), HD_SHARD_NONE);
    put(k, HD_KV_A_NORM, "self_attn.kv_a_layernorm.weight", vector(s->kv_rank), HD_SHARD_NONE);
    put(k, HD_KV_B, "self_attn.kv_b_proj.weight", matrix(kv_out, s->kv_rank),
        HD_SHARD_HEAD_ROWS);
    put(k, HD_O, "self_attn.o_proj.weight", matrix(s->hidden, (int64_t)s->n_heads * s->v_dim),
        HD_SHARD_ATTENTION_OUT);
    if (s->family != HD_FAMILY_V32) return;
    put(k, HD_INDEX_Q_B, "self_attn.indexer.wq_b.weight",
        matrix((int64_t)s->index_heads * s->index_dim, s->q_rank), HD_SHARD_NONE);
    put(k, HD_INDEX_K, "self_attn.indexer.wk.weight", matrix(s->index_dim, s->hidden),
        HD_SHARD_NONE);
    put(k, HD_INDEX_K_NORM, "self_attn.indexer.k_norm.weight", vector(s->index_dim),
        HD_SHARD_NONE);
    put(k, HD_INDEX_K_BIAS, "self_attn.indexer.k_norm.bias", vector(s->index_dim),
        HD_SHARD_NONE);
    put(k, HD_INDEX_WEIGHTS, "self_attn.indexer.weights_proj.weight",
        matrix(s->index_heads, s->hidden), HD_SHARD_NONE);
}

static void put_mla_layer(sink *k, int32_t l) {
    const hd_model_spec *s = k->spec;
    k->layer = l;
    snprintf(k->prefix, sizeof k->prefix, "model.layers.%d.", l);
    put(k, HD_ATTN_NORM, "input_layernorm.weight", vector(s->hidden), HD_SHARD_NONE);
    put_mla(k);
    put(k, HD_FFN_NORM, "post_attention_layernorm.weight", vector(s->hidden), HD_SHARD_NONE);
    if (s->layers[l].mlp == HD_MLP_DENSE) {
        put_mlp(k, HD_DENSE_GATE, HD_DENSE_UP, HD_DENSE_DOWN, "mlp.", s->dense_inter,
                HD_SHARD_DENSE_ROWS, HD_SHARD_DENSE_OUT);
    } else {
        put_moe(k, false);
    }
}

static void put_mla_mtp(sink *k, int32_t l) {
    const hd_model_spec *s = k->spec;
    int64_t hidden = s->hidden;
    put_mla_layer(k, l);
    put(k, HD_MTP_EMBED_NORM, "enorm.weight", vector(hidden), HD_SHARD_NONE);
    put(k, HD_MTP_HIDDEN_NORM, "hnorm.weight", vector(hidden), HD_SHARD_NONE);
    put(k, HD_MTP_PROJ, "eh_proj.weight", matrix(hidden, 2 * hidden), HD_SHARD_NONE);
    put(k, HD_EMBED, "embed_tokens.weight", matrix(s->vocab, hidden), HD_SHARD_NONE);
    put(k, HD_FINAL_NORM, "shared_head.norm.weight", vector(hidden), HD_SHARD_NONE);
    put(k, HD_HEAD, "shared_head.head.weight", matrix(s->vocab, hidden), HD_SHARD_VOCAB_ROWS);
}

/* ---- V4 ---- */

static void put_compressor(sink *k, const hd_layer_spec *layer) {
    const hd_model_spec *s = k->spec;
    bool csa = layer->attention == HD_ATTN_CSA;
    int64_t ratio = layer->compress_ratio;
    int64_t width = (int64_t)(csa ? 2 : 1) * s->head_dim;
    put(k, HD_COMP_APE, "attn.compressor.ape", matrix(ratio, width), HD_SHARD_NONE);
    put(k, HD_COMP_KV, "attn.compressor.wkv.weight", matrix(width, s->hidden), HD_SHARD_NONE);
    put(k, HD_COMP_GATE, "attn.compressor.wgate.weight", matrix(width, s->hidden),
        HD_SHARD_NONE);
    put(k, HD_COMP_NORM, "attn.compressor.norm.weight", vector(s->head_dim), HD_SHARD_NONE);
    if (!csa) return;
    width = (int64_t)2 * s->index_dim;
    put(k, HD_INDEX_Q_B, "attn.indexer.wq_b.weight",
        matrix((int64_t)s->index_heads * s->index_dim, s->q_rank), HD_SHARD_NONE);
    put(k, HD_INDEX_WEIGHTS, "attn.indexer.weights_proj.weight",
        matrix(s->index_heads, s->hidden), HD_SHARD_NONE);
    put(k, HD_INDEX_COMP_APE, "attn.indexer.compressor.ape", matrix(ratio, width),
        HD_SHARD_NONE);
    put(k, HD_INDEX_COMP_KV, "attn.indexer.compressor.wkv.weight", matrix(width, s->hidden),
        HD_SHARD_NONE);
    put(k, HD_INDEX_COMP_GATE, "attn.indexer.compressor.wgate.weight", matrix(width, s->hidden),
        HD_SHARD_NONE);
    put(k, HD_INDEX_COMP_NORM, "attn.indexer.compressor.norm.weight", vector(s->index_dim),
        HD_SHARD_NONE);
}

/* What a CSA2 layer has beside the projections: a compressor if it writes, an indexer if it
 * chooses. */
static void put_csa2(sink *k, const hd_layer_spec *layer) {
    const hd_model_spec *s = k->spec;
    if (layer->attention == HD_ATTN_CSA2_REUSE) return;
    put(k, HD_INDEX_Q_B, "attn.indexer.wq_b.weight",
        matrix((int64_t)s->index_heads * s->index_dim, s->q_rank), HD_SHARD_NONE);
    put(k, HD_INDEX_WEIGHTS, "attn.indexer.weights_proj.weight",
        matrix(s->index_heads, s->hidden), HD_SHARD_NONE);
    if (layer->attention == HD_ATTN_CSA2_REINDEX) return;
    put(k, HD_COMP_KV, "attn.compressor.wkv.weight", matrix(s->head_dim, s->hidden),
        HD_SHARD_NONE);
    put(k, HD_COMP_NORM, "attn.compressor.norm.weight", vector(s->head_dim), HD_SHARD_NONE);
    if (layer->compress_ratio > 1) {
        put(k, HD_COMP_GATE, "attn.compressor.wgate.weight", matrix(s->head_dim, s->hidden),
            HD_SHARD_NONE);
    }
    put(k, HD_INDEX_K, "attn.indexer.wk.weight", matrix(s->index_dim, s->head_dim),
        HD_SHARD_NONE);
    put(k, HD_INDEX_K_NORM, "attn.indexer.k_norm.weight", vector(s->index_dim), HD_SHARD_NONE);
}

static void put_engram(sink *k, const hd_layer_spec *layer) {
    const hd_model_spec *s = k->spec;
    const hd_engram_spec *e = &s->engram;
    if (layer->engram < 0) return;
    put(k, HD_ENGRAM_TABLE, "engram.embed.weight", matrix(e->rows[layer->engram], e->head_dim),
        HD_SHARD_NONE);
    put(k, HD_ENGRAM_KV, "engram.wkv.weight",
        matrix((int64_t)(s->hc_mult + 1) * s->hidden, (int64_t)e->columns * e->head_dim),
        HD_SHARD_NONE);
    put(k, HD_ENGRAM_Q, "engram.q_weight", matrix(s->hc_mult, s->hidden), HD_SHARD_NONE);
    put(k, HD_ENGRAM_K, "engram.k_weight", matrix(s->hc_mult, s->hidden), HD_SHARD_NONE);
}

static void put_v4_attention(sink *k, const hd_layer_spec *layer) {
    const hd_model_spec *s = k->spec;
    int64_t heads_out = (int64_t)s->n_heads * s->head_dim;
    int64_t groups_out = (int64_t)s->o_groups * s->o_rank;
    put(k, HD_SINK, "attn.attn_sink", vector(s->n_heads), HD_SHARD_HEAD_VECTOR);
    put(k, HD_Q_A, "attn.wq_a.weight", matrix(s->q_rank, s->hidden), HD_SHARD_NONE);
    put(k, HD_Q_A_NORM, "attn.q_norm.weight", vector(s->q_rank), HD_SHARD_NONE);
    put(k, HD_Q_B, "attn.wq_b.weight", matrix(heads_out, s->q_rank), HD_SHARD_HEAD_ROWS);
    put(k, HD_KV, "attn.wkv.weight", matrix(s->head_dim, s->hidden), HD_SHARD_NONE);
    put(k, HD_KV_NORM, "attn.kv_norm.weight", vector(s->head_dim), HD_SHARD_NONE);
    put(k, HD_O_A, "attn.wo_a.weight", matrix(groups_out, heads_out / s->o_groups),
        HD_SHARD_GROUP_ROWS);
    put(k, HD_O_B, "attn.wo_b.weight", matrix(s->hidden, groups_out), HD_SHARD_ATTENTION_OUT);
    if (layer->compress_ratio == 0) return;
    if (s->family == HD_FAMILY_V41) {
        put_csa2(k, layer);
    } else {
        put_compressor(k, layer);
    }
}

static void put_hc(sink *k, hd_role fn, hd_role base, hd_role scale, const char *stem,
                   int64_t out, int64_t n_scales) {
    const hd_model_spec *s = k->spec;
    char name[32];
    snprintf(name, sizeof name, "%s_fn", stem);
    put(k, fn, name, matrix(out, (int64_t)s->hc_mult * s->hidden), HD_SHARD_NONE);
    snprintf(name, sizeof name, "%s_base", stem);
    put(k, base, name, vector(out), HD_SHARD_NONE);
    snprintf(name, sizeof name, "%s_scale", stem);
    put(k, scale, name, vector(n_scales), HD_SHARD_NONE);
}

static void put_hc_head(sink *k) {
    put_hc(k, HD_HC_HEAD_FN, HD_HC_HEAD_BASE, HD_HC_HEAD_SCALE, "hc_head", k->spec->hc_mult, 1);
}

static void put_v4_layer(sink *k, int32_t l) {
    const hd_model_spec *s = k->spec;
    const hd_layer_spec *layer = &s->layers[l];
    bool mtp = l >= s->n_layers;
    int64_t hc_out = (int64_t)s->hc_mult * (2 + s->hc_mult);
    k->layer = l;
    snprintf(k->prefix, sizeof k->prefix, mtp ? "mtp.%d." : "layers.%d.",
             mtp ? l - s->n_layers : l);
    put_engram(k, layer);
    put_hc(k, HD_HC_ATTN_FN, HD_HC_ATTN_BASE, HD_HC_ATTN_SCALE, "hc_attn", hc_out, 3);
    put(k, HD_ATTN_NORM, "attn_norm.weight", vector(s->hidden), HD_SHARD_NONE);
    put_v4_attention(k, layer);
    put_hc(k, HD_HC_FFN_FN, HD_HC_FFN_BASE, HD_HC_FFN_SCALE, "hc_ffn", hc_out, 3);
    put(k, HD_FFN_NORM, "ffn_norm.weight", vector(s->hidden), HD_SHARD_NONE);
    put_moe(k, layer->mlp == HD_MLP_MOE_HASH);
}

static void put_v4_mtp(sink *k, int32_t l) {
    int64_t hidden = k->spec->hidden;
    put_v4_layer(k, l);
    put(k, HD_MTP_EMBED_NORM, "enorm.weight", vector(hidden), HD_SHARD_NONE);
    put(k, HD_MTP_HIDDEN_NORM, "hnorm.weight", vector(hidden), HD_SHARD_NONE);
    put(k, HD_MTP_E_PROJ, "e_proj.weight", matrix(hidden, hidden), HD_SHARD_NONE);
    put(k, HD_MTP_H_PROJ, "h_proj.weight", matrix(hidden, hidden), HD_SHARD_NONE);
    put_hc_head(k);
    put(k, HD_FINAL_NORM, "norm.weight", vector(hidden), HD_SHARD_NONE);
}

static void put_dspark_stage(sink *k, int32_t l) {
    const hd_model_spec *s = k->spec;
    const hd_dspark_spec *d = &s->dspark;
    const int64_t hidden = s->hidden;
    put_v4_layer(k, l);
    if (l == s->n_layers) {
        put(k, HD_DSPARK_PROJ, "main_proj.weight", matrix(hidden, d->n_taps * hidden),
            HD_SHARD_NONE);
        put(k, HD_DSPARK_NORM, "main_norm.weight", vector(hidden), HD_SHARD_NONE);
    }
    if (l < s->n_layers + s->n_mtp - 1) return;
    const bool v4 = s->family == HD_FAMILY_V4;
    if (v4) put_hc_head(k);
    put(k, HD_FINAL_NORM, "norm.weight", vector(hidden), HD_SHARD_NONE);
    put(k, HD_DSPARK_MARKOV_EMBED,
        v4 ? "markov_head.markov_w1.weight" : "markov_head.embed.weight",
        matrix(s->vocab, d->rank), HD_SHARD_NONE);
    put(k, HD_DSPARK_MARKOV_HEAD,
        v4 ? "markov_head.markov_w2.weight" : "markov_head.head.weight",
        matrix(s->vocab, d->rank), HD_SHARD_NONE);
    put(k, HD_DSPARK_CONFIDENCE, "confidence_head.proj.weight", matrix(1, hidden + d->rank),
        HD_SHARD_NONE);
}

/* ---- V4.1's image tower ---- */

static void put_vision_block(sink *k, int32_t block) {
    const int64_t wide = k->spec->vision.hidden, inter = k->spec->vision.inter;
    snprintf(k->prefix, sizeof k->prefix, "vision.blocks.%d.", block);
    put_unused(k, HD_VISION, "norm1.weight", vector(wide));
    put_unused(k, HD_VISION, "norm2.weight", vector(wide));
    put_unused(k, HD_VISION, "attn.wqkv.weight", matrix(3 * wide, wide));
    put_unused(k, HD_VISION, "attn.wqkv.bias", vector(3 * wide));
    put_unused(k, HD_VISION, "attn.wo.weight", matrix(wide, wide));
    put_unused(k, HD_VISION, "attn.wo.bias", vector(wide));
    put_unused(k, HD_VISION, "mlp.w1.weight", matrix(2 * inter, wide));
    put_unused(k, HD_VISION, "mlp.w2.weight", matrix(wide, inter));
    k->prefix[0] = '\0';
}

static void put_vision(sink *k) {
    const hd_vision_spec *s = &k->spec->vision;
    const int64_t hidden = k->spec->hidden, wide = s->hidden;
    const int64_t patch = (int64_t)3 * s->patch * s->patch;
    const int64_t cell = (int64_t)s->downsample * s->downsample * wide;
    if (s->n_layers == 0) return;
    put_unused(k, HD_VISION, "vision.patch_embed.proj.weight", matrix(wide, patch));
    put_unused(k, HD_VISION, "vision.patch_embed.proj.bias", vector(wide));
    for (int32_t b = 0; b < s->n_layers && !k->too_big; b++) put_vision_block(k, b);
    put_unused(k, HD_VISION, "vision.norm.weight", vector(wide));
    put_unused(k, HD_VISION, "aligner.w1.weight", matrix(hidden, cell));
    put_unused(k, HD_VISION, "aligner.w1.bias", vector(hidden));
    put_unused(k, HD_VISION, "aligner.w2.weight", matrix(hidden, hidden));
    put_unused(k, HD_VISION, "aligner.w2.bias", vector(hidden));
    put_unused(k, HD_VISION, "image_start", vector(hidden));
    put_unused(k, HD_VISION, "image_end", vector(hidden));
    put_unused(k, HD_VISION, "image_newline", vector(hidden));
}

/* ---- complete schema ---- */

static void set_global(sink *k, const char *prefix) {
    k->layer = HD_GLOBAL;
    k->expert = -1;
    snprintf(k->prefix, sizeof k->prefix, "%s", prefix);
}

static void put_model(sink *k) {
    const hd_model_spec *s = k->spec;
    bool v4 = hd_is_hybrid(s);
    shape table = matrix(s->vocab, s->hidden);
    set_global(k, "");
    put(k, HD_EMBED, v4 ? "embed.weight" : "model.embed_tokens.weight", table, HD_SHARD_NONE);
    for (int32_t l = 0; l < s->n_layers && !k->too_big; l++) {
        if (v4) {
            put_v4_layer(k, l);
        } else {
            put_mla_layer(k, l);
        }
    }
    set_global(k, "");
    if (s->family == HD_FAMILY_V4) put_hc_head(k);
    put(k, HD_FINAL_NORM, v4 ? "norm.weight" : "model.norm.weight", vector(s->hidden),
        HD_SHARD_NONE);
    put(k, HD_HEAD, v4 ? "head.weight" : "lm_head.weight", table, HD_SHARD_VOCAB_ROWS);
    put_vision(k);
    k->optional = true;
    for (int32_t l = s->n_layers; l < s->n_layers + s->n_mtp && !k->too_big; l++) {
        if (s->drafter == HD_DRAFTER_DSPARK) {
            put_dspark_stage(k, l);
        } else if (v4) {
            put_v4_mtp(k, l);
        } else {
            put_mla_mtp(k, l);
        }
    }
}

hd_status hd_schema_open(hd_schema *out, const hd_model_spec *spec, hd_err *err) {
    *out = (hd_schema){0};
    sink count = {.spec = spec, .expert = -1};
    put_model(&count);
    if (count.too_big) {
        return HD_FAIL(err, HD_EFORMAT,
                       "the config describes more than %d tensors or 2^60 elements",
                       MAX_TENSORS);
    }
    sink fill = {.spec = spec, .expert = -1};
    fill.decls = calloc(count.n, sizeof *fill.decls);
    fill.names = malloc(count.name_bytes);
    if (!fill.decls || !fill.names) {
        free(fill.decls);
        free(fill.names);
        return HD_FAIL(err, HD_ENOMEM, "no memory for a schema of %zu tensors", count.n);
    }
    put_model(&fill);
    assert(fill.n == count.n && fill.name_bytes == count.name_bytes);
    *out = (hd_schema){.decls = fill.decls, .n = (int32_t)fill.n, .names = fill.names};
    return HD_OK;
}

void hd_schema_close(hd_schema *s) {
    free(s->decls);
    free(s->names);
    *s = (hd_schema){0};
}
