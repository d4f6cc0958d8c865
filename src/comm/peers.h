/* peers.h - ranks of one process on GPUs that reach each other's memory: their exchanges are kernels
 * (ops/exchange.h), so they lie in the queue of a stream, and a captured step has them too.
 *
 * comm/local.c has one of these if its ranks compute on GPUs. Host memory (broadcast, all-gather of
 * host memory) and the end of communication are local.c's. */
#ifndef HD_COMM_PEERS_H
#define HD_COMM_PEERS_H

#include "comm/comm.h"

typedef struct comm_peers comm_peers; /* of a world */
typedef struct comm_peer comm_peer;   /* one rank */

hd_status comm_peers_open(comm_peers **out, int32_t n_ranks, hd_err *err);
void comm_peers_close(comm_peers *p); /* NULL is fine; before the devices of the ranks */

/* Joins a rank. host: its end for host memory, which stays; its figures count. Any thread. */
hd_status comm_peers_join(comm_peers *p, const hd_comm *host, hd_device *device,
                          hd_stream *stream, const hd_ops *ops, const hd_comm **out,
                          hd_err *err);

/* Ends the waiting of all kernels, and returns when no rank's stream runs any more. */
void comm_peers_abort(comm_peers *p);

/* After that: exchanges begin anew. No rank may queue anything meanwhile. */
void comm_peers_reset(comm_peers *p);

#endif
