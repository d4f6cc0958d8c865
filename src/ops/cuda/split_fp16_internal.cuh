/* split_fp16_internal.cuh - rows of floats in shared memory as narrow numbers, for the
 * tensor cores.
 *
 * EXACT: an element is the sum of two half-precision numbers. A row is shifted by a power of two
 * so that its largest element is about 2^13; every element is then high + low with an error of at
 * most 2^-22 of itself or 2^-38 of the row's largest. Eight columns are 16 bytes of highs, then
 * 16 bytes of lows: what eight floats took. So a row is converted where it lies. FAST: an element
 * is the nearest bfloat16, which needs no shift, in the place of the highs. Chunks of 16 bytes
 * are exchanged within 128 bytes by the row's number, so that eight rows of one column do not
 * meet in a bank. */
#ifndef HD_OPS_CUDA_SPLIT_FP16_INTERNAL_CUH
#define HD_OPS_CUDA_SPLIT_FP16_INTERNAL_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "ops/cuda/cuda_internal.cuh"

constexpr int HALF_COLS = 32; /* columns of 128 bytes; a row is padded to them */
constexpr int TOP_BIT = 13;   /* of a shifted row */
constexpr int NO_SHIFT = 127; /* the biased exponent of one */

template <int P>
constexpr int SPLIT = P == EXACT ? 2 : 1; /* highs, lows */

struct half_rows {
    uint32_t at;  /* an address of shared memory */
    int32_t cols; /* a multiple of HALF_COLS */
};

static __host__ __device__ __forceinline__ int32_t half_cols(int32_t cols) {
    return (cols + HALF_COLS - 1) / HALF_COLS * HALF_COLS;
}

static __device__ __forceinline__ uint32_t shared_address(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

static __device__ __forceinline__ uint32_t chunk_at(const half_rows &r, int row, int chunk) {
    return r.at + (uint32_t)(row * r.cols * 4 + ((chunk ^ (row & 7)) << 4));
}

static __device__ __forceinline__ uint4 get_chunk(uint32_t at) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at));
    return v;
}

static __device__ __forceinline__ void put_chunk(uint32_t at, uint4 v) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.x), "r"(v.y),
                 "r"(v.z), "r"(v.w));
}

/* 16 bytes of a row on their way; zeros where from is NULL. */
static __device__ __forceinline__ void copy_chunk(uint32_t to, const void *from,
                                                  const void *valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to),
                 "l"(from ? from : valid), "r"(from ? 16 : 0));
}

static __device__ __forceinline__ void commit_copies() {
    asm volatile("cp.async.commit_group;");
}

template <int LEFT>
static __device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

/* Row `row` of x [cols] as floats: a warp's work. NULL: zeros. quads: 16-byte loads may be
 * used and are not waited for. */
static __device__ __forceinline__ void load_row(const half_rows &to, int row, const cuda_act *x,
                                                int32_t cols, bool quads, const void *valid) {
    const int lane = threadIdx.x % WARP;
    for (int chunk = lane; chunk < to.cols / 4; chunk += WARP) {
        const uint32_t at = chunk_at(to, row, chunk);
        if (quads) {
            const bool live = x && 4 * chunk < cols;
            copy_chunk(at, live ? x + 4 * chunk : nullptr, valid);
            continue;
        }
        uint32_t v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            v[i] = x && 4 * chunk + i < cols ? __float_as_uint(wide(x[4 * chunk + i])) : 0;
        }
        put_chunk(at, make_uint4(v[0], v[1], v[2], v[3]));
    }
}

/* Row `row` of bfloat16 likewise: as floats, or, units, eight columns in the place of the highs,
 * which needs no conversion and is not waited for. */
static __device__ __forceinline__ void load_narrow_row(const half_rows &to, int row,
                                                       const __nv_bfloat16 *x, int32_t cols,
                                                       bool units, const void *valid) {
    const int lane = threadIdx.x % WARP;
    for (int chunk = lane; chunk < to.cols / (units ? 8 : 4); chunk += WARP) {
        if (units) {
            const bool live = x && 8 * chunk < cols;
            copy_chunk(chunk_at(to, row, 2 * chunk), live ? x + 8 * chunk : nullptr, valid);
            continue;
        }
        float v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            v[i] = x && 4 * chunk + i < cols ? __bfloat162float(x[4 * chunk + i]) : 0.0f;
        }
        put_chunk(chunk_at(to, row, chunk),
                  make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]),
                             __float_as_uint(v[2]), __float_as_uint(v[3])));
    }
}

/* What lane i has found. */
template <typename T>
static __device__ __forceinline__ const T *from_lane(const T *found, int i) {
    const uint64_t bits = __shfl_sync(ALL_LANES, reinterpret_cast<uint64_t>(found), i);
    return reinterpret_cast<const T *>(bits);
}

/* ---- conversion ---- */

static __device__ __forceinline__ float power_of_two(int biased) {
    return __uint_as_float((uint32_t)biased << 23);
}

/* A pair as highs and lows. */
static __device__ __forceinline__ void split_pair(uint32_t *high, uint32_t *low, float a,
                                                  float b) {
    const __half2 h = __floats2half2_rn(a, b);
    const float2 back = __half22float2(h);
    const __half2 l = __floats2half2_rn(a - back.x, b - back.y);
    *high = *reinterpret_cast<const uint32_t *>(&h);
    *low = *reinterpret_cast<const uint32_t *>(&l);
}

static __device__ __forceinline__ uint32_t bf16_pair_of(float a, float b) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<const uint32_t *>(&pair);
}

/* Units of eight columns first + lane, + WARP, ... of a row as floats, zeros behind the last. */
template <int UNITS>
static __device__ __forceinline__ void get_units(float (*to)[8], const half_rows &r, int row,
                                                 int first) {
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
        const int unit = first + (int)threadIdx.x % WARP + i * WARP;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint4 v = {};
            if (unit < r.cols / 8) v = get_chunk(chunk_at(r, row, 2 * unit + half));
            to[i][4 * half] = __uint_as_float(v.x);
            to[i][4 * half + 1] = __uint_as_float(v.y);
            to[i][4 * half + 2] = __uint_as_float(v.z);
            to[i][4 * half + 3] = __uint_as_float(v.w);
        }
    }
}

template <int P, int UNITS>
static __device__ __forceinline__ void put_units(const half_rows &r, int row, int first,
                                                 const float (*x)[8], float factor) {
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
        const int unit = first + (int)threadIdx.x % WARP + i * WARP;
        uint32_t high[4], low[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            if (P == EXACT) {
                split_pair(&high[k], &low[k], x[i][2 * k] * factor, x[i][2 * k + 1] * factor);
            } else {
                high[k] = bf16_pair_of(x[i][2 * k], x[i][2 * k + 1]);
            }
        }
        if (unit >= r.cols / 8) continue;
        put_chunk(chunk_at(r, row, 2 * unit), make_uint4(high[0], high[1], high[2], high[3]));
        if (P == EXACT) {
            put_chunk(chunk_at(r, row, 2 * unit + 1),
                      make_uint4(low[0], low[1], low[2], low[3]));
        }
    }
}

/* The shift of a row whose largest magnitude is that of the lanes' `top`. */
static __device__ __forceinline__ int shift_of(float top) {
    return max((int)(__float_as_uint(warp_max(top)) >> 23) - TOP_BIT, 1);
}

/* A row that the warp itself loaded, UNITS of a lane at once. The biased exponent of what undoes
 * its shift, 1 to 253. */
template <int P, int UNITS>
static __device__ __forceinline__ int convert_row(const half_rows &r, int row) {
    float x[UNITS][8], top = 0.0f;
    int shift = NO_SHIFT;
    if (P == EXACT) { /* a row of one turn is in x then */
        for (int first = 0; first < r.cols / 8; first += UNITS * WARP) {
            get_units<UNITS>(x, r, row, first);
#pragma unroll
            for (int i = 0; i < UNITS * 8; i++) top = fmaxf(top, fabsf(x[i / 8][i % 8]));
        }
        shift = shift_of(top);
    }
    for (int first = 0; first < r.cols / 8; first += UNITS * WARP) {
        if (P != EXACT || r.cols / 8 > UNITS * WARP) get_units<UNITS>(x, r, row, first);
        put_units<P, UNITS>(r, row, first, x, power_of_two(254 - shift));
    }
    return shift;
}

/* Rows [first, first + N). */
template <int P, int N, int UNITS>
static __device__ __forceinline__ void convert_rows(const half_rows &r, int first, int *shift) {
#pragma unroll
    for (int i = 0; i < N; i++) shift[i] = convert_row<P, UNITS>(r, first + i);
}

#endif
