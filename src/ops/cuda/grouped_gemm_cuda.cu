/* grouped_gemm_cuda.cu - rows sorted by expert slot times each slot's matrix.
 *
 * The host does not know how many rows a slot has, so the grid is as large as it can be and
 * a block finds its slot by adding up tiles. Where the slot's matrix lies, a block reads from
 * the table in device memory: a launch has the same arguments whatever experts are in the slots. */
#include "ops/cuda/gemm_few_fp4_internal.cuh"
#include "ops/cuda/gemm_large_m_internal.cuh"
#include "ops/cuda/gemm_f32_internal.cuh"

/* With one table, or with two of one shape, whose products have outputs of their own. */
struct grouped_job {
    cuda_act *out[2];
    const cuda_act *x;
    const hd_weight *slots[2]; /* [n_experts] device memory */
    const int32_t *offset, *assignment;
    int32_t n_experts, top_k, n_places, tables;
};

/* Which expert's which tile of MT places a block has; expert -1: none. One warp's work. */
struct tile {
    int32_t expert, first, n;
};

template <int MT>
static __device__ tile find_tile(const grouped_job &g, int32_t wanted) {
    const int lane = threadIdx.x;
    int32_t before = 0;
#pragma unroll 4 /* all of them on their way */
    for (int32_t base = 0; base < g.n_experts; base += WARP) {
        const int32_t e = base + lane;
        const int32_t first = e < g.n_experts ? g.offset[e] : 0;
        const int32_t end = e < g.n_experts ? g.offset[e + 1] : 0;
        const int32_t own = (end - first + MT - 1) / MT;
        int32_t upto = own;
        for (int step = 1; step < WARP; step *= 2) {
            const int32_t left = __shfl_up_sync(ALL_LANES, upto, step);
            if (lane >= step) upto += left;
        }
        const unsigned there = __ballot_sync(ALL_LANES, before + upto > wanted);
        if (there) {
            const int at = __ffs((int)there) - 1;
            const int32_t skipped = wanted - before - __shfl_sync(ALL_LANES, upto - own, at);
            const int32_t start = __shfl_sync(ALL_LANES, first, at) + skipped * MT;
            return {base + at, start, min(MT, __shfl_sync(ALL_LANES, end, at) - start)};
        }
        before += __shfl_sync(ALL_LANES, upto, WARP - 1);
    }
    return {-1, 0, 0};
}

/* The block's tile, its rows of x and outputs; all threads. */
template <int MT, typename J>
static __device__ __forceinline__ tile take_tile(J *job, const grouped_job &g,
                                                 const weight_shape &s, int32_t col,
                                                 int table = 0) {
    __shared__ tile mine;
    cuda_act *out = table ? g.out[1] : g.out[0];
    if (threadIdx.x < WARP) {
        const tile found = find_tile<MT>(g, (int32_t)blockIdx.y);
        if (threadIdx.x == 0) mine = found;
        for (int32_t m = (int32_t)threadIdx.x; m < found.n; m += WARP) {
            const int32_t place = found.first + m;
            const int64_t row = g.assignment ? g.assignment[place] / g.top_k : place;
            job->x[m] = g.x + row * s.cols;
            job->out[m] = out + (int64_t)place * s.rows + col;
        }
    }
    __syncthreads();
    return mine;
}

template <int R, int MT, int NT>
static __global__ void __launch_bounds__(PRODUCT_THREADS)
    product_grouped(grouped_job g, weight_shape s) {
    begin_kernel();
    __shared__ product_job job;
    const int32_t col = (int32_t)blockIdx.x * NT * WARP;
    const tile mine = take_tile<MT>(&job, g, s, col);
    if (mine.expert < 0) return;
    const product_span span = {mine.n, col, min(NT * WARP, s.rows - col), false};
    product<R, MT, NT>(job, span, s, arrays_of(&g.slots[0][mine.expert]));
}

template <int R, int P, typename S>
static __global__ void __launch_bounds__(SMALL_M_THREADS, 2)
    small_m_grouped(grouped_job g, weight_shape s, int32_t outs) {
    begin_kernel();
    extern __shared__ __align__(1024) uint8_t shared[];
    __shared__ mma_job job;
    const int32_t col = (int32_t)blockIdx.x * outs;
    const int table = (int)blockIdx.z;
    const hd_weight *slots = table ? g.slots[1] : g.slots[0];
    const tile mine = take_tile<SMALL_M_ROWS>(&job, g, s, col, table);
    if (mine.expert < 0) return;
    const mma_block block = {mine.n, col, min(outs, s.rows - col), false};
    if constexpr (HAS_SMALL_M<S>) {
        mma_small_m<R, P, S>(shared, job, block, s, arrays_of(&slots[mine.expert]));
    }
}

/* FP4 by few_fp4(), where a tile has at most `fit` rows of x. */
template <bool MX, typename S>
static __global__ void __launch_bounds__(SMALL_M_THREADS, 2)
    few_fp4_grouped(grouped_job g, weight_shape s, int32_t outs, int32_t fit) {
    begin_kernel();
    extern __shared__ __align__(1024) uint8_t shared[];
    __shared__ mma_job job;
    const int32_t col = (int32_t)blockIdx.x * outs;
    const int table = (int)blockIdx.z;
    const hd_weight *slots = table ? g.slots[1] : g.slots[0];
    const tile mine = take_tile<SMALL_M_ROWS>(&job, g, s, col, table);
    if (mine.expert < 0) return;
    const mma_block block = {mine.n, col, min(outs, s.rows - col), false};
    if constexpr (FOR_SM90) {
        const weight_arrays a = arrays_of(&slots[mine.expert]);
        if (mine.n <= fit) {
            few_fp4<MX, S::SLICED>(shared, job, block, s, a);
        } else {
            mma_small_m<READ_E2M1, FAST, S>(shared, job, block, s, a);
        }
    }
}

/* n_blocks share each row's slices. */
template <int R, int P, int ROWS>
static __global__ void __launch_bounds__(large_m_of<R, P, ROWS>::THREADS,
                                         large_m_of<R, P, ROWS>::AT_ONCE)
    large_m_grouped(grouped_job g, weight_shape s, int n_blocks) {
    begin_kernel();
    extern __shared__ __align__(1024) uint8_t shared[];
    __shared__ mma_job job;
    const int32_t col = (int32_t)blockIdx.x / n_blocks * LARGE_M_OUTS;
    const tile mine = take_tile<ROWS>(&job, g, s, col);
    if (mine.expert < 0) return;
    const mma_block block = {mine.n, col, min(LARGE_M_OUTS, s.rows - col), false};
    if constexpr (HAS_LARGE_M<ROWS>) {
        mma_large_m<R, P, ROWS>(shared, job, block, s, arrays_of(&g.slots[0][mine.expert]),
                                (int)blockIdx.x % n_blocks, n_blocks);
    }
}

/* Experts that can have places. */
static int32_t most_experts(const grouped_job &g) {
    return g.n_places < g.n_experts ? g.n_places : g.n_experts;
}

/* Tiles of `rows` places that may be needed, whatever the experts have. */
static unsigned most_tiles(const grouped_job &g, int32_t rows) {
    return (unsigned)(most_experts(g) + g.n_places / rows);
}

template <int R, int MT, int NT>
static void launch_product(cudaStream_t queue, const grouped_job &g, const hd_weight *w) {
    const dim3 grid(blocks_for(w->rows, NT * WARP), most_tiles(g, MT));
    launch_kernel(queue, product_grouped<R, MT, NT>, grid, PRODUCT_THREADS, 0, 1, g,
                  shape_of(w));
}

template <int R, int P, typename S>
static void launch_small_m(cudaStream_t queue, const grouped_job &g, const hd_weight *w,
                           int groups) {
    const size_t bytes = sizeof(small_m_shared<R, S>);
    const int32_t outs = small_m_outs<S>(groups); /* of a block */
    const dim3 grid(blocks_for(w->rows, outs), most_tiles(g, SMALL_M_ROWS), (unsigned)g.tables);
    hd_cuda_allow_shared((const void *)small_m_grouped<R, P, S>, bytes);
    launch_kernel(queue, small_m_grouped<R, P, S>, grid, SMALL_M_THREADS, bytes, 1, g,
                  shape_of(w), outs);
}

/* What a row of x takes: itself, and its sums of all slices twice. */
static int32_t few_row_bytes(int32_t cols, bool sliced) {
    const int32_t sums = 2 * MMA_SLICES * FEW_PART * (int32_t)sizeof(float);
    return few_x_bytes(cols) + (sliced ? sums : 0);
}

constexpr size_t FEW_SHARED = 110 * 1024; /* of a block: two are on a multiprocessor */

/* Rows of x that fit, at most a tile's. */
static int32_t few_rows_that_fit(int32_t cols, bool sliced) {
    const int32_t fit = ((int32_t)FEW_SHARED - FEW_RING) / few_row_bytes(cols, sliced);
    return fit < SMALL_M_ROWS ? fit : SMALL_M_ROWS;
}

static size_t few_bytes(int32_t rows, int32_t cols, bool sliced) {
    return (size_t)FEW_RING + (size_t)rows * (size_t)few_row_bytes(cols, sliced);
}

/* Whether the matrix is NVFP4, or MXFP4, with scales that lie as they are copied. */
static bool few_fp4_fits(const hd_weight *w) {
    const bool mx = w->scale_type == HD_E8M0 && w->block_cols == 2 * GROUP;
    const bool nv = w->scale_type == HD_E4M3 && w->block_cols == GROUP;
    return hd_cuda_is_sm90() && w->type == HD_E2M1 && w->scale && w->block_rows == 1 &&
           (mx || nv) && (uintptr_t)w->scale % (mx ? 4 : 8) == 0 &&
           (int64_t)w->rows * w->cols < INT32_MAX;
}

/* As launch_small_m(); false if no row of x fits. */
template <bool MX, typename S>
static bool launch_few_fp4(cudaStream_t queue, const grouped_job &g, const hd_weight *w,
                           int groups) {
    const int32_t fit = few_rows_that_fit(w->cols, S::SLICED), outs = small_m_outs<S>(groups);
    const size_t few = few_bytes(fit, w->cols, S::SLICED);
    const size_t more = sizeof(small_m_shared<READ_E2M1, S>), bytes = few > more ? few : more;
    const dim3 grid(blocks_for(w->rows, outs), most_tiles(g, SMALL_M_ROWS), (unsigned)g.tables);
    if (fit < 1) return false;
    hd_cuda_allow_shared((const void *)few_fp4_grouped<MX, S>, bytes);
    launch_kernel(queue, few_fp4_grouped<MX, S>, grid, SMALL_M_THREADS, bytes, 1, g,
                  shape_of(w), outs, fit);
    return true;
}

template <typename S>
static bool launch_few_fp4(cudaStream_t queue, const grouped_job &g, const hd_weight *w,
                           int groups) {
    if (!few_fp4_fits(w)) return false;
    return w->scale_type == HD_E8M0 ? launch_few_fp4<true, S>(queue, g, w, groups)
                                    : launch_few_fp4<false, S>(queue, g, w, groups);
}

template <int R, int P, int ROWS>
static void launch_large_m(hd_stream *stream, const grouped_job &g, const hd_weight *w) {
    const dim3 grid(blocks_for(w->rows, LARGE_M_OUTS), most_tiles(g, ROWS));
    const int64_t blocks = (int64_t)grid.x * grid.y;
    const int n = blocks_of_row<R, P, ROWS>(blocks, w->cols, hd_stream_workers(stream));
    launch_cluster(large_m_grouped<R, P, ROWS>, grid, large_m_of<R, P, ROWS>::THREADS, n,
                   large_m_bytes<R, P, ROWS>(n), hd_cuda_stream(stream), g, shape_of(w), n);
}

/* Whether experts have so few places on average that a tile of small_m_grouped has room for most. */
static bool has_few_places(const grouped_job &g) {
    return g.n_places <= 8 * g.n_experts;
}

/* Tiles that are empty end at once, and are not counted. */
template <int R, int P>
static void launch_few_places(hd_stream *s, const grouped_job &g, const hd_weight *w) {
    const int64_t others = (int64_t)most_experts(g) * g.tables;
    const int32_t workers = hd_stream_workers(s), spans = w->cols / span_of<R>::COLS;
    const int groups = groups_of_warp(w->rows, others, workers, spans);
    cudaStream_t queue = hd_cuda_stream(s);
    constexpr bool FP4 = R == READ_E2M1 && P == FAST;
    if (groups > 0) {
        if (FP4 && launch_few_fp4<small_m_by_warp>(queue, g, w, groups)) return;
        return launch_small_m<R, P, small_m_by_warp>(queue, g, w, groups);
    }
    launch_small_m_plan(w->rows, others, workers, EXPERT_GROUPS, [&](auto shape, int each) {
        using S = decltype(shape);
        if constexpr (FP4 && std::is_same_v<S, small_m_wide>) {
            if (launch_few_fp4<S>(queue, g, w, each)) return;
        }
        launch_small_m<R, P, S>(queue, g, w, each);
    });
}

template <int R, int P>
static void launch_rows(hd_stream *s, const grouped_job &g, const hd_weight *w) {
    if (has_few_places(g)) return launch_few_places<R, P>(s, g, w);
    if (g.n_places > 24 * g.n_experts && hd_cuda_is_sm90()) {
        return launch_large_m<R, P, 64>(s, g, w);
    }
    launch_large_m<R, P, 32>(s, g, w);
}

template <int P>
static void multiply_experts(hd_stream *s, const grouped_job &g, const hd_weight *w) {
    cudaStream_t queue = hd_cuda_stream(s);
    switch (reading_of(w, x_fits(g.x, w->cols, 0))) {
    case READ_BF16:
        return launch_rows<READ_BF16, P>(s, g, w);
    case READ_E4M3:
        return launch_rows<READ_E4M3, P>(s, g, w);
    case READ_MXE4M3:
        return launch_rows<READ_MXE4M3, P>(s, g, w);
    case READ_E2M1:
        return launch_rows<READ_E2M1, P>(s, g, w);
    case READ_F32:
        if (g.n_places < 8 * g.n_experts) return launch_product<READ_F32, 4, 1>(queue, g, w);
        return launch_product<READ_F32, 16, 2>(queue, g, w);
    case READ_ANY:
        return launch_product<READ_ANY, 4, 1>(queue, g, w);
    }
}

static grouped_job job_of(const hd_grouped_gemm_args *a) {
    return {{acts(a->out)}, acts(a->x), {a->w->slots}, a->offset, a->assignment,
            a->w->n,        a->top_k,   a->n_places,   1};
}

template <int P>
static void grouped_gemm(hd_stream *s, const hd_grouped_gemm_args *a) {
    if (a->n_places == 0) return;
    if (!a->w->one_format) {
        return hd_stream_fail(s, HD_EUNSUPPORTED, "a layer's experts have several formats");
    }
    multiply_experts<P>(s, job_of(a), &a->w->shape);
    hd_cuda_check(s, "grouped_gemm");
}

void hd_grouped_gemm_cuda(hd_stream *s, const hd_grouped_gemm_args *a) {
    grouped_gemm<EXACT>(s, a);
}

void hd_grouped_gemm_cuda_fast(hd_stream *s, const hd_grouped_gemm_args *a) {
    grouped_gemm<FAST>(s, a);
}

/* ---- two tables in one launch ---- */

static bool has_shape_of(const hd_weight *a, const hd_weight *b) {
    return a->type == b->type && a->scale_type == b->scale_type && a->rows == b->rows &&
           a->cols == b->cols && a->block_rows == b->block_rows &&
           a->block_cols == b->block_cols && !a->scale == !b->scale;
}

template <int P>
static bool multiply_both(hd_stream *s, const grouped_job &g, const hd_weight *w, reading r) {
    switch (r) {
    case READ_BF16:
        return launch_few_places<READ_BF16, P>(s, g, w), true;
    case READ_E4M3:
        return launch_few_places<READ_E4M3, P>(s, g, w), true;
    case READ_MXE4M3:
        return launch_few_places<READ_MXE4M3, P>(s, g, w), true;
    case READ_E2M1:
        return launch_few_places<READ_E2M1, P>(s, g, w), true;
    default:
        return false;
    }
}

bool multiply_two_tables(hd_stream *s, const hd_grouped_gemm_args *a,
                         const hd_grouped_gemm_args *b, int products) {
    const hd_weight *w = &a->w->shape, *other = &b->w->shape;
    grouped_job g = job_of(a);
    g.out[1] = acts(b->out);
    g.slots[1] = b->w->slots;
    g.tables = 2;
    const reading r = reading_of(w, x_fits(g.x, w->cols, 0));
    if (a->n_places == 0 || !has_few_places(g) || !a->w->one_format || !b->w->one_format ||
        !has_shape_of(w, other) || reading_of(other, x_fits(g.x, w->cols, 0)) != r) {
        return false;
    }
    return products == EXACT ? multiply_both<EXACT>(s, g, w, r)
                             : multiply_both<FAST>(s, g, w, r);
}
