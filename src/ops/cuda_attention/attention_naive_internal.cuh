/* attention_naive_internal.cuh - what the kernels of MLA's naive form on sm_90a share: the keys and
 * values that are made of latents, and where they lie.
 *
 * Keys fall into tiles of 128, counted from the start of their sequence, and rows into tiles of
 * 256, counted from the first of the call. A sequence without rows has no tiles. */
#ifndef HD_OPS_CUDA_ATTENTION_NAIVE_INTERNAL_CUH
#define HD_OPS_CUDA_ATTENTION_NAIVE_INTERNAL_CUH

#include "ops/cuda/cuda_internal.cuh"
#include "ops/cuda/tensor_map_sm90_internal.cuh"

constexpr int NAIVE_KEYS = 128, NAIVE_ROWS = 256; /* of a tile */
constexpr int NAIVE_RANK = 512, NAIVE_NOPE = 128, NAIVE_ROPE = 64, NAIVE_V = 128;
constexpr int NAIVE_MADE = NAIVE_NOPE + NAIVE_V, NAIVE_KEY = NAIVE_NOPE + NAIVE_ROPE;

/* What a launch makes and reads, of heads first_head and on. */
struct naive_keys {
    __nv_bfloat16 *weights; /* [heads, NAIVE_MADE, NAIVE_RANK] in the order of naive_row_of() */
    __nv_bfloat16 *made; /* [heads, tiles * NAIVE_KEYS, key without its rotated part | value] */
    __nv_bfloat16 *rotated; /* [tiles * NAIVE_KEYS, NAIVE_ROPE] of all heads */
    int32_t tiles, first_head, heads;
};

/* Queues the kernels that make them. */
void naive_make_keys(hd_stream *s, const hd_attention_naive_args &a, const naive_keys &k);

/* ---- a sequence's tiles ---- */

struct naive_tile {
    int32_t seq, tile;    /* within the sequence; seq -1: there is none */
    int32_t n, first_key; /* tiles of the sequence; tiles of keys of those before it */
};

/* Tiles of a sequence's rows, and above them those of its keys. */
static __device__ __forceinline__ int64_t naive_tiles_of(const hd_seqs &s, int32_t seq) {
    if (seq >= s.n) return 0;
    const int32_t first = s.first_row[seq], end = s.first_row[seq + 1];
    if (first == end) return 0;
    const int32_t rows = (end - first + NAIVE_ROWS - 1) / NAIVE_ROWS;
    return (int64_t)(s.pos[end - 1] / NAIVE_KEYS + 1) << 32 | rows;
}

/* Tile `index` of all keys, or of all rows; a warp's work. */
template <bool KEYS>
static __device__ naive_tile find_naive_tile(const hd_seqs &s, int32_t index) {
    constexpr int SHIFT = KEYS ? 32 : 0;
    const int lane = threadIdx.x % WARP;
    int64_t before = 0;
    for (int32_t first = 0; first < s.n; first += WARP) {
        const int64_t own = naive_tiles_of(s, first + lane);
        int64_t upto = own;
        for (int step = 1; step < WARP; step *= 2) {
            const int64_t left = __shfl_up_sync(ALL_LANES, upto, step);
            if (lane >= step) upto += left;
        }
        upto += before;
        const int at = __popc(__ballot_sync(ALL_LANES, (int32_t)(upto >> SHIFT) <= index));
        if (at < WARP) {
            const int64_t begin = __shfl_sync(ALL_LANES, upto - own, at);
            const int64_t n = __shfl_sync(ALL_LANES, own, at);
            return {first + at, index - (int32_t)(begin >> SHIFT), (int32_t)(n >> SHIFT),
                    (int32_t)(begin >> 32)};
        }
        before = __shfl_sync(ALL_LANES, upto, WARP - 1);
    }
    return {-1, 0, 0, 0};
}

/* Tiles of all rows; a warp's work. */
static __device__ __forceinline__ int32_t count_naive_rows(const hd_seqs &s) {
    int32_t n = 0;
    for (int32_t seq = threadIdx.x % WARP; seq < s.n; seq += WARP) {
        n += (int32_t)naive_tiles_of(s, seq);
    }
    return warp_sum(n);
}

/* Bytes of a tile's rows in boxes of 64 columns, swizzled. */
constexpr int NAIVE_BOX = NAIVE_KEYS * 128;

#endif
