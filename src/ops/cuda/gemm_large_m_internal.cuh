/* gemm_large_m_internal.cuh - ROWS rows of x, 32 or 64, times LARGE_M_OUTS stored rows: a warp has 16
 * outputs, and 32 rows of x, or 64 of them by wgmma.
 *
 * Weights stream through shared memory; the next span of x is on its way in registers while one
 * that is split lies there for all warps. On Hopper, where blocks are too few for the GPU, those of a
 * cluster share a row's slices and meet at the end; 64 rows are for it alone. */
#ifndef HD_OPS_CUDA_GEMM_LARGE_M_INTERNAL_CUH
#define HD_OPS_CUDA_GEMM_LARGE_M_INTERNAL_CUH

#include "ops/cuda/gemm_wgmma_internal.cuh"

constexpr int LARGE_M_OUTS = 128;        /* of a block */
constexpr int GENERIC_LARGE_M_ROWS = 32; /* that fit into every GPU's shared memory */

/* Whether code is wanted for blocks of so many rows. */
template <int ROWS>
constexpr bool HAS_LARGE_M = FOR_SM90 || ROWS <= GENERIC_LARGE_M_ROWS;

/* How a block of ROWS rows of x is shared out. */
template <int R, int P, int ROWS>
struct large_m_of {
    enum {
        BY_WGMMA = P == FAST && ROWS == WGMMA_ROWS,
        N_TILES = BY_WGMMA ? WGMMA_TILES : 4, /* of eight rows of x, of a warp */
        OUT_WARPS = LARGE_M_OUTS / 16,
        THREADS = OUT_WARPS * ROWS / (8 * N_TILES) * WARP,
        X_THREADS = THREADS / ROWS,                  /* that bring a row of x */
        X_EIGHTS = span_of<R>::COLS / 8 / X_THREADS, /* of a thread */
        AT_ONCE = 512 / THREADS                      /* blocks of a multiprocessor */
    };
};

/* A span of x, so that neither side's accesses collide. */
template <int R, int P, int ROWS>
struct span_x {
    uint4 at[P][span_of<R>::EIGHTS][ROWS + 1][4];
};

template <int R, int P, int ROWS>
struct large_m_shared {
    using span =
        std::conditional_t<large_m_of<R, P, ROWS>::BY_WGMMA, box_x<R>, span_x<R, P, ROWS>>;
    span x[2]; /* boxes begin at multiples of 1024 bytes */
    weight_ring<R, 1, large_m_of<R, P, ROWS>::THREADS, 4> ring;
    float part[][ROWS][LARGE_M_OUTS]; /* of the block's slices, where it has not all of them */
};

template <int R, int P, int ROWS>
static size_t large_m_bytes(int n_blocks) {
    const size_t parts = n_blocks > 1 ? (size_t)(MMA_SLICES / n_blocks) : 0;
    return sizeof(large_m_shared<R, P, ROWS>) + parts * ROWS * LARGE_M_OUTS * sizeof(float);
}

/* Which eight of a span a thread brings: its row is threadIdx.x / X_THREADS. */
template <typename Of>
static __device__ __forceinline__ int own_eight(int i) {
    return (int)threadIdx.x % Of::X_THREADS * Of::X_EIGHTS + i;
}

template <int R, int P, int ROWS>
static __device__ __forceinline__ void fetch_x(float (*to)[8], const mma_job &job,
                                               const mma_block &b, int32_t span) {
    using of = large_m_of<R, P, ROWS>;
    const int row = threadIdx.x / of::X_THREADS;
    if (row >= b.n_x) return;
#pragma unroll
    for (int i = 0; i < of::X_EIGHTS; i++) {
        load_eight(to[i], job.x[row] + span * span_of<R>::COLS + own_eight<of>(i) * 8);
    }
}

template <int R, int P, int ROWS>
static __device__ __forceinline__ void store_eight(span_x<R, P, ROWS> *to, int row, int eight,
                                                   int quarter, const x_eight<P> &x) {
#pragma unroll
    for (int p = 0; p < P; p++) to->at[p][eight][row][quarter] = x.part[p];
}

template <int R, int P, int ROWS, typename Span>
static __device__ __forceinline__ void store_x(Span *to, const float (*x)[8]) {
    using of = large_m_of<R, P, ROWS>;
    constexpr int EACH = span_of<R>::QUAD_EIGHTS;
    const int row = threadIdx.x / of::X_THREADS;
#pragma unroll
    for (int i = 0; i < of::X_EIGHTS; i++) {
        const int at = own_eight<of>(i); /* the inverse of eight_col() */
        const int eight = at / (4 * EACH) * EACH + at % EACH, quarter = at / EACH % 4;
        store_eight(to, row, eight, quarter, split_eight<R, P>(x[i]));
    }
}

/* d = the span's sums, of the warp's tiles. */
template <int R, int P, int ROWS, int NT>
static __device__ __forceinline__ void sum_span(float (&d)[NT][4], const lane_raw<R> (*raw)[2],
                                                const span_x<R, P, ROWS> *x, int first_x) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < NT * 4; i++) d[i / 4][i % 4] = 0.0f;
#pragma unroll
    for (int eight = 0; eight < span_of<R>::EIGHTS; eight++) {
        add_eight<R, P, 1, NT>(&d, raw, eight, [&](int t, int p) {
            return x->at[p][eight][first_x + 8 * t + lane / 4][lane % 4];
        });
    }
}

template <int R, int NT>
static __device__ __forceinline__ void sum_span(float (&d)[NT][4], const lane_raw<R> (*raw)[2],
                                                const box_x<R> *x, int) {
    multiply_span<R>(reinterpret_cast<float(&)[4 * NT]>(d), raw[0], x);
}

/* The sums of all slices in order: each block of the cluster its share of the outputs. */
template <int ROWS>
static __device__ void accumulate(const float (*part)[ROWS][LARGE_M_OUTS], const mma_job &job,
                                  const mma_block &b, float global, int rank, int n_blocks) {
    const int each = MMA_SLICES / n_blocks, outs = LARGE_M_OUTS / n_blocks;
    cluster_sync();
    for (int i = threadIdx.x; i < ROWS * outs; i += (int)blockDim.x) {
        const int m = i / outs, n = rank * outs + i % outs;
        if (m >= b.n_x) break;
        float sum = 0.0f;
#pragma unroll
        for (int p = 0; p < MMA_SLICES; p++) {
            const float *own = &part[p % each][m][n];
            sum += *cluster_at(own, (unsigned)(p / each));
        }
        put(job, b, m, n, sum * global);
    }
    cluster_sync(); /* nobody leaves while its parts are read */
}

/* This is block `rank` of n_blocks that share the slices: 1, 2, 4 or 8. */
template <int R, int P, int ROWS>
static __device__ void mma_large_m(uint8_t *bytes, const mma_job &job, const mma_block &b,
                                   const weight_shape &s, const weight_arrays &a, int rank,
                                   int n_blocks) {
    using of = large_m_of<R, P, ROWS>;
    constexpr int N_TILES = of::N_TILES;
    large_m_shared<R, P, ROWS> *shared = reinterpret_cast<large_m_shared<R, P, ROWS> *>(bytes);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int first_out = warp % of::OUT_WARPS * 16;
    const int first_x = warp / of::OUT_WARPS * 8 * N_TILES;
    const int each = MMA_SLICES / n_blocks, first_slice = rank * each;
    const bool idle = !of::BY_WGMMA && (first_x >= b.n_x || first_out >= b.n_rows);
    lane_walk<R, 1> w = {s,
                         a,
                         b.first_row,
                         b.first_row + b.n_rows - 1,
                         first_out + lane / 4,
                         slice_of<R>(s, first_slice).begin,
                         slice_of<R>(s, first_slice + each - 1).end,
                         1,
                         {},
                         {},
                         0,
                         0,
                         {}};
    float total[N_TILES][4] = {}, x[of::X_EIGHTS][8] = {};
    start_walk(&shared->ring, &w);
    if (w.begin < w.end) fetch_x<R, P, ROWS>(x, job, b, w.begin);
    int32_t span = w.begin;
    for (int slice = 0; slice < each; slice++) {
        float acc[1][N_TILES][4] = {};
        const int32_t end = slice_of<R>(s, first_slice + slice).end;
        for (; span < end; span++) {
            auto *now = &shared->x[span % 2]; /* all are past its last use but one */
            lane_raw<R> raw[1][2];
            store_x<R, P, ROWS>(now, x);
            if (of::BY_WGMMA) fence_proxy_async();
            if (span + 1 < w.end) fetch_x<R, P, ROWS>(x, job, b, span + 1);
            take_span(raw, &shared->ring, &w, {0, span});
            __syncthreads();
            if (idle) continue;
            float d[1][N_TILES][4];
            sum_span(d[0], raw, now, first_x);
            add_span<R, 1, N_TILES>(acc, d, raw);
        }
#pragma unroll
        for (int i = 0; i < N_TILES * 4; i++) {
            const int t = i / 4, k = i % 4;
            if (n_blocks == 1) {
                total[t][k] += acc[0][t][k];
            } else {
                shared->part[slice][first_x + 8 * t + 2 * (lane % 4) + k % 2]
                            [first_out + lane / 4 + 8 * (k / 2)] = acc[0][t][k];
            }
        }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    if (n_blocks > 1) {
        accumulate<ROWS>(shared->part, job, b, a.global, rank, n_blocks);
        return;
    }
    if (idle) return;
#pragma unroll
    for (int i = 0; i < N_TILES * 4; i++) {
        const int t = i / 4, k = i % 4;
        put(job, b, first_x + 8 * t + 2 * (lane % 4) + k % 2,
            first_out + lane / 4 + 8 * (k / 2), total[t][k] * a.global);
    }
}

/* How many blocks share a row's slices: what ends first, if a block's beginning and the meeting
 * take as long as a few spans. */
template <int R, int P, int ROWS>
static int blocks_of_row(int64_t blocks, int32_t cols, int32_t workers) {
    constexpr size_t OF_BLOCK = 1024; /* that a block takes itself */
    const size_t limit = hd_cuda_shared_limit();
    if (!hd_cuda_is_sm90()) return 1; /* without clusters */
    const int64_t spans = cols / span_of<R>::COLS;
    int best = 1;
    int64_t least = INT64_MAX;
    for (int n = 1; n <= MMA_SLICES; n *= 2) {
        const size_t each = large_m_bytes<R, P, ROWS>(n) + sizeof(mma_job) + OF_BLOCK;
        if (each > limit) continue;
        const int64_t room = (int64_t)((limit + OF_BLOCK) / each);
        const int64_t most = large_m_of<R, P, ROWS>::AT_ONCE;
        const int64_t fill = workers * (room < most ? room : most);
        const int64_t waves = (blocks * n + fill - 1) / fill;
        const int64_t cost = waves * ((spans + n - 1) / n + (n > 1 ? 8 : 4));
        if (cost < least) {
            least = cost;
            best = n;
        }
    }
    return best;
}

/* Launches kernel over grid (x: of whole rows) with n blocks of a row as a cluster. */
template <typename... Params, typename... Args>
static void launch_cluster(void (*kernel)(Params...), dim3 grid, int threads, int n,
                           size_t bytes, cudaStream_t queue, Args... args) {
    hd_cuda_allow_shared((const void *)kernel, bytes);
    launch_kernel(queue, kernel, dim3(grid.x * (unsigned)n, grid.y, grid.z), threads, bytes, n,
                  args...);
}

#endif
