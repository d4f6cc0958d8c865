/* entries_internal.cuh - numbers of a format (ops/group_format.h); where cached entries lie, and how they are
 * written: float32 and bfloat16, rounded to their format if they have one, and packed E4M3. */
#ifndef HD_OPS_CUDA_ENTRIES_INTERNAL_CUH
#define HD_OPS_CUDA_ENTRIES_INTERNAL_CUH

#include "base/round_codes.h"
#include "ops/cuda/cuda_internal.cuh"

/* ---- numbers of a format ---- */

/* The number of a format that is nearest to x, of a group that lies in neighboring lanes of a warp, all of
 * which are here; without a format x. The bits of a NaN are above those of every number. */
static __device__ __forceinline__ float in_group(const hd_group_format &f, float x) {
    if (!f.code) return x;
    uint32_t most = __float_as_uint(fabsf(x));
    for (int other = f.group / 2; other > 0; other /= 2) {
        most = max(most, __shfl_xor_sync(ALL_LANES, most, other));
    }
    return hd_group_number(f, x, hd_group_scale(f, __uint_as_float(most)));
}

/* Whether in_group() takes a format; if not, fails the stream. */
static inline bool rounds_groups(hd_stream *s, const hd_group_format &f) {
    if (!f.code || ((f.group == 16 || f.group == WARP) && f.plain == 0)) return true;
    hd_stream_fail(s, HD_EUNSUPPORTED, "numbers are rounded in groups of 16 or 32");
    return false;
}

/* ---- where ---- */

/* How the bytes of an entry of E4M3 are divided; groups are of 8, 16, ... or 128 columns. */
struct entry_layout {
    int32_t codes, plain; /* columns of either kind */
    int32_t group_shift;  /* columns of a scale, as a power of two */
    int32_t scales;       /* where they begin */
    int32_t bytes;        /* of an entry */
};

static __device__ __forceinline__ entry_layout layout_of(const hd_paged &p) {
    entry_layout l;
    l.codes = p.width - p.format.plain;
    l.plain = p.format.plain;
    l.group_shift = 31 - __clz(p.format.group);
    l.scales = l.codes + 2 * l.plain;
    const int32_t groups = (l.codes + p.format.group - 1) >> l.group_shift;
    l.bytes = (l.scales + groups + 3) & ~3;
    return l;
}

static __device__ __forceinline__ int32_t entry_bytes(const hd_paged &p) {
    if (p.rows.type == HD_E4M3) return layout_of(p).bytes;
    return p.width * (p.rows.type == HD_BF16 ? 2 : 4);
}

static __device__ __forceinline__ uint8_t *entry_at(const hd_paged &p, int32_t seq,
                                                    int32_t entry) {
    return static_cast<uint8_t *>(p.rows.data) + paged_row(p, seq, entry) * entry_bytes(p);
}

/* ---- written by all threads of a block ---- */

constexpr float LEAST_OF_GROUP = 1e-4f, MOST_OF_E4M3 = 448.0f;

/* The scale of a group whose largest magnitude is `most`, as E8M0; of a bad group NaN. */
static __device__ __forceinline__ uint32_t scale_above(float most, bool bad) {
    const uint32_t bits = __float_as_uint(__fdiv_rn(most, MOST_OF_E4M3));
    return bad ? 255 : (bits >> 23) + ((bits & 0x7fffff) != 0);
}

/* NaN has a sign, as a division by NaN leaves it. */
static __device__ __forceinline__ uint32_t code_of(float x, uint32_t scale) {
    if (scale != 255) return hd_round_e4m3(x * __uint_as_float((254 - scale) << 23));
    return 0x7f | (isnan(x) ? __float_as_uint(x) >> 24 & 0x80 : 0);
}

/* x[n] as codes, n at most 128; returns their scale. A warp's work: four neighbors of a lane. */
static __device__ __forceinline__ uint32_t put_group(uint8_t *to, const float *x, int32_t n) {
    const int32_t first = (int32_t)threadIdx.x % WARP * 4;
    float own[4], most = LEAST_OF_GROUP;
    bool bad = false;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        own[i] = first + i < n ? x[first + i] : 0.0f;
        bad = bad || !isfinite(own[i]);
        most = fmaxf(most, fabsf(own[i]));
    }
    const uint32_t scale = scale_above(warp_max(most), __any_sync(ALL_LANES, bad));
    uint32_t codes = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) codes |= code_of(own[i], scale) << 8 * i;
    if (first + 4 <= n) {
        *reinterpret_cast<uint32_t *>(to + first) = codes;
    } else {
        for (int32_t i = 0; first + i < n; i++) to[first + i] = (uint8_t)(codes >> 8 * i);
    }
    return scale;
}

static __device__ void put_packed_entry(const hd_paged &p, uint8_t *to, const float *x) {
    const entry_layout l = layout_of(p);
    const int32_t group = 1 << l.group_shift, warps = (int32_t)blockDim.x / WARP;
    for (int32_t g = (int32_t)threadIdx.x / WARP; g << l.group_shift < l.codes; g += warps) {
        const int32_t first = g << l.group_shift;
        const uint32_t scale = put_group(to + first, x + first, min(group, l.codes - first));
        if (threadIdx.x % WARP == 0) to[l.scales + g] = (uint8_t)scale;
    }
    for (int32_t i = threadIdx.x; i < 2 * l.plain; i += (int32_t)blockDim.x) {
        const uint16_t bits = __bfloat16_as_ushort(__float2bfloat16_rn(x[l.codes + i / 2]));
        to[l.codes + i] = (uint8_t)(bits >> 8 * (i % 2)); /* at an odd address, maybe */
    }
    const int32_t end = l.scales + ((l.codes + group - 1) >> l.group_shift);
    if ((int32_t)threadIdx.x < l.bytes - end) to[end + (int32_t)threadIdx.x] = 0;
}

/* Entry (seq, entry) = x[width]. Whole warps; x may be in shared memory, and is complete. */
static __device__ void put_entry(const hd_paged &p, int32_t seq, int32_t entry,
                                 const float *x) {
    uint8_t *to = entry_at(p, seq, entry);
    if (p.rows.type == HD_E4M3) {
        put_packed_entry(p, to, x);
        return;
    }
    for (int32_t first = 0; first < p.width; first += (int32_t)blockDim.x) {
        const int32_t c = first + (int32_t)threadIdx.x;
        const float value = in_group(p.format, c < p.width ? x[c] : 0.0f);
        if (c >= p.width) continue;
        if (p.rows.type == HD_BF16) {
            reinterpret_cast<__nv_bfloat16 *>(to)[c] = __float2bfloat16_rn(value);
        } else {
            reinterpret_cast<float *>(to)[c] = value;
        }
    }
}

/* Whether put_entry() takes the entries of a pool; if not, fails the stream. */
static inline bool writes_entries(hd_stream *s, const hd_paged &p) {
    return hd_is_packed(p.rows.type) || rounds_groups(s, p.format);
}

#endif
