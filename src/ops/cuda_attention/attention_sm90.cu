/* attention_sm90.cu - attention at the real models' widths, from bfloat16 on the tensor cores of sm_90a:
 * MLA's 576 columns with 512 of them as values, and V4's 512.
 *
 * A block takes 64 heads of a row and a part of its keys, in tiles of 64. Three warpgroups: one
 * copies keys, which are bfloat16 in the cache, into shared memory, one makes scores and weights
 * and adds the left half of the values, one the right half. Blocks stay and walk through (row,
 * heads, part) in order.
 *
 * How long the parts of a row are follows from the number of its own keys; each has a maximum, a
 * total and a sum of its own. Four parts of a row are a quad, which the blocks of a cluster have at the same
 * time: each joins a quarter of the columns in order, from the others' shared memory. A second kernel
 * joins several quads. So neither the row's neighbors nor the number of blocks change a bit. Scores are
 * taken times log2(e). */
#include <atomic>

#include "ops/cuda_attention/attention_sm90_internal.cuh"
#include "ops/cuda_attention/attention_load_internal.cuh"
#include "ops/cuda/wgmma_internal.cuh"

/* ---- the warpgroups that compute ---- */

/* The item's queries; both warpgroups' work. */
template <int BOXES>
static __device__ void load_queries(const hd_attention_args &a, const block_memory &m,
                                    const part_item &item) {
    constexpr int UNITS = BOXES * BOX_COLS / 4, EACH = HEADS * UNITS / MATH_THREADS / 2;
    static_assert(HEADS * UNITS == 2 * EACH * MATH_THREADS, "two whole batches");
    const int32_t k_dim = BOXES * BOX_COLS;
    const cuda_act *q = acts(a.q) + ((int64_t)item.row * a.heads + item.first_head) * k_dim;
    for (int first = (int)threadIdx.x; first < HEADS * UNITS; first += EACH * MATH_THREADS) {
        float4 x[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int unit = first + i * MATH_THREADS, head = unit / UNITS;
            const bool live = item.first_head + head < a.heads;
            const float4 *at = reinterpret_cast<const float4 *>(q + head * k_dim);
            x[i] = live ? load_four(at + unit % UNITS) : float4{};
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int unit = first + i * MATH_THREADS;
            const int head = unit / UNITS, four = unit % UNITS; /* two of them are a chunk */
            put_four(m.q + (uint32_t)(four / 16 * BOX_BYTES + four % 2 * 8) +
                         box_at(head, four % 16 / 2),
                     x[i]);
        }
    }
    fence_proxy_async();
}

/* Where joined quads of rows that have several lie: [rows, heads, n_quads, PART_STRIDE]. */
struct quad_table {
    float *data;
    int32_t n_quads; /* the most a row can have */
};

static __device__ __forceinline__ float *quad_at(const quad_table &t,
                                                 const hd_attention_args &a, int32_t row,
                                                 int32_t head, int32_t quad) {
    return t.data + (((int64_t)row * a.heads + head) * t.n_quads + quad) * PART_STRIDE;
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

/* Half of the values, to the output. */
static __device__ __forceinline__ void put_values(const float (&o)[128], const float *factor,
                                                  const hd_attention_args &a,
                                                  const part_item &item, int first_col) {
    const int col = first_col + 2 * (int)(threadIdx.x % 4);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int32_t head = item.first_head + head_of(h);
        if (head >= a.heads) continue;
        float *to = acts(a.out) + ((int64_t)item.row * a.heads + head) * V_DIM;
#pragma unroll
        for (int i = 2 * h; i < 128; i += 4) {
            *reinterpret_cast<float2 *>(to + col + i / 4 * 8) =
                make_float2(o[i] * factor[h], o[i + 1] * factor[h]);
        }
    }
}

/* ---- a quad ---- */

/* Column `col` of a head's sum of a part, which lies where the keys were: [HEADS][V_DIM], eight columns
 * exchanged by the head's number, so that a warp's heads do not meet in a bank. */
static __device__ __forceinline__ int sum_at(int head, int col) {
    return head * V_DIM + (col ^ (head & 7) << 3);
}

/* Half of the values of a part. */
static __device__ __forceinline__ void put_sums(const float (&o)[128], float *sums,
                                                int first_col) {
    const int col = first_col + 2 * (int)(threadIdx.x % 4);
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int i = 2 * h; i < 128; i += 4) {
            *reinterpret_cast<float2 *>(sums + sum_at(head_of(h), col + i / 4 * 8)) =
                make_float2(o[i], o[i + 1]);
        }
    }
}

/* Parts of a head in order: the next one's share of the sum so far, and its own. */
static __device__ __forceinline__ void join_next(running *all, float own_max, float own_total,
                                                 float *keep, float *take) {
    const float top = fmaxf(all->max, own_max), base = top == -CUDART_INF_F ? 0.0f : top;
    *keep = exp2_of(all->max - base);
    *take = exp2_of(own_max - base);
    *all = {top, fmaf(own_total, *take, __fmul_rn(all->total, *keep))};
}

static __device__ __forceinline__ void add_joined(float4 *sum, float4 x, float keep,
                                                  float take) {
    sum->x = fmaf(x.x, take, __fmul_rn(sum->x, keep));
    sum->y = fmaf(x.y, take, __fmul_rn(sum->y, keep));
    sum->z = fmaf(x.z, take, __fmul_rn(sum->z, keep));
    sum->w = fmaf(x.w, take, __fmul_rn(sum->w, keep));
}

/* A sum of parts begins with the sink. */
static __device__ __forceinline__ running sink_of(const hd_attention_args &a, int32_t head) {
    const float sink = a.sink ? a.sink[head] * LOG2_E : -CUDART_INF_F;
    return {sink, sink == -CUDART_INF_F ? 0.0f : 1.0f};
}

static __device__ __forceinline__ float4 scaled(float4 x, float by) {
    return make_float4(x.x * by, x.y * by, x.z * by, x.w * by);
}

/* The block's quarter of the columns, of the quad's four parts: to the output, or, of one quad of several,
 * to scratch. A warp has every eighth head. */
static __device__ __forceinline__ void join_quad(const hd_attention_args &a,
                                                 const block_memory &m, const quad_table &t,
                                                 const part_item &item, int32_t n_parts) {
    constexpr int COLS = V_DIM / QUAD, WARPS = MATH_THREADS / WARP;
    const int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP;
    const int col = (int)cluster_rank() * COLS + 4 * lane;
    const bool last = n_parts == QUAD;
    const int32_t n_heads = min(a.heads - item.first_head, HEADS);
#pragma unroll 2
    for (int h = warp; h < n_heads; h += WARPS) {
        const int32_t head = item.first_head + h;
        float4 x[QUAD], own[QUAD];
#pragma unroll
        for (unsigned i = 0; i < QUAD; i++) {
            own[i] = *cluster_at(m.stats + h, i);
            x[i] = *reinterpret_cast<const float4 *>(cluster_at(m.sums + sum_at(h, col), i));
        }
        running all = last ? sink_of(a, head) : running{-CUDART_INF_F, 0.0f};
        float4 sum = {};
        bool any = false;
#pragma unroll
        for (int i = 0; i < QUAD; i++) {
            float keep, take;
            join_next(&all, own[i].x, own[i].y, &keep, &take);
            add_joined(&sum, x[i], keep, take);
            any = any || own[i].z != 0.0f;
        }
        if (last) {
            cuda_act *out = acts(a.out) + ((int64_t)item.row * a.heads + head) * V_DIM;
            *reinterpret_cast<float4 *>(out + col) = scaled(sum, any ? 1.0f / all.total : 0.0f);
        } else {
            float *to = quad_at(t, a, item.row, head, item.part / QUAD);
            *reinterpret_cast<float4 *>(to + col) = sum;
            if (col == 0) {
                *reinterpret_cast<float4 *>(to + V_DIM) =
                    make_float4(all.max, all.total, any ? 1.0f : 0.0f, 0.0f);
            }
        }
    }
}

/* Of a part of a quad; both warpgroups, as the one that loads does (await_joins). */
static __device__ __forceinline__ void put_part(const float (&o)[128],
                                                const hd_attention_args &a,
                                                const block_memory &m, const quad_table &t,
                                                const part_item &item, int32_t n_parts,
                                                int first_col) {
    put_sums(o, m.sums, first_col);
    cluster_sync();
    join_quad(a, m, t, item, n_parts);
    cluster_arrive_read();
    cluster_wait_read();
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

/* All lanes have read: a lane arrives for its warp. */
static __device__ __forceinline__ void release(const block_memory &m, tile_count *tile) {
    __syncwarp();
    if (threadIdx.x % WARP == 0) mbarrier_arrive(m.empty + 8 * tile->stage());
    tile->n++;
}

/* The first warpgroup's share of a part of n tiles. */
template <int BOXES>
static __device__ __forceinline__ void compute_left(const hd_attention_args &a,
                                                    const block_memory &m, const quad_table &t,
                                                    const part_item &item, int32_t n_parts,
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
        const uint64_t k = box_descriptor(keys), v = transposed_descriptor(keys, BOX_BYTES);
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
    const bool whole = n_parts == 1;
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        run[h].total = over_quad(run[h].total, false);
        const int32_t head = item.first_head + head_of(h);
        factor[h] = whole ? factor_of(a, head, run[h], any) : 1.0f;
        if (threadIdx.x % 4 != 0) continue;
        m.keep[head_of(h)] = factor[h];
        m.stats[head_of(h)] = make_float4(run[h].max, run[h].total, any ? 1.0f : 0.0f, 0.0f);
    }
    bar_sync(Q_BARRIER, MATH_THREADS); /* nobody reads keys or weights now */
    if (whole) {
        put_values(o, factor, a, item, 0);
    } else {
        put_part(o, a, m, t, item, n_parts, 0);
    }
}

/* The second warpgroup's. */
template <int BOXES>
static __device__ __forceinline__ void compute_right(const hd_attention_args &a,
                                                     const block_memory &m, const quad_table &t,
                                                     const part_item &item, int32_t n_parts,
                                                     int32_t n_tiles, tile_count *tile) {
    const uint64_t p = box_descriptor(m.weights);
    float o[128] = {}, keep[2];
    for (int32_t i = 0; i < n_tiles; i++) {
        const uint32_t keys = m.keys + tile->stage() * TILE_BYTES<BOXES>;
        const uint64_t v = transposed_descriptor(keys + V_BOXES / 2 * BOX_BYTES, BOX_BYTES);
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
    if (n_parts == 1) {
        put_values(o, keep, a, item, HALF_COLS);
    } else {
        put_part(o, a, m, t, item, n_parts, HALF_COLS);
    }
}

/* A warpgroup's half of the values of all of the block's items. */
template <int BOXES, bool LEFT>
static __device__ __forceinline__ void compute_items(const hd_attention_args &a,
                                                     const block_memory &m, const quad_table &t,
                                                     const part_plan &plan) {
    item_walk walk = first_item(a, plan);
    tile_count tile = {};
    int32_t row = -1, head = -1;
    for (;;) {
        const part_item item = next_item(&walk, a, plan);
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
            compute_left<BOXES>(a, m, t, item, k.n_parts, n_tiles, &tile);
        } else {
            compute_right<BOXES>(a, m, t, item, k.n_parts, n_tiles, &tile);
        }
    }
}

/* Of a thread of each warpgroup. Together they have those of the launch: a warpgroup that asks for more waits
 * forever. */
template <bool PACKED>
constexpr int LEFT_REGISTERS = PACKED ? 216 : 224;
template <bool PACKED>
constexpr int RIGHT_REGISTERS = PACKED ? 176 : 208;
template <bool PACKED>
constexpr int LOAD_REGISTERS = PACKED ? 112 : 72;
constexpr int LAUNCH_REGISTERS = 65536 / THREADS / 8 * 8;

template <int BOXES, bool PACKED>
static __global__ void __launch_bounds__(THREADS, 1)
    attention_tiles(const hd_attention_args a, const quad_table t, const part_plan plan) {
    static_assert(LEFT_REGISTERS<PACKED> + RIGHT_REGISTERS<PACKED> + LOAD_REGISTERS<PACKED> <=
                  3 * LAUNCH_REGISTERS);
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
    begin_early(a.rows);
    if (group == 0) {
        setmaxnreg_inc<LEFT_REGISTERS<PACKED>>();
        compute_items<BOXES, true>(a, m, t, plan);
    } else if (group == 1) {
        setmaxnreg_inc<RIGHT_REGISTERS<PACKED>>();
        compute_items<BOXES, false>(a, m, t, plan);
    } else {
        setmaxnreg_dec<LOAD_REGISTERS<PACKED>>();
        if constexpr (PACKED) {
            load_packed_tiles<BOXES>(a, m, plan);
        } else {
            load_tiles<BOXES>(a, m, plan);
        }
    }
}

/* ---- joining the quads of a row ---- */

/* A warp per head. */
static __global__ void __launch_bounds__(BLOCK) join_quads(hd_attention_args a, quad_table t) {
    constexpr int EACH = V_DIM / WARP / 4;
    begin_early(a.rows);
    const int32_t row = (int32_t)blockIdx.x, lane = (int32_t)threadIdx.x % WARP;
    const int32_t head = (int32_t)(blockIdx.y * (BLOCK / WARP) + threadIdx.x / WARP);
    const int32_t n = keys_of(a, row).n_parts / QUAD;
    if (n <= 1 || head >= a.heads) return;
    running all = sink_of(a, head);
    bool any = false;
    float4 sum[EACH] = {};
#pragma unroll 4
    for (int32_t i = 0; i < n; i++) {
        const float4 *quad = reinterpret_cast<const float4 *>(quad_at(t, a, row, head, i));
        const float4 own = quad[V_DIM / 4];
        float keep, take;
        join_next(&all, own.x, own.y, &keep, &take);
        any = any || own.z != 0.0f;
#pragma unroll
        for (int c = 0; c < EACH; c++) add_joined(&sum[c], quad[c * WARP + lane], keep, take);
    }
    const float factor = any ? 1.0f / all.total : 0.0f;
    float4 *out =
        reinterpret_cast<float4 *>(acts(a.out) + ((int64_t)row * a.heads + head) * V_DIM);
#pragma unroll
    for (int c = 0; c < EACH; c++) out[c * WARP + lane] = scaled(sum[c], factor);
}

/* ---- launching ---- */

static bool is_packed(const hd_paged &p, int32_t width) {
    const bool mla = width == 576;
    return p.rows.type == HD_E4M3 && (uintptr_t)p.rows.data % 8 == 0 && p.width == width &&
           p.format.plain == BOX_COLS &&
           p.format.group == (mla ? SCALE_COLS<9> : SCALE_COLS<8>);
}

static bool is_aligned(const hd_paged &p, int32_t width) {
    return p.rows.type == HD_BF16 && (uintptr_t)p.rows.data % 16 == 0 && p.width % 8 == 0 &&
           p.width >= width;
}

static bool are_lists(const hd_attention_args *a, bool (*fits)(const hd_paged &, int32_t)) {
    return (!a->window || fits(a->recent, a->k_dim)) &&
           (!a->ratio || fits(a->entries, a->k_dim));
}

/* With fewer heads, three quarters of a tile of 64 would be empty. */
constexpr int SMALL_M_HEADS = 16;

bool attention_fits_sm90(const hd_attention_args *a) {
    return hd_cuda_is_sm90() && a->heads > SMALL_M_HEADS &&
           (a->k_dim == 576 || a->k_dim == 512) && a->v_dim == V_DIM &&
           (uintptr_t)a->q.data % 16 == 0 && (uintptr_t)a->out.data % 16 == 0 &&
           (are_lists(a, is_aligned) || are_lists(a, is_packed));
}

/* How many clusters of a kernel that has a multiprocessor for each block the current GPU has room for; asked
 * once of each. */
template <int BOXES, bool PACKED>
static unsigned clusters_at_once() {
    constexpr int MAX_GPUS = 64;
    static std::atomic<int> known[MAX_GPUS];
    int gpu = 0, n = 0;
    cudaGetDevice(&gpu);
    if (gpu < MAX_GPUS && known[gpu] > 0) return (unsigned)known[gpu];
    cudaLaunchAttribute how = {};
    how.id = cudaLaunchAttributeClusterDimension;
    how.val.clusterDim = {QUAD, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(QUAD);
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = SHARED_BYTES<BOXES>;
    config.attrs = &how;
    config.numAttrs = 1;
    if (cudaOccupancyMaxActiveClusters(&n, attention_tiles<BOXES, PACKED>, &config) !=
        cudaSuccess) {
        cudaGetLastError();
    }
    n = n > 0 ? n : 1;
    if (gpu < MAX_GPUS) known[gpu] = n;
    return (unsigned)n;
}

template <int BOXES, bool PACKED>
static void launch(hd_stream *s, const hd_attention_args &a, const quad_table &t, bool quads) {
    const int64_t groups = blocks_for(a.heads, HEADS), workers = hd_stream_workers(s);
    const part_plan plan = {(int32_t)groups, quads};
    const int64_t most = a.rows * groups * (quads ? t.n_quads : 1);
    cudaStream_t queue = hd_cuda_stream(s);
    hd_cuda_allow_shared((const void *)attention_tiles<BOXES, PACKED>, SHARED_BYTES<BOXES>);
    const int64_t fit = quads ? clusters_at_once<BOXES, PACKED>() : workers;
    const unsigned grid = (unsigned)(most < fit ? most : fit) * (quads ? QUAD : 1);
    launch_early(queue, a.rows, attention_tiles<BOXES, PACKED>, dim3(grid), THREADS,
                 SHARED_BYTES<BOXES>, quads ? QUAD : 1, a, t, plan);
    if (t.n_quads == 1) return;
    const dim3 joining((unsigned)a.rows, blocks_for(a.heads, BLOCK / WARP));
    launch_early(queue, a.rows, join_quads, joining, BLOCK, 0, 1, a, t);
}

/* As many rows at once as have room for their quads. */
void attention_sm90(hd_stream *s, const hd_attention_args *a) {
    const int32_t n_parts = parts_of(most_keys(a), a->heads),
                  n_quads = n_parts < QUAD ? 1 : n_parts / QUAD;
    const quad_table t = {static_cast<float *>(hd_stream_scratch(s, 0, 0)), n_quads};
    const size_t room = (size_t)hd_stream_workers(s) * hd_stream_scratch_bytes(s);
    const size_t each = (size_t)a->heads * (size_t)n_quads * PART_STRIDE * sizeof(float);
    const int64_t fit = n_quads == 1 ? a->rows : (int64_t)(room / each);
    const int32_t at_once = fit < a->rows ? (int32_t)fit : a->rows;
    const bool mla = a->k_dim == 576, packed = are_lists(a, is_packed);
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
        if (packed) {
            mla ? launch<9, true>(s, part, t, n_parts > 1)
                : launch<8, true>(s, part, t, n_parts > 1);
        } else {
            mla ? launch<9, false>(s, part, t, n_parts > 1)
                : launch<8, false>(s, part, t, n_parts > 1);
        }
    }
    hd_cuda_check(s, "attention");
}
