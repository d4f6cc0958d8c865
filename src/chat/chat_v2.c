/* chat_v2.c - the chat of V2 and V2-Lite: names in plain text, no tools, no thinking. */
#include "chat/chat_internal.h"

hd_status chat_render_v2(const chat_job *job) {
    chat_out *o = job->out;
    if (job->c->tools) {
        return chat_fail(job->err, HD_EUNSUPPORTED, hd_field_of("tools"),
                         "the v2 encoding has no tools");
    }
    chat_control(o, CHAT_BOS);
    for (int32_t i = 0; i < job->c->n; i++) {
        const hd_chat_message *m = &job->c->messages[i];
        switch (m->role) {
        case HD_CHAT_SYSTEM:
        case HD_CHAT_DEVELOPER:
            chat_parts(o, m);
            chat_control(o, "\n\n");
            break;
        case HD_CHAT_USER:
            chat_control(o, "User: ");
            chat_parts(o, m);
            chat_control(o, "\n\n");
            break;
        case HD_CHAT_ASSISTANT:
            if (m->n_calls > 0) return chat_refuse(job, m, "tool_calls", "has no tools");
            chat_control(o, "Assistant:");
            chat_begin_block(o, m, 0);
            chat_control(o, " ");
            chat_answer(o, m, CHAT_CUT_NONE);
            chat_end_block(o);
            chat_control(o, CHAT_EOS);
            break;
        case HD_CHAT_TOOL:
        case HD_CHAT_LATEST_REMINDER:
        case HD_CHAT_N_ROLES:
            return chat_refuse(job, m, "role", "has no tools");
        }
    }
    if (!job->options->no_generation_prompt) chat_control(o, "Assistant:");
    return HD_OK;
}
