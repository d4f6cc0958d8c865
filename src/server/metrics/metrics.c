/* metrics.c - counts what happens to requests, and renders /metrics: each file of this folder writes
 * its part, under our names and under those of vLLM and SGLang for existing dashboards.
 * docs/metrics.md lists them. */
#include "server/metrics/metrics.h"

#include <dirent.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "server/metrics/metrics_internal.h"
#include "server/server.h"

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
    if (o->finish) count_name(m, m->finishes, METRICS_FINISHES, o->finish);
    if (o->admitted_ns) histogram_add(&m->queue, o->admitted_ns - o->start_ns, 1);
    if (o->end_ns) histogram_add(&m->e2e, o->end_ns - o->start_ns, 1);
    add_phases(m, o);
    histogram_add(&m->prompt, o->prompt_tokens, 1);
    histogram_add(&m->generation, o->output_tokens, 1);
}

void metrics_unknown_field(metrics *m, const char *endpoint) {
    count_name(m, m->unknown, METRICS_ENDPOINTS, endpoint);
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

static void read_experts(metrics_view *v, hd_engine *e) {
    const size_t n = hd_engine_read_experts(e, NULL, 0, &v->n_experts);
    v->load = n ? calloc(n, sizeof *v->load) : NULL;
    v->n_load = v->load ? hd_engine_read_experts(e, v->load, n, NULL) : 0;
}

/* ---- text ---- */

static const metrics_dialect dialects[] = {
    {.prefix = "hadal_",          .labels = ""},
    { .prefix = "sglang:",
     .labels = ",engine_type=\"unified\",tp_rank=\"0\",pp_rank=\"0\",moe_ep_rank=\"0\"",
     .bit = SERVER_COMPAT_SGLANG,
     .at = 1},
    {                                   .prefix = "vllm:",   .labels = ",engine=\"0\"",       .bit = SERVER_COMPAT_VLLM, .at = 2},
};

void metrics_put_head(FILE *out, const char *prefix, const char *name, const char *type,
                      const char *help) {
    fprintf(out, "# HELP %s%s %s\n# TYPE %s%s %s\n", prefix, name, help, prefix, name, type);
}

static void put_names(FILE *out, metrics_view *v, const metrics_dialect *d) {
    pthread_mutex_lock(&v->m->lock);
    if (d->bit != SERVER_COMPAT_SGLANG) {
        metrics_put_head(out, d->prefix, "request_success_total", "counter",
                         "requests by how they ended");
        for (int i = 0; i < METRICS_FINISHES && v->m->finishes[i].name; i++) {
            fprintf(out, "%srequest_success_total{%s%s,finished_reason=\"%s\"} %lld\n",
                    d->prefix, v->m->label, d->labels, v->m->finishes[i].name,
                    (long long)v->m->finishes[i].n);
        }
    }
    if (!d->bit) {
        metrics_put_head(out, d->prefix, "unknown_fields_total", "counter",
                         "fields of requests that this server does not know");
        for (int i = 0; i < METRICS_ENDPOINTS && v->m->unknown[i].name; i++) {
            fprintf(out, "hadal_unknown_fields_total{%s,endpoint=\"%s\"} %lld\n", v->m->label,
                    v->m->unknown[i].name, (long long)v->m->unknown[i].n);
        }
    }
    pthread_mutex_unlock(&v->m->lock);
}

static void put_statuses(FILE *out, const metrics_view *v) {
    static const char *const names[] = {"gone", "1xx", "2xx", "3xx", "4xx", "5xx"};
    metrics_put_head(out, "hadal_", "http_requests_total", "counter", "requests by status");
    for (int i = 0; i < 6; i++) {
        fprintf(out, "hadal_http_requests_total{%s,status=\"%s\"} %lld\n", v->m->label,
                names[i], (long long)v->h.requests[i]);
    }
}

static void put_all(FILE *out, metrics_view *v) {
    for (size_t k = 0; k < HD_LEN(dialects); k++) {
        const metrics_dialect *d = &dialects[k];
        if (d->bit && !(v->from->compat & d->bit)) continue;
        metrics_put_series(out, v, d);
        metrics_put_histograms(out, v, d);
        metrics_put_places(out, v, d);
        put_names(out, v, d);
    }
    metrics_put_kv(out, v);
    metrics_put_engine(out, v);
    if (v->from->pd) pd_put_metrics(out, v->m->label, v->from->pd);
    if (v->from->engine) {
        rank_view_put_metrics(out, v->m->label, v->from->ranks, v->from->engine);
    }
    put_statuses(out, v);
    metrics_put_process(out, v);
}

char *metrics_render(metrics *m, const metrics_sources *from) {
    char *text = NULL;
    size_t n;
    metrics_view v = {.m = m, .from = from};
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
