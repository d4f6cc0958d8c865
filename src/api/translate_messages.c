/* translate_messages.c - Anthropic's messages: blocks of text, thinking, tool_use and
 * tool_result. */
#include <string.h>

#include "api/translate.h"

typedef struct translation {
    api_request *r;
    json_t *out;  /* the messages */
    size_t index; /* of the message at hand */
} translation;

static bool no_memory(api_request *r) {
    return api_refuse_status(r, 503, "out_of_memory", NULL, "no memory for the messages");
}

static const char *word(const json_t *object, const char *key) {
    const char *s = json_string_value(json_object_get(object, key));
    return s ? s : "";
}

static bool refuse(translation *t, const char *what) {
    return api_refuse(t->r, "invalid_value", "messages", "messages[%zu]: %s", t->index, what);
}

/* A text block, or blocks that hold nothing else, as OpenAI's parts. */
static bool add_text(translation *t, json_t *parts, const json_t *block) {
    json_t *text = json_object_get(block, "text");
    if (strcmp(word(block, "type"), "text") != 0) {
        return api_refuse(t->r, "unsupported_content_type", "messages",
                          "messages[%zu] holds a block that is no text; models read text",
                          t->index);
    }
    if (!json_is_string(text)) return refuse(t, "a text block must have a text");
    json_t *part = json_pack("{s:s, s:O}", "type", "text", "text", text);
    return json_array_append_new(parts, part) == 0 || no_memory(t->r);
}

/* A string stays one; blocks become parts. *out is a new reference. */
static bool translate_text(translation *t, json_t *content, json_t **out) {
    json_t *block;
    size_t i;
    *out = NULL;
    if (json_is_string(content)) {
        *out = json_incref(content);
        return true;
    }
    if (!json_is_array(content)) return refuse(t, "content must be a string or blocks");
    json_t *parts = json_array();
    if (!parts) return no_memory(t->r);
    json_array_foreach(content, i, block) {
        if (add_text(t, parts, block)) continue;
        json_decref(parts);
        return false;
    }
    if (json_array_size(parts) == 0) {
        json_decref(parts);
        parts = json_string("");
    }
    *out = parts;
    return *out || no_memory(t->r);
}

static bool append(translation *t, json_t *message) {
    return json_array_append_new(t->out, message) == 0 || no_memory(t->r);
}

static bool add_result(translation *t, const json_t *block) {
    json_t *content = json_object_get(block, "content"), *id, *text;
    id = json_object_get(block, "tool_use_id");
    if (!json_is_string(id)) return refuse(t, "a tool_result must have a tool_use_id");
    if (!content) {
        text = json_string("");
    } else if (!translate_text(t, content, &text)) {
        return false;
    }
    return append(
        t, json_pack("{s:s, s:O, s:o}", "role", "tool", "tool_call_id", id, "content", text));
}

/* Results answer the calls before them, so they come first; the rest is what the user says. */
static bool add_user(translation *t, json_t *content) {
    json_t *block, *parts = json_array();
    bool ok = parts != NULL;
    size_t i;
    json_array_foreach(content, i, block) {
        if (!ok) break;
        const bool result = strcmp(word(block, "type"), "tool_result") == 0;
        ok = result ? add_result(t, block) : add_text(t, parts, block);
    }
    if (ok && json_array_size(parts) > 0) {
        return append(t, json_pack("{s:s, s:o}", "role", "user", "content", parts));
    }
    json_decref(parts);
    return ok || no_memory(t->r);
}

static bool add_call(translation *t, json_t *message, const json_t *block) {
    json_t *calls = json_object_get(message, "tool_calls"), *input, *id, *name;
    input = json_object_get(block, "input");
    id = json_object_get(block, "id");
    name = json_object_get(block, "name");
    if (!json_is_object(input) || !json_is_string(id) || !json_is_string(name)) {
        return refuse(t, "a tool_use must have id, name and input");
    }
    json_t *call = json_pack("{s:O, s:s, s:{s:O, s:O}}", "id", id, "type", "function",
                             "function", "name", name, "arguments", input);
    if (!calls) {
        calls = json_array();
        if (json_object_set_new(message, "tool_calls", calls) != 0) calls = NULL;
    }
    return json_array_append_new(calls, call) == 0 || no_memory(t->r);
}

static bool add_block(translation *t, json_t *message, json_t *parts, const json_t *block) {
    const char *type = word(block, "type");
    if (strcmp(type, "tool_use") == 0) return add_call(t, message, block);
    if (strcmp(type, "redacted_thinking") == 0) return true;
    if (strcmp(type, "thinking") != 0) return add_text(t, parts, block);
    json_t *text = json_object_get(block, "thinking");
    if (!json_is_string(text)) return refuse(t, "a thinking block must have a text");
    return json_object_set(message, "reasoning_content", text) == 0 || no_memory(t->r);
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
    if (ok) return append(t, message);
    json_decref(message);
    return no_memory(t->r);
}

static bool add_message(translation *t, json_t *message) {
    json_t *content = json_object_get(message, "content");
    const char *role = word(message, "role");
    const bool user = strcmp(role, "user") == 0, system = strcmp(role, "system") == 0;
    if (!user && !system && strcmp(role, "assistant") != 0) {
        return refuse(t, "role must be user, assistant or system");
    }
    if (json_is_string(content) || system) {
        json_t *text;
        return translate_text(t, content, &text) &&
               append(t, json_pack("{s:s, s:o}", "role", role, "content", text));
    }
    if (!json_is_array(content) || json_array_size(content) == 0) {
        return refuse(t, "content must be a string or blocks");
    }
    return user ? add_user(t, content) : add_assistant(t, content);
}

static bool add_tool(api_request *r, json_t *tools, const json_t *tool, size_t i) {
    json_t *schema = json_object_get(tool, "input_schema"), *name, *about;
    const char *type = word(tool, "type");
    name = json_object_get(tool, "name");
    about = json_object_get(tool, "description");
    if (*type && strcmp(type, "custom") != 0) {
        return api_refuse(r, "unsupported_parameter", "tools",
                          "tools[%zu] is a tool of the server; there are none", i);
    }
    if (!json_is_object(schema)) {
        return api_refuse(r, "invalid_value", "tools",
                          "tools[%zu].input_schema must be an object", i);
    }
    json_t *made = json_pack("{s:s, s:{s:O*, s:O*, s:O}}", "type", "function", "function",
                             "name", name, "description", about, "parameters", schema);
    return json_array_append_new(tools, made) == 0 || no_memory(r);
}

static bool translate_tools(api_request *r) {
    json_t *tool, *given = r->tools;
    size_t i;
    if (!given) return true;
    r->tools = api_keep_json(r, json_array());
    if (!r->tools) return false;
    json_array_foreach(given, i, tool) {
        if (!add_tool(r, r->tools, tool, i)) return false;
    }
    return true;
}

static bool translate_choice(api_request *r) {
    static const char *const words[][2] = {
        {"auto", "auto"    },
        {"any",  "required"},
        {"none", "none"    }
    };
    const json_t *given = r->tool_choice;
    const char *type = word(given, "type");
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

bool api_translate_messages(api_request *r) {
    translation t = {.r = r, .out = api_keep_json(r, json_array())};
    json_t *message, *system, *given = r->messages;
    if (!t.out) return false;
    if (!given) {
        return api_refuse(r, "missing_required_parameter", "messages", "messages are missing");
    }
    if (r->system) {
        if (!translate_text(&t, r->system, &system)) return false;
        if (!append(&t, json_pack("{s:s, s:o}", "role", "system", "content", system))) {
            return false;
        }
    }
    json_array_foreach(given, t.index, message) {
        if (!add_message(&t, message)) return false;
    }
    r->messages = t.out;
    return translate_tools(r) && translate_choice(r);
}
