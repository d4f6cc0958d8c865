/* compress_back_cuda.cu - gradients of V4's compressor: a block per entry, sums in float64. */
#include "ops/backward/row_sums_internal.cuh"

/* The sequence of entry number `at` of all; false: there are fewer. A warp's work. */
static __device__ bool find_entry(int32_t *seq, const hd_seqs &s, const int32_t *first_entry,
                                  int32_t at, int32_t ratio) {
    int32_t begun = 0; /* sequences whose entries begin there or before */
    for (int32_t base = 0; base < s.n; base += WARP) {
        const int32_t own = base + (int32_t)threadIdx.x % WARP;
        begun += __popc(__ballot_sync(ALL_LANES, own < s.n && first_entry[own] <= at));
    }
    const int32_t q = begun - 1;
    *seq = q;
    return at - first_entry[q] < (s.first_row[q + 1] - s.first_row[q]) / ratio;
}

/* One block of a sequence: its slots are the `earlier` positions before it and its own. */
struct compressed {
    int64_t row;
    int32_t earlier, entry, pos;
};

static __device__ __forceinline__ int64_t slot_at(const hd_compress_back_args &a,
                                                  const compressed &b, int32_t i, int32_t c) {
    const int32_t coff = a.overlap ? 2 : 1, channel = a.overlap && i >= 0 ? a.width + c : c;
    return (b.row + i) * coff * a.width + channel;
}

/* The gate of slot i and channel c, position bias included. */
static __device__ __forceinline__ double gate_at(const hd_compress_back_args &a,
                                                 const compressed &b, int32_t i, int32_t c) {
    const int32_t wide = (a.overlap ? 2 : 1) * a.width;
    const int32_t channel = a.overlap && i >= 0 ? a.width + c : c;
    const float bias = a.ape[(i + a.ratio) % a.ratio * wide + channel];
    return (double)(a.gate[slot_at(a, b, i, c)] + bias);
}

/* The softmax of a channel over the block's slots. */
struct channel_sum {
    double top, total, pooled;
};

static __device__ channel_sum pool_channel(const hd_compress_back_args &a, const compressed &b,
                                           int32_t c) {
    channel_sum s = {-CUDART_INF, 0.0, 0.0};
    for (int32_t i = -b.earlier; i < a.ratio; i++) s.top = fmax(s.top, gate_at(a, b, i, c));
    for (int32_t i = -b.earlier; i < a.ratio; i++) {
        const double p = exp(gate_at(a, b, i, c) - s.top);
        s.total += p;
        s.pooled += p * (double)a.kv[slot_at(a, b, i, c)];
    }
    s.pooled /= s.total;
    return s;
}

/* g: the gradient of the entry, unrotated. */
static __device__ void unrotate(const hd_compress_back_args &a, const compressed &b,
                                double *g) {
    for (int32_t c = (int32_t)threadIdx.x; c < a.width; c += BLOCK) {
        g[c] = (double)a.g[(int64_t)b.entry * a.width + c];
    }
    __syncthreads();
    double *tail = g + a.width - 2 * a.pairs;
    for (int32_t i = (int32_t)threadIdx.x; i < a.pairs; i += BLOCK) {
        const double angle = (double)rope_angle(b.pos, a.freq[i]);
        const double x = tail[2 * i], y = tail[2 * i + 1];
        tail[2 * i] = x * cos(angle) + y * sin(angle);
        tail[2 * i + 1] = y * cos(angle) - x * sin(angle);
    }
    __syncthreads();
}

/* A block per entry; shared: the gradient and the sums of its channels. What the norm's weight gets
 * from the entry replaces the entry's gradient. */
static __global__ void __launch_bounds__(BLOCK) compress_back(hd_compress_back_args a) {
    extern __shared__ double shared[];
    const int32_t at = (int32_t)blockIdx.x;
    int32_t seq;
    if (!find_entry(&seq, a.seqs, a.first_entry, at, a.ratio)) return;
    const int32_t e = at - a.first_entry[seq];
    const compressed b = {a.seqs.first_row[seq] + (int64_t)e * a.ratio,
                          a.overlap && e > 0 ? a.ratio : 0, at, e * a.ratio};
    double *g = shared, square = 0.0, along = 0.0;
    channel_sum *sums = reinterpret_cast<channel_sum *>(g + a.width);
    unrotate(a, b, g);
    for (int32_t c = (int32_t)threadIdx.x; c < a.width; c += BLOCK) {
        sums[c] = pool_channel(a, b, c);
        square += sums[c].pooled * sums[c].pooled;
        along += g[c] * (double)a.norm[c] * sums[c].pooled;
    }
    square = block_sum<BLOCK>(square);
    along = block_sum<BLOCK>(along);
    const double inverse = 1.0 / sqrt(square / a.width + (double)a.eps);
    const double pull = inverse * inverse * inverse * along / a.width;
    for (int32_t c = (int32_t)threadIdx.x; c < a.width; c += BLOCK) {
        const channel_sum s = sums[c];
        const double before = inverse * g[c] * (double)a.norm[c] - s.pooled * pull;
        a.g[(int64_t)at * a.width + c] = (float)(g[c] * s.pooled * inverse);
        for (int32_t i = -b.earlier; i < a.ratio; i++) {
            const int64_t to = slot_at(a, b, i, c);
            const double share = exp(gate_at(a, b, i, c) - s.top) / s.total * before;
            a.dkv[to] = (float)share;
            a.dgate[to] = (float)(share * ((double)a.kv[to] - s.pooled));
        }
    }
}

/* The blocks of a sequence that end in a chunk. */
struct compress_norm_term {
    hd_compress_back_args a;

    __device__ float *to(int32_t col) const {
        return a.dnorm + col;
    }

    __device__ void span(int64_t *first, int32_t *n, const row_chunk &c) const {
        const int32_t before = (c.first - c.begin) / a.ratio;
        *first = a.first_entry[c.seq] + before;
        *n = (c.end - c.begin) / a.ratio - before;
    }

    __device__ float at(int64_t e, int32_t col, const row_chunk &) const {
        return a.g[e * a.width + col];
    }
};

/* Column i * wide + c: the rows of position i of a block, of which term k is in block k. */
struct compress_bias_term {
    hd_compress_back_args a;
    int32_t wide;

    __device__ float *to(int32_t col) const {
        return a.dape + col;
    }

    __device__ void span(int64_t *first, int32_t *n, const row_chunk &c) const {
        const int32_t before = (c.first - c.begin) / a.ratio;
        *first = before;
        *n = (c.end - c.begin + a.ratio - 1) / a.ratio - before;
    }

    __device__ float at(int64_t k, int32_t col, const row_chunk &c) const {
        const int64_t row = c.begin + k * a.ratio + col / wide;
        return row >= c.first && row < c.end ? a.dgate[row * wide + col % wide] : 0.0f;
    }
};

void hd_compress_back_cuda(hd_stream *s, const hd_compress_back_args *a) {
    cudaStream_t queue = hd_cuda_stream(s);
    const int32_t wide = (a->overlap ? 2 : 1) * a->width;
    const size_t bytes = (size_t)a->rows * (size_t)wide * sizeof(float);
    const size_t shared = (size_t)a->width * (sizeof(double) + sizeof(channel_sum));
    if (a->rows == 0) return;
    cudaMemsetAsync(a->dkv, 0, bytes, queue);
    cudaMemsetAsync(a->dgate, 0, bytes, queue);
    if (a->rows >= a->ratio) {
        compress_back<<<(unsigned)(a->rows / a->ratio), BLOCK, shared, queue>>>(*a);
    }
    const hd_row_sums sums = {a->seqs, a->parts, a->n_parts};
    if (a->dnorm) sum_columns(queue, compress_norm_term{*a}, sums, a->rows, a->width);
    if (a->dape) {
        sum_columns(queue, compress_bias_term{*a, wide}, sums, a->rows, a->ratio * wide);
    }
    hd_cuda_check(s, "compress_back");
}
