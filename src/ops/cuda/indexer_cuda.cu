/* indexer_cuda.cu - the lightning indexer: scores every visible key, keeps the best.
 *
 * Two kernels over as many rows as there is scratch for: scores, on the tensor cores as in
 * attention, here for heads and keys of any number and width; then the best (topk_cuda.cu). */
#include "ops/cuda/indexer_internal.cuh"
#include "ops/cuda/packed_rows_internal.cuh"
#include "ops/cuda/split_fp16_mma_internal.cuh"

constexpr int WARPS = BLOCK / WARP, TILE = 64; /* keys that a block scores at once */
constexpr int HEAD_GROUPS = 4;                 /* of warps, each with every fourth 16 heads */
constexpr int WARP_KEYS = TILE * HEAD_GROUPS / WARPS, OWN_KEYS = TILE / WARPS;
constexpr int MAX_ROWS = 16384; /* of a launch */
constexpr int UNITS = 1;        /* of eight columns of a key, of a lane at once */
constexpr int PACKED_UNITS = 2; /* of E4M3: all columns */

/* ---- scores ---- */

/* Heads in shared memory: whole tiles of the tensor cores. */
static __host__ __device__ __forceinline__ int32_t whole_heads(int32_t heads) {
    return (heads + 15) / 16 * 16;
}

/* A block's shared memory. */
struct score_block {
    half_rows q;         /* [whole heads, cols] */
    half_rows keys;      /* [2 tiles, TILE, cols] one is read, one is on its way */
    float *weight;       /* [whole heads] of a head, with what undoes its shift */
    int *key_shift;      /* [2, TILE] */
    float (*part)[TILE]; /* [HEAD_GROUPS] */
};

/* Tile i of the two. */
static __device__ __forceinline__ half_rows keys_at(const score_block &b, int i) {
    return {b.keys.at + (uint32_t)(i * TILE * b.keys.cols * 4), b.keys.cols};
}

static size_t score_bytes(const hd_indexer_topk_args *a) {
    const size_t heads = (size_t)whole_heads(a->heads), cols = (size_t)half_cols(a->keys.width);
    return (heads + 2 * TILE) * cols * 4 + heads * sizeof(float) + 2 * TILE * sizeof(int) +
           HEAD_GROUPS * TILE * sizeof(float);
}

static __device__ score_block carve(uint8_t *shared, const hd_indexer_topk_args &a) {
    const int32_t heads = whole_heads(a.heads), cols = half_cols(a.keys.width);
    score_block b;
    b.q = {shared_address(shared), cols};
    b.keys = {b.q.at + (uint32_t)(heads * cols * 4), cols};
    b.weight = reinterpret_cast<float *>(shared + (heads + 2 * TILE) * cols * 4);
    b.key_shift = reinterpret_cast<int *>(b.weight + heads);
    b.part = reinterpret_cast<float(*)[TILE]>(b.key_shift + 2 * TILE);
    return b;
}

/* The row's queries and head weights; a warp takes every eighth head. */
template <int P>
static __device__ void load_queries(const score_block &b, const hd_indexer_topk_args &a,
                                    int32_t row, bool quads) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int32_t width = a.keys.width, heads = whole_heads(a.heads);
    for (int32_t h = warp; h < heads; h += WARPS) {
        const cuda_act *q = acts(a.q) + ((int64_t)row * a.heads + h) * width;
        load_row(b.q, h, h < a.heads ? q : nullptr, width, quads, a.q.data);
    }
    commit_copies();
    wait_copies<0>();
    __syncwarp();
    for (int32_t h = warp; h < heads; h += WARPS) {
        int shift;
        convert_rows<P, 1, UNITS>(b.q, h, &shift);
        const float weight =
            h < a.heads ? a.weight[(int64_t)row * a.heads + h] * a.scale : 0.0f;
        if (lane == 0) b.weight[h] = weight * power_of_two(shift);
    }
}

/* Where the key is that this lane looks up for its warp, of places [first, first + TILE); NULL:
 * none. */
static __device__ __forceinline__ const uint8_t *find_key(const hd_indexer_topk_args &a,
                                                          const key_pool &pool, int32_t row,
                                                          int32_t first, int32_t n) {
    const int own = threadIdx.x / WARP * OWN_KEYS, lane = threadIdx.x % WARP;
    const int32_t place = first + own + lane;
    if (lane >= OWN_KEYS || place >= n) return nullptr;
    const int32_t key = pool.blocks ? pool_key(pool, row, place) : place;
    return entry_at(a.keys, a.seq[row], key);
}

/* The warp's OWN_KEYS keys of a tile on their way. */
static __device__ void load_keys(const half_rows &to, const hd_indexer_topk_args &a,
                                 const uint8_t *found, bool quads, const entry_layout &packed) {
    const int own = threadIdx.x / WARP * OWN_KEYS;
    for (int i = 0; i < OWN_KEYS; i++) {
        const uint8_t *key = from_lane(found, i);
        if (packed.bytes) {
            load_packed_row(to, own + i, key, packed.bytes, a.q.data);
        } else {
            load_row(to, own + i, reinterpret_cast<const cuda_act *>(key), a.keys.width, quads,
                     a.q.data);
        }
    }
    commit_copies();
}

/* q . key of 16 heads and the warp's keys: [WARP_KEYS / 8 tiles][4]. */
template <int P>
static __device__ __forceinline__ void multiply(float (*sum)[4], const half_rows &q,
                                                const half_rows &keys, int head, int key) {
    for (int first = 0; first < q.cols / 16; first += 4) { /* fresh sums lose less */
        float part[WARP_KEYS / 8][4] = {};
#pragma unroll
        for (int step = first; step < first + 4; step++) {
            if (step >= q.cols / 16) break;
            uint32_t a[SPLIT<P>][1][4], k[SPLIT<P>][WARP_KEYS / 16][4];
#pragma unroll
            for (int h = 0; h < SPLIT<P>; h++) {
                load_a(a[h][0], q, head, step, h);
#pragma unroll
                for (int t = 0; t < WARP_KEYS / 16; t++) {
                    load_b(k[h][t], keys, key + 16 * t, step, h);
                }
            }
            mma_split<P, 1, WARP_KEYS / 8>(part, a, k);
        }
#pragma unroll
        for (int i = 0; i < WARP_KEYS / 8 * 4; i++) sum[i / 4][i % 4] += part[i / 4][i % 4];
    }
}

static __device__ __forceinline__ float weigh(float hit, float weight) {
    return hit > 0.0f ? hit * weight : 0.0f;
}

/* What the warp's heads add to the scores of the warp's keys, into part. */
template <int P>
static __device__ __forceinline__ void add_heads(const score_block &b, const half_rows &keys,
                                                 int32_t heads) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int group = warp % HEAD_GROUPS, key = warp / HEAD_GROUPS * WARP_KEYS;
    float score[WARP_KEYS / 8][2] = {};
    for (int32_t head = 16 * group; head < heads; head += 16 * HEAD_GROUPS) {
        const float upper = b.weight[head + lane / 4], lower = b.weight[head + lane / 4 + 8];
        float hit[WARP_KEYS / 8][4] = {};
        multiply<P>(hit, b.q, keys, head, key);
#pragma unroll
        for (int i = 0; i < WARP_KEYS / 8 * 2; i++) {
            const float *h = &hit[i / 2][i % 2];
            score[i / 2][i % 2] += weigh(h[0], upper) + weigh(h[2], lower);
        }
    }
#pragma unroll
    for (int i = 0; i < WARP_KEYS / 8 * 2; i++) {
        float sum = score[i / 2][i % 2];
#pragma unroll
        for (int step = 4; step < WARP; step *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
        if (lane < 4) b.part[group][key + i / 2 * 8 + 2 * lane + i % 2] = sum;
    }
}

template <int P>
static __global__ void __launch_bounds__(BLOCK)
    score_keys(hd_indexer_topk_args a, key_pool pool, score_rows to) {
    extern __shared__ __align__(128) uint8_t shared[];
    const int32_t row = to.first + (int32_t)blockIdx.y, stride = (int32_t)gridDim.x * TILE;
    const int32_t visible = visible_entries(a.pos[row], a.ratio);
    const int32_t n = pool.blocks ? pool_size<BLOCK>(pool, row, visible) : visible;
    const int own = threadIdx.x / WARP * OWN_KEYS, lane = threadIdx.x % WARP;
    const bool quads = (uintptr_t)a.keys.rows.data % 16 == 0 && a.keys.width % 4 == 0 &&
                       (uintptr_t)a.q.data % 16 == 0;
    int32_t first = (int32_t)blockIdx.x * TILE;
    if (n <= a.top_k || first >= n) return; /* all are kept; nothing to do */
    const score_block b = carve(shared, a);
    const entry_layout packed =
        a.keys.rows.type == HD_E4M3 ? layout_of(a.keys) : entry_layout{};
    load_keys(keys_at(b, 0), a, find_key(a, pool, row, first, n), quads, packed);
    const uint8_t *next = find_key(a, pool, row, first + stride, n);
    load_queries<P>(b, a, row, quads);
    for (int i = 0; first < n; first += stride, i ^= 1) {
        int *key_shift = b.key_shift + i * TILE, shift[OWN_KEYS];
        wait_copies<0>();
        __syncwarp();
        if (packed.bytes) {
            convert_packed_rows<P, OWN_KEYS, PACKED_UNITS>(keys_at(b, i), own, packed, shift);
        } else {
            convert_rows<P, OWN_KEYS, UNITS>(keys_at(b, i), own, shift);
        }
#pragma unroll
        for (int k = 0; k < OWN_KEYS; k++) {
            if (lane == k) key_shift[own + k] = shift[k];
        }
        __syncthreads();
        if (first + stride < n) load_keys(keys_at(b, i ^ 1), a, next, quads, packed);
        next = find_key(a, pool, row, first + 2 * stride, n);
        add_heads<P>(b, keys_at(b, i), whole_heads(a.heads));
        __syncthreads();
        const int k = threadIdx.x;
        if (k >= TILE || first + k >= n) continue;
        const float sum = (b.part[0][k] + b.part[1][k]) + (b.part[2][k] + b.part[3][k]);
        scores_of(to, (int32_t)blockIdx.y)[first + k] =
            isnan(sum) ? -CUDART_INF_F : sum * power_of_two(key_shift[k]); /* chosen last */
    }
}

/* ---- blocks ---- */

/* Where the scores of blocks are, behind those of keys: a row has room for twice as many. */
static score_rows block_scores(const score_rows &keys) {
    return {keys.scratch + keys.each / 2, keys.each, keys.first};
}

/* A block's score is its best key's; the last one is always kept. A thread per block. */
static __global__ void __launch_bounds__(BLOCK)
    score_blocks(best_args a, score_rows keys, score_rows to) {
    const int32_t row = keys.first + (int32_t)blockIdx.y, size = a.pool.block;
    const int32_t n = visible_entries(a.pos[row], a.ratio), n_blocks = (n + size - 1) / size;
    const float *score = scores_of(keys, (int32_t)blockIdx.y);
    if (n_blocks <= a.k) return;
    for (int32_t b = (int32_t)(blockIdx.x * BLOCK + threadIdx.x); b < n_blocks;
         b += (int32_t)gridDim.x * BLOCK) {
        float best = b == n_blocks - 1 ? CUDART_INF_F : -CUDART_INF_F;
        for (int32_t u = b * size; u < min(n, (b + 1) * size); u++)
            best = fmaxf(best, score[u]);
        scores_of(to, (int32_t)blockIdx.y)[b] = best;
    }
}

static void keep_blocks(cudaStream_t queue, const best_args &blocks, const score_rows &rows,
                        int32_t n) {
    const unsigned each = blocks_for(blocks.most, 4 * BLOCK);
    score_blocks<<<dim3(each, (unsigned)n), BLOCK, 0, queue>>>(blocks, rows,
                                                               block_scores(rows));
    index_keep_best(queue, blocks, block_scores(rows), n);
}

/* Of a row's scores. */
static size_t row_bytes(int64_t keys, bool twice) {
    const size_t bytes = ((size_t)keys * sizeof(float) + 15) / 16 * 16;
    return twice ? 2 * bytes : bytes;
}

/* How many rows have their scores in the scratch of all workers together. */
static int32_t rows_at_once(const hd_stream *s, size_t each) {
    const size_t all = (size_t)hd_stream_workers(s) * hd_stream_scratch_bytes(s);
    const size_t n = each ? all / each : MAX_ROWS;
    return n > MAX_ROWS ? MAX_ROWS : n > 0 ? (int32_t)n : 1;
}

/* Chooses the keys of every row from those of a pool, and, if blocks is not NULL, blocks of all of
 * its keys. */
template <int P>
static void choose_keys(hd_stream *s, const hd_indexer_topk_args *a, const key_pool &pool,
                        const best_args *blocks) {
    const int32_t workers = hd_stream_workers(s), fill = 2 * workers;
    const int64_t all = (int64_t)a->keys.table_stride * a->keys.page_entries;
    const int64_t in_pool = (int64_t)pool.n * pool.block;
    const best_args keys = {a->out,
                            a->pos,
                            a->ratio,
                            a->top_k,
                            pool,
                            false,
                            pool.blocks && in_pool < all ? in_pool : all};
    hd_indexer_topk_args scored =
        *a; /* rows of so few keys that they keep all have no scores */
    if (blocks && (int64_t)blocks->k * blocks->pool.block < a->top_k) {
        scored.top_k = blocks->k * blocks->pool.block;
    }
    const size_t bytes = score_bytes(a);
    if (a->rows > 0 && (bytes > hd_cuda_shared_limit() ||
                        !packed_rows_fit(a->keys, 8 * PACKED_UNITS * WARP))) {
        hd_stream_fail(s, HD_EUNSUPPORTED, "an indexer this wide does not fit a GPU");
        return;
    }
    /* no row has scores where every row keeps all of its keys */
    const bool keeps_all = !blocks && keys.most <= scored.top_k;
    const size_t each = row_bytes(keys.most > all ? keys.most : all, blocks);
    const int32_t at_once = keeps_all ? a->rows : rows_at_once(s, each);
    uint8_t *scratch = static_cast<uint8_t *>(hd_stream_scratch(s, 0, 0));
    cudaStream_t queue = hd_cuda_stream(s);
    const bool small_m_bits = P == FAST && !pool.blocks && index_fits_sm90(a);
    hd_cuda_allow_shared((const void *)score_keys<P>, bytes);
    for (int32_t first = 0; first < a->rows; first += at_once) {
        const int32_t n = a->rows - first < at_once ? a->rows - first : at_once;
        const score_rows rows = {scratch, each, first};
        const dim3 grid(blocks_for(fill, n), (unsigned)n);
        if (keeps_all) {
            index_keep_best(queue, keys, rows, n);
            continue;
        }
        if (small_m_bits) {
            index_score_sm90(queue, scored, rows, n, workers);
        } else {
            score_keys<P><<<grid, BLOCK, bytes, queue>>>(scored, pool, rows);
        }
        if (blocks) keep_blocks(queue, *blocks, rows, n);
        index_keep_best(queue, keys, rows, n);
    }
}

template <int P>
static void indexer_topk(hd_stream *s, const hd_indexer_topk_args *a) {
    choose_keys<P>(s, a, {}, nullptr);
    hd_cuda_check(s, "indexer_topk");
}

void hd_indexer_topk_cuda(hd_stream *s, const hd_indexer_topk_args *a) {
    indexer_topk<EXACT>(s, a);
}

void hd_indexer_topk_cuda_fast(hd_stream *s, const hd_indexer_topk_args *a) {
    indexer_topk<FAST>(s, a);
}

template <int P>
static void pool_topk(hd_stream *s, const hd_pool_topk_args *a) {
    hd_indexer_topk_args keys = {};
    keys.out = a->out;
    keys.q = a->q;
    keys.weight = a->weight;
    keys.keys = a->keys;
    keys.seq = a->seq;
    keys.pos = a->pos;
    keys.rows = a->rows;
    keys.heads = a->heads;
    keys.ratio = a->ratio;
    keys.top_k = a->top_k;
    keys.scale = a->scale;
    if (a->makes_pool) {
        const int64_t all = (int64_t)a->keys.table_stride * a->keys.page_entries;
        const best_args blocks = {
            a->blocks,
            a->pos,
            a->ratio,
            a->n_blocks,
            {nullptr, a->n_blocks, a->block},
            true,
            (all + a->block - 1) / a->block
        };
        choose_keys<P>(s, &keys, {}, &blocks);
    } else {
        choose_keys<P>(s, &keys, {a->blocks, a->n_blocks, a->block}, nullptr);
    }
    hd_cuda_check(s, "pool_topk");
}

void hd_pool_topk_cuda(hd_stream *s, const hd_pool_topk_args *a) {
    pool_topk<EXACT>(s, a);
}

void hd_pool_topk_cuda_fast(hd_stream *s, const hd_pool_topk_args *a) {
    pool_topk<FAST>(s, a);
}
