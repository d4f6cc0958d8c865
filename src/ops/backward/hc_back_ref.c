/* hc_back_ref.c - reference gradients of V4's hyper-connections (mHC) in plain C;
 * docs/training.md. */
#include <string.h>

#include "base/checked.h"
#include "ops/backward/backward_internal.h"
#include "ops/ops.h"
#include "ops/ref/act_internal.h"

void hd_hc_post_back_ref(hd_stream *s, const hd_hc_post_back_args *a) {
    const int32_t hc = a->hc, cols = a->cols;
    (void)s;
    for (int32_t r = 0; r < a->rows; r++) {
        const float *g = act_in(a->g) + (int64_t)r * hc * cols;
        const float *x = act_in(a->x) + (int64_t)r * hc * cols;
        const float *y = act_in(a->y) + (int64_t)r * cols;
        const float *post = a->post + (int64_t)r * hc, *comb = a->comb + (int64_t)r * hc * hc;
        float *dx = a->dx + (int64_t)r * hc * cols, *dy = a->dy + (int64_t)r * cols;
        double dpost[HD_MAX_HC] = {0}, dcomb[HD_MAX_HC * HD_MAX_HC] = {0};
        for (int32_t c = 0; c < cols; c++) {
            double column[HD_MAX_HC], sum = 0.0;
            for (int32_t j = 0; j < hc; j++) {
                column[j] = (double)g[(int64_t)j * cols + c];
                dpost[j] += column[j] * (double)y[c];
                sum += (double)post[j] * column[j];
            }
            dy[c] = (float)sum;
            for (int32_t i = 0; i < hc; i++) {
                double back = 0.0;
                for (int32_t j = 0; j < hc; j++) {
                    dcomb[i * hc + j] += (double)x[(int64_t)i * cols + c] * column[j];
                    back += (double)comb[i * hc + j] * column[j];
                }
                dx[(int64_t)i * cols + c] = (float)back;
            }
        }
        for (int32_t j = 0; j < hc; j++) a->dpost[(int64_t)r * hc + j] = (float)dpost[j];
        for (int32_t k = 0; k < hc * hc; k++) {
            a->dcomb[(int64_t)r * hc * hc + k] = (float)dcomb[k];
        }
    }
}

/* ---- Sinkhorn backwards ---- */

enum {
    LANES = 16,
    MAX_MIX = 2 * HD_MAX_HC + HD_MAX_HC * HD_MAX_HC,
    KEPT = 800 /* numbers of kept normalizations */
};

/* One normalization by the sums of rows, or of columns: in place, sums[line] receives them. */
static void normalize(double *m, double *sums, int32_t hc, bool rows, double eps) {
    for (int32_t line = 0; line < hc; line++) {
        double sum = eps;
        for (int32_t k = 0; k < hc; k++) sum += m[rows ? line * hc + k : k * hc + line];
        for (int32_t k = 0; k < hc; k++) m[rows ? line * hc + k : k * hc + line] /= sum;
        sums[line] = sum;
    }
}

/* d = the gradient of b = m / sums becomes that of m. */
static void normalize_back(double *d, const double *b, const double *sums, int32_t hc,
                           bool rows) {
    for (int32_t line = 0; line < hc; line++) {
        double along = 0.0;
        for (int32_t k = 0; k < hc; k++) {
            const int32_t at = rows ? line * hc + k : k * hc + line;
            along += d[at] * b[at];
        }
        for (int32_t k = 0; k < hc; k++) {
            const int32_t at = rows ? line * hc + k : k * hc + line;
            d[at] = (d[at] - along) / sums[line];
        }
    }
}

static void softmax_rows(double *m, int32_t hc) {
    for (int32_t i = 0; i < hc; i++) {
        double *row = m + (int64_t)i * hc, top = row[0], sum = 0.0;
        for (int32_t j = 1; j < hc; j++) top = fmax(top, row[j]);
        for (int32_t j = 0; j < hc; j++) sum += row[j] = exp(row[j] - top);
        for (int32_t j = 0; j < hc; j++) row[j] /= sum;
    }
}

/* Applies the first `steps` normalizations to the softmax of z: columns, rows, columns, ... */
static void run_sinkhorn(double *m, double *sums, const double *z, int32_t hc, int32_t steps,
                         double eps) {
    for (int32_t k = 0; k < hc * hc; k++) m[k] = z[k];
    softmax_rows(m, hc);
    for (int32_t k = 0; k < hc * hc; k++) m[k] += eps;
    for (int32_t i = 0; i < steps; i++) normalize(m, sums, hc, i % 2 == 1, eps);
}

/* d = the gradient of the mixing matrix becomes that of its logits z. The last normalizations are
 * kept, as many as fit, for the steps backwards; then those before them, from the start again. */
static void sinkhorn_back(double *d, const double *z, int32_t hc, int32_t iters, double eps) {
    double m[HD_MAX_HC * HD_MAX_HC], sums[HD_MAX_HC], kept[KEPT];
    const int32_t size = hc * hc, each = size + hc, room = KEPT / each;
    for (int32_t last = 2 * iters - 1; last > 0; last -= room) {
        const int32_t first = hd_max_i32(1, last - room + 1);
        run_sinkhorn(m, sums, z, hc, first - 1, eps);
        for (int32_t i = first; i <= last; i++) {
            double *at = kept + (int64_t)(i - first) * each;
            normalize(m, at + size, hc, i % 2 == 0, eps);
            memcpy(at, m, (size_t)size * sizeof *m);
        }
        for (int32_t i = last; i >= first; i--) {
            const double *at = kept + (int64_t)(i - first) * each;
            normalize_back(d, at, at + size, hc, i % 2 == 0);
        }
    }
    for (int32_t k = 0; k < hc * hc; k++) m[k] = z[k];
    softmax_rows(m, hc);
    for (int32_t i = 0; i < hc; i++) {
        double along = 0.0;
        for (int32_t j = 0; j < hc; j++) along += d[i * hc + j] * m[i * hc + j];
        for (int32_t j = 0; j < hc; j++)
            d[i * hc + j] = m[i * hc + j] * (d[i * hc + j] - along);
    }
}

/* ---- the mixing values ---- */

static double sigmoid64(double x) {
    return 1.0 / (1.0 + exp(-x));
}

/* In LANES partial sums, which compilers vectorize. */
static double dot64(const float *a, const float *b, int32_t n) {
    double part[LANES] = {0}, sum = 0.0;
    int32_t c = 0;
    for (; c + LANES <= n; c += LANES) {
        for (int k = 0; k < LANES; k++) part[k] += (double)a[c + k] * (double)b[c + k];
    }
    for (; c < n; c++) part[0] += (double)a[c] * (double)b[c];
    for (int k = 0; k < LANES; k++) sum += part[k];
    return sum;
}

/* mix = fn x / rms(x); returns 1 / rms(x). */
static double mix_values(double *mix, const float *x, const float *fn, int32_t n, int32_t wide,
                         float norm_eps) {
    const double inverse = 1.0 / sqrt(dot64(x, x, wide) / wide + (double)norm_eps);
    for (int32_t i = 0; i < n; i++) mix[i] = dot64(fn + (int64_t)i * wide, x, wide) * inverse;
    return inverse;
}

/* dm = the gradient of the n mixing values. Writes dmix = dm / rms, and adds to dx. */
static void mix_back(float *dx, float *dmix, const double *dm, const double *mix,
                     double inverse, const float *x, const float *fn, int32_t n, int32_t wide) {
    double along = 0.0;
    for (int32_t i = 0; i < n; i++) {
        along += dm[i] * mix[i];
        dmix[i] = (float)(dm[i] * inverse);
    }
    for (int32_t c = 0; c < wide; c += LANES) {
        const int32_t m = hd_min_i32(LANES, wide - c);
        double sum[LANES] = {0};
        for (int32_t i = 0; i < n; i++) {
            const float *row = fn + (int64_t)i * wide + c;
            const double of_row = dm[i] * inverse;
            for (int32_t k = 0; k < m; k++) sum[k] += of_row * (double)row[k];
        }
        for (int32_t k = 0; k < m; k++) {
            dx[c + k] += (float)(sum[k] - (double)x[c + k] * inverse * inverse * along / wide);
        }
    }
}

/* Adds dz to the parameters of z = scale * mix + base, and turns it into the gradient of mix. */
static void affine_back(double *dz, const double *mix, float scale, float *dscale, float *dbase,
                        int32_t n) {
    double along = 0.0;
    for (int32_t i = 0; i < n; i++) {
        along += dz[i] * mix[i];
        if (dbase) dbase[i] += (float)dz[i];
        dz[i] *= (double)scale;
    }
    if (dscale) *dscale += (float)along;
}

/* dz[j] = the gradient of the logit of weight j of out = sum_j sigmoid(z[j]) x[j]; and adds the
 * weights' part to dx. */
static void weigh_back(double *dz, float *dx, const float *g, const float *x, const double *mix,
                       float scale, const float *base, int32_t hc, int32_t cols, float eps) {
    for (int32_t j = 0; j < hc; j++) {
        const double s = sigmoid64(mix[j] * (double)scale + (double)base[j]);
        double along = 0.0;
        for (int32_t c = 0; c < cols; c++) {
            const int64_t at = (int64_t)j * cols + c;
            along += (double)g[c] * (double)x[at];
            dx[at] += (float)((s + (double)eps) * (double)g[c]);
        }
        dz[j] = along * s * (1.0 - s);
    }
}

void back_hc_pre_row(const hd_hc_pre_back_args *a, int32_t r, float *dscale, float *dbase) {
    const int32_t hc = a->hc, n = 2 * hc + hc * hc, wide = hc * a->cols;
    const float *x = act_in(a->x) + (int64_t)r * wide;
    const float *g = act_in(a->g) + (int64_t)r * a->cols;
    float *dx = a->dx + (int64_t)r * wide;
    double mix[MAX_MIX], dz[MAX_MIX], z[HD_MAX_HC * HD_MAX_HC];
    const double inverse = mix_values(mix, x, a->fn, n, wide, a->norm_eps);
    weigh_back(dz, dx, g, x, mix, a->scale[0], a->base, hc, a->cols, a->eps);
    for (int32_t i = 0; i < hc; i++) {
        const double s = sigmoid64(mix[hc + i] * (double)a->scale[1] + (double)a->base[hc + i]);
        dz[hc + i] = 2.0 * (double)a->dpost[(int64_t)r * hc + i] * s * (1.0 - s);
    }
    for (int32_t k = 0; k < hc * hc; k++) {
        z[k] = mix[2 * hc + k] * (double)a->scale[2] + (double)a->base[2 * hc + k];
        dz[2 * hc + k] = (double)a->dcomb[(int64_t)r * hc * hc + k];
    }
    sinkhorn_back(dz + 2 * hc, z, hc, a->iters, (double)a->eps);
    const int32_t first[] = {0, hc, 2 * hc}, size[] = {hc, hc, hc * hc};
    for (int32_t k = 0; k < 3; k++) {
        affine_back(dz + first[k], mix + first[k], a->scale[k], dscale ? dscale + k : NULL,
                    dbase ? dbase + first[k] : NULL, size[k]);
    }
    mix_back(dx, a->dmix + (int64_t)r * n, dz, mix, inverse, x, a->fn, n, wide);
}

void hd_hc_pre_back_ref(hd_stream *s, const hd_hc_pre_back_args *a) {
    (void)s;
    for (int32_t r = 0; r < a->rows; r++) back_hc_pre_row(a, r, a->dscale, a->dbase);
}

void hd_hc_head_back_ref(hd_stream *s, const hd_hc_head_back_args *a) {
    const int32_t hc = a->hc, wide = hc * a->cols;
    (void)s;
    for (int32_t r = 0; r < a->rows; r++) {
        const float *x = act_in(a->x) + (int64_t)r * wide;
        float *dx = a->dx + (int64_t)r * wide;
        double mix[HD_MAX_HC], dz[HD_MAX_HC];
        for (int32_t c = 0; c < wide; c++) dx[c] = 0.0f;
        const double inverse = mix_values(mix, x, a->fn, hc, wide, a->norm_eps);
        weigh_back(dz, dx, act_in(a->g) + (int64_t)r * a->cols, x, mix, a->scale[0], a->base,
                   hc, a->cols, a->eps);
        affine_back(dz, mix, a->scale[0], a->dscale, a->dbase, hc);
        mix_back(dx, a->dmix + (int64_t)r * hc, dz, mix, inverse, x, a->fn, hc, wide);
    }
}
