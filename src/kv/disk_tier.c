/* disk_tier.c - the traffic between host memory and the disk; see disk_tier.h. */
#include "kv/disk_tier.h"

#include <assert.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>

#include "base/checked.h"

enum {
    N_FETCHES = 4,
    N_JOBS = 32,            /* transfers at a time */
    N_WRITES = 8,           /* of them writes */
    SYNC_WRITES = 64,       /* pages written before they are made to survive a power cut */
    MIN_WAIT_NS = 20000000, /* least time before a read is given up */
};

#define SECOND_NS ((int64_t)1000000000)
#define FORGETS   0.98 /* what a time of reading counts for after a prefix that was computed */

/* The prefix of a waiting request. Its pages are read in the order in which they enter the tree:
 * FULL pages from .. to - 1, then WINDOW pages. */
typedef struct fetch {
    uint64_t id; /* 0: unused, or its request is told */
    uint64_t salt;
    const int32_t *tokens;
    hd_page_name *names; /* [seq_pages] */
    hd_cache_reads reads;
    int32_t n, n_asked, n_adopted; /* pages; of them submitted; in the tree */
    int32_t n_flying;
    int32_t node;
    bool ended, told;
    int64_t begun_ns, deadline_ns;
    double bytes;
} fetch;

typedef struct transfer {
    bool used, done;
    hd_disk_job job;
    int32_t fetch, place; /* of a read: which page of it */
    hd_cache_page page;   /* of a write */
    hd_host_page host;
} transfer;

/* Is told once when it begins to fail and once when it works again. */
typedef struct health {
    bool failing;
    int64_t retry_ns, pause_ns;
} health;

struct hd_disk_tier {
    hd_disk_tier_options o;
    hd_disk *disk;
    hd_disk_io *io;
    hd_cache *cache;
    hd_page_name root; /* of names */
    uint64_t use;      /* the time of the prefix that is asked for */
    fetch fetches[N_FETCHES];
    transfer transfers[N_JOBS]; /* by the tag of their job */
    int32_t n_flying, n_writes;
    int32_t unsynced;
    bool syncing;
    bool copies_run; /* copies may still run */
    bool stalled;    /* nothing can be written before a transfer is done or copies have run */
    health health[HD_N_DISK_JOBS];
    double byte_ns;
    int64_t now_ns;
    hd_disk_tier_stats stats;
};

/* ---- opening ---- */

static hd_status take_memory(hd_disk_tier *t, hd_err *err) {
    const size_t n = (size_t)t->o.seq_pages;
    const size_t windows = (size_t)hd_ceil_div(t->o.lookback, t->o.page_tokens) + 1;
    for (int i = 0; i < N_FETCHES; i++) {
        t->fetches[i].names = calloc(n, sizeof *t->fetches[i].names);
        t->fetches[i].reads.windows = calloc(windows, sizeof(int32_t));
        if (!t->fetches[i].names || !t->fetches[i].reads.windows) {
            return HD_FAIL(err, HD_ENOMEM, "no memory for the disk tier");
        }
    }
    return HD_OK;
}

hd_status hd_disk_tier_open(hd_disk_tier **out, const hd_disk_tier_options *o, hd_err *err) {
    *out = NULL;
    hd_disk_tier *t = calloc(1, sizeof *t);
    if (!t) {
        hd_disk_close(o->disk);
        return HD_FAIL(err, HD_ENOMEM, "no memory for the disk tier");
    }
    t->o = *o;
    t->disk = o->disk;
    hd_status st = take_memory(t, err);
    if (st == HD_OK) {
        st = hd_disk_io_open(&t->io, t->disk, o->n_threads, N_JOBS, o->wake, o->ctx, err);
    }
    if (st == HD_OK) {
        *out = t;
    } else {
        hd_disk_tier_close(t);
    }
    return st;
}

void hd_disk_tier_close(hd_disk_tier *t) {
    if (!t) return;
    hd_disk_io_close(t->io);
    hd_disk_close(t->disk);
    for (int i = 0; i < N_FETCHES; i++) {
        free(t->fetches[i].names);
        free(t->fetches[i].reads.windows);
    }
    free(t);
}

const uint64_t *hd_disk_tier_key(const hd_disk_tier *t) {
    return hd_disk_key(t->disk);
}

void hd_disk_tier_attach(hd_disk_tier *t, hd_cache *cache) {
    t->cache = cache;
    hd_cache_set_root(cache, t->root);
}

/* ---- failures ---- */

static void tell(const hd_disk_tier *t, hd_disk_job_kind kind, int why) {
    if (t->o.tell) t->o.tell(t->o.ctx, kind, why);
}

static void note_failure(hd_disk_tier *t, hd_disk_job_kind kind, int why) {
    health *h = &t->health[kind];
    if (why != EBADMSG) { /* a wrong page says nothing about others */
        h->pause_ns = h->pause_ns ? hd_min_i64(2 * h->pause_ns, 60 * SECOND_NS) : SECOND_NS;
        h->retry_ns = t->now_ns + h->pause_ns;
    }
    if (h->failing) return;
    h->failing = true;
    tell(t, kind, why);
}

static void note_success(hd_disk_tier *t, hd_disk_job_kind kind) {
    health *h = &t->health[kind];
    if (!h->failing) return;
    *h = (health){0};
    tell(t, kind, 0);
}

/* ECANCELED: another cache has dropped the pages of the store. */
static void note(hd_disk_tier *t, hd_disk_job_kind kind, int why) {
    if (why == ECANCELED) return;
    if (why) {
        note_failure(t, kind, why);
    } else {
        note_success(t, kind);
    }
}

static bool is_paused(const hd_disk_tier *t, hd_disk_job_kind kind) {
    return t->health[kind].failing && t->now_ns < t->health[kind].retry_ns;
}

/* ---- transfers ---- */

static transfer *submit(hd_disk_tier *t, const transfer *what) {
    int32_t i = 0;
    while (t->transfers[i].used) i++;
    transfer *x = &t->transfers[i];
    *x = *what;
    x->used = true;
    x->job.tag = i;
    if (x->job.kind != HD_DISK_SYNC) {
        x->job.page = t->o.host_page(t->o.ctx, x->job.group, x->host);
    }
    t->n_flying++;
    hd_disk_io_submit(t->io, &x->job);
    return x;
}

static void free_transfer(hd_disk_tier *t, transfer *x) {
    x->used = false;
    t->n_flying--;
}

/* Copies that were queued may still read and write pages of host memory. */
static bool copies_have_run(hd_disk_tier *t) {
    hd_err err = {0};
    if (!t->copies_run) return true;
    t->copies_run = t->o.wait_copies && t->o.wait_copies(t->o.ctx, &err) != HD_OK;
    t->stalled = t->stalled || t->copies_run;
    return !t->copies_run;
}

/* ---- writing ---- */

static void end_write(hd_disk_tier *t, transfer *x) {
    const bool good = x->job.why == 0;
    hd_disk_end_write(t->disk, x->job.group, x->job.extent, good);
    hd_cache_end_write(t->cache, &x->page, good);
    t->n_writes--;
    t->unsynced += good;
    t->stats.written[x->job.group] += good;
    t->stats.write_failed += !good && x->job.why != ECANCELED;
    note(t, HD_DISK_WRITE, x->job.why);
    free_transfer(t, x);
}

/* Writes a page that the disk does not have. Returns false if there is none now. */
static bool write_next(hd_disk_tier *t, hd_kv_group group) {
    hd_cache_page page;
    while (hd_cache_begin_write(t->cache, group, &page)) {
        if (hd_disk_has(t->disk, group, page.name)) {
            hd_cache_end_write(t->cache, &page, true);
            continue;
        }
        const int32_t extent = hd_disk_begin_write(t->disk, group, page.name, page.page);
        if (extent < 0) {
            hd_cache_end_write(t->cache, &page, false);
            t->stalled = true;
            return false;
        }
        submit(t, &(transfer){
                      .job = {.kind = HD_DISK_WRITE, .group = group, .extent = extent},
                      .page = page,
                      .host = page.host
        });
        t->n_writes++;
        return true;
    }
    return false;
}

static bool any_fetch(const hd_disk_tier *t) {
    for (int i = 0; i < N_FETCHES; i++) {
        if (t->fetches[i].id && !t->fetches[i].ended) return true;
    }
    return false;
}

/* Reads go first. */
static bool may_write(const hd_disk_tier *t) {
    return !any_fetch(t) && t->n_writes < N_WRITES && t->n_flying < N_JOBS && !t->stalled &&
           !is_paused(t, HD_DISK_WRITE);
}

static void write_some(hd_disk_tier *t) {
    while (may_write(t) && hd_cache_has_unwritten(t->cache, false) && copies_have_run(t)) {
        if (!write_next(t, HD_KV_FULL) && !write_next(t, HD_KV_WINDOW)) return;
    }
}

/* What was written survives a power cut after each burst. */
static bool wants_sync(const hd_disk_tier *t) {
    return t->unsynced && !t->syncing && t->n_flying < N_JOBS && !is_paused(t, HD_DISK_SYNC) &&
           (t->unsynced >= SYNC_WRITES ||
            (t->n_writes == 0 && !hd_cache_has_unwritten(t->cache, false) &&
             !hd_cache_has_unwritten(t->cache, true)));
}

static void sync_some(hd_disk_tier *t) {
    if (!wants_sync(t)) return;
    t->syncing = true;
    t->unsynced = 0;
    submit(t, &(transfer){.job.kind = HD_DISK_SYNC});
}

static void end_sync(hd_disk_tier *t, transfer *x) {
    t->syncing = false;
    if (x->job.why) t->unsynced++;
    note(t, HD_DISK_SYNC, x->job.why);
    free_transfer(t, x);
}

/* ---- reading ---- */

static double mean(double before, double value) {
    return fmax(before > 0 ? (before + value) / 2 : value, 1e-6);
}

/* What is still in transfer is dropped when it comes. */
static void end_fetch(hd_disk_tier *t, fetch *f) {
    if (f->ended) return;
    const double took = (double)(t->now_ns - f->begun_ns);
    f->ended = true;
    f->tokens = NULL;
    if (f->bytes <= 0) return;
    t->byte_ns = mean(t->byte_ns, took / f->bytes);
    t->stats.read_ns += t->now_ns - f->begun_ns;
    t->stats.read_bytes += (int64_t)f->bytes;
}

static hd_kv_group group_at(const fetch *f, int32_t place) {
    return place < f->reads.to - f->reads.from ? HD_KV_FULL : HD_KV_WINDOW;
}

static int32_t page_at(const fetch *f, int32_t place) {
    const int32_t n_full = f->reads.to - f->reads.from;
    return place < n_full ? f->reads.from + place : f->reads.windows[place - n_full];
}

/* Submits the next page of a fetch. Returns false if that is not possible. */
static bool read_next(hd_disk_tier *t, fetch *f) {
    const hd_kv_group group = group_at(f, f->n_asked);
    const int32_t page = page_at(f, f->n_asked);
    const int32_t extent = hd_disk_begin_read(t->disk, group, f->names[page]);
    if (extent < 0) return false;
    const hd_host_page host = hd_cache_reserve(t->cache, group);
    if (host.n < 0) {
        hd_disk_end_read(t->disk, group, extent, true);
        return false;
    }
    submit(t, &(transfer){
                  .job = {.kind = HD_DISK_READ, .group = group, .extent = extent},
                  .fetch = (int32_t)(f - t->fetches),
                  .place = f->n_asked,
                  .host = host
    });
    f->n_asked++;
    f->n_flying++;
    return true;
}

/* A prefix ends where a page cannot be read: later pages are of no use. */
static void read_some(hd_disk_tier *t, fetch *f) {
    while (f->n_asked < f->n && t->n_flying < N_JOBS && copies_have_run(t)) {
        if (read_next(t, f)) continue;
        f->n = f->n_asked;
    }
}

static transfer *next_read(hd_disk_tier *t, const fetch *f) {
    for (int32_t i = 0; i < N_JOBS; i++) {
        transfer *x = &t->transfers[i];
        if (x->used && x->done && x->job.kind == HD_DISK_READ && &t->fetches[x->fetch] == f &&
            x->place == f->n_adopted) {
            return x;
        }
    }
    return NULL;
}

static void forget_read(hd_disk_tier *t, transfer *x) {
    hd_cache_unreserve(t->cache, x->job.group, x->host);
    t->fetches[x->fetch].n_flying--;
    free_transfer(t, x);
}

/* The copy to other ranks reads the page, as copies to the device do. */
static void spread(hd_disk_tier *t, hd_kv_group group, hd_host_page host) {
    if (!t->o.spread) return;
    t->o.spread(t->o.ctx, group, host);
    t->copies_run = true;
}

/* Puts what was read into the tree, in order. */
static void adopt_reads(hd_disk_tier *t, fetch *f) {
    transfer *x;
    while (!f->ended && (x = next_read(t, f)) != NULL) {
        const int32_t page = page_at(f, x->place);
        const hd_kv_group group = x->job.group;
        if (x->job.why || !hd_cache_adopt(t->cache, f->salt, f->tokens, f->names, page, group,
                                          x->host, &f->node)) {
            if (x->job.why) hd_cache_unreserve(t->cache, group, x->host);
            f->n = f->n_adopted;
        } else {
            spread(t, group, x->host);
            f->n_adopted++;
            f->bytes += (double)t->o.page_bytes[group];
            t->stats.read[group]++;
        }
        f->n_flying--;
        free_transfer(t, x);
        if (f->n_adopted == f->n) end_fetch(t, f);
    }
}

static void end_read(hd_disk_tier *t, transfer *x) {
    hd_disk_end_read(t->disk, x->job.group, x->job.extent, x->job.why == 0);
    t->stats.read_failed += x->job.why && x->job.why != ECANCELED;
    note(t, HD_DISK_READ, x->job.why);
    x->done = true;
}

static void step_fetch(hd_disk_tier *t, fetch *f) {
    if (!f->id && !f->n_flying) return;
    adopt_reads(t, f);
    if (!f->ended && t->now_ns >= f->deadline_ns) {
        t->stats.late++;
        end_fetch(t, f);
    }
    if (!f->ended) read_some(t, f);
    if (!f->ended && f->n_adopted == f->n) end_fetch(t, f);
    for (int32_t i = 0; f->ended && i < N_JOBS; i++) {
        transfer *x = &t->transfers[i];
        if (x->used && x->done && x->job.kind == HD_DISK_READ && &t->fetches[x->fetch] == f) {
            forget_read(t, x);
        }
    }
}

/* ---- a step ---- */

static void take_done(hd_disk_tier *t) {
    hd_disk_job job;
    while (hd_disk_io_take(t->io, &job)) {
        transfer *x = &t->transfers[job.tag];
        x->job = job;
        t->stalled = false;
        switch (job.kind) {
        case HD_DISK_READ:
            end_read(t, x);
            break;
        case HD_DISK_WRITE:
            end_write(t, x);
            break;
        case HD_DISK_SYNC:
        case HD_N_DISK_JOBS:
            end_sync(t, x);
            break;
        }
    }
}

void hd_disk_tier_step(hd_disk_tier *t, int64_t now_ns, bool copied) {
    t->now_ns = now_ns;
    t->copies_run = t->copies_run || copied;
    t->stalled = t->stalled && !copied;
    take_done(t);
    for (int i = 0; i < N_FETCHES; i++) step_fetch(t, &t->fetches[i]);
    write_some(t);
    sync_some(t);
}

void hd_disk_tier_save(hd_disk_tier *t) {
    if (!may_write(t) || hd_cache_has_unwritten(t->cache, false)) return;
    hd_cache_save_unwritten(t->cache, HD_KV_FULL, N_WRITES);
    hd_cache_save_unwritten(t->cache, HD_KV_WINDOW, 1);
}

static int64_t sooner(int64_t a, int64_t b) {
    return a && (a < b || !b) ? a : b;
}

int64_t hd_disk_tier_look_ns(const hd_disk_tier *t) {
    int64_t at = 0;
    for (int i = 0; i < N_FETCHES; i++) {
        const fetch *f = &t->fetches[i];
        if (f->id && !f->ended) at = sooner(f->deadline_ns, at);
    }
    const bool writes =
        hd_cache_has_unwritten(t->cache, false) || hd_cache_has_unwritten(t->cache, true);
    const bool full =
        t->n_writes >= N_WRITES || t->n_flying >= N_JOBS || t->stalled || any_fetch(t);
    if (writes && !full) at = sooner(hd_max_i64(t->health[HD_DISK_WRITE].retry_ns, 1), at);
    if (wants_sync(t)) at = sooner(1, at);
    return at;
}

/* ---- requests ---- */

static bool has(void *ctx, hd_kv_group group, hd_page_name name) {
    hd_disk_tier *t = ctx;
    return hd_disk_use(t->disk, group, name, t->use);
}

static fetch *free_fetch(hd_disk_tier *t) {
    for (int i = 0; i < N_FETCHES; i++) {
        if (!t->fetches[i].id && !t->fetches[i].n_flying) return &t->fetches[i];
    }
    return NULL;
}

bool hd_disk_tier_has_room(const hd_disk_tier *t) {
    for (int i = 0; i < N_FETCHES; i++) {
        if (!t->fetches[i].id && !t->fetches[i].n_flying) return true;
    }
    return false;
}

/* Reading may take as long as computing what is read; a second if that is not known. */
static int64_t patience(const hd_cache_reads *r, double ns_of_token) {
    const double tokens = r->saved - r->without;
    const double ns = ns_of_token > 0 ? tokens * ns_of_token : SECOND_NS;
    return (int64_t)fmin(fmax(ns, MIN_WAIT_NS), 3600.0 * SECOND_NS);
}

bool hd_disk_tier_ask(hd_disk_tier *t, uint64_t id, uint64_t salt, const int32_t *tokens,
                      int32_t n, double ns_of_token, int64_t now_ns) {
    const hd_cache_lookup disk = {t, has};
    fetch *f = free_fetch(t);
    if (!f || is_paused(t, HD_DISK_READ)) return false;
    hd_page_name *names = f->names;
    hd_cache_reads reads = {.windows = f->reads.windows};
    t->use = hd_disk_begin_use(t->disk);
    const bool any = hd_cache_plan_reads(t->cache, &disk, salt, tokens, n, names, &reads);
    if (reads.declined) {
        t->stats.declined++;
        t->byte_ns *= FORGETS;
    }
    if (!any) return false;
    *f = (fetch){.id = id,
                 .salt = salt,
                 .tokens = tokens,
                 .names = names,
                 .reads = reads,
                 .n = reads.to - reads.from + reads.n_windows,
                 .node = -1,
                 .begun_ns = now_ns,
                 .deadline_ns = now_ns + patience(&reads, ns_of_token)};
    return true;
}

uint64_t hd_disk_tier_ended(hd_disk_tier *t) {
    for (int i = 0; i < N_FETCHES; i++) {
        fetch *f = &t->fetches[i];
        if (!f->id || !f->ended) continue;
        const uint64_t id = f->id;
        f->id = 0;
        return id;
    }
    return 0;
}

void hd_disk_tier_cancel(hd_disk_tier *t, uint64_t id) {
    for (int i = 0; i < N_FETCHES; i++) {
        fetch *f = &t->fetches[i];
        if (f->id != id) continue;
        f->ended = true;
        f->tokens = NULL;
        f->id = 0;
    }
}

void hd_disk_tier_stop(hd_disk_tier *t) {
    for (int i = 0; i < N_FETCHES; i++) {
        if (t->fetches[i].id) end_fetch(t, &t->fetches[i]);
    }
    hd_disk_io_wait(t->io);
    take_done(t);
    for (int i = 0; i < N_FETCHES; i++) step_fetch(t, &t->fetches[i]);
}

void hd_disk_tier_clear(hd_disk_tier *t) {
    note(t, HD_DISK_WRITE, hd_disk_clear(t->disk));
    t->unsynced = 0;
}

void hd_disk_tier_renew(hd_disk_tier *t, uint64_t weights) {
    t->root = hd_disk_root(t->disk, weights);
    hd_cache_set_root(t->cache, t->root);
}

hd_disk *hd_disk_tier_store(const hd_disk_tier *t) {
    return t->disk;
}

hd_disk_tier_stats hd_disk_tier_read_stats(const hd_disk_tier *t) {
    hd_disk_tier_stats s = t->stats;
    s.disk = hd_disk_read_stats(t->disk);
    return s;
}

double hd_disk_tier_byte_ns(const hd_disk_tier *t) {
    return t->byte_ns;
}
