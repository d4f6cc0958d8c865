/* inspect_json.c - `hadal inspect --json`: stable keys, described in docs/checkpoints.md. */
#include <jansson.h>
#include <stdio.h>

#include "cli/inspect/inspect_internal.h"

/* jansson's setters take NULL values as failures; one flag at the end is enough. */
typedef struct writer {
    bool failed;
} writer;

static void set(writer *w, json_t *object, const char *key, json_t *value) {
    if (json_object_set_new(object, key, value) != 0) w->failed = true;
}

static void append(writer *w, json_t *array, json_t *value) {
    if (json_array_append_new(array, value) != 0) w->failed = true;
}

static void set_int(writer *w, json_t *object, const char *key, int64_t value) {
    set(w, object, key, json_integer(value));
}

static json_t *rope_json(writer *w, const hd_rope_spec *r) {
    json_t *o = json_object();
    set(w, o, "theta", json_real(r->theta));
    set(w, o, "factor", json_real(r->factor));
    set(w, o, "original_length", json_real(r->original_len));
    return o;
}

static json_t *attention_json(writer *w, const hd_model_spec *s) {
    json_t *o = json_object(), *kinds = json_object();
    for (int k = 0; k < HD_N_ATTENTION_KINDS; k++) {
        int32_t n = inspect_count_attention(s, (hd_attention)k);
        if (n > 0) set_int(w, kinds, hd_attention_name((hd_attention)k), n);
    }
    set(w, o, "layers", kinds);
    set_int(w, o, "heads", s->n_heads);
    set_int(w, o, "query_rank", s->q_rank);
    set_int(w, o, "rope_dim", s->rope_dim);
    set(w, o, "rope", rope_json(w, &s->rope));
    if (hd_is_hybrid(s)) {
        set(w, o, "rope_compress", rope_json(w, &s->rope_compress));
        set_int(w, o, "head_dim", s->head_dim);
        set_int(w, o, "window", s->window);
        set_int(w, o, "csa_ratio", s->csa_ratio);
        set_int(w, o, "hca_ratio", s->hca_ratio);
        set_int(w, o, "output_groups", s->o_groups);
        set_int(w, o, "output_rank", s->o_rank);
    } else {
        set_int(w, o, "kv_rank", s->kv_rank);
        set_int(w, o, "nope_dim", s->nope_dim);
        set_int(w, o, "value_dim", s->v_dim);
    }
    set_int(w, o, "index_heads", s->index_heads);
    set_int(w, o, "index_dim", s->index_dim);
    set_int(w, o, "index_topk", s->index_topk);
    return o;
}

static json_t *experts_json(writer *w, const hd_model_spec *s) {
    json_t *o = json_object();
    set_int(w, o, "routed", s->route.n_experts);
    set_int(w, o, "per_token", s->route.top_k);
    set_int(w, o, "shared", s->n_shared);
    set_int(w, o, "groups", s->route.n_groups);
    set_int(w, o, "top_groups", s->route.top_groups);
    set_int(w, o, "width", s->moe_inter);
    return o;
}

static json_t *quantization_json(writer *w, const hd_model_spec *s) {
    const hd_format experts = s->quant.experts;
    const char *key = experts == HD_FORMAT_NONE ? "like_rest" : hd_formats[experts].key;
    json_t *o = json_object(), *block = json_array();
    append(w, block, json_integer(s->quant.block_rows));
    append(w, block, json_integer(s->quant.block_cols));
    set(w, o, "method", json_string(inspect_quant_name(s->quant.method)));
    set(w, o, "block", block);
    set(w, o, "scale_ue8m0", json_boolean(s->quant.scale_ue8m0));
    set(w, o, "experts", json_string(key));
    set(w, o, "dtype", json_string(hd_dtype_name(s->dtype)));
    return o;
}

static json_t *model_json(writer *w, const inspection *in) {
    const hd_model_spec *s = in->spec;
    json_t *o = json_object(), *mlp = json_object();
    for (int k = HD_MLP_DENSE; k <= HD_MLP_MOE_HASH; k++) {
        int32_t n = inspect_count_mlp(s, (hd_mlp)k);
        if (n > 0) set_int(w, mlp, inspect_mlp_name((hd_mlp)k), n);
    }
    set_int(w, o, "layers", s->n_layers);
    set(w, o, "mlp_layers", mlp);
    set(w, o, "drafter", json_string(hd_drafter_name(s->drafter)));
    set_int(w, o, "mtp_declared", s->n_mtp);
    set_int(w, o, "mtp_layers", in->n_mtp);
    set_int(w, o, "vocab", s->vocab);
    set_int(w, o, "hidden", s->hidden);
    set_int(w, o, "context", s->max_positions);
    set_int(w, o, "dense_width", s->dense_inter);
    set_int(w, o, "streams", s->hc_mult);
    set(w, o, "tied_embeddings", json_boolean(s->tied_embeddings));
    set(w, o, "attention", attention_json(w, s));
    set(w, o, "experts", experts_json(w, s));
    set(w, o, "quantization", quantization_json(w, s));
    return o;
}

static json_t *sum_json(writer *w, const hd_param_group_sum *p) {
    json_t *o = json_object(), *formats = json_object();
    set_int(w, o, "parameters", p->params);
    set_int(w, o, "active", p->active);
    set_int(w, o, "bytes", p->bytes);
    for (int t = 0; t < HD_N_DTYPES; t++) {
        if (p->bytes_by_type[t] == 0) continue;
        set_int(w, formats, hd_dtype_name((hd_dtype)t), p->bytes_by_type[t]);
    }
    set(w, o, "formats", formats);
    return o;
}

static json_t *group_json(writer *w, const hd_param_group_sum *parts,
                          const hd_param_group_sum *total) {
    json_t *o = json_object(), *named = json_object();
    for (int p = 0; p < HD_N_PARAM_GROUPS; p++) {
        if (parts[p].bytes == 0) continue;
        set(w, named, hd_param_group_name((hd_param_group)p), sum_json(w, &parts[p]));
    }
    set(w, o, "parts", named);
    set(w, o, "total", sum_json(w, total));
    return o;
}

static json_t *weights_json(writer *w, const inspection *in) {
    json_t *o = json_object();
    const hd_param_group_sum main = hd_summary_main(&in->summary);
    const hd_param_group_sum mtp = hd_summary_mtp(&in->summary);
    set(w, o, "main", group_json(w, in->summary.main, &main));
    set(w, o, "mtp", group_json(w, in->summary.mtp, &mtp));
    return o;
}

static json_t *elsewhere_json(writer *w, const inspection *in) {
    const inspect_elsewhere e = inspect_count_elsewhere(in);
    json_t *o = json_object();
    set_int(w, o, "experts", e.experts);
    set_int(w, o, "bytes", e.bytes);
    set_int(w, o, "rest_bytes", e.rest);
    return o;
}

static json_t *missing_json(writer *w, const inspection *in) {
    json_t *names = json_array();
    for (int32_t i = 0; in->weights && i < in->schema->n; i++) {
        if (!hd_weights_missing(in->weights, i)) continue;
        append(w, names, json_string(in->schema->decls[i].name));
    }
    return names;
}

static json_t *unused_json(writer *w, const inspection *in, hd_use wanted) {
    json_t *names = json_array();
    int32_t decl;
    for (int32_t i = 0; in->checkpoint && i < hd_checkpoint_count(in->checkpoint); i++) {
        if (hd_weights_use(in->weights, i, &decl) != wanted) continue;
        append(w, names, json_string(hd_checkpoint_at(in->checkpoint, i)->name));
    }
    return names;
}

static json_t *notices_json(writer *w, const inspection *in) {
    json_t *list = json_array();
    for (int32_t i = 0; i < in->spec->n_notices; i++) {
        append(w, list, json_string(in->spec->notices[i]));
    }
    for (int32_t i = 0; in->checkpoint && i < hd_checkpoint_notices(in->checkpoint); i++) {
        append(w, list, json_string(hd_checkpoint_notice(in->checkpoint, i)));
    }
    return list;
}

static json_t *row_json(writer *w, const inspect_row *row) {
    json_t *o = json_object(), *shape = json_array();
    for (int32_t i = 0; i < row->rank; i++) append(w, shape, json_integer(row->shape[i]));
    set(w, o, "name", json_string(row->name));
    set(w, o, "dtype", json_string(row->dtype));
    set(w, o, "shape", shape);
    set_int(w, o, "bytes", row->bytes);
    set(w, o, "file", row->file[0] ? json_string(row->file) : json_null());
    set(w, o, "role", json_string(row->role));
    set(w, o, "layer", row->layer >= 0 ? json_integer(row->layer) : json_null());
    set(w, o, "expert", row->expert >= 0 ? json_integer(row->expert) : json_null());
    return o;
}

hd_status inspect_print_json(const inspection *in, bool tensors, hd_err *err) {
    writer w = {false};
    json_t *o = json_object();
    bool whole = in->checkpoint != NULL;
    set(&w, o, "family", json_string(hd_family_name(in->spec->family)));
    set(&w, o, "architecture", json_string(in->spec->architecture));
    set(&w, o, "source", json_string(whole ? "checkpoint" : "config"));
    set_int(&w, o, "files", whole ? hd_checkpoint_shards(in->checkpoint) : 0);
    set_int(&w, o, "tensors", whole ? hd_checkpoint_count(in->checkpoint) : 0);
    set_int(&w, o, "tensor_bytes", in->tensor_bytes);
    set(&w, o, "model", model_json(&w, in));
    set(&w, o, "weights", weights_json(&w, in));
    set(&w, o, "elsewhere", elsewhere_json(&w, in));
    set(&w, o, "missing", missing_json(&w, in));
    set(&w, o, "unknown", unused_json(&w, in, HD_USE_UNKNOWN));
    set(&w, o, "ignored", unused_json(&w, in, HD_USE_IGNORED));
    set(&w, o, "notices", notices_json(&w, in));
    set(&w, o, "problem", in->problem.status ? json_string(in->problem.msg) : json_null());
    if (tensors) {
        json_t *list = json_array();
        for (int32_t i = 0; i < inspect_n_rows(in); i++) {
            const inspect_row row = inspect_row_at(in, i);
            append(&w, list, row_json(&w, &row));
        }
        set(&w, o, "tensor_list", list);
    }
    if (!w.failed) {
        json_dumpf(o, stdout, JSON_INDENT(2)); /* main reports write errors */
        putchar('\n');
    }
    json_decref(o);
    return w.failed ? HD_FAIL(err, HD_ENOMEM, "no memory for the JSON of %s", in->path) : HD_OK;
}
