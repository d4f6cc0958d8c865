/* block_internal.cuh - what the threads of a block do together: sums over those before, several sums
 * of a warp at once; keeping the choices of a row beside its page. */
#ifndef HD_OPS_CUDA_BLOCK_INTERNAL_CUH
#define HD_OPS_CUDA_BLOCK_INTERNAL_CUH

#include "ops/cuda/cuda_internal.cuh"

/* The sum of x over the threads before this one, and over all; of one block of THREADS. */
template <int THREADS>
static __device__ int32_t scan_before(int32_t x, int32_t *all) {
    __shared__ int32_t part[THREADS / WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int32_t upto = x;
    for (int step = 1; step < WARP; step *= 2) {
        const int32_t left = __shfl_up_sync(ALL_LANES, upto, step);
        if (lane >= step) upto += left;
    }
    if (lane == WARP - 1) part[warp] = upto;
    __syncthreads();
    const int32_t own = lane < THREADS / WARP ? part[lane] : 0;
    *all = warp_sum(own);
    const int32_t before = warp_sum(lane < warp ? own : 0);
    __syncthreads();
    return before + upto - x;
}

/* Lanes `step` apart exchange halves of their N sums, until each has one. */
template <int N>
static __device__ __forceinline__ void halve_sums(double *x, int step) {
    if constexpr (N > 1) {
        const bool upper = threadIdx.x & (unsigned)step;
#pragma unroll
        for (int k = 0; k < N / 2; k++) {
            const double sent = upper ? x[k] : x[N / 2 + k];
            x[k] = (upper ? x[N / 2 + k] : x[k]) + __shfl_xor_sync(ALL_LANES, sent, step);
        }
        halve_sums<N / 2>(x, step / 2);
    }
}

/* Of N sums that each lane has a part of: sum lane / (WARP / N), in the order of warp_sum(). */
template <int N>
static __device__ __forceinline__ double warp_sum_of(double (&x)[N]) {
    halve_sums<N>(x, WARP / 2);
#pragma unroll
    for (int step = WARP / N / 2; step > 0; step /= 2) {
        x[0] += __shfl_xor_sync(ALL_LANES, x[0], step);
    }
    return x[0];
}

/* Keeps the n choices of a row in memory of the host; all threads of the block take part. */
static __device__ __forceinline__ void replay_row(const hd_replay_log &log, int32_t row,
                                                  const int32_t *choice, int32_t n) {
    const int32_t pos = log.pos[row];
    const int64_t at = (int64_t)log.seq[row] * log.table_stride + pos / log.page_tokens;
    const int64_t entry = (int64_t)log.table[at] * log.page_tokens + pos % log.page_tokens;
    uint8_t *out = log.data + entry * log.row_bytes;
    for (int32_t j = (int32_t)threadIdx.x; j < n; j += (int32_t)blockDim.x) {
        if (log.number_bytes == 1) {
            out[j] = (uint8_t)choice[j];
        } else if (log.number_bytes == 2) {
            reinterpret_cast<uint16_t *>(out)[j] = (uint16_t)choice[j];
        } else {
            reinterpret_cast<int32_t *>(out)[j] = choice[j];
        }
    }
}

#endif
