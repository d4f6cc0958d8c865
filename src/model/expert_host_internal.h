/* expert_host_internal.h - the state of experts that operators read in host memory, and the sets through
 * which the layers of a long prompt are streamed. */
#ifndef HD_MODEL_EXPERT_HOST_INTERNAL_H
#define HD_MODEL_EXPERT_HOST_INTERNAL_H

#include "model/expert_host.h"
#include "model/expert_stage_internal.h"

enum { HOST_SETS = 3, HOST_NONE = -1 };

/* An MoE layer. */
typedef struct host_layer {
    /* [ROLES, n_experts] device memory: where they are, in host memory or, if the layer is whole, in slots */
    hd_weight *from;
    int32_t layer, n_experts;
    bool whole; /* expert e is in slot e, for ever */
    hd_expert_slots slots;
    hd_expert_layout layout;
    hd_expert_table tables[MODEL_EXPERT_ROLES];
    hd_expert_table streamed[HOST_SETS][MODEL_EXPERT_ROLES]; /* of rounds in that set */
} host_layer;

/* What moe_fetch leaves of a round, in device memory. */
typedef struct host_round {
    hd_weight *table;
    int32_t *round_offset, *range, *todo;
} host_round;

/* Memory for the experts of a round, with what guards it. */
typedef struct host_set {
    uint8_t *memory; /* [most, slot_bytes] */
    host_round round;
    hd_device_event *fetched, *consumed;
    bool used; /* since rounds were streamed anew: consumed guards it */
} host_set;

/* Rounds of layers, in order: some are fetched, of those the first ones were computed. */
typedef struct host_stream {
    host_set sets[HOST_SETS];
    int32_t most;        /* experts of a set; 0: nothing is streamed */
    int32_t unit, round; /* to be fetched next */
    int32_t end;         /* unit before which it ends */
    int64_t fetched, computed;
    hd_device_event *begun;
} host_stream;

typedef struct expert_host {
    hd_expert_stage base;
    const hd_model_spec *spec;
    const hd_weights *w;
    hd_expert_host_options o;
    /* n_layers: with those of drafts, which come last; n_experts: of a layer, at most */
    int32_t n_layers, n_main, n_experts;
    int32_t *unit_of;  /* [n_layers] HOST_NONE: dense, or absent */
    host_layer *units; /* [n_units] */
    int32_t n_units, n_main_units;
    int32_t n_whole;                     /* the last of them */
    int32_t held_experts, whole_experts; /* of layers that are not whole, and that are */
    size_t slot_bytes, elsewhere_bytes;
    int32_t n_slots; /* of all layers that are not whole */
    void *block;     /* device memory of all that follows */
    host_round own;  /* of rounds that are not streamed */
    hd_fetch_counts *counts;
    hd_fetch_counts *seen; /* host memory that operators write */
    hd_host_rows rows;     /* that the host computes; no mail: none */
    host_stream stream;

    /* the layer */
    hd_expert_layer layer;
    host_layer *unit;
    int32_t round, n_rounds, most;
    bool streams;
} expert_host;

/* The arguments of moe_fetch that all rounds of a layer have. */
hd_moe_fetch_args host_fetch_args(const expert_host *s, const host_layer *u,
                                  const host_round *round);

/* ---- expert_sets.c ---- */

/* Whether a layer with so many places is streamed; begins with it, or ends what was streamed. */
bool host_stream_begin(expert_host *s, int32_t unit);
/* As hd_expert_stage_next(). */
void host_stream_next(expert_host *s, hd_expert_wave *out);
hd_status host_stream_open(expert_host *s, hd_err *err); /* events */
void host_stream_close(expert_host *s);

#endif
