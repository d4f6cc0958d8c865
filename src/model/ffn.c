/* ffn.c - the feed-forward block: a dense MLP, or MoE with routed experts and a shared one.
 *
 * models.md 2.2, 2.3 and 2.12. V4 multiplies the router weight into the input of the
 * expert's down projection, the earlier families into its output. If ranks with rows in common
 * hold complete MLPs, each computes its part of the rows, and all gather the results. */
#include "model/model_internal.h"

/* The rows that this rank computes, of h and y. */
typedef struct own_rows {
    int32_t first, n;
    hd_rows h, y;
} own_rows;

static int32_t first_of_part(const model_step *s, int32_t part) {
    return (int32_t)((int64_t)s->b->n_rows * part / s->m->row_parts);
}

static own_rows own_rows_of(const model_step *s) {
    const int32_t first = first_of_part(s, s->m->row_part);
    const int64_t at = (int64_t)first * s->m->env.spec->hidden;
    return (own_rows){.first = first,
                      .n = first_of_part(s, s->m->row_part + 1) - first,
                      .h = hd_rows_at(s->t->h, at),
                      .y = hd_rows_at(s->t->y, at)};
}

static void gated_mlp(const model_step *s, int32_t layer, hd_role gate, hd_role up,
                      hd_role down, int32_t inter) {
    model_activations *t = s->t;
    const own_rows own = own_rows_of(s);
    if (own.n == 0) return;
    model_linear(s, layer, gate, t->gate, own.h, own.n);
    model_linear(s, layer, up, t->up, own.h, own.n);
    s->m->env.ops->swiglu(s->stream, &(hd_swiglu_args){.out = t->gate,
                                                       .gate = t->gate,
                                                       .up = t->up,
                                                       .rows = own.n,
                                                       .cols = inter,
                                                       .limit = s->m->env.spec->swiglu_limit});
    model_linear(s, layer, down, own.y, t->gate, own.n);
}

static void dense(const model_step *s, int32_t layer) {
    gated_mlp(s, layer, HD_DENSE_GATE, HD_DENSE_UP, HD_DENSE_DOWN, s->m->shard->dense_inter);
}

static void route(const model_step *s, int32_t layer) {
    const hd_model_spec *c = s->m->env.spec;
    const hd_weights *w = s->m->env.weights;
    model_activations *t = s->t;
    const own_rows own = own_rows_of(s);
    if (own.n == 0) return;
    model_linear(s, layer, HD_ROUTER, hd_f32(t->router), own.h, own.n);
    s->m->env.ops->moe_topk(
        s->stream, &(hd_moe_topk_args){.expert = t->expert,
                                       .weight = t->expert_weight,
                                       .logits = t->router,
                                       .bias = hd_weights_vector(w, layer, HD_ROUTER_BIAS),
                                       .table = hd_weights_table(w, layer),
                                       .tokens = s->b->device.tokens + own.first,
                                       .rows = own.n,
                                       .rule = c->route});
}

/* Permutes the rows by the slots of their experts. */
static void permute(const model_step *s, int32_t layer) {
    const hd_model_spec *c = s->m->env.spec;
    const hd_router_rule *rule = &c->route;
    const hd_expert_map *map = hd_weights_expert_map(s->m->env.weights, layer);
    model_activations *t = s->t;
    int64_t *rows = s->m->expert_rows;
    const int32_t *live = s->b->device.live;
    const own_rows own = own_rows_of(s);
    const bool counts = layer < c->n_layers;
    s->m->env.ops->moe_permute(
        s->stream,
        &(hd_moe_permute_args){.offset = t->offset,
                               .assignment = t->assignment,
                               .place = t->place,
                               .expert = t->expert,
                               .slot = map->slot,
                               .load = counts ? rows + (int64_t)layer * rule->n_experts : NULL,
                               .live = live ? live + own.first : NULL,
                               .rows = own.n,
                               .top_k = rule->top_k,
                               .n_experts = rule->n_experts,
                               .n_slots = map->n_slots});
}

static bool dispatches(const hd_model *m) {
    return m->in_rows > 0; /* without expert parallelism rows stay on this rank */
}

static hd_dispatch_args dispatched_rows(const model_step *s, int32_t layer) {
    const hd_model_spec *c = s->m->env.spec;
    const model_activations *t = s->t;
    const own_rows own = own_rows_of(s);
    return (hd_dispatch_args){.layer = layer,
                              .x = own.h,
                              .weight = t->expert_weight,
                              .offset = t->offset,
                              .assignment = t->assignment,
                              .rows = own.n,
                              .cols = c->hidden,
                              .top_k = c->route.top_k,
                              .in_x = t->in_x,
                              .in_weight = t->in_weight,
                              .in_offset = t->in_offset,
                              .in_rows = s->m->in_rows,
                              .n_slots = s->m->shard->n_experts};
}

static hd_combine_args combined_rows(const model_step *s) {
    const hd_model_spec *c = s->m->env.spec;
    return (hd_combine_args){.in_y = s->t->in_y,
                             .y = s->t->expert_y,
                             .rows = own_rows_of(s).n,
                             .cols = c->hidden,
                             .top_k = c->route.top_k,
                             .in_rows = s->m->in_rows};
}

/* Sends rows to the ranks of their experts (expert parallelism). */
static void dispatch_send(const model_step *s, int32_t layer) {
    const hd_dispatch_args rows = dispatched_rows(s, layer);
    hd_comm_dispatch_send(s->m->env.comm, s->stream, &rows);
}

static void dispatch_arrive(const model_step *s, int32_t layer) {
    const hd_dispatch_args rows = dispatched_rows(s, layer);
    hd_comm_dispatch_arrive(s->m->env.comm, s->stream, &rows);
}

/* Sends the experts' results back to the ranks of their rows. */
static void combine_send(const model_step *s, int32_t layer) {
    const hd_combine_args rows = combined_rows(s);
    (void)layer;
    hd_comm_combine_send(s->m->env.comm, s->stream, &rows);
}

static void combine_arrive(const model_step *s, int32_t layer) {
    const hd_combine_args rows = combined_rows(s);
    (void)layer;
    hd_comm_combine_arrive(s->m->env.comm, s->stream, &rows);
}

/* Rows that this rank's experts compute: its own rows by choice, or received rows, which are
 * sorted already. */
typedef struct expert_rows {
    hd_rows x, y;
    const float *weight;
    const int32_t *offset, *assignment;
    int32_t n, top_k;
} expert_rows;

static expert_rows rows_of_experts(const model_step *s) {
    const model_activations *t = s->t;
    const int32_t k = s->m->env.spec->route.top_k;
    if (s->m->in_rows) {
        return (expert_rows){t->in_x,       t->in_y, t->in_weight, t->in_offset, NULL,
                             s->m->in_rows, 1};
    }
    const own_rows own = own_rows_of(s);
    return (expert_rows){
        own.h, t->expert_y, t->expert_weight, t->offset, t->assignment, own.n * k, k};
}

/* Grouped GEMM: out = x W_e^T for every sorted place; rows of x are tokens, or sorted
 * places. */
static void expert_linear(const model_step *s, int32_t layer, hd_role role, hd_rows out,
                          hd_rows x, const expert_rows *in, bool by_token) {
    s->m->env.ops->grouped_gemm(
        s->stream,
        &(hd_grouped_gemm_args){.out = out,
                                .x = x,
                                .w = hd_weights_experts(s->m->env.weights, layer, role),
                                .offset = in->offset,
                                .assignment = by_token ? in->assignment : NULL,
                                .top_k = in->top_k,
                                .n_places = in->n});
}

static bool weights_input(const model_step *s) {
    return s->m->env.spec->family == HD_FAMILY_V4;
}

static void experts(const model_step *s, int32_t layer) {
    model_activations *t = s->t;
    const expert_rows in = rows_of_experts(s);
    if (in.n == 0) return;
    expert_linear(s, layer, HD_EXPERT_GATE, t->expert_gate, in.x, &in, true);
    expert_linear(s, layer, HD_EXPERT_UP, t->expert_up, in.x, &in, true);
    s->m->env.ops->swiglu(s->stream,
                          &(hd_swiglu_args){.out = t->expert_gate,
                                            .gate = t->expert_gate,
                                            .up = t->expert_up,
                                            .weight = weights_input(s) ? in.weight : NULL,
                                            .assignment = in.assignment,
                                            .rows = in.n,
                                            .cols = s->m->shard->moe_inter,
                                            .limit = s->m->env.spec->swiglu_limit});
    expert_linear(s, layer, HD_EXPERT_DOWN, in.y, t->expert_gate, &in, false);
}

static bool has_shared(const hd_model *m) {
    return m->env.spec->n_shared > 0;
}

static void shared(const model_step *s, int32_t layer) {
    gated_mlp(s, layer, HD_SHARED_GATE, HD_SHARED_UP, HD_SHARED_DOWN,
              s->m->shard->shared_inter);
}

static void combine_experts(const model_step *s, int32_t layer) {
    const hd_model_spec *c = s->m->env.spec;
    model_activations *t = s->t;
    const own_rows own = own_rows_of(s);
    (void)layer;
    if (own.n == 0) return;
    s->m->env.ops->moe_combine(
        s->stream, &(hd_moe_combine_args){.out = own.y,
                                          .y = t->expert_y,
                                          .shared = c->n_shared ? own.y : (hd_rows){0},
                                          .weight = weights_input(s) ? NULL : t->expert_weight,
                                          .expert = t->expert,
                                          .place = t->place,
                                          .rows = own.n,
                                          .cols = c->hidden,
                                          .top_k = c->route.top_k});
}

static bool has_parts(const hd_model *m) {
    return m->shard->parallel.etp > 1;
}

static bool divides_rows(const hd_model *m) {
    return m->row_parts > 1;
}

/* Gathers y from the ranks that computed the other rows. */
static void gather_rows(const model_step *s, int32_t layer) {
    const own_rows own = own_rows_of(s);
    const int32_t words =
        s->m->env.spec->hidden * hd_act_bytes(s->m->env.ops) / (int32_t)sizeof(float);
    (void)layer;
    hd_comm_all_gather(s->m->env.comm, s->stream,
                       &(hd_all_gather_args){.group = HD_GROUP_TP,
                                             .x = s->t->y.data,
                                             .rows = 1,
                                             .cols = s->b->n_rows * words,
                                             .first = own.first * words,
                                             .own = own.n * words});
}

static const model_stage dense_stages[] = {
    {"ffn_in",   model_ffn_in,     HD_LANE_COMPUTE, NULL,         false},
    {"dense",    dense,            HD_LANE_COMPUTE, NULL,         false},
    {"reduce",   model_all_reduce, HD_LANE_COMM,    has_parts,    true },
    {"gather",   gather_rows,      HD_LANE_COMM,    divides_rows, true },
    {"residual", model_block_out,  HD_LANE_COMPUTE, NULL,         false},
    {NULL,       NULL,             HD_LANE_COMPUTE, NULL,         false},
};

static const model_stage moe_stages[] = {
    {"ffn_in",          model_ffn_in,     HD_LANE_COMPUTE, NULL,         false},
    {"route",           route,            HD_LANE_COMPUTE, NULL,         false},
    {"permute",         permute,          HD_LANE_COMPUTE, NULL,         false},
    {"dispatch send",   dispatch_send,    HD_LANE_COMM,    dispatches,   true },
    {"dispatch arrive", dispatch_arrive,  HD_LANE_COMM,    dispatches,   false},
    {"experts",         experts,          HD_LANE_COMPUTE, NULL,         false},
    {"combine send",    combine_send,     HD_LANE_COMM,    dispatches,   false},
    {"shared",          shared,           HD_LANE_COMPUTE, has_shared,   true },
    {"combine arrive",  combine_arrive,   HD_LANE_COMM,    dispatches,   false},
    {"sum",             combine_experts,  HD_LANE_COMPUTE, NULL,         false},
    {"reduce",          model_all_reduce, HD_LANE_COMM,    has_parts,    true },
    {"gather",          gather_rows,      HD_LANE_COMM,    divides_rows, true },
    {"residual",        model_block_out,  HD_LANE_COMPUTE, NULL,         false},
    {NULL,              NULL,             HD_LANE_COMPUTE, NULL,         false},
};

const model_stage *model_ffn_stages(const hd_layer_spec *layer) {
    return layer->mlp == HD_MLP_DENSE ? dense_stages : moe_stages;
}
