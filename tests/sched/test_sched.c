/* test_sched.c - requests and options that the scheduler refuses, steps for other attention
 * groups, and that a step allocates nothing. */
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
              .n_host = {0, 20},
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

/* ---- a request that was begun elsewhere ---- */

typedef struct begun {
    int32_t known[8], n_known; /* when it got its slot */
    int32_t rows, tokens, ends;
} begun;

static void take_slot(void *ctx, uint64_t id, int32_t slot, const int32_t *tokens, int32_t n) {
    begun *b = ctx;
    (void)id;
    (void)slot;
    assert_true(n <= (int32_t)HD_LEN(b->known));
    b->n_known = n;
    memcpy(b->known, tokens, (size_t)n * sizeof *tokens);
}

static void leave_slot(void *ctx, uint64_t id, int32_t slot) {
    (void)ctx;
    (void)id;
    (void)slot;
}

static void count_tokens(void *ctx, const hd_sched_event *event) {
    begun *b = ctx;
    b->tokens += event->step.n_tokens;
    b->ends += event->step.finish_reason == HD_FINISH_LENGTH;
}

static hd_status sample_one(void *ctx, const hd_page_copy *copies, int32_t n_copies,
                            const hd_seq_input *inputs, int32_t n_inputs,
                            hd_seq_output *outputs, hd_err *err) {
    begun *b = ctx;
    (void)copies;
    (void)n_copies;
    (void)err;
    assert_int_equal(n_inputs, 1);
    b->rows += inputs[0].n;
    outputs[0] = (hd_seq_output){
        .step = {.tokens = {7}, .n_tokens = 1}
    };
    return HD_OK;
}

static void output_that_is_there_is_continued(void **state) {
    (void)state;
    begun b = {0};
    hd_sched *s;
    const int32_t prompt[] = {1, 2, 3}, output[] = {4, 5};
    const hd_sched_hooks hooks = {.ctx = &b,
                                  .slot_assigned = take_slot,
                                  .slot_released = leave_slot,
                                  .event = count_tokens};
    hd_sched_request r = {.id = 1,
                          .prompt = prompt,
                          .n_prompt = 3,
                          .output = output,
                          .n_output = 2,
                          .max_new = 4};
    assert_int_equal(
        hd_sched_open(&s, &tight, &(hd_runner){.ctx = &b, .run = sample_one}, &hooks, NULL),
        HD_OK);
    assert_int_equal(hd_sched_submit(s, &r, NULL), HD_OK);
    for (int i = 0; i < 2; i++) assert_int_equal(hd_sched_step(s, 0, NULL), HD_OK);
    assert_true(hd_sched_idle(s));
    assert_int_equal(b.n_known, 5);
    for (int32_t i = 0; i < 5; i++) assert_int_equal(b.known[i], i + 1);
    assert_int_equal(b.rows, 6); /* all known tokens, then one */
    assert_true(b.tokens == 2 && b.ends == 1);
    r.n_output = 4;
    assert_int_equal(hd_sched_submit(s, &r, NULL), HD_EINVAL);
    hd_sched_close(s);
}

/* ---- steps of other attention groups ---- */

typedef struct joined {
    int32_t runs, inputs;
    hd_status answer;
} joined;

static hd_status join(void *ctx, const hd_page_copy *copies, int32_t n_copies,
                      const hd_seq_input *inputs, int32_t n_inputs, hd_seq_output *outputs,
                      hd_err *err) {
    joined *j = ctx;
    (void)copies;
    (void)inputs;
    (void)outputs;
    assert_int_equal(n_copies, 0);
    j->runs++;
    j->inputs += n_inputs;
    return j->answer == HD_OK || j->answer == HD_EAGAIN
               ? j->answer
               : HD_FAIL(err, j->answer, "another group failed");
}

/* Without requests a step runs for the others, and is not counted. */
static void a_scheduler_joins_steps_of_others(void **state) {
    (void)state;
    static const hd_status answers[] = {HD_OK, HD_EAGAIN, HD_EDEVICE};
    static const hd_status results[] = {HD_EAGAIN, HD_OK, HD_EDEVICE};
    joined j = {0};
    hd_sched *s;
    hd_sched_options o = tight;
    for (int joins = 0; joins < 2; joins++) {
        o.joins = joins;
        assert_int_equal(hd_sched_open(&s, &o, &(hd_runner){.ctx = &j, .run = join},
                                       &(hd_sched_hooks){0}, NULL),
                         HD_OK);
        for (size_t i = 0; i < HD_LEN(answers); i++) {
            j.answer = answers[i];
            assert_int_equal(hd_sched_step(s, 0, NULL), joins ? results[i] : HD_EAGAIN);
        }
        assert_int_equal(hd_sched_read_stats(s).steps, 0);
        assert_int_equal(j.runs, joins ? 3 : 0);
        assert_int_equal(j.inputs, 0);
        assert_true(hd_sched_idle(s));
        assert_int_equal(hd_sched_audit(s, NULL), HD_OK);
        hd_sched_close(s);
    }
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
        cmocka_unit_test(output_that_is_there_is_continued),
        cmocka_unit_test(a_scheduler_joins_steps_of_others),
        cmocka_unit_test_setup_teardown(what_cannot_run_is_refused, open_world, close_world),
        cmocka_unit_test(what_cannot_work_does_not_open),
        cmocka_unit_test_setup_teardown(a_step_allocates_nothing, open_world, close_world),
    };
    return cmocka_run_group_tests_name("sched", tests, NULL, NULL);
}
