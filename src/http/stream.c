/* stream.c - buffers of unread reply bytes: server-sent events (SSE), and replies too large
 * for one write. Each call has one buffer. All buffers and request bodies share one limit
 * (http_options.limits.bodies_bytes).
 *
 * The library sends large replies, and the headers and the end of a stream. In between the
 * connection of a stream is suspended, and whoever writes an event sends it, or wakes a thread of
 * the library that does (http_options.writer_sends). What the socket does not accept stays in the
 * buffer, until the watcher finds that there is room. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/progress.h"
#include "http/http_internal.h"

enum {
    EVENT_BLOCK = 1024, /* unused by us, but the library needs one */
    REPLY_BLOCK = 64 << 10,
    CHUNK_BYTES = 24, /* more than the head and the end of a chunk have */
    FIRST_CAP = 1024,
    SHARES = 4
};
static const int64_t SECOND_NS = 1000000000;

/* ---- bytes of all calls ---- */

bool http_take_bytes(http_server *h, size_t n) {
    const size_t most = h->options.limits.bodies_bytes;
    const size_t before = atomic_fetch_add(&h->held_bytes, n);
    if (n <= most && before <= most - n) return true;
    atomic_fetch_sub(&h->held_bytes, n);
    return false;
}

bool http_hold(http_call *c, size_t n) {
    return http_take_bytes(c->http, n);
}

void http_let_go(http_call *c, size_t n) {
    atomic_fetch_sub(&c->http->held_bytes, n);
}

/* Called with the lock held, or when no other thread has the call. */
void http_stream_free(http_call *c) {
    atomic_fetch_sub(&c->http->held_bytes, c->stream_cap);
    free(c->stream);
    c->stream = NULL;
    c->stream_at = c->stream_n = c->stream_cap = 0;
}

/* ---- the reader ---- */

void http_stream_taken(http_call *c, size_t n) {
    const size_t patient = c->http->options.limits.stream_bytes;
    c->stream_at += n;
    c->stream_n -= n;
    c->taken_ns = hd_now_ns();
    if (c->stream_n <= patient) c->late_ns = 0;
    if (c->stream_n) return;
    c->stream_at = 0;
    if (c->stream_cap > 2 * patient) http_stream_free(c);
}

/* Called by the library when the socket accepts more bytes of a large reply. */
static ssize_t read_reply(void *user, uint64_t position, char *out, size_t max) {
    http_call *c = user;
    (void)position;
    ssize_t given = MHD_CONTENT_READER_END_OF_STREAM;
    pthread_mutex_lock(&c->lock);
    if (c->gone) {
        given = MHD_CONTENT_READER_END_WITH_ERROR;
    } else if (c->stream_n) {
        const size_t n = c->stream_n < max ? c->stream_n : max;
        memcpy(out, c->stream + c->stream_at, n);
        http_stream_taken(c, n);
        given = (ssize_t)n;
    }
    pthread_mutex_unlock(&c->lock);
    return given;
}

/* Sends what waits. The caller holds the lock, and the library leaves the connection alone. */
static void send_waiting(http_call *c) {
    while (c->stream_n && !c->gone) {
        const ssize_t n = http_conn_send(c->conn, c->stream + c->stream_at, c->stream_n);
        if (n == 0) return; /* the watcher goes on */
        if (n < 0) {
            http_call_gone(c);
        } else {
            http_stream_taken(c, (size_t)n);
        }
    }
}

void http_stream_go_on(http_call *c) {
    if (!c->suspended || !c->streaming) return;
    send_waiting(c);
    if (c->stream_over && !c->stream_n) http_call_wake(c);
}

/* Called by the library when the headers of a stream were sent, when it was woken, and to end it. */
static ssize_t read_events(void *user, uint64_t position, char *out, size_t max) {
    http_call *c = user;
    (void)position, (void)out, (void)max;
    ssize_t given = 0;
    pthread_mutex_lock(&c->lock);
    if (!c->gone && atomic_load(&c->conn->hung_up) && !c->stream_over) http_call_gone(c);
    send_waiting(c);
    if (c->gone) {
        given = MHD_CONTENT_READER_END_WITH_ERROR;
    } else if (c->stream_over && !c->stream_n) {
        given = MHD_CONTENT_READER_END_OF_STREAM;
    } else {
        if (!c->uncorked) http_conn_uncork(c->conn);
        c->uncorked = c->suspended = true;
        MHD_suspend_connection(c->connection);
    }
    pthread_mutex_unlock(&c->lock);
    return given;
}

static void release_call(void *user) {
    http_release(user);
}

static void release_events(void *user) {
    http_call *c = user;
    atomic_fetch_sub(&c->http->streams, 1);
    http_release(c);
}

/* n bytes were added. A reader may be this far behind for as long as the stall limit, plus
 * the time that a slow line takes for the waiting bytes. */
static void be_patient(http_call *c, size_t n) {
    const http_limits *limits = &c->http->options.limits;
    if (c->stream_n <= limits->stream_bytes) return;
    if (!c->late_ns) {
        c->late_ns = c->written_ns + limits->stall_s * SECOND_NS;
        n = c->stream_n;
    }
    c->late_ns += (int64_t)n * (SECOND_NS / HTTP_BYTES_PER_S);
}

struct MHD_Response *http_stream_reply(http_call *c, char *body, size_t n) {
    struct MHD_Response *response =
        MHD_create_response_from_callback(n, REPLY_BLOCK, read_reply, c, release_call);
    if (!response) {
        free(body);
        atomic_fetch_sub(&c->http->held_bytes, n);
        return NULL;
    }
    http_retain(c);
    c->stream = body;
    c->stream_n = c->stream_cap = n;
    c->stream_over = c->streaming = true;
    c->written_ns = c->taken_ns = hd_now_ns();
    be_patient(c, n);
    return response;
}

void http_stream_begin(http_call *c) {
    struct MHD_Response *response = MHD_create_response_from_callback(
        MHD_SIZE_UNKNOWN, EVENT_BLOCK, read_events, c, release_events);
    pthread_mutex_lock(&c->lock);
    if (response) {
        http_retain(c);
        atomic_fetch_add(&c->http->streams, 1);
        const bool whole =
            http_call_add_headers(c, response, "text/event-stream") &&
            MHD_add_response_header(response, "Cache-Control", "no-cache") == MHD_YES &&
            MHD_add_response_header(response, "X-Accel-Buffering", "no") == MHD_YES;
        if (!whole) MHD_destroy_response(response); /* which releases the call */
        if (!whole) response = NULL;
    }
    if (!response) http_call_gone(c); /* no memory: the connection is dropped */
    c->written_ns = c->taken_ns = hd_now_ns();
    c->streaming = http_call_answer(c, MHD_HTTP_OK, response);
    pthread_mutex_unlock(&c->lock);
}

/* ---- the writer ---- */

bool http_stream_is_late(const http_call *c, int64_t now) {
    const int64_t stall_ns = c->http->options.limits.stall_s * SECOND_NS;
    return c->stream_n && (now - c->taken_ns > stall_ns || (c->late_ns && now > c->late_ns));
}

/* Whether n bytes may grow by more. The standard buffer of a stream always fits, and an
 * empty buffer accepts any event if the shared limit allows it. In between, one stream gets
 * only a share of the limit. */
static bool may_hold(http_call *c, size_t n, size_t more) {
    const http_limits *limits = &c->http->options.limits;
    if (n <= limits->stream_bytes) {
        atomic_fetch_add(&c->http->held_bytes, more);
        return true;
    }
    const bool in_share = !c->stream_n || n <= limits->bodies_bytes / SHARES;
    return in_share && http_take_bytes(c->http, more);
}

static size_t cap_for(const http_call *c, size_t n) {
    if (n > c->http->options.limits.stream_bytes) return n + n / 4;
    size_t cap = c->stream_cap ? c->stream_cap : FIRST_CAP;
    while (cap < n) cap *= 2;
    return n > cap / 2 ? 2 * cap : cap; /* moving is cheaper than growing */
}

/* Makes space for n bytes at the end. Returns false without memory or beyond the limit. */
static bool make_room(http_call *c, size_t n) {
    if (c->stream_at + c->stream_n + n <= c->stream_cap) return true;
    if (c->stream_n + n <= c->stream_cap / 2) {
        memmove(c->stream, c->stream + c->stream_at, c->stream_n);
        c->stream_at = 0;
        return true;
    }
    const size_t cap = cap_for(c, c->stream_n + n), unread = c->stream_n;
    if (!may_hold(c, c->stream_n + n, cap)) return false;
    char *grown = malloc(cap);
    if (!grown) {
        atomic_fetch_sub(&c->http->held_bytes, cap);
        return false;
    }
    if (unread) memcpy(grown, c->stream + c->stream_at, unread);
    http_stream_free(c);
    c->stream = grown;
    c->stream_cap = cap;
    c->stream_n = unread;
    return true;
}

void http_stream_cut_off(http_call *c) {
    atomic_fetch_add(&c->http->cut_off, 1);
    http_conn_shut(c->conn, false);
    http_call_gone(c);
}

static void append(http_call *c, const char *bytes, size_t n) {
    memcpy(c->stream + c->stream_at + c->stream_n, bytes, n);
    c->stream_n += n;
}

bool http_stream_write(http_call *c, const char *bytes, size_t n) {
    bool taken = false;
    if (!n) return true; /* an empty chunk would end the stream */
    pthread_mutex_lock(&c->lock);
    if (c->streaming && !c->gone && !c->stream_over) {
        char head[CHUNK_BYTES] = "";
        const int head_n = c->chunked ? snprintf(head, sizeof head, "%zx\r\n", n) : 0;
        taken = make_room(c, n + CHUNK_BYTES);
        http_call_keep(c, bytes, n);
        if (taken) {
            const bool waits = c->stream_n;
            const int64_t now = hd_now_ns();
            if (!waits) c->taken_ns = now; /* the stall time begins now */
            append(c, head, (size_t)head_n);
            append(c, bytes, n);
            if (c->chunked) append(c, "\r\n", 2);
            c->written_ns = now;
            be_patient(c, n);
            atomic_fetch_add_explicit(&c->http->sent_bytes, (int64_t)n, memory_order_relaxed);
            if (!waits && c->http->options.writer_sends) {
                http_stream_go_on(c);
            } else if (!waits) {
                http_call_wake(c);
            }
        } else {
            http_stream_cut_off(c);
        }
    }
    pthread_mutex_unlock(&c->lock);
    return taken;
}

void http_stream_end(http_call *c) {
    pthread_mutex_lock(&c->lock);
    c->stream_over = true;
    http_call_leave_quota(c); /* a client that has its reply may send the next request */
    http_stream_go_on(c);
    pthread_mutex_unlock(&c->lock);
    http_call_over(c);
}
