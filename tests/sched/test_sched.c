/* test_sched.c - requests and options that the scheduler refuses, and that a step allocates
 * nothing. */
#include "check.h"

#include <stdlib.h>
#include <string.h>

#include "allocations.h"
#include "base/checked.h"
#include "fakes/sched_world.h"

static const hd_sched_options tight = {
    .cache = {.page_tokens = 4,
              .lookback = 9,
              .n_pages = {70, 40},
              .n_snapshots = 20,
              .max_seqs = 4,
              .seq_pages = 60},
    .step_rows = 4 * HD_MAX_STEP_TOKENS + 8,
    .chunk_rows = 16,
    .queue_limit = 20,
    .max_positions = 170
};

static int open_world(void **state) {
    world *w = calloc(1, sizeof *w);
    if (!w) return -1;
    *state = w;
    w->o = tight;
    world_open(w);
    return 0;
}

static int close_world(void **state) {
    world_close(*state);
    free(*state);
    return 0;
}

static void what_cannot_run_is_refused(void **state) {
    world *w = *state;
    int32_t prompt[100] = {0};
    hd_sched_request r = {.id = 1, .prompt = prompt, .n_prompt = 100, .max_new = 71};
    hd_err err = {0};
    assert_int_equal(hd_sched_submit(w->sched, &r, &err), HD_EINVAL);
    assert_string_equal(err.msg,
                        "100 prompt tokens and 71 output tokens exceed the context of 170");
    r.n_prompt = 0;
    assert_int_equal(hd_sched_submit(w->sched, &r, NULL), HD_EINVAL);
    r.n_prompt = 5;
    r.max_new = 0;
    assert_int_equal(hd_sched_submit(w->sched, &r, NULL), HD_EINVAL);
    r.max_new = 5;
    for (int i = 0; i < w->o.queue_limit; i++) {
        assert_int_equal(hd_sched_submit(w->sched, &r, NULL), HD_OK);
    }
    assert_int_equal(hd_sched_submit(w->sched, &r, NULL), HD_EAGAIN);
}

static void what_cannot_work_does_not_open(void **state) {
    (void)state;
    hd_sched *s;
    hd_sched_options o = tight;
    o.step_rows = 3;
    assert_int_equal(hd_sched_open(&s, &o, &(hd_runner){0}, &(hd_sched_hooks){0}, NULL),
                     HD_EINVAL);
    o = tight;
    o.cache.n_pages[HD_KV_FULL] = 59; /* the longest sequence has 60 */
    assert_int_equal(hd_sched_open(&s, &o, &(hd_runner){0}, &(hd_sched_hooks){0}, NULL),
                     HD_EINVAL);
    o = tight;
    /* lookback, chunk and drafts are 32 tokens, plus part of a page before them */
    o.cache.n_pages[HD_KV_WINDOW] = 8;
    assert_int_equal(hd_sched_open(&s, &o, &(hd_runner){0}, &(hd_sched_hooks){0}, NULL),
                     HD_EINVAL);
}

static void submit(world *w, int32_t i) {
    client *c = world_free_client(w);
    int32_t prompt[100];
    for (int32_t t = 0; t < 100; t++) prompt[t] = t < 60 ? t % 5 : i;
    c->salt = 1;
    c->max_new = 60;
    c->priority = i % 3;
    c->drafts = i % 4;
    world_set_prompt(c, prompt, 50 + 4 * i);
    assert_int_equal(world_submit(w, c), HD_OK);
}

/* world_step() compares the allocation count before and after every step. Here is everything
 * that a step may do, and proof that the count counts. */
static void a_step_allocates_nothing(void **state) { /* FT30 */
    world *w = *state;
    const int64_t before = allocations();
    w->habits.wrong_draft = 3;
    for (int round = 0; round < 3; round++) {
        for (int32_t i = 0; i < 12; i++) submit(w, i);
        for (int i = 0; i < 30; i++) world_step(w);
        for (int i = 0; i < 3; i++) {
            if (w->clients[i].id) world_cancel(w, &w->clients[i]);
        }
        w->fail_one = true;
        world_step(w);
        world_heal(w);
        for (int32_t i = 0; round < 2 && i < 6; i++) submit(w, i); /* hits, then failure */
        for (int i = 0; round < 2 && i < 60; i++) world_step(w);
        w->fail_next = true;
        if (!hd_sched_idle(w->sched)) world_step(w);
        w->fail_next = false;
    }
    const hd_cache_stats c = hd_cache_read_stats(hd_sched_cache(w->sched));
    assert_true(allocations() > before); /* by submissions */
    assert_true(w->steps > 100 && w->hits > 0 && w->retracted > 0 && w->copies > 0);
    assert_true(w->accepted > 0 && w->drafted > w->accepted);
    for (int l = 0; l < HD_N_KV_GROUPS; l++) assert_true(c.evicted[l] > 0);
    assert_true(w->finished[HD_FINISH_ABORT] > 0 && w->finished[HD_FINISH_ERROR] > 1);
}

int test_sched(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(what_cannot_run_is_refused, open_world, close_world),
        cmocka_unit_test(what_cannot_work_does_not_open),
        cmocka_unit_test_setup_teardown(a_step_allocates_nothing, open_world, close_world),
    };
    return cmocka_run_group_tests_name("sched", tests, NULL, NULL);
}
