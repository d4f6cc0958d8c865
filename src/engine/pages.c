/* pages.c - pages of prompts that move between servers, as far as the engine knows: requests that
 * wait for pages, functions that the step thread runs between steps, and requests whose pages
 * somebody awaits. Who moves them is in src/pd. */
#include "engine/rank.h"

hd_status hd_engine_check_pages(hd_engine *e, hd_err *err) {
    hd_engine_stats stats;
    hd_engine_read_stats(e, &stats);
    const char *why = NULL;
    if (!stats.host_pages[HD_KV_FULL]) why = "it needs host memory for pages (--kv-host)";
    if (e->mla == HD_MLA_NAIVE) why = "its entries depend on chunks (--mla naive)";
    if (e->remote) why = "its attention groups (--dp) are in several processes";
    if (!e->has_model) why = "the null backend has none";
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

void engine_deliver(hd_engine *e, engine_request *r, const char *server) {
    const hd_page_wish wish = {.id = r->id,
                               .server = server,
                               .tokens = r->prompt.ids,
                               .n_tokens = r->n_prompt,
                               .priority = r->priority,
                               .group = r->group,
                               .salt = r->request.salt};
    r->fetching = may_fetch(e, r, server) && e->source.fetch(e->source.ctx, &wish);
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

/* ---- the step thread ---- */

void hd_engine_post_job(hd_engine *e, int32_t group, hd_page_job *job) {
    job->next = NULL;
    pthread_mutex_lock(&e->lock);
    engine_mail *mail = &e->groups[group].mail;
    if (!mail->jobs) mail->last_job = &mail->jobs;
    *mail->last_job = job;
    mail->last_job = &job->next;
    engine_tell(e);
    pthread_mutex_unlock(&e->lock);
}

static hd_engine_pages pages_of(engine_rank *rank) {
    hd_engine_pages p = {.weights = rank->weights_mark};
    if (rank->totals.hindrance || !rank->model_runner) return p;
    p.side = (hd_handover){.cache = hd_sched_cache(rank->sched),
                           .kv = hd_model_runner_kv(rank->model_runner),
                           .stream = rank->stream,
                           .ranks = hd_model_runner_page_ranks(rank->model_runner),
                           .page_tokens = rank->totals.page_tokens};
    for (int g = 0; g < HD_N_KV_GROUPS; g++) {
        hd_kv_host_page(p.side.kv, (hd_kv_group)g, 0, &p.side.page_bytes[g]);
    }
    return p;
}

/* A job may free itself. */
void engine_pages_run_jobs(engine_rank *rank, engine_mail *in) {
    const hd_engine_pages pages = pages_of(rank);
    while (in->jobs) {
        hd_page_job *job = in->jobs;
        in->jobs = job->next;
        job->run(job, &pages);
    }
}

void engine_pages_note(engine_rank *rank, uint64_t id, int32_t n_done) {
    const engine_request *r = engine_request_of(rank->engine, id);
    if (!r->watch.computed) return;
    rank->watched[rank->n_watched++] = (engine_watched){r, n_done};
}

/* Before the outputs of the step are published, so that no request is gone. */
void engine_pages_show(engine_rank *rank) {
    const hd_engine_pages pages = pages_of(rank);
    for (int32_t i = 0; i < rank->n_watched; i++) {
        const engine_watched *w = &rank->watched[i];
        w->request->watch.computed(w->request->watch.ctx, w->n_done, &pages);
    }
    rank->n_watched = 0;
}
