/* test_calls.c - tool calls beside a response format, tool calls that open inside reasoning,
 * and names and arguments of calls, on models that would write anything. */
#define _GNU_SOURCE
#include "check.h"

#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "engine/engine.h"
#include "fakes/engine_rig.h"

#define USER(text) "[{\"role\": \"user\", \"content\": \"" text "\"}]"

/* Neither tool is strict; the models have not seen them. */
static const char two_tools[] =
    "[{\"type\": \"function\", \"function\": {\"name\": \"set_olive\", \"parameters\": "
    "{\"type\": "
    "\"object\", \"properties\": {\"mode\": {\"enum\": [\"fast\", \"slow\"]}, \"level\": "
    "{\"type\": "
    "\"integer\", \"minimum\": -3, \"maximum\": 40}}, \"required\": [\"mode\", \"level\"]}}}, "
    "{\"type\": \"function\", \"function\": {\"name\": \"set_oak\", \"parameters\": {\"type\": "
    "\"object\", \"properties\": {\"ok\": {\"type\": \"boolean\"}}, \"required\": [\"ok\"]}}}]";

/* Every second model or case under a sanitizer. */
static size_t apart(void) {
    return is_brief() ? 2 : 1;
}

static bool is_set_olive(const json_t *o) {
    const char *mode = json_string_value(json_object_get(o, "mode"));
    const json_int_t level = json_integer_value(json_object_get(o, "level"));
    return json_object_size(o) == 2 && mode &&
           (strcmp(mode, "fast") == 0 || strcmp(mode, "slow") == 0) &&
           json_is_integer(json_object_get(o, "level")) && level >= -3 && level <= 40;
}

/* Returns the number of calls; checks that each is of an offered tool and matches its
 * schema. */
static int32_t check_calls(const rig_answer *a) {
    const char *at = a->calls.data, *end = at + a->calls.n;
    int32_t n = 0;
    for (; at < end; n++) {
        const char *open = memchr(at, '(', (size_t)(end - at));
        json_error_t why;
        assert_non_null(open);
        json_t *o =
            json_loadb(open + 1, (size_t)(end - open - 1), JSON_DISABLE_EOF_CHECK, &why);
        const bool olive = open - at == 9 && memcmp(at, "set_olive", 9) == 0 && is_set_olive(o);
        const bool oak = open - at == 7 && memcmp(at, "set_oak", 7) == 0 &&
                         json_object_size(o) == 1 && json_is_boolean(json_object_get(o, "ok"));
        if (!olive && !oak) fail_msg("%.*s", (int)a->calls.n, a->calls.data);
        at = open + 1 + why.position;
        json_decref(o);
        assert_true(end - at >= 2 && memcmp(at, ")!", 2) == 0);
        at += 2;
    }
    return n;
}

/* Runs with drafts and without; the results must be equal. */
static void run_twice(hd_engine *e, hd_request g, rig_answer *a) {
    rig_answer drafted;
    g.draft_tokens = 0;
    rig_run(e, &g, a);
    g.draft_tokens = 3;
    rig_run(e, &g, &drafted);
    rig_same(a, &drafted);
    rig_deinit(&drafted);
}

static bool is_json(const hd_bytes *b) {
    json_t *o = json_loadb(b->data ? b->data : "", b->n, 0, NULL);
    const bool ok = json_object_size(o) == 1 && json_is_boolean(json_object_get(o, "done"));
    json_decref(o);
    return ok;
}

/* The first token of a text becomes as probable as a bias can make it. */
static void favour(const hd_engine *e, const char *text, hd_logit_bias *bias) {
    hd_ids ids = {0};
    assert_int_equal(hd_tokenizer_encode(hd_engine_tokenizer(e), text, strlen(text),
                                         HD_ENCODE_SPECIAL, &ids, NULL),
                     HD_OK);
    *bias = (hd_logit_bias){ids.ids[0], 100};
    hd_ids_deinit(&ids);
}

/* The model calls a tool or answers in the response format: one of the two in every run,
 * each in some run. */
static void calls_or_a_response_format(void **state) {
    (void)state;
    static const struct {
        const char *model, *opening;
        int thinking;
    } models[] = {
        {"models/tiny-v4", "\n\n",                         -1},
        {"models/tiny-v4", "\n\n",                         1 },
        {"models/tiny-v3", "<｜tool▁calls▁begin｜>", -1},
    };
    static const char schema[] =
        "{\"type\": \"object\", \"properties\": {\"done\": {\"type\": \"boolean\"}}, "
        "\"required\": [\"done\"]}";
    for (size_t i = 0; i < HD_LEN(models); i += apart()) {
        hd_engine *e = rig_open("cpu", &(hd_engine_options){.model_dir = models[i].model});
        int32_t n_formatted = 0, n_calls = 0, n_required = 0;
        for (uint64_t seed = 0; seed < 4; seed++) {
            hd_logit_bias bias; /* a model that was not trained for this does not choose */
            hd_request g = {.size = sizeof g,
                            .messages = USER("Please set the olive."),
                            .tools = two_tools,
                            .response_format = HD_FORMAT_JSON_SCHEMA,
                            .format_text = schema,
                            .thinking = models[i].thinking,
                            .max_reasoning = 8,
                            .max_tokens = 200,
                            .bias = &bias,
                            .n_bias = 1,
                            .one_call = true,
                            .seed = seed,
                            .temperature = seed < 2 ? 0 : 1.5f};
            rig_answer a;
            favour(e, seed % 2 ? models[i].opening : "{", &bias);
            g.max_reasoning = 8;
            g.tool_choice = seed == 3 ? "required" : seed == 1 ? NULL : "auto";
            run_twice(e, g, &a);
            if (a.end.step.finish_reason == HD_FINISH_STOP) {
                assert_true((a.calls.n > 0) != (a.content.n > 0));
                if (a.content.n) assert_true(is_json(&a.content));
                n_formatted += a.content.n > 0;
                n_calls += a.calls.n > 0;
                n_required += seed == 3;
                if (seed == 3) assert_true(check_calls(&a) == 1);
            }
            rig_deinit(&a);
        }
        if (!n_formatted || !n_calls || !n_required) {
            fail_msg("model %zu: %d formatted, %d calls, %d required", i, n_formatted, n_calls,
                     n_required);
        }
        hd_engine_close(e);
    }
}

/* The arguments of a required call match the schema of its tool, which is not strict. */
static void demanded_calls_keep_to_their_schema(void **state) {
    (void)state;
    static const char *const choices[] = {"required", "set_olive"};
    hd_engine *e = rig_open("cpu", NULL);
    for (size_t i = 0; i < 4; i++) {
        const hd_request g = {.size = sizeof g,
                              .messages = USER("Please set the olive."),
                              .tools = two_tools,
                              .tool_choice = choices[i % 2],
                              .one_call = true,
                              .thinking = i < 3 ? -1 : 1,
                              .max_reasoning = 10,
                              .max_tokens = 200,
                              .seed = i,
                              .temperature = i < 1 ? 0 : 1.8f};
        rig_answer a;
        run_twice(e, g, &a);
        assert_int_equal(a.end.step.finish_reason, HD_FINISH_STOP);
        assert_int_equal(check_calls(&a), 1);
        assert_true(i % 2 == 0 || memcmp(a.calls.data, "set_olive", 9) == 0);
        rig_deinit(&a);
    }
    hd_engine_close(e);
}

/* A model that prefers to open calls opens them inside its reasoning. That ends the
 * reasoning, and an offered tool is called. */
static void calls_open_inside_the_reasoning(void **state) {
    (void)state;
    static const struct {
        const char *model, *choice;
        hd_response_format form;
    } cases[] = {
        {"models/tiny-v4", "required",  HD_FORMAT_FREE},
        {"models/tiny-v4", "set_olive", HD_FORMAT_JSON},
        {"models/tiny-v4", NULL,        HD_FORMAT_JSON},
        {"models/tiny-v4", "auto",      HD_FORMAT_FREE},
    };
    for (size_t i = 0; i < HD_LEN(cases); i += apart()) {
        hd_engine *e = rig_open("cpu", &(hd_engine_options){.model_dir = cases[i].model});
        const bool held = cases[i].choice && strcmp(cases[i].choice, "auto") != 0;
        int32_t n_inside = 0;
        hd_logit_bias bias[2];
        favour(e, "<", &bias[0]);
        favour(e, "｜DSML｜", &bias[1]);
        for (uint64_t seed = 0; seed < 2; seed++) {
            hd_request g = {.size = sizeof g,
                            .messages = USER("Please set the olive."),
                            .tools = two_tools,
                            .tool_choice = cases[i].choice,
                            .response_format = cases[i].form,
                            .one_call = true,
                            .thinking = 1,
                            .max_tokens = held ? 160 : 50,
                            .bias = bias,
                            .n_bias = 2,
                            .seed = seed,
                            .temperature = 6};
            rig_answer a;
            run_twice(e, g, &a);
            assert_int_equal(a.content.n, 0);
            if (a.calls.n > 0) {
                n_inside++;
                assert_true(memcmp(a.calls.data, "set_olive(", 10) == 0 ||
                            memcmp(a.calls.data, "set_oak(", 8) == 0);
                assert_true(!a.reasoning.n ||
                            !memmem(a.reasoning.data, a.reasoning.n, "<｜DSML｜", 10));
            }
            if (held) {
                assert_int_equal(a.end.step.finish_reason, HD_FINISH_STOP);
                assert_int_equal(check_calls(&a), 1);
            }
            rig_deinit(&a);
        }
        if (n_inside < 1) fail_msg("case %zu: %d calls", i, n_inside);
        hd_engine_close(e);
    }
}

/* The first character of a name begins an offered name, also in calls that are not required. */
static void names_are_offered_ones(void **state) {
    (void)state;
    static const struct {
        const char *model, *first, *second;
    } models[] = {
        {"models/tiny-v4", "<",                            "｜DSML｜"                 },
        {"models/tiny-v3", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"},
    };
    for (size_t i = 0; i < HD_LEN(models); i += apart()) {
        hd_engine *e = rig_open("cpu", &(hd_engine_options){.model_dir = models[i].model});
        hd_logit_bias bias[2];
        int32_t n_calls = 0;
        favour(e, models[i].first, &bias[0]);
        favour(e, models[i].second, &bias[1]);
        for (uint64_t seed = 0; seed < 3; seed++) {
            const hd_request g = {.size = sizeof g,
                                  .messages = USER("Tell me a story."),
                                  .tools = two_tools,
                                  .thinking = -1,
                                  .max_tokens = 30,
                                  .bias = bias,
                                  .n_bias = 2,
                                  .seed = seed,
                                  .temperature = 6};
            rig_answer a;
            run_twice(e, g, &a);
            if (a.calls.n > 0) {
                n_calls++;
                if (memcmp(a.calls.data, "set_olive(", 10) &&
                    memcmp(a.calls.data, "set_oak(", 8)) {
                    fail_msg("%.*s", (int)a.calls.n, a.calls.data);
                }
            }
            rig_deinit(&a);
        }
        if (n_calls < 1) fail_msg("model %zu: %d calls", i, n_calls);
        hd_engine_close(e);
    }
}

int test_calls(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(calls_or_a_response_format),
        cmocka_unit_test(demanded_calls_keep_to_their_schema),
        cmocka_unit_test(calls_open_inside_the_reasoning),
        cmocka_unit_test(names_are_offered_ones),
    };
    return cmocka_run_group_tests_name("calls", tests, NULL, NULL);
}
