/* gemm_few_fp4_internal.cuh - E2M1 times the few rows of a tile, for sm_90a: what gemm_small_m_internal.cuh
 * computes with FAST, to the bit, where a block's rows of x fit into shared memory.
 *
 * Rows of x are bfloat16 there for the whole launch, and scales come with the weights that they belong to,
 * spans ahead: a span waits for nothing but shared memory. */
#ifndef HD_OPS_CUDA_GEMM_FEW_FP4_INTERNAL_CUH
#define HD_OPS_CUDA_GEMM_FEW_FP4_INTERNAL_CUH

#include "ops/cuda/gemm_small_m_internal.cuh"

constexpr int FEW_ROWS = 32;  /* stored rows of a group */
constexpr int FEW_STAGES = 4; /* spans of the ring, one of them being read */
constexpr int FEW_COLS = span_of<READ_E2M1>::COLS, FEW_WARPS = SMALL_M_THREADS / WARP;
constexpr int FEW_PART = FEW_ROWS + 4; /* floats of a slice's sums, padded */

/* A warp's span of a group. */
struct few_stage {
    uint4 weights[4][WARP];  /* a lane's own, of its rows lane / 4, + 8, + 16, + 24 */
    uint8_t scales[WARP][8]; /* of a row */
};

/* Bytes of a row of x; an odd number of half lines, so that two rows do not meet in a bank. */
static __host__ __device__ __forceinline__ int32_t few_x_bytes(int32_t cols) {
    return 2 * cols + 64;
}

constexpr int32_t FEW_RING = FEW_STAGES * FEW_WARPS * (int32_t)sizeof(few_stage);

/* NVFP4's factors have 2^-8, to hold the 2^126 of moved codes too; sums are multiplied back. MX's come after it. */
template <bool MX>
constexpr float FEW_BACK = MX ? 1.0f : 0x1p8f;

/* The factors of a lane's columns of one stored row, in pairs. */
template <bool MX>
static __device__ __forceinline__ void few_factors(uint32_t (&to)[MX ? 1 : 2],
                                                   const uint8_t *scales) {
    const int quarter = threadIdx.x % 4;
    if constexpr (MX) {
        const float scale = e8m0_to_f32(scales[quarter]);
        to[0] = exact_pair(scale, scale);
    } else {
        const uint16_t codes = reinterpret_cast<const uint16_t *>(scales)[quarter];
        const float2 two = __half22float2(
            __half2(__nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)codes, __NV_E4M3)));
        const float low = two.x * 0x1p118f, high = two.y * 0x1p118f;
        to[0] = exact_pair(low, low);
        to[1] = exact_pair(high, high);
    }
}

template <bool MX>
static __device__ __forceinline__ uint32_t few_pair(uint32_t word, int i, uint32_t factor) {
    constexpr uint32_t MOVED_BACK = 0x7e807e80; /* 2^126, twice */
    const uint32_t moved = e2m1_pair(word, i);
    return multiply_pair(MX ? multiply_pair(moved, MOVED_BACK) : moved, factor);
}

/* A lane's way through spans [begin, end) of group after group. */
struct few_walk {
    const uint8_t *data, *scale; /* the matrix, from the lane's first byte of a row on */
    int32_t first_row, last_row, begin, end, n_groups;
    int32_t row_bytes, row_scales;
    int32_t group, span; /* what is sent next */
    uint32_t from[4], scales_from;
    int send_stage, take_stage;
};

static __device__ __forceinline__ void few_point(few_walk *w) {
    const int lane = threadIdx.x % WARP;
    const int32_t first = w->first_row + w->group * FEW_ROWS;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int32_t row = min(first + lane / 4 + 8 * i, w->last_row);
        w->from[i] = (uint32_t)row * (uint32_t)w->row_bytes;
    }
    w->scales_from = (uint32_t)min(first + lane, w->last_row) * (uint32_t)w->row_scales;
}

template <bool MX>
static __device__ __forceinline__ void few_send(few_stage *ring, few_walk *w) {
    if (w->group < w->n_groups) {
        const int lane = threadIdx.x % WARP;
        few_stage *to = ring + w->send_stage;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(
                             (unsigned)__cvta_generic_to_shared(&to->weights[i][lane])),
                         "l"(w->data + w->from[i] + w->span * (FEW_COLS / 2))
                         : "memory");
        }
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(
                         (unsigned)__cvta_generic_to_shared(&to->scales[lane])),
                     "l"(w->scale + w->scales_from + w->span * (MX ? 4 : 8)), "n"(MX ? 4 : 8)
                     : "memory");
        w->send_stage = w->send_stage + 1 == FEW_STAGES ? 0 : w->send_stage + 1;
        if (++w->span == w->end) {
            w->span = w->begin;
            w->group++;
            few_point(w);
        }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* One slice of a group. x: the lane's row, from its quarter of a span on. */
template <bool MX>
static __device__ __forceinline__ void few_slice(float (&acc)[2][4], few_stage *ring,
                                                 few_walk *w, const uint8_t *x,
                                                 slice_range slice) {
    const int lane = threadIdx.x % WARP;
    for (int32_t span = slice.begin; span < slice.end; span++) {
        asm volatile("cp.async.wait_group %0;" ::"n"(FEW_STAGES - 2) : "memory");
        __syncwarp(); /* scales are there of all lanes, and those of the span before are read */
        const few_stage *from = ring + w->take_stage;
        uint4 raw[4];
        uint32_t factor[4][MX ? 1 : 2];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            raw[i] = from->weights[i][lane];
            few_factors<MX>(factor[i], from->scales[lane / 4 + 8 * i]);
        }
        w->take_stage = w->take_stage + 1 == FEW_STAGES ? 0 : w->take_stage + 1;
        few_send<MX>(ring, w);
        float d[2][4] = {};
#pragma unroll
        for (int eight = 0; eight < 4; eight++) {
            const uint4 b =
                *reinterpret_cast<const uint4 *>(x + span * (2 * FEW_COLS) + eight * 64);
#pragma unroll
            for (int step = 0; step < 2; step++) {
#pragma unroll
                for (int tile = 0; tile < 2; tile++) {
                    uint32_t a[4];
#pragma unroll
                    for (int i = 0; i < 4; i++) { /* rows in turn, then the other columns */
                        const uint4 &q = raw[2 * tile + i % 2];
                        const uint32_t word = eight == 0   ? q.x
                                              : eight == 1 ? q.y
                                              : eight == 2 ? q.z
                                                           : q.w;
                        a[i] = few_pair<MX>(word, 2 * step + i / 2,
                                            factor[2 * tile + i % 2][MX ? 0 : eight / 2]);
                    }
                    mma(d[tile], a, step ? b.z : b.x, step ? b.w : b.y);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            acc[i / 4][i % 4] = fmaf(d[i / 4][i % 4], FEW_BACK<MX>, acc[i / 4][i % 4]);
        }
    }
}

/* Rows of x as bfloat16: [n_x][spans][eights][quarters] of eight columns each. All threads. */
static __device__ __forceinline__ void few_load_x(uint8_t *to, const mma_job &job, int n_x,
                                                  int32_t cols) {
    const int32_t each = cols / 8, all = n_x * each;
#pragma unroll 4
    for (int32_t i = (int32_t)threadIdx.x; i < all; i += SMALL_M_THREADS) {
        const int32_t row = i / each, at = i - row * each, quarter = at / 4 % 4, eight = at % 4;
        float x[8];
        load_eight(x, job.x[row] + 8 * at);
        const x_eight<FAST> now = split_eight<READ_E2M1, FAST>(x);
        *reinterpret_cast<uint4 *>(to + row * few_x_bytes(cols) + at / 16 * (2 * FEW_COLS) +
                                   eight * 64 + quarter * 16) = now.part[0];
    }
}

/* The sums of the slices of a group in order. part: [MMA_SLICES][n_x][FEW_PART], of every second group
 * the same, so that a warp may be a group ahead of the others. */
static __device__ __forceinline__ void few_join(float *part, const mma_job &job,
                                                const mma_block &b, const float (&acc)[2][4],
                                                int32_t group, float global) {
    const int slice = threadIdx.x / WARP, lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int k = i % 4, m = 2 * (lane % 4) + k % 2;
        if (m >= b.n_x) continue;
        part[(slice * b.n_x + m) * FEW_PART + i / 4 * 16 + lane / 4 + k / 2 * 8] =
            acc[i / 4][k];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < b.n_x * FEW_ROWS; i += SMALL_M_THREADS) {
        const int m = i / FEW_ROWS, n = i % FEW_ROWS;
        float sum = 0.0f;
#pragma unroll
        for (int p = 0; p < MMA_SLICES; p++) sum += part[(p * b.n_x + m) * FEW_PART + n];
        put(job, b, m, group * FEW_ROWS + n, sum * global);
    }
}

template <bool MX, bool SLICED>
static __device__ void few_fp4(uint8_t *bytes, const mma_job &job, const mma_block &b,
                               const weight_shape &s, const weight_arrays &a) {
    const int warp = (int)threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int32_t all = s.cols / FEW_COLS;
    const slice_range range = SLICED ? slice_of<READ_E2M1>(s, warp) : slice_range{0, all};
    const int32_t groups = (b.n_rows + FEW_ROWS - 1) / FEW_ROWS; /* of the block */
    const int32_t each = SLICED ? groups : (groups + FEW_WARPS - 1) / FEW_WARPS;
    const int32_t own = SLICED ? 0 : warp * each;
    few_stage *ring = reinterpret_cast<few_stage *>(bytes) + warp * FEW_STAGES;
    uint8_t *x = bytes + FEW_RING;
    float *part = reinterpret_cast<float *>(x + b.n_x * few_x_bytes(s.cols));
    few_walk w = {};
    w.data = a.data + lane % 4 * 16;
    w.scale = a.scale;
    w.first_row = b.first_row + own * FEW_ROWS;
    w.last_row = b.first_row + b.n_rows - 1;
    w.begin = range.begin;
    w.end = range.end;
    const int32_t n_groups = max(min(groups - own, each), 0);
    w.n_groups = range.begin == range.end ? 0 : n_groups;
    w.row_bytes = s.cols / 2;
    w.row_scales = s.scales_per_row;
    w.span = w.begin;
    few_point(&w);
#pragma unroll
    for (int i = 0; i < FEW_STAGES - 1; i++) few_send<MX>(ring, &w);
    griddepcontrol_wait(); /* weights are on their way before x is there */
    few_load_x(x, job, b.n_x, s.cols);
    __syncthreads();
    const uint8_t *own_x = x + min(lane / 4, b.n_x - 1) * few_x_bytes(s.cols) + lane % 4 * 16;
    const int32_t per = (all + MMA_SLICES - 1) / MMA_SLICES; /* spans of a slice */
    for (int32_t group = 0; group < n_groups; group++) {
        if constexpr (SLICED) {
            float acc[2][4] = {};
            few_slice<MX>(acc, ring, &w, own_x, range);
            few_join(part + group % 2 * MMA_SLICES * b.n_x * FEW_PART, job, b, acc, group,
                     a.global);
        } else {
            float total[2][4] = {};
            for (int32_t at = 0; at < all; at += per) { /* an empty slice adds nothing */
                float acc[2][4] = {};
                few_slice<MX>(acc, ring, &w, own_x, {at, min(at + per, all)});
#pragma unroll
                for (int i = 0; i < 8; i++) total[i / 4][i % 4] += acc[i / 4][i % 4];
            }
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const int k = i % 4, n = i / 4 * 16 + lane / 4 + k / 2 * 8;
                put(job, b, 2 * (lane % 4) + k % 2, (own + group) * FEW_ROWS + n,
                    total[i / 4][k] * a.global);
            }
        }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}

#endif
