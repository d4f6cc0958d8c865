/* test_constraint.c - constraints and reported values of a choice: response formats, forced
 * tool calls, reasoning budgets, top log-probabilities, prompt log-probabilities, accepted
 * drafts, expert loads. */
#include "check.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fakes/engine_rig.h"

#define USER(text) "[{\"role\": \"user\", \"content\": \"" text "\"}]"

static bool is(const hd_bytes *b, const char *text) {
    return b->n == strlen(text) && memcmp(b->data ? b->data : "", text, b->n) == 0;
}

static bool starts(const hd_bytes *b, const char *text) {
    return b->n >= strlen(text) && memcmp(b->data, text, strlen(text)) == 0;
}

/* ---- response formats ---- */

/* Every choice that ends by itself matches the response format, greedy or sampled, with
 * drafts and without; drafts change nothing. */
static void expect_format(hd_engine *e, hd_request g, bool (*valid)(const hd_bytes *)) {
    int32_t whole = 0;
    for (uint64_t seed = 0; seed < 3; seed++) {
        rig_answer plain, drafted;
        g.seed = seed;
        g.temperature = seed ? 1.5f : 0;
        g.draft_tokens = 0;
        rig_run(e, &g, &plain);
        g.draft_tokens = seed % 2 ? 7 : HD_DRAFTS_AUTO;
        rig_run(e, &g, &drafted);
        rig_same(&plain, &drafted);
        if (plain.end.step.finish_reason == HD_FINISH_STOP) {
            whole++;
            assert_true(valid(&plain.content));
        }
        rig_deinit(&plain);
        rig_deinit(&drafted);
    }
    if (!whole) fail_msg("no answer of form %d is whole", (int)g.response_format);
}

static json_t *parsed(const hd_bytes *b) {
    return json_loadb(b->data ? b->data : "", b->n, 0, NULL);
}

static bool is_person(const hd_bytes *b) {
    json_t *o = parsed(b);
    json_t *age = json_object_get(o, "age");
    const char *mood = json_string_value(json_object_get(o, "mood"));
    const bool ok = json_object_size(o) == 2 && json_is_integer(age) &&
                    json_integer_value(age) >= 0 && json_integer_value(age) <= 120 && mood &&
                    (strcmp(mood, "good") == 0 || strcmp(mood, "bad") == 0);
    json_decref(o);
    return ok;
}

static bool is_date(const hd_bytes *b) {
    int y, m, d;
    char text[16] = {0};
    if (b->n != 10) return false;
    memcpy(text, b->data, 10);
    return sscanf(text, "%4d-%2d-%2d", &y, &m, &d) == 3;
}

static bool is_choice(const hd_bytes *b) {
    return is(b, "yes") || is(b, "no") || is(b, "perhaps not");
}

static void choices_have_their_format(void **state) {
    (void)state;
    static const char schema[] =
        "{\"type\": \"object\", \"properties\": {\"age\": {\"type\": \"integer\", \"minimum\": "
        "0, \"maximum\": 120}, \"mood\": {\"enum\": [\"good\", \"bad\"]}}, \"required\": "
        "[\"age\", \"mood\"], \"additionalProperties\": false}";
    const char *choices[] = {"yes", "no", "perhaps not"};
    hd_engine *e = rig_open("cpu", &(hd_engine_options){.max_running = 2});
    for (int thinking = -1; thinking <= 1; thinking += 2) {
        hd_request g = {.size = sizeof g,
                        .messages = USER("What is 12 + 7?"),
                        .thinking = thinking,
                        .max_reasoning = 10,
                        .max_tokens = 70};
        g.response_format = HD_FORMAT_JSON_SCHEMA;
        g.format_text = schema;
        expect_format(e, g, is_person);
        g.response_format = HD_FORMAT_REGEX;
        g.format_text = "[0-9]{4}-[01][0-9]-[0-3][0-9]";
        expect_format(e, g, is_date);
        g.response_format = HD_FORMAT_CHOICE;
        g.choices = choices;
        g.n_choices = 3;
        expect_format(e, g, is_choice);
    }
    hd_engine_close(e);
}

/* Returns the acceptance of a choice's drafts. */
static double acceptance(hd_engine *e, const hd_request *g) {
    rig_answer a;
    rig_run(e, g, &a);
    assert_int_equal(a.end.step.finish_reason, HD_FINISH_STOP);
    const double share = (double)a.end.accepted / a.end.drafted;
    rig_deinit(&a);
    return share;
}

/* If a response format leaves few possibilities, drafts that match it are accepted, although
 * the model would generate something else without it. */
static void drafts_keep_to_the_format(void **state) {
    (void)state;
    static const char schema[] =
        "{\"type\": \"object\", \"properties\": {\"~id#\": {\"type\": \"integer\", "
        "\"minimum\": 0, \"maximum\": 99}, \"^mood$\": {\"enum\": [\"@good\", \"%bad\"]}, "
        "\"_ok_\": {\"type\": \"boolean\"}}, \"required\": [\"~id#\", \"^mood$\", \"_ok_\"], "
        "\"additionalProperties\": false}";
    const char *choice = "~^|~^|~^|~^|~^|~^|~^|~^|~^|~^|";
    hd_engine *e = rig_open("cpu", NULL);
    hd_request g = {.size = sizeof g,
                    .messages = USER("Tell me a story."),
                    .thinking = -1,
                    .max_tokens = 100,
                    .draft_tokens = 4,
                    .response_format = HD_FORMAT_CHOICE,
                    .choices = &choice,
                    .n_choices = 1};
    const double only = acceptance(e, &g);
    g.response_format = HD_FORMAT_JSON_SCHEMA;
    g.format_text = schema;
    const double person = acceptance(e, &g);
    if (only < 0.9 || person < 0.4) {
        fail_msg("%.2f of the only text's drafts stood, %.2f of an object's", only, person);
    }
    hd_engine_close(e);
}

/* A choice does not end before min_tokens while its response format allows more, and does
 * not choose tokens that would force it to. It ends where the format does; the same with
 * drafts. */
static void formats_wait_for_a_minimum(void **state) {
    (void)state;
    static const struct {
        hd_response_format form;
        const char *text;
        bool ends; /* before the minimum: its one text is shorter */
    } rows[] = {
        {HD_FORMAT_REGEX,       "a{2,60}",                                              false},
        {HD_FORMAT_REGEX,       "yes",                                                  true },
        {HD_FORMAT_CHOICE,      NULL,                                                   true },
        {HD_FORMAT_JSON_SCHEMA, "{\"const\": {\"a\": 1}}",                              true },
        {HD_FORMAT_JSON_SCHEMA,
         "{\"type\": \"array\", \"items\": {\"type\": \"boolean\"}, \"maxItems\": 30}", false},
        {HD_FORMAT_JSON_SCHEMA,
         "{\"type\": \"object\", \"properties\": {\"a\": {\"type\": \"string\", \"maxLength\": "
         "40}, "
         "\"b\": {\"type\": \"boolean\"}}, \"required\": [\"a\"]}",                     false},
        {HD_FORMAT_JSON_SCHEMA, "{\"enum\": [\"a\", \"abcdefghijklmnopqrstuvwxyz\"]}",  false},
        {HD_FORMAT_REGEX,       "a|(bc){1,40}|b[0-9]",                                  false},
    };
    enum { LEAST = 12 };
    const char *choices[] = {"yes", "no"};
    hd_engine *e = rig_open("cpu", NULL);
    for (size_t i = 0; i < 2 * HD_LEN(rows); i++) {
        hd_request g = {.size = sizeof g,
                        .messages = USER("What is 12 + 7?"),
                        .thinking = -1,
                        .max_tokens = 100,
                        .response_format = rows[i / 2].form,
                        .format_text = rows[i / 2].text,
                        .choices = choices,
                        .n_choices = 2,
                        .temperature = i % 2 ? 1.5f : 0,
                        .min_tokens = LEAST};
        rig_answer plain, drafted;
        rig_run(e, &g, &plain);
        g.draft_tokens = 5;
        rig_run(e, &g, &drafted);
        rig_same(&plain, &drafted);
        if (plain.end.step.finish_reason != HD_FINISH_STOP)
            fail_msg("row %zu: %s", i, plain.why);
        if ((plain.end.output_tokens - 1 < LEAST) != rows[i / 2].ends) {
            fail_msg("row %zu: %d tokens", i, plain.end.output_tokens);
        }
        rig_deinit(&plain);
        rig_deinit(&drafted);
    }
    hd_engine_close(e);
}

/* min_tokens applies in the reasoning, with a reasoning budget and without a response
 * format. */
static void a_minimum_holds_beside_a_bound(void **state) {
    (void)state;
    hd_engine *e = rig_open("cpu", NULL);
    hd_request g = {.size = sizeof g,
                    .messages = USER("What is 12 + 7?"),
                    .thinking = 1,
                    .max_reasoning = 5,
                    .max_tokens = 60,
                    .min_tokens = 50};
    rig_answer a;
    for (int with = 0; with < 2; with++) {
        const int32_t stop = 4087; /* </think>, which must come */
        g.stop_tokens = &stop;
        g.n_stop_tokens = (size_t)with;
        rig_run(e, &g, &a);
        assert_true(a.end.reasoning_tokens == 5);
        if (with) assert_int_equal(a.end.stop_token, stop);
        if (!with) assert_in_range(a.end.output_tokens, 51, 60);
        rig_deinit(&a);
    }
    hd_engine_close(e);
}

/* A JSON object of this model need not end. */
static void any_object_begins_as_one(void **state) {
    (void)state;
    hd_engine *e = rig_open("cpu", NULL);
    hd_request g = {.size = sizeof g, .text = "Once", .max_tokens = 12};
    rig_answer a;
    g.response_format = HD_FORMAT_JSON;
    rig_run(e, &g, &a);
    assert_true(starts(&a.content, "{\""));
    rig_deinit(&a);
    hd_engine_close(e);
}

static void formats_are_refused_by_name(void **state) {
    (void)state;
    const struct {
        hd_response_format form;
        const char *text, *part;
    } cases[] = {
        {HD_FORMAT_JSON_SCHEMA, "{",             "invalid_schema"    },
        {HD_FORMAT_JSON_SCHEMA, "{\"not\": {}}", "unsupported_schema"},
        {HD_FORMAT_JSON_SCHEMA, NULL,            "format_text"       },
        {HD_FORMAT_REGEX,       "(",             "invalid_pattern"   },
        {HD_FORMAT_CHOICE,      NULL,            ""                  },
    };
    hd_engine *e = rig_open("cpu", NULL);
    char why[600];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const hd_request g = {.size = sizeof g,
                              .text = "x",
                              .response_format = cases[i].form,
                              .format_text = cases[i].text};
        assert_int_equal(hd_engine_submit(e, &g, NULL, why, sizeof why), 0);
        if (!strstr(why, cases[i].part)) fail_msg("%s", why);
    }
    hd_engine_close(e);
    e = rig_open("null", NULL);
    const hd_request g = {.size = sizeof g, .text = "x", .response_format = HD_FORMAT_JSON};
    assert_int_equal(hd_engine_submit(e, &g, NULL, why, sizeof why), 0);
    assert_non_null(strstr(why, "null backend"));
    hd_engine_close(e);
}

static void a_failure_says_why(void **state) {
    (void)state;
    hd_engine *e = rig_open("cpu", NULL);
    const hd_logit_bias brace = {.token = 95, .value = -INFINITY};
    hd_request g = {.size = sizeof g, .text = "x", .bias = &brace, .n_bias = 1};
    rig_answer a;
    g.response_format = HD_FORMAT_REGEX;
    g.format_text = "\\}"; /* which that token alone could spell */
    rig_run(e, &g, &a);
    assert_int_equal(a.end.step.finish_reason, HD_FINISH_ERROR);
    assert_string_equal(a.why, "no token is allowed to come next");
    rig_deinit(&a);
    g.response_format = HD_FORMAT_FREE; /* other requests are not affected */
    g.max_tokens = 3;
    rig_run(e, &g, &a);
    assert_int_equal(a.end.output_tokens, 3);
    rig_deinit(&a);
    hd_engine_close(e);
}

/* ---- calls and reasoning ---- */

static const char two_tools[] =
    "[{\"type\": \"function\", \"function\": {\"name\": \"calculator\", \"description\": "
    "\"Evaluate an arithmetic expression.\", \"parameters\": {\"type\": \"object\", "
    "\"properties\": {\"expression\": {\"type\": \"string\", \"description\": \"The "
    "expression\"}}, \"required\": [\"expression\"]}}}, {\"type\": \"function\", \"function\": "
    "{\"name\": \"check_olive\", \"description\": \"Check the olive of something.\", "
    "\"parameters\": {\"type\": \"object\", \"properties\": {\"id\": {\"type\": \"string\", "
    "\"description\": \"Which one\"}}, \"required\": [\"id\"]}}}]";

static void a_call_can_be_demanded(void **state) {
    (void)state;
    hd_engine *e = rig_open("cpu", NULL);
    for (int thinking = -1; thinking <= 1; thinking += 2) {
        hd_request g = {.size = sizeof g,
                        .messages = USER("Please check the olive of clock."),
                        .tools = two_tools,
                        .thinking = thinking,
                        .max_tokens = 200};
        rig_answer a, b;
        g.tool_choice = "required";
        rig_run(e, &g, &a);
        assert_true(a.calls.n > 0 && a.content.n == 0);
        assert_true((a.reasoning.n > 0) == (thinking > 0));
        g.draft_tokens = 5;
        rig_run(e, &g, &b);
        rig_same(&a, &b);
        rig_deinit(&a);
        rig_deinit(&b);
        g.tool_choice = "calculator"; /* whatever the user wants */
        rig_run(e, &g, &a);
        assert_true(starts(&a.calls, "calculator("));
        rig_deinit(&a);
    }
    hd_engine_close(e);
}

/* The models have not seen these; the second tool is not strict. */
static const char strict_tools[] =
    "[{\"type\": \"function\", \"function\": {\"name\": \"set_olive\", \"strict\": true, "
    "\"parameters\": {\"type\": \"object\", \"properties\": {\"mode\": {\"enum\": "
    "[\"fast\", \"slow\"]}, \"level\": {\"type\": \"integer\", \"minimum\": -3, \"maximum\": "
    "40}, \"tag\": {\"type\": \"string\", \"minLength\": 1, \"maxLength\": 6}, \"marks\": "
    "{\"type\": \"array\", \"items\": {\"type\": \"boolean\"}, \"maxItems\": 3}}, "
    "\"required\": "
    "[\"mode\", \"level\", \"tag\"], \"additionalProperties\": false}}}, {\"type\": "
    "\"function\", \"function\": {\"name\": \"check_olive\", \"parameters\": {\"type\": "
    "\"object\", \"properties\": {\"id\": {\"type\": \"string\"}}}}}]";

static bool is_set_olive(const json_t *o) {
    const char *mode = json_string_value(json_object_get(o, "mode"));
    const json_t *level = json_object_get(o, "level"), *tag = json_object_get(o, "tag"),
                 *marks = json_object_get(o, "marks");
    bool ok = json_object_size(o) == 3u + (marks != NULL) && mode && json_is_string(tag) &&
              (strcmp(mode, "fast") == 0 || strcmp(mode, "slow") == 0) &&
              json_is_integer(level) && json_integer_value(level) >= -3 &&
              json_integer_value(level) <= 40 && json_string_length(tag) > 0 &&
              (!marks || (json_is_array(marks) && json_array_size(marks) <= 3));
    for (size_t i = 0; i < json_array_size(marks); i++) {
        ok = ok && json_is_boolean(json_array_get(marks, i));
    }
    return ok;
}

/* Returns the number of complete calls; checks that those of the strict tool match its
 * schema. */
static int32_t check_calls(const rig_answer *a) {
    const char *at = a->calls.data, *end = at + a->calls.n;
    int32_t n = 0;
    for (; at < end; n++) {
        const char *open = memchr(at, '(', (size_t)(end - at));
        assert_non_null(open);
        const bool is_strict = open - at == 9 && memcmp(at, "set_olive", 9) == 0;
        assert_true(is_strict || (open - at == 11 && memcmp(at, "check_olive", 11) == 0));
        json_error_t why;
        json_t *o =
            json_loadb(open + 1, (size_t)(end - open - 1), JSON_DISABLE_EOF_CHECK, &why);
        if (!json_is_object(o)) fail_msg("%.*s: %s", (int)a->calls.n, a->calls.data, why.text);
        if (is_strict && !is_set_olive(o)) fail_msg("%.*s", (int)a->calls.n, a->calls.data);
        at = open + 1 + why.position;
        assert_true(end - at >= 2 && memcmp(at, ")!", 2) == 0);
        at += 2;
        json_decref(o);
    }
    return n;
}

/* With high temperature models write anything allowed. Neither drafts nor other requests
 * change the result. */
static void calls_keep_to_their_schema(void **state) {
    (void)state;
    static const struct {
        const char *model, *choice;
        int thinking;
        bool one_call;
    } cases[] = {
        {"models/tiny-v4", "set_olive", 1,  false},
        {"models/tiny-v4", "required",  -1, false},
        {"models/tiny-v4", "required",  -1, true },
        {"models/tiny-v4", "auto",      -1, false},
        {"models/tiny-v3", "set_olive", -1, false},
        {"models/tiny-v3", "required",  -1, true },
    };
    for (size_t i = 0; i < HD_LEN(cases); i += is_brief() ? 3 : 1) {
        hd_engine *e = rig_open("cpu", &(hd_engine_options){.model_dir = cases[i].model});
        const bool forced = strcmp(cases[i].choice, "auto") != 0;
        int32_t n_calls = 0, n_ended = 0;
        for (uint64_t seed = 0; seed < (is_long() ? 4 : 2); seed++) {
            hd_request g = {.size = sizeof g,
                            .messages = USER("Please check the olive of clock."),
                            .tools = strict_tools,
                            .tool_choice = cases[i].choice,
                            .one_call = cases[i].one_call,
                            .thinking = cases[i].thinking,
                            .max_reasoning = 40,
                            .max_tokens = 260,
                            .n = 2,
                            .seed = 10 * seed,
                            .temperature = (float)seed};
            rig_answer plain[2], drafted[2];
            rig_run(e, &g, plain);
            g.draft_tokens = seed % 2 ? 7 : 2;
            rig_run(e, &g, drafted);
            for (int k = 0; k < 2; k++) {
                rig_same(&plain[k], &drafted[k]);
                if (plain[k].end.step.finish_reason == HD_FINISH_STOP) {
                    const int32_t n = check_calls(&plain[k]);
                    n_ended++;
                    n_calls += n;
                    assert_true(!forced || (n > 0 && plain[k].content.n == 0));
                    assert_true(n <= 1 || strcmp(cases[i].choice, "set_olive") != 0);
                    assert_true(n <= 1 || !cases[i].one_call);
                }
                rig_deinit(&plain[k]);
                rig_deinit(&drafted[k]);
            }
        }
        if (n_calls == 0) fail_msg("case %zu: %d answers ended, none with a call", i, n_ended);
        hd_engine_close(e);
    }
}

static void impossible_calls_are_refused(void **state) {
    (void)state;
    hd_engine *e = rig_open("cpu", NULL);
    hd_request g = {.size = sizeof g, .messages = USER("x"), .tool_choice = "required"};
    char why[600];
    assert_int_equal(hd_engine_submit(e, &g, NULL, why, sizeof why), 0);
    assert_string_equal(why, "tool_choice is 'required', but there are no tools");
    g.tools = two_tools;
    g.tool_choice = "abacus";
    assert_int_equal(hd_engine_submit(e, &g, NULL, why, sizeof why), 0);
    assert_string_equal(why, "tool_choice: no tool is named 'abacus'");
    g.tool_choice = "calculator";
    g.ignore_eos = true;
    assert_int_equal(hd_engine_submit(e, &g, NULL, why, sizeof why), 0);
    assert_non_null(strstr(why, "no ignore_eos"));
    g.ignore_eos = false;
    g.tool_choice = NULL;
    g.tools = "[{\"type\": \"function\", \"function\": {\"name\": \"f\", \"strict\": true, "
              "\"parameters\": {\"type\": \"object\", \"not\": {}}}}]";
    assert_int_equal(hd_engine_submit(e, &g, NULL, why, sizeof why), 0);
    assert_string_equal(why, "unsupported_schema: the keyword not at # (tool 'f')");
    hd_engine_close(e);
}

static void reasoning_can_be_bounded(void **state) {
    (void)state;
    hd_engine *e = rig_open("cpu", NULL);
    hd_request g = {.size = sizeof g,
                    .messages = USER("What is 347 + 586?"),
                    .thinking = 1,
                    .max_reasoning = 12,
                    .max_tokens = 60};
    rig_answer a;
    rig_run(e, &g, &a);
    assert_int_equal(a.end.reasoning_tokens, 12);
    assert_true(a.content.n > 0);
    rig_deinit(&a);
    hd_engine_close(e);
}

/* ---- reported values ---- */

enum { TOP = 5, PROMPT = 90 };

typedef struct told {
    int32_t n_prompt, n_tokens;
    float prompt[PROMPT];
    hd_alternative prompt_top[PROMPT][TOP], top[16][TOP];
    float logprobs[16];
    int32_t cached;
} told;

static void ask(hd_engine *e, const int32_t *prompt, told *t, int32_t from) {
    const hd_request g = {.size = sizeof g,
                          .tokens = prompt,
                          .n_tokens = PROMPT,
                          .max_tokens = 8,
                          .draft_tokens = 3,
                          .ignore_eos = true,
                          .top_logprobs = TOP,
                          .prompt_logprobs = true,
                          .prompt_logprobs_from = from,
                          .n = 2};
    hd_event event;
    bool first = true, last = false;
    *t = (told){0};
    assert_true(hd_engine_submit(e, &g, NULL, NULL, 0) > 0);
    while (!last && hd_engine_poll(e, &event, -1)) {
        last = event.last;
        if (event.choice) {
            assert_int_equal(event.prompt.n, 0);
            continue;
        }
        if (first) {
            const size_t n = (size_t)event.prompt.n;
            t->n_prompt = event.prompt.n;
            t->cached = event.step.n_cached;
            assert_int_equal(event.prompt.from, from);
            assert_memory_equal(event.prompt.tokens, prompt + from, n * sizeof *prompt);
            memcpy(t->prompt, event.prompt.logprobs, n * sizeof(float));
            memcpy(t->prompt_top, event.prompt.top, n * sizeof t->prompt_top[0]);
        } else {
            assert_int_equal(event.prompt.n, 0);
        }
        first = false;
        assert_int_equal(event.step.n_top, TOP);
        for (int32_t i = 0; i < event.step.n_tokens; i++) {
            memcpy(t->top[t->n_tokens], event.step.top + i * TOP, sizeof t->top[0]);
            assert_int_equal(event.step.top[i * TOP].token, event.step.tokens[i]); /* greedy */
            t->logprobs[t->n_tokens++] = event.step.logprobs[i];
        }
    }
    assert_int_equal(t->n_tokens, 8);
}

static void the_prompt_is_scored(void **state) {
    (void)state;
    int32_t prompt[PROMPT];
    told whole, again, part;
    for (int i = 0; i < PROMPT; i++) prompt[i] = 300 + i * i % 50;
    hd_engine *e = rig_open("cpu", &(hd_engine_options){.max_running = 2, .chunk_tokens = 64});
    ask(e, prompt, &whole, 1);
    assert_int_equal(whole.n_prompt, PROMPT - 1);
    for (int i = 0; i < whole.n_prompt; i++) {
        assert_true(whole.prompt[i] < 0 && isfinite(whole.prompt[i]));
        for (int k = 0; k < TOP; k++) {
            const hd_alternative *a = &whole.prompt_top[i][k];
            assert_true(k == 0 || a->logprob <= a[-1].logprob);
            if (a->token == prompt[i + 1]) assert_true(a->logprob == whole.prompt[i]);
        }
    }
    /* cached tokens are computed again if their log-probabilities are requested */
    ask(e, prompt, &again, 1);
    assert_int_equal(again.cached, 0);
    assert_memory_equal(whole.prompt, again.prompt, sizeof whole.prompt);
    ask(e, prompt, &part, 80);
    assert_int_equal(part.n_prompt, PROMPT - 80);
    assert_memory_equal(part.prompt, whole.prompt + 79, (PROMPT - 80) * sizeof(float));
    hd_engine_close(e);
}

static void relaxed_drafts_stand_more_often(void **state) {
    (void)state;
    hd_engine *e = rig_open("cpu", NULL);
    const hd_logit_bias for_ever = {.token = 4087, .value = -INFINITY}; /* </think> */
    hd_request g = {.size = sizeof g,
                    .messages = USER("Tell me a story."),
                    .thinking = 1,
                    .max_tokens = 50,
                    .temperature = 2,
                    .bias = &for_ever,
                    .n_bias = 1,
                    .ignore_eos = true,
                    .draft_tokens = 3};
    int32_t drafted[2] = {0}, accepted[2] = {0};
    for (int i = 0; i < 6; i++) {
        rig_answer a;
        g.seed = (uint64_t)i / 2;
        g.relaxed_top = i % 2 ? 10 : 0;
        g.relaxed_delta = i % 2 ? 0.9f : 0;
        rig_run(e, &g, &a);
        int32_t sum = 0;
        for (int k = 0; k < HD_MAX_DRAFTS; k++) sum += a.end.accepted_at[k];
        assert_int_equal(sum, a.end.accepted);
        assert_int_equal(a.end.reasoning_tokens, 50);
        drafted[i % 2] += a.end.drafted;
        accepted[i % 2] += a.end.accepted;
        rig_deinit(&a);
    }
    const double strict = (double)accepted[0] / drafted[0];
    const double relaxed = (double)accepted[1] / drafted[1];
    if (relaxed < strict + 0.1) fail_msg("%.3f of drafts stood, relaxed %.3f", strict, relaxed);
    hd_engine_close(e);
}

static void acceptance_can_be_forced(void **state) {
    (void)state;
    hd_engine *e = rig_open("cpu", &(hd_engine_options){.forced_acceptance = 1.5f});
    const hd_request g = {.size = sizeof g,
                          .text = "x",
                          .max_tokens = 250,
                          .temperature = 5,
                          .draft_tokens = 3,
                          .ignore_eos = true};
    rig_answer a;
    rig_run(e, &g, &a);
    const double steps = a.end.drafted_at[0];
    const double mean = a.end.accepted / steps;
    if (fabs(mean - 1.5) > 0.15) fail_msg("%.2f drafts stood per step", mean);
    rig_deinit(&a);
    hd_engine_close(e);
}

static int64_t sum_of_loads(hd_engine *e, int64_t *load, size_t n) {
    int64_t sum = 0;
    assert_int_equal(hd_engine_read_experts(e, load, n, NULL), n);
    for (size_t i = 0; i < n; i++) sum += load[i];
    return sum;
}

/* Expert loads are published some time after their steps, including the last ones. */
/* A stop token among forced drafts ends the answer there. */
static void forced_drafts_stop_too(void **state) {
    (void)state;
    hd_engine *e = rig_open("cpu", &(hd_engine_options){.forced_acceptance = 3});
    int32_t stops[64];
    for (int32_t i = 0; i < 64; i++) stops[i] = 200 + 7 * i;
    hd_request g = {.size = sizeof g,
                    .text = "Once upon a time",
                    .max_tokens = 100,
                    .temperature = 5,
                    .draft_tokens = 3,
                    .ignore_eos = true,
                    .stop_tokens = stops,
                    .n_stop_tokens = 64};
    for (g.seed = 0; g.seed < 4; g.seed++) {
        rig_answer a;
        rig_run(e, &g, &a);
        for (size_t i = 0; i < a.tokens.n; i++) {
            const int32_t at = a.tokens.ids[i] - 200;
            const bool stop = at >= 0 && at < 7 * 64 && at % 7 == 0;
            assert_true(stop ==
                        (a.end.step.finish_reason == HD_FINISH_STOP && i + 1 == a.tokens.n));
        }
        rig_deinit(&a);
    }
    hd_engine_close(e);
}

static void experts_are_counted(void **state) {
    (void)state;
    hd_engine *e = rig_open("cpu", NULL);
    int32_t n_experts;
    const size_t n = hd_engine_read_experts(e, NULL, 0, &n_experts);
    assert_true(n > 0 && n_experts > 0 && n % (size_t)n_experts == 0);
    int64_t *load = calloc(n, sizeof *load), per_row = 0;
    for (int32_t i = 1; i <= 2; i++) {
        const hd_request g = {.size = sizeof g, .text = "the cat", .max_tokens = 10 * i};
        rig_answer a;
        rig_run(e, &g, &a);
        hd_engine_stats stats;
        hd_engine_read_stats(e, &stats);
        int64_t sum = 0;
        while (!sum || (per_row ? sum != per_row * stats.rows : sum % stats.rows != 0)) {
            sum = sum_of_loads(e, load, n);
        }
        per_row = sum / stats.rows;
        rig_deinit(&a);
    }
    free(load);
    hd_engine_close(e);
}

/* Reading does not block while a long prompt is computed. */
static void looking_does_not_wait(void **state) {
    (void)state;
    hd_engine *e =
        rig_open("cpu", &(hd_engine_options){.chunk_tokens = 4096, .step_tokens = 4096});
    const size_t n = hd_engine_read_experts(e, NULL, 0, NULL);
    int64_t *load = calloc(n, sizeof *load);
    int32_t prompt[2000];
    hd_engine_stats stats = {0};
    hd_event event;
    for (size_t i = 0; i < HD_LEN(prompt); i++) prompt[i] = 100 + (int32_t)i;
    const hd_request g = {
        .size = sizeof g, .tokens = prompt, .n_tokens = HD_LEN(prompt), .max_tokens = 1};
    assert_true(hd_engine_submit(e, &g, NULL, NULL, 0) != 0);
    for (int32_t i = 0; i < 1000; i++) hd_engine_read_experts(e, load, n, NULL);
    hd_engine_read_stats(e, &stats);
    assert_int_equal(stats.steps, 0);
    while (hd_engine_poll(e, &event, -1)) {
    }
    free(load);
    hd_engine_close(e);
}

int test_constraint(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(choices_have_their_format),
        cmocka_unit_test(drafts_keep_to_the_format),
        cmocka_unit_test(formats_wait_for_a_minimum),
        cmocka_unit_test(a_minimum_holds_beside_a_bound),
        cmocka_unit_test(any_object_begins_as_one),
        cmocka_unit_test(formats_are_refused_by_name),
        cmocka_unit_test(a_failure_says_why),
        cmocka_unit_test(a_call_can_be_demanded),
        cmocka_unit_test(calls_keep_to_their_schema),
        cmocka_unit_test(impossible_calls_are_refused),
        cmocka_unit_test(reasoning_can_be_bounded),
        cmocka_unit_test(the_prompt_is_scored),
        cmocka_unit_test(relaxed_drafts_stand_more_often),
        cmocka_unit_test(acceptance_can_be_forced),
        cmocka_unit_test(forced_drafts_stop_too),
        cmocka_unit_test(experts_are_counted),
        cmocka_unit_test(looking_does_not_wait),
    };
    return cmocka_run_group_tests_name("constraint", tests, NULL, NULL);
}
