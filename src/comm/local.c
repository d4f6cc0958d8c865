/* local.c - ranks of one process: every rank reads, or for sums writes, the others' host memory. Short
 * broadcasts are copied, so that who sends them need not wait for those that read them.
 *
 * An exchange is a place where the members of a group meet: each counts itself in `sent` when
 * its arguments can be read, and in `done` when it has finished reading. The last one wakes
 * those that sleep. The counters only grow, so that a place serves again without a reset. A
 * rank is `busy` while it touches memory of others. After an abort nobody becomes busy, and a
 * rank that leaves an exchange early waits until nobody is: then its memory is its own. */
#include "comm/local.h"

#include <assert.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/cpu.h"
#include "base/memory.h"
#include "base/progress.h"
#include "comm/figures_internal.h"
#include "comm/peers.h"
#include "comm/rounds_internal.h"
#include "comm/spin_internal.h"
#include "comm/tree_sum.h"

/* PROBE_NS: a sleeper takes 50 us to wake up on a virtual machine. Who spins for less is late at the next
 * exchange, where the other goes to sleep, and so on. LINE: floats of a cache line. */
enum {
    PROBE_NS = 60000,
    LOOKS = 100,
    LINE = HD_CACHE_LINE / (int)sizeof(float),
    POSTED = 1 << 18 /* longer broadcasts are read where they lie */
};

typedef enum lane { COLLECTIVE, DISPATCH, COMBINE, BROADCAST, N_LANES } lane;

typedef struct exchange {
    _Atomic uint64_t sent, done; /* members, over all exchanges at this place */
} exchange;

/* A copy of what was broadcast, for those that come later. */
typedef struct posted {
    void *data;
    size_t room;
} posted;

typedef struct group {
    exchange at[N_LANES][HD_COMM_MAX_INFLIGHT];
    posted posted[HD_COMM_MAX_INFLIGHT];
} group;

typedef struct member {
    hd_comm comm;
    comm_figures figures;
    hd_comm_local *world;
    /* exchanges that this rank has begun; the next one takes place [begun % MAX_INFLIGHT] */
    uint64_t begun[HD_N_GROUPS][N_LANES];
    uint64_t dispatched, combined; /* exchanges that have arrived */
    const void *args;              /* of the collective that this rank is in */
    hd_dispatch_args dispatch[HD_COMM_MAX_INFLIGHT];
    hd_combine_args combine[HD_COMM_MAX_INFLIGHT];
    _Atomic bool busy;
    comm_spin spin;
} member;

struct hd_comm_local {
    int32_t n;
    member *ranks; /* [n] */
    group *groups; /* [HD_N_GROUPS, n] of the group's first rank */
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    comm_peers *peers; /* NULL: no rank computes on a GPU */
    _Atomic int32_t sleepers;
    _Atomic bool aborted;
    char why[200]; /* written before aborted */
};

/* ---- waiting for each other ---- */

static const hd_rank_group *group_of(const member *r, hd_group g) {
    return &r->comm.groups[g];
}

static const member *member_at(const member *r, hd_group g, int32_t i) {
    const hd_rank_group *members = group_of(r, g);
    return &r->world->ranks[members->first + i * members->stride];
}

static group *place_of(const member *r, hd_group g) {
    return &r->world->groups[(int32_t)g * r->world->n + group_of(r, g)->first];
}

static exchange *exchange_at(const member *r, hd_group g, lane l, uint64_t ticket) {
    return &place_of(r, g)->at[l][ticket % HD_COMM_MAX_INFLIGHT];
}

/* n of an exchange are counted, of which the last one wakes those that wait. */
static void count_in(const member *r, int32_t n, _Atomic uint64_t *count) {
    hd_comm_local *w = r->world;
    const uint64_t now = atomic_fetch_add(count, 1) + 1;
    if (now % (uint64_t)n || atomic_load(&w->sleepers) == 0) return;
    pthread_mutex_lock(&w->mutex);
    pthread_cond_broadcast(&w->wake);
    pthread_mutex_unlock(&w->mutex);
}

static bool spin(const member *r, const _Atomic uint64_t *count, uint64_t all,
                 int64_t since_ns) {
    const int64_t ns = comm_spin_ns(&r->spin);
    while (hd_now_ns() - since_ns < ns) {
        for (int i = 0; i < LOOKS; i++) {
            if (atomic_load(count) >= all || atomic_load(&r->world->aborted)) return true;
            hd_cpu_relax();
        }
    }
    return false;
}

/* Waits until all are counted. A sleeper is counted before it looks at the counter, and the last
 * member looks for sleepers after it counted itself: one of them sees the other. */
static void wait_for(member *r, _Atomic uint64_t *count, uint64_t all) {
    hd_comm_local *w = r->world;
    if (atomic_load(count) >= all) return;
    const int64_t since_ns = hd_now_ns();
    const bool found = spin(r, count, all, since_ns);
    comm_spin_learn(&r->spin, !found);
    if (found) {
        comm_count_wait(r->comm.figures, hd_now_ns() - since_ns);
        return;
    }
    pthread_mutex_lock(&w->mutex);
    atomic_fetch_add(&w->sleepers, 1);
    while (atomic_load(count) < all && !atomic_load(&w->aborted)) {
        pthread_cond_wait(&w->wake, &w->mutex);
    }
    atomic_fetch_sub(&w->sleepers, 1);
    pthread_mutex_unlock(&w->mutex);
    comm_count_wait(r->comm.figures, hd_now_ns() - since_ns);
}

/* Returns whether this rank may touch memory of others until it stops being busy. */
static bool become_busy(member *r) {
    atomic_store(&r->busy, true);
    if (!atomic_load(&r->world->aborted)) return true;
    atomic_store(&r->busy, false);
    return false;
}

static void wait_for_the_busy(const hd_comm_local *w) {
    for (int32_t i = 0; i < w->n; i++) {
        while (atomic_load(&w->ranks[i].busy)) sched_yield();
    }
}

static uint64_t begin(member *r, hd_group g, lane l) {
    const uint64_t ticket = r->begun[g][l]++;
    count_in(r, group_of(r, g)->n, &exchange_at(r, g, l, ticket)->sent);
    return ticket;
}

/* What a place counts when n members are in an exchange. */
static uint64_t full_count(uint64_t ticket, int32_t n) {
    return (ticket / HD_COMM_MAX_INFLIGHT + 1) * (uint64_t)n;
}

static void fail(const member *r, hd_stream *s) {
    wait_for_the_busy(r->world);
    hd_stream_fail(s, HD_EPEER, r->world->why);
}

/* Waits until all members have begun. True: this rank is busy now. */
static bool arrive(member *r, hd_stream *s, hd_group g, lane l, uint64_t ticket) {
    wait_for(r, &exchange_at(r, g, l, ticket)->sent, full_count(ticket, group_of(r, g)->n));
    if (become_busy(r)) return true;
    fail(r, s);
    return false;
}

/* Ends being busy; returns when all members have ended. */
static void finish(member *r, hd_stream *s, hd_group g, lane l, uint64_t ticket) {
    const int32_t n = group_of(r, g)->n;
    exchange *e = exchange_at(r, g, l, ticket);
    atomic_store(&r->busy, false);
    count_in(r, n, &e->done);
    wait_for(r, &e->done, full_count(ticket, n));
    if (atomic_load(&r->world->aborted)) fail(r, s);
}

void hd_comm_local_abort(hd_comm_local *w, const char *why) {
    pthread_mutex_lock(&w->mutex);
    if (!atomic_load(&w->aborted)) {
        snprintf(w->why, sizeof w->why, "%s", why);
        atomic_store(&w->aborted, true);
    }
    pthread_cond_broadcast(&w->wake);
    comm_peers *peers = w->peers;
    pthread_mutex_unlock(&w->mutex);
    wait_for_the_busy(w);
    if (peers) comm_peers_abort(peers);
}

static void abort_all(void *ctx, const char *why) {
    hd_comm_local_abort(((member *)ctx)->world, why);
}

static const char *ended(void *ctx) {
    const hd_comm_local *w = ((member *)ctx)->world;
    return atomic_load(&w->aborted) ? w->why : NULL;
}

/* ---- collectives ---- */

typedef void collective_fn(const member *r, const void *args);

static void collective(member *r, hd_stream *s, hd_group g, const void *args,
                       collective_fn *fn) {
    r->args = args;
    const uint64_t ticket = begin(r, g, COLLECTIVE);
    if (!arrive(r, s, g, COLLECTIVE, ticket)) return;
    fn(r, args);
    finish(r, s, g, COLLECTIVE, ticket);
}

static float *floats(hd_rows x) {
    return x.data; /* hd_comm_local_join has checked */
}

/* Sums this rank's elements of all members, into one of them or, with -1, into all. */
static void sum_part(const member *r, const hd_reduce_scatter_args *a, int32_t only) {
    const int32_t m = group_of(r, a->group)->n;
    float *x[HD_LOCAL_MAX_RANKS], sum[HD_TREE_SUM_BLOCK];
    assert(m >= 1);
    for (int32_t k = 0; k < m; k++) {
        const hd_reduce_scatter_args *other = member_at(r, a->group, k)->args;
        assert(other->n == a->n);
        x[k] = floats(other->x);
    }
    comm_count_bytes(r->comm.figures, (m - 1) * a->own * (int64_t)sizeof *sum);
    for (int64_t i = 0; i < a->own; i += HD_TREE_SUM_BLOCK) {
        const int32_t n = (int32_t)hd_min_i64(HD_TREE_SUM_BLOCK, a->own - i);
        hd_tree_sum(sum, (const float *const *)x, m, a->first + i, n);
        for (int32_t k = 0; k < m; k++) {
            if (only < 0 || k == only)
                memcpy(x[k] + a->first + i, sum, (size_t)n * sizeof *sum);
        }
    }
}

/* The others write the elements that they sum. */
static void sum_for_all(const member *r, const void *args) {
    const hd_reduce_scatter_args *a = args;
    sum_part(r, a, -1);
    comm_count_bytes(r->comm.figures, (a->n - a->own) * (int64_t)sizeof(float));
}

static void sum_for_one(const member *r, const void *args) {
    const hd_reduce_scatter_args *a = args;
    sum_part(r, a, group_of(r, a->group)->index);
}

static void gather_columns(const member *r, const void *args) {
    const hd_all_gather_args *a = args;
    const hd_rank_group *g = group_of(r, a->group);
    for (int32_t k = 0; k < g->n; k++) {
        const hd_all_gather_args *other = member_at(r, a->group, k)->args;
        assert(other->rows == a->rows && other->cols == a->cols);
        if (k == g->index) continue;
        comm_count_bytes(r->comm.figures,
                         (int64_t)a->rows * other->own * (int64_t)sizeof *a->x);
        for (int32_t row = 0; row < a->rows; row++) {
            const int64_t at = (int64_t)row * a->cols + other->first;
            memcpy(a->x + at, other->x + at, (size_t)other->own * sizeof *a->x);
        }
    }
}

static void copy_first(const member *r, const void *args) {
    const hd_broadcast_args *a = args;
    const hd_broadcast_args *first = member_at(r, a->group, 0)->args;
    assert(first->bytes == a->bytes);
    if (group_of(r, a->group)->index == 0) return;
    memcpy(a->data, first->data, a->bytes);
    comm_count_bytes(r->comm.figures, (int64_t)a->bytes);
}

/* Each member sums its part of the elements for all. */
static void all_reduce(void *ctx, hd_stream *s, const hd_all_reduce_args *a) {
    const hd_rank_group *g = group_of(ctx, a->group);
    const int64_t lines = hd_ceil_div(a->n, LINE);
    const int64_t first = hd_min_i64(lines * g->index / g->n * LINE, a->n);
    const int64_t end = hd_min_i64(lines * (g->index + 1) / g->n * LINE, a->n);
    const hd_reduce_scatter_args part = {a->group, a->x, a->n, first, end - first};
    collective(ctx, s, a->group, &part, sum_for_all);
}

static void reduce_scatter(void *ctx, hd_stream *s, const hd_reduce_scatter_args *a) {
    collective(ctx, s, a->group, a, sum_for_one);
}

static void all_gather(void *ctx, hd_stream *s, const hd_all_gather_args *a) {
    collective(ctx, s, a->group, a, gather_columns);
}

static bool copy_to(posted *p, const void *data, size_t n) {
    if (n > p->room) {
        free(p->data);
        p->data = malloc(2 * n);
        p->room = p->data ? 2 * n : 0;
    }
    if (p->data && n) memcpy(p->data, data, n);
    return p->data || !n;
}

/* The first member leaves a copy and goes on: the others may sleep, and take long to wake up. */
static void post(member *r, hd_stream *s, const hd_broadcast_args *a, uint64_t ticket) {
    exchange *e = exchange_at(r, a->group, BROADCAST, ticket);
    posted *p = &place_of(r, a->group)->posted[ticket % HD_COMM_MAX_INFLIGHT];
    const int32_t others = group_of(r, a->group)->n - 1;
    wait_for(r, &e->done, full_count(ticket, others) - (uint64_t)others); /* of its last use */
    if (!atomic_load(&r->world->aborted) && !copy_to(p, a->data, a->bytes))
        hd_comm_local_abort(r->world, "a rank has no memory for a broadcast");
    if (atomic_load(&r->world->aborted)) {
        fail(r, s);
        return;
    }
    count_in(r, 1, &e->sent);
}

static void take_posted(member *r, hd_stream *s, const hd_broadcast_args *a, uint64_t ticket) {
    exchange *e = exchange_at(r, a->group, BROADCAST, ticket);
    const posted *p = &place_of(r, a->group)->posted[ticket % HD_COMM_MAX_INFLIGHT];
    wait_for(r, &e->sent, full_count(ticket, 1));
    if (atomic_load(&r->world->aborted)) {
        fail(r, s);
        return;
    }
    if (a->bytes) memcpy(a->data, p->data, a->bytes);
    comm_count_bytes(r->comm.figures, (int64_t)a->bytes);
    count_in(r, group_of(r, a->group)->n - 1, &e->done);
}

static void broadcast(void *ctx, hd_stream *s, const hd_broadcast_args *a) {
    member *r = ctx;
    const hd_rank_group *g = group_of(r, a->group);
    if (g->n == 1) return;
    if (a->bytes > POSTED) {
        collective(r, s, a->group, a, copy_first);
        return;
    }
    const uint64_t ticket = r->begun[a->group][BROADCAST]++;
    if (g->index == 0)
        post(r, s, a, ticket);
    else
        take_posted(r, s, a, ticket);
}

/* ---- dispatch and combine ---- */

static const hd_dispatch_args *sent_by(const member *r, uint64_t ticket, int32_t k) {
    return &member_at(r, HD_GROUP_EP, k)->dispatch[ticket % HD_COMM_MAX_INFLIGHT];
}

/* Returns how many rows member k sends to a slot; *first: the place of the first one there. */
static int32_t sent_to(const member *r, uint64_t ticket, int32_t k, int32_t slot,
                       int32_t *first) {
    const comm_places p = comm_places_at(sent_by(r, ticket, k), k, slot);
    *first = p.first;
    return p.end - p.first;
}

static void count_rows(const member *r, const hd_dispatch_args *a, uint64_t ticket) {
    const hd_rank_group *g = group_of(r, HD_GROUP_EP);
    int32_t n = 0, first;
    for (int32_t e = 0; e < a->n_slots; e++) {
        a->in_offset[e] = n;
        for (int32_t k = 0; k < g->n; k++) {
            n += sent_to(r, ticket, k, g->index * a->n_slots + e, &first);
        }
    }
    a->in_offset[a->n_slots] = n;
    if (!a->rounds) return;
    *a->rounds = 1;
    for (int32_t k = 0; k < g->n; k++) {
        const int32_t rounds = comm_rounds_of(sent_by(r, ticket, k), k, g->n);
        *a->rounds = hd_max_i32(*a->rounds, rounds);
    }
}

/* Bytes of a row that travels. */
static int64_t row_bytes(const hd_dispatch_args *a) {
    return a->format.code ? (int64_t)hd_packed_row_bytes(a->format, a->cols)
                          : a->cols * (int64_t)sizeof(float);
}

/* Copies the rows of places first .. first + n - 1 of another rank to place `to` of this one. */
static void take_rows(const hd_dispatch_args *a, int32_t to, const hd_dispatch_args *from,
                      int32_t first, int32_t n) {
    for (int32_t i = 0; i < n; i++) {
        const int32_t choice = from->assignment[first + i];
        const uint8_t *row =
            (const uint8_t *)from->x.data + choice / from->top_k * row_bytes(from);
        float *x = floats(a->in_x) + (int64_t)(to + i) * a->cols;
        if (from->format.code)
            hd_unpack_row(x, row, from->format, a->cols);
        else
            memcpy(x, row, (size_t)a->cols * sizeof *x);
        a->in_weight[to + i] = from->weight[choice];
    }
}

static void take_all_rows(const member *r, const hd_dispatch_args *a, uint64_t ticket) {
    const hd_rank_group *g = group_of(r, HD_GROUP_EP);
    int32_t first = 0, to = 0;
    int64_t received = 0; /* rows of other ranks */
    for (int32_t e = 0; e < a->n_slots; e++) {
        for (int32_t k = 0; k < g->n; k++) {
            const int32_t n = sent_to(r, ticket, k, g->index * a->n_slots + e, &first);
            take_rows(a, to, sent_by(r, ticket, k), first, n);
            to += n;
            if (k != g->index) received += n;
        }
    }
    comm_count_bytes(r->comm.figures,
                     ((int64_t)(g->n - 1) * a->n_slots + received) * (int64_t)sizeof(float) +
                         received * row_bytes(a));
}

static void dispatch_send(void *ctx, hd_stream *s, const hd_dispatch_args *a) {
    member *r = ctx;
    const uint64_t ticket = r->begun[HD_GROUP_EP][DISPATCH];
    (void)s;
    assert(ticket < r->combined + HD_COMM_MAX_INFLIGHT);
    r->dispatch[ticket % HD_COMM_MAX_INFLIGHT] = *a;
    begin(r, HD_GROUP_EP, DISPATCH);
}

/* Need not wait for the others to finish: what they read stays until combine_arrive. */
static void dispatch_arrive(void *ctx, hd_stream *s, const hd_dispatch_args *a) {
    member *r = ctx;
    const uint64_t ticket = r->dispatched++;
    if (!arrive(r, s, HD_GROUP_EP, DISPATCH, ticket)) return;
    count_rows(r, a, ticket);
    const int32_t n = a->in_offset[a->n_slots];
    if (n <= a->in_rows) take_all_rows(r, a, ticket);
    atomic_store(&r->busy, false);
    if (n <= a->in_rows) return;
    char why[sizeof r->world->why];
    snprintf(why, sizeof why, "rank %d receives %d rows for its experts, at most %d fit",
             r->comm.rank, n, a->in_rows);
    hd_comm_local_abort(r->world, why);
    memset(a->in_offset, 0, ((size_t)a->n_slots + 1) * sizeof *a->in_offset);
    hd_stream_fail(s, HD_EPEER, r->world->why);
}

static void combine_send(void *ctx, hd_stream *s, const hd_combine_args *a) {
    member *r = ctx;
    (void)s;
    r->combine[r->begun[HD_GROUP_EP][COMBINE] % HD_COMM_MAX_INFLIGHT] = *a;
    begin(r, HD_GROUP_EP, COMBINE);
}

/* The rows that this rank sent to a slot lie together there, behind those of the members before
 * it. */
static void take_results(const member *r, const hd_combine_args *a, uint64_t ticket) {
    const hd_rank_group *g = group_of(r, HD_GROUP_EP);
    const int32_t n_slots = r->dispatch[ticket % HD_COMM_MAX_INFLIGHT].n_slots;
    int64_t received = 0; /* rows of other ranks */
    for (int32_t slot = 0; slot < g->n * n_slots; slot++) {
        const member *there = member_at(r, HD_GROUP_EP, slot / n_slots);
        const hd_dispatch_args *d = &there->dispatch[ticket % HD_COMM_MAX_INFLIGHT];
        const hd_combine_args *c = &there->combine[ticket % HD_COMM_MAX_INFLIGHT];
        int32_t from = d->in_offset[slot % n_slots], first;
        for (int32_t k = 0; k < g->index; k++) from += sent_to(r, ticket, k, slot, &first);
        const int32_t n = sent_to(r, ticket, g->index, slot, &first);
        memcpy(floats(a->y) + (int64_t)first * a->cols,
               floats(c->in_y) + (int64_t)from * a->cols,
               (size_t)n * (size_t)a->cols * sizeof(float));
        if (there != r) received += n;
    }
    comm_count_bytes(r->comm.figures, received * a->cols * (int64_t)sizeof(float));
}

static void combine_arrive(void *ctx, hd_stream *s, const hd_combine_args *a) {
    member *r = ctx;
    const uint64_t ticket = r->combined++;
    if (!arrive(r, s, HD_GROUP_EP, COMBINE, ticket)) return;
    take_results(r, a, ticket);
    finish(r, s, HD_GROUP_EP, COMBINE, ticket);
}

/* ---- opening ---- */

static const hd_comm_table table = {.all_reduce = all_reduce,
                                    .reduce_scatter = reduce_scatter,
                                    .all_gather = all_gather,
                                    .broadcast = broadcast,
                                    .dispatch_send = dispatch_send,
                                    .dispatch_arrive = dispatch_arrive,
                                    .combine_send = combine_send,
                                    .combine_arrive = combine_arrive,
                                    .abort = abort_all,
                                    .ended = ended};

hd_status hd_comm_local_open(hd_comm_local **out, const hd_parallel_config *parallel,
                             hd_err *err) {
    *out = NULL;
    HD_TRY(hd_parallel_check(parallel, err));
    const int32_t n = hd_parallel_world(parallel);
    if (n > HD_LOCAL_MAX_RANKS) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "%d ranks in one process; at most %d", n,
                       HD_LOCAL_MAX_RANKS);
    }
    hd_comm_local *w = calloc(1, sizeof *w);
    if (!w) return HD_FAIL(err, HD_ENOMEM, "no memory for %d ranks", n);
    pthread_mutex_init(&w->mutex, NULL);
    pthread_cond_init(&w->wake, NULL);
    w->n = n;
    w->ranks = calloc((size_t)n, sizeof *w->ranks);
    w->groups = calloc((size_t)n * HD_N_GROUPS, sizeof *w->groups);
    if (!w->ranks || !w->groups) {
        hd_comm_local_close(w);
        return HD_FAIL(err, HD_ENOMEM, "no memory for %d ranks", n);
    }
    for (int32_t i = 0; i < n; i++) {
        w->ranks[i].world = w;
        comm_spin_open(&w->ranks[i].spin, n, PROBE_NS, COMM_LEAST_SPIN_NS);
        w->ranks[i].comm = hd_comm_of(&table, &w->ranks[i], parallel, i);
        w->ranks[i].comm.figures = &w->ranks[i].figures;
    }
    *out = w;
    return HD_OK;
}

void hd_comm_local_reset(hd_comm_local *w) {
    pthread_mutex_lock(&w->mutex);
    for (int32_t i = 0; i < w->n; i++) {
        member *r = &w->ranks[i];
        memset(r->begun, 0, sizeof r->begun);
        r->dispatched = r->combined = 0;
    }
    for (int32_t i = 0; i < w->n * HD_N_GROUPS; i++) {
        for (int32_t k = 0; k < N_LANES * HD_COMM_MAX_INFLIGHT; k++) {
            exchange *e = &w->groups[i].at[k / HD_COMM_MAX_INFLIGHT][k % HD_COMM_MAX_INFLIGHT];
            atomic_store(&e->sent, 0);
            atomic_store(&e->done, 0);
        }
    }
    if (w->peers) comm_peers_reset(w->peers);
    atomic_store(&w->aborted, false);
    pthread_mutex_unlock(&w->mutex);
}

void hd_comm_local_close(hd_comm_local *w) {
    if (!w) return;
    pthread_cond_destroy(&w->wake);
    pthread_mutex_destroy(&w->mutex);
    comm_peers_close(w->peers);
    for (int32_t i = 0; w->groups && i < w->n * HD_N_GROUPS; i++) {
        for (int k = 0; k < HD_COMM_MAX_INFLIGHT; k++) free(w->groups[i].posted[k].data);
    }
    free(w->ranks);
    free(w->groups);
    free(w);
}

/* The first rank on a GPU opens what all share. */
static hd_status open_peers(hd_comm_local *w, hd_err *err) {
    pthread_mutex_lock(&w->mutex);
    const hd_status st = w->peers ? HD_OK : comm_peers_open(&w->peers, w->n, err);
    pthread_mutex_unlock(&w->mutex);
    return st;
}

hd_status hd_comm_local_join(hd_comm_local *w, int32_t rank, hd_device *device,
                             hd_stream *stream, const hd_ops *ops, const hd_comm **out,
                             hd_err *err) {
    *out = NULL;
    if (rank < 0 || rank >= w->n) {
        return HD_FAIL(err, HD_EINVAL, "rank %d joins a world of %d ranks", rank, w->n);
    }
    if (ops->act_type != HD_F32) {
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "ranks of one process exchange float32; rank %d computes with %s", rank,
                       hd_dtype_name(ops->act_type));
    }
    const hd_comm *host = &w->ranks[rank].comm;
    if (hd_device_is_host(device)) {
        *out = host;
        return HD_OK;
    }
    HD_TRY(open_peers(w, err));
    return comm_peers_join(w->peers, host, device, stream, ops, out, err);
}
