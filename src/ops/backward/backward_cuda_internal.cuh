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

/* sum + part[0] + part[each] + ..., in order; n numbers, loaded ahead. */
static __device__ __forceinline__ float sum_in_order(float sum, const float *part, int32_t n,
                                                     int64_t each) {
    constexpr int AHEAD = 16;
    for (int32_t first = 0; first < n; first += AHEAD) {
        float x[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++) x[k] = first + k < n ? part[(first + k) * each] : 0.0f;
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            if (first + k < n) sum += x[k];
        }
    }
    return sum;
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
