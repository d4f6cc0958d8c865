/* exchange_internal.cuh - the memory of exchanges between GPUs, and how a kernel waits for other ranks.
 *
 * Its layout is the same on all ranks. Two files have the kernels: exchange_cuda.cu those whose blocks
 * raise flags, few_words_cuda.cu those whose words carry their flags. */
#ifndef HD_OPS_EXCHANGE_EXCHANGE_INTERNAL_CUH
#define HD_OPS_EXCHANGE_EXCHANGE_INTERNAL_CUH

#include "ops/cuda/cuda_internal.cuh"
#include "ops/exchange.h"

/* True: queued. False: these are not few. */
bool exchange_few_gather(hd_stream *s, const hd_exchange_peers *p,
                         const hd_exchange_gather_args *a);
bool exchange_few_sum(hd_stream *s, const hd_exchange_peers *p, const hd_exchange_sum_args *a);
void exchange_norm(hd_stream *s, const hd_exchange_peers *p, const hd_exchange_norm_args *a);

constexpr int RANKS = HD_EXCHANGE_MAX_RANKS, THREADS = 512, BLOCKS = HD_EXCHANGE_BLOCKS;
constexpr int REGION = 16384;   /* floats that arrive in one round of a block */
constexpr int SPINS = 1024;     /* between two looks at the host's word */
constexpr int FEW_BLOCKS = 32;  /* that exchange few words */
constexpr int FEW_WORDS = 4096; /* that arrive in one of them */
constexpr int NORM_ROWS = HD_EXCHANGE_NORM_ROWS, NORM_MEMBERS = HD_EXCHANGE_NORM_MEMBERS,
              NORM_COLS = HD_EXCHANGE_NORM_COLS;

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

static __device__ __forceinline__ rank_memory &memory_of(const hd_exchange_peers &p,
                                                         int member) {
    return *static_cast<rank_memory *>(p.memory[member]);
}

/* The host reads it once the kernel is done. */
static __device__ __forceinline__ void tell(int32_t *host, int32_t value) {
    *static_cast<volatile int32_t *>(host) = value;
}

struct waiting {
    int spins;
    uint64_t since;
};

constexpr int ANY = -1; /* a member whose number the thread does not know */

/* Whether a thread goes on waiting for a member. False: the exchange is given up. Another thread that knows who
 * is late says so before one that does not. */
static __device__ __forceinline__ bool goes_on(const hd_exchange_peers &p, int member,
                                               waiting *w) {
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

/* Elements of a block in a round: all blocks get some, and a multiple of 4. */
static __host__ __device__ inline int64_t elements_each(int64_t n, int blocks, int most) {
    const int64_t each = (n + blocks - 1) / blocks;
    const int64_t even = (each + 3) / 4 * 4;
    return even < most ? even : most;
}

static __device__ __forceinline__ float added(float a, float b) {
    return a + b;
}

static __device__ __forceinline__ float4 added(float4 a, float4 b) {
    return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}

/* The tree of comm/tree_sum.h, from its leaves. */
template <int MOST, typename vec>
static __device__ __forceinline__ vec tree_sum(vec term[MOST], int n) {
#pragma unroll
    for (int step = 1; step < MOST; step *= 2) {
#pragma unroll
        for (int i = 0; i + step < MOST; i += 2 * step) {
            if (i + step < n) term[i] = added(term[i], term[i + step]);
        }
    }
    return term[0];
}

#endif
