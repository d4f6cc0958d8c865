/* cmd_plan.c - `hadal plan`: predicts what a number of GPUs can serve, by layout. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "cli/planning/plan_internal.h"
#include "kv/resident.h"

enum { MAX_GPUS = 1024, MAX_TOKENS = 1 << 22 };
enum { USERS = 16, PROMPT = 4096, OUTPUT = 1024, CHUNK = 2048 };

const char *const plan_dispatch_types[] = {"float32", "fp8", NULL};

static const char default_gpu[] = "h200", default_layout[] = "auto";

static const char details[] =
    "CONFIG is a model's directory or its config.json; no weights are read. Everything that "
    "is\n"
    "printed is predicted: bytes by the plans with which hadal opens a rank, times by the "
    "bytes\n"
    "and operations of its own steps and the table of GPUs in docs/plan.md.\n"
    "\n"
    "--gpu FILE.json has numbers of another GPU, and \"like\" a known one for the others.\n"
    "--layout tp=2,dp=4,ep=8 predicts one layout; auto all that serve knows, and marks those "
    "that\n"
    "no other exceeds both in tokens/s of a user and of all GPUs. --balancedness is what "
    "hadal\n"
    "simulate or record says of your traffic.\n"
    "\n"
    "--prefill N --decode N plans two pools: prompts are computed on N GPUs, their KV pages "
    "travel,\n"
    "and answers are decoded on the other N. Each pool is divided into equal servers of all "
    "layouts.";

int32_t plan_cp(const hd_parallel_config *l) {
    return hd_max_i32(1, l->cp);
}

const char *plan_layout_text(const hd_capacity *c, char out[64]) {
    const hd_parallel_config *l = &c->parallel;
    if (c->dwdp > 1) {
        snprintf(out, 64, "dwdp=%d", c->dwdp);
        return out;
    }
    const int32_t cp = plan_cp(l);
    int n = snprintf(out, 64, "tp=%d,", l->tp / cp);
    if (cp > 1) n += snprintf(out + n, 64 - (size_t)n, "cp=%d,", cp);
    n += snprintf(out + n, 64 - (size_t)n, "dp=%d,ep=%d", l->dp, l->ep);
    if (l->redundant) snprintf(out + n, 64 - (size_t)n, ",redundant=%d", l->redundant);
    return out;
}

double plan_price(const plan_settings *s, const hd_capacity *c) {
    return s->price * (double)s->gpus / 3600 / c->output_tokens_s * 1e6;
}

/* ---- layouts ---- */

enum { TP, CP, DP, EP, DWDP, N_SIZES };

static hd_status parse_layout(int32_t sizes[N_SIZES], const char *text, hd_err *err) {
    static const char *const names[N_SIZES] = {"tp=", "cp=", "dp=", "ep=", "dwdp="};
    for (const char *at = text; *at;) {
        size_t i = 0;
        while (i < HD_LEN(names) && strncmp(at, names[i], strlen(names[i])) != 0) i++;
        char *end = NULL;
        const long n = i < HD_LEN(names) ? strtol(at + strlen(names[i]), &end, 10) : 0;
        if (n < 1 || n > MAX_GPUS || (*end && *end != ',')) {
            return HD_FAIL(
                err, HD_EINVAL,
                "--layout '%s': neither auto nor tp=N, cp=N, dp=N and ep=N with commas, nor "
                "dwdp=N",
                text);
        }
        sizes[i] = (int32_t)n;
        at = *end ? end + 1 : end;
    }
    return HD_OK;
}

static hd_status one_layout(plan_settings *s, hd_parallel_config *out, hd_err *err) {
    int32_t sizes[N_SIZES] = {1, 1, 1, 1, 1};
    HD_TRY(parse_layout(sizes, s->layout, err));
    const int32_t tp = sizes[TP], cp = sizes[CP], dp = sizes[DP], ep = sizes[EP];
    const int64_t all = (int64_t)tp * cp * dp;
    s->args.dwdp = sizes[DWDP];
    if (s->dispatch_type == PLAN_ROWS_AS_FP8 && ep == 1) {
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "--dispatch-dtype fp8 needs ep above 1: no rows travel to experts");
    }
    if (sizes[DWDP] > 1 && all * ep == 1 && sizes[DWDP] == s->gpus) {
        *out = hd_parallel_single();
        return HD_OK;
    }
    if (sizes[DWDP] > 1) {
        return HD_FAIL(err, HD_EINVAL, "--layout %s: dwdp is alone, and as many as --gpus",
                       s->layout);
    }
    const int64_t most = all > ep ? all : ep, least = all > ep ? ep : all;
    if (most != s->gpus || most % least || most % dp) {
        return HD_FAIL(
            err, HD_EINVAL,
            "--layout %s is not for %lld GPUs: tp x cp x dp or ep is their number, and "
            "the other divides it",
            s->layout, (long long)s->gpus);
    }
    const hd_kv_shape shape = hd_kv_shape_of(s->spec);
    if (cp > 1 && hd_kv_longest_tail(&shape)) {
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "cp is not for %s, whose layers drop rows of prompts",
                       hd_family_name(s->spec->family));
    }
    *out = hd_parallel_context(tp, cp, dp, ep, s->spec);
    return HD_OK;
}

/* A server on a CPU takes all types. */
static bool plans_gpus(const plan_settings *s) {
    return !s->gpu.cpu;
}

/* Spare slots on top of those that make the number of slots even; rows that travel, if any do, in the type that is
 * asked for. */
hd_status plan_complete_layout(const plan_settings *s, hd_parallel_config *l, hd_err *err) {
    const int64_t slots = s->spec->route.n_experts + s->redundant;
    if (plans_gpus(s)) {
        const int32_t heads = hd_shard_of(l, 0, s->spec).n_heads;
        HD_TRY(hd_kv_check_heads(s->spec, heads, s->args.kv_type, err));
    }
    l->sum_in_ranks = s->sum_in_ranks;
    if (s->sum_in_ranks && l->ep > 1) l->dense_tp = 1; /* as serve does */
    l->fp8_rows = s->dispatch_type == PLAN_ROWS_AS_FP8 && l->ep > 1;
    if (!s->redundant) return HD_OK;
    if (l->ep == 1 || slots % l->ep || slots / l->ep > s->spec->route.n_experts) {
        return HD_FAIL(err, HD_EINVAL, "--redundant %lld: %lld slots do not divide by ep %d",
                       (long long)s->redundant, (long long)slots, l->ep);
    }
    l->redundant = (int32_t)s->redundant;
    return HD_OK;
}

/* Layouts that cannot be are left out, unless there is only one. */
static hd_status predict_all(const plan_settings *s, plan_result *r,
                             hd_parallel_config *layouts, int32_t n, hd_err *err) {
    for (int32_t i = 0; i < n; i++) {
        r->refused = (hd_err){0};
        hd_status st = plan_complete_layout(s, &layouts[i], &r->refused);
        if (st == HD_OK) {
            st = hd_capacity_predict(&r->all[r->n], &s->args, &layouts[i], &r->refused);
        }
        r->n += st == HD_OK;
        r->n_refused += st != HD_OK;
        if (st != HD_OK && st != HD_EUNSUPPORTED && st != HD_EINVAL) break;
    }
    if (r->n > 0) return HD_OK;
    *err = r->refused;
    return err->status;
}

static void choose_first(plan_result *r) {
    r->n_best = hd_capacity_front(r->all, r->n, r->best);
    for (int32_t i = 0; i < r->n; i++) {
        const bool better = r->all[i].output_tokens_s > r->all[r->first].output_tokens_s;
        if (r->n_best ? r->best[i] && (!r->best[r->first] || better) : better) r->first = i;
    }
}

/* ---- the command ---- */

static hd_status print(const plan_settings *s, plan_result *r, hd_err *err) {
    choose_first(r);
    if (s->chart) HD_TRY(plan_write_chart(s, r, err));
    if (s->json) return plan_print_json(s, r, err);
    plan_print_text(s, r);
    return HD_OK;
}

static hd_status check_pools(const plan_settings *s, hd_err *err) {
    if (!s->prefill || !s->decode) {
        return HD_FAIL(err, HD_EINVAL, "--prefill N and --decode N belong together");
    }
    if (s->gpus != 1 && s->gpus != s->prefill + s->decode) {
        return HD_FAIL(err, HD_EINVAL, "--gpus %lld is not --prefill %lld and --decode %lld",
                       (long long)s->gpus, (long long)s->prefill, (long long)s->decode);
    }
    if (strcmp(s->layout, "auto") == 0 && !s->chart) return HD_OK;
    return HD_FAIL(err, HD_EINVAL, "--layout and --chart are for one pool of GPUs");
}

static hd_status set_kv_type(plan_settings *s, hd_err *err) {
    HD_TRY(hd_kv_type_of(&s->args.kv_type, hd_kv_type_names[s->kv_type], err));
    HD_TRY(hd_kv_check_type(s->spec, s->args.kv_type, err));
    if (!plans_gpus(s) || hd_cuda_has_kv_type(s->args.precision, s->args.kv_type)) return HD_OK;
    return HD_FAIL(err, HD_EUNSUPPORTED,
                   "--kv-cache-dtype %s: with this precision a GPU caches %s",
                   hd_kv_type_names[s->kv_type], hd_cuda_kv_types(s->args.precision));
}

static hd_status run(plan_settings *s, plan_result *r, hd_err *err) {
    hd_parallel_config layouts[PLAN_MAX_LAYOUTS];
    int32_t n = 1;
    HD_TRY(hd_gpu_find(&s->gpu, s->gpu_name, err));
    HD_TRY(hd_model_spec_open(&s->spec, s->config, err));
    s->args.hisparse_auto = s->hisparse && strcmp(s->hisparse, "auto") == 0;
    if (!s->args.hisparse_auto)
        HD_TRY(hd_kv_resident_rows(&s->args.hisparse, s->hisparse, s->spec, err));
    HD_TRY(plan_check_training(s, err));
    if (s->training.train) return plan_training(s, err);
    s->args.spec = s->spec;
    s->args.gpu = &s->gpu;
    s->args.precision = (hd_precision)s->precision;
    if (s->precision == HD_AUTO) s->args.precision = plans_gpus(s) ? HD_OFFICIAL : HD_EXACT;
    HD_TRY(set_kv_type(s, err));
    if (s->prefill || s->decode) {
        HD_TRY(check_pools(s, err));
        s->gpus = s->prefill + s->decode;
        return plan_pools(s, err);
    }
    if (strcmp(s->layout, "auto") == 0) {
        n = hd_capacity_layouts(layouts, PLAN_MAX_LAYOUTS, (int32_t)s->gpus, s->spec);
        if (n > PLAN_MAX_LAYOUTS) n = PLAN_MAX_LAYOUTS;
    } else {
        HD_TRY(one_layout(s, layouts, err));
    }
    HD_TRY(predict_all(s, r, layouts, n, err));
    return print(s, r, err);
}

bool plan_serves(const plan_settings *s) {
    const hd_load *l = &s->args.load;
    const bool machine =
        s->gpus != 1 || s->gpu_name != default_gpu || s->prefill || s->decode ||
        s->layout != default_layout || s->redundant || s->sum_in_ranks ||
        s->precision != HD_AUTO || s->kv_type || s->dispatch_type || s->hisparse ||
        s->args.experts != HD_EXPERTS_HELD || s->args.host_bytes > 0 || s->args.host_rate > 0;
    const bool load = l->users != USERS || l->prompt != PROMPT || l->output != OUTPUT ||
                      l->chunk != CHUNK || l->drafts || l->accepted > 0 || l->overlap ||
                      l->balancedness < 1;
    return machine || load || s->price > 0 || s->explain || s->chart;
}

int cmd_plan(int argc, char **argv) {
    static const char *const places[] = {"device", "host", "disk", NULL};
    int64_t users = USERS, prompt = PROMPT, output = OUTPUT, chunk = CHUNK, drafts = 0;
    double balancedness = 1, accepted = 0, host_gb = 0, host_rate = 0;
    int experts = HD_EXPERTS_HELD;
    plan_settings s = {.config = "",
                       .gpu_name = default_gpu,
                       .layout = default_layout,
                       .gpus = 1,
                       .precision = HD_AUTO,
                       .training = {.keep_gib = -1}};
    const positional where[] = {
        {.name = "CONFIG", .value = &s.config, .kind = POSITIONAL_CONFIG}
    };
    const option options[] = {
        option_int("gpus", &s.gpus, 1, MAX_GPUS, "how many; default 1"),
        option_text("gpu", &s.gpu_name, "NAME",
                    "h100, h200 (default), b200, cpu, or a FILE.json"),
        option_choice("experts", &experts, places,
                      "where routed experts lie that have no room on the device"),
        option_real("host-memory", &host_gb, 0, 1e6, "GB for them; default: enough"),
        option_real("host-rate", &host_rate, 0, 1e6,
                    "GB/s of experts that the host computes in steps of decode, as serve's "
                    "--experts-host-compute auto; default 0"),
        option_int("prefill", &s.prefill, 1, MAX_GPUS, "GPUs that compute prompts only"),
        option_int("decode", &s.decode, 1, MAX_GPUS, "GPUs that compute answers only"),
        option_text("layout", &s.layout, "LIST",
                    "tp=N,cp=N,dp=N,ep=N or dwdp=N; default: auto"),
        option_int("redundant", &s.redundant, 0, 4096, "spare slots of experts"),
        option_int("users", &users, 1, 1 << 20, "requests at a time; default 16"),
        option_int("prompt", &prompt, 1, MAX_TOKENS, "tokens of a prompt; default 4096"),
        option_int("output", &output, 1, MAX_TOKENS, "tokens of an answer; default 1024"),
        option_int("chunk", &chunk, 1, 1 << 17, "rows of a prefill step; default 2048"),
        option_text("hisparse", &s.hisparse, "auto|ROWS", "as serve's --hisparse"),
        option_int("drafts", &drafts, 0, HD_MAX_DRAFTS, "drafts of a sequence and step"),
        option_real("accepted", &accepted, 0, HD_MAX_DRAFTS, "of these, the mean of a step"),
        option_real("balancedness", &balancedness, 0.01, 1,
                    "of experts over ranks, mean / busiest; default 1"),
        option_flag("overlap", &s.args.load.overlap,
                    "two micro-batches hide exchanges behind kernels"),
        option_flag("sum-in-ranks", &s.sum_in_ranks, "as serve's --sum-in-ranks"),
        option_choice("precision", &s.precision, hd_precision_names, "as serve's --precision"),
        option_choice("kv-cache-dtype", &s.kv_type, hd_kv_type_names,
                      "as serve's --kv-cache-dtype"),
        option_choice("dispatch-dtype", &s.dispatch_type, plan_dispatch_types,
                      "as serve's --dispatch-dtype"),
        option_real("price", &s.price, 0, 1e6, "of a GPU and hour, for that of tokens"),
        option_flag("explain", &s.explain, "print where the best layout's bytes and time go"),
        option_text("chart", &s.chart, "FILE", "write the layouts as SVG in an HTML page"),
        option_flag("json", &s.json, "print all as JSON"),
    };
    static option_list list; /* too large for a frame */
    list.n = 0;
    option_list_add(&list, options, HD_LEN(options));
    plan_train_options(&list, &s.training);
    const command_line line = {.command = "plan",
                               .summary = "Predicts what a number of GPUs can serve.",
                               .details = details,
                               .positionals = where,
                               .n_positionals = (int)HD_LEN(where),
                               .options = list.all,
                               .n_options = list.n};
    int code;
    if (!options_parse(&line, argc, argv, &code)) return code;
    s.args.experts = (hd_experts_at)experts;
    s.args.host_bytes = host_gb * 1e9;
    s.args.host_rate = host_rate * 1e9;
    s.args.load.users = (int32_t)users;
    s.args.load.prompt = (int32_t)prompt;
    s.args.load.output = (int32_t)output;
    s.args.load.chunk = (int32_t)chunk;
    s.args.load.drafts = (int32_t)drafts;
    s.args.load.accepted = accepted;
    s.args.load.balancedness = balancedness;
    hd_err err = {0};
    plan_result *r = calloc(1, sizeof *r);
    const hd_status st =
        r ? run(&s, r, &err) : HD_FAIL(&err, HD_ENOMEM, "no memory for a plan");
    for (int32_t i = 0; r && i < r->n; i++) hd_capacity_close(&r->all[i]);
    free(r);
    hd_model_spec_close(s.spec);
    return st == HD_OK ? 0 : report_error(&err);
}
