/* rl_generate.h - generated prompts, each with a checker (cli/eval_check.h). */
#ifndef HD_CLI_TRAINING_RL_GENERATE_H
#define HD_CLI_TRAINING_RL_GENERATE_H

#include <jansson.h>
#include <stdint.h>

extern const char *const rl_task_names[]; /* ended by NULL */

/* Returns prompt number i of a task, {"messages", "checker", "thinking"} and, if it has any,
 * "tools"; NULL without memory. The same numbers and seed are the same prompt. The caller owns it.
 *   task   index into rl_task_names
 *   i      not negative */
json_t *rl_generate(int task, uint64_t seed, int64_t i);

#endif
