/* traced_comm.c - reports the bytes of each exchange: sums and gathers around a ring, rows of
 * experts once for each expert that another rank holds. */
#include "capacity/traced_comm_internal.h"

#include <math.h>

#include "base/checked.h"

void traced_spread(int32_t *offset, int32_t slots, int64_t places, double choices, int32_t n) {
    const double hit = slots * (1 - pow(1 - 1.0 / n, choices));
    int32_t used = hd_max_i32(1, hd_min_i32(slots, (int32_t)lround(hit)));
    if (places < used) used = (int32_t)places;
    for (int32_t s = 0; s <= slots; s++) {
        offset[s] = (int32_t)(used ? places * hd_min_i32(s, used) / used : 0);
    }
}

/* ---- what a rank sends ---- */

/* The members of a group but this one: on its node, and on others. */
typedef struct peers {
    int32_t inside, outside;
} peers;

static peers peers_of(const traced_comm *c, hd_group group) {
    const hd_rank_group *g = &c->comm.groups[group];
    peers p = {-1, 0};
    for (int32_t i = 0; i < g->n; i++) {
        const bool near = (g->first + i * g->stride) / c->node == c->comm.rank / c->node;
        p.inside += near;
        p.outside += !near;
    }
    return p;
}

/* `bytes` to each of the other members. */
static void report_each(const traced_comm *c, hd_group group, const char *name, double bytes) {
    const peers p = peers_of(c, group);
    c->report(c->ctx, name, bytes * p.inside, bytes * p.outside);
}

/* Messages have float32, or packed rows. */
static void note_message(const traced_comm *c, hd_group group, hd_message_lane lane,
                         double bytes) {
    if (!c->messages || c->comm.groups[group].n == 1) return;
    uint64_t *most = &c->messages->bytes[group][lane];
    if (bytes > (double)*most) *most = (uint64_t)bytes;
}

static double part_of(const traced_comm *c, hd_group group, double bytes) {
    return bytes / c->comm.groups[group].n;
}

/* Each rank sends a part to every other, and its part of the sum back. */
static void all_reduce(void *ctx, hd_stream *s, const hd_all_reduce_args *a) {
    const traced_comm *c = ctx;
    (void)s;
    report_each(c, a->group, "all-reduce",
                2 * part_of(c, a->group, (double)a->n * c->act_bytes));
    note_message(c, a->group, HD_MESSAGE_COLLECTIVE, (double)a->n * sizeof(float));
}

static void reduce_scatter(void *ctx, hd_stream *s, const hd_reduce_scatter_args *a) {
    const traced_comm *c = ctx;
    (void)s;
    report_each(c, a->group, "reduce-scatter",
                part_of(c, a->group, (double)a->n * c->act_bytes));
    note_message(c, a->group, HD_MESSAGE_COLLECTIVE, (double)(a->n - a->own) * sizeof(float));
}

static void all_gather(void *ctx, hd_stream *s, const hd_all_gather_args *a) {
    const double bytes = (double)a->rows * a->own * sizeof(float);
    (void)s;
    report_each(ctx, a->group, "all-gather", bytes);
    note_message(ctx, a->group, HD_MESSAGE_COLLECTIVE, bytes);
}

static void broadcast(void *ctx, hd_stream *s, const hd_broadcast_args *a) {
    (void)ctx, (void)s, (void)a;
}

/* Choices of experts whose rows the busiest rank gets. */
static double busiest(const traced_comm *c, int32_t top_k) {
    return part_of(c, HD_GROUP_EP, (double)c->rows * top_k) * c->most;
}

/* A row of so many bytes for each choice of an expert; experts are on all members alike. */
static void report_rows(const traced_comm *c, const char *name, int32_t top_k, double row) {
    const double bytes = busiest(c, top_k) * row;
    report_each(c, HD_GROUP_EP, name, part_of(c, HD_GROUP_EP, bytes));
}

/* To the other members: how many rows each of their slots gets, weight and number of each choice, and to each of them
 * a row once (comm/messages.c). Receivers have equal room for every sender. */
static void note_dispatch(const traced_comm *c, const hd_dispatch_args *a) {
    const int32_t others = c->comm.groups[HD_GROUP_EP].n - 1;
    const double row = a->format.code ? (double)hd_packed_row_bytes(a->format, a->cols)
                                      : (double)a->cols * sizeof(float);
    const double choices =
        fmin((double)a->rows * a->top_k, part_of(c, HD_GROUP_EP, (double)c->room) * others);
    const double rows = fmin((double)a->rows * others, choices);
    note_message(c, HD_GROUP_EP, HD_MESSAGE_DISPATCH,
                 sizeof(float) * ((double)a->n_slots * others + 2 * choices) + rows * row);
}

static void note_combine(const traced_comm *c, const hd_combine_args *a) {
    const double all = fmin((double)c->rows * a->top_k, (double)c->room);
    const double results = all - part_of(c, HD_GROUP_EP, all);
    note_message(c, HD_GROUP_EP, HD_MESSAGE_COMBINE, results * a->cols * sizeof(float));
}

/* Packed rows are what they are, others activations. */
static void dispatch_send(void *ctx, hd_stream *s, const hd_dispatch_args *a) {
    const traced_comm *c = ctx;
    const double row = a->format.code ? (double)hd_packed_row_bytes(a->format, a->cols)
                                      : (double)a->cols * c->act_bytes;
    (void)s;
    report_rows(c, "dispatch", a->top_k, row);
    note_dispatch(c, a);
}

static void dispatch_arrive(void *ctx, hd_stream *s, const hd_dispatch_args *a) {
    const traced_comm *c = ctx;
    (void)s;
    const int64_t places = (int64_t)ceil(busiest(c, a->top_k));
    traced_spread(a->in_offset, a->n_slots, places < a->in_rows ? places : a->in_rows,
                  (double)c->rows * a->top_k, c->n_experts);
}

static void combine_send(void *ctx, hd_stream *s, const hd_combine_args *a) {
    const traced_comm *c = ctx;
    (void)s;
    report_rows(c, "combine", a->top_k, (double)a->cols * c->act_bytes);
    note_combine(c, a);
}

static void combine_arrive(void *ctx, hd_stream *s, const hd_combine_args *a) {
    (void)ctx, (void)s, (void)a;
}

static void ignore_abort(void *ctx, const char *why) {
    (void)ctx, (void)why;
}

static const char *never_ended(void *ctx) {
    (void)ctx;
    return NULL;
}

static const hd_comm_table table = {.all_reduce = all_reduce,
                                    .reduce_scatter = reduce_scatter,
                                    .all_gather = all_gather,
                                    .broadcast = broadcast,
                                    .dispatch_send = dispatch_send,
                                    .dispatch_arrive = dispatch_arrive,
                                    .combine_send = combine_send,
                                    .combine_arrive = combine_arrive,
                                    .abort = ignore_abort,
                                    .ended = never_ended};

void traced_comm_init(traced_comm *c, const hd_parallel_config *parallel, int32_t rank) {
    c->comm = hd_comm_of(&table, c, parallel, rank);
}
