/* moe_cuda.cu - choosing experts, sorting tokens by expert, summing the results. */
#include "ops/cuda/cuda_internal.cuh"

constexpr int ROUTE_THREADS = 128;

/* ---- route: a block per row ---- */

/* sqrt(softplus(x)); above 20 softplus is x to float precision, and exp would overflow later */
static __device__ __forceinline__ float sqrt_softplus(float x) {
    return sqrtf(x > 20.0f ? x : log1pf(expf(x)));
}

static __device__ void softmax_scores(const float *logits, float *score, int32_t n) {
    __shared__ float tops[ROUTE_THREADS / WARP];
    float top = -CUDART_INF_F;
    double total = 0.0;
    for (int32_t e = threadIdx.x; e < n; e += ROUTE_THREADS) top = fmaxf(top, logits[e]);
    top = warp_max(top);
    if (threadIdx.x % WARP == 0) tops[threadIdx.x / WARP] = top;
    __syncthreads();
    for (int w = 0; w < ROUTE_THREADS / WARP; w++) top = fmaxf(top, tops[w]);
    for (int32_t e = threadIdx.x; e < n; e += ROUTE_THREADS) {
        total += exp((double)(logits[e] - top));
    }
    total = block_sum<ROUTE_THREADS>(total);
    for (int32_t e = threadIdx.x; e < n; e += ROUTE_THREADS) {
        score[e] = (float)(exp((double)(logits[e] - top)) / total);
    }
}

static __device__ void score_experts(const hd_router_rule &rule, const float *logits,
                                     float *score) {
    const int32_t n = rule.n_experts;
    if (rule.score == HD_SCORE_SOFTMAX) {
        softmax_scores(logits, score, n);
        return;
    }
    for (int32_t e = threadIdx.x; e < n; e += ROUTE_THREADS) {
        score[e] =
            rule.score == HD_SCORE_SIGMOID ? sigmoid(logits[e]) : sqrt_softplus(logits[e]);
    }
}

static __device__ float group_score(const hd_router_rule &rule, const float *choice,
                                    int32_t group) {
    const int32_t size = rule.n_experts / rule.n_groups;
    float best = -CUDART_INF_F, second = -CUDART_INF_F;
    for (int32_t e = group * size; e < (group + 1) * size; e++) {
        if (choice[e] > best) {
            second = best;
            best = choice[e];
        } else if (choice[e] > second) {
            second = choice[e];
        }
    }
    return rule.group_rule == HD_GROUPS_MAX || size == 1 ? best : best + second;
}

/* Sets the choice of every expert outside the top_groups best groups to -inf. A group goes if
 * top_groups others beat it; a lower number wins a tie. group: scratch of one per group. */
static __device__ void keep_best_groups(const hd_router_rule &rule, float *choice,
                                        float *group) {
    const int32_t size = rule.n_experts / rule.n_groups;
    for (int32_t g = threadIdx.x; g < rule.n_groups; g += ROUTE_THREADS) {
        group[g] = group_score(rule, choice, g);
    }
    __syncthreads();
    for (int32_t e = threadIdx.x; e < rule.n_experts; e += ROUTE_THREADS) {
        const int32_t own = e / size;
        int32_t ahead = 0;
        for (int32_t o = 0; o < rule.n_groups; o++) {
            ahead += group[o] > group[own] || (group[o] == group[own] && o < own);
        }
        if (ahead >= rule.top_groups) choice[e] = -CUDART_INF_F;
    }
    __syncthreads();
}

/* One warp: the best expert left, top_k times over. NaN never beats another, but the first
 * expert left stands if nothing beats it. taken: a flag per expert. */
static __device__ void choose(const hd_router_rule &rule, const float *choice, uint8_t *taken,
                              int32_t *expert) {
    const int lane = threadIdx.x;
    for (int32_t k = 0; k < rule.top_k; k++) {
        int32_t best = INT32_MAX, first = INT32_MAX; /* first expert left */
        float top = -CUDART_INF_F;
        for (int32_t e = lane; e < rule.n_experts; e += WARP) {
            if (taken[e]) continue;
            if (first == INT32_MAX) first = e;
            if (choice[e] > top || (choice[e] == top && best == INT32_MAX)) {
                top = choice[e];
                best = e;
            }
        }
        for (int step = WARP / 2; step > 0; step /= 2) {
            const float other = __shfl_xor_sync(ALL_LANES, top, step);
            const int32_t there = __shfl_xor_sync(ALL_LANES, best, step);
            const int32_t start = __shfl_xor_sync(ALL_LANES, first, step);
            if (other > top || (other == top && there < best)) {
                top = other;
                best = there;
            }
            first = min(first, start);
        }
        if (isnan(choice[first])) best = first;
        if (lane == 0) expert[k] = best;
        if (lane == best % WARP) taken[best] = 1; /* the one lane that reads it */
    }
}

static __global__ void __launch_bounds__(ROUTE_THREADS) moe_topk(hd_moe_topk_args a) {
    extern __shared__ float shared[]; /* score, choice, a score per group, flags */
    const int32_t n = a.rule.n_experts, k = a.rule.top_k;
    float *score = shared, *choice = score + n, *group = choice + n;
    uint8_t *taken = reinterpret_cast<uint8_t *>(group + a.rule.n_groups);
    int32_t *expert = a.expert + (int64_t)blockIdx.x * k;
    score_experts(a.rule, a.logits + (int64_t)blockIdx.x * n, score);
    __syncthreads();
    if (a.table) {
        const int32_t *row = a.table + (int64_t)a.tokens[blockIdx.x] * k;
        for (int32_t j = threadIdx.x; j < k; j += ROUTE_THREADS) expert[j] = row[j];
    } else {
        for (int32_t e = threadIdx.x; e < n; e += ROUTE_THREADS) {
            choice[e] = score[e] + (a.bias ? a.bias[e] : 0.0f);
            taken[e] = 0;
        }
        __syncthreads();
        if (a.rule.group_rule != HD_GROUPS_NONE) keep_best_groups(a.rule, choice, group);
        if (threadIdx.x < WARP) choose(a.rule, choice, taken, expert);
    }
    __syncthreads();
    float total = 0.0f;
    for (int32_t j = 0; j < k; j++) total += score[expert[j]];
    for (int32_t j = threadIdx.x; j < k; j += ROUTE_THREADS) {
        float w = score[expert[j]];
        if (a.rule.normalize) w /= total + 1e-20f;
        a.weight[(int64_t)blockIdx.x * k + j] = w * a.rule.scale;
    }
}

void hd_moe_topk_cuda(hd_stream *s, const hd_moe_topk_args *a) {
    if (a->rows == 0) return;
    const size_t n = (size_t)a->rule.n_experts;
    const size_t bytes = (2 * n + (size_t)a->rule.n_groups) * sizeof(float) + n;
    const size_t whole = (bytes + 15) / 16 * 16; /* the compiler reads several at once */
    moe_topk<<<a->rows, ROUTE_THREADS, whole, hd_cuda_stream(s)>>>(*a);
    hd_cuda_check(s, "moe_topk");
}

/* ---- permute: a warp per expert counts what comes before its own, then places its own ---- */

static __global__ void __launch_bounds__(BLOCK) moe_permute(hd_moe_permute_args a) {
    const int32_t e = (int32_t)(blockIdx.x * BLOCK + threadIdx.x) / WARP;
    const int lane = threadIdx.x % WARP;
    const int32_t n = a.rows * a.top_k;
    if (e >= a.n_experts) return;
    int32_t at = 0;
    for (int32_t base = 0; base < n; base += WARP) {
        const bool before = base + lane < n && a.expert[base + lane] < e;
        at += __popc(__ballot_sync(ALL_LANES, before));
    }
    int32_t counted = 0;
    if (lane == 0) a.offset[e] = at;
    if (lane == 0 && e == a.n_experts - 1) a.offset[a.n_experts] = n;
    for (int32_t base = 0; base < n; base += WARP) {
        const int32_t i = base + lane;
        const bool own = i < n && a.expert[i] == e;
        const unsigned all = __ballot_sync(ALL_LANES, own);
        const int32_t mine = at + __popc(all & ((1u << lane) - 1));
        if (own) {
            a.assignment[mine] = i;
            a.place[i] = mine;
        }
        at += __popc(all);
        counted +=
            __popc(__ballot_sync(ALL_LANES, own && (!a.live || a.live[i / a.top_k] != 0)));
    }
    if (lane == 0 && a.load) a.load[e] += counted;
}

void hd_moe_permute_cuda(hd_stream *s, const hd_moe_permute_args *a) {
    const unsigned grid = blocks_for(a->n_experts, BLOCK / WARP);
    moe_permute<<<grid, BLOCK, 0, hd_cuda_stream(s)>>>(*a);
    hd_cuda_check(s, "moe_permute");
}

/* ---- combine ---- */

/* A block per token and BLOCK columns, all of a column's choices on their way at once: in order
 * of place, which is the order of experts. */
static __global__ void __launch_bounds__(BLOCK) moe_combine(hd_moe_combine_args a) {
    extern __shared__ int32_t sorted[]; /* [top_k] places, then weights */
    float *weight = reinterpret_cast<float *>(sorted + a.top_k);
    const int64_t t = blockIdx.x;
    const int32_t *place = a.place + t * a.top_k;
    const int32_t c = (int32_t)(blockIdx.y * BLOCK + threadIdx.x);
    for (int32_t j = threadIdx.x; j < a.top_k; j += BLOCK) {
        const int32_t own = place[j];
        int32_t rank = 0;
        for (int32_t k = 0; k < a.top_k; k++) rank += place[k] < own;
        sorted[rank] = own;
        weight[rank] = a.weight ? a.weight[t * a.top_k + j] : 1.0f;
    }
    __syncthreads();
    if (c >= a.cols) return;
    double sum = a.shared ? (double)wide(acts(a.shared)[t * a.cols + c]) : 0.0;
#pragma unroll 8
    for (int32_t k = 0; k < a.top_k; k++) {
        sum += (double)weight[k] * (double)wide(acts(a.y)[(int64_t)sorted[k] * a.cols + c]);
    }
    acts(a.out)[t * a.cols + c] = narrow((float)sum);
}

void hd_moe_combine_cuda(hd_stream *s, const hd_moe_combine_args *a) {
    if (a->rows == 0) return;
    const size_t bytes = (size_t)a->top_k * (sizeof(int32_t) + sizeof(float));
    const size_t whole = (bytes + 15) / 16 * 16; /* the compiler reads several at once */
    const dim3 grid((unsigned)a->rows, blocks_for(a->cols, BLOCK));
    moe_combine<<<grid, BLOCK, whole, hd_cuda_stream(s)>>>(*a);
    hd_cuda_check(s, "moe_combine");
}
