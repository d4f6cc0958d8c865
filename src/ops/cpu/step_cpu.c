/* step_cpu.c - the operators of decode graph steps on the CPU: a few numbers per sequence,
 * so they call the reference. */
#include "ops/cpu/cpu_internal.h"
#include "ops/ref/ref_internal.h"

void ops_prepare_step_cpu(hd_stream *s, const hd_prepare_step_args *a, const ops_kernels *k) {
    (void)k;
    hd_prepare_step_ref(s, a);
}

void ops_commit_step_cpu(hd_stream *s, const hd_commit_step_args *a, const ops_kernels *k) {
    (void)k;
    hd_commit_step_ref(s, a);
}

void ops_prepare_draft_cpu(hd_stream *s, const hd_prepare_draft_args *a, const ops_kernels *k) {
    (void)k;
    hd_prepare_draft_ref(s, a);
}

void ops_prepare_block_cpu(hd_stream *s, const hd_prepare_block_args *a, const ops_kernels *k) {
    (void)k;
    hd_prepare_block_ref(s, a);
}

void ops_mirror_cpu(hd_stream *s, const hd_mirror_args *a, const ops_kernels *k) {
    (void)k;
    hd_mirror_ref(s, a);
}

void ops_timestamp_cpu(hd_stream *s, const hd_timestamp_args *a, const ops_kernels *k) {
    (void)k;
    hd_timestamp_ref(s, a);
}
