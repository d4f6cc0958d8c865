/* test_options.c - one table drives flags, config files and refusals. */
#include "check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/options.h"

typedef struct settings {
    bool quiet;
    const char *out, *model;
    int64_t n;
    double ratio;
    int mode;
} settings;

static const settings defaults = {.n = 7, .ratio = 0.5, .mode = 1};

/* Parses "test" followed by the words; message receives what standard error got. */
static bool parse(settings *s, int *code, char *message, size_t cap, const char *const *words) {
    static const char *const modes[] = {"fast", "slow", NULL};
    const option table[] = {
        {.name = "quiet",    .letter = 'q',       .kind = OPTION_FLAG, .value = &s->quiet},
        {.name = "out",      .kind = OPTION_TEXT, .value = &s->out,    .metavar = "FILE" },
        {.name = "number",
         .letter = 'n',
         .kind = OPTION_INT,
         .value = &s->n,
         .metavar = "N",
         .min = -5,
         .max = 100},
        {.name = "ratio",
         .kind = OPTION_REAL,
         .value = &s->ratio,
         .metavar = "R",
         .real_min = 0,
         .real_max = 1},
        {.name = "mode", .kind = OPTION_CHOICE,                          .value = &s->mode,                                                .choices = modes                                                                   },
    };
    const positional model = {"MODEL", &s->model, true, POSITIONAL_PLAIN};
    const command_line line = {.command = "test",
                               .positionals = &model,
                               .n_positionals = 1,
                               .options = table,
                               .n_options = (int)HD_LEN(table)};
    char *argv[16] = {strdup("test")};
    int argc = 1;
    for (; words[argc - 1]; argc++) argv[argc] = strdup(words[argc - 1]);
    *s = defaults;
    *code = -1;
    FILE *errors = tmpfile();
    assert_non_null(errors);
    fflush(stderr);
    int saved = dup(STDERR_FILENO);
    dup2(fileno(errors), STDERR_FILENO);
    bool ok = options_parse(&line, argc, argv, code);
    fflush(stderr);
    dup2(saved, STDERR_FILENO);
    close(saved);
    rewind(errors);
    size_t n = fread(message, 1, cap - 1, errors);
    message[n] = '\0';
    fclose(errors);
    /* the caller looks at texts in s, which point into argv or a config file */
    static char kept_out[300], kept_model[300];
    if (s->out) s->out = strncpy(kept_out, s->out, sizeof kept_out - 1);
    if (s->model) s->model = strncpy(kept_model, s->model, sizeof kept_model - 1);
    for (int i = 0; i < argc; i++) free(argv[i]);
    return ok;
}

#define WORDS(...) ((const char *const[]){__VA_ARGS__, NULL})

static settings accept(const char *const *words) {
    settings s;
    char message[1000];
    int code;
    bool ok = parse(&s, &code, message, sizeof message, words);
    assert_string_equal(message, "");
    assert_true(ok);
    return s;
}

static void refuse(const char *expect, const char *const *words) {
    settings s;
    char message[1000], whole[600];
    int code;
    assert_false(parse(&s, &code, message, sizeof message, words));
    snprintf(whole, sizeof whole, "error: %s\n", expect);
    assert_string_equal(message, whole);
    assert_int_equal(code, 2);
}

static void flags_set_what_they_name(void **state) {
    (void)state;
    settings s = accept(WORDS("m", "--quiet", "--out", "-", "--number=-5", "--ratio", "1e-1"));
    assert_true(s.quiet && s.n == -5 && s.mode == 1);
    assert_float_equal(s.ratio, 0.1, 0);
    assert_string_equal(s.out, "-");
    assert_string_equal(s.model, "m");
    s = accept(WORDS("-q", "-n", "100", "--mode", "fast", "--", "--quiet"));
    assert_true(s.quiet && s.n == 100 && s.mode == 0);
    assert_string_equal(s.model, "--quiet");
    s = accept(WORDS("--out="));
    assert_string_equal(s.out, "");
    s = accept(WORDS("-n", "3", "-n", "3")); /* the same value again contradicts nothing */
    assert_true(s.n == 3 && !s.model);
}

static void numbers_are_whole_and_in_range(void **state) {
    (void)state;
    const char *const odd[] = {"abc", "12x", "", "0x10", " 5", "1e3", "+5", "-", "--5", "5."};
    for (size_t i = 0; i < HD_LEN(odd); i++) {
        char expect[100];
        snprintf(expect, sizeof expect, "--number: '%s' is not a whole number", odd[i]);
        refuse(expect, WORDS("--number", odd[i]));
    }
    refuse("--number: 101 is out of range -5..100", WORDS("--number", "101"));
    refuse("--number: 99999999999999999999 is out of range -5..100",
           WORDS("--number", "99999999999999999999"));
    const char *const unreal[] = {"nan", "inf", "-inf", "0x1p-2", "", " 1", "1 "};
    for (size_t i = 0; i < HD_LEN(unreal); i++) {
        char expect[100];
        snprintf(expect, sizeof expect, "--ratio: '%s' is not a number", unreal[i]);
        refuse(expect, WORDS("--ratio", unreal[i]));
    }
    refuse("--ratio: 1e999 is out of range 0..1", WORDS("--ratio", "1e999"));
    refuse("--ratio: -0.1 is out of range 0..1", WORDS("--ratio=-0.1"));
}

static void mistakes_are_named(void **state) {
    (void)state;
    refuse("unknown option --nubmer; did you mean --number?", WORDS("--nubmer", "1"));
    refuse("unknown option --confg; did you mean --config?", WORDS("--confg", "1"));
    refuse("unknown option --hlep; did you mean --help?", WORDS("--hlep"));
    refuse("unknown option -number; did you mean --number?", WORDS("-number", "1"));
    refuse("unknown option -x; see hadal test --help", WORDS("-x"));
    refuse("--out needs a value: FILE", WORDS("--out"));
    refuse("--number is given twice, as '1' and '2'", WORDS("--number", "1", "-n", "2"));
    refuse("--quiet takes no value", WORDS("--quiet=yes"));
    refuse("--mode: 'slwo' is none of fast, slow; did you mean slow?", WORDS("--mode", "slwo"));
    refuse("unexpected argument 'b'; see hadal test --help", WORDS("a", "b"));
    refuse("--config is given twice", WORDS("--config", "a", "--config", "b"));
}

static const char *config_file(const char *text) {
    static char path[] = "/tmp/hadal-options-XXXXXX";
    memcpy(path + sizeof path - 7, "XXXXXX", 6);
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, strlen(text)), strlen(text));
    close(fd);
    return path;
}

static void config_files_equal_flags(void **state) {
    (void)state;
    const char *path = config_file("{\"quiet\": true, \"out\": \"x\", \"number\": -5,\n"
                                   " \"ratio\": 1, \"mode\": \"fast\"}");
    settings s = accept(WORDS("--config", path));
    assert_true(s.quiet && s.n == -5 && s.mode == 0);
    assert_float_equal(s.ratio, 1, 0);
    assert_string_equal(s.out, "x");
    s = accept(WORDS("--number", "9", "--config", path, "--mode=slow"));
    assert_true(s.n == 9 && s.mode == 1);
    assert_string_equal(s.out, "x");
    unlink(path);
    path = config_file("{\"quiet\": false}");
    assert_false(accept(WORDS("--config", path)).quiet);
    assert_true(accept(WORDS("--config", path, "-q")).quiet);
    unlink(path);
}

static void config_mistakes_have_a_place(void **state) {
    (void)state;
    static const struct {
        const char *text, *expect;
    } rows[] = {
        {"{\n  \"nubmer\": 1}", "line 2 column 3: unknown option nubmer; did you mean number?"},
        {"{\"config\": \"x\"}",
         "line 1 column 2: unknown option config; see hadal test --help"                      },
        {"{\"number\": 1.0}",   "line 1 column 2: 'number' must be a whole number"            },
        {"{\"number\": \"1\"}", "line 1 column 2: 'number' must be a whole number"            },
        {"{\"quiet\": 1}",      "line 1 column 2: 'quiet' must be true or false"              },
        {"{\"out\": null}",     "line 1 column 2: 'out' must be a string"                     },
        {"{\"ratio\": []}",     "line 1 column 2: 'ratio' must be a number"                   },
        {"[]",                  "must hold a JSON object"                                     },
    };
    for (size_t i = 0; i < HD_LEN(rows); i++) {
        const char *path = config_file(rows[i].text);
        char expect[200];
        snprintf(expect, sizeof expect, "%s: %s", path, rows[i].expect);
        refuse(expect, WORDS("--config", path));
        unlink(path);
    }
}

int test_options(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(flags_set_what_they_name),
        cmocka_unit_test(numbers_are_whole_and_in_range),
        cmocka_unit_test(mistakes_are_named),
        cmocka_unit_test(config_files_equal_flags),
        cmocka_unit_test(config_mistakes_have_a_place),
    };
    return cmocka_run_group_tests_name("options", tests, NULL, NULL);
}
