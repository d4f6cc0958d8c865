/* bench_split.c - the case of moe_split: rows of lognormal(1.0) loads on a placement of the planner for
 * such a split, batch after batch. */
#include <stdlib.h>

#include "cli/bench/bench_cases_internal.h"
#include "moe/eplb.h"
#include "moe/traffic.h"

enum { BATCHES = 8, SEED = 20261129 };

/* In the upper half of the output's memory. */
typedef struct split_memory {
    int32_t *graph, *offset, *first, *counts; /* counts: [BATCHES, ranks, experts] */
} split_memory;

/* Ranks are the sources. */
static hd_split_shape shape_of(const op_case *c) {
    return (hd_split_shape){c->n, c->n + c->outs, c->cols};
}

/* Aligned to 16 bytes, as in a step. */
static int32_t counts_at(hd_split_shape s) {
    return (hd_split_words(s) + 2 * s.slots + 1 + 3) / 4 * 4;
}

static split_memory memory_of(const op_bench *b, const op_case *c) {
    const hd_split_shape s = shape_of(c);
    split_memory m = {.graph = (int32_t *)(void *)(b->out + CASE_FLOATS / 2)};
    m.offset = m.graph + hd_split_words(s);
    m.first = m.offset + s.slots + 1;
    m.counts = m.graph + counts_at(s);
    return m;
}

static hd_status plan(int32_t *graph, const hd_split_shape *s, const hd_traffic *t,
                      hd_err *err) {
    double *loads = calloc((size_t)s->experts, sizeof *loads);
    if (!loads) return HD_FAIL(err, HD_ENOMEM, "no memory for loads");
    for (int64_t i = 0; i < (int64_t)t->passes * t->experts; i++) {
        loads[i % t->experts] += (double)t->rows[i];
    }
    hd_eplb_map m;
    const hd_eplb_args a = {.loads = loads,
                            .layers = 1,
                            .experts = s->experts,
                            .slots = s->slots,
                            .ranks = s->ranks,
                            .algorithm = HD_EPLB_FLOW};
    const hd_status st = hd_eplb_plan(&m, &a, err);
    free(loads);
    if (st != HD_OK) return st;
    const hd_split_graph g = hd_split_graph_in(graph, *s);
    hd_split_graph_make(&g, m.slot_expert, m.rank_slot0);
    hd_eplb_map_close(&m);
    return HD_OK;
}

static hd_status fill(op_bench *b, const op_case *c, int32_t *host, hd_err *err) {
    const hd_split_shape s = shape_of(c);
    const size_t words = (size_t)hd_split_words(s);
    const split_memory to = memory_of(b, c);
    const hd_traffic_spec spec = {.passes = BATCHES * s.ranks,
                                  .layers = 1,
                                  .experts = s.experts,
                                  .top_k = c->top_k,
                                  .tokens = c->rows,
                                  .seed = SEED,
                                  .lognormal = 1};
    hd_traffic t;
    HD_TRY(hd_traffic_generate(&t, &spec, err));
    const size_t n = (size_t)t.passes * (size_t)t.experts;
    for (size_t i = 0; i < n; i++) host[words + i] = (int32_t)t.rows[i];
    const hd_status st = plan(host, &s, &t, err);
    hd_traffic_close(&t);
    HD_TRY(st);
    hd_stream_upload(b->stream, to.graph, host, words * sizeof *host);
    hd_stream_upload(b->stream, to.counts, host + words, n * sizeof *host);
    return hd_stream_sync(b->stream, err);
}

hd_status op_split_prepare(op_bench *b, const op_case *c, hd_err *err) {
    const hd_split_shape s = shape_of(c);
    const size_t counts = (size_t)BATCHES * (size_t)s.ranks * (size_t)s.experts;
    int32_t *host = calloc((size_t)hd_split_words(s) + counts, sizeof *host);
    if (!host) return HD_FAIL(err, HD_ENOMEM, "no memory for the rows of %d ranks", s.ranks);
    const hd_status st = fill(b, c, host, err);
    free(host);
    return st;
}

void op_split_run(op_bench *b, const op_case *c) {
    const hd_split_shape s = shape_of(c);
    const split_memory m = memory_of(b, c);
    const int32_t batch = b->pass++ % BATCHES;
    b->ops.moe_split(b->stream, &(hd_moe_split_args){
                                    .offset = m.offset,
                                    .first = m.first,
                                    .graph = m.graph,
                                    .counts = m.counts + (int64_t)batch * s.ranks * s.experts,
                                    .n_sources = s.ranks,
                                    .source = batch % s.ranks,
                                    .shape = s});
}

/* What is read and written once. */
op_operands op_split_operands(const op_bench *b, const op_case *c) {
    const hd_split_shape s = shape_of(c);
    (void)b;
    return (op_operands){4.0 * (hd_split_words(s) + s.ranks * s.experts + 2.0 * s.slots), 0};
}
