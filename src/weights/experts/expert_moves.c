/* expert_moves.c - experts that travel between ranks: packed with their scales and a checksum,
 * checked and kept where they arrive. Host memory only. */
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/checksum.h"
#include "weights/expert_slots_internal.h"

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

/* A matrix like all of the layer, or NULL for a dense layer. */
static const hd_weight *model_of(const weights_expert_slots *s, int32_t layer, int32_t role) {
    if (layer < 0 || layer >= s->n_layers || s->layers[layer].map.n_slots == 0) return NULL;
    const hd_weight *first = &s->layers[layer].held[role][0];
    return first->data ? first : NULL; /* an MTP layer that the files lack */
}

size_t weights_packed_bytes(const weights_expert_slots *s, int32_t layer) {
    size_t at = sizeof(packed_head);
    if (!model_of(s, layer, 0)) return 0;
    for (int32_t r = 0; r < WEIGHTS_EXPERT_ROLES; r++) {
        at = part_at(model_of(s, layer, r), at).end;
    }
    return aligned(at);
}

static uint64_t checksum_of(const packed_head *head, const void *packed) {
    packed_head blank = *head;
    blank.checksum = 0;
    const uint64_t sum = hd_checksum(0, &blank, sizeof blank);
    return hd_checksum(sum, (const uint8_t *)packed + sizeof blank,
                       (size_t)head->bytes - sizeof blank);
}

hd_status weights_pack_expert(const weights_expert_slots *s, int32_t layer, int32_t expert,
                              void *out, hd_err *err) {
    const size_t bytes = weights_packed_bytes(s, layer);
    packed_head head = {.magic = MAGIC, .bytes = bytes, .layer = layer, .expert = expert};
    size_t at = sizeof head;
    if (!bytes || !weights_expert_matrix(s, &s->layers[layer], 0, expert)) {
        return HD_FAIL(err, HD_EINVAL, "layer %d: rank %d does not have expert %d", layer,
                       s->shard.rank, expert);
    }
    memset(out, 0, bytes);
    for (int32_t r = 0; r < WEIGHTS_EXPERT_ROLES; r++) {
        const hd_weight *w = weights_expert_matrix(s, &s->layers[layer], r, expert);
        head.matrix[r] = describe(w, r);
        if (!same_format(head.matrix[r], describe(model_of(s, layer, r), r))) {
            return HD_FAIL(err, HD_EINVAL,
                           "layer %d: expert %d has another format than the first of its rank",
                           layer, expert);
        }
        const part p = part_at(w, at);
        memcpy((uint8_t *)out + p.data, w->data, p.data_bytes);
        if (p.scale_bytes) memcpy((uint8_t *)out + p.scale, w->scale, p.scale_bytes);
        at = p.end;
    }
    head.version = s->layers[layer].map.version;
    head.checksum = checksum_of(&head, out);
    memcpy(out, &head, sizeof head);
    return HD_OK;
}

/* ---- arrival ---- */

static hd_status check(const weights_expert_slots *s, int32_t layer, int32_t expert,
                       const void *packed, packed_head *head, hd_err *err) {
    const size_t bytes = weights_packed_bytes(s, layer);
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
        if (same_format(head->matrix[r], describe(model_of(s, layer, r), r))) continue;
        return HD_FAIL(err, HD_EFORMAT, "layer %d: expert %d has another format", layer,
                       expert);
    }
    return HD_OK;
}

hd_status weights_stage_expert(weights_expert_slots *s, int32_t layer, int32_t expert,
                               const void *packed, hd_err *err) {
    packed_head head;
    HD_TRY(check(s, layer, expert, packed, &head, err));
    weights_slot_layer *l = &s->layers[layer];
    if (weights_expert_matrix(s, l, 0, expert)) return HD_OK; /* it has it */
    weights_received *r = calloc(1, sizeof *r);
    uint8_t *bytes = malloc((size_t)head.bytes);
    if (!r || !bytes) {
        free(r);
        free(bytes);
        return HD_FAIL(err, HD_ENOMEM, "no memory for an expert of %zu bytes",
                       (size_t)head.bytes);
    }
    memcpy(bytes, packed, (size_t)head.bytes);
    size_t at = sizeof head;
    for (int32_t k = 0; k < WEIGHTS_EXPERT_ROLES; k++) {
        hd_weight *w = &r->matrix[k];
        *w = *model_of(s, layer, k);
        const part p = part_at(w, at);
        w->data = bytes + p.data;
        w->scale = p.scale_bytes ? bytes + p.scale : NULL;
        w->global = head.matrix[k].global;
        at = p.end;
    }
    r->expert = expert;
    r->bytes = bytes;
    r->next = l->received;
    l->received = r;
    return HD_OK;
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

static bool is_placed(const weights_expert_slots *s, const weights_slot_layer *l,
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
    for (weights_received **at = &l->received; *at;) {
        if (is_placed(s, l, (*at)->expert)) {
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
