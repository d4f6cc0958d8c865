/* tile_products_internal.cuh - a block's tile of a float32 product, TILE x TILE elements, on the tensor
 * cores (tf32_internal.cuh). Terms come through shared memory, STEP at a time; sums of STEP terms are
 * added in float32, so that what the tensor cores cut off stays small. */
#ifndef HD_OPS_BACKWARD_TILE_PRODUCTS_INTERNAL_CUH
#define HD_OPS_BACKWARD_TILE_PRODUCTS_INTERNAL_CUH

#include "ops/backward/tf32_internal.cuh"

constexpr int TILE = 64, STEP = 32, TILE_THREADS = 128; /* a warp has a quarter of the tile */
constexpr int TERM_PITCH = TILE + 8, ROW_PITCH = STEP + 4; /* no two of a warp in one bank */

/* STEP terms of both factors: the right one is [term][column], the left one [term][row] or [row][term]. */
struct tile_pair {
    float left[STEP * TERM_PITCH], right[STEP * TERM_PITCH];
};

static_assert(TILE * ROW_PITCH <= STEP * TERM_PITCH, "either order of the left factor fits");

typedef float tile_sums[2][4][4]; /* 16 rows each, 8 columns each, elements of a lane */

static __device__ __forceinline__ int warp_row() {
    return (int)threadIdx.x / WARP / 2 * 32;
}

static __device__ __forceinline__ int warp_col() {
    return (int)threadIdx.x / WARP % 2 * 32;
}

/* Does what `move` says to every element of the lane: its row and column in the tile, and its sums' indices. */
template <typename MOVE>
static __device__ __forceinline__ void for_sums(MOVE move) {
#pragma unroll
    for (int y = 0; y < 2; y++) {
#pragma unroll
        for (int x = 0; x < 4; x++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                move(warp_row() + 16 * y + sum_row(i), warp_col() + 8 * x + sum_col(i), y, x,
                     i);
            }
        }
    }
}

static __device__ __forceinline__ void add_sums(tile_sums &to, const tile_sums &sum) {
#pragma unroll
    for (int y = 0; y < 2; y++) {
#pragma unroll
        for (int x = 0; x < 4; x++) {
#pragma unroll
            for (int i = 0; i < 4; i++) to[y][x][i] += sum[y][x][i];
        }
    }
}

/* BY_ROW: the left factor is [row][term]. WHOLE: the right one is whole in TF32. */
template <bool BY_ROW, bool WHOLE>
static __device__ __forceinline__ void multiply(const tile_pair &t, tile_sums &part) {
#pragma unroll
    for (int k = 0; k < STEP; k += 8) {
        split_tf32<4> a[2];
        split_tf32<2> b[4];
#pragma unroll
        for (int y = 0; y < 2; y++) {
            load_left(&a[y], [&](int row, int term) {
                const int m = warp_row() + 16 * y + row;
                return t.left[BY_ROW ? m * ROW_PITCH + k + term : (k + term) * TERM_PITCH + m];
            });
        }
#pragma unroll
        for (int x = 0; x < 4; x++) {
            load_right<WHOLE>(&b[x], [&](int term, int col) {
                return t.right[(k + term) * TERM_PITCH + warp_col() + 8 * x + col];
            });
        }
        add_products<2, 4, WHOLE>(part, a, b);
    }
}

/* Adds terms [first, end) to sum. FILL brings STEP terms from `at` on: begin(pair, at) starts, finish(pair)
 * lays down what it holds in registers; add(sum, part, at) adds the sum of those terms. All threads. */
template <bool BY_ROW, bool WHOLE, typename FILL>
static __device__ __forceinline__ void add_terms(tile_sums &sum, int32_t first, int32_t end,
                                                 FILL fill) {
    __shared__ __align__(16) tile_pair t[2];
    __syncthreads(); /* the terms of a sum before are done with */
    fill.begin(&t[0], first);
    fill.finish(&t[0]);
    for (int32_t at = first, k = 0; at < end; at += STEP, k ^= 1) {
        const bool more = at + STEP < end;
        wait_for_copies();
        __syncthreads(); /* these terms are there, and the other pair is done with */
        if (more) fill.begin(&t[k ^ 1], at + STEP);
        tile_sums part = {};
        multiply<BY_ROW, WHOLE>(t[k], part);
        fill.add(sum, part, at);
        if (more) fill.finish(&t[k ^ 1]);
    }
}

#endif
