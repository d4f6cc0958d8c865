/* poll.c - the polling thread: detokenizes step outputs, parses them into deltas and returns
 * events. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "base/checked.h"
#include "engine/engine_internal.h"

static struct timespec deadline(int64_t timeout_ns) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    if (timeout_ns > 0) {
        const int64_t ns = t.tv_nsec + timeout_ns % 1000000000;
        t.tv_sec += (time_t)(timeout_ns / 1000000000 + ns / 1000000000);
        t.tv_nsec = (long)(ns % 1000000000);
    }
    return t;
}

/* Waits for a step output until the deadline. Returns false if there is none or none can
 * come. */
static bool take_post(hd_engine *e, engine_step_output *out, int64_t timeout_ns,
                      const struct timespec *until) {
    pthread_mutex_lock(&e->lock);
    while (e->n_posts == 0 && e->n_living > 0 && timeout_ns != 0 && !e->woken) {
        const int waited = timeout_ns < 0 ? pthread_cond_wait(&e->posted, &e->lock)
                                          : pthread_cond_timedwait(&e->posted, &e->lock, until);
        if (waited == ETIMEDOUT) break;
    }
    const bool got = e->n_posts > 0 && !e->woken;
    e->woken = false;
    if (got) {
        engine_step_output_copy(out, &e->posts[e->first_post]);
        e->first_post = (e->first_post + 1) % e->cap_posts;
        e->n_posts--;
        if (out->step.finish_reason != HD_FINISH_NONE) {
            engine_request *r = engine_request_of(e, out->id);
            e->n_living--;
            r->n_left--;
            engine_route_choice_done(e, r);
        }
        pthread_cond_signal(&e->taken);
    }
    pthread_mutex_unlock(&e->lock);
    return got;
}

/* A finished request stays until the next poll, because its last event points into it. */
void engine_drop_shown(hd_engine *e) {
    if (e->shown_choice) hd_output_taken(&e->shown_choice->output);
    if (e->finished) engine_drop_request(e, e->finished);
    free(e->event_post.why);
    e->event_post.why = NULL;
    e->shown_choice = NULL;
    e->finished = NULL;
}

/* Pushes the step's tokens. After one that completes a stop string none remains in the step.
 * The end token has no text. */
static hd_status push_tokens(hd_output *o, hd_step_tokens *step, hd_err *err) {
    const bool ends = step->finish_reason == HD_FINISH_STOP && step->n_tokens;
    const int32_t n_text = step->n_tokens - (ends ? 1 : 0);
    for (int32_t i = 0; i < n_text; i++) {
        const hd_status st = hd_output_push(o, step->tokens[i], err);
        if (st != HD_OK || o->stop) {
            step->n_tokens = i + 1;
            return st;
        }
    }
    if (step->finish_reason == HD_FINISH_NONE) return HD_OK;
    return hd_output_finish(o, step->finish_reason, err);
}

/* Accepted drafts come first in a step, and only its first n_tokens tokens belong to the
 * choice. */
static void count(engine_choice *c, const hd_step_tokens *step) {
    c->n_output += step->n_tokens;
    for (int32_t i = 0; i < step->n_drafted; i++) c->drafted_at[i]++;
    for (int32_t i = 0; i < step->n_accepted; i++) c->accepted_at[i]++;
}

/* Prompt log-probabilities are shown once, and only if all of them were computed. */
static void show_prompt_logprobs(hd_event *out, engine_request *r) {
    const int32_t from = r->prompt_logprobs_from, n = r->n_prompt - from;
    const bool prefilling =
        out->step.n_tokens == 0 && out->step.finish_reason == HD_FINISH_NONE;
    if (!from || r->prompt_shown || out->choice || prefilling) return;
    r->prompt_shown = true;
    if (r->n_prompt_logprobs < n) return;
    out->prompt = (hd_prompt_logprobs){.tokens = r->prompt.ids + from,
                                       .logprobs = r->prompt_logprobs,
                                       .top = r->prompt_top,
                                       .n = n,
                                       .n_top = r->n_top,
                                       .from = from};
}

/* Rows of all tokens that were shown but the last, which no step has read. */
static void show_replay(hd_event *out, const hd_engine *e, const engine_request *r) {
    const engine_choice *c = &r->choices[out->choice];
    const int32_t n = r->n_prompt + c->n_output - 1 - r->replay_from;
    if (out->step.finish_reason == HD_FINISH_NONE || c->n_output == 0) return;
    for (int k = 0; k < HD_N_REPLAYS; k++) {
        if (!c->replay[k]) continue;
        const hd_replay_shape shape = hd_replay_shape_of(e->spec, (hd_replay)k);
        out->replay[k] = (hd_replay_rows){.rows = c->replay[k],
                                          .n = hd_max_i32(n, 0),
                                          .from = r->replay_from,
                                          .layers = shape.layers,
                                          .top_k = shape.top_k,
                                          .number_bytes = shape.number_bytes};
    }
}

static void fill_event(hd_event *out, const engine_request *r, int32_t choice,
                       const engine_step_output *p) {
    const engine_choice *c = &r->choices[choice];
    *out = (hd_event){.id = r->id,
                      .user = r->user,
                      .choice = choice,
                      .step = p->step,
                      .deltas = c->output.shown,
                      .n_deltas = c->output.n_shown,
                      .stop_token = -1,
                      .prompt_tokens = r->n_prompt,
                      .output_tokens = c->n_output,
                      .reasoning_tokens = c->output.n_reasoning,
                      .weight_version = p->weight_version,
                      .retracted = p->n_retracted,
                      .submitted_ns = r->submitted_ns,
                      .admitted_ns = p->admitted_ns};
    for (int32_t i = 0; i < HD_MAX_DRAFTS; i++) {
        out->drafted += out->drafted_at[i] = c->drafted_at[i];
        out->accepted += out->accepted_at[i] = c->accepted_at[i];
    }
}

/* Stores the answer's tokens before its last event is shown, so that a follow-up request
 * finds them. */
static void keep(hd_engine *e, const engine_request *r, engine_choice *c,
                 hd_finish_reason finish) {
    engine_answer_tokens *tokens =
        e->token_history ? hd_output_answer_tokens(&c->output) : NULL;
    const bool spoke =
        finish == HD_FINISH_STOP || finish == HD_FINISH_LENGTH || finish == HD_FINISH_ABORT;
    if (tokens && spoke)
        engine_token_history_keep(e->token_history, r->request.salt, r->token_history_key,
                                  tokens);
}

/* Fills the event of a step output. Returns false if there is nothing to show (text behind a
 * stop string). */
static bool make_event(hd_engine *e, hd_event *out) {
    engine_step_output *p = &e->event_post;
    hd_step_tokens *step = &p->step;
    engine_request *r = engine_request_of(e, p->id);
    const int32_t index = engine_choice_of(p->id);
    engine_choice *c = &r->choices[index];
    /* the step thread has released the choice */
    const bool gone = step->finish_reason != HD_FINISH_NONE;
    if (gone) r->n_gone++;
    if (r->n_gone == r->n_choices) e->finished = r;
    if (c->ended) return false;
    hd_err err = {0};
    e->shown_choice = c;
    if (push_tokens(&c->output, step, &err) != HD_OK) step->finish_reason = HD_FINISH_ERROR;
    if (c->output.stop) step->finish_reason = HD_FINISH_STOP;
    if (step->n_accepted > step->n_tokens) step->n_accepted = step->n_tokens;
    count(c, step);
    hd_output_show(&c->output, step->finish_reason != HD_FINISH_NONE);
    fill_event(out, r, index, p);
    show_prompt_logprobs(out, r);
    show_replay(out, e, r);
    if (c->output.stop) {
        out->stop_text = c->output.stop;
    } else if (step->finish_reason == HD_FINISH_STOP) {
        out->stop_token = step->tokens[step->n_tokens - 1];
    } else if (step->finish_reason == HD_FINISH_ERROR) {
        snprintf(e->why, sizeof e->why, "%s", p->why ? p->why : err.msg);
        out->why = e->why;
    }
    if (step->finish_reason == HD_FINISH_NONE) return true;
    keep(e, r, c, step->finish_reason);
    c->ended = true;
    out->last = ++r->n_ended == r->n_choices;
    if (gone) return true;
    pthread_mutex_lock(&e->lock);
    engine_cancel_choice(e, r, index);
    pthread_mutex_unlock(&e->lock);
    return true;
}

bool hd_engine_poll(hd_engine *e, hd_event *out, int64_t timeout_ns) {
    const struct timespec until = deadline(timeout_ns);
    for (;;) {
        engine_drop_shown(e);
        if (!take_post(e, &e->event_post, timeout_ns, &until)) return false;
        if (!make_event(e, out)) continue;
        const engine_request *r = engine_request_of(e, out->id);
        if (!r->on_event) return true;
        r->on_event(r->user, out);
    }
}

void hd_engine_wake(hd_engine *e) {
    pthread_mutex_lock(&e->lock);
    e->woken = true;
    pthread_cond_broadcast(&e->posted);
    pthread_mutex_unlock(&e->lock);
}
