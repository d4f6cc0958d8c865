/* watch.c - a thread per rank that sends heartbeats, awaits those of the others, ends epochs and
 * begins them. All frames after the rendezvous are sent and read by this thread alone. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "comm/figures_internal.h"
#include "comm/rendezvous_internal.h"

enum {
    BEATS = 5, /* heartbeats within the limit of silence */
    MAX_BEAT_MS = 500,
    READY_MS = 10000 /* a member that has not come to the next epoch by then hangs */
};

static const char ENDED[] = "its process has ended";

static bool is_link(const hd_rendezvous *m, int32_t i) {
    return m->to[i].fd >= 0;
}

static bool is_member(const hd_rendezvous *m, int32_t i) {
    return m->table.at[i].data != NULL;
}

static void send_all(hd_rendezvous *m, hd_frame_kind kind, const void *bytes, uint32_t n) {
    for (int32_t i = 0; i < m->o.world; i++) {
        if (is_link(m, i)) hd_channel_send(&m->to[i], kind, m->o.rank, bytes, n, 0, NULL);
    }
}

/* Says the last word to all. A connection is closed when the other end has said its own: closed
 * before, what it has not read yet could be lost with it. */
static void leave(hd_rendezvous *m) {
    m->ended = true;
    send_all(m, HD_FRAME_LEAVE, NULL, 0);
    for (int32_t i = 0; i < m->o.world; i++) {
        if (is_link(m, i)) shutdown(m->to[i].fd, SHUT_WR);
    }
    pthread_mutex_lock(&m->mutex);
    atomic_store(&m->done, true);
    pthread_cond_broadcast(&m->news);
    pthread_mutex_unlock(&m->mutex);
}

/* The epoch has ended: tells this rank, and the others. */
static void end_epoch(hd_rendezvous *m, const char *why) {
    uint8_t says[4 + HD_CHANNEL_MAX_TEXT];
    const size_t n = strnlen(why, HD_CHANNEL_MAX_TEXT - 1);
    if (m->ended || m->over) return;
    m->over = true;
    m->over_ms = rendezvous_now_ms();
    m->lost(m->ctx, m->table.epoch, why);
    memcpy(says, &m->table.epoch, 4);
    memcpy(says + 4, why, n);
    send_all(m, HD_FRAME_LOST, says, (uint32_t)n + 4);
}

/* Without rank 0 there is no next epoch. */
static void give_up(hd_rendezvous *m, const char *why) {
    m->ended = true;
    m->lost(m->ctx, m->table.epoch, why);
    pthread_mutex_lock(&m->mutex);
    m->gone = true;
    atomic_store(&m->done, true);
    pthread_cond_broadcast(&m->news);
    pthread_mutex_unlock(&m->mutex);
}

/* Reads to the end what another rank still sends. */
static void drain(hd_rendezvous *m, int32_t rank) {
    char bytes[4096];
    ssize_t n;
    do n = recv(m->to[rank].fd, bytes, sizeof bytes, MSG_DONTWAIT);
    while (n > 0 || (n < 0 && errno == EINTR));
    if (n == 0 || errno != EAGAIN) hd_channel_close(&m->to[rank]);
}

static void lose(hd_rendezvous *m, int32_t rank, const char *how) {
    char why[HD_RENDEZVOUS_TEXT];
    snprintf(why, sizeof why, "rank %d is lost: %.160s", rank, how);
    pthread_mutex_lock(&m->mutex);
    memcpy(m->losses[rank], why, sizeof why);
    m->n_losses++;
    pthread_mutex_unlock(&m->mutex);
    hd_channel_close(&m->to[rank]);
    rendezvous_forget(&m->offer[rank]);
    if (m->o.rank) {
        give_up(m, why);
    } else if (is_member(m, rank)) {
        end_epoch(m, why);
    }
}

/* ---- leaving ---- */

/* A rank that computes nothing need not say that it leaves: one that waits or loads. */
static bool may_leave(const hd_rendezvous *m, int32_t i) {
    return m->over || !is_link(m, i) || !is_member(m, i) || m->offer[i].data || m->left[i];
}

/* Rank 0 knows when all have left, and says so; the others take its word. */
static void look_who_left(hd_rendezvous *m) {
    if (m->ended || !atomic_load(&m->leaves)) return;
    if (!m->told && m->o.rank) send_all(m, HD_FRAME_LEAVE, NULL, 0);
    m->told = true;
    if (m->o.rank) return;
    for (int32_t i = 1; i < m->o.world; i++) {
        if (!may_leave(m, i)) return;
    }
    leave(m);
}

/* ---- epochs ---- */

static void take_table(hd_rendezvous *m, rendezvous_table *t) {
    pthread_mutex_lock(&m->mutex);
    rendezvous_table_deinit(&m->table);
    m->table = *t;
    m->over = false;
    memset(m->left, 0, sizeof m->left);
    pthread_cond_broadcast(&m->news);
    pthread_mutex_unlock(&m->mutex);
}

/* Rank 0: every member that is still connected must have offered its address, and so ended what it
 * did in the last epoch. A rank that loads is not waited for. */
static bool all_are_ready(hd_rendezvous *m) {
    const bool late = rendezvous_now_ms() - m->over_ms > READY_MS;
    for (int32_t i = 0; i < m->o.world; i++) {
        if (m->offer[i].data || !is_member(m, i) || (i && !is_link(m, i))) continue;
        if (i && late) lose(m, i, "it did not end its step when the others did");
        return false;
    }
    return m->offer[0].data != NULL;
}

static void look_for_epoch(hd_rendezvous *m) {
    rendezvous_table next;
    if (m->o.rank || m->ended || !m->over || !all_are_ready(m)) return;
    if (rendezvous_send_table(m, &next, NULL) == HD_OK) take_table(m, &next);
}

/* The step thread has an address for the next epoch. */
static void look_for_offer(hd_rendezvous *m) {
    pthread_mutex_lock(&m->mutex);
    rendezvous_address own = m->own;
    m->own = (rendezvous_address){0};
    pthread_mutex_unlock(&m->mutex);
    if (!own.data) return;
    if (m->o.rank == 0) {
        rendezvous_forget(&m->offer[0]);
        m->offer[0] = own;
        m->over_ms = rendezvous_now_ms();
        return;
    }
    if (!m->ended) {
        hd_channel_send(&m->to[0], HD_FRAME_READY, m->o.rank, own.data, own.n, m->o.silence_ms,
                        NULL);
    }
    rendezvous_forget(&own);
}

/* ---- heartbeats ---- */

static void beat(hd_rendezvous *m) {
    hd_rank_figures says;
    const bool tells = m->o.rank > 0 && m->o.figures;
    if (m->ended) return;
    if (tells) comm_read_figures(m->o.figures, &says);
    send_all(m, HD_FRAME_PING, tells ? &says : NULL, tells ? sizeof says : 0);
}

static bool can_be(const hd_rank_figures *f) {
    int64_t n[COMM_FIGURES];
    memcpy(n, f, sizeof n);
    for (int i = 0; i < COMM_FIGURES; i++) {
        if (n[i] < 0) return false;
    }
    return true;
}

static void take_beat(hd_rendezvous *m, int32_t rank) {
    const hd_channel *c = &m->to[rank];
    hd_rank_figures says;
    if (c->head.n == 0) return;
    if (c->head.n == sizeof says) memcpy(&says, c->payload, sizeof says);
    if (m->o.rank || c->head.n != sizeof says || !can_be(&says)) {
        lose(m, rank, "it sent figures that cannot be right");
        return;
    }
    pthread_mutex_lock(&m->mutex);
    m->figures[rank] = says;
    pthread_mutex_unlock(&m->mutex);
}

void hd_rendezvous_read_figures(hd_rendezvous *m, int32_t rank, hd_rank_figures *out) {
    pthread_mutex_lock(&m->mutex);
    *out = m->figures[rank];
    pthread_mutex_unlock(&m->mutex);
}

void hd_rendezvous_read_loss(hd_rendezvous *m, int32_t rank, char *why) {
    pthread_mutex_lock(&m->mutex);
    memcpy(why, m->losses[rank], HD_RENDEZVOUS_TEXT);
    pthread_mutex_unlock(&m->mutex);
}

uint64_t hd_rendezvous_count_losses(hd_rendezvous *m) {
    pthread_mutex_lock(&m->mutex);
    const uint64_t n = m->n_losses;
    pthread_mutex_unlock(&m->mutex);
    return n;
}

/* ---- what other ranks send ---- */

/* A rank that works already waits for a place: the epoch goes on. */
static void take_offer(hd_rendezvous *m, int32_t rank) {
    const hd_channel *c = &m->to[rank];
    if (m->o.rank || !c->head.n ||
        rendezvous_keep(&m->offer[rank], c->payload, c->head.n, NULL) != HD_OK) {
        lose(m, rank, "it sent an address that cannot be one");
        return;
    }
    if (is_member(m, rank)) return;
    char why[HD_CHANNEL_MAX_TEXT];
    snprintf(why, sizeof why, "rank %d has come", rank);
    end_epoch(m, why);
}

static void take_lost(hd_rendezvous *m, int32_t rank) {
    const hd_channel *c = &m->to[rank];
    uint32_t epoch = 0;
    if (c->head.n < sizeof epoch) return;
    memcpy(&epoch, c->payload, sizeof epoch);
    if (epoch == m->table.epoch) end_epoch(m, (const char *)c->payload + sizeof epoch);
}

static void take_next_table(hd_rendezvous *m, int32_t rank) {
    const hd_channel *c = &m->to[rank];
    rendezvous_table next;
    hd_err err = {0};
    if (m->o.rank && m->over &&
        rendezvous_read_table(m, &next, c->payload, c->head.n, &err) == HD_OK) {
        take_table(m, &next);
        return;
    }
    if (m->o.rank && m->over) rendezvous_table_deinit(&next);
    lose(m, rank, err.msg[0] ? err.msg : "it sent addresses that nobody waits for");
}

static void take_frame(hd_rendezvous *m, int32_t rank) {
    switch ((hd_frame_kind)m->to[rank].head.kind) {
    case HD_FRAME_PING:
        take_beat(m, rank);
        return;
    case HD_FRAME_LOST:
        take_lost(m, rank);
        return;
    case HD_FRAME_READY:
        take_offer(m, rank);
        return;
    case HD_FRAME_TABLE:
        take_next_table(m, rank);
        return;
    case HD_FRAME_LEAVE:
        m->left[rank] = true;
        if (m->o.rank) leave(m);
        return;
    default:
        return;
    }
}

void rendezvous_take_frames(hd_rendezvous *m, int32_t rank) {
    hd_channel *c = &m->to[rank];
    while (is_link(m, rank) && !m->ended) {
        hd_err err = {0};
        const hd_status st = hd_channel_read(c, &err);
        if (st == HD_EAGAIN) return;
        if (st == HD_EIO) {
            lose(m, rank, ENDED);
        } else if (st != HD_OK || c->head.rank != rank) {
            lose(m, rank, st == HD_OK ? "it speaks for another rank" : err.msg);
        } else {
            m->silent_ms[rank] = 0;
            take_frame(m, rank);
        }
    }
}

static void look_for_silence(hd_rendezvous *m, int64_t passed_ms) {
    for (int32_t i = 0; i < m->o.world; i++) {
        if (!is_link(m, i) || m->ended) continue;
        const hd_place *of = m->o.rank ? &m->table.first : &m->places[i];
        m->silent_ms[i] += passed_ms;
        const int32_t limit_ms =
            hd_silence_exceeds(m->silent_ms[i], m->o.silence_ms, of, &m->here);
        if (!limit_ms) continue;
        char how[80];
        snprintf(how, sizeof how, "it was silent for %d ms", limit_ms);
        const bool ended = of->host && of->host == m->here.host && hd_place_has_ended(of);
        lose(m, i, ended ? ENDED : how); /* its link may say so a moment later */
    }
}

/* ---- the thread ---- */

static void look_for_abort(hd_rendezvous *m) {
    char why[HD_CHANNEL_MAX_TEXT];
    if (!atomic_load(&m->aborts)) return;
    pthread_mutex_lock(&m->mutex);
    atomic_store(&m->aborts, false);
    memcpy(why, m->why, sizeof why);
    const bool now = m->abort_epoch == m->table.epoch;
    pthread_mutex_unlock(&m->mutex);
    if (now) end_epoch(m, why);
}

void rendezvous_look(hd_rendezvous *m) {
    look_for_abort(m);
    look_for_offer(m);
    look_who_left(m);
    look_for_epoch(m);
}

static bool has_links(const hd_rendezvous *m) {
    for (int32_t i = 0; i < m->o.world; i++) {
        if (is_link(m, i)) return true;
    }
    return false;
}

void rendezvous_welcome(hd_rendezvous *m, uint64_t came) {
    for (int32_t i = 1; i < m->o.world; i++) {
        if (!(came >> i & 1)) continue;
        rendezvous_forget(&m->offer[i]);
        hd_channel_send(&m->to[i], HD_FRAME_WELCOME, 0, &m->here, sizeof m->here, 0, NULL);
    }
}

/* Waits for frames, for this rank's own wishes and, until next_ms, for the next heartbeat. */
static void wait_and_take(hd_rendezvous *m, int64_t next_ms) {
    enum { DOOR = HD_CHANNEL_MAX_RANKS + 1 };
    struct pollfd p[DOOR + RENDEZVOUS_DOOR_FDS];
    char bytes[64];
    const int64_t left = next_ms - rendezvous_now_ms();
    p[0] = (struct pollfd){.fd = m->wake[0], .events = POLLIN};
    for (int32_t i = 0; i < HD_CHANNEL_MAX_RANKS; i++) {
        p[i + 1] = (struct pollfd){.fd = m->to[i].fd, .events = POLLIN};
    }
    rendezvous_door_fds(&m->door, p + DOOR);
    poll(p, DOOR + RENDEZVOUS_DOOR_FDS, left > 0 ? (int)left : 0);
    while (p[0].revents && read(m->wake[0], bytes, sizeof bytes) > 0) {
    }
    for (int32_t i = 0; i < m->o.world; i++) {
        if (!p[i + 1].revents || !is_link(m, i)) continue;
        if (m->ended)
            drain(m, i);
        else
            rendezvous_take_frames(m, i);
    }
    if (!m->ended) rendezvous_welcome(m, rendezvous_door_serve(m, p + DOOR));
}

/* Ends when asked to, and when all have said their last word or one does not within the limit. */
static void *watch(void *arg) {
    hd_rendezvous *m = arg;
    const int32_t own = m->o.silence_ms / BEATS + 1;
    const int32_t beat_ms = own < MAX_BEAT_MS ? own : MAX_BEAT_MS;
    int64_t next_ms = 0, closed_ms = 0, looked_ms = rendezvous_now_ms();
    for (;;) {
        const int64_t now_ms = rendezvous_now_ms();
        if (now_ms >= next_ms) {
            next_ms = now_ms + beat_ms;
            beat(m);
        }
        wait_and_take(m, next_ms);
        const int64_t passed_ms = rendezvous_now_ms() - looked_ms;
        looked_ms += passed_ms;
        look_for_silence(m, hd_silence_passed(passed_ms, beat_ms));
        rendezvous_look(m);
        if (!atomic_load(&m->closes)) continue;
        if (!closed_ms) {
            closed_ms = now_ms;
            end_epoch(m, "a rank ended early");
            m->ended = true;
            for (int32_t i = 0; i < m->o.world; i++) {
                if (is_link(m, i)) shutdown(m->to[i].fd, SHUT_WR);
            }
        }
        if (!has_links(m) || now_ms - closed_ms > m->o.silence_ms) return NULL;
    }
}

hd_status hd_rendezvous_watch(hd_rendezvous *m, hd_rendezvous_lost_fn *lost, void *ctx,
                              hd_err *err) {
    sigset_t all, before;
    m->lost = lost;
    m->ctx = ctx;
    if (pipe(m->wake)) return HD_FAIL(err, HD_EIO, "no pipe: %s", strerror(errno));
    for (int i = 0; i < 2; i++) {
        fcntl(m->wake[i], F_SETFD, FD_CLOEXEC);
        fcntl(m->wake[i], F_SETFL, O_NONBLOCK);
    }
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the other threads */
    const int rc = pthread_create(&m->thread, NULL, watch, m);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (rc) return HD_FAIL(err, HD_EIO, "no thread: %s", strerror(rc));
    m->watches = true;
    return HD_OK;
}

static void wake(const hd_rendezvous *m) {
    if (write(m->wake[1], "", 1) < 0 && errno != EAGAIN) return; /* full: it wakes anyway */
}

void hd_rendezvous_abort(hd_rendezvous *m, const char *why) {
    pthread_mutex_lock(&m->mutex);
    if (!atomic_load(&m->aborts)) {
        snprintf(m->why, sizeof m->why, "%s", why);
        m->abort_epoch = m->table.epoch;
        atomic_store(&m->aborts, true);
    }
    pthread_mutex_unlock(&m->mutex);
    wake(m);
}

bool rendezvous_offer(hd_rendezvous *m, const void *address, uint32_t n) {
    const bool kept = rendezvous_keep(&m->own, address, n, NULL) == HD_OK;
    wake(m);
    return kept;
}

bool rendezvous_has_news(const hd_rendezvous *m, uint32_t before, hd_rendezvous_news *news) {
    const bool next = m->table.epoch != before;
    *news = next ? HD_RENDEZVOUS_EPOCH : m->gone ? HD_RENDEZVOUS_GONE : HD_RENDEZVOUS_LEFT;
    return next || m->gone || atomic_load(&m->done);
}

hd_rendezvous_news hd_rendezvous_next(hd_rendezvous *m, const void *address, uint32_t n) {
    hd_rendezvous_news news;
    pthread_mutex_lock(&m->mutex);
    const uint32_t before = m->table.epoch;
    const bool kept = rendezvous_offer(m, address, n);
    while (!rendezvous_has_news(m, before, &news) && kept)
        pthread_cond_wait(&m->news, &m->mutex);
    if (!kept && news == HD_RENDEZVOUS_LEFT) news = HD_RENDEZVOUS_GONE;
    pthread_mutex_unlock(&m->mutex);
    return news;
}

void hd_rendezvous_leave(hd_rendezvous *m) {
    atomic_store(&m->leaves, true);
    wake(m);
}

bool hd_rendezvous_done(const hd_rendezvous *m) {
    return atomic_load(&m->done);
}

void rendezvous_stop_watch(hd_rendezvous *m) {
    if (m->watches) {
        atomic_store(&m->closes, true);
        wake(m);
        pthread_join(m->thread, NULL);
    }
    if (m->wake[0] >= 0) close(m->wake[0]);
    if (m->wake[1] >= 0) close(m->wake[1]);
}
