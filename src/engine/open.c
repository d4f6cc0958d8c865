/* open.c - the engine's parts in order of opening, and sizes where none are given. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "engine/engine_internal.h"

enum {
    DEFAULT_RUNNING = 16,
    DEFAULT_CONTEXT = 8192,
    DEFAULT_CHUNK = 256,
    DEFAULT_QUEUE = 1024
};

typedef struct sizes {
    int32_t running, context, chunk, step_rows, queue, drafts;
    hd_kv_shape shape;
    int32_t lease_pages, n_pages[HD_N_LIFETIMES], n_snapshots;
} sizes;

static int32_t or_default(int64_t value, int64_t standard) {
    const int64_t v = value > 0 ? value : standard;
    return v < INT32_MAX ? (int32_t)v : INT32_MAX;
}

static int32_t pages(const sizes *z, int64_t tokens) {
    return or_default(hd_ceil_div(tokens, z->shape.page_tokens), 1);
}

/* WINDOW pages: every request's window and next rows, and as much again of cached ones. */
static sizes choose_sizes(const hd_engine *e, const hd_engine_options *o) {
    sizes z = {.running = or_default(o->max_running, DEFAULT_RUNNING),
               .chunk = or_default(o->chunk_tokens, DEFAULT_CHUNK),
               .queue = or_default(o->queue_limit, DEFAULT_QUEUE),
               .drafts = e->drafts ? HD_MAX_DRAFTS : 0,
               .shape = hd_kv_shape_of(e->spec)};
    z.context = or_default(o->max_context, hd_min_i32(DEFAULT_CONTEXT, e->spec->max_positions));
    z.context = hd_min_i32(z.context, e->spec->max_positions);
    z.step_rows = or_default(o->step_tokens, z.chunk + z.running * HD_MAX_CHOSEN);
    z.lease_pages = pages(&z, (int64_t)z.context + HD_MAX_DRAFTS);
    const int64_t kv_tokens = o->kv_tokens > 0 ? o->kv_tokens : 2 * (int64_t)z.context;
    z.n_pages[HD_LIFE_ENTRIES] = hd_max_i32(pages(&z, kv_tokens), z.lease_pages);
    if (z.shape.reach) {
        const int32_t near = pages(&z, (int64_t)z.shape.reach + z.chunk + HD_MAX_DRAFTS) + 1;
        const int32_t decode = pages(&z, (int64_t)z.shape.reach + HD_MAX_CHOSEN) + 1;
        z.n_pages[HD_LIFE_WINDOW] = 2 * (near + z.running * decode);
        const int64_t kept = o->snapshot_tokens > 0 ? o->snapshot_tokens : kv_tokens;
        z.n_snapshots = pages(&z, kept);
    }
    return z;
}

static hd_status open_model(hd_engine *e, const hd_engine_options *o, hd_err *err) {
    const char *backend = o->backend ? o->backend : "cpu";
    const hd_cpu_options cpu = {.n_threads = o->threads};
    HD_TRY(hd_ops_open(&e->ops, &e->device, backend, &cpu, err));
    HD_TRY(hd_stream_open(&e->stream, e->device, err));
    HD_TRY(hd_model_spec_open(&e->spec, o->model_dir, err));
    HD_TRY(hd_tokenizer_open(&e->tokenizer, o->model_dir, err));
    HD_TRY(hd_tokenizer_check_rows(e->tokenizer, e->spec->vocab, err));
    HD_TRY(hd_chat_detect(&e->encoding, &e->thinks, o->model_dir, err));
    HD_TRY(hd_weights_open(&e->weights, o->model_dir, e->spec, err));
    e->drafts = !o->no_drafts && hd_weights_n_mtp(e->weights) > 0;
    return hd_weights_upload(e->weights, e->device, e->stream, err);
}

static hd_status open_mailbox(hd_engine *e, const sizes *z, hd_err *err) {
    const size_t n = (size_t)z->queue + (size_t)z->running;
    e->n_records = (int32_t)n;
    e->cap_turn_posts = z->running;
    e->cap_posts = 4 * z->running;
    e->records = calloc(n, sizeof *e->records);
    e->free = calloc(n, sizeof *e->free);
    e->submitted = calloc(n, sizeof *e->submitted);
    e->cancelled = calloc(n, sizeof *e->cancelled);
    e->inbox = calloc(n, sizeof *e->inbox);
    e->inbox_cancel = calloc(n, sizeof *e->inbox_cancel);
    e->posts = calloc((size_t)e->cap_posts, sizeof *e->posts);
    e->turn_posts = calloc((size_t)e->cap_turn_posts, sizeof *e->turn_posts);
    if (!e->records || !e->free || !e->submitted || !e->cancelled || !e->inbox ||
        !e->inbox_cancel || !e->posts || !e->turn_posts) {
        return HD_FAIL(err, HD_ENOMEM, "no memory for %zu requests", n);
    }
    for (int32_t i = 0; i < e->n_records; i++) e->free[i] = e->n_records - 1 - i;
    e->n_free = e->n_records;
    return HD_OK;
}

static hd_status open_all(hd_engine *e, const hd_engine_options *o, hd_err *err) {
    if (o->size != sizeof *o) {
        return HD_FAIL(err, HD_EINVAL, "hd_engine_options of %zu bytes; this library knows %zu",
                       o->size, sizeof *o);
    }
    HD_TRY(open_model(e, o, err));
    const sizes z = choose_sizes(e, o);
    e->max_context = z.context;
    const hd_model_env env = {e->spec, e->weights, &e->ops, e->device, e->stream};
    const hd_executor_options x = {
        .n_slots = z.running,
        .step_rows = z.step_rows,
        .positions = z.context + HD_MAX_DRAFTS,
        .lease_pages = z.lease_pages,
        .n_pages = {z.n_pages[0], z.n_pages[1]},
        .n_snapshots = z.n_snapshots,
        .n_ids = hd_tokenizer_vocab_size(e->tokenizer),
        .max_drafts = z.drafts
    };
    HD_TRY(hd_executor_open(&e->executor, &env, &x, err));
    const hd_sched_options s = {
        .cache = {.page_tokens = z.shape.page_tokens,
                  .reach = z.shape.reach,
                  .n_pages = {z.n_pages[0], z.n_pages[1]},
                  .n_snapshots = z.n_snapshots,
                  .n_leases = z.running,
                  .lease_pages = z.lease_pages},
        .step_rows = z.step_rows,
        .chunk_rows = z.chunk,
        .queue_limit = z.queue + z.running,
        .max_positions = z.context
    };
    const hd_runner runner = hd_executor_runner(e->executor);
    const hd_sched_hooks hooks = engine_hooks(e);
    HD_TRY(hd_sched_open(&e->sched, &s, &runner, &hooks, err));
    HD_TRY(open_mailbox(e, &z, err));
    e->stats.activation_bytes = hd_executor_bytes(e->executor);
    return engine_start(e, err);
}

int hd_engine_open(hd_engine **out, const hd_engine_options *options, char *why,
                   size_t why_size) {
    hd_err err = {0};
    *out = NULL;
    hd_engine *e = calloc(1, sizeof *e);
    if (!e) {
        HD_FAIL(&err, HD_ENOMEM, "no memory for an engine");
    } else {
        pthread_mutex_init(&e->lock, NULL);
        pthread_cond_init(&e->mail, NULL);
        pthread_cond_init(&e->posted, NULL);
        pthread_cond_init(&e->taken, NULL);
        if (open_all(e, options, &err) == HD_OK) {
            *out = e;
            return 0;
        }
        hd_engine_close(e);
    }
    if (why && why_size) snprintf(why, why_size, "%s", err.msg);
    return (int)err.code;
}

void hd_engine_close(hd_engine *e) {
    if (!e) return;
    engine_stop(e);
    for (int32_t i = 0; e->records && i < e->n_records; i++) {
        if (e->records[i].id) engine_drop_record(e, &e->records[i]);
    }
    hd_sched_close(e->sched);
    hd_executor_close(e->executor);
    hd_stream_close(e->stream);
    hd_device_close(e->device);
    hd_weights_close(e->weights);
    hd_tokenizer_close(e->tokenizer);
    hd_model_spec_close(e->spec);
    free(e->records);
    free(e->free);
    free(e->submitted);
    free(e->cancelled);
    free(e->inbox);
    free(e->inbox_cancel);
    free(e->posts);
    free(e->turn_posts);
    pthread_cond_destroy(&e->mail);
    pthread_cond_destroy(&e->posted);
    pthread_cond_destroy(&e->taken);
    pthread_mutex_destroy(&e->lock);
    free(e);
}
