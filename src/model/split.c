/* split.c - which copy of an expert the rows of a rank go to, where they are split exactly: so that the
 * ranks with copies get as equal sums of rows as possible, of this rank's rows or of all ranks'. */
#include "model/rows_internal.h"

bool model_splits(const hd_model *m) {
    const bool copies = hd_shard_slots(m->shard) > m->env.spec->route.n_experts;
    return copies && m->env.split != HD_SPLIT_TURNS && m->in_rows > 0;
}

bool model_splits_together(const hd_model *m) {
    return model_splits(m) && m->env.split == HD_SPLIT_FLOW;
}

static hd_rank_group sources(const model_step *s) {
    return hd_parallel_group(&s->m->shard->parallel, s->m->shard->rank, HD_GROUP_EP);
}

void model_count_rows(const model_step *s, int32_t layer) {
    const int32_t experts = s->m->env.spec->route.n_experts;
    int32_t *own = s->t->counts + (int64_t)sources(s).index * experts;
    s->m->env.ops->moe_count(
        s->stream, &(hd_moe_count_args){.counts = own,
                                        .expert = s->t->expert,
                                        .rows = model_step_rows(s, HD_GROUP_ETP).n,
                                        .top_k = hd_layer_route(s->m->env.spec, layer).top_k,
                                        .n_experts = experts});
}

void model_gather_counts(const model_step *s, int32_t layer) {
    const hd_rank_group g = sources(s);
    const int32_t experts = s->m->env.spec->route.n_experts;
    (void)layer;
    model_gather_ints(s, HD_GROUP_EP, s->t->counts, g.n, experts, (hd_extent){g.index, 1});
}

void model_split_rows(const model_step *s, int32_t layer) {
    const hd_expert_map *map = hd_weights_expert_map(s->m->env.weights, layer);
    const hd_rank_group g = sources(s);
    s->m->env.ops->moe_split(
        s->stream, &(hd_moe_split_args){
                       .offset = s->t->offset,
                       .first = s->t->first,
                       .graph = map->graph,
                       .expert = s->t->expert,
                       .counts = model_splits_together(s->m) ? s->t->counts : NULL,
                       .rows = model_step_rows(s, HD_GROUP_ETP).n,
                       .top_k = hd_layer_route(s->m->env.spec, layer).top_k,
                       .n_sources = g.n,
                       .source = g.index,
                       .shape = {s->m->env.spec->route.n_experts, map->n_slots, map->n_ranks}
    });
}
