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

/* Keys among which a row chooses: those of some blocks, in ascending order. A key's place is its number
 * among them. */
struct key_pool {
    const int32_t *blocks; /* [rows, n] ascending, then -1; NULL: all that the row sees */
    int32_t n, block;      /* a block's keys; the last that the row sees may have less */
};

/* How many keys of `visible` are in row's pool; all N threads of a block. */
template <int N>
static __device__ int32_t pool_size(const key_pool &p, int32_t row, int32_t visible) {
    const int32_t *blocks = p.blocks + (int64_t)row * p.n;
    int32_t n = 0;
    for (int32_t i = threadIdx.x; i < p.n; i += N) n += blocks[i] >= 0;
    n = block_sum<N>(n);
    return n ? (n - 1) * p.block + min(p.block, visible - blocks[n - 1] * p.block) : 0;
}

static __device__ __forceinline__ int32_t pool_key(const key_pool &p, int32_t row,
                                                   int32_t place) {
    return p.blocks[(int64_t)row * p.n + place / p.block] * p.block + place % p.block;
}

/* Scores from bfloat16 on the tensor cores of sm_90a, on its path, of the widths that fit, for n rows. Rows
 * that keep all of their keys get none. */
bool index_fits_sm90(const hd_indexer_topk_args *a);
void index_score_sm90(cudaStream_t queue, const hd_indexer_topk_args &a, const score_rows &to,
                      int32_t n, int32_t workers);

/* What is kept of a row. */
struct best_args {
    int32_t *out; /* [rows, k] */
    const int32_t *pos;
    int32_t ratio, k;
    key_pool pool;  /* of the keys */
    bool of_blocks; /* blocks of pool.block keys, of all that the row sees; no keys */
    int64_t most;   /* scores of a row, at most */
};

/* The k best of n rows, of which a NaN is the last. */
void index_keep_best(cudaStream_t queue, const best_args &a, const score_rows &from, int32_t n);

#endif
