/* listen.h - the server side of http.h: options, routes, start, stop and counters. A pool of
 * threads speaks HTTP. The watcher thread detects disconnected clients, enforces deadlines
 * and keeps silent streams alive. Worker threads run slow handlers. */
#ifndef HD_HTTP_LISTEN_H
#define HD_HTTP_LISTEN_H

#include "base/status.h"
#include "http/http.h"
#include "http/keys.h"
#include "http/quota.h"

typedef struct http_limits {
    size_t body_bytes, header_bytes, one_header_bytes, target_bytes, stream_bytes;
    size_t bodies_bytes; /* limit for all requests and unread replies together */
    int32_t headers, query_args;
    int32_t connections, connections_per_address; /* connections_per_address 0: unlimited */
    int32_t header_s;                             /* from the first byte to the last header */
    int32_t body_s; /* for a body, plus one second per 64 KiB of it */
    int32_t idle_s; /* between requests */
    /* A reader that reads nothing for this long is cut off. So is one that is more than
     * stream_bytes behind for this long plus one second per 64 KiB. */
    int32_t stall_s;
    int32_t keep_alive_s; /* interval of comments on a silent stream */
} http_limits;

/* Describes a request that ended, without its content. The strings live during the call of
 * on_end. */
typedef struct http_ended {
    /* "" if the request was refused before they were known */
    const char *method, *path, *request_id;
    int status; /* 499: the client left before there was a reply */
    bool left;  /* the client disconnected before the end of the reply */
    int32_t prompt_tokens, output_tokens; /* -1: nothing was computed */
    int64_t start_ns, first_ns, end_ns;   /* first_ns 0: no token came */
} http_ended;

typedef struct http_options {
    const char *host; /* a name or an address; all addresses of a name are bound */
    int32_t port;     /* 0: any free port */
    int32_t threads;  /* threads for each address */
    const char *certificate, *private_key; /* PEM files; both NULL: no TLS */
    const char *const *origins; /* [n_origins] origins that may read replies (CORS) */
    size_t n_origins;
    const char *const *names; /* [n_names] names accepted in Host besides our own address */
    size_t n_names;
    /* Events of streams are sent by the thread that writes them, which costs least for each; else by
     * the HTTP threads, several at once, and with those that come meanwhile: best for a writer that
     * has more to do than they have. */
    bool writer_sends;
    bool half_close; /* a client that closed only its sending side still gets its reply */
    http_limits limits;
    http_quota_limits quotas; /* failures -1: 20, unlimited on loopback */
    hd_keys *keys;            /* owned by the caller; must outlive the server */
    /* Called once per received request line, when its call is released; from any thread. */
    void (*on_end)(void *user, const http_ended *e);
    void *on_end_user;
} http_options;

typedef struct http_server http_server;

typedef struct http_stats {
    int64_t requests[6]; /* by status / 100; [0]: the client left first */
    int64_t body_bytes, sent_bytes;
    int64_t gone;              /* clients that disconnected before the end of the reply */
    int64_t cut_off;           /* readers too slow for their stream */
    int64_t timed_out;         /* header, body or idle deadlines that passed */
    int64_t refused;           /* requests refused before any handler ran */
    int64_t handshakes_failed; /* connections that ended before the TLS handshake */
    int64_t accepted, refused_connections; /* connections */
    int32_t connections, calls, streams;   /* current numbers */
    int64_t held_bytes;                    /* current bytes of bodies and unread replies */
    int32_t handled; /* calls that a handler received and that are not released yet */
    int32_t pending; /* calls whose client does not have the complete reply */
} http_stats;

/* Binds and prepares; no request is answered yet. */
hd_status http_open(http_server **out, const http_options *options, hd_err *err);

/* Adds routes; must be called before http_start. Both tables must outlive the server. */
hd_status http_mount(http_server *h, const http_route *routes, size_t n, void *server,
                     hd_err *err);

hd_status http_start(http_server *h, hd_err *err);

typedef enum http_gate {
    HTTP_STARTING, /* only public routes are served, other requests are told to retry */
    HTTP_OPEN,
    /* new requests of users are told to retry; connections close after replies */
    HTTP_DRAINING
} http_gate;

/* Reads the certificate and its key again. On failure the old ones stay. */
hd_status http_reload(http_server *h, hd_err *err);

void http_set_gate(http_server *h, http_gate gate); /* HTTP_STARTING at first */

/* Drops all connections and joins all threads. Retained calls live on until they are
 * answered and released. */
void http_stop(http_server *h);

/* Stops and frees the server; no call may live any more. NULL is fine. */
void http_close(http_server *h);

/* Returns the call whose http_request_id() returned this very pointer. */
http_call *http_call_of_id(const char *request_id);

/* Copies the reply of the call. When the reply is complete, fn receives the copy once,
 * truncated if memory ran out. */
void http_keep_answer(http_call *c, void (*fn)(void *user, const char *answer, size_t n),
                      void *user);

/* Sets the tokens and the time of the first token (0: none) for on_end. */
void http_note_tokens(http_call *c, int32_t prompt, int32_t output, int64_t first_ns);

/* Charges tokens to the call's key, once, in place of the reserved ones. */
void http_spend_tokens(http_call *c, int64_t tokens);

int32_t http_port(const http_server *h);
bool http_is_loopback(const http_server *h); /* other hosts can reach none of the addresses */
/* Returns listening addresses in numeric form: i from 0 until NULL. */
const char *http_address(const http_server *h, int32_t i);
const char *http_library_version(void); /* version of libmicrohttpd at run time: "0.9.75" */
void http_read_stats(http_server *h, http_stats *out);

#endif
