/* loss_back_cpu.c - the loss over the kernels of an instruction set: a task has a few rows, and takes
 * their logits in stretches. Log-probabilities have the sampler's bits; of gradients and entropies the
 * exponentials are float32. */
#include <math.h>

#include "base/checked.h"
#include "ops/backward/backward_cpu_internal.h"
#include "ops/ref/sample_internal.h"

enum { STRETCH = 512, TASK_LOGITS = 1 << 15 };

/* Scores so far below the largest have no probability, and their entropy is 0. */
static const float LEAST = -200.0f;

typedef struct loss_job {
    const hd_cross_entropy_args *a;
    const ops_kernels *k;
    int32_t per_task; /* rows */
} loss_job;

/* One row of logits. With z = (l - max) * inverse: total = sum of exp(z), along = sum of exp(z) z. */
typedef struct row_loss {
    const ops_kernels *k;
    float max, inverse;
    double total, along;
    uint64_t weights; /* the sampler's sum of exp(z) */
} row_loss;

/* z and e = exp(z) of n logits; returns the sum of e. */
static float exponentials(const row_loss *x, float *restrict z, float *restrict e,
                          const float *restrict l, int32_t n) {
    for (int32_t i = 0; i < n; i++) {
        const float below = (l[i] - x->max) * x->inverse;
        z[i] = e[i] = below < LEAST ? LEAST : below; /* NaN stays NaN */
    }
    return x->k->exp_sum(e, n, 0.0f);
}

static void add_stretch(row_loss *x, const float *l, int32_t n) {
    float z[STRETCH], e[STRETCH];
    uint64_t weight[STRETCH];
    x->k->weigh(z, weight, l, n, x->max, x->inverse);
    for (int32_t i = 0; i < n; i++) x->weights += weight[i];
    x->total += (double)exponentials(x, z, e, l, n);
    x->along += (double)back_dot(e, z, n);
}

/* l = factor p inverse + more p (log p + entropy) inverse; the target is not yet subtracted. */
static void differentiate(const row_loss *x, float *l, int32_t n, float factor, float more,
                          float entropy) {
    float z[STRETCH], e[STRETCH];
    const float scale = (float)((double)x->inverse / x->total);
    const float offset = entropy - (float)log(x->total);
    exponentials(x, z, e, l, n);
    if (more == 0.0f) {
        for (int32_t i = 0; i < n; i++) l[i] = e[i] * (factor * scale);
        return;
    }
    for (int32_t i = 0; i < n; i++) l[i] = e[i] * (factor + more * (z[i] + offset)) * scale;
}

static void row_of(const hd_cross_entropy_args *a, const ops_kernels *k, int32_t r) {
    float *l = a->logits + (int64_t)r * a->vocab;
    const float temperature = a->temperature ? a->temperature[r] : 1.0f;
    row_loss x = {
        .k = k, .max = k->max(l, a->vocab), .inverse = ops_inverse_temperature(temperature)};
    for (int32_t i = 0; i < a->vocab; i += STRETCH) {
        add_stretch(&x, l + i, hd_min_i32(STRETCH, a->vocab - i));
    }
    a->logprob[r] =
        ops_logprob(l[a->target[r]], x.inverse, ops_log_total(x.max, x.inverse, x.weights));
    a->entropy[r] = (float)(log(x.total) - x.along / x.total);
    if (!a->factor) return;
    const float more = a->entropy_factor ? a->entropy_factor[r] : 0.0f;
    for (int32_t i = 0; i < a->vocab; i += STRETCH) {
        differentiate(&x, l + i, hd_min_i32(STRETCH, a->vocab - i), a->factor[r], more,
                      a->entropy[r]);
    }
    l[a->target[r]] -= a->factor[r] * x.inverse;
}

static void loss_task(const void *arg, int32_t task, int32_t worker) {
    const loss_job *job = arg;
    const int32_t first = task * job->per_task;
    (void)worker;
    for (int32_t r = first; r < hd_min_i32(first + job->per_task, job->a->rows); r++) {
        row_of(job->a, job->k, r);
    }
}

void back_cross_entropy_cpu(hd_stream *s, const hd_cross_entropy_args *a,
                            const ops_kernels *k) {
    const loss_job job = {a, k, hd_max_i32(1, TASK_LOGITS / hd_max_i32(1, a->vocab))};
    hd_stream_tasks(s, (int32_t)hd_ceil_div(a->rows, job.per_task), loss_task, &job);
}
