/* ucx_internal.h - a link of UCX active messages: its state, and what opening it (ucx.c) needs of what it does
 * then (ucx_link.c). Only with HD_UCX. */
#ifndef HD_COMM_UCX_INTERNAL_H
#define HD_COMM_UCX_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>

#include "comm/figures_internal.h"
#include "comm/ipc.h"
#include "comm/messages.h"
#include "comm/preflight.h"
#include "comm/shm.h"
#include "comm/spin_internal.h"
#include "comm/ucx.h"
#include "comm/ucx_library.h"

enum {
    UCX_AM_ID = 7,
    UCX_CLOSE_MS = 20,
    UCX_HOST_BYTES = 32, /* of a host's name, behind the address */
    UCX_REASON = 256,
    UCX_PLACES = (int)HD_N_GROUPS * (int)HD_N_MESSAGE_LANES * (int)HD_COMM_MAX_INFLIGHT
};

/* Messages of a peer that have arrived, by group, lane and ticket. */
typedef struct ucx_peer {
    hd_comm_ucx *world;
    int32_t number; /* in the world that was opened */
    ucp_ep_h ep;
    hd_received at[UCX_PLACES];
} ucx_peer;

/* The header travels before the data and must stay as long. Those that have been sent are kept
 * for the next messages, so that a step allocates nothing. */
typedef struct ucx_outgoing {
    hd_message head;
    hd_comm_ucx *world;
    int32_t set;
    struct ucx_outgoing *next; /* of the free ones */
} ucx_outgoing;

struct hd_comm_ucx {
    const ucx_library *ucp;
    comm_figures figures; /* of all epochs */
    hd_messages *messages;
    comm_ipc *gpu; /* NULL: the rank computes on a CPU */
    comm_shm *shm; /* of this epoch; NULL: UCX carries the messages */
    hd_rendezvous *rendezvous;
    ucp_context_h context;
    ucp_worker_h worker;
    ucx_peer *peers; /* [limits.world] */
    hd_message_limits limits;
    hd_comm_ucx_options o;
    hd_comm_members members;
    int32_t rank, wait_ms;         /* rank: of members */
    int64_t until_ns;              /* end of the preflight; 0: it is over */
    bool greeted;                  /* in it all ranks have sent a first message */
    float *rates;                  /* [world, world] of rank 0; NULL: unknown */
    hd_preflight_rank *ranks;      /* [world] of rank 0; NULL: unknown */
    uint64_t free_bytes;           /* of memory, before weights are read */
    char (*hosts)[UCX_HOST_BYTES]; /* [world] */
    comm_spin spin;
    int32_t n_sending; /* of all sets */
    int ucx_fd, wake_fd;
    int32_t sending[HD_LINK_SETS]; /* not complete yet */
    ucx_outgoing *free;
    const ucx_peer *broken; /* UCX lost the connection to it, at broken_ns */
    int64_t broken_ns;
    pthread_mutex_t mutex; /* of the changes of over, why and shm */
    _Atomic uint32_t over; /* one more than the last epoch that has ended */
    char why[UCX_REASON];  /* that one ended; constant until the next begins */
};

/* Whether the epoch has ended. */
static inline bool ucx_is_over(const hd_comm_ucx *u) {
    return atomic_load(&u->over) > u->limits.epoch;
}

/* Of the watch, or of this rank's thread. The first reason stays. One event for each epoch, before its end is
 * seen: it is read before the next one begins, whose waits would not sleep. */
void ucx_end_here(void *ctx, uint32_t epoch, const char *why);

/* The same, for all ranks of this epoch. */
void ucx_end_all(hd_comm_ucx *u, const char *why);

/* One line, which says what to do. what: behind "rank 0 on a: ", before " rank 1 on b". */
void ucx_name_pair(char why[UCX_REASON], const hd_comm_ucx *u, int32_t other, const char *what);

/* UCX lost the connection to the peer `arg`. A rank that ended or left has told, or is about to be told by the
 * watch, which knows why. */
void ucx_on_lost(void *arg, ucp_ep_h ep, ucs_status_t status);

/* A message has come; arg: the hd_comm_ucx. */
ucs_status_t ucx_on_message(void *arg, const void *header, size_t header_n, void *data,
                            size_t n, const ucp_am_recv_param_t *param);

/* Sleeps until there is something to do, at most limit_ms (-1: no limit). */
void ucx_sleep(hd_comm_ucx *u, int limit_ms);

/* What messages.h uses of it. */
hd_link ucx_link(hd_comm_ucx *u);

int32_t ucx_preflight_ms(const hd_comm_ucx *u);

#endif
