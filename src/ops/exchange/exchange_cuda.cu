/* exchange_cuda.cu - rows between GPUs: each block pushes into the memory of the other members,
 * raises its flag there, waits for theirs and reads what has come (ops/exchange.h). Few words carry their flags
 * (few_words_cuda.cu).
 *
 * What a peer wrote is read past the first-level cache, which may hold what lay there before.
 *
 * Ranks that share a GPU must not keep each other from running: the kernel that comes next on a stream
 * starts only when this one waits for nobody any more, and few blocks wait. */
#include "ops/exchange/exchange_internal.cuh"

namespace {

constexpr int32_t NOWHERE = -1; /* first row of a slot: those that arrived had no room */

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

/* Waits until a member has come. False: the exchange is given up. */
__device__ bool await_member(const hd_exchange_peers &p, int member, uint32_t ticket) {
    const uint32_t *flag = &sync_of(p, p.index).came[member];
    waiting w = {};
    while ((int32_t)(look(flag) - ticket) < 0) {
        if (!goes_on(p, member, &w)) return false;
    }
    return true;
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

constexpr int SENT = 2 * (HD_EXCHANGE_SLOTS + 1) * (int)sizeof(int32_t);
constexpr int TABLE = 3072; /* numbers: places and choices of the rows of a block */
constexpr int AT_ONCE = 8;  /* vectors of a lane that are on their way */

/* Rows that members send here, as a block sees them: row r of member k is its item r / blocks * p.n + k, if
 * r % blocks is the block. */
struct arrivals {
    int32_t begin[RANKS];      /* place, at each member, of the first that comes */
    int32_t before[RANKS + 1]; /* that come from the members before; [n]: all */
    int32_t items;             /* of this block */
    /* of an item: how many places it has here; which, [top_k]; of which choices, [top_k] */
    int32_t table[TABLE];
};

/* The last slot of this rank whose rows from member k begin at most at `place` there. */
__device__ __forceinline__ int slot_of_place(const int32_t *source, int slots, int n, int k,
                                             int32_t place) {
    int low = 0, high = slots - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (source[middle * n + k] <= place) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

/* Enters the places of items `from` .. `from + most - 1`. first and source: of slots and members. */
__device__ void find_places(const hd_exchange_peers &p, const hd_exchange_dispatch_args &a,
                            const pointers *with, const int32_t *first, const int32_t *source,
                            arrivals *in, int32_t from, int32_t most) {
    constexpr int READS = 4;
    const int each = 2 * a.top_k + 1, blocks = (int)gridDim.x;
    const int32_t n = in->before[p.n];
    for (int t = (int)threadIdx.x; t < TABLE; t += THREADS) in->table[t] = 0;
    __syncthreads();
    for (int32_t base = (int32_t)threadIdx.x; base < n; base += READS * THREADS) {
        int32_t choice[READS], place[READS];
        int member[READS];
#pragma unroll
        for (int i = 0; i < READS; i++) {
            const int32_t at = base + i * THREADS;
            choice[i] = -1;
            if (at >= n) continue;
            member[i] = last_not_above(in->before, p.n, at);
            place[i] = in->begin[member[i]] + at - in->before[member[i]];
            choice[i] =
                __ldcg(read_pointer(p, member[i], &with[member[i]].assignment) + place[i]);
        }
#pragma unroll
        for (int i = 0; i < READS; i++) {
            const int32_t row = choice[i] / a.top_k;
            if (choice[i] < 0 || row % blocks != (int)blockIdx.x) continue;
            const int32_t item = row / blocks * p.n + member[i];
            atomicMax(&in->items, item + 1);
            if (item < from || item >= from + most) continue;
            const int e = slot_of_place(source, a.n_slots, p.n, member[i], place[i]);
            const int t = e * p.n + member[i];
            const int32_t to = first[t] + place[i] - source[t];
            int32_t *entry = in->table + (item - from) * each;
            const int q = atomicAdd(entry, 1);
            entry[1 + q] = to;
            entry[1 + a.top_k + q] = choice[i];
        }
    }
    __syncthreads();
}

/* A warp reads columns begin .. end - 1 of a row once, and writes them to n rows of `to`, or to the one. */
template <typename vec>
__device__ __forceinline__ void copy_vectors(float *to, const float *row, int32_t cols,
                                             const int32_t *place, int n, int32_t begin,
                                             int32_t end) {
    constexpr int V = sizeof(vec) / sizeof(float);
    const int lane = threadIdx.x % WARP;
    for (int32_t base = begin + lane * V; base < end; base += AT_ONCE * WARP * V) {
        vec x[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int32_t c = base + i * WARP * V;
            if (c < end) x[i] = __ldcg(reinterpret_cast<const vec *>(row + c));
        }
        for (int q = 0; q < n; q++) {
            float *out = to + (place ? (int64_t)place[q] * cols : 0);
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const int32_t c = base + i * WARP * V;
                if (c < end) *reinterpret_cast<vec *>(out + c) = x[i];
            }
        }
    }
}

__device__ __forceinline__ void copy_columns(float *to, const float *row, int32_t cols,
                                             const int32_t *place, int n, int32_t begin,
                                             int32_t end) {
    if ((cols | (int32_t)((uintptr_t)row / 4) | (int32_t)((uintptr_t)to / 4)) % 4 == 0) {
        copy_vectors<float4>(to, row, cols, place, n, begin, end);
    } else {
        copy_vectors<float>(to, row, cols, place, n, begin, end);
    }
}

/* The same of a row that pack_rows wrote: begin and what belongs to a scale are multiples of 4. */
__device__ __forceinline__ void unpack_columns(const hd_exchange_dispatch_args &a,
                                               const uint8_t *row, const int32_t *place, int n,
                                               int32_t begin, int32_t end) {
    const uint32_t *codes = reinterpret_cast<const uint32_t *>(row);
    const float *scales = reinterpret_cast<const float *>(row + a.row_scales);
    const bool wide = (a.cols | (int32_t)((uintptr_t)a.in_x / 4)) % 4 == 0;
    for (int32_t base = begin + threadIdx.x % WARP * 4; base < end;
         base += AT_ONCE * WARP * 4) {
        float4 x[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int32_t c = base + i * WARP * 4;
            if (c >= end) continue;
            const uint32_t four = __ldcg(codes + c / 4);
            const float scale = __ldcg(scales + c / a.group);
            x[i].x = hd_rounded_e4m3(four & 0xffu) * scale;
            x[i].y = hd_rounded_e4m3(four >> 8 & 0xffu) * scale;
            x[i].z = hd_rounded_e4m3(four >> 16 & 0xffu) * scale;
            x[i].w = hd_rounded_e4m3(four >> 24) * scale;
        }
        for (int q = 0; q < n; q++) {
            float *out = a.in_x + (int64_t)place[q] * a.cols;
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const int32_t c = base + i * WARP * 4;
                if (c >= end) continue;
                if (wide) {
                    *reinterpret_cast<float4 *>(out + c) = x[i];
                    continue;
                }
                out[c] = x[i].x;
                if (c + 1 < end) out[c + 1] = x[i].y;
                if (c + 2 < end) out[c + 2] = x[i].z;
                if (c + 3 < end) out[c + 3] = x[i].w;
            }
        }
    }
}

/* Warps take items, and parts of the columns if there are fewer items than warps. */
__device__ void take_rows(const hd_exchange_peers &p, const hd_exchange_dispatch_args &a,
                          const pointers *with, const arrivals &in, int32_t from,
                          int32_t most) {
    constexpr int WARPS = THREADS / WARP;
    const int32_t items = min(in.items - from, most);
    const int parts = items > 0 ? max(1, WARPS / items) : 1;
    const int32_t wide_cols = (a.cols + 3) / 4, part = (wide_cols + parts - 1) / parts * 4;
    for (int32_t i = (int32_t)threadIdx.x / WARP; i < items * parts; i += WARPS) {
        const int32_t item = i / parts, begin = i % parts * part,
                      end = min(begin + part, a.cols);
        const int32_t *entry = in.table + item * (2 * a.top_k + 1);
        if (entry[0] == 0) continue;
        const int k = (from + item) % p.n;
        const int64_t row = (int64_t)((from + item) / p.n) * gridDim.x + blockIdx.x;
        const float *x = read_pointer(p, k, &with[k].rows);
        const int lane = threadIdx.x % WARP, n = i % parts == 0 ? entry[0] : 0;
        const float *weight = read_pointer(p, k, &with[k].weight);
        const int32_t *choice = entry + 1 + a.top_k;
        float own = 0.0f; /* stored once the row is on its way */
        if (lane < n) own = __ldcg(weight + choice[lane]);
        if (a.group) {
            const uint8_t *packed = reinterpret_cast<const uint8_t *>(x) + row * a.row_bytes;
            unpack_columns(a, packed, entry + 1, entry[0], begin, end);
        } else {
            copy_columns(a.in_x, x + row * a.cols, a.cols, entry + 1, entry[0], begin, end);
        }
        if (lane < n) a.in_weight[entry[1 + lane]] = own;
        for (int q = lane + WARP; q < n; q += WARP) {
            a.in_weight[entry[1 + q]] = __ldcg(weight + choice[q]);
        }
    }
}

/* Slot by slot, and of each the members in order. A row with several experts here comes once. */
__global__ void __launch_bounds__(THREADS)
    dispatch(const __grid_constant__ hd_exchange_peers p, const hd_exchange_dispatch_args a) {
    extern __shared__ int32_t shared[];
    __shared__ arrivals in;
    griddepcontrol_wait();
    if (is_over(p)) return;
    const pointers *with = exchange_pointers(
        p, {static_cast<const float *>(a.x), a.weight, a.offset, a.assignment});
    if (!with) return;
    const int pairs = a.n_slots * p.n;
    int32_t *first = shared, *source = shared + pairs + 1; /* here; at the member */
    for (int t = (int)threadIdx.x; t < pairs + p.n; t += THREADS) {
        const int k = t % p.n, e = t < pairs ? t / p.n : 0;
        const int32_t *offset = read_pointer(p, k, &with[k].offset) + p.index * a.n_slots;
        const int32_t end = __ldcg(offset + (t < pairs ? e + 1 : a.n_slots));
        const places rows =
            places_of_round({__ldcg(offset + e), end}, __ldcg(offset), a.round, a.most[k]);
        if (t < pairs) {
            source[t] = rows.first;
            first[t] = rows.end - rows.first;
        } else {
            in.begin[k] = rows.first;
            in.before[k] = rows.end - rows.first;
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        int32_t n = 0;
        for (int k = 0; k <= p.n; k++) {
            const int32_t own = k < p.n ? in.before[k] : 0;
            in.before[k] = n;
            n += own;
        }
        in.items = 0;
    }
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
    const int32_t most = TABLE / (2 * a.top_k + 1);
    int32_t from = 0;
    do {
        find_places(p, a, with, first, source, &in, from, most);
        take_rows(p, a, with, in, from, most);
        from += most;
        __syncthreads();
    } while (from < in.items);
}

/* The rows that this member sent to a slot lie together there, behind those of the members before
 * it. */
__global__ void __launch_bounds__(THREADS, 1)
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
    /* the rows of the next member first, not all from the same one at once, and this rank's own last */
    const int32_t begin = offset[0], n = offset[slots] - begin;
    const int32_t ahead = offset[(p.index + 1) % p.n * a.n_slots] - begin;
    const int warps = (int)gridDim.x * (THREADS / WARP);
    const int parts = a.cols >= 4 * AT_ONCE * WARP * 4 ? 4 : 1;
    const int32_t part = ((a.cols + 3) / 4 + parts - 1) / parts * 4;
    for (int64_t t = blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP; t < (int64_t)n * parts;
         t += warps) {
        const int32_t at = (int32_t)(t / parts) + ahead, i = begin + (at < n ? at : at - n);
        const int q = last_not_above(offset, slots, i);
        const places rows = places_of_round({offset[q], offset[q + 1]},
                                            offset[q / a.n_slots * a.n_slots], a.round, a.most);
        if (there[q] == NOWHERE || i < rows.first || i >= rows.end) continue;
        const float *in_y = read_pointer(p, q / a.n_slots, &from[q / a.n_slots].rows) +
                            (int64_t)(there[q] + i - rows.first) * a.cols;
        const int32_t first = (int32_t)(t % parts) * part, end = min(first + part, a.cols);
        copy_columns(a.y + (int64_t)i * a.cols, in_y, a.cols, nullptr, 1, first, end);
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
    if (n == 0 || p->n == 1 || exchange_few_gather(s, p, a)) return;
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
    if (a->n == 0 || p->n == 1 || exchange_few_sum(s, p, a)) return;
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

static_assert(SENT + sizeof(arrivals) <= 48 << 10, "shared memory that needs no attribute");

} // namespace

const hd_exchange_ops hd_exchange_ops_cuda = {.bytes = sizeof(rank_memory),
                                              .gather = queue_gather,
                                              .sum = queue_sum,
                                              .norm = exchange_norm,
                                              .dispatch = queue_dispatch,
                                              .combine = queue_combine,
                                              .reset = reset};
