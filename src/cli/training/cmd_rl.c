/* cmd_rl.c - `hadal rl`: reinforcement learning. The engine samples, the trainer computes on the
 * engine's own weights, and an update between two steps of the engine makes both new. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/philox.h"
#include "base/progress.h"
#include "cli/commands.h"
#include "cli/training/rl_reference.h"
#include "cli/training/rl_rollout.h"
#include "cli/training/train_world.h"
#include "train/policy.h"

enum { HELD_OUT_FIRST = 1 << 30, CONTROL_DRAWS = 5 /* high counter word */ };

typedef enum control { CONTROL_TRUE, CONTROL_SHUFFLED, CONTROL_FLIPPED, CONTROL_ZERO } control;
static const char *const controls[] = {"true", "shuffled", "flipped", "zero", NULL};
static const char *const corrections[] = {"none", "tis", "mis", "icepop", NULL};
static const char *const replays[] = {"none", "routes", "indexer", "routes,indexer", NULL};
enum { REPLAYS_ROUTES = 1, REPLAYS_KEYS = 2 }; /* bits of their numbers */
static const char *const failures[] = {"stop", "drop", NULL};

static const char *const kl_kinds[] = {"k1", "k2", "k3", NULL};

/* The numbers of a sample, --max-tokens of each. */
typedef enum numbers {
    OLD,
    NOW,
    ENTROPY,
    FACTOR,
    ENTROPY_FACTOR,
    REFERENCE,
    DRAFT_FACTOR,
    DRAFT_LOGPROB,
    N_NUMBERS
} numbers;

typedef struct settings {
    train_settings train;
    const char *task, *prompts, *reference;
    int algorithm, correction, control;
    int64_t groups, samples, max_tokens, updates, held_out, held_out_samples, eval_every,
        overlong;
    double temperature, clip_low, clip_high, dual_clip, correction_low, correction_high,
        entropy, kl;
    int kl_kind;
    bool fixed, no_drafts;
    rewards_options rewards;
    int reward_failures;
    rl_remote_options remote;
    int replay;
} settings;

typedef struct learning {
    settings set;
    train_run run;
    train_world world;
    hd_policy_options policy;
    hd_engine *engine;
    hd_trainer *trainer;
    rl_reference reference; /* read with --kl */
    rl_tasks tasks;
    rewards *rewards;     /* NULL: checkers */
    rl_remote *remote;    /* NULL: the engine samples */
    int64_t remote_steps; /* optimizer steps of the weights that it has; -1: others */
    rl_rollout rollout, held_out;
    int64_t rollouts; /* done so far */
    int32_t n;        /* samples of a rollout */
    /* [n], and their arrays */
    hd_policy_sample *samples;
    hd_train_sequence *seqs, *learned; /* learned: those that have a gradient */
    float *numbers;
    double *scratch;
} learning;

/* ---- opening ---- */

static json_t *own_options(const settings *s) {
    return json_pack(
        "{s:s, s:s, s:I, s:I, s:I, s:I, s:f, s:f, s:f, s:f, s:s, s:f, s:f, s:f, s:I, s:b, s:s,"
        " s:s, s:f, s:s, s:s}",
        "task",
        s->task      ? s->task
        : s->prompts ? s->prompts
                     : "",
        "algorithm", hd_policy_names[s->algorithm], "groups", (json_int_t)s->groups, "samples",
        (json_int_t)s->samples, "max-tokens", (json_int_t)s->max_tokens, "updates",
        (json_int_t)s->updates, "temperature", s->temperature, "clip-low", s->clip_low,
        "clip-high", s->clip_high, "dual-clip", s->dual_clip, "correction",
        corrections[s->correction], "correction-low", s->correction_low, "correction-high",
        s->correction_high, "entropy", s->entropy, "overlong", (json_int_t)s->overlong,
        "fixed-prompts", (int)s->fixed, "reward-control", controls[s->control], "replay",
        replays[s->replay], "kl", s->kl, "kl-kind", kl_kinds[s->kl_kind], "reference",
        s->reference ? s->reference : "");
}

static hd_status choose_policy(learning *l, hd_err *err) {
    const settings *s = &l->set;
    hd_policy_options *p = &l->policy;
    hd_policy_named(p, hd_policy_names[s->algorithm]);
    if (s->clip_low >= 0) p->clip_low = s->clip_low;
    if (s->clip_high >= 0) p->clip_high = s->clip_high;
    p->dual_clip = s->dual_clip;
    p->correction = (hd_correction)s->correction;
    p->correction_low = s->correction_low;
    p->correction_high = s->correction_high;
    p->entropy = s->entropy;
    p->kl = s->kl;
    p->kl_kind = (hd_kl_kind)s->kl_kind;
    p->length = p->max_length = (int32_t)s->max_tokens;
    p->overlong = (int32_t)s->overlong;
    if (s->overlong > s->max_tokens) {
        return HD_FAIL(err, HD_EINVAL, "--overlong %lld: more than --max-tokens %lld",
                       (long long)s->overlong, (long long)s->max_tokens);
    }
    if (s->groups % s->updates == 0) return HD_OK;
    return HD_FAIL(err, HD_EINVAL, "--updates %lld does not divide --groups %lld",
                   (long long)s->updates, (long long)s->groups);
}

static hd_status open_engine(learning *l, int32_t context, hd_err *err) {
    char why[600];
    const hd_engine_options o = {.size = sizeof o,
                                 .model_dir = l->run.model,
                                 .backend = train_settings_backend(&l->set.train),
                                 .precision = "exact",
                                 .mla = "absorbed",
                                 .kv_cache_dtype = train_settings_kv_type(&l->set.train),
                                 .threads = (int32_t)l->set.train.threads,
                                 .max_running = 64,
                                 .max_context = context,
                                 .kv_tokens = 64 * (int64_t)context,
                                 .drafter = l->set.no_drafts ? "none" : "auto",
                                 .no_token_history = true,
                                 .updatable = true};
    const int st = hd_engine_open(&l->engine, &o, why, sizeof why);
    return st == 0 ? HD_OK : HD_FAIL(err, (hd_status)st, "%s", why);
}

static hd_status open_arrays(learning *l, hd_err *err) {
    const settings *s = &l->set;
    l->n = (int32_t)(s->groups * s->samples);
    const size_t n = (size_t)l->n, tokens = n * (size_t)s->max_tokens;
    HD_TRY(rl_rollout_open(&l->rollout, (int32_t)s->groups, (int32_t)s->samples, err));
    HD_TRY(
        rl_rollout_open(&l->held_out, (int32_t)s->held_out, (int32_t)s->held_out_samples, err));
    l->samples = calloc(n, sizeof *l->samples);
    l->seqs = calloc(n, sizeof *l->seqs);
    l->learned = calloc(n, sizeof *l->learned);
    l->numbers = calloc(N_NUMBERS * tokens, sizeof *l->numbers);
    l->scratch = calloc(tokens, sizeof *l->scratch);
    if (l->samples && l->seqs && l->learned && l->numbers && l->scratch) return HD_OK;
    return HD_FAIL(err, HD_ENOMEM, "no memory for %zu samples", n);
}

static hd_status open_rewards(learning *l, hd_err *err) {
    rewards_options *o = &l->set.rewards;
    o->drops = l->set.reward_failures == 1;
    return o->command || o->url ? rewards_open(&l->rewards, o, err) : HD_OK;
}

static hd_status open_remote(learning *l, hd_err *err) {
    l->remote_steps = -1;
    if (l->set.remote.url) return rl_remote_open(&l->remote, &l->set.remote, err);
    if (!l->set.replay) return HD_OK;
    return HD_FAIL(err, HD_EINVAL,
                   "--replay %s needs --rollout: sampler and trainer are one model",
                   replays[l->set.replay]);
}

static hd_status open_all(learning *l, hd_err *err) {
    const train_settings *s = &l->set.train;
    hd_trainer_options o;
    HD_TRY(train_run_open(&l->run, s, own_options(&l->set), err));
    HD_TRY(train_settings_trainer(s, &o, err));
    HD_TRY(choose_policy(l, err));
    HD_TRY(open_rewards(l, err));
    HD_TRY(open_remote(l, err));
    HD_TRY(rl_tasks_open(&l->tasks, l->set.task, l->set.prompts, (uint64_t)s->seed,
                         l->rewards != NULL, err));
    HD_TRY(open_engine(l, o.context, err));
    o.spec = hd_engine_spec(l->engine);
    if ((l->set.replay & REPLAYS_KEYS) &&
        !hd_replay_shape_of(o.spec, HD_REPLAY_KEYS).row_bytes) {
        return HD_FAIL(err, HD_EINVAL, "--replay %s: this model has no indexer",
                       replays[l->set.replay]);
    }
    o.weights = hd_engine_weights(l->engine);
    o.detached = true;
    HD_TRY(train_world_lead(&l->world, &o, l->run.model, err));
    HD_TRY(hd_trainer_open(&l->trainer, &o, err));
    if (l->set.kl > 0.0) {
        const char *dir = l->set.reference ? l->set.reference : l->run.begun;
        HD_TRY(rl_reference_open(&l->reference, dir, &o, err));
    }
    HD_TRY(open_arrays(l, err));
    l->rollouts = l->run.steps;
    return train_run_load(&l->run, l->trainer, err);
}

static void close_all(learning *l) {
    rl_reference_close(&l->reference);
    hd_trainer_close(l->trainer);
    hd_engine_close(l->engine);
    rl_rollout_close(&l->rollout);
    rl_rollout_close(&l->held_out);
    rl_tasks_close(&l->tasks);
    rewards_close(l->rewards);
    rl_remote_close(l->remote);
    train_run_close(&l->run);
    free(l->samples);
    free(l->seqs);
    free(l->learned);
    free(l->numbers);
    free(l->scratch);
}

/* ---- a rollout ---- */

/* The remote sampler gets the trainer's weights, if it has others. */
static hd_status update_remote(learning *l, hd_err *err) {
    const int64_t steps = hd_trainer_steps(l->trainer);
    char version[32];
    if (!l->remote || l->remote_steps == steps) return HD_OK;
    const hd_weights *w = hd_engine_weights(l->engine);
    snprintf(version, sizeof version, "step-%lld", (long long)steps);
    HD_TRY(hd_weights_fetch(w, hd_trainer_stream(l->trainer), err));
    HD_TRY(rl_remote_update(l->remote, w, l->run.model, version, err));
    l->remote_steps = steps;
    return HD_OK;
}

static hd_status sample(learning *l, rl_rollout *r, int64_t first, bool fixed, hd_err *err) {
    const settings *s = &l->set;
    const rl_rollout_options o = {.n_groups = r->n_groups,
                                  .group = r->group,
                                  .max_tokens = (int32_t)s->max_tokens,
                                  .temperature = (float)s->temperature,
                                  .seed = (uint64_t)s->train.seed,
                                  .first = first,
                                  .fixed = fixed,
                                  .draft_tokens = s->no_drafts ? 0 : HD_DRAFTS_AUTO,
                                  .remote = l->remote,
                                  .routes = s->replay & REPLAYS_ROUTES,
                                  .keys = s->replay & REPLAYS_KEYS,
                                  .rewards = l->rewards};
    HD_TRY(update_remote(l, err));
    return rl_rollout_run(r, l->engine, &l->tasks, &o, err);
}

/* The reward that learning is given: the true one, or a control whose curve must differ. */
static void control_rewards(learning *l) {
    for (int32_t i = 0; i < l->n; i++) {
        hd_policy_sample *s = &l->samples[i];
        s->reward = l->rollout.samples[i].reward;
        s->unscored = l->rollout.samples[i].unscored;
        if (l->set.control == CONTROL_FLIPPED) s->reward = 1.0 - s->reward;
        if (l->set.control == CONTROL_ZERO) s->reward = 0.0;
    }
    if (l->set.control != CONTROL_SHUFFLED) return;
    for (int32_t i = l->n - 1; i > 0; i--) {
        const uint64_t at = (uint64_t)l->rollouts << 32 | (uint64_t)i;
        const uint32_t draw = hd_philox_at((uint64_t)l->set.train.seed, CONTROL_DRAWS, at).v[0];
        const int32_t k = (int32_t)((uint64_t)draw * (uint64_t)(i + 1) >> 32);
        hd_policy_sample *a = &l->samples[i], *b = &l->samples[k];
        const double reward = a->reward;
        if (a->unscored || b->unscored) continue;
        a->reward = b->reward;
        b->reward = reward;
    }
}

static float *numbers_of(const learning *l, int32_t sample, numbers which) {
    return l->numbers + ((int64_t)sample * N_NUMBERS + which) * l->set.max_tokens;
}

/* Points samples and sequences to their arrays. */
static void place_samples(learning *l) {
    const bool drafts = l->set.train.mtp_weight > 0.0;
    for (int32_t i = 0; i < l->n; i++) {
        const rl_sample *r = &l->rollout.samples[i];
        l->samples[i] = (hd_policy_sample){.n = (int32_t)r->tokens.n - r->first,
                                           .rollout = r->logprob,
                                           .old = numbers_of(l, i, OLD),
                                           .now = numbers_of(l, i, NOW),
                                           .reference = numbers_of(l, i, REFERENCE),
                                           .factor = numbers_of(l, i, FACTOR),
                                           .entropy_factor = numbers_of(l, i, ENTROPY_FACTOR)};
        l->seqs[i] =
            (hd_train_sequence){.tokens = r->tokens.ids,
                                .n = (int32_t)r->tokens.n,
                                .first = r->first,
                                .temperature = (float)l->set.temperature,
                                .factor = numbers_of(l, i, FACTOR),
                                .entropy_factor = numbers_of(l, i, ENTROPY_FACTOR),
                                .logprob = numbers_of(l, i, OLD),
                                .entropy = numbers_of(l, i, ENTROPY),
                                .draft_factor = drafts ? numbers_of(l, i, DRAFT_FACTOR) : NULL,
                                .draft_logprob = numbers_of(l, i, DRAFT_LOGPROB),
                                .routes = r->routes,
                                .keys = r->keys};
    }
}

/* ---- learning from it ---- */

/* Rewards of held-out prompts: means over all samples, and over the best one of each prompt. */
typedef struct held_out_rewards {
    double mean, best; /* NaN: not measured */
} held_out_rewards;

typedef struct step_result {
    hd_policy_report policy;
    hd_optimizer_report optimizer;
    double reward, length, entropy, indexer_loss;
    held_out_rewards held_out;
    double train_seconds, update_seconds;
    int32_t equal, unscored, truncated; /* groups, groups, samples */
    bool stepped;
} step_result;

static hd_status update_engine(learning *l, step_result *r, hd_err *err) {
    hd_weights_update *u;
    char version[32];
    const int64_t start = hd_now_ns();
    HD_TRY(hd_trainer_step(l->trainer, &u, &r->optimizer, err));
    r->stepped = !r->optimizer.skipped;
    hd_status st = HD_OK;
    if (u) {
        snprintf(version, sizeof version, "step-%lld", (long long)hd_trainer_steps(l->trainer));
        st = hd_engine_update_weights(l->engine, u, version, err);
        hd_weights_update_close(u);
    }
    r->update_seconds += (double)(hd_now_ns() - start) * 1e-9;
    return st;
}

static bool has_gradient(const hd_policy_sample *s) {
    for (int32_t i = 0; i < s->n; i++) {
        if (s->factor[i] != 0.0f || s->entropy_factor[i] != 0.0f) return true;
    }
    return false;
}

/* The MTP layer learns to predict the samples, by the mean over their tokens. */
static void set_draft_factors(const learning *l, int32_t first, int32_t n) {
    int64_t tokens = 0;
    for (int32_t i = first; i < first + n; i++) tokens += l->samples[i].n;
    for (int32_t i = first; i < first + n; i++) {
        float *factor = numbers_of(l, i, DRAFT_FACTOR);
        for (int32_t k = 0; k < l->samples[i].n; k++) {
            factor[k] = (float)(l->set.train.mtp_weight / (double)tokens);
        }
    }
}

/* Of the samples that have one; the others would add zeros. */
static hd_status add_gradients(learning *l, int32_t first, int32_t n, hd_err *err) {
    const bool drafts = l->set.train.mtp_weight > 0.0;
    if (drafts) set_draft_factors(l, first, n);
    int32_t n_with = 0;
    for (int32_t i = first; i < first + n; i++) {
        if (drafts || has_gradient(&l->samples[i])) l->learned[n_with++] = l->seqs[i];
    }
    return hd_trainer_accumulate(l->trainer, l->learned, n_with, err);
}

/* One optimizer step by samples [first, first + n), a batch of its own. */
static hd_status learn(learning *l, int32_t first, int32_t n, step_result *r, hd_err *err) {
    const int64_t start = hd_now_ns();
    if (first == 0) { /* `old` and `now` are the same before the first update */
        for (int32_t i = 0; i < l->n; i++) l->samples[i].now = l->samples[i].old;
    } else {
        for (int32_t i = first; i < first + n; i++) {
            l->seqs[i].logprob = numbers_of(l, i, NOW);
            l->samples[i].now = l->seqs[i].logprob;
        }
        HD_TRY(hd_trainer_score(l->trainer, l->seqs + first, n, err));
    }
    hd_policy_report now = {0};
    hd_policy_factors(&l->policy, l->samples + first, n, &now);
    if (now.any) HD_TRY(add_gradients(l, first, n, err));
    if (now.any)
        r->indexer_loss += hd_trainer_take_divergence(l->trainer) / (double)l->set.updates;
    r->policy.kl += now.kl / (double)l->set.updates;
    r->policy.loss += now.loss / (double)l->set.updates;
    r->policy.clipped += now.clipped;
    r->policy.masked += now.masked;
    r->train_seconds += (double)(hd_now_ns() - start) * 1e-9;
    return now.any ? update_engine(l, r, err) : HD_OK;
}

static void summarize(const learning *l, step_result *r) {
    int64_t tokens = 0;
    for (int32_t i = 0; i < l->n; i++) {
        const rl_sample *s = &l->rollout.samples[i];
        const int32_t n = l->samples[i].n;
        r->reward += s->reward;
        r->unscored += s->unscored;
        r->length += (double)n / l->n;
        r->truncated += s->truncated;
        for (int32_t k = 0; k < n; k++) r->entropy += (double)l->seqs[i].entropy[k];
        tokens += n;
    }
    r->entropy /= (double)tokens;
    r->reward = r->unscored < l->n ? r->reward / (l->n - r->unscored) : 0.0;
    r->unscored /= (int32_t)l->set.samples;
}

static hd_status score_reference(learning *l, hd_err *err) {
    if (!l->reference.trainer) return HD_OK;
    for (int32_t i = 0; i < l->n; i++) {
        l->seqs[i].routes = l->seqs[i].keys = NULL; /* they are another model's */
        l->seqs[i].logprob = numbers_of(l, i, REFERENCE);
        l->seqs[i].entropy = numbers_of(l, i, NOW); /* not needed */
    }
    HD_TRY(hd_trainer_score(l->reference.trainer, l->seqs, l->n, err));
    for (int32_t i = 0; i < l->n; i++) {
        l->seqs[i].routes = l->rollout.samples[i].routes;
        l->seqs[i].keys = l->rollout.samples[i].keys;
        l->seqs[i].logprob = numbers_of(l, i, OLD);
        l->seqs[i].entropy = numbers_of(l, i, ENTROPY);
    }
    return HD_OK;
}

static hd_status step(learning *l, step_result *r, hd_err *err) {
    const int32_t group = (int32_t)l->set.samples;
    const int32_t each = l->n / (int32_t)l->set.updates;
    const int64_t n_groups = l->set.groups;
    HD_TRY(sample(l, &l->rollout, l->rollouts * n_groups, l->set.fixed, err));
    place_samples(l);
    control_rewards(l);
    r->equal = hd_policy_advantages(&l->policy, l->samples, l->n, group);
    const int64_t start = hd_now_ns();
    HD_TRY(hd_trainer_score(l->trainer, l->seqs, l->n, err));
    HD_TRY(score_reference(l, err));
    r->train_seconds = (double)(hd_now_ns() - start) * 1e-9;
    summarize(l, r);
    hd_policy_measure(l->samples, l->n, l->scratch, &r->policy);
    for (int32_t first = 0; first < l->n; first += each) HD_TRY(learn(l, first, each, r, err));
    l->rollouts++;
    return HD_OK;
}

/* ---- reporting ---- */

static void add_held_out(const learning *l, json_t *line, const held_out_rewards *h) {
    if (!line || isnan(h->mean)) return;
    json_object_set_new(line, "held_out_reward", json_real(h->mean));
    if (l->set.held_out_samples > 1)
        json_object_set_new(line, "held_out_best", json_real(h->best));
}

static void print_held_out(const learning *l, const held_out_rewards *h) {
    if (isnan(h->mean)) return;
    printf("held out %.3f", h->mean);
    if (l->set.held_out_samples > 1) {
        printf(", best of %lld %.3f", (long long)l->set.held_out_samples, h->best);
    }
}

static json_t *line_of(const learning *l, const step_result *r) {
    const hd_policy_report *p = &r->policy;
    json_t *line = json_pack(
        "{s:I, s:I, s:f, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:I, s:I, s:i, s:i, s:i, s:f, s:o,"
        " s:f, s:b, s:f, s:f, s:f, s:f, s:i}",
        "step", (json_int_t)l->rollouts, "optimizer_steps",
        (json_int_t)hd_trainer_steps(l->trainer), "reward", r->reward, "loss",
        train_run_number(p->loss), "dlogp_mean", train_run_number(p->mean), "dlogp_p99",
        train_run_number(p->p99), "dlogp_max", train_run_number(p->most), "k1",
        train_run_number(p->k1), "k3", train_run_number(p->k3), "effective_samples",
        train_run_number(p->effective), "tokens", (json_int_t)p->tokens, "clipped",
        (json_int_t)p->clipped, "masked", (int)p->masked, "equal_groups", r->equal, "truncated",
        r->truncated, "length", r->length, "entropy", train_run_number(r->entropy),
        "gradient_norm", r->optimizer.skipped ? -1.0 : r->optimizer.norm, "skipped",
        (int)r->optimizer.skipped, "sample_seconds", l->rollout.seconds, "reward_seconds",
        l->rollout.reward_seconds, "train_seconds", r->train_seconds, "update_seconds",
        r->update_seconds, "unscored_groups", r->unscored);
    const hd_replay_count replayed = hd_trainer_replayed(l->trainer);
    if (line && replayed.routed) {
        json_object_set_new(
            line, "replay_difference",
            json_real((double)replayed.other_experts / (double)replayed.routed));
    }
    if (line && replayed.indexed) {
        json_object_set_new(line, "indexer_difference",
                            json_real((double)replayed.other_keys / (double)replayed.indexed));
    }
    if (line && l->set.kl > 0.0) json_object_set_new(line, "reference_kl", json_real(p->kl));
    if (line && l->set.train.indexer > 0.0)
        json_object_set_new(line, "indexer_loss", json_real(r->indexer_loss));
    add_held_out(l, line, &r->held_out);
    return line;
}

static hd_status report(const learning *l, const step_result *r, hd_err *err) {
    if (!l->set.train.quiet) {
        printf("step %lld  reward %.3f  |dlogp| %g  entropy %.3f  length %.1f  norm %.3f  "
               "equal %d of %lld  %.1f s sampling, %.1f s training",
               (long long)l->rollouts, r->reward, r->policy.mean, r->entropy, r->length,
               r->optimizer.norm, r->equal, (long long)l->set.groups, l->rollout.seconds,
               r->train_seconds + r->update_seconds);
        if (r->unscored) printf("  unscored %d", r->unscored);
        if (!isnan(r->held_out.mean)) printf("  ");
        print_held_out(l, &r->held_out);
        printf("%s\n", r->optimizer.skipped ? "  skipped" : r->stepped ? "" : "  no step");
        fflush(stdout);
    }
    return train_run_log(&l->run, line_of(l, r), err);
}

static hd_status measure_held_out(learning *l, held_out_rewards *out, hd_err *err) {
    const int32_t group = l->held_out.group;
    int32_t scored = 0; /* prompts */
    *out = (held_out_rewards){0};
    HD_TRY(sample(l, &l->held_out, HELD_OUT_FIRST, false, err));
    for (int32_t i = 0; i < l->held_out.n_groups; i++) {
        const rl_sample *s = &l->held_out.samples[i * group];
        if (s->unscored) continue;
        double best = s->reward;
        for (int32_t k = 0; k < group; k++) {
            out->mean += s[k].reward;
            best = fmax(best, s[k].reward);
        }
        out->best += best;
        scored++;
    }
    out->mean = scored ? out->mean / ((double)scored * group) : (double)NAN;
    out->best = scored ? out->best / scored : (double)NAN;
    return HD_OK;
}

/* What the model can do before it learns. */
static hd_status measure_first(learning *l, hd_err *err) {
    held_out_rewards first;
    HD_TRY(measure_held_out(l, &first, err));
    if (!l->set.train.quiet) {
        print_held_out(l, &first);
        printf("\n");
        fflush(stdout);
    }
    json_t *line = json_pack("{s:i}", "step", 0);
    add_held_out(l, line, &first);
    return train_run_log(&l->run, line, err);
}

enum { MOST_SKIPPED = 3 };

static hd_status run_steps(learning *l, hd_err *err) {
    const int64_t end = l->set.train.steps, every = l->set.eval_every;
    int skipped = 0;
    if (l->set.held_out && every && l->rollouts == 0) HD_TRY(measure_first(l, err));
    while (l->rollouts < end && !train_run_stopped()) {
        step_result r = {
            .held_out = {(double)NAN, (double)NAN}
        };
        HD_TRY(step(l, &r, err));
        const bool last = l->rollouts == end;
        if (l->set.held_out && (last || (every && l->rollouts % every == 0))) {
            HD_TRY(measure_held_out(l, &r.held_out, err));
        }
        HD_TRY(report(l, &r, err));
        skipped = r.optimizer.skipped ? skipped + 1 : 0;
        if (skipped == MOST_SKIPPED) {
            return HD_FAIL(err, HD_EDEVICE,
                           "%d steps in a row with gradients that are no numbers", skipped);
        }
        if (!train_run_saves_at(&l->run, l->rollouts)) continue;
        json_t *state = json_object();
        HD_TRY(train_run_save(&l->run, l->trainer, hd_engine_weights(l->engine), l->rollouts,
                              state, err));
    }
    return HD_OK;
}

/* ---- the command ---- */

static hd_status lead(learning *l, hd_err *err) {
    HD_TRY(open_all(l, err));
    train_run_catch_signals();
    return run_steps(l, err);
}

static void add_options(option_list *list, settings *s) {
    const option own[] = {
        option_text("task", &s->task, "NAME",
                    "sort, addition, lookup, word, format, countdown or tool-call"),
        option_text("prompts", &s->prompts, "FILE",
                    "JSON lines of messages and checker, as for hadal eval"),
        option_choice("algorithm", &s->algorithm, hd_policy_names, "default grpo"),
        option_int("groups", &s->groups, 1, 1000, "prompts of a step; default 24"),
        option_int("samples", &s->samples, 1, HD_MAX_CHOICES, "samples of a prompt; default 8"),
        option_int("max-tokens", &s->max_tokens, 1, 1 << 20, "of a sample; default 64"),
        option_real("temperature", &s->temperature, 0.01, 10, "of samples; default 1"),
        option_int("updates", &s->updates, 1, 1000,
                   "optimizer steps of a rollout, each by its part of the groups; default 1"),
        option_real("clip-low", &s->clip_low, -1, 1, "default: the algorithm's"),
        option_real("clip-high", &s->clip_high, -1, 100, "default: the algorithm's"),
        option_real("dual-clip", &s->dual_clip, 0, 1000,
                    "bound of the ratio with a negative advantage; 0: none"),
        option_choice("correction", &s->correction, corrections,
                      "of the difference of trainer and sampler; default none"),
        option_real("correction-low", &s->correction_low, 0, 1,
                    "bound of its ratio; default 0"),
        option_real("correction-high", &s->correction_high, 0, 1e6, "default 2"),
        option_real("entropy", &s->entropy, -10, 10, "coefficient of an entropy bonus"),
        option_real("kl", &s->kl, 0, 1000,
                    "coefficient of the divergence from a reference model; default 0"),
        option_choice("kl-kind", &s->kl_kind, kl_kinds, "its estimate; default k3"),
        option_text("reference", &s->reference, "DIR",
                    "the reference model; default MODEL_DIR as it was at the beginning"),
        option_int("overlong", &s->overlong, 0, 1 << 20,
                   "last tokens of --max-tokens that cost reward (DAPO); 0: none"),
        option_flag("fixed-prompts", &s->fixed, "the same prompts in every step"),
        option_int(
            "held-out", &s->held_out, 0, 100000,
            "prompts whose reward is measured, with --eval-every also before the first step"),
        option_int("held-out-samples", &s->held_out_samples, 1, HD_MAX_CHOICES,
                   "of each of them; more than one: also the reward of the best; default 1"),
        option_int("eval-every", &s->eval_every, 0, INT32_MAX,
                   "steps between measurements of --held-out; 0: at the end"),
        option_choice("reward-control", &s->control, controls,
                      "shuffled, flipped, zero: rewards that must not teach the task"),
        option_flag("no-drafts", &s->no_drafts, "sample without drafts"),
        option_text("reward-command", &s->rewards.command, "CMD",
                    "a program that gives the rewards, a JSON line for each prompt"),
        option_text("reward-url", &s->rewards.url, "URL",
                    "a server that gives the rewards, a POST for each prompt"),
        option_real("reward-timeout", &s->rewards.timeout_s, 0.001, 86400,
                    "seconds that a reply may take; default 60"),
        option_int("reward-retries", &s->rewards.retries, 0, 100,
                   "of a prompt without good rewards; default 2"),
        option_text("rollout", &s->remote.url, "URL",
                    "sample with this hadal server, which gets the weights of every step"),
        option_text("rollout-dir", &s->remote.dir, "DIR",
                    "the server's --weights-dir, or a folder below it"),
        option_real("rollout-timeout", &s->remote.timeout_s, 0.001, 86400,
                    "seconds that a reply may take; default 600"),
        option_int("rollout-retries", &s->remote.retries, 0, 100,
                   "of a request; then the run stops; default 3"),
        option_choice(
            "replay", &s->replay, replays,
            "train with the experts that the server chose (routes), and the keys that its "
            "indexers selected (indexer); default none"),
        option_choice("reward-failures", &s->reward_failures, failures,
                      "then: stop the run, or drop the prompt; default stop"),
    };
    option_list_add(list, own, HD_LEN(own));
    train_options_add(list, &s->train);
}

int cmd_rl(int argc, char **argv) {
    learning l = {
        .set = {.train = train_settings_default(),
                .groups = 24,
                .samples = 8,
                .max_tokens = 64,
                .held_out_samples = 1,
                .updates = 1,
                .temperature = 1.0,
                .clip_low = -1.0,
                .clip_high = -1.0,
                .correction_high = 2.0,
                .kl_kind = HD_KL_K3,
                .rewards = {.timeout_s = 60, .retries = 2},
                .remote = {.timeout_s = 600, .retries = 3}}
    };
    static option_list list; /* with the rest it is more than a frame holds */
    list.n = 0;              /* `hadal completions` asks every command more than once */
    l.set.train.freeze = "router";
    add_options(&list, &l.set);
    const positional model = {"MODEL_DIR", &l.set.train.model_dir, false, POSITIONAL_MODEL};
    const command_line line = {
        .command = "rl",
        .summary = "Trains a model by rewards of its own samples, on the CPU or a GPU.",
        .details =
            "Sampler and trainer are one model: |dlogp|, the difference of a token's\n"
            "log-probability in both, is 0. DIR/step-N/model is a model for `hadal serve`.",
        .positionals = &model,
        .n_positionals = 1,
        .options = list.all,
        .n_options = list.n};
    int code;
    hd_err err = {0};
    if (!options_parse(&line, argc, argv, &code)) return code;
    hd_status st = train_world_open(&l.world, &l.set.train, &err);
    if (st == HD_OK) st = l.world.rank ? train_world_follow(&l.world, &err) : lead(&l, &err);
    close_all(&l);
    train_world_close(&l.world, st == HD_OK ? NULL : err.msg);
    return st == HD_OK ? 0 : report_error(&err);
}
