/* bench_rank.c - `hadal bench latency --emulate-rank`: runs the steps of one rank of a large
 * parallel config, with its shard of random weights and without the other ranks. Steps go
 * through the model runner as in an engine: sampled, verified, drafted. Sampled tokens are
 * replaced by a counting sequence, so that rows choose different experts. First the
 * operators are timed one by one, then complete steps. */
#include "cli/bench/bench_rank.h"

#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/cpu.h"
#include "base/philox.h"
#include "base/progress.h"
#include "cli/bench/bench_rank_internal.h"
#include "cli/bench/bench_selection.h"
#include "cli/engine_options.h"
#include "comm/emulated.h"
#include "kv/resident.h"
#include "runner/model_runner.h"
#ifdef HD_CUDA
#include "device/gpu_list.h"
#endif

enum { WARM_UP = 5, PASSES = 3, MAX_STEPS = 4096, READ_BYTES = 1 << 28, TOKEN_STEP = 1009 };

typedef struct settings {
    engine_settings engine;
    const char *config, *parallel, *acceptance, *selection, *row_ns;
    int64_t layers, batch, prompt, chunk, context, drafts, steps, exchange_us, overlap;
    int routing, exchange;
    bool json;
} settings;

static const char *const routings[] = {"model", "uniform", "skewed", "sticky", NULL};
static const char *const exchanges[] = {"nothing", "copies", NULL};

/* One running sequence. */
typedef struct sequence {
    int32_t position, token; /* of the next row */
    int32_t *pages[HD_N_KV_GROUPS];
    int32_t *tokens; /* [rows_each], of a prompt those of two chunks and one more */
} sequence;

typedef struct rig {
    settings set;
    hd_parallel_config parallel;
    int32_t rank, drafts, rows_each, n_pages;
    int32_t dispatch_ns, combine_ns;
    hd_acceptance forced;
    hd_model_spec *spec;
    hd_device *device;
    hd_stream *stream, *beside_stream, *comm_stream;
    hd_mla_form mla;
    hd_ops backend, inner,
        ops; /* inner: with the selection; ops: the model's table, profiled or not */
    bench_selection *selection; /* NULL: the indexer's */
    hd_ops profiled;
    hd_weights *weights;
    hd_comm_emulated *emulated;
    hd_probe probe;
    hd_model_runner *model_runner;
    sequence *seqs;  /* [batch], then the prompt beside them */
    int32_t *memory; /* of their arrays */
    hd_seq_input *inputs;
    hd_seq_output *outputs;
    double *seconds; /* [steps] */
    rank_report report;
} rig;

/* ---- options ---- */

/* "tp=4", "ep=72,redundant=32", "ep=32,rank=5"; with dp, or with both tp and ep, a layout of serve:
 * "tp=2,dp=2,ep=4" */
static hd_status parse_parallel(rig *r, hd_err *err) {
    const char *at = r->set.parallel;
    int32_t tp = 0, dp = 0, ep = 0, redundant = 0;
    const struct {
        const char *name;
        int32_t *value;
    } words[] = {
        {"tp=",        &tp       },
        {"dp=",        &dp       },
        {"ep=",        &ep       },
        {"redundant=", &redundant},
        {"rank=",      &r->rank  }
    };
    while (*at) {
        size_t w = 0;
        while (w < HD_LEN(words) && strncmp(at, words[w].name, strlen(words[w].name)) != 0) w++;
        char *end = NULL;
        const long n = w < HD_LEN(words) ? strtol(at + strlen(words[w].name), &end, 10) : -1;
        if (n < 0 || n > 1 << 16 || (*end && *end != ',')) {
            return HD_FAIL(err, HD_EINVAL,
                           "--emulate-rank '%s': not tp=N, ep=N[,redundant=N] or "
                           "tp=N,dp=N,ep=N, with [,rank=N]",
                           r->set.parallel);
        }
        *words[w].value = (int32_t)n;
        at = *end ? end + 1 : end;
    }
    if (dp || (tp && ep)) {
        const int32_t most = hd_max_i32(tp, 1) * hd_max_i32(dp, 1);
        if (most % hd_max_i32(ep, 1) && ep % most) {
            return HD_FAIL(
                err, HD_EINVAL,
                "--emulate-rank '%s': neither of tp times dp and ep is a multiple of the other",
                r->set.parallel);
        }
        r->parallel = hd_parallel_common(hd_max_i32(tp, 1), hd_max_i32(dp, 1),
                                         hd_max_i32(ep, 1), r->spec);
        if (redundant) r->parallel.redundant = redundant;
    } else if (ep) {
        const int32_t rest = r->spec->route.n_experts % ep;
        if (rest && !redundant)
            redundant = ep - rest; /* the smallest number that makes slots equal */
        r->parallel = hd_parallel_expert(ep, redundant);
    } else {
        r->parallel = hd_parallel_tensor(tp);
        r->parallel.sum_in_ranks = true; /* as the published figures */
    }
    HD_TRY(hd_parallel_check(&r->parallel, err));
    if (r->rank < hd_parallel_world(&r->parallel)) return HD_OK;
    return HD_FAIL(err, HD_EINVAL, "--emulate-rank '%s': there is no rank %d", r->set.parallel,
                   r->rank);
}

/* "0.72,0.66,0.64": the last one applies to further drafts. */
static hd_status parse_acceptance(rig *r, hd_err *err) {
    const char *at = r->set.acceptance;
    double p = 0, all = 1;
    r->report.accepted = 1;
    for (int32_t i = 0; i < r->drafts; i++) {
        char *end = NULL;
        if (*at) {
            p = strtod(at, &end);
            if (end == at || (*end && *end != ',') || !(p >= 0 && p <= 1)) {
                return HD_FAIL(err, HD_EINVAL, "--acceptance '%s': not numbers of 0 to 1",
                               r->set.acceptance);
            }
            at = *end ? end + 1 : end;
        }
        all *= p;
        r->forced.least[i] = (float)all;
        r->report.accepted += all;
    }
    return HD_OK;
}

/* "1350,2450" */
static hd_status parse_row_ns(rig *r, hd_err *err) {
    const char *at = r->set.row_ns;
    char *end = NULL;
    if (!at) return HD_OK;
    const long to = strtol(at, &end, 10);
    const long back = end > at && *end == ',' ? strtol(end + 1, &end, 10) : -1;
    if (to < 0 || to > 1000000 || back < 0 || back > 1000000 || *end) {
        return HD_FAIL(err, HD_EINVAL, "--row-ns '%s': not two numbers of nanoseconds", at);
    }
    r->dispatch_ns = (int32_t)to;
    r->combine_ns = (int32_t)back;
    return HD_OK;
}

/* Emulated rows are those of equal micro-batches. */
static hd_status check_overlap(const rig *r, hd_err *err) {
    const int64_t rows = r->set.prompt ? r->rows_each * r->set.batch : r->set.batch;
    if (rows % r->set.overlap == 0) return HD_OK;
    return HD_FAIL(err, HD_EINVAL, "--overlap %lld does not divide the %lld %s of a step",
                   (long long)r->set.overlap, (long long)rows,
                   r->set.prompt ? "tokens" : "sequences");
}

/* A block has so many drafts, and taps lie in the layers that are kept. */
static hd_status fit_dspark(rig *r, hd_err *err) {
    hd_dspark_spec *d = &r->spec->dspark;
    const int32_t n = r->spec->n_layers;
    if (r->spec->drafter != HD_DRAFTER_DSPARK || r->set.drafts == 0) return HD_OK;
    if (r->set.drafts > d->block || n < d->n_taps) {
        return HD_FAIL(err, HD_EINVAL,
                       "--drafts %lld with %d layers: this model drafts up to %d tokens, from "
                       "%d layers",
                       (long long)r->set.drafts, n, d->block, d->n_taps);
    }
    for (int32_t i = 0; i < d->n_taps; i++) {
        d->taps[i] = hd_min_i32(d->taps[i], n - d->n_taps + i);
    }
    return HD_OK;
}

static hd_status open_spec(rig *r, hd_err *err) {
    HD_TRY(hd_model_spec_open(&r->spec, r->set.config, err));
    hd_model_spec *c = r->spec;
    r->report.of_layers = c->n_layers;
    if (r->set.layers) hd_model_spec_keep_layers(c, (int32_t)r->set.layers);
    if (r->set.prompt && r->set.drafts) {
        return HD_FAIL(err, HD_EINVAL, "--drafts follow tokens; with --prompt there are none");
    }
    if (r->set.chunk && (r->set.prompt || r->set.drafts)) {
        return HD_FAIL(err, HD_EINVAL,
                       "--chunk runs beside steps without --prompt and --drafts");
    }
    if (r->set.drafts == 0) c->n_mtp = 0;
    if (r->set.drafts > 0 && c->n_mtp == 0) {
        return HD_FAIL(err, HD_EINVAL, "--drafts %lld: this model has no drafter",
                       (long long)r->set.drafts);
    }
    HD_TRY(fit_dspark(r, err));
    r->drafts = (int32_t)r->set.drafts;
    r->report.layers = c->n_layers;
    r->report.family = hd_family_name(c->family);
    HD_TRY(parse_parallel(r, err));
    return parse_acceptance(r, err);
}

/* ---- opening ---- */

static void name_device(rig *r) {
#ifdef HD_CUDA
    hd_cuda_device gpu;
    char why[200];
    if (!hd_device_is_host(r->device) && hd_cuda_devices(&gpu, 1, why, sizeof why) > 0) {
        snprintf(r->report.device, sizeof r->report.device, "%s", gpu.name);
        return;
    }
#endif
    snprintf(r->report.device, sizeof r->report.device, "%d threads",
             hd_stream_workers(r->stream));
}

/* In place of what the indexer selects. Rows of a step select in one pass. */
static hd_status open_selection(rig *r, hd_err *err) {
    const hd_model_spec *c = r->spec;
    int32_t layers = 0, rows, ratio = 1;
    if (!r->set.selection) return HD_OK;
    HD_TRY(hd_kv_resident_rows(&rows, r->set.engine.options.hisparse, c, err));
    if (rows / hd_max_i32(c->index_topk, 1) < r->report.rows) {
        return HD_FAIL(
            err, HD_EINVAL,
            "--selection needs --hisparse with at least %d rows, as many as a step selects",
            r->report.rows * c->index_topk);
    }
    for (int32_t i = 0; i < c->n_layers; i++) {
        if (hd_kv_selected_pool(c, i) == HD_N_POOL_KINDS) continue;
        layers++;
        ratio = hd_max_i32(c->layers[i].compress_ratio, 1);
    }
    const bench_selection_options o = {.text = r->set.selection,
                                       .device = r->device,
                                       .stream = r->stream,
                                       .ops = &r->backend,
                                       .layers = layers,
                                       .rows = r->report.rows,
                                       .top_k = c->index_topk,
                                       .entries = r->report.context / ratio,
                                       .steps = 2 * ((int32_t)r->set.steps + WARM_UP)};
    HD_TRY(bench_selection_open(&r->selection, &o, err));
    bench_selection_install(r->selection, &r->inner);
    return HD_OK;
}

static hd_status open_device(rig *r, hd_err *err) {
    hd_ops_options ops;
    HD_TRY(engine_settings_ops(&r->set.engine, &ops, &r->mla, err));
    HD_TRY(hd_ops_open(&r->backend, &r->device, r->set.engine.options.backend, &ops, err));
    HD_TRY(hd_stream_open(&r->stream, r->device, err));
    r->inner = r->backend;
    if (!hd_device_is_host(r->device)) {
        HD_TRY(hd_stream_open(&r->beside_stream, r->device, err));
        if (r->set.overlap > 1) HD_TRY(hd_stream_open(&r->comm_stream, r->device, err));
    }
    HD_TRY(open_selection(r, err));
    r->ops = r->inner;
    r->report.table = r->inner.name;
    name_device(r);
    return hd_op_profiler_open(&r->report.profiler, &r->profiled, &r->inner, r->device,
                               r->stream, err);
}

/* Of `rows` of an attention group, those that a rank sends to experts in a micro-batch. */
static int32_t sent_rows(const rig *r, int32_t rows) {
    const hd_parallel_config *l = &r->parallel;
    return (int32_t)(hd_ceil_div((int64_t)rows * l->etp, l->tp) / r->set.overlap);
}

/* Rows with which the drafter makes further drafts, of all sequences. */
static int32_t draft_rows(const rig *r) {
    const int32_t block = r->drafts ? r->spec->dspark.block : 0;
    return (int32_t)r->set.batch * hd_max_i32(block, 1);
}

static hd_status open_shard(rig *r, hd_err *err) {
    const hd_dummy_options dummy = {.parallel = r->parallel,
                                    .rank = r->rank,
                                    .routing = (hd_routing)r->set.routing,
                                    .device = r->device,
                                    .stream = r->stream};
    HD_TRY(hd_weights_open_dummy(&r->weights, r->spec, &dummy, err));
    const hd_comm_emulated_options o = {
        .spec = r->spec,
        .shard = hd_weights_shard(r->weights),
        .routing = (hd_routing)r->set.routing,
        .rows = {sent_rows(r, r->report.rows),
                 sent_rows(r, r->set.prompt ? r->report.rows : draft_rows(r))},
        .copies = r->set.exchange == 1,
        .exchange_us = (int32_t)r->set.exchange_us,
        .dispatch_ns = r->dispatch_ns,
        .combine_ns = r->combine_ns,
        .ops = &r->ops,
        .device = r->device,
        .stream = r->stream
    };
    HD_TRY(hd_comm_emulated_open(&r->emulated, &o, err));
    r->report.expert_rows = hd_comm_emulated_rows(r->emulated);
    return HD_OK;
}

static int32_t n_seqs(const rig *r) {
    return (int32_t)r->set.batch + (r->set.chunk > 0);
}

/* Returns the largest position of a sequence. */
static int64_t positions(const rig *r) {
    if (r->set.prompt) return r->set.context + r->set.prompt;
    const int64_t steps = 2 * (r->set.steps + WARM_UP);
    if (r->set.chunk) return r->set.context + (steps + 4) * r->set.chunk;
    return r->set.context + (steps + 4) * r->rows_each +
           r->spec->dspark.block; /* one step ahead, and drafts
                                                                 * after it */
}

/* Pages in random order, as in a cache in use. WINDOW pages are few, used in turn. */
static void assign_pages(rig *r, int32_t window) {
    const int32_t all = r->n_pages * n_seqs(r);
    int32_t *numbers = r->seqs[0].pages[HD_KV_FULL];
    for (int32_t i = 0; i < all; i++) numbers[i] = i;
    for (int32_t i = all - 1; i > 0; i--) {
        const hd_philox draw = hd_philox_at(1234, 0, (uint64_t)i);
        const int32_t j = (int32_t)(draw.v[0] % (uint32_t)(i + 1)), other = numbers[i];
        numbers[i] = numbers[j];
        numbers[j] = other;
    }
    for (int32_t s = 0; s < n_seqs(r); s++) {
        int32_t *pages = r->seqs[s].pages[HD_KV_WINDOW];
        for (int32_t i = 0; i < r->n_pages; i++) pages[i] = s * window + i % window;
    }
}

static hd_status open_sequences(rig *r, hd_err *err) {
    const size_t n = (size_t)n_seqs(r), each = (size_t)r->n_pages;
    const size_t chunk = 2 * (size_t)r->set.chunk + 1;
    r->seqs = calloc(n, sizeof *r->seqs);
    r->inputs = calloc(n, sizeof *r->inputs);
    r->outputs = calloc(n, sizeof *r->outputs);
    r->seconds = calloc((size_t)r->set.steps, sizeof *r->seconds);
    r->memory = calloc(n * (2 * each + (size_t)r->rows_each) + chunk, sizeof *r->memory);
    if (!r->seqs || !r->inputs || !r->outputs || !r->seconds || !r->memory) {
        return HD_FAIL(err, HD_ENOMEM, "no memory for %zu sequences", n);
    }
    int32_t *entries = r->memory, *window = entries + n * each, *tokens = window + n * each;
    for (size_t s = 0; s < n; s++) {
        r->seqs[s] = (sequence){
            .position = (int32_t)r->set.context,
            .token = (int32_t)(s * TOKEN_STEP % (size_t)r->spec->vocab),
            .pages = {entries + s * each, window + s * each},
            .tokens = tokens + s * (size_t)r->rows_each
        };
    }
    return HD_OK;
}

static void tell_profiler(void *ctx, const char *part, const char *stage) {
    hd_op_profiler_at(ctx, part, stage);
}

/* Of the pages of entries, what lies on the host, and the buffers in its place. */
static void count_host_entries(rig *r, int32_t rows, int32_t n_pages) {
    const int32_t n_layers = r->spec->n_layers + r->spec->n_mtp;
    const hd_dtype type = r->ops.kv_type;
    rank_memory *m = &r->report.memory;
    if (rows == 0) return;
    m->host = (double)n_pages * (double)hd_kv_selected_bytes(r->spec, n_layers, type);
    m->kv[HD_KV_FULL] -=
        m->host - (double)hd_kv_resident_bytes(r->spec, n_layers, type, rows, n_pages);
}

static hd_status open_model_runner(rig *r, hd_err *err) {
    const hd_kv_shape shape = hd_kv_shape_of(r->spec);
    const int64_t pages = hd_ceil_div(positions(r), shape.page_tokens);
    if (pages * n_seqs(r) > INT32_MAX / shape.page_tokens) {
        return HD_FAIL(err, HD_EINVAL, "--batch times --context: too many pages");
    }
    r->n_pages = (int32_t)pages;
    HD_TRY(open_sequences(r, err));
    const int64_t near =
        (int64_t)shape.lookback + r->rows_each + 2 * r->set.chunk + r->spec->dspark.block;
    const int32_t window =
        shape.lookback
            ? hd_min_i32(r->n_pages, (int32_t)hd_ceil_div(near, shape.page_tokens) + 1)
            : 1;
    assign_pages(r, window);
    r->probe = (hd_probe){&r->report.profiler, tell_profiler};
    const hd_model_env env = {.spec = r->spec,
                              .weights = r->weights,
                              .ops = &r->ops,
                              .device = r->device,
                              .stream = r->stream,
                              .comm_stream = r->comm_stream,
                              .beside_stream = r->beside_stream,
                              .mla = r->mla,
                              .comm = hd_comm_emulated_interface(r->emulated),
                              .probe = &r->probe};
    hd_model_runner_options o = {
        .n_slots = n_seqs(r),
        .step_rows = hd_max_i32(r->report.rows, draft_rows(r)),
        .positions = (int32_t)positions(r),
        .seq_pages = r->n_pages,
        .n_pages = {r->n_pages * n_seqs(r), shape.lookback ? window * n_seqs(r) : 0},
        .n_ids = r->spec->vocab,
        .max_drafts = r->drafts,
        .fixed_steps = !r->set.prompt,
        .expert_rows = hd_max_i32(r->report.expert_rows, r->parallel.ep),
        .n_micro = (int32_t)r->set.overlap,
        .forced = r->forced
    };
    HD_TRY(hd_kv_resident_rows(&o.resident, r->set.engine.options.hisparse, r->spec, err));
    HD_TRY(hd_model_runner_open(&r->model_runner, &env, &o, err));
    for (int l = 0; l < HD_N_KV_GROUPS; l++) {
        r->report.memory.kv[l] =
            (double)o.n_pages[l] *
            (double)hd_kv_page_bytes(r->spec, r->spec->n_layers + r->spec->n_mtp,
                                     (hd_kv_group)l, r->ops.kv_type, r->drafts);
    }
    count_host_entries(r, o.resident, o.n_pages[HD_KV_FULL]);
    r->report.memory.weights = (double)hd_weights_bytes(r->weights);
    r->report.memory.activations = (double)hd_model_runner_bytes(r->model_runner);
    return HD_OK;
}

/* H200: docs/bench.md gives the sources. The CPU's limits are measured in the same run. */
static hd_status find_limits(rig *r, hd_err *err) {
    rank_limits *l = &r->report.limits;
    void *data;
    if (!hd_device_is_host(r->device)) {
        *l = (rank_limits){"H200: best pure read, dense products at the power limit", 4.55e12,
                           814e12, 1500e12};
        return HD_OK;
    }
    HD_TRY(hd_device_alloc(r->device, &data, READ_BYTES, "what is read", err));
    memset(data, 1, READ_BYTES); /* so that it is resident */
    l->from = "measured in this run";
    l->bytes = hd_measure_read(r->stream, data, READ_BYTES / sizeof(uint64_t), hd_now_ns);
    l->flops = l->flops_8bit = hd_measure_flops(r->stream, hd_cpu_features(), hd_now_ns);
    hd_device_release(r->device, data);
    return HD_OK;
}

static hd_status open_rig(rig *r, hd_err *err) {
    HD_TRY(open_spec(r, err));
    HD_TRY(parse_row_ns(r, err));
    r->rows_each = r->set.prompt ? (int32_t)r->set.prompt : 1 + r->drafts;
    HD_TRY(check_overlap(r, err));
    const int64_t rows = r->rows_each * r->set.batch + r->set.chunk;
    if (rows > 1 << 20 || positions(r) > INT32_MAX / 2) {
        return HD_FAIL(err, HD_EINVAL, "%lld rows in a step or %lld positions: too many",
                       (long long)rows, (long long)positions(r));
    }
    r->report.rows = (int32_t)rows;
    r->report.parallel = r->parallel;
    r->report.rank = r->rank;
    r->report.routing = routings[r->set.routing];
    r->report.exchange = exchanges[r->set.exchange];
    r->report.batch = (int32_t)r->set.batch;
    r->report.prompt = (int32_t)r->set.prompt;
    r->report.chunk = (int32_t)r->set.chunk;
    r->report.context = (int32_t)r->set.context;
    r->report.drafts = r->drafts;
    HD_TRY(open_device(r, err));
    HD_TRY(open_shard(r, err));
    HD_TRY(open_model_runner(r, err));
    HD_TRY(find_limits(r, err));
    const hd_request_sampling greedy = {0};
    for (int32_t s = 0; s < n_seqs(r); s++) {
        hd_request_sampling c = greedy;
        c.params.seed = (uint64_t)s;
        hd_model_runner_enter(r->model_runner, s, &c, NULL, 0, 0);
    }
    return hd_model_runner_fill_kv(r->model_runner, err);
}

static void close_rig(rig *r) {
    hd_model_runner_close(r->model_runner);
    hd_comm_emulated_close(r->emulated);
    hd_op_profiler_close(&r->report.profiler);
    hd_stream_close(r->comm_stream);
    bench_selection_close(r->selection);
    hd_stream_close(r->beside_stream);
    hd_stream_close(r->stream);
    hd_device_close(r->device);
    hd_weights_close(r->weights);
    hd_model_spec_close(r->spec);
    free(r->seqs);
    free(r->inputs);
    free(r->outputs);
    free(r->seconds);
    free(r->memory);
}

/* ---- running ---- */

/* The tokens that a step computes. */
typedef enum tokens {
    COUNTED,      /* counting numbers: rows choose different experts; steps stand alone */
    FORCED_LIMIT, /* the model's tokens and drafts, so that the host can be a step ahead */
    LAST          /* likewise, but the host is not ahead */
} tokens;

static void write_inputs(const rig *r, int32_t i, tokens which) {
    sequence *q = &r->seqs[i];
    const hd_seq_output *c = &r->outputs[i];
    int32_t n = r->rows_each;
    if (which != COUNTED && c->step.n_tokens) {
        n = 1 + c->n_drafts;
        q->tokens[0] = c->step.tokens[c->step.n_tokens - 1];
        memcpy(q->tokens + 1, c->drafts, (size_t)c->n_drafts * sizeof *q->tokens);
    } else {
        for (int32_t k = 0; k < n; k++) {
            q->tokens[k] = (int32_t)(((int64_t)q->token + k) % r->spec->vocab);
        }
    }
    r->inputs[i] = (hd_seq_input){
        .slot = i,
        .tokens = q->tokens,
        .n = n,
        .start = q->position,
        .n_sample = r->set.prompt ? 1 : n,
        .after = -1,
        .want_drafts = r->drafts,
        .left = which != FORCED_LIMIT, /* as if it were the last step */
        .pages = {q->pages[0], q->pages[1]},
        .n_pages = r->n_pages
    };
}

/* The prompt beside decoding sequences never ends. */
static void write_chunk(const rig *r, tokens which) {
    const int32_t i = r->report.batch, n = r->report.chunk;
    sequence *q = &r->seqs[i];
    for (int32_t k = 0; k <= 2 * n; k++) {
        q->tokens[k] = (int32_t)(((int64_t)q->position + k) * TOKEN_STEP % r->spec->vocab);
    }
    r->inputs[i] = (hd_seq_input){
        .slot = i,
        .tokens = q->tokens,
        .n = n,
        .start = q->position,
        .after = q->tokens[n],
        .n_next = which == FORCED_LIMIT ? n : 0,
        .pages = {q->pages[0], q->pages[1]},
        .n_pages = r->n_pages
    };
}

/* Runs one step; with `moves`, sequences continue after the accepted tokens. */
static hd_status step(rig *r, tokens which, bool moves, hd_err *err) {
    const hd_runner runner = hd_model_runner_interface(r->model_runner);
    const int32_t n = r->report.batch;
    for (int32_t i = 0; i < n; i++) write_inputs(r, i, which);
    if (r->report.chunk) write_chunk(r, which);
    bench_selection_begin_step(r->selection);
    HD_TRY(runner.run(runner.ctx, NULL, 0, r->inputs, n_seqs(r), r->outputs, err));
    if (r->report.chunk && moves) r->seqs[n].position += r->report.chunk;
    for (int32_t i = 0; i < n; i++) {
        if (r->outputs[i].status != HD_OK) {
            return HD_FAIL(err, r->outputs[i].status,
                           "sequence %d: a logit is not a number: something below is broken",
                           i);
        }
        if (!moves || r->set.prompt) continue;
        r->seqs[i].position += r->outputs[i].step.n_tokens;
        r->seqs[i].token += r->outputs[i].step.n_tokens;
    }
    return HD_OK;
}

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static hd_status time_steps(rig *r, tokens which, double *median, hd_err *err) {
    const int32_t n = (int32_t)r->set.steps;
    for (int32_t i = 0; i < n; i++) {
        const int64_t begun = hd_now_ns();
        HD_TRY(step(r, which, true, err));
        r->seconds[i] = (double)(hd_now_ns() - begun) * 1e-9;
    }
    qsort(r->seconds, (size_t)n, sizeof *r->seconds, by_value);
    *median = r->seconds[n / 2];
    return HD_OK;
}

/* Runs steps one by one, for the device's time in each. */
static hd_status time_device(rig *r, hd_err *err) {
    const hd_model_runner_times a = *hd_model_runner_read_times(r->model_runner);
    HD_TRY(time_steps(r, COUNTED, &r->report.step, err));
    const hd_model_runner_times b = *hd_model_runner_read_times(r->model_runner);
    const int64_t n = b.steps - a.steps;
    const double mixed = (double)(b.mixed_steps - a.mixed_steps);
    if (mixed > 0)
        r->report.alone_gap = 1e-9 * (double)(b.mixed_gap_ns - a.mixed_gap_ns) / mixed;
    r->report.steps = (int32_t)r->set.steps;
    r->report.device_step = n ? 1e-9 * (double)(b.step_ns - a.step_ns) / (double)n : 0;
    r->report.graphs = b.graphs > 0;
    r->report.launches = b.graph_launches;
    return HD_OK;
}

static double count_gaps(const hd_model_runner_times *t) {
    int64_t n = 0;
    for (int i = 0; i < HD_GAP_BINS; i++) n += t->gaps[i];
    return (double)n;
}

/* Runs steps as an engine does: the next one is queued before the last one ends. */
static hd_status time_host(rig *r, hd_err *err) {
    rank_report *p = &r->report;
    if (r->set.prompt) return HD_OK;
    for (int i = 0; i < WARM_UP; i++) HD_TRY(step(r, FORCED_LIMIT, true, err));
    const hd_model_runner_times a = *hd_model_runner_read_times(r->model_runner);
    HD_TRY(time_steps(r, FORCED_LIMIT, &p->step, err));
    const hd_model_runner_times b = *hd_model_runner_read_times(r->model_runner);
    const double n = (double)(b.steps - a.steps), gaps = count_gaps(&b) - count_gaps(&a);
    p->host = n > 0 ? 1e-9 * (double)(b.host_ns - a.host_ns) / n : 0;
    p->ahead_step = n > 0 ? 1e-9 * (double)(b.step_ns - a.step_ns) / n : 0;
    p->gap = gaps > 0 ? 1e-9 * (double)(b.gap_ns - a.gap_ns) / gaps : 0;
    const double mixed = (double)(b.mixed_steps - a.mixed_steps);
    if (mixed > 0) p->ahead = (double)(b.mixed_ahead - a.mixed_ahead) / mixed;
    if (mixed > 0) p->gap = 1e-9 * (double)(b.mixed_gap_ns - a.mixed_gap_ns) / mixed;
    return HD_OK;
}

/* Returns the local experts with rows, the average over the layers of a counted step. */
static double experts_used(const hd_op_profiler *m) {
    double used = 0, calls = 0;
    for (int32_t i = 0; i < m->n_calls; i++) {
        used += m->calls[i].used;
        calls += m->calls[i].used > 0;
    }
    return calls > 0 ? used / calls : 0;
}

/* Runs the same step repeatedly: counted once, then timed. */
static hd_status profiler_steps(rig *r, hd_err *err) {
    hd_op_profiler *m = &r->report.profiler;
    HD_TRY(step(r, LAST, true, err)); /* what is under way */
    r->ops = r->profiled;
    hd_model_runner_use_graphs(r->model_runner, false);
    hd_op_profiler_count(m);
    HD_TRY(step(r, LAST, false, err));
    r->report.ahead_distinct = experts_used(m);
    hd_op_profiler_count(m);
    HD_TRY(step(r, COUNTED, false, err));
    r->report.distinct = experts_used(m);
    r->report.passes = r->set.prompt ? 1 : PASSES;
    for (int32_t i = 0; i < r->report.passes; i++) {
        hd_op_profiler_time(m);
        HD_TRY(step(r, COUNTED, false, err));
        if (!hd_op_profiler_finish(m)) {
            return HD_FAIL(err, HD_EINVAL, "two equal steps made different calls");
        }
    }
    r->ops = r->inner;
    for (int32_t i = 0; i < m->n; i++) {
        r->report.kernels += m->line[i].seconds / r->report.passes;
    }
    return HD_OK;
}

/* The first step is queued operator by operator, so it shows its exchanges. */
static hd_status measure(rig *r, hd_err *err) {
    const int before = r->set.prompt ? 1 : WARM_UP; /* one long step is warm-up enough */
    for (int i = 0; i < before; i++) {
        HD_TRY(step(r, COUNTED, true, err));
        if (i == 0) r->report.exchanges = (int32_t)hd_comm_emulated_exchanges(r->emulated);
    }
    const hd_resident_counts a = hd_model_runner_read_resident(r->model_runner);
    HD_TRY(time_device(r, err));
    HD_TRY(time_host(r, err));
    const hd_resident_counts b = hd_model_runner_read_resident(r->model_runner);
    const double selected = (double)(b.selected - a.selected);
    if (selected > 0) r->report.fetched = (double)(b.fetched - a.fetched) / selected;
    return HD_OK;
}

/* The same steps with exchanges that take time, in a rig of their own. */
static hd_status measure_charged(rig *r, const settings *set, int64_t overlap, hd_err *err) {
    rig *charged = calloc(1, sizeof *charged);
    if (!charged) return HD_FAIL(err, HD_ENOMEM, "no memory for a bench");
    charged->set = *set;
    charged->set.overlap = overlap;
    hd_status st = open_rig(charged, err);
    if (st == HD_OK) st = measure(charged, err);
    const rank_report *c = &charged->report;
    rank_report *to = &r->report;
    const double device_step = c->ahead_step > 0 ? c->ahead_step : c->device_step;
    to->exchange_us = (int32_t)set->exchange_us;
    to->dispatch_ns = charged->dispatch_ns;
    to->combine_ns = charged->combine_ns;
    if (overlap == 1) {
        to->charged_step = c->step;
        to->charged_device_step = device_step;
    } else {
        to->overlap = (int32_t)overlap;
        to->overlapped_step = c->step;
        to->overlapped_device_step = device_step;
        to->overlapped_activations = c->memory.activations;
    }
    close_rig(charged);
    free(charged);
    return st;
}

static hd_status bench(const settings *set, hd_err *err) {
    rig *r = calloc(1, sizeof *r);
    if (!r) return HD_FAIL(err, HD_ENOMEM, "no memory for a bench");
    r->set = *set;
    r->set.exchange_us = 0;
    r->set.row_ns = NULL;
    r->set.overlap = 1;
    hd_status st = HD_OK;
    if (set->overlap > 1) st = measure_charged(r, set, set->overlap, err);
    if (st == HD_OK && (set->exchange_us || set->row_ns || set->overlap > 1)) {
        st = measure_charged(r, set, 1, err);
    }
    if (st == HD_OK) st = open_rig(r, err);
    if (st == HD_OK) st = measure(r, err);
    if (st == HD_OK) st = profiler_steps(r, err);
    if (st == HD_OK && set->json) {
        rank_report_print_json(&r->report, stdout);
    } else if (st == HD_OK) {
        rank_report_print(&r->report, stdout);
    }
    close_rig(r);
    free(r);
    return st;
}

bool bench_rank_wanted(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        if (strncmp(argv[i], "--emulate-rank", strlen("--emulate-rank")) == 0) return true;
    }
    return false;
}

int bench_rank(int argc, char **argv) {
    settings set = {.engine = engine_settings_default(),
                    .acceptance = "0.72,0.66,0.64",
                    .batch = 1,
                    .context = 4096,
                    .steps = 20,
                    .overlap = 1,
                    .routing = HD_ROUTING_UNIFORM};
    const option options[] = {
        option_text("dummy-weights", &set.config, "CONFIG", "a config.json or its folder"),
        option_text("emulate-rank", &set.parallel, "LAYOUT",
                    "tp=N, ep=N[,redundant=N], or tp=N,dp=N,ep=N as serve has it; [,rank=N]"),
        option_int("layers", &set.layers, 0, 1 << 16, "only the first N; 0: all"),
        option_int("batch", &set.batch, 1, 4096, "sequences of a step"),
        option_int("context", &set.context, 0, 1 << 24, "tokens before the step, random"),
        option_int("prompt", &set.prompt, 0, 1 << 20,
                   "a step reads so many prompt tokens of each sequence; 0: it decodes"),
        option_int("chunk", &set.chunk, 0, 1 << 20,
                   "beside the sequences that decode a step reads so many tokens of a prompt"),
        option_int("drafts", &set.drafts, 0, HD_MAX_DRAFTS, "per step by the MTP layer"),
        option_text("acceptance", &set.acceptance, "P,P,...",
                    "how probably each draft stands if those before it do; a first 0: as the "
                    "model says"),
        option_choice("router", &set.routing, routings, "who chooses experts"),
        option_text("selection", &set.selection, "RULE",
                    "with --hisparse: which entries rows select, uniform, zipf=S or repeat=P; "
                    "without it, what the indexer says"),
        option_choice("communication", &set.exchange, exchanges,
                      "what stands for it: nothing, or copies of the same rows"),
        option_int("exchange-us", &set.exchange_us, 0, 100000,
                   "also run with exchanges that take so long each; 0: do not"),
        option_text(
            "row-ns", &set.row_ns, "N,N",
            "in that run a row also takes so many nanoseconds to its experts, and back"),
        option_int("overlap", &set.overlap, 1, HD_MAX_MICRO,
                   "also run steps in so many micro-batches, of which one computes while rows "
                   "of another travel"),
        option_int("steps", &set.steps, 1, MAX_STEPS, "to time; the median one is shown"),
        option_flag("json", &set.json, "print one JSON object"),
    };
    const command_line line = {
        .command = "bench latency",
        .summary = "One rank of a large layout on one device, without the other ranks.",
        .options = options,
        .n_options = (int)HD_LEN(options)};
    int code;
    if (!engine_options_parse(&line, ENGINE_RANK, &set.engine, argc, argv, &code)) return code;
    hd_err err = {0};
    if (!set.config || !set.parallel) {
        HD_FAIL(&err, HD_EINVAL, "--emulate-rank needs a layout and --dummy-weights CONFIG");
        return report_error(&err);
    }
    const hd_status st = bench(&set, &err);
    return st == HD_OK ? 0 : report_error(&err);
}
