/* naive_back_cuda.cu - gradients of naive MLA attention, in tiles of queries and keys of one head. */
#include "ops/backward/attention_tiles_internal.cuh"

constexpr int TILE = 64, K_MOST = 192, V_MOST = 128; /* queries and keys; columns */
constexpr int K_PITCH = row_pitch(K_MOST), V_PITCH = row_pitch(V_MOST);
constexpr int QUERY_ROWS = row_pitch(TILE), KEY_ROWS = term_pitch(TILE); /* of [query][key] */

/* Queries and their gradients, keys and values: rows of one head, zero where there are none. */
struct naive_rows {
    float k[TILE][K_PITCH], v[TILE][V_PITCH];
};

struct naive_shared {
    naive_rows query, key;
    float slope[TILE * KEY_ROWS], weight[TILE * KEY_ROWS];
    part_sum part[2][TILE];
    float lse[TILE], delta[TILE];
};

/* One head of a sequence; rows count from its beginning. */
struct naive_job {
    const hd_attention_naive_back_args &a;
    int64_t first_row;
    int32_t head;

    __device__ __forceinline__ int64_t at(int32_t row) const {
        return (first_row + row) * a.heads + head;
    }
};

/* Queries, and the gradients of their outputs. */
static __device__ void load_queries(naive_rows *to, const naive_job &j, int32_t first,
                                    int32_t end) {
    const int32_t k_dim = j.a.nope_dim + j.a.rope_dim;
    for (int i = (int)threadIdx.x / WARP; i < TILE; i += WARPS) {
        const bool live = first + i < end;
        const int64_t at = j.at(first + i);
        put_row<K_MOST>(to->k[i], live ? floats(j.a.q) + at * k_dim : nullptr, k_dim);
        put_row<V_MOST>(to->v[i], live ? floats(j.a.g) + at * j.a.v_dim : nullptr, j.a.v_dim);
    }
}

/* Keys and values: a key is its made part and the rotated one. */
static __device__ void load_keys(naive_rows *to, const naive_job &j, int32_t first,
                                 int32_t end) {
    const int64_t wide = j.a.nope_dim + j.a.v_dim,
                  between = stride_of(j.a.rotated, j.a.rope_dim);
    const bool quads = j.a.nope_dim % QUAD == 0 && j.a.rope_dim % QUAD == 0 &&
                       in_quads(j.a.made, wide, 0) && in_quads(floats(j.a.rotated), between, 0);
    const int each = quads ? QUAD : 1;
    for (int i = (int)threadIdx.x / WARP; i < TILE; i += WARPS) {
        const bool live = first + i < end;
        const float *made = j.a.made + j.at(first + i) * wide;
        const float *rotated = floats(j.a.rotated) + (j.first_row + first + i) * between;
#pragma unroll 2
        for (int c = (int)threadIdx.x % WARP * each; c < K_MOST; c += WARP * each) {
            const bool inside = live && c < j.a.nope_dim + j.a.rope_dim;
            const float *from = c < j.a.nope_dim ? made + c : rotated + c - j.a.nope_dim;
            if (quads) {
                copy_async<16>(to->k[i] + c, inside ? from : j.a.made, inside);
            } else {
                copy_async<4>(to->k[i] + c, inside ? from : j.a.made, inside);
            }
        }
        put_row<V_MOST>(to->v[i], live ? made + j.a.nope_dim : nullptr, j.a.v_dim);
    }
}

/* ---- scores: a warp has 16 queries and 32 keys ---- */

constexpr int SCORES = 16; /* of a thread: query own_query(i), key own_key(i) */

static __device__ __forceinline__ int own_query(int i) {
    return (int)threadIdx.x / (2 * WARP) * 16 + sum_row(i % 4);
}

static __device__ __forceinline__ int own_key(int i) {
    return (int)threadIdx.x / WARP % 2 * 32 + i / 4 * 8 + sum_col(i % 4);
}

/* <q, key>, and <g, value> */
static __device__ __forceinline__ void score_keys(float (*score)[4][4], const naive_shared *s) {
    const tile_rows own = {s->query.k[threadIdx.x / (2 * WARP) * 16], K_PITCH};
    multiply_rows<1, 4>(score, &own, {s->key.k[threadIdx.x / WARP % 2 * 32], K_PITCH}, K_MOST);
}

static __device__ __forceinline__ void score_values(float (*along)[4][4],
                                                    const naive_shared *s) {
    const tile_rows own = {s->query.v[threadIdx.x / (2 * WARP) * 16], V_PITCH};
    multiply_rows<1, 4>(along, &own, {s->key.v[threadIdx.x / WARP % 2 * 32], V_PITCH}, V_MOST);
}

/* Slopes, and weights where they are asked for, [query][key], of queries from `query` and keys from `key`
 * on. */
template <int PITCH, bool WEIGHTS>
static __device__ __forceinline__ void slope_tile(naive_shared *s, int32_t query, int32_t last,
                                                  int32_t key, float scale) {
    float score[1][4][4] = {}, along[1][4][4] = {};
    score_keys(score, s);
    score_values(along, s);
#pragma unroll
    for (int i = 0; i < SCORES; i++) {
        const int q = own_query(i), k = own_key(i), at = q * PITCH + k;
        const bool live = query + q < last && key + k <= query + q;
        const float p = live ? expf(score[0][i / 4][i % 4] * scale - s->lse[q]) : 0.0f;
        s->slope[at] = live ? p * (along[0][i / 4][i % 4] - s->delta[q]) * scale : 0.0f;
        if (WEIGHTS) s->weight[at] = p;
    }
}

/* ---- sums: a warp has 16 rows, and every other group of columns ---- */

template <int GROUPS, typename FACTOR>
static __device__ __forceinline__ void add_rows(group_sum<1> (&sum)[GROUPS], FACTOR factor,
                                                const float *rows, int pitch) {
    const int own = (int)threadIdx.x / (2 * WARP) * 16;
#pragma unroll
    for (int k = 0; k < GROUPS; k++) {
        const int first = ((int)threadIdx.x / WARP % 2 + 2 * k) * GROUP;
        add_group<TILE>(
            sum[k], [&](int row, int term) { return factor(own + row, term); }, rows + first,
            pitch);
    }
}

/* The first n rows; to(row, c): where a column below `cols` is. */
template <int GROUPS, typename TO>
static __device__ __forceinline__ void store_rows(const group_sum<1> (&sum)[GROUPS], int n,
                                                  int32_t cols, TO to) {
    const int own = (int)threadIdx.x / (2 * WARP) * 16;
#pragma unroll
    for (int k = 0; k < GROUPS; k++) {
        const int first = ((int)threadIdx.x / WARP % 2 + 2 * k) * GROUP;
        for_group(sum[k], [&](int row, int col, float value) {
            if (own + row < n && first + col < cols) *to(own + row, first + col) = value;
        });
    }
}

constexpr int K_GROUPS = K_MOST / GROUP / 2, V_GROUPS = V_MOST / GROUP / 2; /* of a warp */

/* ---- queries ---- */

/* lse and delta of the tile's rows, and both in memory. */
static __device__ void find_denominators(naive_shared *s, const naive_job &j,
                                         const row_tile &t) {
    part_sum part[2] = {
  /* of the thread's rows */
        {-CUDART_INF_F, 0.0f},
        {-CUDART_INF_F, 0.0f}
    };
    for (int32_t first = 0; first < t.end; first += TILE) {
        float score[1][4][4] = {};
        load_keys(&s->key, j, first, t.end);
        wait_for_copies();
        __syncthreads();
        score_keys(score, s);
#pragma unroll
        for (int i = 0; i < SCORES; i++) {
            if (first + own_key(i) > t.first + own_query(i)) continue;
            part[i % 4 / 2] =
                joined(part[i % 4 / 2], {score[0][i / 4][i % 4] * j.a.scale, 1.0f});
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const part_sum all = joined_over_row(part[i]);
        if (own_term() == 0) s->part[threadIdx.x / WARP % 2][own_query(2 * i)] = all;
    }
    __syncthreads();
    if (threadIdx.x < TILE) {
        const part_sum all = joined(s->part[0][threadIdx.x], s->part[1][threadIdx.x]);
        s->lse[threadIdx.x] = all.top + logf(all.total);
    }
    for (int i = (int)threadIdx.x / WARP; i < t.end - t.first; i += WARPS) {
        const int64_t at = j.at(t.first + i) * j.a.v_dim;
        const float delta =
            (float)warp_dot64(floats(j.a.out) + at, floats(j.a.g) + at, j.a.v_dim);
        if (threadIdx.x % WARP == 0) s->delta[i] = delta;
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < t.end - t.first; i += THREADS) {
        j.a.lse[j.at(t.first + i)] = s->lse[i];
        j.a.delta[j.at(t.first + i)] = s->delta[i];
    }
}

static __global__ void __launch_bounds__(THREADS, 1)
    naive_queries(hd_attention_naive_back_args a) {
    extern __shared__ __align__(16) uint8_t room[];
    naive_shared *s = reinterpret_cast<naive_shared *>(room);
    const row_tile t = find_tile<TILE>(a.seqs, 1, 1);
    const naive_job j = {a, a.seqs.first_row[t.seq], (int32_t)blockIdx.y};
    if (t.first == t.end) return;
    load_queries(&s->query, j, t.first, t.end);
    find_denominators(s, j, t);
    group_sum<1> dq[K_GROUPS] = {};
    for (int32_t first = 0; first < t.end; first += TILE) {
        load_keys(&s->key, j, first, t.end);
        wait_for_copies();
        __syncthreads();
        slope_tile<QUERY_ROWS, false>(s, t.first, t.end, first, a.scale);
        __syncthreads();
        add_rows(
            dq, [&](int query, int key) { return s->slope[query * QUERY_ROWS + key]; },
            s->key.k[0], K_PITCH);
        __syncthreads();
    }
    const int32_t k_dim = a.nope_dim + a.rope_dim;
    store_rows(dq, t.end - t.first, k_dim,
               [&](int i, int c) { return a.dq + j.at(t.first + i) * k_dim + c; });
}

/* ---- keys ---- */

static __global__ void __launch_bounds__(THREADS, 1)
    naive_keys(hd_attention_naive_back_args a) {
    extern __shared__ __align__(16) uint8_t room[];
    naive_shared *s = reinterpret_cast<naive_shared *>(room);
    const row_tile t = find_tile<TILE>(a.seqs, 1, 1);
    const naive_job j = {a, a.seqs.first_row[t.seq], (int32_t)blockIdx.y};
    if (t.first == t.end) return;
    const auto slope = [&](int key, int query) { return s->slope[query * KEY_ROWS + key]; };
    const auto weight = [&](int key, int query) { return s->weight[query * KEY_ROWS + key]; };
    group_sum<1> dk[K_GROUPS] = {}, dv[V_GROUPS] = {};
    load_keys(&s->key, j, t.first, t.end);
    for (int32_t first = t.first; first < t.last; first += TILE) {
        load_queries(&s->query, j, first, t.last);
        for (int i = (int)threadIdx.x; i < TILE && first + i < t.last; i += THREADS) {
            s->lse[i] = a.lse[j.at(first + i)];
            s->delta[i] = a.delta[j.at(first + i)];
        }
        wait_for_copies();
        __syncthreads();
        slope_tile<KEY_ROWS, true>(s, first, t.last, t.first, a.scale);
        __syncthreads();
        add_rows(dk, slope, s->query.k[0], K_PITCH);
        add_rows(dv, weight, s->query.v[0], V_PITCH);
        __syncthreads();
    }
    const int64_t wide = a.nope_dim + a.v_dim;
    store_rows(dk, t.end - t.first, a.nope_dim + a.rope_dim, [&](int i, int c) {
        const int64_t at = j.at(t.first + i);
        return c < a.nope_dim ? a.dmade + at * wide + c
                              : a.part + at * a.rope_dim + c - a.nope_dim;
    });
    store_rows(dv, t.end - t.first, a.v_dim, [&](int i, int c) {
        return a.dmade + j.at(t.first + i) * wide + a.nope_dim + c;
    });
}

/* drotated = the sum over heads, in order; a thread per element */
static __global__ void __launch_bounds__(BLOCK) sum_rotated(hd_attention_naive_back_args a) {
    const int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x;
    const int64_t row = i / a.rope_dim, c = i % a.rope_dim;
    float sum = 0.0f;
    if (row >= a.rows) return;
    for (int32_t h = 0; h < a.heads; h++) sum += a.part[(row * a.heads + h) * a.rope_dim + c];
    static_cast<float *>(a.drotated.data)[row * stride_of(a.drotated, a.rope_dim) + c] = sum;
}

void hd_attention_naive_back_cuda(hd_stream *s, const hd_attention_naive_back_args *a) {
    cudaStream_t queue = hd_cuda_stream(s);
    if (a->rows == 0) return;
    if (a->nope_dim + a->rope_dim > K_MOST || a->v_dim > V_MOST) {
        hd_stream_fail(s, HD_EUNSUPPORTED, "keys this wide cannot be trained on a GPU");
        return;
    }
    const dim3 grid((unsigned)(a->rows / TILE + a->seqs.n), (unsigned)a->heads);
    hd_cuda_allow_shared((const void *)naive_queries, sizeof(naive_shared));
    hd_cuda_allow_shared((const void *)naive_keys, sizeof(naive_shared));
    naive_queries<<<grid, THREADS, sizeof(naive_shared), queue>>>(*a);
    naive_keys<<<grid, THREADS, sizeof(naive_shared), queue>>>(*a);
    sum_rotated<<<blocks_for((int64_t)a->rows * a->rope_dim, BLOCK), BLOCK, 0, queue>>>(*a);
    hd_cuda_check(s, "attention_naive_back");
}
