/* receive.c - the side that fetches: finds which pages of a prompt lack, has them sent, and puts
 * them into the cache. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/progress.h"
#include "pd/pd_internal.h"

enum { REST_NS = 1000000000 }; /* times 30: a server that sent what was wrong is not asked */

/* ---- the end ---- */

static void drop(pd *p, pd_fetch *f) {
    pd_fetch **at = &p->fetches;
    while (*at != f) at = &(*at)->next;
    *at = f->next;
    free(f);
}

/* The request goes on, with what has come. */
static void end(pd *p, pd_fetch *f) {
    hd_engine_pages_settled(p->engine, f->request);
    drop(p, f);
}

void pd_fetch_over(pd *p, pd_fetch *f, hd_lease_reason reason) {
    const int64_t ns = hd_now_ns() - f->since_ns;
    pd_log_end(p, "pages_fetched", f->lease, f->prompt.trace_id, reason, ns);
    p->fetch_of[f->lease.slot] = NULL;
    pd_count(p, &p->stats.wait_ns, ns);
    if (reason == HD_LEASE_DONE) {
        const int64_t pages = f->prompt.pages.n[HD_KV_FULL];
        pd_count(p, &p->stats.tokens_in, pages * f->side.page_tokens);
    }
    end(p, f);
}

static void skip(pd *p, pd_fetch *f, pd_skip why) {
    pd_count(p, &p->stats.skipped[why], 1);
    end(p, f);
}

static void open_lease(pd *p, pd_note *note);

/* In the engine's lock, maybe. */
static void looked(hd_page_job *job) {
    pd_fetch *f = PD_OWNER(job, pd_fetch, look);
    f->prompt.pages = job->lacking;
    f->prompt.weights = job->weights;
    f->note.take = open_lease;
    pd_post(f->pd, &f->note);
}

/* ---- the lease ---- */

static void open_lease(pd *p, pd_note *note) {
    pd_fetch *f = PD_OWNER(note, pd_fetch, note);
    const uint32_t n = hd_page_range_size(&f->prompt.pages);
    if (f->cancelled) {
        end(p, f);
        return;
    }
    if (n == 0) {
        skip(p, f, PD_SKIP_CACHED);
        return;
    }
    const hd_lease_event e = {.kind = HD_LEASE_EV_OPEN,
                              .now_ns = (uint64_t)hd_now_ns(),
                              .peer = f->peer,
                              .request = f->request,
                              .time_ns = f->time_ns,
                              .n_tokens = (uint32_t)f->prompt.n_tokens,
                              .n_pages = n};
    p->opening = f;
    if (pd_raise(p, &e) != HD_OK) skip(p, f, PD_SKIP_FULL);
    p->opening = NULL;
}

void pd_say_reserve(pd *p, const hd_lease_action *a) {
    pd_fetch *f = p->opening;
    const size_t tokens = (size_t)f->prompt.n_tokens * sizeof *f->tokens;
    pd_out *o = pd_out_new(sizeof a->message + sizeof f->prompt + tokens);
    f->lease = a->id;
    p->fetch_of[a->id.slot] = f;
    if (o) {
        uint8_t *to = pd_out_payload(o);
        memcpy(to, &a->message, sizeof a->message);
        memcpy(to + sizeof a->message, &f->prompt, sizeof f->prompt);
        memcpy(to + sizeof a->message + sizeof f->prompt, f->tokens, tokens);
    }
    pd_peer_put(p, a->peer, PD_FRAME_RESERVE, o);
}

/* ---- pages ---- */

/* A page on its way into the cache. */
typedef struct place_job {
    hd_page_job job;
    pd_note note;
    pd_fetch *fetch;
    uint32_t page;
    uint8_t *payload;
} place_job;

static const uint8_t *page_of(const uint8_t *payload) {
    return payload + sizeof(hd_lease_message);
}

/* Returns the digest if the bytes are the page that the message names; else another number. */
static uint64_t digest_of(const pd_fetch *f, const hd_lease_message *m, const uint8_t *payload,
                          size_t n) {
    hd_page_head head;
    hd_kv_group group;
    memcpy(&head, page_of(payload), sizeof head);
    if (!f || m->page >= hd_page_range_size(&f->prompt.pages)) return ~m->digest;
    const int32_t page = hd_page_range_at(&f->prompt.pages, m->page, &group);
    const bool is_it = head.group == (uint32_t)group && head.page == (uint32_t)page;
    const bool whole =
        is_it && hd_handover_check(&f->side, page_of(payload), n - sizeof *m, NULL) == HD_OK;
    return whole ? head.digest : ~m->digest;
}

static void suspect(pd *p, int32_t peer) {
    const uint64_t wrong = hd_leases_suspicion(p->leases, peer);
    pd_peer *q = &p->peers[peer];
    if (wrong == q->suspicion) return;
    pthread_mutex_lock(&p->lock);
    q->suspicion = wrong;
    q->rest_until_ns = hd_now_ns() + 30LL * REST_NS;
    pthread_mutex_unlock(&p->lock);
}

/* Returns what is left of the payload to be freed, or NULL. */
uint8_t *pd_take_page(pd *p, int32_t peer, const hd_lease_message *m, uint8_t *payload,
                      size_t n) {
    const pd_fetch *f = m->to.slot < PD_LEASES ? p->fetch_of[m->to.slot] : NULL;
    if (f && f->lease.generation != m->to.generation) f = NULL;
    p->payload = payload;
    p->n_payload = n;
    pd_raise_message(p, peer, m, digest_of(f, m, payload, n));
    uint8_t *left = p->payload;
    p->payload = NULL;
    suspect(p, peer);
    return left;
}

static void written(pd *p, const pd_fetch *f, uint32_t page, hd_lease_reason failure) {
    hd_lease_event e = pd_event(HD_LEASE_EV_ABORT, f->lease);
    e.reason = failure;
    if (failure != HD_LEASE_DONE) pd_raise(p, &e);
    e = pd_event(HD_LEASE_EV_WRITTEN, f->lease);
    e.page = page;
    pd_raise(p, &e);
}

static void take_placed(pd *p, pd_note *note) {
    place_job *j = PD_OWNER(note, place_job, note);
    hd_lease_reason failure = HD_LEASE_DONE;
    p->placing -= j->job.n;
    if (j->job.status == HD_OK) {
        pd_count(p, &p->stats.pages_in, 1);
    } else {
        failure = j->job.status == HD_EINVAL ? HD_LEASE_WEIGHTS : HD_LEASE_ROOM;
    }
    written(p, j->fetch, j->page, failure);
    free(j->payload);
    free(j);
}

static void placed(hd_page_job *job) {
    place_job *j = PD_OWNER(job, place_job, job);
    pd_post(j->fetch->pd, &j->note);
}

void pd_write(pd *p, const hd_lease_action *a) {
    pd_fetch *f = p->fetch_of[a->id.slot];
    place_job *j = malloc(sizeof *j);
    if (!j) {
        written(p, f, a->page, HD_LEASE_ROOM);
        return;
    }
    *j = (place_job){
        .job = {.work = HD_PAGES_PLACE,
                .salt = f->side.salt,
                .tokens = f->tokens,
                .n_tokens = f->side.n_tokens,
                .message = page_of(p->payload),
                .n = p->n_payload - sizeof(hd_lease_message),
                .weights = f->prompt.weights,
                .done = placed},
        .note.take = take_placed,
        .fetch = f,
        .page = a->page,
        .payload = p->payload
    };
    p->payload = NULL;
    p->placing += j->job.n;
    hd_engine_post_job(p->engine, f->group, &j->job);
}

/* ---- the engine asks ---- */

static void begin(pd *p, pd_note *note) {
    pd_fetch *f = PD_OWNER(note, pd_fetch, note);
    f->next = p->fetches;
    p->fetches = f;
    f->prompt.n_tokens = f->side.n_tokens =
        hd_handover_pages(&f->side) * f->side.page_tokens + 1;
    f->look = (hd_page_job){.work = HD_PAGES_LOOK,
                            .salt = f->side.salt,
                            .tokens = f->tokens,
                            .n_tokens = f->side.n_tokens,
                            .done = looked};
    hd_engine_post_job(p->engine, f->group, &f->look);
}

/* Returns the server of this name, or why it is not asked. The caller holds the lock. */
static int32_t server_for(const pd *p, const char *name, pd_skip *why) {
    for (int32_t i = 0; i < PD_MAX_PEERS; i++) {
        const pd_peer *q = &p->peers[i];
        if (!q->name[0] || q->gone || strcmp(q->name, name) != 0) continue;
        *why = q->up ? PD_SKIP_SUSPECT : PD_SKIP_DOWN;
        return q->up && hd_now_ns() >= q->rest_until_ns ? i : -1;
    }
    *why = PD_SKIP_UNKNOWN;
    return -1;
}

const char *pd_name_to_fetch_from(const pd *p, int32_t peer) {
    for (int32_t i = 0; i < PD_MAX_PEERS; i++) {
        const pd_peer *q = &p->peers[i];
        if (q->up && !q->gone && q->epoch == p->peers[peer].epoch) return q->name;
    }
    return NULL;
}

/* Of a prompt that is computed for another server only what lies there is fetched, in half of the
 * time that is left: the other half is for computing it. */
static void limit_to_what_lies_there(const pd *p, const pd_send *s, pd_fetch *f) {
    const uint64_t now = (uint64_t)hd_now_ns();
    const uint64_t deadline = hd_leases_at(p->leases, (int32_t)s->lease.slot)->deadline_ns;
    f->time_ns = deadline > now ? (deadline - now) / 2 : 0;
    f->side.n_tokens = s->prompt.pages.first[HD_KV_FULL] * p->side.page_tokens + 1;
}

static bool fetch(void *ctx, const hd_page_wish *w) {
    pd *p = ctx;
    /* other threads submit the requests of clients */
    const pd_send *sending = pthread_equal(pthread_self(), p->thread) ? p->starting : NULL;
    pd_skip why = PD_SKIP_FULL;
    pthread_mutex_lock(&p->lock);
    p->stats.asked++;
    const int32_t peer = server_for(p, w->server, &why);
    const size_t tokens = (size_t)w->n_tokens * sizeof *w->tokens;
    pd_fetch *f = peer < 0 || p->closing ? NULL : calloc(1, sizeof *f + tokens);
    if (!f) {
        p->stats.skipped[why]++;
    } else {
        f->note.take = begin;
        f->pd = p;
        f->request = w->id;
        f->peer = peer;
        f->group = w->group;
        f->since_ns = hd_now_ns();
        f->time_ns = (uint64_t)p->o.limit_ms * 1000000;
        f->prompt.salt = w->salt;
        f->side = p->side;
        f->side.salt = w->salt;
        f->side.tokens = f->tokens;
        f->side.n_tokens = w->n_tokens;
        f->prompt.priority = w->priority;
        snprintf(f->prompt.trace_id, sizeof f->prompt.trace_id, "%s", w->trace_id);
        memcpy(f->tokens, w->tokens, tokens);
        if (sending) limit_to_what_lies_there(p, sending, f);
    }
    pthread_mutex_unlock(&p->lock);
    if (f) pd_post(p, &f->note);
    return f != NULL;
}

typedef struct cancelled_note {
    pd_note note;
    uint64_t request;
} cancelled_note;

static void take_cancelled(pd *p, pd_note *note) {
    const cancelled_note *c = PD_OWNER(note, cancelled_note, note);
    pd_fetch *f = p->fetches;
    while (f && f->request != c->request) f = f->next;
    if (f) f->cancelled = true;
    if (f && f->lease.generation) {
        hd_lease_event e = pd_event(HD_LEASE_EV_ABORT, f->lease);
        e.reason = HD_LEASE_CANCEL;
        pd_raise(p, &e);
    }
    free(note);
}

/* Without memory for the note the lease ends by itself. */
static void cancelled(void *ctx, uint64_t id) {
    cancelled_note *c = malloc(sizeof *c);
    if (!c) return;
    *c = (cancelled_note){.note.take = take_cancelled, .request = id};
    pd_post(ctx, &c->note);
}

hd_page_source pd_source(pd *p) {
    return (hd_page_source){.ctx = p, .fetch = fetch, .cancelled = cancelled};
}
