/* gpus.h - which GPU a rank of a test has. */
#ifndef HD_TESTS_GPUS_H
#define HD_TESTS_GPUS_H

#include <stdbool.h>
#include <stdint.h>

/* Whether HADAL_BACKEND asks for tests on GPUs. */
bool gpus_are_wanted(void);

/* The GPU of rank `rank`: ranks share GPUs if there are too few. 0 without a GPU. */
int32_t gpus_for(int32_t rank);

#endif
