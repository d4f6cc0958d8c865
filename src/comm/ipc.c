/* ipc.c - see ipc.h. */
#include "comm/ipc.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/checked.h"
#include "comm/export.h"
#include "comm/peers_internal.h"

enum {
    RANKS = HD_EXCHANGE_MAX_RANKS,
    WORDS = sizeof(hd_export) / sizeof(float),
    MAX_READERS = 16 * RANKS,
    ENDING_MS = 5000, /* a process that was killed needs some time to end */
    NAP_NS = 1000000
};

struct comm_ipc {
    comm_peer peer; /* first: share_rows() gets it */
    hd_place here;
    int32_t n; /* ranks of the layout */
    const void *opened[2 * RANKS];
    int32_t n_opened;
    /* Processes that have had memory of this rank open since old memory was freed last. More than there
     * is room for: it is freed no more. */
    hd_place reader[MAX_READERS];
    int32_t n_readers;
};

/* ---- exports of all ranks ---- */

/* What each rank of the layout says, by its number: first within attention groups, whose ranks are
 * neighbors, then between them. */
static hd_status gather(const comm_ipc *x, hd_export all[RANKS], hd_err *err) {
    const comm_peer *r = &x->peer;
    const hd_rank_group *tp = &r->comm.groups[HD_GROUP_TP];
    const int32_t own = r->comm.rank, group = own - tp->index;
    float *words = (float *)(void *)all;
    hd_comm_all_gather(&r->comm, r->stream,
                       &(hd_all_gather_args){.group = HD_GROUP_TP,
                                             .x = words + (int64_t)group * WORDS,
                                             .rows = 1,
                                             .cols = tp->n * WORDS,
                                             .first = tp->index * WORDS,
                                             .own = WORDS,
                                             .on_host = true});
    hd_comm_all_gather(&r->comm, r->stream,
                       &(hd_all_gather_args){.group = HD_GROUP_DP,
                                             .x = words,
                                             .rows = 1,
                                             .cols = x->n * WORDS,
                                             .first = group * WORDS,
                                             .own = tp->n * WORDS,
                                             .on_host = true});
    return hd_stream_failure(r->stream, err);
}

/* Shares a block with all ranks, and fills all with what they share, each at_least so many bytes. */
static hd_status exchange(const comm_ipc *x, void *block, size_t bytes, uint64_t at_least,
                          hd_export all[RANKS], hd_err *err) {
    const int32_t own = x->peer.comm.rank;
    HD_TRY(hd_export_make(&all[own], x->peer.device, block, bytes, err));
    HD_TRY(gather(x, all, err));
    for (int32_t i = 0; i < x->n; i++) {
        if (i != own) HD_TRY(hd_export_check(&all[i], i, at_least, &x->here, err));
    }
    return HD_OK;
}

static hd_status open_all(comm_ipc *x, const hd_export all[RANKS], const void *at[RANKS],
                          hd_err *err) {
    for (int32_t i = 0; i < x->n; i++) {
        if (i == x->peer.comm.rank) continue;
        assert(x->n_opened < (int32_t)HD_LEN(x->opened));
        HD_TRY(hd_export_open(&all[i], i, x->peer.device, &at[i], err));
        x->opened[x->n_opened++] = at[i];
    }
    return HD_OK;
}

/* The same on all ranks. */
static bool any_share_a_gpu(const comm_ipc *x, const hd_export all[RANKS]) {
    for (int32_t i = 0; i < x->n; i++) {
        for (int32_t k = 0; k < i; k++) {
            if (memcmp(all[i].gpu, all[k].gpu, sizeof all[i].gpu) == 0) return true;
        }
    }
    return false;
}

/* ---- old memory ---- */

static bool is_here(const comm_ipc *x, const hd_export all[RANKS], const hd_place *p) {
    for (int32_t i = 0; i < x->n; i++) {
        if (all[i].place.pid == p->pid) return true;
    }
    return false;
}

/* Who is stopped stays for long. */
static bool will_end(const comm_ipc *x, const hd_place *p) {
    for (int32_t ms = 0; ms < ENDING_MS; ms++) {
        if (hd_place_has_ended(p)) return true;
        if (!hd_place_runs(p, &x->here)) return false;
        nanosleep(&(struct timespec){0, NAP_NS}, NULL);
    }
    return false;
}

/* A rank of this epoch has closed what it had open. */
static void forget_readers(comm_ipc *x, const hd_export all[RANKS]) {
    if (x->n_readers > MAX_READERS) return;
    for (int32_t i = x->n_readers - 1; i >= 0; i--) {
        const hd_place *p = &x->reader[i];
        if (is_here(x, all, p) || will_end(x, p)) x->reader[i] = x->reader[--x->n_readers];
    }
    if (x->n_readers == 0) hd_device_end_sharing(x->peer.device);
}

static void note_readers(comm_ipc *x, const hd_export all[RANKS]) {
    for (int32_t i = 0; i < x->n; i++) {
        if (i == x->peer.comm.rank || x->n_readers > MAX_READERS) continue;
        if (x->n_readers < MAX_READERS) x->reader[x->n_readers] = all[i].place;
        x->n_readers++;
    }
}

/* ---- connecting ---- */

/* A rank that comes late, or has lost another one, begins anew with other rows. */
static hd_status share_rows(comm_peer *r, hd_stream *s, hd_err *err) {
    comm_ipc *x = (comm_ipc *)r;
    hd_export all[RANKS] = {0};
    const void *at[RANKS] = {0};
    (void)s;
    if (!r->met || hd_comm_ended(r->host)) return HD_OK;
    hd_status st = exchange(x, r->rows, r->row_bytes, 1, all, err);
    if (st == HD_OK) st = open_all(x, all, at, err);
    if (st == HD_EPEER) {
        *err = (hd_err){0};
        return HD_OK;
    }
    for (int32_t i = 0; i < x->n && st == HD_OK; i++) {
        if (at[i]) r->shift[i] = (int64_t)((uint64_t)(uintptr_t)at[i] - all[i].address);
    }
    return st;
}

static void begin(comm_ipc *x, const hd_comm *host) {
    comm_peer *r = &x->peer;
    hd_device_release(r->device, r->own);
    r->own = NULL;
    r->met = r->exchanged = false;
    r->rows = NULL;
    r->row_bytes = 0;
    memset(r->shift, 0, sizeof r->shift);
    r->sent = r->combined = 0;
    r->state->late = r->state->too_many = 0;
    __atomic_store_n(&r->state->ended, 0, __ATOMIC_SEQ_CST);
    comm_peer_set_host(r, host);
    if (hd_comm_ended(host)) comm_ipc_end(x); /* the watch may have said so before */
}

hd_status comm_ipc_connect(comm_ipc *x, const hd_comm *host, hd_err *err) {
    comm_peer *r = &x->peer;
    hd_export all[RANKS] = {0};
    const void *at[RANKS] = {0};
    begin(x, host);
    x->n = r->comm.groups[HD_GROUP_TP].n * r->comm.groups[HD_GROUP_DP].n;
    if (x->n > RANKS) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "%d ranks on GPUs of one host; at most %d", x->n,
                       RANKS);
    }
    HD_TRY(comm_peer_take_memory(r, err));
    HD_TRY(exchange(x, r->own, r->ops->bytes, r->ops->bytes, all, err));
    forget_readers(x, all);
    note_readers(x, all);
    HD_TRY(open_all(x, all, at, err));
    r->shares_gpu = any_share_a_gpu(x, all);
    for (int32_t i = 0; i < x->n; i++) r->memory[i] = (void *)(uintptr_t)at[i];
    r->memory[r->comm.rank] = r->own;
    r->met = true;
    return HD_OK;
}

void comm_ipc_come_late(comm_ipc *x, const hd_comm *host) {
    begin(x, host);
}

void comm_ipc_end(comm_ipc *x) {
    comm_peer_end(&x->peer);
}

const hd_comm *comm_ipc_comm(const comm_ipc *x) {
    return &x->peer.comm;
}

/* ---- opening and closing ---- */

hd_status comm_ipc_open(comm_ipc **out, hd_device *device, hd_stream *stream, const hd_ops *ops,
                        hd_err *err) {
    *out = NULL;
    comm_ipc *x = calloc(1, sizeof *x);
    if (!x) return HD_FAIL(err, HD_ENOMEM, "no memory for a rank on a GPU");
    x->here = hd_place_here();
    x->peer.share_rows = share_rows;
    const hd_status st = comm_peer_open(&x->peer, device, stream, ops, err);
    if (st == HD_OK)
        *out = x;
    else
        free(x);
    return st;
}

void comm_ipc_disconnect(comm_ipc *x) {
    hd_stream_wait(x->peer.stream);
    x->peer.host = NULL;
    while (x->n_opened > 0) {
        hd_device_close_shared(x->peer.device, x->opened[--x->n_opened]);
    }
}

void comm_ipc_close(comm_ipc *x) {
    if (!x) return;
    hd_stream_set_check(x->peer.stream, NULL, NULL);
    hd_device_release(x->peer.device, x->peer.own);
    hd_device_release(x->peer.device, x->peer.state);
    hd_device_end_sharing(x->peer.device);
    free(x);
}
