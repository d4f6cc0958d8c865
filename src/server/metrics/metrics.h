/* metrics.h - Prometheus metrics: counters and histograms of requests, and their text
 * format. */
#ifndef HD_SERVER_METRICS_H
#define HD_SERVER_METRICS_H

#include "api/api.h"
#include "http/listen.h"
#include "pd/pd.h"
#include "server/rank_view.h"

typedef struct metrics metrics;

metrics *metrics_new(const char *model_name); /* NULL: no memory */
void metrics_free(metrics *m);

/* Reported by the server; any thread may call these. */
void metrics_first(metrics *m, int64_t since_start_ns); /* token of a request */
void metrics_token(metrics *m, int32_t n_tokens, int64_t since_last_ns);
void metrics_end(metrics *m, const api_outcome *o);
void metrics_unknown_field(metrics *m, const char *endpoint);

typedef struct metrics_sources { /* values that are read when the metrics are rendered */
    hd_engine *engine;           /* NULL: the model is still loading */
    http_server *http;
    pd *pd; /* NULL: without a role */
    rank_view *ranks;
    int32_t living_requests;
    double tokens_per_s, load_seconds;
    int compat; /* server_compat bits */
    bool update_begun;
} metrics_sources;

/* Returns text that the caller frees, or NULL without memory. */
char *metrics_render(metrics *m, const metrics_sources *from);

/* Statistics of the last minute for the live view; only one thread may call. Marks are
 * METRICS_MARK_S seconds apart, so the window covers 55 to 60 seconds, or less after the
 * start. */
enum { METRICS_MARK_S = 5 };
typedef enum metrics_time { METRICS_TTFT, METRICS_ITL } metrics_time;
typedef struct metrics_spread {
    uint64_t n; /* number of requests or tokens; 0: the other fields are undefined */
    double p50_ms, p95_ms;
} metrics_spread;
void metrics_mark(metrics *m);
metrics_spread metrics_recent(metrics *m, metrics_time which);

/* Why choices wait: for pages of a prefill server; for the end of a pause; for one of max_running
 * places; else for room in the KV pools or for the next step. */
typedef enum metrics_wait {
    METRICS_WAIT_PREFILL,
    METRICS_WAIT_PAUSE,
    METRICS_WAIT_PLACE,
    METRICS_WAIT_KV,
    METRICS_N_WAITS
} metrics_wait;
const char *metrics_wait_name(metrics_wait why); /* "prefill" */
void metrics_waiting(const hd_engine_stats *e, int32_t n[METRICS_N_WAITS]);

/* Balance of the expert load: mean over maximum, averaged over layers; 1 is even. */
double metrics_balancedness(const int64_t *load, size_t n, int32_t n_experts);

#endif
