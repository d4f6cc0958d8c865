/* attention_back_cuda.cu - gradients of attention whose heads share their keys, which are values too: MLA
 * absorbed, and V4's window and compressed entries. A tile of queries has consecutive pairs of row and
 * head. */
#include "ops/backward/attention_tiles_internal.cuh"
#include "ops/backward/row_sums_internal.cuh"

constexpr int TILE = 32, K_MOST = 576, V_MOST = 512; /* pairs and keys; columns */
constexpr int K_PITCH = row_pitch(K_MOST), V_PITCH = row_pitch(V_MOST);
constexpr int K_GROUPS = (K_MOST / GROUP + WARPS - 1) / WARPS; /* of a warp, at most */

/* Scores of pairs and keys: [pair][key]. Pairs are rows of the left factor of dq, keys of that of dk. */
constexpr int PAIRS_PITCH = row_pitch(TILE), KEYS_PITCH = term_pitch(TILE);

/* Queries with the gradients of their outputs, and keys; zero where there are none. */
struct attention_shared {
    float q[TILE][K_PITCH], g[TILE][V_PITCH], key[TILE][K_PITCH];
    float slope[TILE * KEYS_PITCH], weight[TILE * KEYS_PITCH];
    part_sum part[2][TILE];
    float lse[TILE], delta[TILE];
};

/* Keys' gradients are sums over chunks of so many rows, as those of parameters (row_sums.h). */
constexpr int CHUNK = HD_SUM_ROWS;

/* One sequence. Rows, pairs and keys count from its beginning. */
struct attention_job {
    const hd_attention_back_args &a;
    int32_t seq, rows;
    int64_t first_row;
    const int32_t *listed; /* of a tile of queries: what all selected; NULL: see sees() */

    __device__ __forceinline__ int64_t pair_at(int32_t pair) const {
        return first_row * a.heads + pair;
    }
};

/* Keys of one kind, and those that a row may see: a tile of them. */
struct key_tile {
    bool recent; /* else entries, or places of listed ones */
    int32_t first, end;
};

static __device__ attention_job job_of(const hd_attention_back_args &a, int32_t seq) {
    const int32_t first = a.seqs.first_row[seq];
    return {a, seq, a.seqs.first_row[seq + 1] - first, first, nullptr};
}

/* ---- what a row sees ---- */

static __device__ bool sees(const attention_job &j, int32_t row, bool recent, int32_t key) {
    if (recent) return key <= row && key > row - j.a.window;
    if (j.listed) return true;
    if (!j.a.selected) return key < visible_entries(row, j.a.ratio);
    return place_selected(j.a.selected + (j.first_row + row) * j.a.n_selected, j.a.n_selected,
                          key) >= 0;
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
    const int32_t n =
        j.listed ? count_selected(j.listed, j.a.n_selected) : visible_entries(last, j.a.ratio);
    t->first = t->end;
    t->end = min(t->first + TILE, n);
    return t->first < t->end;
}

/* ---- tiles ---- */

static __device__ void load_queries(attention_shared *s, const attention_job &j, int32_t first,
                                    int32_t end) {
    for (int i = (int)threadIdx.x / WARP; i < TILE; i += WARPS) {
        const int64_t at = j.pair_at(first + i);
        const bool live = first + i < end;
        put_row<K_MOST>(s->q[i], live ? floats(j.a.q) + at * j.a.k_dim : nullptr, j.a.k_dim);
        put_row<V_MOST>(s->g[i], live ? floats(j.a.g) + at * j.a.v_dim : nullptr, j.a.v_dim);
    }
}

static __device__ void load_keys(attention_shared *s, const attention_job &j,
                                 const key_tile &t) {
    const hd_paged &pool = t.recent ? j.a.recent : j.a.entries;
    for (int i = (int)threadIdx.x / WARP; i < TILE; i += WARPS) {
        const float *from = nullptr;
        if (t.first + i < t.end) {
            const bool of_list = !t.recent && j.listed;
            const int32_t key = of_list ? j.listed[t.first + i] : t.first + i;
            from = floats(pool.rows) + paged_at(pool, j.seq, key);
        }
        put_row<K_MOST>(s->key[i], from, j.a.k_dim);
    }
}

/* ---- scores: a warp has 16 pairs, 16 keys and half of the columns ---- */

constexpr int SCORES = 8; /* of a thread: pair own_pair(i), key own_key(i) */

enum { SCORE, ALONG, N_SCORES }; /* <q, key>, <g, key> */

typedef float tile_scores[N_SCORES][2][4];

static __device__ __forceinline__ bool has_scores() {
    return threadIdx.x < THREADS / 2;
}

static __device__ __forceinline__ int own_pair(int i) {
    return (int)threadIdx.x / (2 * WARP) % 2 * 16 + sum_row(i % 4);
}

static __device__ __forceinline__ int own_key(int i) {
    return (int)threadIdx.x / WARP % 2 * 16 + i / 4 * 8 + sum_col(i % 4);
}

/* Whether the pairs from `pair` on that this thread has see its keys, as bits. */
static __device__ uint32_t seen(const attention_job &j, int32_t pair, int32_t end,
                                const key_tile &t) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < SCORES; i++) {
        const int32_t p = pair + own_pair(i), key = t.first + own_key(i);
        const bool live = p < end && key < t.end && sees(j, p / j.a.heads, t.recent, key);
        bits |= (uint32_t)live << i;
    }
    return bits;
}

/* The first N scores of the tile, complete in threads that have them. Between barriers slope and weight take
 * the others' halves. */
template <int N>
static __device__ __forceinline__ void score_tile(tile_scores &t, attention_shared *s,
                                                  const hd_attention_back_args &a) {
    const int32_t groups = (a.k_dim + GROUP - 1) / GROUP;
    const int32_t middle = (groups + 1) / 2 * GROUP, from = has_scores() ? 0 : middle;
    const int32_t to = has_scores() ? middle : groups * GROUP;
    const int32_t values = N > ALONG ? (a.v_dim + GROUP - 1) / GROUP * GROUP : 0;
    const int32_t both = max(min(to, values), from); /* columns of both */
    const int pair = (int)threadIdx.x / (2 * WARP) % 2 * 16,
              key = (int)threadIdx.x / WARP % 2 * 16;
    const tile_rows own[] = {
        {&s->q[pair][from], K_PITCH},
        {&s->g[pair][from], V_PITCH}
    };
    const tile_rows rest = {&s->q[pair][both], K_PITCH};
#pragma unroll
    for (int i = 0; i < N_SCORES * SCORES; i++) t[i / SCORES][i / 4 % 2][i % 4] = 0.0f;
    if (N > ALONG) multiply_rows<2, 2>(t, own, {&s->key[key][from], K_PITCH}, both - from);
    multiply_rows<1, 2>(t, &rest, {&s->key[key][both], K_PITCH}, to - both);
    float *const parts[] = {s->slope, s->weight};
#pragma unroll
    for (int i = 0; i < N * SCORES && !has_scores(); i++) {
        const int at = own_pair(i) * KEYS_PITCH + own_key(i % SCORES);
        parts[i / SCORES][at] = t[i / SCORES][i / 4 % 2][i % 4];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N * SCORES && has_scores(); i++) {
        const int at = own_pair(i) * KEYS_PITCH + own_key(i % SCORES);
        t[i / SCORES][i / 4 % 2][i % 4] += parts[i / SCORES][at];
    }
    __syncthreads();
}

/* From scores to slopes, and to weights where they are asked for, [pair][key]. */
template <int PITCH, bool WEIGHTS>
static __device__ __forceinline__ void slope_tile(attention_shared *s, const tile_scores &t,
                                                  uint32_t bits, float scale) {
#pragma unroll
    for (int i = 0; i < SCORES && has_scores(); i++) {
        const int pair = own_pair(i), at = pair * PITCH + own_key(i);
        const bool live = bits >> i & 1;
        const float p = live ? expf(t[SCORE][i / 4][i % 4] * scale - s->lse[pair]) : 0.0f;
        s->slope[at] = live ? p * (t[ALONG][i / 4][i % 4] - s->delta[pair]) * scale : 0.0f;
        if (WEIGHTS) s->weight[at] = p;
    }
}

/* ---- sums: a warp has every WARPS-th group of columns ---- */

typedef group_sum<2> tile_sum[K_GROUPS];

/* sum += factor times rows, in the first `cols` columns. */
template <typename FACTOR>
static __device__ __forceinline__ void add_rows(tile_sum &sum, FACTOR factor, const float *rows,
                                                int pitch, int32_t cols) {
#pragma unroll
    for (int k = 0; k < K_GROUPS; k++) {
        const int first = ((int)threadIdx.x / WARP + k * WARPS) * GROUP;
        if (first < cols) add_group<TILE>(sum[k], factor, rows + first, pitch);
    }
}

/* The first n rows, `cols` columns each, at `to`; more: they are added there. */
static __device__ __forceinline__ void store_rows(const tile_sum &sum, int n, int32_t cols,
                                                  float *to, bool more = false) {
#pragma unroll
    for (int k = 0; k < K_GROUPS; k++) {
        const int first = ((int)threadIdx.x / WARP + k * WARPS) * GROUP;
        for_group(sum[k], [&](int row, int col, float value) {
            if (row >= n || first + col >= cols) return;
            float *at = to + (int64_t)row * cols + first + col;
            *at = more ? *at + value : value;
        });
    }
}

/* ---- queries ---- */

/* lse and delta of the tile's pairs, and both in memory. */
static __device__ void find_denominators(attention_shared *s, const attention_job &j,
                                         const row_tile &t) {
    const hd_attention_back_args &a = j.a;
    part_sum part[2] = {
  /* of the thread's rows */
        {-CUDART_INF_F, 0.0f},
        {-CUDART_INF_F, 0.0f}
    };
    key_tile keys = {true, 0, -1};
    while (next_keys(&keys, j, t.first / a.heads, (t.end - 1) / a.heads)) {
        const uint32_t bits = seen(j, t.first, t.end, keys);
        tile_scores scores;
        if (!__syncthreads_or(bits != 0)) continue;
        load_keys(s, j, keys);
        wait_for_copies();
        __syncthreads();
        score_tile<1>(scores, s, a);
#pragma unroll
        for (int i = 0; i < SCORES; i++) {
            if (!(bits >> i & 1)) continue;
            const float score = scores[SCORE][i / 4][i % 4] * a.scale;
            part[i % 4 / 2] = joined(part[i % 4 / 2], {score, 1.0f});
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const part_sum all = joined_over_row(part[i]);
        if (has_scores() && own_term() == 0) {
            s->part[threadIdx.x / WARP % 2][own_pair(2 * i)] = all;
        }
    }
    __syncthreads();
    if (threadIdx.x < TILE) {
        const int own = (int)threadIdx.x;
        part_sum all = joined(s->part[0][own], s->part[1][own]);
        if (a.sink) all = joined(all, {a.sink[(t.first + own) % a.heads], 1.0f});
        s->lse[own] = all.top + logf(all.total);
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
    attention_job j = job_of(a, t.seq);
    if (t.first == t.end) return;
    if (a.selected && a.heads % TILE == 0) { /* the tile is of one row */
        j.listed = a.selected + (j.first_row + t.first / a.heads) * a.n_selected;
    }
    load_queries(s, j, t.first, t.end);
    find_denominators(s, j, t);
    tile_sum dq = {};
    key_tile keys = {true, 0, -1};
    while (next_keys(&keys, j, t.first / a.heads, (t.end - 1) / a.heads)) {
        const uint32_t bits = seen(j, t.first, t.end, keys);
        tile_scores scores;
        if (!__syncthreads_or(bits != 0)) continue;
        load_keys(s, j, keys);
        wait_for_copies();
        __syncthreads();
        score_tile<N_SCORES>(scores, s, a);
        slope_tile<PAIRS_PITCH, false>(s, scores, bits, a.scale);
        __syncthreads();
        add_rows(
            dq, [&](int pair, int key) { return s->slope[pair * PAIRS_PITCH + key]; },
            s->key[0], K_PITCH, a.k_dim);
    }
    store_rows(dq, t.end - t.first, a.k_dim, a.dq + j.pair_at(t.first) * a.k_dim);
}

/* ---- keys ---- */

/* Sums what the pairs of rows [first, last] give to a tile of keys; to: where its first key's gradient is,
 * more: which has a part already. */
static __device__ void key_back(attention_shared *s, const attention_job &j, const key_tile &t,
                                int32_t first, int32_t last, float *to, bool more = false) {
    const hd_attention_back_args &a = j.a;
    const int32_t end = min(last + 1, j.rows) * a.heads;
    const auto slope = [&](int key, int pair) { return s->slope[pair * KEYS_PITCH + key]; };
    const auto weight = [&](int key, int pair) { return s->weight[pair * KEYS_PITCH + key]; };
    tile_sum dk = {};
    load_keys(s, j, t);
    for (int32_t pair = first * a.heads; pair < end; pair += TILE) {
        const uint32_t bits = seen(j, pair, end, t);
        tile_scores scores;
        if (!__syncthreads_or(bits != 0)) continue;
        load_queries(s, j, pair, end);
        for (int i = (int)threadIdx.x; i < TILE && pair + i < end; i += THREADS) {
            s->lse[i] = a.lse[j.pair_at(pair + i)];
            s->delta[i] = a.delta[j.pair_at(pair + i)];
        }
        wait_for_copies();
        __syncthreads();
        score_tile<N_SCORES>(scores, s, a);
        slope_tile<KEYS_PITCH, true>(s, scores, bits, a.scale);
        __syncthreads();
        add_rows(dk, slope, s->q[0], K_PITCH, a.k_dim);
        add_rows(dk, weight, s->g[0], V_PITCH, a.v_dim);
    }
    store_rows(dk, t.end - t.first, a.k_dim, to, more);
}

static __global__ void __launch_bounds__(THREADS, 1) recent_back(hd_attention_back_args a) {
    extern __shared__ __align__(16) uint8_t room[];
    const row_tile t = find_tile<TILE>(a.seqs, 1, 1);
    const attention_job j = job_of(a, t.seq);
    if (t.first == t.end) return;
    key_back(reinterpret_cast<attention_shared *>(room), j, {true, t.first, t.end}, t.first,
             t.end - 2 + a.window, a.drecent + (j.first_row + t.first) * a.k_dim);
}

/* Gradients of entries, of chunks from `chunk` on, which are rows of their sequence. parts: [chunks of the
 * call, entries, k_dim], a block has one chunk; NULL: it has all. */
struct entry_parts {
    float *parts;
    int32_t chunk, n;

    /* Where the part of an entry is; of all entries, `at` is the first one's number. */
    __device__ float *at(const hd_attention_back_args &a, int32_t of_call, int64_t at) const {
        return parts + ((int64_t)of_call * (a.rows / a.ratio) + at) * a.k_dim;
    }
};

/* The first row that sees an entry of the tile. */
static __device__ int32_t first_seeing(const row_tile &t, int32_t ratio) {
    return (t.first + 1) * ratio - 1;
}

static __global__ void __launch_bounds__(THREADS, 1)
    entries_back(hd_attention_back_args a, entry_parts p) {
    extern __shared__ __align__(16) uint8_t room[];
    attention_shared *s = reinterpret_cast<attention_shared *>(room);
    const row_tile t = find_tile<TILE>(a.seqs, 1, a.ratio);
    const attention_job j = job_of(a, t.seq);
    if (t.first == t.end) return;
    const int64_t entry = (int64_t)a.first_entry[t.seq] + t.first;
    const int32_t row = first_seeing(t, a.ratio), before = row / CHUNK;
    const int32_t own = p.chunk + (int32_t)blockIdx.y;
    const int32_t end = p.parts ? own + 1 : (j.rows - 1) / CHUNK + 1;
    for (int32_t c = p.parts ? own : before; c < end; c++) {
        const int32_t first = max(row, c * CHUNK), last = min(j.rows, (c + 1) * CHUNK) - 1;
        float *to =
            p.parts ? p.at(a, (int32_t)blockIdx.y, entry) : a.dentries + entry * a.k_dim;
        if (first <= last) {
            key_back(s, j, {false, t.first, t.end}, first, last, to, !p.parts && c > before);
        }
    }
}

/* Adds parts of n chunks, in order; a block has a tile of entries. */
static __global__ void __launch_bounds__(THREADS)
    add_entry_parts(hd_attention_back_args a, entry_parts p) {
    const row_tile t = find_tile<TILE>(a.seqs, 1, a.ratio);
    const attention_job j = job_of(a, t.seq);
    if (t.first == t.end) return;
    const int64_t entry = (int64_t)a.first_entry[t.seq] + t.first;
    const int32_t before = first_seeing(t, a.ratio) / CHUNK;
    const int32_t first = max(p.chunk, before);
    const int32_t end = min(p.chunk + p.n, (j.rows - 1) / CHUNK + 1);
    for (int32_t i = (int32_t)threadIdx.x; i < (t.end - t.first) * a.k_dim && first < end;
         i += THREADS) {
        float *to = a.dentries + entry * a.k_dim + i, sum = first > before ? *to : 0.0f;
        for (int32_t c = first; c < end; c++) sum += p.at(a, c - p.chunk, entry)[i];
        *to = sum;
    }
}

static void sum_entries(cudaStream_t queue, const hd_attention_back_args *a) {
    constexpr size_t SHARED = sizeof(attention_shared);
    const unsigned tiles = blocks_for(a->rows / a->ratio, TILE) + (unsigned)a->seqs.n;
    const int32_t most = a->seqs.most_rows ? a->seqs.most_rows : a->rows;
    const int32_t chunks = (most + CHUNK - 1) / CHUNK;
    const int64_t each = (int64_t)(a->rows / a->ratio) * a->k_dim;
    const int64_t fit = each ? a->n_parts / each : 0;
    if (chunks == 1 || fit == 0) {
        entries_back<<<tiles, THREADS, SHARED, queue>>>(*a, entry_parts{nullptr, 0, 0});
        return;
    }
    entry_parts p = {a->parts, 0, 0};
    for (; p.chunk < chunks; p.chunk += p.n) {
        p.n = fit < chunks - p.chunk ? (int32_t)fit : chunks - p.chunk;
        entries_back<<<dim3(tiles, (unsigned)p.n), THREADS, SHARED, queue>>>(*a, p);
        add_entry_parts<<<tiles, THREADS, 0, queue>>>(*a, p);
    }
}

struct sink_term : term_of_rows {
    hd_attention_back_args a;

    __device__ float *to(int32_t head) const {
        return a.dsink + head;
    }

    __device__ float at(int64_t r, int32_t head, const row_chunk &) const {
        const int64_t at = r * a.heads + head;
        return -(float)((double)a.delta[at] * exp((double)a.sink[head] - (double)a.lse[at]));
    }
};

void hd_attention_back_cuda(hd_stream *s, const hd_attention_back_args *a) {
    constexpr size_t SHARED = sizeof(attention_shared);
    cudaStream_t queue = hd_cuda_stream(s);
    const unsigned seqs = (unsigned)a->seqs.n;
    if (a->rows == 0) return;
    if (a->k_dim > K_MOST || a->v_dim > V_MOST) {
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
    if (a->ratio) sum_entries(queue, a);
    if (a->dsink) {
        sum_columns(queue, sink_term{{}, *a}, hd_row_sums{a->seqs, a->parts, a->n_parts},
                    a->rows, a->heads);
    }
    hd_cuda_check(s, "attention_back");
}
