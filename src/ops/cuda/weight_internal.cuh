/* weight_internal.cuh - elements of stored matrices on the device, dequantized.
 *
 * weight_at() reads any element of any matrix at any address. Where the format, the addresses
 * and the blocks are those of real checkpoints, reading_of() says how the products may read
 * whole stretches of a row. */
#ifndef HD_OPS_CUDA_WEIGHT_INTERNAL_CUH
#define HD_OPS_CUDA_WEIGHT_INTERNAL_CUH

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "ops/cuda/cuda_internal.cuh"

/* ---- any element ---- */

static __device__ __forceinline__ uint16_t half_bits_at(const uint8_t *p, int64_t i) {
    return (uint16_t)(p[2 * i] | p[2 * i + 1] << 8);
}

static __device__ __forceinline__ float f32_at(const uint8_t *p, int64_t i) {
    const uint32_t low = half_bits_at(p, 2 * i), high = half_bits_at(p, 2 * i + 1);
    return __uint_as_float(low | high << 16);
}

static __device__ __forceinline__ float bf16_at(const uint8_t *p, int64_t i) {
    return __uint_as_float((uint32_t)half_bits_at(p, i) << 16);
}

static __device__ __forceinline__ float e4m3_to_f32(uint8_t b) {
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(b, __NV_E4M3)));
}

static __device__ __forceinline__ float e8m0_to_f32(uint8_t b) {
    const uint32_t bits = b == 0 ? 0x00400000u : b == 255 ? 0x7fc00000u : (uint32_t)b << 23;
    return __uint_as_float(bits);
}

/* The code's exponent and mantissa are those of a float, but for the bias. */
static __device__ __forceinline__ float e2m1_to_f32(uint32_t nibble) {
    return __uint_as_float((nibble & 8) << 28 | (nibble & 7) << 22) * 0x1p126f;
}

static __device__ __forceinline__ float number_at(const uint8_t *p, int32_t type, int64_t i) {
    switch (type) {
    case HD_F32:
        return f32_at(p, i);
    case HD_F16:
        return __half2float(__ushort_as_half(half_bits_at(p, i)));
    case HD_BF16:
        return bf16_at(p, i);
    case HD_E4M3:
        return e4m3_to_f32(p[i]);
    case HD_E8M0:
        return e8m0_to_f32(p[i]);
    case HD_E2M1:
        return e2m1_to_f32(p[i / 2] >> (4 * (i & 1)));
    default:
        return CUDART_NAN_F;
    }
}

/* Of a matrix with scales, the global one included. */
static __device__ __forceinline__ float scale_at(const hd_weight &w, int32_t row, int32_t col) {
    const int64_t per_row = (w.cols + w.block_cols - 1) / w.block_cols;
    const int64_t i = row / w.block_rows * per_row + col / w.block_cols;
    return number_at(static_cast<const uint8_t *>(w.scale), w.scale_type, i) * w.global;
}

static __device__ __forceinline__ float weight_at(const hd_weight &w, int32_t row,
                                                  int32_t col) {
    const float x =
        number_at(static_cast<const uint8_t *>(w.data), w.type, (int64_t)row * w.cols + col);
    return w.scale ? x * scale_at(w, row, col) : x;
}

/* ---- segments of a row ---- */

constexpr int SEGMENT = 32, GROUP = 16, SPAN = 64; /* columns; a group shares a scale */

/* How a product reads a matrix: F32 in vectors, the others onto the tensor cores. MXE4M3 is E4M3
 * with several scales in a span. */
enum reading { READ_F32, READ_BF16, READ_E4M3, READ_MXE4M3, READ_E2M1, READ_ANY };

static inline bool is_power_of_two(int32_t n) {
    return n > 0 && (n & (n - 1)) == 0;
}

static inline bool weight_fits(const hd_weight *w) {
    const uintptr_t scale_bytes = w->scale_type == HD_F32    ? 4
                                  : w->scale_type == HD_BF16 ? 2
                                                             : 1;
    if (w->cols % SEGMENT || (uintptr_t)w->data % 16) return false;
    if (!w->scale) return true;
    return is_power_of_two(w->block_rows) && is_power_of_two(w->block_cols) &&
           w->block_cols >= GROUP && (uintptr_t)w->scale % scale_bytes == 0;
}

/* Whether a span of E4M3 has several scales. */
static inline bool has_small_blocks(const hd_weight *w) {
    return w->scale && w->block_cols % SPAN != 0;
}

/* Spans of the tensor cores: whole, and of one scale, or of scales exact in bfloat16. */
static inline bool mma_fits(const hd_weight *w) {
    const bool packed = w->type == HD_E2M1; /* a thread's columns are 16 bytes there too */
    if (!weight_fits(w) || w->cols % (packed ? 2 * SPAN : SPAN)) return false;
    if (!w->scale) return true;
    if (!packed && !has_small_blocks(w)) return true;
    if (!packed) return w->type == HD_E4M3 && w->scale_type == HD_E8M0;
    if (w->block_cols == GROUP && (uintptr_t)w->scale % 2) return false; /* two at a time */
    return w->scale_type == HD_E8M0 || w->scale_type == HD_E4M3;
}

/* x_fits: rows of x may be loaded 16 bytes at a time, which only F32 can do without. */
static inline reading reading_of(const hd_weight *w, bool x_fits) {
    if (w->type == HD_F32 ? !weight_fits(w) : !mma_fits(w) || !x_fits) return READ_ANY;
    switch (w->type) {
    case HD_F32:
        return READ_F32;
    case HD_BF16:
        return READ_BF16;
    case HD_E4M3:
        return has_small_blocks(w) ? READ_MXE4M3 : READ_E4M3;
    case HD_E2M1:
        return READ_E2M1;
    default:
        return READ_ANY;
    }
}

/* What a kernel needs of a matrix beside its arrays; one for all experts of a layer. */
struct weight_shape {
    int32_t type, scale_type;
    int32_t rows, cols, block_rows, block_cols;
    int32_t row_shift, col_shift; /* block_rows and block_cols as powers of two */
    int32_t scales_per_row;
};

struct weight_arrays {
    const uint8_t *data, *scale;
    float global;
};

static inline int32_t log2_of(int32_t n) {
    int32_t shift = 0;
    while (n >> (shift + 1)) shift++;
    return shift;
}

static inline weight_shape shape_of(const hd_weight *w) {
    weight_shape s = {};
    s.type = w->type;
    s.scale_type = w->scale_type;
    s.rows = w->rows;
    s.cols = w->cols;
    s.block_rows = w->block_rows;
    s.block_cols = w->block_cols;
    if (w->scale) {
        s.row_shift = log2_of(w->block_rows);
        s.col_shift = log2_of(w->block_cols);
        s.scales_per_row = (w->cols + w->block_cols - 1) / w->block_cols;
    }
    return s;
}

static __host__ __device__ inline weight_arrays arrays_of(const hd_weight *w) {
    return {static_cast<const uint8_t *>(w->data), static_cast<const uint8_t *>(w->scale),
            w->scale ? w->global : 1.0f};
}

/* GROUP columns of any matrix, zero beyond the row, and their scale; where a group may have
 * several, they are in the elements. So the values are those of a matrix that fits. */
static __device__ __forceinline__ void read_any_group(float *out, float *scale,
                                                      const weight_shape &s,
                                                      const weight_arrays &a, int32_t row,
                                                      int32_t col) {
    const bool even = !a.scale || s.block_cols % GROUP == 0;
    const int64_t scales = a.scale ? row / s.block_rows * (int64_t)s.scales_per_row : 0;
    for (int i = 0; i < GROUP; i++) {
        const int32_t c = col + i;
        out[i] = c < s.cols ? number_at(a.data, s.type, (int64_t)row * s.cols + c) : 0.0f;
        if (!even && c < s.cols) {
            out[i] *= number_at(a.scale, s.scale_type, scales + c / s.block_cols);
        }
    }
    *scale = even && a.scale && col < s.cols
                 ? number_at(a.scale, s.scale_type, scales + col / s.block_cols)
                 : 1.0f;
}

/* The scale of a group as it is stored, of a matrix that fits. Loads of several are on their way at once,
 * which they are not where each is decoded before the next one is asked for. */
static __device__ __forceinline__ uint32_t scale_code(const weight_shape &s,
                                                      const weight_arrays &a, int32_t row,
                                                      int32_t col) {
    if (!a.scale) return 0;
    const int64_t i = (int64_t)(row >> s.row_shift) * s.scales_per_row + (col >> s.col_shift);
    switch (s.scale_type) {
    case HD_F32:
        return __ldg(reinterpret_cast<const uint32_t *>(a.scale) + i);
    case HD_BF16:
        return __ldg(reinterpret_cast<const uint16_t *>(a.scale) + i);
    default:
        return __ldg(a.scale + i);
    }
}

static __device__ __forceinline__ float scale_of_code(const weight_shape &s,
                                                      const weight_arrays &a, uint32_t code) {
    if (!a.scale) return 1.0f;
    switch (s.scale_type) {
    case HD_F32:
        return __uint_as_float(code);
    case HD_BF16:
        return __uint_as_float(code << 16);
    case HD_E8M0:
        return e8m0_to_f32((uint8_t)code);
    default:
        return e4m3_to_f32((uint8_t)code);
    }
}

static __device__ __forceinline__ float group_scale(const weight_shape &s,
                                                    const weight_arrays &a, int32_t row,
                                                    int32_t col) {
    return scale_of_code(s, a, scale_code(s, a, row, col));
}

#endif
