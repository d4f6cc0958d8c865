/* expert_buffers.c - the experts of a rank on a device, if they may move: which buffer each has, and
 * spare ones. A buffer belongs to no layer. An expert that comes takes a spare, and when no slot has
 * an expert any more its buffer becomes a spare, so there are as many as before. */
#include <stdlib.h>

#include "base/arena.h"
#include "weights/experts/expert_slots_internal.h"

enum { ALIGN = 256 };

static weights_buffer buffer_like(const weights_expert_slots *s, int32_t layer) {
    weights_buffer b = {0};
    for (int32_t r = 0; r < WEIGHTS_EXPERT_ROLES; r++) {
        const hd_weight *w = weights_model_of(s, layer, r);
        const hd_stored_format f = hd_weight_format(w);
        b.matrix[r] = *w;
        b.bytes[r] = hd_stored_data_bytes(&f, w->rows, w->cols);
        if (!w->scale) continue;
        b.bytes[WEIGHTS_EXPERT_ROLES + r] = hd_stored_scale_bytes(&f, w->rows, w->cols);
    }
    return b;
}

static bool same_size(const weights_buffer *a, const weights_buffer *b) {
    return memcmp(a->bytes, b->bytes, sizeof a->bytes) == 0;
}

/* Whether no layer before has experts of this size. */
static bool is_new_size(const weights_expert_slots *s, int32_t layer) {
    if (!weights_model_of(s, layer, 0)) return false;
    const weights_buffer own = buffer_like(s, layer);
    for (int32_t l = 0; l < layer; l++) {
        if (!weights_model_of(s, l, 0)) continue;
        const weights_buffer other = buffer_like(s, l);
        if (same_size(&own, &other)) return false;
    }
    return true;
}

/* ---- opening ---- */

static void place(weights_buffer *b, hd_arena *a) {
    for (int32_t r = 0; r < WEIGHTS_EXPERT_ROLES; r++) {
        const size_t scale = b->bytes[WEIGHTS_EXPERT_ROLES + r];
        b->matrix[r].data = hd_arena_take(a, b->bytes[r], ALIGN);
        b->matrix[r].scale = scale ? hd_arena_take(a, scale, ALIGN) : NULL;
    }
}

/* Takes the spares of all sizes, and lists them, unless it only measures. */
static void take_spares(weights_expert_slots *s, hd_arena *a) {
    for (int32_t l = 0; l < s->n_layers; l++) {
        if (!is_new_size(s, l)) continue;
        for (int32_t i = 0; i < s->shard.n_experts; i++) {
            weights_buffer b = buffer_like(s, l);
            place(&b, a);
            if (!s->buffers) continue;
            s->spares[s->n_spares++] = s->n_buffers;
            s->buffers[s->n_buffers++] = b;
        }
    }
}

size_t weights_spare_bytes(const weights_expert_slots *s) {
    weights_expert_slots measured = *s;
    measured.buffers = NULL;
    hd_arena a = hd_arena_measure();
    if (s->movable) take_spares(&measured, &a);
    return a.peak;
}

static void list_held(weights_expert_slots *s, int32_t layer) {
    weights_slot_layer *l = &s->layers[layer];
    for (int32_t e = 0; e < s->n_experts; e++) {
        const int32_t at = hd_shard_slot(&s->shard, e, s->n_experts);
        l->buffer[e] = -1;
        if (at < 0 || !l->held[0][at].data) continue;
        weights_buffer *b = &s->buffers[s->n_buffers];
        *b = buffer_like(s, layer);
        for (int32_t r = 0; r < WEIGHTS_EXPERT_ROLES; r++) b->matrix[r] = l->held[r][at];
        l->buffer[e] = s->n_buffers++;
    }
}

hd_status weights_buffers_open(weights_expert_slots *s, void *spares, hd_err *err) {
    hd_arena a = hd_arena_over(spares, weights_spare_bytes(s));
    size_t layers = 0, sizes = 0;
    if (!s->movable) return HD_OK;
    for (int32_t l = 0; l < s->n_layers; l++) {
        layers += weights_model_of(s, l, 0) != NULL;
        sizes += is_new_size(s, l);
    }
    const size_t most = (layers + sizes) * (size_t)s->shard.n_experts;
    s->buffers = calloc(most + 1, sizeof *s->buffers);
    s->spares = calloc(most + 1, sizeof *s->spares);
    s->buffer_of = calloc(layers * (size_t)s->n_experts + 1, sizeof *s->buffer_of);
    if (!s->buffers || !s->spares || !s->buffer_of) {
        return HD_FAIL(err, HD_ENOMEM, "no memory to list %zu experts", most);
    }
    int32_t *next = s->buffer_of;
    for (int32_t l = 0; l < s->n_layers; l++) {
        if (!weights_model_of(s, l, 0)) continue;
        s->layers[l].buffer = next;
        next += s->n_experts;
        list_held(s, l);
    }
    take_spares(s, &a);
    return HD_OK;
}

void weights_buffers_close(weights_expert_slots *s) {
    free(s->buffers);
    free(s->spares);
    free(s->buffer_of);
}

void weights_buffers_extend(weights_expert_slots *s, int32_t layer) {
    if (!s->buffers || !s->layers[layer].buffer) return;
    const weights_buffer own = buffer_like(s, layer);
    for (int32_t i = 0; i < s->n_buffers; i++) {
        if (!same_size(&own, &s->buffers[i])) continue;
        for (int32_t r = 0; r < WEIGHTS_EXPERT_ROLES; r++) {
            hd_expert_table_extend(&s->layers[layer].tables[r], &s->buffers[i].matrix[r]);
        }
    }
}

/* ---- experts that come and go ---- */

weights_buffer *weights_buffers_take(weights_expert_slots *s, int32_t layer, int32_t expert) {
    const weights_buffer own = buffer_like(s, layer);
    for (int32_t i = s->n_spares - 1; i >= 0; i--) {
        const int32_t at = s->spares[i];
        if (!same_size(&own, &s->buffers[at])) continue;
        s->spares[i] = s->spares[--s->n_spares];
        s->layers[layer].buffer[expert] = at;
        return &s->buffers[at];
    }
    return NULL;
}

void weights_buffers_free_unused(weights_expert_slots *s, int32_t layer) {
    weights_slot_layer *l = &s->layers[layer];
    for (int32_t e = 0; l->buffer && e < s->n_experts; e++) {
        if (l->buffer[e] < 0 || weights_is_placed(s, l, e)) continue;
        s->spares[s->n_spares++] = l->buffer[e];
        l->buffer[e] = -1;
    }
}
