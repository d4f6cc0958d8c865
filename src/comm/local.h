/* local.h - communication between ranks of one process, one thread each.
 *
 * Ranks read each other's rows where they lie: on a CPU the threads do, on GPUs the kernels of
 * comm/peers.h. A thread that waits for another spins briefly,
 * then sleeps. hd_comm_abort() wakes all that wait. */
#ifndef HD_COMM_LOCAL_H
#define HD_COMM_LOCAL_H

#include "comm/comm.h"

enum { HD_LOCAL_MAX_RANKS = 64 };

typedef struct hd_comm_local hd_comm_local; /* what all ranks share */

hd_status hd_comm_local_open(hd_comm_local **out, const hd_parallel_config *parallel,
                             hd_err *err);
/* NULL is fine; after the threads of all ranks. Memory on a GPU goes with its device. */
void hd_comm_local_close(hd_comm_local *w);

/* Joins rank `rank`, which computes on the device and the stream with the operators; its one thread
 * makes the calls. *out lives as long as w. HD_EUNSUPPORTED if the operators' elements are not
 * float32, or if one GPU cannot read the memory of another. All ranks compute on a host, or all on
 * GPUs: each has one, or several share one. Any thread may join. */
hd_status hd_comm_local_join(hd_comm_local *w, int32_t rank, hd_device *device,
                             hd_stream *stream, const hd_ops *ops, const hd_comm **out,
                             hd_err *err);

/* Begins anew after an abort: no exchange is under way, and the ranks that have joined may make
 * calls again. No thread may be in a call. */
void hd_comm_local_reset(hd_comm_local *w);

/* hd_comm_abort() for a rank that could not join. */
void hd_comm_local_abort(hd_comm_local *w, const char *why);

#endif
