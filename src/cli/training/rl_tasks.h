/* rl_tasks.h - prompts of reinforcement learning with a checker for each: generated tasks, or
 * lines of a file as `hadal eval` reads them. */
#ifndef HD_CLI_TRAINING_RL_TASKS_H
#define HD_CLI_TRAINING_RL_TASKS_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

typedef struct rl_tasks {
    int generator;  /* index into rl_task_names (rl_generate.h); read if lines is NULL */
    json_t **lines; /* [n] of a file */
    int32_t n;
    uint64_t seed;
    bool scored; /* by another program: checkers are for it */
} rl_tasks;

/* Opens a generator by its name, or a file of lines; exactly one is not NULL. scored: lines need
 * no checker, which other programs may read. */
hd_status rl_tasks_open(rl_tasks *out, const char *name, const char *file, uint64_t seed,
                        bool scored, hd_err *err);
void rl_tasks_close(rl_tasks *t); /* an all-zero one is fine */

/* Returns prompt number i, an object of "messages", "checker" and others, or NULL without
 * memory. The same i is the same prompt; lines of a file repeat. The caller owns it. */
json_t *rl_tasks_at(const rl_tasks *t, int64_t i);

#endif
