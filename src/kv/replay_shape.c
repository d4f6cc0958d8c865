/* replay_shape.c - the shape of a position's choices, by the model. */
#include "base/checked.h"
#include "kv/replay.h"

static bool has_experts(const hd_layer_spec *l) {
    return l->mlp != HD_MLP_DENSE;
}

static bool has_indexer(const hd_layer_spec *l) {
    switch (l->attention) {
    case HD_ATTN_MLA_SPARSE:
    case HD_ATTN_CSA:
    case HD_ATTN_CSA2_FULL:
    case HD_ATTN_CSA2_REINDEX:
        return true;
    case HD_ATTN_MLA:
    case HD_ATTN_WINDOW:
    case HD_ATTN_HCA:
    case HD_ATTN_CSA2_REUSE:
        break;
    }
    return false;
}

/* Returns the tokens of a key. */
static int32_t ratio_of(const hd_layer_spec *l) {
    return hd_max_i32(l->compress_ratio, 1);
}

/* Returns the least tokens of a key of any layer with an indexer; 0: there is none. */
static int32_t least_ratio(const hd_model_spec *spec) {
    int32_t least = 0;
    for (int32_t i = 0; i < spec->n_layers; i++) {
        const hd_layer_spec *l = &spec->layers[i];
        if (has_indexer(l) && (!least || ratio_of(l) < least)) least = ratio_of(l);
    }
    return least;
}

int32_t hd_replay_layer(const hd_model_spec *spec, hd_replay kind, int32_t layer) {
    int32_t before = 0;
    if (layer >= spec->n_layers) return -1;
    if (kind == HD_REPLAY_EXPERTS) return has_experts(&spec->layers[layer]) ? layer : -1;
    if (!has_indexer(&spec->layers[layer])) return -1;
    for (int32_t i = 0; i < layer; i++) before += has_indexer(&spec->layers[i]);
    return before;
}

static hd_replay_shape shape_of_experts(const hd_model_spec *spec) {
    return (hd_replay_shape){.layers = spec->n_layers,
                             .top_k = spec->route.top_k,
                             .number_bytes = spec->route.n_experts <= 256 ? 1 : 2};
}

/* The highest number of two bytes is -1. */
static hd_replay_shape shape_of_keys(const hd_model_spec *spec) {
    const int32_t ratio = least_ratio(spec);
    hd_replay_shape shape = {.top_k = spec->index_topk};
    if (ratio == 0) return shape;
    for (int32_t i = 0; i < spec->n_layers; i++) {
        shape.layers += has_indexer(&spec->layers[i]);
    }
    shape.number_bytes = spec->max_positions / ratio <= UINT16_MAX ? 2 : 4;
    return shape;
}

hd_replay_shape hd_replay_shape_of(const hd_model_spec *spec, hd_replay kind) {
    hd_replay_shape s =
        kind == HD_REPLAY_EXPERTS ? shape_of_experts(spec) : shape_of_keys(spec);
    s.row_bytes = s.layers * s.top_k * s.number_bytes;
    return s;
}

/* A row at position p sees (p + 1) / ratio keys. */
int32_t hd_replay_trivial(const hd_model_spec *spec) {
    return (spec->index_topk + 1) * least_ratio(spec) - 1;
}
