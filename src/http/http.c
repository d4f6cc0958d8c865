/* http.c - the HTTP server's life cycle and the callbacks of libmicrohttpd: connections,
 * requests, bodies, completion. libmicrohttpd runs a pool of threads over epoll. A call
 * without a reply is suspended; the thread that replies resumes it. */
#define _GNU_SOURCE
#include <gnutls/crypto.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/progress.h"
#include "http/http_internal.h"

enum {
    PER_ADDRESS = 256,
    FAILURES_PER_ADDRESS = 20,
    LIBRARY_ARGUMENTS = 64, /* arguments of one query, including empty ones */
    COOKIES = 192,
    RECORD_BYTES = 64, /* of a header, in the library's memory */
    SPARE_BYTES = 8 << 10,
    INLINE_BODY_BYTES = 64 << 10 /* the largest body that an HTTP thread handles itself */
};

/* ---- one request ---- */

static int64_t body_patience(const http_call *c) {
    return c->http->options.limits.body_s + (int64_t)(c->body_expected / HTTP_BYTES_PER_S);
}

/* The headers are complete. A refusal is a reply and is queued below. */
static void begin(http_call *c, const http_line *line) {
    snprintf(c->method, sizeof c->method, "%s",
             strlen(line->method) < sizeof c->method ? line->method : "?");
    c->chunked = strcmp(line->version, "HTTP/1.1") == 0;
    c->start_ns = hd_now_ns();
    c->admitted = http_check_request(c, line);
    if (c->admitted) http_conn_phase(c->conn, HTTP_CONN_BODY, NULL, body_patience(c));
}

/* false: the body cannot be stored, and the connection is dropped. */
static bool take_body(http_call *c, const char *data, size_t n) {
    if (!c->admitted) return true;
    atomic_fetch_add_explicit(&c->http->body_bytes, (int64_t)n, memory_order_relaxed);
    const http_limits *limits = &c->http->options.limits;
    const bool fits = n <= limits->body_bytes - c->body.n;
    const bool room = http_take_bytes(c->http, n);
    if (room) c->body_held += n;
    if (fits && room && hd_bytes_append(&c->body, data, n, NULL) == HD_OK) return true;
    c->status = fits ? 503 : 413;
    if (fits) {
        http_conn_refuse(c->conn, "503 Service Unavailable\r\nRetry-After: 1",
                         "overloaded_error", "no memory for the body of this request");
    } else {
        http_conn_refuse(c->conn, "413 Content Too Large", "invalid_request_error",
                         "the body is larger than this server takes");
    }
    atomic_fetch_add(&c->http->refused, 1);
    return false;
}

static void handle(http_call *c) {
    c->handled = true;
    atomic_fetch_add(&c->http->pending, 1);
    atomic_fetch_add(&c->http->handled, 1);
    http_conn_phase(c->conn, HTTP_CONN_CALL, c, 0);
    if (hd_bytes_append(&c->body, "", 1, NULL) != HD_OK) { /* a NUL; max has room for it */
        http_error(c, 503, "overloaded_error", "no_memory", NULL, "no memory for this request");
        return;
    }
    c->body.n--;
    if (c->body.n > INLINE_BODY_BYTES) {
        http_handler_threads_add(&c->http->handler_threads, c);
    } else {
        c->route->handler(c, c->server);
    }
}

/* Queues the reply, or suspends the connection until there is one. */
static enum MHD_Result deliver(http_call *c, struct MHD_Connection *connection) {
    struct MHD_Response *response = NULL;
    enum MHD_Result result = MHD_YES;
    pthread_mutex_lock(&c->lock);
    if (!c->response && !c->gone && atomic_load(&c->conn->hung_up)) http_call_gone(c);
    if (c->gone) {
        result = MHD_NO;
    } else if (c->response && !c->queued) {
        c->queued = true;
        response = c->response;
        c->response = NULL;
    } else if (!c->queued) {
        c->suspended = true;
        MHD_suspend_connection(connection);
    }
    pthread_mutex_unlock(&c->lock);
    if (response) { /* not under our lock: readers are called with the response's lock */
        result = MHD_queue_response(connection, (unsigned)c->status, response);
        MHD_destroy_response(response);
    }
    return result;
}

static http_conn *conn_of(struct MHD_Connection *connection) {
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    return info ? info->socket_context : NULL;
}

static enum MHD_Result on_request(void *user, struct MHD_Connection *connection,
                                  const char *url, const char *method, const char *version,
                                  const char *data, size_t *n, void **state) {
    http_server *h = user;
    const http_conn *conn = conn_of(connection);
    http_call *c = conn ? conn->exchange : NULL;
    (void)state;
    if (!c || c->refused_connections || atomic_load(&h->closing)) return MHD_NO;
    if (!c->checked) {
        c->checked = true;
        c->connection = connection;
        begin(c, &(http_line){method, url, version});
        return c->admitted || c->refused_late ? MHD_YES : deliver(c, connection);
    }
    if (*n) {
        const bool taken = take_body(c, data, *n);
        *n = 0;
        return taken ? MHD_YES : MHD_NO;
    }
    if (!c->handled && c->admitted) c->admitted = http_check_trailers(c);
    if (!c->handled && c->admitted) handle(c);
    return deliver(c, connection);
}

static void count_status(http_server *h, http_call *c, bool whole) {
    if (!c->status) c->status = atomic_load(&c->conn->refused);
    const int hundred = whole && c->status >= 100 && c->status < 600 ? c->status / 100 : 0;
    atomic_fetch_add(&h->requests[hundred], 1);
}

/* Detaches the connection from its request. If the library refuses a request itself, it may
 * not call on_completed. So the end of the connection, or the next request line, also calls
 * this. */
static void end_exchange(http_conn *conn, bool whole) {
    http_server *h = conn->http;
    http_call *c = conn->exchange;
    if (!c) return;
    conn->exchange = NULL;
    http_conn_phase(conn, HTTP_CONN_IDLE, NULL,
                    h->options.limits.idle_s + h->options.limits.header_s);
    pthread_mutex_lock(&c->lock);
    count_status(h, c, whole || c->refused_connections);
    c->connection = NULL;
    if (!whole && c->handled) http_call_gone(c);
    c->gone = true; /* there is no client to write to */
    struct MHD_Response *unsent = c->response;
    c->response = NULL;
    c->conn = NULL;
    pthread_mutex_unlock(&c->lock);
    if (unsent) MHD_destroy_response(unsent);
    if (c->handled) {
        atomic_fetch_sub(&h->pending, 1);
    } else {
        http_call_over(c); /* no other thread will reply */
    }
    http_release(c);
}

static void on_completed(void *user, struct MHD_Connection *connection, void **state,
                         enum MHD_RequestTerminationCode how) {
    http_conn *conn = conn_of(connection);
    (void)user, (void)state;
    if (conn) end_exchange(conn, how == MHD_REQUEST_TERMINATED_COMPLETED_OK);
}

/* The library allocates a record for every argument, even an empty one, and without memory
 * for them its reply is never sent. So the number is limited here. */
static void bound_arguments(http_call *c) {
    size_t n = 0;
    for (const char *p = c->target_text; *p; p++) n += *p == '&';
    if (n < LIBRARY_ARGUMENTS) return;
    c->refused_connections = true;
    c->status = 400;
    atomic_fetch_add(&c->http->refused, 1);
    http_conn_refuse(c->conn, "400 Bad Request", "invalid_request_error",
                     "the query has too many arguments");
    http_conn_shut(c->conn, true);
}

/* The request line was received. */
static void *on_target(void *user, const char *target, struct MHD_Connection *connection) {
    http_server *h = user;
    http_conn *conn = conn_of(connection);
    if (!conn) return NULL;
    end_exchange(conn, false);
    http_conn_phase(conn, HTTP_CONN_HEADERS, NULL, h->options.limits.header_s);
    conn->exchange = http_call_new(h, conn, target);
    if (conn->exchange) bound_arguments(conn->exchange);
    return NULL;
}

static void attach_tls(http_conn *conn, struct MHD_Connection *connection) {
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_GNUTLS_SESSION);
    http_tls_attach(&conn->tls, conn->http->tls, info->tls_session);
}

/* Connections over the limit are closed at once. The library's own limit is per thread, and
 * a thread at its limit may sleep with unread requests, so it must never be reached. */
static enum MHD_Result on_accept(void *user, const struct sockaddr *address, socklen_t n) {
    http_server *h = user;
    (void)address, (void)n;
    if (atomic_load(&h->connections) < h->options.limits.connections) return MHD_YES;
    atomic_fetch_add(&h->refused_connections, 1);
    return MHD_NO;
}

static void on_connection(void *user, struct MHD_Connection *connection, void **context,
                          enum MHD_ConnectionNotificationCode what) {
    http_server *h = user;
    if (what == MHD_CONNECTION_NOTIFY_STARTED) {
        const union MHD_ConnectionInfo *info =
            MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
        atomic_fetch_add(&h->accepted, 1);
        *context = info ? http_conn_add(h, info->connect_fd) : NULL;
        if (*context) atomic_fetch_add(&h->connections, 1);
        if (*context && h->tls) attach_tls(*context, connection);
    } else if (*context) {
        http_conn *conn = *context;
        if (h->tls && !conn->tls.established) atomic_fetch_add(&h->handshakes_failed, 1);
        end_exchange(conn, false);
        http_conn_remove(conn);
        *context = NULL;
        atomic_fetch_sub(&h->connections, 1);
    }
}

/* url.c decodes targets, not the library. */
static size_t leave_escaped(void *user, struct MHD_Connection *connection, char *text) {
    (void)user, (void)connection;
    return strlen(text);
}

/* ---- life ---- */

/* Names that can never match a header are a configuration error. */
static hd_status check_names(const http_options *o, hd_err *err) {
    char host[256];
    for (size_t i = 0; i < o->n_origins; i++) {
        if (strcmp(o->origins[i], "*") == 0 || http_origin_is_valid(o->origins[i])) continue;
        return HD_FAIL(
            err, HD_EINVAL,
            "--cors: '%s' is no origin: scheme://host or scheme://host:port in small "
            "letters, or *",
            o->origins[i]);
    }
    for (size_t i = 0; i < o->n_names; i++) {
        if (http_host_parse(o->names[i], host, sizeof host) &&
            strcasecmp(host, o->names[i]) == 0) {
            continue;
        }
        return HD_FAIL(err, HD_EINVAL, "--public-name: '%s' is no host name", o->names[i]);
    }
    return HD_OK;
}

/* Allocates places for all connections and one more per thread, because each thread may
 * accept the last one. */
static hd_status open_table(http_server *h, hd_err *err) {
    const int32_t n = h->options.limits.connections + h->options.threads * h->n_listeners;
    h->conns = calloc((size_t)n, sizeof *h->conns);
    if (!h->conns) return HD_FAIL(err, HD_ENOMEM, "no memory for %d connections", n);
    for (int32_t i = 0; i < n; i++) h->conns[i].next_free = i + 1 < n ? i + 1 : -1;
    h->n_conns = n;
    return HD_OK;
}

hd_status http_open(http_server **out, const http_options *options, hd_err *err) {
    http_server *h = calloc(1, sizeof *h);
    *out = NULL;
    if (!h) return HD_FAIL(err, HD_ENOMEM, "no memory for the server");
    h->options = *options;
    h->epoll = h->wake = -1;
    pthread_mutex_init(&h->lock, NULL);
    http_handler_threads_init(&h->handler_threads);
    hd_status st = check_names(options, err);
    if (st == HD_OK && gnutls_rnd(GNUTLS_RND_NONCE, &h->id_seed, sizeof h->id_seed) != 0) {
        st = HD_FAIL(err, HD_EIO, "no random numbers");
    }
    if (st == HD_OK) st = http_listen(h, err);
    if (st == HD_OK) st = open_table(h, err);
    if (h->options.limits.connections_per_address < 0) {
        h->options.limits.connections_per_address = h->loopback ? 0 : PER_ADDRESS;
    }
    if (h->options.quotas.failures < 0) {
        h->options.quotas.failures = h->loopback ? 0 : FAILURES_PER_ADDRESS;
    }
    if (st == HD_OK && !options->certificate != !options->private_key) {
        st = HD_FAIL(err, HD_EINVAL, "--tls-cert and --tls-key belong together");
    }
    if (st == HD_OK && options->certificate) {
        st = http_tls_open(&h->tls, options->certificate, options->private_key, err);
    }
    if (st == HD_OK) st = http_quotas_open(&h->quotas, &h->options.quotas, err);
    if (st != HD_OK) {
        http_close(h);
        return st;
    }
    *out = h;
    return HD_OK;
}

hd_status http_mount(http_server *h, const http_route *routes, size_t n, void *server,
                     hd_err *err) {
    if (h->n_tables == HTTP_TABLES) {
        return HD_FAIL(err, HD_EINVAL, "more than %d tables of routes", HTTP_TABLES);
    }
    h->tables[h->n_tables++] = (http_table){routes, n, server};
    return HD_OK;
}

/* Returns the library's memory per connection: the headers, the largest one again if it
 * contains cookies, and a record of each header, argument and cookie. */
static size_t library_bytes(const http_limits *limits) {
    const size_t records = (size_t)limits->headers + LIBRARY_ARGUMENTS + COOKIES;
    return limits->header_bytes + limits->one_header_bytes + records * RECORD_BYTES +
           SPARE_BYTES;
}

static hd_status start_daemon(http_server *h, http_listener *l, hd_err *err) {
    const http_options *o = &h->options;
    const http_limits *limits = &o->limits;
    struct MHD_OptionItem more[] = {
        {MHD_OPTION_END, 0, NULL},
        {MHD_OPTION_END, 0, NULL},
        {MHD_OPTION_END, 0, NULL}
    };
    int n = 0;
    if (o->threads > 1) {
        more[n++] = (struct MHD_OptionItem){MHD_OPTION_THREAD_POOL_SIZE, o->threads, NULL};
    }
    if (h->tls) {
        more[n++] = (struct MHD_OptionItem){MHD_OPTION_HTTPS_CERT_CALLBACK, 0,
                                            (void *)(uintptr_t)http_tls_retrieve};
    }
    unsigned flags = MHD_USE_EPOLL_INTERNAL_THREAD | MHD_ALLOW_SUSPEND_RESUME | MHD_USE_TURBO;
    if (h->tls) flags |= MHD_USE_TLS;
    l->daemon = MHD_start_daemon(
        flags, 0, on_accept, h, on_request, h, MHD_OPTION_LISTEN_SOCKET, l->fd,
        MHD_OPTION_NOTIFY_COMPLETED, on_completed, h, MHD_OPTION_NOTIFY_CONNECTION,
        on_connection, h, MHD_OPTION_URI_LOG_CALLBACK, on_target, h,
        MHD_OPTION_UNESCAPE_CALLBACK, leave_escaped, NULL, MHD_OPTION_STRICT_FOR_CLIENT, 1,
        MHD_OPTION_CONNECTION_MEMORY_LIMIT, library_bytes(limits), MHD_OPTION_CONNECTION_LIMIT,
        (unsigned)h->n_conns * (unsigned)o->threads, MHD_OPTION_PER_IP_CONNECTION_LIMIT,
        (unsigned)limits->connections_per_address, MHD_OPTION_CONNECTION_TIMEOUT,
        (unsigned)limits->idle_s, MHD_OPTION_SIGPIPE_HANDLED_BY_APP, 1, MHD_OPTION_ARRAY, more,
        MHD_OPTION_END);
    if (l->daemon) return HD_OK;
    return HD_FAIL(err, HD_EIO, "cannot start the HTTP threads");
}

hd_status http_start(http_server *h, hd_err *err) {
    HD_TRY(http_watch_start(h, err));
    HD_TRY(http_handler_threads_start(&h->handler_threads, err));
    for (int32_t i = 0; i < h->n_listeners; i++) {
        HD_TRY(start_daemon(h, &h->listeners[i], err));
    }
    return HD_OK;
}

hd_status http_reload(http_server *h, hd_err *err) {
    return h->tls ? http_tls_reload(h->tls, err) : HD_OK;
}

void http_set_gate(http_server *h, http_gate gate) {
    atomic_store(&h->gate, (int)gate);
}

/* Ends every waiting call, because the library cannot stop while one is suspended. */
static void drop_calls(http_server *h) {
    for (int32_t i = 0; i < h->n_conns; i++) {
        http_call *c = NULL;
        pthread_mutex_lock(&h->lock);
        if (h->conns[i].phase == HTTP_CONN_CALL) c = h->conns[i].call;
        if (c) http_retain(c);
        pthread_mutex_unlock(&h->lock);
        if (!c) continue;
        pthread_mutex_lock(&c->lock);
        http_call_gone(c);
        pthread_mutex_unlock(&c->lock);
        http_release(c);
    }
}

void http_stop(http_server *h) {
    http_watch_stop(h);
    for (int32_t i = 0; i < h->n_listeners; i++) {
        const http_listener *l = &h->listeners[i];
        if (l->daemon) MHD_quiesce_daemon(l->daemon);
        shutdown(l->fd, SHUT_RDWR); /* refuse connections instead of queueing them */
    }
    drop_calls(h);
    for (int32_t i = 0; i < h->n_listeners; i++) {
        http_listener *l = &h->listeners[i];
        if (l->daemon) MHD_stop_daemon(l->daemon);
        l->daemon = NULL;
    }
    http_handler_threads_stop(&h->handler_threads);
}

void http_close(http_server *h) {
    if (!h) return;
    http_stop(h);
    http_unlisten(h);
    if (h->epoll >= 0) close(h->epoll);
    if (h->wake >= 0) close(h->wake);
    http_quotas_close(h->quotas);
    http_tls_close(h->tls);
    http_handler_threads_deinit(&h->handler_threads);
    pthread_mutex_destroy(&h->lock);
    free(h->conns);
    free(h);
}

const char *http_library_version(void) {
    return MHD_get_version();
}

void http_read_stats(http_server *h, http_stats *out) {
    for (int i = 0; i < 6; i++) out->requests[i] = atomic_load(&h->requests[i]);
    out->body_bytes = atomic_load(&h->body_bytes);
    out->sent_bytes = atomic_load(&h->sent_bytes);
    out->gone = atomic_load(&h->gone);
    out->cut_off = atomic_load(&h->cut_off);
    out->timed_out = atomic_load(&h->timed_out);
    out->refused = atomic_load(&h->refused);
    out->handshakes_failed = atomic_load(&h->handshakes_failed);
    out->accepted = atomic_load(&h->accepted);
    out->refused_connections = atomic_load(&h->refused_connections);
    out->connections = atomic_load(&h->connections);
    out->calls = atomic_load(&h->calls);
    out->streams = atomic_load(&h->streams);
    out->held_bytes = (int64_t)atomic_load(&h->held_bytes);
    out->handled = atomic_load(&h->handled);
    out->pending = atomic_load(&h->pending);
}
