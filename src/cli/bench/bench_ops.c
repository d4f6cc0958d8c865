/* bench_ops.c - `hadal bench ops`: runs prefill and decode steps of a config's model with
 * random weights, and reports the time of each operator (op profiler). */
#include "cli/bench/bench_ops.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/checked.h"
#include "base/cpu.h"
#include "base/progress.h"
#include "cli/bench/bench_cases.h"
#include "cli/bench/bench_ops_internal.h"
#include "cli/engine_options.h"
#include "model/model.h"
#include "weights/summary.h"

enum { MAX_REPEAT = 15, READ_BYTES = 1 << 28 };

/* Features that a processor of each --isa lacks. */
enum {
    BEYOND_AVX512 =
        HD_CPU_AVX512_VBMI | HD_CPU_AVX512_VNNI | HD_CPU_AVX512_BF16 | HD_CPU_FAST_BF16,
    BEYOND_AVX2 = BEYOND_AVX512 | HD_CPU_AVX512,
    BEYOND_PLAIN = BEYOND_AVX2 | HD_CPU_AVX2
};
static const char *const isas[] = {"all", "avx512", "avx2", "plain", NULL};
static const uint32_t lacking[] = {0, BEYOND_AVX512, BEYOND_AVX2, BEYOND_PLAIN};

typedef struct settings {
    const char *path, *only;
    engine_settings engine;
    int64_t layers, batch, prompt, context, repeat;
    int isa;
    bool json, cpu_time;
} settings;

typedef struct rig {
    settings set;
    hd_model_spec *spec;
    hd_weights *weights;
    hd_device *device;
    hd_stream *stream;
    hd_ops inner, ops;
    hd_clock_fn *now;
    hd_mla_form mla;
    hd_model *model;
    hd_kv *kv;
    hd_batch batch;
    int32_t *tokens; /* [prompt or batch] */
    int32_t *pages;  /* [batch, pages_each] page numbers */
    int32_t pages_each;
    hd_op_profiler profiler;
    ops_phase run[MAX_REPEAT];
    ops_report report;
} rig;

/* ---- opening ---- */

/* Keeps the first layers of the model; the others would show the same. */
static hd_status open_spec(rig *r, hd_err *err) {
    HD_TRY(hd_model_spec_open(&r->spec, r->set.path, err));
    r->report.of_layers = r->spec->n_layers;
    if (r->set.layers) hd_model_spec_keep_layers(r->spec, (int32_t)r->set.layers);
    r->spec->n_mtp = 0;
    r->report.layers = r->spec->n_layers;
    r->report.family = hd_family_name(r->spec->family);
    return HD_OK;
}

static hd_status ops_options(const settings *set, hd_ops_options *out, hd_mla_form *mla,
                             hd_err *err) {
    HD_TRY(engine_settings_ops(&set->engine, out, mla, err));
    out->cpu.without = lacking[set->isa];
    out->needs_cpu = set->path ? "timing the steps of a CONFIG" : NULL;
    return HD_OK;
}

static hd_status open_device(rig *r, hd_err *err) {
    hd_ops_options ops;
    HD_TRY(ops_options(&r->set, &ops, &r->mla, err));
    HD_TRY(hd_ops_open(&r->inner, &r->device, r->set.engine.options.backend, &ops, err));
    hd_device_bind_thread(r->device);
    HD_TRY(hd_stream_open(&r->stream, r->device, err));
    r->now = r->set.cpu_time ? hd_thread_ns : hd_now_ns;
    hd_op_profiler_init(&r->profiler, &r->ops, &r->inner, r->now);
    r->report.table = r->inner.name;
    r->report.threads = hd_stream_workers(r->stream);
    return HD_OK;
}

static int32_t most_rows(const rig *r) {
    return (int32_t)(r->set.prompt > r->set.batch ? r->set.prompt : r->set.batch);
}

static int32_t positions(const rig *r) {
    return (int32_t)(r->set.prompt > r->set.context ? r->set.prompt : r->set.context + 1);
}

static hd_status open_pages(rig *r, hd_err *err) {
    const hd_kv_shape shape = hd_kv_shape_of(r->spec);
    r->pages_each = (int32_t)hd_ceil_div(positions(r), shape.page_tokens);
    const int64_t n = r->set.batch * r->pages_each;
    if (n > INT32_MAX / shape.page_tokens) {
        return HD_FAIL(err, HD_EINVAL, "--batch times --context: %lld pages are too many",
                       (long long)n);
    }
    r->tokens = calloc((size_t)most_rows(r), sizeof *r->tokens);
    r->pages = calloc((size_t)n, sizeof *r->pages);
    if (!r->tokens || !r->pages) return HD_FAIL(err, HD_ENOMEM, "no memory for page tables");
    for (int32_t i = 0; i < n; i++) r->pages[i] = i;
    for (int32_t i = 0; i < most_rows(r); i++) {
        r->tokens[i] = (int32_t)((int64_t)i * 7919 % r->spec->vocab);
    }
    const hd_kv_options kv = {
        .n_pages = {(int32_t)n, shape.lookback ? (int32_t)n : 0},
        .entry_type = r->ops.kv_type,
        .rounds = r->ops.precision == HD_OFFICIAL
    };
    HD_TRY(hd_kv_open(&r->kv, r->spec, r->spec->n_layers, r->device, &kv, err));
    hd_kv_random_fill(
        r->kv,
        r->stream); /* memory that was never written is one page of zeros, mapped many times */
    return HD_OK;
}

static hd_status open_rig(rig *r, hd_err *err) {
    HD_TRY(open_spec(r, err));
    HD_TRY(hd_weights_open_dummy(&r->weights, r->spec, NULL, err));
    HD_TRY(open_device(r, err));
    const hd_model_env env = {.spec = r->spec,
                              .weights = r->weights,
                              .ops = &r->ops,
                              .device = r->device,
                              .stream = r->stream,
                              .mla = r->mla};
    const hd_model_limits limits = {
        .rows = most_rows(r), .logits = (int32_t)r->set.batch, .positions = positions(r)};
    HD_TRY(hd_model_open(&r->model, &env, &limits, err));
    HD_TRY(open_pages(r, err));
    const hd_batch_limits batch = {most_rows(r), (int32_t)r->set.batch, r->pages_each};
    return hd_batch_open(&r->batch, &batch, r->device, err);
}

static void close_rig(rig *r) {
    hd_batch_close(&r->batch);
    hd_kv_close(r->kv);
    free(r->tokens);
    free(r->pages);
    hd_model_close(r->model);
    hd_stream_close(r->stream);
    hd_device_close(r->device);
    hd_weights_close(r->weights);
    hd_model_spec_close(r->spec);
}

/* ---- running ---- */

static void add_sequence(rig *r, int32_t i, int32_t n, int32_t start) {
    const int32_t *pages = r->pages + (int64_t)i * r->pages_each;
    hd_batch_add(&r->batch, &(hd_batch_seq){
                                .tokens = r->tokens + i,
                                .n = n,
                                .start = start,
                                .after = -1,
                                .n_logits = 1,
                                .pages = {pages, pages},
                                .n_pages = r->pages_each
    });
}

static hd_status run_step(rig *r, ops_phase *p, hd_err *err) {
    hd_op_profiler_reset(&r->profiler);
    const int64_t begun = r->now();
    hd_model_step(r->model, r->kv, &r->batch);
    HD_TRY(hd_stream_sync(r->stream, err));
    p->seconds = (double)(r->now() - begun) * 1e-9;
    p->profiler = r->profiler;
    return HD_OK;
}

static int by_seconds(const void *a, const void *b) {
    const ops_phase *p = a, *q = b;
    return (p->seconds > q->seconds) - (p->seconds < q->seconds);
}

/* Runs once to warm up, then takes the median of the runs. */
static hd_status run_phase(rig *r, int phase, hd_err *err) {
    static const char *const names[] = {"prefill", "decode"};
    hd_batch_upload(&r->batch, r->stream);
    for (int64_t i = -1; i < r->set.repeat; i++) {
        HD_TRY(run_step(r, &r->run[i < 0 ? 0 : i], err));
    }
    qsort(r->run, (size_t)r->set.repeat, sizeof *r->run, by_seconds);
    ops_phase *p = &r->report.phase[phase];
    *p = r->run[r->set.repeat / 2];
    p->name = names[phase];
    p->rows = r->batch.n_rows;
    return HD_OK;
}

static hd_status measure_machine(rig *r, hd_err *err) {
    void *data;
    HD_TRY(hd_device_alloc(r->device, &data, READ_BYTES, "what is read", err));
    memset(data, 1, READ_BYTES); /* so that it is resident */
    r->report.read = hd_measure_read(r->stream, data, READ_BYTES / sizeof(uint64_t), r->now);
    r->report.flops =
        hd_measure_flops(r->stream, hd_cpu_features() & ~lacking[r->set.isa], r->now);
    hd_device_release(r->device, data);
    return HD_OK;
}

static hd_status measure(rig *r, hd_err *err) {
    hd_summary sum;
    hd_summarize(&sum, r->spec, hd_weights_schema(r->weights));
    r->report.weight_bytes = (double)hd_summary_main(&sum).bytes;
    r->report.context = (int32_t)r->set.context;
    r->report.repeat = (int32_t)r->set.repeat;
    HD_TRY(measure_machine(r, err));
    hd_batch_reset(&r->batch);
    add_sequence(r, 0, (int32_t)r->set.prompt, 0);
    HD_TRY(run_phase(r, OPS_PREFILL, err));
    hd_batch_reset(&r->batch);
    for (int32_t i = 0; i < r->set.batch; i++) add_sequence(r, i, 1, (int32_t)r->set.context);
    return run_phase(r, OPS_DECODE, err);
}

static hd_status bench(const settings *set, hd_err *err) {
    rig *r = calloc(1, sizeof *r);
    if (!r) return HD_FAIL(err, HD_ENOMEM, "no memory for a bench");
    r->set = *set;
    hd_status st = open_rig(r, err);
    if (st == HD_OK) st = measure(r, err);
    if (st == HD_OK && set->json) {
        ops_report_print_json(&r->report, stdout);
    } else if (st == HD_OK) {
        ops_report_print(&r->report, stdout);
    }
    close_rig(r);
    free(r);
    return st;
}

/* Without a config, times every operator alone; steps of a config are profiled on the CPU
 * only. */
static hd_status run(const settings *set, hd_err *err) {
    const char *backend = set->engine.options.backend;
    const bool cpu = strcmp(backend, "auto") == 0 || strcmp(backend, "cpu") == 0;
    hd_ops_options ops;
    hd_mla_form mla;
    HD_TRY(ops_options(set, &ops, &mla, err));
    if (set->isa && (!set->path || !cpu))
        return HD_FAIL(err, HD_EINVAL, "--isa is for a CONFIG on the cpu backend");
    if (mla == HD_MLA_NAIVE && !set->path)
        return HD_FAIL(err, HD_EINVAL, "--mla is for the steps of a CONFIG");
    if (!set->path)
        return bench_cases(backend, &ops, set->only, (int32_t)set->repeat, set->json, err);
    if (set->only) return HD_FAIL(err, HD_EINVAL, "--only is for the cases without a CONFIG");
    if (strcmp(backend, "cuda") != 0) return bench(set, err);
    return HD_FAIL(err, HD_EINVAL,
                   "the operators of a CONFIG's steps are timed on the CPU only; without a "
                   "CONFIG, those of a GPU are");
}

int bench_ops(int argc, char **argv) {
    settings set = {.engine = engine_settings_default(),
                    .batch = 1,
                    .prompt = 512,
                    .context = 512,
                    .repeat = 5};
    const option options[] = {
        option_int("layers", &set.layers, 0, 1 << 16, "only the first N; 0: all"),
        option_int("batch", &set.batch, 1, 4096, "sequences of a decoding step"),
        option_int("prompt", &set.prompt, 1, 1 << 16, "tokens of the prompt"),
        option_int("context", &set.context, 0, 1 << 24, "tokens before those decoded"),
        option_int("repeat", &set.repeat, 1, MAX_REPEAT,
                   "steps or rounds; the median one is shown"),
        option_choice("isa", &set.isa, isas, "instruction sets used, of those there are"),
        option_text("only", &set.only, "WORD", "cases with WORD in the name or operator"),
        option_flag("cpu-time", &set.cpu_time,
                    "one thread, by its processor time: for a machine with other work"),
        option_flag("json", &set.json, "print one JSON object"),
    };
    const positional model = {"CONFIG", &set.path, true, POSITIONAL_CONFIG};
    const command_line line = {
        .command = "bench ops",
        .summary = "Where the time of a prompt and of a decoding step goes, by operator.",
        .details =
            "CONFIG is a config.json or the folder of one; weights are random, "
            "in the formats it declares. Without one: operators alone, at widths of V3 and V4, "
            "beside the least time an H200 needs for their bytes or products.",
        .positionals = &model,
        .n_positionals = 1,
        .options = options,
        .n_options = (int)HD_LEN(options)};
    int code;
    if (!engine_options_parse(&line, ENGINE_OPS, &set.engine, argc, argv, &code)) return code;
    if (set.cpu_time) set.engine.options.threads = 1;
    hd_err err = {0};
    const hd_status st = run(&set, &err);
    return st == HD_OK ? 0 : report_error(&err);
}
