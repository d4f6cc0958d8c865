/* inline_internal.h - for loops that are written once and compiled for every count and format that is
 * a constant where they are used. */
#ifndef HD_OPS_CPU_INLINE_INTERNAL_H
#define HD_OPS_CPU_INLINE_INTERNAL_H

#define INLINE static inline __attribute__((always_inline))
/* One for each kind of matrix, or their frames add up. */
#define OUTLINE static __attribute__((noinline))
#define UNROLL  _Pragma("GCC unroll 16")

#endif
