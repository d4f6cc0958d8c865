/* weight_grad_cuda.cu - gradients of matrices: sums of outer products over chunks of rows (hd_row_sums). A
 * block has a tile of a matrix. Where a matrix has few tiles, blocks have chunks of their own, and a second
 * kernel adds them in order. */
#include "ops/backward/row_sums_internal.cuh"
#include "ops/backward/tile_products_internal.cuh"

constexpr int FEW_TILES = 128; /* tiles from which on a block has all chunks */

/* dw[i, c] += left[r, i] * right[row of r, c] */
struct outer {
    float *dw;
    const float *left, *right;
    int64_t left_row, right_row; /* elements between rows */
    const int32_t *assignment;   /* NULL: row of r is r */
    int32_t n_rows, cols, top_k;
    bool left_quads, right_quads;
};

/* The block's tile. */
struct outer_tile {
    int32_t i0, c0;
};

static __device__ __forceinline__ outer_tile own_tile() {
    return {(int32_t)blockIdx.y * TILE, (int32_t)blockIdx.x * TILE};
}

/* A factor: rows of x, `between` elements apart; row r is that of assignment[r] / top_k. */
struct factor_rows {
    const float *x;
    int64_t between;
    const int32_t *assignment; /* NULL: row r */
    int32_t top_k, cols;
    bool quads;
};

/* Terms are rows before `end`. */
struct outer_fill {
    const outer &o;
    int32_t end;

    /* Columns [c0, + TILE) of rows from `at` on, EACH elements at once. Nothing is read behind the last. */
    template <int EACH>
    __device__ __forceinline__ void copy_rows(float *to, const factor_rows &f, int32_t at,
                                              int32_t c0) const {
        constexpr int ACROSS = TILE / EACH, DOWN = TILE_THREADS / ACROSS;
        const int32_t c = (int32_t)threadIdx.x % ACROSS * EACH,
                      k = (int32_t)threadIdx.x / ACROSS;
        const int32_t rows = c0 + c < f.cols ? end - at - k : 0;
        const float *from = f.x + c0 + c;
        to += k * TERM_PITCH + c;
        if (!f.assignment) from += (at + k) * f.between;
#pragma unroll
        for (int i = 0; i < STEP / DOWN; i++) {
            const bool live = DOWN * i < rows;
            const float *row = from;
            if (f.assignment) {
                if (live) row += f.assignment[at + k + DOWN * i] / f.top_k * f.between;
            } else {
                row += DOWN * i * f.between;
            }
            copy_async<EACH * sizeof(float)>(to + DOWN * i * TERM_PITCH, row, live);
        }
    }

    __device__ __forceinline__ void copy(float *to, const factor_rows &f, int32_t at,
                                         int32_t c0) const {
        if (f.quads) {
            copy_rows<QUAD>(to, f, at, c0);
        } else {
            copy_rows<1>(to, f, at, c0);
        }
    }

    __device__ __forceinline__ void begin(tile_pair *t, int32_t at) const {
        const outer_tile own = own_tile();
        copy(t->left, {o.left, o.left_row, nullptr, 1, o.n_rows, o.left_quads}, at, own.i0);
        copy(t->right, {o.right, o.right_row, o.assignment, o.top_k, o.cols, o.right_quads}, at,
             own.c0);
    }

    __device__ __forceinline__ void finish(tile_pair *) const {}

    __device__ __forceinline__ void add(tile_sums &sum, const tile_sums &part, int32_t) const {
        add_sums(sum, part);
    }
};

/* sum += the outer products of rows [first, end) */
static __device__ __forceinline__ void add_outer(tile_sums &sum, const outer &o, int32_t first,
                                                 int32_t end) {
    if (first < end) add_terms<false, false>(sum, first, end, outer_fill{o, end});
}

/* Does what `move` says to every element of the tile in a matrix [n_rows, cols]. */
template <typename MOVE>
static __device__ __forceinline__ void for_elements(float *to, const outer &o, MOVE move) {
    const outer_tile t = own_tile();
    for_sums([&](int row, int col, int y, int x, int i) {
        if (t.i0 + row >= o.n_rows || t.c0 + col >= o.cols) return;
        move(to[(int64_t)(t.i0 + row) * o.cols + t.c0 + col], y, x, i);
    });
}

static __device__ __forceinline__ void load_sums(tile_sums &sum, const outer &o) {
    for_elements(o.dw, o, [&](float &at, int y, int x, int i) { sum[y][x][i] = at; });
}

static __device__ __forceinline__ void store_sums(const tile_sums &sum, float *to,
                                                  const outer &o) {
    for_elements(to, o, [&](float &at, int y, int x, int i) { at = sum[y][x][i]; });
}

/* Adds the sum of one chunk after another. rows(at, &first, &end): the terms of chunk `at`, false behind
 * the last. */
template <typename ROWS>
static __device__ __forceinline__ void add_chunks(const outer &o, const ROWS &rows) {
    tile_sums all = {};
    int32_t first, end;
    load_sums(all, o);
    for (int32_t at = 0; rows(at, &first, &end); at++) {
        tile_sums sum = {};
        add_outer(sum, o, first, end);
        add_sums(all, sum);
    }
    store_sums(all, o.dw, o);
}

/* ---- parts ---- */

/* dw += parts [n chunks], in order: `all` elements, of matrices of `each`, `between` apart. */
struct parts_sum {
    float *dw;
    int64_t each, between, all;
    hd_row_sums sums;
    int32_t rows, first, n;
};

static __global__ void __launch_bounds__(BLOCK) add_parts(parts_sum p) {
    const int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x;
    const int32_t chunks = min(p.n, count_chunks(p.sums.seqs, p.rows) - p.first);
    if (i >= p.all) return;
    float *to = p.dw + i / p.each * p.between + i % p.each;
    float sum = *to;
#pragma unroll 8
    for (int32_t k = 0; k < chunks; k++) sum += p.sums.parts[k * p.all + i];
    *to = sum;
}

/* launch(first, n) queues chunks [first, first + n) into parts. */
template <typename LAUNCH>
static void sum_parts(cudaStream_t queue, parts_sum p, LAUNCH launch) {
    const int32_t chunks = most_chunks(p.sums, p.rows);
    const int64_t fit = p.sums.n_parts / p.all;
    const int32_t most = fit < chunks ? (int32_t)fit : chunks;
    for (p.first = 0; p.first < chunks; p.first += most) {
        p.n = chunks - p.first < most ? chunks - p.first : most;
        launch(p.first, p.n);
        add_parts<<<blocks_for(p.all, BLOCK), BLOCK, 0, queue>>>(p);
    }
}

static bool has_few(const dim3 &tiles) {
    return tiles.x * tiles.y * tiles.z < FEW_TILES;
}

static bool has_parts(const dim3 &tiles, const hd_row_sums &s, int64_t all) {
    return has_few(tiles) && s.n_parts >= all;
}

/* ---- matrices ---- */

static __device__ __forceinline__ outer outer_of(const hd_weight_grad_args &a, int64_t head) {
    outer o = {a.dw + (a.first_row + head * a.head_rows) * a.cols,
               floats(a.left) + head * a.left_head,
               floats(a.right) + head * a.right_head,
               stride_of(a.left, (int64_t)a.heads * a.left_head),
               stride_of(a.right, (int64_t)a.heads * a.right_head),
               nullptr,
               a.n_rows,
               a.cols,
               1};
    o.left_quads = in_quads(o.left, o.left_row, o.n_rows);
    o.right_quads = in_quads(o.right, o.right_row, o.cols);
    return o;
}

static __global__ void __launch_bounds__(TILE_THREADS, 3) weight_grad(hd_weight_grad_args a) {
    add_chunks(outer_of(a, blockIdx.z), [&](int32_t at, int32_t *first, int32_t *end) {
        const row_chunk c = find_chunk(a.sums.seqs, a.rows, at);
        *first = c.first;
        *end = c.end;
        return c.first >= 0;
    });
}

/* Chunk first + z / heads of head z % heads, alone, in parts [chunks, heads, n_rows, cols]. */
static __global__ void __launch_bounds__(TILE_THREADS, 4)
    weight_grad_parts(hd_weight_grad_args a, int32_t first) {
    const int32_t head = (int32_t)blockIdx.z % a.heads;
    const row_chunk c = find_chunk(a.sums.seqs, a.rows, first + (int32_t)blockIdx.z / a.heads);
    const outer o = outer_of(a, head);
    tile_sums sum = {};
    if (c.first < 0) return;
    add_outer(sum, o, c.first, c.end);
    store_sums(sum, a.sums.parts + (int64_t)blockIdx.z * a.n_rows * a.cols, o);
}

void hd_weight_grad_cuda(hd_stream *s, const hd_weight_grad_args *a) {
    cudaStream_t queue = hd_cuda_stream(s);
    if (a->rows == 0) return;
    const dim3 tiles(blocks_for(a->cols, TILE), blocks_for(a->n_rows, TILE),
                     (unsigned)a->heads);
    const int64_t each = (int64_t)a->n_rows * a->cols;
    if (has_parts(tiles, a->sums, each * a->heads)) {
        const parts_sum p = {a->dw + (int64_t)a->first_row * a->cols,
                             each,
                             (int64_t)a->head_rows * a->cols,
                             each * a->heads,
                             a->sums,
                             a->rows,
                             0,
                             0};
        sum_parts(queue, p, [&](int32_t first, int32_t n) {
            const dim3 grid(tiles.x, tiles.y, (unsigned)(n * a->heads));
            weight_grad_parts<<<grid, TILE_THREADS, 0, queue>>>(*a, first);
        });
    } else {
        weight_grad<<<tiles, TILE_THREADS, 0, queue>>>(*a);
    }
    hd_cuda_check(s, "weight_grad");
}

/* ---- experts ---- */

/* The first place of [first, end) whose row is `row` or later; a warp's work. */
static __device__ int32_t place_from(const hd_grouped_weight_grad_args &a, int32_t first,
                                     int32_t end, int32_t row) {
    int32_t n = end - first;
    while (n > 0) {
        const int32_t step = (n + WARP - 1) / WARP;
        const int32_t at = first + ((int32_t)threadIdx.x % WARP + 1) * step - 1;
        const bool before = at < first + n && a.choice[at] / a.top_k < row;
        const int32_t whole = __popc(__ballot_sync(ALL_LANES, before)) * step;
        first += whole;
        n = min(step - 1, n - whole);
    }
    return first;
}

static __device__ __forceinline__ outer outer_of(const hd_grouped_weight_grad_args &a,
                                                 int64_t slot) {
    outer o = {a.dw + slot * a.n_rows * a.cols,
               floats(a.g),
               floats(a.x),
               a.n_rows,
               a.cols,
               a.assignment,
               a.n_rows,
               a.cols,
               a.top_k};
    o.left_quads = in_quads(o.left, o.left_row, o.n_rows);
    o.right_quads = in_quads(o.right, o.right_row, o.cols);
    return o;
}

/* A matrix of experts with many tiles: chunks of more rows, of which an expert has few. */
constexpr int GROUPED_ROWS = 8 * HD_SUM_ROWS;

template <int ROWS>
static __global__ void __launch_bounds__(TILE_THREADS, 3)
    grouped_weight_grad(hd_grouped_weight_grad_args a) {
    const int32_t last = a.offset[blockIdx.z + 1];
    int32_t from = a.offset[blockIdx.z];
    if (from == last) return;
    add_chunks(outer_of(a, blockIdx.z), [&](int32_t at, int32_t *first, int32_t *end) {
        const row_chunk c = find_chunk<ROWS>(a.sums.seqs, a.rows, at);
        if (from == last || c.first < 0) return false;
        *first = from; /* a row has one place at most */
        *end = from = place_from(a, from, min(last, from + c.end - c.first), c.end);
        return true;
    });
}

/* Chunk first + z / n_slots of slot z % n_slots, alone, in parts [chunks, n_slots, n_rows, cols]. */
static __global__ void __launch_bounds__(TILE_THREADS, 4)
    grouped_weight_grad_parts(hd_grouped_weight_grad_args a, int32_t first) {
    const int32_t slot = (int32_t)blockIdx.z % a.n_slots;
    const int32_t begin = a.offset[slot], end = a.offset[slot + 1];
    const row_chunk c =
        find_chunk(a.sums.seqs, a.rows, first + (int32_t)blockIdx.z / a.n_slots);
    const outer o = outer_of(a, slot);
    tile_sums sum = {};
    if (c.first < 0) return;
    const int32_t from = place_from(a, begin, end, c.first);
    add_outer(sum, o, from, place_from(a, from, min(end, from + c.end - c.first), c.end));
    store_sums(sum, a.sums.parts + (int64_t)blockIdx.z * a.n_rows * a.cols, o);
}

void hd_grouped_weight_grad_cuda(hd_stream *s, const hd_grouped_weight_grad_args *a) {
    cudaStream_t queue = hd_cuda_stream(s);
    const dim3 tiles(blocks_for(a->cols, TILE), blocks_for(a->n_rows, TILE),
                     (unsigned)a->n_slots);
    const int64_t all = (int64_t)a->n_slots * a->n_rows * a->cols;
    if (a->rows == 0) return;
    if (has_parts(tiles, a->sums, all)) {
        const parts_sum p = {a->dw, all, 0, all, a->sums, a->rows, 0, 0};
        sum_parts(queue, p, [&](int32_t first, int32_t n) {
            const dim3 grid(tiles.x, tiles.y, (unsigned)(n * a->n_slots));
            grouped_weight_grad_parts<<<grid, TILE_THREADS, 0, queue>>>(*a, first);
        });
    } else if (has_few(tiles)) {
        grouped_weight_grad<HD_SUM_ROWS><<<tiles, TILE_THREADS, 0, queue>>>(*a);
    } else {
        grouped_weight_grad<GROUPED_ROWS><<<tiles, TILE_THREADS, 0, queue>>>(*a);
    }
    hd_cuda_check(s, "grouped_weight_grad");
}
