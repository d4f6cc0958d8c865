/* mma_internal.cuh - rows of activations times stored rows on the tensor cores.
 *
 * mma.sync m16n8k16: the stored rows are A, exact in bfloat16 whatever their format; the rows
 * of x are B, each element as a sum of P bfloat16 numbers: EXACT of them hold all 24 bits of a
 * float, FAST is the nearest one. A row of the matrix is MMA_SLICES contiguous parts; an output
 * is their sum in order. A part adds spans of columns in order, each summed by the tensor cores
 * from zero and taken times its scale. So an output has the same bits however many rows share
 * the call, in every product of rows. Within a span a lane's columns are chosen so that it
 * loads 16 bytes of a row at once, which permutes the columns of A and B alike.
 *
 * gemm_small_m_internal.cuh gives slices to warps and is bounded by the weights' bytes;
 * gemm_large_m_internal.cuh shares weights and x over a block and is bounded by the tensor cores. */
#ifndef HD_OPS_CUDA_MMA_INTERNAL_CUH
#define HD_OPS_CUDA_MMA_INTERNAL_CUH

#include <cuda_bf16.h>

#include "ops/cuda/mma_weight_internal.cuh"
#include "ops/cuda/unpack_internal.cuh"

constexpr int LARGE_M_ROWS = 64; /* of x in a block, at most */

/* Rows of x, aligned to 16 bytes, and outputs of one block. */
struct mma_job {
    const cuda_act *x[LARGE_M_ROWS]; /* [n_x] */
    void *out[LARGE_M_ROWS];         /* [n_x] at the block's first output column */
};

struct mma_block {
    int32_t n_x, first_row, n_rows; /* stored rows [first_row, + n_rows) */
    bool out_f32;
};

/* ---- A: stored rows ---- */

/* Word i of the lane's 16 bytes or 32. */
template <int R>
static __device__ __forceinline__ uint32_t word_of(const lane_raw<R> &raw, int i) {
    const uint4 &q = raw.quad[i / 4];
    return i % 4 == 0 ? q.x : i % 4 == 1 ? q.y : i % 4 == 2 ? q.z : q.w;
}

/* Of numbers that are exact in bfloat16. */
static __device__ __forceinline__ uint32_t exact_pair(float low, float high) {
    return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
}

/* Codes i and i + 4 of a word of E2M1, without their factor 2^126: exponent and mantissa are moved to
 * where those of bfloat16 are, also where there is no leading one. */
static __device__ __forceinline__ uint32_t e2m1_pair(uint32_t word, int i) {
    const uint32_t magnitude = i == 0   ? word << 6
                               : i == 1 ? word << 2
                               : i == 2 ? word >> 2
                                        : word >> 6;
    return (magnitude & 0x01c001c0) | (word << (12 - 4 * i) & 0x80008000);
}

/* Columns 4 * step, + 1 and + 2, + 3 of the lane's, or the four of E2M1 that slot_col() names, as pairs of
 * bfloat16, with the scale where elements contain it. */
template <int R>
static __device__ __forceinline__ void pairs_of(uint32_t *low, uint32_t *high,
                                                const lane_raw<R> &raw, int step) {
    if constexpr (R == READ_BF16) {
        *low = word_of(raw, 2 * step);
        *high = word_of(raw, 2 * step + 1);
    } else if constexpr (R == READ_E4M3 || R == READ_MXE4M3) {
        const uint32_t w = word_of(raw, step);
        const float2 a = __half22float2(
            __half2(__nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)w, __NV_E4M3)));
        const float2 b = __half22float2(
            __half2(__nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)(w >> 16), __NV_E4M3)));
        *low = exact_pair(a.x, a.y);
        *high = exact_pair(b.x, b.y);
        if constexpr (R == READ_MXE4M3) {
            const uint32_t scale = exact_pair(raw.scale[0], raw.scale[0]);
            *low = multiply_pair(*low, scale);
            *high = multiply_pair(*high, scale);
        }
    } else {
        constexpr uint32_t MOVED_BACK = 0x7e807e80; /* 2^126, twice */
        const float scale = raw.scale[step / (GROUP / 4)];
        const uint32_t pair = exact_pair(scale, scale), word = word_of(raw, step / 2);
        *low = multiply_pair(multiply_pair(e2m1_pair(word, step % 2 * 2), MOVED_BACK), pair);
        *high =
            multiply_pair(multiply_pair(e2m1_pair(word, step % 2 * 2 + 1), MOVED_BACK), pair);
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

/* Which of an eight's columns are at the slots of its two steps. */
template <int R>
static __host__ __device__ constexpr int slot_col(int slot) {
    return R == READ_E2M1 ? slot / 2 + slot % 2 * 4 : slot;
}

/* Eight columns of a row of x as P numbers each, the largest first. */
template <int P>
struct x_eight {
    uint4 part[P];
};

static __device__ __forceinline__ void load_eight(float *to, const cuda_act *x) {
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
        const float4 v = __ldg(reinterpret_cast<const float4 *>(x + i));
        to[i] = v.x;
        to[i + 1] = v.y;
        to[i + 2] = v.z;
        to[i + 3] = v.w;
    }
}

/* The pair as bfloat16, and what is left of it. */
static __device__ __forceinline__ uint32_t take_pair(float *low, float *high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(*low, *high);
    const uint32_t bits = *reinterpret_cast<const uint32_t *>(&pair);
    *low -= __uint_as_float(bits << 16);
    *high -= __uint_as_float(bits & 0xffff0000u);
    return bits;
}

template <int R, int P>
static __device__ __forceinline__ x_eight<P> split_eight(const float *x) {
    x_eight<P> to;
    float left[8];
#pragma unroll
    for (int i = 0; i < 8; i++) left[i] = x[slot_col<R>(i)];
#pragma unroll
    for (int p = 0; p < P; p++) {
        to.part[p].x = take_pair(&left[0], &left[1]);
        to.part[p].y = take_pair(&left[2], &left[3]);
        to.part[p].z = take_pair(&left[4], &left[5]);
        to.part[p].w = take_pair(&left[6], &left[7]);
    }
    return to;
}

/* ---- D ---- */

static __device__ __forceinline__ void mma(float *d, const uint32_t *a, uint32_t b0,
                                           uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Adds one eight of MT tiles of 16 stored rows and NT of eight rows of x, b_of(t, p), to d. The
 * small parts go first; products that follow each other have sums of their own, because one
 * that waits for the sum of the one before takes several times as long. */
template <int R, int P, int MT, int NT, typename B>
static __device__ __forceinline__ void add_eight(float (*d)[NT][4], const lane_raw<R> (*raw)[2],
                                                 int eight, B b_of) {
    uint32_t a[MT][2][4];
#pragma unroll
    for (int i = 0; i < MT * 2; i++) {
        make_step<R>(a[i / 2][i % 2], raw[i / 2], 2 * eight + i % 2);
    }
#pragma unroll
    for (int p = P - 1; p >= 0; p--) {
        uint4 b[NT];
#pragma unroll
        for (int t = 0; t < NT; t++) b[t] = b_of(t, p);
#pragma unroll
        for (int i = 0; i < MT * NT; i++) {
            mma(d[i / NT][i % NT], a[i / NT][0], b[i % NT].x, b[i % NT].y);
        }
#pragma unroll
        for (int i = 0; i < MT * NT; i++) {
            mma(d[i / NT][i % NT], a[i / NT][1], b[i % NT].z, b[i % NT].w);
        }
    }
}

/* A span's sums times its scale, into acc. */
template <int R, int MT, int NT>
static __device__ __forceinline__ void add_span(float (*acc)[NT][4], const float (*d)[NT][4],
                                                const lane_raw<R> (*raw)[2]) {
#pragma unroll
    for (int i = 0; i < MT * NT * 4; i++) {
        const int tile = i / (4 * NT), t = i / 4 % NT, k = i % 4;
        const float scale = SCALES_ELEMENTS<R> ? 1.0f : raw[tile][k / 2].scale[0];
        acc[tile][t][k] = fmaf(d[tile][t][k], scale, acc[tile][t][k]);
    }
}

/* Whether rows of x may be loaded as they are here. */
static inline bool x_fits(const cuda_act *x, int64_t stride, int64_t head) {
    return (uintptr_t)x % 16 == 0 && stride % 4 == 0 && head % 4 == 0;
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
