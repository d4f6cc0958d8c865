/* test_token_history.c - token history: if a client sends an answer back, the next prompt
 * begins with the very tokens of the earlier prompt and answer, however the model spelled
 * it. Nothing else is reused. */
#include "check.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "engine/engine.h"
#include "fakes/engine_rig.h"
#include "engine/token_history.h"

enum { MOST_BANS = 500 };

static const char tools_json[] =
    "[{\"type\": \"function\", \"function\": {\"name\": \"calculator\", \"description\": "
    "\"Evaluate an arithmetic expression.\", \"parameters\": {\"type\": \"object\", "
    "\"properties\": {\"expression\": {\"type\": \"string\", \"description\": \"The "
    "expression\"}}, \"required\": [\"expression\"]}}}]";

static json_t *say(const char *role, const hd_bytes *content) {
    return json_pack("{s:s, s:s%}", "role", role, "content", content->data ? content->data : "",
                     content->n);
}

static json_t *ask(const char *text) {
    return json_pack("[{s:s, s:s}]", "role", "user", "content", text);
}

static void append_new(json_t *messages, json_t *m) {
    assert_int_equal(json_array_append_new(messages, m), 0);
}

/* The rig's calls, name(arguments)!, as a client sends them back: only one is understood. */
static void add_call(json_t *m, const hd_bytes *calls) {
    const char *open = memchr(calls->data, '(', calls->n);
    const size_t name = (size_t)(open - calls->data), arguments = calls->n - name - 3;
    json_object_set_new(m, "tool_calls",
                        json_pack("[{s:s, s:s, s:{s:s%, s:s%}}]", "id", "call_1", "type",
                                  "function", "function", "name", calls->data, name,
                                  "arguments", open + 1, arguments));
}

/* Appends the answer and the next messages. */
static void go_on(json_t *messages, const rig_answer *a) {
    json_t *m = say("assistant", &a->content);
    if (a->reasoning.n > 0) {
        json_object_set_new(m, "reasoning_content",
                            json_stringn(a->reasoning.data, a->reasoning.n));
    }
    if (a->calls.n > 0) add_call(m, &a->calls);
    append_new(messages, m);
    append_new(messages, a->calls.n > 0
                             ? json_pack("{s:s, s:s, s:s}", "role", "tool", "tool_call_id",
                                         "call_1", "content", "7")
                             : json_pack("{s:s, s:s}", "role", "user", "content", "And?"));
}

static void run(hd_engine *e, hd_request *g, const json_t *messages, rig_answer *out) {
    char *text = json_dumps(messages, 0);
    assert_non_null(text);
    g->messages = text;
    rig_run(e, g, out);
    free(text);
}

/* Returns the length in tokens of the conversation in an engine without its history. */
static int32_t plain_length(hd_engine *stranger, hd_request g, const json_t *messages) {
    rig_answer a;
    g.max_tokens = 1;
    run(stranger, &g, messages, &a);
    const int32_t n = a.end.prompt_tokens;
    rig_deinit(&a);
    return n;
}

/* Whether the token separates parts of an answer. */
static bool is_marker(const hd_tokenizer *t, int32_t id) {
    static const char *const markers[] = {"</think>",
                                          "｜DSML｜",
                                          "<｜end▁of▁sentence｜>",
                                          "<｜tool▁calls▁begin｜>",
                                          "<｜tool▁calls▁end｜>",
                                          "<｜tool▁call▁begin｜>",
                                          "<｜tool▁call▁end｜>",
                                          "<｜tool▁sep｜>"};
    size_t n;
    const uint8_t *piece = hd_tokenizer_piece(t, id, &n);
    for (size_t k = 0; k < HD_LEN(markers); k++) {
        if (n == strlen(markers[k]) && memcmp(piece, markers[k], n) == 0) return true;
    }
    return false;
}

/* Bans other control tokens: they are not shown, and an answer that contains them is not
 * stored. */
static size_t ban_others(hd_engine *e, hd_logit_bias bias[MOST_BANS]) {
    const hd_tokenizer *t = hd_engine_tokenizer(e);
    size_t n = 0;
    for (int32_t id = 0; id < hd_tokenizer_vocab_size(t) && n < MOST_BANS; id++) {
        if (!hd_tokenizer_is_special(t, id) || is_marker(t, id)) continue;
        bias[n++] = (hd_logit_bias){id, -INFINITY};
    }
    return n;
}

/* Whether the answer is stored: every part of it ended. */
static bool is_kept(hd_engine *e, const rig_answer *a) {
    bool thinks = a->end.reasoning_tokens > 0;
    for (size_t i = 0; i < a->tokens.n && thinks; i++) {
        size_t n;
        const uint8_t *piece = hd_tokenizer_piece(hd_engine_tokenizer(e), a->tokens.ids[i], &n);
        thinks = n != strlen("</think>") || memcmp(piece, "</think>", n) != 0;
    }
    return !thinks && (a->calls.n == 0 || a->calls.data[a->calls.n - 1] == '!');
}

typedef struct tally {
    int32_t odd, calls, thoughts, cut;
} tally;

/* After an answer, its prompt and its tokens hit the prefix cache, except for an incomplete
 * page; the same after the next answer. */
static void expect_hits(hd_engine *e, hd_engine *stranger, hd_request g, const char *text,
                        tally *seen) {
    json_t *messages = ask(text);
    hd_engine_stats stats;
    hd_engine_read_stats(e, &stats);
    int32_t known = 0;
    for (int step = 0; step < (g.tools ? 2 : 3); step++) {
        rig_answer a;
        run(e, &g, messages, &a);
        const int32_t page = stats.page_tokens;
        assert_true(a.end.step.n_cached >= (known - 1) / page * page);
        if (step > 0) seen->odd += plain_length(stranger, g, messages) != a.end.prompt_tokens;
        const bool kept = is_kept(e, &a);
        const bool thought = a.end.reasoning_tokens > 0;
        known = a.end.prompt_tokens + a.end.output_tokens -
                (a.end.step.finish_reason == HD_FINISH_STOP);
        seen->calls += kept && a.calls.n > 0;
        seen->thoughts += kept && thought;
        seen->cut += kept && a.end.step.finish_reason == HD_FINISH_LENGTH;
        go_on(messages, &a);
        rig_deinit(&a);
        if (!kept) break;
    }
    json_decref(messages);
}

static void odd_answers_are_known_again(void **state) {
    (void)state;
    static const char *const models[] = {"models/tiny-v4", "models/tiny-v3"};
    for (size_t i = 0; i < HD_LEN(models); i++) {
        const hd_engine_options o = {.model_dir = models[i], .max_context = 2048};
        hd_engine *e = rig_open("cpu", &o), *stranger = rig_open("cpu", &o);
        tally seen = {0};
        hd_logit_bias bias[MOST_BANS];
        const size_t n_bias = ban_others(e, bias);
        for (uint64_t seed = 0; seed < 2; seed++) {
            hd_request g = {.size = sizeof g,
                            .thinking = -1,
                            .max_tokens = 24,
                            .temperature = 20,
                            .bias = bias,
                            .n_bias = n_bias,
                            .seed = seed,
                            .draft_tokens = 2};
            expect_hits(e, stranger, g, "Tell me a story.", &seen);
            g.temperature = 1.2f;
            g.max_tokens = 160;
            g.tools = tools_json;
            expect_hits(e, stranger, g, "Compute 6221 + 11 with your tool.", &seen);
            g.thinking = i == 0 ? 1 : -1; /* V3.1 drops reasoning in the next turn */
            expect_hits(e, stranger, g, "Compute 6221 + 11 with your tool.", &seen);
        }
        if (seen.odd < 3 || !seen.calls || !seen.cut || (i == 0 && !seen.thoughts)) {
            fail_msg("%d odd ones, %d calls, %d cut, %d with reasoning", seen.odd, seen.calls,
                     seen.cut, seen.thoughts);
        }
        hd_engine_close(e);
        hd_engine_close(stranger);
    }
}

static json_t *answer_of(json_t *messages) {
    return json_array_get(messages, 1);
}

/* Only an unchanged answer, of the same tenant, gets its stored tokens. */
static void what_differs_is_encoded_anew(void **state) {
    (void)state;
    hd_engine *e = rig_open("cpu", NULL), *stranger = rig_open("cpu", NULL);
    hd_logit_bias bias[MOST_BANS];
    hd_request g = {.size = sizeof g,
                    .thinking = -1,
                    .max_tokens = 24,
                    .temperature = 20,
                    .bias = bias,
                    .n_bias = ban_others(e, bias)};
    rig_answer a;
    json_t *messages = ask("Tell me a story.");
    run(e, &g, messages, &a);
    go_on(messages, &a);
    const int32_t anew = plain_length(stranger, g, messages);
    const int32_t known = plain_length(e, g, messages);
    assert_true(known != anew); /* it has an unusual tokenization */
    g.salt = 1;
    assert_int_equal(plain_length(e, g, messages), anew);
    g.salt = 0;
    json_t *thought = json_deep_copy(messages);
    json_object_set_new(answer_of(thought), "reasoning_content", json_string("x"));
    assert_int_equal(plain_length(e, g, thought), known); /* V4 does not render it here */
    json_t *other = json_deep_copy(messages);
    hd_bytes longer = {0};
    assert_int_equal(hd_bytes_append(&longer, a.content.data, a.content.n, NULL), HD_OK);
    assert_int_equal(hd_bytes_append(&longer, ".", 1, NULL), HD_OK);
    json_object_set_new(answer_of(other), "content", json_stringn(longer.data, longer.n));
    assert_int_equal(plain_length(e, g, other), plain_length(stranger, g, other));
    json_t *elsewhere = json_deep_copy(messages);
    json_object_set_new(json_array_get(elsewhere, 0), "content", json_string("Tell."));
    assert_int_equal(plain_length(e, g, elsewhere), plain_length(stranger, g, elsewhere));
    json_t *lists[] = {messages, thought, other, elsewhere};
    for (size_t i = 0; i < HD_LEN(lists); i++) json_decref(lists[i]);
    hd_bytes_deinit(&longer);
    rig_deinit(&a);
    hd_engine_close(e);
    hd_engine_close(stranger);
}

/* A call is the same if its arguments are the same JSON, as text or as an object. */
static void respelled_arguments_are_the_same(void **state) {
    (void)state;
    hd_engine *e = rig_open("cpu", NULL);
    hd_request g = {.size = sizeof g,
                    .tools = tools_json,
                    .thinking = -1,
                    .max_tokens = 200,
                    .tool_choice = "calculator",
                    .temperature = 1};
    rig_answer a;
    json_t *messages = ask("Compute 6221 + 11 with your tool.");
    run(e, &g, messages, &a);
    go_on(messages, &a);
    const int32_t known = a.end.prompt_tokens + a.end.output_tokens;
    json_t *call = json_array_get(json_object_get(answer_of(messages), "tool_calls"), 0);
    json_t *function = json_object_get(call, "function");
    json_t *arguments = json_object_get(function, "arguments");
    json_t *object = json_loads(json_string_value(arguments), 0, NULL);
    char *spaced = json_dumps(object, JSON_INDENT(4));
    static const char *const others[] = {"{", "{}", "{\"expression\": 7}"};
    g.tool_choice = NULL;
    const int32_t with = plain_length(e, g, messages);
    assert_true(with > known);
    json_object_set_new(function, "arguments", json_string(spaced));
    assert_int_equal(plain_length(e, g, messages), with);
    json_object_set(function, "arguments", object);
    assert_int_equal(plain_length(e, g, messages), with);
    for (size_t i = 0; i < HD_LEN(others); i++) {
        json_object_set_new(function, "arguments", json_string(others[i]));
        assert_true(plain_length(e, g, messages) != with);
    }
    free(spaced);
    json_decref(object);
    json_decref(messages);
    rig_deinit(&a);
    hd_engine_close(e);
}

/* Even if the keys of two prompts are equal. */
static void another_salt_knows_nothing(void **state) {
    (void)state;
    engine_token_history *r;
    json_t *messages =
        json_pack("[{s:s, s:s}, {s:s, s:s}, {s:s, s:s}]", "role", "user", "content", "q",
                  "role", "assistant", "content", "so", "role", "user", "content", "q");
    hd_conversation c;
    const hd_chat_options how = {.encoding = HD_CHAT_V4};
    assert_int_equal(hd_chat_parse(&c, messages, NULL, NULL, false, NULL), HD_OK);
    assert_int_equal(engine_token_history_open(&r, 8000, NULL), HD_OK);
    for (uint64_t kept = 0; kept < 3; kept++) {
        const hd_conversation first = {.messages = c.messages, .n = 1};
        hd_chat_prompt before, p;
        uint64_t key, unused;
        engine_answer_tokens answer = {0};
        assert_int_equal(hd_chat_render(&before, &first, &how, NULL), HD_OK);
        assert_int_equal(engine_token_history_fill(r, 5, &first, &before, &key, NULL), HD_OK);
        engine_answer_tokens_push(&answer, 7);
        engine_answer_tokens_event(&answer,
                                   &(hd_reply_event){HD_REPLY_CONTENT, .text = "so", .n = 2});
        engine_token_history_keep(r, 5 ^ kept << 63 ^ kept >> 1, key, &answer);
        assert_int_equal(hd_chat_render(&p, &c, &how, NULL), HD_OK);
        assert_int_equal(engine_token_history_fill(r, 5, &c, &p, &unused, NULL), HD_OK);
        assert_int_equal(p.blocks[0].tokens.n, kept == 0);
        hd_chat_prompt_deinit(&p);
        hd_chat_prompt_deinit(&before);
        engine_token_history_close(r);
        assert_int_equal(engine_token_history_open(&r, 8000, NULL), HD_OK);
    }
    engine_token_history_close(r);
    hd_conversation_deinit(&c);
    json_decref(messages);
}

/* The history is bounded, and used entries stay. */
static void the_oldest_is_forgotten(void **state) {
    (void)state;
    enum { TURNS = 40, BYTES = 8000 };
    engine_token_history *r;
    json_t *messages =
        json_pack("[{s:s, s:s}, {s:s, s:s}, {s:s, s:s}]", "role", "user", "content", "q",
                  "role", "assistant", "content", "so", "role", "user", "content", "q");
    hd_conversation c;
    int32_t n_known = 0;
    assert_int_equal(hd_chat_parse(&c, messages, NULL, NULL, false, NULL), HD_OK);
    assert_int_equal(engine_token_history_open(&r, BYTES, NULL), HD_OK);
    for (int32_t i = 0; i < 2 * TURNS; i++) {
        hd_chat_prompt before, p;
        uint64_t key;
        const hd_conversation first = {.messages = c.messages, .n = 1};
        const hd_chat_options how = {.encoding = HD_CHAT_V4};
        const uint64_t salt = (uint64_t)(i % TURNS);
        assert_int_equal(hd_chat_render(&before, &first, &how, NULL), HD_OK);
        assert_int_equal(engine_token_history_fill(r, salt, &first, &before, &key, NULL),
                         HD_OK);
        assert_int_equal(hd_chat_render(&p, &c, &how, NULL), HD_OK);
        if (i < TURNS) {
            engine_answer_tokens answer = {0};
            engine_answer_tokens_push(&answer, i);
            engine_answer_tokens_event(
                &answer, &(hd_reply_event){HD_REPLY_CONTENT, .text = "so", .n = 2});
            engine_token_history_keep(r, salt, key, &answer);
        }
        /* The first one is used in every round. */
        assert_int_equal(engine_token_history_fill(r, i < TURNS ? 0 : salt, &c, &p, &key, NULL),
                         HD_OK);
        const bool known = p.blocks[0].tokens.n == 1;
        if (known) assert_int_equal(p.blocks[0].tokens.ids[0], i < TURNS ? 0 : i - TURNS);
        assert_true(known || i > TURNS);
        n_known += i >= TURNS && known;
        hd_chat_prompt_deinit(&before);
        hd_chat_prompt_deinit(&p);
    }
    assert_in_range(n_known, 5, TURNS - 5);
    engine_token_history_close(r);
    hd_conversation_deinit(&c);
    json_decref(messages);
}

int test_token_history(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(odd_answers_are_known_again),
        cmocka_unit_test(what_differs_is_encoded_anew),
        cmocka_unit_test(respelled_arguments_are_the_same),
        cmocka_unit_test(another_salt_knows_nothing),
        cmocka_unit_test(the_oldest_is_forgotten),
    };
    return cmocka_run_group_tests_name("token_history", tests, NULL, NULL);
}
