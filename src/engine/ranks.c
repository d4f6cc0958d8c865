/* ranks.c - the ranks of an engine: their layout, what they share, and their threads. */
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "engine/rank.h"
#include "weights/placement.h"

/* ---- the layout ---- */

static int32_t at_least_one(int32_t n) {
    return n ? n : 1;
}

/* What has no other rank to talk to, or no memory that ranks could exchange. */
static hd_status check_backend(const hd_engine_options *o, hd_err *err) {
    const char *backend = o->backend ? o->backend : "auto";
    if (strcmp(backend, "null") == 0) {
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "the null backend has no weights to share: tp and ep have no meaning");
    }
    if (strcmp(backend, "cuda") == 0) {
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "ranks share a model on the cpu and ref backends, not on cuda yet");
    }
    if (o->pin_threads) {
        return HD_FAIL(
            err, HD_EUNSUPPORTED,
            "pinned threads with several ranks: every rank would take the same cores");
    }
    return HD_OK;
}

static hd_status check_degrees(const hd_engine_options *o, hd_err *err) {
    const int32_t degrees[] = {o->tp, o->ep};
    static const char *const names[] = {"tp", "ep"};
    for (size_t i = 0; i < HD_LEN(degrees); i++) {
        if (degrees[i] >= 0 && degrees[i] <= HD_LOCAL_MAX_RANKS) continue;
        return HD_FAIL(err, HD_EINVAL, "%s is %d; must be 1 to %d ranks of one process",
                       names[i], degrees[i], HD_LOCAL_MAX_RANKS);
    }
    return HD_OK;
}

/* Plans the first rank's shard, which refuses what cannot be divided, by its name: all parts
 * of a tensor have the same size. */
static hd_status check_shard(const hd_engine *e, const hd_parallel_config *parallel,
                             hd_err *err) {
    hd_schema schema;
    hd_plan plan;
    hd_plan_args args = {
        .parallel = parallel, .spec = e->spec, .schema = &schema, .n_mtp = e->spec->n_mtp};
    HD_TRY(hd_schema_open(&schema, e->spec, err));
    const hd_status st = hd_plan_open(&plan, &args, err);
    if (st == HD_OK) hd_plan_close(&plan);
    hd_schema_close(&schema);
    return st;
}

/* tp ranks share everything. If an MLP cannot be divided by tp, as its quantization blocks are
 * too large, it stays whole, and the ranks divide the experts and the rows. */
static hd_status choose_tensor(hd_engine *e, int32_t tp, hd_err *err) {
    hd_err also = {0};
    e->parallel = hd_parallel_tensor(tp);
    const hd_status st = check_shard(e, &e->parallel, err);
    if (st == HD_OK) return HD_OK;
    const hd_parallel_config whole = hd_parallel_common(tp, tp, e->spec);
    if (check_shard(e, &whole, &also) != HD_OK) return st;
    *err = (hd_err){0};
    e->parallel = whole;
    return HD_OK;
}

hd_status engine_ranks_choose(hd_engine *e, const hd_engine_options *o, hd_err *err) {
    HD_TRY(check_degrees(o, err));
    const int32_t tp = at_least_one(o->tp), ep = at_least_one(o->ep);
    e->parallel = hd_parallel_single();
    if (tp == 1 && ep == 1) return HD_OK;
    HD_TRY(check_backend(o, err));
    if (ep == 1) return choose_tensor(e, tp, err);
    if (tp > 1 && tp != ep) {
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "tp %d with ep %d: ep must be 1 or %d, or tp must be 1", tp, ep, tp);
    }
    e->parallel = hd_parallel_common(tp, ep, e->spec);
    return check_shard(e, &e->parallel, err);
}

/* ---- opening ---- */

static hd_status open_weights(hd_engine *e, const hd_engine_options *o, hd_err *err) {
    engine_rank *leader = &e->ranks[0];
    const hd_dummy_options dummy = {.device = leader->device, .stream = leader->stream};
    if (!leader->device) return HD_OK;
    HD_TRY(o->dummy_weights ? hd_weights_open_dummy(&e->whole, e->spec, &dummy, err)
                            : hd_weights_open(&e->whole, o->model_dir, e->spec, err));
    leader->totals.weight_bytes = hd_weights_bytes(e->whole);
    return HD_OK;
}

hd_status engine_ranks_open(hd_engine *e, const hd_engine_options *o, hd_precision precision,
                            hd_err *err) {
    const int32_t n = hd_parallel_world(&e->parallel);
    e->ranks = calloc((size_t)n, sizeof *e->ranks);
    if (!e->ranks) return HD_FAIL(err, HD_ENOMEM, "no memory for %d ranks", n);
    e->n_ranks = n;
    if (n > 1) HD_TRY(hd_comm_local_open(&e->world, &e->parallel, err));
    for (int32_t i = 0; i < n; i++) {
        HD_TRY(engine_rank_open(&e->ranks[i], e, i, o, precision, err));
    }
    HD_TRY(open_weights(e, o, err));
    for (int32_t i = 0; i < n; i++) HD_TRY(engine_rank_open_shard(&e->ranks[i], err));
    return HD_OK;
}

void engine_ranks_count_memory(hd_engine *e) {
    engine_rank *leader = &e->ranks[0];
    for (int32_t i = 1; i < e->n_ranks; i++) {
        leader->totals.kv_bytes += e->ranks[i].totals.kv_bytes;
        leader->follower_bytes += hd_model_runner_bytes(e->ranks[i].model_runner);
    }
}

/* ---- threads ---- */

/* Followers first: the leader's thread ends them when it ends. */
hd_status engine_ranks_start(hd_engine *e, hd_err *err) {
    for (int32_t i = e->n_ranks - 1; i >= 0; i--) HD_TRY(engine_rank_start(&e->ranks[i], err));
    return HD_OK;
}

void engine_ranks_join(hd_engine *e) {
    if (e->world && !e->ranks[0].started) {
        hd_comm_local_abort(e->world, "the engine could not start");
    }
    for (int32_t i = 0; i < e->n_ranks; i++) {
        if (e->ranks[i].started) pthread_join(e->ranks[i].thread, NULL);
    }
}

void engine_ranks_close(hd_engine *e) {
    for (int32_t i = 0; i < e->n_ranks; i++) engine_rank_close(&e->ranks[i]);
    free(e->ranks);
    hd_weights_close(e->whole);
    hd_comm_local_close(e->world);
}
