/* test_pace.c - steps of prompts that stay within a budget of time, on a simulated device whose rows take
 * the longer, the farther back they are in their sequence. */
#include "check.h"

#include <stdlib.h>

#include "base/checked.h"
#include "sched/pace.h"
#include "sched/sched.h"

enum { MS = 1000000, PAGE = 64, LONG = 60000, SHORT = 200, SEQS = 6, PAGES = 1200 };

/* ---- shares ---- */

static void a_prompt_leaves_others_their_part(void **state) {
    (void)state;
    static const struct {
        int32_t rows, n, wanted[4], got[4];
    } cases[] = {
        {100, 1, {500},              {100}           },
        {100, 2, {500, 500},         {50, 50}        },
        {100, 2, {500, 7},           {93, 7}         },
        {100, 2, {7, 500},           {7, 93}         },
        {100, 3, {500, 7, 500},      {60, 7, 33}     },
        {100, 4, {10, 500, 25, 40},  {10, 40, 25, 25}},
        {2,   3, {9, 9, 9},          {2, 0, 0}       },
        {100, 3, {1000000, 1000, 5}, {62, 33, 5}     },
    };
    for (size_t i = 0; i < HD_LEN(cases); i++) {
        sched_shares s = sched_shares_of(cases[i].rows, cases[i].wanted, cases[i].n);
        for (int32_t k = 0; k < cases[i].n; k++) {
            assert_int_equal(sched_shares_next(&s, cases[i].wanted[k]), cases[i].got[k]);
        }
    }
}

static void a_step_comes_to_take_the_budget(void **state) {
    (void)state;
    const double fixed = 3 * MS, row = 0.05 * MS;
    sched_pace p = {.budget_ns = 20 * MS};
    int32_t rows = 512;
    assert_int_equal(sched_pace_rows(&p), INT32_MAX);
    for (int i = 0; i < 40; i++) {
        sched_pace_took(&p, (int64_t)(fixed + row * rows), rows);
        sched_pace_took(&p, 1, 0); /* a step without prompts says nothing */
        rows = sched_pace_rows(&p);
    }
    assert_in_range(rows, 335, 341); /* 340 rows take 20 ms */
    p.budget_ns = 1;
    assert_int_equal(sched_pace_rows(&p), SCHED_PACE_LEAST);
    p.budget_ns = 0;
    assert_int_equal(sched_pace_rows(&p), INT32_MAX);
}

/* ---- a scheduler ---- */

typedef struct device {
    int64_t now, longest;          /* step since the last reset */
    int64_t first_token[SEQS + 1]; /* of each request, by its id */
    int32_t ended, prompt_rows, most_rows;
} device;

static hd_status run(void *ctx, const hd_page_copy *copies, int32_t n_copies,
                     const hd_seq_input *inputs, int32_t n, hd_seq_output *outputs,
                     hd_err *err) {
    device *d = ctx;
    int64_t took = 2 * MS;
    int32_t rows = 0;
    (void)copies, (void)n_copies, (void)err;
    for (int32_t i = 0; i < n; i++) {
        took += inputs[i].n * (int64_t)(20000 + 10 * inputs[i].start);
        rows += inputs[i].n;
        outputs[i] = (hd_seq_output){
            .step = {.tokens = {7}, .n_tokens = inputs[i].n_sample > 0}
        };
    }
    d->now += took;
    d->longest = hd_max_i64(d->longest, took);
    d->most_rows = hd_max_i32(d->most_rows, rows);
    return HD_OK;
}

static void slot_assigned(void *ctx, uint64_t id, int32_t slot, const int32_t *tokens,
                          int32_t n) {
    (void)ctx, (void)id, (void)slot, (void)tokens, (void)n;
}

static void slot_released(void *ctx, uint64_t id, int32_t slot) {
    (void)ctx, (void)id, (void)slot;
}

static void event(void *ctx, const hd_sched_event *e) {
    device *d = ctx;
    if (e->step.n_tokens && !d->first_token[e->id]) d->first_token[e->id] = d->now;
    d->ended += e->step.finish_reason == HD_FINISH_LENGTH;
}

static hd_sched *open_sched(device *d, int64_t prompt_ns) {
    const hd_sched_options o = {
        .cache = {.page_tokens = PAGE,
                  .n_pages = {PAGES, 0},
                  .max_seqs = SEQS,
                  .seq_pages = LONG / PAGE + 2},
        .step_rows = 512 + SEQS * HD_MAX_STEP_TOKENS,
        .chunk_rows = 512,
        .prompt_ns = prompt_ns,
        .queue_limit = 20,
        .max_positions = LONG + 100
    };
    const hd_runner runner = {.ctx = d, .run = run};
    const hd_sched_hooks hooks = {.ctx = d,
                                  .slot_assigned = slot_assigned,
                                  .slot_released = slot_released,
                                  .event = event};
    hd_sched *s;
    hd_err err = {0};
    if (hd_sched_open(&s, &o, &runner, &hooks, &err) != HD_OK) fail_msg("%s", err.msg);
    return s;
}

static void submit(hd_sched *s, uint64_t id, int32_t n, int32_t max_new) {
    int32_t *prompt = malloc((size_t)n * sizeof *prompt);
    for (int32_t i = 0; i < n; i++) prompt[i] = (int32_t)id * 1000 + i % 997;
    const hd_sched_request r = {.id = id, .prompt = prompt, .n_prompt = n, .max_new = max_new};
    assert_int_equal(hd_sched_submit(s, &r, NULL), HD_OK);
    free(prompt);
}

/* A long prompt beside an answer; in its middle a short prompt arrives. Returns the longest step from
 * then on, and until the short one's first token. */
static int64_t longest_step(int64_t budget, int64_t *first_token) {
    device d = {0};
    hd_sched *s = open_sched(&d, budget);
    submit(s, 1, 30, 2000);
    hd_sched_step(s, d.now, NULL);
    submit(s, 2, LONG, 3);
    for (int i = 0; i < 60; i++) hd_sched_step(s, d.now, NULL);
    const int64_t came = d.now;
    submit(s, 3, SHORT, 5);
    d.longest = 0;
    while (d.ended < 3) hd_sched_step(s, d.now, NULL);
    *first_token = d.first_token[3] - came;
    assert_true(d.first_token[2] > d.first_token[3]);
    hd_sched_close(s);
    return d.longest;
}

static void gaps_stay_within_the_budget(void **state) {
    (void)state;
    int64_t first_token;
    assert_true(longest_step(0, &first_token) > 250 * (int64_t)MS);
    assert_true(first_token > 500 * (int64_t)MS);
    for (int64_t budget = 20 * (int64_t)MS; budget <= 80 * (int64_t)MS; budget *= 2) {
        assert_true(longest_step(budget, &first_token) < budget * 3 / 2);
        assert_true(first_token < 8 * budget);
    }
}

/* Where nobody waits, chunks are as long as they may be. */
static void one_request_alone_has_no_bound(void **state) {
    (void)state;
    device d = {0};
    hd_sched *s = open_sched(&d, MS);
    submit(s, 1, 20000, 3);
    while (d.ended < 1) hd_sched_step(s, d.now, NULL);
    assert_int_equal(d.most_rows, 512);
    hd_sched_close(s);
}

int test_pace(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_prompt_leaves_others_their_part),
        cmocka_unit_test(a_step_comes_to_take_the_budget),
        cmocka_unit_test(gaps_stay_within_the_budget),
        cmocka_unit_test(one_request_alone_has_no_bound),
    };
    return cmocka_run_group_tests_name("pace", tests, NULL, NULL);
}
