/* emulated.c - emulated dispatch and combine: how many rows arrive, and which rows they
 * copy. */
#include "comm/emulated.h"

#include <stdlib.h>

#include "base/checked.h"
#include "base/cpu.h"
#include "base/progress.h"

struct hd_comm_emulated {
    hd_comm_emulated_options o;
    hd_comm comm;
    int32_t n_layers, n_slots;
    int32_t in_rows;
    int32_t *offset; /* [HD_EMULATED_SIZES, n_layers, n_slots + 1] device memory */
    int32_t *source; /* [in_rows] own row that each received row copies, device memory */
    float *weight;   /* [in_rows] device memory */
    bool filled;     /* in_x has been filled once */
    int64_t exchanges;
};

/* Returns the first slot of the busiest rank, for whose rows a step waits. */
static int32_t busiest(const double *fraction, int32_t n, int32_t per_rank) {
    int32_t best = 0;
    double most = 0;
    for (int32_t first = 0; first + per_rank <= n; first += per_rank) {
        double sum = 0;
        for (int32_t e = 0; e < per_rank; e++) sum += fraction[first + e];
        if (sum > most) {
            most = sum;
            best = first;
        }
    }
    return best;
}

/* Draws offset[n_slots + 1] of one layer: choices of all ranks, of which this rank gets
 * some. A drafter's layer may have fewer experts, which fill the first slots. */
static void draw_layer(const hd_comm_emulated *e, int32_t layer, int32_t rows, double *fraction,
                       int32_t *got, int32_t *offset) {
    const hd_parallel_config *l = &e->o.shard->parallel;
    const hd_router_rule rule = hd_layer_route(e->o.spec, layer);
    const bool fewer = rule.n_experts < e->o.spec->route.n_experts;
    const int32_t all = e->n_slots * l->ep, n = fewer ? rule.n_experts : all;
    const int64_t choices = (int64_t)rows * rule.top_k * l->ep;
    hd_routing_fractions(fraction, n, l->ep, e->o.routing, layer);
    hd_routing_draw(got, fraction, n, choices, layer);
    for (int32_t i = n; i < all; i++) got[i] = 0;
    int32_t first = e->o.routing == HD_ROUTING_SKEWED ? busiest(fraction, n, e->n_slots) : 0;
    if (fewer) first = e->o.shard->expert0;
    offset[0] = 0;
    for (int32_t i = 0; i < e->n_slots; i++) offset[i + 1] = offset[i] + got[first + i];
}

static hd_status put(hd_comm_emulated *e, void **out, const void *host, size_t bytes,
                     hd_err *err) {
    HD_TRY(hd_device_alloc(e->o.device, out, bytes, "arriving rows", err));
    hd_stream_upload(e->o.stream, *out, host, bytes);
    return hd_stream_sync(e->o.stream, err);
}

static hd_status draw_all(hd_comm_emulated *e, int32_t *offset, hd_err *err) {
    const size_t n = (size_t)e->n_slots * (size_t)e->o.shard->parallel.ep;
    double *fraction = malloc(n * sizeof *fraction);
    int32_t *got = malloc(n * sizeof *got);
    for (int k = 0; fraction && got && k < HD_EMULATED_SIZES; k++) {
        for (int32_t l = 0; l < e->n_layers; l++) {
            int32_t *at = offset + ((int64_t)k * e->n_layers + l) * (e->n_slots + 1);
            draw_layer(e, l, e->o.rows[k], fraction, got, at);
            e->in_rows = hd_max_i32(e->in_rows, at[e->n_slots]);
        }
    }
    const bool done = fraction && got;
    free(fraction);
    free(got);
    return done ? HD_OK : HD_FAIL(err, HD_ENOMEM, "no memory to draw arriving rows");
}

static hd_status place_rows(hd_comm_emulated *e, hd_err *err) {
    const size_t n = (size_t)e->in_rows;
    int32_t *source = malloc(n * sizeof *source + 1);
    float *weight = malloc(n * sizeof *weight + 1);
    void *there = NULL;
    hd_status st = HD_OK;
    if (!source || !weight) st = HD_FAIL(err, HD_ENOMEM, "no memory for arriving rows");
    for (size_t i = 0; st == HD_OK && i < n; i++) {
        source[i] = (int32_t)(i % (size_t)e->o.rows[HD_EMULATED_SIZES - 1]);
        weight[i] = (float)e->o.spec->route.scale / (float)e->o.spec->route.top_k;
    }
    if (st == HD_OK) st = put(e, &there, source, n * sizeof *source, err);
    e->source = there;
    if (st == HD_OK) st = put(e, &there, weight, n * sizeof *weight, err);
    e->weight = there;
    free(source);
    free(weight);
    return st;
}

static hd_status draw(hd_comm_emulated *e, hd_err *err) {
    const size_t n = (size_t)HD_EMULATED_SIZES * (size_t)e->n_layers * ((size_t)e->n_slots + 1);
    int32_t *offset = calloc(n, sizeof *offset);
    void *there = NULL;
    if (!offset) return HD_FAIL(err, HD_ENOMEM, "no memory for arriving rows");
    hd_status st = draw_all(e, offset, err);
    if (st == HD_OK) st = put(e, &there, offset, n * sizeof *offset, err);
    e->offset = there;
    free(offset);
    return st == HD_OK ? place_rows(e, err) : st;
}

/* ---- the calls: nothing is sent, rows arrive ---- */

/* A GPU computes what other streams have meanwhile: one thread of it is busy. */
static void take_time_of_rows(hd_comm_emulated *e, hd_stream *s, int32_t rows, int32_t row_ns) {
    const int64_t ns = (int64_t)e->o.exchange_us * 1000 + (int64_t)rows * row_ns;
    const int64_t until = hd_now_ns() + ns;
    e->exchanges++;
    if (!ns) return;
    hd_stream_busy(s, (int32_t)(ns / 1000));
    while (hd_device_is_host(e->o.device) && hd_now_ns() < until) hd_cpu_relax();
}

static void take_time(void *ctx, hd_stream *s) {
    take_time_of_rows(ctx, s, 0, 0);
}

static void keep_sum(void *ctx, hd_stream *s, const hd_all_reduce_args *a) {
    (void)a;
    take_time(ctx, s);
}

static void keep_part(void *ctx, hd_stream *s, const hd_reduce_scatter_args *a) {
    (void)a;
    take_time(ctx, s);
}

static void keep_columns(void *ctx, hd_stream *s, const hd_all_gather_args *a) {
    (void)a;
    take_time(ctx, s);
}

static void send_results(void *ctx, hd_stream *s, const hd_combine_args *a) {
    (void)ctx, (void)s, (void)a;
}

static const char *never_ended(void *ctx) {
    (void)ctx;
    return NULL;
}

static void ignore_abort(void *ctx, const char *why) {
    (void)ctx, (void)why;
}

/* As between GPUs, rows travel when they are sent. */
static void send_rows(void *ctx, hd_stream *s, const hd_dispatch_args *a) {
    hd_comm_emulated *e = ctx;
    take_time_of_rows(e, s, a->rows, e->o.dispatch_ns);
    const int size = a->rows == e->o.rows[0] ? 0 : HD_EMULATED_SIZES - 1;
    const int64_t row = (int64_t)size * e->n_layers + a->layer;
    hd_stream_copy(s, a->in_offset, e->offset + row * (e->n_slots + 1),
                   ((size_t)e->n_slots + 1) * sizeof *a->in_offset);
    if (e->filled && !e->o.copies) return;
    hd_stream_copy(s, a->in_weight, e->weight, (size_t)e->in_rows * sizeof *a->in_weight);
    e->o.ops->gather(s, &(hd_gather_args){.out = a->in_x,
                                          .x = a->x,
                                          .index = e->source,
                                          .rows = e->in_rows,
                                          .cols = a->cols});
    e->filled = true;
}

static void receive_rows(void *ctx, hd_stream *s, const hd_dispatch_args *a) {
    (void)ctx, (void)s, (void)a;
}

static void receive_results(void *ctx, hd_stream *s, const hd_combine_args *a) {
    hd_comm_emulated *e = ctx;
    const int32_t rows = hd_min_i32(a->in_rows, a->rows * a->top_k);
    take_time_of_rows(e, s, a->rows, e->o.combine_ns);
    if (!e->o.copies) return;
    hd_stream_copy(s, a->y.data, a->in_y.data,
                   (size_t)rows * (size_t)a->cols * (size_t)hd_act_bytes(e->o.ops));
}

static void keep_block(void *ctx, hd_stream *s, const hd_broadcast_args *a) {
    (void)ctx, (void)s, (void)a;
}

static const hd_comm_table table = {.all_reduce = keep_sum,
                                    .reduce_scatter = keep_part,
                                    .all_gather = keep_columns,
                                    .broadcast = keep_block,
                                    .dispatch_send = send_rows,
                                    .dispatch_arrive = receive_rows,
                                    .combine_send = send_results,
                                    .combine_arrive = receive_results,
                                    .abort = ignore_abort,
                                    .ended = never_ended};

hd_status hd_comm_emulated_open(hd_comm_emulated **out, const hd_comm_emulated_options *o,
                                hd_err *err) {
    *out = NULL;
    hd_comm_emulated *e = calloc(1, sizeof *e);
    if (!e) return HD_FAIL(err, HD_ENOMEM, "no memory for emulated ranks");
    e->o = *o;
    e->n_layers = o->spec->n_layers + o->spec->n_mtp;
    e->n_slots = o->shard->n_experts;
    e->comm = hd_comm_of(&table, e, &o->shard->parallel, o->shard->rank);
    e->comm.one_round = true;
    e->comm.one_sided = true;
    e->comm.slower_than_products = !hd_device_is_host(o->device);
    const hd_status st = o->shard->parallel.ep > 1 ? draw(e, err) : HD_OK;
    if (st != HD_OK) {
        hd_comm_emulated_close(e);
        return st;
    }
    *out = e;
    return HD_OK;
}

void hd_comm_emulated_close(hd_comm_emulated *e) {
    free(e);
}

const hd_comm *hd_comm_emulated_interface(const hd_comm_emulated *e) {
    return &e->comm;
}

int64_t hd_comm_emulated_exchanges(const hd_comm_emulated *e) {
    return e->exchanges;
}

int32_t hd_comm_emulated_rows(const hd_comm_emulated *e) {
    return e->in_rows;
}
