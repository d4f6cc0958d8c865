/* rows_back_cpu.c - gradients whose rows are independent, a few rows per task: over the kernels of an
 * instruction set, or the reference to the same bits. */
#include <math.h>
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

/* `all` is the first member of what the task gets. */
static void run(const slices *all, hd_task_fn *fn) {
    hd_stream_tasks(all->s, (int32_t)hd_ceil_div(all->rows, all->per_task), fn, all);
}

static hd_rows rows_from(hd_rows t, int64_t first, int64_t width) {
    t.data = act(t) + first * stride_of(t, width);
    return t;
}

/* sum of a[i] b[i], in as many partial sums as there are lanes */
static double dot(const float *restrict a, const float *restrict b, int32_t n) {
    double part[OPS_LANES] = {0}, sum = 0.0;
    int32_t i = 0;
    for (; i + OPS_LANES <= n; i += OPS_LANES) {
        for (int32_t u = 0; u < OPS_LANES; u++) part[u] += (double)a[i + u] * (double)b[i + u];
    }
    for (; i < n; i++) sum += (double)a[i] * (double)b[i];
    for (int32_t u = 0; u < OPS_LANES; u++) sum += part[u];
    return sum;
}

/* ---- SwiGLU ---- */

enum { STRETCH = 256 };

typedef struct swiglu_job {
    slices all;
    const ops_kernels *k;
} swiglu_job;

/* n elements of a row from `at` on; returns their part of the gradient of `weight`. */
static double swiglu_stretch(const swiglu_job *job, int64_t at, int32_t n, float weight) {
    const hd_swiglu_back_args *a = job->all.args;
    const float limit = a->limit > 0.0f ? a->limit : INFINITY;
    const float *restrict gate = act_in(a->gate) + at, *restrict up = act_in(a->up) + at;
    float *restrict dgate = a->dgate + at, *restrict dup = a->dup + at;
    float e[STRETCH], g[STRETCH]; /* dgate may be g */
    memcpy(g, act_in(a->g) + at, (size_t)n * sizeof *g);
    for (int32_t i = 0; i < n; i++) e[i] = gate[i] < limit ? -gate[i] : -limit;
    job->k->exp_sum(e, n, 0.0f);
    for (int32_t i = 0; i < n; i++) {
        const float x = gate[i] < limit ? gate[i] : limit, top = up[i] < limit ? up[i] : limit;
        const float u = top > -limit ? top : -limit, share = 1.0f / (1.0f + e[i]);
        const float dx = g[i] * weight * u * share * (1.0f + x * (1.0f - share));
        const float du = g[i] * weight * x * share;
        dgate[i] = gate[i] <= limit ? dx : 0.0f;
        dup[i] = fabsf(up[i]) <= limit ? du : 0.0f;
        e[i] = x * share * u;
    }
    return dot(g, e, n);
}

static void swiglu_task(const void *arg, int32_t task, int32_t worker) {
    const swiglu_job *job = arg;
    const hd_swiglu_back_args *a = job->all.args;
    int32_t first;
    const int32_t n = slice(&job->all, task, &first);
    (void)worker;
    for (int32_t r = first; r < first + n; r++) {
        const int32_t choice = a->assignment ? a->assignment[r] : r;
        const float weight = a->weight ? a->weight[choice] : 1.0f;
        double along = 0.0;
        for (int32_t c = 0; c < a->cols; c += STRETCH) {
            along += swiglu_stretch(job, (int64_t)r * a->cols + c,
                                    hd_min_i32(STRETCH, a->cols - c), weight);
        }
        if (a->dweight) a->dweight[choice] = (float)along;
    }
}

void back_swiglu_back_cpu(hd_stream *s, const hd_swiglu_back_args *a, const ops_kernels *k) {
    const swiglu_job job = {
        {a, s, a->rows, rows_per_task(a->cols)},
        k
    };
    run(&job.all, swiglu_task);
}

/* ---- RMS norm ---- */

enum { NORM_COLS = 64 }; /* of a task of dweight */

typedef struct norm_job {
    slices all;
    const ops_kernels *k;
} norm_job;

static double inverse_rms(const norm_job *job, const float *x) {
    const hd_rms_norm_back_args *a = job->all.args;
    return 1.0 / sqrt(job->k->square_sum(x, a->cols) / a->cols + (double)a->eps);
}

static const float *norm_x(const hd_rms_norm_back_args *a, int32_t r) {
    return act_in(a->x) + r * stride_of(a->x, a->cols);
}

static const float *norm_g(const hd_rms_norm_back_args *a, int32_t r) {
    return act_in(a->g) + r * stride_of(a->g, a->cols);
}

static void norm_scale_task(const void *arg, int32_t task, int32_t worker) {
    const norm_job *job = arg;
    const hd_rms_norm_back_args *a = job->all.args;
    int32_t first;
    const int32_t n = slice(&job->all, task, &first);
    (void)worker;
    for (int32_t r = first; r < first + n; r++) a->scale[r] = inverse_rms(job, norm_x(a, r));
}

/* A task owns columns: it adds row after row to them. */
static void norm_weight_task(const void *arg, int32_t task, int32_t worker) {
    const norm_job *job = arg;
    const hd_rms_norm_back_args *a = job->all.args;
    const int32_t col = task * NORM_COLS, n = hd_min_i32(NORM_COLS, a->cols - col);
    float *restrict dweight = a->dweight + col;
    (void)worker;
    for (int32_t r = 0; r < a->rows; r++) {
        const float *restrict g = norm_g(a, r) + col, *restrict x = norm_x(a, r) + col;
        const float scale = (float)a->scale[r];
        int32_t c = 0;
        for (; c + OPS_LANES <= n; c += OPS_LANES) {
            for (int32_t u = 0; u < OPS_LANES; u++) {
                dweight[c + u] += g[c + u] * (x[c + u] * scale);
            }
        }
        for (; c < n; c++) dweight[c] += g[c] * (x[c] * scale);
    }
}

/* dx = scale dx - pull x */
static void pull_towards(float *restrict dx, const float *restrict x, float scale, float pull,
                         int32_t n) {
    int32_t i = 0;
    for (; i + OPS_LANES <= n; i += OPS_LANES) {
        for (int32_t u = 0; u < OPS_LANES; u++) dx[i + u] = scale * dx[i + u] - pull * x[i + u];
    }
    for (; i < n; i++) dx[i] = scale * dx[i] - pull * x[i];
}

static void norm_rows_task(const void *arg, int32_t task, int32_t worker) {
    const norm_job *job = arg;
    const hd_rms_norm_back_args *a = job->all.args;
    int32_t first;
    const int32_t n = slice(&job->all, task, &first);
    (void)worker;
    for (int32_t r = first; r < first + n; r++) {
        const float *x = norm_x(a, r), *g = norm_g(a, r);
        float *dx = act(a->dx) + r * stride_of(a->dx, a->cols); /* may be g */
        const double inverse = a->dweight ? a->scale[r] : inverse_rms(job, x);
        ops_scale(dx, g, a->weight, 1.0f, a->cols);
        const double along = dot(dx, x, a->cols);
        const float scale = (float)inverse,
                    pull = (float)(inverse * inverse * inverse * along / a->cols);
        pull_towards(dx, x, scale, pull, a->cols);
    }
}

void back_rms_norm_back_cpu(hd_stream *s, const hd_rms_norm_back_args *a,
                            const ops_kernels *k) {
    const norm_job job = {
        {a, s, a->rows, rows_per_task(a->cols)},
        k
    };
    if (a->dweight) {
        run(&job.all, norm_scale_task);
        hd_stream_tasks(s, (int32_t)hd_ceil_div(a->cols, NORM_COLS), norm_weight_task, &job);
    }
    run(&job.all, norm_rows_task);
}

/* ---- hyper-connections ---- */

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
