/* gemm_back_cuda.cu - gradients of GEMMs in float32: sums of outer products, and products with
 * transposed matrices. A block has a tile of the result, of TILE x TILE elements.
 *
 * A matrix's gradient is a sum over chunks of rows, each summed from zero in order: the sequences, divided
 * at every CHUNK rows. So a chunk does not depend on the other sequences of a micro-batch, and blocks may
 * have chunks of their own where a matrix has few tiles; then a second kernel adds them in order. */
#include "ops/backward/backward_cuda_internal.cuh"
#include "ops/cuda/weight_internal.cuh"

constexpr int TILE = 64, STEP = 16, EACH = 4; /* a thread has EACH x EACH elements */
constexpr int ACROSS = TILE / EACH, THREADS = ACROSS * ACROSS;
constexpr int CHUNK = 512, FEW_TILES = 48; /* tiles from which on a block has all chunks */

/* STEP terms of both factors, so that neither side's accesses collide. */
struct tile_pair {
    float a[STEP][TILE + 4], b[STEP][TILE];
};

typedef float tile_sums[EACH][EACH];

/* A thread's elements of the next terms, on their way to shared memory. */
struct next_terms {
    float a[EACH], b[EACH];
};

static __device__ __forceinline__ int first_row() {
    return (int)threadIdx.x / ACROSS * EACH;
}

static __device__ __forceinline__ int first_col() {
    return (int)threadIdx.x % ACROSS * EACH;
}

static __device__ __forceinline__ void multiply(const tile_pair &t, tile_sums &sum) {
    const int i = first_row(), c = first_col();
#pragma unroll
    for (int r = 0; r < STEP; r++) {
        const float4 a = *reinterpret_cast<const float4 *>(&t.a[r][i]);
        const float4 b = *reinterpret_cast<const float4 *>(&t.b[r][c]);
        const float left[EACH] = {a.x, a.y, a.z, a.w}, right[EACH] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int y = 0; y < EACH; y++) {
#pragma unroll
            for (int x = 0; x < EACH; x++) sum[y][x] = fmaf(left[y], right[x], sum[y][x]);
        }
    }
}

/* Adds terms [first, end) to sum. load(next, at) brings a thread's elements of terms at, at + 1, ...,
 * put(pair, next) lays them down. All threads. */
template <typename LOAD, typename PUT>
static __device__ __forceinline__ void add_terms(tile_sums &sum, int32_t first, int32_t end,
                                                 const LOAD &load, const PUT &put) {
    __shared__ __align__(16) tile_pair t[2];
    next_terms next;
    load(&next, first);
    __syncthreads(); /* the terms of a sum before are done with */
    for (int32_t at = first, k = 0; at < end; at += STEP, k ^= 1) {
        put(&t[k], next);
        __syncthreads(); /* the other pair was read before the barrier of the step before */
        if (at + STEP < end) load(&next, at + STEP);
        multiply(t[k], sum);
    }
}

/* ---- chunks of rows ---- */

/* Rows [first, end) of chunk `at`; first < 0: there are fewer. */
struct chunk_rows {
    int32_t first, end;
};

static __host__ __device__ __forceinline__ int32_t chunks_of(int32_t rows) {
    return (rows + CHUNK - 1) / CHUNK;
}

static __device__ chunk_rows find_chunk(const hd_seqs &s, int32_t at) {
    for (int32_t q = 0; q < s.n; q++) {
        const int32_t first = s.first_row[q], end = s.first_row[q + 1];
        const int32_t n = chunks_of(end - first);
        if (at < n) return {first + at * CHUNK, min(first + (at + 1) * CHUNK, end)};
        at -= n;
    }
    return {-1, -1};
}

/* The chunk behind r, of sequence *seq; at first r = {0, 0}. false: there is none. */
static __device__ bool next_chunk(chunk_rows *r, int32_t *seq, const hd_seqs &s) {
    while (*seq < s.n && r->end == s.first_row[*seq + 1]) ++*seq;
    if (*seq == s.n) return false;
    *r = {r->end, min(r->end + CHUNK, s.first_row[*seq + 1])};
    return true;
}

static __device__ int32_t count_chunks(const hd_seqs &s) {
    int32_t n = 0;
    for (int32_t q = 0; q < s.n; q++) n += chunks_of(s.first_row[q + 1] - s.first_row[q]);
    return n;
}

/* ---- outer products ---- */

/* dw[i, c] += left[r, i] * right[row of r, c] */
struct outer {
    float *dw;
    const float *left, *right;
    int64_t left_row, right_row; /* elements between rows */
    const int32_t *assignment;   /* NULL: row of r is r */
    int32_t n_rows, cols, top_k;
};

/* A thread's elements: columns of its own of both factors, of rows THREADS / TILE apart. */
struct outer_loader {
    const outer &o;
    int32_t i, c, end; /* its column of left and of right */

    __device__ __forceinline__ void operator()(next_terms *l, int32_t at) const {
#pragma unroll
        for (int k = 0; k < EACH; k++) {
            const int32_t r = at + (k * THREADS + (int32_t)threadIdx.x) / TILE;
            const bool live = r < end;
            const int64_t row = live && o.assignment ? o.assignment[r] / o.top_k : r;
            l->a[k] = live && i < o.n_rows ? o.left[r * o.left_row + i] : 0.0f;
            l->b[k] = live && c < o.cols ? o.right[row * o.right_row + c] : 0.0f;
        }
    }
};

struct outer_putter {
    __device__ __forceinline__ void operator()(tile_pair *t, const next_terms &l) const {
#pragma unroll
        for (int k = 0; k < EACH; k++) {
            const int at = k * THREADS + (int)threadIdx.x;
            t->a[at / TILE][at % TILE] = l.a[k];
            t->b[at / TILE][at % TILE] = l.b[k];
        }
    }
};

/* The block's tile. */
struct outer_tile {
    int32_t i0, c0;
};

static __device__ __forceinline__ outer_tile own_tile() {
    return {(int32_t)blockIdx.y * TILE, (int32_t)blockIdx.x * TILE};
}

/* sum += the outer products of rows [first, end) */
static __device__ __forceinline__ void add_outer(tile_sums &sum, const outer &o, int32_t first,
                                                 int32_t end) {
    const outer_tile t = own_tile();
    const int32_t at = (int32_t)threadIdx.x % TILE;
    if (first >= end) return;
    add_terms(sum, first, end, outer_loader{o, t.i0 + at, t.c0 + at, end}, outer_putter{});
}

/* Does what `move` says to every element of the tile in a matrix [n_rows, cols]. */
template <typename MOVE>
static __device__ __forceinline__ void for_elements(float *to, int32_t n_rows, int32_t cols,
                                                    MOVE move) {
    const outer_tile t = own_tile();
    const int32_t i = t.i0 + first_row(), c = t.c0 + first_col();
#pragma unroll
    for (int y = 0; y < EACH; y++) {
#pragma unroll
        for (int x = 0; x < EACH; x++) {
            if (i + y < n_rows && c + x < cols) {
                move(to[(int64_t)(i + y) * cols + c + x], y, x);
            }
        }
    }
}

static __device__ __forceinline__ void load_sums(tile_sums &sum, const outer &o) {
    for_elements(o.dw, o.n_rows, o.cols, [&](float &at, int y, int x) { sum[y][x] = at; });
}

static __device__ __forceinline__ void store_sums(const tile_sums &sum, float *to,
                                                  const outer &o) {
    for_elements(to, o.n_rows, o.cols, [&](float &at, int y, int x) { at = sum[y][x]; });
}

/* The sum of one chunk after another is added. rows(&r): the rows of the next chunk, false behind the last. */
template <typename ROWS>
static __device__ __forceinline__ void add_chunks(const outer &o, const ROWS &rows) {
    tile_sums all = {};
    chunk_rows r;
    load_sums(all, o);
    while (rows(&r)) {
        tile_sums sum = {};
        add_outer(sum, o, r.first, r.end);
#pragma unroll
        for (int y = 0; y < EACH; y++) {
#pragma unroll
            for (int x = 0; x < EACH; x++) all[y][x] += sum[y][x];
        }
    }
    store_sums(all, o.dw, o);
}

static __device__ __forceinline__ outer outer_of(const hd_weight_grad_args &a, int64_t head) {
    return {a.dw + (a.first_row + head * a.head_rows) * a.cols,
            floats(a.left) + head * a.left_head,
            floats(a.right) + head * a.right_head,
            stride_of(a.left, (int64_t)a.heads * a.left_head),
            stride_of(a.right, (int64_t)a.heads * a.right_head),
            nullptr,
            a.n_rows,
            a.cols,
            1};
}

/* Rows for each row of the batch (streams). */
static __device__ __forceinline__ int32_t rows_of_each(const hd_weight_grad_args &a) {
    return a.rows / a.seqs.first_row[a.seqs.n];
}

static __global__ void __launch_bounds__(THREADS) weight_grad(hd_weight_grad_args a) {
    const outer o = outer_of(a, blockIdx.z);
    if (a.seqs.n) {
        const int32_t each = rows_of_each(a);
        chunk_rows now = {0, 0};
        int32_t seq = 0;
        add_chunks(o, [&](chunk_rows *r) {
            if (!next_chunk(&now, &seq, a.seqs)) return false;
            *r = {now.first * each, now.end * each};
            return true;
        });
        return;
    }
    tile_sums sum = {};
    load_sums(sum, o);
    add_outer(sum, o, 0, a.rows);
    store_sums(sum, o.dw, o);
}

/* Chunk first + z / heads of head z % heads, alone, in parts [chunks, heads, n_rows, cols]. */
static __global__ void __launch_bounds__(THREADS)
    weight_grad_parts(hd_weight_grad_args a, int32_t first) {
    const int32_t head = (int32_t)blockIdx.z % a.heads;
    const chunk_rows r = find_chunk(a.seqs, first + (int32_t)blockIdx.z / a.heads);
    const int32_t each = rows_of_each(a);
    const outer o = outer_of(a, head);
    tile_sums sum = {};
    if (r.first < 0) return;
    add_outer(sum, o, r.first * each, r.end * each);
    store_sums(sum, a.parts + (int64_t)blockIdx.z * a.n_rows * a.cols, o);
}

/* dw += parts [n chunks], in order; a thread per element of all heads. */
static __global__ void __launch_bounds__(BLOCK)
    add_parts(hd_weight_grad_args a, int32_t first, int32_t n) {
    const int64_t each = (int64_t)a.n_rows * a.cols, all = each * a.heads;
    const int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x;
    if (i >= all) return;
    float *to = a.dw + (a.first_row + i / each * a.head_rows) * a.cols + i % each;
    const int32_t chunks = min(n, count_chunks(a.seqs) - first);
    float sum = *to;
#pragma unroll 8
    for (int32_t k = 0; k < chunks; k++) sum += a.parts[k * all + i];
    *to = sum;
}

static void weight_grad_by_parts(cudaStream_t queue, const hd_weight_grad_args *a,
                                 int32_t chunks) {
    const int64_t all = (int64_t)a->n_rows * a->cols * a->heads;
    const int32_t most = (int32_t)(a->n_parts / all);
    for (int32_t first = 0; first < chunks; first += most) {
        const int32_t n = chunks - first < most ? chunks - first : most;
        const dim3 grid(blocks_for(a->cols, TILE), blocks_for(a->n_rows, TILE),
                        (unsigned)(n * a->heads));
        weight_grad_parts<<<grid, THREADS, 0, queue>>>(*a, first);
        add_parts<<<blocks_for(all, BLOCK), BLOCK, 0, queue>>>(*a, first, n);
    }
}

void hd_weight_grad_cuda(hd_stream *s, const hd_weight_grad_args *a) {
    cudaStream_t queue = hd_cuda_stream(s);
    if (a->rows == 0) return;
    const dim3 grid(blocks_for(a->cols, TILE), blocks_for(a->n_rows, TILE), (unsigned)a->heads);
    const int32_t chunks = chunks_of(a->rows) + a->seqs.n; /* at most */
    const int64_t all = (int64_t)a->n_rows * a->cols * a->heads;
    if (a->seqs.n > 1 && grid.x * grid.y * grid.z < FEW_TILES && a->n_parts >= all) {
        weight_grad_by_parts(queue, a, chunks);
    } else {
        weight_grad<<<grid, THREADS, 0, queue>>>(*a);
    }
    hd_cuda_check(s, "weight_grad");
}

/* ---- experts ---- */

/* The first place of [first, first + n) whose row is `row` or later; a warp's work. */
static __device__ int32_t place_from(const hd_grouped_weight_grad_args &a, int32_t first,
                                     int32_t n, int32_t row) {
    while (n > 0) {
        const int32_t step = (n + WARP - 1) / WARP;
        const int32_t at = first + ((int32_t)threadIdx.x % WARP + 1) * step - 1;
        const bool before = at < first + n && a.choice[at] / a.top_k < row;
        const int32_t whole = __popc(__ballot_sync(ALL_LANES, before)) * step;
        first += whole;
        n = min(step - 1, n - whole);
    }
    return first;
}

static __global__ void __launch_bounds__(THREADS)
    grouped_weight_grad(hd_grouped_weight_grad_args a) {
    const int64_t slot = blockIdx.z;
    const int32_t begin = a.offset[slot], end = a.offset[slot + 1];
    const outer o = {a.dw + slot * a.n_rows * a.cols,
                     floats(a.g),
                     floats(a.x),
                     a.n_rows,
                     a.cols,
                     a.assignment,
                     a.n_rows,
                     a.cols,
                     a.top_k};
    if (begin == end) return;
    if (a.seqs.n) {
        chunk_rows now = {0, 0};
        int32_t seq = 0, from = begin;
        add_chunks(o, [&](chunk_rows *r) {
            if (from == end || !next_chunk(&now, &seq, a.seqs)) return false;
            r->first = from; /* a row has a place at most */
            from = place_from(a, from, min(end - from, now.end - now.first), now.end);
            r->end = from;
            return true;
        });
        return;
    }
    tile_sums sum = {};
    load_sums(sum, o);
    add_outer(sum, o, begin, end);
    store_sums(sum, o.dw, o);
}

void hd_grouped_weight_grad_cuda(hd_stream *s, const hd_grouped_weight_grad_args *a) {
    const dim3 grid(blocks_for(a->cols, TILE), blocks_for(a->n_rows, TILE),
                    (unsigned)a->n_slots);
    grouped_weight_grad<<<grid, THREADS, 0, hd_cuda_stream(s)>>>(*a);
    hd_cuda_check(s, "grouped_weight_grad");
}

/* ---- products with transposed matrices ---- */

/* A stored matrix; fits: it may be read in quads of columns. */
struct stored {
    weight_shape s;
    bool fits;
};

static stored stored_of(const hd_weight *w) {
    const bool packed = w->type == HD_E2M1;
    return {shape_of(w), weight_fits(w) && (w->type == HD_E4M3 || w->type == HD_BF16 ||
                                            w->type == HD_F32 || packed)};
}

/* Columns col .. col + 3 of a row, dequantized. */
static __device__ __forceinline__ float4 read_quad(const weight_shape &s,
                                                   const weight_arrays &a, int32_t row,
                                                   int32_t col) {
    const int64_t at = (int64_t)row * s.cols + col;
    float4 v;
    if (s.type == HD_F32) {
        v = __ldg(reinterpret_cast<const float4 *>(a.data + 4 * at));
    } else if (s.type == HD_BF16) {
        const uint2 raw = __ldg(reinterpret_cast<const uint2 *>(a.data + 2 * at));
        v = make_float4(__uint_as_float(raw.x << 16), __uint_as_float(raw.x & 0xffff0000u),
                        __uint_as_float(raw.y << 16), __uint_as_float(raw.y & 0xffff0000u));
    } else if (s.type == HD_E4M3) {
        const uint32_t raw = __ldg(reinterpret_cast<const uint32_t *>(a.data + at));
        v = make_float4(e4m3_to_f32((uint8_t)raw), e4m3_to_f32((uint8_t)(raw >> 8)),
                        e4m3_to_f32((uint8_t)(raw >> 16)), e4m3_to_f32((uint8_t)(raw >> 24)));
    } else {
        const uint32_t raw = __ldg(reinterpret_cast<const uint16_t *>(a.data + at / 2));
        v = make_float4(e2m1_to_f32(raw & 15), e2m1_to_f32(raw >> 4 & 15),
                        e2m1_to_f32(raw >> 8 & 15), e2m1_to_f32(raw >> 12));
    }
    const float f = group_scale(s, a, row, col) * a.global;
    return make_float4(v.x * f, v.y * f, v.z * f, v.w * f);
}

/* out[m, c] = the sum over i of g[m, i] W[first_row + i, c], for rows [m0, end) of g. */
struct back_product {
    const float *g;
    float *out;
    int64_t g_row, out_row;
    int32_t end, n_rows, first_row; /* of g; of W */
    bool quads;                     /* g may be read in quads of terms */
    stored w;
    weight_arrays a;
    const hd_weight *any; /* W, for elements one by one */
};

/* A thread's elements: EACH terms of one row of g, and EACH columns of one row of W. */
struct product_loader {
    const back_product &p;
    int32_t m, k, i, c; /* its row of g and first term there; its row of W and first column */

    __device__ __forceinline__ void operator()(next_terms *l, int32_t at) const {
        const int32_t row = at + i;
        const float *g = p.g + m * p.g_row + at + k;
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f), f = v;
        if (p.quads && m < p.end && at + k < p.n_rows) {
            f = __ldg(reinterpret_cast<const float4 *>(g));
        }
        l->a[0] = f.x;
        l->a[1] = f.y;
        l->a[2] = f.z;
        l->a[3] = f.w;
#pragma unroll
        for (int e = 0; e < EACH && !p.quads; e++) {
            l->a[e] = m < p.end && at + k + e < p.n_rows ? g[e] : 0.0f;
        }
        if (p.w.fits && row < p.n_rows && c < p.w.s.cols) {
            v = read_quad(p.w.s, p.a, p.first_row + row, c);
        }
        l->b[0] = v.x;
        l->b[1] = v.y;
        l->b[2] = v.z;
        l->b[3] = v.w;
        if (p.w.fits) return;
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const bool live = row < p.n_rows && c + e < p.w.s.cols;
            l->b[e] = live ? weight_at(*p.any, p.first_row + row, c + e) : 0.0f;
        }
    }
};

struct product_putter {
    int m, k, i, c;

    __device__ __forceinline__ void operator()(tile_pair *t, const next_terms &l) const {
#pragma unroll
        for (int e = 0; e < EACH; e++) t->a[k + e][m] = l.a[e];
        *reinterpret_cast<float4 *>(&t->b[i][c]) = make_float4(l.b[0], l.b[1], l.b[2], l.b[3]);
    }
};

/* The tile of rows from m0 and columns from c0 on. */
static __device__ void product_tile(const back_product &p, int32_t m0, int32_t c0) {
    const int m = (int)threadIdx.x * EACH / STEP, k = (int)threadIdx.x * EACH % STEP;
    const int i = (int)threadIdx.x / ACROSS, c = (int)threadIdx.x % ACROSS * EACH;
    tile_sums sum = {};
    add_terms(sum, 0, p.n_rows, product_loader{p, m0 + m, k, i, c0 + c},
              product_putter{m, k, i, c});
#pragma unroll
    for (int y = 0; y < EACH; y++) {
#pragma unroll
        for (int x = 0; x < EACH; x++) {
            const int32_t row = m0 + first_row() + y, col = c0 + first_col() + x;
            if (row < p.end && col < p.w.s.cols) p.out[row * p.out_row + col] = sum[y][x];
        }
    }
}

static __host__ __device__ __forceinline__ bool in_quads(const float *x, int64_t row,
                                                         int32_t width) {
    return reinterpret_cast<uintptr_t>(x) % 16 == 0 && row % EACH == 0 && width % EACH == 0;
}

static __global__ void __launch_bounds__(THREADS)
    linear_back(hd_linear_heads_args a, stored w, weight_arrays arrays, hd_weight any) {
    const int64_t head = blockIdx.z, g_row = stride_of(a.x, (int64_t)a.heads * a.x_head);
    const float *g = floats(a.x) + head * a.x_head;
    const back_product p = {g,
                            static_cast<float *>(a.out.data) + head * a.out_head,
                            g_row,
                            stride_of(a.out, (int64_t)a.heads * a.out_head),
                            a.rows,
                            a.n_rows,
                            a.first_row + (int32_t)head * a.head_rows,
                            in_quads(g, g_row, a.n_rows),
                            w,
                            arrays,
                            &any};
    product_tile(p, (int32_t)blockIdx.y * TILE, (int32_t)blockIdx.x * TILE);
}

void hd_linear_back_cuda(hd_stream *s, const hd_linear_heads_args *a) {
    if (a->rows == 0) return;
    const dim3 grid(blocks_for(a->w->cols, TILE), blocks_for(a->rows, TILE),
                    (unsigned)a->heads);
    linear_back<<<grid, THREADS, 0, hd_cuda_stream(s)>>>(*a, stored_of(a->w), arrays_of(a->w),
                                                         *a->w);
    hd_cuda_check(s, "linear_back");
}

static __global__ void __launch_bounds__(THREADS)
    grouped_gemm_back(hd_grouped_gemm_back_args a, const hd_weight *slots, stored w) {
    const hd_weight &slot = slots[blockIdx.y];
    const int32_t end = a.offset[blockIdx.y + 1], step = (int32_t)gridDim.z * TILE;
    const back_product p = {floats(a.g), a.dx,
                            w.s.rows,    w.s.cols,
                            end,         w.s.rows,
                            0,           in_quads(floats(a.g), w.s.rows, w.s.rows),
                            w,           arrays_of(&slot),
                            &slot};
    for (int32_t m = a.offset[blockIdx.y] + (int32_t)blockIdx.z * TILE; m < end; m += step) {
        product_tile(p, m, (int32_t)blockIdx.x * TILE);
    }
}

void hd_grouped_gemm_back_cuda(hd_stream *s, const hd_grouped_gemm_back_args *a) {
    constexpr unsigned MOST_TILES = 64; /* of places, side by side */
    if (a->n_places == 0) return;
    const unsigned tiles = blocks_for(a->n_places, TILE);
    const dim3 grid(blocks_for(a->w->shape.cols, TILE), (unsigned)a->w->n,
                    tiles < MOST_TILES ? tiles : MOST_TILES);
    stored w = stored_of(&a->w->shape);
    w.fits = w.fits && a->w->one_format;
    grouped_gemm_back<<<grid, THREADS, 0, hd_cuda_stream(s)>>>(*a, a->w->slots, w);
    hd_cuda_check(s, "grouped_gemm_back");
}
