/* chat_dsml.c - tools and DSML tool calls in the prompts of V3.2, V4 and V4.1. */
#include "chat/chat_internal.h"

#include <stdlib.h>
#include <string.h>

static bool leads(const hd_chat_message *m) {
    return m->role == HD_CHAT_SYSTEM || m->role == HD_CHAT_DEVELOPER;
}

static bool says_nothing(const hd_chat_message *m) {
    if (!leads(m) || m->tools || m->response_format || m->n_parts > 1) return false;
    return m->n_parts == 0 || m->parts[0].text.n == 0;
}

hd_status dsml_messages(hd_chat_message **out, int32_t *n, const chat_job *job,
                        bool drop_silent) {
    const hd_conversation *c = job->c;
    const hd_chat_message *first = c->messages, *end = first + c->n;
    while (drop_silent && first < end && says_nothing(first)) first++;
    hd_chat_message *m = calloc((size_t)c->n + 1, sizeof *m);
    *out = m;
    *n = 0;
    if (!m) return HD_FAIL(job->err, HD_ENOMEM, "no memory for %d messages", c->n);
    m[0] = (hd_chat_message){.index = -1, .role = HD_CHAT_SYSTEM};
    if ((c->tools || c->response_format) && (first == end || !leads(first))) *n = 1;
    for (; first < end; first++) {
        if (!drop_silent || !says_nothing(first)) m[(*n)++] = *first;
    }
    if ((c->tools && m[0].tools) || (c->response_format && m[0].response_format)) {
        return chat_fail(job->err, HD_EINVAL,
                         hd_field_of(c->tools && m[0].tools ? "tools" : "response_format"),
                         "given with the request and in messages[0]");
    }
    if (c->tools) m[0].tools = c->tools;
    if (c->response_format) m[0].response_format = c->response_format;
    return HD_OK;
}

int32_t dsml_last_user(const hd_chat_message *m, int32_t n) {
    while (n > 0 && m[n - 1].role != HD_CHAT_USER && m[n - 1].role != HD_CHAT_DEVELOPER) n--;
    return n - 1;
}

/* One function per line, no LF at the end. */
static void write_tool_lines(chat_out *o, json_t *tools) {
    size_t i;
    json_t *tool;
    json_array_foreach(tools, i, tool) {
        if (i > 0) chat_control(o, "\n");
        pyjson_write(o, json_object_get(tool, "function"), 0);
    }
}

void dsml_extras(chat_out *o, const hd_chat_message *m, const dsml_dialect *d) {
    if (m->tools) {
        chat_control(o, "\n\n");
        chat_control(o, d->before_tools);
        write_tool_lines(o, m->tools);
        chat_control(o, d->after_tools);
    }
    if (m->response_format) {
        chat_control(o, "\n\n## Response Format:\n\n"
                        "You MUST strictly adhere to the following schema to reply:\n");
        pyjson_write(o, m->response_format, 0);
    }
}

static void open_tag(chat_out *o, const char *word, const char *key, size_t n) {
    chat_control(o, "<" CHAT_DSML);
    chat_control(o, word);
    chat_control(o, " name=\"");
    chat_content_bytes(o, key, n);
    chat_control(o, "\"");
}

static void close_tag(chat_out *o, const char *word) {
    chat_control(o, "</" CHAT_DSML);
    chat_control(o, word);
    chat_control(o, ">");
}

/* value NULL: text[n] as it is. */
static void write_parameter(chat_out *o, const dsml_dialect *d, const char *key, json_t *value,
                            hd_chat_text text) {
    open_tag(o, d->parameter, key, strlen(key));
    chat_control(o, value ? " string=\"false\">" : " string=\"true\">");
    if (value) {
        pyjson_write(o, value, 0);
    } else {
        chat_content(o, text);
    }
    close_tag(o, d->parameter);
    chat_control(o, "\n");
}

static void write_member(chat_out *o, const dsml_dialect *d, const char *key, json_t *value) {
    const bool is_text = json_is_string(value) && !pyjson_is_number(value);
    hd_chat_text text = {0};
    if (is_text) text = (hd_chat_text){json_string_value(value), json_string_length(value)};
    write_parameter(o, d, key, is_text ? NULL : value, text);
}

/* Arguments that are not a JSON object become one string parameter of their name. */
static void write_call(chat_out *o, const dsml_dialect *d, const hd_chat_call *call) {
    hd_chat_text a = call->arguments;
    json_t *parsed = call->object ? NULL : pyjson_parse(a.data, a.n, false, NULL);
    json_t *arguments = call->object ? call->object : parsed, *value;
    const char *key;
    open_tag(o, d->invoke, call->name.data, call->name.n);
    chat_control(o, ">\n");
    if (json_is_object(arguments)) {
        json_object_foreach(arguments, key, value) {
            write_member(o, d, key, value);
        }
        if (json_object_size(arguments) == 0) chat_control(o, "\n");
    } else {
        write_parameter(o, d, "arguments", NULL, a);
    }
    close_tag(o, d->invoke);
    chat_control(o, "\n");
    json_decref(parsed);
}

void dsml_calls(chat_out *o, const hd_chat_message *m, const dsml_dialect *d) {
    if (m->n_calls == 0) return;
    chat_control(o, "\n\n<" CHAT_DSML);
    chat_control(o, d->block);
    chat_control(o, ">\n");
    for (int32_t i = 0; i < m->n_calls; i++) write_call(o, d, &m->calls[i]);
    close_tag(o, d->block);
}
