/* peers.c - see peers.h.
 *
 * A rank's device has a block of memory that the kernels of all ranks write, and the host a few words
 * that its own kernels read and write. A kernel that waits looks at the host's word, so an abort ends
 * it. What a kernel found wrong is seen when the host has waited for the stream (check). */
#include "comm/peers.h"

#include <assert.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/figures_internal.h"
#include "comm/peers_internal.h"

struct comm_peers {
    pthread_mutex_t mutex; /* of joining */
    pthread_cond_t joined;
    int32_t n, n_joined;
    bool shares; /* two ranks have the same GPU; known when all have joined */
    comm_peer ranks[HD_EXCHANGE_MAX_RANKS];
};

_Static_assert((int)HD_N_GROUPS <= (int)HD_EXCHANGE_GROUPS, "room for every kind of group");
_Static_assert((int)HD_COMM_MAX_INFLIGHT == (int)HD_EXCHANGE_INFLIGHT, "places of dispatches");

/* ---- the members ---- */

static const char *ended(void *ctx) {
    const comm_peer *r = ctx;
    return r->host->table->ended(r->host->ctx);
}

/* Before its first exchange a rank of a thread waits until all have joined. False: communication has
 * ended before. */
static bool await_ranks(comm_peer *r, hd_stream *s) {
    comm_peers *p = r->world;
    if (r->met) return true;
    if (!p) {
        hd_stream_fail(s, HD_EPEER, "this rank has come too late");
        return false;
    }
    pthread_mutex_lock(&p->mutex);
    while (p->n_joined < p->n && !ended(r)) pthread_cond_wait(&p->joined, &p->mutex);
    r->met = p->n_joined == p->n;
    for (int32_t i = 0; i < p->n; i++) r->memory[i] = p->ranks[i].own;
    r->shares_gpu = p->shares;
    pthread_mutex_unlock(&p->mutex);
    if (!r->met) hd_stream_fail(s, HD_EPEER, ended(r));
    return r->met;
}

static hd_exchange_peers peers_of(comm_peer *r, hd_group group) {
    const hd_rank_group *g = &r->comm.groups[group];
    hd_exchange_peers p = {.state = r->state,
                           .n = g->n,
                           .index = g->index,
                           .group = (int32_t)group,
                           .blocks =
                               r->shares_gpu ? HD_EXCHANGE_SHARED_BLOCKS : HD_EXCHANGE_BLOCKS};
    r->exchanged = true;
    for (int32_t k = 0; k < g->n; k++) {
        p.memory[k] = r->memory[g->first + k * g->stride];
        p.shift[k] = r->shift[g->first + k * g->stride];
    }
    return p;
}

/* Threads that share a GPU share its driver's lock, which a thread holds while its stream's queue is full:
 * behind a kernel that waits for another rank it must not fill. */
static void await_shared(const comm_peer *r, hd_stream *s) {
    if (r->world && r->shares_gpu && !hd_stream_captures(r->stream)) hd_stream_wait(s);
}

/* ---- the calls ---- */

/* All but the sizes of rows of experts, which the host does not know. */
static void count(const comm_peer *r, int64_t floats) {
    comm_count_bytes(r->comm.figures, floats * (int64_t)sizeof(float));
}

static void sum_part(comm_peer *r, hd_stream *s, const hd_reduce_scatter_args *a) {
    if (!await_ranks(r, s)) return;
    const hd_exchange_peers p = peers_of(r, a->group);
    count(r, (p.n - 1) * a->n);
    r->ops->sum(s, &p, &(hd_exchange_sum_args){a->x.data, a->n, a->first, a->own});
    await_shared(r, s);
}

static void all_reduce(void *ctx, hd_stream *s, const hd_all_reduce_args *a) {
    sum_part(ctx, s, &(hd_reduce_scatter_args){a->group, a->x, a->n, 0, a->n});
}

static void reduce_scatter(void *ctx, hd_stream *s, const hd_reduce_scatter_args *a) {
    sum_part(ctx, s, a);
}

static void all_gather(void *ctx, hd_stream *s, const hd_all_gather_args *a) {
    comm_peer *r = ctx;
    if (a->on_host) {
        r->host->table->all_gather(r->host->ctx, s, a);
        return;
    }
    if (!await_ranks(r, s)) return;
    const hd_exchange_peers p = peers_of(r, a->group);
    count(r, (int64_t)a->rows * (a->cols - a->own));
    r->ops->gather(s, &p, &(hd_exchange_gather_args){a->x, a->rows, a->cols, a->first, a->own});
    await_shared(r, s);
}

/* The kernel has memory for one set of members: those of an attention group. */
static bool join_norm(void *ctx, hd_stream *s, const hd_join_norm_args *a) {
    comm_peer *r = ctx;
    const hd_rank_group *g = &r->comm.groups[a->group], *all = &r->comm.groups[HD_GROUP_TP];
    const hd_add_norm_args *n = &a->norm;
    if (!r->ops->norm || !n->y.data || g->n != all->n || g->first != all->first ||
        n->rows > HD_EXCHANGE_NORM_ROWS || n->cols > HD_EXCHANGE_NORM_COLS ||
        (a->sums && g->n > HD_EXCHANGE_NORM_MEMBERS)) {
        return false;
    }
    if (!await_ranks(r, s)) return true;
    const hd_exchange_peers p = peers_of(r, a->group);
    count(r, a->sums ? (int64_t)(p.n - 1) * n->rows * n->cols
                     : (int64_t)n->rows * (n->cols - a->own));
    r->ops->norm(s, &p, &(hd_exchange_norm_args){*n, a->sums, a->first, a->own});
    await_shared(r, s);
    return true;
}

static void broadcast(void *ctx, hd_stream *s, const hd_broadcast_args *a) {
    const comm_peer *r = ctx;
    r->host->table->broadcast(r->host->ctx, s, a);
}

/* A captured pass has the same places again in every launch, and a member may have recorded it at another time:
 * so places are counted in each pass. */
static void begin_pass(void *ctx) {
    comm_peer *r = ctx;
    r->sent = r->combined = 0;
}

/* The rows travel at once, while the stream of other stages goes on. */
static void dispatch_send(void *ctx, hd_stream *s, const hd_dispatch_args *a) {
    comm_peer *r = ctx;
    assert(r->sent < r->combined + HD_COMM_MAX_INFLIGHT);
    if (a->n_slots * r->comm.groups[HD_GROUP_EP].n > HD_EXCHANGE_SLOTS) {
        hd_stream_fail(s, HD_EUNSUPPORTED, "more expert slots than GPUs exchange rows for");
    }
    const int32_t place = (int32_t)(r->sent++ % HD_COMM_MAX_INFLIGHT);
    r->dispatch[place] = *a;
    assert(comm_peer_shares(r, a->x.data) && comm_peer_shares(r, a->weight) &&
           comm_peer_shares(r, a->offset) && comm_peer_shares(r, a->assignment));
    if (!await_ranks(r, s)) return;
    const hd_exchange_peers p = peers_of(r, HD_GROUP_EP);
    hd_exchange_dispatch_args x = {.x = a->x.data,
                                   .weight = a->weight,
                                   .offset = a->offset,
                                   .assignment = a->assignment,
                                   .in_x = a->in_x.data,
                                   .in_weight = a->in_weight,
                                   .in_offset = a->in_offset,
                                   .cols = a->cols,
                                   .top_k = a->top_k,
                                   .in_rows = a->in_rows,
                                   .n_slots = a->n_slots,
                                   .place = place,
                                   .round = a->round};
    if (a->format.code) {
        x.group = a->format.group;
        x.row_bytes = (int32_t)hd_packed_row_bytes(a->format, a->cols);
        x.row_scales = (int32_t)hd_packed_row_scales(a->cols);
    }
    for (int32_t k = 0; k < p.n; k++) x.most[k] = a->most ? a->most[k] : INT32_MAX;
    r->ops->dispatch(s, &p, &x);
    await_shared(r, s);
}

static void dispatch_arrive(void *ctx, hd_stream *s, const hd_dispatch_args *a) {
    (void)ctx, (void)s, (void)a;
}

/* The others come for the results when they are asked to arrive. */
static void combine_send(void *ctx, hd_stream *s, const hd_combine_args *a) {
    (void)ctx, (void)s, (void)a;
}

static void combine_arrive(void *ctx, hd_stream *s, const hd_combine_args *a) {
    comm_peer *r = ctx;
    assert(comm_peer_shares(r, a->in_y.data));
    if (!await_ranks(r, s)) return;
    const hd_exchange_peers p = peers_of(r, HD_GROUP_EP);
    const int32_t place = (int32_t)(r->combined++ % HD_COMM_MAX_INFLIGHT);
    const hd_dispatch_args *sent = &r->dispatch[place];
    r->ops->combine(
        s, &p,
        &(hd_exchange_combine_args){.in_y = a->in_y.data,
                                    .y = a->y.data,
                                    .offset = sent->offset,
                                    .cols = a->cols,
                                    .n_slots = sent->n_slots,
                                    .place = place,
                                    .round = sent->round,
                                    .most = sent->most ? sent->most[p.index] : INT32_MAX});
    await_shared(r, s);
}

static void abort_all(void *ctx, const char *why) {
    const comm_peer *r = ctx;
    r->host->table->abort(r->host->ctx, why);
}

static hd_status share_rows(void *ctx, hd_stream *s, void *block, size_t bytes, hd_err *err) {
    comm_peer *r = ctx;
    r->rows = block;
    r->row_bytes = bytes;
    return r->share_rows ? r->share_rows(r, s, err) : HD_OK;
}

static const hd_comm_table table = {.all_reduce = all_reduce,
                                    .reduce_scatter = reduce_scatter,
                                    .all_gather = all_gather,
                                    .broadcast = broadcast,
                                    .join_norm = join_norm,
                                    .begin_pass = begin_pass,
                                    .dispatch_send = dispatch_send,
                                    .dispatch_arrive = dispatch_arrive,
                                    .combine_send = combine_send,
                                    .combine_arrive = combine_arrive,
                                    .share_rows = share_rows,
                                    .abort = abort_all,
                                    .ended = ended};

/* ---- failures ---- */

static int32_t most_rows(const comm_peer *r) {
    return r->dispatch[(r->sent - 1) % HD_COMM_MAX_INFLIGHT].in_rows;
}

/* Results of kernels that stopped waiting are undefined: the stream must not end well. Without one it
 * does: a rank loads its shard although it will begin anew. */
static void check(void *ctx, hd_stream *s) {
    comm_peer *r = ctx;
    char why[160] = "";
    if (!r->host || !r->exchanged) return;
    const int32_t too_many = r->state->too_many, late = r->state->late;
    if (too_many) {
        snprintf(why, sizeof why, "rank %d receives %d rows for its experts, at most %d fit",
                 r->comm.rank, too_many, most_rows(r));
    } else if (late) {
        snprintf(why, sizeof why, "rank %d has waited %d seconds for member %d of its group",
                 r->comm.rank, HD_EXCHANGE_MAX_SECONDS, late - 1);
    }
    if (why[0]) abort_all(r, why);
    if (ended(r)) hd_stream_fail(s, HD_EPEER, ended(r));
}

void comm_peer_end(comm_peer *r) {
    __atomic_store_n(&r->state->ended, 1, __ATOMIC_SEQ_CST);
}

void comm_peers_abort(comm_peers *p) {
    pthread_mutex_lock(&p->mutex);
    pthread_cond_broadcast(&p->joined);
    pthread_mutex_unlock(&p->mutex);
    for (int32_t i = 0; i < p->n; i++) {
        if (p->ranks[i].state) comm_peer_end(&p->ranks[i]);
    }
    for (int32_t i = 0; i < p->n; i++) {
        hd_stream *s = p->ranks[i].stream;
        if (s && !hd_stream_captures(s)) hd_stream_wait(s);
    }
}

void comm_peers_reset(comm_peers *p) {
    for (int32_t i = 0; i < p->n; i++) {
        comm_peer *r = &p->ranks[i];
        hd_err old = {0};
        if (!r->own) continue;
        r->sent = r->combined = 0;
        r->ops->reset(r->stream, r->own);
        hd_stream_wait(r->stream);
        *r->state = (hd_exchange_state){0};
        hd_stream_sync(r->stream, &old); /* a failure that it has kept */
    }
}

/* ---- joining ---- */

hd_status comm_peers_open(comm_peers **out, int32_t n_ranks, hd_err *err) {
    *out = NULL;
    if (n_ranks > HD_EXCHANGE_MAX_RANKS) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "%d ranks on GPUs of one host; at most %d",
                       n_ranks, HD_EXCHANGE_MAX_RANKS);
    }
    comm_peers *p = calloc(1, sizeof *p);
    if (!p) return HD_FAIL(err, HD_ENOMEM, "no memory for %d ranks", n_ranks);
    pthread_mutex_init(&p->mutex, NULL);
    pthread_cond_init(&p->joined, NULL);
    p->n = n_ranks;
    *out = p;
    return HD_OK;
}

/* The memory of the ranks goes with their devices. */
void comm_peers_close(comm_peers *p) {
    if (!p) return;
    pthread_cond_destroy(&p->joined);
    pthread_mutex_destroy(&p->mutex);
    free(p);
}

/* With the mutex: this rank and those that have joined reach each other. */
static hd_status enable_peer_access(comm_peer *r, hd_err *err) {
    for (int32_t i = 0; i < r->world->n; i++) {
        const comm_peer *other = &r->world->ranks[i];
        if (other == r || !other->device) continue;
        r->world->shares |= hd_device_is_same(r->device, other->device);
        HD_TRY(hd_device_enable_peer_access(r->device, other->device, err));
        HD_TRY(hd_device_enable_peer_access(other->device, r->device, err));
    }
    return HD_OK;
}

hd_status comm_peer_open(comm_peer *r, hd_device *device, hd_stream *stream, const hd_ops *ops,
                         hd_err *err) {
    void *state;
    r->device = device;
    r->stream = stream;
    r->ops = ops->exchange;
    HD_TRY(hd_device_alloc_host(device, &state, sizeof *r->state, "words of exchanges", err));
    r->state = state;
    hd_stream_set_check(stream, check, r);
    return HD_OK;
}

hd_status comm_peer_take_memory(comm_peer *r, hd_err *err) {
    return hd_device_alloc(r->device, &r->own, r->ops->bytes, "exchanges between GPUs", err);
}

void comm_peer_set_host(comm_peer *r, const hd_comm *host) {
    r->host = host;
    r->comm = *host;
    r->comm.one_sided = true;
    r->comm.slower_than_products = true;
    r->comm.joins_norms = true;
    r->comm.table = &table;
    r->comm.ctx = r;
}

hd_status comm_peers_join(comm_peers *p, const hd_comm *host, hd_device *device,
                          hd_stream *stream, const hd_ops *ops, const hd_comm **out,
                          hd_err *err) {
    comm_peer *r = &p->ranks[host->rank];
    r->world = p;
    comm_peer_set_host(r, host);
    pthread_mutex_lock(&p->mutex);
    hd_status st = comm_peer_open(r, device, stream, ops, err);
    if (st == HD_OK) st = enable_peer_access(r, err);
    if (st == HD_OK) st = comm_peer_take_memory(r, err);
    p->n_joined += st == HD_OK;
    pthread_cond_broadcast(&p->joined);
    pthread_mutex_unlock(&p->mutex);
    *out = st == HD_OK ? &r->comm : NULL;
    return st;
}
