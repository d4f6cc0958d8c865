/* mma_internal.cuh - rows of activations times stored rows on the tensor cores.
 *
 * mma.sync m16n8k16: the stored rows are A, exact in bfloat16 whatever their format; the rows
 * of x are B, each element as a sum of P bfloat16 numbers: EXACT of them hold all 24 bits of a
 * float, FAST is the nearest one. A row of the matrix is MMA_SLICES contiguous parts; an output
 * is their sum in order. A part adds spans of columns in order, each summed by the tensor cores
 * from zero and taken times its scale. So an output has the same bits however many rows share
 * the call, in every product of rows. Within a span a lane's columns are chosen so that it
 * loads 16 bytes of a row at once, which permutes the columns of A and B alike.
 *
 * gemm_small_m_internal.cuh gives slices to warps and is bounded by the weights' bytes;
 * gemm_large_m_internal.cuh shares weights and x over a block and is bounded by the tensor cores. */
#ifndef HD_OPS_CUDA_MMA_INTERNAL_CUH
#define HD_OPS_CUDA_MMA_INTERNAL_CUH

#include <cuda_bf16.h>

#include "ops/cuda/weight_internal.cuh"

constexpr int MMA_SLICES = 8;
constexpr int LARGE_M_ROWS = 64; /* of x in a block, at most */
constexpr size_t MAX_SHARED = 227 * 1024;

/* A span, by how the matrix is read: a lane's columns of a row, in QUADS of 16 bytes, four
 * lanes' side by side, and in EIGHTS of eight columns, two steps of mma. */
template <int R>
struct span_of {
    enum {
        COLS = R == READ_E2M1 ? 2 * SPAN : SPAN,
        LANE = COLS / 4,
        EIGHTS = LANE / 8,
        QUADS = R == READ_BF16 ? 2 : 1,
        QUAD_EIGHTS = EIGHTS / QUADS
    };
};

/* The first column of a lane's eight. */
template <int R>
static __device__ __forceinline__ int eight_col(int quarter, int eight) {
    constexpr int EACH = span_of<R>::QUAD_EIGHTS;
    return (eight / EACH * 4 + quarter) * EACH * 8 + eight % EACH * 8;
}

/* Rows of x, aligned to 16 bytes, and outputs of one block. */
struct mma_job {
    const cuda_act *x[LARGE_M_ROWS]; /* [n_x] */
    void *out[LARGE_M_ROWS];         /* [n_x] at the block's first output column */
};

struct mma_block {
    int32_t n_x, first_row, n_rows; /* stored rows [first_row, + n_rows) */
    bool out_f32;
};

/* Spans [begin, end) of part `slice` of a row. */
struct slice_range {
    int32_t begin, end;
};

template <int R>
static __device__ __forceinline__ slice_range slice_of(const weight_shape &s, int slice) {
    const int32_t spans = s.cols / span_of<R>::COLS;
    const int32_t per = (spans + MMA_SLICES - 1) / MMA_SLICES;
    return {min(slice * per, spans), min((slice + 1) * per, spans)};
}

/* ---- A: stored rows ---- */

/* A lane's columns of one stored row. */
template <int R>
struct lane_raw {
    uint4 quad[span_of<R>::QUADS];
    float scale[2]; /* E2M1 may have one per GROUP; the others' second is not used */
};

template <int R>
static __device__ __forceinline__ const uint8_t *lane_address(const weight_shape &s,
                                                              const weight_arrays &a,
                                                              int32_t row, int32_t span) {
    constexpr int bits = R == READ_BF16 ? 16 : R == READ_E4M3 ? 8 : 4;
    const int64_t first = (int64_t)row * s.cols + span * span_of<R>::COLS;
    return a.data + first * bits / 8 + threadIdx.x % 4 * 16;
}

template <int R>
static __device__ __forceinline__ void load_scale(float *to, const weight_shape &s,
                                                  const weight_arrays &a, int32_t row,
                                                  int32_t span) {
    const int32_t col = span * span_of<R>::COLS;
    if constexpr (R == READ_E2M1) {
        const int32_t own = col + (int32_t)(threadIdx.x % 4) * span_of<R>::LANE;
        to[0] = group_scale(s, a, row, own);
        to[1] = s.block_cols > GROUP ? to[0] : group_scale(s, a, row, own + GROUP);
    } else {
        to[0] = group_scale(s, a, row, col);
    }
}

/* Weights on their way through shared memory: a lane copies what it will read itself, of MT
 * tiles of 16 stored rows, STAGES - 1 spans ahead, so that nobody waits for anybody. */
template <int R, int MT, int THREADS, int STAGES>
struct weight_ring {
    uint4 at[STAGES][MT][2][span_of<R>::QUADS][THREADS];
};

/* A span of a group of 16 * MT stored rows. */
struct walk_at {
    int32_t group, span;
};

/* A lane's walk over spans [begin, end) of group after group; the weights of the next ones and
 * the scales of the next one are on their way. */
template <int R, int MT>
struct lane_walk {
    weight_shape s;
    weight_arrays a;
    int32_t first_row, last_row, own; /* of all groups; the lane's row in the first tile */
    int32_t begin, end, n_groups;
    walk_at sent;
    int send_stage, take_stage;
    float next_scale[MT][2][2];
};

template <int R, int MT>
static __device__ __forceinline__ walk_at next_of(const lane_walk<R, MT> &w, walk_at at) {
    const bool last = at.span + 1 == w.end;
    return {last ? at.group + 1 : at.group, last ? w.begin : at.span + 1};
}

/* Half i of the lane's rows; behind the last the last again. */
template <int R, int MT>
static __device__ __forceinline__ int32_t row_of(const lane_walk<R, MT> &w, int32_t group,
                                                 int i) {
    return min(w.first_row + w.own + group * 16 * MT + 8 * i, w.last_row);
}

template <int R, int MT, int THREADS, int STAGES>
static __device__ __forceinline__ void send_span(weight_ring<R, MT, THREADS, STAGES> *ring,
                                                 lane_walk<R, MT> *w) {
    if (w->sent.group < w->n_groups) {
#pragma unroll
        for (int i = 0; i < 2 * MT; i++) {
            const uint8_t *from =
                lane_address<R>(w->s, w->a, row_of(*w, w->sent.group, i), w->sent.span);
#pragma unroll
            for (int k = 0; k < span_of<R>::QUADS; k++) {
                const unsigned to = (unsigned)__cvta_generic_to_shared(
                    &ring->at[w->send_stage][i / 2][i % 2][k][threadIdx.x]);
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to),
                             "l"(from + 64 * k)
                             : "memory");
            }
        }
        w->sent = next_of(*w, w->sent);
        w->send_stage = w->send_stage + 1 == STAGES ? 0 : w->send_stage + 1;
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int R, int MT>
static __device__ __forceinline__ void fetch_scales(lane_walk<R, MT> *w, walk_at at) {
    if (at.group >= w->n_groups) return;
#pragma unroll
    for (int i = 0; i < 2 * MT; i++) {
        load_scale<R>(w->next_scale[i / 2][i % 2], w->s, w->a, row_of(*w, at.group, i),
                      at.span);
    }
}

/* Sends the first spans. An empty walk has no groups. */
template <int R, int MT, int THREADS, int STAGES>
static __device__ __forceinline__ void start_walk(weight_ring<R, MT, THREADS, STAGES> *ring,
                                                  lane_walk<R, MT> *w) {
    if (w->begin == w->end) w->n_groups = 0;
    w->sent = {0, w->begin};
    w->send_stage = w->take_stage = 0;
#pragma unroll
    for (int d = 0; d < STAGES - 1; d++) send_span(ring, w);
    fetch_scales(w, {0, w->begin});
}

/* The span that is next, and one more on its way. */
template <int R, int MT, int THREADS, int STAGES>
static __device__ __forceinline__ void take_span(lane_raw<R> (*to)[2],
                                                 weight_ring<R, MT, THREADS, STAGES> *ring,
                                                 lane_walk<R, MT> *w, walk_at at) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
#pragma unroll
    for (int i = 0; i < 2 * MT; i++) {
        lane_raw<R> *own = &to[i / 2][i % 2];
#pragma unroll
        for (int k = 0; k < span_of<R>::QUADS; k++) {
            own->quad[k] = ring->at[w->take_stage][i / 2][i % 2][k][threadIdx.x];
        }
        own->scale[0] = w->next_scale[i / 2][i % 2][0];
        own->scale[1] = w->next_scale[i / 2][i % 2][1];
    }
    w->take_stage = w->take_stage + 1 == STAGES ? 0 : w->take_stage + 1;
    send_span(ring, w);
    fetch_scales(w, next_of(*w, at));
}

/* Word i of the lane's 16 bytes or 32. */
template <int R>
static __device__ __forceinline__ uint32_t word_of(const lane_raw<R> &raw, int i) {
    const uint4 &q = raw.quad[i / 4];
    return i % 4 == 0 ? q.x : i % 4 == 1 ? q.y : i % 4 == 2 ? q.z : q.w;
}

static __device__ __forceinline__ uint32_t bf16_pair(float low, float high) {
    return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632); /* truncates */
}

static __device__ __forceinline__ uint32_t times(uint32_t pair, uint32_t factor) {
    uint32_t product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(factor));
    return product;
}

/* Four codes of E2M1 as two pairs: the bytes of bfloat16 by table, the signs on top. */
static __device__ __forceinline__ void e2m1_pairs(uint32_t *low, uint32_t *high,
                                                  uint32_t codes) {
    const uint32_t magnitude = codes & 0x7777, sign = (codes >> 3) & 0x1111;
    const uint32_t upper =
        __byte_perm(0x3f3f3f00, 0x40404040, magnitude) | __byte_perm(0x00008000, 0, sign);
    const uint32_t lower = __byte_perm(0xc0800000, 0xc0804000, magnitude);
    *low = __byte_perm(lower, upper, 0x5140);
    *high = __byte_perm(lower, upper, 0x7362);
}

/* Columns 4 * step, + 1 and + 2, + 3 of the lane's, as pairs of bfloat16. For E2M1 the scale,
 * which is exact in them, is in; the others' is the same over a span. */
template <int R>
static __device__ __forceinline__ void pairs_of(uint32_t *low, uint32_t *high,
                                                const lane_raw<R> &raw, int step) {
    if constexpr (R == READ_BF16) {
        *low = word_of(raw, 2 * step);
        *high = word_of(raw, 2 * step + 1);
    } else if constexpr (R == READ_E4M3) {
        const uint32_t w = word_of(raw, step);
        const float2 a = __half22float2(
            __half2(__nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)w, __NV_E4M3)));
        const float2 b = __half22float2(
            __half2(__nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)(w >> 16), __NV_E4M3)));
        *low = bf16_pair(a.x, a.y);
        *high = bf16_pair(b.x, b.y);
    } else {
        const float scale = raw.scale[step / (GROUP / 4)];
        const uint32_t pair = bf16_pair(scale, scale);
        e2m1_pairs(low, high, word_of(raw, step / 2) >> (step % 2 * 16));
        *low = times(*low, pair);
        *high = times(*high, pair);
    }
}

/* Stored rows lane / 4 and lane / 4 + 8 of a tile at one step, as the instruction wants. */
template <int R>
static __device__ __forceinline__ void make_step(uint32_t *a, const lane_raw<R> *raw,
                                                 int step) {
    pairs_of<R>(&a[0], &a[2], raw[0], step);
    pairs_of<R>(&a[1], &a[3], raw[1], step);
}

/* ---- B: rows of x ---- */

/* Eight columns of a row of x as P numbers each, the largest first. */
template <int P>
struct x_eight {
    uint4 part[P];
};

static __device__ __forceinline__ void load_eight(float *to, const cuda_act *x) {
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
        const float4 v = __ldg(reinterpret_cast<const float4 *>(x + i));
        to[i] = v.x;
        to[i + 1] = v.y;
        to[i + 2] = v.z;
        to[i + 3] = v.w;
    }
}

/* The pair as bfloat16, and what is left of it. */
static __device__ __forceinline__ uint32_t take_pair(float *low, float *high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(*low, *high);
    const uint32_t bits = *reinterpret_cast<const uint32_t *>(&pair);
    *low -= __uint_as_float(bits << 16);
    *high -= __uint_as_float(bits & 0xffff0000u);
    return bits;
}

template <int P>
static __device__ __forceinline__ x_eight<P> split_eight(const float *x) {
    x_eight<P> to;
    float left[8];
#pragma unroll
    for (int i = 0; i < 8; i++) left[i] = x[i];
#pragma unroll
    for (int p = 0; p < P; p++) {
        to.part[p].x = take_pair(&left[0], &left[1]);
        to.part[p].y = take_pair(&left[2], &left[3]);
        to.part[p].z = take_pair(&left[4], &left[5]);
        to.part[p].w = take_pair(&left[6], &left[7]);
    }
    return to;
}

/* ---- D ---- */

static __device__ __forceinline__ void mma(float *d, const uint32_t *a, uint32_t b0,
                                           uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Adds one eight of MT tiles of 16 stored rows and NT of eight rows of x, b_of(t, p), to d. The
 * small parts go first; products that follow each other have sums of their own, because one
 * that waits for the sum of the one before takes several times as long. */
template <int R, int P, int MT, int NT, typename B>
static __device__ __forceinline__ void add_eight(float (*d)[NT][4], const lane_raw<R> (*raw)[2],
                                                 int eight, B b_of) {
    uint32_t a[MT][2][4];
#pragma unroll
    for (int i = 0; i < MT * 2; i++) {
        make_step<R>(a[i / 2][i % 2], raw[i / 2], 2 * eight + i % 2);
    }
#pragma unroll
    for (int p = P - 1; p >= 0; p--) {
        uint4 b[NT];
#pragma unroll
        for (int t = 0; t < NT; t++) b[t] = b_of(t, p);
#pragma unroll
        for (int i = 0; i < MT * NT; i++) {
            mma(d[i / NT][i % NT], a[i / NT][0], b[i % NT].x, b[i % NT].y);
        }
#pragma unroll
        for (int i = 0; i < MT * NT; i++) {
            mma(d[i / NT][i % NT], a[i / NT][1], b[i % NT].z, b[i % NT].w);
        }
    }
}

/* A span's sums times its scale, into acc. */
template <int R, int MT, int NT>
static __device__ __forceinline__ void add_span(float (*acc)[NT][4], const float (*d)[NT][4],
                                                const lane_raw<R> (*raw)[2]) {
#pragma unroll
    for (int i = 0; i < MT * NT * 4; i++) {
        const int tile = i / (4 * NT), t = i / 4 % NT, k = i % 4;
        const float scale = R == READ_E2M1 ? 1.0f : raw[tile][k / 2].scale[0];
        acc[tile][t][k] = fmaf(d[tile][t][k], scale, acc[tile][t][k]);
    }
}

/* Whether rows of x may be loaded as they are here. */
static inline bool x_fits(const cuda_act *x, int64_t stride, int64_t head) {
    return (uintptr_t)x % 16 == 0 && stride % 4 == 0 && head % 4 == 0;
}

static __device__ __forceinline__ void put(const mma_job &job, const mma_block &b, int m, int n,
                                           float value) {
    if (m >= b.n_x || n >= b.n_rows) return;
    if (b.out_f32) {
        static_cast<float *>(job.out[m])[n] = value;
    } else {
        static_cast<cuda_act *>(job.out[m])[n] = narrow(value);
    }
}

#endif
