/* table_cpu.c - binds the CPU operators to the kernels of an instruction set (run-time
 * dispatch). */
#include "base/cpu.h"
#include "ops/check_internal.h"
#include "ops/cpu/cpu_internal.h"
#include "ops/fused_internal.h"

/* The fused operators are those that they stand for, in order. */
#define RUN(part, args) ops_##part##_cpu(s, args, k)
#define X(op)                                                                          \
    void ops_##op##_cpu(hd_stream *s, const hd_##op##_args *a, const ops_kernels *k) { \
        OPS_RUN_##op(RUN, a)                                                           \
    }
OPS_FUSED_LIST(X)
#undef X
#undef RUN

static const ops_types cpu_types = {1u << HD_F32, OPS_ENTRY_TYPES, OPS_ENTRY_TYPES};

/* One operator table per set of kernels, since operators have no context: first a function
 * for each operator, then the table. ENTRY_##set and FIELD_##set name their set, because the
 * list of operators passes only the operator. */
#define ENTRY(op, set)                                                                  \
    static void op##_##set(hd_stream *s, const hd_##op##_args *a) {                     \
        if (ops_check_##op(s, &cpu_types, a)) ops_##op##_cpu(s, a, &ops_kernels_##set); \
    }
#define TABLE(set, title, how, format)                \
    HD_OP_LIST(ENTRY_##set)                           \
    static const hd_ops set = {.name = title,         \
                               .act_type = HD_F32,    \
                               .precision = how,      \
                               .activations = format, \
                               HD_OP_LIST(FIELD_##set)};

#define ENTRY_plain(op) ENTRY(op, plain)
#define FIELD_plain(op) .op = op##_plain,
TABLE(plain, "cpu plain", HD_EXACT, "float32")

#if defined(__x86_64__)

#define ENTRY_avx2(op) ENTRY(op, avx2)
#define FIELD_avx2(op) .op = op##_avx2,
TABLE(avx2, "cpu avx2", HD_EXACT, "float32")

#define ENTRY_avx512(op) ENTRY(op, avx512)
#define FIELD_avx512(op) .op = op##_avx512,
TABLE(avx512, "cpu avx512", HD_EXACT, "float32")

#define ENTRY_vbmi(op) ENTRY(op, vbmi)
#define FIELD_vbmi(op) .op = op##_vbmi,
TABLE(vbmi, "cpu avx512 vbmi", HD_EXACT, "float32")

#define ENTRY_int16(op) ENTRY(op, int16)
#define FIELD_int16(op) .op = op##_int16,
TABLE(int16, "cpu avx2, fast", HD_FAST, "14-bit integers (AVX2)")

#define ENTRY_vnni(op) ENTRY(op, vnni)
#define FIELD_vnni(op) .op = op##_vnni,
TABLE(vnni, "cpu avx512 vnni, fast", HD_FAST, "14-bit integers (AVX-512 VNNI)")

#define ENTRY_bf16(op) ENTRY(op, bf16)
#define FIELD_bf16(op) .op = op##_bf16,
TABLE(bf16, "cpu avx512 bf16, fast", HD_FAST, "bfloat16 (AVX-512 BF16)")

#endif

#if defined(__x86_64__)

static bool has(uint32_t flags, uint32_t all) {
    return (flags & all) == all;
}

static hd_ops fast(uint32_t flags) {
    if (!has(flags, HD_CPU_AVX512)) return int16;
    if (has(flags, HD_CPU_AVX512_VBMI | HD_CPU_AVX512_BF16 | HD_CPU_FAST_BF16)) return bf16;
    return has(flags, HD_CPU_AVX512_VNNI) ? vnni : int16;
}

static hd_ops exact(uint32_t flags) {
    if (!has(flags, HD_CPU_AVX512)) return avx2;
    return has(flags, HD_CPU_AVX512_VBMI) ? vbmi : avx512;
}

#endif

void hd_ops_init_cpu(hd_ops *t, uint32_t cpu_flags, hd_precision precision) {
    *t = plain;
#if defined(__x86_64__)
    if (!has(cpu_flags, HD_CPU_AVX2)) return;
    *t = precision == HD_FAST ? fast(cpu_flags) : exact(cpu_flags);
#else
    (void)cpu_flags;
    (void)precision;
#endif
}
