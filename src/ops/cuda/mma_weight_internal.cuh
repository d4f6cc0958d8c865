/* mma_weight_internal.cuh - how a warp reads stored rows for the tensor cores: spans of a row, and
 * a ring of them in shared memory that is filled ahead. */
#ifndef HD_OPS_CUDA_MMA_WEIGHT_INTERNAL_CUH
#define HD_OPS_CUDA_MMA_WEIGHT_INTERNAL_CUH

#include "ops/cuda/weight_internal.cuh"

constexpr int MMA_SLICES = 8;

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

/* Whether a span has several scales, which are exact in bfloat16: its elements contain them. */
template <int R>
constexpr bool SCALES_ELEMENTS = R == READ_E2M1 || R == READ_MXE4M3;

/* A lane's columns of one stored row. */
template <int R>
struct lane_raw {
    uint4 quad[span_of<R>::QUADS];
    float scale[2]; /* E2M1 may have one per GROUP; the others have one */
};

template <int R>
static __device__ __forceinline__ const uint8_t *lane_address(const weight_shape &s,
                                                              const weight_arrays &a,
                                                              int32_t row, int32_t span) {
    constexpr int bits = R == READ_BF16 ? 16 : R == READ_E2M1 ? 4 : 8;
    const int64_t first = (int64_t)row * s.cols + span * span_of<R>::COLS;
    return a.data + first * bits / 8 + threadIdx.x % 4 * 16;
}

/* Bytes from a lane's columns of a span to those of the next one. */
template <int R>
constexpr int SPAN_BYTES = 64 * span_of<R>::QUADS;

/* The scale of a lane's columns of a span, as it is stored; two bytes where E2M1 has one per GROUP. */
template <int R>
static __device__ __forceinline__ uint32_t load_codes(const weight_shape &s,
                                                      const weight_arrays &a, int32_t row,
                                                      int32_t span) {
    const int32_t col = span * span_of<R>::COLS;
    if constexpr (SCALES_ELEMENTS<R>) { /* scales are bytes */
        const int32_t own = col + (int32_t)(threadIdx.x % 4) * span_of<R>::LANE;
        const uint8_t *at =
            a.scale + (int64_t)(row >> s.row_shift) * s.scales_per_row + (own >> s.col_shift);
        static_assert(R == READ_E2M1 || span_of<R>::LANE == GROUP, "columns with one scale");
        if (!a.scale) return 0;
        if (R == READ_MXE4M3 || s.block_cols > GROUP) return __ldg(at);
        return __ldg(reinterpret_cast<const uint16_t *>(at));
    } else {
        return scale_code(s, a, row, col);
    }
}

template <int R>
static __device__ __forceinline__ void decode_codes(float *to, const weight_shape &s,
                                                    const weight_arrays &a, uint32_t codes) {
    if constexpr (R == READ_E2M1) {
        const uint32_t code[2] = {codes & 0xff, s.block_cols > GROUP ? codes : codes >> 8};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float power = e8m0_to_f32((uint8_t)code[i]);
            const float number = e4m3_to_f32((uint8_t)code[i]);
            const float scale = s.scale_type == HD_E8M0 ? power : number;
            to[i] = a.scale ? scale : 1.0f;
        }
    } else if constexpr (R == READ_MXE4M3) {
        to[0] = e8m0_to_f32((uint8_t)codes);
    } else {
        to[0] = scale_of_code(s, a, codes);
    }
}

/* Weights on their way through shared memory: a lane copies what it will read itself, of MT
 * tiles of 16 stored rows, STAGES - 1 spans ahead, so that nobody waits for anybody. The first of 256 bytes
 * brings all to the L2 cache: pieces of 64 bytes of many rows are slow to read from memory. */
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
    const uint8_t *from[MT][2]; /* what is sent next */
    int send_stage, take_stage;
    uint32_t next[MT][2]; /* codes of scales */
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

/* `from` of a span behind the one before, or of the first one of a group. */
template <int R, int MT>
static __device__ __forceinline__ void point_at_sent(lane_walk<R, MT> *w) {
#pragma unroll
    for (int i = 0; i < 2 * MT; i++) {
        w->from[i / 2][i % 2] += SPAN_BYTES<R>;
        if (w->sent.span != w->begin) continue;
        w->from[i / 2][i % 2] =
            lane_address<R>(w->s, w->a, row_of(*w, w->sent.group, i), w->sent.span);
    }
}

template <int R, int MT, int THREADS, int STAGES>
static __device__ __forceinline__ void send_span(weight_ring<R, MT, THREADS, STAGES> *ring,
                                                 lane_walk<R, MT> *w) {
    if (w->sent.group < w->n_groups) {
#pragma unroll
        for (int i = 0; i < 2 * MT; i++) {
            const uint8_t *from = w->from[i / 2][i % 2];
#pragma unroll
            for (int k = 0; k < span_of<R>::QUADS; k++) {
                const unsigned to = (unsigned)__cvta_generic_to_shared(
                    &ring->at[w->send_stage][i / 2][i % 2][k][threadIdx.x]);
                asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(to),
                             "l"(from + 64 * k)
                             : "memory");
            }
        }
        w->sent = next_of(*w, w->sent);
        point_at_sent(w);
        w->send_stage = w->send_stage + 1 == STAGES ? 0 : w->send_stage + 1;
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int R, int MT>
static __device__ __forceinline__ void fetch_scales(lane_walk<R, MT> *w, walk_at at) {
    if (at.group >= w->n_groups) return;
#pragma unroll
    for (int i = 0; i < 2 * MT; i++) {
        w->next[i / 2][i % 2] = load_codes<R>(w->s, w->a, row_of(*w, at.group, i), at.span);
    }
}

/* Sends the first spans. An empty walk has no groups. */
template <int R, int MT, int THREADS, int STAGES>
static __device__ __forceinline__ void start_walk(weight_ring<R, MT, THREADS, STAGES> *ring,
                                                  lane_walk<R, MT> *w) {
    if (w->begin == w->end) w->n_groups = 0;
    w->sent = {0, w->begin};
    point_at_sent(w);
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
        decode_codes<R>(own->scale, w->s, w->a, w->next[i / 2][i % 2]);
    }
    w->take_stage = w->take_stage + 1 == STAGES ? 0 : w->take_stage + 1;
    send_span(ring, w);
    fetch_scales(w, next_of(*w, at));
}

#endif
