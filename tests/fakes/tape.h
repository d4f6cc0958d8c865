/* tape.h - a table of operators that keeps the calls of every step of fixed shape and repeats
 * them: what a recorded graph does, so that a value of one step in the arguments would give
 * another step a wrong text. One table at a time, by one thread. */
#ifndef HD_TESTS_FAKES_TAPE_H
#define HD_TESTS_FAKES_TAPE_H

#include "ops/ops.h"

void tape_open(hd_ops *t); /* t, of the CPU, now calls what it was */

/* Steps that were repeated, not called, since tape_open(). */
int32_t tape_repeated(void);

#endif
