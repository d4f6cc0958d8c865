/* kv.c - KV pages in /metrics: by pool and state, and by where they lie. */
#include "server/metrics/metrics_internal.h"

static const char *const pools[HD_N_KV_GROUPS] = {"entries", "window"};

static void put_pools(FILE *out, const metrics_view *v) {
    metrics_put_head(out, "hadal_", "kv_pages", "gauge", "pages by pool and state");
    for (int p = 0; p < HD_N_KV_GROUPS; p++) {
        const char *label = v->m->label, *pool = pools[p];
        fprintf(out, "hadal_kv_pages{%s,pool=\"%s\",state=\"free\"} %d\n", label, pool,
                v->e.pages_free[p]);
        fprintf(out, "hadal_kv_pages{%s,pool=\"%s\",state=\"cached\"} %d\n", label, pool,
                v->e.pages_cached[p]);
        fprintf(out, "hadal_kv_pages{%s,pool=\"%s\",state=\"used\"} %lld\n", label, pool,
                (long long)metrics_used_pages(v, p));
    }
}

typedef struct tier { /* where pages lie */
    const char *name;
    int64_t pages[HD_N_KV_GROUPS]; /* that hold KV */
    int64_t tokens;                /* of prompts, whose entries were found there */
} tier;

/* of_page: what a page counts; NULL: 1. */
static void put_tier(FILE *out, const metrics_view *v, const char *at, const char *name,
                     const int64_t pages[HD_N_KV_GROUPS],
                     const size_t of_page[HD_N_KV_GROUPS]) {
    for (int p = 0; p < HD_N_KV_GROUPS; p++) {
        fprintf(out, "hadal_%s{%s,tier=\"%s\",pool=\"%s\"} %lld\n", name, v->m->label, at,
                pools[p], (long long)pages[p] * (long long)(of_page ? of_page[p] : 1));
    }
}

static void put_copies(FILE *out, const metrics_view *v, const char *name, const char *help,
                       const int64_t host[HD_N_KV_GROUPS], const int64_t disk[HD_N_KV_GROUPS]) {
    metrics_put_head(out, "hadal_", name, "counter", help);
    put_tier(out, v, "host", name, host, NULL);
    put_tier(out, v, "disk", name, disk, NULL);
}

static void put_figure(FILE *out, const metrics_view *v, const char *name, const char *type,
                       const char *help, double value) {
    metrics_put_head(out, "hadal_", name, type, help);
    fprintf(out, "hadal_%s{%s} %.17g\n", name, v->m->label, value);
}

static void put_failures(FILE *out, const metrics_view *v) {
    const hd_kv_disk_figures *d = &v->e.kv_disk;
    const struct {
        const char *why;
        int64_t n;
    } rows[] = {
        {"write", d->write_failed},
        {"read",  d->read_failed },
        {"late",  d->late        }
    };
    metrics_put_head(
        out, "hadal_", "kv_disk_failures_total", "counter",
        "transfers that failed, and reads of prefixes that took longer than computing them");
    for (size_t i = 0; i < HD_LEN(rows); i++) {
        fprintf(out, "hadal_kv_disk_failures_total{%s,reason=\"%s\"} %lld\n", v->m->label,
                rows[i].why, (long long)rows[i].n);
    }
}

static void put_disk(FILE *out, const metrics_view *v) {
    const hd_kv_disk_figures *d = &v->e.kv_disk;
    put_failures(out, v);
    put_figure(out, v, "kv_disk_declined_total", "counter",
               "prefixes that were not read because computing was predicted to be sooner",
               (double)d->declined);
    put_figure(out, v, "kv_disk_read_bytes_total", "counter", "bytes of prefixes read",
               (double)d->read_bytes);
    put_figure(out, v, "kv_disk_read_seconds_total", "counter",
               "from asking for these prefixes until they were in host memory",
               (double)d->read_ns / 1e9);
    put_figure(out, v, "kv_disk_limit_bytes", "gauge", "bytes that the files may have",
               (double)d->bytes);
}

static void put_tiers(FILE *out, const metrics_view *v) {
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
    metrics_put_head(out, "hadal_", "kv_tier_pages", "gauge",
                     "pages that hold KV, by tier and pool");
    for (size_t i = 0; i < HD_LEN(tiers); i++) {
        put_tier(out, v, tiers[i].name, "kv_tier_pages", tiers[i].pages, NULL);
    }
    metrics_put_head(out, "hadal_", "kv_tier_bytes", "gauge",
                     "bytes of them in all layers of a rank");
    for (size_t i = 0; i < HD_LEN(tiers); i++) {
        put_tier(out, v, tiers[i].name, "kv_tier_bytes", tiers[i].pages, e->page_bytes);
    }
    put_copies(out, v, "kv_tier_saved_pages_total", "pages copied there from the tier above",
               e->host_saved, d->written);
    put_copies(out, v, "kv_tier_loaded_pages_total",
               "pages copied from there to the tier above", e->host_loaded, d->read);
    metrics_put_head(out, "hadal_", "kv_tier_cached_tokens_total", "counter",
                     "prompt tokens found in the prefix cache, by where their entries lay");
    for (size_t i = 0; i < HD_LEN(tiers); i++) {
        fprintf(out, "hadal_kv_tier_cached_tokens_total{%s,tier=\"%s\"} %lld\n", v->m->label,
                tiers[i].name, (long long)tiers[i].tokens);
    }
    metrics_put_head(out, "hadal_", "kv_tier_hit_rate", "gauge",
                     "their share of all prompt tokens so far");
    for (size_t i = 0; i < HD_LEN(tiers); i++) {
        const double share =
            e->prompt_tokens ? (double)tiers[i].tokens / (double)e->prompt_tokens : 0;
        fprintf(out, "hadal_kv_tier_hit_rate{%s,tier=\"%s\"} %.17g\n", v->m->label,
                tiers[i].name, share);
    }
    put_disk(out, v);
}

static void put_rebuilds(FILE *out, const metrics_view *v) {
    put_figure(out, v, "kv_rebuilt_windows_total", "counter",
               "windows of prefixes that were in no tier and were computed again",
               (double)v->e.rebuilt_windows);
    put_figure(out, v, "kv_rebuilt_rows_total", "counter", "positions computed for them",
               (double)v->e.rebuilt_rows);
}

void metrics_put_kv(FILE *out, const metrics_view *v) {
    put_pools(out, v);
    put_tiers(out, v);
    put_rebuilds(out, v);
}
