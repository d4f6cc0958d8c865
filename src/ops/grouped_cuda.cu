/* grouped_cuda.cu - rows sorted by expert times each expert's matrix.
 *
 * The host does not know how many rows an expert has, so the grid is as large as it can be and
 * a block finds its expert by adding up tiles. */
#include "ops/few_internal.cuh"
#include "ops/many_internal.cuh"
#include "ops/product_internal.cuh"

constexpr int MAX_EXPERTS = 512; /* of one launch: their arrays travel as its argument */

struct expert_arrays {
    weight_arrays at[MAX_EXPERTS];
};

struct grouped_job {
    cuda_act *out;
    const cuda_act *x;
    const int32_t *offset, *assignment;
    int32_t n_experts, top_k, n_places;
    bool x_aligned; /* rows of x are aligned to 16 bytes */
};

/* Which expert's which tile of MT places a block has; expert -1: none. One warp's work. */
struct tile {
    int32_t expert, first, n;
};

template <int MT>
static __device__ tile find_tile(const grouped_job &g, int32_t wanted) {
    const int lane = threadIdx.x;
    int32_t before = 0;
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
                                                 const weight_shape &s, int32_t col) {
    __shared__ tile mine;
    if (threadIdx.x < WARP) {
        const tile found = find_tile<MT>(g, (int32_t)blockIdx.y);
        if (threadIdx.x == 0) mine = found;
        for (int32_t m = (int32_t)threadIdx.x; m < found.n; m += WARP) {
            const int32_t place = found.first + m;
            const int64_t row = g.assignment ? g.assignment[place] / g.top_k : place;
            job->x[m] = g.x + row * s.cols;
            job->out[m] = g.out + (int64_t)place * s.rows + col;
        }
    }
    __syncthreads();
    return mine;
}

template <int R, int MT, int NT>
static __global__ void __launch_bounds__(PRODUCT_THREADS)
    product_grouped(grouped_job g, weight_shape s, const __grid_constant__ expert_arrays e) {
    __shared__ product_job job;
    const int32_t col = (int32_t)blockIdx.x * NT * WARP;
    const tile mine = take_tile<MT>(&job, g, s, col);
    if (mine.expert < 0) return;
    const product_span span = {mine.n, col, min(NT * WARP, s.rows - col), false};
    product<R, MT, NT>(job, span, s, e.at[mine.expert]);
}

/* n_blocks share each row's slices. */
template <int R, int NT>
static __global__ void __launch_bounds__(MMA_THREADS, NT == 1 ? 2 : 1)
    few_grouped(grouped_job g, weight_shape s, const __grid_constant__ expert_arrays e,
                int n_blocks) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ mma_job job;
    const int32_t col = (int32_t)blockIdx.x / n_blocks * FEW_OUTS;
    const tile mine = take_tile<8 * NT>(&job, g, s, col);
    if (mine.expert < 0) return;
    const mma_block block = {mine.n, col, min(FEW_OUTS, s.rows - col), false, g.x_aligned};
    mma_few<R, NT>(shared, job, block, s, e.at[mine.expert], (int)blockIdx.x % n_blocks,
                   n_blocks);
}

template <int R>
static __global__ void __launch_bounds__(MMA_THREADS, 1)
    many_grouped(grouped_job g, weight_shape s, const __grid_constant__ expert_arrays e) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ mma_job job;
    const int32_t col = (int32_t)blockIdx.x * MANY_OUTS;
    const tile mine = take_tile<MANY_ROWS>(&job, g, s, col);
    if (mine.expert < 0) return;
    const mma_block block = {mine.n, col, min(MANY_OUTS, s.rows - col), false, g.x_aligned};
    mma_many<R>(shared, job, block, s, e.at[mine.expert]);
}

/* Tiles of `rows` places that may be needed, whatever the experts have. */
static unsigned most_tiles(const grouped_job &g, int32_t rows) {
    const int32_t filled = g.n_places < g.n_experts ? g.n_places : g.n_experts;
    return (unsigned)(filled + g.n_places / rows);
}

static expert_arrays all_arrays(const grouped_job &g, const hd_weight *w) {
    expert_arrays e;
    for (int32_t i = 0; i < g.n_experts; i++) e.at[i] = arrays_of(&w[i]);
    return e;
}

template <int R, int MT, int NT>
static void launch_product(cudaStream_t queue, const grouped_job &g, const hd_weight *w) {
    const dim3 grid(blocks_for(w->rows, NT * WARP), most_tiles(g, MT));
    product_grouped<R, MT, NT>
        <<<grid, PRODUCT_THREADS, 0, queue>>>(g, shape_of(w), all_arrays(g, w));
}

template <int R, int NT>
static void launch_few(hd_stream *stream, const grouped_job &g, const hd_weight *w) {
    const dim3 grid(blocks_for(w->rows, FEW_OUTS), most_tiles(g, 8 * NT));
    const int64_t blocks = (int64_t)grid.x * grid.y;
    const int n = blocks_of_row<R>(blocks, w->cols, hd_stream_workers(stream));
    launch_cluster(few_grouped<R, NT>, grid, n, few_bytes<R, NT>(n), hd_cuda_stream(stream), g,
                   shape_of(w), all_arrays(g, w), n);
}

template <int R>
static void launch_many(cudaStream_t queue, const grouped_job &g, const hd_weight *w) {
    const dim3 grid(blocks_for(w->rows, MANY_OUTS), most_tiles(g, MANY_ROWS));
    const size_t bytes = many_bytes<R>();
    cudaFuncSetAttribute(many_grouped<R>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                         (int)bytes);
    many_grouped<R><<<grid, MMA_THREADS, bytes, queue>>>(g, shape_of(w), all_arrays(g, w));
}

/* By how many places an expert has on average. */
template <int R>
static void launch_rows(hd_stream *s, const grouped_job &g, const hd_weight *w) {
    if (g.n_places <= 8 * g.n_experts) {
        launch_few<R, 1>(s, g, w);
    } else if (g.n_places <= 24 * g.n_experts) {
        launch_few<R, 4>(s, g, w);
    } else {
        launch_many<R>(hd_cuda_stream(s), g, w);
    }
}

static reading reading_of_all(const hd_weight *w, int32_t n) {
    for (int32_t i = 0; i < n; i++) {
        if (reading_of(&w[i]) == READ_ANY) return READ_ANY;
    }
    return reading_of(w);
}

static void multiply_experts(hd_stream *s, const grouped_job &g, const hd_weight *w) {
    cudaStream_t queue = hd_cuda_stream(s);
    switch (reading_of_all(w, g.n_experts)) {
    case READ_BF16:
        return launch_rows<READ_BF16>(s, g, w);
    case READ_E4M3:
        return launch_rows<READ_E4M3>(s, g, w);
    case READ_E2M1:
        return launch_rows<READ_E2M1>(s, g, w);
    case READ_F32:
        if (g.n_places < 8 * g.n_experts) return launch_product<READ_F32, 4, 1>(queue, g, w);
        return launch_product<READ_F32, 16, 2>(queue, g, w);
    case READ_ANY:
        return launch_product<READ_ANY, 4, 1>(queue, g, w);
    }
}

void hd_linear_grouped_cuda(hd_stream *s, const hd_linear_grouped_args *a) {
    if (a->n_places == 0) return;
    for (int32_t first = 0; first < a->n_experts; first += MAX_EXPERTS) {
        const int32_t left = a->n_experts - first;
        const grouped_job g = {acts(a->out),
                               acts(a->x),
                               a->offset + first,
                               a->assignment,
                               left < MAX_EXPERTS ? left : MAX_EXPERTS,
                               a->top_k,
                               a->n_places,
                               (uintptr_t)a->x % 16 == 0 && a->w->cols % 4 == 0};
        multiply_experts(s, g, a->w + first);
    }
    hd_cuda_check(s, "linear_grouped");
}
