/* expert_slots_internal.h - which expert each slot of an MoE layer holds, and the tables in
 * device memory that operators read. */
#ifndef HD_WEIGHTS_EXPERT_SLOTS_INTERNAL_H
#define HD_WEIGHTS_EXPERT_SLOTS_INTERNAL_H

#include "base/expert_table.h"
#include "moe/split.h"
#include "weights/weights.h"

enum { WEIGHTS_EXPERT_ROLES = 3 }; /* gate, up, down */

/* An expert that another rank sent, in host memory. */
typedef struct weights_received {
    struct weights_received *next;
    int32_t expert;
    hd_weight matrix[WEIGHTS_EXPERT_ROLES];
    void *bytes; /* what the matrices point into */
} weights_received;

/* Device memory of one expert. */
typedef struct weights_buffer {
    hd_weight matrix[WEIGHTS_EXPERT_ROLES];
    size_t bytes[2 * WEIGHTS_EXPERT_ROLES]; /* data of each role, then its scales */
} weights_buffer;

typedef struct weights_slot_layer {
    hd_expert_map map; /* n_slots 0: a dense layer */
    int32_t *expert;   /* [slots of the world] */
    /* [shard's n_experts] the matrices of the experts that this rank has, by the slots that
     * they have when the model opens */
    const hd_weight *held[WEIGHTS_EXPERT_ROLES];
    weights_received *received; /* experts that it did not have then */
    int32_t *buffer; /* [n_experts] on a device: of each expert, -1: it is not here */
    hd_expert_table tables[WEIGHTS_EXPERT_ROLES];
    uint8_t *block; /* device memory of the map and the tables */
} weights_slot_layer;

typedef struct weights_expert_slots {
    hd_shard shard;
    int32_t n_experts, n_layers; /* of the model, MTP layers included */
    weights_slot_layer *layers;  /* [n_layers] */
    int32_t *experts;            /* storage of the layers' expert arrays */
    uint8_t *host;               /* the blocks of all layers, unless a device has them */
    uint8_t *staged;             /* one block, as it is copied */
    int32_t *rank_slot0;         /* [ep + 1] first slot of each rank that shares the experts */

    /* Experts of a device that may move (expert_buffers.c). None is allocated or freed while a model
     * runs: one that comes takes a spare, and that of one that goes is a spare. */
    bool movable;
    weights_buffer *buffers; /* [n_buffers]; NULL: experts do not move, or in host memory */
    int32_t *spares;         /* [n_spares] of the buffers */
    int32_t *buffer_of;      /* storage of the layers' buffer arrays */
    int32_t n_buffers, n_spares;
} weights_expert_slots;

/* Places the experts as hd_shard_slot() says. All zero before; deinit after a failure too. */
hd_status weights_slots_init(weights_expert_slots *s, const hd_model_spec *spec,
                             const hd_shard *shard, hd_err *err);
void weights_slots_deinit(weights_expert_slots *s);

/* Says where the matrices of one role, 0 .. 2, are; they must stay there. */
void weights_slots_hold(weights_expert_slots *s, int32_t layer, int32_t role,
                        const hd_weight *held);

/* Writes all tables, once the held matrices are complete or have moved: into host memory, or
 * (d not NULL) with copies on a stream into memory of d. */
hd_status weights_slots_fill(weights_expert_slots *s, hd_device *d, hd_stream *stream,
                             hd_err *err);

/* Writes the tables in host memory again, after a global scale of held matrices has changed. */
void weights_slots_refill(weights_expert_slots *s);

/* Returns the matrix of an expert that this rank has, or NULL. */
const hd_weight *weights_expert_matrix(const weights_expert_slots *s,
                                       const weights_slot_layer *layer, int32_t role,
                                       int32_t expert);

/* expert_buffers.c: the bytes of spares for as many experts as this rank has slots in a layer; 0: its
 * experts do not move. */
size_t weights_spare_bytes(const weights_expert_slots *s);
/* Lists the held experts, which have reached their places, and spares in so many bytes of device
 * memory, aligned to 256. */
hd_status weights_buffers_open(weights_expert_slots *s, void *spares, hd_err *err);
void weights_buffers_close(weights_expert_slots *s);
/* Takes a spare like the experts of a layer, for an expert; NULL: there is none. */
weights_buffer *weights_buffers_take(weights_expert_slots *s, int32_t layer, int32_t expert);
/* Makes spares of experts of a layer that no slot of this rank holds. */
void weights_buffers_free_unused(weights_expert_slots *s, int32_t layer);
/* Extends what a layer's tables say of addresses to all buffers that its experts may come to. */
void weights_buffers_extend(weights_expert_slots *s, int32_t layer);
/* A matrix like all of the layer, or NULL for a layer without experts. */
const hd_weight *weights_model_of(const weights_expert_slots *s, int32_t layer, int32_t role);

/* expert_moves.c */

/* Takes the values of the complete weights again, of received experts that are not cut (etp is 1). */
void weights_renew_received(weights_expert_slots *s, const weights_expert_slots *whole);
/* Whether a slot of this rank holds an expert. */
bool weights_is_placed(const weights_expert_slots *s, const weights_slot_layer *l,
                       int32_t expert);
/* Frees received experts of a layer that no slot of this rank holds; all: every one. */
void weights_drop_unused(weights_expert_slots *s, int32_t layer);
void weights_drop_all(weights_expert_slots *s);

hd_status weights_slots_check(const weights_expert_slots *s, int32_t layer,
                              const int32_t *expert, hd_err *err);

/* See hd_weights_place_experts(). */
hd_status weights_slots_place(weights_expert_slots *s, int32_t layer, const int32_t *expert,
                              hd_stream *stream, hd_err *err);

#endif
