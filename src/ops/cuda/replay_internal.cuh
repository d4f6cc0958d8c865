/* replay_internal.cuh - how a block keeps the choices of a row beside its page. */
#ifndef HD_OPS_CUDA_REPLAY_INTERNAL_CUH
#define HD_OPS_CUDA_REPLAY_INTERNAL_CUH

#include "ops/cuda/cuda_internal.cuh"

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
