/* hc_cuda.cu - V4's manifold-constrained hyper-connections; models.md 2.8. Sums in double, like
 * the reference: the mixing weights reach every element of the streams. The products with fn
 * are a kernel of their own over (row, value, stretch of columns), so that one row keeps more
 * than one multiprocessor busy. */
#include "ops/cuda/cuda_internal.cuh"

constexpr int MAX_MIX = 2 * HD_MAX_HC + HD_MAX_HC * HD_MAX_HC;
constexpr int LARGE_M_ROWS = 8,
              LARGE_M_MIX = 5;     /* of a block of mix_values, where there are many */
constexpr int STRETCH = 8 * BLOCK; /* columns of a block of mix_values */

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
        mix_values<1, 1><<<grid, BLOCK, 0, queue>>>(a);
    } else {
        const dim3 grid(blocks_for(a.rows, LARGE_M_ROWS), blocks_for(a.n + 1, LARGE_M_MIX),
                        stretches);
        mix_values<LARGE_M_ROWS, LARGE_M_MIX><<<grid, BLOCK, 0, queue>>>(a);
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

static __device__ __forceinline__ double sigmoid64(double x) {
    return 1.0 / (1.0 + exp(-x));
}

/* Divides rows or columns by their sums plus eps, an element per thread. */
static __device__ void normalize(double *comb, int32_t hc, bool rows, double eps) {
    const int k = threadIdx.x, row = k / hc, col = k % hc;
    double sum = 0.0;
    if (k < hc * hc) {
        for (int j = 0; j < hc; j++) sum += comb[rows ? row * hc + j : j * hc + col];
    }
    __syncthreads();
    if (k < hc * hc) comb[k] /= sum + eps;
    __syncthreads();
}

/* Sinkhorn-Knopp towards a doubly stochastic matrix, starting from a softmax of each row. */
static __device__ void sinkhorn(double *comb, int32_t hc, int32_t iters, double eps) {
    const int k = threadIdx.x, row = k / hc * hc;
    double top = 0.0, sum = 0.0, own = 0.0;
    if (k < hc * hc) {
        top = comb[row];
        for (int j = 1; j < hc; j++) top = fmax(top, comb[row + j]);
        own = exp(comb[k] - top);
    }
    __syncthreads();
    if (k < hc * hc) comb[k] = own;
    __syncthreads();
    if (k < hc * hc) {
        for (int j = 0; j < hc; j++) sum += comb[row + j];
    }
    __syncthreads();
    if (k < hc * hc) comb[k] = own / sum + eps;
    __syncthreads();
    normalize(comb, hc, false, eps);
    for (int32_t i = 1; i < iters; i++) {
        normalize(comb, hc, true, eps);
        normalize(comb, hc, false, eps);
    }
}

/* The same for 4 x 4 in one warp, an element per lane: a lane reads and writes its own element of
 * comb and no other, the upper ones compute with zeros. In float: every turn repairs the roundings
 * of the one before. */
static __device__ void sinkhorn_of_four(double *comb, int32_t iters, float eps) {
    const int k = threadIdx.x;
    const auto sum_of = [](float x, int step) {
        x += __shfl_xor_sync(ALL_LANES, x, step);
        return x + __shfl_xor_sync(ALL_LANES, x, 2 * step);
    };
    const double given = k < 16 ? comb[k] : 0.0;
    double top = fmax(given, __shfl_xor_sync(ALL_LANES, given, 1));
    top = fmax(top, __shfl_xor_sync(ALL_LANES, top, 2));
    float own = expf((float)(given - top));
    own = own / sum_of(own, 1) + eps;
    own /= sum_of(own, 4) + eps;
    for (int32_t i = 1; i < iters; i++) {
        own /= sum_of(own, 1) + eps;
        own /= sum_of(own, 4) + eps;
    }
    if (k < 16) comb[k] = (double)own;
}

/* Stretch `part` of `parts` of the columns. */
static __device__ void weigh_streams(cuda_act *out, const cuda_act *x, const double *pre,
                                     int32_t hc, int32_t cols, int32_t part, int32_t parts) {
    const int32_t each = (cols + parts - 1) / parts, begin = part * each;
    for (int32_t c = begin + (int32_t)threadIdx.x; c < min(begin + each, cols); c += BLOCK) {
        double sum = 0.0;
        for (int32_t i = 0; i < hc; i++) sum += pre[i] * (double)wide(x[(int64_t)i * cols + c]);
        out[c] = narrow((float)sum);
    }
}

/* How many blocks share a row's columns. */
static unsigned column_blocks(int32_t rows) {
    return rows < 64 ? 8 : 1;
}

/* How the block's result goes back: m is changed in place. */
static __device__ void mix_back(const hd_hc_pre_args &a, double *m) {
    const int32_t hc = a.hc;
    const int64_t r = blockIdx.x;
    const int k = threadIdx.x;
    double *comb = m + 2 * hc;
    if (k < hc) {
        const double post = m[hc + k] * (double)a.scale[1] + (double)a.base[hc + k];
        a.post[r * hc + k] = (float)(2.0 * sigmoid64(post));
    }
    if (k < hc * hc) comb[k] = comb[k] * (double)a.scale[2] + (double)a.base[2 * hc + k];
    __syncthreads();
    if (hc == 4) {
        if (k < WARP) sinkhorn_of_four(comb, a.iters, a.eps);
        __syncthreads();
    } else {
        sinkhorn(comb, hc, a.iters, (double)a.eps);
    }
    if (k < hc * hc) a.comb[r * hc * hc + k] = (float)comb[k];
}

/* m[k] = the weight of stream k < hc in the row that goes on. */
static __device__ void mix_forth(double *m, int32_t hc, float scale, const float *base,
                                 float eps) {
    const int k = threadIdx.x;
    if (k < hc) m[k] = sigmoid64(m[k] * (double)scale + (double)base[k]) + (double)eps;
    __syncthreads();
}

/* The last block of a row finds the way back, the others the row itself. */
static __global__ void __launch_bounds__(BLOCK) hc_pre(hd_hc_pre_args a, const double *value) {
    __shared__ double m[MAX_MIX];
    const int32_t hc = a.hc, n = 2 * hc + hc * hc, parts = (int32_t)gridDim.y - 1;
    const int64_t r = blockIdx.x;
    load_mix(m, value, n, hc * a.cols, a.norm_eps);
    if ((int32_t)blockIdx.y == parts) {
        mix_back(a, m);
        return;
    }
    mix_forth(m, hc, a.scale[0], a.base, a.eps);
    weigh_streams(acts(a.out) + r * a.cols, acts(a.x) + r * hc * a.cols, m, hc, a.cols,
                  (int32_t)blockIdx.y, parts);
}

void hd_hc_pre_cuda(hd_stream *s, const hd_hc_pre_args *a) {
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
        hc_pre<<<dim3((unsigned)part.rows, column_blocks(part.rows) + 1), BLOCK, 0, queue>>>(
            part, value);
    }
    hd_cuda_check(s, "hc_pre");
}

/* A thread per column; HC 0: any number of streams. */
template <int HC>
static __global__ void __launch_bounds__(BLOCK) hc_post(hd_hc_post_args a) {
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
        for (int32_t k = 0; k < hc; k++) mixed += (double)comb[k * hc + j] * old[k];
        x[(int64_t)j * a.cols] = narrow((float)mixed);
    }
}

void hd_hc_post_cuda(hd_stream *s, const hd_hc_post_args *a) {
    const unsigned grid = blocks_for((int64_t)a->rows * a->cols, BLOCK);
    if (grid == 0) return;
    if (a->hc == 4) {
        hc_post<4><<<grid, BLOCK, 0, hd_cuda_stream(s)>>>(*a);
    } else {
        hc_post<0><<<grid, BLOCK, 0, hd_cuda_stream(s)>>>(*a);
    }
    hd_cuda_check(s, "hc_post");
}

static __global__ void __launch_bounds__(BLOCK)
    hc_head(hd_hc_head_args a, const double *value) {
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
        hc_head<<<dim3((unsigned)part.rows, column_blocks(part.rows)), BLOCK, 0, queue>>>(
            part, value);
    }
    hd_cuda_check(s, "hc_head");
}
