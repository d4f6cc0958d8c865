/* test_answers.c - output of the shipped model through the public API: deltas, tool calls,
 * stop strings, several choices. */
#include "check.h"

#include <stdio.h>
#include <string.h>

#include "fakes/engine_rig.h"

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
    hd_request g = {.size = sizeof g, .messages = SUM, .thinking = 1, .max_tokens = 300};
    rig_answer a, b;
    rig_run(e, &g, &a);
    assert_true(holds(&a.reasoning, "So 347 + 586 = 933"));
    assert_false(holds(&a.reasoning, "think>"));
    assert_true(a.content.n == 15 && memcmp(a.content.data, "347 + 586 = 933", 15) == 0);
    assert_int_equal(a.end.step.finish_reason, HD_FINISH_STOP);
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
    hd_request g = {.size = sizeof g,
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
    g.tool_choice = "none"; /* then the tools are not rendered */
    rig_run(e, &g, &a);
    assert_true(a.calls.n == 0 && a.end.prompt_tokens < told);
    rig_deinit(&a);
    hd_engine_close(e);
}

static void stops_see_reasoning_but_no_markup(void **state) {
    (void)state;
    hd_engine *e = rig_open("cpu", NULL);
    const char *stop = "write 3, carry";
    hd_request g = {.size = sizeof g,
                    .messages = SUM,
                    .thinking = 1,
                    .max_tokens = 300,
                    .draft_tokens = 3,
                    .stop = &stop,
                    .n_stop = 1};
    rig_answer a;
    rig_run(e, &g, &a);
    assert_true(a.end.step.finish_reason == HD_FINISH_STOP && a.content.n == 0);
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

/* Each step's drafts are counted in every event; drafts behind a stop are not accepted. */
static void drafts_are_counted_up_to_the_end(void **state) {
    (void)state;
    static const char *const stops[] = {"+", "347", "= 9", "933\n", "So "};
    hd_engine *e = rig_open("cpu", NULL);
    int32_t behind = 0;
    for (size_t i = 0; i < HD_LEN(stops); i++) {
        hd_request g = {.size = sizeof g,
                        .messages = SUM,
                        .thinking = 1,
                        .max_tokens = 300,
                        .draft_tokens = 7,
                        .stop = &stops[i],
                        .n_stop = 1};
        rig_answer a;
        rig_run(e, &g, &a);
        assert_true(a.end.drafted > 0 && a.end.accepted > 0);
        /* A step adds its accepted drafts and one more token, unless a stop comes before. */
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
    hd_request g = {.size = sizeof g,
                    .messages = USER("Tell me a story."),
                    .thinking = -1,
                    .max_tokens = 24,
                    .temperature = 1,
                    .seed = 11,
                    .n = N};
    rig_answer many[N], one;
    rig_run(e, &g, many);
    hd_engine_stats stats;
    hd_engine_read_stats(e, &stats);
    hd_engine_flush(e);
    g.n = 0;
    for (int i = 0; i < N; i++) {
        rig_run(e, &g, &one);
        rig_same(&many[i], &one);
        rig_deinit(&one);
        g.seed++;
    }
    for (int i = 0; i < N; i++) rig_deinit(&many[i]);
    hd_engine_close(e);
}

/* Sixteen choices, each cut at its own stop string, which does not end at a token's end. */
static void many_answers_stop_where_lone_ones_do(void **state) {
    (void)state;
    enum { N = 16 };
    static const char *const stops[] = {"e t", ". T", "he s", "d t", "s a"};
    hd_engine *e = rig_open("cpu", &(hd_engine_options){.max_running = 5, .kv_tokens = 1500});
    hd_request g = {.size = sizeof g,
                    .messages = USER("Tell me a story."),
                    .thinking = -1,
                    .max_tokens = 40,
                    .temperature = 1,
                    .seed = 3,
                    .stop = stops,
                    .n_stop = HD_LEN(stops),
                    .draft_tokens = 3,
                    .n = N};
    static rig_answer many[N], one;
    int32_t stopped = 0;
    rig_run(e, &g, many);
    g.n = 0;
    g.draft_tokens = 0;
    for (int i = 0; i < N; i++) {
        rig_run(e, &g, &one);
        rig_same(&many[i], &one);
        for (size_t k = 0; k < HD_LEN(stops); k++) assert_false(holds(&one.content, stops[k]));
        stopped += *one.stop_text != '\0';
        rig_deinit(&one);
        rig_deinit(&many[i]);
        g.seed++;
    }
    assert_true(stopped >= N / 2);
    hd_engine_close(e);
}

typedef struct listed {
    int32_t n;
    float logprobs[128];
    hd_alternative top[128][4];
} listed;

static void list(hd_engine *e, const hd_request *g, listed *out) {
    hd_event event;
    out->n = 0;
    assert_true(hd_engine_submit(e, g, NULL, NULL, 0) != 0);
    while (hd_engine_poll(e, &event, -1)) {
        for (int32_t i = 0; i < event.step.n_tokens; i++, out->n++) {
            assert_true(event.step.n_top == 4 && out->n < 128);
            out->logprobs[out->n] = event.step.logprobs[i];
            memcpy(out->top[out->n], event.step.top + 4 * i, sizeof out->top[0]);
        }
    }
}

/* Log-probabilities and alternatives are the same to the bit with drafts, with sampling and
 * under a response format. */
static void drafts_change_no_probability(void **state) {
    (void)state;
    static listed plain, drafted;
    hd_engine *e = rig_open("cpu", NULL);
    for (int i = 0; i < 4; i++) {
        hd_request g = {.size = sizeof g,
                        .messages = SUM,
                        .thinking = 1,
                        .max_tokens = 60,
                        .max_reasoning = i == 3 ? 5 : 0,
                        .response_format = i == 3 ? HD_FORMAT_REGEX : HD_FORMAT_FREE,
                        .format_text = i == 3 ? "[0-9]{20,30}" : NULL,
                        .temperature = i ? 1.0f : 0.0f,
                        .repetition_penalty = i == 2 ? 1.2f : 0,
                        .top_logprobs = 4,
                        .seed = 1};
        list(e, &g, &plain);
        g.draft_tokens = 5;
        list(e, &g, &drafted);
        assert_true(plain.n == drafted.n && plain.n > 10);
        const size_t n = (size_t)plain.n;
        assert_memory_equal(plain.logprobs, drafted.logprobs, n * sizeof plain.logprobs[0]);
        assert_memory_equal(plain.top, drafted.top, n * sizeof plain.top[0]);
    }
    hd_engine_close(e);
}

/* The engine's limit, and that of the options. */
static void alternatives_have_a_limit(void **state) {
    (void)state;
    char why[600] = "";
    hd_engine *e = rig_open("cpu", &(hd_engine_options){.max_logprobs = 40});
    hd_request g = {.size = sizeof g, .text = "x", .max_tokens = 3, .top_logprobs = 41};
    assert_int_equal(hd_engine_submit(e, &g, NULL, why, sizeof why), 0);
    assert_non_null(strstr(why, "top_logprobs is 41; this engine gives at most 40"));
    g.top_logprobs = 40;
    assert_true(hd_engine_submit(e, &g, NULL, NULL, 0) != 0);
    hd_event event;
    while (hd_engine_poll(e, &event, -1)) {
        assert_int_equal(event.step.n_top, 40);
        for (int32_t i = 0; i < event.step.n_tokens * 40; i++) {
            assert_true(event.step.top[i].token >= 0);
        }
    }
    hd_engine_close(e);
    static const int32_t wrong[] = {-1, HD_MAX_ALTERNATIVES + 1, INT32_MAX};
    for (size_t i = 0; i < HD_LEN(wrong); i++) {
        const hd_engine_options o = {
            .size = sizeof o, .model_dir = TINY, .backend = "cpu", .max_logprobs = wrong[i]};
        assert_int_equal(hd_engine_open(&e, &o, why, sizeof why), HD_EINVAL);
        assert_non_null(strstr(why, "must be 0 to 512"));
    }
}

/* Cancelled after any number of events, also before the first and behind the last, a choice
 * is a prefix of the full one, ends once, and leaves nothing behind. */
static void a_cancel_may_come_at_any_moment(void **state) {
    (void)state;
    hd_engine *e = rig_open("cpu", NULL);
    hd_request g = {.size = sizeof g,
                    .messages = SUM,
                    .thinking = 1,
                    .max_tokens = 40,
                    .draft_tokens = 2,
                    .n = 2,
                    .temperature = 1};
    rig_answer whole[2], a[2];
    rig_run(e, &g, whole);
    for (int32_t after = 0; after <= whole[0].n_events + whole[1].n_events;
         after += is_brief() ? 8 : 1) {
        hd_event event;
        memset(a, 0, sizeof a);
        const uint64_t id = hd_engine_submit(e, &g, NULL, NULL, 0);
        for (int32_t n = 0;; n++) {
            if (n == after) hd_engine_cancel(e, id);
            if (!hd_engine_poll(e, &event, -1)) break;
            rig_take(&a[event.choice], &event);
        }
        hd_engine_cancel(e, id);
        for (int i = 0; i < 2; i++) {
            assert_int_equal(a[i].n_ends, 1);
            assert_true(a[i].end.step.finish_reason == HD_FINISH_ABORT ||
                        a[i].end.step.finish_reason == whole[i].end.step.finish_reason);
            assert_true(a[i].tokens.n <= whole[i].tokens.n);
            if (a[i].tokens.n) {
                assert_memory_equal(a[i].tokens.ids, whole[i].tokens.ids,
                                    a[i].tokens.n * sizeof(int32_t));
            }
            rig_deinit(&a[i]);
        }
        hd_engine_stats stats;
        hd_engine_read_stats(e, &stats);
        assert_true(stats.running == 0 && stats.waiting == 0);
    }
    for (int i = 0; i < 2; i++) rig_deinit(&whole[i]);
    hd_engine_close(e);
}

int test_answers(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_answer_comes_in_parts),
        cmocka_unit_test(calls_are_parts),
        cmocka_unit_test(stops_see_reasoning_but_no_markup),
        cmocka_unit_test(drafts_are_counted_up_to_the_end),
        cmocka_unit_test(answers_are_those_of_lone_requests),
        cmocka_unit_test(many_answers_stop_where_lone_ones_do),
        cmocka_unit_test(drafts_change_no_probability),
        cmocka_unit_test(alternatives_have_a_limit),
        cmocka_unit_test(a_cancel_may_come_at_any_moment),
    };
    return cmocka_run_group_tests_name("answers", tests, NULL, NULL);
}
