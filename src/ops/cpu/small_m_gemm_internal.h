/* small_m_gemm_internal.h - prefetching of W, shared by the small-M GEMM files. */
#ifndef HD_OPS_CPU_SMALL_M_GEMM_INTERNAL_H
#define HD_OPS_CPU_SMALL_M_GEMM_INTERNAL_H

#include <immintrin.h>

#include "ops/cpu/kernels_internal.h"

/* The next addresses in memory order: rows are too short for the hardware prefetcher. */
typedef struct coming {
    const uint8_t *at;
    int32_t lines; /* lines to prefetch per line read of a row */
} coming;

/* Returns the addresses after n_w rows of W from w on. If x is processed in parts, each part
 * prefetches a share; this one is n_x rows from i on. `bits`: of an element. */
static inline __attribute__((always_inline)) coming comes_next(const ops_small_m_args *m,
                                                               int32_t bits, int32_t w,
                                                               int32_t n_w, int32_t i,
                                                               int32_t n_x) {
    const int64_t bytes = (int64_t)m->n * bits / 8 * n_w;
    return (coming){m->src[w] + m->ahead + bytes * i / m->n_x,
                    n_x == m->n_x ? n_w : (n_w * n_x + m->n_x - 1) / m->n_x};
}

/* Always inlined: gcc 12 considers a function that only prefetches to have no effect, and
 * removes its calls. */
static inline __attribute__((always_inline)) void prefetch(coming *next) {
    for (int32_t j = 0; j < next->lines; j++, next->at += 64)
        _mm_prefetch(next->at, _MM_HINT_T0);
}

#endif
