/* gemm_back_cuda.cu - products with transposed matrices: input gradients of GEMMs. A block has a tile of the
 * result; the stored matrix is dequantized on its way into shared memory. Of most formats its elements are
 * whole in TF32, so that a product takes two of the tensor cores', not three. */
#include "ops/backward/tile_products_internal.cuh"
#include "ops/cuda/weight_internal.cuh"

/* How a stored matrix is read: one by one; in quads of columns; or in quads that are whole in TF32, without
 * what `scale_after` multiplies later. */
enum stored_kind { ANY, QUADS, WHOLE_BF16, WHOLE_E4M3, WHOLE_E2M1 };

template <stored_kind K>
constexpr bool IS_WHOLE = K >= WHOLE_BF16;

/* first_row, head_rows: what the rows of a product's terms are multiples of, from 0 on. */
static stored_kind kind_of(const hd_weight *w, int32_t first_row, int32_t head_rows) {
    if (!weight_fits(w)) return ANY;
    const bool blocks = !w->scale || (w->block_cols % TILE == 0 && w->block_rows % STEP == 0 &&
                                      first_row % STEP == 0 && head_rows % STEP == 0);
    switch (w->type) {
    case HD_F32:
        return QUADS;
    case HD_BF16:
        return w->scale ? QUADS : WHOLE_BF16;
    case HD_E4M3:
        return blocks ? WHOLE_E4M3 : QUADS;
    case HD_E2M1:
        return w->scale_type == HD_E8M0 || w->scale_type == HD_E4M3 ? WHOLE_E2M1 : QUADS;
    default:
        return ANY;
    }
}

static __device__ __forceinline__ float4 scaled(float4 v, float f) {
    return make_float4(v.x * f, v.y * f, v.z * f, v.w * f);
}

/* ---- four columns of a row, as they are stored ---- */

template <stored_kind K>
struct stored_quad { /* ANY, QUADS: dequantized */
    float4 at;
};

template <>
struct stored_quad<WHOLE_BF16> {
    uint2 at;
};

template <>
struct stored_quad<WHOLE_E4M3> {
    uint32_t at;
};

template <>
struct stored_quad<WHOLE_E2M1> {
    uint32_t at;
    float scale;
};

static __device__ __forceinline__ float4 widened(uint2 x) {
    return make_float4(__uint_as_float(x.x << 16), __uint_as_float(x.x & 0xffff0000u),
                       __uint_as_float(x.y << 16), __uint_as_float(x.y & 0xffff0000u));
}

static __device__ __forceinline__ float4 widened_e4m3(uint32_t x) {
    const float2 low =
        __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)x, __NV_E4M3)));
    const float2 high = __half22float2(
        __half2(__nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)(x >> 16), __NV_E4M3)));
    return make_float4(low.x, low.y, high.x, high.y);
}

static __device__ __forceinline__ float4 widened_e2m1(uint32_t x) {
    return make_float4(e2m1_to_f32(x & 15), e2m1_to_f32(x >> 4 & 15), e2m1_to_f32(x >> 8 & 15),
                       e2m1_to_f32(x >> 12));
}

static __device__ float4 read_quad(const weight_shape &s, const weight_arrays &a, int32_t row,
                                   int32_t col) {
    const int64_t at = (int64_t)row * s.cols + col;
    float4 v;
    if (s.type == HD_F32) {
        v = __ldg(reinterpret_cast<const float4 *>(a.data + 4 * at));
    } else if (s.type == HD_BF16) {
        v = widened(__ldg(reinterpret_cast<const uint2 *>(a.data + 2 * at)));
    } else if (s.type == HD_E4M3) {
        v = widened_e4m3(__ldg(reinterpret_cast<const uint32_t *>(a.data + at)));
    } else {
        v = widened_e2m1(__ldg(reinterpret_cast<const uint16_t *>(a.data + at / 2)));
    }
    return scaled(v, group_scale(s, a, row, col) * a.global);
}

/* Zero behind the last column. */
static __device__ __noinline__ float4 read_any(const hd_weight &w, int32_t row, int32_t col) {
    float v[QUAD];
    for (int e = 0; e < QUAD; e++) v[e] = col + e < w.cols ? weight_at(w, row, col + e) : 0.0f;
    return make_float4(v[0], v[1], v[2], v[3]);
}

/* ---- a tile ---- */

/* out[m, c] = the sum over i of g[m, i] W[first_row + i, c], for rows below `end` of g. */
struct back_product {
    const float *g;
    float *out;
    int64_t g_row, out_row;
    int32_t end, n_rows, first_row; /* of g; of W */
    bool quads;                     /* g may be read in quads of terms */
    weight_shape s;
    weight_arrays a;
    const hd_weight *any; /* W, for elements one by one */
};

template <stored_kind K>
static __device__ __forceinline__ stored_quad<K> load_quad(const back_product &p, int32_t row,
                                                           int32_t col) {
    const int64_t at = (int64_t)row * p.s.cols + col;
    if constexpr (K == ANY) {
        return {read_any(*p.any, row, col)};
    } else if constexpr (K == QUADS) {
        return {read_quad(p.s, p.a, row, col)};
    } else if constexpr (K == WHOLE_BF16) {
        return {__ldg(reinterpret_cast<const uint2 *>(p.a.data + 2 * at))};
    } else if constexpr (K == WHOLE_E4M3) {
        return {__ldg(reinterpret_cast<const uint32_t *>(p.a.data + at))};
    } else {
        return {__ldg(reinterpret_cast<const uint16_t *>(p.a.data + at / 2)),
                group_scale(p.s, p.a, row, col)};
    }
}

template <stored_kind K>
static __device__ __forceinline__ float4 dequantized(const stored_quad<K> &q) {
    if constexpr (K == WHOLE_BF16) {
        return widened(q.at);
    } else if constexpr (K == WHOLE_E4M3) {
        return widened_e4m3(q.at);
    } else if constexpr (K == WHOLE_E2M1) {
        return scaled(widened_e2m1(q.at), q.scale);
    } else {
        return q.at;
    }
}

/* What elements of rows [row, row + STEP) and the tile's columns do not contain. */
template <stored_kind K>
static __device__ __forceinline__ float scale_after(const back_product &p, int32_t row,
                                                    int32_t col) {
    if constexpr (K == WHOLE_E4M3) return group_scale(p.s, p.a, row, col) * p.a.global;
    return K == WHOLE_E2M1 ? p.a.global : 1.0f;
}

/* Terms are rows of W. */
template <stored_kind K>
struct product_fill {
    static constexpr int ACROSS = TILE / QUAD, DOWN = TILE_THREADS / ACROSS, N = STEP / DOWN;
    const back_product &p;
    int32_t m0, c0;
    stored_quad<K> w[N];

    /* EACH elements at once. */
    template <int EACH>
    __device__ __forceinline__ void copy_left(float *to, int32_t at) const {
        constexpr int OF_ROW = STEP / EACH, ROWS = TILE_THREADS / OF_ROW;
        const int k = (int)threadIdx.x % OF_ROW * EACH, first = (int)threadIdx.x / OF_ROW;
        const int32_t rows = at + k < p.n_rows ? p.end - m0 - first : 0;
        const float *from = p.g + (m0 + first) * p.g_row + at + k;
        to += first * ROW_PITCH + k;
#pragma unroll
        for (int i = 0; i < TILE / ROWS; i++) {
            copy_async<EACH * sizeof(float)>(to + ROWS * i * ROW_PITCH,
                                             from + ROWS * i * p.g_row, ROWS * i < rows);
        }
    }

    __device__ __forceinline__ void begin(tile_pair *t, int32_t at) {
        const int32_t c = c0 + (int32_t)threadIdx.x % ACROSS * QUAD;
        if (p.quads) {
            copy_left<QUAD>(t->left, at);
        } else {
            copy_left<1>(t->left, at);
        }
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int32_t row = at + (int32_t)threadIdx.x / ACROSS + DOWN * i;
            w[i] = {};
            if (row < p.n_rows && c < p.s.cols) w[i] = load_quad<K>(p, p.first_row + row, c);
        }
    }

    __device__ __forceinline__ void finish(tile_pair *t) const {
        const int c = (int)threadIdx.x % ACROSS * QUAD;
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int row = (int)threadIdx.x / ACROSS + DOWN * i;
            *reinterpret_cast<float4 *>(&t->right[row * TERM_PITCH + c]) = dequantized<K>(w[i]);
        }
    }

    __device__ __forceinline__ void add(tile_sums &sum, const tile_sums &part,
                                        int32_t at) const {
        const float scale = scale_after<K>(p, p.first_row + at, c0);
#pragma unroll
        for (int i = 0; i < 32; i++) {
            float &to = sum[i / 16][i / 4 % 4][i % 4];
            to = fmaf(part[i / 16][i / 4 % 4][i % 4], scale, to);
        }
    }
};

/* The tile of rows from m0 and columns from c0 on. */
template <stored_kind K>
static __device__ __forceinline__ void product_tile(const back_product &p, int32_t m0,
                                                    int32_t c0) {
    tile_sums sum = {};
    add_terms<true, IS_WHOLE<K>>(sum, 0, p.n_rows, product_fill<K>{p, m0, c0, {}});
    for_sums([&](int m, int c, int y, int x, int i) {
        const int32_t row = m0 + m, col = c0 + c;
        if (row < p.end && col < p.s.cols) p.out[row * p.out_row + col] = sum[y][x][i];
    });
}

/* ---- the operators ---- */

template <stored_kind K>
static __global__ void __launch_bounds__(TILE_THREADS, 3)
    linear_back(hd_linear_heads_args a, weight_shape s, weight_arrays arrays, hd_weight any) {
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
                            s,
                            arrays,
                            &any};
    product_tile<K>(p, (int32_t)blockIdx.y * TILE, (int32_t)blockIdx.x * TILE);
}

void hd_linear_back_cuda(hd_stream *s, const hd_linear_heads_args *a) {
    static void (*const kernels[])(hd_linear_heads_args, weight_shape, weight_arrays,
                                   hd_weight) = {
        linear_back<ANY>, linear_back<QUADS>, linear_back<WHOLE_BF16>, linear_back<WHOLE_E4M3>,
        linear_back<WHOLE_E2M1>};
    if (a->rows == 0) return;
    const dim3 grid(blocks_for(a->w->cols, TILE), blocks_for(a->rows, TILE),
                    (unsigned)a->heads);
    const stored_kind kind = kind_of(a->w, a->first_row, a->heads > 1 ? a->head_rows : 0);
    kernels[kind]<<<grid, TILE_THREADS, 0, hd_cuda_stream(s)>>>(*a, shape_of(a->w),
                                                                arrays_of(a->w), *a->w);
    hd_cuda_check(s, "linear_back");
}

template <stored_kind K>
static __global__ void __launch_bounds__(TILE_THREADS, 3)
    grouped_gemm_back(hd_grouped_gemm_back_args a, const hd_weight *slots, weight_shape s) {
    const hd_weight &slot = slots[blockIdx.y];
    const int32_t end = a.offset[blockIdx.y + 1], step = (int32_t)gridDim.z * TILE;
    const back_product p = {floats(a.g), a.dx,
                            s.rows,      s.cols,
                            end,         s.rows,
                            0,           in_quads(floats(a.g), s.rows, s.rows),
                            s,           arrays_of(&slot),
                            &slot};
    for (int32_t m = a.offset[blockIdx.y] + (int32_t)blockIdx.z * TILE; m < end; m += step) {
        product_tile<K>(p, m, (int32_t)blockIdx.x * TILE);
    }
}

void hd_grouped_gemm_back_cuda(hd_stream *s, const hd_grouped_gemm_back_args *a) {
    static void (*const kernels[])(hd_grouped_gemm_back_args, const hd_weight *,
                                   weight_shape) = {
        grouped_gemm_back<ANY>, grouped_gemm_back<QUADS>, grouped_gemm_back<WHOLE_BF16>,
        grouped_gemm_back<WHOLE_E4M3>, grouped_gemm_back<WHOLE_E2M1>};
    constexpr unsigned MOST_TILES = 64; /* of places, side by side */
    if (a->n_places == 0) return;
    const unsigned tiles = blocks_for(a->n_places, TILE);
    const dim3 grid(blocks_for(a->w->shape.cols, TILE), (unsigned)a->w->n,
                    tiles < MOST_TILES ? tiles : MOST_TILES);
    const stored_kind kind = a->w->one_format ? kind_of(&a->w->shape, 0, 0) : ANY;
    kernels[kind]<<<grid, TILE_THREADS, 0, hd_cuda_stream(s)>>>(*a, a->w->slots,
                                                                shape_of(&a->w->shape));
    hd_cuda_check(s, "grouped_gemm_back");
}
