/* rows_back_ref.c - reference gradients of operators on whole rows, and the loss, in plain C. */
#include <string.h>

#include "ops/backward/backward_internal.h"
#include "ops/ref/act_internal.h"
#include "ops/ref/sample_internal.h"

void hd_rms_norm_back_ref(hd_stream *s, const hd_rms_norm_back_args *a) {
    const int64_t g_row = stride_of(a->g, a->cols), x_row = stride_of(a->x, a->cols);
    (void)s;
    for (int32_t r = 0; r < a->rows; r++) {
        const float *g = act_in(a->g) + r * g_row, *x = act_in(a->x) + r * x_row;
        float *dx = act(a->dx) + r * stride_of(a->dx, a->cols);
        double square = 0.0, along = 0.0;
        for (int32_t c = 0; c < a->cols; c++) {
            const double u = (double)g[c] * (a->weight ? (double)a->weight[c] : 1.0);
            square += (double)x[c] * (double)x[c];
            along += u * (double)x[c];
        }
        const double inverse = 1.0 / sqrt(square / a->cols + (double)a->eps);
        const double pull = inverse * inverse * inverse * along / a->cols;
        for (int32_t c = 0; c < a->cols; c++) {
            const double u = (double)g[c] * (a->weight ? (double)a->weight[c] : 1.0);
            if (a->dweight) a->dweight[c] += (float)((double)g[c] * (double)x[c] * inverse);
            dx[c] = (float)(inverse * u - (double)x[c] * pull);
        }
    }
}

void hd_embed_back_ref(hd_stream *s, const hd_embed_back_args *a) {
    (void)s;
    for (int32_t r = 0; r < a->rows; r++) {
        float *row = a->dtable + (int64_t)a->tokens[r] * a->cols;
        for (int32_t c = 0; c < a->cols; c++) {
            double sum = 0.0;
            for (int32_t i = 0; i < a->copies; i++) {
                sum += (double)act_in(a->g)[((int64_t)r * a->copies + i) * a->cols + c];
            }
            row[c] += (float)sum;
        }
    }
}

void hd_gather_back_ref(hd_stream *s, const hd_gather_back_args *a) {
    const size_t row = (size_t)a->cols * sizeof(float);
    (void)s;
    memset(a->dx, 0, (size_t)a->x_rows * row);
    for (int32_t i = 0; i < a->rows; i++) {
        memcpy(a->dx + (int64_t)a->index[i] * a->cols, act_in(a->g) + (int64_t)i * a->cols,
               row);
    }
}

void hd_swiglu_back_ref(hd_stream *s, const hd_swiglu_back_args *a) {
    (void)s;
    for (int32_t r = 0; r < a->rows; r++) {
        const int64_t at = (int64_t)r * a->cols, choice = a->assignment ? a->assignment[r] : r;
        const double weight = a->weight ? (double)a->weight[choice] : 1.0;
        const double limit = a->limit > 0.0f ? (double)a->limit : (double)INFINITY;
        double along = 0.0;
        for (int32_t c = 0; c < a->cols; c++) {
            const double gate = (double)act_in(a->gate)[at + c],
                         up = (double)act_in(a->up)[at + c];
            const double x = fmin(gate, limit), u = fmax(-limit, fmin(up, limit));
            const double sg = 1.0 / (1.0 + exp(-x)), g = (double)act_in(a->g)[at + c];
            along += g * x * sg * u;
            const double dx = g * weight * u * sg * (1.0 + x * (1.0 - sg));
            const double du = g * weight * x * sg;
            a->dgate[at + c] = gate <= limit ? (float)dx : 0.0f;
            a->dup[at + c] = fabs(up) <= limit ? (float)du : 0.0f;
        }
        if (a->dweight) a->dweight[choice] = (float)along;
    }
}

/* Of p = softmax(l * inverse): log_total = log sum exp(l * inverse), and -sum p log p. With
 * e = exp(l * inverse - top) the latter is log sum e - sum e (l * inverse - top) / sum e. */
typedef struct spread {
    double log_total, entropy;
} spread;

static spread spread_of(const float *l, int32_t n, double inverse) {
    double top = -(double)INFINITY, total = 0.0, along = 0.0;
    for (int32_t i = 0; i < n; i++) top = fmax(top, (double)l[i] * inverse);
    for (int32_t i = 0; i < n; i++) {
        const double below = (double)l[i] * inverse - top, e = exp(below);
        total += e;
        if (e > 0.0) along += e * below;
    }
    if (!(total > 0.0)) return (spread){top + total, 0.0}; /* NaN stays NaN */
    return (spread){top + log(total), log(total) - along / total};
}

/* The log-probability of id by the sampler's arithmetic. */
static float sampled_logprob(const float *l, int32_t n, float temperature, int32_t id) {
    const float inverse = ops_inverse_temperature(temperature);
    float max = -INFINITY;
    uint64_t total = 0;
    for (int32_t i = 0; i < n; i++) max = l[i] > max ? l[i] : max;
    for (int32_t i = 0; i < n; i++) total += ops_weight(ops_scaled(l[i], max, inverse));
    return ops_logprob(l[id], inverse, ops_log_total(max, inverse, total));
}

void hd_cross_entropy_ref(hd_stream *s, const hd_cross_entropy_args *a) {
    (void)s;
    for (int32_t r = 0; r < a->rows; r++) {
        float *l = a->logits + (int64_t)r * a->vocab;
        const float temperature = a->temperature ? a->temperature[r] : 1.0f;
        a->logprob[r] = sampled_logprob(l, a->vocab, temperature, a->target[r]);
        const double inverse = a->temperature ? 1.0 / (double)a->temperature[r] : 1.0;
        const spread all = spread_of(l, a->vocab, inverse);
        a->entropy[r] = (float)all.entropy;
        if (!a->factor) continue;
        const double more = a->entropy_factor ? (double)a->entropy_factor[r] : 0.0;
        for (int32_t v = 0; v < a->vocab; v++) {
            const double logp = (double)l[v] * inverse - all.log_total, p = exp(logp);
            double d = (double)a->factor[r] * (p - (v == a->target[r] ? 1.0 : 0.0));
            if (more != 0.0 && p > 0.0) d += more * p * (logp + all.entropy);
            l[v] = (float)(d * inverse);
        }
    }
}
