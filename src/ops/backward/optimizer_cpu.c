/* optimizer_cpu.c - the optimizer's operators on the threads of a CPU. */
#include "base/checked.h"
#include "ops/backward/backward_cpu_internal.h"

enum { RANGE = 1 << 15 }; /* elements of a task */

static void squares_task(const void *arg, int32_t task, int32_t worker) {
    const hd_sum_squares_args *a = arg;
    const int64_t at = (int64_t)task * HD_SQUARES_BLOCK;
    (void)worker;
    a->sums[task] = back_square_sum(a->x + at, hd_min_i64(HD_SQUARES_BLOCK, a->n - at));
}

void back_sum_squares_cpu(hd_stream *s, const hd_sum_squares_args *a, const ops_kernels *k) {
    (void)k;
    hd_stream_tasks(s, (int32_t)hd_ceil_div(a->n, HD_SQUARES_BLOCK), squares_task, a);
}

static void adamw_task(const void *arg, int32_t task, int32_t worker) {
    const hd_adamw_args *a = arg;
    const int64_t begin = (int64_t)task * RANGE;
    (void)worker;
    back_adamw_range(a, begin, hd_min_i64(begin + RANGE, a->n));
}

void back_adamw_cpu(hd_stream *s, const hd_adamw_args *a, const ops_kernels *k) {
    (void)k;
    hd_stream_tasks(s, (int32_t)hd_ceil_div(a->n, RANGE), adamw_task, a);
}

typedef struct muon_job {
    hd_stream *s;
    const hd_muon_args *a;
} muon_job;

static void muon_task(const void *arg, int32_t task, int32_t worker) {
    const muon_job *job = arg;
    const size_t bytes = hd_muon_scratch(job->a->rows, job->a->cols);
    back_muon_matrix(job->a, task, hd_stream_scratch(job->s, worker, bytes));
}

void back_muon_cpu(hd_stream *s, const hd_muon_args *a, const ops_kernels *k) {
    const muon_job job = {s, a};
    (void)k;
    hd_stream_tasks(s, a->n, muon_task, &job);
}
