/* config_v4.c - reads V4's config: layer kinds, windows, compressors, indexer,
 * hyper-connections.
 *
 * The kind of each layer comes from compress_ratios (published form) or layer_types with
 * compress_rates (library form). If a file has neither, the library assumes an alternation
 * that differs from the released models, so such a file is refused. */
#include "weights/config/config_internal.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const char csa_name[] = "compressed_sparse_attention";
static const char hca_name[] = "heavily_compressed_attention";

enum { MAX_RATIO = 65536, USUAL_CSA = 4, USUAL_HCA = 128 };

static hd_status read_rope_dim(hd_model_spec *s, const weights_view *v) {
    double part;
    HD_TRY(weights_int_or(v, "qk_rope_head_dim", 2, s->head_dim, 0, &s->rope_dim));
    HD_TRY(weights_real_or(v, "partial_rotary_factor", 1e-6, 1, 0, &part));
    if (part == 0 && s->rope_dim == 0) {
        return weights_refuse(v, HD_EFORMAT, "qk_rope_head_dim", NULL,
                              "neither it nor partial_rotary_factor is given");
    }
    int32_t from_part = (int32_t)lround(part * s->head_dim);
    if (part != 0 && s->rope_dim != 0 && from_part != s->rope_dim) {
        return HD_FAIL(v->err, HD_EFORMAT,
                       "%s: key \"qk_rope_head_dim\" is %d but partial_rotary_factor %g of "
                       "head_dim %d is %d",
                       v->file, s->rope_dim, part, s->head_dim, from_part);
    }
    if (s->rope_dim == 0) s->rope_dim = from_part;
    if (s->rope_dim < 2 || s->rope_dim % 2 != 0) {
        return HD_FAIL(v->err, HD_EFORMAT,
                       "%s: key \"qk_rope_head_dim\" is %d: must be even, at least 2", v->file,
                       s->rope_dim);
    }
    return HD_OK;
}

hd_status weights_config_heads(hd_model_spec *s, const weights_view *v) {
    HD_TRY(weights_int(v, "head_dim", 2, 8192, &s->head_dim));
    HD_TRY(read_rope_dim(s, v));
    HD_TRY(weights_int(v, "q_lora_rank", 1, 65536, &s->q_rank));
    HD_TRY(weights_int(v, "o_groups", 1, s->n_heads, &s->o_groups));
    HD_TRY(weights_int(v, "o_lora_rank", 1, 65536, &s->o_rank));
    HD_TRY(weights_int(v, "sliding_window", 1, 1 << 24, &s->window));
    int32_t kv_heads;
    HD_TRY(weights_int_or(v, "num_key_value_heads", 1, 1, 1, &kv_heads));
    if (s->n_heads % s->o_groups != 0) {
        return HD_FAIL(
            v->err, HD_EFORMAT,
            "%s: key \"o_groups\" is %d: must divide num_attention_heads, which is %d", v->file,
            s->o_groups, s->n_heads);
    }
    return HD_OK;
}

/* Reads the two compression rates if the file names them; otherwise 0. */
static hd_status read_rates(const weights_view *v, int32_t *csa, int32_t *hca) {
    weights_view rates;
    HD_TRY(weights_section(v, "compress_rates", "compress_rates.", &rates));
    *csa = *hca = 0;
    if (rates.object) {
        HD_TRY(weights_int_or(&rates, csa_name, 2, MAX_RATIO, 0, csa));
        HD_TRY(weights_int_or(&rates, hca_name, 2, MAX_RATIO, 0, hca));
    }
    /* an older spelling of the same */
    HD_TRY(weights_int_or(v, "compress_rate_csa", 2, MAX_RATIO, *csa, csa));
    HD_TRY(weights_int_or(v, "compress_rate_hca", 2, MAX_RATIO, *hca, hca));
    return HD_OK;
}

static void set_kind(hd_model_spec *s, int32_t l, hd_attention kind, int32_t ratio) {
    s->layers[l].attention = kind;
    s->layers[l].compress_ratio = ratio;
    if (kind == HD_ATTN_CSA) s->csa_ratio = ratio;
    if (kind == HD_ATTN_HCA) s->hca_ratio = ratio;
}

static hd_status kinds_from_types(hd_model_spec *s, const weights_view *v, const json_t *types,
                                  int32_t csa, int32_t hca) {
    size_t n = json_array_size(types);
    if (n != (size_t)s->n_layers && n != (size_t)s->n_layers + (size_t)s->n_mtp) {
        return HD_FAIL(
            v->err, HD_EFORMAT,
            "%s: key \"layer_types\" has %zu entries: must be num_hidden_layers, which "
            "is %d",
            v->file, n, s->n_layers);
    }
    for (int32_t l = 0; l < (int32_t)n; l++) {
        const char *type = json_string_value(json_array_get(types, (size_t)l));
        if (type && strcmp(type, "sliding_attention") == 0) {
            set_kind(s, l, HD_ATTN_WINDOW, 0);
        } else if (type && strcmp(type, csa_name) == 0 && l < s->n_layers) {
            set_kind(s, l, HD_ATTN_CSA, csa ? csa : USUAL_CSA);
        } else if (type && strcmp(type, hca_name) == 0 && l < s->n_layers) {
            set_kind(s, l, HD_ATTN_HCA, hca ? hca : USUAL_HCA);
        } else {
            return weights_refuse(
                v, HD_EFORMAT, "layer_types", types,
                "entries must be sliding_attention, compressed_sparse_attention "
                "or heavily_compressed_attention (MTP: sliding_attention)");
        }
    }
    return HD_OK;
}

/* If the rates have no names, 4 means CSA and one larger ratio HCA. */
static hd_status kind_from_ratio(hd_model_spec *s, const weights_view *v, int32_t l,
                                 int64_t ratio, int32_t csa, int32_t hca) {
    int32_t heavy = hca ? hca : s->hca_ratio;
    if (ratio == 0) {
        set_kind(s, l, HD_ATTN_WINDOW, 0);
    } else if (ratio == (csa ? csa : USUAL_CSA)) {
        set_kind(s, l, HD_ATTN_CSA, (int32_t)ratio);
    } else if (heavy ? ratio == heavy : ratio > USUAL_CSA && ratio <= MAX_RATIO) {
        set_kind(s, l, HD_ATTN_HCA, (int32_t)ratio);
    } else {
        return HD_FAIL(v->err, HD_EUNSUPPORTED,
                       "%s: key \"compress_ratios\" has %lld for layer %d: must be 0, %d or %d",
                       v->file, (long long)ratio, l, csa ? csa : USUAL_CSA,
                       heavy ? heavy : USUAL_HCA);
    }
    return HD_OK;
}

/* Reads one ratio per layer, then one per layer of the drafter, which is 0. */
static hd_status kinds_from_ratios(hd_model_spec *s, const weights_view *v,
                                   const json_t *ratios, int32_t csa, int32_t hca) {
    size_t n = json_array_size(ratios);
    if (n < (size_t)s->n_layers || n > (size_t)s->n_layers + 64) {
        return HD_FAIL(v->err, HD_EFORMAT,
                       "%s: key \"compress_ratios\" has %zu entries: num_hidden_layers is %d",
                       v->file, n, s->n_layers);
    }
    for (int32_t l = 0; l < (int32_t)n; l++) {
        const json_t *entry = json_array_get(ratios, (size_t)l);
        int64_t ratio = json_integer_value(entry);
        if (!json_is_integer(entry) || ratio < 0 || (l >= s->n_layers && ratio != 0)) {
            return weights_refuse(v, HD_EFORMAT, "compress_ratios", ratios,
                                  "entries must be integers, those of drafter layers 0");
        }
        if (l < s->n_layers) HD_TRY(kind_from_ratio(s, v, l, ratio, csa, hca));
    }
    return HD_OK;
}

/* Both spellings in one file must agree. */
static hd_status check_agreement(hd_model_spec *s, const weights_view *v,
                                 const json_t *ratios) {
    for (int32_t l = 0; l < s->n_layers; l++) {
        const json_t *entry = json_array_get(ratios, (size_t)l);
        if (json_is_integer(entry) &&
            json_integer_value(entry) == s->layers[l].compress_ratio) {
            continue;
        }
        return weights_refuse(v, HD_EFORMAT, "compress_ratios", ratios,
                              "contradicts layer_types with compress_rates");
    }
    return HD_OK;
}

static hd_status read_attention_kinds(hd_model_spec *s, const weights_view *v) {
    const json_t *types, *ratios;
    int32_t csa, hca;
    HD_TRY(weights_array(v, "layer_types", &types));
    HD_TRY(weights_array(v, "compress_ratios", &ratios));
    HD_TRY(read_rates(v, &csa, &hca));
    if (types) {
        HD_TRY(kinds_from_types(s, v, types, csa, hca));
        return ratios ? check_agreement(s, v, ratios) : HD_OK;
    }
    if (ratios) return kinds_from_ratios(s, v, ratios, csa, hca);
    return weights_refuse(v, HD_EFORMAT, "compress_ratios", NULL,
                          "neither it nor layer_types says which layers compress");
}

static hd_status read_indexer(hd_model_spec *s, const weights_view *v) {
    int32_t lo = s->csa_ratio ? 1 : 0; /* needed by the CSA layers only */
    HD_TRY(weights_int_or(v, "index_n_heads", lo, 4096, 0, &s->index_heads));
    HD_TRY(weights_int_or(v, "index_head_dim", lo, 8192, 0, &s->index_dim));
    HD_TRY(weights_int_or(v, "index_topk", lo, 1 << 30, 0, &s->index_topk));
    if (!s->csa_ratio) {
        s->index_heads = s->index_dim = s->index_topk = 0;
        return HD_OK;
    }
    HD_TRY(weights_int(v, "index_n_heads", 1, 4096, &s->index_heads));
    HD_TRY(weights_int(v, "index_head_dim", s->rope_dim, 8192, &s->index_dim));
    return weights_int(v, "index_topk", 1, 1 << 30, &s->index_topk);
}

hd_status weights_config_route(hd_model_spec *s, const weights_view *v) {
    hd_router_rule *r = &s->route;
    const char *score;
    bool normalize;
    HD_TRY(weights_text(v, "scoring_func", &score));
    HD_TRY(weights_only_text(v, "topk_method", "noaux_tc"));
    HD_TRY(weights_bool_or(v, "norm_topk_prob", true, &normalize));
    r->n_groups = r->top_groups = 1;
    r->score = HD_SCORE_SQRT_SOFTPLUS;
    /* Every implementation of V4 divides by the sum, whatever this key says. */
    if (!normalize) weights_notice(s, "config.json: norm_topk_prob false has no effect in V4");
    r->normalize = true;
    if (!score || strcmp(score, "sqrtsoftplus") == 0) return HD_OK;
    if (strcmp(score, "sigmoid") != 0) {
        return weights_refuse(v, HD_EUNSUPPORTED, "scoring_func",
                              weights_find(v, "scoring_func"),
                              "must be \"sqrtsoftplus\" or \"sigmoid\"");
    }
    r->score = HD_SCORE_SIGMOID;
    return HD_OK;
}

static hd_status read_mlp_kinds(hd_model_spec *s, const weights_view *v) {
    const json_t *kinds;
    int32_t n_hash;
    HD_TRY(weights_array(v, "mlp_layer_types", &kinds));
    HD_TRY(weights_int_or(v, "num_hash_layers", 0, s->n_layers, -1, &n_hash));
    if (!kinds && n_hash < 0) {
        return weights_refuse(v, HD_EFORMAT, "num_hash_layers", NULL,
                              "neither it nor mlp_layer_types says which layers route by hash");
    }
    size_t n = json_array_size(kinds);
    if (kinds && n != (size_t)s->n_layers && n != (size_t)s->n_layers + (size_t)s->n_mtp) {
        return HD_FAIL(
            v->err, HD_EFORMAT,
            "%s: key \"mlp_layer_types\" has %zu entries: must be num_hidden_layers, "
            "which is %d",
            v->file, n, s->n_layers);
    }
    for (int32_t l = 0; l < s->n_layers; l++) {
        bool hash = l < n_hash;
        if (kinds) {
            const char *kind = json_string_value(json_array_get(kinds, (size_t)l));
            hash = kind && strcmp(kind, "hash_moe") == 0;
            if (!kind || (!hash && strcmp(kind, "moe") != 0)) {
                return weights_refuse(v, HD_EFORMAT, "mlp_layer_types", kinds,
                                      "entries must be \"hash_moe\" or \"moe\"");
            }
        }
        s->layers[l].mlp = hash ? HD_MLP_MOE_HASH : HD_MLP_MOE;
        s->n_hash_layers += hash;
    }
    return HD_OK;
}

hd_status weights_config_streams(hd_model_spec *s, const weights_view *v) {
    double eps, limit;
    HD_TRY(weights_int(v, "hc_mult", 1, 16, &s->hc_mult));
    HD_TRY(weights_int(v, "hc_sinkhorn_iters", 1, 1000, &s->hc_sinkhorn_iters));
    HD_TRY(weights_real_or(v, "hc_eps", 1e-20, 1e-2, 1e-6, &eps));
    HD_TRY(weights_real(v, "swiglu_limit", 0, 1e6, &limit));
    s->hc_eps = (float)eps;
    s->swiglu_limit = (float)limit;
    return HD_OK;
}

hd_status weights_config_v4(hd_model_spec *s, const weights_view *v) {
    HD_TRY(weights_config_heads(s, v));
    HD_TRY(read_attention_kinds(s, v));
    HD_TRY(read_indexer(s, v));
    HD_TRY(weights_config_route(s, v));
    HD_TRY(read_mlp_kinds(s, v));
    HD_TRY(weights_config_streams(s, v));
    if (s->n_shared != 1) {
        return weights_refuse(v, HD_EUNSUPPORTED, "n_shared_experts",
                              weights_find(v, "n_shared_experts"), "must be 1 in V4");
    }
    for (int32_t l = s->n_layers; l < s->n_layers + s->n_mtp; l++) {
        s->layers[l].attention = HD_ATTN_WINDOW;
        s->layers[l].mlp = HD_MLP_MOE;
    }
    return HD_OK;
}
