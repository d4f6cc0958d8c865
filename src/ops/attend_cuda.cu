/* attend_cuda.cu - softmax attention of rows over paged keys.
 *
 * A block takes NH heads per warp of one row. Keys come in tiles of one per lane, held in
 * shared memory for all heads; a lane scores its key, then owns columns of the weighted sum.
 * SPLIT keys make a part with a maximum, a total and a sum of its own, and a row's parts are
 * merged in order: by the block that made them all, or, where rows are too few to fill the GPU,
 * by a second kernel after blocks of one part each. The steps are the same, so neither the
 * row's neighbors nor NH nor the way change a bit. Bounded by shared-memory reads. */
#include "ops/keys_internal.cuh"

constexpr int WARPS = BLOCK / WARP, SPLIT = 4 * TILE;
constexpr int V_PER_LANE = 16; /* columns of the sum; a wider value takes several blocks */
constexpr int V_COLS = V_PER_LANE * WARP;
constexpr size_t MAX_SHARED = 220 * 1024;

/* The keys of one row, in the order of the contract. */
struct key_list {
    const int32_t *chosen; /* NULL: all entries */
    int32_t seq, first_recent, n_recent, n;
};

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
    return k;
}

static __device__ __forceinline__ const cuda_act *key_at(const hd_attend_args &a,
                                                         const key_list &k, int32_t i) {
    if (i < k.n_recent) return paged_entry(a.recent, k.seq, k.first_recent + i);
    const int32_t e = i - k.n_recent;
    return paged_entry(a.entries, k.seq, k.chosen ? k.chosen[e] : e);
}

/* Keys [first, first + TILE) into shared memory, a warp per key; zero beyond end and width.
 * quads: keys are whole and aligned vectors of four. */
static __device__ void load_keys(float *keys, const hd_attend_args &a, const key_list &k,
                                 int32_t first, int32_t end, int32_t width, bool quads) {
    const int lane = threadIdx.x % WARP, stride = key_stride(width);
    for (int t = threadIdx.x / WARP; t < TILE; t += WARPS) {
        const bool live = first + t < end;
        const cuda_act *key = live ? key_at(a, k, first + t) : nullptr;
        float *to = keys + t * stride;
        if (quads) {
            for (int32_t c = 4 * lane; c < width; c += 4 * WARP) {
                copy_quad(to + c, live ? key + c : nullptr, acts(a.q));
            }
        } else {
            for (int32_t c = lane; c < stride; c += WARP) {
                to[c] = live && c < width ? wide(key[c]) : 0.0f;
            }
        }
    }
    asm volatile("cp.async.commit_group;");
}

/* What a warp carries for one head, of a part or of all parts so far. */
struct running {
    float max;
    float total; /* of a part: this lane's share; of all: the sum */
    float sum[V_PER_LANE];
};

static __device__ __forceinline__ running nothing(void) {
    running r = {};
    r.max = -CUDART_INF_F;
    return r;
}

/* Before any key: the sink, which has no value. */
static __device__ __forceinline__ running sink_of(const hd_attend_args &a, int32_t head) {
    running r = nothing();
    if (a.sink && head < a.heads) r.max = a.sink[head];
    r.total = r.max != -CUDART_INF_F ? 1.0f : 0.0f;
    return r;
}

/* The next part, its total summed, behind what there is. */
static __device__ __forceinline__ void merge(running *all, const running &part) {
    const float top = fmaxf(all->max, part.max);
    const float shift = top == -CUDART_INF_F ? 0.0f : top; /* nothing but -inf so far */
    const float keep = expf(all->max - shift), take = expf(part.max - shift);
    all->max = top;
    all->total = fmaf(part.total, take, __fmul_rn(all->total, keep));
#pragma unroll
    for (int i = 0; i < V_PER_LANE; i++) {
        all->sum[i] = fmaf(part.sum[i], take, __fmul_rn(all->sum[i], keep));
    }
}

/* Column of sum[i] of this lane. */
static __device__ __forceinline__ int32_t column_of(int32_t first_col, int i) {
    return first_col + 4 * (WARP * (i / 4) + (int32_t)threadIdx.x % WARP) + i % 4;
}

static __device__ __forceinline__ void put_row(const hd_attend_args &a, const running &all,
                                               int32_t row, int32_t head, int32_t first_col,
                                               bool any) {
    if (head >= a.heads) return;
    cuda_act *out = acts(a.out) + ((int64_t)row * a.heads + head) * a.v_dim;
#pragma unroll
    for (int i = 0; i < V_PER_LANE; i++) {
        const int32_t c = column_of(first_col, i);
        if (c < a.v_dim) out[c] = narrow(any ? all.sum[i] / all.total : 0.0f);
    }
}

/* sum += p . values, over the tile's n keys in order; lane l has columns 4 * l + 128 * j. */
template <int NH>
static __device__ __forceinline__ void add_values(running *run, const float *p,
                                                  const float *keys, int32_t stride,
                                                  int32_t first_col, int32_t v_end, int n) {
    const int lane = threadIdx.x % WARP;
    for (int t = 0; t < n; t++) {
        const float *value = keys + t * stride + first_col + 4 * lane;
        float weight[NH];
#pragma unroll
        for (int h = 0; h < NH; h++) weight[h] = p[h * TILE + t];
#pragma unroll
        for (int j = 0; j < V_PER_LANE / 4; j++) {
            if (first_col + 4 * WARP * j >= v_end) break;
            const float4 v = first_col + 4 * (WARP * j + lane) < v_end
                                 ? *reinterpret_cast<const float4 *>(value + 4 * WARP * j)
                                 : float4{};
#pragma unroll
            for (int h = 0; h < NH; h++) {
                run[h].sum[4 * j] = fmaf(weight[h], v.x, run[h].sum[4 * j]);
                run[h].sum[4 * j + 1] = fmaf(weight[h], v.y, run[h].sum[4 * j + 1]);
                run[h].sum[4 * j + 2] = fmaf(weight[h], v.z, run[h].sum[4 * j + 2]);
                run[h].sum[4 * j + 3] = fmaf(weight[h], v.w, run[h].sum[4 * j + 3]);
            }
        }
    }
}

/* This lane's weight of its key, after rescaling what came before. */
static __device__ __forceinline__ float weigh(running *run, float score) {
    const float top = fmaxf(run->max, warp_max(score));
    const float shift = top == -CUDART_INF_F ? 0.0f : top; /* nothing but -inf so far */
    const float keep = expf(run->max - shift), p = expf(score - shift);
    run->max = top;
    run->total = run->total * keep + p;
#pragma unroll
    for (int i = 0; i < V_PER_LANE; i++) run->sum[i] *= keep;
    return p;
}

/* Shared memory of a block and where its warp stands. */
template <int NH>
struct block_state {
    float *keys[2], *q, *p;
    int32_t row, head, first_col, width, stride;
    bool quads;
    static constexpr int BUFFERS = NH == 1 ? 2 : 1; /* tiles: one is read, one is on its way */
};

template <int NH>
static __device__ block_state<NH> open_block(float *shared, const hd_attend_args &a,
                                             int32_t first_col) {
    block_state<NH> b;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int32_t q_width = padded(a.k_dim);
    b.row = (int32_t)blockIdx.x;
    b.head = ((int32_t)blockIdx.y * WARPS + warp) * NH;
    b.first_col = first_col;
    b.width = max(a.k_dim, a.v_dim);
    b.stride = key_stride(b.width);
    b.quads = b.width % 4 == 0 && a.k_dim % 4 == 0 && (!a.window || in_quads(a.recent)) &&
              (!a.ratio || in_quads(a.entries)) && (uintptr_t)a.q % 16 == 0;
    b.keys[0] = shared;
    b.keys[1] = shared + (block_state<NH>::BUFFERS - 1) * TILE * b.stride;
    float *queries = b.keys[1] + TILE * b.stride;
    b.q = queries + warp * NH * q_width;
    b.p = queries + WARPS * NH * q_width + warp * NH * TILE;
    for (int h = 0; h < NH; h++) {
        const bool live = b.head + h < a.heads;
        const cuda_act *from = acts(a.q) + ((int64_t)b.row * a.heads + b.head + h) * a.k_dim;
        for (int32_t c = lane; c < q_width; c += WARP) {
            b.q[h * q_width + c] = live && c < a.k_dim ? wide(from[c]) : 0.0f;
        }
    }
    return b;
}

/* One part: keys [first, end) of the row, at most SPLIT. */
template <int NH>
static __device__ __forceinline__ void make_part(running *run, const block_state<NH> &b,
                                                 const hd_attend_args &a, const key_list &k,
                                                 int32_t first, int32_t end) {
    constexpr bool AHEAD = block_state<NH>::BUFFERS == 2;
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int h = 0; h < NH; h++) run[h] = nothing();
    load_keys(b.keys[0], a, k, first, end, b.width, b.quads);
    for (int32_t at = first, i = 0; at < end; at += TILE, i++) {
        const int n = min(TILE, end - at);
        const float *keys = AHEAD ? b.keys[i % 2] : b.keys[0];
        if (AHEAD && at + TILE < end) {
            load_keys(b.keys[(i + 1) % 2], a, k, at + TILE, end, b.width, b.quads);
            wait_copies<1>();
        } else {
            wait_copies<0>();
        }
        __syncthreads();
        float score[NH];
        score_tile<NH>(score, b.q, keys + lane * b.stride, a.k_dim);
#pragma unroll
        for (int h = 0; h < NH; h++) {
            const float s = lane < n ? score[h] * a.scale : -CUDART_INF_F;
            b.p[h * TILE + lane] = weigh(&run[h], s);
        }
        __syncwarp();
        add_values<NH>(run, b.p, keys, b.stride, b.first_col, a.v_dim, n);
        __syncthreads(); /* the tile is done with */
        if (!AHEAD && at + TILE < end) {
            load_keys(b.keys[0], a, k, at + TILE, end, b.width, b.quads);
        }
    }
#pragma unroll
    for (int h = 0; h < NH; h++) run[h].total = warp_sum(run[h].total);
}

/* A block makes and merges all parts of its row. */
template <int NH>
static __global__ void __launch_bounds__(BLOCK, 1) attend(hd_attend_args a) {
    extern __shared__ __align__(16) float shared[];
    const block_state<NH> b = open_block<NH>(shared, a, (int32_t)blockIdx.z * V_COLS);
    const key_list k = list_keys(a, b.row);
    running all[NH], part[NH];
#pragma unroll
    for (int h = 0; h < NH; h++) all[h] = sink_of(a, b.head + h);
    for (int32_t first = 0; first < k.n; first += SPLIT) {
        make_part<NH>(part, b, a, k, first, min(first + SPLIT, k.n));
#pragma unroll
        for (int h = 0; h < NH; h++) merge(&all[h], part[h]);
    }
#pragma unroll
    for (int h = 0; h < NH; h++) put_row(a, all[h], b.row, b.head + h, b.first_col, k.n > 0);
}

/* Parts in scratch: [rows, heads, n_parts, v_dim + 2], the maximum and the total at the end. */
struct part_table {
    float *data;
    int32_t n_parts; /* the most a row can have */
};

static __device__ __forceinline__ float *part_at(const part_table &t, const hd_attend_args &a,
                                                 int32_t row, int32_t head, int32_t part) {
    const int64_t at = ((int64_t)row * a.heads + head) * t.n_parts + part;
    return t.data + at * (a.v_dim + 2);
}

static __global__ void __launch_bounds__(BLOCK, 1)
    attend_parts(hd_attend_args a, part_table t) {
    extern __shared__ __align__(16) float shared[];
    const int32_t index = (int32_t)blockIdx.z % t.n_parts, first = index * SPLIT;
    const key_list k = list_keys(a, (int32_t)blockIdx.x);
    if (first >= k.n) return;
    const block_state<1> b = open_block<1>(shared, a, (int32_t)blockIdx.z / t.n_parts * V_COLS);
    running part;
    make_part<1>(&part, b, a, k, first, min(first + SPLIT, k.n));
    if (b.head >= a.heads) return;
    float *out = part_at(t, a, b.row, b.head, index);
#pragma unroll
    for (int i = 0; i < V_PER_LANE; i++) {
        const int32_t c = column_of(b.first_col, i);
        if (c < a.v_dim) out[c] = part.sum[i];
    }
    if (threadIdx.x % WARP == 0 && b.first_col == 0) {
        out[a.v_dim] = part.max;
        out[a.v_dim + 1] = part.total;
    }
}

/* A warp per head. */
static __global__ void __launch_bounds__(BLOCK) merge_parts(hd_attend_args a, part_table t) {
    const int32_t row = (int32_t)blockIdx.x, first_col = (int32_t)blockIdx.z * V_COLS;
    const int32_t head = (int32_t)(blockIdx.y * WARPS + threadIdx.x / WARP);
    const key_list k = list_keys(a, row);
    if (head >= a.heads) return;
    running all = sink_of(a, head);
    for (int32_t i = 0; i * SPLIT < k.n; i++) {
        const float *from = part_at(t, a, row, head, i);
        running part;
        part.max = from[a.v_dim];
        part.total = from[a.v_dim + 1];
#pragma unroll
        for (int c = 0; c < V_PER_LANE; c++) {
            const int32_t col = column_of(first_col, c);
            part.sum[c] = col < a.v_dim ? from[col] : 0.0f;
        }
        merge(&all, part);
    }
    put_row(a, all, row, head, first_col, k.n > 0);
}

template <int NH>
static size_t shared_bytes(const hd_attend_args *a) {
    const int32_t width = a->k_dim > a->v_dim ? a->k_dim : a->v_dim;
    const size_t keys = (size_t)block_state<NH>::BUFFERS * TILE * (size_t)key_stride(width);
    const size_t queries = (size_t)WARPS * NH * (size_t)padded(a->k_dim);
    return (keys + queries + (size_t)WARPS * NH * TILE) * sizeof(float);
}

template <int NH>
static dim3 grid_of(const hd_attend_args *a) {
    return dim3((unsigned)a->rows, blocks_for(a->heads, NH * WARPS),
                blocks_for(a->v_dim, V_COLS));
}

template <int NH>
static void launch(hd_stream *s, const hd_attend_args *a) {
    const size_t bytes = shared_bytes<NH>(a);
    cudaStream_t queue = hd_cuda_stream(s);
    cudaFuncSetAttribute(attend<NH>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    attend<NH><<<grid_of<NH>(a), BLOCK, bytes, queue>>>(*a);
}

/* The host does not know positions: as many as the tables can hold. */
static int32_t most_parts(const hd_attend_args *a) {
    int64_t keys = a->window;
    if (a->selected) {
        keys += a->n_selected;
    } else if (a->ratio) {
        keys += (int64_t)a->entries.table_stride * a->entries.page_entries;
    }
    return (int32_t)((keys + SPLIT - 1) / SPLIT);
}

/* False where the parts do not fit into scratch or the grid. */
static bool launch_parts(hd_stream *s, const hd_attend_args *a) {
    const part_table t = {static_cast<float *>(hd_stream_scratch(s, 0, 0)), most_parts(a)};
    const size_t each = ((size_t)a->v_dim + 2) * sizeof(float), bytes = shared_bytes<1>(a);
    const size_t room = (size_t)hd_stream_workers(s) * hd_stream_scratch_bytes(s);
    const dim3 grid = grid_of<1>(a);
    cudaStream_t queue = hd_cuda_stream(s);
    if ((size_t)a->rows * (size_t)a->heads * (size_t)t.n_parts * each > room) return false;
    if (t.n_parts == 0 || (int64_t)t.n_parts * grid.z > 65535) return false;
    cudaFuncSetAttribute(attend_parts, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    const dim3 parts(grid.x, grid.y, grid.z * (unsigned)t.n_parts);
    attend_parts<<<parts, BLOCK, bytes, queue>>>(*a, t);
    merge_parts<<<grid, BLOCK, 0, queue>>>(*a, t);
    return true;
}

/* Many rows: heads share the tile's reads. Few: more blocks, of one part each. */
void hd_attend_cuda(hd_stream *s, const hd_attend_args *a) {
    const int64_t blocks = (int64_t)a->rows * a->heads / WARPS, fill = hd_stream_workers(s);
    if (a->rows == 0) return;
    if (shared_bytes<1>(a) > MAX_SHARED) {
        hd_stream_fail(s, HD_EUNSUPPORTED, "attention over keys this wide does not fit a GPU");
        return;
    }
    if (blocks >= 4 * fill && shared_bytes<4>(a) <= MAX_SHARED) {
        launch<4>(s, a);
    } else if (blocks >= 2 * fill || !launch_parts(s, a)) {
        launch<1>(s, a);
    }
    hd_cuda_check(s, "attend");
}
