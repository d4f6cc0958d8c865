/* few_words_cuda.cu - few floats between GPUs: each travels with the ticket of its exchange.
 *
 * A flag must not overtake what it stands for, and the fence that keeps it behind takes a way to the other
 * GPU and back. Here nothing waits for a fence: a thread sends its words to the same thread of the other members, and
 * reads what came until each word has the ticket. Halves of the memory by turns and what a block may assume
 * of the others are as in ops/exchange.h. */
#include "ops/exchange/exchange_internal.cuh"

namespace {

constexpr int FEW_EACH = 4;    /* words of a thread, at most */
constexpr int FEW_MEMBERS = 8; /* of a sum */

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

using norm_words = words<NORM_MEMBERS * NORM_COLS>;

__device__ __forceinline__ norm_words *norm_of(const hd_exchange_peers &p, int member,
                                               uint32_t ticket) {
    return &memory_of(p, member).norm[ticket % 2][blockIdx.x];
}

/* Of a row whose result other members complete: which of the thread's columns come from them, all that it has of y,
 * and afterwards the result. MOST: members of a sum; 1: a gather. */
template <int N, int TURNS, int MOST>
struct result_row {
    static constexpr int EACH = TURNS * NORM_EACH;
    float y[EACH];
    uint32_t wanted;

    __device__ __forceinline__ void load(const hd_exchange_norm_args &a, int32_t r) {
        const cuda_act *row = acts(a.norm.y) + (int64_t)r * a.norm.cols;
        wanted = 0;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int c = (int)threadIdx.x + i * N;
            const bool is_column = c < a.norm.cols;
            const bool has = MOST > 1 ? is_column : c >= a.first && c < a.first + a.own;
            y[i] = load_now(row + c, has);
            if (is_column && (MOST > 1 || !has)) wanted |= 1u << i;
        }
    }

    __device__ __forceinline__ void send(const hd_exchange_peers &p, int32_t cols,
                                         uint32_t ticket) const {
        const int thread = (int)threadIdx.x;
        if (thread < p.n && thread != p.index) send_name(p, norm_of(p, thread, ticket), ticket);
        for (int k = 1; k < p.n; k++) {
            const int to = (p.index + k) % p.n;
            word *there = norm_of(p, to, ticket)->at + (MOST > 1 ? p.index * NORM_COLS : 0);
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                const int c = thread + i * N;
                if (c >= cols || (MOST == 1 && (wanted >> i & 1))) continue;
                send_word(there + c, y[i], ticket);
            }
        }
    }

    /* False: the exchange is given up. */
    __device__ __forceinline__ bool take(const hd_exchange_peers &p, uint32_t ticket) {
        constexpr int AT_ONCE = MOST > 2 ? NORM_EACH / 2 : NORM_EACH;
        const norm_words &here = *norm_of(p, p.index, ticket);
        bool came = true;
#pragma unroll
        for (int base = 0; base < EACH; base += AT_ONCE) {
            float term[MOST][AT_ONCE];
            const word *from = here.at + base * N + threadIdx.x;
#pragma unroll
            for (int m = 0; m < MOST; m++) {
                const bool other = MOST == 1 || (m < p.n && m != p.index);
#pragma unroll
                for (int i = 0; i < AT_ONCE; i++) term[m][i] = y[base + i];
                came = came && take_words(p, MOST == 1 ? ANY : m, from + m * NORM_COLS, N,
                                          other ? wanted >> base : 0, ticket, term[m]);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                float of[MOST];
#pragma unroll
                for (int m = 0; m < MOST; m++) of[m] = term[m][i];
                y[base + i] = MOST == 1 ? of[0] : tree_sum<MOST>(of, p.n);
            }
        }
        return came && take_name(p, here, ticket);
    }
};

template <int N, int TURNS, int MOST>
__global__ void __launch_bounds__(N, 1)
    norm(const __grid_constant__ hd_exchange_peers p, const hd_exchange_norm_args args) {
    constexpr int EACH = TURNS * NORM_EACH;
    const hd_add_norm_args &a = args.norm;
    const int thread = (int)threadIdx.x;
    __shared__ float weight[EACH][N]; /* each thread's own, as its registers are few */
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int c = thread + i * N;
        weight[i][thread] = load_now(a.weight + c, c < a.cols);
    }
    griddepcontrol_wait();
    uint32_t *kept = &memory_of(p, p.index).norm_ticket[blockIdx.x], ticket = *kept;
    bool came = !*static_cast<const volatile int32_t *>(&memory_of(p, p.index).over);
    for (int32_t r = (int32_t)blockIdx.x; r < a.rows; r += (int32_t)gridDim.x) {
        cuda_act *x = acts(a.x) + (int64_t)r * a.cols;
        float own[EACH];
        result_row<N, TURNS, MOST> row;
        ticket = ticket_after(ticket);
        row.load(args, r);
        if (came) row.send(p, a.cols, ticket);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int c = thread + i * N;
            own[i] = load_now(x + c, c < a.cols);
        }
        came = came && row.take(p, ticket);
        if (!all_came(p, came)) return;
        if (r + (int32_t)gridDim.x >= a.rows) griddepcontrol_launch_dependents();
        double sum = 0.0;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int c = thread + i * N;
            own[i] += row.y[i];
            if (c < a.cols) x[c] = narrow(own[i]);
            sum = fma((double)own[i], (double)own[i], sum);
        }
        sum = block_sum<N>(sum);
        const float scale = (float)(1.0 / sqrt(sum / a.cols + (double)a.eps));
        cuda_act *out = acts(a.out) + (int64_t)r * a.cols;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int c = thread + i * N;
            if (c < a.cols) out[c] = narrow(own[i] * scale * weight[i][thread]);
        }
    }
    if (thread == 0) *kept = ticket;
}

/* ---- launches ---- */

/* Of n floats, `each` of which one block of few words takes; 0: they are not few. */
unsigned few_blocks(const hd_exchange_peers *p, int64_t n, int64_t each) {
    const int most = p->blocks < FEW_BLOCKS ? p->blocks : FEW_BLOCKS;
    if (n > most * each) return 0;
    const unsigned blocks = blocks_for(n, THREADS);
    return blocks < (unsigned)most ? blocks : (unsigned)most;
}

template <int MOST>
bool queue_few_sum(hd_stream *s, const hd_exchange_peers *p, const hd_exchange_sum_args *a) {
    const unsigned blocks = few_blocks(p, a->n, FEW_WORDS / MOST);
    if (!blocks) return false;
    launch_kernel(hd_cuda_stream(s), few_sum<MOST>, blocks, THREADS, 0, 1, *p, *a);
    hd_cuda_check(s, "sum of few words between GPUs");
    return true;
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

static_assert(FEW_EACH * THREADS <= FEW_WORDS && NORM_COLS <= 2 * NORM_WIDE * NORM_EACH,
              "room for words, threads for columns");

} // namespace

bool exchange_few_gather(hd_stream *s, const hd_exchange_peers *p,
                         const hd_exchange_gather_args *a) {
    const unsigned blocks = few_blocks(p, (int64_t)a->rows * a->cols, FEW_EACH * THREADS);
    if (!blocks) return false;
    launch_kernel(hd_cuda_stream(s), few_gather, blocks, THREADS, 0, 1, *p, *a);
    hd_cuda_check(s, "gather of few words between GPUs");
    return true;
}

bool exchange_few_sum(hd_stream *s, const hd_exchange_peers *p, const hd_exchange_sum_args *a) {
    if (p->n == 2) return queue_few_sum<2>(s, p, a);
    if (p->n <= 4) return queue_few_sum<4>(s, p, a);
    return p->n <= FEW_MEMBERS && queue_few_sum<FEW_MEMBERS>(s, p, a);
}

void exchange_norm(hd_stream *s, const hd_exchange_peers *p, const hd_exchange_norm_args *a) {
    if (a->norm.rows == 0) return;
    if (!norm_is_wide(a->norm.cols)) {
        queue_norm_of<NORM_NARROW, 1>(s, p, a);
    } else if (a->norm.cols <= NORM_WIDE * NORM_EACH) {
        queue_norm_of<NORM_WIDE, 1>(s, p, a);
    } else {
        queue_norm_of<NORM_WIDE, 2>(s, p, a);
    }
}
