/* chat_dsml.c - tools and DSML tool calls in the prompts of V3.2 and V4. */
#include "chat/chat_internal.h"

#include <stdlib.h>
#include <string.h>

hd_status dsml_messages(hd_chat_message **out, int32_t *n, const chat_job *job) {
    const hd_conversation *c = job->c;
    const hd_chat_message *first = &c->messages[0];
    bool extras = c->tools || c->response_format;
    bool leads = first->role == HD_CHAT_SYSTEM || first->role == HD_CHAT_DEVELOPER;
    size_t skip = extras && !leads;
    hd_chat_message *m = calloc((size_t)c->n + 1, sizeof *m);
    *out = m;
    if (!m) return HD_FAIL(job->err, HD_ENOMEM, "no memory for %d messages", c->n);
    m[0] = (hd_chat_message){.index = -1, .role = HD_CHAT_SYSTEM};
    memcpy(m + skip, c->messages, (size_t)c->n * sizeof *m);
    *n = c->n + (int32_t)skip;
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

void dsml_extras(chat_out *o, const hd_chat_message *m, dsml_tools_fn *write_tools) {
    if (m->tools) {
        chat_control(o, "\n\n");
        write_tools(o, m->tools);
    }
    if (m->response_format) {
        chat_control(o, "\n\n## Response Format:\n\n"
                        "You MUST strictly adhere to the following schema to reply:\n");
        pyjson_write(o, m->response_format, 0);
    }
}

void dsml_tool_lines(chat_out *o, json_t *tools) {
    size_t i;
    json_t *tool;
    json_array_foreach(tools, i, tool) {
        if (i > 0) chat_control(o, "\n");
        pyjson_write(o, json_object_get(tool, "function"), 0);
    }
}

static void write_parameter(chat_out *o, const char *key, json_t *value) {
    bool text = json_is_string(value) && !pyjson_is_number(value);
    chat_control(o, "<" CHAT_DSML "parameter name=\"");
    chat_content_bytes(o, key, strlen(key));
    chat_control(o, text ? "\" string=\"true\">" : "\" string=\"false\">");
    if (text) {
        chat_content_bytes(o, json_string_value(value), json_string_length(value));
    } else {
        pyjson_write(o, value, 0);
    }
    chat_control(o, "</" CHAT_DSML "parameter>\n");
}

/* Arguments that are not a JSON object become one string parameter of their name. */
static void write_call(chat_out *o, const hd_chat_call *call) {
    hd_chat_text a = call->arguments;
    json_t *parsed = call->object ? NULL : pyjson_parse(a.data, a.n, false, NULL);
    json_t *arguments = call->object ? call->object : parsed, *value;
    const char *key;
    chat_control(o, "<" CHAT_DSML "invoke name=\"");
    chat_content(o, call->name);
    chat_control(o, "\">\n");
    if (json_is_object(arguments)) {
        json_object_foreach(arguments, key, value) {
            write_parameter(o, key, value);
        }
        if (json_object_size(arguments) == 0) chat_control(o, "\n");
    } else {
        chat_control(o, "<" CHAT_DSML "parameter name=\"arguments\" string=\"true\">");
        chat_content(o, a);
        chat_control(o, "</" CHAT_DSML "parameter>\n");
    }
    chat_control(o, "</" CHAT_DSML "invoke>\n");
    json_decref(parsed);
}

void dsml_calls(chat_out *o, const hd_chat_message *m, const char *block) {
    if (m->n_calls == 0) return;
    chat_control(o, "\n\n<" CHAT_DSML);
    chat_control(o, block);
    chat_control(o, ">\n");
    for (int32_t i = 0; i < m->n_calls; i++) write_call(o, &m->calls[i]);
    chat_control(o, "</" CHAT_DSML);
    chat_control(o, block);
    chat_control(o, ">");
}
