/* poll.c - the polling thread: detokenizes step outputs, parses them into deltas and returns
 * events. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

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
        if (out->end != HD_END_NOT) {
            e->n_living--;
            engine_request_of(e, out->id)->n_left--;
        }
        pthread_cond_signal(&e->taken);
    }
    pthread_mutex_unlock(&e->lock);
    return got;
}

/* A finished request stays until the next poll, because its last event points into it. */
void engine_drop_shown(hd_engine *e) {
    if (e->shown_answer) hd_output_taken(&e->shown_answer->output);
    if (e->finished) engine_drop_request(e, e->finished);
    free(e->event_post.why);
    e->event_post.why = NULL;
    e->shown_answer = NULL;
    e->finished = NULL;
}

static hd_reply_finish_reason finish_reason(hd_end end) {
    if (end == HD_END_STOP) return HD_REPLY_STOP;
    return end == HD_END_LENGTH ? HD_REPLY_LENGTH : HD_REPLY_ABORT;
}

/* Pushes the output's tokens up to one that completes a stop string; returns how many were
 * pushed. The end token has no text. */
static hd_status push_tokens(engine_answer *a, const engine_step_output *p, int32_t *n,
                             hd_err *err) {
    const int32_t n_text = p->n - (p->end == HD_END_STOP && p->n ? 1 : 0);
    for (*n = 0; *n < n_text && !a->output.stop;) {
        HD_TRY(hd_output_push(&a->output, p->tokens[(*n)++], err));
    }
    if (a->output.stop) return HD_OK;
    *n = p->n;
    if (p->end == HD_END_NOT) return HD_OK;
    return hd_output_finish(&a->output, finish_reason(p->end), err);
}

/* Accepted drafts come first in a step output, and only its first n tokens belong to the
 * choice. */
static void count(engine_answer *a, const engine_step_output *p, int32_t n) {
    a->n_output += n;
    for (int32_t i = 0; i < p->n_drafted; i++) a->drafted_at[i]++;
    for (int32_t i = 0; i < p->n_accepted && i < n; i++) a->accepted_at[i]++;
}

/* Prompt log-probabilities are shown once, and only if all of them were computed. */
static void show_scores(hd_event *out, engine_request *r) {
    const int32_t n = r->n_prompt - r->score_from;
    if (!r->score_from || r->scores_shown || out->answer) return;
    r->scores_shown = true;
    if (r->n_scored < n) return;
    out->prompt = r->prompt.ids + r->score_from;
    out->prompt_logprobs = r->scores;
    out->prompt_top = r->score_top;
    out->n_prompt = (size_t)n;
    out->prompt_from = r->score_from;
}

static void fill_event(hd_event *out, const engine_request *r, int32_t answer,
                       const engine_step_output *p, int32_t n) {
    const engine_answer *a = &r->answers[answer];
    *out = (hd_event){.id = r->id,
                      .user = r->user,
                      .answer = answer,
                      .parts = a->output.shown,
                      .n_parts = a->output.n_shown,
                      .tokens = p->tokens,
                      .logprobs = p->logprobs,
                      .top = p->top,
                      .n_tokens = (size_t)n,
                      .n_top = (size_t)p->n_top,
                      .stop_token = -1,
                      .prompt_tokens = r->n_prompt,
                      .cached_tokens = p->n_cached,
                      .output_tokens = a->n_output,
                      .reasoning_tokens = a->output.n_reasoning,
                      .retracted = p->n_retracted,
                      .submitted_ns = r->submitted_ns,
                      .admitted_ns = p->admitted_ns};
    for (int32_t i = 0; i < HD_MOST_DRAFTS; i++) {
        out->drafted += out->drafted_at[i] = a->drafted_at[i];
        out->accepted += out->accepted_at[i] = a->accepted_at[i];
    }
}

/* Stores the answer's tokens before its last event is shown, so that a follow-up request
 * finds them. */
static void keep(hd_engine *e, const engine_request *r, engine_answer *a, hd_end end) {
    engine_answer_tokens *answer_text =
        e->token_history ? hd_output_answer_tokens(&a->output) : NULL;
    const bool spoke = end == HD_END_STOP || end == HD_END_LENGTH || end == HD_END_CANCELLED;
    if (answer_text && spoke)
        engine_token_history_keep(e->token_history, r->request.salt, r->token_history_key,
                                  answer_text);
}

/* Fills the event of a step output. Returns false if there is nothing to show (text behind a
 * stop string). */
static bool make_event(hd_engine *e, hd_event *out) {
    engine_step_output *p = &e->event_post;
    engine_request *r = engine_request_of(e, p->id);
    const int32_t index = engine_answer_of(p->id);
    engine_answer *a = &r->answers[index];
    const bool gone = p->end != HD_END_NOT; /* the step thread has released the choice */
    if (gone) r->n_gone++;
    if (r->n_gone == r->n_answers) e->finished = r;
    if (a->ended) return false;
    hd_err err = {0};
    int32_t n;
    hd_end end = p->end;
    e->shown_answer = a;
    if (push_tokens(a, p, &n, &err) != HD_OK) end = HD_END_FAILED;
    if (a->output.stop) end = HD_END_STOP;
    count(a, p, n);
    hd_output_show(&a->output, end != HD_END_NOT);
    fill_event(out, r, index, p, n);
    show_scores(out, r);
    out->end = end;
    if (end == HD_END_STOP && a->output.stop) {
        out->stop_text = a->output.stop;
    } else if (end == HD_END_STOP) {
        out->stop_token = p->tokens[p->n - 1];
    } else if (end == HD_END_FAILED) {
        snprintf(e->why, sizeof e->why, "%s", p->why ? p->why : err.msg);
        out->why = e->why;
    }
    if (end == HD_END_NOT) return true;
    keep(e, r, a, end);
    a->ended = true;
    out->last = ++r->n_ended == r->n_answers;
    if (gone) return true;
    pthread_mutex_lock(&e->lock);
    engine_cancel_answer(e, r, index);
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
