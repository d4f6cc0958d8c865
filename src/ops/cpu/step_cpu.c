/* step_cpu.c - laying and settling steps of a fixed shape: a few numbers per sequence. */
#include "ops/cpu/cpu_internal.h"
#include "ops/ref/ref_internal.h"

void ops_lay_step_cpu(hd_stream *s, const hd_lay_step_args *a, const ops_kernels *k) {
    (void)k;
    hd_lay_step_ref(s, a);
}

void ops_settle_step_cpu(hd_stream *s, const hd_settle_step_args *a, const ops_kernels *k) {
    (void)k;
    hd_settle_step_ref(s, a);
}

void ops_lay_draft_cpu(hd_stream *s, const hd_lay_draft_args *a, const ops_kernels *k) {
    (void)k;
    hd_lay_draft_ref(s, a);
}

void ops_carry_cpu(hd_stream *s, const hd_carry_args *a, const ops_kernels *k) {
    (void)k;
    hd_carry_ref(s, a);
}

void ops_stamp_cpu(hd_stream *s, const hd_stamp_args *a, const ops_kernels *k) {
    (void)k;
    hd_stamp_ref(s, a);
}
