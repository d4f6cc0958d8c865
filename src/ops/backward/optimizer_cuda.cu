/* optimizer_cuda.cu - the optimizer's operators on a GPU, with the bits of optimizer_ref.c: no fused
 * operations, and sums in its order. */
#include <cfloat>

#include "base/round_codes.h"
#include "ops/backward/backward_cuda_internal.cuh"
#include "ops/cuda/weight_internal.cuh"

static __device__ __forceinline__ float times(float a, float b) {
    return __fmul_rn(a, b);
}

static __device__ __forceinline__ float plus(float a, float b) {
    return __fadd_rn(a, b);
}

/* ---- sums of squares ---- */

/* By HD_SQUARES_LANES threads; the same bits in every thread. */
static __device__ double square_sum(const float *x, int64_t n) {
    static_assert(HD_SQUARES_LANES == BLOCK, "a thread is a lane");
    __shared__ double lanes[BLOCK];
    double sum = 0.0;
#pragma unroll 8
    for (int64_t i = threadIdx.x; i < n; i += BLOCK) {
        sum += (double)x[i] * (double)x[i]; /* the product is exact */
    }
    lanes[threadIdx.x] = sum;
    __syncthreads();
    for (int k = BLOCK / 2; k > 0; k /= 2) {
        if ((int)threadIdx.x < k) lanes[threadIdx.x] += lanes[threadIdx.x + k];
        __syncthreads();
    }
    sum = lanes[0];
    __syncthreads();
    return sum;
}

static __global__ void __launch_bounds__(BLOCK) sum_squares(hd_sum_squares_args a) {
    const int64_t at = (int64_t)blockIdx.x * HD_SQUARES_BLOCK;
    const int64_t left = a.n - at, n = left < HD_SQUARES_BLOCK ? left : HD_SQUARES_BLOCK;
    const double sum = square_sum(a.x + at, n);
    if (threadIdx.x == 0) a.sums[blockIdx.x] = sum;
}

void hd_sum_squares_cuda(hd_stream *s, const hd_sum_squares_args *a) {
    if (a->n == 0) return;
    sum_squares<<<blocks_for(a->n, HD_SQUARES_BLOCK), BLOCK, 0, hd_cuda_stream(s)>>>(*a);
    hd_cuda_check(s, "sum_squares");
}

/* ---- AdamW ---- */

static __global__ void __launch_bounds__(BLOCK) adamw(hd_adamw_args a) {
    const int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x;
    if (i >= a.n) return;
    const float g = times(a.grad[i], a.clip);
    const float first = plus(times(a.beta1, a.first[i]), times(1.0f - a.beta1, g));
    const float square = times(times(1.0f - a.beta2, g), g);
    const float second = plus(times(a.beta2, a.second[i]), square);
    const float size = plus(__fsqrt_rn(times(second, a.correction2)), a.eps);
    const float step = __fdiv_rn(times(a.rate, times(first, a.correction1)), size);
    a.first[i] = first;
    a.second[i] = second;
    a.master[i] = __fsub_rn(times(a.master[i], a.keep), step);
}

void hd_adamw_cuda(hd_stream *s, const hd_adamw_args *a) {
    if (a->n == 0) return;
    adamw<<<blocks_for(a->n, BLOCK), BLOCK, 0, hd_cuda_stream(s)>>>(*a);
    hd_cuda_check(s, "adamw");
}

/* ---- Muon: a block row of the grid's z per matrix ---- */

constexpr int NEWTON_SCHULZ_STEPS = 5;
constexpr int SIDE = 32;            /* of a tile of a product, a block's */
constexpr int LANES = 16, EACH = 8; /* of gram: a thread has one lane of EACH x EACH elements */
constexpr int GRAM_PITCH = LANES + 2;                        /* no two of a warp in one bank */
constexpr int MULTIPLIERS = 128, OWN_ROWS = 2, OWN_COLS = 4; /* threads; elements of one */

/* Matrices of one launch, each with its part of the stream's scratch. */
struct muon_job {
    hd_muon_args a;
    float *scratch;
    int64_t each;        /* floats between parts */
    int32_t first, n, k; /* shorter and longer side */
};

/* One matrix's scratch: two of [n, k], of which step i reads number i % 2 and writes the other, and two of
 * [n, n]. */
struct muon_room {
    float *x[2], *gram, *square;
};

static __device__ __forceinline__ muon_room room_of(const muon_job &j) {
    float *x = j.scratch + blockIdx.z * j.each;
    const int64_t size = (int64_t)j.n * j.k;
    return {
        {x, x + size},
        x + 2 * size, x + 2 * size + (int64_t)j.n * j.n
    };
}

static __device__ __forceinline__ int64_t matrix_at(const muon_job &j) {
    return (int64_t)(j.first + (int32_t)blockIdx.z) * j.n * j.k;
}

/* Where element (r, c) of a matrix is in x. */
static __device__ __forceinline__ int64_t transposed_at(const muon_job &j, int64_t i) {
    return j.a.rows <= j.a.cols ? i : i % j.a.cols * j.a.rows + i / j.a.cols;
}

static __global__ void __launch_bounds__(BLOCK) muon_look_ahead(muon_job j) {
    const int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x, at = matrix_at(j) + i;
    if (i >= (int64_t)j.n * j.k) return;
    const float g = times(j.a.grad[at], j.a.clip);
    const float first = plus(times(j.a.momentum, j.a.first[at]), g);
    j.a.first[at] = first;
    room_of(j).x[0][transposed_at(j, i)] = plus(g, times(j.a.momentum, first));
}

/* 1 / the matrix's norm, where its square will be. */
static __global__ void __launch_bounds__(BLOCK) muon_norm(muon_job j) {
    const muon_room m = room_of(j);
    const double square = square_sum(m.x[0], (int64_t)j.n * j.k);
    if (threadIdx.x == 0) *m.square = (float)(1.0 / (sqrt(square) + 1e-7));
}

static __global__ void __launch_bounds__(BLOCK) muon_normalize(muon_job j) {
    const int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x;
    const muon_room m = room_of(j);
    if (i < (int64_t)j.n * j.k) m.x[0][i] = times(m.x[0][i], *m.square);
}

/* SIDE rows of x and LANES columns, from (row, col) on; zeros outside. */
static __device__ __forceinline__ void load_lanes(float (*to)[GRAM_PITCH], const float *x,
                                                  int32_t n, int32_t k, int32_t row,
                                                  int32_t col) {
    const int32_t c = (int32_t)threadIdx.x % LANES;
#pragma unroll
    for (int r = (int)threadIdx.x / LANES; r < SIDE; r += BLOCK / LANES) {
        const bool inside = row + r < n && col + c < k;
        to[r][c] = inside ? x[(int64_t)(row + r) * k + col + c] : 0.0f;
    }
}

/* Adds up the lanes of elements EACH y + i, for every y, behind the terms of the last columns, of which there
 * are `rest`; and stores them. */
static __device__ __forceinline__ void add_lanes(const muon_room &m, int32_t n, int32_t row,
                                                 int32_t col, const float (*left)[GRAM_PITCH],
                                                 const float (*right)[GRAM_PITCH],
                                                 const float (*part)[SIDE / EACH][SIDE], int i,
                                                 int rest) {
    const int c = (int)threadIdx.x % SIDE, y = (int)threadIdx.x / SIDE, r = EACH * y + i;
    float sum = 0.0f;
    if (y >= SIDE / EACH || row + r >= n || col + c >= n) return;
    for (int l = 0; l < rest; l++) sum = plus(sum, times(left[r][l], right[c][l]));
#pragma unroll
    for (int l = 0; l < LANES; l++) sum = plus(sum, part[l][y][c]);
    m.gram[(int64_t)(row + r) * n + col + c] = sum;
}

/* gram = x x^T; lane l of a sum has columns l, l + LANES, ... */
static __global__ void __launch_bounds__(BLOCK) muon_gram(muon_job j, int step) {
    __shared__ float left[SIDE][GRAM_PITCH], right[SIDE][GRAM_PITCH];
    __shared__ float part[LANES][SIDE / EACH][SIDE];
    const muon_room m = room_of(j);
    const float *x = m.x[step % 2];
    const int l = (int)threadIdx.x % LANES, own = (int)threadIdx.x / LANES;
    const int r0 = own / (SIDE / EACH) * EACH, c0 = own % (SIDE / EACH) * EACH;
    const int32_t row = (int32_t)blockIdx.y * SIDE, col = (int32_t)blockIdx.x * SIDE;
    const int32_t whole = j.k / LANES * LANES;
    float sum[EACH][EACH] = {};
    for (int32_t c = 0; c < whole; c += LANES) {
        load_lanes(left, x, j.n, j.k, row, c);
        load_lanes(right, x, j.n, j.k, col, c);
        __syncthreads();
        float other[EACH];
#pragma unroll
        for (int k = 0; k < EACH; k++) other[k] = right[c0 + k][l];
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const float f = left[r0 + i][l];
#pragma unroll
            for (int k = 0; k < EACH; k++) sum[i][k] = plus(sum[i][k], times(f, other[k]));
        }
        __syncthreads();
    }
    load_lanes(left, x, j.n, j.k, row, whole);
    load_lanes(right, x, j.n, j.k, col, whole);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
#pragma unroll
        for (int k = 0; k < EACH; k++) part[l][r0 / EACH][c0 + k] = sum[i][k];
        __syncthreads();
        add_lanes(m, j.n, row, col, left, right, part, i, j.k - whole);
        __syncthreads();
    }
}

/* sum = alpha y + a y of a [n, n] and y [n, cols], in order: a thread's elements, from (row, col) on. */
static __device__ __forceinline__ void multiply(float (*sum)[OWN_COLS], const float *a,
                                                const float *y, int32_t n, int32_t cols,
                                                float alpha, int32_t row, int32_t col) {
    __shared__ float left[SIDE][SIDE + 1];
    __shared__ __align__(16) float right[SIDE][SIDE];
    const int32_t first_row = (int32_t)blockIdx.y * SIDE,
                  first_col = (int32_t)blockIdx.x * SIDE;
    const int x = (int)threadIdx.x % SIDE, own_row = row - first_row, own_col = col - first_col;
#pragma unroll
    for (int i = 0; i < OWN_ROWS * OWN_COLS; i++) {
        const int32_t r = row + i / OWN_COLS, c = col + i % OWN_COLS;
        const bool inside = r < n && c < cols;
        sum[i / OWN_COLS][i % OWN_COLS] =
            inside ? times(alpha, y[(int64_t)r * cols + c]) : 0.0f;
    }
    for (int32_t k = 0; k < n; k += SIDE) {
#pragma unroll
        for (int r = (int)threadIdx.x / SIDE; r < SIDE; r += MULTIPLIERS / SIDE) {
            const bool in_a = first_row + r < n && k + x < n;
            const bool in_y = k + r < n && first_col + x < cols;
            left[r][x] = in_a ? a[(int64_t)(first_row + r) * n + k + x] : 0.0f;
            right[r][x] = in_y ? y[(int64_t)(k + r) * cols + first_col + x] : 0.0f;
        }
        __syncthreads();
        const int terms = min(SIDE, n - k);
#pragma unroll 8
        for (int l = 0; l < terms; l++) {
            const float4 v = *reinterpret_cast<const float4 *>(&right[l][own_col]);
            const float f[OWN_COLS] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int i = 0; i < OWN_ROWS; i++) {
#pragma unroll
                for (int c = 0; c < OWN_COLS; c++) {
                    sum[i][c] = plus(sum[i][c], times(left[own_row + i][l], f[c]));
                }
            }
        }
        __syncthreads();
    }
}

/* A thread's first element in a product. */
static __device__ __forceinline__ int32_t own_row() {
    return (int32_t)blockIdx.y * SIDE + (int32_t)threadIdx.x / (SIDE / OWN_COLS) * OWN_ROWS;
}

static __device__ __forceinline__ int32_t own_col() {
    return (int32_t)blockIdx.x * SIDE + (int32_t)threadIdx.x % (SIDE / OWN_COLS) * OWN_COLS;
}

/* square = -4.7750 gram + 2.0315 gram gram */
static __global__ void __launch_bounds__(MULTIPLIERS) muon_square(muon_job j) {
    const muon_room m = room_of(j);
    float sum[OWN_ROWS][OWN_COLS];
    multiply(sum, m.gram, m.gram, j.n, j.n, 0.0f, own_row(), own_col());
#pragma unroll
    for (int i = 0; i < OWN_ROWS * OWN_COLS; i++) {
        const int32_t row = own_row() + i / OWN_COLS, col = own_col() + i % OWN_COLS;
        const int64_t at = (int64_t)row * j.n + col;
        if (row >= j.n || col >= j.n) continue;
        m.square[at] =
            plus(times(-4.7750f, m.gram[at]), times(2.0315f, sum[i / OWN_COLS][i % OWN_COLS]));
    }
}

/* x = 3.4445 x + square x */
static __global__ void __launch_bounds__(MULTIPLIERS) muon_step(muon_job j, int step) {
    const muon_room m = room_of(j);
    float sum[OWN_ROWS][OWN_COLS];
    multiply(sum, m.square, m.x[step % 2], j.n, j.k, 3.4445f, own_row(), own_col());
#pragma unroll
    for (int i = 0; i < OWN_ROWS * OWN_COLS; i++) {
        const int32_t row = own_row() + i / OWN_COLS, col = own_col() + i % OWN_COLS;
        if (row >= j.n || col >= j.k) continue;
        m.x[1 - step % 2][(int64_t)row * j.k + col] = sum[i / OWN_COLS][i % OWN_COLS];
    }
}

static __global__ void __launch_bounds__(BLOCK) muon_apply(muon_job j) {
    const int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x, at = matrix_at(j) + i;
    if (i >= (int64_t)j.n * j.k) return;
    const float step =
        times(j.a.rate, room_of(j).x[NEWTON_SCHULZ_STEPS % 2][transposed_at(j, i)]);
    j.a.master[at] = __fsub_rn(times(j.a.master[at], j.a.keep), step);
}

static void muon_matrices(cudaStream_t queue, const muon_job &j, unsigned matrices) {
    const unsigned side = blocks_for(j.n, SIDE), wide = blocks_for(j.k, SIDE);
    const dim3 all(blocks_for((int64_t)j.n * j.k, BLOCK), 1, matrices);
    muon_look_ahead<<<all, BLOCK, 0, queue>>>(j);
    muon_norm<<<dim3(1, 1, matrices), BLOCK, 0, queue>>>(j);
    muon_normalize<<<all, BLOCK, 0, queue>>>(j);
    for (int step = 0; step < NEWTON_SCHULZ_STEPS; step++) {
        muon_gram<<<dim3(side, side, matrices), BLOCK, 0, queue>>>(j, step);
        muon_square<<<dim3(side, side, matrices), MULTIPLIERS, 0, queue>>>(j);
        muon_step<<<dim3(wide, side, matrices), MULTIPLIERS, 0, queue>>>(j, step);
    }
    muon_apply<<<all, BLOCK, 0, queue>>>(j);
}

void hd_muon_cuda(hd_stream *s, const hd_muon_args *a) {
    const size_t bytes = hd_muon_scratch(a->rows, a->cols), worker = hd_stream_scratch_bytes(s);
    const int32_t most = (int32_t)(worker * (size_t)hd_stream_workers(s) / bytes);
    float *scratch = static_cast<float *>(hd_stream_scratch(s, 0, worker));
    const int64_t each = (int64_t)(bytes / sizeof(float));
    for (int32_t first = 0; first < a->n; first += most) {
        const int32_t n = a->n - first < most ? a->n - first : most;
        const muon_job j = {
            *a, scratch, each, first, min(a->rows, a->cols), max(a->rows, a->cols)};
        muon_matrices(hd_cuda_stream(s), j, (unsigned)n);
    }
    hd_cuda_check(s, "muon");
}

/* ---- rounding ---- */

/* To nearest, ties to even, of what is a number. */
static __device__ __forceinline__ uint32_t bf16_code(float x) {
    const uint32_t bits = __float_as_uint(x);
    return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}

static __device__ __forceinline__ uint32_t f16_code(float x) {
    return __half_as_ushort(__float2half_rn(x));
}

/* One number of a plain type, and whether it fits. */
static __device__ bool round_number(uint8_t *data, int32_t type, bool widened, int64_t i,
                                    float x) {
    uint32_t code = __float_as_uint(x);
    float back = x;
    if (type == HD_BF16) {
        code = bf16_code(x);
        if (x == x) back = __uint_as_float(code << 16);
    } else if (type == HD_F16) {
        code = f16_code(x);
        back = __half2float(__ushort_as_half((unsigned short)code));
    }
    if (widened || type == HD_F32) {
        reinterpret_cast<float *>(data)[i] = back;
    } else { /* of a file, at any address */
        data[2 * i] = (uint8_t)code;
        data[2 * i + 1] = (uint8_t)(code >> 8);
    }
    return fabsf(back) <= FLT_MAX;
}

static __global__ void __launch_bounds__(BLOCK)
    round_plain(const __grid_constant__ hd_round_weights_args a) {
    const int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x;
    const int32_t k = (int32_t)blockIdx.y;
    if (i >= (int64_t)a.like.rows * a.like.cols) return;
    if (!round_number(a.data[k], a.like.type, a.widened, i, a.values[k][i])) a.bad[k] = 1;
}

/* Stores a scale; returns it as it is read. Of E8M0 the nearest power of two, by its logarithm. */
static __device__ float store_scale(uint8_t *to, int32_t type, int64_t at, float scale) {
    const uint32_t bits = __float_as_uint(scale);
    switch (type) {
    case HD_E8M0: {
        const uint32_t up = (bits & 0x7fffffu) > 0x3504f3u; /* more than the root of 2 */
        to[at] = (uint8_t)min((bits >> 23) + up, 254u);
        return e8m0_to_f32(to[at]);
    }
    case HD_E4M3:
        to[at] = (uint8_t)hd_round_e4m3(scale);
        return e4m3_to_f32(to[at]);
    case HD_BF16: {
        const uint32_t code = bf16_code(scale);
        to[2 * at] = (uint8_t)code;
        to[2 * at + 1] = (uint8_t)(code >> 8);
        return __uint_as_float(code << 16);
    }
    default:
        for (int b = 0; b < 4; b++) to[4 * at + b] = (uint8_t)(bits >> (8 * b));
        return scale;
    }
}

/* N threads have a block of the matrix. */
template <int N>
static __device__ float largest_in(float x) {
    if (N == WARP) return warp_max(x);
    __shared__ float part[BLOCK / WARP];
    x = warp_max(x);
    if (threadIdx.x % WARP == 0) part[threadIdx.x / WARP] = x;
    __syncthreads();
    float most = part[0];
    for (int w = 1; w < BLOCK / WARP; w++) most = fmaxf(most, part[w]);
    return most;
}

/* Where a block of the matrix lies. */
struct rounded_block {
    int32_t row, col, rows, cols;
    int64_t at; /* its scale */
};

/* Whether the values are finite, and in *amax the largest of them. */
template <int N>
static __device__ bool measure(const hd_round_weights_args &a, const float *values,
                               const rounded_block &b, float *amax) {
    bool fits = true;
    float most = 0.0f;
    for (int i = (int)threadIdx.x % N; i < b.rows * b.cols; i += N) {
        const int64_t r = b.row + i / b.cols;
        const float x = fabsf(values[r * a.like.cols + b.col + i % b.cols]);
        fits = fits && x <= FLT_MAX;
        most = fmaxf(most, x);
    }
    *amax = largest_in<N>(most);
    return fits;
}

/* E2M1: a thread has both elements of a byte; a row of blocks is whole bytes. */
template <int N>
static __device__ void put_elements(const hd_round_weights_args &a, uint8_t *data,
                                    const float *values, const rounded_block &b, float s) {
    const int pack = a.like.type == HD_E4M3 ? 1 : 2, wide = b.cols / pack;
    const bool signed_zeros = a.like.scale_type == HD_E4M3;
    for (int i = (int)threadIdx.x % N; i < b.rows * wide; i += N) {
        const int64_t at = (int64_t)(b.row + i / wide) * a.like.cols + b.col + i % wide * pack;
        if (pack == 1) {
            data[at] = (uint8_t)hd_round_e4m3(__fdiv_rn(values[at], s));
            continue;
        }
        const float x = values[at], y = values[at + 1];
        const uint32_t low = hd_round_e2m1(__fdiv_rn(x, s), signed_zeros && x < 0.0f);
        const uint32_t high = hd_round_e2m1(__fdiv_rn(y, s), signed_zeros && y < 0.0f);
        data[at / 2] = (uint8_t)(low | high << 4);
    }
}

template <int N>
static __global__ void __launch_bounds__(BLOCK)
    round_blocks(const __grid_constant__ hd_round_weights_args a) {
    const hd_weight &w = a.like;
    const int32_t k = (int32_t)blockIdx.y;
    const int64_t per_row = (w.cols + w.block_cols - 1) / w.block_cols;
    const int64_t n = per_row * ((w.rows + w.block_rows - 1) / w.block_rows);
    rounded_block b;
    b.at = (int64_t)blockIdx.x * (BLOCK / N) + (int)threadIdx.x / N;
    if (b.at >= n) return;
    b.row = (int32_t)(b.at / per_row) * w.block_rows;
    b.col = (int32_t)(b.at % per_row) * w.block_cols;
    b.rows = min(w.block_rows, w.rows - b.row);
    b.cols = min(w.block_cols, w.cols - b.col);
    const bool has_global = w.scale_type == HD_E4M3;
    const float largest = w.type == HD_E4M3 ? 448.0f : 6.0f;
    float amax;
    bool fits = measure<N>(a, a.values[k], b, &amax);
    const float wanted =
        hd_round_scale(amax, largest, has_global ? w.global : 0.0f, w.power_scales);
    float s = wanted;
    if (threadIdx.x % N == 0) s = store_scale(a.scale[k], w.scale_type, b.at, wanted);
    if (N == WARP) {
        s = __shfl_sync(ALL_LANES, s, 0);
    } else {
        __shared__ float stored;
        if (threadIdx.x == 0) stored = s;
        __syncthreads();
        s = stored;
    }
    if (has_global) {
        s = times(s, w.global);
        fits = fits && amax <= times(times(7.0f, 448.0f), w.global);
    }
    put_elements<N>(a, a.data[k], a.values[k], b, fmaxf(s, FLT_MIN));
    if (!fits) a.bad[k] = 1;
}

void hd_round_weights_cuda(hd_stream *s, const hd_round_weights_args *a) {
    const hd_weight *w = &a->like;
    cudaStream_t queue = hd_cuda_stream(s);
    if (a->n == 0) return;
    if (w->scale_type == HD_NONE) {
        const dim3 grid(blocks_for((int64_t)w->rows * w->cols, BLOCK), (unsigned)a->n);
        round_plain<<<grid, BLOCK, 0, queue>>>(*a);
    } else {
        const unsigned n =
            blocks_for(w->rows, w->block_rows) * blocks_for(w->cols, w->block_cols);
        if (w->block_rows * w->block_cols <= 2 * WARP) {
            const dim3 grid(blocks_for(n, BLOCK / WARP), (unsigned)a->n);
            round_blocks<WARP><<<grid, BLOCK, 0, queue>>>(*a);
        } else {
            round_blocks<BLOCK><<<dim3(n, (unsigned)a->n), BLOCK, 0, queue>>>(*a);
        }
    }
    hd_cuda_check(s, "round_weights");
}
