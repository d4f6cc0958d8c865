/* attention_back_cuda.cu - gradients of attention whose heads share their keys, which are values too: MLA
 * absorbed, and V4's window and compressed entries. A tile of queries has consecutive pairs of row and
 * head. */
#include "ops/backward/attention_tiles_internal.cuh"

typedef tile_sizes<32, 576, 512> of;
constexpr int TILE = of::TILE, EACH = of::EACH;

/* Queries with the gradients of their outputs, and keys; zero where there are none. */
struct attention_shared {
    float q[TILE][of::K_PITCH], g[TILE][of::V_PITCH], key[TILE][of::K_PITCH];
    float slope[TILE][of::PITCH], weight[TILE][of::PITCH]; /* [own, other] */
    float lse[TILE], delta[TILE];
};

/* One sequence. Rows, pairs and keys count from its beginning. */
struct attention_job {
    const hd_attention_back_args &a;
    int32_t seq, rows;
    int64_t first_row;

    __device__ __forceinline__ int64_t pair_at(int32_t pair) const {
        return first_row * a.heads + pair;
    }
};

/* Keys of one kind, and those that a row may see: a tile of them. */
struct key_tile {
    bool recent; /* else entries */
    int32_t first, end;
};

static __device__ attention_job job_of(const hd_attention_back_args &a, int32_t seq) {
    const int32_t first = a.seqs.first_row[seq];
    return {a, seq, a.seqs.first_row[seq + 1] - first, first};
}

/* ---- what a row sees ---- */

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

static __device__ bool sees(const attention_job &j, int32_t row, bool recent, int32_t key) {
    if (recent) return key <= row && key > row - j.a.window;
    if (!j.a.selected) return key < visible_entries(row, j.a.ratio);
    return is_selected(j.a.selected + (j.first_row + row) * j.a.n_selected, j.a.n_selected,
                       key);
}

/* The next tile of keys behind t that rows [first, last] may see, recent ones first; false: there is none. */
static __device__ bool next_keys(key_tile *t, const attention_job &j, int32_t first,
                                 int32_t last) {
    if (t->recent) {
        t->first = t->end < 0 ? max(0, first + 1 - j.a.window) : t->end;
        t->end = min(t->first + TILE, last + 1);
        if (j.a.window && t->first < t->end) return true;
        *t = {false, 0, 0};
    }
    t->first = t->end;
    t->end = min(t->first + TILE, visible_entries(last, j.a.ratio));
    return t->first < t->end;
}

/* ---- tiles ---- */

static __device__ void load_queries(attention_shared *s, const attention_job &j, int32_t first,
                                    int32_t end) {
#pragma unroll 2
    for (int i = (int)threadIdx.x / WARP; i < TILE; i += WARPS) {
        const int64_t at = j.pair_at(first + i);
        const bool live = first + i < end;
        put_row<of::K_MOST>(s->q[i], live ? floats(j.a.q) + at * j.a.k_dim : nullptr,
                            j.a.k_dim);
        put_row<of::V_MOST>(s->g[i], live ? floats(j.a.g) + at * j.a.v_dim : nullptr,
                            j.a.v_dim);
    }
}

static __device__ void load_keys(attention_shared *s, const attention_job &j,
                                 const key_tile &t) {
    const hd_paged &pool = t.recent ? j.a.recent : j.a.entries;
#pragma unroll 2
    for (int i = (int)threadIdx.x / WARP; i < TILE; i += WARPS) {
        const float *from = nullptr;
        if (t.first + i < t.end) {
            from = floats(pool.rows) + paged_at(pool, j.seq, t.first + i);
        }
        put_row<of::K_MOST>(s->key[i], from, j.a.k_dim);
    }
}

/* Whether the pairs from `pair` on that this thread has see its keys, as bits; `own` says whether pairs or
 * keys are its own rows. */
template <bool OWN_PAIRS>
static __device__ uint32_t seen(const attention_job &j, int32_t pair, int32_t end,
                                const key_tile &t) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
#pragma unroll
        for (int k = 0; k < EACH; k++) {
            const int own = own_y() + SIDE * i, other = own_x() + SIDE * k;
            const int32_t p = pair + (OWN_PAIRS ? own : other);
            const int32_t key = t.first + (OWN_PAIRS ? other : own);
            const bool live = p < end && key < t.end && sees(j, p / j.a.heads, t.recent, key);
            bits |= (uint32_t)live << (i * EACH + k);
        }
    }
    return bits;
}

/* ---- queries ---- */

/* lse and delta of the tile's pairs, and both in memory. */
static __device__ void find_denominators(attention_shared *s, const attention_job &j,
                                         const row_tile &t) {
    const hd_attention_back_args &a = j.a;
    part_sum part[EACH];
    for (int i = 0; i < EACH; i++) part[i] = {-CUDART_INF_F, 0.0f};
    key_tile keys = {true, 0, -1};
    while (next_keys(&keys, j, t.first / a.heads, (t.end - 1) / a.heads)) {
        const uint32_t bits = seen<true>(j, t.first, t.end, keys);
        float score[EACH][EACH] = {};
        if (!__syncthreads_or(bits != 0)) continue;
        load_keys(s, j, keys);
        __syncthreads();
        multiply<EACH>(score, s->q[0], of::K_PITCH, s->key[0], of::K_PITCH, a.k_dim);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
#pragma unroll
            for (int k = 0; k < EACH; k++) {
                if (!(bits >> (i * EACH + k) & 1)) continue;
                part[i] = joined(part[i], {score[i][k] * a.scale, 1.0f});
            }
        }
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        part_sum all = joined_over_row(part[i]);
        const int own = own_y() + SIDE * i;
        if (a.sink) all = joined(all, {a.sink[(t.first + own) % a.heads], 1.0f});
        if (own_x() == 0) s->lse[own] = all.top + logf(all.total);
    }
    for (int i = (int)threadIdx.x / WARP; i < t.end - t.first; i += WARPS) {
        const int64_t at = j.pair_at(t.first + i) * a.v_dim;
        const float delta = (float)warp_dot64(floats(a.out) + at, floats(a.g) + at, a.v_dim);
        if (threadIdx.x % WARP == 0) s->delta[i] = delta;
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < t.end - t.first; i += THREADS) {
        a.lse[j.pair_at(t.first + i)] = s->lse[i];
        a.delta[j.pair_at(t.first + i)] = s->delta[i];
    }
}

static __global__ void __launch_bounds__(THREADS, 1) query_back(hd_attention_back_args a) {
    extern __shared__ __align__(16) uint8_t room[];
    attention_shared *s = reinterpret_cast<attention_shared *>(room);
    const row_tile t = find_tile<TILE>(a.seqs, a.heads, 1);
    const attention_job j = job_of(a, t.seq);
    if (t.first == t.end) return;
    load_queries(s, j, t.first, t.end);
    find_denominators(s, j, t);
    float4 dq[EACH][of::K_QUADS] = {};
    key_tile keys = {true, 0, -1};
    while (next_keys(&keys, j, t.first / a.heads, (t.end - 1) / a.heads)) {
        const uint32_t bits = seen<true>(j, t.first, t.end, keys);
        float score[EACH][EACH] = {}, along[EACH][EACH] = {};
        if (!__syncthreads_or(bits != 0)) continue;
        load_keys(s, j, keys);
        __syncthreads();
        multiply<EACH>(score, s->q[0], of::K_PITCH, s->key[0], of::K_PITCH, a.k_dim);
        multiply<EACH>(along, s->g[0], of::V_PITCH, s->key[0], of::K_PITCH, a.v_dim);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int own = own_y() + SIDE * i;
#pragma unroll
            for (int k = 0; k < EACH; k++) {
                const bool live = bits >> (i * EACH + k) & 1;
                const float p = live ? expf(score[i][k] * a.scale - s->lse[own]) : 0.0f;
                s->slope[own][own_x() + SIDE * k] =
                    live ? p * (along[i][k] - s->delta[own]) * a.scale : 0.0f;
            }
        }
        __syncthreads();
        add_rows<TILE, of::K_QUADS>(dq, s->slope[0], s->key[0], of::K_PITCH, a.k_dim);
    }
    store_rows<EACH>(dq, t.end - t.first, a.k_dim,
                     [&](int i, int c) { return a.dq + j.pair_at(t.first + i) * a.k_dim + c; });
}

/* ---- keys ---- */

/* Adds what the pairs of rows [first, last] give to a tile of keys; to: where its first key's gradient is. */
static __device__ void key_back(attention_shared *s, const attention_job &j, const key_tile &t,
                                int32_t first, int32_t last, float *to) {
    const hd_attention_back_args &a = j.a;
    const int32_t end = min(last + 1, j.rows) * a.heads;
    float4 dk[EACH][of::K_QUADS] = {};
    load_keys(s, j, t);
    for (int32_t pair = first * a.heads; pair < end; pair += TILE) {
        const uint32_t bits = seen<false>(j, pair, end, t);
        float score[EACH][EACH] = {}, along[EACH][EACH] = {};
        if (!__syncthreads_or(bits != 0)) continue;
        load_queries(s, j, pair, end);
        for (int i = (int)threadIdx.x; i < TILE && pair + i < end; i += THREADS) {
            s->lse[i] = a.lse[j.pair_at(pair + i)];
            s->delta[i] = a.delta[j.pair_at(pair + i)];
        }
        __syncthreads();
        multiply<EACH>(score, s->key[0], of::K_PITCH, s->q[0], of::K_PITCH, a.k_dim);
        multiply<EACH>(along, s->key[0], of::K_PITCH, s->g[0], of::V_PITCH, a.v_dim);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int own = own_y() + SIDE * i;
#pragma unroll
            for (int k = 0; k < EACH; k++) {
                const int other = own_x() + SIDE * k;
                const bool live = bits >> (i * EACH + k) & 1;
                const float p = live ? expf(score[i][k] * a.scale - s->lse[other]) : 0.0f;
                s->weight[own][other] = p;
                s->slope[own][other] =
                    live ? p * (along[i][k] - s->delta[other]) * a.scale : 0.0f;
            }
        }
        __syncthreads();
        add_rows<TILE, of::K_QUADS>(dk, s->slope[0], s->q[0], of::K_PITCH, a.k_dim);
        add_rows<TILE, of::V_QUADS>(dk, s->weight[0], s->g[0], of::V_PITCH, a.v_dim);
    }
    store_rows<EACH>(dk, t.end - t.first, a.k_dim,
                     [&](int i, int c) { return to + (int64_t)i * a.k_dim + c; });
}

static __global__ void __launch_bounds__(THREADS, 1) recent_back(hd_attention_back_args a) {
    extern __shared__ __align__(16) uint8_t room[];
    const row_tile t = find_tile<TILE>(a.seqs, 1, 1);
    const attention_job j = job_of(a, t.seq);
    if (t.first == t.end) return;
    key_back(reinterpret_cast<attention_shared *>(room), j, {true, t.first, t.end}, t.first,
             t.end - 2 + a.window, a.drecent + (j.first_row + t.first) * a.k_dim);
}

static __global__ void __launch_bounds__(THREADS, 1) entries_back(hd_attention_back_args a) {
    extern __shared__ __align__(16) uint8_t room[];
    const row_tile t = find_tile<TILE>(a.seqs, 1, a.ratio);
    const attention_job j = job_of(a, t.seq);
    if (t.first == t.end) return;
    key_back(reinterpret_cast<attention_shared *>(room), j, {false, t.first, t.end},
             (t.first + 1) * a.ratio - 1, j.rows - 1,
             a.dentries + ((int64_t)a.first_entry[t.seq] + t.first) * a.k_dim);
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
    constexpr size_t SHARED = sizeof(attention_shared);
    cudaStream_t queue = hd_cuda_stream(s);
    const unsigned seqs = (unsigned)a->seqs.n;
    if (a->rows == 0) return;
    if (a->k_dim > of::K_MOST || a->v_dim > of::V_MOST) {
        hd_stream_fail(s, HD_EUNSUPPORTED, "keys this wide cannot be trained on a GPU");
        return;
    }
    hd_cuda_allow_shared((const void *)query_back, SHARED);
    hd_cuda_allow_shared((const void *)recent_back, SHARED);
    hd_cuda_allow_shared((const void *)entries_back, SHARED);
    const unsigned pairs = blocks_for((int64_t)a->rows * a->heads, TILE) + seqs;
    query_back<<<pairs, THREADS, SHARED, queue>>>(*a);
    if (a->window) {
        recent_back<<<blocks_for(a->rows, TILE) + seqs, THREADS, SHARED, queue>>>(*a);
    }
    if (a->ratio) {
        const unsigned tiles = blocks_for(a->rows / a->ratio, TILE) + seqs;
        entries_back<<<tiles, THREADS, SHARED, queue>>>(*a);
    }
    if (a->dsink) sink_back<<<blocks_for(a->heads, WARP), SUM_THREADS, 0, queue>>>(*a);
    hd_cuda_check(s, "attention_back");
}
