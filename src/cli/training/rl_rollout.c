/* rl_rollout.c - submits the groups of a rollout, collects their tokens, checks the answers. */
#include "cli/training/rl_rollout.h"

#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/philox.h"
#include "base/progress.h"
#include "cli/eval_check.h"
#include "train/reward.h"

enum { SEEDS = 4 /* high counter word */ };

typedef struct group {
    uint64_t id; /* of the engine */
    json_t *line;
} group;

/* A rollout in work. */
typedef struct work {
    rl_rollout *r;
    hd_engine *e;
    const rl_rollout_options *o;
    group *groups;
} work;

hd_status rl_rollout_open(rl_rollout *out, int32_t n_groups, int32_t n, hd_err *err) {
    *out = (rl_rollout){.n_groups = n_groups, .group = n};
    out->samples = calloc((size_t)n_groups * (size_t)n, sizeof *out->samples);
    return out->samples ? HD_OK : HD_FAIL(err, HD_ENOMEM, "no memory for samples");
}

void rl_rollout_close(rl_rollout *r) {
    for (int32_t i = 0; r->samples && i < r->n_groups * r->group; i++) {
        hd_ids_deinit(&r->samples[i].tokens);
        free(r->samples[i].logprob);
        free(r->samples[i].routes);
        free(r->samples[i].keys);
    }
    free(r->samples);
    *r = (rl_rollout){0};
}

/* ---- sampling ---- */

static bool thinks(const work *w, const json_t *line) {
    const json_t *thinking = json_object_get(line, "thinking");
    return thinking ? json_is_true(thinking) : hd_engine_thinks(w->e);
}

static hd_status encode(const work *w, const json_t *line, hd_ids *out, hd_err *err) {
    const hd_request g = {.size = sizeof g, .thinking = thinks(w, line) ? 1 : -1};
    hd_conversation c = {0};
    hd_status st = hd_chat_parse(&c, json_object_get(line, "messages"),
                                 json_object_get(line, "tools"), NULL, false, err);
    if (st == HD_OK) st = hd_engine_encode(w->e, out, &g, &c, err);
    hd_conversation_deinit(&c);
    return st;
}

/* Every sample of group i begins with the prompt. */
static hd_status begin(work *w, int32_t i, const rl_tasks *tasks, hd_err *err) {
    const rl_rollout_options *o = w->o;
    group *g = &w->groups[i];
    hd_ids prompt = {0};
    g->line = rl_tasks_at(tasks, o->fixed ? i : o->first + i);
    if (!g->line) return HD_FAIL(err, HD_ENOMEM, "no memory for a prompt");
    hd_status st = encode(w, g->line, &prompt, err);
    for (int32_t k = 0; st == HD_OK && k < o->group; k++) {
        rl_sample *s = &w->r->samples[i * o->group + k];
        s->tokens.n = 0;
        s->first = (int32_t)prompt.n;
        s->truncated = false;
        st = hd_ids_append(&s->tokens, prompt.ids, prompt.n, err);
    }
    hd_ids_deinit(&prompt);
    return st;
}

static uint64_t seed_of(const work *w, int32_t i) {
    const hd_philox seed = hd_philox_at(w->o->seed, SEEDS, (uint64_t)(w->o->first + i));
    return ((uint64_t)seed.v[0] << 32 | seed.v[1]) >> 1; /* JSON has no more */
}

/* *full: the engine has no room for it yet. */
static hd_status submit(work *w, int32_t i, bool *full, hd_err *err) {
    const rl_rollout_options *o = w->o;
    const rl_sample *s = &w->r->samples[i * o->group];
    group *g = &w->groups[i];
    char why[600];
    const hd_request request = {.size = sizeof request,
                                .tokens = s->tokens.ids,
                                .n_tokens = s->tokens.n,
                                .n = o->group,
                                .max_tokens = o->max_tokens,
                                .temperature = o->temperature,
                                .seed = seed_of(w, i),
                                .logprob_mode = HD_LOGPROB_TEMPERED,
                                .draft_tokens = o->draft_tokens,
                                .unparsed = true};
    g->id = hd_engine_submit(w->e, &request, full, why, sizeof why);
    if (g->id || *full) return HD_OK;
    return HD_FAIL(err, HD_EINVAL, "prompt %lld: %s", (long long)(o->first + i), why);
}

static hd_status keep(rl_sample *s, const int32_t *tokens, const float *logprob, int32_t more,
                      hd_err *err) {
    const int32_t n = (int32_t)s->tokens.n - s->first;
    if (n + more > s->cap) {
        const int32_t cap = 2 * (n + more);
        float *room = realloc(s->logprob, (size_t)cap * sizeof *room);
        if (!room) return HD_FAIL(err, HD_ENOMEM, "no memory for a sample");
        s->logprob = room;
        s->cap = cap;
    }
    memcpy(s->logprob + n, logprob, (size_t)more * sizeof *s->logprob);
    return hd_ids_append(&s->tokens, tokens, (size_t)more, err);
}

static int32_t group_of(const work *w, uint64_t id) {
    for (int32_t i = 0; i < w->o->n_groups; i++) {
        if (w->groups[i].id == id) return i;
    }
    return -1;
}

/* Takes what comes next; *left groups are not over. */
static hd_status collect(work *w, int32_t *left, hd_err *err) {
    hd_event e;
    if (!hd_engine_poll(w->e, &e, -1)) return HD_OK;
    const int32_t i = group_of(w, e.id);
    if (i < 0) return HD_OK;
    if (e.step.finish_reason == HD_FINISH_ERROR) {
        return HD_FAIL(err, HD_EDEVICE, "sampling: %s", e.why);
    }
    rl_sample *s = &w->r->samples[i * w->o->group + e.choice];
    HD_TRY(keep(s, e.step.tokens, e.step.logprobs, e.step.n_tokens, err));
    s->truncated = e.step.finish_reason == HD_FINISH_LENGTH;
    *left -= e.last;
    return HD_OK;
}

/* As many groups at a time as the engine's queue has room for. */
static hd_status sample_here(work *w, hd_err *err) {
    const int32_t n = w->o->n_groups;
    for (int32_t sent = 0, left = n; left > 0;) {
        bool full = false;
        if (sent < n) HD_TRY(submit(w, sent, &full, err));
        if (sent < n && !full) {
            sent++;
        } else if (sent == n - left) {
            return HD_FAIL(
                err, HD_EINVAL,
                "%d samples of a prompt are more than the engine's queue has room for",
                w->o->group);
        } else {
            HD_TRY(collect(w, &left, err));
        }
    }
    return HD_OK;
}

/* ---- a remote sampler ---- */

typedef struct remote_work {
    hd_sample_request *requests; /* [n_groups] */
    hd_sample_reply *replies;    /* [n_groups * group] */
    hd_sample_reply **out;       /* [n_groups] */
    int32_t *tokens;             /* [n_groups * group, max_tokens] */
    float *logprob;
} remote_work;

/* Memory for choices of `rows` rows in *out, if they are wanted. */
static hd_status open_choices(int32_t **out, bool wanted, size_t rows, size_t row,
                              hd_err *err) {
    free(*out);
    *out = wanted ? calloc(rows * row + 1, sizeof **out) : NULL;
    return !wanted || *out ? HD_OK : HD_FAIL(err, HD_ENOMEM, "no memory for what layers chose");
}

static hd_status prepare_remote(const work *w, remote_work *m, hd_err *err) {
    const rl_rollout_options *o = w->o;
    const hd_model_spec *spec = hd_engine_spec(w->e);
    const hd_replay_shape keys = hd_replay_shape_of(spec, HD_REPLAY_KEYS);
    for (int32_t i = 0; i < o->n_groups * o->group; i++) {
        rl_sample *s = &w->r->samples[i];
        const size_t rows = (size_t)(s->first + o->max_tokens);
        const size_t experts = (size_t)spec->n_layers * (size_t)spec->route.top_k;
        HD_TRY(open_choices(&s->routes, o->routes, rows, experts, err));
        HD_TRY(open_choices(&s->keys, o->keys, rows, (size_t)keys.layers * (size_t)keys.top_k,
                            err));
        m->replies[i] = (hd_sample_reply){.vocab = spec->vocab,
                                          .layers = spec->n_layers,
                                          .top_k = spec->route.top_k,
                                          .n_experts = spec->route.n_experts,
                                          .key_layers = keys.layers,
                                          .key_top_k = keys.top_k,
                                          .tokens = m->tokens + (int64_t)i * o->max_tokens,
                                          .logprob = m->logprob + (int64_t)i * o->max_tokens,
                                          .routes = s->routes,
                                          .keys = s->keys};
    }
    for (int32_t i = 0; i < o->n_groups; i++) {
        const rl_sample *s = &w->r->samples[i * o->group];
        m->out[i] = &m->replies[i * o->group];
        m->requests[i] = (hd_sample_request){.prompt = s->tokens.ids,
                                             .n_prompt = s->first,
                                             .n = o->group,
                                             .max_tokens = o->max_tokens,
                                             .temperature = o->temperature,
                                             .seed = seed_of(w, i),
                                             .routes = o->routes,
                                             .keys = o->keys};
    }
    return HD_OK;
}

static hd_status run_remote(const work *w, remote_work *m, hd_err *err) {
    const rl_rollout_options *o = w->o;
    HD_TRY(prepare_remote(w, m, err));
    HD_TRY(rl_remote_sample(o->remote, m->requests, m->out, o->n_groups, err));
    for (int32_t i = 0; i < o->n_groups * o->group; i++) {
        const hd_sample_reply *reply = &m->replies[i];
        HD_TRY(keep(&w->r->samples[i], reply->tokens, reply->logprob, reply->n, err));
        w->r->samples[i].truncated = reply->truncated;
    }
    return HD_OK;
}

static hd_status sample_remote(const work *w, hd_err *err) {
    const size_t groups = (size_t)w->o->n_groups, n = groups * (size_t)w->o->group;
    const size_t tokens = n * (size_t)w->o->max_tokens;
    remote_work m = {.requests = calloc(groups, sizeof *m.requests),
                     .replies = calloc(n, sizeof *m.replies),
                     .out = calloc(groups, sizeof *m.out),
                     .tokens = calloc(tokens, sizeof *m.tokens),
                     .logprob = calloc(tokens, sizeof *m.logprob)};
    const bool whole = m.requests && m.replies && m.out && m.tokens && m.logprob;
    const hd_status st =
        whole ? run_remote(w, &m, err) : HD_FAIL(err, HD_ENOMEM, "no memory for samples");
    free(m.requests);
    free(m.replies);
    free(m.out);
    free(m.tokens);
    free(m.logprob);
    return st;
}

/* ---- rewards ---- */

/* The answer without the end of sequence. */
static hd_status text_of(const work *w, const rl_sample *s, hd_bytes *out, hd_err *err) {
    const size_t n = s->tokens.n - (size_t)s->first - (s->truncated ? 0 : 1);
    return hd_tokenizer_decode(hd_engine_tokenizer(w->e), s->tokens.ids + s->first, n, false,
                               out, err);
}

static hd_status judge(const work *w, rl_sample *s, const json_t *line, hd_err *err) {
    hd_bytes text = {0};
    eval_verdict verdict = {0};
    hd_status st = text_of(w, s, &text, err);
    if (st == HD_OK) {
        st = eval_check(&verdict, json_object_get(line, "checker"), text.n ? text.data : "",
                        text.n, hd_engine_encoding(w->e), thinks(w, line), err);
    }
    s->reward = verdict.right && !s->truncated ? 1.0 : 0.0;
    hd_bytes_deinit(&text);
    return st;
}

static hd_status judge_all(const work *w, hd_err *err) {
    for (int32_t i = 0; i < w->o->n_groups * w->o->group; i++) {
        w->r->samples[i].unscored = false;
        HD_TRY(judge(w, &w->r->samples[i], w->groups[i / w->o->group].line, err));
    }
    return HD_OK;
}

/* What the source of rewards is asked about group i. */
static hd_status make_question(const work *w, int32_t i, reward_question *q, hd_err *err) {
    const int32_t n = w->o->group;
    const rl_sample *s = &w->r->samples[i * n];
    hd_bytes *texts = calloc((size_t)n, sizeof *texts);
    hd_reward_answer *answers = calloc((size_t)n, sizeof *answers);
    hd_status st = texts && answers ? HD_OK : HD_FAIL(err, HD_ENOMEM, "no memory for rewards");
    for (int32_t k = 0; st == HD_OK && k < n; k++) {
        st = text_of(w, &s[k], &texts[k], err);
        answers[k] = (hd_reward_answer){texts[k].n ? (const char *)texts[k].data : "",
                                        texts[k].n, !s[k].truncated};
    }
    q->id = w->o->first + i;
    q->n = n;
    if (st == HD_OK) {
        q->text = hd_reward_question(q->id, w->groups[i].line, answers, n);
        if (!q->text) st = HD_FAIL(err, HD_ENOMEM, "no memory for rewards");
    }
    for (int32_t k = 0; texts && k < n; k++) hd_bytes_deinit(&texts[k]);
    free(texts);
    free(answers);
    return st;
}

static hd_status ask(const work *w, reward_question *q, double *numbers, hd_err *err) {
    const int32_t n = w->o->n_groups, each = w->o->group;
    for (int32_t i = 0; i < n; i++) {
        q[i].rewards = numbers + i * each;
        HD_TRY(make_question(w, i, &q[i], err));
    }
    HD_TRY(rewards_ask(w->o->rewards, q, n, err));
    for (int32_t i = 0; i < n * each; i++) {
        rl_sample *s = &w->r->samples[i];
        s->unscored = q[i / each].dropped;
        s->reward = s->unscored ? 0.0 : numbers[i];
    }
    return HD_OK;
}

static hd_status ask_all(const work *w, hd_err *err) {
    const size_t n = (size_t)w->o->n_groups;
    reward_question *q = calloc(n, sizeof *q);
    double *numbers = calloc(n * (size_t)w->o->group, sizeof *numbers);
    const hd_status st = q && numbers ? ask(w, q, numbers, err)
                                      : HD_FAIL(err, HD_ENOMEM, "no memory for rewards");
    for (size_t i = 0; q && i < n; i++) free(q[i].text);
    free(q);
    free(numbers);
    return st;
}

static hd_status run(work *w, const rl_tasks *tasks, hd_err *err) {
    const int64_t start = hd_now_ns();
    for (int32_t i = 0; i < w->o->n_groups; i++) HD_TRY(begin(w, i, tasks, err));
    HD_TRY(w->o->remote ? sample_remote(w, err) : sample_here(w, err));
    const int64_t sampled = hd_now_ns();
    HD_TRY(w->o->rewards ? ask_all(w, err) : judge_all(w, err));
    w->r->seconds = (double)(sampled - start) * 1e-9;
    w->r->reward_seconds = (double)(hd_now_ns() - sampled) * 1e-9;
    return HD_OK;
}

hd_status rl_rollout_run(rl_rollout *r, hd_engine *e, const rl_tasks *tasks,
                         const rl_rollout_options *o, hd_err *err) {
    work w = {.r = r, .e = e, .o = o, .groups = calloc((size_t)o->n_groups, sizeof(group))};
    if (!w.groups) return HD_FAIL(err, HD_ENOMEM, "no memory for a rollout");
    const hd_status st = run(&w, tasks, err);
    for (int32_t i = 0; i < o->n_groups; i++) json_decref(w.groups[i].line);
    free(w.groups);
    return st;
}
