/* policy.h - reinforcement learning: advantages of groups, and what a policy's loss is of each
 * token. All losses have the gradient c_t * d log p(token), so one factor per token is enough.
 * Formulas: docs/training.md. No model here. */
#ifndef HD_TRAIN_POLICY_H
#define HD_TRAIN_POLICY_H

#include <stdbool.h>
#include <stdint.h>

typedef enum hd_advantage_kind {
    HD_ADVANTAGE_GRPO, /* (r - mean) / (standard deviation + 1e-6) */
    HD_ADVANTAGE_MEAN, /* r - mean */
    HD_ADVANTAGE_RLOO  /* r - mean of the others */
} hd_advantage_kind;

typedef enum hd_ratio_kind {
    HD_RATIO_CLIP,  /* PPO's clipped ratio of a token */
    HD_RATIO_GSPO,  /* the clipped geometric mean of a sample's ratios */
    HD_RATIO_CISPO, /* log p times the constant min(ratio, 1 + clip_high) */
} hd_ratio_kind;

/* What a sum over tokens is divided by. */
typedef enum hd_policy_mean {
    HD_MEAN_SAMPLES, /* mean over a sample's tokens, then over samples */
    HD_MEAN_TOKENS,  /* mean over all tokens */
    HD_MEAN_LENGTH   /* samples times the constant `length` */
} hd_policy_mean;

/* What is done about w = p_old / p_rollout, the difference of trainer and sampler. */
typedef enum hd_correction {
    HD_CORRECTION_NONE,
    HD_CORRECTION_TIS,   /* times w, truncated to [correction_low, correction_high] */
    HD_CORRECTION_MIS,   /* times w; a sample with a mean log w outside the bounds' logs is left
                            out */
    HD_CORRECTION_ICEPOP /* times w; tokens outside the bounds are left out */
} hd_correction;

/* Estimates of the divergence from a reference model, with t = log p_reference - log p. Their expected
 * gradients: none; of KL(p || reference); of KL(reference || p). */
typedef enum hd_kl_kind {
    HD_KL_K1, /* -t */
    HD_KL_K2, /* t^2 / 2 */
    HD_KL_K3  /* e^t - 1 - t */
} hd_kl_kind;

typedef struct hd_policy_options {
    hd_advantage_kind advantage;
    hd_ratio_kind ratio;
    hd_policy_mean mean;
    hd_correction correction;
    bool drop_equal; /* groups of equal rewards do not count in the means (DAPO) */
    double clip_low, clip_high;
    double dual_clip; /* least loss of a negative advantage, in ratios; 0: none */
    double correction_low, correction_high;
    double entropy; /* coefficient of the entropy bonus */
    double kl;      /* coefficient of the divergence from the reference model; 0: none */
    hd_kl_kind kl_kind;
    int32_t length; /* of HD_MEAN_LENGTH */
    /* DAPO's overlong punishment: falls to -1 from max_length - overlong on; 0: none */
    int32_t overlong, max_length;
} hd_policy_options;

/* The options of "grpo", "dr-grpo", "rloo", "dapo", "gspo" or "cispo"; false: another name. */
bool hd_policy_named(hd_policy_options *out, const char *name);
extern const char *const hd_policy_names[]; /* ended by NULL */

/* One sample. Arrays are [n], of its generated tokens. */
typedef struct hd_policy_sample {
    int32_t n;
    double reward, advantage;
    bool unscored;          /* it has no reward; then all of its group do not count */
    bool dropped;           /* its group does not count */
    const uint8_t *mask;    /* 0: the token has no loss; NULL: all have */
    const float *rollout;   /* log-probabilities as sampled, */
    const float *old;       /* of the trainer before the first update on these samples, */
    const float *now;       /* and now */
    const float *reference; /* of the reference model; read with kl */
    /* derivatives by -log p and by the negative entropy */
    float *factor, *entropy_factor;
} hd_policy_sample;

/* Sets advantages and `dropped` of samples[n], whose groups of `group` samples lie together.
 * Returns the groups of equal rewards, without those that have none. */
int32_t hd_policy_advantages(const hd_policy_options *o, hd_policy_sample *s, int32_t n,
                             int32_t group);

typedef struct hd_policy_report {
    int64_t tokens;  /* with a loss, of samples that count */
    int64_t clipped; /* without a gradient because of their ratio */
    int64_t masked;  /* left out by the correction */
    bool any;        /* a factor is not zero */
    /* of log p_old - log p_rollout over the tokens */
    double mean, p99, most; /* of its absolute value */
    double k1, k3;          /* estimates of the divergence; the difference is bounded to 10 */
    double effective;       /* effective sample size over tokens, in (0, 1] */
    double loss;
    double kl; /* of the reference model: mean over tokens of the estimate, not times kl */
} hd_policy_report;

/* Computes the factors of s[n], one batch, whose denominators count all its samples. Adds to
 * clipped, masked, loss, kl and any of *report. */
void hd_policy_factors(const hd_policy_options *o, const hd_policy_sample *s, int32_t n,
                       hd_policy_report *report);

/* Compares trainer and sampler: sets all else in *report. scratch: a double for each token. */
void hd_policy_measure(const hd_policy_sample *s, int32_t n, double *scratch,
                       hd_policy_report *report);

#endif
