/* inline_internal.h - macros for loops that are written once and compiled for every
 * compile-time constant count and format. */
#ifndef HD_OPS_CPU_INLINE_INTERNAL_H
#define HD_OPS_CPU_INLINE_INTERNAL_H

#define INLINE static inline __attribute__((always_inline))
/* A separate function per kind of matrix, as otherwise their stack frames add up. */
#define OUTLINE static __attribute__((noinline))
#define UNROLL  _Pragma("GCC unroll 16")

#endif
