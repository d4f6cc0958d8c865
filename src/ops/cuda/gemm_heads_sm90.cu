/* gemm_heads_sm90.cu - many rows times a small FP8 matrix of each head, on Hopper: MLA's absorbed keys,
 * which are transposed, and its values.
 *
 * A block keeps a head's matrix in shared memory, dequantized to bfloat16, as the second operand of wgmma.
 * Rows of x are the first one: they are read once, from memory to registers, and rounded there. Columns have
 * the order of mma_internal.cuh and gemm_transposed_internal.cuh, so sums have the bits of those products. */
#include "ops/cuda/gemm_bf16_internal.cuh"
#include "ops/cuda/wgmma_internal.cuh"

namespace {

constexpr int GROUPS = 2, THREADS = GROUPS * WARPGROUP,
              TILE = 64;  /* rows of x of a warpgroup */
constexpr int WIDE = 128; /* outputs of an instruction */
constexpr int DEPTH = 128,
              BOX = DEPTH * 128;      /* transposed: rows of a matrix; bytes of 64 columns */
constexpr int MAX_SPANS = MMA_SLICES; /* values: of a row, each a slice of its own */
constexpr size_t MATRIX_BYTES = DEPTH * 512 * 2; /* in bfloat16, at most */

struct heads_shape {
    heads_job h;
    weight_shape s;
    weight_arrays a;
    int32_t rows_of_block;
};

/* The scale of a span of the block's matrix; it is one for 128 rows and columns. */
__device__ __forceinline__ float scale_at(const heads_shape &j, int32_t row, int32_t col) {
    const int32_t first = j.h.first_row + (int32_t)blockIdx.x * j.h.head_rows;
    return group_scale(j.s, j.a, first + row, col);
}

/* The rest of the sector is read right after. */
__device__ __forceinline__ float4 load_kept(const float *p) {
    float4 x;
    asm volatile("ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "l"(p));
    return x;
}

__device__ __forceinline__ void store_word(uint32_t at, uint32_t word) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(word) : "memory");
}

__device__ __forceinline__ void store_chunk(uint32_t at, uint4 v) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.x), "r"(v.y),
                 "r"(v.z), "r"(v.w)
                 : "memory");
}

/* Sixteen codes of a stored row. */
__device__ __forceinline__ lane_raw<READ_E4M3> read_codes(const heads_shape &j, int32_t row,
                                                          int32_t col) {
    const int64_t first = j.h.first_row + (int64_t)blockIdx.x * j.h.head_rows;
    lane_raw<READ_E4M3> raw;
    raw.quad[0] =
        __ldg(reinterpret_cast<const uint4 *>(j.a.data + (first + row) * j.s.cols + col));
    return raw;
}

/* Rows of W as boxes of 64 columns, [spans] of [128, 128 bytes]. */
__device__ void dequantize_rows(uint32_t to, const heads_shape &j) {
    const int quarter = threadIdx.x % 4, spans = j.s.cols / SPAN;
#pragma unroll 4
    for (int i = threadIdx.x / 4; i < WIDE * spans; i += THREADS / 4) {
        const int row = i % WIDE, span = i / WIDE;
        const lane_raw<READ_E4M3> raw = read_codes(j, row, span * SPAN + 16 * quarter);
        const uint32_t box = to + (uint32_t)(span * WIDE * 128 + 4 * quarter);
#pragma unroll
        for (int step = 0; step < 4; step++) {
            uint32_t low, high;
            pairs_of<READ_E4M3>(&low, &high, raw, step);
            store_word(box + box_at(row, 2 * step), low);
            store_word(box + box_at(row, 2 * step + 1), high);
        }
    }
}

/* Rows of W, which are the inner dimension, as boxes of 64 columns side by side. Of sixteen rows those that
 * a lane has of x are apart, as gemm_transposed_internal.cuh has them. */
__device__ void dequantize_columns(uint32_t to, const heads_shape &j) {
    const int piece = threadIdx.x % 4;
#pragma unroll 4
    for (int i = threadIdx.x / 4; i < DEPTH * (j.s.cols / BOX_COLS); i += THREADS / 4) {
        const int row = i % DEPTH, box = i / DEPTH, own = row % 4;
        const int at = row / 16 * 16 + own / 2 * 8 + row % 16 / 4 * 2 + own % 2;
        const lane_raw<READ_E4M3> raw = read_codes(j, row, box * BOX_COLS + 16 * piece);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint4 v;
            pairs_of<READ_E4M3>(&v.x, &v.y, raw, 2 * half);
            pairs_of<READ_E4M3>(&v.z, &v.w, raw, 2 * half + 1);
            store_chunk(to + (uint32_t)(box * BOX) + box_at(at, 2 * piece + half), v);
        }
    }
}

/* Rows r and r + 8 of x, of a thread. */
struct two_rows {
    const cuda_act *x[2];
    cuda_act *out[2]; /* NULL: there is no such row */

    __device__ two_rows(const heads_shape &j, int32_t tile) {
        const int32_t head = (int32_t)blockIdx.x,
                      end = min(j.h.rows, first_row(j) + j.rows_of_block);
        const int r = (int)threadIdx.x % WARPGROUP / WARP * 16 + (int)threadIdx.x % WARP / 4;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int32_t row = tile + r + 8 * i, there = min(row, j.h.rows - 1);
            x[i] = j.h.x + there * j.h.x_stride + head * j.h.x_head;
            out[i] = row < end ? static_cast<cuda_act *>(j.h.out) + row * j.h.out_stride +
                                     head * j.h.out_head
                               : nullptr;
        }
    }

    static __device__ int32_t first_row(const heads_shape &j) {
        return (int32_t)blockIdx.y * j.rows_of_block;
    }

    /* Registers of a step's first operand. */
    static __device__ __forceinline__ void narrow_step(uint32_t (&a)[4], float4 low,
                                                       float4 high) {
        a[0] = bf16_pair(low.x, low.y);
        a[1] = bf16_pair(high.x, high.y);
        a[2] = bf16_pair(low.z, low.w);
        a[3] = bf16_pair(high.z, high.w);
    }

    __device__ __forceinline__ void write(int32_t col, const float (&sum)[WIDE / 2],
                                          float global) const {
        const int lane = (int)threadIdx.x % WARP;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (!out[half]) continue;
            float2 *to = reinterpret_cast<float2 *>(out[half] + col + 2 * (lane % 4));
#pragma unroll
            for (int g = 0; g < WIDE / 8; g++) {
                to[4 * g] = {sum[4 * g + 2 * half] * global,
                             sum[4 * g + 2 * half + 1] * global};
            }
        }
    }
};

/* out[r, o] = sum over c of x[r, c] W[o, c]: 128 outputs of a head. */
__global__ void __launch_bounds__(THREADS, 1)
    values_of_heads(const __grid_constant__ heads_shape j) {
    extern __shared__ __align__(1024) uint8_t shared[];
    griddepcontrol_launch_dependents();
    const int quarter = (int)threadIdx.x % 4;
    const int32_t spans = j.s.cols / SPAN, first = two_rows::first_row(j);
    const int32_t end = min(j.h.rows, first + j.rows_of_block);
    const uint32_t matrix = shared_address(shared);
    __shared__ float scale[MAX_SPANS];
    dequantize_rows(matrix, j);
    if ((int)threadIdx.x < spans)
        scale[threadIdx.x] = scale_at(j, 0, (int32_t)threadIdx.x * SPAN);
    fence_proxy_async();
    __syncthreads();
    griddepcontrol_wait();
    const uint64_t w = box_descriptor(matrix);
    for (int32_t tile = first + (int32_t)threadIdx.x / WARPGROUP * TILE; tile < end;
         tile += GROUPS * TILE) {
        const two_rows own(j, tile);
        float total[WIDE / 2] = {};
        float4 x[2][4];
        const auto load = [&](int32_t span) {
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const int32_t col = span * SPAN + 16 * quarter + i % 4 * 4;
                x[i / 4][i % 4] = load_kept(own.x[i / 4] + col);
            }
        };
        load(0);
#pragma unroll 1
        for (int32_t span = 0; span < spans; span++) {
            uint32_t a[4][4];
            float d[WIDE / 2];
#pragma unroll
            for (int step = 0; step < 4; step++) {
                two_rows::narrow_step(a[step], x[0][step], x[1][step]);
            }
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < 4; step++) {
                wgmma_m64n128k16(d, a[step],
                                 w + (uint64_t)(span * (WIDE * 128 >> 4) + 2 * step), step > 0);
            }
            wgmma_commit_group();
            if (span + 1 < spans) load(span + 1);
            wgmma_wait_group<0>();
            const float own_scale = scale[span];
#pragma unroll
            for (int i = 0; i < WIDE / 2; i++) total[i] += fmaf(d[i], own_scale, 0.0f);
        }
        own.write(0, total, j.a.global);
    }
}

/* out[r, c] = sum over i of x[r, i] W[i, c]: 128 rows of W for a head. */
__global__ void __launch_bounds__(THREADS, 1)
    absorb_heads(const __grid_constant__ heads_shape j) {
    constexpr int SPANS = DEPTH / SPAN, STEPS = SPAN / 16;
    extern __shared__ __align__(1024) uint8_t shared[];
    griddepcontrol_launch_dependents();
    const int quarter = (int)threadIdx.x % 4;
    const int32_t first = two_rows::first_row(j), end = min(j.h.rows, first + j.rows_of_block);
    const uint32_t matrix = shared_address(shared);
    dequantize_columns(matrix, j);
    fence_proxy_async();
    __syncthreads();
    griddepcontrol_wait();
    for (int32_t tile = first + (int32_t)threadIdx.x / WARPGROUP * TILE; tile < end;
         tile += GROUPS * TILE) {
        const two_rows own(j, tile);
        uint32_t a[SPANS * STEPS][4];
#pragma unroll
        for (int step = 0; step < SPANS * STEPS; step++) {
            float4 x[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const cuda_act *from = own.x[i] + 16 * step + 4 * quarter;
                x[i] = load_four(reinterpret_cast<const float4 *>(from));
            }
            two_rows::narrow_step(a[step], x[0], x[1]);
        }
#pragma unroll 1
        for (int32_t col = 0; col < j.s.cols; col += WIDE) {
            float d[SPANS][WIDE / 2] = {};
            const uint64_t w =
                transposed_descriptor(matrix + (uint32_t)(col / BOX_COLS * BOX), BOX);
            const float scale[SPANS] = {scale_at(j, 0, col), scale_at(j, SPAN, col)};
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
#pragma unroll
                for (int span = 0; span < SPANS; span++) { /* none waits for the one before */
                    const int at = span * STEPS + step;
                    wgmma_m64n128k16_transposed(d[span], a[at], w + (uint64_t)(128 * at));
                }
            }
            wgmma_commit_group();
            wgmma_wait_group<0>();
            float sum[WIDE / 2];
#pragma unroll
            for (int i = 0; i < WIDE / 2; i++) {
                sum[i] = fmaf(d[1][i], scale[1], fmaf(d[0][i], scale[0], 0.0f));
            }
            own.write(col, sum, j.a.global);
        }
    }
}

/* Whether 128 rows and columns of a head share a scale. */
bool has_wide_scales(const heads_job &h, const hd_weight *w) {
    if (!w->scale) return true;
    return w->block_rows % WIDE == 0 && w->block_cols % WIDE == 0 && h.first_row % WIDE == 0 &&
           h.head_rows % WIDE == 0;
}

bool writes_in_pairs(const heads_job &h) {
    return !h.out_f32 && (uintptr_t)h.out % 8 == 0 && h.out_stride % 2 == 0 &&
           h.out_head % 2 == 0;
}

void launch_heads(hd_stream *s, void (*kernel)(heads_shape), const heads_job &h,
                  const hd_weight *w, size_t bytes) {
    constexpr int STRIPE = GROUPS * TILE;
    const int32_t most = hd_stream_workers(s) / h.heads;
    const int32_t stripes = (int32_t)blocks_for(h.rows, STRIPE);
    const int32_t each = (int32_t)blocks_for(stripes, most < 1 ? 1 : most) * STRIPE;
    const heads_shape j = {h, shape_of(w), arrays_of(w), each};
    hd_cuda_allow_shared((const void *)kernel, MATRIX_BYTES);
    launch_kernel(hd_cuda_stream(s), kernel, dim3((unsigned)h.heads, blocks_for(h.rows, each)),
                  THREADS, bytes, 1, j);
}

} // namespace

bool multiply_values(hd_stream *s, const heads_job &h, const hd_weight *w) {
    const size_t bytes = (size_t)WIDE * (size_t)w->cols * 2;
    if (!hd_cuda_is_sm90() || h.rows < TILE || h.n_rows != WIDE || h.heads < 2 ||
        w->cols / SPAN > MAX_SPANS || bytes > MATRIX_BYTES || !has_wide_scales(h, w) ||
        !writes_in_pairs(h) || reading_of(w, x_fits(h.x, h.x_stride, h.x_head)) != READ_E4M3) {
        return false;
    }
    launch_heads(s, values_of_heads, h, w, bytes);
    return true;
}

bool multiply_absorbed(hd_stream *s, const heads_job &h, const hd_weight *w) {
    const size_t bytes = (size_t)DEPTH * (size_t)w->cols * 2;
    if (!hd_cuda_is_sm90() || h.rows < TILE || h.n_rows != DEPTH || w->cols % WIDE ||
        bytes > MATRIX_BYTES || !has_wide_scales(h, w) || !writes_in_pairs(h) ||
        reading_of(w, x_fits(h.x, h.x_stride, h.x_head)) != READ_E4M3) {
        return false;
    }
    launch_heads(s, absorb_heads, h, w, bytes);
    return true;
}
