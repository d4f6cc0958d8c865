/* stream.c - server-sent events: a bounded buffer between who computes and who reads. */
#include <stdlib.h>
#include <string.h>

#include "base/progress.h"
#include "http/http_internal.h"

enum { READER_BLOCK = 4096, FIRST_CAP = 1024 };

/* Called by the library when the socket takes more. */
static ssize_t read_stream(void *user, uint64_t position, char *out, size_t max) {
    http_call *c = user;
    (void)position;
    ssize_t given = 0;
    pthread_mutex_lock(&c->lock);
    if (c->gone || (c->conn && atomic_load(&c->conn->hung_up) && !c->stream_over)) {
        http_call_gone(c);
        given = MHD_CONTENT_READER_END_WITH_ERROR;
    } else if (c->stream_n) {
        const size_t n = c->stream_n < max ? c->stream_n : max;
        memcpy(out, c->stream + c->stream_at, n);
        c->stream_at += n;
        c->stream_n -= n;
        if (!c->stream_n) c->stream_at = 0;
        c->taken_ns = hd_now_ns();
        given = (ssize_t)n;
    } else if (c->stream_over) {
        given = MHD_CONTENT_READER_END_OF_STREAM;
    } else {
        c->suspended = true;
        MHD_suspend_connection(c->connection);
    }
    pthread_mutex_unlock(&c->lock);
    return given;
}

static void release_call(void *user) {
    http_call *c = user;
    atomic_fetch_sub(&c->http->streams, 1);
    http_release(c);
}

void http_stream_begin(http_call *c) {
    struct MHD_Response *response = MHD_create_response_from_callback(
        MHD_SIZE_UNKNOWN, READER_BLOCK, read_stream, c, release_call);
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

/* Room for n bytes more behind what is there; false: no memory, or beyond the limit. */
static bool make_room(http_call *c, size_t n) {
    const size_t limit = c->http->options.limits.stream_bytes;
    if (n > limit || c->stream_n > limit - n) return false;
    if (c->stream_at + c->stream_n + n <= c->stream_cap) return true;
    if (c->stream_n + n <= c->stream_cap / 2) { /* moving is cheaper than growing */
        memmove(c->stream, c->stream + c->stream_at, c->stream_n);
        c->stream_at = 0;
        return true;
    }
    size_t cap = c->stream_cap ? c->stream_cap : FIRST_CAP;
    while (cap < c->stream_n + n) cap *= 2;
    if (c->stream_n + n > cap / 2) cap *= 2;
    char *grown = malloc(cap);
    if (!grown) return false;
    if (c->stream_n) memcpy(grown, c->stream + c->stream_at, c->stream_n);
    free(c->stream);
    c->stream = grown;
    c->stream_cap = cap;
    c->stream_at = 0;
    return true;
}

bool http_stream_write(http_call *c, const char *bytes, size_t n) {
    bool taken = false;
    pthread_mutex_lock(&c->lock);
    if (c->streaming && !c->gone && !c->stream_over) {
        taken = make_room(c, n);
        http_call_keep(c, bytes, n);
        if (taken) {
            const int64_t now = hd_now_ns();
            if (!c->stream_n) c->taken_ns = now; /* the reader owes nothing before */
            memcpy(c->stream + c->stream_at + c->stream_n, bytes, n);
            c->stream_n += n;
            c->written_ns = now;
            atomic_fetch_add_explicit(&c->http->sent_bytes, (int64_t)n, memory_order_relaxed);
            http_call_wake(c);
        } else {
            atomic_fetch_add(&c->http->cut_off, 1);
            http_conn_shut(c->conn, false);
            http_call_gone(c);
        }
    }
    pthread_mutex_unlock(&c->lock);
    return taken;
}

void http_stream_end(http_call *c) {
    pthread_mutex_lock(&c->lock);
    c->stream_over = true;
    http_call_leave_quota(c); /* who has the answer may ask again */
    http_call_wake(c);
    pthread_mutex_unlock(&c->lock);
    http_call_over(c);
}
