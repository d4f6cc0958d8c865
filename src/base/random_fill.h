/* random_fill.h - random bytes for synthetic data: the same for one seed on every machine,
 * and fast.
 *
 * Sebastiano Vigna's splitmix64 as a function of the position, so that any part can be
 * generated alone. It is good enough for contents that no decision depends on; sampling uses
 * philox.h. */
#ifndef HD_BASE_RANDOM_FILL_H
#define HD_BASE_RANDOM_FILL_H

#include <stdint.h>

#ifdef __CUDACC__
#define HD_RANDOM_FILL_FN static inline __host__ __device__
#else
#define HD_RANDOM_FILL_FN static inline
#endif

HD_RANDOM_FILL_FN uint64_t hd_random_fill_at(uint64_t seed, uint64_t at) {
    uint64_t z = seed + (at + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* The repeated pattern: random bits where keep has a bit, and the bits of set. */
typedef struct hd_random_fill {
    uint64_t seed;
    uint32_t keep, set;
} hd_random_fill;

HD_RANDOM_FILL_FN uint64_t hd_random_fill_word(const hd_random_fill *n, uint64_t at) {
    const uint64_t keep = (uint64_t)n->keep << 32 | n->keep;
    const uint64_t set = (uint64_t)n->set << 32 | n->set;
    return (hd_random_fill_at(n->seed, at) & keep) | set;
}

#endif
