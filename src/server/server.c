/* server.c - the server's life cycle: bind, change the user, enter the sandbox, load the
 * model, poll the engine, drain. */
#include "server/server.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/log.h"
#include "base/progress.h"
#include "api/background.h"
#include "api/store.h"
#include "engine/kv_disk.h"
#include "server/access_log.h"
#include "server/dump.h"
#include "server/identity.h"
#include "server/page.h"
#include "server/sandbox.h"
#include "server/server_internal.h"

enum { TICK_NS = 50000000, LOOK_NS = 1000000, TICKS_PER_VIEW = 5, STORE_BYTES = 64 << 20 };

static const int64_t SECOND_NS = 1000000000;

/* ---- the polling thread ---- */

void server_submitted(server *s) {
    pthread_mutex_lock(&s->lock);
    s->submitted = true;
    pthread_cond_signal(&s->mail);
    pthread_mutex_unlock(&s->lock);
}

/* hd_engine_poll() returns when the engine is idle; a submission starts it again. */
static void *poll_events(void *user) {
    server *s = user;
    hd_event ignored;
    while (!atomic_load(&s->stopping)) {
        if (hd_engine_poll(s->engine, &ignored, -1)) continue;
        pthread_mutex_lock(&s->lock);
        while (!s->submitted && !atomic_load(&s->stopping)) {
            pthread_cond_wait(&s->mail, &s->lock);
        }
        s->submitted = false;
        pthread_mutex_unlock(&s->lock);
    }
    return NULL;
}

/* ---- the ticker thread ---- */

typedef struct progress {
    int64_t steps, audits_failed, rank_failures, interrupted, plans;
} progress;

static void watch_progress(server *s, progress *seen) {
    hd_engine_stats stats;
    hd_engine_read_stats(s->engine, &stats);
    const bool due = stats.living > stats.fetching && !stats.paused && !stats.hindrance;
    if (!due || stats.steps != seen->steps) atomic_store(&s->progress_ns, hd_now_ns());
    if (stats.audits_failed != seen->audits_failed) {
        HD_LOG(HD_LOG_ERROR, "audit_failed", hd_log_text("why", stats.audit_missed),
               hd_log_text("done", "all pages are free again, no prefix is cached"));
    }
    if (stats.rank_failures != seen->rank_failures) {
        HD_LOG(HD_LOG_ERROR, "rank_failed", hd_log_text("why", stats.rank_failure),
               hd_log_text("done", stats.ranks_lost ? "restarts were of no use"
                                                    : "restarted, its requests run again"));
    }
    if (stats.rebalance.interrupted != seen->interrupted) {
        HD_LOG(HD_LOG_WARN, "rebalance_given_up", hd_log_text("why", stats.rebalance.why),
               hd_log_int("times", stats.rebalance.interrupted));
    }
    if (stats.rebalance.plans != seen->plans) {
        HD_LOG(HD_LOG_INFO, "rebalance", hd_log_int("plans", stats.rebalance.plans),
               hd_log_int("experts_moved", stats.rebalance.moves));
    }
    *seen = (progress){stats.steps, stats.audits_failed, stats.rank_failures,
                       stats.rebalance.interrupted, stats.rebalance.plans};
}

waiting_call *server_wait_for(server *s, http_call *c, int64_t timeout_ns, uint64_t number,
                              bool (*check)(server *s, waiting_call *w, bool late)) {
    waiting_call *place = NULL;
    pthread_mutex_lock(&s->lock);
    for (size_t i = 0; i < SERVER_WAITING_CALLS && !place; i++) {
        if (!s->waiting[i].call) place = &s->waiting[i];
    }
    if (place) {
        http_retain(c);
        place->call = c;
        place->check = check;
        place->until_ns = hd_now_ns() + timeout_ns;
        atomic_store(&place->request, number);
        atomic_store(&place->ended, 0);
        atomic_store(&place->failed, 0);
        s->look_until_ns = hd_now_ns() + SECOND_NS;
        pthread_cond_signal(&s->kept);
    }
    pthread_mutex_unlock(&s->lock);
    return place;
}

/* Replies to waiting calls. Only this thread frees their places. */
static void tend_waiting(server *s) {
    const int64_t now = hd_now_ns();
    for (size_t i = 0; i < SERVER_WAITING_CALLS; i++) {
        waiting_call *w = &s->waiting[i];
        pthread_mutex_lock(&s->lock);
        http_call *c = w->call;
        pthread_mutex_unlock(&s->lock);
        if (!c) continue;
        if (!w->check(s, w, now > w->until_ns || atomic_load(&s->stopping))) continue;
        pthread_mutex_lock(&s->lock);
        w->call = NULL;
        pthread_mutex_unlock(&s->lock);
        http_release(c);
    }
}

/* Sleeps for a tick. Looks at waiting calls every millisecond in the first second after one was
 * kept, because most wait for the end of one step. */
static void sleep_tick(server *s) {
    const int64_t tick_ns = hd_now_ns() + TICK_NS;
    for (int64_t now = hd_now_ns(); now < tick_ns; now = hd_now_ns()) {
        pthread_mutex_lock(&s->lock);
        const bool look = now < s->look_until_ns;
        const int64_t until = look && now + LOOK_NS < tick_ns ? now + LOOK_NS : tick_ns;
        const struct timespec at = {until / SECOND_NS, until % SECOND_NS};
        pthread_cond_timedwait(&s->kept, &s->lock, &at);
        pthread_mutex_unlock(&s->lock);
        if (look) tend_waiting(s);
    }
}

static void *tick(void *user) {
    server *s = user;
    progress seen = {0};
    int64_t marked_ns = hd_now_ns();
    for (int n = 0; !atomic_load(&s->stopping); n++) {
        sleep_tick(s);
        watch_progress(s, &seen);
        tend_waiting(s);
        trace_tick(s->trace, s->engine);
        expert_record_tick(s->expert_record, s->engine);
        if (n % TICKS_PER_VIEW == 0) live_tick(s->live, s->engine);
        if (hd_now_ns() < marked_ns + METRICS_MARK_S * SECOND_NS) continue;
        marked_ns += METRICS_MARK_S * SECOND_NS;
        metrics_mark(s->metrics);
        rank_view_mark(s->ranks, s->engine);
    }
    tend_waiting(s);
    live_end(s->live);
    return NULL;
}

/* ---- observers of the API ---- */

static void on_begin(void *user, http_call *c, uint64_t seed) {
    server *s = user;
    records_begin(s->records, c, seed);
    prefix_ring_add(s->prefixes, http_header(c, PREFIX_RING_HEADER));
}

static void on_submit(void *user, http_call *c, uint64_t id) {
    server *s = user;
    if (!records_submit(s->records, c, id)) hd_engine_cancel(s->engine, id);
    server_submitted(s);
}

static void on_first(void *user, int64_t since_start_ns) {
    server *s = user;
    metrics_first(s->metrics, since_start_ns);
}

static void on_token(void *user, int32_t n_tokens, int64_t since_last_ns) {
    server *s = user;
    metrics_token(s->metrics, n_tokens, since_last_ns);
}

static void on_end(void *user, const api_outcome *outcome) {
    server *s = user;
    metrics_end(s->metrics, outcome);
    trace_request(s->trace, outcome);
    records_end(s->records, outcome);
    http_call *c = http_call_of_id(outcome->request_id);
    http_note_tokens(c, outcome->prompt_tokens, outcome->output_tokens, outcome->first_ns);
    http_spend_tokens(c, (int64_t)outcome->prompt_tokens + outcome->output_tokens);
}

static void on_unknown_field(void *user, const char *endpoint, const char *field) {
    server *s = user;
    (void)field; /* a label from outside would create a new series for every spelling */
    metrics_unknown_field(s->metrics, endpoint);
}

/* ---- opening and closing ---- */

static hd_status open_records(server *s, hd_err *err) {
    int log_fd, crash_fd = -1;
    hd_status st = line_file_open(&log_fd, s->options.request_log, err);
    if (st == HD_OK) {
        st = dump_keep_earlier(s->options.crash_file, s->options.engine.model_dir, err);
    }
    if (st == HD_OK) st = line_file_open(&crash_fd, s->options.crash_file, err);
    if (st != HD_OK) {
        if (log_fd >= 0) close(log_fd);
        return st;
    }
    s->records = records_new(s->options.http.limits.connections, log_fd, crash_fd);
    return s->records ? HD_OK : HD_FAIL(err, HD_ENOMEM, "no memory for records of requests");
}

const http_route *server_route(size_t i) {
    const struct {
        const http_route *routes;
        size_t n;
    } tables[] = {
        {info_routes,    info_n_routes   },
        {admin_routes,   admin_n_routes  },
        {weights_routes, weights_n_routes},
        {kv_routes,      kv_n_routes     },
        {page_routes,    page_n_routes   },
        {api_routes,     api_n_routes    }
    };
    for (size_t t = 0; t < HD_LEN(tables); i -= tables[t++].n) {
        if (i < tables[t].n) return &tables[t].routes[i];
    }
    return NULL;
}

static hd_status mount_all(server *s, hd_err *err) {
    HD_TRY(http_mount(s->http, info_routes, info_n_routes, s, err));
    HD_TRY(http_mount(s->http, admin_routes, admin_n_routes, s, err));
    HD_TRY(http_mount(s->http, weights_routes, weights_n_routes, s, err));
    HD_TRY(http_mount(s->http, kv_routes, kv_n_routes, s, err));
    HD_TRY(http_mount(s->http, page_routes, page_n_routes, NULL, err));
    return http_mount(s->http, api_routes, api_n_routes, &s->api, err);
}

/* Files that are read again later must be readable by the new user. */
static hd_status become_user(const server_options *o, hd_err *err) {
    const char *const files[] = {o->key_sources.file, o->key_sources.admin_file};
    if (!o->user) {
        return o->group ? HD_FAIL(err, HD_EINVAL, "--group needs --user") : HD_OK;
    }
    HD_TRY(identity_become(o->user, o->group, err));
    for (size_t i = 0; i < HD_LEN(files); i++) {
        if (files[i] && access(files[i], R_OK) != 0) {
            return HD_FAIL(err, HD_EINVAL, "--user %s cannot read %s, so SIGHUP could not: %s",
                           o->user, files[i], strerror(errno));
        }
    }
    return HD_OK;
}

/* Checked at the start, so that the first file in it does not fail. */
static hd_status check_dir(const char *flag, const char *dir, hd_err *err) {
    struct stat s;
    if (!dir) return HD_OK;
    int why = stat(dir, &s) == 0 ? 0 : errno;
    if (!why && !S_ISDIR(s.st_mode)) why = ENOTDIR;
    if (!why && access(dir, W_OK | X_OK) != 0) why = errno;
    return why ? HD_FAIL(err, HD_EIO, "--%s %s: %s", flag, dir, strerror(why)) : HD_OK;
}

static bool has_quotas(const http_quota_limits *q) {
    return q->key_calls || q->key_tokens;
}

static hd_status prepare(server *s, hd_err *err) {
    const server_options *o = &s->options;
    HD_TRY(hd_keys_open(&s->keys, &o->key_sources, err));
    HD_TRY(prefix_ring_open(&s->prefixes, err));
    if (has_quotas(&o->http.quotas) && !hd_keys_user_set(s->keys)) {
        return HD_FAIL(err, HD_EINVAL,
                       "--key-requests and --key-tokens-per-minute need keys: give "
                       "--api-key-file");
    }
    s->options.http.keys = s->keys;
    HD_TRY(access_log_open(&s->access_log, s->options.access_log, &s->options.http, err));
    HD_TRY(http_open(&s->http, &s->options.http, err));
    if (!http_is_loopback(s->http) && !hd_keys_user_set(s->keys) && !o->open) {
        return HD_FAIL(err, HD_EINVAL,
                       "%s can be reached by others: give --api-key-file, or say "
                       "--insecure-no-auth",
                       o->http.host);
    }
    HD_TRY(pd_bind(&s->pd_listener, &o->pd, err));
    HD_TRY(open_records(s, err));
    s->metrics = metrics_new(o->model_name);
    s->ranks = rank_view_new();
    s->live = s->metrics && s->ranks ? live_new(s->metrics, s->ranks) : NULL;
    s->trace = trace_new(o->trace_dir);
    s->weights = weight_updates_new(o->engine.model_dir, o->weights_dir);
    s->expert_record = expert_record_new(o->record_dir, o->record);
    if (!s->live || !s->trace || !s->weights || !s->expert_record)
        return HD_FAIL(err, HD_ENOMEM, "no memory for the server");
    HD_TRY(mount_all(s, err));
    HD_TRY(become_user(o, err));
    HD_TRY(check_dir("trace-dir", o->trace_dir, err));
    HD_TRY(check_dir("expert-record-dir", o->record_dir, err));
    HD_TRY(check_dir("weights-backup", o->engine.weights_backup, err));
    if (o->engine.kv_disk)
        HD_TRY(hd_kv_disk_split(&s->kv_dir, NULL, "kv_disk", o->engine.kv_disk, err));
    HD_TRY(check_dir("kv-disk", s->kv_dir, err));
    HD_TRY(kv_saved_open(&s->saved, &s->saved_dir, o->kv_save, err));
    if (!o->sandbox) {
        memcpy(s->sandbox, "off", 4);
        return HD_OK;
    }
    const char *const reread[] = {o->key_sources.file, o->key_sources.admin_file,
                                  o->http.certificate, o->http.private_key};
    sandbox_paths paths = {
        .read = {o->engine.model_dir,       o->engine.manifest, o->weights_dir},
        .write = { o->trace_dir, o->record_dir,          o->engine.weights_backup,                                                  s->kv_dir,
                 s->saved_dir},
        .ranks = o->engine.world.size > 1,
        .connects = o->pd.role != PD_ROLE_NONE
    };
    memcpy(paths.reread, reread, sizeof reread);
    return sandbox_enter(&paths, s->sandbox, sizeof s->sandbox, err);
}

static void open_locks(server *s) {
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->mail, NULL);
    pthread_cond_init(&s->kept, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

hd_status server_open(server **out, const server_options *options, hd_err *err) {
    server *s = calloc(1, sizeof *s);
    *out = NULL;
    if (!s) return HD_FAIL(err, HD_ENOMEM, "no memory for the server");
    s->options = *options;
    s->start_ns = hd_now_ns();
    s->pd_listener = -1;
    s->access_log.fd = -1;
    open_locks(s);
    hd_status st = prepare(s, err);
    if (st != HD_OK) {
        server_close(s);
        return st;
    }
    *out = s;
    return HD_OK;
}

static void log_notices(const server *s) {
    const char *const *notices;
    const size_t n = hd_engine_notices(s->engine, &notices);
    for (size_t i = 0; i < n; i++) {
        HD_LOG(HD_LOG_WARN, "model_notice", hd_log_text("what", notices[i]));
    }
}

static void poll_again(void *ctx) {
    server_submitted(ctx);
}

/* Whether servers of several hosts may have it. */
static bool is_common(const char *host) {
    static const char *const common[] = {"127.0.0.1", "::1", "localhost", "0.0.0.0", "::"};
    for (size_t i = 0; i < HD_LEN(common); i++) {
        if (strcmp(host, common[i]) == 0) return true;
    }
    return false;
}

/* Servers of one host have different ports or addresses. */
static hd_status start_transfers(server *s, hd_err *err) {
    pd_options o = s->options.pd;
    char host[256] = "";
    if (o.role == PD_ROLE_NONE) return HD_OK;
    if (is_common(s->options.http.host)) {
        gethostname(host, sizeof host - 1);
    } else {
        snprintf(host, sizeof host, "%s", s->options.http.host);
    }
    snprintf(s->pd_name, sizeof s->pd_name, "%.255s:%d", host, http_port(s->http));
    o.name = s->pd_name;
    o.model_dir = s->options.engine.model_dir;
    o.submitted = poll_again;
    o.ctx = s;
    const int listener = s->pd_listener;
    s->pd_listener = -1;
    return pd_open(&s->pd, s->engine, &o, listener, err);
}

enum { PAIRS_SHOWN = 28 }; /* of up to 8 ranks; of more the slowest pair */

static void log_pair(const char *event, const hd_engine_pair *p) {
    char between[120];
    snprintf(between, sizeof between, "rank %d on %s and rank %d on %s", p->rank[0], p->host[0],
             p->rank[1], p->host[1]);
    HD_LOG(HD_LOG_INFO, event, hd_log_text("between", between),
           hd_log_real("mb_per_s", p->rate / 1e6));
}

enum {
    RANKS_SHOWN = 8,
    CLOCKS_DIFFER_S = 1 /* a larger difference confuses who compares the ranks' logs */
};

static void log_found(int32_t rank, const hd_engine_found *f, bool shows) {
    char name[100], why[200];
    const double ahead = 1e-9 * (double)f->clock_ns, within = 1e-9 * (double)f->within_ns;
    snprintf(name, sizeof name, "rank %d on %s", rank, f->host);
    if (shows) {
        HD_LOG(HD_LOG_INFO, "rank_found", hd_log_text("rank", name),
               hd_log_real("free_gb", (double)f->free_bytes / 1e9),
               hd_log_real("clock_ms", 1e3 * ahead), hd_log_real("within_ms", 1e3 * within));
    }
    if (fabs(ahead) - within < CLOCKS_DIFFER_S) return;
    snprintf(why, sizeof why, "%s: its clock is %.1f s %s rank 0's (set both by NTP)", name,
             fabs(ahead), ahead > 0 ? "ahead of" : "behind");
    HD_LOG(HD_LOG_WARN, "rank_clock_differs", hd_log_text("why", why));
}

static void log_ranks(const server *s) {
    hd_engine_found f;
    for (int32_t i = 0, n = 1; i < n; i++) {
        n = hd_engine_read_found(s->engine, i, &f);
        if (i < n) log_found(i, &f, n <= RANKS_SHOWN);
    }
}

/* What ranks in processes of their own found of each other before weights were read. */
static void log_rates(const server *s) {
    hd_engine_pair p, slowest;
    const int32_t n = hd_engine_read_pair(s->engine, 0, &slowest);
    for (int32_t i = 0; i < n; i++) {
        hd_engine_read_pair(s->engine, i, &p);
        if (p.rate < slowest.rate) slowest = p;
        if (n <= PAIRS_SHOWN) log_pair("rank_rate", &p);
    }
    if (n > PAIRS_SHOWN) log_pair("slowest_rank_rate", &slowest);
}

hd_status server_start(server *s, hd_err *err) {
    char why[600];
    HD_TRY(http_start(s->http, err));
    const int64_t before = hd_now_ns();
    const int opened = hd_engine_open(&s->engine, &s->options.engine, why, sizeof why);
    if (opened != 0) return HD_FAIL(err, (hd_status)opened, "%s", why);
    s->load_seconds = (double)(hd_now_ns() - before) * 1e-9;
    log_notices(s);
    const char *layout = hd_engine_layout_reason(s->engine);
    if (layout) HD_LOG(HD_LOG_INFO, "layout", hd_log_text("chosen", layout));
    log_ranks(s);
    log_rates(s);
    s->api = (api_context){.engine = s->engine,
                           .model_name = s->options.model_name,
                           .created = (int64_t)time(NULL),
                           .limits = s->options.api,
                           .on_begin = on_begin,
                           .on_submit = on_submit,
                           .on_first = on_first,
                           .on_token = on_token,
                           .on_end = on_end,
                           .on_unknown_field = on_unknown_field,
                           .server = s,
                           .described = &server_description,
                           .background = api_background_open(),
                           .store = api_store_open(STORE_BYTES)};
    atomic_store(&s->progress_ns, hd_now_ns());
    if (pthread_create(&s->poller, NULL, poll_events, s) == 0) s->polling = true;
    if (s->polling && pthread_create(&s->ticker, NULL, tick, s) == 0) s->ticking = true;
    if (!s->ticking) return HD_FAIL(err, HD_EIO, "cannot start the server's threads");
    HD_TRY(start_transfers(s, err));
    HD_TRY(kv_saved_start(s->saved, s->engine, &s->options.engine, err));
    records_watch_crashes(s->records);
    atomic_store(&s->ready, true);
    http_set_gate(s->http, HTTP_OPEN);
    return HD_OK;
}

void server_drain(server *s) {
    hd_engine_stats stats;
    if (atomic_exchange(&s->draining, true)) return;
    http_set_gate(s->http, HTTP_DRAINING);
    if (s->engine) {
        hd_engine_drain(s->engine);
        hd_engine_resume(s->engine); /* paused requests would never finish */
        hd_engine_read_stats(s->engine, &stats);
        /* nor would those that wait for memory or weights */
        if (stats.hindrance) records_abort(s->records, s->engine, NULL);
    }
    live_end(s->live);
}

static size_t n_background(const server *s) {
    return s->api.background ? api_background_count(s->api.background) : 0;
}

bool server_wait_idle(server *s, int64_t timeout_ns) {
    const int64_t until = hd_now_ns() + timeout_ns;
    const struct timespec pause = {0, 5000000};
    http_stats stats;
    do {
        http_read_stats(s->http, &stats);
        if (stats.pending == 0 && n_background(s) == 0) return true;
        nanosleep(&pause, NULL);
    } while (hd_now_ns() < until);
    return false;
}

void server_log_state(server *s) {
    hd_engine_stats e = {0};
    http_stats h;
    const bool ready = atomic_load(&s->ready);
    if (ready) hd_engine_read_stats(s->engine, &e);
    http_read_stats(s->http, &h);
    HD_LOG(HD_LOG_INFO, "state", hd_log_text("server", ready ? "ready" : "starting"),
           hd_log_int("draining", atomic_load(&s->draining)), hd_log_int("paused", e.paused),
           hd_log_int("running", e.running), hd_log_int("waiting", e.waiting),
           hd_log_int("living", e.living), hd_log_int("steps", e.steps),
           hd_log_int("pages_free", e.pages_free[HD_KV_FULL]),
           hd_log_int("pages", e.pages[HD_KV_FULL]), hd_log_int("calls", h.calls),
           hd_log_int("connections", h.connections));
}

hd_status server_reload_keys(server *s, hd_err *err) {
    return hd_keys_reload(s->keys, err);
}

hd_status server_reload_certificate(server *s, hd_err *err) {
    return http_reload(s->http, err);
}

bool server_speaks_tls(const server *s) {
    return s->options.http.certificate != NULL;
}

/* Clients are dropped first, which cancels their requests; the poller lives until the last of
 * them has ended, so that every call that was kept is released. */
static void wait_for_calls(server *s) {
    const struct timespec pause = {0, 1000000};
    http_stats stats;
    if (!s->polling) return;
    if (s->api.background) api_background_cancel_all(s->api.background);
    for (http_read_stats(s->http, &stats); stats.handled > 0;) {
        nanosleep(&pause, NULL);
        tend_waiting(s);
        http_read_stats(s->http, &stats);
    }
}

void server_close(server *s) {
    if (!s) return;
    if (s->http) {
        server_drain(s);
        http_stop(s->http);
    }
    if (s->ticking) {
        atomic_store(&s->stopping, true);
        pthread_join(s->ticker, NULL);
        atomic_store(&s->stopping, false);
    }
    kv_saved_stop(s->saved);
    wait_for_calls(s);
    pd_close(s->pd);
    if (s->pd_listener >= 0) close(s->pd_listener);
    atomic_store(&s->stopping, true);
    if (s->polling) {
        hd_engine_wake(s->engine);
        server_submitted(s);
        pthread_join(s->poller, NULL);
    }
    weight_updates_drop(s->weights);
    hd_engine_close(s->engine);
    http_close(s->http);
    api_background_close(s->api.background);
    api_store_close(s->api.store);
    hd_keys_close(s->keys);
    live_free(s->live);
    rank_view_free(s->ranks);
    weight_updates_free(s->weights);
    trace_free(s->trace);
    expert_record_free(s->expert_record);
    records_free(s->records);
    prefix_ring_close(s->prefixes);
    line_file_close(&s->access_log);
    free(s->kv_dir);
    kv_saved_close(s->saved);
    free(s->saved_dir);
    metrics_free(s->metrics);
    pthread_cond_destroy(&s->mail);
    pthread_cond_destroy(&s->kept);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

int32_t server_port(const server *s) {
    return http_port(s->http);
}

bool server_is_loopback(const server *s) {
    return http_is_loopback(s->http);
}

const char *server_address(const server *s, int32_t i) {
    return http_address(s->http, i);
}

bool server_has_keys(const server *s) {
    return hd_keys_user_set(s->keys);
}

const char *server_sandbox(const server *s) {
    return s->sandbox;
}

hd_engine *server_engine(server *s) {
    return s->engine;
}
