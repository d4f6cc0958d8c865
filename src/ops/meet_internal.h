/* meet_internal.h - what the files that bring few rows of x and stored rows together share. */
#ifndef HD_OPS_MEET_INTERNAL_H
#define HD_OPS_MEET_INTERNAL_H

#include <immintrin.h>

#include "ops/kernels_internal.h"

/* What comes next, in the order of memory: rows are too short for the processor to guess. Always
 * inlined: gcc 12 takes a function that only prefetches for one that does nothing, and drops
 * calls of it. */
static inline __attribute__((always_inline)) void prefetch(const ops_meeting *m, int32_t w,
                                                           int32_t n_w, int64_t at) {
    for (int32_t j = 0; j < n_w; j++) {
        _mm_prefetch((const char *)m->src[w] + m->ahead + n_w * at + 64 * j, _MM_HINT_T0);
    }
}

#endif
