/* metrics.h - counters and histograms of what was served, and their Prometheus text. */
#ifndef HD_SERVER_METRICS_H
#define HD_SERVER_METRICS_H

#include "api/api.h"
#include "http/listen.h"

typedef struct metrics metrics;

metrics *metrics_new(const char *model_name); /* NULL: no memory */
void metrics_free(metrics *m);

/* What the server reports, from any thread. */
void metrics_first(metrics *m, int64_t since_start_ns); /* token of a request */
void metrics_token(metrics *m, int32_t n_tokens, int64_t since_last_ns);
void metrics_end(metrics *m, const api_outcome *o);
void metrics_unknown_field(metrics *m, const char *endpoint);

typedef struct metrics_sources { /* read at the moment of rendering */
    hd_engine *engine;           /* NULL: still loading */
    http_server *http;
    int32_t living_requests;
    double tokens_per_s, load_seconds;
    int compat; /* server_compat bits */
} metrics_sources;

/* malloc'ed text, the caller's; NULL: no memory. */
char *metrics_render(metrics *m, const metrics_sources *from);

/* What came in the last minute, for the live view; one thread's. METRICS_MARK_S seconds lie
 * between two marks, so a window covers 55 to 60 seconds; right after the start, all there is. */
enum { METRICS_MARK_S = 5 };
typedef enum metrics_time { METRICS_TTFT, METRICS_ITL } metrics_time;
typedef struct metrics_spread {
    uint64_t n; /* requests, or tokens; 0: the rest means nothing */
    double p50_ms, p95_ms;
} metrics_spread;
void metrics_mark(metrics *m);
metrics_spread metrics_recent(metrics *m, metrics_time which);

/* How even the load of experts is: mean over the largest, averaged over layers; 1: even. */
double metrics_balancedness(const int64_t *load, size_t n, int32_t n_experts);

#endif
