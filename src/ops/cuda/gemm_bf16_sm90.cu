/* gemm_bf16_sm90.cu - products of many rows of x with matrices in BF16 or FP8, on Hopper: x is rounded to
 * bfloat16 once, by a kernel before, and W is dequantized to bfloat16 in registers.
 *
 * Rows of x lie in the scratch as boxes of 64 rows and 64 columns, as wgmma reads them, with the
 * columns in the order of mma_internal.cuh: so bulk copies of 8 KB bring them, and sums have the bits
 * of the products of few rows. A block has 128 stored rows, 64 for each of two warpgroups, as the first
 * operand, and N rows of x. Two blocks of a cluster may have the same rows of x: each copies half
 * of them to both. Or the blocks of a cluster share a row's slices and meet at the end. */
#include "ops/cuda/gemm_bf16_internal.cuh"
#include "ops/cuda/tensor_map_sm90_internal.cuh"
#include "ops/cuda/wgmma_internal.cuh"

namespace {

/* What blocks of a cluster have in common. */
enum sharing { ALONE, SHARED, SLICED };

constexpr int OUTS = 128,
              GROUPS = 2;           /* of a block: stored rows, warpgroups that multiply them */
constexpr int W_BYTES = OUTS * 128; /* of a stage: 128 bytes of each stored row */
constexpr int MAX_STAGES = 8, CONSUMERS = GROUPS * WARPGROUP;
constexpr int PITCH =
    OUTS + 4; /* floats of a row of partial sums, so that a warp's do not collide */
constexpr size_t SHARED_BYTES = 233472 - 2 * 1024;

/* Spans of 64 columns in 128 bytes of a stored row. */
template <int R>
constexpr int spans_of_stage = R == READ_BF16 ? 1 : 2;

template <int R, int N>
constexpr int stage_bytes = W_BYTES + spans_of_stage<R> *N * 128;

/* Registers of a thread that multiplies, and of one that copies, where they are moved. */
template <int N>
constexpr bool moves_registers = N > 64;

template <int N>
constexpr int threads_of = CONSUMERS + (moves_registers<N> ? WARPGROUP : WARP);

struct matrix {
    void *out;
    int64_t out_stride, out_head;
    weight_shape s;
    weight_arrays a;
    int32_t n_rows, first_row, head_rows, first_tile, tiles; /* tiles: of a head */
    bool out_f32;
};

struct bf16_job {
    CUtensorMap map[HD_MAX_SET];
    matrix part[HD_MAX_SET];
    const uint8_t *boxes; /* of x: [heads, row_boxes, spans] */
    uint64_t keep_w;
    int32_t rows, row_boxes, row_tiles, spans, n, stages, cluster; /* n: matrices */
};

/* ---- rounding ---- */

struct rounding {
    const cuda_act *x;
    int64_t x_stride, x_head;
    uint8_t *boxes;
    int32_t rows, row_boxes, spans;
};

/* Four words of four lanes, exchanged: lane q gets word q of all. */
__device__ __forceinline__ uint4 transpose_words(uint4 v) {
    const int q = threadIdx.x % 4;
    const bool odd = q & 1, high = q & 2;
    const uint32_t a = __shfl_xor_sync(ALL_LANES, odd ? v.x : v.y, 1);
    const uint32_t b = __shfl_xor_sync(ALL_LANES, odd ? v.z : v.w, 1);
    const uint4 pairs = odd ? make_uint4(a, v.y, b, v.w) : make_uint4(v.x, a, v.z, b);
    const uint32_t c = __shfl_xor_sync(ALL_LANES, high ? pairs.x : pairs.z, 2);
    const uint32_t d = __shfl_xor_sync(ALL_LANES, high ? pairs.y : pairs.w, 2);
    return high ? make_uint4(c, d, pairs.z, pairs.w) : make_uint4(pairs.x, pairs.y, c, d);
}

/* Eight lanes have a span of a row, and four of them half of its steps; a warp has EACH times four rows. */
template <int R, int EACH>
__global__ void __launch_bounds__(BLOCK) round_boxes(rounding j) {
    begin_kernel();
    const int lane = threadIdx.x % WARP, quarter = lane % 4, eight = lane / 4 % 2;
    const int32_t head = (int32_t)blockIdx.y;
    const int64_t warp = ((int64_t)blockIdx.x * BLOCK + threadIdx.x) / WARP;
    const int32_t span = (int32_t)(warp % j.spans);
    const int32_t first = (int32_t)(warp / j.spans) * 4 * EACH + lane / 8;
    const int32_t col = span * SPAN + eight_col<R>(quarter, eight);
    float x[EACH][8];
    if (first - lane / 8 >= j.rows) return;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int32_t row = min(first + 4 * i, j.rows - 1);
        load_eight(x[i], j.x + row * j.x_stride + head * j.x_head + col);
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int32_t row = first + 4 * i;
        const uint4 own = transpose_words(split_eight<R, 1>(x[i]).part[0]);
        if (row >= j.rows) continue;
        const int64_t box = ((int64_t)head * j.row_boxes + row / BOX_ROWS) * j.spans + span;
        const int64_t at = box * BOX_BYTES + box_at(row % BOX_ROWS, 4 * eight + quarter);
        *reinterpret_cast<uint4 *>(j.boxes + at) = own;
    }
}

/* ---- shared memory ---- */

template <int R, int N, sharing S>
struct memory {
    uint8_t *stage;         /* [stages] of W [128, 128 bytes] and x [spans, N, 128 bytes] */
    float *part;            /* of sliced rows: [slices of a block, N, PITCH] */
    uint64_t *full, *empty; /* [stages] */

    static __host__ __device__ size_t part_floats(int cluster) {
        return S == SLICED ? (size_t)(MMA_SLICES / cluster) * N * PITCH : 0;
    }

    static __host__ __device__ size_t bytes(int stages, int cluster) {
        return (size_t)stages * (stage_bytes<R, N> + 16) + part_floats(cluster) * sizeof(float);
    }

    __device__ memory(uint8_t *at, const bf16_job &j) {
        stage = at;
        part = reinterpret_cast<float *>(at + j.stages * stage_bytes<R, N>);
        full = reinterpret_cast<uint64_t *>(part + part_floats(j.cluster));
        empty = full + j.stages;
    }
};

/* What a block computes. */
struct place {
    int32_t part, head, col, first, n_x; /* first: row of x */
    int32_t begin, end;                  /* spans */
    int rank;                            /* in its cluster */

    template <int R, int N, sharing S>
    static __device__ place of(const bf16_job &j) {
        place p;
        const int32_t block = (int32_t)blockIdx.x, cluster = S == ALONE ? 1 : j.cluster;
        p.rank = S == ALONE ? 0 : (int)cluster_rank();
        int32_t unit = block / cluster;
        p.first = unit % j.row_tiles * N;
        unit /= j.row_tiles;
        if (S == SHARED) unit = unit * cluster + p.rank;
        p.part = 0;
        while (p.part + 1 < j.n && unit >= j.part[p.part + 1].first_tile) p.part++;
        const matrix &m = j.part[p.part];
        unit -= m.first_tile;
        p.head = unit / m.tiles;
        p.col = unit % m.tiles * OUTS;
        p.n_x = min(N, j.rows - p.first);
        p.begin = 0;
        p.end = j.spans;
        if (S == SLICED) {
            const int each = MMA_SLICES / cluster;
            p.begin = slice_of<R>(m.s, p.rank * each).begin;
            p.end = slice_of<R>(m.s, (p.rank + 1) * each - 1).end;
        }
        return p;
    }

    __device__ int32_t stored_row(const matrix &m) const {
        return m.first_row + head * m.head_rows + col;
    }
};

struct cursor {
    int32_t at = 0;
    uint32_t parity = 0;

    __device__ void move(int32_t stages) {
        if (++at == stages) {
            at = 0;
            parity ^= 1;
        }
    }
};

/* ---- the thread that copies ---- */

/* To both blocks of a cluster. */
__device__ __forceinline__ void bulk_multicast(void *to, const void *from, uint32_t bytes,
                                               uint64_t *b, uint16_t mask, uint64_t keep) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".multicast::cluster.L2::cache_hint [%0], [%1], %2, [%3], %4, %5;" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(b)), "h"(mask), "l"(keep)
                 : "memory");
}

template <int R, int N, sharing S>
struct copying {
    const bf16_job &j;
    const memory<R, N, S> &m;
    const place &p;

    static constexpr int SPANS = spans_of_stage<R>;

    __device__ int32_t spans_at(int32_t group) const {
        return min(SPANS, j.spans - group * SPANS);
    }

    __device__ void copy_w(int32_t group, int32_t stage) const {
        const uint32_t bytes = (uint32_t)(W_BYTES + spans_at(group) * N * 128);
        mbarrier_arrive_expect_tx(&m.full[stage], bytes);
        bulk_copy_2d(m.stage + stage * stage_bytes<R, N>, &j.map[p.part], &m.full[stage],
                     group * 128, p.stored_row(j.part[p.part]), j.keep_w);
    }

    __device__ void copy_x(int32_t group, int32_t stage) const {
        uint8_t *to = m.stage + stage * stage_bytes<R, N> + W_BYTES;
        for (int i = 0; i < spans_at(group); i++, to += N * 128) {
#pragma unroll
            for (int k = 0; k < N / BOX_ROWS; k++) {
                const int32_t box = min(p.first / BOX_ROWS + k, j.row_boxes - 1);
                const uint8_t *from =
                    j.boxes +
                    (((int64_t)p.head * j.row_boxes + box) * j.spans + group * SPANS + i) *
                        BOX_BYTES;
                uint8_t *there = to + k * BOX_BYTES;
                if constexpr (S != SHARED) {
                    bulk_copy(there, from, BOX_BYTES, &m.full[stage], EVICT_LAST);
                } else {
                    const int half = p.rank * BOX_BYTES / 2;
                    bulk_multicast(there + half, from + half, BOX_BYTES / 2, &m.full[stage], 3,
                                   EVICT_LAST);
                }
            }
        }
    }

    /* W is on its way before x is there. */
    __device__ void run() const {
        const int32_t begin = p.begin / SPANS, end = (p.end + SPANS - 1) / SPANS;
        const int32_t ahead = min(j.stages, end - begin);
        cursor c;
        if (p.begin >= p.end) return;
        for (int32_t i = 0; i < ahead; i++) copy_w(begin + i, i);
        griddepcontrol_wait();
#pragma unroll 1
        for (int32_t group = begin; group < end; group++, c.move(j.stages)) {
            if (group - begin >= ahead) {
                mbarrier_wait(&m.empty[c.at], c.parity ^ 1);
                copy_w(group, c.at);
            }
            copy_x(group, c.at);
        }
    }
};

/* ---- the warpgroups that multiply ---- */

__device__ __forceinline__ void multiply_step(float (&d)[32], const uint32_t *a, uint64_t b,
                                              int add) {
    wgmma_m64n64k16(d, a, b, add);
}

__device__ __forceinline__ void multiply_step(float (&d)[64], const uint32_t *a, uint64_t b,
                                              int add) {
    wgmma_m64n128k16(d, a, b, add);
}

/* A thread's two stored rows: of eight, those that a phase of loads reads lie four apart. */
__device__ __forceinline__ int own_row() {
    const int warp = (int)threadIdx.x / WARP, r = (int)threadIdx.x % WARP / 4;
    return warp * 16 + r % 2 * 4 + r / 2;
}

/* Keeps x in a register: the constants of a matrix that a block finds by number take long to read. */
__device__ __forceinline__ int32_t kept(int32_t x) {
    asm volatile("mov.b32 %0, %0;" : "+r"(x));
    return x;
}

/* The scales of a thread's two rows. */
struct row_scales {
    const uint8_t *row[2]; /* NULL: all are 1 */
    int32_t type, shift, own;
    uint32_t code[2]; /* of the next span */

    template <int R>
    static __device__ row_scales of(const matrix &m, const int32_t (&rows)[2]) {
        row_scales r = {};
        r.type = kept(m.s.scale_type);
        r.shift = kept(m.s.col_shift);
        r.own = SCALES_ELEMENTS<R> ? (int32_t)threadIdx.x % 4 * span_of<R>::LANE : 0;
        const int32_t bytes = r.type == HD_F32 ? 4 : r.type == HD_BF16 ? 2 : 1;
        for (int i = 0; i < 2 && m.a.scale; i++) {
            const int64_t first = (int64_t)(rows[i] >> m.s.row_shift) * m.s.scales_per_row;
            r.row[i] = m.a.scale + first * bytes;
        }
        return r;
    }

    /* Whether those of a span may be others than those of the span before. */
    __device__ __forceinline__ bool change(int32_t span) const {
        return row[0] && ((span * SPAN) & ((1 << shift) - 1)) == 0;
    }

    /* Asks for those of a span. */
    __device__ __forceinline__ void fetch(int32_t span) {
        const int32_t at = (span * SPAN + own) >> shift;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (type == HD_F32) {
                code[i] = __ldg(reinterpret_cast<const uint32_t *>(row[i]) + at);
            } else if (type == HD_BF16) {
                code[i] = __ldg(reinterpret_cast<const uint16_t *>(row[i]) + at);
            } else {
                code[i] = __ldg(row[i] + at);
            }
        }
    }

    __device__ __forceinline__ float decode(int i) const {
        if (type == HD_F32) return __uint_as_float(code[i]);
        if (type == HD_BF16) return __uint_as_float(code[i] << 16);
        return type == HD_E8M0 ? e8m0_to_f32((uint8_t)code[i]) : e4m3_to_f32((uint8_t)code[i]);
    }
};

/* Both rows' columns of a span. */
template <int R>
__device__ __forceinline__ void read_raw(lane_raw<R> (&to)[2], const uint8_t *w, int32_t span) {
    const int row = own_row(), quarter = (int)threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int k = 0; k < span_of<R>::QUADS; k++) {
            const int chunk = 4 * (R == READ_BF16 ? k : span % 2) + quarter;
            to[i].quad[k] = *reinterpret_cast<const uint4 *>(w + (row + 8 * i) * 128 +
                                                             ((chunk ^ (row & 7)) << 4));
        }
    }
}

/* Products read a while the next columns are loaded. Elements that need no dequantizing would stay in the registers
 * of the loads, and the compiler (CUDA 13.0) then lets the next loads overwrite them too early. zero: a
 * register that it does not know to be 0. */
__device__ __forceinline__ void part_from_loads(uint32_t (&a)[4], uint32_t zero) {
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] ^= zero;
}

template <int N, typename F>
__device__ __forceinline__ void for_sums(F f) {
    const int row = own_row(), lane = (int)threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        f(i, 8 * (i / 4) + 2 * (lane % 4) + i % 2, row + 8 * (i / 2 % 2));
    }
}

__device__ __forceinline__ void write(const matrix &m, const place &p, int x, int out,
                                      float value) {
    if (x >= p.n_x || p.col + out >= m.n_rows) return;
    const int64_t at = (p.first + x) * m.out_stride + p.head * m.out_head + p.col + out;
    if (m.out_f32) {
        static_cast<float *>(m.out)[at] = value;
    } else {
        static_cast<cuda_act *>(m.out)[at] = narrow(value);
    }
}

template <int R, int N, sharing S>
__device__ void multiply(const bf16_job &j, const memory<R, N, S> &mem, const place &p) {
    constexpr int SPANS = spans_of_stage<R>, STEPS = 2 * span_of<R>::EIGHTS;
    const matrix &m = j.part[p.part];
    const int each = S == SLICED ? MMA_SLICES / j.cluster : MMA_SLICES;
    const int32_t last = p.stored_row(m) + min(OUTS, m.n_rows - p.col) - 1;
    const int32_t rows[2] = {min(p.stored_row(m) + own_row(), last),
                             min(p.stored_row(m) + own_row() + 8, last)};
    float total[S == SLICED ? 1 : N / 2] = {};
    float scale[2] = {1.0f, 1.0f}; /* of the span */
    lane_raw<R> raw[2];
    row_scales scales = {}; /* BF16 has none */
    if constexpr (R != READ_BF16) scales = row_scales::of<R>(m, rows);
    const uint32_t zero = (uint32_t)j.n >> 16;
    const uint32_t boxes = __reduce_or_sync(ALL_LANES, shared_address(mem.stage) + W_BYTES);
    cursor c;
    if (p.begin < p.end) {
        if (scales.row[0]) scales.fetch(p.begin);
        mbarrier_wait(&mem.full[0], 0);
        read_raw<R>(raw, mem.stage, p.begin);
    }
    int32_t span = p.begin;
    const int32_t first_slice = S == SLICED ? p.rank * each : 0;
#pragma unroll 1
    for (int slice = 0; slice < each; slice++) {
        const int32_t end = slice_of<R>(m.s, first_slice + slice).end;
        float acc[N / 2] = {};
#pragma unroll 1
        for (; span < end; span++) {
            uint32_t a[STEPS][4];
            float d[N / 2];
            const int32_t at = c.at;
            const bool done = span % SPANS == SPANS - 1 || span + 1 == p.end;
            if (scales.change(span) || (span == p.begin && scales.row[0])) {
                scale[0] = scales.decode(0);
                scale[1] = scales.decode(1);
            }
            raw[0].scale[0] = scale[0];
            raw[1].scale[0] = scale[1];
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                make_step<R>(a[step], raw, step);
                if (R == READ_BF16) part_from_loads(a[step], zero);
            }
            const uint64_t x = box_descriptor(
                boxes + (uint32_t)(at * stage_bytes<R, N> + span % SPANS * N * 128));
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                multiply_step(d, a[step], x + 2 * step, step > 0);
            }
            wgmma_commit_group();
            if (span + 1 < p.end) { /* the next columns of W, while these are multiplied */
                if (scales.change(span + 1)) scales.fetch(span + 1);
                if (done) {
                    c.move(j.stages);
                    mbarrier_wait(&mem.full[c.at], c.parity);
                }
                read_raw<R>(raw, mem.stage + c.at * stage_bytes<R, N>, span + 1);
            }
            wgmma_wait_group<0>();
            if (done) {
                __syncwarp();
                if (threadIdx.x % WARP == 0) {
                    mbarrier_arrive(&mem.empty[at]);
                    if (S == SHARED) mbarrier_arrive_at(&mem.empty[at], (uint32_t)p.rank ^ 1);
                }
            }
#pragma unroll
            for (int i = 0; i < N / 2; i++) {
                acc[i] = fmaf(d[i], SCALES_ELEMENTS<R> ? 1.0f : scale[i / 2 % 2], acc[i]);
            }
        }
        if constexpr (S == SLICED) {
            float *part = mem.part + slice * N * PITCH;
            for_sums<N>([&](int i, int x, int out) { part[x * PITCH + out] = acc[i]; });
        } else {
#pragma unroll
            for (int i = 0; i < N / 2; i++) total[i] += acc[i];
        }
    }
    if constexpr (S != SLICED) {
        for_sums<N>([&](int i, int x, int out) { write(m, p, x, out, total[i] * m.a.global); });
    }
}

/* The sums of all slices in order: each block of the cluster has a share of the outputs. */
template <int R, int N>
__device__ void add_slices(const bf16_job &j, const memory<R, N, SLICED> &mem, const place &p) {
    const int each = MMA_SLICES / j.cluster, outs = OUTS / j.cluster;
    const matrix &m = j.part[p.part];
    for (int i = (int)threadIdx.x; i < N * outs; i += CONSUMERS) {
        const int x = i / outs, out = p.rank * outs + i % outs;
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < MMA_SLICES; k++) {
            const float *own = mem.part + (k % each * N + x) * PITCH + out;
            sum += *cluster_at(own, (unsigned)(k / each));
        }
        write(m, p, x, out, sum * m.a.global);
    }
}

template <int R, int N, sharing S>
__global__ void __launch_bounds__(threads_of<N>, 1)
    gemm_bf16(const __grid_constant__ bf16_job j) {
    extern __shared__ __align__(1024) uint8_t shared[];
    griddepcontrol_launch_dependents();
    const memory<R, N, S> mem(shared, j);
    const place p = place::of<R, N, S>(j);
    if (threadIdx.x == 0) {
        for (int i = 0; i < j.stages; i++) {
            mbarrier_init(&mem.full[i], 1);
            mbarrier_init(&mem.empty[i], CONSUMERS / WARP * (S == SHARED ? 2 : 1));
        }
        fence_mbarrier_init();
    }
    if (S == SHARED) {
        barrier_cluster();
    } else {
        __syncthreads();
    }
    if (threadIdx.x < CONSUMERS) {
        if constexpr (moves_registers<N>) setmaxnreg_inc<240>();
        multiply<R, N, S>(j, mem, p);
    } else {
        if constexpr (moves_registers<N>) setmaxnreg_dec<24>();
        if (threadIdx.x == CONSUMERS) {
            const copying<R, N, S> copies = {j, mem, p};
            copies.run();
        }
        __syncwarp();
    }
    if (S != ALONE) barrier_cluster(); /* others may still write here, or wait for parts */
    if constexpr (S == SLICED) {
        if (threadIdx.x < CONSUMERS) add_slices<R, N>(j, mem, p);
        barrier_cluster(); /* nobody leaves while its parts are read */
    }
}

/* ---- launching ---- */

struct plan {
    int n; /* rows of x of a block */
    sharing use;
    int cluster;
};

/* What ends first, in clocks: of a span of 64 columns, and of a block's beginning and end, as estimated. */
plan best_plan(const bf16_job &j, int32_t tiles, bool even, int32_t workers) {
    constexpr int64_t SPAN_OF[2] = {700, 1150}, BLOCK_OF[2] = {4000, 6000}, JOINING = 3000;
    plan best = {64, ALONE, 1};
    int64_t least = INT64_MAX;
    const auto consider = [&](const plan &p) {
        const int64_t blocks = (int64_t)tiles * blocks_for(j.rows, p.n);
        const int slices = p.use == SLICED ? p.cluster : 1;
        const int64_t waves = (blocks * slices + workers - 1) / workers;
        const int64_t cost = waves * ((j.spans + slices - 1) / slices * SPAN_OF[p.n / 128] +
                                      BLOCK_OF[p.n / 128] + (slices > 1 ? JOINING : 0));
        if (cost < least) {
            least = cost;
            best = p;
        }
    };
    for (int n = 64; n <= 128; n += 64) {
        if (n > 64 && j.rows <= 64) break;
        consider({n, even ? SHARED : ALONE, even ? 2 : 1});
    }
    for (int cluster = 2; cluster <= MMA_SLICES; cluster *= 2) consider({64, SLICED, cluster});
    return best;
}

template <int R, int N, sharing S>
void launch(hd_stream *s, bf16_job *j, int32_t tiles, int cluster) {
    using room = memory<R, N, S>;
    j->cluster = cluster;
    j->row_tiles = (int32_t)blocks_for(j->rows, N);
    j->keep_w = j->row_tiles == 1 ? EVICT_FIRST : EVICT_NORMAL;
    j->stages = 2;
    while (j->stages < MAX_STAGES && room::bytes(j->stages + 1, cluster) <= SHARED_BYTES) {
        j->stages++;
    }
    const size_t bytes = room::bytes(j->stages, cluster);
    const int each = S == SLICED ? cluster : 1;
    hd_cuda_allow_shared((const void *)gemm_bf16<R, N, S>, SHARED_BYTES);
    launch_kernel(hd_cuda_stream(s), gemm_bf16<R, N, S>,
                  dim3((unsigned)(tiles * j->row_tiles * each)), threads_of<N>, bytes, cluster,
                  *j);
}

template <int R>
void launch_product(hd_stream *s, bf16_job *j, int32_t tiles, bool even) {
    const plan p = best_plan(*j, tiles, even, hd_stream_workers(s));
    if (p.use == SLICED) return launch<R, 64, SLICED>(s, j, tiles, p.cluster);
    if (p.n == 64 && even) return launch<R, 64, SHARED>(s, j, tiles, 2);
    if (p.n == 64) return launch<R, 64, ALONE>(s, j, tiles, 1);
    if (even) return launch<R, 128, SHARED>(s, j, tiles, 2);
    launch<R, 128, ALONE>(s, j, tiles, 1);
}

/* Rounds rows, which the product of j reads. */
template <int R>
void launch_rounding(hd_stream *s, const heads_job &h, const bf16_job &j, uint8_t *boxes) {
    constexpr int MANY = 4;
    const rounding r = {h.x, h.x_stride, h.x_head, boxes, h.rows, j.row_boxes, j.spans};
    const auto grid = [&](int each) {
        return dim3(blocks_for((int64_t)blocks_for(h.rows, 4 * each) * j.spans, BLOCK / WARP),
                    (unsigned)h.heads);
    };
    cudaStream_t queue = hd_cuda_stream(s);
    if (grid(MANY).x * (unsigned)h.heads >= 4u * (unsigned)hd_stream_workers(s)) {
        launch_kernel(queue, round_boxes<R, MANY>, grid(MANY), BLOCK, 0, 1, r);
    } else {
        launch_kernel(queue, round_boxes<R, 1>, grid(1), BLOCK, 0, 1, r);
    }
}

/* The scratch behind x, where x lies in it. */
struct scratch_room {
    uint8_t *at;
    size_t bytes;
};

scratch_room room_of(hd_stream *s, const heads_job &h) {
    constexpr size_t ALIGN = 1024;
    uint8_t *base = static_cast<uint8_t *>(hd_stream_scratch(s, 0, 0));
    const size_t all = (size_t)hd_stream_workers(s) * hd_stream_scratch_bytes(s);
    const uint8_t *x = reinterpret_cast<const uint8_t *>(h.x);
    size_t begin = 0;
    if (x >= base && x < base + all) {
        begin = (size_t)(x - base) + (size_t)h.rows * (size_t)h.x_stride * sizeof *h.x;
        begin = (begin + ALIGN - 1) / ALIGN * ALIGN;
    }
    return {base + begin, begin < all ? all - begin : 0};
}

bool describe_matrix(CUtensorMap *to, const hd_weight *w) {
    const cuuint64_t bytes = (cuuint64_t)w->cols * (w->type == HD_BF16 ? 2 : 1);
    const box b = {
        2, {bytes, (cuuint64_t)w->rows},
         {bytes},
         {128, OUTS                   }
    };
    return describe(to, w->data, b);
}

/* All rows, as many at a time as have room. */
template <int R>
bool multiply_rows(hd_stream *s, const heads_job *h, const hd_weight *const *w, int32_t n) {
    const scratch_room room = room_of(s, *h);
    const size_t each = (size_t)h->heads * (size_t)w[0]->cols * 2;
    const size_t fit = room.bytes / each / BOX_ROWS * BOX_ROWS;
    bf16_job j = {};
    int32_t tiles = 0;
    bool even = true;
    if (fit == 0) return false;
    for (int32_t i = 0; i < n; i++) {
        matrix *m = &j.part[i];
        if (!describe_matrix(&j.map[i], w[i])) return false;
        *m = {h[i].out,        h[i].out_stride,
              h[i].out_head,   shape_of(w[i]),
              arrays_of(w[i]), h[i].n_rows,
              h[i].first_row,  h[i].head_rows,
              tiles,           (int32_t)blocks_for(h[i].n_rows, OUTS),
              h[i].out_f32};
        tiles += h[i].heads * m->tiles;
        even = even && m->tiles % 2 == 0;
    }
    j.boxes = room.at;
    j.spans = w[0]->cols / SPAN;
    j.n = n;
    heads_job part = *h;
    for (int32_t done = 0; done < h->rows; done += part.rows) {
        part.rows = (int32_t)((size_t)(h->rows - done) < fit ? (size_t)(h->rows - done) : fit);
        part.x = h->x + done * h->x_stride;
        j.rows = part.rows;
        j.row_boxes = (int32_t)blocks_for(part.rows, BOX_ROWS);
        for (int32_t i = 0; i < n; i++) {
            const int64_t at = done * h[i].out_stride * (int64_t)sizeof(float);
            j.part[i].out = static_cast<uint8_t *>(h[i].out) + at;
        }
        launch_rounding<R>(s, part, j, room.at);
        launch_product<R>(s, &j, tiles, even);
    }
    return true;
}

} // namespace

bool multiply_bf16(hd_stream *s, const heads_job *h, const hd_weight *const *w, int32_t n) {
    if (!hd_cuda_is_sm90()) return false;
    switch (reading_of(w[0], x_fits(h->x, h->x_stride, h->x_head))) {
    case READ_BF16:
        for (int32_t i = 0; i < n; i++) {
            if (w[i]->scale) return false;
        }
        return multiply_rows<READ_BF16>(s, h, w, n);
    case READ_E4M3:
        return multiply_rows<READ_E4M3>(s, h, w, n);
    case READ_MXE4M3:
        return multiply_rows<READ_MXE4M3>(s, h, w, n);
    default:
        return false;
    }
}
