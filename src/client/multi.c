/* multi.c - libcurl driven by epoll. */
#include "client/multi.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "base/progress.h"

static int on_socket(CURL *easy, curl_socket_t fd, int what, void *user, void *known) {
    client_multi *m = user;
    struct epoll_event e = {.data.fd = fd};
    (void)easy;
    if (what == CURL_POLL_REMOVE) {
        epoll_ctl(m->epoll, EPOLL_CTL_DEL, fd, NULL);
        return 0;
    }
    if (what & CURL_POLL_IN) e.events |= EPOLLIN;
    if (what & CURL_POLL_OUT) e.events |= EPOLLOUT;
    epoll_ctl(m->epoll, known ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, fd, &e);
    curl_multi_assign(m->multi, fd, m);
    return 0;
}

static int on_timer(CURLM *multi, long ms, void *user) {
    client_multi *m = user;
    (void)multi;
    m->curl_due_ns = ms < 0 ? -1 : hd_now_ns() + (int64_t)ms * 1000000;
    return 0;
}

static bool watch(const client_multi *m, int fd) {
    struct epoll_event e = {.events = EPOLLIN, .data.fd = fd};
    return fd >= 0 && epoll_ctl(m->epoll, EPOLL_CTL_ADD, fd, &e) == 0;
}

hd_status client_multi_open(client_multi *m, hd_err *err) {
    const bool begun = curl_global_init(CURL_GLOBAL_DEFAULT) == CURLE_OK;
    *m = (client_multi){.epoll = epoll_create1(EPOLL_CLOEXEC),
                        .timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC),
                        .wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC),
                        .curl_due_ns = -1,
                        .timer_ns = -1};
    if (m->epoll < 0 || !watch(m, m->timer) || !watch(m, m->wake)) {
        return HD_FAIL(err, HD_EIO, "cannot wait for sockets: %s", strerror(errno));
    }
    m->multi = begun ? curl_multi_init() : NULL;
    if (!m->multi) return HD_FAIL(err, HD_ENOMEM, "no memory for requests");
    curl_multi_setopt(m->multi, CURLMOPT_SOCKETFUNCTION, on_socket);
    curl_multi_setopt(m->multi, CURLMOPT_SOCKETDATA, m);
    curl_multi_setopt(m->multi, CURLMOPT_TIMERFUNCTION, on_timer);
    curl_multi_setopt(m->multi, CURLMOPT_TIMERDATA, m);
    curl_multi_setopt(m->multi, CURLMOPT_MAXCONNECTS, 8192L);
    return HD_OK;
}

void client_multi_close(client_multi *m) {
    if (m->multi) curl_multi_cleanup(m->multi);
    if (m->epoll >= 0) close(m->epoll);
    if (m->timer >= 0) close(m->timer);
    if (m->wake >= 0) close(m->wake);
    *m = (client_multi){.epoll = -1, .timer = -1, .wake = -1};
    curl_global_cleanup();
}

static void set_timer(client_multi *m, int64_t due_ns) {
    struct itimerspec t = {0};
    if (m->curl_due_ns >= 0 && (due_ns < 0 || m->curl_due_ns < due_ns)) due_ns = m->curl_due_ns;
    if (due_ns == m->timer_ns) return;
    m->timer_ns = due_ns;
    if (due_ns >= 0) {
        t.it_value.tv_sec = due_ns / 1000000000;
        t.it_value.tv_nsec = due_ns % 1000000000;
    }
    timerfd_settime(m->timer, TFD_TIMER_ABSTIME, &t, NULL);
}

static void act(client_multi *m, const struct epoll_event *e) {
    int running, what = 0;
    if (e->data.fd == m->timer || e->data.fd == m->wake) {
        uint64_t times;
        const ssize_t n = read(e->data.fd, &times, sizeof times);
        (void)n;
        if (e->data.fd == m->timer) m->timer_ns = -1;
        return;
    }
    if (e->events & EPOLLIN) what |= CURL_CSELECT_IN;
    if (e->events & EPOLLOUT) what |= CURL_CSELECT_OUT;
    if (e->events & (EPOLLERR | EPOLLHUP)) what |= CURL_CSELECT_ERR;
    curl_multi_socket_action(m->multi, e->data.fd, what, &running);
}

hd_status client_multi_step(client_multi *m, int64_t due_ns, hd_err *err) {
    enum { BATCH = 256, LONGEST_MS = 200 }; /* a request to stop is seen that soon */
    struct epoll_event events[BATCH];
    int running;
    set_timer(m, due_ns);
    const int n = epoll_wait(m->epoll, events, BATCH, LONGEST_MS);
    if (n < 0 && errno != EINTR) {
        return HD_FAIL(err, HD_EIO, "cannot wait for sockets: %s", strerror(errno));
    }
    for (int i = 0; i < n; i++) act(m, &events[i]);
    if (m->curl_due_ns >= 0 && m->curl_due_ns <= hd_now_ns()) {
        m->curl_due_ns = -1;
        curl_multi_socket_action(m->multi, CURL_SOCKET_TIMEOUT, 0, &running);
    }
    return HD_OK;
}

void client_multi_wake(client_multi *m) {
    const uint64_t one = 1;
    const ssize_t n = write(m->wake, &one, sizeof one);
    (void)n;
}
