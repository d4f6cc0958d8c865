/* test_screen.c - wrapping by words: widths, what is kept, and what a terminal must not get. */
#include "check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/philox.h"
#include "base/status.h"
#include "cli/terminal/screen.h"

/* What a terminal of so many columns gets, written in pieces of `step` bytes; the caller's. */
static char *shown(const char *text, size_t n, int width, int indent, size_t step) {
    char *out = NULL;
    size_t size;
    FILE *to = open_memstream(&out, &size);
    assert_non_null(to);
    screen s;
    screen_open(&s, to);
    assert_int_equal(s.width, 0); /* no terminal */
    s.width = width;
    s.indent = indent;
    for (size_t i = 0; i < n; i += step)
        screen_write(&s, text + i, n - i < step ? n - i : step);
    screen_end(&s);
    fclose(to);
    return out;
}

static const struct {
    const char *text;
    int width, indent;
    const char *wanted;
} rows[] = {
    {"one two three",               20, 0, "one two three"                    },
    {"one two three",               7,  0, "one two\nthree"                   },
    {"one two three",               8,  0, "one two\nthree"                   },
    {"one  two\n   three",          20, 0, "one  two\n   three"               },
    {"key   one two three",         12, 6, "key   one\n      two\n      three"},
    {"abcdefghij",                  4,  0, "abcd\nefgh\nij"                   },
    {"a\tb",                        20, 0, "a       b"                        },
    {"",                            20, 0, ""                                 },
    {"\n\n",                        20, 0, "\n\n"                             },
    {"你好世界",                5,  0, "你好\n世界"                   },
    {"e\xcc\x81"
     "e\xcc\x81"
     "e\xcc\x81",              3,  0,
     "e\xcc\x81"
     "e\xcc\x81"
     "e\xcc\x81"                                                              },
    {"\033[31mred",                 20, 0, "\\x1b[31mred"                     },
    {"\xc2\x9b"
     "31m",                    20, 0, "\\x9b31m"                         },
    {"a\rb\ab",                     20, 0, "a\\x0db\\x07b"                    },
    {"cut \xe4\xbd and \x80 stray", 20, 0, "cut  and  stray"                  },
};

static void test_rows(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(rows); i++) {
        for (size_t step = 1; step < 6; step++) {
            char *got =
                shown(rows[i].text, strlen(rows[i].text), rows[i].width, rows[i].indent, step);
            assert_string_equal(got, rows[i].wanted);
            free(got);
        }
    }
}

/* Any bytes: no line is too wide, none drives the terminal, and pieces change nothing. */
static void test_any_bytes(void **state) {
    static const char *const pieces[] = {
        "word ",   "a", "  ",  "\n", "你",   "\033[2J",
        "\xff",    "é", "x-y", "\t", "\xe4", "longer-than-any-line-is",
        "\xc2\x9b"};
    (void)state;
    for (uint64_t round = 0; round < 300; round++) {
        char text[600] = "";
        size_t n = 0;
        for (uint32_t k = 0; k < 60 && n + 32 < sizeof text; k++) {
            const char *p = pieces[hd_philox_at(round, 0, k).v[0] % HD_LEN(pieces)];
            memcpy(text + n, p, strlen(p));
            n += strlen(p);
        }
        const int width = 8 + (int)(round % 30);
        char *got = shown(text, n, width, (int)(round % 4), 1),
             *again = shown(text, n, width, (int)(round % 4), 7);
        assert_string_equal(got, again);
        int columns = 0;
        for (const unsigned char *c = (const unsigned char *)got; *c; c++) {
            assert_true(*c == '\n' || *c >= 0x20);
            columns = *c == '\n' ? 0 : columns + ((*c & 0xc0) != 0x80) + (*c == 0xe4);
            assert_true(columns <= width);
        }
        free(got);
        free(again);
    }
}

static void test_a_pipe_gets_every_byte(void **state) {
    static const char text[] = "\033[2J\xff a\0b   \n";
    (void)state;
    char *got = shown(text, sizeof text - 1, 0, 0, 3);
    assert_memory_equal(got, text, sizeof text - 1);
    free(got);
}

static void test_labels(void **state) {
    char *out = NULL;
    size_t size;
    FILE *to = open_memstream(&out, &size);
    screen s;
    (void)state;
    assert_non_null(to);
    screen_open(&s, to);
    screen_turn_to(&s, true);
    screen_turn_to(&s, true);
    screen_write(&s, "why", 3);
    screen_turn_to(&s, false);
    screen_write(&s, "that", 4);
    screen_end(&s);
    fclose(to);
    assert_string_equal(out, "[reasoning]\nwhy\n\n[answer]\nthat");
    free(out);
}

int test_screen(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows),
        cmocka_unit_test(test_any_bytes),
        cmocka_unit_test(test_a_pipe_gets_every_byte),
        cmocka_unit_test(test_labels),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
