/* metrics.c - Prometheus metrics: one table of series, written under our names and under
 * those of vLLM and SGLang for existing dashboards. docs/metrics.md lists them. */
#include "server/metrics.h"

#include <dirent.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/log.h"
#include "base/progress.h"
#include "server/histogram.h"
#include "server/server.h"

enum { ENDPOINTS = 16, FINISHES = 10 };

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
    counted_name finishes[FINISHES], unknown[ENDPOINTS];
};

static double seconds(int64_t ns) {
    return (double)ns * 1e-9;
}

metrics *metrics_new(const char *model_name) {
    metrics *m = calloc(1, sizeof *m);
    if (!m) return NULL;
    char *to = m->label + (size_t)snprintf(m->label, sizeof m->label, "model_name=\"");
    const char *end = m->label + sizeof m->label - 4;
    for (const char *p = model_name; *p && to < end; p++) {
        if (*p == '"' || *p == '\\' || *p == '\n') *to++ = '\\';
        *to++ = *p == '\n' ? 'n' : *p;
    }
    while (to[-1] & 0x80 && to > end - 4) to--; /* do not cut within a character */
    *to++ = '"';
    *to = '\0';
    m->start_time = (double)time(NULL);
    pthread_mutex_init(&m->lock, NULL);
    return m;
}

void metrics_free(metrics *m) {
    if (!m) return;
    pthread_mutex_destroy(&m->lock);
    free(m);
}

/* Names are the API's own literals, so there are few. If the list is full, the last entry
 * counts further names. */

/* Names are the API's own literals, so there are few; a full list counts under its last. */
static void count_name(metrics *m, counted_name *list, size_t n, const char *name) {
    size_t i = 0;
    pthread_mutex_lock(&m->lock);
    while (i + 1 < n && list[i].name && strcmp(list[i].name, name) != 0) i++;
    if (!list[i].name) list[i].name = name;
    list[i].n++;
    pthread_mutex_unlock(&m->lock);
}

void metrics_first(metrics *m, int64_t since_start_ns) {
    histogram_add(&m->ttft, since_start_ns, 1);
}

void metrics_token(metrics *m, int32_t n_tokens, int64_t since_last_ns) {
    if (n_tokens > 0) histogram_add(&m->itl, since_last_ns / n_tokens, (uint64_t)n_tokens);
}

/* Adds the phases of a request that had a token: queue, prefill, decode. */
static void add_phases(metrics *m, const api_outcome *o) {
    if (!o->first_ns || !o->admitted_ns) return;
    histogram_add(&m->prefill, o->first_ns - o->admitted_ns, 1);
    histogram_add(&m->decode, o->end_ns - o->first_ns, 1);
    histogram_add(&m->inference, o->end_ns - o->admitted_ns, 1);
    if (o->output_tokens < 2) return;
    histogram_add(&m->tpot, (o->end_ns - o->first_ns) / (o->output_tokens - 1), 1);
}

void metrics_end(metrics *m, const api_outcome *o) {
    atomic_fetch_add(&m->requests, 1);
    if (o->finish && strcmp(o->finish, "abort") == 0) atomic_fetch_add(&m->aborted, 1);
    if (o->finish) count_name(m, m->finishes, FINISHES, o->finish);
    if (o->admitted_ns) histogram_add(&m->queue, o->admitted_ns - o->start_ns, 1);
    if (o->end_ns) histogram_add(&m->e2e, o->end_ns - o->start_ns, 1);
    add_phases(m, o);
    histogram_add(&m->prompt, o->prompt_tokens, 1);
    histogram_add(&m->generation, o->output_tokens, 1);
}

void metrics_unknown_field(metrics *m, const char *endpoint) {
    count_name(m, m->unknown, ENDPOINTS, endpoint);
}

static const histogram *times(const metrics *m, metrics_time which) {
    return which == METRICS_TTFT ? &m->ttft : &m->itl;
}

void metrics_mark(metrics *m) {
    for (metrics_time t = METRICS_TTFT; t <= METRICS_ITL; t++) {
        histogram_mark(&m->recent[t], times(m, t));
    }
}

metrics_spread metrics_recent(metrics *m, metrics_time which) {
    histogram_copy c;
    histogram_read_window(&m->recent[which], times(m, which), &c);
    return (metrics_spread){c.n, histogram_quantile(&c, 0.5) * 1e-6,
                            histogram_quantile(&c, 0.95) * 1e-6};
}

double metrics_balancedness(const int64_t *load, size_t n, int32_t n_experts) {
    double sum = 0;
    int32_t layers = 0;
    for (size_t at = 0; n_experts > 0 && at + (size_t)n_experts <= n; at += (size_t)n_experts) {
        int64_t all = 0, most = 0;
        for (int32_t e = 0; e < n_experts; e++) {
            all += load[at + (size_t)e];
            if (load[at + (size_t)e] > most) most = load[at + (size_t)e];
        }
        if (!most) continue;
        sum += (double)all / n_experts / (double)most;
        layers++;
    }
    return layers ? sum / layers : 0;
}

/* ---- values read when rendering ---- */

typedef struct view {
    metrics *m;
    const metrics_sources *from;
    hd_engine_stats e;
    http_stats h;
    int64_t *load; /* [n_load] rows of each expert, layer by layer; NULL: none */
    size_t n_load;
    int32_t n_experts;
    int64_t resident_bytes;
    int32_t open_files;
} view;

static int64_t resident_bytes(void) {
    char text[128] = "";
    FILE *f = fopen("/proc/self/statm", "re");
    if (!f) return 0;
    const char *line = fgets(text, sizeof text, f);
    fclose(f);
    const char *second = line ? strchr(line, ' ') : NULL;
    return second ? strtoll(second, NULL, 10) * sysconf(_SC_PAGESIZE) : 0;
}

static int32_t open_files(void) {
    DIR *d = opendir("/proc/self/fd");
    int32_t n = -3; /* do not count ".", ".." and the directory itself */
    if (!d) return 0;
    while (readdir(d)) n++;
    closedir(d);
    return n;
}

static void read_experts(view *v, hd_engine *e) {
    const size_t n = hd_engine_read_experts(e, NULL, 0, &v->n_experts);
    v->load = n ? calloc(n, sizeof *v->load) : NULL;
    v->n_load = v->load ? hd_engine_read_experts(e, v->load, n, NULL) : 0;
}

/* ---- single values ---- */

static int64_t page_tokens_of(const view *v, int pool, const int32_t *pages) {
    return (int64_t)pages[pool] * v->e.page_tokens;
}

static int64_t used_pages(const view *v, int pool) {
    return v->e.pages[pool] - v->e.pages_free[pool] - v->e.pages_cached[pool];
}

static double running(const view *v) {
    return v->e.running;
}
static double waiting(const view *v) {
    return v->e.waiting;
}
static double living(const view *v) {
    return v->e.living;
}
static double living_requests(const view *v) {
    return v->from->living_requests;
}
static double audits(const view *v) {
    return (double)v->e.audits;
}
static double audits_failed(const view *v) {
    return (double)v->e.audits_failed;
}
static double rank_failures(const view *v) {
    return (double)v->e.rank_failures;
}
static double ranks_lost(const view *v) {
    return v->e.ranks_lost;
}
static double rebalance_plans(const view *v) {
    return (double)v->e.rebalance.plans;
}
static double rebalance_interrupted(const view *v) {
    return (double)v->e.rebalance.interrupted;
}
static double expert_moves(const view *v) {
    return (double)v->e.rebalance.moves;
}
static double expert_move_bytes(const view *v) {
    return v->e.rebalance.bytes;
}
static double rank_balancedness(const view *v) {
    return v->e.rebalance.on ? v->e.rebalance.balancedness : 1;
}
static double rank_balancedness_at_start(const view *v) {
    return v->e.rebalance.on ? v->e.rebalance.at_start : 1;
}
static double rebalance_looks(const view *v) {
    return (double)v->e.rebalance.looks;
}
static double rank_balancedness_bound(const view *v) {
    return v->e.rebalance.on ? v->e.rebalance.bound : 1;
}
static double single_copies(const view *v) {
    return v->e.rebalance.single_copies;
}
static double expert_slots(const view *v) {
    return v->e.experts.slots;
}
static double experts_elsewhere(const view *v) {
    return v->e.experts.elsewhere;
}
static double experts_used(const view *v) {
    return (double)v->e.experts.used;
}
static double experts_staged(const view *v) {
    return (double)v->e.experts.staged;
}
static double experts_fetched(const view *v) {
    return (double)v->e.experts.fetched;
}
static double expert_fetch_bytes(const view *v) {
    return (double)v->e.experts.fetched_bytes;
}
static double experts_predicted(const view *v) {
    return (double)v->e.experts.predicted;
}
static double experts_predicted_right(const view *v) {
    return (double)v->e.experts.right;
}
static double experts_fetched_ahead(const view *v) {
    return (double)v->e.experts.ahead;
}
static double expert_moves_to_device(const view *v) {
    return (double)v->e.experts.moved;
}
static double expert_fetches_failed(const view *v) {
    return (double)v->e.experts.failed;
}
static double expert_wait_seconds(const view *v) {
    return (double)v->e.experts.wait_ns * 1e-9;
}
static double engram_pieces(const view *v) {
    return (double)v->e.engram.pieces;
}
static double engram_resident(const view *v) {
    return (double)v->e.engram.resident;
}
static double engram_read_bytes(const view *v) {
    return (double)v->e.engram.read_bytes;
}
static double engram_skipped(const view *v) {
    return (double)v->e.engram.skipped;
}
static double paused(const view *v) {
    return v->e.paused;
}

static double paused_seconds(const view *v) {
    return v->e.paused ? seconds(hd_now_ns() - v->e.paused_ns) : 0;
}
static double throughput(const view *v) {
    return v->from->tokens_per_s;
}
static double prompt_tokens(const view *v) {
    return (double)v->e.prompt_tokens;
}
static double output_tokens(const view *v) {
    return (double)v->e.output_tokens;
}
static double cached_tokens(const view *v) {
    return (double)v->e.cached_tokens;
}
static double hit_rate(const view *v) {
    return v->e.prompt_tokens ? (double)v->e.cached_tokens / (double)v->e.prompt_tokens : 0;
}
static double requests(const view *v) {
    return (double)atomic_load(&v->m->requests);
}
static double aborted(const view *v) {
    return (double)atomic_load(&v->m->aborted);
}
static double retracted(const view *v) {
    return (double)v->e.retracted;
}
static double steps(const view *v) {
    return (double)v->e.steps;
}
static double rows(const view *v) {
    return (double)v->e.rows;
}
static double kv_total(const view *v) {
    return (double)page_tokens_of(v, HD_KV_FULL, v->e.pages);
}
static double kv_used(const view *v) {
    return (double)used_pages(v, HD_KV_FULL) * v->e.page_tokens;
}
static double kv_free(const view *v) {
    return (double)page_tokens_of(v, HD_KV_FULL, v->e.pages_free);
}
static double kv_evictable(const view *v) {
    return (double)page_tokens_of(v, HD_KV_FULL, v->e.pages_cached);
}
static double usage(const view *v) {
    const int32_t all = v->e.pages[HD_KV_FULL];
    return all ? (double)used_pages(v, HD_KV_FULL) / all : 0;
}
static double window_usage(const view *v) {
    const int32_t all = v->e.pages[HD_KV_WINDOW];
    return all ? (double)used_pages(v, HD_KV_WINDOW) / all : 0;
}
static double drafts(const view *v) {
    return (double)v->e.drafted_at[0];
}
static int64_t sum_places(const int64_t *at) {
    int64_t n = 0;
    for (int32_t i = 0; i < HD_MAX_DRAFTS; i++) n += at[i];
    return n;
}
static double draft_tokens(const view *v) {
    return (double)sum_places(v->e.drafted_at);
}
static double accepted_tokens(const view *v) {
    return (double)sum_places(v->e.accepted_at);
}
static double accept_length(const view *v) {
    return drafts(v) > 0 ? 1 + accepted_tokens(v) / drafts(v) : 1;
}
static double accept_rate(const view *v) {
    return draft_tokens(v) > 0 ? accepted_tokens(v) / draft_tokens(v) : 0;
}
static double balancedness(const view *v) {
    return metrics_balancedness(v->load, v->n_load, v->n_experts);
}
static double page_size(const view *v) {
    return v->e.page_tokens;
}
static double context_length(const view *v) {
    return v->e.max_context;
}
static double max_running(const view *v) {
    return v->e.max_running;
}
static double weight_bytes(const view *v) {
    return (double)v->e.weight_bytes;
}
static double kv_bytes(const view *v) {
    return (double)v->e.kv_bytes;
}
static double weight_gb(const view *v) {
    return (double)v->e.weight_bytes / 1e9;
}
static double kv_gb(const view *v) {
    return (double)v->e.kv_bytes / 1e9;
}
static double load_seconds(const view *v) {
    return v->from->load_seconds;
}
static double connections(const view *v) {
    return v->h.connections;
}
static double calls(const view *v) {
    return v->h.calls;
}
static double held_bytes(const view *v) {
    return (double)v->h.held_bytes;
}
static double streams(const view *v) {
    return v->h.streams;
}
static double cut_off(const view *v) {
    return (double)v->h.cut_off;
}
static double gone(const view *v) {
    return (double)v->h.gone;
}
static double handshakes_failed(const view *v) {
    return (double)v->h.handshakes_failed;
}

static double timed_out(const view *v) {
    return (double)v->h.timed_out;
}
static double refused(const view *v) {
    return (double)v->h.refused;
}
static double log_dropped(const view *v) {
    (void)v;
    return (double)hd_log_dropped();
}
static double accepted(const view *v) {
    return (double)v->h.accepted;
}
static double refused_connections(const view *v) {
    return (double)v->h.refused_connections;
}
static double received_bytes(const view *v) {
    return (double)v->h.body_bytes;
}
static double sent_bytes(const view *v) {
    return (double)v->h.sent_bytes;
}
static double resident(const view *v) {
    return (double)v->resident_bytes;
}
static double files(const view *v) {
    return v->open_files;
}
static double weight_updates(const view *v) {
    return (double)v->e.weight_updates;
}

static double released_bytes(const view *v) {
    return (double)v->e.released_bytes;
}

static double weights_lost(const view *v) {
    return v->e.weights_lost;
}

static double route_rows(const view *v) {
    return (double)v->e.replay_rows[HD_REPLAY_EXPERTS];
}

static double route_bytes(const view *v) {
    return (double)v->e.replay_bytes[HD_REPLAY_EXPERTS];
}

static double indexer_rows(const view *v) {
    return (double)v->e.replay_rows[HD_REPLAY_KEYS];
}

static double indexer_bytes(const view *v) {
    return (double)v->e.replay_bytes[HD_REPLAY_KEYS];
}

static double weight_update_begun(const view *v) {
    return v->from->update_begun;
}
static double weight_update_seconds(const view *v) {
    return seconds(v->e.weight_updates_ns);
}

static double started(const view *v) {
    return v->m->start_time;
}

typedef struct series {
    const char *own, *sglang, *vllm; /* names without prefix; NULL: not under this prefix */
    const char *type, *help;
    double (*value)(const view *v);
} series;

/* clang-format off */
static const series all_series[] = {
    {"num_running_reqs", "num_running_reqs", "num_requests_running", "gauge", "choices being computed", running},
    {"num_queue_reqs", "num_queue_reqs", "num_requests_waiting", "gauge", "choices that wait", waiting},
    {"living_answers", NULL, NULL, "gauge", "unfinished choices, also while a step is stuck", living},
    {"living_requests", NULL, NULL, "gauge", "requests with unfinished choices", living_requests},
    {"max_running_reqs", NULL, NULL, "gauge", "most choices computed at once", max_running},
    {"paused", NULL, "engine_sleep_state", "gauge", "1 while generation is paused", paused},
    {"paused_seconds", NULL, NULL, "gauge", "how long the pause lasts that nobody has ended; 0: there is none", paused_seconds},
    {"released_bytes", NULL, NULL, "gauge", "memory that was given back to the system", released_bytes},
    {"weights_lost", NULL, NULL, "gauge", "tensors to be updated before any request can run", weights_lost},
    {"route_rows_total", NULL, NULL, "counter", "positions whose experts were given to requests", route_rows},
    {"route_bytes", NULL, NULL, "gauge", "host memory that keeps the experts of positions", route_bytes},
    {"indexer_rows_total", NULL, NULL, "counter", "positions whose indexer choices were given to requests", indexer_rows},
    {"indexer_bytes", NULL, NULL, "gauge", "host memory that keeps the indexer choices of positions", indexer_bytes},
    {"weight_updates_total", NULL, NULL, "counter", "how often weights were replaced", weight_updates},
    {"weight_update_begun", NULL, NULL, "gauge", "1 while an update in parts waits for its end", weight_update_begun},
    {"weight_update_seconds_total", NULL, NULL, "counter", "time without steps in which weights were copied", weight_update_seconds},
    {"gen_throughput", "gen_throughput", NULL, "gauge", "output tokens per second, lately", throughput},
    {"prompt_tokens_total", "prompt_tokens_total", "prompt_tokens_total", "counter", "prompt tokens of admitted requests", prompt_tokens},
    {"generation_tokens_total", "generation_tokens_total", "generation_tokens_total", "counter", "tokens generated", output_tokens},
    {"cached_tokens_total", "cached_tokens_total", "prefix_cache_hits_total", "counter", "prompt tokens found in the prefix cache", cached_tokens},
    {"prefix_cache_queries_total", NULL, "prefix_cache_queries_total", "counter", "prompt tokens looked up in the prefix cache", prompt_tokens},
    {"cache_hit_rate", "cache_hit_rate", NULL, "gauge", "cached share of all prompt tokens so far", hit_rate},
    {"num_requests_total", "num_requests_total", NULL, "counter", "requests that ended", requests},
    {"num_aborted_requests_total", "num_aborted_requests_total", NULL, "counter", "requests that were aborted", aborted},
    {"num_retracted_requests_total", "num_retracted_requests_total", "num_preemptions_total", "counter", "times a request lost its place for others", retracted},
    {"steps_total", NULL, NULL, "counter", "forward passes", steps},
    {"step_rows_total", NULL, NULL, "counter", "rows in them", rows},
    {"max_total_num_tokens", "max_total_num_tokens", NULL, "gauge", "tokens the KV pools hold", kv_total},
    {"kv_used_tokens", "kv_used_tokens", NULL, "gauge", "tokens held by living requests", kv_used},
    {NULL, "num_used_tokens", NULL, "gauge", "tokens held by living requests", kv_used},
    {"kv_available_tokens", "kv_available_tokens", NULL, "gauge", "tokens free", kv_free},
    {"kv_evictable_tokens", "kv_evictable_tokens", NULL, "gauge", "tokens cached and given up on demand", kv_evictable},
    {"token_usage", "token_usage", "kv_cache_usage_perc", "gauge", "used share of the KV pool, 0 to 1", usage},
    {"window_usage", "swa_token_usage", NULL, "gauge", "used share of the window pool, 0 to 1", window_usage},
    {"spec_decode_num_drafts_total", "spec_verify_calls_total", "spec_decode_num_drafts_total", "counter", "steps of a choice with drafts", drafts},
    {"spec_decode_num_draft_tokens_total", NULL, "spec_decode_num_draft_tokens_total", "counter", "draft tokens", draft_tokens},
    {"spec_decode_num_accepted_tokens_total", NULL, "spec_decode_num_accepted_tokens_total", "counter", "draft tokens that stood", accepted_tokens},
    {"spec_accept_length", "spec_accept_length", NULL, "gauge", "tokens per step of a choice with drafts", accept_length},
    {"spec_accept_rate", "spec_accept_rate", NULL, "gauge", "share of draft tokens that were accepted", accept_rate},
    {"expert_balancedness", "eplb_balancedness", NULL, "gauge", "mean load of experts over the largest, averaged over layers", balancedness},
    {"page_size", "page_size", NULL, "gauge", "tokens of a page", page_size},
    {"context_len", "context_len", NULL, "gauge", "most tokens of one choice, prompt and output", context_length},
    {"weight_memory_usage_bytes", NULL, NULL, "gauge", "memory of weights", weight_bytes},
    {"kv_cache_memory_usage_bytes", NULL, NULL, "gauge", "memory of KV pools", kv_bytes},
    {NULL, "weight_memory_usage_gb", NULL, "gauge", "10^9 bytes of weights", weight_gb},
    {NULL, "kv_cache_memory_usage_gb", NULL, "gauge", "10^9 bytes of KV pools", kv_gb},
    {"audits_total", NULL, NULL, "counter", "looks at an idle engine: is every page and slot back", audits},
    {"audits_failed_total", NULL, NULL, "counter", "audits that missed some, and took all back", audits_failed},
    {"rank_failures_total", NULL, NULL, "counter", "steps given up because a rank failed", rank_failures},
    {"ranks_lost", NULL, NULL, "gauge", "1 if restarts of failed ranks were of no use", ranks_lost},
    {"rebalance_plans_total", NULL, NULL, "counter", "plans of experts' places that were carried out", rebalance_plans},
    {"rebalance_interrupted_total", NULL, NULL, "counter", "plans given up; the places before stayed in force", rebalance_interrupted},
    {"expert_moves_total", NULL, NULL, "counter", "experts copied to another rank", expert_moves},
    {"expert_move_bytes_total", NULL, NULL, "counter", "bytes of them", expert_move_bytes},
    {"rank_balancedness", NULL, NULL, "gauge", "mean rows of ranks over the most, averaged over MoE layers; 1: not watched", rank_balancedness},
    {"rank_balancedness_bound", NULL, NULL, "gauge", "no places of experts give more", rank_balancedness_bound},
    {"rank_balancedness_at_start", NULL, NULL, "gauge", "the places of experts at the start would have given this for the same rows", rank_balancedness_at_start},
    {"rebalance_looks_total", NULL, NULL, "counter", "looks at the ranks' rows", rebalance_looks},
    {"experts_with_one_copy", NULL, NULL, "gauge", "experts of all layers that one slot holds; 0: not watched", single_copies},
    {"experts_elsewhere", NULL, NULL, "gauge", "experts that ranks do not hold: they are in files or other ranks", experts_elsewhere},
    {"expert_slots", NULL, NULL, "gauge", "how many of them can be staged at once", expert_slots},
    {"experts_used_total", NULL, NULL, "counter", "such experts that layers computed with", experts_used},
    {"experts_staged_total", NULL, NULL, "counter", "those of them that were staged, or on their way, already", experts_staged},
    {"experts_fetched_total", NULL, NULL, "counter", "experts read from files or copied from other ranks", experts_fetched},
    {"expert_fetch_bytes_total", NULL, NULL, "counter", "bytes of them", expert_fetch_bytes},
    {"expert_fetches_failed_total", NULL, NULL, "counter", "experts that could not be fetched", expert_fetches_failed},
    {"experts_predicted_total", NULL, NULL, "counter", "experts in files that were predicted for the next layer", experts_predicted},
    {"experts_predicted_right_total", NULL, NULL, "counter", "those of them that it used", experts_predicted_right},
    {"experts_fetched_ahead_total", NULL, NULL, "counter", "experts read by a prediction", experts_fetched_ahead},
    {"experts_moved_to_device_total", NULL, NULL, "counter", "experts that became resident because they were used most", expert_moves_to_device},
    {"expert_wait_seconds_total", NULL, NULL, "counter", "time in steps that waited for experts", expert_wait_seconds},
    {"engram_pieces_total", NULL, NULL, "counter", "rows of Engram tables, and rows of their scales, that steps asked for", engram_pieces},
    {"engram_resident_total", NULL, NULL, "counter", "those of them that were in memory", engram_resident},
    {"engram_read_bytes_total", NULL, NULL, "counter", "bytes of pages that were read for the others", engram_read_bytes},
    {"engram_skipped_total", NULL, NULL, "counter", "rows that steps did not ask for ahead, because earlier ones were not done", engram_skipped},
    {"load_seconds", "weight_load_duration_seconds", NULL, "gauge", "time to load the model", load_seconds},
    {"http_connections", NULL, NULL, "gauge", "open connections", connections},
    {"http_calls", NULL, NULL, "gauge", "requests being handled or answered", calls},
    {"http_held_body_bytes", NULL, NULL, "gauge", "bytes of request bodies and unread responses in memory", held_bytes},
    {"http_streams", NULL, NULL, "gauge", "open event streams", streams},
    {"http_accepted_connections_total", NULL, NULL, "counter", "connections accepted", accepted},
    {"http_refused_connections_total", NULL, NULL, "counter", "connections closed because there were too many", refused_connections},
    {"http_slow_readers_total", NULL, NULL, "counter", "streams cut off because their reader fell behind", cut_off},
    {"http_clients_gone_total", NULL, NULL, "counter", "clients that left before the response's end", gone},
    {"tls_handshakes_failed_total", NULL, NULL, "counter", "connections that ended before TLS was agreed upon", handshakes_failed},
    {"http_timeouts_total", NULL, NULL, "counter", "requests that did not arrive in time, connections that idled", timed_out},
    {"http_refused_total", NULL, NULL, "counter", "requests refused before a handler saw them", refused},
    {"log_lines_dropped_total", NULL, NULL, "counter", "lines of the log that a full pipe did not take", log_dropped},
    {"http_request_body_bytes_total", NULL, NULL, "counter", "bytes of request bodies", received_bytes},
    {"http_response_body_bytes_total", NULL, NULL, "counter", "bytes of responses", sent_bytes},
};

static const series process_series[] = {
    {"process_resident_memory_bytes", NULL, NULL, "gauge", "resident memory", resident},
    {"process_open_fds", NULL, NULL, "gauge", "open files", files},
    {"process_start_time_seconds", NULL, NULL, "gauge", "start, Unix time", started},
};
/* clang-format on */

/* ---- text ---- */

typedef struct dialect {
    const char *prefix, *labels; /* labels: follow model_name */
    int bit;                     /* of server_compat; 0: always written */
} dialect;

static const dialect dialects[] = {
    {"hadal_",  "",                                                                       0                 },
    {"sglang:", ",engine_type=\"unified\",tp_rank=\"0\",pp_rank=\"0\",moe_ep_rank=\"0\"",
     SERVER_COMPAT_SGLANG                                                                                   },
    {"vllm:",   ",engine=\"0\"",                                                          SERVER_COMPAT_VLLM},
};

static void put_head(FILE *out, const char *prefix, const char *name, const char *type,
                     const char *help) {
    fprintf(out, "# HELP %s%s %s\n# TYPE %s%s %s\n", prefix, name, help, prefix, name, type);
}

static void put_series(FILE *out, const view *v, const dialect *d, const series *s) {
    const char *const names[] = {s->own, s->sglang, s->vllm};
    const char *name = names[d - dialects];
    if (!name) return;
    put_head(out, d->prefix, name, s->type, s->help);
    fprintf(out, "%s%s{%s%s} %.17g\n", d->prefix, name, v->m->label, d->labels, s->value(v));
}

typedef struct shape { /* a histogram, written under every prefix */
    const char *own, *sglang, *vllm, *help;
    double unit; /* value of 1 at the edges in the histogram's unit */
    size_t offset;
    const double *edges[3]; /* per dialect, terminated by 0 */
} shape;

static const double ttft_ours[] = {.001, .005, .01, .02, .04, .06, .08, .1,  .25, .5,   .75, 1,
                                   2.5,  5,    7.5, 10,  20,  40,  80,  160, 640, 2560, 0};
static const double ttft_sglang[] = {.1, .2, .4, .6, .8, 1,   2,   4,   6, 8,
                                     10, 20, 40, 60, 80, 100, 200, 400, 0};
static const double itl_ours[] = {.0001, .0002, .0005, .001, .002, .004, .006, .008, .01,
                                  .015,  .02,   .025,  .03,  .04,  .06,  .08,  .1,   .2,
                                  .4,    .8,    1,     2,    4,    8,    0};
static const double itl_sglang[] = {.002, .004, .006, .008, .01, .015, .02, .025,
                                    .03,  .035, .04,  .06,  .08, .1,   .2,  .4,
                                    .6,   .8,   1,    2,    4,   6,    8,   0};
static const double itl_vllm[] = {.01, .025, .05, .075, .1,  .15, .2, .3, .4, .5,
                                  .75, 1,    2.5, 5,    7.5, 10,  20, 40, 80, 0};
static const double e2e_sglang[] = {.1, .2, .4, .6,  .8,  1,   2,   4,    6,    8,    10, 20,
                                    40, 60, 80, 100, 200, 400, 600, 1200, 1800, 2400, 0};
static const double request_vllm[] = {.3, .5, .8, 1,  1.5, 2,   2.5, 5,   10,   15,   20,
                                      30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680, 0};
static const double token_edges[] = {1,     2,      5,      10,     20,      50,    100,
                                     200,   500,    1000,   2000,   5000,    10000, 20000,
                                     50000, 100000, 200000, 500000, 1000000, 0};

/* clang-format off */
static const shape shapes[] = {
    {"time_to_first_token_seconds", "time_to_first_token_seconds", "time_to_first_token_seconds",
     "from the request's headers to the first token", 1e9, offsetof(metrics, ttft), {ttft_ours, ttft_sglang, ttft_ours}},
    {"inter_token_latency_seconds", "inter_token_latency_seconds", "inter_token_latency_seconds",
     "between tokens of a choice", 1e9, offsetof(metrics, itl), {itl_ours, itl_sglang, itl_vllm}},
    {"e2e_request_latency_seconds", "e2e_request_latency_seconds", "e2e_request_latency_seconds",
     "from the request's headers to its end", 1e9, offsetof(metrics, e2e), {ttft_ours, e2e_sglang, request_vllm}},
    {"queue_time_seconds", "queue_time_seconds", "request_queue_time_seconds",
     "until the first choice was admitted", 1e9, offsetof(metrics, queue), {ttft_ours, ttft_sglang, request_vllm}},
    {"request_prefill_time_seconds", NULL, "request_prefill_time_seconds",
     "from admission to the first token", 1e9, offsetof(metrics, prefill), {ttft_ours, NULL, request_vllm}},
    {"request_decode_time_seconds", NULL, "request_decode_time_seconds",
     "from the first token to the end", 1e9, offsetof(metrics, decode), {ttft_ours, NULL, request_vllm}},
    {"request_inference_time_seconds", NULL, "request_inference_time_seconds",
     "from admission to the end", 1e9, offsetof(metrics, inference), {ttft_ours, NULL, request_vllm}},
    {"request_time_per_output_token_seconds", NULL, "request_time_per_output_token_seconds",
     "mean time between tokens of a request", 1e9, offsetof(metrics, tpot), {itl_ours, NULL, itl_vllm}},
    {"request_prompt_tokens", "prompt_tokens_histogram", "request_prompt_tokens",
     "prompt tokens of a request", 1, offsetof(metrics, prompt), {token_edges, token_edges, token_edges}},
    {"request_generation_tokens", "generation_tokens_histogram", "request_generation_tokens",
     "tokens generated for a request", 1, offsetof(metrics, generation), {token_edges, token_edges, token_edges}},
};
/* clang-format on */

static void put_histogram(FILE *out, const view *v, const dialect *d, const shape *s) {
    const char *const names[] = {s->own, s->sglang, s->vllm};
    const char *name = names[d - dialects];
    if (!name) return;
    histogram_copy h;
    histogram_read((const void *)((const char *)v->m + s->offset), &h);
    put_head(out, d->prefix, name, "histogram", s->help);
    for (const double *edge = s->edges[d - dialects]; *edge > 0; edge++) {
        fprintf(out, "%s%s_bucket{%s%s,le=\"%g\"} %llu\n", d->prefix, name, v->m->label,
                d->labels, *edge, (unsigned long long)histogram_below(&h, *edge * s->unit));
    }
    fprintf(out, "%s%s_bucket{%s%s,le=\"+Inf\"} %llu\n", d->prefix, name, v->m->label,
            d->labels, (unsigned long long)h.n);
    fprintf(out, "%s%s_sum{%s%s} %.17g\n%s%s_count{%s%s} %llu\n", d->prefix, name, v->m->label,
            d->labels, (double)h.sum / s->unit, d->prefix, name, v->m->label, d->labels,
            (unsigned long long)h.n);
}

/* ---- series with another label ---- */

static const char *const pools[HD_N_KV_GROUPS] = {"entries", "window"};

static void put_pools(FILE *out, const view *v) {
    put_head(out, "hadal_", "kv_pages", "gauge", "pages by pool and state");
    for (int p = 0; p < HD_N_KV_GROUPS; p++) {
        const char *label = v->m->label, *pool = pools[p];
        fprintf(out, "hadal_kv_pages{%s,pool=\"%s\",state=\"free\"} %d\n", label, pool,
                v->e.pages_free[p]);
        fprintf(out, "hadal_kv_pages{%s,pool=\"%s\",state=\"cached\"} %d\n", label, pool,
                v->e.pages_cached[p]);
        fprintf(out, "hadal_kv_pages{%s,pool=\"%s\",state=\"used\"} %lld\n", label, pool,
                (long long)used_pages(v, p));
    }
}

typedef struct tier { /* where pages lie */
    const char *name;
    int64_t pages[HD_N_KV_GROUPS]; /* that hold KV */
    int64_t tokens;                /* of prompts, whose entries were found there */
} tier;

/* of_page: what a page counts; NULL: 1. */
static void put_tier(FILE *out, const view *v, const char *at, const char *name,
                     const int64_t pages[HD_N_KV_GROUPS],
                     const size_t of_page[HD_N_KV_GROUPS]) {
    for (int p = 0; p < HD_N_KV_GROUPS; p++) {
        fprintf(out, "hadal_%s{%s,tier=\"%s\",pool=\"%s\"} %lld\n", name, v->m->label, at,
                pools[p], (long long)pages[p] * (long long)(of_page ? of_page[p] : 1));
    }
}

static void put_copies(FILE *out, const view *v, const char *name, const char *help,
                       const int64_t host[HD_N_KV_GROUPS], const int64_t disk[HD_N_KV_GROUPS]) {
    put_head(out, "hadal_", name, "counter", help);
    put_tier(out, v, "host", name, host, NULL);
    put_tier(out, v, "disk", name, disk, NULL);
}

static void put_failures(FILE *out, const view *v) {
    const hd_kv_disk_figures *d = &v->e.kv_disk;
    const struct {
        const char *why;
        int64_t n;
    } rows[] = {
        {"write", d->write_failed},
        {"read",  d->read_failed },
        {"late",  d->late        }
    };
    put_head(
        out, "hadal_", "kv_disk_failures_total", "counter",
        "transfers that failed, and reads of prefixes that took longer than computing them");
    for (size_t i = 0; i < HD_LEN(rows); i++) {
        fprintf(out, "hadal_kv_disk_failures_total{%s,reason=\"%s\"} %lld\n", v->m->label,
                rows[i].why, (long long)rows[i].n);
    }
}

static void put_disk_figure(FILE *out, const view *v, const char *name, const char *type,
                            const char *help, double value) {
    put_head(out, "hadal_", name, type, help);
    fprintf(out, "hadal_%s{%s} %.17g\n", name, v->m->label, value);
}

static void put_disk(FILE *out, const view *v) {
    const hd_kv_disk_figures *d = &v->e.kv_disk;
    put_failures(out, v);
    put_disk_figure(out, v, "kv_disk_declined_total", "counter",
                    "prefixes that were not read because computing was predicted to be sooner",
                    (double)d->declined);
    put_disk_figure(out, v, "kv_disk_read_bytes_total", "counter", "bytes of prefixes read",
                    (double)d->read_bytes);
    put_disk_figure(out, v, "kv_disk_read_seconds_total", "counter",
                    "from asking for these prefixes until they were in host memory",
                    (double)d->read_ns / 1e9);
    put_disk_figure(out, v, "kv_disk_limit_bytes", "gauge", "bytes that the files may have",
                    (double)d->bytes);
}

static void put_tiers(FILE *out, const view *v) {
    const hd_engine_stats *e = &v->e;
    const hd_kv_disk_figures *d = &e->kv_disk;
    tier tiers[] = {
        {.name = "device", .tokens = e->cached_tokens - e->host_cached_tokens},
        {.name = "host",   .tokens = e->host_cached_tokens - d->tokens       },
        {.name = "disk",   .tokens = d->tokens                               }
    };
    for (int p = 0; p < HD_N_KV_GROUPS; p++) {
        tiers[0].pages[p] = e->pages[p] - e->pages_free[p];
        tiers[1].pages[p] = e->host_pages[p] - e->host_free[p];
        tiers[2].pages[p] = d->pages[p];
    }
    put_head(out, "hadal_", "kv_tier_pages", "gauge", "pages that hold KV, by tier and pool");
    for (size_t i = 0; i < HD_LEN(tiers); i++) {
        put_tier(out, v, tiers[i].name, "kv_tier_pages", tiers[i].pages, NULL);
    }
    put_head(out, "hadal_", "kv_tier_bytes", "gauge", "bytes of them in all layers of a rank");
    for (size_t i = 0; i < HD_LEN(tiers); i++) {
        put_tier(out, v, tiers[i].name, "kv_tier_bytes", tiers[i].pages, e->page_bytes);
    }
    put_copies(out, v, "kv_tier_saved_pages_total", "pages copied there from the tier above",
               e->host_saved, d->written);
    put_copies(out, v, "kv_tier_loaded_pages_total",
               "pages copied from there to the tier above", e->host_loaded, d->read);
    put_head(out, "hadal_", "kv_tier_cached_tokens_total", "counter",
             "prompt tokens found in the prefix cache, by where their entries lay");
    for (size_t i = 0; i < HD_LEN(tiers); i++) {
        fprintf(out, "hadal_kv_tier_cached_tokens_total{%s,tier=\"%s\"} %lld\n", v->m->label,
                tiers[i].name, (long long)tiers[i].tokens);
    }
    put_head(out, "hadal_", "kv_tier_hit_rate", "gauge",
             "their share of all prompt tokens so far");
    for (size_t i = 0; i < HD_LEN(tiers); i++) {
        const double share =
            e->prompt_tokens ? (double)tiers[i].tokens / (double)e->prompt_tokens : 0;
        fprintf(out, "hadal_kv_tier_hit_rate{%s,tier=\"%s\"} %.17g\n", v->m->label,
                tiers[i].name, share);
    }
    put_disk(out, v);
}

/* Of each attention group, if there are several. */
static void put_groups(FILE *out, const view *v) {
    static const struct {
        const char *name, *type, *help;
        size_t at; /* of an int64_t or, of a gauge, an int32_t in hd_engine_stats */
    } of_group[] = {
        {"group_running_reqs",             "gauge",   "choices that a group computes",
         offsetof(hd_engine_stats, running)      },
        {"group_queue_reqs",               "gauge",   "choices that wait in a group",
         offsetof(hd_engine_stats, waiting)      },
        {"group_free_pages",               "gauge",   "free pages of entries in a group",
         offsetof(hd_engine_stats, pages_free)   },
        {"group_steps_total",              "counter", "steps of a group that had rows",
         offsetof(hd_engine_stats, steps)        },
        {"group_step_rows_total",          "counter", "rows that a group computed",
         offsetof(hd_engine_stats, rows)         },
        {"group_prompt_tokens_total",      "counter", "prompt tokens of a group",
         offsetof(hd_engine_stats, prompt_tokens)},
        {"group_cached_tokens_total",      "counter", "of them found in its prefix cache",
         offsetof(hd_engine_stats, cached_tokens)},
        {"group_generation_tokens_total",  "counter", "tokens that a group generated",
         offsetof(hd_engine_stats, output_tokens)},
        {"group_retracted_requests_total", "counter", "choices that a group preempted",
         offsetof(hd_engine_stats, retracted)    },
    };
    hd_engine_stats e;
    const int32_t n = v->from->engine ? hd_engine_read_group(v->from->engine, -1, &e) : 0;
    for (size_t i = 0; n > 1 && i < HD_LEN(of_group); i++) {
        put_head(out, "hadal_", of_group[i].name, of_group[i].type, of_group[i].help);
        for (int32_t g = 0; g < n; g++) {
            hd_engine_read_group(v->from->engine, g, &e);
            const char *at = (const char *)&e + of_group[i].at;
            int64_t value;
            int32_t small;
            memcpy(&value, at, sizeof value);
            memcpy(&small, at, sizeof small);
            fprintf(out, "hadal_%s{%s,group=\"%d\"} %lld\n", of_group[i].name, v->m->label, g,
                    (long long)(of_group[i].type[0] == 'g' ? small : value));
        }
    }
}

/* Skips layers without routed experts, and layers whose experts have computed nothing yet. */
static void put_layers(FILE *out, const view *v) {
    const size_t per_layer = (size_t)v->n_experts;
    put_head(out, "hadal_", "expert_layer_balancedness", "gauge",
             "mean load of a layer's experts over the largest");
    for (size_t at = 0; at < v->n_load; at += per_layer) {
        const double even = metrics_balancedness(v->load + at, per_layer, v->n_experts);
        if (even <= 0) continue;
        fprintf(out, "hadal_expert_layer_balancedness{%s,layer=\"%zu\"} %.17g\n", v->m->label,
                at / per_layer, even);
    }
}

static void put_step_time(FILE *out, const view *v) {
    put_head(out, "hadal_", "step_seconds_total", "counter", "time in steps, by who was busy");
    fprintf(out, "hadal_step_seconds_total{%s,part=\"host\"} %.9f\n", v->m->label,
            seconds(v->e.host_ns));
    fprintf(out, "hadal_step_seconds_total{%s,part=\"device\"} %.9f\n", v->m->label,
            seconds(v->e.step_ns - v->e.host_ns));
}

/* Steps that ran as one CUDA graph each. */
static void put_graphs(FILE *out, const view *v) {
    put_head(out, "hadal_", "gpu_graph_steps_total", "counter", "steps launched as one graph");
    fprintf(out, "hadal_gpu_graph_steps_total{%s} %lld\n", v->m->label,
            (long long)v->e.graph_steps);
    put_head(out, "hadal_", "gpu_graph_seconds_total", "counter",
             "time of the GPU in graphs, and idle between one and the next behind it");
    fprintf(out, "hadal_gpu_graph_seconds_total{%s,part=\"busy\"} %.9f\n", v->m->label,
            seconds(v->e.graph_ns));
    fprintf(out, "hadal_gpu_graph_seconds_total{%s,part=\"idle\"} %.9f\n", v->m->label,
            seconds(v->e.gap_ns));
}

static void put_places(FILE *out, const view *v, const dialect *d) {
    static const char name[] = "spec_decode_num_accepted_tokens_per_pos_total";
    if (d->bit == SERVER_COMPAT_SGLANG) return;
    put_head(out, d->prefix, name, "counter", "drafts that stood, by place in the step");
    for (int i = 0; i < HD_MAX_DRAFTS; i++) {
        fprintf(out, "%s%s{%s%s,position=\"%d\"} %lld\n", d->prefix, name, v->m->label,
                d->labels, i, (long long)v->e.accepted_at[i]);
    }
    if (d->bit) return;
    put_head(out, d->prefix, "spec_decode_num_draft_tokens_per_pos_total", "counter",
             "drafts made, by place in the step");
    for (int i = 0; i < HD_MAX_DRAFTS; i++) {
        fprintf(out,
                "hadal_spec_decode_num_draft_tokens_per_pos_total{%s,position=\"%d\"} "
                "%lld\n",
                v->m->label, i, (long long)v->e.drafted_at[i]);
    }
}

static void put_names(FILE *out, view *v, const dialect *d) {
    pthread_mutex_lock(&v->m->lock);
    if (d->bit != SERVER_COMPAT_SGLANG) {
        put_head(out, d->prefix, "request_success_total", "counter",
                 "requests by how they ended");
        for (int i = 0; i < FINISHES && v->m->finishes[i].name; i++) {
            fprintf(out, "%srequest_success_total{%s%s,finished_reason=\"%s\"} %lld\n",
                    d->prefix, v->m->label, d->labels, v->m->finishes[i].name,
                    (long long)v->m->finishes[i].n);
        }
    }
    if (!d->bit) {
        put_head(out, d->prefix, "unknown_fields_total", "counter",
                 "fields of requests that this server does not know");
        for (int i = 0; i < ENDPOINTS && v->m->unknown[i].name; i++) {
            fprintf(out, "hadal_unknown_fields_total{%s,endpoint=\"%s\"} %lld\n", v->m->label,
                    v->m->unknown[i].name, (long long)v->m->unknown[i].n);
        }
    }
    pthread_mutex_unlock(&v->m->lock);
}

static void put_statuses(FILE *out, const view *v) {
    static const char *const names[] = {"gone", "1xx", "2xx", "3xx", "4xx", "5xx"};
    put_head(out, "hadal_", "http_requests_total", "counter", "requests by status");
    for (int i = 0; i < 6; i++) {
        fprintf(out, "hadal_http_requests_total{%s,status=\"%s\"} %lld\n", v->m->label,
                names[i], (long long)v->h.requests[i]);
    }
}

static void put_all(FILE *out, view *v) {
    for (size_t k = 0; k < HD_LEN(dialects); k++) {
        const dialect *d = &dialects[k];
        if (d->bit && !(v->from->compat & d->bit)) continue;
        for (size_t i = 0; i < HD_LEN(all_series); i++) put_series(out, v, d, &all_series[i]);
        for (size_t i = 0; i < HD_LEN(shapes); i++) put_histogram(out, v, d, &shapes[i]);
        put_places(out, v, d);
        put_names(out, v, d);
    }
    put_pools(out, v);
    put_tiers(out, v);
    put_groups(out, v);
    put_step_time(out, v);
    if (v->e.graph_steps) put_graphs(out, v);
    put_layers(out, v);
    if (v->from->pd) pd_put_metrics(out, v->m->label, v->from->pd);
    if (v->from->engine) {
        rank_view_put_metrics(out, v->m->label, v->from->ranks, v->from->engine);
    }
    put_statuses(out, v);
    for (size_t i = 0; i < HD_LEN(process_series); i++) {
        const series *s = &process_series[i];
        put_head(out, "", s->own, s->type, s->help);
        fprintf(out, "%s %.17g\n", s->own, s->value(v));
    }
}

char *metrics_render(metrics *m, const metrics_sources *from) {
    char *text = NULL;
    size_t n;
    view v = {.m = m, .from = from};
    if (from->engine) hd_engine_read_stats(from->engine, &v.e);
    if (from->engine) read_experts(&v, from->engine);
    http_read_stats(from->http, &v.h);
    v.resident_bytes = resident_bytes();
    v.open_files = open_files();
    FILE *out = open_memstream(&text, &n);
    if (out) put_all(out, &v);
    free(v.load);
    if (out && fclose(out) == 0) return text;
    free(text);
    return NULL;
}
