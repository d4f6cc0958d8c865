/* status.c - what the router says of itself: health, its servers, metrics. */
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "router/router_internal.h"

static int32_t n_up(router *r, router_role role) {
    int32_t n = 0;
    pthread_mutex_lock(&r->lock);
    for (int32_t i = 0; i < r->picture.n; i++) {
        n += r->picture.peers[i].up && r->picture.peers[i].role == role;
    }
    pthread_mutex_unlock(&r->lock);
    return n;
}

static void on_health(http_call *c, void *user) {
    router *r = user;
    const char *text = "ok";
    if (n_up(r, ROUTER_DECODE) + n_up(r, ROUTER_PREFILL) == 0) text = "no server";
    if (atomic_load(&r->draining)) text = "draining";
    const bool ok = strcmp(text, "ok") == 0;
    if (!ok) http_reply_header(c, "Retry-After", "1");
    http_reply(c, ok ? 200 : 503, "text/plain; charset=utf-8", text, strlen(text));
}

const char *router_role_name(router_role role) {
    return role == ROUTER_PREFILL ? "prefill" : "decode";
}

static void reply_json(http_call *c, json_t *object) {
    char *text = object ? hd_json_write(object, JSON_COMPACT) : NULL;
    json_decref(object);
    if (text) {
        http_reply_owned(c, 200, "application/json", text, strlen(text));
    } else {
        http_error(c, 503, "overloaded_error", "no_memory", NULL, "no memory for the response");
    }
}

static void on_servers(http_call *c, void *user) {
    router *r = user;
    json_t *list = json_array();
    pthread_mutex_lock(&r->lock);
    for (int32_t i = 0; i < r->picture.n; i++) {
        const router_peer *s = &r->picture.peers[i];
        if (!s->name[0]) continue;
        json_t *one = json_pack(
            "{s:s, s:s, s:b, s:b, s:i, s:i, s:i, s:I, s:i, s:I, s:I}", "server", s->name,
            "role", router_role_name(s->role), "up", s->up, "gone", s->gone, "running",
            s->load.running, "waiting", s->load.waiting, "max_running", s->load.max_running,
            "pending_tokens", (json_int_t)s->load.pending_tokens, "inflight", s->inflight,
            "requests", (json_int_t)s->requests, "failures", (json_int_t)s->failures);
        json_t *detail = json_deep_copy(r->reports[i].detail); /* written without the lock */
        if (detail) json_object_update(one, detail);
        json_decref(detail);
        json_array_append_new(list, one);
    }
    pthread_mutex_unlock(&r->lock);
    reply_json(c, json_pack("{s:o}", "servers", list));
}

/* ---- metrics ---- */

static void put(hd_bytes *out, const char *name, const char *kind, const char *help,
                int64_t value) {
    char line[400];
    const int n = snprintf(line, sizeof line, "# HELP %s %s\n# TYPE %s %s\n%s %lld\n", name,
                           help, name, kind, name, (long long)value);
    hd_bytes_append(out, line, (size_t)n, NULL);
}

static void put_servers(hd_bytes *out, const router_picture *p, const char *name,
                        const char *kind, const char *help,
                        int64_t (*figure)(const router_peer *s)) {
    char line[700];
    int n = snprintf(line, sizeof line, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, kind);
    hd_bytes_append(out, line, (size_t)n, NULL);
    for (int32_t i = 0; i < p->n; i++) {
        const router_peer *s = &p->peers[i];
        if (!s->name[0]) continue;
        n = snprintf(line, sizeof line, "%s{server=\"%s\",role=\"%s\"} %lld\n", name, s->name,
                     router_role_name(s->role), (long long)figure(s));
        hd_bytes_append(out, line, (size_t)n, NULL);
    }
}

static int64_t up_of(const router_peer *s) {
    return s->up;
}

static int64_t inflight_of(const router_peer *s) {
    return s->inflight;
}

static int64_t requests_of(const router_peer *s) {
    return s->requests;
}

static int64_t failures_of(const router_peer *s) {
    return s->failures;
}

static int64_t pending_of(const router_peer *s) {
    return s->load.pending_tokens;
}

static void on_metrics(http_call *c, void *user) {
    router *r = user;
    hd_bytes out = {.max = 16 << 20};
    put(&out, "hadal_router_retries_total", "counter", "Requests sent to another server",
        atomic_load(&r->retries));
    put(&out, "hadal_router_streams_resumed_total", "counter",
        "Streams that another server went on with", atomic_load(&r->resumed));
    put(&out, "hadal_router_streams_lost_total", "counter",
        "Streams that ended with an error, most because their server was lost",
        atomic_load(&r->lost));
    put(&out, "hadal_router_cancelled_total", "counter", "Requests whose client left first",
        atomic_load(&r->cancelled));
    put(&out, "hadal_router_event_batches_total", "counter", "Writes to streams",
        atomic_load(&r->events));
    put(&out, "hadal_router_living_requests", "gauge", "Requests that have not ended",
        atomic_load(&r->n_living));
    put(&out, "hadal_router_learned_prefixes_total", "counter",
        "Hashes of prompts that servers told", atomic_load(&r->learned));
    put(&out, "hadal_router_forgotten_servers_total", "counter",
        "Times that a server's cache was known to be empty", atomic_load(&r->forgotten));
    pthread_mutex_lock(&r->lock);
    const router_picture *p = &r->picture;
    put(&out, "hadal_router_prompt_tokens_total", "counter", "Prompt tokens sent, estimated",
        p->prompt_tokens);
    put(&out, "hadal_router_cached_tokens_total", "counter",
        "Of them, those that the server probably had cached", p->cached_tokens);
    put_servers(&out, p, "hadal_router_server_up", "gauge", "Whether its last report came",
                up_of);
    put_servers(&out, p, "hadal_router_server_requests", "gauge", "Requests under way",
                inflight_of);
    put_servers(&out, p, "hadal_router_server_pending_tokens", "gauge",
                "Prompt tokens that it has not computed yet", pending_of);
    put_servers(&out, p, "hadal_router_server_requests_total", "counter", "Requests sent",
                requests_of);
    put_servers(&out, p, "hadal_router_server_failures_total", "counter",
                "Requests that ended without a reply", failures_of);
    router_detail_put(&out, r);
    pthread_mutex_unlock(&r->lock);
    http_reply(c, 200, "text/plain; version=0.0.4; charset=utf-8", out.data ? out.data : "",
               out.n);
    hd_bytes_deinit(&out);
}

const http_route router_own_routes[] = {
    {"GET", "/health",         HTTP_PUBLIC, HTTP_OPENAI, on_health },
    {"GET", "/ping",           HTTP_PUBLIC, HTTP_OPENAI, on_health },
    {"GET", "/metrics",        HTTP_USER,   HTTP_OPENAI, on_metrics},
    {"GET", "/router/servers", HTTP_USER,   HTTP_OPENAI, on_servers},
};
const size_t router_own_n_routes = HD_LEN(router_own_routes);
