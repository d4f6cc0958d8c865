/* attention_tiles_internal.cuh - gradients of attention in tiles of T queries and T keys, whose rows lie in
 * shared memory.
 *
 * A block owns a tile of queries for dq, or a tile of keys for theirs, and walks through the tiles that it
 * sees, in order. Tiles begin at the beginning of a sequence, so what a row gets depends on its sequence
 * alone. Scores are computed again where they are needed, and nothing of their size is kept. */
#ifndef HD_OPS_BACKWARD_ATTENTION_TILES_INTERNAL_CUH
#define HD_OPS_BACKWARD_ATTENTION_TILES_INTERNAL_CUH

#include "ops/backward/backward_cuda_internal.cuh"

constexpr int SIDE = 16, THREADS = SIDE * SIDE, WARPS = THREADS / WARP;

/* Sizes of a kind of attention: tiles of T rows, keys of up to K and values of up to V columns. A thread
 * has EACH x EACH scores, and quads of columns of EACH rows of a sum. */
template <int T, int K, int V>
struct tile_sizes {
    enum {
        TILE = T,
        EACH = T / SIDE,
        K_QUADS = K / (4 * SIDE),
        V_QUADS = V / (4 * SIDE),
        K_MOST = K,
        V_MOST = V,
        K_PITCH = K + 4, /* so that neither side's accesses collide */
        V_PITCH = V + 4,
        PITCH = T + 4
    };
};

/* Rows [first, end) of a sequence, which begins with row `begin` and ends before `last`. */
struct row_tile {
    int32_t seq, begin, last, first, end;
};

/* The block's tile: of the rows of all sequences in groups of `divide`, `times` as many; first == end:
 * there are fewer. */
template <int TILE>
static __device__ row_tile find_tile(const hd_seqs &s, int32_t times, int32_t divide) {
    int32_t left = (int32_t)blockIdx.x;
    for (int32_t q = 0; q < s.n; q++) {
        const int32_t n = (s.first_row[q + 1] - s.first_row[q]) / divide * times;
        const int32_t tiles = (n + TILE - 1) / TILE;
        if (left < tiles) return {q, 0, n, left * TILE, min((left + 1) * TILE, n)};
        left -= tiles;
    }
    return {0, 0, 0, 0, 0};
}

/* x [width] as columns of a row in shared memory, zeros behind; a warp's work. NULL: zeros. */
template <int MOST>
static __device__ __forceinline__ void put_row(float *to, const float *x, int32_t width) {
#pragma unroll
    for (int c = (int)threadIdx.x % WARP; c < MOST; c += WARP) {
        to[c] = x && c < width ? x[c] : 0.0f;
    }
}

static __device__ __forceinline__ int own_x() {
    return (int)threadIdx.x % SIDE;
}

static __device__ __forceinline__ int own_y() {
    return (int)threadIdx.x / SIDE;
}

/* sum[i][j] = <own row y + SIDE i, other row x + SIDE j>, of `width` columns */
template <int EACH>
static __device__ __forceinline__ void multiply(float (*sum)[EACH], const float *own,
                                                int own_pitch, const float *other,
                                                int other_pitch, int32_t width) {
    own += own_y() * own_pitch;
    other += own_x() * other_pitch;
#pragma unroll 4
    for (int c = 0; c < width; c += 4) {
        float4 left[EACH], right[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            left[i] = *reinterpret_cast<const float4 *>(own + SIDE * i * own_pitch + c);
            right[i] = *reinterpret_cast<const float4 *>(other + SIDE * i * other_pitch + c);
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) {
#pragma unroll
            for (int j = 0; j < EACH; j++) {
                sum[i][j] = fmaf(left[i].x, right[j].x, sum[i][j]);
                sum[i][j] = fmaf(left[i].y, right[j].y, sum[i][j]);
                sum[i][j] = fmaf(left[i].z, right[j].z, sum[i][j]);
                sum[i][j] = fmaf(left[i].w, right[j].w, sum[i][j]);
            }
        }
    }
}

/* sum[i][quad of columns x + SIDE j] += the sum over rows r of factor[y + SIDE i][r] rows[r], for the
 * first N quads that have one of `width` columns. */
template <int T, int N, int QUADS>
static __device__ __forceinline__ void add_rows(float4 (*sum)[QUADS], const float *factor,
                                                const float *rows, int pitch, int32_t width) {
    constexpr int EACH = T / SIDE, PITCH = T + 4;
    factor += own_y() * PITCH;
    rows += 4 * own_x();
    for (int r = 0; r < T; r += 4) {
        float4 f[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            f[i] = *reinterpret_cast<const float4 *>(factor + SIDE * i * PITCH + r);
        }
#pragma unroll
        for (int j = 0; j < N; j++) {
            if (4 * SIDE * j >= width) break;
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float4 v =
                    *reinterpret_cast<const float4 *>(rows + (r + k) * pitch + 4 * SIDE * j);
#pragma unroll
                for (int i = 0; i < EACH; i++) {
                    const float a = k == 0   ? f[i].x
                                    : k == 1 ? f[i].y
                                    : k == 2 ? f[i].z
                                             : f[i].w;
                    sum[i][j].x = fmaf(a, v.x, sum[i][j].x);
                    sum[i][j].y = fmaf(a, v.y, sum[i][j].y);
                    sum[i][j].z = fmaf(a, v.z, sum[i][j].z);
                    sum[i][j].w = fmaf(a, v.w, sum[i][j].w);
                }
            }
        }
    }
}

/* A thread's part of sums: columns [0, width) of the tile's rows below n. to(i, c): where a column is. */
template <int EACH, int QUADS, typename TO>
static __device__ __forceinline__ void store_rows(const float4 (*sum)[QUADS], int n,
                                                  int32_t width, TO to) {
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        if (own_y() + SIDE * i >= n) continue;
#pragma unroll
        for (int j = 0; j < QUADS; j++) {
            const float v[4] = {sum[i][j].x, sum[i][j].y, sum[i][j].z, sum[i][j].w};
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const int c = 4 * (own_x() + SIDE * j) + k;
                if (c < width) *to(own_y() + SIDE * i, c) = v[k];
            }
        }
    }
}

/* The part of a softmax that a thread has of one row: its largest score, and the sum of exp(score -
 * top). */
struct part_sum {
    float top, total;
};

static __device__ __forceinline__ part_sum joined(part_sum a, part_sum b) {
    const float top = fmaxf(a.top, b.top);
    if (top == -CUDART_INF_F) return {top, 0.0f};
    return {top, a.total * expf(a.top - top) + b.total * expf(b.top - top)};
}

/* Of the SIDE threads that share a row. */
static __device__ __forceinline__ part_sum joined_over_row(part_sum own) {
    for (int step = 1; step < SIDE; step *= 2) {
        own = joined(own, {__shfl_xor_sync(ALL_LANES, own.top, step),
                           __shfl_xor_sync(ALL_LANES, own.total, step)});
    }
    return own;
}

#endif
