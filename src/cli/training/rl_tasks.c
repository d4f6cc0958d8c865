/* rl_tasks.c - prompts by number: generated, or lines of a file. */
#include "cli/training/rl_tasks.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/json.h"
#include "cli/eval_check.h"
#include "cli/training/rl_generate.h"

enum { MAX_FILE_BYTES = 256 << 20, MAX_LINES = 1 << 20 };

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
    for (out->generator = 0; rl_task_names[out->generator]; out->generator++) {
        if (strcmp(rl_task_names[out->generator], name) == 0) return HD_OK;
    }
    return HD_FAIL(err, HD_EINVAL,
                   "--task %s: unknown; known are sort, addition, lookup, word, format, "
                   "countdown and tool-call",
                   name);
}

void rl_tasks_close(rl_tasks *t) {
    for (int32_t i = 0; i < t->n; i++) json_decref(t->lines[i]);
    free(t->lines);
    *t = (rl_tasks){0};
}

json_t *rl_tasks_at(const rl_tasks *t, int64_t i) {
    if (t->lines) return json_incref(t->lines[i % t->n]);
    return rl_generate(t->generator, t->seed, i);
}
