/* grammar_calls.c - grammar of tool calls in the chat formats (docs/reply.md,
 * reply_opening.c), with arguments that match their schemas. */
#include "grammar/grammar_internal.h"

#include <assert.h>
#include <string.h>

#include "base/json.h"
#include "chat/markers.h"
#include "grammar/grammar_marks_internal.h"

const char *const gram_mark_text[GRAM_N_MARKS] = {
    [GRAM_MARK_CALLS_BEGIN] = CHAT_CALLS_BEGIN, [GRAM_MARK_CALLS_END] = CHAT_CALLS_END,
    [GRAM_MARK_CALL_BEGIN] = CHAT_CALL_BEGIN,   [GRAM_MARK_CALL_END] = CHAT_CALL_END,
    [GRAM_MARK_SEPARATOR] = CHAT_CALL_SEP,      [GRAM_MARK_DSML] = CHAT_DSML,
};

enum { BAR = 0xff5c }; /* the character that every marker contains */

/* How a chat format writes calls. */
typedef struct form {
    const char *lead;           /* before the block */
    const char *begin, *end;    /* of the block */
    const char *first, *behind; /* of a call: before its name, between that and the arguments */
    const char *last;           /* behind the arguments */
    const char *between;        /* calls */
    bool parameters;            /* the arguments are parameters, not JSON */
    bool spaced;                /* a blank before the words of tags */
} form;

#define DSML_FORM(block, invoke, spaced_)                                                      \
    {                                                                                          \
        .lead = "\n\n", .begin = "<" DSML block ">\n", .end = "</" DSML block ">",             \
        .first = "<" DSML invoke " name=\"", .behind = "\">\n",                                \
        .last = "</" DSML invoke ">\n", .between = "", .parameters = true, .spaced = (spaced_) \
    }

static const form forms[] = {
    [HD_REPLY_V3] = {"", CALLS_BEGIN, CALLS_END, CALL_BEGIN "function" SEPARATOR, "\n```json\n",
                     "\n```" CALL_END,                                                                     "\n", false, false},
    [HD_REPLY_V31] = {"", CALLS_BEGIN, CALLS_END, CALL_BEGIN,                      SEPARATOR,     CALL_END, "",   false,
                     false                                                                                                   },
    [HD_REPLY_V32] = DSML_FORM("function_calls", "invoke", false),
    [HD_REPLY_V4] = DSML_FORM("tool_calls", "invoke", false),
    [HD_REPLY_V41] = DSML_FORM(" calls", " invoke", true),
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

/* Adds the tool to the error. */
static void name_tool(gram_builder *b, const char *name) {
    const size_t n = strlen(b->err->msg);
    hd_err_set_field(b->err, "tools");
    snprintf(b->err->msg + n, sizeof b->err->msg - n, " (tool '%s')", name);
}

/* Draws the schema of a tool's arguments. If the tool is not strict and its schema cannot be
 * expressed, returns false, and its arguments may be any object. */
static bool draw_schema(gram_builder *b, const form *f, int32_t rule, json_t *tool) {
    const bool strict = json_is_true(json_object_get(tool, "strict"));
    json_t *parameters = json_object_get(tool, "parameters");
    json_t *none = json_pack("{s:s, s:b}", "type", "object", "additionalProperties", 0);
    if (!none) gram_fail(b, HD_ENOMEM, NULL, "no memory for the parameters of a tool");
    if (b->status != HD_OK) return true;
    b->loose = !strict;
    gram_schema_of(b, rule, parameters ? parameters : none,
                   f->parameters ? GRAM_AS_PARAMETERS : GRAM_AS_OBJECT);
    b->loose = false;
    json_decref(none);
    if (b->status == HD_OK || b->status == HD_ENOMEM || strict) return true;
    b->status = HD_OK;
    *b->err = (hd_err){0};
    return false;
}

static int32_t draw_any_object(gram_builder *b, const form *f) {
    const int32_t rule = gram_rule_new(b);
    if (b->status != HD_OK) return 0;
    if (f->parameters) {
        gram_any_parameters(b, b->rules[rule].start, b->rules[rule].end);
    } else {
        gram_json_call(b, b->rules[rule].start, b->rules[rule].end, GRAM_JSON_OBJECT);
    }
    return rule;
}

/* Returns the rule of a tool's arguments; *any is the rule of any object, drawn when first
 * needed. */
static int32_t draw_arguments(gram_builder *b, const form *f, json_t *tool, bool hold,
                              int32_t *any) {
    const bool strict = json_is_true(json_object_get(tool, "strict"));
    if (strict || (hold && json_object_get(tool, "parameters"))) {
        const int32_t rule = gram_rule_new(b);
        if (b->status != HD_OK) return 0;
        if (draw_schema(b, f, rule, tool)) {
            b->rules[rule].tool = json_string_value(json_object_get(tool, "name"));
            return rule;
        }
    }
    if (*any == GRAM_NONE) *any = draw_any_object(b, f);
    return *any;
}

/* Draws one call of any tool. */
static int32_t draw_call(gram_builder *b, const form *f, bool hold) {
    const int32_t rule = gram_rule_new(b);
    int32_t any = GRAM_NONE;
    if (b->status != HD_OK) return 0;
    const gram_rule r = b->rules[rule];
    const uint32_t name = literal(b, r.start, f->first), done = gram_node(b);
    size_t i;
    json_t *tool;
    json_array_foreach(b->tools, i, tool) {
        const char *text = json_string_value(json_object_get(tool, "name"));
        if (!text || !*text) {
            gram_fail(b, HD_EINVAL, "invalid_schema", "tools[%zu] has no name", i);
            return 0;
        }
        const uint32_t from = literal(b, literal(b, name, text), f->behind);
        const int32_t arguments = draw_arguments(b, f, tool, hold, &any);
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
                       const hd_grammar_calls *calls) {
    const int32_t call = draw_call(b, f, calls->hold);
    const uint32_t begun = literal(b, from, f->begin), first = gram_node(b),
                   done = gram_node(b);
    int32_t further = gram_rule_new(b);
    if (b->status != HD_OK) return;
    const gram_rule r = b->rules[further];
    gram_call(b, begun, first, call, 1, 1);
    gram_call(b, literal(b, r.start, f->between), r.end, call, 1, 1);
    gram_call(b, first, done, further, 0, (uint32_t)calls->most - 1);
    gram_empty(b, literal(b, done, f->end), to);
}

static bool read_tools(gram_builder *b, const char *text, size_t n) {
    hd_err err = {0};
    if (n > HD_GRAMMAR_MAX_SCHEMA_BYTES) {
        gram_fail(b, HD_EINVAL, "schema_too_complex", "tools of %zu bytes, more than %d", n,
                  HD_GRAMMAR_MAX_SCHEMA_BYTES);
    } else if (hd_json_parse(&b->tools, text, n, "the tools", &err) != HD_OK) {
        gram_fail(b, HD_EINVAL, "invalid_schema", "%s", err.msg);
    } else if (json_array_size(b->tools) == 0) {
        gram_fail(b, HD_EINVAL, "invalid_schema", "no tools");
    }
    return b->status == HD_OK;
}

/* Appends a text, with its markers as the vocabulary represents them. */
static void spell(const gram_builder *b, uint8_t *out, uint8_t *n, const char *text) {
    for (; *text; text++) {
        const uint8_t c = (uint8_t)*text;
        const bool spelled = c >= HD_GRAMMAR_MARK && !(b->marks >> (c - HD_GRAMMAR_MARK) & 1);
        const char *piece = spelled ? gram_mark_text[c - HD_GRAMMAR_MARK] : text;
        const size_t bytes = spelled ? strlen(piece) : 1;
        assert(*n + bytes <= sizeof((gram_opening *)0)->marker);
        memcpy(out + *n, piece, bytes);
        *n = (uint8_t)(*n + bytes);
    }
}

static void add_opening(const gram_builder *b, hd_grammar *g, const char *lead,
                        const char *marker) {
    gram_opening *o = &g->openings[g->n_openings++];
    spell(b, o->lead, &o->n_lead, lead);
    spell(b, o->marker, &o->n_marker, marker);
}

void gram_calls(gram_builder *b, hd_grammar *g, int32_t root, const hd_grammar_calls *calls) {
    const uint32_t from = b->rules[root].start, to = b->rules[root].end;
    if (calls->format == HD_REPLY_PLAIN || calls->most < 1) {
        gram_fail(b, HD_EUNSUPPORTED, "unsupported_schema",
                  "this model's replies have no calls");
    }
    if (b->status != HD_OK || !read_tools(b, calls->tools, calls->n_tools)) return;
    const form *f = &forms[calls->format];
    b->marks = calls->marks;
    b->spaced = f->spaced;
    b->avoid = calls->flagged ? 0 : BAR;
    draw_block(b, f, literal(b, from, f->lead), to, calls);
    add_opening(b, g, f->lead, f->parameters ? "<" DSML : f->begin);
    if (!f->parameters) add_opening(b, g, f->begin, CALL_BEGIN);
}
