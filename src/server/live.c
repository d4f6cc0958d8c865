/* live.c - writes one JSON object of statistics per tick and sends it to all viewers. */
#include "server/live.h"

#include <jansson.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/progress.h"
#include "base/json.h"
#include "server/history.h"

enum { VIEWERS = 64, REQUESTS = 512, TICKS_PER_EXPERTS = 4 };

struct live_view {
    metrics *m;
    rank_view *ranks;
    history *past;
    pthread_mutex_t lock; /* guards the viewers */
    http_call *viewers[VIEWERS];
    size_t n_viewers;
    bool over;

    /* owned by the ticker */
    int64_t last_ns, last_output, last_prompt;
    _Atomic double tokens_per_s;
    double prompt_tokens_per_s;
    int64_t *load, *before; /* [n_load] rows per expert, now and at the last tick */
    size_t n_load;
    int64_t n_ticks;
};

live_view *live_new(metrics *m, rank_view *ranks) {
    live_view *v = calloc(1, sizeof *v);
    if (!v) return NULL;
    v->m = m;
    v->ranks = ranks;
    v->past = history_new();
    pthread_mutex_init(&v->lock, NULL);
    if (v->past) return v;
    live_free(v);
    return NULL;
}

void live_free(live_view *v) {
    if (!v) return;
    pthread_mutex_destroy(&v->lock);
    history_free(v->past);
    free(v->load);
    free(v->before);
    free(v);
}

double live_tokens_per_s(live_view *v) {
    return v->tokens_per_s;
}

void live_history(live_view *v, api_text *out) {
    history_write(v->past, out);
}

bool live_add(live_view *v, http_call *c) {
    pthread_mutex_lock(&v->lock);
    const bool fits = v->n_viewers < VIEWERS && !v->over;
    if (fits) {
        http_retain(c);
        http_stream_begin(c);
        v->viewers[v->n_viewers++] = c;
    }
    pthread_mutex_unlock(&v->lock);
    return fits;
}

static void drop(live_view *v, size_t i) {
    http_stream_end(v->viewers[i]);
    http_release(v->viewers[i]);
    v->viewers[i] = v->viewers[--v->n_viewers];
}

void live_end(live_view *v) {
    if (!v) return;
    pthread_mutex_lock(&v->lock);
    v->over = true;
    while (v->n_viewers) drop(v, v->n_viewers - 1);
    pthread_mutex_unlock(&v->lock);
}

/* ---- the object ---- */

static json_t *list32(const int32_t *v, size_t n) {
    json_t *list = json_array();
    for (size_t i = 0; i < n; i++) json_array_append_new(list, json_integer(v[i]));
    return list;
}

static json_t *list64(const int64_t *v, size_t n) {
    json_t *list = json_array();
    for (size_t i = 0; i < n; i++) json_array_append_new(list, json_integer(v[i]));
    return list;
}

/* Bytes are those of the slots, and those fetched so far. */
static json_t *experts_elsewhere(const hd_expert_figures *x) {
    const json_int_t slot = (json_int_t)x->slot_bytes;
    return json_pack("{s:s, s:i, s:i, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "source",
                     x->source, "elsewhere", x->elsewhere, "slots", x->slots, "slot_bytes",
                     slot * x->slots, "fetch_bytes", (json_int_t)x->fetched_bytes, "used",
                     (json_int_t)x->used, "staged", (json_int_t)x->staged, "failed",
                     (json_int_t)x->failed, "predicted", (json_int_t)x->predicted, "right",
                     (json_int_t)x->right, "sent", (json_int_t)x->sent);
}

static json_t *stats_object(const hd_engine_stats *e, const char *version) {
    json_t *o =
        json_pack("{s:i, s:i, s:i, s:b, s:b, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:i, s:I, s:I, "
                  "s:I, s:I, s:I, s:I, s:i}",
                  "waiting", e->waiting, "running", e->running, "max_running", e->max_running,
                  "paused", e->paused, "draining", e->draining, "steps", (json_int_t)e->steps,
                  "rows", (json_int_t)e->rows, "finished", (json_int_t)e->finished, "retracted",
                  (json_int_t)e->retracted, "prompt_tokens", (json_int_t)e->prompt_tokens,
                  "cached_tokens", (json_int_t)e->cached_tokens, "output_tokens",
                  (json_int_t)e->output_tokens, "page_tokens", e->page_tokens, "step_ns",
                  (json_int_t)e->step_ns, "host_ns", (json_int_t)e->host_ns, "last_step_ns",
                  (json_int_t)e->last_step_ns, "weight_bytes", (json_int_t)e->weight_bytes,
                  "kv_bytes", (json_int_t)e->kv_bytes, "activation_bytes",
                  (json_int_t)e->activation_bytes, "max_context", e->max_context);
    json_object_set_new(o, "weight_version", json_string(version));
    json_object_set_new(o, "drafted_at", list64(e->drafted_at, HD_MAX_DRAFTS));
    json_object_set_new(o, "accepted_at", list64(e->accepted_at, HD_MAX_DRAFTS));
    json_object_set_new(o, "pages", list32(e->pages, HD_N_KV_GROUPS));
    json_object_set_new(o, "pages_free", list32(e->pages_free, HD_N_KV_GROUPS));
    json_object_set_new(o, "pages_cached", list32(e->pages_cached, HD_N_KV_GROUPS));
    json_object_set_new(o, "host_pages", list32(e->host_pages, HD_N_KV_GROUPS));
    json_object_set_new(o, "host_free", list32(e->host_free, HD_N_KV_GROUPS));
    if (e->experts.elsewhere) {
        json_object_set_new(o, "experts_elsewhere", experts_elsewhere(&e->experts));
    }
    return o;
}

json_t *live_request(const hd_request_status *r) {
    static const char *const phases[] = {"waiting", "prefill", "decode"};
    return json_pack("{s:I, s:i, s:s, s:i, s:i, s:i, s:i}", "id", (json_int_t)r->id, "answer",
                     r->choice, "phase", phases[r->phase], "prompt_tokens", r->prompt_tokens,
                     "cached_tokens", r->cached_tokens, "done_tokens", r->done_tokens,
                     "output_tokens", r->output_tokens);
}

static json_t *requests_list(hd_engine *e) {
    hd_request_status *r = calloc(REQUESTS, sizeof *r);
    const size_t n = r ? hd_engine_read_requests(e, r, REQUESTS) : 0;
    json_t *list = json_array();
    for (size_t i = 0; i < n; i++) json_array_append_new(list, live_request(&r[i]));
    free(r);
    return list;
}

/* Returns null for an empty histogram. */
/* Of each attention group; NULL if there is one. */
static json_t *groups_list(hd_engine *e) {
    hd_engine_stats g;
    const int32_t n = hd_engine_read_group(e, -1, &g);
    json_t *list = n > 1 ? json_array() : NULL;
    for (int32_t i = 0; list && i < n; i++) {
        hd_engine_read_group(e, i, &g);
        json_array_append_new(list,
                              json_pack("{s:i, s:i, s:i, s:i, s:i, s:I, s:I}", "running",
                                        g.running, "max_running", g.max_running, "waiting",
                                        g.waiting, "pages", g.pages[HD_KV_FULL], "pages_free",
                                        g.pages_free[HD_KV_FULL], "steps", (json_int_t)g.steps,
                                        "output_tokens", (json_int_t)g.output_tokens));
    }
    return list;
}

static json_t *quantiles(metrics_spread s) {
    return s.n ? json_pack("{s:f, s:f}", "p50", s.p50_ms, "p95", s.p95_ms) : json_object();
}

/* Rows per expert since the last tick, layer by layer; NULL without experts. */
static json_t *experts_object(live_view *v, hd_engine *e) {
    int32_t n_experts = 0;
    const size_t n = hd_engine_read_experts(e, NULL, 0, &n_experts);
    if (n == 0 || n_experts == 0) return NULL;
    if (!v->load) {
        v->load = calloc(n, sizeof *v->load);
        v->before = calloc(n, sizeof *v->before);
        v->n_load = n;
    }
    if (!v->load || !v->before || v->n_load != n) return NULL;
    hd_engine_read_experts(e, v->load, n, &n_experts);
    json_t *layers = json_array();
    for (size_t at = 0; at + (size_t)n_experts <= n; at += (size_t)n_experts) {
        json_t *layer = json_array();
        for (size_t i = at; i < at + (size_t)n_experts; i++) {
            json_array_append_new(layer, json_integer(v->load[i] - v->before[i]));
            v->before[i] = v->load[i];
        }
        json_array_append_new(layers, layer);
    }
    return json_pack("{s:i, s:o}", "n_experts", n_experts, "layers", layers);
}

static void update_rates(live_view *v, const hd_engine_stats *e, int64_t now) {
    if (v->last_ns) {
        const double s = (double)(now - v->last_ns) * 1e-9;
        v->tokens_per_s = (double)(e->output_tokens - v->last_output) / s;
        v->prompt_tokens_per_s = (double)(e->prompt_tokens - v->last_prompt) / s;
    }
    v->last_ns = now;
    v->last_output = e->output_tokens;
    v->last_prompt = e->prompt_tokens;
}

static char *object_text(live_view *v, hd_engine *e, const hd_engine_stats *stats,
                         const history_sample *now) {
    json_t *o = json_pack("{s:I, s:o, s:{s:f, s:f}, s:o, s:o, s:o}", "t", (json_int_t)now->t_ms,
                          "stats", stats_object(stats, hd_engine_weight_version(e)), "rates",
                          "tokens_s", now->tokens_s, "prompt_tokens_s", now->prompt_tokens_s,
                          "ttft_ms", quantiles(now->ttft), "itl_ms", quantiles(now->itl),
                          "requests", requests_list(e));
    json_t *experts = v->n_ticks % TICKS_PER_EXPERTS == 0 ? experts_object(v, e) : NULL;
    if (experts) json_object_set_new(o, "experts", experts);
    json_t *groups = groups_list(e);
    if (groups) json_object_set_new(o, "groups", groups);
    json_t *ranks = rank_view_json(v->ranks, e);
    if (ranks) json_object_set_new(o, "ranks", ranks);
    char *text = hd_json_write(o, JSON_COMPACT);
    json_decref(o);
    return text;
}

/* Removes viewers that were cut off or have left. */
static void send_to_all(live_view *v, const char *text) {
    const size_t n = strlen(text);
    char *event = malloc(n + 8);
    if (!event) return;
    memcpy(event, "data: ", 6);
    memcpy(event + 6, text, n);
    memcpy(event + 6 + n, "\n\n", 2);
    pthread_mutex_lock(&v->lock);
    for (size_t i = v->n_viewers; i-- > 0;) {
        if (!http_stream_write(v->viewers[i], event, n + 8)) drop(v, i);
    }
    pthread_mutex_unlock(&v->lock);
    free(event);
}

void live_tick(live_view *v, hd_engine *e) {
    const int64_t now = hd_now_ns();
    hd_engine_stats stats;
    hd_engine_read_stats(e, &stats);
    update_rates(v, &stats, now);
    const history_sample sample = {.t_ms = now / 1000000,
                                   .tokens_s = v->tokens_per_s,
                                   .prompt_tokens_s = v->prompt_tokens_per_s,
                                   .ttft = metrics_recent(v->m, METRICS_TTFT),
                                   .itl = metrics_recent(v->m, METRICS_ITL),
                                   .prompt_tokens = stats.prompt_tokens,
                                   .cached_tokens = stats.cached_tokens,
                                   .running = stats.running,
                                   .waiting = stats.waiting};
    history_add(v->past, &sample);
    pthread_mutex_lock(&v->lock);
    const bool watched = v->n_viewers > 0;
    pthread_mutex_unlock(&v->lock);
    if (watched) {
        char *text = object_text(v, e, &stats, &sample);
        if (text) send_to_all(v, text);
        free(text);
    }
    v->n_ticks++;
}
