/* halves_internal.cuh - rows of floats in shared memory as sums of two half-precision numbers,
 * and the tensor cores on them.
 *
 * A row is shifted by a power of two so that its largest element is about 2^13; every element
 * is then high + low with an error of at most 2^-22 of itself or 2^-38 of the row's largest.
 * Eight columns are 16 bytes of highs, then 16 bytes of lows: what eight floats took. So a row
 * is converted where it lies. Chunks of 16 bytes are exchanged within 128 bytes by the row's
 * number, so that eight rows of one column do not meet in a bank. */
#ifndef HD_OPS_HALVES_INTERNAL_CUH
#define HD_OPS_HALVES_INTERNAL_CUH

#include <cuda_fp16.h>

#include "ops/cuda_internal.cuh"

constexpr int HALF_COLS = 32; /* columns of 128 bytes; a row is padded to them */
constexpr int TOP_BIT = 13;   /* of a shifted row */

struct half_rows {
    uint8_t *at;
    int32_t cols; /* a multiple of HALF_COLS */
};

static __host__ __device__ __forceinline__ int32_t half_cols(int32_t cols) {
    return (cols + HALF_COLS - 1) / HALF_COLS * HALF_COLS;
}

static __device__ __forceinline__ uint8_t *chunk_at(const half_rows &r, int row, int chunk) {
    return r.at + (int64_t)row * r.cols * 4 + ((chunk ^ (row & 7)) << 4);
}

static __device__ __forceinline__ unsigned shared_address(const void *p) {
    return (unsigned)__cvta_generic_to_shared(p);
}

/* 16 bytes of a row on their way; zeros where from is NULL. */
static __device__ __forceinline__ void copy_chunk(const half_rows &to, int row, int chunk,
                                                  const void *from, const void *valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                     shared_address(chunk_at(to, row, chunk))),
                 "l"(from ? from : valid), "r"(from ? 16 : 0));
}

static __device__ __forceinline__ void commit_copies() {
    asm volatile("cp.async.commit_group;");
}

template <int LEFT>
static __device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT));
}

/* Row `row` of x [cols] as floats: a warp's work. NULL: zeros. quads: 16-byte loads may be
 * used and are not waited for. */
static __device__ __forceinline__ void load_row(const half_rows &to, int row, const cuda_act *x,
                                                int32_t cols, bool quads, const void *valid) {
    const int lane = threadIdx.x % WARP;
    if (quads) {
        for (int chunk = lane; chunk < to.cols / 4; chunk += WARP) {
            const bool live = x && 4 * chunk < cols;
            copy_chunk(to, row, chunk, live ? x + 4 * chunk : nullptr, valid);
        }
        return;
    }
    for (int c = lane; c < to.cols; c += WARP) {
        float *f = reinterpret_cast<float *>(chunk_at(to, row, c / 4)) + c % 4;
        *f = x && c < cols ? wide(x[c]) : 0.0f;
    }
}

/* ---- conversion ---- */

static __device__ __forceinline__ float power_of_two(int biased) {
    return __uint_as_float((uint32_t)biased << 23);
}

static __device__ __forceinline__ float largest(float4 v) {
    return fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
}

/* The biased exponent of what undoes the row's shift, 1 to 253; a warp's work. */
static __device__ __forceinline__ int shift_of(const half_rows &r, int row) {
    const int lane = threadIdx.x % WARP;
    float top = 0.0f;
    for (int chunk = lane; chunk < r.cols / 4; chunk += WARP) {
        top = fmaxf(top, largest(*reinterpret_cast<float4 *>(chunk_at(r, row, chunk))));
    }
    const int biased = (int)(__float_as_uint(warp_max(top)) >> 23);
    return max(biased - TOP_BIT, 1);
}

/* A pair as high and low halves. */
static __device__ __forceinline__ void split_pair(uint32_t *high, uint32_t *low, float a,
                                                  float b) {
    const __half2 h = __floats2half2_rn(a, b);
    const float2 back = __half22float2(h);
    const __half2 l = __floats2half2_rn(a - back.x, b - back.y);
    *high = *reinterpret_cast<const uint32_t *>(&h);
    *low = *reinterpret_cast<const uint32_t *>(&l);
}

/* Eight columns from floats to halves, times factor. */
static __device__ __forceinline__ void convert_unit(const half_rows &r, int row, int unit,
                                                    float factor) {
    uint8_t *first = chunk_at(r, row, 2 * unit), *second = chunk_at(r, row, 2 * unit + 1);
    const float4 a = *reinterpret_cast<float4 *>(first);
    const float4 b = *reinterpret_cast<float4 *>(second);
    uint4 high, low;
    split_pair(&high.x, &low.x, a.x * factor, a.y * factor);
    split_pair(&high.y, &low.y, a.z * factor, a.w * factor);
    split_pair(&high.z, &low.z, b.x * factor, b.y * factor);
    split_pair(&high.w, &low.w, b.z * factor, b.w * factor);
    *reinterpret_cast<uint4 *>(first) = high;
    *reinterpret_cast<uint4 *>(second) = low;
}

/* Rows [first, first + N) that the warp itself loaded; shift[i]: what undoes it. */
template <int N>
static __device__ __forceinline__ void convert_rows(const half_rows &r, int first, int *shift) {
    const int lane = threadIdx.x % WARP, units = r.cols / 8;
#pragma unroll
    for (int i = 0; i < N; i++) shift[i] = shift_of(r, first + i);
    __syncwarp();
    for (int at = lane; at < N * units; at += WARP) {
        const int i = at / units;
        int own = shift[0];
#pragma unroll
        for (int k = 1; k < N; k++) own = i == k ? shift[k] : own;
        convert_unit(r, first + i, at - i * units, power_of_two(254 - own));
    }
}

/* ---- fragments and products ---- */

static __device__ __forceinline__ void load_four(uint32_t *r, const void *p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(p))
                 : "memory");
}

static __device__ __forceinline__ void load_four_turned(uint32_t *r, const void *p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(p))
                 : "memory");
}

/* A: 16 rows from `row` on, 16 columns from 16 * step on. part 0: highs, 1: lows. */
static __device__ __forceinline__ void load_a(uint32_t *a, const half_rows &r, int row,
                                              int step, int part) {
    const int lane = threadIdx.x % WARP, m = lane / 8;
    load_four(a, chunk_at(r, row + m % 2 * 8 + lane % 8, 2 * (2 * step + m / 2) + part));
}

/* B of two tiles of 8 rows each, 16 columns: b[0], b[1] and b[2], b[3]. */
static __device__ __forceinline__ void load_b(uint32_t *b, const half_rows &r, int row,
                                              int step, int part) {
    const int lane = threadIdx.x % WARP, m = lane / 8;
    load_four(b, chunk_at(r, row + m / 2 * 8 + lane % 8, 2 * (2 * step + m % 2) + part));
}

/* B of two tiles of 8 columns each, from 8 * unit on, 16 rows as the inner dimension. */
static __device__ __forceinline__ void load_b_turned(uint32_t *b, const half_rows &r, int row,
                                                     int unit, int part) {
    const int lane = threadIdx.x % WARP, m = lane / 8;
    load_four_turned(b, chunk_at(r, row + m % 2 * 8 + lane % 8, 2 * (unit + m / 2) + part));
}

static __device__ __forceinline__ void mma_half(float *d, const uint32_t *a, uint32_t b0,
                                                uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* d += A B but for low times low; a and b: highs, lows. The small products go first. */
static __device__ __forceinline__ void mma_halves(float *d, const uint32_t (*a)[4],
                                                  const uint32_t (*b)[4], int tile) {
    mma_half(d, a[0], b[1][2 * tile], b[1][2 * tile + 1]);
    mma_half(d, a[1], b[0][2 * tile], b[0][2 * tile + 1]);
    mma_half(d, a[0], b[0][2 * tile], b[0][2 * tile + 1]);
}

#endif
