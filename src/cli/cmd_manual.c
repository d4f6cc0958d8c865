/* cmd_manual.c - `hadal manual [COMMAND]`: prints man pages, generated from the option
 * tables. */
#include <stdio.h>
#include <string.h>

#include "cli/commands.h"

/* Writes text literally: roff interprets a backslash, and a dot or quote at the start of a
 * line. */
static void put_text(const char *text) {
    bool first = true;
    for (; *text; text++) {
        if (first && (*text == '.' || *text == '\'')) fputs("\\&", stdout);
        if (*text == '\\') {
            fputs("\\e", stdout);
        } else if (*text == '-') {
            fputs("\\-", stdout);
        } else if (*text == '\n' && text[1] == '\n') {
            fputs("\n.PP\n", stdout);
            text++;
        } else {
            putchar(*text);
        }
        first = *text == '\n';
    }
}

static void put_line(const char *text) {
    put_text(text);
    putchar('\n');
}

static void put_head(const char *name, const char *help) {
    printf(".TH \"");
    for (const char *p = name; *p; p++) putchar(*p >= 'a' && *p <= 'z' ? *p - 'a' + 'A' : *p);
    printf("\" \"1\" \"\" \"hadal %s\" \"User Commands\"\n.SH NAME\n", HD_VERSION);
    put_text(name);
    fputs(" \\- ", stdout);
    put_line(help);
}

/* ---- one command ---- */

static void put_range(const option *o) {
    switch (o->kind) {
    case OPTION_FLAG:
    case OPTION_TEXT:
        break;
    case OPTION_INT:
        if (o->min_word) {
            printf("From %lld to %lld, or %s.\n", (long long)o->min + 1, (long long)o->max,
                   o->min_word);
        } else {
            printf("From %lld to %lld.\n", (long long)o->min, (long long)o->max);
        }
        break;
    case OPTION_REAL:
        printf("From %g to %g.\n", o->real_min, o->real_max);
        break;
    case OPTION_CHOICE:
    case OPTION_WORD:
        fputs("One of", stdout);
        for (int i = 0; o->choices[i]; i++) printf("%s %s", i ? "," : "", o->choices[i]);
        puts(".");
        break;
    }
}

static void put_option(const option *o) {
    fputs(".TP\n", stdout);
    if (o->letter) printf("\\fB\\-%c\\fR, ", o->letter);
    fputs("\\fB\\-\\-", stdout);
    put_text(o->name);
    fputs("\\fR", stdout);
    if (o->metavar) {
        fputs(" \\fI", stdout);
        put_text(o->metavar);
        fputs("\\fR", stdout);
    }
    putchar('\n');
    put_line(o->help);
    put_range(o);
}

static void put_usage(const command_line *line, void *user) {
    bool *again = user;
    if (*again) puts(".br");
    *again = true;
    printf("\\fBhadal %s\\fR", line->command);
    for (int i = 0; i < line->n_positionals; i++) {
        printf(line->positionals[i].optional ? " [\\fI%s\\fR]" : " \\fI%s\\fR",
               line->positionals[i].name);
    }
    puts(" [\\fIoptions\\fR]");
}

/* A command of several kinds has a section for each. */
static void put_table(const command_line *line, void *user) {
    const command *c = user;
    if (command_forms(c)) {
        fputs(".SH ", stdout);
        for (const char *p = line->command; *p; p++) {
            putchar(*p >= 'a' && *p <= 'z' ? *p - 'a' + 'A' : *p);
        }
        putchar('\n');
    } else {
        puts(".SH DESCRIPTION");
    }
    put_line(line->summary);
    if (line->details) {
        puts(".PP");
        put_line(line->details);
    }
    puts(command_forms(c) ? ".SS Options" : ".SH OPTIONS");
    for (int i = 0; i < line->n_options; i++) put_option(&line->options[i]);
    puts(".TP\n\\fB\\-\\-config\\fR \\fIFILE\\fR\n"
         "A JSON object with option names as keys; options on the command line win.\n"
         ".TP\n\\fB\\-h\\fR, \\fB\\-\\-help\\fR\nPrints the same as this page, shorter.");
}

static void write_command(const command *c) {
    char name[64];
    bool again = false;
    snprintf(name, sizeof name, "hadal-%s", c->name);
    put_head(name, c->help);
    puts(".SH SYNOPSIS");
    command_visit(c, put_usage, &again);
    command_visit(c, put_table, (void *)(uintptr_t)c);
    puts(".SH SEE ALSO\n\\fBhadal\\fR(1)");
}

/* ---- the program ---- */

static const char environment[] =
    ".SH ENVIRONMENT\n"
    ".TP\n\\fBHADAL_API_KEY\\fR, \\fBHADAL_ADMIN_KEY\\fR\n"
    "An API key and the administration key of the server, beside those of\n"
    "\\fB\\-\\-api\\-key\\-file\\fR and \\fB\\-\\-admin\\-key\\-file\\fR.\n"
    ".TP\n\\fBXDG_STATE_HOME\\fR\n"
    "Where \\fBhadal chat\\fR keeps its history, in a folder \\fIhadal\\fR; without it\n"
    "\\fI~/.local/state\\fR.\n"
    ".SH EXIT STATUS\n"
    ".TP\n\\fB0\\fR\nAll went well.\n"
    ".TP\n\\fB1\\fR\nThe command ran and found a difference, or a model without all its "
    "answers.\n"
    ".TP\n\\fB2\\fR\nThe command line, a file or the model is wrong; one line says what.\n"
    ".TP\n\\fB4\\fR\nThe machine lacks something: memory, disk, a port.\n"
    ".TP\n\\fB5\\fR\nA device failed.\n"
    ".TP\n\\fB75\\fR\nThe device of a server hangs: start it again.\n"
    ".TP\n\\fB130\\fR\nA second signal ended a server at once.\n";

static void write_program(const command *all, size_t n) {
    put_head("hadal", "serves the DeepSeek mixture-of-experts models");
    puts(".SH SYNOPSIS\n\\fBhadal\\fR \\fICOMMAND\\fR [\\fIarguments\\fR]\n"
         ".SH DESCRIPTION\n"
         "hadal reads official DeepSeek checkpoints as they are, answers on the terminal, and\n"
         "serves the OpenAI, Anthropic and SGLang interfaces over HTTP.\n"
         ".SH COMMANDS");
    for (size_t i = 0; i < n; i++) {
        if (!all[i].help) continue;
        printf(".TP\n\\fBhadal\\-%s\\fR(1)\n", all[i].name);
        put_line(all[i].help);
    }
    puts(".TP\n\\fBhadal completions\\fR bash|zsh|fish\nprint a completion script for a shell\n"
         ".TP\n\\fBhadal manual\\fR [\\fICOMMAND\\fR]\nprint the page of a command, or this "
         "one");
    fputs(environment, stdout);
}

int cmd_manual(int argc, char **argv) {
    const char *wanted = NULL;
    const positional name = {"COMMAND", &wanted, true, POSITIONAL_PLAIN};
    const command_line line = {.command = "manual",
                               .summary = "Prints a manual page as roff, for man and mandoc.",
                               .positionals = &name,
                               .n_positionals = 1};
    size_t n;
    const command *all = commands_all(&n);
    int code;
    if (!options_parse(&line, argc, argv, &code)) return code;
    if (!wanted) {
        write_program(all, n);
        return 0;
    }
    for (size_t i = 0; i < n; i++) {
        if (!all[i].help || strcmp(all[i].name, wanted) != 0) continue;
        write_command(&all[i]);
        return 0;
    }
    hd_err err = {0};
    HD_FAIL(&err, HD_EINVAL, "there is no manual page of '%s'; see hadal --help", wanted);
    return report_error(&err);
}
