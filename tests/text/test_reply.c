/* test_reply.c - the reply parser: a table of replies, each in every slicing.
 *
 * What a reply becomes is written as a transcript: [R] reasoning, [C] content, [B0 name] a
 * call begins, [A0] its arguments, [E0] and how it ends, [N] a note. Adjacent deltas are
 * joined, so the transcript must not depend on the slicing. */
#include "check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/philox.h"
#include "text/reply.h"

#define D         "｜DSML｜"
#define EOS       "<｜end▁of▁sentence｜>"
#define OPEN      "<" D "tool_calls>\n"
#define CLOSE     "</" D "tool_calls>"
#define INV(n)    "<" D "invoke name=\"" n "\">\n"
#define END       "</" D "invoke>\n"
#define STR(k, v) "<" D "parameter name=\"" k "\" string=\"true\">" v "</" D "parameter>\n"
#define VAL(k, v) "<" D "parameter name=\"" k "\" string=\"false\">" v "</" D "parameter>\n"
#define CALLS(x)  "\n\n" OPEN x CLOSE

#define CB       "<｜tool▁calls▁begin｜>"
#define CE       "<｜tool▁calls▁end｜>"
#define C1       "<｜tool▁call▁begin｜>"
#define C2       "<｜tool▁call▁end｜>"
#define SEP      "<｜tool▁sep｜>"
#define V3(n, a) C1 "function" SEP n "\n```json\n" a "\n```" C2

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

/* The transcript of one reply. */
static hd_status parse(transcript *t, const hd_reply_options *o, const char *text, size_t n,
                       hd_reply_finish_reason reason, const slicing *s) {
    hd_reply *r;
    hd_err err = {0};
    hd_status st = hd_reply_open(&r, o, record, t, &err);
    memset(t, 0, offsetof(transcript, args));
    t->text[0] = 0;
    t->n = 0;
    t->open = -1;
    t->n_begun = 0;
    assert_int_equal(st, HD_OK);
    feed_slices(r, text, n, s, &st);
    if (st == HD_OK) st = hd_reply_finish(r, reason, &err);
    if (st == HD_OK) {
        size_t raw_n, calls_n;
        const char *raw = hd_reply_raw(r, &raw_n), *calls = hd_reply_raw_calls(r, &calls_n);
        assert_true(raw_n <= n && (raw_n == 0 || memcmp(raw, text, raw_n) == 0));
        assert_true(!calls || (calls >= raw && calls + calls_n <= raw + raw_n));
        assert_int_equal(t->open, -1);
    }
    hd_reply_close(r);
    return st;
}

/* --- the table --- */

static const hd_reply_param weather_params[] = {
    {"location", 8, true },
    {"unit",     4, true },
    {"days",     4, false}
};
static const hd_reply_tool offered[] = {
    {"get_weather", 11, weather_params, 3},
    {"run",         3,  NULL,           0},
    {"now",         3,  NULL,           0}
};

#define TOOLS           .parse_tools = true, .tools = offered, .n_tools = 3
#define IN_V4           .format = HD_REPLY_V4, TOOLS
#define IN_V32          .format = HD_REPLY_V32, TOOLS
#define IN_V3           .format = HD_REPLY_V3, TOOLS
#define IN_V31          .format = HD_REPLY_V31, TOOLS
#define PARIS           INV("get_weather") STR("location", "Paris") END
#define PARIS_EVENTS(i) "[B" i "]get_weather[A" i "]{\"location\": \"Paris\"}[E" i " complete]"

#define V4_THINKS_OFF IN_V4, .starts_in_reasoning = true, .thinking_off = true
#define V4_OFF        IN_V4, .thinking_off = true
#define V4_KNOWN      IN_V4, .unknown_as_text = true
#define V31_KNOWN     IN_V31, .unknown_as_text = true
#define V4_NO_TOOLS   .format = HD_REPLY_V4, .parse_tools = true, .unknown_as_text = true
#define PLAIN         .format = HD_REPLY_PLAIN, .parse_tools = true
#define V4_SHORT      IN_V4, .max_arguments = 12
#define V4_WHOLE      IN_V4, .whole_calls = true
#define V4_TEXT       .format = HD_REPLY_V4
#define V3_TEXT       .format = HD_REPLY_V3
#define V4_THINKS     IN_V4, .starts_in_reasoning = true
#define V3_THINKS     IN_V3, .starts_in_reasoning = true
#define V31_THINKS    IN_V31, .starts_in_reasoning = true

typedef struct reply_case {
    hd_reply_options opt;
    const char *text;
    const char *expect;
    hd_reply_finish_reason reason;
    bool proper; /* the official grammar has it: no notes, and the same in strict parsing */
} reply_case;

#define CASE(opts, text, expect) \
    { {opts}, text, expect, HD_REPLY_STOP, false }
#define CUT(opts, text, expect, reason) \
    { {opts}, text, expect, reason, false }
#define PROPER(opts, text, expect) \
    { {opts}, text, expect, HD_REPLY_STOP, true }

/* Replies as the model was taught to write them. */
static const reply_case proper_cases[] = {
    PROPER(IN_V4, "", ""),
    PROPER(IN_V4, "Hello, world \n" EOS, "[C]Hello, world \n"),
    PROPER(V4_THINKS, "why\n</think>\n\nbecause" EOS, "[R]why\n[C]\n\nbecause"),
    PROPER(V4_THINKS, "</think>x", "[C]x"),
    PROPER(IN_V4, "a < b && c > d, <b>x</b>, a<", "[C]a < b && c > d, <b>x</b>, a<"),
    PROPER(IN_V4, CALLS(PARIS) EOS, PARIS_EVENTS("0")),
    PROPER(V4_THINKS, "I need it.</think>One moment." CALLS(PARIS) EOS,
           "[R]I need it.[C]One moment." PARIS_EVENTS("0")),
    PROPER(IN_V4,
           CALLS(INV("get_weather") STR(
               "location", "a\"b\\c\n\t\x01é 東京 🚀 </｜DSML parameter>") VAL("days", "3")
                     VAL("deep", "{\"a\":[1, 2.5e-3, null, true],\"b\":\"\\u00e9\"}") END),
           "[B0]get_weather[A0]{\"location\": \"a\\\"b\\\\c\\n\\t\\u0001é 東京 🚀 </｜DSML "
           "parameter>\", "
           "\"days\": 3, \"deep\": {\"a\":[1, 2.5e-3, null, true],\"b\":\"\\u00e9\"}}[E0 "
           "complete]"),
    PROPER(IN_V4, CALLS(INV("now") "\n" END), "[B0]now[A0]{}[E0 complete]"),
    PROPER(IN_V4, CALLS(INV("now") END), "[B0]now[A0]{}[E0 complete]"),
    PROPER(IN_V4, CALLS(PARIS PARIS INV("now") END),
           PARIS_EVENTS("0") PARIS_EVENTS("1") "[B2]now[A2]{}[E2 complete]"),
    PROPER(IN_V4, CALLS(INV("run") STR("a\"b=\" c", "") STR("", "x") END),
           "[B0]run[A0]{\"a\\\"b=\\\" c\": \"\", \"\": \"x\"}[E0 complete]"),
    PROPER(IN_V4,
           CALLS(INV("run")
                     STR("code", "<｜DSML｜invoke name=\"now\"></parameter></|DSML|parameter>"
                                 "</｜DSML｜invoke></｜DSML｜tool_calls> </｜DSML｜para") END),
           "[B0]run[A0]{\"code\": \"<｜DSML｜invoke "
           "name=\\\"now\\\"></parameter></|DSML|parameter>"
           "</｜DSML｜invoke></｜DSML｜tool_calls> </｜DSML｜para\"}[E0 complete]"),
    PROPER(IN_V32, "Ok.\n\n<" D "function_calls>\n" PARIS "</" D "function_calls>" EOS,
           "[C]Ok." PARIS_EVENTS("0")),
    PROPER(IN_V3, CB V3("get_weather", "{\"location\": \"Paris\"}") CE EOS, PARIS_EVENTS("0")),
    PROPER(V3_THINKS,
           "hm\n</think>\n\nText" CB V3("run", "{\"a\":{\"b\":[\"```\",\"}\"]}}") "\n" V3(
               "now", "{}") CE,
           "[R]hm\n[C]\n\nText[B0]run[A0]{\"a\":{\"b\":[\"```\",\"}\"]}}[E0 complete]"
           "[B1]now[A1]{}[E1 complete]"),
    PROPER(IN_V31,
           "Sure." CB C1 "get_weather" SEP "{\"location\": \"Paris\"}" C2 C1 "now" SEP
           "{}" C2 CE EOS,
           "[C]Sure." PARIS_EVENTS("0") "[B1]now[A1]{}[E1 complete]"),
    PROPER(PLAIN, "<think>x</think>" CB EOS "gone", "[C]<think>x</think>" CB),
    PROPER(V4_TEXT, "x" CALLS(PARIS), "[C]x" CALLS(PARIS)),
    PROPER(V3_TEXT, "x " CB V3("now", "{}"), "[C]x " CB V3("now", "{}")),
};

/* What happens in practice; docs/reply.md has the same order. */
static const reply_case tolerant_cases[] = {
    /* fewer LFs than two, or more white space */
    CASE(IN_V4, "x\n" OPEN PARIS CLOSE, "[C]x[N SPELLING]" PARIS_EVENTS("0")),
    CASE(IN_V4, "x" OPEN PARIS CLOSE, "[C]x[N SPELLING]" PARIS_EVENTS("0")),
    CASE(IN_V4, "x \n\n \n" OPEN PARIS CLOSE, "[C]x[N SPELLING]" PARIS_EVENTS("0")),
    CASE(IN_V4, "x \n\n \ny", "[C]x \n\n \ny"),
    CASE(IN_V4, "x\n\n<" D "tool_call>", "[C]x\n\n<" D "tool_call>"),
    CASE(IN_V3, "x\n" CB V3("now", "{}") CE, "[C]x[B0]now[A0]{}[E0 complete]"),
    /* tags without the usual line breaks */
    CASE(IN_V4,
         "\n\n<" D "tool_calls><" D "invoke name=\"get_weather\"><" D
         "parameter name=\"location\"  string=\"true\" >Paris</" D "parameter></" D
         "invoke></" D "tool_calls>",
         PARIS_EVENTS("0")),
    /* a JSON body */
    CASE(IN_V4, CALLS(INV("get_weather") "{\"location\": \"Paris\"}\n" END),
         "[B0]get_weather[N SPELLING][A0]{\"location\": \"Paris\"}[E0 complete]"),
    CASE(IN_V4, CALLS(INV("run") "{\"a\": 1} x" END) "y",
         "[B0]run[N SPELLING][A0]{\"a\": 1}[E0 malformed][N TEXT_IN_CALL][C]" INV(
             "run") "{\"a\": 1} x</" D "invoke>y"),
    CASE(IN_V4, CALLS(INV("run") "{\"a\" 1}\n" END),
         "[B0]run[N SPELLING][A0]{\"a\" [E0 malformed][N BAD_ARGUMENTS][C]" INV(
             "run") "{\"a\" 1}\n</" D "invoke>"),
    CASE(IN_V4, CALLS(INV("run") "{\"a\": \"b</" D "invoke>\n"),
         "[B0]run[N SPELLING][A0]{\"a\": \"b[E0 malformed][N BAD_ARGUMENTS][C]" INV(
             "run") "{\"a\": \"b</" D "invoke>"),
    CASE(IN_V4, CALLS(INV("run") "[1]\n" END),
         "[B0]run[E0 malformed][N TEXT_IN_CALL][C]" INV("run") "[1]\n</" D "invoke>"),
    CASE(IN_V4, CALLS(INV("run") "{}\n" STR("a", "b") END),
         "[B0]run[N SPELLING][A0]{}[E0 malformed][N MIXED_ARGUMENTS][C]" INV("run") "{}\n" STR(
             "a", "b") "</" D "invoke>"),
    /* a value that is no JSON */
    CASE(IN_V4, CALLS(INV("run") VAL("a", "1 2\"") VAL("b", "") VAL("c", " [1 ]\n") END),
         "[B0]run[A0]{\"a\": [N NOT_JSON][A0]\"1 2\\\"\", \"b\": [N NOT_JSON][A0]\"\", \"c\":  "
         "[1 ]\n}"
         "[E0 complete]"),
    CASE(IN_V4, CALLS(INV("run") VAL("a", "NaN") VAL("b", "01") VAL("c", "True") END),
         "[B0]run[A0]{\"a\": [N NOT_JSON][A0]\"NaN\", \"b\": [N NOT_JSON][A0]\"01\", \"c\": "
         "[N NOT_JSON][A0]\"True\"}[E0 complete]"),
    /* no string attribute: the schema, else a string */
    CASE(IN_V4,
         CALLS(INV("get_weather") "<" D "parameter name=\"location\">1</" D "parameter>\n<" D
                                  "parameter name=\"days\">2</" D "parameter>\n<" D
                                  "parameter name=\"x\">3</" D "parameter>\n" END),
         "[B0]get_weather[N SPELLING][A0]{\"location\": \"1\"[N SPELLING][A0], \"days\": 2"
         "[N SPELLING][A0], \"x\": \"3\"}[E0 complete]"),
    CASE(IN_V4, CALLS(INV("run") STR("a\"> b", "c") END),
         "[B0]run[N SPELLING][A0]{\"a\": \" b\\\" string=\\\"true\\\">c\"}[E0 complete]"),
    /* missing ends */
    CASE(IN_V4, "\n\n" OPEN PARIS, PARIS_EVENTS("0") "[N MISSING_END]"),
    CUT(IN_V4, "\n\n" OPEN PARIS, PARIS_EVENTS("0") "[N CUT]", HD_REPLY_LENGTH),
    CASE(IN_V4, "\n\n" OPEN INV("run") STR("a", "b"),
         "[B0]run[A0]{\"a\": \"b\"[N MISSING_END][A0]}[E0 complete]"),
    CUT(IN_V4, "\n\n" OPEN INV("run") STR("a", "b"), "[B0]run[A0]{\"a\": \"b\"[E0 cut][N CUT]",
        HD_REPLY_LENGTH),
    CASE(IN_V4, "\n\n" OPEN INV("run") STR("a", "b") INV("now") END CLOSE,
         "[B0]run[A0]{\"a\": \"b\"[N MISSING_END][A0]}[E0 complete][B1]now[A1]{}[E1 complete]"),
    CASE(IN_V4, CALLS(INV("run") STR("a", "b")),
         "[B0]run[A0]{\"a\": \"b\"[N MISSING_END][A0]}[E0 complete]"),
    CASE(IN_V4, CALLS(INV("run")), "[B0]run[E0 malformed][N UNFINISHED][C]" INV("run")),
    CUT(IN_V4, "\n\n" OPEN INV("run") "<" D "parameter name=\"a\" string=\"true\">b</" D "para",
        "[B0]run[A0]{\"a\": \"b[E0 cut][N CUT]", HD_REPLY_ABORT),
    CASE(IN_V4,
         "\n\n" OPEN INV("run") "<" D "parameter name=\"a\" string=\"true\">b</" D "para" EOS,
         "[B0]run[A0]{\"a\": \"b</" D "para[E0 malformed][N UNFINISHED][C]" INV(
             "run") "<" D "parameter name=\"a\" string=\"true\">b</" D "para"),
    CUT(IN_V4, "\n\n" OPEN INV("run") "<" D "parameter name=\"a\" string=\"false\">[1,",
        "[B0]run[A0]{\"a\": [E0 cut][N CUT]", HD_REPLY_LENGTH),
    CUT(IN_V4, "\n\n" OPEN "<" D "invoke name=\"ru", "[N CUT]", HD_REPLY_LENGTH),
    CASE(IN_V4, "\n\n" OPEN "<" D "invoke name=\"ru", "[N BAD_TAG][C]<" D "invoke name=\"ru"),
    CASE(IN_V4, "\n\n" OPEN, "[N MISSING_END]"),
    CUT(IN_V4, "x\n\n<" D "tool", "[C]x\n\n<" D "tool", HD_REPLY_LENGTH),
    CASE(IN_V4, "x\n\n<" D "tool_calls" EOS, "[C]x\n\n[N STRAY_TAG][C]<" D "tool_calls"),
    CASE(IN_V4, CALLS(""), ""),
    CASE(IN_V3, CB V3("now", "{}"), "[B0]now[A0]{}[E0 complete][N MISSING_END]"),
    CASE(IN_V3, CB C1 "function" SEP "run\n```json\n{\"a\": 1}\n```" EOS,
         "[B0]run[A0]{\"a\": 1}[N MISSING_END][E0 complete]"),
    CUT(IN_V3, CB C1 "function" SEP "run\n```json\n{\"a\": 1",
        "[B0]run[A0]{\"a\": 1[E0 cut][N CUT]", HD_REPLY_LENGTH),
    CASE(IN_V3, CB C1 "function" SEP "run\n```json\n{\"a\": 1",
         "[B0]run[A0]{\"a\": 1[E0 malformed][N UNFINISHED][C]" C1 "function" SEP
         "run\n```json\n{\"a\": 1"),
    CASE(IN_V31, CB C1 "run" SEP "{\"a\": 1}" C1 "now" SEP "{}" CE,
         "[B0]run[A0]{\"a\": 1}[N MISSING_END][E0 complete][B1]now[A1]{}[N MISSING_END][E1 "
         "complete]"),
    CUT(IN_V31, CB C1 "ru", "[N CUT]", HD_REPLY_LENGTH),
    CASE(IN_V31, CB C1 "ru", "[N UNFINISHED][C]" C1 "ru"),
    /* other spellings, where nothing else can be meant */
    CASE(IN_V4,
         "x\n\n<|DSML|tool_calls>\n<|DSML|invoke name=\"get_weather\">\n<|DSML|parameter "
         "name=\"location\" string=\"true\">Paris</|DSML|parameter>\n</|DSML|invoke>\n"
         "</|DSML|tool_calls>",
         "[C]x[N SPELLING][N SPELLING][B0]get_weather[N SPELLING][A0]{\"location\": \"Paris\""
         "[N SPELLING][N SPELLING][A0]}[E0 complete][N SPELLING]"),
    CASE(IN_V4,
         "<tool_calls>\n<invoke name=\"get_weather\">\n<parameter name=\"location\" "
         "string=\"true\">Paris</parameter>\n</invoke>\n</tool_calls>",
         "[N SPELLING][N SPELLING][B0]get_weather[N SPELLING][A0]{\"location\": \"Paris\""
         "[N SPELLING][N SPELLING][A0]}[E0 complete][N SPELLING]"),
    CASE(IN_V4, CALLS(INV("run") "<parameter name=\"on\">true</" D "parameter>\n" END),
         "[B0]run[N SPELLING][N SPELLING][A0]{\"on\": \"true\"}[E0 complete]"),
    CASE(IN_V4, "<tool_calls>\n<invoke name=\"other\">",
         "[C]<tool_calls>\n<invoke name=\"other\">"),
    CASE(IN_V4, "a <tool_calls> b <invoke name=\"run\">",
         "[C]a <tool_calls> b <invoke name=\"run\">"),
    CASE(IN_V4, "x\n\n<" D "function_calls>\n" PARIS "</" D "function_calls>",
         "[C]x[N SPELLING]" PARIS_EVENTS("0")),
    CASE(IN_V4,
         "x\n\n<" D " tool_calls>\n<" D " invoke name=\"now\">\n</" D " invoke>\n</" D
         " tool_calls>",
         "[C]x[N SPELLING][N SPELLING][B0]now[N SPELLING][A0]{}[E0 complete][N SPELLING]"),
    CASE(IN_V3, CB C1 "function" SEP "run\n{\"a\": 1}" C2 CE,
         "[B0]run[N SPELLING][A0]{\"a\": 1}[N SPELLING][E0 complete]"),
    CASE(IN_V3, C1 "tool" SEP " run \n```\n{}```" C2,
         "[N SPELLING][B0]run[N SPELLING][A0]{}[N SPELLING][E0 complete][N MISSING_END]"),
    CASE(IN_V31, CB C1 "now" SEP C2 CE, "[B0]now[N NO_ARGUMENTS][A0]{}[E0 complete]"),
    /* tools that were not offered */
    CASE(IN_V4, CALLS(INV("other") STR("a", "b") END),
         "[B0]other[A0]{\"a\": \"b\"}[E0 complete]"),
    CASE(V4_KNOWN, "x" CALLS(INV("other") STR("a", INV("now") END) END PARIS) "y",
         "[C]x[N UNKNOWN_TOOL][C]" INV("other")
             STR("a", INV("now") END) "</" D "invoke>" PARIS_EVENTS("0") "[C]y"),
    CASE(V4_NO_TOOLS, "x" CALLS(PARIS), "[C]x\n\n[N TOOLS_NOT_OFFERED][C]" OPEN PARIS CLOSE),
    CASE(V31_KNOWN, CB C1 "other" SEP "{\"a\": \"" C1 "\"}" C2 CE "y",
         "[N UNKNOWN_TOOL][C]" C1 "other" SEP "{\"a\": \"" C1 "\"}" C2 "y"),
    /* text after the block, a second block */
    CASE(IN_V4, CALLS(PARIS) "\n \n", PARIS_EVENTS("0")),
    CASE(IN_V4, CALLS(PARIS) "\n Done. " CALLS(PARIS) " Bye ",
         PARIS_EVENTS("0") "[C]Done.[N SPELLING]" PARIS_EVENTS("1") "[C]Bye "),
    /* no name */
    CASE(IN_V4, CALLS("<" D "invoke name=\"\">\n" END PARIS),
         "[N BLANK_CALL]" PARIS_EVENTS("0")),
    CASE(IN_V4, CALLS("<" D "invoke>\n" END), "[N BLANK_CALL]"),
    CASE(IN_V4, CALLS("<" D "invoke name=\"\">\n" STR("a", "b") END),
         "[N BAD_TAG][C]<" D "invoke name=\"\">\n" STR("a", "b") "</" D "invoke>"),
    CASE(IN_V3, CB V3("", "{}") CE, "[N BAD_TAG][C]" V3("", "{}")),
    /* think tags */
    CASE(V4_THINKS, "a </think b", "[R]a </think b[N UNFINISHED_REASONING]"),
    CUT(V4_THINKS, "a </think", "[R]a </think", HD_REPLY_LENGTH),
    CASE(IN_V3, "<think>\na</think>\n\nb", "[R]\na[C]\n\nb"),
    CASE(IN_V3, "\n <think>a</think>b", "[R]a[C]b"),
    CASE(IN_V4, "<think>a</think>b", "[N THINK_TAG][R]a[C]b"),
    CASE(V4_THINKS, "<think>a</think>b", "[N THINK_TAG][R]a[C]b"),
    CASE(IN_V4, "a <think> b</think> c", "[C]a [N THINK_TAG][C] b[N THINK_TAG][C] c"),
    CASE(V4_OFF, "<think>a</think>b", "[N THINK_TAG][C]a[N THINK_TAG][C]b"),
    CASE(V4_THINKS_OFF, "</think>b", "[N THINK_TAG][C]b"),
    CASE(V4_THINKS, "a" CALLS(PARIS) "</think>b",
         "[R]a\n\n[N BLOCK_IN_REASONING][R]" OPEN PARIS CLOSE "[C]b"),
    CASE(V31_THINKS, "a" CB "</think>b", "[R]a[N BLOCK_IN_REASONING][R]" CB "[C]b"),
    /* malformed calls come back */
    CASE(IN_V4, CALLS(INV("run") STR("a", "b") STR("a", "c") END) "y",
         "[B0]run[A0]{\"a\": \"b\"[E0 malformed][N DUPLICATE_PARAMETER][C]" INV("run")
             STR("a", "b") STR("a", "c") "</" D "invoke>y"),
    CASE(IN_V4, CALLS(STR("a", INV("now") END) PARIS),
         "[N PARAMETER_OUTSIDE][C]" STR("a", INV("now") END) PARIS_EVENTS("0")),
    CASE(IN_V4, CALLS("well \n" PARIS "and" PARIS) "y",
         "[N TEXT_BETWEEN_CALLS][C]well" PARIS_EVENTS(
             "0") "[N TEXT_BETWEEN_CALLS][C]and" PARIS_EVENTS("1") "[C]y"),
    CASE(IN_V4, CALLS(INV("run") "text" STR("a", INV("now")) END PARIS),
         "[B0]run[E0 malformed][N TEXT_IN_CALL][C]" INV("run") "text" STR(
             "a", INV("now")) "</" D "invoke>"
                              "[B1]get_weather[A1]{\"location\": \"Paris\"}[E1 complete]"),
    CASE(IN_V4,
         CALLS(INV("run") "<" D "parameter name=\"a\" string=\"b\">"
                          "c</" D "parameter>\n" END),
         "[B0]run[E0 malformed][N BAD_TAG][C]" INV(
             "run") "<" D "parameter name=\"a\" string=\"b\">c</" D "parameter>\n</" D
                    "invoke>"),
    CASE(IN_V4, CALLS("<" D "invoke id=\"x\">\n" END),
         "[N BAD_TAG][C]<" D "invoke id=\"x\">\n</" D "invoke>"),
    CASE(IN_V4, CALLS("</" D "invoke>\n" PARIS),
         "[N STRAY_TAG][C]</" D "invoke>" PARIS_EVENTS("0")),
    CASE(IN_V4, INV("now") END, "[N STRAY_TAG][C]" INV("now") "[N STRAY_TAG][C]" END),
    CASE(IN_V31, CB C1 "run" SEP "{\"a\": 1" C2 C1 "now" SEP "{}" C2 CE "y",
         "[B0]run[A0]{\"a\": 1[E0 malformed][N BAD_ARGUMENTS][C]" C1 "run" SEP "{\"a\": 1" C2
         "[B1]now[A1]{}[E1 complete][C]y"),
    CASE(IN_V31, CB C1 "run" SEP "[]" C2 CE,
         "[B0]run[E0 malformed][N BAD_ARGUMENTS][C]" C1 "run" SEP "[]" C2),
    CASE(IN_V31, CB C1 "run" C2 CE, "[N BAD_TAG][C]" C1 "run" C2),
    CASE(IN_V31, CB C1 "run" SEP "{} x" C2 CE,
         "[B0]run[A0]{}[E0 malformed][N TEXT_IN_CALL][C]" C1 "run" SEP "{} x" C2),
    CASE(IN_V31, CB "hm" C2 CE "y", "[N TEXT_BETWEEN_CALLS][C]hm[N STRAY_TAG][C]" C2 "y"),
    CASE(IN_V31, C2 "y", "[N STRAY_TAG][C]" C2 "y"),
    /* limits */
    CASE(V4_SHORT, CALLS(INV("run") STR("a", "bbbb") END),
         "[B0]run[A0]{\"a\": \"bbbb[E0 malformed][N ARGUMENTS_TOO_LONG]"),
    /* calls that come whole */
    CASE(V4_WHOLE, CALLS(INV("run") STR("a", "b") STR("a", "c") END PARIS),
         "[N DUPLICATE_PARAMETER][C]" INV("run") STR("a", "b")
             STR("a", "c") "</" D "invoke>" PARIS_EVENTS("0")),
    CUT(V4_WHOLE, "\n\n" OPEN PARIS INV("run") STR("a", "b"), PARIS_EVENTS("0") "[N CUT]",
        HD_REPLY_LENGTH),
    /* bytes that are no UTF-8 */
    CASE(V4_THINKS, "a\xff\xe6\x9d</think>\xc3\xa9\xc3", "[R]a\ufffd\ufffd[C]é\ufffd"),
    CASE(IN_V4, CALLS(INV("run") STR("a", "\xed\xa0\x80\xf0\x9f") VAL("b", "\"\xe6\"") END),
         "[B0]run[A0]{\"a\": \"\ufffd\ufffd\ufffd\ufffd\", \"b\": \"\ufffd\"}[E0 complete]"),
};

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
    slicing at_once = {0};
    for (size_t i = 0; i < HD_LEN(proper_cases); i++) {
        reply_case c = proper_cases[i];
        check_case(&c);
        c.opt.strict = true;
        if (c.proper) check_case(&c);
    }
    (void)at_once;
}

static void tolerated_replies(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(tolerant_cases); i++) check_case(&tolerant_cases[i]);
}

int test_reply(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(proper_replies),
        cmocka_unit_test(tolerated_replies),
    };
    return cmocka_run_group_tests_name("reply", tests, NULL, NULL);
}
