/* cmd_simulate.c - `hadal simulate`: what plans of experts would bring for recorded or generated
 * traffic, and what ranks that fetch experts would. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/json.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "moe/dwdp_sim.h"
#include "moe/simulate.h"

enum { MAX_FABRIC_BYTES = 1 << 20, MAX_LIST = 16 };

static const char *const plan_names[] = {"none", "published", "hadal", "flow", NULL};
static const char *const split_names[] = {"auto", "even",  "round", "random",
                                          "flow", "local", NULL};

static const char details[] =
    "Traffic is an expert record of single passes or tokens (hadal record), or generated:\n"
    "--generate zipf:1 or lognormal:1, with further numbers behind commas: jitter and drift\n"
    "(deviation per pass of each expert's share, for that pass or for good), switch (passes\n"
    "after which all shares change), tokens, passes, layers, experts, top-k, seed. With\n"
    "--switch N the topic changes: --record has records with commas between them, of which N\n"
    "passes each are taken in turn.\n"
    "\n"
    "A plan is made from --window steps and judged on later ones. none: experts in order.\n"
    "published and flow are made anew every --every steps; hadal is repaired. --split auto is\n"
    "flow for flow, and even for the others; local: each rank splits its own rows as flow\n"
    "splits all. Time and bandwidth come from --fabric, a JSON\n"
    "object with some of layer_us, expert_us, row_us, row_bytes, link_gb_s, expert_bytes,\n"
    "move_gb_s, interference; all are printed.\n"
    "\n"
    "--dwdp compares expert parallelism with ranks that fetch what they lack of each layer, "
    "by\n"
    "some of ranks, layers, depth, slices (of each peer), compute, exchange and fetch (us of "
    "a\n"
    "layer), jitter (deviation of compute), slowdown (while copies run), seed; or nothing.";

typedef struct settings {
    const char *record, *generate, *slots, *plan, *fabric_file, *dwdp;
    int64_t ranks, nodes, window, every, batch, horizon, budget, turn;
    int split, phase;
    bool json;
    hd_traffic traffic;
    hd_traffic_spec spec;
    hd_sim_fabric fabric;
    hd_err err;
} settings;

/* ---- traffic ---- */

typedef struct number {
    const char *name;
    double *real;
    int32_t *whole;
    double most; /* 0: any */
} number;

/* Reads NAME:VALUE,NAME:VALUE. */
static hd_status read_numbers(settings *s, const char *name, const char *text,
                              const number *numbers, size_t n_numbers) {
    for (const char *at = text; *at;) {
        const size_t n = strcspn(at, ":");
        char *end = NULL;
        const double v = at[n] ? strtod(at + n + 1, &end) : 0;
        const number *to = NULL;
        for (size_t i = 0; i < n_numbers; i++) {
            if (strlen(numbers[i].name) == n && strncmp(numbers[i].name, at, n) == 0) {
                to = &numbers[i];
            }
        }
        const bool whole = to && to->whole && (v != (double)(int64_t)v || v > 1e9);
        const double most = to && to->most > 0 ? to->most : 1e15;
        if (!to || !end || end == at + n + 1 || (*end && *end != ',') ||
            !(v >= 0 && v <= most) || whole) {
            return HD_FAIL(&s->err, HD_EINVAL,
                           "--%s takes NAME:NUMBER with commas between them, not %s", name, at);
        }
        if (to->real) *to->real = v;
        if (to->whole) *to->whole = (int32_t)v;
        at = *end ? end + 1 : end;
    }
    return HD_OK;
}

static hd_status read_spec(settings *s) {
    double seed = 1;
    hd_traffic_spec *p = &s->spec;
    const number numbers[] = {
        {"zipf",      &p->zipf,      NULL,             20},
        {"lognormal", &p->lognormal, NULL,             20},
        {"jitter",    &p->jitter,    NULL,             20},
        {"drift",     &p->drift,     NULL,             20},
        {"seed",      &seed,         NULL,             0 },
        {"switch",    NULL,          &p->switch_every, 0 },
        {"tokens",    NULL,          &p->tokens,       0 },
        {"passes",    NULL,          &p->passes,       0 },
        {"layers",    NULL,          &p->layers,       0 },
        {"experts",   NULL,          &p->experts,      0 },
        {"top-k",     NULL,          &p->top_k,        0 },
    };
    HD_TRY(read_numbers(s, "generate", s->generate, numbers, HD_LEN(numbers)));
    p->seed = (uint64_t)seed;
    return hd_traffic_generate(&s->traffic, p, &s->err);
}

static hd_status read_record(settings *s, const char *file, hd_traffic *to) {
    const unsigned phases = hd_traffic_phases(s->phase);
    hd_record_head head;
    bool cut;
    FILE *in = fopen(file, "rb");
    if (!in) return HD_FAIL(&s->err, HD_EIO, "cannot read %s: %s", file, strerror(errno));
    const hd_status st = hd_traffic_read(to, &head, &cut, in, file, phases, &s->err);
    fclose(in);
    free(head.slot_expert);
    HD_TRY(st);
    if (head.mode == HD_RECORD_STAT) {
        return HD_FAIL(&s->err, HD_EINVAL,
                       "%s has no single passes: record with --expert-record per-pass", file);
    }
    return HD_OK;
}

/* Splits "a,b" into a copy's words. */
static hd_status split_list(settings *s, const char *name, char *copy, char *words[MAX_LIST],
                            int *n) {
    *n = 0;
    for (char *rest = NULL, *word = strtok_r(copy, ",", &rest); word;
         word = strtok_r(NULL, ",", &rest)) {
        if (*n == MAX_LIST) break;
        words[(*n)++] = word;
    }
    if (*n > 0 && *n < MAX_LIST) return HD_OK;
    return HD_FAIL(&s->err, HD_EINVAL, "--%s takes 1 to %d words with commas", name,
                   MAX_LIST - 1);
}

/* Records in turn. */
static hd_status read_topics(settings *s) {
    hd_traffic parts[MAX_LIST] = {{0}};
    char *files[MAX_LIST], *copy = strdup(s->record);
    int n = 0;
    hd_status st = copy ? split_list(s, "record", copy, files, &n)
                        : HD_FAIL(&s->err, HD_ENOMEM, "no memory for names");
    for (int i = 0; i < n && st == HD_OK; i++) st = read_record(s, files[i], &parts[i]);
    if (st == HD_OK) {
        st = hd_traffic_switch(&s->traffic, parts, n, (int32_t)s->turn, &s->err);
    }
    for (int i = 0; i < n; i++) hd_traffic_close(&parts[i]);
    free(copy);
    return st;
}

static hd_status read_traffic(settings *s) {
    if (s->turn && !s->record) {
        return HD_FAIL(&s->err, HD_EINVAL,
                       "--switch is for records; generated traffic has a switch of its own");
    }
    if (!s->record) return read_spec(s);
    return s->turn ? read_topics(s) : read_record(s, s->record, &s->traffic);
}

static hd_status read_fabric(settings *s) {
    hd_sim_fabric *f = &s->fabric;
    const number numbers[] = {
        {"layer_us",     &f->layer_us,     NULL, 0},
        {"expert_us",    &f->expert_us,    NULL, 0},
        {"row_us",       &f->row_us,       NULL, 0},
        {"row_bytes",    &f->row_bytes,    NULL, 0},
        {"link_gb_s",    &f->link_gb_s,    NULL, 0},
        {"expert_bytes", &f->expert_bytes, NULL, 0},
        {"move_gb_s",    &f->move_gb_s,    NULL, 0},
        {"interference", &f->interference, NULL, 0},
    };
    char *text;
    size_t n;
    json_t *all = NULL, *value;
    const char *key;
    if (!s->fabric_file) return HD_OK;
    HD_TRY(hd_file_read(&text, &n, s->fabric_file, MAX_FABRIC_BYTES, &s->err));
    hd_status st = hd_json_parse(&all, text, n, s->fabric_file, &s->err);
    free(text);
    if (st == HD_OK && !json_is_object(all)) {
        st = HD_FAIL(&s->err, HD_EINVAL, "%s is no JSON object", s->fabric_file);
    }
    json_object_foreach(all, key, value) {
        const number *to = NULL;
        for (size_t i = 0; i < HD_LEN(numbers); i++) {
            if (strcmp(numbers[i].name, key) == 0) to = &numbers[i];
        }
        const double v = json_number_value(value);
        const bool divides = to && strstr(to->name, "gb_s");
        if (!to || !json_is_number(value) || !(v >= 0 && v < 1e15) || (divides && v <= 0)) {
            st = HD_FAIL(&s->err, HD_EINVAL, "%s: %s is no number that is known",
                         s->fabric_file, key);
            break;
        }
        *to->real = v;
    }
    json_decref(all);
    return st;
}

/* ---- runs ---- */

static json_t *layer_json(const hd_sim_layer *l) {
    return json_pack("{s:f, s:f, s:f, s:f, s:f, s:I}", "balancedness", l->balancedness,
                     "lowest", l->lowest, "bound", l->bound, "sum_of_maxima", l->most,
                     "ranks_per_token", l->ranks_per_token, "moves", (json_int_t)l->moves);
}

static json_t *result_json(const hd_sim_args *a, const hd_sim_result *r) {
    json_t *steps = json_array(), *layers = json_array();
    for (int32_t i = 0; i < r->n_steps; i++) {
        json_array_append_new(steps, json_pack("{s:f, s:f, s:I}", "balancedness",
                                               r->steps[i].balancedness, "us", r->steps[i].us,
                                               "moves", (json_int_t)r->steps[i].moves));
    }
    for (int32_t l = 0; l < r->layers; l++) {
        json_array_append_new(layers, layer_json(&r->of_layers[l]));
    }
    json_t *all = layer_json(&r->total);
    json_t *more =
        json_pack("{s:s, s:s, s:i, s:i, s:i, s:i, s:f, s:f, s:f, s:f, s:f, s:f, s:o, s:o}",
                  "plan", plan_names[a->plan], "split", split_names[a->split + 1], "slots",
                  a->slots, "ranks", a->ranks, "looks", r->looks, "plans", r->plans, "step_us",
                  r->step_us, "tokens_per_s", r->tokens_per_s, "moved_bytes", r->moved_bytes,
                  "hottest_link_gb_s", r->hottest_link_gb_s, "planner_ms", r->planner_ms,
                  "split_us", r->split_us, "steps", steps, "layers", layers);
    json_object_update(all, more);
    json_decref(more);
    return all;
}

static void print_head(const settings *s, int32_t n_steps) {
    const hd_sim_fabric *f = &s->fabric;
    printf("%d steps judged, %d layers, %d experts, %lld ranks\n", n_steps, s->traffic.layers,
           s->traffic.experts, (long long)s->ranks);
    printf("assumed: layer_us %g, expert_us %g, row_us %g, row_bytes %g, link_gb_s %g,\n"
           "         expert_bytes %g, move_gb_s %g, interference %g\n\n",
           f->layer_us, f->expert_us, f->row_us, f->row_bytes, f->link_gb_s, f->expert_bytes,
           f->move_gb_s, f->interference);
    printf("slots  plan       split   balancedness  lowest  bound  ranks/token   moves  plans  "
           "step us  tokens/s\n");
}

static void print_line(const hd_sim_args *a, const hd_sim_result *r) {
    printf("%5d  %-9s  %-6s  %12.3f  %6.3f  %5.3f  %11.2f  %6lld  %5d  %7.0f  %8.0f\n",
           a->slots, plan_names[a->plan], split_names[a->split + 1], r->total.balancedness,
           r->total.lowest, r->total.bound, r->total.ranks_per_token, (long long)r->total.moves,
           r->plans, r->step_us, r->tokens_per_s);
}

static hd_status run_one(settings *s, int32_t slots, hd_sim_plan plan, json_t *to) {
    const hd_sim_split by_plan = plan == HD_SIM_FLOW ? HD_SIM_EXACT : HD_SIM_EVEN;
    const hd_sim_args a = {
        .traffic = &s->traffic,
        .slots = slots,
        .ranks = (int32_t)s->ranks,
        .nodes = (int32_t)s->nodes,
        .plan = plan,
        .split = s->split ? (hd_sim_split)(s->split - 1) : by_plan,
        .batch = (int32_t)s->batch,
        .window = (int32_t)s->window,
        .every = (int32_t)s->every,
        .horizon = (int32_t)s->horizon,
        .max_moves = s->budget < 0 ? -1
                                   : (int64_t)((double)s->budget / s->fabric.expert_bytes /
                                               s->traffic.layers),
        .seed = s->spec.seed,
        .fabric = s->fabric,
    };
    hd_sim_result r;
    HD_TRY(hd_simulate(&r, &a, &s->err));
    if (s->json) {
        json_array_append_new(to, result_json(&a, &r));
    } else {
        if (json_array_size(to) == 0) print_head(s, r.n_steps);
        json_array_append_new(to, json_null());
        print_line(&a, &r);
    }
    hd_sim_result_close(&r);
    return HD_OK;
}

/* ---- DWDP ---- */

static const char *const order_names[HD_DWDP_N_COPY_KINDS] = {"same", "staggered", "sliced",
                                                              "together"};

/* results: one of each order */
static void print_dwdp(const hd_dwdp_sim_args *a, const hd_dwdp_sim_result *results) {
    printf("assumed: %d ranks, %d layers, depth %d, compute %g us, jitter %g, slowdown %g,\n"
           "         exchange %g us, fetch %g us in %d slices of each peer\n\n",
           a->ranks, a->layers, a->depth, a->compute_us, a->jitter, a->slowdown, a->exchange_us,
           a->fetch_us, a->slices);
    puts("order         EP us   waiting   DWDP us  exposed us  copy us   EP/DWDP");
    for (int o = 0; o < HD_DWDP_N_COPY_KINDS; o++) {
        const hd_dwdp_sim_result *r = &results[o];
        printf("%-9s  %8.1f  %8.1f  %8.1f  %10.1f  %7.1f  %8.3f\n", order_names[o], r->ep_us,
               r->ep_wait_us, r->dwdp_us, r->exposed_us, r->copy_us, r->ep_us / r->dwdp_us);
    }
}

static json_t *dwdp_json(int order, const hd_dwdp_sim_result *r) {
    return json_pack("{s:s, s:f, s:f, s:f, s:f, s:f}", "order", order_names[order], "ep_us",
                     r->ep_us, "ep_wait_us", r->ep_wait_us, "dwdp_us", r->dwdp_us, "exposed_us",
                     r->exposed_us, "copy_us", r->copy_us);
}

static hd_status print_json(settings *s, const json_t *all) {
    char *text = hd_json_write(all, JSON_COMPACT | JSON_REAL_PRECISION(9));
    if (!text) return HD_FAIL(&s->err, HD_ENOMEM, "no memory to print");
    puts(text);
    free(text);
    return HD_OK;
}

static hd_status run_dwdp(settings *s) {
    hd_dwdp_sim_args a = hd_dwdp_sim_default();
    double seed = 1;
    const number numbers[] = {
        {"ranks",    NULL,           &a.ranks,  0},
        {"layers",   NULL,           &a.layers, 0},
        {"depth",    NULL,           &a.depth,  0},
        {"slices",   NULL,           &a.slices, 0},
        {"compute",  &a.compute_us,  NULL,      0},
        {"jitter",   &a.jitter,      NULL,      0},
        {"slowdown", &a.slowdown,    NULL,      0},
        {"exchange", &a.exchange_us, NULL,      0},
        {"fetch",    &a.fetch_us,    NULL,      0},
        {"seed",     &seed,          NULL,      0},
    };
    if (s->record || s->generate || s->ranks) {
        return HD_FAIL(&s->err, HD_EINVAL, "--dwdp needs no traffic and has ranks of its own");
    }
    HD_TRY(read_numbers(s, "dwdp", s->dwdp, numbers, HD_LEN(numbers)));
    a.seed = (uint64_t)seed;
    hd_dwdp_sim_result results[HD_DWDP_N_COPY_KINDS];
    for (int o = 0; o < HD_DWDP_N_COPY_KINDS; o++) {
        a.order = (hd_dwdp_order)o;
        HD_TRY(hd_dwdp_simulate(&results[o], &a, &s->err));
    }
    if (!s->json) {
        print_dwdp(&a, results);
        return HD_OK;
    }
    json_t *all = json_array();
    for (int o = 0; o < HD_DWDP_N_COPY_KINDS; o++) {
        json_array_append_new(all, dwdp_json(o, &results[o]));
    }
    const hd_status st = print_json(s, all);
    json_decref(all);
    return st;
}

/* ---- all ---- */

static hd_status run_all(settings *s, char *slots, char *plans, json_t *to) {
    char *of_slots[MAX_LIST], *of_plans[MAX_LIST];
    int n_slots, n_plans;
    HD_TRY(split_list(s, "slots", slots, of_slots, &n_slots));
    HD_TRY(split_list(s, "plan", plans, of_plans, &n_plans));
    for (int i = 0; i < n_slots * n_plans; i++) {
        char *end;
        const long n = strtol(of_slots[i / n_plans], &end, 10);
        int plan = 0;
        while (plan_names[plan] && strcmp(plan_names[plan], of_plans[i % n_plans]) != 0) plan++;
        if (*end || n < 1 || n > HD_EPLB_MAX_SLOTS) {
            return HD_FAIL(&s->err, HD_EINVAL, "--slots takes numbers up to %d, not %s",
                           HD_EPLB_MAX_SLOTS, of_slots[i / n_plans]);
        }
        if (!plan_names[plan]) {
            return HD_FAIL(&s->err, HD_EINVAL,
                           "--plan takes none, published, hadal and flow, not %s",
                           of_plans[i % n_plans]);
        }
        HD_TRY(run_one(s, (int32_t)n, (hd_sim_plan)plan, to));
    }
    return HD_OK;
}

static hd_status run(settings *s) {
    char own[32];
    if (s->dwdp) return run_dwdp(s);
    if (!s->record == !s->generate || !s->ranks) {
        return HD_FAIL(
            &s->err, HD_EINVAL,
            "hadal simulate needs --record FILE or --generate SPEC, and --ranks N; or "
            "--dwdp SPEC");
    }
    HD_TRY(read_fabric(s));
    HD_TRY(read_traffic(s));
    snprintf(own, sizeof own, "%d", s->traffic.experts);
    char *slots = strdup(s->slots ? s->slots : own), *plans = strdup(s->plan);
    json_t *all = json_array();
    hd_status st = slots && plans && all ? run_all(s, slots, plans, all)
                                         : HD_FAIL(&s->err, HD_ENOMEM, "no memory");
    if (st == HD_OK && s->json) st = print_json(s, all);
    json_decref(all);
    free(slots);
    free(plans);
    return st;
}

int cmd_simulate(int argc, char **argv) {
    settings s = {
        .plan = "none,published,hadal,flow",
        .nodes = 1,
        .window = 16,
        .batch = 1,
        .budget = -1,
        .fabric = hd_sim_default_fabric(),
        .spec = {.passes = 64, .layers = 4, .experts = 256, .top_k = 8, .tokens = 4096}
    };
    const option options[] = {
        option_text("record", &s.record, "FILE",
                    "an expert record of passes or tokens; with --switch several"),
        option_int("switch", &s.turn, 1, 1 << 20, "passes of each of the records in turn"),
        option_choice("phase", &s.phase, hd_traffic_phase_names,
                      "of the record; all: but drafts"),
        option_text("generate", &s.generate, "SPEC", "traffic: lognormal:1,jitter:0.3,..."),
        option_int("ranks", &s.ranks, 1, HD_EPLB_MAX_RANKS, "that share the experts"),
        option_text("slots", &s.slots, "LIST",
                    "slots of a layer, on all ranks; default: one per expert"),
        option_int("nodes", &s.nodes, 1, HD_EPLB_MAX_RANKS, "that share the ranks"),
        option_text("plan", &s.plan, "LIST", "default none,published,hadal,flow"),
        option_choice("split", &s.split, split_names, "of rows over copies"),
        option_int("window", &s.window, 1, 1 << 20,
                   "steps that a plan is made from; default 16"),
        option_int("every", &s.every, 0, 1 << 20, "steps between plans; 0, the default: one"),
        option_int("batch", &s.batch, 1, 1 << 20, "passes that are one step; default 1"),
        option_int("horizon", &s.horizon, 0, 1 << 30,
                   "steps in which a plan must pay; 0, the default: always taken"),
        option_int("budget", &s.budget, -1, INT64_MAX, "most bytes that a repair moves"),
        option_text("fabric", &s.fabric_file, "FILE", "times and bandwidths, JSON"),
        option_text("dwdp", &s.dwdp, "SPEC",
                    "ranks that fetch experts instead: compute:1031,fetch:429,..."),
        option_flag("json", &s.json, "print all by step and layer"),
    };
    const command_line line = {.command = "simulate",
                               .summary =
                                   "Runs plans of experts over traffic, without a model.",
                               .details = details,
                               .options = options,
                               .n_options = (int)HD_LEN(options)};
    int code;
    if (!options_parse(&line, argc, argv, &code)) return code;
    const hd_status st = run(&s);
    hd_traffic_close(&s.traffic);
    return st == HD_OK ? 0 : report_error(&s.err);
}
