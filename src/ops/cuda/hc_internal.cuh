/* hc_internal.cuh - what the kernels of V4's hyper-connections share: the weights of a row's streams,
 * from its mixing values. */
#ifndef HD_OPS_CUDA_HC_INTERNAL_CUH
#define HD_OPS_CUDA_HC_INTERNAL_CUH

#include "ops/cuda/cuda_internal.cuh"

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

/* The same for 4 x 4 in one warp, an element per lane: a lane reads and writes its own element of
 * comb and no other, the upper ones compute with zeros. In float: every turn repairs the roundings
 * of the one before. */
static __device__ void sinkhorn_of_four(double *comb, int32_t iters, float eps) {
    const int k = threadIdx.x;
    const auto sum_of = [](float x, int step) {
        x += __shfl_xor_sync(ALL_LANES, x, step);
        return x + __shfl_xor_sync(ALL_LANES, x, 2 * step);
    };
    const double given = k < 16 ? comb[k] : 0.0;
    double top = fmax(given, __shfl_xor_sync(ALL_LANES, given, 1));
    top = fmax(top, __shfl_xor_sync(ALL_LANES, top, 2));
    float own = expf((float)(given - top));
    own = __fdividef(own, sum_of(own, 1)) + eps;
    own = __fdividef(own, sum_of(own, 4) + eps);
    for (int32_t i = 1; i < iters; i++) {
        own = __fdividef(own, sum_of(own, 1) + eps);
        own = __fdividef(own, sum_of(own, 4) + eps);
    }
    if (k < 16) comb[k] = (double)own;
}

/* How the block's result goes back to row r: m is changed in place. */
static __device__ void mix_back(const hd_hc_pre_args &a, double *m, int64_t r) {
    const int32_t hc = a.hc;
    const int k = threadIdx.x;
    double *comb = m + 2 * hc;
    if (k < hc) {
        const double post = m[hc + k] * (double)a.scale[1] + (double)a.base[hc + k];
        a.post[r * hc + k] = (float)(2.0 * sigmoid64(post));
    }
    if (k < hc * hc) comb[k] = comb[k] * (double)a.scale[2] + (double)a.base[2 * hc + k];
    __syncthreads();
    if (hc == 4) {
        if (k < WARP) sinkhorn_of_four(comb, a.iters, a.eps);
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
    if (k < hc) m[k] = sigmoid64(m[k] * (double)scale + (double)base[k]) + (double)eps;
    __syncthreads();
}

#endif
