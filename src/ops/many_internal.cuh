/* many_internal.cuh - many rows of x times stored rows: a warp per 32 outputs and 32 rows.
 *
 * The next span's weights and rows of x are on their way while one is multiplied. */
#ifndef HD_OPS_MANY_INTERNAL_CUH
#define HD_OPS_MANY_INTERNAL_CUH

#include "ops/mma_internal.cuh"

constexpr int MANY_OUTS = 128; /* of a block */
constexpr int WARP_OUTS = 32, WARP_ROWS = 32;
constexpr int M_TILES = WARP_OUTS / 16, N_TILES = WARP_ROWS / 8;

/* What a thread fetches of a span: its lanes' weights and its pieces of x. */
template <int R>
struct many_ahead {
    enum { PIECES = span_of<R>::COLS / PIECE / 4 };
    lane_raw<R> raw[M_TILES][2];
    float x[PIECES][PIECE];
};

template <int R>
static __device__ __forceinline__ void fetch_span(many_ahead<R> *to, const mma_job &job,
                                                  const mma_block &b, const weight_shape &s,
                                                  const weight_arrays &a, int32_t span) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int first_out = warp % 4 * WARP_OUTS, row = threadIdx.x / 4,
              quarter = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2 * M_TILES; i++) {
        const int32_t n = min(first_out + 8 * i + lane / 4, b.n_rows - 1);
        load_lane<R>(&to->raw[i / 2][i % 2], s, a, b.first_row + n, span);
    }
    if (row >= b.n_x) return;
#pragma unroll
    for (int i = 0; i < many_ahead<R>::PIECES; i++) {
        const int32_t col = span * span_of<R>::COLS + (4 * i + quarter) * PIECE;
        load_piece(to->x[i], job.x[row] + col, b.x_aligned);
    }
}

template <int R>
static constexpr size_t many_bytes() {
    return 2 * sizeof(span_x<R, MANY_ROWS>);
}

template <int R>
static __device__ void mma_many(uint8_t *shared, const mma_job &job, const mma_block &b,
                                const weight_shape &s, const weight_arrays &a) {
    span_x<R, MANY_ROWS> *xs = reinterpret_cast<span_x<R, MANY_ROWS> *>(shared);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int first_out = warp % 4 * WARP_OUTS, first_x = warp / 4 * WARP_ROWS;
    const bool idle = first_x >= b.n_x || first_out >= b.n_rows;
    float acc[M_TILES][N_TILES][4] = {}, total[M_TILES][N_TILES][4] = {};
    many_ahead<R> next = {};
    fetch_span<R>(&next, job, b, s, a, 0);
    for (int slice = 0; slice < MMA_SLICES; slice++) {
        const slice_range range = slice_of<R>(s, slice);
        for (int32_t span = range.begin; span < range.end; span++) {
            const many_ahead<R> now = next;
            if (span + 1 < s.cols / span_of<R>::COLS)
                fetch_span<R>(&next, job, b, s, a, span + 1);
            span_x<R, MANY_ROWS> *x = xs + span % 2; /* all are past its last but one use */
#pragma unroll
            for (int i = 0; i < many_ahead<R>::PIECES; i++) {
                x_piece piece;
                split_piece(&piece, now.x[i]);
                store_piece(x, piece, threadIdx.x / 4, 4 * i + threadIdx.x % 4);
            }
            __syncthreads();
            if (idle) continue;
            add_span<R, MANY_ROWS, M_TILES, N_TILES>(acc, now.raw, *x, first_x,
                                                     b.n_x - first_x);
        }
#pragma unroll
        for (int i = 0; i < M_TILES * N_TILES * 4; i++) {
            float *part = &acc[0][0][0] + i;
            (&total[0][0][0])[i] += *part;
            *part = 0.0f;
        }
    }
    if (idle) return;
#pragma unroll
    for (int i = 0; i < M_TILES * N_TILES * 4; i++) {
        const int tile = i / (4 * N_TILES), t = i / 4 % N_TILES, k = i % 4;
        put(job, b, first_x + 8 * t + 2 * (lane % 4) + k % 2,
            first_out + 16 * tile + lane / 4 + 8 * (k / 2), total[tile][t][k] * a.global);
    }
}

#endif
