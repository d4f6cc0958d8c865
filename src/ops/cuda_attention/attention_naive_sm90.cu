/* attention_naive_sm90.cu - MLA's naive form on sm_90a: causal attention of long prompts with keys of
 * 192 and values of 128 elements, from bfloat16 on the tensor cores.
 *
 * An item is one head of 256 rows, half of them for each of two blocks, which are a cluster. In
 * each block one thread fetches halves of tiles of 128 keys, for both blocks, and two warpgroups
 * compute 64 rows each: the scores of a tile while the weights of the one before it multiply its
 * values. They take turns, so that the softmax of one is beside the products of the other.
 *
 * A row's tiles are counted from the start of its sequence, and it takes them in order. Those
 * behind its position change nothing: weights of zero, and a maximum that stays. So neither the
 * rows beside it nor where a chunk began change a bit. Scores are taken times log2(e).
 *
 * Keys and values lie in the operators' scratch, of as many heads at once as have room. */
#include "ops/cuda_attention/attention_naive_internal.cuh"
#include "ops/cuda_attention/attention_sm90_internal.cuh"
#include "ops/cuda/wgmma_internal.cuh"

constexpr int THREADS = 3 * WARPGROUP, STAGES = 2;
constexpr int KEY_BOXES = NAIVE_KEY / BOX_COLS, VALUE_BOXES = NAIVE_V / BOX_COLS;
constexpr int NOPE_BOXES = NAIVE_NOPE / BOX_COLS;
constexpr uint32_t KEY_BYTES = KEY_BOXES * NAIVE_BOX, VALUE_BYTES = VALUE_BOXES * NAIVE_BOX;
constexpr size_t SHARED_BYTES = KEY_BYTES + STAGES * (KEY_BYTES + VALUE_BYTES) + 64;

enum {
    Q_BARRIER = 1,
    TURN = 3
}; /* named barriers: of warpgroup i, the next number for the other */

/* One head of the block's rows [row, end), none if row >= end, which see own_tiles of the item's
 * n_tiles; row -1: there is no item. */
struct item {
    int32_t row, end, head, first_key, n_tiles, own_tiles;
};

struct block_memory {
    uint8_t *q, *keys, *values;                                /* [boxes], [STAGES, boxes] */
    uint64_t *key_full, *key_empty, *value_full, *value_empty; /* [STAGES] */
};

static __device__ __forceinline__ block_memory carve(uint8_t *shared) {
    block_memory m;
    m.q = shared;
    m.keys = m.q + KEY_BYTES;
    m.values = m.keys + STAGES * KEY_BYTES;
    m.key_full = reinterpret_cast<uint64_t *>(m.values + STAGES * VALUE_BYTES);
    m.key_empty = m.key_full + STAGES;
    m.value_full = m.key_empty + STAGES;
    m.value_empty = m.value_full + STAGES;
    return m;
}

/* ---- what a cluster does ---- */

/* Heads whose keys stay in the L2 cache while all rows meet them. */
constexpr int32_t HEADS_AT_ONCE = 8;

constexpr int CLUSTER = 2, BLOCK_ROWS = NAIVE_ROWS / CLUSTER;

/* Clusters begin in order: few heads at once; of a sequence the rows with the most keys first. A
 * warp's work. */
static __device__ item find_item(const hd_attention_naive_args &a, int32_t heads) {
    const int32_t index = (int32_t)blockIdx.x / CLUSTER, row_tiles = count_naive_rows(a.seqs);
    const int32_t of_group = max(HEADS_AT_ONCE * row_tiles, 1);
    const int32_t first = index / of_group * HEADS_AT_ONCE;
    const int32_t n = min(heads - first, HEADS_AT_ONCE), at = index % of_group;
    if (n <= 0 || at / n >= row_tiles) return {-1, 0, 0, 0, 0, 0};
    const naive_tile t = find_naive_tile<false>(a.seqs, at / n);
    const int32_t row = a.seqs.first_row[t.seq] + (t.n - 1 - t.tile) * NAIVE_ROWS;
    const int32_t end = min(row + NAIVE_ROWS, a.seqs.first_row[t.seq + 1]);
    item i;
    i.row = row + (int32_t)cluster_ctarank() * BLOCK_ROWS;
    i.end = min(i.row + BLOCK_ROWS, end);
    i.head = first + at % n;
    i.first_key = t.first_key * NAIVE_KEYS;
    i.n_tiles = a.seqs.pos[end - 1] / NAIVE_KEYS + 1;
    i.own_tiles = a.seqs.pos[i.end - 1] / NAIVE_KEYS + 1;
    return i;
}

/* The place of the n-th tile, and how often its barriers have turned. */
static __device__ __forceinline__ uint32_t stage_of(uint32_t n) {
    return n % STAGES;
}

static __device__ __forceinline__ uint32_t parity_of(uint32_t n) {
    return n / STAGES & 1;
}

/* ---- one thread fetches ---- */

struct naive_maps {
    CUtensorMap made, rotated;
};

/* The block's half of a tile's boxes, for both blocks. */
static __device__ __forceinline__ void fetch_box(uint8_t *to, const CUtensorMap *map,
                                                 uint64_t *full, int32_t col, int32_t key,
                                                 int32_t head) {
    const int32_t rank = (int32_t)cluster_ctarank();
    bulk_multicast_3d(to + rank * (NAIVE_BOX / CLUSTER), map, full, col,
                      key + rank * (NAIVE_KEYS / CLUSTER), head, (1 << CLUSTER) - 1,
                      EVICT_NORMAL);
}

static __device__ __forceinline__ void fetch_tile(const naive_maps &maps, const block_memory &m,
                                                  int32_t key, int32_t head, uint32_t n) {
    const uint32_t stage = stage_of(n), parity = parity_of(n) ^ 1;
    uint64_t *full = m.key_full + stage;
    uint8_t *to = m.keys + stage * KEY_BYTES;
    mbarrier_wait(m.key_empty + stage, parity);
    mbarrier_arrive_expect_tx(full, KEY_BYTES);
    for (int box = 0; box < NOPE_BOXES; box++) {
        fetch_box(to + box * NAIVE_BOX, &maps.made, full, box * BOX_COLS, key, head);
    }
    fetch_box(to + NOPE_BOXES * NAIVE_BOX, &maps.rotated, full, 0, key, 0);
    full = m.value_full + stage;
    to = m.values + stage * VALUE_BYTES;
    mbarrier_wait(m.value_empty + stage, parity);
    mbarrier_arrive_expect_tx(full, VALUE_BYTES);
    for (int box = 0; box < VALUE_BOXES; box++) {
        fetch_box(to + box * NAIVE_BOX, &maps.made, full, NAIVE_NOPE + box * BOX_COLS, key,
                  head);
    }
}

static __device__ void fetch_tiles(const naive_maps &maps, const block_memory &m,
                                   const item &it) {
    for (int32_t n = 0; n < it.n_tiles; n++) {
        fetch_tile(maps, m, it.first_key + n * NAIVE_KEYS, it.head, (uint32_t)n);
    }
}

/* ---- two warpgroups compute ---- */

/* The warpgroup's 64 queries, zeros behind the last row. */
static __device__ __forceinline__ void load_queries(const hd_attention_naive_args &a,
                                                    uint32_t to, const item &it,
                                                    int32_t first_head) {
    constexpr int FOURS = NAIVE_KEY / 4, EACH = 8;
    const float *q = acts(a.q) + (int64_t)(first_head + it.head) * NAIVE_KEY;
    const int32_t row = it.row + (int32_t)threadIdx.x / WARPGROUP * BOX_ROWS;
    const int thread = threadIdx.x % WARPGROUP;
    for (int first = thread; first < BOX_ROWS * FOURS; first += EACH * WARPGROUP) {
        float4 x[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int at = first + i * WARPGROUP;
            const int64_t own = row + at / FOURS;
            const float4 *from =
                reinterpret_cast<const float4 *>(q + own * a.heads * NAIVE_KEY) + at % FOURS;
            x[i] = own < it.end ? load_four(from) : float4{};
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int at = first + i * WARPGROUP, four = at % FOURS;
            put_four(to + (uint32_t)(four / 16 * NAIVE_BOX + four % 2 * 8) +
                         box_at(at / FOURS, four % 16 / 2),
                     x[i]);
        }
    }
    fence_proxy_async();
}

/* Of a row, so far: the maximum, this lane's share of the total. */
struct running {
    float max, total;
};

/* Scores into weights, and what there was is to be multiplied by. `first`: of the tile's keys, minus
 * the thread's positions; only where some are not visible. */
template <bool SOME>
static __device__ __forceinline__ void weigh(float (&s)[64], running *run, float *keep,
                                             float scale, const int32_t *visible) {
    float top[2] = {-CUDART_INF_F, -CUDART_INF_F};
#pragma unroll
    for (int i = 0; i < 64; i++) {
        const int h = i / 2 % 2;
        if (SOME && i / 4 * 8 + i % 2 > visible[h]) s[i] = -CUDART_INF_F;
        top[h] = fmaxf(top[h], s[i]);
    }
    float base[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float max = fmaxf(run[h].max, __fmul_rn(over_quad(top[h], true), scale));
        base[h] = max == -CUDART_INF_F ? 0.0f : max; /* nothing but -inf so far */
        keep[h] = exp2_of(run[h].max - base[h]);
        run[h] = {max, __fmul_rn(run[h].total, keep[h])};
    }
#pragma unroll
    for (int i = 0; i < 64; i++) {
        s[i] = exp2_of(fmaf(s[i], scale, -base[i / 2 % 2]));
        run[i / 2 % 2].total += s[i];
    }
}

static __device__ __forceinline__ void start_scores(float (&s)[64], uint64_t q, uint64_t keys) {
#pragma unroll
    for (int step = 0; step < NAIVE_KEY / 16; step++) {
        const uint64_t at = step / 4 * (NAIVE_BOX >> 4) + step % 4 * 2;
        wgmma_m64n128k16(s, q + at, keys + at, step > 0);
    }
    wgmma_commit_group();
}

static __device__ __forceinline__ void start_values(float (&o)[64], const uint32_t (&p)[32],
                                                    uint64_t values) {
#pragma unroll
    for (int step = 0; step < NAIVE_KEYS / 16; step++) {
        wgmma_m64n128k16_transposed(o, p + 4 * step, values + 128 * step);
    }
    wgmma_commit_group();
}

/* The warp has read: it says so to both blocks. */
static __device__ __forceinline__ void release(uint64_t *barrier) {
    if (threadIdx.x % WARP < CLUSTER) mbarrier_arrive_at(barrier, threadIdx.x % WARP);
}

/* A thread's two rows, their positions, and the least position of the warpgroup. Rows behind the
 * last see what it sees. */
struct own_rows {
    int32_t row[2], pos[2], least;
};

static __device__ __forceinline__ own_rows rows_of(const hd_attention_naive_args &a,
                                                   const item &i) {
    const int32_t row = i.row + (int32_t)threadIdx.x / WARPGROUP * BOX_ROWS;
    const int32_t first =
        row + (int32_t)threadIdx.x % WARPGROUP / WARP * 16 + (int32_t)threadIdx.x % WARP / 4;
    own_rows own;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        own.row[h] = first + 8 * h;
        own.pos[h] = a.seqs.pos[min(own.row[h], i.end - 1)];
    }
    own.least = a.seqs.pos[min(row, i.end - 1)];
    return own;
}

/* The weights of tile i. */
static __device__ __forceinline__ void weigh_tile(float (&s)[64], running *run, float *keep,
                                                  float scale, const own_rows &own, int32_t i) {
    if ((i + 1) * NAIVE_KEYS - 1 > own.least) {
        const int32_t first = i * NAIVE_KEYS + 2 * ((int32_t)threadIdx.x % 4);
        const int32_t visible[2] = {own.pos[0] - first, own.pos[1] - first};
        weigh<true>(s, run, keep, scale, visible);
    } else {
        weigh<false>(s, run, keep, scale, nullptr);
    }
}

static __device__ __forceinline__ void put_weights(uint32_t (&p)[32], const float (&s)[64]) {
#pragma unroll
    for (int i = 0; i < 32; i++) p[i] = bf16_pair(s[2 * i], s[2 * i + 1]);
}

/* A thread's two rows of the output. */
static __device__ __forceinline__ void put_rows(const hd_attention_naive_args &a,
                                                const float (&o)[64], const running *run,
                                                const own_rows &own, int32_t end,
                                                int32_t head) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float factor = 1.0f / over_quad(run[h].total, false);
        if (own.row[h] >= end) continue;
        float *to = acts(a.out) + own.row[h] * stride_of(a.out, (int64_t)a.heads * NAIVE_V) +
                    (int64_t)head * NAIVE_V + 2 * (threadIdx.x % 4);
#pragma unroll
        for (int k = 2 * h; k < 64; k += 4) {
            *reinterpret_cast<float2 *>(to + k / 4 * 8) =
                make_float2(o[k] * factor, o[k + 1] * factor);
        }
    }
}

/* Each of the two computes while it has its turn. */
static __device__ __forceinline__ void take_turn(int group) {
    bar_sync(TURN + group, 2 * WARPGROUP);
}

static __device__ __forceinline__ void pass_turn(int group) {
    bar_arrive(TURN + 1 - group, 2 * WARPGROUP);
}

/* A warpgroup's share of an item. */
static __device__ __forceinline__ void compute(const hd_attention_naive_args &a,
                                               const block_memory &m, const item &it,
                                               int32_t first_head) {
    const int group = threadIdx.x / WARPGROUP;
    const uint32_t queries = shared_address(m.q) + group * BOX_BYTES;
    const own_rows own = rows_of(a, it);
    const uint64_t q = box_descriptor(queries);
    const uint32_t keys = shared_address(m.keys), values = shared_address(m.values);
    const float scale = a.scale * LOG2_E;
    running run[2] = {
        {-CUDART_INF_F, 0.0f},
        {-CUDART_INF_F, 0.0f}
    };
    float s[64], o[64] = {}, keep[2];
    uint32_t p[32];
    uint32_t n = 0;
    load_queries(a, queries, it, first_head);
    bar_sync(Q_BARRIER + group, WARPGROUP);
    if (group == 1) pass_turn(group);
    mbarrier_wait(m.key_full + stage_of(n), parity_of(n));
    take_turn(group);
    wgmma_fence();
    start_scores(s, q, box_descriptor(keys + stage_of(n) * KEY_BYTES));
    pass_turn(group);
    wgmma_wait_group<0>();
    release(m.key_empty + stage_of(n));
    weigh_tile(s, run, keep, scale, own, 0);
    put_weights(p, s);
    for (int32_t i = 1; i < it.own_tiles; i++, n++) {
        const uint32_t stage = stage_of(n + 1), before = stage_of(n);
        mbarrier_wait(m.key_full + stage, parity_of(n + 1));
        take_turn(group);
        wgmma_fence();
        start_scores(s, q, box_descriptor(keys + stage * KEY_BYTES));
        mbarrier_wait(m.value_full + before, parity_of(n));
        wgmma_fence();
        start_values(o, p, transposed_descriptor(values + before * VALUE_BYTES, NAIVE_BOX));
        pass_turn(group);
        wgmma_wait_group<1>();
        release(m.key_empty + stage);
        weigh_tile(s, run, keep, scale, own, i);
        wgmma_wait_group<0>();
        release(m.value_empty + before);
#pragma unroll
        for (int k = 0; k < 64; k++) o[k] = __fmul_rn(o[k], keep[k / 2 % 2]);
        put_weights(p, s);
    }
    mbarrier_wait(m.value_full + stage_of(n), parity_of(n));
    wgmma_fence();
    start_values(o, p, transposed_descriptor(values + stage_of(n) * VALUE_BYTES, NAIVE_BOX));
    wgmma_wait_group<0>();
    release(m.value_empty + stage_of(n));
    if (group == 0) take_turn(group); /* which the other has passed on */
    put_rows(a, o, run, own, it.end, first_head + it.head);
    for (int32_t i = it.own_tiles; i < it.n_tiles; i++) { /* the other block's alone */
        n++;
        mbarrier_wait(m.key_full + stage_of(n), parity_of(n));
        release(m.key_empty + stage_of(n));
        mbarrier_wait(m.value_full + stage_of(n), parity_of(n));
        release(m.value_empty + stage_of(n));
    }
}

/* Heads [first_head, first_head + heads). */
static __global__ void __launch_bounds__(THREADS, 1)
    attention_naive_items(const __grid_constant__ naive_maps maps, hd_attention_naive_args a,
                          int32_t first_head, int32_t heads) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const block_memory m = carve(shared);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(m.key_full + i, 1);
            mbarrier_init(m.value_full + i, 1);
            mbarrier_init(m.key_empty + i, CLUSTER * 2 * WARPGROUP / WARP);
            mbarrier_init(m.value_empty + i, CLUSTER * 2 * WARPGROUP / WARP);
        }
        fence_mbarrier_init();
    }
    begin_kernel();
    const item it = find_item(a, heads);
    if (it.row < 0) return; /* nor has the other an item */
    barrier_cluster();
    if (threadIdx.x / WARPGROUP < 2) {
        setmaxnreg_inc<232>();
        compute(a, m, it, first_head);
    } else {
        setmaxnreg_dec<40>();
        if (threadIdx.x == 2 * WARPGROUP) fetch_tiles(maps, m, it);
    }
    barrier_cluster(); /* nobody leaves while the other may write or arrive here */
}

/* ---- launching ---- */

static bool latents_fit(const hd_paged &p) {
    const bool packed =
        p.rows.type == HD_E4M3 && p.format.group == 128 && p.format.plain == NAIVE_ROPE;
    return (packed || p.rows.type == HD_BF16) && p.width == NAIVE_RANK + NAIVE_ROPE &&
           (uintptr_t)p.rows.data % 16 == 0;
}

static bool attention_naive_fits(const hd_attention_naive_args *a) {
    return a->nope_dim == NAIVE_NOPE && a->rope_dim == NAIVE_ROPE && a->v_dim == NAIVE_V &&
           a->w->cols == NAIVE_RANK && a->w->rows == a->heads * NAIVE_MADE &&
           latents_fit(a->latents) && (uintptr_t)a->q.data % 16 == 0 &&
           (uintptr_t)a->out.data % 8 == 0 && a->out.stride % 2 == 0 && a->scale > 0.0f;
}

static bool describe_keys(naive_maps *to, const naive_keys &k) {
    const cuuint64_t keys = (cuuint64_t)k.tiles * NAIVE_KEYS;
    constexpr cuuint64_t EACH = sizeof(__nv_bfloat16);
    box made = {}, rotated = {};
    made.rank = rotated.rank = 3;
    made.dims[0] = NAIVE_MADE;
    made.dims[1] = rotated.dims[1] = keys;
    made.dims[2] = (cuuint64_t)k.heads;
    made.strides[0] = NAIVE_MADE * EACH;
    made.strides[1] = NAIVE_MADE * EACH * keys;
    rotated.dims[0] = NAIVE_ROPE;
    rotated.dims[2] = 1;
    rotated.strides[0] = NAIVE_ROPE * EACH;
    rotated.strides[1] = NAIVE_ROPE * EACH * keys;
    for (box *b : {&made, &rotated}) {
        b->of[0] = BOX_COLS;
        b->of[1] = NAIVE_KEYS / CLUSTER;
        b->of[2] = 1;
    }
    constexpr CUtensorMapDataType TYPE = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    constexpr CUtensorMapSwizzle SWIZZLE = CU_TENSOR_MAP_SWIZZLE_128B;
    return describe_as(&to->made, TYPE, SWIZZLE, k.made, made) &&
           describe_as(&to->rotated, TYPE, SWIZZLE, k.rotated, rotated);
}

/* Of k.heads heads. */
static void attention_heads(hd_stream *s, const hd_attention_naive_args &a,
                            const naive_keys &k) {
    const int64_t items = (blocks_for(a.most_rows, NAIVE_ROWS) + (int64_t)a.seqs.n) * k.heads;
    const unsigned grid = (unsigned)items * CLUSTER;
    naive_maps maps;
    naive_make_keys(s, a, k);
    if (!describe_keys(&maps, k)) {
        hd_stream_fail(s, HD_EUNSUPPORTED, "naive attention: the driver has no tensor maps");
        return;
    }
    hd_cuda_allow_shared((const void *)attention_naive_items, SHARED_BYTES);
    launch_kernel(hd_cuda_stream(s), attention_naive_items, grid, THREADS, SHARED_BYTES,
                  CLUSTER, maps, a, k.first_head, k.heads);
}

void hd_attention_naive_cuda_fast(hd_stream *s, const hd_attention_naive_args *a) {
    if (a->seqs.n == 0 || a->most_rows == 0 || a->heads == 0) return;
    if (!attention_naive_fits(a)) {
        hd_stream_fail(
            s, HD_EUNSUPPORTED,
            "naive attention on a GPU is of latents of 512 + 64, keys of 128 + 64 and "
            "values of 128 elements");
        return;
    }
    constexpr size_t EACH = sizeof(__nv_bfloat16);
    naive_keys k = {};
    k.tiles = (int32_t)blocks_for(a->most_keys, NAIVE_KEYS) + a->seqs.n;
    const size_t room = (size_t)hd_stream_workers(s) * hd_stream_scratch_bytes(s);
    const size_t keys = (size_t)k.tiles * NAIVE_KEYS, rotated = keys * NAIVE_ROPE * EACH;
    const size_t of_head = (keys + NAIVE_RANK) * NAIVE_MADE * EACH;
    if (room < rotated + of_head) {
        hd_stream_fail(s, HD_EUNSUPPORTED,
                       "naive attention to so many keys has no room for them");
        return;
    }
    const size_t fit = (room - rotated) / of_head;
    const int32_t rounds = (int32_t)(((size_t)a->heads + fit - 1) / fit);
    const int32_t at_once = (a->heads + rounds - 1) / rounds;
    uint8_t *at = static_cast<uint8_t *>(hd_stream_scratch(s, 0, 0));
    k.rotated = reinterpret_cast<__nv_bfloat16 *>(at);
    k.weights = reinterpret_cast<__nv_bfloat16 *>(at + rotated);
    for (; k.first_head < a->heads; k.first_head += at_once) {
        const int32_t left = a->heads - k.first_head;
        k.heads = left < at_once ? left : at_once;
        k.made = k.weights + (size_t)k.heads * NAIVE_MADE * NAIVE_RANK;
        attention_heads(s, *a, k);
    }
    hd_cuda_check(s, "attention_naive");
}
