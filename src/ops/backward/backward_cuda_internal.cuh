/* backward_cuda_internal.cuh - what the CUDA backward operators share.
 *
 * As in backward.h, gradients of parameters are sums over rows in ascending order, each by one
 * thread. Gradients of activations are sums in an order that follows from the row alone. */
#ifndef HD_OPS_BACKWARD_BACKWARD_CUDA_INTERNAL_CUH
#define HD_OPS_BACKWARD_BACKWARD_CUDA_INTERNAL_CUH

#include "ops/backward.h"
#include "ops/cuda/cuda_internal.cuh"

extern "C" {
#define X(op) hd_##op##_fn hd_##op##_cuda;
HD_BACKWARD_OP_LIST(X)
#undef X
void hd_linear_back_cuda(hd_stream *s, const hd_linear_heads_args *a);
}

static __host__ __device__ __forceinline__ const float *floats(const hd_rows &x) {
    return static_cast<const float *>(x.data);
}

/* The dot product of a warp's lanes, the same bits in every lane. */
static __device__ __forceinline__ double warp_dot64(const float *a, const float *b, int32_t n) {
    double sum = 0.0;
    for (int32_t c = (int32_t)threadIdx.x % WARP; c < n; c += WARP) {
        sum += (double)a[c] * (double)b[c];
    }
    return warp_sum(sum);
}

/* ---- sums over rows, in order ---- */

/* Threads of a block that adds up WARP columns: one warp adds, the others bring the next rows. */
constexpr int BRINGERS = BLOCK, SUM_THREADS = BRINGERS + WARP, SUM_ROWS = 128;

/* Lane c of the last warp returns sum + term(0, c) + term(1, c) + ... + term(n - 1, c), in order; the
 * other threads have nothing. By a block of SUM_THREADS; columns from `cols` on are left out. */
template <typename TERM>
static __device__ float sum_in_order(float sum, int32_t n, int32_t cols, TERM term) {
    __shared__ float terms[2][SUM_ROWS][WARP];
    const int32_t lane = (int32_t)threadIdx.x % WARP, own = (int32_t)threadIdx.x / WARP;
    const bool brings = threadIdx.x < BRINGERS;
    for (int32_t first = 0; first < n + SUM_ROWS; first += SUM_ROWS) {
        float(*to)[WARP] = terms[first / SUM_ROWS % 2],
        (*from)[WARP] = terms[1 - first / SUM_ROWS % 2];
        if (brings && lane < cols) {
#pragma unroll 8
            for (int32_t k = own; k < min(SUM_ROWS, n - first); k += BRINGERS / WARP) {
                to[k][lane] = term(first + k, lane);
            }
        } else if (!brings && first > 0) {
            const int32_t before = first - SUM_ROWS, rows = min(SUM_ROWS, n - before);
#pragma unroll 16
            for (int32_t k = 0; k < rows; k++) sum += from[k][lane];
        }
        __syncthreads();
    }
    return sum;
}

/* Whether this thread has a sum of sum_in_order(). */
static __device__ __forceinline__ bool has_sum(int32_t cols) {
    return threadIdx.x >= BRINGERS && (int32_t)threadIdx.x % WARP < cols;
}

/* The sequence of a row. */
static __device__ __forceinline__ int32_t sequence_of(const hd_seqs &s, int32_t row) {
    int32_t low = 0, high = s.n - 1;
    while (low < high) {
        const int32_t middle = (low + high + 1) / 2;
        if (s.first_row[middle] <= row) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

#endif
