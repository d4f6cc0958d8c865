/* weights_internal.h - loaded weights, in data that the files of this folder share: what was
 * bound (weights.c), and what an update replaces (update.c). */
#ifndef HD_WEIGHTS_WEIGHTS_INTERNAL_H
#define HD_WEIGHTS_WEIGHTS_INTERNAL_H

#include <assert.h>

#include "weights/bind_internal.h"
#include "weights/dummy_internal.h"
#include "weights/experts/expert_slots_internal.h"
#include "weights/shard_internal.h"
#include "weights/update.h"
#include "weights/weights.h"

/* The tensor of one role in one layer. */
typedef struct weights_slot {
    hd_weight weight;     /* data NULL: none */
    hd_weight *experts;   /* [shard's n_experts] for the roles EXPERT_*, as when opened */
    const float *vector;  /* in the map, or owned */
    void *owned;          /* the converted vector or the table */
    const int32_t *table; /* ROUTER_HASH */
} weights_slot;

typedef struct weights_use {
    hd_use what;
    int32_t decl;
} weights_use;

/* An array of the host, and its copy on a device. */
typedef struct weights_move {
    void *to;
    const void *from;
    size_t bytes;
} weights_move;

struct hd_weights {
    const hd_model_spec *spec;
    hd_checkpoint *checkpoint; /* NULL: dummies */
    weights_dummies dummies;
    hd_schema schema;
    weights_bound *bound; /* [schema.n]; data NULL if missing, weight.data if it does not fit */
    bool *missing;        /* [schema.n] */
    bool *lost;           /* [schema.n] its values were lost; updates bring them back */
    int32_t n_lost;
    weights_use *uses;   /* [tensors of the checkpoint] */
    weights_slot *slots; /* [1 + n_layers + n_mtp, HD_N_ROLES], the global ones first */
    hd_weight *experts;  /* storage of the slots' experts */
    weights_expert_slots expert_slots;
    int32_t *token_classes; /* [vocab]; NULL without Engram */
    hd_shard shard;
    hd_slice *slices;      /* [schema.n] of the complete weights; NULL: not opened from them */
    weights_pieces pieces; /* copies of column shards */
    size_t *first_piece;   /* [schema.n] of each tensor's */
    bool on_devices;       /* shards of it are: global scales cannot change */
    int32_t n_mtp;
    bool experts_elsewhere; /* in the files; operators must not read them there */
    hd_device *device;      /* that has a copy of what operators read; NULL: host memory */
    void *device_block;     /* the copy's memory */
    weights_move *moves;    /* [n_moves] its arrays */
    size_t n_moves;
    hd_err problem;
};

static inline weights_slot *weights_slot_at(const hd_weights *w, int32_t layer, hd_role role) {
    assert(layer >= HD_GLOBAL && layer < w->spec->n_layers + w->spec->n_mtp);
    assert(role >= 0 && role < HD_N_ROLES);
    return &w->slots[(size_t)(layer + 1) * HD_N_ROLES + (size_t)role];
}

/* weights.c: stores a bound tensor where the accessors look it up. */
hd_status weights_place(hd_weights *w, int32_t decl, hd_err *err);

/* renew.c: views a tensor's slice in the complete weights, or copies it: a second time into the memory
 * of the first. */
hd_status weights_slice(hd_weights *w, const hd_weights *whole, int32_t decl, hd_err *err);

/* update.c: no tensor is lost any more. */
void weights_find_all(hd_weights *w);
bool weights_update_brings(const hd_weights_update *u, int32_t decl);

/* Whether a file may have this tensor although no model uses it. */
bool weights_of_no_use(const char *name);

/* Expert id i of a table as a file stores it: I32 or I64. */
int64_t weights_integer_at(const hd_tensor *t, size_t i);

#endif
