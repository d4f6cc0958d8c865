/* mma_internal.cuh - rows of activations times stored rows on the tensor cores.
 *
 * mma.sync m16n8k16: the stored rows are A, exact in bfloat16 whatever their format; the rows
 * of x are B, each element as a sum of three bfloat16 numbers that hold all 24 bits of a
 * float. A row of the matrix is SLICES contiguous parts; an output is their sum in order. A part
 * adds spans of columns in order, each summed by the tensor cores from zero and taken times its
 * scale. So an output has the same bits however many rows share the call, in every product of
 * rows. Within a span a thread's columns are contiguous, which permutes the columns of A and B
 * alike.
 *
 * few_internal.cuh gives slices to blocks and is bounded by the weights' bytes;
 * many_internal.cuh splits nothing and is bounded by the tensor cores: three products for one. */
#ifndef HD_OPS_MMA_INTERNAL_CUH
#define HD_OPS_MMA_INTERNAL_CUH

#include <cuda_bf16.h>

#include "ops/weight_internal.cuh"

constexpr int PARTS = 3, MMA_SLICES = 8, MMA_THREADS = 8 * WARP;
constexpr int MANY_ROWS = 64; /* of x in a block, at most */

/* A span, by how the matrix is read: a thread's columns of a row, the steps of mma. */
template <int R>
struct span_of {
    enum { COLS = R == READ_E2M1 ? 2 * SPAN : SPAN, LANE = COLS / 4, STEPS = COLS / 16 };
};

/* Rows of x and outputs of one block. */
struct mma_job {
    const cuda_act *x[MANY_ROWS]; /* [n_x] */
    void *out[MANY_ROWS];         /* [n_x] at the block's first output column */
};

struct mma_block {
    int32_t n_x, first_row, n_rows; /* stored rows [first_row, + n_rows) */
    bool out_f32, x_aligned;        /* rows of x are aligned to 16 bytes */
};

/* Spans [begin, end) of part `slice` of a row. */
struct slice_range {
    int32_t begin, end;
};

template <int R>
static __device__ __forceinline__ slice_range slice_of(const weight_shape &s, int slice) {
    const int32_t spans = s.cols / span_of<R>::COLS;
    const int32_t per = (spans + MMA_SLICES - 1) / MMA_SLICES;
    return {min(slice * per, spans), min((slice + 1) * per, spans)};
}

/* ---- A: stored rows ---- */

/* A lane's columns of one stored row. */
template <int R>
struct lane_raw {
    enum { WORDS = R == READ_BF16 ? 8 : 4, QUADS = WORDS / 4 };
    uint32_t word[WORDS];
    float scale[2]; /* E2M1 may have one per GROUP; the others' second is not used */
};

template <int R>
static __device__ __forceinline__ const uint8_t *lane_address(const weight_shape &s,
                                                              const weight_arrays &a,
                                                              int32_t row, int32_t span) {
    constexpr int bits = R == READ_BF16 ? 16 : R == READ_E4M3 ? 8 : 4;
    const int32_t lane = (int32_t)(threadIdx.x % 4) * span_of<R>::LANE;
    return a.data + ((int64_t)row * s.cols + span * span_of<R>::COLS + lane) * bits / 8;
}

template <int R>
static __device__ __forceinline__ void load_scale(lane_raw<R> *to, const weight_shape &s,
                                                  const weight_arrays &a, int32_t row,
                                                  int32_t span) {
    const int32_t col = span * span_of<R>::COLS;
    if constexpr (R == READ_E2M1) {
        const int32_t own = col + (int32_t)(threadIdx.x % 4) * span_of<R>::LANE;
        to->scale[0] = group_scale(s, a, row, own);
        to->scale[1] =
            s.block_cols > GROUP ? to->scale[0] : group_scale(s, a, row, own + GROUP);
    } else {
        to->scale[0] = group_scale(s, a, row, col);
    }
}

template <int R>
static __device__ __forceinline__ void load_lane(lane_raw<R> *to, const weight_shape &s,
                                                 const weight_arrays &a, int32_t row,
                                                 int32_t span) {
    const uint4 *from = reinterpret_cast<const uint4 *>(lane_address<R>(s, a, row, span));
#pragma unroll
    for (int i = 0; i < lane_raw<R>::QUADS; i++) {
        const uint4 v = __ldg(from + i);
        to->word[4 * i] = v.x;
        to->word[4 * i + 1] = v.y;
        to->word[4 * i + 2] = v.z;
        to->word[4 * i + 3] = v.w;
    }
    load_scale<R>(to, s, a, row, span);
}

static __device__ __forceinline__ uint32_t bf16_pair(float low, float high) {
    return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632); /* truncates */
}

static __device__ __forceinline__ uint32_t times(uint32_t pair, uint32_t factor) {
    uint32_t product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(factor));
    return product;
}

/* Four codes of E2M1 as two pairs: the bytes of bfloat16 by table, the signs on top. */
static __device__ __forceinline__ void e2m1_pairs(uint32_t *low, uint32_t *high,
                                                  uint32_t codes) {
    const uint32_t magnitude = codes & 0x7777, sign = (codes >> 3) & 0x1111;
    const uint32_t upper =
        __byte_perm(0x3f3f3f00, 0x40404040, magnitude) | __byte_perm(0x00008000, 0, sign);
    const uint32_t lower = __byte_perm(0xc0800000, 0xc0804000, magnitude);
    *low = __byte_perm(lower, upper, 0x5140);
    *high = __byte_perm(lower, upper, 0x7362);
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
        const float scale = raw.scale[step / (GROUP / 4)];
        const uint32_t pair = bf16_pair(scale, scale);
        e2m1_pairs(low, high, raw.word[step / 2] >> (step % 2 * 16));
        *low = times(*low, pair);
        *high = times(*high, pair);
    }
}

/* Stored rows lane / 4 and lane / 4 + 8 of a tile at one step, as the instruction wants. */
template <int R>
static __device__ __forceinline__ void make_step(uint32_t *a, const lane_raw<R> *raw,
                                                 int step) {
    pairs_of<R>(&a[0], &a[2], raw[0], step);
    pairs_of<R>(&a[1], &a[3], raw[1], step);
}

/* ---- B: rows of x ---- */

/* PIECE columns of a row of x as three sums of pairs, the largest first. */
constexpr int PIECE = 16;

struct x_piece {
    uint32_t part[PARTS][PIECE / 2];
};

static __device__ __forceinline__ void load_piece(float *to, const cuda_act *x, bool aligned) {
#pragma unroll
    for (int i = 0; i < PIECE; i += 4) {
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

static __device__ __forceinline__ void split_piece(x_piece *to, const float *x) {
#pragma unroll
    for (int i = 0; i < PIECE / 2; i++) {
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

/* x of a span in shared memory, so that neither side's accesses collide: a lane's columns are
 * in EIGHTS of eight. */
template <int R, int ROWS>
struct span_x {
    enum { EIGHTS = span_of<R>::LANE / 8 };
    uint4 at[PARTS][EIGHTS][ROWS][4];
    uint4 apart[4]; /* spans do not begin in one bank */
};

/* Piece `piece` of the span's columns of one row. */
template <int R, int ROWS>
static __device__ __forceinline__ void store_piece(span_x<R, ROWS> *to, const x_piece &x,
                                                   int row, int piece) {
    constexpr int EACH = span_of<R>::LANE / PIECE; /* pieces of a lane */
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const uint32_t *w = &x.part[p][4 * h];
            to->at[p][2 * (piece % EACH) + h][row][piece / EACH] =
                make_uint4(w[0], w[1], w[2], w[3]);
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

/* The span's sums of MT tiles of 16 stored rows and eight rows of x at a time, times its
 * scale, into acc; the small parts go first. */
template <int R, int ROWS, int MT, int NT>
static __device__ __forceinline__ void add_span(float (*acc)[NT][4],
                                                const lane_raw<R> (*raw)[2],
                                                const span_x<R, ROWS> &x, int first_x,
                                                int n_x) {
    const int lane = threadIdx.x % WARP;
    float d[MT][NT][4] = {};
#pragma unroll
    for (int eight = 0; eight < span_x<R, ROWS>::EIGHTS; eight++) { /* two steps */
        uint32_t a[MT][2][4];
#pragma unroll
        for (int i = 0; i < MT * 2; i++) {
            make_step<R>(a[i / 2][i % 2], raw[i / 2], 2 * eight + i % 2);
        }
#pragma unroll
        for (int t = 0; t < NT; t++) {
            if (8 * t >= n_x) break;
            uint4 b[PARTS];
#pragma unroll
            for (int p = 0; p < PARTS; p++) {
                b[p] = x.at[p][eight][first_x + 8 * t + lane / 4][lane % 4];
            }
#pragma unroll
            for (int i = 0; i < MT; i++) {
#pragma unroll
                for (int p = PARTS - 1; p >= 0; p--) mma(d[i][t], a[i][0], b[p].x, b[p].y);
#pragma unroll
                for (int p = PARTS - 1; p >= 0; p--) mma(d[i][t], a[i][1], b[p].z, b[p].w);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < MT * NT * 4; i++) {
        const int tile = i / (4 * NT), t = i / 4 % NT, k = i % 4;
        const float scale = R == READ_E2M1 ? 1.0f : raw[tile][k / 2].scale[0];
        acc[tile][t][k] = fmaf(d[tile][t][k], scale, acc[tile][t][k]);
    }
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

#endif
