/* engine.c - include/hadal.h made real: a model, a scheduler, and the thread that turns it.
 *
 * Two sides meet in a mailbox. The step thread owns scheduler and executor; it takes
 * submissions and cancels at the start of a turn and leaves what each turn gave. The polling
 * thread owns detokenizing and stop strings, so text never slows a step. A record belongs to
 * its submitter until the mailbox, to the step thread while it runs, and to the poller after
 * its last post; only `choosing` is read by the step thread, and it never changes. */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/progress.h"
#include "engine/engine_internal.h"

/* ---- ids ---- */

/* An id is a record's index and how often that index was used: stale ids match nothing. */
static uint64_t make_id(const engine_record *r, const hd_engine *e) {
    return (uint64_t)r->uses << 32 | (uint64_t)((r - e->records) + 1);
}

static engine_record *record_of(hd_engine *e, uint64_t id) {
    const uint64_t index = (id & UINT32_MAX) - 1;
    if (index >= (uint64_t)e->n_records) return NULL;
    engine_record *r = &e->records[index];
    return r->id == id ? r : NULL;
}

/* ---- the step thread ---- */

static void on_enter(void *ctx, uint64_t id, int32_t slot, const int32_t *tokens, int32_t n) {
    hd_engine *e = ctx;
    const engine_record *r = record_of(e, id);
    hd_executor_enter(e->executor, slot, &r->choosing, tokens, n, r->n_prompt);
}

static void on_leave(void *ctx, uint64_t id, int32_t slot) {
    (void)ctx;
    (void)id;
    (void)slot; /* the slot's sampling state is overwritten at the next entry */
}

static hd_end end_of(hd_finish f) {
    switch (f) {
    case HD_FINISH_NONE:
        return HD_END_NOT;
    case HD_FINISH_STOP:
        return HD_END_STOP;
    case HD_FINISH_LENGTH:
        return HD_END_LENGTH;
    case HD_FINISH_ABORT:
        return HD_END_CANCELLED;
    case HD_FINISH_TIMEOUT:
        return HD_END_TIMEOUT;
    case HD_FINISH_ERROR:
        return HD_END_FAILED;
    }
    return HD_END_FAILED;
}

/* Moves the turn's posts into the ring; waits while the poller is that far behind. */
static void hand_over(hd_engine *e) {
    pthread_mutex_lock(&e->lock);
    for (int32_t i = 0; i < e->n_turn_posts; i++) {
        while (e->n_posts == e->cap_posts && !e->closing) {
            pthread_cond_signal(&e->posted);
            pthread_cond_wait(&e->taken, &e->lock);
        }
        if (e->closing) break;
        e->posts[(e->first_post + e->n_posts++) % e->cap_posts] = e->turn_posts[i];
    }
    pthread_cond_signal(&e->posted);
    pthread_mutex_unlock(&e->lock);
    e->n_turn_posts = 0;
}

/* Posts of one turn are collected without the lock and handed over together. */
static void on_event(void *ctx, const hd_sched_event *s) {
    hd_engine *e = ctx;
    engine_post *p = &e->turn_posts[e->n_turn_posts++];
    *p = (engine_post){.id = s->id,
                       .n = s->n,
                       .end = end_of(s->finish),
                       .n_cached = s->n_cached,
                       .n_drafted = s->n_drafted,
                       .n_accepted = s->n_accepted};
    if (s->n) {
        memcpy(p->tokens, s->tokens, (size_t)s->n * sizeof *p->tokens);
        memcpy(p->logprobs, s->logprobs, (size_t)s->n * sizeof *p->logprobs);
    }
    if (e->n_turn_posts == e->cap_turn_posts) hand_over(e);
}

hd_sched_hooks engine_hooks(hd_engine *e) {
    return (hd_sched_hooks){.ctx = e, .enter = on_enter, .leave = on_leave, .event = on_event};
}

static void post_refusal(hd_engine *e, uint64_t id) {
    on_event(e, &(hd_sched_event){.id = id, .finish = HD_FINISH_ERROR});
}

/* Takes what the mailbox holds; true when the engine is to close. */
static bool listen(hd_engine *e, bool idle) {
    pthread_mutex_lock(&e->lock);
    while (idle && !e->closing && !e->n_submitted && !e->n_cancelled) {
        pthread_cond_wait(&e->mail, &e->lock);
    }
    const int32_t n_new = e->n_submitted, n_cancel = e->n_cancelled;
    memcpy(e->inbox, e->submitted, (size_t)n_new * sizeof *e->inbox);
    memcpy(e->inbox_cancel, e->cancelled, (size_t)n_cancel * sizeof *e->inbox_cancel);
    e->n_submitted = e->n_cancelled = 0;
    const bool closing = e->closing;
    pthread_mutex_unlock(&e->lock);
    for (int32_t i = 0; i < n_new; i++) {
        engine_record *r = record_of(e, e->inbox[i]);
        if (hd_sched_submit(e->sched, &r->request, NULL) != HD_OK) post_refusal(e, r->id);
    }
    for (int32_t i = 0; i < n_cancel; i++) hd_sched_cancel(e->sched, e->inbox_cancel[i]);
    return closing;
}

static void publish_stats(hd_engine *e) {
    const hd_sched_stats s = hd_sched_read_stats(e->sched);
    const hd_cache_stats c = hd_cache_read_stats(hd_sched_cache(e->sched));
    pthread_mutex_lock(&e->lock);
    e->stats.waiting = s.waiting;
    e->stats.running = s.running;
    e->stats.steps = s.turns;
    e->stats.rows = s.rows;
    e->stats.finished = s.finished;
    e->stats.retracted = s.retracted;
    e->stats.drafted = s.drafted;
    e->stats.accepted = s.accepted;
    e->stats.prompt_tokens = c.asked_tokens;
    e->stats.cached_tokens = c.matched_tokens;
    e->stats.kv_pages = c.pages[HD_LIFE_ENTRIES];
    e->stats.kv_pages_free = c.free[HD_LIFE_ENTRIES];
    e->stats.kv_pages_cached = c.evictable[HD_LIFE_ENTRIES];
    pthread_mutex_unlock(&e->lock);
}

static void *turn_for_ever(void *arg) {
    hd_engine *e = arg;
    bool idle = true;
    while (!listen(e, idle)) {
        hd_err err = {0};
        const hd_status st = hd_sched_turn(e->sched, hd_now_ns(), &err);
        publish_stats(e);
        if (e->n_turn_posts) hand_over(e);
        idle = hd_sched_idle(e->sched);
        if (st == HD_EAGAIN && !idle) idle = true; /* only mail can change anything */
    }
    return NULL;
}

/* ---- submitting ---- */

static engine_record *take_record(hd_engine *e) {
    if (e->n_free == 0) return NULL;
    engine_record *r = &e->records[e->free[--e->n_free]];
    const uint32_t uses = r->uses + 1;
    *r = (engine_record){.uses = uses};
    r->id = make_id(r, e);
    return r;
}

void engine_drop_record(hd_engine *e, engine_record *r) {
    hd_ids_deinit(&r->prompt);
    free(r->bias);
    free(r->ban);
    free(r->stop_ids);
    hd_output_deinit(&r->output);
    pthread_mutex_lock(&e->lock);
    *r = (engine_record){.uses = r->uses};
    e->free[e->n_free++] = (int32_t)(r - e->records);
    pthread_mutex_unlock(&e->lock);
}

static uint64_t refuse(const hd_err *err, char *why, size_t why_size) {
    if (why && why_size) snprintf(why, why_size, "%s", err->msg);
    return 0;
}

uint64_t hd_engine_submit(hd_engine *e, const hd_generation *g, bool *full, char *why,
                          size_t why_size) {
    hd_err err = {0};
    if (full) *full = false;
    pthread_mutex_lock(&e->lock);
    engine_record *r = take_record(e);
    pthread_mutex_unlock(&e->lock);
    if (!r) {
        if (full) *full = true;
        HD_FAIL(&err, HD_EAGAIN, "the queue is full: %d requests wait or run", e->n_records);
        return refuse(&err, why, why_size);
    }
    const uint64_t id = r->id;
    if (engine_prepare(e, r, g, &err) != HD_OK) {
        engine_drop_record(e, r);
        return refuse(&err, why, why_size);
    }
    pthread_mutex_lock(&e->lock);
    e->submitted[e->n_submitted++] = id;
    e->n_living++;
    pthread_cond_signal(&e->mail);
    pthread_mutex_unlock(&e->lock);
    return id;
}

/* Each living request is in the list at most once, so the list cannot overflow. */
void hd_engine_cancel(hd_engine *e, uint64_t id) {
    pthread_mutex_lock(&e->lock);
    bool wanted = record_of(e, id) != NULL;
    for (int32_t i = 0; wanted && i < e->n_cancelled; i++) wanted = e->cancelled[i] != id;
    if (wanted) {
        e->cancelled[e->n_cancelled++] = id;
        pthread_cond_signal(&e->mail);
    }
    pthread_mutex_unlock(&e->lock);
}

/* ---- polling ---- */

/* Waits for a post until the deadline; false without one, or when nothing can come. */
static bool take_post(hd_engine *e, engine_post *out, int64_t timeout_ns) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    if (timeout_ns > 0) {
        const int64_t ns = until.tv_nsec + timeout_ns % 1000000000;
        until.tv_sec += (time_t)(timeout_ns / 1000000000 + ns / 1000000000);
        until.tv_nsec = (long)(ns % 1000000000);
    }
    pthread_mutex_lock(&e->lock);
    while (e->n_posts == 0 && e->n_living > 0 && timeout_ns != 0) {
        const int waited = timeout_ns < 0
                               ? pthread_cond_wait(&e->posted, &e->lock)
                               : pthread_cond_timedwait(&e->posted, &e->lock, &until);
        if (waited == ETIMEDOUT) break;
    }
    const bool got = e->n_posts > 0;
    if (got) {
        *out = e->posts[e->first_post];
        e->first_post = (e->first_post + 1) % e->cap_posts;
        e->n_posts--;
        if (out->end != HD_END_NOT) e->n_living--;
        pthread_cond_signal(&e->taken);
    }
    pthread_mutex_unlock(&e->lock);
    return got;
}

/* A finished record stays until the next poll, because its event points into it. */
static void drop_finished(hd_engine *e) {
    if (e->shown) hd_output_take(&e->shown->output, e->n_shown);
    if (e->finished) engine_drop_record(e, e->finished);
    e->shown = e->finished = NULL;
    e->n_shown = 0;
}

/* Fills the event of a post; false when there is nothing to say (text behind a stop). */
static bool make_event(hd_engine *e, const engine_post *p, hd_event *out) {
    engine_record *r = record_of(e, p->id);
    const bool last = p->end != HD_END_NOT;
    bool stopped = false;
    size_t ready = 0;
    hd_end end = p->end;
    if (r->ended) { /* the poller stopped it; the step thread's last word frees it */
        if (last) engine_drop_record(e, r);
        return false;
    }
    const bool by_token = p->end == HD_END_STOP; /* the end token itself is no text */
    const size_t n_text = (size_t)p->n - (by_token && p->n ? 1 : 0);
    if (hd_output_push(&r->output, p->tokens, n_text, last, &ready, &stopped, NULL) != HD_OK) {
        end = HD_END_FAILED;
        stopped = true;
    }
    if (stopped && end == HD_END_NOT) end = HD_END_STOP;
    r->n_output += p->n;
    r->n_drafted += p->n_drafted;
    r->n_accepted += p->n_accepted;
    *out = (hd_event){.id = p->id,
                      .text = ready ? r->output.text.data : "",
                      .n_text = ready,
                      .tokens = e->event_post.tokens,
                      .logprobs = e->event_post.logprobs,
                      .n_tokens = (size_t)p->n,
                      .end = end,
                      .prompt_tokens = r->n_prompt,
                      .cached_tokens = p->n_cached,
                      .output_tokens = r->n_output,
                      .drafted = r->n_drafted,
                      .accepted = r->n_accepted};
    e->shown = r;
    e->n_shown = ready;
    if (last) {
        e->finished = r;
    } else if (end != HD_END_NOT) {
        r->ended = true;
        hd_engine_cancel(e, p->id);
    }
    return true;
}

bool hd_engine_poll(hd_engine *e, hd_event *out, int64_t timeout_ns) {
    drop_finished(e);
    while (take_post(e, &e->event_post, timeout_ns)) {
        if (make_event(e, &e->event_post, out)) return true;
    }
    return false;
}

void hd_engine_read_stats(hd_engine *e, hd_engine_stats *out) {
    pthread_mutex_lock(&e->lock);
    *out = e->stats;
    pthread_mutex_unlock(&e->lock);
}

/* ---- life ---- */

hd_status engine_start(hd_engine *e, hd_err *err) {
    if (pthread_create(&e->thread, NULL, turn_for_ever, e) != 0) {
        return HD_FAIL(err, HD_EIO, "cannot start the step thread");
    }
    e->started = true;
    return HD_OK;
}

void engine_stop(hd_engine *e) {
    if (!e->started) return;
    pthread_mutex_lock(&e->lock);
    e->closing = true;
    pthread_cond_broadcast(&e->mail);
    pthread_cond_broadcast(&e->taken);
    pthread_mutex_unlock(&e->lock);
    pthread_join(e->thread, NULL);
    drop_finished(e);
}
