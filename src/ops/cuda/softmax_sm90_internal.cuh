/* softmax_sm90_internal.cuh - softmax of scores in the registers of a product of a warpgroup, where
 * four lanes have a row. Scores are taken times log2(e). */
#ifndef HD_OPS_CUDA_SOFTMAX_SM90_INTERNAL_CUH
#define HD_OPS_CUDA_SOFTMAX_SM90_INTERNAL_CUH

#include "ops/cuda/cuda_internal.cuh"

constexpr float LOG2_E = 1.44269504f;

static __device__ __forceinline__ float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

static __device__ __forceinline__ float over_quad(float x, bool is_max) {
    for (int step = 1; step < 4; step *= 2) {
        const float other = __shfl_xor_sync(ALL_LANES, x, step);
        x = is_max ? fmaxf(x, other) : x + other;
    }
    return x;
}

#endif
