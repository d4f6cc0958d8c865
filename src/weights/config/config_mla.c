/* config_mla.c - reads the config of families with multi-head latent attention: V2, V3 and
 * V3.2. */
#include "weights/config/config_internal.h"

#include <stdio.h>
#include <string.h>

static hd_status read_attention(hd_model_spec *s, const weights_view *v) {
    HD_TRY(weights_int_or(v, "q_lora_rank", 1, 65536, 0, &s->q_rank));
    HD_TRY(weights_int(v, "kv_lora_rank", 1, 65536, &s->kv_rank));
    HD_TRY(weights_int(v, "qk_nope_head_dim", 1, 8192, &s->nope_dim));
    HD_TRY(weights_int(v, "qk_rope_head_dim", 2, 8192, &s->rope_dim));
    HD_TRY(weights_int(v, "v_head_dim", 1, 8192, &s->v_dim));
    bool interleaved = true; /* the library reads this key for V3 alone */
    if (s->family == HD_FAMILY_V3) {
        HD_TRY(weights_bool_or(v, "rope_interleave", true, &interleaved));
    } else {
        HD_TRY(weights_only_bool(v, "rope_interleave", true));
    }
    s->rope_half_split = !interleaved;
    if (s->rope_dim % 2 != 0) {
        return weights_refuse(v, HD_EFORMAT, "qk_rope_head_dim",
                              weights_find(v, "qk_rope_head_dim"),
                              "must be even: rotation is in pairs");
    }
    return HD_OK;
}

static hd_status read_indexer(hd_model_spec *s, const weights_view *v) {
    if (s->family != HD_FAMILY_V32) return HD_OK;
    HD_TRY(weights_int(v, "index_n_heads", 1, 4096, &s->index_heads));
    HD_TRY(weights_int(v, "index_head_dim", 1, 8192, &s->index_dim));
    HD_TRY(weights_int(v, "index_topk", 1, 1 << 30, &s->index_topk));
    if (s->q_rank == 0) {
        return weights_refuse(v, HD_EFORMAT, "q_lora_rank", NULL,
                              "the indexer reads the low-rank query");
    }
    if (s->index_dim < s->rope_dim) {
        return weights_refuse(v, HD_EFORMAT, "index_head_dim",
                              weights_find(v, "index_head_dim"),
                              "must not be smaller than qk_rope_head_dim");
    }
    return HD_OK;
}

/* null means one group. An absent key means 8 in one implementation and 1 in another, so it
 * is refused. */
static hd_status read_groups(hd_model_spec *s, const weights_view *v) {
    hd_router_rule *r = &s->route;
    if (!json_object_get(v->object, "n_group")) {
        return weights_refuse(v, HD_EFORMAT, "n_group", NULL, "must be said, null for none");
    }
    HD_TRY(weights_int_or(v, "n_group", 1, r->n_experts, 1, &r->n_groups));
    if (r->n_groups > 1) {
        HD_TRY(weights_int(v, "topk_group", 1, r->n_groups, &r->top_groups));
    } else {
        HD_TRY(weights_int_or(v, "topk_group", 1, 1, 1, &r->top_groups));
    }
    int32_t size = r->n_experts / r->n_groups;
    if (r->n_experts % r->n_groups != 0) {
        return HD_FAIL(v->err, HD_EFORMAT,
                       "%s: key \"n_group\" is %d: must divide n_routed_experts, which is %d",
                       v->file, r->n_groups, r->n_experts);
    }
    if ((int64_t)r->top_groups * size < r->top_k) {
        return HD_FAIL(
            v->err, HD_EFORMAT,
            "%s: key \"num_experts_per_tok\" is %d: the %d chosen groups of %d experts "
            "hold fewer",
            v->file, r->top_k, r->top_groups, size);
    }
    return HD_OK;
}

/* V2: softmax; a group's score, if groups are used, is its best expert's. The weights are
 * never divided by their sum: the library ignores norm_topk_prob here, and no release sets
 * it. */
static hd_status read_route_v2(hd_model_spec *s, const weights_view *v) {
    hd_router_rule *r = &s->route;
    const char *method;
    bool normalize;
    HD_TRY(weights_only_text(v, "scoring_func", "softmax"));
    HD_TRY(weights_text(v, "topk_method", &method));
    HD_TRY(weights_bool_or(v, "norm_topk_prob", false, &normalize));
    if (normalize) weights_notice(s, "config.json: norm_topk_prob has no effect in V2");
    r->score = HD_SCORE_SOFTMAX;
    r->normalize = false;
    if (!method || strcmp(method, "greedy") == 0) {
        r->n_groups = r->top_groups = 1;
        weights_find(v, "n_group");
        weights_find(v, "topk_group");
        return HD_OK;
    }
    if (strcmp(method, "group_limited_greedy") != 0) {
        return weights_refuse(v, HD_EUNSUPPORTED, "topk_method", weights_find(v, "topk_method"),
                              "must be \"greedy\" or \"group_limited_greedy\"");
    }
    HD_TRY(read_groups(s, v));
    if (r->n_groups > 1) r->group_rule = HD_GROUPS_MAX;
    return HD_OK;
}

static hd_status read_route_v3(hd_model_spec *s, const weights_view *v) {
    hd_router_rule *r = &s->route;
    HD_TRY(weights_only_text(v, "scoring_func", "sigmoid"));
    HD_TRY(weights_only_text(v, "topk_method", "noaux_tc"));
    HD_TRY(weights_bool_or(v, "norm_topk_prob", true, &r->normalize));
    HD_TRY(read_groups(s, v));
    r->score = HD_SCORE_SIGMOID;
    if (r->n_groups == 1) return HD_OK;
    r->group_rule = HD_GROUPS_TOP2SUM;
    if (r->n_experts / r->n_groups < 2) {
        return weights_refuse(
            v, HD_EFORMAT, "n_group", weights_find(v, "n_group"),
            "a group must hold at least 2 experts: it counts as its best two");
    }
    return HD_OK;
}

/* Reads which layers are dense: a list, or the first ones and then by a frequency. */
static hd_status read_mlp_kinds(hd_model_spec *s, const weights_view *v) {
    int32_t first, freq;
    const json_t *kinds;
    int32_t usual = s->family == HD_FAMILY_V2 ? 0 : 3; /* the library's defaults */
    HD_TRY(weights_int_or(v, "first_k_dense_replace", 0, 512, usual, &first));
    HD_TRY(weights_int_or(v, "moe_layer_freq", 1, 512, 1, &freq));
    HD_TRY(weights_array(v, "mlp_layer_types", &kinds));
    if (kinds && json_array_size(kinds) != (size_t)s->n_layers) {
        return HD_FAIL(
            v->err, HD_EFORMAT,
            "%s: key \"mlp_layer_types\" has %zu entries: must be num_hidden_layers, "
            "which is %d",
            v->file, json_array_size(kinds), s->n_layers);
    }
    bool any_dense = false;
    for (int32_t l = 0; l < s->n_layers; l++) {
        bool dense = l < first || l % freq != 0;
        if (kinds) {
            const char *kind = json_string_value(json_array_get(kinds, (size_t)l));
            if (!kind || (strcmp(kind, "dense") != 0 && strcmp(kind, "sparse") != 0)) {
                return weights_refuse(v, HD_EFORMAT, "mlp_layer_types", kinds,
                                      "entries must be \"dense\" or \"sparse\"");
            }
            dense = strcmp(kind, "dense") == 0;
        }
        s->layers[l].mlp = dense ? HD_MLP_DENSE : HD_MLP_MOE;
        any_dense = any_dense || dense;
    }
    if (any_dense) HD_TRY(weights_int(v, "intermediate_size", 1, 1 << 22, &s->dense_inter));
    return HD_OK;
}

/* All layers of a family have the same attention. V3.2's is called deepseek_sparse_attention
 * by release 5.17 of the Hugging Face library and indexed_attention by later ones. */
static hd_status check_layer_types(hd_model_spec *s, const weights_view *v) {
    static const char *const sparse[] = {"deepseek_sparse_attention", "indexed_attention"};
    static const char *const full[] = {"full_attention", "full_attention"};
    const char *const *known = s->family == HD_FAMILY_V32 ? sparse : full;
    const json_t *types;
    HD_TRY(weights_array(v, "layer_types", &types));
    for (size_t i = 0; i < json_array_size(types); i++) {
        const char *type = json_string_value(json_array_get(types, i));
        if (type && (strcmp(type, known[0]) == 0 || strcmp(type, known[1]) == 0)) continue;
        char why[96];
        snprintf(why, sizeof why, "entries must be \"%s\"", known[0]);
        return weights_refuse(v, HD_EUNSUPPORTED, "layer_types", types, why);
    }
    return HD_OK;
}

hd_status weights_config_mla(hd_model_spec *s, const weights_view *v) {
    HD_TRY(read_attention(s, v));
    HD_TRY(read_indexer(s, v));
    if (s->family == HD_FAMILY_V2) {
        HD_TRY(read_route_v2(s, v));
    } else {
        HD_TRY(read_route_v3(s, v));
    }
    HD_TRY(read_mlp_kinds(s, v));
    HD_TRY(check_layer_types(s, v));
    if (s->family == HD_FAMILY_V2 && s->n_mtp > 0) {
        return weights_refuse(v, HD_EUNSUPPORTED, "num_nextn_predict_layers",
                              weights_find(v, "num_nextn_predict_layers"),
                              "V2 has no multi-token prediction");
    }
    for (int32_t l = 0; l < s->n_layers + s->n_mtp; l++) {
        bool sparse = s->family == HD_FAMILY_V32;
        s->layers[l].attention = sparse ? HD_ATTN_MLA_SPARSE : HD_ATTN_MLA;
        if (l >= s->n_layers) s->layers[l].mlp = HD_MLP_MOE;
    }
    return HD_OK;
}
