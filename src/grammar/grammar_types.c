/* grammar_types.c - schemas of strings, numbers, arrays and objects. */
#include "grammar/grammar_schema_internal.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "tokenizer/unicode.h"

static const char *const names[] = {"null",   "boolean", "integer", "number",
                                    "string", "array",   "object"};

static bool known_type(const json_t *type) {
    const char *name = json_string_value(type);
    for (size_t i = 0; name && i < HD_LEN(names); i++) {
        if (strcmp(name, names[i]) == 0) return true;
    }
    return false;
}

bool gram_schema_check_type(gram_walk *w, const gram_task *t) {
    const json_t *type = json_object_get(t->schema, "type");
    bool fine = !type || known_type(type) || (json_is_array(type) && json_array_size(type) > 0);
    for (size_t i = 0; fine && i < json_array_size(type); i++) {
        fine = known_type(json_array_get(type, i));
    }
    if (!fine) gram_schema_invalid(w, t, "a type that is none");
    return fine;
}

/* Reads a count of the schema. Returns false after a failure; leaves *out unchanged if it is
 * absent. */
static bool read_count(gram_walk *w, const gram_task *t, const char *key, uint32_t *out) {
    const json_t *value = json_object_get(t->schema, key);
    char what[80];
    if (!value) return true;
    double count = json_number_value(value);
    if (!json_is_number(value) || !(count >= 0) ||
        (json_is_real(value) && count < 1e9 && count != (double)(int64_t)count)) {
        snprintf(what, sizeof what, "a %.20s that is not a count", key);
        gram_schema_invalid(w, t, what);
        return false;
    }
    if (count > HD_GRAMMAR_MAX_REPEAT) {
        gram_fail(w->b, HD_EINVAL, "schema_too_complex", "a %s above %d at #%s", key,
                  HD_GRAMMAR_MAX_REPEAT, t->path);
        return false;
    }
    *out = (uint32_t)count;
    return true;
}

static bool read_counts(gram_walk *w, const gram_task *t, const char *min_key,
                        const char *max_key, uint32_t *min, uint32_t *max) {
    *min = 0;
    *max = GRAM_NO_MAX;
    if (!read_count(w, t, min_key, min) || !read_count(w, t, max_key, max)) return false;
    if (*max >= *min) return true;
    char what[80];
    snprintf(what, sizeof what, "a %.20s below %.20s", max_key, min_key);
    gram_schema_invalid(w, t, what);
    return false;
}

/* Returns the pattern of a string, from its pattern or format; NULL: none. */
static const char *find_pattern(gram_walk *w, const gram_task *t) {
    const json_t *pattern = json_object_get(t->schema, "pattern");
    const json_t *format = json_object_get(t->schema, "format");
    char what[100];
    if (pattern && format) {
        gram_schema_refuse(w, t, "a pattern beside a format");
    } else if (pattern && !json_is_string(pattern)) {
        gram_schema_invalid(w, t, "a pattern that is not a string");
    } else if (pattern) {
        return json_string_value(pattern);
    } else if (format && !json_is_string(format)) {
        gram_schema_invalid(w, t, "a format that is not a string");
    } else if (format) {
        const char *known = gram_format_pattern(json_string_value(format));
        snprintf(what, sizeof what, "the format %.40s", json_string_value(format));
        if (!known && !w->b->loose) gram_schema_refuse(w, t, what);
        return known;
    }
    return NULL;
}

/* Draws the quotes around a string, or nothing around a raw one. */
static void draw_quotes(gram_builder *b, bool plain, uint32_t from, uint32_t inside,
                        uint32_t end, uint32_t to) {
    if (plain) {
        gram_empty(b, from, inside);
        gram_empty(b, end, to);
    } else {
        gram_range(b, from, inside, '"', '"');
        gram_range(b, end, to, '"', '"');
    }
}

static int32_t sized_rule(gram_walk *w, uint32_t min, uint32_t max, bool plain) {
    gram_builder *b = w->b;
    for (uint32_t i = 0; i < w->n_sized && gram_work(b, 1); i++) {
        const gram_sized *s = &w->sized[i];
        if (s->min == min && s->max == max && s->plain == plain) return s->rule;
    }
    int32_t rule = gram_rule_new(b);
    if (!gram_grow(b, &w->sized, &w->cap_sized, (size_t)w->n_sized + 1, sizeof *w->sized)) {
        return 0;
    }
    w->sized[w->n_sized++] = (gram_sized){min, max, plain, rule};
    uint32_t inside = gram_node(b), end = gram_node(b);
    draw_quotes(b, plain, b->rules[rule].start, inside, end, b->rules[rule].end);
    gram_json kind = plain ? GRAM_JSON_PLAIN_CHARACTER : GRAM_JSON_CHARACTER;
    gram_call(b, inside, end, gram_json_rule(b, kind), min, max);
    return rule;
}

static void draw_string(gram_walk *w, const gram_task *t) {
    gram_builder *b = w->b;
    uint32_t min, max;
    if (!read_counts(w, t, "minLength", "maxLength", &min, &max)) return;
    const char *pattern = find_pattern(w, t);
    if (b->status != HD_OK) return;
    const bool plain = t->spelling == GRAM_AS_PLAIN;
    if (!pattern) {
        bool any = min == 0 && max == GRAM_NO_MAX;
        int32_t rule = any ? gram_json_rule(b, plain ? GRAM_JSON_PLAIN : GRAM_JSON_STRING)
                           : sized_rule(w, min, max, plain);
        gram_call(b, t->from, t->to, rule, 1, 1);
        return;
    }
    uint32_t inside = gram_node(b), end = gram_node(b);
    draw_quotes(b, plain, t->from, inside, end, t->to);
    gram_length length = {0};
    gram_pattern(b, inside, end, pattern, strlen(pattern),
                 (gram_pattern_options){.json = !plain, .search = true}, &length);
    if (b->status == HD_OK && (length.min < min || length.max > max)) {
        gram_schema_refuse(w, t, "a minLength or maxLength that the pattern does not imply");
    }
}

static bool read_bound(gram_walk *w, const gram_task *t, const json_t *value, gram_bound *out) {
    char text[48];
    if (!json_is_number(value)) {
        gram_schema_invalid(w, t, "a bound that is not a number");
        return false;
    }
    char *dumped = gram_schema_dump(w, value);
    if (!dumped) return false;
    snprintf(text, sizeof text, "%s", dumped);
    free(dumped);
    if (gram_bound_read(out, text)) return true;
    gram_schema_refuse(w, t, "a bound with an exponent or too many digits");
    return false;
}

/* Reads minimum and exclusiveMinimum, or the two of the maximum, and returns the stricter
 * one. sign: -1 for the minimum, 1 for the maximum. */
static bool read_bounds(gram_walk *w, const gram_task *t, const char *key,
                        const char *exclusive_key, int sign, gram_bound *out) {
    const json_t *plain = json_object_get(t->schema, key);
    const json_t *exclusive = json_object_get(t->schema, exclusive_key);
    *out = (gram_bound){0};
    bool flag = json_is_true(exclusive); /* boolean in older drafts */
    if (json_is_boolean(exclusive)) exclusive = NULL;
    if (!plain && !exclusive) return true;
    if (plain && exclusive && json_is_number(plain) && json_is_number(exclusive)) {
        double distance = json_number_value(plain) - json_number_value(exclusive);
        if (sign * distance < 0) {
            exclusive = NULL;
        } else {
            plain = NULL;
        }
    }
    if (!read_bound(w, t, exclusive ? exclusive : plain, out)) return false;
    out->exclusive = exclusive || flag;
    return true;
}

static void draw_number(gram_walk *w, const gram_task *t, bool integer) {
    gram_bound lo, hi;
    if (!read_bounds(w, t, "minimum", "exclusiveMinimum", -1, &lo) ||
        !read_bounds(w, t, "maximum", "exclusiveMaximum", 1, &hi)) {
        return;
    }
    if (lo.given || hi.given) {
        gram_number_between(w->b, t->from, t->to, &lo, &hi, integer);
    } else {
        gram_json_call(w->b, t->from, t->to, integer ? GRAM_JSON_INTEGER : GRAM_JSON_NUMBER);
    }
}

/* A rule for one item, so that it is drawn only once. */
static int32_t item_rule(gram_walk *w, const gram_task *t, json_t *items) {
    if (!items || json_is_true(items)) return gram_json_rule(w->b, GRAM_JSON_VALUE);
    int32_t rule = gram_rule_new(w->b);
    if (w->b->status != HD_OK) return 0;
    const gram_rule *r = &w->b->rules[rule];
    gram_push(w, t, "items", items, GRAM_AS_JSON, r->start, r->end);
    return rule;
}

/* What follows an item: white space, a comma, white space. */
static uint32_t draw_comma(gram_builder *b, uint32_t from) {
    uint32_t spaced = gram_node(b), comma = gram_node(b), next = gram_node(b);
    gram_space(b, from, spaced);
    gram_range(b, spaced, comma, ',', ',');
    gram_space_after(b, comma, next);
    return next;
}

/* Items after those of the prefix: `, item` between min and max times. */
static void draw_rest(gram_walk *w, uint32_t from, uint32_t to, int32_t item, uint32_t min,
                      uint32_t max) {
    gram_builder *b = w->b;
    int32_t rule = gram_rule_new(b);
    if (b->status != HD_OK) return;
    const gram_rule r = b->rules[rule];
    gram_call(b, draw_comma(b, r.start), r.end, item, 1, 1);
    if (max == GRAM_NO_MAX && min <= 1) { /* one item and any more, or none */
        uint32_t loop = gram_node(b);
        if (min == 0) gram_empty(b, from, to);
        gram_call(b, from, loop, rule, 1, 1);
        gram_call(b, loop, loop, rule, 1, 1);
        gram_empty(b, loop, to);
        return;
    }
    gram_call(b, from, to, rule, min, max);
}

static uint32_t less(uint32_t a, uint32_t b) {
    return a == GRAM_NO_MAX ? a : a > b ? a - b : 0;
}

static void draw_array(gram_walk *w, const gram_task *t) {
    gram_builder *b = w->b;
    json_t *items = json_object_get(t->schema, "items");
    json_t *prefix = json_object_get(t->schema, "prefixItems");
    uint32_t min, max;
    if (json_is_array(items)) { /* in older drafts */
        prefix = items;
        items = json_object_get(t->schema, "additionalItems");
    }
    if (prefix && !json_is_array(prefix)) {
        gram_schema_invalid(w, t, "a prefixItems that is not a list of schemas");
    }
    if (!read_counts(w, t, "minItems", "maxItems", &min, &max) || b->status != HD_OK) return;
    uint32_t n_prefix = (uint32_t)json_array_size(prefix);
    uint32_t open = gram_node(b), here = gram_node(b), done = gram_node(b), end = gram_node(b);
    gram_range(b, t->from, open, '[', '[');
    gram_space(b, open, here);
    gram_space(b, done, end);
    gram_range(b, end, t->to, ']', ']');
    if (min == 0) gram_empty(b, here, end);
    for (uint32_t i = 0; i < n_prefix && i < max && b->status == HD_OK; i++) {
        uint32_t next = gram_node(b);
        char key[40];
        snprintf(key, sizeof key, "prefixItems/%" PRIu32, i);
        if (i > 0) here = draw_comma(b, here);
        gram_push(w, t, key, json_array_get(prefix, i), GRAM_AS_JSON, here, next);
        here = next;
        if (i + 1 >= min) gram_empty(b, here, done);
    }
    if (json_is_false(items) || max <= n_prefix) return;
    int32_t item = item_rule(w, t, items);
    if (n_prefix == 0) {
        uint32_t first = gram_node(b);
        gram_call(b, here, first, item, 1, 1);
        draw_rest(w, first, done, item, less(min, 1), less(max, 1));
    } else {
        draw_rest(w, here, done, item, less(min, n_prefix), less(max, n_prefix));
    }
}

static bool is_required(gram_walk *w, const json_t *required, const char *key) {
    for (size_t i = 0; i < json_array_size(required); i++) {
        const char *name = json_string_value(json_array_get(required, i));
        if (!gram_work(w->b, 1)) return false;
        if (name && strcmp(name, key) == 0) return true;
    }
    return false;
}

/* Position in a list of members: nothing written yet, or something. */
typedef struct place {
    uint32_t first, some;
} place;

static void draw_member(gram_walk *w, const gram_task *t, void *at, const char *key,
                        json_t *schema, bool required) {
    gram_builder *b = w->b;
    place *m = at;
    json_t *name = json_string(key);
    char *text = name ? gram_schema_dump(w, name) : NULL;
    json_decref(name);
    if (!text) {
        gram_fail(b, HD_ENOMEM, NULL, "no memory for a property");
        return;
    }
    place next = {gram_node(b), gram_node(b)};
    uint32_t start = draw_comma(b, m->some), end = gram_node(b), spaced = gram_node(b),
             colon = gram_node(b), value = gram_node(b);
    gram_empty(b, m->first, start);
    gram_json_text(b, start, end, text, strlen(text));
    free(text);
    gram_space(b, end, spaced);
    gram_range(b, spaced, colon, ':', ':');
    gram_space_after(b, colon, value);
    char path[80];
    snprintf(path, sizeof path, "properties/%.60s", key);
    gram_push(w, t, path, schema, GRAM_AS_JSON, value, next.some);
    if (!required) {
        gram_empty(b, m->first, next.first);
        gram_empty(b, m->some, next.some);
    }
    *m = next;
}

/* Draws keys other than the declared ones, without \u escapes, so that no key can be spelled
 * in two ways. */
static int32_t other_keys(gram_walk *w, const json_t *properties, const json_t *required) {
    gram_builder *b = w->b;
    if (json_object_size(properties) == 0 && json_array_size(required) == 0) {
        return gram_json_rule(b, GRAM_JSON_STRING);
    }
    int32_t rule = gram_rule_new(b);
    if (b->status != HD_OK) return 0;
    gram_class_range plain[] = {
        {'\b', '\n'                },
        {'\f', '\r'                },
        {' ',  TEXT_UNICODE_END - 1}
    };
    gram_class all = {.ranges = plain, .n = HD_LEN(plain)};
    uint32_t inside = gram_node(b);
    gram_range(b, b->rules[rule].start, inside, '"', '"');
    gram_class_draw(b, inside, inside, &all, true);
    gram_range(b, inside, b->rules[rule].end, '"', '"');
    void *at = json_object_iter((json_t *)(uintptr_t)properties);
    size_t n = json_object_size(properties) + json_array_size(required);
    for (size_t i = 0; i < n && b->status == HD_OK; i++) {
        const char *key =
            at ? json_object_iter_key(at)
               : json_string_value(json_array_get(required, i - json_object_size(properties)));
        json_t *name = json_string(key);
        char *text = name ? gram_schema_dump(w, name) : NULL;
        if (text) gram_deny_word(b, rule, text, strlen(text));
        free(text);
        json_decref(name);
        if (at) at = json_object_iter_next((json_t *)(uintptr_t)properties, at);
    }
    return rule;
}

static void draw_others(gram_walk *w, const gram_task *t, const place *m, json_t *schema,
                        int32_t keys) {
    gram_builder *b = w->b;
    uint32_t start = draw_comma(b, m->some), key = gram_node(b), spaced = gram_node(b),
             colon = gram_node(b), value = gram_node(b);
    gram_empty(b, m->first, start);
    gram_call(b, start, key, keys, 1, 1);
    gram_space(b, key, spaced);
    gram_range(b, spaced, colon, ':', ':');
    gram_space_after(b, colon, value);
    gram_push(w, t, "additionalProperties", schema, GRAM_AS_JSON, value, m->some);
}

bool gram_schema_members(gram_walk *w, const gram_task *t, gram_members *m) {
    json_t *others = json_object_get(t->schema, "additionalProperties");
    m->properties = json_object_get(t->schema, "properties");
    m->required = json_object_get(t->schema, "required");
    if (m->properties && !json_is_object(m->properties)) {
        gram_schema_invalid(w, t, "properties that are not an object");
        return false;
    }
    bool fine = !m->required || json_is_array(m->required);
    for (size_t i = 0; fine && i < json_array_size(m->required); i++) {
        fine = json_is_string(json_array_get(m->required, i));
    }
    if (!fine) gram_schema_invalid(w, t, "a required that is not a list of names");
    if (!others && json_object_size(m->properties) == 0) others = json_true();
    m->others = json_is_false(others) ? NULL : others;
    return fine;
}

/* Whether required[i] occurs for the first time. */
static bool is_new(gram_walk *w, const json_t *required, size_t i) {
    for (size_t k = 0; k < i && gram_work(w->b, 1); k++) {
        if (json_equal(json_array_get(required, k), json_array_get(required, i))) return false;
    }
    return w->b->status == HD_OK;
}

void gram_schema_each(gram_walk *w, const gram_task *t, const gram_members *m,
                      gram_member_fn *draw, void *at) {
    const char *key;
    json_t *value;
    json_object_foreach(m->properties, key, value) {
        draw(w, t, at, key, value, is_required(w, m->required, key));
        if (w->b->status != HD_OK) return;
    }
    for (size_t i = 0; i < json_array_size(m->required) && gram_work(w->b, 1); i++) {
        const char *name = json_string_value(json_array_get(m->required, i));
        if (json_object_get(m->properties, name) || !is_new(w, m->required, i)) continue;
        draw(w, t, at, name, m->others ? m->others : json_false(), true);
    }
}

static void draw_object(gram_walk *w, const gram_task *t) {
    gram_builder *b = w->b;
    gram_members all;
    if (!gram_schema_members(w, t, &all)) return;
    uint32_t brace = gram_node(b), close = gram_node(b);
    place m = {gram_node(b), gram_node(b)};
    gram_range(b, t->from, brace, '{', '{');
    gram_space(b, brace, m.first);
    gram_schema_each(w, t, &all, draw_member, &m);
    if (b->status != HD_OK) return;
    if (all.others) {
        draw_others(w, t, &m, all.others, other_keys(w, all.properties, all.required));
    }
    gram_empty(b, m.first, close);
    gram_space(b, m.some, close);
    gram_range(b, close, t->to, '}', '}');
}

static bool has_any(const json_t *schema, const char *const *keys, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (json_object_get(schema, keys[i])) return true;
    }
    return false;
}

/* Guesses the type of a schema without one; NULL: any type. */
static const char *guess_type(const json_t *s) {
    static const char *const object[] = {"properties", "required", "additionalProperties"};
    static const char *const array[] = {"items", "prefixItems", "minItems", "maxItems"};
    static const char *const string[] = {"pattern", "format", "minLength", "maxLength"};
    static const char *const number[] = {"minimum", "maximum", "exclusiveMinimum",
                                         "exclusiveMaximum"};
    if (has_any(s, object, HD_LEN(object))) return "object";
    if (has_any(s, array, HD_LEN(array))) return "array";
    if (has_any(s, string, HD_LEN(string))) return "string";
    return has_any(s, number, HD_LEN(number)) ? "number" : NULL;
}

static bool can_spell(gram_spelling spelling, const char *type) {
    if (spelling == GRAM_AS_JSON) return true;
    if (spelling == GRAM_AS_PLAIN) return strcmp(type, "string") == 0;
    if (spelling == GRAM_AS_OTHER) return strcmp(type, "string") != 0;
    return strcmp(type, "object") == 0;
}

static void draw_type(gram_walk *w, const gram_task *t, const char *type) {
    gram_builder *b = w->b;
    if (!can_spell(t->spelling, type)) return;
    if (strcmp(type, "null") == 0) {
        gram_bytes_of(b, t->from, t->to, "null", 4);
    } else if (strcmp(type, "boolean") == 0) {
        gram_bytes_of(b, t->from, t->to, "true", 4);
        gram_bytes_of(b, t->from, t->to, "false", 5);
    } else if (strcmp(type, "string") == 0) {
        draw_string(w, t);
    } else if (strcmp(type, "array") == 0) {
        draw_array(w, t);
    } else if (strcmp(type, "object") != 0) {
        draw_number(w, t, strcmp(type, "integer") == 0);
    } else if (t->spelling == GRAM_AS_PARAMETERS) {
        gram_schema_parameters(w, t);
    } else {
        draw_object(w, t);
    }
}

void gram_schema_any(gram_walk *w, const gram_task *t) {
    static const gram_json kinds[] = {[GRAM_AS_JSON] = GRAM_JSON_VALUE,
                                      [GRAM_AS_OBJECT] = GRAM_JSON_OBJECT,
                                      [GRAM_AS_PLAIN] = GRAM_JSON_PLAIN,
                                      [GRAM_AS_OTHER] = GRAM_JSON_OTHER};
    if (t->spelling == GRAM_AS_PARAMETERS) {
        gram_any_parameters(w->b, t->from, t->to);
    } else {
        gram_json_call(w->b, t->from, t->to, kinds[t->spelling]);
    }
}

void gram_schema_types(gram_walk *w, const gram_task *t) {
    const json_t *type = json_object_get(t->schema, "type");
    const char *name = type ? json_string_value(type) : guess_type(t->schema);
    for (size_t i = 0; i < json_array_size(type) && w->b->status == HD_OK; i++) {
        draw_type(w, t, json_string_value(json_array_get(type, i)));
    }
    if (json_is_array(type)) return;
    if (name) {
        draw_type(w, t, name);
    } else {
        gram_schema_any(w, t);
    }
}
