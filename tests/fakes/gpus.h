/* gpus.h - which GPU a rank of a test has. */
#ifndef HD_TESTS_GPUS_H
#define HD_TESTS_GPUS_H

#include <stdbool.h>
#include <stdint.h>

#include "device/cuda_path.h"

/* Whether HADAL_BACKEND asks for tests on GPUs. */
bool gpus_are_wanted(void);

/* Which kernels a backend of a test, NULL: the default, runs: on "cuda" what HADAL_CUDA_PATH says, else
 * auto. */
hd_cuda_path gpus_path(const char *backend);

/* How a backend of a test rounds where the test does not say: on "cuda" what HADAL_PRECISION says, else exactly. */
const char *gpus_precision(const char *backend);

/* The GPU of rank `rank`: ranks share GPUs if there are too few. 0 without a GPU. */
int32_t gpus_for(int32_t rank);

#endif
