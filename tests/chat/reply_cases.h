/* reply_cases.h - replies and their transcripts, for test_reply.c. */
#ifndef HD_TESTS_CHAT_REPLY_CASES_H
#define HD_TESTS_CHAT_REPLY_CASES_H

#include "chat/reply.h"

#define D         "｜DSML｜"
#define EOS       "<｜end▁of▁sentence｜>"
#define OPEN      "<" D "tool_calls>\n"
#define CLOSE     "</" D "tool_calls>"
#define INV(n)    "<" D "invoke name=\"" n "\">\n"
#define END       "</" D "invoke>\n"
#define STR(k, v) "<" D "parameter name=\"" k "\" string=\"true\">" v "</" D "parameter>\n"
#define VAL(k, v) "<" D "parameter name=\"" k "\" string=\"false\">" v "</" D "parameter>\n"
#define CALLS(x)  "\n\n" OPEN x CLOSE

#define OPEN41         "<" D " calls>\n"
#define CLOSE41        "</" D " calls>"
#define INV41(n)       "<" D " invoke name=\"" n "\">\n"
#define END41          "</" D " invoke>\n"
#define PARAM41(k, is) "<" D " parameter name=\"" k "\" string=\"" is "\">"
#define STR41(k, v)    PARAM41(k, "true") v "</" D " parameter>\n"
#define VAL41(k, v)    PARAM41(k, "false") v "</" D " parameter>\n"
#define CALLS41(x)     "\n\n" OPEN41 x CLOSE41

#define CB       "<｜tool▁calls▁begin｜>"
#define CE       "<｜tool▁calls▁end｜>"
#define C1       "<｜tool▁call▁begin｜>"
#define C2       "<｜tool▁call▁end｜>"
#define SEP      "<｜tool▁sep｜>"
#define V3(n, a) C1 "function" SEP n "\n```json\n" a "\n```" C2

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
#define IN_V41          .format = HD_REPLY_V41, TOOLS
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
#define V31_SHORT     IN_V31, .max_arguments = 12
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
    hd_finish_reason reason;
    bool proper; /* the official grammar has it: no notes, and the same in strict parsing */
} reply_case;

#define CASE(opts, text, expect) \
    { {opts}, text, expect, HD_FINISH_STOP, false }
#define CUT(opts, text, expect, reason) \
    { {opts}, text, expect, reason, false }
#define PROPER(opts, text, expect) \
    { {opts}, text, expect, HD_FINISH_STOP, true }

/* Replies as the model was taught to write them. */
static const reply_case proper_cases[] = {
    PROPER(IN_V4, "", ""),
    PROPER(IN_V41, CALLS41(INV41("run") STR41("s", "</" D "parameter>") END41),
           "[B0]run[A0]{\"s\": \"</" D "parameter>\"}[E0 complete]"),
    PROPER(IN_V41, "x" CALLS41(INV41("get_weather") STR41("location", "Paris") END41),
           "[C]x" PARIS_EVENTS("0")),
    PROPER(IN_V41,
           CALLS41(INV41("run") VAL41("n", "4.50") VAL41("o", "{\"k\":1}")
                       END41 INV41("now") "\n" END41),
           "[B0]run[A0]{\"n\": 4.50, \"o\": {\"k\":1}}[E0 complete]"
           "[B1]now[A1]{}[E1 complete]"),
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
    CUT(IN_V4, "\n\n" OPEN PARIS, PARIS_EVENTS("0") "[N CUT]", HD_FINISH_LENGTH),
    CASE(IN_V4, "\n\n" OPEN INV("run") STR("a", "b"),
         "[B0]run[A0]{\"a\": \"b\"[N MISSING_END][A0]}[E0 complete]"),
    CUT(IN_V4, "\n\n" OPEN INV("run") STR("a", "b"), "[B0]run[A0]{\"a\": \"b\"[E0 cut][N CUT]",
        HD_FINISH_LENGTH),
    CASE(IN_V4, "\n\n" OPEN INV("run") STR("a", "b") INV("now") END CLOSE,
         "[B0]run[A0]{\"a\": \"b\"[N MISSING_END][A0]}[E0 complete][B1]now[A1]{}[E1 complete]"),
    CASE(IN_V4, CALLS(INV("run") STR("a", "b")),
         "[B0]run[A0]{\"a\": \"b\"[N MISSING_END][A0]}[E0 complete]"),
    CASE(IN_V4, CALLS(INV("run")), "[B0]run[E0 malformed][N UNFINISHED][C]" INV("run")),
    CUT(IN_V4, "\n\n" OPEN INV("run") "<" D "parameter name=\"a\" string=\"true\">b</" D "para",
        "[B0]run[A0]{\"a\": \"b[E0 cut][N CUT]", HD_FINISH_ABORT),
    CASE(IN_V4,
         "\n\n" OPEN INV("run") "<" D "parameter name=\"a\" string=\"true\">b</" D "para" EOS,
         "[B0]run[A0]{\"a\": \"b</" D "para[E0 malformed][N UNFINISHED][C]" INV(
             "run") "<" D "parameter name=\"a\" string=\"true\">b</" D "para"),
    CUT(IN_V4, "\n\n" OPEN INV("run") "<" D "parameter name=\"a\" string=\"false\">[1,",
        "[B0]run[A0]{\"a\": [E0 cut][N CUT]", HD_FINISH_LENGTH),
    CUT(IN_V4, "\n\n" OPEN "<" D "invoke name=\"ru", "[N CUT]", HD_FINISH_LENGTH),
    CASE(IN_V4, "\n\n" OPEN "<" D "invoke name=\"ru", "[N BAD_TAG][C]<" D "invoke name=\"ru"),
    CASE(IN_V4, "\n\n" OPEN, "[N MISSING_END]"),
    CUT(IN_V4, "x\n\n<" D "tool", "[C]x\n\n<" D "tool", HD_FINISH_LENGTH),
    CASE(IN_V4, "x\n\n<" D "tool_calls" EOS, "[C]x\n\n[N STRAY_TAG][C]<" D "tool_calls"),
    CASE(IN_V4, CALLS(""), ""),
    CASE(IN_V3, CB V3("now", "{}"), "[B0]now[A0]{}[E0 complete][N MISSING_END]"),
    CASE(IN_V3, CB C1 "function" SEP "run\n```json\n{\"a\": 1}\n```" EOS,
         "[B0]run[A0]{\"a\": 1}[N MISSING_END][E0 complete]"),
    CUT(IN_V3, CB C1 "function" SEP "run\n```json\n{\"a\": 1",
        "[B0]run[A0]{\"a\": 1[E0 cut][N CUT]", HD_FINISH_LENGTH),
    CASE(IN_V3, CB C1 "function" SEP "run\n```json\n{\"a\": 1",
         "[B0]run[A0]{\"a\": 1[E0 malformed][N UNFINISHED][C]" C1 "function" SEP
         "run\n```json\n{\"a\": 1"),
    CASE(IN_V31, CB C1 "run" SEP "{\"a\": 1}" C1 "now" SEP "{}" CE,
         "[B0]run[A0]{\"a\": 1}[N MISSING_END][E0 complete][B1]now[A1]{}[N MISSING_END][E1 "
         "complete]"),
    CUT(IN_V31, CB C1 "ru", "[N CUT]", HD_FINISH_LENGTH),
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
    CUT(V4_THINKS, "a </think", "[R]a </think", HD_FINISH_LENGTH),
    CASE(IN_V3, "<think>\na</think>\n\nb", "[R]\na[C]\n\nb"),
    CASE(IN_V3, "\n <think>a</think>b", "[R]a[C]b"),
    CASE(IN_V4, "<think>a</think>b", "[N THINK_TAG][R]a[C]b"),
    CASE(V4_THINKS, "<think>a</think>b", "[N THINK_TAG][R]a[C]b"),
    CASE(IN_V4, "a <think> b</think> c", "[C]a [N THINK_TAG][C] b[N THINK_TAG][C] c"),
    CASE(V4_OFF, "<think>a</think>b", "[N THINK_TAG][C]a[N THINK_TAG][C]b"),
    CASE(V4_THINKS_OFF, "</think>b", "[N THINK_TAG][C]b"),
    /* a block in the reasoning */
    CASE(V4_THINKS, "a" CALLS(PARIS), "[R]a[N BLOCK_IN_REASONING]" PARIS_EVENTS("0")),
    CASE(V4_THINKS, "a \n" OPEN PARIS PARIS CLOSE EOS,
         "[R]a[N BLOCK_IN_REASONING][N SPELLING]" PARIS_EVENTS("0") PARIS_EVENTS("1")),
    CASE(V4_THINKS, CALLS(PARIS) "</think>b",
         "[N BLOCK_IN_REASONING]" PARIS_EVENTS("0") "[N THINK_TAG][C]b"),
    CASE(V4_THINKS, "a" CALLS(INV("run") STR("a", "</think>") END) "b",
         "[R]a[N BLOCK_IN_REASONING][B0]run[A0]{\"a\": \"</think>\"}[E0 complete][C]b"),
    CASE(V4_THINKS, "<think>a" CALLS(PARIS),
         "[N THINK_TAG][R]a[N BLOCK_IN_REASONING]" PARIS_EVENTS("0")),
    CUT(V4_THINKS, "a" CALLS(PARIS) "b", "[R]a[N BLOCK_IN_REASONING]" PARIS_EVENTS("0") "[C]b",
        HD_FINISH_LENGTH),
    CASE(V3_THINKS, "a\n" CB V3("run", "{}") CE,
         "[R]a[N BLOCK_IN_REASONING][B0]run[A0]{}[E0 complete]"),
    CASE(V31_THINKS, "a" CB C1 "run" SEP "{}" C2 CE,
         "[R]a[N BLOCK_IN_REASONING][B0]run[A0]{}[E0 complete]"),
    CASE(V31_THINKS, "a" C1 "run" SEP "{}" C2,
         "[R]a[N BLOCK_IN_REASONING][B0]run[A0]{}[E0 complete][N MISSING_END]"),
    /* reasoning about one */
    CASE(V4_THINKS, "a \n" OPEN "... </think>b", "[R]a \n" OPEN "... [C]b"),
    CASE(V4_THINKS, "a " OPEN INV("other") END CLOSE "\n</think>b",
         "[R]a " OPEN INV("other") END CLOSE "\n[C]b"),
    CASE(V4_THINKS, "a <tool_calls>\n<invoke name=\"run\"> </think>b",
         "[R]a <tool_calls>\n<invoke name=\"run\"> [C]b"),
    CUT(V4_THINKS, "a \n" OPEN "<" D "invoke name=\"ru",
        "[R]a \n" OPEN "<" D "invoke name=\"ru", HD_FINISH_LENGTH),
    CASE(V31_THINKS, "a" CB " </think>b", "[R]a" CB " [C]b"),
    /* malformed calls come back */
    CASE(IN_V4, CALLS(INV("run") STR("a", "b") STR("a", "c") END) "y",
         "[B0]run[A0]{\"a\": \"b\"[E0 malformed][N DUPLICATE_PARAMETER][C]" INV("run")
             STR("a", "b") STR("a", "c") "</" D "invoke>y"),
    CASE(IN_V4, CALLS(STR("a", INV("now") END) PARIS),
         "[N PARAMETER_OUTSIDE][C]" STR("a", INV("now") END) PARIS_EVENTS("0")),
    CASE(IN_V4, CALLS("well \n" PARIS "and" PARIS) "y",
         "[N TEXT_BETWEEN_CALLS][C]\nwell" PARIS_EVENTS(
             "0") "[N TEXT_BETWEEN_CALLS][C]\nand" PARIS_EVENTS("1") "[C]y"),
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
         "[B0]run[A0]{\"a\": \"bbbb\"[E0 malformed][N ARGUMENTS_TOO_LONG][C]" INV("run")
             STR("a", "bbbb") "</" D "invoke>"),
    CASE(V4_SHORT, CALLS(INV("run") STR("a", "b\n\nb") END),
         "[B0]run[A0]{\"a\": \"b\\n\\n[E0 malformed][N ARGUMENTS_TOO_LONG][C]" INV("run")
             STR("a", "b\n\nb") "</" D "invoke>"),
    CASE(V4_SHORT, CALLS(INV("run") VAL("a", "[1,2,3,4,5]") END),
         "[B0]run[A0]{\"a\": [1,2,3[E0 malformed][N ARGUMENTS_TOO_LONG][C]" INV("run")
             VAL("a", "[1,2,3,4,5]") "</" D "invoke>"),
    CASE(V4_SHORT, CALLS(INV("run") VAL("a", "[1,2,3,4,5,6]") END),
         "[B0]run[A0]{\"a\": [E0 malformed][N ARGUMENTS_TOO_LONG][C]" INV("run")
             VAL("a", "[1,2,3,4,5,6]") "</" D "invoke>"),
    CASE(V4_SHORT, CALLS(INV("run") "{\"a\": \"bbbbbbbb</|DSML|invoke>\"}" END),
         "[B0]run[N SPELLING][A0]{\"a\": \"bbbbb[E0 malformed][N ARGUMENTS_TOO_LONG][C]" INV(
             "run") "{\"a\": \"bbbbbbbb</|DSML|invoke>\"}</" D "invoke>"),
    CASE(V31_SHORT, CB C1 "run" SEP "{\"a\": \"bbbbbbbb\"}" C2 CE "x",
         "[B0]run[A0]{\"a\": \"bbbbb[E0 malformed][N ARGUMENTS_TOO_LONG][C]" C1 "run" SEP
         "{\"a\": \"bbbbbbbb\"}" C2 "x"),
    CASE(V31_SHORT, CB C1 "run" SEP "{\"a\": \"bbbbbbbb" C2 CE "x",
         "[B0]run[A0]{\"a\": \"bbbbb[E0 malformed][N ARGUMENTS_TOO_LONG][C]" C1 "run" SEP
         "{\"a\": \"bbbbbbbb" C2 "x"),
    /* calls that come whole */
    CASE(V4_WHOLE, CALLS(INV("run") STR("a", "b") STR("a", "c") END PARIS),
         "[N DUPLICATE_PARAMETER][C]" INV("run") STR("a", "b")
             STR("a", "c") "</" D "invoke>" PARIS_EVENTS("0")),
    CUT(V4_WHOLE, "\n\n" OPEN PARIS INV("run") STR("a", "b"), PARIS_EVENTS("0") "[N CUT]",
        HD_FINISH_LENGTH),
    /* bytes that are no UTF-8 */
    CASE(V4_THINKS, "a\xff\xe6\x9d</think>\xc3\xa9\xc3", "[R]a\ufffd\ufffd[C]é\ufffd"),
    CASE(IN_V4, CALLS(INV("run") STR("a", "\xed\xa0\x80\xf0\x9f") VAL("b", "\"\xe6\"") END),
         "[B0]run[A0]{\"a\": \"\ufffd\ufffd\ufffd\ufffd\", \"b\": \"\ufffd\"}[E0 complete]"),
};

/* Official parsers raise on these; expect is how the transcript ends up to there. */
static const reply_case strict_refusals[] = {
    CASE(IN_V4, "x\n" OPEN PARIS CLOSE, "[N SPELLING]"),
    CASE(IN_V4, "x\n\n<" D "function_calls>\n" PARIS, "[N SPELLING]"),
    CASE(IN_V4, "\n\n<" D "tool_calls>" PARIS CLOSE, "[N SPELLING]"),
    CASE(IN_V4, CALLS(" " PARIS), "[N SPELLING]"),
    CASE(IN_V4, CALLS(INV("run") "\n" STR("a", "b") "\n" END), "[N SPELLING]"),
    CASE(IN_V4, CALLS(INV("run") STR("a", "b") STR("a", "c") END), "[N DUPLICATE_PARAMETER]"),
    CASE(IN_V4, CALLS(INV("run") "<" D "parameter name=\"a\">b</" D "parameter>\n" END),
         "[N BAD_TAG]"),
    CASE(IN_V4, CALLS(INV("run") "{}\n" END), "[N SPELLING]"),
    CASE(IN_V4, CALLS(INV("run") "x" END), "[N "),
    CASE(IN_V4, CALLS("x" PARIS), "[N "),
    CASE(IN_V4, "\n\n" OPEN PARIS, "[N MISSING_END]"),
    CASE(IN_V4, INV("now") END, "[N STRAY_TAG]"),
    CASE(IN_V4, "a</think>", "[N THINK_TAG]"),
    CASE(V4_THINKS, "a", "[N UNFINISHED_REASONING]"),
    CASE(V4_THINKS, "a<think>", "[N THINK_TAG]"),
    CASE(V4_THINKS, "a" CALLS(PARIS), "[N BLOCK_IN_REASONING]"),
    CASE(IN_V3, CB C1 "function" SEP "now\n{}" C2 CE, "[N SPELLING]"),
    CASE(IN_V31, CB C1 "now" SEP " {}" C2 CE, "[N SPELLING]"),
};

/* \1 and \2 enclose a special token. */
#define S(token)   "\1" token "\2"
#define FLAGGED_V4 IN_V4, .flagged = true, .dsml_flagged = true, .starts_in_reasoning = true
#define FLAGGED_V3 IN_V31, .flagged = true

static const reply_case flagged_cases[] = {
    CASE(FLAGGED_V4, "a</think>b<think>" EOS "c" S("</think>") "d</think>" S(EOS) "e",
         "[R]a</think>b<think>" EOS "c[C]d</think>"),
    CASE(FLAGGED_V4,
         "a" S("</think>") "b\n\n" OPEN PARIS CLOSE, /* a tool was offered: it is one */
         "[R]a[C]b[N SPELLING][N SPELLING][B0]get_weather[N SPELLING][A0]{\"location\": "
         "\"Paris\"[N SPELLING][N SPELLING][A0]}[E0 complete][N SPELLING]"),
    CASE(FLAGGED_V4, S("</think>") "b\n\n" OPEN INV("other"), "[C]b\n\n" OPEN INV("other")),
    CASE(FLAGGED_V4,
         S("</think>") "\n\n<" S(D) "tool_calls>\n<" S(D) "invoke name=\"run\">\n<" S(
             D) "parameter name=\"a\" string=\"true\">b</" D "parameter> <" D
                "c</" S(D) "parameter>\n</" S(D) "invoke>\n</" S(D) "tool_calls>",
         "[B0]run[A0]{\"a\": \"b</" D "parameter> <" D "c\"}[E0 complete]"),
    CASE(FLAGGED_V3, "a" CB C1 "now" SEP "{}" C2 CE, "[C]a" CB C1 "now" SEP "{}" C2 CE),
    CASE(FLAGGED_V3, "a" S(CB) S(C1) "run" S(SEP) "{\"a\": \"" C1 C2 "\"}" S(C2) S(CE) "b",
         "[C]a[B0]run[A0]{\"a\": \"" C1 C2 "\"}[E0 complete][C]b"),
    CASE(FLAGGED_V3, "<think>" S("<think>") "b" S("</think>") "c",
         "[C]<think>[N THINK_TAG][C]b[N THINK_TAG][C]c"),
};

/* What has come out after all of the text, with more to come. */
static const reply_case held_cases[] = {
    CASE(IN_V4, "abc", "[C]abc"),
    CASE(IN_V4, "abc <", "[C]abc"),
    CASE(IN_V4, "abc <p", "[C]abc <p"),
    CASE(IN_V4, "abc </t", "[C]abc"),
    CASE(IN_V4, "abc </tr", "[C]abc </tr"),
    CASE(IN_V4, "abc\n\n<" D "tool_c", "[C]abc"),
    CASE(IN_V4, "abc\n\n<" D "tool_cx", "[C]abc\n\n<" D "tool_cx"),
    CASE(IN_V4, "abc \n \n", "[C]abc"),
    CASE(V4_TEXT, "abc \n<" D "tool_calls>", "[C]abc \n<" D "tool_calls>"),
    CASE(V4_THINKS, "abc \n", "[R]abc"),
    CASE(V4_THINKS, "abc \n</thin", "[R]abc"),
    CASE(V4_THINKS, "abc \n\n" OPEN "<" D "invoke name=\"ru", "[R]abc"),
    CASE(V4_THINKS, "abc \n\n" OPEN "<" D "invoke name=\"x", "[R]abc"),
    CASE(V4_THINKS, "abc \n\n" OPEN "<" D "invoke name=\"x\">",
         "[R]abc \n\n" OPEN "<" D "invoke name=\"x\">"),
    CASE(IN_V31, "abc<｜tool▁call", "[C]abc"),
    CASE(IN_V31, "abc<｜tool▁x", "[C]abc<｜tool▁x"),
    CASE(IN_V4, "\n\n" OPEN "<" D "invoke name=\"run\"", ""),
    CASE(IN_V4, "\n\n" OPEN "<" D "invoke name=\"run\">", "[B0]run"),
    CASE(IN_V4, "\n\n" OPEN INV("run") "<" D "parameter name=\"a\" string=\"true\">b\"<",
         "[B0]run[A0]{\"a\": \"b\\\""),
    CASE(IN_V4, "\n\n" OPEN INV("run") "<" D "parameter name=\"a\" string=\"true\">b</p",
         "[B0]run[A0]{\"a\": \"b</p"),
    CASE(IN_V4, "\n\n" OPEN INV("run") "<" D "parameter name=\"a\" string=\"true\">b\xc3",
         "[B0]run[A0]{\"a\": \"b"),
    CASE(IN_V4, "\n\n" OPEN INV("run") "<" D "parameter name=\"a\" string=\"false\">[1]",
         "[B0]run[A0]{\"a\": "),
    CASE(IN_V31, CB C1 "run" SEP "{\"a\": [1, \"x", "[B0]run[A0]{\"a\": [1, \"x"),
    CASE(V4_WHOLE, "\n\n" OPEN INV("run") STR("a", "b"), ""),
};

#endif
