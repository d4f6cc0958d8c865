/* gemm_cuda.cu - matrix products: plain, one small matrix per head, and that transposed. */
#include <limits.h>

#include "ops/cuda/gemm_small_m_internal.cuh"
#include "ops/cuda/gemm_large_m_internal.cuh"
#include "ops/cuda/gemm_f32_internal.cuh"
#include "ops/cuda/fused_internal.cuh"
#include "ops/cuda/gemm_mix_internal.cuh"
#include "ops/cuda/gemm_bf16_internal.cuh"

constexpr int BF16_ROWS = 33; /* from so many on rows are rounded before the product */

/* The block's rows of x and outputs, [n] of the head from row `first` on. */
template <typename J>
static __device__ __forceinline__ void name_rows(J *job, const heads_job &h, int32_t first,
                                                 int32_t n, int32_t col) {
    const int32_t head = (int32_t)blockIdx.y;
    for (int32_t m = (int32_t)threadIdx.x; m < n; m += (int32_t)blockDim.x) {
        const int64_t r = first + m, at = r * h.out_stride + head * h.out_head + col;
        job->x[m] = h.x + r * h.x_stride + head * h.x_head;
        job->out[m] = h.out_f32 ? (void *)(static_cast<float *>(h.out) + at)
                                : (void *)(static_cast<cuda_act *>(h.out) + at);
    }
    __syncthreads();
}

template <int R, int MT, int NT>
static __global__ void __launch_bounds__(PRODUCT_THREADS)
    product_heads(heads_job h, weight_shape s, weight_arrays a) {
    begin_kernel();
    __shared__ product_job job;
    const int32_t first = (int32_t)blockIdx.z * MT, col = (int32_t)blockIdx.x * NT * WARP;
    const product_span span = {min(MT, h.rows - first),
                               h.first_row + (int32_t)blockIdx.y * h.head_rows + col,
                               min(NT * WARP, h.n_rows - col), h.out_f32};
    name_rows(&job, h, first, span.n_x, col);
    product<R, MT, NT>(job, span, s, a);
}

template <int R, int MT, int NT>
static void launch_product(cudaStream_t queue, const heads_job &h, const hd_weight *w) {
    const dim3 grid(blocks_for(h.n_rows, NT * WARP), (unsigned)h.heads, blocks_for(h.rows, MT));
    launch_kernel(queue, product_heads<R, MT, NT>, grid, PRODUCT_THREADS, 0, 1, h, shape_of(w),
                  arrays_of(w));
}

template <int R, int P, typename S>
static __global__ void __launch_bounds__(SMALL_M_THREADS, 2)
    small_m_heads(heads_job h, weight_shape s, weight_arrays a, int32_t outs) {
    griddepcontrol_launch_dependents();
    extern __shared__ __align__(1024) uint8_t shared[];
    __shared__ mma_job job;
    const int32_t col = (int32_t)blockIdx.x * outs;
    const mma_block block = {h.rows, h.first_row + (int32_t)blockIdx.y * h.head_rows + col,
                             min(outs, h.n_rows - col), h.out_f32};
    name_rows(&job, h, 0, h.rows, col);
    if constexpr (HAS_SMALL_M<S>) mma_small_m<R, P, S>(shared, job, block, s, a);
}

template <int R, int P, typename S>
static void launch_small_m(cudaStream_t queue, const heads_job &h, const hd_weight *w,
                           int groups) {
    const size_t bytes = sizeof(small_m_shared<R, S>);
    const int32_t outs = small_m_outs<S>(groups); /* of a block */
    const dim3 grid(blocks_for(h.n_rows, outs), (unsigned)h.heads);
    hd_cuda_allow_shared((const void *)small_m_heads<R, P, S>, bytes);
    launch_kernel(queue, small_m_heads<R, P, S>, grid, SMALL_M_THREADS, bytes, 1, h,
                  shape_of(w), arrays_of(w), outs);
}

/* ---- several matrices with the same few rows of x ---- */

struct set_part {
    void *out;
    int64_t out_stride;
    weight_shape s;
    weight_arrays a;
    int32_t n_rows, first_block;
    bool out_f32;
};

struct set_job {
    const cuda_act *x;
    int64_t x_stride;
    int32_t rows, n, outs; /* of x, parts, stored rows of a block */
    set_part part[HD_MAX_SET];
};

template <int R, int P, typename S>
static __global__ void __launch_bounds__(SMALL_M_THREADS, 2)
    small_m_set(const __grid_constant__ set_job j) {
    griddepcontrol_launch_dependents();
    extern __shared__ __align__(1024) uint8_t shared[];
    __shared__ mma_job job;
    int i = 0;
    while (i + 1 < j.n && (int32_t)blockIdx.x >= j.part[i + 1].first_block) i++;
    const set_part &p = j.part[i];
    const int32_t col = ((int32_t)blockIdx.x - p.first_block) * j.outs, m = (int)threadIdx.x;
    if (m < j.rows) {
        const int64_t at = m * p.out_stride + col;
        job.x[m] = j.x + m * j.x_stride;
        job.out[m] = p.out_f32 ? (void *)(static_cast<float *>(p.out) + at)
                               : (void *)(static_cast<cuda_act *>(p.out) + at);
    }
    __syncthreads();
    const mma_block block = {j.rows, col, min(j.outs, p.n_rows - col), p.out_f32};
    if constexpr (HAS_SMALL_M<S>) mma_small_m<R, P, S>(shared, job, block, p.s, p.a);
}

template <int R, int P, typename S>
static void launch_set(hd_stream *s, set_job *j, int groups) {
    const size_t bytes = sizeof(small_m_shared<R, S>);
    int32_t blocks = 0;
    j->outs = small_m_outs<S>(groups);
    for (int32_t i = 0; i < j->n; i++) {
        j->part[i].first_block = blocks;
        blocks += (int32_t)blocks_for(j->part[i].n_rows, j->outs);
    }
    hd_cuda_allow_shared((const void *)small_m_set<R, P, S>, bytes);
    launch_kernel(hd_cuda_stream(s), small_m_set<R, P, S>, dim3((unsigned)blocks),
                  SMALL_M_THREADS, bytes, 1, *j);
}

template <int R, int P>
static void multiply_set(hd_stream *s, set_job *j) {
    int64_t outs = 0;
    for (int32_t i = 0; i < j->n; i++) outs += j->part[i].n_rows;
    launch_small_m_plan(
        (int32_t)outs, 1, hd_stream_workers(s), INT_MAX,
        [&](auto shape, int groups) { launch_set<R, P, decltype(shape)>(s, j, groups); });
}

/* Whether the product is one of those of form R that one launch computes. */
static bool joins_set(const hd_linear_set_args *a, int32_t i, reading r) {
    const int64_t stride = stride_of(a->x, a->w[i]->cols);
    return a->w[i]->cols == a->w[0]->cols &&
           reading_of(a->w[i], x_fits(acts(a->x), stride, 0)) == r;
}

/* Those of form R in one launch; returns them as bits. */
template <int R, int P>
static uint32_t multiply_form(hd_stream *s, const hd_linear_set_args *a, uint32_t left) {
    set_job j = {};
    uint32_t taken = 0;
    j.x = acts(a->x);
    j.x_stride = stride_of(a->x, a->w[0]->cols);
    j.rows = a->rows;
    for (int32_t i = 0; i < a->n; i++) {
        if (!(left >> i & 1) || !joins_set(a, i, (reading)R)) continue;
        taken |= 1u << i;
        j.part[j.n++] = {a->out[i].data,          stride_of(a->out[i], a->w[i]->rows),
                         shape_of(a->w[i]),       arrays_of(a->w[i]),
                         a->w[i]->rows,           0,
                         a->out[i].type == HD_F32};
    }
    if (j.n < 2) return 0;
    multiply_set<R, P>(s, &j);
    return taken;
}

static heads_job job_of(const hd_linear_args *a);

/* Those of one form with many rows, which are rounded once; returns them as bits. */
static uint32_t multiply_rounded_once(hd_stream *s, const hd_linear_set_args *a, uint32_t left,
                                      reading form) {
    heads_job job[HD_MAX_SET];
    const hd_weight *w[HD_MAX_SET];
    uint32_t taken = 0;
    int32_t n = 0;
    for (int32_t i = 0; i < a->n; i++) {
        const hd_linear_args one = ops_set_linear(a, i);
        if (!(left >> i & 1) || !joins_set(a, i, form)) continue;
        taken |= 1u << i;
        w[n] = a->w[i];
        job[n++] = job_of(&one);
    }
    return n > 1 && multiply_bf16(s, job, w, n) ? taken : 0;
}

template <int P>
static uint32_t multiply_forms(hd_stream *s, const hd_linear_set_args *a, uint32_t left) {
    if (P == FAST && a->rows >= BF16_ROWS) {
        uint32_t taken = multiply_rounded_once(s, a, left, READ_BF16);
        taken |= multiply_rounded_once(s, a, left & ~taken, READ_E4M3);
        return taken | multiply_rounded_once(s, a, left & ~taken, READ_MXE4M3);
    }
    if (a->rows == 0 || a->rows > SMALL_M_ROWS) return 0;
    const uint32_t bf16 = multiply_form<READ_BF16, P>(s, a, left);
    const uint32_t mx = multiply_form<READ_MXE4M3, P>(s, a, left & ~bf16);
    const uint32_t packed = multiply_form<READ_E2M1, P>(s, a, left & ~bf16 & ~mx);
    const uint32_t taken = bf16 | mx | packed;
    return taken | multiply_form<READ_E4M3, P>(s, a, left & ~taken);
}

uint32_t multiply_several(hd_stream *s, const hd_linear_set_args *a, uint32_t left,
                          int products) {
    return products == EXACT ? multiply_forms<EXACT>(s, a, left)
                             : multiply_forms<FAST>(s, a, left);
}

/* n_blocks share each row's slices. */
template <int R, int P, int ROWS>
static __global__ void __launch_bounds__(large_m_of<R, P, ROWS>::THREADS,
                                         large_m_of<R, P, ROWS>::AT_ONCE)
    large_m_heads(heads_job h, weight_shape s, weight_arrays a, int n_blocks) {
    begin_kernel();
    extern __shared__ __align__(1024) uint8_t shared[];
    __shared__ mma_job job;
    const int32_t first = (int32_t)blockIdx.z * ROWS;
    const int32_t col = (int32_t)blockIdx.x / n_blocks * LARGE_M_OUTS;
    const mma_block block = {min(ROWS, h.rows - first),
                             h.first_row + (int32_t)blockIdx.y * h.head_rows + col,
                             min(LARGE_M_OUTS, h.n_rows - col), h.out_f32};
    name_rows(&job, h, first, block.n_x, col);
    if constexpr (HAS_LARGE_M<ROWS>) {
        mma_large_m<R, P, ROWS>(shared, job, block, s, a, (int)blockIdx.x % n_blocks, n_blocks);
    }
}

template <int R, int P, int ROWS>
static void launch_large_m(hd_stream *stream, const heads_job &h, const hd_weight *w) {
    const dim3 grid(blocks_for(h.n_rows, LARGE_M_OUTS), (unsigned)h.heads,
                    blocks_for(h.rows, ROWS));
    const int64_t blocks = (int64_t)grid.x * grid.y * grid.z;
    const int n = blocks_of_row<R, P, ROWS>(blocks, w->cols, hd_stream_workers(stream));
    launch_cluster(large_m_heads<R, P, ROWS>, grid, large_m_of<R, P, ROWS>::THREADS, n,
                   large_m_bytes<R, P, ROWS>(n), hd_cuda_stream(stream), h, shape_of(w),
                   arrays_of(w), n);
}

template <int R, int P>
static void launch_rows(hd_stream *s, const heads_job &h, const hd_weight *w) {
    constexpr bool ROUNDS = P == FAST && R != READ_E2M1;
    if (ROUNDS && h.rows >= BF16_ROWS && multiply_bf16(s, &h, &w, 1)) return;
    if constexpr (!ROUNDS) {
        if (h.rows > 32 && hd_cuda_is_sm90()) return launch_large_m<R, P, 64>(s, h, w);
    }
    if (h.rows > SMALL_M_ROWS) return launch_large_m<R, P, 32>(s, h, w);
    launch_small_m_plan(
        h.n_rows, h.heads, hd_stream_workers(s), INT_MAX, [&](auto shape, int groups) {
            launch_small_m<R, P, decltype(shape)>(hd_cuda_stream(s), h, w, groups);
        });
}

template <int P>
static void multiply_heads(hd_stream *s, const heads_job &h, const hd_weight *w) {
    cudaStream_t queue = hd_cuda_stream(s);
    if (h.rows == 0) return;
    switch (reading_of(w, x_fits(h.x, h.x_stride, h.x_head))) {
    case READ_BF16:
        return launch_rows<READ_BF16, P>(s, h, w);
    case READ_E4M3:
        return launch_rows<READ_E4M3, P>(s, h, w);
    case READ_MXE4M3:
        return launch_rows<READ_MXE4M3, P>(s, h, w);
    case READ_E2M1:
        return launch_rows<READ_E2M1, P>(s, h, w);
    case READ_F32:
        if (h.rows == 1) return launch_product<READ_F32, 1, 1>(queue, h, w);
        if (h.rows <= 4) return launch_product<READ_F32, 4, 1>(queue, h, w);
        return launch_product<READ_F32, 16, 2>(queue, h, w);
    case READ_ANY:
        return launch_product<READ_ANY, 4, 1>(queue, h, w);
    }
}

/* What the library takes, and the rest by the kernels above. */
static void multiply_by_cublaslt(hd_stream *s, const heads_job &h, const hd_weight *w) {
    const int32_t done = cublaslt_multiply(s, h, w);
    heads_job rest = h;
    rest.out = static_cast<cuda_act *>(h.out) + done * h.out_stride;
    rest.x += done * h.x_stride;
    rest.rows -= done;
    multiply_heads<FAST>(s, rest, w);
}

static heads_job job_of(const hd_linear_args *a) {
    heads_job h = {};
    h.out = a->out.data;
    h.out_f32 = a->out.type == HD_F32;
    h.x = acts(a->x);
    h.out_stride = stride_of(a->out, a->w->rows);
    h.x_stride = stride_of(a->x, a->w->cols);
    h.rows = a->rows;
    h.heads = 1;
    h.n_rows = a->w->rows;
    return h;
}

template <int P>
static void linear(hd_stream *s, const hd_linear_args *a) {
    multiply_heads<P>(s, job_of(a), a->w);
    hd_cuda_check(s, "linear");
}

void hd_linear_cuda(hd_stream *s, const hd_linear_args *a) {
    linear<EXACT>(s, a);
}

void hd_linear_cuda_fast(hd_stream *s, const hd_linear_args *a) {
    linear<FAST>(s, a);
}

void hd_linear_cuda_cublaslt(hd_stream *s, const hd_linear_args *a) {
    multiply_by_cublaslt(s, job_of(a), a->w);
    hd_cuda_check(s, "linear");
}

template <int P>
static void mix(hd_stream *s, const heads_job &h, const hd_weight *w) {
    if (h.rows == 0) return;
    if (transposed_fits(h, w)) {
        launch_transposed<P>(hd_cuda_stream(s), h, w);
    } else {
        launch_mix(hd_cuda_stream(s), h, w);
    }
}

static heads_job job_of(const hd_linear_heads_args *a) {
    heads_job h = {};
    h.out = a->out.data;
    h.x = acts(a->x);
    h.out_stride = stride_of(a->out, (int64_t)a->heads * a->out_head);
    h.out_head = a->out_head;
    h.x_stride = stride_of(a->x, (int64_t)a->heads * a->x_head);
    h.x_head = a->x_head;
    h.rows = a->rows;
    h.heads = a->heads;
    h.n_rows = a->n_rows;
    h.first_row = a->first_row;
    h.head_rows = a->head_rows;
    return h;
}

template <int P>
static void linear_heads(hd_stream *s, const hd_linear_heads_args *a) {
    const heads_job h = job_of(a);
    const auto many = a->transpose ? multiply_absorbed : multiply_values;
    if (P == FAST && many(s, h, a->w)) {
        hd_cuda_check(s, "linear_heads");
        return;
    }
    if (a->transpose) {
        mix<P>(s, h, a->w);
    } else {
        multiply_heads<P>(s, h, a->w);
    }
    hd_cuda_check(s, "linear_heads");
}

void hd_linear_heads_cuda(hd_stream *s, const hd_linear_heads_args *a) {
    linear_heads<EXACT>(s, a);
}

void hd_linear_heads_cuda_fast(hd_stream *s, const hd_linear_heads_args *a) {
    linear_heads<FAST>(s, a);
}

void hd_linear_heads_cuda_cublaslt(hd_stream *s, const hd_linear_heads_args *a) {
    if (a->transpose) {
        mix<FAST>(s, job_of(a), a->w);
    } else {
        multiply_by_cublaslt(s, job_of(a), a->w);
    }
    hd_cuda_check(s, "linear_heads");
}
