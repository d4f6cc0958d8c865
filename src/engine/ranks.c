/* ranks.c - the ranks of an engine: what they share, their threads, and recovery after a
 * failure. */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/progress.h"
#include "engine/experts.h"
#include "engine/peers.h"

/* Steps that may fail one after the other, and the time after which one more is tried. */
enum { MAX_FAILURES = 3 };
static const int64_t RETRY_NS = 10000000000;

/* ---- opening ---- */

static hd_status open_weights(hd_engine *e, const hd_engine_options *o, hd_err *err) {
    engine_rank *leader = &e->ranks[0];
    const bool several = e->world || e->ucx || e->independent;
    const bool in_parts = several && !hd_device_is_host(leader->device);
    const bool on_host = engine_experts_are_on_host(o);
    const hd_dummy_options dummy = {.device = on_host ? NULL : leader->device,
                                    .stream = leader->stream,
                                    .shapes_only = in_parts,
                                    .experts_later = on_host};
    if (!leader->device) return HD_OK;
    if (o->dummy_weights) {
        HD_TRY(hd_weights_open_dummy(&e->whole, e->spec, &dummy, err));
    } else {
        HD_TRY((o->updatable ? hd_weights_open_updatable
                : engine_experts_are_on_disk(o)
                    ? hd_weights_open_unstaged
                    : hd_weights_open)(&e->whole, o->model_dir, e->spec, err));
    }
    leader->totals.weight_bytes = hd_weights_bytes(e->whole);
    return HD_OK;
}

/* They copy experts from each other. */
static hd_status connect_independent(const hd_engine *e, hd_err *err) {
    for (int32_t i = 0; i < e->n_ranks; i++) {
        for (int32_t k = 0; k < e->n_ranks; k++) {
            if (k == i) continue;
            HD_TRY(hd_device_enable_peer_access(e->ranks[i].device, e->ranks[k].device, err));
        }
    }
    return HD_OK;
}

hd_status engine_ranks_open(hd_engine *e, const hd_engine_options *o, hd_precision precision,
                            hd_err *err) {
    const bool alone = o->world.size > 0; /* the others are in other processes */
    const int32_t n = alone ? 1 : hd_parallel_world(&e->parallel);
    e->ranks = calloc((size_t)n, sizeof *e->ranks);
    if (!e->ranks) return HD_FAIL(err, HD_ENOMEM, "no memory for %d ranks", n);
    e->n_ranks = n;
    if (n > 1 && !e->independent) HD_TRY(hd_comm_local_open(&e->world, &e->parallel, err));
    for (int32_t i = 0; i < n; i++) {
        HD_TRY(engine_rank_open(&e->ranks[i], e, o->world.rank + i, o, precision, err));
    }
    if (e->independent) HD_TRY(connect_independent(e, err));
    if (alone) HD_TRY(engine_process_join(e, o, err));
    HD_TRY(open_weights(e, o, err));
    if (alone) HD_TRY(engine_peers_serve(&e->ranks[0], err));
    if (e->ucx && o->updatable && o->world.rank == 0)
        HD_TRY(hd_weights_changes_open(&e->changes, e->whole, err));
    for (int32_t i = 0; i < n; i++) HD_TRY(engine_rank_open_shard(&e->ranks[i], o, err));
    const bool gpus = e->ranks[0].device && !hd_device_is_host(e->ranks[0].device);
    if (e->world && gpus) hd_weights_are_on_devices(e->whole);
    return HD_OK;
}

void engine_ranks_count_memory(hd_engine *e) {
    for (int32_t i = 0; i < e->n_ranks; i++) {
        if (engine_rank_leads(&e->ranks[i])) continue;
        engine_rank *leader = &e->ranks[i - i % e->parallel.tp];
        leader->totals.kv_bytes += e->ranks[i].totals.kv_bytes;
        leader->totals.hisparse.host_bytes += e->ranks[i].totals.hisparse.host_bytes;
        leader->follower_bytes += hd_model_runner_bytes(e->ranks[i].model_runner);
    }
}

/* ---- threads ---- */

/* Followers first: the leader's thread ends them when it ends. */
hd_status engine_ranks_start(hd_engine *e, hd_err *err) {
    for (int32_t i = e->n_ranks - 1; i >= 0; i--) HD_TRY(engine_rank_start(&e->ranks[i], err));
    return HD_OK;
}

void engine_ranks_await_moves(hd_engine *e) {
    for (int32_t i = 0; i < e->n_ranks; i++) {
        if (e->ranks[i].model_runner) hd_model_runner_await_moves(e->ranks[i].model_runner);
    }
}

/* ---- recovery ---- */

/* Ends the followers, and waits: nobody is in a call then. */
static void end_followers(hd_engine *e, const char *why) {
    hd_comm_local_abort(e->world, why);
    engine_round_await_rest(e);
    for (int32_t i = 0; i < e->n_ranks; i++) {
        engine_rank *rank = &e->ranks[i];
        if (engine_rank_leads(rank) || !rank->started) continue;
        pthread_join(rank->thread, NULL);
        rank->started = false;
    }
}

static hd_status restart_followers(hd_engine *e, hd_err *err) {
    hd_comm_local_reset(e->world);
    for (int32_t i = e->n_ranks - 1; i >= 0; i--) {
        hd_err old = {0}; /* a failure that the stream has kept */
        hd_stream_sync(e->ranks[i].stream, &old);
        if (engine_rank_leads(&e->ranks[i])) continue;
        e->ranks[i].step_err = (hd_err){0};
        HD_TRY(engine_rank_start(&e->ranks[i], err));
    }
    return HD_OK;
}

bool engine_ranks_may_restart(engine_rank *first) {
    const int64_t now = hd_now_ns();
    if (first->failures == MAX_FAILURES && now < first->failed_ns + RETRY_NS) return false;
    if (first->failures == MAX_FAILURES) first->failures -= 2; /* one more restart */
    first->failures++;
    first->failed_ns = now;
    first->successes = 0;
    return true;
}

void engine_ranks_count_failure(engine_rank *first, const char *why) {
    hd_engine_stats *t = &first->totals;
    t->rank_failures++;
    snprintf(t->rank_failure, sizeof t->rank_failure, "%.*s", (int)sizeof t->rank_failure - 1,
             why);
}

static bool recover(engine_rank *first, const char *why) {
    hd_engine *e = first->engine;
    hd_err err = {0};
    if (!engine_ranks_may_restart(first)) {
        engine_round_await_rest(e);
        return false;
    }
    end_followers(e, why);
    engine_ranks_count_failure(first, hd_comm_ended(first->comm));
    first->totals.ranks_lost = engine_rebalance_recover(e, &err) != HD_OK ||
                               first->failures == MAX_FAILURES ||
                               restart_followers(e, &err) != HD_OK;
    return !first->totals.ranks_lost;
}

bool engine_ranks_recover(engine_rank *leader, const hd_err *why) {
    hd_engine *e = leader->engine;
    if (e->ucx) return engine_world_recover(leader, why);
    if (e->n_ranks == 1) return false;
    if (leader->group) {
        hd_comm_abort(leader->comm, why->msg);
        return engine_round_park(leader);
    }
    const bool recovered = recover(leader, why->msg);
    engine_round_resume(e, recovered);
    return recovered;
}

/* What a group does after the last exchange of its step, the first one does not know. When it has
 * ended the next step, all groups have ended this one. */
void engine_ranks_count_success(engine_rank *leader) {
    if (leader->group) return;
    if (leader->engine->n_present == 1 || leader->successes++ > 0) leader->failures = 0;
}

void engine_ranks_join(hd_engine *e) {
    const engine_rank *first = e->ranks;
    if (first && first->started && first->index == 0 && e->ucx) hd_comm_ucx_leave(e->ucx);
    if (first && first->comm && !first->followed && !(first->started && first->index == 0))
        hd_comm_abort(first->comm, "a rank could not start or was closed");
    for (int32_t i = 0; first && i < e->n_ranks; i++) {
        if (e->ranks[i].started) pthread_join(e->ranks[i].thread, NULL);
    }
}

int hd_engine_follow(hd_engine *e, char *why, size_t why_size) {
    engine_rank *rank = &e->ranks[0];
    assert(rank->index > 0 && rank->started);
    pthread_join(rank->thread, NULL);
    rank->started = false;
    rank->followed = true;
    if (rank->step_err.status != HD_OK && why_size) {
        snprintf(why, why_size, "%s", rank->step_err.msg);
    }
    return (int)rank->step_err.status;
}

/* Stages, and exchanges and copies between GPUs, first: they read the memory of all ranks. */
void engine_ranks_close(hd_engine *e) {
    for (int32_t i = 0; i < e->n_ranks; i++) {
        if (e->ranks[i].stream) hd_stream_wait(e->ranks[i].stream);
    }
    engine_ranks_await_moves(e);
    for (int32_t i = 0; i < e->n_ranks; i++) {
        hd_expert_stage_close(e->ranks[i].stage);
        hd_host_experts_close(e->ranks[i].host_experts);
    }
    if (e->ranks) engine_peers_close(&e->ranks[0]);
    hd_comm_ucx_close(e->ucx);
    for (int32_t i = 0; i < e->n_ranks; i++) engine_rank_close(&e->ranks[i]);
    free(e->ranks);
    hd_weights_changes_close(e->changes);
    hd_weights_close(e->whole);
    hd_comm_local_close(e->world);
}
