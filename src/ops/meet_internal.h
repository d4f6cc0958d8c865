/* meet_internal.h - sums in registers, for the files that bring few rows of x and stored rows
 * together. For AVX-512 files only. */
#ifndef HD_OPS_MEET_INTERNAL_H
#define HD_OPS_MEET_INTERNAL_H

#include <immintrin.h>

#include "ops/kernels_internal.h"

/* Four sums per row of x, one for each row of W. */
typedef struct four {
    __m512 a, b, c, d;
} four;

static inline four load_sums(const float *at) {
    return (four){_mm512_loadu_ps(at), _mm512_loadu_ps(at + OPS_LANES),
                  _mm512_loadu_ps(at + 2 * OPS_LANES), _mm512_loadu_ps(at + 3 * OPS_LANES)};
}

static inline void store_sums(float *at, four s) {
    _mm512_storeu_ps(at, s.a);
    _mm512_storeu_ps(at + OPS_LANES, s.b);
    _mm512_storeu_ps(at + 2 * OPS_LANES, s.c);
    _mm512_storeu_ps(at + 3 * OPS_LANES, s.d);
}

static inline four add_products(four sum, __m512 x, four w) {
    return (four){_mm512_fmadd_ps(x, w.a, sum.a), _mm512_fmadd_ps(x, w.b, sum.b),
                  _mm512_fmadd_ps(x, w.c, sum.c), _mm512_fmadd_ps(x, w.d, sum.d)};
}

/* What comes next, in the order of memory: rows are too short for the processor to guess. Always
 * inlined: gcc 12 takes a function that only prefetches for one that does nothing, and drops
 * calls of it. */
static inline __attribute__((always_inline)) void prefetch(const ops_meeting *m, int64_t at) {
    for (int32_t j = 0; j < OPS_TILE_ROWS; j++) {
        _mm_prefetch((const char *)m->src[0] + m->ahead + OPS_TILE_ROWS * at + 64 * j,
                     _MM_HINT_T0);
    }
}

#endif
