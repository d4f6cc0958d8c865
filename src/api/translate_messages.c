/* translate_messages.c - converts Anthropic messages: blocks of text, thinking, tool_use and
 * tool_result. */
#include <string.h>

#include "api/translate_internal.h"

static const char *const texts[] = {"text", NULL};

/* Like translate_text(), but no blocks become an empty string. */
static bool take_text(translation *t, json_t *content, json_t **out) {
    if (!translate_text(t, content, texts, out)) return false;
    if (!json_is_array(*out) || json_array_size(*out) > 0) return true;
    json_decref(*out);
    *out = json_string("");
    return *out || translate_no_memory(t);
}

/* A block that must be text is appended to the parts. */
static bool add_text(translation *t, json_t *parts, json_t *block) {
    json_t *made, *one = json_pack("[O]", block);
    const bool ok = translate_text(t, one, texts, &made);
    const bool joined = ok && json_array_extend(parts, made) == 0;
    json_decref(one);
    if (ok) json_decref(made);
    return joined || (ok && translate_no_memory(t));
}

static bool add_result(translation *t, const json_t *block) {
    json_t *content = json_object_get(block, "content"), *id, *text;
    id = json_object_get(block, "tool_use_id");
    if (!json_is_string(id))
        return translate_refuse(t, "a tool_result must have a tool_use_id");
    if (!content) {
        text = json_string("");
    } else if (!take_text(t, content, &text)) {
        return false;
    }
    return translate_result(t, id, text);
}

/* Tool results come first, because they answer the calls before them; then the user's text. */
static bool add_user(translation *t, json_t *content) {
    json_t *block, *parts = json_array();
    bool ok = parts != NULL;
    size_t i;
    json_array_foreach(content, i, block) {
        if (!ok) break;
        const bool result = strcmp(translate_word(block, "type"), "tool_result") == 0;
        ok = result ? add_result(t, block) : add_text(t, parts, block);
    }
    if (ok && json_array_size(parts) > 0) {
        return translate_append(t, json_pack("{s:s, s:o}", "role", "user", "content", parts));
    }
    json_decref(parts);
    return ok || translate_no_memory(t);
}

static bool add_call(translation *t, json_t *message, const json_t *block) {
    json_t *input = json_object_get(block, "input"), *id = json_object_get(block, "id");
    json_t *name = json_object_get(block, "name");
    if (!json_is_object(input) || !json_is_string(id) || !json_is_string(name)) {
        return translate_refuse(t, "a tool_use must have id, name and input");
    }
    return translate_call(t, message, id, name, input);
}

static bool add_block(translation *t, json_t *message, json_t *parts, json_t *block) {
    const char *type = translate_word(block, "type");
    if (strcmp(type, "tool_use") == 0) return add_call(t, message, block);
    if (strcmp(type, "redacted_thinking") == 0) return true;
    if (strcmp(type, "thinking") != 0) return add_text(t, parts, block);
    json_t *text = json_object_get(block, "thinking");
    if (!json_is_string(text)) return translate_refuse(t, "a thinking block must have a text");
    return json_object_set(message, "reasoning_content", text) == 0 || translate_no_memory(t);
}

static bool add_assistant(translation *t, json_t *content) {
    json_t *block, *parts = json_array();
    json_t *message = json_pack("{s:s}", "role", "assistant");
    bool ok = parts && message;
    size_t i;
    json_array_foreach(content, i, block) {
        ok = ok && add_block(t, message, parts, block);
    }
    if (ok && json_array_size(parts) > 0) {
        ok = json_object_set(message, "content", parts) == 0;
    } else if (ok && !json_object_get(message, "tool_calls")) {
        ok = json_object_set_new(message, "content", json_string("")) == 0;
    }
    json_decref(parts);
    if (ok) return translate_append(t, message);
    json_decref(message);
    return translate_no_memory(t);
}

static bool add_message(translation *t, json_t *message) {
    json_t *content = json_object_get(message, "content");
    const char *role = translate_word(message, "role");
    const bool user = strcmp(role, "user") == 0, system = strcmp(role, "system") == 0;
    if (!user && !system && strcmp(role, "assistant") != 0) {
        return translate_refuse(t, "role must be user, assistant or system");
    }
    if (json_is_string(content) || system) {
        json_t *text;
        return take_text(t, content, &text) &&
               translate_append(t, json_pack("{s:s, s:o}", "role", role, "content", text));
    }
    if (!json_is_array(content) || json_array_size(content) == 0) {
        return translate_refuse(t, "content must be a string or blocks");
    }
    return user ? add_user(t, content) : add_assistant(t, content);
}

static bool find_input_schema(const translation *t, const json_t *tool, size_t i,
                              json_t **schema) {
    const char *type = translate_word(tool, "type");
    *schema = json_object_get(tool, "input_schema");
    if (*type && strcmp(type, "custom") != 0) {
        return api_refuse(t->r, "unsupported_parameter", "tools",
                          "tools[%zu] is a tool of the server; there are none", i);
    }
    return json_is_object(*schema) ||
           api_refuse(t->r, "invalid_value", "tools",
                      "tools[%zu].input_schema must be an object", i);
}

static bool translate_choice(api_request *r) {
    static const char *const words[][2] = {
        {"auto", "auto"    },
        {"any",  "required"},
        {"none", "none"    }
    };
    const json_t *given = r->tool_choice;
    const char *type = translate_word(given, "type");
    json_t *name = json_object_get(given, "name"), *made = NULL;
    if (!given) return true;
    if (json_is_true(json_object_get(given, "disable_parallel_tool_use"))) {
        r->w.parallel_calls = false;
    }
    for (size_t i = 0; i < HD_LEN(words); i++) {
        if (strcmp(type, words[i][0]) == 0) made = json_string(words[i][1]);
    }
    if (strcmp(type, "tool") == 0 && json_is_string(name)) {
        made = json_pack("{s:s, s:{s:O}}", "type", "function", "function", "name", name);
    }
    if (!made) {
        return api_refuse(r, "invalid_value", "tool_choice",
                          "tool_choice.type must be auto, any, none, or tool with a name");
    }
    r->tool_choice = api_keep_json(r, made);
    return r->tool_choice != NULL;
}

/* If the last message is the assistant's, the model continues it. */
static void continue_last(api_request *r) {
    const json_t *last = json_array_get(r->messages, json_array_size(r->messages) - 1);
    const bool answer = strcmp(translate_word(last, "role"), "assistant") == 0;
    r->continue_final = answer && !json_object_get(last, "tool_calls");
}

bool api_translate_messages(api_request *r) {
    translation t = {.r = r, .param = "messages", .out = api_keep_json(r, json_array())};
    json_t *message, *system, *given = r->messages;
    if (!t.out) return false;
    if (!given) {
        return api_refuse(r, "missing_required_parameter", "messages", "messages are missing");
    }
    if (r->system) {
        if (!take_text(&t, r->system, &system)) return false;
        if (!translate_append(&t,
                              json_pack("{s:s, s:o}", "role", "system", "content", system))) {
            return false;
        }
    }
    json_array_foreach(given, t.index, message) {
        if (!add_message(&t, message)) return false;
    }
    r->messages = t.out;
    continue_last(r);
    return translate_tools(&t, find_input_schema) && translate_choice(r);
}
