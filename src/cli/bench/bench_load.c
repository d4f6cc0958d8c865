/* bench_load.c - see bench_load.h. One thread submits requests when they are due, and polls
 * in between. */
#include "cli/bench/bench_load.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/checked.h"
#include "base/philox.h"
#include "base/progress.h"

typedef enum draw { DRAW_INPUT, DRAW_OUTPUT, DRAW_ARRIVAL, DRAW_PREFIX, DRAW_TOKENS } draw;

typedef struct load_state {
    hd_engine *engine;
    const load_options *o;
    int32_t vocab;
    load_run *run;
    int64_t start_ns, sent, in_flight, ended;
    int32_t *prompt; /* [input_tokens] scratch */
    hd_progress progress;
    hd_status st; /* of the callbacks */
} load_state;

/* The `user` of an event. */
typedef struct load_ticket {
    load_state *state;
    load_record *record;
    int64_t last_ns;
} load_ticket;

static double uniform(const load_options *o, draw what, int64_t index) {
    return (double)hd_philox_unit(
        hd_philox_at((uint64_t)o->seed, (uint64_t)what, (uint64_t)index).v[0]);
}

static int32_t draw_length(const load_options *o, draw what, int64_t index, int64_t longest) {
    const double low = o->range_ratio * (double)longest;
    const double length = low + uniform(o, what, index) * ((double)longest - low + 1);
    return hd_max_i32(1, (int32_t)fmin(length, (double)longest));
}

static hd_status plan(load_run *r, const load_options *o, hd_err *err) {
    double at = 0;
    r->records = calloc((size_t)o->requests, sizeof *r->records);
    if (!r->records) return HD_FAIL(err, HD_ENOMEM, "no memory for the requests");
    r->n = o->requests;
    for (int64_t i = 0; i < r->n; i++) {
        load_record *q = &r->records[i];
        q->input = draw_length(o, DRAW_INPUT, i, o->input_tokens);
        q->output = draw_length(o, DRAW_OUTPUT, i, o->output_tokens);
        if (o->rate > 0 && i > 0) at -= log(uniform(o, DRAW_ARRIVAL, i)) / o->rate;
        q->due_ns = (int64_t)(at * 1e9);
    }
    return HD_OK;
}

/* Writes the token ids of request i: its group's prefix, then its own. */
static void fill_prompt(load_state *s, int64_t i, int32_t n) {
    const load_options *o = s->o;
    const uint64_t group = (uint64_t)(i % o->groups);
    for (int32_t k = 0; k < n; k++) {
        const bool shared = k < o->shared_prefix;
        const uint64_t high =
            (shared ? DRAW_PREFIX : DRAW_TOKENS) + (shared ? group : (uint64_t)i) * 16;
        const uint32_t word = hd_philox_at((uint64_t)o->seed, high, (uint64_t)k).v[0];
        s->prompt[k] = (int32_t)(word % (uint32_t)s->vocab);
    }
}

static void note_gap(load_state *s, int64_t ns) {
    load_run *r = s->run;
    if (r->n_gaps == r->cap_gaps) {
        const int64_t cap = r->cap_gaps ? 2 * r->cap_gaps : 4096;
        int64_t *grown = realloc(r->gaps_ns, (size_t)cap * sizeof *grown);
        if (!grown) {
            s->st = HD_ENOMEM;
            return;
        }
        r->gaps_ns = grown;
        r->cap_gaps = cap;
    }
    r->gaps_ns[r->n_gaps++] = ns;
}

static void on_event(void *user, const hd_event *e) {
    load_ticket *t = user;
    load_record *q = t->record;
    const int64_t now = hd_now_ns() - t->state->start_ns;
    if (e->step.n_tokens) {
        if (q->got) note_gap(t->state, now - t->last_ns);
        if (!q->got) q->first_ns = now;
        t->last_ns = now;
        q->steps++;
        q->got += (int32_t)e->step.n_tokens;
    }
    if (e->step.finish_reason == HD_FINISH_NONE) return;
    q->end_ns = now;
    q->cached = e->step.n_cached;
    q->drafted = e->drafted;
    q->accepted = e->accepted;
    memcpy(q->drafted_at, e->drafted_at, sizeof q->drafted_at);
    memcpy(q->accepted_at, e->accepted_at, sizeof q->accepted_at);
    q->failed =
        e->step.finish_reason != HD_FINISH_LENGTH && e->step.finish_reason != HD_FINISH_STOP;
    t->state->in_flight--;
    t->state->ended++;
    hd_progress_add(&t->state->progress, 1);
    hd_engine_wake(t->state->engine); /* another request may be sent */
}

static hd_status send(load_state *s, load_ticket *ticket, hd_err *err) {
    const int64_t i = s->sent;
    load_record *q = &s->run->records[i];
    char why[600];
    fill_prompt(s, i, q->input);
    *ticket = (load_ticket){.state = s, .record = q};
    const hd_request g = {.size = sizeof g,
                          .tokens = s->prompt,
                          .n_tokens = (size_t)q->input,
                          .max_tokens = q->output,
                          .temperature = (float)s->o->temperature,
                          .seed = (uint64_t)(s->o->seed + i),
                          .draft_tokens = (int32_t)s->o->draft_tokens,
                          .ignore_eos = true,
                          .on_event = on_event,
                          .user = ticket};
    q->sent_ns = hd_now_ns() - s->start_ns;
    if (!hd_engine_submit(s->engine, &g, NULL, why, sizeof why)) {
        return HD_FAIL(err, HD_EINVAL, "request %lld: %s", (long long)i, why);
    }
    s->sent++;
    s->in_flight++;
    return HD_OK;
}

/* Returns the time until the next request is due: 0 now, negative if only an event can help. */
static int64_t wait_ns(const load_state *s) {
    const load_options *o = s->o;
    if (s->sent == s->run->n) return -1;
    if (o->concurrency && s->in_flight >= o->concurrency) return -1;
    const int64_t left = s->run->records[s->sent].due_ns - (hd_now_ns() - s->start_ns);
    return left > 0 ? left : 0;
}

static void sleep_or_poll(load_state *s, int64_t ns) {
    hd_event e;
    if (s->in_flight) {
        hd_engine_poll(s->engine, &e, ns);
    } else {
        const struct timespec t = {ns / 1000000000, ns % 1000000000};
        nanosleep(&t, NULL);
    }
}

static hd_status drive(load_state *s, load_ticket *tickets, hd_err *err) {
    s->start_ns = hd_now_ns();
    while (s->ended < s->run->n && s->st == HD_OK) {
        const int64_t ns = wait_ns(s);
        if (ns == 0) {
            HD_TRY(send(s, &tickets[s->sent], err));
        } else {
            sleep_or_poll(s, ns);
        }
    }
    s->run->duration_ns = hd_now_ns() - s->start_ns;
    return s->st == HD_OK ? HD_OK : HD_FAIL(err, s->st, "no memory for the times");
}

hd_status load_run_all(load_run *out, hd_engine *e, const load_options *o, int32_t vocab,
                       bool quiet, hd_err *err) {
    *out = (load_run){0};
    load_state s = {.engine = e, .o = o, .vocab = vocab, .run = out};
    hd_status st = plan(out, o, err);
    load_ticket *tickets = calloc((uint32_t)o->requests, sizeof *tickets);
    s.prompt = calloc((uint32_t)o->input_tokens, sizeof *s.prompt);
    hd_progress_init(&s.progress, "load", "requests", o->requests, quiet);
    if (st == HD_OK && (!tickets || !s.prompt)) {
        st = HD_FAIL(err, HD_ENOMEM, "no memory for the prompts");
    }
    if (st == HD_OK) st = drive(&s, tickets, err);
    hd_progress_end(&s.progress);
    free(tickets);
    free(s.prompt);
    return st;
}

void load_run_deinit(load_run *r) {
    free(r->records);
    free(r->gaps_ns);
    *r = (load_run){0};
}
