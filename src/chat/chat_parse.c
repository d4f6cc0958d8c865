/* chat_parse.c - parses and checks OpenAI messages and tools, and keeps views into their
 * JSON. Every refusal names the message's index and the field. */
#include "chat/chat_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"

static const char *const roles[] = {
    [HD_CHAT_SYSTEM] = "system", [HD_CHAT_DEVELOPER] = "developer",
    [HD_CHAT_USER] = "user",     [HD_CHAT_ASSISTANT] = "assistant",
    [HD_CHAT_TOOL] = "tool",     [HD_CHAT_LATEST_REMINDER] = "latest_reminder",
};
_Static_assert(HD_LEN(roles) == HD_CHAT_N_ROLES, "one name per role");

static const char *const tasks[] = {
    [HD_TASK_NONE] = "",
    [HD_TASK_ACTION] = "action",
    [HD_TASK_QUERY] = "query",
    [HD_TASK_AUTHORITY] = "authority",
    [HD_TASK_DOMAIN] = "domain",
    [HD_TASK_TITLE] = "title",
    [HD_TASK_READ_URL] = "read_url",
};
_Static_assert(HD_LEN(tasks) == HD_N_TASKS, "one name per task");

typedef struct parse {
    hd_conversation *c;
    hd_chat_message *m; /* the one at hand */
    int32_t n_parts, n_calls;
    bool strict;
    hd_err *err;
} parse;

static hd_status refuse(parse *p, const char *field, const char *why) {
    return chat_fail(p->err, HD_EINVAL, hd_field_of("messages[%d].%s", p->m->index, field),
                     "%s", why);
}

static bool absent(const json_t *v) {
    return !v || json_is_null(v);
}

/* A number that the parser cannot hold became a string; it is not text. */
static bool text_of(json_t *v, hd_chat_text *out) {
    if (!json_is_string(v) || pyjson_is_number(v)) return false;
    *out = (hd_chat_text){json_string_value(v), json_string_length(v)};
    return true;
}

static bool spells(hd_chat_text t, const char *word) {
    return t.n == strlen(word) && memcmp(t.data, word, t.n) == 0;
}

static bool same_text(hd_chat_text a, hd_chat_text b) {
    return a.n == b.n && memcmp(a.data, b.data, a.n) == 0;
}

/* [A-Za-z0-9_-]{1,64}: function names; no special token matches this. */
static bool is_name(json_t *v, hd_chat_text *out) {
    if (!text_of(v, out) || out->n < 1 || out->n > 64) return false;
    for (size_t i = 0; i < out->n; i++) {
        char c = out->data[i];
        bool ok = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                  c == '_' || c == '-';
        if (!ok) return false;
    }
    return true;
}

static hd_status parse_flag(parse *p, json_t *o, const char *field, bool *out) {
    json_t *v = json_object_get(o, field);
    if (absent(v)) return HD_OK;
    if (!json_is_boolean(v)) return refuse(p, field, "must be true or false");
    *out = json_is_true(v);
    return HD_OK;
}

static hd_status parse_part(parse *p, json_t *v, int32_t i) {
    hd_chat_part *part = &p->c->parts[p->n_parts++];
    char field[48];
    hd_chat_text type;
    snprintf(field, sizeof field, "content[%d]", i);
    if (!json_is_object(v)) return refuse(p, field, "must be an object");
    if (!text_of(json_object_get(v, "type"), &type)) {
        snprintf(field, sizeof field, "content[%d].type", i);
        return refuse(p, field, "must be a string");
    }
    if (!spells(type, "text")) {
        *part = (hd_chat_part){.text = type, .unsupported = true};
        return HD_OK;
    }
    if (!text_of(json_object_get(v, "text"), &part->text)) {
        snprintf(field, sizeof field, "content[%d].text", i);
        return refuse(p, field, "must be a string");
    }
    return HD_OK;
}

static hd_status parse_content(parse *p, json_t *o) {
    json_t *v = json_object_get(o, "content"), *item;
    size_t i;
    hd_chat_text text;
    p->m->parts = &p->c->parts[p->n_parts];
    if (text_of(v, &text)) {
        p->c->parts[p->n_parts++].text = text;
        p->m->n_parts = 1;
    } else if (json_is_array(v)) {
        if (json_array_size(v) == 0) return refuse(p, "content", "must not be an empty array");
        json_array_foreach(v, i, item) {
            HD_TRY(parse_part(p, item, (int32_t)i));
        }
        p->m->n_parts = (int32_t)json_array_size(v);
    } else if (!absent(v)) {
        return refuse(p, "content", "must be a string, null or an array of parts");
    } else if (p->m->role != HD_CHAT_ASSISTANT) {
        return refuse(p, "content", "must be a string or an array of parts");
    }
    p->m->has_content = p->m->n_parts > 0;
    return HD_OK;
}

static hd_status refuse_call(parse *p, int32_t i, const char *field, const char *why) {
    char path[64];
    snprintf(path, sizeof path, "tool_calls[%d]%s", i, field);
    return refuse(p, path, why);
}

static hd_status parse_call_id(parse *p, hd_chat_call *call, int32_t i, json_t *v,
                               json_t *function) {
    json_t *id = json_object_get(v, "id");
    if (absent(id)) id = json_object_get(function, "id");
    if (absent(id) && !p->strict) return HD_OK;
    if (!text_of(id, &call->id)) return refuse_call(p, i, ".id", "must be a string");
    if (call->id.n == 0) {
        return p->strict ? refuse_call(p, i, ".id", "must not be empty") : HD_OK;
    }
    for (int32_t k = 0; k < i; k++) {
        if (same_text(p->m->calls[k].id, call->id)) {
            return refuse_call(p, i, ".id", "is the id of an earlier call too");
        }
    }
    return HD_OK;
}

static hd_status parse_call(parse *p, json_t *v, int32_t i) {
    hd_chat_call *call = &p->c->calls[p->n_calls++];
    hd_chat_text type;
    if (!json_is_object(v)) return refuse_call(p, i, "", "must be an object");
    json_t *kind = json_object_get(v, "type"), *function = json_object_get(v, "function");
    if (!absent(kind) && !(text_of(kind, &type) && spells(type, "function"))) {
        return refuse_call(p, i, ".type", "must be 'function'");
    }
    if (!json_is_object(function)) return refuse_call(p, i, ".function", "must be an object");
    HD_TRY(parse_call_id(p, call, i, v, function));
    if (!is_name(json_object_get(function, "name"), &call->name)) {
        return refuse_call(p, i, ".function.name",
                           "must be 1 to 64 letters, digits, '_' or '-'");
    }
    json_t *arguments = json_object_get(function, "arguments");
    if (json_is_object(arguments)) {
        call->object = arguments;
    } else if (!text_of(arguments, &call->arguments)) {
        return refuse_call(p, i, ".function.arguments", "must be a string or an object");
    }
    return HD_OK;
}

static hd_status parse_calls(parse *p, json_t *o) {
    json_t *v = json_object_get(o, "tool_calls"), *item;
    size_t i;
    p->m->calls = &p->c->calls[p->n_calls];
    if (absent(v)) return HD_OK;
    if (!json_is_array(v)) return refuse(p, "tool_calls", "must be an array");
    if (json_array_size(v) > 0 && p->m->role != HD_CHAT_ASSISTANT) {
        return refuse(p, "tool_calls", "only an assistant calls tools");
    }
    json_array_foreach(v, i, item) {
        HD_TRY(parse_call(p, item, (int32_t)i));
    }
    p->m->n_calls = (int32_t)json_array_size(v);
    return HD_OK;
}

/* A tool result must answer a call of the nearest assistant message before it. */
static hd_status check_known_call(parse *p) {
    for (int32_t i = p->m->index - 1; i >= 0; i--) {
        const hd_chat_message *a = &p->c->messages[i];
        if (a->role == HD_CHAT_TOOL) continue;
        for (int32_t k = 0; k < a->n_calls; k++) {
            if (same_text(a->calls[k].id, p->m->call_id)) return HD_OK;
        }
        break;
    }
    return refuse(p, "tool_call_id", "names no call of the message before");
}

static hd_status parse_call_id_of_result(parse *p, json_t *o) {
    json_t *v = json_object_get(o, "tool_call_id");
    if (p->m->role != HD_CHAT_TOOL) return HD_OK;
    if (absent(v) && !p->strict) return HD_OK;
    if (!text_of(v, &p->m->call_id)) return refuse(p, "tool_call_id", "must be a string");
    return p->strict ? check_known_call(p) : HD_OK;
}

static hd_status parse_word(parse *p, json_t *v, const char *field, const char *const *words,
                            int n, int *out) {
    hd_chat_text t;
    char all[160] = "must be one of";
    if (text_of(v, &t)) {
        for (int i = 0; i < n; i++) {
            if (words[i][0] && spells(t, words[i])) {
                *out = i;
                return HD_OK;
            }
        }
    }
    for (int i = 0, listed = 0; i < n; i++) {
        size_t used = strlen(all);
        if (words[i][0]) {
            snprintf(all + used, sizeof all - used, "%s %s", listed++ ? "," : "", words[i]);
        }
    }
    return refuse(p, field, all);
}

/* tools[n] of the request (index < 0) or of one message. */
static hd_status refuse_tool(hd_err *err, int32_t index, size_t i, const char *field,
                             const char *why) {
    const hd_field f = index < 0 ? hd_field_of("tools[%zu]%s", i, field)
                                 : hd_field_of("messages[%d].tools[%zu]%s", index, i, field);
    return HD_REFUSE(err, HD_EINVAL, NULL, f.path, "%s: %s", f.path, why);
}

static hd_status check_tool(json_t *v, int32_t index, size_t i, hd_chat_text *name,
                            hd_err *err) {
    hd_chat_text type;
    if (!json_is_object(v)) return refuse_tool(err, index, i, "", "must be an object");
    json_t *kind = json_object_get(v, "type"), *function = json_object_get(v, "function");
    if (!absent(kind) && !(text_of(kind, &type) && spells(type, "function"))) {
        return refuse_tool(err, index, i, ".type", "must be 'function'");
    }
    if (!json_is_object(function)) {
        return refuse_tool(err, index, i, ".function", "must be an object");
    }
    if (!is_name(json_object_get(function, "name"), name)) {
        return refuse_tool(err, index, i, ".function.name",
                           "must be 1 to 64 letters, digits, '_' or '-'");
    }
    json_t *description = json_object_get(function, "description");
    if (!absent(description) && !text_of(description, &type)) {
        return refuse_tool(err, index, i, ".function.description", "must be a string");
    }
    json_t *parameters = json_object_get(function, "parameters");
    if (parameters && !json_is_object(parameters)) {
        return refuse_tool(err, index, i, ".function.parameters", "must be an object");
    }
    json_t *strict = json_object_get(function, "strict");
    if (!absent(strict) && !json_is_boolean(strict)) {
        return refuse_tool(err, index, i, ".function.strict", "must be true or false");
    }
    return HD_OK;
}

/* *out stays NULL for no tools: absent, null or an empty array. */
static hd_status parse_tools(json_t **out, json_t *v, int32_t index, hd_err *err) {
    hd_chat_text names[HD_CHAT_MAX_TOOLS];
    json_t *item;
    size_t i;
    const hd_field field =
        index < 0 ? hd_field_of("tools") : hd_field_of("messages[%d].tools", index);
    if (absent(v)) return HD_OK;
    if (!json_is_array(v)) return chat_fail(err, HD_EINVAL, field, "must be an array");
    if (json_array_size(v) > HD_CHAT_MAX_TOOLS) {
        return chat_fail(err, HD_EINVAL, field, "%zu tools are more than %d",
                         json_array_size(v), HD_CHAT_MAX_TOOLS);
    }
    json_array_foreach(v, i, item) {
        HD_TRY(check_tool(item, index, i, &names[i], err));
        for (size_t k = 0; k < i; k++) {
            if (!same_text(names[i], names[k])) continue;
            return refuse_tool(err, index, i, ".function.name", "is the name of another tool");
        }
    }
    if (json_array_size(v) > 0) *out = v;
    return HD_OK;
}

/* *out stays NULL for no format: absent, null or an empty object. */
static bool parse_format(json_t **out, json_t *v) {
    if (absent(v)) return true;
    if (json_object_size(v) > 0) *out = v;
    return json_is_object(v);
}

static hd_status parse_extras(parse *p, json_t *o) {
    hd_chat_message *m = p->m;
    json_t *name = json_object_get(o, "name"), *task = json_object_get(o, "task");
    json_t *format = json_object_get(o, "response_format"),
           *tools = json_object_get(o, "tools");
    hd_chat_text ignored;
    int word = HD_TASK_NONE;
    if (!absent(name) && !is_name(name, &ignored)) {
        return refuse(p, "name", "must be 1 to 64 letters, digits, '_' or '-'");
    }
    if (!absent(task)) HD_TRY(parse_word(p, task, "task", tasks, HD_N_TASKS, &word));
    m->task = (hd_chat_task)word;
    HD_TRY(parse_flag(p, o, "prefix", &m->prefix));
    HD_TRY(parse_flag(p, o, "wo_eos", &m->wo_eos));
    HD_TRY(parse_tools(&m->tools, tools, m->index, p->err));
    if (!parse_format(&m->response_format, format)) {
        return refuse(p, "response_format", "must be an object");
    }
    bool may = m->role == HD_CHAT_SYSTEM || m->role == HD_CHAT_DEVELOPER;
    if (m->tools && !may) return refuse(p, "tools", "only system and developer messages may");
    if (m->response_format && !may) {
        return refuse(p, "response_format", "only system and developer messages may");
    }
    return HD_OK;
}

static hd_status parse_reasoning(parse *p, json_t *o) {
    const char *field = "reasoning_content";
    json_t *v = json_object_get(o, field);
    if (absent(v)) {
        field = "reasoning";
        v = json_object_get(o, field);
    }
    if (p->m->role != HD_CHAT_ASSISTANT || absent(v)) return HD_OK;
    return text_of(v, &p->m->reasoning) ? HD_OK : refuse(p, field, "must be a string or null");
}

static hd_status parse_message(parse *p, json_t *o) {
    int role = 0;
    if (!json_is_object(o)) {
        return chat_fail(p->err, HD_EINVAL, hd_field_of("messages[%d]", p->m->index),
                         "must be an object");
    }
    HD_TRY(parse_word(p, json_object_get(o, "role"), "role", roles, HD_CHAT_N_ROLES, &role));
    p->m->role = (hd_chat_role)role;
    HD_TRY(parse_content(p, o));
    HD_TRY(parse_calls(p, o));
    HD_TRY(parse_reasoning(p, o));
    HD_TRY(parse_call_id_of_result(p, o));
    HD_TRY(parse_extras(p, o));
    if (!p->m->has_content && p->m->n_calls == 0) {
        return refuse(p, "content",
                      "must be a string or an array of parts when there are no "
                      "tool_calls");
    }
    return HD_OK;
}

/* Counts what will be stored, and checks the limits. */
static hd_status count(json_t *messages, size_t *n_parts, size_t *n_calls, hd_err *err) {
    json_t *m;
    size_t i;
    json_array_foreach(messages, i, m) {
        json_t *content = json_object_get(m, "content");
        size_t parts = json_is_array(content) ? json_array_size(content) : 1;
        size_t calls = json_array_size(json_object_get(m, "tool_calls"));
        if (parts > HD_CHAT_MAX_PARTS) {
            return chat_fail(err, HD_EINVAL, hd_field_of("messages[%zu].content", i),
                             "%zu parts are more than %d", parts, HD_CHAT_MAX_PARTS);
        }
        if (calls > HD_CHAT_MAX_CALLS) {
            return chat_fail(err, HD_EINVAL, hd_field_of("messages[%zu].tool_calls", i),
                             "%zu calls are more than %d", calls, HD_CHAT_MAX_CALLS);
        }
        *n_parts += parts;
        *n_calls += calls;
    }
    return HD_OK;
}

static hd_status parse_all(hd_conversation *c, json_t *messages, bool strict, hd_err *err) {
    size_t n = json_array_size(messages), n_parts = 0, n_calls = 0, i;
    json_t *message;
    HD_TRY(count(messages, &n_parts, &n_calls, err));
    c->messages = calloc(n + 1, sizeof *c->messages);
    c->parts = calloc(n_parts + 1, sizeof *c->parts);
    c->calls = calloc(n_calls + 1, sizeof *c->calls);
    if (!c->messages || !c->parts || !c->calls) {
        return HD_FAIL(err, HD_ENOMEM, "no memory for %zu messages", n);
    }
    parse p = {.c = c, .strict = strict, .err = err};
    json_array_foreach(messages, i, message) {
        p.m = &c->messages[i];
        p.m->index = (int32_t)i;
        HD_TRY(parse_message(&p, message));
    }
    c->n = (int32_t)n;
    return HD_OK;
}

hd_status hd_chat_parse(hd_conversation *out, json_t *messages, json_t *tools,
                        json_t *response_format, bool strict, hd_err *err) {
    const hd_field field = hd_field_of("messages");
    const size_t n = json_array_size(messages);
    *out = (hd_conversation){0};
    if (!json_is_array(messages)) return chat_fail(err, HD_EINVAL, field, "must be an array");
    if (n == 0) return chat_fail(err, HD_EINVAL, field, "must not be empty");
    if (n > HD_CHAT_MAX_MESSAGES) {
        return chat_fail(err, HD_EINVAL, field, "%zu messages are more than %d", n,
                         HD_CHAT_MAX_MESSAGES);
    }
    HD_TRY(parse_tools(&out->tools, tools, -1, err));
    if (!parse_format(&out->response_format, response_format)) {
        return chat_fail(err, HD_EINVAL, hd_field_of("response_format"), "must be an object");
    }
    hd_status st = parse_all(out, messages, strict, err);
    if (st != HD_OK) hd_conversation_deinit(out);
    return st;
}

void hd_conversation_deinit(hd_conversation *c) {
    free(c->messages);
    free(c->parts);
    free(c->calls);
    *c = (hd_conversation){0};
}

hd_status hd_chat_parse_json(json_t **out, const char *text, size_t n, const char *what,
                             hd_err *err) {
    json_error_t why;
    *out = pyjson_parse(text, n, true, &why);
    if (*out) return HD_OK;
    if (json_error_code(&why) == json_error_out_of_memory || !why.text[0]) {
        return HD_FAIL(err, HD_ENOMEM, "%s: no memory to parse it", what);
    }
    const bool twice = json_error_code(&why) == json_error_duplicate_key;
    return HD_REFUSE(err, HD_EFORMAT, twice ? "duplicate_key" : "invalid_json", NULL,
                     "%s: not valid JSON: line %d column %d: %s", what, why.line, why.column,
                     why.text);
}

bool hd_chat_is_number(const json_t *v) {
    return pyjson_is_number(v);
}
