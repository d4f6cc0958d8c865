/* rl_generate.c - the generators of tasks. */
#include "cli/training/rl_generate.h"

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/philox.h"
#include "base/status.h"

enum {
    DRAWS = 3, /* high counter word */
    NUMBERS = 8,
    PAIRS = 12,
    COUNTDOWN_NUMBERS = 4,
    TEXT_BYTES = 1024
};

/* Random numbers of one prompt. */
typedef struct draws {
    uint64_t seed, next;
} draws;

static uint32_t below(draws *d, uint32_t n) {
    return (uint32_t)((uint64_t)hd_philox_at(d->seed, DRAWS, d->next++).v[0] * n >> 32);
}

/* n different numbers below `end`, at most 100 */
static void take_different(draws *d, int32_t *out, int32_t n, uint32_t end) {
    bool taken[100] = {false};
    for (int32_t i = 0; i < n;) {
        const uint32_t x = below(d, end);
        if (taken[x]) continue;
        taken[x] = true;
        out[i++] = (int32_t)x;
    }
}

typedef struct text {
    char data[TEXT_BYTES];
    size_t n;
} text;

HD_PRINTF(2, 3)
static void put(text *t, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    const int n = vsnprintf(t->data + t->n, sizeof t->data - t->n, fmt, args);
    va_end(args);
    if (n > 0 && t->n + (size_t)n < sizeof t->data) t->n += (size_t)n;
}

static void put_list(text *t, const int32_t *x, int32_t n) {
    for (int32_t i = 0; i < n; i++) put(t, "%s%d", i ? ", " : "", x[i]);
}

static int ascending(const void *a, const void *b) {
    const int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

/* A prompt: what the user says, and what the answer must be. */
typedef struct prompt {
    text user;
    const char *checker;
    json_t *expect, *tools; /* tools NULL: none */
} prompt;

static void expect_text(prompt *p, const char *checker, const char *what) {
    p->checker = checker;
    p->expect = json_string(what);
}

static void expect_number(prompt *p, int32_t x) {
    text t = {.n = 0};
    put(&t, "%d", x);
    expect_text(p, "final_number", t.data);
}

static void make_sort(draws *d, prompt *p) {
    int32_t x[NUMBERS];
    text sorted = {.n = 0};
    take_different(d, x, NUMBERS, 100);
    put(&p->user, "Sort these numbers from smallest to largest: ");
    put_list(&p->user, x, NUMBERS);
    qsort(x, NUMBERS, sizeof *x, ascending);
    put_list(&sorted, x, NUMBERS);
    expect_text(p, "exact", sorted.data);
}

static void make_addition(draws *d, prompt *p) {
    const int32_t a = 10000 + (int32_t)below(d, 90000), b = 10000 + (int32_t)below(d, 90000);
    put(&p->user, "What is %d + %d?", a, b);
    expect_number(p, a + b);
}

static const char *const words[] = {"willow", "fern",   "sail",  "jade",   "fabric",
                                    "moon",   "yarn",   "shore", "table",  "copper",
                                    "silk",   "field",  "scarf", "bugle",  "gate",
                                    "beacon", "magnet", "robin", "palace", "rice"};

static void make_lookup(draws *d, prompt *p) {
    int32_t word[PAIRS], number[PAIRS];
    take_different(d, word, PAIRS, HD_LEN(words));
    take_different(d, number, PAIRS, 90);
    const uint32_t asked = below(d, PAIRS);
    put(&p->user, "Remember this:\n");
    for (int32_t i = 0; i < PAIRS; i++) {
        put(&p->user, "%s = %d\n", words[word[i]], 10 + number[i]);
    }
    put(&p->user, "What is %s?", words[word[asked]]);
    expect_number(p, 10 + number[asked]);
}

static const char *const names[] = {"Ella", "Maya", "Zoe", "Tom", "Ben", "Ada"};
static const char *const things[] = {"lamp", "kite", "key", "ball", "drum", "hat"};

static void make_word(draws *d, prompt *p) {
    put(&p->user, "Write a story about %s and a lost %s.", names[below(d, HD_LEN(names))],
        things[below(d, HD_LEN(things))]);
    expect_text(p, "contains", "slept");
}

static void make_format(draws *d, prompt *p) {
    const int32_t a = (int32_t)below(d, 90) + 10, b = (int32_t)below(d, 90) + 10;
    put(&p->user, "What is %d + %d? Answer with the number alone.", a, b);
    expect_text(p, "regex", "^\\s*[0-9]+\\s*$");
}

/* ---- countdown ---- */

/* One number of two, not negative; a division only where it is exact. */
static int32_t join(draws *d, int32_t a, int32_t b) {
    const int32_t most = a > b ? a : b, least = a > b ? b : a;
    switch (below(d, 4)) {
    case 0:
        return a + b;
    case 1:
        return most - least;
    case 2:
        return least > 1 && most % least == 0 ? most / least : a + b;
    default:
        return a * b < 1000 ? a * b : most - least;
    }
}

/* What some expression of all of x makes. */
static int32_t make_target(draws *d, const int32_t x[COUNTDOWN_NUMBERS]) {
    int32_t left[COUNTDOWN_NUMBERS];
    memcpy(left, x, sizeof left);
    for (int32_t n = COUNTDOWN_NUMBERS; n > 1; n--) {
        const uint32_t i = below(d, (uint32_t)n);
        const int32_t a = left[i];
        left[i] = left[n - 1];
        const uint32_t k = below(d, (uint32_t)n - 1);
        left[k] = join(d, a, left[k]);
    }
    return left[0];
}

static void make_countdown(draws *d, prompt *p) {
    int32_t x[COUNTDOWN_NUMBERS], target = 0;
    while (target < 30 || target > 999) { /* 30: no number alone */
        take_different(d, x, COUNTDOWN_NUMBERS, 25);
        for (int32_t i = 0; i < COUNTDOWN_NUMBERS; i++) x[i]++;
        target = make_target(d, x);
    }
    put(&p->user, "Make %d from the numbers ", target);
    put_list(&p->user, x, COUNTDOWN_NUMBERS);
    put(&p->user, ". Use each at most once, with +, -, *, / and parentheses. "
                  "Answer with the expression alone.");
    p->checker = "countdown";
    p->expect =
        json_pack("{s:[i,i,i,i], s:i}", "numbers", x[0], x[1], x[2], x[3], "target", target);
}

/* ---- tool calls ---- */

/* A tool with a parameter for a word and, if it counts, one for an integer. */
typedef struct tool {
    const char *verb, *noun, *word_key, *count_key; /* count_key NULL: does not count */
    char name[32];
} tool;

static tool draw_tool(draws *d, const char *noun) {
    static const char *const verbs[] = {"find", "check", "show", "get", "read"};
    static const char *const word_keys[] = {"name", "item", "label", "key"};
    static const char *const count_keys[] = {"count", "level", "days"};
    tool t = {.verb = verbs[below(d, HD_LEN(verbs))],
              .noun = noun,
              .word_key = word_keys[below(d, HD_LEN(word_keys))]};
    if (below(d, 2)) t.count_key = count_keys[below(d, HD_LEN(count_keys))];
    snprintf(t.name, sizeof t.name, "%s_%s", t.verb, noun);
    return t;
}

static json_t *describe_tool(const tool *t) {
    char says[64];
    json_t *properties =
        json_pack("{s:{s:s, s:s}}", t->word_key, "type", "string", "description", "Which one");
    json_t *required = json_pack("[s]", t->word_key);
    snprintf(says, sizeof says, "Look for the %s of something.", t->noun);
    if (t->count_key) {
        json_object_set_new(
            properties, t->count_key,
            json_pack("{s:s, s:s}", "type", "integer", "description", "a number"));
        json_array_append_new(required, json_string(t->count_key));
    }
    return json_pack("{s:s, s:{s:s, s:s, s:{s:s, s:o, s:o}}}", "type", "function", "function",
                     "name", t->name, "description", says, "parameters", "type", "object",
                     "properties", properties, "required", required);
}

/* One call of three tools that are offered. */
static void make_tool_call(draws *d, prompt *p) {
    enum { OFFERED = 3 };
    tool all[OFFERED];
    int32_t word[OFFERED + 1];
    take_different(d, word, OFFERED + 1, HD_LEN(words));
    p->tools = json_array();
    for (int32_t i = 0; i < OFFERED; i++) {
        all[i] = draw_tool(d, words[word[i]]);
        json_array_append_new(p->tools, describe_tool(&all[i]));
    }
    const tool *t = &all[below(d, OFFERED)];
    const char *value = words[word[OFFERED]];
    json_t *arguments = json_pack("{s:s}", t->word_key, value);
    put(&p->user, "Use %s for %s", t->name, value);
    if (t->count_key) {
        const int32_t number = 2 + (int32_t)below(d, 98);
        put(&p->user, " with %s %d", t->count_key, number);
        json_object_set_new(arguments, t->count_key, json_integer(number));
    }
    put(&p->user, ".");
    p->checker = "tool_call";
    p->expect = json_pack("[{s:s, s:o}]", "name", t->name, "arguments", arguments);
}

static const struct {
    const char *name;
    void (*make)(draws *d, prompt *p);
} generators[] = {
    {"sort",      make_sort     },
    {"addition",  make_addition },
    {"lookup",    make_lookup   },
    {"word",      make_word     },
    {"format",    make_format   },
    {"countdown", make_countdown},
    {"tool-call", make_tool_call},
};

const char *const rl_task_names[] = {"sort",   "addition",  "lookup",    "word",
                                     "format", "countdown", "tool-call", NULL};

json_t *rl_generate(int task, uint64_t seed, int64_t i) {
    prompt p = {.checker = NULL};
    draws d = {seed, (uint64_t)i << 10};
    generators[task].make(&d, &p);
    json_t *line =
        json_pack("{s:[{s:s, s:s}], s:{s:s, s:o}, s:b}", "messages", "role", "user", "content",
                  p.user.data, "checker", "type", p.checker, "expect", p.expect, "thinking", 0);
    if (line && p.tools) json_object_set(line, "tools", p.tools);
    json_decref(p.tools);
    return line;
}
