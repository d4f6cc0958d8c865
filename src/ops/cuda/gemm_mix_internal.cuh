/* gemm_mix_internal.cuh - rows of x times the transpose of any stored matrices, one per head, in
 * ordinary arithmetic: a thread per column, MIX_ROWS rows of x at once. */
#ifndef HD_OPS_CUDA_GEMM_MIX_INTERNAL_CUH
#define HD_OPS_CUDA_GEMM_MIX_INTERNAL_CUH

#include "ops/cuda/gemm_transposed_internal.cuh"

constexpr int MIX_THREADS = 128, MIX_ROWS = 8, MIX_DEPTH = 256;

/* An element without its scale; of any matrix with it. */
template <int R>
static __device__ __forceinline__ float element_at(const hd_weight &w, int32_t row,
                                                   int32_t col) {
    const int64_t i = (int64_t)row * w.cols + col;
    const uint8_t *bytes = static_cast<const uint8_t *>(w.data);
    if constexpr (R == READ_F32) return __ldg(static_cast<const float *>(w.data) + i);
    if constexpr (R == READ_BF16) {
        const uint16_t bits = __ldg(static_cast<const uint16_t *>(w.data) + i);
        return __uint_as_float((uint32_t)bits << 16);
    }
    if constexpr (R == READ_E4M3) return e4m3_to_f32(__ldg(bytes + i));
    if constexpr (R == READ_E2M1) return e2m1_to_f32(__ldg(bytes + i / 2) >> (4 * (i & 1)));
    return weight_at(w, row, col);
}

/* acc += xs[m][i] * W[row0 + i, col] for i < n, in order of i */
template <int R>
static __device__ __forceinline__ void mix_column(float *acc, const float (*xs)[MIX_DEPTH],
                                                  const hd_weight &w, int32_t row0, int32_t n,
                                                  int32_t col) {
    const bool scaled = R != READ_ANY && w.scale;
    for (int32_t i = 0; i < n;) { /* rows of one scale */
        const int32_t left = scaled ? w.block_rows - (row0 + i) % w.block_rows : n - i;
        const int32_t end = min(n, i + left);
        const float scale = scaled ? scale_at(w, row0 + i, col) : 1.0f;
#pragma unroll 8
        for (; i < end; i++) {
            const float element = element_at<R>(w, row0 + i, col) * scale;
#pragma unroll
            for (int m = 0; m < MIX_ROWS; m++) acc[m] = fmaf(xs[m][i], element, acc[m]);
        }
    }
}

/* out[r, h, c] = sum over i of x[r, h, i] * W[first + i, c], in order of i */
template <int R>
static __global__ void __launch_bounds__(MIX_THREADS) mix_heads(heads_job h, hd_weight w) {
    begin_kernel();
    __shared__ float xs[MIX_ROWS][MIX_DEPTH];
    const int32_t head = (int32_t)blockIdx.y, first = (int32_t)blockIdx.z * MIX_ROWS;
    const int32_t col = (int32_t)(blockIdx.x * MIX_THREADS + threadIdx.x);
    const int32_t row0 = h.first_row + head * h.head_rows;
    float acc[MIX_ROWS] = {};
    for (int32_t from = 0; from < h.n_rows; from += MIX_DEPTH) {
        const int32_t n = min(MIX_DEPTH, h.n_rows - from);
        __syncthreads();
        for (int32_t m = 0; m < MIX_ROWS && first + m < h.rows; m++) {
            const cuda_act *x = h.x + (first + m) * h.x_stride + head * h.x_head + from;
            for (int32_t i = threadIdx.x; i < n; i += MIX_THREADS) xs[m][i] = wide(x[i]);
        }
        __syncthreads();
        if (col < w.cols) mix_column<R>(acc, xs, w, row0 + from, n, col);
    }
    if (col >= w.cols) return;
#pragma unroll
    for (int m = 0; m < MIX_ROWS; m++) {
        if (first + m >= h.rows) break;
        cuda_act *out = static_cast<cuda_act *>(h.out) + (first + m) * h.out_stride;
        out[head * h.out_head + col] = narrow(acc[m]);
    }
}

static void launch_mix(cudaStream_t queue, const heads_job &h, const hd_weight *w) {
    const dim3 grid(blocks_for(w->cols, MIX_THREADS), (unsigned)h.heads,
                    blocks_for(h.rows, MIX_ROWS));
    switch (reading_of(w, true)) {
    case READ_F32:
        launch_kernel(queue, mix_heads<READ_F32>, grid, MIX_THREADS, 0, 1, h, *w);
        break;
    case READ_BF16:
        launch_kernel(queue, mix_heads<READ_BF16>, grid, MIX_THREADS, 0, 1, h, *w);
        break;
    case READ_E4M3:
        launch_kernel(queue, mix_heads<READ_E4M3>, grid, MIX_THREADS, 0, 1, h, *w);
        break;
    case READ_E2M1:
        launch_kernel(queue, mix_heads<READ_E2M1>, grid, MIX_THREADS, 0, 1, h, *w);
        break;
    case READ_MXE4M3:
    case READ_ANY:
        launch_kernel(queue, mix_heads<READ_ANY>, grid, MIX_THREADS, 0, 1, h, *w);
        break;
    }
}

#endif
