/* gemm_sm90_internal.cuh - what the products on Hopper share: which tiles a block takes, the ring
 * of stages, and how they are launched. */
#ifndef HD_OPS_CUDA_GEMM_SM90_INTERNAL_CUH
#define HD_OPS_CUDA_GEMM_SM90_INTERNAL_CUH

#include "ops/cuda/official_internal.cuh"
#include "ops/cuda/tensor_map_sm90_internal.cuh"
#include "ops/cuda/wgmma_sm90_internal.cuh"

namespace {

constexpr int MAX_EXPERTS = 384, ROW_BYTES = 128, WARPGROUP = 128, M_GROUP = 8;

/* Two blocks of a cluster may have the same rows of x: each copies half of them, to both. */
enum sharing { ALONE, SHARED };

/* What a launch multiplies with: one matrix; a pair with the same columns; a gate and an up matrix of
 * one shape, for swiglu; the experts' matrices; or those of a gate and an up table. */
enum matrices { ONE, PAIR, GATED, EXPERTS, GATED_EXPERTS };

template <matrices M>
constexpr bool by_expert = M == EXPERTS || M == GATED_EXPERTS;

template <matrices M>
constexpr bool gated = M == GATED || M == GATED_EXPERTS;

/* The second matrix of a pair, or the up ones. */
struct second_matrix {
    float *out;
    int64_t out_stride;
    const uint8_t *data, *scale;
    const hd_weight *slots;
    float global;
    int32_t outs;
    bool pairs;
};

struct job {
    float *out;
    int64_t out_stride;
    const uint8_t *data, *scale; /* of W; the lowest of the slots' */
    const hd_weight *slots;      /* [n_experts] device memory, or NULL */
    const int32_t *offset;
    float global;
    int32_t scale_type, n_experts, from, rows, outs, spans, stages, sets; /* x: rows from on */
    bool pairs; /* outputs may be written in pairs */
    uint64_t keep_w;
    second_matrix second;
    fp8_swiglu swiglu; /* of gated matrices */
};

struct tile {
    int32_t expert, row, n_rows, out; /* first row of x, how many; first row of W */
    bool second;                      /* of the second matrix */
};

template <matrices M>
__device__ __forceinline__ int32_t data_place(const job &j, const tile &t) {
    if (!by_expert<M>) return 0;
    const bool second = gated<M> && t.second;
    const hd_weight *slots = second ? j.second.slots : j.slots;
    const uint8_t *lowest = second ? j.second.data : j.data;
    return (int32_t)((static_cast<const uint8_t *>(slots[t.expert].data) - lowest) /
                     PLACE_BYTES);
}

template <matrices M>
__device__ __forceinline__ const uint8_t *scale_of_tile(const job &j, const tile &t) {
    const bool second = (M == PAIR || gated<M>)&&t.second;
    if (!by_expert<M>) return second ? j.second.scale : j.scale;
    const hd_weight *slots = second ? j.second.slots : j.slots;
    return static_cast<const uint8_t *>(slots[t.expert].scale);
}

/* The factor of a row of x, or of a place. */
__device__ __forceinline__ float swiglu_weight(const job &j, int32_t row) {
    if (!j.swiglu.weight) return 1.0f;
    const int32_t place = j.from + row;
    return j.swiglu.weight[j.swiglu.assignment ? j.swiglu.assignment[place] : place];
}

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

template <int H, int BN, sharing SHARE, matrices M>
struct schedule {
    const int32_t *upto; /* [n_experts + 1] units before each expert, in shared memory */
    int32_t unit, step, n_outs;
    bool half = false; /* the gate's tile was given, the up one follows */

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

    __device__ int32_t units_of_pair(const job &j) const {
        return n_outs + (j.second.outs + BN - 1) / BN;
    }

    /* Rows of x vary first, a few tiles of them, so that a matrix is read from memory once. A gate's
     * tile is followed by the up one at the same place; t is then as it was left. */
    __device__ bool next(const job &j, uint32_t rank, tile *t) {
        if constexpr (gated<M>) {
            half = !half;
            t->second = !half;
            if (!half) return true;
        }
        int32_t at = unit, first = 0, rows = j.rows, n_outs = this->n_outs;
        t->expert = 0;
        if constexpr (M == PAIR) {
            if (unit >= units_m(rows) * units_of_pair(j)) return false;
            t->second = unit >= units_m(rows) * n_outs;
            if (t->second) {
                at -= units_m(rows) * n_outs;
                n_outs = units_of_pair(j) - n_outs;
            }
        } else if constexpr (by_expert<M>) {
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

/* Units of work before each expert; one warp. All offsets are on their way at once. */
template <typename S>
__device__ void count_units(const job &j, int32_t *upto, int32_t n_outs) {
    constexpr int EACH = MAX_EXPERTS / WARP;
    const int lane = threadIdx.x % WARP;
    int32_t own[EACH], before = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        own[i] = i * WARP + lane < j.n_experts ? rows_of(j, i * WARP + lane).n : 0;
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int32_t e = i * WARP + lane, units = S::units_m(own[i]) * n_outs;
        int32_t sum = units;
        for (int step = 1; step < WARP; step *= 2) {
            const int32_t left = __shfl_up_sync(ALL_LANES, sum, step);
            if (lane >= step) sum += left;
        }
        if (e < j.n_experts) upto[e] = before + sum - units;
        before += __shfl_sync(ALL_LANES, sum, WARP - 1);
    }
    if (lane == 0) upto[j.n_experts] = before;
}

/* Asks for the experts' addresses, before they are final: a warp's by each block. */
__device__ __forceinline__ void prefetch_slots(const hd_weight *slots, int32_t n) {
    const int32_t e = (int32_t)(blockIdx.x * WARP + threadIdx.x);
    if (threadIdx.x < WARP && e < n)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(&slots[e].data));
}

/* Shared memory of a multiprocessor, of which a block takes some itself; what one block may have. */
constexpr int SHARED_OF_SM = 233472, SHARED_OF_BLOCK = 1024;
constexpr int SHARED_BYTES = SHARED_OF_SM - 2 * SHARED_OF_BLOCK, MAX_STAGES = 32;

/* Units of work that there may be, whatever the experts have. */
template <typename S>
int64_t units_at_most(const fp8_product &p, int32_t outs_of_unit) {
    const int64_t filled = p.x.rows < p.n_experts ? p.x.rows : p.n_experts;
    const int64_t units_m = S::units_m(p.x.rows) + (p.offset ? filled : 0);
    const bool pair = p.other && !p.swiglu.on;
    const int32_t more = pair ? blocks_for(p.other->rows, outs_of_unit) : 0;
    return units_m * (blocks_for(p.w->rows, outs_of_unit) + more);
}

/* As many blocks as there is work for and the GPU holds, `each` on a multiprocessor. */
template <typename K, typename... A>
void launch_blocks(hd_stream *s, K kernel, int64_t units, int threads, int cluster, int each,
                   size_t shared, const A &...args) {
    const int64_t most = (int64_t)hd_stream_workers(s) * each / cluster;
    hd_cuda_allow_shared((const void *)kernel, SHARED_BYTES);
    launch_kernel(hd_cuda_stream(s), kernel,
                  dim3((unsigned)((units < most ? units : most) * cluster)), threads, shared,
                  cluster, args...);
}

inline bool aligned(const hd_weight *w) {
    return (uintptr_t)w->data % 16 == 0 && (uintptr_t)w->scale % 16 == 0;
}

/* Whether an address of data can be a coordinate. */
inline bool places_fit(const hd_expert_table *t) {
    return t->n <= MAX_EXPERTS && t->one_format && t->one_global && aligned(&t->shape) &&
           (uintptr_t)t->shape.data % PLACE_BYTES == 0 &&
           t->data_range / PLACE_BYTES < (size_t)MAX_PLACE;
}

} // namespace

#endif
