/* cmd_generate.c - one answer to one prompt: text to stdout as it comes, figures to stderr. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/json.h"
#include "base/progress.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "hadal.h"

enum { MAX_PROMPT_BYTES = 64 << 20 };

typedef struct settings {
    const char *model_dir, *prompt, *file, *system, *stop;
    int64_t max_tokens, context, seed, top_k, draft_tokens, chunk, threads;
    double temperature, top_p, min_p;
    int backend, thinking;
    bool raw, json, quiet;
} settings;

/* What is said about a run when it is over. */
typedef struct figures {
    int64_t start_ns, first_ns, end_ns;
    int32_t prompt_tokens, cached_tokens, output_tokens, drafted, accepted;
    hd_end end;
} figures;

static const char *end_name(hd_end end) {
    static const char *const names[] = {"running",   "stop",    "length",
                                        "cancelled", "timeout", "failed"};
    return names[end];
}

/* [{"role": "system", ...}, {"role": "user", ...}] as malloc'ed text. */
static char *as_messages(const char *system, const char *user) {
    json_t *list = json_array();
    if (system) {
        json_array_append_new(list,
                              json_pack("{s:s, s:s}", "role", "system", "content", system));
    }
    json_array_append_new(list, json_pack("{s:s, s:s}", "role", "user", "content", user));
    char *text = json_dumps(list, JSON_COMPACT);
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

static void take_figures(figures *f, const hd_event *e) {
    f->prompt_tokens = e->prompt_tokens;
    f->cached_tokens = e->cached_tokens;
    f->output_tokens = e->output_tokens;
    f->drafted = e->drafted;
    f->accepted = e->accepted;
    f->end = e->end;
    f->end_ns = hd_now_ns();
    if (!f->first_ns) f->first_ns = f->end_ns;
}

/* Streams the answer; with --json it is collected instead and printed as one object. */
static bool follow(hd_engine *engine, const settings *set, figures *f, char **collected) {
    hd_event e;
    size_t n = 0;
    while (hd_engine_poll(engine, &e, -1)) {
        take_figures(f, &e);
        if (set->json) {
            char *grown = realloc(*collected, n + e.n_text + 1);
            if (!grown) return false;
            *collected = grown;
            memcpy(grown + n, e.text, e.n_text);
            n += e.n_text;
            grown[n] = '\0';
        } else {
            fwrite(e.text, 1, e.n_text, stdout);
            fflush(stdout);
        }
        if (e.end != HD_END_NOT) return e.end != HD_END_FAILED;
    }
    return false;
}

static double seconds(int64_t ns) {
    return (double)ns * 1e-9;
}

static void print_figures(const figures *f) {
    const double first = seconds(f->first_ns - f->start_ns);
    const double rest = seconds(f->end_ns - f->first_ns);
    fprintf(stderr, "\n%d prompt tokens, first token after %.3f s; %d tokens", f->prompt_tokens,
            first, f->output_tokens);
    if (f->output_tokens > 1 && rest > 0)
        fprintf(stderr, " at %.1f/s", (f->output_tokens - 1) / rest);
    if (f->drafted) fprintf(stderr, "; %d of %d drafts accepted", f->accepted, f->drafted);
    fprintf(stderr, "; %s\n", end_name(f->end));
}

static void print_json(const figures *f, const char *text) {
    json_t *o = json_pack("{s:s, s:s, s:i, s:i, s:i, s:i, s:i, s:f, s:f}", "text",
                          text ? text : "", "finish", end_name(f->end), "prompt_tokens",
                          f->prompt_tokens, "cached_tokens", f->cached_tokens, "output_tokens",
                          f->output_tokens, "drafted", f->drafted, "accepted", f->accepted,
                          "first_token_seconds", seconds(f->first_ns - f->start_ns), "seconds",
                          seconds(f->end_ns - f->start_ns));
    char *dump = json_dumps(o, JSON_COMPACT | JSON_ENSURE_ASCII);
    puts(dump ? dump : "{}");
    free(dump);
    json_decref(o);
}

static hd_status generate(const settings *set, const char *prompt, hd_err *err) {
    char why[600];
    hd_engine *engine;
    figures f = {.start_ns = hd_now_ns()};
    const hd_engine_options options = {.size = sizeof options,
                                       .model_dir = set->model_dir,
                                       .backend = option_backends[set->backend],
                                       .threads = (int32_t)set->threads,
                                       .max_running = 1,
                                       .max_context = (int32_t)set->context,
                                       .chunk_tokens = (int32_t)set->chunk};
    const int opened = hd_engine_open(&engine, &options, why, sizeof why);
    if (opened != 0) return HD_FAIL(err, (hd_status)opened, "%s", why);
    char *messages = set->raw ? NULL : as_messages(set->system, prompt);
    const hd_generation g = {.size = sizeof g,
                             .text = set->raw ? prompt : NULL,
                             .messages = messages,
                             .thinking = set->thinking == 0   ? 0
                                         : set->thinking == 1 ? 1
                                                              : -1,
                             .max_tokens = (int32_t)set->max_tokens,
                             .draft_tokens = (int32_t)set->draft_tokens,
                             .temperature = (float)set->temperature,
                             .top_p = (float)set->top_p,
                             .min_p = (float)set->min_p,
                             .top_k = (int32_t)set->top_k,
                             .seed = (uint64_t)set->seed,
                             .stop = &set->stop,
                             .n_stop = set->stop != NULL};
    char *collected = NULL;
    hd_status st = HD_OK;
    if (!hd_engine_submit(engine, &g, NULL, why, sizeof why)) {
        st = HD_FAIL(err, HD_EINVAL, "%s", why);
    } else if (!follow(engine, set, &f, &collected)) {
        st = HD_FAIL(err, HD_EDEVICE, "the computation failed");
    } else if (set->json) {
        print_json(&f, collected);
    } else if (!set->quiet) {
        print_figures(&f);
    }
    free(collected);
    free(messages);
    hd_engine_close(engine);
    return st;
}

int cmd_generate(int argc, char **argv) {
    static const char *const thinking[] = {"auto", "on", "off", NULL};
    settings set = {.temperature = 0, .top_p = 1};
    const option options[] = {
        with_letter(option_text("prompt", &set.prompt, "TEXT", "what to answer"), 'p'),
        with_letter(option_text("file", &set.file, "FILE", "a file that holds it; - for stdin"),
                    'f'),
        option_text("system", &set.system, "TEXT", "system message"),
        option_flag("raw", &set.raw, "continue the text itself, without the chat encoding"),
        option_choice("thinking", &set.thinking, thinking, "reason first"),
        option_int("max-tokens", &set.max_tokens, 0, INT32_MAX,
                   "at most; 0: what the context leaves"),
        option_int("context", &set.context, 0, INT32_MAX,
                   "tokens of prompt and answer; 0: 8192"),
        option_real("temperature", &set.temperature, 0, 100, "0: greedy"),
        option_real("top-p", &set.top_p, 0, 1, "smallest set of this probability"),
        option_int("top-k", &set.top_k, 0, INT32_MAX, "K most probable tokens; 0: all"),
        option_real("min-p", &set.min_p, 0, 1,
                    "tokens of this share of the best one's probability"),
        option_int("seed", &set.seed, 0, INT64_MAX, "of the random numbers"),
        option_text("stop", &set.stop, "TEXT", "end the answer before this text"),
        option_int("draft-tokens", &set.draft_tokens, 0, 7, "drafts per step by the MTP layer"),
        option_int("chunk", &set.chunk, 0, 1 << 20, "prompt tokens per step; 0: 256"),
        option_int("threads", &set.threads, 0, 1024, "0: one per processor"),
        option_choice("backend", &set.backend, option_backends,
                      "the fast one, a GPU, or the reference"),
        option_flag("json", &set.json, "print one JSON object with the text and the figures"),
        with_letter(option_flag("quiet", &set.quiet, "no figures on standard error"), 'q'),
    };
    const positional model = {"MODEL_DIR", &set.model_dir, false};
    const command_line line = {.command = "generate",
                               .summary = "Answers one prompt.",
                               .positionals = &model,
                               .n_positionals = 1,
                               .options = options,
                               .n_options = (int)HD_LEN(options)};
    int code;
    if (!options_parse(&line, argc, argv, &code)) return code;
    hd_err err = {0};
    char *prompt = NULL;
    hd_status st = read_prompt(&set, &prompt, &err);
    if (st == HD_OK) st = generate(&set, prompt, &err);
    free(prompt);
    return st == HD_OK ? 0 : report_error(&err);
}
