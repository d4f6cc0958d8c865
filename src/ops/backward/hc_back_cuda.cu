/* hc_back_cuda.cu - gradients of V4's hyper-connections (mHC), as in hc_back_ref.c: a block per row of
 * hc_post, a warp per row of hc_pre and hc_head, so that a row's Sinkhorn steps leave no other warp waiting.
 * Sums over columns are float32, in an order that follows from the columns; what is of a row's few mixing
 * values is float64. */
#include "ops/backward/row_sums_internal.cuh"

constexpr int WARPS = BLOCK / WARP, ROW_WARPS = 4; /* rows of a block of hc_pre and hc_head */

static __device__ __forceinline__ int32_t own_lane() {
    return (int32_t)threadIdx.x % WARP;
}

static __device__ __forceinline__ float warp_dot(const float *a, const float *b, int32_t n) {
    float sum = 0.0f;
#pragma unroll 8
    for (int32_t c = (int32_t)threadIdx.x % WARP; c < n; c += WARP) sum = fmaf(a[c], b[c], sum);
    return warp_sum(sum);
}

/* ---- hc_post ---- */

static __global__ void __launch_bounds__(BLOCK) hc_post_back(hd_hc_post_back_args a) {
    const int32_t hc = a.hc, cols = a.cols;
    const int64_t r = blockIdx.x;
    const float *g = floats(a.g) + r * hc * cols, *x = floats(a.x) + r * hc * cols;
    const float *y = floats(a.y) + r * cols, *post = a.post + r * hc;
    const float *comb = a.comb + r * hc * hc;
    for (int32_t k = (int32_t)threadIdx.x / WARP; k < hc + hc * hc; k += WARPS) {
        const int32_t mixed = k - hc, j = mixed < 0 ? k : mixed % hc;
        const float *left = mixed < 0 ? y : x + (int64_t)(mixed / hc) * cols;
        const float sum = warp_dot(left, g + (int64_t)j * cols, cols);
        if (threadIdx.x % WARP) continue;
        if (mixed < 0) {
            a.dpost[r * hc + k] = sum;
        } else {
            a.dcomb[r * hc * hc + mixed] = sum;
        }
    }
    __syncthreads(); /* dx may be g */
    for (int32_t c = (int32_t)threadIdx.x; c < cols; c += BLOCK) {
        float column[HD_MAX_HC], sum = 0.0f;
        for (int32_t j = 0; j < hc; j++) {
            column[j] = g[(int64_t)j * cols + c];
            sum = fmaf(post[j], column[j], sum);
        }
        a.dy[r * cols + c] = sum;
        for (int32_t i = 0; i < hc; i++) {
            float back = 0.0f;
            for (int32_t j = 0; j < hc; j++) back = fmaf(comb[i * hc + j], column[j], back);
            a.dx[(r * hc + i) * cols + c] = back;
        }
    }
}

void hd_hc_post_back_cuda(hd_stream *s, const hd_hc_post_back_args *a) {
    if (a->rows == 0) return;
    hc_post_back<<<(unsigned)a->rows, BLOCK, 0, hd_cuda_stream(s)>>>(*a);
    hd_cuda_check(s, "hc_post_back");
}

/* ---- Sinkhorn backwards: a lane per row or column of the matrix ---- */

constexpr int KEPT = 800; /* numbers of kept normalizations */

struct sinkhorn {
    double *m, *sums, *kept; /* [hc * hc], [hc], [KEPT] */
};

static __device__ __forceinline__ int32_t line_at(int32_t hc, bool rows, int32_t line,
                                                  int32_t k) {
    return rows ? line * hc + k : k * hc + line;
}

static __device__ void normalize(double *m, double *sums, int32_t hc, bool rows, double eps) {
    const int32_t line = own_lane();
    if (line < hc) {
        double sum = eps;
        for (int32_t k = 0; k < hc; k++) sum += m[line_at(hc, rows, line, k)];
        for (int32_t k = 0; k < hc; k++) m[line_at(hc, rows, line, k)] /= sum;
        sums[line] = sum;
    }
    __syncwarp();
}

static __device__ void normalize_back(double *d, const double *b, const double *sums,
                                      int32_t hc, bool rows) {
    const int32_t line = own_lane();
    if (line < hc) {
        double along = 0.0;
        for (int32_t k = 0; k < hc; k++) {
            along += d[line_at(hc, rows, line, k)] * b[line_at(hc, rows, line, k)];
        }
        for (int32_t k = 0; k < hc; k++) {
            double *at = &d[line_at(hc, rows, line, k)];
            *at = (*at - along) / sums[line];
        }
    }
    __syncwarp();
}

/* m = the softmax of z by rows, plus eps */
static __device__ void softmax_rows(double *m, const double *z, int32_t hc, double eps) {
    const int32_t line = own_lane();
    if (line < hc) {
        double *row = m + line * hc, top = z[line * hc], sum = 0.0;
        for (int32_t j = 1; j < hc; j++) top = fmax(top, z[line * hc + j]);
        for (int32_t j = 0; j < hc; j++) sum += row[j] = exp(z[line * hc + j] - top);
        for (int32_t j = 0; j < hc; j++) row[j] = row[j] / sum + eps;
    }
    __syncwarp();
}

/* By one warp: d = the gradient of the mixing matrix becomes that of its logits z. The last
 * normalizations are kept, as many as fit, for the steps backwards; then those before them. */
static __device__ void sinkhorn_back(const sinkhorn *s, double *d, const double *z, int32_t hc,
                                     int32_t iters, double eps) {
    const int32_t size = hc * hc, each = size + hc, room = KEPT / each;
    for (int32_t last = 2 * iters - 1; last > 0; last -= room) {
        const int32_t first = max(1, last - room + 1);
        softmax_rows(s->m, z, hc, eps);
        for (int32_t i = 0; i < first - 1; i++) normalize(s->m, s->sums, hc, i % 2 == 1, eps);
        for (int32_t i = first; i <= last; i++) {
            double *at = s->kept + (i - first) * each;
            normalize(s->m, at + size, hc, i % 2 == 0, eps);
            for (int32_t k = own_lane(); k < size; k += WARP) at[k] = s->m[k];
            __syncwarp();
        }
        for (int32_t i = last; i >= first; i--) {
            const double *at = s->kept + (i - first) * each;
            normalize_back(d, at, at + size, hc, i % 2 == 0);
        }
    }
    softmax_rows(s->m, z, hc, 0.0);
    const int32_t line = own_lane();
    if (line < hc) {
        double along = 0.0;
        for (int32_t j = 0; j < hc; j++) along += d[line * hc + j] * s->m[line * hc + j];
        for (int32_t j = 0; j < hc; j++) {
            d[line * hc + j] = s->m[line * hc + j] * (d[line * hc + j] - along);
        }
    }
    __syncwarp();
}

/* ---- the mixing values ---- */

/* A row of hc_pre or hc_head: n mixing values, of which the first hc weigh the streams. */
struct mix_row {
    const float *x, *fn;
    float *dx, *dmix;
    int32_t n, hc, cols;
    double inverse; /* 1 / rms(x) */
};

static __device__ __forceinline__ double sigmoid64(double x) {
    return 1.0 / (1.0 + exp(-x));
}

/* mix = fn x / rms(x) */
static __device__ void mix_values(mix_row *t, double *mix, float norm_eps) {
    const int32_t wide = t->hc * t->cols;
    const float square = warp_dot(t->x, t->x, wide);
    t->inverse = 1.0 / sqrt((double)square / wide + (double)norm_eps);
    for (int32_t i = 0; i < t->n; i++) {
        const float sum = warp_dot(t->fn + (int64_t)i * wide, t->x, wide);
        if (own_lane() == 0) mix[i] = (double)sum * t->inverse;
    }
    __syncwarp();
}

/* dz[j] = the gradient of the logit of weight j of out = sum_j sigmoid(z[j]) x[j]; and adds the
 * weights' part to dx. */
static __device__ void weigh_back(const mix_row &t, double *dz, const double *mix,
                                  const float *g, float scale, const float *base, float eps) {
    for (int32_t j = 0; j < t.hc; j++) {
        const double s = sigmoid64(mix[j] * (double)scale + (double)base[j]);
        const float along = warp_dot(g, t.x + (int64_t)j * t.cols, t.cols);
        const float weight = (float)(s + (double)eps);
        float *dx = t.dx + (int64_t)j * t.cols;
#pragma unroll 4
        for (int32_t c = own_lane(); c < t.cols; c += WARP) dx[c] = fmaf(weight, g[c], dx[c]);
        if (own_lane() == 0) dz[j] = (double)along * s * (1.0 - s);
    }
    __syncwarp();
}

/* Parts of the gradients of scale and base in z = scale * mix + base, for values [first, first + n);
 * dz becomes the gradient of mix. By one lane. */
static __device__ void affine_back(double *dz, const double *mix, float scale, float *of_scale,
                                   float *of_base, int32_t first, int32_t n) {
    double along = 0.0;
    for (int32_t i = first; i < first + n; i++) {
        along += dz[i] * mix[i];
        of_base[i] = (float)dz[i];
        dz[i] *= (double)scale;
    }
    *of_scale = (float)along;
}

/* dm = the gradient of the mixing values: writes dmix = dm / rms, and adds to dx. */
static __device__ void mix_back(const mix_row &t, const double *dm, const double *mix,
                                float *factor) {
    const int32_t wide = t.hc * t.cols;
    double along = 0.0;
    for (int32_t i = 0; i < t.n; i++) along += dm[i] * mix[i];
    for (int32_t i = own_lane(); i < t.n; i += WARP) {
        t.dmix[i] = factor[i] = (float)(dm[i] * t.inverse);
    }
    __syncwarp();
    const float pull = (float)(t.inverse * t.inverse * along / wide);
#pragma unroll 2
    for (int32_t c = own_lane(); c < wide; c += WARP) {
        float sum = -pull * t.x[c];
#pragma unroll 8
        for (int32_t i = 0; i < t.n; i++) {
            sum = fmaf(factor[i], t.fn[(int64_t)i * wide + c], sum);
        }
        t.dx[c] += sum;
    }
}

/* A warp's shared memory, `each` doubles: mix [n], dz [n], z [hc * hc], sinkhorn, factor [n]. */
static __host__ __device__ __forceinline__ int32_t row_doubles(int32_t hc) {
    const int32_t n = 2 * hc + hc * hc;
    return 2 * n + 2 * hc * hc + hc + KEPT + (n + 1) / 2;
}

static __device__ __forceinline__ int64_t own_row() {
    return (int64_t)blockIdx.x * ROW_WARPS + threadIdx.x / WARP;
}

static __global__ void __launch_bounds__(ROW_WARPS *WARP, 6)
    hc_pre_back(hd_hc_pre_back_args a) {
    extern __shared__ double rooms[];
    const int32_t hc = a.hc, n = 2 * hc + hc * hc;
    double *mix = rooms + threadIdx.x / WARP * row_doubles(hc), *dz = mix + n, *z = dz + n;
    const sinkhorn work = {z + hc * hc, z + 2 * hc * hc, z + 2 * hc * hc + hc};
    const int64_t r = own_row(), wide = (int64_t)hc * a.cols;
    if (r >= a.rows) return;
    mix_row t = {
        floats(a.x) + r * wide, a.fn, a.dx + r * wide, a.dmix + r * n, n, hc, a.cols, 0.0};
    mix_values(&t, mix, a.norm_eps);
    weigh_back(t, dz, mix, floats(a.g) + r * a.cols, a.scale[0], a.base, a.eps);
    for (int32_t i = own_lane(); i < hc; i += WARP) {
        const double s = sigmoid64(mix[hc + i] * (double)a.scale[1] + (double)a.base[hc + i]);
        dz[hc + i] = 2.0 * (double)a.dpost[r * hc + i] * s * (1.0 - s);
    }
    for (int32_t k = own_lane(); k < hc * hc; k += WARP) {
        z[k] = mix[2 * hc + k] * (double)a.scale[2] + (double)a.base[2 * hc + k];
        dz[2 * hc + k] = (double)a.dcomb[r * hc * hc + k];
    }
    __syncwarp();
    sinkhorn_back(&work, dz + 2 * hc, z, hc, a.iters, (double)a.eps);
    if (own_lane() == 0) {
        float *part = a.part + r * (3 + n);
        affine_back(dz, mix, a.scale[0], part, part + 3, 0, hc);
        affine_back(dz, mix, a.scale[1], part + 1, part + 3, hc, hc);
        affine_back(dz, mix, a.scale[2], part + 2, part + 3, 2 * hc, hc * hc);
    }
    __syncwarp();
    mix_back(t, dz, mix, reinterpret_cast<float *>(work.kept + KEPT));
}

static __global__ void __launch_bounds__(ROW_WARPS *WARP) hc_head_back(hd_hc_head_back_args a) {
    __shared__ double mixes[ROW_WARPS][HD_MAX_HC], dzs[ROW_WARPS][HD_MAX_HC];
    __shared__ float factors[ROW_WARPS][HD_MAX_HC];
    double *mix = mixes[threadIdx.x / WARP], *dz = dzs[threadIdx.x / WARP];
    const int64_t r = own_row(), wide = (int64_t)a.hc * a.cols;
    if (r >= a.rows) return;
    mix_row t = {floats(a.x) + r * wide,
                 a.fn,
                 a.dx + r * wide,
                 a.dmix + r * a.hc,
                 a.hc,
                 a.hc,
                 a.cols,
                 0.0};
    for (int32_t c = own_lane(); c < wide; c += WARP) t.dx[c] = 0.0f;
    mix_values(&t, mix, a.norm_eps);
    weigh_back(t, dz, mix, floats(a.g) + r * a.cols, a.scale[0], a.base, a.eps);
    if (own_lane() == 0) {
        float *part = a.part + r * (1 + a.hc);
        affine_back(dz, mix, a.scale[0], part, part + 1, 0, a.hc);
    }
    __syncwarp();
    mix_back(t, dz, mix, factors[threadIdx.x / WARP]);
}

/* The parts of all rows: part [rows, n_scale + n]. */
struct affine_term : term_of_rows {
    float *dscale, *dbase;
    const float *part;
    int32_t n_scale, each;

    __device__ float *to(int32_t col) const {
        if (col < n_scale) return dscale ? dscale + col : nullptr;
        return dbase ? dbase + col - n_scale : nullptr;
    }

    __device__ float at(int64_t r, int32_t col, const row_chunk &) const {
        return part[r * each + col];
    }
};

void hd_hc_pre_back_cuda(hd_stream *s, const hd_hc_pre_back_args *a) {
    cudaStream_t queue = hd_cuda_stream(s);
    const int32_t n = 2 * a->hc + a->hc * a->hc;
    const size_t bytes = (size_t)(ROW_WARPS * row_doubles(a->hc)) * sizeof(double);
    if (a->rows == 0) return;
    hd_cuda_allow_shared((const void *)hc_pre_back, bytes);
    hc_pre_back<<<blocks_for(a->rows, ROW_WARPS), ROW_WARPS * WARP, bytes, queue>>>(*a);
    sum_columns(queue, affine_term{{}, a->dscale, a->dbase, a->part, 3, 3 + n}, a->sums,
                a->rows, 3 + n);
    hd_cuda_check(s, "hc_pre_back");
}

void hd_hc_head_back_cuda(hd_stream *s, const hd_hc_head_back_args *a) {
    cudaStream_t queue = hd_cuda_stream(s);
    if (a->rows == 0) return;
    hc_head_back<<<blocks_for(a->rows, ROW_WARPS), ROW_WARPS * WARP, 0, queue>>>(*a);
    sum_columns(queue, affine_term{{}, a->dscale, a->dbase, a->part, 1, 1 + a->hc}, a->sums,
                a->rows, 1 + a->hc);
    hd_cuda_check(s, "hc_head_back");
}
