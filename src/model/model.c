/* model.c - the forward pass: memory of a model, and the driver that runs stages of
 * micro-batches. */
#include "model/model.h"

#include <assert.h>
#include <stdlib.h>

#include "model/model_internal.h"

/* ---- opening ---- */

static void place_all(hd_model *m, hd_arena *a) {
    const size_t pairs = (size_t)m->env.spec->rope_dim / 2;
    m->freq = hd_arena_take(a, pairs * sizeof(float), 64);
    m->freq_compress = hd_arena_take(a, pairs * sizeof(float), 64);
    const size_t experts = (size_t)m->env.spec->n_layers * (size_t)m->env.spec->route.n_experts;
    m->expert_rows = experts ? hd_arena_take(a, experts * sizeof *m->expert_rows, 64) : NULL;
    for (int32_t i = 0; i < m->n_micro; i++) model_place_activations(&m->acts[i], a, m);
}

static hd_status upload_freqs(hd_model *m, hd_err *err) {
    const hd_model_spec *c = m->env.spec;
    const int32_t pairs = c->rope_dim / 2;
    float *freq = calloc((size_t)pairs, sizeof *freq);
    if (!freq) return HD_FAIL(err, HD_ENOMEM, "no memory for %d rotary frequencies", pairs);
    const size_t bytes = (size_t)pairs * sizeof *freq;
    model_rope_freqs(&c->rope, pairs, freq);
    hd_stream_upload(m->env.stream, m->freq, freq, bytes);
    if (c->family == HD_FAMILY_V4) {
        hd_status st = hd_stream_sync(m->env.stream, err); /* freq is reused below */
        if (st == HD_OK) {
            model_rope_freqs(&c->rope_compress, pairs, freq);
            hd_stream_upload(m->env.stream, m->freq_compress, freq, bytes);
        }
    }
    hd_status st = hd_stream_sync(m->env.stream, err);
    free(freq);
    return st;
}

/* Operator scratch, sized by the most keys that one row can read and the widest row of any
 * operator. */
static size_t scratch_bytes(const hd_model *m) {
    const hd_model_spec *c = m->env.spec;
    int32_t widest = c->hidden * model_streams(c);
    const int32_t others[] = {c->n_heads * c->head_dim,
                              c->n_heads * (c->nope_dim + c->rope_dim),
                              c->n_heads * c->v_dim,
                              c->dense_inter,
                              c->route.n_experts,
                              c->n_shared * c->moe_inter,
                              c->vocab};
    for (size_t i = 0; i < HD_LEN(others); i++) {
        if (others[i] > widest) widest = others[i];
    }
    return hd_ops_scratch_bytes(m->limits.positions + c->window, widest);
}

/* Accepts the parallel configs that the stages support: MLPs and experts in parts over the
 * tensor-parallel group, or whole ones, to which the group divides its rows. */
static hd_status check_parallel(const hd_model_env *env, hd_err *err) {
    const hd_parallel_config *l = &hd_weights_shard(env->weights)->parallel;
    const bool parts = l->ep == 1 && l->etp == l->tp && l->dense_tp == l->tp;
    const bool whole =
        l->etp == 1 && l->dense_tp == 1 && (l->ep == 1 || l->ep == hd_parallel_world(l));
    if ((!parts && !whole) || (l->head_tp != 1 && l->head_tp != l->tp)) {
        return HD_FAIL(
            err, HD_EUNSUPPORTED,
            "layout: tp %d, dp %d, ep %d, etp %d, dense_tp %d, head_tp %d: etp and "
            "dense_tp must both be tp, or both 1 with ep 1 or all ranks; head_tp must "
            "be 1 or tp",
            l->tp, l->dp, l->ep, l->etp, l->dense_tp, l->head_tp);
    }
    if (hd_parallel_world(l) > 1 && !env->comm) {
        return HD_FAIL(err, HD_EINVAL, "a shard of a model needs its other ranks");
    }
    return HD_OK;
}

static hd_status divide_rows(hd_model *m, hd_err *err) {
    const hd_parallel_config *l = &m->shard->parallel;
    const hd_rank_group tp = hd_parallel_group(l, m->shard->rank, HD_GROUP_TP);
    const bool whole = l->etp == 1 && l->dense_tp == 1;
    m->row_parts = whole ? tp.n : 1;
    m->row_part = whole ? tp.index : 0;
    const int64_t most = INT32_MAX / m->env.spec->hidden; /* an all-gather counts them so */
    if (m->row_parts == 1 || m->limits.rows <= most) return HD_OK;
    return HD_FAIL(err, HD_EUNSUPPORTED,
                   "steps of %d rows on ranks that divide them: at most %lld", m->limits.rows,
                   (long long)most);
}

static hd_status check_mla(const hd_model_env *env, hd_err *err) {
    if (env->mla == HD_MLA_ABSORBED) return HD_OK;
    if (!env->ops->attention_naive) {
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "mla naive is the cpu backend's; backend '%s' has the absorbed form",
                       env->ops->name);
    }
    if (env->spec->layers[0].attention == HD_ATTN_MLA) return HD_OK;
    return HD_FAIL(err, HD_EUNSUPPORTED,
                   "mla naive is for attention to all latents, V2's and V3's; this model is %s",
                   hd_family_name(env->spec->family));
}

/* Opens the lanes' events, if lanes have streams of their own. */
static hd_status open_lanes(hd_model *m, hd_err *err) {
    hd_stream *const own[HD_N_LANES] = {m->env.stream, m->env.comm_stream, m->env.copy_stream};
    bool several = false;
    for (int32_t i = 0; i < HD_N_LANES; i++) {
        m->lanes[i] = own[i] ? own[i] : m->env.stream;
        if (m->lanes[i] == m->env.stream) continue;
        hd_stream_report_to(m->lanes[i], m->env.stream);
        several = true;
    }
    for (int32_t i = 0; several && i < m->n_micro; i++) {
        HD_TRY(hd_device_event_open(&m->lane_change[i], m->env.device, false, err));
    }
    return HD_OK;
}

hd_status hd_model_open(hd_model **out, const hd_model_env *env, const hd_model_limits *limits,
                        int32_t n_micro, hd_err *err) {
    assert(n_micro >= 1 && n_micro <= HD_MAX_MICRO);
    *out = NULL;
    HD_TRY(check_parallel(env, err));
    HD_TRY(check_mla(env, err));
    hd_model *m = calloc(1, sizeof *m);
    if (!m) return HD_FAIL(err, HD_ENOMEM, "no memory for a model");
    m->env = *env;
    m->limits = *limits;
    m->n_micro = n_micro;
    m->shard = hd_weights_shard(env->weights);
    hd_status st = divide_rows(m, err);
    if (st != HD_OK) goto fail;
    if (m->shard->parallel.ep > 1) {
        const int32_t own = limits->rows * env->spec->route.top_k;
        m->in_rows = limits->expert_rows ? limits->expert_rows : own;
    }
    m->softmax_scale = (float)env->spec->softmax_scale;
    m->index_scale = model_index_scale(env->spec);
    m->rope_scale = (float)env->spec->rope.magnitude;
    hd_arena a = hd_arena_measure();
    place_all(m, &a);
    m->bytes = a.peak;
    st = hd_device_alloc(env->device, &m->block, m->bytes, "activations", err);
    if (st != HD_OK) goto fail;
    a = hd_arena_over(m->block, m->bytes);
    place_all(m, &a);
    assert(!a.full); /* the same walk asked for the same bytes */
    st = upload_freqs(m, err);
    if (st != HD_OK) goto fail;
    st = hd_stream_reserve(env->stream, scratch_bytes(m), err);
    if (st != HD_OK) goto fail;
    st = open_lanes(m, err);
    if (st != HD_OK) goto fail;
    *out = m;
    return HD_OK;

fail:
    hd_model_close(m);
    return st;
}

void hd_model_close(hd_model *m) {
    if (!m) return;
    for (int32_t i = 0; i < m->n_micro; i++) hd_device_event_close(m->lane_change[i]);
    hd_device_release(m->env.device, m->block);
    free(m);
}

size_t hd_model_bytes(const hd_model *m) {
    const hd_stream *s = m->env.stream;
    return m->bytes + (size_t)hd_stream_workers(s) * hd_stream_scratch_bytes(s);
}

const float *hd_model_logits(const hd_model *m, int32_t micro) {
    return m->acts[micro].logits;
}

const int64_t *hd_model_expert_rows(const hd_model *m) {
    return m->expert_rows;
}

int32_t hd_model_row_parts(const hd_model *m) {
    return m->row_parts;
}

const model_stage *model_attention_stages(const hd_layer_spec *layer) {
    static const model_stage *const stages[] = {
#define X(kind, name, description) [kind] = model_##name##_stages,
        HD_ATTENTION_KINDS(X)
#undef X
    };
    return stages[layer->attention];
}

static void probe_at(const hd_model *m, const char *part, const char *stage) {
    const hd_probe *p = m->env.probe;
    if (p) p->at(p->ctx, part, stage);
}

/* ---- a step ---- */

static void enter_lane(model_step *s, hd_lane lane) {
    hd_stream *to = s->m->lanes[lane];
    if (to == s->stream) return;
    hd_stream_record_event(s->stream, s->lane_change);
    hd_stream_wait_event(to, s->lane_change);
    s->stream = to;
}

static void run_stage(model_step *s, const model_stage *k, const char *part, int32_t layer) {
    if (k->needed && !k->needed(s->m)) return;
    probe_at(s->m, part, k->name);
    enter_lane(s, k->lane);
    k->run(s, layer);
}

/* Runs every micro-batch alternately up to its next yield point, until the block is done. */
void model_run_stages(model_step *steps, int32_t n, const model_stage *stages, const char *part,
                      int32_t layer) {
    while (stages->run) {
        const model_stage *end = stages;
        while (end->run && !end->yields) end++;
        if (end->run) end++; /* the yielding stage belongs to this part */
        for (int32_t i = 0; i < n; i++) {
            for (const model_stage *k = stages; k < end; k++) {
                run_stage(&steps[i], k, part, layer);
            }
        }
        stages = end;
    }
}

static void run_layer(const hd_model *m, model_step *steps, int32_t n, int32_t layer) {
    const hd_layer_spec *kind = &m->env.spec->layers[layer];
    const char *ffn = kind->mlp == HD_MLP_DENSE ? "dense" : "moe";
    const char *attention = hd_attention_name(kind->attention);
    model_run_stages(steps, n, model_attention_stages(kind), attention, layer);
    model_run_stages(steps, n, model_ffn_stages(kind), ffn, layer);
}

model_step model_step_of(hd_model *m, const hd_kv *kv, const hd_batch *batch, int32_t micro) {
    assert(batch->n_rows <= m->limits.rows && batch->n_logits <= m->limits.logits);
    return (model_step){.m = m,
                        .kv = kv,
                        .b = batch,
                        .t = &m->acts[micro],
                        .stream = m->env.stream,
                        .lane_change = m->lane_change[micro]};
}

static void make_steps(hd_model *m, const hd_kv *kv, hd_batch *const batches[], int32_t n,
                       model_step *steps) {
    assert(n >= 1 && n <= m->n_micro);
    for (int32_t i = 0; i < n; i++) steps[i] = model_step_of(m, kv, batches[i], i);
}

/* Computes the logits; then the step ends on the compute lane. */
static void run_head(const hd_model *m, model_step *steps, int32_t n, const char *part,
                     int32_t layer) {
    model_run_stages(steps, n, model_head_stages, part, layer);
    for (int32_t i = 0; i < n; i++) enter_lane(&steps[i], HD_LANE_COMPUTE);
    probe_at(m, part, "choose");
}

void hd_model_step(hd_model *m, const hd_kv *kv, hd_batch *const batches[], int32_t n_micro) {
    model_step steps[HD_MAX_MICRO];
    make_steps(m, kv, batches, n_micro, steps);
    probe_at(m, "step", "start");
    for (int32_t i = 0; i < n_micro; i++) model_start(&steps[i]);
    for (int32_t l = 0; l < m->env.spec->n_layers; l++) run_layer(m, steps, n_micro, l);
    run_head(m, steps, n_micro, "step", HD_GLOBAL);
}

void hd_model_draft(hd_model *m, const hd_kv *kv, hd_batch *const batches[], int32_t n_micro,
                    bool again) {
    const int32_t layer = m->env.spec->n_layers;
    model_step steps[HD_MAX_MICRO];
    assert(hd_weights_n_mtp(m->env.weights) > 0);
    make_steps(m, kv, batches, n_micro, steps);
    probe_at(m, "draft", "start");
    for (int32_t i = 0; i < n_micro; i++) model_mtp_start(&steps[i], layer, again);
    run_layer(m, steps, n_micro, layer);
    run_head(m, steps, n_micro, "draft", layer);
}
