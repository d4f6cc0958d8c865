/* cpu.h - CPU feature detection (AVX2, AVX-512, VNNI, BF16), read once. */
#ifndef HD_BASE_CPU_H
#define HD_BASE_CPU_H

#include <stdint.h>

enum {
    HD_CPU_AVX2 = 1 << 0,        /* with FMA and F16C */
    HD_CPU_AVX512 = 1 << 1,      /* F, BW, VL, DQ */
    HD_CPU_AVX512_VBMI = 1 << 2, /* byte look-ups */
    HD_CPU_AVX512_BF16 = 1 << 3, /* dot products of bf16 */
    HD_CPU_NEON = 1 << 4,
    HD_CPU_FAST_BF16 = 1 << 5,   /* bf16 dot products are faster than float32 products */
    HD_CPU_AVX512_VNNI = 1 << 6, /* dot products of integers */
};

/* Returns the instruction sets that both the processor and the operating system support. */
uint32_t hd_cpu_features(void);

/* Writes the names of the set bits, separated by spaces, into out[cap]. */
void hd_cpu_feature_names(uint32_t features, char *out, int32_t cap);

/* Tells the processor that this thread spins. */
static inline void hd_cpu_relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#endif
