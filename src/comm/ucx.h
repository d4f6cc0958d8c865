/* ucx.h - communication between processes and hosts: messages (comm/messages.h) by UCX over TCP or RDMA, or
 * through memory that the ranks of one host share (comm/shm.h); rendezvous and heartbeats by TCP
 * (comm/rendezvous.h).
 *
 * A thread that waits spins briefly, then sleeps. When a rank ends,
 * all that wait fail with HD_EPEER and its number; so they do after a limit of time. The ranks that
 * are left can then begin anew, and with those that come again. Message
 * headers are authenticated under a secret of the world, their bytes too unless the ranks meet on
 * the loopback interface. Nothing is encrypted. */
#ifndef HD_COMM_UCX_H
#define HD_COMM_UCX_H

#include "comm/comm.h"
#include "comm/preflight.h"
#include "comm/rendezvous.h"

enum { HD_UCX_MAX_RANKS = 64, HD_UCX_MAX_CARD = 256 };

typedef struct hd_comm_ucx hd_comm_ucx;

typedef struct hd_comm_ucx_options {
    hd_rendezvous_options rendezvous;
    hd_parallel_config parallel; /* of rendezvous.world ranks */
    uint64_t max_message;        /* bytes; 0: 1 GiB */
    /* longest wait for another rank, but for a broadcast, once it has opened; 0: 60 s */
    int32_t wait_ms;
    int32_t
        preflight_ms; /* longest time of the first messages (preflight.h); 0: HD_PREFLIGHT_MS */
    /* As UCX_TLS and UCX_NET_DEVICES, which hold where these are NULL. Without a device, ranks
     * use the interface by which they meet, or choose among devices of RDMA. A rank that names transports shares no memory. */
    const char *transports, *devices;
    /* Called by a thread of its own when communication has ended; may be NULL. */
    void (*on_end)(void *ctx);
    /* Sets the layout of n ranks, the same on every rank; false: there are too few. Ranks beyond
     * those of the layout wait. NULL: the world never begins anew. */
    bool (*layout_of)(void *ctx, int32_t n, hd_parallel_config *out);
    void *ctx;
    /* What this rank tells the others of itself, equally many bytes on all; NULL: nothing. It must outlive
     * the communication. */
    const void *card;
    uint32_t card_bytes; /* at most HD_UCX_MAX_CARD */
} hd_comm_ucx_options;

/* True if this build has UCX. */
bool hd_comm_ucx_is_built(void);

/* Waits until all ranks have joined; on GPUs all must be of this host (comm/ipc.h). If they work without this rank already, communication has
 * ended until hd_comm_ucx_begin_anew(). The rank's one thread makes the calls, on the device and the
 * stream with the operators. HD_EUNSUPPORTED: built without UCX, a GPU whose memory a rank cannot
 * reach, or the operators' elements are not float32. */
hd_status hd_comm_ucx_open(hd_comm_ucx **out, const hd_comm_ucx_options *o, hd_device *device,
                           hd_stream *stream, const hd_ops *ops, hd_err *err);
const hd_comm *hd_comm_ucx_interface(const hd_comm_ucx *u);

/* Who works together. Constant between two calls of hd_comm_ucx_begin_anew(). */
typedef struct hd_comm_members {
    uint32_t epoch;                   /* from 1 on; 0: none yet */
    int32_t n;                        /* ranks of the layout */
    int32_t number[HD_UCX_MAX_RANKS]; /* [n] in the world that was opened */
    uint64_t connected; /* a bit for each rank of the world, those that wait for a place too */
    uint64_t losses;    /* of rank 0: how many times it had lost another rank before */
} hd_comm_members;
const hd_comm_members *hd_comm_ucx_members(const hd_comm_ucx *u);

/* Before the first epoch every pair of ranks has exchanged bytes (preflight.h). On rank 0: the bytes per
 * second each way of ranks a and b of the world; 0: unknown. The name of a rank's host, "" if unknown. */
double hd_comm_ucx_rate(const hd_comm_ucx *u, int32_t a, int32_t b);
const char *hd_comm_ucx_host(const hd_comm_ucx *u, int32_t number);

/* On rank 0: what a rank of the world told then. False on other ranks. */
bool hd_comm_ucx_read_rank(const hd_comm_ucx *u, int32_t number, hd_preflight_rank *out);

/* What the rank of a place in the layout tells of itself; NULL: nothing, or there is no epoch yet. */
const void *hd_comm_ucx_card(const hd_comm_ucx *u, int32_t place);

/* On rank 0: what a rank of the world that was opened has exchanged, as it told last. Any thread. */
void hd_comm_ucx_read_figures(const hd_comm_ucx *u, int32_t number, hd_rank_figures *out);

/* On rank 0: how another rank was lost last, into why [HD_RENDEZVOUS_TEXT]. Any thread. */
void hd_comm_ucx_read_loss(const hd_comm_ucx *u, int32_t number, char *why);

/* After the end of communication, on the rank's thread: waits until enough ranks are there that this
 * one has a place. Rank i of the new interface was number[i]. HD_EAGAIN: this rank or rank 0 has
 * left. HD_EPEER: rank 0 is lost. waits(ctx) is called each time that it waits for more ranks. */
hd_status hd_comm_ucx_begin_anew(hd_comm_ucx *u, hd_parallel_config *out,
                                 void (*waits)(void *ctx), hd_err *err);

/* Makes hd_comm_ucx_begin_anew() return. Any thread. */
void hd_comm_ucx_leave(hd_comm_ucx *u);

/* Waits until all ranks close, unless communication has ended. NULL is fine. Before the rank's stream
 * and device. */
void hd_comm_ucx_close(hd_comm_ucx *u);

#endif
