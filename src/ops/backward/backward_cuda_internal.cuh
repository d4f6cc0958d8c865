/* backward_cuda_internal.cuh - what the CUDA backward operators share.
 *
 * Gradients of parameters are sums over chunks of rows (row_sums_internal.cuh). Gradients of activations
 * are sums in an order that follows from the row alone. */
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

#endif
