/* info.c - endpoints that describe the server: health, version, model info, server info,
 * metrics. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/progress.h"
#include "server/loads_internal.h"
#include "server/server_internal.h"

enum { HEALTH_TIMEOUT_S = 20 };
static const int64_t SECOND_NS = 1000000000;

/* ---- replies ---- */

void server_reply_json(http_call *c, int status, json_t *object) {
    char *text = object ? hd_json_write(object, JSON_COMPACT) : NULL;
    if (text) {
        http_reply(c, status, "application/json", text, strlen(text));
    } else {
        http_error(c, 500, "server_error", NULL, NULL,
                   "the response cannot be written as JSON");
    }
    free(text);
    json_decref(object);
}

void server_reply_text(http_call *c, int status, const char *text) {
    http_reply(c, status, "text/plain; charset=utf-8", text, strlen(text));
}

/* ---- health ---- */

/* Returns NULL if the server is healthy, else why: starting, draining, ranks lost, stalled; or which
 * process was lost, w->lost. */
static const char *trouble_of(server *s, hd_world_figures *w) {
    hd_engine_stats stats;
    *w = (hd_world_figures){0};
    if (atomic_load(&s->draining)) return "draining";
    if (!atomic_load(&s->ready)) return "starting";
    if (hd_engine_read_world(s->engine, w) && !w->serves) return w->lost;
    hd_engine_read_stats(s->engine, &stats);
    if (stats.ranks_lost) return "ranks lost";
    if (stats.hindrance && strcmp(stats.hindrance, "weights_incomplete") == 0) {
        return "weights incomplete";
    }
    const int64_t idle = hd_now_ns() - atomic_load(&s->progress_ns);
    return idle > s->options.stall_s * SECOND_NS ? "stalled" : NULL;
}

/* A pause is no trouble, but one that nobody ends shall be seen. */
static void on_health(http_call *c, void *user) {
    server *s = user;
    hd_engine_stats stats;
    hd_world_figures w;
    char text[HD_MAX_WORLD_TEXT + 16] = "ok";
    const char *trouble = trouble_of(s, &w);
    if (trouble) {
        http_reply_header(c, "Retry-After", "1");
        server_reply_text(c, 503, trouble);
        return;
    }
    hd_engine_read_stats(s->engine, &stats);
    if (stats.paused) {
        const int64_t ns = hd_now_ns() - stats.paused_ns;
        snprintf(text, sizeof text, "ok, paused for %lld s", (long long)(ns / SECOND_NS));
    }
    if (w.lost[0]) snprintf(text, sizeof text, "degraded: %s", w.lost);
    server_reply_text(c, 200, text);
}

static bool check_generated(server *s, waiting_call *w, bool late) {
    const uint64_t request = atomic_load(&w->request);
    const bool done = request && atomic_load(&w->ended) == request;
    const bool failed = request && atomic_load(&w->failed) == request;
    if (!done && !failed && !late) return false;
    if (!done && request) hd_engine_cancel(s->engine, request);
    server_reply_text(w->call, done ? 200 : 503, done ? "ok" : "no token in time");
    return true;
}

/* The place may meanwhile be used by another request or not yet know its request, so only
 * ids are compared. */
static void on_health_event(void *user, const hd_event *event) {
    waiting_call *w = user;
    if (event->step.finish_reason == HD_FINISH_LENGTH ||
        event->step.finish_reason == HD_FINISH_STOP) {
        atomic_store(&w->ended, event->id);
    } else if (event->step.finish_reason != HD_FINISH_NONE) {
        atomic_store(&w->failed, event->id);
    }
}

/* Generates one token with the model and replies when it has come. Not counted in request
 * metrics. */
static void on_health_generate(http_call *c, void *user) {
    server *s = user;
    char why[600];
    hd_world_figures world;
    if (trouble_of(s, &world)) {
        on_health(c, user);
        return;
    }
    waiting_call *w = server_wait_for(s, c, HEALTH_TIMEOUT_S * SECOND_NS, 0, check_generated);
    if (!w) {
        http_error(c, 503, "overloaded_error", "too_many_checks", NULL,
                   "too many health checks wait already");
        return;
    }
    const hd_request g = {.size = sizeof g,
                          .text = "1",
                          .max_tokens = 1,
                          .ignore_eos = true,
                          .priority = 1,
                          .on_event = on_health_event,
                          .user = w};
    const uint64_t id = hd_engine_submit(s->engine, &g, NULL, why, sizeof why);
    atomic_store(&w->request, id);
    if (!id) atomic_store(&w->until_ns, 0); /* the ticker replies at once */
    server_submitted(s);
}

/* ---- version, model, load ---- */

static void on_version(http_call *c, void *user) {
    (void)user;
    server_reply_json(c, 200,
                      json_pack("{s:s, s:s}", "version", HD_VERSION, "engine", "hadal"));
}

static void on_model_info(http_call *c, void *user) {
    server *s = user;
    char dir[4096];
    hd_engine_stats e;
    weight_updates_read_path(s->weights, dir, sizeof dir);
    hd_engine_read_stats(s->engine, &e);
    server_reply_json(
        c, 200,
        json_pack("{s:s, s:s, s:s, s:b, s:n, s:s, s:b, s:b, s:s, s:i}", "model_path", dir,
                  "tokenizer_path", s->options.engine.model_dir, "served_model_name",
                  s->options.model_name, "is_generation", true, "preferred_sampling_params",
                  "weight_version", hd_engine_weight_version(s->engine),
                  "has_image_understanding", false, "has_audio_understanding", false,
                  "model_type", hd_family_name(hd_engine_spec(s->engine)->family),
                  "max_context", e.max_context));
}

/* Servers that compute prompts for this one, and those that it computes them for. */
static json_t *describe_peers(pd *p) {
    json_t *all = json_array();
    pd_peer_status q;
    for (int32_t i = 0; pd_read_peer(p, i, &q); i++) {
        if (!q.name[0]) continue;
        json_array_append_new(all, json_pack("{s:s, s:s, s:b, s:s}", "name", q.name, "side",
                                             q.fetches ? "fetches here" : "prefills", "up",
                                             q.up, "why", q.why));
    }
    return all;
}

/* The layout that was chosen for --tp, --dp and --ep, or why --layout chose these. */
static json_t *describe_ranks(const hd_engine *e) {
    const hd_parallel_config *l = hd_engine_parallel(e);
    const char *reason = hd_engine_layout_reason(e);
    int32_t from;
    json_t *o = json_pack("{s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:b, s:s*}", "ranks",
                          hd_parallel_world(l), "dp", l->dp, "heads", hd_parallel_head_parts(l),
                          "ep", l->ep, "etp", l->etp, "dense_tp", l->dense_tp, "head_tp",
                          l->head_tp, "sum_in_ranks", l->sum_in_ranks, "reason", reason);
    if (l->fp8_rows) json_object_set_new(o, "dispatch_dtype", json_string("fp8"));
    if (l->cp > 1) json_object_set_new(o, "cp", json_integer(l->cp));
    const int32_t cp_from = hd_engine_cp_from(e);
    if (cp_from) json_object_set_new(o, "cp_from", json_integer(cp_from));
    if (l->dwdp > 1) json_object_set_new(o, "dwdp", json_integer(l->dwdp));
    const int32_t micro = hd_engine_micro_batches(e, &from);
    if (micro > 1) json_object_set_new(o, "overlap", json_integer(micro));
    if (micro > 1) json_object_set_new(o, "overlap_from", json_integer(from));
    return o;
}

static void on_server_info(http_call *c, void *user) {
    server *s = user;
    hd_engine_stats e;
    hd_engine_read_stats(s->engine, &e);
    const char *settings = s->options.settings_json;
    hd_precision precision = HD_EXACT;
    hd_engine_activations(s->engine, &precision);
    json_t *info = NULL;
    hd_json_parse(&info, settings, strlen(settings), "the settings", &(hd_err){0});
    json_t *more = json_pack(
        "{s:s, s:s, s:s, s:s, s:s?, s:b, s:s, s:s, s:I, s:i, s:i, s:f, s:f, s:s, s:b, s:b, "
        "s:[{s:f, s:f, s:{s:f, s:f, s:f}}]}",
        "version", HD_VERSION, "model_path", s->options.engine.model_dir, "served_model_name",
        s->options.model_name, "precision", hd_precision_names[precision], "cuda_path",
        hd_engine_cuda_path(s->engine), "no_batch_invariance",
        s->options.engine.no_batch_invariance, "mla",
        s->options.engine.mla ? s->options.engine.mla : "absorbed", "kv_cache_dtype",
        hd_engine_kv_cache_dtype(s->engine), "max_total_num_tokens",
        (json_int_t)server_total_tokens(&e), "max_req_input_len", e.max_context,
        "max_running_requests", e.max_running, "startup_time", s->load_seconds, "uptime",
        (double)(hd_now_ns() - s->start_ns) * 1e-9, "sandbox", s->sandbox, "paused", e.paused,
        "draining", e.draining, "internal_states", "avg_spec_accept_length",
        server_accept_length(&e), "last_gen_throughput", live_tokens_per_s(s->live),
        "memory_usage", "weight", (double)e.weight_bytes / 1e9, "kvcache",
        (double)e.kv_bytes / 1e9, "graph", 0.0);
    if (json_object_update(info, more) != 0) { /* no memory for one of the three */
        json_decref(info);
        info = NULL;
    }
    json_decref(more);
    json_object_set_new(info, "parallel", describe_ranks(s->engine));
    json_t *figures = rank_view_json(s->ranks, s->engine);
    if (figures) json_object_set_new(info, "rank_figures", figures);
    if (s->pd) json_object_set_new(info, "peers", describe_peers(s->pd));
    server_reply_json(c, 200, info);
}

/* ---- metrics and the live view ---- */

static void on_metrics(http_call *c, void *user) {
    server *s = user;
    const metrics_sources from = {.engine = s->engine,
                                  .living_requests = records_living(s->records),
                                  .http = s->http,
                                  .pd = atomic_load(&s->ready) ? s->pd : NULL,
                                  .ranks = s->ranks,
                                  .tokens_per_s = live_tokens_per_s(s->live),
                                  .load_seconds = s->load_seconds,
                                  .compat = s->options.metrics_compat,
                                  .update_begun = weight_updates_begun(s->weights)};
    char *text = metrics_render(s->metrics, &from);
    if (text) {
        http_reply(c, 200, "text/plain; version=0.0.4; charset=utf-8", text, strlen(text));
    } else {
        http_error(c, 503, "overloaded_error", "no_memory", NULL, "no memory for the metrics");
    }
    free(text);
}

static void on_live(http_call *c, void *user) {
    server *s = user;
    if (!live_add(s->live, c)) {
        http_error(c, 503, "overloaded_error", "too_many_views", NULL,
                   "too many look at the engine already");
    }
}

static void on_history(http_call *c, void *user) {
    server *s = user;
    api_text text = {0};
    live_history(s->live, &text);
    if (text.failed) {
        http_error(c, 503, "overloaded_error", "no_memory", NULL, "no memory for the history");
    } else {
        http_reply(c, 200, "application/json", text.data, text.n);
    }
    api_text_deinit(&text);
}

const http_route info_routes[] = {
    {"GET", "/health",          HTTP_PUBLIC, HTTP_OPENAI, on_health         },
    {"GET", "/ping",            HTTP_PUBLIC, HTTP_OPENAI, on_health         },
    {"GET", "/health_generate", HTTP_USER,   HTTP_OPENAI, on_health_generate},
    {"GET", "/version",         HTTP_PUBLIC, HTTP_OPENAI, on_version        },
    {"GET", "/model_info",      HTTP_USER,   HTTP_OPENAI, on_model_info     },
    {"GET", "/get_model_info",  HTTP_USER,   HTTP_OPENAI, on_model_info     },
    {"GET", "/server_info",     HTTP_USER,   HTTP_OPENAI, on_server_info    },
    {"GET", "/get_server_info", HTTP_USER,   HTTP_OPENAI, on_server_info    },
    {"GET", "/v1/loads",        HTTP_USER,   HTTP_OPENAI, server_on_loads   },
    {"GET", "/get_load",        HTTP_USER,   HTTP_OPENAI, server_on_old_load},
    {"GET", "/metrics",         HTTP_USER,   HTTP_OPENAI, on_metrics        },
    {"GET", "/engine/live",     HTTP_USER,   HTTP_OPENAI, on_live           },
    {"GET", "/engine/history",  HTTP_USER,   HTTP_OPENAI, on_history        },
    {"GET", "/engine/requests", HTTP_USER,   HTTP_OPENAI, server_on_requests},
};
const size_t info_n_routes = HD_LEN(info_routes);
