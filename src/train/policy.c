/* policy.c - advantages and factors. Ratios are bounded before they are used, and a token that
 * is left out gets the factor 0 without arithmetic, whatever its ratio is. */
#include "train/policy.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const double MOST_LOG_RATIO = 20.0, MOST_LOGGED = 10.0;

const char *const hd_policy_names[] = {"grpo", "dr-grpo", "rloo", "dapo",
                                       "gspo", "cispo",   NULL};

typedef struct preset {
    hd_advantage_kind advantage;
    hd_ratio_kind ratio;
    hd_policy_mean mean;
    double clip_low, clip_high;
    bool drop_equal;
} preset;

/* in the order of the names */
static const preset presets[] = {
    {HD_ADVANTAGE_GRPO, HD_RATIO_CLIP,  HD_MEAN_SAMPLES, 0.2,  0.2,  false},
    {HD_ADVANTAGE_MEAN, HD_RATIO_CLIP,  HD_MEAN_LENGTH,  0.2,  0.2,  false},
    {HD_ADVANTAGE_RLOO, HD_RATIO_CLIP,  HD_MEAN_TOKENS,  0.2,  0.2,  false},
    {HD_ADVANTAGE_GRPO, HD_RATIO_CLIP,  HD_MEAN_TOKENS,  0.2,  0.28, true },
    {HD_ADVANTAGE_GRPO, HD_RATIO_GSPO,  HD_MEAN_SAMPLES, 3e-4, 4e-4, false},
    {HD_ADVANTAGE_GRPO, HD_RATIO_CISPO, HD_MEAN_TOKENS,  0.2,  0.28, false},
};

bool hd_policy_named(hd_policy_options *out, const char *name) {
    for (size_t i = 0; hd_policy_names[i]; i++) {
        if (strcmp(hd_policy_names[i], name) != 0) continue;
        const preset *p = &presets[i];
        *out = (hd_policy_options){.advantage = p->advantage,
                                   .ratio = p->ratio,
                                   .mean = p->mean,
                                   .drop_equal = p->drop_equal,
                                   .clip_low = p->clip_low,
                                   .clip_high = p->clip_high,
                                   .correction_high = 2.0};
        return true;
    }
    return false;
}

/* ---- advantages ---- */

static double shaped_reward(const hd_policy_options *o, const hd_policy_sample *s) {
    if (!o->overlong || s->n <= o->max_length - o->overlong) return s->reward;
    const double over = (double)(o->max_length - o->overlong - s->n) / (double)o->overlong;
    return s->reward + (s->n > o->max_length ? -1.0 : over);
}

static bool drop_unscored(hd_policy_sample *s, int32_t n) {
    bool unscored = false;
    for (int32_t i = 0; i < n; i++) unscored = unscored || s[i].unscored;
    for (int32_t i = 0; unscored && i < n; i++) {
        s[i].advantage = 0.0;
        s[i].dropped = true;
    }
    return unscored;
}

/* Of one group; returns whether its rewards are equal. */
static bool group_advantages(const hd_policy_options *o, hd_policy_sample *s, int32_t n) {
    double sum = 0.0, square = 0.0;
    bool equal = true;
    for (int32_t i = 0; i < n; i++) {
        s[i].advantage = shaped_reward(o, &s[i]);
        sum += s[i].advantage;
        equal = equal && s[i].advantage == s[0].advantage;
    }
    const double mean = sum / n;
    for (int32_t i = 0; i < n; i++) {
        const double r = s[i].advantage;
        square += (r - mean) * (r - mean);
        s[i].dropped = equal && o->drop_equal;
        s[i].advantage = equal                               ? 0.0
                         : o->advantage == HD_ADVANTAGE_RLOO ? r - (sum - r) / (n - 1)
                                                             : r - mean;
    }
    if (o->advantage == HD_ADVANTAGE_GRPO) {
        const double deviation = sqrt(square / n) + 1e-6;
        for (int32_t i = 0; i < n; i++) s[i].advantage /= deviation;
    }
    return equal;
}

int32_t hd_policy_advantages(const hd_policy_options *o, hd_policy_sample *s, int32_t n,
                             int32_t group) {
    int32_t equal = 0;
    for (int32_t first = 0; first < n; first += group) {
        if (drop_unscored(s + first, group)) continue;
        equal += group_advantages(o, s + first, group);
    }
    return equal;
}

/* ---- denominators ---- */

static bool counts(const hd_policy_sample *s, int32_t i) {
    return !s->mask || s->mask[i];
}

static int64_t tokens_of(const hd_policy_sample *s) {
    int64_t n = 0;
    for (int32_t i = 0; i < s->n && !s->dropped; i++) n += counts(s, i);
    return n;
}

typedef struct totals {
    int64_t samples, tokens;
} totals;

static totals count_all(const hd_policy_sample *s, int32_t n) {
    totals t = {0, 0};
    for (int32_t i = 0; i < n; i++) {
        const int64_t tokens = tokens_of(&s[i]);
        t.samples += tokens > 0;
        t.tokens += tokens;
    }
    return t;
}

/* What a token of the sample is divided by. */
static double denominator(const hd_policy_options *o, const totals *t, int64_t tokens) {
    if (o->mean == HD_MEAN_TOKENS) return (double)t->tokens;
    if (o->mean == HD_MEAN_LENGTH) return (double)t->samples * (double)o->length;
    return (double)t->samples * (double)tokens;
}

/* ---- factors ---- */

static double bounded(double x, double low, double high) {
    return x < low ? low : x > high ? high : x;
}

static double log_ratio(float a, float b) {
    return bounded((double)a - (double)b, -MOST_LOG_RATIO, MOST_LOG_RATIO);
}

/* Whether the ratio is where the clipped loss is flat. */
static bool is_clipped(const hd_policy_options *o, double advantage, double ratio) {
    if (advantage > 0.0) return ratio > 1.0 + o->clip_high;
    return ratio < 1.0 - o->clip_low || (o->dual_clip > 0.0 && ratio > o->dual_clip);
}

static double clipped_loss(const hd_policy_options *o, double advantage, double ratio) {
    const double inside = bounded(ratio, 1.0 - o->clip_low, 1.0 + o->clip_high);
    const double loss = fmax(-advantage * ratio, -advantage * inside);
    if (advantage >= 0.0 || o->dual_clip <= 0.0) return loss;
    return fmin(loss, -advantage * o->dual_clip);
}

/* The mean of log a - log b over a sample's tokens. */
static double mean_log_ratio(const hd_policy_sample *s, const float *a, const float *b) {
    double sum = 0.0;
    int64_t n = 0;
    for (int32_t i = 0; i < s->n; i++) {
        if (!counts(s, i)) continue;
        sum += (double)a[i] - (double)b[i];
        n++;
    }
    return n ? bounded(sum / (double)n, -MOST_LOG_RATIO, MOST_LOG_RATIO) : 0.0;
}

/* The weight of a token for the difference of trainer and sampler; false: it is left out. */
static bool correct(const hd_policy_options *o, const hd_policy_sample *s, int32_t i,
                    bool sample_in_bounds, double *weight) {
    const double w = exp(log_ratio(s->old[i], s->rollout[i]));
    *weight = w;
    switch (o->correction) {
    case HD_CORRECTION_NONE:
        *weight = 1.0;
        return true;
    case HD_CORRECTION_TIS:
        *weight = bounded(w, o->correction_low, o->correction_high);
        return true;
    case HD_CORRECTION_MIS:
        return sample_in_bounds;
    case HD_CORRECTION_ICEPOP:
        return w >= o->correction_low && w <= o->correction_high;
    }
    return true;
}

/* The loss of a token and its derivative by -log p. */
typedef struct token_loss {
    double loss, factor;
    bool clipped;
} token_loss;

static token_loss loss_of(const hd_policy_options *o, const hd_policy_sample *s, int32_t i,
                          double sample_ratio) {
    const double a = s->advantage;
    if (o->ratio == HD_RATIO_CISPO) {
        const double ratio = fmin(exp(log_ratio(s->now[i], s->old[i])), 1.0 + o->clip_high);
        return (token_loss){-ratio * a * (double)s->now[i], ratio * a, false};
    }
    const bool whole = o->ratio == HD_RATIO_GSPO;
    const double ratio = whole ? sample_ratio : exp(log_ratio(s->now[i], s->old[i]));
    const bool clipped = a != 0.0 && is_clipped(o, a, ratio);
    return (token_loss){clipped_loss(o, a, ratio), clipped ? 0.0 : a * ratio, clipped};
}

static bool in_bounds(const hd_policy_options *o, const hd_policy_sample *s) {
    if (o->correction != HD_CORRECTION_MIS) return true;
    const double w = exp(mean_log_ratio(s, s->old, s->rollout));
    return w >= o->correction_low && w <= o->correction_high;
}

/* GSPO: every token moves the ratio that all losses of the sample share. Returns the mean weight
 * of its tokens, those that are left out with 0. */
static double shared_weight(const hd_policy_options *o, const hd_policy_sample *s, bool inside,
                            int64_t tokens) {
    double sum = 0.0, weight;
    for (int32_t i = 0; i < s->n; i++) {
        if (counts(s, i) && correct(o, s, i, inside, &weight)) sum += weight;
    }
    return sum / (double)tokens;
}

/* The divergence of a token from the reference, and its derivative by -log p. */
static token_loss divergence(const hd_policy_options *o, const hd_policy_sample *s, int32_t i) {
    const double t = log_ratio(s->reference[i], s->now[i]);
    switch (o->kl_kind) {
    case HD_KL_K1:
        return (token_loss){-t, -1.0, false};
    case HD_KL_K2:
        return (token_loss){0.5 * t * t, t, false};
    case HD_KL_K3:
        break;
    }
    return (token_loss){exp(t) - 1.0 - t, exp(t) - 1.0, false};
}

/* Adds it to the factors. */
static void add_divergence(const hd_policy_options *o, const hd_policy_sample *s,
                           const totals *t, double each, hd_policy_report *report) {
    for (int32_t i = 0; o->kl > 0.0 && i < s->n; i++) {
        if (!counts(s, i)) continue;
        const token_loss l = divergence(o, s, i);
        s->factor[i] += (float)(o->kl * l.factor * each);
        report->loss += o->kl * l.loss * each;
        report->kl += l.loss / (double)t->tokens;
        report->any = report->any || s->factor[i] != 0.0f;
    }
}

static void sample_factors(const hd_policy_options *o, const hd_policy_sample *s,
                           const totals *t, hd_policy_report *report) {
    const int64_t tokens = tokens_of(s);
    const bool whole = o->ratio == HD_RATIO_GSPO, inside = in_bounds(o, s);
    const double each = tokens ? 1.0 / denominator(o, t, tokens) : 0.0;
    const double ratio = whole ? exp(mean_log_ratio(s, s->now, s->old)) : 1.0;
    const double shared = whole && tokens ? shared_weight(o, s, inside, tokens) : 0.0;
    for (int32_t i = 0; i < s->n; i++) {
        double weight;
        s->factor[i] = s->entropy_factor[i] = 0.0f;
        if (!tokens || !counts(s, i)) continue;
        const bool kept = correct(o, s, i, inside, &weight);
        report->masked += !kept;
        if (!kept && !whole) continue;
        if (whole) weight = shared;
        const token_loss l = loss_of(o, s, i, ratio);
        s->factor[i] = (float)(l.factor * weight * each);
        s->entropy_factor[i] = (float)(o->entropy * each);
        report->clipped += l.clipped;
        report->loss += l.loss * weight * each;
        report->any = report->any || s->factor[i] != 0.0f || s->entropy_factor[i] != 0.0f;
    }
    if (tokens) add_divergence(o, s, t, each, report);
}

void hd_policy_factors(const hd_policy_options *o, const hd_policy_sample *s, int32_t n,
                       hd_policy_report *report) {
    const totals t = count_all(s, n);
    for (int32_t i = 0; i < n; i++) sample_factors(o, &s[i], &t, report);
}

/* ---- the report ---- */

static int ascending(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

void hd_policy_measure(const hd_policy_sample *s, int32_t n, double *scratch,
                       hd_policy_report *report) {
    double sum = 0.0, weights = 0.0, squares = 0.0;
    int64_t k = 0;
    report->k1 = report->k3 = 0.0;
    for (int32_t j = 0; j < n; j++) {
        for (int32_t i = 0; i < s[j].n && !s[j].dropped; i++) {
            if (!counts(&s[j], i)) continue;
            const double d = (double)s[j].old[i] - (double)s[j].rollout[i];
            const double t = bounded(d, -MOST_LOGGED, MOST_LOGGED), w = exp(t);
            scratch[k++] = fabs(d);
            sum += fabs(d);
            report->k1 -= t;
            report->k3 += w - 1.0 - t;
            weights += w;
            squares += w * w;
        }
    }
    report->tokens = k;
    if (k == 0) return;
    qsort(scratch, (size_t)k, sizeof *scratch, ascending);
    report->mean = sum / (double)k;
    report->p99 = scratch[(k - 1) * 99 / 100];
    report->most = scratch[k - 1];
    report->k1 /= (double)k;
    report->k3 /= (double)k;
    report->effective = weights * weights / ((double)k * squares);
}
