/* allocations.h - how often the program has asked for memory. */
#ifndef HD_TESTS_ALLOCATIONS_H
#define HD_TESTS_ALLOCATIONS_H

#include <stdint.h>

/* Calls of malloc and its relatives so far, by any thread. The libraries' own are not seen. */
int64_t allocations(void);

#endif
