/* expert_slots_internal.h - which expert each slot of an MoE layer holds, and the tables in
 * device memory that operators read. */
#ifndef HD_WEIGHTS_EXPERT_SLOTS_INTERNAL_H
#define HD_WEIGHTS_EXPERT_SLOTS_INTERNAL_H

#include "base/expert_table.h"
#include "weights/weights.h"

enum { WEIGHTS_EXPERT_ROLES = 3 }; /* gate, up, down */

typedef struct weights_slot_layer {
    hd_expert_map map; /* n_slots 0: a dense layer */
    int32_t *expert;   /* [slots of the world] */
    /* [shard's n_experts] the matrices of the experts that this rank has, by the slots that
     * they have when the model opens */
    const hd_weight *held[WEIGHTS_EXPERT_ROLES];
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

/* See hd_weights_place_experts(). */
hd_status weights_slots_place(weights_expert_slots *s, int32_t layer, const int32_t *expert,
                              hd_stream *stream, hd_err *err);

#endif
