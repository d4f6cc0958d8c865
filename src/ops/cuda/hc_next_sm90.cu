/* hc_next_sm90.cu - hyper-connections between two blocks, on Hopper in one launch for few rows: the
 * result of the block before goes to the streams, which are mixed and normed for the next one.
 *
 * A row has a cluster of 16 blocks: eight groups of columns, and two blocks for each, which share the
 * stretches of columns that are summed by themselves; fn is on its way to registers before the block
 * before is done. Group q has the columns of warp q in hc_cuda.cu and rows_cuda.cu, whose orders of sums
 * these are, so that a row has the same bits as with hc_post, hc_pre and rms_norm.
 *
 * Blocks send each other their sums (st.async) and wait for those that they need, without barriers of
 * the cluster. After the first of two exchanges one warp of a block goes on; the last block's second
 * warp finds the way back, meanwhile. */
#include <atomic>

#include "ops/cuda/block_internal.cuh"
#include "ops/cuda/hc_internal.cuh"
#include "ops/cuda/sm90_internal.cuh"
#include "ops/fused_internal.h"

namespace {

constexpr int HC = 4, MIX = 2 * HC + HC * HC;   /* streams; mixing values of a row */
constexpr int GROUPS = 8, CLUSTER = 2 * GROUPS; /* of columns; blocks of a row */
constexpr int THREADS = 512, WARPS = THREADS / WARP, CHUNK = BLOCK; /* columns */
constexpr int REGISTERS_FOR = 640; /* threads: so that some stay for other kernels */
constexpr int MAX_CHUNKS = 28, EACH = (MAX_CHUNKS + WARPS - 1) / WARPS;
constexpr int MAX_STRETCHES = (HC * MAX_CHUNKS + 7) / 8, MAX_OWN = (MAX_STRETCHES + 1) / 2;
constexpr int MAX_GPUS = 64;                  /* of a process that have this kernel */
constexpr int MOST_ROWS = 8, MOST_MIXED = 14; /* rows; chunks that a block weighs */
constexpr int AT_ONCE = 6;                    /* mixing values of a warp, and the squares */

/* Sums of a stretch: the values that weigh streams and the squares, for all blocks; comb and post, for
 * the last. */
constexpr int FORTH = HC + 1, FORTH_ROOM = HC + 2, BACK = HC * HC + HC;

/* A block's columns: 32 of each chunk of 256. */
struct row_shared {
    uint64_t forth_there, back_there, square_there; /* sums of all blocks */
    double coefficient[HC + HC * HC];               /* post, comb of before */
    double given[HC];                               /* pre */
    float scale[3], base[MIX];
    /* what it sends: of each of its stretches */
    __align__(16) double forth_part[MAX_OWN][FORTH_ROOM];
    __align__(16) double back_part[MAX_OWN][BACK];
    /* what others send */
    __align__(16) double forth[GROUPS][MAX_STRETCHES][FORTH_ROOM];
    __align__(16) double back[GROUPS][MAX_STRETCHES][BACK];
    __align__(16) double square[2 * GROUPS]; /* of the mixture, of even and odd chunks */
    double total[3][MAX_STRETCHES * BACK];   /* of a warp that joins them */
};

/* A weight, on its way when this stands. */
template <int BYTES>
__device__ __forceinline__ float weight_now(const float *from, bool there) {
    float value;
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\nmov.b32 %0, 0;\n"
                 "@p ld.global.nc.L1::no_allocate.f32 %0, [%1 + %3];\n}"
                 : "=f"(value)
                 : "l"(from), "r"((int)there), "n"(BYTES));
    return value;
}

/* Two doubles to the same place in another block of the cluster, and their bytes to its barrier. */
__device__ __forceinline__ void send_two(double *to, uint64_t *barrier, uint32_t block,
                                         const double *from) {
    const int4 sent = *reinterpret_cast<const int4 *>(from);
    asm volatile("{\n.reg .b32 there, counted;\n"
                 "mapa.shared::cluster.u32 there, %0, %2;\n"
                 "mapa.shared::cluster.u32 counted, %1, %2;\n"
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [there], "
                 "{%3, %4, %5, %6}, [counted];\n}" ::"r"(shared_address(to)),
                 "r"(shared_address(barrier)), "r"(block), "r"(sent.x), "r"(sent.y),
                 "r"(sent.z), "r"(sent.w)
                 : "memory");
}

__device__ __forceinline__ void send_one(double *to, uint64_t *barrier, uint32_t block,
                                         double sent) {
    asm volatile("{\n.reg .b32 there, counted;\n"
                 "mapa.shared::cluster.u32 there, %0, %2;\n"
                 "mapa.shared::cluster.u32 counted, %1, %2;\n"
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [there], %3, "
                 "[counted];\n}" ::"r"(shared_address(to)),
                 "r"(shared_address(barrier)), "r"(block), "l"(__double_as_longlong(sent))
                 : "memory");
}

/* How blocks and warps share a row. */
struct plan {
    int32_t chunks, stretches, most; /* of a stream; of all streams; of a block */
    int32_t sharers, each;           /* warps of a stretch, their values */
};

plan plan_of(int32_t cols) {
    plan p;
    p.chunks = cols / CHUNK;
    p.stretches = (HC * p.chunks + 7) / 8;
    p.most = (p.stretches + 1) / 2;
    p.sharers = WARPS / p.most;
    p.each = (MIX + p.sharers - 1) / p.sharers;
    return p;
}

/* Which stretches a block sums, and which of their values a warp. */
struct share {
    int32_t first, n;        /* the block's stretches */
    int32_t own, value, end; /* the warp's stretch, its values; none: value == end */
    bool squares;
};

__device__ __forceinline__ share share_of(const plan &p, int half) {
    const int32_t warp = threadIdx.x / WARP, part = warp / p.most;
    share s;
    s.first = half * p.most;
    s.n = half ? p.stretches - p.most : p.most;
    s.own = warp - part * p.most;
    const bool there = part < p.sharers && s.own < s.n;
    s.value = there ? min(part * p.each, MIX) : 0;
    s.end = there ? min(s.value + p.each, MIX) : 0;
    s.squares = there && part == 0;
    return s;
}

/* Elements of fn: AT_ONCE values from `value` on, of the lane's columns in the warp's stretch. */
__device__ __forceinline__ void fetch_fn(float (*f)[8], const hd_hc_next_args &a,
                                         const share &s, int group, int32_t value) {
    const int32_t chunk = 8 * (s.first + s.own), all = HC * (a.cols / CHUNK);
    const float *from = a.fn + (int64_t)value * HC * a.cols + (int64_t)chunk * CHUNK +
                        group * WARP + threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
        const bool there = value + i < s.end;
        constexpr int STEP = CHUNK * (int)sizeof(float);
        f[i][0] = weight_now<0 * STEP>(from, there);
        f[i][1] = weight_now<1 * STEP>(from, there && chunk + 1 < all);
        f[i][2] = weight_now<2 * STEP>(from, there && chunk + 2 < all);
        f[i][3] = weight_now<3 * STEP>(from, there && chunk + 3 < all);
        f[i][4] = weight_now<4 * STEP>(from, there && chunk + 4 < all);
        f[i][5] = weight_now<5 * STEP>(from, there && chunk + 5 < all);
        f[i][6] = weight_now<6 * STEP>(from, there && chunk + 6 < all);
        f[i][7] = weight_now<7 * STEP>(from, there && chunk + 7 < all);
        from += (int64_t)HC * a.cols;
    }
}

/* What a thread has of a row before the streams are mixed. */
struct old_streams {
    float x[HC], y;
};

__device__ __forceinline__ old_streams load_old(const hd_hc_next_args &a, int64_t r, int32_t c,
                                                bool there) {
    const float *x = acts(a.x) + r * HC * a.cols + c;
    old_streams old;
#pragma unroll
    for (int k = 0; k < HC; k++) old.x[k] = load_now(x + (int64_t)k * a.cols, there);
    old.y = load_now(acts(a.y) + r * a.cols + c, there && a.y.data);
    return old;
}

/* The streams with the result of the block before, in place. */
__device__ __forceinline__ void add_result(const row_shared *s, old_streams *old) {
    const double own = (double)old->y;
    double x[HC];
#pragma unroll
    for (int k = 0; k < HC; k++) x[k] = (double)old->x[k];
#pragma unroll
    for (int i = 0; i < HC; i++) {
        double mixed = s->coefficient[i] * own;
#pragma unroll
        for (int k = 0; k < HC; k++) mixed = fma(s->coefficient[HC + k * HC + i], x[k], mixed);
        old->x[i] = narrow((float)mixed);
    }
}

/* A finite float times 2^-896, by its bits: there are four times as many places for these as for
 * conversions to double. */
__device__ __forceinline__ double tiny(float x) {
    const int bits = __float_as_int(x);
    return __hiloint2double((bits >> 3) & (int)0x8fffffff, (int)((unsigned)bits << 29));
}

/* Sums of x times AT_ONCE values over the columns of the warp's stretch, to its parts. */
__device__ __forceinline__ void mix_part(row_shared *shared, const share &s, const double *x,
                                         int32_t all, const float (*f)[8], int32_t value,
                                         bool squares) {
    constexpr double LARGE = 0x1p896;
    const int lane = threadIdx.x % WARP;
    const int32_t chunk = 8 * (s.first + s.own);
    double sum[8] = {};
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const double own = chunk + k < all ? x[(chunk + k) * WARP + lane] : 0.0;
        const double large = own * LARGE;
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            sum[i] =
                i % 2 ? fma(tiny(f[i][k]), large, sum[i]) : fma((double)f[i][k], own, sum[i]);
        }
        if (squares) sum[AT_ONCE] = fma(own, own, sum[AT_ONCE]);
    }
    const double own = warp_sum_of(sum);
    if (lane % 4) return;
    const int32_t i = lane / 4, of = value + i;
    if (i == AT_ONCE && squares) shared->forth_part[s.own][HC] = own;
    if (i >= AT_ONCE || of >= s.end) return;
    if (of < HC) shared->forth_part[s.own][of] = own;
    if (of >= HC && of < 2 * HC) shared->back_part[s.own][HC * HC + of - HC] = own;
    if (of >= 2 * HC) shared->back_part[s.own][of - 2 * HC] = own;
}

/* Every warp sends to a block what weighs streams; the last block gets the rest, too. */
__device__ __forceinline__ void send_parts(row_shared *shared, const share &s, int group) {
    static_assert(WARPS == CLUSTER, "a warp for each block");
    const int32_t warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    for (int32_t i = 2 * lane; i < s.n * FORTH_ROOM; i += 2 * WARP) {
        send_two(&shared->forth[group][s.first][0] + i, &shared->forth_there, (uint32_t)warp,
                 &shared->forth_part[0][0] + i);
    }
    for (int32_t i = 2 * (int32_t)threadIdx.x; i < s.n * BACK; i += 2 * THREADS) {
        send_two(&shared->back[group][s.first][0] + i, &shared->back_there, CLUSTER - 1,
                 &shared->back_part[0][0] + i);
    }
}

/* Lane v < N: value v of the row, from all groups of all stretches; one warp. */
template <int N, int ROOM>
__device__ __forceinline__ double join_parts(const double (*part)[MAX_STRETCHES][ROOM],
                                             double *total, int32_t stretches, int32_t from) {
    const int32_t lane = threadIdx.x % WARP, n = N * stretches;
    for (int32_t base = lane; base < n + lane; base += 2 * WARP) { /* two at once */
        const int32_t at[2] = {min(base, n - 1), min(base + WARP, n - 1)};
        double own[2][GROUPS];
#pragma unroll
        for (int q = 0; q < 2 * GROUPS; q++) {
            own[q % 2][q / 2] = part[q / 2][at[q % 2] / N][from + at[q % 2] % N];
        }
#pragma unroll
        for (int q = 1; q < GROUPS; q++) {
            own[0][0] += own[0][q];
            own[1][0] += own[1][q];
        }
        total[at[0]] = own[0][0];
        total[at[1]] = own[1][0];
    }
    __syncwarp();
    const int32_t v = min(lane, N - 1);
    double own[MAX_STRETCHES], sum = 0.0;
#pragma unroll
    for (int k = 0; k < MAX_STRETCHES; k++) own[k] = k < stretches ? total[k * N + v] : 0.0;
#pragma unroll
    for (int k = 0; k < MAX_STRETCHES; k++) {
        if (k < stretches) sum += own[k];
    }
    return sum;
}

__device__ __forceinline__ double shuffle(double x, int lane) {
    return __shfl_sync(ALL_LANES, x, lane);
}

/* 1 / the root mean square of the row's streams. */
__device__ __forceinline__ double over_rms(const hd_hc_next_args &a, double squares) {
    return 1.0 / sqrt(squares / (HC * a.cols) + (double)a.norm_eps);
}

/* Lane i < HC: the weight of stream i. */
__device__ __forceinline__ double find_forth(row_shared *s, const hd_hc_next_args &a,
                                             int32_t stretches, double *total) {
    const int32_t i = min((int32_t)(threadIdx.x % WARP), HC - 1);
    const double sum = join_parts<FORTH>(s->forth, total, stretches, 0);
    return forth_of(sum * over_rms(a, shuffle(sum, HC)), s->scale[0], s->base[i], a.eps);
}

/* The weights of the way back, of row r; one warp. */
__device__ __forceinline__ void find_back(row_shared *s, const hd_hc_next_args &a, int64_t r,
                                          int32_t stretches) {
    constexpr int COMB = HC * HC;
    const int32_t lane = threadIdx.x % WARP, i = min(lane, BACK - 1);
    const float scale = s->scale[i < COMB ? 2 : 1];
    const float base = s->base[i < COMB ? 2 * HC + i : HC + i - COMB];
    const double squares = join_parts<1>(s->forth, s->total[1], stretches, HC);
    const double rms = over_rms(a, squares);
    mbarrier_wait(&s->back_there, 0);
    __syncwarp();
    const double m = join_parts<BACK>(s->back, s->total[1], stretches, 0) * rms;
    const double element = shuffle(m * (double)scale + (double)base, lane % COMB);
    const float comb = sinkhorn_of_four(element, a.iters, a.eps);
    if (lane < COMB) a.comb[r * COMB + lane] = comb;
    if (lane >= COMB && lane < BACK) a.post[r * HC + lane - COMB] = post_of(m, scale, base);
}

/* The mixture's scale, from all blocks' squares. */
__device__ __forceinline__ float norm_scale(const row_shared *s, const hd_hc_next_args &a,
                                            bool by_parity) {
    double part[2 * GROUPS];
#pragma unroll
    for (int q = 0; q < 2 * GROUPS; q++) part[q] = s->square[q];
    double sum = part[0];
#pragma unroll
    for (int q = 1; q < 2 * GROUPS; q++) {
        if (q < GROUPS || by_parity) sum += part[q];
    }
    return (float)(1.0 / sqrt(sum / a.cols + (double)a.norm_eps));
}

/* Weighs and norms the block's chunks of a row: from `first` on every `step`th; one warp. */
__device__ __forceinline__ void finish_row(row_shared *s, const hd_hc_next_args &a, int64_t r,
                                           const plan &of, const double *x, int rank,
                                           bool by_parity) {
    const int group = rank % GROUPS, half = rank / GROUPS, lane = threadIdx.x % WARP;
    const int32_t step = by_parity ? 2 : 1, n = by_parity || half == 0 ? of.chunks : 0;
    const int32_t first = by_parity ? half : 0;
    float weight[MOST_MIXED], mixture[MOST_MIXED];
    double m[HC], sum = 0.0;
    if (a.pre) {
#pragma unroll
        for (int i = 0; i < HC; i++) m[i] = s->given[i];
    } else {
        mbarrier_wait(&s->forth_there, 0);
        __syncwarp();
        const double own = find_forth(s, a, of.stretches, s->total[0]);
#pragma unroll
        for (int i = 0; i < HC; i++) m[i] = shuffle(own, i);
    }
#pragma unroll
    for (int k = 0; k < MOST_MIXED; k++) {
        const int32_t j = first + k * step;
        if (j >= n) break;
        double mixed = 0.0;
#pragma unroll
        for (int i = 0; i < HC; i++) {
            mixed = fma(m[i], x[(i * of.chunks + j) * WARP + lane], mixed);
        }
        mixture[k] = narrow((float)mixed);
        sum = fma((double)mixture[k], (double)mixture[k], sum);
    }
    sum = warp_sum(sum);
    if (lane < CLUSTER && n > 0) {
        send_one(&s->square[rank], &s->square_there, (uint32_t)lane, sum);
    }
#pragma unroll
    for (int k = 0; k < MOST_MIXED; k++) {
        const int32_t j = first + k * step;
        weight[k] = load_now(a.weight + j * CHUNK + group * WARP + lane, j < n);
    }
    mbarrier_wait(&s->square_there, 0);
    __syncwarp();
    const float scale = norm_scale(s, a, by_parity);
#pragma unroll
    for (int k = 0; k < MOST_MIXED; k++) {
        const int32_t j = first + k * step;
        if (j >= n) break;
        acts(a.out)[r * a.cols + j * CHUNK + group * WARP + lane] =
            narrow(mixture[k] * scale * weight[k]);
    }
}

/* The barriers of what others send. */
__device__ __forceinline__ void init_barriers(row_shared *s, int32_t stretches,
                                              bool by_parity) {
    constexpr uint32_t EACH_SUM = GROUPS * sizeof(double);
    mbarrier_init(&s->forth_there, 1);
    mbarrier_init(&s->back_there, 1);
    mbarrier_init(&s->square_there, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(&s->forth_there, (uint32_t)stretches * FORTH_ROOM * EACH_SUM);
    mbarrier_arrive_expect_tx(&s->back_there, (uint32_t)stretches * BACK * EACH_SUM);
    mbarrier_arrive_expect_tx(&s->square_there, (by_parity ? 2 : 1) * EACH_SUM);
}

__global__ void __launch_bounds__(REGISTERS_FOR)
    hc_next(hd_hc_next_args a, plan of, bool by_parity) {
    extern __shared__ __align__(16) double x[]; /* the streams, [4 * chunks, 32] */
    __shared__ row_shared shared;
    row_shared *s = &shared;
    const int rank = (int)cluster_ctarank(), group = rank % GROUPS, half = rank / GROUPS;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int64_t r = blockIdx.y;
    const share mine = share_of(of, half);
    const int32_t t = threadIdx.x;
    float f[AT_ONCE][8];
    griddepcontrol_launch_dependents();
    fetch_fn(f, a, mine, group, mine.value);
    const float constant = weight_now<0>(t < MIX ? a.base + t : a.scale + t - MIX, t < MIX + 3);
    if (warp == 1 && lane < of.chunks) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(a.weight + lane * CHUNK + group * WARP));
    }
    if (t == 0) init_barriers(s, of.stretches, by_parity);
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    griddepcontrol_wait();
    old_streams own[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int32_t j = warp + i * WARPS;
        own[i] = load_old(a, r, j * CHUNK + group * WARP + lane, j < of.chunks);
    }
    if (t < HC + HC * HC) {
        const float *from = t < HC ? a.post + r * HC + t : a.comb + r * HC * HC + t - HC;
        s->coefficient[t] = (double)load_now(from, a.y.data);
        if (a.pre && t < HC) s->given[t] = a.first ? t == 0 : (double)a.pre[r * HC + t];
    }
    if (t < MIX) s->base[t] = constant;
    if (t >= MIX && t < MIX + 3) s->scale[t - MIX] = constant;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int32_t j = warp + i * WARPS;
        if (j >= of.chunks) break;
        if (a.y.data) add_result(s, &own[i]);
#pragma unroll
        for (int k = 0; k < HC; k++) {
            x[(k * of.chunks + j) * WARP + lane] = (double)own[i].x[k];
        }
    }
    __syncthreads();
    for (int32_t value = mine.value; value < mine.end; value += AT_ONCE) {
        if (value != mine.value) fetch_fn(f, a, mine, group, value);
        mix_part(s, mine, x, HC * of.chunks, f, value, mine.squares && value == mine.value);
    }
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); /* barriers are there */
    __syncthreads();
    const int here = (int)cluster_ctarank(); /* again: no register keeps it so long */
    send_parts(s, share_of(of, here / GROUPS), here % GROUPS);
    if (warp == 0) finish_row(s, a, r, of, x, here, by_parity);
    mbarrier_wait(&s->forth_there, 0); /* and all have read the streams and their weights */
    if (here == CLUSTER - 1 && warp == 1) find_back(s, a, r, of.stretches);
    if (here == CLUSTER - 1 && warp == 2 && a.pre) {
        const double next = find_forth(s, a, of.stretches, s->total[2]);
        if (lane < HC) a.pre[r * HC + lane] = (float)next;
    }
    if (!a.y.data) return;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int32_t j = warp + i * WARPS;
        if (j >= of.chunks) break;
        float *to = acts(a.x) + r * HC * a.cols + j * CHUNK + here % GROUPS * WARP + lane;
#pragma unroll
        for (int k = 0; k < HC; k++) {
            const float mixed = narrow((float)x[(k * of.chunks + j) * WARP + lane]);
            if (k / 2 == here / GROUPS) to[(int64_t)k * a.cols] = mixed;
        }
    }
}

size_t bytes_of(int32_t chunks) {
    return (size_t)chunks * HC * WARP * sizeof(double);
}

/* Whether a row's cluster fits on the current GPU; asked once of each. */
bool cluster_fits() {
    enum answer { UNKNOWN, FITS, TOO_LARGE };
    static std::atomic<answer> known[MAX_GPUS];
    int gpu = 0;
    cudaGetDevice(&gpu);
    if (gpu >= MAX_GPUS) return false;
    std::atomic<answer> &kept = known[gpu];
    if (kept != UNKNOWN) return kept == FITS;
    const size_t most = bytes_of(MAX_CHUNKS);
    cudaLaunchAttribute how = {};
    how.id = cudaLaunchAttributeClusterDimension;
    how.val.clusterDim = {CLUSTER, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(CLUSTER);
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = most;
    config.attrs = &how;
    config.numAttrs = 1;
    int n = 0;
    cudaFuncSetAttribute(hc_next, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    hd_cuda_allow_shared((const void *)hc_next, most);
    if (cudaOccupancyMaxActiveClusters(&n, hc_next, &config) != cudaSuccess) cudaGetLastError();
    kept = n > 0 ? FITS : TOO_LARGE;
    return n > 0;
}

} // namespace

void hd_hc_next_cuda(hd_stream *s, const hd_hc_next_args *a) {
    const int32_t chunks = a->cols / CHUNK;
    if (a->rows == 0) return;
    const bool few = a->rows <= MOST_ROWS && a->hc == HC && a->cols % CHUNK == 0 &&
                     chunks <= MAX_CHUNKS && (uintptr_t)a->fn % 16 == 0;
    cudaStream_t queue = hd_cuda_stream(s);
    if (!few || !hd_cuda_is_sm90() || !cluster_fits()) {
        if (hc_next_many(s, a)) return;
#define RUN(part, args) hd_##part##_cuda(s, args)
        OPS_RUN_hc_next(RUN, a)
#undef RUN
            return;
    }
    launch_kernel(queue, hc_next, dim3(CLUSTER, (unsigned)a->rows), THREADS, bytes_of(chunks),
                  CLUSTER, *a, plan_of(a->cols), norm_is_wide(a->cols));
    hd_cuda_check(s, "hc_next");
}
