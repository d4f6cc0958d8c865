/* ffn_back.c - backwards through the feed-forward block: dense MLP, router, experts. */
#include "model/backward/backward_internal.h"

typedef struct mlp_roles {
    hd_role gate, up, down;
} mlp_roles;

static const mlp_roles dense_roles = {HD_DENSE_GATE, HD_DENSE_UP, HD_DENSE_DOWN};
static const mlp_roles shared_roles = {HD_SHARED_GATE, HD_SHARED_UP, HD_SHARED_DOWN};

/* The forward pass leaves t->inter as the input of `down`. Where that is t->gate, gate and up are
 * computed again. */
static void back_mlp(const back_step *k, int32_t layer, const mlp_roles *r, int32_t inter) {
    const model_step *s = k->s;
    const backward_activations *d = &k->b->d;
    const model_activations *t = s->t;
    const int32_t n = s->b->n_rows;
    back_linear(k, layer, r->down, d->gate, false, hd_f32(d->y), t->inter, n);
    if (t->inter.data == t->gate.data) {
        model_linear(s, layer, r->gate, t->gate, t->h, n);
        model_linear(s, layer, r->up, t->up, t->h, n);
    }
    k->b->ops->swiglu_back(s->stream,
                           &(hd_swiglu_back_args){.dgate = d->gate,
                                                  .dup = d->up,
                                                  .g = hd_f32(d->gate),
                                                  .gate = t->gate,
                                                  .up = t->up,
                                                  .rows = n,
                                                  .cols = inter,
                                                  .limit = s->m->env.spec->swiglu_limit});
    back_linear(k, layer, r->gate, d->h, false, hd_f32(d->gate), t->h, n);
    back_linear(k, layer, r->up, d->h, true, hd_f32(d->up), t->h, n);
}

void back_dense(const back_step *k, int32_t layer) {
    back_mlp(k, layer, &dense_roles, k->s->m->shard->dense_inter.n);
}

/* ---- experts ---- */

/* dx = g W_e by sorted place, and the experts' gradients; rows of x are tokens or places. */
static void back_experts(const back_step *k, int32_t layer, hd_role role, float *dx, float *g,
                         hd_rows x, bool by_token) {
    const model_step *s = k->s;
    const hd_expert_table *w = hd_weights_experts(s->m->env.weights, layer, role);
    const int32_t top_k = s->m->env.spec->route.top_k;
    float *dw = hd_gradients_at(k->g, layer, role);
    if (dw) {
        k->b->ops->grouped_weight_grad(
            s->stream,
            &(hd_grouped_weight_grad_args){.dw = dw,
                                           .g = hd_f32(g),
                                           .x = x,
                                           .offset = s->t->offset,
                                           .assignment = by_token ? s->t->assignment : NULL,
                                           .n_slots = w->n,
                                           .n_rows = w->shape.rows,
                                           .cols = w->shape.cols,
                                           .top_k = top_k,
                                           .rows = s->b->n_rows,
                                           .choice = s->t->assignment,
                                           .sums = back_sums(k)});
    }
    k->b->ops->grouped_gemm_back(
        s->stream, &(hd_grouped_gemm_back_args){.dx = dx,
                                                .g = hd_f32(g),
                                                .w = w,
                                                .offset = s->t->offset,
                                                .n_places = s->b->n_rows * top_k});
}

static void expert_again(const back_step *k, int32_t layer, hd_role role, hd_rows out) {
    const model_step *s = k->s;
    const int32_t top_k = s->m->env.spec->route.top_k;
    s->m->env.ops->grouped_gemm(
        s->stream,
        &(hd_grouped_gemm_args){.out = out,
                                .x = s->t->h,
                                .w = hd_weights_experts(s->m->env.weights, layer, role),
                                .offset = s->t->offset,
                                .assignment = s->t->assignment,
                                .top_k = top_k,
                                .n_places = s->b->n_rows * top_k});
}

/* From d.y to the gradients of the experts, of d.expert_weight, and of d.expert_x by place. */
static void back_routed(const back_step *k, int32_t layer) {
    const model_step *s = k->s;
    const hd_model_spec *c = s->m->env.spec;
    const backward_activations *d = &k->b->d;
    const model_activations *t = s->t;
    const bool weights_input = c->family == HD_FAMILY_V4; /* as in ffn.c */
    const int32_t places = s->b->n_rows * c->route.top_k;
    k->b->ops->moe_combine_back(
        s->stream,
        &(hd_moe_combine_back_args){.dy = d->expert_y,
                                    .dweight = weights_input ? NULL : d->expert_weight,
                                    .g = hd_f32(d->y),
                                    .y = t->expert_y,
                                    .weight = weights_input ? NULL : t->expert_weight,
                                    .place = t->place,
                                    .rows = s->b->n_rows,
                                    .cols = c->hidden,
                                    .top_k = c->route.top_k});
    back_experts(k, layer, HD_EXPERT_DOWN, d->expert_gate, d->expert_y, t->expert_inter, false);
    if (t->expert_inter.data == t->expert_gate.data) {
        expert_again(k, layer, HD_EXPERT_GATE, t->expert_gate);
        expert_again(k, layer, HD_EXPERT_UP, t->expert_up);
    }
    k->b->ops->swiglu_back(
        s->stream, &(hd_swiglu_back_args){.dgate = d->expert_gate,
                                          .dup = d->expert_up,
                                          .dweight = weights_input ? d->expert_weight : NULL,
                                          .g = hd_f32(d->expert_gate),
                                          .gate = t->expert_gate,
                                          .up = t->expert_up,
                                          .weight = weights_input ? t->expert_weight : NULL,
                                          .assignment = t->assignment,
                                          .rows = places,
                                          .cols = s->m->shard->moe_inter.n,
                                          .limit = c->swiglu_limit});
    back_experts(k, layer, HD_EXPERT_GATE, d->expert_x, d->expert_gate, t->h, true);
    back_experts(k, layer, HD_EXPERT_UP, d->expert_y, d->expert_up, t->h, true);
    back_add(k, d->expert_x, d->expert_y, places, c->hidden);
}

/* d.h, or d.h += with `more`, = the sum of a token's places in order of expert number */
static void sum_places(const back_step *k, bool more) {
    const model_step *s = k->s;
    const hd_model_spec *c = s->m->env.spec;
    const backward_activations *d = &k->b->d;
    s->m->env.ops->moe_combine(
        s->stream, &(hd_moe_combine_args){.out = hd_f32(d->h),
                                          .y = hd_f32(d->expert_x),
                                          .shared = more ? hd_f32(d->h) : (hd_rows){0},
                                          .expert = s->t->expert,
                                          .place = s->t->place,
                                          .rows = s->b->n_rows,
                                          .cols = c->hidden,
                                          .top_k = c->route.top_k});
}

void back_moe(const back_step *k, int32_t layer) {
    const model_step *s = k->s;
    const hd_model_spec *c = s->m->env.spec;
    const backward_activations *d = &k->b->d;
    if (c->n_shared) back_mlp(k, layer, &shared_roles, s->m->shard->shared_inter.n);
    back_routed(k, layer);
    sum_places(k, c->n_shared > 0);
    k->b->ops->moe_topk_back(s->stream, &(hd_moe_topk_back_args){.dlogits = d->router,
                                                                 .dweight = d->expert_weight,
                                                                 .logits = s->t->router,
                                                                 .expert = s->t->expert,
                                                                 .rows = s->b->n_rows,
                                                                 .rule = c->route});
    back_linear(k, layer, HD_ROUTER, d->h, true, hd_f32(d->router), s->t->h, s->b->n_rows);
}
