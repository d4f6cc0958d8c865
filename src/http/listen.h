/* listen.h - the listening side of http.h: options, mounting routes, life and counters.
 *
 * One pool of threads speaks HTTP; one more, the watcher, sees clients vanish, enforces
 * deadlines and keeps silent streams alive; and a few, the workers, handle what takes long. */
#ifndef HD_HTTP_LISTEN_H
#define HD_HTTP_LISTEN_H

#include "base/status.h"
#include "http/http.h"
#include "http/keys.h"
#include "http/quota.h"

typedef struct http_limits {
    size_t body_bytes, header_bytes, one_header_bytes, target_bytes, stream_bytes;
    size_t bodies_bytes; /* of all requests and unread answers together */
    int32_t headers, query_args;
    int32_t connections, connections_per_address; /* 0: no bound per address */
    int32_t header_s;                             /* from the first byte to the last header */
    int32_t body_s;       /* for a body, and one second more per 64 KiB of it */
    int32_t idle_s;       /* between requests */
    int32_t stall_s;      /* a reader that takes nothing for so long is cut off, and one that is
                             more than stream_bytes behind, with a second more per 64 KiB */
    int32_t keep_alive_s; /* a silent stream gets a comment so often */
} http_limits;

/* What can be said of a request that ended without saying what it held. The texts live as long as
 * the call to on_end. */
typedef struct http_ended {
    const char *method, *path, *request_id; /* "" where it was refused before they were known */
    int status;                             /* 499: the client left before there was one */
    bool left;                              /* the client vanished before its answer's end */
    int32_t prompt_tokens, output_tokens;   /* -1: nothing was computed */
    int64_t start_ns, first_ns, end_ns;     /* first_ns 0: no token came */
} http_ended;

typedef struct http_options {
    const char *host; /* a name or an address: every address of it is listened on */
    int32_t port;     /* 0: any that is free */
    int32_t threads;  /* for each of the addresses */
    const char *certificate, *private_key; /* PEM files; both NULL: no TLS */
    const char *const *origins;            /* [n_origins] that may read across origins */
    size_t n_origins;
    const char *const *names; /* [n_names] accepted in Host besides our own address */
    size_t n_names;
    bool half_close; /* a client that only closed its sending side is still there */
    http_limits limits;
    http_quota_limits quotas; /* failures -1: 20, none on loopback */
    hd_keys *keys;            /* the caller's, outlives the server */
    /* Once per request line that came, when its call is released; from any thread. */
    void (*on_end)(void *user, const http_ended *e);
    void *on_end_user;
} http_options;

typedef struct http_server http_server;

typedef struct http_stats {
    int64_t requests[6]; /* by the hundred of the status; [0]: the client left first */
    int64_t body_bytes, sent_bytes;
    int64_t gone;              /* clients that vanished before their answer's end */
    int64_t cut_off;           /* readers too slow for their stream */
    int64_t timed_out;         /* header, body or idle deadlines that passed */
    int64_t refused;           /* before any handler saw them */
    int64_t handshakes_failed; /* connections that ended before TLS was agreed upon */
    int64_t accepted, refused_connections; /* connections */
    int32_t connections, calls, streams;   /* now */
    int64_t held_bytes;                    /* of bodies and unread answers, now */
    int32_t handled; /* calls that a handler saw and somebody still holds */
    int32_t pending; /* calls whose answer the client does not have yet */
} http_stats;

/* Binds and prepares; nothing is answered yet. */
hd_status http_open(http_server **out, const http_options *options, hd_err *err);

/* Adds routes, before http_start. Both tables outlive the server. */
hd_status http_mount(http_server *h, const http_route *routes, size_t n, void *server,
                     hd_err *err);

hd_status http_start(http_server *h, hd_err *err);

typedef enum http_gate {
    HTTP_STARTING, /* only what is public is served, the rest is told to come back */
    HTTP_OPEN,
    HTTP_DRAINING /* new work of users is told to come back; connections close after answers */
} http_gate;

/* Reads the certificate and its key again. On failure the old ones stay. */
hd_status http_reload(http_server *h, hd_err *err);

void http_set_gate(http_server *h, http_gate gate); /* HTTP_STARTING at first */

/* Drops all connections and joins all threads. Calls that were kept live on until they are
 * answered and released. */
void http_stop(http_server *h);

/* Stops; then no call may live any more. NULL is fine. */
void http_close(http_server *h);

/* The call that http_request_id() gave this text, the pointer itself, for. */
http_call *http_call_of_id(const char *request_id);

/* Keeps what the call is answered; when the answer is complete fn gets it, once, whole or as
 * far as there was memory. */
void http_keep_answer(http_call *c, void (*fn)(void *user, const char *answer, size_t n),
                      void *user);

/* What on_end will say of it: tokens, and when the first came (0: never). */
void http_note_tokens(http_call *c, int32_t prompt, int32_t output, int64_t first_ns);

/* Charges tokens to the call's key, once, in place of those set aside. */
void http_spend_tokens(http_call *c, int64_t tokens);

int32_t http_port(const http_server *h);
bool http_is_loopback(const http_server *h); /* nobody else can reach any of the addresses */
/* The addresses that are listened on, in numbers: i from 0 until NULL. */
const char *http_address(const http_server *h, int32_t i);
const char *http_library_version(void); /* of libmicrohttpd, as it runs: "0.9.75" */
void http_read_stats(http_server *h, http_stats *out);

#endif
