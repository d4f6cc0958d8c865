/* tape.h - replays steps of fixed shape on the CPU, as a CUDA graph does: it records the
 * operator calls of every shape and repeats them. An argument that depends on one step would
 * then give another step a wrong text. One table at a time, by one thread. */
#ifndef HD_TESTS_FAKES_TAPE_H
#define HD_TESTS_FAKES_TAPE_H

#include "ops/ops.h"

void tape_open(hd_ops *t); /* t, a CPU table, now records and calls what it was */

/* Returns the number of shapes recorded since tape_open(). */
int32_t tape_recorded(void);

/* Returns the number of steps replayed since tape_open(). */
int32_t tape_repeated(void);

#endif
