/* gemm_f32_internal.cuh - rows of activations times stored rows in plain float arithmetic: for
 * F32 matrices, and for any that the tensor cores do not read (mma_internal.cuh).
 *
 * A lane owns output columns, a warp every SLICES-th segment of the rows, a block all of them
 * for 32 * NT output columns and MT rows of x. An output is the sum of its SLICES parts by one
 * tree; a part adds groups of GROUP columns in order, each a chain of fused steps times its
 * scale. So an output has the same bits for every MT and NT, in every product of rows.
 * Bounded by the weights' bytes for few rows, by FFMA for many. */
#ifndef HD_OPS_CUDA_GEMM_F32_INTERNAL_CUH
#define HD_OPS_CUDA_GEMM_F32_INTERNAL_CUH

#include "ops/cuda/weight_internal.cuh"

constexpr int SLICES = 8, PRODUCT_THREADS = SLICES * WARP, X_FLOATS = 8192, MAX_MT = 16;

/* One block's work: x rows times rows [first_row, + n_rows) of a matrix. */
struct product_job {
    const cuda_act *x[MAX_MT]; /* [n_x] rows; filled by all threads before product() */
    void *out[MAX_MT];         /* [n_x] the first output column of each row */
};

struct product_span {
    int32_t n_x, first_row, n_rows; /* of this block */
    bool out_f32;
};

/* SEGMENT columns of NT stored F32 rows of one lane. */
template <int NT>
struct segment {
    float4 quad[NT][SEGMENT / 4];
};

template <int NT>
static __device__ __forceinline__ void fetch(segment<NT> *to, const weight_shape &s,
                                             const weight_arrays &a, const int32_t *row,
                                             int32_t col) {
#pragma unroll
    for (int t = 0; t < NT; t++) {
        const float *from = reinterpret_cast<const float *>(a.data) + (int64_t)row[t] * s.cols;
#pragma unroll
        for (int i = 0; i < SEGMENT / 4; i++) {
            to->quad[t][i] = __ldg(reinterpret_cast<const float4 *>(from + col) + i);
        }
    }
}

/* Group g of the segment at column col of the lane's rows, and its scales. */
template <int R, int NT>
static __device__ __forceinline__ void read_group(float (*w)[GROUP], float *scale,
                                                  const segment<NT> &from, int32_t col, int g,
                                                  const weight_shape &s, const weight_arrays &a,
                                                  const int32_t *row) {
#pragma unroll
    for (int t = 0; t < NT; t++) {
        const int32_t first = col + GROUP * g;
        if constexpr (R == READ_ANY) {
            read_any_group(w[t], &scale[t], s, a, row[t], first);
        } else {
            scale[t] = group_scale(s, a, row[t], first);
#pragma unroll
            for (int i = 0; i < GROUP; i += 4) {
                const float4 v = from.quad[t][(GROUP * g + i) / 4];
                w[t][i] = v.x;
                w[t][i + 1] = v.y;
                w[t][i + 2] = v.z;
                w[t][i + 3] = v.w;
            }
        }
    }
}

/* xs: [MT, X_FLOATS / MT] this chunk of x from column first on; the segment begins at `at`. */
template <int R, int MT, int NT>
static __device__ __forceinline__ void multiply(float (*acc)[NT], const segment<NT> &from,
                                                const float *xs, int32_t first, int32_t at,
                                                const weight_shape &s, const weight_arrays &a,
                                                const int32_t *row) {
#pragma unroll
    for (int g = 0; g < SEGMENT / GROUP; g++) {
        float w[NT][GROUP], scale[NT];
        read_group<R, NT>(w, scale, from, first + at, g, s, a, row);
#pragma unroll
        for (int m = 0; m < MT; m++) {
            const float4 *x4 =
                reinterpret_cast<const float4 *>(xs + m * (X_FLOATS / MT) + at + GROUP * g);
            float dot[NT] = {};
#pragma unroll
            for (int i = 0; i < GROUP; i += 4) {
                const float4 x = x4[i / 4];
#pragma unroll
                for (int t = 0; t < NT; t++) {
                    dot[t] = fmaf(x.x, w[t][i], dot[t]);
                    dot[t] = fmaf(x.y, w[t][i + 1], dot[t]);
                    dot[t] = fmaf(x.z, w[t][i + 2], dot[t]);
                    dot[t] = fmaf(x.w, w[t][i + 3], dot[t]);
                }
            }
#pragma unroll
            for (int t = 0; t < NT; t++) acc[m][t] = fmaf(dot[t], scale[t], acc[m][t]);
        }
    }
}

/* Columns [first, first + X_FLOATS / MT) of the block's rows of x, zero beyond rows and row. */
template <int MT>
static __device__ void load_x(float *xs, const product_job &job, int32_t n_x, int32_t first,
                              int32_t cols) {
    const int32_t width = X_FLOATS / MT;
    __syncthreads(); /* the chunk before is done with */
    for (int32_t m = 0; m < MT; m++) {
        for (int32_t c = threadIdx.x; c < width; c += PRODUCT_THREADS) {
            const bool in = m < n_x && first + c < cols;
            xs[m * width + c] = in ? wide(job.x[m][first + c]) : 0.0f;
        }
    }
    __syncthreads();
}

template <int MT, int NT>
static __device__ void add_slices(float *parts, float (*acc)[NT], const product_job &job,
                                  const product_span &span, float global) {
    const int lane = threadIdx.x % WARP, slice = threadIdx.x / WARP;
    const int width = MT * NT * WARP;
    __syncthreads();
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
        for (int t = 0; t < NT; t++) {
            parts[slice * width + (m * NT + t) * WARP + lane] = acc[m][t];
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < width; i += PRODUCT_THREADS) {
        const int m = i / (NT * WARP), n = i % (NT * WARP);
        if (m >= span.n_x || n >= span.n_rows) continue;
        const float *p = parts + i;
        const float sum = ((p[0] + p[width]) + (p[2 * width] + p[3 * width])) +
                          ((p[4 * width] + p[5 * width]) + (p[6 * width] + p[7 * width]));
        if (span.out_f32) {
            static_cast<float *>(job.out[m])[n] = sum * global;
        } else {
            static_cast<cuda_act *>(job.out[m])[n] = narrow(sum * global);
        }
    }
}

template <int R, int MT, int NT>
static __device__ void product(const product_job &job, const product_span &span,
                               const weight_shape &s, const weight_arrays &a) {
    static_assert(SLICES * MT * NT * WARP <= X_FLOATS, "the parts reuse the room of x");
    __shared__ __align__(16) float shared[X_FLOATS];
    const int32_t width = X_FLOATS / MT, step = SLICES * SEGMENT;
    const int lane = threadIdx.x % WARP, slice = threadIdx.x / WARP;
    float acc[MT][NT] = {};
    int32_t row[NT];
#pragma unroll
    for (int t = 0; t < NT; t++) { /* lanes without a row of their own repeat the last */
        row[t] = span.first_row + min(lane + WARP * t, span.n_rows - 1);
    }
    for (int32_t first = 0; first < s.cols; first += width) {
        const int32_t n = min(width, s.cols - first);
        segment<NT> next;
        if (R == READ_F32 && slice * SEGMENT < n) {
            fetch<NT>(&next, s, a, row, first + slice * SEGMENT);
        }
        load_x<MT>(shared, job, span.n_x, first, s.cols);
        for (int32_t at = slice * SEGMENT; at < n; at += step) {
            const segment<NT> now = next;
            if (R == READ_F32 && at + step < n) fetch<NT>(&next, s, a, row, first + at + step);
            multiply<R, MT, NT>(acc, now, shared, first, at, s, a, row);
        }
    }
    add_slices<MT, NT>(shared, acc, job, span, a.global);
}

#endif
