/* naive_back_cuda.cu - gradients of naive MLA attention, in tiles of queries and keys of one head. */
#include "ops/backward/attention_tiles_internal.cuh"

typedef tile_sizes<64, 192, 128> of;
constexpr int TILE = of::TILE, EACH = of::EACH;

/* Queries and their gradients, keys and values: rows of one head, zero where there are none. */
struct naive_rows {
    float k[TILE][of::K_PITCH], v[TILE][of::V_PITCH];
};

struct naive_shared {
    naive_rows own, other;
    float slope[TILE][of::PITCH], weight[TILE][of::PITCH]; /* [own, other] */
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
#pragma unroll 4
    for (int i = (int)threadIdx.x / WARP; i < TILE; i += WARPS) {
        const bool live = first + i < end;
        const int64_t at = j.at(first + i);
        put_row<of::K_MOST>(to->k[i], live ? floats(j.a.q) + at * k_dim : nullptr, k_dim);
        put_row<of::V_MOST>(to->v[i], live ? floats(j.a.g) + at * j.a.v_dim : nullptr,
                            j.a.v_dim);
    }
}

/* Keys and values: a key is its made part and the rotated one. */
static __device__ void load_keys(naive_rows *to, const naive_job &j, int32_t first,
                                 int32_t end) {
    const int64_t wide = j.a.nope_dim + j.a.v_dim,
                  between = stride_of(j.a.rotated, j.a.rope_dim);
#pragma unroll 4
    for (int i = (int)threadIdx.x / WARP; i < TILE; i += WARPS) {
        const bool live = first + i < end;
        const float *made = j.a.made + j.at(first + i) * wide;
        const float *rotated = floats(j.a.rotated) + (j.first_row + first + i) * between;
#pragma unroll
        for (int c = (int)threadIdx.x % WARP; c < of::K_MOST; c += WARP) {
            const bool inside = live && c < j.a.nope_dim + j.a.rope_dim;
            const float *from = c < j.a.nope_dim ? made + c : rotated + c - j.a.nope_dim;
            to->k[i][c] = inside ? *from : 0.0f;
        }
        put_row<of::V_MOST>(to->v[i], live ? made + j.a.nope_dim : nullptr, j.a.v_dim);
    }
}

/* score and along of the own rows with the others. */
static __device__ __forceinline__ void score_rows(float (*score)[EACH], float (*along)[EACH],
                                                  const naive_shared *s) {
    multiply<EACH>(score, s->own.k[0], of::K_PITCH, s->other.k[0], of::K_PITCH, of::K_MOST);
    multiply<EACH>(along, s->own.v[0], of::V_PITCH, s->other.v[0], of::V_PITCH, of::V_MOST);
}

/* ---- queries ---- */

/* lse and delta of the tile's rows, and both in memory. */
static __device__ void find_denominators(naive_shared *s, const naive_job &j,
                                         const row_tile &t) {
    part_sum part[EACH];
    for (int i = 0; i < EACH; i++) part[i] = {-CUDART_INF_F, 0.0f};
    for (int32_t first = 0; first < t.end; first += TILE) {
        float score[EACH][EACH] = {};
        load_keys(&s->other, j, first, t.end);
        __syncthreads();
        multiply<EACH>(score, s->own.k[0], of::K_PITCH, s->other.k[0], of::K_PITCH, of::K_MOST);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
#pragma unroll
            for (int k = 0; k < EACH; k++) {
                if (first + own_x() + SIDE * k > t.first + own_y() + SIDE * i) continue;
                part[i] = joined(part[i], {score[i][k] * j.a.scale, 1.0f});
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const part_sum all = joined_over_row(part[i]);
        if (own_x() == 0) s->lse[own_y() + SIDE * i] = all.top + logf(all.total);
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
    load_queries(&s->own, j, t.first, t.end);
    find_denominators(s, j, t);
    float4 dq[EACH][of::K_QUADS] = {};
    for (int32_t first = 0; first < t.end; first += TILE) {
        float score[EACH][EACH] = {}, along[EACH][EACH] = {};
        load_keys(&s->other, j, first, t.end);
        __syncthreads();
        score_rows(score, along, s);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int own = own_y() + SIDE * i;
#pragma unroll
            for (int k = 0; k < EACH; k++) {
                const int other = own_x() + SIDE * k;
                const bool live = t.first + own < t.end && first + other <= t.first + own;
                const float p = live ? expf(score[i][k] * a.scale - s->lse[own]) : 0.0f;
                s->slope[own][other] =
                    live ? p * (along[i][k] - s->delta[own]) * a.scale : 0.0f;
            }
        }
        __syncthreads();
        add_rows<TILE, of::K_QUADS>(dq, s->slope[0], s->other.k[0], of::K_PITCH, of::K_MOST);
        __syncthreads();
    }
    const int32_t k_dim = a.nope_dim + a.rope_dim;
    store_rows<EACH>(dq, t.end - t.first, k_dim,
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
    float4 dk[EACH][of::K_QUADS] = {}, dv[EACH][of::V_QUADS] = {};
    load_keys(&s->own, j, t.first, t.end);
    for (int32_t first = t.first; first < t.last; first += TILE) {
        float score[EACH][EACH] = {}, along[EACH][EACH] = {};
        load_queries(&s->other, j, first, t.last);
        for (int i = (int)threadIdx.x; i < TILE && first + i < t.last; i += THREADS) {
            s->lse[i] = a.lse[j.at(first + i)];
            s->delta[i] = a.delta[j.at(first + i)];
        }
        __syncthreads();
        score_rows(score, along, s);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int own = own_y() + SIDE * i;
#pragma unroll
            for (int k = 0; k < EACH; k++) {
                const int other = own_x() + SIDE * k;
                const bool live = first + other < t.last && t.first + own <= first + other;
                const float p = live ? expf(score[i][k] * a.scale - s->lse[other]) : 0.0f;
                s->weight[own][other] = p;
                s->slope[own][other] =
                    live ? p * (along[i][k] - s->delta[other]) * a.scale : 0.0f;
            }
        }
        __syncthreads();
        add_rows<TILE, of::K_QUADS>(dk, s->slope[0], s->other.k[0], of::K_PITCH, of::K_MOST);
        add_rows<TILE, of::V_QUADS>(dv, s->weight[0], s->other.v[0], of::V_PITCH, of::V_MOST);
        __syncthreads();
    }
    const int64_t wide = a.nope_dim + a.v_dim;
    store_rows<EACH>(dk, t.end - t.first, a.nope_dim + a.rope_dim, [&](int i, int c) {
        const int64_t at = j.at(t.first + i);
        return c < a.nope_dim ? a.dmade + at * wide + c
                              : a.part + at * a.rope_dim + c - a.nope_dim;
    });
    store_rows<EACH>(dv, t.end - t.first, a.v_dim, [&](int i, int c) {
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
    if (a->nope_dim + a->rope_dim > of::K_MOST || a->v_dim > of::V_MOST) {
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
