/* open.c - opens the engine: device, model, tokenizer, KV cache, scheduler and threads, and
 * chooses default sizes. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/cores.h"
#include "engine/engine_internal.h"
#include "weights/manifest.h"

enum {
    DEFAULT_RUNNING = 16,
    DEFAULT_CONTEXT = 8192,
    DEFAULT_CHUNK = 256,
    DEFAULT_QUEUE = 1024,
    MIN_CHOICES = 64, /* rows of logits; more rows speed up prompt log-probabilities */
    TOKEN_HISTORY_BYTES = 16 << 20
};

typedef struct sizes {
    int32_t running, context, chunk, step_rows, sample_rows, queue, drafts;
    hd_kv_shape shape;
    int32_t seq_pages, n_pages[HD_N_KV_GROUPS], n_snapshots;
} sizes;

static int32_t or_default(int64_t value, int64_t standard) {
    const int64_t v = value > 0 ? value : standard;
    return v < INT32_MAX ? (int32_t)v : INT32_MAX;
}

static int32_t pages(const sizes *z, int64_t tokens) {
    /* for any number of tokens */
    return or_default((tokens - 1) / z->shape.page_tokens + 1, 1);
}

/* WINDOW pages: the lookback window and next rows of every running request, and as many
 * again for cached pages. */
static sizes choose_sizes(const hd_engine *e, const hd_engine_options *o) {
    sizes z = {.running = or_default(o->max_running, DEFAULT_RUNNING),
               .chunk = or_default(o->chunk_tokens, DEFAULT_CHUNK),
               .queue = or_default(o->queue_limit, DEFAULT_QUEUE),
               .drafts = e->drafts ? HD_MAX_DRAFTS : 0,
               .shape = hd_kv_shape_of(e->spec)};
    z.context = or_default(o->max_context, hd_min_i32(DEFAULT_CONTEXT, e->spec->max_positions));
    z.step_rows = or_default(o->step_tokens, z.chunk + z.running * HD_MAX_STEP_TOKENS);
    z.sample_rows =
        hd_max_i32(z.running * HD_MAX_STEP_TOKENS, hd_min_i32(MIN_CHOICES, z.step_rows));
    z.seq_pages = pages(&z, (int64_t)z.context + HD_MAX_DRAFTS);
    const int64_t kv_tokens = o->kv_tokens > 0 ? o->kv_tokens : 2 * (int64_t)z.context;
    z.n_pages[HD_KV_FULL] = hd_max_i32(pages(&z, kv_tokens), z.seq_pages);
    if (z.shape.lookback) {
        const int32_t near = pages(&z, (int64_t)z.shape.lookback + z.chunk + HD_MAX_DRAFTS) + 1;
        const int32_t decode = pages(&z, (int64_t)z.shape.lookback + HD_MAX_STEP_TOKENS) + 1;
        z.n_pages[HD_KV_WINDOW] = 2 * (near + z.running * decode);
        const int64_t kept = o->snapshot_tokens > 0 ? o->snapshot_tokens : kv_tokens;
        z.n_snapshots = pages(&z, kept);
    }
    return z;
}

/* Finds the special tokens that the reply parser must see even if special tokens are hidden.
 * Records whether the tokenizer has them as tokens; then plain text cannot forge them. */
static void find_markers(hd_engine *e) {
    static const char *const texts[] = {
        "<think>",
        "</think>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
        "｜DSML｜",
    };
    bool found[HD_LEN(texts)];
    _Static_assert(HD_LEN(texts) <= ENGINE_MAX_MARKERS, "all markers have a place");
    for (size_t i = 0; i < HD_LEN(texts); i++) {
        const int32_t id = hd_tokenizer_find(e->tokenizer, texts[i], strlen(texts[i]));
        found[i] = id >= 0 && hd_tokenizer_is_added(e->tokenizer, id);
        if (found[i]) e->markers[e->n_markers++] = id;
    }
    const hd_reply_format format = hd_reply_format_of(e->encoding);
    const bool v3 = format == HD_REPLY_V3 || format == HD_REPLY_V31;
    e->flagged = v3 ? found[2] && found[4] : found[0] && found[1];
    e->dsml_flagged = found[HD_LEN(texts) - 1];
}

/* All chat formats but the first mark roles by special tokens. If the tokenizer lacks them,
 * they would be spelled out as text that the model was not trained on. */
static hd_status check_speakers(const hd_engine *e, const char *model_dir, hd_err *err) {
    static const char *const speakers[] = {"<｜User｜>", "<｜Assistant｜>"};
    for (size_t i = 0; e->encoding != HD_CHAT_V2 && i < HD_LEN(speakers); i++) {
        const int32_t id = hd_tokenizer_find(e->tokenizer, speakers[i], strlen(speakers[i]));
        if (id >= 0 && hd_tokenizer_is_added(e->tokenizer, id)) continue;
        return HD_FAIL(
            err, HD_EFORMAT,
            "%s: its conversations are written in %s, but its tokenizer has no token "
            "%s: is it another model's?",
            model_dir, hd_chat_encoding_name(e->encoding), speakers[i]);
    }
    return HD_OK;
}

static hd_status open_text(hd_engine *e, const char *model_dir, hd_err *err) {
    HD_TRY(hd_tokenizer_open(&e->tokenizer, model_dir, err));
    HD_TRY(hd_tokenizer_check_rows(e->tokenizer, e->spec->vocab, err));
    HD_TRY(hd_chat_detect(&e->encoding, &e->thinks, model_dir, err));
    find_markers(e);
    return check_speakers(e, model_dir, err);
}

static hd_status open_model(hd_engine *e, const hd_engine_options *o, hd_precision precision,
                            hd_err *err) {
    const hd_ops_options ops = {
        .cpu = {.n_threads = o->threads, .pin = o->pin_threads},
        .precision = precision,
        .no_batch_invariance = o->no_batch_invariance,
        .needs_cpu = e->mla == HD_MLA_NAIVE ? "mla naive" : NULL,
        .no_gpu = &e->no_gpu
    };
    HD_TRY(hd_ops_open(&e->ops, &e->device, o->backend ? o->backend : "auto", &ops, err));
    HD_TRY(hd_stream_open(&e->stream, e->device, err));
    const hd_dummy_options dummy = {.device = e->device, .stream = e->stream};
    HD_TRY(o->dummy_weights ? hd_weights_open_dummy(&e->weights, e->spec, &dummy, err)
                            : hd_weights_open(&e->weights, o->model_dir, e->spec, err));
    e->drafts = !o->no_drafts && hd_weights_n_mtp(e->weights) > 0;
    if (o->need_drafts && !e->drafts) {
        return HD_FAIL(err, HD_EINVAL, "drafts are asked for, but %s has no MTP layer",
                       o->model_dir);
    }
    e->graphs = !o->no_graphs && hd_device_has_graphs(e->device);
    e->totals.weight_bytes = hd_weights_bytes(e->weights);
    const hd_upload_watch watch = {o->on_upload, o->on_upload_ctx};
    return hd_weights_upload(e->weights, e->device, e->stream, &watch, err);
}

static bool open_mail(engine_mail *m, size_t n) {
    m->submitted = calloc(n, sizeof *m->submitted);
    m->cancelled = calloc(2 * n, sizeof *m->cancelled);
    return m->submitted && m->cancelled;
}

static void place_tops(hd_engine *e) {
    hd_alternative *at = e->tops;
    e->event_post.top = at;
    for (int32_t i = 0; i < e->cap_posts; i++) e->posts[i].top = at += ENGINE_POST_TOPS;
    for (int32_t i = 0; i < e->cap_step_outputs; i++) {
        e->step_outputs[i].top = at += ENGINE_POST_TOPS;
    }
}

static hd_status open_mailbox(hd_engine *e, const sizes *z, hd_err *err) {
    const int64_t living = (int64_t)z->queue + z->running;
    if (living > ENGINE_MAX_LIVING) {
        return HD_FAIL(err, HD_EINVAL, "%lld answers that run or wait; at most %d",
                       (long long)living, ENGINE_MAX_LIVING);
    }
    const size_t n = (size_t)living;
    /* A request whose last event is being shown no longer counts as living but still needs
     * its engine_request. */
    e->n_requests = (int32_t)living + 1;
    e->max_living = (int32_t)living;
    e->cap_step_outputs = z->running;
    e->cap_posts = 4 * z->running;
    e->requests = calloc(n + 1, sizeof *e->requests);
    e->free = calloc(n + 1, sizeof *e->free);
    e->places = calloc((size_t)z->running, sizeof *e->places);
    e->posts = calloc((size_t)e->cap_posts, sizeof *e->posts);
    e->step_outputs = calloc((size_t)e->cap_step_outputs, sizeof *e->step_outputs);
    e->tops = calloc((size_t)(e->cap_posts + e->cap_step_outputs + 1) * ENGINE_POST_TOPS,
                     sizeof *e->tops);
    if (!e->requests || !e->free || !e->places || !e->posts || !e->step_outputs || !e->tops ||
        !open_mail(&e->mail, n) || !open_mail(&e->inbox, n)) {
        return HD_FAIL(err, HD_ENOMEM, "no memory for %zu requests", n);
    }
    place_tops(e);
    for (int32_t i = 0; i < e->n_requests; i++) e->free[i] = e->n_requests - 1 - i;
    e->n_free = e->n_requests;
    return HD_OK;
}

static hd_status open_loads(hd_engine *e, hd_err *err) {
    const int64_t n = (int64_t)e->spec->n_layers * e->spec->route.n_experts;
    e->n_experts = e->spec->route.n_experts;
    e->n_loads = (int32_t)n;
    e->loads = calloc((size_t)n + 1, sizeof *e->loads);
    e->fresh_loads = calloc((size_t)n + 1, sizeof *e->fresh_loads);
    if (e->loads && e->fresh_loads) return HD_OK;
    return HD_FAIL(err, HD_ENOMEM, "no memory for the loads of %lld experts", (long long)n);
}

static hd_status open_runner(hd_engine *e, const sizes *z, const hd_engine_options *o,
                             hd_err *err) {
    if (!e->weights) {
        const hd_null_runner_options null = {.tokenizer = e->tokenizer,
                                             .n_ids = e->n_ids,
                                             .n_slots = z->running,
                                             .max_drafts = z->drafts,
                                             .step_us = o->null_step_us};
        HD_TRY(hd_null_runner_open(&e->null, &null, err));
        e->runner = hd_null_runner_interface(e->null);
        return HD_OK;
    }
    if (e->tokenizer) {
        HD_TRY(hd_grammar_vocab_open_tokenizer(&e->vocab, e->tokenizer, e->spec->vocab,
                                               e->spec->eos, e->spec->n_eos, err));
    }
    const hd_model_env env = {.spec = e->spec,
                              .weights = e->weights,
                              .ops = &e->ops,
                              .device = e->device,
                              .stream = e->stream,
                              .mla = e->mla};
    const hd_model_runner_options x = {
        .n_slots = z->running,
        .step_rows = z->step_rows,
        .positions = z->context + HD_MAX_DRAFTS,
        .seq_pages = z->seq_pages,
        .n_pages = {z->n_pages[0], z->n_pages[1]},
        .n_snapshots = z->n_snapshots,
        .n_ids = e->n_ids,
        .max_drafts = z->drafts,
        .sample_rows = z->sample_rows,
        .vocab = e->vocab,
        .forced = hd_acceptance_of(o->forced_acceptance),
        .fixed_steps = e->graphs
    };
    HD_TRY(hd_model_runner_open(&e->executor, &env, &x, err));
    HD_TRY(open_loads(e, err));
    e->runner = hd_model_runner_interface(e->executor);
    e->totals.activation_bytes = hd_model_runner_bytes(e->executor);
    const int32_t n_layers = e->spec->n_layers + hd_weights_n_mtp(e->weights);
    for (int l = 0; l < HD_N_KV_GROUPS; l++) {
        e->totals.kv_bytes +=
            (size_t)z->n_pages[l] * hd_kv_page_bytes(e->spec, n_layers, (hd_kv_group)l,
                                                     hd_act_bytes(&e->ops), z->drafts);
    }
    return HD_OK;
}

static hd_status open_sched(hd_engine *e, const sizes *z, hd_err *err) {
    const hd_sched_options s = {
        .cache = {.page_tokens = z->shape.page_tokens,
                  .lookback = z->shape.lookback,
                  .n_pages = {z->n_pages[0], z->n_pages[1]},
                  .n_snapshots = z->n_snapshots,
                  .max_seqs = z->running,
                  .seq_pages = z->seq_pages},
        .step_rows = z->step_rows,
        .chunk_rows = z->chunk,
        .sample_rows = z->sample_rows,
        .queue_limit = z->queue + z->running,
        .ahead = e->graphs ? 2 * HD_MAX_STEP_TOKENS : 0,
        .max_positions = z->context
    };
    const hd_runner runner = engine_runner(e);
    const hd_sched_hooks hooks = engine_hooks(e);
    e->totals.max_running = z->running;
    e->totals.max_context = z->context;
    e->totals.page_tokens = z->shape.page_tokens;
    e->totals.snapshots = z->n_snapshots;
    return hd_sched_open(&e->sched, &s, &runner, &hooks, err);
}

static hd_status open_all(hd_engine *e, const hd_engine_options *o, hd_err *err) {
    const bool null = o->backend && strcmp(o->backend, "null") == 0;
    if (o->size != sizeof *o) {
        return HD_FAIL(err, HD_EINVAL, "hd_engine_options of %zu bytes; this library knows %zu",
                       o->size, sizeof *o);
    }
    if (!(o->forced_acceptance >= 0 && o->forced_acceptance <= HD_MAX_DRAFTS)) {
        return HD_FAIL(err, HD_EINVAL, "forced_acceptance is %g; must be 0 to %d",
                       (double)o->forced_acceptance, HD_MAX_DRAFTS);
    }
    e->forced_acceptance = o->forced_acceptance > 0;
    if (null && e->forced_acceptance) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "the null backend accepts by a rule of its own");
    }
    hd_precision precision;
    HD_TRY(hd_precision_of(&precision, o->precision, err));
    if (null && precision != HD_EXACT) {
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "the null backend multiplies nothing: precision %s has no meaning",
                       o->precision);
    }
    if (null && o->no_batch_invariance) {
        return HD_FAIL(
            err, HD_EUNSUPPORTED,
            "the null backend multiplies nothing: no-batch-invariance has no meaning");
    }
    HD_TRY(hd_mla_form_of(&e->mla, o->mla, err));
    if (null && e->mla == HD_MLA_NAIVE) {
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "the null backend attends to nothing: mla naive has no meaning");
    }
    if (o->null_step_us < 0 || (o->null_step_us && !null)) {
        return HD_FAIL(err, HD_EINVAL,
                       "null_step_us is %d; only steps of the null backend take a time of "
                       "one's choice",
                       o->null_step_us);
    }
    if (o->manifest) HD_TRY(hd_manifest_check(o->manifest, o->model_dir, err));
    HD_TRY(hd_model_spec_open(&e->spec, o->model_dir, err));
    if (o->max_context > e->spec->max_positions) {
        return HD_FAIL(err, HD_EINVAL, "a context of %d tokens; this model knows %d positions",
                       o->max_context, e->spec->max_positions);
    }
    if (!o->dummy_weights) HD_TRY(open_text(e, o->model_dir, err));
    e->n_ids = e->tokenizer ? hd_tokenizer_vocab_size(e->tokenizer) : e->spec->vocab;
    e->drafts = !o->no_drafts;
    if (!null) HD_TRY(open_model(e, o, precision, err));
    engine_note_oddities(e);
    const sizes z = choose_sizes(e, o);
    e->max_context = z.context;
    HD_TRY(engine_grammar_cache_open(&e->forms, err));
    if (!o->no_token_history)
        HD_TRY(engine_token_history_open(&e->token_history, TOKEN_HISTORY_BYTES, err));
    HD_TRY(open_runner(e, &z, o, err));
    HD_TRY(open_sched(e, &z, err));
    HD_TRY(open_mailbox(e, &z, err));
    return engine_start(e, err);
}

static void open_locks(hd_engine *e) {
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&e->lock, NULL);
    pthread_cond_init(&e->wake, &monotonic);
    pthread_cond_init(&e->posted, &monotonic);
    pthread_cond_init(&e->taken, NULL);
    pthread_condattr_destroy(&monotonic);
}

/* All threads read all weights, so their pages are interleaved over all NUMA nodes; other
 * memory is not. */
static hd_status open_interleaved(hd_engine *e, const hd_engine_options *o, hd_err *err) {
    hd_cores cores;
    hd_cores_read(&cores, NULL);
    const bool several = hd_cores_interleave(&cores);
    const hd_status st = open_all(e, o, err);
    if (several) hd_cores_end_interleave();
    return st;
}

static bool is_on_gpu(const hd_engine *e) {
    return e->device && !hd_device_is_host(e->device);
}

/* *gpu tells whether a GPU was opened, also on failure. */
static hd_status open_engine(hd_engine **out, const hd_engine_options *o, bool *gpu,
                             hd_err *err) {
    *out = NULL;
    *gpu = false;
    hd_engine *e = calloc(1, sizeof *e);
    if (!e) return HD_FAIL(err, HD_ENOMEM, "no memory for an engine");
    open_locks(e);
    const hd_status st = open_interleaved(e, o, err);
    *gpu = is_on_gpu(e);
    if (st == HD_OK) {
        *out = e;
    } else {
        hd_engine_close(e);
    }
    return st;
}

int hd_engine_open(hd_engine **out, const hd_engine_options *options, char *why,
                   size_t why_size) {
    const bool any = !options->backend || strcmp(options->backend, "auto") == 0;
    hd_err err = {0};
    bool gpu;
    hd_status st = open_engine(out, options, &gpu, &err);
    if (st == HD_ENOMEM && any && gpu) { /* if the GPU has not enough memory, try the CPU */
        hd_engine_options on_cpu = *options;
        on_cpu.backend = "cpu";
        const hd_err first = err;
        err = (hd_err){0};
        st = open_engine(out, &on_cpu, &gpu, &err);
        if (st == HD_OK) (*out)->no_gpu = first;
    }
    if (st != HD_OK && why && why_size) snprintf(why, why_size, "%s", err.msg);
    return (int)st;
}

const char *hd_engine_backend(const hd_engine *e, const char **no_gpu) {
    if (no_gpu) *no_gpu = e->no_gpu.code == HD_OK ? NULL : e->no_gpu.msg;
    if (!e->device) return "null";
    if (is_on_gpu(e)) return "cuda";
    return strcmp(e->ops.name, "ref") == 0 ? "ref" : "cpu";
}

static void close_mail(engine_mail *m) {
    free(m->submitted);
    free(m->cancelled);
}

static void close_mailbox(hd_engine *e) {
    for (int32_t i = 0; i < e->n_posts; i++) {
        free(e->posts[(e->first_post + i) % e->cap_posts].why);
    }
    free(e->requests);
    free(e->free);
    free(e->places);
    free(e->posts);
    free(e->step_outputs);
    free(e->tops);
    free(e->loads);
    free(e->fresh_loads);
    close_mail(&e->mail);
    close_mail(&e->inbox);
}

void hd_engine_close(hd_engine *e) {
    if (!e) return;
    engine_stop(e);
    engine_drop_shown(e);
    for (int32_t i = 0; e->requests && i < e->n_requests; i++) {
        if (e->requests[i].id) engine_drop_request(e, &e->requests[i]);
    }
    hd_sched_close(e->sched);
    hd_model_runner_close(e->executor);
    hd_null_runner_close(e->null);
    hd_grammar_vocab_close(e->vocab);
    engine_grammar_cache_close(e->forms);
    engine_token_history_close(e->token_history);
    hd_stream_close(e->stream);
    hd_device_close(e->device);
    hd_weights_close(e->weights);
    hd_tokenizer_close(e->tokenizer);
    hd_model_spec_close(e->spec);
    close_mailbox(e);
    pthread_cond_destroy(&e->wake);
    pthread_cond_destroy(&e->posted);
    pthread_cond_destroy(&e->taken);
    pthread_mutex_destroy(&e->lock);
    free(e);
}
