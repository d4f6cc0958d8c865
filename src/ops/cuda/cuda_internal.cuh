/* cuda_internal.cuh - what the kernels of the CUDA operators share.
 *
 * Sums have one order, fixed by the data alone: which thread adds what follows from an
 * element's place in its row, never from how many rows there are, and nothing is added by
 * atomics but whole numbers (design D8); but for what LIBRARY_OP_LIST names, where that is asked for. */
#ifndef HD_OPS_CUDA_CUDA_INTERNAL_CUH
#define HD_OPS_CUDA_CUDA_INTERNAL_CUH

#include <cuda_bf16.h>
#include <math_constants.h>

#include "device/launch.cuh"
#include "ops/fused_internal.h"
#include "ops/ops.h"

/* One activation element. A narrower type changes this, wide() and narrow(). */
typedef float cuda_act;

/* How many products the tensor cores make for one with an element of a row: with all its bits,
 * or, with --precision fast, with the nearest narrow number. */
constexpr int EXACT = 3, FAST = 1;

/* What --precision fast computes in its own way. */
#define FAST_OP_LIST(X) \
    X(linear)           \
    X(linear_heads)     \
    X(linear_set)       \
    X(linear_swiglu)    \
    X(grouped_gemm)     \
    X(grouped_swiglu)   \
    X(attention)        \
    X(attention_naive)  \
    X(indexer_topk)     \
    X(pool_topk)

/* What --no-batch-invariance computes in its own way, by cuBLASLt. */
#define CUBLASLT_OP_LIST(X) \
    X(linear)               \
    X(linear_heads)         \
    X(linear_set)           \
    X(linear_swiglu)

extern "C" {
#define X(op) hd_##op##_fn hd_##op##_cuda;
HD_COMMON_OP_LIST(X)
#undef X
#define X(op) hd_##op##_fn hd_##op##_cuda_fast;
FAST_OP_LIST(X)
#undef X
#define X(op) hd_##op##_fn hd_##op##_cuda_official;
OPS_OFFICIAL_LIST(X)
#undef X
#define X(op) hd_##op##_fn hd_##op##_cuda_cublaslt;
CUBLASLT_OP_LIST(X)
#undef X
}

extern const hd_exchange_ops hd_exchange_ops_cuda;

constexpr int WARP = 32, BLOCK = 256; /* threads */
constexpr unsigned ALL_LANES = 0xffffffff;

static __device__ __forceinline__ float wide(cuda_act x) {
    return x;
}

static __device__ __forceinline__ cuda_act narrow(float x) {
    return x;
}

static __host__ __device__ __forceinline__ cuda_act *acts(const hd_rows &x) {
    return static_cast<cuda_act *>(x.data);
}

/* Elements between rows of `width` elements. */
static __host__ __device__ __forceinline__ int64_t stride_of(const hd_rows &x, int64_t width) {
    return x.stride ? x.stride : width;
}

static inline unsigned blocks_for(int64_t n, int64_t each) {
    return (unsigned)((n + each - 1) / each);
}

/* ---- kernels that start before the ones before them are done (launch_kernel()) where they have few rows:
 * with many, kernels that begin beside them cost more than the start saves ---- */

constexpr int64_t EARLY_ROWS = 8;

/* How such a kernel begins; rows as launched. */
static __device__ __forceinline__ void begin_early(int64_t rows) {
    if (rows <= EARLY_ROWS) griddepcontrol_launch_dependents();
    griddepcontrol_wait();
}

template <typename... P, typename... A>
static void launch_early(cudaStream_t queue, int64_t rows, void (*kernel)(P...), dim3 grid,
                         int threads, size_t shared, int cluster, A &&...args) {
    launch_with(rows <= EARLY_ROWS && hd_cuda_overlaps_launches(), queue, kernel, grid, threads,
                shared, cluster, static_cast<P>(args)...);
}

/* x, or 0 if it is not there, loaded where it stands: else the compiler puts each of several loads before its
 * use, and one waits for the other. Uses must not be branched around, which would take the load along. */
static __device__ __forceinline__ float load_now(const float *x, bool there) {
    float value;
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\nmov.b32 %0, 0;\n"
                 "@p ld.global.f32 %0, [%1];\n}"
                 : "=f"(value)
                 : "l"(x), "r"((int)there));
    return value;
}

/* ---- RMS norms: a thread of a row's block has every NORM_..th element, NORM_EACH on their way ---- */

constexpr int NORM_EACH = 8, NORM_NARROW = 256, NORM_WIDE = 512;

static __host__ __device__ __forceinline__ bool norm_is_wide(int32_t cols) {
    return cols > NORM_NARROW * NORM_EACH;
}

/* ---- pages ---- */

/* An entry's row of the pool. */
static __device__ __forceinline__ int64_t paged_row(const hd_paged &p, int32_t seq,
                                                    int32_t entry) {
    const int64_t page = p.table[(int64_t)seq * p.table_stride + entry / p.page_entries];
    return page * p.page_entries + entry % p.page_entries;
}

/* Where its elements begin; not of E4M3. */
static __device__ __forceinline__ int64_t paged_at(const hd_paged &p, int32_t seq,
                                                   int32_t entry) {
    return paged_row(p, seq, entry) * p.width;
}

static __device__ __forceinline__ float *ring_row(const hd_ring &r, int32_t seq, int32_t pos) {
    const int64_t page = r.table[(int64_t)seq * r.table_stride + pos / r.page_tokens];
    return static_cast<float *>(r.rows.data) + (page * r.ring + pos % r.ring) * r.width;
}

/* Entries a query at pos may see: complete blocks up to and including its own position. */
static __device__ __forceinline__ int32_t visible_entries(int32_t pos, int32_t ratio) {
    return ratio ? (pos + 1) / ratio : 0;
}

/* Returns the row of sequence `seq` at position `pos`, or -1 if the step has none. No row can be
 * further ahead than its position, and without gaps it is exactly there. */
static __device__ __forceinline__ int32_t row_at(const hd_seqs &s, int32_t seq, int32_t pos) {
    int32_t low = s.first_row[seq], high = s.first_row[seq + 1];
    if (low == high) return -1;
    const int32_t ahead = pos - s.pos[low];
    if (ahead < 0) return -1;
    if (ahead < high - low) {
        high = low + ahead;
        if (s.pos[high] == pos) return high;
    }
    while (low < high) {
        const int32_t middle = low + (high - low) / 2, found = s.pos[middle];
        if (found == pos) return middle;
        if (found < pos) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return -1;
}

/* ---- arithmetic ---- */

/* Bits that order as the floats do; both zeros are one. */
static __device__ __forceinline__ uint32_t order_of(float x) {
    const uint32_t bits = __float_as_uint(x + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

/* Ranks as a descending sort does: the higher value first, then the lower index. */
static __device__ __forceinline__ uint64_t rank_of(float x, int32_t index) {
    return (uint64_t)order_of(x) << 32 | (uint32_t)~index;
}

/* Rounded to float32 before the sine, as everywhere (models.md 2.1.4). */
static __device__ __forceinline__ float rope_angle(int32_t pos, float freq) {
    return __fmul_rn((float)pos, freq);
}

static __device__ __forceinline__ float sigmoid(float x) {
    return 1.0f / (1.0f + expf(-x));
}

/* limit 0: none. */
static __device__ __forceinline__ float swiglu_of(float g, float u, float limit, float weight) {
    if (limit > 0.0f) { /* comparisons, so that NaN stays NaN */
        g = g > limit ? limit : g;
        u = u > limit ? limit : u < -limit ? -limit : u;
    }
    return g * sigmoid(g) * u * weight;
}

/* The sum over a warp, the same bits in every lane. */
template <typename T>
static __device__ __forceinline__ T warp_sum(T x) {
    for (int step = WARP / 2; step > 0; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

static __device__ __forceinline__ float warp_max(float x) {
    for (int step = WARP / 2; step > 0; step /= 2) {
        x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, step));
    }
    return x;
}

/* The sum over a block of N threads, the same bits in every thread. */
template <int N, typename T>
static __device__ T block_sum(T x) {
    __shared__ T part[N / WARP];
    x = warp_sum(x);
    if (threadIdx.x % WARP == 0) part[threadIdx.x / WARP] = x;
    __syncthreads();
    T sum = part[0];
    for (int w = 1; w < N / WARP; w++) sum += part[w];
    __syncthreads();
    return sum;
}

#endif
