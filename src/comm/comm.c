/* comm.c - the calls of comm.h: each is the backend's, and is counted. */
#include "comm/comm.h"

#include <string.h>

#include "base/progress.h"
#include "comm/figures_internal.h"

/* ---- figures ---- */

/* Where a figure is in comm_figures. */
#define AT(field) (offsetof(hd_rank_figures, field) / sizeof(int64_t))

enum { PER_KIND = (int)(sizeof(hd_comm_op_figures) / sizeof(int64_t)) };

/* Only the rank's thread writes: readers need no order between figures. */
static void add(comm_figures *f, size_t at, int64_t n) {
    const int64_t before = atomic_load_explicit(&f->n[at], memory_order_relaxed);
    atomic_store_explicit(&f->n[at], before + n, memory_order_relaxed);
}

static void add_of_kind(comm_figures *f, size_t at, int64_t n) {
    add(f, at + (size_t)f->kind * PER_KIND, n);
}

void comm_count_bytes(comm_figures *f, int64_t bytes) {
    if (f) add_of_kind(f, AT(of[0].bytes), bytes);
}

void comm_count_wait(comm_figures *f, int64_t ns) {
    if (f) add_of_kind(f, AT(of[0].wait_ns), ns);
}

void comm_read_figures(const comm_figures *f, hd_rank_figures *out) {
    int64_t n[COMM_FIGURES] = {0};
    for (int i = 0; i < COMM_FIGURES; i++) {
        n[i] = atomic_load_explicit(&f->n[i], memory_order_relaxed);
    }
    memcpy(out, n, sizeof *out);
}

void hd_comm_read_figures(const hd_comm *c, hd_rank_figures *out) {
    *out = (hd_rank_figures){0};
    if (c->figures) comm_read_figures(c->figures, out);
}

static int64_t begin(const hd_comm *c, hd_comm_op kind) {
    if (!c->figures) return 0;
    c->figures->kind = kind;
    return hd_now_ns();
}

/* calls: 0 for a half of one. */
static void end(const hd_comm *c, int64_t begun, int64_t calls) {
    comm_figures *f = c->figures;
    if (!f) return;
    const int64_t ns = hd_now_ns() - begun;
    add_of_kind(f, AT(of[0].calls), calls);
    add_of_kind(f, AT(of[0].ns), ns);
    f->exchange_ns += ns;
}

int64_t hd_comm_begin_pass(const hd_comm *c) {
    if (c && c->table->begin_pass) c->table->begin_pass(c->ctx);
    return c && c->figures ? hd_now_ns() - c->figures->exchange_ns : 0;
}

void hd_comm_end_pass(const hd_comm *c, int64_t begun) {
    if (!c || !c->figures) return;
    add(c->figures, AT(passes), 1);
    add(c->figures, AT(compute_ns), hd_now_ns() - c->figures->exchange_ns - begun);
}

/* ---- calls ---- */

hd_status hd_comm_share_rows(const hd_comm *c, hd_stream *s, void *block, size_t bytes,
                             hd_err *err) {
    return c->table->share_rows ? c->table->share_rows(c->ctx, s, block, bytes, err) : HD_OK;
}

void hd_comm_all_reduce(const hd_comm *c, hd_stream *s, const hd_all_reduce_args *a) {
    const int64_t begun = begin(c, HD_COMM_OP_ALL_REDUCE);
    c->table->all_reduce(c->ctx, s, a);
    end(c, begun, 1);
}

void hd_comm_reduce_scatter(const hd_comm *c, hd_stream *s, const hd_reduce_scatter_args *a) {
    const int64_t begun = begin(c, HD_COMM_OP_REDUCE_SCATTER);
    c->table->reduce_scatter(c->ctx, s, a);
    end(c, begun, 1);
}

void hd_comm_all_gather(const hd_comm *c, hd_stream *s, const hd_all_gather_args *a) {
    const int64_t begun = begin(c, HD_COMM_OP_ALL_GATHER);
    c->table->all_gather(c->ctx, s, a);
    end(c, begun, 1);
}

static void complete_rows(const hd_comm *c, hd_stream *s, const hd_join_norm_args *a) {
    const hd_add_norm_args *n = &a->norm;
    if (a->sums) {
        c->table->all_reduce(c->ctx, s,
                             &(hd_all_reduce_args){a->group, n->y, (int64_t)n->rows * n->cols});
    } else {
        c->table->all_gather(c->ctx, s,
                             &(hd_all_gather_args){.group = a->group,
                                                   .x = n->y.data,
                                                   .rows = n->rows,
                                                   .cols = n->cols,
                                                   .first = a->first,
                                                   .own = a->own});
    }
}

void hd_comm_join_norm(const hd_comm *c, const hd_ops *ops, hd_stream *s,
                       const hd_join_norm_args *a) {
    const int64_t begun = begin(c, a->sums ? HD_COMM_OP_ALL_REDUCE : HD_COMM_OP_ALL_GATHER);
    const bool fused = c->table->join_norm && c->table->join_norm(c->ctx, s, a);
    if (!fused) complete_rows(c, s, a);
    end(c, begun, 1);
    if (!fused) ops->add_norm(s, &a->norm);
}

void hd_comm_broadcast(const hd_comm *c, hd_stream *s, const hd_broadcast_args *a) {
    const int64_t begun = begin(c, HD_COMM_OP_BROADCAST);
    c->table->broadcast(c->ctx, s, a);
    end(c, begun, 1);
}

void hd_comm_dispatch_send(const hd_comm *c, hd_stream *s, const hd_dispatch_args *a) {
    const int64_t begun = begin(c, HD_COMM_OP_DISPATCH);
    c->table->dispatch_send(c->ctx, s, a);
    end(c, begun, 1); /* a one-sided dispatch ends here */
}

void hd_comm_dispatch_arrive(const hd_comm *c, hd_stream *s, const hd_dispatch_args *a) {
    const int64_t begun = begin(c, HD_COMM_OP_DISPATCH);
    c->table->dispatch_arrive(c->ctx, s, a);
    end(c, begun, 0);
}

void hd_comm_combine_send(const hd_comm *c, hd_stream *s, const hd_combine_args *a) {
    const int64_t begun = begin(c, HD_COMM_OP_COMBINE);
    c->table->combine_send(c->ctx, s, a);
    end(c, begun, 0);
}

void hd_comm_combine_arrive(const hd_comm *c, hd_stream *s, const hd_combine_args *a) {
    const int64_t begun = begin(c, HD_COMM_OP_COMBINE);
    c->table->combine_arrive(c->ctx, s, a);
    end(c, begun, 1);
}
