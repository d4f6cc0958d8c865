/* null_runner.h - a runner without a model, for load tests of everything but the model.
 *
 * A step takes no time, or a given time. The token at a position is drawn by Philox from
 * (seed, position) among the tokens with printable text. The same request therefore gets the
 * same answer, and no answer ends by itself. All tokens are equally likely; biases,
 * penalties and constraints are ignored. One draft in four is wrong; (seed, position)
 * decides which, so texts are the same with any draft depth. */
#ifndef HD_RUNNER_NULL_RUNNER_H
#define HD_RUNNER_NULL_RUNNER_H

#include "runner/runner.h"
#include "tokenizer/tokenizer.h"

typedef struct hd_null_runner hd_null_runner;

typedef struct hd_null_runner_options {
    const hd_tokenizer *tokenizer; /* NULL: tokens have no text, all are drawn */
    int32_t n_ids, n_slots, max_drafts;
    int32_t step_us; /* duration of a step in microseconds; 0: none */
} hd_null_runner_options;

/* Fails with HD_EINVAL for a tokenizer without printable tokens. */
hd_status hd_null_runner_open(hd_null_runner **out, const hd_null_runner_options *o,
                              hd_err *err);
void hd_null_runner_close(hd_null_runner *n); /* NULL is fine */

void hd_null_runner_enter(hd_null_runner *n, int32_t slot, uint64_t seed);
hd_runner hd_null_runner_interface(hd_null_runner *n);

#endif
