/* pages.c - pages of prompts that move between servers, as far as the engine knows: requests that
 * wait for pages, jobs of the step thread between steps, and requests whose pages are exported. Who
 * moves them is in src/pd. */
#include "engine/rank.h"
#include "engine/remote/remote.h"

#include <string.h>

#include "base/progress.h"

hd_status hd_engine_check_pages(hd_engine *e, size_t page_bytes[HD_N_KV_GROUPS], hd_err *err) {
    hd_engine_stats stats;
    hd_engine_read_stats(e, &stats);
    const char *why = NULL;
    if (!stats.host_pages[HD_KV_FULL]) why = "it needs host memory for pages (--kv-host)";
    if (e->mla == HD_MLA_NAIVE) why = "its entries depend on chunks (--mla naive)";
    if (!e->has_model) why = "the null backend has none";
    if (page_bytes) memcpy(page_bytes, e->page_bytes, sizeof e->page_bytes);
    return why ? HD_FAIL(err, HD_EUNSUPPORTED, "pages of this server cannot move: %s", why)
               : HD_OK;
}

/* ---- requests that wait for pages ---- */

void hd_engine_set_page_source(hd_engine *e, const hd_page_source *source) {
    pthread_mutex_lock(&e->lock);
    e->source = source ? *source : (hd_page_source){0};
    pthread_mutex_unlock(&e->lock);
}

static void put_into_mail(hd_engine *e, const engine_request *r) {
    engine_mail *mail = &e->groups[r->group].mail;
    mail->submitted[mail->n_submitted++] = r->id;
    engine_tell(e);
}

/* Prompt log-probabilities need computed rows. */
static bool may_fetch(const hd_engine *e, const engine_request *r, const char *server) {
    return server && e->source.fetch && !r->prompt_logprobs_from;
}

void engine_deliver(hd_engine *e, engine_request *r, const hd_request *g) {
    const hd_page_wish wish = {.id = r->id,
                               .server = g->prefill,
                               .trace_id = g->trace_id ? g->trace_id : "",
                               .tokens = r->prompt.ids,
                               .n_tokens = r->n_prompt,
                               .priority = r->priority,
                               .group = r->group,
                               .salt = r->request.salt};
    r->fetching = may_fetch(e, r, g->prefill) && e->source.fetch(e->source.ctx, &wish);
    if (r->fetching) {
        e->n_fetching += r->n_choices;
    } else {
        put_into_mail(e, r);
    }
}

static void deliver_waiting(hd_engine *e, engine_request *r) {
    r->fetching = false;
    e->n_fetching -= r->n_choices;
    put_into_mail(e, r);
}

void engine_stop_fetching(hd_engine *e, engine_request *r) {
    if (!r->fetching) return;
    deliver_waiting(e, r);
    e->source.cancelled(e->source.ctx, r->id);
}

void hd_engine_pages_settled(hd_engine *e, uint64_t id) {
    pthread_mutex_lock(&e->lock);
    engine_request *r = engine_request_of(e, id);
    if (r && r->fetching) deliver_waiting(e, r);
    pthread_mutex_unlock(&e->lock);
}

/* ---- jobs ---- */

static void append(engine_mail *mail, hd_page_job *job) {
    if (!mail->jobs) mail->last_job = &mail->jobs;
    *mail->last_job = job;
    mail->last_job = &job->next;
}

void hd_engine_post_job(hd_engine *e, int32_t group, hd_page_job *job) {
    job->next = NULL;
    job->group = group;
    job->lacking = (hd_page_range){0};
    pthread_mutex_lock(&e->lock);
    if (group < e->n_present) {
        append(&e->groups[group].mail, job);
        engine_tell(e);
    } else {
        engine_fail_jobs(&job);
    }
    pthread_mutex_unlock(&e->lock);
}

void engine_fail_jobs(hd_page_job **first) {
    while (*first) {
        hd_page_job *job = *first;
        *first = job->next;
        job->status = HD_EPEER;
        job->done(job);
    }
}

static bool has_pages(const engine_rank *rank) {
    return !rank->totals.hindrance && rank->model_runner;
}

static hd_handover side_of(engine_rank *rank, uint64_t salt, const int32_t *tokens, int32_t n) {
    const hd_engine *e = rank->engine;
    return (hd_handover){
        .cache = hd_sched_cache(rank->sched),
        .kv = hd_model_runner_kv(rank->model_runner),
        .stream = rank->stream,
        .ranks = hd_model_runner_page_ranks(rank->model_runner),
        .page_tokens = rank->totals.page_tokens,
        .page_bytes = {e->page_bytes[0], e->page_bytes[1]},
        .salt = salt,
        .tokens = tokens,
        .n_tokens = n
    };
}

static hd_status run(engine_rank *rank, hd_page_job *job) {
    if (!has_pages(rank)) return HD_EAGAIN;
    const hd_handover side = side_of(rank, job->salt, job->tokens, job->n_tokens);
    if (job->work == HD_PAGES_LOOK) {
        job->weights = rank->order.weights;
        hd_handover_lacking(&side, hd_kv_shape_of(rank->engine->spec).lookback, &job->lacking);
        return HD_OK;
    }
    if (job->work == HD_PAGES_FIND) {
        job->weights = rank->order.weights;
        hd_handover_usable(&side, hd_kv_shape_of(rank->engine->spec).lookback, &job->lacking);
        return HD_OK;
    }
    if (job->weights != rank->order.weights) return HD_EINVAL;
    if (job->work == HD_PAGES_COPY) {
        return hd_handover_copy(&side, job->kind, job->page, job->copy, NULL);
    }
    return hd_handover_place(&side, job->message, NULL);
}

static void end_job(engine_rank *rank, hd_page_job *job) {
    job->status = run(rank, job);
    job->done(job); /* it may free itself */
}

/* In the scheduler a job that waits for the disk has its address as id, with a bit that no request's
 * has. */
static const uint64_t OF_JOB = UINT64_C(1) << 63;

/* During a pause nothing would be read. */
static bool waits_for_disk(engine_rank *rank, const hd_page_job *job) {
    return job->from_disk && has_pages(rank) && !rank->order.paused &&
           hd_sched_read(rank->sched, OF_JOB | (uintptr_t)job, job->salt, job->tokens,
                         job->n_tokens, hd_now_ns());
}

void engine_pages_read(engine_rank *rank, uint64_t id) {
    end_job(rank, (hd_page_job *)(uintptr_t)(id & ~OF_JOB));
}

void engine_pages_run_jobs(engine_rank *rank, engine_mail *in) {
    while (in->jobs) {
        hd_page_job *job = in->jobs;
        in->jobs = job->next;
        if (!waits_for_disk(rank, job)) end_job(rank, job);
    }
}

/* ---- pages of requests ---- */

void engine_pages_note(engine_rank *rank, uint64_t id, int32_t n_done) {
    engine_request *r = engine_request_of(rank->engine, id);
    if (r->n_exported == hd_page_range_size(&r->watch.pages)) return;
    rank->watched[rank->n_watched++] = (engine_watched){r, n_done};
}

/* False: no page is wanted any more. */
static bool export_page(engine_rank *rank, engine_request *r, hd_kv_group group, int32_t page) {
    const hd_page_watch *w = &r->watch;
    const hd_handover side = side_of(rank, r->request.salt, r->prompt.ids, r->n_prompt);
    const size_t n = hd_handover_bytes(&side, group);
    const bool remote = engine_rank_is_remote(rank);
    void *to = remote ? engine_remote_room(rank, r->id, n) : w->room(w->ctx, n);
    if (!to) return false;
    const hd_status st = w->weights == rank->order.weights
                             ? hd_handover_export(&side, group, page, to, NULL)
                             : HD_EINVAL;
    if (remote) {
        engine_remote_exported(rank, r->id, n, st);
    } else {
        w->exported(w->ctx, st);
    }
    return st == HD_OK;
}

static void export_pages(engine_rank *rank, engine_request *r, int32_t n_done) {
    const uint32_t all = hd_page_range_size(&r->watch.pages);
    while (r->n_exported < all) {
        hd_kv_group group;
        const int32_t page = hd_page_range_at(&r->watch.pages, r->n_exported, &group);
        if ((page + 1) * rank->totals.page_tokens > n_done) return;
        r->n_exported = export_page(rank, r, group, page) ? r->n_exported + 1 : all;
    }
}

/* Before the outputs of the step are published, so that no request is gone. */
void engine_pages_show(engine_rank *rank) {
    for (int32_t i = 0; i < rank->n_watched && has_pages(rank); i++) {
        export_pages(rank, rank->watched[i].request, rank->watched[i].n_done);
    }
    rank->n_watched = 0;
}
