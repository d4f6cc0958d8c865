/* open.c - opens the engine: checks options, reads the tokenizer, chooses default sizes, opens
 * the ranks (rank.c) and the mailbox. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/cores.h"
#include "engine/rank.h"
#include "weights/manifest.h"

enum {
    DEFAULT_RUNNING = 16,
    DEFAULT_CONTEXT = 8192,
    DEFAULT_CHUNK = 256,
    DEFAULT_QUEUE = 1024,
    MIN_CHOICES = 64, /* rows of logits; more rows speed up prompt log-probabilities */
    TOKEN_HISTORY_BYTES = 16 << 20
};

static int32_t or_default(int64_t value, int64_t standard) {
    const int64_t v = value > 0 ? value : standard;
    return v < INT32_MAX ? (int32_t)v : INT32_MAX;
}

static int32_t pages(const engine_sizes *z, int64_t tokens) {
    /* for any number of tokens */
    return or_default((tokens - 1) / z->shape.page_tokens + 1, 1);
}

/* WINDOW pages: the lookback window and next rows of every running request, and as many
 * again for cached pages. */
static engine_sizes choose_sizes(const hd_engine *e, const hd_engine_options *o) {
    engine_sizes z = {.running = or_default(o->max_running, DEFAULT_RUNNING),
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

static hd_status check_drafts(const hd_engine *e, const hd_engine_options *o, hd_err *err) {
    if (!o->need_drafts || e->drafts || !e->has_model) return HD_OK;
    return HD_FAIL(err, HD_EINVAL, "drafts are asked for, but %s has no MTP layer",
                   o->model_dir);
}

/* Opens the ranks with their weights. */
static hd_status open_model(hd_engine *e, const hd_engine_options *o, hd_precision precision,
                            hd_err *err) {
    HD_TRY(engine_ranks_open(e, o, precision, err));
    e->has_model = e->whole != NULL;
    e->drafts = !o->no_drafts && (!e->whole || hd_weights_n_mtp(e->whole) > 0);
    HD_TRY(check_drafts(e, o, err));
    for (int32_t i = 0; i < e->n_ranks; i++) {
        HD_TRY(engine_rank_upload(&e->ranks[i], o, err));
    }
    engine_note_oddities(e, e->whole);
    return HD_OK;
}

bool engine_mail_open(engine_mail *m, int32_t max_living) {
    const size_t n = (size_t)max_living;
    m->submitted = calloc(n, sizeof *m->submitted);
    m->cancelled = calloc(2 * n, sizeof *m->cancelled);
    return m->submitted && m->cancelled;
}

static void place_tops(hd_engine *e) {
    hd_alternative *at = e->tops;
    e->event_post.top = at;
    for (int32_t i = 0; i < e->cap_posts; i++) e->posts[i].top = at += ENGINE_POST_TOPS;
}

static hd_status open_mailbox(hd_engine *e, const engine_sizes *z, hd_err *err) {
    const int64_t living = (int64_t)z->queue + z->running;
    if (living > ENGINE_MAX_LIVING) {
        return HD_FAIL(err, HD_EINVAL, "%lld choices that run or wait; at most %d",
                       (long long)living, ENGINE_MAX_LIVING);
    }
    const size_t n = (size_t)living;
    /* A request whose last event is being shown no longer counts as living but still needs
     * its engine_request. */
    e->n_requests = (int32_t)living + 1;
    e->max_living = (int32_t)living;
    e->cap_posts = 4 * z->running;
    e->requests = calloc(n + 1, sizeof *e->requests);
    e->free = calloc(n + 1, sizeof *e->free);
    e->places = calloc((size_t)z->running, sizeof *e->places);
    e->posts = calloc((size_t)e->cap_posts, sizeof *e->posts);
    e->tops = calloc((size_t)(e->cap_posts + 1) * ENGINE_POST_TOPS, sizeof *e->tops);
    if (!e->requests || !e->free || !e->places || !e->posts || !e->tops ||
        !engine_mail_open(&e->mail, e->max_living)) {
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
    if (e->loads) return HD_OK;
    return HD_FAIL(err, HD_ENOMEM, "no memory for the loads of %lld experts", (long long)n);
}

/* Opens what computes: the runners, with the leader's scheduler and inbox. */
static hd_status open_runners(hd_engine *e, const engine_sizes *z, const hd_engine_options *o,
                              hd_err *err) {
    if (e->has_model) {
        if (e->tokenizer) {
            HD_TRY(hd_grammar_vocab_open_tokenizer(&e->vocab, e->tokenizer, e->spec->vocab,
                                                   e->spec->eos, e->spec->n_eos, err));
        }
        HD_TRY(open_loads(e, err));
    }
    for (int32_t i = 0; i < e->n_ranks; i++) {
        HD_TRY(engine_rank_open_runner(&e->ranks[i], z, o, err));
        HD_TRY(engine_rank_open_inbox(&e->ranks[i], z, e->max_living, err));
    }
    engine_ranks_count_memory(e);
    return HD_OK;
}

static bool is_null(const hd_engine_options *o) {
    return o->backend && strcmp(o->backend, "null") == 0;
}

/* Refuses what has no meaning without a model. */
static hd_status check_null(const hd_engine *e, const hd_engine_options *o,
                            hd_precision precision, hd_err *err) {
    if (e->forced_acceptance) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "the null backend accepts by a rule of its own");
    }
    if (precision != HD_EXACT) {
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "the null backend multiplies nothing: precision %s has no meaning",
                       o->precision);
    }
    if (o->no_batch_invariance) {
        return HD_FAIL(
            err, HD_EUNSUPPORTED,
            "the null backend multiplies nothing: no-batch-invariance has no meaning");
    }
    if (e->mla == HD_MLA_NAIVE) {
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "the null backend attends to nothing: mla naive has no meaning");
    }
    if (o->gpu != 0) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "gpu %d is for backend cuda, not for null",
                       o->gpu);
    }
    return HD_OK;
}

static hd_status check_options(hd_engine *e, const hd_engine_options *o,
                               hd_precision *precision, hd_err *err) {
    if (o->size != sizeof *o) {
        return HD_FAIL(err, HD_EINVAL, "hd_engine_options of %zu bytes; this library knows %zu",
                       o->size, sizeof *o);
    }
    if (!(o->forced_acceptance >= 0 && o->forced_acceptance <= HD_MAX_DRAFTS)) {
        return HD_FAIL(err, HD_EINVAL, "forced_acceptance is %g; must be 0 to %d",
                       (double)o->forced_acceptance, HD_MAX_DRAFTS);
    }
    e->forced_acceptance = o->forced_acceptance > 0;
    HD_TRY(hd_precision_of(precision, o->precision, err));
    HD_TRY(hd_mla_form_of(&e->mla, o->mla, err));
    if (is_null(o)) HD_TRY(check_null(e, o, *precision, err));
    if (o->null_step_us < 0 || (o->null_step_us && !is_null(o))) {
        return HD_FAIL(err, HD_EINVAL,
                       "null_step_us is %d; only steps of the null backend take a time of "
                       "one's choice",
                       o->null_step_us);
    }
    return HD_OK;
}

static hd_status open_all(hd_engine *e, const hd_engine_options *o, hd_err *err) {
    hd_precision precision;
    HD_TRY(check_options(e, o, &precision, err));
    if (o->manifest) HD_TRY(hd_manifest_check(o->manifest, o->model_dir, err));
    HD_TRY(hd_model_spec_open(&e->spec, o->model_dir, err));
    if (o->max_context > e->spec->max_positions) {
        return HD_FAIL(err, HD_EINVAL, "a context of %d tokens; this model knows %d positions",
                       o->max_context, e->spec->max_positions);
    }
    if (!o->dummy_weights) HD_TRY(open_text(e, o->model_dir, err));
    e->n_ids = e->tokenizer ? hd_tokenizer_vocab_size(e->tokenizer) : e->spec->vocab;
    HD_TRY(engine_ranks_choose(e, o, err));
    HD_TRY(open_model(e, o, precision, err));
    const engine_sizes z = choose_sizes(e, o);
    e->max_context = z.context;
    HD_TRY(engine_grammar_cache_open(&e->grammars, err));
    if (!o->no_token_history)
        HD_TRY(engine_token_history_open(&e->token_history, TOKEN_HISTORY_BYTES, err));
    HD_TRY(open_mailbox(e, &z, err));
    HD_TRY(open_runners(e, &z, o, err));
    return engine_ranks_start(e, err);
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
    const hd_device *d = e->n_ranks ? e->ranks[0].device : NULL;
    return d && !hd_device_is_host(d);
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
    const bool any =
        (!options->backend || strcmp(options->backend, "auto") == 0) && options->gpu == 0;
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
    if (no_gpu) *no_gpu = e->no_gpu.status == HD_OK ? NULL : e->no_gpu.msg;
    if (!e->has_model) return "null";
    if (is_on_gpu(e)) return "cuda";
    return strcmp(e->ranks[0].ops.name, "ref") == 0 ? "ref" : "cpu";
}

const char *hd_engine_activations(const hd_engine *e, hd_precision *precision) {
    *precision = e->ranks[0].ops.precision;
    return e->ranks[0].ops.activations;
}

void engine_mail_close(engine_mail *m) {
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
    free(e->tops);
    free(e->loads);
    engine_mail_close(&e->mail);
}

/* Ends the step threads. */
static void stop_ranks(hd_engine *e) {
    pthread_mutex_lock(&e->lock);
    e->closing = true;
    pthread_cond_broadcast(&e->wake);
    pthread_cond_broadcast(&e->taken);
    pthread_mutex_unlock(&e->lock);
    engine_ranks_join(e);
}

void hd_engine_close(hd_engine *e) {
    if (!e) return;
    stop_ranks(e);
    engine_drop_shown(e);
    for (int32_t i = 0; e->requests && i < e->n_requests; i++) {
        if (e->requests[i].id) engine_drop_request(e, &e->requests[i]);
    }
    engine_ranks_close(e);
    hd_grammar_vocab_close(e->vocab);
    engine_grammar_cache_close(e->grammars);
    engine_token_history_close(e->token_history);
    hd_tokenizer_close(e->tokenizer);
    hd_model_spec_close(e->spec);
    close_mailbox(e);
    pthread_cond_destroy(&e->wake);
    pthread_cond_destroy(&e->posted);
    pthread_cond_destroy(&e->taken);
    pthread_mutex_destroy(&e->lock);
    free(e);
}
