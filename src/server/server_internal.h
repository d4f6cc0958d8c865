/* server_internal.h - the server's state, shared by its endpoints. Threads: HTTP threads run
 * handlers. The polling thread turns engine events into replies. The ticker checks progress,
 * feeds the live view and replies to calls that wait for a state of the engine. */
#ifndef HD_SERVER_SERVER_INTERNAL_H
#define HD_SERVER_SERVER_INTERNAL_H

#include <jansson.h>
#include <pthread.h>
#include <stdatomic.h>

#include "server/expert_record.h"
#include "server/kv_saved.h"
#include "server/line_file.h"
#include "server/live.h"
#include "server/rank_view.h"
#include "server/metrics/metrics.h"
#include "server/prefix_ring.h"
#include "server/record.h"
#include "server/server.h"
#include "server/trace.h"

enum { SERVER_WAITING_CALLS = 64 };

typedef struct weight_updates weight_updates; /* weight_updates.c */

/* A call that the ticker replies to when a condition holds or time is up. */
typedef struct waiting_call {
    http_call *call; /* retained; NULL: unused place */
    /* true: the call was answered */
    bool (*check)(server *s, struct waiting_call *w, bool late);
    atomic_int_fast64_t until_ns;
    atomic_uint_fast64_t request; /* id of an engine request or a pause's number, for check */
    atomic_uint_fast64_t ended;   /* id of the last request that ended well */
    atomic_uint_fast64_t failed;  /* id of the last request that failed */
} waiting_call;

struct server {
    server_options options;
    hd_keys *keys;
    http_server *http;
    hd_engine *engine;
    pd *pd; /* NULL: without a role */
    int pd_listener;
    char pd_name[300];
    api_context api;
    metrics *metrics;
    live_view *live;
    rank_view *ranks;
    line_file access_log;
    request_records *records;
    prefix_ring *prefixes;
    trace *trace;
    weight_updates *weights;
    expert_record *expert_record;
    int64_t start_ns;
    double load_seconds;
    char sandbox[160];
    char *kv_dir;    /* of engine.kv_disk, or NULL */
    kv_saved *saved; /* NULL: without a folder */
    char *saved_dir;

    atomic_bool ready, draining, stopping;
    atomic_int_fast64_t progress_ns; /* when a step last ended, or no request was running */

    pthread_mutex_t lock; /* guards submitted, waiting, look_until_ns */
    pthread_cond_t mail;
    bool submitted;
    pthread_cond_t kept;   /* signalled for the ticker when a call is kept */
    int64_t look_until_ns; /* until then the ticker looks at waiting calls every millisecond */
    waiting_call waiting[SERVER_WAITING_CALLS];
    pthread_t poller, ticker;
    bool polling, ticking;
};

/* Routes of src/server besides those of api.h and page.h; their handlers expect a server *. */
extern const http_route info_routes[], admin_routes[], weights_routes[], kv_routes[];
extern const size_t info_n_routes, admin_n_routes, weights_n_routes, kv_n_routes;

extern const struct api_description server_description; /* of all routes but those of api.h */

void server_on_requests(http_call *c, void *user); /* requests.c; user: the server */

/* Wakes the polling thread. Must be called after every submission. */
void server_submitted(server *s);

/* Keeps the call for the ticker. number: what check compares with, or 0. Returns NULL if too
 * many calls wait; then the call is not kept. */
waiting_call *server_wait_for(server *s, http_call *c, int64_t timeout_ns, uint64_t number,
                              bool (*check)(server *s, waiting_call *w, bool late));

/* takes the reference of object */
void server_reply_json(http_call *c, int status, json_t *object);
void server_reply_text(http_call *c, int status, const char *text);

/* admin.c. Returns the body as an object, an empty one without a body. NULL: refused, and the
 * refusal was sent. */
json_t *server_take_body(http_call *c);

/* weight_updates.c */
weight_updates *weight_updates_new(const char *model_dir, const char *weights_dir);
/* Drops an update in parts, whose memory may be that of the engine's device. NULL is fine. */
void weight_updates_drop(weight_updates *w);
void weight_updates_free(weight_updates *w); /* NULL is fine; after the drop */
/* Whether an update in parts waits for its end. Any thread may call it. */
bool weight_updates_begun(weight_updates *w);
/* Writes the folder of the weights in use to out. */
void weight_updates_read_path(weight_updates *w, char *out, size_t size);

#endif
