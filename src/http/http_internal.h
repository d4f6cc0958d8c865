/* http_internal.h - calls and connections, shared by the files of src/http. Lock order: a
 * call's lock, the server's table, libmicrohttpd's locks. Threads: the pool runs handlers
 * and readers, workers run slow handlers, the watcher scans the table, and any thread may
 * reply. */
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
    /* the slowest transfer rate that deadlines of bodies and replies allow */
    HTTP_BYTES_PER_S = 64 << 10
};

typedef enum http_phase {
    HTTP_CONN_FREE,
    HTTP_CONN_FRESH,   /* accepted, nothing received */
    HTTP_CONN_IDLE,    /* between requests */
    HTTP_CONN_HEADERS, /* a request line was received */
    HTTP_CONN_BODY,
    HTTP_CONN_CALL /* request complete, reply not sent */
} http_phase;

/* A connection, at its place in the table. */
typedef struct http_conn {
    http_server *http;
    uint32_t slot, generation; /* the generation distinguishes uses of the same place */
    int fd;
    http_phase phase;
    int64_t until_ns; /* deadline of the phase; 0: none */
    http_call *call;  /* in HTTP_CONN_CALL */
    /* its request, from the request line to the end of the reply; owned by its thread */
    http_call *exchange;
    http_tls_state tls;
    atomic_int refused;  /* status with which the watcher refused it; 0: not refused */
    atomic_bool hung_up; /* the client closed its side, or all of it */
    bool left;           /* it was found hung up, with nothing unread, in this phase */
    int32_t next_free;
} http_conn;

typedef struct http_field {
    const char *name, *value;
} http_field;

typedef struct http_reply_field {
    struct http_reply_field *next;
    const char *value; /* stored behind the name */
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
    char *target_text, *tail; /* target_text is parsed in place */
    const char *raw_target;   /* a copy, stored behind it */
    http_target target;
    http_query_arg *args;
    http_field *headers; /* [n_headers] followed by their bytes, one block */
    size_t n_headers;
    hd_bytes body;
    size_t body_expected, body_held; /* as announced; as counted in held_bytes */
    http_call *next_handler_threads;
    bool checked, handled, admitted, handed_over;
    bool refused_connections; /* refused at its request line */
    bool refused_late;  /* the request was read completely, so the connection can be kept */
    const char *origin; /* the origin that may read the reply, or NULL */

    pthread_mutex_t lock;              /* recursive: on_gone is called under it */
    struct MHD_Connection *connection; /* NULL: the library has finished it */
    struct MHD_Response *response;
    int status;
    bool suspended, answered, queued, over, gone, streaming, stream_over;
    bool chunked;  /* streams are: the client speaks HTTP/1.1 */
    bool uncorked; /* its stream's socket */
    bool left;     /* the client left before the end */
    void (*on_gone)(void *user);
    void *on_gone_user;
    http_reply_field *reply_headers; /* in reverse order */
    /* a header could not be stored: the reply must not be sent without it */
    bool short_of_memory;
    bool counted;                 /* counted in its key's quota */
    atomic_int_fast64_t reserved; /* tokens reserved of the quota */

    int32_t prompt_tokens, output_tokens; /* as reported by on_end */
    int64_t first_ns, end_ns;

    hd_bytes kept; /* a copy of the reply, if requested */
    void (*on_answered)(void *user, const char *answer, size_t n);
    void *on_answered_user;

    char *stream; /* [stream_cap], used from stream_at on, stream_n bytes */
    size_t stream_at, stream_n, stream_cap;
    int64_t written_ns, taken_ns; /* written by us; taken by the client's socket */
    /* the reader may be more than stream_bytes behind until then; 0: it is not behind */
    int64_t late_ns;
};

/* Queue of calls for the worker threads. */
typedef struct http_handler_threads {
    pthread_mutex_t lock; /* guards all fields but the threads */
    pthread_cond_t more;
    /* linked by next_work; last is defined only if first is not NULL */
    http_call *first, *last;
    bool over;
    pthread_t threads[HTTP_WORKERS];
    int n_threads;
} http_handler_threads;

typedef struct http_table {
    const http_route *routes;
    size_t n;
    void *server;
} http_table;

/* One listening address. */
typedef struct http_listener {
    int fd;
    char address[64]; /* numeric, as Host would contain it */
    struct MHD_Daemon *daemon;
} http_listener;

struct http_server {
    http_options options;
    http_quotas *quotas;
    http_tls *tls; /* NULL: no TLS */
    http_handler_threads handler_threads;
    atomic_size_t held_bytes; /* of all bodies, and of replies that were not read yet */
    http_table tables[HTTP_TABLES];
    size_t n_tables;
    http_listener listeners[HTTP_LISTENERS];
    int32_t n_listeners;
    int epoll, wake; /* descriptors; wake: eventfd of the watcher */
    int32_t port;    /* the same for all listeners */
    bool loopback;   /* all addresses are loopback */
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

/* Marks the client as gone. The caller holds the call's lock. */
void http_call_gone(http_call *c);
http_call *http_call_new(http_server *h, http_conn *conn, const char *target);

/* Sets the response, once. Returns false if there was one; then response is destroyed. */
bool http_call_answer(http_call *c, int status, struct MHD_Response *response);
void http_call_over(http_call *c); /* the reply is complete: drops its reference */
void http_call_wake(http_call *c); /* the caller holds the lock */
void http_call_keep(http_call *c, const char *bytes, size_t n); /* the same */
/* Returns false if a header could not be added. The caller holds the lock. */
bool http_call_add_headers(http_call *c, struct MHD_Response *response, const char *type);
/* the caller holds the lock; repeated calls do nothing */
void http_call_leave_quota(http_call *c);

/* ---- stream.c ---- */

/* Counts n more bytes of a body or of an unread reply. Returns false if all calls together
 * would hold too many. Subtract from held_bytes to release them. */
bool http_take_bytes(http_server *h, size_t n);

/* Returns a response that sends body[n] as the client reads it, or NULL without memory. It
 * takes ownership of body, which is already counted. The caller holds the call's lock. */
struct MHD_Response *http_stream_reply(http_call *c, char *body, size_t n);
/* Removes the first n of the unread bytes. The caller holds the lock. */
void http_stream_taken(http_call *c, size_t n);
/* The socket has room, or the stream is over. The caller holds the lock. */
void http_stream_go_on(http_call *c);
bool http_stream_is_late(const http_call *c, int64_t now); /* the reader is too slow */
void http_stream_cut_off(http_call *c);
void http_stream_free(http_call *c);

/* ---- check.c ---- */

/* The request line in the library's buffer. */
typedef struct http_line {
    const char *method, *target, *version;
} http_line;

/* Copies the headers and checks the request; false: refused, and the refusal was sent. */
bool http_check_request(http_call *c, const http_line *line);
bool http_check_trailers(http_call *c); /* the same for trailers, when the body is complete */

/* ---- handler_threads.c ---- */

void http_handler_threads_init(http_handler_threads *w);
void http_handler_threads_deinit(http_handler_threads *w);
hd_status http_handler_threads_start(http_handler_threads *w, hd_err *err);
void http_handler_threads_add(http_handler_threads *w,
                              http_call *c); /* its handler will run on another thread */
/* call it after all other calls of this queue */
void http_handler_threads_stop(http_handler_threads *w);

/* ---- sockets.c ---- */

/* Binds every address of the host's name to one port, and listens; connections wait in the
 * kernel's queue. */
hd_status http_listen(http_server *h, hd_err *err);
void http_unlisten(http_server *h); /* after the daemons */
/* Whether Host names a configured name or a listening address. */
bool http_is_own_name(const http_server *h, const char *host);

/* ---- watch.c ---- */

hd_status http_watch_start(http_server *h, hd_err *err);
void http_watch_stop(http_server *h);
http_conn *http_conn_add(http_server *h, int fd); /* NULL: the table is full */
void http_conn_remove(http_conn *conn);
void http_conn_phase(http_conn *conn, http_phase phase, http_call *c, int64_t seconds);
void http_conn_refuse(const http_conn *conn, const char *status, const char *type,
                      const char *message);
void http_conn_shut(http_conn *conn, bool linger);
/* Sends without waiting. Returns the bytes sent; 0: the watcher calls http_stream_go_on() when
 * there is room; -1: the client is gone. For a thread to which the library left the connection. */
ssize_t http_conn_send(const http_conn *conn, const char *bytes, size_t n);
void http_conn_uncork(const http_conn *conn); /* for small writes that are not delayed */

#endif
