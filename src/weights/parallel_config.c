/* parallel_config.c - checks parallel configs, and derives a rank's coordinates and shard. */
#include "weights/parallel_config.h"

#include "base/checked.h"

enum { MAX_WORLD = 1 << 20 };

hd_parallel_config hd_parallel_single(void) {
    return hd_parallel_tensor(1);
}

hd_parallel_config hd_parallel_tensor(int32_t tp) {
    return (hd_parallel_config){
        .tp = tp, .dp = 1, .ep = 1, .etp = tp, .dense_tp = tp, .head_tp = tp};
}

hd_parallel_config hd_parallel_expert(int32_t ep, int32_t redundant) {
    return (hd_parallel_config){.tp = 1,
                                .dp = ep,
                                .ep = ep,
                                .etp = 1,
                                .dense_tp = 1,
                                .head_tp = 1,
                                .redundant = redundant};
}

hd_parallel_config hd_parallel_dwdp(int32_t n, int32_t copies, const hd_model_spec *spec) {
    const int32_t experts = spec->route.n_experts;
    const int32_t most = n * (experts - (int32_t)hd_ceil_div(experts, n) - 1);
    hd_parallel_config l = hd_parallel_single();
    l.dp = l.dwdp = n;
    l.copies = hd_max_i32(0, hd_min_i32(copies, most));
    return l;
}

hd_parallel_config hd_parallel_dwdp_groups(int32_t n, int32_t ep, const hd_model_spec *spec) {
    const int32_t experts = spec->route.n_experts;
    hd_parallel_config l = hd_parallel_expert(ep, experts ? (ep - experts % ep) % ep : 0);
    l.dp = n * ep;
    l.dwdp = n;
    return l;
}

/* Things that cannot be cut further: V4's heads of an output group belong together. */
static int32_t head_units(const hd_model_spec *spec) {
    return spec->o_groups ? spec->o_groups : spec->n_heads;
}

hd_parallel_config hd_parallel_common(int32_t tp, int32_t dp, int32_t ep,
                                      const hd_model_spec *spec) {
    return hd_parallel_context(tp, 1, dp, ep, spec);
}

hd_parallel_config hd_parallel_context(int32_t tp, int32_t cp, int32_t dp, int32_t ep,
                                       const hd_model_spec *spec) {
    const int32_t all = tp * cp * dp, n = all > ep ? all : ep, each = n / dp;
    const int32_t experts = spec->route.n_experts;
    int32_t heads = tp;
    while (heads > 1 && (heads > head_units(spec) || each % heads)) heads--;
    return (hd_parallel_config){.tp = each,
                                .dp = dp,
                                .ep = ep,
                                .etp = n / ep,
                                .dense_tp = tp,
                                .head_tp = each,
                                .redundant = experts ? (ep - experts % ep) % ep : 0,
                                .head_parts = heads,
                                .cp = cp > 1 ? each / heads : 0};
}

int32_t hd_parallel_head_parts(const hd_parallel_config *l) {
    return l->head_parts ? l->head_parts : l->tp;
}

int32_t hd_parallel_world(const hd_parallel_config *l) {
    return l->tp * l->dp;
}

bool hd_parallel_exchanges(const hd_parallel_config *l) {
    return l->tp > 1 || l->ep > 1 || l->etp > 1 || l->dense_tp > 1 || l->head_tp > 1;
}

static hd_status check_dwdp(const hd_parallel_config *l, hd_err *err) {
    if (l->dwdp < 0 || (l->dwdp > 1 && l->dp % (l->dwdp * l->ep) != 0)) {
        return HD_FAIL(err, HD_EINVAL, "layout: dwdp %d x ep %d does not divide dp %d", l->dwdp,
                       l->ep, l->dp);
    }
    const bool shares = l->tp > 1 || l->etp > 1 || l->dense_tp > 1 || l->head_tp > 1;
    if (l->dwdp <= 1 || (!shares && (l->ep == 1 ? l->redundant : l->copies) == 0)) return HD_OK;
    return HD_FAIL(
        err, HD_EINVAL,
        "layout: with dwdp %d every rank computes its own rows: no other rank shares "
        "heads, experts or MLPs",
        l->dwdp);
}

hd_status hd_parallel_check(const hd_parallel_config *l, hd_err *err) {
    const struct {
        const char *name;
        int32_t n;
    } sizes[] = {
        {"tp",       l->tp      },
        {"dp",       l->dp      },
        {"ep",       l->ep      },
        {"etp",      l->etp     },
        {"dense_tp", l->dense_tp},
        {"head_tp",  l->head_tp }
    };
    for (size_t i = 0; i < HD_LEN(sizes); i++) {
        if (sizes[i].n >= 1 && sizes[i].n <= MAX_WORLD) continue;
        return HD_FAIL(err, HD_EINVAL, "layout: %s is %d: must be in 1..%d", sizes[i].name,
                       sizes[i].n, MAX_WORLD);
    }
    if (l->redundant < 0 || l->redundant > MAX_WORLD) {
        return HD_FAIL(err, HD_EINVAL, "layout: %d redundant experts: must be in 0..%d",
                       l->redundant, MAX_WORLD);
    }
    int64_t world = (int64_t)l->tp * l->dp;
    if (world > MAX_WORLD) {
        return HD_FAIL(err, HD_EINVAL, "layout: tp %d x dp %d is a world of %lld, more than %d",
                       l->tp, l->dp, (long long)world, MAX_WORLD);
    }
    if (world % ((int64_t)l->ep * l->etp) != 0) {
        return HD_FAIL(err, HD_EINVAL,
                       "layout: ep %d x etp %d does not divide the world of %lld", l->ep,
                       l->etp, (long long)world);
    }
    if (world % l->dense_tp != 0 || world % l->head_tp != 0) {
        bool dense = world % l->dense_tp != 0;
        return HD_FAIL(err, HD_EINVAL, "layout: %s %d does not divide the world of %lld",
                       dense ? "dense_tp" : "head_tp", dense ? l->dense_tp : l->head_tp,
                       (long long)world);
    }
    if (l->tp % hd_parallel_head_parts(l) != 0) {
        return HD_FAIL(err, HD_EINVAL, "layout: %d parts of the heads do not divide tp %d",
                       hd_parallel_head_parts(l), l->tp);
    }
    if (l->cp < 0 || (l->cp > 1 && l->cp * hd_parallel_head_parts(l) != l->tp)) {
        return HD_FAIL(err, HD_EINVAL, "layout: cp %d x %d parts of the heads are not tp %d",
                       l->cp, hd_parallel_head_parts(l), l->tp);
    }
    const bool all = l->etp == l->tp && l->dense_tp == l->tp && l->ep == 1;
    if (l->sum_in_ranks && !all && (l->etp != 1 || l->dense_tp != 1)) {
        return HD_FAIL(err, HD_EINVAL,
                       "layout: sums in ranks with etp %d and dense_tp %d: both must be tp %d, "
                       "without ep, or 1",
                       l->etp, l->dense_tp, l->tp);
    }
    return check_dwdp(l, err);
}

hd_rank_group hd_parallel_group(const hd_parallel_config *l, int32_t rank, hd_group group) {
    const struct {
        int32_t stride, n;
    } shapes[HD_N_GROUPS] = {
        [HD_GROUP_TP] = {1,                     l->tp   },
        [HD_GROUP_DP] = {l->tp,                 l->dp   },
        [HD_GROUP_EP] = {l->etp * hd_max_i32(1, l->dwdp), l->ep},
        [HD_GROUP_ETP] = {1,                     l->etp                            },
        [HD_GROUP_DENSE] = {1,                     l->dense_tp},
        [HD_GROUP_HEAD] = {1,                     l->head_tp                            },
        [HD_GROUP_ATTENTION] = {1,                     hd_parallel_head_parts(l)},
        [HD_GROUP_CP] = {hd_parallel_head_parts(l),                     l->tp / hd_parallel_head_parts(l)    }
    };
    const int32_t stride = shapes[group].stride, n = shapes[group].n;
    const int32_t index = rank / stride % n;
    return (hd_rank_group){
        .first = rank - index * stride, .stride = stride, .n = n, .index = index};
}

hd_rank_coords hd_parallel_coords(const hd_parallel_config *l, int32_t rank) {
    return (hd_rank_coords){.tp = hd_parallel_group(l, rank, HD_GROUP_TP).index,
                            .dp = hd_parallel_group(l, rank, HD_GROUP_DP).index,
                            .etp = hd_parallel_group(l, rank, HD_GROUP_ETP).index,
                            .ep = hd_parallel_group(l, rank, HD_GROUP_EP).index,
                            .dense = hd_parallel_group(l, rank, HD_GROUP_DENSE).index,
                            .head = hd_parallel_group(l, rank, HD_GROUP_HEAD).index,
                            .attention = hd_parallel_group(l, rank, HD_GROUP_ATTENTION).index};
}

/* Part `index` of `parts` of n whole blocks of `unit`. */
static hd_extent part_in_units(int32_t n, int32_t unit, int32_t index, int32_t parts) {
    const int64_t units = (n + unit - 1) / unit;
    const int64_t first = units * index / parts * unit,
                  end = units * (index + 1) / parts * unit;
    const int32_t from = first < n ? (int32_t)first : n, to = end < n ? (int32_t)end : n;
    return (hd_extent){from, to - from};
}

hd_extent hd_extent_of(int32_t n, int32_t index, int32_t parts) {
    int32_t unit = 128;
    for (; unit > 1; unit /= 2) {
        const int64_t units = (n + unit - 1) / unit, most = (units + parts - 1) / parts;
        if (units >= parts && most * parts * unit <= (int64_t)n + n / 8) break;
    }
    return part_in_units(n, unit, index, parts);
}

static void share_heads(hd_shard *s, const hd_model_spec *spec, int32_t index, int32_t parts) {
    const int32_t units = head_units(spec), each = spec->n_heads / units;
    const hd_extent own = part_in_units(units, 1, index, parts);
    s->head0 = own.first * each;
    s->n_heads = own.n * each;
    if (!spec->o_groups) return;
    s->o_group0 = own.first;
    s->o_groups = own.n;
}

/* Parts whose sizes differ by one at most, and as even parts of the copies. */
static hd_extent held_by(const hd_parallel_config *l, int32_t rank, int32_t n) {
    const int32_t parts = l->dwdp > 1 ? l->dwdp : 1, i = rank % parts;
    hd_extent held = part_in_units(n, 1, i, parts);
    held.n += part_in_units(l->copies, 1, parts - 1 - i, parts).n;
    return held;
}

bool hd_shard_holds(hd_extent held, int32_t i, int32_t n) {
    return (i - held.first + n) % n < held.n;
}

hd_shard hd_shard_of(const hd_parallel_config *l, int32_t rank, const hd_model_spec *spec) {
    const hd_rank_coords at = hd_parallel_coords(l, rank);
    const int32_t heads = hd_parallel_head_parts(l);
    const hd_extent all = {0, spec->hidden}, words = {0, spec->vocab};
    const hd_extent vocab =
        spec->tied_embeddings ? words : hd_extent_of(spec->vocab, at.head, l->head_tp);
    hd_shard s = {.parallel = *l,
                  .rank = rank,
                  .dense_inter = hd_extent_of(spec->dense_inter, at.dense, l->dense_tp),
                  .shared_inter =
                      hd_extent_of(spec->n_shared * spec->moe_inter, at.dense, l->dense_tp),
                  .moe_inter = hd_extent_of(spec->moe_inter, at.etp, l->etp),
                  .o_out = all,
                  .dense_out = all,
                  .moe_out = all,
                  .n_experts = (spec->route.n_experts + l->redundant) / l->ep,
                  .vocab0 = vocab.first,
                  .vocab = vocab.n};
    s.expert0 = at.ep * s.n_experts;
    s.held = held_by(l, rank, s.n_experts);
    share_heads(&s, spec, at.attention, heads);
    if (l->sum_in_ranks) return s;
    s.o_out = hd_extent_of(spec->hidden, at.attention, heads);
    s.dense_out = hd_extent_of(spec->hidden, at.dense, l->dense_tp);
    s.moe_out = hd_extent_of(spec->hidden, at.etp, l->etp);
    return s;
}

int32_t hd_shard_slots(const hd_shard *s) {
    return s->n_experts * s->parallel.ep;
}

int32_t hd_shard_slot(const hd_shard *s, int32_t expert, int32_t n_experts) {
    const int32_t slot = (expert - s->expert0 % n_experts + n_experts) % n_experts;
    return slot < s->n_experts ? slot : -1;
}
