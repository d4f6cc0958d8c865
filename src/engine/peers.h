/* peers.h - the ranks whose experts a rank of several processes fetches (dwdp). Those of its own host have the
 * same files mapped. Those of other hosts are asked for (comm/pieces.h), by way of an address that every
 * rank tells the others when they meet. */
#ifndef HD_ENGINE_PEERS_H
#define HD_ENGINE_PEERS_H

#include "engine/rank.h"
#include "model/expert_fetch.h"

/* Listens for ranks on other hosts, unless all are on this one. Before the ranks meet. */
hd_status engine_peers_open(engine_rank *rank, const hd_engine_options *o, hd_err *err);
/* Answers them, once the weights are there. */
hd_status engine_peers_serve(engine_rank *rank, hd_err *err);
void engine_peers_close(engine_rank *rank);

/* What this rank tells the others; NULL: nothing. */
const void *engine_peers_card(const engine_rank *rank, uint32_t *n);

/* Sets sources [n] of the rank's place, free() them; of ranks of other hosts with readers, until
 * engine_peers_leave(). */
hd_status engine_peers_sources(engine_rank *rank, hd_fetch_source **out, int32_t *n,
                               hd_err *err);
void engine_peers_leave(engine_rank *rank);

void engine_peers_read(engine_rank *rank); /* into its totals */

#endif
