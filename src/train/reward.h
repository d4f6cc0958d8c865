/* reward.h - rewards from outside: what a scorer is asked about a group of samples, and its reply.
 *
 * A question and its reply are one JSON object each:
 *
 *     {"id": 7, "messages": [...], "checker": {...}, "answers": [{"text": T, "finished": true}]}
 *     {"id": 7, "rewards": [0.5, ...]}
 *
 * messages, tools, checker and thinking are those of the prompt. text has special tokens as text;
 * finished is false if the length ended the answer. A reply comes from another program: it counts
 * in whole or not at all. */
#ifndef HD_TRAIN_REWARD_H
#define HD_TRAIN_REWARD_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

enum { HD_MOST_REWARD_BYTES = 1 << 20 }; /* of a reply */

typedef struct hd_reward_answer {
    const char *text; /* [bytes] UTF-8 */
    size_t bytes;
    bool finished;
} hd_reward_answer;

/* Writes the question about answers[n] to a prompt, without line feeds. The caller frees it; NULL
 * without memory. */
char *hd_reward_question(int64_t id, const json_t *prompt, const hd_reward_answer *answers,
                         int32_t n);

/* Reads the reply text[bytes] to question `id` about n answers. HD_EFORMAT: it is no such object,
 * of another question, has not n rewards, or one that is no number within +-1e6. Members that are
 * not known are left out. */
hd_status hd_reward_reply(double *rewards, int32_t n, int64_t id, const char *text,
                          size_t bytes, hd_err *err);

#endif
