/* moe_cpu.c - MoE operators across threads: router top-k, permutation, combination. The
 * router uses the reference row by row: its scores decide, so there is one way to compute
 * them. */
#include <string.h>

#include "base/checked.h"
#include "ops/cpu/cpu_internal.h"
#include "ops/ref/ref_internal.h"

enum { PERMUTE_SHARE = 2048 }; /* choices per task, at least */

static void route_rows(const ops_job *job, int32_t first, int32_t end, int32_t worker) {
    const hd_moe_topk_args *a = job->args;
    const size_t n = (size_t)ops_moe_topk_scratch(&a->rule);
    float *scratch = hd_stream_scratch(job->stream, worker, n * sizeof *scratch);
    for (int32_t r = first; r < end; r++) ops_moe_topk_row(a, r, scratch);
}

void ops_moe_topk_cpu(hd_stream *s, const hd_moe_topk_args *a, const ops_kernels *k) {
    ops_run_rows(&(ops_job){.stream = s,
                            .k = k,
                            .args = a,
                            .fn = route_rows,
                            .rows = a->rows,
                            .per_task = ops_rows_per_task(32 * (int64_t)a->rule.n_experts)});
}

void ops_moe_count_cpu(hd_stream *s, const hd_moe_count_args *a, const ops_kernels *k) {
    (void)k;
    hd_moe_count_ref(s, a);
}

void ops_moe_split_cpu(hd_stream *s, const hd_moe_split_args *a, const ops_kernels *k) {
    (void)k;
    hd_moe_split_ref(s, a);
}

typedef struct permute_job {
    hd_stream *stream;
    const hd_moe_permute_args *a;
    int32_t n, n_tasks;
} permute_job;

static void add_load(const hd_moe_permute_args *a) {
    for (int32_t r = 0; a->load && r < a->rows; r++) {
        const int32_t phase = a->phase ? a->phase[r] : 0;
        if (phase < 0) continue;
        int64_t *load = a->load + phase * a->load_stride;
        const int32_t *expert = a->expert + (int64_t)r * a->top_k;
        for (int32_t k = 0; k < a->top_k; k++) load[expert[k]]++;
    }
}

/* Adds to next[k] where slot k begins. */
static void add_begins(const hd_moe_permute_args *a, const int32_t *total, int32_t *next,
                       bool write) {
    int32_t before = 0;
    for (int32_t k = 0; k < a->n_slots; k++) {
        if (write) a->offset[k] = before;
        next[k] += before;
        before += total[k];
    }
}

/* Counts all choices, those before its own first one separately, and places its own. */
static void permute_task(const void *arg, int32_t task, int32_t worker) {
    const permute_job *job = arg;
    const hd_moe_permute_args *a = job->a;
    const int32_t first = (int32_t)((int64_t)job->n * task / job->n_tasks);
    const int32_t end = (int32_t)((int64_t)job->n * (task + 1) / job->n_tasks);
    const size_t n = (size_t)a->n_slots, bytes = n * sizeof(int32_t);
    int32_t *total = hd_stream_scratch(job->stream, worker, 2 * bytes), *next = total + n;
    memset(total, 0, bytes);
    for (int32_t i = 0; i < first; i++) total[ops_slot_of(a, i)]++;
    memcpy(next, total, bytes);
    for (int32_t i = first; i < job->n; i++) total[ops_slot_of(a, i)]++;
    add_begins(a, total, next, task == 0);
    for (int32_t i = first; i < end; i++) {
        const int32_t at = next[ops_slot_of(a, i)]++;
        a->assignment[at] = i;
        a->place[i] = at;
    }
    if (task > 0) return;
    a->offset[a->n_slots] = job->n;
    add_load(a);
}

/* Counts the rows of experts before its own first choice, and places its own where moe_split says. */
static void place_task(const void *arg, int32_t task, int32_t worker) {
    const permute_job *job = arg;
    const hd_moe_permute_args *a = job->a;
    const hd_split_graph g = hd_split_graph_in(a->graph, hd_permute_shape(a));
    const int32_t first = (int32_t)((int64_t)job->n * task / job->n_tasks);
    const int32_t end = (int32_t)((int64_t)job->n * (task + 1) / job->n_tasks);
    const size_t bytes = (size_t)a->n_experts * sizeof(int32_t);
    int32_t *next = hd_stream_scratch(job->stream, worker, bytes);
    memset(next, 0, bytes);
    for (int32_t i = 0; i < first; i++) next[a->expert[i]]++;
    for (int32_t i = first; i < end; i++) ops_place(a, &g, i, next[a->expert[i]]++);
    if (task == 0) add_load(a);
}

/* Every task counts all choices, which is cheap and saves a barrier between counting and
 * placing. */
void ops_moe_permute_cpu(hd_stream *s, const hd_moe_permute_args *a, const ops_kernels *k) {
    (void)k;
    permute_job job = {.stream = s, .a = a, .n = a->rows * a->top_k};
    const int32_t shares = (int32_t)hd_ceil_div(job.n, PERMUTE_SHARE);
    job.n_tasks = hd_max_i32(1, hd_min_i32(hd_stream_workers(s), shares));
    hd_stream_tasks(s, job.n_tasks, a->first ? place_task : permute_task, &job);
}

static void combine_rows(const ops_job *job, int32_t first, int32_t end, int32_t worker) {
    (void)worker;
    const hd_moe_combine_args *a = job->args;
    const size_t bytes = (size_t)a->cols * sizeof(float);
    for (int32_t t = first; t < end; t++) {
        const int32_t *place = a->place + (int64_t)t * a->top_k;
        const int32_t *expert = a->expert + (int64_t)t * a->top_k;
        float *out = act(a->out) + t * stride_of(a->out, a->cols);
        if (!a->shared.data) memset(out, 0, bytes);
        if (a->shared.data && a->shared.data != a->out.data) {
            memcpy(out, act_in(a->shared) + t * stride_of(a->shared, a->cols), bytes);
        }
        int32_t j = -1;
        for (int32_t done = 0; done < a->top_k;) {
            float coef[OPS_MIX_ROWS];
            const float *row[OPS_MIX_ROWS];
            int32_t n = 0;
            for (; n < OPS_MIX_ROWS && done < a->top_k; n++, done++) {
                j = ops_next_choice(expert, a->top_k, j);
                coef[n] = a->weight ? a->weight[(int64_t)t * a->top_k + j] : 1.0f;
                row[n] = act_in(a->y) + (int64_t)place[j] * a->cols;
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

void ops_moe_combine_cpu(hd_stream *s, const hd_moe_combine_args *a, const ops_kernels *k) {
    ops_run_rows(&(ops_job){.stream = s,
                            .k = k,
                            .args = a,
                            .fn = combine_rows,
                            .rows = a->rows,
                            .per_task = ops_rows_per_task((int64_t)a->top_k * a->cols)});
}
