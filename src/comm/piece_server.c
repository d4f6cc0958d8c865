/* piece_server.c - the thread that sends pieces of experts to readers on other hosts (pieces.h). One poll
 * loop; no socket blocks. An answer lies in the mapped weights and is sent from there. A connection has
 * one answer on its way at most, and reads no further request before it is sent. */
#include "comm/pieces.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/checked.h"
#include "comm/address.h"

enum {
    PENDING =
        16, /* connections that have not proved the key yet; a new one takes the oldest place */
    READY = HD_CHANNEL_MAX_RANKS, /* by the rank that they say */
    LINKS = READY + PENDING,
    FDS = 2 + LINKS,
    TURN = 16 /* answers of a connection before the next one's turn */
};

/* A connection, with the answer that is on its way. */
typedef struct connection {
    hd_channel channel; /* fd -1: none */
    hd_frame head;
    const uint8_t *bytes;
    size_t sent; /* of head and bytes; answers only while `answers` */
    bool answers;
} connection;

struct hd_piece_server {
    hd_piece_source source;
    uint64_t key[2];
    int listener, wake;
    char address[HD_PIECE_ADDRESS];
    connection links[LINKS]; /* the first READY are those of ranks */
    uint64_t accepted;
    pthread_t thread;
    bool runs;
    _Atomic bool closes;
    _Atomic int64_t readers, pieces, bytes, refused;
};

static void add(_Atomic int64_t *counter, int64_t n) {
    atomic_fetch_add_explicit(counter, n, memory_order_relaxed);
}

static void drop(hd_piece_server *s, int32_t i) {
    connection *l = &s->links[i];
    if (l->channel.fd >= 0 && i < READY) add(&s->readers, -1);
    hd_channel_close(&l->channel);
    l->answers = false;
}

/* ---- answers ---- */

/* Sends what the socket takes of head and bytes. False: the connection is lost. */
static bool send_some(connection *l) {
    while (l->answers) {
        const bool in_head = l->sent < sizeof l->head;
        const size_t at = in_head ? l->sent : l->sent - sizeof l->head;
        const uint8_t *from = in_head ? (const uint8_t *)&l->head : l->bytes;
        const size_t all = in_head ? sizeof l->head : l->head.n;
        const ssize_t n = send(l->channel.fd, from + at, all - at,
                               MSG_NOSIGNAL | MSG_DONTWAIT | (in_head ? MSG_MORE : 0));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
        l->sent += (size_t)n;
        l->answers = l->sent < sizeof l->head + l->head.n;
    }
    return true;
}

static hd_status begin_answer(hd_piece_server *s, connection *l, hd_err *err) {
    hd_piece p;
    const void *bytes;
    if (l->channel.head.kind != HD_PIECE_ASK) {
        return HD_FAIL(err, HD_EFORMAT, "a reader sent a frame of kind %u",
                       l->channel.head.kind);
    }
    HD_TRY(hd_piece_check(&p, &bytes, l->channel.payload, l->channel.head.n, &s->source, err));
    l->head = hd_channel_seal(&l->channel, HD_PIECE_BYTES, 0, bytes, p.n);
    l->bytes = bytes;
    l->sent = 0;
    l->answers = true;
    add(&s->pieces, 1);
    add(&s->bytes, p.n);
    return HD_OK;
}

/* Answers the requests of a rank, as long as it takes the answers. */
static void serve(hd_piece_server *s, int32_t i) {
    connection *l = &s->links[i];
    for (int32_t n = 0; n < TURN; n++) {
        if (!send_some(l)) {
            drop(s, i);
            return;
        }
        if (l->answers) return;
        hd_err err = {0};
        hd_status st = hd_channel_read(&l->channel, &err);
        if (st == HD_EAGAIN) return;
        if (st == HD_OK) st = begin_answer(s, l, &err);
        if (st == HD_OK) continue;
        if (st == HD_EFORMAT) add(&s->refused, 1);
        drop(s, i);
        return;
    }
}

/* ---- connections ---- */

/* A connection that has proved the key takes the place of an earlier one of its rank. */
static void admit(hd_piece_server *s, int32_t i) {
    connection *l = &s->links[i];
    hd_err err = {0};
    const hd_status st = hd_channel_read(&l->channel, &err);
    if (st == HD_EAGAIN) return;
    if (st != HD_OK || l->channel.head.kind != HD_PIECE_JOIN) {
        if (st == HD_OK || st == HD_EFORMAT) add(&s->refused, 1);
        drop(s, i);
        return;
    }
    const int32_t rank = l->channel.head.rank; /* below READY: a channel checks it */
    drop(s, rank);
    s->links[rank] = *l;
    add(&s->readers, 1);
    l->channel = (hd_channel){.fd = -1};
}

static void accept_one(hd_piece_server *s) {
    const int fd = accept(s->listener, NULL, NULL);
    if (fd < 0) return;
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    const int32_t i = READY + (int32_t)(s->accepted++ % PENDING);
    hd_channel *c = &s->links[i].channel;
    uint8_t nonce[HD_CHANNEL_NONCE];
    hd_address_no_delay(fd);
    drop(s, i);
    hd_channel_init(c, fd, true, s->key);
    c->limits = hd_piece_limits(true);
    const bool ok = getrandom(nonce, sizeof nonce, 0) == (ssize_t)sizeof nonce;
    memcpy(c->nonce[0], nonce, sizeof nonce);
    const hd_status st =
        hd_channel_send(c, (hd_frame_kind)HD_PIECE_CHALLENGE, 0, nonce, sizeof nonce, 0, NULL);
    if (!ok || st != HD_OK) drop(s, i);
}

static void *work(void *arg) {
    hd_piece_server *s = arg;
    while (!atomic_load(&s->closes)) {
        struct pollfd p[FDS] = {
            {.fd = s->wake,     .events = POLLIN},
            {.fd = s->listener, .events = POLLIN}
        };
        for (int32_t i = 0; i < LINKS; i++) {
            const connection *l = &s->links[i];
            p[2 + i] =
                (struct pollfd){.fd = l->channel.fd, .events = l->answers ? POLLOUT : POLLIN};
        }
        if (poll(p, FDS, -1) < 0) continue;
        for (int32_t i = LINKS - 1; i >= 0; i--) {
            if (!p[2 + i].revents || s->links[i].channel.fd != p[2 + i].fd) continue;
            if (i < READY)
                serve(s, i);
            else
                admit(s, i);
        }
        if (p[1].revents) accept_one(s);
    }
    return NULL;
}

/* ---- opening ---- */

/* The address of this host from which a packet goes to `towards`: nothing is sent. */
static hd_status find_own_host(struct sockaddr_storage *out, socklen_t *n, const char *towards,
                               hd_err *err) {
    struct addrinfo *found;
    HD_TRY(hd_address_resolve(towards, false, &found, err));
    const int fd = socket(found->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    *n = sizeof *out;
    const bool ok = fd >= 0 && connect(fd, found->ai_addr, found->ai_addrlen) == 0 &&
                    getsockname(fd, (struct sockaddr *)out, n) == 0;
    const int why = errno;
    freeaddrinfo(found);
    if (fd >= 0) close(fd);
    if (ok) return HD_OK;
    return HD_FAIL(err, HD_EIO, "no address of this host reaches %s: %s", towards,
                   strerror(why));
}

static void clear_port(struct sockaddr_storage *a) {
    if (a->ss_family == AF_INET6)
        ((struct sockaddr_in6 *)(void *)a)->sin6_port = 0;
    else
        ((struct sockaddr_in *)(void *)a)->sin_port = 0;
}

static hd_status name_address(hd_piece_server *s, hd_err *err) {
    struct sockaddr_storage a;
    socklen_t n = sizeof a;
    char host[NI_MAXHOST], port[NI_MAXSERV];
    if (getsockname(s->listener, (struct sockaddr *)&a, &n) != 0 ||
        getnameinfo((struct sockaddr *)&a, n, host, sizeof host, port, sizeof port,
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
        return HD_FAIL(err, HD_EIO, "the address of this host has no name");
    }
    const bool six = strchr(host, ':') != NULL;
    const int length =
        snprintf(s->address, sizeof s->address, six ? "[%s]:%s" : "%s:%s", host, port);
    if (length < (int)sizeof s->address) return HD_OK;
    return HD_FAIL(err, HD_EIO, "the address %s of this host is too long", host);
}

static hd_status listen_there(hd_piece_server *s, const char *towards, hd_err *err) {
    struct sockaddr_storage a = {0};
    socklen_t n;
    HD_TRY(find_own_host(&a, &n, towards, err));
    clear_port(&a);
    s->listener = socket(a.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (s->listener < 0 || bind(s->listener, (struct sockaddr *)&a, n) != 0 ||
        listen(s->listener, READY) != 0) {
        return HD_FAIL(err, HD_EIO, "cannot listen for readers of experts: %s",
                       strerror(errno));
    }
    return name_address(s, err);
}

hd_status hd_piece_server_open(hd_piece_server **out, const char *towards, const char *secret,
                               hd_err *err) {
    hd_piece_server *s = calloc(1, sizeof *s);
    *out = NULL;
    if (!s) return HD_FAIL(err, HD_ENOMEM, "no memory to serve experts");
    s->listener = -1;
    s->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    hd_piece_key(s->key, secret);
    for (int32_t i = 0; i < LINKS; i++) s->links[i].channel.fd = -1;
    const hd_status st = s->wake < 0 ? HD_FAIL(err, HD_EIO, "no descriptor to serve experts")
                                     : listen_there(s, towards, err);
    if (st == HD_OK) {
        *out = s;
    } else {
        hd_piece_server_close(s);
    }
    return st;
}

hd_status hd_piece_server_start(hd_piece_server *s, const hd_piece_source *source,
                                hd_err *err) {
    s->source = *source;
    s->runs = pthread_create(&s->thread, NULL, work, s) == 0;
    return s->runs ? HD_OK
                   : HD_FAIL(err, HD_EIO, "cannot start the thread that serves experts");
}

const char *hd_piece_server_address(const hd_piece_server *s) {
    return s->address;
}

void hd_piece_server_read_figures(const hd_piece_server *s, hd_piece_server_figures *out) {
    *out = (hd_piece_server_figures){.readers = atomic_load(&s->readers),
                                     .pieces = atomic_load(&s->pieces),
                                     .bytes = atomic_load(&s->bytes),
                                     .refused = atomic_load(&s->refused)};
}

void hd_piece_server_close(hd_piece_server *s) {
    if (!s) return;
    atomic_store(&s->closes, true);
    if (s->runs) {
        eventfd_write(s->wake, 1);
        pthread_join(s->thread, NULL);
    }
    for (int32_t i = 0; i < LINKS; i++) drop(s, i);
    if (s->listener >= 0) close(s->listener);
    if (s->wake >= 0) close(s->wake);
    free(s);
}
