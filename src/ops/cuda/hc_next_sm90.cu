/* hc_next_sm90.cu - hyper-connections between two blocks, on Hopper in one launch for few rows: the
 * result of the block before goes to the streams, which are mixed and normed for the next one.
 *
 * A row has a cluster of blocks: eight groups of columns, and two blocks for each, which share the
 * mixing values; fn is on its way to shared memory before the block before is done. Group q has the
 * columns of warp q in hc_cuda.cu and rows_cuda.cu, whose orders of sums these are, so that a row has
 * the same bits as with hc_post, hc_pre and rms_norm. */
#include <atomic>

#include <cooperative_groups.h>

#include "ops/cuda/hc_internal.cuh"
#include "ops/fused_internal.h"

namespace cg = cooperative_groups;

namespace {

constexpr int HC = 4, MIX = 2 * HC + HC * HC;   /* streams; mixing values of a row */
constexpr int SQUARES = MIX;                    /* the value behind them */
constexpr int GROUPS = 8, CLUSTER = 2 * GROUPS; /* of columns; blocks of a row */
constexpr int VALUES = 13; /* of the first eight blocks; 12 of the others */
constexpr int THREADS = 512, WARPS = THREADS / WARP, CHUNK = BLOCK; /* columns */
constexpr int MAX_CHUNKS = 28, MAX_STRETCHES = (HC * MAX_CHUNKS + 7) / 8;
static_assert(MAX_STRETCHES <= WARPS, "a stretch has a warp");
constexpr int MAX_GPUS = 64; /* of a process that have this kernel */
constexpr int MOST_ROWS = 8, EACH = (MAX_CHUNKS + WARPS - 1) / WARPS;

/* A block's columns: 32 of each chunk of 256. */
struct row_shared {
    double part[MAX_STRETCHES][VALUES]; /* sums of the group's columns, of every stretch */
    double total[MIX + 1][MAX_STRETCHES], m[MIX + 1];
    double square[2]; /* of the mixture, of even and odd chunks */
};

__device__ __forceinline__ void copy_16_bytes(float *to, const float *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                     (uint32_t)__cvta_generic_to_shared(to)),
                 "l"(from)
                 : "memory");
}

/* The block's rows and columns of fn, to [VALUES, 4 * chunks, 32]. */
__device__ void fetch_fn(float *to, const hd_hc_next_args &a, int group, int first) {
    const int32_t chunks = HC * (a.cols / CHUNK), quads = WARP / 4;
    const int32_t n = min(VALUES, MIX - first) * chunks * quads;
    for (int32_t i = threadIdx.x; i < n; i += THREADS) {
        const int32_t quad = i % quads, chunk = i / quads % chunks, value = i / quads / chunks;
        const int64_t col = (int64_t)chunk * CHUNK + group * WARP + 4 * quad;
        copy_16_bytes(to + 4 * i, a.fn + (int64_t)(first + value) * HC * a.cols + col);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* The streams with the result of the block before, to [4 * chunks, 32]. */
__device__ void add_result(float *to, const hd_hc_next_args &a, int64_t r, int group) {
    const int32_t chunks = a.cols / CHUNK;
    const int lane = threadIdx.x % WARP;
    const float *x = acts(a.x) + r * HC * a.cols, *y = acts(a.y) + r * a.cols;
    const float *post = a.post + r * HC, *comb = a.comb + r * HC * HC;
    for (int32_t j = threadIdx.x / WARP; j < chunks; j += WARPS) {
        const int32_t c = j * CHUNK + group * WARP + lane;
        float old[HC];
#pragma unroll
        for (int k = 0; k < HC; k++) old[k] = x[(int64_t)k * a.cols + c];
        if (!a.y.data) {
#pragma unroll
            for (int k = 0; k < HC; k++) to[(k * chunks + j) * WARP + lane] = old[k];
            continue;
        }
        const double own = (double)y[c];
#pragma unroll
        for (int i = 0; i < HC; i++) {
            double mixed = (double)post[i] * own;
#pragma unroll
            for (int k = 0; k < HC; k++) {
                mixed = fma((double)comb[k * HC + i], (double)old[k], mixed);
            }
            to[(i * chunks + j) * WARP + lane] = narrow((float)mixed);
        }
    }
}

/* Sums of x times the block's values over its columns: a warp has one stretch, and AT_ONCE values at
 * once, so that no sum waits for its own last step. */
__device__ void mix_part(row_shared *s, const float *fn, const float *x, int32_t chunks,
                         int first) {
    constexpr int AT_ONCE = 7;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int n = min(VALUES, MIX + 1 - first);
    const int32_t all = HC * chunks, stretches = (all + 7) / 8, sharers = WARPS / stretches;
    const int32_t stretch = warp % stretches;
    double own[8];
    if (warp >= sharers * stretches) return;
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const int32_t chunk = 8 * stretch + k;
        own[k] = chunk < all ? (double)x[chunk * WARP + lane] : 0.0;
    }
    for (int32_t base = warp / stretches; base < n; base += AT_ONCE * sharers) {
        double sum[AT_ONCE] = {};
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const int32_t chunk = 8 * stretch + k;
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const int32_t value = base + i * sharers;
                const bool square = first + value == SQUARES, there = value < n && chunk < all;
                const float f =
                    there && !square ? fn[(value * all + chunk) * WARP + lane] : 0.0f;
                sum[i] = fma(square ? own[k] : (double)f, own[k], sum[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const double part = warp_sum(sum[i]);
            const int32_t value = base + i * sharers;
            if (lane == 0 && value < n) s->part[stretch][value] = part;
        }
    }
}

/* m = the row's mixing values over its root mean square: the first n of them, from all blocks. */
__device__ void join_parts(row_shared *s, const hd_hc_next_args &a, int n) {
    const cg::cluster_group cluster = cg::this_cluster();
    const int32_t stretches = (HC * (a.cols / CHUNK) + 7) / 8;
    const int t = threadIdx.x;
    if (t < stretches * (n + 1)) {
        const int stretch = t % stretches, value = t / stretches < n ? t / stretches : SQUARES;
        const int half = value / VALUES;
        double part[GROUPS];
#pragma unroll
        for (int q = 0; q < GROUPS; q++) {
            const row_shared *there = cluster.map_shared_rank(s, (unsigned)(half * GROUPS + q));
            part[q] = there->part[stretch][value - half * VALUES];
        }
        double sum = part[0];
#pragma unroll
        for (int q = 1; q < GROUPS; q++) sum += part[q];
        s->total[value][stretch] = sum;
    }
    __syncthreads();
    if (t <= n) {
        const int value = t < n ? t : SQUARES;
        double sum = 0.0;
        for (int32_t k = 0; k < stretches; k++) sum += s->total[value][k];
        s->m[value] = sum;
    }
    __syncthreads();
    const double rms = 1.0 / sqrt(s->m[SQUARES] / (HC * a.cols) + (double)a.norm_eps);
    __syncthreads();
    if (t < n) s->m[t] *= rms;
    __syncthreads();
}

/* The mixture of the group's columns, to [chunks, 32], and its sums of squares. */
__device__ void weigh_part(row_shared *s, float *to, const float *x, int32_t chunks,
                           bool by_parity) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    for (int32_t j = warp; j < chunks; j += WARPS) {
        double sum = 0.0;
#pragma unroll
        for (int i = 0; i < HC; i++) {
            sum = fma(s->m[i], (double)x[(i * chunks + j) * WARP + lane], sum);
        }
        to[j * WARP + lane] = narrow((float)sum);
    }
    __syncthreads();
    if (warp >= (by_parity ? 2 : 1)) return;
    double sum = 0.0;
    for (int32_t j = warp; j < chunks; j += by_parity ? 2 : 1) {
        const double own = (double)to[j * WARP + lane];
        sum = fma(own, own, sum);
    }
    sum = warp_sum(sum);
    if (lane == 0) s->square[warp] = sum;
}

__device__ float norm_scale(const row_shared *s, const hd_hc_next_args &a, bool by_parity) {
    const cg::cluster_group cluster = cg::this_cluster();
    double part[2][GROUPS], sum = 0.0;
#pragma unroll
    for (int q = 0; q < GROUPS; q++) {
        const row_shared *there = cluster.map_shared_rank(s, (unsigned)q);
        part[0][q] = there->square[0];
        part[1][q] = by_parity ? there->square[1] : 0.0;
    }
#pragma unroll
    for (int q = 0; q < 2 * GROUPS; q++) {
        if (q < GROUPS || by_parity) sum = q ? sum + part[q / GROUPS][q % GROUPS] : part[0][0];
    }
    return (float)(1.0 / sqrt(sum / a.cols + (double)a.norm_eps));
}

/* Leaves the mixture for the next block, which all have read. */
__device__ void predict(double *m, const hd_hc_next_args &a, int64_t r) {
    mix_forth(m, HC, a.scale[0], a.base, a.eps);
    if (threadIdx.x < HC) a.pre[r * HC + threadIdx.x] = (float)m[threadIdx.x];
}

/* The first eight blocks write the normed mixture; the others the streams, and the last of them
 * finds the weights of the way back. */
__global__ void __launch_bounds__(THREADS)
    hc_next(hd_hc_next_args a, hd_hc_pre_args pre, bool by_parity) {
    extern __shared__ __align__(16) float room[]; /* fn, x, mixture */
    __shared__ row_shared s;
    const cg::cluster_group cluster = cg::this_cluster();
    const int rank = (int)cluster.block_rank(), group = rank % GROUPS, half = rank / GROUPS;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int32_t chunks = a.cols / CHUNK;
    const int64_t r = blockIdx.y;
    float *fn = room, *x = fn + VALUES * HC * chunks * WARP, *mixture = x + HC * chunks * WARP;
    float weight[EACH];
    griddepcontrol_launch_dependents();
    fetch_fn(fn, a, group, half * VALUES);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int32_t j = warp + i * WARPS;
        weight[i] = j < chunks ? a.weight[j * CHUNK + group * WARP + lane] : 0.0f;
    }
    griddepcontrol_wait();
    add_result(x, a, r, group);
    if (a.pre && half == 0 && threadIdx.x < HC) {
        s.m[threadIdx.x] = a.first ? threadIdx.x == 0 : (double)a.pre[r * HC + threadIdx.x];
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    mix_part(&s, fn, x, chunks, half * VALUES);
    cluster.sync(); /* all have read the streams and their weights, and the parts are there */
    if (half != 0) {
        if (rank == CLUSTER - 1) join_parts(&s, a, MIX);
        cluster.barrier_arrive(); /* what others have is no longer read */
        for (int32_t i = warp; i < HC * chunks && a.y.data; i += WARPS) {
            const int64_t at = r * HC * a.cols + (int64_t)i * CHUNK + group * WARP + lane;
            acts(a.x)[at] = x[i * WARP + lane];
        }
        if (rank == CLUSTER - 1) {
            mix_back(pre, s.m, r);
            if (a.pre) predict(s.m, a, r);
        }
        cluster.barrier_wait();
        return;
    }
    if (!a.pre) {
        join_parts(&s, a, HC);
        mix_forth(s.m, HC, a.scale[0], a.base, a.eps);
    }
    weigh_part(&s, mixture, x, chunks, by_parity);
    cluster.sync();
    const float scale = norm_scale(&s, a, by_parity);
    cluster.barrier_arrive();
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int32_t j = warp + i * WARPS;
        if (j >= chunks) break;
        const int32_t c = j * CHUNK + group * WARP + lane;
        acts(a.out)[r * a.cols + c] = narrow(mixture[j * WARP + lane] * scale * weight[i]);
    }
    cluster.barrier_wait(); /* nobody leaves while its sums are read */
}

size_t bytes_of(const hd_hc_next_args *a) {
    return (size_t)(a->cols / CHUNK) * WARP * (VALUES * HC + HC + 1) * sizeof(float);
}

/* Whether a row's cluster fits on the current GPU; asked once of each. */
bool cluster_fits() {
    enum answer { UNKNOWN, FITS, TOO_LARGE };
    static std::atomic<answer> known[MAX_GPUS];
    int gpu = 0;
    cudaGetDevice(&gpu);
    if (gpu >= MAX_GPUS) return false;
    std::atomic<answer> &kept = known[gpu];
    if (kept != UNKNOWN) return kept == FITS;
    const size_t most = (size_t)MAX_CHUNKS * WARP * (VALUES * HC + HC + 1) * sizeof(float);
    cudaLaunchAttribute how = {};
    how.id = cudaLaunchAttributeClusterDimension;
    how.val.clusterDim = {CLUSTER, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(CLUSTER);
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = most;
    config.attrs = &how;
    config.numAttrs = 1;
    int n = 0;
    cudaFuncSetAttribute(hc_next, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    hd_cuda_allow_shared((const void *)hc_next, most);
    if (cudaOccupancyMaxActiveClusters(&n, hc_next, &config) != cudaSuccess) cudaGetLastError();
    kept = n > 0 ? FITS : TOO_LARGE;
    return n > 0;
}

} // namespace

void hd_hc_next_cuda(hd_stream *s, const hd_hc_next_args *a) {
    const int32_t chunks = a->cols / CHUNK;
    if (a->rows == 0) return;
    const bool few = a->rows <= MOST_ROWS && a->hc == HC && a->cols % CHUNK == 0 &&
                     chunks <= MAX_CHUNKS && (uintptr_t)a->fn % 16 == 0;
    cudaStream_t queue = hd_cuda_stream(s);
    if (!few || !hd_cuda_is_sm90() || !cluster_fits()) {
#define RUN(part, args) hd_##part##_cuda(s, args)
        OPS_RUN_hc_next(RUN, a)
#undef RUN
            return;
    }
    launch_kernel(queue, hc_next, dim3(CLUSTER, (unsigned)a->rows), THREADS, bytes_of(a),
                  CLUSTER, *a, ops_next_pre(a), norm_is_wide(a->cols));
    hd_cuda_check(s, "hc_next");
}
