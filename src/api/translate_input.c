/* translate_input.c - converts the input items of /v1/responses (messages, reasoning,
 * function calls and their outputs) to chat messages. */
#include <string.h>

#include "api/translate_internal.h"

static const char *const texts[] = {"input_text", "output_text", "text", "reasoning_text",
                                    NULL};

/* Returns the assistant message that collects reasoning, text and calls of one reply. */
static json_t *answer_message(translation *t, const char *unless) {
    if (t->answer && (!unless || !json_object_get(t->answer, unless))) return t->answer;
    json_t *made = json_pack("{s:s}", "role", "assistant");
    if (!translate_append(t, made)) return NULL;
    t->answer = made;
    return made;
}

static bool take_text(translation *t, json_t *content, json_t **out) {
    if (json_is_array(content) && json_array_size(content) == 0) {
        return translate_refuse(t, "content must be a string or parts");
    }
    return translate_text(t, content, texts, out);
}

static bool add_message(translation *t, const json_t *item) {
    const char *role = translate_word(item, "role");
    json_t *content = NULL;
    if (!take_text(t, json_object_get(item, "content"), &content)) return false;
    if (strcmp(role, "assistant") != 0) {
        return translate_append(t, json_pack("{s:s, s:o}", "role", role, "content", content));
    }
    json_t *message = answer_message(t, "content");
    if (message && json_object_get(message, "tool_calls")) {
        t->answer = NULL;
        message = answer_message(t, NULL);
    }
    return (message && json_object_set_new(message, "content", content) == 0) ||
           translate_no_memory(t);
}

static bool add_reasoning(translation *t, const json_t *item) {
    json_t *part, *content = json_object_get(item, "content");
    size_t i, n = 0;
    json_array_foreach(content, i, part) {
        json_t *text = json_object_get(part, "text");
        t->answer = n == 0 ? NULL : t->answer;
        json_t *message = json_is_string(text) ? answer_message(t, "reasoning_content") : NULL;
        if (!message) return translate_refuse(t, "reasoning must hold one text");
        if (json_object_set(message, "reasoning_content", text) != 0)
            return translate_no_memory(t);
        n++;
    }
    return n <= 1 || translate_refuse(t, "reasoning must hold one text");
}

static bool add_call(translation *t, const json_t *item) {
    json_t *id = json_object_get(item, "call_id"), *name = json_object_get(item, "name");
    json_t *arguments = json_object_get(item, "arguments");
    if (!json_is_string(id) || !json_is_string(name) || !json_is_string(arguments)) {
        return translate_refuse(t, "a function_call must have call_id, name and arguments");
    }
    return translate_call(t, answer_message(t, NULL), id, name, arguments);
}

static bool add_output(translation *t, const json_t *item) {
    json_t *id = json_object_get(item, "call_id"), *content = NULL;
    if (!json_is_string(id)) {
        return translate_refuse(t, "a function_call_output must have a call_id");
    }
    return take_text(t, json_object_get(item, "output"), &content) &&
           translate_result(t, id, content);
}

static bool add_item(translation *t, const json_t *item) {
    const char *type = translate_word(item, "type");
    if (strcmp(type, "message") == 0 || (!*type && *translate_word(item, "role"))) {
        return add_message(t, item);
    }
    if (strcmp(type, "reasoning") == 0) return add_reasoning(t, item);
    if (strcmp(type, "function_call") == 0) return add_call(t, item);
    if (strcmp(type, "function_call_output") == 0) return add_output(t, item);
    return translate_refuse(t, "the item's type is not known");
}

static bool find_parameters(const translation *t, const json_t *tool, size_t i,
                            json_t **schema) {
    *schema = json_object_get(tool, "parameters");
    if (json_is_null(*schema)) *schema = NULL;
    return strcmp(translate_word(tool, "type"), "function") == 0 ||
           api_refuse(t->r, "unsupported_parameter", "tools",
                      "tools[%zu] is no function; there are no tools of the server", i);
}

static bool translate_choice(api_request *r) {
    json_t *name = json_object_get(r->tool_choice, "name");
    const bool list = strcmp(translate_word(r->tool_choice, "type"), "allowed_tools") == 0;
    if (!json_is_object(r->tool_choice) || list) return true;
    r->tool_choice = api_keep_json(
        r, json_pack("{s:s, s:{s:O*}}", "type", "function", "function", "name", name));
    return r->tool_choice != NULL;
}

bool api_translate_items(api_request *r, json_t *items) {
    translation t = {.r = r, .param = "input", .out = api_keep_json(r, json_array())};
    const json_t *item;
    if (!t.out) return false;
    if (r->instructions) {
        json_t *system = json_pack("{s:s, s:s}", "role", "system", "content", r->instructions);
        if (!translate_append(&t, system)) return false;
    }
    json_array_foreach(items, t.index, item) {
        if (!add_item(&t, item)) return false;
    }
    r->messages = t.out;
    return translate_tools(&t, find_parameters) && translate_choice(r);
}
