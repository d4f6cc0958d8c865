/* rewards_internal.h - the two sources of rewards, and what they share. */
#ifndef HD_CLI_TRAINING_REWARDS_INTERNAL_H
#define HD_CLI_TRAINING_REWARDS_INTERNAL_H

#include "cli/training/rewards.h"

/* rewards.c: counts a failed try of a question. HD_OK: it is dropped, or may be asked again after
 * *pause_ns; otherwise the run ends with the reason. */
hd_status rewards_failed(const rewards_options *o, reward_question *q, const char *why,
                         int64_t *pause_ns, hd_err *err);

/* rewards_command.c: one process that answers line by line, in the order of the questions */
typedef struct reward_command reward_command;
hd_status reward_command_open(reward_command **out, const rewards_options *o, hd_err *err);
void reward_command_close(reward_command *c);
hd_status reward_command_ask(reward_command *c, reward_question *q, int32_t n, hd_err *err);

/* rewards_url.c: a POST for each question, some at once */
typedef struct reward_url reward_url;
hd_status reward_url_open(reward_url **out, const rewards_options *o, hd_err *err);
void reward_url_close(reward_url *u);
hd_status reward_url_ask(reward_url *u, reward_question *q, int32_t n, hd_err *err);

#endif
