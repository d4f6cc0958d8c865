/* test_reply.c - the reply parser: a table of replies, each in every slicing.
 *
 * What a reply becomes is written as a transcript: [R] reasoning, [C] content, [B0] a call
 * begins, its name, [A0] its arguments, [E0 ...] and how it ends, [N ...] a note. Adjacent deltas are
 * joined, so the transcript must not depend on the slicing. */
#include "check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/philox.h"
#include "chat/reply_cases.h"
#include "chat/reply.h"
#include "chat/reply_internal.h"

enum { MAX_TRANSCRIPT = 1 << 20 };

typedef struct transcript {
    char text[MAX_TRANSCRIPT];
    size_t n;
    hd_reply_event_kind last;
    int32_t last_call;
    bool any, after_delta;
    int32_t open; /* the call under way, or -1 */
    int32_t n_begun;
    char args[MAX_TRANSCRIPT];
    size_t args_n;
} transcript;

static const char *const notes[] = {
#define X(name, text) [HD_REPLY_NOTE_##name] = #name,
    HD_REPLY_NOTES(X)
#undef X
};

static void add(transcript *t, const char *s, size_t n) {
    assert_true(n < sizeof t->text - t->n);
    memcpy(t->text + t->n, s, n);
    t->n += n;
    t->text[t->n] = 0;
}

static void add_tag(transcript *t, char letter, int32_t call, const char *word) {
    char tag[64];
    int n = call < 0
                ? snprintf(tag, sizeof tag, "[%c%s%s]", letter, *word ? " " : "", word)
                : snprintf(tag, sizeof tag, "[%c%d%s%s]", letter, call, *word ? " " : "", word);
    add(t, tag, (size_t)n);
}

/* Python's strict UTF-8, from the table of the Unicode standard. */
static bool is_utf8(const char *s, size_t n) {
    for (size_t i = 0; i < n;) {
        unsigned char c = (unsigned char)s[i++];
        size_t more = c < 0x80 ? 0 : c < 0xe0 ? 1 : c < 0xf0 ? 2 : 3;
        if ((c >= 0x80 && c < 0xc2) || c > 0xf4 || more > n - i) return false;
        for (size_t k = 0; k < more; k++, i++) {
            unsigned char low = 0x80, high = 0xbf, b = (unsigned char)s[i];
            if (k == 0 && c == 0xe0) low = 0xa0;
            if (k == 0 && c == 0xed) high = 0x9f;
            if (k == 0 && c == 0xf0) low = 0x90;
            if (k == 0 && c == 0xf4) high = 0x8f;
            if (b < low || b > high) return false;
        }
    }
    return true;
}

static void end_call(transcript *t, const hd_reply_event *e) {
    static const char *const ends[] = {"complete", "cut", "malformed"};
    assert_int_equal(t->open, e->call);
    t->open = -1;
    add_tag(t, 'E', e->call, ends[e->end]);
    if (e->end != HD_REPLY_COMPLETE) return;
    json_t *args = json_loadb(t->args, t->args_n, JSON_ALLOW_NUL, NULL);
    assert_true(json_is_object(args) || strstr(t->args, "\\ud") || strstr(t->args, "e999"));
    json_decref(args);
}

static void record(void *user, const hd_reply_event *e) {
    transcript *t = user;
    bool delta = e->kind == HD_REPLY_REASONING || e->kind == HD_REPLY_CONTENT ||
                 e->kind == HD_REPLY_ARGUMENTS;
    bool joins = t->any && t->after_delta && delta && t->last == e->kind;
    t->any = true;
    t->after_delta = delta;
    t->last = e->kind;
    if (delta) assert_true(e->n > 0 && is_utf8(e->text, e->n));
    switch (e->kind) {
    case HD_REPLY_REASONING:
        if (!joins) add_tag(t, 'R', -1, "");
        break;
    case HD_REPLY_CONTENT:
        assert_int_equal(t->open, -1);
        if (!joins) add_tag(t, 'C', -1, "");
        break;
    case HD_REPLY_CALL_BEGIN:
        assert_int_equal(t->open, -1);
        assert_int_equal(e->call, t->n_begun);
        t->open = t->n_begun++;
        t->args_n = 0;
        add_tag(t, 'B', e->call, "");
        add(t, e->text, e->n);
        break;
    case HD_REPLY_ARGUMENTS:
        assert_int_equal(t->open, e->call);
        if (!joins) add_tag(t, 'A', e->call, "");
        assert_true(e->n < sizeof t->args - t->args_n);
        memcpy(t->args + t->args_n, e->text, e->n);
        t->args_n += e->n;
        t->args[t->args_n] = 0;
        break;
    case HD_REPLY_CALL_END:
        end_call(t, e);
        break;
    case HD_REPLY_NOTE:
        add_tag(t, 'N', -1, notes[e->note]);
        break;
    }
    if (delta) add(t, e->text, e->n);
}

static transcript transcripts[2];

typedef struct slicing {
    size_t first;  /* 0: none */
    size_t every;  /* 0: the rest at once */
    uint64_t seed; /* not 0: random lengths */
} slicing;

static size_t slice(const slicing *s, size_t i) {
    if (s->seed) return 1 + hd_philox_at(s->seed, 0, i).v[0] % 9;
    if (i == 0 && s->first) return s->first;
    return s->every ? s->every : SIZE_MAX;
}

static void feed_slices(hd_reply *r, const char *text, size_t n, const slicing *s,
                        hd_status *st) {
    size_t i = 0;
    for (size_t at = 0; at < n && *st == HD_OK; i++) {
        size_t part = slice(s, i);
        if (part > n - at) part = n - at;
        char *copy = malloc(part); /* its own allocation, so that a sanitizer sees its ends */
        memcpy(copy, text + at, part);
        *st = hd_reply_feed(r, copy, part, false, NULL);
        free(copy);
        at += part;
    }
}

static void clear(transcript *t) {
    t->text[0] = 0;
    t->args[0] = 0;
    t->n = t->args_n = 0;
    t->any = t->after_delta = false;
    t->open = -1;
    t->n_begun = 0;
}

/* The transcript of one reply. */
static hd_status parse(transcript *t, const hd_reply_options *o, const char *text, size_t n,
                       hd_finish_reason reason, const slicing *s) {
    hd_reply *r;
    hd_err err = {0};
    hd_status st = hd_reply_open(&r, o, record, t, &err);
    clear(t);
    assert_int_equal(st, HD_OK);
    feed_slices(r, text, n, s, &st);
    if (st == HD_OK) st = hd_reply_finish(r, reason, &err);
    if (st == HD_OK) {
        assert_true(r->n <= n && (r->n == 0 || memcmp(r->raw, text, r->n) == 0));
        assert_int_equal(t->open, -1);
    }
    hd_reply_close(r);
    return st;
}

static void same(const transcript *t, const reply_case *c) {
    if (strcmp(t->text, c->expect) != 0) print_error("reply: %s\n", c->text);
    assert_string_equal(t->text, c->expect);
}

static void check_case(const reply_case *c) {
    transcript *whole = &transcripts[0], *cut = &transcripts[1];
    size_t n = strlen(c->text);
    slicing at_once = {0}, bytes = {.first = 1, .every = 1};
    assert_int_equal(parse(whole, &c->opt, c->text, n, c->reason, &at_once), HD_OK);
    same(whole, c);
    parse(cut, &c->opt, c->text, n, c->reason, &bytes);
    same(cut, c);
    for (size_t i = 1; i < n; i++) {
        parse(cut, &c->opt, c->text, n, c->reason, &(slicing){.first = i});
        same(cut, c);
    }
    for (uint64_t seed = 1; seed <= 20; seed++) {
        parse(cut, &c->opt, c->text, n, c->reason, &(slicing){.seed = seed});
        same(cut, c);
    }
}

static void proper_replies(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(proper_cases); i++) {
        reply_case c = proper_cases[i];
        check_case(&c);
        c.opt.strict = true;
        if (c.proper) check_case(&c);
    }
}

static void tolerated_replies(void **state) { /* S27 */
    (void)state;
    for (size_t i = 0; i < HD_LEN(tolerant_cases); i++) check_case(&tolerant_cases[i]);
}

/* --- strict parsing --- */

static void strict_parsing_refuses(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(strict_refusals); i++) {
        const reply_case *c = &strict_refusals[i];
        size_t n = strlen(c->text);
        hd_reply_options o = c->opt;
        o.strict = true;
        for (size_t every = 0; every < 3; every++) {
            slicing s = {.every = every};
            hd_status st = parse(&transcripts[0], &o, c->text, n, c->reason, &s);
            if (st != HD_EFORMAT) print_error("reply: %s\n", c->text);
            assert_int_equal(st, HD_EFORMAT);
            assert_non_null(strstr(transcripts[0].text, c->expect));
        }
    }
}

/* --- tokens that come flagged --- */

/* \1 and \2 enclose a special piece. */
static void feed_flagged(hd_reply *r, const char *text) {
    while (*text) {
        bool special = *text == '\1';
        size_t n = special ? strcspn(text, "\2") - 1 : 1;
        text += special;
        assert_int_equal(hd_reply_feed(r, text, n, special, NULL), HD_OK);
        text += n + special;
    }
}

static void flagged_tokens_cannot_be_spelled(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(flagged_cases); i++) {
        const reply_case *c = &flagged_cases[i];
        transcript *t = &transcripts[0];
        hd_reply *r;
        clear(t);
        assert_int_equal(hd_reply_open(&r, &c->opt, record, t, NULL), HD_OK);
        feed_flagged(r, c->text);
        assert_int_equal(hd_reply_finish(r, c->reason, NULL), HD_OK);
        same(t, c);
        hd_reply_close(r);
    }
}

/* --- what is held, and for how long --- */

static void only_what_could_be_a_marker_is_held(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(held_cases); i++) {
        const reply_case *c = &held_cases[i];
        transcript *t = &transcripts[0];
        hd_reply *r;
        clear(t);
        assert_int_equal(hd_reply_open(&r, &c->opt, record, t, NULL), HD_OK);
        assert_int_equal(hd_reply_feed(r, c->text, strlen(c->text), false, NULL), HD_OK);
        same(t, c); /* before any finish */
        hd_reply_close(r);
    }
}

static void state_can_be_asked(void **state) {
    (void)state;
    hd_reply_options o = {V4_THINKS};
    const char *parts[] = {"a", "</think>b", CALLS(PARIS), "c"};
    const bool reasons[] = {true, false, false, false};
    hd_reply *r;
    clear(&transcripts[0]);
    assert_int_equal(hd_reply_open(&r, &o, record, &transcripts[0], NULL), HD_OK);
    for (size_t i = 0; i < HD_LEN(parts); i++) {
        assert_int_equal(hd_reply_feed(r, parts[i], strlen(parts[i]), false, NULL), HD_OK);
        assert_int_equal(hd_reply_in_reasoning(r), reasons[i]);
        assert_int_not_equal(r->state, REPLY_IN_BLOCK);
    }
    assert_int_equal(hd_reply_feed(r, "\n\n" OPEN, strlen("\n\n" OPEN), false, NULL), HD_OK);
    assert_int_equal(r->state, REPLY_IN_BLOCK);
    hd_reply_close(r);
    hd_reply_close(NULL);
}

/* --- limits --- */

static char *repeat(const char *head, const char *each, size_t times, const char *tail) {
    size_t h = strlen(head), n = strlen(each), t = strlen(tail);
    char *text = malloc(h + n * times + t + 1), *at = text + h;
    memcpy(text, head, h);
    for (size_t i = 0; i < times; i++, at += n) memcpy(at, each, n);
    memcpy(at, tail, t + 1);
    return text;
}

static void expect_parts(const hd_reply_options *o, char *text, const char *part,
                         const char *other) {
    for (size_t every = 0; every < 2; every++) {
        slicing s = {.every = every};
        transcript *t = &transcripts[every];
        assert_int_equal(parse(t, o, text, strlen(text), HD_FINISH_STOP, &s), HD_OK);
        assert_non_null(strstr(t->text, part));
        if (other) assert_non_null(strstr(t->text, other));
    }
    assert_string_equal(transcripts[0].text, transcripts[1].text);
    free(text);
}

static void limits_hold(void **state) {
    (void)state;
    hd_reply_options v4 = {IN_V4}, v31 = {IN_V31};
    static char params[300 * 80];
    char *at = params, name[300];
    for (int i = 0; i < 300; i++) {
        at += snprintf(at, 80,
                       "<" D "parameter name=\"p%d\" string=\"true\">v</" D "parameter>\n", i);
    }
    memset(name, 'n', sizeof name);
    name[256] = 0;
    expect_parts(&v4, repeat("\n\n" OPEN, PARIS, 129, CLOSE "end"),
                 "[E127 complete][N TOO_MANY_CALLS][C]" INV("get_weather"), "invoke>end");
    expect_parts(&v4, repeat("\n\n" OPEN INV("run"), params, 1, END CLOSE "end"),
                 "[E0 malformed][N TOO_MANY_PARAMETERS]", "p299");
    expect_parts(&v4, repeat("\n\n" OPEN "<" D "invoke name=\"", name, 1, "\">\n" END CLOSE),
                 "nn[A0]{}[E0 complete]", NULL);
    expect_parts(&v31, repeat(CB C1, name, 1, SEP "{}" C2 CE), "nn[A0]{}[E0 complete]", NULL);
    name[256] = 'n';
    name[257] = 0;
    expect_parts(&v4, repeat("\n\n" OPEN "<" D "invoke name=\"", name, 1, "\">\n" END CLOSE),
                 "[N NAME_TOO_LONG][C]<" D "invoke name=\"nn", "\">\n</" D "invoke>");
    expect_parts(&v31, repeat(CB C1, name, 1, SEP "{}" C2 CE), "[N NAME_TOO_LONG][C]" C1 "nn",
                 "nn" SEP "{}" C2);
    expect_parts(&v4, repeat("\n\n" OPEN INV("run") "<" D "parameter name=\"", name, 1, "\">"),
                 "[E0 malformed][N NAME_TOO_LONG]", NULL);
    expect_parts(&v4, repeat("\n\n" OPEN INV("run") "{\"a\": ", "[", 2000, END CLOSE),
                 "[E0 malformed][N BAD_ARGUMENTS]", "[[[[");
}

static void a_reply_has_a_maximum(void **state) {
    (void)state;
    hd_reply_options o = {.format = HD_REPLY_V4, .max_bytes = 10};
    hd_reply *r;
    hd_err err = {0};
    clear(&transcripts[0]);
    assert_int_equal(hd_reply_open(&r, &o, record, &transcripts[0], NULL), HD_OK);
    assert_int_equal(hd_reply_feed(r, "0123456789", 10, false, &err), HD_OK);
    assert_int_equal(hd_reply_feed(r, "x", 1, false, &err), HD_EINVAL);
    assert_non_null(strstr(err.msg, "10 bytes"));
    err = (hd_err){0};
    assert_int_equal(hd_reply_finish(r, HD_FINISH_STOP, &err), HD_EINVAL);
    assert_string_equal(transcripts[0].text, "[C]0123456789");
    hd_reply_close(r);
}

/* --- what the parser takes apart, an encoder puts together again --- */

typedef struct rendering {
    char data[1 << 16];
    size_t n;
} rendering;

static void put(rendering *t, const char *s) {
    size_t n = strlen(s);
    assert_true(n < sizeof t->data - t->n);
    memcpy(t->data + t->n, s, n + 1);
    t->n += n;
}

/* One call in DSML, from its arguments in JSON. gap: before the words of tags. */
static void render_dsml(rendering *out, const char *gap, const char *name, const char *args) {
    json_t *object = json_loads(args, 0, NULL), *value;
    const char *key;
    assert_true(json_is_object(object));
    put(out, "<" D);
    put(out, gap);
    put(out, "invoke name=\"");
    put(out, name);
    put(out, "\">\n");
    json_object_foreach(object, key, value) {
        char *dumped = json_dumps(value, JSON_ENCODE_ANY);
        put(out, "<" D);
        put(out, gap);
        put(out, "parameter name=\"");
        put(out, key);
        put(out, json_is_string(value) ? "\" string=\"true\">" : "\" string=\"false\">");
        put(out, json_is_string(value) ? json_string_value(value) : dumped);
        put(out, "</" D);
        put(out, gap);
        put(out, "parameter>\n");
        free(dumped);
    }
    if (json_object_size(object) == 0) put(out, "\n");
    put(out, "</" D);
    put(out, gap);
    put(out, "invoke>\n");
    json_decref(object);
}

static void render_call(rendering *out, hd_reply_format format, bool first, const char *name,
                        const char *args) {
    if (format == HD_REPLY_V3) {
        put(out, first ? C1 "function" SEP : "\n" C1 "function" SEP);
        put(out, name);
        put(out, "\n```json\n");
        put(out, args);
        put(out, "\n```" C2);
    } else if (format == HD_REPLY_V31) {
        put(out, C1);
        put(out, name);
        put(out, SEP);
        put(out, args);
        put(out, C2);
    } else {
        render_dsml(out, format == HD_REPLY_V41 ? " " : "", name, args);
    }
}

static void render(rendering *out, hd_reply_format format, const char *reasoning,
                   const char *content, char (*calls)[2][1024], int n_calls) {
    static const char *const opens[] = {[HD_REPLY_V3] = CB,
                                        [HD_REPLY_V31] = CB,
                                        [HD_REPLY_V32] = "\n\n<" D "function_calls>\n",
                                        [HD_REPLY_V4] = "\n\n" OPEN,
                                        [HD_REPLY_V41] = "\n\n<" D " calls>\n"};
    static const char *const closes[] = {[HD_REPLY_V3] = CE,
                                         [HD_REPLY_V31] = CE,
                                         [HD_REPLY_V32] = "</" D "function_calls>",
                                         [HD_REPLY_V4] = CLOSE,
                                         [HD_REPLY_V41] = "</" D " calls>"};
    out->n = 0;
    put(out, reasoning);
    put(out, "</think>");
    put(out, content);
    if (n_calls) put(out, opens[format]);
    for (int i = 0; i < n_calls; i++) {
        render_call(out, format, i == 0, calls[i][0], calls[i][1]);
    }
    if (n_calls) put(out, closes[format]);
}

typedef struct heard { /* a reply as a client keeps it */
    char reasoning[4096], content[4096], calls[8][2][1024];
    int n_calls, n_notes;
} heard;

static void hear(void *user, const hd_reply_event *e) {
    heard *h = user;
    char *to = e->kind == HD_REPLY_REASONING   ? h->reasoning
               : e->kind == HD_REPLY_CONTENT   ? h->content
               : e->kind == HD_REPLY_ARGUMENTS ? h->calls[e->call][1]
                                               : NULL;
    if (e->kind == HD_REPLY_CALL_BEGIN) to = h->calls[h->n_calls++][0];
    if (e->kind == HD_REPLY_NOTE) h->n_notes++;
    if (to) strncat(to, e->text, e->n);
}

static const char *const contents[] = {"", "One moment.", "a < b\n\n c", "é 東京 <|DSML|x> `"};
static const char *const arguments[] = {
    "{}",
    "{\"location\": \"Paris\"}",
    "{\"a\": 1, \"b\": [1, {\"x\": null}, \"y\"], \"c\": true, \"s\": \"1\"}",
    "{\"code\": \"if (a < b) {\\n\\treturn \\\"x\\\\n\\\";\\n}\\n\", \"html\": "
    "\"</b></parameter>\"}",
    "{\"k\\\"ey\": \"東京 🚀\", \"\": \" \\n\", \"o\": {\"p\": \"</｜DSML｜invoke>\"}}",
};

static void history_is_rendered_as_it_was_written(void **state) {
    (void)state;
    static rendering wrote, again;
    static heard h;
    static char calls[8][2][1024];
    for (uint64_t seed = 0; seed < 2000; seed++) {
        hd_philox dice = hd_philox_at(seed, 1, 0), more = hd_philox_at(seed, 2, 0);
        hd_reply_options o = {IN_V4, .starts_in_reasoning = true};
        o.format = (hd_reply_format)(HD_REPLY_V3 + dice.v[0] % 5);
        int n_calls = (int)(dice.v[1] % 4);
        for (int i = 0; i < n_calls; i++) {
            snprintf(calls[i][0], sizeof calls[i][0], "tool_%d", i);
            snprintf(calls[i][1], sizeof calls[i][1], "%s",
                     arguments[more.v[i] % HD_LEN(arguments)]);
        }
        render(&wrote, o.format, dice.v[2] % 2 ? "Why?\n" : "",
               contents[dice.v[3] % HD_LEN(contents)], calls, n_calls);
        h = (heard){.n_calls = 0};
        hd_reply *r;
        hd_status st = hd_reply_open(&r, &o, hear, &h, NULL);
        feed_slices(r, wrote.data, wrote.n, &(slicing){.seed = seed + 1}, &st);
        assert_int_equal(st, HD_OK);
        assert_int_equal(hd_reply_finish(r, HD_FINISH_STOP, NULL), HD_OK);
        assert_int_equal(h.n_calls, n_calls);
        hd_reply_close(r);
        render(&again, o.format, h.reasoning, h.content, h.calls, h.n_calls);
        assert_string_equal(again.data, wrote.data);
        assert_int_equal(h.n_notes, 0);
    }
}

static json_t *as_messages(const heard *h) {
    json_t *calls = json_array();
    for (int i = 0; i < h->n_calls; i++) {
        char id[24];
        snprintf(id, sizeof id, "call_%d", i);
        json_array_append_new(calls, json_pack("{s:s, s:s, s:{s:s, s:s}}", "id", id, "type",
                                               "function", "function", "name", h->calls[i][0],
                                               "arguments", h->calls[i][1]));
    }
    json_t *answer =
        json_pack("{s:s, s:s, s:s, s:o}", "role", "assistant", "content", h->content,
                  "reasoning_content", h->reasoning, "tool_calls", calls);
    if (h->n_calls == 0) json_object_del(answer, "tool_calls");
    if (!*h->reasoning) json_object_del(answer, "reasoning_content");
    return json_pack("[{s:s, s:s}, o]", "role", "user", "content", "Q", answer);
}

/* Parsed, kept by a client and sent back: the next prompt holds the bytes of the reply, so
 * the whole of it is found in a prefix cache. */
static void the_next_prompt_holds_the_reply(void **state) {
    (void)state;
    static const hd_chat_encoding encodings[] = {
        HD_CHAT_V3_0324, HD_CHAT_V31,     HD_CHAT_V31_TERMINUS, HD_CHAT_V32,
        HD_CHAT_V4,      HD_CHAT_V4_0731, HD_CHAT_V41};
    static rendering wrote;
    static heard h;
    static char calls[8][2][1024];
    for (uint64_t seed = 0; seed < 300; seed++) {
        hd_philox dice = hd_philox_at(seed, 4, 0), more = hd_philox_at(seed, 5, 0);
        hd_chat_encoding encoding = encodings[dice.v[0] % HD_LEN(encodings)];
        bool thinks = encoding >= HD_CHAT_V32;
        hd_reply_options o = {IN_V4, .starts_in_reasoning = thinks};
        o.format = hd_reply_format_of(encoding);
        int n_calls = (int)(dice.v[1] % 4);
        for (int i = 0; i < n_calls; i++) {
            snprintf(calls[i][0], sizeof calls[i][0], "tool_%d", i);
            snprintf(calls[i][1], sizeof calls[i][1], "%s",
                     arguments[more.v[i] % HD_LEN(arguments)]);
        }
        render(&wrote, o.format, thinks ? "Why?\n" : "", contents[dice.v[3] % HD_LEN(contents)],
               calls, n_calls);
        const char *reply = wrote.data + (thinks ? 0 : strlen("</think>"));
        h = (heard){.n_calls = 0};
        hd_reply *r;
        hd_status st = hd_reply_open(&r, &o, hear, &h, NULL);
        feed_slices(r, reply, strlen(reply), &(slicing){.seed = seed + 1}, &st);
        assert_int_equal(hd_reply_finish(r, HD_FINISH_STOP, NULL), HD_OK);
        hd_reply_close(r);

        json_t *messages = as_messages(&h);
        hd_conversation c;
        hd_err err = {0};
        hd_chat_prompt p;
        hd_chat_options how = {
            .encoding = encoding, .thinking = thinks, .no_generation_prompt = true};
        put(&wrote, EOS);
        assert_int_equal(hd_chat_parse(&c, messages, NULL, NULL, false, &err), HD_OK);
        assert_int_equal(hd_chat_render(&p, &c, &how, NULL), HD_OK);
        size_t n = strlen(reply);
        assert_true(p.n > n);
        assert_memory_equal(p.text + p.n - n, reply, n);
        hd_chat_prompt_deinit(&p);
        hd_conversation_deinit(&c);
        json_decref(messages);
    }
}

/* --- replies that went wrong in any way --- */

/* A reply of the tables with some bytes doubled, dropped, changed or moved. */
static size_t mutate(char *out, const char *text, size_t n, uint64_t seed) {
    memcpy(out, text, n);
    for (uint64_t k = 0; k < 1 + seed % 3 && n > 8; k++) {
        hd_philox d = hd_philox_at(seed, 3, k);
        size_t at = d.v[0] % (n - 4), length = 1 + d.v[1] % 4;
        if (d.v[2] % 3 == 0) {
            memmove(out + at, out + at + length, n - at - length);
            n -= length;
        } else if (d.v[2] % 3 == 1) {
            memmove(out + at + length, out + at, n - at);
            n += length;
        } else {
            out[at] = "<>/\"{}\n \\\xef\xbd\x9c|d"[d.v[3] % 14];
        }
    }
    return n;
}

static void wrong_replies_do_not_depend_on_slicing(void **state) { /* S27 */
    (void)state;
    static char text[8192];
    for (size_t i = 0; i < HD_LEN(tolerant_cases); i++) {
        const reply_case *c = &tolerant_cases[i];
        for (uint64_t seed = 1; seed <= 60; seed++) {
            size_t n = mutate(text, c->text, strlen(c->text), i * 1000 + seed);
            hd_finish_reason reason = (hd_finish_reason)(HD_FINISH_STOP + seed % 3);
            parse(&transcripts[0], &c->opt, text, n, reason, &(slicing){.every = 0});
            parse(&transcripts[1], &c->opt, text, n, reason, &(slicing){.every = 1});
            assert_string_equal(transcripts[0].text, transcripts[1].text);
            parse(&transcripts[1], &c->opt, text, n, reason, &(slicing){.seed = seed});
            assert_string_equal(transcripts[0].text, transcripts[1].text);
        }
    }
}

/* --- the parts --- */

static void json_is_judged_as_jansson_does(void **state) {
    (void)state;
    static const char *const good[] = {"{}",
                                       "[]",
                                       " [ 1 , -0.5e+3 ] ",
                                       "\"\"",
                                       "0",
                                       "-0",
                                       "1E5",
                                       "true",
                                       "false",
                                       "null",
                                       "\"\\u00e9\\n\\\"\\/\"",
                                       "{\"a\":{\"b\":[[],{}]},\"c\":\"\"}",
                                       "[1,2]\n"};
    static const char *const bad[] = {
        "",           " ",     "{",   "}",   "[1,]",   "{\"a\"}", "{\"a\":}",    "{a:1}",
        "{\"a\":1,}", "01",    "1.",  ".5",  "-",      "1e",      "+1",          "tru",
        "True",       "nul",   "'a'", "\"",  "\"\n\"", "\"\\x\"", "\"\\u12g4\"", "[1}",
        "{]",         "[1 2]", "1 2", "NaN", "{,}",    "[,1]",    "truee",       "\"\\\""};
    for (size_t i = 0; i < HD_LEN(good); i++) {
        assert_true(reply_json_valid(good[i], strlen(good[i])));
        json_t *value = json_loads(good[i], JSON_DECODE_ANY, NULL);
        assert_non_null(value);
        json_decref(value);
    }
    for (size_t i = 0; i < HD_LEN(bad); i++) {
        assert_false(reply_json_valid(bad[i], strlen(bad[i])));
        assert_null(json_loads(bad[i], JSON_DECODE_ANY, NULL));
    }
}

static void tools_are_read(void **state) {
    (void)state;
    json_t *doc = json_loads(
        "[{\"type\": \"function\", \"function\": {\"name\": \"f\", \"parameters\": {"
        "\"properties\": {\"s\": {\"type\": \"string\"}, \"i\": {\"type\": \"integer\"},"
        "\"u\": {\"type\": [\"null\", \"string\"]}, \"e\": {\"enum\": [1, 2]}, \"x\": {}}}}},"
        "{\"function\": {}}, 7, {\"function\": {\"name\": \"g\"}}]",
        0, NULL);
    static const bool strings[] = {true, false, true, false, true};
    hd_reply_tools tools;
    assert_int_equal(hd_reply_tools_init(&tools, doc, NULL), HD_OK);
    assert_int_equal(tools.n_tools, 2);
    assert_memory_equal(tools.tools[0].name, "f", 1);
    assert_memory_equal(tools.tools[1].name, "g", 1);
    assert_int_equal(tools.tools[0].n_params, 5);
    for (size_t i = 0; i < HD_LEN(strings); i++) {
        assert_int_equal(tools.tools[0].params[i].is_string, strings[i]);
    }
    hd_reply_tools_deinit(&tools);
    assert_int_equal(hd_reply_tools_init(&tools, NULL, NULL), HD_OK);
    assert_int_equal(tools.n_tools, 0);
    json_decref(doc);
    for (int i = 0; i < HD_REPLY_N_NOTES; i++) {
        assert_true(strlen(hd_reply_note_text((hd_reply_note)i)) > 8);
    }
}

int test_reply(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(proper_replies),
        cmocka_unit_test(tolerated_replies),
        cmocka_unit_test(strict_parsing_refuses),
        cmocka_unit_test(flagged_tokens_cannot_be_spelled),
        cmocka_unit_test(only_what_could_be_a_marker_is_held),
        cmocka_unit_test(state_can_be_asked),
        cmocka_unit_test(limits_hold),
        cmocka_unit_test(a_reply_has_a_maximum),
        cmocka_unit_test(history_is_rendered_as_it_was_written),
        cmocka_unit_test(the_next_prompt_holds_the_reply),
        cmocka_unit_test(wrong_replies_do_not_depend_on_slicing),
        cmocka_unit_test(json_is_judged_as_jansson_does),
        cmocka_unit_test(tools_are_read),
    };
    return cmocka_run_group_tests_name("reply", tests, NULL, NULL);
}
