/* peers_internal.h - a rank on a GPU, as the transports of ranks on GPUs see it: threads (peers.c) and
 * processes (ipc.c) of one host. They say where the memory of the other ranks is; the calls of comm.h
 * are the same. */
#ifndef HD_COMM_PEERS_INTERNAL_H
#define HD_COMM_PEERS_INTERNAL_H

#include "comm/peers.h"

struct comm_peer {
    hd_comm comm;
    const hd_comm *host; /* NULL: there is none any more */
    comm_peers *world;   /* NULL: the other ranks are other processes */
    hd_device *device;
    hd_stream *stream;
    const hd_exchange_ops *ops;
    hd_exchange_state *state; /* pinned */
    void *own;                /* its memory of exchanges, on the device */

    /* by rank of the layout, once all have met: their memory of exchanges, and the bytes to add to
     * pointers to their rows, as this device reaches them */
    void *memory[HD_EXCHANGE_MAX_RANKS];
    int64_t shift[HD_EXCHANGE_MAX_RANKS];
    bool met, shares_gpu; /* shares_gpu: two ranks have the same one */
    bool exchanged; /* an exchange was queued, whose results are undefined after the end */

    /* NULL: the others reach all memory; else shows them [rows, row_bytes] */
    hd_status (*share_rows)(comm_peer *r, hd_stream *s, hd_err *err);
    void *rows;
    size_t row_bytes;

    uint64_t sent, combined; /* dispatches */
    hd_dispatch_args dispatch[HD_COMM_MAX_INFLIGHT];
};

/* Takes what the rank has as long as its device: words of the host, the stream's check. */
hd_status comm_peer_open(comm_peer *r, hd_device *device, hd_stream *stream, const hd_ops *ops,
                         hd_err *err);

/* Takes memory of exchanges, none of which was made yet. */
hd_status comm_peer_take_memory(comm_peer *r, hd_err *err);

/* The calls that concern the host's memory are those of host, which stays. */
void comm_peer_set_host(comm_peer *r, const hd_comm *host);

/* Ends the waiting of the rank's kernels. Any thread. */
void comm_peer_end(comm_peer *r);

/* Whether the other ranks reach what lies at p. */
static inline bool comm_peer_shares(const comm_peer *r, const void *p) {
    const char *at = p, *rows = r->rows;
    return r->world || (at >= rows && at < rows + r->row_bytes);
}

#endif
