/* lease.c - the state machine of lease.h.
 *
 * All state lies in one block: the head, then peers, leases, the generations that peers have
 * used, the arrival marks of pages, and the actions of the last event. */
#include "kv/lease.h"

#include <assert.h>
#include <string.h>

typedef struct lease_peer {
    uint64_t epoch; /* 0: never seen */
    uint64_t suspicion;
    int32_t n_asked; /* open leases that this peer asked for */
    bool is_up;
} lease_peer;

/* Of a receiver's page. */
enum { PAGE_ABSENT, PAGE_WRITING, PAGE_WRITTEN };

struct hd_leases {
    hd_lease_options o;
    uint64_t generation; /* of the last lease that was opened */
    uint32_t n_actions, n_taken;
    hd_lease_counts counts;
};

/* Where the parts of the block begin. */
typedef struct lease_parts {
    size_t peers, leases, seen, actions, pages, bytes;
} lease_parts;

static lease_parts parts_of(const hd_lease_options *o) {
    const size_t n_peers = (size_t)o->max_peers, n_leases = (size_t)o->max_leases;
    lease_parts p = {.peers = sizeof(hd_leases)};
    p.leases = p.peers + n_peers * sizeof(lease_peer);
    p.seen = p.leases + n_leases * sizeof(hd_lease);
    p.actions = p.seen + n_peers * n_leases * sizeof(uint64_t);
    p.pages = p.actions + (2 * n_leases + 2) * sizeof(hd_lease_action);
    p.bytes = p.pages + n_leases * (size_t)o->max_pages;
    return p;
}

static void *part(const hd_leases *l, size_t offset) {
    return (char *)(uintptr_t)l + offset;
}

static lease_peer *peer_at(const hd_leases *l, int32_t peer) {
    return (lease_peer *)part(l, parts_of(&l->o).peers) + peer;
}

static hd_lease *lease_at(const hd_leases *l, int32_t slot) {
    return (hd_lease *)part(l, parts_of(&l->o).leases) + slot;
}

/* The highest generation that a slot of a peer has used to ask for a lease. */
static uint64_t *seen_at(const hd_leases *l, int32_t peer, uint32_t slot) {
    return (uint64_t *)part(l, parts_of(&l->o).seen) + (size_t)peer * (size_t)l->o.max_leases +
           slot;
}

static void forget_seen(hd_leases *l, int32_t peer) {
    memset(seen_at(l, peer, 0), 0, (size_t)l->o.max_leases * sizeof(uint64_t));
}

static hd_lease_action *action_at(const hd_leases *l, uint32_t i) {
    return (hd_lease_action *)part(l, parts_of(&l->o).actions) + i;
}

static uint8_t *pages_of(const hd_leases *l, const hd_lease *lease) {
    return (uint8_t *)part(l, parts_of(&l->o).pages) +
           (size_t)lease->id.slot * (size_t)l->o.max_pages;
}

size_t hd_leases_bytes(const hd_lease_options *o) {
    const bool fits = o->epoch > 0 && o->max_leases > 0 && o->max_leases <= HD_LEASE_MAX &&
                      o->max_per_peer > 0 && o->max_peers > 0 && o->max_peers <= HD_LEASE_MAX &&
                      o->max_pages > 0;
    return fits ? parts_of(o).bytes : 0;
}

hd_leases *hd_leases_place(void *memory, const hd_lease_options *o) {
    hd_leases *l = memory;
    l->o = *o;
    return l;
}

const char *hd_lease_state_name(hd_lease_state state) {
    static const char *const names[HD_N_LEASE_STATES] = {
        "free", "reserved", "granted", "sending", "committed", "aborting", "owned"};
    return names[state];
}

const char *hd_lease_reason_name(hd_lease_reason reason) {
    static const char *const names[] = {"done",    "cancel", "deadline", "hole",    "peer",
                                        "busy",    "type",   "epoch",    "unknown", "stale",
                                        "state",   "range",  "repeated", "count",   "digest",
                                        "weights", "room"};
    return (size_t)reason < HD_LEN(names) ? names[reason] : "unknown";
}

static bool is_open(const hd_lease *lease) {
    return lease->state != HD_LEASE_FREE && lease->state != HD_LEASE_OWNED;
}

static bool same_id(hd_lease_id a, hd_lease_id b) {
    return a.generation == b.generation && a.slot == b.slot;
}

static hd_status discard(hd_leases *l, hd_lease_reason reason) {
    l->counts.discarded[reason]++;
    return HD_EFORMAT;
}

static hd_lease_action *act(hd_leases *l, hd_lease_action_kind kind, const hd_lease *lease) {
    hd_lease_action *a = action_at(l, l->n_actions++);
    *a = (hd_lease_action){.kind = kind,
                           .peer = lease->peer,
                           .id = lease->id,
                           .request = lease->request,
                           .reason = lease->reason};
    return a;
}

static hd_lease_message head_of(const hd_leases *l, hd_lease_message_kind kind, int32_t peer,
                                hd_lease_id from, hd_lease_id to) {
    return (hd_lease_message){.kind = kind,
                              .from_epoch = l->o.epoch,
                              .to_epoch = peer_at(l, peer)->epoch,
                              .from = from,
                              .to = to};
}

/* Queues a message to a peer and returns it, to be completed. */
static hd_lease_message *send(hd_leases *l, hd_lease_message_kind kind, int32_t peer,
                              hd_lease_id from, hd_lease_id to) {
    hd_lease_action *a = action_at(l, l->n_actions++);
    *a = (hd_lease_action){.kind = HD_LEASE_DO_SEND, .peer = peer, .id = from};
    a->message = head_of(l, kind, peer, from, to);
    return &a->message;
}

static hd_lease_message *send_of(hd_leases *l, hd_lease_message_kind kind,
                                 const hd_lease *lease) {
    return send(l, kind, lease->peer, lease->id, lease->peer_id);
}

static void answer_gone(hd_leases *l, int32_t peer, const hd_lease_message *to,
                        hd_lease_reason reason) {
    send(l, HD_LEASE_MSG_GONE, peer, to->to, to->from)->reason = reason;
}

/* ABORTING to QUIESCED to FREE, once no copy touches a page. */
static void release_if_quiet(hd_leases *l, hd_lease *lease) {
    if (lease->state != HD_LEASE_ABORTING || lease->n_moving > 0) return;
    act(l, HD_LEASE_DO_RELEASE, lease);
    lease->state = HD_LEASE_FREE;
    if (!lease->is_receiver) peer_at(l, lease->peer)->n_asked--;
}

static void abort_lease(hd_leases *l, hd_lease *lease, hd_lease_reason reason,
                        bool tells_peer) {
    if (!is_open(lease) || lease->state == HD_LEASE_ABORTING) return;
    lease->state = HD_LEASE_ABORTING;
    lease->reason = reason;
    l->counts.aborted[reason]++;
    if (tells_peer) send_of(l, HD_LEASE_MSG_ABORT, lease)->reason = reason;
    release_if_quiet(l, lease);
}

/* What a peer sent is wrong: its lease ends, and it is remembered. */
static hd_status accuse(hd_leases *l, hd_lease *lease, hd_lease_reason reason) {
    peer_at(l, lease->peer)->suspicion++;
    abort_lease(l, lease, reason, true);
    return discard(l, reason);
}

static void abort_all_of(hd_leases *l, int32_t peer) {
    for (int32_t i = 0; i < l->o.max_leases; i++) {
        hd_lease *lease = lease_at(l, i);
        if (lease->peer == peer) abort_lease(l, lease, HD_LEASE_PEER, false);
    }
}

/* Takes a free slot; NULL: there is none. */
static hd_lease *open_lease(hd_leases *l, bool is_receiver, uint64_t now_ns, uint64_t time_ns) {
    for (int32_t i = 0; i < l->o.max_leases; i++) {
        hd_lease *lease = lease_at(l, i);
        if (is_open(lease)) continue;
        const uint64_t time = time_ns < l->o.max_time_ns ? time_ns : l->o.max_time_ns;
        *lease = (hd_lease){
            .id = {.generation = ++l->generation, .slot = (uint32_t)i},
            .deadline_ns = now_ns < UINT64_MAX - time ? now_ns + time : UINT64_MAX - 1,
            .state = HD_LEASE_RESERVED,
            .is_receiver = is_receiver
        };
        memset(pages_of(l, lease), PAGE_ABSENT, (size_t)l->o.max_pages);
        l->counts.opened[is_receiver]++;
        return lease;
    }
    return NULL;
}

static hd_status on_open(hd_leases *l, const hd_lease_event *e) {
    if (e->n_pages < 1 || e->n_pages > (uint32_t)l->o.max_pages) return HD_EINVAL;
    if (!peer_at(l, e->peer)->is_up) return HD_EAGAIN;
    hd_lease *lease = open_lease(l, true, e->now_ns, e->time_ns);
    if (!lease) return HD_EAGAIN;
    lease->peer = e->peer;
    lease->request = e->request;
    lease->n_tokens = e->n_tokens;
    lease->n_pages = e->n_pages;
    hd_lease_message *m = send_of(l, HD_LEASE_MSG_RESERVE, lease);
    m->request = e->request;
    m->time_ns = lease->deadline_ns - e->now_ns;
    m->n_tokens = e->n_tokens;
    m->n_pages = e->n_pages;
    return HD_OK;
}

static hd_status refuse(hd_leases *l, const hd_lease_event *e, hd_lease_reason reason) {
    answer_gone(l, e->peer, e->message, reason);
    return discard(l, reason);
}

static hd_status on_reserve(hd_leases *l, const hd_lease_event *e) {
    const hd_lease_message *m = e->message;
    if (m->from.slot >= (uint32_t)l->o.max_leases) return discard(l, HD_LEASE_UNKNOWN);
    uint64_t *seen = seen_at(l, e->peer, m->from.slot);
    if (m->from.generation <= *seen) return discard(l, HD_LEASE_STALE);
    *seen = m->from.generation;
    if (m->n_pages < 1 || m->n_pages > (uint32_t)l->o.max_pages) {
        return refuse(l, e, HD_LEASE_COUNT);
    }
    lease_peer *peer = peer_at(l, e->peer);
    if (peer->n_asked >= l->o.max_per_peer) return refuse(l, e, HD_LEASE_BUSY);
    hd_lease *lease = open_lease(l, false, e->now_ns, m->time_ns);
    if (!lease) return refuse(l, e, HD_LEASE_BUSY);
    peer->n_asked++;
    lease->peer = e->peer;
    lease->peer_id = m->from;
    lease->request = m->request;
    lease->n_tokens = m->n_tokens;
    lease->n_pages = m->n_pages;
    act(l, HD_LEASE_DO_PREFILL, lease)->n_pages = m->n_pages;
    return HD_OK;
}

static hd_status on_grant(hd_leases *l, hd_lease *lease) {
    if (lease->state != HD_LEASE_RESERVED) return discard(l, HD_LEASE_STATE);
    lease->state = HD_LEASE_GRANTED;
    return HD_OK;
}

static hd_status on_page(hd_leases *l, hd_lease *lease, const hd_lease_event *e) {
    const hd_lease_message *m = e->message;
    if (lease->state == HD_LEASE_ABORTING) return discard(l, HD_LEASE_STATE);
    if (m->page >= lease->n_pages) return accuse(l, lease, HD_LEASE_RANGE);
    uint8_t *page = pages_of(l, lease) + m->page;
    if (*page != PAGE_ABSENT) return discard(l, HD_LEASE_REPEATED);
    if (m->digest != e->digest) return accuse(l, lease, HD_LEASE_DIGEST);
    *page = PAGE_WRITING;
    lease->n_moving++;
    if (lease->state != HD_LEASE_COMMITTED) lease->state = HD_LEASE_SENDING;
    act(l, HD_LEASE_DO_WRITE, lease)->page = m->page;
    return HD_OK;
}

/* COMMITTED to OWNED, once every page lies in its place. */
static void own_if_complete(hd_leases *l, hd_lease *lease) {
    if (lease->state != HD_LEASE_COMMITTED || lease->n_done < lease->n_pages) return;
    lease->state = HD_LEASE_OWNED;
    l->counts.owned[true]++;
    send_of(l, HD_LEASE_MSG_OWNED, lease);
    act(l, HD_LEASE_DO_OWN, lease);
}

static hd_status on_commit(hd_leases *l, hd_lease *lease, const hd_lease_message *m) {
    if (lease->state == HD_LEASE_ABORTING || lease->state == HD_LEASE_COMMITTED) {
        return discard(l, HD_LEASE_STATE);
    }
    if (m->n_pages != lease->n_pages || m->n_tokens != lease->n_tokens) {
        return accuse(l, lease, HD_LEASE_COUNT);
    }
    lease->state = HD_LEASE_COMMITTED;
    own_if_complete(l, lease);
    return HD_OK;
}

static hd_status on_owned(hd_leases *l, hd_lease *lease) {
    if (lease->state != HD_LEASE_COMMITTED) return discard(l, HD_LEASE_STATE);
    lease->state = HD_LEASE_OWNED;
    l->counts.owned[false]++;
    peer_at(l, lease->peer)->n_asked--;
    act(l, HD_LEASE_DO_RELEASE, lease);
    return HD_OK;
}

/* The other side has ended the lease, for a reason of its own. */
static hd_status on_end(hd_leases *l, hd_lease *lease, const hd_lease_message *m) {
    const bool is_reason = m->reason > HD_LEASE_DONE && m->reason < HD_N_LEASE_REASONS;
    abort_lease(l, lease, is_reason ? (hd_lease_reason)m->reason : HD_LEASE_CANCEL, false);
    return HD_OK;
}

/* Finds the open lease that a message is about; else says why there is none. */
static hd_lease *find(const hd_leases *l, int32_t peer, const hd_lease_message *m,
                      hd_lease_reason *why) {
    *why = HD_LEASE_UNKNOWN;
    if (m->to.generation == 0) { /* the receiver has not heard of the sender's lease yet */
        for (int32_t i = 0; i < l->o.max_leases; i++) {
            hd_lease *lease = lease_at(l, i);
            const bool is_its = is_open(lease) && !lease->is_receiver && lease->peer == peer;
            if (is_its && same_id(lease->peer_id, m->from)) return lease;
        }
        return NULL;
    }
    if (m->to.slot >= (uint32_t)l->o.max_leases) return NULL;
    hd_lease *lease = lease_at(l, (int32_t)m->to.slot);
    const bool is_its = lease->id.generation == m->to.generation && lease->peer == peer;
    const bool is_its_peer = lease->peer_id.generation == 0 || same_id(lease->peer_id, m->from);
    *why = is_its ? HD_LEASE_STATE : HD_LEASE_STALE;
    return is_its && is_its_peer && is_open(lease) ? lease : NULL;
}

/* A COMMIT that is repeated after its lease was owned has the answer of the first. */
static bool was_owned(const hd_leases *l, int32_t peer, const hd_lease_message *m) {
    if (m->kind != HD_LEASE_MSG_COMMIT || m->to.slot >= (uint32_t)l->o.max_leases) return false;
    const hd_lease *lease = lease_at(l, (int32_t)m->to.slot);
    return lease->state == HD_LEASE_OWNED && lease->is_receiver && lease->peer == peer &&
           same_id(lease->id, m->to) && same_id(lease->peer_id, m->from);
}

static hd_status without_lease(hd_leases *l, const hd_lease_event *e, hd_lease_reason why) {
    const hd_lease_message *m = e->message;
    if (was_owned(l, e->peer, m)) {
        send(l, HD_LEASE_MSG_OWNED, e->peer, m->to, m->from);
    } else if (m->kind != HD_LEASE_MSG_OWNED && m->kind != HD_LEASE_MSG_GONE) {
        answer_gone(l, e->peer, m, why);
    }
    /* An ABORT that overtook its RESERVE: the RESERVE comes too late. */
    if (m->kind == HD_LEASE_MSG_ABORT && m->to.generation == 0 &&
        m->from.slot < (uint32_t)l->o.max_leases) {
        uint64_t *seen = seen_at(l, e->peer, m->from.slot);
        if (*seen < m->from.generation) *seen = m->from.generation;
    }
    return discard(l, why);
}

static hd_status on_message(hd_leases *l, const hd_lease_event *e) {
    const hd_lease_message *m = e->message;
    const lease_peer *peer = peer_at(l, e->peer);
    const bool is_now = m->from_epoch == peer->epoch && m->to_epoch == l->o.epoch;
    if (!peer->is_up || !is_now) return discard(l, HD_LEASE_EPOCH);
    if (m->kind == HD_LEASE_MSG_RESERVE) return on_reserve(l, e);
    if (m->kind > HD_LEASE_MSG_GONE || m->kind == 0) return discard(l, HD_LEASE_TYPE);
    hd_lease_reason why;
    hd_lease *lease = find(l, e->peer, m, &why);
    if (!lease) return without_lease(l, e, why);
    const bool ends = m->kind == HD_LEASE_MSG_ABORT || m->kind == HD_LEASE_MSG_GONE;
    const bool is_for_sender = m->kind == HD_LEASE_MSG_OWNED;
    if (!ends && is_for_sender == lease->is_receiver) return discard(l, HD_LEASE_STATE);
    lease->peer_id = m->from;
    switch ((hd_lease_message_kind)m->kind) {
    case HD_LEASE_MSG_GRANT:
        return on_grant(l, lease);
    case HD_LEASE_MSG_PAGE:
        return on_page(l, lease, e);
    case HD_LEASE_MSG_COMMIT:
        return on_commit(l, lease, m);
    case HD_LEASE_MSG_OWNED:
        return on_owned(l, lease);
    case HD_LEASE_MSG_ABORT:
        answer_gone(l, e->peer, m, HD_LEASE_CANCEL);
        break;
    case HD_LEASE_MSG_RESERVE:
    case HD_LEASE_MSG_GONE:
        break;
    }
    return on_end(l, lease, m);
}

static hd_status on_hello(hd_leases *l, const hd_lease_event *e) {
    lease_peer *peer = peer_at(l, e->peer);
    if (e->epoch == 0 || e->epoch < peer->epoch) return discard(l, HD_LEASE_EPOCH);
    if (e->epoch > peer->epoch) {
        abort_all_of(l, e->peer);
        forget_seen(l, e->peer);
    }
    peer->epoch = e->epoch;
    peer->is_up = true;
    return HD_OK;
}

static void on_tick(hd_leases *l, uint64_t now_ns) {
    for (int32_t i = 0; i < l->o.max_leases; i++) {
        hd_lease *lease = lease_at(l, i);
        if (!is_open(lease) || now_ns < lease->deadline_ns) continue;
        const bool has_hole = lease->is_receiver && lease->state == HD_LEASE_COMMITTED;
        abort_lease(l, lease, has_hole ? HD_LEASE_HOLE : HD_LEASE_DEADLINE, true);
    }
}

static hd_status on_accept(hd_leases *l, hd_lease *lease) {
    if (lease->is_receiver || lease->state != HD_LEASE_RESERVED) {
        return discard(l, HD_LEASE_STATE);
    }
    lease->state = HD_LEASE_GRANTED;
    send_of(l, HD_LEASE_MSG_GRANT, lease);
    return HD_OK;
}

static hd_status on_computed(hd_leases *l, hd_lease *lease, uint32_t n_pages) {
    const bool sends = lease->state == HD_LEASE_GRANTED || lease->state == HD_LEASE_SENDING;
    if (lease->is_receiver || !sends) return discard(l, HD_LEASE_STATE);
    if (n_pages > lease->n_pages || n_pages < lease->n_computed) {
        return discard(l, HD_LEASE_COUNT);
    }
    if (n_pages == lease->n_computed) return HD_OK;
    hd_lease_action *a = act(l, HD_LEASE_DO_PAGES, lease);
    a->page = lease->n_computed;
    a->n_pages = n_pages - lease->n_computed;
    a->message = head_of(l, HD_LEASE_MSG_PAGE, lease->peer, lease->id, lease->peer_id);
    lease->state = HD_LEASE_SENDING;
    lease->n_moving += a->n_pages;
    lease->n_computed = n_pages;
    return HD_OK;
}

static hd_status on_sent(hd_leases *l, hd_lease *lease, uint32_t n_pages) {
    if (lease->is_receiver || n_pages > lease->n_moving) return discard(l, HD_LEASE_COUNT);
    lease->n_moving -= n_pages;
    lease->n_done += n_pages;
    release_if_quiet(l, lease);
    if (lease->state != HD_LEASE_SENDING || lease->n_done < lease->n_pages) return HD_OK;
    lease->state = HD_LEASE_COMMITTED;
    hd_lease_message *m = send_of(l, HD_LEASE_MSG_COMMIT, lease);
    m->n_tokens = lease->n_tokens;
    m->n_pages = lease->n_pages;
    return HD_OK;
}

static hd_status on_written(hd_leases *l, hd_lease *lease, uint32_t page) {
    if (!lease->is_receiver || page >= lease->n_pages) return discard(l, HD_LEASE_RANGE);
    uint8_t *mark = pages_of(l, lease) + page;
    if (*mark != PAGE_WRITING) return discard(l, HD_LEASE_REPEATED);
    *mark = PAGE_WRITTEN;
    lease->n_moving--;
    lease->n_done++;
    release_if_quiet(l, lease);
    own_if_complete(l, lease);
    return HD_OK;
}

/* Events of the owner of a lease. One that comes after its end only counts. */
static hd_status on_owner(hd_leases *l, const hd_lease_event *e) {
    if (e->id.slot >= (uint32_t)l->o.max_leases) return discard(l, HD_LEASE_UNKNOWN);
    hd_lease *lease = lease_at(l, (int32_t)e->id.slot);
    if (!same_id(lease->id, e->id) || !is_open(lease)) return discard(l, HD_LEASE_STALE);
    if (e->kind == HD_LEASE_EV_ACCEPT) return on_accept(l, lease);
    if (e->kind == HD_LEASE_EV_COMPUTED) return on_computed(l, lease, e->n_pages);
    if (e->kind == HD_LEASE_EV_SENT) return on_sent(l, lease, e->n_pages);
    if (e->kind == HD_LEASE_EV_WRITTEN) return on_written(l, lease, e->page);
    abort_lease(l, lease, e->reason, true);
    return HD_OK;
}

hd_status hd_leases_step(hd_leases *l, const hd_lease_event *e) {
    assert(l->n_taken == l->n_actions && e->peer >= 0 && e->peer < l->o.max_peers);
    l->n_taken = l->n_actions = 0;
    switch (e->kind) {
    case HD_LEASE_EV_OPEN:
        return on_open(l, e);
    case HD_LEASE_EV_MESSAGE:
        return on_message(l, e);
    case HD_LEASE_EV_HELLO:
        return on_hello(l, e);
    case HD_LEASE_EV_LOST:
        peer_at(l, e->peer)->is_up = false;
        abort_all_of(l, e->peer);
        return HD_OK;
    case HD_LEASE_EV_TICK:
        on_tick(l, e->now_ns);
        return HD_OK;
    case HD_LEASE_EV_ACCEPT:
    case HD_LEASE_EV_COMPUTED:
    case HD_LEASE_EV_SENT:
    case HD_LEASE_EV_WRITTEN:
    case HD_LEASE_EV_ABORT:
        break;
    }
    return on_owner(l, e);
}

bool hd_leases_take(hd_leases *l, hd_lease_action *out) {
    if (l->n_taken == l->n_actions) return false;
    *out = *action_at(l, l->n_taken++);
    return true;
}

const hd_lease *hd_leases_at(const hd_leases *l, int32_t slot) {
    assert(slot >= 0 && slot < l->o.max_leases);
    return lease_at(l, slot);
}

uint64_t hd_leases_next_deadline(const hd_leases *l) {
    uint64_t next = UINT64_MAX;
    for (int32_t i = 0; i < l->o.max_leases; i++) {
        const hd_lease *lease = lease_at(l, i);
        const bool waits = is_open(lease) && lease->state != HD_LEASE_ABORTING;
        if (waits && lease->deadline_ns < next) next = lease->deadline_ns;
    }
    return next;
}

hd_status hd_leases_forget(hd_leases *l, int32_t peer) {
    if (peer_at(l, peer)->is_up) return HD_EAGAIN;
    for (int32_t i = 0; i < l->o.max_leases; i++) {
        hd_lease *lease = lease_at(l, i);
        if (lease->peer != peer) continue;
        if (is_open(lease)) return HD_EAGAIN;
        lease->peer_id = (hd_lease_id){0}; /* no answer of its last lease is repeated */
    }
    *peer_at(l, peer) = (lease_peer){0};
    forget_seen(l, peer);
    return HD_OK;
}

uint64_t hd_leases_suspicion(const hd_leases *l, int32_t peer) {
    return peer_at(l, peer)->suspicion;
}

hd_lease_counts hd_leases_read_counts(const hd_leases *l) {
    return l->counts;
}

static uint32_t count_marks(const hd_leases *l, const hd_lease *lease, uint8_t mark) {
    uint32_t n = 0;
    for (uint32_t p = 0; p < lease->n_pages; p++) n += pages_of(l, lease)[p] == mark;
    return n;
}

hd_status hd_leases_check(const hd_leases *l, bool idle, hd_err *err) {
    int32_t n_open = 0, n_asked = 0;
    for (int32_t i = 0; i < l->o.max_leases; i++) {
        const hd_lease *lease = lease_at(l, i);
        if (!is_open(lease)) continue;
        n_open++;
        n_asked += !lease->is_receiver;
        const uint32_t moving = lease->is_receiver ? count_marks(l, lease, PAGE_WRITING)
                                                   : lease->n_computed - lease->n_done;
        if (moving != lease->n_moving || lease->n_moving + lease->n_done > lease->n_pages) {
            return HD_FAIL(err, HD_EINVAL, "lease %d has %u pages moving, but counts %u", i,
                           moving, lease->n_moving);
        }
        if (lease->state == HD_LEASE_ABORTING && moving == 0) {
            return HD_FAIL(err, HD_EINVAL, "lease %d is quiet and was not released", i);
        }
    }
    for (int32_t p = 0; p < l->o.max_peers; p++) n_asked -= peer_at(l, p)->n_asked;
    if (n_asked != 0) return HD_FAIL(err, HD_EINVAL, "%d leases asked by no peer", n_asked);
    if (idle && n_open > 0) return HD_FAIL(err, HD_EINVAL, "%d leases are open", n_open);
    return HD_OK;
}
