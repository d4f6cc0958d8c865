/* wire.c - many transfers of libcurl on one thread: its sockets in an epoll set, its timers and the
 * load's own in one timerfd, so that the cost of an event does not grow with the transfers and
 * arrivals are not rounded to milliseconds. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "base/progress.h"
#include "client/client_internal.h"

static int on_socket(CURL *easy, curl_socket_t fd, int what, void *user, void *known) {
    wire *w = user;
    struct epoll_event e = {.data.fd = fd};
    (void)easy;
    if (what == CURL_POLL_REMOVE) {
        epoll_ctl(w->epoll, EPOLL_CTL_DEL, fd, NULL);
        return 0;
    }
    if (what & CURL_POLL_IN) e.events |= EPOLLIN;
    if (what & CURL_POLL_OUT) e.events |= EPOLLOUT;
    epoll_ctl(w->epoll, known ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, fd, &e);
    curl_multi_assign(w->multi, fd, w);
    return 0;
}

static int on_timer(CURLM *multi, long ms, void *user) {
    wire *w = user;
    (void)multi;
    w->curl_due_ns = ms < 0 ? -1 : hd_now_ns() + (int64_t)ms * 1000000;
    return 0;
}

static bool add_header(wire *w, const char *line) {
    struct curl_slist *more = curl_slist_append(w->headers, line);
    if (more) w->headers = more;
    return more != NULL;
}

static bool add_key(wire *w, const char *key) {
    static const char name[] = "Authorization: Bearer ";
    const size_t n = sizeof name + strlen(key);
    char *line = malloc(n);
    if (!line) return false;
    snprintf(line, n, "%s%s", name, key);
    const bool added = add_header(w, line);
    free(line);
    return added;
}

static bool open_parts(wire *w, const client_server *s, const char *path) {
    const size_t n = strlen(s->base) + strlen(path) + 1;
    w->multi = curl_multi_init();
    w->url = malloc(n);
    if (!w->multi || !w->url) return false;
    snprintf(w->url, n, "%s%s", s->base, path);
    curl_multi_setopt(w->multi, CURLMOPT_SOCKETFUNCTION, on_socket);
    curl_multi_setopt(w->multi, CURLMOPT_SOCKETDATA, w);
    curl_multi_setopt(w->multi, CURLMOPT_TIMERFUNCTION, on_timer);
    curl_multi_setopt(w->multi, CURLMOPT_TIMERDATA, w);
    curl_multi_setopt(w->multi, CURLMOPT_MAXCONNECTS, 8192L);
    return add_header(w, "Content-Type: application/json") &&
           add_header(w, "User-Agent: hadal/" HD_VERSION) && add_header(w, "Expect:") &&
           (!s->key || add_key(w, s->key));
}

hd_status wire_open(wire *w, const client_server *s, const char *path, hd_err *err) {
    const bool begun = curl_global_init(CURL_GLOBAL_DEFAULT) == CURLE_OK;
    *w = (wire){.epoll = epoll_create1(EPOLL_CLOEXEC),
                .timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC),
                .curl_due_ns = -1};
    struct epoll_event e = {.events = EPOLLIN, .data.fd = w->timer};
    if (w->epoll < 0 || w->timer < 0 || epoll_ctl(w->epoll, EPOLL_CTL_ADD, w->timer, &e) != 0) {
        return HD_FAIL(err, HD_EIO, "cannot wait for sockets: %s", strerror(errno));
    }
    return begun && open_parts(w, s, path) ? HD_OK
                                           : HD_FAIL(err, HD_ENOMEM, "no memory for requests");
}

void wire_close(wire *w) {
    if (w->multi) curl_multi_cleanup(w->multi);
    curl_slist_free_all(w->headers);
    free(w->url);
    if (w->epoll >= 0) close(w->epoll);
    if (w->timer >= 0) close(w->timer);
    *w = (wire){.epoll = -1, .timer = -1};
    curl_global_cleanup();
}

CURL *wire_handle(const wire *w, const client_server *s) {
    CURL *easy = curl_easy_init();
    if (!easy) return NULL;
    curl_easy_setopt(easy, CURLOPT_URL, w->url);
    curl_easy_setopt(easy, CURLOPT_HTTPHEADER, w->headers);
    curl_easy_setopt(easy, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1);
    curl_easy_setopt(easy, CURLOPT_TIMEOUT_MS, (long)(s->timeout_s * 1000));
    curl_easy_setopt(easy, CURLOPT_PROXY, ""); /* the server itself is measured */
    curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
    return easy;
}

/* ---- waiting ---- */

static void set_timer(const wire *w, int64_t due_ns) {
    struct itimerspec t = {0};
    if (w->curl_due_ns >= 0 && (due_ns < 0 || w->curl_due_ns < due_ns)) due_ns = w->curl_due_ns;
    if (due_ns >= 0) {
        t.it_value.tv_sec = due_ns / 1000000000;
        t.it_value.tv_nsec = due_ns % 1000000000;
    }
    timerfd_settime(w->timer, TFD_TIMER_ABSTIME, &t, NULL);
}

static void act(wire *w, const struct epoll_event *e) {
    int running, what = 0;
    if (e->data.fd == w->timer) {
        uint64_t times;
        const ssize_t n = read(w->timer, &times, sizeof times);
        (void)n;
        return;
    }
    if (e->events & EPOLLIN) what |= CURL_CSELECT_IN;
    if (e->events & EPOLLOUT) what |= CURL_CSELECT_OUT;
    if (e->events & (EPOLLERR | EPOLLHUP)) what |= CURL_CSELECT_ERR;
    curl_multi_socket_action(w->multi, e->data.fd, what, &running);
}

hd_status wire_step(wire *w, int64_t due_ns, hd_err *err) {
    enum { BATCH = 256, LONGEST_MS = 200 }; /* a request to stop is seen that soon */
    struct epoll_event events[BATCH];
    int running;
    set_timer(w, due_ns);
    const int n = epoll_wait(w->epoll, events, BATCH, LONGEST_MS);
    if (n < 0 && errno != EINTR) {
        return HD_FAIL(err, HD_EIO, "cannot wait for sockets: %s", strerror(errno));
    }
    for (int i = 0; i < n; i++) act(w, &events[i]);
    if (w->curl_due_ns >= 0 && w->curl_due_ns <= hd_now_ns()) {
        w->curl_due_ns = -1;
        curl_multi_socket_action(w->multi, CURL_SOCKET_TIMEOUT, 0, &running);
    }
    return HD_OK;
}
