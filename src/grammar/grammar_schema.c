/* grammar_schema.c - JSON schema to grammar: walks the keywords and draws what they allow.
 * The walk is a list of tasks, "draw this schema between these two nodes", so nesting is
 * limited by counted memory only. A schema is drawn exactly, narrowed in a way that
 * docs/grammar.md describes, or refused by name. */
#include "grammar/grammar_schema_internal.h"

#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "tokenizer/unicode.h"

static const char *const assertions[] = {
    "$ref",
    "enum",
    "const",
    "anyOf",
    "oneOf",
    "allOf",
    "type",
    "required",
    "items",
    "additionalProperties",
    "properties",
    "prefixItems",
    "minItems",
    "maxItems",
    "additionalItems",
    "pattern",
    "format",
    "minLength",
    "maxLength",
    "exclusiveMinimum",
    "minimum",
    "maximum",
    "exclusiveMaximum",
};

static const char *const refused[] = {
    "not",           "if",
    "then",          "else",
    "contains",      "minContains",
    "maxContains",   "dependentRequired",
    "propertyNames", "dependentSchemas",
    "multipleOf",    "unevaluatedProperties",
    "$dynamicRef",   "unevaluatedItems",
    "$recursiveRef", "patternProperties",
    "minProperties", "maxProperties",
    "dependencies",
};

hd_status gram_schema_invalid(gram_walk *w, const gram_task *t, const char *what) {
    return gram_fail(w->b, HD_EINVAL, "invalid_schema: %s at #%s", what, t->path);
}

hd_status gram_schema_refuse(gram_walk *w, const gram_task *t, const char *what) {
    return gram_fail(w->b, HD_EUNSUPPORTED, "unsupported_schema: %s at #%s", what, t->path);
}

void gram_push(gram_walk *w, const gram_task *parent, const char *key, json_t *schema,
               gram_spelling spelling, uint32_t from, uint32_t to) {
    gram_builder *b = w->b;
    gram_task t = {.schema = schema,
                   .spelling = spelling,
                   .from = from,
                   .to = to,
                   .depth = parent->depth + 1};
    if (t.depth > HD_GRAMMAR_MAX_SCHEMA_DEPTH) {
        gram_fail(b, HD_EINVAL, "schema_too_deep: more than %d schemas nested at #%.80s...",
                  HD_GRAMMAR_MAX_SCHEMA_DEPTH, parent->path);
        return;
    }
    int n = snprintf(t.path, sizeof t.path, "%s%s%s", parent->path, *key ? "/" : "", key);
    if (n >= (int)sizeof t.path) memcpy(t.path + sizeof t.path - 4, "...", 4);
    if (!gram_work(b, 1)) return;
    if (!gram_grow(b, &w->tasks, &w->cap_tasks, (size_t)w->n_tasks + 1, sizeof t)) return;
    w->tasks[w->n_tasks++] = t;
}

static bool listed(const char *key, const char *const *list, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (strcmp(key, list[i]) == 0) return true;
    }
    return false;
}

static bool check_keywords(gram_walk *w, const gram_task *t) {
    const char *key;
    json_t *value;
    json_object_foreach(t->schema, key, value) {
        bool empty = strcmp(key, "minProperties") == 0 && json_is_integer(value) &&
                     json_integer_value(value) == 0;
        bool unique = strcmp(key, "uniqueItems") == 0 && !json_is_false(value);
        if (!gram_work(w->b, 1)) return false;
        if (w->b->loose) continue;
        if (unique || (!empty && listed(key, refused, HD_LEN(refused)))) {
            char what[80];
            snprintf(what, sizeof what, "the keyword %.40s", key);
            gram_schema_refuse(w, t, what);
            return false;
        }
    }
    return true;
}

/* Checks a keyword that excludes all others, except type if with_type. */
static bool check_alone(gram_walk *w, const gram_task *t, const char *alone, bool with_type) {
    const char *key;
    json_t *value;
    json_object_foreach(t->schema, key, value) {
        if (strcmp(key, alone) == 0 || !listed(key, assertions, HD_LEN(assertions))) continue;
        if (with_type && strcmp(key, "type") == 0) continue;
        char what[100];
        snprintf(what, sizeof what, "the keyword %.40s beside %s", key, alone);
        gram_schema_refuse(w, t, what);
        return false;
    }
    return true;
}

static int hex_value(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    c = (char)(c | 32);
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Reads one key of a JSON pointer: decodes %XX, then ~1 and ~0. Returns false if it is
 * malformed. */
static bool read_key(const char **at, char *key, size_t cap) {
    size_t n = 0;
    const char *p = *at;
    for (; *p && *p != '/'; p++) {
        int c = (uint8_t)*p;
        if (c == '%') {
            int high = hex_value(p[1]), low = high < 0 ? -1 : hex_value(p[2]);
            if (low < 0) return false;
            c = high << 4 | low;
            p += 2;
        }
        if (n + 1 >= cap || c == 0) return false;
        key[n++] = (char)c;
    }
    key[n] = 0;
    *at = p;
    char *to = key;
    for (const char *from = key; *from; from++) {
        if (*from == '~') {
            from++;
            if (*from != '0' && *from != '1') return false;
        }
        *to++ = from > key && from[-1] == '~' ? (*from == '1' ? '/' : '~') : *from;
    }
    *to = 0;
    return true;
}

/* Returns the target of a $ref; NULL after a failure. */
static json_t *resolve(gram_walk *w, const gram_task *t, json_t *ref) {
    const char *at = json_string_value(ref);
    json_t *found = w->root;
    char key[512], what[160];
    if (!at) {
        gram_schema_invalid(w, t, "a $ref that is not a string");
        return NULL;
    }
    if (at[0] != '#' || (at[1] && at[1] != '/')) {
        snprintf(what, sizeof what, "a $ref that leads elsewhere (%.80s)", at);
        gram_schema_refuse(w, t, what);
        return NULL;
    }
    const char *all = at++;
    while (found && *at == '/') {
        at++;
        if (!gram_work(w->b, 1)) return NULL;
        if (!read_key(&at, key, sizeof key)) {
            found = NULL;
        } else if (json_is_array(found)) {
            char *end;
            unsigned long i = strtoul(key, &end, 10);
            found = *key && !*end ? json_array_get(found, i) : NULL;
        } else {
            found = json_object_get(found, key);
        }
    }
    if (!found) {
        snprintf(what, sizeof what, "a $ref that leads nowhere (%.80s)", all);
        gram_schema_invalid(w, t, what);
    }
    return found;
}

static void draw_ref(gram_walk *w, const gram_task *t, json_t *ref) {
    gram_builder *b = w->b;
    if (!check_alone(w, t, "$ref", false)) return;
    json_t *target = resolve(w, t, ref);
    if (!target) return;
    uint32_t i = 0;
    while (i < w->n_refs &&
           (w->refs[i].target != target || w->refs[i].spelling != t->spelling)) {
        i++;
    }
    if (!gram_work(b, i / 8 + 1)) return;
    if (i == w->n_refs) {
        if (!gram_grow(b, &w->refs, &w->cap_refs, (size_t)i + 1, sizeof *w->refs)) return;
        w->refs[w->n_refs++] = (gram_ref){target, t->spelling, gram_rule_new(b)};
        if (b->status != HD_OK) return;
        gram_task fresh = {.path = ""};
        const gram_rule *rule = &b->rules[w->refs[i].rule];
        gram_push(w, &fresh, json_string_value(ref) + 1 + (json_string_value(ref)[1] == '/'),
                  target, t->spelling, rule->start, rule->end);
    }
    gram_call(b, t->from, t->to, w->refs[i].rule, 1, 1);
}

/* Returns the shortest text that reads back as the same number. */
static char *dump(const json_t *value) {
    size_t flags = JSON_COMPACT | JSON_ENCODE_ANY;
    if (json_is_string(value) || json_is_integer(value)) return hd_json_write(value, flags);
    for (size_t digits = 15; digits < 17; digits++) {
        char *text = hd_json_write(value, flags | JSON_REAL_PRECISION(digits));
        json_t *again = text ? hd_json_read(text, strlen(text), JSON_DECODE_ANY, NULL) : NULL;
        bool same = again && json_equal(again, value);
        json_decref(again);
        if (same) return text;
        free(text);
    }
    return hd_json_write(value, flags | JSON_REAL_PRECISION(17));
}

char *gram_schema_dump(gram_walk *w, const json_t *value) {
    char *text = dump(value);
    if (!text) gram_fail(w->b, HD_ENOMEM, "no memory for a value of a schema");
    return text;
}

static bool has_type(const json_t *value, const char *type) {
    switch (json_typeof(value)) {
    case JSON_OBJECT:
        return strcmp(type, "object") == 0;
    case JSON_ARRAY:
        return strcmp(type, "array") == 0;
    case JSON_STRING:
        return strcmp(type, "string") == 0;
    case JSON_INTEGER:
        return strcmp(type, "integer") == 0 || strcmp(type, "number") == 0;
    case JSON_REAL:
        return strcmp(type, "number") == 0;
    case JSON_TRUE:
    case JSON_FALSE:
        return strcmp(type, "boolean") == 0;
    case JSON_NULL:
        return strcmp(type, "null") == 0;
    }
    return false;
}

static bool allowed_type(const json_t *types, const json_t *value) {
    if (!types) return true;
    if (json_is_string(types)) return has_type(value, json_string_value(types));
    for (size_t i = 0; i < json_array_size(types); i++) {
        const char *type = json_string_value(json_array_get(types, i));
        if (type && has_type(value, type)) return true;
    }
    return false;
}

static bool can_spell(gram_spelling spelling, const json_t *value) {
    if (spelling == GRAM_AS_OBJECT) return json_is_object(value);
    return spelling == GRAM_AS_JSON || json_is_string(value) == (spelling == GRAM_AS_PLAIN);
}

/* If markers are spelled in plain text, a value must not begin one. */
static void draw_plain(gram_walk *w, const gram_task *t, const char *text, size_t n) {
    uint8_t avoided[4];
    size_t length = w->b->avoid ? text_utf8_put(avoided, w->b->avoid) : 0;
    for (size_t i = 0; length && i + length <= n; i++) {
        if (memcmp(text + i, avoided, length) != 0) continue;
        gram_schema_refuse(w, t, "a value that a call cannot spell");
        return;
    }
    gram_bytes_of(w->b, t->from, t->to, text, n);
}

static void draw_value(gram_walk *w, const gram_task *t, const json_t *value) {
    if (!allowed_type(json_object_get(t->schema, "type"), value)) return;
    if (t->spelling == GRAM_AS_PARAMETERS) {
        gram_schema_refuse(w, t, "an enum or const of all parameters");
    }
    if (!can_spell(t->spelling, value)) return;
    if (t->spelling == GRAM_AS_PLAIN) {
        draw_plain(w, t, json_string_value(value), json_string_length(value));
        return;
    }
    char *text = gram_schema_dump(w, value);
    if (text) gram_json_text(w->b, t->from, t->to, text, strlen(text));
    free(text);
}

static void draw_enum(gram_walk *w, const gram_task *t, const json_t *values) {
    if (!json_is_array(values) || json_array_size(values) == 0) {
        gram_schema_invalid(w, t, "an enum that is not a list of values");
        return;
    }
    if (json_array_size(values) > HD_GRAMMAR_MAX_CHOICES) {
        gram_fail(w->b, HD_EINVAL,
                  "schema_too_complex: an enum of %zu values, more than %d at #%s",
                  json_array_size(values), HD_GRAMMAR_MAX_CHOICES, t->path);
        return;
    }
    for (size_t i = 0; i < json_array_size(values) && gram_work(w->b, 1); i++) {
        draw_value(w, t, json_array_get(values, i));
    }
}

static void draw_any_of(gram_walk *w, const gram_task *t, const char *key, json_t *list) {
    if (!check_alone(w, t, key, false)) return;
    if (!json_is_array(list) || json_array_size(list) == 0) {
        gram_schema_invalid(w, t, "an anyOf or oneOf that is not a list of schemas");
        return;
    }
    for (size_t i = json_array_size(list); i-- > 0 && w->b->status == HD_OK;) {
        char name[32];
        snprintf(name, sizeof name, "%s/%zu", key, i);
        gram_push(w, t, name, json_array_get(list, i), t->spelling, t->from, t->to);
    }
}

/* Merges a simple object schema into the schema that represents allOf. */
static void merge_object(gram_walk *w, const gram_task *t, json_t *into, json_t *part) {
    static const char *const known[] = {"type", "properties", "required"};
    const char *key;
    json_t *value;
    for (int hops = 0; json_is_object(part) && json_object_get(part, "$ref"); hops++) {
        gram_task at = *t;
        at.schema = part;
        if (hops == HD_GRAMMAR_MAX_SCHEMA_DEPTH) {
            gram_fail(w->b, HD_EINVAL, "schema_cycle: a $ref leads back to itself at #%s",
                      t->path);
        }
        if (!check_alone(w, &at, "$ref", false)) return;
        part = resolve(w, t, json_object_get(part, "$ref"));
        if (w->b->status != HD_OK) return;
    }
    json_object_foreach(part, key, value) {
        bool other = listed(key, assertions, HD_LEN(assertions)) ||
                     listed(key, refused, HD_LEN(refused));
        if (strcmp(key, "allOf") == 0 && part == t->schema) continue;
        if (other && !listed(key, known, HD_LEN(known))) {
            gram_schema_refuse(w, t, "an allOf of other than objects with properties");
            return;
        }
    }
    const char *type = json_string_value(json_object_get(part, "type"));
    json_t *properties = json_object_get(part, "properties");
    json_t *required = json_object_get(part, "required");
    if (!json_is_object(part) || (json_object_get(part, "type") && !type) ||
        (type && strcmp(type, "object") != 0) || (properties && !json_is_object(properties)) ||
        (required && !json_is_array(required))) {
        gram_schema_refuse(w, t, "an allOf of other than objects with properties");
        return;
    }
    json_t *all = json_object_get(into, "properties");
    json_object_foreach(properties, key, value) {
        json_t *other = json_object_get(all, key);
        if (!gram_work(w->b, 1)) return;
        if (other && !json_equal(other, value)) {
            gram_schema_refuse(w, t, "an allOf that describes a property twice");
            return;
        }
        if (!other) json_object_set(all, key, value);
    }
    /* names from a $ref are copied at each use, so they cost more steps */
    if (!gram_work(w->b, 8 * (int64_t)json_array_size(required))) return;
    if (required) json_array_extend(json_object_get(into, "required"), required);
}

static void draw_all_of(gram_walk *w, const gram_task *t, json_t *list) {
    if (!json_is_array(list) || json_array_size(list) == 0) {
        gram_schema_invalid(w, t, "an allOf that is not a list of schemas");
        return;
    }
    bool alone = true;
    const char *key;
    json_t *value;
    json_object_foreach(t->schema, key, value) {
        alone &= strcmp(key, "allOf") == 0 || !listed(key, assertions, HD_LEN(assertions));
    }
    if (alone && json_array_size(list) == 1) {
        gram_push(w, t, "allOf/0", json_array_get(list, 0), t->spelling, t->from, t->to);
        return;
    }
    json_t *merged = json_pack("{s:s, s:{}, s:[]}", "type", "object", "properties", "required");
    if (!merged || json_array_append_new(w->owned, merged)) {
        gram_fail(w->b, HD_ENOMEM, "no memory for an allOf");
        return;
    }
    merge_object(w, t, merged, t->schema);
    for (size_t i = 0; i < json_array_size(list) && w->b->status == HD_OK; i++) {
        merge_object(w, t, merged, json_array_get(list, i));
    }
    if (w->b->status == HD_OK) {
        gram_push(w, t, "allOf", merged, t->spelling, t->from, t->to);
    }
}

static void draw_schema(gram_walk *w, const gram_task *t) {
    json_t *s = t->schema, *found;
    if (json_is_true(s)) {
        gram_schema_any(w, t);
        return;
    }
    if (json_is_false(s)) return;
    if (!json_is_object(s)) {
        gram_schema_invalid(w, t, "a schema that is neither an object nor true or false");
        return;
    }
    if (!check_keywords(w, t) || !gram_schema_check_type(w, t)) return;
    const bool other = t->spelling == GRAM_AS_JSON || t->spelling == GRAM_AS_OTHER;
    if (other && json_is_true(json_object_get(s, "nullable"))) {
        gram_bytes_of(w->b, t->from, t->to, "null", 4);
    }
    if ((found = json_object_get(s, "$ref"))) {
        draw_ref(w, t, found);
    } else if ((found = json_object_get(s, "const"))) {
        if (check_alone(w, t, "const", true)) draw_value(w, t, found);
    } else if ((found = json_object_get(s, "enum"))) {
        if (check_alone(w, t, "enum", true)) draw_enum(w, t, found);
    } else if ((found = json_object_get(s, "anyOf"))) {
        draw_any_of(w, t, "anyOf", found);
    } else if ((found = json_object_get(s, "oneOf"))) {
        draw_any_of(w, t, "oneOf", found);
    } else if ((found = json_object_get(s, "allOf"))) {
        draw_all_of(w, t, found);
    } else {
        gram_schema_types(w, t);
    }
}

void gram_schema_of(gram_builder *b, int32_t rule, json_t *schema, gram_spelling spelling) {
    gram_walk w = {.b = b, .root = schema, .owned = json_array()};
    if (!w.owned) gram_fail(b, HD_ENOMEM, "no memory for a schema");
    const gram_task none = {.path = ""};
    if (b->status == HD_OK) {
        gram_push(&w, &none, "", schema, spelling, b->rules[rule].start, b->rules[rule].end);
    }
    while (w.n_tasks > 0 && gram_work(b, 1)) {
        const gram_task t = w.tasks[--w.n_tasks];
        draw_schema(&w, &t);
    }
    b->bytes -= w.cap_tasks * sizeof *w.tasks + w.cap_refs * sizeof *w.refs +
                w.cap_sized * sizeof *w.sized;
    free(w.tasks);
    free(w.refs);
    free(w.sized);
    json_decref(w.owned);
}

hd_status gram_schema(gram_builder *b, int32_t rule, const char *text, size_t n) {
    json_t *schema;
    hd_err err = {0};
    if (n > HD_GRAMMAR_MAX_SCHEMA_BYTES) {
        return gram_fail(b, HD_EINVAL,
                         "schema_too_complex: a schema of %zu bytes, more than %d", n,
                         HD_GRAMMAR_MAX_SCHEMA_BYTES);
    }
    if (hd_json_parse(&schema, text, n, "the schema", &err) != HD_OK) {
        return gram_fail(b, HD_EINVAL, "invalid_schema: %s", err.msg);
    }
    gram_schema_of(b, rule, schema, GRAM_AS_JSON);
    json_decref(schema);
    return b->status;
}
