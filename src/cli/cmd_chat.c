/* cmd_chat.c - `hadal chat`: an interactive conversation on the terminal, with /commands. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <jansson.h>

#include "base/file.h"
#include "base/json.h"
#include "cli/answer.h"
#include "cli/commands.h"
#include "cli/engine_options.h"
#include "cli/terminal/line_editor.h"
#include "cli/request_options.h"

enum { MAX_FILE_BYTES = 16 << 20, MAX_PATH = 4096 };

typedef struct chat_settings {
    engine_settings engine;
    const char *system;
    int64_t max_tokens, seed, top_k;
    double temperature, top_p, min_p;
    int thinking;
    bool quiet;
} chat_settings;

typedef struct chat {
    chat_settings set;
    hd_engine *engine;
    line_editor *editor;
    json_t *messages; /* the conversation, without the system message */
    char *system;     /* malloc'ed, or NULL */
    bool done;
} chat;

static volatile sig_atomic_t interrupted;

static void on_interrupt(int signal_number) {
    (void)signal_number;
    interrupted = 1;
}

/* ---- one turn ---- */

/* Returns the conversation as JSON text, malloc'ed. */
static char *conversation(const chat *c) {
    json_t *all = json_array();
    if (c->system) {
        json_array_append_new(all,
                              json_pack("{s:s, s:s}", "role", "system", "content", c->system));
    }
    json_array_extend(all, c->messages);
    char *text = hd_json_write(all, JSON_COMPACT);
    json_decref(all);
    return text;
}

static void print_figures(const answer *a) {
    const double first = (double)a->first_ns * 1e-9;
    const double rest = (double)(a->end_ns - a->first_ns) * 1e-9;
    fprintf(stderr, "[%d tokens", a->output_tokens);
    if (a->output_tokens > 1 && rest > 0) {
        fprintf(stderr, ", %.1f/s", (a->output_tokens - 1) / rest);
    }
    fprintf(stderr, ", first after %.2f s, %d of %d prompt tokens cached", first,
            a->cached_tokens, a->prompt_tokens);
    if (a->drafted) fprintf(stderr, ", %d of %d drafts accepted", a->accepted, a->drafted);
    if (a->stopped) fprintf(stderr, ", stopped");
    if (a->finish_reason == HD_FINISH_LENGTH) fprintf(stderr, ", cut at the limit");
    fprintf(stderr, "]\n");
}

/* Generates the next message of the conversation. If that fails (too long, for example), the
 * user's message is removed, so that the conversation can continue. */
static hd_status take_turn(chat *c, hd_err *err) {
    const chat_settings *set = &c->set;
    char *messages = conversation(c);
    if (!messages) return HD_FAIL(err, HD_ENOMEM, "no memory for the conversation");
    const hd_request g = {.size = sizeof g,
                          .messages = messages,
                          .thinking = set->thinking == 2 ? -1 : set->thinking,
                          .max_tokens = (int32_t)set->max_tokens,
                          .draft_tokens = set->engine.draft_tokens,
                          .temperature = (float)set->temperature,
                          .top_p = (float)set->top_p,
                          .min_p = (float)set->min_p,
                          .top_k = (int32_t)set->top_k,
                          .seed = (uint64_t)set->seed};
    answer a;
    interrupted = 0;
    hd_status st = answer_run(&a, c->engine, &g, &interrupted, err);
    if (st == HD_OK) {
        json_t *m = json_pack("{s:s, s:s}", "role", "assistant", "content", a.content);
        if (*a.reasoning) json_object_set_new(m, "reasoning_content", json_string(a.reasoning));
        json_array_append_new(c->messages, m);
        if (!set->quiet) print_figures(&a);
    }
    answer_deinit(&a);
    free(messages);
    return st;
}

static void say(chat *c, const char *text) {
    hd_err err = {0};
    json_array_append_new(c->messages,
                          json_pack("{s:s, s:s}", "role", "user", "content", text));
    if (take_turn(c, &err) == HD_OK) return;
    report_error(&err);
    json_array_remove(c->messages, json_array_size(c->messages) - 1);
}

/* ---- commands ---- */

/* Drops the last answer; with `whole` also the user's message before it. False: there is
 * none. */
static bool drop_turn(chat *c, bool whole) {
    const size_t n = json_array_size(c->messages);
    if (n < 2) {
        fputs("nothing was said yet\n", stderr);
        return false;
    }
    json_array_remove(c->messages, n - 1);
    if (whole) json_array_remove(c->messages, n - 2);
    return true;
}

static void do_retry(chat *c, const char *arg) {
    hd_err err = {0};
    (void)arg;
    if (!drop_turn(c, false)) return;
    c->set.seed++; /* another seed, for another answer */
    if (take_turn(c, &err) == HD_OK) return;
    report_error(&err);
    json_array_remove(c->messages, json_array_size(c->messages) - 1);
}

static void do_undo(chat *c, const char *arg) {
    (void)arg;
    drop_turn(c, true);
}

static void do_clear(chat *c, const char *arg) {
    (void)arg;
    json_array_clear(c->messages);
}

static void do_system(chat *c, const char *arg) {
    free(c->system);
    c->system = *arg ? strdup(arg) : NULL;
}

static void do_thinking(chat *c, const char *arg) {
    static const char *const names[] = {"auto", "on", "off"};
    for (int i = 0; i < (int)HD_LEN(names); i++) {
        if (strcmp(arg, names[i]) == 0) {
            c->set.thinking = i;
            return;
        }
    }
    fprintf(stderr, "/thinking is auto, on or off, not '%s'\n", arg);
}

static bool read_number(const char *name, const char *arg, double low, double high,
                        double *out) {
    char *end;
    errno = 0;
    const double value = strtod(arg, &end);
    if (*arg && !*end && !errno && value >= low && value <= high) {
        *out = value;
        return true;
    }
    fprintf(stderr, "/%s is a number from %g to %g, not '%s'\n", name, low, high, arg);
    return false;
}

static void do_temperature(chat *c, const char *arg) {
    const option o = option_temperature(&c->set.temperature);
    read_number(o.name, arg, o.real_min, o.real_max, &c->set.temperature);
}

static void do_max(chat *c, const char *arg) {
    const option o = option_max_tokens(&c->set.max_tokens, "");
    double n;
    if (read_number("max", arg, (double)o.min, (double)o.max, &n))
        c->set.max_tokens = (int64_t)n;
}

static void do_seed(chat *c, const char *arg) {
    double n;
    if (read_number("seed", arg, 0, 9007199254740992.0, &n)) c->set.seed = (int64_t)n;
}

static void do_file(chat *c, const char *arg) {
    hd_err err = {0};
    char *text;
    size_t n;
    if (hd_file_read(&text, &n, arg, MAX_FILE_BYTES, &err) != HD_OK) {
        report_error(&err);
        return;
    }
    if (strlen(text) == n) {
        say(c, text);
    } else {
        fprintf(stderr, "%s holds a NUL byte at %zu\n", arg, strlen(text));
    }
    free(text);
}

static void do_save(chat *c, const char *arg) {
    char *text = conversation(c);
    FILE *f = text ? fopen(arg, "w") : NULL;
    bool good = f && fputs(text, f) >= 0 && fputc('\n', f) >= 0;
    if (f && fclose(f) != 0) good = false;
    if (!good) fprintf(stderr, "cannot write %s: %s\n", arg, strerror(errno));
    free(text);
}

static void do_quit(chat *c, const char *arg) {
    (void)arg;
    c->done = true;
}

static void do_help(chat *c, const char *arg);

static const struct chat_command {
    const char *name, *arg, *help;
    void (*run)(chat *c, const char *arg);
} chat_commands[] = {
    {"help",        "",            "this list",                                  do_help       },
    {"retry",       "",            "answer again, with the next seed",           do_retry      },
    {"undo",        "",            "take back the last question and its answer", do_undo       },
    {"clear",       "",            "begin anew",                                 do_clear      },
    {"system",      "[TEXT]",      "set or drop the system message",             do_system     },
    {"thinking",    "auto|on|off", "reason first",                               do_thinking   },
    {"temperature", "X",           "0 is greedy",                                do_temperature},
    {"max",         "N",           "tokens of an answer; 0: what fits",          do_max        },
    {"seed",        "N",           "of the random numbers",                      do_seed       },
    {"file",        "FILE",        "say what a file holds",                      do_file       },
    {"save",        "FILE",        "write the conversation as JSON messages",    do_save       },
    {"quit",        "",            "leave; so does Ctrl-D",                      do_quit       }
};

static void do_help(chat *c, const char *arg) {
    (void)c;
    (void)arg;
    for (size_t i = 0; i < HD_LEN(chat_commands); i++) {
        const struct chat_command *k = &chat_commands[i];
        fprintf(stderr, "  /%-12s %-12s %s\n", k->name, k->arg, k->help);
    }
    fputs("A line that ends with \\ goes on. Ctrl-C stops an answer.\n", stderr);
}

static void run_command(chat *c, const char *line) {
    const char *names[HD_LEN(chat_commands)];
    const size_t n = strcspn(line, " \t");
    const char *arg = line + n + strspn(line + n, " \t");
    for (size_t i = 0; i < HD_LEN(chat_commands); i++) {
        const struct chat_command *k = &chat_commands[i];
        names[i] = k->name;
        if (strlen(k->name) != n || strncmp(k->name, line, n) != 0) continue;
        if (*k->arg && *k->arg != '[' && !*arg) {
            fprintf(stderr, "/%s needs %s\n", k->name, k->arg);
        } else {
            k->run(c, arg);
        }
        return;
    }
    char word[64];
    snprintf(word, sizeof word, "%.*s", (int)n, line);
    const char *near = nearest_word(word, names, (int)HD_LEN(names));
    fprintf(stderr, "unknown command /%s; %s%s%s\n", word,
            near ? "did you mean /" : "see /help", near ? near : "", near ? "?" : "");
}

/* ---- the loop ---- */

/* Reads a message, which may have several lines. *out is malloc'ed; NULL at the end of the
 * input. */
static char *read_question(chat *c) {
    char *all = NULL;
    size_t n = 0;
    for (;;) {
        const char *line;
        const line_read got = line_editor_read(c->editor, all ? "... " : "> ", &line);
        if (got == LINE_INTERRUPTED) {
            fputs("\n", stderr);
            free(all);
            return strdup("");
        }
        if (got == LINE_END) return all;
        const size_t len = strlen(line);
        const bool more = len && line[len - 1] == '\\';
        char *grown = realloc(all, n + len + 2);
        if (!grown) {
            free(all);
            return NULL;
        }
        all = grown;
        memcpy(all + n, line, len);
        n += len - more;
        all[n] = '\0';
        if (!more) return all;
        all[n++] = '\n';
        all[n] = '\0';
    }
}

static void converse(chat *c) {
    while (!c->done) {
        char *text = read_question(c);
        if (!text) break;
        if (text[0] == '/') {
            run_command(c, text + 1);
        } else if (text[strspn(text, " \t\n")]) {
            say(c, text);
        }
        free(text);
    }
}

/* Returns $XDG_STATE_HOME/hadal/history and creates its folder; false: there is no home. */
static bool history_path(char *out, size_t size) {
    const char *state = getenv("XDG_STATE_HOME"), *home = getenv("HOME");
    const bool given = state && *state == '/';
    if (!given && !(home && *home == '/')) return false;
    const int n = given ? snprintf(out, size, "%s/hadal", state)
                        : snprintf(out, size, "%s/.local/state/hadal", home);
    if (n < 0 || (size_t)n + sizeof "/history" > size) return false;
    for (char *slash = strchr(out + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        mkdir(out, 0700); /* an existing folder is fine; errors of the last one are reported */
        *slash = '/';
    }
    if (mkdir(out, 0700) != 0 && errno != EEXIST) return false;
    snprintf(out + n, size - (size_t)n, "/history");
    return true;
}

static hd_status open_chat(chat *c, hd_err *err) {
    char history[MAX_PATH];
    c->messages = json_array();
    if (c->set.system) c->system = strdup(c->set.system);
    HD_TRY(line_editor_open(&c->editor, history_path(history, sizeof history) ? history : NULL,
                            err));
    c->set.engine.options.max_running = 1;
    return engine_settings_open(&c->engine, &c->set.engine, c->set.quiet, err);
}

static hd_status run(chat *c, hd_err *err) {
    const struct sigaction action = {.sa_handler = on_interrupt};
    hd_status st = open_chat(c, err);
    sigaction(SIGINT, &action,
              NULL); /* without SA_RESTART: a signal also ends the reading of a line */
    if (st == HD_OK) {
        if (isatty(STDIN_FILENO)) fputs("/help lists the commands, Ctrl-D leaves.\n", stderr);
        converse(c);
    }
    line_editor_close(c->editor);
    hd_engine_close(c->engine);
    json_decref(c->messages);
    free(c->system);
    return st;
}

int cmd_chat(int argc, char **argv) {
    static const char *const thinking[] = {"auto", "on", "off", NULL};
    chat c = {
        .set = {
                .engine = engine_settings_default(), .temperature = 0, .top_p = 1, .thinking = 1}
    };
    chat_settings *set = &c.set;
    const option options[] = {
        option_text("system", &set->system, "TEXT", "system message"),
        option_choice("thinking", &set->thinking, thinking,
                      "reason first, where the model can; default: on"),
        option_max_tokens(&set->max_tokens, "of an output; 0: what the context leaves"),
        option_temperature(&set->temperature),
        option_top_p(&set->top_p),
        option_top_k(&set->top_k),
        option_min_p(&set->min_p),
        option_int("seed", &set->seed, 0, INT64_MAX, "of the random numbers"),
        with_letter(option_flag("quiet", &set->quiet, "no figures on standard error"), 'q'),
    };
    const positional model = {"MODEL_DIR", &set->engine.options.model_dir, false,
                              POSITIONAL_MODEL};
    const command_line line = {.command = "chat",
                               .summary = "A conversation on the terminal.",
                               .positionals = &model,
                               .n_positionals = 1,
                               .options = options,
                               .n_options = (int)HD_LEN(options)};
    int code;
    if (!engine_options_parse(&line, ENGINE_CHAT, &set->engine, argc, argv, &code)) return code;
    hd_err err = {0};
    const hd_status st = run(&c, &err);
    return st == HD_OK ? 0 : report_error(&err);
}
