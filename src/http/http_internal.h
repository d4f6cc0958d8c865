/* http_internal.h - calls and connections as the files of this room share them.
 *
 * Locks, in order: a call's, then the server's table. libmicrohttpd's own come last. Threads:
 * the pool runs handlers and readers, the workers handlers that take long; the watcher scans the
 * table; anyone answers. */
#ifndef HD_HTTP_HTTP_INTERNAL_H
#define HD_HTTP_HTTP_INTERNAL_H

#include <microhttpd.h>
#include <pthread.h>
#include <stdatomic.h>

#include "http/listen.h"
#include "http/quota.h"
#include "http/tls.h"
#include "http/url.h"
#include "tokenizer/tokenizer.h" /* hd_bytes */

enum {
    HTTP_ID_BYTES = 128,
    HTTP_TABLES = 8,
    HTTP_WORKERS = 2,
    HTTP_LISTENERS = 16,
    HTTP_BYTES_PER_S = 64 << 10 /* of the slowest line that bodies and answers wait for */
};

typedef enum http_phase {
    HTTP_CONN_FREE,
    HTTP_CONN_FRESH,   /* accepted, nothing received */
    HTTP_CONN_IDLE,    /* between requests */
    HTTP_CONN_HEADERS, /* a request line was received */
    HTTP_CONN_BODY,
    HTTP_CONN_CALL /* whole request received, answer not sent */
} http_phase;

/* A connection, in its place in the table. */
typedef struct http_conn {
    http_server *http;
    uint32_t slot, generation; /* the generation tells a reused place from the old one */
    int fd;
    http_phase phase;
    int64_t until_ns; /* when the phase's patience ends; 0: never */
    http_call *call;  /* in HTTP_CONN_CALL */
    http_call
        *exchange; /* its request, from the request line to the answer's end; of its thread */
    http_tls_state tls;
    atomic_int refused;  /* with this status, by the watcher; 0: not */
    atomic_bool hung_up; /* the client closed its side, or all of it */
    bool left;           /* and was found so, with nothing unread, in this phase */
    int32_t next_free;
} http_conn;

typedef struct http_field {
    const char *name, *value;
} http_field;

typedef struct http_reply_field {
    struct http_reply_field *next;
    const char *value; /* behind the name */
    char name[];
} http_reply_field;

struct http_call {
    http_server *http;
    http_conn *conn;
    atomic_int refs; /* one of the connection, one until answered, one per retain */
    const http_route *route;
    void *server;
    int64_t start_ns;
    uint64_t salt;

    /* the request; written before the handler runs, constant afterwards */
    char method[16], id[HTTP_ID_BYTES + 1];
    char *target_text, *tail;
    http_target target;
    http_query_arg *args;
    http_field *headers; /* [n_headers] and their bytes behind them, one block */
    size_t n_headers;
    hd_bytes body;
    size_t body_expected, body_held; /* as announced; as counted in held_bytes */
    http_call *next_handler_threads;
    bool checked, handled, admitted, handed_over;
    bool refused_connections; /* refused at its request line */
    bool refused_late;        /* nothing of the request is left: the connection can be kept */
    const char *origin;       /* allowed to read the answer, or NULL */

    pthread_mutex_t lock;              /* recursive: on_gone is called under it */
    struct MHD_Connection *connection; /* NULL: the library is done with it */
    struct MHD_Response *response;
    int status;
    bool suspended, answered, queued, over, gone, streaming, stream_over;
    bool left; /* gone before it was over */
    void (*on_gone)(void *user);
    void *on_gone_user;
    http_reply_field *reply_headers; /* the last one first */
    bool short_of_memory;            /* a header got lost: the answer must not go without it */
    bool counted;                    /* in its key's quota */
    atomic_int_fast64_t reserved;    /* tokens of it */

    int32_t prompt_tokens, output_tokens; /* as on_end says them */
    int64_t first_ns, end_ns;

    hd_bytes kept; /* the answer, where somebody wants it */
    void (*on_answered)(void *user, const char *answer, size_t n);
    void *on_answered_user;

    char *stream; /* [stream_cap], used from stream_at on, stream_n bytes */
    size_t stream_at, stream_n, stream_cap;
    int64_t written_ns, taken_ns; /* by us, by the reader */
    int64_t
        late_ns; /* until then a reader may be more than stream_bytes behind; 0: it is not */
};

/* Calls that wait for one of the threads which may take their time. */
typedef struct http_handler_threads {
    pthread_mutex_t lock; /* guards all but the threads */
    pthread_cond_t more;
    http_call *first, *last; /* by next_work; last: while there is a first */
    bool over;
    pthread_t threads[HTTP_WORKERS];
    int n_threads;
} http_handler_threads;

typedef struct http_table {
    const http_route *routes;
    size_t n;
    void *server;
} http_table;

/* One address that is listened on. */
typedef struct http_listener {
    int fd;
    char address[64]; /* in numbers, as Host would say it */
    struct MHD_Daemon *daemon;
} http_listener;

struct http_server {
    http_options options;
    http_quotas *quotas;
    http_tls *tls; /* NULL: none is spoken */
    http_handler_threads handler_threads;
    atomic_size_t held_bytes; /* of all bodies, and answers that are not read yet */
    http_table tables[HTTP_TABLES];
    size_t n_tables;
    http_listener listeners[HTTP_LISTENERS];
    int32_t n_listeners;
    int epoll, wake; /* descriptors; wake: eventfd of the watcher */
    int32_t port;    /* of all listeners */
    bool loopback;   /* all of them are on it */
    pthread_t watcher;
    bool watching;
    atomic_int gate;
    atomic_bool closing;
    uint64_t id_seed;
    atomic_uint_fast64_t id_next;

    pthread_mutex_t lock; /* guards the table */
    http_conn *conns;     /* [n_conns] */
    int32_t n_conns, first_free;

    atomic_int_fast64_t requests[6];
    atomic_int_fast64_t body_bytes, sent_bytes, gone, cut_off, timed_out, refused, accepted,
        refused_connections, handshakes_failed;
    atomic_int connections, calls, handled, streams, pending;
};

/* ---- call.c ---- */

/* With the call's lock held: the client is not there any more. */
void http_call_gone(http_call *c);
http_call *http_call_new(http_server *h, http_conn *conn, const char *target);

/* Hands over the response, once; false: there was one, and response is destroyed. */
bool http_call_answer(http_call *c, int status, struct MHD_Response *response);
void http_call_over(http_call *c); /* the answer is complete: drops that reference */
void http_call_wake(http_call *c); /* with the lock held */
void http_call_keep(http_call *c, const char *bytes, size_t n); /* the same */
/* false: not all of them are there. With the lock held. */
bool http_call_add_headers(http_call *c, struct MHD_Response *response, const char *type);
void http_call_leave_quota(http_call *c); /* with the lock held; again does nothing */

/* ---- stream.c ---- */

/* n bytes more of a body, or of an answer that waits for its reader; false: all calls together
 * may not hold so many. Given back by subtracting from held_bytes. */
bool http_take_bytes(http_server *h, size_t n);

/* With the call's lock held. The response that hands out body[n], which is counted already and
 * given away, as the client reads it. NULL: no memory. */
struct MHD_Response *http_stream_reply(http_call *c, char *body, size_t n);
bool http_stream_is_late(const http_call *c, int64_t now); /* the reader is too slow */
void http_stream_cut_off(http_call *c);
void http_stream_free(http_call *c);

/* ---- check.c ---- */

/* The request line as the library hands it out: places in its buffer. */
typedef struct http_line {
    const char *method, *target, *version;
} http_line;

/* Copies the headers and refuses what must not reach a handler; false: refused, answered. */
bool http_check_request(http_call *c, const http_line *line);
bool http_check_trailers(http_call *c); /* the same, when the body is there */

/* ---- handler_threads.c ---- */

void http_handler_threads_init(http_handler_threads *w);
void http_handler_threads_deinit(http_handler_threads *w);
hd_status http_handler_threads_start(http_handler_threads *w, hd_err *err);
void http_handler_threads_add(http_handler_threads *w,
                              http_call *c); /* its handler runs soon, on another thread */
void http_handler_threads_stop(http_handler_threads *w); /* after all that was added */

/* ---- sockets.c ---- */

/* Binds every address of the host's name to one port, with a queue; connections wait in it. */
hd_status http_listen(http_server *h, hd_err *err);
void http_unlisten(http_server *h); /* after the daemons */
/* Whether a Host says what the operator said, or an address that is listened on. */
bool http_is_own_name(const http_server *h, const char *host);

/* ---- watch.c ---- */

hd_status http_watch_start(http_server *h, hd_err *err);
void http_watch_stop(http_server *h);
http_conn *http_conn_add(http_server *h, int fd); /* NULL: no place is free */
void http_conn_remove(http_conn *conn);
void http_conn_phase(http_conn *conn, http_phase phase, http_call *c, int64_t seconds);
void http_conn_refuse(const http_conn *conn, const char *status, const char *type,
                      const char *message);
void http_conn_shut(http_conn *conn, bool linger);

#endif
