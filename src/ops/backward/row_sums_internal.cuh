/* row_sums_internal.cuh - gradients of parameters as sums over rows, in chunks: see hd_row_sums.
 *
 * A chunk's sum is made from zero, in an order that follows from its own rows alone; a parameter adds the
 * sums of its chunks in order. So chunks are summed side by side, in memory for parts, and then added;
 * or, where there is none, one after another. */
#ifndef HD_OPS_BACKWARD_ROW_SUMS_INTERNAL_CUH
#define HD_OPS_BACKWARD_ROW_SUMS_INTERNAL_CUH

#include "ops/backward/backward_cuda_internal.cuh"

/* Rows [first, end) of sequence seq, which begins with row `begin`; first < 0: there are fewer chunks. */
struct row_chunk {
    int32_t first, end, seq, begin;
};

template <int ROWS = HD_SUM_ROWS>
static __host__ __device__ __forceinline__ int32_t chunks_of(int32_t rows) {
    return (rows + ROWS - 1) / ROWS;
}

/* An upper bound that the host knows. */
static inline int32_t most_chunks(const hd_row_sums &s, int32_t rows) {
    return chunks_of(rows) + s.seqs.n;
}

template <int ROWS>
static __device__ __forceinline__ row_chunk chunk_at(int32_t seq, int32_t begin, int32_t end,
                                                     int32_t at) {
    const int32_t first = begin + at * ROWS;
    return {first, min(first + ROWS, end), seq, begin};
}

/* Chunk `at` of `rows` rows, those for each row of the sequences included; a warp's work. ROWS: at every how
 * many rows sequences are divided. */
template <int ROWS = HD_SUM_ROWS>
static __device__ row_chunk find_chunk(const hd_seqs &s, int32_t rows, int32_t at) {
    const int32_t lane = (int32_t)threadIdx.x % WARP;
    if (s.n == 0) {
        if (at >= chunks_of<ROWS>(rows)) return {-1, -1, 0, 0};
        return chunk_at<ROWS>(0, 0, rows, at);
    }
    for (int32_t base = 0; base < s.n; base += WARP) {
        const int32_t q = min(base + lane, s.n - 1);
        const int32_t first = s.first_row[q], end = s.first_row[q + 1];
        const int32_t n = base + lane < s.n ? chunks_of<ROWS>(end - first) : 0;
        const lane_place p = find_lane(n, at);
        if (p.lane >= 0) {
            row_chunk c = chunk_at<ROWS>(base + p.lane, __shfl_sync(ALL_LANES, first, p.lane),
                                         __shfl_sync(ALL_LANES, end, p.lane), at - p.before);
            const int32_t each = rows / s.first_row[s.n];
            c.first *= each;
            c.end *= each;
            c.begin *= each;
            return c;
        }
        at -= p.all;
    }
    return {-1, -1, 0, 0};
}

/* The number of chunks; a warp's work. */
static __device__ int32_t count_chunks(const hd_seqs &s, int32_t rows) {
    int32_t n = 0;
    if (s.n == 0) return chunks_of(rows);
    for (int32_t q = (int32_t)threadIdx.x % WARP; q < s.n; q += WARP) {
        n += chunks_of(s.first_row[q + 1] - s.first_row[q]);
    }
    return warp_sum(n);
}

/* ---- columns ---- */

/* A TERM has, for columns of a gradient:
 *     to(col)            where the column's sum is, NULL: left out
 *     span(first, n, c)  the terms [first, first + n) of chunk c
 *     at(i, col, c)      term i of a column */

/* The span of a TERM with a term of every row. */
struct term_of_rows {
    __device__ void span(int64_t *first, int32_t *n, const row_chunk &c) const {
        *first = c.first;
        *n = c.end - c.first;
    }
};

/* The chunk's sum of the lane's column, in all warps: warp w adds terms w, w + 8, ... */
template <typename TERM>
static __device__ float column_sum(const TERM &term, const row_chunk &c, int32_t col,
                                   bool live) {
    constexpr int ADDERS = BLOCK / WARP;
    __shared__ float part[ADDERS][WARP];
    const int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP;
    int64_t first;
    int32_t n;
    float sum = 0.0f;
    term.span(&first, &n, c);
    if (live) {
#pragma unroll 8
        for (int32_t i = warp; i < n; i += ADDERS) sum += term.at(first + i, col, c);
    }
    __syncthreads(); /* the sums before have been read */
    part[warp][lane] = sum;
    __syncthreads();
    sum = part[0][lane];
    for (int w = 1; w < ADDERS; w++) sum += part[w][lane];
    return sum;
}

/* A block has WARP columns, and of parts [chunks, cols] one chunk; without them it adds all. */
template <typename TERM>
static __global__ void __launch_bounds__(BLOCK)
    column_sums(TERM term, hd_row_sums s, int32_t rows, int32_t cols, int32_t first) {
    const int32_t col = (int32_t)blockIdx.x * WARP + (int32_t)threadIdx.x % WARP;
    float *to = col < cols ? term.to(col) : nullptr;
    if (s.parts) {
        const row_chunk c = find_chunk(s.seqs, rows, first + (int32_t)blockIdx.y);
        if (c.first < 0) return;
        const float sum = column_sum(term, c, col, to);
        if (to && threadIdx.x < WARP) s.parts[(int64_t)blockIdx.y * cols + col] = sum;
        return;
    }
    float all = to ? *to : 0.0f;
    for (int32_t at = 0;; at++) {
        const row_chunk c = find_chunk(s.seqs, rows, at);
        if (c.first < 0) break;
        all += column_sum(term, c, col, to);
    }
    if (to && threadIdx.x < WARP) *to = all;
}

/* Adds parts of chunks first ... first + n - 1. */
template <typename TERM>
static __global__ void __launch_bounds__(BLOCK)
    add_columns(TERM term, hd_row_sums s, int32_t rows, int32_t cols, int32_t first,
                int32_t n) {
    const int32_t col = (int32_t)blockIdx.x * BLOCK + (int32_t)threadIdx.x;
    const int32_t chunks = min(n, count_chunks(s.seqs, rows) - first);
    float *to = col < cols ? term.to(col) : nullptr;
    if (!to) return;
    float sum = *to;
#pragma unroll 8
    for (int32_t k = 0; k < chunks; k++) sum += s.parts[(int64_t)k * cols + col];
    *to = sum;
}

/* Adds to every column of a gradient its terms of all rows. */
template <typename TERM>
static void sum_columns(cudaStream_t queue, const TERM &term, hd_row_sums s, int32_t rows,
                        int32_t cols) {
    const int32_t chunks = most_chunks(s, rows);
    const int64_t fit = s.n_parts / cols;
    const unsigned across = blocks_for(cols, WARP);
    if (fit == 0) {
        s.parts = nullptr;
        column_sums<<<across, BLOCK, 0, queue>>>(term, s, rows, cols, 0);
        return;
    }
    const int32_t most = fit < chunks ? (int32_t)fit : chunks;
    for (int32_t first = 0; first < chunks; first += most) {
        const int32_t n = chunks - first < most ? chunks - first : most;
        column_sums<<<dim3(across, (unsigned)n), BLOCK, 0, queue>>>(term, s, rows, cols, first);
        add_columns<<<blocks_for(cols, BLOCK), BLOCK, 0, queue>>>(term, s, rows, cols, first,
                                                                  n);
    }
}

#endif
