/* grouped_gemm_fp4_sm90.cu - products of E4M3 rows with experts' E2M1 matrices that have a power of
 * two per 32 columns, on Hopper.
 *
 * Every E2M1 value times 2^-6 is an E4M3 value whose bits are those of the code, moved. So W is
 * widened in registers and is the first operand: a warpgroup has 64 rows of W, and N rows of x. A
 * byte holds an even column and the next one: widened words have either the even or the odd columns
 * of a thread, which is why rows of x are laid that way. One instruction sums 32 columns, which
 * share a scale of W; the four sums of a span are scaled and added in order, then scaled by x and
 * added to the total. */
#include "ops/cuda/gemm_sm90_internal.cuh"

namespace {

constexpr int SCALED = 32; /* columns */
constexpr int SPANS = 4;   /* of a stage: 512 columns, 16 scales a row */
constexpr int STAGE_COLS = SPANS * QUANTISED, SPLIT = 2; /* boxes of 128 bytes, 256 columns */
constexpr int SCALE_BYTES = STAGE_COLS / SCALED;
constexpr float WIDENED = 64.0f;

/* ---- shared memory ---- */

/* GROUPS warpgroups, N rows of x. */
template <int GROUPS, int N>
struct memory {
    uint8_t *w;             /* [stages] of [HALVES, ROWS, 128] */
    uint8_t *x;             /* [stages] of [SPANS, N, 128] */
    uint8_t *w_scale;       /* [stages] of [ROWS, 16] */
    float *x_scale;         /* [stages] of [SPANS, N + 4] */
    uint64_t *full, *empty; /* [stages] */
    int32_t *upto;          /* [n_experts + 1] */

    static constexpr int ROWS = GROUPS * 64, W_BYTES = SPLIT * ROWS * ROW_BYTES,
                         X_BYTES = SPANS * N * ROW_BYTES, S_BYTES = ROWS * SCALE_BYTES,
                         SCALES = (SPANS * (N + 4) + 31) / 32 * 32;
    static constexpr int EXPECTED = W_BYTES + X_BYTES + S_BYTES + SPANS * (N + 4) * 4;

    static int bytes(const job &j) {
        return j.stages * (W_BYTES + X_BYTES + S_BYTES + SCALES * 4 + 2 * 8) +
               (j.n_experts + 1) * 4;
    }

    __device__ memory(uint8_t *at, const job &j) {
        w = at;
        x = w + j.stages * W_BYTES;
        w_scale = x + j.stages * X_BYTES;
        x_scale = reinterpret_cast<float *>(w_scale + j.stages * S_BYTES);
        full = reinterpret_cast<uint64_t *>(x_scale + j.stages * SCALES);
        empty = full + j.stages;
        upto = reinterpret_cast<int32_t *>(empty + j.stages);
    }
};

struct fp4_maps {
    CUtensorMap x, x_scale, w[2], w_scale[2]; /* of the matrices, and of the second ones */
};

/* ---- the thread that copies ---- */

template <int GROUPS, int N, matrices M>
__device__ void copy_stages(const job &j, const memory<GROUPS, N> &m,
                            schedule<N, GROUPS * 64, ALONE, M> turn, const fp4_maps &maps) {
    using room = memory<GROUPS, N>;
    cursor c;
    tile t;
    while (turn.next(j, 0, &t)) {
        const int32_t data = data_place<M>(j, t);
        const int second = gated<M> && t.second;
        const uint8_t *lowest = second ? j.second.scale : j.scale;
        const int32_t scale = (int32_t)((scale_of_tile<M>(j, t) - lowest) / PLACE_BYTES);
#pragma unroll 1
        for (int32_t span = 0; span < j.spans; span += SPANS, c.move(j.stages)) {
            uint64_t *full = &m.full[c.at];
            mbarrier_wait(&m.empty[c.at], c.parity ^ 1);
            mbarrier_arrive_expect_tx(full, room::EXPECTED);
            bulk_copy_4d(m.w + c.at * room::W_BYTES, &maps.w[second], full, 0, t.out, span / 2,
                         data, j.keep_w);
            bulk_copy_3d(m.w_scale + c.at * room::S_BYTES, &maps.w_scale[second], full,
                         span / SPANS * SCALE_BYTES, t.out, scale, j.keep_w);
            bulk_copy_3d(m.x + c.at * room::X_BYTES, &maps.x, full, 0, t.row, span, EVICT_LAST);
            bulk_copy_2d(m.x_scale + c.at * room::SCALES, &maps.x_scale, full, t.row & ~3, span,
                         EVICT_LAST);
        }
    }
}

/* ---- the warpgroups that multiply ---- */

/* Four codes at odd places of a word as E4M3, times 2^-6. */
__device__ __forceinline__ uint32_t dequantize(uint32_t codes) {
    return (codes >> 2 & 0x1c1c1c1c) | (codes & 0x80808080);
}

/* The first operand of a span's four products: rows `row` and eight further of the stage. Their
 * columns begin in sixteen bytes number `first` of a swizzled row. */
__device__ __forceinline__ void dequantize_span(uint32_t (&a)[4][4], const uint8_t *half,
                                                int row, int first) {
    const int lane = threadIdx.x % WARP;
    const uint8_t *at = half + row * ROW_BYTES + 4 * (lane % 4);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const int offset = ((first + k) ^ (row % 8)) * 16;
        const uint32_t low = *reinterpret_cast<const uint32_t *>(at + offset);
        const uint32_t high = *reinterpret_cast<const uint32_t *>(at + 8 * ROW_BYTES + offset);
        a[k][0] = dequantize(low << 4);
        a[k][1] = dequantize(high << 4);
        a[k][2] = dequantize(low);
        a[k][3] = dequantize(high);
    }
}

/* Power k of a word of four. */
__device__ __forceinline__ float power_of(uint32_t word, int k) {
    const uint32_t bits = k == 0   ? word << 23
                          : k == 1 ? word << 15
                          : k == 2 ? word << 7
                                   : word >> 1;
    return __uint_as_float(bits & 0x7f800000);
}

template <int N>
__device__ __forceinline__ void promote_span(float (&total)[N / 2],
                                             const float (&sum)[4][N / 2], uint32_t low,
                                             uint32_t high, const float *x_scale) {
    float w[4][2];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        w[k][0] = power_of(low, k);
        w[k][1] = power_of(high, k);
    }
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        const int half = i / 2 % 2;
        float part = sum[0][i] * w[0][half];
        part = fmaf(sum[1][i], w[1][half], part);
        part = fmaf(sum[2][i], w[2][half], part);
        part = fmaf(sum[3][i], w[3][half], part);
        total[i] = fmaf(part, x_scale[8 * (i / 4) + i % 2], total[i]);
    }
}

/* gate: of gated matrices, whose outputs are swiglu's. */
template <int N, matrices M>
__device__ __forceinline__ void write_tile(const job &j, const tile &t,
                                           const float (&total)[N / 2], const float *gate,
                                           int row) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        const int out = t.out + row + 8 * (i / 2 % 2);
        const int r = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
        if (r >= t.n_rows || out >= j.outs) continue;
        float value = total[i] * WIDENED;
        if constexpr (gated<M>) {
            value = swiglu_of(gate[i] * WIDENED, value, j.swiglu.limit,
                              swiglu_weight(j, t.row + r));
        }
        j.out[(t.row + r) * j.out_stride + out] = value;
    }
}

template <int GROUPS, int N, matrices M>
__device__ void multiply(const job &j, const memory<GROUPS, N> &m,
                         schedule<N, GROUPS * 64, ALONE, M> turn) {
    using room = memory<GROUPS, N>;
    constexpr int SETS =
        N < 64 ? 2 : 1; /* of operands: the next are made while the last are multiplied */
    const int lane = threadIdx.x % WARP;
    const int row = (int)threadIdx.x / WARP * 16 + lane / 4;
    float sum[4][N / 2] = {}, gate[gated<M> ? N / 2 : 1] = {};
    cursor c;
    tile t;
    while (turn.next(j, 0, &t)) {
        float total[N / 2] = {};
        for (int32_t first = 0; first < j.spans; first += SPANS, c.move(j.stages)) {
            const uint8_t *w = m.w + c.at * room::W_BYTES;
            const float *x_scale = m.x_scale + c.at * room::SCALES + t.row % 4 + 2 * (lane % 4);
            uint32_t a[SETS][4][4];
            mbarrier_wait(&m.full[c.at], c.parity);
            const wgmma_tile x = wgmma_tile::of(__reduce_or_sync(
                ALL_LANES, shared_address(m.x) + (uint32_t)(c.at * room::X_BYTES)));
            const uint32_t *scale =
                reinterpret_cast<const uint32_t *>(m.w_scale + c.at * room::S_BYTES) + 4 * row;
            dequantize_span(a[0], w, row, 0);
#pragma unroll
            for (int i = 0; i < SPANS; i++) {
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    wgmma_e4m3<N>::registers(sum[k], a[i % SETS][k],
                                             x.descriptor(i * N * ROW_BYTES + 32 * k), 0);
                }
                wgmma_commit_group();
                const uint32_t low = scale[i], high = scale[8 * 4 + i];
                if (SETS == 1) wgmma_wait_group<0>();
                if (i + 1 < SPANS) {
                    dequantize_span(a[(i + 1) % SETS], w + (i + 1) / 2 * room::ROWS * ROW_BYTES,
                                    row, (i + 1) % 2 * 4);
                }
                if (SETS == 2) wgmma_wait_group<0>();
                promote_span<N>(total, sum, low, high, x_scale + i * (N + 4));
            }
            __syncwarp();
            if (lane == 0) mbarrier_arrive(&m.empty[c.at]);
        }
        if constexpr (gated<M>) {
            if (!t.second) {
#pragma unroll
                for (int i = 0; i < N / 2; i++) gate[i] = total[i];
                continue;
            }
        }
        write_tile<N, M>(j, t, total, gate, row);
    }
}

/* ---- the kernel ---- */

/* With many sums in registers those that copy leave them theirs. */
template <int N>
constexpr bool lends_registers = N >= 64;

template <int GROUPS, int N>
constexpr int threads_of = GROUPS *WARPGROUP + (lends_registers<N> ? WARPGROUP : WARP);

template <int GROUPS, int N, matrices M>
__global__ void __launch_bounds__(threads_of<GROUPS, N>, 1)
    grouped_gemm_fp4(const __grid_constant__ fp4_maps maps, const __grid_constant__ job j) {
    extern __shared__ __align__(1024) uint8_t shared[];
    griddepcontrol_launch_dependents();
    using order = schedule<N, GROUPS * 64, ALONE, M>;
    constexpr int CONSUMERS = GROUPS * WARPGROUP / WARP;
    const memory<GROUPS, N> m(shared, j);
    const int warp = (int)threadIdx.x / WARP;
    if (threadIdx.x == 0) {
        for (int i = 0; i < j.stages; i++) {
            mbarrier_init(&m.full[i], 1);
            mbarrier_init(&m.empty[i], CONSUMERS);
        }
        fence_mbarrier_init();
    }
    const order turn(j, m.upto);
    prefetch_slots(j.slots, j.n_experts);
    if (gated<M>) prefetch_slots(j.second.slots, j.n_experts);
    griddepcontrol_wait();
    if (warp == 1) count_units<order>(j, m.upto, turn.n_outs);
    __syncthreads();
    if (warp < CONSUMERS) {
        if (lends_registers<N>) setmaxnreg_inc<232>();
        multiply<GROUPS, N, M>(j, m, turn);
    } else {
        if (lends_registers<N>) setmaxnreg_dec<40>();
        if (threadIdx.x == CONSUMERS * WARP) {
            copy_stages<GROUPS, N, M>(j, m, turn, maps);
        }
    }
}

/* ---- launching ---- */

template <cuuint32_t ROWS>
bool describe_matrices(fp4_maps *to, int which, const uint8_t *data, const uint8_t *scale,
                       const hd_expert_table *table) {
    const cuuint64_t cols = (cuuint64_t)table->shape.cols;
    const cuuint64_t outs = (cuuint64_t)table->shape.rows;
    const box rows = {
        4,
        {ROW_BYTES, outs,      cols / 2 / ROW_BYTES, places_of(table->data_range)},
        {cols / 2,  ROW_BYTES, PLACE_BYTES         },
        {ROW_BYTES,     ROWS,     SPLIT,                    1                            }
    };
    const box scales = {
        3,
        {cols / SCALED, outs,        places_of(table->scale_range)},
        {cols / SCALED, PLACE_BYTES},
        {SCALE_BYTES,         ROWS,           1                             }
    };
    return describe(&to->w[which], data, rows) &&
           describe_flat(&to->w_scale[which], CU_TENSOR_MAP_DATA_TYPE_UINT8, scale, scales);
}

template <int GROUPS, int N>
bool describe_all(fp4_maps *to, const job &j, const fp8_product &p) {
    const cuuint64_t cols = (cuuint64_t)p.w->cols, spans = (cuuint64_t)j.spans;
    const cuuint64_t pitch = (cuuint64_t)p.x.pitch;
    constexpr cuuint32_t ROWS = GROUPS * 64;
    const box x = {
        3, {ROW_BYTES, (cuuint64_t)p.x.rows, spans},
         {cols,      ROW_BYTES           },
         {ROW_BYTES,        N,                SPANS     }
    };
    const box x_scale = {
        2, {pitch,     spans},
         {pitch * 4},
         {N + 4,    SPANS     }
    };
    return describe(&to->x, p.x.x, x) &&
           describe_flat(&to->x_scale, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, p.x.scale, x_scale) &&
           describe_matrices<ROWS>(to, 0, j.data, j.scale, p.table) &&
           (!p.other ||
            describe_matrices<ROWS>(to, 1, j.second.data, j.second.scale, p.other_table));
}

template <int GROUPS, int N, matrices M>
void launch(hd_stream *s, const fp8_product &p) {
    using order = schedule<N, GROUPS * 64, ALONE, M>;
    using room = memory<GROUPS, N>;
    const hd_weight *w = p.w;
    job j = {};
    j.out = p.out;
    j.out_stride = p.out_stride;
    j.data = static_cast<const uint8_t *>(w->data);
    j.scale = static_cast<const uint8_t *>(w->scale);
    j.slots = p.table->slots;
    j.offset = p.offset;
    j.n_experts = p.n_experts;
    j.from = p.from;
    j.rows = p.x.rows;
    j.outs = w->rows;
    j.spans = w->cols / QUANTISED;
    j.swiglu = p.swiglu;
    if (gated<M>) {
        j.second.data = static_cast<const uint8_t *>(p.other->data);
        j.second.scale = static_cast<const uint8_t *>(p.other->scale);
        j.second.slots = p.other_table->slots;
    }
    j.keep_w = p.x.rows <= N * p.n_experts ? EVICT_FIRST : EVICT_NORMAL;
    for (j.stages = 2; j.stages < MAX_STAGES; j.stages++) {
        if (room::bytes(j) > SHARED_BYTES) break;
    }
    if (room::bytes(j) > SHARED_BYTES) j.stages--;
    fp4_maps maps = {};
    if (!describe_all<GROUPS, N>(&maps, j, p)) {
        hd_stream_fail(s, HD_EDEVICE, "the driver makes no tensor map");
        return;
    }
    const auto kernel = grouped_gemm_fp4<GROUPS, N, M>;
    launch_blocks(s, kernel, units_at_most<order>(p, GROUPS * 64), threads_of<GROUPS, N>, 1,
                  (size_t)room::bytes(j), maps, j);
}

} // namespace

bool fp4_fits(const hd_expert_table *table) {
    const hd_weight *w = &table->shape;
    return w->type == HD_E2M1 && w->scale_type == HD_E8M0 && w->block_rows == 1 &&
           w->block_cols == SCALED && w->cols % STAGE_COLS == 0 && w->global == 1.0f &&
           places_fit(table);
}

bool fp4_takes_two(const fp8_product &p) {
    return p.x.rows / p.n_experts <= 24;
}

template <matrices M>
static void launch_places(hd_stream *s, const fp8_product &p) {
    const int32_t each = p.x.rows / p.n_experts; /* places of an expert, on average */
    const bool narrow = (int64_t)p.w->rows * p.n_experts < 128 * 4 * hd_stream_workers(s);
    if (each > 12) return launch<2, 32, M>(s, p);
    if (each > 4) return launch<2, 16, M>(s, p);
    if (narrow) return launch<1, 8, M>(s, p);
    return launch<2, 8, M>(s, p);
}

void launch_grouped_fp4(hd_stream *s, const fp8_product &p) {
    if (p.other) return launch_places<GATED_EXPERTS>(s, p);
    if (p.x.rows / p.n_experts > 24) return launch<2, 64, EXPERTS>(s, p);
    launch_places<EXPERTS>(s, p);
}
