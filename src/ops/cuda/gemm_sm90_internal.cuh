/* gemm_sm90_internal.cuh - what the products on Hopper share: which tiles a block takes, the ring
 * of stages, and what their bulk copies are told. */
#ifndef HD_OPS_CUDA_GEMM_SM90_INTERNAL_CUH
#define HD_OPS_CUDA_GEMM_SM90_INTERNAL_CUH

#include "ops/cuda/official_internal.cuh"
#include "ops/cuda/wgmma_sm90_internal.cuh"

namespace {

constexpr int MAX_EXPERTS = 384, ROW_BYTES = 128, WARPGROUP = 128, M_GROUP = 8;

/* Two blocks of a cluster may have the same rows of x: each copies half of them, to both. */
enum sharing { ALONE, SHARED };

struct job {
    float *out;
    int64_t out_stride;
    const uint8_t *data, *scale; /* of W; the lowest of the slots' */
    const hd_weight *slots;      /* [n_experts] device memory, or NULL */
    const int32_t *offset;
    float global;
    int32_t scale_type, n_experts, from, rows, outs, spans; /* rows [from, + rows) are in x */
    int32_t stages;
    bool pairs; /* outputs may be written in pairs */
    uint64_t keep_w;
};

/* Experts' matrices have one tensor map, in which an address is a coordinate: steps of 16 bytes
 * from the lowest one. A map per expert would have to be rewritten and fenced in device memory
 * when slots change; so, a slot is one address in the table, and neither the maps nor the other
 * arguments of a captured launch depend on it. It is read once per tile. */
constexpr int64_t PLACE_BYTES = 16, MAX_PLACE = INT32_MAX;

template <bool GROUPED>
__device__ __forceinline__ int32_t data_place(const job &j, int32_t expert) {
    if (!GROUPED) return 0;
    return (int32_t)((static_cast<const uint8_t *>(j.slots[expert].data) - j.data) /
                     PLACE_BYTES);
}

template <bool GROUPED>
__device__ __forceinline__ const uint8_t *scale_of_slot(const job &j, int32_t expert) {
    return GROUPED ? static_cast<const uint8_t *>(j.slots[expert].scale) : j.scale;
}

struct tile {
    int32_t expert, row, n_rows, out; /* first row of x, how many; first row of W */
};

/* Those of an expert's rows that are in x. */
struct span_of_rows {
    int32_t first, n;
};

__device__ __forceinline__ span_of_rows rows_of(const job &j, int32_t expert) {
    const int32_t first = max(j.offset[expert] - j.from, 0);
    const int32_t end = min(j.offset[expert + 1] - j.from, j.rows);
    return {first, max(end - first, 0)};
}

/* ---- which tiles a block takes ---- */

template <int H, int BN, sharing SHARE, bool GROUPED>
struct schedule {
    const int32_t *upto; /* [n_experts + 1] units before each expert, in shared memory */
    int32_t unit, step, n_outs;

    static constexpr int UNIT_N = SHARE == SHARED ? 2 : 1; /* tiles side by side */

    __device__ schedule(const job &j, const int32_t *units)
        : upto(units), unit((int32_t)blockIdx.x / UNIT_N), step((int32_t)gridDim.x / UNIT_N),
          n_outs((j.outs + BN * UNIT_N - 1) / (BN * UNIT_N)) {}

    static __host__ __device__ int32_t units_m(int32_t rows) {
        return (rows + H - 1) / H;
    }

    __device__ int32_t expert_of(const job &j) const {
        int32_t low = 0, high = j.n_experts; /* upto[low] <= unit < upto[high] */
        while (high - low > 1) {
            const int32_t mid = (low + high) / 2;
            if (upto[mid] <= unit) {
                low = mid;
            } else {
                high = mid;
            }
        }
        return low;
    }

    /* Rows of x vary first, a few tiles of them, so that a matrix is read from memory once. */
    __device__ bool next(const job &j, uint32_t rank, tile *t) {
        int32_t at = unit, first = 0, rows = j.rows;
        t->expert = 0;
        if constexpr (GROUPED) {
            if (unit >= upto[j.n_experts]) return false;
            t->expert = expert_of(j);
            at -= upto[t->expert];
            const span_of_rows own = rows_of(j, t->expert);
            first = own.first;
            rows = own.n;
        } else if (unit >= units_m(rows) * n_outs) {
            return false;
        }
        const int32_t n_m = units_m(rows), group = at / (M_GROUP * n_outs);
        const int32_t left = at - group * M_GROUP * n_outs;
        const int32_t in_group = min(M_GROUP, n_m - group * M_GROUP);
        const int32_t m = group * M_GROUP + left % in_group, n = left / in_group;
        const int32_t row = m * H;
        t->row = first + row;
        t->n_rows = min(rows - row, H);
        t->out = (n * UNIT_N + (int32_t)rank) * BN;
        unit += step;
        return true;
    }
};

/* A stage of the ring, and how often it was passed. */
struct cursor {
    int32_t at = 0;
    uint32_t parity = 0;

    __device__ void move(int32_t stages) {
        if (++at == stages) {
            at = 0;
            parity ^= 1;
        }
    }
};

/* Units of work before each expert; one warp. */
template <typename S>
__device__ void count_units(const job &j, int32_t *upto, int32_t n_outs) {
    const int lane = threadIdx.x % WARP;
    int32_t before = 0;
    for (int32_t first = 0; first < j.n_experts; first += WARP) {
        const int32_t e = first + lane;
        const int32_t own = e < j.n_experts ? S::units_m(rows_of(j, e).n) * n_outs : 0;
        int32_t sum = own;
        for (int step = 1; step < WARP; step *= 2) {
            const int32_t left = __shfl_up_sync(ALL_LANES, sum, step);
            if (lane >= step) sum += left;
        }
        if (e < j.n_experts) upto[e] = before + sum - own;
        before += __shfl_sync(ALL_LANES, sum, WARP - 1);
    }
    if (lane == 0) upto[j.n_experts] = before;
}

/* ---- what bulk copies are told ---- */

using encode_fn = decltype(&cuTensorMapEncodeTiled);

/* The driver's function, found once; NULL: none. */
inline encode_fn find_encode() {
    static encode_fn found;
    if (found) return found;
    void *at = nullptr;
    cudaDriverEntryPointQueryResult how;
    const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &at,
                                                                12000, cudaEnableDefault, &how);
    if (status == cudaSuccess && how == cudaDriverEntryPointSuccess) {
        found = reinterpret_cast<encode_fn>(at);
    }
    return found;
}

struct box {
    uint32_t rank;
    cuuint64_t dims[4], strides[3]; /* elements, the contiguous dimension first; bytes */
    cuuint32_t of[4];
};

inline bool describe_as(CUtensorMap *to, CUtensorMapDataType type, CUtensorMapSwizzle swizzle,
                        const void *base, const box &b) {
    static const cuuint32_t every[4] = {1, 1, 1, 1};
    const encode_fn encode = find_encode();
    return encode &&
           encode(to, type, b.rank, const_cast<void *>(base), b.dims, b.strides, b.of, every,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

/* Rows of 128 bytes, swizzled. */
inline bool describe(CUtensorMap *to, const void *base, const box &b) {
    return describe_as(to, CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_SWIZZLE_128B, base, b);
}

/* As it lies; the first coordinate of a copy is a multiple of 16 bytes. */
inline bool describe_flat(CUtensorMap *to, CUtensorMapDataType type, const void *base,
                          const box &b) {
    return describe_as(to, type, CU_TENSOR_MAP_SWIZZLE_NONE, base, b);
}

/* Places of a tensor map over addresses that are `range` apart. */
inline cuuint64_t places_of(size_t range) {
    return range / PLACE_BYTES + 1;
}

constexpr int SHARED_BYTES = 232448 - 1024, MAX_STAGES = 32;

/* Units of work that there may be, whatever the experts have. */
template <typename S>
int64_t units_at_most(const fp8_product &p, int32_t outs_of_unit) {
    const int64_t filled = p.x.rows < p.n_experts ? p.x.rows : p.n_experts;
    const int64_t units_m = S::units_m(p.x.rows) + (p.offset ? filled : 0);
    return units_m * blocks_for(p.w->rows, outs_of_unit);
}

/* As many blocks as there is work for and the GPU holds; they may begin before the kernel before them ends. */
template <typename K, typename... A>
void launch_blocks(hd_stream *s, K kernel, int64_t units, int threads, int cluster,
                   size_t shared, const A &...args) {
    const int64_t most = hd_stream_workers(s) / cluster;
    cudaLaunchAttribute how[2] = {};
    how[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    how[0].val.programmaticStreamSerializationAllowed = 1;
    how[1].id = cudaLaunchAttributeClusterDimension;
    how[1].val.clusterDim = {(unsigned)cluster, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)((units < most ? units : most) * cluster));
    config.blockDim = dim3((unsigned)threads);
    config.dynamicSmemBytes = shared;
    config.stream = hd_cuda_stream(s);
    config.attrs = how;
    config.numAttrs = 2;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES);
    cudaLaunchKernelEx(&config, kernel, args...);
}

inline bool aligned(const hd_weight *w) {
    return (uintptr_t)w->data % PLACE_BYTES == 0 && (uintptr_t)w->scale % PLACE_BYTES == 0;
}

/* Whether an address can be a coordinate. */
inline bool places_fit(const hd_expert_table *t) {
    return t->n <= MAX_EXPERTS && t->one_format && t->one_global && aligned(&t->shape) &&
           t->data_range / PLACE_BYTES < (size_t)MAX_PLACE &&
           t->scale_range / PLACE_BYTES < (size_t)MAX_PLACE;
}

} // namespace

#endif
