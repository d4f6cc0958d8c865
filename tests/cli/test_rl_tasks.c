/* test_rl_tasks.c - generated prompts have answers, and checkers accept these and nothing else. */
#include "check.h"

#include <stdio.h>

#include "base/json.h"
#include "cli/countdown.h"
#include "cli/eval_check.h"
#include "cli/training/rl_generate.h"
#include "cli/training/rl_tasks.h"

enum { PROMPTS = 200, SEED = 7 };

static bool is_right_in(const json_t *checker, const char *text, size_t n,
                        hd_chat_encoding encoding) {
    hd_err err = {0};
    eval_verdict v;
    if (eval_check(&v, checker, text, n, encoding, false, &err) != HD_OK)
        fail_msg("%s", err.msg);
    return v.right;
}

static bool is_right(const json_t *checker, const char *text) {
    return is_right_in(checker, text, strlen(text), HD_CHAT_V4);
}

static json_t *prompt(const char *task, int64_t i) {
    rl_tasks t;
    hd_err err = {0};
    if (rl_tasks_open(&t, task, NULL, SEED, false, &err) != HD_OK) fail_msg("%s", err.msg);
    json_t *line = rl_tasks_at(&t, i);
    rl_tasks_close(&t);
    assert_non_null(line);
    return line;
}

static const char *asked(const json_t *line) {
    const json_t *first = json_array_get(json_object_get(line, "messages"), 0);
    return json_string_value(json_object_get(first, "content"));
}

/* ---- all generators ---- */

static void prompts_differ_and_repeat(void **state) {
    (void)state;
    for (int task = 0; rl_task_names[task]; task++) {
        int other = 0;
        for (int64_t i = 0; i < PROMPTS; i++) {
            hd_err err = {0};
            json_t *a = rl_generate(task, SEED, i), *b = rl_generate(task, SEED, i);
            json_t *next = rl_generate(task, SEED, i + 1),
                   *seed = rl_generate(task, SEED + 1, i);
            assert_true(json_equal(a, b));
            other += !json_equal(a, next) && !json_equal(a, seed);
            assert_int_equal(eval_check_valid(json_object_get(a, "checker"), "prompt", &err),
                             HD_OK);
            json_decref(a);
            json_decref(b);
            json_decref(next);
            json_decref(seed);
        }
        assert_true(other > PROMPTS / 2); /* of `word` there are 36 */
    }
}

static void unknown_tasks_are_refused(void **state) {
    (void)state;
    rl_tasks t;
    hd_err err = {0};
    assert_int_equal(rl_tasks_open(&t, "tool call", NULL, SEED, false, &err), HD_EINVAL);
    for (int task = 0; rl_task_names[task]; task++) {
        assert_non_null(strstr(err.msg, rl_task_names[task]));
    }
}

/* ---- countdown: a search for an expression, apart from the checker ---- */

typedef struct item {
    double value;
    char text[96];
} item;

static bool search(const item *have, int n, double target, char *out, size_t cap) {
    static const char signs[] = "+-*/";
    for (int i = 0; i < n; i++) {
        const double off = have[i].value - target;
        if (off < 1e-9 && off > -1e-9) {
            snprintf(out, cap, "%s", have[i].text);
            return true;
        }
    }
    for (int i = 0; i < n; i++) {
        for (int k = 0; k < n; k++) {
            for (int sign = 0; i != k && sign < 4; sign++) {
                item next[4];
                int left = 0;
                for (int j = 0; j < n; j++) {
                    if (j != i && j != k) next[left++] = have[j];
                }
                const double a = have[i].value, b = have[k].value;
                const bool zero = b < 1e-9 && b > -1e-9;
                if (sign == 3 && zero) continue;
                next[left].value = sign == 0   ? a + b
                                   : sign == 1 ? a - b
                                   : sign == 2 ? a * b
                                               : a / b;
                snprintf(next[left].text, sizeof next[left].text, "(%.40s %c %.40s)",
                         have[i].text, signs[sign], have[k].text);
                if (search(next, left + 1, target, out, cap)) return true;
            }
        }
    }
    return false;
}

static void countdown_prompts_have_answers(void **state) {
    (void)state;
    const int n = is_brief() ? 5 : 40;
    for (int64_t i = 0; i < n; i++) {
        json_t *line = prompt("countdown", i);
        const json_t *checker = json_object_get(line, "checker");
        const json_t *expect = json_object_get(checker, "expect");
        const json_t *numbers = json_object_get(expect, "numbers");
        const json_int_t target = json_integer_value(json_object_get(expect, "target"));
        char found[200], stated[300];
        item have[4];
        assert_int_equal(json_array_size(numbers), 4);
        for (size_t k = 0; k < 4; k++) {
            const json_int_t x = json_integer_value(json_array_get(numbers, k));
            have[k].value = (double)x;
            snprintf(have[k].text, sizeof have[k].text, "%d", (int)x);
            assert_non_null(strstr(asked(line), have[k].text));
            assert_true(x != target);
        }
        snprintf(stated, sizeof stated, "Make %d from", (int)target);
        assert_non_null(strstr(asked(line), stated));
        if (!search(have, 4, (double)target, found, sizeof found)) fail_msg("%s", asked(line));
        assert_true(is_right(checker, found));
        snprintf(stated, sizeof stated, "Let me see: 1 + 1 = 3\n%s = %d\n", found, (int)target);
        assert_true(is_right(checker, stated));
        snprintf(stated, sizeof stated, "%s + 1000", found);
        assert_false(is_right(checker, stated));
        snprintf(stated, sizeof stated, "%d", (int)target);
        assert_false(is_right(checker, stated));
        json_decref(line);
    }
}

static void countdown_answers(void **state) {
    (void)state;
    static const int32_t numbers[] = {3, 7, 25, 50, 3};
    static const struct {
        const char *text;
        int32_t target;
        bool right;
    } cases[] = {
        {"25 + 7",                                   32,  true },
        {"25+7=32",                                  32,  true },
        {" ( (25) + 7 ) = 32 ",                      32,  true },
        {"50 - 25 - 7",                              18,  true }, /* from the left */
        {"50 - (25 - 7)",                            32,  true },
        {"3 + 7 * 3",                                24,  true }, /* both threes */
        {"50 / 3 * 3",                               50,  true }, /* in fractions */
        {"25 / (50 / 7 / 3) * 7 / 7",                1,   false},
        {"7 * 3 + 25 / 50 * 3",                      32,  false}, /* 22.5 */
        {"3 - 7",                                    0,   false},
        {"3 - 7 + 25",                               21,  true }, /* below 0 on the way */
        {"7",                                        7,   true },
        {"25 + 7 = 33",                              32,  false}, /* says another value */
        {"25 + 7 = 32 = 32",                         32,  false},
        {"7 + 7",                                    14,  false}, /* used twice */
        {"3 + 3 + 3",                                9,   false},
        {"25 + 8 - 1",                               32,  false}, /* other numbers */
        {"32",                                       32,  false},
        {"257",                                      257, false},
        {"2 5 + 7",                                  32,  false},
        {"25 7",                                     32,  false},
        {"25 + 7.0",                                 32,  false},
        {"25 + 07",                                  32,  false},
        {"25 + +7",                                  32,  false},
        {"-25 + 50 + 7",                             32,  false},
        {"25 + 7;",                                  32,  false},
        {"25 + 7 is the answer",                     32,  false},
        {"the answer is 25 + 7",                     32,  false},
        {"(25 + 7",                                  32,  false},
        {"25 + 7)",                                  32,  false},
        {"()",                                       0,   false},
        {"",                                         0,   false},
        {"= 32",                                     32,  false},
        {"25 +",                                     32,  false},
        {"25 ** 7",                                  32,  false},
        {"25 / 0",                                   0,   false},
        {"25 / (3 - 3)",                             25,  false},
        {"0x19 + 7",                                 32,  false},
        {"25 + 7 # 32",                              32,  false},
        {"99999999999999999999999999",               32,  false},
        {"25 + 7 = 99999999999999999999999999",      32,  false},
        {"((((((((((((((((25 + 7))))))))))))))))",   32,  true }, /* 16 deep */
        {"(((((((((((((((((25 + 7)))))))))))))))))", 32,  false},
    };
    for (size_t i = 0; i < HD_LEN(cases); i++) {
        const bool right = countdown_is_right(cases[i].text, strlen(cases[i].text), numbers,
                                              HD_LEN(numbers), cases[i].target);
        if (right != cases[i].right)
            fail_msg("%s: %s", cases[i].text, right ? "right" : "wrong");
    }
}

static void countdown_bounds(void **state) {
    (void)state;
    static const int32_t large[] = {1000000, 999999, 999998, 999997, 3, 7, 11};
    static const char product[] = "1000000 * 999999 * 999998 * 999997";
    static const char fractions[] = "3 / 999999 / 999998 / 999997 - 7 / 11 / 1000000";
    static const char zero[] = "25 + 7\0";
    static const int32_t small[] = {25, 7};
    char *deep = malloc(1 << 20);
    assert_non_null(deep);
    memset(deep, '(', 1 << 20);
    assert_false(countdown_is_right(deep, 1 << 20, large, 7, 3));
    memset(deep, '9', 1 << 20);
    assert_false(countdown_is_right(deep, 1 << 20, large, 7, 9));
    free(deep);
    assert_false(countdown_is_right(product, sizeof product - 1, large, 7, 1));
    assert_false(countdown_is_right(fractions, sizeof fractions - 1, large, 7, 0));
    assert_false(countdown_is_right(zero, sizeof zero - 1, small, 2, 32));
    assert_true(countdown_is_right(zero, sizeof zero - 2, small, 2, 32));
}

static void bad_countdown_checkers_are_refused(void **state) {
    (void)state;
    static const char *const bad[] = {
        "null",
        "\"32\"",
        "{}",
        "{\"numbers\": [1, 2]}",
        "{\"numbers\": [], \"target\": 3}",
        "{\"numbers\": [1, 2.5], \"target\": 3}",
        "{\"numbers\": [1, -2], \"target\": 3}",
        "{\"numbers\": [1, 1000001], \"target\": 3}",
        "{\"numbers\": [1], \"target\": \"3\"}",
        "{\"numbers\": [1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17], \"target\": 3}"};
    for (size_t i = 0; i < HD_LEN(bad); i++) {
        hd_err err = {0};
        json_t *checker =
            json_pack("{s:s, s:o}", "type", "countdown", "expect",
                      hd_json_read(bad[i], strlen(bad[i]), JSON_DECODE_ANY, NULL));
        assert_int_equal(eval_check_valid(checker, "line 3", &err), HD_EINVAL);
        assert_non_null(strstr(err.msg, "line 3: checker.expect must be an object of numbers"));
        json_decref(checker);
    }
}

/* ---- tool calls ---- */

/* A call as V4 writes it, with the value of argument `other`, if it has that, in its place. */
static void write_call(char *out, size_t cap, const json_t *call, const char *name) {
    const char *key;
    json_t *value;
    size_t n = (size_t)snprintf(out, cap, "<｜DSML｜invoke name=\"%s\">\n", name);
    json_object_foreach(json_object_get(call, "arguments"), key, value) {
        n += (size_t)snprintf(out + n, cap - n, "<｜DSML｜parameter name=\"%s\" string=\"%s\">",
                              key, json_is_string(value) ? "true" : "false");
        if (json_is_string(value)) {
            n += (size_t)snprintf(out + n, cap - n, "%s", json_string_value(value));
        } else {
            n += (size_t)snprintf(out + n, cap - n, "%d", (int)json_integer_value(value));
        }
        n += (size_t)snprintf(out + n, cap - n, "</｜DSML｜parameter>\n");
    }
    snprintf(out + n, cap - n, "</｜DSML｜invoke>\n");
}

static void check_calls(const json_t *checker, const char *calls, bool right) {
    char text[3000];
    snprintf(text, sizeof text, "\n\n<｜DSML｜tool_calls>\n%s</｜DSML｜tool_calls>", calls);
    if (is_right(checker, text) != right) fail_msg("%s", text);
}

/* The request names the values, and the tools have their parameters. */
static void check_request(const json_t *line, const json_t *call) {
    const json_t *arguments = json_object_get(call, "arguments");
    const char *name = json_string_value(json_object_get(call, "name"));
    const char *key;
    json_t *value;
    int offered = 0;
    char number[16];
    json_object_foreach((json_t *)(uintptr_t)arguments, key, value) {
        snprintf(number, sizeof number, "%d", (int)json_integer_value(value));
        assert_non_null(
            strstr(asked(line), json_is_string(value) ? json_string_value(value) : number));
    }
    const json_t *tools = json_object_get(line, "tools");
    for (size_t i = 0; i < json_array_size(tools); i++) {
        const json_t *f = json_object_get(json_array_get(tools, i), "function");
        if (strcmp(json_string_value(json_object_get(f, "name")), name) != 0) continue;
        const json_t *p = json_object_get(json_object_get(f, "parameters"), "properties");
        offered++;
        json_object_foreach((json_t *)(uintptr_t)arguments, key, value) {
            const char *type =
                json_string_value(json_object_get(json_object_get(p, key), "type"));
            assert_string_equal(type, json_is_string(value) ? "string" : "integer");
        }
    }
    assert_int_equal(json_array_size(tools), 3);
    assert_int_equal(offered, 1);
}

static void tool_call_prompts_have_answers(void **state) {
    (void)state;
    for (int64_t i = 0; i < PROMPTS; i++) {
        json_t *line = prompt("tool-call", i);
        const json_t *checker = json_object_get(line, "checker");
        const json_t *call = json_array_get(json_object_get(checker, "expect"), 0);
        const char *name = json_string_value(json_object_get(call, "name"));
        char good[600], wrong[600], both[1300];
        check_request(line, call);
        write_call(good, sizeof good, call, name);
        write_call(wrong, sizeof wrong, call, "get_weather");
        check_calls(checker, good, true);
        check_calls(checker, wrong, false);
        snprintf(both, sizeof both, "%s%s", good, wrong); /* every tool in turn */
        check_calls(checker, both, false);
        snprintf(both, sizeof both, "%s%s", good, good);
        check_calls(checker, both, false);
        check_calls(checker, "", false);
        json_decref(line);
    }
}

static void tool_call_answers(void **state) {
    (void)state;
    static const char expect[] =
        "[{\"name\": \"set_timer\", \"arguments\": {\"label\": \"fern\", \"minutes\": 12}}]";
    static const char label[] = "<｜DSML｜parameter name=\"label\" string=\"true\">fern"
                                "</｜DSML｜parameter>\n";
    static const char *const wrong[] = {
        "<｜DSML｜parameter name=\"minutes\" string=\"true\">12</｜DSML｜parameter>\n",
        "<｜DSML｜parameter name=\"minutes\" string=\"false\">12.0</｜DSML｜parameter>\n",
        "<｜DSML｜parameter name=\"minutes\" string=\"false\">13</｜DSML｜parameter>\n",
        "<｜DSML｜parameter name=\"minutes\" string=\"false\">1 2</｜DSML｜parameter>\n",
        "<｜DSML｜parameter name=\"seconds\" string=\"false\">12</｜DSML｜parameter>\n",
        "<｜DSML｜parameter name=\"minutes\" string=\"false\">12</｜DSML｜parameter>\n"
        "<｜DSML｜parameter name=\"more\" string=\"false\">1</｜DSML｜parameter>\n",
        "<｜DSML｜parameter name=\"minutes\" string=\"false\">13</｜DSML｜parameter>\n"
        "<｜DSML｜parameter name=\"minutes\" string=\"false\">12</｜DSML｜parameter>\n",
        "",
    };
    json_t *checker = json_pack("{s:s, s:o}", "type", "tool_call", "expect",
                                hd_json_read(expect, sizeof expect - 1, 0, NULL));
    char call[1000], text[2500];
    for (size_t i = 0; i <= HD_LEN(wrong); i++) {
        const bool right = i == HD_LEN(wrong);
        snprintf(call, sizeof call,
                 "<｜DSML｜invoke name=\"set_timer\">\n%s%s</｜DSML｜invoke>\n", label,
                 right ? "<｜DSML｜parameter name=\"minutes\" string=\"false\">12"
                         "</｜DSML｜parameter>\n"
                       : wrong[i]);
        check_calls(checker, call, right);
    }
    /* A right call beside a broken one, in its text, or never closed. */
    snprintf(text, sizeof text, "%s<｜DSML｜invoke name=\"x\">\n%s", call, label);
    check_calls(checker, text, false);
    snprintf(text, sizeof text, "%sand some words\n", call);
    check_calls(checker, text, false);
    snprintf(text, sizeof text, "\n\n<｜DSML｜tool_calls>\n%s", call);
    assert_false(is_right(checker, text));
    assert_false(is_right(checker, expect)); /* as plain text */
    assert_false(is_right(checker, ""));
    json_decref(checker);
}

int test_rl_tasks(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(prompts_differ_and_repeat),
        cmocka_unit_test(unknown_tasks_are_refused),
        cmocka_unit_test(countdown_prompts_have_answers),
        cmocka_unit_test(countdown_answers),
        cmocka_unit_test(countdown_bounds),
        cmocka_unit_test(bad_countdown_checkers_are_refused),
        cmocka_unit_test(tool_call_prompts_have_answers),
        cmocka_unit_test(tool_call_answers),
    };
    return cmocka_run_group_tests_name("rl_tasks", tests, NULL, NULL);
}
