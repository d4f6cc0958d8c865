/* capacity.c - predictions of a layout under a load, the layouts to compare, and the best ones. */
#include "capacity/capacity.h"

#include <math.h>
#include <stdlib.h>

#include "base/checked.h"

enum {
    TRACED_CHUNKS = 16, /* of a prompt; more are taken to lie on lines between them */
    LONGEST_HIDDEN = 1 << 16
};

/* Activations are priced in the published width, whatever the backend stores, as in the profiler of
 * operators; their memory is that of the backend. */
static const hd_dtype priced_act_type = HD_BF16, stored_act_type = HD_F32;

/* ---- a load on one attention group ---- */

static int32_t group_users(const hd_load *l, const hd_capacity *c) {
    return (int32_t)hd_ceil_div(l->users, c->parallel.dp * c->dwdp);
}

/* Prompts that are shorter than a chunk share it. */
static hd_step_shape prefill_shape(const hd_load *l, int32_t users) {
    const int32_t rows = hd_min_i32(l->prompt, l->chunk);
    return (hd_step_shape){.seqs = hd_max_i32(1, hd_min_i32(users, l->chunk / l->prompt)),
                           .rows = rows,
                           .start = (l->prompt - rows) / 2,
                           .logits = 1};
}

static hd_step_shape decode_shape(const hd_load *l, int32_t users) {
    return (hd_step_shape){.seqs = users,
                           .rows = 1 + l->drafts,
                           .start = l->prompt + l->output / 2,
                           .logits = 1 + l->drafts,
                           .drafts = l->drafts};
}

static hd_engine_sizes sizes_of(const hd_capacity_args *a, int32_t users) {
    const hd_load *l = &a->load;
    const int32_t context = l->prompt + l->output;
    hd_engine_options o = {.max_running = users,
                           .max_context = context,
                           .kv_tokens = (int64_t)users * context,
                           .chunk_tokens = l->chunk};
    hd_engine_sizes z = hd_engine_sizes_of(a->spec, l->drafts > 0, &o);
    z.resident = a->hisparse;
    return z;
}

static hd_status check_load(const hd_capacity_args *a, hd_err *err) {
    const hd_load *l = &a->load;
    const int64_t context = (int64_t)l->prompt + l->output;
    if (l->users < 1 || l->prompt < 1 || l->output < 1 || l->chunk < 1) {
        return HD_FAIL(err, HD_EINVAL,
                       "%d users, %d and %d tokens, chunks of %d: at least 1 of each", l->users,
                       l->prompt, l->output, l->chunk);
    }
    if (context > a->spec->max_positions) {
        return HD_FAIL(err, HD_EINVAL,
                       "%lld tokens of a request; this model knows %d positions",
                       (long long)context, a->spec->max_positions);
    }
    if (l->drafts && a->spec->drafter == HD_DRAFTER_NONE) {
        return HD_FAIL(err, HD_EINVAL, "%d drafts: this model has no drafter", l->drafts);
    }
    if (!(l->accepted >= 0 && l->accepted <= l->drafts)) {
        return HD_FAIL(err, HD_EINVAL, "%g drafts accepted of %d", l->accepted, l->drafts);
    }
    if (l->balancedness > 0 && l->balancedness <= 1) return HD_OK;
    return HD_FAIL(err, HD_EINVAL, "balancedness is %g; it is above 0 and at most 1",
                   l->balancedness);
}

static int32_t moe_layers(const hd_model_spec *spec) {
    int32_t n = 0;
    for (int32_t l = 0; l < spec->n_layers; l++) n += spec->layers[l].mlp != HD_MLP_DENSE;
    return n;
}

static int32_t longest_hidden(const hd_capacity_args *a) {
    return hd_min_i32(LONGEST_HIDDEN, a->spec->max_positions);
}

/* ---- times ---- */

double hd_capacity_step_seconds(const hd_step_cost *step, bool overlap) {
    const double own =
        overlap ? fmax(step->kernel_s, step->exchange_s) : step->kernel_s + step->exchange_s;
    return step->fetches_first ? own + step->fetch_s : fmax(own, step->fetch_s);
}

double hd_capacity_dense_tp(double weight_bytes, double hidden_bytes) {
    return sqrt(weight_bytes / hidden_bytes);
}

/* Steps with so many choices for each expert stream the layers of a host (model/expert_sets.c). */
enum { CHOICES_OF_STREAM = 4 };

/* The part of the missing experts that the host computes while the others are copied: both end together. */
static double part_on_host(const hd_capacity_args *a) {
    const double link = a->gpu->host_gb_s * 1e9;
    return a->experts == HD_EXPERTS_ON_HOST ? a->host_rate / (a->host_rate + link) : 0;
}

/* Ranks copy all that a layer lacks, ahead. From the host and from disk come those that rows chose, and a GPU
 * waits for the host's behind the router, but where nearly all are chosen. */
static void add_fetches(const hd_capacity *c, const hd_capacity_args *a, const hd_step_shape *z,
                        hd_step_cost *cost) {
    const double layers = moe_layers(a->spec), n = a->spec->route.n_experts;
    const double choices = (double)z->seqs * z->rows * a->spec->route.top_k;
    const bool near = c->dwdp <= a->gpu->node;
    const double bytes = c->elsewhere_bytes;
    cost->fetch_s = cost->fetch_bytes = 0;
    if (c->dwdp > 1) {
        cost->fetch_bytes = bytes;
        cost->fetch_s =
            hd_gpu_exchange_seconds(a->gpu, layers, near ? bytes : 0, near ? 0 : bytes);
    } else if (a->experts != HD_EXPERTS_HELD) {
        const bool host = a->experts == HD_EXPERTS_ON_HOST;
        const double rate = host ? a->gpu->host_gb_s : a->gpu->disk_gb_s;
        cost->fetches_first = host && choices < CHOICES_OF_STREAM * n;
        const double copied = cost->fetches_first ? 1 - part_on_host(a) : 1;
        cost->fetch_bytes = bytes * (1 - pow(1 - 1 / n, choices)) * copied;
        cost->fetch_s = cost->fetch_bytes / (rate * 1e9);
    }
}

static hd_status cost_of(hd_step_cost *out, const hd_capacity *c, const hd_capacity_args *a,
                         hd_traced_rank *r, const hd_step_shape *z, hd_err *err) {
    HD_TRY(hd_traced_rank_step(r, z, out, err));
    add_fetches(c, a, z, out);
    return HD_OK;
}

/* Seconds of one prompt alone: its chunks one after the other. */
static hd_status time_prompt(hd_capacity *c, const hd_capacity_args *a, hd_traced_rank *r,
                             hd_err *err) {
    const hd_load *l = &a->load;
    hd_step_cost *scratch = c->prefill;
    const int32_t chunks = (int32_t)hd_ceil_div(l->prompt, l->chunk);
    const int32_t traced = hd_min_i32(chunks, TRACED_CHUNKS);
    c->ttft_s = 0;
    for (int32_t i = 0; i < traced; i++) {
        const int32_t at = (int32_t)((int64_t)i * chunks / traced) * l->chunk;
        const hd_step_shape z = {
            .seqs = 1, .rows = hd_min_i32(l->chunk, l->prompt - at), .start = at, .logits = 1};
        HD_TRY(cost_of(scratch, c, a, r, &z, err));
        c->ttft_s += hd_capacity_step_seconds(scratch, l->overlap) * chunks / traced;
    }
    return HD_OK;
}

/* A group's users wait for each other's prefill: in the time of one request of each, the group does
 * all their prefill and the decode steps of one. */
static void add_up(hd_capacity *c, const hd_load *l, int32_t users) {
    const double each = 1 + l->accepted, steps = l->output / each;
    const double cycle = users * c->prefill_s + steps * c->step_s;
    c->user_tokens_s = each / c->step_s;
    c->output_tokens_s = (double)l->users * l->output / cycle;
    c->input_tokens_s = (double)l->users * l->prompt / cycle;
}

/* Of prompts of up to `most` tokens, as one step each: the shortest whose kernels hide the copies. */
static hd_status find_hidden_rows(hd_capacity *c, const hd_capacity_args *a, hd_traced_rank *r,
                                  int32_t most, hd_err *err) {
    int32_t less = 0, more = most + 1; /* `more` hides them, or is no number of rows */
    while (more - less > 1) {
        const int32_t rows = less + (more - less) / 2;
        const hd_step_shape z = {.seqs = 1, .rows = rows, .logits = 1};
        HD_TRY(cost_of(c->prefill, c, a, r, &z, err));
        if (c->prefill->kernel_s >= c->prefill->fetch_s) {
            more = rows;
        } else {
            less = rows;
        }
    }
    c->hidden_rows = more <= most ? more : 0;
    return HD_OK;
}

static double miss_seconds(const hd_capacity *c, const hd_capacity_args *a, int32_t users) {
    const double rows = (double)users * (1 + a->load.drafts);
    const int32_t n_layers = a->spec->n_layers + a->spec->n_mtp;
    return hd_hisparse_miss_bytes(a->spec, n_layers, hd_capacity_kv_type(a), c->sizes.resident,
                                  c->sizes.context, rows) /
           (a->gpu->host_gb_s * 1e9);
}

/* Seconds of a decode step of the requests that fit without HiSparse; 0: nothing is compared. */
static hd_status time_fitting(double *seconds, hd_capacity *c, const hd_capacity_args *a,
                              hd_traced_rank *r, hd_err *err) {
    *seconds = 0;
    if (!a->hisparse_auto || c->sizes.resident == 0 || c->hisparse.fitting < 1) return HD_OK;
    const hd_step_shape z = decode_shape(&a->load, (int32_t)c->hisparse.fitting);
    hd_step_cost *scratch = c->prefill;
    HD_TRY(cost_of(scratch, c, a, r, &z, err));
    *seconds = hd_capacity_step_seconds(scratch, a->load.overlap);
    return HD_OK;
}

/* The time of entries that a step of decode fetches, and whether "auto" has them in host memory. */
static void add_misses(hd_capacity *c, const hd_capacity_args *a, int32_t users,
                       double fitting_s) {
    if (c->sizes.resident == 0) return;
    hd_hisparse_decide(&c->hisparse, c->step_s, fitting_s, miss_seconds(c, a, users));
    c->hisparse.on = c->hisparse.on || !a->hisparse_auto;
    if (c->hisparse.on) c->step_s += c->hisparse.miss_s;
}

static hd_status time_steps(hd_capacity *c, const hd_capacity_args *a, hd_traced_rank *r,
                            int32_t users, hd_err *err) {
    const hd_load *l = &a->load;
    const hd_step_shape prefill = prefill_shape(l, users), decode = decode_shape(l, users);
    double fitting_s;
    HD_TRY(time_fitting(&fitting_s, c, a, r, err));
    if (c->dwdp > 1) HD_TRY(find_hidden_rows(c, a, r, longest_hidden(a), err));
    HD_TRY(time_prompt(c, a, r, err));
    HD_TRY(cost_of(c->prefill, c, a, r, &prefill, err));
    HD_TRY(cost_of(c->decode, c, a, r, &decode, err));
    c->on_host = c->decode->fetches_first ? part_on_host(a) : 0;
    c->step_s = hd_capacity_step_seconds(c->decode, l->overlap);
    c->prefill_s = l->prompt > l->chunk
                       ? c->ttft_s
                       : hd_capacity_step_seconds(c->prefill, l->overlap) / prefill.seqs;
    add_misses(c, a, users, fitting_s);
    add_up(c, l, users);
    return HD_OK;
}

static hd_status trace(hd_capacity *c, const hd_capacity_args *a, hd_dtype kv_type,
                       int32_t users, hd_err *err) {
    const hd_load *l = &a->load;
    const int32_t block = l->drafts ? a->spec->dspark.block : 0;
    const int32_t decode_rows = users * hd_max_i32(1 + l->drafts, block);
    const int32_t hidden = c->dwdp > 1 ? longest_hidden(a) : 0;
    const int32_t load_rows = hd_max_i32(hd_min_i32(l->chunk, l->prompt * users), decode_rows);
    const hd_traced_rank_options o = {
        .spec = a->spec,
        .parallel = &c->parallel,
        .rank = c->parallel.tp - 1, /* the last one of its group owns most rows */
        .gpu = a->gpu,
        .act_type = priced_act_type,
        .kv_type = kv_type,
        .rows = hd_max_i32(load_rows, hidden),
        .seqs = users,
        .positions = hd_max_i32(l->prompt + l->output, hidden) + HD_MAX_DRAFTS + block,
        .balancedness = l->balancedness};
    hd_traced_rank *r;
    c->prefill = malloc(sizeof *c->prefill);
    c->decode = malloc(sizeof *c->decode);
    if (!c->prefill || !c->decode) return HD_FAIL(err, HD_ENOMEM, "no memory to trace steps");
    HD_TRY(hd_traced_rank_open(&r, &o, err));
    const hd_status st = time_steps(c, a, r, users, err);
    hd_traced_rank_close(r);
    return st;
}

/* ---- experts that are elsewhere ---- */

/* The part of the experts that stays on the rank: 1 / ranks of a group; all if they have room; or as many as
 * `auto` of serve's options leaves there. */
static double resident_part(const hd_capacity *c, const hd_capacity_args *a, double all) {
    const double memory = (a->gpu->memory_gb - a->gpu->reserved_gb) * 1e9;
    const double others = (double)hd_rank_memory_total(&c->memory) - all;
    const double beside = others - (double)c->memory.activations;
    const double room = fmin(memory - others, HD_EXPERTS_PART * (memory - beside));
    if (c->dwdp > 1) return 1.0 / c->dwdp;
    return memory - others >= all ? 1 : fmax(0, room / all);
}

static hd_status divide_experts(hd_capacity *c, const hd_capacity_args *a, hd_err *err) {
    const int32_t main = moe_layers(a->spec), layers = main + a->spec->n_mtp;
    int64_t *experts = &c->memory.weights[HD_PARAM_GROUP_EXPERTS];
    const double all = (double)*experts; /* MTP layers have some */
    c->resident = 1;
    if (c->dwdp == 1 && a->experts == HD_EXPERTS_HELD) return HD_OK;
    if (hd_parallel_world(&c->parallel) > 1 || main == 0) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "%s",
                       c->dwdp > 1 ? "dwdp divides the experts of ranks without a layout"
                                   : "experts are elsewhere for a layout of one rank");
    }
    c->resident = resident_part(c, a, all);
    const double others = 1 - c->resident;
    if (a->experts == HD_EXPERTS_ON_HOST && a->host_bytes > 0 && a->host_bytes < all * others) {
        return HD_FAIL(
            err, HD_EUNSUPPORTED,
            "%.1f GB of host memory do not hold the experts that have no room on the "
            "device: they take %.1f of %.1f",
            a->host_bytes / 1e9, all * others / 1e9, all / 1e9);
    }
    *experts -= (int64_t)ceil(all * others); /* it must fit */
    if (c->dwdp > 1) c->memory.staged = (int64_t)(2 * all / layers * others);
    c->elsewhere_bytes = all * main / layers * others;
    return HD_OK;
}

/* Memory with c->sizes. */
static hd_status count_memory(hd_capacity *c, const hd_capacity_args *a, hd_err *err) {
    const hd_rank_memory_args memory = {.spec = a->spec,
                                        .parallel = &c->parallel,
                                        .sizes = &c->sizes,
                                        .act_type = stored_act_type,
                                        .kv_type = hd_capacity_kv_type(a),
                                        .threads = 1,
                                        .graphs = true,
                                        .vocab = a->vocab,
                                        .n_micro = a->load.overlap ? 2 : 1,
                                        .gpu = a->gpu};
    HD_TRY(hd_rank_memory_of(&c->memory, &memory, err));
    HD_TRY(divide_experts(c, a, err));
    c->free = (a->gpu->memory_gb - a->gpu->reserved_gb) * 1e9 -
              (double)hd_rank_memory_total(&c->memory);
    if (a->gpu->cpu) c->free -= (double)c->memory.messages;
    return HD_OK;
}

/* If the pools do not fit, as many rows as do; c->hisparse: with which numbers of requests. */
static hd_status fit_hisparse(hd_capacity *c, const hd_capacity_args *a, int32_t users,
                              hd_err *err) {
    const int32_t n_layers = a->spec->n_layers + a->spec->n_mtp;
    const double kv = (double)c->memory.kv;
    c->hisparse = (hd_hisparse_choice){.requests = users, .fitting = users};
    if (a->hisparse_auto && c->free < 0 && hd_kv_selected_bytes(a->spec, n_layers, HD_F32)) {
        const size_t room = (size_t)fmax((kv + c->free) / HD_POOLS_PART, 0);
        c->hisparse.fitting = floor(users * fmax(0, 1 + c->free / kv));
        hd_engine_sizes_fit(&c->sizes, a->spec, n_layers, hd_capacity_kv_type(a), room);
        HD_TRY(count_memory(c, a, err));
    }
    c->hisparse.rows = c->sizes.resident;
    return HD_OK;
}

static hd_status predict(hd_capacity *c, const hd_capacity_args *a, hd_err *err) {
    const int32_t users = group_users(&a->load, c);
    c->sizes = sizes_of(a, users);
    HD_TRY(count_memory(c, a, err));
    HD_TRY(fit_hisparse(c, a, users, err));
    HD_TRY(trace(c, a, hd_capacity_kv_type(a), users, err));
    if (c->sizes.resident == 0 || c->hisparse.on) return HD_OK;
    c->sizes.resident = 0; /* it does not pay: fewer requests fit */
    return count_memory(c, a, err);
}

hd_status hd_capacity_predict(hd_capacity *out, const hd_capacity_args *a,
                              const hd_parallel_config *parallel, hd_err *err) {
    *out = (hd_capacity){.parallel = *parallel, .dwdp = hd_max_i32(1, a->dwdp)};
    HD_TRY(check_load(a, err));
    const hd_status st = predict(out, a, err);
    if (st != HD_OK) hd_capacity_close(out);
    return st;
}

void hd_capacity_close(hd_capacity *c) {
    free(c->prefill);
    free(c->decode);
    *c = (hd_capacity){0};
}

/* ---- layouts ---- */

int32_t hd_capacity_layouts(hd_parallel_config *out, int32_t cap, int32_t n,
                            const hd_model_spec *spec) {
    const int32_t experts = spec->route.n_experts;
    int32_t found = 0;
    for (int32_t dp = 1; dp <= n; dp++) {
        if (n % dp) continue;
        for (int32_t ep = 1; ep <= n && ep <= hd_max_i32(experts, 1); ep++) {
            if (n % ep || (dp > 1 && ep < n)) continue;
            if (found < cap) out[found] = hd_parallel_common(n / dp, dp, ep, spec);
            found++;
        }
    }
    return found;
}

static bool exceeds(const hd_capacity *a, const hd_capacity *b) {
    return a->free >= 0 && a->user_tokens_s >= b->user_tokens_s &&
           a->output_tokens_s >= b->output_tokens_s &&
           (a->user_tokens_s > b->user_tokens_s || a->output_tokens_s > b->output_tokens_s);
}

int32_t hd_capacity_front(const hd_capacity *all, int32_t n, bool *best) {
    int32_t found = 0;
    for (int32_t i = 0; i < n; i++) {
        best[i] = all[i].free >= 0;
        for (int32_t j = 0; best[i] && j < n; j++) best[i] = !exceeds(&all[j], &all[i]);
        found += best[i];
    }
    return found;
}
