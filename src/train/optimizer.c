/* optimizer.c - AdamW (Loshchilov and Hutter, 2019) and Muon (Jordan, 2024: momentum whose
 * matrix is replaced by the nearest semi-orthogonal one). Parameters that lie one behind another and have
 * the same rule are changed by one operator. */
#include "train/optimizer.h"

#include <math.h>

#include "base/checked.h"

enum { GPU_SCRATCH = 64 << 20 }; /* bytes: of several matrices at once */

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

int64_t hd_optimizer_sums(int64_t n) {
    return hd_ceil_div(n, HD_SQUARES_BLOCK);
}

hd_status hd_optimizer_squares(double *out, const hd_optimizer_env *env, const float *grad,
                               int64_t n, hd_err *err) {
    const int64_t sums = hd_optimizer_sums(n);
    env->ops->sum_squares(env->stream, &(hd_sum_squares_args){env->sums, grad, n});
    hd_stream_download(env->stream, env->host_sums, env->sums, (size_t)sums * sizeof *out);
    HD_TRY(hd_stream_sync(env->stream, err));
    *out = 0.0;
    for (int64_t i = 0; i < sums; i++) *out += env->host_sums[i];
    return HD_OK;
}

/* ---- a step ---- */

typedef struct update_job {
    const hd_optimizer_options *o;
    const hd_optimizer_env *env;
    float clip; /* factor of the gradients */
    float rate, muon_rate;
    float correction1, correction2; /* 1 / (1 - beta^t) */
} update_job;

/* Parameters [p, p + parts) that one operator changes: n elements. */
typedef struct span {
    const hd_parameter *p;
    int32_t parts;
    int64_t n;
} span;

static bool same_rule(const hd_parameter *a, const hd_parameter *b) {
    if (a->kind != b->kind || a->decays != b->decays) return false;
    return a->kind != HD_UPDATE_MUON ||
           (a->cols == b->cols && a->rows / a->stack == b->rows / b->stack);
}

/* The parameters from p[0] on that lie one behind another, of n that are left. */
static span span_of(const hd_parameter *p, int32_t n) {
    span s = {p, 1, p->n};
    for (; s.parts < n; s.parts++) {
        const hd_parameter *next = &p[s.parts];
        if (!next->grad || next->grad != p->grad + s.n || next->master != p->master + s.n ||
            !same_rule(p, next)) {
            break;
        }
        s.n += next->n;
    }
    return s;
}

static float keep_of(const update_job *job, const hd_parameter *p, float rate) {
    return p->decays ? 1.0f - rate * (float)job->o->decay : 1.0f;
}

static void adamw(const update_job *job, const span *s) {
    job->env->ops->adamw(job->env->stream,
                         &(hd_adamw_args){.master = s->p->master,
                                          .first = s->p->first,
                                          .second = s->p->second,
                                          .grad = s->p->grad,
                                          .n = s->n,
                                          .clip = job->clip,
                                          .rate = job->rate,
                                          .keep = keep_of(job, s->p, job->rate),
                                          .beta1 = (float)job->o->beta1,
                                          .beta2 = (float)job->o->beta2,
                                          .eps = (float)job->o->eps,
                                          .correction1 = job->correction1,
                                          .correction2 = job->correction2});
}

static void muon(const update_job *job, const span *s) {
    const int32_t rows = s->p->rows / s->p->stack, cols = s->p->cols;
    const float longer = (float)hd_max_i32(rows, cols);
    job->env->ops->muon(job->env->stream,
                        &(hd_muon_args){.master = s->p->master,
                                        .first = s->p->first,
                                        .grad = s->p->grad,
                                        .n = (int32_t)(s->n / ((int64_t)rows * cols)),
                                        .rows = rows,
                                        .cols = cols,
                                        .clip = job->clip,
                                        .rate = job->muon_rate * MUON_SCALE * sqrtf(longer),
                                        .keep = keep_of(job, s->p, job->muon_rate),
                                        .momentum = (float)job->o->momentum});
}

hd_status hd_optimizer_reserve(hd_stream *s, bool on_host, const hd_parameter *p, int32_t n,
                               hd_err *err) {
    size_t most = 0;
    for (int32_t i = 0; i < n; i++) {
        if (p[i].kind != HD_UPDATE_MUON) continue;
        const size_t bytes = hd_muon_scratch(p[i].rows / p[i].stack, p[i].cols);
        if (bytes > most) most = bytes;
    }
    if (!on_host && most) { /* the blocks of a GPU share it */
        if (most < GPU_SCRATCH) most = GPU_SCRATCH;
        most = most / (size_t)hd_stream_workers(s) + 64;
    }
    return hd_stream_reserve(s, most, err);
}

void hd_optimizer_step(const hd_optimizer_options *o, const hd_parameter *p, int32_t n,
                       int64_t step, double squares, const hd_optimizer_env *env,
                       hd_optimizer_report *report) {
    const double norm = sqrt(squares), factor = hd_schedule_at(&o->schedule, step);
    const double t = (double)step + 1.0;
    *report = (hd_optimizer_report){.norm = norm, .factor = factor, .skipped = !isfinite(norm)};
    if (report->skipped) return;
    const double clip = o->clip > 0.0 && norm > o->clip ? o->clip / norm : 1.0;
    const update_job job = {.o = o,
                            .env = env,
                            .clip = (float)clip,
                            .rate = (float)(o->rate * factor),
                            .muon_rate = (float)(o->muon_rate * factor),
                            .correction1 = (float)(1.0 / (1.0 - pow(o->beta1, t))),
                            .correction2 = (float)(1.0 / (1.0 - pow(o->beta2, t)))};
    for (int32_t i = 0, parts = 1; i < n; i += parts, parts = 1) {
        if (p[i].n == 0 || p[i].kind == HD_UPDATE_BALANCE) continue;
        const span s = span_of(&p[i], n - i);
        parts = s.parts;
        if (p[i].kind == HD_UPDATE_MUON) {
            muon(&job, &s);
        } else {
            adamw(&job, &s);
        }
    }
}
