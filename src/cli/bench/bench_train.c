/* bench_train.c - `hadal bench train`: steps of supervised training on one batch, whose rate is 0, so
 * that every step computes the same. A step is timed part by part. The limit of a CPU is that of float32
 * products in the nearest cache, measured in the same run; of a GPU none is given. */
#include "cli/bench/bench_train.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/cpu.h"
#include "base/json.h"
#include "base/progress.h"
#include "base/quantiles.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "cli/token_lists.h"
#include "ops/profile/op_profiler.h"
#include "train/memory.h"
#include "weights/summary.h"
#include "weights/update.h"

enum { MAX_TIMES = 1000 };

static const char *const backends[] = {"cpu", "cuda", NULL};

typedef enum part { FORWARD, BACKWARD, OPTIMIZER, STEP, N_PARTS } part;

static const struct {
    const char *name, *about;
    double passes; /* products of this part over those of a forward pass */
} parts[N_PARTS] = {
    [FORWARD] = {"forward",   "log-probabilities of all tokens",                      1},
    [BACKWARD] = {"backward",  "a forward pass with gradients, less forward",          2},
    [OPTIMIZER] = {"optimizer", "masters, rounding to the stored formats, new weights", 0},
    [STEP] = {"step",      "a forward pass with gradients, and the optimizer",     3},
};

typedef struct settings {
    const char *model_dir, *config, *tokens; /* config: gradients of dummy weights */
    int64_t layer;                           /* of config, alone; -1: all */
    int64_t sequences, length, times, rows, keep_gib, threads;
    int backend;
    bool muon, cpu_time, json;
} settings;

typedef struct run {
    settings set;
    hd_model_spec *spec;
    hd_weights *weights;
    hd_trainer *trainer;
    token_lists lists;
    hd_train_sequence *seqs; /* [lists.n] */
    float *numbers;          /* [3, lists.total] factors, log-probabilities, entropies */
    int64_t targets;         /* tokens with a loss */
    int64_t (*now)(void);    /* nanoseconds */
    double loss;
    double flops_per_token; /* of a forward pass: products with matrices, attention left out */
    double limit;           /* float32 operations per second; 0: unknown */
    hd_device *gpu;         /* NULL: a CPU */
    int64_t unused;         /* memory_used() before weights and trainer were opened */
    double seconds[N_PARTS][MAX_TIMES];
} run;

/* The most memory that the process has had, in bytes. What getrusage() says begins with the parent's. */
static int64_t peak_memory(void) {
    char line[256];
    long long kib = 0;
    FILE *f = fopen("/proc/self/status", "re");
    while (f && kib == 0 && fgets(line, sizeof line, f)) {
        if (strncmp(line, "VmHWM:", 6) == 0) kib = strtoll(line + 6, NULL, 10);
    }
    if (f) fclose(f);
    return kib * 1024;
}

/* Bytes: of a GPU those that are taken, with what the driver takes for the program. */
static int64_t memory_used(const run *r) {
    return r->gpu ? -(int64_t)hd_device_free_bytes(r->gpu) : peak_memory();
}

/* ---- opening ---- */

enum { LAYER_VOCAB = 1024 }; /* so that the head of one layer is small beside it */

/* Leaves one layer of the model, and a small vocabulary. */
static hd_status keep_layer(hd_model_spec *s, int64_t layer, hd_err *err) {
    if (layer >= s->n_layers || s->family == HD_FAMILY_V41) {
        return HD_FAIL(err, HD_EINVAL, "no layer %lld that can be trained alone",
                       (long long)layer);
    }
    s->layers[0] = s->layers[layer];
    s->n_layers = 1;
    s->n_hash_layers = s->layers[0].mlp == HD_MLP_MOE_HASH;
    s->n_mtp = 0;
    s->drafter = HD_DRAFTER_NONE;
    s->dspark = (hd_dspark_spec){0};
    s->vocab = hd_min_i32(s->vocab, LAYER_VOCAB);
    return HD_OK;
}

static hd_status open_spec(run *r, hd_err *err) {
    const settings *set = &r->set;
    if (!set->model_dir == !set->config) {
        return HD_FAIL(err, HD_EINVAL, "give either MODEL_DIR or --dummy-weights CONFIG");
    }
    if (set->layer >= 0 && !set->config) {
        return HD_FAIL(err, HD_EINVAL, "--layer belongs to --dummy-weights");
    }
    HD_TRY(hd_model_spec_open(&r->spec, set->config ? set->config : set->model_dir, err));
    return set->layer >= 0 ? keep_layer(r->spec, set->layer, err) : HD_OK;
}

static hd_status open_weights(run *r, hd_err *err) {
    if (r->set.config) return hd_weights_open_dummy(&r->weights, r->spec, NULL, err);
    return hd_weights_open_updatable(&r->weights, r->set.model_dir, r->spec, err);
}

static hd_status random_lists(run *r, hd_err *err) {
    token_lists *l = &r->lists;
    const int64_t n = r->set.sequences, length = r->set.length;
    uint32_t state = 1;
    *l = (token_lists){.n = (int32_t)n, .longest = (int32_t)length, .total = n * length};
    l->tokens = calloc((size_t)l->total + 1, sizeof *l->tokens);
    l->first = calloc((size_t)n + 1, sizeof *l->first);
    if (!l->tokens || !l->first) {
        return HD_FAIL(err, HD_ENOMEM, "no memory for %lld tokens", (long long)l->total);
    }
    for (int64_t i = 0; i <= n; i++) l->first[i] = i * length;
    for (int64_t i = 0; i < l->total; i++) {
        state = state * 1664525u + 1013904223u;
        l->tokens[i] = (int32_t)((state >> 8) % (uint32_t)r->spec->vocab);
    }
    return HD_OK;
}

static hd_status place_sequences(run *r, hd_err *err) {
    const token_lists *l = &r->lists;
    r->seqs = calloc((size_t)l->n, sizeof *r->seqs);
    r->numbers = calloc((size_t)l->total * 3, sizeof *r->numbers);
    if (!r->seqs || !r->numbers) return HD_FAIL(err, HD_ENOMEM, "no memory for a batch");
    r->targets = l->total - l->n;
    for (int64_t i = 0; i < l->total; i++) r->numbers[i] = (float)(1.0 / (double)r->targets);
    for (int32_t i = 0; i < l->n; i++) {
        float *at = r->numbers + l->first[i];
        r->seqs[i] = (hd_train_sequence){.tokens = l->tokens + l->first[i],
                                         .n = (int32_t)(l->first[i + 1] - l->first[i]),
                                         .first = 1,
                                         .factor = at,
                                         .logprob = at + l->total,
                                         .entropy = at + 2 * l->total};
        if (r->seqs[i].n < 2) {
            return HD_FAIL(err, HD_EINVAL, "sequence %d has one token; training needs two", i);
        }
    }
    return HD_OK;
}

static hd_status count_products(run *r, hd_err *err) {
    hd_schema schema;
    hd_summary sum;
    HD_TRY(hd_schema_open(&schema, r->spec, err));
    hd_summarize(&sum, r->spec, &schema);
    hd_schema_close(&schema);
    const int64_t looked_up = (int64_t)r->spec->vocab * r->spec->hidden;
    r->flops_per_token = 2.0 * (double)(hd_summary_main(&sum).active - looked_up);
    return HD_OK;
}

static hd_status open_all(run *r, hd_err *err) {
    if (r->set.cpu_time) r->set.threads = 1;
    r->now = r->set.cpu_time ? hd_thread_ns : hd_now_ns;
    HD_TRY(open_spec(r, err));
    if (r->set.tokens) {
        HD_TRY(token_lists_load(&r->lists, r->set.tokens, r->spec->vocab,
                                r->spec->max_positions, err));
    } else {
        HD_TRY(random_lists(r, err));
    }
    HD_TRY(place_sequences(r, err));
    HD_TRY(count_products(r, err));
    if (r->set.backend) HD_TRY(hd_device_open_cuda(&r->gpu, 0, HD_CUDA_AUTO, err));
    r->unused = memory_used(r);
    HD_TRY(open_weights(r, err));
    const int32_t least = r->lists.longest - 1;
    const hd_trainer_options o = {
        .spec = r->spec,
        .weights = r->weights,
        .upload = r->weights,
        .backend = backends[r->set.backend],
        .rows = !r->set.rows || r->set.rows > least ? (int32_t)r->set.rows : least,
        .context = r->lists.longest,
        .threads = (int32_t)r->set.threads,
        .keep_bytes = hd_keep_bytes(r->set.keep_gib),
        .gradients_only = r->set.config != NULL,
        .matrices = r->set.muon ? HD_UPDATE_MUON : HD_UPDATE_ADAMW,
        .optimizer = {.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .momentum = 0.95, .clip = 1.0}
    };
    HD_TRY(hd_trainer_open(&r->trainer, &o, err));
    if (r->set.backend == 0)
        r->limit = hd_measure_flops(hd_trainer_stream(r->trainer), hd_cpu_features(), r->now);
    return HD_OK;
}

static void close_all(run *r) {
    hd_trainer_close(r->trainer);
    hd_device_close(r->gpu);
    hd_weights_close(r->weights);
    hd_model_spec_close(r->spec);
    token_lists_free(&r->lists);
    free(r->seqs);
    free(r->numbers);
}

/* ---- steps ---- */

static double since(const run *r, int64_t start) {
    return (double)(r->now() - start) * 1e-9;
}

static hd_status optimize(run *r, hd_err *err) {
    hd_optimizer_report report;
    hd_weights_update *u;
    HD_TRY(hd_trainer_step(r->trainer, &u, &report, err));
    if (!u) return HD_FAIL(err, HD_EINVAL, "a gradient is not finite");
    const hd_status st =
        hd_weights_update_apply(u, r->weights, hd_trainer_stream(r->trainer), err);
    hd_weights_update_close(u);
    return st;
}

static void note_loss(run *r) {
    double sum = 0;
    for (int32_t i = 0; i < r->lists.n; i++) {
        for (int32_t k = 0; k < r->seqs[i].n - 1; k++) sum -= (double)r->seqs[i].logprob[k];
    }
    r->loss = sum / (double)r->targets;
}

static hd_status run_once(run *r, int64_t time, hd_err *err) {
    int64_t start = r->now();
    HD_TRY(hd_trainer_score(r->trainer, r->seqs, r->lists.n, err));
    const double forward = since(r, start);
    start = r->now();
    HD_TRY(hd_trainer_accumulate(r->trainer, r->seqs, r->lists.n, err));
    const double both = since(r, start);
    start = r->now();
    if (!r->set.config) HD_TRY(optimize(r, err));
    const double last = r->set.config ? 0.0 : since(r, start);
    const double seconds[N_PARTS] = {forward, both - forward, last, both + last};
    for (int i = 0; i < N_PARTS && time >= 0; i++) r->seconds[i][time] = seconds[i];
    note_loss(r);
    return HD_OK;
}

/* ---- the report ---- */

static int64_t planned_memory(const run *r) {
    hd_trainer_memory m;
    hd_trainer_memory_now(&m, r->trainer);
    return hd_trainer_memory_peak(&m);
}

static double share_of_limit(const run *r, int i, double seconds) {
    const double tokens = (double)(r->lists.total - r->lists.n);
    return r->limit > 0.0 ? parts[i].passes * r->flops_per_token * tokens / seconds / r->limit
                          : 0.0;
}

static void print_lines(const run *r, const hd_quantiles *q) {
    printf("%d sequences, %lld tokens, %lld times, medians; loss %.6f", r->lists.n,
           (long long)r->lists.total, (long long)r->set.times, r->loss);
    if (r->limit > 0.0) printf("; limit %.1f GFLOP/s", r->limit * 1e-9);
    putchar('\n');
    printf("%-9s %12s %12s %10s %9s\n", "part", "ms", "90th ms", "tokens/s", "of limit");
    for (int i = 0; i < N_PARTS; i++) {
        if (i == OPTIMIZER && r->set.config) continue;
        printf("%-9s %12.1f %12.1f %10.0f %9.3f  %s\n", parts[i].name, q[i].median * 1e3,
               q[i].p90 * 1e3, (double)r->lists.total / q[i].median,
               share_of_limit(r, i, q[i].median), parts[i].about);
    }
    printf("memory %.1f MB, planned %.1f MB\n", (double)(memory_used(r) - r->unused) * 1e-6,
           (double)planned_memory(r) * 1e-6);
}

static hd_status print_json(const run *r, const hd_quantiles *q, hd_err *err) {
    json_t *o = json_pack(
        "{s:I, s:I, s:f, s:f, s:f, s:I, s:I}", "tokens", (json_int_t)r->lists.total, "times",
        (json_int_t)r->set.times, "loss", r->loss, "limit_flops", r->limit, "flops_per_token",
        r->flops_per_token, "memory", (json_int_t)(memory_used(r) - r->unused),
        "planned_memory", (json_int_t)planned_memory(r));
    for (int i = 0; i < N_PARTS; i++) {
        if (i == OPTIMIZER && r->set.config) continue;
        json_object_set_new(o, parts[i].name,
                            json_pack("{s:f, s:f, s:f}", "seconds", q[i].median, "p90",
                                      q[i].p90, "of_limit", share_of_limit(r, i, q[i].median)));
    }
    char *text = hd_json_write(o, JSON_COMPACT);
    json_decref(o);
    if (!text) return HD_FAIL(err, HD_ENOMEM, "no memory for the report");
    puts(text);
    free(text);
    return HD_OK;
}

static hd_status bench(run *r, hd_err *err) {
    hd_quantiles q[N_PARTS];
    HD_TRY(open_all(r, err));
    for (int64_t i = -1; i < r->set.times; i++)
        HD_TRY(run_once(r, i, err)); /* first: warm-up */
    for (int i = 0; i < N_PARTS; i++) q[i] = hd_quantiles_of(r->seconds[i], r->set.times);
    if (r->set.json) return print_json(r, q, err);
    print_lines(r, q);
    return HD_OK;
}

int bench_train(int argc, char **argv) {
    run *r = calloc(1, sizeof *r);
    hd_err err = {0};
    if (!r) {
        HD_FAIL(&err, HD_ENOMEM, "no memory for a benchmark");
        return report_error(&err);
    }
    r->set =
        (settings){.sequences = 16, .length = 256, .times = 5, .keep_gib = -1, .layer = -1};
    const option options[] = {
        option_text("dummy-weights", &r->set.config, "CONFIG",
                    "instead of MODEL_DIR: random weights of a config.json, without optimizer"),
        option_int(
            "layer", &r->set.layer, 0, 1000,
            "with --dummy-weights: this layer alone, with 1024 tokens in the vocabulary"),
        option_text("tokens", &r->set.tokens, "FILE",
                    "a JSON list of sequences of token ids; default: random ones"),
        option_int("sequences", &r->set.sequences, 1, 1 << 20,
                   "without --tokens: how many; default 16"),
        option_int("length", &r->set.length, 2, 1 << 20,
                   "without --tokens: tokens of each; default 256"),
        option_int("times", &r->set.times, 1, MAX_TIMES, "steps; default 5, and one before"),
        option_int("rows", &r->set.rows, 1, 1 << 20,
                   "tokens of a micro-batch at least; default 1024, on a GPU 16384"),
        option_int("keep-activations", &r->set.keep_gib, 0, 1 << 20,
                   "GiB of activations that are not computed again; default 2, on a GPU 16"),
        option_choice("backend", &r->set.backend, backends, "cpu (default) or cuda"),
        option_flag("muon", &r->set.muon, "hidden matrices by Muon, not AdamW"),
        option_int("threads", &r->set.threads, 0, 1024, "default: one per core"),
        option_flag("cpu-time", &r->set.cpu_time,
                    "one thread, by its processor time: for a machine with other work"),
        option_flag("json", &r->set.json, "print one JSON object"),
    };
    const positional model = {"MODEL_DIR", &r->set.model_dir, true, POSITIONAL_MODEL};
    const command_line line = {
        .command = "bench train",
        .summary = "Tokens per second of training: forward, backward, optimizer.",
        .positionals = &model,
        .n_positionals = 1,
        .options = options,
        .n_options = (int)HD_LEN(options)};
    int code = 0;
    if (options_parse(&line, argc, argv, &code) && bench(r, &err) != HD_OK) {
        code = report_error(&err);
    }
    close_all(r);
    free(r);
    return code;
}
