/* staged_comm.c - see staged_comm.h. */
#include "fakes/staged_comm.h"

#include <stdlib.h>

static void *there(const staged_comm *s, const void *p) {
    const char *at = p;
    return p ? s->device + (at - s->host) : NULL;
}

static hd_rows rows_there(const staged_comm *s, hd_rows x) {
    x.data = there(s, x.data);
    return x;
}

static void up(const staged_comm *s, hd_stream *stream) {
    hd_stream_upload(stream, s->device, s->host, s->used);
}

static void down(const staged_comm *s, hd_stream *stream) {
    hd_stream_download(stream, s->host, s->device, s->used);
    hd_stream_wait(stream);
}

static void all_reduce(void *ctx, hd_stream *stream, const hd_all_reduce_args *a) {
    staged_comm *s = ctx;
    hd_all_reduce_args b = *a;
    b.x = rows_there(s, a->x);
    up(s, stream);
    hd_comm_all_reduce(s->inner, stream, &b);
    down(s, stream);
}

static void reduce_scatter(void *ctx, hd_stream *stream, const hd_reduce_scatter_args *a) {
    staged_comm *s = ctx;
    hd_reduce_scatter_args b = *a;
    b.x = rows_there(s, a->x);
    up(s, stream);
    hd_comm_reduce_scatter(s->inner, stream, &b);
    down(s, stream);
}

static void all_gather(void *ctx, hd_stream *stream, const hd_all_gather_args *a) {
    staged_comm *s = ctx;
    hd_all_gather_args b = *a;
    if (!a->on_host) b.x = there(s, a->x);
    up(s, stream);
    hd_comm_all_gather(s->inner, stream, &b);
    down(s, stream);
}

static bool join_norm(void *ctx, hd_stream *stream, const hd_join_norm_args *a) {
    staged_comm *s = ctx;
    hd_join_norm_args b = *a;
    b.norm.out = rows_there(s, a->norm.out);
    b.norm.x = rows_there(s, a->norm.x);
    b.norm.y = rows_there(s, a->norm.y);
    b.norm.weight = there(s, a->norm.weight);
    up(s, stream);
    hd_comm_join_norm(s->inner, s->ops, stream, &b);
    down(s, stream);
    return true;
}

static void broadcast(void *ctx, hd_stream *stream, const hd_broadcast_args *a) {
    hd_comm_broadcast(((staged_comm *)ctx)->inner, stream, a);
}

static hd_dispatch_args dispatched(const staged_comm *s, const hd_dispatch_args *a) {
    hd_dispatch_args b = *a;
    b.x = rows_there(s, a->x);
    b.weight = there(s, a->weight);
    b.offset = there(s, a->offset);
    b.assignment = there(s, a->assignment);
    b.in_x = rows_there(s, a->in_x);
    b.in_weight = there(s, a->in_weight);
    b.in_offset = there(s, a->in_offset);
    return b;
}

static hd_combine_args combined(const staged_comm *s, const hd_combine_args *a) {
    hd_combine_args b = *a;
    b.in_y = rows_there(s, a->in_y);
    b.y = rows_there(s, a->y);
    return b;
}

static void dispatch_send(void *ctx, hd_stream *stream, const hd_dispatch_args *a) {
    staged_comm *s = ctx;
    const hd_dispatch_args b = dispatched(s, a);
    up(s, stream);
    hd_comm_dispatch_send(s->inner, stream, &b);
    down(s, stream); /* rows may have arrived, which the next call's copy must not overwrite */
}

static void dispatch_arrive(void *ctx, hd_stream *stream, const hd_dispatch_args *a) {
    staged_comm *s = ctx;
    const hd_dispatch_args b = dispatched(s, a);
    hd_comm_dispatch_arrive(s->inner, stream, &b);
    down(s, stream);
}

static void combine_send(void *ctx, hd_stream *stream, const hd_combine_args *a) {
    staged_comm *s = ctx;
    const hd_combine_args b = combined(s, a);
    up(s, stream);
    hd_comm_combine_send(s->inner, stream, &b);
}

static void combine_arrive(void *ctx, hd_stream *stream, const hd_combine_args *a) {
    staged_comm *s = ctx;
    const hd_combine_args b = combined(s, a);
    hd_comm_combine_arrive(s->inner, stream, &b);
    down(s, stream);
}

static void abort_all(void *ctx, const char *why) {
    hd_comm_abort(((staged_comm *)ctx)->inner, why);
}

static const char *ended(void *ctx) {
    return hd_comm_ended(((staged_comm *)ctx)->inner);
}

static const hd_comm_table table = {.all_reduce = all_reduce,
                                    .reduce_scatter = reduce_scatter,
                                    .all_gather = all_gather,
                                    .join_norm = join_norm,
                                    .broadcast = broadcast,
                                    .dispatch_send = dispatch_send,
                                    .dispatch_arrive = dispatch_arrive,
                                    .combine_send = combine_send,
                                    .combine_arrive = combine_arrive,
                                    .abort = abort_all,
                                    .ended = ended};

const char *staged_comm_open(staged_comm *s, const hd_comm *inner, hd_device *d,
                             const hd_ops *ops, hd_stream *stream) {
    static hd_err err;
    void *block;
    *s = (staged_comm){
        .inner = inner, .ops = ops, .comm = *inner, .host = calloc(1, STAGED_BYTES)};
    s->comm.table = &table;
    s->comm.ctx = s;
    s->comm.figures = NULL; /* inner counts */
    if (!s->host) return "no memory";
    if (hd_device_alloc(d, &block, STAGED_BYTES, "a test", &err) != HD_OK) return err.msg;
    s->device = block;
    if (hd_comm_share_rows(inner, stream, block, STAGED_BYTES, &err) != HD_OK) return err.msg;
    return NULL;
}

void *staged_comm_take(staged_comm *s, size_t bytes) {
    const size_t each = (bytes + 63) / 64 * 64;
    if (STAGED_BYTES - s->used < each) return NULL;
    s->used += each;
    return s->host + s->used - each;
}
