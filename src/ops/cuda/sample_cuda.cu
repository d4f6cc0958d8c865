/* sample_cuda.cu - choosing tokens, without sorting the vocabulary.
 *
 * The arithmetic is that of sample_internal.h, step by step and unfused, in whole numbers of
 * 2^-40: the token is the CPU's for the same logits. On Hopper a row has a cluster of blocks, each of
 * which keeps the scores of its ids in shared memory, so that logits are read once; elsewhere it has one
 * block, and its scores lie in scratch. The place where top-k or top-p cuts is found in
 * a histogram over the scaled score, then digit by digit over (score, id), until so few
 * candidates are left that they can be sorted. */
#include "ops/cuda/sample_internal.cuh"

constexpr int THREADS = 512, WARPS = THREADS / WARP;
constexpr int CLUSTER = 8;                                  /* blocks of a row on Hopper */
constexpr int BINS = 2048, BINS_PER_UNIT = 68;              /* of the scaled score; 30 units */
constexpr int DIGIT_BITS = 11, TOP_SHIFT = 64 - DIGIT_BITS; /* of a rank */
constexpr int AT_ONCE = 8; /* scores of a thread on their way */
static_assert(BINS == 1 << DIGIT_BITS, "a digit is a bin");

/* How many candidates, and their weight. */
struct tally {
    whole n, weight;
};

/* Bins while they grow in shared memory, where only 32-bit numbers are added at once: a weight of
 * up to 2^40 in pieces of 14 bits, whose sums hold for a vocabulary below 2^18. */
struct heaps {
    uint32_t n[BINS], piece[3][BINS];
};

static __device__ __forceinline__ void add_to(heaps *to, int32_t bin, whole weight) {
    atomicAdd(&to->n[bin], 1u);
    if (weight == 0) return;
    atomicAdd(&to->piece[0][bin], (uint32_t)(weight & 0x3fff));
    if (weight >> 14) atomicAdd(&to->piece[1][bin], (uint32_t)(weight >> 14 & 0x3fff));
    if (weight >> 28) atomicAdd(&to->piece[2][bin], (uint32_t)(weight >> 28));
}

/* ---- whole blocks ---- */

static __device__ whole block_max(whole x) {
    __shared__ whole part[WARPS];
    for (int step = WARP / 2; step > 0; step /= 2) {
        x = max(x, __shfl_xor_sync(ALL_LANES, x, step));
    }
    if (threadIdx.x % WARP == 0) part[threadIdx.x / WARP] = x;
    __syncthreads();
    for (int w = 0; w < WARPS; w++) x = max(x, part[w]);
    __syncthreads();
    return x;
}

/* The sum of x over this thread and those before it, and over all. */
static __device__ whole block_scan(whole x, whole *all) {
    __shared__ whole part[WARPS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    for (int step = 1; step < WARP; step *= 2) {
        const whole left = __shfl_up_sync(ALL_LANES, x, step);
        if (lane >= step) x += left;
    }
    if (lane == WARP - 1) part[warp] = x;
    __syncthreads();
    *all = 0;
    for (int w = 0; w < WARPS; w++) {
        if (w < warp) x += part[w];
        *all += part[w];
    }
    __syncthreads();
    return x;
}

/* ---- whole clusters ---- */

/* Of candidates that are looked for: those whose scaled score is in a stretch of fine steps and
 * whose ranks begin with known digits. */
struct place {
    uint32_t first, n;
    whole prefix, mask;
};

/* Where a search stops: in which bin, what is above it, and how many are in it. */
struct crossing {
    int32_t bin; /* -1: nowhere */
    uint32_t n;
    tally above;
};

/* A block's shared memory, besides its scores; N blocks have a row. */
template <int N>
struct sample_shared {
    union {
        heaps bins;
        whole top[N][HD_MAX_ALTERNATIVES]; /* when the search in bins is over */
    };
    whole list[THREADS]; /* candidates of the block; then of the cluster, in order */
    tally given[2][N];   /* by every block to every other, in turn */
    crossing found;      /* by one of the blocks */
    uint32_t n_listed;
    int32_t token;
};

/* What the blocks of a row know of each other. */
template <int N>
struct row_cluster {
    sample_shared<N> *own;
    int parity;

    static __device__ __forceinline__ unsigned rank() {
        return N == 1 ? 0 : cluster_rank();
    }
    static __device__ __forceinline__ void sync() {
        if (N == 1) {
            __syncthreads();
        } else {
            cluster_sync();
        }
    }
    /* The same place in the shared memory of block b. */
    template <typename T>
    static __device__ __forceinline__ T *at(T *place, unsigned b) {
        return N == 1 ? place : cluster_at(place, b);
    }
};

/* What every block gives, the same in all of its threads; good until the next but one. */
template <int N>
static __device__ const tally *exchange(row_cluster<N> *c, tally own) {
    tally *slot = c->own->given[c->parity];
    c->parity ^= 1;
    if (threadIdx.x < N) c->at(slot, threadIdx.x)[c->rank()] = own;
    c->sync();
    return slot;
}

template <int N>
static __device__ tally sum_over(row_cluster<N> *c, tally own) {
    const tally *each = exchange(c, own);
    tally sum = {};
    for (int b = 0; b < N; b++) {
        sum.n += each[b].n;
        sum.weight += each[b].weight;
    }
    return sum;
}

/* ---- a row on its way to a token ---- */

struct row_state {
    const hd_sampling *p;
    const float *logits; /* [vocab] */
    float *y;            /* [n] this block's scores, in shared memory */
    float max, inverse;  /* of all scores; 1 / temperature */
    int32_t first;       /* the block's first id */
    int32_t each;        /* ids of a block */
    int32_t n, n_vocab;  /* the block's that have a token; all of the block's */
};

/* A token may be drawn if it is this one or before it in the order of scores, and no lower
 * than `least` when scaled. */
struct limit {
    whole rank;
    float least;
};

/* Logits into scores. */
static __device__ void make_scores(const hd_sample_args &a, int32_t row, const row_state &r) {
    const hd_sampling &p = *r.p;
    const int32_t n_ban = a.position[row] < p.ban_until ? p.n_ban : 0;
    const uint32_t *mask = nullptr;
    if (a.mask && a.mask_row[row] >= 0) {
        mask = a.mask + a.mask_row[row] * (((int64_t)a.vocab + 31) / 32);
    }
    __syncthreads();
    for (int32_t i = threadIdx.x; i < p.n_bias;
         i += THREADS) { /* of equal ids the first adds */
        const hd_logit_bias *bias = a.bias + p.bias_at;
        const int32_t id = bias[i].token;
        bool first = id >= r.first && id - r.first < r.n;
        for (int32_t k = 0; first && k < i; k++) first = bias[k].token != id;
        for (int32_t k = i; first && k < p.n_bias; k++) {
            if (bias[k].token == id) r.y[id - r.first] += bias[k].value;
        }
    }
    __syncthreads();
    for (int32_t i = threadIdx.x; i < n_ban; i += THREADS) {
        const int32_t at = a.bias[p.ban_at + i].token - r.first;
        if (at >= 0 && at < r.n) r.y[at] = -CUDART_INF_F;
    }
    __syncthreads();
    const bool penalties = has_penalty(p);
    const uint16_t *counts = a.counts + (int64_t)p.counts_row * a.vocab;
    const int32_t n_drafted = penalties && a.n_drafted ? a.n_drafted[row] : 0;
    for (int32_t i = threadIdx.x; i < r.n; i += THREADS) {
        const int32_t id = r.first + i;
        if (mask && !(mask[id / 32] >> (id % 32) & 1u)) r.y[i] = -CUDART_INF_F;
        if (!penalties || r.y[i] == -CUDART_INF_F) continue;
        int32_t output = counts[id] & HD_COUNT_OUTPUT;
        for (int32_t k = 0; k < n_drafted; k++) output += a.input[row - k] == id;
        r.y[i] = penalized(p, r.y[i], output > 0 || (counts[id] & HD_COUNT_PROMPT), output);
    }
    __syncthreads();
}

/* ---- ranks ---- */

static __device__ __forceinline__ int32_t index_of(whole rank) {
    return (int32_t) ~(uint32_t)rank;
}

/* The score of a rank; a zero has lost its sign. */
static __device__ __forceinline__ float score_of(whole rank) {
    const uint32_t order = (uint32_t)(rank >> 32);
    return __uint_as_float(order >> 31 ? order ^ 0x80000000u : ~order);
}

static __device__ __forceinline__ whole rank_at(const row_state &r, int32_t i) {
    return rank_of(r.y[i], r.first + i);
}

/* For the largest of a row: 0 for -inf, the highest of all for what is broken. */
static __device__ __forceinline__ whole survey_rank(float y, int32_t id) {
    return is_broken(y) ? ~0ull : y == -CUDART_INF_F ? 0 : (whole)rank_of(y, id);
}

static __device__ __forceinline__ float scaled_score(const row_state &r, float y) {
    return scaled(y, r.max, r.inverse);
}

/* ---- where top-k and top-p cut ---- */

/* Steps of the scaled score have the order of scores, the highest first; of BINS in a bin. What is
 * in the last bin has no weight. */
static __device__ __forceinline__ uint32_t step_at(float z) {
    constexpr float LAST = (float)(BINS - 1) * BINS;
    return (uint32_t)(z <= LEAST_SCALED ? LAST : z * -(float)(BINS_PER_UNIT * BINS));
}

static __device__ __forceinline__ bool is_within(const place &at, uint32_t step, whole rank) {
    return step - at.first < at.n && (rank & at.mask) == at.prefix;
}

/* What the bins of a search stand for: bins of the score, its steps within one, or digits of a rank
 * within one step. */
enum search_kind { BY_SCORE, BY_STEP, BY_RANK };

template <search_kind KIND>
static __device__ __forceinline__ int32_t bin_of(const place &at, uint32_t step, whole rank,
                                                 int shift) {
    if (KIND == BY_SCORE) return (int32_t)(step >> DIGIT_BITS);
    if (!is_within(at, step, rank)) return -1;
    return KIND == BY_STEP ? (int32_t)(step & (BINS - 1))
                           : BINS - 1 - (int32_t)(rank >> shift & (BINS - 1));
}

/* The block's candidates that are not behind the limit, into its bins. */
template <search_kind KIND>
static __device__ void fill_bins(const row_state &r, heaps *bins, const limit &limit,
                                 const place &at, int shift, bool by_weight) {
    uint32_t last = 0; /* often nearly all, which would queue for one bin */
    uint4 *zeros = reinterpret_cast<uint4 *>(bins);
    for (int i = threadIdx.x; i < (int)(sizeof *bins / sizeof *zeros); i += THREADS) {
        zeros[i] = {};
    }
    __syncthreads();
    for (int32_t first = threadIdx.x; first < r.n; first += AT_ONCE * THREADS) {
        float z[AT_ONCE];
        int32_t bin[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const int32_t i = min(first + k * THREADS, r.n - 1);
            const float y = r.y[i];
            const whole rank = rank_of(y, r.first + i);
            z[k] = scaled_score(r, y);
            bin[k] = bin_of<KIND>(at, step_at(z[k]), rank, shift);
            if (rank < limit.rank || first + k * THREADS >= r.n) bin[k] = -1;
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const bool is_last = KIND == BY_SCORE && bin[k] == BINS - 1;
            last += is_last;
            if (bin[k] < 0 || is_last) continue;
            if (by_weight) {
                add_to(bins, bin[k], weight_of(z[k]));
            } else {
                atomicAdd(&bins->n[bin[k]], 1u);
            }
        }
    }
    last = warp_sum(last);
    if (threadIdx.x % WARP == 0 && last) atomicAdd(&bins->n[BINS - 1], last);
}

/* A bin of all blocks. */
template <int N>
static __device__ tally bin_over(const row_cluster<N> &c, int32_t bin) {
    tally sum = {};
#pragma unroll 4
    for (unsigned b = 0; b < N; b++) {
        const heaps *h = &c.at(c.own, b)->bins;
        sum.n += h->n[bin];
        sum.weight += h->piece[0][bin] + ((whole)h->piece[1][bin] << 14) +
                      ((whole)h->piece[2][bin] << 28);
    }
    return sum;
}

/* What is looked for: as many candidates, or as heavy ones. */
struct goal {
    whole need;
    float top_p;    /* if not 0, need follows from the weight of all */
    bool of_weight; /* candidates without weight do not matter: the search ends before them */
};

/* The first bin of a thread's that reaches the goal, up: all above it. */
template <int N>
static __device__ crossing cross_bin(const row_cluster<N> &c, const goal &g, int32_t bin,
                                     tally up) {
    for (;; bin++) {
        const tally own = bin_over(c, bin);
        const whole reached = g.top_p != 0.0f ? up.weight + own.weight : up.n + own.n;
        if (reached >= g.need) return {bin, (uint32_t)own.n, up};
        up.n += own.n;
        up.weight += own.weight;
    }
}

/* In which bin all above and in it reach the goal. Every block has a stretch of the bins. */
template <int N>
static __device__ crossing find_crossing(row_cluster<N> *c, goal *g, tally above) {
    constexpr int EACH = BINS / N > THREADS ? BINS / N / THREADS : 1; /* bins of a thread */
    constexpr int OWN = BINS / N / EACH; /* threads that have bins */
    const int rank = (int)c->rank(), bin = (rank * OWN + (int)threadIdx.x) * EACH;
    const bool by_weight = g->top_p != 0.0f;
    c->sync();
    tally own = {};
#pragma unroll
    for (int i = 0; threadIdx.x < OWN && i < EACH; i++) {
        const tally one = bin_over(*c, bin + i);
        own.n += one.n;
        own.weight += one.weight;
    }
    tally block;
    const tally upto = {block_scan(own.n, &block.n), block_scan(own.weight, &block.weight)};
    const tally *each = exchange(c, block);
    tally all = above, before = above;
    for (int b = 0; b < N; b++) {
        if (b == rank) before = all;
        all.n += each[b].n;
        all.weight += each[b].weight;
    }
    if (by_weight && g->need == 0) g->need = nucleus(g->top_p, all.weight);
    const whole reached = by_weight ? before.weight + upto.weight : before.n + upto.n;
    const whole start = reached - (by_weight ? own.weight : own.n);
    if (start < g->need && reached >= g->need && threadIdx.x < OWN) {
        const tally up = {before.n + upto.n - own.n, before.weight + upto.weight - own.weight};
        crossing found = {bin, (uint32_t)own.n, up};
        if constexpr (EACH > 1) found = cross_bin(*c, *g, bin, up);
        for (unsigned b = 0; b < N; b++) c->at(c->own, b)->found = found;
    }
    c->sync();
    crossing found = c->own->found;
    if ((by_weight ? all.weight : all.n) < g->need) found.bin = -1;
    return found;
}

/* The cluster's candidates of a place in every block's list; how many. */
template <int N>
static __device__ int32_t list_candidates(row_cluster<N> *c, const row_state &r,
                                          const limit &limit, const place &at) {
    sample_shared<N> *own = c->own;
    if (threadIdx.x == 0) own->n_listed = 0;
    __syncthreads();
    for (int32_t first = threadIdx.x; first < r.n; first += AT_ONCE * THREADS) {
        whole rank[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const int32_t i = min(first + k * THREADS, r.n - 1);
            const float y = r.y[i];
            const whole own = rank_of(y, r.first + i);
            const bool within = first + k * THREADS < r.n && own >= limit.rank &&
                                is_within(at, step_at(scaled_score(r, y)), own);
            rank[k] = within ? own : 0;
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            if (rank[k]) own->list[atomicAdd(&own->n_listed, 1u)] = rank[k];
        }
    }
    __syncthreads();
    const tally *each = exchange(c, {own->n_listed, 0});
    int32_t n = 0, from = -1, index = 0;
    for (int b = 0; b < N; b++) {
        const int32_t count = (int32_t)each[b].n, in_block = (int32_t)threadIdx.x - n;
        if (in_block >= 0 && in_block < count) {
            from = b;
            index = in_block;
        }
        n += count;
    }
    const whole rank = from < 0 ? 0 : c->at(own->list, (unsigned)from)[index];
    c->sync(); /* lists are read before they change */
    own->list[threadIdx.x] = rank;
    __syncthreads();
    return n;
}

/* The list, an element per thread, the highest first; nothing behind n. */
static __device__ whole sort_list(whole *list, int32_t n) {
    const int t = threadIdx.x;
    whole own = list[t];
    for (int size = 2; size < 2 * n; size *= 2) {
        for (int step = size / 2; step > 0; step /= 2) {
            whole other;
            if (step < WARP) {
                other = __shfl_xor_sync(ALL_LANES, own, step);
            } else {
                list[t] = own;
                __syncthreads();
                other = list[t ^ step];
                __syncthreads();
            }
            const bool upper = (t & size) == 0, first = (t & step) == 0;
            own = upper == first ? max(own, other) : min(own, other);
        }
    }
    return own;
}

/* Where the candidates that are listed reach the goal. */
static __device__ whole rank_reached(whole *list, const row_state &r, const goal &g,
                                     tally above, int32_t n) {
    __shared__ whole found;
    const whole own = sort_list(list, n);
    const bool live = (int32_t)threadIdx.x < n;
    const whole weight = live ? weight_of(scaled_score(r, score_of(own))) : 0;
    const bool by_weight = g.top_p != 0.0f;
    const whole share = by_weight ? weight : live ? 1 : 0;
    whole all;
    const whole reached = block_scan(share, &all) + (by_weight ? above.weight : above.n);
    const whole start = reached - share;
    if (start < g.need && reached >= g.need) found = own;
    __syncthreads();
    return found;
}

/* One search: the place within which the goal is reached; false if nowhere. */
template <search_kind KIND, int N>
static __device__ bool narrow_down(row_cluster<N> *c, const row_state &r, const limit &limit,
                                   place *at, int shift, goal *g, crossing *found) {
    fill_bins<KIND>(r, &c->own->bins, limit, *at, shift, g->top_p != 0.0f);
    *found = find_crossing(c, g, found->above);
    if (found->bin < 0) return false;
    if (KIND == BY_SCORE) {
        *at = {(uint32_t)found->bin * BINS, BINS, 0, 0};
        return found->bin < BINS - 1 || !g->of_weight; /* the last bin has no weight */
    }
    if (KIND == BY_STEP) {
        at->first += (uint32_t)found->bin;
        at->n = 1;
    } else {
        at->prefix |= (whole)(BINS - 1 - found->bin) << shift;
        at->mask |= (whole)(BINS - 1) << shift;
    }
    return true;
}

/* Moves the limit up to where the most probable candidates within it together reach the goal;
 * without so many it stays. */
template <int N>
static __device__ void cut(row_cluster<N> *c, const row_state &r, limit *limit, goal g) {
    place at = {};
    crossing found = {-1, 0, {}};
    if (!narrow_down<BY_SCORE>(c, r, *limit, &at, 0, &g, &found)) return;
    if (found.n > THREADS) narrow_down<BY_STEP>(c, r, *limit, &at, 0, &g, &found);
    for (int shift = TOP_SHIFT; found.n > THREADS; shift = max(shift - DIGIT_BITS, 0)) {
        narrow_down<BY_RANK>(c, r, *limit, &at, shift, &g, &found);
    }
    const int32_t n = list_candidates(c, r, *limit, at);
    limit->rank = rank_reached(c->own->list, r, g, found.above, n);
}

/* exact: tokens without weight, which are never drawn, count for top-k, too. */
template <int N>
static __device__ limit find_limit(row_cluster<N> *c, const row_state &r, bool exact) {
    const hd_sampling &p = *r.p;
    limit at = {0, least_of(p.min_p)};
    if (p.top_k > 0) cut(c, r, &at, {(whole)p.top_k, 0.0f, !exact});
    if (p.top_p > 0.0f && p.top_p < 1.0f) cut(c, r, &at, {0, p.top_p, true});
    return at;
}

/* ---- drawing ---- */

/* The weight of a token that may be drawn, else 0. */
static __device__ __forceinline__ whole weight_within(const row_state &r, const limit &at,
                                                      int32_t i) {
    if (rank_at(r, i) < at.rank) return 0;
    const float z = scaled_score(r, r.y[i]);
    return z >= at.least ? weight_of(z) : 0;
}

/* Every thread adds up a stretch of neighboring ids; the one whose stretch holds the drawn
 * number walks through it. */
template <int N>
static __device__ int32_t draw(row_cluster<N> *c, const row_state &r, int32_t position) {
    const limit at = find_limit(c, r, false);
    const int32_t size = r.each / THREADS, first = (int32_t)threadIdx.x * size;
    const int32_t end = min(first + size, r.n);
    whole own = 0;
    for (int32_t begin = first; begin < end; begin += AT_ONCE) {
        bool any[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const int32_t i = min(begin + k, end - 1);
            any[k] = begin + k < end && rank_at(r, i) >= at.rank;
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            if (any[k]) own += weight_within(r, at, begin + k);
        }
    }
    whole total, before = 0;
    const whole upto = block_scan(own, &total);
    const tally *each = exchange(c, {0, total});
    total = 0;
    for (unsigned b = 0; b < N; b++) {
        if (b == c->rank()) before = total;
        total += each[b].weight;
    }
    const whole number = draw_below(r.p->seed, position, total);
    whole left = number - (before + upto - own);
    if (before + upto - own <= number && number < before + upto) {
        int32_t i = first;
        for (;; i++) {
            const whole weight = weight_within(r, at, i);
            if (left < weight) break;
            left -= weight;
        }
        for (unsigned b = 0; b < N; b++) {
            c->at(c->own, b)->token = r.first + i;
        }
    }
    c->sync();
    return c->own->token;
}

/* ---- tokens that were there before ---- */

/* The token that a row takes without choosing, or -1. */
static __device__ __forceinline__ int32_t given_at(const hd_sample_args &a, int32_t row) {
    return a.given ? a.given[row] : -1;
}

/* Whether the row's draft is accepted although another token might be sampled. */
template <int N>
static __device__ bool is_relaxed_accepted(row_cluster<N> *c, const row_state &r,
                                           int32_t draft) {
    const int32_t at = draft - r.first;
    const whole mine = at >= 0 && at < r.n ? rank_at(r, at) : 0;
    const whole own = sum_over(c, {mine, 0}).n;
    const float y = score_of(own);
    if (y == -CUDART_INF_F) return false;
    tally part = {};
    for (int32_t i = threadIdx.x; i < r.n; i += THREADS) {
        part.n += rank_at(r, i) > own;
        part.weight += weight_of(scaled(r.y[i], r.max, 1.0f));
    }
    part = {block_sum<THREADS>(part.n), block_sum<THREADS>(part.weight)};
    const tally all = sum_over(c, part);
    const double weight = (double)weight_of(scaled(y, r.max, 1.0f));
    const double less = __dmul_rn((double)r.p->relaxed_delta, (double)all.weight);
    return all.n < (whole)r.p->relaxed_top && __dadd_rn(weight, less) >= 0x1p40;
}

/* ---- log-probabilities ---- */

/* The largest of logits: of all ids, and of those that have a token. Later of_tokens is that of
 * scores. */
struct largest {
    whole all, of_tokens;
};

/* What log-probabilities are taken of: logits, or scores at the temperature. */
struct basis {
    bool raw;
    float inverse;
    double log_all;
    limit at; /* tokens behind it are impossible */
};

static __device__ __forceinline__ bool is_possible(const row_state &r, const basis &b, float y,
                                                   whole rank) {
    return rank >= b.at.rank && scaled(y, r.max, b.inverse) >= b.at.least;
}

/* The highest rank of a thread's possible tokens below `below`. */
static __device__ whole next_best(const row_state &r, const basis &b, whole below) {
    whole best = 0; /* below every rank of a finite logit */
    for (int32_t i = threadIdx.x; i < r.n; i += THREADS) {
        const float x = b.raw ? r.logits[r.first + i] : r.y[i];
        const whole rank = rank_of(x, r.first + i);
        if (x != -CUDART_INF_F && rank < below && is_possible(r, b, x, rank)) {
            best = max(best, rank);
        }
    }
    return best;
}

/* The n likeliest of the row, by the first block: each has the n likeliest of its own. */
template <int N>
static __device__ void report_top(row_cluster<N> *c, const hd_sample_args &a,
                                  const row_state &r, int32_t row, const basis &b) {
    const int32_t n = r.p->n_top;
    whole own = next_best(r, b, ~0ull);
    whole *to = c->at(c->own->top[c->rank()], 0);
    for (int32_t k = 0; k < n; k++) {
        const whole best = block_max(own);
        if (threadIdx.x == 0) to[k] = best;
        if (best && best == own) own = next_best(r, b, own);
    }
    c->sync();
    if (c->rank() != 0 || threadIdx.x >= WARP) return;
    int32_t at = 0; /* lane b walks through what block b has */
    for (int32_t k = 0; k < n; k++) {
        const whole mine = threadIdx.x < N && at < n ? c->own->top[threadIdx.x][at] : 0;
        whole best = mine;
        for (int step = N / 2; step > 0; step /= 2) {
            best = max(best, __shfl_xor_sync(ALL_LANES, best, step));
        }
        if (best && best == mine) at++;
        const int32_t id = best ? index_of(best) : -1;
        if (threadIdx.x != 0) continue;
        const int64_t place = (int64_t)row * a.top_stride + k;
        a.top_id[place] = id;
        a.top_logprob[place] =
            id < 0 ? -CUDART_INF_F : logprob_at(score_of(best), b.inverse, b.log_all);
    }
}

template <int N>
static __device__ basis raw_basis(row_cluster<N> *c, const row_state &r, float raw_max) {
    whole total = 0;
    for (int32_t i = threadIdx.x; i < r.n_vocab; i += THREADS) {
        total += weight_of(scaled(r.logits[r.first + i], raw_max, 1.0f));
    }
    total = sum_over(c, {0, block_sum<THREADS>(total)}).weight;
    return {
        true, 1.0f, log_total(raw_max, 1.0f, total), {0, -CUDART_INF_F}
    };
}

/* Scores of ids that have no token are their logits. */
template <int N>
static __device__ basis tempered_basis(row_cluster<N> *c, const row_state &r) {
    float all_max = r.max;
    whole rest = 0, total = 0;
    for (int32_t i = r.n + threadIdx.x; i < r.n_vocab; i += THREADS) {
        rest = max(rest, survey_rank(r.y[i], r.first + i));
    }
    const tally *each = exchange(c, {block_max(rest), 0});
    for (int b = 0; b < N; b++) {
        if (each[b].n) all_max = fmaxf(all_max, score_of(each[b].n));
    }
    for (int32_t i = threadIdx.x; i < r.n_vocab; i += THREADS) {
        total += weight_of(scaled(r.y[i], all_max, r.inverse));
    }
    total = sum_over(c, {0, block_sum<THREADS>(total)}).weight;
    return {
        false, r.inverse, log_total(all_max, r.inverse, total), {0, -CUDART_INF_F}
    };
}

template <int N>
static __device__ basis sampled_basis(row_cluster<N> *c, const row_state &r) {
    const limit at = find_limit(c, r, true);
    whole total = 0;
    for (int32_t i = threadIdx.x; i < r.n; i += THREADS) total += weight_within(r, at, i);
    total = sum_over(c, {0, block_sum<THREADS>(total)}).weight;
    return {false, r.inverse, log_total(r.max, r.inverse, total), at};
}

/* The token's log-probability, by the block that has its score. */
static __device__ void report_own(const hd_sample_args &a, const row_state &r, int32_t row,
                                  const basis &b, hd_logprob_mode mode, int32_t token) {
    const int32_t i = token - r.first;
    if (threadIdx.x != 0 || i < 0 || i >= r.n_vocab) return;
    const float y = b.raw ? r.logits[token] : r.y[i];
    const bool possible = (mode != HD_LOGPROB_SAMPLED || i < r.n) && y != -CUDART_INF_F &&
                          is_possible(r, b, y, rank_of(y, token));
    a.logprob[row] = possible ? logprob_at(y, b.inverse, b.log_all) : -CUDART_INF_F;
}

template <int N>
static __device__ void report(row_cluster<N> *c, const hd_sample_args &a, row_state &r,
                              int32_t row, const largest &best, int32_t token) {
    const bool own = r.p->logprob || given_at(a, row) >= 0;
    if (!own && r.p->n_top <= 0) return;
    const hd_logprob_mode mode = r.p->temperature > 0.0f ? r.p->logprob_mode : HD_LOGPROB_RAW;
    r.max = best.of_tokens ? score_of(best.of_tokens) : -CUDART_INF_F;
    if (mode != HD_LOGPROB_RAW) r.inverse = inverse_temperature(r.p->temperature);
    const basis b = mode == HD_LOGPROB_RAW
                        ? raw_basis(c, r, best.all ? score_of(best.all) : -CUDART_INF_F)
                    : mode == HD_LOGPROB_TEMPERED ? tempered_basis(c, r)
                                                  : sampled_basis(c, r);
    if (own) report_own(a, r, row, b, mode, token);
    if (r.p->n_top > 0) report_top(c, a, r, row, b);
}

/* ---- rows ---- */

/* Of a thread's logits so far, whose ids grow. */
struct running_best {
    float y;
    int32_t id;
    bool broken;

    __device__ __forceinline__ void add(float x, int32_t at) {
        broken = broken || is_broken(x);
        if (x > y) {
            y = x;
            id = at;
        }
    }
    __device__ __forceinline__ whole rank() const {
        return broken ? ~0ull : survey_rank(y, id);
    }
};

/* The block's logits as its scores. */
static __device__ largest load_scores(const row_state &r) {
    running_best all = {-CUDART_INF_F, 0, false}, of_tokens = all;
    for (int32_t first = threadIdx.x; first < r.n_vocab; first += 2 * AT_ONCE * THREADS) {
        float x[2 * AT_ONCE];
#pragma unroll
        for (int k = 0; k < 2 * AT_ONCE; k++) {
            const int32_t i = first + k * THREADS;
            x[k] = i < r.n_vocab ? r.logits[r.first + i] : -CUDART_INF_F;
        }
#pragma unroll
        for (int k = 0; k < 2 * AT_ONCE; k++) {
            const int32_t i = first + k * THREADS;
            if (i < r.n_vocab) r.y[i] = x[k];
            all.add(x[k], r.first + i);
            if (i < r.n) of_tokens.add(x[k], r.first + i);
        }
    }
    return {all.rank(), of_tokens.rank()};
}

template <int N>
static __device__ largest largest_over(row_cluster<N> *c, largest own) {
    const tally *each = exchange(c, {block_max(own.all), block_max(own.of_tokens)});
    largest best = {};
    for (int b = 0; b < N; b++) {
        best.all = max(best.all, each[b].n);
        best.of_tokens = max(best.of_tokens, each[b].weight);
    }
    return best;
}

/* Whether scores are not the logits. */
static __device__ bool are_scores_made(const hd_sample_args &a, const hd_sampling &p,
                                       int32_t row) {
    const bool masked = a.mask && a.mask_row[row] >= 0;
    const bool banned = a.position[row] < p.ban_until && p.n_ban > 0;
    return masked || banned || p.n_bias > 0 || has_penalty(p);
}

/* best: the rank of the largest score. */
template <int N>
static __device__ int32_t choose_by_score(row_cluster<N> *c, const hd_sample_args &a,
                                          row_state &r, int32_t row, whole best) {
    const hd_sampling &p = *r.p;
    if (best == ~0ull) return HD_TOKEN_BROKEN;
    if (best == 0) return HD_TOKEN_NONE;
    r.max = score_of(best);
    const bool relaxed = a.draft && p.relaxed_top > 0 && p.relaxed_delta > 0.0f;
    if (relaxed && a.draft[row] >= 0 && is_relaxed_accepted(c, r, a.draft[row]))
        return a.draft[row];
    if (p.temperature <= 0.0f || p.top_k == 1) return index_of(best);
    r.inverse = inverse_temperature(p.temperature);
    return draw(c, r, a.position[row]);
}

template <int N>
static __device__ int32_t choose(row_cluster<N> *c, const hd_sample_args &a, row_state &r,
                                 int32_t row) {
    const int32_t given = given_at(a, row);
    const bool made = given < 0 && are_scores_made(a, *r.p, row);
    largest best = load_scores(r);
    if (made) {
        make_scores(a, row, r);
        best.of_tokens = 0;
        for (int32_t i = threadIdx.x; i < r.n; i += THREADS) {
            best.of_tokens = max(best.of_tokens, survey_rank(r.y[i], r.first + i));
        }
    }
    best = largest_over(c, best);
    if (best.all == ~0ull) return HD_TOKEN_BROKEN;
    const int32_t token = given >= 0 ? given : choose_by_score(c, a, r, row, best.of_tokens);
    if (token >= 0) report(c, a, r, row, best, token);
    return token;
}

/* Whether code is wanted for rows of N blocks. */
template <int N>
constexpr bool HAS_ROWS = FOR_SM90 || N == 1;

/* Ids of a block: an odd number for each thread, so that threads do not meet in a bank. */
static int32_t ids_each(int32_t vocab, int blocks) {
    return (int32_t)(blocks_for(vocab, blocks * THREADS) | 1) * THREADS;
}

/* each: ids of a block; y: its scores. */
template <int N>
static __device__ void sample_row(const hd_sample_args &a, int32_t row, int32_t each,
                                  float *y) {
    __shared__ __align__(16) sample_shared<N> shared;
    row_cluster<N> c = {&shared, 0};
    const int32_t first = (int32_t)blockIdx.x * each;
    if (N > 1) cluster_arrive(); /* all are there before they are written to */
    row_state r = {};
    r.p = &a.params[a.slot[row]];
    r.logits = a.logits + (int64_t)row * a.vocab;
    r.y = y;
    r.first = first;
    r.each = each;
    r.n = max(min(each, a.n_ids - first), 0);
    r.n_vocab = max(min(each, a.vocab - first), 0);
    if (N > 1) cluster_wait();
    const int32_t token = choose(&c, a, r, row);
    if (blockIdx.x == 0 && threadIdx.x == 0) a.token[row] = token;
}

static __global__ void __launch_bounds__(THREADS, 2) HD_CLUSTERS_OF(CLUSTER)
    sample(hd_sample_args a, int32_t each) {
    extern __shared__ __align__(16) float scores[];
    if constexpr (HAS_ROWS<CLUSTER>) {
        sample_row<CLUSTER>(a, (int32_t)blockIdx.y, each, scores);
    }
}

/* scores: [rows of the launch, each], of rows `first` and on. */
static __global__ void __launch_bounds__(THREADS, 2)
    sample_alone(hd_sample_args a, int32_t each, int32_t first, float *scores) {
    sample_row<1>(a, first + (int32_t)blockIdx.y, each, scores + (int64_t)blockIdx.y * each);
}

static void launch_sample(hd_stream *s, const hd_sample_args *a) {
    const int32_t each = ids_each(a->vocab, CLUSTER);
    const size_t bytes = (size_t)each * sizeof(float);
    if (bytes + sizeof(sample_shared<CLUSTER>) + 4096 > hd_cuda_shared_limit()) {
        hd_stream_fail(s, HD_EUNSUPPORTED, "a vocabulary this large does not fit a GPU");
        return;
    }
    hd_cuda_allow_shared((const void *)sample, bytes);
    sample<<<dim3(CLUSTER, (unsigned)a->rows), THREADS, bytes, hd_cuda_stream(s)>>>(*a, each);
}

/* As many rows at once as have room for their scores. */
static void launch_sample_alone(hd_stream *s, const hd_sample_args *a) {
    const int32_t each = ids_each(a->vocab, 1);
    const size_t room = (size_t)hd_stream_workers(s) * hd_stream_scratch_bytes(s);
    const size_t fit = room / ((size_t)each * sizeof(float));
    const int32_t at_once = fit < (size_t)a->rows ? (int32_t)fit : a->rows;
    float *scores = static_cast<float *>(hd_stream_scratch(s, 0, 0));
    if (at_once == 0) {
        hd_stream_fail(s, HD_EUNSUPPORTED,
                       "a vocabulary this large has no room for its scores");
        return;
    }
    for (int32_t first = 0; first < a->rows; first += at_once) {
        const int32_t n = a->rows - first < at_once ? a->rows - first : at_once;
        sample_alone<<<dim3(1, (unsigned)n), THREADS, 0, hd_cuda_stream(s)>>>(*a, each, first,
                                                                              scores);
    }
}

void hd_sample_cuda(hd_stream *s, const hd_sample_args *a) {
    if (a->rows == 0) return;
    if (a->vocab >= 1 << 18) {
        hd_stream_fail(s, HD_EUNSUPPORTED, "a vocabulary this large does not fit a GPU");
    } else if (hd_cuda_is_sm90()) {
        launch_sample(s, a);
    } else {
        launch_sample_alone(s, a);
    }
    hd_cuda_check(s, "sample");
}

template <int N>
static __device__ void argmax_row(hd_argmax_args a) {
    __shared__ whole found[N];
    const int32_t row = (int32_t)blockIdx.y;
    const float *x = a.logits + (int64_t)row * a.vocab;
    const uint32_t *mask = nullptr;
    if (N > 1) cluster_sync(); /* all are there before they are written to */
    if (a.mask && a.mask_row[row] >= 0) {
        mask = a.mask + a.mask_row[row] * (((int64_t)a.vocab + 31) / 32);
    }
    whole best = rank_of(-CUDART_INF_F, 0);
#pragma unroll 8
    for (int32_t id = (int32_t)(blockIdx.x * THREADS + threadIdx.x); id < a.n_ids;
         id += N * THREADS) {
        const bool allowed = !mask || mask[id / 32] >> (id % 32) & 1u;
        if (allowed && x[id] > -CUDART_INF_F) best = max(best, (whole)rank_of(x[id], id));
    }
    best = block_max(best);
    if (threadIdx.x == 0) row_cluster<N>::at(found, 0)[row_cluster<N>::rank()] = best;
    row_cluster<N>::sync();
    if (blockIdx.x != 0 || threadIdx.x != 0) return;
    for (int b = 1; b < N; b++) best = max(best, found[b]);
    a.token[row] = index_of(best);
}

static __global__ void __launch_bounds__(THREADS) HD_CLUSTERS_OF(CLUSTER)
    argmax(hd_argmax_args a) {
    if constexpr (HAS_ROWS<CLUSTER>) argmax_row<CLUSTER>(a);
}

static __global__ void __launch_bounds__(THREADS) argmax_alone(hd_argmax_args a) {
    argmax_row<1>(a);
}

void hd_argmax_cuda(hd_stream *s, const hd_argmax_args *a) {
    const unsigned rows = (unsigned)a->rows;
    if (a->rows == 0) return;
    if (hd_cuda_is_sm90()) {
        argmax<<<dim3(CLUSTER, rows), THREADS, 0, hd_cuda_stream(s)>>>(*a);
    } else {
        argmax_alone<<<dim3(1, rows), THREADS, 0, hd_cuda_stream(s)>>>(*a);
    }
    hd_cuda_check(s, "argmax");
}

/* ---- counting and verifying ---- */

static __global__ void __launch_bounds__(THREADS) clear_counts(hd_count_tokens_args a) {
    uint16_t *row = a.counts + (int64_t)a.clear[blockIdx.x] * a.vocab;
    for (int32_t id = threadIdx.x; id < a.vocab; id += THREADS) row[id] = 0;
}

/* One thread: a few tokens per step, and equal ones must add up; a prompt once per request. */
static __global__ void count_tokens(hd_count_tokens_args a) {
    for (int32_t i = 0; i < a.n; i++) {
        if (a.token[i] < 0) continue;
        uint16_t *count = &a.counts[(int64_t)a.row[i] * a.vocab + a.token[i]];
        if (a.prompt) {
            *count |= HD_COUNT_PROMPT;
        } else if ((*count & HD_COUNT_OUTPUT) < HD_COUNT_OUTPUT) {
            ++*count;
        }
    }
}

void hd_count_tokens_cuda(hd_stream *s, const hd_count_tokens_args *a) {
    cudaStream_t queue = hd_cuda_stream(s);
    if (a->n_clear > 0) clear_counts<<<a->n_clear, THREADS, 0, queue>>>(*a);
    if (a->n > 0) count_tokens<<<1, 1, 0, queue>>>(*a);
    hd_cuda_check(s, "count_tokens");
}

static __global__ void verify(hd_verify_args a) {
    const int32_t i = (int32_t)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= a.n) return;
    const int32_t first = a.first_row[i], last = a.first_row[i + 1] - 1;
    int32_t r = first;
    while (r < last && a.token[r] == a.input[r + 1]) r++;
    a.accepted[i] = r - first;
    a.next[i] = a.token[r];
}

void hd_verify_cuda(hd_stream *s, const hd_verify_args *a) {
    if (a->n == 0) return;
    verify<<<blocks_for(a->n, WARP), WARP, 0, hd_cuda_stream(s)>>>(*a);
    hd_cuda_check(s, "verify");
}
