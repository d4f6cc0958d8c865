/* attention_tiles_internal.cuh - gradients of attention in tiles of T queries and T keys, whose rows lie in
 * shared memory; products are of tf32_internal.cuh.
 *
 * A block owns a tile of queries for dq, or a tile of keys for theirs, and walks through the tiles that it
 * sees, in order. Tiles begin at the beginning of a sequence, so what a row gets depends on its sequence
 * alone. Scores are computed again where they are needed, and nothing of their size is kept. */
#ifndef HD_OPS_BACKWARD_ATTENTION_TILES_INTERNAL_CUH
#define HD_OPS_BACKWARD_ATTENTION_TILES_INTERNAL_CUH

#include "ops/backward/tf32_internal.cuh"

constexpr int WARPS = 8, THREADS = WARPS * WARP;
constexpr int GROUP =
    32; /* columns that are summed by the tensor cores before they are added */

/* Pitches of rows in shared memory: no two accesses of a warp in one bank, as rows with terms as columns, and
 * as terms with rows as columns. */
constexpr int row_pitch(int cols) {
    return cols + 4;
}

constexpr int term_pitch(int cols) {
    return cols + 8;
}

/* Rows [first, end) of a sequence, which begins with row `begin` and ends before `last`. */
struct row_tile {
    int32_t seq, begin, last, first, end;
};

/* The block's tile of T: of the rows of all sequences in groups of `divide`, `times` as many; first ==
 * end: there are fewer. */
template <int T>
static __device__ row_tile find_tile(const hd_seqs &s, int32_t times, int32_t divide) {
    int32_t left = (int32_t)blockIdx.x;
    for (int32_t base = 0; base < s.n; base += WARP) {
        const int32_t lane = (int32_t)threadIdx.x % WARP, q = min(base + lane, s.n - 1);
        const int32_t n = (s.first_row[q + 1] - s.first_row[q]) / divide * times;
        const lane_place p = find_lane(base + lane < s.n ? (n + T - 1) / T : 0, left);
        if (p.lane >= 0) {
            const int32_t of_seq = __shfl_sync(ALL_LANES, n, p.lane), at = left - p.before;
            return {base + p.lane, 0, of_seq, at * T, min((at + 1) * T, of_seq)};
        }
        left -= p.all;
    }
    return {0, 0, 0, 0, 0};
}

/* ---- entries that a row selected: ascending, -1 behind the last ---- */

static __device__ __forceinline__ int32_t count_selected(const int32_t *selected,
                                                         int32_t most) {
    int32_t low = 0, high = most;
    while (low < high) {
        const int32_t middle = (low + high) / 2;
        if (selected[middle] >= 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

/* Where the entry is among them; -1: it is not. */
static __device__ __forceinline__ int32_t place_selected(const int32_t *selected, int32_t most,
                                                         int32_t entry) {
    int32_t low = 0, high = most;
    while (low < high) { /* -1 is more than any */
        const int32_t middle = (low + high) / 2;
        if ((uint32_t)selected[middle] < (uint32_t)entry) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low < most && selected[low] == entry ? low : -1;
}

/* ---- rows in shared memory ---- */

/* x [width] on its way to columns of a row in shared memory, zeros behind up to MOST; a warp's work. NULL:
 * zeros. */
template <int MOST>
static __device__ __forceinline__ void put_row(float *to, const float *x, int32_t width) {
    const int lane = (int)threadIdx.x % WARP;
    if (!x) {
        for (int c = lane; c < MOST; c += WARP) to[c] = 0.0f;
    } else if (in_quads(x, 0, width)) {
#pragma unroll
        for (int c = QUAD * lane; c < MOST; c += QUAD * WARP) {
            copy_async<16>(to + c, c < width ? x + c : x, c < width);
        }
    } else {
#pragma unroll 4
        for (int c = lane; c < MOST; c += WARP) {
            copy_async<4>(to + c, c < width ? x + c : x, c < width);
        }
    }
}

/* ---- products ---- */

/* Rows in shared memory, of which a product begins with one. */
struct tile_rows {
    const float *at;
    int pitch;
};

/* sum[k][x] += rows of own[k] [16] times rows 8 x + ... of other, over `cols` columns, whole groups; rows of
 * zeros behind what there is. */
template <int K, int X>
static __device__ __forceinline__ void multiply_rows(float (*sum)[X][4], const tile_rows *own,
                                                     const tile_rows &other, int32_t cols) {
    for (int32_t first = 0; first < cols; first += GROUP) {
        float part[K][X][4] = {};
#pragma unroll
        for (int c = 0; c < GROUP; c += 8) {
            split_tf32<4> a[K];
            split_tf32<2> b[X];
#pragma unroll
            for (int k = 0; k < K; k++) {
                load_left(&a[k], [&](int row, int term) {
                    return own[k].at[row * own[k].pitch + first + c + term];
                });
            }
#pragma unroll
            for (int x = 0; x < X; x++) {
                load_right(&b[x], [&](int term, int row) {
                    return other.at[(8 * x + row) * other.pitch + first + c + term];
                });
            }
            add_products<K, X>(part, a, b);
        }
#pragma unroll
        for (int i = 0; i < 4 * K * X; i++) {
            sum[i / (4 * X)][i / 4 % X][i % 4] += part[i / (4 * X)][i / 4 % X][i % 4];
        }
    }
}

/* Column of element `col` of part x of a group: eight rows of four terms are in 32 banks. */
static __device__ __forceinline__ int group_col(int x, int col) {
    return 4 * x + col % 4 + col / 4 * 16;
}

/* The sum of a tile's rows in a group of columns: Y times 16 rows. */
template <int Y>
struct group_sum {
    float at[Y][4][4];
};

/* sum += factor times `rows` [T, pitch], from the group's first column on. factor(row, term) is an element. */
template <int T, int Y, typename FACTOR>
static __device__ __forceinline__ void add_group(group_sum<Y> &sum, FACTOR factor,
                                                 const float *rows, int pitch) {
    float part[Y][4][4] = {};
#pragma unroll
    for (int k = 0; k < T; k += 8) {
        split_tf32<4> a[Y];
        split_tf32<2> b[4];
#pragma unroll
        for (int y = 0; y < Y; y++) {
            load_left(&a[y], [&](int row, int term) { return factor(16 * y + row, k + term); });
        }
#pragma unroll
        for (int x = 0; x < 4; x++) {
            load_right(&b[x], [&](int term, int col) {
                return rows[(k + term) * pitch + group_col(x, col)];
            });
        }
        add_products<Y, 4>(part, a, b);
        if (k % GROUP != GROUP - 8) continue;
#pragma unroll
        for (int i = 0; i < 16 * Y; i++) {
            sum.at[i / 16][i / 4 % 4][i % 4] += part[i / 16][i / 4 % 4][i % 4];
            part[i / 16][i / 4 % 4][i % 4] = 0.0f;
        }
    }
}

/* put(row, column of the group, value) for every element of the lane. */
template <int Y, typename PUT>
static __device__ __forceinline__ void for_group(const group_sum<Y> &sum, PUT put) {
#pragma unroll
    for (int i = 0; i < 16 * Y; i++) {
        const int y = i / 16, x = i / 4 % 4, e = i % 4;
        put(16 * y + sum_row(e), group_col(x, sum_col(e)), sum.at[y][x][e]);
    }
}

/* ---- softmax ---- */

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

/* Of the four lanes that share a row. */
static __device__ __forceinline__ part_sum joined_over_row(part_sum own) {
    for (int step = 1; step < 4; step *= 2) {
        own = joined(own, {__shfl_xor_sync(ALL_LANES, own.top, step),
                           __shfl_xor_sync(ALL_LANES, own.total, step)});
    }
    return own;
}

#endif
