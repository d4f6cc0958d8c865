/* chat_v4.c - chat format of V4: tool results are blocks of the user's turn, the reasoning
 * effort stands at the front, and the preceding turn opens the assistant's. */
#include "chat/chat_internal.h"

#include <stdlib.h>
#include <string.h>

/* A rendered turn. A user turn merges consecutive results and user texts. */
typedef struct v4_turn {
    const hd_chat_message *m; /* gives role, task and, unless it is a user, content */
    hd_chat_task task;
    int32_t first_block, n_blocks; /* user turns only */
} v4_turn;

typedef struct v4_result {
    const hd_chat_message *m;
    int32_t order; /* place of its call */
} v4_result;

typedef struct v4_state {
    const chat_job *job;
    v4_turn *turns;
    const hd_chat_message **blocks; /* results and texts of all user turns */
    v4_result *results;             /* scratch: those of one turn */
    int32_t n, n_blocks;
    int32_t last; /* turn of a user or developer; -1: none */
    bool drop;    /* reasoning of turns before the last user's is left out */
} v4_state;

static void write_tools(chat_out *o, json_t *tools) {
    chat_control(
        o,
        "## Tools\n\n"
        "You have access to a set of tools to help answer the user's question. You can invoke "
        "tools by writing a \"<" CHAT_DSML "tool_calls>\" block like the following:\n\n"
        "<" CHAT_DSML "tool_calls>\n"
        "<" CHAT_DSML "invoke name=\"$TOOL_NAME\">\n"
        "<" CHAT_DSML "parameter name=\"$PARAMETER_NAME\" string=\"true|false\">"
        "$PARAMETER_VALUE</" CHAT_DSML "parameter>\n"
        "...\n"
        "</" CHAT_DSML "invoke>\n"
        "<" CHAT_DSML "invoke name=\"$TOOL_NAME2\">\n"
        "...\n"
        "</" CHAT_DSML "invoke>\n"
        "</" CHAT_DSML "tool_calls>\n\n"
        "String parameters should be specified as is and set `string=\"true\"`. For all other "
        "types (numbers, booleans, arrays, objects), pass the value in JSON format and set "
        "`string=\"false\"`.\n\n"
        "If thinking_mode is enabled (triggered by " CHAT_THINK "), you MUST output your "
        "complete reasoning inside " CHAT_THINK "..." CHAT_END_THINK
        " BEFORE any tool calls or "
        "final response.\n\n"
        "Otherwise, output directly after " CHAT_END_THINK " with tool calls or final "
        "response.\n\n"
        "### Available Tool Schemas\n\n");
    dsml_tool_lines(o, tools);
    chat_control(o, "\n\nYou MUST strictly follow the above defined tool name and parameter "
                    "schemas to invoke tool calls.\n");
}

static const char effort_absolute[] =
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to "
    "resolve the root cause, rigorously stress-testing your logic against all potential paths, "
    "edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate "
    "step, considered alternative, and rejected hypothesis to ensure absolutely no assumption "
    "is left unchecked.\n\n";

static const char effort_beyond[] =
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: "
    "exhaustively decompose the problem into its most fundamental components, trace every "
    "causal chain to its root, and resolve the underlying cause rather than any surface "
    "symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple "
    "angles and are certain that no assumption remains unchecked and no error remains "
    "undiscovered.\n\n";

static const char *effort_text(hd_chat_encoding encoding, hd_chat_effort effort) {
    bool three = encoding == HD_CHAT_V4_0731;
    switch (effort) {
    case HD_EFFORT_NONE:
    case HD_EFFORT_LOW:
        return "";
    case HD_EFFORT_HIGH:
        return three ? effort_absolute : "";
    case HD_EFFORT_MAX:
        return three ? effort_beyond : effort_absolute;
    }
    return "";
}

/* --- turns --- */

static void add_block(v4_state *s, const hd_chat_message *m) {
    v4_turn *t = s->n > 0 ? &s->turns[s->n - 1] : NULL;
    bool merges = t && t->n_blocks > 0 && (m->role == HD_CHAT_TOOL || t->task == HD_TASK_NONE);
    if (!merges) {
        t = &s->turns[s->n++];
        *t = (v4_turn){.m = m, .first_block = s->n_blocks};
        if (m->role == HD_CHAT_USER) t->task = m->task;
    }
    s->blocks[s->n_blocks++] = m;
    t->n_blocks++;
}

/* Returns the index of a result among the calls it may answer; unknown ids count as the
 * first. */
static int32_t call_order(const hd_chat_message *caller, hd_chat_text id) {
    for (int32_t i = caller->n_calls - 1; i >= 0 && id.n > 0; i--) {
        hd_chat_text known = caller->calls[i].id;
        if (known.n == id.n && memcmp(known.data, id.data, id.n) == 0) return i;
    }
    return 0;
}

static bool calls_have_ids(const hd_chat_message *m) {
    for (int32_t i = 0; i < m->n_calls; i++) {
        if (m->calls[i].id.n > 0) return true;
    }
    return false;
}

/* Results of one turn come in the order of their calls; texts between them keep their place. */
static void sort_results(const v4_state *s, const v4_turn *t, const hd_chat_message *caller) {
    const hd_chat_message **blocks = s->blocks + t->first_block;
    int32_t n = 0, place = 0;
    for (int32_t i = 0; i < t->n_blocks; i++) {
        if (blocks[i]->role != HD_CHAT_TOOL) continue;
        s->results[n++] = (v4_result){blocks[i], call_order(caller, blocks[i]->call_id)};
    }
    for (int32_t order = 0; order < caller->n_calls; order++) {
        for (int32_t i = 0; i < n; i++) {
            if (s->results[i].order != order) continue;
            while (blocks[place]->role != HD_CHAT_TOOL) place++;
            blocks[place++] = s->results[i].m;
        }
    }
}

static void make_turns(v4_state *s, const hd_chat_message *m, int32_t n) {
    bool any_tools = false;
    for (int32_t i = 0; i < n; i++) {
        any_tools = any_tools || m[i].tools;
        if (m[i].role == HD_CHAT_USER || m[i].role == HD_CHAT_TOOL) {
            add_block(s, &m[i]);
        } else {
            s->turns[s->n++] = (v4_turn){.m = &m[i], .task = m[i].task};
        }
    }
    s->drop = !any_tools;
}

static bool asks(const v4_turn *t) {
    return t->n_blocks > 0 || t->m->role == HD_CHAT_DEVELOPER;
}

static int32_t last_asking(const v4_state *s) {
    int32_t i = s->n - 1;
    while (i >= 0 && !asks(&s->turns[i])) i--;
    return i;
}

/* Removes developer messages of earlier turns along with their reasoning. */
static void drop_developers(v4_state *s) {
    int32_t kept = 0;
    for (int32_t i = 0; i < s->n; i++) {
        bool developer = s->turns[i].m->role == HD_CHAT_DEVELOPER;
        if (!developer || i >= s->last) s->turns[kept++] = s->turns[i];
    }
    s->last -= s->n - kept;
    s->n = kept;
}

/* --- text --- */

static void write_result(chat_out *o, const hd_chat_message *m) {
    chat_control(o, "<tool_result>");
    for (int32_t i = 0; i < m->n_parts; i++) {
        if (i > 0) chat_control(o, "\n\n");
        if (m->parts[i].unsupported) chat_content_bytes(o, "[Unsupported ", 13);
        chat_content(o, m->parts[i].text);
        if (m->parts[i].unsupported) chat_content_bytes(o, "]", 1);
    }
    chat_control(o, "</tool_result>");
}

static void write_user(const v4_state *s, const v4_turn *t) {
    chat_out *o = s->job->out;
    chat_control(o, CHAT_USER);
    for (int32_t i = 0; i < t->n_blocks; i++) {
        const hd_chat_message *block = s->blocks[t->first_block + i];
        if (i > 0) chat_control(o, "\n\n");
        if (block->role == HD_CHAT_TOOL) {
            write_result(o, block);
        } else {
            chat_parts(o, block);
        }
    }
}

static void write_assistant(const v4_state *s, int32_t i) {
    const hd_chat_message *m = s->turns[i].m;
    chat_out *o = s->job->out;
    bool answers_task = i > 0 && s->turns[i - 1].task != HD_TASK_NONE;
    chat_begin_block(o, m, m->n_calls);
    if (s->job->options->thinking && !answers_task && (!s->drop || i > s->last)) {
        chat_reasoning(o, m);
    }
    chat_answer(o, m, CHAT_CUT_NONE);
    dsml_calls(o, m, "tool_calls");
    chat_end_block(o);
    if (!m->wo_eos) chat_control(o, CHAT_EOS);
}

static hd_status write_body(const v4_state *s, int32_t i) {
    const v4_turn *t = &s->turns[i];
    chat_out *o = s->job->out;
    if (t->n_blocks > 0) {
        write_user(s, t);
    } else if (t->m->role == HD_CHAT_ASSISTANT) {
        write_assistant(s, i);
    } else if (t->m->role == HD_CHAT_LATEST_REMINDER) {
        chat_control(o, "<｜latest_reminder｜>");
        chat_parts(o, t->m);
    } else {
        bool developer = t->m->role == HD_CHAT_DEVELOPER;
        if (developer && t->m->n_parts == 1 && t->m->parts[0].text.n == 0) {
            return chat_refuse(s->job, t->m, "content", "wants text in a developer message");
        }
        if (developer) chat_control(o, CHAT_USER);
        chat_parts(o, t->m);
        dsml_extras(o, t->m, write_tools);
    }
    return HD_OK;
}

/* Writes what stands between a turn and the answer to it. */
static void open_answer(const v4_state *s, int32_t i) {
    static const char *const task_tokens[] = {
        [HD_TASK_NONE] = "",
        [HD_TASK_ACTION] = "<｜action｜>",
        [HD_TASK_QUERY] = "<｜query｜>",
        [HD_TASK_AUTHORITY] = "<｜authority｜>",
        [HD_TASK_DOMAIN] = "<｜domain｜>",
        [HD_TASK_TITLE] = "<｜title｜>",
        [HD_TASK_READ_URL] = "<｜read_url｜>",
    };
    const v4_turn *t = &s->turns[i];
    chat_out *o = s->job->out;
    bool think = s->job->options->thinking;
    if (t->task == HD_TASK_NONE) {
        if (!asks(t)) return;
        think = think && (!s->drop || i >= s->last);
    }
    if (t->task == HD_TASK_NONE || t->task == HD_TASK_ACTION) {
        chat_control(o, CHAT_ASSISTANT);
        chat_control(o, think ? CHAT_THINK : CHAT_END_THINK);
    }
    chat_control(o, task_tokens[t->task]);
}

static hd_status write_turn(const v4_state *s, int32_t i) {
    HD_TRY(write_body(s, i));
    if (i + 1 == s->n) {
        if (!s->job->options->no_generation_prompt) open_answer(s, i);
        return HD_OK;
    }
    const v4_turn *next = &s->turns[i + 1];
    bool answered = next->n_blocks == 0 && (next->m->role == HD_CHAT_ASSISTANT ||
                                            next->m->role == HD_CHAT_LATEST_REMINDER);
    if (answered) open_answer(s, i);
    return HD_OK;
}

static hd_status render(v4_state *s, const hd_chat_message *m, int32_t n) {
    const chat_job *job = s->job;
    const hd_chat_message *caller = NULL;
    s->turns = calloc((size_t)n, sizeof *s->turns);
    s->blocks = calloc((size_t)n, sizeof *s->blocks);
    s->results = calloc((size_t)n, sizeof *s->results);
    if (!s->turns || !s->blocks || !s->results) {
        return HD_FAIL(job->err, HD_ENOMEM, "no memory for %d messages", n);
    }
    make_turns(s, m, n);
    for (int32_t i = 0; i < s->n; i++) {
        const v4_turn *t = &s->turns[i];
        if (t->n_blocks > 1 && caller) sort_results(s, t, caller);
        if (t->m->n_calls > 0) caller = calls_have_ids(t->m) ? t->m : NULL;
    }
    s->last = last_asking(s);
    if (job->options->thinking && s->drop) drop_developers(s);
    chat_control(job->out, CHAT_BOS);
    if (job->options->thinking) {
        chat_control(job->out, effort_text(job->options->encoding, job->options->effort));
    }
    for (int32_t i = 0; i < s->n; i++) HD_TRY(write_turn(s, i));
    return HD_OK;
}

hd_status chat_render_v4(const chat_job *job) {
    hd_chat_message *m;
    int32_t n = 0;
    v4_state s = {.job = job};
    hd_status st = dsml_messages(&m, &n, job);
    if (st == HD_OK) st = render(&s, m, n);
    free(s.turns);
    free(s.blocks);
    free(s.results);
    free(m);
    return st;
}
