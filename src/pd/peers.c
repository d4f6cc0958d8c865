/* peers.c - the servers at the other ends: connects to those to fetch from, lets in those that
 * fetch here, and reads and sends what both say. */
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/log.h"
#include "base/progress.h"
#include "comm/address.h"
#include "pd/pd_internal.h"

enum {
    GREETING_NS = 1000000000, /* a server that has connected says who it is */
    PING_NS = 500000000,      /* what is said at least */
    REFUSED_NS = 2000000000,  /* until the next try after a refusal */
    RETRY_NS = 50000000,      /* until the first next try, doubled up to that of a refusal */
    MAX_PLACING = 256 << 20   /* bytes of pages that wait for the step threads */
};

static const int64_t SILENCE_NS = 5000000000; /* after so long a server is lost */

static pd_peer *peer_at(pd *p, int32_t peer) {
    return &p->peers[peer];
}

static bool is_linked(const pd_peer *q) {
    return q->link.channel.fd >= 0;
}

/* ---- the list ---- */

static bool is_taken(const pd_peer *q) {
    return q->name[0] != '\0';
}

/* Where it listens for transfers: the usual port of the same host, unless `at` says another. */
static void place_address(pd_peer *q, const char *at) {
    char *colon = strrchr(q->name, ':');
    const int host = (int)(colon ? colon - q->name : 0);
    if (strchr(at, ':')) {
        snprintf(q->address, PD_NAME, "%s", at);
    } else {
        snprintf(q->address, PD_NAME, "%.*s:%s", host, q->name, at);
    }
}

/* A place for a server to fetch from; NULL: all are taken. */
static pd_peer *free_place(pd *p) {
    for (int32_t i = 0; i < PD_MAX_PEERS; i++) {
        if (!is_taken(&p->peers[i])) return &p->peers[i];
    }
    return NULL;
}

static bool has_name(const pd *p, const char *name) {
    for (int32_t i = 0; i < PD_MAX_PEERS; i++) {
        if (strcmp(p->peers[i].name, name) == 0) return true;
    }
    return false;
}

static hd_status check_entry(const pd *p, const char *entry, const pd_peer *q, hd_err *err) {
    if (!hd_address_is_valid(q->name) || !hd_address_is_valid(q->address)) {
        return HD_FAIL(err, HD_EINVAL, "--prefill-peers: %s is not HOST:PORT=HOST:PORT", entry);
    }
    if (!p->o.key && !hd_address_is_loopback(q->address)) {
        return HD_FAIL(err, HD_EINVAL,
                       "--prefill-peers: %s is not on the loopback interface, so both servers "
                       "need --peer-key-file",
                       q->address);
    }
    return HD_OK;
}

/* "HOST:PORT", "HOST:PORT=HOST:PORT", or with dns: "HOST:PORT", "HOST:PORT=PORT". */
static hd_status add_peer(pd *p, char *entry, hd_err *err) {
    static const size_t prefix = sizeof HD_NAMES_PREFIX - 1;
    const bool many = strncmp(entry, HD_NAMES_PREFIX, prefix) == 0;
    pd_peer q = {.source = -1, .link.channel.fd = -1};
    char *name = many ? entry + prefix : entry, *at = strchr(name, '=');
    if (at) *at++ = '\0';
    if (strlen(name) >= PD_NAME || (at && strlen(at) >= PD_NAME)) {
        return HD_FAIL(err, HD_EINVAL, "--prefill-peers: a name is too long");
    }
    memcpy(q.name, name, strlen(name) + 1);
    if (!many && at && !strchr(at, ':')) {
        return HD_FAIL(err, HD_EINVAL, "--prefill-peers: %s is not HOST:PORT", at);
    }
    place_address(&q, at ? at : PD_PORT);
    HD_TRY(check_entry(p, name, &q, err));
    if (many) {
        if (at && (strchr(at, ':') || strlen(at) >= sizeof p->sources->port)) {
            return HD_FAIL(err, HD_EINVAL, "--prefill-peers: %s is not a port", at);
        }
        if (p->n_sources == HD_NAMES_MAX) {
            return HD_FAIL(err, HD_EINVAL,
                           "--prefill-peers: more than %d names of many servers", HD_NAMES_MAX);
        }
        pd_source_name *s = &p->sources[p->n_sources++];
        memcpy(s->address, q.name, sizeof s->address);
        snprintf(s->port, sizeof s->port, "%s", at ? at : PD_PORT);
        return HD_OK;
    }
    if (has_name(p, q.name)) {
        return HD_FAIL(err, HD_EINVAL, "--prefill-peers: %s is there twice", q.name);
    }
    pd_peer *place = free_place(p);
    if (!place) return HD_FAIL(err, HD_EINVAL, "--prefill-peers: more than %d", PD_MAX_PEERS);
    *place = q;
    return HD_OK;
}

/* ---- servers that join and leave ---- */

typedef struct names_note {
    pd_note note;
    int32_t source;
    hd_resolved servers;
} names_note;

/* A server that is gone is asked for nothing new, and forgotten once its connection has ended. */
static void take_names(pd *p, pd_note *note) {
    const names_note *n = PD_OWNER(note, names_note, note);
    pthread_mutex_lock(&p->lock);
    for (int32_t i = 0; i < PD_MAX_PEERS; i++) {
        pd_peer *q = &p->peers[i];
        if (!is_taken(q) || q->source != n->source) continue;
        q->gone = !hd_resolved_has(&n->servers, q->name);
    }
    for (int32_t i = 0; i < n->servers.n; i++) {
        pd_peer *q = has_name(p, n->servers.names[i]) ? NULL : free_place(p);
        if (!q) continue;
        *q = (pd_peer){.source = n->source, .link.channel.fd = -1};
        snprintf(q->name, PD_NAME, "%s", n->servers.names[i]);
        place_address(q, p->sources[n->source].port);
    }
    pthread_mutex_unlock(&p->lock);
    free(note);
}

/* On the thread that resolves. Without memory the next second's answer will do. */
static void found(void *ctx, int32_t source, const hd_resolved *servers) {
    names_note *n = malloc(sizeof *n);
    if (!n) return;
    n->note.take = take_names;
    n->source = source;
    n->servers = *servers;
    pd_post(ctx, &n->note);
}

static void forget_gone(pd *p) {
    for (int32_t i = 0; i < PD_MAX_PEERS; i++) {
        pd_peer *q = peer_at(p, i);
        if (!q->gone || is_linked(q) || hd_leases_forget(p->leases, i) != HD_OK) continue;
        pthread_mutex_lock(&p->lock);
        *q = (pd_peer){.source = -1, .link.channel.fd = -1};
        pthread_mutex_unlock(&p->lock);
    }
}

hd_status pd_peers_open(pd *p, hd_err *err) {
    const char *list = p->o.role & PD_ROLE_DECODE ? p->o.peers : NULL;
    for (int32_t i = 0; i < 2 * PD_MAX_PEERS; i++) p->peers[i].link.channel.fd = -1;
    for (int32_t i = 0; i < PD_PENDING; i++) p->pending[i].link.channel.fd = -1;
    while (list && *list) {
        const size_t n = strcspn(list, ",");
        char *entry = strndup(list, n);
        if (!entry) return HD_FAIL(err, HD_ENOMEM, "no memory for --prefill-peers");
        const hd_status st = add_peer(p, entry, err);
        free(entry);
        HD_TRY(st);
        list += n + (list[n] == ',');
    }
    return HD_OK;
}

hd_status pd_peers_resolve(pd *p, hd_err *err) {
    const char *addresses[HD_NAMES_MAX];
    for (int32_t i = 0; i < p->n_sources; i++) addresses[i] = p->sources[i].address;
    return p->n_sources ? hd_names_start(&p->names, addresses, p->n_sources, found, p, err)
                        : HD_OK;
}

void pd_peers_close(pd *p) {
    for (int32_t i = 0; i < 2 * PD_MAX_PEERS; i++) pd_link_close(&p->peers[i].link);
    for (int32_t i = 0; i < PD_PENDING; i++) pd_link_close(&p->pending[i].link);
}

/* ---- up and down ---- */

static void set_state(pd *p, pd_peer *q, bool up, const char *why) {
    pthread_mutex_lock(&p->lock);
    const bool is_news = q->up != up || strcmp(q->why, why) != 0;
    q->up = up;
    snprintf(q->why, sizeof q->why, "%s", why);
    pthread_mutex_unlock(&p->lock);
    if (!is_news) return;
    if (up) {
        HD_LOG(HD_LOG_INFO, "peer_up", hd_log_text("peer", q->name));
    } else {
        HD_LOG(HD_LOG_WARN, "peer_down", hd_log_text("peer", q->name), hd_log_text("why", why));
    }
}

void pd_peer_lost(pd *p, int32_t peer, const char *why) {
    pd_peer *q = peer_at(p, peer);
    const bool was_up = q->up;
    const int32_t doublings = hd_min_i32(q->failures++, 5);
    const int64_t pause = was_up ? RETRY_NS : (int64_t)RETRY_NS << doublings;
    q->retry_ns = hd_now_ns() + (pause < REFUSED_NS ? pause : REFUSED_NS);
    q->connecting = false;
    pd_link_close(&q->link);
    set_state(p, q, false, why);
    if (was_up) {
        pd_raise(p, &(hd_lease_event){.kind = HD_LEASE_EV_LOST,
                                      .now_ns = (uint64_t)hd_now_ns(),
                                      .peer = peer});
    }
}

/* HD_EFORMAT: it is of a former life. */
static hd_status set_up(pd *p, int32_t peer, const pd_hello *hello) {
    pd_peer *q = peer_at(p, peer);
    const hd_lease_event e = {.kind = HD_LEASE_EV_HELLO,
                              .now_ns = (uint64_t)hd_now_ns(),
                              .peer = peer,
                              .epoch = hello->epoch};
    HD_TRY(pd_raise(p, &e));
    q->link.channel.limits = (hd_frame_limits){p->most_joined, PD_N_FRAMES};
    q->failures = 0;
    q->epoch = hello->epoch;
    set_state(p, q, true, "");
    return HD_OK;
}

/* ---- connecting ---- */

static hd_status draw(void *bytes, size_t n, hd_err *err) {
    if (getrandom(bytes, n, 0) == (ssize_t)n) return HD_OK;
    return HD_FAIL(err, HD_EIO, "no random bytes: %s", strerror(errno));
}

static void begin_link(pd *p, pd_link *l, int fd, bool is_server) {
    hd_channel_init(&l->channel, fd, is_server, p->key);
    l->channel.limits = (hd_frame_limits){p->most_new, PD_N_FRAMES};
    l->heard_ns = l->sent_ns = hd_now_ns();
    hd_address_no_delay(fd);
}

static hd_status start_connecting(pd *p, pd_peer *q, hd_err *err) {
    struct addrinfo *found;
    HD_TRY(hd_address_resolve(q->address, false, &found, err));
    const int fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    const bool ok = fd >= 0 && (connect(fd, found->ai_addr, found->ai_addrlen) == 0 ||
                                errno == EINPROGRESS);
    const int why = errno;
    freeaddrinfo(found);
    if (!ok) {
        if (fd >= 0) close(fd);
        return HD_FAIL(err, HD_EIO, "cannot connect to %s: %s", q->address, strerror(why));
    }
    begin_link(p, &q->link, fd, false);
    q->connecting = true;
    return HD_OK;
}

static bool is_sought(const pd_peer *q) {
    return is_taken(q) && !q->gone && !is_linked(q);
}

static void connect_where_due(pd *p, int64_t now) {
    for (int32_t i = 0; i < PD_MAX_PEERS && !p->ends; i++) {
        hd_err err = {0};
        pd_peer *q = peer_at(p, i);
        if (!is_sought(q) || now < q->retry_ns) continue;
        if (start_connecting(p, q, &err) != HD_OK) pd_peer_lost(p, i, err.msg);
    }
}

uint64_t pd_peers_due(pd *p) {
    uint64_t due = UINT64_MAX;
    for (int32_t i = 0; i < PD_MAX_PEERS && !p->ends; i++) {
        const pd_peer *q = peer_at(p, i);
        if (is_sought(q) && (uint64_t)q->retry_ns < due) due = (uint64_t)q->retry_ns;
    }
    return due;
}

static hd_status finish_connecting(pd_peer *q, hd_err *err) {
    int why = 0;
    socklen_t n = sizeof why;
    getsockopt(q->link.channel.fd, SOL_SOCKET, SO_ERROR, &why, &n);
    q->connecting = false;
    if (why == 0) return HD_OK;
    return HD_FAIL(err, HD_EIO, "cannot connect to %s: %s", q->address, strerror(why));
}

static hd_status say_hello(pd *p, pd_link *l, pd_frame_kind kind, hd_err *err) {
    uint8_t bytes[HD_CHANNEL_NONCE + sizeof p->hello];
    const size_t before = kind == PD_FRAME_JOIN ? HD_CHANNEL_NONCE : 0;
    if (before) HD_TRY(draw(l->channel.nonce[1], HD_CHANNEL_NONCE, err));
    memcpy(bytes, l->channel.nonce[1], before);
    memcpy(bytes + before, &p->hello, sizeof p->hello);
    if (pd_link_say(l, kind, bytes, before + sizeof p->hello, hd_now_ns()) == HD_OK) {
        return HD_OK;
    }
    return HD_FAIL(err, HD_ENOMEM, "no memory for a greeting");
}

static hd_status be_welcome(pd *p, int32_t peer, hd_err *err) {
    const hd_channel *c = &peer_at(p, peer)->link.channel;
    pd_hello hello;
    HD_TRY(pd_hello_read(&hello, c->payload, 0, c->head.n, err));
    const char *what = pd_facts_difference(&hello.facts, &p->hello.facts);
    if (what) return HD_FAIL(err, HD_EUNSUPPORTED, "it has another %s", what);
    if (set_up(p, peer, &hello) == HD_OK) return HD_OK;
    return HD_FAIL(err, HD_EFORMAT, "it is of a former life");
}

/* A frame of a server to fetch from that has not said welcome yet. */
static hd_status take_greeting(pd *p, int32_t peer, hd_err *err) {
    pd_peer *q = peer_at(p, peer);
    const hd_channel *c = &q->link.channel;
    if (c->head.kind == PD_FRAME_CHALLENGE) return say_hello(p, &q->link, PD_FRAME_JOIN, err);
    if (c->head.kind == PD_FRAME_WELCOME) return be_welcome(p, peer, err);
    if (c->head.kind == PD_FRAME_REFUSED) {
        q->failures = 5;
        return HD_FAIL(err, HD_EUNSUPPORTED, "it refuses: %s", (const char *)c->payload);
    }
    return HD_FAIL(err, HD_EFORMAT, "an unexpected frame of kind %u", c->head.kind);
}

/* ---- letting in ---- */

static void accept_one(pd *p, int64_t now) {
    uint8_t nonce[HD_CHANNEL_NONCE];
    const int fd = accept(p->listener, NULL, NULL);
    if (fd < 0) return;
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    pd_pending *w = &p->pending[p->n_accepted++ % PD_PENDING]; /* the oldest goes */
    pd_link_close(&w->link);
    w->since_ns = now;
    begin_link(p, &w->link, fd, true);
    const bool drawn = draw(nonce, sizeof nonce, NULL) == HD_OK;
    memcpy(w->link.channel.nonce[0], nonce, sizeof nonce);
    if (!drawn ||
        pd_link_say(&w->link, PD_FRAME_CHALLENGE, nonce, sizeof nonce, now) != HD_OK ||
        pd_link_flush(&w->link, NULL) != HD_OK) {
        pd_link_close(&w->link);
    }
}

/* Returns the place of a server that fetches here; -1: all are taken. */
static int32_t place_for(pd *p, const char *name) {
    int32_t free_place = -1;
    for (int32_t i = PD_MAX_PEERS; i < 2 * PD_MAX_PEERS; i++) {
        if (strcmp(p->peers[i].name, name) == 0) return i;
        if (free_place < 0 && !p->peers[i].name[0]) free_place = i;
    }
    for (int32_t i = PD_MAX_PEERS; i < 2 * PD_MAX_PEERS && free_place < 0; i++) {
        if (!is_linked(peer_at(p, i)) && hd_leases_forget(p->leases, i) == HD_OK)
            free_place = i;
    }
    return free_place;
}

/* Why a server may not fetch here; "": it may. */
static int32_t judge(pd *p, const pd_hello *hello, char why[PD_MAX_TEXT]) {
    const char *what = pd_facts_difference(&hello->facts, &p->hello.facts);
    const int32_t peer = place_for(p, hello->name);
    why[0] = '\0';
    if (what) {
        snprintf(why, PD_MAX_TEXT, "this server has another %s", what);
    } else if (peer < 0) {
        snprintf(why, PD_MAX_TEXT, "%d servers fetch here already", PD_MAX_PEERS);
    } else if (is_linked(peer_at(p, peer))) {
        snprintf(why, PD_MAX_TEXT, "a server with the same name is connected");
    }
    return peer;
}

static void send_away(pd_link *l, const char *why) {
    HD_LOG(HD_LOG_WARN, "peer_refused", hd_log_text("why", why));
    (void)pd_link_say(l, PD_FRAME_REFUSED, why, strlen(why), hd_now_ns());
    (void)pd_link_flush(l, NULL);
    pd_link_close(l);
}

/* A server that has connected says who it is. */
static hd_status let_in(pd *p, pd_link *l, hd_err *err) {
    char why[PD_MAX_TEXT];
    pd_hello hello;
    if (l->channel.head.kind != PD_FRAME_JOIN) return HD_FAIL(err, HD_EFORMAT, "no greeting");
    HD_TRY(pd_hello_read(&hello, l->channel.payload, HD_CHANNEL_NONCE, l->channel.head.n, err));
    const int32_t peer = judge(p, &hello, why);
    if (why[0]) {
        send_away(l, why);
        return HD_OK;
    }
    pd_peer *q = peer_at(p, peer);
    snprintf(q->name, sizeof q->name, "%s", hello.name);
    q->link.channel = l->channel;
    q->link.heard_ns = q->link.sent_ns = hd_now_ns();
    *l = (pd_link){.channel.fd = -1};
    HD_TRY(say_hello(p, &q->link, PD_FRAME_WELCOME, err));
    if (set_up(p, peer, &hello) != HD_OK) pd_peer_lost(p, peer, "it is of a former life");
    return HD_OK;
}

static void tend_pending(pd *p, pd_pending *w, short events, int64_t now) {
    if (w->link.channel.fd < 0) return;
    if (events) {
        const hd_status st = pd_link_read(&w->link, now, NULL);
        if (st == HD_OK ? let_in(p, &w->link, NULL) != HD_OK : st != HD_EAGAIN) {
            pd_link_close(&w->link);
            return;
        }
    }
    if (now > w->since_ns + GREETING_NS * 5LL) pd_link_close(&w->link);
}

/* ---- frames ---- */

static hd_status take_message(pd *p, int32_t peer, hd_err *err) {
    pd_link *l = &peer_at(p, peer)->link;
    const pd_frame_kind kind = (pd_frame_kind)l->channel.head.kind;
    const uint32_t n = l->channel.head.n;
    const bool fetches = peer >= PD_MAX_PEERS;
    hd_lease_message m;
    HD_TRY(pd_lease_read(&m, kind, l->channel.payload, n, err));
    if (kind == PD_FRAME_LEASE) {
        pd_raise_message(p, peer, &m, 0);
    } else if (kind == PD_FRAME_RESERVE && fetches) {
        return pd_take_reserve(p, peer, &m, l->channel.payload, n, err);
    } else if (kind == PD_FRAME_PAGE && !fetches) {
        l->channel.payload = pd_take_page(p, peer, &m, l->channel.payload, n);
    } else {
        return HD_FAIL(err, HD_EFORMAT, "a frame of kind %d from the wrong side", kind);
    }
    return HD_OK;
}

static hd_status take_frame(pd *p, int32_t peer, hd_err *err) {
    const pd_peer *q = peer_at(p, peer);
    const uint16_t kind = q->link.channel.head.kind;
    if (!q->up) return take_greeting(p, peer, err);
    if (kind == PD_FRAME_PING) return HD_OK;
    if (kind > PD_FRAME_PING) return take_message(p, peer, err);
    return HD_FAIL(err, HD_EFORMAT, "an unexpected frame of kind %u", kind);
}

/* Reads frames until none is there, or too many pages wait for the step threads. */
static hd_status read_frames(pd *p, int32_t peer, int64_t now, hd_err *err) {
    pd_peer *q = peer_at(p, peer);
    while (is_linked(q) && p->placing < MAX_PLACING) {
        const hd_status st = pd_link_read(&q->link, now, err);
        if (st == HD_EAGAIN) return HD_OK;
        HD_TRY(st);
        HD_TRY(take_frame(p, peer, err));
    }
    return HD_OK;
}

static hd_status tend_peer(pd *p, int32_t peer, short events, int64_t now, hd_err *err) {
    pd_peer *q = peer_at(p, peer);
    if (q->connecting) {
        if (events) HD_TRY(finish_connecting(q, err));
    } else if (events & (POLLIN | POLLHUP | POLLERR)) {
        HD_TRY(read_frames(p, peer, now, err));
    }
    if (!is_linked(q)) return HD_OK;
    if (q->broken) return HD_FAIL(err, HD_ENOMEM, "no memory for a message");
    if (p->placing < MAX_PLACING && now > q->link.heard_ns + SILENCE_NS) {
        return HD_FAIL(err, HD_EPEER, "it was silent for %d s", (int)(SILENCE_NS / 1000000000));
    }
    if (q->up && !q->link.queued && now > q->link.sent_ns + PING_NS) {
        (void)pd_link_say(&q->link, PD_FRAME_PING, NULL, 0, now);
    }
    return q->connecting ? HD_OK : pd_link_flush(&q->link, err);
}

static short events_for(const pd *p, const pd_peer *q) {
    if (q->connecting) return POLLOUT;
    return (short)((p->placing < MAX_PLACING ? POLLIN : 0) | (q->link.queued ? POLLOUT : 0));
}

int32_t pd_peers_poll(pd *p, struct pollfd *to) {
    int32_t n = 0;
    for (int32_t i = 0; i < 2 * PD_MAX_PEERS; i++) {
        const pd_peer *q = peer_at(p, i);
        to[n++] = (struct pollfd){.fd = q->link.channel.fd, .events = events_for(p, q)};
    }
    for (int32_t i = 0; i < PD_PENDING; i++) {
        to[n++] = (struct pollfd){.fd = p->pending[i].link.channel.fd, .events = POLLIN};
    }
    to[n++] = (struct pollfd){.fd = p->ends ? -1 : p->listener, .events = POLLIN};
    return n;
}

void pd_peers_tend(pd *p, const struct pollfd *polled) {
    const int64_t now = hd_now_ns();
    for (int32_t i = 0; i < 2 * PD_MAX_PEERS; i++) {
        hd_err err = {0};
        if (!is_linked(peer_at(p, i))) continue;
        if (tend_peer(p, i, polled[i].revents, now, &err) == HD_OK) continue;
        peer_at(p, i)->broken = false;
        pd_peer_lost(p, i, err.msg);
    }
    for (int32_t i = 0; i < PD_PENDING; i++) {
        tend_pending(p, &p->pending[i], polled[2 * PD_MAX_PEERS + i].revents, now);
    }
    if (polled[2 * PD_MAX_PEERS + PD_PENDING].revents) accept_one(p, now);
    forget_gone(p);
    connect_where_due(p, now);
}

/* ---- sending ---- */

void pd_peer_put(pd *p, int32_t peer, pd_frame_kind kind, pd_out *o) {
    pd_peer *q = peer_at(p, peer);
    if (o && q->up) {
        pd_link_put(&q->link, kind, o, hd_now_ns());
    } else {
        q->broken = q->broken || (!o && q->up);
        free(o);
    }
}

void pd_peer_say(pd *p, int32_t peer, const hd_lease_message *m) {
    pd_out *o = pd_out_new(sizeof *m);
    if (o) memcpy(pd_out_payload(o), m, sizeof *m);
    pd_peer_put(p, peer, PD_FRAME_LEASE, o);
}
