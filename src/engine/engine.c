/* engine.c - the engine's side of include/hadal.h: submit, abort, pause and read statistics.
 *
 * Two threads meet in a mailbox. The step thread (step_loop.c) owns the scheduler and the
 * runner. It takes submissions and aborts at the start of a step and publishes each step's
 * output. The polling thread (poll.c) detokenizes, parses replies and searches stop strings,
 * so that none of this slows a step. Before a request is in the mailbox its submitter owns
 * it; afterwards the comments at engine_request's fields say who does. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/progress.h"
#include "engine/engine_internal.h"
#include "engine/request_ranges.h"

/* ---- requests ---- */

engine_request *engine_request_of(hd_engine *e, uint64_t id) {
    const uint64_t index = (id & UINT32_MAX) >> ENGINE_CHOICE_BITS;
    if (index == 0 || index > (uint64_t)e->n_requests) return NULL;
    engine_request *r = &e->requests[index - 1];
    return r->id && r->id == id - (uint64_t)engine_choice_of(id) ? r : NULL;
}

/* Returns a free engine_request for n choices. The caller holds the lock. */
static engine_request *take_record(hd_engine *e, int32_t n) {
    if (e->n_free == 0 || n > e->max_living - e->n_living) return NULL;
    engine_request *r = &e->requests[e->free[--e->n_free]];
    const uint32_t uses = r->uses + 1;
    const uint64_t index = (uint64_t)(r - e->requests) + 1;
    *r = (engine_request){.uses = uses,
                          .id = (uint64_t)uses << 32 | index << ENGINE_CHOICE_BITS,
                          .arrival = e->arrivals++};
    e->n_living += n;
    return r;
}

void engine_deinit_request(hd_engine *e, engine_request *r) {
    for (int32_t i = 0; i < r->n_choices; i++) {
        hd_output_deinit(&r->choices[i].output);
        for (int k = 0; k < HD_N_REPLAYS; k++) free(r->choices[i].replay[k]);
        free(r->choices[i].tokens);
    }
    for (size_t i = 0; i < r->rules.n_stop; i++) free(r->stop[i]);
    hd_ids_deinit(&r->prompt);
    hd_reply_tools_deinit(&r->reply_tools);
    json_decref(r->tools);
    engine_grammar_cache_release(e->grammars, r->grammar);
    hd_ids_deinit(&r->forced);
    free(r->prompt_logprobs);
    free(r->prompt_top);
    free(r->stop);
    free(r->bias);
    free(r->ban);
    free(r->stop_ids);
}

void engine_drop_request(hd_engine *e, engine_request *r) {
    engine_deinit_request(e, r);
    pthread_mutex_lock(&e->lock);
    free(r->choices);
    *r = (engine_request){.uses = r->uses};
    e->free[e->n_free++] = (int32_t)(r - e->requests);
    pthread_mutex_unlock(&e->lock);
}

/* Tells the step thread that the mailbox has news. The caller holds the lock. */
void engine_tell(hd_engine *e) {
    e->news = true;
    pthread_cond_broadcast(&e->wake);
    if (e->independent) pthread_cond_broadcast(&e->ordered);
}

/* ---- submitting ---- */

static hd_status refuse_full(const hd_engine *e, int32_t n, hd_err *err) {
    if (e->draining) return HD_FAIL(err, HD_EAGAIN, "the engine takes no more requests");
    return HD_FAIL(err, HD_EAGAIN,
                   "the queue is full: %d choices wait or run, %d more asked for", e->n_living,
                   n);
}

/* Room for what is put out, if another group may have to continue it. */
static hd_status keep_tokens(const hd_engine *e, engine_request *r, hd_err *err) {
    for (int32_t i = 0; e->remote && i < r->n_choices; i++) {
        int32_t **tokens = &r->choices[i].tokens;
        *tokens = calloc((size_t)r->request.max_new, sizeof **tokens);
        if (!*tokens) return HD_FAIL(err, HD_ENOMEM, "no memory for the tokens of a request");
    }
    return HD_OK;
}

static void give_up(hd_engine *e, engine_request *r, int32_t n) {
    engine_drop_request(e, r);
    pthread_mutex_lock(&e->lock);
    e->n_living -= n;
    pthread_mutex_unlock(&e->lock);
}

static hd_status submit(hd_engine *e, uint64_t *id, const hd_request *g,
                        const hd_conversation *conversation, const hd_page_watch *watch,
                        hd_err *err) {
    *id = 0;
    if (g->size != sizeof *g) {
        return HD_FAIL(err, HD_EINVAL, "hd_request of %zu bytes; this library knows %zu",
                       g->size, sizeof *g);
    }
    HD_TRY(hd_request_check_ranges(g, err));
    const int32_t n = g->n ? g->n : 1;
    hd_status st = HD_OK;
    pthread_mutex_lock(&e->lock);
    const bool hindered = e->groups[0].stats.hindrance != NULL;
    engine_request *r = e->draining || hindered ? NULL : take_record(e, n);
    if (!r) st = hindered ? engine_refuse_hindered(e, err) : refuse_full(e, n, err);
    pthread_mutex_unlock(&e->lock);
    if (!r) return st;
    engine_prefix prefix = {0};
    st = engine_prepare(e, r, g, conversation, err);
    if (st == HD_OK) st = keep_tokens(e, r, err);
    if (st == HD_OK) {
        st = engine_prefix_of(&prefix, e, r->request.salt, r->prompt.ids, r->n_prompt, err);
    }
    if (st != HD_OK) {
        give_up(e, r, n);
        return st;
    }
    *id = r->id;
    if (watch) r->watch = *watch;
    pthread_mutex_lock(&e->lock);
    r->n_left = n;
    engine_route(e, r, &prefix);
    engine_deliver(e, r, g);
    pthread_mutex_unlock(&e->lock);
    free(prefix.hashes);
    return HD_OK;
}

hd_status hd_engine_submit_chat(hd_engine *e, uint64_t *id, const hd_request *g,
                                const hd_conversation *conversation, hd_err *err) {
    return submit(e, id, g, conversation, NULL, err);
}

hd_status hd_engine_submit_watched(hd_engine *e, uint64_t *id, const hd_request *g,
                                   const hd_page_watch *watch, hd_err *err) {
    return submit(e, id, g, NULL, watch, err);
}

uint64_t hd_engine_submit(hd_engine *e, const hd_request *g, bool *full, char *why,
                          size_t why_size) {
    hd_err err = {0};
    uint64_t id;
    const hd_status st = hd_engine_submit_chat(e, &id, g, NULL, &err);
    if (full) *full = st == HD_EAGAIN;
    if (st != HD_OK && why && why_size) snprintf(why, why_size, "%s", err.msg);
    return id;
}

void hd_engine_defaults(const hd_engine *e, hd_request *g) {
    const hd_model_spec *c = e->spec;
    g->temperature = (float)c->temperature;
    g->top_p = (float)c->top_p;
    g->min_p = (float)c->min_p;
    g->top_k = c->top_k;
    g->repetition_penalty = (float)c->repetition_penalty;
}

/* ---- aborting ---- */

/* Each choice is listed at most once. Between two steps the list therefore holds at most the
 * choices that lived at the first and those submitted since: twice max_living. */
void engine_cancel_choice(hd_engine *e, engine_request *r, int32_t choice) {
    engine_choice *c = &r->choices[choice];
    if (c->cancelled || c->posted) return;
    engine_stop_fetching(e, r);
    engine_mail *mail = &e->groups[r->group].mail;
    c->cancelled = true;
    mail->cancelled[mail->n_cancelled++] = r->id + (uint64_t)choice;
    engine_tell(e);
}

/* Only for a request that is in the mailbox; before that its submitter owns it. */
static int32_t n_choices(const engine_request *r) {
    return r->n_left ? r->n_choices : 0;
}

static void cancel_all(hd_engine *e, engine_request *r) {
    for (int32_t i = 0; i < n_choices(r); i++) engine_cancel_choice(e, r, i);
}

void hd_engine_cancel(hd_engine *e, uint64_t id) {
    pthread_mutex_lock(&e->lock);
    engine_request *r = engine_request_of(e, id);
    if (r && r->id == id) cancel_all(e, r);
    pthread_mutex_unlock(&e->lock);
}

/* ---- control ---- */

void hd_engine_drain(hd_engine *e) {
    pthread_mutex_lock(&e->lock);
    e->draining = true;
    pthread_mutex_unlock(&e->lock);
}

uint64_t hd_engine_pause(hd_engine *e, hd_pause how) {
    pthread_mutex_lock(&e->lock);
    if (!e->paused) e->paused_ns = hd_now_ns();
    e->paused = true;
    const uint64_t number = ++e->pauses;
    for (int32_t g = 0; how == HD_PAUSE_RETRACT && g < e->n_groups; g++) {
        e->groups[g].mail.retract = true;
        e->groups[g].mail.retract_pause = number;
    }
    for (int32_t i = 0; how == HD_PAUSE_ABORT && i < e->n_requests; i++) {
        cancel_all(e, &e->requests[i]);
    }
    engine_tell(e);
    pthread_mutex_unlock(&e->lock);
    return number;
}

void hd_engine_resume(hd_engine *e) {
    pthread_mutex_lock(&e->lock);
    e->paused = false;
    engine_tell(e);
    pthread_mutex_unlock(&e->lock);
}

void hd_engine_flush(hd_engine *e) {
    pthread_mutex_lock(&e->lock);
    for (int32_t g = 0; g < e->n_groups; g++) e->groups[g].mail.flush = true;
    engine_router_flush(e->router);
    engine_tell(e);
    pthread_mutex_unlock(&e->lock);
}

/* ---- reading ---- */

typedef struct listed {
    int32_t priority;
    uint64_t arrival;
    hd_request_status request;
} listed;

static hd_request_status describe(const engine_request *r, int32_t choice) {
    return (hd_request_status){.id = r->id,
                               .choice = choice,
                               .prompt_tokens = r->n_prompt,
                               .output_tokens = r->choices[choice].n_posted};
}

static int by_importance(const void *a, const void *b) {
    const listed *x = a, *y = b;
    if (x->priority != y->priority) return x->priority > y->priority ? -1 : 1;
    if (x->arrival != y->arrival) return x->arrival < y->arrival ? -1 : 1;
    return x->request.choice < y->request.choice ? -1 : 1;
}

static size_t list_running(hd_engine *e, const engine_group *group, hd_request_status *out,
                           size_t max) {
    size_t n = 0;
    for (int32_t i = 0; i < group->n_places && n < max; i++) {
        const hd_sched_progress *p = &group->places[i];
        const engine_request *r = engine_request_of(e, p->id);
        const int32_t choice = engine_choice_of(p->id);
        if (!r || r->choices[choice].posted) continue;
        out[n] = describe(r, choice);
        out[n].phase = p->n_known > r->n_prompt ? HD_PHASE_DECODE : HD_PHASE_PREFILL;
        out[n].cached_tokens = p->n_cached;
        out[n].done_tokens = p->n_done;
        n++;
    }
    return n;
}

/* running: [n_records] zeros, one bit per choice. This runs under the lock with thousands of
 * running and waiting choices, so it must not be quadratic. */
static size_t list_waiting(hd_engine *e, listed *out, uint64_t *running) {
    size_t n = 0;
    for (int32_t g = 0; g < e->n_groups; g++) {
        for (int32_t i = 0; i < e->groups[g].n_places; i++) {
            const uint64_t id = e->groups[g].places[i].id;
            const engine_request *r = engine_request_of(e, id);
            if (r) running[r - e->requests] |= 1ull << engine_choice_of(id);
        }
    }
    for (int32_t i = 0; i < e->n_requests; i++) {
        const engine_request *r = &e->requests[i];
        for (int32_t k = 0; k < n_choices(r); k++) {
            if (r->choices[k].posted || running[i] >> k & 1) continue;
            out[n++] = (listed){r->priority, r->arrival, describe(r, k)};
        }
    }
    return n;
}

size_t hd_engine_read_requests(hd_engine *e, hd_request_status *out, size_t max) {
    listed *waiting = calloc((size_t)e->max_living, sizeof *waiting);
    uint64_t *running = calloc((size_t)e->n_requests, sizeof *running);
    pthread_mutex_lock(&e->lock);
    size_t n = 0;
    for (int32_t g = 0; g < e->n_groups; g++) {
        n += list_running(e, &e->groups[g], out + n, max - n);
    }
    const size_t n_waiting = waiting && running ? list_waiting(e, waiting, running) : 0;
    pthread_mutex_unlock(&e->lock);
    if (n_waiting) qsort(waiting, n_waiting, sizeof *waiting, by_importance);
    for (size_t i = 0; i < n_waiting && n < max; i++) out[n++] = waiting[i].request;
    free(waiting);
    free(running);
    return n;
}

const hd_tokenizer *hd_engine_tokenizer(const hd_engine *e) {
    return e->tokenizer;
}

const hd_model_spec *hd_engine_spec(const hd_engine *e) {
    return e->spec;
}

hd_chat_encoding hd_engine_encoding(const hd_engine *e) {
    return e->encoding;
}

const hd_parallel_config *hd_engine_parallel(const hd_engine *e) {
    return &e->parallel;
}

bool hd_engine_thinks(const hd_engine *e) {
    return e->thinks;
}
