/* test_simulation.c - millions of scheduler events in the simulated world, by seed.
 *
 * Each seed draws a configuration, habits and faults, acts for a while, and then turns
 * faults off. A failure prints the one command that runs its seed again. HD_SIM_SEEDS=N runs
 * the first N seeds instead of the usual number, HD_SIM_SEED=N only that one. */
#include "check.h"

#include <inttypes.h>
#include <stdlib.h>

#include "fakes/sched_world.h"

enum { SHORTEST = 200, LONGEST = 8000, REPEATED = 20, CHECK_EVERY = 64 };

static uint64_t usual_seeds(void) {
    return is_brief() ? 20 : is_long() ? 600 : 150;
}

static int open_world(void **state) {
    *state = calloc(1, sizeof(world));
    return *state ? 0 : -1;
}

/* Runs also after a failed test, with the scheduler still open. */
static int close_world(void **state) {
    world *w = *state;
    if (w->sched) {
        print_error("again: HD_SIM_SEED=%" PRIu64 " build/hadal_test simulation\n", w->seed);
        world_close(w);
    }
    free(w);
    return 0;
}

static uint64_t from_environment(const char *name, uint64_t standard) {
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 10) : standard;
}

/* Runs a seed and leaves the world open, so that its statistics can be read. */
static void run_seed(world *w, uint64_t seed) {
    const int32_t steps = SHORTEST + (int32_t)(seed * 7919 % (LONGEST - SHORTEST));
    world_draw(w, seed);
    world_open(w);
    for (int32_t i = 0; i < steps; i++) {
        world_act(w);
        if (i % CHECK_EVERY == 0 || w->failed) world_check_cache(w);
    }
    world_heal(w);
}

typedef struct totals {
    int64_t events, steps, hits, copies, retracted, accepted, scored, followed, skipped,
        rebuilds;
    int64_t unread, declined, evicted[HD_N_KV_GROUPS], finished[HD_FINISH_ERROR + 1];
} totals;

static void add_up(totals *t, const world *w) {
    const hd_cache_stats c = hd_cache_read_stats(hd_sched_cache(w->sched));
    t->events += w->events;
    t->steps += w->steps;
    t->hits += w->hits;
    t->scored += w->scored;
    t->followed += w->followed;
    t->skipped += w->skipped;
    t->rebuilds += w->rebuilds;
    t->unread += w->unread;
    t->copies += w->copies;
    t->retracted += w->retracted;
    t->accepted += w->accepted;
    t->declined += c.declined;
    for (int l = 0; l < HD_N_KV_GROUPS; l++) t->evicted[l] += c.evicted[l];
    for (int f = 0; f <= HD_FINISH_ERROR; f++) t->finished[f] += w->finished[f];
}

/* The seeds must have caused enough of every kind of event. */
static void check_totals(const totals *t, int64_t seeds) {
    print_message("%" PRId64 " events, %" PRId64 " steps, %" PRId64 " hits, %" PRId64
                  " retractions, %" PRId64 " evictions, %" PRId64 " window copies, %" PRId64
                  " rows skipped, %" PRId64 " windows rebuilt\n",
                  t->events, t->steps, t->hits, t->retracted,
                  t->evicted[HD_KV_FULL] + t->evicted[HD_KV_WINDOW], t->copies, t->skipped,
                  t->rebuilds);
    assert_true(t->events > seeds * 10000);
    assert_true(t->hits > seeds * 10 && t->retracted > seeds * 5 && t->copies > seeds * 10);
    assert_true(t->accepted > seeds * 100);
    assert_true(t->declined > seeds);
    assert_true(t->scored > seeds * 100 && t->followed > seeds * 10);
    assert_true(t->skipped > seeds * 50 && t->rebuilds > seeds);
    assert_true(t->unread > seeds);
    for (int l = 0; l < HD_N_KV_GROUPS; l++) assert_true(t->evicted[l] > seeds * 100);
    for (int f = HD_FINISH_STOP; f <= HD_FINISH_ERROR; f++) assert_true(t->finished[f] > seeds);
}

static void every_promise_holds(void **state) {
    world *w = *state;
    totals t = {0};
    const bool one = getenv("HD_SIM_SEED");
    const uint64_t first = from_environment("HD_SIM_SEED", 0);
    const uint64_t n = one ? 1 : from_environment("HD_SIM_SEEDS", usual_seeds());
    for (uint64_t seed = first; seed < first + n; seed++) {
        run_seed(w, seed);
        add_up(&t, w);
        world_close(w);
        if (seed % REPEATED) continue;
        const uint64_t digest = w->digest;
        const int64_t events = w->events;
        run_seed(w, seed);
        assert_true(w->digest == digest && w->events == events); /* a run is reproducible */
        world_close(w);
    }
    if (n >= usual_seeds()) check_totals(&t, (int64_t)n);
}

int test_simulation(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(every_promise_holds, open_world, close_world),
    };
    return cmocka_run_group_tests_name("simulation", tests, NULL, NULL);
}
