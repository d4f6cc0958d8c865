/* gemm_small_m_internal.cuh - up to eight rows of x times stored rows: a warp per slice, or per group.
 *
 * A block has groups of 16 * MT stored rows, one after another, and its warps have a slice of
 * them each: weights stream through the warp's part of shared memory, from one group to the next,
 * and a lane splits the columns of x that its weights take. So no warp waits for anybody until
 * the slices of a group are added up. Of rows so short that half of the slices are empty, a warp has groups of
 * its own instead, with all slices, and adds these up itself. */
#ifndef HD_OPS_CUDA_GEMM_SMALL_M_INTERNAL_CUH
#define HD_OPS_CUDA_GEMM_SMALL_M_INTERNAL_CUH

#include "ops/cuda/mma_internal.cuh"

constexpr int SMALL_M_THREADS = MMA_SLICES * WARP, SMALL_M_ROWS = 8; /* of x */
constexpr int EXPERT_GROUPS = 8; /* of a block of an expert, at most */

/* Shapes of a block: groups of 16 * MT stored rows, a ring of DEPTH * 8 KiB. */
struct small_m_narrow {
    static constexpr int MT = 1, DEPTH = 12;
    static constexpr bool SLICED = true;
};
struct small_m_wide {
    static constexpr int MT = 2, DEPTH = 12;
    static constexpr bool SLICED = true;
};
struct small_m_by_warp { /* a warp has groups of its own */
    static constexpr int MT = 2, DEPTH = 12;
    static constexpr bool SLICED = false;
};
struct small_m_generic { /* two of them on every multiprocessor */
    static constexpr int MT = 1, DEPTH = 4;
    static constexpr bool SLICED = true;
};

/* Stored rows of a block whose warps have `groups` groups together, or each. */
template <typename S>
constexpr int small_m_outs(int groups) {
    return groups * 16 * S::MT * (S::SLICED ? 1 : SMALL_M_THREADS / WARP);
}

/* Whether code is wanted for a shape. */
template <typename S>
constexpr bool HAS_SMALL_M = FOR_SM90 || std::is_same_v<S, small_m_generic>;

template <int R, typename S>
struct small_m_shared {
    static constexpr int MT = S::MT;
    weight_ring<R, MT, SMALL_M_THREADS, S::DEPTH / (MT * span_of<R>::QUADS)> ring;
    float part[S::SLICED ? MMA_SLICES : 1][SMALL_M_ROWS]
              [16 * MT + 4]; /* padded against meeting in a bank */
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
                                                  float (*next)[8], int32_t group,
                                                  slice_range slice) {
    for (int32_t span = slice.begin; span < slice.end; span++) {
        lane_raw<R> raw[MT][2];
        float d[MT][1][4] = {};
        take_span(raw, &shared->ring, w, {group, span});
#pragma unroll
        for (int eight = 0; eight < span_of<R>::EIGHTS; eight++) {
            const x_eight<P> now = split_eight<R, P>(next[eight % AHEAD]);
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

/* All slices of a group in order, which the warp has. */
template <int R, int P, int MT, typename Shared>
static __device__ __forceinline__ void walk_group(Shared *shared, lane_walk<R, MT> *w,
                                                  const cuda_act *x, float (*next)[8],
                                                  const mma_job &job, const mma_block &b,
                                                  int32_t group) {
    const int lane = threadIdx.x % WARP;
    float total[MT][1][4] = {};
    for (int slice = 0; slice < MMA_SLICES; slice++) {
        float acc[MT][1][4] = {};
        walk_slice<R, P, MT>(acc, shared, w, x, next, group, slice_of<R>(w->s, slice));
#pragma unroll
        for (int i = 0; i < MT * 4; i++) total[i / 4][0][i % 4] += acc[i / 4][0][i % 4];
    }
#pragma unroll
    for (int i = 0; i < MT * 4; i++) {
        const int k = i % 4, n = group * 16 * MT + i / 4 * 16 + lane / 4 + k / 2 * 8;
        const int32_t at = w->first_row - b.first_row + n;
        put(job, b, 2 * (lane % 4) + k % 2, at, total[i / 4][0][k] * w->a.global);
    }
}

template <int R, int P, typename S>
static __device__ void mma_small_m(uint8_t *bytes, const mma_job &job, const mma_block &b,
                                   const weight_shape &s, const weight_arrays &a) {
    constexpr int MT = S::MT, WARPS = S::SLICED ? 1 : SMALL_M_THREADS / WARP; /* with groups */
    const int warp = (int)threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int32_t all = s.cols / span_of<R>::COLS;
    const slice_range range = S::SLICED ? slice_of<R>(s, warp) : slice_range{0, all};
    const int32_t groups = (b.n_rows + 16 * MT - 1) / (16 * MT); /* of the block */
    const int32_t each = (groups + WARPS - 1) / WARPS, own = warp % WARPS * each;
    const int32_t n_groups = max(min(groups - own, each), 0);
    const cuda_act *x = job.x[min(lane / 4, b.n_x - 1)];
    small_m_shared<R, S> *shared = reinterpret_cast<small_m_shared<R, S> *>(bytes);
    lane_walk<R, MT> w = {};
    w.s = s;
    w.a = a;
    w.first_row = b.first_row + own * 16 * MT;
    w.last_row = b.first_row + b.n_rows - 1;
    w.own = lane / 4;
    w.begin = range.begin;
    w.end = range.end;
    w.n_groups = n_groups;
    float next[AHEAD][8];
    start_walk(&shared->ring, &w);
    griddepcontrol_wait(); /* weights are on their way before x is there */
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        if (range.begin < range.end) fetch_eight(next[i], w, x, range.begin, i);
    }
    for (int32_t group = 0; group < n_groups; group++) {
        if constexpr (S::SLICED) {
            float acc[MT][1][4] = {};
            walk_slice<R, P, MT>(acc, shared, &w, x, next, group, range);
            join_slices<MT>(shared, job, b, acc, group, a.global);
        } else {
            walk_group<R, P, MT>(shared, &w, x, next, job, b, group);
        }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}

/* How many groups of `rows` stored rows a block has, at most `most`: those with which the last block ends
 * first, where two are on a multiprocessor at once, and beginning takes as long as one group. */
static inline int groups_of_block(int32_t outs, int64_t others, int32_t workers, int rows,
                                  int most) {
    const int64_t fill = 2 * (int64_t)workers, all = blocks_for(outs, rows);
    int best = 1;
    int64_t least = INT64_MAX;
    for (int groups = 1; groups <= most; groups++) {
        const int64_t blocks = (all + groups - 1) / groups * others;
        const int64_t cost = (blocks + fill - 1) / fill * (groups + 1);
        if (cost < least) {
            least = cost;
            best = groups;
        }
        if (blocks <= fill) break;
    }
    return best;
}

/* How `others` matrices are shared out over all blocks: launch(S(), groups of a block). */
template <typename F>
static void launch_small_m_plan(int32_t outs, int64_t others, int32_t workers, int most,
                                F launch) {
    if (!hd_cuda_is_sm90()) {
        launch(small_m_generic(), groups_of_block(outs, others, workers, 16, most));
    } else if (blocks_for(outs, 16) * others <= 2 * workers) {
        launch(small_m_narrow(), 1);
    } else {
        launch(small_m_wide(), groups_of_block(outs, others, workers, 32, most));
    }
}

/* Groups that each warp has where warps have groups of their own; 0: slices are better. */
static inline int groups_of_warp(int32_t outs, int64_t others, int32_t workers, int32_t spans) {
    const int64_t warps = 2 * (int64_t)workers * (SMALL_M_THREADS / WARP);
    const int64_t groups = blocks_for(outs, 16 * small_m_by_warp::MT) * others;
    if (!hd_cuda_is_sm90() || 2 * spans > MMA_SLICES || groups < warps) return 0;
    return (int)((groups + warps - 1) / warps);
}

#endif
