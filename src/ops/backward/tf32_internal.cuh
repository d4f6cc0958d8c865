/* tf32_internal.cuh - float32 products on the tensor cores: each factor is the sum of two numbers of TF32,
 * and of the four products all but low times low are added, so that an error is at most 2^-22 of a
 * product. Fragments of m16n8k8, lane = 4 * group + term; and copies of what they are made of. */
#ifndef HD_OPS_BACKWARD_TF32_INTERNAL_CUH
#define HD_OPS_BACKWARD_TF32_INTERNAL_CUH

#include "ops/backward/backward_cuda_internal.cuh"

/* N registers of a fragment, as high and low numbers. */
template <int N>
struct split_tf32 {
    uint32_t high[N], low[N];

    __device__ __forceinline__ void put(int i, float x) {
        high[i] = (__float_as_uint(x) + 0x1000u) & 0xffffe000u; /* to nearest */
        low[i] = __float_as_uint(x - __uint_as_float(high[i]));
    }
};

static __device__ __forceinline__ int own_group() {
    return (int)threadIdx.x % WARP / 4;
}

static __device__ __forceinline__ int own_term() {
    return (int)threadIdx.x % 4;
}

static __device__ __forceinline__ void mma_tf32(float *d, const uint32_t *a,
                                                const uint32_t *b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* A: rows of 16, terms of 8; at(row, term) is an element. */
template <typename AT>
static __device__ __forceinline__ void load_left(split_tf32<4> *to, AT at) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        to->put(i, at(own_group() + i % 2 * 8, own_term() + i / 2 * 4));
    }
}

/* B: columns of 8, terms of 8; at(term, col) is an element. WHOLE: there are no low numbers. */
template <bool WHOLE = false, typename AT>
static __device__ __forceinline__ void load_right(split_tf32<2> *to, AT at) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float x = at(own_term() + 4 * i, own_group());
        if (WHOLE) {
            to->high[i] = __float_as_uint(x);
        } else {
            to->put(i, x);
        }
    }
}

/* d[y][x] += A[y] B[x]. Small products go first, and products that follow each other have sums of their
 * own. WHOLE: B has no low numbers. */
template <int Y, int X, bool WHOLE = false>
static __device__ __forceinline__ void add_products(float (*d)[X][4], const split_tf32<4> *a,
                                                    const split_tf32<2> *b) {
#pragma unroll
    for (int part = 0; part < 3; part++) {
        if (WHOLE && part == 1) continue;
#pragma unroll
        for (int y = 0; y < Y; y++) {
#pragma unroll
            for (int x = 0; x < X; x++) {
                mma_tf32(d[y][x], part == 0 ? a[y].low : a[y].high,
                         part == 1 ? b[x].low : b[x].high);
            }
        }
    }
}

/* Row and column of element i of a tile's sum. */
static __device__ __forceinline__ int sum_row(int i) {
    return own_group() + i / 2 * 8;
}

static __device__ __forceinline__ int sum_col(int i) {
    return 2 * own_term() + i % 2;
}

/* ---- factors on their way to shared memory ---- */

constexpr int QUAD = 4; /* elements that are copied at once where they may */

/* Whether rows of x, `row` elements apart, may be read in quads of `width` elements. */
static __host__ __device__ __forceinline__ bool in_quads(const float *x, int64_t row,
                                                         int32_t width) {
    return reinterpret_cast<uintptr_t>(x) % 16 == 0 && row % QUAD == 0 && width % QUAD == 0;
}

/* BYTES of shared memory on their way; zeros unless live: then nothing is read. */
template <int BYTES>
static __device__ __forceinline__ void copy_async(float *to, const float *from, bool live) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(
                     (uint32_t)__cvta_generic_to_shared(to)),
                 "l"(from), "n"(BYTES), "r"(live ? BYTES : 0));
}

static __device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}

#endif
