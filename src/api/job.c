/* job.c - runs an API job from submission to its last event: collects deltas, decides when a
 * streamed chunk is due, counts tokens, cancels and ends. */
#include "api/job.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#include "base/progress.h"
#include "api/background.h"
#include "api/reserve.h"
#include "api/resume.h"

enum { STATUS_GONE = 499 }; /* logged if the client left */

/* ---- failure ---- */

/* Records a failure; only the first is kept. */
static void fail_job(api_job *job, int status, const char *code, const char *message) {
    pthread_mutex_lock(&job->failing);
    if (!job->failure.status) {
        job->failure.status = status;
        job->failure.code = code;
        snprintf(job->failure.message, sizeof job->failure.message, "%s", message);
    }
    pthread_mutex_unlock(&job->failing);
}

static void cancel_all(api_job *job) {
    for (int32_t i = 0; i < job->n_subs; i++) {
        const uint64_t id = atomic_load(&job->subs[i].id);
        if (id) hd_engine_cancel(job->ctx->engine, id);
    }
}

/* A prompt that is not submitted yet sees the flag. */
void api_job_cancel(api_job *job) {
    atomic_store(&job->cancelled, true);
    cancel_all(job);
}

/* Runs on an HTTP thread or on the polling thread. */
static void leave(void *user) {
    api_job *job = user;
    atomic_store(&job->gone, true);
    api_job_cancel(job);
}

/* ---- the end ---- */

static void job_close(api_job *job) {
    if (job->format->deinit) job->format->deinit(job->state);
    for (int32_t i = 0; i < job->n_choices; i++) {
        api_choice *c = &job->choices[i];
        api_text *texts[] = {&c->text,      &c->ids,
                             &c->logprobs,  &c->tops,
                             &c->kept,      &c->prompt_logprobs,
                             &c->call_name, &c->stop_text,
                             &c->item,      &c->earlier_versions,
                             &c->masks,     &c->mask_logprobs};
        for (size_t k = 0; k < HD_LEN(texts); k++) api_text_deinit(texts[k]);
        free(c->pieces);
    }
    api_text *texts[] = {&job->head, &job->out, &job->prompt_ids};
    for (size_t k = 0; k < HD_LEN(texts); k++) api_text_deinit(texts[k]);
    pthread_mutex_destroy(&job->failing);
    http_release(job->call);
    free(job->choices);
    free(job->subs);
    free(job);
}

static void send_out(api_job *job) {
    api_resume_tell(job);
    if (job->out.failed) {
        fail_job(job, 503, "out_of_memory", "no memory for the response");
        leave(job);
    } else if (job->out.n > 0 && !atomic_load(&job->gone)) {
        const bool there = http_stream_write(job->call, job->out.data, job->out.n);
        if (job->w.background) {
            api_background_write(job->ctx->background, job, job->out.data, job->out.n);
        } else if (!there) {
            leave(job);
        }
    }
    api_text_clear(&job->out);
}

/* For what the client has: only the state of the format changes. */
static void quietly(api_job *job, api_choice *c, void (*write)(api_job *job, api_choice *c)) {
    const size_t n = job->out.n;
    const int32_t sequence = job->sequence;
    write(job, c);
    job->out.n = n;
    job->sequence = sequence;
}

static void begin_stream(api_job *job) {
    if (job->began) return;
    job->began = true;
    http_stream_begin(job->call);
    if (job->format->begin && !job->resumed) job->format->begin(job);
}

static void send_error(const api_job *job) {
    const api_refusal *why = &job->failure;
    if (why->status == 429 || why->status == 503) {
        http_reply_header(job->call, "Retry-After", "1");
    }
    http_error(job->call, why->status, api_error_type(job->format->shape, why->status),
               why->code, *why->param ? why->param : NULL, "%s", why->message);
}

static void answer(api_job *job) {
    if (job->w.stream && (job->began || !job->failure.status)) {
        begin_stream(job);
        job->failure.status ? job->format->fail(job) : job->format->end(job);
        send_out(job);
        http_stream_end(job->call);
        return;
    }
    if (!job->failure.status || job->accepted) {
        job->format->reply(job);
        if (job->out.failed) fail_job(job, 503, "out_of_memory", "no memory for the response");
    }
    if (job->accepted) return;
    if (job->failure.status) {
        send_error(job);
    } else {
        api_reply(job->call, "application/json", &job->out);
    }
}

static void report(api_job *job) {
    api_outcome *o = &job->outcome;
    const api_totals t = api_job_totals(job);
    if (!job->ctx->on_end) return;
    o->endpoint = job->format->endpoint;
    o->request_id = http_request_id(job->call);
    o->status = job->failure.status && !job->began ? job->failure.status : 200;
    if (atomic_load(&job->gone)) o->status = STATUS_GONE;
    if (!job->failure.status) o->finish = api_finish_reason(&job->choices[0]);
    o->prompt_tokens = (int32_t)t.prompt;
    o->cached_tokens = (int32_t)t.cached;
    o->output_tokens = (int32_t)t.output;
    o->reasoning_tokens = (int32_t)t.reasoning;
    o->start_ns = http_start_ns(job->call);
    o->end_ns = hd_now_ns();
    job->ctx->on_end(job->ctx->server, o);
}

/* Reports the outcome first, so that a client that has its reply finds it in the metrics. */
static void drop(api_job *job) {
    if (atomic_fetch_sub(&job->refs, 1) != 1) return;
    report(job);
    answer(job);
    if (job->w.background) {
        api_background_remove(job->ctx->background, job, job->ctx->store);
    }
    job_close(job);
}

/* ---- events ---- */

static api_piece *new_piece(api_choice *c, hd_delta_kind kind, int32_t call) {
    if (c->n_pieces == c->cap_pieces) {
        const size_t cap = c->cap_pieces ? 2 * c->cap_pieces : 8;
        api_piece *pieces = realloc(c->pieces, cap * sizeof *pieces);
        if (!pieces) return NULL;
        c->pieces = pieces;
        c->cap_pieces = cap;
    }
    assert(c->pieces != NULL);
    api_piece *p = &c->pieces[c->n_pieces++];
    *p = (api_piece){.kind = kind, .call = call, .start = c->text.n};
    return p;
}

static void forget_pending(const api_job *job, api_choice *c) {
    c->n_pending = 0;
    if (job->format->cumulative) return;
    c->n_pieces = 0;
    api_text_clear(&c->text);
    api_text_clear(&c->logprobs);
    api_text_clear(&c->tops);
    api_text_clear(&c->ids);
}

static void put_piece(api_job *job, api_choice *c, hd_delta_kind kind, int32_t call,
                      const hd_delta *part) {
    api_piece *p = c->n_pieces ? &c->pieces[c->n_pieces - 1] : NULL;
    if (!p || p->kind != kind || p->call != call || kind == HD_DELTA_CALL) {
        p = new_piece(c, kind, call);
    }
    if (!p) {
        job->out.failed = true;
        return;
    }
    api_put(&c->text, part->text, part->n);
    if (c->text.failed) { /* the piece must not refer to missing bytes */
        job->out.failed = true;
        return;
    }
    p->n += part->n;
    p->whole = part->whole;
}

static void add_piece(api_job *job, api_choice *c, hd_delta_kind kind, int32_t call,
                      const hd_delta *whole) {
    const api_resume_parts p = api_resume_split(c, kind, whole);
    if (p.has_had) {
        put_piece(job, c, kind, call, &p.had);
        quietly(job, c, job->format->chunk);
        forget_pending(job, c);
    }
    if (p.has_lacks) put_piece(job, c, kind, call, &p.lacks);
}

static void collect_part(api_job *job, api_choice *c, const hd_delta *p) {
    const bool of_call = p->kind == HD_DELTA_CALL || p->kind == HD_DELTA_ARGUMENTS ||
                         p->kind == HD_DELTA_CALL_END;
    if (p->kind == HD_DELTA_NOTE) return;
    if (of_call && p->call > 0 && !job->w.parallel_calls) return;
    if (p->kind == HD_DELTA_CALL_END) c->n_calls += p->whole;
    const bool reasoning = p->kind == HD_DELTA_REASONING;
    if (!job->w.separate_reasoning && (reasoning || p->kind == HD_DELTA_CONTENT)) {
        static const hd_delta end = {.text = "</think>", .n = 8};
        if (c->in_reasoning && !reasoning) add_piece(job, c, HD_DELTA_CONTENT, 0, &end);
        add_piece(job, c, HD_DELTA_CONTENT, 0, p);
    } else {
        add_piece(job, c, p->kind, of_call ? p->call : 0, p);
    }
    c->in_reasoning = reasoning;
}

static void collect(api_job *job, api_choice *c, const hd_event *e) {
    if (e->prompt.n > 0 && job->format->prompt_logprobs) {
        job->format->prompt_logprobs(job, c, &e->prompt);
    }
    for (int k = 0; k < HD_N_REPLAYS && job->format->replay; k++) {
        if (e->replay[k].rows) job->format->replay(job, c, (hd_replay)k, &e->replay[k]);
    }
    if (job->w.prefill_only) return;
    for (size_t i = 0; i < e->n_deltas; i++) collect_part(job, c, &e->deltas[i]);
    for (int32_t i = 0; i < e->step.n_tokens; i++) {
        if (job->w.logprobs || job->w.sampling_mask) {
            job->format->logprob(job, c, &e->step, i);
        }
        if (!job->w.token_ids) continue;
        api_comma(&c->ids);
        api_put_int(&c->ids, e->step.tokens[i]);
    }
    c->n_pending += e->step.n_tokens;
    if (job->format->cumulative) c->collected = c->output_tokens;
    if (c->logprobs.failed || c->tops.failed || c->ids.failed || c->masks.failed ||
        c->prompt_logprobs.failed) {
        job->out.failed = true;
    }
}

static void note_first(api_job *job, int64_t now) {
    job->outcome.first_ns = now;
    if (!job->ctx->on_first) return;
    job->ctx->on_first(job->ctx->server, now - http_start_ns(job->call));
}

/* The engine keeps one string per version. */
static void note_version(api_job *job, api_choice *c, const hd_event *e) {
    const int32_t start = e->output_tokens - e->step.n_tokens;
    if (e->weight_version == c->weight_version) return;
    if (start > c->version_start) {
        const api_version_span span = {c->weight_version, c->version_start, start};
        api_put(&c->earlier_versions, (const char *)&span, sizeof span);
    }
    c->version_start = start;
    c->weight_version = e->weight_version;
    if (c->earlier_versions.failed) job->out.failed = true;
}

static void count(api_job *job, api_choice *c, const hd_event *e) {
    const int64_t now = hd_now_ns();
    api_outcome *o = &job->outcome;
    c->prompt_tokens = e->prompt_tokens;
    c->cached_tokens = e->step.n_cached;
    c->output_tokens = job->w.prefill_only ? 0 : e->output_tokens;
    c->reasoning_tokens = job->w.prefill_only ? 0 : e->reasoning_tokens;
    c->retracted = e->retracted;
    c->admitted = e->admitted_ns != 0;
    note_version(job, c, e);
    c->drafted = e->drafted;
    c->accepted = e->accepted;
    c->draft_steps = e->drafted_at[0];
    if (!o->admitted_ns) o->admitted_ns = e->admitted_ns;
    if (e->step.n_tokens > 0) {
        if (!o->first_ns) note_first(job, now);
        if (c->last_ns && job->ctx->on_token) {
            job->ctx->on_token(job->ctx->server, e->step.n_tokens, now - c->last_ns);
        }
        c->last_ns = now;
    }
    for (int32_t i = 0; e->step.finish_reason != HD_FINISH_NONE && i < HD_MAX_DRAFTS; i++) {
        o->drafted_at[i] += e->drafted_at[i];
        o->accepted_at[i] += e->accepted_at[i];
    }
}

static void note_end(api_job *job, api_choice *c, const hd_event *e) {
    c->finish_reason = e->step.finish_reason;
    if (job->w.prefill_only && e->step.finish_reason == HD_FINISH_STOP)
        c->finish_reason = HD_FINISH_LENGTH;
    c->stop_token = e->stop_token;
    if (e->stop_text) api_puts(&c->stop_text, e->stop_text);
    if (c->stop_text.failed) job->out.failed = true;
    if (e->step.finish_reason == HD_FINISH_TIMEOUT) {
        fail_job(job, 408, "queue_timeout", "the request waited too long in the queue");
    } else if (e->step.finish_reason == HD_FINISH_ERROR) {
        fail_job(job, 500, "internal_error", e->why ? e->why : "the computation failed");
    }
}

static bool chunk_is_due(const api_job *job, const api_choice *c) {
    if (job->format->cumulative && c->output_tokens <= c->written) return false;
    if (c->finish_reason != HD_FINISH_NONE) {
        /* its last event comes with the finish reason */
        if (job->format->cumulative) return false;
        return !c->opened || c->n_pieces > 0 || c->logprobs.n > 0 || c->ids.n > 0;
    }
    if (c->opened && c->n_pieces == 0) return false;
    if (!job->w.stream_reasoning && c->in_reasoning) return false;
    return !c->opened || c->n_pending >= job->w.stream_interval;
}

/* Before the first token, after every step of the prompt. Another server told it already if it began. */
static void tell_progress(api_job *job, const api_choice *c, const hd_event *e) {
    const bool failed = e->step.finish_reason != HD_FINISH_NONE && e->step.n_tokens == 0;
    if (!job->w.progress || job->resumed || c->opened || e->choice || failed) return;
    begin_stream(job);
    job->format->progress(job, c, e);
    send_out(job);
}

static void stream(api_job *job, api_choice *c) {
    const bool failed =
        c->finish_reason == HD_FINISH_TIMEOUT || c->finish_reason == HD_FINISH_ERROR;
    if (!c->opened && c->n_pending == 0 && c->finish_reason == HD_FINISH_NONE) return;
    if (failed && !job->began) return; /* the reply is an error, not a stream */
    if (chunk_is_due(job, c)) {
        begin_stream(job);
        job->format->chunk(job, c);
        c->opened = true;
        if (c->written < c->collected) c->written = c->collected;
        forget_pending(job, c);
    }
    if (c->finish_reason != HD_FINISH_NONE && !failed && c->finish_written) {
        quietly(job, c, job->format->finish);
    } else if (c->finish_reason != HD_FINISH_NONE && !failed) {
        begin_stream(job);
        job->format->finish(job, c);
        c->finish_written = true;
    }
    send_out(job);
}

static void on_event(void *user, const hd_event *e) {
    api_sub *sub = user;
    api_job *job = sub->job;
    api_choice *c = &job->choices[sub->first_choice + e->choice];
    const bool last = e->last;
    sub->prompt_tokens = e->prompt_tokens;
    count(job, c, e);
    collect(job, c, e);
    if (e->step.finish_reason != HD_FINISH_NONE) note_end(job, c, e);
    if (job->w.stream && !atomic_load(&job->gone)) {
        tell_progress(job, c, e);
        stream(job, c);
    }
    if (last) drop(job);
}

/* ---- the beginning ---- */

static api_job *job_open(api_request *r, const api_format *format, const api_prompt *prompts,
                         int32_t n) {
    api_job *job = calloc(1, sizeof *job);
    int32_t n_choices = 0;
    for (int32_t i = 0; i < n; i++) n_choices += prompts[i].g.n;
    if (!job) return NULL;
    assert(n_choices > 0);
    job->subs = calloc((size_t)n, sizeof *job->subs);
    job->choices = calloc((size_t)n_choices, sizeof *job->choices);
    if (!job->subs || !job->choices || pthread_mutex_init(&job->failing, NULL) != 0) {
        free(job->subs);
        free(job->choices);
        free(job);
        return NULL;
    }
    job->format = format;
    job->call = r->call;
    job->ctx = r->ctx;
    job->w = r->w;
    job->model = r->ctx->model_name;
    job->created = (int64_t)time(NULL);
    job->n_subs = n;
    job->n_choices = n_choices;
    snprintf(job->id, sizeof job->id, "%s%s", format->id_prefix, r->id);
    if (getrandom(&job->nonce, sizeof job->nonce, 0) != sizeof job->nonce) {
        job->nonce = (uint64_t)hd_now_ns();
    }
    atomic_init(&job->refs, 1);
    atomic_init(&job->gone, false);
    atomic_init(&job->cancelled, false);
    int32_t k = 0;
    for (int32_t i = 0; i < n; i++) {
        job->subs[i].job = job;
        job->subs[i].first_choice = k;
        atomic_init(&job->subs[i].id, 0);
        for (int32_t a = 0; a < prompts[i].g.n; a++, k++) {
            job->choices[k] = (api_choice){.index = k, .prompt = i, .stop_token = -1};
        }
    }
    return job;
}

static void refuse_submission(api_job *job, api_request *r, hd_status st, const hd_err *err) {
    hd_engine_stats stats;
    hd_engine_read_stats(job->ctx->engine, &stats);
    if (stats.draining) {
        fail_job(job, 503, "draining", "the server is shutting down");
    } else if (st == HD_EAGAIN && err->code) {
        fail_job(job, 503, err->code, err->msg);
    } else if (st == HD_EAGAIN) {
        fail_job(job, 429, "queue_full", "the queue is full; try again later");
    } else {
        api_refuse_err(r, NULL, err);
        pthread_mutex_lock(&job->failing);
        if (!job->failure.status) job->failure = r->refusal;
        pthread_mutex_unlock(&job->failing);
    }
    cancel_all(job);
}

static bool submit(api_job *job, api_request *r, api_sub *sub, const api_prompt *p) {
    hd_request g = p->g;
    hd_err err = {0};
    uint64_t id = 0;
    g.tokens = p->tokens;
    g.n_tokens = p->n;
    if (!g.max_tokens) g.max_tokens = r->most_tokens;
    g.prefill = http_header(job->call, "X-Hadal-Prefill");
    g.trace_id = http_request_id(job->call);
    g.prompt_progress = job->w.progress;
    g.on_event = on_event;
    g.user = sub;
    atomic_fetch_add(&job->refs, 1);
    const hd_conversation *chat = p->tokens ? NULL : &r->conversation;
    const hd_status st = hd_engine_submit_chat(job->ctx->engine, &id, &g, chat, &err);
    if (st != HD_OK) {
        atomic_fetch_sub(&job->refs, 1); /* the submitting thread still has a reference */
        refuse_submission(job, r, st, &err);
        return false;
    }
    atomic_store(&sub->id, id);
    if (job->ctx->on_submit) job->ctx->on_submit(job->ctx->server, job->call, id);
    if (atomic_load(&job->cancelled)) hd_engine_cancel(job->ctx->engine, id);
    return true;
}

/* If there is no memory to run in the background, the job stays bound to its client. */
static void detach(api_job *job) {
    job->w.background = api_background_add(job->ctx->background, job);
    if (!job->w.background) http_on_gone(job->call, leave, job);
}

/* Stores accepted background responses and tells the client; refuses the others. */
static void tell_accepted(api_job *job, bool going) {
    api_text object = {0};
    const uint64_t salt = http_salt(job->call);
    if (!going) {
        api_store_remove(job->ctx->store, job->id, salt);
    } else if (api_store_get(job->ctx->store, job->id, salt, &object, NULL) && object.n > 0) {
        job->accepted = true;
        api_reply(job->call, "application/json", &object);
    }
    api_text_deinit(&object);
}

void api_job_start(api_request *r, const api_format *format, const api_prompt *prompts,
                   int32_t n, api_text *prompt_ids, void *state) {
    api_job *job = api_reserve(r, prompts, n) ? job_open(r, format, prompts, n) : NULL;
    if (!job) {
        api_refuse_status(r, 503, "out_of_memory", NULL, "no memory for the request");
        api_request_send_refusal(r);
        if (format->deinit) format->deinit(state);
        return;
    }
    if (prompt_ids) {
        job->prompt_ids = *prompt_ids;
        *prompt_ids = (api_text){0};
    }
    job->state = state;
    job->seed = prompts[0].g.seed;
    api_resume_begin(job, http_header(job->call, API_RESUME_HEADER));
    if (format->chunk_object) {
        api_write(&job->head, "{'id':%s,'object':%s,'created':%lld,'model':%s,'choices':[",
                  job->id, r->w.stream ? format->chunk_object : format->object,
                  (long long)job->created, job->model);
    }
    http_retain(job->call);
    if (job->w.background) {
        detach(job);
    } else {
        http_on_gone(job->call, leave, job);
    }
    if (job->w.background && !job->w.stream) format->accept(job);
    if (job->ctx->on_begin) {
        job->ctx->on_begin(job->ctx->server, job->call, prompts[0].g.seed);
    }
    bool going = true;
    for (int32_t i = 0; i < n && going && !atomic_load(&job->gone); i++) {
        going = submit(job, r, &job->subs[i], &prompts[i]);
    }
    if (job->w.background && !job->w.stream) tell_accepted(job, going);
    drop(job);
}
