/* cmd_completions.c - `hadal completions SHELL`: prints a shell completion script, generated
 * from the option tables. */
#include <stdio.h>
#include <string.h>

#include "cli/commands.h"

/* ---- common to all shells ---- */

typedef enum value_kind { VALUE_ANY, VALUE_FILE, VALUE_FOLDER } value_kind;

static value_kind value_of(const char *metavar) {
    if (strstr(metavar, "DIR")) return VALUE_FOLDER;
    if (strstr(metavar, "FILE") || strstr(metavar, "CONFIG")) return VALUE_FILE;
    return VALUE_ANY;
}

/* Options of a command without a table. */
static const option more[] = {
    {.name = "config", .kind = OPTION_TEXT, .metavar = "FILE",   .help = "options as JSON"  },
    {.name = "help",   .letter = 'h',       .kind = OPTION_FLAG, .help = "show every option"},
};

/* "bench throughput" is kind `throughput` of bench. */
static const char *kind_of(const command_line *line) {
    const char *space = strchr(line->command, ' ');
    return space ? space + 1 : "";
}

static void each_option(const command_line *line, void (*write)(const option *o)) {
    for (int i = 0; i < line->n_options; i++) write(&line->options[i]);
    for (size_t i = 0; i < HD_LEN(more); i++) write(&more[i]);
}

/* Writes text between single quotes; a backslash precedes what the shell would interpret. */
static void put_quoted(const char *text, const char *special) {
    for (; *text; text++) {
        if (*text == '\'') {
            fputs("'\\''", stdout);
            continue;
        }
        if (strchr(special, *text)) putchar('\\');
        putchar(*text);
    }
}

static void put_choices(const option *o) {
    for (int i = 0; o->choices[i]; i++) printf("%s%s", i ? " " : "", o->choices[i]);
}

static void put_names(void) {
    size_t n;
    const command *all = commands_all(&n);
    for (size_t i = 0; i < n; i++) {
        if (all[i].help) printf("%s%s", i ? " " : "", all[i].name);
    }
}

/* Writes the kinds of a command, each once: "throughput latency ops". */
static void put_kinds(const command *c) {
    const char *const *forms = command_forms(c);
    for (const char *const *form = forms; *form; form++) {
        if (!strchr(*form, ' ')) printf("%s%s", form == forms ? "" : " ", *form);
    }
}

/* user is the command's name. */
static void each_command(void (*visit)(const command_line *line, void *user)) {
    size_t n;
    const command *all = commands_all(&n);
    for (size_t i = 0; i < n; i++) {
        if (all[i].help) command_visit(&all[i], visit, (void *)(uintptr_t)all[i].name);
    }
}

/* ---- bash ---- */

static void bash_name(const option *o) {
    if (o->letter) printf("-%c ", o->letter);
    printf("--%s ", o->name);
}

static void bash_words(const command_line *line, void *user) {
    (void)user;
    printf("    '%s') words+=' ", line->command);
    each_option(line, bash_name);
    puts("' ;;&");
}

static void bash_values(const command_line *line, void *user) {
    (void)user;
    for (int i = 0; i < line->n_options; i++) {
        const option *o = &line->options[i];
        if (o->kind == OPTION_FLAG) continue;
        printf("    '%s --%s'", line->command, o->name);
        if (o->letter) printf(" | '%s -%c'", line->command, o->letter);
        fputs(") ", stdout);
        if (o->choices) {
            fputs("values='", stdout);
            put_choices(o);
            puts("' ;;");
        } else {
            puts(value_of(o->metavar) == VALUE_FOLDER ? "files=-d ;;"
                 : value_of(o->metavar) == VALUE_FILE ? "files=-f ;;"
                                                      : "values=' ' ;;");
        }
    }
}

static void bash_kinds(void) {
    size_t n;
    const command *all = commands_all(&n);
    for (size_t i = 0; i < n; i++) {
        if (!command_forms(&all[i])) continue;
        printf("    %s)\n        at=2\n        values='", all[i].name);
        put_kinds(&all[i]);
        puts("'\n        ;;");
    }
}

static void write_bash(void) {
    fputs("# completion of hadal for bash; written by: hadal completions bash\n"
          "_hadal() {\n"
          "    local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]}\n"
          "    local command=${COMP_WORDS[1]} at=1 values= files= words=\n"
          "    COMPREPLY=()\n"
          "    if [ \"$COMP_CWORD\" = 1 ]; then\n"
          "        mapfile -t COMPREPLY < <(compgen -W '",
          stdout);
    put_names();
    puts(" --help --version' -- \"$current\")\n"
         "        return\n"
         "    fi\n"
         "    # --name=VALUE comes in three words.\n"
         "    if [ \"$current\" = = ]; then\n"
         "        current=\n"
         "    elif [ \"$before\" = = ]; then\n"
         "        before=${COMP_WORDS[COMP_CWORD-2]}\n"
         "    fi\n"
         "    case $command in");
    bash_kinds();
    puts("    esac\n"
         "    if [ $at = 2 ] && [ \"$COMP_CWORD\" = 2 ]; then\n"
         "        mapfile -t COMPREPLY < <(compgen -W \"$values\" -- \"$current\")\n"
         "        return\n"
         "    fi\n"
         "    [ $at = 1 ] || command+=\" ${COMP_WORDS[2]}\"\n"
         "    values=\n"
         "    case \"$command $before\" in");
    each_command(bash_values);
    puts("    *' --config') files=-f ;;\n"
         "    esac\n"
         "    case $command in");
    each_command(bash_words);
    puts("    *) ;;\n"
         "    esac\n"
         "    if [ -n \"$files\" ]; then\n"
         "        mapfile -t COMPREPLY < <(compgen $files -- \"$current\")\n"
         "    elif [ -n \"$values\" ]; then\n"
         "        mapfile -t COMPREPLY < <(compgen -W \"$values\" -- \"$current\")\n"
         "    elif [[ $current == -* ]]; then\n"
         "        mapfile -t COMPREPLY < <(compgen -W \"$words\" -- \"$current\")\n"
         "    else\n"
         "        mapfile -t COMPREPLY < <(compgen -f -- \"$current\")\n"
         "    fi\n"
         "}\n"
         "complete -o filenames -F _hadal hadal");
}

/* ---- zsh ---- */

static void zsh_option(const option *o) {
    const bool flag = o->kind == OPTION_FLAG;
    if (o->letter) {
        printf(" \\\n            '(-%c --%s)'{-%c,--%s%s}'[", o->letter, o->name, o->letter,
               o->name, flag ? "" : "=");
    } else {
        printf(" \\\n            '--%s%s[", o->name, flag ? "" : "=");
    }
    put_quoted(o->help, "[]");
    putchar(']');
    if (!flag) printf(":%s:", o->metavar);
    if (o->choices) {
        putchar('(');
        put_choices(o);
        putchar(')');
    } else if (!flag) {
        const value_kind kind = value_of(o->metavar);
        fputs(kind == VALUE_FOLDER ? "_files -/" : kind == VALUE_FILE ? "_files" : " ", stdout);
    }
    putchar('\'');
}

/* A kind with two tables has two cases: after the first, ";|" looks for the second. */
static void zsh_line(const command_line *line, void *user) {
    (void)user;
    printf("    '%s')\n        _arguments", line->command);
    each_option(line, zsh_option);
    puts(" \\\n            '*:file:_files'\n        ;|");
}

static void zsh_kinds(void) {
    size_t n;
    const command *all = commands_all(&n);
    for (size_t i = 0; i < n; i++) {
        if (!command_forms(&all[i])) continue;
        printf("    %s)\n        if (( CURRENT == 2 )); then\n            _values kind ",
               all[i].name);
        put_kinds(&all[i]);
        puts("\n            return\n        fi\n        command+=\" $words[2]\"\n"
             "        shift words\n        (( CURRENT-- ))\n        ;;");
    }
}

static void write_zsh(void) {
    size_t n;
    const command *all = commands_all(&n);
    puts("#compdef hadal\n"
         "# completion of hadal for zsh; written by: hadal completions zsh\n"
         "_hadal() {\n"
         "    local command=$words[2]\n"
         "    if (( CURRENT == 2 )); then\n"
         "        local -a commands=(");
    for (size_t i = 0; i < n; i++) {
        if (!all[i].help) continue;
        printf("            '%s:", all[i].name);
        put_quoted(all[i].help, ":");
        puts("'");
    }
    puts("        )\n"
         "        _describe command commands\n"
         "        return\n"
         "    fi\n"
         "    shift words\n"
         "    (( CURRENT-- ))\n"
         "    case $command in");
    zsh_kinds();
    puts("    esac\n"
         "    case $command in");
    each_command(zsh_line);
    puts(
        "    esac\n"
        "}\n"
        "if [ \"$funcstack[1]\" = _hadal ]; then _hadal \"$@\"; else compdef _hadal hadal; fi");
}

/* ---- fish ---- */

static void fish_condition(const char *name, const char *kind) {
    printf("complete -c hadal -n '__fish_seen_subcommand_from %s", name);
    if (kind[0]) printf("; and __fish_seen_subcommand_from %s", kind);
    putchar('\'');
}

static void fish_option(const option *o) {
    if (o->letter) printf(" -s %c", o->letter);
    printf(" -l %s", o->name);
    if (o->choices) {
        fputs(" -x -a '", stdout);
        put_choices(o);
        putchar('\'');
    } else if (o->kind != OPTION_FLAG) {
        const value_kind kind = value_of(o->metavar);
        fputs(kind == VALUE_FOLDER ? " -x -a '(__fish_complete_directories)'"
              : kind == VALUE_FILE ? " -r -F"
                                   : " -x",
              stdout);
    }
    fputs(" -d '", stdout);
    put_quoted(o->help, "\\");
    puts("'");
}

static void fish_line(const command_line *line, void *user) {
    const char *name = user;
    for (int i = 0; i < line->n_options; i++) {
        fish_condition(name, kind_of(line));
        fish_option(&line->options[i]);
    }
    for (size_t i = 0; i < HD_LEN(more); i++) {
        fish_condition(name, kind_of(line));
        fish_option(&more[i]);
    }
}

static void write_fish(void) {
    size_t n;
    const command *all = commands_all(&n);
    fputs("# completion of hadal for fish; written by: hadal completions fish\n"
          "set -l commands ",
          stdout);
    put_names();
    putchar('\n');
    for (size_t i = 0; i < n; i++) {
        if (!all[i].help) continue;
        printf(
            "complete -c hadal -f -n \"not __fish_seen_subcommand_from $commands\" -a %s -d '",
            all[i].name);
        put_quoted(all[i].help, "\\");
        puts("'");
        if (!command_forms(&all[i])) continue;
        printf("complete -c hadal -f -n '__fish_seen_subcommand_from %s; and not "
               "__fish_seen_subcommand_from ",
               all[i].name);
        put_kinds(&all[i]);
        fputs("' -a '", stdout);
        put_kinds(&all[i]);
        puts("'");
    }
    each_command(fish_line);
}

/* ---- the command ---- */

int cmd_completions(int argc, char **argv) {
    static const struct {
        const char *name;
        void (*write)(void);
    } shells[] = {
        {"bash", write_bash},
        {"zsh",  write_zsh },
        {"fish", write_fish}
    };
    const char *wanted = NULL;
    const positional shell = {"SHELL", &wanted, false, POSITIONAL_PLAIN};
    const command_line line = {.command = "completions",
                               .summary = "Prints a script that completes hadal's commands and "
                                          "options in bash, zsh or fish.",
                               .positionals = &shell,
                               .n_positionals = 1};
    int code;
    if (!options_parse(&line, argc, argv, &code)) return code;
    for (size_t i = 0; i < HD_LEN(shells); i++) {
        if (strcmp(wanted, shells[i].name) != 0) continue;
        shells[i].write();
        return 0;
    }
    hd_err err = {0};
    HD_FAIL(&err, HD_EINVAL, "completions are for bash, zsh and fish, not '%s'", wanted);
    return report_error(&err);
}
