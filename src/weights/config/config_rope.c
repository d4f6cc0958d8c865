/* config_rope.c - reads rotary embedding (RoPE, YaRN) and quantization from config.json. */
#include "weights/config/config_internal.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* YaRN's magnitude: models.md 2.1.5. */
static double yarn_m(double factor, double mscale) {
    return factor > 1 ? 0.1 * mscale * log(factor) + 1 : 1;
}

/* V4 never scales cos and sin. In the other families the two coefficients form a ratio, and
 * the library falls back to m(factor, 1) unless both are present. */
static hd_status read_magnitude(hd_rope_spec *rope, const weights_view *d, bool v4) {
    double given;
    HD_TRY(weights_real_or(d, "mscale", 0, 100, 0, &rope->mscale));
    HD_TRY(weights_real_or(d, "mscale_all_dim", 0, 100, 0, &rope->mscale_all_dim));
    HD_TRY(weights_real_or(d, "attention_factor", 1e-6, 1e6, 0, &given));
    if (v4) {
        rope->mscale = rope->mscale_all_dim = 0;
        rope->magnitude = 1;
        if (given != 0 && given != 1) {
            return weights_refuse(d, HD_EUNSUPPORTED, "attention_factor",
                                  weights_find(d, "attention_factor"), "must be 1 in V4");
        }
    } else if (given != 0) {
        rope->magnitude = given;
    } else if (rope->mscale != 0 && rope->mscale_all_dim != 0) {
        rope->magnitude =
            yarn_m(rope->factor, rope->mscale) / yarn_m(rope->factor, rope->mscale_all_dim);
    } else {
        rope->magnitude = yarn_m(rope->factor, 1);
    }
    return HD_OK;
}

/* d: the object with type, factor and so on; its object may be NULL. */
static hd_status read_scaling(hd_rope_spec *rope, const weights_view *d, bool v4) {
    rope->factor = rope->magnitude = 1;
    if (!d->object) return HD_OK;
    const char *type, *old;
    HD_TRY(weights_text(d, "rope_type", &type));
    HD_TRY(weights_text(d, "type", &old));
    const char *key = type ? "rope_type" : "type";
    if (!type) type = old;
    if (!type || strcmp(type, "default") == 0) return HD_OK;
    if (strcmp(type, "yarn") != 0) {
        return weights_refuse(d, HD_EUNSUPPORTED, key, weights_find(d, key),
                              "must be \"yarn\" or \"default\"");
    }
    HD_TRY(weights_only_bool(d, "truncate", true));
    HD_TRY(weights_real(d, "factor", 1, 1e6, &rope->factor));
    HD_TRY(weights_real(d, "original_max_position_embeddings", 1, 1e12, &rope->original_len));
    HD_TRY(weights_real_or(d, "beta_fast", 1e-3, 1e6, 32, &rope->beta_fast));
    HD_TRY(weights_real_or(d, "beta_slow", 1e-3, 1e6, 1, &rope->beta_slow));
    if (rope->beta_fast < rope->beta_slow) {
        return weights_refuse(d, HD_EFORMAT, "beta_fast", weights_find(d, "beta_fast"),
                              "must not be smaller than beta_slow");
    }
    return read_magnitude(rope, d, v4);
}

/* Reads theta: inside the object, or at the top of the file under theta_key. */
static hd_status read_theta(hd_rope_spec *rope, const weights_view *v, const weights_view *d,
                            const char *theta_key) {
    double top; /* also checks the key at the top if the object decides */
    HD_TRY(weights_real_or(v, theta_key, 1.001, 1e15, 0, &top));
    if (d->object && weights_find(d, "rope_theta")) {
        return weights_real(d, "rope_theta", 1.001, 1e15, &rope->theta);
    }
    if (top == 0) return weights_real(v, theta_key, 1.001, 1e15, &rope->theta);
    rope->theta = top;
    return HD_OK;
}

static hd_status check_part(const hd_model_spec *s, const weights_view *d) {
    double part;
    if (!d->object || !hd_is_hybrid(s)) return HD_OK;
    HD_TRY(weights_real_or(d, "partial_rotary_factor", 1e-6, 1, 0, &part));
    if (part == 0 || lround(part * s->head_dim) == s->rope_dim) return HD_OK;
    char why[96];
    snprintf(why, sizeof why, "of head_dim %d is not the rotary width %d", s->head_dim,
             s->rope_dim);
    return weights_refuse(d, HD_EFORMAT, "partial_rotary_factor",
                          weights_find(d, "partial_rotary_factor"), why);
}

static hd_status read_v4(hd_model_spec *s, const weights_view *v, const weights_view *outer) {
    weights_view main = {.file = v->file, .section = "rope_parameters.main.", .err = v->err};
    weights_view compress = *outer; /* a flat object describes the compressed layers */
    if (outer->object && (json_object_get(outer->object, "main") ||
                          json_object_get(outer->object, "compress"))) {
        HD_TRY(weights_section(outer, "main", "rope_parameters.main.", &main));
        HD_TRY(weights_section(outer, "compress", "rope_parameters.compress.", &compress));
    }
    HD_TRY(check_part(s, &main));
    HD_TRY(check_part(s, &compress));
    HD_TRY(read_theta(&s->rope, v, &main, "rope_theta"));
    HD_TRY(read_scaling(&s->rope, &main, true));
    if (compress.object == outer->object) {
        /* the flat object may repeat rope_theta, which is the main one */
        weights_view none = {.file = v->file, .section = "", .err = v->err};
        HD_TRY(read_theta(&s->rope_compress, v, &none, "compress_rope_theta"));
    } else {
        HD_TRY(read_theta(&s->rope_compress, v, &compress, "compress_rope_theta"));
    }
    HD_TRY(read_scaling(&s->rope_compress, &compress, true));
    s->softmax_scale = 1 / sqrt(s->head_dim);
    return HD_OK;
}

hd_status weights_config_rope(hd_model_spec *s, const weights_view *v) {
    weights_view d, nested;
    HD_TRY(weights_section(v, "rope_scaling", "rope_scaling.", &d));
    HD_TRY(weights_section(v, "rope_parameters", "rope_parameters.", &nested));
    if (!d.object) d = nested;
    if (hd_is_hybrid(s)) return read_v4(s, v, &d);
    HD_TRY(read_theta(&s->rope, v, &d, "rope_theta"));
    HD_TRY(read_scaling(&s->rope, &d, false));
    double m = s->rope.mscale_all_dim != 0 ? yarn_m(s->rope.factor, s->rope.mscale_all_dim) : 1;
    s->softmax_scale = m * m / sqrt(s->nope_dim + s->rope_dim);
    return HD_OK;
}

static hd_status read_blocks(hd_quant_spec *q, const weights_view *d) {
    const json_t *size;
    HD_TRY(weights_array(d, "weight_block_size", &size));
    q->block_rows = q->block_cols = 128;
    if (!size) return HD_OK;
    int64_t rows = json_integer_value(json_array_get(size, 0));
    int64_t cols = json_integer_value(json_array_get(size, 1));
    if (json_array_size(size) != 2 || rows < 1 || rows > 65536 || cols < 1 || cols > 65536) {
        return weights_refuse(d, HD_EFORMAT, "weight_block_size", size,
                              "must be two integers in 1..65536");
    }
    q->block_rows = (int32_t)rows;
    q->block_cols = (int32_t)cols;
    return HD_OK;
}

static hd_status read_modelopt(hd_quant_spec *q, const weights_view *d) {
    const char *algo;
    HD_TRY(weights_text(d, "quant_algo", &algo));
    if (algo && strcmp(algo, "NVFP4") != 0 && strcmp(algo, "MIXED_PRECISION") != 0) {
        return weights_refuse(d, HD_EUNSUPPORTED, "quant_algo", weights_find(d, "quant_algo"),
                              "must be \"NVFP4\" or \"MIXED_PRECISION\"");
    }
    q->method = HD_QUANT_MODELOPT;
    q->experts = HD_FORMAT_NVFP4;
    return HD_OK;
}

static hd_status read_fp8(hd_quant_spec *q, const weights_view *d) {
    const char *scale, *moe;
    HD_TRY(weights_only_text(d, "fmt", "e4m3"));
    HD_TRY(weights_only_text(d, "activation_scheme", "dynamic"));
    HD_TRY(weights_text(d, "scale_fmt", &scale));
    HD_TRY(weights_text(d, "moe_quant_algo", &moe));
    HD_TRY(read_blocks(q, d));
    q->method = HD_QUANT_FP8;
    q->scale_ue8m0 = scale && strcmp(scale, "ue8m0") == 0;
    if (moe && strcmp(moe, "NVFP4") == 0) q->experts = HD_FORMAT_NVFP4;
    if (scale && !q->scale_ue8m0 && strcmp(scale, "float") != 0) {
        return weights_refuse(d, HD_EUNSUPPORTED, "scale_fmt", weights_find(d, "scale_fmt"),
                              "must be \"ue8m0\" or \"float\"");
    }
    return HD_OK;
}

/* V4 declares its experts as "fp4", "fp8" or, in the earliest file, nothing, which meant
 * FP4. */
static hd_status read_expert_type(hd_model_spec *s, const weights_view *v) {
    static const struct {
        const char *name;
        hd_format experts;
    } types[] = {
        {"fp4",      HD_FORMAT_FP4 },
        {"fp8",      HD_FORMAT_NONE}, /* like the other matrices */
        {"bfloat16", HD_FORMAT_NONE},
    };
    const char *type;
    HD_TRY(weights_text(v, "expert_dtype", &type));
    hd_format experts = s->quant.method == HD_QUANT_FP8 ? HD_FORMAT_FP4 : HD_FORMAT_NONE;
    bool known = !type;
    for (size_t i = 0; i < HD_LEN(types) && !known; i++) {
        known = strcmp(type, types[i].name) == 0;
        if (known) experts = types[i].experts;
    }
    if (!known) {
        return weights_refuse(v, HD_EUNSUPPORTED, "expert_dtype",
                              weights_find(v, "expert_dtype"),
                              "must be \"fp4\", \"fp8\" or \"bfloat16\"");
    }
    if (!hd_is_hybrid(s) || s->quant.experts == HD_FORMAT_NVFP4) return HD_OK;
    s->quant.experts = experts;
    return HD_OK;
}

hd_status weights_config_quant(hd_model_spec *s, const weights_view *v) {
    weights_view d;
    HD_TRY(weights_section(v, "quantization_config", "quantization_config.", &d));
    if (d.object) {
        const char *method;
        HD_TRY(weights_text(&d, "quant_method", &method));
        if (method && strcmp(method, "fp8") == 0) {
            HD_TRY(read_fp8(&s->quant, &d));
        } else if (method &&
                   (strcmp(method, "modelopt") == 0 || strcmp(method, "modelopt_fp4") == 0)) {
            HD_TRY(read_modelopt(&s->quant, &d));
        } else {
            return weights_refuse(&d, HD_EUNSUPPORTED, "quant_method",
                                  weights_find(&d, "quant_method"),
                                  "must be \"fp8\", \"modelopt\" or \"modelopt_fp4\"");
        }
    }
    return read_expert_type(s, weights_find(&d, "expert_dtype") ? &d : v);
}
