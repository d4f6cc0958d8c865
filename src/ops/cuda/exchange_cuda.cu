/* exchange_cuda.cu - rows between GPUs: each block pushes into the memory of the other members,
 * raises its flag there, waits for theirs and reads what has come (ops/exchange.h). A flag must not overtake
 * what it stands for, and the fence that keeps it behind takes a way to the other GPU and back; so few words
 * carry their flags themselves.
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
constexpr int FEW_BLOCKS = 32;  /* that exchange few words */
constexpr int FEW_WORDS = 4096; /* that arrive in one of them */
constexpr int FEW_EACH = 4;     /* of a thread, at most */
constexpr int FEW_MEMBERS = 8;  /* of a sum of few words */
constexpr int NORM_ROWS = HD_EXCHANGE_NORM_ROWS, NORM_MEMBERS = HD_EXCHANGE_NORM_MEMBERS,
              NORM_COLS = HD_EXCHANGE_NORM_COLS;
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

/* A float, and above it the ticket of its exchange: both arrive at once. */
using word = unsigned long long;

/* What arrives in a block. Every member sends the word of its name, whatever else it has. */
template <int N>
struct words {
    word came[RANKS], at[N];
};

struct rank_memory {
    sync_state at[HD_EXCHANGE_GROUPS][BLOCKS];
    uint32_t few_ticket[HD_EXCHANGE_GROUPS][FEW_BLOCKS], norm_ticket[NORM_ROWS];
    words<FEW_WORDS> few[HD_EXCHANGE_GROUPS][2][FEW_BLOCKS];
    words<NORM_MEMBERS * NORM_COLS> norm[2][NORM_ROWS];
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

struct waiting {
    int spins;
    uint64_t since;
};

constexpr int ANY = -1; /* a member whose number the thread does not know */

/* Whether a thread goes on waiting for a member. False: the exchange is given up. Another thread that knows who
 * is late says so before one that does not. */
__device__ __forceinline__ bool goes_on(const hd_exchange_peers &p, int member, waiting *w) {
    if (++w->spins % SPINS) return true;
    if (*static_cast<const volatile int32_t *>(&p.state->ended)) return false;
    const uint64_t now = hd_cuda_clock_ns();
    if (!w->since) w->since = now;
    const uint64_t seconds = HD_EXCHANGE_MAX_SECONDS + (member == ANY);
    if (now - w->since < seconds * 1000000000ull) return true;
    const bool known = *static_cast<const volatile int32_t *>(&p.state->late);
    if (member != ANY || !known) tell(&p.state->late, 1 + max(member, 0));
    return false;
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

/* ---- few words ----
 *
 * A thread sends its words to the same thread of the other members, and reads what came until each word has
 * the ticket of the exchange. */

__device__ __forceinline__ void send_word(word *to, float x, uint32_t ticket) {
    const word both = (word)ticket << 32 | __float_as_uint(x);
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(both) : "memory");
}

__device__ __forceinline__ word look_word(const word *at) {
    word both;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(both) : "l"(at) : "memory");
    return both;
}

/* Zero is of no exchange, and exchanges alternate. */
__device__ __forceinline__ uint32_t ticket_after(uint32_t last) {
    return last == UINT32_MAX ? 2 : last + 1;
}

/* Words of which wanted has a bit, `apart` words from each other. False: the exchange is given up. */
template <int N>
__device__ __forceinline__ bool take_words(const hd_exchange_peers &p, int member,
                                           const word *from, int apart, uint32_t wanted,
                                           uint32_t ticket, float (&out)[N]) {
    word both[N];
    waiting w = {};
    for (;;) {
        bool came = true;
#pragma unroll
        for (int i = 0; i < N; i++) {
            both[i] = (word)ticket << 32;
            if (wanted >> i & 1) both[i] = look_word(from + (int64_t)i * apart);
        }
#pragma unroll
        for (int i = 0; i < N; i++) came = came && (uint32_t)(both[i] >> 32) == ticket;
        if (came) break;
        if (!goes_on(p, member, &w)) return false;
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        if (wanted >> i & 1) out[i] = __uint_as_float((uint32_t)both[i]);
    }
    return true;
}

/* A member of which a block gets no word comes, too: else it could be an exchange behind. */
template <int N>
__device__ __forceinline__ void send_name(const hd_exchange_peers &p, words<N> *to,
                                          uint32_t ticket) {
    send_word(&to->came[p.index], 0.0f, ticket);
}

template <int N>
__device__ __forceinline__ bool take_name(const hd_exchange_peers &p, const words<N> &here,
                                          uint32_t ticket) {
    const int k = (int)threadIdx.x;
    float name[1];
    return k >= p.n || k == p.index || take_words<1>(p, k, &here.came[k], 0, 1, ticket, name);
}

/* All threads of the block call it; true: all of them have all. */
__device__ __forceinline__ bool all_came(const hd_exchange_peers &p, bool came) {
    const bool over = __syncthreads_or(!came);
    if (over && threadIdx.x == 0) tell(&memory_of(p, p.index).over, 1);
    return !over;
}

__device__ __forceinline__ words<FEW_WORDS> *few_of(const hd_exchange_peers &p, int member,
                                                    uint32_t ticket) {
    return &memory_of(p, member).few[p.group][ticket % 2][blockIdx.x];
}

__global__ void __launch_bounds__(THREADS)
    few_gather(const __grid_constant__ hd_exchange_peers p, const hd_exchange_gather_args a) {
    griddepcontrol_wait();
    const int thread = (int)threadIdx.x, n = a.rows * a.cols;
    const int each = (int)elements_each(n, (int)gridDim.x, FEW_EACH * THREADS);
    const int base = (int)blockIdx.x * each, some = min(n - base, each);
    uint32_t *kept = &memory_of(p, p.index).few_ticket[p.group][blockIdx.x];
    const uint32_t ticket = ticket_after(*kept);
    bool came = !*static_cast<const volatile int32_t *>(&memory_of(p, p.index).over);
    uint32_t wanted = 0;
    float x[FEW_EACH];
    if (came) {
        if (thread < p.n && thread != p.index) send_name(p, few_of(p, thread, ticket), ticket);
#pragma unroll
        for (int e = 0; e < FEW_EACH; e++) {
            const int i = e * THREADS + thread, col = (base + i) % a.cols - a.first;
            if (i >= some) continue;
            if (col < 0 || col >= a.own) {
                wanted |= 1u << e;
                continue;
            }
            x[e] = a.x[base + i];
            for (int k = 1; k < p.n; k++) { /* not all at the same member at once */
                send_word(&few_of(p, (p.index + k) % p.n, ticket)->at[i], x[e], ticket);
            }
        }
        const words<FEW_WORDS> &here = *few_of(p, p.index, ticket);
        came = take_words(p, ANY, here.at + thread, THREADS, wanted, ticket, x);
        came = take_name(p, here, ticket) && came;
    }
    if (!all_came(p, came)) return;
    griddepcontrol_launch_dependents();
#pragma unroll
    for (int e = 0; e < FEW_EACH; e++) {
        if (wanted >> e & 1) a.x[base + e * THREADS + thread] = x[e];
    }
    if (thread == 0) *kept = ticket;
}

/* What a member sends lies together. */
template <int MOST>
__global__ void __launch_bounds__(THREADS)
    few_sum(const __grid_constant__ hd_exchange_peers p, const hd_exchange_sum_args a) {
    constexpr int EACH = FEW_WORDS / MOST / THREADS, PART = EACH * THREADS;
    griddepcontrol_wait();
    const int thread = (int)threadIdx.x, n = (int)a.n;
    const int each = (int)elements_each(n, (int)gridDim.x, PART);
    const int base = (int)blockIdx.x * each, some = min(n - base, each);
    uint32_t *kept = &memory_of(p, p.index).few_ticket[p.group][blockIdx.x];
    const uint32_t ticket = ticket_after(*kept);
    bool came = !*static_cast<const volatile int32_t *>(&memory_of(p, p.index).over);
    uint32_t wanted = 0;
    float term[MOST][EACH], own[EACH];
    if (came) {
        if (thread < p.n && thread != p.index) send_name(p, few_of(p, thread, ticket), ticket);
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const int i = e * THREADS + thread;
            own[e] = 0.0f;
            if (i >= some) continue;
            wanted |= 1u << e;
            own[e] = a.x[base + i];
            for (int k = 1; k < p.n; k++) {
                const int to = (p.index + k) % p.n;
                send_word(&few_of(p, to, ticket)->at[p.index * PART + i], own[e], ticket);
            }
        }
        const words<FEW_WORDS> &here = *few_of(p, p.index, ticket);
#pragma unroll
        for (int m = 0; m < MOST; m++) {
            const bool other = m < p.n && m != p.index;
#pragma unroll
            for (int e = 0; e < EACH; e++) term[m][e] = own[e];
            came = take_words(p, m, here.at + m * PART + thread, THREADS, other ? wanted : 0,
                              ticket, term[m]) &&
                   came;
        }
        came = take_name(p, here, ticket) && came;
    }
    if (!all_came(p, came)) return;
    griddepcontrol_launch_dependents();
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        const int i = base + e * THREADS + thread;
        if (!(wanted >> e & 1) || i < a.first || i >= a.first + a.own) continue;
        float of[MOST];
#pragma unroll
        for (int m = 0; m < MOST; m++) of[m] = term[m][e];
        a.x[i] = tree_sum<MOST>(of, p.n);
    }
    if (thread == 0) *kept = ticket;
}

/* ---- few rows, with the residual and its norm: a block has a row, as in rows_cuda.cu, whose order of sums
 * this is ---- */

__device__ __forceinline__ words<NORM_MEMBERS * NORM_COLS> *norm_of(const hd_exchange_peers &p,
                                                                    int member,
                                                                    uint32_t ticket) {
    return &memory_of(p, member).norm[ticket % 2][blockIdx.x];
}

/* MOST: members of a sum; 1: a gather. */
template <int N, int TURNS, int MOST>
__global__ void __launch_bounds__(N, 1)
    norm(const __grid_constant__ hd_exchange_peers p, const hd_exchange_norm_args args) {
    constexpr int EACH = TURNS * NORM_EACH;
    const hd_add_norm_args &a = args.norm;
    const int thread = (int)threadIdx.x;
    float weight[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int c = thread + i * N;
        weight[i] = load_now(a.weight + c, c < a.cols);
    }
    griddepcontrol_wait();
    uint32_t *kept = &memory_of(p, p.index).norm_ticket[blockIdx.x], ticket = *kept;
    bool came = !*static_cast<const volatile int32_t *>(&memory_of(p, p.index).over);
    for (int32_t r = (int32_t)blockIdx.x; r < a.rows; r += (int32_t)gridDim.x) {
        cuda_act *x = acts(a.x) + (int64_t)r * a.cols;
        const cuda_act *y = acts(a.y) + (int64_t)r * a.cols;
        float own[EACH], more[EACH];
        uint32_t wanted = 0;
        ticket = ticket_after(ticket);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int c = thread + i * N;
            const bool has =
                MOST > 1 ? c < a.cols : c >= args.first && c < args.first + args.own;
            more[i] = load_now(y + c, has);
            if (c < a.cols && (MOST > 1 || !has)) wanted |= 1u << i;
        }
        if (came) {
            if (thread < p.n && thread != p.index) {
                send_name(p, norm_of(p, thread, ticket), ticket);
            }
            for (int k = 1; k < p.n; k++) {
                const int to = (p.index + k) % p.n;
                word *there = norm_of(p, to, ticket)->at + (MOST > 1 ? p.index * NORM_COLS : 0);
#pragma unroll
                for (int i = 0; i < EACH; i++) {
                    const int c = thread + i * N;
                    if (MOST > 1 ? c < a.cols : c < a.cols && !(wanted >> i & 1)) {
                        send_word(there + c, more[i], ticket);
                    }
                }
            }
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int c = thread + i * N;
            own[i] = load_now(x + c, c < a.cols);
        }
        const words<NORM_MEMBERS *NORM_COLS> &here = *norm_of(p, p.index, ticket);
#pragma unroll
        for (int t = 0; t < TURNS; t++) {
            float term[MOST][NORM_EACH];
#pragma unroll
            for (int m = 0; m < MOST; m++) {
                const bool other = MOST == 1 || (m < p.n && m != p.index);
#pragma unroll
                for (int i = 0; i < NORM_EACH; i++) term[m][i] = more[t * NORM_EACH + i];
                came =
                    came && take_words(p, MOST == 1 ? ANY : m,
                                       here.at + m * NORM_COLS + t * NORM_EACH * N + thread, N,
                                       other ? wanted >> t * NORM_EACH : 0, ticket, term[m]);
            }
#pragma unroll
            for (int i = 0; i < NORM_EACH; i++) {
                float of[MOST];
#pragma unroll
                for (int m = 0; m < MOST; m++) of[m] = term[m][i];
                more[t * NORM_EACH + i] = MOST == 1 ? of[0] : tree_sum<MOST>(of, p.n);
            }
        }
        came = came && take_name(p, here, ticket);
        if (!all_came(p, came)) return;
        if (r + (int32_t)gridDim.x >= a.rows) griddepcontrol_launch_dependents();
        double sum = 0.0;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int c = thread + i * N;
            own[i] += more[i];
            if (c < a.cols) x[c] = narrow(own[i]);
            sum = fma((double)own[i], (double)own[i], sum);
        }
        sum = block_sum<N>(sum);
        const float scale = (float)(1.0 / sqrt(sum / a.cols + (double)a.eps));
        cuda_act *out = acts(a.out) + (int64_t)r * a.cols;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int c = thread + i * N;
            if (c < a.cols) out[c] = narrow(own[i] * scale * weight[i]);
        }
    }
    if (thread == 0) *kept = ticket;
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

/* A warp reads a row that pack_rows wrote. Groups have a multiple of 4 columns. */
__device__ __forceinline__ void unpack_row(float *to, const uint8_t *from,
                                           const hd_exchange_dispatch_args &a) {
    const int lane = threadIdx.x % WARP;
    const uint32_t *codes = reinterpret_cast<const uint32_t *>(from);
    const float *scales = reinterpret_cast<const float *>(from + a.row_scales);
    const bool wide = (a.cols | (int32_t)((uintptr_t)to / 4)) % 4 == 0;
    for (int32_t c = 4 * lane; c < a.cols; c += 4 * WARP) {
        const uint32_t four = __ldcg(codes + c / 4);
        const float scale = __ldcg(scales + c / a.group);
        float4 v;
        v.x = hd_rounded_e4m3(four & 0xffu) * scale;
        v.y = hd_rounded_e4m3(four >> 8 & 0xffu) * scale;
        v.z = hd_rounded_e4m3(four >> 16 & 0xffu) * scale;
        v.w = hd_rounded_e4m3(four >> 24) * scale;
        if (wide) {
            *reinterpret_cast<float4 *>(to + c) = v;
            continue;
        }
        to[c] = v.x;
        if (c + 1 < a.cols) to[c + 1] = v.y;
        if (c + 2 < a.cols) to[c + 2] = v.z;
        if (c + 3 < a.cols) to[c + 3] = v.w;
    }
}

constexpr int SENT = 2 * (HD_EXCHANGE_SLOTS + 1) * (int)sizeof(int32_t);

/* Slot by slot, and of each the members in order. */
__global__ void __launch_bounds__(THREADS)
    dispatch(const __grid_constant__ hd_exchange_peers p, hd_exchange_dispatch_args a) {
    extern __shared__ int32_t shared[];
    griddepcontrol_wait();
    if (is_over(p)) return;
    const pointers *from = exchange_pointers(
        p, {static_cast<const float *>(a.x), a.weight, a.offset, a.assignment});
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
        const float *x = read_pointer(p, k, &from[k].rows);
        const int64_t row = choice / a.top_k;
        if (a.group) {
            unpack_row(a.in_x + (int64_t)i * a.cols,
                       reinterpret_cast<const uint8_t *>(x) + row * a.row_bytes, a);
        } else {
            copy_row(a.in_x + (int64_t)i * a.cols, x + row * a.cols, a.cols);
        }
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

/* Of n floats, `each` of which one block of few words takes; 0: they are not few. */
unsigned few_blocks(const hd_exchange_peers *p, int64_t n, int64_t each) {
    const int most = p->blocks < FEW_BLOCKS ? p->blocks : FEW_BLOCKS;
    if (n > most * each) return 0;
    const unsigned blocks = blocks_for(n, THREADS);
    return blocks < (unsigned)most ? blocks : (unsigned)most;
}

void queue_gather(hd_stream *s, const hd_exchange_peers *p, const hd_exchange_gather_args *a) {
    const int64_t n = (int64_t)a->rows * a->cols;
    if (n == 0 || p->n == 1) return;
    if (const unsigned blocks = few_blocks(p, n, FEW_EACH * THREADS)) {
        launch_kernel(hd_cuda_stream(s), few_gather, blocks, THREADS, 0, 1, *p, *a);
        hd_cuda_check(s, "gather of few words between GPUs");
        return;
    }
    const auto kernel = is_wide(a->x, a->cols, a->first, a->own) ? gather<4> : gather<1>;
    launch_kernel(hd_cuda_stream(s), kernel, blocks_of(p, n), THREADS, 0, 1, *p, *a);
    hd_cuda_check(s, "gather between GPUs");
}

template <int MOST>
bool queue_few_sum(hd_stream *s, const hd_exchange_peers *p, const hd_exchange_sum_args *a) {
    const unsigned blocks = few_blocks(p, a->n, FEW_WORDS / MOST);
    if (!blocks) return false;
    launch_kernel(hd_cuda_stream(s), few_sum<MOST>, blocks, THREADS, 0, 1, *p, *a);
    hd_cuda_check(s, "sum of few words between GPUs");
    return true;
}

bool sums_few(hd_stream *s, const hd_exchange_peers *p, const hd_exchange_sum_args *a) {
    if (p->n == 2) return queue_few_sum<2>(s, p, a);
    if (p->n <= 4) return queue_few_sum<4>(s, p, a);
    return p->n <= FEW_MEMBERS && queue_few_sum<FEW_MEMBERS>(s, p, a);
}

template <int MOST>
void queue_sum_of(hd_stream *s, const hd_exchange_peers *p, const hd_exchange_sum_args *a) {
    const auto kernel = is_wide(a->x, a->n, a->first, a->own) ? sum<MOST, 4> : sum<MOST, 1>;
    launch_kernel(hd_cuda_stream(s), kernel, blocks_of(p, a->n), THREADS, 0, 1, *p, *a);
    hd_cuda_check(s, "sum between GPUs");
}

void queue_sum(hd_stream *s, const hd_exchange_peers *p, const hd_exchange_sum_args *a) {
    if (a->n == 0 || p->n == 1 || sums_few(s, p, a)) return;
    if (p->n <= 4) {
        queue_sum_of<4>(s, p, a);
    } else {
        queue_sum_of<RANKS>(s, p, a);
    }
}

template <int N, int TURNS>
void queue_norm_of(hd_stream *s, const hd_exchange_peers *p, const hd_exchange_norm_args *a) {
    const auto kernel = !a->sums    ? norm<N, TURNS, 1>
                        : p->n == 2 ? norm<N, TURNS, 2>
                                    : norm<N, TURNS, NORM_MEMBERS>;
    const unsigned rows = (unsigned)a->norm.rows, most = (unsigned)p->blocks;
    launch_kernel(hd_cuda_stream(s), kernel, rows < most ? rows : most, N, 0, 1, *p, *a);
    hd_cuda_check(s, "exchange and norm between GPUs");
}

void queue_norm(hd_stream *s, const hd_exchange_peers *p, const hd_exchange_norm_args *a) {
    if (a->norm.rows == 0) return;
    if (!norm_is_wide(a->norm.cols)) {
        queue_norm_of<NORM_NARROW, 1>(s, p, a);
    } else if (a->norm.cols <= NORM_WIDE * NORM_EACH) {
        queue_norm_of<NORM_WIDE, 1>(s, p, a);
    } else {
        queue_norm_of<NORM_WIDE, 2>(s, p, a);
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

static_assert(FEW_EACH * THREADS <= FEW_WORDS && NORM_COLS <= 2 * NORM_WIDE * NORM_EACH,
              "room for words, threads for columns");
static_assert(SENT <= 48 << 10, "shared memory that needs no attribute");

} // namespace

const hd_exchange_ops hd_exchange_ops_cuda = {.bytes = sizeof(rank_memory),
                                              .gather = queue_gather,
                                              .sum = queue_sum,
                                              .norm = queue_norm,
                                              .dispatch = queue_dispatch,
                                              .combine = queue_combine,
                                              .reset = reset};
