/* expert_moves_internal.h - orders of the leader to move experts between ranks, and what every rank
 * does for them. */
#ifndef HD_RUNNER_EXPERT_MOVES_INTERNAL_H
#define HD_RUNNER_EXPERT_MOVES_INTERNAL_H

#include "runner/model_runner_internal.h"

/* An order about experts; a map of all slots follows VERIFY. expert_moves.c carries it out. */
typedef enum runner_move_kind {
    RUNNER_MOVE_STAGE,
    RUNNER_MOVE_VERIFY,
    RUNNER_MOVE_FLIP,
    RUNNER_MOVE_DROP
} runner_move_kind;

typedef struct runner_move_order {
    int32_t kind; /* a runner_move_kind */
    int32_t layer, expert, from, to;
    uint32_t version; /* of the map that is replaced */
} runner_move_order;

/* What a rank says after an order. All ranks must have been told the same. */
typedef struct runner_vote {
    int32_t status;   /* an hd_status */
    uint32_t told[2]; /* checksum of the order and its map */
} runner_vote;

/* commands.c: sends an order to the followers, and carries it out; map [slots] or NULL. */
hd_status runner_order_move(hd_model_runner *x, const runner_move_order *o, const int32_t *map,
                            hd_err *err);

/* expert_moves.c: opens its memory; the bytes of an order with a map; carries one out, whose
 * numbers it checks. HD_EPEER or the stream's failure ends communication; any other failure is
 * that of a rank that refused, which all know. */
hd_status runner_moves_open(hd_model_runner *x, hd_err *err);
void runner_moves_close(hd_model_runner *x);
size_t runner_order_bytes(const hd_model_runner *x);
hd_status runner_move(hd_model_runner *x, const void *payload, hd_err *err);

/* expert_copies.c: close accepts all zeros. most: experts that are copied before a flip. In host memory
 * all of it does nothing. */
hd_status runner_copies_open(hd_model_runner *x, int32_t most, hd_err *err);
void runner_copies_close(hd_model_runner *x);
/* Before an expert is staged; behind that, on all ranks, adds checksums where it was and will be. */
void runner_copies_begin(hd_model_runner *x);
hd_status runner_copies_add(hd_model_runner *x, const runner_move_order *o, hd_err *err);
bool runner_copies_are_done(const hd_model_runner *x); /* those of this rank; without waiting */
void runner_copies_flipped(hd_model_runner *x);

#endif
