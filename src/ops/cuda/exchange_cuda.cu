/* exchange_cuda.cu - rows between GPUs: each block pushes into the memory of the other members,
 * raises its flag there, waits for theirs and reads what has come (ops/exchange.h).
 *
 * What a peer wrote is read past the first-level cache, which may hold what lay there before.
 *
 * Ranks that share a GPU must not keep each other from running: the kernel that comes next on a stream
 * starts only when this one waits for nobody any more, and few blocks wait. */
#include "ops/cuda/cuda_internal.cuh"
#include "ops/exchange.h"

namespace {

constexpr int RANKS = HD_EXCHANGE_MAX_RANKS, THREADS = 512, BLOCKS = HD_EXCHANGE_BLOCKS;
constexpr int REGION = 16384;   /* floats that arrive in one round of a block */
constexpr int SPINS = 1024;     /* between two looks at the host's word */
constexpr int32_t NOWHERE = -1; /* first row of a slot: those that arrived had no room */

/* Where a member's rows of a dispatch or a combine lie. */
struct pointers {
    const float *rows, *weight;
    const int32_t *offset, *assignment;
};

/* By the kind of group and the block that uses it. */
struct sync_state {
    uint32_t came[RANKS];    /* written by each member: its exchanges so far */
    uint32_t ticket;         /* this rank's own */
    pointers from[2][RANKS]; /* written by each member, by turns */
};

struct rank_memory {
    sync_state at[HD_EXCHANGE_GROUPS][BLOCKS];
    int32_t over; /* 1: this rank has given up an exchange, and makes no other */
    int32_t in_first[HD_EXCHANGE_INFLIGHT]
                    [HD_EXCHANGE_SLOTS]; /* first row of a slot from a member */
    alignas(256) float region[HD_EXCHANGE_GROUPS][2][BLOCKS][REGION];
};

__device__ __forceinline__ rank_memory &memory_of(const hd_exchange_peers &p, int member) {
    return *static_cast<rank_memory *>(p.memory[member]);
}

__device__ __forceinline__ sync_state &sync_of(const hd_exchange_peers &p, int member) {
    return memory_of(p, member).at[p.group][blockIdx.x];
}

__device__ __forceinline__ float *region_of(const hd_exchange_peers &p, int member,
                                            uint32_t ticket) {
    return memory_of(p, member).region[p.group][ticket % 2][blockIdx.x];
}

/* ---- members of a group ---- */

__device__ __forceinline__ void raise(uint32_t *flag, uint32_t ticket) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(ticket) : "memory");
}

__device__ __forceinline__ uint32_t look(const uint32_t *flag) {
    uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    return value;
}

/* The host reads it once the kernel is done. */
__device__ __forceinline__ void tell(int32_t *host, int32_t value) {
    *static_cast<volatile int32_t *>(host) = value;
}

/* Waits until a member has come. False: the exchange is given up. */
__device__ bool await_member(const hd_exchange_peers &p, int member, uint32_t ticket) {
    const uint32_t *flag = &sync_of(p, p.index).came[member];
    const volatile int32_t *ended = &p.state->ended;
    uint64_t since = 0;
    for (;;) {
        for (int i = 0; i < SPINS; i++) {
            if ((int32_t)(look(flag) - ticket) >= 0) return true;
        }
        if (*ended) return false;
        const uint64_t now = hd_cuda_clock_ns();
        if (!since) since = now;
        if (now - since < HD_EXCHANGE_MAX_SECONDS * 1000000000ull) continue;
        tell(&p.state->late, 1 + member);
        return false;
    }
}

/* All threads of the block call it, after what the others shall read is written. */
__device__ bool sync_members(const hd_exchange_peers &p, uint32_t ticket) {
    const int k = (int)threadIdx.x;
    bool came = true;
    __syncthreads();
    if (k < p.n && k != p.index) {
        raise(&sync_of(p, k).came[p.index], ticket);
        came = await_member(p, k, ticket);
    }
    const bool over = __syncthreads_or(!came);
    if (over && k == 0) tell(&memory_of(p, p.index).over, 1);
    return !over;
}

/* All threads of the block call it first. A rank that has given up an exchange must not seem to have come
 * to it with what belongs to a later one: the others may still come. */
__device__ bool is_over(const hd_exchange_peers &p) {
    const volatile int32_t *over = &memory_of(p, p.index).over;
    return __syncthreads_or(*over);
}

/* The next exchange of this block. */
__device__ __forceinline__ uint32_t next_ticket(const hd_exchange_peers &p) {
    return sync_of(p, p.index).ticket + 1;
}

__device__ __forceinline__ void keep_ticket(const hd_exchange_peers &p, uint32_t last) {
    if (threadIdx.x == 0) sync_of(p, p.index).ticket = last;
}

/* Synchronizes, and exchanges pointers. What is returned may be read until the next but one exchange. */
__device__ const pointers *exchange_pointers(const hd_exchange_peers &p, const pointers &own) {
    const uint32_t ticket = next_ticket(p);
    const int k = (int)threadIdx.x;
    if (k < p.n) sync_of(p, k).from[ticket % 2][p.index] = own;
    const bool came = sync_members(p, ticket);
    keep_ticket(p, ticket);
    griddepcontrol_launch_dependents();
    return came ? sync_of(p, p.index).from[ticket % 2] : nullptr;
}

/* A pointer that a member wrote, as this GPU reaches it. */
template <typename T>
__device__ __forceinline__ const T *read_pointer(const hd_exchange_peers &p, int member,
                                                 const T *const *at) {
    return reinterpret_cast<const T *>(
        __ldcg(reinterpret_cast<const unsigned long long *>(at)) +
        (unsigned long long)p.shift[member]);
}

/* ---- gather and sum: V floats at a time ---- */

template <int V>
struct vector;
template <>
struct vector<1> {
    using type = float;
};
template <>
struct vector<4> {
    using type = float4;
};

/* Elements of a block in a round: all blocks get some, and a multiple of 4. */
__host__ __device__ inline int64_t elements_each(int64_t n, int blocks, int most) {
    const int64_t each = (n + blocks - 1) / blocks;
    const int64_t even = (each + 3) / 4 * 4;
    return even < most ? even : most;
}

template <int V>
__global__ void __launch_bounds__(THREADS)
    gather(const __grid_constant__ hd_exchange_peers p, const hd_exchange_gather_args a) {
    using vec = typename vector<V>::type;
    griddepcontrol_wait();
    if (is_over(p)) return;
    const int64_t n = (int64_t)a.rows * a.cols;
    const int64_t each = elements_each(n, (int)gridDim.x, REGION);
    uint32_t ticket = next_ticket(p);
    const uint32_t before = ticket - 1;
    for (int64_t base = blockIdx.x * each; base < n; base += gridDim.x * each, ticket++) {
        const int some = (int)(n - base < each ? n - base : each);
        const uint32_t first = (uint32_t)(base % a.cols); /* column */
        for (int i = (int)threadIdx.x * V; i < some; i += THREADS * V) {
            const int32_t col = (int32_t)((first + i) % a.cols) - a.first;
            if (col < 0 || col >= a.own) continue;
            const vec value = *reinterpret_cast<const vec *>(a.x + base + i);
            for (int k = 1; k < p.n; k++) { /* not all at the same member at once */
                const int to = (p.index + k) % p.n;
                *reinterpret_cast<vec *>(region_of(p, to, ticket) + i) = value;
            }
        }
        if (!sync_members(p, ticket)) return;
        if (base + gridDim.x * each >= n) griddepcontrol_launch_dependents();
        const float *in = region_of(p, p.index, ticket);
        for (int i = (int)threadIdx.x * V; i < some; i += THREADS * V) {
            const int32_t col = (int32_t)((first + i) % a.cols) - a.first;
            if (col >= 0 && col < a.own) continue;
            *reinterpret_cast<vec *>(a.x + base + i) =
                __ldcg(reinterpret_cast<const vec *>(in + i));
        }
    }
    if (ticket - 1 != before) keep_ticket(p, ticket - 1);
}

__device__ __forceinline__ float added(float a, float b) {
    return a + b;
}

__device__ __forceinline__ float4 added(float4 a, float4 b) {
    return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}

/* The tree of comm/tree_sum.h, from its leaves. */
template <int MOST, typename vec>
__device__ __forceinline__ vec tree_sum(vec term[MOST], int n) {
#pragma unroll
    for (int step = 1; step < MOST; step *= 2) {
#pragma unroll
        for (int i = 0; i + step < MOST; i += 2 * step) {
            if (i + step < n) term[i] = added(term[i], term[i + step]);
        }
    }
    return term[0];
}

template <int MOST, int V>
__global__ void __launch_bounds__(THREADS)
    sum(const __grid_constant__ hd_exchange_peers p, hd_exchange_sum_args a) {
    using vec = typename vector<V>::type;
    griddepcontrol_wait();
    if (is_over(p)) return;
    const int part = REGION / p.n / 4 * 4; /* of a member in a region */
    const int64_t each = elements_each(a.n, (int)gridDim.x, part);
    uint32_t ticket = next_ticket(p);
    const uint32_t before = ticket - 1;
    for (int64_t base = blockIdx.x * each; base < a.n; base += gridDim.x * each, ticket++) {
        const int some = (int)(a.n - base < each ? a.n - base : each);
        for (int i = (int)threadIdx.x * V; i < some; i += THREADS * V) {
            const vec value = *reinterpret_cast<const vec *>(a.x + base + i);
            for (int k = 1; k < p.n; k++) {
                const int to = (p.index + k) % p.n;
                *reinterpret_cast<vec *>(region_of(p, to, ticket) + p.index * part + i) = value;
            }
        }
        if (!sync_members(p, ticket)) return;
        if (base + gridDim.x * each >= a.n) griddepcontrol_launch_dependents();
        const float *in = region_of(p, p.index, ticket);
        for (int i = (int)threadIdx.x * V; i < some; i += THREADS * V) {
            if (base + i < a.first || base + i >= a.first + a.own) continue;
            vec *to = reinterpret_cast<vec *>(a.x + base + i), term[MOST];
#pragma unroll
            for (int m = 0; m < MOST; m++) {
                if (m < p.n && m != p.index) {
                    term[m] = __ldcg(reinterpret_cast<const vec *>(in + m * part + i));
                } else {
                    term[m] = *to;
                }
            }
            *to = tree_sum<MOST>(term, p.n);
        }
    }
    if (ticket - 1 != before) keep_ticket(p, ticket - 1);
}

/* ---- dispatch ---- */

/* at[0 .. n - 1] becomes the sums of what lies before each; at[n] the sum of all. */
__device__ void prefix_sums(int32_t *at, int n) {
    __shared__ int32_t of_warp[THREADS / WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int each = (n + THREADS - 1) / THREADS, first = (int)threadIdx.x * each;
    int32_t own = 0;
    for (int i = first; i < first + each && i < n; i++) own += at[i];
    int32_t through = own;
    for (int step = 1; step < WARP; step *= 2) {
        const int32_t before = __shfl_up_sync(ALL_LANES, through, step);
        if (lane >= step) through += before;
    }
    if (lane == WARP - 1) of_warp[warp] = through;
    __syncthreads();
    int32_t before = through - own;
    for (int w = 0; w < warp; w++) before += of_warp[w];
    for (int i = first; i < first + each && i < n; i++) {
        const int32_t count = at[i];
        at[i] = before;
        before += count;
    }
    if (threadIdx.x == THREADS - 1) at[n] = before;
    __syncthreads();
}

/* The last of at[0 .. n - 1], which ascend, that is at most i. */
__device__ __forceinline__ int last_not_above(const int32_t *at, int n, int32_t i) {
    int low = 0, high = n - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (at[middle] <= i) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

/* Of the places first .. end - 1, which a member sends to a slot, those of a round; base is the first of all
 * that it sends to the rank of the slot. */
struct places {
    int32_t first, end;
};

__device__ __forceinline__ places places_of_round(places all, int32_t base, int32_t round,
                                                  int32_t most) {
    const int64_t begin = base + (int64_t)round * most, end = begin + most;
    const int64_t first = all.first > begin ? all.first : begin;
    const int64_t last = all.end < end ? all.end : end;
    return first < last ? places{(int32_t)first, (int32_t)last} : places{all.first, all.first};
}

/* A warp copies a row. */
__device__ __forceinline__ void copy_row(float *to, const float *from, int32_t cols) {
    const int lane = threadIdx.x % WARP;
    const bool wide =
        (cols | (int32_t)((uintptr_t)to / 4) | (int32_t)((uintptr_t)from / 4)) % 4 == 0;
    if (wide) {
        float4 *out = reinterpret_cast<float4 *>(to);
        const float4 *in = reinterpret_cast<const float4 *>(from);
        for (int32_t c = lane; c < cols / 4; c += WARP) out[c] = __ldcg(in + c);
    } else {
        for (int32_t c = lane; c < cols; c += WARP) to[c] = __ldcg(from + c);
    }
}

constexpr int SENT = 2 * (HD_EXCHANGE_SLOTS + 1) * (int)sizeof(int32_t);

/* Slot by slot, and of each the members in order. */
__global__ void __launch_bounds__(THREADS)
    dispatch(const __grid_constant__ hd_exchange_peers p, hd_exchange_dispatch_args a) {
    extern __shared__ int32_t shared[];
    griddepcontrol_wait();
    if (is_over(p)) return;
    const pointers *from = exchange_pointers(p, {a.x, a.weight, a.offset, a.assignment});
    if (!from) return;
    const int pairs = a.n_slots * p.n;
    int32_t *first = shared, *source = shared + pairs + 1; /* here; at the member */
    for (int t = (int)threadIdx.x; t < pairs; t += THREADS) {
        const int k = t % p.n, e = t / p.n;
        const int32_t *offset = read_pointer(p, k, &from[k].offset) + p.index * a.n_slots;
        const places rows = places_of_round({__ldcg(offset + e), __ldcg(offset + e + 1)},
                                            __ldcg(offset), a.round, a.most[k]);
        source[t] = rows.first;
        first[t] = rows.end - rows.first;
    }
    __syncthreads();
    prefix_sums(first, pairs);
    const int32_t n = first[pairs];
    const bool fits = n <= a.in_rows;
    if (blockIdx.x == 0) {
        int32_t *kept = memory_of(p, p.index).in_first[a.place];
        for (int t = (int)threadIdx.x; t < pairs; t += THREADS) {
            kept[t] = fits ? first[t] : NOWHERE;
        }
        for (int e = (int)threadIdx.x; e <= a.n_slots; e += THREADS) {
            a.in_offset[e] = fits ? first[e * p.n] : 0;
        }
        if (!fits && threadIdx.x == 0) tell(&p.state->too_many, n);
    }
    if (!fits) return;
    const int warps = (int)gridDim.x * (THREADS / WARP);
    for (int32_t i = (int32_t)(blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP); i < n;
         i += warps) {
        const int t = last_not_above(first, pairs, i), k = t % p.n;
        const int32_t choice =
            __ldcg(read_pointer(p, k, &from[k].assignment) + source[t] + i - first[t]);
        copy_row(a.in_x + (int64_t)i * a.cols,
                 read_pointer(p, k, &from[k].rows) + (int64_t)(choice / a.top_k) * a.cols,
                 a.cols);
        if (threadIdx.x % WARP == 0) {
            a.in_weight[i] = __ldcg(read_pointer(p, k, &from[k].weight) + choice);
        }
    }
}

/* The rows that this member sent to a slot lie together there, behind those of the members before
 * it. */
__global__ void __launch_bounds__(THREADS)
    combine(const __grid_constant__ hd_exchange_peers p, hd_exchange_combine_args a) {
    extern __shared__ int32_t shared[];
    griddepcontrol_wait();
    if (is_over(p)) return;
    const pointers *from = exchange_pointers(p, {a.in_y, nullptr, nullptr, nullptr});
    if (!from) return;
    const int slots = a.n_slots * p.n;
    int32_t *offset = shared, *there = shared + slots + 1;
    for (int q = (int)threadIdx.x; q <= slots; q += THREADS) {
        offset[q] = a.offset[q];
        if (q == slots) continue;
        const int32_t *first = memory_of(p, q / a.n_slots).in_first[a.place];
        there[q] = __ldcg(first + q % a.n_slots * p.n + p.index);
    }
    __syncthreads();
    const int warps = (int)gridDim.x * (THREADS / WARP);
    for (int32_t i = (int32_t)(blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP) + offset[0];
         i < offset[slots]; i += warps) {
        const int q = last_not_above(offset, slots, i);
        const places rows = places_of_round({offset[q], offset[q + 1]},
                                            offset[q / a.n_slots * a.n_slots], a.round, a.most);
        if (there[q] == NOWHERE || i < rows.first || i >= rows.end) continue;
        const float *in_y = read_pointer(p, q / a.n_slots, &from[q / a.n_slots].rows);
        copy_row(a.y + (int64_t)i * a.cols,
                 in_y + (int64_t)(there[q] + i - rows.first) * a.cols, a.cols);
    }
}

/* ---- launches ---- */

/* Enough blocks that a thread has one vector: the same on all members. */
unsigned blocks_of(const hd_exchange_peers *p, int64_t n) {
    const unsigned blocks = blocks_for(n, THREADS * 4), most = (unsigned)p->blocks;
    return blocks < most ? blocks : most;
}

bool is_wide(const float *x, int64_t a, int64_t b, int64_t c) {
    return (uintptr_t)x % sizeof(float4) == 0 && (a | b | c) % 4 == 0;
}

void queue_gather(hd_stream *s, const hd_exchange_peers *p, const hd_exchange_gather_args *a) {
    const int64_t n = (int64_t)a->rows * a->cols;
    if (n == 0 || p->n == 1) return;
    const auto kernel = is_wide(a->x, a->cols, a->first, a->own) ? gather<4> : gather<1>;
    launch_kernel(hd_cuda_stream(s), kernel, blocks_of(p, n), THREADS, 0, 1, *p, *a);
    hd_cuda_check(s, "gather between GPUs");
}

template <int MOST>
void queue_sum_of(hd_stream *s, const hd_exchange_peers *p, const hd_exchange_sum_args *a) {
    const auto kernel = is_wide(a->x, a->n, a->first, a->own) ? sum<MOST, 4> : sum<MOST, 1>;
    launch_kernel(hd_cuda_stream(s), kernel, blocks_of(p, a->n), THREADS, 0, 1, *p, *a);
    hd_cuda_check(s, "sum between GPUs");
}

void queue_sum(hd_stream *s, const hd_exchange_peers *p, const hd_exchange_sum_args *a) {
    if (a->n == 0 || p->n == 1) return;
    if (p->n <= 4) {
        queue_sum_of<4>(s, p, a);
    } else {
        queue_sum_of<RANKS>(s, p, a);
    }
}

size_t shared_bytes(const hd_exchange_peers *p, int32_t n_slots) {
    return 2 * ((size_t)n_slots * (size_t)p->n + 1) * sizeof(int32_t);
}

void queue_dispatch(hd_stream *s, const hd_exchange_peers *p,
                    const hd_exchange_dispatch_args *a) {
    launch_kernel(hd_cuda_stream(s), dispatch, (unsigned)p->blocks, THREADS,
                  shared_bytes(p, a->n_slots), 1, *p, *a);
    hd_cuda_check(s, "dispatch between GPUs");
}

void queue_combine(hd_stream *s, const hd_exchange_peers *p,
                   const hd_exchange_combine_args *a) {
    launch_kernel(hd_cuda_stream(s), combine, (unsigned)p->blocks, THREADS,
                  shared_bytes(p, a->n_slots), 1, *p, *a);
    hd_cuda_check(s, "combine between GPUs");
}

void reset(hd_stream *s, void *memory) {
    cudaMemsetAsync(memory, 0, offsetof(rank_memory, in_first), hd_cuda_stream(s));
    hd_cuda_check(s, "exchanges begin anew");
}

static_assert(SENT <= 48 << 10, "shared memory that needs no attribute");

} // namespace

const hd_exchange_ops hd_exchange_ops_cuda = {.bytes = sizeof(rank_memory),
                                              .gather = queue_gather,
                                              .sum = queue_sum,
                                              .dispatch = queue_dispatch,
                                              .combine = queue_combine,
                                              .reset = reset};
