/* rl_tasks.c - generators of prompts, and files of prompts. */
#include "cli/training/rl_tasks.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/json.h"
#include "base/philox.h"
#include "cli/eval_check.h"

enum {
    MAX_FILE_BYTES = 256 << 20,
    MAX_LINES = 1 << 20,
    DRAWS = 3, /* high counter word */
    NUMBERS = 8,
    PAIRS = 12,
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
    text user, expect;
    const char *checker;
} prompt;

static void make_sort(draws *d, prompt *p) {
    int32_t x[NUMBERS];
    take_different(d, x, NUMBERS, 100);
    put(&p->user, "Sort these numbers from smallest to largest: ");
    put_list(&p->user, x, NUMBERS);
    qsort(x, NUMBERS, sizeof *x, ascending);
    put_list(&p->expect, x, NUMBERS);
    p->checker = "exact";
}

static void make_addition(draws *d, prompt *p) {
    const int32_t a = 10000 + (int32_t)below(d, 90000), b = 10000 + (int32_t)below(d, 90000);
    put(&p->user, "What is %d + %d?", a, b);
    put(&p->expect, "%d", a + b);
    p->checker = "final_number";
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
    put(&p->expect, "%d", 10 + number[asked]);
    p->checker = "final_number";
}

static void make_word(draws *d, prompt *p) {
    static const char *const names[] = {"Ella", "Maya", "Zoe", "Tom", "Ben", "Ada"};
    static const char *const things[] = {"lamp", "kite", "key", "ball", "drum", "hat"};
    put(&p->user, "Write a story about %s and a lost %s.", names[below(d, HD_LEN(names))],
        things[below(d, HD_LEN(things))]);
    put(&p->expect, "slept");
    p->checker = "contains";
}

static void make_format(draws *d, prompt *p) {
    const int32_t a = (int32_t)below(d, 90) + 10, b = (int32_t)below(d, 90) + 10;
    put(&p->user, "What is %d + %d? Answer with the number alone.", a, b);
    put(&p->expect, "^\\s*[0-9]+\\s*$");
    p->checker = "regex";
}

static const struct {
    const char *name;
    void (*make)(draws *d, prompt *p);
} generators[] = {
    {"sort",     make_sort    },
    {"addition", make_addition},
    {"lookup",   make_lookup  },
    {"word",     make_word    },
    {"format",   make_format  },
};

const char *const rl_task_names[] = {"sort", "addition", "lookup", "word", "format", NULL};

/* ---- files ---- */

static hd_status check_line(const rl_tasks *t, const json_t *line, const char *where,
                            hd_err *err) {
    if (!json_is_object(line) || !json_is_array(json_object_get(line, "messages"))) {
        return HD_FAIL(err, HD_EINVAL, "%s: messages must be an array", where);
    }
    return t->scored ? HD_OK : eval_check_valid(json_object_get(line, "checker"), where, err);
}

static hd_status add_line(rl_tasks *t, const char *data, size_t n, const char *where,
                          hd_err *err) {
    json_t *line;
    if (t->n == MAX_LINES) return HD_FAIL(err, HD_EINVAL, "%s: too many prompts", where);
    HD_TRY(hd_json_parse(&line, data, n, where, err));
    t->lines[t->n++] = line;
    return check_line(t, line, where, err);
}

static hd_status read_lines(rl_tasks *t, const char *file, hd_err *err) {
    char *data, where[600];
    size_t n;
    HD_TRY(hd_file_read(&data, &n, file, MAX_FILE_BYTES, err));
    t->lines = calloc(MAX_LINES, sizeof(json_t *));
    hd_status st = t->lines ? HD_OK : HD_FAIL(err, HD_ENOMEM, "no memory for prompts");
    int32_t number = 1;
    for (size_t at = 0; st == HD_OK && at < n; number++) {
        const char *end = memchr(data + at, '\n', n - at);
        const size_t length = end ? (size_t)(end - data) - at : n - at;
        snprintf(where, sizeof where, "%.500s: line %d", file, number);
        if (length > 0) st = add_line(t, data + at, length, where, err);
        at += length + 1;
    }
    free(data);
    if (st != HD_OK || t->n > 0) return st;
    return HD_FAIL(err, HD_EINVAL, "%s: no prompts in it", file);
}

hd_status rl_tasks_open(rl_tasks *out, const char *name, const char *file, uint64_t seed,
                        bool scored, hd_err *err) {
    *out = (rl_tasks){.seed = seed, .scored = scored};
    if ((name != NULL) == (file != NULL)) {
        return HD_FAIL(err, HD_EINVAL, "give one of --task NAME and --prompts FILE");
    }
    if (file) return read_lines(out, file, err);
    for (size_t i = 0; i < HD_LEN(generators); i++) {
        out->generator = (int)i;
        if (strcmp(generators[i].name, name) == 0) return HD_OK;
    }
    return HD_FAIL(err, HD_EINVAL,
                   "--task %s: unknown; known are sort, addition, lookup, word and format",
                   name);
}

void rl_tasks_close(rl_tasks *t) {
    for (int32_t i = 0; i < t->n; i++) json_decref(t->lines[i]);
    free(t->lines);
    *t = (rl_tasks){0};
}

json_t *rl_tasks_at(const rl_tasks *t, int64_t i) {
    prompt p = {.checker = NULL};
    draws d = {t->seed, (uint64_t)i << 10};
    if (t->lines) return json_incref(t->lines[i % t->n]);
    generators[t->generator].make(&d, &p);
    return json_pack("{s:[{s:s, s:s}], s:{s:s, s:s}, s:b}", "messages", "role", "user",
                     "content", p.user.data, "checker", "type", p.checker, "expect",
                     p.expect.data, "thinking", 0);
}
