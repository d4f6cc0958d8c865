/* pd_proxy.c - see pd_proxy.h. */
#include "fakes/pd_proxy.h"

#include <arpa/inet.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "check.h"
#include "comm/address.h"

enum { NEAR, FAR, LIMIT_MS = 2000, POLL_MS = 50 };

static const uint32_t most[PD_N_FRAMES] = {
    [PD_FRAME_CHALLENGE] = 1 << 24, [PD_FRAME_JOIN] = 1 << 24,  [PD_FRAME_WELCOME] = 1 << 24,
    [PD_FRAME_REFUSED] = 1 << 24,   [PD_FRAME_LEASE] = 1 << 24, [PD_FRAME_RESERVE] = 1 << 24,
    [PD_FRAME_PAGE] = 1 << 24};

static void cut(proxy *p) {
    hd_channel_close(&p->ends[NEAR]);
    hd_channel_close(&p->ends[FAR]);
    free(p->held);
    p->held = NULL;
}

static void begin_end(hd_channel *c, int fd, bool is_server) {
    uint64_t key[2];
    hd_channel_key(key, NULL);
    hd_channel_init(c, fd, is_server, key);
    c->limits = (hd_frame_limits){most, PD_N_FRAMES};
    hd_address_no_delay(fd);
}

static int connect_to(const char *at) {
    struct addrinfo *found;
    assert_int_equal(hd_address_resolve(at, false, &found, NULL), HD_OK);
    const int fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const bool ok = connect(fd, found->ai_addr, found->ai_addrlen) == 0;
    freeaddrinfo(found);
    if (ok) return fd;
    close(fd);
    return -1;
}

static void let_in(proxy *p) {
    const int near = accept(p->listener, NULL, NULL);
    if (near < 0) return;
    cut(p);
    const int far = connect_to(p->target);
    if (far < 0) {
        close(near);
        return;
    }
    begin_end(&p->ends[NEAR], near, true);
    begin_end(&p->ends[FAR], far, false);
}

static void pass(proxy *p, int to, const hd_frame *head, const uint8_t *payload) {
    hd_channel *c = &p->ends[to];
    if (c->fd < 0) return;
    if (head->kind == PD_FRAME_CHALLENGE) memcpy(c->nonce[0], payload, HD_CHANNEL_NONCE);
    if (head->kind == PD_FRAME_JOIN) memcpy(c->nonce[1], payload, HD_CHANNEL_NONCE);
    if (hd_channel_send(c, (hd_frame_kind)head->kind, 0, payload, head->n, LIMIT_MS, NULL) !=
        HD_OK) {
        cut(p);
    }
}

/* Sends a frame whose MAC is that of other bytes. */
static void garble(proxy *p, int to, const hd_frame *head, uint8_t *payload) {
    const hd_frame f = hd_channel_seal(&p->ends[to], head->kind, 0, payload, head->n);
    payload[head->n / 2] ^= 1;
    if (send(p->ends[to].fd, &f, sizeof f, MSG_NOSIGNAL) < 0 ||
        send(p->ends[to].fd, payload, head->n, MSG_NOSIGNAL) < 0) {
        cut(p);
    }
}

static void hold(proxy *p, int from, const hd_frame *head, uint8_t *payload) {
    p->held = malloc(head->n + 1);
    memcpy(p->held, payload, head->n);
    p->held_head = *head;
    p->held_from = from;
}

static void freeze(proxy *p) {
    pthread_mutex_lock(&p->lock);
    p->frozen = true;
    pthread_mutex_unlock(&p->lock);
}

static void mute(proxy *p, int from) {
    pthread_mutex_lock(&p->lock);
    p->mute[from] = true;
    pthread_mutex_unlock(&p->lock);
}

static void flood(proxy *p, int to, const hd_frame *head, const uint8_t *payload) {
    const int32_t n = head->n > 4096 ? PROXY_MANY_LARGE : PROXY_MANY / (is_brief() ? 20 : 1);
    for (int32_t i = 0; i < n; i++) pass(p, to, head, payload);
}

static void do_wrong(proxy *p, int from, proxy_fault fault, const hd_frame *head,
                     uint8_t *payload) {
    const int to = !from;
    switch (fault) {
    case PROXY_DROP:
        return;
    case PROXY_TWICE:
        pass(p, to, head, payload);
        break;
    case PROXY_SWAP:
        hold(p, from, head, payload);
        return;
    case PROXY_FIRST_BYTE:
        payload[0] ^= 1;
        break;
    case PROXY_MIDDLE_BYTE:
        payload[head->n / 2] ^= 1;
        break;
    case PROXY_LAST_BYTE:
        payload[head->n - 1] ^= 1;
        break;
    case PROXY_GARBLE:
        garble(p, to, head, payload);
        return;
    case PROXY_CUT:
        cut(p);
        return;
    case PROXY_MUTE:
        mute(p, from);
        return;
    case PROXY_FLOOD:
        flood(p, to, head, payload);
        return;
    case PROXY_FREEZE:
    case PROXY_N_FAULTS:
        freeze(p);
        return;
    }
    pass(p, to, head, payload);
}

/* Whether this frame is the one of the order. */
static bool is_meant(proxy *p, int from, const hd_frame *head, proxy_fault *fault) {
    pthread_mutex_lock(&p->lock);
    const bool counts = p->from == from && head->kind >= PD_FRAME_LEASE;
    const bool meant = counts && p->index-- == 0;
    *fault = p->fault;
    if (meant) {
        p->from = -1;
        p->n_applied++;
    }
    pthread_mutex_unlock(&p->lock);
    return meant;
}

static bool is_mute(proxy *p, int from) {
    pthread_mutex_lock(&p->lock);
    const bool is = p->mute[from];
    pthread_mutex_unlock(&p->lock);
    return is;
}

static void take_frame(proxy *p, int from) {
    hd_channel *c = &p->ends[from];
    const hd_frame head = c->head;
    uint8_t *payload = c->payload;
    proxy_fault fault;
    c->payload = NULL; /* a cut frees it */
    if (is_mute(p, from)) {
        free(payload);
        return;
    }
    if (is_meant(p, from, &head, &fault)) {
        do_wrong(p, from, fault, &head, payload);
    } else {
        pass(p, !from, &head, payload);
        if (p->held && p->held_from == from && head.kind != PD_FRAME_PING) {
            pass(p, !from, &p->held_head, p->held);
            free(p->held);
            p->held = NULL;
        }
    }
    free(payload);
}

static bool is_frozen(proxy *p) {
    pthread_mutex_lock(&p->lock);
    const bool thaws = p->thaws;
    p->thaws = false;
    if (thaws) p->frozen = p->mute[NEAR] = p->mute[FAR] = false;
    const bool frozen = p->frozen;
    pthread_mutex_unlock(&p->lock);
    if (thaws) cut(p);
    return frozen;
}

static void read_end(proxy *p, int from) {
    while (p->ends[from].fd >= 0 && !is_frozen(p)) {
        const hd_status st = hd_channel_read(&p->ends[from], NULL);
        if (st == HD_EAGAIN) return;
        if (st != HD_OK) {
            cut(p);
            return;
        }
        take_frame(p, from);
    }
}

static bool is_closing(proxy *p) {
    pthread_mutex_lock(&p->lock);
    const bool closing = p->closing;
    pthread_mutex_unlock(&p->lock);
    return closing;
}

static void *run(void *arg) {
    proxy *p = arg;
    while (!is_closing(p)) {
        const bool frozen = is_frozen(p);
        struct pollfd fds[] = {
            {.fd = p->wake[0],                     .events = POLLIN},
            {.fd = p->listener,                    .events = POLLIN},
            {.fd = frozen ? -1 : p->ends[NEAR].fd, .events = POLLIN},
            {.fd = frozen ? -1 : p->ends[FAR].fd,  .events = POLLIN}
        };
        char bytes[64];
        poll(fds, 4, POLL_MS);
        if (fds[0].revents && read(p->wake[0], bytes, sizeof bytes) < 0) continue;
        if (fds[1].revents && !frozen) let_in(p);
        for (int end = NEAR; end <= FAR; end++) {
            if (fds[2 + end].revents) read_end(p, end);
        }
    }
    cut(p);
    return NULL;
}

static void wake(proxy *p) {
    assert_int_equal(write(p->wake[1], "", 1), 1);
}

void proxy_open(proxy *p, const char *target) {
    struct sockaddr_in name;
    socklen_t n = sizeof name;
    *p = (proxy){.target = target, .from = -1};
    p->ends[NEAR].fd = p->ends[FAR].fd = -1;
    assert_int_equal(hd_address_bind(&p->listener, "proxy", "127.0.0.1:0", NULL), HD_OK);
    assert_int_equal(getsockname(p->listener, (struct sockaddr *)&name, &n), 0);
    snprintf(p->at, sizeof p->at, "127.0.0.1:%d", ntohs(name.sin_port));
    assert_int_equal(pipe(p->wake), 0);
    pthread_mutex_init(&p->lock, NULL);
    assert_int_equal(pthread_create(&p->thread, NULL, run, p), 0);
}

void proxy_order(proxy *p, int from, int32_t index, proxy_fault fault) {
    pthread_mutex_lock(&p->lock);
    p->thaws = p->frozen || p->mute[NEAR] || p->mute[FAR];
    p->from = from;
    p->index = index;
    p->fault = fault;
    pthread_mutex_unlock(&p->lock);
    wake(p);
}

int32_t proxy_applied(proxy *p) {
    pthread_mutex_lock(&p->lock);
    const int32_t n = p->n_applied;
    pthread_mutex_unlock(&p->lock);
    return n;
}

void proxy_close(proxy *p) {
    pthread_mutex_lock(&p->lock);
    p->closing = true;
    pthread_mutex_unlock(&p->lock);
    wake(p);
    pthread_join(p->thread, NULL);
    close(p->listener);
    close(p->wake[0]);
    close(p->wake[1]);
    pthread_mutex_destroy(&p->lock);
}
