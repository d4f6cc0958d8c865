/* attend_cuda.cu - softmax attention of rows over paged keys, on the tensor cores.
 *
 * A block takes HEADS heads of one row and walks the row's keys in tiles of TILE, the next one
 * on its way. Queries, keys and weights are sums of two halves (halves_internal.cuh). Within a
 * tile the warps first share out (heads, columns) for the scores, then heads for the softmax,
 * then columns of the values.
 *
 * Keys fall into parts with a maximum, a total and a sum of their own, at most MAX_PARTS and as
 * many as the number of the row's own keys says. A row's parts are merged in order: by the
 * block that made them all, or, where blocks are too few to fill the GPU, by a second kernel.
 * The steps are the same, so neither the row's neighbors nor the way change a bit. */
#include "ops/halves_internal.cuh"

constexpr int WARPS = BLOCK / WARP, HEADS = 32, TILE = 32;
constexpr int MIN_PART = 64, MAX_PARTS = 64;              /* keys of a part; parts of a row */
constexpr int WARP_COLS = 64, V_COLS = WARPS * WARP_COLS; /* of the sum: a warp's, a block's */
constexpr int M_TILES = HEADS / 16, N_TILES = WARP_COLS / 8, KEY_STEPS = TILE / 16;
constexpr int OWN_HEADS = HEADS / WARPS, OWN_KEYS = TILE / WARPS; /* of a warp */
constexpr int SCORE_GROUPS = WARPS / M_TILES;                     /* of columns of a score */
constexpr size_t MAX_SHARED = 227 * 1024;

/* ---- the keys of a row ---- */

/* In the order of the contract. */
struct key_list {
    const int32_t *chosen; /* NULL: all entries */
    int32_t seq, first_recent, n_recent, n;
    int32_t part; /* keys of a part */
};

static __host__ __device__ __forceinline__ int32_t part_of(int64_t n_keys) {
    const int64_t each = (n_keys + MAX_PARTS - 1) / MAX_PARTS;
    const int64_t whole = (each + TILE - 1) / TILE * TILE;
    return whole < MIN_PART ? MIN_PART : (int32_t)whole;
}

static __device__ key_list list_keys(const hd_attend_args &a, int32_t row) {
    key_list k = {};
    const int32_t pos = a.pos[row];
    k.seq = a.seq[row];
    if (a.window) {
        k.first_recent = max(0, pos + 1 - a.window);
        k.n_recent = pos + 1 - k.first_recent;
    }
    int32_t n = visible_entries(pos, a.ratio);
    if (a.selected) {
        int32_t low = 0, high = a.n_selected; /* the first -1 */
        k.chosen = a.selected + (int64_t)row * a.n_selected;
        while (low < high) {
            const int32_t middle = (low + high) / 2;
            if (k.chosen[middle] >= 0) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        n = low;
    }
    k.n = k.n_recent + n;
    k.part = part_of(k.n);
    return k;
}

static __device__ __forceinline__ const cuda_act *key_at(const hd_attend_args &a,
                                                         const key_list &k, int32_t i) {
    if (i < k.n_recent) return paged_entry(a.recent, k.seq, k.first_recent + i);
    const int32_t e = i - k.n_recent;
    return paged_entry(a.entries, k.seq, k.chosen ? k.chosen[e] : e);
}

/* ---- a block's shared memory ---- */

constexpr int SLOT = 256; /* bytes of a head: two partial scores of a tile, then its weights */

struct block_rows {
    half_rows q;                /* [HEADS, cols] */
    half_rows key[2];           /* [TILE, cols] one is read, one is on its way */
    uint8_t *slot;              /* [HEADS, SLOT] */
    int *key_shift;             /* [2, TILE] what undoes the keys' shifts */
    float *keep, *take, *total; /* [HEADS] */
};

static __host__ __device__ __forceinline__ int32_t row_cols(const hd_attend_args &a) {
    return half_cols(a.k_dim > a.v_dim ? a.k_dim : a.v_dim);
}

static size_t shared_bytes(const hd_attend_args *a) {
    return (size_t)(HEADS + 2 * TILE) * (size_t)row_cols(*a) * 4 + HEADS * SLOT +
           2 * TILE * sizeof(int) + 3 * HEADS * sizeof(float);
}

static __device__ block_rows carve(uint8_t *shared, const hd_attend_args &a) {
    const int32_t cols = row_cols(a);
    block_rows b;
    b.q = {shared, cols};
    b.key[0] = {b.q.at + HEADS * cols * 4, cols};
    b.key[1] = {b.key[0].at + TILE * cols * 4, cols};
    b.slot = b.key[1].at + TILE * cols * 4;
    b.key_shift = reinterpret_cast<int *>(b.slot + HEADS * SLOT);
    b.keep = reinterpret_cast<float *>(b.key_shift + 2 * TILE);
    b.take = b.keep + HEADS;
    b.total = b.take + HEADS;
    return b;
}

/* 16 bytes of a head's slot, exchanged so that eight heads do not meet in a bank. */
static __device__ __forceinline__ uint8_t *slot_at(const block_rows &b, int head, int chunk) {
    return b.slot + head * SLOT + ((chunk ^ (head & 7)) << 4);
}

/* ---- the three steps of a tile ---- */

/* Keys [first, first + TILE) on their way; a warp brings its own OWN_KEYS. */
static __device__ void load_keys(const half_rows &to, const hd_attend_args &a,
                                 const key_list &k, int32_t first, int32_t end, bool quads) {
    const int32_t width = max(a.k_dim, a.v_dim);
    const int own = threadIdx.x / WARP * OWN_KEYS;
    for (int i = own; i < own + OWN_KEYS; i++) {
        const cuda_act *key = first + i < end ? key_at(a, k, first + i) : nullptr;
        load_row(to, i, key, width, quads, a.q);
    }
    commit_copies();
}

/* Scores of 16 heads against the tile over this warp's columns: [4 tiles of 8 keys][4]. */
static __device__ __forceinline__ void score(float (*sum)[4], const block_rows &b,
                                             const half_rows &keys, int32_t k_dim) {
    const int warp = threadIdx.x / WARP, head = warp % M_TILES * 16;
    const int steps = half_cols(k_dim) / 16, each = (steps + SCORE_GROUPS - 1) / SCORE_GROUPS;
    const int begin = warp / M_TILES * each, end = min(begin + each, steps);
    for (int first = begin; first < end; first += 4) { /* fresh sums lose less */
        float part[TILE / 8][4] = {};
        for (int step = first; step < min(first + 4, end); step++) {
            uint32_t q[2][4];
            load_a(q[0], b.q, head, step, 0);
            load_a(q[1], b.q, head, step, 1);
#pragma unroll
            for (int t = 0; t < TILE / 8; t += 2) {
                uint32_t k[2][4];
                load_b(k[0], keys, 8 * t, step, 0);
                load_b(k[1], keys, 8 * t, step, 1);
                mma_halves(part[t], q, k, 0);
                mma_halves(part[t + 1], q, k, 1);
            }
        }
#pragma unroll
        for (int i = 0; i < TILE / 8 * 4; i++) sum[i / 4][i % 4] += part[i / 4][i % 4];
    }
}

/* Partial scores into the slots: groups 0 and 1, then 2 and 3 on top of them. */
static __device__ void put_scores(const block_rows &b, const float (*sum)[4]) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = warp / M_TILES;
    for (int turn = 0; turn < SCORE_GROUPS / 2; turn++) {
        if (group / 2 == turn) {
#pragma unroll
            for (int i = 0; i < TILE / 8 * 2; i++) {
                const int head = warp % M_TILES * 16 + lane / 4 + i % 2 * 8;
                const int key = i / 2 * 8 + lane % 4 * 2;
                float2 *to = reinterpret_cast<float2 *>(slot_at(b, head, key / 4) +
                                                        group % 2 * (SLOT / 2) + key % 4 * 4);
                float2 v = {sum[i / 2][i % 2 * 2], sum[i / 2][i % 2 * 2 + 1]};
                if (turn > 0) v = {to->x + v.x, to->y + v.y};
                *to = v;
            }
        }
        __syncthreads();
    }
}

/* Of one head of this warp, of the part so far: the maximum, this lane's share of the total. */
struct running {
    float max, total;
};

/* The weights of the tile's keys, a key per lane, into the slots of the warp's heads. */
static __device__ __forceinline__ void weigh(running *run, const block_rows &b,
                                             const int *q_shift, const int *key_shift,
                                             float scale, int live) {
    const int lane = threadIdx.x % WARP, own = threadIdx.x / WARP * OWN_HEADS;
    const int shift = key_shift[lane];
    int top_shift = shift;
    for (int step = WARP / 2; step > 0; step /= 2) {
        top_shift = max(top_shift, __shfl_xor_sync(ALL_LANES, top_shift, step));
    }
    const float even = power_of_two(max(127 + TOP_BIT + 1 + shift - top_shift, 0));
    float s[OWN_HEADS];
#pragma unroll
    for (int h = 0; h < OWN_HEADS; h++) {
        const float *from = reinterpret_cast<float *>(slot_at(b, own + h, lane / 4)) + lane % 4;
        const float dot = from[0] + from[SLOT / 2 / sizeof(float)];
        const float plain = dot * power_of_two(q_shift[h]) * power_of_two(shift);
        s[h] = lane < live ? plain * scale : -CUDART_INF_F;
    }
    __syncwarp(); /* the scores are read before weights take their place */
#pragma unroll
    for (int h = 0; h < OWN_HEADS; h++) {
        const float top = fmaxf(run[h].max, warp_max(s[h]));
        const float base = top == -CUDART_INF_F ? 0.0f : top; /* nothing but -inf so far */
        const float keep = expf(run[h].max - base), p = expf(s[h] - base);
        run[h].max = top;
        run[h].total = run[h].total * keep + p;
        const __half high = __float2half_rn(p * even);
        const __half low = __float2half_rn(p * even - __half2float(high));
        reinterpret_cast<__half *>(slot_at(b, own + h, lane / 8))[lane % 8] = high;
        reinterpret_cast<__half *>(slot_at(b, own + h, 4 + lane / 8))[lane % 8] = low;
        if (lane == 0) b.keep[own + h] = keep;
    }
}

/* sum = sum * keep + weights . values over the warp's columns. */
static __device__ __forceinline__ void add_values(float (*sum)[N_TILES][4], const block_rows &b,
                                                  const half_rows &keys, const int *key_shift,
                                                  int first_col, int v_dim) {
    const int lane = threadIdx.x % WARP, m = lane / 8;
    int top_shift = key_shift[lane];
    for (int step = WARP / 2; step > 0; step /= 2) {
        top_shift = max(top_shift, __shfl_xor_sync(ALL_LANES, top_shift, step));
    }
    const float back = power_of_two(max(top_shift - TOP_BIT - 1, 1));
    uint32_t p[M_TILES][KEY_STEPS][2][4];
#pragma unroll
    for (int i = 0; i < M_TILES * KEY_STEPS * 2; i++) {
        const int tile = i / (2 * KEY_STEPS), step = i / 2 % KEY_STEPS;
        const int head = tile * 16 + m % 2 * 8 + lane % 8;
        load_four(p[tile][step][i % 2], slot_at(b, head, i % 2 * 4 + step * 2 + m / 2));
    }
    float keep[M_TILES][2];
#pragma unroll
    for (int i = 0; i < M_TILES * 2; i++) keep[i / 2][i % 2] = b.keep[i * 8 + lane / 4];
#pragma unroll
    for (int t = 0; t < N_TILES; t += 2) {
        if (first_col + 8 * t >= v_dim) break;
        uint32_t v[KEY_STEPS][2][4];
#pragma unroll
        for (int i = 0; i < KEY_STEPS * 2; i++) {
            load_b_turned(v[i / 2][i % 2], keys, i / 2 * 16, first_col / 8 + t, i % 2);
        }
#pragma unroll
        for (int i = 0; i < M_TILES * 2; i++) {
            const int tile = i / 2, col = i % 2;
            float d[4] = {};
#pragma unroll
            for (int step = 0; step < KEY_STEPS; step++) {
                mma_halves(d, p[tile][step], v[step], col);
            }
            float *own = sum[tile][t + col];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                own[k] = fmaf(d[k], back, __fmul_rn(own[k], keep[tile][k / 2]));
            }
        }
    }
}

/* ---- parts and their merging ---- */

/* What a block carries: the warp's columns for all heads, and its heads' maxima and totals. */
struct sums {
    float value[M_TILES][N_TILES][4];
    running own[OWN_HEADS];
};

static __device__ __forceinline__ void clear(sums *s) {
#pragma unroll
    for (int i = 0; i < M_TILES * N_TILES * 4; i++) (&s->value[0][0][0])[i] = 0.0f;
#pragma unroll
    for (int h = 0; h < OWN_HEADS; h++) s->own[h] = {-CUDART_INF_F, 0.0f};
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
static __device__ __forceinline__ running sink_of(const hd_attend_args &a, int32_t head) {
    running r = {-CUDART_INF_F, 0.0f};
    if (a.sink && head < a.heads) r.max = a.sink[head];
    r.total = r.max != -CUDART_INF_F ? 1.0f : 0.0f;
    return r;
}

struct block_state {
    block_rows rows;
    int32_t row, head, first_col; /* the block's; the warp's first column */
    int q_shift[OWN_HEADS];
    bool quads;
};

static __device__ block_state open_block(uint8_t *shared, const hd_attend_args &a,
                                         int32_t first_col) {
    block_state s;
    const int own = threadIdx.x / WARP * OWN_HEADS;
    s.rows = carve(shared, a);
    s.row = (int32_t)blockIdx.x;
    s.head = (int32_t)blockIdx.y * HEADS;
    s.first_col = first_col + (int32_t)threadIdx.x / WARP * WARP_COLS;
    s.quads = a.k_dim % 4 == 0 && a.v_dim % 4 == 0 && (uintptr_t)a.q % 16 == 0 &&
              (!a.window || ((uintptr_t)a.recent.data % 16 == 0 && a.recent.width % 4 == 0)) &&
              (!a.ratio || ((uintptr_t)a.entries.data % 16 == 0 && a.entries.width % 4 == 0));
    for (int h = 0; h < OWN_HEADS; h++) {
        const int32_t head = s.head + own + h;
        const cuda_act *q = acts(a.q) + ((int64_t)s.row * a.heads + head) * a.k_dim;
        load_row(s.rows.q, own + h, head < a.heads ? q : nullptr, a.k_dim, s.quads, a.q);
    }
    commit_copies();
    wait_copies<0>();
    __syncwarp();
    convert_rows<OWN_HEADS>(s.rows.q, own, s.q_shift);
    return s;
}

/* Keys [first, end) of the row. Ends with all threads past its last use of shared memory but
 * the warp's own slots. */
static __device__ __forceinline__ void make_part(sums *part, const block_state &s,
                                                 const hd_attend_args &a, const key_list &k,
                                                 int32_t first, int32_t end) {
    const int own = threadIdx.x / WARP * OWN_KEYS, lane = threadIdx.x % WARP;
    const block_rows &b = s.rows;
    clear(part);
    load_keys(b.key[0], a, k, first, end, s.quads);
    for (int32_t at = first, i = 0; at < end; at += TILE, i ^= 1) {
        int *key_shift = b.key_shift + i * TILE, shift[OWN_KEYS];
        wait_copies<0>();
        __syncwarp();
        convert_rows<OWN_KEYS>(b.key[i], own, shift);
#pragma unroll
        for (int t = 0; t < OWN_KEYS; t++) {
            if (lane == t) key_shift[own + t] = shift[t];
        }
        __syncthreads();
        if (at + TILE < end) load_keys(b.key[i ^ 1], a, k, at + TILE, end, s.quads);
        float sum[TILE / 8][4] = {};
        score(sum, b, b.key[i], a.k_dim);
        put_scores(b, sum);
        weigh(part->own, b, s.q_shift, key_shift, a.scale, min(TILE, end - at));
        __syncthreads();
        add_values(part->value, b, b.key[i], key_shift, s.first_col, a.v_dim);
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < OWN_HEADS; h++) part->own[h].total = warp_sum(part->own[h].total);
}

/* Element i of a warp's values: its head within the block and its column. */
static __device__ __forceinline__ int head_of(int i) {
    const int lane = threadIdx.x % WARP;
    return i / (4 * N_TILES) * 16 + lane / 4 + i / 2 % 2 * 8;
}

static __device__ __forceinline__ int32_t column_of(const block_state &s, int i) {
    return s.first_col + i / 4 % N_TILES * 8 + (int)threadIdx.x % 4 * 2 + i % 2;
}

static __device__ __forceinline__ void merge_part(sums *all, const sums &part,
                                                  const block_rows &b) {
    const int lane = threadIdx.x % WARP, own = threadIdx.x / WARP * OWN_HEADS;
#pragma unroll
    for (int h = 0; h < OWN_HEADS; h++) {
        float keep, take;
        merge_heads(&all->own[h], part.own[h], &keep, &take);
        if (lane == 0) b.keep[own + h] = keep;
        if (lane == 0) b.take[own + h] = take;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < M_TILES * N_TILES * 4; i++) {
        float *value = &all->value[0][0][0] + i;
        const int h = head_of(i);
        *value = merge_value(*value, (&part.value[0][0][0])[i], b.keep[h], b.take[h]);
    }
    __syncthreads();
}

static __device__ __forceinline__ void put_rows(const sums &all, const block_state &s,
                                                const hd_attend_args &a, bool any) {
    const int lane = threadIdx.x % WARP, own = threadIdx.x / WARP * OWN_HEADS;
#pragma unroll
    for (int h = 0; h < OWN_HEADS; h++) {
        if (lane == 0) s.rows.total[own + h] = all.own[h].total;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < M_TILES * N_TILES * 4; i++) {
        const int32_t head = s.head + head_of(i), col = column_of(s, i);
        if (head >= a.heads || col >= a.v_dim) continue;
        const float value = (&all.value[0][0][0])[i] / s.rows.total[head_of(i)];
        acts(a.out)[((int64_t)s.row * a.heads + head) * a.v_dim + col] =
            narrow(any ? value : 0.0f);
    }
}

/* A block makes and merges all parts of its row. */
static __global__ void __launch_bounds__(BLOCK, 1) attend(hd_attend_args a) {
    extern __shared__ __align__(128) uint8_t shared[];
    const key_list k = list_keys(a, (int32_t)blockIdx.x);
    const block_state s = open_block(shared, a, (int32_t)blockIdx.z * V_COLS);
    sums all, part;
    clear(&all);
#pragma unroll
    for (int h = 0; h < OWN_HEADS; h++) {
        all.own[h] = sink_of(a, s.head + (int32_t)threadIdx.x / WARP * OWN_HEADS + h);
    }
    for (int32_t first = 0; first < k.n; first += k.part) {
        make_part(&part, s, a, k, first, min(first + k.part, k.n));
        merge_part(&all, part, s.rows);
    }
    put_rows(all, s, a, k.n > 0);
}

/* Parts in scratch: [rows, heads, n_parts, v_dim + 2], the maximum and the total at the end. */
struct part_table {
    float *data;
    int32_t n_parts;  /* the most a row can have */
    int32_t n_blocks; /* that share them */
};

static __device__ __forceinline__ float *part_at(const part_table &t, const hd_attend_args &a,
                                                 int32_t row, int32_t head, int32_t part) {
    const int64_t at = ((int64_t)row * a.heads + head) * t.n_parts + part;
    return t.data + at * (a.v_dim + 2);
}

static __device__ __forceinline__ void put_part(const sums &part, const block_state &s,
                                                const part_table &t, const hd_attend_args &a,
                                                int32_t index) {
    const int lane = threadIdx.x % WARP, own = threadIdx.x / WARP * OWN_HEADS;
#pragma unroll
    for (int i = 0; i < M_TILES * N_TILES * 4; i++) {
        const int32_t head = s.head + head_of(i), col = column_of(s, i);
        if (head >= a.heads || col >= a.v_dim) continue;
        part_at(t, a, s.row, head, index)[col] = (&part.value[0][0][0])[i];
    }
#pragma unroll
    for (int h = 0; h < OWN_HEADS; h++) {
        const int32_t head = s.head + own + h;
        if (lane != 0 || head >= a.heads || blockIdx.z >= (unsigned)t.n_blocks) continue;
        float *out = part_at(t, a, s.row, head, index) + a.v_dim;
        out[0] = part.own[h].max;
        out[1] = part.own[h].total;
    }
}

/* Block z takes every n_blocks-th part of its row. */
static __global__ void __launch_bounds__(BLOCK, 1)
    attend_parts(hd_attend_args a, part_table t) {
    extern __shared__ __align__(128) uint8_t shared[];
    const key_list k = list_keys(a, (int32_t)blockIdx.x);
    int32_t index = (int32_t)blockIdx.z % t.n_blocks;
    if (index * k.part >= k.n) return;
    const block_state s = open_block(shared, a, (int32_t)blockIdx.z / t.n_blocks * V_COLS);
    for (; index * k.part < k.n; index += t.n_blocks) {
        const int32_t first = index * k.part;
        sums part;
        make_part(&part, s, a, k, first, min(first + k.part, k.n));
        put_part(part, s, t, a, index);
    }
}

constexpr int MERGE_COLS = 4 * WARP; /* of a warp of merge_parts */

/* A warp per head and MERGE_COLS columns. */
static __global__ void __launch_bounds__(BLOCK) merge_parts(hd_attend_args a, part_table t) {
    const int32_t row = (int32_t)blockIdx.x, lane = (int32_t)threadIdx.x % WARP;
    const int32_t head = (int32_t)(blockIdx.y * WARPS + threadIdx.x / WARP);
    const int32_t first_col = (int32_t)blockIdx.z * MERGE_COLS + lane;
    const key_list k = list_keys(a, row);
    if (head >= a.heads) return;
    running all = sink_of(a, head);
    float value[4] = {};
    const int32_t n = (k.n + k.part - 1) / k.part;
#pragma unroll 4
    for (int32_t i = 0; i < n; i++) {
        const float *from = part_at(t, a, row, head, i);
        const running part = {from[a.v_dim], from[a.v_dim + 1]};
        float keep, take;
        merge_heads(&all, part, &keep, &take);
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int32_t col = first_col + c * WARP;
            const float own = col < a.v_dim ? from[col] : 0.0f;
            value[c] = merge_value(value[c], own, keep, take);
        }
    }
    cuda_act *out = acts(a.out) + ((int64_t)row * a.heads + head) * a.v_dim;
#pragma unroll
    for (int c = 0; c < 4; c++) {
        const int32_t col = first_col + c * WARP;
        if (col < a.v_dim) out[col] = narrow(k.n > 0 ? value[c] / all.total : 0.0f);
    }
}

/* The host does not know positions: as many parts as the tables can hold. */
static int32_t most_parts(const hd_attend_args *a) {
    int64_t keys = a->window;
    if (a->selected) {
        keys += a->n_selected;
    } else if (a->ratio) {
        keys += (int64_t)a->entries.table_stride * a->entries.page_entries;
    }
    const int64_t parts = (keys + MIN_PART - 1) / MIN_PART;
    return parts < MAX_PARTS ? (int32_t)parts : MAX_PARTS;
}

/* False where one block per row is as good, or the parts do not fit into scratch. */
static bool launch_parts(hd_stream *s, const hd_attend_args *a, dim3 grid, size_t bytes) {
    part_table t = {static_cast<float *>(hd_stream_scratch(s, 0, 0)), most_parts(a), 0};
    const size_t each = ((size_t)a->v_dim + 2) * sizeof(float);
    const size_t room = (size_t)hd_stream_workers(s) * hd_stream_scratch_bytes(s);
    const int64_t blocks = (int64_t)grid.x * grid.y * grid.z, fill = 2 * hd_stream_workers(s);
    cudaStream_t queue = hd_cuda_stream(s);
    if (t.n_parts <= 1 || blocks >= fill) return false;
    if ((size_t)a->rows * (size_t)a->heads * (size_t)t.n_parts * each > room) return false;
    const int64_t share = (2 * fill + blocks - 1) / blocks;
    t.n_blocks = share < t.n_parts ? (int32_t)share : t.n_parts;
    cudaFuncSetAttribute(attend_parts, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    const dim3 parts(grid.x, grid.y, grid.z * (unsigned)t.n_blocks);
    attend_parts<<<parts, BLOCK, bytes, queue>>>(*a, t);
    const dim3 merging(grid.x, blocks_for(a->heads, WARPS), blocks_for(a->v_dim, MERGE_COLS));
    merge_parts<<<merging, BLOCK, 0, queue>>>(*a, t);
    return true;
}

void hd_attend_cuda(hd_stream *s, const hd_attend_args *a) {
    const size_t bytes = shared_bytes(a);
    const dim3 grid((unsigned)a->rows, blocks_for(a->heads, HEADS),
                    blocks_for(a->v_dim, V_COLS));
    if (a->rows == 0) return;
    if (bytes > MAX_SHARED) {
        hd_stream_fail(s, HD_EUNSUPPORTED, "attention over keys this wide does not fit a GPU");
        return;
    }
    if (!launch_parts(s, a, grid, bytes)) {
        cudaFuncSetAttribute(attend, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
        attend<<<grid, BLOCK, bytes, hd_cuda_stream(s)>>>(*a);
    }
    hd_cuda_check(s, "attend");
}
