/* keys_internal.cuh - a tile of keys in shared memory, one per lane, and scores against it. */
#ifndef HD_OPS_KEYS_INTERNAL_CUH
#define HD_OPS_KEYS_INTERNAL_CUH

#include "ops/cuda_internal.cuh"

constexpr int TILE = WARP;

/* Floats from one key to the next in shared memory: whole float4 and, in units of four banks,
 * odd, so that a warp's reads of 32 keys do not collide. */
static __host__ __device__ __forceinline__ int32_t key_stride(int32_t width) {
    const int32_t quads = (width + 3) / 4;
    return 4 * (quads | 1);
}

static __host__ __device__ __forceinline__ int32_t padded(int32_t width) {
    return (width + 3) / 4 * 4;
}

static __host__ __device__ __forceinline__ bool in_quads(const hd_paged &p) {
    return reinterpret_cast<uintptr_t>(p.data) % 16 == 0 && p.width % 4 == 0;
}

/* 16 bytes to shared memory behind the back of the registers; zeros where from is NULL. */
static __device__ __forceinline__ void copy_quad(float *to, const cuda_act *from,
                                                 const cuda_act *valid) {
    const unsigned at = (unsigned)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at),
                 "l"(from ? from : valid), "r"(from ? 16 : 0));
}

template <int LEFT>
static __device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT));
}

/* q . key of this lane's key for the warp's heads, in order of columns. */
template <int NH>
static __device__ __forceinline__ void score_tile(float *score, const float *q,
                                                  const float *key, int32_t k_dim) {
    const int32_t quads = padded(k_dim) / 4;
    const float4 *k4 = reinterpret_cast<const float4 *>(key);
    const float4 *q4 = reinterpret_cast<const float4 *>(q);
    float part[NH][4] = {};
    for (int32_t c = 0; c < quads; c++) {
        const float4 k = k4[c];
#pragma unroll
        for (int h = 0; h < NH; h++) {
            const float4 x = q4[h * quads + c];
            part[h][0] = fmaf(x.x, k.x, part[h][0]);
            part[h][1] = fmaf(x.y, k.y, part[h][1]);
            part[h][2] = fmaf(x.z, k.z, part[h][2]);
            part[h][3] = fmaf(x.w, k.w, part[h][3]);
        }
    }
#pragma unroll
    for (int h = 0; h < NH; h++) {
        score[h] = (part[h][0] + part[h][1]) + (part[h][2] + part[h][3]);
    }
}

#endif
