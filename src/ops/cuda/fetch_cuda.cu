/* fetch_cuda.cu - moe_fetch: one block finds what is missing and gives it slots, a few others copy
 * it from host memory. The host waits for nothing, so it can be captured. */
#include "ops/cuda/cuda_internal.cuh"

constexpr int PLAN_THREADS = HD_MAX_FETCH_EXPERTS;
/* 16 blocks have a megabyte under way, several times what a bus of 64 GB/s and its latency ask for. */
constexpr int COPY_BLOCKS = 16, COPY_THREADS = 512, AT_ONCE = 8;

/* ---- which experts, and where ---- */

/* The sum of x over the threads up to this one. */
static __device__ int32_t sum_upto(int32_t x) {
    __shared__ int32_t part[PLAN_THREADS / WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    for (int step = 1; step < WARP; step *= 2) {
        const int32_t left = __shfl_up_sync(ALL_LANES, x, step);
        if (lane >= step) x += left;
    }
    if (lane == WARP - 1) part[warp] = x;
    __syncthreads();
    const int32_t before = warp_sum(lane < warp ? part[lane] : 0);
    __syncthreads();
    return x + before;
}

/* When a slot is given away: the lowest first. */
struct turn {
    int64_t used;
    bool later, kept; /* its expert has its turn in a later round, in this one */
};

static __device__ __forceinline__ bool goes_first(const turn &x, int32_t i, const turn &y,
                                                  int32_t k) {
    if (x.later != y.later) return y.later;
    return x.used != y.used ? x.used < y.used : i < k;
}

static __device__ void set_table(const hd_moe_fetch_args &a, int32_t expert, int32_t at) {
    uint8_t *slot = a.slots.memory + at * a.slots.slot_bytes;
    for (int32_t m = 0; m < HD_EXPERT_MATRICES; m++) {
        hd_weight w = a.from[m * a.n_experts + expert];
        w.data = slot + a.layout.data_at[m];
        if (a.layout.scale_bytes[m]) w.scale = slot + a.layout.scale_at[m];
        a.table[m * a.n_experts + expert] = w;
    }
}

static __device__ int64_t bytes_of(const hd_expert_layout &l) {
    int64_t bytes = 0;
    for (int32_t m = 0; m < HD_EXPERT_MATRICES; m++) bytes += l.data_bytes[m] + l.scale_bytes[m];
    return bytes;
}

/* Thread t has expert t, and slot t. */
static __global__ void __launch_bounds__(PLAN_THREADS) plan_fetch(hd_moe_fetch_args a) {
    begin_kernel();
    __shared__ turn turns[HD_MAX_FETCH_EXPERTS];
    __shared__ int32_t victim[HD_MAX_FETCH_EXPERTS];
    const hd_expert_slots &s = a.slots;
    const int32_t t = (int32_t)threadIdx.x, first = a.first ? 0 : *a.end;
    const int64_t now = *s.clock + (a.first ? 1 : 0);
    const bool is_expert = t < a.n_experts;
    const bool has_rows = is_expert && t >= first && a.offset[t + 1] > a.offset[t];
    const int32_t had = has_rows ? s.slot[t] : -1;
    const bool lacks = has_rows && had < 0;
    const int32_t chosen = sum_upto(has_rows), missing = sum_upto(lacks);
    const bool fits = is_expert && chosen <= s.n_slots && missing <= a.most;
    const int32_t end = __syncthreads_count(fits); /* of those from 0 on: before first all fit */
    const bool own = has_rows && t < end;
    const int32_t n_chosen = __syncthreads_count(own), n = __syncthreads_count(own && lacks);

    int32_t expert = -1;
    if (t < s.n_slots) {
        expert = s.holder[t];
        const bool wanted = expert >= first && a.offset[expert + 1] > a.offset[expert];
        turns[t] = {s.used[t], wanted && expert >= end, wanted && expert < end};
    }
    __syncthreads();
    if (t < s.n_slots && !turns[t].kept) {
        int32_t before = 0;
        for (int32_t k = 0; k < s.n_slots; k++) {
            before += k != t && !turns[k].kept && goes_first(turns[k], k, turns[t], t);
        }
        if (before < n) {
            victim[before] = t;
            if (expert >= 0) s.slot[expert] = -1;
        }
    }
    __syncthreads();
    if (own) {
        const int32_t at = lacks ? victim[missing - 1] : had;
        if (lacks) {
            s.slot[t] = at;
            s.holder[at] = t;
            a.todo[missing] = t;
            a.todo[a.n_experts + missing] = at;
        }
        s.used[at] = now;
        set_table(a, t, at);
    }
    const int32_t low = a.offset[first], high = a.offset[end];
    for (int32_t e = t; e <= a.n_experts; e += PLAN_THREADS) {
        a.round_offset[e] = min(max(a.offset[e], low), high);
    }
    if (t > 0) return;
    *s.clock = now;
    *a.end = end;
    a.todo[0] = n;
    hd_fetch_counts c = *a.counts;
    c.used += n_chosen;
    c.staged += n_chosen - n;
    c.fetched += n;
    c.fetched_bytes += n * bytes_of(a.layout);
    *a.counts = c;
    if (a.seen) *a.seen = c;
}

/* ---- copies ---- */

/* The part of an array that the grid's threads copy together, in words that both ends are aligned
 * for. */
template <typename T>
static __device__ void copy_words(uint8_t *to, const uint8_t *from, int64_t n, int64_t thread,
                                  int64_t n_threads) {
    T *out = reinterpret_cast<T *>(to);
    const T *in = reinterpret_cast<const T *>(from);
    int64_t i = thread;
    for (; i + (AT_ONCE - 1) * n_threads < n; i += AT_ONCE * n_threads) {
        T word[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) word[k] = __ldcs(in + i + k * n_threads);
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) out[i + k * n_threads] = word[k];
    }
    for (; i < n; i += n_threads) out[i] = __ldcs(in + i);
}

/* A matrix of a file may lie at any address. */
static __device__ void copy_array(uint8_t *to, const void *source, int64_t bytes, int64_t thread,
                                  int64_t n_threads) {
    const uint8_t *from = static_cast<const uint8_t *>(source);
    const uintptr_t at = reinterpret_cast<uintptr_t>(from);
    const int64_t whole = bytes / 16 * 16;
    if (at % 16 == 0) {
        copy_words<uint4>(to, from, whole / 16, thread, n_threads);
    } else if (at % 8 == 0) {
        copy_words<uint2>(to, from, whole / 8, thread, n_threads);
    } else if (at % 4 == 0) {
        copy_words<unsigned int>(to, from, whole / 4, thread, n_threads);
    } else {
        copy_words<unsigned char>(to, from, whole, thread, n_threads);
    }
    copy_words<unsigned char>(to + whole, from + whole, bytes - whole, thread, n_threads);
}

static __global__ void __launch_bounds__(COPY_THREADS) copy_experts(hd_moe_fetch_args a) {
    begin_kernel();
    const int32_t n = a.todo[0];
    const int64_t n_threads = (int64_t)gridDim.x * COPY_THREADS;
    const int64_t thread = (int64_t)blockIdx.x * COPY_THREADS + threadIdx.x;
    for (int32_t i = 1; i <= n; i++) {
        const int32_t expert = a.todo[i], at = a.todo[a.n_experts + i];
        uint8_t *slot = a.slots.memory + at * a.slots.slot_bytes;
        for (int32_t m = 0; m < HD_EXPERT_MATRICES; m++) {
            const hd_weight &w = a.from[m * a.n_experts + expert];
            copy_array(slot + a.layout.data_at[m], w.data, a.layout.data_bytes[m], thread,
                       n_threads);
            copy_array(slot + a.layout.scale_at[m], w.scale, a.layout.scale_bytes[m], thread,
                       n_threads);
        }
    }
}

void hd_moe_fetch_cuda(hd_stream *s, const hd_moe_fetch_args *a) {
    if (a->n_experts > HD_MAX_FETCH_EXPERTS || a->slots.n_slots > HD_MAX_FETCH_EXPERTS) {
        return hd_stream_fail(s, HD_EUNSUPPORTED, "moe_fetch: too many experts in a layer");
    }
    cudaStream_t queue = hd_cuda_stream(s);
    launch_kernel(queue, plan_fetch, dim3(1), PLAN_THREADS, 0, 1, *a);
    launch_kernel(queue, copy_experts, dim3(COPY_BLOCKS), COPY_THREADS, 0, 1, *a);
    hd_cuda_check(s, "moe_fetch");
}
