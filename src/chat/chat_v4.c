/* chat_v4.c - chat formats of V4 and V4.1: tool results are blocks of the user's turn, and the
 * reasoning effort stands at the front. In V4 the preceding turn opens the assistant's; V4.1
 * opens every answer, and may have a system message anywhere. */
#include "chat/chat_internal.h"

#include <stdio.h>
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
    const dsml_dialect *dialect;
    bool v41;
    int32_t last; /* turn of a user or developer; -1: none */
    int32_t kept; /* answers from this turn on keep their reasoning */
    bool drop;    /* those before leave it out */
} v4_state;

#define DIALECT(block_, invoke_, parameter_)                                                   \
    {                                                                                          \
        .block = (block_), .invoke = (invoke_), .parameter = (parameter_),                     \
        .before_tools =                                                                        \
            "## Tools\n\n"                                                                     \
            "You have access to a set of tools to help answer the user's question. You can "   \
            "invoke tools by writing a \"<" CHAT_DSML block_                                   \
            ">\" block like the following:\n\n"                                                \
            "<" CHAT_DSML block_ ">\n"                                                         \
            "<" CHAT_DSML invoke_ " name=\"$TOOL_NAME\">\n"                                    \
            "<" CHAT_DSML parameter_ " name=\"$PARAMETER_NAME\" string=\"true|false\">"        \
            "$PARAMETER_VALUE</" CHAT_DSML parameter_ ">\n"                                    \
            "...\n"                                                                            \
            "</" CHAT_DSML invoke_ ">\n"                                                       \
            "<" CHAT_DSML invoke_ " name=\"$TOOL_NAME2\">\n"                                   \
            "...\n"                                                                            \
            "</" CHAT_DSML invoke_ ">\n"                                                       \
            "</" CHAT_DSML block_ ">\n\n"                                                      \
            "String parameters should be specified as is and set `string=\"true\"`. For all "  \
            "other types (numbers, booleans, arrays, objects), pass the value in JSON format " \
            "and set `string=\"false\"`.\n\n"                                                  \
            "If thinking_mode is enabled (triggered by " CHAT_THINK "), you MUST output your " \
            "complete reasoning inside " CHAT_THINK "..." CHAT_END_THINK                       \
            " BEFORE any tool calls or final response.\n\n"                                    \
            "Otherwise, output directly after " CHAT_END_THINK " with tool calls or final "    \
            "response.\n\n"                                                                    \
            "### Available Tool Schemas\n\n",                                                  \
        .after_tools = "\n\nYou MUST strictly follow the above defined tool name and "         \
                       "parameter schemas to invoke tool calls.\n",                            \
    }

static const dsml_dialect v4_dialect = DIALECT("tool_calls", "invoke", "parameter");
static const dsml_dialect v41_dialect = DIALECT(" calls", " invoke", " parameter");

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

/* V4.1: whether the last turn is an answer that the model continues. */
static bool ends_open(const v4_state *s) {
    if (s->n == 0 || s->turns[s->n - 1].n_blocks > 0) return false;
    const hd_chat_message *m = s->turns[s->n - 1].m;
    return m->role == HD_CHAT_ASSISTANT && (m->wo_eos || m->prefix);
}

/* V4.1: whether an answer is opened behind the last turn. */
static bool opens_at_end(const v4_state *s) {
    return !s->job->options->no_generation_prompt && !ends_open(s);
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
    bool continued = m->wo_eos || (s->v41 && i == s->n - 1 && ends_open(s));
    chat_begin_block(o, m, m->n_calls);
    if (s->job->options->thinking && !answers_task && (!s->drop || i >= s->kept)) {
        chat_reasoning(o, m);
    }
    chat_answer(o, m, CHAT_CUT_NONE);
    dsml_calls(o, m, s->dialect);
    chat_end_block(o);
    if (!continued) chat_control(o, CHAT_EOS);
}

static hd_status write_system(const v4_state *s, int32_t i) {
    const hd_chat_message *m = s->turns[i].m;
    chat_out *o = s->job->out;
    bool developer = m->role == HD_CHAT_DEVELOPER && !s->v41;
    bool marked = i == 0 && s->job->options->thinking; /* before the effort */
    if (developer && m->n_parts == 1 && m->parts[0].text.n == 0) {
        return chat_refuse(s->job, m, "content", "wants text in a developer message");
    }
    if (developer) chat_control(o, CHAT_USER);
    if (s->v41 && !marked) chat_control(o, CHAT_SYSTEM);
    chat_parts(o, m);
    dsml_extras(o, m, s->dialect);
    return HD_OK;
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
        return write_system(s, i);
    }
    return HD_OK;
}

/* Writes what stands between turn i - 1, if there is one, and the answer to it. */
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
    chat_out *o = s->job->out;
    hd_chat_task task = i > 0 ? s->turns[i - 1].task : HD_TASK_NONE;
    bool think = s->job->options->thinking;
    if (task == HD_TASK_NONE) think = think && (!s->drop || i >= s->kept);
    if (task == HD_TASK_NONE || task == HD_TASK_ACTION) {
        chat_control(o, CHAT_ASSISTANT);
        chat_control(o, think ? CHAT_THINK : CHAT_END_THINK);
    }
    chat_control(o, task_tokens[task]);
}

/* V4: whether a turn opens the answer to it. */
static bool opens_answer(const v4_state *s, int32_t i) {
    if (s->turns[i].task == HD_TASK_NONE && !asks(&s->turns[i])) return false;
    if (i + 1 == s->n) return !s->job->options->no_generation_prompt;
    const v4_turn *next = &s->turns[i + 1];
    return next->n_blocks == 0 &&
           (next->m->role == HD_CHAT_ASSISTANT || next->m->role == HD_CHAT_LATEST_REMINDER);
}

static hd_status write_turns_v4(const v4_state *s) {
    for (int32_t i = 0; i < s->n; i++) {
        HD_TRY(write_body(s, i));
        if (opens_answer(s, i)) open_answer(s, i + 1);
    }
    return HD_OK;
}

static hd_status write_turns_v41(const v4_state *s) {
    for (int32_t i = 0; i < s->n; i++) {
        const v4_turn *t = &s->turns[i];
        if (t->n_blocks == 0 && t->m->role == HD_CHAT_ASSISTANT) open_answer(s, i);
        HD_TRY(write_body(s, i));
    }
    if (opens_at_end(s)) open_answer(s, s->n);
    return HD_OK;
}

static void write_effort_v41(chat_out *o, const hd_chat_options *options) {
    static const int32_t numbers[] = {[HD_EFFORT_NONE] = 75,
                                      [HD_EFFORT_LOW] = 50,
                                      [HD_EFFORT_HIGH] = 75,
                                      [HD_EFFORT_MAX] = 100};
    char line[128];
    snprintf(line, sizeof line,
             CHAT_SYSTEM "Reasoning Effort: %d (range 1-100, the higher the value, the more "
                         "thorough the reasoning)\n\n",
             options->effort_number ? options->effort_number : numbers[options->effort]);
    chat_control(o, line);
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
    if (job->options->thinking && s->drop && !s->v41) drop_developers(s);
    s->kept = s->v41 ? s->n - !opens_at_end(s) : s->last + 1;
    chat_control(job->out, CHAT_BOS);
    if (job->options->thinking && s->v41) {
        if (s->n > 0) write_effort_v41(job->out, job->options);
    } else if (job->options->thinking) {
        chat_control(job->out, effort_text(job->options->encoding, job->options->effort));
    }
    return s->v41 ? write_turns_v41(s) : write_turns_v4(s);
}

hd_status chat_render_v4(const chat_job *job) {
    hd_chat_message *m;
    int32_t n = 0;
    const bool v41 = job->options->encoding == HD_CHAT_V41;
    v4_state s = {.job = job, .v41 = v41, .dialect = v41 ? &v41_dialect : &v4_dialect};
    hd_status st = dsml_messages(&m, &n, job, v41);
    if (st == HD_OK) st = render(&s, m, n);
    free(s.turns);
    free(s.blocks);
    free(s.results);
    free(m);
    return st;
}
