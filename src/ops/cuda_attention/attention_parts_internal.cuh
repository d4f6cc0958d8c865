/* attention_parts_internal.cuh - how attention_sm90.cu divides its work: a row's keys into parts, parts
 * among blocks, a block's shared memory. */
#ifndef HD_OPS_CUDA_ATTENTION_ATTENTION_PARTS_INTERNAL_CUH
#define HD_OPS_CUDA_ATTENTION_ATTENTION_PARTS_INTERNAL_CUH

#include "ops/cuda_attention/attention_sm90_internal.cuh"
#include "ops/cuda/wgmma_internal.cuh"

constexpr int HEADS = BOX_ROWS, TILE = BOX_ROWS, V_DIM = 512, V_BOXES = V_DIM / BOX_COLS;
constexpr int THREADS = 3 * WARPGROUP, MATH_THREADS = 2 * WARPGROUP, HALF_COLS = V_DIM / 2;
constexpr int PART_STRIDE = V_DIM + 4; /* floats of a part: its sum, maximum, total, any key */
constexpr int MAX_PARTS = 64, LEAST_PART = 1536;

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
    int32_t part, n_parts; /* keys of a part */
};

/* A part has LEAST_PART keys or more: each costs its queries and the join of its sums. */
static __host__ __device__ __forceinline__ int32_t parts_of(int64_t n) {
    const int64_t parts = n / LEAST_PART;
    return parts < 1 ? 1 : parts < MAX_PARTS ? (int32_t)parts : MAX_PARTS;
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
    const int32_t parts = parts_of(k.n), each = max((k.n + parts - 1) / parts, 1);
    k.part = (each + TILE - 1) / TILE * TILE;
    k.n_parts = max((k.n + k.part - 1) / k.part, 1);
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

/* ---- what a block does: every gridDim.x-th of all parts ---- */

/* A warp's look at 32 rows at once: how many parts there are up to the end of a lane's row. */
struct row_walk {
    int32_t first_row, before; /* before: parts of the rows before first_row */
    int32_t upto;
};

struct part_item {
    int32_t row, first_head, part; /* row -1: there are no more */
};

static __device__ void count_parts(row_walk *w, const hd_attention_args &a, int32_t groups) {
    const int lane = threadIdx.x % WARP;
    const int32_t row = w->first_row + lane;
    w->upto = row < a.rows ? keys_of(a, row).n_parts * groups : 0;
    for (int step = 1; step < WARP; step *= 2) {
        const int32_t left = __shfl_up_sync(ALL_LANES, w->upto, step);
        if (lane >= step) w->upto += left;
    }
}

/* Part `index` of all; never one before those asked for so far. */
static __device__ part_item find_item(row_walk *w, const hd_attention_args &a, int32_t groups,
                                      int32_t index) {
    for (;;) {
        const int32_t here = __shfl_sync(ALL_LANES, w->upto, WARP - 1);
        if (index < w->before + here) break;
        w->before += here;
        w->first_row += WARP;
        if (w->first_row >= a.rows) return {-1, 0, 0};
        count_parts(w, a, groups);
    }
    const int32_t at = index - w->before;
    const int lane = __popc(__ballot_sync(ALL_LANES, w->upto <= at));
    const int32_t upto = __shfl_sync(ALL_LANES, w->upto, lane);
    const int32_t prior = lane ? __shfl_sync(ALL_LANES, w->upto, lane - 1) : 0;
    const int32_t n_parts = (upto - prior) / groups, in_row = at - prior;
    return {w->first_row + lane, in_row / n_parts * HEADS, in_row % n_parts};
}

/* ---- a block's shared memory ---- */

struct block_memory {
    uint32_t q;           /* [boxes] */
    uint32_t keys;        /* [2 tiles, boxes] */
    uint32_t weights;     /* one box */
    uint32_t full, empty; /* [2] barriers */
    uint16_t *live;       /* [2, 4] of 16 keys each, a bit of each */
    float *keep;          /* [HEADS] */
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
    m.live = reinterpret_cast<uint16_t *>(m.keep + HEADS) + 16;
    return m;
}

#endif
