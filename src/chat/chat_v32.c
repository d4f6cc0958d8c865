/* chat_v32.c - chat format of V3.2: tool results in their own block after the assistant's
 * turn, reasoning kept only behind the last user message. */
#include "chat/chat_internal.h"

#include <stdlib.h>

static const dsml_dialect dialect = {
    .block = "function_calls",
    .invoke = "invoke",
    .parameter = "parameter",
    .before_tools =
        "## Tools\n\n"
        "You have access to a set of tools you can use to answer the user's question.\n"
        "You can invoke functions by writing a \"<" CHAT_DSML
        "function_calls>\" block like the "
        "following as part of your reply to the user:\n"
        "<" CHAT_DSML "function_calls>\n"
        "<" CHAT_DSML "invoke name=\"$FUNCTION_NAME\">\n"
        "<" CHAT_DSML "parameter name=\"$PARAMETER_NAME\" string=\"true|false\">"
        "$PARAMETER_VALUE</" CHAT_DSML "parameter>\n"
        "...\n"
        "</" CHAT_DSML "invoke>\n"
        "<" CHAT_DSML "invoke name=\"$FUNCTION_NAME2\">\n"
        "...\n"
        "</" CHAT_DSML "invoke>\n"
        "</" CHAT_DSML "function_calls>\n\n"
        "String and scalar parameters should be specified as is without any escaping or "
        "quotes, "
        "while lists and objects should use JSON format. The \"string\" attribute should be "
        "set "
        "to \"true\" for string type parameters and \"false\" for other types (numbers, "
        "booleans, arrays, objects).\n\n"
        "If the thinking_mode is enabled, then after function results you should strongly "
        "consider outputting a thinking block. Here is an example:\n\n"
        "<" CHAT_DSML "function_calls>\n"
        "...\n"
        "</" CHAT_DSML "function_calls>\n\n"
        "<function_results>\n"
        "...\n"
        "</function_results>\n\n" CHAT_THINK "...thinking about results" CHAT_END_THINK "\n\n"
        "Here are the functions available in JSONSchema format:\n"
        "<functions>\n",
    .after_tools = "\n</functions>\n",
};

typedef struct v32_state {
    const chat_job *job;
    int32_t n, last;   /* messages; the last of a user or developer */
    int32_t n_calls;   /* of the assistant turn whose results are being written */
    int32_t n_results; /* of those so far */
} v32_state;

/* Writes the tag that opens an answer, unless the last message is not to be answered. */
static void open_answer(const v32_state *s, int32_t i, const char *before, bool current) {
    if (i == s->n - 1 && s->job->options->no_generation_prompt) return;
    bool think = s->job->options->thinking && current;
    chat_control(s->job->out, before);
    chat_control(s->job->out, think ? CHAT_THINK : CHAT_END_THINK);
}

static hd_status write_result(v32_state *s, const hd_chat_message *m, int32_t i) {
    chat_out *o = s->job->out;
    if (s->n_results >= s->n_calls) {
        return chat_fail(s->job->err, HD_EINVAL, hd_field_of("messages[%d]", m->index),
                         "a tool result without a call before it");
    }
    if (s->n_results++ == 0) chat_control(o, "\n\n<function_results>");
    chat_control(o, "\n<result>");
    chat_parts(o, m);
    chat_control(o, "</result>");
    if (s->n_results == s->n_calls) {
        chat_control(o, "\n</function_results>");
        open_answer(s, i, "\n\n", i >= s->last);
    }
    return HD_OK;
}

static hd_status write_developer(const v32_state *s, const hd_chat_message *m, int32_t i) {
    chat_out *o = s->job->out;
    if (m->n_parts == 1 && m->parts[0].text.n == 0) {
        return chat_refuse(s->job, m, "content", "wants text in a developer message");
    }
    chat_control(o, CHAT_USER);
    dsml_extras(o, m, &dialect);
    chat_control(o, "\n\n# The user's message is: ");
    chat_parts(o, m);
    open_answer(s, i, CHAT_ASSISTANT, i == s->last);
    return HD_OK;
}

static hd_status write_message(v32_state *s, const hd_chat_message *m, int32_t i) {
    chat_out *o = s->job->out;
    if (m->role == HD_CHAT_TOOL) return write_result(s, m, i);
    s->n_calls = m->n_calls;
    s->n_results = 0;
    if (m->role == HD_CHAT_DEVELOPER) return write_developer(s, m, i);
    if (m->role == HD_CHAT_ASSISTANT) {
        chat_begin_block(o, m, m->n_calls);
        if (s->job->options->thinking && i > s->last) chat_reasoning(o, m);
        chat_answer(o, m, CHAT_CUT_NONE);
        dsml_calls(o, m, &dialect);
        chat_end_block(o);
        chat_control(o, CHAT_EOS);
    } else if (m->role == HD_CHAT_USER) {
        chat_control(o, CHAT_USER);
        chat_parts(o, m);
        open_answer(s, i, CHAT_ASSISTANT, i == s->last);
    } else {
        chat_parts(o, m);
        dsml_extras(o, m, &dialect);
    }
    return HD_OK;
}

hd_status chat_render_v32(const chat_job *job) {
    hd_chat_message *m;
    v32_state s = {.job = job};
    hd_status st = dsml_messages(&m, &s.n, job, false);
    s.last = st == HD_OK ? dsml_last_user(m, s.n) : -1;
    /* developer messages of earlier turns are removed with their reasoning */
    if (job->options->thinking) {
        int32_t kept = 0;
        for (int32_t i = 0; i < s.n; i++) {
            if (m[i].role != HD_CHAT_DEVELOPER || i >= s.last) m[kept++] = m[i];
        }
        s.last -= s.n - kept;
        s.n = kept;
    }
    chat_control(job->out, CHAT_BOS);
    for (int32_t i = 0; i < s.n && st == HD_OK; i++) st = write_message(&s, &m[i], i);
    free(m);
    return st;
}
