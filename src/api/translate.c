/* translate.c - see translate_internal.h. */
#include <string.h>

#include "api/translate_internal.h"

const char *translate_word(const json_t *object, const char *key) {
    const char *s = json_string_value(json_object_get(object, key));
    return s ? s : "";
}

bool translate_refuse(translation *t, const char *what) {
    return api_refuse(t->r, "invalid_value", t->param, "%s[%zu]: %s", t->param, t->index, what);
}

bool translate_no_memory(const translation *t) {
    return api_refuse_status(t->r, 503, "out_of_memory", NULL, "no memory for the %s",
                             t->param);
}

bool translate_append(translation *t, json_t *message) {
    t->answer = NULL;
    return json_array_append_new(t->out, message) == 0 || translate_no_memory(t);
}

static bool is_one_of(const char *word, const char *const *words) {
    while (*words && strcmp(word, *words) != 0) words++;
    return *words != NULL;
}

bool translate_text(translation *t, json_t *content, const char *const *types, json_t **out) {
    json_t *part;
    size_t i;
    *out = NULL;
    if (json_is_string(content)) {
        *out = json_incref(content);
        return true;
    }
    if (!json_is_array(content))
        return translate_refuse(t, "content must be a string or parts");
    json_t *parts = json_array();
    json_array_foreach(content, i, part) {
        json_t *text = json_object_get(part, "text");
        const bool known = is_one_of(translate_word(part, "type"), types);
        if (known && json_is_string(text) &&
            json_array_append_new(parts,
                                  json_pack("{s:s, s:O}", "type", "text", "text", text)) == 0) {
            continue;
        }
        json_decref(parts);
        if (known) return translate_refuse(t, "a part that is text must have a text");
        return api_refuse(t->r, "unsupported_content_type", t->param,
                          "%s[%zu] holds a part that is no text; models read text", t->param,
                          t->index);
    }
    *out = parts;
    return parts || translate_no_memory(t);
}

bool translate_call(translation *t, json_t *message, json_t *id, json_t *name,
                    json_t *arguments) {
    json_t *calls = json_object_get(message, "tool_calls");
    if (message && !calls) {
        calls = json_array();
        if (json_object_set_new(message, "tool_calls", calls) != 0) calls = NULL;
    }
    json_t *call = json_pack("{s:O, s:s, s:{s:O, s:O}}", "id", id, "type", "function",
                             "function", "name", name, "arguments", arguments);
    return json_array_append_new(calls, call) == 0 || translate_no_memory(t);
}

bool translate_result(translation *t, json_t *id, json_t *text) {
    return translate_append(
        t, json_pack("{s:s, s:O, s:o}", "role", "tool", "tool_call_id", id, "content", text));
}

/* ---- tools ---- */

/* Whether a member is null, empty or absent, and so may be ignored. */
static bool is_nothing(const json_t *v) {
    return !v || json_is_null(v) || json_is_false(v) ||
           (json_is_array(v) && json_array_size(v) == 0);
}

/* Refuses callers other than the model itself: they would be programs on the server. */
static bool is_direct(const json_t *callers) {
    const char *only = json_string_value(json_array_get(callers, 0));
    return is_nothing(callers) ||
           (json_array_size(callers) == 1 && only && strcmp(only, "direct") == 0);
}

static bool add_tool(const translation *t, json_t *tools, const json_t *tool, json_t *schema,
                     size_t i) {
    static const char *const refused[] = {"defer_loading", "input_examples", "output_schema"};
    for (size_t k = 0; k < HD_LEN(refused); k++) {
        if (is_nothing(json_object_get(tool, refused[k]))) continue;
        return api_refuse(t->r, "unsupported_parameter", "tools",
                          "tools[%zu].%s is not supported", i, refused[k]);
    }
    if (!is_direct(json_object_get(tool, "allowed_callers"))) {
        return api_refuse(t->r, "unsupported_parameter", "tools",
                          "tools[%zu].allowed_callers may be direct only", i);
    }
    json_t *about = json_object_get(tool, "description");
    json_t *strict = json_object_get(tool, "strict");
    json_t *made = json_pack("{s:s, s:{s:O*, s:O*, s:O*, s:O*}}", "type", "function",
                             "function", "name", json_object_get(tool, "name"), "description",
                             json_is_null(about) ? NULL : about, "parameters", schema, "strict",
                             json_is_true(strict) ? strict : NULL);
    return json_array_append_new(tools, made) == 0 || translate_no_memory(t);
}

bool translate_tools(translation *t, translate_find_schema *find) {
    json_t *tool, *schema, *given = t->r->tools;
    size_t i;
    if (!given) return true;
    json_t *tools = t->r->tools = api_keep_json(t->r, json_array());
    if (!tools) return false;
    json_array_foreach(given, i, tool) {
        if (!find(t, tool, i, &schema) || !add_tool(t, tools, tool, schema, i)) return false;
    }
    return true;
}
