/* traced_rank.c - opens a rank without weights, runs a step of its model and prices what the step
 * calls. */
#include "capacity/traced_rank.h"

#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "capacity/traced_comm_internal.h"
#include "model/model.h"
#include "ops/profile/op_profiler.h"
#include "ops/profile/op_trace.h"

struct hd_traced_rank {
    hd_traced_rank_options o;
    hd_parallel_config parallel;
    hd_weights *weights;
    hd_ops host, silent,
        ops; /* host: for its device; silent: computes nothing; ops: profiled */
    hd_device *device;
    hd_stream *stream;
    traced_comm comm;
    hd_probe probe;
    hd_op_profiler profiler;
    hd_model *model;
    hd_kv *kv;
    hd_batch batch;
    int32_t *tokens;                    /* [o.rows] */
    int32_t *group_rows, *group_logits; /* [dp] */
    hd_step_cost *to;                   /* of the step that is traced */
    bool full;                          /* more lines than it has */
};

/* ---- what a step calls ---- */

static void ignore_call(void *ctx, const hd_op_call_shape *call) {
    (void)ctx, (void)call;
}

static int64_t no_clock(void) {
    return 0;
}

/* The only operator whose result decides what later ones cost. */
static void permute(hd_stream *s, const hd_moe_permute_args *a) {
    const int64_t choices = (int64_t)a->rows * a->top_k;
    (void)s;
    traced_spread(a->offset, a->n_slots, choices, (double)choices, a->n_experts);
}

static void at_stage(void *ctx, const char *part, const char *stage) {
    hd_op_profiler_at(ctx, part, stage);
}

static hd_step_line *line_of_exchange(hd_traced_rank *r, const char *name) {
    hd_step_cost *c = r->to;
    const char *part = r->profiler.part, *stage = r->profiler.stage;
    for (int32_t i = 0; i < c->n; i++) {
        hd_step_line *l = &c->lines[i];
        if (l->op == name && l->part == part && l->stage == stage) return l;
    }
    if (c->n == HD_STEP_LINES) return NULL;
    c->lines[c->n] = (hd_step_line){
        .part = part, .stage = stage, .op = name, .format = "", .exchange = true};
    return &c->lines[c->n++];
}

static void at_exchange(void *ctx, const char *name, double inside, double outside) {
    hd_traced_rank *r = ctx;
    hd_step_line *l = line_of_exchange(r, name);
    r->full |= !l;
    if (!l) return;
    l->calls++;
    l->bytes += inside;
    l->outside += outside;
}

/* ---- opening ---- */

static hd_status open_batch(hd_traced_rank *r, hd_err *err) {
    const hd_batch_limits limits = {r->o.rows, r->o.seqs, 1};
    const size_t groups = (size_t)r->parallel.dp;
    r->tokens = calloc((size_t)r->o.rows, sizeof *r->tokens);
    r->group_rows = calloc(groups, sizeof *r->group_rows);
    r->group_logits = calloc(groups, sizeof *r->group_logits);
    if (!r->tokens || !r->group_rows || !r->group_logits) {
        return HD_FAIL(err, HD_ENOMEM, "no memory for a batch of %d rows", r->o.rows);
    }
    return hd_batch_open(&r->batch, &limits, r->device, err);
}

/* Whether a float of 4 bytes takes longer to send than its product with a row of hidden elements. */
static bool sends_slowly(const hd_traced_rank *r) {
    const hd_gpu *m = r->o.gpu;
    return 4 / (m->link_gb_s * 1e9) > 2.0 * r->o.spec->hidden / (m->tflops_8bit * 1e12);
}

static void open_table(hd_traced_rank *r) {
    hd_op_trace_init(&r->silent, r->o.act_type, ignore_call, NULL);
    r->silent.kv_type = r->o.kv_type;
    r->silent.moe_permute = permute;
    hd_op_profiler_init(&r->profiler, &r->ops, &r->silent, no_clock);
    r->probe = (hd_probe){&r->profiler, at_stage};
    traced_comm_init(&r->comm, &r->parallel, r->o.rank);
    r->comm.report = at_exchange;
    r->comm.ctx = r;
    r->comm.comm.slower_than_products = sends_slowly(r);
    r->comm.node = (int32_t)r->o.gpu->node;
    r->comm.act_bytes = hd_act_bytes(&r->ops);
    r->comm.n_experts = hd_max_i32(1, r->o.spec->route.n_experts);
    r->comm.most = 1 / r->o.balancedness;
    r->comm.messages = r->o.messages;
    r->comm.room = hd_model_expert_rows_of(&r->parallel, r->o.rows, r->o.spec->route.top_k);
}

static hd_status open_all(hd_traced_rank *r, hd_err *err) {
    const hd_model_spec *spec = r->o.spec;
    const hd_dummy_options shapes = {
        .parallel = r->parallel, .rank = r->o.rank, .shapes_only = true};
    const hd_ops_options one_thread = {
        .cpu = {.n_threads = 1, .untouched = true}
    };
    const hd_kv_options kv = {
        .n_pages = {1, 1},
          .max_drafts = HD_MAX_DRAFTS, .entry_type = r->o.kv_type
    };
    const int64_t one_round =
        hd_model_most_expert_rows(&r->parallel, r->o.rows, spec->route.top_k);
    const hd_model_limits limits = {.rows = r->o.rows,
                                    .logits = r->o.rows,
                                    .positions = r->o.positions,
                                    .expert_rows = (int32_t)hd_min_i64(one_round, INT32_MAX)};
    HD_TRY(hd_weights_open_dummy(&r->weights, spec, &shapes, err));
    HD_TRY(hd_ops_open(&r->host, &r->device, "ref", &one_thread, err));
    HD_TRY(hd_stream_open(&r->stream, r->device, err));
    open_table(r);
    const hd_model_env env = {.spec = spec,
                              .weights = r->weights,
                              .ops = &r->ops,
                              .device = r->device,
                              .stream = r->stream,
                              .comm =
                                  hd_parallel_world(&r->parallel) > 1 ? &r->comm.comm : NULL,
                              .probe = &r->probe};
    HD_TRY(hd_model_open(&r->model, &env, &limits, err));
    HD_TRY(hd_kv_open(&r->kv, spec, spec->n_layers + spec->n_mtp, r->device, &kv, err));
    return open_batch(r, err);
}

hd_status hd_traced_rank_open(hd_traced_rank **out, const hd_traced_rank_options *o,
                              hd_err *err) {
    *out = NULL;
    hd_traced_rank *r = calloc(1, sizeof *r);
    if (!r) return HD_FAIL(err, HD_ENOMEM, "no memory to trace a rank");
    r->o = *o;
    r->parallel = *o->parallel;
    const hd_status st = open_all(r, err);
    if (st == HD_OK) {
        *out = r;
    } else {
        hd_traced_rank_close(r);
    }
    return st;
}

void hd_traced_rank_close(hd_traced_rank *r) {
    if (!r) return;
    hd_batch_close(&r->batch);
    hd_kv_close(r->kv);
    hd_model_close(r->model);
    hd_stream_close(r->stream);
    hd_device_close(r->device);
    hd_weights_close(r->weights);
    free(r->tokens);
    free(r->group_rows);
    free(r->group_logits);
    free(r);
}

/* ---- a step ---- */

static void fill_batch(hd_traced_rank *r, int32_t seqs, int32_t rows, int32_t start,
                       int32_t logits) {
    static const int32_t page[1] = {0};
    hd_batch *b = &r->batch;
    hd_batch_reset(b);
    for (int32_t i = 0; i < seqs; i++) {
        hd_batch_add(b, &(hd_batch_seq){
                            .tokens = r->tokens,
                            .n = rows,
                            .start = start,
                            .n_logits = logits,
                            .pages = {page, page},
                            .n_pages = 1
        });
    }
}

static void upload_batch(hd_traced_rank *r) {
    hd_batch *b = &r->batch;
    for (int32_t i = 0; i < r->parallel.dp; i++) {
        r->group_rows[i] = b->n_rows;
        r->group_logits[i] = b->n_logits;
    }
    if (r->parallel.dp > 1) {
        b->group_rows = r->group_rows;
        b->group_logits = r->group_logits;
    }
    r->comm.rows = (int64_t)b->n_rows * r->parallel.dp;
    hd_batch_upload(b, r->stream);
}

/* MTP: the first draft continues the step, each further one the draft before. */
static void draft_mtp(hd_traced_rank *r, const hd_step_shape *z) {
    hd_model_draft(r->model, r->kv, &r->batch, false);
    for (int32_t i = 1; i < z->drafts; i++) {
        fill_batch(r, z->seqs, 1, z->start + z->rows + i - 1, 1);
        upload_batch(r);
        hd_model_draft(r->model, r->kv, &r->batch, true);
    }
}

/* DSpark: one pass over a block of every sequence, then place by place. */
static void draft_blocks(hd_traced_rank *r, const hd_step_shape *z) {
    const int32_t block = r->o.spec->dspark.block;
    hd_model_absorb(r->model, r->kv, &r->batch);
    fill_batch(r, z->seqs, block, z->start + z->rows - 1, 0);
    hd_batch_make_block(&r->batch, block);
    upload_batch(r);
    hd_model_draft_block(r->model, r->kv, &r->batch);
    for (int32_t i = 0; i < z->drafts; i++) {
        hd_model_draft_place(r->model, i, r->batch.device.tokens, z->seqs, z->seqs);
    }
}

static void run(hd_traced_rank *r, const hd_step_shape *z) {
    fill_batch(r, z->seqs, z->rows, z->start, z->logits);
    upload_batch(r);
    hd_model_step(r->model, r->kv, &r->batch);
    if (z->drafts == 0) return;
    if (r->o.spec->drafter == HD_DRAFTER_DSPARK) {
        draft_blocks(r, z);
    } else {
        draft_mtp(r, z);
    }
}

static hd_status check_shape(const hd_traced_rank *r, const hd_step_shape *z, hd_err *err) {
    const hd_model_spec *spec = r->o.spec;
    const int32_t block = z->drafts ? spec->dspark.block : 0, each = hd_max_i32(z->rows, block);
    if (z->seqs < 1 || z->rows < 1 || z->start < 0 || z->logits > z->rows ||
        z->seqs > r->o.seqs || (int64_t)each * z->seqs > r->o.rows ||
        (int64_t)z->start + z->rows + z->drafts > r->o.positions) {
        return HD_FAIL(err, HD_EINVAL,
                       "a step of %d sequences with %d rows from position %d: more than %d "
                       "sequences, %d rows or %d positions",
                       z->seqs, each, z->start, r->o.seqs, r->o.rows, r->o.positions);
    }
    if (!z->drafts || spec->drafter == HD_DRAFTER_MTP || z->drafts <= block) return HD_OK;
    return HD_FAIL(err, HD_EINVAL, "%d drafts: this model drafts %d tokens at most", z->drafts,
                   block);
}

/* ---- its price ---- */

static void add_kernels(hd_traced_rank *r, const hd_op_profile *p) {
    hd_step_cost *c = r->to;
    r->full |= c->n == HD_STEP_LINES;
    if (r->full) return;
    c->lines[c->n++] =
        (hd_step_line){.part = p->part,
                       .stage = p->stage,
                       .op = p->op,
                       .format = p->format,
                       .rows = p->rows,
                       .outs = p->outs,
                       .ins = p->ins,
                       .calls = p->calls,
                       .bytes = p->bytes,
                       .flops = p->flops,
                       .seconds = hd_gpu_kernel_seconds(r->o.gpu, (double)p->calls, p->bytes,
                                                        p->flops, p->type)};
}

static void add_up(hd_step_cost *c, const hd_gpu *m) {
    for (int32_t i = 0; i < c->n; i++) {
        hd_step_line *l = &c->lines[i];
        if (l->exchange) {
            l->seconds = hd_gpu_exchange_seconds(m, (double)l->calls, l->bytes, l->outside);
            c->exchange_s += l->seconds;
            c->sent += l->bytes + l->outside;
            continue;
        }
        c->kernel_s += l->seconds;
        c->bytes += l->bytes;
        c->flops += l->flops;
        c->kernels += l->calls;
    }
}

hd_status hd_traced_rank_step(hd_traced_rank *r, const hd_step_shape *shape, hd_step_cost *out,
                              hd_err *err) {
    HD_TRY(check_shape(r, shape, err));
    *out = (hd_step_cost){0};
    r->to = out;
    r->full = false;
    hd_op_profiler_init(&r->profiler, &r->ops, &r->silent,
                        no_clock); /* one is profiled at a time */
    run(r, shape);
    HD_TRY(hd_stream_sync(r->stream, err));
    for (int32_t i = 0; i < r->profiler.n; i++) add_kernels(r, &r->profiler.line[i]);
    add_up(out, r->o.gpu);
    if (!r->full && !r->profiler.lost) return HD_OK;
    return HD_FAIL(err, HD_EUNSUPPORTED, "a step with more kinds of calls than a list holds");
}
