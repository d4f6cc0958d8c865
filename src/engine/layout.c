/* layout.c - how the ranks divide the model: as the options tp, dp and ep say, or chosen for a number
 * of ranks.
 *
 * The choice is for throughput. A rank of a tensor-parallel group keeps the KV of all the group's
 * requests, and gathers columns in every layer. So as many attention groups as possible are
 * taken, as far as a rank's memory holds all attention weights and dense MLPs; experts are
 * divided over all ranks. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/memory.h"
#include "engine/experts.h"
#include "engine/engine.h"
#include "model/expert_fetch.h"
#include "weights/placement.h"

enum { MOST_ROWS = 1 << 24 }; /* of a step: above all chunks */

static int32_t at_least_one(int32_t n) {
    return n ? n : 1;
}

/* What ranks on GPUs do not have yet. */
static hd_status check_gpus(const hd_engine_options *o, hd_err *err) {
    const char *why = NULL;
    if (o->world.size > 1 && o->dwdp > 1) {
        why = "experts are not fetched from other processes";
    } else if (o->dwdp > 1 && o->ep > 1) {
        why =
            "groups that divide experts (dwdp) and exchange rows (ep) were not seen there yet";
    } else if (o->dwdp_from) {
        why = "steps that exchange rows and steps that fetch experts (dwdp_from) were not seen "
              "there yet";
    } else if (o->world.size > 1 && engine_rebalance_is_on(o)) {
        why = "experts do not move between processes";
    } else if (o->world.size > 1 && o->updatable) {
        why = "weights of processes cannot be replaced";
    }
    if (!why) return HD_OK;
    return HD_FAIL(err, HD_EUNSUPPORTED, "ranks on GPUs: %s", why);
}

/* What has no other rank to talk to, or no memory that ranks could exchange. */
static hd_status check_backend(const hd_engine_options *o, hd_err *err) {
    const char *backend = o->backend ? o->backend : "auto";
    if (strcmp(backend, "null") == 0) {
        return HD_FAIL(
            err, HD_EUNSUPPORTED,
            "the null backend has no weights to share: tp, dp and ep have no meaning");
    }
    if (strcmp(backend, "cuda") == 0) HD_TRY(check_gpus(o, err));
    if (o->pin_threads) {
        return HD_FAIL(
            err, HD_EUNSUPPORTED,
            "pinned threads with several ranks: every rank would take the same cores");
    }
    return HD_OK;
}

static bool asks_for_cp(const hd_engine_options *o) {
    return o->cp > 1 || o->cp == HD_CP_AUTO;
}

static hd_status check_degrees(const hd_engine_options *o, hd_err *err) {
    const int32_t cp = o->cp == HD_CP_AUTO ? 0 : o->cp;
    const int32_t degrees[] = {o->tp, cp, o->dp, o->ep, o->dwdp};
    static const char *const names[] = {"tp", "cp", "dp", "ep", "dwdp"};
    for (size_t i = 0; i < HD_LEN(degrees); i++) {
        if (degrees[i] >= 0 && degrees[i] <= HD_LOCAL_MAX_RANKS) continue;
        return HD_FAIL(err, HD_EINVAL, "%s is %d; must be 1 to %d ranks of one process",
                       names[i], degrees[i], HD_LOCAL_MAX_RANKS);
    }
    return HD_OK;
}

static int64_t bytes_of(const hd_plan *plan) {
    int64_t bytes = 0;
    for (int i = 0; i < HD_N_PARAM_GROUPS; i++) {
        bytes += plan->held.main[i].bytes + plan->held.mtp[i].bytes;
    }
    return bytes;
}

/* Plans every rank's shard, which refuses what cannot be divided, by its name. *most: the bytes of
 * the largest shard, in the formats that the config declares. */
static hd_status plan_shards(const hd_engine *e, const hd_parallel_config *parallel,
                             int64_t *most, hd_err *err) {
    hd_schema schema;
    hd_plan plan;
    hd_plan_args args = {
        .parallel = parallel, .spec = e->spec, .schema = &schema, .n_mtp = e->spec->n_mtp};
    *most = 0;
    HD_TRY(hd_schema_open(&schema, e->spec, err));
    hd_status st = HD_OK;
    for (; st == HD_OK && args.rank < hd_parallel_world(parallel); args.rank++) {
        st = hd_plan_open(&plan, &args, err);
        if (st != HD_OK) break;
        if (bytes_of(&plan) > *most) *most = bytes_of(&plan);
        hd_plan_close(&plan);
    }
    hd_schema_close(&schema);
    return st;
}

static bool has_fp8_rows(const hd_engine_options *o) {
    return o->dispatch_dtype && strcmp(o->dispatch_dtype, "fp8") == 0;
}

static int32_t ranks_of(const engine_degrees *d) {
    return d->tp * d->cp * d->dp;
}

static hd_status check_multiples(const engine_degrees *d, hd_err *err) {
    const int32_t tp = d->tp, ep = d->ep, all = ranks_of(d), n = hd_max_i32(all, ep);
    char by_dp[80] = "", by_cp[24] = "";
    if (d->cp > 1) snprintf(by_cp, sizeof by_cp, ", cp %d", d->cp);
    if (d->dp > 1 || d->cp > 1) {
        snprintf(by_dp, sizeof by_dp, "%s and dp %d, %d ranks,", by_cp, d->dp, all);
    }
    if (n % hd_min_i32(all, ep) != 0) {
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "tp %d%s with ep %d: one must be a multiple of the other", tp, by_dp,
                       ep);
    }
    if (n <= HD_LOCAL_MAX_RANKS) return HD_OK;
    return HD_FAIL(err, HD_EUNSUPPORTED, "tp %d%s with ep %d: at most %d ranks", tp, by_dp, ep,
                   HD_LOCAL_MAX_RANKS);
}

static hd_parallel_config layout_of(const hd_engine *e, const engine_degrees *d) {
    hd_parallel_config l = hd_parallel_context(d->tp, d->cp, d->dp, d->ep, e->spec);
    l.sum_in_ranks = d->sum_in_ranks;
    l.fp8_rows = d->fp8_rows && d->ep > 1;
    if (d->sum_in_ranks && d->ep > 1) l.dense_tp = 1; /* experts are complete then */
    return l;
}

/* Spare slots, beside those that make the number of slots even. */
static hd_status add_redundant(hd_engine *e, int32_t redundant, hd_err *err) {
    hd_parallel_config *l = &e->parallel;
    const int32_t slots = e->spec->route.n_experts + redundant;
    if (redundant < 0 || slots % l->ep || slots / l->ep > e->spec->route.n_experts) {
        return HD_FAIL(
            err, HD_EINVAL,
            "redundant is %d: %d experts and as many spare slots must divide by ep %d, "
            "and no rank can have more slots than there are experts",
            redundant, e->spec->route.n_experts, l->ep);
    }
    l->redundant = redundant;
    return HD_OK;
}

/* ---- ranks that fetch experts from each other ---- */

static hd_status check_dwdp(const hd_engine *e, const hd_engine_options *o, hd_err *err) {
    const char *why = NULL;
    if (o->tp > 1 || o->dp > 1) why = "it takes the place of tp and dp";
    if (asks_for_cp(o) && !e->dwdp_from) {
        why = "with cp, shorter steps exchange rows: give dwdp_from";
    }
    if (e->spec->route.n_experts == 0) why = "the model has no experts";
    if (!why) return HD_OK;
    return HD_FAIL(err, HD_EUNSUPPORTED, "dwdp %d cannot be used here: %s", o->dwdp, why);
}

static hd_status check_cp(const hd_engine *e, const hd_engine_options *o, hd_err *err) {
    if (!asks_for_cp(o)) return HD_OK;
    if (o->mla && strcmp(o->mla, "naive") == 0) {
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "mla naive with cp: it computes whole sequences, of which a rank has a "
                       "part of the rows");
    }
    const hd_kv_shape shape = hd_kv_shape_of(e->spec);
    if (hd_kv_longest_tail(&shape) == 0) return HD_OK;
    return HD_FAIL(err, HD_EUNSUPPORTED, "cp is not for %s, whose layers drop rows of prompts",
                   hd_family_name(e->spec->family));
}

static hd_status read_from(hd_engine *e, const hd_engine_options *o, hd_err *err) {
    char *end = NULL;
    if (!o->dwdp_from) return HD_OK;
    if (o->dwdp <= 1) return HD_FAIL(err, HD_EINVAL, "dwdp_from is for dwdp above 1");
    const bool by_time = strcmp(o->dwdp_from, "auto") == 0;
    const long rows = strtol(o->dwdp_from, &end, 10);
    e->dwdp_from = by_time ? HD_FETCH_BY_TIME : (int32_t)rows;
    if (by_time || (*end == '\0' && rows >= 1 && rows <= MOST_ROWS)) return HD_OK;
    return HD_FAIL(err, HD_EINVAL, "dwdp_from is '%s'; must be auto or 1 to %d rows",
                   o->dwdp_from, MOST_ROWS);
}

/* Ranks that exchange rows in some steps and fetch experts in others: those of dp and ep, or of cp and ep, whose
 * experts lie as those of dwdp. */
static hd_status choose_both(hd_engine *e, const hd_engine_options *o, hd_err *err) {
    int64_t most;
    const char *why = NULL;
    if (o->world.size > 0) why = "ranks are in several processes";
    if (o->ep > 1) why = "with ep some rows are exchanged in all steps";
    if (o->redundant || engine_rebalance_is_on(o)) why = "experts have other places";
    if (e->spec->route.n_experts % o->dwdp) why = "experts must divide by dwdp";
    if (o->cp > 1 && o->cp != o->dwdp) why = "cp must be as large, or auto";
    if (why) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "dwdp_from %s cannot be used here: %s",
                       o->dwdp_from, why);
    }
    HD_TRY(check_cp(e, o, err));
    const int32_t cp = asks_for_cp(o) ? o->dwdp : 1;
    e->degrees = (engine_degrees){1, cp, o->dwdp / cp, o->dwdp, false, false};
    e->parallel = layout_of(e, &e->degrees);
    return plan_shards(e, &e->parallel, &most, err);
}

/* Groups that divide experts, and ranks that exchange rows between groups. */
static hd_status choose_groups(hd_engine *e, const hd_engine_options *o, hd_err *err) {
    const int64_t ranks = (int64_t)o->dwdp * o->ep;
    int64_t most;
    if (ranks > HD_LOCAL_MAX_RANKS) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "dwdp %d with ep %d: at most %d ranks", o->dwdp,
                       o->ep, HD_LOCAL_MAX_RANKS);
    }
    if (o->redundant) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "redundant experts need ep or dwdp alone");
    }
    e->degrees = (engine_degrees){1, 1, (int32_t)ranks, (int32_t)ranks, false, has_fp8_rows(o)};
    e->parallel = hd_parallel_dwdp_groups(o->dwdp, o->ep, e->spec);
    e->parallel.fp8_rows = e->degrees.fp8_rows;
    return plan_shards(e, &e->parallel, &most, err);
}

static hd_status choose_dwdp(hd_engine *e, const hd_engine_options *o, hd_err *err) {
    int64_t most;
    HD_TRY(check_backend(o, err));
    HD_TRY(check_dwdp(e, o, err));
    if (e->dwdp_from) return choose_both(e, o, err);
    if (o->ep > 1) return choose_groups(e, o, err);
    e->parallel = hd_parallel_dwdp(o->dwdp, o->redundant, e->spec);
    e->independent = true;
    if (o->redundant != e->parallel.copies) {
        return HD_FAIL(err, HD_EINVAL,
                       "redundant is %d: with dwdp %d it must be 0 to %d, so that a rank lacks "
                       "an expert",
                       o->redundant, o->dwdp,
                       hd_parallel_dwdp(o->dwdp, INT32_MAX, e->spec).copies);
    }
    return plan_shards(e, &e->parallel, &most, err);
}

/* ---- a layout for a number of ranks ---- */

static double gib(int64_t bytes) {
    return (double)bytes / (1 << 30);
}

/* Memory of a rank: an equal part of the host's, or all of it if the ranks are on other hosts. */
static int64_t rank_memory(const hd_engine_options *o, int32_t ranks) {
    if (o->rank_memory) return o->rank_memory;
    return (int64_t)hd_memory_free() / (engine_process_is_on_one_host(o) ? ranks : 1);
}

/* Bytes of a rank's KV pools. Ranks run on CPUs, whose caches are float32. */
static int64_t kv_bytes(const hd_engine *e, const hd_engine_options *o) {
    const hd_engine_sizes z = hd_engine_sizes_of(e->spec, e->drafts, o);
    return (int64_t)hd_engine_kv_bytes(&z, e->spec, e->spec->n_layers + e->spec->n_mtp,
                                       HD_F32) +
           (int64_t)hd_engine_mirror_bytes(&z, e->spec, e->spec->n_layers + e->spec->n_mtp,
                                           HD_F32) +
           (int64_t)(o->kv_host_gb * 1e9);
}

/* The most ranks, of those that divide n, that experts can be divided over. */
static int32_t most_ep(const hd_engine *e, int32_t n) {
    int32_t ep = n;
    while (ep > 1 && (n % ep || ep > e->spec->route.n_experts)) ep--;
    return ep;
}

static hd_status check_free_choice(const hd_engine_options *o, int32_t n, hd_err *err) {
    if (strcmp(o->layout, "auto") != 0) {
        return HD_FAIL(err, HD_EINVAL, "layout '%s' is not auto", o->layout);
    }
    if (o->tp > 1 || o->dp > 1 || o->ep > 1 || o->dwdp > 1 || asks_for_cp(o)) {
        return HD_FAIL(
            err, HD_EINVAL,
            "layout auto chooses tp, dp and ep: give none of them, no dwdp and no cp");
    }
    if (n >= 1 && n <= HD_LOCAL_MAX_RANKS) return HD_OK;
    return HD_FAIL(err, HD_EINVAL, "layout auto is for 1 to %d ranks, not for %d",
                   HD_LOCAL_MAX_RANKS, n);
}

/* Takes the layout with the fewest ranks per attention group that fits the memory. */
static hd_status choose_for(hd_engine *e, const hd_engine_options *o, int32_t n, hd_err *err) {
    const int32_t ep = most_ep(e, n);
    const int64_t memory = rank_memory(o, n), kv = kv_bytes(e, o);
    int64_t least = 0, bytes;
    int32_t least_tp = 0;
    for (int32_t tp = 1; tp <= n; tp++) {
        if (n % tp) continue;
        const engine_degrees d = {tp, 1, n / tp, ep, o->sum_in_ranks, has_fp8_rows(o)};
        const hd_parallel_config l = layout_of(e, &d);
        const hd_status st = plan_shards(e, &l, &bytes, err);
        if (st == HD_EUNSUPPORTED && tp < n) continue;
        HD_TRY(st);
        if (!least_tp || bytes < least) {
            least_tp = tp;
            least = bytes;
        }
        if (memory && bytes + kv > memory) continue;
        *err = (hd_err){0};
        e->parallel = l;
        e->degrees = d;
        snprintf(
            e->layout_reason, sizeof e->layout_reason,
            "%d ranks as tp %d, dp %d, ep %d: %.3g GiB of weights and %.3g GiB of KV pools "
            "fit %.3g GiB for each rank%s",
            n, tp, n / tp, ep, gib(bytes), gib(kv), gib(memory),
            tp == 1 ? "" : "; fewer ranks per attention group do not");
        return HD_OK;
    }
    return HD_FAIL(
        err, HD_ENOMEM,
        "no layout of %d ranks fits %.3g GiB for each: tp %d needs %.3g GiB of weights "
        "and %.3g GiB of KV pools",
        n, gib(memory), least_tp, gib(least), gib(kv));
}

static hd_status choose_freely(hd_engine *e, const hd_engine_options *o, hd_err *err) {
    const int32_t n = o->world.size ? o->world.size : at_least_one(o->ranks);
    HD_TRY(check_free_choice(o, n, err));
    if (n > 1) HD_TRY(check_backend(o, err));
    return choose_for(e, o, n, err);
}

/* ---- the layout ---- */

/* Rows for each rank from which --cp auto divides a step: on CPUs measured, on GPUs predicted
 * (docs/ranks.md#context-parallelism). */
enum { CP_PAYS_FROM = 8, CP_PAYS_FROM_ON_GPUS = 128 };

static bool asks_for_gpus(const hd_engine_options *o) {
    return o->backend && strcmp(o->backend, "cuda") == 0;
}

/* auto: as many as there are processes, or ranks that share the experts, for each part of the heads. */
static int32_t choose_cp(hd_engine *e, const hd_engine_options *o) {
    const int32_t apart = at_least_one(o->tp) * at_least_one(o->dp);
    const int32_t ranks = o->world.size ? o->world.size : at_least_one(o->ep);
    e->cp_part = 0;
    if (o->cp != HD_CP_AUTO) return at_least_one(o->cp);
    e->cp_part = asks_for_gpus(o) ? CP_PAYS_FROM_ON_GPUS : CP_PAYS_FROM;
    return hd_max_i32(ranks / apart, 1);
}

static hd_status choose_layout(hd_engine *e, const hd_engine_options *o, hd_err *err) {
    const engine_degrees d = {at_least_one(o->tp), choose_cp(e, o), at_least_one(o->dp),
                              at_least_one(o->ep), o->sum_in_ranks, has_fp8_rows(o)};
    int64_t most;
    e->parallel = hd_parallel_single();
    HD_TRY(check_degrees(o, err));
    if (o->layout) return choose_freely(e, o, err);
    if (o->ranks || o->rank_memory) {
        return HD_FAIL(err, HD_EINVAL, "ranks and rank_memory are for layout auto");
    }
    HD_TRY(read_from(e, o, err));
    if (o->prefetch_depth && o->dwdp <= 1) {
        return HD_FAIL(err, HD_EINVAL, "prefetch_depth is for dwdp above 1");
    }
    if (o->prefetch_depth < 0 || o->prefetch_depth > HD_MAX_FETCH_DEPTH) {
        return HD_FAIL(err, HD_EINVAL, "prefetch_depth is %d; must be 1 to %d",
                       o->prefetch_depth, HD_MAX_FETCH_DEPTH);
    }
    if (o->dwdp > 1) return choose_dwdp(e, o, err);
    if (ranks_of(&d) == 1 && d.ep == 1) return HD_OK;
    HD_TRY(check_backend(o, err));
    HD_TRY(check_multiples(&d, err));
    HD_TRY(check_cp(e, o, err));
    e->degrees = d;
    e->parallel = layout_of(e, &e->degrees);
    return plan_shards(e, &e->parallel, &most, err);
}

int32_t hd_engine_cp_from(const hd_engine *e) {
    return e->cp_part * e->parallel.cp;
}

/* ---- micro-batches ---- */

/* Rows of an attention group from which steps in two micro-batches were measured to be faster; 0: never.
 * Ranks that compute on the cores which also carry their rows hide nothing (docs/ranks.md). */
enum { OVERLAP_PAYS_FROM = 0 };

static hd_status choose_overlap(hd_engine *e, const hd_engine_options *o, hd_err *err) {
    const char *asked = o->overlap ? o->overlap : "auto";
    const bool any = strcmp(asked, "auto") == 0;
    const bool naive = o->mla && strcmp(o->mla, "naive") == 0;
    const bool exchanges = hd_parallel_exchanges(&e->parallel);
    const bool on_gpus = asks_for_gpus(o);
    e->n_micro = 1;
    e->micro_from = 0;
    if (strcmp(asked, "off") == 0) return HD_OK;
    if (!any && strcmp(asked, "2") != 0 && strcmp(asked, "3") != 0) {
        return HD_FAIL(err, HD_EINVAL, "overlap '%s' is not auto, off, 2 or 3", asked);
    }
    if (any) {
        if (!exchanges || naive || on_gpus || OVERLAP_PAYS_FROM == 0) return HD_OK;
        e->n_micro = 2;
        e->micro_from = OVERLAP_PAYS_FROM;
        return HD_OK;
    }
    if (on_gpus) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "ranks on GPUs: overlap %s is not there yet",
                       asked);
    }
    if (!exchanges) {
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "overlap %s: there are no ranks that exchange rows in a step", asked);
    }
    if (naive) {
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "mla naive with overlap %s: it computes whole sequences, which "
                       "micro-batches cut",
                       asked);
    }
    e->n_micro = asked[0] - '0';
    return HD_OK;
}

int32_t hd_engine_micro_batches(const hd_engine *e, int32_t *from) {
    *from = e->micro_from;
    return e->n_micro;
}

/* What is asked for beside the layout. */
static hd_status check_moves(hd_engine *e, const hd_engine_options *o, hd_err *err) {
    int64_t most;
    if (!o->redundant || e->parallel.copies) return HD_OK;
    if (e->parallel.ep == 1) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "redundant experts need ep or dwdp above 1");
    }
    HD_TRY(add_redundant(e, o->redundant, err));
    return plan_shards(e, &e->parallel, &most, err);
}

static hd_status check_split(hd_engine *e, const hd_engine_options *o, hd_err *err) {
    HD_TRY(hd_expert_split_of(&e->split, o->expert_split, err));
    if (e->split == HD_SPLIT_TURNS || e->parallel.redundant) return HD_OK;
    return HD_FAIL(err, HD_EUNSUPPORTED,
                   "expert_split '%s': experts have no copies without redundant slots",
                   o->expert_split);
}

static hd_status check_dispatch(const hd_engine *e, const hd_engine_options *o, hd_err *err) {
    if (!has_fp8_rows(o)) {
        if (!o->dispatch_dtype || strcmp(o->dispatch_dtype, "float32") == 0) return HD_OK;
        return HD_FAIL(err, HD_EINVAL, "dispatch_dtype '%s' is not float32 or fp8",
                       o->dispatch_dtype);
    }
    if (e->dwdp_from) {
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "dispatch_dtype fp8 with dwdp_from: rows of steps that fetch experts "
                       "would not be rounded");
    }
    if (e->parallel.ep > 1) return HD_OK;
    return HD_FAIL(err, HD_EUNSUPPORTED,
                   "dispatch_dtype fp8 needs ep above 1: no rows travel to experts");
}

hd_status engine_ranks_choose(hd_engine *e, const hd_engine_options *o, hd_err *err) {
    HD_TRY(choose_layout(e, o, err));
    HD_TRY(check_moves(e, o, err));
    HD_TRY(check_split(e, o, err));
    HD_TRY(check_dispatch(e, o, err));
    HD_TRY(choose_overlap(e, o, err));
    HD_TRY(engine_rebalance_check(e, o, err));
    return engine_process_check(e, o, err);
}

/* ---- the layout of the ranks that are left ---- */

static int32_t largest_divisor(int32_t n, int32_t most) {
    while (n % most) most--;
    return most;
}

/* Whole attention groups stay. Without several, the heads stay divided as they are, and experts are
 * divided over as many ranks as there are. False: too few ranks. */
static bool reduce(engine_degrees *d, int32_t n) {
    const int32_t all = ranks_of(d), group = d->tp * d->cp;
    if (d->dp > 1) {
        const int32_t each = hd_max_i32(all, d->ep) / d->dp;
        d->dp = n / each;
        if (d->dp == 0) return false;
        d->ep = d->ep > all ? each * d->dp : largest_divisor(group * d->dp, d->ep);
        return true;
    }
    if (d->cp > 1) d->cp = hd_min_i32(d->cp, n / d->tp);
    if (d->cp == 0) return false;
    if (d->ep <= group && group > d->tp) {
        d->ep = largest_divisor(d->tp * d->cp, d->ep);
        return true;
    }
    if (d->ep <= d->tp) return n >= d->tp;
    d->ep = n / d->tp * d->tp;
    return d->ep > 0;
}

/* Two groups or more, of as many ranks as before; else each rank is a group. */
static bool keeps_groups(const hd_engine *e, int32_t n, hd_parallel_config *out) {
    hd_err refused = {0};
    int64_t most;
    for (int32_t ep = n / e->parallel.dwdp; ep > 1; ep--) {
        *out = hd_parallel_dwdp_groups(e->parallel.dwdp, ep, e->spec);
        out->fp8_rows = e->degrees.fp8_rows;
        if (plan_shards(e, out, &most, &refused) == HD_OK) return true;
    }
    return false;
}

bool engine_layout_of(void *ctx, int32_t n, hd_parallel_config *out) {
    const hd_engine *e = ctx;
    if (e->independent) {
        *out = hd_parallel_dwdp(n, e->parallel.copies, e->spec);
        return n > 0;
    }
    if (engine_fetches(e) && keeps_groups(e, n, out)) return true;
    for (; n > 0; n--) {
        engine_degrees d = e->degrees;
        hd_err refused = {0};
        int64_t most;
        if (!reduce(&d, n)) return false;
        *out = layout_of(e, &d);
        if (plan_shards(e, out, &most, &refused) == HD_OK) return true;
    }
    return false;
}

const char *hd_engine_layout_reason(const hd_engine *e) {
    return e->layout_reason[0] ? e->layout_reason : NULL;
}
