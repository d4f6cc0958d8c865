/* mtp.c - the input of the multi-token prediction layer, which makes speculative drafts.
 *
 * DeepSeek-V3 report, section 2.2 (models.md 2.5): the next token's embedding and this row's
 * final hidden state, embedding half first, through one projection. V4 (models.md 2.14)
 * projects the two separately and adds them, once per stream of the state before the head. */
#include "model/model_internal.h"

static void embed_next(const model_step *s, hd_rows out) {
    const hd_model_env *env = &s->m->env;
    env->ops->embed(s->stream, &(hd_embed_args){.out = out,
                                                .table = hd_weights_matrix(env->weights,
                                                                           HD_GLOBAL, HD_EMBED),
                                                .tokens = s->b->device.next_tokens,
                                                .rows = s->b->n_rows,
                                                .copies = 1});
}

/* Writes one half of paired [n, 2 * hidden]. */
static void norm_into(const model_step *s, int32_t layer, hd_role role, hd_rows x,
                      int32_t half) {
    const hd_model_spec *c = s->m->env.spec;
    const hd_rows out = hd_rows_at(s->t->paired, half * c->hidden);
    s->m->env.ops->rms_norm(
        s->stream,
        &(hd_rms_norm_args){.out = hd_rows_strided(out, 2 * c->hidden),
                            .x = x,
                            .weight = hd_weights_vector(s->m->env.weights, layer, role),
                            .rows = s->b->n_rows,
                            .cols = c->hidden,
                            .eps = c->norm_eps});
}

static void start_v3(const model_step *s, int32_t layer, hd_rows hidden) {
    model_activations *t = s->t;
    embed_next(s, t->y);
    norm_into(s, layer, HD_MTP_EMBED_NORM, t->y, 0);
    norm_into(s, layer, HD_MTP_HIDDEN_NORM, hidden, 1);
    model_linear(s, layer, HD_MTP_PROJ, t->x, t->paired, s->b->n_rows);
}

static void start_v4(const model_step *s, int32_t layer, hd_rows streams) {
    const hd_model_spec *c = s->m->env.spec;
    model_activations *t = s->t;
    const int32_t n = s->b->n_rows, all = n * c->hc_mult;
    embed_next(s, t->y);
    model_norm(s, layer, HD_MTP_EMBED_NORM, t->h, t->y, n, c->hidden);
    model_linear(s, layer, HD_MTP_E_PROJ, t->y, t->h, n);
    model_norm(s, layer, HD_MTP_HIDDEN_NORM, t->paired, streams, all, c->hidden);
    model_linear(s, layer, HD_MTP_H_PROJ, t->x, t->paired, all);
    s->m->env.ops->add(
        s->stream,
        &(hd_add_args){
            .x = t->x, .y = t->y, .rows = all, .cols = c->hidden, .repeat = c->hc_mult});
}

/* again: continues from the logits rows of the draft before; V3 after its final norm, V4
 * from the streams before the head. */
void model_mtp_start(const model_step *s, int32_t layer, bool again) {
    if (s->b->n_rows == 0) return;
    if (again) model_rope_tables(s); /* other positions than the main model's */
    if (s->m->env.spec->hc_mult) {
        start_v4(s, layer, again ? s->t->logit_x : s->t->x);
    } else {
        start_v3(s, layer, again ? s->t->merged : s->t->h);
    }
}
