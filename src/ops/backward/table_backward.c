/* table_backward.c - the tables of backward operators: the reference, and per instruction set
 * what is faster. */
#include "base/cpu.h"
#include "ops/backward/backward_cpu_internal.h"

void hd_backward_init_ref(hd_backward_ops *t) {
    *t = (hd_backward_ops){
#define X(op) .op = hd_##op##_ref,
        HD_BACKWARD_OP_LIST(X)
#undef X
    };
}

/* Functions that bind the operators to one set of kernels, and one that enters them. The macros
 * name their set, because the list passes only the operator. */
#define ENTRY(op, set)                                              \
    static void op##_##set(hd_stream *s, const hd_##op##_args *a) { \
        back_##op##_cpu(s, a, &ops_kernels_##set);                  \
    }

#define ENTRY_plain(op) ENTRY(op, plain)
HD_BACKWARD_CPU_LIST(ENTRY_plain)

static void enter_plain(hd_backward_ops *t) {
#define X(op) t->op = op##_plain;
    HD_BACKWARD_CPU_LIST(X)
#undef X
}

#if defined(__x86_64__)

#define ENTRY_avx2(op)   ENTRY(op, avx2)
#define ENTRY_avx512(op) ENTRY(op, avx512)
HD_BACKWARD_CPU_LIST(ENTRY_avx2)
HD_BACKWARD_CPU_LIST(ENTRY_avx512)

static void enter_avx2(hd_backward_ops *t) {
#define X(op) t->op = op##_avx2;
    HD_BACKWARD_CPU_LIST(X)
#undef X
}

static void enter_avx512(hd_backward_ops *t) {
#define X(op) t->op = op##_avx512;
    HD_BACKWARD_CPU_LIST(X)
#undef X
}

#endif

void hd_backward_init_cpu(hd_backward_ops *t, uint32_t cpu_flags) {
    hd_backward_init_ref(t);
    enter_plain(t);
#if defined(__x86_64__)
    if (cpu_flags & HD_CPU_AVX2) enter_avx2(t);
    if ((cpu_flags & HD_CPU_AVX2) && (cpu_flags & HD_CPU_AVX512)) enter_avx512(t);
#else
    (void)cpu_flags;
#endif
}
