/* new_weights.h - weights that are replaced, and memory that is given back, between two steps of all
 * ranks. */
#ifndef HD_ENGINE_NEW_WEIGHTS_H
#define HD_ENGINE_NEW_WEIGHTS_H

#include "engine/rank.h"

/* ---- update.c ---- */

/* Applies the new weights that were posted, or gives memory back. On the thread of rank 0, between
 * two rounds, while all ranks rest. */
void engine_update_apply(engine_rank *first);
/* The complete weights are others, by u; NULL: all of them. */
hd_status engine_update_renew_shards(hd_engine *e, const hd_weights_update *u, hd_err *err);

/* On a leader's thread, in a round: what its order says about weights. */
void engine_update_obey(engine_rank *rank);

/* ---- update_send.c: weights of ranks in processes of their own ---- */

/* On rank 0, before its order goes out: says that weights are others if some changes have not
 * reached the other ranks, of which one may have come since the last round. */
void engine_update_look(engine_rank *first);
/* On the leaders' threads, at the beginning of the same round: all get what rank 0 has. */
hd_status engine_update_exchange(engine_rank *leader, hd_err *err);
hd_status engine_update_follow(void *follower, hd_err *err); /* of a rank, meanwhile */

#endif
