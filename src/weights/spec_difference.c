/* spec_difference.c - whether two configurations describe the same computation. */
#include <math.h>
#include <string.h>

#include "weights/spec.h"

/* X(config key, field), of everything that the forward pass depends on. */
#define INTEGERS(X)                           \
    X("vocab_size", vocab)                    \
    X("hidden_size", hidden)                  \
    X("num_hidden_layers", n_layers)          \
    X("num_attention_heads", n_heads)         \
    X("q_lora_rank", q_rank)                  \
    X("qk_rope_head_dim", rope_dim)           \
    X("kv_lora_rank", kv_rank)                \
    X("qk_nope_head_dim", nope_dim)           \
    X("v_head_dim", v_dim)                    \
    X("rope_interleave", rope_half_split)     \
    X("head_dim", head_dim)                   \
    X("sliding_window", window)               \
    X("o_groups", o_groups)                   \
    X("o_lora_rank", o_rank)                  \
    X("num_hash_layers", n_hash_layers)       \
    X("index_n_heads", index_heads)           \
    X("index_head_dim", index_dim)            \
    X("index_topk", index_topk)               \
    X("intermediate_size", dense_inter)       \
    X("moe_intermediate_size", moe_inter)     \
    X("n_shared_experts", n_shared)           \
    X("n_routed_experts", route.n_experts)    \
    X("num_experts_per_tok", route.top_k)     \
    X("n_group", route.n_groups)              \
    X("topk_group", route.top_groups)         \
    X("topk_method", route.group_rule)        \
    X("scoring_func", route.score)            \
    X("norm_topk_prob", route.normalize)      \
    X("hc_mult", hc_mult)                     \
    X("hc_sinkhorn_iters", hc_sinkhorn_iters) \
    X("tie_word_embeddings", tied_embeddings)

#define REALS(X)                                  \
    X("rms_norm_eps", norm_eps)                   \
    X("routed_scaling_factor", route.scale)       \
    X("swiglu_limit", swiglu_limit)               \
    X("hc_eps", hc_eps)                           \
    X("rope_theta", rope.theta)                   \
    X("rope_scaling", rope.factor)                \
    X("compress_rope_theta", rope_compress.theta) \
    X("rope_scaling", rope_compress.factor)       \
    X("mscale", softmax_scale)

static bool same_layers(const hd_model_spec *a, const hd_model_spec *b) {
    for (int32_t l = 0; l < a->n_layers; l++) {
        const hd_layer_spec *x = &a->layers[l], *y = &b->layers[l];
        if (x->attention != y->attention || x->mlp != y->mlp) return false;
        if (x->compress_ratio != y->compress_ratio) return false;
    }
    return true;
}

const char *hd_model_spec_difference(const hd_model_spec *a, const hd_model_spec *b) {
    if (a->family != b->family) return "model_type";
#define X(key, field) \
    if (a->field != b->field) return key;
    INTEGERS(X)
#undef X
#define X(key, field) \
    if (fabs((double)a->field - (double)b->field) > 0) return key;
    REALS(X)
#undef X
    return same_layers(a, b) ? NULL : "layer_types";
}
