/* philox.h - Philox4x32-10, a counter-based random generator.
 *
 * Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011), section 4.2: ten
 * rounds of two 32x32 multiplications on a 128-bit counter under a 64-bit key. The value
 * depends on (key, counter) alone, so a sample keyed by (request seed, position) is the same
 * in any batch, on any thread and after any restart. */
#ifndef HD_BASE_PHILOX_H
#define HD_BASE_PHILOX_H

#include <stdint.h>

typedef struct hd_philox {
    uint32_t v[4];
} hd_philox;

/* Four independent 32-bit words for the 128-bit counter (high, low) under seed. */
hd_philox hd_philox_at(uint64_t seed, uint64_t high, uint64_t low);

/* A uniform number in (0, 1): never 0, so its logarithm is finite. */
static inline float hd_philox_unit(uint32_t word) {
    return ((float)(word >> 9) + 0.5f) * (1.0f / 8388608.0f);
}

#endif
