/* indexer_internal.cuh - what the indexer's kernels hand on: the scores of a row's keys. */
#ifndef HD_OPS_CUDA_INDEXER_INTERNAL_CUH
#define HD_OPS_CUDA_INDEXER_INTERNAL_CUH

#include "ops/cuda/cuda_internal.cuh"

/* Rows first, first + 1, ... of a call; row `first + i` has its scores at i * each. */
struct score_rows {
    uint8_t *scratch;
    size_t each;
    int32_t first;
};

static __device__ __forceinline__ float *scores_of(const score_rows &s, int32_t row) {
    return reinterpret_cast<float *>(s.scratch + (size_t)row * s.each);
}

/* Scores from bfloat16 on the tensor cores of sm_90a, of the widths that fit, for n rows. Rows
 * that keep all of their keys get none. */
bool index_fits_sm90(const hd_indexer_topk_args *a);
void index_score_sm90(cudaStream_t queue, const hd_indexer_topk_args &a, const score_rows &to,
                      int32_t n, int32_t workers);

/* The top_k best of n rows, of which a NaN is the last. */
void index_keep_best(cudaStream_t queue, const hd_indexer_topk_args &a, const score_rows &from,
                     int32_t n);

#endif
