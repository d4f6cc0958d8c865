/* parallel_config.c - checks parallel configs, and derives a rank's coordinates and shard. */
#include "weights/parallel_config.h"

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

hd_parallel_config hd_parallel_common(int32_t tp, int32_t ep, const hd_model_spec *spec) {
    return (hd_parallel_config){.tp = ep,
                                .dp = 1,
                                .ep = ep,
                                .etp = 1,
                                .dense_tp = 1,
                                .head_tp = spec->vocab % ep == 0 ? ep : 1,
                                .whole_heads = tp == 1};
}

int32_t hd_parallel_head_parts(const hd_parallel_config *l) {
    return l->whole_heads ? 1 : l->tp;
}

int32_t hd_parallel_world(const hd_parallel_config *l) {
    return l->tp * l->dp;
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
    return HD_OK;
}

hd_rank_group hd_parallel_group(const hd_parallel_config *l, int32_t rank, hd_group group) {
    const struct {
        int32_t stride, n;
    } shapes[HD_N_GROUPS] = {
        [HD_GROUP_TP] = {1,      l->tp      },
          [HD_GROUP_DP] = {l->tp,  l->dp      },
        [HD_GROUP_EP] = {l->etp, l->ep      },
          [HD_GROUP_ETP] = {1,      l->etp     },
        [HD_GROUP_DENSE] = {1,      l->dense_tp},
          [HD_GROUP_HEAD] = {1,      l->head_tp }
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
                            .head = hd_parallel_group(l, rank, HD_GROUP_HEAD).index};
}

hd_shard hd_shard_of(const hd_parallel_config *l, int32_t rank, const hd_model_spec *spec) {
    const hd_rank_coords at = hd_parallel_coords(l, rank);
    const int32_t heads = hd_parallel_head_parts(l);
    hd_shard s = {.parallel = *l,
                  .rank = rank,
                  .n_heads = spec->n_heads / heads,
                  .o_groups = spec->o_groups / heads,
                  .dense_inter = spec->dense_inter / l->dense_tp,
                  .shared_inter = spec->n_shared * spec->moe_inter / l->dense_tp,
                  .moe_inter = spec->moe_inter / l->etp,
                  .n_experts = (spec->route.n_experts + l->redundant) / l->ep,
                  .vocab = spec->tied_embeddings ? spec->vocab : spec->vocab / l->head_tp};
    s.head0 = at.tp % heads * s.n_heads;
    s.expert0 = at.ep * s.n_experts;
    s.vocab0 = spec->tied_embeddings ? 0 : at.head * s.vocab;
    return s;
}

int32_t hd_shard_slots(const hd_shard *s) {
    return s->n_experts * s->parallel.ep;
}

int32_t hd_shard_slot(const hd_shard *s, int32_t expert, int32_t n_experts) {
    const int32_t slot = (expert - s->expert0 % n_experts + n_experts) % n_experts;
    return slot < s->n_experts ? slot : -1;
}
