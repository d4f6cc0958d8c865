/* cmd_bench.c - `hadal bench`: measures an engine under a synthetic load; bench_ops.c measures
 * operators, bench_serve.c any server. `throughput` sends all requests at once, `latency` one
 * after the other. */
#include <stdio.h>
#include <string.h>

#include "cli/bench/bench_ops.h"
#include "cli/bench/bench_rank.h"
#include "cli/bench/bench_report.h"
#include "cli/bench/bench_serve.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "cli/upload_bar.h"
#include "engine/engine.h"

typedef struct bench_settings {
    const char *model_dir, *dummy_config; /* one of them */
    load_options load;
    int64_t threads, chunk, running, kv_tokens, warmup;
    double forced_acceptance;
    int backend, precision, mla;
    bool no_invariance, no_graphs, pin, json, quiet;
} bench_settings;

static hd_status check(const bench_settings *b, hd_err *err) {
    const load_options *o = &b->load;
    if (!b->model_dir == !b->dummy_config) {
        return HD_FAIL(err, HD_EINVAL, "give either MODEL_DIR or --dummy-weights CONFIG");
    }
    if (o->shared_prefix >= o->input_tokens) {
        return HD_FAIL(err, HD_EINVAL,
                       "a shared prefix of %lld tokens leaves nothing of an input of %lld",
                       (long long)o->shared_prefix, (long long)o->input_tokens);
    }
    return HD_OK;
}

/* Returns all pages that the set may need at once, so that the cache does not limit the
 * load. */
static int64_t kv_tokens_of(const bench_settings *b) {
    const int64_t each = b->load.input_tokens + b->load.output_tokens;
    return b->kv_tokens ? b->kv_tokens : each * (b->running + 1) + b->load.shared_prefix;
}

static hd_status open_engine(hd_engine **out, const bench_settings *b, hd_err *err) {
    char why[600];
    upload_bar bar = {.quiet = b->quiet};
    const int64_t longest = b->load.input_tokens + b->load.output_tokens;
    const hd_engine_options options = {
        .size = sizeof options,
        .model_dir = b->dummy_config ? b->dummy_config : b->model_dir,
        .dummy_weights = b->dummy_config != NULL,
        .backend = option_backends[b->backend],
        .precision = option_precisions[b->precision],
        .no_batch_invariance = b->no_invariance,
        .mla = option_mla_forms[b->mla],
        .threads = (int32_t)b->threads,
        .pin_threads = b->pin,
        .max_running = (int32_t)b->running,
        .max_context = (int32_t)longest,
        .kv_tokens = kv_tokens_of(b),
        .chunk_tokens = (int32_t)b->chunk,
        .queue_limit = (int32_t)(b->load.requests + 1),
        .forced_acceptance = (float)b->forced_acceptance,
        .no_graphs = b->no_graphs,
        .on_upload = upload_bar_draw,
        .on_upload_ctx = &bar,
    };
    const int st = hd_engine_open(out, &options, why, sizeof why);
    return st == 0 ? HD_OK : HD_FAIL(err, (hd_status)st, "%s", why);
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
        option_int("output-len", &o->output_tokens, 1, 1 << 24, "tokens of an answer, at most"),
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
        option_real("temperature", &o->temperature, 0, 100, "0: greedy"),
        option_int("draft-tokens", &o->draft_tokens, HD_DRAFTS_AUTO, HD_MOST_DRAFTS,
                   "drafts per step by the MTP layer; -1, the default: as many as pay"),
        option_real("forced-acceptance", &b->forced_acceptance, 0, HD_MOST_DRAFTS,
                    "accept this many drafts per step on average; 0: what the model says"),
        option_int("warmup", &b->warmup, 0, 10000, "requests before the clock starts"),
        option_int("max-running", &b->running, 1, 4096, "requests computed side by side"),
        option_int("kv-tokens", &b->kv_tokens, 0, INT64_MAX,
                   "tokens the KV pools hold; 0: enough"),
        option_int("chunk", &b->chunk, 0, 1 << 20,
                   "prompt tokens of a request per step; 0: 256"),
        option_int("threads", &b->threads, 0, 1024, "0: one per core"),
        option_flag("pin", &b->pin, "bind every thread to a core"),
        option_text("dummy-weights", &b->dummy_config, "CONFIG",
                    "no checkpoint: random weights for this config.json or folder"),
        option_backend(&b->backend),
        option_precision(&b->precision),
        option_no_invariance(&b->no_invariance),
        option_mla(&b->mla),
        option_flag("no-graphs", &b->no_graphs, "queue every operator on its own on a GPU"),
        option_flag("json", &b->json, "print one JSON object"),
        with_letter(option_flag("quiet", &b->quiet, "no progress on standard error"), 'q'),
    };
    const positional model = {"MODEL_DIR", &b->model_dir, true, POSITIONAL_MODEL};
    command_line line = *base;
    line.positionals = &model;
    line.n_positionals = 1;
    line.options = options;
    line.n_options = (int)HD_LEN(options);
    int code;
    if (!options_parse(&line, argc, argv, &code)) return code;
    hd_err err = {0};
    const hd_status st = bench(b, &err);
    return st == HD_OK ? 0 : report_error(&err);
}

static int throughput(int argc, char **argv) {
    static const command_line line = {
        .command = "bench throughput",
        .summary = "Tokens per second of many requests at once, and what each of them saw."};
    bench_settings b = {
        .load = {.requests = 64,
                 .input_tokens = 512,
                 .output_tokens = 128,
                 .range_ratio = 1,
                 .groups = 1,
                 .draft_tokens = HD_DRAFTS_AUTO},
        .running = 16,
        .warmup = 1
    };
    return run_load(argc, argv, &line, &b);
}

static int latency(int argc, char **argv) {
    static const command_line line = {.command = "bench latency",
                                      .summary =
                                          "What one user sees: requests one after the other."};
    bench_settings b = {
        .load = {.requests = 8,
                 .input_tokens = 512,
                 .output_tokens = 128,
                 .range_ratio = 1,
                 .concurrency = 1,
                 .groups = 1,
                 .draft_tokens = HD_DRAFTS_AUTO},
        .running = 1,
        .warmup = 1
    };
    if (bench_rank_wanted(argc, argv)) return bench_rank(argc, argv);
    return run_load(argc, argv, &line, &b);
}

const char *const bench_forms[] = {"throughput", "latency", "latency --emulate-rank",
                                   "ops",        "serve",   NULL};

int cmd_bench(int argc, char **argv) {
    static const struct {
        const char *name;
        command_fn *run;
    } kinds[] = {
        {"throughput", throughput },
        {"latency",    latency    },
        {"ops",        bench_ops  },
        {"serve",      bench_serve}
    };
    const char *const wanted = argc > 1 ? argv[1] : "";
    for (size_t i = 0; i < HD_LEN(kinds); i++) {
        if (strcmp(wanted, kinds[i].name) == 0) return kinds[i].run(argc - 1, argv + 1);
    }
    if (strcmp(wanted, "--help") == 0 || strcmp(wanted, "-h") == 0) {
        puts(
            "usage: hadal bench throughput|latency MODEL_DIR|--dummy-weights CONFIG [options]\n"
            "       hadal bench ops CONFIG [options]\n"
            "       hadal bench serve URL [options]\n\n"
            "hadal bench KIND --help explains one; each takes --config FILE too.");
        return 0;
    }
    hd_err err = {0};
    HD_FAIL(&err, HD_EINVAL, "hadal bench needs throughput, latency, ops or serve, not '%s'",
            wanted);
    return report_error(&err);
}
