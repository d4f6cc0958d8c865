/* update.c - new weights, and memory that is given back: a caller posts what it wants and waits. Then
 * all ranks rest for a round (rounds.c); behind it the step thread of rank 0 does it, and with the
 * next round every rank has the new weights. Names of versions are kept as long as the engine,
 * because events point to them. */
#include <stdlib.h>
#include <string.h>

#include "base/progress.h"
#include "base/siphash.h"
#include "engine/new_weights.h"
#include "weights/update.h"

static const char FIRST[] = "default"; /* the version of the weights at the start */

struct engine_version {
    engine_version *next;
    char name[HD_MAX_WEIGHT_VERSION + 1];
};

/* Returns the engine's own copy of a name. The caller holds the lock. */
static const char *keep_name(hd_engine *e, const char *name, hd_err *err) {
    for (engine_version *v = e->versions; v; v = v->next) {
        if (strcmp(v->name, name) == 0) return v->name;
    }
    engine_version *v = calloc(1, sizeof *v);
    if (!v) {
        HD_FAIL(err, HD_ENOMEM, "no memory for the version's name");
        return NULL;
    }
    memcpy(v->name, name, strlen(name));
    v->next = e->versions;
    e->versions = v;
    return v->name;
}

void engine_versions_close(hd_engine *e) {
    while (e->versions) {
        engine_version *next = e->versions->next;
        free(e->versions);
        e->versions = next;
    }
}

static hd_status check_version(const char *version, hd_err *err) {
    const size_t n = version ? strlen(version) : 1;
    if (n > 0 && n <= HD_MAX_WEIGHT_VERSION) return HD_OK;
    return HD_FAIL(err, HD_EINVAL, "a version's name of %zu bytes; must be 1 to %d", n,
                   HD_MAX_WEIGHT_VERSION);
}

const hd_weights *hd_engine_weights(const hd_engine *e) {
    return e->updatable ? e->whole : NULL;
}

int32_t hd_engine_threads(const hd_engine *e) {
    return e->threads;
}

const char *hd_engine_weight_version(hd_engine *e) {
    pthread_mutex_lock(&e->lock);
    const char *version = e->version ? e->version : FIRST;
    pthread_mutex_unlock(&e->lock);
    return version;
}

/* The caller holds the lock. */
static hd_status post(hd_engine *e, const engine_update *what, hd_err *err) {
    e->update = *what;
    e->update.posted = e->news = true;
    e->update.retract = what->weights && !e->paused;
    pthread_cond_broadcast(&e->wake);
    while (!e->update.done && !e->closing) pthread_cond_wait(&e->updated, &e->lock);
    if (!e->update.done) return HD_FAIL(err, HD_EAGAIN, "the engine is closing");
    if (e->update.err.status != HD_OK) *err = e->update.err;
    return e->update.err.status;
}

hd_status hd_engine_update_weights(hd_engine *e, hd_weights_update *u, const char *version,
                                   hd_err *err) {
    HD_TRY(check_version(version, err));
    if (!e->updatable) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "this engine was opened with fixed weights");
    }
    engine_update what = {.weights = u};
    hd_status st = HD_OK;
    pthread_mutex_lock(&e->lock);
    if (u && e->groups[0].stats.released & HD_MEMORY_WEIGHTS) {
        st = HD_REFUSE(err, HD_EAGAIN, "weights_released", NULL,
                       "the weights' memory is released: resume it before an update");
    }
    if (st == HD_OK && version) {
        what.version = keep_name(e, version, err);
        if (!what.version) st = HD_ENOMEM;
    }
    if (st == HD_OK) st = post(e, &what, err);
    pthread_mutex_unlock(&e->lock);
    return st;
}

static hd_status post_memory(hd_engine *e, const engine_update *what, hd_err *err) {
    if (e->ucx) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "ranks in other processes keep their memory");
    }
    if (!e->updatable) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "this engine was opened with fixed weights");
    }
    pthread_mutex_lock(&e->lock);
    const hd_status st = post(e, what, err);
    pthread_mutex_unlock(&e->lock);
    return st;
}

hd_status hd_engine_release_memory(hd_engine *e, uint32_t memory, hd_err *err) {
    return post_memory(e, &(engine_update){.release = memory}, err);
}

hd_status hd_engine_resume_memory(hd_engine *e, uint32_t memory, hd_err *err) {
    return post_memory(e, &(engine_update){.resume = memory}, err);
}

hd_status engine_refuse_hindered(const hd_engine *e, hd_err *err) {
    const hd_engine_stats *t = &e->groups[0].stats;
    if (t->released & HD_MEMORY_KV) {
        return HD_REFUSE(err, HD_EAGAIN, t->hindrance, NULL,
                         "the memory of the KV cache is released: resume it first");
    }
    if (t->released & HD_MEMORY_WEIGHTS) {
        return HD_REFUSE(err, HD_EAGAIN, t->hindrance, NULL,
                         "the weights' memory is released: resume it, then update the weights");
    }
    return HD_REFUSE(err, HD_EAGAIN, t->hindrance, NULL,
                     "%d tensors are lost: update the weights first", t->weights_lost);
}

/* ---- the step thread of rank 0 ---- */

hd_device *hd_engine_device(const hd_engine *e) {
    return e->ranks[0].weights ? hd_weights_device(e->ranks[0].weights) : NULL;
}

hd_status engine_update_renew_shards(hd_engine *e, const hd_weights_update *u, hd_err *err) {
    engine_ranks_await_moves(e);
    for (int32_t i = 0; i < e->n_ranks; i++) {
        engine_rank *rank = &e->ranks[i];
        if (rank->weights == e->whole) continue;
        HD_TRY(hd_weights_renew_shard(rank->weights, e->whole, u, rank->stream, err));
    }
    return HD_OK;
}

static hd_status apply(engine_rank *rank, const engine_update *what, hd_err *err) {
    hd_engine *e = rank->engine;
    hd_err why = {0};
    hd_model_runner_forget_steps(rank->model_runner);
    if (e->changes) hd_weights_changes_add(e->changes, what->weights);
    hd_status st = hd_weights_update_apply(what->weights, e->whole, rank->stream, &why);
    if (st == HD_OK) st = engine_update_renew_shards(e, what->weights, &why);
    if (st != HD_OK) {
        return HD_REFUSE(err, HD_EAGAIN, "weights_incomplete", NULL,
                         "the update broke off, so that %d tensors are lost until they are "
                         "updated: %s",
                         hd_weights_lost(e->whole), why.msg);
    }
    rank->totals.weight_updates++;
    rank->totals.weight_updates_ns += hd_now_ns() - what->begun_ns;
    return HD_OK;
}

/* The leaders of attention groups rest, as all ranks do. */
static int32_t count_running(const hd_engine *e) {
    int32_t n = 0;
    for (int32_t i = 0; i < e->n_ranks; i++) {
        if (e->ranks[i].sched) n += hd_sched_read_stats(e->ranks[i].sched).running;
    }
    return n;
}

static hd_status release_kv(hd_engine *e, size_t *bytes, hd_err *err) {
    for (int32_t i = 0; i < e->n_ranks; i++) {
        if (e->ranks[i].sched) hd_sched_flush_cache(e->ranks[i].sched);
    }
    for (int32_t i = 0; i < e->n_ranks; i++) {
        HD_TRY(hd_model_runner_discard_kv(e->ranks[i].model_runner, bytes, err));
    }
    return HD_OK;
}

static hd_status release_weights(hd_engine *e, size_t *bytes, hd_err *err) {
    const bool on_device = hd_engine_device(e) != NULL; /* the host has a copy */
    engine_ranks_await_moves(e);
    if (e->backup && !on_device) HD_TRY(hd_weights_backup_save(e->backup, e->whole, err));
    if (!on_device) HD_TRY(hd_weights_discard(e->whole, bytes, err));
    for (int32_t i = 0; i < e->n_ranks; i++) {
        hd_weights *shard = e->ranks[i].weights;
        if (on_device) HD_TRY(hd_weights_discard(shard, bytes, err));
        if (!on_device && shard != e->whole) *bytes += hd_weights_discard_shard(shard);
    }
    for (int32_t i = 0; i < e->n_ranks; i++) {
        if (e->ranks[i].sched) hd_sched_renew_cache(e->ranks[i].sched, e->weights_mark);
    }
    return HD_OK;
}

/* Gives back what is not given back yet, of all ranks. */
static hd_status release(engine_rank *rank, uint32_t memory, hd_err *err) {
    hd_engine *e = rank->engine;
    hd_engine_stats *t = &rank->totals;
    const int32_t running = count_running(e);
    memory &= ~t->released;
    if (memory && running) {
        return HD_FAIL(err, HD_EINVAL, "not released: %d requests run and hold pages", running);
    }
    for (int32_t i = 0; i < e->n_ranks; i++) {
        if (e->ranks[i].sched) hd_model_runner_forget_steps(e->ranks[i].model_runner);
    }
    if (memory & HD_MEMORY_KV) {
        HD_TRY(release_kv(e, &rank->released_bytes[1], err));
        t->released |= HD_MEMORY_KV;
    }
    if (memory & HD_MEMORY_WEIGHTS) {
        HD_TRY(release_weights(e, &rank->released_bytes[0], err));
        t->released |= HD_MEMORY_WEIGHTS;
        rank->discarded = true;
    }
    return HD_OK;
}

static hd_status resume_kv(engine_rank *rank, hd_err *err) {
    hd_engine *e = rank->engine;
    for (int32_t i = 0; i < e->n_ranks; i++) {
        HD_TRY(hd_model_runner_restore_kv(e->ranks[i].model_runner, err));
    }
    rank->totals.released &= ~(uint32_t)HD_MEMORY_KV;
    rank->released_bytes[1] = 0;
    return HD_OK;
}

static hd_status resume_weights(engine_rank *rank, hd_err *err) {
    hd_engine *e = rank->engine;
    const bool on_device = hd_engine_device(e) != NULL;
    HD_TRY(hd_weights_restore(e->whole, rank->stream, err));
    for (int32_t i = 0; i < e->n_ranks; i++) {
        engine_rank *of = &e->ranks[i];
        if (of->weights == e->whole) continue;
        HD_TRY(hd_weights_restore_shard(of->weights, e->whole, of->stream, err));
    }
    rank->totals.released &= ~(uint32_t)HD_MEMORY_WEIGHTS;
    rank->released_bytes[0] = 0;
    if (!e->backup || on_device) return HD_OK;
    HD_TRY(hd_weights_backup_restore(e->backup, e->whole, err));
    return engine_update_renew_shards(e, NULL, err);
}

/* Memory that cannot be taken again stays released. On a CPU the system gives pages again when they
 * are written. */
static hd_status resume(engine_rank *rank, uint32_t memory, hd_err *err) {
    memory &= rank->totals.released;
    if (memory & HD_MEMORY_KV) HD_TRY(resume_kv(rank, err));
    return memory & HD_MEMORY_WEIGHTS ? resume_weights(rank, err) : HD_OK;
}

/* Why no step may run now, as a code. */
static const char *hindrance_of(engine_rank *rank) {
    hd_engine_stats *t = &rank->totals;
    t->weights_lost = hd_weights_lost(rank->engine->whole);
    t->released_bytes = rank->released_bytes[0] + rank->released_bytes[1];
    if (t->weights_lost == 0) rank->discarded = false;
    if (t->released & HD_MEMORY_KV) return "memory_released";
    if (t->released & HD_MEMORY_WEIGHTS || rank->discarded) return "weights_released";
    return t->weights_lost ? "weights_incomplete" : NULL;
}

/* Two servers whose updates had the same names, one after the other, have equal marks. An update
 * without a new name, or one that broke off, is like none elsewhere. */
static uint64_t next_mark(const hd_engine *e, const engine_update *u) {
    const uint64_t own = (uint64_t)hd_now_ns();
    const bool is_named = u->version && u->err.status == HD_OK;
    hd_siphash s;
    hd_siphash_init(&s, (const uint64_t[2]){e->weights_mark});
    hd_siphash_add_part(&s, is_named ? u->version : NULL);
    if (!is_named) hd_siphash_add(&s, &own, sizeof own);
    return hd_siphash_value(&s);
}

void engine_update_apply(engine_rank *rank) {
    hd_engine *e = rank->engine;
    pthread_mutex_lock(&e->lock);
    engine_update u = e->update;
    pthread_mutex_unlock(&e->lock);
    const hd_status st = u.weights ? apply(rank, &u, &u.err) : HD_OK;
    if (u.release) (void)release(rank, u.release, &u.err);
    if (u.resume) (void)resume(rank, u.resume, &u.err);
    if (rank->weights) rank->totals.hindrance = hindrance_of(rank);
    pthread_mutex_lock(&e->lock);
    e->groups[0].stats.hindrance = rank->totals.hindrance;
    e->groups[0].stats.released = rank->totals.released;
    e->groups[0].stats.released_bytes = rank->totals.released_bytes;
    e->groups[0].stats.weights_lost = rank->totals.weights_lost;
    e->groups[0].stats.weight_updates = rank->totals.weight_updates;
    e->groups[0].stats.weight_updates_ns = rank->totals.weight_updates_ns;
    if (st == HD_OK && u.version) e->version = u.version;
    if (u.weights) e->weights_mark = next_mark(e, &u);
    e->update.err = u.err;
    e->update.posted = false;
    e->update.done = true;
    pthread_cond_broadcast(&e->updated);
    pthread_mutex_unlock(&e->lock);
}

/* ---- the step thread of a leader ---- */

/* If the others are lost meanwhile, nothing is computed in this round. */
static void exchange(engine_rank *rank) {
    hd_err err = {0};
    if (engine_update_exchange(rank, &err) == HD_OK) return;
    rank->order.paused = true;
    engine_ranks_recover(rank, &err);
}

void engine_update_obey(engine_rank *rank) {
    hd_err err = {0};
    if (rank->order.renewed) {
        hd_model_runner_forget_steps(rank->model_runner);
        hd_sched_renew_cache(rank->sched, rank->order.weights);
        if (rank->engine->ucx) exchange(rank);
    }
    if (rank->order.rest && rank->model_runner &&
        hd_model_runner_rest(rank->model_runner, &err) != HD_OK) {
        engine_ranks_recover(rank, &err); /* followers that begin anew rest, too */
    }
}
