/* rank_view.c - figures of each rank for /server_info, /metrics and the page. */
#include "server/rank_view.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/progress.h"
#include "base/status.h"

enum { MAX_RANKS = 64 };

static const char *const kinds[HD_N_COMM_OPS] = {"all_reduce", "reduce_scatter", "all_gather",
                                                 "broadcast",  "dispatch",       "combine"};
static const char *const states[] = {"active", "standby", "lost"};

typedef struct moment {
    int64_t ns;
    hd_rank_status ranks[MAX_RANKS];
} moment;

struct rank_view {
    pthread_mutex_t lock; /* of marks */
    moment marks[2];      /* the last one but one, the last one */
};

/* What is shown: now, and of each rank the shares of the recent time. */
typedef struct figures {
    moment now;
    int32_t n, active;
    uint32_t epoch;
    double
        imbalance; /* the most computing time of a rank over the mean; 0: nothing was computed */
    struct {
        double compute, exchange, wait;
    } recent[MAX_RANKS];
} figures;

rank_view *rank_view_new(void) {
    rank_view *v = calloc(1, sizeof *v);
    if (!v) return NULL;
    pthread_mutex_init(&v->lock, NULL);
    v->marks[0].ns = v->marks[1].ns = hd_now_ns();
    return v;
}

void rank_view_free(rank_view *v) {
    if (!v) return;
    pthread_mutex_destroy(&v->lock);
    free(v);
}

void rank_view_mark(rank_view *v, hd_engine *e) {
    moment now = {.ns = hd_now_ns()};
    hd_engine_read_ranks(e, now.ranks, MAX_RANKS);
    pthread_mutex_lock(&v->lock);
    v->marks[0] = v->marks[1];
    v->marks[1] = now;
    pthread_mutex_unlock(&v->lock);
}

/* ---- figures ---- */

typedef struct times {
    int64_t compute, exchange, wait;
} times;

/* Waiting for a command is no waiting for ranks that are behind. */
static times times_of(const hd_rank_figures *f) {
    times t = {.compute = f->compute_ns};
    for (int k = 0; k < HD_N_COMM_OPS; k++) {
        if (k == HD_COMM_OP_BROADCAST) continue;
        t.wait += f->of[k].wait_ns;
        t.exchange += f->of[k].ns - f->of[k].wait_ns;
    }
    return t;
}

/* Since before; since its start if the rank has been started again. */
static times times_since(const hd_rank_figures *before, const hd_rank_figures *now) {
    times t = times_of(now);
    const times b = times_of(before);
    if (now->passes < before->passes) return t;
    return (times){t.compute - b.compute, t.exchange - b.exchange, t.wait - b.wait};
}

static void compare(figures *f, const moment *before) {
    const double ns = (double)(f->now.ns - before->ns);
    double most = 0, sum = 0;
    for (int32_t i = 0; i < f->n; i++) {
        const times t = times_since(&before->ranks[i].figures, &f->now.ranks[i].figures);
        f->recent[i].compute = (double)t.compute / ns;
        f->recent[i].exchange = (double)t.exchange / ns;
        f->recent[i].wait = (double)t.wait / ns;
        if (f->now.ranks[i].state != HD_RANK_ACTIVE) continue;
        if (most < f->recent[i].compute) most = f->recent[i].compute;
        sum += f->recent[i].compute;
        f->active++;
    }
    if (sum > 0) f->imbalance = most * f->active / sum;
}

/* Ranks of one process begin anew after each failure, those of several in each epoch. */
static uint32_t epoch_of(hd_engine *e) {
    hd_world_figures w;
    hd_engine_stats stats;
    if (hd_engine_read_world(e, &w)) return w.epoch;
    hd_engine_read_stats(e, &stats);
    return 1 + (uint32_t)stats.rank_failures;
}

/* Returns how many ranks there are. */
static int32_t read_figures(figures *f, rank_view *v, hd_engine *e) {
    memset(f, 0, sizeof *f);
    f->now.ns = hd_now_ns();
    f->n = hd_engine_read_ranks(e, f->now.ranks, MAX_RANKS);
    if (f->n == 0) return 0;
    f->epoch = epoch_of(e);
    pthread_mutex_lock(&v->lock);
    compare(f, &v->marks[0]);
    pthread_mutex_unlock(&v->lock);
    return f->n;
}

static double seconds(int64_t ns) {
    return (double)ns * 1e-9;
}

/* ---- JSON ---- */

static json_t *exchanges_of(const hd_rank_figures *f) {
    json_t *o = json_object();
    for (int k = 0; k < HD_N_COMM_OPS; k++) {
        const hd_comm_op_figures *x = &f->of[k];
        if (x->calls == 0) continue;
        json_object_set_new(o, kinds[k],
                            json_pack("{s:I, s:I, s:f, s:f}", "calls", (json_int_t)x->calls,
                                      "bytes", (json_int_t)x->bytes, "seconds", seconds(x->ns),
                                      "wait_seconds", seconds(x->wait_ns)));
    }
    return o;
}

static json_t *rank_of(const figures *f, int32_t i) {
    const hd_rank_status *r = &f->now.ranks[i];
    json_t *o = json_pack("{s:i, s:s, s:I, s:f, s:{s:f, s:f, s:f}, s:o}", "rank", i, "state",
                          states[r->state], "passes", (json_int_t)r->figures.passes,
                          "compute_seconds", seconds(r->figures.compute_ns), "recent",
                          "compute", f->recent[i].compute, "exchange", f->recent[i].exchange,
                          "wait", f->recent[i].wait, "exchanges", exchanges_of(&r->figures));
    if (r->state == HD_RANK_ACTIVE) json_object_set_new(o, "group", json_integer(r->group));
    return o;
}

json_t *rank_view_json(rank_view *v, hd_engine *e) {
    figures f;
    if (read_figures(&f, v, e) == 0) return NULL;
    json_t *list = json_array();
    for (int32_t i = 0; i < f.n; i++) json_array_append_new(list, rank_of(&f, i));
    json_t *o =
        json_pack("{s:i, s:i, s:o}", "epoch", (int)f.epoch, "active", f.active, "ranks", list);
    if (f.imbalance > 0) json_object_set_new(o, "imbalance", json_real(f.imbalance));
    return o;
}

/* ---- Prometheus ---- */

static void put_head(FILE *out, const char *name, const char *type, const char *help) {
    fprintf(out, "# HELP hadal_%s %s\n# TYPE hadal_%s %s\n", name, help, name, type);
}

static void put_one(FILE *out, const char *label, const char *name, const char *help,
                    double value) {
    put_head(out, name, "gauge", help);
    fprintf(out, "hadal_%s{%s} %.17g\n", name, label, value);
}

typedef double of_rank(const hd_rank_status *r);

static double active(const hd_rank_status *r) {
    return r->state == HD_RANK_ACTIVE;
}
static double passes(const hd_rank_status *r) {
    return (double)r->figures.passes;
}
static double compute_seconds(const hd_rank_status *r) {
    return seconds(r->figures.compute_ns);
}

static void put_ranks(FILE *out, const char *label, const figures *f) {
    static const struct {
        const char *name, *type, *help;
        of_rank *value;
    } series[] = {
        {"rank_active",                "gauge",   "1: the rank has a part in the layout", active},
        {"rank_passes_total",          "counter", "forward passes of the rank",           passes},
        {"rank_compute_seconds_total", "counter", "time in them without exchanges",
         compute_seconds                                                                        },
    };
    for (size_t k = 0; k < HD_LEN(series); k++) {
        put_head(out, series[k].name, series[k].type, series[k].help);
        for (int32_t i = 0; i < f->n; i++) {
            fprintf(out, "hadal_%s{%s,rank=\"%d\"} %.17g\n", series[k].name, label, i,
                    series[k].value(&f->now.ranks[i]));
        }
    }
}

static void put_exchanges(FILE *out, const char *label, const figures *f) {
    static const struct {
        const char *name, *help;
        size_t at; /* of an int64_t in hd_comm_op_figures */
        double unit;
    } series[] = {
        {"rank_exchanges_total",             "exchanges with other ranks, by kind",
         offsetof(hd_comm_op_figures,                                                                                calls),   1   },
        {"rank_exchange_bytes_total",        "bytes that came from other ranks",
         offsetof(hd_comm_op_figures,                                                                                bytes),   1   },
        {"rank_exchange_seconds_total",      "time in exchanges",                       offsetof(hd_comm_op_figures, ns),
         1e-9                                                                                                                      },
        {"rank_exchange_wait_seconds_total", "of it, until other ranks had got so far",
         offsetof(hd_comm_op_figures,                                                                                wait_ns), 1e-9},
    };
    for (size_t s = 0; s < HD_LEN(series); s++) {
        put_head(out, series[s].name, "counter", series[s].help);
        for (int32_t i = 0; i < f->n; i++) {
            for (int k = 0; k < HD_N_COMM_OPS; k++) {
                const char *x = (const char *)&f->now.ranks[i].figures.of[k];
                int64_t value;
                memcpy(&value, x + series[s].at, sizeof value);
                fprintf(out, "hadal_%s{%s,rank=\"%d\",kind=\"%s\"} %.17g\n", series[s].name,
                        label, i, kinds[k], (double)value * series[s].unit);
            }
        }
    }
}

void rank_view_put_metrics(FILE *out, const char *label, rank_view *v, hd_engine *e) {
    figures f;
    if (read_figures(&f, v, e) == 0) return;
    put_one(out, label, "rank_epoch", "how often ranks have begun to work together", f.epoch);
    put_one(out, label, "rank_imbalance",
            "most computing time of a rank over the mean, in the last seconds", f.imbalance);
    put_ranks(out, label, &f);
    put_exchanges(out, label, &f);
}
