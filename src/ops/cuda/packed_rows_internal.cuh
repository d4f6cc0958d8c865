/* packed_rows_internal.cuh - cached E4M3 as rows of split_fp16_internal.cuh: an entry is copied as it is
 * into the memory of its row, and converted there. */
#ifndef HD_OPS_CUDA_PACKED_ROWS_INTERNAL_CUH
#define HD_OPS_CUDA_PACKED_ROWS_INTERNAL_CUH

#include "ops/cuda/entries_internal.cuh"
#include "ops/cuda/unpack_internal.cuh"
#include "ops/cuda/split_fp16_internal.cuh"

/* Whether rows of `cols` columns have room for the entries of a pool, whatever its type. */
static inline bool packed_rows_fit(const hd_paged &p, int32_t cols) {
    return p.rows.type != HD_E4M3 || (p.width <= cols && (uintptr_t)p.rows.data % 4 == 0);
}

template <int BYTES>
static __device__ __forceinline__ void copy_bytes(uint32_t to, const uint8_t *from,
                                                  const void *valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to),
                 "l"(from ? from : valid), "n"(BYTES), "r"(from ? BYTES : 0));
}

/* An entry's bytes on their way into the beginning of a row: a warp's work. NULL: zeros. */
static __device__ __forceinline__ void load_packed_row(const half_rows &to, int row,
                                                       const uint8_t *entry, int32_t bytes,
                                                       const void *valid) {
    const uint32_t at = to.at + (uint32_t)(row * to.cols * 4);
    const int first = (int)threadIdx.x % WARP;
    if (((uintptr_t)entry | (uintptr_t)bytes) % 8 == 0) {
        for (int i = 8 * first; i < bytes; i += 8 * WARP) {
            copy_bytes<8>(at + (uint32_t)i, entry ? entry + i : nullptr, valid);
        }
    } else {
        for (int i = 4 * first; i < bytes; i += 4 * WARP) {
            copy_bytes<4>(at + (uint32_t)i, entry ? entry + i : nullptr, valid);
        }
    }
}

static __device__ __forceinline__ uint32_t get_byte(uint32_t at) {
    uint32_t x;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(x) : "r"(at));
    return x;
}

static __device__ __forceinline__ uint2 get_pair(uint32_t at) {
    uint2 v;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at));
    return v;
}

/* Column c of the entry at `row`, as bfloat16. */
static __device__ __forceinline__ uint32_t get_column(uint32_t row, const entry_layout &l,
                                                      int32_t c) {
    const uint32_t at = row + (uint32_t)(l.codes + 2 * (c - l.codes));
    if (c >= l.codes + l.plain) return 0;
    if (c >= l.codes) return get_byte(at) | get_byte(at + 1) << 8;
    const uint32_t scale = get_byte(row + (uint32_t)(l.scales + (c >> l.group_shift)));
    const uint2 x = unpack_four(get_byte(row + (uint32_t)c), first_factor(scale));
    return multiply_pair(x.x, second_factor(scale)) & 0xffff;
}

/* Columns 8 * unit and on, which may be of either kind. */
static __device__ __noinline__ uint4 get_mixed_unit(uint32_t row, entry_layout l, int unit) {
    uint32_t x[4];
#pragma unroll 1
    for (int32_t k = 0, c = 8 * unit; k < 4; k++, c += 2) {
        x[k] = get_column(row, l, c) | get_column(row, l, c + 1) << 16;
    }
    return make_uint4(x[0], x[1], x[2], x[3]);
}

/* Units first + lane, + WARP, ... of an entry, zeros behind the last; no branches, so that none waits for
 * another. */
template <int UNITS>
static __device__ __forceinline__ void get_packed_units(uint4 *to, uint32_t row,
                                                        const entry_layout &l) {
    uint2 low[UNITS], high[UNITS];
    uint32_t scale[UNITS];
    bool large = false;
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
        const int32_t first = 8 * ((int32_t)threadIdx.x % WARP + i * WARP);
        const bool code = first < l.codes, live = first < l.codes + l.plain;
        const uint32_t at = row + (uint32_t)(code ? first : live ? 2 * first - l.codes : 0);
        low[i] = get_pair(at);
        high[i] = get_pair(at + 8);
        scale[i] = get_byte(row + (uint32_t)(l.scales + (code ? first >> l.group_shift : 0)));
    }
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
        const int32_t first = 8 * ((int32_t)threadIdx.x % WARP + i * WARP);
        const bool code = first < l.codes, live = first < l.codes + l.plain;
        const uint4 x = unpack_eight(low[i].x, low[i].y, first_factor(scale[i]));
        large = large || (code && scale[i] > LARGEST_FIRST);
        to[i] = code   ? x
                : live ? make_uint4(low[i].x, low[i].y, high[i].x, high[i].y)
                       : uint4{};
    }
    if (!__any_sync(ALL_LANES, large)) return;
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
        const bool code = 8 * ((int32_t)threadIdx.x % WARP + i * WARP) < l.codes;
        to[i] = multiply_eight(to[i], code ? second_factor(scale[i]) : BF16_ONE);
    }
}

static __device__ __forceinline__ float2 floats_of(uint32_t x) {
    return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000));
}

/* convert_row() of a row that the warp itself loaded, of at most 8 * UNITS * WARP columns. */
template <int P, int UNITS>
static __device__ __forceinline__ int convert_packed_row(const half_rows &r, int row,
                                                         const entry_layout &l) {
    const uint32_t at = r.at + (uint32_t)(row * r.cols * 4);
    const int lane = threadIdx.x % WARP;
    uint4 packed[UNITS];
    if ((l.codes | l.plain) % 8 == 0) {
        get_packed_units<UNITS>(packed, at, l);
    } else {
#pragma unroll
        for (int i = 0; i < UNITS; i++) packed[i] = get_mixed_unit(at, l, lane + i * WARP);
    }
    __syncwarp(); /* all is read before it is written over */
    if (P != EXACT) {
#pragma unroll
        for (int i = 0; i < UNITS; i++) {
            const int unit = lane + i * WARP;
            if (unit < r.cols / 8) put_chunk(chunk_at(r, row, 2 * unit), packed[i]);
        }
        return NO_SHIFT;
    }
    float x[UNITS][8], top = 0.0f;
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
        const uint32_t pair[4] = {packed[i].x, packed[i].y, packed[i].z, packed[i].w};
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float2 v = floats_of(pair[k]);
            x[i][2 * k] = v.x;
            x[i][2 * k + 1] = v.y;
            top = fmaxf(top, fmaxf(fabsf(v.x), fabsf(v.y)));
        }
    }
    const int shift = shift_of(top);
    put_units<P, UNITS>(r, row, 0, x, power_of_two(254 - shift));
    return shift;
}

template <int P, int N, int UNITS>
static __device__ __forceinline__ void convert_packed_rows(const half_rows &r, int first,
                                                           const entry_layout &l, int *shift) {
#pragma unroll
    for (int i = 0; i < N; i++) shift[i] = convert_packed_row<P, UNITS>(r, first + i, l);
}

#endif
