/* bench_serve_tables.c - terminal output of `hadal bench serve`: a block per level, a line per
 * level of a sweep, and two results side by side. */
#include <string.h>

#include "cli/bench/bench_block.h"
#include "cli/bench/bench_serve_internal.h"
#include "client/events.h"

static void print_counts(const client_figures *f, FILE *to) {
    block_count(to, "Successful requests:", f->completed);
    if (f->failed) block_count(to, "Failed requests:", f->failed);
    if (f->unfinished) block_count(to, "Unfinished requests:", f->unfinished);
    block_real(to, "Benchmark duration (s):", f->seconds);
    block_count(to, "Total input tokens:", f->input_tokens);
    if (f->cached_tokens >= 0) block_count(to, "Of them cached:", f->cached_tokens);
    block_count(to, "Total generated tokens:", f->output_tokens);
    if (f->uncounted) block_count(to, "Answers counted by events:", f->uncounted);
}

void table_level(const client_server *s, const client_load *load, const client_run *run,
                 const client_figures *f, FILE *to) {
    char model[200];
    block_heading(to, " Serving Benchmark Result ", '=');
    block_text(to, "Server:", s->base);
    client_copy_text(model, sizeof model, s->model);
    block_text(to, "Model:", model);
    if (load->rate > 0) {
        block_real(to, "Traffic request rate:", load->rate);
    } else {
        block_text(to, "Traffic request rate:", "inf");
    }
    if (load->concurrency) block_count(to, "Max request concurrency:", load->concurrency);
    print_counts(f, to);
    block_real(to, "Request throughput (req/s):", f->requests_s);
    block_real(to, "Input token throughput (tok/s):", f->input_s);
    block_real(to, "Output token throughput (tok/s):", f->output_s);
    block_real(to, "Total token throughput (tok/s):", f->total_s);
    block_real(to, "Concurrency:", f->concurrency);
    if (f->good_s >= 0) {
        block_real(to, "Request goodput (req/s):", f->good_s);
        block_real(to, "Within all objectives (%):", 100 * f->good_share);
    }
    block_real(to, "Client's share of a processor (%):", 100 * run->processor);
    if (load->rate > 0) block_real(to, "P99 sent late by (ms):", f->late.p99);
    block_times(to, "End-to-End Latency", "E2E Latency", &f->e2e.quantiles);
    block_times(to, "Time to First Token", "TTFT", &f->ttft.quantiles);
    block_times(to, "Time per Output Token (excl. 1st token)", "TPOT", &f->tpot.quantiles);
    block_times(to, "Inter-Token Latency", "ITL", &f->itl.quantiles);
    if (run->n_errors) block_heading(to, "Errors", '-');
    for (int32_t i = 0; i < run->n_errors; i++) {
        const client_error *e = &run->errors[i];
        fprintf(to, "%-40s %lld%s%s\n", e->name, (long long)e->count, *e->sample ? "  " : "",
                e->sample);
    }
    block_heading(to, "", '=');
}

/* ---- a sweep ---- */

/* Widths of a sweep's lines, which fit 80 columns. */
static const char *const sweep_keys[] = {"output_throughput", "median_ttft_ms", "p99_ttft_ms",
                                         "median_itl_ms", "p99_itl_ms"};

static const result_column *column_of(const char *key) {
    int i = 0;
    while (strcmp(result_columns[i].key, key) != 0) i++;
    return &result_columns[i];
}

void table_sweep(const json_t *result, FILE *to) {
    size_t i;
    json_t *level;
    fprintf(to, "%-16s", "level");
    for (size_t k = 0; k < HD_LEN(sweep_keys); k++) {
        fprintf(to, " %11s", column_of(sweep_keys[k])->head);
    }
    fprintf(to, "\n%-16s", "");
    for (size_t k = 0; k < HD_LEN(sweep_keys); k++) {
        fprintf(to, " %11s", column_of(sweep_keys[k])->unit);
    }
    fputc('\n', to);
    json_array_foreach(json_object_get(result, "levels"), i, level) {
        char name[64];
        result_level_name(name, sizeof name, level);
        fprintf(to, "%-16s", name);
        for (size_t k = 0; k < HD_LEN(sweep_keys); k++) {
            fprintf(to, " %11.*f", column_of(sweep_keys[k])->decimals,
                    result_number(level, sweep_keys[k]));
        }
        const double failed = result_number(level, "failed");
        if (failed > 0) fprintf(to, "  %.0f failed", failed);
        fputc('\n', to);
    }
}

/* ---- two results ---- */

static void compare_level(const json_t *a, const json_t *b, FILE *to) {
    char name[64];
    result_level_name(name, sizeof name, a);
    block_heading(to, name, '-');
    for (int k = 0; k < n_result_columns; k++) {
        const result_column *c = &result_columns[k];
        const double x = result_number(a, c->key), y = result_number(b, c->key);
        fprintf(to, "%-12s %-6s %12.*f %12.*f", c->head, c->unit, c->decimals, x, c->decimals,
                y);
        if (x > 0) fprintf(to, " %8.3f", y / x);
        const bool better = c->less_is_better ? y < x : y > x;
        fprintf(to, "%s\n",
                x > 0 && y / x > 0.99 && y / x < 1.01 ? ""
                : better                              ? "  better"
                                                      : "  worse");
    }
}

static void print_source(char letter, const json_t *result, FILE *to) {
    static const char *const keys[] = {"model", "url", "date"};
    fprintf(to, "%c:", letter);
    for (size_t i = 0; i < HD_LEN(keys); i++) {
        char plain[200];
        client_copy_text(plain, sizeof plain, result_text(result, keys[i]));
        fprintf(to, i == 0 ? " %s" : ", %s", plain);
    }
    fputc('\n', to);
}

hd_status table_compare(const json_t *a, const json_t *b, FILE *to, hd_err *err) {
    size_t i;
    json_t *level;
    int n = 0;
    print_source('A', a, to);
    print_source('B', b, to);
    fprintf(to, "%-19s %12s %12s %8s\n", "", "A", "B", "B / A");
    json_array_foreach(json_object_get(a, "levels"), i, level) {
        const json_t *same = result_same_level(b, level);
        if (same) compare_level(level, same, to);
        n += same != NULL;
    }
    if (n) return HD_OK;
    return HD_FAIL(err, HD_EINVAL, "the two have no level in common");
}
