/* cmd_generate.c - `hadal generate`: completes one prompt; text is streamed to stdout,
 * statistics go to stderr. The text is the model's output: reasoning, the marker that ends
 * it, content. On a terminal it is wrapped by words; reasoning is dimmed or labelled and
 * ends with an empty line instead. Several choices are printed in order, with an empty line
 * between them, or as one JSON object per line. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/json.h"
#include "base/progress.h"
#include "cli/commands.h"
#include "cli/engine_options.h"
#include "cli/terminal/prompt_bar.h"
#include "cli/request_options.h"
#include "cli/terminal/screen.h"
#include "hadal.h"
#include "tokenizer/tokenizer.h"

enum { MAX_PROMPT_BYTES = 64 << 20, MAX_CHOICES = 1000 };

typedef struct settings {
    engine_settings engine;
    const char *prompt, *file, *system, *stop, *schema, *regex, *choice;
    int64_t max_tokens, max_reasoning, seed, top_k, n;
    double temperature, top_p, min_p;
    int thinking;
    bool raw, json, quiet;
} settings;

/* One choice: its text as stdout shows it, and its parts. */
typedef struct answer {
    bool streams;   /* printed to stdout when it arrives */
    bool reasoning; /* the last text was reasoning */
    screen out;
    hd_bytes text;
    json_t *parts; /* [{"kind", "text", "call"}] */
    hd_event end;
    int64_t end_ns;
} answer;

typedef struct run {
    hd_engine *engine;
    answer *answers; /* [n] */
    int32_t n;
    int64_t start_ns, first_ns;
} run;

static const char *finish_name(const hd_event *e) {
    static const char *const names[] = {"running",   "stop",    "length",
                                        "cancelled", "timeout", "failed"};
    return names[e->step.finish_reason];
}

/* [{"role": "system", ...}, {"role": "user", ...}] as malloc'ed text. */
static char *as_messages(const char *system, const char *user) {
    json_t *list = json_array();
    if (system) {
        json_array_append_new(list,
                              json_pack("{s:s, s:s}", "role", "system", "content", system));
    }
    json_array_append_new(list, json_pack("{s:s, s:s}", "role", "user", "content", user));
    char *text = hd_json_write(list, JSON_COMPACT);
    json_decref(list);
    return text;
}

static hd_status read_prompt(const settings *set, char **out, hd_err *err) {
    size_t n;
    if ((set->prompt != NULL) == (set->file != NULL)) {
        return HD_FAIL(err, HD_EINVAL,
                       "hadal generate needs either --prompt TEXT or --file FILE");
    }
    if (set->prompt) {
        *out = strdup(set->prompt);
        return *out ? HD_OK : HD_FAIL(err, HD_ENOMEM, "no memory for the prompt");
    }
    const bool stdin_wanted = strcmp(set->file, "-") == 0;
    HD_TRY(stdin_wanted ? hd_stdin_read(out, &n, MAX_PROMPT_BYTES, err)
                        : hd_file_read(out, &n, set->file, MAX_PROMPT_BYTES, err));
    if (strlen(*out) == n) return HD_OK;
    return HD_FAIL(err, HD_EINVAL, "the prompt holds a NUL byte at %zu", strlen(*out));
}

/* ---- deltas ---- */

static bool say(answer *a, const char *text, size_t n) {
    if (a->streams) screen_write(&a->out, text, n);
    return hd_bytes_append(&a->text, text, n, NULL) == HD_OK;
}

/* Between reasoning and content a terminal shows an empty line. A pipe and the stored text get
 * the model's marker. */
static bool change(answer *a, bool reasoning) {
    static const char mark[] = "</think>";
    if (a->streams && a->out.width) screen_turn_to(&a->out, reasoning);
    if (a->reasoning == reasoning) return true;
    a->reasoning = reasoning;
    if (reasoning) return true;
    if (a->streams && !a->out.width) return say(a, mark, sizeof mark - 1);
    return hd_bytes_append(&a->text, mark, sizeof mark - 1, NULL) == HD_OK;
}

/* Joins the pieces of one part. */
static bool keep_part(answer *a, const hd_delta *p) {
    static const char *const kinds[] = {"reasoning", "content",  "call",
                                        "arguments", "call_end", "note"};
    const size_t n = json_array_size(a->parts);
    json_t *last = n ? json_array_get(a->parts, n - 1) : NULL, *text;
    const char *kind = kinds[p->kind];
    const char *before = json_string_value(json_object_get(last, "kind"));
    const bool grows = p->kind <= HD_DELTA_CONTENT || p->kind == HD_DELTA_ARGUMENTS;
    if (grows && before && strcmp(before, kind) == 0) {
        text = json_object_get(last, "text");
        json_t *longer =
            json_pack("s%+%", json_string_value(text), json_string_length(text), p->text, p->n);
        return json_object_set_new(last, "text", longer) == 0;
    }
    text = json_stringn(p->text, p->n);
    json_t *part = json_pack("{s:s, s:o}", "kind", kind, "text", text);
    const bool call = p->kind >= HD_DELTA_CALL && p->kind <= HD_DELTA_CALL_END;
    if (call) json_object_set_new(part, "call", json_integer(p->call));
    if (p->kind == HD_DELTA_CALL_END)
        json_object_set_new(part, "whole", json_boolean(p->whole));
    return json_array_append_new(a->parts, part) == 0;
}

static hd_status take_event(run *r, const hd_event *e, bool json, hd_err *err) {
    answer *a = &r->answers[e->choice];
    bool ok = true;
    for (size_t i = 0; i < e->n_deltas && ok; i++) {
        const hd_delta *p = &e->deltas[i];
        if (json) ok = keep_part(a, p);
        if (p->kind != HD_DELTA_REASONING && p->kind != HD_DELTA_CONTENT) continue;
        ok = ok && change(a, p->kind == HD_DELTA_REASONING) && say(a, p->text, p->n);
    }
    if (a->streams) fflush(stdout);
    a->end = *e;
    a->end_ns = hd_now_ns();
    if (!r->first_ns) r->first_ns = a->end_ns;
    if (e->step.finish_reason == HD_FINISH_ERROR) return HD_FAIL(err, HD_EDEVICE, "%s", e->why);
    return ok ? HD_OK : HD_FAIL(err, HD_ENOMEM, "no memory for the response");
}

static hd_status follow(run *r, const settings *set, hd_err *err) {
    prompt_bar bar = {.quiet = set->quiet || set->json};
    hd_event e = {0};
    hd_status st = HD_OK;
    while (!e.last && st == HD_OK) {
        if (!hd_engine_poll(r->engine, &e, PROMPT_BAR_LOOK_NS)) {
            prompt_bar_draw(&bar, r->engine);
            continue;
        }
        prompt_bar_end(&bar);
        st = take_event(r, &e, set->json, err);
    }
    if (r->answers[0].streams) screen_end(&r->answers[0].out);
    fflush(stdout);
    return st;
}

/* ---- the summary ---- */

static double seconds(int64_t ns) {
    return (double)ns * 1e-9;
}

static void print_figures(const run *r) {
    int32_t tokens = 0, drafted = 0, accepted = 0;
    int64_t end_ns = r->first_ns;
    for (int32_t i = 0; i < r->n; i++) {
        const answer *a = &r->answers[i];
        tokens += a->end.output_tokens;
        drafted += a->end.drafted;
        accepted += a->end.accepted;
        if (a->end_ns > end_ns) end_ns = a->end_ns;
    }
    const double rest = seconds(end_ns - r->first_ns);
    fprintf(stderr, "\n%d prompt tokens, first token after %.3f s; %d tokens",
            r->answers[0].end.prompt_tokens, seconds(r->first_ns - r->start_ns), tokens);
    if (tokens > r->n && rest > 0) fprintf(stderr, " at %.1f/s", (tokens - r->n) / rest);
    if (drafted) fprintf(stderr, "; %d of %d drafts accepted", accepted, drafted);
    if (r->n > 1) fprintf(stderr, "; %d answers", r->n);
    fprintf(stderr, "; %s\n", finish_name(&r->answers[0].end));
}

static void print_json(const run *r, int32_t i) {
    const answer *a = &r->answers[i];
    const hd_event *e = &a->end;
    json_t *o = json_pack(
        "{s:i, s:s%, s:O, s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:f, s:f}", "answer", i, "text",
        a->text.n ? a->text.data : "", a->text.n, "parts", a->parts, "finish", finish_name(e),
        "prompt_tokens", e->prompt_tokens, "cached_tokens", e->step.n_cached, "output_tokens",
        e->output_tokens, "reasoning_tokens", e->reasoning_tokens, "drafted", e->drafted,
        "accepted", e->accepted, "first_token_seconds", seconds(r->first_ns - r->start_ns),
        "seconds", seconds(a->end_ns - r->start_ns));
    char *dump = hd_json_write(o, JSON_COMPACT | JSON_ENSURE_ASCII);
    puts(dump ? dump : "{}");
    free(dump);
    json_decref(o);
}

static void print_run(const run *r, const settings *set) {
    for (int32_t i = 0; i < r->n; i++) {
        const answer *a = &r->answers[i];
        if (set->json) {
            print_json(r, i);
        } else if (!a->streams) {
            if (i > 0) fputs("\n\n", stdout);
            fwrite(a->text.data, 1, a->text.n, stdout);
        }
    }
    if (!set->json && !set->quiet) print_figures(r);
}

/* ---- the request ---- */

/* Splits text at every bar; the pieces point into it. */
static size_t split_choices(char *text, const char **out, size_t max) {
    size_t n = 0;
    for (char *at = text; at && n < max; n++) {
        char *bar = strchr(at, '|');
        if (bar) *bar++ = '\0';
        out[n] = at;
        at = bar;
    }
    return n;
}

typedef struct format_texts {
    char *text;
    const char *choices[MAX_CHOICES];
} format_texts;

static hd_status set_response_format(hd_request *g, format_texts *f, const settings *set,
                                     hd_err *err) {
    const int n = (set->schema != NULL) + (set->regex != NULL) + (set->choice != NULL);
    if (n > 1) return HD_FAIL(err, HD_EINVAL, "give one of --schema, --regex and --choice");
    if (set->schema) {
        size_t bytes;
        HD_TRY(hd_file_read(&f->text, &bytes, set->schema, MAX_PROMPT_BYTES, err));
        g->response_format = HD_FORMAT_JSON_SCHEMA;
        g->format_text = f->text;
    } else if (set->regex) {
        g->response_format = HD_FORMAT_REGEX;
        g->format_text = set->regex;
    } else if (set->choice) {
        f->text = strdup(set->choice);
        if (!f->text) return HD_FAIL(err, HD_ENOMEM, "no memory for choices");
        g->response_format = HD_FORMAT_CHOICE;
        g->choices = f->choices;
        g->n_choices = split_choices(f->text, f->choices, MAX_CHOICES);
    }
    return HD_OK;
}

static hd_status submit(run *r, const settings *set, const char *prompt, hd_err *err) {
    char why[600];
    format_texts texts = {0};
    char *messages = set->raw ? NULL : as_messages(set->system, prompt);
    hd_request g = {.size = sizeof g,
                    .text = set->raw ? prompt : NULL,
                    .messages = messages,
                    .thinking = set->thinking == 2 ? -1 : set->thinking,
                    .n = r->n,
                    .max_tokens = (int32_t)set->max_tokens,
                    .max_reasoning = (int32_t)set->max_reasoning,
                    .draft_tokens = set->engine.draft_tokens,
                    .temperature = (float)set->temperature,
                    .top_p = (float)set->top_p,
                    .min_p = (float)set->min_p,
                    .top_k = (int32_t)set->top_k,
                    .seed = (uint64_t)set->seed,
                    .stop = &set->stop,
                    .n_stop = set->stop != NULL};
    hd_status st = set_response_format(&g, &texts, set, err);
    if (st == HD_OK && !hd_engine_submit(r->engine, &g, NULL, why, sizeof why)) {
        st = HD_FAIL(err, HD_EINVAL, "%s", why);
    }
    free(texts.text);
    free(messages);
    return st;
}

static hd_status open_run(run *r, const settings *set, hd_err *err) {
    engine_settings engine = set->engine;
    if (!engine.options.max_running) engine.options.max_running = r->n;
    r->start_ns = hd_now_ns();
    r->answers = calloc((size_t)r->n, sizeof *r->answers);
    if (!r->answers) return HD_FAIL(err, HD_ENOMEM, "no memory for %d choices", r->n);
    for (int32_t i = 0; i < r->n; i++) {
        r->answers[i].streams = !set->json && r->n == 1;
        r->answers[i].parts = json_array();
        screen_open(&r->answers[i].out, stdout);
    }
    return engine_settings_open(&r->engine, &engine, set->quiet || set->json, err);
}

static hd_status generate(const settings *set, const char *prompt, hd_err *err) {
    run r = {.n = (int32_t)set->n};
    hd_status st = open_run(&r, set, err);
    if (st == HD_OK) st = submit(&r, set, prompt, err);
    if (st == HD_OK) st = follow(&r, set, err);
    if (st == HD_OK) print_run(&r, set);
    for (int32_t i = 0; r.answers && i < r.n; i++) {
        json_decref(r.answers[i].parts);
        hd_bytes_deinit(&r.answers[i].text);
    }
    free(r.answers);
    hd_engine_close(r.engine);
    return st;
}

int cmd_generate(int argc, char **argv) {
    static const char *const thinking[] = {"auto", "on", "off", NULL};
    settings set = {.engine = engine_settings_default(), .top_p = 1, .n = 1};
    const option options[] = {
        with_letter(option_text("prompt", &set.prompt, "TEXT", "what to answer"), 'p'),
        with_letter(option_text("file", &set.file, "FILE", "a file that holds it; - for stdin"),
                    'f'),
        option_text("system", &set.system, "TEXT", "system message"),
        option_flag("raw", &set.raw, "continue the text itself, without the chat encoding"),
        option_choice("thinking", &set.thinking, thinking, "reason first"),
        option_max_tokens(&set.max_tokens, "at most; 0: what the context leaves"),
        option_max_reasoning(&set.max_reasoning),
        option_temperature(&set.temperature),
        option_top_p(&set.top_p),
        option_top_k(&set.top_k),
        option_min_p(&set.min_p),
        option_int("seed", &set.seed, 0, INT64_MAX, "of the random numbers"),
        option_text("stop", &set.stop, "TEXT", "end the output before this text"),
        option_int("n", &set.n, 1, HD_MAX_CHOICES, "choices, with seeds that count up"),
        option_text("schema", &set.schema, "FILE", "the output is JSON of this schema"),
        option_text("regex", &set.regex, "PATTERN", "the output matches this pattern"),
        option_text("choice", &set.choice, "A|B|C", "the output is one of these"),
        option_flag("json", &set.json,
                    "print one JSON object per choice: text, parts, figures"),
        with_letter(option_flag("quiet", &set.quiet, "no figures on standard error"), 'q'),
    };
    const positional model = {"MODEL_DIR", &set.engine.options.model_dir, false,
                              POSITIONAL_MODEL};
    const command_line line = {.command = "generate",
                               .summary = "Answers a prompt.",
                               .positionals = &model,
                               .n_positionals = 1,
                               .options = options,
                               .n_options = (int)HD_LEN(options)};
    int code;
    if (!engine_options_parse(&line, ENGINE_GENERATE, &set.engine, argc, argv, &code))
        return code;
    hd_err err = {0};
    char *prompt = NULL;
    hd_status st = read_prompt(&set, &prompt, &err);
    if (st == HD_OK) st = generate(&set, prompt, &err);
    free(prompt);
    return st == HD_OK ? 0 : report_error(&err);
}
