/* sample_cuda.cu - choosing tokens, a block per row, without sorting the vocabulary.
 *
 * The arithmetic is that of sample_internal.h, step by step and unfused, in whole numbers of
 * 2^-40: the token is the CPU's for the same logits. The place where top-k or top-p cuts is
 * found in a histogram over the scaled score, then digit by digit over (score, id) among the
 * candidates of one bin. Bounded by reading the logits a few times from the L2 cache. */
#include "ops/cuda/cuda_internal.cuh"
#include "ops/cuda/philox_internal.cuh"

constexpr int THREADS = 1024, WARPS = THREADS / WARP, BINS = THREADS;
constexpr int BINS_PER_UNIT = 34;                       /* of the scaled score; 30 units */
constexpr int DIGIT_BITS = 8, DIGITS = 1 << DIGIT_BITS; /* of a rank; what one may be */
constexpr uint32_t DRAW_TOKEN = 1; /* high counter word of the draws of tokens */

typedef unsigned long long whole; /* what 64-bit atomics take */

/* How many candidates, and their weight. */
struct tally {
    whole n, weight;
};

/* The same while it grows in shared memory, where only 32-bit numbers are added at once: a weight of
 * up to 2^40 in pieces of 14 bits, whose sums hold for a vocabulary below 2^18. */
struct heap {
    uint32_t n, piece[3];
};

static __device__ __forceinline__ void add_to(heap *to, whole weight) {
    atomicAdd(&to->n, 1u);
    atomicAdd(&to->piece[0], (uint32_t)(weight & 0x3fff));
    atomicAdd(&to->piece[1], (uint32_t)(weight >> 14 & 0x3fff));
    atomicAdd(&to->piece[2], (uint32_t)(weight >> 28));
}

static __device__ __forceinline__ tally tally_of(const heap &h) {
    return {h.n, h.piece[0] + ((whole)h.piece[1] << 14) + ((whole)h.piece[2] << 28)};
}

/* ---- the arithmetic of sample_internal.h ---- */

static __device__ __forceinline__ bool is_broken(float logit) {
    return !(logit < CUDART_INF_F);
}

static __device__ __forceinline__ float inverse_temperature(float temperature) {
    const float inverse = __fdiv_rn(1.0f, temperature);
    return inverse < 0x1.fffffep127f ? inverse : 0x1.fffffep127f;
}

static __device__ __forceinline__ float scaled(float y, float max, float inverse) {
    const float z = __fmul_rn(__fsub_rn(y, max), inverse);
    return z > -30.0f ? z : -30.0f;
}

static __device__ __forceinline__ float step_of(float e, float f, float next) {
    return __fadd_rn(__fmul_rn(e, f), next);
}

static __device__ __forceinline__ whole weight_of(float z) {
    const float shift = 0x1.8p23f, ln2_high = 0x1.62e4p-1f, ln2_low = 0x1.7f7d1cp-20f;
    const float shifted = __fadd_rn(__fmul_rn(z, 0x1.715476p0f), shift);
    const float n = __fsub_rn(shifted, shift);
    const float f = __fsub_rn(__fsub_rn(z, __fmul_rn(n, ln2_high)), __fmul_rn(n, ln2_low));
    float e = 1.0f / 5040.0f;
    e = step_of(e, f, 1.0f / 720.0f);
    e = step_of(e, f, 1.0f / 120.0f);
    e = step_of(e, f, 1.0f / 24.0f);
    e = step_of(e, f, 1.0f / 6.0f);
    e = step_of(e, f, 0.5f);
    e = step_of(e, f, 1.0f);
    e = step_of(e, f, 1.0f);
    const uint32_t power = (__float_as_uint(shifted) - __float_as_uint(shift)) << 23;
    const double fixed = __dadd_rn((double)__uint_as_float(__float_as_uint(e) + power), 0x1p12);
    return (whole)__double_as_longlong(fixed) - 0x40b0000000000000u;
}

static __device__ __forceinline__ double log_total(float max, whole total) {
    return total ? __dadd_rn((double)max, log(__dmul_rn((double)total, 0x1p-40))) : 0.0;
}

/* hd_has_penalty() on the device. */
static __device__ __forceinline__ bool has_penalty(const hd_sampling &p) {
    return (p.repetition_penalty != 0.0f && p.repetition_penalty != 1.0f) ||
           p.presence_penalty != 0.0f || p.frequency_penalty != 0.0f;
}

static __device__ __forceinline__ float penalized(const hd_sampling &p, float y, bool seen,
                                                  int32_t output) {
    const float repetition = p.repetition_penalty;
    if (seen && repetition != 0.0f) {
        y = y > 0.0f ? __fdiv_rn(y, repetition) : __fmul_rn(y, repetition);
    }
    if (output > 0) {
        y = __fsub_rn(y, __fmul_rn(p.frequency_penalty, (float)output));
        y = __fsub_rn(y, p.presence_penalty);
    }
    return y;
}

static __device__ __forceinline__ whole nucleus(float top_p, whole total) {
    const whole need = (whole)ceil(__dmul_rn((double)top_p, (double)total));
    return need < 1 ? 1 : need > total ? total : need;
}

static __device__ __forceinline__ float least_of(float min_p) {
    return min_p >= 1.0f ? 0.0f : min_p > 0.0f ? (float)log((double)min_p) : -CUDART_INF_F;
}

/* A number in [0, total): floor(u * total) of a u in [0, 1) with 64 bits. */
static __device__ whole draw_below(uint64_t seed, int32_t position, whole total) {
    const uint2 x = philox(seed, DRAW_TOKEN, (uint64_t)position);
    const uint64_t low = (uint32_t)total, high = total >> 32;
    const uint64_t middle = x.x * low + (x.y * low >> 32);
    const uint64_t mirror = x.y * high + (uint32_t)middle;
    return x.x * high + (middle >> 32) + (mirror >> 32);
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

/* The sum of x over this thread and those before it. */
static __device__ whole block_scan(whole x) {
    __shared__ whole part[WARPS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    for (int step = 1; step < WARP; step *= 2) {
        const whole left = __shfl_up_sync(ALL_LANES, x, step);
        if (lane >= step) x += left;
    }
    if (lane == WARP - 1) part[warp] = x;
    __syncthreads();
    for (int w = 0; w < warp; w++) x += part[w];
    __syncthreads();
    return x;
}

/* ---- a row on its way to a token ---- */

struct row_state {
    const hd_sampling *p;
    const float *logits; /* [vocab] */
    const float *y;      /* [n_ids] scores: the logits themselves or scratch */
    int32_t *list;       /* [n_ids] scratch: candidates of one bin */
    float max, inverse;  /* of y; 1 / temperature */
    int32_t n_ids;
};

/* A token may be drawn if it is this one or before it in the order of scores, and no lower
 * than `least` when scaled. */
struct limit {
    whole rank;
    float least;
};

/* Logits into scores, in scratch. */
static __device__ void make_scores(const hd_sample_args &a, int32_t row, float *y) {
    const hd_sampling &p = a.params[a.slot[row]];
    const float *logits = a.logits + (int64_t)row * a.vocab;
    const int32_t n_ban = a.position[row] < p.ban_until ? p.n_ban : 0;
    const uint32_t *mask = nullptr;
    if (a.mask && a.mask_row[row] >= 0) {
        mask = a.mask + a.mask_row[row] * (((int64_t)a.vocab + 31) / 32);
    }
    for (int32_t id = threadIdx.x; id < a.n_ids; id += THREADS) y[id] = logits[id];
    __syncthreads();
    for (int32_t i = threadIdx.x; i < p.n_bias;
         i += THREADS) { /* of equal ids the first adds */
        const hd_logit_bias *bias = a.bias + p.bias_at;
        const int32_t id = bias[i].id;
        bool first = id < a.n_ids;
        for (int32_t k = 0; first && k < i; k++) first = bias[k].id != id;
        for (int32_t k = i; first && k < p.n_bias; k++) {
            if (bias[k].id == id) y[id] += bias[k].value;
        }
    }
    __syncthreads();
    for (int32_t i = threadIdx.x; i < n_ban; i += THREADS) {
        const int32_t id = a.bias[p.ban_at + i].id;
        if (id < a.n_ids) y[id] = -CUDART_INF_F;
    }
    __syncthreads();
    const bool penalties = has_penalty(p);
    const uint16_t *counts = a.counts + (int64_t)p.counts_row * a.vocab;
    const int32_t n_drafted = penalties && a.n_drafted ? a.n_drafted[row] : 0;
    for (int32_t id = threadIdx.x; id < a.n_ids; id += THREADS) {
        if (mask && !(mask[id / 32] >> (id % 32) & 1u)) y[id] = -CUDART_INF_F;
        if (!penalties || y[id] == -CUDART_INF_F) continue;
        int32_t output = counts[id] & HD_COUNT_OUTPUT;
        for (int32_t i = 0; i < n_drafted; i++) output += a.input[row - i] == id;
        y[id] = penalized(p, y[id], output > 0 || (counts[id] & HD_COUNT_PROMPT), output);
    }
    __syncthreads();
}

static __device__ __forceinline__ float scaled_at(const row_state &r, int32_t id) {
    return scaled(r.y[id], r.max, r.inverse);
}

/* What has no weight is below all that has, in the last bin. */
static __device__ __forceinline__ int32_t bin_of(float z, whole weight) {
    return weight ? (int32_t)(z * -(float)BINS_PER_UNIT) : BINS - 1;
}

/* The tally of the bins, from the most probable on. */
static __device__ void fill_bins(const row_state &r, heap *bin) {
    whole weightless = 0; /* often nearly all, which would queue for one bin */
    bin[threadIdx.x] = {};
    __syncthreads();
    for (int32_t id = threadIdx.x; id < r.n_ids; id += THREADS) {
        const float z = scaled_at(r, id);
        const whole weight = weight_of(z);
        if (weight == 0) {
            weightless++;
            continue;
        }
        add_to(&bin[bin_of(z, weight)], weight);
    }
    weightless = block_sum<THREADS>(weightless);
    if (threadIdx.x == 0) bin[BINS - 1].n += (uint32_t)weightless;
    __syncthreads();
}

/* The rank at which the listed candidates, with what is above them, reach need: digit by digit, in
 * tallies of those that share the digits before. */
static __device__ whole narrow_down(const row_state &r, int32_t n, tally *above, whole need,
                                    bool by_weight) {
    __shared__ heap bin[DIGITS]; /* the highest digit first */
    __shared__ tally before;
    __shared__ whole digit;
    const bool own_bin = threadIdx.x < DIGITS;
    whole prefix = 0, mask = 0;
    for (int shift = 64 - DIGIT_BITS; shift >= 0; shift -= DIGIT_BITS) {
        if (own_bin) bin[threadIdx.x] = {};
        __syncthreads();
        for (int32_t i = threadIdx.x; i < n; i += THREADS) {
            const int32_t id = r.list[i];
            const whole rank = rank_of(r.y[id], id);
            if ((rank & mask) != prefix) continue;
            add_to(&bin[DIGITS - 1 - (rank >> shift & (DIGITS - 1))],
                   weight_of(scaled_at(r, id)));
        }
        __syncthreads();
        const tally own = own_bin ? tally_of(bin[threadIdx.x]) : tally{};
        const tally upto = {above->n + block_scan(own.n),
                            above->weight + block_scan(own.weight)};
        const whole reached = by_weight ? upto.weight : upto.n;
        const whole start = reached - (by_weight ? own.weight : own.n);
        if (start < need && reached >= need) {
            digit = DIGITS - 1 - threadIdx.x;
            before = {upto.n - own.n, upto.weight - own.weight};
        }
        __syncthreads();
        prefix |= digit << shift;
        mask |= (whole)(DIGITS - 1) << shift;
        *above = before;
    }
    return prefix;
}

/* Where the most probable candidates together reach need, as many or as heavy. Gives their
 * weight; without so many the limit stays as it is. */
static __device__ whole cut(const row_state &r, const heap *bin, limit *at, whole need,
                            bool by_weight) {
    __shared__ int32_t n_listed, wanted;
    __shared__ tally before;
    const tally own = tally_of(bin[threadIdx.x]);
    const tally upto = {block_scan(own.n), block_scan(own.weight)};
    const whole reached = by_weight ? upto.weight : upto.n;
    const whole start = by_weight ? upto.weight - own.weight : upto.n - own.n;
    if (threadIdx.x == 0) {
        n_listed = 0;
        wanted = -1;
    }
    __syncthreads();
    if (start < need && reached >= need) {
        wanted = (int32_t)threadIdx.x;
        before = {upto.n - own.n, upto.weight - own.weight};
    }
    if (threadIdx.x == THREADS - 1 && reached < need) before = upto;
    __syncthreads();
    if (wanted < 0) return before.weight;
    for (int32_t id = threadIdx.x; id < r.n_ids; id += THREADS) {
        const float z = scaled_at(r, id);
        if (bin_of(z, weight_of(z)) == wanted) r.list[atomicAdd(&n_listed, 1)] = id;
    }
    __syncthreads();
    tally above = before;
    at->rank = narrow_down(r, n_listed, &above, need, by_weight);
    const int32_t id = (int32_t) ~(uint32_t)at->rank;
    __syncthreads();
    return above.weight + weight_of(scaled_at(r, id));
}

static __device__ limit find_limit(const row_state &r, heap *bin) {
    const hd_sampling &p = *r.p;
    const bool is_nucleus = p.top_p > 0.0f && p.top_p < 1.0f;
    limit at = {0, least_of(p.min_p)};
    if (p.top_k <= 0 && !is_nucleus) return at;
    fill_bins(r, bin);
    whole total;
    if (p.top_k > 0) {
        total = cut(r, bin, &at, (whole)p.top_k, false);
    } else {
        total = block_sum<THREADS>(tally_of(bin[threadIdx.x]).weight);
    }
    if (is_nucleus) cut(r, bin, &at, nucleus(p.top_p, total), true);
    return at;
}

/* The weight of a token that may be drawn, else 0. */
static __device__ __forceinline__ whole weight_within(const row_state &r, const limit &at,
                                                      int32_t id) {
    if (id >= r.n_ids || rank_of(r.y[id], id) < at.rank) return 0;
    const float z = scaled_at(r, id);
    return z >= at.least ? weight_of(z) : 0;
}

/* Every warp adds up stretches of the vocabulary, one of WARPS * WARP in all per thread; the
 * stretch that holds the drawn number is then walked through by one warp. */
static __device__ int32_t draw(const row_state &r, int32_t position, heap *bin) {
    __shared__ whole sum[THREADS];
    __shared__ int32_t stretch, token;
    __shared__ whole left;
    const limit at = find_limit(r, bin);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int32_t size = ((r.n_ids + THREADS - 1) / THREADS + WARP - 1) / WARP * WARP;
    for (int32_t k = warp; k < THREADS; k += WARPS) {
        whole part = 0;
        for (int32_t id = k * size + lane; id < min((k + 1) * size, r.n_ids); id += WARP) {
            part += weight_within(r, at, id);
        }
        part = warp_sum(part);
        if (lane == 0) sum[k] = part;
    }
    __syncthreads();
    const whole own = sum[threadIdx.x], upto = block_scan(own);
    const whole number = draw_below(r.p->seed, position, block_sum<THREADS>(own));
    if (upto - own <= number && number < upto) {
        stretch = (int32_t)threadIdx.x;
        left = number - (upto - own);
    }
    __syncthreads();
    if (warp == 0) {
        whole before = 0;
        for (int32_t base = stretch * size;; base += WARP) {
            whole x = weight_within(r, at, base + lane);
            const whole mine = x;
            for (int step = 1; step < WARP; step *= 2) {
                const whole other = __shfl_up_sync(ALL_LANES, x, step);
                if (lane >= step) x += other;
            }
            x += before;
            if (x - mine <= left && left < x) token = base + lane;
            before = __shfl_sync(ALL_LANES, x, WARP - 1);
            if (before > left) break;
        }
    }
    __syncthreads();
    return token;
}

/* ---- tokens that were there before ---- */

/* The token that a row takes without choosing, or -1. */
static __device__ __forceinline__ int32_t given_at(const hd_sample_args &a, int32_t row) {
    return a.given ? a.given[row] : -1;
}

/* Whether the row's draft stands although another token might be chosen. */
static __device__ bool is_accepted(const row_state &r, int32_t draft) {
    const whole own = rank_of(r.y[draft], draft);
    whole before = 0, total = 0;
    if (r.y[draft] == -CUDART_INF_F) return false;
    for (int32_t id = threadIdx.x; id < r.n_ids; id += THREADS) {
        before += (whole)rank_of(r.y[id], id) > own;
        total += weight_of(scaled(r.y[id], r.max, 1.0f));
    }
    before = block_sum<THREADS>(before);
    total = block_sum<THREADS>(total);
    const double weight = (double)weight_of(scaled(r.y[draft], r.max, 1.0f));
    const double less = __dmul_rn((double)r.p->relaxed_delta, (double)total);
    return before < (whole)r.p->relaxed_top && __dadd_rn(weight, less) >= 0x1p40;
}

/* ---- log-probabilities ---- */

static __device__ void report(const hd_sample_args &a, const row_state &r, int32_t row,
                              float raw_max, int32_t token) {
    whole total = 0, last = ~0ull;
    const bool own = r.p->logprob || given_at(a, row) >= 0;
    if (!own && r.p->n_top <= 0) return;
    for (int32_t id = threadIdx.x; id < a.vocab; id += THREADS) {
        total += weight_of(scaled(r.logits[id], raw_max, 1.0f));
    }
    const double log_all = log_total(raw_max, block_sum<THREADS>(total));
    if (threadIdx.x == 0 && own) {
        a.logprob[row] = (float)__dsub_rn((double)r.logits[token], log_all);
    }
    for (int32_t i = 0; i < r.p->n_top; i++) {
        whole best = 0; /* below every rank of a finite logit */
        for (int32_t id = threadIdx.x; id < a.n_ids; id += THREADS) {
            if (r.logits[id] == -CUDART_INF_F) continue;
            const whole rank = rank_of(r.logits[id], id);
            if (rank < last) best = max(best, rank);
        }
        last = block_max(best);
        const int32_t id = last ? (int32_t) ~(uint32_t)last : -1;
        if (threadIdx.x == 0) {
            const int64_t at = (int64_t)row * HD_MAX_TOP_LOGPROBS + i;
            a.top_id[at] = id;
            a.top_logprob[at] =
                id < 0 ? -CUDART_INF_F : (float)__dsub_rn((double)r.logits[id], log_all);
        }
    }
}

/* ---- rows ---- */

/* The rank of the largest of x, 0 for nothing but -inf, the highest if one is broken. */
static __device__ whole survey(const float *x, int32_t n) {
    whole best = 0;
#pragma unroll 8
    for (int32_t i = threadIdx.x; i < n; i += THREADS) {
        const whole rank = is_broken(x[i])         ? ~0ull
                           : x[i] == -CUDART_INF_F ? 0
                                                   : (whole)rank_of(x[i], i);
        best = max(best, rank);
    }
    return block_max(best);
}

static __device__ __forceinline__ int32_t index_of(whole rank) {
    return (int32_t) ~(uint32_t)rank;
}

/* By the scores; changes r.y to them. */
static __device__ int32_t choose_by_score(const hd_sample_args &a, row_state &r, int32_t row,
                                          float *scratch) {
    __shared__ heap bin[BINS];
    const hd_sampling &p = *r.p;
    const bool masked = a.mask && a.mask_row[row] >= 0;
    const bool banned = a.position[row] < p.ban_until && p.n_ban > 0;
    if (masked || banned || p.n_bias > 0 || has_penalty(p)) {
        make_scores(a, row, scratch);
        r.y = scratch;
    }
    const whole best = survey(r.y, a.n_ids);
    if (best == ~0ull) return HD_TOKEN_BROKEN;
    if (best == 0) return HD_TOKEN_NONE;
    const int32_t token = index_of(best);
    r.max = r.y[token];
    const bool relaxed = a.draft && p.relaxed_top > 0 && p.relaxed_delta > 0.0f;
    if (relaxed && a.draft[row] >= 0 && is_accepted(r, a.draft[row])) return a.draft[row];
    if (p.temperature <= 0.0f || p.top_k == 1) return token;
    r.inverse = inverse_temperature(p.temperature);
    return draw(r, a.position[row], bin);
}

static __device__ int32_t choose(const hd_sample_args &a, row_state &r, int32_t row,
                                 float *scratch) {
    const whole all = survey(r.logits, a.vocab);
    if (all == ~0ull) return HD_TOKEN_BROKEN;
    const int32_t given = given_at(a, row);
    const int32_t token = given >= 0 ? given : choose_by_score(a, r, row, scratch);
    if (token >= 0) report(a, r, row, all ? r.logits[index_of(all)] : -CUDART_INF_F, token);
    return token;
}

/* Block b has scratch of worker b and takes rows b, b + gridDim.x, ... */
static __global__ void __launch_bounds__(THREADS)
    sample(hd_sample_args a, uint8_t *scratch, size_t each) {
    float *y = reinterpret_cast<float *>(scratch + blockIdx.x * each);
    for (int32_t row = (int32_t)blockIdx.x; row < a.rows; row += (int32_t)gridDim.x) {
        row_state r = {};
        r.p = &a.params[a.slot[row]];
        r.logits = r.y = a.logits + (int64_t)row * a.vocab;
        r.list = reinterpret_cast<int32_t *>(y + a.n_ids);
        r.n_ids = a.n_ids;
        const int32_t token = choose(a, r, row, y);
        if (threadIdx.x == 0) a.token[row] = token;
        __syncthreads();
    }
}

void hd_sample_cuda(hd_stream *s, const hd_sample_args *a) {
    const int32_t workers = hd_stream_workers(s), n = a->rows < workers ? a->rows : workers;
    if (n == 0) return;
    const size_t bytes = 2 * (size_t)a->n_ids * sizeof(float);
    uint8_t *scratch = static_cast<uint8_t *>(hd_stream_scratch(s, 0, bytes));
    sample<<<n, THREADS, 0, hd_cuda_stream(s)>>>(*a, scratch, hd_stream_scratch_bytes(s));
    hd_cuda_check(s, "sample");
}

static __global__ void __launch_bounds__(THREADS) argmax(hd_argmax_args a) {
    const float *x = a.logits + (int64_t)blockIdx.x * a.vocab;
    const uint32_t *mask = nullptr;
    if (a.mask && a.mask_row[blockIdx.x] >= 0) {
        mask = a.mask + a.mask_row[blockIdx.x] * (((int64_t)a.vocab + 31) / 32);
    }
    whole best = rank_of(-CUDART_INF_F, 0);
    for (int32_t id = threadIdx.x; id < a.n_ids; id += THREADS) {
        if (mask && !(mask[id / 32] >> (id % 32) & 1u)) continue;
        if (x[id] > -CUDART_INF_F) best = max(best, (whole)rank_of(x[id], id));
    }
    best = block_max(best);
    if (threadIdx.x == 0) a.token[blockIdx.x] = index_of(best);
}

void hd_argmax_cuda(hd_stream *s, const hd_argmax_args *a) {
    if (a->rows == 0) return;
    argmax<<<a->rows, THREADS, 0, hd_cuda_stream(s)>>>(*a);
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
