/* rounds.c - rounds keep the attention groups in step. A round takes mail and runs one step of
 * every group's scheduler, also of one that has nothing to do: its ranks have experts that the
 * others need. The first group's step thread, of rank 0, begins each round and tells the others
 * whether the engine is paused or closing. Passes within a step are agreed by the runners
 * (runner/commands.c). Independent groups (dwdp) obey the orders, and run as many rounds of their own
 * between two of them as they have work for; in other processes a thread hands them over
 * (remote/thread.c).
 *
 * A step that fails parks its thread. When all threads are parked or have ended the round, that
 * of rank 0 restarts communication, and every group begins anew. */
#include "engine/new_weights.h"
#include "engine/remote/remote.h"

#include <time.h>

#include "base/progress.h"

enum { PAUSED_LOOK_NS = 50000000 }; /* how often a paused engine checks for queue timeouts */

static int64_t sooner(int64_t a, int64_t b) {
    return a && (a < b || !b) ? a : b;
}

static bool all_are(const hd_engine *e, bool (*is)(const hd_engine *e, const engine_group *g)) {
    for (int32_t i = 0; i < e->n_present; i++) {
        if (!is(e, &e->groups[i])) return false;
    }
    return true;
}

static bool has_ended_round(const hd_engine *e, const engine_group *g) {
    return g->rounds == e->order.number;
}

static bool is_idle(const hd_engine *e, const engine_group *g) {
    return g->idle && has_ended_round(e, g);
}

static bool is_at_rest(const hd_engine *e, const engine_group *g) {
    return g == &e->groups[0] || g->parked || has_ended_round(e, g);
}

static bool any_is_parked(const hd_engine *e) {
    bool parked = false;
    for (int32_t i = 0; i < e->n_present; i++) parked |= e->groups[i].parked;
    return parked;
}

/* No step may run: by a pause, or without memory or weights that were given back. */
static bool rests(const hd_engine *e) {
    return e->paused || e->groups[0].stats.hindrance;
}

/* Returns the time until which to sleep without mail; 0: no limit. A pause with requests
 * needs checks for timeouts; groups say when they want a round although they are idle. */
static int64_t sleep_until(const hd_engine *e, bool idle) {
    int64_t at = rests(e) && !idle ? hd_now_ns() + PAUSED_LOOK_NS : 0;
    for (int32_t i = 0; i < e->n_present; i++) at = sooner(e->groups[i].look_ns, at);
    return at;
}

/* Waits while the first group has nothing to do and there is no mail, until another group has
 * ended the round with something to do. */
static void wait_for_work(hd_engine *e) {
    while (!e->closing && !e->news && !any_is_parked(e)) {
        const bool idle = all_are(e, is_idle), ended = all_are(e, has_ended_round);
        const bool others = !e->independent && ended && !idle;
        if (!rests(e) && (!e->groups[0].idle || others)) return;
        const int64_t ns = ended ? sleep_until(e, idle) : 0;
        const struct timespec until = {ns / 1000000000, ns % 1000000000};
        if (!ns) {
            pthread_cond_wait(&e->wake, &e->lock);
        } else if (pthread_cond_timedwait(&e->wake, &e->lock, &until) != 0) {
            return;
        }
    }
}

static void recover_parked(engine_rank *rank) {
    hd_engine *e = rank->engine;
    while (any_is_parked(e)) {
        const hd_err why = {.status = HD_EPEER, .msg = "another rank failed"};
        pthread_mutex_unlock(&e->lock);
        engine_ranks_recover(rank, &why);
        pthread_mutex_lock(&e->lock);
    }
}

/* Behind a round of rest: once every group has ended it, nobody reads weights until the next order.
 * Returns whether they are others then. */
static bool update(engine_rank *rank) {
    hd_engine *e = rank->engine;
    const bool weights = e->update.weights;
    while (!e->closing && !all_are(e, has_ended_round)) {
        pthread_cond_wait(&e->wake, &e->lock);
        recover_parked(rank);
    }
    if (e->closing) return false;
    pthread_mutex_unlock(&e->lock);
    engine_update_apply(rank);
    pthread_mutex_lock(&e->lock);
    return weights;
}

/* Rank 0 begins a round. */
static void give_order(engine_rank *rank) {
    hd_engine *e = rank->engine;
    const bool rested = e->order.rest;
    wait_for_work(e);
    recover_parked(rank);
    e->news = false;
    const bool renewed = rested && update(rank), rest = e->update.posted && !rested;
    if (rest) {
        e->update.begun_ns = hd_now_ns();
        e->news = true; /* the update comes behind this round */
    }
    const bool paused = rests(e) || rest;
    e->order = (engine_order){.number = e->order.number + 1,
                              .pauses = e->pauses,
                              .weights = e->weights_mark,
                              .paused = paused,
                              .moves = !paused && !e->closing && engine_rebalance_wants(rank),
                              .closing = e->closing,
                              .rest = rest,
                              .retract = rest && e->update.retract,
                              .renewed = renewed};
    engine_recording_order(rank, &e->order);
    if (e->n_groups > 1) pthread_cond_broadcast(&e->ordered);
}

/* Whether an independent group runs a round without a new order. */
static bool has_work(const hd_engine *e, const engine_rank *rank) {
    const engine_group *group = &e->groups[rank->group];
    const bool mail = group->mail.n_submitted || group->mail.n_cancelled;
    return e->independent && !e->order.paused && (mail || !group->idle);
}

/* Another group waits for it. Without rank 0's thread there is none when the engine closes. */
static void take_order(engine_rank *rank) {
    hd_engine *e = rank->engine;
    while (e->order.number == rank->order.number && !has_work(e, rank)) {
        if (engine_remote_has_failed(e)) return;
        if (e->closing && !e->ranks[0].started) {
            e->order.closing = true;
            return;
        }
        pthread_cond_wait(&e->ordered, &e->lock);
    }
    e->groups[rank->group].idle = false; /* until the round ends */
}

bool engine_round_begin(engine_rank *rank) {
    hd_engine *e = rank->engine;
    pthread_mutex_lock(&e->lock);
    if (rank->group == 0) {
        give_order(rank);
    } else if (!e->remote || e->independent) {
        take_order(rank);
    }
    rank->order = e->order;
    if (e->version) rank->weight_version = e->version;
    pthread_mutex_unlock(&e->lock);
    if (engine_remote_is_beside(e)) {
        engine_remote_look(rank);
    } else if (rank->index == 0) {
        engine_world_look(rank);
    }
    if (rank->index == 0) engine_update_look(rank);
    if (e->remote && !e->independent) engine_remote_begin(rank);
    return !rank->order.closing;
}

void engine_round_end(engine_rank *rank, bool idle, int64_t look_ns) {
    hd_engine *e = rank->engine;
    engine_group *group = &e->groups[rank->group];
    if (e->remote && !e->independent) engine_remote_end(rank, idle, look_ns);
    pthread_mutex_lock(&e->lock);
    group->rounds = rank->order.number;
    group->idle = idle;
    group->look_ns = look_ns;
    if (rank->group) pthread_cond_broadcast(&e->wake);
    pthread_mutex_unlock(&e->lock);
}

/* ---- failures ---- */

void engine_round_await_rest(hd_engine *e) {
    pthread_mutex_lock(&e->lock);
    while (!all_are(e, is_at_rest)) pthread_cond_wait(&e->wake, &e->lock);
    pthread_mutex_unlock(&e->lock);
}

void engine_round_resume(hd_engine *e, bool recovered) {
    pthread_mutex_lock(&e->lock);
    e->recovered = recovered;
    e->recoveries++;
    e->recovered_in = e->order.number;
    e->news = true; /* mail of a round that a group skips */
    for (int32_t i = 0; i < e->n_groups; i++) e->groups[i].parked = false;
    pthread_cond_broadcast(&e->ordered);
    pthread_mutex_unlock(&e->lock);
}

bool engine_round_park(engine_rank *rank) {
    hd_engine *e = rank->engine;
    pthread_mutex_lock(&e->lock);
    const uint64_t before = e->recoveries;
    e->groups[rank->group].parked = true;
    pthread_cond_broadcast(&e->wake);
    while (e->recoveries == before && !e->closing) pthread_cond_wait(&e->ordered, &e->lock);
    const bool recovered = e->recoveries != before && e->recovered;
    /* The first group may have failed in the round after this one. It does not run that step again, so
     * nobody else does. */
    if (e->recoveries != before) rank->order.number = e->recovered_in;
    pthread_mutex_unlock(&e->lock);
    return recovered;
}
