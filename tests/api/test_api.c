/* test_api.c - every endpoint over the rig: what is refused, what is written, who is cancelled,
 * and that nothing outlives its call. */
#include "check.h"

#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "fakes/api_rig.h"

/* test_kept.c, test_resume.c; they return their number of failures */
int test_kept(void);
int test_resume(void);

static rig r;

static int setup(void **state) {
    (void)state;
    rig_init(&r);
    return 0;
}

static int teardown(void **state) {
    (void)state;
    rig_deinit(&r);
    return 0;
}

static void expect_text(rig_call *c, const char *part) {
    if (strstr(rig_text(c), part)) return;
    fail_msg("no <%s> in\n%s", part, rig_text(c));
}

static void expect_none(rig_call *c, const char *part) {
    if (!strstr(rig_text(c), part)) return;
    fail_msg("<%s> in\n%s", part, rig_text(c));
}

/* Parts that come in this order. */
static void expect_order(rig_call *c, const char *const *parts, size_t n) {
    const char *at = rig_text(c);
    for (size_t i = 0; i < n; i++) {
        const char *found = strstr(at, parts[i]);
        if (!found) fail_msg("no <%s> at %zu in\n%s", parts[i], i, rig_text(c));
        at = found + strlen(parts[i]);
    }
}

static void done(rig_call *c) {
    assert_true(rig_ended(c));
    assert_true(rig_release(c));
}

#define USER "\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]"
#define TOOLS \
    "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"add\",\"parameters\":{}}}]"

/* ---- refusals ---- */

typedef struct refusal {
    const char *path, *body;
    int status;
    const char *part; /* of the answer */
} refusal;

static const refusal refusals[] = {
    {"/v1/chat/completions", "",                                                 400, "empty_body"          },
    {"/v1/chat/completions", "{",                                                400, "invalid_json"        },
    {"/v1/chat/completions", "[]",                                               400, "invalid_json"        },
    {"/v1/chat/completions", "{\"n\":1,\"n\":2}",                                400, "duplicate_key"       },
    {"/v1/chat/completions", "{}",                                               400, "\"messages\""        },
    {"/v1/chat/completions", "{" USER ",\"temperature\":2.5}",                   400, "must be 0 to 2"      },
    {"/v1/chat/completions", "{" USER ",\"temperature\":1e999}",                 400, "temperature"         },
    {"/v1/chat/completions", "{" USER ",\"n\":9}",                               400, "must be 1 to 8"      },
    {"/v1/chat/completions", "{" USER ",\"best_of\":2}",                         400, "unsupported_param"   },
    {"/v1/chat/completions", "{" USER ",\"stream\":\"yes\"}",                    400, "true or false"       },
    {"/v1/chat/completions", "{" USER ",\"stream_options\":{\"x\":1}}",          400,
     "stream_options.x"                                                                                     },
    {"/v1/chat/completions", "{" USER ",\"top_logprobs\":3}",                    400, "logprobs: true"      },
    {"/v1/chat/completions", "{" USER ",\"logit_bias\":{\"007\":1}}",            400, "logit_bias"          },
    {"/v1/chat/completions", "{" USER ",\"stop\":[\"\"]}",                       400, "stop[0]"             },
    {"/v1/chat/completions", "{" USER ",\"tool_choice\":\"required\"}",          400, "wants tools"         },
    {"/v1/chat/completions", "{" USER ",\"rid\":\"a\\nb\"}",                     400, "printable"           },
    {"/v1/chat/completions", "{" USER ",\"model\":\"a\\u0000\"}",                400, "U+0000"              },
    {"/v1/completions",      "{\"prompt\":\"\"}",                                400, "empty_prompt"        },
    {"/v1/completions",      "{\"prompt\":[1,\"a\"]}",                           400, "prompt[1]"           },
    {"/v1/completions",      "{\"prompt\":[9999]}",                              400, "prompt[0]"           },
    {"/v1/completions",      "{\"prompt\":\"a\",\"suffix\":\"b\"}",              400, "unsupported_param"   },
    {"/v1/completions",      "{\"prompt\":\"a\",\"max_tokens\":0}",              400, "wants echo"          },
    {"/generate",            "{}",                                               400, "text"                },
    {"/generate",            "{\"text\":\"a\",\"input_ids\":[1]}",               400, "give one"            },
    {"/generate",            "{\"text\":[\"a\"],\"sampling_params\":[]}",        400, "sampling_params"     },
    {"/tokenize",            "{}",                                               400, "prompt"              },
    {"/detokenize",          "{\"tokens\":[-1]}",                                400, "tokens[0]"           },
    {"/v1/messages",         "{\"messages\":[{\"role\":\"x\"}]}",                400, "\"type\":\"error\""  },
    {"/v1/responses",        "{\"input\":[{\"type\":\"zzz\"}]}",                 400, "input[0]"            },
    {"/v1/responses",        "{\"input\":\"a\",\"previous_response_id\":\"x\"}", 404, "not_found"           },
    {"/v1/embeddings",       "{}",                                               404, "unsupported_endpoint"},
};

static void test_refusals(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof refusals / sizeof refusals[0]; i++) {
        rig_call *c = rig_post(&r, refusals[i].path, refusals[i].body);
        if (rig_status(c) != refusals[i].status) {
            fail_msg("%s: %d %s", refusals[i].body, rig_status(c), rig_text(c));
        }
        expect_text(c, refusals[i].part);
        done(c);
    }
    assert_int_equal(r.n_requests, 0);
}

static void test_deep_and_wide(void **state) {
    (void)state;
    static char many[1000002];
    memset(many, '[', sizeof many - 1);
    rig_call *c = rig_post(&r, "/v1/completions", many);
    expect_text(c, "too_deep");
    done(c);
    memset(many, ',', sizeof many - 1);
    c = rig_post(&r, "/v1/completions", many);
    expect_text(c, "too_many_values");
    done(c);
    c = rig_post_bytes(&r, "/v1/completions", "{\"prompt\":\"\\\"[[[[\xff\"}", 19);
    expect_text(c, "invalid_json");
    done(c);
}

/* What may have to be compiled, or goes on from something long, is not handled on the thread of
 * the connection; the rest is. */
static void test_handed_over(void **state) {
    static const struct {
        const char *path, *rest;
        bool handed_over;
    } rows[] = {
        {"/v1/chat/completions",       "\"n\": 1",                                         false},
        {"/v1/chat/completions",       "\"regex\": null",                                  false},
        {"/v1/chat/completions",       "\"response_format\": {\"type\": \"json_object\"}", true },
        {"/v1/chat/completions",       "\"regex\": \"a*\"",                                true },
        {"/v1/chat/completions",       "\"guided_choice\": [\"a\"]",                       true },
        {"/v1/chat/completions",       "\"structured_outputs\": {\"json\": {}}",           true },
        {"/v1/chat/completions",       "\"tools\": []",                                    true },
        {"/v1/messages",               "\"output_config\": {\"format\": {}}",              true },
        {"/v1/messages/count_tokens",  "\"tools\": []",                                    true },
        {"/v1/responses",              "\"previous_response_id\": \"resp_1\"",             true },
        {"/v1/responses",              "\"text\": {\"format\": {}}",                       true },
        {"/v1/responses/input_tokens", "\"text\": {\"verbosity\": \"low\"}",               false},
        {"/generate",                  "\"sampling_params\": {\"regex\": \"a\"}",          true },
        {"/generate",                  "\"sampling_params\": [{}, {\"regex\": \"a\"}]",    true },
        {"/generate",                  "\"sampling_params\": [{\"n\": 2}]",                false},
    };
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        char body[200];
        snprintf(body, sizeof body, "{\"zzz\": 1, \"messages\": 5, %s}", rows[i].rest);
        rig_call *c = rig_post(&r, rows[i].path, body);
        assert_int_equal(rig_was_handed_over(c), rows[i].handed_over);
        assert_true(rig_status(c) == 400 || rig_status(c) == 404);
        done(c);
    }
}

static void test_full_queue(void **state) {
    (void)state;
    r.refuse_at = 0;
    r.refuse_at_status = HD_EAGAIN;
    r.refuse_why = "full";
    rig_call *c = rig_post(&r, "/v1/chat/completions", "{" USER ",\"stream\":true}");
    assert_int_equal(rig_status(c), 429);
    assert_string_equal(rig_header(c, "Retry-After"), "1");
    done(c);
    assert_int_equal(r.n_ends, 1);
    assert_int_equal(r.outcome.status, 429);
}

/* Whatever the engine's sentence says, status, code and param are those of its error. */
static void test_sentences_are_not_read(void **state) {
    (void)state;
    static const char *const sentences[] = {
        "9 prompt tokens and 1 output tokens exceed the context of 8",
        "prompt is too long: 9 tokens", "schema_cycle: a $ref leads back to itself",
        "messages[3].content: must be a string", "the text has more than 9 tokens"};
    static const struct {
        hd_status failed;
        const char *code, *field, *shown;
    } rows[] = {
        {HD_EINVAL,       "context_length_exceeded", NULL,
         "\"param\":null,\"code\":\"context_length_exceeded\""                                                             },
        {HD_EINVAL,       "schema_too_deep",         "tools",
         "\"param\":\"tools\",\"code\":\"schema_too_deep\""                                                                },
        {HD_EINVAL,       NULL,                      "n",               "\"param\":\"n\",\"code\":\"invalid_value\""       },
        {HD_EINVAL,       NULL,                      NULL,              "\"param\":null,\"code\":\"invalid_value\""        },
        {HD_EUNSUPPORTED, NULL,                      NULL,              "\"param\":null,\"code\":\"unsupported_parameter\""},
        {HD_EUNSUPPORTED, "unsupported_schema",      "response_format",
         "\"param\":\"response_format\",\"code\":\"unsupported_schema\""                                                   },
        {HD_ENOMEM,       "schema_too_deep",         "tools",           "\"param\":null,\"code\":\"out_of_memory\""        },
    };
    r.refuse_at = 0;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        for (size_t k = 0; k < sizeof sentences / sizeof sentences[0]; k++) {
            r.refuse_at_status = rows[i].failed;
            r.refuse_code = rows[i].code;
            r.refuse_field = rows[i].field;
            r.refuse_why = sentences[k];
            rig_call *c = rig_post(&r, "/v1/chat/completions", "{" USER "}");
            assert_int_equal(rig_status(c), rows[i].failed == HD_ENOMEM ? 503 : 400);
            expect_text(c, rows[i].shown);
            expect_text(c, sentences[k]);
            done(c);
        }
    }
}

/* The third of four prompts is refused: the first two are cancelled, and one answer is sent. */
static void test_batch_refused_in_the_middle(void **state) {
    (void)state;
    r.refuse_at = 2;
    r.refuse_at_status = HD_EAGAIN;
    r.refuse_why = "full";
    rig_call *c = rig_post(&r, "/v1/completions", "{\"prompt\":[\"a\",\"b\",\"c\",\"d\"]}");
    assert_int_equal(rig_status(c), 0);
    assert_int_equal(r.n_cancels, 2);
    rig_play(&r);
    assert_int_equal(rig_status(c), 429);
    done(c);
}

/* Any two parameters, each at its least, its most, and wrong: an answer, and never our fault. */
static void test_all_pairs(void **state) {
    static const char *const values[][4] = {
        {"temperature",           "0",                    "2",                                   "-1"       },
        {"top_p",                 "0.000001",             "1",                                   "0"        },
        {"top_k",                 "-1",                   "2147483647",                          "-2"       },
        {"min_p",                 "0",                    "1",                                   "2"        },
        {"n",                     "1",                    "8",                                   "0"        },
        {"seed",                  "-9223372036854775808", "9223372036854775807",                 "1.5"      },
        {"max_tokens",            "1",                    "2147483647",                          "0"        },
        {"max_completion_tokens", "1",                    "2147483647",                          "\"1\""    },
        {"min_tokens",            "0",                    "2147483647",                          "-1"       },
        {"frequency_penalty",     "-2",                   "2",                                   "3"        },
        {"presence_penalty",      "-2",                   "2",                                   "null"     },
        {"repetition_penalty",    "0.1",                  "10",                                  "0"        },
        {"stop",                  "\"a\"",                "[\"a\",\"b\",\"c\"]",                 "[1]"      },
        {"stop_token_ids",        "[]",                   "[1,2,3]",                             "[-1]"     },
        {"logit_bias",            "{}",                   "{\"1\":100}",                         "{\"x\":1}"},
        {"logprobs",              "false",                "true",                                "1"        },
        {"top_logprobs",          "0",                    "20",                                  "21"       },
        {"stream",                "false",                "true",                                "\"yes\""  },
        {"stream_options",        "{}",                   "{\"include_usage\":true}",            "[]"       },
        {"stream_interval",       "1",                    "1048576",                             "0"        },
        {"response_format",       "{\"type\":\"text\"}",  "{\"type\":\"json_object\"}",          "{}"       },
        {"regex",                 "\"a\"",                "\"a+\"",                              "7"        },
        {"tools",                 "[]",                   "[{\"function\":{\"name\":\"add\"}}]", "{}"       },
        {"tool_choice",           "\"none\"",             "\"required\"",                        "\"x\""    },
        {"parallel_tool_calls",   "false",                "true",                                "0"        },
        {"separate_reasoning",    "false",                "true",                                "0"        },
        {"stream_reasoning",      "false",                "true",                                "0"        },
        {"return_token_ids",      "false",                "true",                                "0"        },
        {"reasoning_effort",      "\"none\"",             "\"max\"",                             "\"x\""    },
    };
    const size_t n = sizeof values / sizeof values[0];
    char body[512];
    (void)state;
    for (size_t i = 0; i < n * n * 9; i++) {
        const size_t a = i / 9 / n, b = i / 9 % n;
        if (a >= b) continue;
        snprintf(body, sizeof body, "{" USER ",\"%s\":%s,\"%s\":%s}", values[a][0],
                 values[a][1 + i % 3], values[b][0], values[b][1 + i / 3 % 3]);
        rig_call *c = rig_post(&r, "/v1/chat/completions", body);
        rig_play(&r);
        const int status = rig_status(c);
        /* the engine ends requests in every way, by the number of their stops */
        if (status != 200 && status != 400 && status != 408) {
            fail_msg("%s: %d %s", body, status, rig_text(c));
        }
        done(c);
    }
}

/* ---- chat ---- */

static void test_chat_reply(void **state) {
    (void)state;
    rig_call *c =
        rig_post(&r, "/v1/chat/completions",
                 "{" USER "," TOOLS ",\"logprobs\":true,\"top_logprobs\":1,\"zzz\":1}");
    assert_int_equal(rig_status(c), 0);
    rig_say(&r, 0, 0, HD_DELTA_REASONING, 0, "hm");
    rig_say(&r, 0, 0, HD_DELTA_REASONING, 0, "m\n");
    rig_say(&r, 0, 0, HD_DELTA_CONTENT, 0, "\"ok\"");
    rig_say(&r, 0, 0, HD_DELTA_CALL, 0, "add");
    rig_say(&r, 0, 0, HD_DELTA_ARGUMENTS, 0, "{\"a\": ");
    rig_say(&r, 0, 0, HD_DELTA_ARGUMENTS, 0, "1}");
    rig_say(&r, 0, 0, HD_DELTA_CALL_END, 0, "");
    rig_end(&r, 0, 0, HD_FINISH_STOP);
    const char *const parts[] = {"\"id\":\"chatcmpl-call-1\"",
                                 "\"content\":\"\\\"ok\\\"\"",
                                 "\"reasoning_content\":\"hmm\\n\"",
                                 "\"id\":\"call_",
                                 "\"name\":\"add\"",
                                 "\"arguments\":\"{\\\"a\\\": 1}\"",
                                 "\"token\":\"t\",\"logprob\":-0.125,\"bytes\":[116]",
                                 "\"token\":\"a\"",
                                 "\"finish_reason\":\"tool_calls\",\"matched_stop\":1",
                                 "\"completion_tokens\":7",
                                 "\"cached_tokens\":1"};
    expect_order(c, parts, sizeof parts / sizeof parts[0]);
    assert_string_equal(rig_header(c, "X-Ignored-Params"), "zzz");
    assert_string_equal(r.unknown, "/v1/chat/completions zzz");
    assert_int_equal(r.outcome.output_tokens, 7);
    assert_string_equal(r.outcome.finish, "tool_calls");
    assert_int_equal(r.n_tokens_seen, 6);
    json_t *whole = json_loads(rig_text(c), 0, NULL);
    assert_non_null(whole);
    json_decref(whole);
    done(c);
}

static void test_chat_stream(void **state) {
    (void)state;
    rig_call *c =
        rig_post(&r, "/v1/chat/completions",
                 "{" USER ",\"stream\":true,\"stream_options\":{\"include_usage\":true},"
                 "\"logprobs\":true,\"return_token_ids\":true,\"rid\":\"r1\"}");
    assert_int_equal(rig_status(c), 0);
    rig_say(&r, 0, 0, HD_DELTA_REASONING, 0, "hm");
    assert_int_equal(rig_status(c), 200);
    rig_say(&r, 0, 0, HD_DELTA_CONTENT, 0, "a\"b");
    rig_stop(&r, 0, 0, "END");
    const char *const parts[] = {
        "data: {\"id\":\"chatcmpl-r1\"",
        "\"delta\":{\"role\":\"assistant\",\"content\":\"\"}",
        "\"delta\":{\"reasoning_content\":\"hm\"},\"logprobs\":{\"content\":[{",
        "\"token_ids\":[116],\"finish_reason\":null}],\"prompt_token_ids\":[",
        "\"delta\":{\"content\":\"a\\\"b\"}",
        "\"delta\":{},\"logprobs\":null,\"finish_reason\":\"stop\",\"matched_stop\":\"END\","
        "\"weight_versions\":"
        "[{\"version\":null,\"start\":0,\"end\":2}]}],\"metadata\":{\"weight_version\":"
        "\"default\"}}",
        "\"choices\":[],\"usage\":{",
        "data: [DONE]\n\n"};
    expect_order(c, parts, sizeof parts / sizeof parts[0]);
    done(c);
}

static void test_chat_calls_stream(void **state) {
    (void)state;
    rig_call *c =
        rig_post(&r, "/v1/chat/completions",
                 "{" USER "," TOOLS ",\"stream\":true,\"parallel_tool_calls\":false}");
    rig_say(&r, 0, 0, HD_DELTA_CALL, 0, "add");
    rig_say(&r, 0, 0, HD_DELTA_ARGUMENTS, 0, "{}");
    rig_say(&r, 0, 0, HD_DELTA_CALL_END, 0, "");
    rig_say(&r, 0, 0, HD_DELTA_CALL, 1, "second");
    rig_say(&r, 0, 0, HD_DELTA_ARGUMENTS, 1, "{}");
    rig_say(&r, 0, 0, HD_DELTA_CALL_END, 1, "");
    rig_end(&r, 0, 0, HD_FINISH_STOP);
    const char *const parts[] = {
        "\"tool_calls\":[{\"index\":0,\"id\":\"call_",
        "\"type\":\"function\",\"function\":{\"name\":\"add\",\"arguments\":\"\"}}]",
        "\"tool_calls\":[{\"index\":0,\"function\":{\"arguments\":\"{}\"}}]",
        "\"finish_reason\":\"tool_calls\""};
    expect_order(c, parts, sizeof parts / sizeof parts[0]);
    expect_none(c, "second");
    done(c);
}

static void test_stream_interval(void **state) {
    (void)state;
    rig_call *c = rig_post(&r, "/v1/chat/completions",
                           "{" USER ",\"stream\":true,\"stream_interval\":3}");
    const char *const words[] = {"a", "b", "c", "d", "e"};
    for (size_t i = 0; i < 5; i++) rig_say(&r, 0, 0, HD_DELTA_CONTENT, 0, words[i]);
    rig_end(&r, 0, 0, HD_FINISH_LENGTH);
    const char *const parts[] = {"{\"content\":\"a\"}", "{\"content\":\"bcd\"}",
                                 "{\"content\":\"e\"}", "\"finish_reason\":\"length\""};
    expect_order(c, parts, sizeof parts / sizeof parts[0]);
    done(c);
}

static void test_reasoning_held_and_merged(void **state) {
    (void)state;
    rig_call *c = rig_post(&r, "/v1/chat/completions",
                           "{" USER ",\"stream\":true,\"stream_reasoning\":false}");
    rig_say(&r, 0, 0, HD_DELTA_REASONING, 0, "x");
    rig_say(&r, 0, 0, HD_DELTA_REASONING, 0, "y");
    rig_say(&r, 0, 0, HD_DELTA_CONTENT, 0, "z");
    rig_end(&r, 0, 0, HD_FINISH_STOP);
    const char *const held[] = {"{\"reasoning_content\":\"xy\"}", "{\"content\":\"z\"}"};
    expect_order(c, held, 2);
    done(c);
    r.n_requests = 0;
    c = rig_post(&r, "/v1/chat/completions", "{" USER ",\"separate_reasoning\":false}");
    rig_say(&r, 0, 0, HD_DELTA_REASONING, 0, "x");
    rig_say(&r, 0, 0, HD_DELTA_CONTENT, 0, "z");
    rig_end(&r, 0, 0, HD_FINISH_STOP);
    expect_text(c, "\"content\":\"x</think>z\",\"reasoning_content\":null");
    done(c);
}

static void test_answers_interleave(void **state) {
    (void)state;
    rig_call *c = rig_post(&r, "/v1/chat/completions", "{" USER ",\"n\":2,\"stream\":true}");
    assert_int_equal(r.requests[0].g.n, 2);
    rig_say(&r, 0, 0, HD_DELTA_CONTENT, 0, "a");
    rig_say(&r, 0, 1, HD_DELTA_CONTENT, 0, "b");
    rig_end(&r, 0, 1, HD_FINISH_STOP);
    assert_false(rig_ended(c));
    rig_end(&r, 0, 0, HD_FINISH_LENGTH);
    const char *const parts[] = {
        "{\"index\":0,\"delta\":{\"content\":\"a\"}",
        "{\"index\":1,\"delta\":{\"content\":\"b\"}",
        "{\"index\":1,\"delta\":{},\"logprobs\":null,\"finish_reason\":\"stop",
        "{\"index\":0,\"delta\":{},\"logprobs\":null,\"finish_reason\":\"length", "[DONE]"};
    expect_order(c, parts, sizeof parts / sizeof parts[0]);
    done(c);
}

static void test_ends(void **state) {
    (void)state;
    rig_call *c = rig_post(&r, "/v1/chat/completions", "{" USER "}");
    rig_end(&r, 0, 0, HD_FINISH_TIMEOUT);
    assert_int_equal(rig_status(c), 408);
    done(c);
    c = rig_post(&r, "/v1/chat/completions", "{" USER ",\"stream\":true}");
    rig_end(&r, 1, 0, HD_FINISH_ERROR);
    assert_int_equal(rig_status(c), 500);
    done(c);
    c = rig_post(&r, "/v1/chat/completions", "{" USER ",\"stream\":true}");
    rig_say(&r, 2, 0, HD_DELTA_CONTENT, 0, "a");
    rig_end(&r, 2, 0, HD_FINISH_ERROR);
    const char *const broken[] = {"{\"error\":{\"message\":\"the logits are broken\"",
                                  "[DONE]"};
    expect_order(c, broken, 2);
    done(c);
    c = rig_post(&r, "/v1/chat/completions", "{" USER "}");
    rig_say(&r, 3, 0, HD_DELTA_CONTENT, 0, "half");
    rig_end(&r, 3, 0, HD_FINISH_ABORT);
    expect_text(c, "\"content\":\"half\"");
    expect_text(c, "\"finish_reason\":\"abort\"");
    done(c);
}

static void test_client_vanishes(void **state) {
    (void)state;
    rig_call *c = rig_post(&r, "/v1/completions", "{\"prompt\":[\"a\",\"b\"],\"stream\":true}");
    rig_say(&r, 0, 0, HD_DELTA_CONTENT, 0, "x");
    rig_vanish(c);
    assert_int_equal(r.n_cancels, 2);
    rig_play(&r);
    done(c);
    c = rig_post(&r, "/v1/chat/completions", "{" USER ",\"stream\":true}");
    rig_stall(c);
    rig_say(&r, 0, 0, HD_DELTA_CONTENT, 0, "x");
    assert_int_equal(r.n_cancels, 3);
    rig_play(&r);
    done(c);
}

/* What a request may use at most is set aside: prompts once, every answer in full. */
static void test_tokens_are_set_aside(void **state) {
    static const struct {
        const char *path, *body;
        int64_t quota, reserved;
        int status; /* 0: it runs */
    } rows[] = {
        {"/generate",            "{\"input_ids\":[1,2,3],\"sampling_params\":{\"max_new_tokens\":7}}",     100,
         10,                                                                                                         0  },
        {"/generate",
         "{\"input_ids\":[1,2,3],\"sampling_params\":{\"max_new_tokens\":7,\"n\":3}}",                     100, 24,
         0                                                                                                              },
        {"/generate",            "{\"input_ids\":[[1,2],[3]],\"sampling_params\":{\"max_new_tokens\":7}}",
         100,                                                                                                   17,  0  },
        {"/generate",            "{\"input_ids\":[1,2,3],\"sampling_params\":{\"max_new_tokens\":98}}",
         100,                                                                                                   0,   400},
        {"/generate",            "{\"input_ids\":[1,2,3],\"sampling_params\":{\"max_new_tokens\":97}}",
         100,                                                                                                   100, 0  },
        {"/v1/completions",      "{\"prompt\":[1,2,3]}",                                                   100, 19,  0  },
        {"/v1/chat/completions", "{" USER "}",                                                             300, 300, 0  },
        {"/v1/chat/completions", "{" USER ",\"max_tokens\":500}",                                          300, 0,   400},
        {"/v1/chat/completions", "{" USER ",\"max_tokens\":500}",                                          0,   0,   0  },
    };
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        rig_deinit(&r);
        rig_init(&r);
        r.key_tokens = rows[i].quota;
        rig_call *c = rig_post(&r, rows[i].path, rows[i].body);
        assert_int_equal(rig_status(c), rows[i].status);
        assert_int_equal(r.n_reserved, rows[i].reserved);
        rig_play(&r);
        done(c);
    }
    r.key_tokens = 100;
    r.key_wait = 7;
    rig_call *c = rig_post(&r, "/v1/completions", "{\"prompt\":[1,2,3]}");
    assert_int_equal(rig_status(c), 429);
    assert_string_equal(rig_header(c, "Retry-After"), "7");
    done(c);
}

/* ---- completions, generate ---- */

static void test_completion_scores(void **state) {
    (void)state;
    rig_call *c =
        rig_post(&r, "/v1/completions",
                 "{\"prompt\":\"abcd\",\"echo\":true,\"logprobs\":1,\"max_tokens\":3}");
    assert_int_equal(r.requests[0].g.prompt_logprobs_from, 1);
    rig_say(&r, 0, 0, HD_DELTA_CONTENT, 0, "t");
    rig_end(&r, 0, 0, HD_FINISH_LENGTH);
    const char *const parts[] = {"\"text\":\"abcdt\"", "\"tokens\":[\"a\",",
                                 "\"token_logprobs\":[null,-0.5,-1.0,-1.5,-0.125]",
                                 "\"top_logprobs\":[null,{\"a\":-0.25},",
                                 "\"text_offset\":[0,1,2,3,4]"};
    expect_order(c, parts, sizeof parts / sizeof parts[0]);
    done(c);
    r.n_requests = 0;
    c = rig_post(&r, "/v1/completions",
                 "{\"prompt\":\"a\",\"echo\":true,\"logprobs\":0,\"max_tokens\":0}");
    rig_end(&r, 0, 0, HD_FINISH_LENGTH);
    expect_text(c, "{\"tokens\":[\"a\"],\"token_logprobs\":[null]");
    done(c);
}

static void test_generate(void **state) {
    (void)state;
    rig_call *c = rig_post(&r, "/generate",
                           "{\"text\":\"abcd\",\"return_logprob\":true,\"logprob_start_len\":0,"
                           "\"sampling_params\":{\"max_new_tokens\":2,\"temperature\":0}}");
    assert_int_equal(r.requests[0].g.max_tokens, 2);
    rig_say(&r, 0, 0, HD_DELTA_CONTENT, 0, "t");
    rig_end(&r, 0, 0, HD_FINISH_STOP);
    const char *const parts[] = {
        "{\"text\":\"t\",\"output_ids\":[116],\"meta_info\":{\"id\":\"call-1\"",
        "\"finish_reason\":{\"type\":\"stop\",\"matched\":1}",
        "\"input_token_logprobs\":[[null,97,null],[-0.5,10,null]",
        "\"output_token_logprobs\":[[-0.125,116,null]]"};
    expect_order(c, parts, sizeof parts / sizeof parts[0]);
    done(c);
    r.n_requests = 0;
    c = rig_post(&r, "/generate", "{\"text\":[\"a\",\"b\"],\"stream\":true,\"rid\":\"p\"}");
    rig_say(&r, 0, 0, HD_DELTA_CONTENT, 0, "x");
    rig_say(&r, 0, 0, HD_DELTA_CONTENT, 0, "y");
    rig_say(&r, 1, 0, HD_DELTA_CONTENT, 0, "z");
    rig_end(&r, 0, 0, HD_FINISH_LENGTH);
    rig_end(&r, 1, 0, HD_FINISH_LENGTH);
    const char *const stream[] = {"{\"text\":\"x\"", "\"id\":\"p_0\"", "{\"text\":\"xy\"",
                                  "{\"text\":\"z\"", "\"index\":1",    "\"type\":\"length\"",
                                  "[DONE]"};
    expect_order(c, stream, sizeof stream / sizeof stream[0]);
    done(c);
}

static void test_prefill_only(void **state) {
    (void)state;
    rig_call *c = rig_post(&r, "/generate",
                           "{\"text\":\"ab\",\"sampling_params\":{\"max_new_tokens\":0}}");
    assert_int_equal(r.requests[0].g.max_tokens, 1);
    rig_say(&r, 0, 0, HD_DELTA_CONTENT, 0, "x");
    rig_end(&r, 0, 0, HD_FINISH_STOP);
    expect_text(c, "{\"text\":\"\",\"output_ids\":[]");
    expect_text(c, "\"completion_tokens\":0");
    expect_text(c, "{\"type\":\"length\",\"length\":0}");
    done(c);
}

/* ---- Anthropic, responses ---- */

static void say_all(void) {
    rig_say(&r, 0, 0, HD_DELTA_REASONING, 0, "hm");
    rig_say(&r, 0, 0, HD_DELTA_CONTENT, 0, "so");
    rig_say(&r, 0, 0, HD_DELTA_CALL, 0, "add");
    rig_say(&r, 0, 0, HD_DELTA_ARGUMENTS, 0, "{\"a\": 1}");
    rig_say(&r, 0, 0, HD_DELTA_CALL_END, 0, "");
    rig_end(&r, 0, 0, HD_FINISH_STOP);
}

static const char messages_body[] =
    "\"max_tokens\":9,\"system\":[{\"type\":\"text\",\"text\":\"s\"}],\"tools\":[{\"name\":"
    "\"add\","
    "\"input_schema\":{}}],\"messages\":[{\"role\":\"user\",\"content\":\"q\"},{\"role\":"
    "\"assistant\",\"content\":[{\"type\":\"thinking\",\"thinking\":\"t\",\"signature\":"
    "\"none\"},"
    "{\"type\":\"tool_use\",\"id\":\"u1\",\"name\":\"add\",\"input\":{\"a\":2}}]},{\"role\":"
    "\"user\","
    "\"content\":[{\"type\":\"tool_result\",\"tool_use_id\":\"u1\",\"content\":\"3\"},{"
    "\"type\":"
    "\"text\",\"text\":\"and\"}]}]}";

static void test_messages(void **state) {
    (void)state;
    char body[1024];
    snprintf(body, sizeof body, "{%s", messages_body);
    rig_call *c = rig_post(&r, "/v1/messages", body);
    say_all();
    const char *const parts[] = {
        "\"type\":\"message\"",
        "{\"type\":\"thinking\",\"thinking\":\"hm\",\"signature\":\"none\"}",
        "{\"type\":\"text\",\"text\":\"so\"}",
        "{\"type\":\"tool_use\",\"id\":\"toolu_",
        "\"input\":{\"a\": 1}}",
        "\"stop_reason\":\"tool_use\"",
        "\"cache_read_input_tokens\":1"};
    expect_order(c, parts, sizeof parts / sizeof parts[0]);
    done(c);
    r.n_requests = 0;
    snprintf(body, sizeof body, "{\"stream\":true,%s", messages_body);
    c = rig_post(&r, "/v1/messages", body);
    say_all();
    const char *const events[] = {"event: message_start",
                                  "content_block_start\",\"index\":0",
                                  "thinking_delta",
                                  "signature_delta",
                                  "content_block_stop\",\"index\":0",
                                  "content_block_start\",\"index\":1",
                                  "text_delta",
                                  "content_block_stop\",\"index\":1",
                                  "\"tool_use\",\"id\":\"toolu_",
                                  "\"partial_json\":\"{\\\"a\\\": 1}\"",
                                  "content_block_stop\",\"index\":2",
                                  "message_delta",
                                  "tool_use",
                                  "message_stop"};
    expect_order(c, events, sizeof events / sizeof events[0]);
    done(c);
    snprintf(body, sizeof body, "{%s", messages_body);
    c = rig_post(&r, "/v1/messages/count_tokens", body);
    expect_text(c, "{\"input_tokens\":");
    done(c);
}

/* A call that was cut must not look as if it could run. */
static void test_messages_cut_call(void **state) {
    (void)state;
    rig_call *c = rig_post(&r, "/v1/messages",
                           "{" USER ",\"tools\":[{\"name\":\"add\","
                           "\"input_schema\":{}}]}");
    rig_say(&r, 0, 0, HD_DELTA_CALL, 0, "add");
    rig_say(&r, 0, 0, HD_DELTA_ARGUMENTS, 0, "{\"a\": ");
    rig_end(&r, 0, 0, HD_FINISH_LENGTH);
    expect_text(c, "\"content\":[],\"stop_reason\":\"max_tokens\"");
    done(c);
}

static void test_responses(void **state) {
    (void)state;
    rig_call *c = rig_post(&r, "/v1/responses", "{\"input\":\"q\",\"instructions\":\"i\"}");
    say_all();
    const char *const parts[] = {"\"id\":\"resp_call-1\"",
                                 "\"status\":\"completed\"",
                                 "{\"type\":\"reasoning\",\"id\":\"rs_",
                                 "{\"type\":\"message\",\"id\":\"msg_",
                                 "\"text\":\"so\"",
                                 "{\"type\":\"function_call\",\"id\":\"fc_",
                                 "\"call_id\":\"call_",
                                 "\"arguments\":\"{\\\"a\\\": 1}\"",
                                 "\"instructions\":\"i\""};
    expect_order(c, parts, sizeof parts / sizeof parts[0]);
    rig_call *again = rig_get(&r, "/v1/responses/resp_call-1");
    assert_string_equal(rig_text(again), rig_text(c));
    done(again);
    done(c);
    r.n_requests = 0;
    c = rig_post(&r, "/v1/responses",
                 "{\"input\":\"more\",\"stream\":true,\"rid\":\"two\","
                 "\"previous_response_id\":\"resp_call-1\",\"store\":false}");
    say_all();
    const char *const events[] = {"event: response.created",
                                  "response.in_progress",
                                  "\"output_index\":0",
                                  "response.reasoning_text.delta",
                                  "response.reasoning_text.done",
                                  "response.output_item.done",
                                  "response.output_text.delta",
                                  "response.output_text.done",
                                  "response.content_part.done",
                                  "response.function_call_arguments.delta",
                                  "response.function_call_arguments.done",
                                  "response.completed"};
    expect_order(c, events, sizeof events / sizeof events[0]);
    expect_none(c, "[DONE]");
    done(c);
    c = rig_get(&r, "/v1/responses/resp_two");
    assert_int_equal(rig_status(c), 404);
    done(c);
}

/* ---- the rest ---- */

static void test_texts(void **state) {
    static const struct {
        const char *path, *body, *answer;
    } rows[] = {
        {"/tokenize",            "{\"prompt\":\"the<s>\"}",
         "{\"max_model_len\":4096,\"tokens\":[257,261],\"count\":2}"                                                                        },
        {"/tokenize",
         "{\"prompt\":\"the<s>\",\"return_token_strs\":true,\"parse_special\":false}", "{\"max_model_len\":4096,\"tokens\":[257,60,115,62],\"count\":4,"
         "\"token_strs\":[\"the\",\"<\",\"s\",\">\"]}"},
        {"/v1/tokenize",         "{\"content\":\"the<s>\",\"with_pieces\":true}",
         "{\"max_model_len\":4096,\"tokens\":[{\"id\":257,\"piece\":\"the\"},"
         "{\"id\":261,\"piece\":\"<s>\"}],\"count\":2}"                                                                                     },
        {"/tokenize",            "{\"prompt\":[\"a\",\"the\"]}",
         "{\"max_model_len\":4096,\"tokens\":[[97],[257]],\"count\":[1,1]}"                                                                 },
        {"/detokenize",          "{\"tokens\":[97,261]}",
         "{\"text\":\"a\",\"prompt\":\"a\",\"content\":\"a\"}"                                                                              },
        {"/separate_reasoning",
         "{\"text\":\"x</think>y\",\"reasoning_parser\":\"deepseek-r1\"}",             "{\"reasoning_text\":\"x\",\"text\":\"y\"}"          },
        {"/parse_function_call", "{\"text\":\"plain\"," TOOLS "}",
         "{\"normal_text\":\"plain\",\"calls\":[]}"                                                                                         },
        {"/apply-template",      "{" USER "}",
         "{\"prompt\":\"<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜></think>\"}"                                            },
    };
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        rig_call *c = rig_post(&r, rows[i].path, rows[i].body);
        assert_string_equal(rig_text(c), rows[i].answer);
        done(c);
    }
}

/* Every route is described, and every description is JSON. */
static void test_openapi(void **state) {
    (void)state;
    rig_call *c = rig_get(&r, "/openapi.json");
    json_error_t why;
    json_t *o = json_loads(rig_text(c), JSON_REJECT_DUPLICATES, &why);
    if (!o) fail_msg("%s", why.text);
    for (size_t i = 0; i < api_n_routes; i++) {
        char path[96];
        rig_call *probe;
        const char *p = api_routes[i].path;
        const size_t n = strlen(p);
        snprintf(path, sizeof path, p[n - 1] == '*' ? "%.*s{id}" : "%.*s",
                 (int)(p[n - 1] == '*' ? n - 1 : n), p);
        if (json_object_get(json_object_get(o, "paths"), path)) continue;
        if (strcmp(p, "/openapi.json") == 0) continue;
        probe = rig_post(&r, p, "{}"); /* what is not described is refused */
        assert_int_equal(rig_status(probe), 404);
        done(probe);
    }
    json_decref(o);
    done(c);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_refusals, setup, teardown),
        cmocka_unit_test_setup_teardown(test_deep_and_wide, setup, teardown),
        cmocka_unit_test_setup_teardown(test_handed_over, setup, teardown),
        cmocka_unit_test_setup_teardown(test_full_queue, setup, teardown),
        cmocka_unit_test_setup_teardown(test_sentences_are_not_read, setup, teardown),
        cmocka_unit_test_setup_teardown(test_batch_refused_in_the_middle, setup, teardown),
        cmocka_unit_test_setup_teardown(test_all_pairs, setup, teardown),
        cmocka_unit_test_setup_teardown(test_chat_reply, setup, teardown),
        cmocka_unit_test_setup_teardown(test_chat_stream, setup, teardown),
        cmocka_unit_test_setup_teardown(test_chat_calls_stream, setup, teardown),
        cmocka_unit_test_setup_teardown(test_stream_interval, setup, teardown),
        cmocka_unit_test_setup_teardown(test_reasoning_held_and_merged, setup, teardown),
        cmocka_unit_test_setup_teardown(test_answers_interleave, setup, teardown),
        cmocka_unit_test_setup_teardown(test_ends, setup, teardown),
        cmocka_unit_test_setup_teardown(test_client_vanishes, setup, teardown),
        cmocka_unit_test_setup_teardown(test_tokens_are_set_aside, setup, teardown),
        cmocka_unit_test_setup_teardown(test_completion_scores, setup, teardown),
        cmocka_unit_test_setup_teardown(test_generate, setup, teardown),
        cmocka_unit_test_setup_teardown(test_prefill_only, setup, teardown),
        cmocka_unit_test_setup_teardown(test_messages, setup, teardown),
        cmocka_unit_test_setup_teardown(test_messages_cut_call, setup, teardown),
        cmocka_unit_test_setup_teardown(test_responses, setup, teardown),
        cmocka_unit_test_setup_teardown(test_texts, setup, teardown),
        cmocka_unit_test_setup_teardown(test_openapi, setup, teardown),
    };
    return cmocka_run_group_tests_name("api", tests, NULL, NULL) + test_kept() + test_resume();
}
