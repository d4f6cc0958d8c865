/* test_engine_options.c - every command offers the engine's options, each sets its field, and
 * where one is missing there is a reason. */
#include "check.h"

#include <stdio.h>
#include <string.h>

#include "cli/commands.h"
#include "cli/engine_options.h"

/* The commands as their tables name them; an emulated rank is a form of bench latency. */
static const struct {
    const char *name;
    bool rank;
    engine_command bit;
} commands[] = {
    {"serve",            false, ENGINE_SERVE     },
    {"chat",             false, ENGINE_CHAT      },
    {"generate",         false, ENGINE_GENERATE  },
    {"eval",             false, ENGINE_EVAL      },
    {"replay",           false, ENGINE_REPLAY    },
    {"bench throughput", false, ENGINE_THROUGHPUT},
    {"bench latency",    false, ENGINE_LATENCY   },
    {"logits",           false, ENGINE_LOGITS    },
    {"bench ops",        false, ENGINE_OPS       },
    {"bench latency",    true,  ENGINE_RANK      },
    {"inspect",          false, ENGINE_INSPECT   },
};

static int count(const command_line *line, const char *name) {
    int n = 0;
    for (int i = 0; i < line->n_options; i++) n += strcmp(line->options[i].name, name) == 0;
    return n;
}

static const char *reason(const command_line *line, const char *name) {
    for (int i = 0; i < line->n_absent; i++) {
        if (strcmp(line->absent[i].name, name) == 0) return line->absent[i].why;
    }
    return NULL;
}

static bool offers(const char *name, engine_command bit) {
    size_t n;
    const engine_option *all = engine_options_all(&n);
    bool found = false;
    for (size_t i = 0; i < n; i++) {
        if (strcmp(all[i].option.name, name) != 0 || !(all[i].offered & (int)bit)) continue;
        assert_false(found); /* one row of a name at most */
        found = true;
    }
    return found;
}

static engine_command bit_of(const command_line *line) {
    const bool rank = count(line, "emulate-rank") > 0;
    for (size_t i = 0; i < HD_LEN(commands); i++) {
        if (strcmp(commands[i].name, line->command) == 0 && commands[i].rank == rank) {
            return commands[i].bit;
        }
    }
    return 0;
}

/* Of each table: what it has, and why it has not the rest. */
static void look(const command_line *line, void *user) {
    int *seen = user;
    size_t n;
    const engine_option *all = engine_options_all(&n);
    const engine_command bit = bit_of(line);
    if (!bit) return;
    *seen |= (int)bit;
    for (size_t i = 0; i < n; i++) {
        const char *name = all[i].option.name;
        if (offers(name, bit)) {
            assert_int_equal(count(line, name), 1);
            assert_null(reason(line, name));
        } else if (count(line, name) == 0 && bit != ENGINE_INSPECT) {
            assert_non_null(reason(line, name));
        }
    }
}

static void every_command_offers_every_option_or_says_why_not(void **state) {
    (void)state;
    size_t n;
    const command *all = commands_all(&n);
    int seen = 0, known = 0;
    for (size_t i = 0; i < n; i++) command_visit(&all[i], look, &seen);
    for (size_t i = 0; i < HD_LEN(commands); i++) known |= (int)commands[i].bit;
    assert_int_equal(seen, known);
}

static const char *a_value(const option *o, char *out, size_t size) {
    switch (o->kind) {
    case OPTION_FLAG:
        return NULL;
    case OPTION_TEXT:
        return "x";
    case OPTION_INT: {
        const bool wide = o->bytes == sizeof(int64_t);
        snprintf(out, size, "%lld", wide ? (long long)1 << 40 : (long long)o->max);
        return out;
    }
    case OPTION_REAL:
        snprintf(out, size, "%g", o->real_max);
        return out;
    case OPTION_CHOICE:
    case OPTION_WORD:
        return o->choices[o->choices[1] ? 1 : 0];
    }
    return NULL;
}

/* The field of the row, and no other, gets the value. */
static void check_row(const engine_option *row, engine_command bit) {
    const command_line line = {.command = "test"};
    const engine_settings before = engine_settings_default();
    engine_settings s = before;
    char test[] = "test", name[64], text[64];
    const char *value = a_value(&row->option, text, sizeof text);
    char *argv[] = {test, name, (char *)(uintptr_t)value};
    snprintf(name, sizeof name, "--%s", row->option.name);
    int code;
    assert_true(engine_options_parse(&line, bit, &s, value ? 3 : 2, argv, &code));
    const size_t end = row->at + row->option.bytes;
    assert_memory_not_equal((char *)&s + row->at, (const char *)&before + row->at,
                            row->option.bytes);
    s.options.need_drafts = false; /* follows from --draft-tokens */
    assert_memory_equal(&s, &before, row->at);
    assert_memory_equal((char *)&s + end, (const char *)&before + end, sizeof s - end);
    option o = row->option;
    o.value = (char *)&s + row->at;
    if (o.kind == OPTION_INT) {
        snprintf(text, sizeof text, "%lld", (long long)option_int_value(&o));
        assert_string_equal(text, value);
    } else if (o.kind == OPTION_REAL) {
        assert_float_equal(option_real_value(&o), o.real_max, 0);
    } else if (o.kind == OPTION_WORD || o.kind == OPTION_TEXT) {
        assert_string_equal(*(const char **)o.value, value);
    }
}

static void every_option_sets_its_field(void **state) {
    (void)state;
    size_t n;
    const engine_option *all = engine_options_all(&n);
    for (size_t i = 0; i < n; i++) {
        for (size_t c = 0; c < HD_LEN(commands); c++) {
            if (all[i].offered & (int)commands[c].bit) check_row(&all[i], commands[c].bit);
        }
    }
}

static void a_word_names_the_least_number(void **state) {
    (void)state;
    static const struct {
        const char *text;
        int32_t expect;
    } cases[] = {
        {"auto", HD_DRAFTS_AUTO},
        {"-1",   HD_DRAFTS_AUTO},
        {"0",    0             },
        {"7",    7             }
    };
    for (size_t i = 0; i < HD_LEN(cases); i++) {
        const command_line line = {.command = "test"};
        engine_settings s = engine_settings_default();
        s.draft_tokens = 3;
        char test[] = "test", name[] = "--draft-tokens";
        char *argv[] = {test, name, (char *)(uintptr_t)cases[i].text};
        int code;
        assert_true(engine_options_parse(&line, ENGINE_EVAL, &s, 3, argv, &code));
        assert_int_equal(s.draft_tokens, cases[i].expect);
        assert_int_equal(s.options.need_drafts, cases[i].expect > 0);
    }
}

int test_engine_options(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_command_offers_every_option_or_says_why_not),
        cmocka_unit_test(every_option_sets_its_field),
        cmocka_unit_test(a_word_names_the_least_number),
    };
    return cmocka_run_group_tests_name("engine_options", tests, NULL, NULL);
}
