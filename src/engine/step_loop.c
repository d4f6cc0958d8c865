/* step_loop.c - the step thread of a rank: takes mail (submissions, aborts, pauses), runs
 * scheduler steps and publishes their output. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/progress.h"
#include "engine/rank.h"

enum {
    SECOND_NS = 1000000000,
    PAUSED_LOOK_NS = 50000000, /* how often a paused engine checks for queue timeouts */
    LOADS_NS = SECOND_NS,      /* least time between two readings of expert loads */
    AUDIT_NS = SECOND_NS       /* idle time before pages and slots are audited */
};

/* ---- output of a step ---- */

static void on_slot_assigned(void *ctx, uint64_t id, int32_t slot, const int32_t *tokens,
                             int32_t n) {
    engine_rank *rank = ctx;
    hd_engine *e = rank->engine;
    engine_request *r = engine_request_of(e, id);
    engine_choice *c = &r->choices[engine_choice_of(id)];
    if (c->n_admitted++ == 0) c->admitted_ns = hd_now_ns();
    if (rank->null) {
        hd_null_runner_enter(rank->null, slot, c->sampling.params.seed);
    } else {
        hd_model_runner_enter(rank->model_runner, slot, &c->sampling, tokens, n, r->n_prompt);
    }
}

static void on_slot_released(void *ctx, uint64_t id, int32_t slot) {
    (void)ctx;
    (void)id;
    /* the slot's sampling state is overwritten when the next choice is admitted */
    (void)slot;
}

/* Copies a step with its alternatives, to top[ENGINE_POST_TOPS]. */
static void copy_step(hd_step_tokens *to, hd_alternative *top, const hd_step_tokens *from) {
    const size_t n = (size_t)from->n_tokens * (size_t)from->n_top;
    *to = *from;
    to->top = top;
    if (n) memcpy(top, from->top, n * sizeof *top);
}

void engine_step_output_copy(engine_step_output *to, const engine_step_output *from) {
    hd_alternative *top = to->top;
    *to = *from;
    to->top = top;
    copy_step(&to->step, top, &from->step);
}

/* Moves the step's outputs into the ring, under the lock. Waits while the ring is full
 * because the polling thread is behind. */
static void hand_over(engine_rank *rank) {
    hd_engine *e = rank->engine;
    for (int32_t i = 0; i < rank->n_step_outputs; i++) {
        engine_step_output *p = &rank->step_outputs[i];
        while (e->n_posts == e->cap_posts && !e->closing) {
            pthread_cond_signal(&e->posted);
            pthread_cond_wait(&e->taken, &e->lock);
        }
        if (e->closing) {
            free(p->why);
            continue;
        }
        engine_choice *c = &engine_request_of(e, p->id)->choices[engine_choice_of(p->id)];
        c->n_posted += p->step.n_tokens;
        c->posted = p->step.finish_reason != HD_FINISH_NONE;
        engine_step_output_copy(&e->posts[(e->first_post + e->n_posts++) % e->cap_posts], p);
    }
    if (rank->n_step_outputs) pthread_cond_signal(&e->posted);
    rank->n_step_outputs = 0;
}

/* Returns why a choice failed: the device's message, or what was wrong with this choice
 * alone. */
static char *reason(const engine_rank *rank, hd_status status) {
    if (rank->step_err.status != HD_OK) return strdup(rank->step_err.msg);
    return strdup(status == HD_EINVAL ? "no token is allowed to come next"
                                      : "the model computed something that is no number");
}

static void take_prompt_logprobs(engine_request *r, const hd_prompt_logprobs *p) {
    const size_t at = (size_t)(p->from - r->prompt_logprobs_from), n = (size_t)p->n;
    const size_t n_top = (size_t)p->n_top;
    memcpy(r->prompt_logprobs + at, p->logprobs, n * sizeof *p->logprobs);
    if (n_top) memcpy(r->prompt_top + at * n_top, p->top, n * n_top * sizeof *p->top);
    r->n_prompt_logprobs = (int32_t)(at + n);
}

static void count(hd_engine_stats *t, const hd_step_tokens *s) {
    t->output_tokens += s->n_tokens;
    for (int32_t i = 0; i < s->n_drafted; i++) t->drafted_at[i]++;
    for (int32_t i = 0; i < s->n_accepted; i++) t->accepted_at[i]++;
}

/* Outputs of one step are collected without the lock and moved to the ring together. */
static void on_event(void *ctx, const hd_sched_event *s) {
    engine_rank *rank = ctx;
    hd_engine *e = rank->engine;
    engine_request *r = engine_request_of(e, s->id);
    const engine_choice *c = &r->choices[engine_choice_of(s->id)];
    const hd_finish_reason finish = s->step.finish_reason;
    if (s->prompt.n) take_prompt_logprobs(r, &s->prompt);
    if (s->step.n_tokens == 0 && finish == HD_FINISH_NONE) return;
    engine_step_output *p = &rank->step_outputs[rank->n_step_outputs++];
    p->id = s->id;
    copy_step(&p->step, p->top, &s->step);
    p->why = finish == HD_FINISH_ERROR ? reason(rank, s->status) : NULL;
    p->n_retracted = c->n_admitted > 1 ? c->n_admitted - 1 : 0;
    p->admitted_ns = c->admitted_ns;
    count(&rank->totals, &s->step);
    if (rank->n_step_outputs < rank->cap_step_outputs) return;
    pthread_mutex_lock(&e->lock);
    hand_over(rank);
    pthread_mutex_unlock(&e->lock);
}

hd_sched_hooks engine_rank_hooks(engine_rank *rank) {
    return (hd_sched_hooks){.ctx = rank,
                            .slot_assigned = on_slot_assigned,
                            .slot_released = on_slot_released,
                            .event = on_event};
}

/* Host time as the runner counts it. */
static int64_t host_ns_of(const engine_rank *rank) {
    return rank->model_runner ? hd_model_runner_read_times(rank->model_runner)->host_ns : 0;
}

static hd_status run_timed(void *ctx, const hd_page_copy *copies, int32_t n_copies,
                           const hd_seq_input *inputs, int32_t n_inputs, hd_seq_output *outputs,
                           hd_err *err) {
    engine_rank *rank = ctx;
    const int64_t start = hd_now_ns();
    const int64_t host_before = host_ns_of(rank);
    const hd_status st =
        rank->runner.run(rank->runner.ctx, copies, n_copies, inputs, n_inputs, outputs, err);
    rank->in_runner_ns = hd_now_ns() - start - (host_ns_of(rank) - host_before);
    return st;
}

hd_runner engine_rank_runner(engine_rank *rank) {
    return (hd_runner){.ctx = rank, .run = run_timed};
}

/* ---- input of a step ---- */

static void submit(engine_rank *rank, uint64_t id) {
    hd_engine *e = rank->engine;
    const engine_request *r = engine_request_of(e, id);
    for (int32_t i = 0; i < r->n_choices; i++) {
        hd_sched_request q = r->request;
        hd_err err = {0};
        q.id = id + (uint64_t)i;
        q.follows = i ? id : 0;
        q.prompt_logprobs_from = i ? 0 : r->prompt_logprobs_from;
        if (hd_sched_submit(rank->sched, &q, &err) == HD_OK) continue;
        rank->step_err = err;
        on_event(rank, &(hd_sched_event){.id = q.id, .step.finish_reason = HD_FINISH_ERROR});
        rank->step_err = (hd_err){0};
    }
}

static bool loads_are_stale(const engine_rank *rank) {
    const hd_engine *e = rank->engine;
    return e->n_loads && rank->totals.steps != rank->loads_steps;
}

/* Publishes a copy of the expert loads, so that readers neither wait for a step nor delay
 * one. */
static void show_loads(engine_rank *rank) {
    hd_engine *e = rank->engine;
    const int64_t now = hd_now_ns();
    if (!loads_are_stale(rank) || now < rank->loads_ns + LOADS_NS) return;
    rank->loads_ns = now;
    rank->loads_steps = rank->totals.steps;
    if (hd_model_runner_read_experts(rank->model_runner, rank->fresh_loads, NULL) != HD_OK)
        return;
    pthread_mutex_lock(&e->lock);
    memcpy(e->loads, rank->fresh_loads, (size_t)e->n_loads * sizeof *e->loads);
    pthread_mutex_unlock(&e->lock);
}

static bool audit_is_due(const engine_rank *rank) {
    return hd_sched_idle(rank->sched) && rank->totals.finished != rank->audited;
}

/* Called when idle: only a request that arrives in these milliseconds waits for the audit. */
static void audit(engine_rank *rank) {
    hd_engine_stats *t = &rank->totals;
    hd_err err = {0};
    if (!audit_is_due(rank) || hd_now_ns() < t->last_step_ns + AUDIT_NS) return;
    rank->audited = t->finished;
    t->audits++;
    if (hd_sched_audit(rank->sched, &err) != HD_EINVAL) return;
    t->audits_failed++;
    snprintf(t->audit_missed, sizeof t->audit_missed, "%.*s", (int)sizeof t->audit_missed - 1,
             err.msg);
}

static int64_t sooner(int64_t a, int64_t b) {
    return a && (a < b || !b) ? a : b;
}

/* Returns the time until which to sleep without mail; 0: no limit. A pause with requests
 * needs checks for timeouts, expert loads are published when due, and an idle engine is
 * audited. */
static int64_t sleep_until(const engine_rank *rank, bool idle) {
    const hd_engine *e = rank->engine;
    const int64_t look = e->paused && !idle ? hd_now_ns() + PAUSED_LOOK_NS : 0;
    const int64_t show = loads_are_stale(rank) ? rank->loads_ns + LOADS_NS : 0;
    const int64_t check = audit_is_due(rank) ? rank->totals.last_step_ns + AUDIT_NS : 0;
    return sooner(sooner(look, show), check);
}

/* Waits while there is no request to step and no mail. */
static void wait_for_mail(engine_rank *rank, bool idle) {
    hd_engine *e = rank->engine;
    while (!e->closing && !e->mail.news && (idle || e->paused)) {
        const int64_t ns = sleep_until(rank, idle);
        const struct timespec until = {ns / SECOND_NS, ns % SECOND_NS};
        if (!ns) {
            pthread_cond_wait(&e->wake, &e->lock);
        } else if (pthread_cond_timedwait(&e->wake, &e->lock, &until) != 0) {
            return;
        }
    }
}

/* Processes the mailbox: submissions, aborts and pauses. Returns false if the engine is
 * closing. */
static bool drain_mailbox(engine_rank *rank, bool idle, bool *paused) {
    hd_engine *e = rank->engine;
    engine_mail *in = &rank->inbox, *mail = &e->mail;
    pthread_mutex_lock(&e->lock);
    wait_for_mail(rank, idle);
    in->n_submitted = mail->n_submitted;
    in->n_cancelled = mail->n_cancelled;
    in->flush = mail->flush;
    in->retract = mail->retract;
    memcpy(in->submitted, mail->submitted, (size_t)in->n_submitted * sizeof(uint64_t));
    memcpy(in->cancelled, mail->cancelled, (size_t)in->n_cancelled * sizeof(uint64_t));
    mail->n_submitted = mail->n_cancelled = 0;
    mail->flush = mail->retract = mail->news = false;
    *paused = e->paused;
    rank->seen_pauses = e->pauses;
    const bool closing = e->closing;
    pthread_mutex_unlock(&e->lock);
    for (int32_t i = 0; i < in->n_submitted; i++) submit(rank, in->submitted[i]);
    for (int32_t i = 0; i < in->n_cancelled; i++)
        hd_sched_cancel(rank->sched, in->cancelled[i]);
    if (in->retract) hd_sched_retract_all(rank->sched);
    if (in->flush) hd_sched_flush_cache(rank->sched);
    return !closing;
}

/* ---- published state ---- */

static void read_times(engine_rank *rank) {
    hd_engine_stats *t = &rank->totals;
    if (!rank->model_runner) return;
    const hd_model_runner_times *x = hd_model_runner_read_times(rank->model_runner);
    t->graph_steps = x->graph_steps;
    t->graph_ns = x->busy_ns;
    t->graphs = x->graphs;
    /* includes the memory of CUDA graphs */
    t->activation_bytes = hd_model_runner_bytes(rank->model_runner) + rank->follower_bytes;
    t->gap_ns = x->gap_ns;
    t->record_ns = x->record_ns;
    memcpy(t->gaps, x->gaps, sizeof t->gaps);
}

static void read_totals(engine_rank *rank) {
    const hd_sched_stats s = hd_sched_read_stats(rank->sched);
    const hd_cache_stats c = hd_cache_read_stats(hd_sched_cache(rank->sched));
    hd_engine_stats *t = &rank->totals;
    t->waiting = s.waiting;
    t->running = s.running;
    t->steps = s.steps;
    t->rows = s.rows;
    t->finished = s.finished;
    t->retracted = s.retracted;
    t->prompt_tokens = c.asked_tokens;
    t->cached_tokens = c.matched_tokens;
    for (int l = 0; l < HD_N_KV_GROUPS; l++) {
        t->pages[l] = c.pages[l];
        t->pages_free[l] = c.free[l];
        t->pages_cached[l] = c.evictable[l];
    }
    t->snapshots_free = t->snapshots - c.snapshots;
    read_times(rank);
}

/* Publishes events and statistics of a step together. */
static void publish(engine_rank *rank) {
    hd_engine *e = rank->engine;
    read_totals(rank);
    pthread_mutex_lock(&e->lock);
    hand_over(rank);
    e->stats = rank->totals;
    e->rested_pauses = rank->seen_pauses;
    e->n_places = rank->totals.running;
    for (int32_t i = 0; i < e->n_places; i++) e->places[i] = hd_sched_running(rank->sched, i);
    pthread_mutex_unlock(&e->lock);
}

static bool step(engine_rank *rank, bool paused) {
    const int64_t start = hd_now_ns();
    rank->step_err = (hd_err){0};
    rank->in_runner_ns = 0;
    if (paused) {
        hd_sched_process_aborts(rank->sched, start);
        return false;
    }
    const int64_t before = hd_sched_read_stats(rank->sched).steps;
    const hd_status st = hd_sched_step(rank->sched, start, &rank->step_err);
    if (hd_sched_read_stats(rank->sched).steps != before) {
        rank->totals.last_step_ns = hd_now_ns();
        rank->totals.step_ns += rank->totals.last_step_ns - start;
        rank->totals.host_ns += rank->totals.last_step_ns - start - rank->in_runner_ns;
    }
    return st != HD_EAGAIN;
}

static void *step_until_closed(void *arg) {
    engine_rank *rank = arg;
    bool idle = true, paused;
    if (rank->device) hd_device_bind_thread(rank->device);
    while (drain_mailbox(rank, idle, &paused)) {
        const bool computed = step(rank, paused);
        audit(rank);
        publish(rank);
        show_loads(rank);
        /* if no step was computed, only mail can change anything */
        idle = hd_sched_idle(rank->sched) || (!computed && !paused);
    }
    if (rank->model_runner) hd_model_runner_end(rank->model_runner);
    return NULL;
}

/* An error is in the requests that it ended: the leader reports it. */
static void *follow_until_closed(void *arg) {
    engine_rank *rank = arg;
    hd_device_bind_thread(rank->device);
    hd_model_runner_follow(rank->model_runner, &rank->step_err);
    return NULL;
}

hd_status engine_rank_start(engine_rank *rank, hd_err *err) {
    const bool leads = engine_rank_leads(rank);
    if (leads) publish(rank);
    if (pthread_create(&rank->thread, NULL, leads ? step_until_closed : follow_until_closed,
                       rank) != 0) {
        return HD_FAIL(err, HD_EIO, "cannot start the thread of rank %d", rank->index);
    }
    rank->started = true;
    return HD_OK;
}
