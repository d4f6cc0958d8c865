/* rebalance.c - moves experts between the ranks of an engine while it serves: drives the state
 * machine of moe/rebalance.h between two steps. The machine is the first attention group's. When it
 * wants something, the order of a round says so, and before the round's step that group's leader
 * tells the others each action, which all carry out together. */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/progress.h"
#include "engine/leaders.h"
#include "moe/rebalance.h"
#include "weights/experts/expert_moves.h"

enum {
    AUTO_LOOK = 64,
    LOOK_RANK_ROWS = 4096 /* of the experts of a rank: their number is known to 2 % then */
};
static const int64_t HORIZON = 20000; /* steps; 20 minutes of decode steps of 60 ms */
static const double MOST_BYTES_PER_S = 1e9, MOST_BYTES_PER_S_OF_GPUS = 1e10;
static const double STEP_SHARE = 0.05; /* what plans and moves take of a step's time */

/* What the first leader tells the others; a map [slots] follows. */
typedef struct told_action {
    int32_t what, layer, expert, from, to;
} told_action;

struct engine_rebalance {
    hd_rebalance *machine;      /* NULL: not the first group */
    hd_rebalance_action action; /* what is to be done next */
    uint8_t *told;              /* [told_bytes] */
    size_t told_bytes;
    int32_t *layers, n; /* numbers of the layers with experts */
    int64_t *rows;      /* [groups][n][experts] */
    int32_t flipping;   /* the layer that was told to flip; -1: none */
    uint32_t version;   /* of its map before */
    int64_t steps, ns;  /* at the last look at the time of a step */
    double step_us;
};

/* ---- opening ---- */

/* Returns steps between two looks, 0: off, -1: auto. */
static hd_status read_mode(const hd_engine_options *o, int64_t *look, hd_err *err) {
    const char *text = o->rebalance ? o->rebalance : "off";
    char *end = NULL;
    *look = strcmp(text, "auto") == 0 ? -1 : 0;
    if (*look || strcmp(text, "off") == 0) return HD_OK;
    *look = strtol(text, &end, 10);
    if (*text >= '0' && *text <= '9' && *end == '\0' && *look >= 1 && *look <= INT32_MAX) {
        return HD_OK;
    }
    return HD_FAIL(err, HD_EINVAL,
                   "rebalance is '%s'; must be off, auto or a number of steps above 0", text);
}

hd_status engine_rebalance_check(const hd_engine *e, const hd_engine_options *o, hd_err *err) {
    int64_t look;
    HD_TRY(read_mode(o, &look, err));
    if (!look) return HD_OK;
    if (e->parallel.ep > 1 && e->parallel.dwdp > 1) {
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "experts do not move between groups of ranks that fetch them (dwdp)");
    }
    if (e->parallel.ep == 1) {
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "there is nothing to rebalance: experts are on one rank (ep is 1)");
    }
    if (e->spec->route.n_experts == 0) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "this model has no experts to rebalance");
    }
    return HD_OK;
}

bool engine_rebalance_is_on(const hd_engine_options *o) {
    return o->rebalance && strcmp(o->rebalance, "off") != 0;
}

/* Of one group. */
static size_t n_counts(const engine_rank *rank) {
    return (size_t)rank->rebalance->n * (size_t)rank->engine->spec->route.n_experts;
}

static hd_status list_layers(engine_rank *rank, engine_rebalance *b, hd_err *err) {
    const hd_model_spec *c = rank->engine->spec;
    const int32_t most = c->n_layers + hd_model_n_draft_layers(c, rank->weights);
    b->layers = calloc((size_t)most, sizeof *b->layers);
    if (!b->layers) return HD_FAIL(err, HD_ENOMEM, "no memory for %d layers", most);
    for (int32_t l = 0; l < most; l++) {
        if (hd_weights_packed_bytes(rank->weights, l)) b->layers[b->n++] = l;
    }
    const size_t groups = (size_t)rank->parallel.dp;
    b->rows = calloc(groups * n_counts(rank) + 1, sizeof *b->rows);
    b->told_bytes = sizeof(told_action) +
                    (size_t)hd_shard_slots(hd_weights_shard(rank->weights)) * sizeof(int32_t);
    b->told = calloc(1, b->told_bytes);
    if (b->rows && b->told) return HD_OK;
    return HD_FAIL(err, HD_ENOMEM, "no memory for the loads of %d layers", most);
}

hd_status engine_rebalance_open(engine_rank *rank, const hd_engine_options *o, hd_err *err) {
    const hd_engine *e = rank->engine;
    int64_t look;
    HD_TRY(read_mode(o, &look, err));
    if (!look || !engine_rank_leads(rank) || rank->parallel.ep == 1) return HD_OK;
    engine_rebalance *b = calloc(1, sizeof *b);
    rank->rebalance = b;
    if (!b) return HD_FAIL(err, HD_ENOMEM, "no memory to rebalance");
    b->flipping = -1;
    HD_TRY(list_layers(rank, b, err));
    if (rank->group) return HD_OK;
    const bool on_host = hd_device_is_host(rank->device);
    const hd_rebalance_options m = {
        .layers = b->n,
        .experts = e->spec->route.n_experts,
        .slots = hd_shard_slots(hd_weights_shard(rank->weights)),
        .ranks = rank->parallel.ep,
        .look = look > 0 ? (int32_t)look : AUTO_LOOK,
        .look_rows = look > 0 ? 0
                              : (int64_t)LOOK_RANK_ROWS * e->parallel.ep /
                                    hd_max_i32(1, e->spec->route.top_k),
        .always = look > 0,
        .horizon = HORIZON,
        .expert_bytes = b->n ? (double)hd_weights_expert_bytes(rank->weights, b->layers[0]) : 0,
        .max_bytes_per_s = on_host ? MOST_BYTES_PER_S : MOST_BYTES_PER_S_OF_GPUS,
        .share = STEP_SHARE,
        .initial_stays = on_host, /* in the mapped file */
        .split = e->split};
    return hd_rebalance_open(&b->machine, &m, err);
}

void engine_rebalance_close(engine_rank *rank) {
    engine_rebalance *b = rank->rebalance;
    if (!b) return;
    hd_rebalance_close(b->machine);
    free(b->layers);
    free(b->rows);
    free(b->told);
    free(b);
    rank->rebalance = NULL;
}

/* ---- actions ---- */

/* The rows of this group: those of all phases, drafts in layers of their own. */
static hd_status read_own_rows(engine_rank *rank, int64_t *rows, hd_err *err) {
    engine_rebalance *b = rank->rebalance;
    const hd_model_spec *c = rank->engine->spec;
    const int64_t experts = c->route.n_experts;
    HD_TRY(hd_model_runner_read_experts(rank->model_runner, rank->fresh_loads, err));
    memset(rows, 0, n_counts(rank) * sizeof *rows);
    for (int32_t i = 0; i < b->n; i++) {
        const bool draft = b->layers[i] >= c->n_layers;
        const int32_t first = draft ? HD_N_ROW_PHASES - 1 : 0;
        for (int32_t p = first; p < HD_N_ROW_PHASES; p++) {
            const int64_t *from =
                rank->fresh_loads + ((int64_t)p * c->n_layers + b->layers[i]) * experts;
            for (int64_t e = 0; e < experts; e++) rows[i * experts + e] += from[e];
        }
    }
    return HD_OK;
}

/* The rows of all groups, summed into the first part. */
static hd_status read_rows(engine_rank *rank, hd_err *err) {
    engine_rebalance *b = rank->rebalance;
    int64_t *rows = b->rows;
    const hd_rank_group *g = &rank->comm->groups[HD_GROUP_DP];
    const size_t n = n_counts(rank), own = (size_t)g->index * n;
    HD_TRY(read_own_rows(rank, rows + own, err));
    if (g->n > 1)
        HD_TRY(engine_leaders_gather(rank, rows, (size_t)g->n * n * sizeof *rows,
                                     own * sizeof *rows, n * sizeof *rows, err));
    for (size_t i = n; i < (size_t)g->n * n; i++) rows[i % n] += rows[i];
    if (b->machine) hd_rebalance_rows(b->machine, rows);
    return HD_OK;
}

static uint32_t version_of(const engine_rank *rank, int32_t layer) {
    return hd_weights_expert_map(rank->weights, layer)->version;
}

/* Carries out one action. HD_EPEER and HD_EDEVICE: the ranks cannot talk any more. */
static hd_status act(engine_rank *rank, const hd_rebalance_action *a, hd_err *err) {
    engine_rebalance *b = rank->rebalance;
    hd_model_runner *x = rank->model_runner;
    const int32_t layer = b->layers[a->layer];
    switch (a->what) {
    case HD_REBALANCE_NOTHING:
    case HD_REBALANCE_TO_PLAN: /* the first leader's alone */
        return HD_OK;
    case HD_REBALANCE_READ:
        return read_rows(rank, err);
    case HD_REBALANCE_TO_STAGE:
        return hd_model_runner_stage_expert(
            x, &(hd_expert_move){layer, a->expert, a->from, a->to}, err);
    case HD_REBALANCE_TO_VERIFY:
        return hd_model_runner_verify_map(x, layer, a->map, version_of(rank, layer), err);
    case HD_REBALANCE_TO_FLIP:
        return hd_model_runner_flip_map(x, layer, version_of(rank, layer), err);
    case HD_REBALANCE_TO_DROP:
        return hd_model_runner_drop_staged(x, layer, err);
    }
    return HD_OK;
}

/* The mean time of a step since the last call, which the machine weighs moves against. */
static double time_of_a_step(engine_rank *rank) {
    engine_rebalance *b = rank->rebalance;
    const int64_t steps = hd_sched_read_stats(rank->sched).steps;
    const int64_t ns = rank->totals.step_ns;
    if (steps >= b->steps + AUTO_LOOK || b->step_us <= 0) {
        if (steps > b->steps)
            b->step_us = (double)(ns - b->ns) / (double)(steps - b->steps) / 1e3;
        b->steps = steps;
        b->ns = ns;
    }
    return b->step_us;
}

static void publish_stats(engine_rank *rank) {
    const hd_rebalance_stats s = hd_rebalance_read_stats(rank->rebalance->machine);
    hd_rebalance_figures *t = &rank->totals.rebalance;
    *t = (hd_rebalance_figures){.on = true,
                                .state = hd_rebalance_state_names[s.state],
                                .plans = s.plans,
                                .flips = s.flips,
                                .moves = s.moves,
                                .interrupted = s.interrupted,
                                .bytes = s.moved_bytes,
                                .balancedness = s.balancedness,
                                .bound = s.bound,
                                .at_start = s.at_start,
                                .looks = s.looks,
                                .single_copies = s.single_copies,
                                .layers_left = s.layers_left};
    memcpy(t->why, rank->rebalance_err.msg, sizeof t->why - 1);
}

static hd_rebalance_action next_action(engine_rank *rank) {
    const hd_sched_stats sched = hd_sched_read_stats(rank->sched);
    const hd_rebalance_now now = {.steps = sched.steps,
                                  .rows = sched.rows,
                                  .ns = hd_now_ns(),
                                  .step_us = time_of_a_step(rank)};
    return hd_rebalance_next(rank->rebalance->machine, &now);
}

/* What all ranks do. */
static void set_action(engine_rank *rank) {
    engine_rebalance *b = rank->rebalance;
    b->action = next_action(rank);
    if (b->action.what == HD_REBALANCE_TO_PLAN) b->action = (hd_rebalance_action){0};
}

bool engine_rebalance_wants(engine_rank *rank) {
    const engine_rebalance *b = rank->rebalance;
    if (!b || rank->totals.ranks_lost || !rank->comm || hd_comm_ended(rank->comm)) return false;
    set_action(rank);
    return b->action.what != HD_REBALANCE_NOTHING;
}

/* Only this rank plans. */
static void plan(engine_rank *rank) {
    hd_rebalance *m = rank->rebalance->machine;
    while (next_action(rank).what == HD_REBALANCE_TO_PLAN) {
        const int64_t begun = hd_now_ns();
        hd_err err = {0};
        if (hd_rebalance_plan(m, &err) != HD_OK) rank->rebalance_err = err;
        hd_rebalance_spend(m, (double)(hd_now_ns() - begun) * 1e-3);
    }
}

static hd_status take_told(engine_rebalance *b, hd_err *err) {
    told_action t;
    memcpy(&t, b->told, sizeof t);
    if (!hd_is_within(t.what, HD_REBALANCE_NOTHING, HD_REBALANCE_TO_DROP) ||
        !hd_is_within(t.layer, 0, b->n - 1)) {
        return HD_FAIL(err, HD_EPEER, "told to do %d in layer %d with experts", t.what,
                       t.layer);
    }
    b->action = (hd_rebalance_action){(hd_rebalance_do)t.what,
                                      t.layer,
                                      t.expert,
                                      t.from,
                                      t.to,
                                      (const int32_t *)(const void *)(b->told + sizeof t)};
    return HD_OK;
}

/* All leaders learn the action of the first one. */
static hd_status tell(engine_rank *rank, hd_err *err) {
    engine_rebalance *b = rank->rebalance;
    const hd_rebalance_action *a = &b->action;
    if (rank->comm->groups[HD_GROUP_DP].n == 1) return HD_OK;
    if (b->machine) {
        const told_action t = {(int32_t)a->what, a->layer, a->expert, a->from, a->to};
        memcpy(b->told, &t, sizeof t);
        if (a->map) memcpy(b->told + sizeof t, a->map, b->told_bytes - sizeof t);
    }
    HD_TRY(engine_leaders_broadcast(rank, b->told, b->told_bytes, err));
    return b->machine ? HD_OK : take_told(b, err);
}

static void note_flip(engine_rank *rank) {
    engine_rebalance *b = rank->rebalance;
    b->flipping = b->layers[b->action.layer];
    b->version = version_of(rank, b->flipping);
}

/* Experts are still being copied: the machine asks for the same again before the next step, and the
 * others are told that nothing more is to be done. */
static bool ask_later(engine_rebalance *b, int64_t begun) {
    if (!b->machine) return true;
    hd_rebalance_spend(b->machine, (double)(hd_now_ns() - begun) * 1e-3);
    b->action = (hd_rebalance_action){0};
    return true;
}

/* Carries out the action and asks for the next one, if there is any. False: communication has ended,
 * and the ranks begin anew. */
static bool act_once(engine_rank *rank, bool *more) {
    engine_rebalance *b = rank->rebalance;
    hd_err err = {0};
    if (b->machine && b->action.what == HD_REBALANCE_TO_FLIP)
        note_flip(rank); /* whoever carries it out */
    hd_status st = tell(rank, &err);
    const hd_rebalance_action a = b->action;
    const int64_t begun = hd_now_ns();
    if (st == HD_OK) {
        st = act(rank, &a, &err);
        if (a.what == HD_REBALANCE_TO_FLIP && st != HD_OK)
            st = HD_EPEER; /* some have flipped */
    }
    *more = a.what != HD_REBALANCE_NOTHING;
    if (st == HD_EAGAIN) return ask_later(b, begun); /* all do */
    if (st != HD_OK) rank->rebalance_err = err;
    if (st == HD_EPEER || st == HD_EDEVICE) {
        engine_ranks_recover(rank, &err); /* interrupts the machine */
        return false;
    }
    b->flipping = -1;
    if (!b->machine || !*more) return true;
    if (a.what != HD_REBALANCE_READ)
        hd_rebalance_done(b->machine, st == HD_OK, (double)(hd_now_ns() - begun) * 1e-3);
    set_action(rank);
    return true;
}

bool engine_rebalance_step(engine_rank *rank) {
    bool ok = true, more = rank->order.moves && rank->rebalance;
    while (ok && more) ok = act_once(rank, &more);
    if (!rank->rebalance || !rank->rebalance->machine) return ok;
    if (ok) plan(rank);
    publish_stats(rank);
    return ok;
}

/* ---- after a failure, while no follower runs ---- */

/* Completes a flip that some ranks have made: every rank verified that it can. */
static hd_status complete_flips(hd_engine *e, int32_t layer, hd_err *err) {
    const hd_expert_map *newest = NULL;
    for (int32_t i = 0; i < e->n_ranks; i++) {
        const hd_expert_map *map = hd_weights_expert_map(e->ranks[i].weights, layer);
        if (!newest || map->version > newest->version) newest = map;
    }
    for (int32_t i = 0; i < e->n_ranks; i++) {
        if (hd_weights_expert_map(e->ranks[i].weights, layer)->version == newest->version) {
            continue;
        }
        HD_TRY(hd_weights_place_experts(e->ranks[i].weights, layer, newest->expert,
                                        e->ranks[i].stream, err));
    }
    return HD_OK;
}

hd_status engine_rebalance_recover(hd_engine *e, hd_err *err) {
    engine_rank *leader = &e->ranks[0];
    engine_rebalance *b = leader->rebalance;
    if (!b) return HD_OK;
    for (int32_t i = 0; i < b->n; i++) HD_TRY(complete_flips(e, b->layers[i], err));
    for (int32_t i = 0; i < e->n_ranks; i++) {
        hd_model_runner_forget_moves(e->ranks[i].model_runner);
    }
    b->action = (hd_rebalance_action){0};
    const bool flipped = b->flipping >= 0 && version_of(leader, b->flipping) > b->version;
    b->flipping = -1;
    hd_rebalance_interrupt(b->machine, flipped);
    return HD_OK;
}

/* ---- mail ---- */

void engine_rebalance_obey(engine_rank *rank, const engine_mail *in) {
    if (in->rebalance && rank->rebalance) hd_rebalance_force(rank->rebalance->machine);
}

hd_status hd_engine_rebalance(hd_engine *e, hd_err *err) {
    if (!e->n_ranks || !e->ranks[0].rebalance) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "start with --ep N and --rebalance auto or N");
    }
    pthread_mutex_lock(&e->lock);
    e->groups[0].mail.rebalance = true;
    engine_tell(e);
    pthread_mutex_unlock(&e->lock);
    return HD_OK;
}
