/* cpu_table.c - binds the CPU operators to the kernels of an instruction set. */
#include "base/cpu.h"
#include "ops/cpu_internal.h"

/* A table of its own for every set of kernels: operators take no context. */
#define ENTRY(op, kernels)                                              \
    static void op##_##kernels(hd_stream *s, const hd_##op##_args *a) { \
        ops_##op##_cpu(s, a, &ops_kernels_##kernels);                   \
    }

#define X(op) ENTRY(op, plain) ENTRY(op, plain_fast)
HD_OP_LIST(X)
#undef X

static const hd_ops plain = {.name = "cpu plain",
                             .act_bytes = sizeof(float),
#define X(op) .op = op##_plain,
                             HD_OP_LIST(X)
#undef X
};

static const hd_ops plain_fast = {.name = "cpu plain, fast",
                                  .act_bytes = sizeof(float),
#define X(op) .op = op##_plain_fast,
                                  HD_OP_LIST(X)
#undef X
};

#if defined(__x86_64__)

#define X(op)         \
    ENTRY(op, avx2)   \
    ENTRY(op, avx512) \
    ENTRY(op, vbmi) ENTRY(op, avx2_fast) ENTRY(op, avx512_fast) ENTRY(op, vnni_fast)
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

static const hd_ops avx2_fast = {.name = "cpu avx2, fast",
                                 .act_bytes = sizeof(float),
#define X(op) .op = op##_avx2_fast,
                                 HD_OP_LIST(X)
#undef X
};

static const hd_ops avx512_fast = {.name = "cpu avx512, fast",
                                   .act_bytes = sizeof(float),
#define X(op) .op = op##_avx512_fast,
                                   HD_OP_LIST(X)
#undef X
};

static const hd_ops vnni_fast = {.name = "cpu avx512 vnni, fast",
                                 .act_bytes = sizeof(float),
#define X(op) .op = op##_vnni_fast,
                                 HD_OP_LIST(X)
#undef X
};

#endif

void hd_ops_init_cpu(hd_ops *t, uint32_t cpu_flags, hd_precision precision) {
    const bool fast = precision == HD_FAST;
    *t = fast ? plain_fast : plain;
#if defined(__x86_64__)
    const uint32_t vnni = HD_CPU_AVX512_VBMI | HD_CPU_AVX512_VNNI;
    if (!(cpu_flags & HD_CPU_AVX2)) return;
    *t = fast ? avx2_fast : avx2;
    if (!(cpu_flags & HD_CPU_AVX512)) return;
    if (fast) {
        *t = (cpu_flags & vnni) == vnni ? vnni_fast : avx512_fast;
    } else {
        *t = cpu_flags & HD_CPU_AVX512_VBMI ? vbmi : avx512;
    }
#else
    (void)cpu_flags;
#endif
}
