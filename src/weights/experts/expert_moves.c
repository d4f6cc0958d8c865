/* expert_moves.c - experts that travel between ranks: packed with their scales and a checksum,
 * checked and kept where they arrive. On a device only what describes them is packed, and they are
 * copied from where they lie. */
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/checksum.h"
#include "weights/experts/expert_moves.h"
#include "weights/weights_internal.h"

enum { PART_ALIGN = 64 };
static const uint64_t MAGIC = UINT64_C(0x3150584544414800); /* HADEXP1 */

typedef struct packed_matrix {
    int32_t role, rows, cols, block_rows, block_cols;
    uint8_t type, scale_type, power_scales, has_scale;
    float global;
} packed_matrix;

/* The head of a packed expert; data and scales of each matrix follow, aligned. */
typedef struct packed_head {
    uint64_t magic, checksum, bytes; /* checksum: of all bytes, with 0 in its place */
    int32_t layer, expert;
    uint32_t version, unused[2];
    packed_matrix matrix[WEIGHTS_EXPERT_ROLES];
} packed_head;

_Static_assert(sizeof(packed_matrix) == 28 && sizeof(packed_head) == 128,
               "packed experts have no holes");

/* On a device the addresses follow instead, which all ranks of the process can read. */
typedef struct packed_places {
    const void *data[WEIGHTS_EXPERT_ROLES], *scale[WEIGHTS_EXPERT_ROLES];
} packed_places;

/* Where the parts of a matrix are. */
typedef struct part {
    size_t data, data_bytes, scale, scale_bytes, end;
} part;

static size_t aligned(size_t n) {
    return (n + PART_ALIGN - 1) / PART_ALIGN * PART_ALIGN;
}

static part part_at(const hd_weight *w, size_t at) {
    const hd_stored_format f = hd_weight_format(w);
    part p = {.data = aligned(at), .data_bytes = hd_stored_data_bytes(&f, w->rows, w->cols)};
    p.scale = aligned(p.data + p.data_bytes);
    p.scale_bytes = w->scale ? hd_stored_scale_bytes(&f, w->rows, w->cols) : 0;
    p.end = p.scale + p.scale_bytes;
    return p;
}

static packed_matrix describe(const hd_weight *w, int32_t role) {
    return (packed_matrix){.role = role,
                           .rows = w->rows,
                           .cols = w->cols,
                           .block_rows = w->block_rows,
                           .block_cols = w->block_cols,
                           .type = (uint8_t)w->type,
                           .scale_type = (uint8_t)w->scale_type,
                           .power_scales = w->power_scales,
                           .has_scale = w->scale != NULL,
                           .global = w->global};
}

/* Whether two matrices take the same bytes and are read in the same way; the global scale is a
 * value and may differ. */
static bool same_format(packed_matrix a, packed_matrix b) {
    return a.role == b.role && a.rows == b.rows && a.cols == b.cols &&
           a.block_rows == b.block_rows && a.block_cols == b.block_cols && a.type == b.type &&
           a.scale_type == b.scale_type && a.power_scales == b.power_scales &&
           a.has_scale == b.has_scale;
}

static size_t expert_bytes(const weights_expert_slots *s, int32_t layer) {
    size_t at = sizeof(packed_head);
    if (!weights_model_of(s, layer, 0)) return 0;
    for (int32_t r = 0; r < WEIGHTS_EXPERT_ROLES; r++) {
        at = part_at(weights_model_of(s, layer, r), at).end;
    }
    return aligned(at);
}

static size_t packed_bytes(const weights_expert_slots *s, int32_t layer) {
    if (!s->buffers || !weights_model_of(s, layer, 0)) return expert_bytes(s, layer);
    return sizeof(packed_head) + sizeof(packed_places);
}

static uint64_t checksum_of(const packed_head *head, const void *packed) {
    packed_head blank = *head;
    blank.checksum = 0;
    const uint64_t sum = hd_checksum(0, &blank, sizeof blank);
    return hd_checksum(sum, (const uint8_t *)packed + sizeof blank,
                       (size_t)head->bytes - sizeof blank);
}

/* Copies the arrays of a matrix behind those before, which end at `at`; returns their end. */
static size_t pack_matrix(const hd_weight *w, uint8_t *out, size_t at) {
    const part p = part_at(w, at);
    memcpy(out + p.data, w->data, p.data_bytes);
    if (p.scale_bytes) memcpy(out + p.scale, w->scale, p.scale_bytes);
    return p.end;
}

static hd_status pack(const weights_expert_slots *s, int32_t layer, int32_t expert, void *out,
                      hd_err *err) {
    const size_t bytes = packed_bytes(s, layer);
    packed_head head = {.magic = MAGIC, .bytes = bytes, .layer = layer, .expert = expert};
    packed_places places;
    size_t at = sizeof head;
    if (!bytes || !weights_expert_matrix(s, &s->layers[layer], 0, expert)) {
        return HD_FAIL(err, HD_EINVAL, "layer %d: rank %d does not have expert %d", layer,
                       s->shard.rank, expert);
    }
    memset(out, 0, bytes);
    for (int32_t r = 0; r < WEIGHTS_EXPERT_ROLES; r++) {
        const hd_weight *w = weights_expert_matrix(s, &s->layers[layer], r, expert);
        head.matrix[r] = describe(w, r);
        if (!same_format(head.matrix[r], describe(weights_model_of(s, layer, r), r))) {
            return HD_FAIL(err, HD_EINVAL,
                           "layer %d: expert %d has another format than the first of its rank",
                           layer, expert);
        }
        places.data[r] = w->data;
        places.scale[r] = w->scale;
        if (!s->buffers) at = pack_matrix(w, out, at);
    }
    if (s->buffers) memcpy((uint8_t *)out + sizeof head, &places, sizeof places);
    head.version = s->layers[layer].map.version;
    head.checksum = checksum_of(&head, out);
    memcpy(out, &head, sizeof head);
    return HD_OK;
}

/* ---- arrival ---- */

static hd_status check(const weights_expert_slots *s, int32_t layer, int32_t expert,
                       const void *packed, packed_head *head, hd_err *err) {
    const size_t bytes = packed_bytes(s, layer);
    if (!bytes) return HD_FAIL(err, HD_EINVAL, "layer %d has no experts", layer);
    memcpy(head, packed, sizeof *head);
    if (head->magic != MAGIC || head->bytes != bytes || head->layer != layer ||
        head->expert != expert) {
        return HD_FAIL(err, HD_EFORMAT, "not expert %d of layer %d", expert, layer);
    }
    if (head->checksum != checksum_of(head, packed)) {
        return HD_FAIL(err, HD_EFORMAT, "layer %d: expert %d arrived with a wrong checksum",
                       layer, expert);
    }
    if (head->version != s->layers[layer].map.version) {
        return HD_FAIL(err, HD_EFORMAT,
                       "layer %d: expert %d is of version %u of the map, not %u", layer, expert,
                       head->version, s->layers[layer].map.version);
    }
    for (int32_t r = 0; r < WEIGHTS_EXPERT_ROLES; r++) {
        if (same_format(head->matrix[r], describe(weights_model_of(s, layer, r), r))) continue;
        return HD_FAIL(err, HD_EFORMAT, "layer %d: expert %d has another format", layer,
                       expert);
    }
    return HD_OK;
}

static hd_status keep_copy(weights_expert_slots *s, const packed_head *head, const void *packed,
                           hd_err *err) {
    weights_slot_layer *l = &s->layers[head->layer];
    weights_received *r = calloc(1, sizeof *r);
    uint8_t *bytes = malloc((size_t)head->bytes);
    if (!r || !bytes) {
        free(r);
        free(bytes);
        return HD_FAIL(err, HD_ENOMEM, "no memory for an expert of %zu bytes",
                       (size_t)head->bytes);
    }
    memcpy(bytes, packed, (size_t)head->bytes);
    size_t at = sizeof *head;
    for (int32_t k = 0; k < WEIGHTS_EXPERT_ROLES; k++) {
        hd_weight *w = &r->matrix[k];
        *w = *weights_model_of(s, head->layer, k);
        const part p = part_at(w, at);
        w->data = bytes + p.data;
        w->scale = p.scale_bytes ? bytes + p.scale : NULL;
        w->global = head->matrix[k].global;
        at = p.end;
    }
    r->expert = head->expert;
    r->bytes = bytes;
    r->next = l->received;
    l->received = r;
    return HD_OK;
}

/* ---- arrival on a device ---- */

/* Kernels that were captured have the layer's global scale as an argument, if there is one. */
static hd_status check_globals(const weights_expert_slots *s, const packed_head *head,
                               hd_err *err) {
    for (int32_t k = 0; k < WEIGHTS_EXPERT_ROLES; k++) {
        const hd_expert_table *t = &s->layers[head->layer].tables[k];
        if (!t->one_global || t->shape.global == head->matrix[k].global) continue;
        return HD_FAIL(err, HD_EINVAL,
                       "layer %d: expert %d has another global scale than those "
                       "of rank %d",
                       head->layer, head->expert, s->shard.rank);
    }
    return HD_OK;
}

static void copy_array(hd_stream *stream, const void *to, const void *from, size_t bytes) {
    hd_stream_copy(stream, (void *)(uintptr_t)to, from, bytes);
}

static hd_status queue_copies(weights_expert_slots *s, const packed_head *head,
                              const void *packed, hd_stream *stream, hd_err *err) {
    packed_places from;
    memcpy(&from, (const uint8_t *)packed + sizeof *head, sizeof from);
    HD_TRY(check_globals(s, head, err));
    weights_buffer *b = weights_buffers_take(s, head->layer, head->expert);
    if (!b) {
        return HD_FAIL(err, HD_ENOMEM, "layer %d: no spare memory for expert %d", head->layer,
                       head->expert);
    }
    for (int32_t k = 0; k < WEIGHTS_EXPERT_ROLES; k++) {
        hd_weight *w = &b->matrix[k];
        const hd_weight at = *w;
        *w = *weights_model_of(s, head->layer, k);
        w->data = at.data;
        w->scale = at.scale;
        w->global = head->matrix[k].global;
        copy_array(stream, w->data, from.data[k], b->bytes[k]);
        copy_array(stream, w->scale, from.scale[k], b->bytes[WEIGHTS_EXPERT_ROLES + k]);
    }
    return HD_OK;
}

static hd_status stage(weights_expert_slots *s, int32_t layer, int32_t expert,
                       const void *packed, hd_stream *stream, hd_err *err) {
    packed_head head;
    HD_TRY(check(s, layer, expert, packed, &head, err));
    if (weights_expert_matrix(s, &s->layers[layer], 0, expert)) return HD_OK; /* it has it */
    return s->buffers ? queue_copies(s, &head, packed, stream, err)
                      : keep_copy(s, &head, packed, err);
}

static void add_checksum(const weights_expert_slots *s, int32_t layer, int32_t expert,
                         hd_stream *stream, uint64_t *sum) {
    const weights_buffer *b = &s->buffers[s->layers[layer].buffer[expert]];
    uint64_t first = 0;
    for (int32_t i = 0; i < 2 * WEIGHTS_EXPERT_ROLES; i++) {
        const hd_weight *w = &b->matrix[i % WEIGHTS_EXPERT_ROLES];
        hd_stream_checksum(stream, sum, first, i < WEIGHTS_EXPERT_ROLES ? w->data : w->scale,
                           b->bytes[i]);
        first += b->bytes[i] / HD_CHECKSUM_BLOCK + 1;
    }
}

/* ---- other values ---- */

static void renew(uint8_t *bytes, hd_weight *w, const hd_weight *from) {
    const hd_stored_format f = hd_weight_format(w);
    uint8_t *const data = bytes + ((const uint8_t *)w->data - bytes);
    memcpy(data, from->data, hd_stored_data_bytes(&f, w->rows, w->cols));
    if (w->scale) {
        uint8_t *const scale = bytes + ((const uint8_t *)w->scale - bytes);
        memcpy(scale, from->scale, hd_stored_scale_bytes(&f, w->rows, w->cols));
    }
    w->global = from->global;
}

void weights_renew_received(weights_expert_slots *s, const weights_expert_slots *whole) {
    for (int32_t l = 0; l < s->n_layers; l++) {
        for (weights_received *r = s->layers[l].received; r; r = r->next) {
            for (int32_t k = 0; k < WEIGHTS_EXPERT_ROLES; k++) {
                renew(r->bytes, &r->matrix[k],
                      weights_expert_matrix(whole, &whole->layers[l], k, r->expert));
            }
        }
    }
}

bool weights_is_placed(const weights_expert_slots *s, const weights_slot_layer *l,
                       int32_t expert) {
    const int32_t *own = l->expert + s->shard.expert0;
    int32_t i = 0;
    while (i < s->shard.n_experts && own[i] != expert) i++;
    return i < s->shard.n_experts;
}

static void drop(weights_received **at) {
    weights_received *r = *at;
    *at = r->next;
    free(r->bytes);
    free(r);
}

void weights_drop_unused(weights_expert_slots *s, int32_t layer) {
    weights_slot_layer *l = &s->layers[layer];
    weights_buffers_free_unused(s, layer);
    for (weights_received **at = &l->received; *at;) {
        if (weights_is_placed(s, l, (*at)->expert)) {
            at = &(*at)->next;
        } else {
            drop(at);
        }
    }
}

void weights_drop_all(weights_expert_slots *s) {
    for (int32_t l = 0; s->layers && l < s->n_layers; l++) {
        while (s->layers[l].received) drop(&s->layers[l].received);
    }
}

/* ---- the weights' own ---- */

void hd_weights_make_movable(hd_weights *w) {
    w->expert_slots.movable = true;
}

size_t hd_weights_expert_bytes(const hd_weights *w, int32_t layer) {
    return expert_bytes(&w->expert_slots, layer);
}

size_t hd_weights_packed_bytes(const hd_weights *w, int32_t layer) {
    return packed_bytes(&w->expert_slots, layer);
}

hd_status hd_weights_pack_expert(const hd_weights *w, int32_t layer, int32_t expert, void *out,
                                 hd_err *err) {
    return pack(&w->expert_slots, layer, expert, out, err);
}

hd_status hd_weights_stage_expert(hd_weights *w, int32_t layer, int32_t expert,
                                  const void *packed, hd_stream *s, hd_err *err) {
    return stage(&w->expert_slots, layer, expert, packed, s, err);
}

void hd_weights_sum_expert(const hd_weights *w, int32_t layer, int32_t expert, hd_stream *s,
                           uint64_t *sum) {
    add_checksum(&w->expert_slots, layer, expert, s, sum);
}

hd_status hd_weights_check_map(const hd_weights *w, int32_t layer, const int32_t *expert,
                               hd_err *err) {
    return weights_slots_check(&w->expert_slots, layer, expert, err);
}

void hd_weights_drop_staged(hd_weights *w) {
    for (int32_t l = 0; l < w->expert_slots.n_layers; l++) {
        weights_drop_unused(&w->expert_slots, l);
    }
}
