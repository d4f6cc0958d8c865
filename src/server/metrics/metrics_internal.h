/* metrics_internal.h - what the files that write /metrics share: the counters, a view of all that
 * is read at once, and the three sets of names. */
#ifndef HD_SERVER_METRICS_INTERNAL_H
#define HD_SERVER_METRICS_INTERNAL_H

#include <pthread.h>
#include <stdio.h>

#include "server/histogram.h"
#include "server/metrics/metrics.h"

enum { METRICS_ENDPOINTS = 16, METRICS_FINISHES = 10 };

typedef struct counted_name { /* name: a string literal of the program, never from outside */
    const char *name;
    int64_t n;
} counted_name;

struct metrics {
    char label[300]; /* model_name="...", escaped */
    double start_time;
    histogram ttft, itl, e2e, queue; /* nanoseconds */
    histogram prefill, decode, inference, tpot;
    histogram prompt, generation; /* tokens */
    histogram_window recent[2];   /* marked by metrics_time; owned by the ticker */
    atomic_int_fast64_t requests, aborted;
    pthread_mutex_t lock; /* guards the names */
    counted_name finishes[METRICS_FINISHES], unknown[METRICS_ENDPOINTS];
};

typedef struct metrics_view {
    metrics *m;
    const metrics_sources *from;
    hd_engine_stats e;
    http_stats h;
    int64_t *load; /* [n_load] rows of each expert, layer by layer; NULL: none */
    size_t n_load;
    int32_t n_experts;
    int64_t resident_bytes;
    int32_t open_files;
} metrics_view;

typedef struct metrics_dialect {
    const char *prefix, *labels; /* labels: follow model_name */
    int bit;                     /* of server_compat; 0: always written */
    int at;                      /* its place in lists of names and edges */
} metrics_dialect;

double metrics_seconds(int64_t ns);
int64_t metrics_used_pages(const metrics_view *v, int pool);
void metrics_put_head(FILE *out, const char *prefix, const char *name, const char *type,
                      const char *help);

/* Single values, and those of the process. */
void metrics_put_series(FILE *out, const metrics_view *v, const metrics_dialect *d);
void metrics_put_process(FILE *out, const metrics_view *v);

void metrics_put_histograms(FILE *out, const metrics_view *v, const metrics_dialect *d);

/* Pages by pool, and by where they lie. */
void metrics_put_kv(FILE *out, const metrics_view *v);

/* Drafts by place; attention groups; time of steps; balance of experts. */
void metrics_put_places(FILE *out, const metrics_view *v, const metrics_dialect *d);
void metrics_put_engine(FILE *out, const metrics_view *v);

#endif
