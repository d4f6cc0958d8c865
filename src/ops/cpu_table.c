/* cpu_table.c - binds the CPU operators to the kernels of an instruction set. */
#include "base/cpu.h"
#include "ops/cpu_internal.h"

#define X(op)                                                       \
    static void op##_plain(hd_stream *s, const hd_##op##_args *a) { \
        ops_##op##_cpu(s, a, &ops_kernels_plain);                   \
    }
HD_OP_LIST(X)
#undef X

static const hd_ops plain = {.name = "cpu plain",
                             .act_bytes = sizeof(float),
#define X(op) .op = op##_plain,
                             HD_OP_LIST(X)
#undef X
};

#if defined(__x86_64__)

#define X(op)                                                        \
    static void op##_avx2(hd_stream *s, const hd_##op##_args *a) {   \
        ops_##op##_cpu(s, a, &ops_kernels_avx2);                     \
    }                                                                \
    static void op##_avx512(hd_stream *s, const hd_##op##_args *a) { \
        ops_##op##_cpu(s, a, &ops_kernels_avx512);                   \
    }                                                                \
    static void op##_vbmi(hd_stream *s, const hd_##op##_args *a) {   \
        ops_##op##_cpu(s, a, &ops_kernels_vbmi);                     \
    }
HD_OP_LIST(X)
#undef X

static const hd_ops avx2 = {.name = "cpu avx2",
                            .act_bytes = sizeof(float),
#define X(op) .op = op##_avx2,
                            HD_OP_LIST(X)
#undef X
};

static const hd_ops avx512 = {.name = "cpu avx512",
                              .act_bytes = sizeof(float),
#define X(op) .op = op##_avx512,
                              HD_OP_LIST(X)
#undef X
};

static const hd_ops vbmi = {.name = "cpu avx512 vbmi",
                            .act_bytes = sizeof(float),
#define X(op) .op = op##_vbmi,
                            HD_OP_LIST(X)
#undef X
};

#endif

void hd_ops_init_cpu(hd_ops *t, uint32_t cpu_flags) {
    *t = plain;
#if defined(__x86_64__)
    if (!(cpu_flags & HD_CPU_AVX2)) return;
    *t = avx2;
    if (!(cpu_flags & HD_CPU_AVX512)) return;
    *t = cpu_flags & HD_CPU_AVX512_VBMI ? vbmi : avx512;
#else
    (void)cpu_flags;
#endif
}
