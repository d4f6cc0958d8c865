/* hc_cuda.cu - the manifold-constrained hyper-connections of V4 and, in one pass, of V4.1; models.md
 * 2.8 and 2.17. Sums in double, like
 * the reference: the mixing weights reach every element of the streams. The products with fn
 * are a kernel of their own over stretches of columns, so that one row keeps more than one
 * multiprocessor busy. */
#include "ops/cuda/block_internal.cuh"
#include "ops/cuda/hc_internal.cuh"
#include "ops/fused_internal.h"

constexpr int LARGE_M_ROWS = 8,
              LARGE_M_VALUES = 25; /* of a block of mix_rows: of four streams */

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

/* What value i of row r is in a stretch. */
static __device__ __forceinline__ double *value_at(const mixes &a, int32_t r, int32_t stretch,
                                                   int32_t i) {
    return a.value + ((int64_t)r * stretches_of(a.cols) + stretch) * (a.n + 1) + i;
}

/* A row of x times a row of fn, the squares standing for row n, over one stretch. A thread adds every
 * 256th column in order, then the lanes of a warp meet, then the warps. */
static __global__ void __launch_bounds__(BLOCK, 2) mix_row(mixes a) {
    begin_kernel();
    const int32_t r = (int32_t)blockIdx.x, i = (int32_t)blockIdx.y,
                  stretch = (int32_t)blockIdx.z;
    const int32_t begin = stretch * STRETCH, end = min(begin + STRETCH, a.cols);
    const cuda_act *x = a.x + (int64_t)r * a.cols;
    double sum = 0.0;
#pragma unroll 8
    for (int32_t c = begin + (int32_t)threadIdx.x; c < end; c += BLOCK) {
        const double own = (double)wide(x[c]);
        sum = fma(i == a.n ? own : (double)a.fn[(int64_t)i * a.cols + c], own, sum);
    }
    sum = block_sum<BLOCK>(sum);
    if (threadIdx.x == 0) *value_at(a, r, stretch, i) = sum;
}

constexpr int STRETCH_EACH = STRETCH / BLOCK; /* columns of a thread */

constexpr int PIECES = 4; /* of the rows of fn, which arrive one after the other */

/* The first row of a piece; pieces have an even number of rows, but the last. */
static __device__ __forceinline__ int32_t piece_begin(int32_t n, int piece) {
    return min(n, (n + 2 * PIECES - 1) / (2 * PIECES) * 2 * piece);
}

/* All rows of fn in a stretch, for mix_rows: on its way before x is there. */
static __device__ void fetch_fn(float *to, const mixes &a, int32_t stretch) {
    constexpr int QUADS = STRETCH / 4;
    for (int piece = 0; piece < PIECES; piece++) {
        const int32_t end = piece_begin(a.n, piece + 1) * QUADS;
        for (int32_t i = piece_begin(a.n, piece) * QUADS + (int32_t)threadIdx.x; i < end;
             i += BLOCK) {
            const float *from =
                a.fn + (int64_t)(i / QUADS) * a.cols + stretch * STRETCH + 4 * (i % QUADS);
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                             (uint32_t)__cvta_generic_to_shared(to + 4 * i)),
                         "l"(from)
                         : "memory");
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
}

/* All pieces but the last LEFT are there. */
template <int LEFT>
static __device__ __forceinline__ void await_pieces() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
    __syncthreads();
}

/* Values i to i + N - 1 of the rows, to the warp's part. */
template <int N>
static __device__ __forceinline__ void add_values(double (*part)[LARGE_M_ROWS], int32_t i,
                                                  const double (*x)[STRETCH_EACH],
                                                  const float (*f)[STRETCH_EACH]) {
    double sum[N * LARGE_M_ROWS] = {};
    const int lane = threadIdx.x % WARP;
    constexpr int LANES = WARP / (N * LARGE_M_ROWS);
#pragma unroll
    for (int e = 0; e < STRETCH_EACH; e++) {
#pragma unroll
        for (int k = 0; k < N; k++) {
            const double own = f ? (double)f[k][e] : 0.0;
#pragma unroll
            for (int r = 0; r < LARGE_M_ROWS; r++) {
                double *to = &sum[k * LARGE_M_ROWS + r];
                *to = fma(f ? own : x[r][e], x[r][e], *to);
            }
        }
    }
    const double all = warp_sum_of(sum);
    const int at = lane / LANES;
    if (lane % LANES == 0) part[i + at / LARGE_M_ROWS][at % LARGE_M_ROWS] = all;
}

/* LARGE_M_ROWS rows at a time, which stay in registers, times all rows of fn; sums have the order of
 * mix_row(). KEPT: the stretch of fn lies in shared memory, for all rows of the block. */
template <bool KEPT>
static __global__ void __launch_bounds__(BLOCK, 1) mix_rows(mixes a) {
    constexpr int EACH = STRETCH_EACH, WARPS = BLOCK / WARP;
    extern __shared__ __align__(16) float kept[]; /* [n, STRETCH] */
    __shared__ double part[WARPS][LARGE_M_VALUES][LARGE_M_ROWS];
    const int32_t stretch = (int32_t)blockIdx.y,
                  first = stretch * STRETCH + (int32_t)threadIdx.x;
    const int warp = threadIdx.x / WARP;
    const auto load = [&](float *to, const float *from) {
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const int32_t c = first + e * BLOCK;
            to[e] = c < a.cols ? from[c] : 0.0f;
        }
    };
    const auto load_fn = [&](float *to, int32_t i) {
        if constexpr (KEPT) {
#pragma unroll
            for (int e = 0; e < EACH; e++) to[e] = kept[i * STRETCH + e * BLOCK + threadIdx.x];
        } else {
            load(to, a.fn + (int64_t)i * a.cols);
        }
    };
    griddepcontrol_launch_dependents();
    if (KEPT) fetch_fn(kept, a, stretch);
    griddepcontrol_wait();
    for (int32_t r0 = (int32_t)blockIdx.x * LARGE_M_ROWS; r0 < a.rows;
         r0 += (int32_t)gridDim.x * LARGE_M_ROWS) {
        float given[LARGE_M_ROWS][EACH];
        double x[LARGE_M_ROWS][EACH];
#pragma unroll
        for (int r = 0; r < LARGE_M_ROWS; r++) {
            load(given[r], a.x + (int64_t)min(r0 + r, a.rows - 1) * a.cols);
        }
#pragma unroll
        for (int k = 0; k < LARGE_M_ROWS * EACH; k++) {
            x[k / EACH][k % EACH] = (double)given[k / EACH][k % EACH];
        }
        const auto add_piece = [&](int piece) {
            const int32_t end = piece_begin(a.n, piece + 1);
            float f[2][EACH];
            int32_t i = piece_begin(a.n, piece);
            for (; i + 1 < end; i += 2) {
                load_fn(f[0], i);
                load_fn(f[1], i + 1);
                add_values<2>(part[warp], i, x, f);
            }
            if (i < end) {
                load_fn(f[0], i);
                add_values<1>(part[warp], i, x, f);
            }
        };
        static_assert(PIECES == 4);
        await_pieces<3>(); /* and the parts before are read */
        add_piece(0);
        await_pieces<2>();
        add_piece(1);
        await_pieces<1>();
        add_piece(2);
        await_pieces<0>();
        add_piece(3);
        add_values<1>(part[warp], a.n, x, nullptr);
        __syncthreads();
        for (int32_t k = threadIdx.x; k < LARGE_M_ROWS * (a.n + 1); k += BLOCK) {
            const int32_t r = k / (a.n + 1), v = k % (a.n + 1);
            double sum = part[0][v][r];
            for (int w = 1; w < WARPS; w++) sum += part[w][v][r];
            if (r0 + r < a.rows) *value_at(a, r0 + r, stretch, v) = sum;
        }
    }
}

/* Whether a stretch of fn fits into shared memory and is whole. */
static bool keeps_fn(const mixes &a) {
    return hd_cuda_is_sm90() && a.cols % STRETCH == 0 && (uintptr_t)a.fn % 16 == 0;
}

static void sum_mixes(hd_stream *s, const mixes &a) {
    const unsigned stretches = (unsigned)stretches_of(a.cols);
    const unsigned groups = blocks_for(a.rows, LARGE_M_ROWS);
    cudaStream_t queue = hd_cuda_stream(s);
    if (a.rows < 64 || a.n >= LARGE_M_VALUES) {
        launch_kernel(queue, mix_row, dim3((unsigned)a.rows, (unsigned)a.n + 1, stretches),
                      BLOCK, 0, 1, a);
    } else if (keeps_fn(a)) {
        const size_t bytes = (size_t)a.n * STRETCH * sizeof(float);
        const unsigned most = (unsigned)hd_stream_workers(s) / stretches;
        const unsigned across = most == 0 ? 1 : most < groups ? most : groups;
        hd_cuda_allow_shared((const void *)mix_rows<true>, bytes);
        launch_kernel(queue, mix_rows<true>, dim3(across, stretches), BLOCK, bytes, 1, a);
    } else {
        launch_kernel(queue, mix_rows<false>, dim3(groups, stretches), BLOCK, 0, 1, a);
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
#pragma unroll 8
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

/* How many blocks share a row's columns, so that a multiprocessor has about as many as it holds. */
static unsigned column_blocks(const hd_stream *s, int32_t rows) {
    const int32_t parts = 8 * hd_stream_workers(s) / rows;
    return parts < 1 ? 1 : parts > 8 ? 8 : (unsigned)parts;
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

/* As hc_pre of four streams, normed: sums of squares have the order of rms_norm(). The second block of a row finds
 * the way back. */
template <int TURNS>
static __global__ void __launch_bounds__(NORM_WIDE, 2 / TURNS)
    hc_pre_norm(hd_hc_pre_args a, const double *value, const float *norm) {
    constexpr int HC = 4, MIX = 2 * HC + HC * HC, EACH = TURNS * NORM_EACH;
    begin_kernel();
    __shared__ double m[MAX_MIX];
    const int64_t r = blockIdx.x;
    const cuda_act *x = acts(a.x) + r * HC * a.cols;
    if (blockIdx.y == 1) {
        load_mix(m, value, MIX, HC * a.cols, a.norm_eps);
        mix_back(a, m, r);
        return;
    }
    float own[HC][EACH], weight[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int32_t c = (int32_t)threadIdx.x + i * NORM_WIDE;
#pragma unroll
        for (int k = 0; k < HC; k++) own[k][i] = load_now(x + k * a.cols + c, c < a.cols);
    }
    load_mix(m, value, MIX, HC * a.cols, a.norm_eps);
    mix_forth(m, HC, a.scale[0], a.base, a.eps);
    double squares = 0.0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int32_t c = (int32_t)threadIdx.x + i * NORM_WIDE;
        double sum = 0.0;
#pragma unroll
        for (int k = 0; k < HC; k++) sum = fma(m[k], (double)own[k][i], sum);
        weight[i] = load_now(norm + c, c < a.cols);
        own[0][i] = c < a.cols ? narrow((float)sum) : 0.0f;
        squares = fma((double)own[0][i], (double)own[0][i], squares);
    }
    squares = block_sum<NORM_WIDE>(squares);
    const float scale = (float)(1.0 / sqrt(squares / a.cols + (double)a.norm_eps));
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int32_t c = (int32_t)threadIdx.x + i * NORM_WIDE;
        if (c < a.cols) acts(a.out)[r * a.cols + c] = narrow(own[0][i] * scale * weight[i]);
    }
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

/* pre: the coefficients alone; norm: hc_pre's rows normed; both NULL: hc_pre. */
static void weigh(hd_stream *s, const hd_hc_pre_args *a, float *pre, const float *norm) {
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
        sum_mixes(s, {value, acts(part.x), a->fn, part.rows, n, all});
        if (pre) {
            launch_kernel(queue, hc_predict, dim3((unsigned)part.rows), BLOCK, 0, 1, part,
                          pre + (int64_t)first * a->hc, value);
        } else if (norm) {
            const bool once = a->cols <= NORM_WIDE * NORM_EACH;
            launch_kernel(queue, once ? hc_pre_norm<1> : hc_pre_norm<2>,
                          dim3((unsigned)part.rows, 2), NORM_WIDE, 0, 1, part, value, norm);
        } else {
            launch_kernel(queue, hc_pre,
                          dim3((unsigned)part.rows, column_blocks(s, part.rows) + 1), BLOCK, 0,
                          1, part, value);
        }
    }
}

void hd_hc_pre_cuda(hd_stream *s, const hd_hc_pre_args *a) {
    weigh(s, a, nullptr, nullptr);
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
    launch_kernel(hd_cuda_stream(s), hc_mix, dim3((unsigned)a->rows, column_blocks(s, a->rows)),
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
    weigh(s, &coefficients, a->pre, nullptr);
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
        sum_mixes(s, {value, acts(part.x), a->fn, part.rows, a->hc, all});
        launch_kernel(queue, hc_head, dim3((unsigned)part.rows, column_blocks(s, part.rows)),
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

bool hc_next_many(hd_stream *s, const hd_hc_next_args *a) {
    const hd_hc_post_args post = ops_next_post(a);
    const hd_hc_pre_args pre = ops_next_pre(a);
    if (a->hc != 4 || a->pre || !a->weight || !norm_is_wide(a->cols) ||
        a->cols > 2 * NORM_WIDE * NORM_EACH) {
        return false;
    }
    if (a->y.data) hd_hc_post_cuda(s, &post);
    weigh(s, &pre, nullptr, a->weight);
    hd_cuda_check(s, "hc_next");
    return true;
}
