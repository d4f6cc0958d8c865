/* grammar_calls.c - a block of calls as the chat formats write it (docs/reply.md has the formats,
 * reply_opening.c how one begins), with arguments that keep to their schemas. */
#include "text/grammar_internal.h"

#include <string.h>

#include "base/json.h"
#include "text/chat_internal.h"
#include "text/grammar_marks_internal.h"
#include "text/unicode_internal.h"

const char *const gram_mark_text[GRAM_N_MARKS] = {
    [GRAM_MARK_CALLS_BEGIN] = CHAT_CALLS_BEGIN, [GRAM_MARK_CALLS_END] = CHAT_CALLS_END,
    [GRAM_MARK_CALL_BEGIN] = CHAT_CALL_BEGIN,   [GRAM_MARK_CALL_END] = CHAT_CALL_END,
    [GRAM_MARK_SEPARATOR] = CHAT_CALL_SEP,      [GRAM_MARK_DSML] = CHAT_DSML,
};

enum { BAR = 0xff5c }; /* the character that every marker has */

/* What the formats differ in. */
typedef struct form {
    const char *lead;           /* before the block, but for any text that may come first */
    const char *begin, *end;    /* of the block */
    const char *first, *behind; /* of a call: before its name, between that and the arguments */
    const char *last;           /* behind the arguments */
    const char *between;        /* calls */
    bool parameters;            /* the arguments are parameters, not JSON */
} form;

#define DSML_FORM(block)                                                                      \
    {                                                                                         \
        .lead = "\n\n", .begin = "<" DSML block ">\n", .end = "</" DSML block ">",            \
        .first = "<" DSML "invoke name=\"", .behind = "\">\n", .last = "</" DSML "invoke>\n", \
        .between = "", .parameters = true                                                     \
    }

static const form forms[] = {
    [HD_REPLY_V3] = {"", CALLS_BEGIN, CALLS_END, CALL_BEGIN "function" SEPARATOR, "\n```json\n",
                     "\n```" CALL_END,                                                                     "\n", false},
    [HD_REPLY_V31] = {"", CALLS_BEGIN, CALLS_END, CALL_BEGIN,                      SEPARATOR,     CALL_END, "",   false},
    [HD_REPLY_V32] = DSML_FORM("function_calls"),
    [HD_REPLY_V4] = DSML_FORM("tool_calls"),
};

uint32_t gram_marked(gram_builder *b, uint32_t from, const char *text, size_t n) {
    for (size_t i = 0; i < n; i++) {
        const uint8_t c = (uint8_t)text[i];
        const bool spelled = c >= HD_GRAMMAR_MARK && !(b->marks >> (c - HD_GRAMMAR_MARK) & 1);
        const char *piece = spelled ? gram_mark_text[c - HD_GRAMMAR_MARK] : text + i;
        uint32_t next = gram_node(b);
        gram_bytes_of(b, from, next, piece, spelled ? strlen(piece) : 1);
        from = next;
    }
    return from;
}

static uint32_t literal(gram_builder *b, uint32_t from, const char *text) {
    return gram_marked(b, from, text, strlen(text));
}

/* A failure names the tool that it is about. */
static void name_tool(gram_builder *b, const char *name) {
    const size_t n = strlen(b->err->msg);
    snprintf(b->err->msg + n, sizeof b->err->msg - n, " (tool '%s')", name);
}

static int32_t draw_arguments(gram_builder *b, const form *f, json_t *tool) {
    json_t *parameters = json_object_get(tool, "parameters");
    const int32_t rule = gram_rule_new(b);
    if (b->status != HD_OK) return 0;
    const gram_rule r = b->rules[rule];
    b->rules[rule].tool = json_string_value(json_object_get(tool, "name"));
    if (json_is_true(json_object_get(tool, "strict"))) {
        json_t *none =
            parameters ? json_incref(parameters)
                       : json_pack("{s:s, s:b}", "type", "object", "additionalProperties", 0);
        gram_schema_of(b, rule, none, f->parameters ? GRAM_AS_PARAMETERS : GRAM_AS_OBJECT);
        json_decref(none);
    } else if (f->parameters) {
        gram_any_parameters(b, r.start, r.end, json_object_get(parameters, "properties"));
    } else {
        gram_json_call(b, r.start, r.end, GRAM_JSON_OBJECT);
    }
    return rule;
}

/* One call, of any tool. */
static int32_t draw_call(gram_builder *b, const form *f) {
    const int32_t rule = gram_rule_new(b);
    if (b->status != HD_OK) return 0;
    const gram_rule r = b->rules[rule];
    const uint32_t name = literal(b, r.start, f->first), done = gram_node(b);
    size_t i;
    json_t *tool;
    json_array_foreach(b->tools, i, tool) {
        const char *text = json_string_value(json_object_get(tool, "name"));
        if (!text || !*text) {
            gram_fail(b, HD_EINVAL, "invalid_schema: tools[%zu] has no name", i);
            return 0;
        }
        const uint32_t from = literal(b, literal(b, name, text), f->behind);
        const int32_t arguments = draw_arguments(b, f, tool);
        if (b->status != HD_OK) {
            name_tool(b, text);
            return 0;
        }
        gram_call(b, from, done, arguments, 1, 1);
    }
    gram_empty(b, literal(b, done, f->last), r.end);
    return rule;
}

static void draw_block(gram_builder *b, const form *f, uint32_t from, uint32_t to,
                       int32_t most) {
    const int32_t call = draw_call(b, f);
    const uint32_t begun = literal(b, from, f->begin), first = gram_node(b),
                   done = gram_node(b);
    int32_t further = gram_rule_new(b);
    if (b->status != HD_OK) return;
    const gram_rule r = b->rules[further];
    gram_call(b, begun, first, call, 1, 1);
    gram_call(b, literal(b, r.start, f->between), r.end, call, 1, 1);
    gram_call(b, first, done, further, 0, (uint32_t)most - 1);
    gram_empty(b, literal(b, done, f->end), to);
}

/* Any text, but for what could be a marker. */
static void draw_text(gram_builder *b, uint32_t at) {
    gram_class_range any[] = {
        {0, TEXT_UNICODE_END - 1}
    };
    const gram_class all = {.ranges = any, .n = HD_LEN(any)};
    gram_class_draw(b, at, at, &all, false);
}

static bool read_tools(gram_builder *b, const char *text, size_t n) {
    hd_err err = {0};
    if (n > HD_GRAMMAR_MAX_SCHEMA_BYTES) {
        gram_fail(b, HD_EINVAL, "schema_too_complex: tools of %zu bytes, more than %d", n,
                  HD_GRAMMAR_MAX_SCHEMA_BYTES);
    } else if (hd_json_parse(&b->tools, text, n, "the tools", &err) != HD_OK) {
        gram_fail(b, HD_EINVAL, "invalid_schema: %s", err.msg);
    } else if (json_array_size(b->tools) == 0) {
        gram_fail(b, HD_EINVAL, "invalid_schema: no tools");
    }
    return b->status == HD_OK;
}

void gram_calls(gram_builder *b, int32_t root, const char *text, size_t n,
                const hd_grammar_calls *calls) {
    const uint32_t from = b->rules[root].start, to = b->rules[root].end;
    if (calls->format == HD_REPLY_PLAIN || calls->most < 1) {
        gram_fail(b, HD_EUNSUPPORTED, "unsupported_schema: this model's replies have no calls");
    }
    if (b->status != HD_OK || !read_tools(b, text, n)) return;
    const form *f = &forms[calls->format];
    b->marks = calls->marks;
    b->avoid = calls->flagged ? 0 : BAR;
    if (calls->optional) {
        draw_text(b, from);
        gram_empty(b, from, to);
        draw_block(b, f, from, to, calls->most);
    } else {
        draw_block(b, f, literal(b, from, f->lead), to, calls->most);
    }
}
