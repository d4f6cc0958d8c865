/* split_cuda.cu - the rows of experts counted, and divided over their slots: one block, with all tables
 * in its shared memory. Counts and parts are its threads' together; in between one warp evens out the
 * sums of ranks as moe/split.c does, with the same choices. A lane has one rank of each 32, sets of ranks
 * are masks that all lanes have, and a step of a search is a vote: who shares an expert with a rank that was
 * reached last? */
#include "ops/cuda/block_internal.cuh"

constexpr int THREADS = 512;
constexpr int ARCS = 4;              /* of a rank in registers */
constexpr int STEPS = 4;             /* of a search at once */
constexpr size_t RESERVED = 7 << 10; /* of shared memory, besides the tables */

struct split_memory {
    hd_split_graph g;
    int32_t *sum, *goal, *more;   /* [ranks] */
    int32_t *x;                   /* [slots] */
    int32_t *all, *earlier, *own; /* [experts] of all sources, those before, this one */
};

static __host__ __device__ int32_t graph_words(hd_split_shape s) {
    return (hd_split_words(s) + 3) / 4 * 4;
}

static __host__ __device__ int32_t work_words(hd_split_shape s) {
    return 3 * s.ranks + s.slots + 3 * s.experts;
}

static __device__ split_memory place_memory(int32_t *shared, hd_split_shape n) {
    split_memory m;
    m.g = hd_split_graph_in(shared, n);
    m.sum = shared + graph_words(n);
    m.goal = m.sum + n.ranks;
    m.more = m.goal + n.ranks;
    m.x = m.more + n.ranks;
    m.all = m.x + n.slots;
    m.earlier = m.all + n.experts;
    m.own = m.earlier + n.experts;
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

/* Numbers that are read together. */
template <int EACH>
struct alignas(EACH * sizeof(int32_t)) rows_of {
    int32_t n[EACH];
};

/* all, earlier and own are zero. Threads share the sources, and each has EACH experts, which must divide
 * them. */
template <int EACH>
static __device__ void add_sources(const hd_moe_split_args &a, const split_memory &m) {
    const rows_of<EACH> *counts = reinterpret_cast<const rows_of<EACH> *>(a.counts);
    const int32_t parts = a.shape.experts / EACH;
    const int32_t groups = max(1, THREADS / parts), width = groups > 1 ? parts : THREADS;
    const int32_t group = (int32_t)threadIdx.x / width;
    if (group >= groups) return;
    for (int32_t part = (int32_t)threadIdx.x % width; part < parts; part += width) {
        rows_of<EACH> all = {}, earlier = {};
#pragma unroll 4
        for (int32_t k = group; k < a.n_sources; k += groups) {
            const rows_of<EACH> here = counts[(int64_t)k * parts + part];
            for (int j = 0; j < EACH; j++) {
                all.n[j] += here.n[j];
                earlier.n[j] += k < a.source ? here.n[j] : 0;
                if (k == a.source) m.own[part * EACH + j] = here.n[j];
            }
        }
        for (int j = 0; j < EACH; j++) {
            atomicAdd(&m.all[part * EACH + j], all.n[j]);
            atomicAdd(&m.earlier[part * EACH + j], earlier.n[j]);
        }
    }
}

static __device__ void count_all(const hd_moe_split_args &a, const split_memory &m) {
    const bool is_aligned = reinterpret_cast<uintptr_t>(a.counts) % alignof(rows_of<4>) == 0;
    if (!a.counts) {
        count_rows(m.all, a.expert, a.rows * a.top_k);
    } else if (is_aligned && a.shape.experts % 4 == 0) {
        add_sources<4>(a, m);
    } else {
        add_sources<1>(a, m);
    }
}

/* Equal parts, the first copies a row more. x and sums are zero. */
static __device__ void start(const split_memory &m) {
    const hd_split_graph &g = m.g;
    for (int32_t e = threadIdx.x; e < g.shape.experts; e += THREADS) {
        const int32_t begin = g.holder0[e], n = g.holder0[e + 1] - begin, rows = m.all[e];
        const int32_t each = n > 1 ? rows / n : rows, more = rows - each * n;
#pragma unroll 1
        for (int32_t k = 0; k < n; k++) {
            const hd_split_holder to = g.holder[begin + k];
            const int32_t here = each + (k < more);
            m.x[to.slot] = here;
            if (here) atomicAdd(&m.sum[to.rank], here);
        }
    }
}

/* hd_split_part(), where numbers are small with a division of 32 bits. */
static __device__ int32_t part_of(hd_split_left *l, int32_t here) {
    if (here >= l->all || l->all > UINT16_MAX) return hd_split_part(l, here);
    const uint32_t all = (uint32_t)l->all, before = (uint32_t)l->before;
    const uint32_t first = (uint32_t)here * before / all;
    const uint32_t own = (uint32_t)here * (before + (uint32_t)l->own) / all - first;
    l->all -= here;
    l->before -= first;
    l->own -= own;
    return (int32_t)own;
}

/* Where x has the rows of all sources, this one's part takes their place. */
static __device__ void take_part(const hd_moe_split_args &a, const split_memory &m) {
    const hd_split_graph &g = m.g;
    for (int32_t e = threadIdx.x; e < g.shape.experts; e += THREADS) {
        hd_split_left left = {m.all[e], m.earlier[e], a.counts ? m.own[e] : m.all[e]};
        int32_t number = 0;
#pragma unroll 1
        for (int32_t k = g.holder0[e]; k < g.holder0[e + 1]; k++) {
            const int32_t slot = g.holder[k].slot, part = part_of(&left, m.x[slot]);
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

/* A set of ranks, which all lanes have. A lane has the ranks word * WARP + lane. */
template <int WORDS>
struct rank_set {
    uint32_t word[WORDS];
};

template <int WORDS>
static __device__ bool has(const rank_set<WORDS> &s, int32_t w, int lane) {
    return s.word[w] >> lane & 1;
}

/* What the lane of rank d has: x [WORDS]. */
template <int WORDS, class T>
static __device__ T of_rank(const T *x, int32_t d) {
    T found = {};
#pragma unroll
    for (int v = 0; v < WORDS; v++) {
        const T there = __shfl_sync(ALL_LANES, x[v], d % WARP);
        if (d / WARP == v) found = there;
    }
    return found;
}

/* Returns the largest mean of a tree, rounded up. */
static __device__ int32_t set_goals(const split_memory &m, int lane) {
    const hd_split_graph &g = m.g;
    int32_t most = 0;
    for (int32_t d = lane; d < g.shape.ranks; d += WARP) {
        if (g.root[d] >= 0) atomicAdd(&m.goal[g.root[d]], m.sum[d]);
    }
    __syncwarp();
    for (int32_t d = lane; d < g.shape.ranks; d += WARP) {
        if (g.root[d] != d) continue;
        m.goal[d] =
            (int32_t)(((uint32_t)m.goal[d] + (uint32_t)g.size[d] - 1) / (uint32_t)g.size[d]);
        most = max(most, m.goal[d]);
    }
    __syncwarp();
    return __reduce_max_sync(ALL_LANES, most);
}

/* All ranks of a depth at once: they have no slot in common. What ranks get from those below them is added to
 * `more`, which is zero. */
template <int WORDS>
static __device__ void even_out(const split_memory &m, int lane) {
    const hd_split_graph &g = m.g;
    const int32_t alive = *g.alive;
    hd_split_branch b[WORDS];
    int32_t depth[WORDS], above[WORDS], theirs[WORDS], moved[WORDS], deepest = 0;
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
        const int32_t i = w * WARP + lane;
        depth[w] = moved[w] = 0;
        if (i >= alive) continue;
        b[w] = g.branch[i];
        depth[w] = g.depth[i];
        above[w] = m.sum[b[w].rank] - m.goal[g.root[b[w].rank]];
        theirs[w] = depth[w] ? m.x[b[w].theirs] : 0;
        deepest = max(deepest, depth[w]);
    }
    deepest = __reduce_max_sync(ALL_LANES, deepest);
#pragma unroll 1
    for (int32_t d = deepest; d > 0; d--) {
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
            if (depth[w] != d) continue;
            const int32_t mine = m.x[b[w].mine];
            moved[w] = max(min(above[w] + m.more[b[w].rank], mine), -theirs[w]);
            atomicAdd(&m.more[b[w].parent], moved[w]);
            m.x[b[w].mine] = mine - moved[w];
            m.x[b[w].theirs] = theirs[w] + moved[w];
        }
        __syncwarp();
    }
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
        if (w * WARP + lane < alive) m.sum[b[w].rank] += m.more[b[w].rank] - moved[w];
    }
    __syncwarp();
}

/* Copies of experts of a rank on others: rows can go from a slot of another rank into one of its own. */
struct arc {
    uint32_t slots; /* from, and into << 16 */
    int32_t rank;
};

static __device__ __forceinline__ int32_t from_of(const arc &a) {
    return (int32_t)(a.slots & UINT16_MAX);
}

/* Those of the lane's ranks, the first ones in registers. */
template <int WORDS>
struct arcs {
    arc of[WORDS][ARCS];
    int32_t n[WORDS];
};

/* f(number, arc) of all arcs of rank d, by slot, until it returns true. */
template <class F>
static __device__ __forceinline__ void for_arcs(const split_memory &m, int32_t d, F f) {
    const hd_split_graph &g = m.g;
    int32_t n = 0;
#pragma unroll 1
    for (int32_t i = g.shared0[d]; i < g.shared0[d + 1]; i++) {
        const hd_split_shared s = g.shared[i];
#pragma unroll 1
        for (int32_t k = s.begin; k < s.end; k++) {
            const hd_split_holder from = g.holder[k];
            if (from.rank == d) continue;
            const arc one = {(uint32_t)from.slot | (uint32_t)s.slot << 16, from.rank};
            if (f(n++, one)) return;
        }
    }
}

template <int WORDS>
static __device__ __forceinline__ void list_arcs(const split_memory &m, arcs<WORDS> *a,
                                                 int lane) {
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
        const int32_t d = w * WARP + lane;
        arc first[ARCS] = {};
        int32_t n = 0;
        if (d < m.g.shape.ranks) {
            for_arcs(m, d, [&](int32_t number, const arc &one) {
                for (int q = 0; q < ARCS; q++) {
                    if (q == number) first[q] = one;
                }
                n = number + 1;
                return false;
            });
        }
        for (int q = 0; q < ARCS; q++) a->of[w][q] = first[q];
        a->n[w] = n;
    }
}

template <int WORDS>
static __device__ __forceinline__ void add_neighbor(const split_memory &m, rank_set<WORDS> *in,
                                                    const arc &a) {
    const uint32_t there = m.x[from_of(a)] ? 1u << a.rank % WARP : 0;
#pragma unroll
    for (int v = 0; v < WORDS; v++) in->word[v] |= a.rank / WARP == v ? there : 0;
}

/* in: of each rank of the lane, the ranks with rows of experts that it has, too. */
template <int WORDS>
static __device__ __forceinline__ void find_neighbors(const split_memory &m,
                                                      const arcs<WORDS> &a, rank_set<WORDS> *in,
                                                      int lane) {
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
        rank_set<WORDS> all = {};
        for (int q = 0; q < ARCS; q++) {
            if (q < a.n[w]) add_neighbor<WORDS>(m, &all, a.of[w][q]);
        }
        if (a.n[w] > ARCS) {
            for_arcs(m, w * WARP + lane, [&](int32_t, const arc &one) {
                add_neighbor<WORDS>(m, &all, one);
                return false;
            });
        }
        in[w] = all;
    }
}

/* A search, and what it found for the ranks of the lane. */
template <int WORDS>
struct walk {
    rank_set<WORDS> above, below, seen;
    int32_t sum[WORDS], parent[WORDS];
    int32_t rows;  /* of the beginnings, above the bound */
    int32_t steps; /* or some more */
};

template <int WORDS>
static __device__ void read_sums(const split_memory &m, walk<WORDS> *s, int lane) {
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
        const int32_t d = w * WARP + lane;
        s->sum[w] = d < m.g.shape.ranks ? m.sum[d] : 0;
    }
}

/* Returns whether any rank is above the bound. */
template <int WORDS>
static __device__ bool begin_search(walk<WORDS> *s, int32_t low, int lane) {
    int32_t rows = 0;
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
        s->above.word[w] = __ballot_sync(ALL_LANES, s->sum[w] > low);
        s->below.word[w] = __ballot_sync(ALL_LANES, s->sum[w] < low);
        s->parent[w] = w * WARP + lane;
        rows += max(0, s->sum[w] - low);
    }
    s->rows = __reduce_add_sync(ALL_LANES, rows);
    s->seen = s->above;
    s->steps = 0;
    return s->rows > 0;
}

/* Returns the ranks that it reaches next. */
template <int WORDS>
static __device__ rank_set<WORDS> step(walk<WORDS> *s, const rank_set<WORDS> *in,
                                       const rank_set<WORDS> &last, int lane) {
    rank_set<WORDS> next;
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
        uint32_t by = 0;
#pragma unroll
        for (int v = 0; v < WORDS; v++) by |= last.word[v] & in[w].word[v];
        const bool is_new = by && !has(s->seen, w, lane);
        next.word[w] = __ballot_sync(ALL_LANES, is_new);
#pragma unroll
        for (int v = WORDS - 1; v >= 0; v--) {
            by = last.word[v] & in[w].word[v];
            if (is_new && by) s->parent[w] = v * WARP + __ffs((int)by) - 1;
        }
    }
#pragma unroll
    for (int w = 0; w < WORDS; w++) s->seen.word[w] |= next.word[w];
    return next;
}

/* Returns whether there are ranks to push to. Some steps at once: those behind the last do nothing. */
template <int WORDS>
static __device__ bool search(walk<WORDS> *s, const rank_set<WORDS> *in, int lane) {
    rank_set<WORDS> last = s->above;
    uint32_t any = 1, ends = 0;
    while (any) {
        any = 0;
#pragma unroll
        for (int k = 0; k < STEPS; k++) last = step<WORDS>(s, in, last, lane);
        s->steps += STEPS;
#pragma unroll
        for (int w = 0; w < WORDS; w++) any |= last.word[w];
    }
#pragma unroll
    for (int w = 0; w < WORDS; w++) ends |= s->seen.word[w] & s->below.word[w];
    return ends != 0;
}

template <int WORDS>
static __device__ int32_t raised_bound(const walk<WORDS> &s, int lane) {
    uint32_t all = 0, n = 0;
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
        if (has(s.seen, w, lane)) all += (uint32_t)s.sum[w];
        n += (uint32_t)__popc(s.seen.word[w]);
    }
    all = __reduce_add_sync(ALL_LANES, all);
    return (int32_t)((all + n - 1) / n);
}

/* The path to a rank that was reached. */
template <int WORDS>
struct path {
    int32_t from, into;  /* slots of its last hop */
    int32_t root;        /* where it began */
    rank_set<WORDS> way; /* the ranks on it, but for that */
};

/* The last hop to the lane's rank number w, from rank a, of which a search knows that there is one. */
template <int WORDS>
static __device__ __forceinline__ void find_hop(const split_memory &m, const arcs<WORDS> &arcs,
                                                int w, path<WORDS> *p, int32_t a, int lane) {
    bool found = false;
    for (int q = 0; q < ARCS; q++) {
        const arc one = arcs.of[w][q];
        if (found || q >= arcs.n[w] || one.rank != a || !m.x[from_of(one)]) continue;
        p->from = from_of(one);
        p->into = (int32_t)(one.slots >> 16);
        found = true;
    }
    if (found) return;
    for_arcs(m, w * WARP + lane, [&](int32_t, const arc &one) {
        if (one.rank != a || !m.x[from_of(one)]) return false;
        p->from = from_of(one);
        p->into = (int32_t)(one.slots >> 16);
        return true;
    });
}

/* Of each rank of the lane, in twice as long pieces each time. */
template <int WORDS>
static __device__ __forceinline__ void find_paths(const split_memory &m,
                                                  const arcs<WORDS> &arcs, const walk<WORDS> &s,
                                                  path<WORDS> *paths, int lane) {
    int32_t before[WORDS];
    uint32_t way[WORDS][WORDS]; /* a word of each */
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
        const bool is_reached = has(s.seen, w, lane) && !has(s.above, w, lane);
        paths[w].from = paths[w].into = 0;
        if (is_reached) find_hop(m, arcs, w, &paths[w], s.parent[w], lane);
        before[w] = s.parent[w];
#pragma unroll
        for (int v = 0; v < WORDS; v++) way[v][w] = v == w && is_reached ? 1u << lane : 0;
    }
    for (int32_t length = 1; length < s.steps; length *= 2) {
        int32_t further[WORDS];
        uint32_t more[WORDS][WORDS];
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
            further[w] = of_rank<WORDS>(before, before[w]);
#pragma unroll
            for (int v = 0; v < WORDS; v++) more[v][w] = of_rank<WORDS>(way[v], before[w]);
        }
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
            before[w] = further[w];
#pragma unroll
            for (int v = 0; v < WORDS; v++) way[v][w] |= more[v][w];
        }
    }
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
        paths[w].root = before[w];
#pragma unroll
        for (int v = 0; v < WORDS; v++) paths[w].way.word[v] = way[v][w];
    }
}

/* Pushes to the ranks below the bound where paths end, in the order of their numbers. */
template <int WORDS>
static __device__ void push_all(const split_memory &m, walk<WORDS> *s, const path<WORDS> *paths,
                                int32_t low, int lane) {
    int32_t root[WORDS], above[WORDS], lack[WORDS]; /* above: rows that the root can give */
    uint32_t way[WORDS][WORDS];
    bool is_end[WORDS];
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
        root[w] = paths[w].root;
        lack[w] = low - s->sum[w];
        is_end[w] = has(s->seen, w, lane) && has(s->below, w, lane);
#pragma unroll
        for (int v = 0; v < WORDS; v++) way[v][w] = paths[w].way.word[v];
    }
#pragma unroll
    for (int w = 0; w < WORDS; w++) above[w] = of_rank<WORDS>(s->sum, root[w]) - low;
    while (s->rows > 0) {
        int32_t room[WORDS], end = -1, n = INT32_MAX;
#pragma unroll
        for (int w = WORDS - 1; w >= 0; w--) {
            const uint32_t ends = __ballot_sync(ALL_LANES, is_end[w] && above[w] > 0);
            if (ends) end = w * WARP + __ffs((int)ends) - 1;
            room[w] = m.x[paths[w].from];
        }
        if (end < 0) return;
        const int32_t from = of_rank<WORDS>(root, end);
        const int32_t most = min(of_rank<WORDS>(above, end), of_rank<WORDS>(lack, end));
        uint32_t on[WORDS];
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
            on[w] = of_rank<WORDS>(way[w], end) >> lane & 1;
            if (on[w]) n = min(n, room[w]);
        }
        n = min(most, __reduce_min_sync(ALL_LANES, n));
        s->rows -= n;
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
            const int32_t d = w * WARP + lane;
            if (d == end) is_end[w] = false;
            if (root[w] == from) above[w] -= n;
            if (d == end) s->sum[w] += n;
            if (d == from) s->sum[w] -= n;
            if (!on[w] || n == 0) continue;
            m.x[paths[w].from] = room[w] - n;
            m.x[paths[w].into] += n;
        }
        __syncwarp();
    }
}

template <int WORDS>
static __device__ void balance(const split_memory &m) {
    const int lane = threadIdx.x % WARP;
    rank_set<WORDS> in[WORDS];
    arcs<WORDS> arcs;
    walk<WORDS> s;
    path<WORDS> paths[WORDS];
    int32_t low = set_goals(m, lane);
    bool knows = false; /* neighbors */
    even_out<WORDS>(m, lane);
    read_sums<WORDS>(m, &s, lane);
    if (!begin_search<WORDS>(&s, low, lane)) return;
    list_arcs<WORDS>(m, &arcs, lane);
    do {
        if (!knows) find_neighbors<WORDS>(m, arcs, in, lane);
        knows = !search<WORDS>(&s, in, lane);
        if (knows) {
            low = raised_bound<WORDS>(s, lane);
            continue;
        }
        find_paths<WORDS>(m, arcs, s, paths, lane);
        push_all<WORDS>(m, &s, paths, low, lane);
    } while (begin_search<WORDS>(&s, low, lane));
}

template <int WORDS>
static __global__ void __launch_bounds__(THREADS) moe_split(hd_moe_split_args a) {
    extern __shared__ __align__(16) int32_t shared[];
    const split_memory m = place_memory(shared, a.shape);
    const int32_t words = hd_split_words(a.shape), work = work_words(a.shape);
    griddepcontrol_launch_dependents();
    /* The graph changes between steps only. */
    for (int32_t i = threadIdx.x; i < words / 4; i += THREADS) {
        reinterpret_cast<int4 *>(shared)[i] = reinterpret_cast<const int4 *>(a.graph)[i];
    }
    for (int32_t i = words / 4 * 4 + threadIdx.x; i < words; i += THREADS)
        shared[i] = a.graph[i];
    for (int32_t i = threadIdx.x; i < work; i += THREADS) m.sum[i] = 0;
    griddepcontrol_wait();
    for (int32_t i = threadIdx.x; i < a.shape.slots; i += THREADS)
        a.first[i] = 0; /* of empty slots */
    __syncthreads();
    count_all(a, m);
    __syncthreads();
    start(m);
    __syncthreads();
    if (threadIdx.x < WARP) balance<WORDS>(m);
    __syncthreads();
    take_part(a, m);
    __syncthreads();
    write_offsets(a, m);
}

using split_kernel = void (*)(hd_moe_split_args);

void hd_moe_split_cuda(hd_stream *s, const hd_moe_split_args *a) {
    static const split_kernel kernels[] = {moe_split<1>, moe_split<2>, moe_split<3>};
    const size_t words = (size_t)graph_words(a->shape) + (size_t)work_words(a->shape);
    const size_t bytes = words * sizeof(int32_t), sets = ((size_t)a->shape.ranks + 31) / 32;
    if (bytes > hd_cuda_shared_limit() - RESERVED || sets > HD_LEN(kernels) ||
        a->shape.slots > UINT16_MAX) {
        return hd_stream_fail(s, HD_EUNSUPPORTED,
                              "moe_split: too many slots or ranks of a layer");
    }
    const split_kernel kernel = kernels[sets - 1];
    hd_cuda_allow_shared((const void *)kernel, bytes);
    launch_kernel(hd_cuda_stream(s), kernel, dim3(1), THREADS, bytes, 1, *a);
    hd_cuda_check(s, "moe_split");
}
