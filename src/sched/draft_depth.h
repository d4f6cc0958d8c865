/* draft_depth.h - chooses the draft depth of speculative decoding from step times and
 * acceptance.
 *
 * With k drafts a step yields 1 + P(first accepted) + P(first two accepted) + ... tokens.
 * Its duration is the measured duration of steps with k drafts. The best k yields the most
 * tokens per second. Times are kept per draft depth and per number of decoding requests, in
 * powers of two. Acceptance is kept per place in the step, for each request, with that of
 * all requests as a prior. A drafter may say how sure it is of each draft; then so many
 * drafts of a request are verified as are worth their rows, by how often drafts of the same
 * confidence were accepted. Other depths are tried from time to time, more rarely while the
 * best one stays the best. No clock and no random numbers: the same steps lead to the same
 * depths. */
#ifndef HD_SCHED_DRAFT_DEPTH_H
#define HD_SCHED_DRAFT_DEPTH_H

#include <stdbool.h>
#include <stdint.h>

#include "runner/runner.h"

enum { SCHED_BATCH_CLASSES = 12, SCHED_DEPTHS = HD_MAX_DRAFTS + 1, SCHED_CONFIDENCES = 16 };

/* Drafts verified at each place, and accepted ones; older drafts have a smaller weight. */
typedef struct sched_acceptance {
    double tried[HD_MAX_DRAFTS], accepted[HD_MAX_DRAFTS];
} sched_acceptance;

/* The drafts of one request that a step made. */
typedef struct sched_drafts {
    int32_t made, verified;          /* the first ones are verified */
    int32_t n_confidence;            /* made, or 0: the drafter does not know */
    float confidence[HD_MAX_DRAFTS]; /* log-odds, as in hd_seq_output */
} sched_drafts;

/* Measurements of steps whose number of decoding requests lies in one power of two. */
typedef struct sched_batch_class {
    double ns[SCHED_DEPTHS];    /* duration of a step */
    int32_t seen[SCHED_DEPTHS]; /* number of steps measured; 0: none */
    int32_t best, next_try;     /* depths */
    int32_t until_try, pause;   /* steps until the next trial; steps between trials */
} sched_batch_class;

typedef struct sched_draft_depth {
    int32_t most; /* drafts of a step */
    sched_acceptance all;
    /* drafts verified and accepted by confidence, in steps of one unit of log-odds */
    double tried[SCHED_CONFIDENCES], accepted[SCHED_CONFIDENCES];
    sched_batch_class batch_classes[SCHED_BATCH_CLASSES];
    int32_t batch_class, depth; /* batch class and draft depth of the last step */
    int32_t hold;               /* steps for which this depth is still kept */
    int32_t stable_steps;       /* steps since the batch class or the depth changed */
} sched_draft_depth;

/* most: the largest depth, 1 to HD_MAX_DRAFTS. */
void sched_draft_depth_init(sched_draft_depth *d, int32_t most);

/* Returns the draft depth for the coming step, in which n requests decode. */
int32_t sched_draft_depth_choose(sched_draft_depth *d, int32_t n);

/* Returns the draft depth of one request, at most `depth`: as many drafts as are worth their
 * share of the step's duration at the request's own acceptance. */
int32_t sched_draft_depth_of(const sched_draft_depth *d, const sched_acceptance *own,
                             int32_t depth);

/* Returns how many of the drafts that were made are worth their rows in the coming step: all
 * without confidences, and in a trial. */
int32_t sched_draft_depth_keep(const sched_draft_depth *d, const sched_drafts *drafts);

/* Records the duration of the previous step, which contained no prefill rows and verified all
 * drafts that were made. */
void sched_draft_depth_step_took(sched_draft_depth *d, int64_t ns);

/* Records that a step verified drafts of a request and accepted the first `accepted`. */
void sched_draft_depth_verified(sched_draft_depth *d, sched_acceptance *own,
                                const sched_drafts *drafts, int32_t accepted);

#endif
