/* rows_cuda.cu - row-wise operators: copies, norms, rotations, the gate. Bounded by memory. */
#include "ops/cuda/cuda_internal.cuh"
#include "ops/cuda/weight_internal.cuh"

/* A thread per element: element i of n, rows of `cols`. */
static __device__ __forceinline__ int64_t element() {
    return (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
}

static __global__ void embed(hd_embed_args a, hd_weight w) {
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
    embed<<<blocks_for(n, BLOCK), BLOCK, 0, hd_cuda_stream(s)>>>(*a, *a->table);
    hd_cuda_check(s, "embed");
}

static __global__ void gather(hd_gather_args a) {
    const int64_t i = element();
    if (i >= (int64_t)a.rows * a.cols) return;
    const int64_t r = i / a.cols, c = i % a.cols;
    acts(a.out)[i] = acts(a.x)[(int64_t)a.index[r] * a.cols + c];
}

void hd_gather_cuda(hd_stream *s, const hd_gather_args *a) {
    const int64_t n = (int64_t)a->rows * a->cols;
    if (n == 0) return;
    gather<<<blocks_for(n, BLOCK), BLOCK, 0, hd_cuda_stream(s)>>>(*a);
    hd_cuda_check(s, "gather");
}

static __global__ void add(hd_add_args a) {
    const int64_t i = element();
    if (i >= (int64_t)a.rows * a.cols) return;
    const int64_t r = i / a.cols, c = i % a.cols;
    cuda_act *x = acts(a.x) + i;
    *x = narrow(wide(*x) + wide(acts(a.y)[r / a.repeat * a.cols + c]));
}

void hd_add_cuda(hd_stream *s, const hd_add_args *a) {
    const int64_t n = (int64_t)a->rows * a->cols;
    if (n == 0) return;
    add<<<blocks_for(n, BLOCK), BLOCK, 0, hd_cuda_stream(s)>>>(*a);
    hd_cuda_check(s, "add");
}

constexpr int NORM_EACH = 8; /* elements of a row that a thread has on their way at once */

/* A block per row. Sums are double: norms cost little, and their error would reach every
 * element of a row. */
template <int THREADS>
static __global__ void __launch_bounds__(THREADS) rms_norm(hd_rms_norm_args a) {
    const cuda_act *x = acts(a.x) + blockIdx.x * stride_of(a.x, a.cols);
    cuda_act *out = acts(a.out) + blockIdx.x * stride_of(a.out, a.cols);
    double sum = 0.0;
    float own[NORM_EACH];
    for (int32_t first = threadIdx.x; first < a.cols; first += THREADS * NORM_EACH) {
#pragma unroll
        for (int i = 0; i < NORM_EACH; i++) {
            const int32_t c = first + i * THREADS;
            own[i] = c < a.cols ? wide(x[c]) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < NORM_EACH; i++) sum += (double)own[i] * (double)own[i];
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

void hd_rms_norm_cuda(hd_stream *s, const hd_rms_norm_args *a) {
    constexpr int NARROW = 128, WIDE = 512;
    cudaStream_t queue = hd_cuda_stream(s);
    if (a->rows == 0) return;
    if (a->cols <= NARROW * NORM_EACH) {
        rms_norm<NARROW><<<a->rows, NARROW, 0, queue>>>(*a);
    } else {
        rms_norm<WIDE><<<a->rows, WIDE, 0, queue>>>(*a);
    }
    hd_cuda_check(s, "rms_norm");
}

static __global__ void __launch_bounds__(BLOCK) layer_norm(hd_layer_norm_args a) {
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
    layer_norm<<<a->rows, BLOCK, 0, hd_cuda_stream(s)>>>(*a);
    hd_cuda_check(s, "layer_norm");
}

static __global__ void rope_table(hd_rope_table_args a) {
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
    rope_table<<<blocks_for(n, BLOCK), BLOCK, 0, hd_cuda_stream(s)>>>(*a);
    hd_cuda_check(s, "rope_table");
}

static __global__ void rope(hd_rope_args a) {
    int64_t i = element();
    if (i >= (int64_t)a.rows * a.heads * a.pairs) return;
    const int64_t pair = i % a.pairs;
    i /= a.pairs;
    const int64_t head = i % a.heads, r = i / a.heads;
    const int64_t x_row = stride_of(a.x, (int64_t)a.heads * a.x_head);
    const int64_t out_row = stride_of(a.out, (int64_t)a.heads * a.out_head);
    const cuda_act *x = acts(a.x) + r * x_row + head * a.x_head;
    cuda_act *out = acts(a.out) + r * out_row + head * a.out_head;
    const int64_t first = a.half_split ? pair : 2 * pair;
    const int64_t second = a.half_split ? pair + a.pairs : 2 * pair + 1;
    const float c = a.cos_sin[r * 2 * a.pairs + pair];
    const float sine = a.cos_sin[(r * 2 + 1) * a.pairs + pair], sn = a.inverse ? -sine : sine;
    const float p = wide(x[first]), q = wide(x[second]);
    out[first] = narrow(p * c - q * sn);
    out[second] = narrow(p * sn + q * c);
}

void hd_rope_cuda(hd_stream *s, const hd_rope_args *a) {
    const int64_t n = (int64_t)a->rows * a->heads * a->pairs;
    if (n == 0) return;
    rope<<<blocks_for(n, BLOCK), BLOCK, 0, hd_cuda_stream(s)>>>(*a);
    hd_cuda_check(s, "rope");
}

static __global__ void kv_store(hd_kv_store_args a) {
    const int32_t r = (int32_t)blockIdx.x;
    const cuda_act *x = acts(a.x) + r * stride_of(a.x, a.pool.width);
    cuda_act *to = paged_entry(a.pool, a.seq[r], a.pos[r]);
    for (int32_t c = threadIdx.x; c < a.pool.width; c += BLOCK) to[c] = x[c];
}

void hd_kv_store_cuda(hd_stream *s, const hd_kv_store_args *a) {
    if (a->rows == 0) return;
    kv_store<<<a->rows, BLOCK, 0, hd_cuda_stream(s)>>>(*a);
    hd_cuda_check(s, "kv_store");
}

static __global__ void swiglu(hd_swiglu_args a) {
    const int64_t i = element();
    if (i >= (int64_t)a.rows * a.cols) return;
    const int64_t r = i / a.cols;
    const float weight = a.weight ? a.weight[a.assignment ? a.assignment[r] : r] : 1.0f;
    float g = wide(acts(a.gate)[i]), u = wide(acts(a.up)[i]);
    if (a.limit > 0.0f) { /* comparisons, so that NaN stays NaN */
        g = g > a.limit ? a.limit : g;
        u = u > a.limit ? a.limit : u < -a.limit ? -a.limit : u;
    }
    acts(a.out)[i] = narrow(g * sigmoid(g) * u * weight);
}

void hd_swiglu_cuda(hd_stream *s, const hd_swiglu_args *a) {
    const int64_t n = (int64_t)a->rows * a->cols;
    if (n == 0) return;
    swiglu<<<blocks_for(n, BLOCK), BLOCK, 0, hd_cuda_stream(s)>>>(*a);
    hd_cuda_check(s, "swiglu");
}
