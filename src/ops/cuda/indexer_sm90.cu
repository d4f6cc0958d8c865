/* indexer_sm90.cu - the indexer's scores from bfloat16 on the tensor cores of sm_90a, for 64 heads of 128
 * columns.
 *
 * Four rows of a call share a block; those of one sequence share its keys, which go from memory
 * through registers to the products once. A warpgroup has 64 keys at a time, the next ones on
 * their way; the queries of the rows lie in shared memory. Every product of a key and a head has
 * the same order of columns, and every score the same order of heads, whoever shares them.
 *
 * Keys are float32, or E4M3 with a scale each: it multiplies the score instead of the key, which is the
 * same, since it is a power of two. */
#include "ops/cuda/indexer_internal.cuh"
#include "ops/cuda/unpack_internal.cuh"
#include "ops/cuda/wgmma_internal.cuh"

constexpr int HEADS = 64, WIDTH = 128, ROWS = 4, TILE = BOX_ROWS;
constexpr int GROUPS = 2, THREADS = GROUPS * WARPGROUP; /* warpgroups of a block */
constexpr int QUERY_BYTES = WIDTH / BOX_COLS * BOX_BYTES, STEPS = WIDTH / 16;
constexpr size_t SHARED_BYTES = ROWS * (QUERY_BYTES + HEADS * sizeof(float));

/* ---- queries ----
 *
 * Of 16 columns a lane of the product takes 2 t, 2 t + 1 and 8 + 2 t, 8 + 2 t + 1 of the left operand;
 * keys give it four neighbors instead, so queries are stored in that order. */

/* Columns 4 * unit and on of a head: two pairs, in two chunks. */
static __device__ __forceinline__ void put_four(uint32_t query, int head, int unit, float4 x) {
    const int chunk = unit / 4 % 4 * 2;
    const uint32_t box = query + (uint32_t)(unit / 16 * BOX_BYTES + unit % 4 * 4);
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(box + box_at(head, chunk)),
                 "r"(bf16_pair(x.x, x.y))
                 : "memory");
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(box + box_at(head, chunk + 1)),
                 "r"(bf16_pair(x.z, x.w))
                 : "memory");
}

static __device__ void load_queries(const hd_indexer_topk_args &a, uint32_t queries,
                                    float *weights, int32_t first_row, int32_t n) {
    constexpr int UNITS = WIDTH / 4, EACH = 16;
    const float4 *q =
        reinterpret_cast<const float4 *>(acts(a.q) + (int64_t)first_row * HEADS * WIDTH);
    for (int32_t first = (int32_t)threadIdx.x; first < n * HEADS * UNITS;
         first += EACH * THREADS) {
        float4 x[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) x[i] = q[first + i * THREADS];
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int unit = (int)first + i * THREADS, head = unit / UNITS;
            put_four(queries + (uint32_t)(head / HEADS * QUERY_BYTES), head % HEADS,
                     unit % UNITS, x[i]);
        }
    }
    for (int32_t i = (int32_t)threadIdx.x; i < n * HEADS; i += THREADS) {
        weights[i] = a.weight[(int64_t)first_row * HEADS + i] * a.scale;
    }
    fence_proxy_async();
    __syncthreads();
}

/* ---- keys ---- */

/* 16 keys of a warp, four neighboring columns of 16 at a time of two of them in a lane. */
template <bool PACKED>
struct key_tile {
    float4 x[STEPS][2];
};

template <>
struct key_tile<true> {
    uint32_t x[STEPS][2];
    uint32_t scale[2]; /* in the lowest byte */
};

constexpr int KEY_BYTES = WIDTH + 4; /* of E4M3: codes, a scale, zeros */

/* Where the key is that lanes i and 16 + i look up for their warp; NULL: none. */
template <bool PACKED>
static __device__ __forceinline__ const uint8_t *find_key(const hd_indexer_topk_args &a,
                                                          int32_t seq, int32_t first,
                                                          int32_t n) {
    constexpr int64_t BYTES = PACKED ? KEY_BYTES : WIDTH * (int)sizeof(float);
    const int warp = threadIdx.x % WARPGROUP / WARP;
    const int32_t key = first + warp * 16 + (int32_t)threadIdx.x % 16;
    if (key >= n) return nullptr;
    return static_cast<const uint8_t *>(a.keys.rows.data) + paged_row(a.keys, seq, key) * BYTES;
}

static __device__ __forceinline__ uint32_t load_word(const uint8_t *p) {
    uint32_t x;
    asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(x) : "l"(p));
    return x;
}

template <bool PACKED>
static __device__ __forceinline__ void load_keys(key_tile<PACKED> *to, const uint8_t *found) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const uint64_t at =
            __shfl_sync(ALL_LANES, reinterpret_cast<uint64_t>(found), lane / 4 + 8 * h);
        const uint8_t *key = reinterpret_cast<const uint8_t *>(at);
        if constexpr (PACKED) to->scale[h] = at ? load_word(key + WIDTH) : 0;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const int unit = lane % 4 + 4 * step;
            if constexpr (PACKED) {
                to->x[step][h] = at ? load_word(key + 4 * unit) : 0;
            } else {
                to->x[step][h] =
                    at ? load_four(reinterpret_cast<const float4 *>(key) + unit) : float4{};
            }
        }
    }
}

constexpr uint32_t UNSCALED = 127; /* as E8M0 */

template <bool PACKED>
static __device__ __forceinline__ void narrow_keys(uint32_t (*to)[4],
                                                   const key_tile<PACKED> &from) {
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if constexpr (PACKED) {
                const uint2 x = unpack_four(from.x[step][h], first_factor(UNSCALED));
                to[step][h] = x.x;
                to[step][2 + h] = x.y;
            } else {
                const float4 x = from.x[step][h];
                to[step][h] = bf16_pair(x.x, x.y);
                to[step][2 + h] = bf16_pair(x.z, x.w);
            }
        }
    }
}

/* What a score of lane's key 8 * h further is multiplied by. */
template <bool PACKED>
static __device__ __forceinline__ void scales_of(float *to, const key_tile<PACKED> &from) {
    if constexpr (PACKED) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const uint32_t scale = from.scale[h] & 0xff;
            to[h] = scale == 255 ? CUDART_NAN_F : __uint_as_float(scale << 23);
        }
    } else {
        to[0] = to[1] = 1.0f;
    }
}

/* ---- scores ---- */

static __device__ __forceinline__ void multiply(float (&hit)[32], const uint32_t (*keys)[4],
                                                uint32_t query) {
    const uint64_t q = box_descriptor(query);
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        wgmma_m64n64k16(hit, keys[step], q + step / 4 * NEXT_BOX + step % 4 * 2, step > 0);
    }
    wgmma_commit_group();
}

/* The scores of 64 keys from their hits of all heads. */
static __device__ __forceinline__ void put_scores(const float (&hit)[32], const float *weights,
                                                  const float *scales, float *score,
                                                  int32_t first, int32_t n) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x % WARPGROUP / WARP;
    float sum[2] = {};
#pragma unroll
    for (int i = 0; i < 32; i += 4) {
        const float2 w = *reinterpret_cast<const float2 *>(weights + 2 * i + 2 * (lane % 4));
#pragma unroll
        for (int h = 0; h < 2; h++) {
            sum[h] = fmaf(fmaxf(hit[i + 2 * h], 0.0f), w.x, sum[h]);
            sum[h] = fmaf(fmaxf(hit[i + 2 * h + 1], 0.0f), w.y, sum[h]);
        }
    }
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
        sum[0] += __shfl_xor_sync(ALL_LANES, sum[0], step);
        sum[1] += __shfl_xor_sync(ALL_LANES, sum[1], step);
    }
    const int h = lane % 4;
    const int32_t key = first + warp * 16 + lane / 4 + 8 * h;
    const float own = h ? sum[1] * scales[1] : sum[0] * scales[0];
    if (h < 2 && key < n) score[key] = isnan(own) ? -CUDART_INF_F : own; /* chosen last */
}

/* Of the block's row that a lane has: its sequence and how many keys it sees. Loaded at once, by each warp. */
struct row_facts {
    int32_t seq, keys;
};

static __device__ __forceinline__ row_facts facts_of(const hd_indexer_topk_args &a,
                                                     const score_rows &to, int32_t begin,
                                                     int32_t end) {
    const int32_t row = begin + (int32_t)threadIdx.x % WARP;
    if (row >= end) return {-1, 0};
    return {a.seq[to.first + row], visible_entries(a.pos[to.first + row], a.ratio)};
}

/* Rows of one sequence that a block has at once. */
struct row_run {
    int32_t first, n;  /* of the block's rows */
    int32_t seq, keys; /* of the row that sees most, or 0 if all keep all */
};

static __device__ __forceinline__ row_run run_from(const row_facts &facts, int32_t first,
                                                   int32_t n, int32_t top_k) {
    const int32_t lane = threadIdx.x % WARP, seq = __shfl_sync(ALL_LANES, facts.seq, first);
    const unsigned others =
        __ballot_sync(ALL_LANES, lane >= first && (lane >= n || facts.seq != seq));
    const int32_t end = __ffs((int)others) - 1; /* lane n at the latest */
    const bool counts = lane >= first && lane < end && facts.keys > top_k;
    return {first, end - first, seq, __reduce_max_sync(ALL_LANES, counts ? facts.keys : 0)};
}

/* Which tiles of a run's keys a block has. */
struct run_share {
    int32_t index, n;
};

/* Blocks that have the same rows divide their runs among them, and where they are more, n of them the keys
 * of a run. Returns whether this block has some of run `index` of `runs`. */
static __device__ bool own_share(run_share *s, int32_t index, int32_t runs) {
    const int32_t x = (int32_t)blockIdx.x, blocks = (int32_t)gridDim.x;
    *s = {x / runs, blocks > index ? (blocks - index - 1) / runs + 1 : 1};
    return index % blocks == x % runs;
}

template <bool PACKED>
static __device__ void score_run(const hd_indexer_topk_args &a, const score_rows &to,
                                 const row_facts &facts, const row_run &run, int32_t begin,
                                 const run_share &share, uint32_t queries, float *weights) {
    const int32_t row = to.first + begin + run.first, seq = run.seq;
    const int32_t stride = share.n * GROUPS * TILE;
    int32_t first = (share.index * GROUPS + (int32_t)threadIdx.x / WARPGROUP) * TILE;
    key_tile<PACKED> tile;
    load_keys(&tile, find_key<PACKED>(a, seq, first, run.keys));
    const uint8_t *next = find_key<PACKED>(a, seq, first + stride, run.keys);
    load_queries(a, queries, weights, row, run.n);
    for (; first < run.keys; first += stride) {
        uint32_t keys[STEPS][4];
        float scales[2];
        narrow_keys(keys, tile);
        scales_of(scales, tile);
        load_keys(&tile, next);
        next = find_key<PACKED>(a, seq, first + 2 * stride, run.keys);
        const auto put = [&](const float(&hit)[32], int32_t r) {
            put_scores(hit, weights + r * HEADS, scales, scores_of(to, begin + run.first + r),
                       first, __shfl_sync(ALL_LANES, facts.keys, run.first + r));
        };
        int32_t r = 0;
        for (; r + 1 < run.n; r += 2) {
            float hit[2][32];
            wgmma_fence();
            multiply(hit[0], keys, queries + (uint32_t)(r * QUERY_BYTES));
            multiply(hit[1], keys, queries + (uint32_t)((r + 1) * QUERY_BYTES));
            wgmma_wait_group<1>();
            put(hit[0], r);
            wgmma_wait_group<0>();
            put(hit[1], r + 1);
        }
        if (r < run.n) {
            float hit[32];
            wgmma_fence();
            multiply(hit, keys, queries + (uint32_t)(r * QUERY_BYTES));
            wgmma_wait_group<0>();
            put(hit, r);
        }
    }
}

template <bool PACKED>
static __global__ void __launch_bounds__(THREADS, 1)
    score_tiles(hd_indexer_topk_args a, score_rows to, int32_t n_rows) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t queries = (uint32_t)__cvta_generic_to_shared(shared);
    float *weights = reinterpret_cast<float *>(shared + ROWS * QUERY_BYTES);
    const int32_t end = min((int32_t)(blockIdx.y + 1) * ROWS, n_rows);
    const int32_t begin = (int32_t)blockIdx.y * ROWS;
    begin_early(n_rows);
    const row_facts facts = facts_of(a, to, begin, end);
    const int32_t n = end - begin;
    run_share share;
    int32_t runs = 0, index = 0;
    for (int32_t i = 0; i < n; i += run_from(facts, i, n, a.top_k).n) runs++;
    for (int32_t i = 0; i < n; index++) {
        const row_run run = run_from(facts, i, n, a.top_k);
        i += run.n;
        if (!own_share(&share, index, runs) || share.index * GROUPS * TILE >= run.keys)
            continue;
        score_run<PACKED>(a, to, facts, run, begin, share, queries, weights);
        __syncthreads(); /* the queries are done with */
    }
}

bool index_fits_sm90(const hd_indexer_topk_args *a) {
    return hd_cuda_is_sm90() && a->heads == HEADS && a->keys.width == WIDTH &&
           (uintptr_t)a->q.data % 16 == 0 && (uintptr_t)a->keys.rows.data % 16 == 0 &&
           (a->keys.rows.type == HD_F32 ||
            (a->keys.format.group == WIDTH && a->keys.format.plain == 0));
}

template <bool PACKED>
static void launch(cudaStream_t queue, const hd_indexer_topk_args &a, const score_rows &to,
                   int32_t n, dim3 grid) {
    hd_cuda_allow_shared((const void *)score_tiles<PACKED>, SHARED_BYTES);
    launch_early(queue, n, score_tiles<PACKED>, grid, THREADS, SHARED_BYTES, 1, a, to, n);
}

void index_score_sm90(cudaStream_t queue, const hd_indexer_topk_args &a, const score_rows &to,
                      int32_t n, int32_t workers) {
    const unsigned groups = blocks_for(n, ROWS), each = (unsigned)workers / groups;
    const dim3 grid(each ? each : 1, groups);
    if (a.keys.rows.type == HD_E4M3) {
        launch<true>(queue, a, to, n, grid);
    } else {
        launch<false>(queue, a, to, n, grid);
    }
}
