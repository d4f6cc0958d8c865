/* fetch_cpu.c - moe_fetch across threads: they copy the experts that the reference chose. */
#include "ops/cpu/cpu_internal.h"
#include "ops/fetch/fetch_internal.h"

static void fetch_task(const void *args, int32_t task, int32_t worker) {
    (void)worker;
    ops_fetch_matrix(args, task);
}

void ops_moe_fetch_cpu(hd_stream *s, const hd_moe_fetch_args *a, const ops_kernels *k) {
    (void)k;
    hd_stream_tasks(s, ops_fetch_plan(a) * HD_EXPERT_MATRICES, fetch_task, a);
    ops_fetch_timed(a);
}

void ops_moe_round_cpu(hd_stream *s, const hd_moe_round_args *a, const ops_kernels *k) {
    (void)k;
    hd_moe_round_ref(s, a);
}

void ops_moe_join_cpu(hd_stream *s, const hd_moe_join_args *a, const ops_kernels *k) {
    (void)k;
    hd_moe_join_ref(s, a);
}
