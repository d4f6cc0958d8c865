/* hc_internal.cuh - what the kernels of V4's hyper-connections share: the weights of a row's streams,
 * from its mixing values. */
#ifndef HD_OPS_CUDA_HC_INTERNAL_CUH
#define HD_OPS_CUDA_HC_INTERNAL_CUH

#include "ops/cuda/cuda_internal.cuh"

/* hc_next of rows that have no cluster each, in three launches; false: not of these widths. */
bool hc_next_many(hd_stream *s, const hd_hc_next_args *a);

constexpr int MAX_MIX = 2 * HD_MAX_HC + HD_MAX_HC * HD_MAX_HC;
constexpr int STRETCH = 8 * BLOCK; /* columns of a block of mix_values */

static __device__ __forceinline__ double sigmoid64(double x) {
    return 1.0 / (1.0 + exp(-x));
}

/* Divides rows or columns by their sums plus eps, an element per thread. */
static __device__ void normalize(double *comb, int32_t hc, bool rows, double eps) {
    const int k = threadIdx.x, row = k / hc, col = k % hc;
    double sum = 0.0;
    if (k < hc * hc) {
        for (int j = 0; j < hc; j++) sum += comb[rows ? row * hc + j : j * hc + col];
    }
    __syncthreads();
    if (k < hc * hc) comb[k] /= sum + eps;
    __syncthreads();
}

/* Sinkhorn-Knopp towards a doubly stochastic matrix, starting from a softmax of each row. */
static __device__ void sinkhorn(double *comb, int32_t hc, int32_t iters, double eps) {
    const int k = threadIdx.x, row = k / hc * hc;
    double top = 0.0, sum = 0.0, own = 0.0;
    if (k < hc * hc) {
        top = comb[row];
        for (int j = 1; j < hc; j++) top = fmax(top, comb[row + j]);
        own = exp(comb[k] - top);
    }
    __syncthreads();
    if (k < hc * hc) comb[k] = own;
    __syncthreads();
    if (k < hc * hc) {
        for (int j = 0; j < hc; j++) sum += comb[row + j];
    }
    __syncthreads();
    if (k < hc * hc) comb[k] = own / sum + eps;
    __syncthreads();
    normalize(comb, hc, false, eps);
    for (int32_t i = 1; i < iters; i++) {
        normalize(comb, hc, true, eps);
        normalize(comb, hc, false, eps);
    }
}

static __device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* The same for 4 x 4 in one warp: lanes below 16 give an element each and get it back, the others get
 * copies. In float: every turn repairs the roundings of the one before. Element (i, j) is u[i] * start *
 * v[j], where a turn divides by 1 / u[i] = eps / u[i] + sum of start * v[j], with the u[i] before it, and
 * by 1 / v[j] likewise. Each lane finds all u and v, which takes half of the time that lanes need to
 * meet. */
static __device__ __forceinline__ float sinkhorn_of_four(double given, int32_t iters,
                                                         float eps) {
    constexpr int HC = 4;
    const int k = threadIdx.x % (HC * HC);
    double top = fmax(given, __shfl_xor_sync(ALL_LANES, given, 1));
    top = fmax(top, __shfl_xor_sync(ALL_LANES, top, 2));
    float own = expf((float)(given - top));
    float sum = own + __shfl_xor_sync(ALL_LANES, own, 1);
    sum += __shfl_xor_sync(ALL_LANES, sum, 2);
    own = own * reciprocal(sum) + eps;
    float start[HC][HC], u[HC], v[HC], over_u[HC], over_v[HC];
#pragma unroll
    for (int i = 0; i < HC * HC; i++) {
        start[i / HC][i % HC] = __shfl_sync(ALL_LANES, own, i);
    }
#pragma unroll
    for (int i = 0; i < HC; i++) {
        over_u[i] = over_v[i] = 1.0f;
        u[i] = 1.0f;
    }
    const auto turn = [&](bool rows) {
        float *over = rows ? over_u : over_v, *to = rows ? u : v;
        const float *by = rows ? v : u;
#pragma unroll
        for (int i = 0; i < HC; i++) over[i] *= eps;
#pragma unroll
        for (int j = 0; j < HC; j++) {
#pragma unroll
            for (int i = 0; i < HC; i++) {
                over[i] = fmaf(rows ? start[i][j] : start[j][i], by[j], over[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < HC; i++) to[i] = reciprocal(over[i]);
    };
    turn(false);
    for (int32_t i = 1; i < iters; i++) {
        turn(true);
        turn(false);
    }
    float all = 0.0f;
#pragma unroll
    for (int i = 0; i < HC * HC; i++) {
        const float element = u[i / HC] * start[i / HC][i % HC] * v[i % HC];
        all = k == i ? element : all;
    }
    return all;
}

/* The weight of a stream in the row that goes on, and of the block's result in a stream. */
static __device__ __forceinline__ double forth_of(double m, float scale, float base,
                                                  float eps) {
    return sigmoid64(m * (double)scale + (double)base) + (double)eps;
}

static __device__ __forceinline__ float post_of(double m, float scale, float base) {
    return (float)(2.0 * sigmoid64(m * (double)scale + (double)base));
}

/* How the block's result goes back to row r: m is changed in place. */
static __device__ void mix_back(const hd_hc_pre_args &a, double *m, int64_t r) {
    const int32_t hc = a.hc;
    const int k = threadIdx.x;
    double *comb = m + 2 * hc;
    if (k < hc) a.post[r * hc + k] = post_of(m[hc + k], a.scale[1], a.base[hc + k]);
    if (k < hc * hc) comb[k] = comb[k] * (double)a.scale[2] + (double)a.base[2 * hc + k];
    __syncthreads();
    if (hc == 4) {
        if (k < WARP) {
            const float own = sinkhorn_of_four(comb[k % 16], a.iters, a.eps);
            __syncwarp();
            if (k < 16) comb[k] = (double)own;
        }
        __syncthreads();
    } else {
        sinkhorn(comb, hc, a.iters, (double)a.eps);
    }
    if (k < hc * hc) a.comb[r * hc * hc + k] = (float)comb[k];
}

/* m[k] = the weight of stream k < hc in the row that goes on. */
static __device__ void mix_forth(double *m, int32_t hc, float scale, const float *base,
                                 float eps) {
    const int k = threadIdx.x;
    if (k < hc) m[k] = forth_of(m[k], scale, base[k], eps);
    __syncthreads();
}

#endif
