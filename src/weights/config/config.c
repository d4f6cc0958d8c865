/* config.c - reads config.json and generation_config.json into hd_model_spec.
 *
 * This file reads what all families share: the family, sizes, token ids, notices. Attention
 * and experts are in config_mla.c, config_v4.c and config_v41.c, rotary embedding and quantization in
 * config_rope.c, access to one key in config_view.c. */
#include "weights/config/config_internal.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/checked.h"
#include "base/file.h"
#include "base/json.h"

enum { MAX_CONFIG_BYTES = 8 << 20 };

static const struct {
    const char *architecture;
    const char *model_type;
} families[HD_N_FAMILIES] = {
    [HD_FAMILY_V2] = {"DeepseekV2ForCausalLM",  "deepseek_v2" },
    [HD_FAMILY_V3] = {"DeepseekV3ForCausalLM",  "deepseek_v3" },
    [HD_FAMILY_V32] = {"DeepseekV32ForCausalLM", "deepseek_v32"},
    [HD_FAMILY_V4] = {"DeepseekV4ForCausalLM",  "deepseek_v4" },
    [HD_FAMILY_V41] = {"DeepseekV41ForCausalLM", "deepseek_v41"},
};

/* Keys that do not concern inference, or repeat other keys. */
static const char *const silent_keys[] = {
    "_name_or_path",
    "aux_loss_alpha",
    "attention_dropout",
    "ep_size",
    "first_k_dense_replace",
    "head_dim",
    "image_token_id",
    "initializer_range",
    "intermediate_size",
    "num_key_value_heads",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "qk_head_dim",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "scale_fmt",
    "seq_aux",
    "transformers_version",
    "use_cache",
    "use_return_dict",
};

/* Keys that name code to run with the model. */
static const char *const code_keys[] = {"auto_map", "custom_pipelines", "trust_remote_code"};

const char *hd_family_name(hd_family f) {
    return f >= 0 && f < HD_N_FAMILIES ? families[f].model_type : "unknown";
}

const char *hd_drafter_name(hd_drafter d) {
    static const char *const names[] = {"none", "mtp", "dspark"};
    return names[d];
}

const char *hd_attention_name(hd_attention a) {
    static const char *const names[] = {
#define X(kind, name, description) [kind] = #name,
        HD_ATTENTION_KINDS(X)
#undef X
    };
    return names[a];
}

const char *hd_attention_description(hd_attention a) {
    static const char *const descriptions[] = {
#define X(kind, name, description) [kind] = description,
        HD_ATTENTION_KINDS(X)
#undef X
    };
    return descriptions[a];
}

/* Returns the family of model_type, or HD_N_FAMILIES. */
static hd_family family_of_type(const char *type) {
    int f = 0;
    if (strcmp(type, "kimi_k2") == 0) return HD_FAMILY_V3; /* V3 in other sizes */
    while (f < HD_N_FAMILIES && strcmp(type, families[f].model_type) != 0) f++;
    return (hd_family)f;
}

/* The class decides, and model_type must agree; a file without classes has only model_type. */
static hd_status read_family(hd_model_spec *s, const weights_view *v) {
    static const char list[] = "supported are DeepseekV2ForCausalLM, DeepseekV3ForCausalLM, "
                               "DeepseekV32ForCausalLM, DeepseekV4ForCausalLM and "
                               "DeepseekV41ForCausalLM";
    const json_t *names;
    const char *type;
    HD_TRY(weights_array(v, "architectures", &names));
    HD_TRY(weights_text(v, "model_type", &type));
    const hd_family named = type ? family_of_type(type) : HD_N_FAMILIES;
    if (!names && named < HD_N_FAMILIES) {
        s->family = named;
        snprintf(s->architecture, sizeof s->architecture, "%s", families[named].architecture);
        return HD_OK;
    }
    const char *name = json_string_value(json_array_get(names, 0));
    if (!name) return weights_refuse(v, HD_EFORMAT, "architectures", names, list);
    for (int f = 0; f < HD_N_FAMILIES; f++) {
        if (strcmp(name, families[f].architecture) != 0) continue;
        s->family = (hd_family)f;
        snprintf(s->architecture, sizeof s->architecture, "%s", name);
        if (!type || named == s->family) return HD_OK;
        return HD_FAIL(
            v->err, HD_EFORMAT,
            "%s: key \"model_type\" is \"%.64s\" but \"architectures\" says %s, whose "
            "model type is \"%s\"",
            v->file, type, name, families[f].model_type);
    }
    return weights_refuse(v, HD_EUNSUPPORTED, "architectures", names, list);
}

/* torch_dtype is the key of a format without scales. */
static hd_status read_dtype(hd_model_spec *s, const weights_view *v) {
    const char *keys[] = {"dtype", "torch_dtype"}; /* the new spelling first */
    s->dtype = HD_BF16;
    for (size_t k = 0; k < HD_LEN(keys); k++) {
        const char *text;
        HD_TRY(weights_text(v, keys[k], &text));
        if (!text) continue;
        for (int f = 0; f < HD_N_FORMATS; f++) {
            const hd_format_row *row = &hd_formats[f];
            if (row->type == HD_NONE || row->scale_types[0] != HD_NONE) continue;
            if (strcmp(text, row->key) != 0) continue;
            s->dtype = row->type;
            return HD_OK;
        }
        return weights_refuse(v, HD_EFORMAT, keys[k], weights_find(v, keys[k]),
                              "must be \"bfloat16\", \"float16\" or \"float32\"");
    }
    return HD_OK;
}

/* Reads the keys of every family. The ranges keep each product of two sizes within 32 bits. */
static hd_status read_common(hd_model_spec *s, const weights_view *v) {
    double eps, scale;
    HD_TRY(weights_int(v, "vocab_size", 1, 1 << 24, &s->vocab));
    HD_TRY(weights_int(v, "hidden_size", 1, 65536, &s->hidden));
    HD_TRY(weights_int(v, "num_hidden_layers", 1, 512, &s->n_layers));
    HD_TRY(weights_int(v, "num_attention_heads", 1, 4096, &s->n_heads));
    HD_TRY(weights_int_or(v, "num_nextn_predict_layers", 0, 16, 0, &s->n_mtp));
    HD_TRY(weights_int(v, "max_position_embeddings", 1, 1 << 30, &s->max_positions));
    HD_TRY(weights_real(v, "rms_norm_eps", 1e-20, 1e-2, &eps));
    HD_TRY(weights_bool_or(v, "tie_word_embeddings", false, &s->tied_embeddings));
    HD_TRY(weights_only_text(v, "hidden_act", "silu"));
    HD_TRY(weights_only_bool(v, "attention_bias", false));
    HD_TRY(weights_only_bool(v, "mlp_bias", false));
    s->norm_eps = (float)eps;

    hd_router_rule *r = &s->route;
    HD_TRY(weights_int(v, "moe_intermediate_size", 1, 1 << 20, &s->moe_inter));
    HD_TRY(weights_int(v, "n_routed_experts", 1, 16384, &r->n_experts));
    HD_TRY(weights_int(v, "num_experts_per_tok", 1, r->n_experts, &r->top_k));
    HD_TRY(weights_int_or(v, "n_shared_experts", 0, 64, 0, &s->n_shared));
    HD_TRY(weights_real(v, "routed_scaling_factor", 1e-6, 1e6, &scale));
    r->scale = (float)scale;
    return read_dtype(s, v);
}

/* One id or a list of them, each in the vocabulary and once. */
static hd_status read_eos(hd_model_spec *s, const weights_view *v) {
    const json_t *value = weights_find(v, "eos_token_id");
    size_t n = json_is_array(value) ? json_array_size(value) : (value != NULL);
    for (size_t i = 0; i < n; i++) {
        const json_t *entry = json_is_array(value) ? json_array_get(value, i) : value;
        int64_t id = json_integer_value(entry);
        bool known = false;
        if (!json_is_integer(entry) || id < 0 || id >= s->vocab) {
            return weights_refuse(v, HD_EFORMAT, "eos_token_id", value,
                                  "must be token ids below vocab_size");
        }
        for (int32_t k = 0; k < s->n_eos; k++) known = known || s->eos[k] == id;
        if (known) continue;
        if (s->n_eos == HD_MAX_EOS) {
            return weights_refuse(v, HD_EUNSUPPORTED, "eos_token_id", value,
                                  "more than " HD_STR(8) " different ids");
        }
        s->eos[s->n_eos++] = (int32_t)id;
    }
    return HD_OK;
}
_Static_assert(HD_MAX_EOS == 8, "the sentence in read_eos says 8");

/* Reads sampling defaults and further stop tokens. Errors in this file never refuse a model;
 * they are ignored with a notice. */
static hd_status read_generation(hd_model_spec *s, const char *dir) {
    char *path = hd_path_join(dir, "generation_config.json");
    if (!path) return HD_ENOMEM;
    json_t *root = NULL;
    hd_err err = {0};
    if (hd_file_exists(path)) {
        hd_status st = hd_json_load(&root, path, MAX_CONFIG_BYTES, &err);
        if (st != HD_OK) weights_notice(s, "generation_config.json cannot be read: ignored");
    }
    const weights_view v = {.file = path, .section = "", .object = root, .err = NULL};
    if (root && !json_is_object(root)) {
        weights_notice(s, "generation_config.json is not an object: ignored");
    } else if (root) {
        bool sample;
        if (weights_real_or(&v, "temperature", 0, 100, 1, &s->temperature) != HD_OK) {
            weights_notice(s, "generation_config.json: temperature is not in 0..100: ignored");
        }
        if (weights_real_or(&v, "top_p", 1e-6, 1, 1, &s->top_p) != HD_OK) {
            weights_notice(s, "generation_config.json: top_p is not in 0..1: ignored");
        }
        if (weights_int_or(&v, "top_k", 0, INT32_MAX, 0, &s->top_k) != HD_OK) {
            weights_notice(s, "generation_config.json: top_k is not a count: ignored");
        }
        if (weights_real_or(&v, "min_p", 0, 1, 0, &s->min_p) != HD_OK) {
            weights_notice(s, "generation_config.json: min_p is not in 0..1: ignored");
        }
        if (weights_real_or(&v, "repetition_penalty", 1e-6, 100, 1, &s->repetition_penalty) !=
            HD_OK) {
            weights_notice(s, "generation_config.json: repetition_penalty is not in 0..100: "
                              "ignored");
        }
        if (weights_bool_or(&v, "do_sample", true, &sample) == HD_OK && !sample) {
            s->temperature = 0;
        }
        if (read_eos(s, &v) != HD_OK) {
            weights_notice(s, "generation_config.json: eos_token_id is not usable: ignored");
        }
    }
    json_decref(root);
    free(path);
    return HD_OK;
}

static hd_status read_tokens(hd_model_spec *s, const weights_view *v, const char *dir) {
    s->temperature = s->top_p = s->repetition_penalty = 1;
    HD_TRY(weights_int_or(v, "bos_token_id", 0, s->vocab - 1, -1, &s->bos));
    HD_TRY(read_eos(s, v));
    if (dir) HD_TRY(read_generation(s, dir));
    if (s->n_eos > 0) return HD_OK;
    return weights_refuse(v, HD_EFORMAT, "eos_token_id", weights_find(v, "eos_token_id"),
                          "the model could never stop");
}

static bool listed(const char *key, const char *const *list, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (strcmp(key, list[i]) == 0) return true;
    }
    return false;
}

/* Adds one notice for code, and one with the number of unknown keys. */
static void note_unknown(hd_model_spec *s, const weights_view *v, json_t *root) {
    const char *key;
    json_t *value;
    int unknown = 0;
    char first[41] = "";
    json_object_foreach(root, key, value) {
        if (listed(key, code_keys, HD_LEN(code_keys))) {
            weights_notice(s, "config.json names code (%s): ignored, nothing is run", key);
            continue;
        }
        if (json_object_get(v->seen, key)) continue;
        if (listed(key, silent_keys, HD_LEN(silent_keys))) continue;
        if (unknown++ > 0) continue;
        for (size_t i = 0; i + 1 < sizeof first && key[i]; i++) {
            first[i] = key[i] > ' ' && key[i] <= '~' ? key[i] : '?';
        }
    }
    if (unknown == 1) weights_notice(s, "config.json: unknown key %s ignored", first);
    if (unknown > 1) {
        weights_notice(s, "config.json: %d unknown keys ignored, the first is %s", unknown,
                       first);
    }
}

static hd_status read_document(hd_model_spec *s, const weights_view *v, const char *dir) {
    HD_TRY(read_family(s, v));
    HD_TRY(read_common(s, v));
    s->drafter = s->n_mtp > 0 ? HD_DRAFTER_MTP : HD_DRAFTER_NONE;
    s->draft_experts = s->route.n_experts;
    s->draft_top_k = s->route.top_k;
    if (hd_is_hybrid(s)) HD_TRY(weights_config_dspark(s, v));
    s->layers = calloc((size_t)s->n_layers + (size_t)s->n_mtp, sizeof *s->layers);
    if (!s->layers) {
        return HD_FAIL(v->err, HD_ENOMEM, "%s: no memory for %d layers", v->file, s->n_layers);
    }
    for (int32_t l = 0; l < s->n_layers + s->n_mtp; l++) s->layers[l].engram = -1;
    s->pool_layer = -1;
    if (s->family == HD_FAMILY_V4) {
        HD_TRY(weights_config_v4(s, v));
    } else if (s->family == HD_FAMILY_V41) {
        HD_TRY(weights_config_v41(s, v));
    } else {
        HD_TRY(weights_config_mla(s, v));
    }
    HD_TRY(weights_config_rope(s, v));
    HD_TRY(weights_config_quant(s, v));
    return read_tokens(s, v, dir);
}

/* Lifts the keys of text_config, which models of text and images have, to the top of the
 * document; a key at the top stays as it is. */
static void lift_text(json_t *root) {
    json_t *text = json_object_get(root, "text_config");
    if (!json_is_object(text)) return;
    json_object_update_missing(root, text);
    json_object_del(root, "text_config");
}

static hd_status read_config(hd_model_spec **out, const char *file, const char *dir,
                             hd_err *err) {
    json_t *root = NULL;
    HD_TRY(hd_json_load(&root, file, MAX_CONFIG_BYTES, err));
    lift_text(root);
    json_t *seen = json_object();
    hd_model_spec *s = calloc(1, sizeof *s);
    const weights_view v = {
        .file = file, .section = "", .object = root, .seen = seen, .err = err};
    hd_status st = HD_OK;
    if (!seen || !s) {
        st = HD_FAIL(err, HD_ENOMEM, "%s: no memory for the model spec", file);
    } else if (!json_is_object(root)) {
        st = HD_FAIL(err, HD_EFORMAT, "%s: must hold a JSON object", file);
    } else {
        st = read_document(s, &v, dir);
    }
    if (st == HD_OK) {
        note_unknown(s, &v, root);
        *out = s;
    } else {
        hd_model_spec_close(s);
    }
    json_decref(seen);
    json_decref(root);
    return st;
}

hd_status hd_model_spec_open(hd_model_spec **out, const char *path, hd_err *err) {
    *out = NULL;
    struct stat info;
    bool is_dir = stat(path, &info) == 0 && S_ISDIR(info.st_mode);
    if (!is_dir) return read_config(out, path, NULL, err);
    char *file = hd_path_join(path, "config.json");
    if (!file) return HD_FAIL(err, HD_ENOMEM, "%s: no memory for a path", path);
    hd_status st = read_config(out, file, path, err);
    free(file);
    return st;
}

void hd_model_spec_keep_layers(hd_model_spec *s, int32_t n) {
    const int32_t all = s->n_layers;
    hd_engram_spec *e = &s->engram;
    s->n_layers = hd_min_i32(all, n);
    for (int32_t i = 0; i < s->n_mtp; i++) s->layers[s->n_layers + i] = s->layers[all + i];
    while (e->n_layers > 0 && e->layers[e->n_layers - 1] >= s->n_layers) e->n_layers--;
}

void hd_model_spec_close(hd_model_spec *s) {
    if (!s) return;
    free(s->layers);
    free(s);
}
