/* bench_serve_html.c - one HTML page with the figures and charts of a result, or of two side by
 * side. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cli/bench/bench_chart.h"
#include "cli/bench/bench_serve_internal.h"

enum { MAX_SERIES = 2 * RESULT_MAX_LEVELS };

static const char style[] =
    "body{font:15px/1.45 system-ui,sans-serif;color:#111;background:#fff;max-width:1180px;"
    "margin:2em auto;padding:0 1.2em}"
    "h1{font-size:1.5em;margin:0 0 .2em}h2{font-size:1.15em;margin:1.6em 0 .4em}"
    "p{margin:.3em 0}table{border-collapse:collapse;margin:.6em 0;font-size:.93em}"
    "th,td{padding:.25em .7em;text-align:right;border-bottom:1px solid #bbb;"
    "font-variant-numeric:tabular-nums}"
    "th{border-bottom:2px solid #333;font-weight:600}th small{font-weight:400;display:block}"
    "th:first-child,td:first-child,td.text{text-align:left}td:first-child{white-space:nowrap}"
    ".charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(520px,1fr));gap:1em}"
    ".wide{overflow-x:auto}"
    "@media print{body{margin:0;max-width:none}.charts{grid-template-columns:1fr 1fr}}";

/* ---- tables ---- */

static void write_value(const json_t *value, FILE *to) {
    if (json_is_string(value)) {
        html_text(json_string_value(value), to);
    } else if (json_is_boolean(value)) {
        fputs(json_is_true(value) ? "yes" : "no", to);
    } else {
        fprintf(to, "%.6g", json_number_value(value));
    }
}

static void write_facts(const json_t *r, const char *name, FILE *to) {
    const char *key;
    const json_t *value;
    bool begun = false;
    fputs("<p>", to);
    if (*name) fprintf(to, "<b>%s</b>: ", name);
    html_text(result_text(r, "model"), to);
    fputs(" at ", to);
    html_text(result_text(r, "url"), to);
    fputs(", ", to);
    html_text(result_text(r, "endpoint"), to);
    fputs(", ", to);
    html_text(result_text(r, "date"), to);
    fputs("<br>\n", to);
    json_object_foreach((json_t *)(uintptr_t)json_object_get(r, "options"), key, value) {
        fputs(begun ? "; " : "", to);
        html_text(key, to);
        fputc(' ', to);
        write_value(value, to);
        begun = true;
    }
    fputs("</p>\n", to);
}

static void write_head(FILE *to) {
    fputs("<div class=\"wide\"><table><thead><tr><th>level</th>", to);
    for (int k = 0; k < n_result_columns; k++) {
        fprintf(to, "<th>%s<small>%s</small></th>", result_columns[k].head,
                result_columns[k].unit);
    }
    fputs("<th>good<small>requests</small></th><th>failed<small>requests</small></th>"
          "</tr></thead>\n<tbody>",
          to);
}

static void write_row(const json_t *level, const char *name, FILE *to) {
    fputs("<tr><td>", to);
    html_text(name, to);
    fputs("</td>", to);
    for (int k = 0; k < n_result_columns; k++) {
        fprintf(to, "<td>%.*f</td>", result_columns[k].decimals,
                result_number(level, result_columns[k].key));
    }
    fprintf(to, "<td>%.0f</td><td>%.0f</td></tr>\n", result_number(level, "completed"),
            result_number(level, "failed"));
}

static void write_table(const json_t *r, FILE *to) {
    size_t i;
    json_t *level;
    write_head(to);
    json_array_foreach(json_object_get(r, "levels"), i, level) {
        char name[64];
        result_level_name(name, sizeof name, level);
        write_row(level, name, to);
    }
    fputs("</tbody></table></div>\n", to);
}

static void write_errors(const json_t *r, FILE *to) {
    size_t i, k;
    json_t *level, *error;
    bool begun = false;
    json_array_foreach(json_object_get(r, "levels"), i, level) {
        char name[64];
        result_level_name(name, sizeof name, level);
        json_array_foreach(json_object_get(level, "errors"), k, error) {
            if (!begun) {
                fputs("<h2>Errors</h2><table><thead><tr><th>level</th><th>requests</th>"
                      "<th>error</th><th>first message</th></tr></thead><tbody>",
                      to);
            }
            begun = true;
            fputs("<tr><td>", to);
            html_text(name, to);
            fprintf(to, "</td><td>%.0f</td><td class=\"text\">", result_number(error, "count"));
            html_text(result_text(error, "name"), to);
            fputs("</td><td class=\"text\">", to);
            html_text(result_text(error, "message"), to);
            fputs("</td></tr>\n", to);
        }
    }
    if (begun) fputs("</tbody></table>\n", to);
}

/* Prints B / A of every figure, for levels that both have. */
static void write_ratios(const json_t *a, const json_t *b, FILE *to) {
    size_t i;
    json_t *level;
    fputs("<h2>B / A</h2>\n<div class=\"wide\"><table><thead><tr><th>level</th>", to);
    for (int k = 0; k < n_result_columns; k++) {
        fprintf(to, "<th>%s</th>", result_columns[k].head);
    }
    fputs("</tr></thead>\n<tbody>", to);
    json_array_foreach(json_object_get(a, "levels"), i, level) {
        const json_t *same = result_same_level(b, level);
        char name[64];
        if (!same) continue;
        result_level_name(name, sizeof name, level);
        fputs("<tr><td>", to);
        html_text(name, to);
        fputs("</td>", to);
        for (int k = 0; k < n_result_columns; k++) {
            const double x = result_number(level, result_columns[k].key);
            const double y = result_number(same, result_columns[k].key);
            fprintf(to, x > 0 ? "<td>%.3f</td>" : "<td></td>", x > 0 ? y / x : 0.0);
        }
        fputs("</tr>\n", to);
    }
    fputs("</tbody></table></div>\n", to);
}

/* ---- charts ---- */

typedef struct curve_set {
    chart_series series[MAX_SERIES];
    double x[MAX_SERIES][CLIENT_CURVE], y[MAX_SERIES][CLIENT_CURVE];
    char labels[MAX_SERIES][CLIENT_CURVE][64];
    int n;
} curve_set;

/* Name of a series: "A, 16 at once" with two documents. */
static void name_series(chart_series *s, const char *document, const char *name) {
    snprintf(s->name, sizeof s->name, "%s%s%s", document, *document ? ", " : "", name);
}

/* A distribution per level: percentiles over times. */
static void add_curves(curve_set *c, const json_t *r, const char *document, const char *key) {
    size_t i;
    json_t *level;
    json_array_foreach(json_object_get(r, "levels"), i, level) {
        const json_t *points = json_object_get(level, key);
        char name[64];
        if (json_array_size(points) != CLIENT_CURVE || c->n == MAX_SERIES) continue;
        if (json_number_value(json_array_get(points, CLIENT_CURVE - 1)) <= 0) continue;
        chart_series *s = &c->series[c->n];
        for (size_t k = 0; k < CLIENT_CURVE; k++) {
            c->x[c->n][k] = json_number_value(json_array_get(points, k));
            c->y[c->n][k] = (double)k;
        }
        *s = (chart_series){.x = c->x[c->n],
                            .y = c->y[c->n],
                            .n = CLIENT_CURVE,
                            .colour = (int)i,
                            .dashed = *document == 'B'};
        result_level_name(name, sizeof name, level);
        name_series(s, document, name);
        c->n++;
    }
}

/* A point per level: a latency over the throughput. */
static void add_line(curve_set *c, const json_t *r, const char *document, const char *key,
                     const char *name, int colour, bool labelled) {
    const json_t *levels = json_object_get(r, "levels");
    chart_series *s = &c->series[c->n];
    int n = 0;
    for (; n < RESULT_MAX_LEVELS && (size_t)n < json_array_size(levels); n++) {
        const json_t *level = json_array_get(levels, (size_t)n);
        c->x[c->n][n] = result_number(level, "output_throughput");
        c->y[c->n][n] = result_number(level, key);
        const double rate = result_number(level, "request_rate");
        snprintf(c->labels[c->n][n], sizeof c->labels[c->n][n], "%g",
                 rate > 0 ? rate : result_number(level, "max_concurrency"));
    }
    *s = (chart_series){.x = c->x[c->n],
                        .y = c->y[c->n],
                        .n = n,
                        .colour = colour,
                        .dashed = *document == 'B',
                        .points = true,
                        .labels = labelled ? c->labels[c->n] : NULL};
    name_series(s, document, name);
    c->n++;
}

/* Returns whether the least and the largest of values[from ... n) of all series are far
 * apart. */
static bool is_wide(const curve_set *c, double values[][CLIENT_CURVE], int from) {
    double least = HUGE_VAL, most = 0;
    for (int i = 0; i < c->n; i++) {
        for (int k = from; k < c->series[i].n; k++) {
            if (values[i][k] > 0) least = fmin(least, values[i][k]);
            most = fmax(most, values[i][k]);
        }
    }
    return most > 15 * least;
}

static void write_distribution(curve_set *c, const json_t *a, const json_t *b, const char *key,
                               const char *title, const char *x_label, FILE *to) {
    c->n = 0;
    add_curves(c, a, b ? "A" : "", key);
    if (b) add_curves(c, b, "B", key);
    if (!c->n) return;
    const chart drawn = {.title = title,
                         .x_label = x_label,
                         .y_label = "share of all, percent",
                         .log_x = is_wide(c, c->x, 5),
                         .y_max = 100,
                         .series = c->series,
                         .n = c->n};
    chart_write(&drawn, to);
}

static void write_tradeoff(curve_set *c, const json_t *a, const json_t *b, const char *median,
                           const char *p99, const char *title, const char *y_label, FILE *to) {
    c->n = 0;
    add_line(c, a, b ? "A" : "", median, "median", 0, true);
    add_line(c, a, b ? "A" : "", p99, "p99", 1, false);
    if (b) add_line(c, b, "B", median, "median", 0, true);
    if (b) add_line(c, b, "B", p99, "p99", 1, false);
    const chart drawn = {.title = title,
                         .x_label = "output throughput, tokens per second",
                         .y_label = y_label,
                         .log_y = is_wide(c, c->y, 0),
                         .series = c->series,
                         .n = c->n};
    chart_write(&drawn, to);
}

static void write_charts(curve_set *c, const json_t *a, const json_t *b, FILE *to) {
    fputs("<div class=\"charts\">\n", to);
    write_tradeoff(c, a, b, "median_ttft_ms", "p99_ttft_ms",
                   "Throughput and time to first token", "TTFT, ms", to);
    write_tradeoff(c, a, b, "median_tpot_ms", "p99_tpot_ms",
                   "Throughput and time per output token", "TPOT, ms", to);
    write_distribution(c, a, b, "ttft_percentiles_ms", "Time to first token", "TTFT, ms", to);
    write_distribution(c, a, b, "itl_percentiles_ms", "Inter-token latency", "ITL, ms", to);
    write_distribution(c, a, b, "tpot_percentiles_ms", "Time per output token of a request",
                       "TPOT, ms", to);
    write_distribution(c, a, b, "e2e_latency_percentiles_ms", "End-to-end latency", "E2E, ms",
                       to);
    fputs("</div>\n", to);
}

/* ---- the page ---- */

static void write_page(curve_set *c, const json_t *a, const json_t *b, FILE *to) {
    fputs("<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
          "<meta name=\"viewport\" content=\"width=device-width\">"
          "<title>Serving benchmark: ",
          to);
    html_text(result_text(a, "model"), to);
    fprintf(to, "</title><style>%s%s</style></head>\n<body><h1>Serving benchmark</h1>\n", style,
            chart_style);
    write_facts(a, b ? "A" : "", to);
    if (b) write_facts(b, "B", to);
    write_charts(c, a, b, to);
    fprintf(to, "<h2>%s</h2>\n", b ? "A" : "Figures");
    write_table(a, to);
    write_errors(a, to);
    if (b) {
        fputs("<h2>B</h2>\n", to);
        write_table(b, to);
        write_errors(b, to);
        write_ratios(a, b, to);
    }
    fputs(
        "<p>TTFT: from sending to the first event with text. ITL: between two such events of "
        "a request. TPOT: (last &minus; first) / (tokens &minus; 1). E2E: from sending to the "
        "last. Percentiles interpolate between the nearest ranks.</p>\n</body></html>\n",
        to);
}

hd_status report_html(const char *path, const json_t *a, const json_t *b, hd_err *err) {
    curve_set *c = calloc(1, sizeof *c);
    if (!c) return HD_FAIL(err, HD_ENOMEM, "no memory for the report");
    FILE *to = fopen(path, "w");
    if (!to) {
        free(c);
        return HD_FAIL(err, HD_EIO, "cannot write %s: %s", path, strerror(errno));
    }
    write_page(c, a, b, to);
    const bool bad = ferror(to) != 0;
    free(c);
    if (fclose(to) != 0 || bad) {
        return HD_FAIL(err, HD_EIO, "cannot write %s: %s", path, strerror(errno));
    }
    return HD_OK;
}
