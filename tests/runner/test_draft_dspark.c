/* test_draft_dspark.c - blocks of drafts of the DSpark drafters of V4 and V4.1: the golden ones,
 * however the sequence before them was computed. */
#include "fakes/crowd.h"

#include <jansson.h>
#include <math.h>

#include "base/checked.h"

static const char *folder; /* in tests/golden */
static const float tolerance = 1e-3f;

static machine m;
static int32_t tokens[POSITIONS], n_tokens, block;
static json_t *cases;

static json_t *load(const char *name) {
    char path[128];
    json_error_t why;
    snprintf(path, sizeof path, "tests/golden/%s/%s", folder, name);
    json_t *j = json_load_file(path, 0, &why);
    if (!j) fail_msg("%s: %s", path, why.text);
    return j;
}

static int open_cases(void **state) {
    (void)state;
    json_t *list = load("tokens.json");
    n_tokens = (int32_t)json_array_size(list);
    assert_true(n_tokens < POSITIONS - HD_MAX_DRAFTS);
    for (int32_t i = 0; i < n_tokens; i++) {
        tokens[i] = (int32_t)json_integer_value(json_array_get(list, (size_t)i));
    }
    json_decref(list);
    json_t *drafts = load("drafts.json");
    block = (int32_t)json_integer_value(json_object_get(drafts, "block_size"));
    cases = json_incref(json_object_get(drafts, "cases"));
    json_decref(drafts);
    return 0;
}

static int close_cases(void **state) {
    (void)state;
    json_decref(cases);
    return 0;
}

static json_t *value_of(const json_t *one, const char *key, int32_t i) {
    return json_array_get(json_object_get(one, key), (size_t)i);
}

static void check_block(const json_t *one, const hd_seq_output *c, int32_t n) {
    assert_int_equal(c->status, HD_OK);
    assert_int_equal(c->step.tokens[c->step.n_tokens - 1],
                     json_integer_value(json_object_get(one, "token")));
    assert_int_equal(c->n_drafts, n);
    assert_int_equal(c->n_confidence, n);
    for (int32_t i = 0; i < n; i++) {
        assert_int_equal(c->drafts[i], json_integer_value(value_of(one, "drafts", i)));
        const double want = json_real_value(value_of(one, "confidence", i));
        assert_true(fabs((double)c->confidence[i] - want) <= (double)tolerance);
    }
}

/* Runs rows of the golden tokens in slot 0. */
static hd_seq_output run_rows(int32_t start, int32_t n, int32_t n_sample, int32_t want) {
    const hd_runner runner = hd_model_runner_interface(m.model_runner);
    const hd_seq_input w = {
        .tokens = tokens + start,
        .n = n,
        .start = start,
        .n_sample = n_sample,
        .after = n_sample ? -1 : tokens[start + n],
        .want_drafts = want,
        .pages = {m.pages[0][0], m.pages[1][0]},
        .n_pages = m.seq_pages
    };
    hd_seq_output c = {0};
    hd_err err = {0};
    if (runner.run(runner.ctx, NULL, 0, &w, 1, &c, &err) != HD_OK) fail_msg("%s", err.msg);
    return c;
}

static void enter_golden(int32_t n) {
    static const hd_request_sampling greedy = {.params = {.temperature = 0}};
    hd_model_runner_enter(m.model_runner, 0, &greedy, tokens, n, n);
}

/* Every block after one prefill of all that is before it. */
static void blocks_follow_a_prefill(void **state) {
    (void)state;
    open_machine_all_ids(&m, folder);
    for (size_t i = 0; i < json_array_size(cases); i += 3) {
        const json_t *one = json_array_get(cases, i);
        const int32_t n = (int32_t)json_integer_value(json_object_get(one, "position")) + 1;
        const int32_t want = 1 + (int32_t)i % HD_MAX_DRAFTS; /* more than a block, too */
        enter_golden(n);
        for (int32_t done = 0; done < n - 1;) {
            const int32_t rows = hd_min_i32(n - 1 - done, STEP_ROWS);
            run_rows(done, rows, 0, 0);
            done += rows;
        }
        const hd_seq_output c = run_rows(n - 1, 1, 1, want);
        check_block(one, &c, hd_min_i32(want, block));
    }
    close_machine(&m);
}

/* One token per step, with a block after each, which the next step must overwrite. */
static void blocks_leave_nothing_behind(void **state) {
    (void)state;
    open_machine_all_ids(&m, folder);
    enter_golden(1);
    size_t next = 0;
    for (int32_t at = 0; at < n_tokens && next < json_array_size(cases); at++) {
        const json_t *one = json_array_get(cases, next);
        const hd_seq_output c = run_rows(at, 1, 1, block);
        if (json_integer_value(json_object_get(one, "position")) != at) continue;
        check_block(one, &c, block);
        next++;
    }
    assert_int_equal(next, json_array_size(cases));
    close_machine(&m);
}

/* Steps that verify wrong drafts, whose rows later steps overwrite, and steps that want none. */
static void rejected_rows_leave_nothing_behind(void **state) {
    (void)state;
    open_machine_all_ids(&m, folder);
    const int32_t last = hd_min_i32(90, n_tokens - HD_MAX_DRAFTS);
    int32_t kept[POSITIONS];
    memcpy(kept, tokens, sizeof kept);
    enter_golden(1);
    for (int32_t at = 0; at < last; at++) {
        const int32_t wrong = at % 5;
        for (int32_t k = 1; k <= wrong; k++) tokens[at + k] = 2; /* never the argmax here */
        const hd_seq_output c = run_rows(at, 1 + wrong, 1 + wrong, at % 3 ? 0 : block);
        memcpy(tokens, kept, sizeof kept);
        for (size_t i = 0; c.n_drafts && c.step.n_tokens == 1; i++) {
            const json_t *one = json_array_get(cases, i);
            const int64_t position = json_integer_value(json_object_get(one, "position"));
            if (position == at) check_block(one, &c, block);
            if (position >= at) break;
        }
    }
    close_machine(&m);
}

int test_draft_dspark(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(blocks_follow_a_prefill),
        cmocka_unit_test(blocks_leave_nothing_behind),
        cmocka_unit_test(rejected_rows_leave_nothing_behind),
    };
    static const char *const folders[] = {"v4_dspark", "v41_small"};
    int failed = 0;
    for (size_t i = 0; i < HD_LEN(folders); i++) {
        char name[64];
        folder = folders[i];
        snprintf(name, sizeof name, "draft_dspark %s", folder);
        failed += cmocka_run_group_tests_name(name, tests, open_cases, close_cases);
    }
    return failed;
}
