/* send.c - the side that computes for others: runs their prompts as requests of its own, and sends
 * the pages as steps complete them. */
#include <stdlib.h>
#include <string.h>

#include "base/progress.h"
#include "pd/pd_internal.h"

enum { MAX_QUEUED = 256 << 20 }; /* bytes that wait for a slow server, before it gets no more */

/* ---- the prompt ---- */

hd_status pd_take_reserve(pd *p, int32_t peer, const hd_lease_message *m, uint8_t *payload,
                          size_t n, hd_err *err) {
    pd_prompt prompt;
    const int32_t *tokens;
    HD_TRY(pd_prompt_read(&prompt, &tokens, payload, n, (int32_t)p->hello.facts.page_tokens,
                          p->vocab, err));
    p->payload = payload;
    p->n_payload = n;
    pd_raise_message(p, peer, m, 0);
    p->payload = NULL;
    return HD_OK;
}

static void drop_if_over(pd *p, pd_send *s) {
    if (!s->released || !s->finished) return;
    p->n_sends--;
    free(s);
}

static void raise_abort(pd *p, hd_lease_id lease, hd_lease_reason reason) {
    hd_lease_event e = pd_event(HD_LEASE_EV_ABORT, lease);
    e.reason = reason;
    pd_raise(p, &e);
}

/* The request has had its last event: either all pages have left, or they never will. */
static void take_ended(pd *p, pd_note *note) {
    pd_send *s = PD_OWNER(note, pd_send, ended);
    if (!s->released && s->n_exported < hd_page_range_size(&s->prompt.pages)) {
        raise_abort(p, s->lease, s->failure == HD_LEASE_DONE ? HD_LEASE_CANCEL : s->failure);
    }
    s->finished = true;
    drop_if_over(p, s);
}

/* On the polling thread. */
static void on_event(void *user, const hd_event *e) {
    pd_send *s = user;
    if (e->last) pd_post(s->pd, &s->ended);
}

static void *room(void *ctx, size_t n);
static void exported(void *ctx, hd_status st);

/* The other side has the pages before those that it asks for, maybe of an answer that it decoded.
 * Those of them that lack here are fetched from there, where that may be; NULL: it may not. */
static const char *holder_of(const pd *p, const pd_send *s) {
    return s->prompt.pages.first[HD_KV_FULL] ? pd_name_to_fetch_from(p, s->peer) : NULL;
}

static hd_status start(pd *p, pd_send *s) {
    const hd_request g = {.size = sizeof g,
                          .tokens = s->tokens,
                          .n_tokens = (size_t)s->prompt.n_tokens,
                          .max_tokens = 1,
                          .unparsed = true,
                          .priority = s->prompt.priority,
                          .salt = s->prompt.salt,
                          .prefill = holder_of(p, s),
                          .trace_id = s->prompt.trace_id,
                          .on_event = on_event,
                          .user = s};
    const hd_page_watch watch = {.ctx = s,
                                 .pages = s->prompt.pages,
                                 .weights = s->prompt.weights,
                                 .room = room,
                                 .exported = exported};
    p->starting = s;
    const hd_status st = hd_engine_submit_watched(p->engine, &s->request, &g, &watch, NULL);
    p->starting = NULL;
    if (st == HD_OK) p->o.submitted(p->o.ctx);
    return st;
}

/* The payload is that of the RESERVE, which was checked. */
void pd_prefill(pd *p, const hd_lease_action *a) {
    pd_prompt prompt;
    const uint8_t *from = p->payload + sizeof(hd_lease_message);
    memcpy(&prompt, from, sizeof prompt);
    const size_t tokens = (size_t)prompt.n_tokens * sizeof(int32_t);
    pd_send *s = calloc(1, sizeof *s + tokens);
    if (!s) {
        raise_abort(p, a->id, HD_LEASE_BUSY);
        return;
    }
    s->pd = p;
    s->ended.take = take_ended;
    s->peer = a->peer;
    s->lease = a->id;
    s->since_ns = hd_now_ns();
    s->prompt = prompt;
    memcpy(s->tokens, from + sizeof prompt, tokens);
    p->n_sends++;
    p->send_of[a->id.slot] = s;
    s->finished = start(p, s) != HD_OK;
    if (s->finished) {
        raise_abort(p, a->id, HD_LEASE_BUSY);
    } else {
        const hd_lease_event e = pd_event(HD_LEASE_EV_ACCEPT, a->id);
        pd_raise(p, &e);
    }
}

/* ---- pages: on the step thread, or in the engine's lock ---- */

/* A page on its way to the connection. */
typedef struct pd_piece {
    pd_note note;
    pd_send *send;
    pd_out *out;
    uint32_t page;
} pd_piece;

/* Of a lease that has ended meanwhile nothing is sent; what the send was may be gone. */
static void take_piece(pd *p, pd_note *note) {
    pd_piece *x = PD_OWNER(note, pd_piece, note);
    const pd_send *s = x->send;
    if (!s->released && p->peers[s->peer].link.queued > MAX_QUEUED) {
        raise_abort(p, s->lease, HD_LEASE_BUSY);
    }
    if (!s->released) {
        hd_lease_event e = pd_event(HD_LEASE_EV_COMPUTED, s->lease);
        e.n_pages = x->page + 1;
        p->piece = x->out;
        pd_raise(p, &e);
        x->out = p->piece;
        p->piece = NULL;
    }
    free(x->out);
    free(x);
}

static void *room(void *ctx, size_t n) {
    pd_send *s = ctx;
    if (atomic_load(&s->stop)) return NULL;
    pd_piece *x = malloc(sizeof *x);
    pd_out *o = x ? pd_out_new(sizeof(hd_lease_message) + n) : NULL;
    if (!o) {
        s->failure = HD_LEASE_ROOM;
        free(x);
        return NULL;
    }
    *x = (pd_piece){.note.take = take_piece, .send = s, .out = o, .page = s->n_exported};
    s->piece = x;
    return (uint8_t *)pd_out_payload(o) + sizeof(hd_lease_message);
}

/* After a failure the end of the request says so. */
static void exported(void *ctx, hd_status st) {
    pd_send *s = ctx;
    pd_piece *x = s->piece;
    s->piece = NULL;
    if (st == HD_OK) {
        s->n_exported++;
        pd_post(s->pd, &x->note);
        return;
    }
    s->failure = st == HD_EINVAL ? HD_LEASE_WEIGHTS : HD_LEASE_ROOM;
    free(x->out);
    free(x);
}

/* ---- pages: on the thread of the leases ---- */

/* One page at a time becomes final. Once it is queued, it is sent as far as the cache is
 * concerned: it was copied. */
void pd_send_pages(pd *p, const hd_lease_action *a) {
    uint8_t *to = pd_out_payload(p->piece);
    hd_lease_message m = a->message;
    hd_page_head head;
    memcpy(&head, to + sizeof m, sizeof head);
    m.page = a->page;
    m.digest = head.digest;
    memcpy(to, &m, sizeof m);
    pd_peer_put(p, a->peer, PD_FRAME_PAGE, p->piece);
    p->piece = NULL;
    pd_count(p, &p->stats.pages_out, 1);
    hd_lease_event e = pd_event(HD_LEASE_EV_SENT, a->id);
    e.n_pages = a->n_pages;
    pd_raise(p, &e);
}

void pd_send_over(pd *p, pd_send *s, hd_lease_reason reason) {
    const int64_t ns = hd_now_ns() - s->since_ns;
    pd_log_end(p, "pages_sent", s->lease, s->prompt.trace_id, reason, ns);
    p->send_of[s->lease.slot] = NULL;
    s->released = true;
    atomic_store(&s->stop, true);
    if (!s->finished) hd_engine_cancel(p->engine, s->request);
    drop_if_over(p, s);
}
