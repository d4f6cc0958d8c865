/* translate_input.c - the input items of /v1/responses: messages, reasoning, function calls
 * and their outputs become a conversation. */
#include <string.h>

#include "api/translate.h"

typedef struct translation {
    api_request *r;
    json_t *out;    /* the messages */
    json_t *answer; /* the assistant's message that further items join; borrowed, or NULL */
    size_t index;
} translation;

static bool no_memory(api_request *r) {
    return api_refuse_status(r, 503, "out_of_memory", NULL, "no memory for the input");
}

static const char *word(const json_t *object, const char *key) {
    const char *s = json_string_value(json_object_get(object, key));
    return s ? s : "";
}

static bool refuse(translation *t, const char *what) {
    return api_refuse(t->r, "invalid_value", "input", "input[%zu]: %s", t->index, what);
}

static bool append(translation *t, json_t *message) {
    t->answer = NULL;
    return json_array_append_new(t->out, message) == 0 || no_memory(t->r);
}

/* Parts named input_text, output_text, refusal and so on; all that is text. *out is new. */
static bool translate_parts(translation *t, json_t *content, json_t **out) {
    json_t *item, *parts;
    size_t i;
    *out = NULL;
    if (json_is_string(content)) {
        *out = json_incref(content);
        return true;
    }
    if (!json_is_array(content) || json_array_size(content) == 0) {
        return refuse(t, "content must be a string or parts");
    }
    parts = json_array();
    json_array_foreach(content, i, item) {
        const char *type = word(item, "type");
        json_t *text = json_object_get(item, "text");
        const bool known = strcmp(type, "input_text") == 0 ||
                           strcmp(type, "output_text") == 0 || strcmp(type, "text") == 0 ||
                           strcmp(type, "reasoning_text") == 0;
        if (known && json_is_string(text) &&
            json_array_append_new(parts,
                                  json_pack("{s:s, s:O}", "type", "text", "text", text)) == 0) {
            continue;
        }
        json_decref(parts);
        return api_refuse(t->r, "unsupported_content_type", "input",
                          "input[%zu] holds a part that is no text; models read text",
                          t->index);
    }
    *out = parts;
    return parts || no_memory(t->r);
}

/* The message that reasoning, text and calls of one answer are gathered in. */
static json_t *answer_message(translation *t, const char *unless) {
    if (t->answer && (!unless || !json_object_get(t->answer, unless))) return t->answer;
    json_t *made = json_pack("{s:s}", "role", "assistant");
    if (!append(t, made)) return NULL;
    t->answer = made;
    return made;
}

static bool add_message(translation *t, const json_t *item) {
    const char *role = word(item, "role");
    json_t *content;
    if (!translate_parts(t, json_object_get(item, "content"), &content)) return false;
    if (strcmp(role, "assistant") != 0) {
        return append(t, json_pack("{s:s, s:o}", "role", role, "content", content));
    }
    json_t *message = answer_message(t, "content");
    if (message && json_object_get(message, "tool_calls")) {
        t->answer = NULL;
        message = answer_message(t, NULL);
    }
    return (message && json_object_set_new(message, "content", content) == 0) ||
           no_memory(t->r);
}

static bool add_reasoning(translation *t, const json_t *item) {
    json_t *part, *content = json_object_get(item, "content");
    size_t i, n = 0;
    json_array_foreach(content, i, part) {
        json_t *text = json_object_get(part, "text");
        t->answer = n == 0 ? NULL : t->answer;
        json_t *message = json_is_string(text) ? answer_message(t, "reasoning_content") : NULL;
        if (!message) return refuse(t, "reasoning must hold one text");
        if (json_object_set(message, "reasoning_content", text) != 0) return no_memory(t->r);
        n++;
    }
    return n <= 1 || refuse(t, "reasoning must hold one text");
}

static bool add_call(translation *t, const json_t *item) {
    json_t *id = json_object_get(item, "call_id"), *name = json_object_get(item, "name");
    json_t *arguments = json_object_get(item, "arguments");
    if (!json_is_string(id) || !json_is_string(name) || !json_is_string(arguments)) {
        return refuse(t, "a function_call must have call_id, name and arguments");
    }
    json_t *message = answer_message(t, NULL);
    json_t *calls = json_object_get(message, "tool_calls");
    if (message && !calls) {
        calls = json_array();
        if (json_object_set_new(message, "tool_calls", calls) != 0) calls = NULL;
    }
    json_t *call = json_pack("{s:O, s:s, s:{s:O, s:O}}", "id", id, "type", "function",
                             "function", "name", name, "arguments", arguments);
    return json_array_append_new(calls, call) == 0 || no_memory(t->r);
}

static bool add_output(translation *t, const json_t *item) {
    json_t *id = json_object_get(item, "call_id"), *content;
    if (!json_is_string(id)) return refuse(t, "a function_call_output must have a call_id");
    if (!translate_parts(t, json_object_get(item, "output"), &content)) return false;
    return append(t, json_pack("{s:s, s:O, s:o}", "role", "tool", "tool_call_id", id, "content",
                               content));
}

static bool add_item(translation *t, const json_t *item) {
    const char *type = word(item, "type");
    if (strcmp(type, "message") == 0 || (!*type && *word(item, "role"))) {
        return add_message(t, item);
    }
    if (strcmp(type, "reasoning") == 0) return add_reasoning(t, item);
    if (strcmp(type, "function_call") == 0) return add_call(t, item);
    if (strcmp(type, "function_call_output") == 0) return add_output(t, item);
    return refuse(t, "the item's type is not known");
}

static bool translate_tools(api_request *r) {
    json_t *tool, *given = r->tools;
    size_t i;
    if (!given) return true;
    r->tools = api_keep_json(r, json_array());
    if (!r->tools) return false;
    json_array_foreach(given, i, tool) {
        json_t *name = json_object_get(tool, "name"), *about, *parameters;
        about = json_object_get(tool, "description");
        parameters = json_object_get(tool, "parameters");
        if (strcmp(word(tool, "type"), "function") != 0) {
            return api_refuse(r, "unsupported_parameter", "tools",
                              "tools[%zu] is no function; there are no tools of the server", i);
        }
        if (json_is_null(parameters)) parameters = NULL;
        json_t *made = json_pack("{s:s, s:{s:O*, s:O*, s:O*}}", "type", "function", "function",
                                 "name", name, "description", about, "parameters", parameters);
        if (json_array_append_new(r->tools, made) != 0) return no_memory(r);
    }
    return true;
}

static bool translate_choice(api_request *r) {
    json_t *name = json_object_get(r->tool_choice, "name");
    if (!json_is_object(r->tool_choice)) return true;
    r->tool_choice = api_keep_json(
        r, json_pack("{s:s, s:{s:O*}}", "type", "function", "function", "name", name));
    return r->tool_choice != NULL;
}

bool api_translate_items(api_request *r, json_t *items) {
    translation t = {.r = r, .out = api_keep_json(r, json_array())};
    const json_t *item;
    if (!t.out) return false;
    if (r->instructions) {
        json_t *system = json_pack("{s:s, s:s}", "role", "system", "content", r->instructions);
        if (!append(&t, system)) return false;
    }
    json_array_foreach(items, t.index, item) {
        if (!add_item(&t, item)) return false;
    }
    r->messages = t.out;
    return translate_tools(r) && translate_choice(r);
}
