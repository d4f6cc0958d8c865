/* indexer_back_cuda.cu - gradients of the lightning indexer's own loss, and of the norm of V3.2's keys. As in
 * the reference, sums are in float64. A block has a row, for its queries and weights, or a key; a key's
 * block walks through the rows that selected it, in order. */
#include "ops/backward/attention_tiles_internal.cuh"
#include "ops/backward/row_sums_internal.cuh"

constexpr int WIDTH_MOST = 256, EACH = WIDTH_MOST / WARP; /* elements of a key; of a lane */

/* sum += factor x; a lane has every WARP-th element. */
static __device__ __forceinline__ void add_row(double (&sum)[EACH], double factor,
                                               const float *x, int32_t width) {
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        const int32_t c = (int32_t)threadIdx.x % WARP + k * WARP;
        if (c < width) sum[k] += factor * (double)x[c];
    }
}

/* ---- rows ---- */

/* One row, and the keys that it selected; in shared memory, of each key: */
struct index_row {
    int64_t row;
    int32_t seq, n;
    const int32_t *selected;
    double *share,
        *slope; /* [top_k] of attention; the indexer's score, then the loss's derivative by it */
};

/* What attention gives a key, and the indexer's score; a warp's work. */
static __device__ void find_key(const hd_indexer_back_args &a, const index_row &t, int32_t i) {
    const float *entry = floats(a.entries.rows) + paged_at(a.entries, t.seq, t.selected[i]);
    const float *key = floats(a.keys.rows) + paged_at(a.keys, t.seq, t.selected[i]);
    const float *q = floats(a.q) + t.row * a.heads * a.keys.width;
    double share = 0.0, score = 0.0;
    for (int32_t h = 0; h < a.attention_heads; h++) {
        const int64_t at = t.row * a.attention_heads + h;
        const double along = warp_dot64(floats(a.attention_q) + at * a.k_dim, entry, a.k_dim);
        share += exp(along * (double)a.attention_scale - (double)a.lse[at]);
    }
    for (int32_t h = 0; h < a.heads; h++) {
        const double along = warp_dot64(q + h * a.keys.width, key, a.keys.width);
        score += (double)a.weight[t.row * a.heads + h] * (double)a.scale * fmax(0.0, along);
    }
    if (threadIdx.x % WARP != 0) return;
    t.share[i] = share;
    t.slope[i] = score;
}

/* The largest number of a block's threads. */
static __device__ double block_top(double x) {
    __shared__ double part[WARPS];
    for (int step = WARP / 2; step > 0; step /= 2) {
        x = fmax(x, __shfl_xor_sync(ALL_LANES, x, step));
    }
    if (threadIdx.x % WARP == 0) part[threadIdx.x / WARP] = x;
    __syncthreads();
    for (int w = 0; w < WARPS; w++) x = fmax(x, part[w]);
    __syncthreads();
    return x;
}

/* Scores become derivatives, in memory too; returns the divergence. Zeros if attention gives the keys
 * nothing. */
static __device__ double compare(const hd_indexer_back_args &a, const index_row &t) {
    double top = -CUDART_INF, all = 0.0, total = 0.0, divergence = 0.0;
    for (int32_t i = (int32_t)threadIdx.x; i < t.n; i += THREADS) {
        top = fmax(top, t.slope[i]);
        all += t.share[i];
    }
    top = block_top(top);
    all = block_sum<THREADS>(all);
    for (int32_t i = (int32_t)threadIdx.x; i < t.n; i += THREADS) {
        total += exp(t.slope[i] - top);
    }
    total = block_sum<THREADS>(total);
    for (int32_t i = (int32_t)threadIdx.x; i < t.n; i += THREADS) {
        const double logp = t.slope[i] - top - log(total), p = t.share[i] / all;
        if (p > 0.0) divergence += p * (log(p) - logp);
        t.slope[i] = all > 0.0 ? (double)a.factor * (exp(logp) - p) : 0.0;
        a.slopes[t.row * a.top_k + i] = (float)t.slope[i];
    }
    divergence = block_sum<THREADS>(divergence); /* and all slopes are there */
    return all > 0.0 ? divergence : 0.0;
}

/* The gradients of a head's query and weight; a warp's work. */
static __device__ void head_back(const hd_indexer_back_args &a, const index_row &t, int32_t h) {
    const int32_t width = a.keys.width;
    const int64_t at = t.row * a.heads + h;
    const float *q = floats(a.q) + at * width;
    double dq[EACH] = {}, dweight = 0.0;
    for (int32_t i = 0; i < t.n; i++) {
        const float *key = floats(a.keys.rows) + paged_at(a.keys, t.seq, t.selected[i]);
        const double along = warp_dot64(q, key, width), ds = t.slope[i] * (double)a.scale;
        if (along <= 0.0) continue;
        dweight += ds * along;
        add_row(dq, ds * (double)a.weight[at], key, width);
    }
    if (threadIdx.x % WARP == 0) a.dweight[at] = (float)dweight;
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        const int32_t c = (int32_t)threadIdx.x % WARP + k * WARP;
        if (c < width) a.dq[at * width + c] = (float)dq[k];
    }
}

static __global__ void __launch_bounds__(THREADS) index_rows(hd_indexer_back_args a) {
    extern __shared__ double of_keys[];
    const row_tile tile = find_tile<1>(a.seqs, 1, 1);
    const int warp = (int)threadIdx.x / WARP;
    if (tile.first == tile.end) return;
    index_row t = {a.seqs.first_row[tile.seq] + tile.first,
                   tile.seq,
                   0,
                   nullptr,
                   of_keys,
                   of_keys + a.top_k};
    t.selected = a.selected + t.row * a.top_k;
    t.n = count_selected(t.selected, a.top_k);
    for (int32_t i = warp; i < t.n; i += WARPS) find_key(a, t, i);
    __syncthreads();
    if (t.n > 0) {
        const double divergence = compare(a, t);
        if (threadIdx.x == 0) a.divergence[t.row] += (float)divergence;
    }
    for (int32_t h = warp; h < a.heads; h += WARPS) head_back(a, t, h);
}

/* ---- keys ---- */

/* Adds what one row gives a key: the heads of a warp. */
static __device__ void add_heads(double (&sum)[EACH], const hd_indexer_back_args &a,
                                 const float *key, int64_t row, double slope) {
    const int32_t width = a.keys.width;
    for (int32_t h = (int32_t)threadIdx.x / WARP; h < a.heads; h += WARPS) {
        const int64_t at = row * a.heads + h;
        const float *q = floats(a.q) + at * width;
        if (warp_dot64(q, key, width) <= 0.0) continue;
        add_row(sum, slope * (double)a.scale * (double)a.weight[at], q, width);
    }
}

static __global__ void __launch_bounds__(THREADS) index_keys(hd_indexer_back_args a) {
    __shared__ double part[WARPS][WIDTH_MOST];
    const row_tile tile = find_tile<1>(a.seqs, 1, a.ratio);
    const int32_t warp = (int32_t)threadIdx.x / WARP, lane = (int32_t)threadIdx.x % WARP;
    if (tile.first == tile.end) return;
    const int32_t width = a.keys.width, end = a.seqs.first_row[tile.seq + 1];
    const float *key = floats(a.keys.rows) + paged_at(a.keys, tile.seq, tile.first);
    double sum[EACH] = {};
    /* the first row that sees it */
    int32_t base = a.seqs.first_row[tile.seq] + (tile.first + 1) * a.ratio - 1;
    for (; base < end; base += WARP) {
        const int64_t own = base + lane;
        float slope = 0.0f;
        if (own < end) {
            const int32_t at = place_selected(a.selected + own * a.top_k, a.top_k, tile.first);
            if (at >= 0) slope = a.slopes[own * a.top_k + at];
        }
        uint32_t left = __ballot_sync(ALL_LANES, slope != 0.0f);
        for (; left; left &= left - 1) {
            const int from = __ffs((int)left) - 1;
            const float of_row = __shfl_sync(ALL_LANES, slope, from);
            add_heads(sum, a, key, base + from, (double)of_row);
        }
    }
#pragma unroll
    for (int k = 0; k < EACH; k++) part[warp][lane + k * WARP] = sum[k];
    __syncthreads();
    float *to = a.dkeys + ((int64_t)a.first_entry[tile.seq] + tile.first) * width;
    for (int32_t c = (int32_t)threadIdx.x; c < width; c += THREADS) {
        double all = part[0][c];
        for (int w = 1; w < WARPS; w++) all += part[w][c];
        to[c] = (float)all;
    }
}

void hd_indexer_back_cuda(hd_stream *s, const hd_indexer_back_args *a) {
    const size_t shared = 2 * (size_t)a->top_k * sizeof(double);
    cudaStream_t queue = hd_cuda_stream(s);
    if (a->rows == 0) return;
    if (a->keys.width > WIDTH_MOST) {
        hd_stream_fail(s, HD_EUNSUPPORTED, "an indexer this wide cannot be trained on a GPU");
        return;
    }
    hd_cuda_allow_shared((const void *)index_rows, shared);
    index_rows<<<(unsigned)a->rows, THREADS, shared, queue>>>(*a);
    const unsigned keys = (unsigned)(a->rows / a->ratio);
    if (keys) index_keys<<<keys, THREADS, 0, queue>>>(*a);
    hd_cuda_check(s, "indexer_back");
}

/* ---- layer norm ---- */

/* The mean of every row, and 1 / deviation. */
static __global__ void __launch_bounds__(BLOCK) layer_stats(hd_layer_norm_back_args a) {
    const float *x = floats(a.x) + blockIdx.x * stride_of(a.x, a.cols);
    double mean = 0.0, square = 0.0;
    for (int32_t c = (int32_t)threadIdx.x; c < a.cols; c += BLOCK) mean += (double)x[c];
    mean = block_sum<BLOCK>(mean) / a.cols;
    for (int32_t c = (int32_t)threadIdx.x; c < a.cols; c += BLOCK) {
        square += ((double)x[c] - mean) * ((double)x[c] - mean);
    }
    square = block_sum<BLOCK>(square);
    if (threadIdx.x != 0) return;
    a.stats[2 * blockIdx.x] = mean;
    a.stats[2 * blockIdx.x + 1] = 1.0 / sqrt(square / a.cols + (double)a.eps);
}

/* An element of x, normalized. */
static __device__ __forceinline__ double normalized(const hd_layer_norm_back_args &a, int64_t r,
                                                    int32_t c) {
    const double x = (double)floats(a.x)[r * stride_of(a.x, a.cols) + c];
    return (x - a.stats[2 * r]) * a.stats[2 * r + 1];
}

struct layer_weight_term : term_of_rows {
    hd_layer_norm_back_args a;

    __device__ float *to(int32_t col) const {
        return a.dweight + col;
    }

    __device__ float at(int64_t r, int32_t col, const row_chunk &) const {
        const double g = (double)floats(a.g)[r * stride_of(a.g, a.cols) + col];
        return (float)(g * normalized(a, r, col));
    }
};

struct layer_bias_term : term_of_rows {
    hd_layer_norm_back_args a;

    __device__ float *to(int32_t col) const {
        return a.dbias + col;
    }

    __device__ float at(int64_t r, int32_t col, const row_chunk &) const {
        return floats(a.g)[r * stride_of(a.g, a.cols) + col];
    }
};

static __global__ void __launch_bounds__(BLOCK) layer_rows(hd_layer_norm_back_args a) {
    float *g = static_cast<float *>(a.g.data) + blockIdx.x * stride_of(a.g, a.cols);
    const int64_t r = blockIdx.x;
    double sum = 0.0, along = 0.0;
    for (int32_t c = (int32_t)threadIdx.x; c < a.cols; c += BLOCK) {
        const double u = (double)g[c] * (double)a.weight[c];
        sum += u;
        along += u * normalized(a, r, c);
    }
    sum = block_sum<BLOCK>(sum) / a.cols;
    along = block_sum<BLOCK>(along) / a.cols;
    const double inverse = a.stats[2 * r + 1];
    for (int32_t c = (int32_t)threadIdx.x; c < a.cols; c += BLOCK) {
        const double u = (double)g[c] * (double)a.weight[c];
        g[c] = (float)(inverse * (u - sum - normalized(a, r, c) * along));
    }
}

void hd_layer_norm_back_cuda(hd_stream *s, const hd_layer_norm_back_args *a) {
    cudaStream_t queue = hd_cuda_stream(s);
    if (a->rows == 0) return;
    layer_stats<<<(unsigned)a->rows, BLOCK, 0, queue>>>(*a);
    if (a->dweight) { /* before g is that of x */
        sum_columns(queue, layer_weight_term{{}, *a}, a->sums, a->rows, a->cols);
    }
    if (a->dbias) sum_columns(queue, layer_bias_term{{}, *a}, a->sums, a->rows, a->cols);
    layer_rows<<<(unsigned)a->rows, BLOCK, 0, queue>>>(*a);
    hd_cuda_check(s, "layer_norm_back");
}
