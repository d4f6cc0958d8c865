/* optimizer.c - AdamW (Loshchilov and Hutter, 2019) and Muon (Jordan, 2024: momentum whose
 * matrix is replaced by the nearest semi-orthogonal one). One task updates one parameter. */
#include "train/optimizer.h"

#include <math.h>
#include <string.h>

enum { NORM_PARTS = 64, NEWTON_SCHULZ_STEPS = 5 };

/* The update's root mean square is that of AdamW's, so that rates compare. */
static const float MUON_SCALE = 0.2f;

double hd_schedule_at(const hd_schedule *s, int64_t step) {
    if (step < s->warmup) return (double)(step + 1) / (double)s->warmup;
    if (s->kind == HD_SCHEDULE_CONSTANT) return 1.0;
    const int64_t rest = s->steps - s->warmup;
    const double done = rest > 1 ? (double)(step - s->warmup) / (double)(rest - 1) : 0.0;
    const double along = done < 1.0 ? done : 1.0;
    return s->last + (1.0 - s->last) * 0.5 * (1.0 + cos(acos(-1.0) * along));
}

/* ---- the global norm ---- */

typedef struct norm_job {
    const hd_parameter *p;
    int32_t n;
    double *sums; /* [NORM_PARTS] */
} norm_job;

/* Part i sums the parameters i, i + NORM_PARTS, ... in order. */
static void sum_squares(const void *arg, int32_t task, int32_t worker) {
    const norm_job *job = arg;
    double sum = 0.0;
    (void)worker;
    for (int32_t i = task; i < job->n; i += NORM_PARTS) {
        const hd_parameter *p = &job->p[i];
        for (int64_t k = 0; p->grad && k < p->n; k++)
            sum += (double)p->grad[k] * (double)p->grad[k];
    }
    job->sums[task] = sum;
}

double hd_optimizer_squares(const hd_parameter *p, int32_t n, hd_stream *s) {
    double sums[NORM_PARTS], total = 0.0;
    const norm_job job = {p, n, sums};
    hd_stream_tasks(s, NORM_PARTS, sum_squares, &job);
    for (int i = 0; i < NORM_PARTS; i++) total += sums[i];
    return total;
}

/* ---- AdamW ---- */

typedef struct update_job {
    const hd_optimizer_options *o;
    const hd_parameter *p;
    hd_stream *s;
    float clip; /* factor of the gradients */
    float rate, muon_rate;
    float correction1, correction2; /* 1 / (1 - beta^t) */
} update_job;

static void adamw(const update_job *job, const hd_parameter *p) {
    const float b1 = (float)job->o->beta1, b2 = (float)job->o->beta2, eps = (float)job->o->eps;
    const float keep = p->decays ? 1.0f - job->rate * (float)job->o->decay : 1.0f;
    for (int64_t i = 0; i < p->n; i++) {
        const float g = p->grad[i] * job->clip;
        p->first[i] = b1 * p->first[i] + (1.0f - b1) * g;
        p->second[i] = b2 * p->second[i] + (1.0f - b2) * g * g;
        const float size = sqrtf(p->second[i] * job->correction2) + eps;
        p->master[i] =
            p->master[i] * keep - job->rate * (p->first[i] * job->correction1) / size;
    }
}

/* ---- Muon ---- */

/* out[n, n] = x x^T of x [n, k] */
static void gram(float *restrict out, const float *restrict x, int32_t n, int32_t k) {
    for (int32_t i = 0; i < n; i++) {
        for (int32_t j = 0; j <= i; j++) {
            const float *a = x + (int64_t)i * k, *b = x + (int64_t)j * k;
            float part[16] = {0}, sum = 0.0f;
            int32_t c = 0;
            for (; c + 16 <= k; c += 16) {
                for (int l = 0; l < 16; l++) part[l] += a[c + l] * b[c + l];
            }
            for (; c < k; c++) sum += a[c] * b[c];
            for (int l = 0; l < 16; l++) sum += part[l];
            out[(int64_t)i * n + j] = out[(int64_t)j * n + i] = sum;
        }
    }
}

/* out[n, k] = alpha y + a y of a [n, n] and y [n, k] */
static void multiply(float *restrict out, const float *restrict a, const float *restrict y,
                     int32_t n, int32_t k, float alpha) {
    for (int32_t i = 0; i < n; i++) {
        float *row = out + (int64_t)i * k;
        for (int32_t c = 0; c < k; c++) row[c] = alpha * y[(int64_t)i * k + c];
        for (int32_t j = 0; j < n; j++) {
            const float f = a[(int64_t)i * n + j];
            for (int32_t c = 0; c < k; c++) row[c] += f * y[(int64_t)j * k + c];
        }
    }
}

/* Replaces x [n, k], n <= k, by a nearly semi-orthogonal matrix. b: [n, k], a, c: [n, n]. */
static void orthogonalize(float *x, float *b, float *a, float *c, int32_t n, int32_t k) {
    double square = 0.0;
    for (int64_t i = 0; i < (int64_t)n * k; i++) square += (double)x[i] * (double)x[i];
    const float inverse = (float)(1.0 / (sqrt(square) + 1e-7));
    for (int64_t i = 0; i < (int64_t)n * k; i++) x[i] *= inverse;
    for (int step = 0; step < NEWTON_SCHULZ_STEPS; step++) {
        gram(a, x, n, k);
        multiply(c, a, a, n, n, 0.0f);
        for (int64_t i = 0; i < (int64_t)n * n; i++) c[i] = -4.7750f * a[i] + 2.0315f * c[i];
        multiply(b, c, x, n, k, 3.4445f);
        memcpy(x, b, (size_t)n * (size_t)k * sizeof *x);
    }
}

static int32_t smaller(int32_t a, int32_t b) {
    return a < b ? a : b;
}

static size_t muon_scratch(const hd_parameter *p) {
    const size_t rows = (size_t)(p->rows / p->stack), cols = (size_t)p->cols;
    const size_t n = rows < cols ? rows : cols;
    return (2 * rows * cols + 2 * n * n) * sizeof(float);
}

/* The momentum of one matrix, looked ahead, with the shorter side as rows. */
static void look_ahead(float *x, const update_job *job, float *first, const float *grad,
                       int32_t rows, int32_t cols) {
    const float momentum = (float)job->o->momentum;
    for (int32_t r = 0; r < rows; r++) {
        for (int32_t c = 0; c < cols; c++) {
            const int64_t i = (int64_t)r * cols + c;
            const float g = grad[i] * job->clip;
            first[i] = momentum * first[i] + g;
            x[rows <= cols ? i : (int64_t)c * rows + r] = g + momentum * first[i];
        }
    }
}

static void muon(const update_job *job, const hd_parameter *p, int32_t worker) {
    const int32_t rows = p->rows / p->stack, cols = p->cols, n = smaller(rows, cols);
    const int64_t size = (int64_t)rows * cols;
    float *x = hd_stream_scratch(job->s, worker, muon_scratch(p)), *b = x + size;
    float *a = b + size, *c = a + (int64_t)n * n;
    const float keep = p->decays ? 1.0f - job->muon_rate * (float)job->o->decay : 1.0f;
    const float rate = job->muon_rate * MUON_SCALE * sqrtf((float)(rows > cols ? rows : cols));
    for (int32_t i = 0; i < p->stack; i++) {
        float *master = p->master + i * size;
        look_ahead(x, job, p->first + i * size, p->grad + i * size, rows, cols);
        orthogonalize(x, b, a, c, n, rows > cols ? rows : cols);
        for (int32_t r = 0; r < rows; r++) {
            for (int32_t k = 0; k < cols; k++) {
                const int64_t at = (int64_t)r * cols + k;
                const float u = x[rows <= cols ? at : (int64_t)k * rows + r];
                master[at] = master[at] * keep - rate * u;
            }
        }
    }
}

/* ---- a step ---- */

static void update(const void *arg, int32_t task, int32_t worker) {
    const update_job *job = arg;
    const hd_parameter *p = &job->p[task];
    if (p->n == 0) return;
    if (p->kind == HD_UPDATE_MUON) {
        muon(job, p, worker);
    } else if (p->kind == HD_UPDATE_ADAMW) {
        adamw(job, p);
    }
}

size_t hd_optimizer_scratch(const hd_parameter *p, int32_t n) {
    size_t most = 0;
    for (int32_t i = 0; i < n; i++) {
        const size_t bytes = p[i].kind == HD_UPDATE_MUON ? muon_scratch(&p[i]) : 0;
        if (bytes > most) most = bytes;
    }
    return most;
}

void hd_optimizer_step(const hd_optimizer_options *o, const hd_parameter *p, int32_t n,
                       int64_t step, double squares, hd_stream *s,
                       hd_optimizer_report *report) {
    const double norm = sqrt(squares), factor = hd_schedule_at(&o->schedule, step);
    const double t = (double)step + 1.0;
    *report = (hd_optimizer_report){.norm = norm, .factor = factor, .skipped = !isfinite(norm)};
    if (report->skipped) return;
    const double clip = o->clip > 0.0 && norm > o->clip ? o->clip / norm : 1.0;
    const update_job job = {.o = o,
                            .p = p,
                            .s = s,
                            .clip = (float)clip,
                            .rate = (float)(o->rate * factor),
                            .muon_rate = (float)(o->muon_rate * factor),
                            .correction1 = (float)(1.0 / (1.0 - pow(o->beta1, t))),
                            .correction2 = (float)(1.0 / (1.0 - pow(o->beta2, t)))};
    hd_stream_tasks(s, n, update, &job);
}
