/* rl_rollout.h - samples of an engine with their log-probabilities and rewards. */
#ifndef HD_CLI_TRAINING_RL_ROLLOUT_H
#define HD_CLI_TRAINING_RL_ROLLOUT_H

#include "cli/training/rewards.h"
#include "cli/training/rl_remote.h"
#include "cli/training/rl_tasks.h"
#include "engine/engine.h"

typedef struct rl_sample {
    hd_ids tokens;  /* the prompt, then what was sampled */
    int32_t first;  /* of the sampled tokens */
    float *logprob; /* [tokens.n - first] as sampled, at the temperature */
    int32_t cap;
    bool truncated;         /* ended by its length */
    bool unscored;          /* its group got no rewards */
    int32_t *routes, *keys; /* of a remote sampler that gives them (samples.h); or NULL */
    double reward;
} rl_sample;

typedef struct rl_rollout {
    rl_sample *samples; /* [n_groups * group], groups together */
    int32_t n_groups, group;
    double seconds, reward_seconds;
} rl_rollout;

typedef struct rl_rollout_options {
    int32_t n_groups, group;
    int32_t max_tokens; /* of a sample */
    float temperature;
    uint64_t seed;
    int64_t first; /* number of the first prompt, and of the draws */
    bool fixed;    /* the same prompts in every rollout: from number 0 on */
    int32_t draft_tokens;
    rl_remote *remote; /* NULL: the engine samples */
    bool routes, keys; /* the remote sampler gives its routes; its indexers' selections */
    rewards *rewards;  /* NULL: 1 where the checker is satisfied and the answer ended, else 0 */
} rl_rollout_options;

hd_status rl_rollout_open(rl_rollout *out, int32_t n_groups, int32_t group, hd_err *err);
void rl_rollout_close(rl_rollout *r); /* an all-zero one is fine */

/* Samples and scores. What is sampled depends on the weights, the prompts and the seed alone. */
hd_status rl_rollout_run(rl_rollout *r, hd_engine *e, const rl_tasks *tasks,
                         const rl_rollout_options *o, hd_err *err);

#endif
