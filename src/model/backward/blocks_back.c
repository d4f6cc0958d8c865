/* blocks_back.c - backwards through the residual around a block, and operator helpers. */
#include "base/checked.h"
#include "model/backward/backward_internal.h"

void back_add(const back_step *k, float *x, const float *y, int32_t rows, int32_t cols) {
    k->s->m->env.ops->add(
        k->s->stream,
        &(hd_add_args){
            .x = hd_f32(x), .y = hd_f32(y), .rows = rows, .cols = cols, .repeat = 1});
}

hd_seqs back_seqs(const back_step *k) {
    const hd_batch *b = k->s->b;
    hd_seqs out = {b->n_seqs, b->device.first_row, b->device.pos, 0};
    for (int32_t i = 0; i < out.n; i++) {
        const int32_t rows = b->host.first_row[i + 1] - b->host.first_row[i];
        out.most_rows = hd_max_i32(out.most_rows, rows);
    }
    return out;
}

hd_row_sums back_sums(const back_step *k) {
    const hd_batch *b = k->s->b;
    const hd_seqs rows = {b->n_seqs, b->device.first_row, b->device.pos, 0};
    return (hd_row_sums){b->n_logits ? k->logits : rows, k->b->d.parts, k->b->d.n_parts};
}

/* The gradient of a matrix, of rows of the step. */
static void back_weight(const back_step *k, hd_weight_grad_args a) {
    a.sums = back_sums(k);
    if (a.dw) k->b->ops->weight_grad(k->s->stream, &a);
}

void back_matrix(const back_step *k, float *dw, hd_rows g, hd_rows x, int32_t rows,
                 int32_t n_rows, int32_t cols) {
    back_weight(k, (hd_weight_grad_args){.dw = dw,
                                         .left = g,
                                         .right = x,
                                         .rows = rows,
                                         .heads = 1,
                                         .n_rows = n_rows,
                                         .cols = cols,
                                         .left_head = n_rows,
                                         .right_head = cols});
}

/* linear_heads with `transpose` */
static void back_product(const back_step *k, const hd_linear_heads_args *a) {
    if (k->b->ops->linear_back) {
        k->b->ops->linear_back(k->s->stream, a);
    } else {
        k->s->m->env.ops->linear_heads(k->s->stream, a);
    }
}

void back_heads(const back_step *k, int32_t layer, hd_role role,
                const hd_linear_heads_args *forward, float *dx, const float *g) {
    const hd_linear_heads_args *f = forward;
    const hd_rows grad = hd_f32(g);
    back_weight(k, (hd_weight_grad_args){.dw = hd_gradients_at(k->g, layer, role),
                                         .left = f->transpose ? f->x : grad,
                                         .right = f->transpose ? grad : f->x,
                                         .rows = f->rows,
                                         .heads = f->heads,
                                         .n_rows = f->n_rows,
                                         .cols = f->w->cols,
                                         .first_row = f->first_row,
                                         .head_rows = f->head_rows,
                                         .left_head = f->transpose ? f->x_head : f->out_head,
                                         .right_head = f->transpose ? f->out_head : f->x_head});
    hd_linear_heads_args back = *f;
    back.out = hd_f32(dx);
    back.x = grad;
    back.out_head = f->x_head;
    back.x_head = f->out_head;
    back.transpose = !f->transpose;
    if (back.transpose) {
        back_product(k, &back);
    } else {
        k->s->m->env.ops->linear_heads(k->s->stream, &back);
    }
}

void back_input(const back_step *k, int32_t layer, hd_role role, hd_rows dx, hd_rows g,
                int32_t rows) {
    const hd_weight *w = hd_weights_matrix(k->s->m->env.weights, layer, role);
    back_product(k, &(hd_linear_heads_args){.out = dx,
                                            .x = g,
                                            .w = w,
                                            .rows = rows,
                                            .heads = 1,
                                            .n_rows = w->rows,
                                            .head_rows = w->rows,
                                            .out_head = w->cols,
                                            .x_head = w->rows,
                                            .transpose = true});
}

void back_linear(const back_step *k, int32_t layer, hd_role role, float *dx, bool more,
                 hd_rows g, hd_rows x, int32_t rows) {
    const hd_weight *w = hd_weights_matrix(k->s->m->env.weights, layer, role);
    float *out = more ? k->b->d.term : dx;
    back_matrix(k, hd_gradients_at(k->g, layer, role), g, x, rows, w->rows, w->cols);
    if (!dx) return;
    back_input(k, layer, role, hd_f32(out), g, rows);
    if (more) back_add(k, dx, out, rows, w->cols);
}

void back_norm(const back_step *k, int32_t layer, hd_role role, hd_rows dx, hd_rows g,
               hd_rows x, int32_t rows, int32_t cols, float eps) {
    k->b->ops->rms_norm_back(
        k->s->stream,
        &(hd_rms_norm_back_args){.dx = dx,
                                 .dweight = hd_gradients_at(k->g, layer, role),
                                 .g = g,
                                 .x = x,
                                 .weight = hd_weights_vector(k->s->m->env.weights, layer, role),
                                 .scale = k->b->d.norm_scale,
                                 .rows = rows,
                                 .cols = cols,
                                 .eps = eps,
                                 .sums = back_sums(k)});
}

void back_rope(const back_step *k, const float *cos_sin, float *x, int32_t at, int32_t heads,
               int32_t head_width) {
    const hd_rows first = hd_f32(x + at);
    const hd_model_spec *c = k->s->m->env.spec;
    k->s->m->env.ops->rope(k->s->stream, &(hd_rope_args){.out = first,
                                                         .x = first,
                                                         .cos_sin = cos_sin,
                                                         .rows = k->s->b->n_rows,
                                                         .heads = heads,
                                                         .pairs = c->rope_dim / 2,
                                                         .out_head = head_width,
                                                         .x_head = head_width,
                                                         .half_split = c->rope_half_split,
                                                         .inverse = true});
}

/* ---- a block with plain residual ---- */

static void back_plain(const back_step *k, int32_t layer, int32_t block, back_block_fn *fn) {
    const hd_model_spec *c = k->s->m->env.spec;
    const backward_activations *d = &k->b->d;
    const int32_t n = k->s->b->n_rows;
    hd_stream_copy(k->s->stream, d->y, d->x, (size_t)n * (size_t)c->hidden * sizeof *d->y);
    fn(k, layer);
    back_norm(k, layer, block ? HD_FFN_NORM : HD_ATTN_NORM, hd_f32(d->h), hd_f32(d->h),
              hd_f32(backward_kept(k->b, layer, block)), n, c->hidden, c->norm_eps);
    back_add(k, d->x, d->h, n, c->hidden);
}

/* ---- hyper-connections ---- */

typedef struct hc_roles {
    hd_role norm, fn, base, scale;
} hc_roles;

static const hc_roles roles[] = {
    {HD_ATTN_NORM, HD_HC_ATTN_FN, HD_HC_ATTN_BASE, HD_HC_ATTN_SCALE},
    {HD_FFN_NORM,  HD_HC_FFN_FN,  HD_HC_FFN_BASE,  HD_HC_FFN_SCALE }
};

static void back_mix(const back_step *k, int32_t layer, const hc_roles *r, const float *x) {
    const hd_model_spec *c = k->s->m->env.spec;
    const hd_weights *w = k->s->m->env.weights;
    const backward_activations *d = &k->b->d;
    const int32_t n = 2 * c->hc_mult + c->hc_mult * c->hc_mult, wide = c->hc_mult * c->hidden;
    float *dfn = hd_gradients_at(k->g, layer, r->fn);
    k->b->ops->hc_pre_back(
        k->s->stream, &(hd_hc_pre_back_args){.dx = d->x,
                                             .dmix = d->mix,
                                             .dscale = hd_gradients_at(k->g, layer, r->scale),
                                             .dbase = hd_gradients_at(k->g, layer, r->base),
                                             .part = d->part,
                                             .g = hd_f32(d->h),
                                             .dpost = d->post,
                                             .dcomb = d->comb,
                                             .x = hd_f32(x),
                                             .fn = hd_weights_vector(w, layer, r->fn),
                                             .scale = hd_weights_vector(w, layer, r->scale),
                                             .base = hd_weights_vector(w, layer, r->base),
                                             .rows = k->s->b->n_rows,
                                             .cols = c->hidden,
                                             .hc = c->hc_mult,
                                             .iters = c->hc_sinkhorn_iters,
                                             .norm_eps = c->norm_eps,
                                             .eps = c->hc_eps,
                                             .sums = back_sums(k)});
    back_matrix(k, dfn, hd_f32(d->mix), hd_f32(x), k->s->b->n_rows, n, wide);
}

static void back_streams(const back_step *k, int32_t layer, int32_t block, back_block_fn *fn) {
    const hd_model_spec *c = k->s->m->env.spec;
    const backward_activations *d = &k->b->d;
    const hc_roles *r = &roles[block];
    const float *x = backward_kept(k->b, layer, block);
    const int32_t n = k->s->b->n_rows;
    k->b->ops->hc_post_back(k->s->stream, &(hd_hc_post_back_args){.dx = d->x,
                                                                  .dy = d->y,
                                                                  .dpost = d->post,
                                                                  .dcomb = d->comb,
                                                                  .g = hd_f32(d->x),
                                                                  .x = hd_f32(x),
                                                                  .y = k->s->t->y,
                                                                  .post = k->s->t->post,
                                                                  .comb = k->s->t->comb,
                                                                  .rows = n,
                                                                  .cols = c->hidden,
                                                                  .hc = c->hc_mult});
    fn(k, layer);
    model_mix_streams(k->s, layer, r->fn, hd_f32(d->mixed), hd_f32(x)); /* again */
    back_norm(k, layer, r->norm, hd_f32(d->h), hd_f32(d->h), hd_f32(d->mixed), n, c->hidden,
              c->norm_eps);
    back_mix(k, layer, r, x);
}

void back_through(const back_step *k, int32_t layer, int32_t block, back_block_fn *fn) {
    if (k->s->m->env.spec->hc_mult) {
        back_streams(k, layer, block, fn);
    } else {
        back_plain(k, layer, block, fn);
    }
}

void back_low_query(const back_step *k, int32_t layer, float eps) {
    const model_step *s = k->s;
    const backward_activations *d = &k->b->d;
    const int32_t n = s->b->n_rows, rank = s->m->env.spec->q_rank;
    back_linear(k, layer, HD_Q_B, d->q_low, false, hd_f32(d->q), s->t->q_low, n);
    const bool kept = s->t->q_low_raw.data != s->t->q_low.data;
    const hd_rows raw = kept ? s->t->q_low_raw : hd_f32(d->q_low_raw);
    if (!kept) model_linear(s, layer, HD_Q_A, raw, s->t->h, n);
    back_norm(k, layer, HD_Q_A_NORM, hd_f32(d->q_low), hd_f32(d->q_low), raw, n, rank, eps);
    back_linear(k, layer, HD_Q_A, d->h, false, hd_f32(d->q_low), s->t->h, n);
}
