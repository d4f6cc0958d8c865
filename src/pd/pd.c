/* pd.c - the thread of pd.h: takes notes of other threads, frames of peers and the passing of time,
 * steps the leases and does what they say. */
#include "pd/pd.h"

#include <assert.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/log.h"
#include "base/progress.h"
#include "comm/address.h"
#include "pd/pd_internal.h"
#include "weights/fingerprint.h"

enum { LOOK_MS = 200, DEFAULT_LIMIT_MS = 60000, MS_NS = 1000000 };

const char *pd_skip_name(pd_skip skip) {
    static const char *const names[PD_N_SKIPS] = {"unknown", "down", "suspect", "cached",
                                                  "full"};
    return names[skip];
}

/* ---- notes ---- */

void pd_post(pd *p, pd_note *note) {
    const uint64_t one = 1;
    note->next = NULL;
    pthread_mutex_lock(&p->lock);
    *p->last_note = note;
    p->last_note = &note->next;
    const ssize_t n = write(p->wake, &one, sizeof one); /* in the lock: it is not closed yet */
    pthread_mutex_unlock(&p->lock);
    (void)n; /* full: the thread is awake */
}

static pd_note *take_notes(pd *p) {
    pthread_mutex_lock(&p->lock);
    pd_note *all = p->first_note;
    p->first_note = NULL;
    p->last_note = &p->first_note;
    pthread_mutex_unlock(&p->lock);
    return all;
}

static void run_notes(pd *p) {
    for (pd_note *n = take_notes(p), *next; n; n = next) {
        next = n->next;
        n->take(p, n);
    }
}

void pd_count(pd *p, int64_t *counter, int64_t amount) {
    pthread_mutex_lock(&p->lock);
    *counter += amount;
    pthread_mutex_unlock(&p->lock);
}

/* ---- leases ---- */

hd_lease_event pd_event(hd_lease_event_kind kind, hd_lease_id id) {
    return (hd_lease_event){.kind = kind, .now_ns = (uint64_t)hd_now_ns(), .id = id};
}

void pd_log_end(pd *p, const char *event, hd_lease_id id, const char *trace_id,
                hd_lease_reason reason, int64_t ns) {
    const hd_lease *l = hd_leases_at(p->leases, (int32_t)id.slot);
    HD_LOG(HD_LOG_INFO, event, hd_log_text("request_id", trace_id),
           hd_log_text("peer", p->peers[l->peer].name),
           hd_log_text("end", hd_lease_reason_name(reason)), hd_log_int("pages", l->n_done),
           hd_log_int("of", l->n_pages), hd_log_real("ms", (double)ns * 1e-6));
}

static void release(pd *p, const hd_lease_action *a) {
    pd_fetch *f = p->fetch_of[a->id.slot];
    pd_send *s = p->send_of[a->id.slot];
    if (f) {
        pd_fetch_over(p, f, a->reason);
    } else if (s) {
        pd_send_over(p, s, a->reason);
    }
}

static void act(pd *p, const hd_lease_action *a) {
    switch (a->kind) {
    case HD_LEASE_DO_SEND:
        if (a->message.kind == HD_LEASE_MSG_RESERVE) {
            pd_say_reserve(p, a);
        } else {
            pd_peer_say(p, a->peer, &a->message);
        }
        break;
    case HD_LEASE_DO_PREFILL:
        pd_prefill(p, a);
        break;
    case HD_LEASE_DO_PAGES:
        pd_send_pages(p, a);
        break;
    case HD_LEASE_DO_WRITE:
        pd_write(p, a);
        break;
    case HD_LEASE_DO_OWN:
        pd_fetch_over(p, p->fetch_of[a->id.slot], HD_LEASE_DONE);
        break;
    case HD_LEASE_DO_RELEASE:
        release(p, a);
        break;
    }
}

/* An action raises at most two events, which are stepped after those that wait. */
hd_status pd_raise(pd *p, const hd_lease_event *event) {
    hd_status first = HD_OK;
    assert(p->n_events < PD_EVENTS);
    p->events[p->n_events++] = *event;
    if (p->n_events > 1) return HD_OK;
    for (int32_t i = 0; i < p->n_events; i++) {
        hd_lease_action a;
        const hd_lease_event e = p->events[i];
        const hd_status st = hd_leases_step(p->leases, &e);
        if (i == 0) first = st;
        while (hd_leases_take(p->leases, &a)) act(p, &a);
    }
    p->n_events = 0;
    return first;
}

void pd_raise_message(pd *p, int32_t peer, const hd_lease_message *m, uint64_t digest) {
    const hd_lease_event e = {.kind = HD_LEASE_EV_MESSAGE,
                              .now_ns = (uint64_t)hd_now_ns(),
                              .peer = peer,
                              .digest = digest,
                              .message = m};
    pd_raise(p, &e);
}

static void tick(pd *p) {
    const uint64_t now = (uint64_t)hd_now_ns();
    if (now < hd_leases_next_deadline(p->leases)) return;
    pd_raise(p, &(hd_lease_event){.kind = HD_LEASE_EV_TICK, .now_ns = now});
}

/* ---- the thread ---- */

static void show(pd *p) {
    pd_stats now = {.leases = hd_leases_read_counts(p->leases)};
    for (int32_t i = 0; i < PD_LEASES; i++) {
        const hd_lease *l = hd_leases_at(p->leases, i);
        const bool open = l->state != HD_LEASE_FREE && l->state != HD_LEASE_OWNED;
        if (open) now.open[l->is_receiver][l->state]++;
    }
    pthread_mutex_lock(&p->lock);
    p->stats.leases = now.leases;
    memcpy(p->stats.open, now.open, sizeof now.open);
    for (int32_t i = 0; i < 2 * PD_MAX_PEERS; i++) {
        p->peers[i].bytes_in = p->peers[i].link.bytes_in;
        p->peers[i].bytes_out = p->peers[i].link.bytes_out;
    }
    pthread_mutex_unlock(&p->lock);
}

static int wait_ms(pd *p) {
    const uint64_t now = (uint64_t)hd_now_ns();
    const uint64_t deadline = hd_leases_next_deadline(p->leases), retry = pd_peers_due(p);
    const uint64_t next = deadline < retry ? deadline : retry;
    if (next <= now) return 0;
    const uint64_t ms = (next - now) / MS_NS + 1;
    return ms < LOOK_MS ? (int)ms : LOOK_MS;
}

static void end_leases(pd *p) {
    for (int32_t i = 0; i < 2 * PD_MAX_PEERS; i++) {
        if (p->peers[i].link.channel.fd >= 0) pd_peer_lost(p, i, "this server ends");
    }
}

static bool is_closing(pd *p) {
    pthread_mutex_lock(&p->lock);
    const bool closing = p->closing;
    pthread_mutex_unlock(&p->lock);
    return closing;
}

static void *run(void *arg) {
    pd *p = arg;
    struct pollfd polled[PD_MAX_SOCKETS];
    uint64_t wakes;
    while (!p->ends || p->fetches || p->n_sends > 0) {
        const int32_t n = pd_peers_poll(p, polled);
        polled[n] = (struct pollfd){.fd = p->wake, .events = POLLIN};
        poll(polled, (nfds_t)n + 1, wait_ms(p));
        if (polled[n].revents && read(p->wake, &wakes, sizeof wakes) < 0) continue;
        p->ends = is_closing(p);
        run_notes(p);
        pd_peers_tend(p, polled);
        if (p->ends) end_leases(p);
        tick(p);
        show(p);
    }
    return NULL;
}

/* ---- opening ---- */

hd_status pd_bind(int *listener, const pd_options *o, hd_err *err) {
    const char *at = o->transfer_at ? o->transfer_at : PD_TRANSFER_AT;
    *listener = -1;
    if (o->role == PD_ROLE_PREFILL && o->peers) {
        return HD_FAIL(err, HD_EINVAL, "--prefill-peers is for --role decode or both");
    }
    if (!(o->role & PD_ROLE_PREFILL)) {
        return o->transfer_at
                   ? HD_FAIL(err, HD_EINVAL, "--transfer-listen is for --role prefill or both")
                   : HD_OK;
    }
    if (!hd_address_is_valid(at)) {
        return HD_FAIL(err, HD_EINVAL, "--transfer-listen %s is no HOST:PORT", at);
    }
    if (!o->key && !hd_address_is_loopback(at)) {
        return HD_FAIL(err, HD_EINVAL,
                       "--transfer-listen %s can be reached by others: it needs "
                       "--peer-key-file",
                       at);
    }
    return hd_address_bind(listener, "--transfer-listen:", at, err);
}

static void describe_sums(pd_facts *f, const hd_parallel_config *l) {
    if (!l->sum_in_ranks) return; /* every layout has the bits of one rank */
    f->sums[0] = (uint64_t)(l->head_parts ? l->head_parts : l->tp);
    f->sums[1] = (uint64_t)l->etp;
    f->sums[2] = (uint64_t)l->dense_tp;
}

static hd_status describe(pd *p, hd_err *err) {
    const hd_model_spec *spec = hd_engine_spec(p->engine);
    pd_facts *f = &p->hello.facts;
    struct timespec now;
    hd_precision precision;
    const char *backend = hd_engine_backend(p->engine, NULL);
    const char *path = hd_engine_cuda_path(p->engine);
    const char *activations = hd_engine_activations(p->engine, &precision);
    clock_gettime(CLOCK_REALTIME, &now); /* later lives of a process have later times */
    p->hello.epoch = (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
    snprintf(p->hello.name, sizeof p->hello.name, "%s", p->o.name);
    snprintf(f->version, sizeof f->version, "%s", HD_VERSION);
    snprintf(f->family, sizeof f->family, "%s", hd_family_name(spec->family));
    snprintf(f->number_format, sizeof f->number_format, "%s%s, %s, %s cache",
             hd_engine_parallel(p->engine)->fp8_rows ? "fp8 rows, " : "", path ? path : backend,
             activations, hd_engine_kv_cache_dtype(p->engine));
    describe_sums(f, hd_engine_parallel(p->engine));
    f->page_tokens = (uint64_t)p->side.page_tokens;
    for (int g = 0; g < HD_N_KV_GROUPS; g++) {
        f->page_bytes[g] = hd_handover_bytes(&p->side, (hd_kv_group)g);
    }
    return hd_model_fingerprint(&f->weights, p->o.model_dir, err);
}

static void limit_frames(pd *p) {
    const pd_facts *f = &p->hello.facts;
    const uint64_t page =
        f->page_bytes[0] > f->page_bytes[1] ? f->page_bytes[0] : f->page_bytes[1];
    const size_t tokens = (size_t)p->max_tokens * sizeof(int32_t);
    p->most_new[PD_FRAME_CHALLENGE] = HD_CHANNEL_NONCE;
    p->most_new[PD_FRAME_JOIN] = HD_CHANNEL_NONCE + sizeof p->hello;
    p->most_new[PD_FRAME_WELCOME] = sizeof p->hello;
    p->most_new[PD_FRAME_REFUSED] = PD_MAX_TEXT;
    p->most_joined[PD_FRAME_LEASE] = sizeof(hd_lease_message);
    p->most_joined[PD_FRAME_RESERVE] =
        (uint32_t)(sizeof(hd_lease_message) + sizeof(pd_prompt) + tokens);
    p->most_joined[PD_FRAME_PAGE] = (uint32_t)(sizeof(hd_lease_message) + page);
}

static hd_status open_leases(pd *p, hd_err *err) {
    const int32_t pages = p->max_tokens / (int32_t)p->hello.facts.page_tokens + 1;
    const hd_lease_options o = {.epoch = p->hello.epoch,
                                .max_time_ns = (uint64_t)p->o.limit_ms * MS_NS,
                                .max_leases = PD_LEASES,
                                .max_per_peer = PD_LEASES_PER_PEER,
                                .max_peers = 2 * PD_MAX_PEERS,
                                .max_pages = 2 * pages};
    void *memory = calloc(1, hd_leases_bytes(&o));
    if (!memory) return HD_FAIL(err, HD_ENOMEM, "no memory for %d leases", PD_LEASES);
    p->leases = hd_leases_place(memory, &o);
    return HD_OK;
}

static hd_status open_all(pd *p, hd_err *err) {
    hd_engine_stats stats;
    HD_TRY(hd_engine_check_pages(p->engine, p->side.page_bytes, err));
    hd_engine_read_stats(p->engine, &stats);
    p->max_tokens = stats.max_context;
    p->vocab = hd_engine_spec(p->engine)->vocab;
    p->side.page_tokens = hd_kv_shape_of(hd_engine_spec(p->engine)).page_tokens;
    HD_TRY(describe(p, err));
    limit_frames(p);
    HD_TRY(open_leases(p, err));
    HD_TRY(pd_peers_open(p, err));
    p->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (p->wake < 0) return HD_FAIL(err, HD_EIO, "no eventfd: %s", strerror(errno));
    HD_TRY(pd_peers_resolve(p, err));
    if (pthread_create(&p->thread, NULL, run, p) != 0) {
        return HD_FAIL(err, HD_EIO, "cannot start a thread");
    }
    p->started = true;
    return HD_OK;
}

hd_status pd_open(pd **out, hd_engine *e, const pd_options *o, int listener, hd_err *err) {
    *out = NULL;
    pd *p = calloc(1, sizeof *p);
    if (!p) {
        if (listener >= 0) close(listener);
        return HD_FAIL(err, HD_ENOMEM, "no memory for transfers");
    }
    p->o = *o;
    p->engine = e;
    p->listener = listener;
    p->wake = -1;
    p->last_note = &p->first_note;
    if (!p->o.limit_ms) p->o.limit_ms = DEFAULT_LIMIT_MS;
    hd_channel_key(p->key, o->key);
    pthread_mutex_init(&p->lock, NULL);
    const hd_status st = open_all(p, err);
    if (st != HD_OK) {
        pd_close(p);
        return st;
    }
    if (o->role & PD_ROLE_DECODE) {
        const hd_page_source source = pd_source(p);
        hd_engine_set_page_source(e, &source);
    }
    *out = p;
    return HD_OK;
}

static void stop(pd *p) {
    const uint64_t one = 1;
    hd_names_stop(p->names); /* it posts no more */
    p->names = NULL;
    pthread_mutex_lock(&p->lock);
    p->closing = true;
    const ssize_t n = write(p->wake, &one, sizeof one);
    pthread_mutex_unlock(&p->lock);
    (void)n;
    pthread_join(p->thread, NULL);
    hd_engine_set_page_source(p->engine, NULL);
}

void pd_close(pd *p) {
    if (!p) return;
    if (p->started) stop(p);
    hd_names_stop(p->names);
    run_notes(p); /* cancellations of what has ended */
    pd_peers_close(p);
    if (p->listener >= 0) close(p->listener);
    if (p->wake >= 0) close(p->wake);
    pthread_mutex_destroy(&p->lock);
    free(p->leases);
    free(p);
}

/* ---- reading ---- */

void pd_read_stats(pd *p, pd_stats *out) {
    pthread_mutex_lock(&p->lock);
    *out = p->stats;
    pthread_mutex_unlock(&p->lock);
}

bool pd_read_peer(pd *p, int32_t i, pd_peer_status *out) {
    if (i < 0 || i >= 2 * PD_MAX_PEERS) return false;
    pthread_mutex_lock(&p->lock);
    const pd_peer *q = &p->peers[i];
    *out = (pd_peer_status){.fetches = i >= PD_MAX_PEERS,
                            .up = q->up,
                            .bytes_in = q->bytes_in,
                            .bytes_out = q->bytes_out,
                            .suspicion = q->suspicion};
    snprintf(out->name, sizeof out->name, "%s", q->name);
    snprintf(out->why, sizeof out->why, "%s", q->why);
    pthread_mutex_unlock(&p->lock);
    return true;
}
