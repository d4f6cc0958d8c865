/* link.h - one connection to another server: a channel whose socket never blocks, with a queue of
 * frames to be sent. Owned by one thread, which polls the socket. */
#ifndef HD_PD_LINK_H
#define HD_PD_LINK_H

#include "pd/wire.h"

/* A frame on its way out: its header and payload lie behind it. */
typedef struct pd_out {
    struct pd_out *next;
    size_t n, sent; /* bytes of header and payload; of them sent */
} pd_out;

/* Returns a frame with room for n bytes of payload, or NULL. free() it, or give it to
 * pd_link_put(). */
pd_out *pd_out_new(size_t n);
void *pd_out_payload(pd_out *o);

typedef struct pd_link {
    hd_channel channel; /* fd -1: none */
    pd_out *first, *last;
    size_t queued; /* bytes that wait */
    uint64_t bytes_in, bytes_out;
    int64_t heard_ns, sent_ns; /* when something came, and was put, last */
} pd_link;

void pd_link_close(pd_link *l); /* keeps the counts of bytes */

/* Seals a frame, and queues it. */
void pd_link_put(pd_link *l, pd_frame_kind kind, pd_out *o, int64_t now_ns);

/* Queues a frame with a copy of the payload. HD_ENOMEM: not queued. */
hd_status pd_link_say(pd_link *l, pd_frame_kind kind, const void *payload, size_t n,
                      int64_t now_ns);

/* Sends what the socket takes. HD_EIO: the connection is lost. */
hd_status pd_link_flush(pd_link *l, hd_err *err);

/* As hd_channel_read(); on HD_OK the payload may be taken by setting channel.payload to NULL. */
hd_status pd_link_read(pd_link *l, int64_t now_ns, hd_err *err);

#endif
