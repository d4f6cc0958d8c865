/* summary.c - counts parameters and bytes by part. */
#include "weights/summary.h"

#include "base/checked.h"

static const char *const part_names[HD_N_PARAM_GROUPS] = {
#define X(part, name) [HD_PARAM_GROUP_##part] = name,
    HD_PARAM_GROUP_LIST(X)
#undef X
};

const char *hd_param_group_name(hd_param_group p) {
    return p >= 0 && p < HD_N_PARAM_GROUPS ? part_names[p] : "unknown";
}

hd_param_group hd_param_group_of(hd_role r) {
    switch (r) {
    case HD_EMBED:
        return HD_PARAM_GROUP_EMBEDDING;
    case HD_HEAD:
        return HD_PARAM_GROUP_HEAD;
    case HD_Q:
    case HD_Q_A:
    case HD_Q_B:
    case HD_KV_A:
    case HD_KV_B:
    case HD_O:
    case HD_KV:
    case HD_SINK:
    case HD_O_A:
    case HD_O_B:
        return HD_PARAM_GROUP_ATTENTION;
    case HD_INDEX_Q_B:
    case HD_INDEX_K:
    case HD_INDEX_K_NORM:
    case HD_INDEX_K_BIAS:
    case HD_INDEX_WEIGHTS:
    case HD_INDEX_COMP_APE:
    case HD_INDEX_COMP_KV:
    case HD_INDEX_COMP_GATE:
    case HD_INDEX_COMP_NORM:
        return HD_PARAM_GROUP_INDEXER;
    case HD_COMP_APE:
    case HD_COMP_KV:
    case HD_COMP_GATE:
    case HD_COMP_NORM:
        return HD_PARAM_GROUP_COMPRESSOR;
    case HD_HC_HEAD_FN:
    case HD_HC_HEAD_BASE:
    case HD_HC_HEAD_SCALE:
    case HD_HC_ATTN_FN:
    case HD_HC_ATTN_BASE:
    case HD_HC_ATTN_SCALE:
    case HD_HC_FFN_FN:
    case HD_HC_FFN_BASE:
    case HD_HC_FFN_SCALE:
        return HD_PARAM_GROUP_HYPER;
    case HD_DENSE_GATE:
    case HD_DENSE_UP:
    case HD_DENSE_DOWN:
        return HD_PARAM_GROUP_DENSE;
    case HD_ROUTER:
    case HD_ROUTER_BIAS:
    case HD_ROUTER_IMAGE_BIAS:
        return HD_PARAM_GROUP_ROUTER;
    case HD_ROUTER_HASH:
        return HD_PARAM_GROUP_HASH;
    case HD_SHARED_GATE:
    case HD_SHARED_UP:
    case HD_SHARED_DOWN:
        return HD_PARAM_GROUP_SHARED;
    case HD_EXPERT_GATE:
    case HD_EXPERT_UP:
    case HD_EXPERT_DOWN:
        return HD_PARAM_GROUP_EXPERTS;
    case HD_FINAL_NORM:
    case HD_ATTN_NORM:
    case HD_FFN_NORM:
    case HD_Q_A_NORM:
    case HD_KV_A_NORM:
    case HD_KV_NORM:
    case HD_MTP_EMBED_NORM:
    case HD_MTP_HIDDEN_NORM:
    case HD_DSPARK_NORM:
        return HD_PARAM_GROUP_NORMS;
    case HD_MTP_PROJ:
    case HD_MTP_E_PROJ:
    case HD_MTP_H_PROJ:
    case HD_DSPARK_PROJ:
        return HD_PARAM_GROUP_PROJECTION;
    case HD_DSPARK_MARKOV_EMBED:
    case HD_DSPARK_MARKOV_HEAD:
    case HD_DSPARK_CONFIDENCE:
        return HD_PARAM_GROUP_DRAFT_HEADS;
    case HD_ENGRAM_TABLE:
    case HD_ENGRAM_KV:
    case HD_ENGRAM_Q:
    case HD_ENGRAM_K:
        return HD_PARAM_GROUP_ENGRAM;
    case HD_VISION:
        return HD_PARAM_GROUP_VISION;
    case HD_N_ROLES:
        break;
    }
    return HD_N_PARAM_GROUPS;
}

/* Kept in float32 by every official file. */
static bool always_f32(hd_role r) {
    switch (hd_param_group_of(r)) {
    case HD_PARAM_GROUP_HYPER:
        return true;
    default:
        break;
    }
    return r == HD_ROUTER_BIAS || r == HD_ROUTER_IMAGE_BIAS || r == HD_SINK ||
           r == HD_COMP_APE || r == HD_INDEX_COMP_APE || r == HD_INDEX_K_BIAS;
}

/* Matrices that FP8 models quantize: projections and MLPs. */
static bool in_fp8(const hd_model_spec *spec, hd_role r) {
    switch (hd_param_group_of(r)) {
    case HD_PARAM_GROUP_ATTENTION:
        return r != HD_SINK;
    case HD_PARAM_GROUP_INDEXER:
        return r == HD_INDEX_Q_B || (r == HD_INDEX_K && spec->family == HD_FAMILY_V32);
    case HD_PARAM_GROUP_ENGRAM:
        return r == HD_ENGRAM_KV;
    case HD_PARAM_GROUP_DENSE:
    case HD_PARAM_GROUP_EXPERTS:
    case HD_PARAM_GROUP_SHARED:
        return true;
    case HD_PARAM_GROUP_PROJECTION:
        return r != HD_MTP_PROJ;
    default:
        return false;
    }
}

/* The format that quantization_config and expert_dtype declare for a tensor. */
static hd_format quantized(const hd_model_spec *spec, const hd_tensor_decl *d) {
    const hd_quant_spec *q = &spec->quant;
    const hd_param_group part = hd_param_group_of(d->role);
    const bool in_experts = part == HD_PARAM_GROUP_EXPERTS;
    const bool in_mlp = part == HD_PARAM_GROUP_DENSE || part == HD_PARAM_GROUP_SHARED;
    if (q->experts == HD_FORMAT_NVFP4 && d->layer < spec->n_layers &&
        (in_experts || (in_mlp && q->method == HD_QUANT_MODELOPT))) {
        return HD_FORMAT_NVFP4;
    }
    if (hd_is_hybrid(spec) && in_experts && q->experts != HD_FORMAT_NONE) {
        return q->experts == HD_FORMAT_NVFP4 ? HD_FORMAT_FP4 : q->experts; /* its MTP layers */
    }
    if (q->method == HD_QUANT_FP8 && d->role == HD_ENGRAM_TABLE) return HD_FORMAT_MXFP8;
    if (q->method == HD_QUANT_FP8 && in_fp8(spec, d->role)) return HD_FORMAT_FP8;
    return HD_FORMAT_NONE;
}

hd_stored_format hd_declared_format(const hd_model_spec *spec, const hd_tensor_decl *d) {
    if (d->role == HD_ROUTER_HASH) return (hd_stored_format){.type = HD_I64};
    if (always_f32(d->role) || (d->role == HD_INDEX_K_NORM && spec->family == HD_FAMILY_V32)) {
        return (hd_stored_format){.type = HD_F32};
    }
    const hd_format format = quantized(spec, d);
    if (format == HD_FORMAT_NONE) return (hd_stored_format){.type = spec->dtype};
    hd_stored_format f = hd_format_stored(format);
    if (hd_formats[format].block_declared) {
        f.block_rows = spec->quant.block_rows;
        f.block_cols = spec->quant.block_cols;
        if (hd_is_hybrid(spec)) f.scale_type = HD_E8M0;
    }
    return f;
}

/* Buffers that are not trained by gradient, so they do not count as parameters. */
static bool is_buffer(hd_role r) {
    return r == HD_ROUTER_BIAS || r == HD_ROUTER_IMAGE_BIAS || r == HD_ROUTER_HASH;
}

static void add_arrays(hd_param_group_sum *p, hd_dtype type, int64_t n, int64_t bytes) {
    p->n_arrays[type] += n;
    p->bytes_by_type[type] += bytes;
    p->bytes += bytes;
}

/* The part of a tensor that one token reads. All experts of a layer have one shape, so any top_k
 * of them represent the selected ones. */
static int64_t active_params(const hd_model_spec *spec, const hd_tensor_decl *d, int32_t rows,
                             int32_t cols) {
    if (d->unused) return 0;
    if (d->role == HD_ENGRAM_TABLE) return (int64_t)spec->engram.columns * cols;
    if (d->expert >= hd_layer_route(spec, d->layer).top_k) return 0;
    return (int64_t)rows * cols;
}

void hd_summary_add(hd_summary *sum, const hd_model_spec *spec, const hd_tensor_decl *decl,
                    int32_t rows, int32_t cols, const hd_stored_format *f) {
    if (rows == 0 || cols == 0) return;
    hd_param_group part = hd_param_group_of(decl->role);
    hd_param_group_sum *p = decl->layer >= spec->n_layers ? &sum->mtp[part] : &sum->main[part];
    int64_t n = (int64_t)rows * cols;
    if (!is_buffer(decl->role)) {
        p->params += n;
        p->active += active_params(spec, decl, rows, cols);
    }
    add_arrays(p, f->type, 1, (int64_t)hd_stored_data_bytes(f, rows, cols));
    if (f->scale_type != HD_NONE) {
        add_arrays(p, f->scale_type, 1, (int64_t)hd_stored_scale_bytes(f, rows, cols));
    }
    if (f->n_scalars > 0) add_arrays(p, HD_F32, f->n_scalars, (int64_t)4 * f->n_scalars);
}

void hd_summarize(hd_summary *out, const hd_model_spec *spec, const hd_schema *schema) {
    *out = (hd_summary){0};
    for (int32_t i = 0; i < schema->n; i++) {
        const hd_tensor_decl *d = &schema->decls[i];
        if (d->duplicate && d->layer == HD_GLOBAL) continue;
        hd_stored_format f = hd_declared_format(spec, d);
        hd_summary_add(out, spec, d, d->rows, d->cols, &f);
    }
}

static hd_param_group_sum total(const hd_param_group_sum *parts) {
    hd_param_group_sum sum = {0};
    for (int p = 0; p < HD_N_PARAM_GROUPS; p++) {
        sum.params += parts[p].params;
        sum.active += parts[p].active;
        sum.bytes += parts[p].bytes;
        for (int t = 0; t < HD_N_DTYPES; t++) {
            sum.n_arrays[t] += parts[p].n_arrays[t];
            sum.bytes_by_type[t] += parts[p].bytes_by_type[t];
        }
    }
    return sum;
}

hd_param_group_sum hd_summary_main(const hd_summary *s) {
    return total(s->main);
}

hd_param_group_sum hd_summary_mtp(const hd_summary *s) {
    return total(s->mtp);
}
