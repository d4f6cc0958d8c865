/* step_loop.c - the step thread of a rank: takes mail (submissions, aborts, pauses), runs
 * scheduler steps and publishes their output. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/progress.h"
#include "engine/hisparse.h"
#include "engine/experts.h"
#include "engine/new_weights.h"
#include "engine/remote/remote.h"

enum {
    SECOND_NS = 1000000000,
    LOADS_NS = SECOND_NS, /* least time between two readings of expert loads */
    AUDIT_NS = SECOND_NS  /* idle time before pages and slots are audited */
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

/* Copies a step with its alternatives, to top[engine_post_tops()]. */
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

void engine_post(hd_engine *e, engine_step_output *p) {
    while (e->n_posts == e->cap_posts && !e->closing) {
        pthread_cond_signal(&e->posted);
        pthread_cond_wait(&e->taken, &e->lock);
    }
    if (e->closing) {
        free(p->why);
        return;
    }
    engine_request *r = engine_request_of(e, p->id);
    engine_choice *c = &r->choices[engine_choice_of(p->id)];
    if (p->step.n_tokens) engine_route_prompt_done(e, r);
    if (c->tokens) {
        memcpy(c->tokens + c->n_posted, p->step.tokens,
               (size_t)p->step.n_tokens * sizeof *c->tokens);
    }
    c->n_posted += p->step.n_tokens;
    c->posted = p->step.finish_reason != HD_FINISH_NONE;
    engine_step_output_copy(&e->posts[(e->first_post + e->n_posts++) % e->cap_posts], p);
    pthread_cond_signal(&e->posted);
}

/* Moves the step's outputs into the ring, under the lock, or to the process that has it. */
static void hand_over(engine_rank *rank) {
    hd_engine *e = rank->engine;
    for (int32_t i = 0; i < rank->n_step_outputs; i++) {
        if (engine_rank_is_remote(rank)) {
            engine_remote_put_output(rank, &rank->step_outputs[i]);
        } else {
            engine_post(e, &rank->step_outputs[i]);
        }
    }
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

/* Rows are copied when a token behind them is sampled: later ones, of a prefix that is computed
 * anew after a retraction, may be those of other weights. */
static void on_computed(void *ctx, uint64_t id, const int32_t *pages, int32_t n_done) {
    engine_rank *rank = ctx;
    const engine_request *r = engine_request_of(rank->engine, id);
    engine_choice *c = &r->choices[engine_choice_of(id)];
    const int32_t first = r->replay_from + c->n_replay, n = n_done - first;
    if (n <= 0) return;
    for (int k = 0; k < HD_N_REPLAYS; k++) {
        if (!c->replay[k]) continue;
        const hd_replay kind = (hd_replay)k;
        const size_t row = (size_t)hd_replay_shape_of(rank->engine->spec, kind).row_bytes;
        hd_model_runner_read_replay(rank->model_runner, kind, pages, first, n,
                                    c->replay[k] + (size_t)c->n_replay * row);
        rank->totals.replay_rows[k] += n;
    }
    c->n_replay += n;
}

static void on_committed(void *ctx, uint64_t id, int32_t n_done) {
    engine_pages_note(ctx, id, n_done);
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
    if (s->prompt.n && engine_rank_is_remote(rank)) {
        engine_remote_put_prompt(rank, s->id, &s->prompt);
    } else if (s->prompt.n) {
        take_prompt_logprobs(r, &s->prompt);
    }
    if (s->step.n_tokens == 0 && finish == HD_FINISH_NONE && !r->request.progress) return;
    engine_step_output *p = &rank->step_outputs[rank->n_step_outputs++];
    p->id = s->id;
    copy_step(&p->step, p->top, &s->step);
    p->why = finish == HD_FINISH_ERROR ? reason(rank, s->status) : NULL;
    p->n_retracted = c->n_admitted > 1 ? c->n_admitted - 1 : 0;
    p->admitted_ns = c->admitted_ns;
    p->weight_version = rank->weight_version;
    count(&rank->totals, &s->step);
    if (rank->n_step_outputs < rank->cap_step_outputs) return;
    engine_pages_show(rank); /* before a last event */
    pthread_mutex_lock(&e->lock);
    hand_over(rank);
    pthread_mutex_unlock(&e->lock);
}

static void on_read(void *ctx, uint64_t id) {
    engine_pages_read(ctx, id);
}

hd_sched_hooks engine_rank_hooks(engine_rank *rank) {
    return (hd_sched_hooks){.ctx = rank,
                            .slot_assigned = on_slot_assigned,
                            .slot_released = on_slot_released,
                            .event = on_event,
                            .computed = on_computed,
                            .committed = on_committed,
                            .read = on_read};
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
    if (st != HD_OK) {
        const bool again = !rank->engine->independent && engine_ranks_recover(rank, err);
        rank->in_runner_ns = hd_now_ns() - start;
        return again ? HD_EAGAIN : st;
    }
    engine_ranks_count_success(rank);
    rank->in_runner_ns = hd_now_ns() - start - (host_ns_of(rank) - host_before);
    return HD_OK;
}

hd_runner engine_rank_runner(engine_rank *rank) {
    return (hd_runner){.ctx = rank, .run = run_timed};
}

/* ---- input of a step ---- */

/* A choice that another group began is continued behind its tokens, as if it had been retracted. */
static void submit(engine_rank *rank, uint64_t id) {
    hd_engine *e = rank->engine;
    const engine_request *r = engine_request_of(e, id);
    for (int32_t i = 0; i < r->n_choices; i++) {
        const engine_choice *c = &r->choices[i];
        hd_sched_request q = r->request;
        hd_err err = {0};
        if (c->posted) continue;
        q.id = id + (uint64_t)i;
        q.follows = i && !r->choices[0].posted ? id : 0;
        q.progress = i == 0 && r->request.progress;
        q.prompt_logprobs_from = i || c->n_posted ? 0 : r->prompt_logprobs_from;
        q.output = c->tokens;
        q.n_output = c->n_posted;
        if (c->n_posted) q.queue_until_ns = 0;
        if (hd_sched_submit(rank->sched, &q, &err) == HD_OK) continue;
        rank->step_err = err;
        on_event(rank, &(hd_sched_event){.id = q.id, .step.finish_reason = HD_FINISH_ERROR});
        rank->step_err = (hd_err){0};
    }
}

static bool loads_are_stale(const engine_rank *rank) {
    const hd_engine *e = rank->engine;
    return e->n_loads && rank->model_runner && rank->totals.steps != rank->loads_steps;
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
    if (rank->stage) hd_expert_stage_follow(rank->stage, rank->fresh_loads);
    pthread_mutex_lock(&e->lock);
    int64_t *loads = e->groups[rank->group].loads;
    e->groups[rank->group].loads_ns = now;
    for (int32_t i = 0; i < e->n_loads; i++) {
        loads[i] = 0;
        for (int32_t p = 0; p < HD_N_ROW_PHASES; p++) {
            loads[i] += rank->fresh_loads[p * e->n_loads + i];
        }
    }
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

/* When to run a round although there is nothing to do; 0: never. Expert loads are published when
 * due, an idle engine is audited, and pages go to the disk. */
static int64_t look_at(const engine_rank *rank) {
    const int64_t show = loads_are_stale(rank) ? rank->loads_ns + LOADS_NS : 0;
    const int64_t check = audit_is_due(rank) ? rank->totals.last_step_ns + AUDIT_NS : 0;
    const int64_t disk = rank->order.paused ? 0 : hd_sched_look_ns(rank->sched);
    return sooner(sooner(show, check), disk);
}

/* Copies the mail, and empties the mailbox. Returns whether all groups begin anew. A pause may
 * be newer than the order of this round, whose step admits requests again: its retraction
 * waits for the round that rests. */
static bool take_mail(engine_rank *rank) {
    hd_engine *e = rank->engine;
    engine_mail *in = &rank->inbox, *mail = &e->groups[rank->group].mail;
    pthread_mutex_lock(&e->lock);
    in->n_submitted = mail->n_submitted;
    in->n_cancelled = mail->n_cancelled;
    in->flush = mail->flush;
    in->retract = mail->retract && mail->retract_pause <= rank->order.pauses;
    in->rebalance = mail->rebalance;
    memcpy(in->submitted, mail->submitted, (size_t)in->n_submitted * sizeof(uint64_t));
    memcpy(in->cancelled, mail->cancelled, (size_t)in->n_cancelled * sizeof(uint64_t));
    in->jobs = mail->jobs;
    mail->jobs = NULL;
    mail->n_submitted = mail->n_cancelled = 0;
    mail->flush = false;
    mail->retract = mail->retract && !in->retract;
    mail->rebalance = false;
    const bool anew = rank->recoveries != e->recoveries;
    rank->recoveries = e->recoveries;
    pthread_mutex_unlock(&e->lock);
    return anew;
}

/* Processes the mailbox: submissions, aborts and pauses. */
static void drain_mailbox(engine_rank *rank) {
    engine_mail *in = &rank->inbox;
    const bool anew = take_mail(rank);
    for (int32_t i = 0; i < in->n_submitted; i++) submit(rank, in->submitted[i]);
    for (int32_t i = 0; i < in->n_cancelled; i++)
        hd_sched_cancel(rank->sched, in->cancelled[i]);
    if (in->retract || rank->order.retract || anew) hd_sched_retract_all(rank->sched);
    engine_update_obey(rank);
    if (in->flush || anew) hd_sched_flush_cache(rank->sched);
    if (in->flush && rank->kv_disk) hd_disk_tier_clear(rank->kv_disk);
    engine_pages_run_jobs(rank, in);
    engine_rebalance_obey(rank, in);
}

/* ---- published state ---- */

static void read_times(engine_rank *rank) {
    hd_engine_stats *t = &rank->totals;
    if (!rank->model_runner) return;
    const hd_model_runner_times *x = hd_model_runner_read_times(rank->model_runner);
    t->graph_steps = x->graph_steps;
    t->micro_steps = x->micro_steps;
    t->graph_ns = x->busy_ns;
    t->graphs = x->graphs;
    /* includes the memory of CUDA graphs */
    t->activation_bytes = hd_model_runner_bytes(rank->model_runner) + rank->follower_bytes;
    t->gap_ns = x->gap_ns;
    t->record_ns = x->record_ns;
    memcpy(t->gaps, x->gaps, sizeof t->gaps);
}

static void read_engram(engine_rank *rank) {
    if (!rank->model_runner) return;
    const hd_prefetch_stats s = hd_model_runner_engram_stats(rank->model_runner);
    rank->totals.engram = (hd_engram_figures){s.pieces, s.resident, s.read_bytes, s.skipped};
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
    t->host_cached_tokens = c.host_tokens;
    t->rebuilt_windows = c.rebuilt;
    t->rebuilt_rows = c.rebuilt_tokens;
    for (int l = 0; l < HD_N_KV_GROUPS; l++) {
        t->pages[l] = c.pages[l];
        t->pages_free[l] = c.free[l];
        t->pages_cached[l] = c.evictable[l];
        t->host_free[l] = t->host_pages[l] - c.host[l];
        t->host_saved[l] = c.saved[l];
        t->host_loaded[l] = c.loaded[l];
    }
    read_times(rank);
    engine_experts_read(rank);
    read_engram(rank);
    engine_kv_disk_read(rank);
    engine_hisparse_read(rank);
}

/* Publishes events and statistics of a step together. */
static void publish(engine_rank *rank) {
    hd_engine *e = rank->engine;
    engine_group *g = &e->groups[rank->group];
    read_totals(rank);
    pthread_mutex_lock(&e->lock);
    hand_over(rank);
    g->stats = rank->totals;
    g->rested_pauses = rank->order.pauses;
    g->n_places = rank->totals.running;
    for (int32_t i = 0; i < g->n_places; i++) g->places[i] = hd_sched_running(rank->sched, i);
    pthread_mutex_unlock(&e->lock);
}

/* Rank 0 could not begin anew: nothing is computed any more (world.c). */
static void end_without_runner(engine_rank *rank) {
    hd_engine *e = rank->engine;
    pthread_mutex_lock(&e->lock);
    HD_FAIL(&rank->step_err, HD_EPEER, "%s", e->figures.lost);
    pthread_mutex_unlock(&e->lock);
    hd_sched_fail_all(rank->sched, HD_EPEER);
}

/* Returns whether rows were computed. */
static bool step(engine_rank *rank) {
    const int64_t start = hd_now_ns();
    rank->step_err = (hd_err){0};
    rank->in_runner_ns = 0;
    if (!rank->runner.run) {
        end_without_runner(rank);
        return false;
    }
    if (rank->order.paused) {
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

static void lead(engine_rank *rank) {
    engine_remote_start(rank);
    while (engine_round_begin(rank)) {
        const bool ready = engine_recording_step(rank) && engine_rebalance_step(rank);
        drain_mailbox(rank);
        const bool computed = ready && step(rank);
        engine_pages_show(rank);
        if (computed && rank->stage) hd_expert_stage_move(rank->stage);
        audit(rank);
        publish(rank);
        show_loads(rank);
        /* if no step was computed, only mail can change anything */
        const bool idle = hd_sched_idle(rank->sched) || (!computed && !rank->order.paused);
        engine_round_end(rank, idle, look_at(rank));
    }
    engine_remote_stop(rank);
    if (rank->model_runner) hd_model_runner_end(rank->model_runner);
}

/* An error of a follower is in the requests that it ended: the leader reports it. */
void engine_rank_work(engine_rank *rank) {
    if (engine_rank_leads(rank))
        lead(rank);
    else
        hd_model_runner_follow(rank->model_runner, &rank->step_err);
}

static void *work(void *arg) {
    engine_rank *rank = arg;
    if (rank->device) hd_device_bind_thread(rank->device);
    engine_rank_work(rank);
    return NULL;
}

hd_status engine_rank_start(engine_rank *rank, hd_err *err) {
    if (engine_rank_leads(rank)) publish(rank);
    if (rank->engine->ucx && rank->index) return engine_world_start(rank, err);
    if (pthread_create(&rank->thread, NULL, work, rank) != 0) {
        return HD_FAIL(err, HD_EIO, "cannot start the thread of rank %d", rank->index);
    }
    rank->started = true;
    return HD_OK;
}
