/* config_v41.c - reads V4.1's config: which layers write and choose shared entries, the pool of
 * candidates, Engram tables, the sizes of the image tower.
 *
 * compress_ratios has the ratio of the cache that a layer reads. The kind of a layer follows
 * from two lists of sources: a layer reads the cache of the last KV source up to it. */
#include <stdio.h>

#include "weights/config/config_internal.h"
#include "weights/engram.h"

static const char kv_key[] = "kv_source_layer_ids", index_key[] = "index_source_layer_ids",
                  ratios_key[] = "compress_ratios", pool_key[] = "candidate_source_layer_id",
                  engram_key[] = "engram_layer_ids", rows_key[] = "engram_num_embeddings";

enum { MAX_RATIO = 2 };

/* Reads n or fewer ascending numbers in [0, below) into out. */
static hd_status read_ascending(const weights_view *v, const char *key, int32_t below,
                                int32_t most, int32_t *out, int32_t *n) {
    const json_t *list;
    HD_TRY(weights_array(v, key, &list));
    *n = (int32_t)json_array_size(list);
    bool good = list && json_array_size(list) <= (size_t)most;
    for (int32_t i = 0; good && i < *n; i++) {
        const json_t *entry = json_array_get(list, (size_t)i);
        const int64_t value = json_integer_value(entry), least = i ? out[i - 1] + 1 : 0;
        good = json_is_integer(entry) && value >= least && value < below;
        if (good) out[i] = (int32_t)value;
    }
    if (good) return HD_OK;
    char why[96];
    snprintf(why, sizeof why, "must be at most %d ascending numbers below %d", most, below);
    return weights_refuse(v, HD_EFORMAT, key, list, why);
}

static bool contains(const int32_t *list, int32_t n, int32_t value) {
    for (int32_t i = 0; i < n; i++) {
        if (list[i] == value) return true;
    }
    return false;
}

static hd_status read_ratios(hd_model_spec *s, const weights_view *v) {
    const json_t *list;
    HD_TRY(weights_array(v, ratios_key, &list));
    const size_t n = (size_t)s->n_layers + (size_t)s->n_mtp, given = json_array_size(list);
    bool good = given == n || (s->n_mtp == 0 && given > n);
    for (size_t l = 0; good && l < n; l++) {
        const json_t *entry = json_array_get(list, l);
        const int64_t ratio = json_integer_value(entry);
        good = json_is_integer(entry) && ratio >= 0 && ratio <= MAX_RATIO &&
               ((int32_t)l < s->n_layers || ratio == 0);
        if (good) s->layers[l].compress_ratio = (int32_t)ratio;
    }
    if (good) return HD_OK;
    return weights_refuse(v, HD_EFORMAT, ratios_key, list,
                          "must be 0, 1 or 2 for every layer and 0 for every drafter stage");
}

/* The layers that write shared caches, and those that choose entries. */
typedef struct sources {
    int32_t kv[512], index[512];
    int32_t n_kv, n_index;
} sources;

static hd_status refuse_sources(const weights_view *v, const char *key, int32_t layer,
                                const char *why) {
    return HD_FAIL(v->err, HD_EFORMAT, "%s: key \"%s\": layer %d %s", v->file, key, layer, why);
}

static hd_status place_layer(hd_model_spec *s, const weights_view *v, const sources *from,
                             int32_t l, int32_t *owner) {
    hd_layer_spec *layer = &s->layers[l];
    const bool writes = contains(from->kv, from->n_kv, l);
    const bool chooses = contains(from->index, from->n_index, l);
    layer->mlp = HD_MLP_MOE;
    layer->attention = HD_ATTN_WINDOW;
    if (writes && !chooses) return refuse_sources(v, index_key, l, "writes but chooses none");
    if (layer->compress_ratio == 0) {
        if (chooses) return refuse_sources(v, index_key, l, "has ratio 0 and reads no entries");
        return HD_OK;
    }
    if (writes) *owner = l;
    if (*owner < 0) return refuse_sources(v, kv_key, l, "reads a cache that no layer writes");
    if (layer->compress_ratio != s->layers[*owner].compress_ratio) {
        return refuse_sources(v, ratios_key, l,
                              "has another ratio than the cache that it reads");
    }
    layer->kv_layer = *owner;
    layer->attention = writes    ? HD_ATTN_CSA2_FULL
                       : chooses ? HD_ATTN_CSA2_REINDEX
                                 : HD_ATTN_CSA2_REUSE;
    return HD_OK;
}

static hd_status read_layers(hd_model_spec *s, const weights_view *v) {
    sources from = {0};
    int32_t owner = -1;
    HD_TRY(read_ratios(s, v));
    HD_TRY(read_ascending(v, kv_key, s->n_layers, 512, from.kv, &from.n_kv));
    HD_TRY(read_ascending(v, index_key, s->n_layers, 512, from.index, &from.n_index));
    for (int32_t l = 0; l < s->n_layers; l++) HD_TRY(place_layer(s, v, &from, l, &owner));
    for (int32_t l = s->n_layers; l < s->n_layers + s->n_mtp; l++) {
        s->layers[l].attention = HD_ATTN_WINDOW;
        s->layers[l].mlp = HD_MLP_MOE;
    }
    return HD_OK;
}

static hd_status read_indexer(hd_model_spec *s, const weights_view *v) {
    HD_TRY(weights_int(v, "index_n_heads", 1, 4096, &s->index_heads));
    HD_TRY(weights_int(v, "index_head_dim", s->rope_dim, 8192, &s->index_dim));
    return weights_int(v, "index_topk", 1, 1 << 30, &s->index_topk);
}

/* A later layer that chooses reads the pool, so it must read the same cache. */
static hd_status read_pool(hd_model_spec *s, const weights_view *v) {
    HD_TRY(weights_int_or(v, pool_key, -1, s->n_layers - 1, -1, &s->pool_layer));
    if (s->pool_layer < 0) return HD_OK;
    HD_TRY(weights_int(v, "candidate_topk_blocks", 1, 1 << 24, &s->pool_blocks));
    HD_TRY(weights_int(v, "candidate_block_size", 1, 1 << 16, &s->pool_block));
    if (s->layers[s->pool_layer].attention != HD_ATTN_CSA2_FULL) {
        return refuse_sources(v, pool_key, s->pool_layer, "is not in kv_source_layer_ids");
    }
    for (int32_t l = s->pool_layer + 1; l < s->n_layers; l++) {
        const hd_layer_spec *layer = &s->layers[l];
        const bool chooses =
            layer->attention == HD_ATTN_CSA2_FULL || layer->attention == HD_ATTN_CSA2_REINDEX;
        if (chooses && layer->kv_layer != s->pool_layer) {
            return refuse_sources(v, pool_key, l, "chooses entries of another cache");
        }
    }
    return HD_OK;
}

static hd_status read_rows(hd_engram_spec *e, const weights_view *v) {
    const json_t *list;
    HD_TRY(weights_array(v, rows_key, &list));
    bool good = json_array_size(list) == (size_t)e->n_layers;
    for (int32_t i = 0; good && i < e->n_layers; i++) {
        const json_t *entry = json_array_get(list, (size_t)i);
        const int64_t rows = json_integer_value(entry);
        good = json_is_integer(entry) && rows >= 1 && rows <= INT32_MAX;
        if (good) e->rows[i] = (int32_t)rows;
    }
    if (good) return HD_OK;
    return weights_refuse(v, HD_EFORMAT, rows_key, list,
                          "must be a count of rows for each of engram_layer_ids");
}

static hd_status check_engram(hd_engram_spec *e, const weights_view *v) {
    int32_t bad;
    if (e->columns > HD_MAX_ENGRAM_COLUMNS) {
        return HD_FAIL(v->err, HD_EUNSUPPORTED,
                       "%s: key \"engram_n_heads\": %d columns of all orders; at most %d",
                       v->file, e->columns, HD_MAX_ENGRAM_COLUMNS);
    }
    if (hd_engram_constants(e, &bad) == HD_OK) return HD_OK;
    return HD_FAIL(
        v->err, HD_EFORMAT,
        "%s: key \"%s\": layer %d has %d rows, which is not the sum of its %d primes", v->file,
        rows_key, e->layers[bad], e->rows[bad], e->columns);
}

static hd_status read_engram(hd_model_spec *s, const weights_view *v) {
    hd_engram_spec *e = &s->engram;
    if (!weights_find(v, engram_key)) return HD_OK;
    HD_TRY(read_ascending(v, engram_key, s->n_layers, HD_MAX_ENGRAM_LAYERS, e->layers,
                          &e->n_layers));
    if (e->n_layers == 0) return HD_OK;
    HD_TRY(weights_int(v, "engram_max_ngram_size", 2, HD_MAX_NGRAM, &e->max_ngram));
    HD_TRY(weights_int(v, "engram_n_heads", 1, HD_MAX_ENGRAM_COLUMNS, &e->heads));
    HD_TRY(weights_int(v, "engram_head_dim", 1, 65536, &e->head_dim));
    HD_TRY(weights_int(v, "engram_vocab_size", 2, 1 << 30, &e->vocab));
    HD_TRY(weights_int(v, "engram_pad_token_id", 0, s->vocab - 1, &e->pad));
    HD_TRY(weights_int(v, "engram_compressed_vocab_size", 1, s->vocab, &e->classes));
    HD_TRY(read_rows(e, v));
    e->columns = e->heads * (e->max_ngram - 1);
    for (int32_t i = 0; i < e->n_layers; i++) s->layers[e->layers[i]].engram = i;
    return check_engram(e, v);
}

static hd_status read_vision(hd_vision_spec *s, const weights_view *top) {
    weights_view v;
    HD_TRY(weights_section(top, "vision_config", "vision_config.", &v));
    if (!v.object) return HD_OK;
    HD_TRY(weights_int(&v, "num_hidden_layers", 1, 512, &s->n_layers));
    HD_TRY(weights_int(&v, "hidden_size", 1, 65536, &s->hidden));
    HD_TRY(weights_int(&v, "intermediate_size", 1, 65536, &s->inter));
    HD_TRY(weights_int(&v, "patch_size", 1, 1024, &s->patch));
    return weights_int(&v, "downsample_ratio", 1, 64, &s->downsample);
}

hd_status weights_config_v41(hd_model_spec *s, const weights_view *v) {
    HD_TRY(weights_config_heads(s, v));
    HD_TRY(read_layers(s, v));
    HD_TRY(read_indexer(s, v));
    HD_TRY(read_pool(s, v));
    HD_TRY(weights_config_route(s, v));
    HD_TRY(weights_config_streams(s, v));
    HD_TRY(read_engram(s, v));
    HD_TRY(read_vision(&s->vision, v));
    if (s->n_shared == 1) return HD_OK;
    return weights_refuse(v, HD_EUNSUPPORTED, "n_shared_experts",
                          weights_find(v, "n_shared_experts"), "must be 1 in V4.1");
}
