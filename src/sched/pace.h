/* pace.h - how many rows of prompts a step has, so that other requests wait no longer for it than a
 * budget says.
 *
 *     row = time of a step / its rows of prompts
 *
 * It is the mean of the last value and the one before, since rows far behind in a long prompt take
 * longer than its first. The whole step counts, also what it would take without prompts: so the rows
 * come to where the step takes the budget. No clock: the same times lead to the same rows. */
#ifndef HD_SCHED_PACE_H
#define HD_SCHED_PACE_H

#include <stdint.h>

enum {
    SCHED_PACE_LEAST = 16, /* rows of a step at least, so that prompts end */
    SCHED_PACE_FIRST = 64  /* rows of a prompt's first chunk at most */
};

typedef struct sched_pace {
    int64_t budget_ns; /* 0: none */
    double row_ns;     /* 0: not measured yet */
} sched_pace;

void sched_pace_took(sched_pace *p, int64_t ns, int32_t prompt_rows);

/* INT32_MAX: any number. */
int32_t sched_pace_rows(const sched_pace *p);

/* Rows of a prompt at most, after so many in its last chunk; 0: it has none. What a row takes is known of
 * all prompts together, and prompts come and go. */
int32_t sched_pace_next(int32_t last);

/* What prompts of a step get, the most important one first: each as much as it wants, but it leaves the
 * others an equal part, or what they want of it. */
typedef struct sched_shares {
    int64_t left, reserved, each;
} sched_shares;

/* wanted: rows of each prompt, [n]. */
sched_shares sched_shares_of(int32_t rows, const int32_t *wanted, int32_t n);
int32_t sched_shares_next(sched_shares *s,
                          int32_t wanted); /* returns the rows of the next prompt */

#endif
