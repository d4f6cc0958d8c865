/* router.h - one address in front of many servers: `hadal router`. It has the whole API of the
 * servers, sends each request to the one that will answer first, and streams the reply through. It
 * keeps no state that matters: several routers may run side by side, and one may be restarted. */
#ifndef HD_ROUTER_ROUTER_H
#define HD_ROUTER_ROUTER_H

#include "base/status.h"
#include "http/keys.h"
#include "http/listen.h"

typedef struct router_options {
    http_options http;            /* the router sets its keys, from key_sources */
    hd_key_sources key_sources;   /* those of the servers; requests carry theirs on */
    const char *decode, *prefill; /* "HOST:PORT,..."; prefill NULL: none */
    const char *key; /* with which load reports are asked for; NULL: none is needed */
    /* the API of the servers: the i-th route, NULL behind the last */
    const http_route *(*route)(size_t i);
    const http_route *page; /* [n_page] that the router answers by itself, without a server */
    size_t n_page;
    bool open; /* allow other hosts to connect without keys */
} router_options;

typedef struct router router;

/* Binds the port and starts the threads. The options and their strings must outlive the router.
 * Servers need not be there yet. */
hd_status router_open(router **out, const router_options *options, hd_err *err);

/* Refuses new requests from now on; running ones finish. */
void router_drain(router *r);
bool router_wait_idle(router *r, int64_t timeout_ns); /* true: all calls are answered */

hd_status router_reload(router *r,
                        hd_err *err); /* reads the files of keys and certificate again */
void router_close(router *r);         /* NULL is fine */

int32_t router_port(const router *r);

#endif
