/* attention_cuda.cu - softmax attention of rows over paged keys, on the tensor cores.
 *
 * A block takes HEADS heads of one row, or all heads of several rows that have the same keys but for their
 * number, and walks the keys in tiles of TILE, the next one on its way where there is room for two.
 * Queries, keys and weights are sums of two FP16 numbers (split_fp16_internal.cuh). Within a
 * tile the warps first share out (heads, columns) for the scores, then heads for the softmax,
 * then columns of the values.
 *
 * Keys fall into parts with a maximum, a total and a sum of their own, at most MAX_PARTS and as
 * many as the number of the row's own keys says. A row's parts are merged in order: by the
 * block that made them all, or, where blocks are too few to fill the GPU, by a second kernel.
 * The steps are the same, so neither the row's neighbors nor the way change a bit. */
#include <atomic>

#include "ops/cuda_attention/attention_sm90_internal.cuh"
#include "ops/cuda/packed_rows_internal.cuh"
#include "ops/cuda/split_fp16_mma_internal.cuh"

constexpr int WARPS = BLOCK / WARP;
constexpr int MIN_PART = 64, PART_STEP = 32;              /* keys of a part */
constexpr int MAX_PARTS = 64;                             /* of a row */
constexpr int WARP_COLS = 64, V_COLS = WARPS * WARP_COLS; /* of the sum: a warp's, a block's */
constexpr int N_TILES = WARP_COLS / 8;
constexpr int UNITS = 3; /* of eight columns of a key, of a lane at once: all of 576 */

/* How a block's work is shared out: products for one, whether keys are E4M3, heads, keys of a tile, tiles
 * in shared memory: 2, or 1, which is waited for. */
template <int PRODUCTS, bool IS_PACKED, int BLOCK_HEADS, int TILE_KEYS, int TILES_HELD>
struct attention_shape {
    static constexpr int P = PRODUCTS, HEADS = BLOCK_HEADS, TILE = TILE_KEYS;
    static constexpr int TILES = TILES_HELD;
    static constexpr bool PACKED = IS_PACKED;
    static constexpr int M_TILES = HEADS / 16, KEY_STEPS = TILE / 16;
    static constexpr int OWN_HEADS = HEADS / WARPS, OWN_KEYS = TILE / WARPS; /* of a warp */
    static constexpr int BLOCKS = HEADS == 16 && TILE == 32 ? 2 : 1;  /* of a multiprocessor */
    static constexpr int KEY_GROUPS = BLOCKS;                         /* of keys of a score */
    static constexpr int SCORE_GROUPS = WARPS / M_TILES / KEY_GROUPS; /* of its columns */
    static constexpr int SCORE_KEYS = TILE / KEY_GROUPS;              /* of a warp's scores */
};

/* Of Hopper's path, where few heads may take half a block, with the same bits; and what all GPUs have room
 * for. */
template <int P, bool PACKED>
using large_shape = attention_shape<P, PACKED, 32, 32, 2>;
template <int P, bool PACKED>
using narrow_shape = attention_shape<P, PACKED, 16, 32, 1>;
template <int P, bool PACKED>
using generic_shape = attention_shape<P, PACKED, 16, 16, 1>;

/* Whether code is wanted for a shape. */
template <typename S>
constexpr bool HAS_SHAPE = FOR_SM90 || std::is_same_v<S, generic_shape<S::P, S::PACKED>>;

/* ---- the keys of a row ---- */

/* In the order of the contract. */
struct key_list {
    const int32_t *selected_keys; /* NULL: all entries */
    int32_t seq, first_recent, n_recent, n;
    int32_t part; /* keys of a part */
};

static __host__ __device__ __forceinline__ int32_t part_of(int64_t n_keys) {
    const int64_t each = (n_keys + MAX_PARTS - 1) / MAX_PARTS;
    const int64_t whole = (each + PART_STEP - 1) / PART_STEP * PART_STEP;
    return whole < MIN_PART ? MIN_PART : (int32_t)whole;
}

/* How many of chosen[n] come before the first -1; a warp's work. */
static __device__ int32_t count_selected(const int32_t *selected_keys, int32_t n) {
    int32_t low = 0, width = n; /* the answer is in [low, low + width] */
    while (width > 0) {
        const int32_t step = (width + WARP - 1) / WARP;
        const int32_t at = low + ((int32_t)threadIdx.x % WARP + 1) * step - 1;
        const bool before = at < low + width && selected_keys[at] >= 0;
        const int32_t whole = __popc(__ballot_sync(ALL_LANES, before)) * step;
        low += whole;
        width = min(step - 1, width - whole);
    }
    return low;
}

static __device__ key_list list_keys(const hd_attention_args &a, int32_t row) {
    key_list k = {};
    const int32_t pos = a.pos[row];
    k.seq = a.seq[row];
    if (a.window) {
        k.first_recent = max(a.window_from ? a.window_from[k.seq] : 0, pos + 1 - a.window);
        k.n_recent = pos + 1 - k.first_recent;
    }
    int32_t n = visible_entries(pos, a.ratio);
    if (a.selected) {
        k.selected_keys = a.selected + (int64_t)row * a.n_selected;
        n = count_selected(k.selected_keys, a.n_selected);
    }
    k.n = k.n_recent + n;
    k.part = part_of(k.n);
    return k;
}

template <bool PACKED>
static __device__ __forceinline__ const uint8_t *key_at(const hd_attention_args &a,
                                                        const key_list &k, int32_t i) {
    const bool recent = i < k.n_recent;
    const hd_paged &pool = recent ? a.recent : a.entries;
    int32_t e = k.first_recent + i;
    if (!recent) e = k.selected_keys ? k.selected_keys[i - k.n_recent] : i - k.n_recent;
    const int64_t bytes = PACKED                      ? layout_of(pool).bytes
                          : pool.rows.type == HD_BF16 ? 2 * pool.width
                                                      : 4 * pool.width;
    return static_cast<const uint8_t *>(pool.rows.data) + paged_row(pool, k.seq, e) * bytes;
}

/* Both lists are alike. */
static __host__ __device__ __forceinline__ const hd_paged &list_of(const hd_attention_args &a) {
    return a.window ? a.recent : a.entries;
}

static __host__ __device__ __forceinline__ hd_dtype key_type(const hd_attention_args &a) {
    return list_of(a).rows.type;
}

/* ---- a block's shared memory ---- */

constexpr int SLOT = 256; /* bytes of a head: two partial scores of a tile, then its weights */

struct block_rows {
    half_rows q;                /* [HEADS, cols] */
    half_rows keys;             /* [TILES, TILE, cols] one is read, one is on its way */
    uint32_t slot;              /* [HEADS, SLOT] */
    int *key_shift;             /* [TILES, TILE] what undoes the keys' shifts */
    float *keep, *take, *total; /* [HEADS] */
    float *back;                /* [HEADS] what undoes the shifts of a tile's weights */
};

/* Which queries a block has: slot i is head `head` + i % width of row `row` + i / width. */
struct slot_list {
    int32_t row, n_rows, head, width;
};

static __device__ __forceinline__ int32_t row_of(const slot_list &l, int slot) {
    return l.row + slot / l.width;
}

static __device__ __forceinline__ int32_t head_of(const slot_list &l, int slot) {
    return l.head + slot % l.width;
}

static __device__ __forceinline__ bool has_query(const slot_list &l, int32_t heads, int slot) {
    return slot / l.width < l.n_rows && head_of(l, slot) < heads;
}

/* Tile i of TILES. */
template <typename S>
static __device__ __forceinline__ half_rows keys_at(const block_rows &b, int i) {
    return {b.keys.at + (uint32_t)(i * S::TILE * b.keys.cols * 4), b.keys.cols};
}

static __host__ __device__ __forceinline__ int32_t row_cols(const hd_attention_args &a) {
    return half_cols(a.k_dim > a.v_dim ? a.k_dim : a.v_dim);
}

template <typename S>
static size_t shared_bytes(const hd_attention_args *a) {
    return (size_t)(S::HEADS + S::TILES * S::TILE) * (size_t)row_cols(*a) * 4 +
           S::HEADS * SLOT + S::TILES * S::TILE * sizeof(int) + 4 * S::HEADS * sizeof(float);
}

template <typename S>
static __device__ block_rows carve(uint8_t *shared, const hd_attention_args &a) {
    const int32_t cols = row_cols(a);
    block_rows b;
    b.q = {shared_address(shared), cols};
    b.keys = {b.q.at + (uint32_t)(S::HEADS * cols * 4), cols};
    b.slot = b.keys.at + (uint32_t)(S::TILES * S::TILE * cols * 4);
    b.key_shift = reinterpret_cast<int *>(shared + (S::HEADS + S::TILES * S::TILE) * cols * 4 +
                                          S::HEADS * SLOT);
    b.keep = reinterpret_cast<float *>(b.key_shift + S::TILES * S::TILE);
    b.take = b.keep + S::HEADS;
    b.total = b.take + S::HEADS;
    b.back = b.total + S::HEADS;
    return b;
}

/* 16 bytes of a head's slot, exchanged so that eight heads do not meet in a bank. */
static __device__ __forceinline__ uint32_t slot_at(const block_rows &b, int head, int chunk) {
    return b.slot + (uint32_t)(head * SLOT + ((chunk ^ (head & 7)) << 4));
}

static __device__ __forceinline__ float get_float(uint32_t at) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at));
    return x;
}

static __device__ __forceinline__ void put_pair(uint32_t at, float2 v) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(v.x), "f"(v.y));
}

/* A narrow number. */
static __device__ __forceinline__ void put_bits(uint32_t at, uint16_t bits) {
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(at), "h"(bits));
}

/* ---- the three steps of a tile ---- */

/* A tile: its first key, of which part. */
struct tile_at {
    int32_t part, first;
};

/* The one after it, of every step-th part. */
template <typename S>
static __device__ __forceinline__ tile_at next_tile(tile_at t, const key_list &k,
                                                    int32_t step) {
    t.first += S::TILE;
    if (t.first >= min((t.part + 1) * k.part, k.n)) {
        t.part += step;
        t.first = t.part * k.part;
    }
    return t;
}

/* Live keys of a tile; none behind the last. */
template <typename S>
static __device__ __forceinline__ int live_keys(tile_at t, const key_list &k) {
    return min(S::TILE, min((t.part + 1) * k.part, k.n) - t.first);
}

/* Where the key is that this lane looks up for its warp; NULL: none. */
template <typename S>
static __device__ __forceinline__ const uint8_t *find_key(const hd_attention_args &a,
                                                          const key_list &k, tile_at t) {
    const int own = threadIdx.x / WARP * S::OWN_KEYS, lane = threadIdx.x % WARP;
    const bool live = lane < S::OWN_KEYS && own + lane < live_keys<S>(t, k);
    return live ? key_at<S::PACKED>(a, k, t.first + own + lane) : nullptr;
}

/* The warp's OWN_KEYS keys of a tile on their way. units: bfloat16 lies as FAST wants it. */
template <typename S>
static __device__ void load_keys(const half_rows &to, const hd_attention_args &a,
                                 const uint8_t *found, bool quads, bool units) {
    const int own = threadIdx.x / WARP * S::OWN_KEYS;
    const int32_t cols = max(a.k_dim, a.v_dim);
    for (int i = 0; i < S::OWN_KEYS; i++) {
        const uint8_t *key = from_lane(found, i);
        if constexpr (S::PACKED) {
            load_packed_row(to, own + i, key, layout_of(list_of(a)).bytes, a.q.data);
        } else if (key_type(a) == HD_BF16) {
            load_narrow_row(to, own + i, reinterpret_cast<const __nv_bfloat16 *>(key), cols,
                            units, a.q.data);
        } else {
            load_row(to, own + i, reinterpret_cast<const cuda_act *>(key), cols, quads,
                     a.q.data);
        }
    }
    commit_copies();
}

/* Scores of 16 heads against SCORE_KEYS keys of the tile over this warp's columns: [tiles of 8 keys][4]. */
template <typename S>
static __device__ __forceinline__ void score(float (*sum)[4], const block_rows &b,
                                             const half_rows &keys, int32_t k_dim) {
    const int warp = threadIdx.x / WARP, head = warp % S::M_TILES * 16;
    const int first_key = warp / S::M_TILES % S::KEY_GROUPS * S::SCORE_KEYS;
    const int steps = half_cols(k_dim) / 16,
              each = (steps + S::SCORE_GROUPS - 1) / S::SCORE_GROUPS;
    const int begin = warp / S::M_TILES / S::KEY_GROUPS * each, end = min(begin + each, steps);
    for (int first = begin; first < end; first += 4) { /* fresh sums lose less */
        float part[S::SCORE_KEYS / 8][4] = {};
#pragma unroll
        for (int step = first; step < first + 4; step++) {
            if (step >= end) break;
            uint32_t q[SPLIT<S::P>][1][4], k[SPLIT<S::P>][S::SCORE_KEYS / 16][4];
#pragma unroll
            for (int h = 0; h < SPLIT<S::P>; h++) {
                load_a(q[h][0], b.q, head, step, h);
#pragma unroll
                for (int t = 0; t < S::SCORE_KEYS / 16; t++)
                    load_b(k[h][t], keys, first_key + 16 * t, step, h);
            }
            mma_split<S::P, 1, S::SCORE_KEYS / 8>(part, q, k);
        }
#pragma unroll
        for (int i = 0; i < S::SCORE_KEYS / 8 * 4; i++) sum[i / 4][i % 4] += part[i / 4][i % 4];
    }
}

/* Partial scores into the slots: groups 0 and 1, then 2 and 3 on top of them. */
template <typename S>
static __device__ __forceinline__ void put_scores(const block_rows &b, const float (*sum)[4]) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int first_key = warp / S::M_TILES % S::KEY_GROUPS * S::SCORE_KEYS;
    const int group = warp / S::M_TILES / S::KEY_GROUPS;
#pragma unroll
    for (int turn = 0; turn < S::SCORE_GROUPS / 2; turn++) {
        if (group / 2 == turn) {
#pragma unroll
            for (int i = 0; i < S::SCORE_KEYS / 8 * 2; i++) {
                const int head = warp % S::M_TILES * 16 + lane / 4 + i % 2 * 8;
                const int key = first_key + i / 2 * 8 + lane % 4 * 2;
                const uint32_t to = slot_at(b, head, key / 4) +
                                    (uint32_t)(group % 2 * (SLOT / 2) + key % 4 * 4);
                float2 v = {sum[i / 2][i % 2 * 2], sum[i / 2][i % 2 * 2 + 1]};
                if (turn > 0) v = {get_float(to) + v.x, get_float(to + 4) + v.y};
                put_pair(to, v);
            }
        }
        __syncthreads();
    }
}

/* Of one head of this warp, of the part so far: the maximum, this lane's share of the total. */
struct running {
    float max, total;
};

constexpr int ZERO_SHIFT = 1; /* of a row of zeros */

/* The weights of the tile's keys, a key per lane, into the slots of the warp's heads. live: how many of the
 * keys each head sees; the others are for it as if they were zeros. */
template <typename S>
static __device__ __forceinline__ void weigh(running *run, const block_rows &b,
                                             const int *q_shift, const int *key_shift,
                                             float scale, const int *live) {
    const int lane = threadIdx.x % WARP, own = threadIdx.x / WARP * S::OWN_HEADS;
    const int shift = S::TILE == WARP || lane < S::TILE ? key_shift[lane] : ZERO_SHIFT;
    float s[S::OWN_HEADS];
#pragma unroll
    for (int h = 0; h < S::OWN_HEADS; h++) {
        const uint32_t from = slot_at(b, own + h, lane / 4) + (uint32_t)(lane % 4 * 4);
        const float dot = get_float(from) + get_float(from + SLOT / 2);
        const float plain = dot * power_of_two(q_shift[h]) * power_of_two(shift);
        s[h] = lane < live[h] ? plain * scale : -CUDART_INF_F;
    }
    __syncwarp(); /* the scores are read before weights take their place */
#pragma unroll
    for (int h = 0; h < S::OWN_HEADS; h++) {
        const int seen = lane < live[h] ? shift : S::P == EXACT ? ZERO_SHIFT : shift;
        const int top_shift = __reduce_max_sync(ALL_LANES, seen);
        const float even = power_of_two(max(127 + TOP_BIT + 1 + seen - top_shift, 0));
        const float top = fmaxf(run[h].max, warp_max(s[h]));
        const float base = top == -CUDART_INF_F ? 0.0f : top; /* nothing but -inf so far */
        const float keep = expf(run[h].max - base), p = expf(s[h] - base);
        run[h].max = top;
        run[h].total = run[h].total * keep + p;
        const uint32_t to = slot_at(b, own + h, lane / 8) + (uint32_t)(lane % 8 * 2);
        if (S::P == EXACT) {
            const __half high = __float2half_rn(p * even);
            const __half low = __float2half_rn(p * even - __half2float(high));
            put_bits(to, __half_as_ushort(high));
            put_bits(slot_at(b, own + h, 4 + lane / 8) + (uint32_t)(lane % 8 * 2),
                     __half_as_ushort(low));
        } else {
            put_bits(to, __bfloat16_as_ushort(__float2bfloat16_rn(p * even)));
        }
        if (lane == 0) {
            b.keep[own + h] = keep;
            b.back[own + h] = power_of_two(max(top_shift - TOP_BIT - 1, 1));
        }
    }
}

/* sum = sum * keep + weights . values over the warp's columns. */
template <typename S>
static __device__ __forceinline__ void add_values(float (*sum)[N_TILES][4], const block_rows &b,
                                                  const half_rows &keys, int first_col,
                                                  int v_dim) {
    const int lane = threadIdx.x % WARP, m = lane / 8;
    uint32_t p[S::KEY_STEPS][SPLIT<S::P>][S::M_TILES][4];
#pragma unroll
    for (int i = 0; i < S::KEY_STEPS * SPLIT<S::P> * S::M_TILES; i++) {
        const int step = i / (SPLIT<S::P> * S::M_TILES), half = i / S::M_TILES % SPLIT<S::P>;
        const int head = i % S::M_TILES * 16 + m % 2 * 8 + lane % 8;
        load_four(p[step][half][i % S::M_TILES], slot_at(b, head, half * 4 + step * 2 + m / 2));
    }
    float keep[S::M_TILES][2], back[S::M_TILES][2];
#pragma unroll
    for (int i = 0; i < S::M_TILES * 2; i++) {
        keep[i / 2][i % 2] = b.keep[i * 8 + lane / 4];
        back[i / 2][i % 2] = b.back[i * 8 + lane / 4];
    }
#pragma unroll
    for (int t = 0; t < N_TILES; t += 2) {
        if (first_col + 8 * t >= v_dim) break;
        uint32_t v[S::KEY_STEPS][SPLIT<S::P>][1][4];
#pragma unroll
        for (int i = 0; i < S::KEY_STEPS * SPLIT<S::P>; i++) {
            const int step = i / SPLIT<S::P>, half = i % SPLIT<S::P>;
            load_b_transposed(v[step][half][0], keys, step * 16, first_col / 8 + t, half);
        }
        float d[S::M_TILES * 2][4] = {};
#pragma unroll
        for (int step = 0; step < S::KEY_STEPS; step++)
            mma_split<S::P, S::M_TILES, 2>(d, p[step], v[step]);
#pragma unroll
        for (int i = 0; i < S::M_TILES * 2 * 4; i++) {
            const int tile = i / 8, k = i % 4;
            float *own = &sum[tile][t + i / 4 % 2][k];
            *own = fmaf(d[i / 4][k], back[tile][k / 2], __fmul_rn(*own, keep[tile][k / 2]));
        }
    }
}

/* ---- parts and their merging ---- */

/* What a block carries: the warp's columns for all heads, and its heads' maxima and totals. */
template <typename S>
struct sums {
    float value[S::M_TILES][N_TILES][4];
    running own[S::OWN_HEADS];
};

template <typename S>
static __device__ __forceinline__ void clear(sums<S> *s) {
#pragma unroll
    for (int i = 0; i < S::M_TILES * N_TILES * 4; i++) (&s->value[0][0][0])[i] = 0.0f;
#pragma unroll
    for (int h = 0; h < S::OWN_HEADS; h++) s->own[h] = {-CUDART_INF_F, 0.0f};
}

/* How the next part goes behind what there is; NaN where nothing but -inf met. */
static __device__ __forceinline__ void merge_heads(running *all, const running &part,
                                                   float *keep, float *take) {
    const float top = fmaxf(all->max, part.max);
    const float base = top == -CUDART_INF_F ? 0.0f : top;
    *keep = expf(all->max - base);
    *take = expf(part.max - base);
    all->max = top;
    all->total = fmaf(part.total, *take, __fmul_rn(all->total, *keep));
}

static __device__ __forceinline__ float merge_value(float all, float part, float keep,
                                                    float take) {
    return fmaf(part, take, __fmul_rn(all, keep));
}

/* Before any key: the sink, which has no value. */
static __device__ __forceinline__ running sink_of(const hd_attention_args &a, int32_t head) {
    running r = {-CUDART_INF_F, 0.0f};
    if (a.sink && head < a.heads) r.max = a.sink[head];
    r.total = r.max != -CUDART_INF_F ? 1.0f : 0.0f;
    return r;
}

template <typename S>
struct block_state {
    block_rows rows;
    slot_list slots;
    int32_t first_col; /* the warp's */
    int q_shift[S::OWN_HEADS];
    int32_t n_keys[S::OWN_HEADS]; /* of its heads' rows */
    bool quads, units;            /* how keys may be loaded */
};

/* The block's queries, converted, and its first tile's keys on their way. */
template <typename S>
static __device__ block_state<S> open_block(uint8_t *shared, const hd_attention_args &a,
                                            const key_list &k, const slot_list &slots,
                                            int32_t part, int32_t first_col) {
    const uint8_t *found = find_key<S>(a, k, {part, part * k.part});
    block_state<S> s;
    const int own = threadIdx.x / WARP * S::OWN_HEADS;
    s.rows = carve<S>(shared, a);
    s.slots = slots;
    s.first_col = first_col + (int32_t)threadIdx.x / WARP * WARP_COLS;
    s.quads =
        a.k_dim % 4 == 0 && a.v_dim % 4 == 0 && (uintptr_t)a.q.data % 16 == 0 &&
        (!a.window || ((uintptr_t)a.recent.rows.data % 16 == 0 && a.recent.width % 4 == 0)) &&
        (!a.ratio || ((uintptr_t)a.entries.rows.data % 16 == 0 && a.entries.width % 4 == 0));
    s.units = S::P == FAST && key_type(a) == HD_BF16 && s.quads && a.k_dim % 8 == 0 &&
              a.v_dim % 8 == 0 && (!a.window || a.recent.width % 8 == 0) &&
              (!a.ratio || a.entries.width % 8 == 0);
    for (int h = 0; h < S::OWN_HEADS; h++) {
        const bool live = has_query(slots, a.heads, own + h);
        const int64_t row = row_of(slots, own + h);
        const cuda_act *q = acts(a.q) + (row * a.heads + head_of(slots, own + h)) * a.k_dim;
        load_row(s.rows.q, own + h, live ? q : nullptr, a.k_dim, s.quads, a.q.data);
        s.n_keys[h] = slots.n_rows > 1 && live ? visible_entries(a.pos[row], a.ratio) : k.n;
    }
    commit_copies();
    load_keys<S>(keys_at<S>(s.rows, 0), a, found, s.quads, s.units);
    wait_copies<1>();
    __syncwarp();
    convert_rows<S::P, S::OWN_HEADS, UNITS>(s.rows.q, own, s.q_shift);
    return s;
}

/* Parts `index`, index + step, ... of the row's keys: done(part, its number) of each. Keys are
 * looked up two tiles ahead and loaded one ahead, across the borders of parts. */
template <typename S, typename Done>
static __device__ __forceinline__ void make_parts(const block_state<S> &s,
                                                  const hd_attention_args &a, const key_list &k,
                                                  int32_t index, int32_t step, Done done) {
    const int own = threadIdx.x / WARP * S::OWN_KEYS, lane = threadIdx.x % WARP;
    const block_rows &b = s.rows;
    tile_at now = {index, index * k.part}, next = next_tile<S>(now, k, step);
    const uint8_t *found = find_key<S>(a, k, next);
    sums<S> part;
    clear(&part);
    for (int i = 0; now.first < k.n; i ^= S::TILES - 1) {
        int *key_shift = b.key_shift + i * S::TILE, shift[S::OWN_KEYS];
        wait_copies<0>();
        __syncwarp();
        if constexpr (S::PACKED) {
            convert_packed_rows<S::P, S::OWN_KEYS, UNITS>(keys_at<S>(b, i), own,
                                                          layout_of(list_of(a)), shift);
        } else if (s.units) {
#pragma unroll
            for (int t = 0; t < S::OWN_KEYS; t++) shift[t] = NO_SHIFT;
        } else {
            convert_rows<S::P, S::OWN_KEYS, UNITS>(keys_at<S>(b, i), own, shift);
        }
#pragma unroll
        for (int t = 0; t < S::OWN_KEYS; t++) {
            if (lane == t) key_shift[own + t] = shift[t];
        }
        __syncthreads();
        const uint8_t *ahead = found;
        if (S::TILES > 1 && next.first < k.n) {
            load_keys<S>(keys_at<S>(b, i ^ 1), a, ahead, s.quads, s.units);
        }
        const tile_at after = next_tile<S>(next, k, step);
        found = find_key<S>(a, k, after);
        float sum[S::SCORE_KEYS / 8][4] = {};
        score<S>(sum, b, keys_at<S>(b, i), a.k_dim);
        put_scores<S>(b, sum);
        int live[S::OWN_HEADS];
#pragma unroll
        for (int h = 0; h < S::OWN_HEADS; h++) {
            live[h] = min(live_keys<S>(now, k), s.n_keys[h] - now.first);
        }
        weigh<S>(part.own, b, s.q_shift, key_shift, a.scale, live);
        __syncthreads();
        add_values<S>(part.value, b, keys_at<S>(b, i), s.first_col, a.v_dim);
        if (S::TILES == 1 && next.first < k.n) {
            __syncthreads(); /* the keys are done with */
            load_keys<S>(keys_at<S>(b, i), a, ahead, s.quads, s.units);
        }
        if (next.part != now.part) {
#pragma unroll
            for (int h = 0; h < S::OWN_HEADS; h++) {
                part.own[h].total = warp_sum(part.own[h].total);
            }
            done(part, now.part);
            clear(&part);
        }
        now = next;
        next = after;
    }
    wait_copies<0>();
}

/* Element i of a warp's values: its slot and its column. */
static __device__ __forceinline__ int slot_of(int i) {
    const int lane = threadIdx.x % WARP;
    return i / (4 * N_TILES) * 16 + lane / 4 + i / 2 % 2 * 8;
}

template <typename S>
static __device__ __forceinline__ int32_t column_of(const block_state<S> &s, int i) {
    return s.first_col + i / 4 % N_TILES * 8 + (int)threadIdx.x % 4 * 2 + i % 2;
}

template <typename S>
static __device__ __forceinline__ void merge_part(sums<S> *all, const sums<S> &part,
                                                  const block_rows &b) {
    const int lane = threadIdx.x % WARP, own = threadIdx.x / WARP * S::OWN_HEADS;
    __syncthreads(); /* the tile's keep is done with */
#pragma unroll
    for (int h = 0; h < S::OWN_HEADS; h++) {
        float keep, take;
        merge_heads(&all->own[h], part.own[h], &keep, &take);
        if (lane == 0) b.keep[own + h] = keep;
        if (lane == 0) b.take[own + h] = take;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < S::M_TILES * N_TILES * 4; i++) {
        float *value = &all->value[0][0][0] + i;
        const int h = slot_of(i);
        *value = merge_value(*value, (&part.value[0][0][0])[i], b.keep[h], b.take[h]);
    }
    __syncthreads();
}

template <typename S>
static __device__ __forceinline__ void put_rows(const sums<S> &all, const block_state<S> &s,
                                                const hd_attention_args &a, bool any) {
    const int lane = threadIdx.x % WARP, own = threadIdx.x / WARP * S::OWN_HEADS;
#pragma unroll
    for (int h = 0; h < S::OWN_HEADS; h++) {
        if (lane == 0) s.rows.total[own + h] = all.own[h].total;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < S::M_TILES * N_TILES * 4; i++) {
        const int slot = slot_of(i);
        const int32_t col = column_of(s, i);
        if (!has_query(s.slots, a.heads, slot) || col >= a.v_dim) continue;
        const float value = (&all.value[0][0][0])[i] / s.rows.total[slot];
        const int64_t at = (int64_t)row_of(s.slots, slot) * a.heads + head_of(s.slots, slot);
        acts(a.out)[at * a.v_dim + col] = narrow(any ? value : 0.0f);
    }
}

/* The rows from `row` on, before `end`, that can share a block: of one sequence, with parts of one size.
 * The keys are those of the row that has the most. */
static __device__ key_list list_run(const hd_attention_args &a, int32_t row, int32_t end,
                                    int32_t *n_rows) {
    key_list k = list_keys(a, row);
    for (*n_rows = 1; row + *n_rows < end; ++*n_rows) {
        const key_list next = list_keys(a, row + *n_rows);
        if (next.seq != k.seq || next.part != k.part) break;
        if (next.n > k.n) k = next;
    }
    return k;
}

/* A block makes and merges all parts of its rows. */
template <typename S>
static __device__ void attention_run(uint8_t *shared, const hd_attention_args &a,
                                     const key_list &k, const slot_list &slots) {
    const block_state<S> s =
        open_block<S>(shared, a, k, slots, 0, (int32_t)blockIdx.z * V_COLS);
    sums<S> all;
    clear(&all);
#pragma unroll
    for (int h = 0; h < S::OWN_HEADS; h++) {
        all.own[h] = sink_of(a, head_of(slots, (int)threadIdx.x / WARP * S::OWN_HEADS + h));
    }
    make_parts<S>(s, a, k, 0, 1,
                  [&](const sums<S> &part, int32_t) { merge_part(&all, part, s.rows); });
    put_rows(all, s, a, k.n > 0);
}

template <typename S>
static __global__ void __launch_bounds__(BLOCK, S::BLOCKS) attention(hd_attention_args a) {
    begin_early(a.rows);
    extern __shared__ __align__(128) uint8_t shared[];
    const key_list k = list_keys(a, (int32_t)blockIdx.x);
    const int32_t head = (int32_t)blockIdx.y * S::HEADS;
    if constexpr (HAS_SHAPE<S>) {
        attention_run<S>(shared, a, k, {(int32_t)blockIdx.x, 1, head, S::HEADS});
    }
}

/* A block has all heads of `each` rows, of which those that can share it go together. */
template <typename S>
static __global__ void __launch_bounds__(BLOCK, 1)
    attention_runs(hd_attention_args a, int32_t each) {
    begin_early(a.rows);
    extern __shared__ __align__(128) uint8_t shared[];
    const int32_t end = min(((int32_t)blockIdx.x + 1) * each, a.rows);
    slot_list slots = {(int32_t)blockIdx.x * each, 1, 0, a.heads};
    while (slots.row < end) {
        const key_list k = list_run(a, slots.row, end, &slots.n_rows);
        if constexpr (HAS_SHAPE<S>) attention_run<S>(shared, a, k, slots);
        slots.row += slots.n_rows;
        __syncthreads();
    }
}

/* Parts in scratch: [rows, heads, n_parts, v_dim + 2], the maximum and the total at the end. */
struct part_table {
    float *data;
    int32_t n_parts;  /* the most a row can have */
    int32_t n_blocks; /* that share them */
};

static __device__ __forceinline__ float *part_at(const part_table &t,
                                                 const hd_attention_args &a, int32_t row,
                                                 int32_t head, int32_t part) {
    const int64_t at = ((int64_t)row * a.heads + head) * t.n_parts + part;
    return t.data + at * (a.v_dim + 2);
}

template <typename S>
static __device__ __forceinline__ void put_part(const sums<S> &part, const block_state<S> &s,
                                                const part_table &t, const hd_attention_args &a,
                                                int32_t index) {
    const int lane = threadIdx.x % WARP, own = threadIdx.x / WARP * S::OWN_HEADS;
#pragma unroll
    for (int i = 0; i < S::M_TILES * N_TILES * 4; i++) {
        const int32_t head = s.slots.head + slot_of(i), col = column_of(s, i);
        if (head >= a.heads || col >= a.v_dim) continue;
        part_at(t, a, s.slots.row, head, index)[col] = (&part.value[0][0][0])[i];
    }
#pragma unroll
    for (int h = 0; h < S::OWN_HEADS; h++) {
        const int32_t head = s.slots.head + own + h;
        if (lane != 0 || head >= a.heads || blockIdx.z >= (unsigned)t.n_blocks) continue;
        float *out = part_at(t, a, s.slots.row, head, index) + a.v_dim;
        out[0] = part.own[h].max;
        out[1] = part.own[h].total;
    }
}

/* Block z takes every n_blocks-th part of its row. */
template <typename S>
static __global__ void __launch_bounds__(BLOCK, 1)
    attention_parts(hd_attention_args a, part_table t) {
    begin_early(a.rows);
    extern __shared__ __align__(128) uint8_t shared[];
    const key_list k = list_keys(a, (int32_t)blockIdx.x);
    const int32_t first = (int32_t)blockIdx.z % t.n_blocks;
    if (first * k.part >= k.n) return;
    const slot_list slots = {(int32_t)blockIdx.x, 1, (int32_t)blockIdx.y * S::HEADS, S::HEADS};
    if constexpr (HAS_SHAPE<S>) {
        const block_state<S> s = open_block<S>(shared, a, k, slots, first,
                                               (int32_t)blockIdx.z / t.n_blocks * V_COLS);
        make_parts<S>(s, a, k, first, t.n_blocks, [&](const sums<S> &part, int32_t index) {
            put_part(part, s, t, a, index);
        });
    }
}

constexpr int MERGE_COLS = 4 * WARP; /* of a warp of merge_parts */
constexpr int AT_ONCE = 8;           /* parts on their way */

/* A warp per head and MERGE_COLS columns. */
static __global__ void __launch_bounds__(BLOCK, 2)
    merge_parts(hd_attention_args a, part_table t) {
    begin_early(a.rows);
    const int32_t row = (int32_t)blockIdx.x, lane = (int32_t)threadIdx.x % WARP;
    const int32_t head = (int32_t)(blockIdx.y * WARPS + threadIdx.x / WARP);
    const int32_t first_col = (int32_t)blockIdx.z * MERGE_COLS + lane;
    const key_list k = list_keys(a, row);
    if (head >= a.heads) return;
    running all = sink_of(a, head);
    float value[4] = {};
    const int32_t n = (k.n + k.part - 1) / k.part;
    for (int32_t first = 0; first < n; first += AT_ONCE) {
        running part[AT_ONCE];
        float own[AT_ONCE][4];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const bool there = first + i < n;
            const float *from = part_at(t, a, row, head, first + i);
            part[i] = {load_now(from + a.v_dim, there), load_now(from + a.v_dim + 1, there)};
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const int32_t col = first_col + c * WARP;
                own[i][c] = load_now(from + col, there && col < a.v_dim);
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) { /* selected: a branch would take the loads along */
            const bool there = first + i < n;
            running next = all;
            float keep, take;
            merge_heads(&next, part[i], &keep, &take);
            all.max = there ? next.max : all.max;
            all.total = there ? next.total : all.total;
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const float merged = merge_value(value[c], own[i][c], keep, take);
                value[c] = there ? merged : value[c];
            }
        }
    }
    cuda_act *out = acts(a.out) + ((int64_t)row * a.heads + head) * a.v_dim;
#pragma unroll
    for (int c = 0; c < 4; c++) {
        const int32_t col = first_col + c * WARP;
        if (col < a.v_dim) out[col] = narrow(k.n > 0 ? value[c] / all.total : 0.0f);
    }
}

/* ---- parts that the blocks of a cluster join ---- */

constexpr int MAX_JOINED = 8; /* blocks of a cluster; more are not on the GPU as soon */

/* Whether code is wanted for rows whose parts are joined by a cluster. */
template <typename S>
constexpr bool JOINS = S::P == FAST &&S::TILE == large_shape<S::P, S::PACKED>::TILE;

template <typename S>
constexpr size_t SUM_BYTES = sizeof(float4) * S::M_TILES *N_TILES *BLOCK;

/* A block's part, as the cluster finds it: what a thread has of columns `i` lies side by side. */
template <typename S>
struct shared_part {
    float4 *sum;  /* [M_TILES * N_TILES, BLOCK] */
    running *own; /* [HEADS] */
};

/* A share of the columns, from all parts of the row in order; as merge_parts. */
template <typename S>
static __device__ void join_columns(const shared_part<S> &p, const hd_attention_args &a,
                                    const key_list &k, int32_t row, int32_t first_head,
                                    int32_t i) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int32_t slot[2] = {i / N_TILES * 16 + lane / 4, i / N_TILES * 16 + lane / 4 + 8};
    const int32_t n = (k.n + k.part - 1) / k.part;
    running all[2] = {sink_of(a, first_head + slot[0]), sink_of(a, first_head + slot[1])};
    float value[4] = {};
    for (int32_t first = 0; first < n; first += AT_ONCE) {
        running part[AT_ONCE][2];
        float4 sum[AT_ONCE];
#pragma unroll
        for (int q = 0; q < AT_ONCE; q++) {
            const unsigned block = (unsigned)min(first + q, n - 1);
            const running *own = cluster_at(p.own, block);
            sum[q] = cluster_at(p.sum, block)[i * BLOCK + (int)threadIdx.x];
            part[q][0] = own[slot[0]];
            part[q][1] = own[slot[1]];
        }
#pragma unroll
        for (int q = 0; q < AT_ONCE; q++) {
            const bool there = first + q < n;
            const float own[4] = {sum[q].x, sum[q].y, sum[q].z, sum[q].w};
#pragma unroll
            for (int h = 0; h < 2; h++) {
                running next = all[h];
                float keep, take;
                merge_heads(&next, part[q][h], &keep, &take);
                all[h].max = there ? next.max : all[h].max;
                all[h].total = there ? next.total : all[h].total;
#pragma unroll
                for (int c = 2 * h; c < 2 * h + 2; c++) {
                    const float merged = merge_value(value[c], own[c], keep, take);
                    value[c] = there ? merged : value[c];
                }
            }
        }
    }
    const int32_t col = warp * WARP_COLS + i % N_TILES * 8 + lane % 4 * 2;
#pragma unroll
    for (int c = 0; c < 4; c++) {
        const int32_t head = first_head + slot[c / 2];
        if (head >= a.heads || col + c % 2 >= a.v_dim) continue;
        acts(a.out)[((int64_t)row * a.heads + head) * a.v_dim + col + c % 2] =
            narrow(k.n > 0 ? value[c] / all[c / 2].total : 0.0f);
    }
}

/* A block of a cluster has one part of a row. */
template <typename S>
static __global__ void __launch_bounds__(BLOCK, 1) attention_joined(hd_attention_args a) {
    begin_early(a.rows);
    if constexpr (FOR_SM90) {
        extern __shared__ __align__(128) uint8_t shared[];
        const int32_t row = (int32_t)blockIdx.y, first_head = (int32_t)blockIdx.z * S::HEADS;
        const int32_t rank = (int32_t)cluster_rank(), size = (int32_t)cluster_size();
        const int32_t live = min(S::HEADS, a.heads - first_head);
        const int32_t n_sums = (live + 15) / 16 * N_TILES;
        const key_list k = list_keys(a, row);
        const shared_part<S> p = {reinterpret_cast<float4 *>(shared),
                                  reinterpret_cast<running *>(shared + SUM_BYTES<S>)};
        if (rank * k.part < k.n) {
            const block_state<S> s =
                open_block<S>(shared, a, k, {row, 1, first_head, S::HEADS}, rank, 0);
            make_parts<S>(s, a, k, rank, size, [&](const sums<S> &part, int32_t) {
                const int lane = threadIdx.x % WARP, own = threadIdx.x / WARP * S::OWN_HEADS;
                __syncthreads(); /* queries and keys are done with */
#pragma unroll
                for (int i = 0; i < S::M_TILES * N_TILES; i++) {
                    const float *v = part.value[i / N_TILES][i % N_TILES];
                    if (i < n_sums) {
                        p.sum[i * BLOCK + (int)threadIdx.x] = {v[0], v[1], v[2], v[3]};
                    }
                }
#pragma unroll
                for (int h = 0; h < S::OWN_HEADS; h++) {
                    if (lane == 0) p.own[own + h] = part.own[h];
                }
            });
        }
        cluster_sync();
        for (int32_t i = rank; i < n_sums; i += size) {
            join_columns<S>(p, a, k, row, first_head, i);
        }
        cluster_sync(); /* nobody leaves while its part is read */
    }
}

/* How many clusters of n blocks the current GPU has room for; asked once of each. */
template <typename S>
static int64_t clusters_at_once(int32_t n, size_t bytes) {
    constexpr int MAX_GPUS = 64, UNKNOWN = 0;
    static std::atomic<int> known[MAX_GPUS][MAX_JOINED + 1]; /* one more than fit */
    int gpu = 0, fit = 0;
    cudaGetDevice(&gpu);
    if (gpu < MAX_GPUS && known[gpu][n] != UNKNOWN) return known[gpu][n] - 1;
    cudaLaunchAttribute how = {};
    how.id = cudaLaunchAttributeClusterDimension;
    how.val.clusterDim = {(unsigned)n, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)n);
    config.blockDim = dim3(BLOCK);
    config.dynamicSmemBytes = bytes;
    config.attrs = &how;
    config.numAttrs = 1;
    cudaFuncSetAttribute(attention_joined<S>, cudaFuncAttributeNonPortableClusterSizeAllowed,
                         1);
    hd_cuda_allow_shared((const void *)attention_joined<S>, bytes);
    if (cudaOccupancyMaxActiveClusters(&fit, attention_joined<S>, &config) != cudaSuccess) {
        cudaGetLastError();
        fit = 0;
    }
    if (gpu < MAX_GPUS) known[gpu][n] = fit + 1;
    return fit;
}

/* False where the clusters of all rows are not on the GPU at once, or a row has more parts. */
template <typename S>
static bool launch_joined(hd_stream *s, const hd_attention_args *a, dim3 grid, size_t bytes,
                          int32_t n_parts) {
    if (grid.z > 1 || n_parts > MAX_JOINED) return false;
    if (SUM_BYTES<S> + S::HEADS * sizeof(running) > bytes) return false;
    if ((int64_t)grid.x * grid.y > clusters_at_once<S>(n_parts, bytes)) return false;
    launch_early(hd_cuda_stream(s), a->rows, attention_joined<S>,
                 dim3((unsigned)n_parts, grid.x, grid.y), BLOCK, bytes, n_parts, *a);
    return true;
}

static int32_t most_parts(const hd_attention_args *a) {
    const int64_t parts = (most_keys(a) + MIN_PART - 1) / MIN_PART;
    return parts < MAX_PARTS ? (int32_t)parts : MAX_PARTS;
}

/* False where one block per row is as good, or the parts do not fit into scratch. */
template <typename S>
static bool launch_parts(hd_stream *s, const hd_attention_args *a, dim3 grid, size_t bytes) {
    part_table t = {static_cast<float *>(hd_stream_scratch(s, 0, 0)), most_parts(a), 0};
    const size_t each = ((size_t)a->v_dim + 2) * sizeof(float);
    const size_t room = (size_t)hd_stream_workers(s) * hd_stream_scratch_bytes(s);
    const int64_t blocks = (int64_t)grid.x * grid.y * grid.z, fill = 2 * hd_stream_workers(s);
    cudaStream_t queue = hd_cuda_stream(s);
    if (t.n_parts <= 1 || blocks >= fill) return false;
    if constexpr (JOINS<S>) {
        if (hd_cuda_is_sm90() && launch_joined<S>(s, a, grid, bytes, t.n_parts)) return true;
    }
    if ((size_t)a->rows * (size_t)a->heads * (size_t)t.n_parts * each > room) return false;
    const int64_t share = (2 * fill + blocks - 1) / blocks;
    t.n_blocks = share < t.n_parts ? (int32_t)share : t.n_parts;
    hd_cuda_allow_shared((const void *)attention_parts<S>, bytes);
    const dim3 parts(grid.x, grid.y, grid.z * (unsigned)t.n_blocks);
    launch_early(queue, a->rows, attention_parts<S>, parts, BLOCK, bytes, 1, *a, t);
    const dim3 merging(grid.x, blocks_for(a->heads, WARPS), blocks_for(a->v_dim, MERGE_COLS));
    launch_early(queue, a->rows, merge_parts, merging, BLOCK, 0, 1, *a, t);
    return true;
}

/* Rows share a block where a row's keys are the first ones of its sequence, and it has few heads. */
template <typename S>
static int32_t rows_of_block(const hd_attention_args *a) {
    const bool prefixes = !a->window && !a->selected && a->ratio == 1;
    return prefixes && a->heads <= S::HEADS / 2 ? S::HEADS / a->heads : 1;
}

/* Whether rows, which have a block each since their windows begin at other keys, leave half of its places
 * empty. */
static bool is_narrow(const hd_attention_args *a) {
    return a->window && a->heads <= 16;
}

/* A block for each row, two blocks on a multiprocessor; the larger shape has been found to fit. */
template <typename S>
static void launch_narrow(hd_stream *s, const hd_attention_args *a) {
    const size_t bytes = shared_bytes<S>(a);
    const dim3 grid((unsigned)a->rows, 1, blocks_for(a->v_dim, V_COLS));
    hd_cuda_allow_shared((const void *)attention<S>, bytes);
    launch_early(hd_cuda_stream(s), a->rows, attention<S>, grid, BLOCK, bytes, 1, *a);
    hd_cuda_check(s, "attention");
}

template <typename S>
static void launch_rows(hd_stream *s, const hd_attention_args *a) {
    const size_t bytes = shared_bytes<S>(a);
    const dim3 grid((unsigned)a->rows, blocks_for(a->heads, S::HEADS),
                    blocks_for(a->v_dim, V_COLS));
    if (bytes > hd_cuda_shared_limit() || !packed_rows_fit(list_of(*a), row_cols(*a))) {
        hd_stream_fail(s, HD_EUNSUPPORTED, "attention over keys this wide does not fit a GPU");
        return;
    }
    const int32_t each = rows_of_block<S>(a);
    if (launch_parts<S>(s, a, grid, bytes)) {
        hd_cuda_check(s, "attention");
        return;
    }
    if constexpr (S::HEADS == 32) {
        if (is_narrow(a)) {
            launch_narrow<narrow_shape<S::P, S::PACKED>>(s, a);
            return;
        }
    }
    if (each > 1) {
        const dim3 blocks(blocks_for(a->rows, each), 1, grid.z);
        hd_cuda_allow_shared((const void *)attention_runs<S>, bytes);
        launch_early(hd_cuda_stream(s), a->rows, attention_runs<S>, blocks, BLOCK, bytes, 1, *a,
                     each);
    } else {
        hd_cuda_allow_shared((const void *)attention<S>, bytes);
        launch_early(hd_cuda_stream(s), a->rows, attention<S>, grid, BLOCK, bytes, 1, *a);
    }
    hd_cuda_check(s, "attention");
}

/* Both lists have one type, and if it is packed, one format. */
static bool lists_differ(const hd_attention_args *a) {
    const hd_group_format recent = a->recent.format, entries = a->entries.format;
    if (!a->window || !a->ratio) return false;
    if (a->recent.rows.type != a->entries.rows.type) return true;
    return hd_is_packed(a->recent.rows.type) &&
           (recent.group != entries.group || recent.plain != entries.plain);
}

template <int P, bool PACKED>
static void launch_on_path(hd_stream *s, const hd_attention_args *a) {
    if (hd_cuda_is_sm90()) {
        launch_rows<large_shape<P, PACKED>>(s, a);
    } else {
        launch_rows<generic_shape<P, PACKED>>(s, a);
    }
}

template <int P>
static void attention_rows(hd_stream *s, const hd_attention_args *a) {
    if (a->rows == 0) return;
    if (lists_differ(a)) {
        hd_stream_fail(s, HD_EUNSUPPORTED, "attention: recent and entries differ in type");
    } else if (key_type(*a) == HD_E4M3) {
        launch_on_path<P, true>(s, a);
    } else {
        launch_on_path<P, false>(s, a);
    }
}

void hd_attention_cuda(hd_stream *s, const hd_attention_args *a) {
    attention_rows<EXACT>(s, a);
}

void hd_attention_cuda_fast(hd_stream *s, const hd_attention_args *a) {
    if (attention_fits_sm90(a)) {
        attention_sm90(s, a);
    } else {
        attention_rows<FAST>(s, a);
    }
}
