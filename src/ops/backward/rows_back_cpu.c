/* rows_back_cpu.c - gradients whose rows are independent: the reference on a few rows per task,
 * to the same bits. */
#include <string.h>

#include "base/checked.h"
#include "ops/backward/backward_cpu_internal.h"

enum { TASK_STEPS = 1 << 15 }; /* elements of a task, about */

static int32_t rows_per_task(int64_t steps_per_row) {
    return hd_max_i32(1, (int32_t)(TASK_STEPS / (steps_per_row + 1)));
}

typedef struct slices {
    const void *args;
    hd_stream *s;
    int32_t rows, per_task;
} slices;

/* Rows of task `task`: from *first on, the number is returned. */
static int32_t slice(const slices *all, int32_t task, int32_t *first) {
    *first = task * all->per_task;
    return hd_min_i32(all->per_task, all->rows - *first);
}

static void run(const slices *all, hd_task_fn *fn) {
    hd_stream_tasks(all->s, (int32_t)hd_ceil_div(all->rows, all->per_task), fn, all);
}

static hd_rows rows_from(hd_rows t, int64_t first, int64_t width) {
    t.data = act(t) + first * stride_of(t, width);
    return t;
}

static void swiglu_task(const void *arg, int32_t task, int32_t worker) {
    const slices *all = arg;
    hd_swiglu_back_args a = *(const hd_swiglu_back_args *)all->args;
    int32_t first;
    (void)worker;
    a.rows = slice(all, task, &first);
    const int64_t at = (int64_t)first * a.cols;
    a.dgate += at;
    a.dup += at;
    a.g = rows_from(a.g, first, a.cols);
    a.gate = rows_from(a.gate, first, a.cols);
    a.up = rows_from(a.up, first, a.cols);
    if (a.assignment) {
        a.assignment += first;
    } else {
        if (a.weight) a.weight += first;
        if (a.dweight) a.dweight += first;
    }
    hd_swiglu_back_ref(all->s, &a);
}

void back_swiglu_back_cpu(hd_stream *s, const hd_swiglu_back_args *a, const ops_kernels *k) {
    (void)k;
    run(&(slices){a, s, a->rows, rows_per_task(8 * (int64_t)a->cols)}, swiglu_task);
}

static void hc_post_task(const void *arg, int32_t task, int32_t worker) {
    const slices *all = arg;
    hd_hc_post_back_args a = *(const hd_hc_post_back_args *)all->args;
    int32_t first;
    (void)worker;
    a.rows = slice(all, task, &first);
    const int64_t wide = (int64_t)a.hc * a.cols;
    a.dx += first * wide;
    a.dy += (int64_t)first * a.cols;
    a.dpost += (int64_t)first * a.hc;
    a.dcomb += (int64_t)first * a.hc * a.hc;
    a.g = rows_from(a.g, first, wide);
    a.x = rows_from(a.x, first, wide);
    a.y = rows_from(a.y, first, a.cols);
    a.post += (int64_t)first * a.hc;
    a.comb += (int64_t)first * a.hc * a.hc;
    hd_hc_post_back_ref(all->s, &a);
}

void back_hc_post_back_cpu(hd_stream *s, const hd_hc_post_back_args *a, const ops_kernels *k) {
    (void)k;
    run(&(slices){a, s, a->rows, rows_per_task((int64_t)a->hc * a->hc * a->cols)},
        hc_post_task);
}

/* Rows of gradients of scale and base lie apart, for sums in the order of rows. */
static void hc_pre_task(const void *arg, int32_t task, int32_t worker) {
    const slices *all = arg;
    const hd_hc_pre_back_args *a = all->args;
    const int32_t each = 3 + 2 * a->hc + a->hc * a->hc;
    int32_t first;
    const int32_t n = slice(all, task, &first);
    (void)worker;
    for (int32_t r = first; r < first + n; r++) {
        float *part = a->part + (int64_t)r * each;
        memset(part, 0, (size_t)each * sizeof *part);
        back_hc_pre_row(a, r, part, part + 3);
    }
}

void back_hc_pre_back_cpu(hd_stream *s, const hd_hc_pre_back_args *a, const ops_kernels *k) {
    const int32_t n = 2 * a->hc + a->hc * a->hc;
    const int64_t steps = 4 * (int64_t)n * a->hc * a->cols;
    (void)k;
    run(&(slices){a, s, a->rows, rows_per_task(steps)}, hc_pre_task);
    for (int32_t r = 0; r < a->rows; r++) {
        const float *part = a->part + (int64_t)r * (3 + n);
        for (int32_t i = 0; a->dscale && i < 3; i++) a->dscale[i] += part[i];
        for (int32_t i = 0; a->dbase && i < n; i++) a->dbase[i] += part[3 + i];
    }
}

static void cross_entropy_task(const void *arg, int32_t task, int32_t worker) {
    const slices *all = arg;
    hd_cross_entropy_args a = *(const hd_cross_entropy_args *)all->args;
    int32_t first;
    (void)worker;
    a.rows = slice(all, task, &first);
    a.logits += (int64_t)first * a.vocab;
    a.logprob += first;
    a.entropy += first;
    a.target += first;
    if (a.factor) a.factor += first;
    if (a.entropy_factor) a.entropy_factor += first;
    if (a.temperature) a.temperature += first;
    hd_cross_entropy_ref(all->s, &a);
}

void back_cross_entropy_cpu(hd_stream *s, const hd_cross_entropy_args *a,
                            const ops_kernels *k) {
    (void)k;
    run(&(slices){a, s, a->rows, rows_per_task(16 * (int64_t)a->vocab)}, cross_entropy_task);
}
