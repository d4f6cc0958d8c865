/* hc_cuda.cu - the manifold-constrained hyper-connections of V4 and, in one pass, of V4.1; models.md
 * 2.8 and 2.17. Sums in double, like
 * the reference: the mixing weights reach every element of the streams. The products with fn
 * are a kernel of their own over (row, value, stretch of columns), so that one row keeps more
 * than one multiprocessor busy. */
#include "ops/cuda/hc_internal.cuh"
#include "ops/fused_internal.h"

constexpr int LARGE_M_ROWS = 8,
              LARGE_M_MIX = 5; /* of a block of mix_values, where there are many */

/* Row r's products with fn [n] and, behind them, its sum of squares, of every stretch. */
struct mixes {
    double *value; /* [rows of the launch, stretches, n + 1] scratch */
    const cuda_act *x;
    const float *fn;
    int32_t rows, n, cols; /* of this launch; of fn; of x */
};

static __host__ __device__ __forceinline__ int32_t stretches_of(int32_t cols) {
    return (cols + STRETCH - 1) / STRETCH;
}

/* ROWS rows of x times MIX rows of fn, the squares standing for row n, over one stretch. Every
 * sum has the same order for every ROWS and MIX. */
template <int ROWS, int MIX>
static __global__ void __launch_bounds__(BLOCK, 2) mix_values(mixes a) {
    begin_kernel();
    const int32_t r0 = (int32_t)blockIdx.x * ROWS, i0 = (int32_t)blockIdx.y * MIX;
    const int32_t begin = (int32_t)blockIdx.z * STRETCH, end = min(begin + STRETCH, a.cols);
    double sum[ROWS][MIX] = {};
#pragma unroll ROWS == 1 ? 8 : 1
    for (int32_t c = begin + (int32_t)threadIdx.x; c < end; c += BLOCK) {
        double x[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            x[r] = (double)wide(a.x[(int64_t)min(r0 + r, a.rows - 1) * a.cols + c]);
        }
#pragma unroll
        for (int i = 0; i < MIX; i++) {
            const bool square = i0 + i >= a.n;
            const double f = square ? 0.0 : (double)a.fn[(int64_t)(i0 + i) * a.cols + c];
#pragma unroll
            for (int r = 0; r < ROWS; r++) sum[r][i] = fma(square ? x[r] : f, x[r], sum[r][i]);
        }
    }
    __shared__ double part[BLOCK / WARP][ROWS * MIX];
#pragma unroll
    for (int k = 0; k < ROWS * MIX; k++) {
        const double own = warp_sum(sum[k / MIX][k % MIX]);
        if (threadIdx.x % WARP == 0) part[threadIdx.x / WARP][k] = own;
    }
    __syncthreads();
    const int k = threadIdx.x, r = r0 + k / MIX, i = i0 + k % MIX;
    if (k >= ROWS * MIX || r >= a.rows || i > a.n) return;
    double all = part[0][k];
    for (int w = 1; w < BLOCK / WARP; w++) all += part[w][k];
    a.value[((int64_t)r * gridDim.z + blockIdx.z) * (a.n + 1) + i] = all;
}

static void mix_rows(cudaStream_t queue, const mixes &a) {
    const unsigned stretches = (unsigned)stretches_of(a.cols);
    if (a.rows < 64) {
        const dim3 grid((unsigned)a.rows, (unsigned)a.n + 1, stretches);
        launch_kernel(queue, mix_values<1, 1>, grid, BLOCK, 0, 1, a);
    } else {
        const dim3 grid(blocks_for(a.rows, LARGE_M_ROWS), blocks_for(a.n + 1, LARGE_M_MIX),
                        stretches);
        launch_kernel(queue, mix_values<LARGE_M_ROWS, LARGE_M_MIX>, grid, BLOCK, 0, 1, a);
    }
}

/* How many rows' values fit into the stream's scratch. */
static int32_t rows_at_once(const hd_stream *s, int32_t n, int32_t cols) {
    const size_t all = (size_t)hd_stream_workers(s) * hd_stream_scratch_bytes(s);
    const size_t each = (size_t)stretches_of(cols) * (size_t)(n + 1) * sizeof(double);
    const size_t rows = all / each;
    return rows < 65536 ? (int32_t)rows : 65536;
}

/* m[i] = value i of the block's row / rms of the row; all threads. */
static __device__ void load_mix(double *m, const double *value, int32_t n, int32_t cols,
                                float norm_eps) {
    __shared__ double squares;
    const int32_t stretches = stretches_of(cols);
    const double *own = value + (int64_t)blockIdx.x * stretches * (n + 1);
    for (int32_t i = threadIdx.x; i <= n; i += BLOCK) {
        double sum = 0.0;
        for (int32_t k = 0; k < stretches; k++) sum += own[k * (n + 1) + i];
        if (i < n) {
            m[i] = sum;
        } else {
            squares = sum;
        }
    }
    __syncthreads();
    const double rms = 1.0 / sqrt(squares / cols + (double)norm_eps);
    for (int32_t i = threadIdx.x; i < n; i += BLOCK) m[i] *= rms;
    __syncthreads();
}

/* Stretch `part` of `parts` of the columns. */
static __device__ void weigh_streams(cuda_act *out, const cuda_act *x, const double *pre,
                                     int32_t hc, int32_t cols, int32_t part, int32_t parts) {
    const int32_t each = (cols + parts - 1) / parts, begin = part * each;
    for (int32_t c = begin + (int32_t)threadIdx.x; c < min(begin + each, cols); c += BLOCK) {
        double sum = 0.0;
        for (int32_t i = 0; i < hc; i++) {
            sum = fma(pre[i], (double)wide(x[(int64_t)i * cols + c]), sum);
        }
        out[c] = narrow((float)sum);
    }
}

/* How many blocks share a row's columns. */
static unsigned column_blocks(int32_t rows) {
    return rows < 64 ? 8 : 1;
}

/* The last block of a row finds the way back, the others the row itself. */
static __global__ void __launch_bounds__(BLOCK) hc_pre(hd_hc_pre_args a, const double *value) {
    begin_kernel();
    __shared__ double m[MAX_MIX];
    const int32_t hc = a.hc, n = 2 * hc + hc * hc, parts = (int32_t)gridDim.y - 1;
    const int64_t r = blockIdx.x;
    load_mix(m, value, n, hc * a.cols, a.norm_eps);
    if ((int32_t)blockIdx.y == parts) {
        mix_back(a, m, r);
        return;
    }
    mix_forth(m, hc, a.scale[0], a.base, a.eps);
    weigh_streams(acts(a.out) + r * a.cols, acts(a.x) + r * hc * a.cols, m, hc, a.cols,
                  (int32_t)blockIdx.y, parts);
}

/* What goes on is mixed already; pre is left for the next block. */
static __global__ void __launch_bounds__(BLOCK)
    hc_predict(hd_hc_pre_args a, float *pre, const double *value) {
    begin_kernel();
    __shared__ double m[MAX_MIX];
    const int64_t r = blockIdx.x;
    load_mix(m, value, 2 * a.hc + a.hc * a.hc, a.hc * a.cols, a.norm_eps);
    mix_back(a, m, r);
    mix_forth(m, a.hc, a.scale[0], a.base, a.eps);
    if ((int32_t)threadIdx.x < a.hc) pre[r * a.hc + threadIdx.x] = (float)m[threadIdx.x];
}

/* pre NULL: hc_pre; else the coefficients alone. */
static void weigh(hd_stream *s, const hd_hc_pre_args *a, float *pre) {
    static_assert(HD_MAX_HC * HD_MAX_HC <= BLOCK, "a thread per element of comb");
    const int32_t n = 2 * a->hc + a->hc * a->hc, all = a->hc * a->cols;
    const int32_t at_once = rows_at_once(s, n, all);
    double *value = static_cast<double *>(hd_stream_scratch(s, 0, 0));
    cudaStream_t queue = hd_cuda_stream(s);
    for (int32_t first = 0; first < a->rows; first += at_once) {
        hd_hc_pre_args part = *a;
        part.rows = a->rows - first < at_once ? a->rows - first : at_once;
        part.x = hd_rows_at(a->x, (int64_t)first * all);
        part.out = hd_rows_at(a->out, (int64_t)first * a->cols);
        part.post += (int64_t)first * a->hc;
        part.comb += (int64_t)first * a->hc * a->hc;
        mix_rows(queue, {value, acts(part.x), a->fn, part.rows, n, all});
        if (pre) {
            launch_kernel(queue, hc_predict, dim3((unsigned)part.rows), BLOCK, 0, 1, part,
                          pre + (int64_t)first * a->hc, value);
        } else {
            launch_kernel(queue, hc_pre,
                          dim3((unsigned)part.rows, column_blocks(part.rows) + 1), BLOCK, 0, 1,
                          part, value);
        }
    }
}

void hd_hc_pre_cuda(hd_stream *s, const hd_hc_pre_args *a) {
    weigh(s, a, nullptr);
    hd_cuda_check(s, "hc_pre");
}

/* first: the first stream alone. */
static __global__ void __launch_bounds__(BLOCK) hc_mix(hd_hc_mix_args a, bool first) {
    begin_kernel();
    __shared__ double m[HD_MAX_HC];
    const int64_t r = blockIdx.x;
    const int i = threadIdx.x;
    if (i < a.hc) m[i] = first ? (i == 0 ? 1.0 : 0.0) : (double)a.pre[r * a.hc + i];
    __syncthreads();
    weigh_streams(acts(a.out) + r * a.cols, acts(a.x) + r * a.hc * a.cols, m, a.hc, a.cols,
                  (int32_t)blockIdx.y, (int32_t)gridDim.y);
}

static void mix(hd_stream *s, const hd_hc_mix_args *a, bool first) {
    if (a->rows == 0) return;
    launch_kernel(hd_cuda_stream(s), hc_mix, dim3((unsigned)a->rows, column_blocks(a->rows)),
                  BLOCK, 0, 1, *a, first);
}

void hd_hc_mix_cuda(hd_stream *s, const hd_hc_mix_args *a) {
    mix(s, a, false);
    hd_cuda_check(s, "hc_mix");
}

void hd_hc_single_cuda(hd_stream *s, const hd_hc_single_args *a) {
    const hd_hc_mix_args mixture = ops_single_mix(a);
    const hd_hc_pre_args coefficients = ops_single_pre(a);
    mix(s, &mixture, a->first);
    weigh(s, &coefficients, a->pre);
    hd_cuda_check(s, "hc_single");
}

/* A thread per column; HC 0: any number of streams. */
template <int HC>
static __global__ void __launch_bounds__(BLOCK) hc_post(hd_hc_post_args a) {
    begin_kernel();
    const int32_t hc = HC ? HC : a.hc;
    const int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x;
    if (i >= (int64_t)a.rows * a.cols) return;
    const int64_t r = i / a.cols, c = i % a.cols;
    cuda_act *x = acts(a.x) + r * hc * a.cols + c;
    const float *comb = a.comb + r * hc * hc;
    const double y = (double)wide(acts(a.y)[i]);
    double old[HC ? HC : HD_MAX_HC];
#pragma unroll
    for (int32_t k = 0; k < hc; k++) old[k] = (double)wide(x[(int64_t)k * a.cols]);
#pragma unroll
    for (int32_t j = 0; j < hc; j++) {
        double mixed = (double)a.post[r * hc + j] * y;
#pragma unroll
        for (int32_t k = 0; k < hc; k++) mixed = fma((double)comb[k * hc + j], old[k], mixed);
        x[(int64_t)j * a.cols] = narrow((float)mixed);
    }
}

void hd_hc_post_cuda(hd_stream *s, const hd_hc_post_args *a) {
    const unsigned grid = blocks_for((int64_t)a->rows * a->cols, BLOCK);
    if (grid == 0) return;
    if (a->hc == 4) {
        launch_kernel(hd_cuda_stream(s), hc_post<4>, grid, BLOCK, 0, 1, *a);
    } else {
        launch_kernel(hd_cuda_stream(s), hc_post<0>, grid, BLOCK, 0, 1, *a);
    }
    hd_cuda_check(s, "hc_post");
}

static __global__ void __launch_bounds__(BLOCK)
    hc_head(hd_hc_head_args a, const double *value) {
    begin_kernel();
    __shared__ double m[HD_MAX_HC];
    const int64_t r = blockIdx.x;
    load_mix(m, value, a.hc, a.hc * a.cols, a.norm_eps);
    mix_forth(m, a.hc, a.scale[0], a.base, a.eps);
    weigh_streams(acts(a.out) + r * a.cols, acts(a.x) + r * a.hc * a.cols, m, a.hc, a.cols,
                  (int32_t)blockIdx.y, (int32_t)gridDim.y);
}

void hd_hc_head_cuda(hd_stream *s, const hd_hc_head_args *a) {
    const int32_t all = a->hc * a->cols, at_once = rows_at_once(s, a->hc, all);
    double *value = static_cast<double *>(hd_stream_scratch(s, 0, 0));
    cudaStream_t queue = hd_cuda_stream(s);
    for (int32_t first = 0; first < a->rows; first += at_once) {
        hd_hc_head_args part = *a;
        part.rows = a->rows - first < at_once ? a->rows - first : at_once;
        part.x = hd_rows_at(a->x, (int64_t)first * all);
        part.out = hd_rows_at(a->out, (int64_t)first * a->cols);
        mix_rows(queue, {value, acts(part.x), a->fn, part.rows, a->hc, all});
        launch_kernel(queue, hc_head, dim3((unsigned)part.rows, column_blocks(part.rows)),
                      BLOCK, 0, 1, part, value);
    }
    hd_cuda_check(s, "hc_head");
}

/* A thread per column of a row. */
static __global__ void __launch_bounds__(BLOCK) hc_mean(hd_hc_mean_args a) {
    const int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x;
    if (i >= (int64_t)a.rows * a.cols) return;
    const int64_t r = i / a.cols, c = i % a.cols;
    const cuda_act *x = acts(a.x) + r * a.hc * a.cols + c;
    float sum = wide(x[0]);
    for (int32_t k = 1; k < a.hc; k++) sum += wide(x[(int64_t)k * a.cols]);
    acts(a.out)[r * stride_of(a.out, a.cols) + c] = narrow(sum / (float)a.hc);
}

void hd_hc_mean_cuda(hd_stream *s, const hd_hc_mean_args *a) {
    const unsigned grid = blocks_for((int64_t)a->rows * a->cols, BLOCK);
    if (grid == 0) return;
    hc_mean<<<grid, BLOCK, 0, hd_cuda_stream(s)>>>(*a);
    hd_cuda_check(s, "hc_mean");
}
