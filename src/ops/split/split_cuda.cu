/* split_cuda.cu - the rows of experts counted, and divided over their slots: one block, with all tables
 * in its shared memory. Counts and parts are its threads' together; in between one warp evens out the
 * sums of ranks as moe/split.c does, step by step with the same choices: the fullest rank is found by
 * all lanes, and a search looks at the shared experts of a rank at once. */
#include "ops/cuda/block_internal.cuh"

constexpr int THREADS = 1024;
constexpr size_t RESERVED = 7 << 10; /* of shared memory, besides the tables */

/* The hop of a search that reached a rank. */
struct hop {
    int32_t seen;       /* the search */
    int32_t from, into; /* slots */
    int32_t rank;       /* before it */
};

struct split_memory {
    hd_split_graph g;
    hop *hops;                   /* [ranks] */
    int32_t *room;               /* [ranks] that can come to the rank along its path */
    int32_t *sum, *goal, *queue; /* [ranks] */
    int32_t *x;                  /* [slots] */
    int32_t *all, *before, *own; /* [experts] of all sources, those before, this one */
};

static __host__ __device__ size_t graph_bytes(hd_split_shape s) {
    return ((size_t)hd_split_words(s) * sizeof(int32_t) + 15) / 16 * 16;
}

static size_t work_bytes(hd_split_shape s) {
    const size_t words = 4 * (size_t)s.ranks + (size_t)s.slots + 3 * (size_t)s.experts;
    return (size_t)s.ranks * sizeof(hop) + words * sizeof(int32_t);
}

/* The graph is copied, if it has room. */
static __device__ split_memory place_memory(uint8_t *shared, const hd_moe_split_args &a,
                                            bool copied) {
    const hd_split_shape n = a.shape;
    split_memory m;
    const int32_t *graph = copied ? reinterpret_cast<int32_t *>(shared) : a.graph;
    m.g = hd_split_graph_in(graph, n);
    m.hops = reinterpret_cast<hop *>(shared + (copied ? graph_bytes(n) : 0));
    m.room = reinterpret_cast<int32_t *>(m.hops + n.ranks);
    m.sum = m.room + n.ranks;
    m.goal = m.sum + n.ranks;
    m.queue = m.goal + n.ranks;
    m.x = m.queue + n.ranks;
    m.all = m.x + n.slots;
    m.before = m.all + n.experts;
    m.own = m.before + n.experts;
    return m;
}

/* counts [n_experts] are zero; they are complete behind the next barrier. */
static __device__ void count_rows(int32_t *counts, const int32_t *expert, int32_t n) {
#pragma unroll 8
    for (int32_t i = threadIdx.x; i < n; i += THREADS) atomicAdd(&counts[expert[i]], 1);
}

static __global__ void __launch_bounds__(THREADS) moe_count(hd_moe_count_args a) {
    begin_kernel();
    extern __shared__ int32_t counts[];
    for (int32_t e = threadIdx.x; e < a.n_experts; e += THREADS) counts[e] = 0;
    __syncthreads();
    count_rows(counts, a.expert, a.rows * a.top_k);
    __syncthreads();
    for (int32_t e = threadIdx.x; e < a.n_experts; e += THREADS) a.counts[e] = counts[e];
}

void hd_moe_count_cuda(hd_stream *s, const hd_moe_count_args *a) {
    launch_kernel(hd_cuda_stream(s), moe_count, dim3(1), THREADS,
                  (size_t)a->n_experts * sizeof(int32_t), 1, *a);
    hd_cuda_check(s, "moe_count");
}

/* ---- the block's threads together ---- */

static __device__ void add_sources(const hd_moe_split_args &a, const split_memory &m) {
    for (int32_t e = threadIdx.x; e < a.shape.experts; e += THREADS) {
        int32_t all = 0, before = 0;
#pragma unroll 8
        for (int32_t k = 0; k < a.n_sources; k++) {
            const int32_t n = a.counts[(int64_t)k * a.shape.experts + e];
            before += k < a.source ? n : 0;
            all += n;
        }
        m.all[e] = all;
        m.before[e] = before;
        m.own[e] = a.counts[(int64_t)a.source * a.shape.experts + e];
    }
}

/* Equal parts, the first copies a row more. x and sums are zero. */
static __device__ void start(const split_memory &m) {
    const hd_split_graph &g = m.g;
    for (int32_t e = threadIdx.x; e < g.shape.experts; e += THREADS) {
        const int32_t begin = g.holder0[e], n = g.holder0[e + 1] - begin, rows = m.all[e];
        const int32_t each = n > 1 ? rows / n : rows, more = rows - each * n;
        for (int32_t k = 0; k < n; k++) {
            const hd_split_holder to = g.holder[begin + k];
            const int32_t here = each + (k < more);
            m.x[to.slot] = here;
            if (here) atomicAdd(&m.sum[to.rank], here);
        }
    }
}

/* Where x has the rows of all sources, this one's part takes their place. */
static __device__ void take_part(const hd_moe_split_args &a, const split_memory &m) {
    const hd_split_graph &g = m.g;
    for (int32_t e = threadIdx.x; e < g.shape.experts; e += THREADS) {
        hd_split_left left = {m.all[e], m.before[e], a.counts ? m.own[e] : m.all[e]};
        int32_t number = 0;
        for (int32_t k = g.holder0[e]; k < g.holder0[e + 1]; k++) {
            const int32_t slot = g.holder[k].slot, part = hd_split_part(&left, m.x[slot]);
            a.first[slot] = number;
            m.x[slot] = part;
            number += part;
        }
    }
}

static __device__ void write_offsets(const hd_moe_split_args &a, const split_memory &m) {
    int32_t before = 0;
    for (int32_t base = 0; base < a.shape.slots; base += THREADS) {
        const int32_t slot = base + (int32_t)threadIdx.x;
        int32_t sum;
        const int32_t here = slot < a.shape.slots ? m.x[slot] : 0;
        const int32_t begin = before + scan_before<THREADS>(here, &sum);
        if (slot < a.shape.slots) a.offset[slot] = begin;
        before += sum;
    }
    if (threadIdx.x == 0) a.offset[a.shape.slots] = before;
}

/* ---- one warp ---- */

/* Returns the mean of a rank, rounded up. */
static __device__ int32_t set_goals(const split_memory &m, int lane) {
    const hd_split_graph &g = m.g;
    int32_t total = 0;
    for (int32_t d = lane; d < g.shape.ranks; d += WARP) {
        total += m.sum[d];
        if (g.root[d] >= 0) atomicAdd(&m.goal[g.root[d]], m.sum[d]);
    }
    __syncwarp();
    for (int32_t d = lane; d < g.shape.ranks; d += WARP) {
        if (g.size[d]) m.goal[d] = (m.goal[d] + g.size[d] - 1) / g.size[d];
    }
    __syncwarp();
    const int32_t alive = *g.alive;
    return alive ? (warp_sum(total) + alive - 1) / alive : 0;
}

/* By one lane: each depends on the one before. What does not is read ahead. */
static __device__ void even_out(const split_memory &m) {
    const hd_split_graph &g = m.g;
    int32_t i = *g.alive - 1;
    hd_split_branch b = {}, next = {};
    int32_t goal = 0, next_goal = 0;
    const auto read = [&](int32_t at) {
        if (at < 0) return;
        next = g.branch[at];
        next_goal = m.goal[g.root[next.rank]];
    };
    read(i);
    for (; i >= 0; i--) {
        b = next;
        goal = next_goal;
        read(i - 1);
        if (b.parent < 0) continue;
        const int32_t mine = m.x[b.mine], theirs = m.x[b.theirs], sum = m.sum[b.rank];
        const int32_t parent = m.sum[b.parent];
        const int32_t n = max(min(sum - goal, mine), -theirs);
        m.x[b.mine] = mine - n;
        m.x[b.theirs] = theirs + n;
        m.sum[b.rank] = sum - n;
        m.sum[b.parent] = parent + n;
    }
}

/* The first of the fullest ranks. */
static __device__ int32_t find_fullest(const split_memory &m, int lane, int32_t *most) {
    int32_t best = 0, sum = -1;
    for (int32_t d = lane; d < m.g.shape.ranks; d += WARP) {
        if (m.sum[d] <= sum) continue;
        best = d;
        sum = m.sum[d];
    }
    *most = __reduce_max_sync(ALL_LANES, sum);
    return __reduce_min_sync(ALL_LANES, sum == *most ? best : INT32_MAX);
}

/* A search of the warp. */
struct walk {
    int32_t round, n; /* ranks in the queue */
    int32_t best, least;
};

/* Visits the ranks that a lane each has found, in the order of lanes: the first lane of each rank.
 * Returns the first one below `low`, or -1. */
static __device__ int32_t visit(const split_memory &m, walk *w, bool found, const hop &by,
                                int32_t rank, int32_t low, int lane) {
    const unsigned same = __match_any_sync(ALL_LANES, found ? rank : -1 - lane);
    found = found && (same & ((1u << lane) - 1)) == 0;
    const unsigned all = __ballot_sync(ALL_LANES, found);
    const int32_t sum = found ? m.sum[rank] : INT32_MAX;
    if (found) {
        m.hops[rank] = by;
        m.room[rank] = min(m.room[by.rank], m.x[by.from]);
        m.queue[w->n + __popc(all & ((1u << lane) - 1))] = rank;
    }
    w->n += __popc(all);
    const unsigned below = __ballot_sync(ALL_LANES, sum < low);
    if (below) return __shfl_sync(ALL_LANES, rank, __ffs((int)below) - 1);
    const int32_t least = __reduce_min_sync(ALL_LANES, sum);
    if (least < w->least) {
        const unsigned there = __ballot_sync(ALL_LANES, sum == least);
        w->best = __shfl_sync(ALL_LANES, rank, __ffs((int)there) - 1);
        w->least = least;
    }
    return -1;
}

/* Visits the ranks that have copies of a's experts with rows on a. */
static __device__ int32_t visit_neighbors(const split_memory &m, walk *w, int32_t a,
                                          int32_t low, int lane) {
    const hd_split_graph &g = m.g;
    const int32_t first = g.shared0[a], last = g.shared0[a + 1];
    bool more = true;
    for (int32_t k = 1; more; k++) {
        more = false;
        for (int32_t base = first; base < last; base += WARP) {
            const bool is_one = base + lane < last;
            const hd_split_shared from = g.shared[is_one ? base + lane : base];
            const int32_t n = from.end - from.begin, at = from.own + k;
            const hd_split_holder into =
                g.holder[from.begin + (at < n ? at : min(at, 2 * n - 1) - n)];
            const bool found =
                is_one && k < n && m.x[from.slot] > 0 && m.hops[into.rank].seen != w->round;
            more |= __any_sync(ALL_LANES, is_one && k + 1 < n);
            if (!__any_sync(ALL_LANES, found)) continue;
            const hop by = {w->round, from.slot, into.slot, a};
            const int32_t end = visit(m, w, found, by, into.rank, low, lane);
            if (end >= 0) return end;
            __syncwarp();
        }
    }
    return -1;
}

/* Breadth first from rank `hot`. Returns the first rank below `low`, else the emptiest of those
 * with two rows less than hot, else -1. */
static __device__ int32_t search(const split_memory &m, int32_t round, int32_t hot,
                                 int32_t most, int32_t low, int lane) {
    walk w = {round, 1, -1, most - 1};
    if (lane == 0) {
        m.queue[0] = hot;
        m.hops[hot].seen = round;
        m.room[hot] = INT32_MAX;
    }
    __syncwarp();
    for (int32_t at = 0; at < w.n; at++) {
        const int32_t end = visit_neighbors(m, &w, m.queue[at], low, lane);
        if (end >= 0) return end;
    }
    return w.best;
}

static __device__ void push(const split_memory &m, int32_t hot, int32_t end, int32_t most,
                            int32_t low) {
    const int32_t less = m.sum[end];
    int32_t n = min((most - less) / 2, m.room[end]);
    if (less < low) n = min(n, low - less);
    for (int32_t b = end; b != hot;) {
        const hop by = m.hops[b];
        m.x[by.from] -= n;
        m.x[by.into] += n;
        b = by.rank;
    }
    m.sum[hot] = most - n;
    m.sum[end] = less + n;
}

static __device__ void balance(const split_memory &m) {
    const int lane = threadIdx.x % WARP;
    const int32_t low = set_goals(m, lane);
    if (lane == 0) even_out(m);
    __syncwarp();
    for (int32_t round = 1;; round++) {
        int32_t most;
        const int32_t hot = find_fullest(m, lane, &most);
        if (most <= low) return;
        const int32_t end = search(m, round, hot, most, low, lane);
        if (end < 0) return;
        __syncwarp();
        if (lane == 0) push(m, hot, end, most, low);
        __syncwarp();
    }
}

static __global__ void __launch_bounds__(THREADS) moe_split(hd_moe_split_args a, bool copied) {
    extern __shared__ uint4 shared[];
    const split_memory m = place_memory(reinterpret_cast<uint8_t *>(shared), a, copied);
    const hd_split_shape n = a.shape;
    const int32_t words = hd_split_words(n);
    const int32_t work =
        (int32_t)sizeof(hop) / 4 * n.ranks + 4 * n.ranks + n.slots + 3 * n.experts;
    griddepcontrol_launch_dependents();
    /* The graph changes between steps only. */
    for (int32_t i = threadIdx.x; copied && i < words; i += THREADS) {
        reinterpret_cast<int32_t *>(shared)[i] = a.graph[i];
    }
    for (int32_t i = threadIdx.x; i < work; i += THREADS) {
        reinterpret_cast<int32_t *>(m.hops)[i] = 0;
    }
    griddepcontrol_wait();
    for (int32_t i = threadIdx.x; i < n.slots; i += THREADS)
        a.first[i] = 0; /* of empty slots */
    __syncthreads();
    if (a.counts) {
        add_sources(a, m);
    } else {
        count_rows(m.all, a.expert, a.rows * a.top_k);
    }
    __syncthreads();
    start(m);
    __syncthreads();
    if (threadIdx.x < WARP) balance(m);
    __syncthreads();
    take_part(a, m);
    __syncthreads();
    write_offsets(a, m);
}

void hd_moe_split_cuda(hd_stream *s, const hd_moe_split_args *a) {
    const size_t work = work_bytes(a->shape), graph = graph_bytes(a->shape);
    const size_t most = hd_cuda_shared_limit() - RESERVED;
    const bool copied = work + graph <= most;
    const size_t bytes = work + (copied ? graph : 0);
    if (bytes > most) {
        return hd_stream_fail(s, HD_EUNSUPPORTED, "moe_split: too many slots in a layer");
    }
    hd_cuda_allow_shared((const void *)moe_split, bytes);
    launch_kernel(hd_cuda_stream(s), moe_split, dim3(1), THREADS, bytes, 1, *a, copied);
    hd_cuda_check(s, "moe_split");
}
