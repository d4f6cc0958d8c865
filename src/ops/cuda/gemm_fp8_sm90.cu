/* gemm_fp8_sm90.cu - products of E4M3 rows with E4M3 matrices that have a scale per 128 x 128, on
 * Hopper: one matrix, or one for each expert.
 *
 * Blocks stay and take tile after tile. One thread keeps bulk copies of the next stages on their
 * way, one warp reads the scales of W, and one to three warpgroups multiply 64 rows of x each with
 * BN rows of W. A stage is SPANS spans of 128 columns; the sum of each span is promoted to float32
 * in order. Two blocks of a cluster may have the same rows of x: each copies half of them to both.
 *
 * Tiles are chosen by speed alone: wgmma gives an output the same bits for every shape and place,
 * and the order of spans is one. */
#include "ops/cuda/gemm_sm90_internal.cuh"

namespace {

constexpr int SMALLEST_A =
    64 * ROW_BYTES; /* what wgmma reads of x, however few rows are there */

/* Warpgroups that multiply, of 64 rows each. */
template <int H>
constexpr int groups_of = H > 64 ? H / 64 : 1;

/* Registers of a thread that multiplies, and of one that does not, where they are moved. */
template <int H>
constexpr int more_registers = H > 128 ? 160 : 232;

template <int H>
constexpr int less_registers = H > 128 ? 32 : 40;

/* Whether a tile has rows of the gate and the same ones of the up matrix side by side: x is then read
 * once, and by instructions of twice the columns. Else a gate's tile is followed by the up one. */
template <int BN, matrices M>
constexpr bool is_joined = gated<M> &&BN == 128;

/* Outputs of a tile. */
template <int BN, matrices M>
constexpr int outs_of = is_joined<BN, M> ? BN / 2 : BN;

/* Whether rows of W that a tile has may have two scales in a span. */
template <int BN, matrices M>
constexpr bool has_two_scales = is_joined<BN, M> || QUANTISED % BN != 0;

template <int H, int BN, sharing SHARE, matrices M>
using order_of = schedule<H, outs_of<BN, M>, SHARE,
                          !is_joined<BN, M> ? M
                          : by_expert<M>    ? EXPERTS
                                            : ONE>;

/* Of joined tiles the second matrix has a copying thread and a warp for its scales of its own. */
template <int H, int BN, matrices M>
constexpr int threads_of = groups_of<H> *WARPGROUP +
                           (H > 64 || is_joined<BN, M> ? WARPGROUP : 2 * WARP);

/* ---- shared memory ---- */

template <int H>
constexpr int scale_rows = H > 64 ? H : 64; /* that warps read, however few are there */

/* Scales of x are copied from a row that is a multiple of four on; a span's, and a stage's. */
template <int H>
constexpr int scale_box = scale_rows<H> + 4;

template <int H, int SPANS>
constexpr int stage_scales = (scale_box<H> * SPANS + 31) / 32 * 32;

template <int H, int BN, int SPANS>
struct memory {
    uint8_t *tiles;            /* [stages] of x [SPANS, H, 128] and W [SPANS, BN, 128] */
    float *x_scale;            /* [stages] of [SPANS, scale_box] */
    float *w_scale;            /* [2, 2, spans] of two blocks of 128 rows, for two tiles */
    uint64_t *full, *empty;    /* [stages] */
    uint64_t *scaled, *unused; /* [2] w_scale is there; is no longer read */
    int32_t *upto;             /* [n_experts + 1] */

    static __host__ __device__ int stage_bytes() {
        return SPANS * (H + BN) * ROW_BYTES;
    }

    static __host__ __device__ int tile_bytes(int stages) {
        return stages * stage_bytes() + (H < 64 ? SMALLEST_A : 0);
    }

    static int bytes(const job &j) {
        return tile_bytes(j.stages) + j.stages * (stage_scales<H, SPANS> * 4 + 2 * 8) + 4 * 8 +
               4 * j.spans * 4 + (j.offset ? (j.n_experts + 1) * 4 : 0);
    }

    __device__ memory(uint8_t *at, const job &j) {
        tiles = at;
        x_scale = reinterpret_cast<float *>(at + tile_bytes(j.stages));
        full = reinterpret_cast<uint64_t *>(x_scale + j.stages * stage_scales<H, SPANS>);
        empty = full + j.stages;
        scaled = empty + j.stages;
        unused = scaled + 2;
        w_scale = reinterpret_cast<float *>(unused + 2);
        upto = reinterpret_cast<int32_t *>(w_scale + 4 * j.spans);
    }
};

/* ---- the threads that copy ---- */

template <int H, int BN, int SPANS, sharing SHARE, matrices M>
struct copying {
    const job &j;
    const memory<H, BN, SPANS> &m;
    const CUtensorMap *x, *x_scale, *w, *second;
    uint32_t rank;

    __device__ uint8_t *x_tile(int32_t stage) const {
        return m.tiles + stage * m.stage_bytes();
    }

    __device__ void expect(int32_t stage) const {
        mbarrier_arrive_expect_tx(&m.full[stage],
                                  (uint32_t)(m.stage_bytes() + SPANS * scale_box<H> * 4));
    }

    __device__ void copy_w(const tile &t, int32_t place, int32_t span, int32_t stage) const {
        uint8_t *to = x_tile(stage) + SPANS * H * ROW_BYTES;
        static_assert(SPANS == 1 || !is_joined<BN, M>, "rows of both matrices in a span");
        if (is_joined<BN, M> && t.second) to += BN / 2 * ROW_BYTES;
        const CUtensorMap *from = (M == PAIR || gated<M>)&&t.second ? second : w;
        bulk_copy_4d(to, from, &m.full[stage], 0, t.out, span, place, j.keep_w);
    }

    __device__ void copy_x(const tile &t, int32_t span, int32_t stage) const {
        uint8_t *to = x_tile(stage);
        if constexpr (SHARE == SHARED) {
            const int32_t half = H / 2 * (int32_t)rank;
            for (int i = 0; i < SPANS; i++) {
                bulk_multicast_3d(to + (i * H + half) * ROW_BYTES, x, &m.full[stage], 0,
                                  t.row + half, span + i, 3, EVICT_LAST);
            }
        } else {
            bulk_copy_3d(to, x, &m.full[stage], 0, t.row, span, EVICT_LAST);
        }
        bulk_copy_2d(m.x_scale + stage * stage_scales<H, SPANS>, x_scale, &m.full[stage],
                     t.row & ~3, span, EVICT_LAST);
    }

    /* The first stages' rows of W are on their way before x is there. */
    __device__ void run(order_of<H, BN, SHARE, M> turn) const {
        cursor c;
        tile t = {};
        int32_t ahead = 0;
        order_of<H, BN, SHARE, M> first = turn;
        if (first.next(j, rank, &t)) {
            const int32_t place = data_place<M>(j, t);
#pragma unroll 1
            for (; ahead < j.stages && ahead * SPANS < j.spans; ahead++) {
                expect(ahead);
                copy_w(t, place, ahead * SPANS, ahead);
            }
        }
        griddepcontrol_wait();
        while (turn.next(j, rank, &t)) {
            const int32_t place = data_place<M>(j, t);
#pragma unroll 1
            for (int32_t span = 0; span < j.spans; span += SPANS, c.move(j.stages)) {
                if (ahead > 0) {
                    ahead--;
                } else {
                    mbarrier_wait(&m.empty[c.at], c.parity ^ 1);
                    expect(c.at);
                    copy_w(t, place, span, c.at);
                }
                copy_x(t, span, c.at);
            }
        }
    }

    /* Joined tiles' rows of the second matrix, whose bytes the thread above expects. */
    __device__ void run_second(order_of<H, BN, SHARE, M> turn) const {
        cursor c;
        tile t = {};
        t.second = true;
        while (turn.next(j, rank, &t)) {
            const int32_t place = data_place<M>(j, t);
#pragma unroll 1
            for (int32_t span = 0; span < j.spans; span += SPANS, c.move(j.stages)) {
                mbarrier_wait(&m.empty[c.at], c.parity ^ 1);
                copy_w(t, place, span, c.at);
            }
        }
    }
};

/* ---- the warp that reads the scales of W ---- */

template <typename T>
__device__ __forceinline__ float scale_of(const uint8_t *scale, int64_t i) {
    if constexpr (sizeof(T) == 4) {
        return __ldg(reinterpret_cast<const float *>(scale) + i);
    } else if constexpr (sizeof(T) == 2) {
        const uint32_t bits = __ldg(reinterpret_cast<const uint16_t *>(scale) + i);
        return __uint_as_float(bits << 16);
    } else {
        return e8m0_to_f32(__ldg(scale + i));
    }
}

/* `n` scales from number `first` on, 1 beyond `end`; several on their way at once. */
template <typename T, int AT_ONCE>
__device__ __forceinline__ void copy_scales(float *to, const uint8_t *scale, int64_t first,
                                            int64_t end, int32_t n, float global) {
    const int lane = threadIdx.x % WARP;
    for (int32_t i = lane; i < n; i += AT_ONCE * WARP) {
        float v[AT_ONCE];
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) {
            const int64_t at = first + i + u * WARP;
            v[u] = i + u * WARP < n && at < end ? scale_of<T>(scale, at) : 1.0f;
        }
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) {
            if (i + u * WARP < n) to[i + u * WARP] = v[u] * global;
        }
    }
}

/* part 1: of joined tiles' second matrix. */
template <int H, int BN, int SPANS, sharing SHARE, matrices M>
__device__ void read_scales(const job &j, const memory<H, BN, SPANS> &m,
                            order_of<H, BN, SHARE, M> turn, uint32_t rank, int part) {
    constexpr int AT_ONCE = H > 128 ? 1 : 4; /* as registers allow */
    cursor c;
    tile t = {};
    while (turn.next(j, rank, &t)) {
        if (is_joined<BN, M>) t.second = part == 1;
        const bool second = (M == PAIR || gated<M>)&&t.second;
        const uint8_t *scale = scale_of_tile<M>(j, t);
        const float global = second ? j.second.global : j.global;
        const int32_t outs = second ? j.second.outs : j.outs;
        const int64_t first = (int64_t)(t.out / QUANTISED) * j.spans;
        const int64_t end = (int64_t)((outs + QUANTISED - 1) / QUANTISED) * j.spans;
        const int32_t n = QUANTISED % BN == 0 ? j.spans : 2 * j.spans;
        float *to = m.w_scale + (2 * c.at + part) * j.spans;
        mbarrier_wait(&m.unused[c.at], c.parity ^ 1);
        if (j.scale_type == HD_F32) {
            copy_scales<float, AT_ONCE>(to, scale, first, end, n, global);
        } else if (j.scale_type == HD_BF16) {
            copy_scales<uint16_t, AT_ONCE>(to, scale, first, end, n, global);
        } else {
            copy_scales<uint8_t, AT_ONCE>(to, scale, first, end, n, global);
        }
        __syncwarp();
        if (threadIdx.x % WARP == 0) mbarrier_arrive(&m.scaled[c.at]);
        c.move(2);
    }
}

/* ---- the warpgroups that multiply ---- */

/* total += sum times both scales; column groups of 8 from SPLIT on have the second block's scale. */
template <int BN, int SPLIT>
__device__ __forceinline__ void promote(float (&total)[BN / 2], const float (&sum)[BN / 2],
                                        const float (&x)[2], const float (&w)[2]) {
    const float first[2] = {x[0] * w[0], x[1] * w[0]};
    const float second[2] = {x[0] * w[1], x[1] * w[1]};
#pragma unroll
    for (int i = 0; i < BN / 2; i++) {
        const float scale = i / 4 < SPLIT ? first[i / 2 % 2] : second[i / 2 % 2];
        total[i] = fmaf(sum[i], scale, total[i]);
    }
}

/* split: column groups before the border of two blocks. */
template <int BN, matrices M>
__device__ __forceinline__ void promote_span(float (&total)[BN / 2], const float (&sum)[BN / 2],
                                             const float (&x)[2], const float (&w)[2],
                                             int split) {
    static_assert(QUANTISED % BN == 0 || BN == 192, "a border has two places at most");
    if (is_joined<BN, M>) {
        promote<BN, BN / 16>(total, sum, x, w);
    } else if (QUANTISED % BN == 0) {
        promote<BN, BN / 8>(total, sum, x, w);
    } else if (split == 8) {
        promote<BN, 8>(total, sum, x, w);
    } else {
        promote<BN, 16>(total, sum, x, w);
    }
}

/* gate: of gated matrices, whose outputs are swiglu's; joined ones' are the first half of total. */
template <int BN, matrices M>
__device__ __forceinline__ void write_tile(const job &j, const tile &t,
                                           const float (&total)[BN / 2], const float *gate,
                                           int row) {
    const int lane = threadIdx.x % WARP;
    const bool second = M == PAIR && t.second;
    const int64_t stride = second ? j.second.out_stride : j.out_stride;
    const int32_t outs = second ? j.second.outs : j.outs;
    float *base = second ? j.second.out : j.out;
    const bool pairs = second ? j.second.pairs : j.pairs;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int r = row + 8 * half;
        if (r >= t.n_rows) continue;
        float *out = base + (t.row + r) * stride + t.out + 2 * (lane % 4);
        const float weight = gated<M> ? swiglu_weight(j, t.row + r) : 1.0f;
#pragma unroll
        for (int g = 0; g < outs_of<BN, M> / 8; g++) {
            constexpr int UP = is_joined<BN, M> ? BN / 4 : 0;
            const int at = 4 * g + 2 * half;
            if (t.out + 8 * g >= outs) break;
            float a = total[UP + at], b = total[UP + at + 1];
            if constexpr (gated<M>) {
                a = swiglu_of(gate[at], a, j.swiglu.limit, weight);
                b = swiglu_of(gate[at + 1], b, j.swiglu.limit, weight);
            }
            if (pairs) {
                *reinterpret_cast<float2 *>(out + 8 * g) = {a, b};
            } else {
                out[8 * g] = a;
                out[8 * g + 1] = b;
            }
        }
    }
}

/* The scales of a stage's spans that a thread's outputs have: of two rows of x, of two blocks of W. */
template <int SPANS>
struct stage_scale {
    float x[SPANS][2], w[SPANS][2];

    template <bool TWO, int STEP>
    __device__ __forceinline__ void read(const float *xs, const float *ws, int32_t span,
                                         int32_t spans) {
#pragma unroll
        for (int i = 0; i < SPANS; i++) {
            x[i][0] = xs[i * STEP];
            x[i][1] = xs[i * STEP + 8];
            const int32_t at = SPANS == 1 ? span : min(span + i, spans - 1);
            w[i][0] = ws[at];
            w[i][1] = TWO ? ws[at + spans] : 0.0f;
        }
    }
};

template <int H, int BN, int SPANS>
__device__ __forceinline__ void issue(float (&sum)[SPANS][BN / 2], uint32_t x, int group) {
    const wgmma_tile x_tile = wgmma_tile::of(x + (uint32_t)(group * 64 * ROW_BYTES));
    const wgmma_tile w_tile = wgmma_tile::of(x + SPANS * H * ROW_BYTES);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++) {
#pragma unroll
        for (int i = 0; i < SPANS; i++) { /* none waits for the one before */
            wgmma_e4m3<BN>::tiles(sum[i], x_tile.descriptor(i * H * ROW_BYTES + 32 * k),
                                  w_tile.descriptor(i * BN * ROW_BYTES + 32 * k), k);
        }
    }
    wgmma_commit_group();
}

template <int H, int BN, int SPANS, sharing SHARE, matrices M>
__device__ void multiply(const job &j, const memory<H, BN, SPANS> &m,
                         order_of<H, BN, SHARE, M> turn, uint32_t rank) {
    /* Two warpgroups: one multiplies while the other promotes. */
    constexpr bool IN_TURNS = H == 128 && BN >= 128;
    constexpr int STEP = scale_box<H>, SCALES = stage_scales<H, SPANS>;
    const int group = (int)threadIdx.x / WARPGROUP, lane = (int)threadIdx.x % WARP;
    const int row = (int)threadIdx.x / WARP * 16 + lane / 4;
    const uint32_t tiles = shared_address(m.tiles);
    constexpr bool GATE_FIRST = gated<M> && !is_joined<BN, M>;
    float sum[SPANS][BN / 2] = {}, gate[GATE_FIRST ? BN / 2 : 1] = {};
    cursor c, scales;
    tile t;
    if (IN_TURNS && group == 1) bar_arrive(1, 2 * WARPGROUP);
    while (turn.next(j, rank, &t)) {
        float total[BN / 2] = {};
        const bool live = row - lane / 4 < t.n_rows;
        const int split = (QUANTISED - t.out % QUANTISED) / 8;
        const float *w_scale = m.w_scale + scales.at * 2 * j.spans;
        const float *x_scale = m.x_scale + t.row % 4 + row;
        mbarrier_wait(&m.scaled[scales.at], scales.parity);
        for (int32_t span = 0; span < j.spans; span += SPANS, c.move(j.stages)) {
            stage_scale<SPANS> scale;
            mbarrier_wait(&m.full[c.at], c.parity);
            scale.template read<has_two_scales<BN, M>, STEP>(x_scale + c.at * SCALES, w_scale,
                                                             span, j.spans);
            if (IN_TURNS) bar_sync(1 + group, 2 * WARPGROUP);
            issue<H, BN, SPANS>(sum, tiles + (uint32_t)(c.at * m.stage_bytes()), group);
            if (IN_TURNS) bar_arrive(2 - group, 2 * WARPGROUP);
            wgmma_wait_group<0>();
            __syncwarp(); /* all lanes have read the scales of x */
            if (lane == 0) {
                mbarrier_arrive(&m.empty[c.at]);
                if (SHARE != ALONE) mbarrier_arrive_at(&m.empty[c.at], rank ^ 1);
            }
            if (!live) continue;
#pragma unroll
            for (int i = 0; i < SPANS; i++) {
                if (SPANS == 1 || span + i < j.spans) {
                    promote_span<BN, M>(total, sum[i], scale.x[i], scale.w[i], split);
                }
            }
        }
        __syncwarp();
        if (lane == 0) mbarrier_arrive(&m.unused[scales.at]);
        scales.move(2);
        if constexpr (GATE_FIRST) {
            if (!t.second) {
#pragma unroll
                for (int i = 0; i < BN / 2; i++) gate[i] = total[i];
                continue;
            }
        }
        write_tile<BN, M>(j, t, total, is_joined<BN, M> ? total : gate, row);
    }
    if (IN_TURNS && group == 0) bar_sync(1, 2 * WARPGROUP);
}

/* ---- the kernel ---- */

template <int H, int BN, int SPANS, sharing SHARE, matrices M>
__global__ void __launch_bounds__(threads_of<H, BN, M>, 1)
    gemm_fp8(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap x_scale,
             const __grid_constant__ CUtensorMap w, const __grid_constant__ CUtensorMap second,
             const __grid_constant__ job j) {
    extern __shared__ __align__(1024) uint8_t shared[];
    griddepcontrol_launch_dependents();
    using order = order_of<H, BN, SHARE, M>;
    constexpr int CONSUMERS = groups_of<H> * WARPGROUP / WARP, PRODUCER = CONSUMERS;
    const memory<H, BN, SPANS> m(shared, j);
    const int warp = (int)threadIdx.x / WARP;
    const uint32_t rank = SHARE == ALONE ? 0 : cluster_ctarank();
    if (threadIdx.x == 0) {
        for (int i = 0; i < j.stages; i++) {
            mbarrier_init(&m.full[i], 1);
            mbarrier_init(&m.empty[i], CONSUMERS * (SHARE == ALONE ? 1 : 2));
        }
        for (int i = 0; i < 2; i++) {
            mbarrier_init(&m.scaled[i], is_joined<BN, M> ? 2 : 1);
            mbarrier_init(&m.unused[i], CONSUMERS);
        }
        fence_mbarrier_init();
    }
    order turn(j, m.upto);
    if constexpr (by_expert<M>) {
        prefetch_slots(j.slots, j.n_experts);
        if (gated<M>) prefetch_slots(j.second.slots, j.n_experts);
        if (warp == 1) count_units<order>(j, m.upto, turn.n_outs);
    }
    if (SHARE == ALONE) {
        __syncthreads();
    } else {
        barrier_cluster();
    }
    if (warp < CONSUMERS) {
        if (H > 64) setmaxnreg_inc<more_registers<H>>();
        multiply<H, BN, SPANS, SHARE, M>(j, m, turn, rank);
    } else {
        if (H > 64) setmaxnreg_dec<less_registers<H>>();
        if (threadIdx.x == PRODUCER * WARP) {
            prefetch_tensormap(&x);
            prefetch_tensormap(&x_scale);
            prefetch_tensormap(&w);
            if (M == PAIR || gated<M>) prefetch_tensormap(&second);
            const copying<H, BN, SPANS, SHARE, M> c = {j, m, &x, &x_scale, &w, &second, rank};
            c.run(turn);
        } else if (warp == PRODUCER + 1) {
            read_scales<H, BN, SPANS, SHARE, M>(j, m, turn, rank, 0);
        } else if (is_joined<BN, M> && threadIdx.x == (PRODUCER + 2) * WARP) {
            const copying<H, BN, SPANS, SHARE, M> c = {j, m, &x, &x_scale, &w, &second, rank};
            c.run_second(turn);
        } else if (is_joined<BN, M> && warp == PRODUCER + 3) {
            read_scales<H, BN, SPANS, SHARE, M>(j, m, turn, rank, 1);
        }
        __syncwarp();
    }
    if (SHARE != ALONE) barrier_cluster(); /* the other block may still write here */
}

/* ---- launching ---- */

struct maps {
    CUtensorMap x, x_scale, w, second;
};

template <int H, int BN, int SPANS, sharing SHARE, matrices M>
bool describe_all(maps *to, const job &j, const fp8_product &p) {
    const cuuint64_t cols = (cuuint64_t)j.spans * QUANTISED, spans = (cuuint64_t)j.spans;
    const cuuint32_t x_box = (cuuint32_t)(SHARE == SHARED ? H / 2 : H);
    const cuuint32_t x_spans = SHARE == SHARED ? 1 : SPANS;
    const box x = {
        3,
        {ROW_BYTES, (cuuint64_t)p.x.rows, spans},
        {cols,      ROW_BYTES           },
        {ROW_BYTES,    x_box,              x_spans     }
    };
    const box scale = {
        2, {(cuuint64_t)p.x.pitch,     spans},
         {(cuuint64_t)p.x.pitch * 4},
         {scale_box<H>,                    SPANS     }
    };
    const auto rows = [&](int32_t outs, const hd_expert_table *table) {
        return box{
            4,
            {ROW_BYTES,  (cuuint64_t)outs, spans, places_of(table ? table->data_range : 0)},
            { cols, ROW_BYTES,      PLACE_BYTES     },
            {                   ROW_BYTES,     outs_of<BN,                    M>,                         SPANS,                                 1}
        };
    };
    to->second = {};
    return describe(&to->x, p.x.x, x) &&
           describe_flat(&to->x_scale, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, p.x.scale, scale) &&
           describe(&to->w, j.data, rows(j.outs, p.table)) &&
           (!p.other ||
            describe(&to->second, j.second.data, rows(j.second.outs, p.other_table)));
}

bool in_pairs(const float *out, int64_t stride) {
    return (uintptr_t)out % 8 == 0 && stride % 2 == 0;
}

second_matrix second_of(const fp8_product &p) {
    second_matrix m = {};
    if (!p.other) return m;
    m.out = p.other_out;
    m.out_stride = p.other_stride;
    m.data = static_cast<const uint8_t *>(p.other->data);
    m.scale = static_cast<const uint8_t *>(p.other->scale);
    m.slots = p.other_table ? p.other_table->slots : nullptr;
    m.global = p.other->global;
    m.outs = p.other->rows;
    m.pairs = in_pairs(p.other_out, p.other_stride);
    return m;
}

template <int H, int BN, int SPANS, sharing SHARE, matrices M>
void launch(hd_stream *s, const fp8_product &p) {
    using order = order_of<H, BN, SHARE, M>;
    using room = memory<H, BN, SPANS>;
    const hd_weight *w = p.w;
    const int32_t cluster = SHARE == ALONE ? 1 : 2;
    job j = {p.out,
             p.out_stride,
             static_cast<const uint8_t *>(w->data),
             static_cast<const uint8_t *>(w->scale),
             by_expert<M> ? p.table->slots : nullptr,
             p.offset,
             w->global,
             w->scale_type,
             p.n_experts,
             p.from,
             p.x.rows,
             w->rows,
             w->cols / QUANTISED,
             1,
             0,
             in_pairs(p.out, p.out_stride),
             EVICT_NORMAL,
             second_of(p),
             p.swiglu};
    if (p.x.rows <= H) j.keep_w = EVICT_FIRST;
    while (j.stages < MAX_STAGES) {
        j.stages++;
        if (room::bytes(j) > SHARED_BYTES) {
            j.stages--;
            break;
        }
    }
    maps map;
    if (!describe_all<H, BN, SPANS, SHARE, M>(&map, j, p)) {
        hd_stream_fail(s, HD_EDEVICE, "the driver makes no tensor map");
        return;
    }
    launch_blocks(s, gemm_fp8<H, BN, SPANS, SHARE, M>,
                  units_at_most<order>(p, outs_of<BN, M> * order::UNIT_N), threads_of<H, BN, M>,
                  cluster, 1, (size_t)room::bytes(j), map.x, map.x_scale, map.w, map.second, j);
}

} // namespace

bool fp8_fits(const hd_weight *w, const hd_expert_table *table) {
    if (!hd_cuda_is_sm90() || w->type != HD_E4M3 || w->block_rows != QUANTISED ||
        w->block_cols != QUANTISED || w->cols % QUANTISED || w->rows % 8) {
        return false;
    }
    return table ? places_fit(table) : aligned(w);
}

/* ---- which tiles ---- */

/* How long tiles of `outs` columns take in all, in columns of a block's. */
static int64_t columns(int64_t tiles_m, int32_t all, int32_t outs, int32_t sms) {
    return blocks_for(tiles_m * blocks_for(all, outs), sms) * (int64_t)outs;
}

/* Up to 64 rows: what matters is that all of the GPU reads W. */
template <matrices M>
static void launch_small_m(hd_stream *s, const fp8_product &p, int32_t outs) {
    const int32_t rows = p.x.rows, sms = hd_stream_workers(s);
    if (rows > 16) {
        if (outs <= 32 * sms) return launch<64, 32, 4, ALONE, M>(s, p);
        if (outs <= 64 * sms) return launch<64, 64, 2, ALONE, M>(s, p);
        return launch<64, 128, 1, ALONE, M>(s, p);
    }
    if (outs <= 16 * sms) return launch<16, 16, 4, ALONE, M>(s, p);
    if (outs <= 32 * sms) return launch<16, 32, 4, ALONE, M>(s, p);
    if (outs <= 128 * sms) return launch<16, 64, 4, ALONE, M>(s, p);
    return launch<16, 128, 2, ALONE, M>(s, p);
}

/* More than 64 rows with a gate and an up matrix: the columns of both count. */
static void launch_large_gated(hd_stream *s, const fp8_product &p) {
    const int32_t rows = p.x.rows, outs = p.w->rows, sms = hd_stream_workers(s);
    if (rows <= 128 && outs <= 16 * sms) return launch<64, 32, 4, ALONE, GATED>(s, p);
    const int64_t small = columns(blocks_for(rows, 64), outs, 64, sms) * 13 / 20;
    const int64_t square = columns(blocks_for(rows, 128), outs, 64, sms);
    const int64_t tall = columns(blocks_for(rows, 192), outs, 64, sms) * 23 / 20;
    if (small < square && small < tall) return launch<64, 128, 1, ALONE, GATED>(s, p);
    if (tall <= square) return launch<192, 128, 1, SHARED, GATED>(s, p);
    launch<128, 128, 1, SHARED, GATED>(s, p);
}

/* Tiles of 64 rows and `outs` columns of a pair. */
static int64_t pair_tiles(const fp8_product &p, int32_t outs) {
    const int64_t columns = blocks_for(p.w->rows, outs) + blocks_for(p.other->rows, outs);
    return blocks_for(p.x.rows, 64) * columns;
}

static void launch_pair(hd_stream *s, const fp8_product &p) {
    if (p.x.rows <= 64) return launch_small_m<PAIR>(s, p, p.w->rows + p.other->rows);
    if (pair_tiles(p, 32) <= hd_stream_workers(s)) return launch<64, 32, 4, ALONE, PAIR>(s, p);
    launch<64, 64, 2, ALONE, PAIR>(s, p);
}

static void launch_two(hd_stream *s, const fp8_product &p) {
    if (!p.swiglu.on) return launch_pair(s, p);
    const int32_t outs = p.w->rows, sms = hd_stream_workers(s);
    if (p.x.rows > 64) return launch_large_gated(s, p);
    if (p.x.rows > 16) return launch<64, 32, 4, ALONE, GATED>(s, p);
    if (outs <= 8 * sms) return launch<16, 8, 4, ALONE, GATED>(s, p);
    if (outs <= 16 * sms) return launch<16, 16, 4, ALONE, GATED>(s, p);
    launch<16, 32, 4, ALONE, GATED>(s, p);
}

/* The factors are what a tile takes beside one of 128 x 128, measured on an H200. */
static void launch_large_m(hd_stream *s, const fp8_product &p) {
    const int32_t rows = p.x.rows, outs = p.w->rows, sms = hd_stream_workers(s);
    if (rows <= 128 && outs <= 16 * sms) return launch<64, 32, 4, ALONE, ONE>(s, p);
    if (rows <= 128 && outs <= 32 * sms) return launch<64, 64, 2, ALONE, ONE>(s, p);
    const int64_t tiles = blocks_for(rows, 128);
    const int64_t square = columns(tiles, outs, 128, sms);
    const int64_t narrow = columns(tiles, outs, 64, sms) * 5 / 4;
    const int64_t wide = columns(tiles, outs, 192, sms) * 5 / 6;
    const int64_t tall = columns(blocks_for(rows, 192), outs, 128, sms) * 23 / 20;
    const int64_t other = narrow < wide ? narrow : wide;
    if (tall <= square && tall <= other) return launch<192, 128, 1, SHARED, ONE>(s, p);
    if (square <= other) return launch<128, 128, 1, SHARED, ONE>(s, p);
    if (narrow <= wide) return launch<128, 64, 2, SHARED, ONE>(s, p);
    return launch<128, 192, 1, ALONE, ONE>(s, p);
}

static void launch_grouped(hd_stream *s, const fp8_product &p) {
    const int32_t each = p.x.rows / p.n_experts; /* places of an expert, on average */
    if (p.other) {
        if (each >= 160) return launch<192, 128, 1, SHARED, GATED_EXPERTS>(s, p);
        if (each >= 80) return launch<128, 128, 1, SHARED, GATED_EXPERTS>(s, p);
        if (each >= 32) return launch<64, 128, 1, ALONE, GATED_EXPERTS>(s, p);
        if (each >= 4) return launch<32, 64, 2, ALONE, GATED_EXPERTS>(s, p);
        return launch<16, 64, 2, ALONE, GATED_EXPERTS>(s, p);
    }
    if (each >= 160) return launch<192, 128, 1, SHARED, EXPERTS>(s, p);
    if (each >= 80) return launch<128, 128, 1, SHARED, EXPERTS>(s, p);
    if (each >= 32) return launch<64, 128, 1, ALONE, EXPERTS>(s, p);
    if (each >= 4) return launch<32, 128, 2, ALONE, EXPERTS>(s, p);
    return launch<16, 64, 2, ALONE, EXPERTS>(s, p);
}

bool fp8_takes_two(hd_stream *s, const fp8_product &p) {
    return p.offset || p.swiglu.on || p.x.rows <= 64 ||
           pair_tiles(p, 64) <= hd_stream_workers(s);
}

void launch_fp8(hd_stream *s, const fp8_product &p) {
    if (p.offset) {
        launch_grouped(s, p);
    } else if (p.other) {
        launch_two(s, p);
    } else if (p.x.rows <= 64) {
        launch_small_m<ONE>(s, p, p.w->rows);
    } else {
        launch_large_m(s, p);
    }
}
