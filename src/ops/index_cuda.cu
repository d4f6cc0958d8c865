/* index_cuda.cu - the lightning indexer: scores every visible key, keeps the best.
 *
 * Two kernels over as many rows as there is scratch for: scores, a lane per key and the heads
 * shared out to warps; then per row a search for the last kept key, bit by bit over (score,
 * index), and the kept ones in order. */
#include "ops/keys_internal.cuh"

constexpr int WARPS = BLOCK / WARP, HEADS = 4; /* that a warp takes at once */
constexpr int SELECT_THREADS = 1024, KEY_BLOCKS = 64;

struct score_rows {
    uint8_t *scratch; /* row r's scores at r * each */
    size_t each;
    int32_t first;
};

static __device__ __forceinline__ float *scores_of(const score_rows &s, int32_t row) {
    return reinterpret_cast<float *>(s.scratch + (size_t)row * s.each);
}

/* Keys [first, first + TILE) of the row's sequence, a warp per key; zero beyond n and width. */
static __device__ void load_tile(float *keys, const hd_index_select_args &a, int32_t seq,
                                 int32_t first, int32_t n) {
    const int lane = threadIdx.x % WARP;
    const int32_t width = a.keys.width, stride = key_stride(width);
    const bool quads = in_quads(a.keys) && (uintptr_t)a.q % 16 == 0;
    for (int t = threadIdx.x / WARP; t < TILE; t += WARPS) {
        const bool live = first + t < n;
        const cuda_act *key = live ? paged_entry(a.keys, seq, first + t) : nullptr;
        float *to = keys + t * stride;
        if (quads) {
            for (int32_t c = 4 * lane; c < width; c += 4 * WARP) {
                copy_quad(to + c, live ? key + c : nullptr, acts(a.q));
            }
        } else {
            for (int32_t c = lane; c < stride; c += WARP) {
                to[c] = live && c < width ? wide(key[c]) : 0.0f;
            }
        }
    }
    asm volatile("cp.async.commit_group;");
}

/* What the warp's heads add to the score of the lane's key. */
static __device__ __forceinline__ double add_heads(const hd_index_select_args &a, int32_t row,
                                                   const float *q, const float *key) {
    const int32_t q_width = padded(a.keys.width);
    double sum = 0.0;
    for (int32_t h0 = (int32_t)threadIdx.x / WARP * HEADS; h0 < a.heads; h0 += WARPS * HEADS) {
        float hit[HEADS];
        score_tile<HEADS>(hit, q + h0 * q_width, key, a.keys.width);
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            if (h0 + h >= a.heads || !(hit[h] > 0.0f)) continue;
            const float weight = a.weight[(int64_t)row * a.heads + h0 + h] * a.scale;
            sum += (double)hit[h] * (double)weight;
        }
    }
    return sum;
}

/* Heads in shared memory: a whole number of what a warp takes at once. */
static __host__ __device__ __forceinline__ int32_t whole_heads(int32_t heads) {
    return (heads + HEADS - 1) / HEADS * HEADS;
}

static __global__ void __launch_bounds__(BLOCK)
    score_keys(hd_index_select_args a, score_rows to) {
    extern __shared__ __align__(16) float shared[]; /* a tile of keys, the row's queries */
    __shared__ double part[WARPS][TILE];
    const int32_t row = to.first + (int32_t)blockIdx.y, width = a.keys.width;
    const int32_t n = visible_entries(a.pos[row], a.ratio), q_width = padded(width);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (n <= a.top_k) return; /* all are kept */
    float *keys = shared, *q = shared + TILE * key_stride(width);
    const cuda_act *from = acts(a.q) + (int64_t)row * a.heads * width;
    for (int32_t i = threadIdx.x; i < whole_heads(a.heads) * q_width; i += BLOCK) {
        const int32_t h = i / q_width, c = i % q_width;
        q[i] = h < a.heads && c < width ? wide(from[(int64_t)h * width + c]) : 0.0f;
    }
    for (int32_t first = (int32_t)blockIdx.x * TILE; first < n;
         first += (int32_t)gridDim.x * TILE) {
        load_tile(keys, a, a.seq[row], first, n);
        wait_copies<0>();
        __syncthreads();
        part[warp][lane] = add_heads(a, row, q, keys + lane * key_stride(width));
        __syncthreads();
        if (warp == 0 && first + lane < n) {
            double sum = 0.0;
            for (int w = 0; w < WARPS; w++) sum += part[w][lane];
            scores_of(to, (int32_t)blockIdx.y)[first + lane] =
                isnan(sum) ? -CUDART_INF_F : (float)sum; /* chosen last */
        }
    }
}

/* The rank of the wanted-th best of n keys. */
static __device__ uint64_t find_last(const float *score, int32_t n, int32_t wanted) {
    uint64_t prefix = 0, mask = 0;
    for (int bit = 63; bit >= 0; bit--) {
        const uint64_t one = 1ull << bit;
        int32_t upper = 0;
        for (int32_t u = threadIdx.x; u < n; u += SELECT_THREADS) {
            const uint64_t rank = rank_of(score[u], u);
            upper += (rank & mask) == prefix && (rank & one);
        }
        upper = block_sum<SELECT_THREADS>(upper);
        mask |= one;
        if (upper >= wanted) {
            prefix |= one;
        } else {
            wanted -= upper;
        }
    }
    return prefix;
}

/* How many of the block's threads before this one, and in all, say yes. */
static __device__ int32_t count_before(bool yes, int32_t *all) {
    __shared__ int32_t part[SELECT_THREADS / WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const unsigned votes = __ballot_sync(ALL_LANES, yes);
    int32_t before = __popc(votes & ((1u << lane) - 1)), total = 0;
    if (lane == 0) part[warp] = __popc(votes);
    __syncthreads();
    for (int w = 0; w < SELECT_THREADS / WARP; w++) {
        if (w < warp) before += part[w];
        total += part[w];
    }
    __syncthreads();
    *all = total;
    return before;
}

static __global__ void __launch_bounds__(SELECT_THREADS)
    keep_best(hd_index_select_args a, score_rows from) {
    const int32_t row = from.first + (int32_t)blockIdx.x;
    const int32_t n = visible_entries(a.pos[row], a.ratio), kept = min(n, a.top_k);
    const float *score = scores_of(from, (int32_t)blockIdx.x);
    int32_t *out = a.out + (int64_t)row * a.top_k;
    for (int32_t i = kept + (int32_t)threadIdx.x; i < a.top_k; i += SELECT_THREADS) out[i] = -1;
    if (n <= a.top_k) {
        for (int32_t u = threadIdx.x; u < n; u += SELECT_THREADS) out[u] = u;
        return;
    }
    const uint64_t last = find_last(score, n, a.top_k);
    int32_t done = 0;
    for (int32_t base = 0; base < n; base += SELECT_THREADS) {
        const int32_t u = base + (int32_t)threadIdx.x;
        const bool yes = u < n && rank_of(score[u], u) >= last;
        int32_t all;
        const int32_t at = done + count_before(yes, &all);
        if (yes) out[at] = u;
        done += all;
    }
}

void hd_index_select_cuda(hd_stream *s, const hd_index_select_args *a) {
    const int32_t at_once = hd_stream_workers(s);
    const size_t queries = (size_t)whole_heads(a->heads) * (size_t)padded(a->keys.width);
    const size_t keys = (size_t)TILE * (size_t)key_stride(a->keys.width);
    const size_t bytes = (queries + keys) * sizeof(float);
    uint8_t *scratch = static_cast<uint8_t *>(hd_stream_scratch(s, 0, 0));
    cudaStream_t queue = hd_cuda_stream(s);
    cudaFuncSetAttribute(score_keys, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    for (int32_t first = 0; first < a->rows; first += at_once) {
        const int32_t n = a->rows - first < at_once ? a->rows - first : at_once;
        const score_rows rows = {scratch, hd_stream_scratch_bytes(s), first};
        score_keys<<<dim3(KEY_BLOCKS, (unsigned)n), BLOCK, bytes, queue>>>(*a, rows);
        keep_best<<<(unsigned)n, SELECT_THREADS, 0, queue>>>(*a, rows);
    }
    hd_cuda_check(s, "index_select");
}
