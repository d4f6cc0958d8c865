/* pd_internal.h - the state of pd.h, and what its files share. Everything belongs to the thread of
 * pd.c, except what the lock guards. Other threads leave notes, which the thread takes in order. */
#ifndef HD_PD_PD_INTERNAL_H
#define HD_PD_PD_INTERNAL_H

#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>

#include "comm/names.h"
#include "pd/link.h"
#include "pd/pd.h"

enum {
    PD_LEASES = 256,
    PD_LEASES_PER_PEER = 64,
    PD_PENDING = 16, /* connections of servers that have not said who they are */
    PD_EVENTS = 16,
    PD_MAX_SOCKETS = 2 * PD_MAX_PEERS + PD_PENDING + 2
};

/* The struct that a member at p is part of. */
#define PD_OWNER(p, type, member) ((type *)(void *)((char *)(p)-offsetof(type, member)))

/* A message of another thread. take() is called once, and owns it. */
typedef struct pd_note {
    struct pd_note *next;
    void (*take)(pd *p, struct pd_note *note);
} pd_note;

typedef struct pd_pending {
    pd_link link; /* fd -1: none */
    int64_t since_ns;
} pd_pending;

typedef struct pd_peer {
    char name[PD_NAME], address[PD_NAME]; /* name "": unused; address: of those to fetch from */
    int32_t source;                       /* the name that stands for it; -1: none */
    bool gone;                            /* that name stands for it no more */
    pd_link link;                         /* fd -1: none */
    bool connecting;                      /* the socket is not connected yet */
    bool broken;                          /* something could not be queued */
    uint64_t epoch;                       /* of its process, while it is up */
    int64_t retry_ns;
    int32_t failures; /* tries since it was up */
    /* written by the thread, in the lock; others read them there */
    bool up;
    int64_t rest_until_ns; /* what it sent was wrong: it is not asked before */
    uint64_t bytes_in, bytes_out, suspicion;
    char why[PD_MAX_TEXT];
} pd_peer;

/* A name that stands for several servers to fetch from. */
typedef struct pd_source_name {
    char address[PD_NAME]; /* "HOST:PORT", of the servers for clients */
    char port[8];          /* of their --transfer-listen */
} pd_source_name;

/* A prompt whose pages are fetched. */
typedef struct pd_fetch {
    pd_note note;
    hd_page_job look;
    pd *pd;
    struct pd_fetch *next; /* of all */
    uint64_t request;
    int32_t peer, group;
    bool cancelled;
    int64_t since_ns;
    uint64_t time_ns;  /* that its lease may last */
    pd_prompt prompt;  /* the pages that lack, once somebody has looked */
    hd_handover side;  /* to check pages: without cache and kv */
    hd_lease_id lease; /* generation 0: none yet */
    int32_t tokens[];  /* of the prompt */
} pd_fetch;

/* A prompt whose pages are sent. */
typedef struct pd_send {
    pd_note ended; /* the request has had its last event */
    pd *pd;
    int32_t peer;
    hd_lease_id lease;
    uint64_t request;
    int64_t since_ns;
    bool released, finished; /* the lease; the request */
    atomic_bool stop;        /* nobody wants more pages */
    pd_prompt prompt;
    /* owned by the engine until the request has ended */
    struct pd_piece *piece; /* the next page; NULL: none is being exported */
    uint32_t n_exported;
    hd_lease_reason failure; /* HD_LEASE_DONE: none */
    int32_t tokens[];        /* [prompt.n_tokens] */
} pd_send;

struct pd {
    pd_options o;
    hd_engine *engine;
    pd_hello hello; /* of this server */
    uint64_t key[2];
    int32_t max_tokens, vocab;
    hd_handover side;                                         /* sizes only */
    uint32_t most_new[PD_N_FRAMES], most_joined[PD_N_FRAMES]; /* see hd_frame_limits */
    int listener, wake;                                       /* -1: none */
    pthread_t thread;
    bool started;
    bool ends; /* no connection is made any more */

    hd_leases *leases;
    pd_fetch *fetch_of[PD_LEASES]; /* by slot of the lease */
    pd_send *send_of[PD_LEASES];
    pd_fetch *fetches;
    pd_send *starting; /* whose request is being submitted; NULL: none */
    int32_t n_sends;   /* that are not freed */
    size_t placing;    /* bytes of pages that wait for the step threads */
    /* PD_MAX_PEERS to fetch from; then as many that fetch here */
    pd_peer peers[2 * PD_MAX_PEERS];
    pd_source_name sources[HD_NAMES_MAX];
    int32_t n_sources;
    hd_names *names; /* NULL: no name stands for several servers */
    pd_pending pending[PD_PENDING];
    uint64_t n_accepted;

    hd_lease_event events[PD_EVENTS]; /* to be stepped; the first one is, if there is one */
    int32_t n_events;
    /* what comes with the first event; NULL: nothing, or it was taken */
    pd_fetch *opening;
    pd_out *piece;
    uint8_t *payload; /* of a frame, n_payload bytes */
    size_t n_payload;

    pthread_mutex_t lock; /* guards the following */
    pd_note *first_note, **last_note;
    bool closing;
    pd_stats stats;
};

/* ---- pd.c ---- */

void pd_post(pd *p, pd_note *note); /* any thread */
void pd_count(pd *p, int64_t *counter, int64_t amount);

hd_lease_event pd_event(hd_lease_event_kind kind, hd_lease_id id);

/* Logs the end of a lease, before its slot is used again. */
void pd_log_end(pd *p, const char *event, hd_lease_id id, const char *trace_id,
                hd_lease_reason reason, int64_t ns);

/* Steps an event and those that follow from it. Inside of another: after it, and returns HD_OK. */
hd_status pd_raise(pd *p, const hd_lease_event *event);
void pd_raise_message(pd *p, int32_t peer, const hd_lease_message *m, uint64_t digest);

/* ---- peers.c ---- */

hd_status pd_peers_open(pd *p, hd_err *err); /* reads the list */
hd_status pd_peers_resolve(pd *p,
                           hd_err *err); /* starts the thread of names, if there are some */
void pd_peers_close(pd *p);
int32_t pd_peers_poll(pd *p, struct pollfd *to); /* returns how many */
void pd_peers_tend(pd *p, const struct pollfd *polled);
uint64_t pd_peers_due(pd *p); /* when it connects again; UINT64_MAX: never */
void pd_peer_lost(pd *p, int32_t peer, const char *why);

/* Takes the frame; NULL: there was no memory, and the connection will be closed. */
void pd_peer_put(pd *p, int32_t peer, pd_frame_kind kind, pd_out *o);
void pd_peer_say(pd *p, int32_t peer, const hd_lease_message *m);

/* ---- receive.c ---- */

hd_page_source pd_source(pd *p);
/* The name of the server that fetches here, where pages are fetched from it as well; else NULL. */
const char *pd_name_to_fetch_from(const pd *p, int32_t peer);
/* Takes the payload, or returns it. */
uint8_t *pd_take_page(pd *p, int32_t peer, const hd_lease_message *m, uint8_t *payload,
                      size_t n);
void pd_say_reserve(pd *p, const hd_lease_action *a);
void pd_write(pd *p, const hd_lease_action *a);
void pd_fetch_over(pd *p, pd_fetch *f, hd_lease_reason reason);

/* ---- send.c ---- */

hd_status pd_take_reserve(pd *p, int32_t peer, const hd_lease_message *m, uint8_t *payload,
                          size_t n, hd_err *err);
void pd_prefill(pd *p, const hd_lease_action *a);
void pd_send_pages(pd *p, const hd_lease_action *a);
void pd_send_over(pd *p, pd_send *s, hd_lease_reason reason);

#endif
