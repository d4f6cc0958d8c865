/* draft_depth.h - how many drafts pay, learned from what they cost and how often they stand.
 *
 * With k drafts a step gives 1 + P(first stands) + P(first two stand) + ... tokens and takes the
 * time that steps with k drafts were seen to take. The best k is that of the most tokens per
 * second. Times are kept per number of decoding requests (in powers of two) and k; chances per
 * place in the step, of each request with those of all as a prior. The best k is used, and
 * seldom another one is tried, ever more seldom while the best stays the best. No clock and no
 * random numbers: the same steps give the same choices. */
#ifndef HD_SCHED_DRAFT_DEPTH_H
#define HD_SCHED_DRAFT_DEPTH_H

#include <stdbool.h>
#include <stdint.h>

#include "runner/runner.h"

enum { SCHED_BATCH_CLASSES = 12, SCHED_DEPTHS = HD_MAX_DRAFTS + 1 };

/* Drafts that were verified at each place, and those that stood; old ones count less. */
typedef struct sched_acceptance {
    double tried[HD_MAX_DRAFTS], accepted[HD_MAX_DRAFTS];
} sched_acceptance;

/* What is known of steps with a certain number of decoding requests. */
typedef struct sched_batch_class {
    double ns[SCHED_DEPTHS];    /* of a step */
    int32_t seen[SCHED_DEPTHS]; /* 0: never */
    int32_t best, next_try;     /* depths */
    int32_t until_try, pause;   /* steps to the next trial; between trials */
} sched_batch_class;

typedef struct sched_draft_depth {
    sched_acceptance all;
    sched_batch_class crowds[SCHED_BATCH_CLASSES];
    int32_t crowd, depth; /* of the last step */
    int32_t hold;         /* steps that this depth will still be kept */
    int32_t stable_steps; /* steps since crowd or depth changed */
} sched_draft_depth;

void sched_draft_depth_init(sched_draft_depth *d);

/* How deep to draft in the coming step, in which n requests decode. */
int32_t sched_draft_depth_choose(sched_draft_depth *d, int32_t n);

/* At most the depth chosen: as far as a request's own chances pay for its share of the time. */
int32_t sched_draft_depth_of(const sched_draft_depth *d, const sched_acceptance *own,
                             int32_t depth);

/* The step before took this long, with no prompts in it. */
void sched_draft_depth_step_took(sched_draft_depth *d, int64_t ns);

/* A step verified n drafts of a request, of which the first `stood` stand. */
void sched_draft_depth_verified(sched_draft_depth *d, sched_acceptance *own, int32_t n,
                                int32_t accepted);

#endif
