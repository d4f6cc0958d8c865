/* bench_load.h - a synthetic load of requests for an engine. It depends on the options
 * alone: lengths, arrival times and token ids are drawn by Philox from the seed.
 * docs/bench.md defines the measured times. */
#ifndef HD_CLI_BENCH_BENCH_LOAD_H
#define HD_CLI_BENCH_BENCH_LOAD_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "hadal.h"

typedef struct load_options {
    int64_t requests; /* 1 to 2^31 */
    int64_t input_tokens, output_tokens;
    double range_ratio;    /* lengths are uniform in [ratio * length, length] */
    double rate;           /* requests per second, Poisson; 0: all at once */
    int64_t concurrency;   /* requests in flight at most; 0: no bound */
    int64_t shared_prefix; /* of the input, shared by the requests of a group */
    int64_t groups;        /* of shared prefixes */
    int64_t seed;
    int64_t draft_tokens;
    double temperature;
} load_options;

/* One request: its lengths and times. Times in ns since the load began. */
typedef struct load_record {
    int32_t input, output; /* tokens wanted */
    int64_t due_ns, sent_ns, first_ns, end_ns;
    int32_t cached, got; /* prompt tokens from the cache; output tokens */
    int32_t steps, drafted, accepted;
    int32_t drafted_at[HD_MAX_DRAFTS], accepted_at[HD_MAX_DRAFTS];
    bool failed;
} load_record;

typedef struct load_run {
    load_record *records; /* [n] */
    int64_t n;
    int64_t *gaps_ns; /* [n_gaps] between consecutive events with tokens of one request */
    int64_t n_gaps, cap_gaps;
    int64_t duration_ns;
} load_run;

/* Refuses lengths that exceed the context. Release with load_run_deinit(). quiet: no progress
 * bar. */
hd_status load_run_all(load_run *out, hd_engine *e, const load_options *o, int32_t vocab,
                       bool quiet, hd_err *err);
void load_run_deinit(load_run *r);

#endif
