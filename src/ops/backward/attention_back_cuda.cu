/* attention_back_cuda.cu - gradients of attention and of V4's compressor.
 *
 * A block owns a head of a row for dq, and a key for its gradient: the key's block walks through the
 * rows that see it, in order. Scores are computed three times, and nothing of their size is kept. */
#include "ops/backward/backward_cuda_internal.cuh"

constexpr int THREADS = 128, WARPS = THREADS / WARP, KEYS = 32, PAIRS = 16;
constexpr int EACH = 8,
              MOST_DIM = EACH * THREADS; /* a thread has up to EACH elements of a key */

static __device__ __forceinline__ float warp_dot(const float *a, const float *b, int32_t n) {
    float sum = 0.0f;
    for (int32_t c = (int32_t)threadIdx.x % WARP; c < n; c += WARP) sum += a[c] * b[c];
    return warp_sum(sum);
}

/* ---- what a row sees ---- */

struct row_keys {
    int32_t seq, pos, n_recent, n;
    const int32_t *selected; /* of the row, or NULL */
};

static __device__ int32_t n_selected_of(const int32_t *selected, int32_t most) {
    int32_t low = 0, high = most; /* -1 behind the last */
    while (low < high) {
        const int32_t middle = (low + high) / 2;
        if (selected[middle] >= 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

static __device__ row_keys keys_of(const hd_attention_back_args &a, int32_t row) {
    row_keys k = {sequence_of(a.seqs, row), a.seqs.pos[row], 0, 0, nullptr};
    k.n_recent = a.window ? min(a.window, k.pos + 1) : 0;
    k.n = k.n_recent;
    if (a.selected) {
        k.selected = a.selected + (int64_t)row * a.n_selected;
        k.n += n_selected_of(k.selected, a.n_selected);
    } else {
        k.n += visible_entries(k.pos, a.ratio);
    }
    return k;
}

/* Key i of a row, recent ones first. */
static __device__ __forceinline__ const float *key_at(const hd_attention_back_args &a,
                                                      const row_keys &k, int32_t i) {
    if (i < k.n_recent) {
        return floats(a.recent.rows) + paged_at(a.recent, k.seq, k.pos + 1 - k.n_recent + i);
    }
    const int32_t e = k.selected ? k.selected[i - k.n_recent] : i - k.n_recent;
    return floats(a.entries.rows) + paged_at(a.entries, k.seq, e);
}

/* ---- queries ---- */

/* A part of a softmax: its largest score, and the sum of exp(score - top). */
struct part_sum {
    double top, total;
};

static __device__ part_sum joined(part_sum a, part_sum b) {
    if (b.total == 0.0) return a;
    if (a.total == 0.0) return b;
    const double top = fmax(a.top, b.top);
    return {top, a.total * exp(a.top - top) + b.total * exp(b.top - top)};
}

/* The log of the softmax's denominator, by all threads. A lane keeps every WARP-th key of its warp. */
static __device__ double denominator(const hd_attention_back_args &a, const row_keys &k,
                                     const float *q, int32_t head) {
    __shared__ part_sum part[WARPS];
    const int32_t warp = (int32_t)threadIdx.x / WARP, lane = (int32_t)threadIdx.x % WARP;
    part_sum own = {-CUDART_INF, 0.0};
    for (int32_t first = warp * WARP; first < k.n; first += THREADS) {
        double mine = 0.0;
        for (int32_t i = first; i < min(first + WARP, k.n); i++) {
            const float score = warp_dot(q, key_at(a, k, i), a.k_dim) * a.scale;
            if (i - first == lane) mine = (double)score;
        }
        if (first + lane < k.n) own = joined(own, {mine, 1.0});
    }
    for (int step = WARP / 2; step > 0; step /= 2) {
        own = joined(own, {__shfl_down_sync(ALL_LANES, own.top, step),
                           __shfl_down_sync(ALL_LANES, own.total, step)});
    }
    if (lane == 0) part[warp] = own;
    __syncthreads();
    part_sum all = {-CUDART_INF, 0.0};
    if (a.sink && a.sink[head] > -CUDART_INF_F) all = {(double)a.sink[head], 1.0};
    for (int w = 0; w < WARPS; w++) all = joined(all, part[w]);
    __syncthreads();
    return all.top + log(all.total);
}

static __global__ void __launch_bounds__(THREADS) query_back(hd_attention_back_args a) {
    __shared__ float slope[KEYS];
    __shared__ const float *key[KEYS];
    const int32_t row = (int32_t)blockIdx.x, head = (int32_t)blockIdx.y;
    const int64_t at = (int64_t)row * a.heads + head;
    const int32_t warp = (int32_t)threadIdx.x / WARP;
    const float *q = floats(a.q) + at * a.k_dim, *g = floats(a.g) + at * a.v_dim;
    const row_keys k = keys_of(a, row);
    const float lse = (float)denominator(a, k, q, head);
    const float delta = (float)warp_dot64(floats(a.out) + at * a.v_dim, g, a.v_dim);
    float dq[EACH] = {};
    for (int32_t first = 0; first < k.n; first += KEYS) {
        const int32_t n = min(KEYS, k.n - first);
        for (int32_t i = warp; i < n; i += WARPS) {
            const float *x = key_at(a, k, first + i);
            const float p = expf(warp_dot(q, x, a.k_dim) * a.scale - lse);
            const float along = warp_dot(g, x, a.v_dim);
            if (threadIdx.x % WARP == 0) {
                slope[i] = p * (along - delta) * a.scale;
                key[i] = x;
            }
        }
        __syncthreads();
        for (int32_t i = 0; i < n; i++) {
#pragma unroll
            for (int e = 0; e < EACH; e++) {
                const int32_t c = e * THREADS + (int32_t)threadIdx.x;
                if (c < a.k_dim) dq[e] = fmaf(slope[i], key[i][c], dq[e]);
            }
        }
        __syncthreads();
    }
    for (int e = 0; e < EACH; e++) {
        const int32_t c = e * THREADS + (int32_t)threadIdx.x;
        if (c < a.k_dim) a.dq[at * a.k_dim + c] = dq[e];
    }
    if (threadIdx.x != 0) return;
    a.lse[at] = lse;
    a.delta[at] = delta;
}

/* ---- keys ---- */

/* What a key's block adds up. */
struct key_sums {
    const float *key; /* in shared memory */
    float value[EACH];
};

/* Pairs [first, first + n) of a row and a head; a row of the list has all heads. */
static __device__ void add_pairs(const hd_attention_back_args &a, key_sums *sums,
                                 const int32_t *rows, int32_t first, int32_t n) {
    __shared__ float slope[PAIRS], weight[PAIRS];
    __shared__ int64_t place[PAIRS];
    for (int32_t i = (int32_t)threadIdx.x / WARP; i < n; i += WARPS) {
        const int64_t at =
            (int64_t)rows[(first + i) / a.heads] * a.heads + (first + i) % a.heads;
        const float score = warp_dot(floats(a.q) + at * a.k_dim, sums->key, a.k_dim);
        const float p = expf(score * a.scale - a.lse[at]);
        const float along = warp_dot(floats(a.g) + at * a.v_dim, sums->key, a.v_dim);
        if (threadIdx.x % WARP == 0) {
            slope[i] = p * (along - a.delta[at]) * a.scale;
            weight[i] = p;
            place[i] = at;
        }
    }
    __syncthreads();
    for (int32_t i = 0; i < n; i++) {
        const float *q = floats(a.q) + place[i] * a.k_dim;
        const float *g = floats(a.g) + place[i] * a.v_dim;
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const int32_t c = e * THREADS + (int32_t)threadIdx.x;
            if (c < a.k_dim) {
                const float of_value = c < a.v_dim ? weight[i] * g[c] : 0.0f;
                sums->value[e] += fmaf(slope[i], q[c], of_value);
            }
        }
    }
    __syncthreads();
}

static __device__ bool is_selected(const int32_t *selected, int32_t most, int32_t entry) {
    const int32_t n = n_selected_of(selected, most);
    int32_t low = 0, high = n;
    while (low < high) {
        const int32_t middle = (low + high) / 2;
        if (selected[middle] < entry) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low < n && selected[low] == entry;
}

/* The rows [first, end) that see the key: all, or with entry >= 0 those that selected it. */
static __device__ void key_back(const hd_attention_back_args &a, const float *from, float *to,
                                int32_t first, int32_t end, int32_t entry) {
    __shared__ float key[MOST_DIM];
    __shared__ int32_t rows[THREADS];
    __shared__ uint32_t sees[WARPS];
    const int32_t warp = (int32_t)threadIdx.x / WARP, lane = (int32_t)threadIdx.x % WARP;
    key_sums sums = {key, {}};
    for (int32_t c = (int32_t)threadIdx.x; c < a.k_dim; c += THREADS) key[c] = from[c];
    for (int32_t begin = first; begin < end; begin += THREADS) {
        const int32_t row = begin + (int32_t)threadIdx.x;
        bool mine = row < end;
        if (mine && entry >= 0) {
            const int32_t *selected = a.selected + (int64_t)row * a.n_selected;
            mine = is_selected(selected, a.n_selected, entry);
        }
        const uint32_t all = __ballot_sync(ALL_LANES, mine);
        if (lane == 0) sees[warp] = all;
        __syncthreads();
        int32_t before = __popc(all & ((1u << lane) - 1)), n = 0;
        for (int w = 0; w < WARPS; w++) {
            if (w < warp) before += __popc(sees[w]);
            n += __popc(sees[w]);
        }
        if (mine) rows[before] = row;
        __syncthreads();
        for (int32_t pair = 0; pair < n * a.heads; pair += PAIRS) {
            add_pairs(a, &sums, rows, pair, min(PAIRS, n * a.heads - pair));
        }
    }
    for (int e = 0; e < EACH; e++) {
        const int32_t c = e * THREADS + (int32_t)threadIdx.x;
        if (c < a.k_dim) to[c] = sums.value[e];
    }
}

static __global__ void __launch_bounds__(THREADS) recent_back(hd_attention_back_args a) {
    const int32_t row = (int32_t)blockIdx.x, seq = sequence_of(a.seqs, row);
    const int32_t end = min(a.seqs.first_row[seq + 1], row + a.window);
    const float *from = floats(a.recent.rows) + paged_at(a.recent, seq, a.seqs.pos[row]);
    key_back(a, from, a.drecent + (int64_t)row * a.k_dim, row, end, -1);
}

/* The sequence of entry number `at` of all; false: there are fewer. */
static __device__ bool find_entry(int32_t *seq, const hd_seqs &s, const int32_t *first_entry,
                                  int32_t at, int32_t ratio) {
    int32_t q = s.n - 1;
    while (q > 0 && first_entry[q] > at) q--;
    *seq = q;
    return at - first_entry[q] < (s.first_row[q + 1] - s.first_row[q]) / ratio;
}

static __global__ void __launch_bounds__(THREADS) entries_back(hd_attention_back_args a) {
    const int32_t at = (int32_t)blockIdx.x;
    int32_t seq;
    if (!find_entry(&seq, a.seqs, a.first_entry, at, a.ratio)) return;
    const int32_t e = at - a.first_entry[seq];
    const int32_t first = a.seqs.first_row[seq] + (e + 1) * a.ratio - 1;
    const float *from = floats(a.entries.rows) + paged_at(a.entries, seq, e);
    key_back(a, from, a.dentries + (int64_t)at * a.k_dim, first, a.seqs.first_row[seq + 1],
             a.selected ? e : -1);
}

static __global__ void __launch_bounds__(SUM_THREADS) sink_back(hd_attention_back_args a) {
    const int32_t first = (int32_t)blockIdx.x * WARP, heads = min(a.heads - first, WARP);
    const auto term = [&](int64_t r, int32_t h) {
        const int64_t at = r * a.heads + first + h;
        return -(float)((double)a.delta[at] *
                        exp((double)a.sink[first + h] - (double)a.lse[at]));
    };
    float *to = a.dsink + first + threadIdx.x % WARP;
    const float sum = sum_in_order(has_sum(heads) ? *to : 0.0f, a.rows, heads, term);
    if (has_sum(heads)) *to = sum;
}

void hd_attention_back_cuda(hd_stream *s, const hd_attention_back_args *a) {
    cudaStream_t queue = hd_cuda_stream(s);
    const unsigned rows = (unsigned)a->rows, entries = a->ratio ? rows / (unsigned)a->ratio : 0;
    if (rows == 0) return;
    if (a->k_dim > MOST_DIM) {
        hd_stream_fail(s, HD_EUNSUPPORTED, "keys this wide cannot be trained on a GPU");
        return;
    }
    query_back<<<dim3(rows, (unsigned)a->heads), THREADS, 0, queue>>>(*a);
    if (a->window) recent_back<<<rows, THREADS, 0, queue>>>(*a);
    if (entries) entries_back<<<entries, THREADS, 0, queue>>>(*a);
    if (a->dsink) sink_back<<<blocks_for(a->heads, WARP), SUM_THREADS, 0, queue>>>(*a);
    hd_cuda_check(s, "attention_back");
}

/* ---- the compressor ---- */

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

static __global__ void __launch_bounds__(SUM_THREADS) compress_norm(hd_compress_back_args a) {
    const int32_t first = (int32_t)blockIdx.x * WARP, cols = min(a.width - first, WARP);
    const int32_t last = a.seqs.n - 1;
    const int32_t n =
        a.first_entry[last] + (a.seqs.first_row[last + 1] - a.seqs.first_row[last]) / a.ratio;
    const auto term = [&](int64_t e, int32_t c) { return a.g[e * a.width + first + c]; };
    float *to = a.dnorm + first + threadIdx.x % WARP;
    const float sum = sum_in_order(has_sum(cols) ? *to : 0.0f, n, cols, term);
    if (has_sum(cols)) *to = sum;
}

/* A block has channels of one position in the blocks of all sequences. */
static __global__ void __launch_bounds__(SUM_THREADS) compress_bias(hd_compress_back_args a) {
    const int32_t wide = (a.overlap ? 2 : 1) * a.width, i = (int32_t)blockIdx.y;
    const int32_t first = (int32_t)blockIdx.x * WARP, cols = min(wide - first, WARP);
    float *to = a.dape + (int64_t)i * wide + first + threadIdx.x % WARP;
    float sum = has_sum(cols) ? *to : 0.0f;
    for (int32_t q = 0; q < a.seqs.n; q++) {
        const int64_t row = a.seqs.first_row[q] + i;
        const int32_t n = (int32_t)(a.seqs.first_row[q + 1] - row + a.ratio - 1) / a.ratio;
        const auto term = [&](int64_t k, int32_t c) {
            return a.dgate[(row + k * a.ratio) * wide + first + c];
        };
        sum = sum_in_order(sum, n, cols, term);
    }
    if (has_sum(cols)) *to = sum;
}

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
    if (a->dnorm) compress_norm<<<blocks_for(a->width, WARP), SUM_THREADS, 0, queue>>>(*a);
    if (a->dape) {
        const dim3 grid(blocks_for(wide, WARP), (unsigned)a->ratio);
        compress_bias<<<grid, SUM_THREADS, 0, queue>>>(*a);
    }
    hd_cuda_check(s, "compress_back");
}
