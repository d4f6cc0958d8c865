/* expert_slots.c - the experts of each MoE layer in slots, as tables in device memory.
 *
 * A layer's map and tables lie in one block, so that one copy replaces them: steps that were
 * queued before it read the old ones, all later steps the new ones. Matrices stay where they
 * are; a slot only has another address. */
#include "weights/experts/expert_slots_internal.h"

#include <stdlib.h>
#include <string.h>

#include "base/checked.h"

/* Rows of a rank that follow each other go to the copies of an expert in turn; so many choices divide
 * evenly by 2, 3, 4 and 6 copies. */
enum { ALIGN = 64, COPY_CHOICES = 12 };

static size_t aligned(size_t n) {
    return (n + ALIGN - 1) / ALIGN * ALIGN;
}

static bool has_copies(const weights_expert_slots *s) {
    return hd_shard_slots(&s->shard) > s->n_experts;
}

static int32_t n_choices(const weights_expert_slots *s) {
    return has_copies(s) ? COPY_CHOICES : 1;
}

static size_t map_bytes(const weights_expert_slots *s) {
    return aligned((size_t)s->n_experts * (size_t)n_choices(s) * sizeof(int32_t));
}

static size_t table_bytes(const weights_expert_slots *s) {
    return aligned((size_t)s->shard.n_experts * sizeof(hd_weight));
}

static hd_split_shape split_shape(const weights_expert_slots *s) {
    const int32_t slots = hd_shard_slots(&s->shard);
    return (hd_split_shape){s->n_experts, slots, s->shard.parallel.ep};
}

static size_t graph_bytes(const weights_expert_slots *s) {
    const size_t words = (size_t)hd_split_words(split_shape(s));
    return has_copies(s) ? aligned(words * sizeof(int32_t)) : 0;
}

static size_t block_bytes(const weights_expert_slots *s) {
    return map_bytes(s) + graph_bytes(s) + WEIGHTS_EXPERT_ROLES * table_bytes(s);
}

static int32_t *map_in(uint8_t *block) {
    return (int32_t *)(void *)block;
}

static int32_t *graph_in(const weights_expert_slots *s, uint8_t *block) {
    return has_copies(s) ? (int32_t *)(void *)(block + map_bytes(s)) : NULL;
}

static hd_weight *table_in(const weights_expert_slots *s, uint8_t *block, int32_t role) {
    uint8_t *first = block + map_bytes(s) + graph_bytes(s);
    return (hd_weight *)(void *)(first + (size_t)role * table_bytes(s));
}

/* ---- opening ---- */

hd_status weights_slots_init(weights_expert_slots *s, const hd_model_spec *spec,
                             const hd_shard *shard, hd_err *err) {
    const int32_t n_slots = hd_shard_slots(shard);
    size_t n = 0;
    s->shard = *shard;
    s->n_experts = spec->route.n_experts;
    s->n_layers = spec->n_layers + spec->n_mtp;
    for (int32_t l = 0; l < s->n_layers; l++) n += spec->layers[l].mlp != HD_MLP_DENSE;
    s->layers = calloc((size_t)s->n_layers + 1, sizeof *s->layers);
    s->experts = calloc(n * (size_t)n_slots + 1, sizeof *s->experts);
    s->host = calloc(n + 1, block_bytes(s) + 1);
    s->staged = calloc(1, block_bytes(s) + 1);
    s->rank_slot0 = calloc((size_t)shard->parallel.ep + 1, sizeof *s->rank_slot0);
    if (!s->layers || !s->experts || !s->host || !s->staged || !s->rank_slot0) {
        return HD_FAIL(err, HD_ENOMEM, "no memory for the slots of %d experts", s->n_experts);
    }
    for (int32_t d = 0; d < shard->parallel.ep; d++) {
        s->rank_slot0[d + 1] = s->rank_slot0[d] + shard->n_experts;
    }
    n = 0;
    for (int32_t l = 0; l < s->n_layers; l++) {
        if (spec->layers[l].mlp == HD_MLP_DENSE) continue;
        weights_slot_layer *layer = &s->layers[l];
        layer->expert = s->experts + n * (size_t)n_slots;
        layer->block = s->host + n++ * block_bytes(s);
        layer->map = (hd_expert_map){.expert = layer->expert,
                                     .n_slots = n_slots,
                                     .n_ranks = shard->parallel.ep,
                                     .n_choices = n_choices(s)};
        for (int32_t i = 0; i < n_slots; i++) layer->expert[i] = i % s->n_experts;
    }
    return HD_OK;
}

void weights_slots_deinit(weights_expert_slots *s) {
    weights_drop_all(s);
    weights_buffers_close(s);
    free(s->layers);
    free(s->experts);
    free(s->host);
    free(s->staged);
    free(s->rank_slot0);
    *s = (weights_expert_slots){0};
}

void weights_slots_hold(weights_expert_slots *s, int32_t layer, int32_t role,
                        const hd_weight *held) {
    s->layers[layer].held[role] = held;
}

/* ---- writing ---- */

/* Copy number `turn`, modulo their count, of every expert: into slot[expert * n_choices]. */
static void choose_copy(const weights_expert_slots *s, const int32_t *expert, int32_t turn,
                        int32_t *slot) {
    const int32_t n_slots = hd_shard_slots(&s->shard), n = n_choices(s);
    for (int32_t e = 0; e < s->n_experts; e++) slot[e * n] = 0;
    for (int32_t i = 0; i < n_slots; i++) slot[expert[i] * n]++;
    /* below zero: how many copies are left to skip */
    for (int32_t e = 0; e < s->n_experts; e++) {
        slot[e * n] = slot[e * n] ? -1 - turn % slot[e * n] : 0;
    }
    for (int32_t i = 0; i < n_slots; i++) {
        int32_t *at = &slot[expert[i] * n];
        if (*at < 0) *at = *at == -1 ? i : *at + 1;
    }
}

/* The copies of an expert in turn, from the one whose number is this rank's on, so that the ranks'
 * rows spread evenly also if each has few. */
static void choose_slots(const weights_expert_slots *s, const int32_t *expert, int32_t *slot) {
    const int32_t rank = hd_parallel_coords(&s->shard.parallel, s->shard.rank).ep;
    for (int32_t k = 0; k < n_choices(s); k++) choose_copy(s, expert, rank + k, slot + k);
}

const hd_weight *weights_expert_matrix(const weights_expert_slots *s,
                                       const weights_slot_layer *layer, int32_t role,
                                       int32_t expert) {
    if (layer->buffer) {
        const int32_t own = layer->buffer[expert];
        return own < 0 ? NULL : &s->buffers[own].matrix[role];
    }
    const int32_t at = hd_shard_slot(&s->shard, expert, s->n_experts);
    const weights_received *r = layer->received;
    if (at >= 0) return &layer->held[role][at];
    while (r && r->expert != expert) r = r->next;
    return r ? &r->matrix[role] : NULL;
}

const hd_weight *weights_model_of(const weights_expert_slots *s, int32_t layer, int32_t role) {
    if (layer < 0 || layer >= s->n_layers || s->layers[layer].map.n_slots == 0) return NULL;
    const hd_weight *first = &s->layers[layer].held[role][0];
    return first->data ? first : NULL; /* an MTP layer that the files lack */
}

/* Stages a block for a placement. */
static void stage(const weights_expert_slots *s, const weights_slot_layer *layer,
                  const int32_t *expert) {
    const int32_t *own = expert + s->shard.expert0;
    choose_slots(s, expert, map_in(s->staged));
    if (has_copies(s)) {
        const hd_split_graph g = hd_split_graph_in(graph_in(s, s->staged), split_shape(s));
        hd_split_graph_make(&g, expert, s->rank_slot0);
    }
    for (int32_t r = 0; r < WEIGHTS_EXPERT_ROLES; r++) {
        hd_weight *table = table_in(s, s->staged, r);
        for (int32_t i = 0; i < s->shard.n_experts; i++) {
            table[i] = *weights_expert_matrix(s, layer, r, own[i]);
        }
    }
}

static void write_block(const weights_expert_slots *s, const weights_slot_layer *layer,
                        hd_stream *stream) {
    if (stream) {
        hd_stream_upload(stream, layer->block, s->staged, block_bytes(s));
    } else {
        memcpy(layer->block, s->staged, block_bytes(s));
    }
}

static void fill_layer(weights_expert_slots *s, int32_t number, hd_stream *stream) {
    weights_slot_layer *layer = &s->layers[number];
    for (int32_t r = 0; r < WEIGHTS_EXPERT_ROLES; r++) {
        hd_expert_table_init(&layer->tables[r], layer->held[r], s->shard.n_experts);
        layer->tables[r].slots = table_in(s, layer->block, r);
    }
    weights_buffers_extend(s, number);
    layer->map.slot = map_in(layer->block);
    layer->map.graph = graph_in(s, layer->block);
    stage(s, layer, layer->expert);
    write_block(s, layer, stream);
}

hd_status weights_slots_fill(weights_expert_slots *s, hd_device *d, hd_stream *stream,
                             hd_err *err) {
    size_t n = 0;
    for (int32_t l = 0; l < s->n_layers; l++) n += s->layers[l].map.n_slots > 0;
    if (d && n > 0) {
        void *block;
        HD_TRY(hd_device_alloc(d, &block, n * block_bytes(s), "expert slots", err));
        for (int32_t l = s->n_layers - 1; l >= 0; l--) {
            if (s->layers[l].map.n_slots == 0) continue;
            s->layers[l].block = (uint8_t *)block + --n * block_bytes(s);
        }
    }
    for (int32_t l = 0; l < s->n_layers; l++) {
        if (s->layers[l].map.n_slots > 0) fill_layer(s, l, d ? stream : NULL);
    }
    return HD_OK;
}

static bool on_host(const weights_expert_slots *s, const weights_slot_layer *layer) {
    const size_t n = (size_t)s->n_layers * block_bytes(s);
    return layer->block >= s->host && (size_t)(layer->block - s->host) < n;
}

void weights_slots_refill(weights_expert_slots *s) {
    for (int32_t l = 0; l < s->n_layers; l++) {
        const weights_slot_layer *layer = &s->layers[l];
        if (layer->map.n_slots > 0 && on_host(s, layer)) fill_layer(s, l, NULL);
    }
}

/* ---- another placement ---- */

hd_status weights_slots_check(const weights_expert_slots *s, int32_t layer,
                              const int32_t *expert, hd_err *err) {
    const hd_shard *shard = &s->shard;
    if (layer < 0 || layer >= s->n_layers || s->layers[layer].map.n_slots == 0) {
        return HD_FAIL(err, HD_EINVAL, "layer %d has no experts to place", layer);
    }
    int32_t *copies = map_in(s->staged);
    memset(copies, 0, (size_t)s->n_experts * sizeof *copies);
    for (int32_t i = 0; i < hd_shard_slots(shard); i++) {
        if (expert[i] < 0 || expert[i] >= s->n_experts) {
            return HD_FAIL(err, HD_EINVAL, "layer %d: slot %d for expert %d: must be below %d",
                           layer, i, expert[i], s->n_experts);
        }
        const bool own = i >= shard->expert0 && i < shard->expert0 + shard->n_experts;
        if (own && !weights_expert_matrix(s, &s->layers[layer], 0, expert[i])) {
            return HD_FAIL(err, HD_EINVAL,
                           "layer %d: slot %d for expert %d, which rank %d does not have",
                           layer, i, expert[i], shard->rank);
        }
        copies[expert[i]]++;
    }
    for (int32_t e = 0; e < s->n_experts; e++) {
        if (copies[e] > 0) continue;
        return HD_FAIL(err, HD_EINVAL, "layer %d: no slot for expert %d", layer, e);
    }
    return HD_OK;
}

hd_status weights_slots_place(weights_expert_slots *s, int32_t layer, const int32_t *expert,
                              hd_stream *stream, hd_err *err) {
    HD_TRY(weights_slots_check(s, layer, expert, err));
    weights_slot_layer *l = &s->layers[layer];
    memcpy(l->expert, expert, (size_t)l->map.n_slots * sizeof *expert);
    stage(s, l, expert);
    write_block(s, l, stream);
    l->map.version++;
    weights_drop_unused(s, layer);
    return HD_OK;
}
