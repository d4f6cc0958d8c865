/* split_fp16_mma_internal.cuh - rows of narrow numbers in shared memory on the tensor cores:
 * fragments and products. */
#ifndef HD_OPS_CUDA_SPLIT_FP16_MMA_INTERNAL_CUH
#define HD_OPS_CUDA_SPLIT_FP16_MMA_INTERNAL_CUH

#include "ops/cuda/split_fp16_internal.cuh"

static __device__ __forceinline__ void load_four(uint32_t *r, uint32_t at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at));
}

static __device__ __forceinline__ void load_four_transposed(uint32_t *r, uint32_t at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at));
}

/* A: 16 rows from `row` on, 16 columns from 16 * step on. part 0: highs, 1: lows. */
static __device__ __forceinline__ void load_a(uint32_t *a, const half_rows &r, int row,
                                              int step, int part) {
    const int lane = threadIdx.x % WARP, m = lane / 8;
    load_four(a, chunk_at(r, row + m % 2 * 8 + lane % 8, 2 * (2 * step + m / 2) + part));
}

/* B of two tiles of 8 rows each, 16 columns: b[0], b[1] and b[2], b[3]. */
static __device__ __forceinline__ void load_b(uint32_t *b, const half_rows &r, int row,
                                              int step, int part) {
    const int lane = threadIdx.x % WARP, m = lane / 8;
    load_four(b, chunk_at(r, row + m / 2 * 8 + lane % 8, 2 * (2 * step + m % 2) + part));
}

/* B of two tiles of 8 columns each, from 8 * unit on, 16 rows as the inner dimension. */
static __device__ __forceinline__ void load_b_transposed(uint32_t *b, const half_rows &r,
                                                         int row, int unit, int part) {
    const int lane = threadIdx.x % WARP, m = lane / 8;
    load_four_transposed(b, chunk_at(r, row + m % 2 * 8 + lane % 8, 2 * (unit + m / 2) + part));
}

template <int P>
static __device__ __forceinline__ void mma_half(float *d, const uint32_t *a, uint32_t b0,
                                                uint32_t b1) {
    if constexpr (P == EXACT) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

/* All products but low times low, or FAST, high times high:
 * d[i] += A[i / NB] B[i % NB] over NA tiles of 16 rows and NB of 8 columns; a [part][NA], b
 * [part][NB / 2]: two tiles each. The small products go first, and products that follow each
 * other have sums of their own, because one that waits for the one before takes several times as
 * long. */
template <int P, int NA, int NB>
static __device__ __forceinline__ void mma_split(float (*d)[4], const uint32_t (*a)[NA][4],
                                                 const uint32_t (*b)[NB / 2][4]) {
#pragma unroll
    for (int product = 3 - P; product < 3; product++) {
        const int low_a = product == 1, low_b = product == 0;
#pragma unroll
        for (int i = 0; i < NA * NB; i++) {
            const uint32_t *pair = &b[low_b][i % NB / 2][i % 2 * 2];
            mma_half<P>(d[i], a[low_a][i / NB], pair[0], pair[1]);
        }
    }
}

#endif
