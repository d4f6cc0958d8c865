/* fetch_order.h - the order in which the copies of a fetch are queued: in slices, dealt round robin
 * over the ranks that hold the experts.
 *
 * A copy engine takes one copy after the other. If all ranks began at the same peer, and took whole
 * experts, they would meet at one link after the other. So a copy is cut into slices, each slice
 * comes from the next peer, and every rank begins at the peer behind itself (DWDP,
 * TensorRT-LLM). */
#ifndef HD_MOE_FETCH_ORDER_H
#define HD_MOE_FETCH_ORDER_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

typedef struct hd_fetch_copy {
    int32_t peer; /* 0 .. n_peers - 1: whose memory `from` is */
    int32_t what; /* a number of the caller's, which slices keep */
    void *to;
    const void *from;
    size_t bytes;
} hd_fetch_copy;

/* The slices of some copies. */
typedef struct hd_fetch_order {
    hd_fetch_copy *slices; /* [n] owned */
    int32_t n;
} hd_fetch_order;

/* Cuts copies[n] into slices of slice_bytes at most, and deals them: one of `first_peer`, one of
 * the next peer, and so on, of each peer in the order of its copies. Peers that have no more are
 * left out. HD_ENOMEM. */
hd_status hd_fetch_order_open(hd_fetch_order *out, const hd_fetch_copy *copies, int32_t n,
                              int32_t n_peers, int32_t first_peer, size_t slice_bytes,
                              hd_err *err);
void hd_fetch_order_close(hd_fetch_order *o); /* all zeros are fine */

#endif
