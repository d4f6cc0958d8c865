/* mma_internal.cuh - rows of activations times stored rows on the tensor cores.
 *
 * mma.sync m16n8k16: the stored rows are A, exact in bfloat16 whatever their format; the rows
 * of x are B, each element as a sum of three bfloat16 numbers that hold all 24 bits of a
 * float. A row of the matrix is SLICES contiguous parts; an output is their sum in order. A part
 * adds spans of SPAN columns in order, each summed by the tensor cores from zero and taken
 * times its scale. So an output has the same bits however many rows share the call, in every
 * product of rows. Within a span a thread's columns are contiguous, which permutes the columns
 * of A and B alike.
 *
 * mma_few() splits a row over warps and is bounded by the weights' bytes; mma_many() splits
 * nothing and is bounded by the tensor cores: three products for one. */
#ifndef HD_OPS_MMA_INTERNAL_CUH
#define HD_OPS_MMA_INTERNAL_CUH

#include <cuda_bf16.h>

#include "ops/weight_internal.cuh"

constexpr int LANE_COLS = 16, STEPS = SPAN / 16, PARTS = 3, MMA_SLICES = 8;
constexpr int MMA_THREADS = MMA_SLICES * WARP;
constexpr int FEW_OUTS = 16;                   /* of a block of mma_few */
constexpr int MANY_OUTS = 128, MANY_ROWS = 64; /* of a block of mma_many */

/* Rows of x and outputs of one block. */
struct mma_job {
    const cuda_act *x[MANY_ROWS]; /* [n_x] */
    void *out[MANY_ROWS];         /* [n_x] at the block's first output column */
};

struct mma_block {
    int32_t n_x, first_row, n_rows; /* stored rows [first_row, + n_rows) */
    bool out_f32, x_aligned;        /* rows of x are aligned to 16 bytes */
};

/* ---- A: stored rows ---- */

/* LANE_COLS columns of one stored row. */
template <int R>
struct lane_raw {
    enum { WORDS = R == READ_BF16 ? 8 : R == READ_E4M3 ? 4 : 2 };
    uint32_t word[WORDS];
    float scale;
};

template <int R>
static __device__ __forceinline__ void load_lane(lane_raw<R> *to, const weight_shape &s,
                                                 const weight_arrays &a, int32_t row,
                                                 int32_t span) {
    constexpr int bits = R == READ_BF16 ? 16 : R == READ_E4M3 ? 8 : 4;
    const int32_t col = span * SPAN + (int32_t)(threadIdx.x % 4) * LANE_COLS;
    const uint8_t *from = a.data + ((int64_t)row * s.cols + col) * bits / 8;
    if constexpr (R == READ_E2M1) {
        const uint2 v = __ldg(reinterpret_cast<const uint2 *>(from));
        to->word[0] = v.x;
        to->word[1] = v.y;
        to->scale = group_scale(s, a, row, col);
    } else {
#pragma unroll
        for (int i = 0; i < lane_raw<R>::WORDS; i += 4) {
            const uint4 v = __ldg(reinterpret_cast<const uint4 *>(from) + i / 4);
            to->word[i] = v.x;
            to->word[i + 1] = v.y;
            to->word[i + 2] = v.z;
            to->word[i + 3] = v.w;
        }
        to->scale = group_scale(s, a, row, span * SPAN);
    }
}

static __device__ __forceinline__ uint32_t bf16_pair(float low, float high) {
    return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632); /* truncates */
}

static __device__ __forceinline__ uint32_t times(uint32_t pair, uint32_t factor) {
    uint32_t product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(factor));
    return product;
}

/* Columns 4 * step, + 1 and + 2, + 3 of the lane's, as pairs of bfloat16. For E2M1 the scale,
 * which is exact in them, is in; the others' is the same over a span. */
template <int R>
static __device__ __forceinline__ void pairs_of(uint32_t *low, uint32_t *high,
                                                const lane_raw<R> &raw, int step) {
    if constexpr (R == READ_BF16) {
        *low = raw.word[2 * step];
        *high = raw.word[2 * step + 1];
    } else if constexpr (R == READ_E4M3) {
        const uint32_t w = raw.word[step];
        const float2 a = __half22float2(
            __half2(__nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)w, __NV_E4M3)));
        const float2 b = __half22float2(
            __half2(__nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)(w >> 16), __NV_E4M3)));
        *low = bf16_pair(a.x, a.y);
        *high = bf16_pair(b.x, b.y);
    } else {
        const uint32_t codes = raw.word[step / 2] >> (step % 2 * 16);
        const uint32_t scale = bf16_pair(raw.scale, raw.scale), bias = 0x7e807e80; /* 2^126 */
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t two = codes >> (8 * i), apart = (two & 0xf) | (two & 0xf0) << 12;
            const uint32_t bits = (apart & 0x00070007) << 6 | (apart & 0x00080008) << 12;
            *(i ? high : low) = times(times(bits, bias), scale);
        }
    }
}

/* ---- B: rows of x ---- */

/* LANE_COLS columns of a row of x as three sums of pairs, the largest first. */
struct lane_x {
    uint32_t part[PARTS][LANE_COLS / 2];
};

static __device__ __forceinline__ void load_x(float *to, const cuda_act *x, bool aligned) {
#pragma unroll
    for (int i = 0; i < LANE_COLS; i += 4) {
        if (aligned) {
            const float4 v = *reinterpret_cast<const float4 *>(x + i);
            to[i] = v.x;
            to[i + 1] = v.y;
            to[i + 2] = v.z;
            to[i + 3] = v.w;
        } else {
#pragma unroll
            for (int k = 0; k < 4; k++) to[i + k] = wide(x[i + k]);
        }
    }
}

static __device__ __forceinline__ void split_x(lane_x *to, const float *x) {
#pragma unroll
    for (int i = 0; i < LANE_COLS / 2; i++) {
        float low = x[2 * i], high = x[2 * i + 1];
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
            const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
            const uint32_t bits = *reinterpret_cast<const uint32_t *>(&pair);
            to->part[p][i] = bits;
            low -= __uint_as_float(bits << 16);
            high -= __uint_as_float(bits & 0xffff0000u);
        }
    }
}

/* ---- D ---- */

static __device__ __forceinline__ void mma(float *d, const uint32_t *a, uint32_t b0,
                                           uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Stored rows lane / 4 and lane / 4 + 8 of a tile, in the order of the instruction. */
struct tile_a {
    uint32_t step[STEPS][4];
    float scale[2];
};

template <int R>
static __device__ __forceinline__ void make_tile(tile_a *to, const lane_raw<R> *raw) {
#pragma unroll
    for (int j = 0; j < STEPS; j++) {
        pairs_of<R>(&to->step[j][0], &to->step[j][2], raw[0], j);
        pairs_of<R>(&to->step[j][1], &to->step[j][3], raw[1], j);
    }
    to->scale[0] = R == READ_E2M1 ? 1.0f : raw[0].scale;
    to->scale[1] = R == READ_E2M1 ? 1.0f : raw[1].scale;
}

/* acc += the span's sum times its scale; the small parts go first. */
static __device__ __forceinline__ void add_span(float *acc, const tile_a &a, const lane_x &x) {
    float d[4] = {};
#pragma unroll
    for (int j = 0; j < STEPS; j++) {
#pragma unroll
        for (int p = PARTS - 1; p >= 0; p--) {
            mma(d, a.step[j], x.part[p][2 * j], x.part[p][2 * j + 1]);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) acc[i] = fmaf(d[i], a.scale[i / 2], acc[i]);
}

static __device__ __forceinline__ void put(const mma_job &job, const mma_block &b, int m, int n,
                                           float value) {
    if (m >= b.n_x || n >= b.n_rows) return;
    if (b.out_f32) {
        static_cast<float *>(job.out[m])[n] = value;
    } else {
        static_cast<cuda_act *>(job.out[m])[n] = narrow(value);
    }
}

/* ---- few rows: a warp per slice, FEW_OUTS outputs, 8 * NT rows of x ---- */

template <int R, int NT>
static __device__ void mma_few(const mma_job &job, const mma_block &b, const weight_shape &s,
                               const weight_arrays &a) {
    constexpr int AHEAD = R == READ_BF16 ? 2 : 4;
    __shared__ float parts[MMA_SLICES][8 * NT][FEW_OUTS];
    const int slice = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4;
    const int32_t spans = s.cols / SPAN, per = (spans + MMA_SLICES - 1) / MMA_SLICES;
    const int32_t begin = slice * per, end = min(begin + per, spans);
    const int32_t row[2] = {b.first_row + min(g, b.n_rows - 1),
                            b.first_row + min(g + 8, b.n_rows - 1)};
    lane_raw<R> ahead[AHEAD][2];
    float acc[NT][4] = {};
#pragma unroll
    for (int d = 0; d < AHEAD; d++) {
        if (begin + d >= end) continue;
        load_lane<R>(&ahead[d][0], s, a, row[0], begin + d);
        load_lane<R>(&ahead[d][1], s, a, row[1], begin + d);
    }
    for (int32_t base = begin; base < end; base += AHEAD) {
#pragma unroll
        for (int d = 0; d < AHEAD; d++) {
            const int32_t span = base + d, next = span + AHEAD;
            if (span >= end) break;
            float x[NT][LANE_COLS];
            tile_a tile;
#pragma unroll
            for (int t = 0; t < NT; t++) {
                const int32_t col = span * SPAN + lane % 4 * LANE_COLS;
                if (8 * t + g < b.n_x) {
                    load_x(x[t], job.x[8 * t + g] + col, b.x_aligned);
                } else {
#pragma unroll
                    for (int i = 0; i < LANE_COLS; i++) x[t][i] = 0.0f;
                }
            }
            make_tile<R>(&tile, ahead[d]);
            if (next < end) {
                load_lane<R>(&ahead[d][0], s, a, row[0], next);
                load_lane<R>(&ahead[d][1], s, a, row[1], next);
            }
#pragma unroll
            for (int t = 0; t < NT; t++) {
                lane_x split;
                if (8 * t >= b.n_x) break;
                split_x(&split, x[t]);
                add_span(acc[t], tile, split);
            }
        }
    }
#pragma unroll
    for (int t = 0; t < NT; t++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            parts[slice][8 * t + 2 * (lane % 4) + i % 2][g + 8 * (i / 2)] = acc[t][i];
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 8 * NT * FEW_OUTS; i += MMA_THREADS) {
        const int m = i / FEW_OUTS, n = i % FEW_OUTS;
        float sum = 0.0f;
#pragma unroll
        for (int p = 0; p < MMA_SLICES; p++) sum += parts[p][m][n];
        put(job, b, m, n, sum * a.global);
    }
}

/* ---- many rows: a warp per 32 outputs and 32 rows of x ---- */

constexpr int WARP_OUTS = 32, WARP_ROWS = 32;
constexpr int M_TILES = WARP_OUTS / 16, N_TILES = WARP_ROWS / 8;

/* x of a span in shared memory, so that neither side's accesses collide. */
struct span_x {
    uint4 at[PARTS][2][MANY_ROWS][4];
};

static __device__ __forceinline__ void store_x(span_x *to, const lane_x &x, int row, int part) {
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const uint32_t *w = &x.part[p][4 * h];
            to->at[p][h][row][part] = make_uint4(w[0], w[1], w[2], w[3]);
        }
    }
}

static __device__ __forceinline__ void fetch_x(lane_x *to, const span_x &from, int row,
                                               int part) {
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const uint4 v = from.at[p][h][row][part];
            to->part[p][4 * h] = v.x;
            to->part[p][4 * h + 1] = v.y;
            to->part[p][4 * h + 2] = v.z;
            to->part[p][4 * h + 3] = v.w;
        }
    }
}

template <int R>
static __device__ void mma_many(const mma_job &job, const mma_block &b, const weight_shape &s,
                                const weight_arrays &a) {
    __shared__ span_x shared;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, q = lane % 4;
    const int first_out = warp % 4 * WARP_OUTS, first_x = warp / 4 * WARP_ROWS;
    const int my_x = threadIdx.x / 4; /* the row of x this thread brings */
    const int32_t spans = s.cols / SPAN, per = (spans + MMA_SLICES - 1) / MMA_SLICES;
    const bool idle = first_x >= b.n_x || first_out >= b.n_rows;
    float acc[M_TILES][N_TILES][4] = {}, total[M_TILES][N_TILES][4] = {};
    for (int32_t span = 0; span < spans; span++) {
        lane_raw<R> raw[M_TILES][2];
        float x[LANE_COLS] = {};
        lane_x split;
        if (my_x < b.n_x) load_x(x, job.x[my_x] + span * SPAN + q * LANE_COLS, b.x_aligned);
        if (!idle) {
#pragma unroll
            for (int i = 0; i < 2 * M_TILES; i++) {
                const int32_t n = min(first_out + 8 * i + g, b.n_rows - 1);
                load_lane<R>(&raw[i / 2][i % 2], s, a, b.first_row + n, span);
            }
        }
        split_x(&split, x);
        __syncthreads(); /* the span before is done with */
        store_x(&shared, split, my_x, q);
        __syncthreads();
        if (idle) continue;
        tile_a tile[M_TILES];
#pragma unroll
        for (int i = 0; i < M_TILES; i++) make_tile<R>(&tile[i], raw[i]);
#pragma unroll
        for (int t = 0; t < N_TILES; t++) {
            if (first_x + 8 * t >= b.n_x) break;
            fetch_x(&split, shared, first_x + 8 * t + g, q);
#pragma unroll
            for (int i = 0; i < M_TILES; i++) add_span(acc[i][t], tile[i], split);
        }
        if ((span + 1) % per != 0 && span + 1 != spans) continue;
#pragma unroll
        for (int i = 0; i < M_TILES * N_TILES * 4; i++) { /* the slice is over */
            float *part = &acc[0][0][0] + i;
            (&total[0][0][0])[i] += *part;
            *part = 0.0f;
        }
    }
    if (idle) return;
#pragma unroll
    for (int i = 0; i < M_TILES * N_TILES * 4; i++) {
        const int tile = i / (4 * N_TILES), t = i / 4 % N_TILES, k = i % 4;
        put(job, b, first_x + 8 * t + 2 * q + k % 2, first_out + 16 * tile + g + 8 * (k / 2),
            total[tile][t][k] * a.global);
    }
}

#endif
