/* options.h - command lines and config files, described by one table per command.
 *
 * A command lists its options with the variables they set; the same table parses
 * --name value, --name=value, a JSON config file with the same names, and prints --help.
 * Unknown names and bad values are refused with the nearest known name. */
#ifndef HD_CLI_OPTIONS_H
#define HD_CLI_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

enum { MAX_OPTIONS = 112 }; /* of a command */

typedef enum option_kind {
    OPTION_FLAG,   /* bool *; takes no value */
    OPTION_TEXT,   /* const char ** */
    OPTION_INT,    /* int64_t *, between min and max */
    OPTION_REAL,   /* double *, between real_min and real_max */
    OPTION_CHOICE, /* int *, the index into choices */
    OPTION_WORD,   /* const char **, one of choices */
} option_kind;

typedef struct option {
    const char *name; /* without the dashes */
    char letter;      /* short form; 0: none */
    uint8_t bytes;    /* of a narrower *value: int32_t, float, or bool for a choice of two */
    option_kind kind;
    void *value;         /* set only if the option is given; contains the default before */
    const char *metavar; /* "N", "FILE" */
    const char *help;
    int64_t min, max;
    const char *min_word; /* stands for min, "auto"; or NULL */
    double real_min, real_max;
    const char *const *choices; /* NULL-terminated */
    /* NULL, or writes what --help adds about this machine; other uses of the table do not */
    void (*on_machine)(char *out, size_t size);
} option;

/* The value of an OPTION_INT or OPTION_CHOICE, and of an OPTION_REAL. */
int64_t option_int_value(const option *o);
double option_real_value(const option *o);

/* options without a short form */
static inline option option_flag(const char *name, bool *value, const char *help) {
    return (option){.name = name, .kind = OPTION_FLAG, .value = value, .help = help};
}

static inline option option_text(const char *name, const char **value, const char *metavar,
                                 const char *help) {
    return (option){.name = name,
                    .kind = OPTION_TEXT,
                    .value = (void *)value,
                    .metavar = metavar,
                    .help = help};
}

static inline option option_int(const char *name, int64_t *value, int64_t min, int64_t max,
                                const char *help) {
    return (option){.name = name,
                    .kind = OPTION_INT,
                    .value = value,
                    .metavar = "N",
                    .help = help,
                    .min = min,
                    .max = max};
}

static inline option option_real(const char *name, double *value, double min, double max,
                                 const char *help) {
    return (option){.name = name,
                    .kind = OPTION_REAL,
                    .value = value,
                    .metavar = "X",
                    .help = help,
                    .real_min = min,
                    .real_max = max};
}

static inline option option_choice(const char *name, int *value, const char *const *choices,
                                   const char *help) {
    return (option){.name = name,
                    .kind = OPTION_CHOICE,
                    .value = value,
                    .metavar = "NAME",
                    .help = help,
                    .choices = choices};
}

static inline option with_letter(option o, char letter) {
    o.letter = letter;
    return o;
}

/* A table that is put together of several. */
typedef struct option_list {
    option all[MAX_OPTIONS];
    int n;
} option_list;

void option_list_add(option_list *list, const option *options, size_t n);

/* An option of other commands that this one cannot have. */
typedef struct option_absent {
    const char *name;
    const char *why; /* the end of a sentence, behind "takes no --NAME: " */
} option_absent;

typedef enum positional_kind {
    POSITIONAL_PLAIN,
    POSITIONAL_MODEL,  /* a model, as model_path.h finds it: all of it, */
    POSITIONAL_TEXT,   /* its tokenizer, */
    POSITIONAL_CONFIG, /* or its config.json */
} positional_kind;

typedef struct positional {
    const char *name; /* "MODEL_DIR" */
    const char **value;
    bool optional;
    positional_kind kind;
} positional;

typedef struct command_line {
    const char *command;
    const char *summary; /* one line */
    const char *details; /* further paragraphs for --help, or NULL */
    const positional *positionals;
    int n_positionals;
    const option *options;
    int n_options;
    const option_absent *absent;
    int n_absent;
} command_line;

/* Parses the command line; argv[0] is the command's name. Returns true if the command should
 * run. Returns false if --help was printed, or the line was refused with a message; then
 * exit with *code. Strings from a config file live until the program ends. */
bool options_parse(const command_line *line, int argc, char **argv, int *code);

/* While visit is set, options_parse() passes it the table, reads nothing, and returns false
 * with code 0. Thus the tables of all commands can be listed. NULL ends it. */
void options_visit(void (*visit)(const command_line *line, void *user), void *user);

/* Returns the candidate nearest to word, or NULL if none is near. */
const char *nearest_word(const char *word, const char *const *candidates, int n);

/* Prints "error: ..." and returns the exit code: 2 for bad input, 4 for a missing host
 * resource, 5 for a device, 70 for an internal error. */
int report_error(const hd_err *err);

#endif
