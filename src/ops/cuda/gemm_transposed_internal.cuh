/* gemm_transposed_internal.cuh - rows of x times the transpose of stored matrices, one small one per head:
 * out[r, h, c] = sum over i of x[r, h, i] * W[first + i, c].
 *
 * On the tensor cores, where the matrix is that of a checkpoint: as in mma_internal.cuh x is
 * P bfloat16 numbers and a span of 64 rows of W is summed from zero, then taken times its
 * scale, in order. A lane reads four columns of four rows of W and transposes them in
 * registers. gemm_mix_internal.cuh takes any other matrix. What a row of x becomes does not
 * depend on the others. */
#ifndef HD_OPS_CUDA_GEMM_TRANSPOSED_INTERNAL_CUH
#define HD_OPS_CUDA_GEMM_TRANSPOSED_INTERNAL_CUH

#include "ops/cuda/mma_internal.cuh"

/* A linear is one head. */
struct heads_job {
    void *out;
    const cuda_act *x;
    int64_t out_stride, out_head, x_stride, x_head;
    int32_t rows, heads, n_rows, first_row, head_rows;
    bool out_f32;
};

/* cublaslt_cuda.cu: multiplies as many of the first rows of all heads as the library takes; gives how
 * many. None where there are few, where the matrix is of another kind, or where the library has no
 * algorithm. */
int32_t cublaslt_multiply(hd_stream *s, const heads_job &h, const hd_weight *w);

/* A warp per head, 32 columns and 8 * NT rows of x. */

constexpr int TRANSPOSED_WARPS = 4, TRANSPOSED_COLS = 32 * TRANSPOSED_WARPS; /* of a block */
constexpr int TRANSPOSED_DEPTH = 128; /* rows of W at once */
constexpr int TRANSPOSED_STEPS = TRANSPOSED_DEPTH / 16, SPAN_STEPS = SPAN / 16;

/* x of TRANSPOSED_DEPTH rows of W: a lane's four rows as two pairs. */
template <int P, int NT>
struct transposed_x {
    uint2 at[P][TRANSPOSED_STEPS][8 * NT][4];
};

template <int P, int NT>
static __device__ __forceinline__ void load_transposed(transposed_x<P, NT> *to,
                                                       const heads_job &h, int32_t first,
                                                       int32_t depth, int32_t n) {
    const int32_t head = (int32_t)blockIdx.y;
    for (int i = threadIdx.x; i < 8 * NT * TRANSPOSED_STEPS * 4; i += TRANSPOSED_WARPS * WARP) {
        const int row = i / (TRANSPOSED_STEPS * 4), step = i / 4 % TRANSPOSED_STEPS,
                  quarter = i % 4;
        const int32_t at = depth + 16 * step + 4 * quarter;
        const cuda_act *x = h.x + (first + row) * h.x_stride + head * h.x_head + at;
        float f[4];
#pragma unroll
        for (int k = 0; k < 4; k++) f[k] = first + row < h.rows && at < n ? wide(x[k]) : 0.0f;
#pragma unroll
        for (int p = 0; p < P; p++) {
            const uint32_t low = take_pair(&f[0], &f[1]), high = take_pair(&f[2], &f[3]);
            to->at[p][step][row][quarter] = make_uint2(low, high);
        }
    }
}

/* Four columns of four rows of W; E4M3: a word a row, BF16: two. */
template <int R>
struct transposed_raw {
    enum { WORDS = R == READ_BF16 ? 2 : 1 };
    uint32_t word[4][WORDS];
};

template <int R>
static __device__ __forceinline__ void load_square(transposed_raw<R> *to,
                                                   const weight_arrays &a, int64_t cols,
                                                   int32_t row, int32_t col) {
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const int64_t at = (int64_t)(row + k) * cols + col;
        if constexpr (R == READ_BF16) {
            const uint2 v = __ldg(reinterpret_cast<const uint2 *>(a.data + 2 * at));
            to->word[k][0] = v.x;
            to->word[k][1] = v.y;
        } else {
            to->word[k][0] = __ldg(reinterpret_cast<const uint32_t *>(a.data + at));
        }
    }
}

/* Column `col` of rows 2 * pair and 2 * pair + 1 as a pair of bfloat16. */
template <int R>
static __device__ __forceinline__ uint32_t transposed_pair(const transposed_raw<R> &raw,
                                                           int col, int pair) {
    const uint32_t *first = raw.word[2 * pair], *second = raw.word[2 * pair + 1];
    if constexpr (R == READ_BF16) {
        return __byte_perm(first[col / 2], second[col / 2], col % 2 ? 0x7632 : 0x5410);
    } else {
        const uint32_t two = __byte_perm(first[0], second[0], (uint32_t)(col | (4 + col) << 4));
        const float2 f = __half22float2(
            __half2(__nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)two, __NV_E4M3)));
        return exact_pair(f.x, f.y);
    }
}

/* The tiles of 16 columns: column 4g of tile 0, 4g + 1 of its lower half, and so on. */
template <int R>
static __device__ __forceinline__ void transpose(uint32_t (*a)[4],
                                                 const transposed_raw<R> &raw) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int tile = i / 4, k = i % 4;
        a[tile][k] = transposed_pair<R>(raw, 2 * tile + k % 2, k / 2);
    }
}

template <int R, int P, int NT>
static __global__ void __launch_bounds__(TRANSPOSED_WARPS *WARP)
    transposed_heads(heads_job h, weight_shape s, weight_arrays a) {
    begin_kernel();
    __shared__ transposed_x<P, NT> xs;
    const int lane = threadIdx.x % WARP, g = lane / 4, q = lane % 4;
    const int32_t head = (int32_t)blockIdx.y, first = (int32_t)blockIdx.z * 8 * NT;
    const int32_t col =
        (int32_t)blockIdx.x * TRANSPOSED_COLS + (int32_t)threadIdx.x / WARP * 32 + 4 * g;
    const int32_t row0 = h.first_row + head * h.head_rows;
    const bool idle = col - 4 * g >= s.cols;
    float acc[2][NT][4] = {};
    for (int32_t depth = 0; depth < h.n_rows; depth += TRANSPOSED_DEPTH) {
        __syncthreads(); /* the rows before are done with */
        load_transposed<P, NT>(&xs, h, first, depth, h.n_rows);
        __syncthreads();
        for (int span = 0; span < TRANSPOSED_DEPTH / SPAN && !idle; span++) {
            const int32_t row = row0 + depth + span * SPAN;
            if (depth + span * SPAN >= h.n_rows) break;
            transposed_raw<R> raw[SPAN_STEPS];
            float d[2][NT][4] = {};
#pragma unroll
            for (int k = 0; k < SPAN_STEPS; k++) {
                load_square<R>(&raw[k], a, s.cols, row + 16 * k + 4 * q, col);
            }
            const float scale = group_scale(s, a, row, col);
#pragma unroll
            for (int k = 0; k < SPAN_STEPS; k++) {
                uint32_t tile[2][4];
                transpose<R>(tile, raw[k]);
#pragma unroll
                for (int p = P - 1; p >= 0; p--) {
                    uint2 b[NT];
#pragma unroll
                    for (int t = 0; t < NT; t++) {
                        b[t] = xs.at[p][span * SPAN_STEPS + k][8 * t + g][q];
                    }
#pragma unroll
                    for (int i = 0; i < 2 * NT; i++) {
                        mma(d[i / NT][i % NT], tile[i / NT], b[i % NT].x, b[i % NT].y);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < 2 * NT * 4; i++) {
                float *own = &acc[0][0][0] + i;
                *own = fmaf((&d[0][0][0])[i], scale, *own);
            }
        }
    }
    if (idle) return;
#pragma unroll
    for (int i = 0; i < NT * 2; i++) {
        const int t = i / 2, k = i % 2;
        const int32_t r = first + 8 * t + 2 * q + k;
        if (r >= h.rows) continue;
        cuda_act *out =
            static_cast<cuda_act *>(h.out) + r * h.out_stride + head * h.out_head + col;
        out[0] = narrow(acc[0][t][k] * a.global);
        out[1] = narrow(acc[0][t][k + 2] * a.global);
        out[2] = narrow(acc[1][t][k] * a.global);
        out[3] = narrow(acc[1][t][k + 2] * a.global);
    }
}

/* Whole spans of one scale; decided by the matrix alone. */
static inline bool transposed_fits(const heads_job &h, const hd_weight *w) {
    const reading r = reading_of(w, true);
    if ((r != READ_BF16 && r != READ_E4M3) || h.n_rows % SPAN) return false;
    if (!w->scale) return true;
    return w->block_rows % SPAN == 0 && h.first_row % SPAN == 0 && h.head_rows % SPAN == 0;
}

template <int R, int P>
static void launch_transposed_rows(cudaStream_t queue, const heads_job &h, const hd_weight *w) {
    const unsigned cols = blocks_for(w->cols, TRANSPOSED_COLS), heads = (unsigned)h.heads;
    if (h.rows <= 8) {
        launch_kernel(queue, transposed_heads<R, P, 1>, dim3(cols, heads),
                      TRANSPOSED_WARPS * WARP, 0, 1, h, shape_of(w), arrays_of(w));
    } else {
        const dim3 grid(cols, heads, blocks_for(h.rows, 32));
        launch_kernel(queue, transposed_heads<R, P, 4>, grid, TRANSPOSED_WARPS * WARP, 0, 1, h,
                      shape_of(w), arrays_of(w));
    }
}

template <int P>
static void launch_transposed(cudaStream_t queue, const heads_job &h, const hd_weight *w) {
    if (reading_of(w, true) == READ_BF16) {
        launch_transposed_rows<READ_BF16, P>(queue, h, w);
    } else {
        launch_transposed_rows<READ_E4M3, P>(queue, h, w);
    }
}

#endif
