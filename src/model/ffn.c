/* ffn.c - the feed-forward block: a dense MLP, or MoE with routed experts and a shared one.
 *
 * models.md 2.2, 2.3 and 2.12. V4 multiplies the router weight into the input of the
 * expert's down projection, the earlier families into its output. Ranks share MLPs and experts,
 * each by columns; rows.c says which rows they compute. */
#include "model/beside_internal.h"
#include "model/rows_internal.h"

#include "base/checked.h"

/* Rows, and where their input and result are. */
typedef struct ffn_rows {
    model_rows of;
    hd_rows x, y; /* [of.n, hidden] */
} ffn_rows;

static ffn_rows dense_rows(const model_step *s) {
    const model_activations *t = s->t;
    const int32_t hidden = s->m->env.spec->hidden;
    const model_rows of = model_step_rows(s, HD_GROUP_DENSE);
    return (ffn_rows){of, model_rows_in(&of, t->h, t->dense_x, hidden),
                      model_rows_in(&of, t->y, t->dense_y, hidden)};
}

static ffn_rows moe_rows(const model_step *s) {
    const model_activations *t = s->t;
    const int32_t hidden = s->m->env.spec->hidden;
    const model_rows of = model_step_rows(s, HD_GROUP_ETP);
    return (ffn_rows){of, model_rows_in(&of, t->h, t->moe_x, hidden),
                      model_rows_in(&of, t->y, t->moe_y, hidden)};
}

/* Whether the ranks that share an expert also share the shared expert, and its rows. */
static bool has_same_rows(const hd_model *m) {
    return m->shard->parallel.etp == m->shard->parallel.dense_tp;
}

static ffn_rows shared_rows(const model_step *s) {
    return has_same_rows(s->m) ? moe_rows(s) : dense_rows(s);
}

/* The columns of an MLP between its GEMMs: those of this rank among `all` of them, or alone if
 * ranks do not gather them. */
typedef struct inter_columns {
    hd_extent own;
    int32_t all;
} inter_columns;

static inter_columns inter_of(const hd_model *m, hd_group group, hd_extent own, int32_t all) {
    if (model_gathers_columns(m, group)) return (inter_columns){own, all};
    return (inter_columns){
        {0, own.n},
        own.n
    };
}

static inter_columns dense_inter(const hd_model *m) {
    return inter_of(m, HD_GROUP_DENSE, m->shard->dense_inter, m->env.spec->dense_inter);
}

static inter_columns shared_inter(const hd_model *m) {
    const hd_model_spec *c = m->env.spec;
    return inter_of(m, HD_GROUP_DENSE, m->shard->shared_inter, c->n_shared * c->moe_inter);
}

static inter_columns moe_inter(const hd_model *m) {
    return inter_of(m, HD_GROUP_ETP, m->shard->moe_inter, m->env.spec->moe_inter);
}

/* ---- a dense MLP, or the shared expert ---- */

static void mlp_up(const model_step *s, int32_t layer, hd_role gate, hd_role up,
                   const ffn_rows *rows, inter_columns inter) {
    const hd_weights *w = s->m->env.weights;
    model_activations *t = s->t;
    const int32_t n = rows->of.n;
    if (n == 0) return;
    s->m->env.ops->linear_swiglu(
        s->stream,
        &(hd_linear_swiglu_args){.out = model_columns_at(t->inter, inter.own, inter.all),
                                 .gate = t->gate,
                                 .up = t->up,
                                 .x = rows->x,
                                 .gate_w = hd_weights_matrix(w, layer, gate),
                                 .up_w = hd_weights_matrix(w, layer, up),
                                 .rows = n,
                                 .limit = s->m->env.spec->swiglu_limit});
}

static void mlp_down(const model_step *s, int32_t layer, hd_role down, const ffn_rows *rows) {
    const hd_extent out = s->m->shard->dense_out;
    if (rows->of.n == 0) return;
    model_linear(s, layer, down, model_columns_at(rows->y, out, s->m->env.spec->hidden),
                 s->t->inter, rows->of.n);
}

static void gather_inter(const model_step *s, const ffn_rows *rows, inter_columns inter) {
    model_gather_columns(s, HD_GROUP_DENSE, s->t->inter, rows->of.n, inter.own, inter.all);
}

static void dense_up(const model_step *s, int32_t layer) {
    const ffn_rows rows = dense_rows(s);
    mlp_up(s, layer, HD_DENSE_GATE, HD_DENSE_UP, &rows, dense_inter(s->m));
}

static void dense_gather(const model_step *s, int32_t layer) {
    const ffn_rows rows = dense_rows(s);
    (void)layer;
    gather_inter(s, &rows, dense_inter(s->m));
}

static void dense_down(const model_step *s, int32_t layer) {
    const ffn_rows rows = dense_rows(s);
    mlp_down(s, layer, HD_DENSE_DOWN, &rows);
}

static bool shared_is_beside(const hd_model *m) {
    return m->env.spec->n_shared > 0 && has_same_rows(m) &&
           !model_gathers_columns(m, HD_GROUP_DENSE) &&
           !model_rows_are_foreign(m, HD_GROUP_ETP);
}

/* The step that queues the shared expert: beside the routed ones, if it exchanges nothing. */
static model_step shared_step(const model_step *s) {
    return shared_is_beside(s->m) ? model_beside(s) : *s;
}

static void shared_up(const model_step *s, int32_t layer) {
    const ffn_rows rows = shared_rows(s);
    const model_step own = shared_step(s);
    mlp_up(&own, layer, HD_SHARED_GATE, HD_SHARED_UP, &rows, shared_inter(s->m));
}

static void shared_gather(const model_step *s, int32_t layer) {
    const ffn_rows rows = shared_rows(s);
    (void)layer;
    gather_inter(s, &rows, shared_inter(s->m));
}

static void shared_down(const model_step *s, int32_t layer) {
    const ffn_rows rows = shared_rows(s);
    const model_step own = shared_step(s);
    mlp_down(&own, layer, HD_SHARED_DOWN, &rows);
}

/* ---- exchanges of rows and columns ---- */

static void fetch_dense(const model_step *s, int32_t layer) {
    const ffn_rows rows = dense_rows(s);
    (void)layer;
    model_fetch_rows(s, HD_GROUP_DENSE, &rows.of, s->t->dense_x, s->t->h,
                     s->m->env.spec->hidden);
}

/* Whether a dense MLP is a layer's block: else it is the shared expert, whose results others are added to. */
static bool is_dense_block(const hd_model *m, int32_t layer) {
    return m->env.spec->layers[layer].mlp == HD_MLP_DENSE;
}

static void join_dense(const model_step *s, int32_t layer) {
    const ffn_rows rows = dense_rows(s);
    if (is_dense_block(s->m, layer) && model_ffn_joins_later(s, layer)) return;
    model_join_result(s, HD_GROUP_DENSE, rows.y, rows.of.n, s->m->shard->dense_out);
}

static void return_dense(const model_step *s, int32_t layer) {
    const ffn_rows rows = dense_rows(s);
    (void)layer;
    model_return_rows(s, HD_GROUP_DENSE, &rows.of, s->t->y, rows.y, s->b->n_rows,
                      s->m->env.spec->hidden);
}

/* Rows of other attention groups, with their tokens, which choose hashed experts, and phases. */
static void fetch_moe(const model_step *s, int32_t layer) {
    const ffn_rows rows = moe_rows(s);
    (void)layer;
    model_fetch_rows(s, HD_GROUP_ETP, &rows.of, s->t->moe_x, s->t->h, s->m->env.spec->hidden);
    model_fetch_ints(s, HD_GROUP_ETP, &rows.of, s->t->moe_tokens, s->b->device.tokens);
    model_fetch_ints(s, HD_GROUP_ETP, &rows.of, s->t->moe_phases, s->b->device.phase);
}

/* The shared expert's results of the rows of routed experts. */
static void fetch_shared(const model_step *s, int32_t layer) {
    const ffn_rows rows = moe_rows(s);
    (void)layer;
    model_fetch_rows(s, HD_GROUP_ETP, &rows.of, rows.y, s->t->y, s->m->env.spec->hidden);
}

static void join_moe(const model_step *s, int32_t layer) {
    const ffn_rows rows = moe_rows(s);
    if (model_ffn_joins_later(s, layer)) return;
    model_join_result(s, HD_GROUP_ETP, rows.y, rows.of.n, s->m->shard->moe_out);
}

static void return_moe(const model_step *s, int32_t layer) {
    const ffn_rows rows = moe_rows(s);
    (void)layer;
    model_return_rows(s, HD_GROUP_ETP, &rows.of, s->t->y, rows.y, s->b->n_rows,
                      s->m->env.spec->hidden);
}

static void spread(const model_step *s, int32_t layer) {
    (void)layer;
    model_spread_rows(s, s->t->y, s->b->n_rows, s->m->env.spec->hidden);
}

/* ---- routed experts ---- */

/* Only of a rank that routes its own rows. */
static hd_replay_log route_log(const model_step *s, int32_t layer, const model_rows *of) {
    if (of->foreign) return (hd_replay_log){.data = NULL};
    return model_replay_log(s, HD_REPLAY_EXPERTS, layer, of->first);
}

/* The rows whose experts in given are another set than in own; both [rows, top_k]. */
static int64_t count_other(const int32_t *given, const int32_t *own, int32_t rows,
                           int32_t top_k) {
    int64_t other = 0;
    for (int32_t r = 0; r < rows; r++, given += top_k, own += top_k) {
        int32_t found = 0;
        for (int32_t i = 0; i < top_k; i++) {
            for (int32_t j = 0; j < top_k; j++) found += given[i] == own[j];
        }
        other += found < top_k;
    }
    return other;
}

/* The selection that is replayed in this layer, or NULL. Compares it with the router's own. */
static const int32_t *replayed(const model_step *s, hd_moe_topk_args *a, int32_t layer) {
    const model_replay *replay = s->replay;
    if (!replay || !replay->experts || a->table || layer >= s->m->env.spec->n_layers)
        return NULL;
    const int32_t *given = replay->experts + (int64_t)layer * a->rows * a->rule.top_k;
    s->m->env.ops->moe_topk(s->stream, a);
    *replay->routed += a->rows;
    *replay->other_experts += count_other(given, a->expert, a->rows, a->rule.top_k);
    return given;
}

/* The layer whose experts this one predicts, or -1. */
static int32_t next_to_predict(const hd_model *m, int32_t layer) {
    const int32_t next = layer + 1;
    if (!m->env.stage || !hd_expert_stage_predicts(m->env.stage)) return -1;
    if (next >= m->env.spec->n_layers) return -1;
    return m->env.spec->layers[next].mlp == HD_MLP_DENSE ? -1 : next;
}

/* Predicts the experts of the next layer: its router reads the rows of this one. Hashed experts are
 * known. */
static void predict_next(const model_step *s, int32_t layer, hd_moe_topk_args a, hd_rows x) {
    const hd_weights *w = s->m->env.weights;
    const int32_t next = next_to_predict(s->m, layer);
    s->t->next_layer = next;
    if (next < 0) return;
    a.expert = s->t->next_expert;
    a.weight = s->t->next_weight;
    a.bias = hd_weights_vector(w, next, HD_ROUTER_BIAS);
    a.table = hd_weights_table(w, next);
    a.log = (hd_replay_log){.data = NULL};
    a.rule = hd_layer_route(s->m->env.spec, next);
    if (!a.table) model_linear(s, next, HD_ROUTER, hd_f32(s->t->router), x, a.rows);
    s->m->env.ops->moe_topk(s->stream, &a);
}

static void route(const model_step *s, int32_t layer) {
    const hd_model_spec *c = s->m->env.spec;
    const hd_weights *w = s->m->env.weights;
    model_activations *t = s->t;
    const ffn_rows rows = moe_rows(s);
    if (shared_is_beside(s->m)) model_fork(s);
    if (rows.of.n == 0) return;
    model_linear(s, layer, HD_ROUTER, hd_f32(t->router), rows.x, rows.of.n);
    hd_moe_topk_args args = {.expert = t->expert,
                             .weight = t->expert_weight,
                             .logits = t->router,
                             .bias = hd_weights_vector(w, layer, HD_ROUTER_BIAS),
                             .table = hd_weights_table(w, layer),
                             .tokens = rows.of.foreign ? t->moe_tokens
                                                       : s->b->device.tokens + rows.of.first,
                             .log = route_log(s, layer, &rows.of),
                             .rows = rows.of.n,
                             .rule = hd_layer_route(c, layer)};
    hd_moe_topk_args own = args;
    const int32_t *given = replayed(s, &own, layer);
    if (given) {
        own.table = given;
        own.tokens = s->replay->row;
    }
    s->m->env.ops->moe_topk(s->stream, &own);
    predict_next(s, layer, args, rows.x);
}

static void keep_slots(const model_step *s, const hd_moe_permute_args *a) {
    int32_t *to = s->m->acts.slots + (s->t->expert - s->m->acts.choices);
    for (int32_t slot = 0; slot < a->n_slots; slot++) {
        for (int32_t i = a->offset[slot]; i < a->offset[slot + 1]; i++)
            to[a->assignment[i]] = slot;
    }
}

/* Permutes the rows by the slots of their experts. */
static void permute(const model_step *s, int32_t layer) {
    const bool splits = model_splits(s->m);
    const hd_model_spec *c = s->m->env.spec;
    const hd_router_rule rule = hd_layer_route(c, layer);
    const int32_t counters = c->route.n_experts; /* of every layer */
    const hd_expert_map *map = hd_weights_expert_map(s->m->env.weights, layer);
    model_activations *t = s->t;
    const model_rows of = model_step_rows(s, HD_GROUP_ETP);
    const bool drafts = layer >= c->n_layers;
    const int64_t phases = drafts ? HD_N_ROW_PHASES - 1 : 0; /* before this layer's counters */
    const int64_t at = (phases * c->n_layers + layer) * counters;
    const int32_t *phase = s->b->device.phase;
    if (splits) model_split_rows(s, layer);
    const hd_moe_permute_args args = {.offset = t->offset,
                                      .assignment = t->assignment,
                                      .place = t->place,
                                      .expert = t->expert,
                                      .slot = map->slot,
                                      .n_choices = map->n_choices,
                                      .first = splits ? t->first : NULL,
                                      .graph = map->graph,
                                      .n_ranks = map->n_ranks,
                                      .load = s->m->expert_rows + at,
                                      .phase = of.foreign ? t->moe_phases
                                               : phase    ? phase + of.first
                                                          : NULL,
                                      .load_stride =
                                          drafts ? 0 : (int64_t)c->n_layers * counters,
                                      .rows = of.n,
                                      .top_k = rule.top_k,
                                      .n_experts = splits ? counters : rule.n_experts,
                                      .n_slots = map->n_slots};
    s->m->env.ops->moe_permute(s->stream, &args);
    if (s->m->limits.keeps_slots) keep_slots(s, &args);
}

static bool dispatches(const hd_model *m) {
    return m->in_rows > 0 && !m->fetches; /* else rows stay on this rank */
}

/* Whether experts that are elsewhere are fetched. Not where rows travel to all of them. */
static bool are_staged(const hd_model *m) {
    return m->env.stage && (!dispatches(m) || m->shard->parallel.dwdp > 1);
}

static bool are_resident(const hd_model *m) {
    return !are_staged(m);
}

/* Of rows that travel in FP8: as the experts' products round x, if they do. Ranks without experts of a drafter's
 * layer do not know that; what it drafts changes no text. */
static hd_group_format row_format(const hd_model *m, int32_t layer) {
    const hd_expert_table *w = hd_weights_experts(m->env.weights, layer, HD_EXPERT_GATE);
    const hd_group_format own = w ? hd_format_of_x(&w->shape) : (hd_group_format){0};
    return (hd_group_format){HD_E4M3, own.code ? own.scale_type : HD_F32,
                             hd_quant_x_group(&m->env.spec->quant), 0};
}

static bool packs_rows(const hd_model *m) {
    return dispatches(m) && m->shard->parallel.fp8_rows;
}

static void pack(const model_step *s, int32_t layer) {
    const ffn_rows rows = moe_rows(s);
    s->m->env.ops->pack_rows(s->stream, &(hd_pack_rows_args){.out = s->t->packed,
                                                             .x = rows.x,
                                                             .format = row_format(s->m, layer),
                                                             .rows = rows.of.n,
                                                             .cols = s->m->env.spec->hidden});
}

static hd_dispatch_args dispatched_rows(const model_step *s, int32_t layer, int32_t round) {
    const hd_model_spec *c = s->m->env.spec;
    const model_activations *t = s->t;
    const ffn_rows rows = moe_rows(s);
    const int32_t *most = model_round_rows(s);
    hd_dispatch_args a = {.layer = layer,
                          .x = rows.x,
                          .weight = t->expert_weight,
                          .offset = t->offset,
                          .assignment = t->assignment,
                          .rows = rows.of.n,
                          .cols = c->hidden,
                          .top_k = hd_layer_route(c, layer).top_k,
                          .in_x = t->in_x,
                          .in_weight = t->in_weight,
                          .in_offset = t->in_offset,
                          .in_rows = s->m->in_rows,
                          .n_slots = s->m->shard->n_experts,
                          .most = most,
                          .round = round,
                          .rounds = most ? t->n_rounds : NULL};
    if (packs_rows(s->m)) {
        a.x = (hd_rows){.data = t->packed, .type = HD_E4M3};
        a.format = row_format(s->m, layer);
    }
    return a;
}

static hd_combine_args combined_rows(const model_step *s, int32_t layer) {
    const hd_model_spec *c = s->m->env.spec;
    return (hd_combine_args){.in_y = s->t->in_y,
                             .y = s->t->expert_y,
                             .rows = model_step_rows(s, HD_GROUP_ETP).n,
                             .cols = s->m->shard->moe_out.n,
                             .top_k = hd_layer_route(c, layer).top_k,
                             .in_rows = s->m->in_rows};
}

/* Sends rows to the ranks of their experts (expert parallelism). */
static void send_round(const model_step *s, int32_t layer, int32_t round) {
    const hd_dispatch_args rows = dispatched_rows(s, layer, round);
    hd_comm_dispatch_send(s->m->env.comm, s->stream, &rows);
}

static void take_round(const model_step *s, int32_t layer, int32_t round) {
    const hd_dispatch_args rows = dispatched_rows(s, layer, round);
    hd_comm_dispatch_arrive(s->m->env.comm, s->stream, &rows);
}

static void dispatch_send(const model_step *s, int32_t layer) {
    model_plan_rounds(s, hd_layer_route(s->m->env.spec, layer).top_k);
    send_round(s, layer, 0);
}

static void dispatch_arrive(const model_step *s, int32_t layer) {
    if (hd_device_is_host(s->m->env.device)) *s->t->n_rounds = 1; /* if nothing arrives */
    take_round(s, layer, 0);
}

/* Sends the experts' results back to the ranks of their rows. */
static void combine_send(const model_step *s, int32_t layer) {
    const hd_combine_args rows = combined_rows(s, layer);
    hd_comm_combine_send(s->m->env.comm, s->stream, &rows);
}

static void combine_arrive(const model_step *s, int32_t layer) {
    const hd_combine_args rows = combined_rows(s, layer);
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

static expert_rows rows_of_experts(const model_step *s, int32_t layer) {
    const model_activations *t = s->t;
    const int32_t k = hd_layer_route(s->m->env.spec, layer).top_k;
    if (dispatches(s->m)) {
        return (expert_rows){
            t->in_x, t->in_y, t->in_weight, t->in_offset, NULL, model_arriving_rows(s), 1};
    }
    const ffn_rows rows = moe_rows(s);
    return (expert_rows){
        rows.x, t->expert_y, t->expert_weight, t->offset, t->assignment, rows.of.n * k, k};
}

static bool weights_input(const model_step *s) {
    return hd_is_hybrid(s->m->env.spec);
}

/* Rows are tokens up to the gate, and sorted places after it. A rank may have none of a drafter's
 * experts, which are fewer than the model's: then no row comes. */
static void experts_up(const model_step *s, int32_t layer) {
    const hd_weights *w = s->m->env.weights;
    model_activations *t = s->t;
    const expert_rows in = rows_of_experts(s, layer);
    const inter_columns inter = moe_inter(s->m);
    if (in.n == 0 || !hd_weights_experts(w, layer, HD_EXPERT_GATE)) return;
    s->m->env.ops->grouped_swiglu(
        s->stream, &(hd_grouped_swiglu_args){
                       .out = model_columns_at(t->expert_inter, inter.own, inter.all),
                       .gate = t->expert_gate,
                       .up = t->expert_up,
                       .x = in.x,
                       .gate_w = hd_weights_experts(w, layer, HD_EXPERT_GATE),
                       .up_w = hd_weights_experts(w, layer, HD_EXPERT_UP),
                       .offset = in.offset,
                       .assignment = in.assignment,
                       .weight = weights_input(s) ? in.weight : NULL,
                       .top_k = in.top_k,
                       .n_places = in.n,
                       .limit = s->m->env.spec->swiglu_limit});
}

/* Only rows that have arrived, where the host can read how many. */
static int32_t arrived(const model_step *s, int32_t n) {
    if (!dispatches(s->m) || !hd_device_is_host(s->m->env.device)) return n;
    return hd_max_i32(0, hd_min_i32(n, s->t->in_offset[s->m->shard->n_experts]));
}

static void experts_gather(const model_step *s, int32_t layer) {
    const inter_columns inter = moe_inter(s->m);
    const int32_t n = arrived(s, rows_of_experts(s, layer).n);
    model_gather_columns(s, HD_GROUP_ETP, s->t->expert_inter, n, inter.own, inter.all);
}

static void experts_down(const model_step *s, int32_t layer) {
    const expert_rows in = rows_of_experts(s, layer);
    const hd_expert_table *w = hd_weights_experts(s->m->env.weights, layer, HD_EXPERT_DOWN);
    if (in.n == 0 || !w) return;
    s->m->env.ops->grouped_gemm(s->stream, &(hd_grouped_gemm_args){.out = in.y,
                                                                   .x = s->t->expert_inter,
                                                                   .w = w,
                                                                   .offset = in.offset,
                                                                   .top_k = in.top_k,
                                                                   .n_places = in.n});
}

/* ---- experts that are elsewhere ---- */

/* The places of a wave, among those of all experts. Rows that were received are sorted. */
static void wave_up(const model_step *s, const expert_rows *in, const hd_expert_wave *wave) {
    model_activations *t = s->t;
    const int64_t at = (int64_t)wave->first_place * wave->gate->shape.rows;
    const int64_t sorted = in->assignment ? 0 : wave->first_place;
    const int32_t *assignment = in->assignment ? in->assignment + wave->first_place : NULL;
    s->m->env.ops->grouped_swiglu(
        s->stream,
        &(hd_grouped_swiglu_args){.out = hd_rows_at(t->expert_inter, at),
                                  .gate = hd_rows_at(t->expert_gate, at),
                                  .up = hd_rows_at(t->expert_up, at),
                                  .x = hd_rows_at(in->x, sorted * wave->gate->shape.cols),
                                  .gate_w = wave->gate,
                                  .up_w = wave->up,
                                  .offset = wave->offset,
                                  .assignment = assignment,
                                  .weight = weights_input(s) ? in->weight + sorted : NULL,
                                  .top_k = in->top_k,
                                  .n_places = wave->n_places,
                                  .limit = s->m->env.spec->swiglu_limit});
}

static void wave_down(const model_step *s, const expert_rows *in, const hd_expert_wave *wave) {
    const int64_t at = wave->first_place;
    s->m->env.ops->grouped_gemm(
        s->stream, &(hd_grouped_gemm_args){
                       .out = hd_rows_at(in->y, at * wave->down->shape.rows),
                       .x = hd_rows_at(s->t->expert_inter, at * wave->down->shape.cols),
                       .w = wave->down,
                       .offset = wave->offset,
                       .top_k = in->top_k,
                       .n_places = wave->n_places});
}

/* Both products of all experts, in waves. A rank may have none of a drafter's. */
static void experts_staged(const model_step *s, int32_t layer) {
    hd_expert_stage *stage = s->m->env.stage;
    expert_rows in = rows_of_experts(s, layer);
    hd_expert_wave wave;
    hd_err err = {0};
    in.n = arrived(s, in.n);
    if (in.n == 0) return;
    const int32_t next = s->t->next_layer;
    const int32_t n_next =
        next < 0 ? 0 : in.n / in.top_k * hd_layer_route(s->m->env.spec, next).top_k;
    hd_expert_stage_begin(stage,
                          &(hd_expert_layer){.ops = s->m->env.ops,
                                             .stream = s->stream,
                                             .layer = layer,
                                             .offset = in.offset,
                                             .n_places = in.n,
                                             .x = in.x,
                                             .y = in.y,
                                             .assignment = in.assignment,
                                             .weight = weights_input(s) ? in.weight : NULL,
                                             .top_k = in.top_k,
                                             .next_choices = n_next ? s->t->next_expert : NULL,
                                             .n_next = n_next,
                                             .next = next});
    while (hd_expert_stage_next(stage, &wave, &err) == HD_OK && wave.n > 0) {
        if (wave.n_places == 0) continue;
        wave_up(s, &in, &wave);
        wave_down(s, &in, &wave);
    }
    if (err.status != HD_OK) hd_stream_fail(s->stream, err.status, err.msg);
}

/* The rows that had no room in the first round; no other micro-batch's rows travel meanwhile. Products
 * are in the compute lane, as others use their scratch. */
static void more_rounds(const model_step *s, int32_t layer) {
    const int32_t n = model_n_rounds(s);
    model_step by_turns = *s, *k = &by_turns;
    for (int32_t round = 1; round < n; round++) {
        model_enter_lane(k, HD_LANE_COMM);
        send_round(k, layer, round);
        take_round(k, layer, round);
        model_enter_lane(k, HD_LANE_COMPUTE);
        if (are_staged(s->m)) {
            experts_staged(k, layer);
        } else {
            experts_up(k, layer);
        }
        if (model_gathers_columns(s->m, HD_GROUP_ETP)) {
            model_enter_lane(k, HD_LANE_COMM);
            experts_gather(k, layer);
            model_enter_lane(k, HD_LANE_COMPUTE);
        }
        if (are_resident(s->m)) experts_down(k, layer);
        model_enter_lane(k, HD_LANE_COMM);
        combine_send(k, layer);
        combine_arrive(k, layer);
    }
    model_enter_lane(k, HD_LANE_COMPUTE);
}

static void combine_experts(const model_step *s, int32_t layer) {
    const hd_model_spec *c = s->m->env.spec;
    model_activations *t = s->t;
    const ffn_rows rows = moe_rows(s);
    const hd_rows y = model_columns_at(rows.y, s->m->shard->moe_out, c->hidden);
    if (shared_is_beside(s->m)) model_join(s);
    if (rows.of.n == 0) return;
    s->m->env.ops->moe_combine(
        s->stream, &(hd_moe_combine_args){.out = y,
                                          .y = t->expert_y,
                                          .shared = c->n_shared ? y : (hd_rows){0},
                                          .weight = weights_input(s) ? NULL : t->expert_weight,
                                          .expert = t->expert,
                                          .place = t->place,
                                          .rows = rows.of.n,
                                          .cols = s->m->shard->moe_out.n,
                                          .top_k = hd_layer_route(c, layer).top_k});
}

/* ---- what a model needs ---- */

static bool has_shared(const hd_model *m) {
    return m->env.spec->n_shared > 0;
}

/* Whether an exchange of rows takes both of its stages: a stage that does nothing would still wait for
 * its lane. */
static bool has_two_sides(const hd_model *m) {
    return dispatches(m) && !m->env.comm->one_sided;
}

static bool has_foreign_dense(const hd_model *m) {
    return model_rows_are_foreign(m, HD_GROUP_DENSE);
}

static bool has_foreign_moe(const hd_model *m) {
    return model_rows_are_foreign(m, HD_GROUP_ETP);
}

static bool gathers_dense(const hd_model *m) {
    return model_gathers_columns(m, HD_GROUP_DENSE);
}

static bool gathers_experts(const hd_model *m) {
    return model_gathers_columns(m, HD_GROUP_ETP);
}

static bool gathers_shared(const hd_model *m) {
    return has_shared(m) && gathers_dense(m);
}

static bool shares_dense(const hd_model *m) {
    return model_shares(m, HD_GROUP_DENSE);
}

static bool shares_experts(const hd_model *m) {
    return model_shares(m, HD_GROUP_ETP);
}

static bool spreads_dense(const hd_model *m) {
    return model_rows_are_few(m, HD_GROUP_DENSE);
}

static bool spreads_moe(const hd_model *m) {
    return model_rows_are_few(m, HD_GROUP_ETP);
}

/* The shared expert's results are complete before those of the routed ones, if other ranks
 * compute them. */
static bool has_own_shared(const hd_model *m) {
    return has_shared(m) && !has_same_rows(m);
}

static bool fetches_for_shared(const hd_model *m) {
    return has_own_shared(m) && has_foreign_dense(m);
}

static bool joins_shared(const hd_model *m) {
    return has_own_shared(m) && shares_dense(m);
}

static bool spreads_shared(const hd_model *m) {
    return has_own_shared(m) && spreads_dense(m);
}

static bool fetches_shared(const hd_model *m) {
    return has_own_shared(m) && has_foreign_moe(m);
}

static const model_stage dense_stages[] = {
    {"ffn_in",   model_ffn_in,    HD_LANE_COMPUTE, NULL,              false},
    {"fetch",    fetch_dense,     HD_LANE_COMM,    has_foreign_dense, true },
    {"up",       dense_up,        HD_LANE_COMPUTE, NULL,              false},
    {"gather",   dense_gather,    HD_LANE_COMM,    gathers_dense,     true },
    {"down",     dense_down,      HD_LANE_COMPUTE, NULL,              false},
    {"join",     join_dense,      HD_LANE_COMM,    shares_dense,      true },
    {"return",   return_dense,    HD_LANE_COMM,    has_foreign_dense, false},
    {"spread",   spread,          HD_LANE_COMM,    spreads_dense,     true },
    {"residual", model_block_out, HD_LANE_COMPUTE, NULL,              false},
    {NULL,       NULL,            HD_LANE_COMPUTE, NULL,              false},
};

static const model_stage moe_stages[] = {
    {"ffn_in",          model_ffn_in,        HD_LANE_COMPUTE, NULL,                  false},
    {"fetch",           fetch_moe,           HD_LANE_COMM,    has_foreign_moe,       true },
    {"route",           route,               HD_LANE_COMPUTE, NULL,                  false},
    {"count",           model_count_rows,    HD_LANE_COMPUTE, model_splits_together, false},
    {"gather counts",   model_gather_counts, HD_LANE_COMM,    model_splits_together, true },
    {"permute",         permute,             HD_LANE_COMPUTE, NULL,                  false},
    {"pack",            pack,                HD_LANE_COMPUTE, packs_rows,            false},
    {"dispatch send",   dispatch_send,       HD_LANE_COMM,    dispatches,            true },
    {"dispatch arrive", dispatch_arrive,     HD_LANE_COMM,    has_two_sides,         false},
    {"staged experts",  experts_staged,      HD_LANE_COMPUTE, are_staged,            false},
    {"experts",         experts_up,          HD_LANE_COMPUTE, are_resident,          false},
    {"gather experts",  experts_gather,      HD_LANE_COMM,    gathers_experts,       true },
    {"down",            experts_down,        HD_LANE_COMPUTE, are_resident,          false},
    {"combine send",    combine_send,        HD_LANE_COMM,    has_two_sides,         false},
    {"fetch dense",     fetch_dense,         HD_LANE_COMM,    fetches_for_shared,    true },
    {"shared",          shared_up,           HD_LANE_COMPUTE, has_shared,            false},
    {"gather shared",   shared_gather,       HD_LANE_COMM,    gathers_shared,        true },
    {"down",            shared_down,         HD_LANE_COMPUTE, has_shared,            true },
    {"join shared",     join_dense,          HD_LANE_COMM,    joins_shared,          true },
    {"return shared",   return_dense,        HD_LANE_COMM,    fetches_for_shared,    false},
    {"spread shared",   spread,              HD_LANE_COMM,    spreads_shared,        true },
    {"fetch shared",    fetch_shared,        HD_LANE_COMM,    fetches_shared,        true },
    {"combine arrive",  combine_arrive,      HD_LANE_COMM,    dispatches,            true },
    {"more rounds",     more_rounds,         HD_LANE_COMPUTE, dispatches,            false},
    {"sum",             combine_experts,     HD_LANE_COMPUTE, NULL,                  false},
    {"join",            join_moe,            HD_LANE_COMM,    shares_experts,        true },
    {"return",          return_moe,          HD_LANE_COMM,    has_foreign_moe,       false},
    {"spread",          spread,              HD_LANE_COMM,    spreads_moe,           true },
    {"residual",        model_block_out,     HD_LANE_COMPUTE, NULL,                  false},
    {NULL,              NULL,                HD_LANE_COMPUTE, NULL,                  false},
};

const model_stage *model_ffn_stages(const hd_layer_spec *layer) {
    return layer->mlp == HD_MLP_DENSE ? dense_stages : moe_stages;
}
