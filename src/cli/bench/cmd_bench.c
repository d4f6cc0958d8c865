/* cmd_bench.c - `hadal bench`: measures an engine under a synthetic load; bench_ops.c measures
 * operators, bench_comm.c communication, bench_serve.c any server, bench_update.c new weights,
 * bench_train.c training. `throughput` sends all requests at once, `latency` one
 * after the other. */
#include <stdio.h>
#include <string.h>

#include "cli/bench/bench_comm.h"
#include "cli/bench/bench_ops.h"
#include "cli/bench/bench_rank.h"
#include "cli/bench/bench_report.h"
#include "cli/bench/bench_serve.h"
#include "cli/bench/bench_train.h"
#include "cli/bench/bench_update.h"
#include "cli/commands.h"
#include "cli/engine_options.h"
#include "cli/request_options.h"
#include "engine/engine.h"

enum { THROUGHPUT_RUNNING = 16 };

typedef struct bench_settings {
    engine_settings engine;   /* its model_dir, */
    const char *dummy_config; /* or this */
    load_options load;
    engine_command command;
    int64_t warmup;
    bool json, quiet;
} bench_settings;

static hd_status check(const bench_settings *b, hd_err *err) {
    const load_options *o = &b->load;
    if (!b->engine.options.model_dir == !b->dummy_config) {
        return HD_FAIL(err, HD_EINVAL, "give either MODEL_DIR or --dummy-weights CONFIG");
    }
    if (o->shared_prefix >= o->input_tokens) {
        return HD_FAIL(err, HD_EINVAL,
                       "a shared prefix of %lld tokens leaves nothing of an input of %lld",
                       (long long)o->shared_prefix, (long long)o->input_tokens);
    }
    return HD_OK;
}

/* Every page and token the set may need at once, so that the load is not bound by the cache. */
static hd_status open_engine(hd_engine **out, const bench_settings *b, hd_err *err) {
    const int64_t longest = b->load.input_tokens + b->load.output_tokens;
    engine_settings engine = b->engine;
    hd_engine_options *o = &engine.options;
    if (b->dummy_config) o->model_dir = b->dummy_config;
    o->dummy_weights = b->dummy_config != NULL;
    o->queue_limit = (int32_t)(b->load.requests + 1);
    if (!o->max_running) o->max_running = b->command == ENGINE_LATENCY ? 1 : THROUGHPUT_RUNNING;
    if (!o->max_context) o->max_context = (int32_t)longest;
    if (!o->kv_tokens) o->kv_tokens = longest * (o->max_running + 1) + b->load.shared_prefix;
    return engine_settings_open(out, &engine, b->quiet, err);
}

static hd_status warm_up(hd_engine *e, const bench_settings *b, int32_t vocab, hd_err *err) {
    load_options o = b->load;
    load_run run;
    o.requests = b->warmup;
    o.seed = b->load.seed ^ 0x5eed; /* other tokens: nothing of the set is cached */
    o.rate = 0;
    if (o.requests == 0) return HD_OK;
    const hd_status st = load_run_all(&run, e, &o, vocab, true, err);
    load_run_deinit(&run);
    return st;
}

static hd_status bench(const bench_settings *b, hd_err *err) {
    hd_engine *e;
    load_run run = {0};
    load_report report = {0};
    HD_TRY(check(b, err));
    HD_TRY(open_engine(&e, b, err));
    const hd_tokenizer *text = hd_engine_tokenizer(e);
    const int32_t vocab = text ? hd_tokenizer_vocab_size(text) : hd_engine_spec(e)->vocab;
    hd_engine_stats before, after;
    hd_status st = warm_up(e, b, vocab, err);
    hd_engine_read_stats(e, &before);
    if (st == HD_OK) st = load_run_all(&run, e, &b->load, vocab, b->quiet, err);
    hd_engine_read_stats(e, &after);
    if (st == HD_OK) st = report_make(&report, &run, err);
    report_engine(&report, &before, &after);
    if (st == HD_OK && b->json) {
        report_print_json(&report, &b->load, hd_engine_backend(e, NULL), stdout);
    } else if (st == HD_OK) {
        report_print(&report, &b->load, hd_engine_backend(e, NULL), stdout);
    }
    load_run_deinit(&run);
    hd_engine_close(e);
    return st;
}

static int run_load(int argc, char **argv, const command_line *base, bench_settings *b) {
    load_options *o = &b->load;
    const option options[] = {
        option_int("num-prompts", &o->requests, 1, 10000000, "requests of the set"),
        option_int("input-len", &o->input_tokens, 1, 1 << 24, "tokens of a prompt, at most"),
        option_int("output-len", &o->output_tokens, 1, 1 << 24,
                   "most output tokens of a request"),
        option_real("range-ratio", &o->range_ratio, 0, 1,
                    "lengths are uniform between this share and the whole"),
        option_real("request-rate", &o->rate, 0, 1e6,
                    "requests per second, Poisson; 0: all at once"),
        option_int("max-concurrency", &o->concurrency, 0, 1 << 20,
                   "requests in flight; 0: no bound"),
        option_int("shared-prefix", &o->shared_prefix, 0, 1 << 24,
                   "tokens of the prompt that a group of requests shares"),
        option_int("groups", &o->groups, 1, 1 << 20, "groups of shared prefixes"),
        option_int("seed", &o->seed, 0, INT64_MAX, "of lengths, times and tokens"),
        option_temperature(&o->temperature),
        option_int("warmup", &b->warmup, 0, 10000, "requests before the clock starts"),
        option_text("dummy-weights", &b->dummy_config, "CONFIG",
                    "no checkpoint: random weights for this config.json or folder"),
        option_flag("json", &b->json, "print one JSON object"),
        with_letter(option_flag("quiet", &b->quiet, "no progress on standard error"), 'q'),
    };
    const positional model = {"MODEL_DIR", &b->engine.options.model_dir, true,
                              POSITIONAL_MODEL};
    command_line line = *base;
    line.positionals = &model;
    line.n_positionals = 1;
    line.options = options;
    line.n_options = (int)HD_LEN(options);
    int code;
    if (!engine_options_parse(&line, b->command, &b->engine, argc, argv, &code)) return code;
    o->draft_tokens = b->engine.draft_tokens;
    hd_err err = {0};
    const hd_status st = bench(b, &err);
    return st == HD_OK ? 0 : report_error(&err);
}

static int throughput(int argc, char **argv) {
    static const command_line line = {
        .command = "bench throughput",
        .summary = "Tokens per second of many requests at once, and what each of them saw."};
    bench_settings b = {
        .engine = engine_settings_default(),
        .command = ENGINE_THROUGHPUT,
        .load = {.requests = 64,
                 .input_tokens = 512,
                 .output_tokens = 128,
                 .range_ratio = 1,
                 .groups = 1},
        .warmup = 1
    };
    return run_load(argc, argv, &line, &b);
}

static int latency(int argc, char **argv) {
    static const command_line line = {.command = "bench latency",
                                      .summary =
                                          "What one user sees: requests one after the other."};
    bench_settings b = {
        .engine = engine_settings_default(),
        .command = ENGINE_LATENCY,
        .load = {.requests = 8,
                 .input_tokens = 512,
                 .output_tokens = 128,
                 .range_ratio = 1,
                 .concurrency = 1,
                 .groups = 1},
        .warmup = 1
    };
    if (bench_rank_wanted(argc, argv)) return bench_rank(argc, argv);
    return run_load(argc, argv, &line, &b);
}

const char *const bench_forms[] = {"throughput", "latency", "latency --emulate-rank",
                                   "ops",        "comm",    "serve",
                                   "update",     "train",   NULL};

int cmd_bench(int argc, char **argv) {
    static const struct {
        const char *name;
        command_fn *run;
    } kinds[] = {
        {"throughput", throughput  },
        {"latency",    latency     },
        {"ops",        bench_ops   },
        {"comm",       bench_comm  },
        {"serve",      bench_serve },
        {"update",     bench_update},
        {"train",      bench_train }
    };
    const char *const wanted = argc > 1 ? argv[1] : "";
    for (size_t i = 0; i < HD_LEN(kinds); i++) {
        if (strcmp(wanted, kinds[i].name) == 0) return kinds[i].run(argc - 1, argv + 1);
    }
    if (strcmp(wanted, "--help") == 0 || strcmp(wanted, "-h") == 0) {
        puts(
            "usage: hadal bench throughput|latency MODEL_DIR|--dummy-weights CONFIG [options]\n"
            "       hadal bench ops CONFIG [options]\n"
            "       hadal bench comm [options]\n"
            "       hadal bench serve URL [options]\n"
            "       hadal bench update MODEL_DIR [options]\n"
            "       hadal bench train MODEL_DIR [options]\n\n"
            "hadal bench KIND --help explains one; each takes --config FILE too.");
        return 0;
    }
    hd_err err = {0};
    HD_FAIL(
        &err, HD_EINVAL,
        "hadal bench needs throughput, latency, ops, comm, serve, update or train, not '%s'",
        wanted);
    return report_error(&err);
}
