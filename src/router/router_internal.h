/* router_internal.h - the router's state, shared by its files. Threads: HTTP threads run handlers
 * and post exchanges; the loop thread owns all transfers and exchanges. */
#ifndef HD_ROUTER_ROUTER_INTERNAL_H
#define HD_ROUTER_ROUTER_INTERNAL_H

#include <jansson.h>
#include <pthread.h>
#include <stdatomic.h>

#include "client/multi.h"
#include "router/picture.h"
#include "router/router.h"
#include "tokenizer/tokenizer.h" /* hd_bytes */

/* A transfer of libcurl and who is told of its end. */
typedef struct router_transfer {
    CURL *easy; /* NULL: none is under way */
    struct curl_slist *headers;
    void (*on_done)(struct router_transfer *t, CURLcode code);
} router_transfer;

/* The load reports of one server, one after the other. */
typedef struct router_reports {
    router_transfer transfer; /* first: on_done gets its address */
    router *router;
    int32_t peer, missed; /* missed: reports in a row that did not come */
    int64_t due_ns;
    hd_bytes body;
    uint64_t epoch, next; /* place in the server's prefixes; epoch 0: none */
    /* guarded by the router's lock */
    json_t *detail; /* of the last report, see router_detail_of(); NULL: none */
    int64_t detail_ns;
} router_reports;

enum { ROUTER_NEWS = 4096 };

/* Prefixes that a server was sent since the last report. */
typedef struct router_news {
    uint64_t epoch, next; /* epoch 0: it tells none */
    int32_t n;
    uint64_t hashes[ROUTER_NEWS + 1]; /* [n]; base64 may need room for one more */
} router_news;

typedef struct router_exchange router_exchange; /* exchange.c */

struct router {
    router_options options;
    hd_keys *keys;
    http_server *http;
    http_route *routes; /* [n_routes] */
    size_t n_routes;
    client_multi multi;
    pthread_t loop;
    bool looping;
    atomic_bool stopping, draining;

    pthread_mutex_t lock; /* guards picture; only the loop changes it */
    router_picture picture;
    router_reports reports[ROUTER_MAX_PEERS];
    router_news news;       /* the loop's own: of the report that was read last */
    uint64_t prefix_key[2]; /* constant */

    pthread_mutex_t inbox_lock;
    router_exchange *arrived, *left; /* posted by HTTP threads */

    hd_names *names;             /* NULL: there are none */
    const hd_resolved *resolved; /* that the loop shall take; NULL: none */
    int32_t resolved_source;     /* whose they are */
    pthread_cond_t taken;

    /* the loop's own; ready: streams of which bytes came in this step */
    router_exchange *living, *ready;
    int32_t n_due; /* living ones that are to be sent again */
    atomic_int_fast64_t turn, retries, lost, resumed, cancelled, events, learned, forgotten;
    atomic_int n_living;
};

/* ---- exchange.c ---- */

http_handler router_forward, router_forward_to_all;

void router_take_inbox(router *r);
void router_pass_ready(router *r); /* before take_ends() */
/* Sends those that are due again; returns when the next one is, or -1. */
int64_t router_send_due(router *r, int64_t now_ns);
/* A server is gone: what waits for it goes elsewhere. */
void router_lose_peer(router *r, int32_t peer);

/* ---- reports.c ---- */

hd_status router_reports_open(router *r, hd_err *err);
void router_reports_close(router *r);
/* Asks where it is time; returns when it is next. */
int64_t router_ask_due(router *r, int64_t now_ns);

/* Reads the body of /v1/loads. Returns false if it is none, or out of range. detail may be NULL;
 * else *detail is a new reference, or NULL. */
bool router_load_parse(router_load *out, router_news *news, json_t **detail, const char *text,
                       size_t n);

/* ---- detail.c ---- */

/* What waits at a server and why, its leases, the bytes of its connections, its cached share: as a new
 * reference, whose names and counts are safe to show. load: of a report. NULL: it says nothing of
 * the kind, or nonsense. */
json_t *router_detail_of(const json_t *load);
/* Takes the detail, and adds the rate of every connection since the one before. */
void router_detail_take(router_reports *a, json_t *detail, int64_t now_ns);
void router_detail_put(hd_bytes *out, const router *r); /* as metrics; the caller locks */

/* ---- resolve.c ---- */

hd_status router_resolve_start(router *r, hd_err *err);
void router_resolve_stop(router *r); /* r->stopping is set */
void router_take_names(router *r);

/* ---- transfer.c ---- */

/* Prepares a request to a server; path begins with a slash. Returns false without memory. */
bool router_transfer_open(router_transfer *t, const char *peer, const char *path);
bool router_transfer_add_header(router_transfer *t, const char *name, const char *value);
bool router_transfer_send(router *r, router_transfer *t);
/* Ends it, under way or not. */
void router_transfer_close(router *r, router_transfer *t);

/* ---- status.c ---- */

const char *router_role_name(router_role role);

extern const http_route router_own_routes[]; /* their handlers expect a router * */
extern const size_t router_own_n_routes;

#endif
