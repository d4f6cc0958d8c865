/* attention_load_internal.cuh - the warpgroup of attention_sm90.cu that brings keys into shared memory, as
 * boxes of bfloat16. Keys of bfloat16 are copied; those of E4M3 go through registers, four of a warp at
 * once, while the next four are on their way. */
#ifndef HD_OPS_CUDA_ATTENTION_ATTENTION_LOAD_INTERNAL_CUH
#define HD_OPS_CUDA_ATTENTION_ATTENTION_LOAD_INTERNAL_CUH

#include "ops/cuda_attention/attention_parts_internal.cuh"
#include "ops/cuda_attention/attention_unpack_internal.cuh"

/* ---- which tile is next ---- */

/* A place in the sequence of the block's tiles. */
struct tile_cursor {
    item_walk walk;
    part_item item;
    row_keys keys;
    int32_t items, joins; /* opened; quads before the item */
    int32_t first, end;   /* keys of the tile; end of the part */
};

static __device__ void open_item(tile_cursor *c, const hd_attention_args &a,
                                 const part_plan &plan) {
    do { /* a part without keys has no tile */
        c->joins += c->item.row >= 0 && c->keys.n_parts > 1;
        c->item = next_item(&c->walk, a, plan);
        c->items++;
        if (c->item.row < 0) return;
        c->keys = keys_of(a, c->item.row);
        c->first = c->item.part * c->keys.part;
        c->end = min(c->first + c->keys.part, c->keys.n);
    } while (c->first >= c->end);
}

static __device__ tile_cursor first_tile(const hd_attention_args &a, const part_plan &plan) {
    tile_cursor c = {};
    c.walk = first_item(a, plan);
    c.item.row = -1;
    open_item(&c, a, plan);
    return c;
}

static __device__ void next_tile(tile_cursor *c, const hd_attention_args &a,
                                 const part_plan &plan) {
    if (c->item.row < 0) return;
    c->first += TILE;
    if (c->first >= c->end) open_item(c, a, plan);
}

/* While the sums of a quad are joined they lie where tiles do. */
static __device__ __forceinline__ void await_joins(int32_t *joined, int32_t joins) {
    for (; *joined < joins; ++*joined) {
        cluster_sync();
        cluster_arrive_read();
        cluster_wait_read();
    }
}

constexpr int WARP_KEYS = TILE / 4; /* of a warp that loads */

/* In place of a key that is not there. */
static __device__ const uint4 no_key[9 * BOX_BYTES / BOX_ROWS / sizeof(uint4)] = {};

/* The key that lanes i and 16 + i look up for their warp. */
template <int BOXES, bool PACKED>
static __device__ __forceinline__ const uint8_t *find_key(const tile_cursor &c,
                                                          const hd_attention_args &a) {
    const int warp = threadIdx.x % WARPGROUP / WARP;
    const int32_t i = c.first + warp * WARP_KEYS + (int32_t)threadIdx.x % WARP_KEYS;
    const bool live = c.item.row >= 0 && i < c.end;
    const uint8_t *key = live ? key_at<BOXES, PACKED>(a, c.keys, i) : nullptr;
    return key ? key : reinterpret_cast<const uint8_t *>(no_key);
}

static __device__ __forceinline__ bool is_key(const uint8_t *found) {
    return found != reinterpret_cast<const uint8_t *>(no_key);
}

/* The warp's keys into the L2 cache, half a key per lane. */
template <int BYTES>
static __device__ __forceinline__ void prefetch_keys(const uint8_t *found) {
    constexpr int LINE = 128, LINES = (BYTES + LINE - 1) / LINE, EACH = (LINES + 1) / 2;
    const int first = (int)threadIdx.x % WARP / WARP_KEYS * EACH;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int at = min((first + i) * LINE, BYTES - 4); /* the last may begin a line more */
        asm volatile("prefetch.global.L2 [%0];" ::"l"(found + at));
    }
}

/* The warp's keys of a tile on their way into its boxes: eight lanes copy a box's row. */
template <int BOXES>
static __device__ __forceinline__ void copy_keys(uint32_t tile, const uint8_t *found) {
    constexpr int AT_ONCE = WARP / 8;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x % WARPGROUP / WARP;
#pragma unroll
    for (int first = 0; first < WARP_KEYS; first += AT_ONCE) {
        const int key = first + lane / 8;
        const uint64_t bits = __shfl_sync(ALL_LANES, reinterpret_cast<uint64_t>(found), key);
        const uint8_t *from = reinterpret_cast<const uint8_t *>(bits) + lane % 8 * 16;
        const uint32_t to = tile + box_at(warp * WARP_KEYS + key, lane % 8);
#pragma unroll
        for (int box = 0; box < BOXES; box++) {
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                             to + (uint32_t)(box * BOX_BYTES)),
                         "l"(from + box * 128)
                         : "memory");
        }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Copies of all but the LEFT newest tiles have arrived: the older of two is announced. */
template <int LEFT>
static __device__ __forceinline__ void announce(const block_memory &m, uint32_t tile) {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
    fence_proxy_async();
    __syncwarp();
    if (threadIdx.x % WARP == 0) mbarrier_arrive(m.full + 8 * (tile & 1));
}

/* An item's queries into the L2 cache, before the block needs them. */
template <int BOXES>
static __device__ __forceinline__ void prefetch_queries(const part_item &item,
                                                        const hd_attention_args &a) {
    constexpr int LINE = 128, FLOATS = LINE / (int)sizeof(float);
    const int32_t k_dim = BOXES * BOX_COLS, heads = min(HEADS, a.heads - item.first_head);
    const cuda_act *q = acts(a.q) + ((int64_t)item.row * a.heads + item.first_head) * k_dim;
    for (int32_t i = threadIdx.x % WARPGROUP; i < heads * k_dim / FLOATS; i += WARPGROUP) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(q + i * FLOATS));
    }
}

/* A tile is announced once it has arrived; before that the next is asked for, if its place is
 * free by then. */
template <int BOXES>
static __device__ void load_tiles(const hd_attention_args &a, const block_memory &m,
                                  const part_plan &plan) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x % WARPGROUP / WARP;
    tile_cursor c = first_tile(a, plan);
    const uint8_t *found = find_key<BOXES, false>(c, a);
    bool live = c.item.row >= 0;
    uint32_t tile = 0;
    int32_t joined = 0;
    for (; live; tile++) {
        const uint32_t stage = tile & 1, empty = m.empty + 8 * stage;
        const uint32_t parity = (tile >> 1 & 1) ^ 1;
        const int32_t items = c.items, joins = c.joins;
        next_tile(&c, a, plan);
        if (c.items != items && c.item.row >= 0) prefetch_queries<BOXES>(c.item, a);
        const uint8_t *next = find_key<BOXES, false>(c, a);
        const unsigned keys = __ballot_sync(ALL_LANES, is_key(found));
        const bool early = tile > 0 && (joined < joins ||
                                        !__all_sync(ALL_LANES, mbarrier_test(empty, parity)));
        if (early) announce<0>(m, tile - 1);
        await_joins(&joined, joins);
        mbarrier_wait(empty, parity);
        if (lane == 0) m.live[stage * 4 + warp] = (uint16_t)keys;
        copy_keys<BOXES>(m.keys + stage * TILE_BYTES<BOXES>, found);
        if (tile > 0 && !early) announce<1>(m, tile - 1);
        prefetch_keys<128 * BOXES>(next); /* it waits for where they are */
        found = next;
        live = c.item.row >= 0;
    }
    if (tile > 0) announce<0>(m, tile - 1);
    await_joins(&joined, c.joins);
}

/* ---- keys of E4M3 ---- */

/* As load_tiles(). */
template <int BOXES>
static __device__ void load_packed_tiles(const hd_attention_args &a, const block_memory &m,
                                         const part_plan &plan) {
    constexpr int AT_ONCE = WARP / 8, TURNS = WARP_KEYS / AT_ONCE;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x % WARPGROUP / WARP;
    tile_cursor c = first_tile(a, plan);
    const uint8_t *found = find_key<BOXES, true>(c, a);
    bool live = c.item.row >= 0;
    int32_t joined = 0;
    packed_keys<BOXES> x[2];
    load_packed(&x[0], found, 0);
    for (uint32_t tile = 0; live; tile++) {
        const uint32_t stage = tile & 1;
        const int32_t items = c.items, joins = c.joins;
        const unsigned keys = __ballot_sync(ALL_LANES, is_key(found));
        next_tile(&c, a, plan);
        if (c.items != items && c.item.row >= 0) prefetch_queries<BOXES>(c.item, a);
        const uint8_t *next = find_key<BOXES, true>(c, a);
        await_joins(&joined, joins);
        mbarrier_wait(m.empty + 8 * stage, (tile >> 1 & 1) ^ 1);
        if (lane == 0) m.live[stage * 4 + warp] = (uint16_t)keys;
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++) {
            const int row = warp * WARP_KEYS + turn * AT_ONCE + lane / 8;
            const bool last = turn == TURNS - 1;
            load_packed(&x[(turn + 1) % 2], last ? next : found,
                        last ? 0 : (turn + 1) * AT_ONCE);
            put_packed(m.keys + stage * TILE_BYTES<BOXES> + box_at(row, lane % 8), x[turn % 2]);
            if (turn == 0) prefetch_keys<PACKED_BYTES<BOXES>>(next);
        }
        fence_proxy_async();
        __syncwarp();
        if (lane == 0) mbarrier_arrive(m.full + 8 * stage);
        found = next;
        live = c.item.row >= 0;
    }
    await_joins(&joined, c.joins);
}

#endif
