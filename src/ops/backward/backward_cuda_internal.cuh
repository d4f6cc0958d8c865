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

/* Where number `at` is, if every lane of a warp has n, one lane's after another's; a warp's work. */
struct lane_place {
    int32_t lane;   /* that has it; -1: none */
    int32_t before; /* numbers of the lanes before that one */
    int32_t all;    /* numbers of all lanes */
};

static __device__ __forceinline__ lane_place find_lane(int32_t n, int32_t at) {
    const int32_t own = (int32_t)threadIdx.x % WARP;
    int32_t upto = n; /* of this lane and those before */
    for (int step = 1; step < WARP; step *= 2) {
        const int32_t before = __shfl_up_sync(ALL_LANES, upto, step);
        if (own >= step) upto += before;
    }
    const int32_t lane = __ffs((int)__ballot_sync(ALL_LANES, at < upto)) - 1;
    return {lane, __shfl_sync(ALL_LANES, upto - n, lane & (WARP - 1)),
            __shfl_sync(ALL_LANES, upto, WARP - 1)};
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
