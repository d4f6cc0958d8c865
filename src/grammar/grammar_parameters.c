/* grammar_parameters.c - grammar of the parameters of a DSML tool call: strings raw, all
 * other values as JSON. */
#include <string.h>

#include "grammar/grammar_marks_internal.h"
#include "grammar/grammar_schema_internal.h"
#include "chat/reply.h"

static uint32_t literal(gram_builder *b, uint32_t from, const char *text) {
    return gram_marked(b, from, text, strlen(text));
}

static uint32_t draw_begin(gram_builder *b, uint32_t from) {
    return literal(b, from,
                   b->spaced ? "<" DSML " parameter name=\"" : "<" DSML "parameter name=\"");
}

static uint32_t draw_end(gram_builder *b, uint32_t from) {
    return literal(b, from, b->spaced ? "</" DSML " parameter>\n" : "</" DSML "parameter>\n");
}

/* Draws the beginning of a string value, or of another value. */
static uint32_t draw_kind(gram_builder *b, uint32_t named, bool plain) {
    return literal(b, named, plain ? "\" string=\"true\">" : "\" string=\"false\">");
}

/* Whether a tag can contain the name. */
static bool can_name(const gram_builder *b, const char *key) {
    const size_t n = strlen(key);
    for (size_t i = 0; i < n; i++) {
        if ((uint8_t)key[i] < 0x20 || strchr("\"<>", key[i])) return false;
    }
    return n > 0 && n < HD_REPLY_MAX_NAME && !(b->avoid && strstr(key, "｜"));
}

/* Names that are not declared: of plain letters. */
static void draw_other_name(gram_builder *b, uint32_t from, uint32_t to) {
    static const char pattern[] = "[A-Za-z0-9_.-]{1,64}";
    gram_pattern(b, from, to, pattern, sizeof pattern - 1, (gram_pattern_options){0}, NULL);
}

/* ---- with a schema ---- */

typedef struct list {
    uint32_t here; /* behind what is drawn */
    int32_t n;
} list;

/* Draws the value between its tags, in both spellings. Without any possible value the path
 * leads nowhere. */
static void draw_value(gram_walk *w, const gram_task *t, const char *key, json_t *schema,
                       uint32_t named, uint32_t to) {
    gram_builder *b = w->b;
    const uint32_t done = gram_node(b);
    gram_push(w, t, key, schema, GRAM_AS_PLAIN, draw_kind(b, named, true), done);
    gram_push(w, t, key, schema, GRAM_AS_OTHER, draw_kind(b, named, false), done);
    gram_empty(b, draw_end(b, done), to);
}

static void draw_declared(gram_walk *w, const gram_task *t, void *at, const char *key,
                          json_t *schema, bool required) {
    gram_builder *b = w->b;
    list *l = at;
    char path[80];
    snprintf(path, sizeof path, "properties/%.60s", key);
    if (!can_name(b, key)) {
        gram_schema_refuse(w, t, "a property whose name a call cannot spell");
        return;
    }
    if (++l->n > HD_REPLY_MAX_PARAMS) {
        gram_fail(b, HD_EINVAL, "schema_too_complex", "more than %d properties at #%s",
                  HD_REPLY_MAX_PARAMS, t->path);
        return;
    }
    const uint32_t next = gram_node(b), begun = draw_begin(b, l->here);
    draw_value(w, t, path, schema, literal(b, begun, key), next);
    if (!required) gram_empty(b, l->here, next);
    l->here = next;
}

static void deny(gram_walk *w, const gram_task *t, void *at, const char *key, json_t *schema,
                 bool required) {
    (void)t, (void)schema, (void)required;
    gram_deny_word(w->b, *(int32_t *)at, key, strlen(key));
}

/* At most one, because a repeated name makes the call invalid. */
static void draw_undeclared(gram_walk *w, const gram_task *t, const gram_members *m,
                            uint32_t from, uint32_t to) {
    gram_builder *b = w->b;
    int32_t name = gram_rule_new(b);
    if (b->status != HD_OK) return;
    const gram_rule r = b->rules[name];
    const uint32_t named = gram_node(b);
    draw_other_name(b, r.start, r.end);
    gram_schema_each(w, t, m, deny, &name);
    gram_call(b, draw_begin(b, from), named, name, 1, 1);
    draw_value(w, t, "additionalProperties", m->others, named, to);
}

void gram_schema_parameters(gram_walk *w, const gram_task *t) {
    gram_members all;
    list l = {.here = t->from};
    if (!gram_schema_members(w, t, &all)) return;
    gram_schema_each(w, t, &all, draw_declared, &l);
    if (w->b->status != HD_OK) return;
    gram_empty(w->b, l.here, t->to);
    if (all.others && l.n < HD_REPLY_MAX_PARAMS) draw_undeclared(w, t, &all, l.here, t->to);
}

/* ---- without a schema ---- */

void gram_any_parameters(gram_builder *b, uint32_t from, uint32_t to) {
    static const char names[] = "[^\\x00-\\x1f\"<>]{1,63}"; /* names that a tag can contain */
    const int32_t rule = gram_rule_new(b);
    if (b->status != HD_OK) return;
    const gram_rule r = b->rules[rule];
    const uint32_t begun = draw_begin(b, r.start), named = gram_node(b), done = gram_node(b);
    gram_pattern(b, begun, named, names, sizeof names - 1, (gram_pattern_options){0}, NULL);
    gram_json_call(b, draw_kind(b, named, true), done, GRAM_JSON_PLAIN);
    gram_json_call(b, draw_kind(b, named, false), done, GRAM_JSON_VALUE);
    gram_empty(b, draw_end(b, done), r.end);
    gram_call(b, from, to, rule, 0, HD_REPLY_MAX_PARAMS);
}
