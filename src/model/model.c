/* model.c - the forward pass: memory of a model, and the driver that runs stages of
 * micro-batches. */
#include "model/model.h"

#include <assert.h>
#include <stdlib.h>

#include "base/checked.h"
#include "model/rows_internal.h"

/* ---- opening ---- */

static void place_all(hd_model *m, hd_arena *a) {
    const size_t pairs = (size_t)m->env.spec->rope_dim / 2;
    m->freq = hd_arena_take(a, pairs * sizeof(float), 64);
    m->freq_compress = hd_arena_take(a, pairs * sizeof(float), 64);
    const hd_engram_spec *e = &m->env.spec->engram;
    const size_t vocab = e->n_layers ? (size_t)m->env.spec->vocab : 0;
    m->engram_hash = hd_arena_take(a, (size_t)e->n_layers * sizeof *m->engram_hash, 64);
    m->token_classes = hd_arena_take(a, vocab * sizeof *m->token_classes, 64);
    const size_t rows = (size_t)hd_model_n_expert_rows(m->env.spec);
    m->expert_rows = rows ? hd_arena_take(a, rows * sizeof *m->expert_rows, 64) : NULL;
    model_place_activations(&m->acts, a, m);
    for (int32_t i = 0; i < m->n_micro; i++) {
        m->micro[i] = m->acts;
        m->micro[i].micro = i;
        if (i > 0) model_place_micro(&m->micro[i], a, m, m->micro_rows);
    }
}

static hd_status open_rest(hd_model *m, hd_err *err) {
    hd_arena device = hd_arena_measure(), host = hd_arena_measure();
    if (m->pages.tail.n == 0) return HD_OK;
    model_place_rest(m, &device, &host);
    HD_TRY(hd_device_alloc(m->env.device, &m->rest_device, device.peak, "rows that are left",
                           err));
    HD_TRY(hd_device_alloc_host(m->env.device, &m->rest_host, host.peak, "rows that are left",
                                err));
    m->bytes += device.peak;
    device = hd_arena_over(m->rest_device, device.peak);
    host = hd_arena_over(m->rest_host, host.peak);
    model_place_rest(m, &device, &host);
    return HD_OK;
}

static hd_status upload_freqs(hd_model *m, hd_err *err) {
    const hd_model_spec *c = m->env.spec;
    const int32_t pairs = c->rope_dim / 2;
    float *freq = calloc((size_t)pairs, sizeof *freq);
    if (!freq) return HD_FAIL(err, HD_ENOMEM, "no memory for %d rotary frequencies", pairs);
    const size_t bytes = (size_t)pairs * sizeof *freq;
    model_rope_freqs(&c->rope, pairs, freq);
    hd_stream_upload(m->env.stream, m->freq, freq, bytes);
    if (hd_is_hybrid(c)) {
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
 * operator; of what runs beside, which reads no keys and makes no logits. */
static size_t scratch_bytes(const hd_model *m, bool beside) {
    const hd_model_spec *c = m->env.spec;
    const int32_t keys = m->limits.positions + c->window + c->dspark.block;
    int32_t widest = c->hidden * model_streams(c);
    const int32_t others[] = {
        c->n_heads * c->head_dim,  c->n_heads * (c->nope_dim + c->rope_dim),
        c->n_heads * c->v_dim,     c->dense_inter,
        c->route.n_experts,        c->n_shared * c->moe_inter,
        3 * m->shard->parallel.ep, beside ? 0 : c->vocab};
    for (size_t i = 0; i < HD_LEN(others); i++) {
        if (others[i] > widest) widest = others[i];
    }
    return hd_ops_scratch_bytes(beside ? 0 : keys, widest);
}

/* An all-gather counts its floats in 32 bits. */
static hd_status check_rows(const hd_model *m, hd_err *err) {
    const hd_model_spec *c = m->env.spec;
    const struct {
        const char *what;
        hd_group group;
        int32_t rows, cols;
    } gathers[] = {
        {"rows",           HD_GROUP_DENSE, m->limits.rows,   c->hidden},
        {"rows",           HD_GROUP_ETP,   m->limits.rows,   c->hidden},
        {"rows of logits", HD_GROUP_HEAD,  m->limits.logits, c->vocab },
    };
    if (!m->env.comm) {
        return HD_FAIL(err, HD_EINVAL, "a shard of a model needs its other ranks");
    }
    for (size_t i = 0; i < HD_LEN(gathers); i++) {
        const int64_t n = model_most_rows(m, gathers[i].group, gathers[i].rows);
        if (n * gathers[i].cols <= INT32_MAX) continue;
        return HD_FAIL(err, HD_EUNSUPPORTED, "steps of %lld %s of several ranks: at most %d",
                       (long long)n, gathers[i].what, INT32_MAX / gathers[i].cols);
    }
    return HD_OK;
}

static hd_status check_mla(const hd_model_env *env, hd_err *err) {
    if (env->mla == HD_MLA_ABSORBED) return HD_OK;
    if (!env->ops->attention_naive) {
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "mla naive is for backend cpu, and for cuda on path sm90 with precision "
                       "fast or official; backend '%s' has the absorbed form",
                       env->ops->name);
    }
    if (env->spec->layers[0].attention != HD_ATTN_MLA) {
        return HD_FAIL(
            err, HD_EUNSUPPORTED,
            "mla naive is for attention to all latents, V2's and V3's; this model is %s",
            hd_family_name(env->spec->family));
    }
    const hd_model_spec *c = env->spec;
    if (hd_device_is_host(env->device) ||
        (c->kv_rank == 512 && c->nope_dim == 128 && c->rope_dim == 64 && c->v_dim == 128)) {
        return HD_OK;
    }
    return HD_FAIL(err, HD_EUNSUPPORTED,
                   "mla naive on a GPU is for latents of 512 + 64, keys of 128 + 64 and values "
                   "of 128 elements; this model has %d + %d, %d + %d and %d",
                   c->kv_rank, c->rope_dim, c->nope_dim, c->rope_dim, c->v_dim);
}

/* How MLA computes a prompt depends on the rows of a sequence in a micro-batch. */
static hd_status check_micro(const hd_model_env *env, const hd_model_limits *limits,
                             hd_err *err) {
    if (limits->n_micro <= 1 || env->mla == HD_MLA_ABSORBED) return HD_OK;
    return HD_FAIL(err, HD_EUNSUPPORTED, "mla naive is for steps in one micro-batch");
}

/* Waves are of rows that this rank alone computes. Some are made by the host, which then reads what
 * operators have written before it queues the next ones. */
static hd_status check_stage(const hd_model_env *env, hd_err *err) {
    if (!env->stage && !hd_weights_has_experts_elsewhere(env->weights)) return HD_OK;
    if (!env->stage) return HD_FAIL(err, HD_EINVAL, "the experts are elsewhere: not staged");
    if (!hd_expert_stage_is_queued(env->stage) && !hd_device_is_host(env->device)) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "experts are staged for the cpu backend only");
    }
    const hd_parallel_config *l = &hd_weights_shard(env->weights)->parallel;
    const bool same = l->tp == hd_max_i32(l->cp, 1); /* in attention all have the same heads */
    const bool alone = l->ep > 1 && same && l->etp == 1; /* with what it computes */
    if (!hd_parallel_exchanges(l) || alone) return HD_OK;
    return HD_FAIL(err, HD_EUNSUPPORTED,
                   "experts are staged for ranks that do not share their rows");
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

static bool is_moe(const hd_model *m, int32_t layer) {
    return m->env.spec->layers[layer].mlp != HD_MLP_DENSE;
}

static hd_status open_beside(hd_model *m, hd_err *err) {
    hd_stream *s = m->env.beside_stream;
    if (!s) return HD_OK;
    hd_stream_report_to(s, m->env.stream);
    for (int32_t i = 0; i < m->n_micro; i++) {
        HD_TRY(hd_device_event_open(&m->fork[i], m->env.device, false, err));
        HD_TRY(hd_device_event_open(&m->join[i], m->env.device, false, err));
    }
    return hd_stream_reserve(s, scratch_bytes(m, true), err);
}

static hd_status check_entries(const hd_model_env *env, hd_err *err) {
    if (!hd_is_packed(env->ops->kv_type) || hd_device_is_host(env->device)) return HD_OK;
    return hd_kv_check_heads(env->spec, hd_weights_shard(env->weights)->n_heads,
                             env->ops->kv_type, err);
}

hd_status hd_model_open(hd_model **out, const hd_model_env *env, const hd_model_limits *limits,
                        hd_err *err) {
    assert(limits->n_micro <= HD_MAX_MICRO);
    *out = NULL;
    HD_TRY(check_mla(env, err));
    HD_TRY(check_entries(env, err));
    HD_TRY(check_micro(env, limits, err));
    HD_TRY(check_stage(env, err));
    hd_model *m = calloc(1, sizeof *m);
    if (!m) return HD_FAIL(err, HD_ENOMEM, "no memory for a model");
    m->env = *env;
    m->limits = *limits;
    m->shard = hd_weights_shard(env->weights);
    m->pages = hd_kv_shape_of(env->spec);
    m->dspark = env->spec->drafter == HD_DRAFTER_DSPARK && hd_weights_n_mtp(env->weights) > 0;
    if (m->dspark) model_open_confidence(m);
    const hd_parallel_config *parallel = &m->shard->parallel;
    model_plan_micro(m);
    hd_status st = hd_parallel_exchanges(parallel) ? check_rows(m, err) : HD_OK;
    if (st == HD_OK) st = model_open_micro(m, err);
    if (st != HD_OK) goto fail;
    if (parallel->ep > 1) {
        const int32_t top_k = env->spec->route.top_k;
        m->in_rows = limits->expert_rows
                         ? limits->expert_rows
                         : hd_model_expert_rows_of(parallel, m->whole_rows, top_k);
        st = model_open_rounds(m, err);
        if (st != HD_OK) goto fail;
    }
    for (int32_t l = 0; l < env->spec->n_layers; l++) m->n_moe += is_moe(m, l);
    /* every micro-batch rounds the rows that a rank owns */
    const int32_t rounded = limits->rows + (m->n_micro - 1) * parallel->tp;
    m->n_choices = (int64_t)(m->n_moe + hd_max_i32(HD_MAX_DRAFTS, env->spec->n_mtp)) *
                   model_most_rows(m, HD_GROUP_ETP, rounded) * env->spec->route.top_k;
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
    model_upload_engram(m);
    st = m->in_rows ? hd_comm_share_rows(env->comm, env->stream, m->block, m->bytes, err)
                    : HD_OK;
    if (st != HD_OK) goto fail;
    st = upload_freqs(m, err);
    if (st != HD_OK) goto fail;
    st = hd_stream_reserve(env->stream, scratch_bytes(m, false), err);
    if (st != HD_OK) goto fail;
    st = open_lanes(m, err);
    if (st == HD_OK) st = open_beside(m, err);
    if (st == HD_OK) st = open_rest(m, err);
    if (st == HD_OK) st = model_open_prefetch(m, err);
    if (st != HD_OK) goto fail;
    *out = m;
    return HD_OK;

fail:
    hd_model_close(m);
    return st;
}

void hd_model_close(hd_model *m) {
    if (!m) return;
    for (int32_t i = 0; i < m->n_micro; i++) {
        hd_device_event_close(m->lane_change[i]);
        hd_device_event_close(m->fork[i]);
        hd_device_event_close(m->join[i]);
    }
    hd_prefetch_close(m->prefetch);
    free(m->rounds);
    free(m->micro_group_rows);
    hd_device_release(m->env.device, m->block);
    hd_device_release(m->env.device, m->rest_device);
    hd_device_release(m->env.device, m->rest_host);
    free(m);
}

size_t hd_model_bytes(const hd_model *m) {
    const hd_stream *const streams[] = {m->env.stream, m->env.beside_stream};
    size_t bytes = m->bytes;
    for (size_t i = 0; i < HD_LEN(streams); i++) {
        const hd_stream *s = streams[i];
        if (s) bytes += (size_t)hd_stream_workers(s) * hd_stream_scratch_bytes(s);
    }
    return bytes;
}

const float *hd_model_logits(const hd_model *m) {
    return m->acts.logits;
}

int64_t hd_model_n_expert_rows(const hd_model_spec *spec) {
    const int64_t layers = HD_N_ROW_PHASES * (int64_t)spec->n_layers + spec->n_mtp;
    return layers * spec->route.n_experts;
}

const int64_t *hd_model_expert_rows(const hd_model *m) {
    return m->expert_rows;
}

const int32_t *hd_model_choices(const hd_model *m) {
    return m->acts.choices;
}

int64_t hd_model_n_choices(const hd_model *m, int32_t rows) {
    return (int64_t)m->n_moe * rows * m->env.spec->route.top_k;
}

int32_t hd_model_n_draft_layers(const hd_model_spec *spec, const hd_weights *w) {
    const int32_t n = hd_weights_n_mtp(w);
    return spec->drafter == HD_DRAFTER_DSPARK ? n : hd_min_i32(n, 1);
}

bool hd_model_routes_all(const hd_model *m) {
    return !model_rows_are_foreign(m, HD_GROUP_ETP) && !model_rows_are_few(m, HD_GROUP_ETP);
}

const model_stage *model_attention_stages(const hd_layer_spec *layer) {
    static const model_stage *const stages[] = {
#define X(kind, name, description) [kind] = model_##name##_stages,
        HD_ATTENTION_KINDS(X)
#undef X
    };
    return stages[layer->attention];
}

void model_probe(const hd_model *m, const char *part, const char *stage) {
    const hd_probe *p = m->env.probe;
    if (p) p->at(p->ctx, part, stage);
}

/* ---- a step ---- */

void model_enter_lane(model_step *s, hd_lane lane) {
    hd_stream *to = s->m->lanes[s->cut ? lane : HD_LANE_COMPUTE];
    if (to != s->stream) {
        if (!s->left) hd_stream_record_event(s->stream, s->lane_change);
        hd_stream_wait_event(to, s->lane_change);
    }
    s->left = false;
    s->stream = to;
}

/* Others may run on its lane before it enters the next one. */
static void leave_lane(model_step *s) {
    if (!s->lane_change) return;
    hd_stream_record_event(s->stream, s->lane_change);
    s->left = true;
}

static bool is_needed(const hd_model *m, const model_stage *k) {
    return !k->needed || k->needed(m);
}

static void run_stage(model_step *s, const model_stage *k, const char *part, int32_t layer) {
    if (!is_needed(s->m, k)) return;
    model_probe(s->m, part, k->name);
    model_enter_lane(s, k->lane);
    k->run(s, layer);
}

/* Runs every micro-batch alternately up to its next yield point, until the block is done. */
void model_run_stages(model_step *steps, int32_t n, const model_stage *stages, const char *part,
                      int32_t layer, bool of_group) {
    while (stages->run) {
        const model_stage *end = stages;
        while (end->run && !(end->yields && is_needed(steps[0].m, end))) end++;
        if (end->run) end++; /* the yielding stage belongs to this part */
        for (int32_t i = 0; i < n; i++) {
            if (of_group && steps[i].b->n_rows == 0) continue;
            for (const model_stage *k = stages; k < end; k++) {
                run_stage(&steps[i], k, part, layer);
            }
            if (n > 1) leave_lane(&steps[i]);
        }
        stages = end;
    }
}

static void tap(const hd_model *m, model_step *steps, int32_t n, int32_t layer,
                hd_tap_side side, const char *part) {
    if (!m->dspark || !model_has_tap(m->env.spec, layer, side)) return;
    model_probe(m, part, "tap");
    for (int32_t i = 0; i < n; i++) model_tap(&steps[i], layer);
}

static void read_engram(const hd_model *m, model_step *steps, int32_t n, int32_t layer,
                        const char *part) {
    if (!hd_has_engram(m->env.spec, layer)) return;
    model_probe(m, part, "engram");
    for (int32_t i = 0; i < n; i++) model_engram(&steps[i], layer);
}

/* Runs the attention: in one part, or first what every position leaves. Then rows that are for later
 * layers only go on. */
static void run_attention(const hd_model *m, model_step *steps, int32_t n, int32_t layer,
                          const char *part) {
    const hd_layer_spec *kind = &m->env.spec->layers[layer];
    const bool rebuilds = steps[0].rest->rebuilds && layer < m->env.spec->n_layers;
    const model_stage *keys = rebuilds ? model_rebuild_keys : model_key_stages(kind);
    if (keys) {
        model_run_stages(steps, n, keys, part, layer, true);
        for (int32_t i = 0; i < n; i++) model_drop_rows(&steps[i], layer);
    }
    model_run_stages(steps, n, rebuilds ? model_rebuild_queries : model_attention_stages(kind),
                     part, layer, true);
}

static void run_layer(const hd_model *m, model_step *steps, int32_t n, int32_t layer) {
    const hd_layer_spec *kind = &m->env.spec->layers[layer];
    const char *ffn = kind->mlp == HD_MLP_DENSE ? "dense" : "moe";
    const char *attention = hd_attention_name(kind->attention);
    read_engram(m, steps, n, layer, attention);
    tap(m, steps, n, layer, HD_TAP_INPUT, attention);
    run_attention(m, steps, n, layer, attention);
    model_run_stages(steps, n, model_ffn_stages(kind), ffn, layer, false);
    tap(m, steps, n, layer, HD_TAP_OUTPUT, ffn);
}

void model_run_layers(hd_model *m, model_step *whole, int32_t first, int32_t last) {
    model_step several[HD_MAX_MICRO], *steps = several;
    const int32_t n = model_cut(m, whole, several);
    if (n == 1) steps = whole;
    for (int32_t l = first; l <= last; l++) {
        if (is_moe(m, l)) model_place_choices(whole, steps, n, l);
        run_layer(m, steps, n, l);
        if (is_moe(m, l)) model_keep_choices(whole, &steps[n - 1], l);
    }
    for (int32_t i = 0; i < n; i++) model_enter_lane(&steps[i], HD_LANE_COMPUTE);
}

model_step model_step_of(hd_model *m, const hd_kv *kv, const hd_batch *batch) {
    assert(batch->n_rows <= m->limits.rows && batch->n_logits <= m->limits.logits);
    m->fetches = m->env.stage && batch->fetches;
    return (model_step){.m = m,
                        .kv = kv,
                        .b = batch,
                        .whole = batch,
                        .t = &m->acts,
                        .rest = &m->rest,
                        .stream = m->env.stream,
                        .lane_change = m->lane_change[0],
                        .fork = m->fork[0],
                        .join = m->join[0]};
}

/* Computes the logits; then the step ends on the compute lane. */
void model_run_head(model_step *s, const char *part, int32_t layer) {
    model_run_stages(s, 1, model_head_stages, part, layer, false);
    model_enter_lane(s, HD_LANE_COMPUTE);
}

void hd_model_step(hd_model *m, const hd_kv *kv, const hd_batch *batch) {
    model_step s = model_step_of(m, kv, batch);
    s.rest->on = false;
    s.rest->rebuilds = hd_batch_rebuilds(batch);
    assert(!s.rest->rebuilds || (m->pages.tail.rebuilds && !batch->group_rows));
    model_probe(m, "step", "start");
    s.t->expert = s.t->choices;
    model_start(&s);
    model_classify_tokens(&s);
    model_prefetch_engram(&s);
    model_run_layers(m, &s, 0, m->env.spec->n_layers - 1);
    s.t->drafted = s.t->expert;
    model_run_head(&s, "step", HD_GLOBAL);
    model_probe(m, "step", "choose");
}

void hd_model_draft(hd_model *m, const hd_kv *kv, const hd_batch *batch, bool again) {
    const int32_t layer = m->env.spec->n_layers;
    model_step s = model_step_of(m, kv, batch);
    assert(m->env.spec->drafter == HD_DRAFTER_MTP && hd_weights_n_mtp(m->env.weights) > 0);
    model_probe(m, "draft", "start");
    if (!again) {
        s.t->expert = s.t->drafted;
        model_draft_rest(&s);
    }
    model_mtp_start(&s, layer, again);
    model_run_layers(m, &s, layer, layer);
    model_run_head(&s, "draft", layer);
    model_probe(m, "draft", "choose");
}
