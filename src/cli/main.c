/* main.c - the names of the things this program does. */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "cli/commands.h"
#include "cli/options.h"

static const command commands[] = {
    {"serve",       cmd_serve,       "MODEL_DIR",                    "answer HTTP requests"              },
    {"chat",        cmd_chat,        "MODEL_DIR",                    "talk with a model on the terminal" },
    {"generate",    cmd_generate,    "MODEL_DIR -p TEXT",            "answer one prompt"                 },
    {"pull",        cmd_pull,        "REPO[@REVISION]",              "download from the Hugging Face hub"},
    {"eval",        cmd_eval,        "MODEL_DIR --suite NAME",       "count right answers to tasks"      },
    {"bench",       cmd_bench,       "throughput|latency MODEL_DIR",
     "put an engine under a synthetic load"                                                              },
    {"inspect",     cmd_inspect,     "MODEL_DIR",                    "print what a checkpoint holds"     },
    {"tokenize",    cmd_tokenize,    "DIR < TEXT",                   "turn text into token ids"          },
    {"detokenize",  cmd_detokenize,  "DIR < IDS",                    "turn token ids into text"          },
    {"render",      cmd_render,      "DIR --messages FILE",          "print the prompt of a conversation"},
    {"logits",      cmd_logits,      "MODEL_DIR --tokens F --out F",
     "compute the logits of given tokens"                                                                },
    {"replay",      cmd_replay,      "FILE MODEL_DIR",               "run logged requests again, compare"},
    {"version",     cmd_version,     "",                             "print the build and this machine"  },
    {"completions", cmd_completions, "bash|zsh|fish",                NULL                                },
    {"manual",      cmd_manual,      "[COMMAND]",                    NULL                                },
};

const command *commands_all(size_t *n) {
    *n = HD_LEN(commands);
    return commands;
}

const char *const *command_forms(const command *c) {
    return c->run == cmd_bench ? bench_forms : NULL;
}

void command_visit(const command *c, void (*visit)(const command_line *line, void *user),
                   void *user) {
    static const char *const plain[] = {"", NULL};
    options_visit(visit, user);
    const char *const *forms = command_forms(c);
    for (const char *const *form = forms ? forms : plain; *form; form++) {
        char words[64], *argv[4] = {(char *)(uintptr_t)c->name};
        int argc = 1;
        snprintf(words, sizeof words, "%s", *form);
        for (char *rest = NULL, *word = strtok_r(words, " ", &rest); word && argc < 4;
             word = strtok_r(NULL, " ", &rest)) {
            argv[argc++] = word;
        }
        c->run(argc, argv);
    }
    options_visit(NULL, NULL);
}

static void print_usage(FILE *to) {
    fputs("hadal serves the DeepSeek mixture-of-experts models.\n\n"
          "usage: hadal COMMAND [arguments]\n\ncommands:\n",
          to);
    for (size_t i = 0; i < HD_LEN(commands); i++) {
        if (!commands[i].help) continue;
        fprintf(to, "  %-11s %-29s %s\n", commands[i].name, commands[i].args, commands[i].help);
    }
    fputs("\nhadal COMMAND --help explains one command.\n", to);
}

static int unknown_command(const char *name) {
    const char *names[HD_LEN(commands) + 2] = {"--help", "--version"};
    for (size_t i = 0; i < HD_LEN(commands); i++) names[i + 2] = commands[i].name;
    const char *near = nearest_word(name, names, (int)HD_LEN(names));
    hd_err err = {0};
    HD_FAIL(&err, HD_EINVAL, "unknown command '%s'; %s%s%s", name,
            near ? "did you mean " : "see hadal --help", near ? near : "", near ? "?" : "");
    return report_error(&err);
}

/* Files opened later must never land on descriptors 0 to 2, where others will write. */
static void ensure_standard_descriptors(void) {
    int fd;
    do {
        fd = open("/dev/null", O_RDWR);
    } while (fd >= 0 && fd <= STDERR_FILENO);
    if (fd > STDERR_FILENO) close(fd);
}

/* Output that could not be written (full disk, closed pipe) must not look like success. */
static int flush_output(int code) {
    if (fflush(stdout) == 0 && !ferror(stdout)) return code;
    hd_err err = {0};
    HD_FAIL(&err, HD_EIO, "cannot write to standard output");
    int failed = report_error(&err);
    return code ? code : failed;
}

/* Files are mapped: one that is cut short while it is read ends in a signal and not in an
 * error code. Only calls that are safe in a handler. */
static void on_bus_error(int signal_number) {
    static const char text[] =
        "error: a mapped file was cut short or cannot be read any more\n";
    (void)signal_number;
    ssize_t written = write(STDERR_FILENO, text, sizeof text - 1);
    (void)written;
    _exit(4);
}

int main(int argc, char **argv) {
    ensure_standard_descriptors();
    signal(SIGBUS, on_bus_error);
    signal(SIGPIPE, SIG_IGN); /* a reader that left is an error of that write only, */
    signal(SIGXFSZ, SIG_IGN); /* and so is a file that may not grow (ulimit -f) */
    if (argc < 2) {
        print_usage(stderr);
        return 2;
    }
    if (!strcmp(argv[1], "help") || !strcmp(argv[1], "--help") || !strcmp(argv[1], "-h")) {
        print_usage(stdout);
        return flush_output(0);
    }
    const char *name = strcmp(argv[1], "--version") == 0 ? "version" : argv[1];
    for (size_t i = 0; i < HD_LEN(commands); i++) {
        if (strcmp(name, commands[i].name) == 0) {
            return flush_output(commands[i].run(argc - 1, argv + 1));
        }
    }
    return unknown_command(argv[1]);
}
