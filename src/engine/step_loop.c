/* step_loop.c - the step thread: takes mail, turns the scheduler, posts what each turn gave. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/progress.h"
#include "engine/engine_internal.h"

enum {
    SECOND_NS = 1000000000,
    PAUSED_LOOK_NS = 50000000, /* how often a paused engine looks for timeouts */
    LOADS_NS = SECOND_NS,      /* how often the loads of experts are read, at most */
    AUDIT_NS = SECOND_NS       /* without work before the books are audited */
};

/* ---- what a turn gives ---- */

static void on_enter(void *ctx, uint64_t id, int32_t slot, const int32_t *tokens, int32_t n) {
    hd_engine *e = ctx;
    engine_request *r = engine_request_of(e, id);
    engine_answer *a = &r->answers[engine_answer_of(id)];
    if (a->n_admitted++ == 0) a->admitted_ns = hd_now_ns();
    if (e->null) {
        hd_null_runner_enter(e->null, slot, a->choosing.params.seed);
    } else {
        hd_model_runner_enter(e->executor, slot, &a->choosing, tokens, n, r->n_prompt);
    }
}

static void on_leave(void *ctx, uint64_t id, int32_t slot) {
    (void)ctx;
    (void)id;
    (void)slot; /* the slot's sampling state is overwritten at the next entry */
}

static hd_end end_of(hd_finish f) {
    static const hd_end ends[] = {
        [HD_FINISH_NONE] = HD_END_NOT,        [HD_FINISH_STOP] = HD_END_STOP,
        [HD_FINISH_LENGTH] = HD_END_LENGTH,   [HD_FINISH_ABORT] = HD_END_CANCELLED,
        [HD_FINISH_TIMEOUT] = HD_END_TIMEOUT, [HD_FINISH_ERROR] = HD_END_FAILED};
    return ends[f];
}

void engine_step_output_copy(engine_step_output *to, const engine_step_output *from) {
    hd_alternative *top = to->top;
    *to = *from;
    to->top = top;
    const size_t n = (size_t)from->n * (size_t)from->n_top;
    if (n) memcpy(to->top, from->top, n * sizeof *top);
}

/* Moves the turn's posts into the ring, under the lock; waits while the poller is that far
 * behind. */
static void hand_over(hd_engine *e) {
    for (int32_t i = 0; i < e->n_step_outputs; i++) {
        engine_step_output *p = &e->step_outputs[i];
        while (e->n_posts == e->cap_posts && !e->closing) {
            pthread_cond_signal(&e->posted);
            pthread_cond_wait(&e->taken, &e->lock);
        }
        if (e->closing) {
            free(p->why);
            continue;
        }
        engine_answer *a = &engine_request_of(e, p->id)->answers[engine_answer_of(p->id)];
        a->n_posted += p->n;
        a->posted = p->end != HD_END_NOT;
        engine_step_output_copy(&e->posts[(e->first_post + e->n_posts++) % e->cap_posts], p);
    }
    if (e->n_step_outputs) pthread_cond_signal(&e->posted);
    e->n_step_outputs = 0;
}

/* Why an answer failed: the device's words, or what was wrong with this one alone. */
static char *reason(const hd_engine *e, hd_status status) {
    if (e->step_err.code != HD_OK) return strdup(e->step_err.msg);
    return strdup(status == HD_EINVAL ? "no token is allowed to come next"
                                      : "the model computed something that is no number");
}

/* [n, HD_MAX_TOP_LOGPROBS] becomes [n, n_top]. */
static void take_tops(hd_alternative *out, const int32_t *ids, const float *logprobs, int32_t n,
                      int32_t n_top) {
    for (int32_t i = 0; i < n; i++) {
        for (int32_t k = 0; k < n_top; k++) {
            const int32_t at = i * HD_MAX_TOP_LOGPROBS + k;
            *out++ = (hd_alternative){ids[at], logprobs[at]};
        }
    }
}
_Static_assert((int)HD_MAX_ALTERNATIVES <= (int)HD_MAX_TOP_LOGPROBS,
               "all alternatives are computed");

static void take_scores(engine_request *r, const hd_sched_event *s) {
    const int32_t at = s->score_at - r->score_from;
    memcpy(r->scores + at, s->scores, (size_t)s->n_prompt_logprobs * sizeof *r->scores);
    if (r->n_top) {
        take_tops(r->score_top + (size_t)at * (size_t)r->n_top, s->score_top_ids,
                  s->score_top_logprobs, s->n_prompt_logprobs, r->n_top);
    }
    r->n_scored = at + s->n_prompt_logprobs;
}

static void count(hd_engine_stats *t, const hd_sched_event *s) {
    t->output_tokens += s->n;
    for (int32_t i = 0; i < s->n_drafted; i++) t->drafted_at[i]++;
    for (int32_t i = 0; i < s->n_accepted; i++) t->accepted_at[i]++;
}

/* Posts of one turn are collected without the lock and handed over together. */
static void on_event(void *ctx, const hd_sched_event *s) {
    hd_engine *e = ctx;
    engine_request *r = engine_request_of(e, s->id);
    const engine_answer *a = &r->answers[engine_answer_of(s->id)];
    if (s->n_prompt_logprobs) take_scores(r, s);
    if (s->n == 0 && s->finish == HD_FINISH_NONE) return;
    engine_step_output *p = &e->step_outputs[e->n_step_outputs++];
    p->id = s->id;
    p->n = s->n;
    p->n_top = r->n_top;
    p->end = end_of(s->finish);
    p->why = s->finish == HD_FINISH_ERROR ? reason(e, s->status) : NULL;
    p->n_cached = s->n_cached;
    p->n_drafted = s->n_drafted;
    p->n_accepted = s->n_accepted;
    p->n_retracted = a->n_admitted > 1 ? a->n_admitted - 1 : 0;
    p->admitted_ns = a->admitted_ns;
    if (s->n) {
        memcpy(p->tokens, s->tokens, (size_t)s->n * sizeof *p->tokens);
        memcpy(p->logprobs, s->logprobs, (size_t)s->n * sizeof *p->logprobs);
    }
    if (s->n && r->n_top) take_tops(p->top, s->top_ids, s->top_logprobs, s->n, r->n_top);
    count(&e->totals, s);
    if (e->n_step_outputs < e->cap_step_outputs) return;
    pthread_mutex_lock(&e->lock);
    hand_over(e);
    pthread_mutex_unlock(&e->lock);
}

hd_sched_hooks engine_hooks(hd_engine *e) {
    return (hd_sched_hooks){.ctx = e, .enter = on_enter, .leave = on_leave, .event = on_event};
}

/* What the runner itself calls work of the host. */
static int64_t host_ns_of(const hd_engine *e) {
    return e->executor ? hd_model_runner_read_times(e->executor)->host_ns : 0;
}

static hd_status run_timed(void *ctx, const hd_page_copy *copies, int32_t n_copies,
                           const hd_seq_input *inputs, int32_t n_inputs, hd_seq_output *outputs,
                           hd_err *err) {
    hd_engine *e = ctx;
    const int64_t start = hd_now_ns();
    const int64_t host_before = host_ns_of(e);
    const hd_status st =
        e->runner.run(e->runner.ctx, copies, n_copies, inputs, n_inputs, outputs, err);
    e->in_runner_ns = hd_now_ns() - start - (host_ns_of(e) - host_before);
    return st;
}

hd_runner engine_runner(hd_engine *e) {
    return (hd_runner){.ctx = e, .run = run_timed};
}

/* ---- what a turn is told ---- */

static void submit(hd_engine *e, uint64_t id) {
    const engine_request *r = engine_request_of(e, id);
    for (int32_t i = 0; i < r->n_answers; i++) {
        hd_sched_request q = r->request;
        hd_err err = {0};
        q.id = id + (uint64_t)i;
        q.follows = i ? id : 0;
        q.score_from = i ? 0 : r->score_from;
        if (hd_sched_submit(e->sched, &q, &err) == HD_OK) continue;
        e->step_err = err;
        on_event(e, &(hd_sched_event){.id = q.id, .finish = HD_FINISH_ERROR});
        e->step_err = (hd_err){0};
    }
}

static bool loads_are_stale(const hd_engine *e) {
    return e->n_loads && e->totals.steps != e->loads_steps;
}

/* Whoever looks gets a copy, so that looking never waits for a step nor holds one up. */
static void show_loads(hd_engine *e) {
    const int64_t now = hd_now_ns();
    if (!loads_are_stale(e) || now < e->loads_ns + LOADS_NS) return;
    e->loads_ns = now;
    e->loads_steps = e->totals.steps;
    if (hd_model_runner_read_experts(e->executor, e->fresh_loads, NULL) != HD_OK) return;
    pthread_mutex_lock(&e->lock);
    memcpy(e->loads, e->fresh_loads, (size_t)e->n_loads * sizeof *e->loads);
    pthread_mutex_unlock(&e->lock);
}

static bool audit_is_due(const hd_engine *e) {
    return hd_sched_idle(e->sched) && e->totals.finished != e->audited;
}

/* Nobody waits for the step thread now, or only who comes in these milliseconds. */
static void audit(hd_engine *e) {
    hd_engine_stats *t = &e->totals;
    hd_err err = {0};
    if (!audit_is_due(e) || hd_now_ns() < t->last_step_ns + AUDIT_NS) return;
    e->audited = t->finished;
    t->audits++;
    if (hd_sched_audit(e->sched, &err) != HD_EINVAL) return;
    t->audits_failed++;
    snprintf(t->audit_missed, sizeof t->audit_missed, "%.*s", (int)sizeof t->audit_missed - 1,
             err.msg);
}

static int64_t sooner(int64_t a, int64_t b) {
    return a && (a < b || !b) ? a : b;
}

/* Until when to sleep without mail; 0: for ever. A pause with requests is looked at now and
 * then, the loads of the last steps are shown once they may be, and what rests is audited. */
static int64_t sleep_until(const hd_engine *e, bool idle) {
    const int64_t look = e->paused && !idle ? hd_now_ns() + PAUSED_LOOK_NS : 0;
    const int64_t show = loads_are_stale(e) ? e->loads_ns + LOADS_NS : 0;
    const int64_t check = audit_is_due(e) ? e->totals.last_step_ns + AUDIT_NS : 0;
    return sooner(sooner(look, show), check);
}

/* Waits while there is nothing to do. */
static void wait_for_mail(hd_engine *e, bool idle) {
    while (!e->closing && !e->mail.news && (idle || e->paused)) {
        const int64_t ns = sleep_until(e, idle);
        const struct timespec until = {ns / SECOND_NS, ns % SECOND_NS};
        if (!ns) {
            pthread_cond_wait(&e->wake, &e->lock);
        } else if (pthread_cond_timedwait(&e->wake, &e->lock, &until) != 0) {
            return;
        }
    }
}

/* Takes what the mailbox holds; false when the engine is to close. */
static bool process_aborts(hd_engine *e, bool idle, bool *paused) {
    engine_mail *in = &e->inbox, *mail = &e->mail;
    pthread_mutex_lock(&e->lock);
    wait_for_mail(e, idle);
    in->n_submitted = mail->n_submitted;
    in->n_cancelled = mail->n_cancelled;
    in->flush = mail->flush;
    in->retract = mail->retract;
    memcpy(in->submitted, mail->submitted, (size_t)in->n_submitted * sizeof(uint64_t));
    memcpy(in->cancelled, mail->cancelled, (size_t)in->n_cancelled * sizeof(uint64_t));
    mail->n_submitted = mail->n_cancelled = 0;
    mail->flush = mail->retract = mail->news = false;
    *paused = e->paused;
    e->seen_pauses = e->pauses;
    const bool closing = e->closing;
    pthread_mutex_unlock(&e->lock);
    for (int32_t i = 0; i < in->n_submitted; i++) submit(e, in->submitted[i]);
    for (int32_t i = 0; i < in->n_cancelled; i++) hd_sched_cancel(e->sched, in->cancelled[i]);
    if (in->retract) hd_sched_retract_all(e->sched);
    if (in->flush) hd_sched_flush_cache(e->sched);
    return !closing;
}

/* ---- what others may read ---- */

static void read_times(hd_engine *e) {
    hd_engine_stats *t = &e->totals;
    if (!e->executor) return;
    const hd_model_runner_times *x = hd_model_runner_read_times(e->executor);
    t->graph_steps = x->graph_steps;
    t->graph_ns = x->busy_ns;
    t->graphs = x->graphs;
    t->activation_bytes = hd_model_runner_bytes(e->executor); /* with what graphs took */
    t->gap_ns = x->gap_ns;
    t->record_ns = x->record_ns;
    _Static_assert((int)HD_GAPS == (int)HD_GAP_BINS, "the same bins");
    memcpy(t->gaps, x->gaps, sizeof t->gaps);
}

static void read_totals(hd_engine *e) {
    const hd_sched_stats s = hd_sched_read_stats(e->sched);
    const hd_cache_stats c = hd_cache_read_stats(hd_sched_cache(e->sched));
    hd_engine_stats *t = &e->totals;
    t->waiting = s.waiting;
    t->running = s.running;
    t->steps = s.steps;
    t->rows = s.rows;
    t->finished = s.finished;
    t->retracted = s.retracted;
    t->prompt_tokens = c.asked_tokens;
    t->cached_tokens = c.matched_tokens;
    for (int l = 0; l < HD_N_PAGE_GROUPS; l++) {
        t->pages[l] = c.pages[l];
        t->pages_free[l] = c.free[l];
        t->pages_cached[l] = c.evictable[l];
    }
    t->snapshots_free = t->snapshots - c.snapshots;
    read_times(e);
}

/* Events and figures of a turn become visible together. */
static void publish(hd_engine *e) {
    read_totals(e);
    pthread_mutex_lock(&e->lock);
    hand_over(e);
    e->stats = e->totals;
    e->rested_pauses = e->seen_pauses;
    e->n_places = e->totals.running;
    for (int32_t i = 0; i < e->n_places; i++) e->places[i] = hd_sched_running(e->sched, i);
    pthread_mutex_unlock(&e->lock);
}

static bool step(hd_engine *e, bool paused) {
    const int64_t start = hd_now_ns();
    e->step_err = (hd_err){0};
    e->in_runner_ns = 0;
    if (paused) {
        hd_sched_process_aborts(e->sched, start);
        return false;
    }
    const int64_t before = hd_sched_read_stats(e->sched).steps;
    const hd_status st = hd_sched_step(e->sched, start, &e->step_err);
    if (hd_sched_read_stats(e->sched).steps != before) {
        e->totals.last_step_ns = hd_now_ns();
        e->totals.step_ns += e->totals.last_step_ns - start;
        e->totals.host_ns += e->totals.last_step_ns - start - e->in_runner_ns;
    }
    return st != HD_EAGAIN;
}

static void *step_for_ever(void *arg) {
    hd_engine *e = arg;
    bool idle = true, paused;
    if (e->device) hd_device_bind_thread(e->device);
    while (process_aborts(e, idle, &paused)) {
        const bool computed = step(e, paused);
        audit(e);
        publish(e);
        show_loads(e);
        /* Without a computation only mail can change anything. */
        idle = hd_sched_idle(e->sched) || (!computed && !paused);
    }
    return NULL;
}

hd_status engine_start(hd_engine *e, hd_err *err) {
    publish(e);
    if (pthread_create(&e->thread, NULL, step_for_ever, e) != 0) {
        return HD_FAIL(err, HD_EIO, "cannot start the step thread");
    }
    e->started = true;
    return HD_OK;
}

void engine_stop(hd_engine *e) {
    if (!e->started) return;
    pthread_mutex_lock(&e->lock);
    e->closing = true;
    pthread_cond_broadcast(&e->wake);
    pthread_cond_broadcast(&e->taken);
    pthread_mutex_unlock(&e->lock);
    pthread_join(e->thread, NULL);
}
