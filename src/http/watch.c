/* watch.c - the table of connections, and the watcher thread. The library ignores a
 * connection that waits for its reply. The watcher registers every connection with an
 * edge-triggered epoll of its own that reports hang-ups, and room for streams that wait for
 * it. It also enforces the deadline of each phase and keeps silent streams alive. */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/progress.h"
#include "http/http_internal.h"

enum { TICK_MS = 1000, EVENTS = 256, WAKE_TOKEN = 0 };
static const int64_t SECOND_NS = 1000000000;
static const char PING[] = ": ping\n\n";

/* ---- the table ---- */

static bool watch_conn(const http_conn *conn, int operation, uint32_t events) {
    struct epoll_event watch = {
        .events = events | EPOLLRDHUP | EPOLLET,
        .data.u64 = (uint64_t)conn->generation << 32 | conn->slot,
    };
    return epoll_ctl(conn->http->epoll, operation, conn->fd, &watch) == 0;
}

http_conn *http_conn_add(http_server *h, int fd) {
    pthread_mutex_lock(&h->lock);
    const int32_t slot = h->first_free;
    http_conn *conn = slot < 0 ? NULL : &h->conns[slot];
    if (conn) {
        h->first_free = conn->next_free;
        conn->http = h;
        conn->slot = (uint32_t)slot;
        conn->generation++; /* never 0 while in use, so no token equals WAKE_TOKEN */
        if (!conn->generation) conn->generation = 1;
        conn->fd = fd;
        conn->call = NULL;
        conn->phase = HTTP_CONN_FRESH;
        conn->left = false;
        conn->until_ns = hd_now_ns() + h->options.limits.header_s * SECOND_NS;
        atomic_store(&conn->hung_up, false);
        atomic_store(&conn->refused, 0);
    }
    pthread_mutex_unlock(&h->lock);
    if (!conn) return NULL;
    watch_conn(conn, EPOLL_CTL_ADD, 0);
    return conn;
}

void http_conn_remove(http_conn *conn) {
    http_server *h = conn->http;
    epoll_ctl(h->epoll, EPOLL_CTL_DEL, conn->fd, NULL);
    pthread_mutex_lock(&h->lock);
    conn->phase = HTTP_CONN_FREE;
    conn->call = NULL;
    conn->next_free = h->first_free;
    h->first_free = (int32_t)conn->slot;
    pthread_mutex_unlock(&h->lock);
}

void http_conn_phase(http_conn *conn, http_phase phase, http_call *c, int64_t seconds) {
    http_server *h = conn->http;
    const int64_t until = seconds ? hd_now_ns() + seconds * SECOND_NS : 0;
    pthread_mutex_lock(&h->lock);
    conn->phase = phase;
    conn->call = c;
    conn->until_ns = until;
    conn->left = false;
    pthread_mutex_unlock(&h->lock);
}

/* linger: the client may still read what was sent. Without a reset, a full send buffer would
 * keep a slow reader's connection open indefinitely. */
void http_conn_shut(http_conn *conn, bool linger) {
    http_server *h = conn->http;
    const struct linger reset = {.l_onoff = 1, .l_linger = 0};
    pthread_mutex_lock(&h->lock);
    if (conn->phase != HTTP_CONN_FREE) {
        if (!linger) setsockopt(conn->fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
        shutdown(conn->fd, SHUT_RDWR);
    }
    pthread_mutex_unlock(&h->lock);
}

/* ---- streams ---- */

ssize_t http_conn_send(const http_conn *conn, const char *bytes, size_t n) {
    bool full;
    ssize_t sent;
    if (conn->http->tls) {
        sent = gnutls_record_send(conn->tls.session, bytes, n);
        full = sent == GNUTLS_E_AGAIN || sent == GNUTLS_E_INTERRUPTED;
    } else {
        sent = send(conn->fd, bytes, n, MSG_DONTWAIT | MSG_NOSIGNAL);
        full = sent < 0 && (errno == EAGAIN || errno == EINTR);
    }
    if (sent > 0) return sent;
    /* changing what is watched reports room that is there by now */
    return full && watch_conn(conn, EPOLL_CTL_MOD, EPOLLOUT) ? 0 : -1;
}

void http_conn_uncork(const http_conn *conn) {
    const int off = 0;
    setsockopt(conn->fd, IPPROTO_TCP, TCP_CORK, &off, sizeof off);
}

/* ---- the watcher ---- */

/* Returns the call at a place, retained, or NULL. */
static http_call *call_at(http_server *h, http_conn *conn, uint32_t generation, bool hung_up) {
    http_call *c = NULL;
    pthread_mutex_lock(&h->lock);
    if (conn->phase != HTTP_CONN_FREE && conn->generation == generation) {
        if (hung_up) atomic_store(&conn->hung_up, true);
        c = conn->call;
        if (c) http_retain(c);
    }
    pthread_mutex_unlock(&h->lock);
    return c;
}

static void on_event(http_server *h, const struct epoll_event *event) {
    const uint32_t slot = (uint32_t)event->data.u64;
    const uint32_t generation = (uint32_t)(event->data.u64 >> 32);
    const bool whole = event->events & (EPOLLHUP | EPOLLERR);
    const bool hung_up = whole || (event->events & EPOLLRDHUP && !h->options.half_close);
    http_call *c = call_at(h, &h->conns[slot], generation, hung_up);
    if (!c) return;
    pthread_mutex_lock(&c->lock);
    /* A complete reply is still sent to a client that closed only one side. */
    if (c->suspended && (whole || (hung_up && !c->stream_over))) http_call_gone(c);
    http_stream_go_on(c);
    pthread_mutex_unlock(&c->lock);
    http_release(c);
}

/* Refuses where the library accepts no reply: before the request is complete. status may be
 * followed by more headers. */
void http_conn_refuse(const http_conn *conn, const char *status, const char *type,
                      const char *message) {
    char body[256], text[512];
    if (conn->http->tls) return; /* it would not be encrypted */
    const int n = snprintf(body, sizeof body,
                           "{\"error\":{\"message\":\"%s\",\"type\":\"%s\",\"param\":null,"
                           "\"code\":null}}",
                           message, type);
    const int m = snprintf(text, sizeof text,
                           "HTTP/1.1 %s\r\nConnection: close\r\nContent-Type: "
                           "application/json\r\nContent-Length: %d\r\n\r\n%s",
                           status, n, body);
    (void)!send(conn->fd, text, (size_t)m, MSG_DONTWAIT | MSG_NOSIGNAL);
}

static void tend_stream(http_call *c, int64_t now) {
    const http_limits *limits = &c->http->options.limits;
    pthread_mutex_lock(&c->lock);
    if (c->streaming && !c->gone) {
        if (http_stream_is_late(c, now)) {
            http_stream_cut_off(c);
        } else if (!c->stream_n && now - c->written_ns > limits->keep_alive_s * SECOND_NS) {
            http_stream_write(c, PING, sizeof PING - 1);
        }
    }
    pthread_mutex_unlock(&c->lock);
}

/* Whether the client hung up and all its bytes were read. The library may miss this if the
 * end came with the last bytes or while it was busy. */
static bool has_left(const http_conn *conn) {
    int unread = 0;
    return atomic_load(&conn->hung_up) && ioctl(conn->fd, FIONREAD, &unread) == 0 && !unread;
}

static void check_patience(http_server *h, http_conn *conn, int64_t now) {
    http_call *c = NULL;
    pthread_mutex_lock(&h->lock);
    const http_phase phase = conn->phase;
    if (phase == HTTP_CONN_CALL) {
        c = conn->call;
        if (c) http_retain(c);
    } else if (phase != HTTP_CONN_FREE && has_left(conn)) {
        if (conn->left) shutdown(conn->fd, SHUT_RDWR);
        conn->left = true; /* decided if it is still so at the next check */
    } else if (phase != HTTP_CONN_FREE && conn->until_ns && now > conn->until_ns) {
        atomic_fetch_add(&h->timed_out, 1);
        if (phase > HTTP_CONN_IDLE) {
            atomic_store(&conn->refused, 408);
            http_conn_refuse(conn, "408 Request Timeout", "timeout_error",
                             "the request took too long to arrive");
        }
        shutdown(conn->fd, SHUT_RDWR);
        conn->until_ns = 0;
    }
    pthread_mutex_unlock(&h->lock);
    if (c) {
        tend_stream(c, now);
        http_release(c);
    }
}

static void *watch(void *user) {
    http_server *h = user;
    struct epoll_event events[EVENTS];
    int64_t next_tick = hd_now_ns() + SECOND_NS;
    while (!atomic_load(&h->closing)) {
        const int n = epoll_wait(h->epoll, events, EVENTS, TICK_MS);
        for (int i = 0; i < n; i++) {
            uint64_t count;
            if (events[i].data.u64 != WAKE_TOKEN) {
                on_event(h, &events[i]);
            } else if (read(h->wake, &count, sizeof count) < 0 && errno != EAGAIN) {
                return NULL;
            }
        }
        const int64_t now = hd_now_ns();
        if (now < next_tick) continue;
        next_tick = now + SECOND_NS;
        if (atomic_load(&h->connections) == 0) continue;
        for (int32_t i = 0; i < h->n_conns; i++) check_patience(h, &h->conns[i], now);
    }
    return NULL;
}

hd_status http_watch_start(http_server *h, hd_err *err) {
    h->epoll = epoll_create1(EPOLL_CLOEXEC);
    h->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    struct epoll_event waking = {.events = EPOLLIN, .data.u64 = WAKE_TOKEN};
    if (h->epoll < 0 || h->wake < 0 || epoll_ctl(h->epoll, EPOLL_CTL_ADD, h->wake, &waking)) {
        return HD_FAIL(err, HD_EIO, "cannot watch connections: %s", strerror(errno));
    }
    if (pthread_create(&h->watcher, NULL, watch, h) != 0) {
        return HD_FAIL(err, HD_EIO, "cannot start the thread that watches connections");
    }
    h->watching = true;
    return HD_OK;
}

void http_watch_stop(http_server *h) {
    const uint64_t one = 1;
    atomic_store(&h->closing, true);
    if (h->watching) {
        (void)!write(h->wake, &one, sizeof one);
        pthread_join(h->watcher, NULL);
        h->watching = false;
    }
}
