/* cpu.c - CPU features by the compiler's runtime, which also checks what the kernel saves. */
#include "base/cpu.h"

#include <stdio.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>

/* Half-precision conversion; not every compiler's runtime knows its name. */
static int has_f16c(void) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1u);
}
#endif

uint32_t hd_cpu_features(void) {
    uint32_t f = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c()) {
        f |= HD_CPU_AVX2;
    }
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
        f |= HD_CPU_AVX512;
    }
    if (__builtin_cpu_supports("avx512vbmi")) f |= HD_CPU_AVX512_VBMI;
    if (__builtin_cpu_supports("avx512vnni")) f |= HD_CPU_AVX512_VNNI;
    if (__builtin_cpu_supports("avx512bf16")) f |= HD_CPU_AVX512_BF16;
    /* AMD executes one or two per clock since Zen 4. Intel relies on AMX instead: a Sapphire
     * Rapids takes 2.4 clocks for each. */
    if ((f & HD_CPU_AVX512_BF16) && __builtin_cpu_is("amd")) f |= HD_CPU_FAST_BF16;
#elif defined(__aarch64__)
    f |= HD_CPU_NEON;
#endif
    return f;
}

void hd_cpu_feature_names(uint32_t features, char *out, int32_t cap) {
    static const char *const names[] = {"avx2", "avx512",    "avx512_vbmi", "avx512_bf16",
                                        "neon", "fast_bf16", "avx512_vnni"};
    out[0] = '\0';
    for (int i = 0; i < 7; i++) {
        if (!(features & (1u << i))) continue;
        size_t n = strlen(out);
        snprintf(out + n, (size_t)cap - n, "%s%s", n ? " " : "", names[i]);
    }
}
