/* attention_sm90.cu - attention at the real models' widths, from bfloat16 on the tensor cores of sm_90a:
 * MLA's 576 columns with 512 of them as values, and V4's 512.
 *
 * A block takes 64 heads of a row and a part of its keys, in tiles of 64. Three warpgroups: one
 * converts keys into shared memory, one makes scores and weights and adds the left half of the
 * values, one the right half. Blocks stay and walk through (row, heads, part) in order.
 *
 * How long the parts of a row are follows from the number of its own keys; each has a maximum, a
 * total and a sum of its own, and a second kernel joins them in order. So neither the row's
 * neighbors nor the number of blocks change a bit. Scores are taken times log2(e). */
#include "ops/cuda/attention_internal.cuh"
#include "ops/cuda/wgmma_internal.cuh"

constexpr int HEADS = BOX_ROWS, TILE = BOX_ROWS, V_DIM = 512, V_BOXES = V_DIM / BOX_COLS;
constexpr int THREADS = 3 * WARPGROUP, MATH_THREADS = 2 * WARPGROUP, HALF_COLS = V_DIM / 2;
constexpr int PART_STRIDE = V_DIM + 4; /* floats of a part: its sum, maximum, total, any key */
constexpr int MAX_PARTS = 64, SHORT_PART = 256, LONG_PART = 512, SHORT_ROW = 1024;
constexpr float LOG2_E = 1.44269504f;

enum { Q_BARRIER = 1, P_READY, P_FREE }; /* named barriers of the two that compute */

/* ---- a row's keys, in the order of the contract ---- */

struct row_keys {
    const int32_t *selected_keys; /* NULL: all entries; else -1 behind the last */
    int32_t seq, first_recent, n_recent, n;
    int32_t part, n_parts; /* keys of a part */
};

static __host__ __device__ __forceinline__ int32_t part_of(int32_t n) {
    const int32_t each = (n + MAX_PARTS - 1) / MAX_PARTS;
    return n <= SHORT_ROW     ? SHORT_PART
           : each < LONG_PART ? LONG_PART
                              : (each + TILE - 1) / TILE * TILE;
}

static __device__ row_keys keys_of(const hd_attention_args &a, int32_t row) {
    row_keys k = {};
    const int32_t pos = a.pos[row], visible = visible_entries(pos, a.ratio);
    k.seq = a.seq[row];
    if (a.window) {
        k.first_recent = max(0, pos + 1 - a.window);
        k.n_recent = pos + 1 - k.first_recent;
    }
    if (a.selected) k.selected_keys = a.selected + (int64_t)row * a.n_selected;
    k.n = k.n_recent + (a.selected ? min(visible, a.n_selected) : visible);
    k.part = part_of(k.n);
    k.n_parts = max((k.n + k.part - 1) / k.part, 1);
    return k;
}

/* Where key i is; NULL: there is none. */
static __device__ __forceinline__ const cuda_act *key_at(const hd_attention_args &a,
                                                         const row_keys &k, int32_t i) {
    if (i < k.n_recent) return paged_entry(a.recent, k.seq, k.first_recent + i);
    const int32_t e = k.selected_keys ? k.selected_keys[i - k.n_recent] : i - k.n_recent;
    return e < 0 ? nullptr : paged_entry(a.entries, k.seq, e);
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
    uint32_t sources;     /* [2, TILE] where keys come from */
    float *keep;          /* [HEADS] */
};

template <int BOXES>
constexpr uint32_t TILE_BYTES = BOXES *BOX_BYTES;

template <int BOXES>
constexpr size_t SHARED_BYTES = 3 * TILE_BYTES<BOXES> + BOX_BYTES + HEADS * sizeof(float) + 64 +
                                2 * TILE * sizeof(void *);

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
    m.sources = m.full + 64;
    return m;
}

static __device__ __forceinline__ void put_four(uint32_t at, float4 x) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(at), "r"(bf16_pair(x.x, x.y)),
                 "r"(bf16_pair(x.z, x.w))
                 : "memory");
}

/* ---- the warpgroup that loads keys ---- */

/* A place in the sequence of the block's tiles. */
struct tile_cursor {
    row_walk walk;
    part_item item;
    row_keys keys;
    int32_t index, first, end; /* of the part; keys of the tile; end of the part */
};

static __device__ void open_item(tile_cursor *c, const hd_attention_args &a, int32_t groups) {
    do { /* a part without keys has no tile */
        c->item = find_item(&c->walk, a, groups, c->index);
        if (c->item.row < 0) return;
        c->keys = keys_of(a, c->item.row);
        c->first = c->item.part * c->keys.part;
        c->end = min(c->first + c->keys.part, c->keys.n);
        c->index += (int32_t)gridDim.x;
    } while (c->first >= c->end);
}

static __device__ tile_cursor first_tile(const hd_attention_args &a, int32_t groups) {
    tile_cursor c = {};
    c.index = (int32_t)blockIdx.x;
    count_parts(&c.walk, a, groups);
    open_item(&c, a, groups);
    return c;
}

static __device__ void next_tile(tile_cursor *c, const hd_attention_args &a, int32_t groups) {
    if (c->item.row < 0) return;
    c->first += TILE;
    if (c->first >= c->end) open_item(c, a, groups);
}

constexpr int WARP_KEYS = TILE / 4; /* of a warp that loads */

/* In place of a key that is not there. */
static __device__ const float4 no_key[9 * BOX_COLS / 4] = {};

/* The key that lanes i and 16 + i look up for their warp. */
static __device__ __forceinline__ const float4 *find_key(const tile_cursor &c,
                                                         const hd_attention_args &a) {
    const int warp = threadIdx.x % WARPGROUP / WARP;
    const int32_t i = c.first + warp * WARP_KEYS + (int32_t)threadIdx.x % WARP_KEYS;
    const bool live = c.item.row >= 0 && i < c.end;
    const cuda_act *key = live ? key_at(a, c.keys, i) : nullptr;
    return key ? reinterpret_cast<const float4 *>(key) : no_key;
}

/* The warp's keys into the L2 cache, half a key per lane. */
template <int BOXES>
static __device__ __forceinline__ void prefetch_keys(const float4 *found) {
    constexpr int LINE = 128, BYTES = BOXES * BOX_COLS * (int)sizeof(cuda_act);
    const uint8_t *half = reinterpret_cast<const uint8_t *>(found) +
                          (threadIdx.x % WARP / WARP_KEYS) * (BYTES / 2);
#pragma unroll
    for (int at = 0; at < BYTES / 2; at += LINE) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(half + at));
    }
}

/* Two keys of a warp behind each other, on their way through registers: EACH units of four columns
 * of a lane, every 32nd. Only of the middle one may lanes have another key than their neighbors. */
template <int BOXES>
struct key_pair {
    static constexpr int UNITS = BOXES * BOX_COLS / 4, EACH = 2 * UNITS / WARP;
    float4 x[EACH];

    /* Whether unit i of the lane is of the second key. */
    static __device__ __forceinline__ bool is_second(int i) {
        return (i + 1) * WARP <= UNITS ? false
               : i * WARP >= UNITS     ? true
                                       : i * WARP + (int)threadIdx.x % WARP >= UNITS;
    }
};

/* Where the keys of two tiles are, by the warp's own: in shared memory, as registers are few. */
static __device__ __forceinline__ uint32_t sources_of(const block_memory &m, uint32_t tile) {
    const uint32_t warp = threadIdx.x % WARPGROUP / WARP;
    return m.sources + ((tile & 1) * TILE + warp * WARP_KEYS) * (uint32_t)sizeof(void *);
}

static __device__ __forceinline__ void put_sources(uint32_t sources, const float4 *found) {
    const uint32_t lane = threadIdx.x % WARP;
    __syncwarp(); /* those before are read */
    if (lane < WARP_KEYS) {
        asm volatile("st.shared.b64 [%0], %1;" ::"r"(sources + 8 * lane), "l"(found)
                     : "memory");
    }
    __syncwarp();
}

/* Where unit 0 of a lane is in memory, of a pair; of the second key as if it lay behind the first. */
struct pair_source {
    const float4 *first, *second;
};

template <int BOXES>
static __device__ __forceinline__ pair_source pair_at(uint32_t sources, int pair) {
    pair_source p;
    asm volatile("ld.shared.v2.b64 {%0, %1}, [%2];"
                 : "=l"(p.first), "=l"(p.second)
                 : "r"(sources + 16 * pair));
    p.first += threadIdx.x % WARP;
    p.second += (int)threadIdx.x % WARP - key_pair<BOXES>::UNITS;
    return p;
}

template <int BOXES>
static __device__ __forceinline__ void load_unit(key_pair<BOXES> *to, const pair_source &from,
                                                 int i) {
    to->x[i] = load_four((key_pair<BOXES>::is_second(i) ? from.second : from.first) + i * WARP);
}

/* Where unit 0 of a lane goes in shared memory, likewise. */
struct pair_target {
    uint32_t first, second;
};

template <int BOXES>
static __device__ __forceinline__ pair_target pair_in(uint32_t tile, int pair) {
    const int lane = threadIdx.x % WARP;
    const int row = (int)threadIdx.x % WARPGROUP / WARP * WARP_KEYS + 2 * pair;
    const uint32_t own = tile + (uint32_t)(lane / 16 * BOX_BYTES + lane % 2 * 8);
    return {own + box_at(row, lane % 16 / 2),
            own + box_at(row + 1, lane % 16 / 2) - BOXES * BOX_BYTES};
}

template <int BOXES>
static __device__ __forceinline__ void store_unit(const key_pair<BOXES> &from,
                                                  const pair_target &to, int i) {
    const uint32_t at = key_pair<BOXES>::is_second(i) ? to.second : to.first;
    put_four(at + (uint32_t)(2 * i * BOX_BYTES), from.x[i]);
}

/* Two pairs are on their way at any time, across the borders of tiles: a register goes to shared
 * memory and is loaded again at once. */
template <int BOXES>
static __device__ void load_tiles(const hd_attention_args &a, const block_memory &m,
                                  int32_t groups) {
    constexpr int PAIRS = WARP_KEYS / 2, EACH = key_pair<BOXES>::EACH, AT_ONCE = 3;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x % WARPGROUP / WARP;
    tile_cursor c = first_tile(a, groups);
    const float4 *found = find_key(c, a);
    bool live = c.item.row >= 0;
    unsigned now = __ballot_sync(ALL_LANES, found != no_key);
    put_sources(sources_of(m, 0), found);
    next_tile(&c, a, groups);
    found = find_key(c, a);
    bool live_next = c.item.row >= 0;
    unsigned next = __ballot_sync(ALL_LANES, found != no_key);
    put_sources(sources_of(m, 1), found);
    key_pair<BOXES> pair[2];
#pragma unroll
    for (int p = 0; p < 2; p++) {
        const pair_source from = pair_at<BOXES>(sources_of(m, 0), p);
#pragma unroll
        for (int i = 0; i < EACH; i++) load_unit(&pair[p], from, i);
    }
    for (uint32_t tile = 0; live; tile++) {
        const uint32_t stage = tile & 1, to = m.keys + stage * TILE_BYTES<BOXES>;
        next_tile(&c, a, groups);
        found = find_key(c, a);
        mbarrier_wait(m.empty + 8 * stage, (tile >> 1 & 1) ^ 1);
        if (lane == 0) m.live[stage * 4 + warp] = (uint16_t)now;
#pragma unroll
        for (int p = 0; p < PAIRS; p++) {
            const pair_target target = pair_in<BOXES>(to, p);
            const pair_source from =
                pair_at<BOXES>(sources_of(m, tile + (p + 2) / PAIRS), (p + 2) % PAIRS);
#pragma unroll
            for (int first = 0; first < EACH; first += AT_ONCE) {
#pragma unroll
                for (int i = first; i < first + AT_ONCE && i < EACH; i++) {
                    store_unit(pair[p % 2], target, i);
                }
#pragma unroll
                for (int i = first; i < first + AT_ONCE && i < EACH; i++) {
                    load_unit(&pair[p % 2], from, i);
                }
            }
        }
        fence_proxy_async();
        __syncwarp();
        if (lane == 0) mbarrier_arrive(m.full + 8 * stage);
        prefetch_keys<BOXES>(found);
        put_sources(sources_of(m, tile), found);
        now = next;
        next = __ballot_sync(ALL_LANES, found != no_key);
        live = live_next;
        live_next = c.item.row >= 0;
    }
}

/* ---- the warpgroups that compute ---- */

/* The item's queries; both warpgroups' work. */
template <int BOXES>
static __device__ void load_queries(const hd_attention_args &a, const block_memory &m,
                                    const part_item &item) {
    constexpr int UNITS = BOXES * BOX_COLS / 4, EACH = 12;
    static_assert(HEADS * UNITS % (MATH_THREADS * 4) == 0, "whole batches");
    const int32_t k_dim = BOXES * BOX_COLS;
    const cuda_act *q = acts(a.q) + ((int64_t)item.row * a.heads + item.first_head) * k_dim;
    for (int first = (int)threadIdx.x; first < HEADS * UNITS; first += EACH * MATH_THREADS) {
        float4 x[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int unit = first + i * MATH_THREADS, head = unit / UNITS;
            const bool live = unit < HEADS * UNITS && item.first_head + head < a.heads;
            const float4 *at = reinterpret_cast<const float4 *>(q + head * k_dim);
            x[i] = live ? load_four(at + unit % UNITS) : float4{};
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int unit = first + i * MATH_THREADS;
            if (unit >= HEADS * UNITS) continue;
            const int head = unit / UNITS, four = unit % UNITS; /* two of them are a chunk */
            put_four(m.q + (uint32_t)(four / 16 * BOX_BYTES + four % 2 * 8) +
                         box_at(head, four % 16 / 2),
                     x[i]);
        }
    }
    fence_proxy_async();
}

/* Where parts lie: [rows, heads, n_parts, PART_STRIDE]. */
struct part_table {
    float *data;
    int32_t n_parts; /* the most a row can have */
};

static __device__ __forceinline__ float *part_at(const part_table &t,
                                                 const hd_attention_args &a, int32_t row,
                                                 int32_t head, int32_t part) {
    return t.data + (((int64_t)row * a.heads + head) * t.n_parts + part) * PART_STRIDE;
}

static __device__ __forceinline__ float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Of one head, of the part so far: the maximum, this lane's share of the total. */
struct running {
    float max, total;
};

/* A thread has two heads: its first, and the one eight further. */
static __device__ __forceinline__ int head_of(int second) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x % WARPGROUP / WARP;
    return warp * 16 + lane / 4 + 8 * second;
}

static __device__ __forceinline__ float over_quad(float x, bool is_max) {
    for (int step = 1; step < 4; step *= 2) {
        const float other = __shfl_xor_sync(ALL_LANES, x, step);
        x = is_max ? fmaxf(x, other) : x + other;
    }
    return x;
}

/* Scores into weights of the part so far, and what there was is to be multiplied by. */
static __device__ __forceinline__ void weigh(float (&s)[32], running *run, float *keep,
                                             float scale, uint64_t live) {
    const int shift = 2 * (int)(threadIdx.x % 4);
    const uint32_t low = (uint32_t)live >> shift, high = (uint32_t)(live >> 32) >> shift;
    float top[2] = {-CUDART_INF_F, -CUDART_INF_F};
#pragma unroll
    for (int i = 0; i < 32; i++) {
        const uint32_t half = i < 16 ? low : high;
        s[i] = half >> (i / 4 * 8 % 32 + i % 2) & 1 ? s[i] * scale : -CUDART_INF_F;
        top[i / 2 % 2] = fmaxf(top[i / 2 % 2], s[i]);
    }
    float base[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float max = fmaxf(run[h].max, over_quad(top[h], true));
        base[h] = max == -CUDART_INF_F ? 0.0f : max; /* nothing but -inf so far */
        keep[h] = exp2_of(run[h].max - base[h]);
        run[h] = {max, run[h].total * keep[h]};
    }
#pragma unroll
    for (int i = 0; i < 32; i++) {
        s[i] = exp2_of(s[i] - base[i / 2 % 2]);
        run[i / 2 % 2].total += s[i];
    }
}

/* Weights as the left operand of the product with values, here and in shared memory. */
static __device__ __forceinline__ void put_weights(uint32_t (&p)[16], const float (&s)[32],
                                                   uint32_t box) {
#pragma unroll
    for (int i = 0; i < 16; i++) {
        p[i] = bf16_pair(s[2 * i], s[2 * i + 1]);
        const uint32_t at =
            box + box_at(head_of(i % 2), i / 2) + (uint32_t)(threadIdx.x % 4 * 4);
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(p[i]) : "memory");
    }
}

static __device__ __forceinline__ void multiply_all(float (&o)[128], const float *keep) {
    if (!__any_sync(ALL_LANES, keep[0] != 1.0f || keep[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < 128; i++) o[i] *= keep[i / 2 % 2];
}

/* Half of the values: to the output, or, of one part of several, to scratch. */
static __device__ __forceinline__ void put_values(const float (&o)[128], const float *factor,
                                                  const hd_attention_args &a,
                                                  const part_table &t, const part_item &item,
                                                  bool whole, int first_col) {
    const int col = first_col + 2 * (int)(threadIdx.x % 4);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int32_t head = item.first_head + head_of(h);
        if (head >= a.heads) continue;
        float *to = whole ? acts(a.out) + ((int64_t)item.row * a.heads + head) * V_DIM
                          : part_at(t, a, item.row, head, item.part);
#pragma unroll
        for (int i = 2 * h; i < 128; i += 4) {
            *reinterpret_cast<float2 *>(to + col + i / 4 * 8) =
                make_float2(o[i] * factor[h], o[i + 1] * factor[h]);
        }
    }
}

/* What a sum is multiplied by for the output. */
static __device__ __forceinline__ float factor_of(const hd_attention_args &a, int32_t head,
                                                  running own, bool any) {
    const float sink = a.sink && head < a.heads ? a.sink[head] * LOG2_E : -CUDART_INF_F;
    const float top = fmaxf(own.max, sink), base = top == -CUDART_INF_F ? 0.0f : top;
    const float keep = exp2_of(own.max - base);
    return any ? keep / fmaf(own.total, keep, exp2_of(sink - base)) : 0.0f;
}

/* Tiles of the two that compute, counted from the block's first. */
struct tile_count {
    uint32_t n;
    __device__ uint32_t stage() const {
        return n & 1;
    }
    __device__ uint32_t parity() const {
        return n >> 1 & 1;
    }
};

static __device__ __forceinline__ void release(const block_memory &m, tile_count *tile) {
    if (threadIdx.x % WARP == 0) mbarrier_arrive(m.empty + 8 * tile->stage());
    tile->n++;
}

/* The first warpgroup's share of a part of n tiles. */
template <int BOXES>
static __device__ __forceinline__ void compute_left(const hd_attention_args &a,
                                                    const block_memory &m, const part_table &t,
                                                    const part_item &item, bool whole,
                                                    int32_t n_tiles, tile_count *tile) {
    const uint64_t q = box_descriptor(m.q);
    const float scale = a.scale * LOG2_E;
    running run[2] = {
        {-CUDART_INF_F, 0.0f},
        {-CUDART_INF_F, 0.0f}
    };
    float o[128] = {}, keep[2];
    bool any = false;
    for (int32_t i = 0; i < n_tiles; i++) {
        const uint32_t keys = m.keys + tile->stage() * TILE_BYTES<BOXES>;
        const uint64_t k = box_descriptor(keys), v = transposed_descriptor(keys);
        float s[32];
        uint32_t p[16];
        mbarrier_wait(m.full + 8 * tile->stage(), tile->parity());
        const uint64_t live = *reinterpret_cast<const uint64_t *>(m.live + 4 * tile->stage());
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < BOXES * 4; step++) {
            const uint64_t at = step / 4 * NEXT_BOX + step % 4 * 2;
            wgmma_m64n64k16(s, q + at, k + at, step > 0);
        }
        wgmma_commit_group();
        wgmma_wait_group<0>();
        weigh(s, run, keep, scale, live);
        any = any || live != 0;
        if (i > 0) bar_sync(P_FREE, MATH_THREADS);
        put_weights(p, s, m.weights);
        if (threadIdx.x % 4 == 0) {
            m.keep[head_of(0)] = keep[0];
            m.keep[head_of(1)] = keep[1];
        }
        fence_proxy_async();
        bar_arrive(P_READY, MATH_THREADS);
        multiply_all(o, keep);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; step++) {
            wgmma_m64n256k16_transposed(o, p + 4 * step, v + 128 * step);
        }
        wgmma_commit_group();
        wgmma_wait_group<0>();
        release(m, tile);
    }
    if (n_tiles > 0) bar_sync(P_FREE, MATH_THREADS);
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        run[h].total = over_quad(run[h].total, false);
        const int32_t head = item.first_head + head_of(h);
        factor[h] = whole ? factor_of(a, head, run[h], any) : 1.0f;
        if (threadIdx.x % 4 != 0) continue;
        m.keep[head_of(h)] = factor[h];
        if (whole || head >= a.heads) continue;
        float *part = part_at(t, a, item.row, head, item.part) + V_DIM;
        *reinterpret_cast<float4 *>(part) =
            make_float4(run[h].max, run[h].total, any ? 1.0f : 0.0f, 0.0f);
    }
    bar_sync(Q_BARRIER, MATH_THREADS);
    put_values(o, factor, a, t, item, whole, 0);
}

/* The second warpgroup's. */
template <int BOXES>
static __device__ __forceinline__ void compute_right(const hd_attention_args &a,
                                                     const block_memory &m, const part_table &t,
                                                     const part_item &item, bool whole,
                                                     int32_t n_tiles, tile_count *tile) {
    const uint64_t p = box_descriptor(m.weights);
    float o[128] = {}, keep[2];
    for (int32_t i = 0; i < n_tiles; i++) {
        const uint32_t keys = m.keys + tile->stage() * TILE_BYTES<BOXES>;
        const uint64_t v = transposed_descriptor(keys + V_BOXES / 2 * BOX_BYTES);
        mbarrier_wait(m.full + 8 * tile->stage(), tile->parity());
        bar_sync(P_READY, MATH_THREADS);
        keep[0] = m.keep[head_of(0)];
        keep[1] = m.keep[head_of(1)];
        multiply_all(o, keep);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; step++) {
            wgmma_m64n256k16_transposed(o, p + 2 * step, v + 128 * step);
        }
        wgmma_commit_group();
        wgmma_wait_group<0>();
        bar_arrive(P_FREE, MATH_THREADS);
        release(m, tile);
    }
    bar_sync(Q_BARRIER, MATH_THREADS);
    keep[0] = m.keep[head_of(0)];
    keep[1] = m.keep[head_of(1)];
    put_values(o, keep, a, t, item, whole, HALF_COLS);
}

/* A warpgroup's half of the values of all of the block's items. */
template <int BOXES, bool LEFT>
static __device__ __forceinline__ void compute_items(const hd_attention_args &a,
                                                     const block_memory &m, const part_table &t,
                                                     int32_t groups) {
    row_walk walk = {};
    tile_count tile = {};
    int32_t row = -1, head = -1;
    count_parts(&walk, a, groups);
    for (int32_t index = (int32_t)blockIdx.x;; index += (int32_t)gridDim.x) {
        const part_item item = find_item(&walk, a, groups, index);
        if (item.row < 0) break;
        const row_keys k = keys_of(a, item.row);
        const int32_t begin = item.part * k.part, end = min(begin + k.part, k.n);
        const int32_t n_tiles = end > begin ? (end - begin + TILE - 1) / TILE : 0;
        bar_sync(Q_BARRIER, MATH_THREADS); /* nobody reads what changes now */
        if (item.row != row || item.first_head != head) load_queries<BOXES>(a, m, item);
        row = item.row;
        head = item.first_head;
        bar_sync(Q_BARRIER, MATH_THREADS);
        if (LEFT) {
            compute_left<BOXES>(a, m, t, item, k.n_parts == 1, n_tiles, &tile);
        } else {
            compute_right<BOXES>(a, m, t, item, k.n_parts == 1, n_tiles, &tile);
        }
    }
}

template <int BOXES>
static __global__ void __launch_bounds__(THREADS, 1)
    attention_tiles(const hd_attention_args a, const part_table t, const int32_t groups) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const block_memory m = carve<BOXES>(shared);
    const int group = threadIdx.x / WARPGROUP;
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < 2; i++) {
            mbarrier_init(m.full + 8 * i, WARPGROUP / WARP);
            mbarrier_init(m.empty + 8 * i, MATH_THREADS / WARP);
        }
    }
    __syncthreads();
    if (group == 0) {
        setmaxnreg_inc<208>();
        compute_items<BOXES, true>(a, m, t, groups);
    } else if (group == 1) {
        setmaxnreg_dec<160>();
        compute_items<BOXES, false>(a, m, t, groups);
    } else {
        setmaxnreg_dec<136>();
        load_tiles<BOXES>(a, m, groups);
    }
}

/* ---- joining the parts of a row ---- */

/* A warp per head. */
static __global__ void __launch_bounds__(BLOCK) join_parts(hd_attention_args a, part_table t) {
    constexpr int EACH = V_DIM / WARP / 4;
    const int32_t row = (int32_t)blockIdx.x, lane = (int32_t)threadIdx.x % WARP;
    const int32_t head = (int32_t)(blockIdx.y * (BLOCK / WARP) + threadIdx.x / WARP);
    const int32_t n = keys_of(a, row).n_parts;
    if (n == 1 || head >= a.heads) return;
    running all = {a.sink ? a.sink[head] * LOG2_E : -CUDART_INF_F, 1.0f};
    if (all.max == -CUDART_INF_F) all.total = 0.0f;
    bool any = false;
    float4 sum[EACH] = {};
#pragma unroll 4
    for (int32_t i = 0; i < n; i++) {
        const float4 *part = reinterpret_cast<const float4 *>(part_at(t, a, row, head, i));
        const float4 own = part[V_DIM / 4];
        const float top = fmaxf(all.max, own.x), base = top == -CUDART_INF_F ? 0.0f : top;
        const float keep = exp2_of(all.max - base), take = exp2_of(own.x - base);
        all = {top, fmaf(own.y, take, __fmul_rn(all.total, keep))};
        any = any || own.z != 0.0f;
#pragma unroll
        for (int c = 0; c < EACH; c++) {
            const float4 x = part[c * WARP + lane];
            sum[c].x = fmaf(x.x, take, __fmul_rn(sum[c].x, keep));
            sum[c].y = fmaf(x.y, take, __fmul_rn(sum[c].y, keep));
            sum[c].z = fmaf(x.z, take, __fmul_rn(sum[c].z, keep));
            sum[c].w = fmaf(x.w, take, __fmul_rn(sum[c].w, keep));
        }
    }
    const float factor = any ? 1.0f / all.total : 0.0f;
    float4 *out =
        reinterpret_cast<float4 *>(acts(a.out) + ((int64_t)row * a.heads + head) * V_DIM);
#pragma unroll
    for (int c = 0; c < EACH; c++) {
        out[c * WARP + lane] = make_float4(sum[c].x * factor, sum[c].y * factor,
                                           sum[c].z * factor, sum[c].w * factor);
    }
}

/* ---- launching ---- */

/* The host does not know positions: as many parts as a row of so many keys or fewer can have. */
static int32_t most_parts(const hd_attention_args *a) {
    int64_t keys = a->window;
    if (a->selected) {
        keys += a->n_selected;
    } else if (a->ratio) {
        keys += (int64_t)a->entries.table_stride * a->entries.page_entries;
    }
    const int64_t of_short =
        ((keys < SHORT_ROW ? keys : SHORT_ROW) + SHORT_PART - 1) / SHORT_PART;
    const int64_t of_long = keys > SHORT_ROW ? (keys + LONG_PART - 1) / LONG_PART : 1;
    const int64_t most = of_short > of_long ? of_short : of_long;
    return most < 1 ? 1 : most < MAX_PARTS ? (int32_t)most : MAX_PARTS;
}

static bool is_aligned(const hd_paged &p, int32_t width) {
    return (uintptr_t)p.rows.data % 16 == 0 && p.width % 4 == 0 && p.width >= width;
}

/* With fewer heads, three quarters of a tile of 64 would be empty. */
constexpr int SMALL_M_HEADS = 16;

bool attention_fits_sm90(const hd_attention_args *a) {
    return a->heads > SMALL_M_HEADS && (a->k_dim == 576 || a->k_dim == 512) &&
           a->v_dim == V_DIM && (uintptr_t)a->q.data % 16 == 0 &&
           (uintptr_t)a->out.data % 16 == 0 &&
           (!a->window || is_aligned(a->recent, a->k_dim)) &&
           (!a->ratio || is_aligned(a->entries, a->k_dim));
}

template <int BOXES>
static void launch(hd_stream *s, const hd_attention_args &a, const part_table &t) {
    const int32_t groups = (int32_t)blocks_for(a.heads, HEADS), workers = hd_stream_workers(s);
    const int64_t most = (int64_t)a.rows * groups * t.n_parts;
    const unsigned grid = most < workers ? (unsigned)most : (unsigned)workers;
    cudaStream_t queue = hd_cuda_stream(s);
    cudaFuncSetAttribute(attention_tiles<BOXES>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                         (int)SHARED_BYTES<BOXES>);
    attention_tiles<BOXES><<<grid, THREADS, SHARED_BYTES<BOXES>, queue>>>(a, t, groups);
    if (t.n_parts == 1) return;
    const dim3 joining((unsigned)a.rows, blocks_for(a.heads, BLOCK / WARP));
    join_parts<<<joining, BLOCK, 0, queue>>>(a, t);
}

/* As many rows at once as have room for their parts. */
void attention_sm90(hd_stream *s, const hd_attention_args *a) {
    const part_table t = {static_cast<float *>(hd_stream_scratch(s, 0, 0)), most_parts(a)};
    const size_t room = (size_t)hd_stream_workers(s) * hd_stream_scratch_bytes(s);
    const size_t each = (size_t)a->heads * (size_t)t.n_parts * PART_STRIDE * sizeof(float);
    const int64_t fit = t.n_parts == 1 ? a->rows : (int64_t)(room / each);
    const int32_t at_once = fit < a->rows ? (int32_t)fit : a->rows;
    if (at_once == 0 && a->rows > 0) {
        hd_stream_fail(s, HD_EUNSUPPORTED,
                       "attention of so many heads has no room for a row's parts");
        return;
    }
    for (int32_t first = 0; first < a->rows; first += at_once) {
        hd_attention_args part = *a;
        part.rows = a->rows - first < at_once ? a->rows - first : at_once;
        part.q = hd_rows_at(a->q, (int64_t)first * a->heads * a->k_dim);
        part.out = hd_rows_at(a->out, (int64_t)first * a->heads * a->v_dim);
        part.seq += first;
        part.pos += first;
        if (a->selected) part.selected += (int64_t)first * a->n_selected;
        if (a->k_dim == 576) {
            launch<9>(s, part, t);
        } else {
            launch<8>(s, part, t);
        }
    }
    hd_cuda_check(s, "attention");
}
