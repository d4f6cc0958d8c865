/* bench_report.h - the report of a load: the block that other serving benchmarks print too, and
 * the same figures as one JSON object. docs/bench.md defines them. */
#ifndef HD_CLI_BENCH_BENCH_REPORT_H
#define HD_CLI_BENCH_BENCH_REPORT_H

#include <stdio.h>

#include "base/quantiles.h"
#include "cli/bench/bench_load.h"

typedef struct load_report {
    int64_t completed, failed;
    int64_t input_tokens, cached_tokens, output_tokens;
    double seconds, requests_s, input_s, output_s, total_s;
    double concurrency;   /* sum of the requests' times divided by the run's */
    double accept_length; /* tokens per step of a request */
    double accepted_at
        [HD_MAX_DRAFTS]; /* fraction of the drafts accepted at each place; -1: none drafted */
    hd_quantiles e2e, ttft, tpot, itl; /* milliseconds */
    int64_t steps, graph_steps;     /* steps of the engine; those that a GPU ran as one graph */
    double host_us;                 /* host time per step, without waiting for the device */
    double graph_us;                /* GPU time per graph step */
    double idle_us, median_idle_us; /* between two queued graphs; -1: none */
    int64_t graphs;                 /* recorded meanwhile */
    double record_us;               /* each */
    hd_expert_figures experts;      /* used, staged, fetched and their bytes meanwhile */
    hd_rebalance_figures rebalance; /* flips, moves and their bytes meanwhile */
} load_report;

/* Statistics of the engine between two readings. */
void report_engine(load_report *out, const hd_engine_stats *before,
                   const hd_engine_stats *after);

hd_status report_make(load_report *out, const load_run *run, hd_err *err);
void report_print(const load_report *r, const load_options *o, const char *backend, FILE *to);
void report_print_json(const load_report *r, const load_options *o, const char *backend,
                       FILE *to);

#endif
