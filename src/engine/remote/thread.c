/* thread.c - ranks in processes that fetch experts (dwdp) need no step in common, and so no round:
 * a thread of each leader exchanges orders, mail and reports, while its step thread computes.
 *
 * Rank 0's thread begins an exchange when there is an order or mail, and every millisecond while another group has
 * something to do. The others wait for it, and say what they have. If that fails, the step thread begins anew,
 * between two steps. */
#include "engine/remote/remote_internal.h"

#include <time.h>

#include "base/progress.h"

enum { PAUSE_NS = 1000000 }; /* between exchanges that may have nothing to bring */

/* ---- the thread ---- */

static bool has_mail(const engine_mail *m) {
    return m->n_submitted || m->n_cancelled || m->jobs || m->flush || m->retract;
}

/* Whether others wait for mail, and whether they may have something to tell. */
static bool have_mail(const hd_engine *e) {
    bool some = false;
    for (int32_t g = 1; g < e->n_present; g++) some = some || has_mail(&e->groups[g].mail);
    return some;
}

static bool are_busy(const hd_engine *e) {
    bool busy = false;
    for (int32_t g = 1; g < e->n_present; g++) {
        const engine_group *group = &e->groups[g];
        busy = busy || !group->idle || group->rounds != e->order.number;
    }
    return busy;
}

/* Waits for a reason to exchange, or to end (engine_remote_look), and returns the order. */
static engine_order next_order(hd_engine *e, uint64_t sent, int64_t last_ns) {
    const int64_t at = last_ns + PAUSE_NS;
    const struct timespec until = {at / 1000000000, at % 1000000000};
    pthread_mutex_lock(&e->lock);
    while (e->order.number == sent && !have_mail(e) && !e->remote->failed) {
        if (!are_busy(e)) {
            pthread_cond_wait(&e->ordered, &e->lock);
        } else if (hd_now_ns() >= at ||
                   pthread_cond_timedwait(&e->ordered, &e->lock, &until) != 0) {
            break;
        }
    }
    const engine_order order = e->order;
    pthread_mutex_unlock(&e->lock);
    return order;
}

static hd_status exchange_first(engine_rank *rank, hd_err *err) {
    uint64_t sent = 0;
    for (int64_t last_ns = 0;;) {
        const engine_order order = next_order(rank->engine, sent, last_ns);
        remote_word own;
        HD_TRY(remote_send_order(rank, &order, err));
        if (order.closing) return HD_OK;
        HD_TRY(remote_close_report(rank, false, 0, order.number, &own, err));
        HD_TRY(remote_exchange(rank, &own, err));
        sent = order.number;
        last_ns = hd_now_ns();
    }
}

static void obey(engine_rank *rank, const engine_order *order) {
    hd_engine *e = rank->engine;
    pthread_mutex_lock(&e->lock);
    e->order = *order;
    pthread_cond_broadcast(&e->ordered);
    pthread_mutex_unlock(&e->lock);
}

/* State and outputs of one moment. */
static hd_status close_report(engine_rank *rank, remote_word *out, hd_err *err) {
    hd_engine *e = rank->engine;
    pthread_mutex_lock(&e->lock);
    const engine_group *g = &e->groups[rank->group];
    const hd_status st = remote_close_report(rank, g->idle && !has_mail(&g->mail), g->look_ns,
                                             g->rounds, out, err);
    pthread_mutex_unlock(&e->lock);
    return st;
}

static hd_status exchange_other(engine_rank *rank, hd_err *err) {
    for (;;) {
        engine_order order;
        remote_word own;
        HD_TRY(remote_await_order(rank, &order, err));
        obey(rank, &order);
        if (order.closing) return HD_OK;
        HD_TRY(close_report(rank, &own, err));
        HD_TRY(remote_exchange(rank, &own, err));
    }
}

static void *work(void *arg) {
    engine_rank *rank = arg;
    hd_engine *e = rank->engine;
    hd_err err = {0};
    const hd_status st = rank->group ? exchange_other(rank, &err) : exchange_first(rank, &err);
    if (st == HD_OK) return NULL;
    pthread_mutex_lock(&e->lock);
    e->remote->failure = err;
    e->remote->failed = true;
    engine_tell(e);
    pthread_mutex_unlock(&e->lock);
    return NULL;
}

/* ---- the step thread ---- */

static hd_status open_stream(engine_remote *m, hd_err *err) {
    if (m->stream) return HD_OK;
    HD_TRY(hd_device_open_cpu(&m->device, &(hd_cpu_options){.n_threads = 1}, err));
    return hd_stream_open(&m->stream, m->device, err);
}

/* A thread that does not start is a communication that has ended. */
void engine_remote_start(engine_rank *rank) {
    hd_engine *e = rank->engine;
    engine_remote *m = e->remote;
    if (!engine_remote_is_beside(e) || !rank->comm) return;
    m->failure = (hd_err){0};
    m->failed = open_stream(m, &m->failure) != HD_OK;
    if (m->failed) return;
    m->started = pthread_create(&m->thread, NULL, work, rank) == 0;
    if (m->started) return; /* the thread may have failed already */
    m->failed = true;
    HD_FAIL(&m->failure, HD_EIO, "no thread for the mail of other processes");
}

void engine_remote_stop(engine_rank *rank) {
    engine_remote *m = rank->engine->remote;
    if (!m || !m->started) return;
    pthread_join(m->thread, NULL);
    m->started = false;
}

bool engine_remote_has_failed(const hd_engine *e) {
    return engine_remote_is_beside(e) && e->remote->failed;
}

void engine_remote_look(engine_rank *rank) {
    hd_engine *e = rank->engine;
    engine_remote *m = e->remote;
    pthread_mutex_lock(&e->lock);
    if (rank->comm && hd_comm_ended(rank->comm)) m->failed = true;
    const bool failed = m->failed;
    hd_err err = m->failure;
    if (failed) pthread_cond_broadcast(&e->ordered); /* rank 0's thread may wait */
    pthread_mutex_unlock(&e->lock);
    if (!failed) return;
    if (err.status == HD_OK) HD_FAIL(&err, HD_EPEER, "communication has ended");
    if (rank->comm) hd_comm_abort(rank->comm, err.msg);
    engine_remote_stop(rank);
    m->failed = false;
    if (remote_recover(rank, &err)) engine_remote_start(rank);
}

void remote_thread_close(engine_remote *m) {
    hd_stream_close(m->stream);
    hd_device_close(m->device);
}
