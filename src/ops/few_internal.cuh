/* few_internal.cuh - few rows of x times stored rows: weights stream through shared memory.
 *
 * A block of a cluster has FEW_OUTS stored rows, 16 per warp, and its share of their slices;
 * the parts of all slices meet over the cluster's shared memory. A lane copies the weights that
 * it will read itself, STAGES spans ahead, so that nobody waits for anybody; the rows of x,
 * which all warps need, are split once per block. */
#ifndef HD_OPS_FEW_INTERNAL_CUH
#define HD_OPS_FEW_INTERNAL_CUH

#include <cooperative_groups.h>

#include "ops/mma_internal.cuh"

constexpr int FEW_OUTS = 128;                            /* of a block */
constexpr int RING_BYTES = 64 * 1024;                    /* of weights on their way */
constexpr int CHUNK_COLS = 512;                          /* of x in shared memory at once */
constexpr int CHUNK_PIECES = CHUNK_COLS / PIECE;         /* of one row */
constexpr int ROWS_AT_ONCE = MMA_THREADS / CHUNK_PIECES; /* of x, a piece per thread */
static_assert(ROWS_AT_ONCE == 8, "a thread has a piece of every eighth row");

/* 16 bytes to shared memory behind the back of the registers. */
static __device__ __forceinline__ void copy_weights(uint4 *to, const uint8_t *from) {
    const unsigned at = (unsigned)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
}

template <int R, int NT>
struct few_shared {
    enum {
        SPANS = CHUNK_COLS / span_of<R>::COLS,
        QUADS = lane_raw<R>::QUADS,
        STAGES = RING_BYTES / (2 * QUADS * MMA_THREADS * 16)
    };
    uint4 ring[STAGES][2][QUADS][MMA_THREADS];
    span_x<R, 8 * NT> x[SPANS];
    float part[][8 * NT][FEW_OUTS]; /* of the block's slices, where it has not all of them */
};

template <int R, int NT>
static size_t few_bytes(int n_blocks) {
    const size_t parts = n_blocks > 1 ? (size_t)(MMA_SLICES / n_blocks) : 0;
    return sizeof(few_shared<R, NT>) + parts * 8 * NT * FEW_OUTS * sizeof(float);
}

/* One block's walk over its spans. */
template <int R, int NT>
struct few_walk {
    few_shared<R, NT> *shared;
    const mma_job *job;
    mma_block b;
    weight_shape s;
    weight_arrays a;
    int32_t row[2];     /* of this lane */
    int32_t begin, end; /* spans of the block */
};

template <int R, int NT>
static __device__ __forceinline__ void send_span(const few_walk<R, NT> &w, int32_t span) {
    if (span < w.end) {
        const int stage = span % few_shared<R, NT>::STAGES;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint8_t *from = lane_address<R>(w.s, w.a, w.row[i], span);
#pragma unroll
            for (int k = 0; k < lane_raw<R>::QUADS; k++) {
                copy_weights(&w.shared->ring[stage][i][k][threadIdx.x], from + 16 * k);
            }
        }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int R, int NT>
static __device__ __forceinline__ void take_span(lane_raw<R> *to, const few_walk<R, NT> &w,
                                                 int32_t span) {
    const int stage = span % few_shared<R, NT>::STAGES;
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int k = 0; k < lane_raw<R>::QUADS; k++) {
            const uint4 v = w.shared->ring[stage][i][k][threadIdx.x];
            to[i].word[4 * k] = v.x;
            to[i].word[4 * k + 1] = v.y;
            to[i].word[4 * k + 2] = v.z;
            to[i].word[4 * k + 3] = v.w;
        }
    }
}

/* A chunk of x from span `first` on: the thread's pieces, zero beyond rows and spans. */
template <int R, int NT>
static __device__ __forceinline__ void fetch_chunk(float (*x)[PIECE], const few_walk<R, NT> &w,
                                                   int32_t first) {
    const int piece = threadIdx.x % CHUNK_PIECES, row = threadIdx.x / CHUNK_PIECES;
    const int32_t col = first * span_of<R>::COLS + piece * PIECE;
    const bool in = col < w.end * span_of<R>::COLS;
#pragma unroll
    for (int t = 0; t < NT; t++) {
        if (in && row + 8 * t < w.b.n_x) {
            load_piece(x[t], w.job->x[row + 8 * t] + col, w.b.x_aligned);
        } else {
#pragma unroll
            for (int i = 0; i < PIECE; i++) x[t][i] = 0.0f;
        }
    }
}

template <int R, int NT>
static __device__ __forceinline__ void store_chunk(const few_walk<R, NT> &w,
                                                   const float (*x)[PIECE]) {
    constexpr int EACH = span_of<R>::COLS / PIECE;
    const int piece = threadIdx.x % CHUNK_PIECES, row = threadIdx.x / CHUNK_PIECES;
#pragma unroll
    for (int t = 0; t < NT; t++) {
        x_piece split;
        split_piece(&split, x[t]);
        store_piece(&w.shared->x[piece / EACH], split, row + 8 * t, piece % EACH);
    }
}

/* Where element i of a lane's tiles lies: a row of x, an output of the block. */
static __device__ __forceinline__ int x_of(int i) {
    return i / 4 * 8 + 2 * (int)(threadIdx.x % 4) + i % 2;
}

static __device__ __forceinline__ int out_of(int i) {
    return (int)threadIdx.x / WARP * 16 + (int)threadIdx.x % WARP / 4 + i / 2 % 2 * 8;
}

/* The parts of the block's slices [first, + n) in order: added up into total where the block
 * has them all, else into shared memory. */
template <int R, int NT>
static __device__ __forceinline__ void walk_slices(float *total, const few_walk<R, NT> &w,
                                                   int first, int n) {
    constexpr int STAGES = few_shared<R, NT>::STAGES, SPANS = few_shared<R, NT>::SPANS;
    const bool idle = (int)threadIdx.x / WARP * 16 >= w.b.n_rows;
    float x[NT][PIECE];
    lane_raw<R> raw[1][2];
#pragma unroll
    for (int d = 0; d < STAGES - 1; d++) send_span(w, w.begin + d);
    fetch_chunk(x, w, w.begin);
    int32_t span = w.begin;
    for (int slice = 0; slice < n; slice++) {
        const int32_t end = slice_of<R>(w.s, first + slice).end;
        float acc[1][NT][4] = {};
        for (; span < end; span++) {
            if ((span - w.begin) % SPANS == 0) {
                __syncthreads(); /* the chunk before is done with */
                store_chunk(w, x);
                __syncthreads();
                fetch_chunk(x, w, span + SPANS);
            }
            load_scale<R>(&raw[0][0], w.s, w.a, w.row[0], span);
            load_scale<R>(&raw[0][1], w.s, w.a, w.row[1], span);
            asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
            take_span(raw[0], w, span);
            send_span(w, span + STAGES - 1);
            if (idle) continue;
            add_span<R, 8 * NT, 1, NT>(acc, raw, w.shared->x[(span - w.begin) % SPANS], 0,
                                       w.b.n_x);
        }
#pragma unroll
        for (int i = 0; i < NT * 4; i++) {
            if (n == MMA_SLICES) {
                total[i] += (&acc[0][0][0])[i];
            } else {
                w.shared->part[slice][x_of(i)][out_of(i)] = (&acc[0][0][0])[i];
            }
        }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}

/* The sums of all slices in order: each block of the cluster its share of the outputs. */
template <int R, int NT>
static __device__ __forceinline__ void meet(const few_walk<R, NT> &w, int rank, int n_blocks) {
    namespace cg = cooperative_groups;
    const int each = MMA_SLICES / n_blocks, outs = FEW_OUTS / n_blocks;
    cg::this_cluster().sync();
    for (int i = threadIdx.x; i < 8 * NT * outs; i += MMA_THREADS) {
        const int m = i / outs, n = rank * outs + i % outs;
        if (m >= w.b.n_x) break;
        float sum = 0.0f;
#pragma unroll
        for (int p = 0; p < MMA_SLICES; p++) {
            float *own = &w.shared->part[p % each][m][n];
            sum += *cg::this_cluster().map_shared_rank(own, (unsigned)(p / each));
        }
        put(*w.job, w.b, m, n, sum * w.a.global);
    }
    cg::this_cluster().sync(); /* nobody leaves while its parts are read */
}

/* 8 * NT rows of x; this is block `rank` of n_blocks that share the slices: 1, 2, 4 or 8. */
template <int R, int NT>
static __device__ void mma_few(uint8_t *shared, const mma_job &job, const mma_block &b,
                               const weight_shape &s, const weight_arrays &a, int rank,
                               int n_blocks) {
    const int first_out = (int)threadIdx.x / WARP * 16 + (int)threadIdx.x % WARP / 4;
    const int each = MMA_SLICES / n_blocks;
    few_walk<R, NT> w;
    float total[NT * 4] = {};
    w.shared = reinterpret_cast<few_shared<R, NT> *>(shared);
    w.job = &job;
    w.b = b;
    w.s = s;
    w.a = a;
    w.row[0] = b.first_row + min(first_out, b.n_rows - 1);
    w.row[1] = b.first_row + min(first_out + 8, b.n_rows - 1);
    w.begin = slice_of<R>(s, rank * each).begin;
    w.end = slice_of<R>(s, rank * each + each - 1).end;
    walk_slices(total, w, rank * each, each);
    if (n_blocks > 1) {
        meet(w, rank, n_blocks);
        return;
    }
#pragma unroll
    for (int i = 0; i < NT * 4; i++) put(job, b, x_of(i), out_of(i), total[i] * a.global);
}

/* How many blocks share a row's slices: enough to fill the GPU, each with a few spans. */
template <int R>
static int blocks_of_row(int64_t blocks, int32_t cols, int32_t fill) {
    const int32_t spans = cols / span_of<R>::COLS;
    int n = 1;
    while (n < MMA_SLICES && blocks * n < 3 * fill && spans >= 4 * n) n *= 2;
    return n;
}

/* Launches kernel over grid (x: of whole rows) with n blocks of a row as a cluster. */
template <typename... Params, typename... Args>
static void launch_cluster(void (*kernel)(Params...), dim3 grid, int n, size_t bytes,
                           cudaStream_t queue, Args... args) {
    cudaLaunchAttribute cluster = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {(unsigned)n, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(grid.x * (unsigned)n, grid.y, grid.z);
    config.blockDim = dim3(MMA_THREADS);
    config.dynamicSmemBytes = bytes;
    config.stream = queue;
    config.attrs = &cluster;
    config.numAttrs = 1;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    cudaLaunchKernelEx(&config, kernel, args...);
}

#endif
