/* lease_world.c - see lease_world.h. */
#include "lease_world.h"

#include <stdlib.h>
#include <string.h>

#include "base/checksum.h"

static hd_leases *machine(const world *w, int32_t server) {
    return (hd_leases *)(uintptr_t)w->server[server].machine;
}

static void fail(world *w, const char *what) {
    if (!w->wrong) w->wrong = what;
}

static uint64_t mix(uint64_t a, uint64_t b) {
    a = (a ^ b) * 0x9E3779B97F4A7C15u;
    return a ^ a >> 29;
}

/* What a page of a request holds. */
static uint64_t content_of(uint64_t request, uint32_t page) {
    return mix(mix(7, request), page) | 1;
}

static uint64_t digest_of(uint64_t content) {
    return hd_checksum(0, &content, sizeof content);
}

static void place_machine(world *w, int32_t server) {
    world_server *s = &w->server[server];
    const hd_lease_options o = {.epoch = s->epoch,
                                .max_time_ns = WORLD_TIME_NS,
                                .max_leases = WORLD_SLOTS,
                                .max_per_peer = WORLD_SLOTS - 1,
                                .max_peers = w->n_servers,
                                .max_pages = WORLD_LEASE_PAGES};
    const size_t bytes = hd_leases_bytes(&o);
    if (bytes == 0 || bytes > sizeof s->machine) abort();
    memset(s->machine, 0, sizeof s->machine);
    hd_leases_place(s->machine, &o);
}

/* Pages */

static uint32_t n_free(const world *w, int32_t server) {
    uint32_t n = 0;
    for (int32_t p = 0; p < w->n_pool; p++) n += w->server[server].owner[p] == 0;
    return n;
}

static void take_pages(world *w, int32_t server, uint64_t owner, uint32_t *place, uint32_t n) {
    world_server *s = &w->server[server];
    for (int32_t p = 0; n > 0; p++) {
        if (p == w->n_pool) abort();
        if (s->owner[p] != 0) continue;
        s->owner[p] = owner;
        s->content[p] = 0;
        place[--n] = (uint32_t)p;
    }
}

static void free_pages(world *w, int32_t server, uint64_t owner, const uint32_t *place,
                       uint32_t n) {
    world_server *s = &w->server[server];
    for (uint32_t i = 0; i < n; i++) {
        if (s->owner[place[i]] != owner) fail(w, "a page is freed that is another owner's");
        s->owner[place[i]] = 0;
    }
}

static void read_pages(world *w, const world_request *r) {
    const world_server *s = &w->server[r->receiver];
    for (uint32_t i = 0; i < r->n_pages; i++) {
        if (s->owner[r->place[i]] != r->lease.generation) fail(w, "a page lost its owner");
        if (s->content[r->place[i]] != content_of(r->id, i))
            fail(w, "a page holds other bytes");
    }
}

static void end_request(world *w, world_request *r) {
    if (++r->n_ends != 1) fail(w, "a request ended twice");
    r->id = 0;
}

static world_request *request_of(world *w, int32_t receiver, hd_lease_id id) {
    for (int32_t i = 0; i < WORLD_REQUESTS; i++) {
        world_request *r = &w->request[i];
        if (r->id && r->is_open && r->receiver == receiver &&
            r->lease.generation == id.generation) {
            return r;
        }
    }
    return NULL;
}

/* Actions of a machine */

static hd_status step(world *w, int32_t server, hd_lease_event e, uint64_t arrived);

static void put_message(world *w, const world_message *m) {
    if (w->n_messages < WORLD_MESSAGES) w->message[w->n_messages++] = *m;
}

static void put_copy(world *w, const world_copy *c) {
    if (w->n_copies == WORLD_COPIES) abort();
    w->copy[w->n_copies++] = *c;
}

static void report_copy(world *w, const world_copy *c) {
    step(w, c->server,
         (hd_lease_event){.kind = c->is_write ? HD_LEASE_EV_WRITTEN : HD_LEASE_EV_SENT,
                          .id = c->id,
                          .page = c->page,
                          .n_pages = 1},
         0);
}

static void start_copy(world *w, const world_copy *c) {
    put_copy(w, c);
    if (w->omits == WORLD_OMITS_QUIESCE) report_copy(w, c);
}

static void release(world *w, int32_t server, const hd_lease_action *a) {
    world_server *s = &w->server[server];
    const uint32_t slot = a->id.slot;
    world_request *r = request_of(w, server, a->id);
    if (r) {
        if (r->is_held) fail(w, "a lease ended after its pages were owned");
        free_pages(w, server, a->id.generation, r->place, r->n_pages);
        end_request(w, r);
        return;
    }
    if (s->asked[slot]) { /* before it was accepted: there are no pages */
        s->asked[slot] = false;
        return;
    }
    const hd_lease *lease = hd_leases_at(machine(w, server), (int32_t)slot);
    free_pages(w, server, a->id.generation, s->place[slot], lease->n_pages);
}

static void own(world *w, int32_t server, const hd_lease_action *a) {
    world_request *r = request_of(w, server, a->id);
    if (!r || r->is_held) {
        fail(w, "pages are owned by no request, or twice");
        return;
    }
    r->is_held = true;
    read_pages(w, r);
}

static void perform(world *w, int32_t server, const hd_lease_action *a, uint64_t arrived) {
    world_server *s = &w->server[server];
    switch (a->kind) {
    case HD_LEASE_DO_SEND:
        put_message(w, &(world_message){.head = a->message, .from = server, .to = a->peer});
        break;
    case HD_LEASE_DO_PREFILL:
        s->asked[a->id.slot] = true;
        break;
    case HD_LEASE_DO_PAGES:
        for (uint32_t p = a->page; p < a->page + a->n_pages; p++) {
            start_copy(w, &(world_copy){.server = server,
                                        .id = a->id,
                                        .page = p,
                                        .place = s->place[a->id.slot][p],
                                        .head = a->message,
                                        .peer = a->peer});
        }
        break;
    case HD_LEASE_DO_WRITE: {
        const world_request *r = request_of(w, server, a->id);
        if (!r) {
            fail(w, "a page is written for no request");
            break;
        }
        start_copy(w, &(world_copy){.server = server,
                                    .is_write = true,
                                    .id = a->id,
                                    .page = a->page,
                                    .place = r->place[a->page],
                                    .content = arrived});
        break;
    }
    case HD_LEASE_DO_OWN:
        own(w, server, a);
        break;
    case HD_LEASE_DO_RELEASE:
        release(w, server, a);
        break;
    }
}

static hd_status step(world *w, int32_t server, hd_lease_event e, uint64_t arrived) {
    hd_lease_action actions[2 * WORLD_SLOTS + 2];
    int32_t n = 0;
    e.now_ns = w->now_ns;
    const hd_status status = hd_leases_step(machine(w, server), &e);
    while (hd_leases_take(machine(w, server), &actions[n])) n++;
    for (int32_t i = 0; i < n; i++) perform(w, server, &actions[i], arrived);
    return status;
}

void lease_world_open(world *w, int32_t n_servers, int32_t n_pool) {
    *w = (world){.n_servers = n_servers, .n_pool = n_pool, .now_ns = 1};
    for (int32_t s = 0; s < n_servers; s++) {
        w->server[s].epoch = 1;
        place_machine(w, s);
    }
    for (int32_t s = 0; s < n_servers; s++) {
        for (int32_t p = 0; p < n_servers; p++) {
            w->server[s].hears[p] = true;
            step(w, s, (hd_lease_event){.kind = HD_LEASE_EV_HELLO, .peer = p, .epoch = 1}, 0);
        }
    }
}

void lease_world_copy(world *to, const world *from) {
    memcpy(to, from, offsetof(world, message));
    memcpy(to->message, from->message, (size_t)from->n_messages * sizeof *from->message);
    memcpy(to->copy, from->copy, (size_t)from->n_copies * sizeof *from->copy);
}

bool lease_world_add(world *w, int32_t receiver, int32_t sender, uint32_t n_pages) {
    for (int32_t i = 0; i < WORLD_REQUESTS; i++) {
        if (w->request[i].id) continue;
        w->request[i] = (world_request){.id = ++w->last_request,
                                        .receiver = receiver,
                                        .sender = sender,
                                        .n_pages = n_pages};
        return true;
    }
    return false;
}

/* Moves */

typedef struct move_list {
    world_move *at;
    int32_t n;
} move_list;

static void add(move_list *l, world_move_kind kind, int32_t i, int32_t j) {
    if (l->n < WORLD_MOVES) l->at[l->n++] = (world_move){kind, i, j};
}

static bool is_first_of_link(const world *w, int32_t i) {
    for (int32_t k = 0; k < i; k++) {
        if (w->message[k].from == w->message[i].from && w->message[k].to == w->message[i].to) {
            return false;
        }
    }
    return true;
}

static bool computes(const hd_lease *lease, const world_server *s, int32_t slot) {
    const bool sends = lease->state == HD_LEASE_GRANTED || lease->state == HD_LEASE_SENDING;
    return sends && !lease->is_receiver && s->n_computed[slot] < lease->n_pages;
}

static void add_server_moves(const world *w, int32_t server, move_list *l) {
    const world_server *s = &w->server[server];
    for (int32_t slot = 0; slot < WORLD_SLOTS; slot++) {
        const hd_lease *lease = hd_leases_at(machine(w, server), slot);
        if (s->asked[slot] && lease->n_pages <= n_free(w, server)) {
            add(l, WORLD_ACCEPT, server, slot);
        }
        if (computes(lease, s, slot)) add(l, WORLD_COMPUTE, server, slot);
    }
    for (int32_t p = 0; p < w->n_servers; p++) {
        if (!s->hears[p]) add(l, WORLD_HELLO, server, p);
    }
}

int32_t lease_world_moves(const world *w, world_move *moves) {
    move_list l = {.at = moves};
    for (int32_t i = 0; i < WORLD_REQUESTS; i++) {
        const world_request *r = &w->request[i];
        if (r->id && !r->is_open && r->n_pages <= n_free(w, r->receiver))
            add(&l, WORLD_OPEN, i, 0);
        if (r->id && r->is_held) add(&l, WORLD_FINISH, i, 0);
    }
    for (int32_t i = 0; i < w->n_messages; i++) {
        if (!w->has_order || is_first_of_link(w, i)) add(&l, WORLD_DELIVER, i, 0);
    }
    for (int32_t i = 0; i < w->n_copies; i++) add(&l, WORLD_LAND, i, 0);
    for (int32_t s = 0; s < w->n_servers; s++) add_server_moves(w, s, &l);
    if (l.n == 0) { /* only time can pass */
        for (int32_t s = 0; s < w->n_servers; s++) {
            if (hd_leases_next_deadline(machine(w, s)) == UINT64_MAX) continue;
            add(&l, WORLD_TICK, 0, 0);
            break;
        }
    }
    return l.n;
}

int32_t lease_world_faults(const world *w, world_move *moves) {
    move_list l = {.at = moves};
    for (int32_t i = 0; i < w->n_messages; i++) {
        add(&l, WORLD_DROP, i, 0);
        add(&l, WORLD_REPEAT, i, 0);
        if (w->has_order && !is_first_of_link(w, i)) add(&l, WORLD_REORDER, i, 0);
        if (w->message[i].head.kind == HD_LEASE_MSG_PAGE) add(&l, WORLD_CORRUPT, i, 0);
    }
    for (int32_t s = 0; s < w->n_servers; s++) {
        for (int32_t slot = 0; slot < WORLD_SLOTS; slot++) {
            const hd_lease_state state = hd_leases_at(machine(w, s), slot)->state;
            if (state != HD_LEASE_FREE && state != HD_LEASE_OWNED)
                add(&l, WORLD_CANCEL, s, slot);
        }
        add(&l, WORLD_CUT, s, (s + 1) % w->n_servers);
        add(&l, WORLD_RESTART, s, 0);
    }
    add(&l, WORLD_LATE, 0, 0);
    return l.n;
}

static world_message take_message(world *w, int32_t i) {
    const world_message m = w->message[i];
    w->n_messages--;
    memmove(&w->message[i], &w->message[i + 1], (size_t)(w->n_messages - i) * sizeof m);
    return m;
}

/* Makes a message of a former life or lease look like one of the present. */
static void forge(const world *w, world_message *m) {
    if (w->omits == WORLD_OMITS_EPOCH) {
        m->head.from_epoch = w->server[m->from].epoch;
        m->head.to_epoch = w->server[m->to].epoch;
    }
    const bool is_from_sender =
        m->head.kind >= HD_LEASE_MSG_GRANT && m->head.kind <= HD_LEASE_MSG_COMMIT;
    if (w->omits == WORLD_OMITS_STALE && is_from_sender && m->head.to.slot < WORLD_SLOTS) {
        const hd_lease *lease = hd_leases_at(machine(w, m->to), (int32_t)m->head.to.slot);
        m->head.to = lease->id;
        if (lease->peer_id.generation) m->head.from = lease->peer_id;
    }
}

static void deliver(world *w, int32_t i) {
    world_message m = take_message(w, i);
    forge(w, &m);
    if (m.head.kind == HD_LEASE_MSG_RESERVE) {
        for (int32_t r = 0; r < WORLD_REQUESTS; r++) {
            if (w->request[r].id == m.head.request) w->request[r].reserve_arrived = true;
        }
    }
    const uint64_t digest =
        w->omits == WORLD_OMITS_DIGEST ? m.head.digest : digest_of(m.content);
    step(w, m.to,
         (hd_lease_event){
             .kind = HD_LEASE_EV_MESSAGE, .peer = m.from, .message = &m.head, .digest = digest},
         m.content);
}

static void land(world *w, int32_t i) {
    const world_copy c = w->copy[i];
    w->copy[i] = w->copy[--w->n_copies];
    world_server *s = &w->server[c.server];
    if (s->owner[c.place] != c.id.generation) fail(w, "a copy touches a page after its lease");
    if (c.is_write) {
        s->content[c.place] = c.content;
        if (w->omits != WORLD_OMITS_QUIESCE) report_copy(w, &c);
        return;
    }
    world_message m = {
        .head = c.head, .content = s->content[c.place], .from = c.server, .to = c.peer};
    m.head.page = c.page;
    m.head.digest = digest_of(m.content);
    put_message(w, &m);
    if (w->omits != WORLD_OMITS_QUIESCE) report_copy(w, &c);
}

static void open_request(world *w, world_request *r) {
    /* The machine names the lease when it opens; the pages are taken in its name. */
    const hd_leases *l = machine(w, r->receiver);
    const hd_status status = step(w, r->receiver,
                                  (hd_lease_event){.kind = HD_LEASE_EV_OPEN,
                                                   .peer = r->sender,
                                                   .request = r->id,
                                                   .n_tokens = 8 * r->n_pages,
                                                   .n_pages = r->n_pages,
                                                   .time_ns = WORLD_TIME_NS},
                                  0);
    if (status != HD_OK) {
        end_request(w, r); /* it is computed where it is */
        return;
    }
    for (int32_t slot = 0; slot < WORLD_SLOTS; slot++) {
        const hd_lease *lease = hd_leases_at(l, slot);
        if (lease->is_receiver && lease->request == r->id) r->lease = lease->id;
    }
    r->is_open = true;
    take_pages(w, r->receiver, r->lease.generation, r->place, r->n_pages);
}

static void accept(world *w, int32_t server, int32_t slot) {
    world_server *s = &w->server[server];
    const hd_lease *lease = hd_leases_at(machine(w, server), slot);
    s->asked[slot] = false;
    s->n_computed[slot] = 0;
    take_pages(w, server, lease->id.generation, s->place[slot], lease->n_pages);
    step(w, server, (hd_lease_event){.kind = HD_LEASE_EV_ACCEPT, .id = lease->id}, 0);
}

static void compute(world *w, int32_t server, int32_t slot) {
    world_server *s = &w->server[server];
    const hd_lease *lease = hd_leases_at(machine(w, server), slot);
    const uint32_t page = s->n_computed[slot]++;
    s->content[s->place[slot][page]] = content_of(lease->request, page);
    step(w, server,
         (hd_lease_event){
             .kind = HD_LEASE_EV_COMPUTED, .id = lease->id, .n_pages = s->n_computed[slot]},
         0);
}

static void finish(world *w, world_request *r) {
    read_pages(w, r);
    free_pages(w, r->receiver, r->lease.generation, r->place, r->n_pages);
    end_request(w, r);
}

static void pass_deadline(world *w) {
    uint64_t next = UINT64_MAX;
    for (int32_t s = 0; s < w->n_servers; s++) {
        const uint64_t t = hd_leases_next_deadline(machine(w, s));
        if (t < next) next = t;
    }
    if (next != UINT64_MAX && next > w->now_ns) w->now_ns = next;
    for (int32_t s = 0; s < w->n_servers; s++) {
        step(w, s, (hd_lease_event){.kind = HD_LEASE_EV_TICK}, 0);
        if (hd_leases_next_deadline(machine(w, s)) <= w->now_ns) {
            fail(w, "a lease outlived its deadline");
        }
    }
}

static void cut(world *w, int32_t a, int32_t b) {
    for (int32_t i = w->n_messages - 1; i >= 0; i--) {
        const world_message *m = &w->message[i];
        if ((m->from == a && m->to == b) || (m->from == b && m->to == a)) take_message(w, i);
    }
    step(w, a, (hd_lease_event){.kind = HD_LEASE_EV_LOST, .peer = b}, 0);
    step(w, b, (hd_lease_event){.kind = HD_LEASE_EV_LOST, .peer = a}, 0);
    w->server[a].hears[b] = w->server[b].hears[a] = false;
}

static void add_counts(hd_lease_counts *to, const hd_lease_counts *from) {
    for (int32_t i = 0; i < 2; i++) {
        to->opened[i] += from->opened[i];
        to->owned[i] += from->owned[i];
    }
    for (int32_t i = 0; i < HD_N_LEASE_REASONS; i++) {
        to->aborted[i] += from->aborted[i];
        to->discarded[i] += from->discarded[i];
    }
}

/* The process ends with all its memory; what is on the way stays there. */
static void restart(world *w, int32_t server) {
    world_server *s = &w->server[server];
    const hd_lease_counts counts = hd_leases_read_counts(machine(w, server));
    add_counts(&w->gone, &counts);
    for (int32_t i = w->n_copies - 1; i >= 0; i--) {
        if (w->copy[i].server == server) w->copy[i] = w->copy[--w->n_copies];
    }
    for (int32_t i = 0; i < WORLD_REQUESTS; i++) {
        world_request *r = &w->request[i];
        if (r->id && r->is_open && r->receiver == server) end_request(w, r);
    }
    memset(s->owner, 0, sizeof s->owner);
    memset(s->content, 0, sizeof s->content);
    memset(s->asked, 0, sizeof s->asked);
    s->epoch++;
    place_machine(w, server);
    for (int32_t p = 0; p < w->n_servers; p++) {
        s->hears[p] = false;
        if (p != server) w->server[p].hears[server] = false;
    }
}

static void corrupt(world_message *m) {
    m->content ^= 1u << (m->content % 7 + 3);
}

void lease_world_make(world *w, world_move m) {
    switch (m.kind) {
    case WORLD_OPEN:
        open_request(w, &w->request[m.i]);
        break;
    case WORLD_DELIVER:
    case WORLD_REORDER:
        deliver(w, m.i);
        break;
    case WORLD_LAND:
        land(w, m.i);
        break;
    case WORLD_ACCEPT:
        accept(w, m.i, m.j);
        break;
    case WORLD_COMPUTE:
        compute(w, m.i, m.j);
        break;
    case WORLD_FINISH:
        finish(w, &w->request[m.i]);
        break;
    case WORLD_HELLO:
        w->server[m.i].hears[m.j] = true;
        step(w, m.i,
             (hd_lease_event){
                 .kind = HD_LEASE_EV_HELLO, .peer = m.j, .epoch = w->server[m.j].epoch},
             0);
        break;
    case WORLD_TICK:
    case WORLD_LATE:
        pass_deadline(w);
        break;
    case WORLD_DROP:
        take_message(w, m.i);
        break;
    case WORLD_REPEAT:
        put_message(w, &w->message[m.i]);
        break;
    case WORLD_CORRUPT:
        corrupt(&w->message[m.i]);
        break;
    case WORLD_CANCEL:
        step(w, m.i,
             (hd_lease_event){.kind = HD_LEASE_EV_ABORT,
                              .id = hd_leases_at(machine(w, m.i), m.j)->id,
                              .reason = HD_LEASE_CANCEL},
             0);
        break;
    case WORLD_CUT:
        cut(w, m.i, m.j);
        break;
    case WORLD_RESTART:
        restart(w, m.i);
        break;
    case WORLD_N_MOVES:
        break;
    }
}

void lease_world_check(world *w, bool idle) {
    for (int32_t s = 0; s < w->n_servers; s++) {
        if (hd_leases_check(machine(w, s), idle, NULL) != HD_OK) fail(w, "a machine's counts");
        if (idle && n_free(w, s) != (uint32_t)w->n_pool) fail(w, "pages are lost");
    }
    if (!idle) return;
    for (int32_t i = 0; i < WORLD_REQUESTS; i++) {
        if (w->request[i].id) fail(w, "a request did not end");
    }
}

hd_lease_counts lease_world_counts(const world *w) {
    hd_lease_counts sum = w->gone;
    for (int32_t s = 0; s < w->n_servers; s++) {
        const hd_lease_counts counts = hd_leases_read_counts(machine(w, s));
        add_counts(&sum, &counts);
    }
    return sum;
}

/* Hash */

static uint64_t hash_lease(const world *w, const hd_lease *lease) {
    uint64_t h = mix(lease->id.generation, lease->peer_id.generation);
    const bool is_over = lease->state == HD_LEASE_FREE || lease->state == HD_LEASE_OWNED;
    h = mix(h, (uint64_t)lease->state << 8 | (uint64_t)lease->is_receiver << 4 |
                   (uint64_t)(uint32_t)lease->peer);
    if (is_over) return h;
    h = mix(h, lease->deadline_ns - w->now_ns);
    h = mix(h, (uint64_t)lease->n_computed << 40 | (uint64_t)lease->n_moving << 20 |
                   lease->n_done);
    return mix(h, lease->request);
}

static uint64_t hash_server(const world *w, int32_t server) {
    const world_server *s = &w->server[server];
    uint64_t h = mix((uint64_t)server, s->epoch);
    for (int32_t i = 0; i < WORLD_SLOTS; i++) {
        h = mix(h, hash_lease(w, hd_leases_at(machine(w, server), i)));
        h = mix(h, (uint64_t)s->n_computed[i] << 1 | s->asked[i]);
    }
    for (int32_t i = 0; i < w->n_pool; i++) h = mix(mix(h, s->content[i]), s->owner[i]);
    for (int32_t i = 0; i < w->n_servers; i++) h = mix(h, s->hears[i]);
    return h;
}

static uint64_t hash_message(const world *w, int32_t i) {
    const world_message *m = &w->message[i];
    uint64_t place = 0; /* in its link */
    for (int32_t k = 0; k < i; k++) {
        place += w->message[k].from == m->from && w->message[k].to == m->to;
    }
    return mix(mix(mix(hd_checksum(0, &m->head, sizeof m->head), m->content), place),
               (uint64_t)(m->from * 16 + m->to));
}

uint64_t lease_world_hash(const world *w) {
    uint64_t h = 1;
    for (int32_t s = 0; s < w->n_servers; s++) h = mix(h, hash_server(w, s));
    for (int32_t i = 0; i < WORLD_REQUESTS; i++) {
        const world_request *r = &w->request[i];
        h = mix(h, r->id << 3 | (uint64_t)r->is_open << 2 | (uint64_t)r->is_held << 1 |
                       r->reserve_arrived);
    }
    uint64_t sum = 0; /* of what has no order */
    for (int32_t i = 0; i < w->n_messages; i++) sum += mix(3, hash_message(w, i));
    for (int32_t i = 0; i < w->n_copies; i++) {
        const world_copy *c = &w->copy[i];
        sum +=
            mix(mix(mix(5, c->id.generation), c->page), (uint64_t)c->server * 2 + c->is_write);
    }
    return mix(h, sum);
}
