/* null_runner.h - a runner without a model: every step is over at once, or after a time of one's choice.
 *
 * To measure and to test everything but the model. The token at a position is drawn by Philox
 * from (seed, position) among the tokens that are printable text, so the same request always
 * gets the same answer, and no answer ends by itself. All tokens are equally likely; biases,
 * penalties and guides are not looked at. Drafts are right but for one position in four, which
 * (seed, position) decides too, so that texts are the same with any number of drafts. */
#ifndef HD_RUNNER_NULL_RUNNER_H
#define HD_RUNNER_NULL_RUNNER_H

#include "runner/runner.h"
#include "tokenizer/tokenizer.h"

typedef struct hd_null_runner hd_null_runner;

typedef struct hd_null_runner_options {
    const hd_tokenizer *tokenizer; /* NULL: tokens are no text, all are drawn */
    int32_t n_ids, n_slots, max_drafts;
    int32_t step_us; /* what a step takes; 0: nothing */
} hd_null_runner_options;

/* HD_EINVAL for a tokenizer without printable tokens. */
hd_status hd_null_runner_open(hd_null_runner **out, const hd_null_runner_options *o,
                              hd_err *err);
void hd_null_runner_close(hd_null_runner *n); /* NULL is fine */

void hd_null_runner_enter(hd_null_runner *n, int32_t slot, uint64_t seed);
hd_runner hd_null_runner_interface(hd_null_runner *n);

#endif
