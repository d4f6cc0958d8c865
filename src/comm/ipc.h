/* ipc.h - ranks on GPUs as processes of one host: their exchanges are kernels (ops/exchange.h) that
 * reach the memory of the others by CUDA IPC, in the queue of a stream and in captured steps.
 *
 * comm/ucx.c has one of these if its device is a GPU: the ranks meet, send host memory and lose each
 * other there. In each epoch a rank takes new memory for exchanges, since who was lost may still write
 * into the old one; that, and shared rows that were released, is freed once all who had it open have
 * closed it or ended. */
#ifndef HD_COMM_IPC_H
#define HD_COMM_IPC_H

#include "comm/comm.h"

typedef struct comm_ipc comm_ipc; /* of one rank */

hd_status comm_ipc_open(comm_ipc **out, hd_device *device, hd_stream *stream, const hd_ops *ops,
                        hd_err *err);

/* Waits for the stream, and closes the memory of the others. It stays usable. */
void comm_ipc_disconnect(comm_ipc *x);

/* After that, when nobody has the memory of this rank open. NULL is fine; before the device. */
void comm_ipc_close(comm_ipc *x);

/* Begins an epoch: host is the rank's end of it for host memory, and stays until the next one. Exchanges
 * memory with all ranks of the layout, which call it too. HD_EPEER: communication has ended;
 * HD_EUNSUPPORTED: a rank's memory is out of reach, by its name. */
hd_status comm_ipc_connect(comm_ipc *x, const hd_comm *host, hd_err *err);

/* Instead of that, where communication has ended before it began: nothing can be exchanged. */
void comm_ipc_come_late(comm_ipc *x, const hd_comm *host);

/* Ends the waiting of the rank's kernels in this epoch. Any thread. */
void comm_ipc_end(comm_ipc *x);

const hd_comm *comm_ipc_comm(const comm_ipc *x);

#endif
