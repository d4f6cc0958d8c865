/* gemm_wgmma_internal.cuh - 64 rows of x in bfloat16 times stored rows by wgmma: a warpgroup has 64
 * stored rows, as the left operand in registers, and all of x, which lies in shared memory.
 *
 * The columns of a span are permuted as in mma_internal.cuh, so sums have the bits of its products. */
#ifndef HD_OPS_CUDA_GEMM_WGMMA_INTERNAL_CUH
#define HD_OPS_CUDA_GEMM_WGMMA_INTERNAL_CUH

#include "ops/cuda/mma_internal.cuh"
#include "ops/cuda/wgmma_internal.cuh"

constexpr int WGMMA_ROWS = BOX_ROWS, WGMMA_TILES = WGMMA_ROWS / 8;

/* A span of x: boxes of 64 columns. */
template <int R>
struct box_x {
    enum { BOXES = span_of<R>::COLS / BOX_COLS };
    uint8_t at[BOXES][BOX_BYTES];
};

/* Eight columns of row `row`: those of a quarter of the lanes at steps 2 * eight and 2 * eight + 1. */
template <int R>
static __device__ __forceinline__ void store_eight(box_x<R> *to, int row, int eight,
                                                   int quarter, const x_eight<1> &x) {
    const int step = 2 * eight; /* two chunks of a box for each */
    const uint32_t box = shared_address(to->at[step / 4]);
    const uint32_t pair[4] = {x.part[0].x, x.part[0].y, x.part[0].z, x.part[0].w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(box + box_at(row, 2 * step % 8 + i) +
                                                     (uint32_t)(4 * quarter)),
                     "r"(pair[i])
                     : "memory");
    }
}

/* d = the span's sums of 64 rows of x with the warpgroup's stored rows. */
template <int R>
static __device__ __forceinline__ void multiply_span(float (&d)[4 * WGMMA_TILES],
                                                     const lane_raw<R> *raw,
                                                     const box_x<R> *x) {
    constexpr int STEPS = 2 * span_of<R>::EIGHTS;
    uint32_t a[STEPS][4];
#pragma unroll
    for (int step = 0; step < STEPS; step++) make_step<R>(a[step], raw, step);
    const uint64_t b = box_descriptor(shared_address(x->at[0]));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        wgmma_m64n64k16(d, a[step], b + step / 4 * NEXT_BOX + step % 4 * 2, step > 0);
    }
    wgmma_commit_group();
    wgmma_wait_group<0>();
}

#endif
