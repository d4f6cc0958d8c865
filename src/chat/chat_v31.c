/* chat_v31.c - chat templates of V3.1 and V3.1-Terminus (also V3.2-Exp): a think tag opens
 * every answer to a user, tool calls contain bare JSON, outputs have no outer block. */
#include "chat/chat_internal.h"

static void write_tools(chat_out *o, json_t *tools) {
    size_t i;
    json_t *tool;
    chat_control(o, "## Tools\nYou have access to the following tools:\n\n");
    json_array_foreach(tools, i, tool) {
        json_t *function = json_object_get(tool, "function");
        json_t *name = json_object_get(function, "name");
        json_t *description = json_object_get(function, "description");
        json_t *parameters = json_object_get(function, "parameters");
        chat_control(o, "### ");
        chat_content_bytes(o, json_string_value(name), json_string_length(name));
        chat_control(o, "\nDescription: ");
        if (json_is_string(description)) {
            chat_content_bytes(o, json_string_value(description),
                               json_string_length(description));
        }
        chat_control(o, "\n\nParameters: ");
        if (parameters) {
            pyjson_write(o, parameters, 0);
        } else {
            chat_control(o, "{}");
        }
        chat_control(o, "\n\n");
    }
    chat_control(o,
                 "IMPORTANT: ALWAYS adhere to this exact format for tool use:\n" //
                 CHAT_CALLS_BEGIN CHAT_CALL_BEGIN "tool_call_name" CHAT_CALL_SEP
                 "tool_call_arguments" CHAT_CALL_END "{additional_tool_calls}" CHAT_CALLS_END
                 "\n\nWhere:\n"
                 "- `tool_call_name` must be an exact match to one of the available tools\n"
                 "- `tool_call_arguments` must be valid JSON that strictly follows the tool's "
                 "Parameters Schema\n"
                 "- For multiple tool calls, chain them directly without separators or spaces");
}

static void write_calls(chat_out *o, const hd_chat_message *m) {
    chat_control(o, CHAT_CALLS_BEGIN);
    for (int32_t i = 0; i < m->n_calls; i++) {
        chat_control(o, CHAT_CALL_BEGIN);
        chat_content(o, m->calls[i].name);
        chat_control(o, CHAT_CALL_SEP);
        chat_arguments(o, &m->calls[i]);
        chat_control(o, CHAT_CALL_END);
    }
    chat_control(o, CHAT_CALLS_END);
}

typedef struct v31_state {
    bool after_user, after_output;
    bool only_system; /* Terminus: nothing but system text so far, and some of it */
    bool any_prefix;  /* Terminus: some answer was one to be continued */
} v31_state;

static void write_assistant(const chat_job *job, v31_state *s, const hd_chat_message *m) {
    chat_out *o = job->out;
    bool calls = m->n_calls > 0;
    if (s->after_user || (calls && s->only_system)) {
        bool think = !calls && m->prefix && job->options->thinking;
        chat_control(o, CHAT_ASSISTANT);
        chat_control(o, think ? CHAT_THINK : CHAT_END_THINK);
    }
    chat_begin_block(o, m, m->n_calls);
    chat_answer(o, m, calls || s->after_output ? CHAT_CUT_NONE : CHAT_CUT_FIRST);
    if (calls) write_calls(o, m);
    chat_end_block(o);
    chat_control(o, CHAT_EOS);
    if (!calls && m->prefix) s->any_prefix = true;
    s->after_user = s->after_output = false;
}

hd_status chat_render_v31(const chat_job *job) {
    bool terminus = job->options->encoding == HD_CHAT_V31_TERMINUS, any_system;
    chat_out *o = job->out;
    chat_control(o, CHAT_BOS);
    chat_system_texts(job, &any_system);
    if (job->c->tools) {
        if (any_system) chat_control(o, "\n\n");
        write_tools(o, job->c->tools);
    }
    v31_state s = {.only_system = terminus && any_system};
    for (int32_t i = 0; i < job->c->n; i++) {
        const hd_chat_message *m = &job->c->messages[i];
        if (m->role == HD_CHAT_SYSTEM || m->role == HD_CHAT_DEVELOPER) continue;
        if (m->role == HD_CHAT_USER) {
            chat_control(o, CHAT_USER);
            chat_parts(o, m);
            s.after_user = true;
            s.after_output = false;
        } else if (m->role == HD_CHAT_ASSISTANT) {
            write_assistant(job, &s, m);
        } else {
            chat_control(o, CHAT_OUTPUT_BEGIN);
            chat_parts(o, m);
            chat_control(o, CHAT_OUTPUT_END);
            s.after_user = false;
            s.after_output = true;
        }
        s.only_system = false;
    }
    bool open = s.after_user || (terminus && (s.only_system || !s.any_prefix));
    if (open && !s.after_output && !job->options->no_generation_prompt) {
        chat_control(o, CHAT_ASSISTANT);
        chat_control(o, job->options->thinking ? CHAT_THINK : CHAT_END_THINK);
    }
    return HD_OK;
}
