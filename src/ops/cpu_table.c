/* cpu_table.c - binds the CPU operators to the kernels of an instruction set. */
#include "base/cpu.h"
#include "ops/cpu_internal.h"

/* A table of its own for every set of kernels, since operators take no context: first a function
 * for each operator, then the table of them. ENTRY_##set and FIELD_##set name their set, because
 * the list of operators passes nothing but the operator. */
#define ENTRY(op, set)                                              \
    static void op##_##set(hd_stream *s, const hd_##op##_args *a) { \
        ops_##op##_cpu(s, a, &ops_kernels_##set);                   \
    }
#define TABLE(set, title)       \
    HD_OP_LIST(ENTRY_##set)     \
    static const hd_ops set = { \
        .name = title, .act_bytes = sizeof(float), HD_OP_LIST(FIELD_##set)};

#define ENTRY_plain(op) ENTRY(op, plain)
#define FIELD_plain(op) .op = op##_plain,
TABLE(plain, "cpu plain")

#define ENTRY_plain_fast(op) ENTRY(op, plain_fast)
#define FIELD_plain_fast(op) .op = op##_plain_fast,
TABLE(plain_fast, "cpu plain, fast")

#if defined(__x86_64__)

#define ENTRY_avx2(op) ENTRY(op, avx2)
#define FIELD_avx2(op) .op = op##_avx2,
TABLE(avx2, "cpu avx2")

#define ENTRY_avx512(op) ENTRY(op, avx512)
#define FIELD_avx512(op) .op = op##_avx512,
TABLE(avx512, "cpu avx512")

#define ENTRY_vbmi(op) ENTRY(op, vbmi)
#define FIELD_vbmi(op) .op = op##_vbmi,
TABLE(vbmi, "cpu avx512 vbmi")

#define ENTRY_avx2_fast(op) ENTRY(op, avx2_fast)
#define FIELD_avx2_fast(op) .op = op##_avx2_fast,
TABLE(avx2_fast, "cpu avx2, fast")

#define ENTRY_avx512_fast(op) ENTRY(op, avx512_fast)
#define FIELD_avx512_fast(op) .op = op##_avx512_fast,
TABLE(avx512_fast, "cpu avx512, fast")

#define ENTRY_vnni_fast(op) ENTRY(op, vnni_fast)
#define FIELD_vnni_fast(op) .op = op##_vnni_fast,
TABLE(vnni_fast, "cpu avx512 vnni, fast")

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
