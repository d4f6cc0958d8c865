/* topk_cuda.cu - the keys, or blocks of keys, that the indexer keeps of a row: exactly the k best, the
 * lower position first among equals, in ascending order.
 *
 * The last kept score is found digit by digit in histograms; then all that are above it are
 * written in order, and as many equal ones as are left. A row is a block's, or, where rows are few
 * and keys many, a cluster's on Hopper: each block has a stretch of the keys, read once into shared
 * memory.
 * Counts are whole numbers, so that the order of adding does not matter. */
#include "ops/cuda/indexer_internal.cuh"

constexpr int THREADS = 1024, WARPS = THREADS / WARP, BLOCKS = 8, SMALL_M_ROWS = 32;
constexpr int DIGITS = 3, BINS = 2048;    /* of a score's order: 11, 11 and 10 bits */
constexpr int32_t ALONE = 8 * THREADS;    /* keys that one block searches fastest */
constexpr int32_t MAX_STRETCH = 48 << 10; /* scores in shared memory */
constexpr int AT_ONCE = 8;                /* scores of a thread on their way */
constexpr size_t SUM_BYTES = 1024;        /* of shared memory that sums over a block take */
static_assert(2 * THREADS == BINS, "a thread has two bins");

/* Keys above the last kept one and equal to it. */
struct tally {
    int32_t above, equal;
};

struct best_shared {
    int32_t bin[DIGITS]
               [BINS]; /* keys of this block's stretch by digit, the ones before equal */
    int32_t digit, above,
        in; /* where the count is reached; keys above and in it, of all blocks */
    int32_t part[2][WARPS]; /* of sums over the block */
    tally own;              /* of this block's stretch */
};

/* A block's share of a row. */
struct stretch {
    const float *score; /* in shared memory, or where they were made */
    int32_t n, first;   /* the first key's position */
    int32_t n_blocks, rank;
};

/* A row's output, and the pool of its keys. */
struct best_row {
    int32_t *out; /* [k] */
    key_pool pool;
    int32_t row;
};

static __device__ __forceinline__ int32_t key_at(const best_row &r, int32_t place) {
    return r.pool.blocks ? pool_key(r.pool, r.row, place) : place;
}

/* How many scores a row has. */
static __device__ __forceinline__ int32_t n_scores(const best_args &a, int32_t row) {
    const int32_t visible = visible_entries(a.pos[row], a.ratio);
    if (a.of_blocks) return (visible + a.pool.block - 1) / a.pool.block;
    return a.pool.blocks ? pool_size<THREADS>(a.pool, row, visible) : visible;
}

static __device__ __forceinline__ int digit_shift(int i) {
    return i == 0 ? 21 : i == 1 ? 10 : 0;
}

/* The blocks of a row. */
static __device__ __forceinline__ void accumulate(const stretch &own) {
    if (own.n_blocks > 1) {
        cluster_sync();
    } else {
        __syncthreads();
    }
}

/* The sum of x over the threads before this one; `part` may be used again after the next barrier
 * but one. */
static __device__ __forceinline__ int32_t sum_before(int32_t x, int32_t *part) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int32_t upto = x;
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
        const int32_t left = __shfl_up_sync(ALL_LANES, upto, step);
        if (lane >= step) upto += left;
    }
    if (lane == WARP - 1) part[warp] = upto;
    __syncthreads();
    return upto - x + __reduce_add_sync(ALL_LANES, lane < warp ? part[lane] : 0);
}

/* Scores first, first + step, ... of the stretch; nothing behind its end. */
static __device__ __forceinline__ void get_scores(float (&x)[AT_ONCE], const stretch &own,
                                                  int32_t first, int32_t step) {
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
        const int32_t u = first + i * step;
        x[i] = u < own.n ? own.score[u] : 0.0f;
    }
}

/* Counts the stretch's keys by their digit i, of those that have the digits before. */
static __device__ __forceinline__ void count_digits(best_shared *s, const stretch &own, int i,
                                                    uint32_t prefix) {
    const int shift = digit_shift(i);
    const uint32_t known = i == 0 ? 0 : ~0u << digit_shift(i - 1);
    for (int32_t first = (int32_t)threadIdx.x; first < own.n; first += AT_ONCE * THREADS) {
        float x[AT_ONCE];
        get_scores(x, own, first, THREADS);
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const uint32_t order = order_of(x[k]);
            if (first + k * THREADS >= own.n || (order & known) != prefix) continue;
            atomicAdd(&s->bin[i][(order >> shift) & (i == 2 ? 1023 : 2047)], 1);
        }
    }
}

/* Finds the digit of the last kept key from the counts of all blocks. */
static __device__ __forceinline__ void find_digit(best_shared *s, const stretch &own, int i,
                                                  int32_t wanted) {
    const int low = BINS - 2 - 2 * (int)threadIdx.x; /* this thread's bins: low + 1, then low */
    int32_t n[2] = {};
    accumulate(own);
#pragma unroll 8
    for (int b = 0; b < own.n_blocks; b++) {
        const int32_t *bin = own.n_blocks == 1 ? s->bin[i] : cluster_at(s->bin[i], (unsigned)b);
        const int2 two = *reinterpret_cast<const int2 *>(bin + low);
        n[0] += two.y;
        n[1] += two.x;
    }
    const int32_t before = sum_before(n[0] + n[1], s->part[i & 1]);
    if (before < wanted && before + n[0] + n[1] >= wanted) {
        const bool first = before + n[0] >= wanted;
        s->digit = first ? low + 1 : low;
        s->above = first ? before : before + n[0];
    }
    __syncthreads();
}

/* A warp's stretch of the block's keys, a multiple of its lanes. */
static __device__ __forceinline__ int32_t warp_keys(const stretch &own) {
    return (own.n + THREADS - 1) / THREADS * WARP;
}

/* How many of the warp's keys are above the last kept one, and equal to it. */
static __device__ __forceinline__ tally count_kept(const stretch &own, uint32_t last) {
    const int32_t each = warp_keys(own), begin = (int32_t)threadIdx.x / WARP * each;
    const int32_t end = min(begin + each, own.n);
    tally n = {};
    for (int32_t first = begin + (int32_t)threadIdx.x % WARP; first < end;
         first += AT_ONCE * WARP) {
        float x[AT_ONCE];
        get_scores(x, own, first, WARP);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const bool live = first + i * WARP < end;
            n.above += live && order_of(x[i]) > last;
            n.equal += live && order_of(x[i]) == last;
        }
    }
    return {__reduce_add_sync(ALL_LANES, n.above), __reduce_add_sync(ALL_LANES, n.equal)};
}

/* Writes the warp's kept keys in order. before: of earlier keys; quota: how many equal ones are
 * kept. */
static __device__ __forceinline__ void write_kept(const stretch &own, uint32_t last,
                                                  int32_t quota, tally before,
                                                  const best_row &to) {
    const int lane = threadIdx.x % WARP;
    const int32_t each = warp_keys(own), begin = (int32_t)threadIdx.x / WARP * each;
    const int32_t end = min(begin + each, own.n);
    const uint32_t lower = (1u << lane) - 1;
    for (int32_t first = begin + lane; first - lane < end; first += AT_ONCE * WARP) {
        float x[AT_ONCE];
        get_scores(x, own, first, WARP);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const bool live = first + i * WARP < end;
            const bool is_above = live && order_of(x[i]) > last;
            const bool is_equal = live && order_of(x[i]) == last;
            const unsigned above = __ballot_sync(ALL_LANES, is_above);
            const unsigned equal = __ballot_sync(ALL_LANES, is_equal);
            const int32_t ties = before.equal + __popc(equal & lower);
            const int32_t at = before.above + __popc(above & lower) + min(ties, quota);
            if (is_above || (is_equal && ties < quota)) {
                to.out[at] = key_at(to, own.first + first + i * WARP);
            }
            before.above += __popc(above);
            before.equal += __popc(equal);
        }
    }
}

/* The block's kept keys into the row's output. */
static __device__ void write_best(best_shared *s, const stretch &own, uint32_t last,
                                  int32_t quota, const best_row &to) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const tally n = count_kept(own, last);
    if (lane == 0) s->part[0][warp] = n.above;
    if (lane == 0) s->part[1][warp] = n.equal;
    __syncthreads();
    const int32_t above = s->part[0][lane], equal = s->part[1][lane];
    const tally all = {__reduce_add_sync(ALL_LANES, above),
                       __reduce_add_sync(ALL_LANES, equal)};
    tally before = {__reduce_add_sync(ALL_LANES, lane < warp ? above : 0),
                    __reduce_add_sync(ALL_LANES, lane < warp ? equal : 0)};
    if (own.n_blocks > 1) {
        if (threadIdx.x == 0) s->own = all;
        cluster_sync();
        const bool earlier = lane < own.rank;
        const tally there = earlier ? *cluster_at(&s->own, (unsigned)lane) : tally{};
        before.above += __reduce_add_sync(ALL_LANES, there.above);
        before.equal += __reduce_add_sync(ALL_LANES, there.equal);
    }
    write_kept(own, last, quota, before, to);
    if (own.n_blocks > 1) cluster_sync(); /* nobody leaves while it is read */
}

/* The block's scores, in shared memory where they fit. */
static __device__ void load_stretch(stretch *own, float *room, int32_t fit) {
    if (own->n > fit) return;
    for (int32_t first = (int32_t)threadIdx.x; first < own->n; first += AT_ONCE * THREADS) {
        float x[AT_ONCE];
        get_scores(x, *own, first, THREADS);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            if (first + i * THREADS < own->n) room[first + i * THREADS] = x[i];
        }
    }
    own->score = room;
}

static __global__ void __launch_bounds__(THREADS)
    keep_best(best_args a, score_rows from, int32_t n_rows, int32_t fit) {
    extern __shared__ float room[]; /* [fit] */
    __shared__ __align__(16) best_shared shared;
    int4 *zeros = reinterpret_cast<int4 *>(shared.bin);
    for (int i = threadIdx.x; i < (int)(sizeof shared.bin / sizeof *zeros); i += THREADS) {
        zeros[i] = {};
    }
    begin_early(n_rows);
    const int32_t in_cluster = (int32_t)cluster_size();
    const int32_t rank = (int32_t)blockIdx.x % in_cluster, in_launch = blockIdx.x / in_cluster;
    const int32_t row = from.first + in_launch, n = n_scores(a, row);
    const best_row to = {a.out + (int64_t)row * a.k, a.pool, row};
    int32_t wanted = a.k;
    const int32_t n_blocks = n <= ALONE ? 1 : in_cluster;
    if (rank >= n_blocks) return;
    if (n <= a.k) {
        for (int32_t u = rank * THREADS + (int32_t)threadIdx.x; u < a.k;
             u += n_blocks * THREADS) {
            to.out[u] = u < n ? key_at(to, u) : -1;
        }
        return;
    }
    const int32_t each = (n + n_blocks - 1) / n_blocks, first = min(rank * each, n);
    stretch own = {scores_of(from, in_launch) + first, min(each, n - first), first, n_blocks,
                   rank};
    load_stretch(&own, room, fit);
    __syncthreads();
    uint32_t last = 0;
    for (int i = 0; i < DIGITS; i++) {
        count_digits(&shared, own, i, last);
        find_digit(&shared, own, i, wanted);
        last |= (uint32_t)shared.digit << digit_shift(i);
        wanted -= shared.above;
    }
    __syncthreads();
    write_best(&shared, own, last, wanted, to);
}

/* Few rows: blocks of a row work together. The host does not know how many keys a row has. */
void index_keep_best(cudaStream_t queue, const best_args &a, const score_rows &rows,
                     int32_t n) {
    const unsigned n_blocks = hd_cuda_is_sm90() && n <= SMALL_M_ROWS ? BLOCKS : 1;
    const int64_t each = a.most <= ALONE ? a.most : (a.most + n_blocks - 1) / n_blocks;
    const int64_t wanted = each < ALONE && a.most > ALONE ? ALONE : each;
    const size_t room = hd_cuda_shared_limit() - sizeof(best_shared) - SUM_BYTES;
    const int32_t most =
        room / sizeof(float) < MAX_STRETCH ? (int32_t)(room / sizeof(float)) : MAX_STRETCH;
    const int32_t fit = wanted < most ? (int32_t)wanted : most;
    const size_t bytes = (size_t)fit * sizeof(float);
    hd_cuda_allow_shared((const void *)keep_best, bytes);
    launch_early(queue, n, keep_best, dim3((unsigned)n * n_blocks), THREADS, bytes,
                 (int)n_blocks, a, rows, n, fit);
}
