/* world.c - a rank of several processes begins anew: after the loss of other ranks, and when one has
 * come. Every rank that is left closes what belongs to its place in the layout, waits for the next
 * epoch (comm/ucx.h) and opens what its new place needs: a shard of the files, which experts of lost
 * ranks are read from, an empty KV pool, and of a leader a scheduler. Rank 0 keeps all requests.
 * Those of other attention groups are routed anew, with the tokens that they have put out. */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "engine/experts.h"
#include "engine/wire.h"
#include "engine/remote/remote.h"

/* ---- the place of a rank ---- */

/* What a later place is opened with. */
struct engine_reopening {
    hd_engine_sizes sizes;
    hd_engine_options options; /* only what shards, runners and rebalance read */
    char *rebalance;
};

hd_status engine_world_keep(hd_engine *e, const hd_engine_sizes *z, const hd_engine_options *o,
                            hd_err *err) {
    if (!e->ucx) return HD_OK;
    engine_reopening *r = calloc(1, sizeof *r);
    e->reopening = r;
    if (r && o->rebalance) r->rebalance = strdup(o->rebalance);
    if (!r || (o->rebalance && !r->rebalance)) {
        return HD_FAIL(err, HD_ENOMEM, "no memory for a world of ranks");
    }
    r->sizes = *z;
    r->options = (hd_engine_options){.forced_acceptance = o->forced_acceptance,
                                     .dummy_weights = o->dummy_weights,
                                     .gpu = o->gpu,
                                     .device_memory_gb = o->device_memory_gb,
                                     .rebalance = r->rebalance,
                                     .prefetch_depth = o->prefetch_depth};
    return HD_OK;
}

void engine_world_close(hd_engine *e) {
    if (e->reopening) free(e->reopening->rebalance);
    free(e->reopening);
}

/* A leader of another process gets all its requests again, from rank 0. */
static void forget_requests(engine_rank *rank) {
    hd_engine *e = rank->engine;
    engine_mail *mail = &e->groups[rank->group].mail;
    for (int32_t i = 0; i < rank->n_step_outputs; i++) free(rank->step_outputs[i].why);
    rank->n_step_outputs = 0;
    for (int32_t i = 0; i < e->n_requests; i++) {
        if (e->requests[i].id) engine_forget_request(e, &e->requests[i]);
    }
    mail->n_submitted = mail->n_cancelled = 0;
    mail->flush = mail->retract = false;
    engine_fail_jobs(&mail->jobs);
    hd_sched_close(rank->sched);
    rank->sched = NULL;
    if (e->remote) engine_remote_forget(e->remote);
}

static void close_place(engine_rank *rank) {
    hd_err old = {0}; /* a failure that the stream has kept */
    hd_stream_sync(rank->stream, &old);
    if (rank->kv_disk)
        hd_disk_tier_stop(rank->kv_disk); /* it reads and writes the runner's pages */
    engine_experts_close(rank);
    engine_rebalance_close(rank);
    hd_model_runner_close(rank->model_runner);
    rank->model_runner = NULL;
    rank->runner = (hd_runner){0};
    if (rank->weights != rank->engine->whole) hd_weights_close(rank->weights);
    rank->weights = NULL;
    hd_device_close(rank->shard_device);
    rank->shard_device = NULL;
    if (rank->index) forget_requests(rank);
}

static hd_status open_place(engine_rank *rank, hd_err *err) {
    hd_engine *e = rank->engine;
    const engine_reopening *r = e->reopening;
    HD_TRY(engine_rank_open_shard(rank, &r->options, err));
    HD_TRY(engine_rank_upload(rank, &r->options, err));
    HD_TRY(engine_experts_open(rank, &r->options, err));
    HD_TRY(engine_rank_open_runner(rank, &r->sizes, &r->options, err));
    if (rank->step_outputs) return HD_OK;
    return engine_rank_open_inbox(rank, &r->sizes, e->max_living, err);
}

/* ---- what is shown ---- */

/* The caller holds the lock. */
static void show_seats(hd_engine *e, const hd_comm_members *m) {
    for (int32_t i = 0; i < e->figures.size; i++) {
        e->seats[i].state = m->connected >> i & 1 ? HD_RANK_STANDBY : HD_RANK_LOST;
    }
    for (int32_t place = 0; place < m->n; place++) {
        hd_rank_status *seat = &e->seats[m->number[place]];
        seat->state = HD_RANK_ACTIVE;
        seat->group = place / e->ranks[0].parallel.tp;
    }
}

static void show(hd_engine *e, bool serves) {
    const hd_comm_members *m = hd_comm_ucx_members(e->ucx);
    pthread_mutex_lock(&e->lock);
    show_seats(e, m);
    e->figures.serves = serves;
    e->figures.epoch = m->epoch;
    e->figures.working = m->n;
    pthread_mutex_unlock(&e->lock);
}

static void show_lost(hd_engine *e, const char *why) {
    pthread_mutex_lock(&e->lock);
    snprintf(e->figures.lost, sizeof e->figures.lost, "%.*s", HD_MAX_WORLD_TEXT - 1, why);
    pthread_mutex_unlock(&e->lock);
}

static void show_waiting(void *ctx) {
    show(ctx, false);
}

/* Says how the first of the ranks that are missing was lost: not the reason for which the epoch ended,
 * since a rank may be back before the next one begins. */
static void show_members(engine_rank *first) {
    hd_engine *e = first->engine;
    const uint64_t now = hd_comm_ucx_members(e->ucx)->connected;
    int32_t missing = 0;
    char why[HD_RENDEZVOUS_TEXT] = "";
    while (missing < e->figures.size && now >> missing & 1) missing++;
    if (missing < e->figures.size) hd_comm_ucx_read_loss(e->ucx, missing, why);
    show_lost(e, why);
    show(e, true);
}

void engine_world_show_first(hd_engine *e) {
    if (!e->ucx) return;
    e->figures.size = hd_parallel_world(&e->parallel);
    show(e, true);
}

bool hd_engine_read_world(hd_engine *e, hd_world_figures *out) {
    pthread_mutex_lock(&e->lock);
    *out = e->figures;
    pthread_mutex_unlock(&e->lock);
    return out->size > 0;
}

int32_t hd_engine_read_ranks(hd_engine *e, hd_rank_status *out, int32_t max) {
    const bool elsewhere = e->ucx;
    const int32_t n = e->independent && !elsewhere ? 1 : hd_parallel_world(&e->parallel);
    if (n == 1) return 0;
    pthread_mutex_lock(&e->lock);
    const bool lost = e->groups[0].stats.ranks_lost;
    for (int32_t i = 0; i < n && i < max; i++) {
        out[i] = elsewhere ? e->seats[i]
                           : (hd_rank_status){.state = lost ? HD_RANK_LOST : HD_RANK_ACTIVE,
                                              .group = i / e->parallel.tp};
    }
    pthread_mutex_unlock(&e->lock);
    for (int32_t i = 0; i < n && i < max; i++) {
        if (elsewhere)
            hd_comm_ucx_read_figures(e->ucx, i, &out[i].figures);
        else
            hd_comm_read_figures(e->ranks[i].comm, &out[i].figures);
    }
    return n;
}

/* ---- beginning anew ---- */

/* The rank's interface of an epoch that has ended is no longer there. */
static hd_status begin_anew(engine_rank *rank, hd_err *err) {
    hd_engine *e = rank->engine;
    close_place(rank);
    rank->comm = NULL;
    HD_TRY(hd_comm_ucx_begin_anew(e->ucx, &rank->parallel, show_waiting, err));
    rank->comm = hd_comm_ucx_interface(e->ucx);
    rank->place = rank->comm->rank;
    rank->group = rank->place / rank->parallel.tp;
    pthread_mutex_lock(&e->lock);
    e->n_present = rank->parallel.dp;
    pthread_mutex_unlock(&e->lock);
    const hd_status st = open_place(rank, err);
    if (st != HD_OK) hd_comm_abort(rank->comm, err->msg);
    return st;
}

/* Why the rank has no more part in this epoch; HD_OK: rank 0 has ended it in order. */
static hd_err end_of(const engine_rank *rank) {
    return engine_rank_leads(rank) ? rank->lost : rank->step_err;
}

static void *work(void *arg) {
    engine_rank *rank = arg;
    hd_device_bind_thread(rank->device);
    hd_err end;
    hd_status st = HD_OK;
    do {
        rank->lost = rank->step_err = (hd_err){0};
        engine_rank_work(rank);
        end = end_of(rank);
        if (end.status != HD_OK) {
            end = (hd_err){0};
            st = begin_anew(rank, &end);
        } else {
            st = HD_EAGAIN;
        }
    } while (st == HD_OK);
    if (st == HD_EAGAIN) end = (hd_err){0}; /* rank 0 has left */
    rank->step_err = end;
    return NULL;
}

hd_status engine_world_start(engine_rank *rank, hd_err *err) {
    if (pthread_create(&rank->thread, NULL, work, rank) != 0) {
        return HD_FAIL(err, HD_EIO, "cannot start the thread of rank %d", rank->index);
    }
    rank->started = true;
    return HD_OK;
}

/* ---- rank 0 ---- */

static int by_arrival(const void *a, const void *b) {
    const engine_request *x = *(engine_request *const *)a, *y = *(engine_request *const *)b;
    return x->arrival < y->arrival ? -1 : x->arrival > y->arrival;
}

static bool has_work(const engine_request *r) {
    for (int32_t k = 0; k < r->n_choices; k++) {
        if (!r->choices[k].posted) return true;
    }
    return false;
}

static void send_again(hd_engine *e, engine_request *r) {
    engine_route_again(e, r);
    if (r->fetching) return; /* it is not sent yet */
    engine_mail *mail = &e->groups[r->group].mail;
    mail->submitted[mail->n_submitted++] = r->id;
    for (int32_t k = 0; k < r->n_choices; k++) {
        if (!r->choices[k].cancelled || r->choices[k].posted) continue;
        mail->cancelled[mail->n_cancelled++] = r->id + (uint64_t)k;
    }
}

/* Nothing of what other groups computed is left but the tokens that rank 0 has got. */
static void clear_group(const engine_rank *first, engine_group *group) {
    group->mail.n_submitted = group->mail.n_cancelled = 0;
    group->n_places = group->stats.running = group->stats.waiting = 0;
    group->stats.experts.slots = group->stats.experts.elsewhere = 0;
    group->rounds = first->order.number;
    group->rested_pauses = first->order.pauses;
    group->idle = true;
    group->look_ns = 0;
}

static hd_status distribute(engine_rank *first, hd_err *err) {
    hd_engine *e = first->engine;
    int32_t n = 0;
    engine_request **moved = calloc((size_t)e->n_requests, sizeof(engine_request *));
    if (!moved) return HD_FAIL(err, HD_ENOMEM, "no memory for requests of lost ranks");
    pthread_mutex_lock(&e->lock);
    for (int32_t g = 1; g < e->n_groups; g++) clear_group(first, &e->groups[g]);
    e->groups[0].stats.experts = first->totals.experts; /* before its members are shown */
    if (e->remote) engine_remote_fail_jobs(e);
    engine_recording_lost(first);
    for (int32_t i = 0; i < e->n_requests; i++) {
        engine_request *r = &e->requests[i];
        if (r->id && r->n_left && r->group && has_work(r)) moved[n++] = r;
    }
    qsort(moved, (size_t)n, sizeof *moved, by_arrival);
    engine_router_flush(e->router);
    for (int32_t i = 0; i < n; i++) send_again(e, moved[i]);
    e->recoveries++;
    e->news = true;
    pthread_mutex_unlock(&e->lock);
    if (e->changes)
        hd_weights_changes_again(e->changes); /* ranks that come have read the files */
    free(moved);
    return HD_OK;
}

static bool begin_anew_first(engine_rank *first, const char *why) {
    hd_engine *e = first->engine;
    const hd_comm_members before = *hd_comm_ucx_members(e->ucx);
    const hd_comm_members *now = hd_comm_ucx_members(e->ucx);
    hd_err err = {0};
    show_lost(e, why);
    show(e, false);
    if (begin_anew(first, &err) != HD_OK || distribute(first, &err) != HD_OK) {
        if (err.status != HD_EAGAIN) show_lost(e, err.msg);
        return false;
    }
    if (now->connected != before.connected || now->losses != before.losses) first->failures = 0;
    if (!(now->connected & ~before.connected)) engine_ranks_count_failure(first, why);
    show_members(first);
    first->began_anew = true;
    return true;
}

bool engine_world_recover(engine_rank *rank, const hd_err *err) {
    char why[HD_MAX_WORLD_TEXT];
    if (!rank->comm) return false;
    hd_comm_abort(rank->comm, err->msg);
    if (rank->index) return false;
    snprintf(why, sizeof why, "%.*s", HD_MAX_WORLD_TEXT - 1, hd_comm_ended(rank->comm));
    rank->totals.ranks_lost = !engine_ranks_may_restart(rank) || !begin_anew_first(rank, why);
    return !rank->totals.ranks_lost;
}

void engine_world_look(engine_rank *first) {
    const hd_err err = {.status = HD_EPEER, .msg = "communication has ended"};
    if (first->engine->ucx && first->comm && hd_comm_ended(first->comm))
        engine_world_recover(first, &err);
}

/* The watch's thread: a rank that is idle shall begin anew, too. */
void engine_world_on_end(void *ctx) {
    hd_engine *e = ctx;
    pthread_mutex_lock(&e->lock);
    engine_tell(e);
    pthread_mutex_unlock(&e->lock);
}
