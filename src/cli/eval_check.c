/* eval_check.c - splits a reply with the server's reply parser, then compares it with the
 * expectation. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include "cli/eval_check.h"

#include <ctype.h>
#include <pcre2.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/json.h"
#include "chat/reply.h"
#include "cli/countdown.h"
#include "tokenizer/tokenizer.h"

static bool is_text(const json_t *expect) {
    return json_is_string(expect);
}

static bool is_calls(const json_t *expect) {
    return json_is_array(expect);
}

static bool is_number(const json_t *x) {
    return json_is_integer(x) && hd_is_within(json_integer_value(x), 0, COUNTDOWN_MAX_NUMBER);
}

static bool is_numbers(const json_t *expect) {
    const json_t *numbers = json_object_get(expect, "numbers");
    const size_t n = json_array_size(numbers);
    bool fits =
        is_number(json_object_get(expect, "target")) && n > 0 && n <= COUNTDOWN_MAX_NUMBERS;
    for (size_t i = 0; i < n; i++) fits = fits && is_number(json_array_get(numbers, i));
    return fits;
}

static const struct {
    const char *name, *what; /* what `expect` is */
    bool (*fits)(const json_t *expect);
} types[] = {
    {"exact",        "a string",                                                              is_text },
    {"contains",     "a string",                                                              is_text },
    {"final_number", "a string",                                                              is_text },
    {"regex",        "a string",                                                              is_text },
    {"tool_call",    "an array of calls",                                                     is_calls},
    {"countdown",    "an object of numbers (1 to 16) and a target, integers of 0 to 1000000",
     is_numbers                                                                                       },
};

typedef struct parts {
    hd_bytes content, arguments;
    json_t *calls; /* [{"name", "arguments"}] */
    json_t *call;  /* the one being read */
    bool clean, out_of_memory;
} parts;

hd_status eval_check_valid(const json_t *checker, const char *where, hd_err *err) {
    const char *type = json_string_value(json_object_get(checker, "type"));
    const json_t *expect = json_object_get(checker, "expect");
    for (size_t i = 0; type && i < HD_LEN(types); i++) {
        if (strcmp(type, types[i].name) != 0) continue;
        if (types[i].fits(expect)) return HD_OK;
        return HD_FAIL(err, HD_EINVAL, "%s: checker.expect must be %s", where, types[i].what);
    }
    return HD_FAIL(
        err, HD_EINVAL,
        "%s: checker.type must be exact, contains, final_number, regex, tool_call or "
        "countdown",
        where);
}

static void append(parts *p, hd_bytes *to, const hd_reply_event *e) {
    if (hd_bytes_append(to, e->text, e->n, NULL) != HD_OK) p->out_of_memory = true;
}

static void collect(void *user, const hd_reply_event *e) {
    parts *p = user;
    switch (e->kind) {
    case HD_REPLY_REASONING:
        break;
    case HD_REPLY_CONTENT:
        append(p, &p->content, e);
        break;
    case HD_REPLY_CALL_BEGIN:
        p->call = json_object();
        json_object_set_new(p->call, "name", json_stringn(e->text, e->n));
        p->arguments.n = 0;
        break;
    case HD_REPLY_ARGUMENTS:
        append(p, &p->arguments, e);
        break;
    case HD_REPLY_CALL_END:
        if (e->end == HD_REPLY_COMPLETE) {
            json_object_set_new(p->call, "arguments",
                                hd_json_read(p->arguments.data, p->arguments.n, 0, NULL));
            json_array_append(p->calls, p->call);
        }
        json_decref(p->call);
        p->call = NULL;
        break;
    case HD_REPLY_NOTE:
        p->clean = false;
        break;
    }
}

static hd_status take_apart(parts *p, const char *text, size_t n, hd_chat_encoding encoding,
                            bool thinking, hd_err *err) {
    const hd_reply_options options = {.format = hd_reply_format_of(encoding),
                                      .starts_in_reasoning = thinking,
                                      .parse_tools = true,
                                      .whole_calls = true};
    hd_reply *reply;
    p->calls = json_array();
    p->clean = true;
    HD_TRY(hd_reply_open(&reply, &options, collect, p, err));
    hd_status st = hd_reply_feed(reply, text, n, false, err);
    if (st == HD_OK) st = hd_reply_finish(reply, HD_FINISH_STOP, err);
    hd_reply_close(reply);
    if (st == HD_OK && p->out_of_memory) {
        st = HD_FAIL(err, HD_ENOMEM, "no memory for a reply of %zu bytes", n);
    }
    return st;
}

static void trim(hd_bytes *b, const char **text, size_t *n) {
    *text = b->n ? b->data : "";
    *n = b->n;
    while (*n && isspace((unsigned char)**text)) {
        (*text)++;
        (*n)--;
    }
    while (*n && isspace((unsigned char)(*text)[*n - 1])) (*n)--;
}

static bool contains(const char *text, size_t n, const char *part) {
    const size_t k = strlen(part);
    for (size_t i = 0; i + k <= n; i++) {
        if (memcmp(text + i, part, k) == 0) return true;
    }
    return false;
}

static bool is_digit(char c) {
    return c >= '0' && c <= '9';
}

static bool final_number_is(const char *text, size_t n, const char *expect) {
    size_t end = n;
    while (end > 0 && !is_digit(text[end - 1])) end--;
    size_t start = end;
    while (start > 0 && is_digit(text[start - 1])) start--;
    if (start > 0 && end > start && text[start - 1] == '-') start--;
    return end > start && strlen(expect) == end - start &&
           memcmp(text + start, expect, end - start) == 0;
}

static hd_status matches(bool *out, const char *text, size_t n, const char *pattern,
                         hd_err *err) {
    int code;
    PCRE2_SIZE at;
    pcre2_code *re = pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED,
                                   PCRE2_UTF | PCRE2_UCP | PCRE2_DOTALL, &code, &at, NULL);
    if (!re) {
        return HD_FAIL(err, HD_EINVAL, "checker.expect: bad pattern at %zu: %.80s", (size_t)at,
                       pattern);
    }
    pcre2_match_data *data = pcre2_match_data_create_from_pattern(re, NULL);
    *out = data && pcre2_match(re, (PCRE2_SPTR)text, n, 0, 0, data, NULL) >= 0;
    pcre2_match_data_free(data);
    pcre2_code_free(re);
    return HD_OK;
}

static bool makes_number(const char *text, size_t n, const json_t *expect) {
    const json_t *list = json_object_get(expect, "numbers");
    int32_t numbers[COUNTDOWN_MAX_NUMBERS];
    const int32_t count = (int32_t)json_array_size(list);
    size_t start = n;
    while (start > 0 && text[start - 1] != '\n') start--;
    for (int32_t i = 0; i < count; i++) {
        numbers[i] = (int32_t)json_integer_value(json_array_get(list, (size_t)i));
    }
    return countdown_is_right(text + start, n - start, numbers, count,
                              (int32_t)json_integer_value(json_object_get(expect, "target")));
}

static hd_status judge(eval_verdict *out, const json_t *checker, parts *p, hd_err *err) {
    const char *type = json_string_value(json_object_get(checker, "type"));
    const json_t *expect = json_object_get(checker, "expect");
    const char *want = json_string_value(expect), *text;
    size_t n;
    trim(&p->content, &text, &n);
    if (strcmp(type, "tool_call") == 0) {
        out->finished = p->clean && json_array_size(p->calls) > 0;
        out->right = p->clean && json_equal(p->calls, expect) == 1;
        return HD_OK;
    }
    out->finished = p->clean && n > 0;
    if (strcmp(type, "exact") == 0) {
        out->right = strlen(want) == n && memcmp(text, want, n) == 0;
    } else if (strcmp(type, "contains") == 0) {
        out->right = contains(text, n, want);
    } else if (strcmp(type, "final_number") == 0) {
        out->right = final_number_is(text, n, want);
    } else if (strcmp(type, "countdown") == 0) {
        out->right = makes_number(text, n, expect);
    } else {
        return matches(&out->right, text, n, want, err);
    }
    return HD_OK;
}

hd_status eval_check(eval_verdict *out, const json_t *checker, const char *text, size_t n,
                     hd_chat_encoding encoding, bool thinking, hd_err *err) {
    parts p = {0};
    *out = (eval_verdict){0};
    hd_status st = take_apart(&p, text, n, encoding, thinking, err);
    if (st == HD_OK) st = judge(out, checker, &p, err);
    hd_bytes_deinit(&p.content);
    hd_bytes_deinit(&p.arguments);
    json_decref(p.calls);
    json_decref(p.call);
    return st;
}
