/* mtp_back.c - backwards through the input of the MTP layer, to the main model's last residual. What
 * the layer shares with the main model gets its gradients apart: see gradients.h. */
#include "model/backward/backward_internal.h"

void back_mtp_leave(const back_step *k) {
    const model_step *s = k->s;
    const size_t n = (size_t)s->b->n_rows * (size_t)model_streams(s->m->env.spec) *
                     (size_t)s->m->env.spec->hidden;
    hd_stream_copy(s->stream, s->t->x.data, k->b->last, n * sizeof(float));
}

/* The residual, and what mtp.c derives from it. */
void back_mtp_again(const back_step *k) {
    const model_step *s = k->s;
    const hd_model_spec *c = s->m->env.spec;
    back_mtp_leave(k);
    if (c->hc_mult) return;
    model_norm(s, HD_GLOBAL, HD_FINAL_NORM, s->t->h, s->t->x, s->b->n_rows, c->hidden);
}

/* From g, the gradient of the normed embedding, which lies `stride` apart, to the table. */
static void back_embedding(const back_step *k, int32_t layer, const float *g, int64_t stride) {
    const model_step *s = k->s;
    const hd_model_env *env = &s->m->env;
    const backward_activations *d = &k->b->d;
    const int32_t n = s->b->n_rows, cols = env->spec->hidden;
    float *dtable = hd_gradients_of_drafts(k->g, HD_EMBED);
    env->ops->embed(s->stream, &(hd_embed_args){.out = hd_f32(d->mixed),
                                                .table = hd_weights_matrix(env->weights,
                                                                           HD_GLOBAL, HD_EMBED),
                                                .tokens = s->b->device.next_tokens,
                                                .rows = n,
                                                .copies = 1});
    back_norm(k, layer, HD_MTP_EMBED_NORM, hd_f32(d->y), hd_rows_strided(hd_f32(g), stride),
              hd_f32(d->mixed), n, cols, env->spec->norm_eps);
    if (!dtable || k->detached) return;
    k->b->ops->embed_back(s->stream, &(hd_embed_back_args){.dtable = dtable,
                                                           .g = hd_f32(d->y),
                                                           .tokens = s->b->device.next_tokens,
                                                           .rows = n,
                                                           .copies = 1,
                                                           .cols = cols});
}

/* V3: x = W [norm(embedding), norm(h)], h the final norm of the residual */
static void back_v3(const back_step *k, int32_t layer) {
    const model_step *s = k->s;
    const hd_model_spec *c = s->m->env.spec;
    const backward_activations *d = &k->b->d;
    const int32_t n = s->b->n_rows, cols = c->hidden;
    back_linear(k, layer, HD_MTP_PROJ, d->paired, false, hd_f32(d->x), s->t->paired, n);
    back_embedding(k, layer, d->paired, 2 * cols);
    back_norm(k, layer, HD_MTP_HIDDEN_NORM, hd_f32(d->h),
              hd_rows_strided(hd_f32(d->paired + cols), 2 * (int64_t)cols), s->t->h, n, cols,
              c->norm_eps);
    k->b->ops->rms_norm_back(
        s->stream,
        &(hd_rms_norm_back_args){
            .dx = hd_f32(d->x),
            .dweight = k->detached ? NULL : hd_gradients_of_drafts(k->g, HD_FINAL_NORM),
            .g = hd_f32(d->h),
            .x = hd_f32(k->b->last),
            .weight = hd_weights_vector(s->m->env.weights, HD_GLOBAL, HD_FINAL_NORM),
            .scale = d->norm_scale,
            .rows = n,
            .cols = cols,
            .eps = c->norm_eps,
            .sums = back_sums(k)});
}

/* d.h = the sum of d.x over the streams */
static void sum_streams(const back_step *k) {
    const hd_model_spec *c = k->s->m->env.spec;
    const backward_activations *d = &k->b->d;
    const int32_t n = k->s->b->n_rows;
    hd_stream_clear(k->s->stream, d->h, (size_t)n * (size_t)c->hidden * sizeof *d->h);
    k->b->ops->embed_back(k->s->stream, &(hd_embed_back_args){.dtable = d->h,
                                                              .g = hd_f32(d->x),
                                                              .tokens = k->b->row,
                                                              .rows = n,
                                                              .copies = c->hc_mult,
                                                              .cols = c->hidden});
}

/* V4: stream i is W_h norm(stream i) + W_e norm(embedding). */
static void back_v4(const back_step *k, int32_t layer) {
    const model_step *s = k->s;
    const hd_model_spec *c = s->m->env.spec;
    const backward_activations *d = &k->b->d;
    const int32_t n = s->b->n_rows, all = n * c->hc_mult;
    sum_streams(k);
    back_linear(k, layer, HD_MTP_E_PROJ, d->y, false, hd_f32(d->h), s->t->h, n);
    back_embedding(k, layer, d->y, c->hidden);
    back_linear(k, layer, HD_MTP_H_PROJ, d->term, false, hd_f32(d->x), s->t->paired, all);
    back_norm(k, layer, HD_MTP_HIDDEN_NORM, hd_f32(d->x), hd_f32(d->term), hd_f32(k->b->last),
              all, c->hidden, c->norm_eps);
}

void back_mtp_start(const back_step *k, int32_t layer) {
    back_mtp_again(k);
    model_mtp_start(k->s, layer, false);
    if (k->s->m->env.spec->hc_mult) {
        back_v4(k, layer);
    } else {
        back_v3(k, layer);
    }
}
