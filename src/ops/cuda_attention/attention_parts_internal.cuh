/* attention_parts_internal.cuh - how attention_sm90.cu divides its work: a row's keys into parts, parts
 * among blocks, a block's shared memory. A row has one part, or four for each block of a cluster to have
 * one of them at the same time. */
#ifndef HD_OPS_CUDA_ATTENTION_ATTENTION_PARTS_INTERNAL_CUH
#define HD_OPS_CUDA_ATTENTION_ATTENTION_PARTS_INTERNAL_CUH

#include "ops/cuda_attention/attention_sm90_internal.cuh"
#include "ops/cuda/wgmma_internal.cuh"

constexpr int HEADS = BOX_ROWS, TILE = BOX_ROWS, V_DIM = 512, V_BOXES = V_DIM / BOX_COLS;
constexpr int THREADS = 3 * WARPGROUP, MATH_THREADS = 2 * WARPGROUP, HALF_COLS = V_DIM / 2;
constexpr int PART_STRIDE = V_DIM + 4; /* floats of a part: its sum, maximum, total, any key */
constexpr int QUAD = 4;                /* parts that the blocks of a cluster have */
constexpr int MAX_PARTS = 64, LEAST_PART = 1536; /* of more than one quad */
/* From how many keys on a row has one. Heads that fill half of a tile are those of tensor parallelism, of which a
 * rank has few rows; of many rows each part costs as much as seven tiles. */
constexpr int FEW_HEADS_KEYS = 1024, QUAD_KEYS = 4096;

enum { Q_BARRIER = 1, P_READY, P_FREE }; /* named barriers of the two that compute */

/* ---- keys of 64 * BOXES columns: bfloat16, or E4M3 but for the last box ---- */

template <int BOXES>
constexpr int SCALE_COLS = BOXES == 9 ? 128 : 64; /* of a scale: MLA's, V4's */

template <int BOXES>
constexpr int N_SCALES = (BOXES - 1) * BOX_COLS / SCALE_COLS<BOXES>;

template <int BOXES>
constexpr int PACKED_BYTES = ((BOXES + 1) * BOX_COLS + N_SCALES<BOXES> + 3) / 4 * 4;

static_assert(PACKED_BYTES<9> == 644 && PACKED_BYTES<8> == 584, "as hd_entry_bytes() has them");

/* ---- a row's keys, in the order of the contract ---- */

struct row_keys {
    const int32_t *selected_keys; /* NULL: all entries; else -1 behind the last */
    int32_t seq, first_recent, n_recent, n;
    int32_t part, n_parts; /* keys of a part; 1, or a multiple of QUAD */
};

/* Parts of a row: each costs its queries and the join of its sums. */
static __host__ __device__ __forceinline__ int32_t parts_of(int64_t n, int32_t heads) {
    const int64_t quads = n / LEAST_PART / QUAD;
    if (n < (heads <= HEADS / 2 ? FEW_HEADS_KEYS : QUAD_KEYS)) return 1;
    return quads < 1 ? QUAD : quads < MAX_PARTS / QUAD ? (int32_t)quads * QUAD : MAX_PARTS;
}

static __device__ row_keys keys_of(const hd_attention_args &a, int32_t row) {
    row_keys k = {};
    const int32_t pos = a.pos[row], visible = visible_entries(pos, a.ratio);
    k.seq = a.seq[row];
    if (a.window) {
        k.first_recent = max(a.window_from ? a.window_from[k.seq] : 0, pos + 1 - a.window);
        k.n_recent = pos + 1 - k.first_recent;
    }
    if (a.selected) k.selected_keys = a.selected + (int64_t)row * a.n_selected;
    k.n = k.n_recent + (a.selected ? min(visible, a.n_selected) : visible);
    k.n_parts = parts_of(k.n, a.heads);
    const int32_t each = max((k.n + k.n_parts - 1) / k.n_parts, 1);
    k.part = (each + TILE - 1) / TILE * TILE; /* so the last ones may be empty */
    return k;
}

/* Where key i is; NULL: there is none. */
template <int BOXES, bool PACKED>
static __device__ __forceinline__ const uint8_t *key_at(const hd_attention_args &a,
                                                        const row_keys &k, int32_t i) {
    const hd_paged &pool = i < k.n_recent ? a.recent : a.entries;
    int32_t e = k.first_recent + i;
    if (i >= k.n_recent) {
        e = k.selected_keys ? k.selected_keys[i - k.n_recent] : i - k.n_recent;
        if (e < 0) return nullptr;
    }
    const int64_t bytes = PACKED ? PACKED_BYTES<BOXES> : 2 * pool.width;
    return static_cast<const uint8_t *>(pool.rows.data) + paged_row(pool, k.seq, e) * bytes;
}

/* ---- what a block does: first quads, a part of each, then rows of one part, four of a cluster ---- */

struct part_plan {
    int32_t groups; /* of HEADS heads */
    bool quads;     /* blocks are clusters of QUAD; else every row has one part */
};

/* A warp's look at 32 rows at once: how many quads, or rows of one part, there are up to the end of a
 * lane's row, counted once for each group of heads. */
struct row_walk {
    int32_t first_row, before; /* before: those of the rows before first_row */
    int32_t upto;
};

struct part_item {
    int32_t row, first_head, part; /* row -1: there are no more */
};

/* The block's items in order. */
struct item_walk {
    row_walk rows;
    int32_t at, quads; /* the cluster's place in the order; quads of all rows */
    bool ones, any_ones;
};

static __device__ void count_parts(item_walk *w, const hd_attention_args &a,
                                   const part_plan &plan) {
    const int lane = threadIdx.x % WARP;
    const int32_t row = w->rows.first_row + lane;
    const int32_t n_parts = row < a.rows ? keys_of(a, row).n_parts : 0;
    const int32_t own = w->ones ? n_parts == 1 : n_parts / QUAD;
    w->any_ones = w->any_ones || __any_sync(ALL_LANES, n_parts == 1);
    w->rows.upto = own * plan.groups;
    for (int step = 1; step < WARP; step *= 2) {
        const int32_t left = __shfl_up_sync(ALL_LANES, w->rows.upto, step);
        if (lane >= step) w->rows.upto += left;
    }
}

/* Quad `index` of all, or row of one part; never one before those asked for so far. `part` counts quads. */
static __device__ part_item find_item(item_walk *w, const hd_attention_args &a,
                                      const part_plan &plan, int32_t index) {
    row_walk *r = &w->rows;
    for (;;) {
        const int32_t here = __shfl_sync(ALL_LANES, r->upto, WARP - 1);
        if (index < r->before + here) break;
        r->before += here;
        r->first_row += WARP;
        if (r->first_row >= a.rows) return {-1, 0, 0};
        count_parts(w, a, plan);
    }
    const int32_t at = index - r->before;
    const int lane = __popc(__ballot_sync(ALL_LANES, r->upto <= at));
    const int32_t upto = __shfl_sync(ALL_LANES, r->upto, lane);
    const int32_t prior = lane ? __shfl_sync(ALL_LANES, r->upto, lane - 1) : 0;
    const int32_t each = (upto - prior) / plan.groups, in_row = at - prior;
    return {r->first_row + lane, in_row / each * HEADS, in_row % each};
}

static __device__ __forceinline__ item_walk first_item(const hd_attention_args &a,
                                                       const part_plan &plan) {
    item_walk w = {};
    w.at = (int32_t)blockIdx.x / (plan.quads ? QUAD : 1);
    w.ones = !plan.quads;
    count_parts(&w, a, plan);
    return w;
}

static __device__ part_item next_item(item_walk *w, const hd_attention_args &a,
                                      const part_plan &plan) {
    const int32_t each = plan.quads ? QUAD : 1, rank = (int32_t)blockIdx.x % each;
    part_item item = {-1, 0, 0};
    if (!w->ones) {
        item = find_item(w, a, plan, w->at);
        item.part = item.part * QUAD + rank;
        if (item.row < 0) {
            if (!w->any_ones) return item;
            w->quads = w->rows.before;
            w->ones = true;
            w->rows = {};
            count_parts(w, a, plan);
        }
    }
    if (w->ones) item = find_item(w, a, plan, (w->at - w->quads) * each + rank);
    w->at += (int32_t)gridDim.x / each;
    return item;
}

/* ---- the barrier of a cluster whose blocks have only read from each other ---- */

/* As cluster_arrive() and cluster_wait(), without an order of writes, for which a thread waits as for writes to
 * memory. Whole warps arrive. */
static __device__ __forceinline__ void cluster_arrive_read() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

static __device__ __forceinline__ void cluster_wait_read() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

/* ---- a block's shared memory ---- */

struct block_memory {
    uint32_t q;           /* [boxes] */
    uint32_t keys;        /* [2 tiles, boxes] */
    uint32_t weights;     /* one box */
    uint32_t full, empty; /* [2] barriers */
    uint16_t *live;       /* [2, 4] of 16 keys each, a bit of each */
    float *keep;          /* [HEADS] */
    float *sums;          /* of a part of a quad [HEADS][V_DIM], where the keys were */
    float4 *stats;        /* [HEADS] its maximum, total, any key; where the weights were */
};

template <int BOXES>
constexpr uint32_t TILE_BYTES = BOXES *BOX_BYTES;

template <int BOXES>
constexpr size_t SHARED_BYTES = 3 * TILE_BYTES<BOXES> + BOX_BYTES + HEADS * sizeof(float) + 64;

template <int BOXES>
static __device__ block_memory carve(uint8_t *shared) {
    block_memory m;
    m.q = (uint32_t)__cvta_generic_to_shared(shared);
    m.keys = m.q + TILE_BYTES<BOXES>;
    m.weights = m.keys + 2 * TILE_BYTES<BOXES>;
    m.keep = reinterpret_cast<float *>(shared + 3 * TILE_BYTES<BOXES> + BOX_BYTES);
    m.full = m.weights + BOX_BYTES + HEADS * (uint32_t)sizeof(float);
    m.empty = m.full + 16;
    m.sums = reinterpret_cast<float *>(shared + TILE_BYTES<BOXES>);
    m.stats = reinterpret_cast<float4 *>(shared + 3 * TILE_BYTES<BOXES>);
    m.live = reinterpret_cast<uint16_t *>(m.keep + HEADS) + 16;
    return m;
}

#endif
