/* picture.h - what a router knows of its servers, and the choice of one for a request.
 *
 * Pure: no clock, socket or thread. The picture comes from load reports and from what the router
 * itself has sent; it may be old, and a wrong guess costs time and changes no answer. */
#ifndef HD_ROUTER_PICTURE_H
#define HD_ROUTER_PICTURE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "comm/names.h"
#include "router/prefix.h"

enum {
    ROUTER_MAX_PEERS = HD_NAMES_SERVERS,
    ROUTER_MAX_SOURCES = HD_NAMES_MAX,
    ROUTER_PEER_NAME = HD_NAMES_BYTES
};

typedef enum router_role { ROUTER_DECODE, ROUTER_PREFILL } router_role;

/* A load report. */
typedef struct router_load {
    int32_t running, waiting, max_running; /* requests */
    int64_t pending_tokens;                /* prompt tokens that are not computed yet */
} router_load;

typedef struct router_peer {
    char name[ROUTER_PEER_NAME]; /* HOST:PORT; "": an unused place */
    router_role role;
    int32_t source;        /* -1: the list names it */
    bool gone;             /* its source has it no more: it gets no new requests */
    bool up;               /* its last report came */
    int64_t rest_until_ns; /* it refused a request: none is sent to it before; 0: none did */
    router_load load;
    int32_t inflight; /* requests that this router sent and that have not ended */
    int64_t
        inflight_tokens; /* their prompt tokens that were not cached, before the first byte */
    int64_t requests, failures; /* sent; ended without a reply */
} router_peer;

/* A name that stands for many servers. */
typedef struct router_source {
    char address[ROUTER_PEER_NAME]; /* HOST:PORT */
    router_role role;
} router_source;

typedef struct router_seen router_seen;

typedef struct router_picture {
    router_peer peers[ROUTER_MAX_PEERS];
    int32_t n; /* places, some unused */
    router_source sources[ROUTER_MAX_SOURCES];
    int32_t n_sources;
    router_seen *seen;
    int64_t prompt_tokens, cached_tokens; /* of all choices, as guessed */
} router_picture;

typedef struct router_choice {
    int32_t peer; /* -1: no server can take it */
    int32_t
        prefill; /* the server whose pages it is to fetch; -1: it computes the prompt itself */
    int64_t tokens; /* of the prompt that peer probably has not cached */
} router_choice;

hd_status router_picture_open(router_picture *p, hd_err *err);
void router_picture_close(router_picture *p);

/* Adds servers of a list "HOST:PORT,..."; flag names it in errors. "dns:HOST:PORT" is a source. */
hd_status router_picture_add(router_picture *p, router_role role, const char *flag,
                             const char *list, hd_err *err);

/* A source resolves to these servers now. Those that it had before and has no more are gone. If there
 * is no place for one, it is left out. */
void router_picture_resolved(router_picture *p, int32_t source, const hd_resolved *servers);
void router_picture_remove(router_picture *p,
                           int32_t peer); /* nothing is sent to it any more */

/* Chooses the server with the shortest predicted time to the first token, counted in tokens to be
 * computed before it; of equal ones, the one after `turn` requests in turn. tried: bits of servers
 * that may not be chosen. A server far above the mean of requests is not chosen for what it has
 * cached. Prefill servers take whole requests only if no decode server is up. */
router_choice router_choose(const router_picture *p, const router_prefix *prefix,
                            uint64_t tried, uint64_t turn, int64_t now_ns);

/* Remembers prefixes that a server says it was sent, by any router. */
void router_learn(router_picture *p, int32_t peer, const uint64_t *hashes, int32_t n);
void router_forget(router_picture *p, int32_t peer); /* its cache is empty */

/* Counts a request that is sent as chosen, and remembers where its prefix goes. */
void router_sent(router_picture *p, const router_prefix *prefix, const router_choice *choice);

#endif
