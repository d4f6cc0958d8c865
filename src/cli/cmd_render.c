/* cmd_render.c - `hadal render`: prints the prompt text of a conversation, as the chat
 * template renders it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "chat/chat.h"

enum { MAX_FILE_BYTES = 64 << 20 };

static const char details[] =
    "FILE holds the OpenAI messages array, or an object with messages and perhaps tools and\n"
    "response_format; - is standard input. The prompt goes to standard output, no newline\n"
    "added.\n"
    "\n"
    "--encoding auto looks into DIR: the encoder scripts of V3.2 and V4, the chat template,\n"
    "config.json's model_type, then the added tokens of tokenizer.json, so a tokenizer alone\n"
    "will do. A V3-family tokenizer without a template means v3, a V4 model without its "
    "script\n"
    "v4 (v4-0731 has other levels of effort). --thinking is off unless the encoding thinks by\n"
    "default (r1, v4.1); encodings with one form only ignore it.";

typedef struct render {
    const char *dir, *messages, *tools, *response_format;
    const char *effort;     /* a level, or a number */
    int thinking, encoding; /* thinking: -1 as the encoding does; encoding: 0 auto */
    bool no_generation_prompt, spans;
    json_t *messages_json, *tools_json, *format_json;
    hd_err err;
} render;

static hd_status load(json_t **out, const char *path, hd_err *err) {
    char *text;
    size_t n;
    bool is_stdin = strcmp(path, "-") == 0;
    if (is_stdin) {
        HD_TRY(hd_stdin_read(&text, &n, MAX_FILE_BYTES, err));
    } else {
        HD_TRY(hd_file_read(&text, &n, path, MAX_FILE_BYTES, err));
    }
    hd_status st = hd_chat_parse_json(out, text, n, is_stdin ? "standard input" : path, err);
    free(text);
    return st;
}

/* Reads a member of the messages file, unless an option names a file of its own. */
static hd_status take_member(render *r, json_t **own, const char *key) {
    json_t *v = json_object_get(r->messages_json, key);
    if (!v) return HD_OK;
    if (*own) {
        return HD_FAIL(&r->err, HD_EINVAL, "%s: also holds %s, which have a file of their own",
                       r->messages, key);
    }
    *own = json_incref(v);
    return HD_OK;
}

static hd_status load_all(render *r) {
    if (!r->messages) return HD_FAIL(&r->err, HD_EINVAL, "hadal render needs --messages FILE");
    HD_TRY(load(&r->messages_json, r->messages, &r->err));
    if (r->tools) HD_TRY(load(&r->tools_json, r->tools, &r->err));
    if (r->response_format) HD_TRY(load(&r->format_json, r->response_format, &r->err));
    if (!json_is_object(r->messages_json)) return HD_OK;
    HD_TRY(take_member(r, &r->tools_json, "tools"));
    HD_TRY(take_member(r, &r->format_json, "response_format"));
    json_t *messages = json_incref(json_object_get(r->messages_json, "messages"));
    json_decref(r->messages_json);
    r->messages_json = messages;
    return HD_OK;
}

static hd_status print_spans(const hd_chat_prompt *p, hd_err *err) {
    json_t *all = json_array();
    for (int32_t i = 0; i < p->n_spans; i++) {
        const hd_text_span *s = &p->spans[i];
        json_t *text = json_stringn(p->text + s->start, s->n);
        json_array_append_new(all,
                              json_pack("{s:o, s:b}", "text", text, "control", s->is_control));
    }
    bool printed = json_dumpf(all, stdout, JSON_COMPACT) == 0;
    json_decref(all);
    return printed ? HD_OK : HD_FAIL(err, HD_EIO, "cannot write the spans");
}

static hd_status choose_effort(const render *r, hd_chat_options *o, hd_err *err) {
    static const char *const levels[] = {[HD_EFFORT_NONE] = "none",
                                         [HD_EFFORT_LOW] = "low",
                                         [HD_EFFORT_HIGH] = "high",
                                         [HD_EFFORT_MAX] = "max"};
    for (size_t i = 0; i < HD_LEN(levels); i++) {
        if (strcmp(r->effort, levels[i]) != 0) continue;
        o->effort = (hd_chat_effort)i;
        return HD_OK;
    }
    char *end;
    const long n = strtol(r->effort, &end, 10);
    if (*end || n < 1 || n > HD_MAX_EFFORT) {
        return HD_FAIL(err, HD_EINVAL,
                       "--effort: '%s' is not none, low, high, max or a number from 1 to %d",
                       r->effort, HD_MAX_EFFORT);
    }
    o->effort_number = (int32_t)n;
    return HD_OK;
}

static hd_status choose(render *r, hd_chat_options *o) {
    bool thinks;
    if (r->encoding == 0) {
        HD_TRY(hd_chat_detect(&o->encoding, &thinks, r->dir, &r->err));
    } else {
        o->encoding = (hd_chat_encoding)(r->encoding - 1);
        thinks = hd_chat_thinks(o->encoding);
    }
    o->thinking = r->thinking < 0 ? thinks : r->thinking == 1;
    o->no_generation_prompt = r->no_generation_prompt;
    return choose_effort(r, o, &r->err);
}

static hd_status run(render *r) {
    hd_chat_options o = {0};
    hd_conversation c = {0};
    hd_chat_prompt p = {0};
    HD_TRY(load_all(r));
    HD_TRY(choose(r, &o));
    HD_TRY(hd_chat_parse(&c, r->messages_json, r->tools_json, r->format_json, false, &r->err));
    hd_status st = hd_chat_render(&p, &c, &o, &r->err);
    if (st == HD_OK && r->spans) st = print_spans(&p, &r->err);
    if (st == HD_OK && !r->spans && fwrite(p.text, 1, p.n, stdout) != p.n) {
        st = HD_FAIL(&r->err, HD_EIO, "cannot write the prompt");
    }
    hd_chat_prompt_deinit(&p);
    hd_conversation_deinit(&c);
    return st;
}

int cmd_render(int argc, char **argv) {
    static const char *const switches[] = {"off", "on", NULL};
    const char *names[HD_CHAT_N_ENCODINGS + 2] = {"auto"};
    for (int i = 0; i < HD_CHAT_N_ENCODINGS; i++) {
        names[i + 1] = hd_chat_encoding_name((hd_chat_encoding)i);
    }
    render r = {.thinking = -1, .effort = "none"};
    const positional positionals[] = {
        {"DIR", &r.dir, false, POSITIONAL_TEXT}
    };
    const option options[] = {
        {.name = "messages",
         .kind = OPTION_TEXT,
         .value = &r.messages,
         .metavar = "FILE",
         .help = "the conversation"},
        {.name = "tools",
         .kind = OPTION_TEXT,
         .value = &r.tools,
         .metavar = "FILE",
         .help = "OpenAI tools array"},
        {.name = "response-format",
         .kind = OPTION_TEXT,
         .value = &r.response_format,
         .metavar = "FILE",
         .help = "JSON object the answer must follow (v3.2 and later)"},
        {.name = "thinking",
         .kind = OPTION_CHOICE,
         .value = &r.thinking,
         .metavar = "S",
         .help = "whether the answer opens with reasoning",
         .choices = switches},
        {.name = "effort",
         .kind = OPTION_TEXT,
         .value = &r.effort,
         .metavar = "E",
         .help = "none, low, high, max (v4), or 1 to 100 (v4.1)"},
        {.name = "no-generation-prompt",
         .kind = OPTION_FLAG,
         .value = &r.no_generation_prompt,
         .help = "stop after the last message"                                                                    },
        {.name = "encoding",
         .kind = OPTION_CHOICE,
         .value = &r.encoding,
         .metavar = "NAME",
         .help = "instead of what DIR says",
         .choices = names},
        {.name = "spans",
         .kind = OPTION_FLAG,
         .value = &r.spans,
         .help = "print a JSON array of {text, control} instead"                                                              },
    };
    const command_line line = {.command = "render",
                               .summary = "Prints the prompt text of a conversation.",
                               .details = details,
                               .positionals = positionals,
                               .n_positionals = 1,
                               .options = options,
                               .n_options = (int)HD_LEN(options)};
    int code;
    if (!options_parse(&line, argc, argv, &code)) return code;
    hd_status st = run(&r);
    json_decref(r.messages_json);
    json_decref(r.tools_json);
    json_decref(r.format_json);
    return st == HD_OK ? 0 : report_error(&r.err);
}
