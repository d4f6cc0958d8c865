/* wire.c - see wire.h. */
#include "engine/wire.h"

#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/progress.h"

enum { ENDED = -1, MAX_WHY = 1000, MAX_KEY = 1 << 20 };

/* Scalars of a constraint. */
typedef struct wire_constraint {
    int32_t reasoning, think, unthink, max_reasoning, is_free, n_forced, relaxed_top;
    int32_t n_ban, ban_until;
    float relaxed_delta;
    uint64_t n_key; /* bytes of the grammar's key; 0: no grammar */
} wire_constraint;

/* Followed by the prompt, the stop ids, the biases, the forced tokens, the grammar's key, and of each
 * choice the number of tokens that it has put out, or ENDED, and these. */
typedef struct wire_request {
    uint64_t salt;
    int64_t queue_left_ns; /* 0: no limit */
    int32_t n_choices, n_prompt, max_new, priority, draft_tokens, prompt_logprobs_from, n_stop;
    int32_t constrained, progress; /* 0 or 1 */
    hd_page_range pages; /* that are exported, of them n_exported already, by these weights */
    uint32_t n_exported;
    uint64_t page_weights;
    hd_sampling params; /* of the first choice */
    wire_constraint constraint;
} wire_request;

typedef struct wire_output {
    hd_step_tokens step;
    int64_t admitted_ago_ns; /* -1: not admitted */
    int32_t n_retracted, n_why;
} wire_output;

typedef struct wire_prompt {
    int32_t n, n_top, from;
} wire_prompt;

static hd_status refuse(const char *what, hd_err *err) {
    return HD_FAIL(err, HD_EPEER, "another process sent %s that cannot be right", what);
}

hd_status engine_put_record(hd_bytes *to, engine_record_kind kind, int32_t group, uint64_t id,
                            hd_err *err) {
    const engine_record head = {.kind = (int32_t)kind, .group = group, .id = id};
    return hd_bytes_append(to, &head, sizeof head, err);
}

hd_status engine_take_bytes(engine_reader *from, void *out, size_t n, hd_err *err) {
    if (n > from->n) return refuse("a record", err);
    if (n) memcpy(out, from->at, n);
    from->at += n;
    from->n -= n;
    return HD_OK;
}

/* An array of n elements, plus one so that it is never NULL. */
static hd_status take_array(engine_reader *from, void **out, int64_t n, size_t size,
                            hd_err *err) {
    *out = calloc((size_t)n + 1, size);
    if (!*out) return HD_FAIL(err, HD_ENOMEM, "no memory for a request of another process");
    return engine_take_bytes(from, *out, (size_t)n * size, err);
}

/* ---- requests ---- */

static wire_constraint constraint_of(const engine_request *r, size_t n_key) {
    const hd_constraint *c = &r->constraint;
    return (wire_constraint){.reasoning = c->reasoning,
                             .think = c->think,
                             .unthink = c->unthink,
                             .max_reasoning = c->max_reasoning,
                             .is_free = c->free,
                             .n_forced = c->n_forced,
                             .relaxed_top = c->relaxed_top,
                             .n_ban = c->n_ban,
                             .ban_until = c->ban_until,
                             .relaxed_delta = c->relaxed_delta,
                             .n_key = n_key};
}

/* Clocks of hosts differ: what is left of the time. */
static int64_t left_of(int64_t until_ns) {
    const int64_t left = until_ns - hd_now_ns();
    if (!until_ns) return 0;
    return left > 0 ? left : 1;
}

static hd_status put_choice(hd_bytes *to, const engine_choice *c, hd_err *err) {
    const int32_t n = c->posted ? ENDED : c->n_posted;
    HD_TRY(hd_bytes_append(to, &n, sizeof n, err));
    return n > 0 ? hd_bytes_append(to, c->tokens, (size_t)n * sizeof *c->tokens, err) : HD_OK;
}

static hd_status put_request(hd_bytes *to, const engine_request *r, hd_err *err) {
    const hd_sched_request *q = &r->request;
    const hd_bytes none = {0}, *key = r->grammar ? engine_grammar_key(r->grammar) : &none;
    const wire_request w = {.salt = q->salt,
                            .queue_left_ns = left_of(q->queue_until_ns),
                            .n_choices = r->n_choices,
                            .n_prompt = r->n_prompt,
                            .max_new = q->max_new,
                            .priority = q->priority,
                            .draft_tokens = q->draft_tokens,
                            .prompt_logprobs_from = r->prompt_logprobs_from,
                            .n_stop = q->n_stop,
                            .constrained = r->constrained,
                            .progress = q->progress,
                            .pages = r->watch.pages,
                            .n_exported = r->n_exported,
                            .page_weights = r->watch.weights,
                            .params = r->choices[0].sampling.params,
                            .constraint = constraint_of(r, key->n)};
    HD_TRY(hd_bytes_append(to, &w, sizeof w, err));
    HD_TRY(hd_bytes_append(to, r->prompt.ids, r->prompt.n * sizeof *r->prompt.ids, err));
    HD_TRY(hd_bytes_append(to, r->stop_ids, (size_t)w.n_stop * sizeof *r->stop_ids, err));
    HD_TRY(hd_bytes_append(to, r->bias, (size_t)w.params.n_bias * sizeof *r->bias, err));
    HD_TRY(hd_bytes_append(to, r->constraint.forced,
                           (size_t)r->constraint.n_forced * sizeof(int32_t), err));
    HD_TRY(hd_bytes_append(to, key->data, key->n, err));
    for (int32_t i = 0; i < r->n_choices; i++) HD_TRY(put_choice(to, &r->choices[i], err));
    return HD_OK;
}

/* Tells the record at `at` how many bytes follow it. */
static void end_record(const hd_bytes *to, size_t at) {
    const uint64_t n = to->n - at - sizeof(engine_record);
    memcpy(to->data + at + offsetof(engine_record, n), &n, sizeof n);
}

hd_status engine_put_request(hd_bytes *to, const engine_request *r, hd_err *err) {
    const size_t at = to->n;
    HD_TRY(engine_put_record(to, ENGINE_RECORD_SUBMIT, r->group, r->id, err));
    HD_TRY(put_request(to, r, err));
    end_record(to, at);
    return HD_OK;
}

static bool are_tokens(const hd_engine *e, const int32_t *ids, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        if (ids[i] < 0 || ids[i] >= e->spec->vocab) return false;
    }
    return true;
}

static bool pages_fit(const hd_engine *e, const hd_page_range *pages, int32_t n_tokens) {
    return hd_page_range_fits(pages, n_tokens / hd_kv_shape_of(e->spec).page_tokens);
}

static bool counts_fit(const hd_engine *e, const wire_request *w) {
    const int64_t most_stop = HD_MAX_STOP_TOKENS + e->spec->n_eos;
    const wire_constraint *c = &w->constraint;
    return hd_is_within(w->n_choices, 1, HD_MAX_CHOICES) &&
           hd_is_within(w->n_prompt, 1, e->max_context - 1) &&
           hd_is_within(w->max_new, 1, e->max_context - w->n_prompt) &&
           hd_is_within(w->draft_tokens, HD_DRAFTS_AUTO, e->drafts ? HD_MAX_DRAFTS : 0) &&
           hd_is_within(w->prompt_logprobs_from, 0, w->n_prompt) &&
           hd_is_within(w->n_stop, 0, most_stop) &&
           hd_is_within(w->params.n_bias, 0, HD_MAX_BIAS) &&
           hd_is_within(w->params.n_ban, 0, w->n_stop) &&
           hd_is_within(w->queue_left_ns, 0, INT64_MAX / 2) &&
           hd_is_within(w->params.n_top, 0, e->max_logprobs) &&
           hd_is_within(c->n_ban, 0, w->n_stop) &&
           hd_is_within(c->n_forced, 0, e->max_context) && c->n_key <= MAX_KEY &&
           pages_fit(e, &w->pages, w->n_prompt) &&
           w->n_exported <= hd_page_range_size(&w->pages) && (!w->constrained || e->vocab) &&
           (w->constrained || (!c->n_forced && !c->n_key));
}

static hd_status take_lists(hd_engine *e, engine_reader *from, engine_request *r,
                            const wire_request *w, hd_err *err) {
    void *lists[4];
    const struct {
        int64_t n;
        size_t size;
    } shapes[] = {
        {w->n_prompt,            sizeof(int32_t)      },
        {w->n_stop,              sizeof(int32_t)      },
        {w->params.n_bias,       sizeof(hd_logit_bias)},
        {w->constraint.n_forced, sizeof(int32_t)      }
    };
    hd_status st = HD_OK;
    for (size_t i = 0; i < HD_LEN(shapes); i++) {
        lists[i] = NULL;
        if (st == HD_OK) st = take_array(from, &lists[i], shapes[i].n, shapes[i].size, err);
    }
    r->prompt = (hd_ids){.ids = lists[0], .n = (size_t)w->n_prompt};
    r->stop_ids = lists[1];
    r->bias = lists[2];
    r->forced = (hd_ids){.ids = lists[3], .n = (size_t)w->constraint.n_forced};
    HD_TRY(st);
    bool ok = are_tokens(e, r->prompt.ids, w->n_prompt) &&
              are_tokens(e, r->stop_ids, w->n_stop) &&
              are_tokens(e, r->forced.ids, w->constraint.n_forced);
    for (int32_t i = 0; i < w->params.n_bias; i++) ok &= are_tokens(e, &r->bias[i].token, 1);
    return ok ? HD_OK : refuse("tokens", err);
}

static hd_status take_grammar(hd_engine *e, engine_reader *from, engine_request *r,
                              const wire_request *w, hd_err *err) {
    const wire_constraint *c = &w->constraint;
    if (!w->constrained) return HD_OK;
    r->constrained = true;
    if (c->n_key > from->n) return refuse("a grammar", err);
    if (c->n_key) {
        HD_TRY(engine_grammar_cache_acquire_key(e->grammars, &r->grammar, from->at,
                                                (size_t)c->n_key, err));
        from->at += c->n_key;
        from->n -= (size_t)c->n_key;
    }
    r->constraint =
        (hd_constraint){.reasoning = c->reasoning != 0,
                        .think = c->think,
                        .unthink = c->unthink,
                        .max_reasoning = c->max_reasoning,
                        .grammar = r->grammar ? engine_grammar_of(r->grammar) : NULL,
                        .free = c->is_free != 0,
                        .forced = r->forced.ids,
                        .n_forced = c->n_forced,
                        .relaxed_top = c->relaxed_top,
                        .relaxed_delta = c->relaxed_delta,
                        .ban = r->stop_ids,
                        .n_ban = c->n_ban,
                        .ban_until = c->ban_until};
    return HD_OK;
}

/* What a choice has put out before its group was lost. */
static hd_status take_choice(hd_engine *e, engine_reader *from, engine_request *r,
                             engine_choice *c, int32_t max_new, hd_err *err) {
    void *tokens;
    int32_t n;
    HD_TRY(engine_take_bytes(from, &n, sizeof n, err));
    if (!hd_is_within(n, ENDED, max_new - 1)) return refuse("an answer", err);
    if (n == ENDED) {
        c->posted = true;
        r->n_left--;
    }
    if (n <= 0) return HD_OK;
    const hd_status st = take_array(from, &tokens, n, sizeof *c->tokens, err);
    c->tokens = tokens;
    HD_TRY(st);
    c->n_posted = n;
    return are_tokens(e, c->tokens, n) ? HD_OK : refuse("tokens", err);
}

static hd_status take_choices(hd_engine *e, engine_reader *from, engine_request *r,
                              const wire_request *w, hd_err *err) {
    r->choices = calloc((size_t)w->n_choices, sizeof *r->choices);
    if (!r->choices) return HD_FAIL(err, HD_ENOMEM, "no memory for %d choices", w->n_choices);
    r->n_choices = r->n_left = w->n_choices;
    for (int32_t i = 0; i < w->n_choices; i++) {
        hd_request_sampling *s = &r->choices[i].sampling;
        *s = (hd_request_sampling){.params = w->params,
                                   .bias = r->bias,
                                   .ban = r->stop_ids,
                                   .constraint = r->constrained ? &r->constraint : NULL};
        s->params.seed += (uint64_t)i;
        HD_TRY(take_choice(e, from, r, &r->choices[i], w->max_new, err));
    }
    return r->n_left ? HD_OK : refuse("a request that has ended", err);
}

static hd_status take_request(hd_engine *e, engine_reader *from, engine_request *r,
                              hd_err *err) {
    wire_request w;
    HD_TRY(engine_take_bytes(from, &w, sizeof w, err));
    if (!counts_fit(e, &w)) return refuse("a request", err);
    HD_TRY(take_lists(e, from, r, &w, err));
    HD_TRY(take_grammar(e, from, r, &w, err));
    HD_TRY(take_choices(e, from, r, &w, err));
    r->n_prompt = w.n_prompt;
    r->prompt_logprobs_from = w.prompt_logprobs_from;
    r->watch = (hd_page_watch){.pages = w.pages, .weights = w.page_weights};
    r->n_exported = w.n_exported;
    r->request = (hd_sched_request){.prompt = r->prompt.ids,
                                    .n_prompt = w.n_prompt,
                                    .max_new = w.max_new,
                                    .priority = w.priority,
                                    .draft_tokens = w.draft_tokens,
                                    .progress = w.progress != 0,
                                    .salt = w.salt,
                                    .queue_until_ns =
                                        w.queue_left_ns ? hd_now_ns() + w.queue_left_ns : 0,
                                    .stop_ids = r->stop_ids,
                                    .n_stop = w.n_stop};
    return HD_OK;
}

hd_status engine_take_request(hd_engine *e, engine_reader *from, uint64_t id, hd_err *err) {
    const uint64_t index = (id & UINT32_MAX) >> ENGINE_CHOICE_BITS;
    if (index == 0 || index > (uint64_t)e->n_requests || engine_choice_of(id) ||
        e->requests[index - 1].id) {
        return refuse("the number of a request", err);
    }
    engine_request *r = &e->requests[index - 1];
    r->id = id;
    const hd_status st = take_request(e, from, r, err);
    if (st != HD_OK) engine_forget_request(e, r);
    return st;
}

void engine_forget_request(hd_engine *e, engine_request *r) {
    engine_deinit_request(e, r);
    free(r->choices);
    *r = (engine_request){0};
}

/* ---- pages ---- */

/* Followed by the tokens and the message. */
typedef struct wire_job {
    int32_t work, n_tokens;
    uint64_t salt, weights, n;
    int32_t kind, page, from_disk, zero;
} wire_job;

/* Followed by the bytes of a page that was copied. */
typedef struct wire_job_done {
    int32_t status;
    hd_page_range lacking;
    uint64_t weights;
} wire_job_done;

hd_status engine_put_job(hd_bytes *to, const hd_page_job *job, hd_err *err) {
    const size_t at = to->n;
    const wire_job w = {.work = (int32_t)job->work,
                        .n_tokens = job->n_tokens,
                        .salt = job->salt,
                        .weights = job->weights,
                        .n = job->n,
                        .kind = (int32_t)job->kind,
                        .page = job->page,
                        .from_disk = job->from_disk};
    HD_TRY(engine_put_record(to, ENGINE_RECORD_JOB, job->group, job->number, err));
    HD_TRY(hd_bytes_append(to, &w, sizeof w, err));
    HD_TRY(hd_bytes_append(to, job->tokens, (size_t)w.n_tokens * sizeof *job->tokens, err));
    HD_TRY(hd_bytes_append(to, job->message, (size_t)w.n, err));
    end_record(to, at);
    return HD_OK;
}

/* Its lengths; that it is a page of the prompt, who received it has checked. */
static bool is_page(const hd_engine *e, const void *message, uint64_t n, int32_t n_tokens) {
    hd_page_head head;
    if (n < sizeof head) return false;
    memcpy(&head, message, sizeof head);
    return head.group < HD_N_KV_GROUPS && head.bytes == e->page_bytes[head.group] &&
           n == sizeof head + head.bytes &&
           head.page < (uint32_t)(n_tokens / hd_kv_shape_of(e->spec).page_tokens);
}

hd_status engine_take_job(const hd_engine *e, engine_reader *from, hd_page_job *job,
                          hd_err *err) {
    wire_job w;
    void *tokens, *message;
    HD_TRY(engine_take_bytes(from, &w, sizeof w, err));
    if (!hd_is_within(w.work, HD_PAGES_LOOK, HD_PAGES_COPY) || w.n > from->n ||
        !hd_is_within(w.n_tokens, 1, e->max_context + 1) ||
        !hd_is_within(w.kind, 0, HD_N_KV_GROUPS - 1) ||
        !hd_is_within(w.page, 0, w.n_tokens / hd_kv_shape_of(e->spec).page_tokens)) {
        return refuse("a job", err);
    }
    hd_status st = take_array(from, &tokens, w.n_tokens, sizeof *job->tokens, err);
    job->tokens = tokens;
    HD_TRY(st);
    st = take_array(from, &message, (int64_t)w.n, 1, err);
    job->message = message;
    HD_TRY(st);
    job->work = (hd_page_work)w.work;
    job->n_tokens = w.n_tokens;
    job->salt = w.salt;
    job->weights = w.weights;
    job->n = (size_t)w.n;
    job->kind = (hd_kv_group)w.kind;
    job->page = w.page;
    job->from_disk = w.from_disk != 0;
    if (job->work == HD_PAGES_COPY) {
        job->copy = malloc(e->page_bytes[job->kind] + 1);
        if (!job->copy) return HD_FAIL(err, HD_ENOMEM, "no memory for a page");
    }
    const bool places = job->work == HD_PAGES_PLACE;
    return !places || is_page(e, message, w.n, w.n_tokens) ? HD_OK : refuse("a page", err);
}

/* Of a page that was copied. */
static size_t copied_bytes(const hd_engine *e, const hd_page_job *job, hd_status status) {
    return job->work == HD_PAGES_COPY && status == HD_OK ? e->page_bytes[job->kind] : 0;
}

hd_status engine_put_job_done(const hd_engine *e, hd_bytes *to, const hd_page_job *job,
                              hd_err *err) {
    const wire_job_done w = {(int32_t)job->status, job->lacking, job->weights};
    HD_TRY(engine_put_record(to, ENGINE_RECORD_JOB_DONE, job->group, job->number, err));
    HD_TRY(hd_bytes_append(to, &w, sizeof w, err));
    return hd_bytes_append(to, job->copy, copied_bytes(e, job, job->status), err);
}

hd_status engine_take_job_done(const hd_engine *e, engine_reader *from, hd_page_job *job,
                               hd_err *err) {
    wire_job_done w;
    HD_TRY(engine_take_bytes(from, &w, sizeof w, err));
    if (!pages_fit(e, &w.lacking, job->n_tokens)) return refuse("pages", err);
    job->status = (hd_status)w.status;
    job->lacking = w.lacking;
    job->weights = w.weights;
    const size_t n = copied_bytes(e, job, job->status);
    return n ? engine_take_bytes(from, job->copy, n, err) : HD_OK;
}

hd_status engine_put_counts(hd_bytes *to, int32_t group, uint64_t number, const int64_t *counts,
                            size_t n, hd_err *err) {
    const size_t bytes = n * sizeof *counts;
    const engine_record record = {ENGINE_RECORD_COUNTS, group, number, bytes};
    HD_TRY(hd_bytes_append(to, &record, sizeof record, err));
    return hd_bytes_append(to, counts, bytes, err);
}

hd_status engine_put_page(hd_bytes *to, int32_t group, uint64_t id, hd_status st,
                          const void *page, size_t n, hd_err *err) {
    const size_t at = to->n;
    const int32_t status = (int32_t)st;
    HD_TRY(engine_put_record(to, ENGINE_RECORD_PAGE, group, id, err));
    HD_TRY(hd_bytes_append(to, page, n, err));
    end_record(to, at);
    return hd_bytes_append(to, &status, sizeof status, err);
}

hd_status engine_take_page(const hd_engine *e, engine_reader *from, engine_request *r,
                           uint64_t n, hd_err *err) {
    const hd_page_watch *w = &r->watch;
    const uint32_t all = hd_page_range_size(&w->pages);
    hd_kv_group group;
    int32_t status;
    if (n > from->n || r->n_exported >= all) return refuse("a page", err);
    (void)hd_page_range_at(&w->pages, r->n_exported, &group);
    const engine_reader bytes = *from;
    from->at += n;
    from->n -= (size_t)n;
    HD_TRY(engine_take_bytes(from, &status, sizeof status, err));
    if (status == HD_OK ? n != sizeof(hd_page_head) + e->page_bytes[group] : n != 0) {
        return refuse("a page", err);
    }
    void *to = w->room(w->ctx, sizeof(hd_page_head) + e->page_bytes[group]);
    if (to && n) memcpy(to, bytes.at, (size_t)n);
    r->n_exported++;
    if (to) w->exported(w->ctx, (hd_status)status);
    return HD_OK;
}

/* ---- step outputs ---- */

hd_status engine_put_output(hd_bytes *to, int32_t group, const engine_step_output *p,
                            hd_err *err) {
    const size_t n_top = (size_t)p->step.n_tokens * (size_t)p->step.n_top;
    const size_t n_why = p->why ? strlen(p->why) : 0;
    wire_output w = {.step = p->step,
                     .admitted_ago_ns = p->admitted_ns ? hd_now_ns() - p->admitted_ns : -1,
                     .n_retracted = p->n_retracted,
                     .n_why = (int32_t)(n_why < MAX_WHY ? n_why : MAX_WHY)};
    w.step.top = NULL;
    HD_TRY(engine_put_record(to, ENGINE_RECORD_OUTPUT, group, p->id, err));
    HD_TRY(hd_bytes_append(to, &w, sizeof w, err));
    HD_TRY(hd_bytes_append(to, p->top, n_top * sizeof *p->top, err));
    return hd_bytes_append(to, p->why, (size_t)w.n_why, err);
}

static bool step_fits(const hd_engine *e, const hd_step_tokens *s) {
    return hd_is_within(s->n_tokens, 0, HD_MAX_STEP_TOKENS) &&
           hd_is_within(s->n_top, 0, e->max_logprobs) &&
           hd_is_within(s->n_drafted, 0, HD_MAX_DRAFTS) &&
           hd_is_within(s->n_accepted, 0, s->n_drafted) &&
           hd_is_within(s->n_cached, 0, e->max_context) &&
           hd_is_within(s->n_prefilled, 0, e->max_context) &&
           hd_is_within((int)s->finish_reason, HD_FINISH_NONE, HD_FINISH_ERROR);
}

hd_status engine_take_output(const hd_engine *e, engine_reader *from, uint64_t id,
                             engine_step_output *p, hd_err *err) {
    wire_output w;
    HD_TRY(engine_take_bytes(from, &w, sizeof w, err));
    if (!step_fits(e, &w.step) || !hd_is_within(w.n_why, 0, MAX_WHY))
        return refuse("an output", err);
    const size_t n_top = (size_t)w.step.n_tokens * (size_t)w.step.n_top;
    p->id = id;
    p->step = w.step;
    p->step.top = p->top;
    p->n_retracted = w.n_retracted;
    p->admitted_ns = w.admitted_ago_ns < 0 ? 0 : hd_now_ns() - w.admitted_ago_ns;
    p->why = NULL;
    HD_TRY(engine_take_bytes(from, p->top, n_top * sizeof *p->top, err));
    if ((size_t)w.n_why > from->n) return refuse("an output", err);
    if (w.n_why) p->why = strndup(from->at, (size_t)w.n_why);
    from->at += w.n_why;
    from->n -= (size_t)w.n_why;
    return HD_OK;
}

/* ---- prompt log-probabilities ---- */

hd_status engine_put_prompt(hd_bytes *to, int32_t group, uint64_t id,
                            const hd_prompt_logprobs *p, hd_err *err) {
    const wire_prompt w = {p->n, p->n_top, p->from};
    const size_t n = (size_t)p->n;
    HD_TRY(engine_put_record(to, ENGINE_RECORD_PROMPT, group, id, err));
    HD_TRY(hd_bytes_append(to, &w, sizeof w, err));
    HD_TRY(hd_bytes_append(to, p->logprobs, n * sizeof *p->logprobs, err));
    return hd_bytes_append(to, p->top, n * (size_t)p->n_top * sizeof *p->top, err);
}

hd_status engine_take_prompt(engine_reader *from, engine_request *r, hd_err *err) {
    wire_prompt w;
    HD_TRY(engine_take_bytes(from, &w, sizeof w, err));
    if (!r->prompt_logprobs || w.n_top != r->n_top || !hd_is_within(w.n, 0, r->n_prompt) ||
        !hd_is_within(w.from, r->prompt_logprobs_from, r->n_prompt - w.n)) {
        return refuse("log-probabilities", err);
    }
    const int32_t at = w.from - r->prompt_logprobs_from;
    const size_t n = (size_t)w.n, n_top = n * (size_t)w.n_top;
    HD_TRY(
        engine_take_bytes(from, r->prompt_logprobs + at, n * sizeof *r->prompt_logprobs, err));
    HD_TRY(engine_take_bytes(from, r->prompt_top + (size_t)at * (size_t)w.n_top,
                             n_top * sizeof *r->prompt_top, err));
    r->n_prompt_logprobs = at + w.n;
    return HD_OK;
}
