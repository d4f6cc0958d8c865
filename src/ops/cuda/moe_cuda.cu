/* moe_cuda.cu - choosing experts, sorting tokens by expert, summing the results. */
#include "ops/cuda/block_internal.cuh"

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

/* The best and the second best of what the lanes of a warp have seen. */
struct two_best {
    float best, second;
};

static __device__ __forceinline__ two_best join(two_best a, two_best b) {
    return {fmaxf(a.best, b.best), fmaxf(fminf(a.best, b.best), fmaxf(a.second, b.second))};
}

/* A warp's work; NaN counts for nothing. */
static __device__ float group_score(const hd_router_rule &rule, const float *choice,
                                    int32_t group) {
    const int32_t size = rule.n_experts / rule.n_groups;
    two_best own = {-CUDART_INF_F, -CUDART_INF_F};
    for (int32_t i = (int32_t)threadIdx.x % WARP; i < size; i += WARP) {
        const float x = choice[group * size + i];
        if (!isnan(x)) own = join(own, {x, -CUDART_INF_F});
    }
    for (int step = WARP / 2; step > 0; step /= 2) {
        own = join(own, {__shfl_xor_sync(ALL_LANES, own.best, step),
                         __shfl_xor_sync(ALL_LANES, own.second, step)});
    }
    return rule.group_rule == HD_GROUPS_MAX || size == 1 ? own.best : own.best + own.second;
}

/* Sets the choice of every expert outside the top_groups best groups to -inf. A group goes if
 * top_groups others beat it; a lower number wins a tie. group: scratch of one per group. */
static __device__ void keep_best_groups(const hd_router_rule &rule, float *choice,
                                        float *group) {
    const int32_t size = rule.n_experts / rule.n_groups;
    for (int32_t g = threadIdx.x / WARP; g < rule.n_groups; g += ROUTE_THREADS / WARP) {
        const float own = group_score(rule, choice, g);
        if (threadIdx.x % WARP == 0) group[g] = own;
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

/* Of an expert that was chosen, of NaN; everything else is above. */
constexpr uint32_t TAKEN = 0, BROKEN = 1;

/* The expert that a lane offers, and the first that it has left. */
struct offer {
    uint32_t key;
    int32_t expert, first;
};

static __device__ __forceinline__ offer best_of_lane(const uint32_t *key, int32_t n) {
    offer o = {TAKEN, INT32_MAX, INT32_MAX};
    for (int32_t e = (int32_t)threadIdx.x; e < n; e += WARP) {
        const uint32_t own = key[e];
        if (own != TAKEN) o.first = min(o.first, e);
        if (own > o.key) o = {own, e, o.first};
    }
    return o;
}

/* One warp: the best expert left, top_k times over. NaN never beats another, but the first
 * expert left stands if nothing beats it. */
static __device__ void choose(const hd_router_rule &rule, uint32_t *key, bool broken,
                              int32_t *expert) {
    offer own = best_of_lane(key, rule.n_experts);
    for (int32_t k = 0; k < rule.top_k; k++) {
        const uint32_t top = __reduce_max_sync(ALL_LANES, own.key);
        int32_t best = __reduce_min_sync(ALL_LANES, own.key == top ? own.expert : INT32_MAX);
        if (broken) {
            const int32_t first = __reduce_min_sync(ALL_LANES, own.first);
            if (key[first] == BROKEN) best = first;
            __syncwarp(); /* it is read before it is taken */
        }
        if (threadIdx.x == 0) expert[k] = best;
        if ((int)threadIdx.x != best % WARP) continue;
        key[best] = TAKEN;
        own = best_of_lane(key, rule.n_experts);
    }
}

/* What the rows are chosen by, in place of their scores. */
static __device__ bool make_keys(float *choice, int32_t n) {
    uint32_t *key = reinterpret_cast<uint32_t *>(choice);
    bool broken = false;
    for (int32_t e = threadIdx.x; e < n; e += ROUTE_THREADS) {
        const float x = choice[e];
        broken = broken || isnan(x);
        key[e] = isnan(x) ? BROKEN : order_of(x);
    }
    return __syncthreads_or(broken);
}

static __global__ void __launch_bounds__(ROUTE_THREADS) moe_topk(hd_moe_topk_args a) {
    begin_kernel();
    extern __shared__ float shared[]; /* score, choice, a score per group, chosen */
    const int32_t n = a.rule.n_experts, k = a.rule.top_k;
    float *score = shared, *choice = score + n, *group = choice + n;
    int32_t *expert = reinterpret_cast<int32_t *>(group + a.rule.n_groups);
    for (int32_t e = threadIdx.x; e < n; e += ROUTE_THREADS) {
        choice[e] = a.bias && !a.table ? a.bias[e] : 0.0f; /* on its way with the logits */
    }
    score_experts(a.rule, a.logits + (int64_t)blockIdx.x * n, score);
    if (a.table) {
        const int32_t *row = a.table + (int64_t)a.tokens[blockIdx.x] * k;
        for (int32_t j = threadIdx.x; j < k; j += ROUTE_THREADS) expert[j] = row[j];
    } else {
        __syncthreads();
        for (int32_t e = threadIdx.x; e < n; e += ROUTE_THREADS) {
            choice[e] = score[e] + choice[e];
        }
        __syncthreads();
        if (a.rule.group_rule != HD_GROUPS_NONE) keep_best_groups(a.rule, choice, group);
        const bool broken = make_keys(choice, n);
        if (threadIdx.x < WARP) {
            choose(a.rule, reinterpret_cast<uint32_t *>(choice), broken, expert);
        }
    }
    __syncthreads();
    float total = 0.0f;
    for (int32_t j = 0; j < k; j++) total += score[expert[j]];
    for (int32_t j = threadIdx.x; j < k; j += ROUTE_THREADS) {
        float w = score[expert[j]];
        if (a.rule.normalize) w /= total + 1e-20f;
        a.expert[(int64_t)blockIdx.x * k + j] = expert[j];
        a.weight[(int64_t)blockIdx.x * k + j] = w * a.rule.scale;
    }
    if (a.log.data) replay_row(a.log, (int32_t)blockIdx.x, expert, k);
}

void hd_moe_topk_cuda(hd_stream *s, const hd_moe_topk_args *a) {
    if (a->rows == 0) return;
    const size_t n = (size_t)a->rule.n_experts, k = (size_t)a->rule.top_k;
    const size_t bytes = (2 * n + (size_t)a->rule.n_groups + k) * sizeof(float);
    const size_t whole = (bytes + 15) / 16 * 16; /* the compiler reads several at once */
    launch_kernel(hd_cuda_stream(s), moe_topk, dim3((unsigned)a->rows), ROUTE_THREADS, whole, 1,
                  *a);
    hd_cuda_check(s, "moe_topk");
}

/* ---- permute: a stable counting sort ---- */

constexpr int SORT_THREADS = 1024, SORT_BLOCKS = 8, LARGE_M_PLACES = 4096, SMALL_M_PLACES = 256;
constexpr size_t SORT_BYTES = 200 * 1024; /* of counters, where there is room */
constexpr size_t SCAN_BYTES = 1024;       /* of shared memory besides */

/* A warp has a stretch of the assignments of its own; many are shared by a cluster of blocks on Hopper. */
struct sort_shape {
    int32_t n_warps; /* of a block that have one */
    int32_t stretch;
};

/* A block's shared memory, n_keys of each. */
struct sort_block {
    int32_t *count; /* [n_warps] of a warp's; then of those of the warps before */
    int32_t *total; /* of the block's */
    int32_t *begin; /* where the block's begin */
    int32_t *load;  /* [HD_N_ROW_PHASES] of the block's that count as load, by expert */
};

/* What is sorted by: slots, or experts whose rows moe_split has divided over slots. */
static __host__ __device__ __forceinline__ int32_t n_keys(const hd_moe_permute_args &a) {
    return a.first ? a.n_experts : a.n_slots;
}

/* The key of assignment i, of a known expert. */
static __device__ __forceinline__ int32_t key_of(const hd_moe_permute_args &a, int32_t i,
                                                 int32_t expert) {
    if (a.first || !a.slot) return expert;
    if (a.n_choices == 1) return __ldg(a.slot + expert);
    return __ldg(a.slot + (int64_t)expert * a.n_choices + i / a.top_k % a.n_choices);
}

/* Where number `at` goes: of all, or of those of its expert. */
static __device__ __forceinline__ int32_t place_of(const hd_moe_permute_args &a, int32_t expert,
                                                   int32_t at) {
    if (!a.first) return at;
    const hd_split_graph g = hd_split_graph_in(a.graph, hd_permute_shape(&a));
    const int32_t slot = hd_split_slot(&g, a.first, expert, at);
    return a.offset[slot] + at - a.first[slot];
}

constexpr int SORT_COUNTERS = 2 + HD_N_ROW_PHASES; /* of a block, besides those of its warps */

static __device__ __forceinline__ int32_t phase_of(const hd_moe_permute_args &a, int32_t i) {
    return a.phase ? a.phase[i / a.top_k] : 0;
}

static __device__ sort_block carve(int32_t *shared, int32_t n, int32_t n_warps) {
    sort_block b = {shared, shared + n_warps * n};
    b.begin = b.total + n;
    b.load = b.begin + n;
    return b;
}

/* Where the block's assignments of every key begin: behind those of the blocks before, and, where keys
 * are slots, behind all of the slots before. */
static __device__ void find_begins(const sort_block &b, const hd_moe_permute_args &a) {
    int32_t before = 0;
    for (int32_t first = 0; first < n_keys(a); first += SORT_THREADS) {
        const int32_t e = first + (int32_t)threadIdx.x;
        int32_t all = 0, earlier = 0, sum = 0;
        for (unsigned r = 0; e < n_keys(a) && r < cluster_size(); r++) {
            const int32_t n = cluster_at(b.total, r)[e];
            all += n;
            earlier += r < cluster_rank() ? n : 0;
        }
        const int32_t begin = a.first ? 0 : before + scan_before<SORT_THREADS>(all, &sum);
        before += sum;
        if (e >= n_keys(a)) continue;
        b.begin[e] = begin + earlier;
        if (!a.first && cluster_rank() == 0) a.offset[e] = begin;
    }
    if (!a.first && cluster_rank() == 0 && threadIdx.x == 0) a.offset[a.n_slots] = before;
    cluster_sync(); /* nobody leaves while it is read */
}

static __global__ void __launch_bounds__(SORT_THREADS)
    moe_permute(hd_moe_permute_args a, sort_shape shape) {
    begin_kernel();
    extern __shared__ int32_t counts[];
    const int32_t keys = n_keys(a);
    const sort_block b = carve(counts, keys, shape.n_warps);
    const int32_t n = a.rows * a.top_k, rank = (int32_t)cluster_rank();
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int32_t stretch = warp < shape.n_warps ? shape.stretch : 0;
    const int32_t first = min((rank * shape.n_warps + warp) * shape.stretch, n);
    const int32_t end = min(first + stretch, n);
    int32_t *own = b.count + warp * keys;
    for (int32_t i = threadIdx.x; i < (shape.n_warps + SORT_COUNTERS) * keys;
         i += SORT_THREADS) {
        counts[i] = 0;
    }
    __syncthreads();
#pragma unroll 4
    for (int32_t i = first + lane; i < end; i += WARP) {
        const int32_t expert = a.expert[i];
        atomicAdd(&own[key_of(a, i, expert)], 1);
        const int32_t phase = a.load ? phase_of(a, i) : HD_ROW_PADDING;
        if (phase >= 0) atomicAdd(&b.load[phase * keys + expert], 1);
    }
    __syncthreads();
    for (int32_t e = threadIdx.x; e < keys; e += SORT_THREADS) {
        int32_t sum = 0;
#pragma unroll 8
        for (int32_t w = 0; w < shape.n_warps; w++) {
            const int32_t counted = b.count[w * keys + e];
            b.count[w * keys + e] = sum;
            sum += counted;
        }
        b.total[e] = sum;
        for (int32_t p = 0; p < HD_N_ROW_PHASES; p++) {
            const int32_t counted = b.load[p * keys + e];
            int64_t *load = a.load + p * a.load_stride + e;
            if (counted) {
                atomicAdd(reinterpret_cast<unsigned long long *>(load),
                          (unsigned long long)counted);
            }
        }
    }
    cluster_sync();
    find_begins(b, a);
#pragma unroll 4
    for (int32_t base = first; base < end; base += WARP) {
        const int32_t i = base + lane, e = i < end ? key_of(a, i, a.expert[i]) : -1;
        const unsigned same = __match_any_sync(ALL_LANES, e);
        const int before = __popc(same & ((1u << lane) - 1));
        const int32_t number = e < 0 ? 0 : b.begin[e] + own[e] + before;
        __syncwarp();
        if (e >= 0 && before == 0) own[e] += __popc(same);
        __syncwarp();
        if (e < 0) continue;
        const int32_t at = place_of(a, e, number);
        a.assignment[at] = i;
        a.place[i] = at;
    }
}

/* A warp per key counts what comes before its own, then places its own: fastest where all of
 * them are read at once. Each block finds all keys, so that their two reads are waited for once. */
static __global__ void __launch_bounds__(BLOCK) permute_small_m(hd_moe_permute_args a) {
    constexpr int EACH = SMALL_M_PLACES / BLOCK;
    __shared__ int32_t key[SMALL_M_PLACES];
    begin_kernel();
    const int32_t e = (int32_t)(blockIdx.x * BLOCK + threadIdx.x) / WARP;
    const int lane = threadIdx.x % WARP;
    const int32_t n = a.rows * a.top_k;
    int32_t expert_of[EACH];
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        const int32_t i = (int32_t)threadIdx.x + k * BLOCK;
        expert_of[k] = i < n ? a.expert[i] : 0;
    }
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        const int32_t i = (int32_t)threadIdx.x + k * BLOCK;
        if (i < n) key[i] = key_of(a, i, expert_of[k]);
    }
    __syncthreads();
    if (e >= n_keys(a)) return;
    int32_t at = 0;
#pragma unroll 4
    for (int32_t base = 0; base < n && !a.first; base += WARP) {
        const bool before = base + lane < n && key[base + lane] < e;
        at += __popc(__ballot_sync(ALL_LANES, before));
    }
    int32_t counted[HD_N_ROW_PHASES] = {}, expert = -1; /* of the lanes that have one */
    if (lane == 0 && !a.first) a.offset[e] = at;
    if (lane == 0 && !a.first && e == a.n_slots - 1) a.offset[a.n_slots] = n;
    for (int32_t base = 0; base < n; base += WARP) {
        const int32_t i = base + lane;
        const bool own = i < n && key[i] == e;
        const unsigned all = __ballot_sync(ALL_LANES, own);
        if (!all) continue;
        if (own) {
            const int32_t mine = place_of(a, e, at + __popc(all & ((1u << lane) - 1)));
            a.assignment[mine] = i;
            a.place[i] = mine;
            expert = a.expert[i];
        }
        at += __popc(all);
        const int32_t phase = own && a.load ? phase_of(a, i) : HD_ROW_PADDING;
#pragma unroll
        for (int32_t p = 0; p < HD_N_ROW_PHASES; p++) {
            counted[p] += __popc(__ballot_sync(ALL_LANES, phase == p));
        }
    }
    expert = __reduce_max_sync(ALL_LANES, expert);
#pragma unroll
    for (int32_t p = 0; p < HD_N_ROW_PHASES; p++) {
        int64_t *load =
            a.load + p * a.load_stride + expert; /* also of the expert's other slots */
        if (lane == 0 && counted[p]) {
            atomicAdd(reinterpret_cast<unsigned long long *>(load),
                      (unsigned long long)counted[p]);
        }
    }
}

static void launch_permute(cudaStream_t queue, const hd_moe_permute_args *a) {
    const int32_t n = a->rows * a->top_k;
    const int32_t n_blocks = hd_cuda_is_sm90() && n > LARGE_M_PLACES ? SORT_BLOCKS : 1;
    const size_t each = (size_t)n_keys(*a) * sizeof(int32_t);
    const size_t room = hd_cuda_shared_limit() - SCAN_BYTES;
    const size_t fit = (room < SORT_BYTES ? room : SORT_BYTES) / each;
    const int32_t left = (int32_t)fit - SORT_COUNTERS; /* counters of so many warps */
    const int32_t most = left < 1 ? 1 : left < SORT_THREADS / WARP ? left : SORT_THREADS / WARP;
    const int32_t wanted = (int32_t)blocks_for(n, n_blocks * WARP);
    const int32_t n_warps = wanted < 1 ? 1 : wanted < most ? wanted : most;
    const sort_shape shape = {n_warps,
                              (int32_t)blocks_for(n, n_blocks * n_warps * WARP) * WARP};
    const size_t bytes = (size_t)(n_warps + SORT_COUNTERS) * each;
    hd_cuda_allow_shared((const void *)moe_permute, bytes);
    launch_kernel(queue, moe_permute, dim3((unsigned)n_blocks), SORT_THREADS, bytes, n_blocks,
                  *a, shape);
}

void hd_moe_permute_cuda(hd_stream *s, const hd_moe_permute_args *a) {
    cudaStream_t queue = hd_cuda_stream(s);
    if (a->rows * a->top_k > SMALL_M_PLACES) {
        launch_permute(queue, a);
    } else {
        launch_kernel(queue, permute_small_m, dim3(blocks_for(n_keys(*a), BLOCK / WARP)), BLOCK,
                      0, 1, *a);
    }
    hd_cuda_check(s, "moe_permute");
}

/* ---- combine ---- */

/* EACH neighbors of a row, moved at once. */
template <int EACH>
struct alignas(EACH * sizeof(cuda_act)) neighbors {
    cuda_act x[EACH];
};

/* As load_now(). */
template <int EACH>
static __device__ __forceinline__ neighbors<EACH> load_neighbors(const cuda_act *x) {
    neighbors<EACH> to;
    if constexpr (EACH == 4) {
        asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(to.x[0]), "=f"(to.x[1]), "=f"(to.x[2]), "=f"(to.x[3])
                     : "l"(x));
    } else {
        static_assert(EACH == 1);
        asm volatile("ld.global.f32 %0, [%1];" : "=f"(to.x[0]) : "l"(x));
    }
    return to;
}

/* A block per token and BLOCK * EACH columns, all of a column's choices on their way at once: in
 * order of experts. */
template <int EACH>
static __global__ void __launch_bounds__(BLOCK, 3) moe_combine(hd_moe_combine_args a) {
    constexpr int AT_ONCE = 8; /* choices on their way */
    begin_kernel();
    extern __shared__ int32_t sorted[]; /* [top_k] places, then weights */
    float *weight = reinterpret_cast<float *>(sorted + a.top_k);
    const int64_t t = blockIdx.x;
    const int32_t *place = a.place + t * a.top_k, *expert = a.expert + t * a.top_k;
    const int32_t c = (int32_t)(blockIdx.y * BLOCK + threadIdx.x) * EACH;
    for (int32_t j = threadIdx.x; j < a.top_k; j += BLOCK) {
        const int32_t own = expert[j], from = place[j];
        const float factor = a.weight ? a.weight[t * a.top_k + j] : 1.0f;
        asm volatile("" ::: "memory"); /* and stay before the loop */
        int32_t rank = 0;
        for (int32_t k = 0; k < a.top_k; k++) rank += expert[k] < own + (k < j);
        sorted[rank] = from;
        weight[rank] = factor;
    }
    __syncthreads();
    if (c >= a.cols) return;
    using several = neighbors<EACH>;
    const auto at = [&](const hd_rows &x, int64_t row) {
        return load_neighbors<EACH>(acts(x) + row * stride_of(x, a.cols) + c);
    };
    double sum[EACH] = {};
    if (a.shared.data) {
        const several own = at(a.shared, t);
#pragma unroll
        for (int i = 0; i < EACH; i++) sum[i] = (double)wide(own.x[i]);
    }
    for (int32_t first = 0; first < a.top_k; first += AT_ONCE) {
        several own[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) own[k] = at(a.y, sorted[min(first + k, a.top_k - 1)]);
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const bool there = first + k < a.top_k; /* a branch would take the loads along */
            const double factor = (double)weight[there ? first + k : first];
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                const double more = fma(factor, (double)wide(own[k].x[i]), sum[i]);
                sum[i] = there ? more : sum[i];
            }
        }
    }
    several out;
#pragma unroll
    for (int i = 0; i < EACH; i++) out.x[i] = narrow((float)sum[i]);
    *reinterpret_cast<several *>(acts(a.out) + t * stride_of(a.out, a.cols) + c) = out;
}

void hd_moe_combine_cuda(hd_stream *s, const hd_moe_combine_args *a) {
    constexpr int EACH = 4;
    if (a->rows == 0) return;
    const size_t bytes = (size_t)a->top_k * (sizeof(int32_t) + sizeof(float));
    const size_t whole = (bytes + 15) / 16 * 16; /* the compiler reads several at once */
    const uintptr_t all =
        (uintptr_t)a->out.data | (uintptr_t)a->y.data | (uintptr_t)a->shared.data;
    cudaStream_t queue = hd_cuda_stream(s);
    const int64_t rows = a->cols | a->out.stride | a->shared.stride;
    if (rows % EACH == 0 && all % sizeof(neighbors<EACH>) == 0) {
        const dim3 grid((unsigned)a->rows, blocks_for(a->cols, BLOCK * EACH));
        launch_kernel(queue, moe_combine<EACH>, grid, BLOCK, whole, 1, *a);
    } else {
        const dim3 grid((unsigned)a->rows, blocks_for(a->cols, BLOCK));
        launch_kernel(queue, moe_combine<1>, grid, BLOCK, whole, 1, *a);
    }
    hd_cuda_check(s, "moe_combine");
}
