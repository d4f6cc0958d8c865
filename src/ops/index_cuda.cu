/* index_cuda.cu - the lightning indexer: scores every visible key, keeps the best.
 *
 * Two kernels over as many rows as there is scratch for: scores, a lane per key and the heads
 * shared out to warps; then per row a search for the last kept score, digit by digit in
 * histograms, and the kept keys in order. Counts are whole numbers, so that the order of adding
 * does not matter. */
#include <cooperative_groups.h>

#include "ops/keys_internal.cuh"

namespace cg = cooperative_groups;

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

/* ---- the best of a row: a cluster of blocks, each with a stretch of its keys ---- */

constexpr int DIGITS = 3, BINS = 2048; /* of a score's order: 11, 11 and 10 bits */
constexpr int SELECT_WARPS = SELECT_THREADS / WARP;
static_assert(2 * SELECT_THREADS == BINS, "a thread has two bins");

/* Keys above the last kept one and equal to it. */
struct tally {
    int32_t above, equal;
};

struct select_shared {
    int32_t bin[DIGITS]
               [BINS];    /* keys of this block's stretch by digit, the ones before equal */
    int32_t digit, above; /* where the count is reached; keys above, of all blocks */
    tally own;            /* of this block's stretch */
    tally warp[SELECT_WARPS];
};

static __device__ __forceinline__ int digit_shift(int i) {
    return i == 0 ? 21 : i == 1 ? 10 : 0;
}

/* The sum over the threads before this one. */
static __device__ int32_t sum_before(int32_t x) {
    __shared__ int32_t part[SELECT_WARPS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int32_t upto = x;
    for (int step = 1; step < WARP; step *= 2) {
        const int32_t left = __shfl_up_sync(ALL_LANES, upto, step);
        if (lane >= step) upto += left;
    }
    if (lane == WARP - 1) part[warp] = upto;
    __syncthreads();
    int32_t before = upto - x;
    for (int w = 0; w < warp; w++) before += part[w];
    __syncthreads();
    return before;
}

/* Finds the digit of the last kept key, given those before it; counts this block's keys. */
static __device__ void find_digit(select_shared *s, const float *score, int32_t begin,
                                  int32_t end, int i, uint32_t prefix, int32_t wanted) {
    const int shift = digit_shift(i), top = 2 * (int)threadIdx.x;
    const uint32_t known = i == 0 ? 0 : ~0u << digit_shift(i - 1);
    for (int b = threadIdx.x; b < BINS; b += SELECT_THREADS) s->bin[i][b] = 0;
    __syncthreads();
    for (int32_t u = begin + (int32_t)threadIdx.x; u < end; u += SELECT_THREADS) {
        const uint32_t order = order_of(score[u]);
        if ((order & known) != prefix) continue;
        atomicAdd(&s->bin[i][(order >> shift) & (i == 2 ? 1023 : 2047)], 1);
    }
    cg::this_cluster().sync();
    int32_t n[2] = {}; /* of bins BINS - 1 - top and below it */
    for (unsigned r = 0; r < cg::this_cluster().num_blocks(); r++) {
        const int32_t *bin = cg::this_cluster().map_shared_rank(&s->bin[i][0], r);
        n[0] += bin[BINS - 1 - top];
        n[1] += bin[BINS - 2 - top];
    }
    const int32_t before = sum_before(n[0] + n[1]);
    if (before < wanted && before + n[0] + n[1] >= wanted) {
        const bool first = before + n[0] >= wanted;
        s->digit = first ? BINS - 1 - top : BINS - 2 - top;
        s->above = first ? before : before + n[0];
    }
    __syncthreads();
    int32_t above = 0;
    for (int b = threadIdx.x; b < BINS; b += SELECT_THREADS) {
        if (b > s->digit) above += s->bin[i][b];
    }
    above = block_sum<SELECT_THREADS>(above);
    if (threadIdx.x == 0) s->own.above += above;
    if (threadIdx.x == 0 && i == DIGITS - 1) s->own.equal = s->bin[i][s->digit];
}

/* Writes the kept keys of [begin, end) in order. before: of earlier keys; quota: how many equal
 * ones are kept. A warp has a stretch of its own. */
static __device__ void write_kept(select_shared *s, const float *score, int32_t begin,
                                  int32_t end, uint32_t last, int32_t quota, tally before,
                                  int32_t *out) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int32_t each = (end - begin + SELECT_WARPS - 1) / SELECT_WARPS;
    const int32_t first = min(begin + warp * each, end), stop = min(first + each, end);
    tally n = {};
    for (int32_t u = first + lane; u < stop; u += WARP) {
        const uint32_t order = order_of(score[u]);
        n.above += order > last;
        n.equal += order == last;
    }
    n.above = warp_sum(n.above);
    n.equal = warp_sum(n.equal);
    if (lane == 0) s->warp[warp] = n;
    __syncthreads();
    for (int w = 0; w < warp; w++) {
        before.above += s->warp[w].above;
        before.equal += s->warp[w].equal;
    }
    for (int32_t base = first; base < stop; base += WARP) {
        const int32_t u = base + lane;
        const uint32_t order = u < stop ? order_of(score[u]) : 0, lower = (1u << lane) - 1;
        const unsigned above = __ballot_sync(ALL_LANES, u < stop && order > last);
        const unsigned equal = __ballot_sync(ALL_LANES, u < stop && order == last);
        const int32_t ties = before.equal + __popc(equal & lower);
        const int32_t at = before.above + __popc(above & lower) + min(ties, quota);
        const bool tie = equal >> lane & 1;
        if (above >> lane & 1 || (tie && ties < quota)) out[at] = u;
        before.above += __popc(above);
        before.equal += __popc(equal);
    }
}

static __global__ void __launch_bounds__(SELECT_THREADS)
    keep_best(hd_index_select_args a, score_rows from) {
    __shared__ select_shared shared;
    const int32_t n_blocks = (int32_t)cg::this_cluster().num_blocks();
    const int32_t rank = (int32_t)blockIdx.x % n_blocks, in_launch = blockIdx.x / n_blocks;
    const int32_t row = from.first + in_launch, n = visible_entries(a.pos[row], a.ratio);
    const int32_t each = (n + n_blocks - 1) / n_blocks;
    const int32_t begin = min(rank * each, n), end = min(begin + each, n);
    const float *score = scores_of(from, in_launch);
    int32_t *out = a.out + (int64_t)row * a.top_k, wanted = a.top_k;
    if (n <= a.top_k) {
        for (int32_t u = rank * SELECT_THREADS + (int32_t)threadIdx.x; u < a.top_k;
             u += n_blocks * SELECT_THREADS) {
            out[u] = u < n ? u : -1;
        }
        return;
    }
    uint32_t last = 0;
    if (threadIdx.x == 0) shared.own = {};
    for (int i = 0; i < DIGITS; i++) {
        find_digit(&shared, score, begin, end, i, last, wanted);
        last |= (uint32_t)shared.digit << digit_shift(i);
        wanted -= shared.above;
    }
    cg::this_cluster().sync();
    tally before = {};
    for (int32_t r = 0; r < rank; r++) {
        const tally *own = cg::this_cluster().map_shared_rank(&shared.own, (unsigned)r);
        before.above += own->above;
        before.equal += own->equal;
    }
    write_kept(&shared, score, begin, end, last, wanted, before, out);
    cg::this_cluster().sync(); /* nobody leaves while it is read */
}

/* Few rows: blocks of a row work together. */
static void launch_keep_best(cudaStream_t queue, const hd_index_select_args &a,
                             const score_rows &rows, int32_t n) {
    cudaLaunchAttribute cluster = {};
    cudaLaunchConfig_t config = {};
    const unsigned n_blocks = n <= 32 ? 8 : 1;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {n_blocks, 1, 1};
    config.gridDim = dim3((unsigned)n * n_blocks);
    config.blockDim = dim3(SELECT_THREADS);
    config.stream = queue;
    config.attrs = &cluster;
    config.numAttrs = 1;
    cudaLaunchKernelEx(&config, keep_best, a, rows);
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
        launch_keep_best(queue, *a, rows, n);
    }
    hd_cuda_check(s, "index_select");
}
