/* open.c - opens the engine: checks options, reads the tokenizer, opens the ranks (rank.c)
 * and the mailbox. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/cores.h"
#include "engine/hisparse.h"
#include "engine/notices.h"
#include "engine/experts.h"
#include "engine/remote/remote.h"
#include "weights/config/drafter_folder.h"
#include "weights/manifest.h"

enum { TOKEN_HISTORY_BYTES = 16 << 20, MAX_HOST_GB = 1000000 };

static bool is_null(const hd_engine_options *o) {
    return o->backend && strcmp(o->backend, "null") == 0;
}

/* Bytes of a page in host memory. */
static double host_page_bytes(const hd_engine *e, const hd_engine_sizes *z, hd_kv_group group) {
    const int32_t n_mtp = e->whole ? hd_weights_n_mtp(e->whole) : e->spec->n_mtp;
    size_t row = 0;
    for (int k = 0; k < HD_N_REPLAYS && group == HD_KV_FULL; k++) {
        if (e->replay[k]) row += (size_t)hd_replay_shape_of(e->spec, (hd_replay)k).row_bytes;
    }
    return (double)(row * (size_t)z->shape.page_tokens +
                    hd_kv_page_bytes(e->spec, e->spec->n_layers + n_mtp, group,
                                     e->ranks[0].ops.kv_type, z->drafts));
}

/* The host memory of --kv-host, if any, as pages. */
static hd_status choose_host(const hd_engine *e, const hd_engine_options *o, hd_engine_sizes *z,
                             hd_err *err) {
    double bytes[HD_N_KV_GROUPS];
    if (o->kv_host_gb == 0) return HD_OK;
    for (int g = 0; g < HD_N_KV_GROUPS; g++) bytes[g] = host_page_bytes(e, z, (hd_kv_group)g);
    return hd_engine_sizes_divide_host(z, o, bytes, err);
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

/* Chooses whether drafts are made. The null runner can be any drafter. */
static hd_status choose_drafter(hd_engine *e, const hd_engine_options *o, hd_err *err) {
    const hd_weights *weights = e->whole;
    const char *asked = o->drafter ? o->drafter : "auto";
    const bool none = strcmp(asked, "none") == 0, any = strcmp(asked, "auto") == 0;
    const bool has = !weights || hd_weights_n_mtp(weights) > 0;
    const char *own = hd_drafter_name(has ? e->spec->drafter : HD_DRAFTER_NONE);
    if (!any && !none && strcmp(asked, "mtp") != 0 && strcmp(asked, "dspark") != 0) {
        return HD_FAIL(err, HD_EINVAL, "drafter '%s' is not auto, mtp, dspark or none", asked);
    }
    if (!any && o->no_drafts) {
        return HD_FAIL(err, HD_EINVAL, "drafter '%s' and no_drafts are both given", asked);
    }
    if (!any && !none && weights && strcmp(asked, own) != 0) {
        const bool folder = strcmp(asked, hd_drafter_name(HD_DRAFTER_DSPARK)) == 0;
        return HD_FAIL(err, HD_EINVAL, "drafter '%s' is asked for, but that of %s is '%s'%s",
                       asked, o->model_dir, own,
                       folder ? ", and it has no folder " HD_DRAFTER_FOLDER : "");
    }
    e->drafts = has && !none && !o->no_drafts;
    if (!o->need_drafts || e->drafts || !e->has_model) return HD_OK;
    return HD_FAIL(err, HD_EINVAL, "drafts are asked for, but %s %s", o->model_dir,
                   has ? "may not draft" : "has no drafter");
}

/* Opens the ranks with their weights. */
static hd_status open_model(hd_engine *e, const hd_engine_options *o, hd_precision precision,
                            hd_err *err) {
    HD_TRY(engine_ranks_open(e, o, precision, err));
    e->has_model = e->whole != NULL;
    HD_TRY(choose_drafter(e, o, err));
    for (int32_t i = 0; i < e->n_ranks; i++) {
        HD_TRY(engine_rank_upload(&e->ranks[i], o, err));
    }
    for (int32_t i = 0; i < e->n_ranks; i++) {
        HD_TRY(engine_experts_open(&e->ranks[i], o, err));
    }
    engine_note_oddities(e, e->whole);
    return HD_OK;
}

static void place_tops(hd_engine *e) {
    hd_alternative *at = e->tops;
    e->event_post.top = at;
    for (int32_t i = 0; i < e->cap_posts; i++) e->posts[i].top = at += engine_post_tops(e);
}

static hd_status open_mailbox(hd_engine *e, const hd_engine_sizes *z, hd_err *err) {
    const int64_t running = (int64_t)z->running * e->parallel.dp;
    const int64_t living = z->queue + running;
    if (living > ENGINE_MAX_LIVING) {
        return HD_FAIL(err, HD_EINVAL, "%lld choices that run or wait; at most %d",
                       (long long)living, ENGINE_MAX_LIVING);
    }
    const size_t n = (size_t)living;
    /* A request whose last event is being shown no longer counts as living but still needs
     * its engine_request. */
    e->n_requests = (int32_t)living + 1;
    e->max_living = (int32_t)living;
    e->cap_posts = 4 * (int32_t)running;
    e->requests = calloc(n + 1, sizeof *e->requests);
    e->free = calloc(n + 1, sizeof *e->free);
    e->posts = calloc((size_t)e->cap_posts, sizeof *e->posts);
    e->tops = calloc((size_t)(e->cap_posts + 1) * engine_post_tops(e), sizeof *e->tops);
    if (!e->requests || !e->free || !e->posts || !e->tops) {
        return HD_FAIL(err, HD_ENOMEM, "no memory for %zu requests", n);
    }
    HD_TRY(engine_groups_open(e, z->running, err));
    if (e->n_groups > 1) {
        const int64_t pages = (int64_t)z->n_pages[HD_KV_FULL] * e->n_groups;
        HD_TRY(engine_router_open(&e->router, e, pages, err));
    }
    if (e->ucx && e->n_groups > 1) HD_TRY(engine_remote_open(&e->remote, e, err));
    place_tops(e);
    for (int32_t i = 0; i < e->n_requests; i++) e->free[i] = e->n_requests - 1 - i;
    e->n_free = e->n_requests;
    return HD_OK;
}

/* Opens what computes: the runners, with the leaders' schedulers and inboxes. */
static hd_status open_runners(hd_engine *e, const hd_engine_sizes *z,
                              const hd_engine_options *o, hd_err *err) {
    if (e->has_model) {
        if (e->tokenizer) {
            HD_TRY(hd_grammar_vocab_open_tokenizer(&e->vocab, e->tokenizer, e->spec->vocab,
                                                   e->spec->eos, e->spec->n_eos, err));
        }
    }
    for (int32_t i = 0; i < e->n_ranks; i++) {
        HD_TRY(engine_rank_open_runner(&e->ranks[i], z, o, err));
        HD_TRY(engine_rank_open_inbox(&e->ranks[i], z, e->max_living, err));
    }
    engine_ranks_count_memory(e);
    engine_world_show_first(e);
    return engine_world_keep(e, z, o, err);
}

/* Refuses what has no meaning without a model. */
static hd_status check_null(const hd_engine *e, const hd_engine_options *o,
                            hd_precision precision, hd_err *err) {
    if (e->forced_acceptance) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "the null backend accepts by a rule of its own");
    }
    if (precision != HD_EXACT && precision != HD_AUTO) {
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "the null backend multiplies nothing: precision %s has no meaning",
                       o->precision);
    }
    if (o->no_batch_invariance) {
        return HD_FAIL(
            err, HD_EUNSUPPORTED,
            "the null backend multiplies nothing: no-batch-invariance has no meaning");
    }
    if (o->kv_cache_dtype && strcmp(o->kv_cache_dtype, "auto") != 0) {
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "the null backend caches nothing: kv_cache_dtype %s has no meaning",
                       o->kv_cache_dtype);
    }
    if (e->mla == HD_MLA_NAIVE) {
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "the null backend attends to nothing: mla naive has no meaning");
    }
    if (o->gpu != 0) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "gpu %d is for backend cuda, not for null",
                       o->gpu);
    }
    if (e->cuda_path) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "cuda_path %s is for backend cuda, not for null",
                       o->cuda_path);
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
    if (!(o->kv_host_gb >= 0 && o->kv_host_gb <= MAX_HOST_GB)) {
        return HD_FAIL(err, HD_EINVAL, "kv_host_gb is %g; must be 0 to %d", o->kv_host_gb,
                       MAX_HOST_GB);
    }
    if (o->kv_write_through && o->kv_host_gb <= 0) {
        return HD_FAIL(err, HD_EINVAL,
                       "kv_write_through without kv_host: pages are written to host memory");
    }
    if (!hd_is_within(o->max_logprobs, 0, HD_MAX_ALTERNATIVES)) {
        return HD_FAIL(err, HD_EINVAL, "max_logprobs is %d; must be 0 to %d", o->max_logprobs,
                       HD_MAX_ALTERNATIVES);
    }
    e->forced_acceptance = o->forced_acceptance > 0;
    HD_TRY(hd_precision_of(precision, o->precision, err));
    HD_TRY(hd_mla_form_of(&e->mla, o->mla, err));
    HD_TRY(hd_cuda_path_of(&e->cuda_path, o->cuda_path, err));
    if (is_null(o)) HD_TRY(check_null(e, o, *precision, err));
    if (o->null_step_us < 0 || (o->null_step_us && !is_null(o))) {
        return HD_FAIL(err, HD_EINVAL,
                       "null_step_us is %d; only steps of the null backend take a time of "
                       "one's choice",
                       o->null_step_us);
    }
    return HD_OK;
}

static hd_status check_prompt_decoder(hd_engine *e, const hd_engine_options *o, hd_err *err) {
    const char *asked = o->prompt_decoder ? o->prompt_decoder : "tail";
    const hd_kv_shape shape = hd_kv_shape_of(e->spec);
    const bool tail = strcmp(asked, "tail") == 0;
    e->whole_prompts = strcmp(asked, "whole") == 0;
    e->replays_prompts = strcmp(asked, "replay") == 0;
    if (!tail && !e->whole_prompts && !e->replays_prompts) {
        return HD_FAIL(err, HD_EINVAL, "prompt_decoder '%s' is not tail, whole or replay",
                       asked);
    }
    if (!tail && hd_kv_longest_tail(&shape) == 0) {
        return HD_FAIL(err, HD_EINVAL,
                       "prompt_decoder '%s': only V4.1 computes less of a prompt", asked);
    }
    if (!e->replays_prompts || (e->parallel.dp == 1 || e->independent)) return HD_OK;
    return HD_FAIL(err, HD_EUNSUPPORTED,
                   "prompt_decoder replay with dp: attention groups would have to agree on the "
                   "rows that are left");
}

/* What has weights that can be replaced. */
static hd_status check_updatable(hd_engine *e, const hd_engine_options *o, hd_err *err) {
    const char *why = NULL;
    e->updatable = o->updatable;
    e->threads = o->threads;
    if (!o->updatable) {
        if (!o->weights_backup) return HD_OK;
        return HD_FAIL(err, HD_EINVAL, "a backup of weights that cannot be replaced");
    }
    if (is_null(o)) why = "the null backend has none";
    if (o->dummy_weights) why = "random ones belong to no checkpoint";
    if (engine_rebalance_is_on(o) && e->parallel.etp > 1)
        why = "experts are cut and move between ranks (--rebalance)";
    if (engine_fetches(e) || e->dwdp_from)
        why = "ranks have copies of each other's experts (--dwdp)";
    if (why) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "weights cannot be replaced here: %s", why);
    }
    if (o->weights_backup && o->world.size > 1) {
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "a backup of weights: ranks in other processes keep their memory");
    }
    return o->weights_backup ? hd_weights_backup_open(&e->backup, o->weights_backup, err)
                             : HD_OK;
}

static hd_status check_replay(hd_engine *e, const hd_engine_options *o, hd_err *err) {
    static const struct {
        const char *what, *missing;
    } kinds[HD_N_REPLAYS] = {
        [HD_REPLAY_EXPERTS] = {"routed experts",  "the model has no experts"},
        [HD_REPLAY_KEYS] = {"indexer choices", "the model has no indexer"},
    };
    for (int k = 0; k < HD_N_REPLAYS; k++) {
        const char *why = NULL;
        e->replay[k] = o->replay[k];
        if (!o->replay[k]) continue;
        if (is_null(o)) why = "the null backend chooses nothing";
        if (hd_replay_shape_of(e->spec, (hd_replay)k).row_bytes == 0) why = kinds[k].missing;
        if (hd_parallel_world(&e->parallel) > 1) why = "several ranks have a part of them each";
        if (e->replays_prompts) why = "prompt_decoder replay leaves positions out";
        e->whole_prompts = true; /* a position that is not computed chooses nothing */
        if (!why) continue;
        return HD_FAIL(err, HD_EUNSUPPORTED, "%s cannot be kept here: %s", kinds[k].what, why);
    }
    return HD_OK;
}

static hd_status open_all(hd_engine *e, const hd_engine_options *o, hd_err *err) {
    hd_precision precision;
    HD_TRY(check_options(e, o, &precision, err));
    if (o->manifest) HD_TRY(hd_manifest_check(o->manifest, o->model_dir, err));
    HD_TRY(hd_model_spec_open_drafter(&e->spec, o->model_dir, o->drafter, err));
    if (o->max_context > e->spec->max_positions) {
        return HD_FAIL(err, HD_EINVAL, "a context of %d tokens; this model knows %d positions",
                       o->max_context, e->spec->max_positions);
    }
    if (!o->dummy_weights) HD_TRY(open_text(e, o->model_dir, err));
    e->n_ids = e->tokenizer ? hd_tokenizer_vocab_size(e->tokenizer) : e->spec->vocab;
    HD_TRY(engine_ranks_choose(e, o, err));
    HD_TRY(check_prompt_decoder(e, o, err));
    HD_TRY(check_updatable(e, o, err));
    HD_TRY(check_replay(e, o, err));
    HD_TRY(engine_experts_check(e, o, err));
    HD_TRY(engine_kv_disk_check(o, err));
    HD_TRY(engine_hisparse_check(e, o, err));
    HD_TRY(open_model(e, o, precision, err));
    hd_engine_sizes z = hd_engine_sizes_of(e->spec, e->drafts, o);
    engine_hisparse_choose(e, o, &z);
    HD_TRY(choose_host(e, o, &z, err));
    e->max_context = z.context;
    e->max_logprobs = z.logprobs;
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
    pthread_cond_init(&e->ordered, &monotonic);
    pthread_cond_init(&e->updated, NULL);
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

const char *hd_engine_cuda_path(const hd_engine *e) {
    return is_on_gpu(e) ? hd_cuda_path_names[hd_device_cuda_path(e->ranks[0].device)] : NULL;
}

const char *hd_engine_kv_cache_dtype(const hd_engine *e) {
    return hd_kv_type_name(e->ranks[0].ops.kv_type);
}

const char *hd_engine_activations(const hd_engine *e, hd_precision *precision) {
    *precision = e->ranks[0].ops.precision;
    return e->ranks[0].ops.activations;
}

static void close_mailbox(hd_engine *e) {
    for (int32_t i = 0; i < e->n_posts; i++) {
        free(e->posts[(e->first_post + i) % e->cap_posts].why);
    }
    free(e->requests);
    free(e->free);
    free(e->posts);
    free(e->tops);
    engine_groups_close(e);
    engine_router_close(e->router);
    engine_remote_close(e->remote);
}

/* Ends the step threads. */
static void stop_ranks(hd_engine *e) {
    pthread_mutex_lock(&e->lock);
    e->closing = true;
    pthread_cond_broadcast(&e->wake);
    pthread_cond_broadcast(&e->taken);
    pthread_cond_broadcast(&e->ordered);
    pthread_cond_broadcast(&e->updated);
    pthread_mutex_unlock(&e->lock);
    engine_ranks_join(e);
}

void hd_engine_close(hd_engine *e) {
    if (!e) return;
    stop_ranks(e);
    engine_drop_shown(e);
    for (int32_t i = 0; e->requests && i < e->n_requests; i++) {
        if (!e->requests[i].id) continue;
        engine_deinit_request(e, &e->requests[i]);
        free(e->requests[i].choices);
    }
    engine_ranks_close(e);
    engine_world_close(e);
    hd_grammar_vocab_close(e->vocab);
    engine_grammar_cache_close(e->grammars);
    engine_token_history_close(e->token_history);
    hd_tokenizer_close(e->tokenizer);
    hd_model_spec_close(e->spec);
    close_mailbox(e);
    engine_versions_close(e);
    hd_weights_backup_close(e->backup);
    pthread_cond_destroy(&e->wake);
    pthread_cond_destroy(&e->posted);
    pthread_cond_destroy(&e->taken);
    pthread_cond_destroy(&e->ordered);
    pthread_cond_destroy(&e->updated);
    pthread_mutex_destroy(&e->lock);
    free(e);
}
