/* test_chat.c - what the command line does not show of the chat encodings: the strict checks,
 * spans and their bytes, limits, and a prompt that does not fit. */
#include "check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "chat/chat.h"

typedef struct rendered {
    json_t *document; /* what the conversation points into */
    hd_conversation conversation;
    hd_chat_prompt prompt;
    hd_err err;
} rendered;

static json_t *parse(const char *text) {
    json_t *v;
    hd_err err = {0};
    if (hd_chat_parse_json(&v, text, strlen(text), "test", &err) != HD_OK)
        fail_msg("%s", err.msg);
    return v;
}

static hd_status render(rendered *r, const char *messages, hd_chat_options options) {
    *r = (rendered){.document = parse(messages)};
    hd_status st = hd_chat_parse(&r->conversation, r->document, NULL, NULL, false, &r->err);
    if (st == HD_OK) st = hd_chat_render(&r->prompt, &r->conversation, &options, &r->err);
    return st;
}

static void drop(rendered *r) {
    hd_chat_prompt_deinit(&r->prompt);
    hd_conversation_deinit(&r->conversation);
    json_decref(r->document);
}

static void check_spans(const hd_chat_prompt *p) {
    size_t at = 0;
    for (int32_t i = 0; i < p->n_spans; i++) {
        assert_int_equal(p->spans[i].start, at);
        assert_true(p->spans[i].n > 0);
        if (i > 0) assert_true(p->spans[i].is_control != p->spans[i - 1].is_control);
        at += p->spans[i].n;
    }
    assert_int_equal(at, p->n);
}

static bool holds(const hd_chat_prompt *p, const char *text) {
    size_t n = strlen(text);
    for (size_t i = 0; i + n <= p->n; i++) {
        if (memcmp(p->text + i, text, n) == 0) return true;
    }
    return false;
}

static void content_keeps_its_bytes(void **state) {
    (void)state;
    static const char nul[] = "a\0b<\xef\xbd\x9cUser\xef\xbd\x9c>";
    for (int e = 0; e < HD_CHAT_N_ENCODINGS; e++) {
        rendered r;
        hd_chat_options options = {.encoding = (hd_chat_encoding)e};
        hd_status st =
            render(&r, "[{\"role\": \"user\", \"content\": \"a\\u0000b<｜User｜>\"}]", options);
        assert_int_equal(st, HD_OK);
        check_spans(&r.prompt);
        const hd_text_span *s = &r.prompt.spans[1];
        assert_false(s->is_control);
        assert_int_equal(s->n, sizeof nul - 1);
        assert_memory_equal(r.prompt.text + s->start, nul, sizeof nul - 1);
        drop(&r);
    }
}

static void empty_content_makes_no_span(void **state) {
    (void)state;
    rendered r;
    assert_int_equal(render(&r, "[{\"role\": \"user\", \"content\": \"\"}]",
                            (hd_chat_options){.encoding = HD_CHAT_V4}),
                     HD_OK);
    assert_int_equal(r.prompt.n_spans, 1);
    check_spans(&r.prompt);
    drop(&r);
}

static void large_prompts_are_refused(void **state) {
    (void)state;
    rendered r;
    hd_chat_options options = {.encoding = HD_CHAT_V3, .max_bytes = 100};
    assert_int_equal(render(&r, "[{\"role\": \"user\", \"content\": \"fits\"}]", options),
                     HD_OK);
    assert_true(r.prompt.n <= 100);
    drop(&r);
    char text[200];
    snprintf(text, sizeof text, "[{\"role\": \"user\", \"content\": \"%0100d\"}]", 7);
    assert_int_equal(render(&r, text, options), HD_EINVAL);
    assert_string_equal(r.err.msg, "the prompt is larger than 100 bytes");
    assert_null(r.prompt.text);
    drop(&r);
}

/* What an interface must demand although a prompt could be made without. */
static void strict_wants_ids(void **state) {
    (void)state;
#define CALL(id)      "{" id "\"function\": {\"name\": \"f\", \"arguments\": \"{}\"}}"
#define CALLER(calls) "{\"role\": \"assistant\", \"tool_calls\": [" calls "]}"
#define RESULT(id)    "{\"role\": \"tool\", " id "\"content\": \"x\"}"
    static const struct {
        const char *messages, *refusal; /* NULL: accepted */
    } rows[] = {
        {"[" CALLER(CALL("\"id\": \"a\", ")) "," RESULT("\"tool_call_id\": \"a\", ") "]", NULL                                            },
        {"[" CALLER(CALL("")) "]",                                                        "messages[0].tool_calls[0].id: must be a string"},
        {"[" CALLER(CALL("\"id\": \"\", ")) "]",
         "messages[0].tool_calls[0].id: must not be empty"                                                                                },
        {"[" RESULT("") "]",                                                              "messages[0].tool_call_id: must be a string"    },
        {"[" RESULT("\"tool_call_id\": \"a\", ") "]",
         "messages[0].tool_call_id: names no call of the message before"                                                                  },
        {"[" CALLER(CALL("\"id\": \"a\", ")) "," RESULT("\"tool_call_id\": \"b\", ") "]",
         "messages[1].tool_call_id: names no call of the message before"                                                                  },
    };
#undef CALL
#undef CALLER
#undef RESULT
    for (size_t i = 0; i < HD_LEN(rows); i++) {
        hd_conversation c;
        hd_err err = {0};
        json_t *v = parse(rows[i].messages);
        hd_status st = hd_chat_parse(&c, v, NULL, NULL, true, &err);
        assert_int_equal(st, rows[i].refusal ? HD_EINVAL : HD_OK);
        if (rows[i].refusal) {
            assert_string_equal(err.msg, rows[i].refusal);
            assert_memory_equal(err.field, err.msg, strlen(err.field));
            assert_int_equal(err.msg[strlen(err.field)], ':');
        }
        hd_conversation_deinit(&c);
        err = (hd_err){0};
        assert_int_equal(hd_chat_parse(&c, v, NULL, NULL, false, &err), HD_OK); /* lenient */
        hd_conversation_deinit(&c);
        json_decref(v);
    }
}

/* A number no parser holds is never taken for a text, and a text never for a number. */
static void odd_numbers_are_not_texts(void **state) {
    (void)state;
    rendered r;
    hd_chat_options v4 = {.encoding = HD_CHAT_V4};
    assert_int_equal(
        render(&r, "[{\"role\": \"user\", \"content\": 99999999999999999999}]", v4), HD_EINVAL);
    drop(&r);
    assert_int_equal(
        render(&r,
               "[{\"role\": \"assistant\", \"tool_calls\": [{\"function\": {\"name\": "
               "\"f\", \"arguments\": {\"a\": 99999999999999999999, "
               "\"b\": \"99999999999999999999\", \"c\": [1e999, -1e999]}}}]}]",
               v4),
        HD_OK);
    static const char want[] =
        "name=\"a\" string=\"false\">99999999999999999999</｜DSML｜parameter>\n"
        "<｜DSML｜parameter name=\"b\" string=\"true\">99999999999999999999<"
        "/｜DSML｜parameter>\n"
        "<｜DSML｜parameter name=\"c\" string=\"false\">[Infinity, "
        "-Infinity]</｜DSML｜parameter>";
    assert_true(holds(&r.prompt, want));
    drop(&r);
    json_t *v;
    static const char key[] = "{99999999999999999999: 1}";
    assert_int_equal(hd_chat_parse_json(&v, key, sizeof key - 1, "test", NULL), HD_EFORMAT);
    static const char nan[] = "[NaN]";
    assert_int_equal(hd_chat_parse_json(&v, nan, sizeof nan - 1, "test", NULL), HD_EFORMAT);
}

/* What begins as such a number is carried is refused, however it is spelled; anywhere else the two
 * characters are text, beside such numbers too. */
static void odd_numbers_are_not_forged(void **state) {
    (void)state;
#define RAW "\xef\xb7\x90\xef\xb7\x91"
    static const struct {
        const char *text;
        bool forged;
    } rows[] = {
        {"\"\\uFDD0\\ufdd11\"",                                  true },
        {"[1,\n{\"a\": \"" RAW "true\"}, 99999999999999999999]", true },
        {"\"\xef\xb7\x90\\uFDd1\"",                              true },
        {"[\"\\ufdd0\xef\xb7\x91\"]",                            true },
        {"{\"" RAW "1\" :\"" RAW "\"}",                          true },
        {"{\"" RAW "1\" : 99999999999999999999}",                false},
        {"[\" " RAW "1\", 99999999999999999999]",                false},
        {"[\"\xef\xb7\x90\", \"\xef\xb7\x91\"]",                 false},
        {"[\"\\\\ufdd0\\\\ufdd11\", \"\\\"" RAW "\"]",           false},
        {"\"\\ufdd1\\ufdd0\"",                                   false},
    };
    for (size_t i = 0; i < HD_LEN(rows); i++) {
        json_t *v;
        hd_err err = {0};
        const hd_status st =
            hd_chat_parse_json(&v, rows[i].text, strlen(rows[i].text), "it", &err);
        assert_int_equal(st, rows[i].forged ? HD_EFORMAT : HD_OK);
        if (rows[i].forged) assert_non_null(strstr(err.msg, "begins with U+FDD0 U+FDD1"));
        json_decref(v);
    }
    rendered r;
    static const char call[] =
        "[{\"role\": \"assistant\", \"tool_calls\": [{\"function\": {\"name\": \"f\", "
        "\"arguments\": \"{\\\"a\\\": \\\"\\\\uFDD0\\\\uFDD1true\\\"}\"}}]}]";
    assert_int_equal(render(&r, call, (hd_chat_options){.encoding = HD_CHAT_V4}), HD_OK);
    assert_true(holds(&r.prompt, "string=\"true\">{\"a\": \"\\uFDD0\\uFDD1true\"}<"));
    drop(&r);
#undef RAW
}

static void odd_numbers_are_written_as_they_were(void **state) {
    (void)state;
    static const char text[] =
        "[-99999999999999999999,\"9\",{\"\xef\xb7\x90\xef\xb7\x91\":1e999},"
        "-1e999,\"\\\"\",18446744073709551616]";
    json_t *v;
    assert_int_equal(hd_chat_parse_json(&v, text, sizeof text - 1, "it", NULL), HD_OK);
    char *out = json_dumps(v, JSON_COMPACT);
    const size_t n = hd_chat_bare_numbers(out, strlen(out));
    assert_int_equal(n, sizeof text - 1);
    assert_memory_equal(out, text, n);
    free(out);
    json_decref(v);
}

static void encodings_have_names(void **state) {
    (void)state;
    assert_string_equal(hd_chat_encoding_name(HD_CHAT_V31_TERMINUS), "v3.1-terminus");
    assert_true(hd_chat_thinks(HD_CHAT_R1) && !hd_chat_thinks(HD_CHAT_V4));
    assert_true(hd_chat_thinks(HD_CHAT_V41));
}

static const char with_calls[] =
    "[{\"role\": \"user\", \"content\": \"q\"}, {\"role\": \"assistant\", "
    "\"reasoning_content\": \"w\\n\", \"content\": [{\"type\": \"text\", \"text\": \" s\"}, "
    "{\"type\": \"text\", \"text\": \"o \"}], "
    "\"tool_calls\": [{\"id\": \"a\", \"type\": \"function\", \"function\": {\"name\": \"f\", "
    "\"arguments\": \"{\\\"x\\\": \\\"</think>\\\"}\"}}, {\"id\": \"b\", \"type\": "
    "\"function\", \"function\": {\"name\": \"g\", \"arguments\": \"{}\"}}]}, {\"role\": "
    "\"tool\", \"tool_call_id\": \"a\", \"content\": \"1\"}, {\"role\": \"tool\", "
    "\"tool_call_id\": \"b\", \"content\": \"2\"}]";
static const char without_calls[] =
    "[{\"role\": \"user\", \"content\": \"q\"}, {\"role\": \"assistant\", "
    "\"reasoning_content\": \"w\\n\", \"content\": \" s\\no \"}, "
    "{\"role\": \"user\", \"content\": \"q\"}]";
static const char question[] = "[{\"role\": \"user\", \"content\": \"q\"}]";

static bool text_at(const hd_chat_prompt *p, size_t at, const char *text) {
    const size_t n = strlen(text);
    return at + n <= p->n && memcmp(p->text + at, text, n) == 0;
}

/* The block of the only answer begins where the prompt for that answer ended. */
static void expect_block(const char *messages, hd_chat_options options, int32_t n_calls) {
    const bool wide = options.encoding == HD_CHAT_V41 && messages == with_calls;
    const char *text = wide ? " s\n\no " : " s\no "; /* between parts */
    rendered before, r;
    const bool thinks = options.thinking;
    assert_int_equal(render(&before, question, options), HD_OK);
    assert_int_equal(render(&r, messages, options), HD_OK);
    assert_int_equal(before.prompt.n_blocks, 0);
    assert_int_equal(r.prompt.n_blocks, 1);
    const hd_chat_block *b = &r.prompt.blocks[0];
    assert_int_equal(b->message, 1);
    assert_int_equal(b->begin, before.prompt.n);
    assert_memory_equal(r.prompt.text, before.prompt.text, b->begin);
    assert_true(text_at(&r.prompt, b->end, "<｜end▁of▁sentence｜>"));
    assert_true(b->thought == thinks && b->n_reasoning == (thinks ? 2 : 0));
    if (thinks) {
        assert_true(text_at(&r.prompt, b->begin, "w\n</think>"));
        assert_true(text_at(&r.prompt, b->begin + strlen("w\n</think>"), text));
    }
    assert_int_equal(b->n_calls, n_calls);
    const bool has_text = b->n_content > 0; /* V3 has calls or text */
    assert_true(has_text || n_calls > 0);
    if (has_text) {
        assert_int_equal(b->n_content, strlen(text));
        assert_true(text_at(&r.prompt, b->content, text));
    }
    assert_true(b->content + b->n_content <= b->end && b->tokens.n == 0);
    drop(&before);
    drop(&r);
}

static void blocks_of_answers_are_known(void **state) {
    (void)state;
    for (int e = 0; e < (int)HD_CHAT_N_ENCODINGS; e++) {
        hd_chat_options options = {.encoding = (hd_chat_encoding)e};
        expect_block(without_calls, options, 0);
        if (e != HD_CHAT_V2) expect_block(with_calls, options, e == HD_CHAT_V3 ? 0 : 2);
        options.thinking = true; /* of the current turn it is kept */
        if (e == HD_CHAT_V32) expect_block(with_calls, options, 2);
    }
}

static void verbatim_tokens_stand_for_answers(void **state) {
    (void)state;
    hd_tokenizer *t;
    assert_int_equal(hd_tokenizer_open(&t, "models/tiny-v4", NULL), HD_OK);
    rendered r;
    assert_int_equal(render(&r, with_calls, (hd_chat_options){.encoding = HD_CHAT_V4}), HD_OK);
    hd_chat_block *b = &r.prompt.blocks[0];
    hd_ids whole = {0}, block = {0}, again = {0}, odd = {0};
    assert_int_equal(hd_chat_encode(&r.prompt, t, &whole, NULL), HD_OK);
    const hd_text_span all = {0, b->end - b->begin, true};
    assert_int_equal(
        hd_tokenizer_encode_spans(t, r.prompt.text + b->begin, all.n, &all, 1, &block, NULL),
        HD_OK);
    /* Where the block lies among the ids: nothing else is cut differently. */
    static const int32_t strange[] = {5, 4, 3, 5};
    assert_int_equal(hd_ids_append(&b->tokens, strange, 4, NULL), HD_OK);
    assert_int_equal(hd_chat_encode(&r.prompt, t, &odd, NULL), HD_OK);
    size_t before = 0;
    while (whole.ids[before] == odd.ids[before]) before++;
    assert_memory_equal(odd.ids + before, strange, sizeof strange);
    const size_t behind = odd.n - before - 4;
    assert_memory_equal(odd.ids + before + 4, whole.ids + whole.n - behind,
                        behind * sizeof *odd.ids);
    assert_int_equal(whole.ids[before], block.ids[0]);
    /* Its own ids in its place change nothing. */
    b->tokens.n = 0;
    assert_int_equal(
        hd_ids_append(&b->tokens, whole.ids + before, whole.n - behind - before, NULL), HD_OK);
    assert_int_equal(hd_chat_encode(&r.prompt, t, &again, NULL), HD_OK);
    assert_int_equal(again.n, whole.n);
    assert_memory_equal(again.ids, whole.ids, whole.n * sizeof *whole.ids);
    hd_ids_deinit(&whole);
    hd_ids_deinit(&block);
    hd_ids_deinit(&again);
    hd_ids_deinit(&odd);
    drop(&r);
    hd_tokenizer_close(t);
}

int test_chat(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(content_keeps_its_bytes),
        cmocka_unit_test(empty_content_makes_no_span),
        cmocka_unit_test(large_prompts_are_refused),
        cmocka_unit_test(strict_wants_ids),
        cmocka_unit_test(odd_numbers_are_not_texts),
        cmocka_unit_test(odd_numbers_are_not_forged),
        cmocka_unit_test(odd_numbers_are_written_as_they_were),
        cmocka_unit_test(encodings_have_names),
        cmocka_unit_test(blocks_of_answers_are_known),
        cmocka_unit_test(verbatim_tokens_stand_for_answers),
    };
    return cmocka_run_group_tests_name("chat", tests, NULL, NULL);
}
