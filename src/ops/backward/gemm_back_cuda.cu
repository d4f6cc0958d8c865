/* gemm_back_cuda.cu - gradients of GEMMs: sums of outer products, and grouped products with transposed
 * matrices. A block has a tile of the result. */
#include "ops/backward/backward_cuda_internal.cuh"
#include "ops/cuda/weight_internal.cuh"

constexpr int TILE = 32, STEP = 32, HIGH = 4, WIDE = 2; /* a thread has HIGH x WIDE elements */
constexpr int ACROSS = TILE / WIDE, THREADS = TILE / HIGH * ACROSS;
constexpr int LOADS = STEP * TILE / THREADS; /* of a thread, of each factor */

/* Rows of both factors, from memory or as they are computed. */
struct tile_pair {
    float a[STEP][TILE], b[STEP][TILE];
};

typedef float tile_sums[HIGH][WIDE];

static __device__ __forceinline__ void multiply(const tile_pair &t, tile_sums &sum) {
    const int i = (int)threadIdx.x / ACROSS * HIGH, c = (int)threadIdx.x % ACROSS * WIDE;
#pragma unroll 8
    for (int r = 0; r < STEP; r++) {
        const float4 a = *reinterpret_cast<const float4 *>(&t.a[r][i]);
        const float2 b = *reinterpret_cast<const float2 *>(&t.b[r][c]);
        const float left[HIGH] = {a.x, a.y, a.z, a.w}, right[WIDE] = {b.x, b.y};
#pragma unroll
        for (int y = 0; y < HIGH; y++) {
#pragma unroll
            for (int x = 0; x < WIDE; x++) sum[y][x] = fmaf(left[y], right[x], sum[y][x]);
        }
    }
}

/* ---- outer products ---- */

/* dw[i, c] += left[r, i] * right[row of r, c] */
struct outer {
    float *dw;
    const float *left, *right;
    int64_t left_row, right_row; /* elements between rows */
    const int32_t *assignment;   /* NULL: row of r is r */
    int32_t n_rows, cols, top_k;
};

/* A thread's elements of the next rows, on their way to shared memory. */
struct row_loads {
    float a[LOADS], b[LOADS];
};

static __device__ __forceinline__ void load_rows(row_loads *l, const outer &o, int32_t first,
                                                 int32_t end, int32_t i0, int32_t c0) {
    const int32_t at = (int32_t)threadIdx.x % TILE, i = i0 + at, c = c0 + at;
#pragma unroll
    for (int k = 0; k < LOADS; k++) {
        const int32_t r = first + (k * THREADS + (int32_t)threadIdx.x) / TILE;
        const bool live = r < end;
        const int64_t row = live && o.assignment ? o.assignment[r] / o.top_k : r;
        l->a[k] = live && i < o.n_rows ? o.left[r * o.left_row + i] : 0.0f;
        l->b[k] = live && c < o.cols ? o.right[row * o.right_row + c] : 0.0f;
    }
}

static __device__ __forceinline__ void store_rows(tile_pair *t, const row_loads &l) {
#pragma unroll
    for (int k = 0; k < LOADS; k++) {
        const int at = k * THREADS + (int)threadIdx.x;
        t->a[at / TILE][at % TILE] = l.a[k];
        t->b[at / TILE][at % TILE] = l.b[k];
    }
}

static __device__ void add_outer(const outer &o, int32_t first, int32_t end) {
    __shared__ __align__(16) tile_pair t[2];
    const int32_t i0 = (int32_t)blockIdx.y * TILE, c0 = (int32_t)blockIdx.x * TILE;
    const int32_t i = i0 + (int32_t)threadIdx.x / ACROSS * HIGH;
    const int32_t c = c0 + (int32_t)threadIdx.x % ACROSS * WIDE;
    tile_sums sum;
    row_loads l;
    if (first >= end) return;
    for (int y = 0; y < HIGH; y++) {
        for (int x = 0; x < WIDE; x++) {
            const bool inside = i + y < o.n_rows && c + x < o.cols;
            sum[y][x] = inside ? o.dw[(int64_t)(i + y) * o.cols + c + x] : 0.0f;
        }
    }
    load_rows(&l, o, first, end, i0, c0);
    for (int32_t r = first, at = 0; r < end; r += STEP, at ^= 1) {
        store_rows(&t[at], l);
        __syncthreads(); /* the other pair was read before the barrier of the step before */
        if (r + STEP < end) load_rows(&l, o, r + STEP, end, i0, c0);
        multiply(t[at], sum);
    }
    for (int y = 0; y < HIGH; y++) {
        for (int x = 0; x < WIDE; x++) {
            if (i + y < o.n_rows && c + x < o.cols) {
                o.dw[(int64_t)(i + y) * o.cols + c + x] = sum[y][x];
            }
        }
    }
}

static __global__ void __launch_bounds__(THREADS) weight_grad(hd_weight_grad_args a) {
    const int64_t head = blockIdx.z;
    const outer o = {a.dw + (a.first_row + head * a.head_rows) * a.cols,
                     floats(a.left) + head * a.left_head,
                     floats(a.right) + head * a.right_head,
                     stride_of(a.left, (int64_t)a.heads * a.left_head),
                     stride_of(a.right, (int64_t)a.heads * a.right_head),
                     nullptr,
                     a.n_rows,
                     a.cols,
                     1};
    add_outer(o, 0, a.rows);
}

void hd_weight_grad_cuda(hd_stream *s, const hd_weight_grad_args *a) {
    if (a->rows == 0) return;
    const dim3 grid(blocks_for(a->cols, TILE), blocks_for(a->n_rows, TILE), (unsigned)a->heads);
    weight_grad<<<grid, THREADS, 0, hd_cuda_stream(s)>>>(*a);
    hd_cuda_check(s, "weight_grad");
}

static __global__ void __launch_bounds__(THREADS)
    grouped_weight_grad(hd_grouped_weight_grad_args a) {
    const int64_t slot = blockIdx.z;
    const outer o = {a.dw + slot * a.n_rows * a.cols,
                     floats(a.g),
                     floats(a.x),
                     a.n_rows,
                     a.cols,
                     a.assignment,
                     a.n_rows,
                     a.cols,
                     a.top_k};
    add_outer(o, a.offset[slot], a.offset[slot + 1]);
}

void hd_grouped_weight_grad_cuda(hd_stream *s, const hd_grouped_weight_grad_args *a) {
    const dim3 grid(blocks_for(a->cols, TILE), blocks_for(a->n_rows, TILE),
                    (unsigned)a->n_slots);
    grouped_weight_grad<<<grid, THREADS, 0, hd_cuda_stream(s)>>>(*a);
    hd_cuda_check(s, "grouped_weight_grad");
}

/* ---- grouped products ---- */

static __device__ void load_factors(tile_pair *t, const float *g, const hd_weight &w,
                                    int32_t first, int32_t end, int32_t i0, int32_t c0) {
    for (int k = (int)threadIdx.x; k < STEP * TILE; k += THREADS) {
        const int32_t p = first + k / STEP, of_place = i0 + k % STEP;
        const int32_t row = i0 + k / TILE, c = c0 + k % TILE;
        const bool live = p < end && of_place < w.rows;
        t->a[k % STEP][k / STEP] = live ? g[(int64_t)p * w.rows + of_place] : 0.0f;
        t->b[k / TILE][k % TILE] = row < w.rows && c < w.cols ? weight_at(w, row, c) : 0.0f;
    }
}

/* dx of places [first, first + TILE) of a slot, columns from c0 on */
static __device__ void place_tile(const hd_grouped_gemm_back_args &a, const hd_weight &w,
                                  int32_t first, int32_t end, int32_t c0) {
    __shared__ __align__(16) tile_pair t;
    tile_sums sum = {};
    for (int32_t i = 0; i < w.rows; i += STEP) {
        load_factors(&t, floats(a.g), w, first, end, i, c0);
        __syncthreads();
        multiply(t, sum);
        __syncthreads();
    }
    const int32_t p = first + (int32_t)threadIdx.x / ACROSS * HIGH;
    const int32_t c = c0 + (int32_t)threadIdx.x % ACROSS * WIDE;
    for (int y = 0; y < HIGH; y++) {
        for (int x = 0; x < WIDE; x++) {
            if (p + y < end && c + x < w.cols) {
                a.dx[(int64_t)(p + y) * w.cols + c + x] = sum[y][x];
            }
        }
    }
}

static __global__ void __launch_bounds__(THREADS)
    grouped_gemm_back(hd_grouped_gemm_back_args a, const hd_weight *slots) {
    const hd_weight w = slots[blockIdx.y];
    const int32_t end = a.offset[blockIdx.y + 1], step = (int32_t)gridDim.z * TILE;
    for (int32_t p = a.offset[blockIdx.y] + (int32_t)blockIdx.z * TILE; p < end; p += step) {
        place_tile(a, w, p, end, (int32_t)blockIdx.x * TILE);
    }
}

void hd_grouped_gemm_back_cuda(hd_stream *s, const hd_grouped_gemm_back_args *a) {
    constexpr unsigned MOST_TILES = 64; /* of places, side by side */
    if (a->n_places == 0) return;
    const unsigned tiles = blocks_for(a->n_places, TILE);
    const dim3 grid(blocks_for(a->w->shape.cols, TILE), (unsigned)a->w->n,
                    tiles < MOST_TILES ? tiles : MOST_TILES);
    grouped_gemm_back<<<grid, THREADS, 0, hd_cuda_stream(s)>>>(*a, a->w->slots);
    hd_cuda_check(s, "grouped_gemm_back");
}
