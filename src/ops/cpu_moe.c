/* cpu_moe.c - routing, sorting and summing across threads. Choosing experts is the reference
 * row by row: a router's scores decide, so there is one way to compute them. */
#include <string.h>

#include "base/checked.h"
#include "ops/cpu_internal.h"
#include "ops/ref_internal.h"

static void route_rows(const ops_job *job, int32_t first, int32_t end, int32_t worker) {
    const hd_route_args *a = job->args;
    const size_t n = (size_t)ops_route_scratch(&a->rule);
    float *scratch = hd_stream_scratch(job->stream, worker, n * sizeof *scratch);
    for (int32_t r = first; r < end; r++) ops_route_row(a, r, scratch);
}

void ops_route_cpu(hd_stream *s, const hd_route_args *a, const ops_kernels *k) {
    ops_run_rows(&(ops_job){.stream = s,
                            .k = k,
                            .args = a,
                            .fn = route_rows,
                            .rows = a->rows,
                            .per_task = ops_rows_per_task(32 * (int64_t)a->rule.n_experts)});
}

/* A few numbers per token, in one pass. */
void ops_permute_cpu(hd_stream *s, const hd_permute_args *a, const ops_kernels *k) {
    (void)k;
    hd_permute_ref(s, a);
}

static void combine_rows(const ops_job *job, int32_t first, int32_t end, int32_t worker) {
    (void)worker;
    const hd_combine_args *a = job->args;
    const size_t bytes = (size_t)a->cols * sizeof(float);
    for (int32_t t = first; t < end; t++) {
        const int32_t *place = a->place + (int64_t)t * a->top_k;
        float *out = act(a->out) + (int64_t)t * a->cols;
        if (!a->shared) memset(out, 0, bytes);
        if (a->shared && a->shared != a->out) {
            memcpy(out, act_in(a->shared) + (int64_t)t * a->cols, bytes);
        }
        int32_t after = -1;
        for (int32_t done = 0; done < a->top_k;) {
            float coef[OPS_MIX_ROWS];
            const float *row[OPS_MIX_ROWS];
            int32_t n = 0;
            for (; n < OPS_MIX_ROWS && done < a->top_k; n++, done++) {
                const int32_t j = ops_next_choice(place, a->top_k, after);
                after = place[j];
                coef[n] = a->weight ? a->weight[(int64_t)t * a->top_k + j] : 1.0f;
                row[n] = act_in(a->y) + (int64_t)after * a->cols;
            }
            job->k->mix(&(ops_mix){.out = out,
                                   .coef = coef,
                                   .row = row,
                                   .n_out = 1,
                                   .n_rows = n,
                                   .cols = a->cols});
        }
    }
}

void ops_combine_cpu(hd_stream *s, const hd_combine_args *a, const ops_kernels *k) {
    ops_run_rows(&(ops_job){.stream = s,
                            .k = k,
                            .args = a,
                            .fn = combine_rows,
                            .rows = a->rows,
                            .per_task = ops_rows_per_task((int64_t)a->top_k * a->cols)});
}
