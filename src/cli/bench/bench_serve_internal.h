/* bench_serve_internal.h - results of `hadal bench serve`: one JSON document per sweep, which
 * is written to files, compared, and drawn.
 *
 * {"url", "model", "endpoint", "date", "version", "options": {...}, "levels": [{...}, ...]};
 * docs/bench.md lists the keys of a level. Documents may come from files: a reader takes 0 or
 * "" for a missing key. */
#ifndef HD_CLI_BENCH_BENCH_SERVE_INTERNAL_H
#define HD_CLI_BENCH_BENCH_SERVE_INTERNAL_H

#include <stdio.h>

#include "client/client.h"

enum { RESULT_MAX_LEVELS = 64 };

/* ---- bench_serve_result.c ---- */

/* Returns a level's figures; details: with every request. NULL without memory. */
json_t *result_level(const client_load *load, const client_run *run, const client_figures *f,
                     bool details);
/* Reads and checks a document of --json. */
hd_status result_load(json_t **out, const char *path, hd_err *err);
hd_status result_save(const json_t *result, const char *path, hd_err *err);

/* Returns "16 at once", "8 per second": what distinguishes the levels of a sweep. */
void result_level_name(char *out, size_t size, const json_t *level);
double result_number(const json_t *level, const char *key);
const char *result_text(const json_t *result, const char *key);

typedef struct result_column {
    const char *key, *head, *unit; /* of tables */
    int decimals;
    bool less_is_better;
} result_column;

extern const result_column result_columns[];
extern const int n_result_columns;

/* Returns the level of the other document with the same concurrency and rate, or NULL. */
const json_t *result_same_level(const json_t *other, const json_t *level);

/* ---- bench_serve_tables.c: on a terminal ---- */

void table_level(const client_server *s, const client_load *load, const client_run *run,
                 const client_figures *f, FILE *to);
void table_sweep(const json_t *result, FILE *to);
/* Prints every figure of both and B / A, level by level. */
hd_status table_compare(const json_t *a, const json_t *b, FILE *to, hd_err *err);

/* ---- bench_serve_html.c ---- */

/* Writes one file without references to others; b NULL, or drawn beside a. */
hd_status report_html(const char *path, const json_t *a, const json_t *b, hd_err *err);

#endif
