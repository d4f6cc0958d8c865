/* indexer_cuda.cu - the lightning indexer: scores every visible key, keeps the best.
 *
 * Two kernels over as many rows as there is scratch for: scores, on the tensor cores
 * as in attention; then per row a search for the last kept score, digit by digit in
 * histograms, and the kept keys in order. Counts are whole numbers, so that the order of adding
 * does not matter. */
#include <cooperative_groups.h>

#include "ops/cuda/split_fp16_internal.cuh"

namespace cg = cooperative_groups;

constexpr int WARPS = BLOCK / WARP, TILE = 64; /* keys that a block scores at once */
constexpr int HEAD_GROUPS = 4;                 /* of warps, each with every fourth 16 heads */
constexpr int WARP_KEYS = TILE * HEAD_GROUPS / WARPS, OWN_KEYS = TILE / WARPS;
constexpr int UNITS = 1; /* of eight columns of a key, of a lane at once */
constexpr int SELECT_THREADS = 1024;
constexpr size_t MAX_SHARED = 227 * 1024;

struct score_rows {
    uint8_t *scratch; /* row r's scores at r * each */
    size_t each;
    int32_t first;
};

static __device__ __forceinline__ float *scores_of(const score_rows &s, int32_t row) {
    return reinterpret_cast<float *>(s.scratch + (size_t)row * s.each);
}

/* ---- scores ---- */

/* Heads in shared memory: whole tiles of the tensor cores. */
static __host__ __device__ __forceinline__ int32_t whole_heads(int32_t heads) {
    return (heads + 15) / 16 * 16;
}

/* A block's shared memory. */
struct score_block {
    half_rows q;         /* [whole heads, cols] */
    half_rows keys;      /* [2 tiles, TILE, cols] one is read, one is on its way */
    float *weight;       /* [whole heads] of a head, with what undoes its shift */
    int *key_shift;      /* [2, TILE] */
    float (*part)[TILE]; /* [HEAD_GROUPS] */
};

/* Tile i of the two. */
static __device__ __forceinline__ half_rows keys_at(const score_block &b, int i) {
    return {b.keys.at + (uint32_t)(i * TILE * b.keys.cols * 4), b.keys.cols};
}

static size_t score_bytes(const hd_indexer_topk_args *a) {
    const size_t heads = (size_t)whole_heads(a->heads), cols = (size_t)half_cols(a->keys.width);
    return (heads + 2 * TILE) * cols * 4 + heads * sizeof(float) + 2 * TILE * sizeof(int) +
           HEAD_GROUPS * TILE * sizeof(float);
}

static __device__ score_block carve(uint8_t *shared, const hd_indexer_topk_args &a) {
    const int32_t heads = whole_heads(a.heads), cols = half_cols(a.keys.width);
    score_block b;
    b.q = {shared_address(shared), cols};
    b.keys = {b.q.at + (uint32_t)(heads * cols * 4), cols};
    b.weight = reinterpret_cast<float *>(shared + (heads + 2 * TILE) * cols * 4);
    b.key_shift = reinterpret_cast<int *>(b.weight + heads);
    b.part = reinterpret_cast<float(*)[TILE]>(b.key_shift + 2 * TILE);
    return b;
}

/* The row's queries and head weights; a warp takes every eighth head. */
template <int P>
static __device__ void load_queries(const score_block &b, const hd_indexer_topk_args &a,
                                    int32_t row, bool quads) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int32_t width = a.keys.width, heads = whole_heads(a.heads);
    for (int32_t h = warp; h < heads; h += WARPS) {
        const cuda_act *q = acts(a.q) + ((int64_t)row * a.heads + h) * width;
        load_row(b.q, h, h < a.heads ? q : nullptr, width, quads, a.q);
    }
    commit_copies();
    wait_copies<0>();
    __syncwarp();
    for (int32_t h = warp; h < heads; h += WARPS) {
        int shift;
        convert_rows<P, 1, UNITS>(b.q, h, &shift);
        const float weight =
            h < a.heads ? a.weight[(int64_t)row * a.heads + h] * a.scale : 0.0f;
        if (lane == 0) b.weight[h] = weight * power_of_two(shift);
    }
}

/* Where the key is that this lane looks up for its warp, of [first, first + TILE); NULL: none. */
static __device__ __forceinline__ const cuda_act *find_key(const hd_indexer_topk_args &a,
                                                           int32_t seq, int32_t first,
                                                           int32_t n) {
    const int own = threadIdx.x / WARP * OWN_KEYS, lane = threadIdx.x % WARP;
    const int32_t key = first + own + lane;
    return lane < OWN_KEYS && key < n ? paged_entry(a.keys, seq, key) : nullptr;
}

/* The warp's OWN_KEYS keys of a tile on their way. */
static __device__ void load_keys(const half_rows &to, const hd_indexer_topk_args &a,
                                 const cuda_act *found, bool quads) {
    const int own = threadIdx.x / WARP * OWN_KEYS;
    for (int i = 0; i < OWN_KEYS; i++) {
        load_row(to, own + i, from_lane(found, i), a.keys.width, quads, a.q);
    }
    commit_copies();
}

/* q . key of 16 heads and the warp's keys: [WARP_KEYS / 8 tiles][4]. */
template <int P>
static __device__ __forceinline__ void multiply(float (*sum)[4], const half_rows &q,
                                                const half_rows &keys, int head, int key) {
    for (int first = 0; first < q.cols / 16; first += 4) { /* fresh sums lose less */
        float part[WARP_KEYS / 8][4] = {};
#pragma unroll
        for (int step = first; step < first + 4; step++) {
            if (step >= q.cols / 16) break;
            uint32_t a[SPLIT<P>][1][4], k[SPLIT<P>][WARP_KEYS / 16][4];
#pragma unroll
            for (int h = 0; h < SPLIT<P>; h++) {
                load_a(a[h][0], q, head, step, h);
#pragma unroll
                for (int t = 0; t < WARP_KEYS / 16; t++) {
                    load_b(k[h][t], keys, key + 16 * t, step, h);
                }
            }
            mma_split<P, 1, WARP_KEYS / 8>(part, a, k);
        }
#pragma unroll
        for (int i = 0; i < WARP_KEYS / 8 * 4; i++) sum[i / 4][i % 4] += part[i / 4][i % 4];
    }
}

static __device__ __forceinline__ float weigh(float hit, float weight) {
    return hit > 0.0f ? hit * weight : 0.0f;
}

/* What the warp's heads add to the scores of the warp's keys, into part. */
template <int P>
static __device__ __forceinline__ void add_heads(const score_block &b, const half_rows &keys,
                                                 int32_t heads) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int group = warp % HEAD_GROUPS, key = warp / HEAD_GROUPS * WARP_KEYS;
    float score[WARP_KEYS / 8][2] = {};
    for (int32_t head = 16 * group; head < heads; head += 16 * HEAD_GROUPS) {
        const float upper = b.weight[head + lane / 4], lower = b.weight[head + lane / 4 + 8];
        float hit[WARP_KEYS / 8][4] = {};
        multiply<P>(hit, b.q, keys, head, key);
#pragma unroll
        for (int i = 0; i < WARP_KEYS / 8 * 2; i++) {
            const float *h = &hit[i / 2][i % 2];
            score[i / 2][i % 2] += weigh(h[0], upper) + weigh(h[2], lower);
        }
    }
#pragma unroll
    for (int i = 0; i < WARP_KEYS / 8 * 2; i++) {
        float sum = score[i / 2][i % 2];
#pragma unroll
        for (int step = 4; step < WARP; step *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
        if (lane < 4) b.part[group][key + i / 2 * 8 + 2 * lane + i % 2] = sum;
    }
}

template <int P>
static __global__ void __launch_bounds__(BLOCK)
    score_keys(hd_indexer_topk_args a, score_rows to) {
    extern __shared__ __align__(128) uint8_t shared[];
    const int32_t row = to.first + (int32_t)blockIdx.y, seq = a.seq[row];
    const int32_t n = visible_entries(a.pos[row], a.ratio), stride = (int32_t)gridDim.x * TILE;
    const int own = threadIdx.x / WARP * OWN_KEYS, lane = threadIdx.x % WARP;
    const bool quads =
        (uintptr_t)a.keys.data % 16 == 0 && a.keys.width % 4 == 0 && (uintptr_t)a.q % 16 == 0;
    int32_t first = (int32_t)blockIdx.x * TILE;
    if (n <= a.top_k || first >= n) return; /* all are kept; nothing to do */
    const score_block b = carve(shared, a);
    load_keys(keys_at(b, 0), a, find_key(a, seq, first, n), quads);
    const cuda_act *next = find_key(a, seq, first + stride, n);
    load_queries<P>(b, a, row, quads);
    for (int i = 0; first < n; first += stride, i ^= 1) {
        int *key_shift = b.key_shift + i * TILE, shift[OWN_KEYS];
        wait_copies<0>();
        __syncwarp();
        convert_rows<P, OWN_KEYS, UNITS>(keys_at(b, i), own, shift);
#pragma unroll
        for (int k = 0; k < OWN_KEYS; k++) {
            if (lane == k) key_shift[own + k] = shift[k];
        }
        __syncthreads();
        if (first + stride < n) load_keys(keys_at(b, i ^ 1), a, next, quads);
        next = find_key(a, seq, first + 2 * stride, n);
        add_heads<P>(b, keys_at(b, i), whole_heads(a.heads));
        __syncthreads();
        const int k = threadIdx.x;
        if (k >= TILE || first + k >= n) continue;
        const float sum = (b.part[0][k] + b.part[1][k]) + (b.part[2][k] + b.part[3][k]);
        scores_of(to, (int32_t)blockIdx.y)[first + k] =
            isnan(sum) ? -CUDART_INF_F : sum * power_of_two(key_shift[k]); /* chosen last */
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
    keep_best(hd_indexer_topk_args a, score_rows from) {
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
static void launch_keep_best(cudaStream_t queue, const hd_indexer_topk_args &a,
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

template <int P>
static void indexer_topk(hd_stream *s, const hd_indexer_topk_args *a) {
    const int32_t at_once = hd_stream_workers(s), fill = 2 * at_once;
    const size_t bytes = score_bytes(a);
    if (a->rows > 0 && bytes > MAX_SHARED) {
        hd_stream_fail(s, HD_EUNSUPPORTED, "an indexer this wide does not fit a GPU");
        return;
    }
    uint8_t *scratch = static_cast<uint8_t *>(hd_stream_scratch(s, 0, 0));
    cudaStream_t queue = hd_cuda_stream(s);
    cudaFuncSetAttribute(score_keys<P>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                         (int)bytes);
    for (int32_t first = 0; first < a->rows; first += at_once) {
        const int32_t n = a->rows - first < at_once ? a->rows - first : at_once;
        const score_rows rows = {scratch, hd_stream_scratch_bytes(s), first};
        const dim3 grid(blocks_for(fill, n), (unsigned)n);
        score_keys<P><<<grid, BLOCK, bytes, queue>>>(*a, rows);
        launch_keep_best(queue, *a, rows, n);
    }
    hd_cuda_check(s, "indexer_topk");
}

void hd_indexer_topk_cuda(hd_stream *s, const hd_indexer_topk_args *a) {
    indexer_topk<EXACT>(s, a);
}

void hd_indexer_topk_cuda_fast(hd_stream *s, const hd_indexer_topk_args *a) {
    indexer_topk<FAST>(s, a);
}
