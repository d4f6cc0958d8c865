/* memory.c - bytes of a rank: its plan's tensors, its pools, and the activations of a model runner
 * that is opened with tensors without values. */
#include "capacity/memory.h"

#include <stdlib.h>

#include "base/checked.h"
#include "capacity/traced_comm_internal.h"
#include "capacity/traced_rank.h"
#include "ops/profile/op_trace.h"
#include "weights/placement.h"

/* ---- weights ---- */

static int64_t table_bytes(const hd_model_spec *spec, const hd_schema *schema) {
    int64_t bytes = 0;
    for (int32_t i = 0; i < schema->n; i++) {
        const hd_tensor_decl *d = &schema->decls[i];
        const hd_stored_format f = hd_declared_format(spec, d);
        if (d->role != HD_ENGRAM_TABLE) continue;
        bytes += (int64_t)(hd_stored_data_bytes(&f, d->rows, d->cols) +
                           hd_stored_scale_bytes(&f, d->rows, d->cols));
    }
    return bytes;
}

/* Without Engram tables: each rank's plan has all of them, and none holds them. */
static int64_t part_bytes(const hd_rank_memory *m, const hd_plan *p, int part) {
    const int64_t all = p->held.main[part].bytes + p->held.mtp[part].bytes;
    return part == HD_PARAM_GROUP_ENGRAM ? all - m->tables : all;
}

static void keep_most(hd_rank_memory *out, const hd_plan *p) {
    int64_t all = 0, most = hd_rank_memory_weights(out);
    for (int i = 0; i < HD_N_PARAM_GROUPS; i++) all += part_bytes(out, p, i);
    if (all <= most) return;
    for (int i = 0; i < HD_N_PARAM_GROUPS; i++) out->weights[i] = part_bytes(out, p, i);
    const int32_t slots = hd_shard_slots(&p->shard);
    const double spare = slots ? (double)p->shard.parallel.redundant / slots : 0;
    out->spare = (int64_t)(spare * (double)out->weights[HD_PARAM_GROUP_EXPERTS]);
}

static hd_status count_weights(hd_rank_memory *out, const hd_rank_memory_args *a, hd_err *err) {
    hd_schema schema;
    hd_plan plan;
    hd_plan_args args = {
        .parallel = a->parallel, .spec = a->spec, .schema = &schema, .n_mtp = a->spec->n_mtp};
    HD_TRY(hd_schema_open(&schema, a->spec, err));
    out->tables = table_bytes(a->spec, &schema);
    hd_status st = HD_OK;
    for (; st == HD_OK && args.rank < hd_parallel_world(a->parallel); args.rank++) {
        st = hd_plan_open(&plan, &args, err);
        if (st != HD_OK) break;
        keep_most(out, &plan);
        hd_plan_close(&plan);
    }
    hd_schema_close(&schema);
    return st;
}

/* ---- activations ---- */

typedef struct rig {
    hd_weights *weights;
    hd_ops host, ops;
    hd_device *device;
    hd_stream *stream;
    traced_comm comm;
    hd_model_runner *runner;
} rig;

static void ignore_call(void *ctx, const hd_op_call_shape *call) {
    (void)ctx, (void)call;
}

static void ignore_exchange(void *ctx, const char *name, double inside, double outside) {
    (void)ctx, (void)name, (void)inside, (void)outside;
}

static hd_status open_runner(rig *r, const hd_rank_memory_args *a, int32_t rank, hd_err *err) {
    const bool alone = hd_parallel_world(a->parallel) == 1;
    const hd_dummy_options shapes = {
        .parallel = *a->parallel, .rank = rank, .shapes_only = true};
    const hd_ops_options threads = {
        .cpu = {.n_threads = a->threads, .untouched = true}
    };
    hd_model_runner_options o = hd_engine_runner_options(a->sizes);
    HD_TRY(hd_weights_open_dummy(&r->weights, a->spec, &shapes, err));
    HD_TRY(hd_ops_open(&r->host, &r->device, "cpu", &threads, err));
    HD_TRY(hd_stream_open(&r->stream, r->device, err));
    hd_op_trace_init(&r->ops, a->act_type, ignore_call, NULL);
    r->ops.kv_type = a->kv_type;
    traced_comm_init(&r->comm, a->parallel, rank);
    r->comm.report = ignore_exchange;
    r->comm.node = 1;
    const hd_model_env env = {.spec = a->spec,
                              .weights = r->weights,
                              .ops = &r->ops,
                              .device = r->device,
                              .stream = r->stream,
                              .comm = alone ? NULL : &r->comm.comm};
    for (int g = 0; g < HD_N_KV_GROUPS; g++) { /* the pools count apart */
        o.n_pages[g] = 1;
        o.n_host[g] = 0;
    }
    o.n_ids = a->spec->vocab;
    o.vocab = a->vocab;
    o.fixed_steps = a->graphs && alone;
    o.role = alone ? HD_RUNNER_ALONE : rank > 0 ? HD_RUNNER_FOLLOWS : HD_RUNNER_LEADS;
    o.n_micro = hd_parallel_exchanges(a->parallel) ? a->n_micro : 1;
    return hd_model_runner_open(&r->runner, &env, &o, err);
}

/* *commands: bytes of a command to the followers. */
static hd_status count_activations(hd_rank_memory *out, uint64_t *commands,
                                   const hd_rank_memory_args *a, int32_t rank, hd_err *err) {
    rig r = {0};
    const hd_status st = open_runner(&r, a, rank, err);
    if (st == HD_OK) {
        const int64_t bytes = (int64_t)hd_model_runner_bytes(r.runner);
        if (bytes > out->activations) out->activations = bytes;
        *commands = hd_model_runner_command_bytes(r.runner);
    }
    hd_model_runner_close(r.runner);
    hd_stream_close(r.stream);
    hd_device_close(r.device);
    hd_weights_close(r.weights);
    return st;
}

/* ---- messages ---- */

/* Of the largest steps: a chunk beside all that decode, and all that decode, whose rows need logits. */
static hd_status trace_messages(comm_shm_most *most, const hd_rank_memory_args *a, int32_t rank,
                                hd_err *err) {
    const hd_engine_sizes *z = a->sizes;
    const int32_t each = 1 + z->drafts;
    const int64_t wanted = z->chunk + (int64_t)z->running * each;
    const int32_t rows =
        (int32_t)hd_min_i64(hd_min_i64(wanted, z->step_rows), (int64_t)z->running * z->context);
    const int32_t of_one = hd_min_i32(rows, z->context);
    const hd_step_shape shapes[] = {
        {.seqs = rows / of_one, .rows = of_one, .logits = 1   },
        {.seqs = z->running,    .rows = each,   .logits = each}
    };
    const hd_traced_rank_options o = {.spec = a->spec,
                                      .parallel = a->parallel,
                                      .rank = rank,
                                      .gpu = a->gpu,
                                      .act_type = a->act_type,
                                      .kv_type = a->kv_type,
                                      .rows = hd_max_i32(rows, z->running * each),
                                      .seqs = z->running,
                                      .positions = z->context + HD_MAX_DRAFTS,
                                      .balancedness = 1,
                                      .messages = most};
    hd_traced_rank *r;
    hd_step_cost *cost = malloc(sizeof *cost);
    if (!cost) return HD_FAIL(err, HD_ENOMEM, "no memory to trace steps");
    hd_status st = hd_traced_rank_open(&r, &o, err);
    for (size_t i = 0; i < HD_LEN(shapes) && st == HD_OK; i++) {
        st = hd_traced_rank_step(r, &shapes[i], cost, err);
    }
    hd_traced_rank_close(r);
    free(cost);
    return st;
}

/* Messages of ranks on GPUs are commands: rows lie in the memory of the GPUs (comm/ipc.h). What leaders tell each other
 * is not counted. */
static hd_status count_messages(hd_rank_memory *out, uint64_t commands,
                                const hd_rank_memory_args *a, int32_t rank, hd_err *err) {
    const int32_t world = hd_parallel_world(a->parallel);
    comm_shm_most most = {0};
    if (!a->gpu || world == 1 || world > a->gpu->node) return HD_OK;
    if (a->gpu->cpu) HD_TRY(trace_messages(&most, a, rank, err));
    if (rank == 0 && a->parallel->tp > 1)
        most.bytes[HD_GROUP_TP][HD_MESSAGE_BROADCAST] = commands;
    out->messages = hd_max_i64(out->messages, (int64_t)comm_shm_memory(&most, world));
    return HD_OK;
}

/* ---- all of it ---- */

static hd_status count_rank(hd_rank_memory *out, const hd_rank_memory_args *a, int32_t rank,
                            hd_err *err) {
    uint64_t commands;
    HD_TRY(count_activations(out, &commands, a, rank, err));
    return count_messages(out, commands, a, rank, err);
}

hd_status hd_rank_memory_of(hd_rank_memory *out, const hd_rank_memory_args *a, hd_err *err) {
    const int32_t n_layers = a->spec->n_layers + a->spec->n_mtp;
    *out = (hd_rank_memory){0};
    HD_TRY(hd_parallel_check(a->parallel, err));
    HD_TRY(count_weights(out, a, err));
    out->kv = (int64_t)hd_engine_kv_bytes(a->sizes, a->spec, n_layers, a->kv_type);
    for (int g = 0; g < HD_N_KV_GROUPS; g++) {
        out->snapshots += (int64_t)a->sizes->n_host[g] *
                          (int64_t)hd_kv_page_bytes(a->spec, n_layers, (hd_kv_group)g,
                                                    a->kv_type, a->sizes->drafts);
    }
    out->entries = (int64_t)hd_engine_mirror_bytes(a->sizes, a->spec, n_layers, a->kv_type);
    /* parts that are not equal: the first ranks of a group have more heads, or the last ones */
    const int32_t last = a->parallel->tp - 1;
    HD_TRY(count_rank(out, a, 0, err));
    return last > 0 ? count_rank(out, a, last, err) : HD_OK;
}

int64_t hd_rank_memory_weights(const hd_rank_memory *m) {
    int64_t bytes = 0;
    for (int i = 0; i < HD_N_PARAM_GROUPS; i++) bytes += m->weights[i];
    return bytes;
}

int64_t hd_rank_memory_total(const hd_rank_memory *m) {
    return hd_rank_memory_weights(m) + m->staged + m->kv + m->activations;
}
