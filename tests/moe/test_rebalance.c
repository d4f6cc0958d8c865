/* test_rebalance.c - the state machine of moving experts, driven against ranks that check what
 * they are told: with refusals and losses at every point, and until it has come to rest. */
#include "check.h"

#include <stdlib.h>
#include <string.h>

#include "moe/rebalance.h"

enum { MOST_RANKS = 6, MOST_SLOTS = 24, MOST_EXPERTS = 16, LAYERS = 2 };

/* What a repair reaches of the bound, which knows no slots, with so few experts. */
static const double near = 0.8;

typedef struct rank_model {
    int32_t map[LAYERS][MOST_SLOTS];
    uint32_t version[LAYERS];
    bool received[LAYERS][MOST_EXPERTS]; /* beside those that it held at first */
    int32_t verified;                    /* a layer; -1: none */
    int32_t next[MOST_SLOTS];
} rank_model;

typedef struct world {
    hd_rebalance_options o;
    hd_rebalance *machine;
    rank_model ranks[MOST_RANKS];
    int64_t rows[LAYERS * MOST_EXPERTS], steps, ns;
    int64_t n_actions, n_lost, n_refused, n_plans;
    double plan_us; /* that a layer's plan takes */
    uint32_t random;
    const int32_t *script; /* results of the next actions; NULL: at random */
    int32_t n_script, hot;
    double faults; /* share of actions that go wrong at random */
} world;

/* What becomes of an action; LOST + k: communication ends when k ranks have carried it out. */
enum { FINE, REFUSED, LOST };

static uint32_t draw(world *w) {
    w->random = w->random * 1664525u + 1013904223u;
    return w->random >> 8;
}

static int32_t per_rank(const world *w) {
    return w->o.slots / w->o.ranks;
}

static void open_world(world *w, int32_t ranks, int32_t slots, int32_t experts) {
    hd_err err = {0};
    *w = (world){
        .o = {.layers = LAYERS,
              .experts = experts,
              .slots = slots,
              .ranks = ranks,
              .look = 4,
              .horizon = 100000,
              .expert_bytes = 1000,
              .initial_stays = true}
    };
    if (hd_rebalance_open(&w->machine, &w->o, &err) != HD_OK) fail_msg("%s", err.msg);
    for (int32_t r = 0; r < ranks; r++) {
        w->ranks[r].verified = -1;
        for (int32_t i = 0; i < LAYERS * slots; i++) {
            w->ranks[r].map[i / slots][i % slots] = i % slots % experts;
        }
    }
}

static bool has(const world *w, int32_t rank, int32_t layer, int32_t expert) {
    const int32_t first = rank * per_rank(w);
    for (int32_t s = first; s < first + per_rank(w); s++) {
        if (s % w->o.experts == expert || w->ranks[rank].map[layer][s] == expert) return true;
    }
    return w->ranks[rank].received[layer][expert];
}

/* ---- what ranks do ---- */

static void drop_unused(world *w, int32_t rank, int32_t layer) {
    rank_model *r = &w->ranks[rank];
    for (int32_t e = 0; e < w->o.experts; e++) {
        bool placed = false;
        for (int32_t s = rank * per_rank(w); s < (rank + 1) * per_rank(w); s++) {
            placed |= r->map[layer][s] == e;
        }
        r->received[layer][e] &= placed;
    }
}

static void stage(world *w, const hd_rebalance_action *a) {
    assert_true(has(w, a->from, a->layer, a->expert));
    assert_true(a->from != a->to);
    w->ranks[a->to].received[a->layer][a->expert] = true;
}

static void verify(world *w, int32_t rank, const hd_rebalance_action *a) {
    rank_model *r = &w->ranks[rank];
    memcpy(r->next, a->map, (size_t)w->o.slots * sizeof *r->next);
    for (int32_t s = rank * per_rank(w); s < (rank + 1) * per_rank(w); s++) {
        assert_true(has(w, rank, a->layer, r->next[s]));
    }
    r->verified = a->layer;
}

static void flip(world *w, int32_t rank, int32_t layer) {
    rank_model *r = &w->ranks[rank];
    assert_int_equal(r->verified, layer);
    r->verified = -1;
    memcpy(r->map[layer], r->next, (size_t)w->o.slots * sizeof *r->next);
    r->version[layer]++;
    drop_unused(w, rank, layer);
}

/* All ranks have the maps that the machine believes in force, and every expert has a slot. */
static void check(const world *w) {
    for (int32_t l = 0; l < LAYERS; l++) {
        bool seen[MOST_EXPERTS] = {0};
        const int32_t *map = hd_rebalance_map(w->machine, l);
        for (int32_t r = 0; r < w->o.ranks; r++) {
            assert_memory_equal(w->ranks[r].map[l], map, (size_t)w->o.slots * sizeof *map);
            assert_int_equal(w->ranks[r].version[l], w->ranks[0].version[l]);
        }
        for (int32_t s = 0; s < w->o.slots; s++) seen[map[s]] = true;
        for (int32_t e = 0; e < w->o.experts; e++) assert_true(seen[e]);
    }
}

/* As engine_rebalance_recover(): the flip that some made is completed. */
static void lose(world *w, const hd_rebalance_action *a, int32_t n_done) {
    const bool flips = a->what == HD_REBALANCE_TO_FLIP && n_done > 0;
    for (int32_t r = 0; flips && r < w->o.ranks; r++) {
        if (w->ranks[r].version[a->layer] < w->ranks[0].version[a->layer]) {
            flip(w, r, a->layer);
        }
    }
    for (int32_t r = 0; r < w->o.ranks; r++) {
        for (int32_t l = 0; l < LAYERS; l++) drop_unused(w, r, l);
        w->ranks[r].verified = -1;
    }
    w->n_lost++;
    hd_rebalance_interrupt(w->machine, flips);
}

static int32_t result_of(world *w) {
    const int64_t at = w->n_actions++;
    if (w->script) return at < w->n_script ? w->script[at] : FINE;
    if (draw(w) % 1000 >= (uint32_t)(w->faults * 1000)) return FINE;
    return REFUSED + (int32_t)(draw(w) % (uint32_t)(w->o.ranks + 1));
}

static void act(world *w, const hd_rebalance_action *a) {
    const int32_t what = result_of(w), n = w->o.ranks;
    const int32_t n_done = what >= LOST ? what - LOST : n; /* 0 .. n - 1 if lost */
    if (what == REFUSED && a->what != HD_REBALANCE_TO_FLIP) {
        w->n_refused++;
        hd_rebalance_done(w->machine, false, 0);
        return;
    }
    if (a->what == HD_REBALANCE_TO_STAGE && n_done > 0) stage(w, a);
    for (int32_t r = 0; r < n_done; r++) {
        if (a->what == HD_REBALANCE_TO_VERIFY) verify(w, r, a);
        if (a->what == HD_REBALANCE_TO_FLIP) flip(w, r, a->layer);
        for (int32_t l = 0; a->what == HD_REBALANCE_TO_DROP && l < LAYERS; l++) {
            drop_unused(w, r, l);
        }
    }
    if (what >= LOST) {
        lose(w, a, n_done);
    } else {
        hd_rebalance_done(w->machine, true, 1);
    }
}

static void run_step(world *w) {
    hd_err err = {0};
    w->steps++;
    w->ns += 1000000;
    for (int32_t l = 0; l < LAYERS; l++) {
        for (int32_t e = 0; e < w->o.experts; e++) {
            const bool hot = e == (w->hot + l) % w->o.experts || e == w->hot / 2;
            w->rows[l * w->o.experts + e] += hot ? 40 : 4;
        }
    }
    const hd_rebalance_now now = {.steps = w->steps, .ns = w->ns, .step_us = 1000};
    for (;;) {
        const hd_rebalance_action a = hd_rebalance_next(w->machine, &now);
        assert_in_range(a.layer, 0, LAYERS - 1);
        if (a.what == HD_REBALANCE_NOTHING) return;
        if (a.what == HD_REBALANCE_READ) {
            hd_rebalance_rows(w->machine, w->rows);
        } else if (a.what == HD_REBALANCE_TO_PLAN) {
            if (hd_rebalance_plan(w->machine, &err) != HD_OK) fail_msg("%s", err.msg);
            hd_rebalance_spend(w->machine, w->plan_us);
            w->n_plans++;
        } else {
            act(w, &a);
            check(w);
        }
    }
}

static void run_steps(world *w, int32_t n) {
    for (int32_t i = 0; i < n; i++) run_step(w);
}

/* ---- tests ---- */

/* Rows move to two other experts: the ranks come near the bound again, by few moves. */
static void it_follows_the_load(void **state) {
    (void)state;
    static const int32_t shapes[][3] = {
        {2, 10, 8 },
        {3, 12, 8 },
        {4, 20, 16},
        {6, 24, 16}
    };
    for (size_t i = 0; i < HD_LEN(shapes); i++) {
        world w;
        open_world(&w, shapes[i][0], shapes[i][1], shapes[i][2]);
        for (int32_t k = 0; k < 4; k++) {
            const int64_t before = hd_rebalance_read_stats(w.machine).moves;
            w.hot = 3 * k + 1;
            run_steps(&w, 80);
            const hd_rebalance_stats s = hd_rebalance_read_stats(w.machine);
            assert_int_equal(s.state, HD_REBALANCE_WATCH);
            assert_true(s.balancedness >= near * s.bound);
            assert_true(s.moves - before <= LAYERS * w.o.slots);
            assert_int_equal(s.interrupted, 0);
        }
        assert_true(hd_rebalance_read_stats(w.machine).plans > 0);
        hd_rebalance_close(w.machine);
    }
}

/* What gains less than it costs stays; an order moves it all the same. */
static void moves_must_pay(void **state) {
    (void)state;
    world w;
    open_world(&w, 4, 20, 16);
    hd_rebalance_close(w.machine);
    w.o.horizon = 1;
    w.o.expert_bytes = 1e12;
    assert_int_equal(hd_rebalance_open(&w.machine, &w.o, NULL), HD_OK);
    w.hot = 1;
    run_steps(&w, 100);
    assert_int_equal(hd_rebalance_read_stats(w.machine).plans, 0);
    assert_true(hd_rebalance_read_stats(w.machine).looks > 10);
    hd_rebalance_force(w.machine);
    run_steps(&w, 100);
    assert_int_equal(hd_rebalance_read_stats(w.machine).plans, 1);
    hd_rebalance_close(w.machine);
}

/* Rows that an exact split of copies evens out need no move; an even one needs some. */
static void the_split_is_known(void **state) {
    (void)state;
    for (int32_t k = HD_SPLIT_TURNS; k <= HD_SPLIT_FLOW; k++) {
        world w;
        open_world(&w, 2, 6, 4);
        hd_rebalance_close(w.machine);
        w.o.split = (hd_expert_split)k;
        assert_int_equal(hd_rebalance_open(&w.machine, &w.o, NULL), HD_OK);
        w.hot = 3; /* without a copy, as is no other hot one */
        run_steps(&w, 100);
        const hd_rebalance_stats s = hd_rebalance_read_stats(w.machine);
        const bool exact = k != HD_SPLIT_TURNS;
        assert_int_equal(s.plans > 0, !exact);
        assert_true(s.balancedness <= s.bound + 1e-9 && s.at_start <= s.balancedness + 1e-9);
        assert_int_equal(s.at_start > 0.999, exact);
        hd_rebalance_close(w.machine);
    }
    /* what no split of these places evens out still moves */
    world w;
    open_world(&w, 4, 20, 16);
    hd_rebalance_close(w.machine);
    w.o.split = HD_SPLIT_FLOW;
    assert_int_equal(hd_rebalance_open(&w.machine, &w.o, NULL), HD_OK);
    for (int32_t k = 0; k < 4; k++) {
        w.hot = 3 * k + 1;
        run_steps(&w, 80);
        const hd_rebalance_stats s = hd_rebalance_read_stats(w.machine);
        assert_true(s.balancedness >= near * s.bound && s.balancedness <= s.bound + 1e-9);
    }
    assert_true(hd_rebalance_read_stats(w.machine).plans > 0);
    hd_rebalance_close(w.machine);
}

/* Not more bytes than the limit. */
static void moves_are_slow(void **state) {
    (void)state;
    world w;
    open_world(&w, 4, 20, 16);
    hd_rebalance_close(w.machine);
    w.o.max_bytes_per_s = 500e3; /* an expert in two steps */
    assert_int_equal(hd_rebalance_open(&w.machine, &w.o, NULL), HD_OK);
    w.hot = 1;
    int64_t last = -10, before = 0;
    for (int32_t i = 0; i < 200; i++) {
        run_step(&w);
        const int64_t moves = hd_rebalance_read_stats(w.machine).moves;
        assert_true(moves <= before + 1);
        if (moves > before) {
            assert_true(w.steps >= last + 2);
            last = w.steps;
        }
        before = moves;
    }
    assert_true(before > 0);
    hd_rebalance_close(w.machine);
}

/* A share of a step's time is one layer's plan, or one expert, in four steps. */
static void a_step_pays_for_its_share(void **state) {
    (void)state;
    world w;
    open_world(&w, 4, 20, 16);
    hd_rebalance_close(w.machine);
    w.o.share = 0.001; /* 1 us; a stage takes 1 us */
    w.o.look = 40;
    w.plan_us = 4;
    assert_int_equal(hd_rebalance_open(&w.machine, &w.o, NULL), HD_OK);
    w.hot = 1;
    int64_t plans = 0, moves = 0, last = -10;
    for (int32_t i = 0; i < 400; i++) {
        run_step(&w);
        const int64_t m = hd_rebalance_read_stats(w.machine).moves;
        assert_true(w.n_plans + m <= plans + moves + 1);
        if (w.n_plans > plans) {
            assert_true(w.steps >= last + 4);
            last = w.steps;
        }
        plans = w.n_plans;
        moves = m;
    }
    assert_true(plans > LAYERS && moves > 0);
    assert_true(hd_rebalance_read_stats(w.machine).balancedness >= near);
    hd_rebalance_close(w.machine);
}

/* A refusal, or a loss before, between or after any ranks, at each of the first actions; then it
 * moves all the same. */
static void every_interruption_leaves_whole_maps(void **state) {
    (void)state;
    enum { DEPTH = 6, RESULTS = LOST + 3 };
    const int32_t depth = is_brief() ? 3 : DEPTH;
    int32_t n = 1;
    for (int32_t i = 0; i < depth; i++) n *= RESULTS;
    for (int32_t k = 0; k < n; k++) {
        int32_t script[DEPTH];
        for (int32_t i = 0, left = k; i < depth; i++, left /= RESULTS) {
            script[i] = left % RESULTS;
        }
        world w;
        open_world(&w, 3, 12, 8);
        w.script = script;
        w.n_script = depth;
        w.hot = 5;
        for (int32_t i = 0; i < 700 && (w.n_actions < depth || i < 100); i++) run_step(&w);
        hd_rebalance_force(w.machine);
        run_steps(&w, 40);
        const hd_rebalance_stats s = hd_rebalance_read_stats(w.machine);
        assert_true(w.n_actions >= depth);
        assert_int_equal(s.state, HD_REBALANCE_WATCH);
        assert_true(s.balancedness >= near * s.bound);
        hd_rebalance_close(w.machine);
    }
}

/* Faults at random, of which it always recovers. */
static void it_survives_many_faults(void **state) {
    (void)state;
    const int32_t n_steps = is_brief() ? 20000 : is_long() ? 10000000 : 100000;
    world w;
    open_world(&w, 4, 20, 16);
    w.faults = 0.1;
    w.random = 7;
    for (int32_t i = 0; i < n_steps; i++) {
        if (i % 40 == 0) {
            w.hot = (int32_t)(draw(&w) % 16u);
            hd_rebalance_force(w.machine);
        }
        run_step(&w);
    }
    assert_true(w.n_lost > 10 && w.n_refused > 10);
    w.faults = 0;
    hd_rebalance_force(w.machine);
    run_steps(&w, 40);
    const hd_rebalance_stats s = hd_rebalance_read_stats(w.machine);
    assert_true(s.balancedness >= near * s.bound);
    assert_true(s.flips > 100);
    hd_rebalance_close(w.machine);
}

static void bad_shapes_are_refused(void **state) {
    (void)state;
    const hd_rebalance_options good = {
        .layers = 1, .experts = 4, .slots = 6, .ranks = 2, .look = 1, .horizon = 1};
    hd_rebalance_options o[] = {good, good, good, good};
    o[0].slots = 3;
    o[1].ranks = 4;
    o[2].look = 0;
    o[3].ranks = 1;
    for (size_t i = 0; i < HD_LEN(o); i++) {
        hd_rebalance *m;
        hd_err err = {0};
        assert_int_equal(hd_rebalance_open(&m, &o[i], &err), HD_EINVAL);
        assert_null(m);
    }
}

int test_rebalance(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(it_follows_the_load),
        cmocka_unit_test(moves_must_pay),
        cmocka_unit_test(the_split_is_known),
        cmocka_unit_test(moves_are_slow),
        cmocka_unit_test(a_step_pays_for_its_share),
        cmocka_unit_test(every_interruption_leaves_whole_maps),
        cmocka_unit_test(it_survives_many_faults),
        cmocka_unit_test(bad_shapes_are_refused),
    };
    return cmocka_run_group_tests_name("rebalance", tests, NULL, NULL);
}
