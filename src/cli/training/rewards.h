/* rewards.h - rewards of samples by a command or a server of the user's.
 *
 * A question that gets no good reply in time is asked again, `retries` times, after a pause that
 * doubles. Then the run ends with the reason, or the group is left out of it. */
#ifndef HD_CLI_TRAINING_REWARDS_H
#define HD_CLI_TRAINING_REWARDS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

typedef struct rewards_options {
    const char *command; /* one program and its arguments, started without a shell; or */
    const char *url;     /* http(s)://..., to which every question is posted */
    double timeout_s;    /* of a reply */
    int64_t retries;     /* of a question */
    bool drops;          /* questions without a good reply are no failure */
} rewards_options;

/* A question about n answers (train/reward.h), and what came of it. */
typedef struct reward_question {
    int64_t id;
    char *text; /* malloc'ed, JSON without line feeds */
    int32_t n;
    double *rewards; /* [n] */
    int32_t tries;   /* that failed */
    bool dropped;    /* no good reply came: rewards are not set */
} reward_question;

typedef struct rewards rewards;

/* Opens a source of rewards; a command is started. Exactly one of command and url is given. */
hd_status rewards_open(rewards **out, const rewards_options *o, hd_err *err);
void rewards_close(rewards *r); /* NULL is fine; ends the command */

/* Asks q[n], and waits for all replies. */
hd_status rewards_ask(rewards *r, reward_question *q, int32_t n, hd_err *err);

#endif
