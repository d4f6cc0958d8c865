/* loads.c - GET /v1/loads: load of the engine in sections, for routers and load balancers,
 * as JSON or Prometheus text. /get_load is the older name. */
#include "server/loads_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/progress.h"

enum { MOST_REQUESTS = 65536 };

typedef struct figures {
    pd *pd; /* NULL: without a role */
    hd_engine_stats e;
    int64_t pending_tokens; /* prompt tokens that are not computed yet */
    int32_t pending;        /* choices that have not been admitted */
} figures;

double server_accept_length(const hd_engine_stats *e) {
    int64_t accepted = 0;
    for (int32_t i = 0; i < HD_MAX_DRAFTS; i++) accepted += e->accepted_at[i];
    const int64_t verified = e->drafted_at[0];
    return verified ? 1 + (double)accepted / (double)verified : 1;
}

int64_t server_total_tokens(const hd_engine_stats *e) {
    return (int64_t)e->pages[HD_KV_FULL] * e->page_tokens;
}

static int64_t used_tokens(const hd_engine_stats *e) {
    const int32_t used =
        e->pages[HD_KV_FULL] - e->pages_free[HD_KV_FULL] - e->pages_cached[HD_KV_FULL];
    return (int64_t)used * e->page_tokens;
}

static double share(int64_t part, int64_t whole) {
    return whole > 0 ? (double)part / (double)whole : 0;
}

static void read_figures(server *s, figures *f) {
    *f = (figures){.pd = s->pd};
    hd_engine_read_stats(s->engine, &f->e);
    if (!f->e.running && !f->e.waiting) return;
    hd_request_status *r = calloc(MOST_REQUESTS, sizeof *r);
    const size_t n = r ? hd_engine_read_requests(s->engine, r, MOST_REQUESTS) : 0;
    for (size_t i = 0; i < n; i++) {
        if (r[i].phase != HD_PHASE_DECODE) {
            f->pending_tokens += r[i].prompt_tokens - r[i].done_tokens;
        }
        f->pending += r[i].phase == HD_PHASE_WAITING;
    }
    free(r);
}

/* ---- sections ---- */

static void add_core(json_t *load, const figures *f, double tokens_per_s) {
    const hd_engine_stats *e = &f->e;
    const int64_t used = used_tokens(e), total = server_total_tokens(e);
    json_t *core =
        json_pack("{s:I, s:i, s:i, s:I, s:I, s:I, s:f, s:f, s:f, s:f, s:i, s:b}", "timestamp",
                  (json_int_t)time(NULL), "num_running_reqs", e->running, "num_waiting_reqs",
                  e->waiting, "num_used_tokens", (json_int_t)used, "num_total_tokens",
                  (json_int_t)(used + f->pending_tokens), "max_total_num_tokens",
                  (json_int_t)total, "token_usage", share(used, total), "gen_throughput",
                  tokens_per_s, "cache_hit_rate", share(e->cached_tokens, e->prompt_tokens),
                  "utilization", share(e->running, e->max_running), "max_running_requests",
                  e->max_running, "paused", e->paused);
    json_object_update(load, core);
    json_decref(core);
}

static json_t *memory_section(const figures *f) {
    return json_pack("{s:f, s:f, s:f, s:I}", "weight_gb", (double)f->e.weight_bytes / 1e9,
                     "kv_cache_gb", (double)f->e.kv_bytes / 1e9, "graph_gb", 0.0,
                     "token_capacity", (json_int_t)server_total_tokens(&f->e));
}

static json_t *speculative_section(const figures *f) {
    int64_t drafted = 0, accepted = 0;
    for (int32_t i = 0; i < HD_MAX_DRAFTS; i++) {
        drafted += f->e.drafted_at[i];
        accepted += f->e.accepted_at[i];
    }
    return json_pack("{s:f, s:f}", "accept_length", server_accept_length(&f->e), "accept_rate",
                     share(accepted, drafted));
}

static json_t *queues_section(const figures *f) {
    return json_pack("{s:i, s:i, s:i, s:I}", "waiting", f->e.waiting, "grammar", 0, "paused",
                     f->e.paused ? f->e.waiting : 0, "retracted", (json_int_t)f->e.retracted);
}

static json_t *leases_of(const pd_stats *s, int side) {
    json_t *leases = json_object();
    for (int i = HD_LEASE_RESERVED; i <= HD_LEASE_ABORTING; i++) {
        const char *state = hd_lease_state_name((hd_lease_state)i);
        json_object_set_new(leases, state, json_integer(s->open[side][i]));
    }
    return leases;
}

static json_t *links_of(pd *p) {
    json_t *links = json_array();
    pd_peer_status q;
    for (int32_t i = 0; pd_read_peer(p, i, &q); i++) {
        if (!q.name[0]) continue;
        json_array_append_new(links, json_pack("{s:s, s:s, s:b, s:I, s:I}", "peer", q.name,
                                               "side", q.fetches ? "send" : "receive", "up",
                                               q.up, "in", (json_int_t)q.bytes_in, "out",
                                               (json_int_t)q.bytes_out));
    }
    return links;
}

/* What waits and why; of a server with a role also its leases and the bytes of its connections. */
static json_t *disagg_section(const figures *f) {
    json_t *waiting = json_object();
    int32_t n[METRICS_N_WAITS];
    metrics_waiting(&f->e, n);
    for (int i = 0; i < METRICS_N_WAITS; i++) {
        json_object_set_new(waiting, metrics_wait_name((metrics_wait)i), json_integer(n[i]));
    }
    if (!f->pd) return json_pack("{s:o}", "waiting", waiting);
    pd_stats s;
    pd_read_stats(f->pd, &s);
    return json_pack("{s:o, s:{s:o, s:o}, s:o}", "waiting", waiting, "leases", "send",
                     leases_of(&s, 0), "receive", leases_of(&s, 1), "links", links_of(f->pd));
}

typedef struct section {
    const char *word, *name; /* word: in the query. name: in the reply; NULL: not there */
    json_t *(*make)(const figures *f); /* NULL: part of the load object itself */
} section;

static const section sections[] = {
    {"core",   "core",        NULL               },
    {"memory", "memory",      memory_section     },
    {"spec",   "speculative", speculative_section},
    {"queues", "queues",      queues_section     },
    {"lora",   NULL,          NULL               },
    {"disagg", "disagg",      disagg_section     },
};
enum { ALL = (1u << HD_LEN(sections)) - 1 };

/* Converts "core,memory" to bits; 0: unknown word. */
static unsigned wanted(const char *words) {
    unsigned bits = 0;
    for (const char *p = words; p && *p;) {
        const size_t n = strcspn(p, ",");
        unsigned bit = n == 3 && strncmp(p, "all", n) == 0 ? ALL : 0;
        for (size_t i = 0; i < HD_LEN(sections); i++) {
            if (strlen(sections[i].word) == n && strncmp(p, sections[i].word, n) == 0) {
                bit = 1u << i;
            }
        }
        if (!bit) return 0;
        bits |= bit;
        p += n + (p[n] == ',');
    }
    return bits ? bits : ALL;
}

static json_t *load_object(server *s, unsigned bits) {
    figures f;
    json_t *load = json_pack("{s:i}", "dp_rank", 0);
    read_figures(s, &f);
    for (size_t i = 0; i < HD_LEN(sections); i++) {
        const section *k = &sections[i];
        if (!(bits & 1u << i) || !k->name) continue;
        if (k->make) {
            json_object_set_new(load, k->name, k->make(&f));
        } else {
            add_core(load, &f, live_tokens_per_s(s->live));
        }
    }
    return load;
}

/* ---- as Prometheus text ---- */

static void put_gauge(FILE *out, const char *prefix, const char *name, const json_t *v) {
    const double value = json_is_true(v) ? 1 : json_number_value(v);
    fprintf(out, "# TYPE sglang_%s%s gauge\nsglang_%s%s{dp_rank=\"0\"} %.17g\n", prefix, name,
            prefix, name, value);
}

static void reply_text(http_call *c, json_t *load) {
    char *text = NULL;
    size_t n;
    const char *key, *inner;
    json_t *value, *v;
    FILE *out = open_memstream(&text, &n);
    json_object_foreach(load, key, value) {
        char prefix[24] = "";
        snprintf(prefix, sizeof prefix, "%s_", strcmp(key, "speculative") == 0 ? "spec" : key);
        if (out && !json_is_object(value) && strcmp(key, "dp_rank") != 0) {
            put_gauge(out, "", key, value);
        }
        json_object_foreach(value, inner, v) {
            if (out && !json_is_object(v) && !json_is_array(v))
                put_gauge(out, prefix, inner, v);
        }
    }
    if (out && fclose(out) == 0) {
        http_reply(c, 200, "text/plain; version=0.0.4; charset=utf-8", text, n);
    } else {
        http_error(c, 503, "overloaded_error", "no_memory", NULL, "no memory for the response");
    }
    free(text);
    json_decref(load);
}

/* ---- the handlers ---- */

static void refuse(http_call *c, const char *name, const char *must) {
    http_error(c, 400, "invalid_request_error", "bad_value", name, "%s must be %s", name, must);
}

void server_on_loads(http_call *c, void *user) {
    server *s = user;
    const char *rank = http_query(c, "dp_rank"), *format = http_query(c, "format");
    const unsigned bits = wanted(http_query(c, "include"));
    const bool text = format && strcmp(format, "prometheus") == 0;
    const char *accelerator = hd_engine_backend(s->engine, NULL);
    if (rank && strcmp(rank, "0") != 0) {
        refuse(c, "dp_rank", "0: there is one rank");
    } else if (format && !text && strcmp(format, "json") != 0) {
        refuse(c, "format", "json or prometheus");
    } else if (!bits) {
        refuse(c, "include", "a list of core, memory, spec, lora, disagg, queues and all");
    } else if (text) {
        reply_text(c, load_object(s, bits));
    } else {
        const char *place = http_query(c, "prefixes");
        json_t *prefixes = place ? prefix_ring_report(s->prefixes, place) : NULL;
        server_reply_json(c, 200,
                          json_pack("{s:I, s:s, s:s, s:i, s:[o], s:o*}", "timestamp",
                                    (json_int_t)time(NULL), "version", HD_VERSION,
                                    "accelerator", accelerator ? accelerator : "cpu",
                                    "num_accelerators", 1, "loads", load_object(s, bits),
                                    "prefixes", prefixes));
    }
}

void server_on_old_load(http_call *c, void *user) {
    figures f;
    read_figures(user, &f);
    server_reply_json(
        c, 200,
        json_pack("[{s:i, s:i, s:i, s:I, s:I, s:f}]", "dp_rank", 0, "num_reqs",
                  f.e.running + f.pending, "num_waiting_reqs", f.pending, "num_tokens",
                  (json_int_t)(used_tokens(&f.e) + f.pending_tokens), "num_pending_tokens",
                  (json_int_t)f.pending_tokens, "ts_tic", (double)hd_now_ns() * 1e-9));
}
