/* rows_cuda.cu - row-wise operators: copies, norms, rotations, the gate. Bounded by memory. */
#include "ops/cuda/block_internal.cuh"
#include "ops/cuda/entries_internal.cuh"
#include "ops/cuda/weight_internal.cuh"
#include "ops/fused_internal.h"

/* A thread per element: element i of n, rows of `cols`. */
static __device__ __forceinline__ int64_t element() {
    return (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
}

static __global__ void embed(hd_embed_args a, hd_weight w) {
    begin_kernel();
    const int64_t i = element();
    const int32_t cols = w.cols;
    if (i >= (int64_t)a.rows * cols) return;
    const int32_t r = (int32_t)(i / cols), c = (int32_t)(i % cols);
    const cuda_act value = narrow(weight_at(w, a.tokens[r], c));
    for (int32_t k = 0; k < a.copies; k++) {
        acts(a.out)[((int64_t)r * a.copies + k) * cols + c] = value;
    }
}

void hd_embed_cuda(hd_stream *s, const hd_embed_args *a) {
    const int64_t n = (int64_t)a->rows * a->table->cols;
    if (n == 0) return;
    launch_kernel(hd_cuda_stream(s), embed, dim3(blocks_for(n, BLOCK)), BLOCK, 0, 1, *a,
                  *a->table);
    hd_cuda_check(s, "embed");
}

static __global__ void gather(hd_gather_args a) {
    begin_kernel();
    const int64_t i = element();
    if (i >= (int64_t)a.rows * a.cols) return;
    const int64_t r = i / a.cols, c = i % a.cols;
    acts(a.out)[i] = acts(a.x)[(int64_t)a.index[r] * a.cols + c];
}

void hd_gather_cuda(hd_stream *s, const hd_gather_args *a) {
    const int64_t n = (int64_t)a->rows * a->cols;
    if (n == 0) return;
    launch_kernel(hd_cuda_stream(s), gather, dim3(blocks_for(n, BLOCK)), BLOCK, 0, 1, *a);
    hd_cuda_check(s, "gather");
}

/* A block has some columns of all rows. Rows go forward, so what it reads of later rows is there as
 * long as the rows before them are written last. */
static __global__ void __launch_bounds__(BLOCK) keep_rows(hd_keep_rows_args a) {
    constexpr int EACH = 8;
    begin_kernel();
    uint32_t *x = static_cast<uint32_t *>(a.x);
    const int32_t col0 = (int32_t)blockIdx.x * WARP, cols = min(WARP, a.words - col0);
    const int32_t at_once = EACH * BLOCK / cols;
    for (int32_t first = 0; first < a.rows; first += at_once) {
        const int32_t n = min(at_once, a.rows - first) * cols;
        uint32_t own[EACH];
#pragma unroll
        for (int k = 0; k < EACH; k++) {
            const int32_t i = (int32_t)threadIdx.x + k * BLOCK;
            if (i >= n) break;
            own[k] = x[(int64_t)a.kept[first + i / cols] * a.words + col0 + i % cols];
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < EACH; k++) {
            const int32_t i = (int32_t)threadIdx.x + k * BLOCK;
            if (i >= n) break;
            x[(int64_t)(first + i / cols) * a.words + col0 + i % cols] = own[k];
        }
        __syncthreads();
    }
}

void hd_keep_rows_cuda(hd_stream *s, const hd_keep_rows_args *a) {
    const unsigned blocks = blocks_for(a->words, WARP);
    if (a->rows == 0 || blocks == 0) return;
    launch_kernel(hd_cuda_stream(s), keep_rows, dim3(blocks), BLOCK, 0, 1, *a);
    hd_cuda_check(s, "keep_rows");
}

static __global__ void add(hd_add_args a) {
    begin_kernel();
    const int64_t i = element();
    if (i >= (int64_t)a.rows * a.cols) return;
    const int64_t r = i / a.cols, c = i % a.cols;
    cuda_act *x = acts(a.x) + i;
    *x = narrow(wide(*x) + wide(acts(a.y)[r / a.repeat * a.cols + c]));
}

void hd_add_cuda(hd_stream *s, const hd_add_args *a) {
    const int64_t n = (int64_t)a->rows * a->cols;
    if (n == 0) return;
    launch_kernel(hd_cuda_stream(s), add, dim3(blocks_for(n, BLOCK)), BLOCK, 0, 1, *a);
    hd_cuda_check(s, "add");
}

/* A block per row; with ADD, x += y before. Sums are double: norms cost little, and their error
 * would reach every element of a row. */
template <int THREADS, bool ADD>
static __global__ void __launch_bounds__(THREADS) rms_norm(hd_rms_norm_args a, hd_rows y) {
    begin_kernel();
    cuda_act *x = acts(a.x) + blockIdx.x * stride_of(a.x, a.cols);
    cuda_act *out = acts(a.out) + blockIdx.x * stride_of(a.out, a.cols);
    const cuda_act *more = ADD ? acts(y) + (int64_t)blockIdx.x * a.cols : nullptr;
    double sum = 0.0;
    float own[NORM_EACH];
    for (int32_t first = threadIdx.x; first < a.cols; first += THREADS * NORM_EACH) {
#pragma unroll
        for (int i = 0; i < NORM_EACH; i++) {
            const int32_t c = first + i * THREADS;
            own[i] = c < a.cols ? wide(x[c]) : 0.0f;
            if (ADD && c < a.cols) own[i] += wide(more[c]);
        }
#pragma unroll
        for (int i = 0; i < NORM_EACH; i++) {
            const int32_t c = first + i * THREADS;
            if (ADD && c < a.cols) x[c] = narrow(own[i]);
            sum = fma((double)own[i], (double)own[i], sum);
        }
    }
    sum = block_sum<THREADS>(sum);
    const float scale = (float)(1.0 / sqrt(sum / a.cols + (double)a.eps));
    for (int32_t first = threadIdx.x; first < a.cols; first += THREADS * NORM_EACH) {
        float weight[NORM_EACH];
#pragma unroll
        for (int i = 0; i < NORM_EACH; i++) {
            const int32_t c = first + i * THREADS;
            own[i] = c < a.cols ? wide(x[c]) : 0.0f;
            weight[i] = c < a.cols && a.weight ? a.weight[c] : 1.0f;
        }
#pragma unroll
        for (int i = 0; i < NORM_EACH; i++) {
            const int32_t c = first + i * THREADS;
            if (c < a.cols) out[c] = narrow(own[i] * scale * weight[i]);
        }
    }
}

constexpr int32_t HELD_ROWS = 64; /* of more, blocks hide each other's waiting */

/* The same of few rows, of at most TURNS * NORM_EACH * THREADS columns, which the block holds: weights are on their
 * way before x is there, and x is read once. */
template <int THREADS, int TURNS, bool ADD>
static __global__ void __launch_bounds__(THREADS, 1)
    rms_norm_held(hd_rms_norm_args a, hd_rows y) {
    constexpr int EACH = TURNS * NORM_EACH;
    cuda_act *x = acts(a.x) + blockIdx.x * stride_of(a.x, a.cols);
    cuda_act *out = acts(a.out) + blockIdx.x * stride_of(a.out, a.cols);
    const cuda_act *more = ADD ? acts(y) + (int64_t)blockIdx.x * a.cols : nullptr;
    float weight[EACH], own[EACH], added[EACH];
    griddepcontrol_launch_dependents();
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int32_t c = (int32_t)threadIdx.x + i * THREADS;
        weight[i] = a.weight ? load_now(a.weight + c, c < a.cols) : 1.0f;
    }
    griddepcontrol_wait();
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int32_t c = (int32_t)threadIdx.x + i * THREADS;
        own[i] = load_now(x + c, c < a.cols);
        added[i] = ADD ? load_now(more + c, c < a.cols) : 0.0f;
    }
    double sum = 0.0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int32_t c = (int32_t)threadIdx.x + i * THREADS;
        if (ADD) own[i] += added[i];
        if (ADD && c < a.cols) x[c] = narrow(own[i]);
        sum = fma((double)own[i], (double)own[i], sum);
    }
    sum = block_sum<THREADS>(sum);
    const float scale = (float)(1.0 / sqrt(sum / a.cols + (double)a.eps));
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int32_t c = (int32_t)threadIdx.x + i * THREADS;
        if (c < a.cols) out[c] = narrow(own[i] * scale * weight[i]);
    }
}

template <bool ADD>
static void launch_norm(hd_stream *s, const hd_rms_norm_args &a, const hd_rows &y) {
    cudaStream_t queue = hd_cuda_stream(s);
    const dim3 grid((unsigned)a.rows);
    if (a.rows == 0) return;
    const bool is_wide = norm_is_wide(a.cols);
    const int32_t turn = (is_wide ? NORM_WIDE : NORM_NARROW) * NORM_EACH;
    if (a.rows > HELD_ROWS || a.cols > 2 * turn) {
        if (is_wide) {
            launch_kernel(queue, rms_norm<NORM_WIDE, ADD>, grid, NORM_WIDE, 0, 1, a, y);
        } else {
            launch_kernel(queue, rms_norm<NORM_NARROW, ADD>, grid, NORM_NARROW, 0, 1, a, y);
        }
    } else if (!is_wide) {
        launch_kernel(queue, rms_norm_held<NORM_NARROW, 1, ADD>, grid, NORM_NARROW, 0, 1, a, y);
    } else if (a.cols <= turn) {
        launch_kernel(queue, rms_norm_held<NORM_WIDE, 1, ADD>, grid, NORM_WIDE, 0, 1, a, y);
    } else {
        launch_kernel(queue, rms_norm_held<NORM_WIDE, 2, ADD>, grid, NORM_WIDE, 0, 1, a, y);
    }
}

void hd_rms_norm_cuda(hd_stream *s, const hd_rms_norm_args *a) {
    launch_norm<false>(s, *a, {});
    hd_cuda_check(s, "rms_norm");
}

void hd_add_norm_cuda(hd_stream *s, const hd_add_norm_args *a) {
    const hd_rms_norm_args norm = ops_add_rms_norm(a);
    if (a->y.data) {
        launch_norm<true>(s, norm, a->y);
    } else {
        launch_norm<false>(s, norm, {});
    }
    hd_cuda_check(s, "add_norm");
}

static __global__ void __launch_bounds__(BLOCK) layer_norm(hd_layer_norm_args a) {
    begin_kernel();
    const cuda_act *x = acts(a.x) + (int64_t)blockIdx.x * a.cols;
    cuda_act *out = acts(a.out) + (int64_t)blockIdx.x * a.cols;
    double mean = 0.0, var = 0.0;
    for (int32_t c = threadIdx.x; c < a.cols; c += BLOCK) mean += (double)wide(x[c]);
    mean = block_sum<BLOCK>(mean) / a.cols;
    for (int32_t c = threadIdx.x; c < a.cols; c += BLOCK) {
        const double off = (double)wide(x[c]) - mean;
        var += off * off;
    }
    var = block_sum<BLOCK>(var) / a.cols;
    const double scale = 1.0 / sqrt(var + (double)a.eps);
    for (int32_t c = threadIdx.x; c < a.cols; c += BLOCK) {
        const float unit = (float)(((double)wide(x[c]) - mean) * scale);
        out[c] = narrow(unit * a.weight[c] + a.bias[c]);
    }
}

void hd_layer_norm_cuda(hd_stream *s, const hd_layer_norm_args *a) {
    if (a->rows == 0) return;
    launch_kernel(hd_cuda_stream(s), layer_norm, dim3((unsigned)a->rows), BLOCK, 0, 1, *a);
    hd_cuda_check(s, "layer_norm");
}

static __global__ void rope_table(hd_rope_table_args a) {
    begin_kernel();
    const int64_t i = element();
    if (i >= (int64_t)a.rows * a.pairs) return;
    const int64_t r = i / a.pairs, pair = i % a.pairs;
    const float angle = rope_angle(a.position[r], a.freq[pair]);
    float *out = a.out + r * 2 * a.pairs;
    out[pair] = cosf(angle) * a.scale;
    out[a.pairs + pair] = sinf(angle) * a.scale;
}

void hd_rope_table_cuda(hd_stream *s, const hd_rope_table_args *a) {
    const int64_t n = (int64_t)a->rows * a->pairs;
    if (n == 0) return;
    launch_kernel(hd_cuda_stream(s), rope_table, dim3(blocks_for(n, BLOCK)), BLOCK, 0, 1, *a);
    hd_cuda_check(s, "rope_table");
}

/* The pair (p, q), turned. */
static __device__ __forceinline__ void rotate(cuda_act *first, cuda_act *second, float p,
                                              float q, float c, float sine) {
    *first = narrow(fmaf(p, c, -__fmul_rn(q, sine)));
    *second = narrow(fmaf(p, sine, __fmul_rn(q, c)));
}

/* `parts` blocks have a row. PAIRED: both numbers of a pair are moved at once. */
template <bool PAIRED>
static __global__ void rope(hd_rope_args a, int32_t parts) {
    begin_kernel();
    const int32_t i = (int32_t)blockIdx.x % parts * (int32_t)blockDim.x + (int32_t)threadIdx.x;
    const int32_t r = (int32_t)blockIdx.x / parts, head = i / a.pairs, pair = i % a.pairs;
    if (head >= a.heads) return;
    const int64_t x_row = stride_of(a.x, (int64_t)a.heads * a.x_head);
    const int64_t out_row = stride_of(a.out, (int64_t)a.heads * a.out_head);
    const cuda_act *x = acts(a.x) + r * x_row + head * a.x_head;
    cuda_act *out = acts(a.out) + r * out_row + head * a.out_head;
    const int32_t first = a.half_split ? pair : 2 * pair;
    const int32_t second = a.half_split ? pair + a.pairs : 2 * pair + 1;
    const float c = a.cos_sin[(int64_t)r * 2 * a.pairs + pair];
    const float sine = a.cos_sin[((int64_t)r * 2 + 1) * a.pairs + pair];
    const float sn = a.inverse ? -sine : sine;
    if constexpr (PAIRED) {
        float2 own = reinterpret_cast<const float2 *>(x)[pair];
        rotate(&own.x, &own.y, own.x, own.y, c, sn);
        reinterpret_cast<float2 *>(out)[pair] = own;
    } else {
        rotate(&out[first], &out[second], wide(x[first]), wide(x[second]), c, sn);
    }
}

void hd_rope_cuda(hd_stream *s, const hd_rope_args *a) {
    const int32_t all = a->heads * a->pairs;
    if (a->rows == 0 || all == 0) return;
    const int32_t threads = all < BLOCK ? (all + WARP - 1) / WARP * WARP : BLOCK;
    const int32_t parts = (int32_t)blocks_for(all, threads);
    const dim3 grid((unsigned)a->rows * (unsigned)parts);
    const uintptr_t at = (uintptr_t)a->x.data | (uintptr_t)a->out.data;
    const int64_t steps = a->x.stride | a->out.stride | a->x_head | a->out_head;
    if (!a->half_split && at % sizeof(float2) == 0 && steps % 2 == 0) {
        launch_kernel(hd_cuda_stream(s), rope<true>, grid, threads, 0, 1, *a, parts);
    } else {
        launch_kernel(hd_cuda_stream(s), rope<false>, grid, threads, 0, 1, *a, parts);
    }
    hd_cuda_check(s, "rope");
}

/* A block per head: the order of sums is that of rms_norm. */
static __global__ void __launch_bounds__(NORM_NARROW) norm_rope(hd_norm_rope_args a) {
    extern __shared__ float tail[]; /* [2 * pairs] what is rotated */
    cuda_act *x = acts(a.x) + (int64_t)blockIdx.x * a.head_width;
    const int64_t r = blockIdx.x / a.heads;
    const float *cos = a.cos_sin + r * 2 * a.pairs, *sine = cos + a.pairs;
    float own[NORM_EACH], weight[NORM_EACH];
    double sum = 0.0;
    griddepcontrol_launch_dependents();
#pragma unroll
    for (int i = 0; i < NORM_EACH; i++) { /* on their way before x is there */
        const int32_t c = (int32_t)threadIdx.x + i * NORM_NARROW;
        weight[i] = c < a.norm_cols && a.weight ? a.weight[c] : 1.0f;
    }
    griddepcontrol_wait();
#pragma unroll
    for (int i = 0; i < NORM_EACH; i++) {
        const int32_t c = (int32_t)threadIdx.x + i * NORM_NARROW;
        own[i] = c < a.norm_cols ? wide(x[c]) : 0.0f;
        sum = fma((double)own[i], (double)own[i], sum);
    }
    sum = block_sum<NORM_NARROW>(sum);
    const float scale = (float)(1.0 / sqrt(sum / a.norm_cols + (double)a.eps));
#pragma unroll
    for (int i = 0; i < NORM_EACH; i++) {
        const int32_t c = (int32_t)threadIdx.x + i * NORM_NARROW, at = c - a.rope_at;
        if (c >= a.norm_cols) continue;
        const cuda_act value = narrow(own[i] * scale * weight[i]);
        if (at >= 0 && at < 2 * a.pairs) {
            tail[at] = wide(value);
        } else {
            x[c] = value;
        }
    }
    for (int32_t at = threadIdx.x; at < 2 * a.pairs; at += NORM_NARROW) {
        if (a.rope_at + at >= a.norm_cols) tail[at] = wide(x[a.rope_at + at]);
    }
    __syncthreads();
    for (int32_t pair = threadIdx.x; pair < a.pairs; pair += NORM_NARROW) {
        const int32_t first = a.half_split ? pair : 2 * pair;
        const int32_t second = a.half_split ? pair + a.pairs : 2 * pair + 1;
        rotate(&x[a.rope_at + first], &x[a.rope_at + second], tail[first], tail[second],
               cos[pair], sine[pair]);
    }
}

/* A warp per head of at most 2 * NORM_NARROW columns; sums have the order of norm_rope(), whose warp w has
 * columns 32 w and on. */
static __global__ void __launch_bounds__(BLOCK) norm_rope_by_warp(hd_norm_rope_args a) {
    constexpr int WARPS = NORM_NARROW / WARP, EACH = 2;
    extern __shared__ float tails[]; /* [warps, 2 * pairs] what is rotated */
    begin_kernel();
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int32_t head = (int32_t)blockIdx.x * (BLOCK / WARP) + warp, r = head / a.heads;
    if (r >= a.rows) return;
    float *tail = tails + warp * 2 * a.pairs;
    cuda_act *x = acts(a.x) + (int64_t)head * a.head_width;
    const float *cos = a.cos_sin + (int64_t)r * 2 * a.pairs, *sine = cos + a.pairs;
    float own[WARPS][EACH];
    double part[WARPS];
#pragma unroll
    for (int i = 0; i < WARPS * EACH; i++) {
        const int32_t c = i / EACH * WARP + lane + i % EACH * NORM_NARROW;
        own[i / EACH][i % EACH] = c < a.norm_cols ? wide(x[c]) : 0.0f;
    }
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        part[w] = 0.0;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            part[w] = fma((double)own[w][i], (double)own[w][i], part[w]);
        }
    }
    const double mine = warp_sum_of(part);
    double sum = __shfl_sync(ALL_LANES, mine, 0);
#pragma unroll
    for (int w = 1; w < WARPS; w++) sum += __shfl_sync(ALL_LANES, mine, w * (WARP / WARPS));
    const float scale = (float)(1.0 / sqrt(sum / a.norm_cols + (double)a.eps));
#pragma unroll
    for (int i = 0; i < WARPS * EACH; i++) {
        const int32_t c = i / EACH * WARP + lane + i % EACH * NORM_NARROW, at = c - a.rope_at;
        if (c >= a.norm_cols) continue;
        const cuda_act value =
            narrow(own[i / EACH][i % EACH] * scale * (a.weight ? a.weight[c] : 1.0f));
        if (at >= 0 && at < 2 * a.pairs) {
            tail[at] = wide(value);
        } else {
            x[c] = value;
        }
    }
    for (int32_t at = lane; at < 2 * a.pairs; at += WARP) {
        if (a.rope_at + at >= a.norm_cols) tail[at] = wide(x[a.rope_at + at]);
    }
    __syncwarp();
    for (int32_t pair = lane; pair < a.pairs; pair += WARP) {
        const int32_t first = a.half_split ? pair : 2 * pair;
        const int32_t second = a.half_split ? pair + a.pairs : 2 * pair + 1;
        rotate(&x[a.rope_at + first], &x[a.rope_at + second], tail[first], tail[second],
               cos[pair], sine[pair]);
    }
}

void hd_norm_rope_cuda(hd_stream *s, const hd_norm_rope_args *a) {
    const int64_t heads = (int64_t)a->rows * a->heads;
    if (heads == 0) return;
    if (norm_is_wide(a->norm_cols)) {
#define RUN(part, args) hd_##part##_cuda(s, args)
        OPS_RUN_norm_rope(RUN, a)
#undef RUN
            return;
    }
    const size_t bytes = (size_t)(2 * a->pairs) * sizeof(float);
    if (heads >= 8 * hd_stream_workers(s) && a->norm_cols <= 2 * NORM_NARROW) {
        launch_kernel(hd_cuda_stream(s), norm_rope_by_warp,
                      dim3(blocks_for(heads, BLOCK / WARP)), BLOCK, BLOCK / WARP * bytes, 1,
                      *a);
    } else {
        launch_kernel(hd_cuda_stream(s), norm_rope, dim3((unsigned)heads), NORM_NARROW, bytes,
                      1, *a);
    }
    hd_cuda_check(s, "norm_rope");
}

static __global__ void __launch_bounds__(BLOCK) kv_store(hd_kv_store_args a) {
    begin_kernel();
    const int32_t r = (int32_t)blockIdx.x;
    put_entry(a.pool, a.seq[r], a.pos[r], acts(a.x) + r * stride_of(a.x, a.pool.width));
}

void hd_kv_store_cuda(hd_stream *s, const hd_kv_store_args *a) {
    if (a->rows == 0 || !writes_entries(s, a->pool)) return;
    launch_kernel(hd_cuda_stream(s), kv_store, dim3((unsigned)a->rows), BLOCK, 0, 1, *a);
    hd_cuda_check(s, "kv_store");
}

/* A warp has a group at a time. The bits of a NaN are above those of every number. */
static __global__ void __launch_bounds__(BLOCK) round_rows(hd_round_rows_args a) {
    begin_kernel();
    cuda_act *x = acts(a.x) + (int64_t)blockIdx.x * a.cols;
    const int32_t warp = (int32_t)threadIdx.x / WARP, lane = (int32_t)threadIdx.x % WARP;
    const int32_t each = a.format.group, codes = max(a.cols - a.format.plain, 0);
    for (int32_t first = warp * each; first < codes; first += BLOCK / WARP * each) {
        const int32_t end = min(first + each, codes);
        uint32_t most = 0;
        for (int32_t c = first + lane; c < end; c += WARP) {
            most = max(most, __float_as_uint(fabsf(wide(x[c]))));
        }
        most = __reduce_max_sync(ALL_LANES, most);
        const float scale = hd_group_scale(a.format, __uint_as_float(most));
        for (int32_t c = first + lane; c < end; c += WARP) {
            x[c] = narrow(hd_group_number(a.format, wide(x[c]), scale));
        }
    }
    for (int32_t c = codes + (int32_t)threadIdx.x; c < a.cols; c += BLOCK) {
        x[c] = narrow(__bfloat162float(__float2bfloat16_rn(wide(x[c]))));
    }
}

void hd_round_rows_cuda(hd_stream *s, const hd_round_rows_args *a) {
    if (a->rows == 0 || a->cols == 0 || !a->format.code) return;
    launch_kernel(hd_cuda_stream(s), round_rows, dim3((unsigned)a->rows), BLOCK, 0, 1, *a);
    hd_cuda_check(s, "round_rows");
}

/* A warp has 128 columns at a time, four in each lane; the lanes of a group are neighbors. */
static __global__ void __launch_bounds__(BLOCK)
    pack_rows(hd_pack_rows_args a, int32_t bytes, int32_t scales) {
    begin_kernel();
    const cuda_act *x = acts(a.x) + (int64_t)blockIdx.x * a.cols;
    uint8_t *out = static_cast<uint8_t *>(a.out) + (int64_t)blockIdx.x * bytes;
    const int32_t warp = (int32_t)threadIdx.x / WARP, lane = (int32_t)threadIdx.x % WARP;
    const int32_t lanes = a.format.group / 4;
    for (int32_t first = warp * 4 * WARP; first < a.cols; first += BLOCK * 4) {
        const int32_t col = first + 4 * lane;
        float v[4];
        uint32_t most = 0, codes = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            v[i] = col + i < a.cols ? wide(x[col + i]) : 0.0f;
            most = max(most, __float_as_uint(fabsf(v[i])));
        }
        for (int other = lanes / 2; other > 0; other /= 2) {
            most = max(most, __shfl_xor_sync(ALL_LANES, most, other));
        }
        const float scale = hd_group_scale(a.format, __uint_as_float(most));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t code = col + i < a.cols ? hd_round_e4m3(v[i] / scale) & 0xffu : 0u;
            codes |= code << 8 * i;
        }
        if (col >= a.cols) continue;
        *reinterpret_cast<uint32_t *>(out + col) = codes;
        if (lane % lanes == 0) {
            reinterpret_cast<float *>(out + scales)[col / a.format.group] = scale;
        }
    }
    const int32_t used = scales + (a.cols + a.format.group - 1) / a.format.group * 4;
    for (int32_t c = used + (int32_t)threadIdx.x; c < bytes; c += BLOCK) out[c] = 0;
}

void hd_pack_rows_cuda(hd_stream *s, const hd_pack_rows_args *a) {
    const int32_t group = a->format.group;
    if (a->rows == 0 || a->cols == 0) return;
    if (a->format.code != HD_E4M3 || (group != 32 && group != 64 && group != 128)) {
        hd_stream_fail(s, HD_EUNSUPPORTED, "rows are packed in groups of 32, 64 or 128");
        return;
    }
    launch_kernel(hd_cuda_stream(s), pack_rows, dim3((unsigned)a->rows), BLOCK, 0, 1, *a,
                  (int32_t)hd_packed_row_bytes(a->format, a->cols),
                  (int32_t)hd_packed_row_scales(a->cols));
    hd_cuda_check(s, "pack_rows");
}

static __global__ void replay_store(hd_replay_store_args a) {
    begin_kernel();
    const int32_t r = (int32_t)blockIdx.x;
    replay_row(a.log, r, a.choice + (int64_t)r * a.top_k, a.top_k);
}

void hd_replay_store_cuda(hd_stream *s, const hd_replay_store_args *a) {
    if (a->rows == 0) return;
    launch_kernel(hd_cuda_stream(s), replay_store, dim3((unsigned)a->rows), BLOCK, 0, 1, *a);
    hd_cuda_check(s, "replay_store");
}

static __global__ void swiglu(hd_swiglu_args a) {
    begin_kernel();
    const int64_t i = element();
    if (i >= (int64_t)a.rows * a.cols) return;
    const int64_t r = i / a.cols;
    const float weight = a.weight ? a.weight[a.assignment ? a.assignment[r] : r] : 1.0f;
    const float g = wide(acts(a.gate)[i]), u = wide(acts(a.up)[i]);
    const int64_t to = a.out.stride ? r * a.out.stride + i % a.cols : i;
    acts(a.out)[to] = narrow(swiglu_of(g, u, a.limit, weight));
}

void hd_swiglu_cuda(hd_stream *s, const hd_swiglu_args *a) {
    const int64_t n = (int64_t)a->rows * a->cols;
    if (n == 0) return;
    launch_kernel(hd_cuda_stream(s), swiglu, dim3(blocks_for(n, BLOCK)), BLOCK, 0, 1, *a);
    hd_cuda_check(s, "swiglu");
}
