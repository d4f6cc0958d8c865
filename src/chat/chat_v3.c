/* chat_v3.c - chat templates of V3, V3-0324, R1 and R1-0528: one format, four templates that
 * differ in how an answer opens and what of it is kept. The published V3 template leaves
 * tool calls unclosed or closes them twice, and writes later outputs outside any block. This
 * writer closes them properly. */
#include "chat/chat_internal.h"

typedef struct v3_dialect {
    bool user_opens;    /* the user turn ends with the assistant's marker */
    bool keeps_text;    /* text beside tool calls is written; otherwise instead of them */
    bool opens_think;   /* a thinking prompt ends with <think> and LF */
    chat_think_cut cut; /* reasoning removed from answers */
    bool cuts_always;   /* removed also from answers with tool calls or behind outputs */
} v3_dialect;

static const v3_dialect dialects[HD_CHAT_N_ENCODINGS] = {
    [HD_CHAT_V3] = {false, false, false, CHAT_CUT_NONE, false},
    [HD_CHAT_V3_0324] = {true,  true,  false, CHAT_CUT_NONE, false},
    [HD_CHAT_R1] = {false, true,  true,  CHAT_CUT_LAST, false},
    [HD_CHAT_R1_0528] = {true,  true,  false, CHAT_CUT_LAST, true },
};

/* Describes the functions as in the V2.5 model card, the last to document them. */
static void write_tools(chat_out *o, json_t *tools) {
    size_t i;
    json_t *tool;
    chat_control(o,
                 "## Tools\n\n### Function\n\nYou have the following functions available:\n");
    json_array_foreach(tools, i, tool) {
        json_t *function = json_object_get(tool, "function");
        json_t *name = json_object_get(function, "name");
        chat_control(o, "\n- `");
        chat_content_bytes(o, json_string_value(name), json_string_length(name));
        chat_control(o, "`:\n```json\n");
        pyjson_write(o, function, 4);
        chat_control(o, "\n```\n");
    }
}

static void write_calls(chat_out *o, const hd_chat_message *m) {
    chat_control(o, CHAT_CALLS_BEGIN);
    for (int32_t i = 0; i < m->n_calls; i++) {
        if (i > 0) chat_control(o, "\n");
        chat_control(o, CHAT_CALL_BEGIN "function" CHAT_CALL_SEP);
        chat_content(o, m->calls[i].name);
        chat_control(o, "\n```json\n");
        chat_arguments(o, &m->calls[i]);
        chat_control(o, "\n```" CHAT_CALL_END);
    }
    chat_control(o, CHAT_CALLS_END);
}

static void write_assistant(chat_out *o, const v3_dialect *d, const hd_chat_message *m,
                            bool after_outputs) {
    bool calls = m->n_calls > 0 && (d->keeps_text || !m->has_content);
    bool cut = d->cuts_always || !(calls || after_outputs);
    if (after_outputs) {
        chat_control(o, CHAT_OUTPUTS_END);
    } else if (!d->user_opens) {
        chat_control(o, CHAT_ASSISTANT);
    }
    chat_begin_block(o, m, calls ? m->n_calls : 0);
    chat_answer(o, m, cut ? d->cut : CHAT_CUT_NONE);
    if (calls) write_calls(o, m);
    chat_end_block(o);
    chat_control(o, CHAT_EOS);
}

hd_status chat_render_v3(const chat_job *job) {
    const v3_dialect *d = &dialects[job->options->encoding];
    chat_out *o = job->out;
    bool any_system, in_outputs = false, opened = false;
    chat_control(o, CHAT_BOS);
    chat_system_texts(job, &any_system);
    if (job->c->tools) {
        if (any_system) chat_control(o, "\n\n");
        write_tools(o, job->c->tools);
    }
    for (int32_t i = 0; i < job->c->n; i++) {
        const hd_chat_message *m = &job->c->messages[i];
        if (m->role == HD_CHAT_USER) {
            chat_control(o, CHAT_USER);
            chat_parts(o, m);
            if (d->user_opens) chat_control(o, CHAT_ASSISTANT);
            opened = d->user_opens;
            in_outputs = false;
        } else if (m->role == HD_CHAT_ASSISTANT) {
            write_assistant(o, d, m, in_outputs);
            opened = in_outputs = false;
        } else if (m->role == HD_CHAT_TOOL) {
            chat_control(o, in_outputs ? "\n" CHAT_OUTPUT_BEGIN
                                       : CHAT_OUTPUTS_BEGIN CHAT_OUTPUT_BEGIN);
            chat_parts(o, m);
            chat_control(o, CHAT_OUTPUT_END);
            opened = false;
            in_outputs = true;
        }
    }
    if (in_outputs) {
        chat_control(o, CHAT_OUTPUTS_END);
    } else if (!job->options->no_generation_prompt) {
        bool think = job->options->thinking && d->opens_think;
        if (!opened) chat_control(o, CHAT_ASSISTANT);
        if (think) chat_control(o, CHAT_THINK "\n");
    }
    return HD_OK;
}
