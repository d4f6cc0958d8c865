/* grouped_gemm_fp4_sm90.cu - products of E4M3 rows with experts' E2M1 matrices that have a power of
 * two per 32 columns, on Hopper.
 *
 * Every E2M1 value times 2^-6 is an E4M3 value whose bits are those of the code, moved. So W is
 * widened in registers and is the first operand: a warpgroup has 64 rows of W, and N rows of x. A
 * byte holds an even column and the next one: widened words have either the even or the odd columns
 * of a thread, which is why rows of x are laid that way. One instruction sums 32 columns, which
 * share a scale of W. The four sums of a span are scaled and added in order, then scaled by x and
 * added to the total; where x has a scale per 32 columns, each is scaled by both and added. */
#include "ops/cuda/gemm_sm90_internal.cuh"

namespace {

constexpr int SCALED = 32; /* columns */
constexpr int SPANS = 4;   /* of a stage: 512 columns, 16 scales a row */
constexpr int MAX_SETS = 2;
constexpr int STAGE_COLS = SPANS * QUANTISED, SPLIT = 2; /* boxes of 128 bytes, 256 columns */
constexpr int SCALES_OF_SPAN = QUANTISED / SCALED;
constexpr float WIDENED = 64.0f;

/* ---- shared memory ---- */

/* Of gated matrices a tile has as many rows of the gate as of the up matrix: a thread's lower row is
 * one of the gate, the other the same one of the up matrix. */
template <matrices M>
constexpr int parts_of = gated<M> ? 2 : 1;

/* Outputs of a tile. */
template <int GROUPS, matrices M>
constexpr int outs_of = GROUPS * 64 / parts_of<M>;

template <int GROUPS, int N, matrices M>
using order = schedule<N, outs_of<GROUPS, M>, ALONE, EXPERTS>;

/* GROUPS warpgroups, N rows of x with X scales in a span. */
template <int GROUPS, int N, int X, matrices M>
struct memory {
    uint8_t *w;                /* [stages] of [PARTS, SPLIT, ROWS, 128] */
    uint8_t *x;                /* [stages] of [SPANS, N, 128] */
    uint8_t *w_scale;          /* [sets] of a tile's [PARTS, ROWS, spans * 4] */
    float *x_scale;            /* [stages] of [SPANS, X, N + 4] */
    uint64_t *full, *empty;    /* [stages] */
    uint64_t *scaled, *unused; /* [sets] */
    int32_t *upto;             /* [n_experts + 1] */

    static constexpr int PARTS = parts_of<M>, ROWS = outs_of<GROUPS, M>,
                         PART_BYTES = SPLIT * ROWS * ROW_BYTES, W_BYTES = PARTS * PART_BYTES,
                         X_BYTES = SPANS * N * ROW_BYTES,
                         SCALES = (SPANS * X * (N + 4) + 31) / 32 * 32;

    static __host__ __device__ int set_bytes(const job &j) {
        return PARTS * ROWS * j.spans * SCALES_OF_SPAN;
    }

    static int bytes(const job &j) {
        return j.stages * (W_BYTES + X_BYTES + SCALES * 4 + 2 * 8) +
               j.sets * (set_bytes(j) + 2 * 8) + (j.n_experts + 1) * 4;
    }

    __device__ memory(uint8_t *at, const job &j) {
        w = at;
        x = w + j.stages * W_BYTES;
        w_scale = x + j.stages * X_BYTES;
        x_scale = reinterpret_cast<float *>(w_scale + j.sets * set_bytes(j));
        full = reinterpret_cast<uint64_t *>(x_scale + j.stages * SCALES);
        empty = full + j.stages;
        scaled = empty + j.stages;
        unused = scaled + j.sets;
        upto = reinterpret_cast<int32_t *>(unused + j.sets);
    }
};

struct fp4_maps {
    CUtensorMap x, x_scale, w[2]; /* of the matrices, and of the second ones */
};

/* ---- the thread that copies ---- */

template <int GROUPS, int N, int X, matrices M>
struct copying {
    using room = memory<GROUPS, N, X, M>;
    const job &j;
    const room &m;
    const fp4_maps &maps;
    int32_t place[room::PARTS];

    /* The scales of a tile lie in a row. */
    __device__ void begin_tile(tile t, int32_t set) {
        const uint32_t bytes =
            (uint32_t)(min(room::ROWS, j.outs - t.out) * j.spans * SCALES_OF_SPAN);
        mbarrier_arrive_expect_tx(&m.scaled[set], room::PARTS * bytes);
#pragma unroll
        for (int i = 0; i < room::PARTS; i++) {
            t.second = i == 1;
            place[i] = data_place<M>(j, t);
            bulk_copy(m.w_scale + set * room::set_bytes(j) +
                          i * room::ROWS * j.spans * SCALES_OF_SPAN,
                      scale_of_tile<M>(j, t) + (int64_t)t.out * j.spans * SCALES_OF_SPAN, bytes,
                      &m.scaled[set], j.keep_w);
        }
    }

    __device__ void copy_w(const tile &t, int32_t span, int32_t stage) const {
        mbarrier_arrive_expect_tx(&m.full[stage], room::W_BYTES + room::X_BYTES +
                                                      SPANS * X * (N + 4) * sizeof(float));
#pragma unroll
        for (int i = 0; i < room::PARTS; i++) {
            bulk_copy_4d(m.w + stage * room::W_BYTES + i * room::PART_BYTES, &maps.w[i],
                         &m.full[stage], 0, t.out, span / 2, place[i], j.keep_w);
        }
    }

    __device__ void copy_x(const tile &t, int32_t span, int32_t stage) const {
        uint64_t *full = &m.full[stage];
        bulk_copy_3d(m.x + stage * room::X_BYTES, &maps.x, full, 0, t.row, span, EVICT_LAST);
        bulk_copy_2d(m.x_scale + stage * room::SCALES, &maps.x_scale, full, t.row & ~3,
                     span * X, EVICT_LAST);
    }

    /* The first tile's matrices are on their way before x is there. */
    __device__ void run(order<GROUPS, N, M> turn) {
        cursor c, set;
        tile t;
        order<GROUPS, N, M> first = turn;
        int32_t ahead = 0;
        bool begun = first.next(j, 0, &t);
        if (begun) {
            begin_tile(t, 0);
#pragma unroll 1
            for (; ahead < j.stages && ahead * SPANS < j.spans; ahead++) {
                copy_w(t, ahead * SPANS, ahead);
            }
        }
        griddepcontrol_wait();
        for (; turn.next(j, 0, &t); begun = false, set.move(j.sets)) {
            if (!begun) {
                mbarrier_wait(&m.unused[set.at], set.parity ^ 1);
                begin_tile(t, set.at);
            }
#pragma unroll 1
            for (int32_t span = 0; span < j.spans; span += SPANS, c.move(j.stages)) {
                if (ahead > 0) {
                    ahead--;
                } else {
                    mbarrier_wait(&m.empty[c.at], c.parity ^ 1);
                    copy_w(t, span, c.at);
                }
                copy_x(t, span, c.at);
            }
        }
    }
};

/* ---- the warpgroups that multiply ---- */

/* Four codes at odd places of a word as E4M3, times 2^-6. */
__device__ __forceinline__ uint32_t dequantize(uint32_t codes) {
    return (codes >> 2 & 0x1c1c1c1c) | (codes & 0x80808080);
}

/* The first operand of a span's four products: the row at `at` and the one `further` bytes on. Their
 * columns begin in sixteen bytes number `first` of a swizzled row. */
__device__ __forceinline__ void dequantize_span(uint32_t (&a)[4][4], const uint8_t *at,
                                                int further, int first) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const int offset = ((first + k) ^ (lane / 4)) * 16;
        const uint32_t low = *reinterpret_cast<const uint32_t *>(at + offset);
        const uint32_t high = *reinterpret_cast<const uint32_t *>(at + further + offset);
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

/* A row's scales of a stage. */
__device__ __forceinline__ void read_scales(uint32_t (&to)[SPANS], const uint8_t *from) {
    const uint4 v = *reinterpret_cast<const uint4 *>(from);
    to[0] = v.x;
    to[1] = v.y;
    to[2] = v.z;
    to[3] = v.w;
}

template <int N, int X>
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
        const float *x = x_scale + 8 * (i / 4) + i % 2;
        if constexpr (X == 1) {
            float part = sum[0][i] * w[0][half];
            part = fmaf(sum[1][i], w[1][half], part);
            part = fmaf(sum[2][i], w[2][half], part);
            part = fmaf(sum[3][i], w[3][half], part);
            total[i] = fmaf(part, *x, total[i]);
        } else {
#pragma unroll
            for (int k = 0; k < 4; k++) {
                total[i] = fmaf(sum[k][i], w[k][half] * x[k * (N + 4)], total[i]);
            }
        }
    }
}

/* row: of the tile's outputs, of a thread's lower row of W. */
template <int N, matrices M>
__device__ __forceinline__ void write_tile(const job &j, const tile &t,
                                           const float (&total)[N / 2], int row) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        const int half = i / 2 % 2;
        if (gated<M> && half) continue;
        const int out = t.out + row + 8 * half;
        const int r = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
        if (r >= t.n_rows || out >= j.outs) continue;
        float value = total[i] * WIDENED;
        if constexpr (gated<M>) {
            value = swiglu_of(value, total[i + 2] * WIDENED, j.swiglu.limit,
                              swiglu_weight(j, t.row + r));
        }
        j.out[(t.row + r) * j.out_stride + out] = value;
    }
}

template <int GROUPS, int N, int X, matrices M>
__device__ void multiply(const job &j, const memory<GROUPS, N, X, M> &m,
                         order<GROUPS, N, M> turn) {
    using room = memory<GROUPS, N, X, M>;
    constexpr int SETS =
        N < 64 ? 2 : 1; /* of operands: the next are made while the last are multiplied */
    constexpr int FURTHER = gated<M> ? room::PART_BYTES : 8 * ROW_BYTES;
    const int lane = threadIdx.x % WARP, row_scales = j.spans * SCALES_OF_SPAN;
    const int scale_further = (gated<M> ? room::ROWS : 8) * row_scales;
    const int row = (int)threadIdx.x / WARP * (16 / room::PARTS) + lane / 4;
    float sum[4][N / 2] = {};
    cursor c, set;
    tile t;
    while (turn.next(j, 0, &t)) {
        float total[N / 2] = {};
        const uint8_t *scale = m.w_scale + set.at * room::set_bytes(j) + row * row_scales;
        mbarrier_wait(&m.scaled[set.at], set.parity);
        for (int32_t first = 0; first < j.spans; first += SPANS, c.move(j.stages)) {
            const uint8_t *w = m.w + c.at * room::W_BYTES + row * ROW_BYTES + 4 * (lane % 4);
            const float *x_scale = m.x_scale + c.at * room::SCALES + t.row % 4 + 2 * (lane % 4);
            uint32_t a[SETS][4][4];
            mbarrier_wait(&m.full[c.at], c.parity);
            const wgmma_tile x = wgmma_tile::of(__reduce_or_sync(
                ALL_LANES, shared_address(m.x) + (uint32_t)(c.at * room::X_BYTES)));
            uint32_t low[SPANS], high[SPANS];
            read_scales(low, scale + first * SCALES_OF_SPAN);
            read_scales(high, scale + scale_further + first * SCALES_OF_SPAN);
            dequantize_span(a[0], w, FURTHER, 0);
#pragma unroll
            for (int i = 0; i < SPANS; i++) {
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    wgmma_e4m3<N>::registers(sum[k], a[i % SETS][k],
                                             x.descriptor(i * N * ROW_BYTES + 32 * k), 0);
                }
                wgmma_commit_group();
                if (SETS == 1) wgmma_wait_group<0>();
                if (i + 1 < SPANS) {
                    dequantize_span(a[(i + 1) % SETS], w + (i + 1) / 2 * room::ROWS * ROW_BYTES,
                                    FURTHER, (i + 1) % 2 * 4);
                }
                if (SETS == 2) wgmma_wait_group<0>();
                promote_span<N, X>(total, sum, low[i], high[i], x_scale + i * X * (N + 4));
            }
            __syncwarp();
            if (lane == 0) mbarrier_arrive(&m.empty[c.at]);
        }
        __syncwarp();
        if (lane == 0) mbarrier_arrive(&m.unused[set.at]);
        set.move(j.sets);
        write_tile<N, M>(j, t, total, row);
    }
}

/* ---- the kernel ---- */

/* With many sums in registers those that copy leave them theirs. */
template <int N>
constexpr bool lends_registers = N >= 64;

template <int GROUPS, int N>
constexpr int threads_of = GROUPS *WARPGROUP + (lends_registers<N> ? WARPGROUP : WARP);

/* BLOCKS: of a multiprocessor. With few rows a span is one chain of copies, widening, products and sums, so
 * several blocks take turns. */
template <int GROUPS, int N, int BLOCKS, int X, matrices M>
__global__ void __launch_bounds__(threads_of<GROUPS, N>, BLOCKS)
    grouped_gemm_fp4(const __grid_constant__ fp4_maps maps, const __grid_constant__ job j) {
    extern __shared__ __align__(1024) uint8_t shared[];
    griddepcontrol_launch_dependents();
    constexpr int CONSUMERS = GROUPS * WARPGROUP / WARP;
    const memory<GROUPS, N, X, M> m(shared, j);
    const int warp = (int)threadIdx.x / WARP;
    if (threadIdx.x == 0) {
        for (int i = 0; i < j.stages; i++) {
            mbarrier_init(&m.full[i], 1);
            mbarrier_init(&m.empty[i], CONSUMERS);
        }
        for (int i = 0; i < j.sets; i++) {
            mbarrier_init(&m.scaled[i], 1);
            mbarrier_init(&m.unused[i], CONSUMERS);
        }
        fence_mbarrier_init();
        prefetch_tensormap(&maps.w[0]);
        if (gated<M>) prefetch_tensormap(&maps.w[1]);
        prefetch_tensormap(&maps.x);
        prefetch_tensormap(&maps.x_scale);
    }
    const order<GROUPS, N, M> turn(j, m.upto);
    prefetch_slots(j.slots, j.n_experts);
    if (gated<M>) prefetch_slots(j.second.slots, j.n_experts);
    if (warp == 1) count_units<order<GROUPS, N, M>>(j, m.upto, turn.n_outs);
    __syncthreads();
    if (warp < CONSUMERS) {
        if (lends_registers<N>) setmaxnreg_inc<232>();
        multiply<GROUPS, N, X, M>(j, m, turn);
    } else {
        if (lends_registers<N>) setmaxnreg_dec<40>();
        if (threadIdx.x == CONSUMERS * WARP) {
            copying<GROUPS, N, X, M> c = {j, m, maps, {}};
            c.run(turn);
        }
    }
}

/* ---- launching ---- */

template <int ROWS>
bool describe_matrices(fp4_maps *to, int which, const uint8_t *data,
                       const hd_expert_table *table) {
    const cuuint64_t cols = (cuuint64_t)table->shape.cols;
    const cuuint64_t outs = (cuuint64_t)table->shape.rows;
    const box rows = {
        4,
        {ROW_BYTES, outs,      cols / 2 / ROW_BYTES, places_of(table->data_range)},
        {cols / 2,  ROW_BYTES, PLACE_BYTES         },
        {ROW_BYTES,     ROWS,     SPLIT,                    1                            }
    };
    return describe(&to->w[which], data, rows);
}

template <int GROUPS, int N, int X, matrices M>
bool describe_all(fp4_maps *to, const job &j, const fp8_product &p) {
    const cuuint64_t cols = (cuuint64_t)p.w->cols, spans = (cuuint64_t)j.spans;
    const cuuint64_t pitch = (cuuint64_t)p.x.pitch;
    constexpr int ROWS = outs_of<GROUPS, M>;
    const box x = {
        3, {ROW_BYTES, (cuuint64_t)p.x.rows, spans},
         {cols,      ROW_BYTES           },
         {ROW_BYTES,        N,                SPANS     }
    };
    const box x_scale = {
        2, {pitch,      spans * X},
         {pitch * 4 },
         {N + 4, SPANS * X         }
    };
    return describe(&to->x, p.x.x, x) &&
           describe_flat(&to->x_scale, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, p.x.scale, x_scale) &&
           describe_matrices<ROWS>(to, 0, j.data, p.table) &&
           (!p.other || describe_matrices<ROWS>(to, 1, j.second.data, p.other_table));
}

template <int GROUPS, int N, int BLOCKS, int X, matrices M>
void launch_with(hd_stream *s, const fp8_product &p) {
    using room = memory<GROUPS, N, X, M>;
    constexpr int SHARED_EACH =
        BLOCKS == 1 ? SHARED_BYTES : SHARED_OF_SM / BLOCKS - SHARED_OF_BLOCK;
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
    j.sets = room::set_bytes(j) * 10 > SHARED_EACH ? 1 : MAX_SETS;
    for (j.stages = 2; j.stages < MAX_STAGES; j.stages++) {
        if (room::bytes(j) > SHARED_EACH) break;
    }
    if (room::bytes(j) > SHARED_EACH) j.stages--;
    fp4_maps maps = {};
    if (!describe_all<GROUPS, N, X, M>(&maps, j, p)) {
        hd_stream_fail(s, HD_EDEVICE, "the driver makes no tensor map");
        return;
    }
    const auto kernel = grouped_gemm_fp4<GROUPS, N, BLOCKS, X, M>;
    const int64_t units = units_at_most<order<GROUPS, N, M>>(p, outs_of<GROUPS, M>);
    launch_blocks(s, kernel, units, threads_of<GROUPS, N>, 1, BLOCKS, (size_t)room::bytes(j),
                  maps, j);
}

template <int GROUPS, int N, int BLOCKS, matrices M>
void launch(hd_stream *s, const fp8_product &p) {
    if (p.x.group == QUANTISED) return launch_with<GROUPS, N, BLOCKS, 1, M>(s, p);
    launch_with<GROUPS, N, BLOCKS, QUANTISED / SCALED, M>(s, p);
}

} // namespace

bool fp4_fits(const hd_expert_table *table) {
    const hd_weight *w = &table->shape;
    return hd_cuda_is_sm90() && w->type == HD_E2M1 && w->scale_type == HD_E8M0 &&
           w->block_rows == 1 && w->block_cols == SCALED && w->cols % STAGE_COLS == 0 &&
           w->global == 1.0f && places_fit(table);
}

bool fp4_takes_two(const fp8_product &p) {
    return p.x.rows / p.n_experts <= 24;
}

template <matrices M>
static void launch_places(hd_stream *s, const fp8_product &p) {
    const int32_t each = p.x.rows / p.n_experts; /* places of an expert, on average */
    if (each > 12) return launch<2, 32, 1, M>(s, p);
    if (each > 4) return gated<M> ? launch<1, 16, 3, M>(s, p) : launch<2, 16, 1, M>(s, p);
    launch<1, 8, 3, M>(s, p);
}

void launch_grouped_fp4(hd_stream *s, const fp8_product &p) {
    if (p.other) return launch_places<GATED_EXPERTS>(s, p);
    if (p.x.rows / p.n_experts > 24) return launch<2, 64, 1, EXPERTS>(s, p);
    launch_places<EXPERTS>(s, p);
}
