/* draft_depth.c - draft depth by measured step times and acceptance rates; see
 * draft_depth.h. */
#include "sched/draft_depth.h"

#include <math.h>

#include "base/checked.h"

enum {
    FIRST_DEPTHS = 4, /* depths 0 .. 3 are measured before the first choice */
    LOOK = 4, /* Steps of a trial. The first one still verifies drafts of the previous depth. */
    SHORT_PAUSE = 32,  /* steps between trials, initially */
    LONG_PAUSE = 1024, /* steps between trials, at most */
    MEMORY = 256,      /* length of the moving average over all requests, in drafts */
    OWN_MEMORY = 64,   /* length of the moving average of one request */
    PRIOR = 8          /* weight of the prior from all requests, in drafts */
};

static const double first_prior = 0.7, new_share = 0.25, outlier = 3, worth_it = 1.01;
static const double aging = 1 - 1.0 / 512; /* per step, of acceptance counts */

void sched_draft_depth_init(sched_draft_depth *d, int32_t most) {
    *d = (sched_draft_depth){.most = most, .batch_class = -1};
    for (int i = 0; i < SCHED_BATCH_CLASSES; i++) {
        d->batch_classes[i].pause = d->batch_classes[i].until_try = SHORT_PAUSE;
    }
}

/* ---- acceptance ---- */

static void count_one(double *tried, double *accepted, double share, double memory) {
    const double keep = *tried < memory ? 1 : 1 - 1 / memory;
    *tried = *tried * keep + 1;
    *accepted = *accepted * keep + share;
}

static void count_draft(sched_draft_depth *d, sched_acceptance *own, int32_t place,
                        double share) {
    count_one(&d->all.tried[place], &d->all.accepted[place], share, MEMORY);
    count_one(&own->tried[place], &own->accepted[place], share, OWN_MEMORY);
}

/* Confidences in steps of one, from below -7 to above 7. A broken one counts as 0. */
static int32_t confidence_class(float confidence) {
    enum { HALF = SCHED_CONFIDENCES / 2 };
    const float most = HALF - 1;
    if (!(confidence >= -most)) return isnan(confidence) ? HALF : 0;
    return (int32_t)floorf(fminf(confidence, most)) + HALF;
}

/* Returns how often drafts of this confidence were accepted; what it says is the prior. */
static double trust(const sched_draft_depth *d, float confidence) {
    const int32_t i = confidence_class(confidence);
    const double prior = isnan(confidence) ? 0.5 : 1 / (1 + exp(-(double)confidence));
    return (d->accepted[i] + PRIOR * prior) / (d->tried[i] + PRIOR);
}

/* The first draft that was not verified counts as accepted in part, if all before it were.
 * Without it, places whose unlikely drafts are not verified would seem to be better. */
void sched_draft_depth_verified(sched_draft_depth *d, sched_acceptance *own,
                                const sched_drafts *drafts, int32_t accepted) {
    const int32_t n = drafts->verified;
    for (int32_t i = 0; i < n && i <= accepted; i++) {
        count_draft(d, own, i, i < accepted);
        if (!drafts->n_confidence) continue;
        const int32_t k = confidence_class(drafts->confidence[i]);
        count_one(&d->tried[k], &d->accepted[k], i < accepted, MEMORY);
    }
    if (accepted < n || n >= drafts->n_confidence) return;
    count_draft(d, own, n, trust(d, drafts->confidence[n]));
}

/* Returns the probability that a draft is accepted if all before it are. A place that was
 * never tried uses the rate of the place before it. */
static double accept_probability(const sched_draft_depth *d, const sched_acceptance *own,
                                 int32_t place) {
    double prior = first_prior;
    for (int32_t i = 0; i <= place; i++) {
        prior = (d->all.accepted[i] + prior) / (d->all.tried[i] + 1);
    }
    if (!own) return prior;
    return (own->accepted[place] + PRIOR * prior) / (own->tried[place] + PRIOR);
}

/* ---- times ---- */

static int32_t batch_class_of(int32_t n) {
    int32_t i = 0;
    while (n >> (i + 1) && i + 1 < SCHED_BATCH_CLASSES) i++;
    return i;
}

void sched_draft_depth_step_took(sched_draft_depth *d, int64_t ns) {
    if (d->batch_class < 0 || d->stable_steps < 2 || ns <= 0) return;
    sched_batch_class *c = &d->batch_classes[d->batch_class];
    double *mean = &c->ns[d->depth], now = (double)ns;
    const int32_t seen = c->seen[d->depth];
    if (seen < MEMORY) c->seen[d->depth]++;
    if (seen >= 2 && now > outlier * *mean) now = outlier * *mean;
    const double share = 1.0 / (seen + 1) > new_share ? 1.0 / (seen + 1) : new_share;
    *mean += (now - *mean) * share;
}

/* Tokens per nanosecond and request at a measured depth. */
static double rate(const sched_draft_depth *d, const sched_batch_class *c, int32_t depth) {
    double tokens = 1, reached = 1;
    for (int32_t i = 0; i < depth; i++) tokens += reached *= accept_probability(d, NULL, i);
    return tokens / c->ns[depth];
}

static void judge(const sched_draft_depth *d, sched_batch_class *c) {
    int32_t best = c->best;
    for (int32_t k = 0; k < SCHED_DEPTHS; k++) {
        if (!c->seen[k] || k == best) continue;
        if (!c->seen[best] || rate(d, c, k) > worth_it * rate(d, c, best)) best = k;
    }
    if (best == c->best) return;
    c->best = best;
    c->pause = c->until_try = SHORT_PAUSE;
}

/* ---- choosing the depth ---- */

/* Returns a depth that must be measured first, or -1: the first few, then the depth after
 * the best one. */
static int32_t unseen(const sched_batch_class *c, int32_t most) {
    for (int32_t k = 0; k < FIRST_DEPTHS && k <= most; k++) {
        if (!c->seen[k]) return k;
    }
    return c->best < most && !c->seen[c->best + 1] ? c->best + 1 : -1;
}

/* Picks another depth for a trial and drops its old measurement. */
static int32_t other_depth(sched_batch_class *c, int32_t most) {
    do {
        c->next_try = (c->next_try + 1) % (most + 1);
    } while (c->next_try == c->best);
    c->seen[c->next_try] = 0;
    return c->next_try;
}

static int32_t pick(sched_draft_depth *d, sched_batch_class *c) {
    judge(d, c);
    const int32_t k = unseen(c, d->most);
    d->hold = LOOK - 1;
    if (k >= 0) return k;
    if (--c->until_try > 0) {
        d->hold = 0;
        return c->best;
    }
    c->until_try = c->pause;
    c->pause = hd_min_i32(2 * c->pause, LONG_PAUSE);
    return other_depth(c, d->most);
}

/* Reduces the weight of old counts, so that places that are no longer tried do not keep
 * them. */
static void age(sched_acceptance *c) {
    for (int32_t i = 0; i < HD_MAX_DRAFTS; i++) {
        c->tried[i] *= aging;
        c->accepted[i] *= aging;
    }
}

int32_t sched_draft_depth_choose(sched_draft_depth *d, int32_t n) {
    const int32_t batch_class = batch_class_of(n);
    int32_t depth = d->depth;
    age(&d->all);
    if (d->hold > 0 && batch_class == d->batch_class) {
        d->hold--;
    } else {
        depth = pick(d, &d->batch_classes[batch_class]);
    }
    d->stable_steps =
        depth == d->depth && batch_class == d->batch_class ? d->stable_steps + 1 : 1;
    d->depth = depth;
    d->batch_class = batch_class;
    return depth;
}

/* With the acceptance of all requests the best depth itself is optimal, by definition. */
int32_t sched_draft_depth_of(const sched_draft_depth *d, const sched_acceptance *own,
                             int32_t depth) {
    const sched_batch_class *c = &d->batch_classes[d->batch_class];
    double reached = 1, won = 0, most = 0;
    int32_t best = 0;
    if (d->hold > 0) return depth; /* a trial measures the full depth */
    for (int32_t k = 1; k <= depth; k++) {
        if (!c->seen[k] || !c->seen[k - 1]) return depth;
        reached *= accept_probability(d, own, k - 1);
        won += reached - (c->ns[k] - c->ns[k - 1]) * rate(d, c, c->best);
        if (won <= most) continue;
        most = won;
        best = k;
    }
    return best;
}

/* What a verified draft costs is known from the depths. That of the first is counted like the
 * second: a step without drafts does not make any, either. */
int32_t sched_draft_depth_keep(const sched_draft_depth *d, const sched_drafts *drafts) {
    const int32_t n = drafts->made;
    if (d->hold > 0 || d->batch_class < 0 || !drafts->n_confidence) return n;
    const sched_batch_class *c = &d->batch_classes[d->batch_class];
    double reached = 1, won = 0, most = 0;
    int32_t best = 0;
    for (int32_t k = 1; k <= n; k++) {
        const int32_t from = k > 1 ? k - 1 : hd_min_i32(d->most, 2) - 1;
        if (!c->seen[from] || !c->seen[from + 1]) return n;
        reached *= trust(d, drafts->confidence[k - 1]);
        won += reached - (c->ns[from + 1] - c->ns[from]) * rate(d, c, c->best);
        if (won <= most) continue;
        most = won;
        best = k;
    }
    return best;
}
