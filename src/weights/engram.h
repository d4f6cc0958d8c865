/* engram.h - the constants of V4.1's Engram hashes; models.md 2.20.
 *
 * They follow from the numbers in the config alone: multipliers from a generator seeded by the
 * layer, and primes in ascending order, none of them used twice. */
#ifndef HD_WEIGHTS_ENGRAM_H
#define HD_WEIGHTS_ENGRAM_H

#include <stdint.h>

#include "base/status.h"
#include "weights/spec.h"

/* Fills e->hash from the other fields. Fails if primes do not fit 31 bits, or if those of a
 * layer do not add up to its rows; *layer is then its index. */
hd_status hd_engram_constants(hd_engram_spec *e, int32_t *layer);

/* Draws n numbers below `bound` as numpy's default_rng(seed).integers(0, bound) does (PCG64).
 * bound is above 2^32. */
void hd_engram_draw(uint64_t seed, uint64_t bound, int32_t n, uint64_t *out);

#endif
