/* gemm_small_m_internal.cuh - up to eight rows of x times stored rows: a warp per slice.
 *
 * A block has groups of 16 * MT stored rows, one after another, and its warps have a slice of
 * them each: weights stream through the warp's part of shared memory, from one group to the next,
 * and a lane splits the columns of x that its weights take. So no warp waits for anybody until
 * the slices of a group are added up. */
#ifndef HD_OPS_CUDA_GEMM_SMALL_M_INTERNAL_CUH
#define HD_OPS_CUDA_GEMM_SMALL_M_INTERNAL_CUH

#include "ops/cuda/mma_internal.cuh"

constexpr int SMALL_M_THREADS = MMA_SLICES * WARP, SMALL_M_ROWS = 8; /* of x */
constexpr int MAX_GROUPS = 8; /* of a block of an expert, who may have no rows at all */

/* Shapes of a block: groups of 16 * MT stored rows, a ring of DEPTH * 8 KiB. */
struct small_m_narrow {
    static constexpr int MT = 1, DEPTH = 12;
};
struct small_m_wide {
    static constexpr int MT = 2, DEPTH = 12;
};
struct small_m_generic { /* two of them on every multiprocessor */
    static constexpr int MT = 1, DEPTH = 4;
};

/* Whether code is wanted for a shape. */
template <typename S>
constexpr bool HAS_SMALL_M = FOR_SM90 || std::is_same_v<S, small_m_generic>;

template <int R, typename S>
struct small_m_shared {
    static constexpr int MT = S::MT;
    weight_ring<R, MT, SMALL_M_THREADS, S::DEPTH / (MT * span_of<R>::QUADS)> ring;
    float part[MMA_SLICES][SMALL_M_ROWS][16 * MT + 4]; /* padded against meeting in a bank */
};

/* x of the eight that comes `ahead` eights after `eight` of a span: the next span's begins with
 * that of the next group, as x is the same for all. */
template <int R, int MT>
static __device__ __forceinline__ void fetch_eight(float *to, const lane_walk<R, MT> &w,
                                                   const cuda_act *x, int32_t span, int eight) {
    constexpr int EIGHTS = span_of<R>::EIGHTS;
    int32_t there = span;
    if (eight >= EIGHTS) there = span + 1 == w.end ? w.begin : span + 1;
    load_eight(to,
               x + there * span_of<R>::COLS + eight_col<R>(threadIdx.x % 4, eight % EIGHTS));
}

constexpr int AHEAD = 2; /* eights of x on their way */

/* One slice of one group. x: this lane's row; next: its eights on their way. */
template <int R, int P, int MT, typename Shared>
static __device__ __forceinline__ void walk_slice(float (*acc)[1][4], Shared *shared,
                                                  lane_walk<R, MT> *w, const cuda_act *x,
                                                  float (*next)[8], int32_t group) {
    for (int32_t span = w->begin; span < w->end; span++) {
        lane_raw<R> raw[MT][2];
        float d[MT][1][4] = {};
        take_span(raw, &shared->ring, w, {group, span});
#pragma unroll
        for (int eight = 0; eight < span_of<R>::EIGHTS; eight++) {
            const x_eight<P> now = split_eight<P>(next[eight % AHEAD]);
            fetch_eight(next[eight % AHEAD], *w, x, span, eight + AHEAD);
            add_eight<R, P, MT, 1>(d, raw, eight, [&](int, int p) { return now.part[p]; });
        }
        add_span<R, MT, 1>(acc, d, raw);
    }
}

/* The sums of the slices of a group in order. */
template <int MT, typename Shared>
static __device__ __forceinline__ void join_slices(Shared *shared, const mma_job &job,
                                                   const mma_block &b, const float (*acc)[1][4],
                                                   int32_t group, float global) {
    const int slice = threadIdx.x / WARP, lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < MT * 4; i++) {
        const int k = i % 4;
        shared->part[slice][2 * (lane % 4) + k % 2][i / 4 * 16 + lane / 4 + k / 2 * 8] =
            acc[i / 4][0][k];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < SMALL_M_ROWS * 16 * MT; i += SMALL_M_THREADS) {
        const int m = i / (16 * MT), n = i % (16 * MT);
        float sum = 0.0f;
#pragma unroll
        for (int p = 0; p < MMA_SLICES; p++) sum += shared->part[p][m][n];
        put(job, b, m, group * 16 * MT + n, sum * global);
    }
    __syncthreads(); /* the parts are read before the next group's come */
}

template <int R, int P, typename S>
static __device__ void mma_small_m(uint8_t *bytes, const mma_job &job, const mma_block &b,
                                   const weight_shape &s, const weight_arrays &a) {
    constexpr int MT = S::MT;
    const int lane = threadIdx.x % WARP;
    const slice_range range = slice_of<R>(s, threadIdx.x / WARP);
    const int32_t n_groups = (b.n_rows + 16 * MT - 1) / (16 * MT);
    const cuda_act *x = job.x[min(lane / 4, b.n_x - 1)];
    small_m_shared<R, S> *shared = reinterpret_cast<small_m_shared<R, S> *>(bytes);
    lane_walk<R, MT> w = {s,        a,           b.first_row, b.first_row + b.n_rows - 1,
                          lane / 4, range.begin, range.end,   n_groups,
                          {},       0,           0,           {}};
    float next[AHEAD][8];
    start_walk(&shared->ring, &w);
    griddepcontrol_wait(); /* weights are on their way before x is there */
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        if (range.begin < range.end) fetch_eight(next[i], w, x, range.begin, i);
    }
    for (int32_t group = 0; group < n_groups; group++) {
        float acc[MT][1][4] = {};
        walk_slice<R, P, MT>(acc, shared, &w, x, next, group);
        join_slices<MT>(shared, job, b, acc, group, a.global);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}

/* How a matrix is shared out over all blocks, which are there at once, two per multiprocessor: launch(S(),
 * groups of a block). */
template <typename F>
static void launch_small_m_plan(int32_t outs, int64_t others, int32_t workers, F launch) {
    const int64_t fill = 2 * (int64_t)workers;
    const auto groups = [&](int rows) {
        return (int)((blocks_for(outs, rows) * others + fill - 1) / fill);
    };
    if (!hd_cuda_is_sm90()) {
        launch(small_m_generic(), groups(16));
    } else if (blocks_for(outs, 16) * others <= fill) {
        launch(small_m_narrow(), groups(16));
    } else {
        launch(small_m_wide(), groups(32));
    }
}

#endif
