/* options.c - one table drives parsing, config files, suggestions and help. */
#include "cli/options.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/json.h"
#include "cli/model_path.h"
#include "cli/terminal/screen.h"

enum { CONFIG_MAX_BYTES = 1 << 20, TEXT_COLUMN = 29, MOST_WIDTH = 100 };

void option_list_add(option_list *list, const option *options, size_t n) {
    if ((size_t)list->n + n > MAX_OPTIONS) abort(); /* a command has more: raise it */
    for (size_t i = 0; i < n; i++) list->all[list->n++] = options[i];
}

int64_t option_int_value(const option *o) {
    if (o->bytes == sizeof(bool)) return *(const bool *)o->value;
    if (o->kind == OPTION_CHOICE) return *(const int *)o->value;
    if (o->bytes == sizeof(int32_t)) return *(const int32_t *)o->value;
    return *(const int64_t *)o->value;
}

double option_real_value(const option *o) {
    if (o->bytes == sizeof(float)) return (double)*(const float *)o->value;
    return *(const double *)o->value;
}

typedef struct parse {
    const command_line *line;
    const char *given[MAX_OPTIONS]; /* the first value of an option, to refuse a second one */
    const char *config;             /* --config FILE */
    hd_err err;
} parse;

int report_error(const hd_err *err) {
    fprintf(stderr, "error: %s\n", err->msg);
    switch (err->status) {
    case HD_OK:
        return 70;
    case HD_EINVAL:
    case HD_EFORMAT:
    case HD_EUNSUPPORTED:
        return 2;
    case HD_ENOMEM:
    case HD_EIO:
    case HD_EAGAIN:
        return 4;
    case HD_EDEVICE:
    case HD_EPEER:
        return 5;
    }
    return 70;
}

/* Levenshtein distance, for short words. */
static int distance(const char *a, const char *b) {
    enum { CAP = 48 };
    size_t n = strlen(a), m = strlen(b);
    int row[CAP + 1];
    if (n > CAP || m > CAP) return CAP;
    for (size_t j = 0; j <= m; j++) row[j] = (int)j;
    for (size_t i = 1; i <= n; i++) {
        int diagonal = row[0];
        row[0] = (int)i;
        for (size_t j = 1; j <= m; j++) {
            int above = row[j];
            int best = diagonal + (a[i - 1] != b[j - 1]);
            if (above + 1 < best) best = above + 1;
            if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
            diagonal = above;
            row[j] = best;
        }
    }
    return row[m];
}

const char *nearest_word(const char *word, const char *const *candidates, int n) {
    const char *best = NULL;
    int best_distance = (int)strlen(word) / 2 + 1;
    for (int i = 0; i < n; i++) {
        int d = distance(word, candidates[i]);
        if (d < best_distance) {
            best_distance = d;
            best = candidates[i];
        }
    }
    return best;
}

static int find_option(const command_line *line, const char *name, size_t n) {
    for (int i = 0; i < line->n_options; i++) {
        if (strlen(line->options[i].name) == n && !strncmp(line->options[i].name, name, n)) {
            return i;
        }
    }
    return -1;
}

/* dashes: the characters before the name on the command line; "" for a key of a config file. */
static hd_status unknown_option(parse *p, const char *dashes, const char *name, size_t n,
                                const char *where) {
    const char *names[MAX_OPTIONS + 2] = {"help", "config"};
    const bool in_file = !*dashes;
    int n_names = in_file ? 0 : 2;
    for (int i = 0; i < p->line->n_options; i++) names[n_names++] = p->line->options[i].name;
    char word[64];
    snprintf(word, sizeof word, "%.*s", (int)(n < sizeof word ? n : sizeof word - 1), name);
    for (int i = 0; i < p->line->n_absent; i++) {
        const option_absent *a = &p->line->absent[i];
        if (strcmp(a->name, word) != 0) continue;
        return HD_FAIL(&p->err, HD_EINVAL, "%shadal %s takes no %s%s: %s", where,
                       p->line->command, dashes, word, a->why);
    }
    const char *near = nearest_word(word, names, n_names);
    if (near) {
        return HD_FAIL(&p->err, HD_EINVAL, "%sunknown option %s%s; did you mean %s%s?", where,
                       dashes, word, in_file ? "" : "--", near);
    }
    return HD_FAIL(&p->err, HD_EINVAL, "%sunknown option %s%s; see hadal %s --help", where,
                   dashes, word, p->line->command);
}

static void store_int(const option *o, int64_t v) {
    if (o->bytes == sizeof(bool)) {
        *(bool *)o->value = v != 0;
    } else if (o->kind == OPTION_CHOICE) {
        *(int *)o->value = (int)v;
    } else if (o->bytes == sizeof(int32_t)) {
        *(int32_t *)o->value = (int32_t)v;
    } else {
        *(int64_t *)o->value = v;
    }
}

static hd_status set_int(parse *p, const option *o, const char *text) {
    char *end;
    errno = 0;
    if (o->min_word && strcmp(text, o->min_word) == 0) {
        store_int(o, o->min);
        return HD_OK;
    }
    bool plain = (text[0] >= '0' && text[0] <= '9') ||
                 (text[0] == '-' && text[1] >= '0' && text[1] <= '9');
    long long v = plain ? strtoll(text, &end, 10) : 0;
    if (!plain || *end) {
        return HD_FAIL(&p->err, HD_EINVAL, "--%s: '%s' is not a whole number", o->name, text);
    }
    if (errno || v < o->min || v > o->max) {
        return HD_FAIL(&p->err, HD_EINVAL, "--%s: %s is out of range %lld..%lld", o->name, text,
                       (long long)o->min, (long long)o->max);
    }
    store_int(o, v);
    return HD_OK;
}

static hd_status set_real(parse *p, const option *o, const char *text) {
    char *end;
    double v = strtod(text, &end);
    bool plain = text[0] && !*end && strspn(text, "0123456789+-.eE") == strlen(text);
    if (!plain) return HD_FAIL(&p->err, HD_EINVAL, "--%s: '%s' is not a number", o->name, text);
    if (!(v >= o->real_min && v <= o->real_max)) {
        return HD_FAIL(&p->err, HD_EINVAL, "--%s: %s is out of range %g..%g", o->name, text,
                       o->real_min, o->real_max);
    }
    if (o->bytes == sizeof(float)) {
        *(float *)o->value = (float)v;
    } else {
        *(double *)o->value = v;
    }
    return HD_OK;
}

static hd_status set_choice(parse *p, const option *o, const char *text) {
    int n = 0;
    for (; o->choices[n]; n++) {
        if (strcmp(o->choices[n], text) != 0) continue;
        if (o->kind == OPTION_WORD) {
            *(const char **)o->value = o->choices[n];
        } else {
            store_int(o, n);
        }
        return HD_OK;
    }
    const char *near = nearest_word(text, o->choices, n);
    char all[200] = "";
    for (int i = 0; i < n; i++) {
        size_t used = strlen(all);
        snprintf(all + used, sizeof all - used, "%s%s", i ? ", " : "", o->choices[i]);
    }
    return HD_FAIL(&p->err, HD_EINVAL, "--%s: '%s' is none of %s%s%s%s", o->name, text, all,
                   near ? "; did you mean " : "", near ? near : "", near ? "?" : "");
}

static hd_status set_value(parse *p, const option *o, const char *text) {
    switch (o->kind) {
    case OPTION_FLAG:
        *(bool *)o->value = true;
        return HD_OK;
    case OPTION_TEXT:
        *(const char **)o->value = text;
        return HD_OK;
    case OPTION_INT:
        return set_int(p, o, text);
    case OPTION_REAL:
        return set_real(p, o, text);
    case OPTION_CHOICE:
    case OPTION_WORD:
        return set_choice(p, o, text);
    }
    return HD_EINVAL;
}

/* Refuses a second value, also by another name of the same variable. */
static hd_status check_given(parse *p, int index, const char *value) {
    const option *o = &p->line->options[index];
    for (int k = 0; k < p->line->n_options; k++) {
        const option *other = &p->line->options[k];
        const char *before = p->given[k];
        if (other->value != o->value || !before || strcmp(before, value) == 0) continue;
        if (k == index) {
            return HD_FAIL(&p->err, HD_EINVAL, "--%s is given twice, as '%s' and '%s'", o->name,
                           before, value);
        }
        return HD_FAIL(&p->err, HD_EINVAL, "--%s %s and --%s %s contradict each other",
                       other->name, before, o->name, value);
    }
    return HD_OK;
}

/* Parses one option of the command line; *i advances past a value in the next argument. */
static hd_status take_option(parse *p, int argc, char **argv, int *i) {
    const char *arg = argv[*i], *value = NULL;
    int index = -1;
    if (arg[1] == '-') {
        size_t n = strcspn(arg + 2, "=");
        if (arg[2 + n] == '=') value = arg + 2 + n + 1;
        if (n == 6 && strncmp(arg + 2, "config", 6) == 0) {
            if (!value && ++*i < argc) value = argv[*i];
            if (!value) return HD_FAIL(&p->err, HD_EINVAL, "--config needs a value: FILE");
            if (p->config) return HD_FAIL(&p->err, HD_EINVAL, "--config is given twice");
            p->config = value;
            return HD_OK;
        }
        index = find_option(p->line, arg + 2, n);
        if (index < 0) return unknown_option(p, "--", arg + 2, n, "");
    } else {
        for (int k = 0; k < p->line->n_options; k++) {
            if (p->line->options[k].letter && p->line->options[k].letter == arg[1]) index = k;
        }
        if (index < 0 || arg[2]) return unknown_option(p, "-", arg + 1, strlen(arg + 1), "");
    }
    const option *o = &p->line->options[index];
    if (o->kind == OPTION_FLAG) {
        if (value) return HD_FAIL(&p->err, HD_EINVAL, "--%s takes no value", o->name);
        value = "";
    } else if (!value) {
        if (++*i >= argc) {
            return HD_FAIL(&p->err, HD_EINVAL, "--%s needs a value: %s", o->name, o->metavar);
        }
        value = argv[*i];
    }
    HD_TRY(check_given(p, index, value));
    p->given[index] = value;
    return set_value(p, o, value);
}

/* Writes "FILE: line L column C: " of the first JSON string that equals key. */
static void locate_key(char *out, size_t cap, const char *path, const char *text,
                       const char *key) {
    size_t n = strlen(key);
    int line = 1, column = 1;
    for (const char *c = text; *c; c++, column++) {
        if (*c == '"' && strncmp(c + 1, key, n) == 0 && c[n + 1] == '"') break;
        if (*c == '\n') {
            line++;
            column = 0;
        }
    }
    snprintf(out, cap, "%s: line %d column %d: ", path, line, column);
}

static hd_status config_value(parse *p, const option *o, json_t *value, const char *where) {
    char number[64];
    switch (o->kind) {
    case OPTION_FLAG:
        if (!json_is_boolean(value)) break;
        *(bool *)o->value = json_is_true(value);
        return HD_OK;
    case OPTION_INT:
        if (o->min_word && json_is_string(value)) {
            return set_int(p, o, json_string_value(value));
        }
        if (!json_is_integer(value)) break;
        snprintf(number, sizeof number, "%lld", (long long)json_integer_value(value));
        return set_int(p, o, number);
    case OPTION_REAL:
        if (!json_is_number(value)) break;
        snprintf(number, sizeof number, "%.17g", json_number_value(value));
        return set_real(p, o, number);
    case OPTION_TEXT:
    case OPTION_CHOICE:
    case OPTION_WORD:
        if (!json_is_string(value)) break;
        return set_value(p, o, json_string_value(value));
    }
    static const char *const wanted[] = {"true or false", "a string", "a whole number",
                                         "a number",      "a string", "a string"};
    return HD_FAIL(&p->err, HD_EINVAL, "%s'%s' must be %s", where, o->name, wanted[o->kind]);
}

/* Also by another name. */
static bool is_given(const parse *p, int index) {
    for (int k = 0; k < p->line->n_options; k++) {
        if (p->given[k] && p->line->options[k].value == p->line->options[index].value) {
            return true;
        }
    }
    return false;
}

/* The document stays alive: options may point at its strings. */
static hd_status read_config(parse *p) {
    static json_t *documents; /* keeps every document reachable for the program's life */
    char *text, where[300];
    const char *key;
    size_t n;
    json_t *root, *value;
    HD_TRY(hd_file_read(&text, &n, p->config, CONFIG_MAX_BYTES, &p->err));
    hd_status st = hd_json_parse(&root, text, n, p->config, &p->err);
    if (st == HD_OK && !json_is_object(root)) {
        st = HD_FAIL(&p->err, HD_EINVAL, "%s: must hold a JSON object", p->config);
    }
    if (st == HD_OK) {
        json_object_foreach(root, key, value) {
            locate_key(where, sizeof where, p->config, text, key);
            int index = find_option(p->line, key, strlen(key));
            if (index < 0) {
                st = unknown_option(p, "", key, strlen(key), where);
            } else if (!is_given(p, index)) { /* the command line has priority */
                st = config_value(p, &p->line->options[index], value, where);
            }
            if (st != HD_OK) break;
        }
    }
    free(text);
    if (root) {
        if (!documents) documents = json_array();
        json_array_append_new(documents, root);
    }
    return st;
}

/* Replaces names of models by folders. */
static hd_status find_models(const command_line *line, int n_given, hd_err *err) {
    static const model_part parts[] = {[POSITIONAL_MODEL] = MODEL_WHOLE,
                                       [POSITIONAL_TEXT] = MODEL_TEXT,
                                       [POSITIONAL_CONFIG] = MODEL_CONFIG};
    for (int i = 0; i < n_given; i++) {
        const positional *p = &line->positionals[i];
        if (p->kind != POSITIONAL_PLAIN) {
            HD_TRY(model_path_find(p->value, parts[p->kind], err));
        }
    }
    return HD_OK;
}

static hd_status parse_all(parse *p, int argc, char **argv) {
    int n_positional = 0;
    bool only_positional = false;
    for (int i = 1; i < argc; i++) {
        if (!only_positional && strcmp(argv[i], "--") == 0) {
            only_positional = true;
        } else if (!only_positional && argv[i][0] == '-' && argv[i][1]) {
            HD_TRY(take_option(p, argc, argv, &i));
        } else if (n_positional < p->line->n_positionals) {
            *p->line->positionals[n_positional++].value = argv[i];
        } else {
            return HD_FAIL(&p->err, HD_EINVAL, "unexpected argument '%s'; see hadal %s --help",
                           argv[i], p->line->command);
        }
    }
    if (p->config) HD_TRY(read_config(p));
    if (n_positional < p->line->n_positionals && !p->line->positionals[n_positional].optional) {
        return HD_FAIL(&p->err, HD_EINVAL, "hadal %s needs %s; see hadal %s --help",
                       p->line->command, p->line->positionals[n_positional].name,
                       p->line->command);
    }
    return find_models(p->line, n_positional, &p->err);
}

/* ---- help ---- */

/* Prints the name at the left, and the text beside it in its own lines. */
static void print_entry(screen *out, const char *name, const char *text) {
    out->indent = TEXT_COLUMN;
    screen_print(out, "%-*s", TEXT_COLUMN - 1, name);
    screen_print(out, strlen(name) >= TEXT_COLUMN ? "\n%*s" : "%*s",
                 strlen(name) >= TEXT_COLUMN ? TEXT_COLUMN : 1, "");
    screen_print(out, "%s\n", text);
}

/* Writes the help, and the range: (a, b, c), (0..9). */
static void print_option(screen *out, const option *o) {
    char name[100], letter[8] = "    ", text[512];
    if (o->letter) snprintf(letter, sizeof letter, "-%c, ", o->letter);
    snprintf(name, sizeof name, "  %s--%s%s%s", letter, o->name, o->metavar ? " " : "",
             o->metavar ? o->metavar : "");
    size_t n = (size_t)snprintf(text, sizeof text, "%s", o->help);
    if (o->kind == OPTION_INT && o->max >= INT32_MAX) {
        if (o->min) snprintf(text + n, sizeof text - n, " (from %lld)", (long long)o->min);
    } else if (o->kind == OPTION_INT && o->min_word) {
        snprintf(text + n, sizeof text - n, " (%s, %lld..%lld)", o->min_word,
                 (long long)o->min + 1, (long long)o->max);
    } else if (o->kind == OPTION_INT) {
        snprintf(text + n, sizeof text - n, " (%lld..%lld)", (long long)o->min,
                 (long long)o->max);
    } else if (o->kind == OPTION_REAL) {
        snprintf(text + n, sizeof text - n, " (%g..%g)", o->real_min, o->real_max);
    }
    for (int i = 0; o->choices && o->choices[i] && n < sizeof text; i++) {
        n += (size_t)snprintf(text + n, sizeof text - n, "%s%s%s", i ? "" : " (", o->choices[i],
                              o->choices[i + 1] ? ", " : ")");
    }
    if (o->on_machine && n < sizeof text) o->on_machine(text + n, sizeof text - n);
    print_entry(out, name, text);
}

/* Lines of a paragraph are joined and wrapped; those that begin with a space are kept. */
static void print_details(screen *out, const char *text) {
    screen_print(out, "\n");
    for (; *text; text++) {
        const bool stays = *text == '\n' && (text[1] == '\n' || text[1] == ' ' || !text[1]);
        if (*text == '\n' && !stays) {
            screen_print(out, " ");
        } else {
            screen_write(out, text, 1);
            if (stays && text[1] == '\n') screen_write(out, text++, 1);
        }
    }
    screen_print(out, "\n");
}

static void print_help(const command_line *line) {
    screen terminal, *out = &terminal;
    screen_open(out, stdout);
    if (!out->width || out->width > MOST_WIDTH) out->width = out->width ? MOST_WIDTH : 80;
    screen_print(out, "usage: hadal %s", line->command);
    for (int i = 0; i < line->n_positionals; i++) {
        screen_print(out, line->positionals[i].optional ? " [%s]" : " %s",
                     line->positionals[i].name);
    }
    screen_print(out, " [options]\n\n%s\n", line->summary);
    if (line->details) print_details(out, line->details);
    screen_print(out, "\noptions:\n");
    for (int i = 0; i < line->n_options; i++) print_option(out, &line->options[i]);
    print_entry(out, "      --config FILE",
                "JSON object with option names as keys; flags given here win");
    print_entry(out, "  -h, --help", "this text");
    screen_end(out);
}

static void (*visitor)(const command_line *line, void *user);
static void *visitor_user;

void options_visit(void (*visit)(const command_line *line, void *user), void *user) {
    visitor = visit;
    visitor_user = user;
}

bool options_parse(const command_line *line, int argc, char **argv, int *code) {
    parse p = {.line = line};
    if (visitor) {
        visitor(line, visitor_user);
        *code = 0;
        return false;
    }
    for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            print_help(line);
            *code = 0;
            return false;
        }
    }
    if (parse_all(&p, argc, argv) == HD_OK) return true;
    *code = report_error(&p.err);
    return false;
}
