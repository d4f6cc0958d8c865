/* shared_count.h - counters of users in POSIX shared memory, which other processes keep there. */
#ifndef HD_BASE_SHARED_COUNT_H
#define HD_BASE_SHARED_COUNT_H

#include <stddef.h>
#include <stdint.h>

/* Subtracts one from the counter of `width` bytes, 4 or 8, at byte `at` of the object `name`, unless
 * it is 0 or less. Returns what is left, or -1 if nothing was subtracted: the object is gone, is
 * another user's, or is too small. */
int64_t hd_shared_count_down(const char *name, size_t at, int32_t width);

#endif
