/* test_answers.c - what the shipped model says, as the public interface gives it: parts, calls,
 * stop strings among them, several answers. */
#include "check.h"

#include <stdio.h>
#include <string.h>

#include "engine/engine_rig.h"

#define USER(text) "[{\"role\": \"user\", \"content\": \"" text "\"}]"
#define SUM        USER("What is 347 + 586?")

static const char tools_json[] =
    "[{\"type\": \"function\", \"function\": {\"name\": \"calculator\", \"description\": "
    "\"Evaluate an arithmetic expression.\", \"parameters\": {\"type\": \"object\", "
    "\"properties\": {\"expression\": {\"type\": \"string\", \"description\": \"The "
    "expression\"}}, \"required\": [\"expression\"]}}}]";

static bool holds(const hd_bytes *b, const char *text) {
    const size_t n = strlen(text);
    for (size_t i = 0; i + n <= b->n; i++) {
        if (memcmp(b->data + i, text, n) == 0) return true;
    }
    return false;
}

static void an_answer_comes_in_parts(void **state) {
    (void)state;
    hd_engine *e = rig_open("cpu", &(hd_engine_options){.max_running = 2});
    hd_generation g = {.size = sizeof g, .messages = SUM, .thinking = 1, .max_tokens = 300};
    rig_answer a, b;
    rig_run(e, &g, &a);
    assert_true(holds(&a.reasoning, "So 347 + 586 = 933"));
    assert_false(holds(&a.reasoning, "think>"));
    assert_true(a.content.n == 15 && memcmp(a.content.data, "347 + 586 = 933", 15) == 0);
    assert_int_equal(a.end.end, HD_END_STOP);
    assert_int_equal(a.end.stop_token, a.tokens.ids[a.tokens.n - 1]);
    assert_true(a.end.reasoning_tokens > 50 && a.end.reasoning_tokens < a.end.output_tokens);
    assert_true(a.end.admitted_ns >= a.end.submitted_ns && a.end.submitted_ns > 0);
    for (g.draft_tokens = 1; g.draft_tokens <= 7; g.draft_tokens += 3) { /* other slices */
        rig_run(e, &g, &b);
        assert_true(b.end.accepted > 0 && b.n_events < a.n_events);
        rig_same(&a, &b);
        rig_deinit(&b);
    }
    g.draft_tokens = 0;
    g.unparsed = true;
    rig_run(e, &g, &b);
    assert_int_equal(b.reasoning.n, 0);
    assert_true(b.content.n == a.reasoning.n + strlen("</think>") + a.content.n);
    rig_deinit(&a);
    rig_deinit(&b);
    hd_engine_close(e);
}

static void calls_are_parts(void **state) {
    (void)state;
    hd_engine *e = rig_open("cpu", NULL);
    hd_generation g = {.size = sizeof g,
                       .messages = USER("Compute 6221 + 11 with your tool."),
                       .tools = tools_json,
                       .thinking = -1,
                       .max_tokens = 200};
    rig_answer a;
    rig_run(e, &g, &a);
    assert_true(a.calls.n == strlen("calculator({\"expression\": \"6221 + 11\"})!"));
    assert_memory_equal(a.calls.data, "calculator({\"expression\": \"6221 + 11\"})!",
                        a.calls.n);
    assert_int_equal(a.content.n, 0);
    const int32_t told = a.end.prompt_tokens;
    rig_deinit(&a);
    g.tool_choice = "none"; /* then the model is not told of them */
    rig_run(e, &g, &a);
    assert_true(a.calls.n == 0 && a.end.prompt_tokens < told);
    rig_deinit(&a);
    hd_engine_close(e);
}

static void stops_see_reasoning_but_no_markup(void **state) {
    (void)state;
    hd_engine *e = rig_open("cpu", NULL);
    const char *stop = "write 3, carry";
    hd_generation g = {.size = sizeof g,
                       .messages = SUM,
                       .thinking = 1,
                       .max_tokens = 300,
                       .draft_tokens = 3,
                       .stop = &stop,
                       .n_stop = 1};
    rig_answer a;
    rig_run(e, &g, &a);
    assert_true(a.end.end == HD_END_STOP && a.content.n == 0);
    assert_false(holds(&a.reasoning, "write"));
    assert_true(holds(&a.reasoning, "7 + 6 = 13, "));
    rig_deinit(&a);
    stop = "933347"; /* the end of the reasoning and the beginning of the content */
    rig_run(e, &g, &a);
    assert_true(a.end.stop_token >= 0 && a.content.n > 0);
    rig_deinit(&a);
    stop = "think>";
    rig_run(e, &g, &a);
    assert_true(a.end.stop_token >= 0 && a.content.n > 0);
    rig_deinit(&a);
    hd_engine_close(e);
}

/* Each step's drafts are counted in every event, and none that lie behind a stop. */
static void drafts_are_counted_up_to_the_end(void **state) {
    (void)state;
    static const char *const stops[] = {"+", "347", "= 9", "933\n", "So "};
    hd_engine *e = rig_open("cpu", NULL);
    int32_t behind = 0;
    for (size_t i = 0; i < HD_LEN(stops); i++) {
        hd_generation g = {.size = sizeof g,
                           .messages = SUM,
                           .thinking = 1,
                           .max_tokens = 300,
                           .draft_tokens = 7,
                           .stop = &stops[i],
                           .n_stop = 1};
        rig_answer a;
        rig_run(e, &g, &a);
        assert_true(a.end.drafted > 0 && a.end.accepted > 0);
        /* A step gives its accepted drafts and one token more, unless a stop is before that. */
        const int32_t whole = a.end.accepted + a.n_events;
        assert_in_range(a.end.output_tokens, whole - 1, whole);
        behind += a.end.output_tokens < whole;
        rig_deinit(&a);
    }
    assert_true(behind > 0); /* some stop was found among drafts */
    hd_engine_close(e);
}

static void answers_are_those_of_lone_requests(void **state) {
    (void)state;
    enum { N = 4 };
    hd_engine *e = rig_open("cpu", &(hd_engine_options){.max_running = 3});
    hd_generation g = {.size = sizeof g,
                       .messages = USER("Tell me a story."),
                       .thinking = -1,
                       .max_tokens = 24,
                       .temperature = 1,
                       .seed = 11,
                       .answers = N};
    rig_answer many[N], one;
    rig_run(e, &g, many);
    hd_engine_stats stats;
    hd_engine_read_stats(e, &stats);
    hd_engine_flush(e);
    g.answers = 0;
    for (int i = 0; i < N; i++) {
        rig_run(e, &g, &one);
        rig_same(&many[i], &one);
        rig_deinit(&one);
        g.seed++;
    }
    for (int i = 0; i < N; i++) rig_deinit(&many[i]);
    hd_engine_close(e);
}

int test_answers(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_answer_comes_in_parts),
        cmocka_unit_test(calls_are_parts),
        cmocka_unit_test(stops_see_reasoning_but_no_markup),
        cmocka_unit_test(drafts_are_counted_up_to_the_end),
        cmocka_unit_test(answers_are_those_of_lone_requests),
    };
    return cmocka_run_group_tests_name("answers", tests, NULL, NULL);
}
