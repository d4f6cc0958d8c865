/* attention_unpack_internal.cuh - four keys of E4M3, from memory through a warp's registers into boxes of
 * bfloat16: eight lanes have a key, and of each box 16 bytes. */
#ifndef HD_OPS_CUDA_ATTENTION_ATTENTION_UNPACK_INTERNAL_CUH
#define HD_OPS_CUDA_ATTENTION_ATTENTION_UNPACK_INTERNAL_CUH

#include "ops/cuda/unpack_internal.cuh"
#include "ops/cuda_attention/attention_parts_internal.cuh"

/* What a lane has of four keys: of one of them eight columns of each box. */
template <int BOXES>
struct packed_keys {
    uint32_t codes[BOXES - 1][2], plain[4];
    uint32_t scales[2]; /* all of the key's */
};

/* Eight bytes, as the size of an entry aligns them. */
template <int BOXES>
static __device__ __forceinline__ void load_eight(uint32_t *to, const uint8_t *from) {
    if constexpr (PACKED_BYTES<BOXES> % 8 == 0) {
        asm volatile("ld.global.nc.v2.b32 {%0, %1}, [%2];"
                     : "=r"(to[0]), "=r"(to[1])
                     : "l"(from));
    } else {
        asm volatile("ld.global.nc.b32 %0, [%2];\nld.global.nc.b32 %1, [%2 + 4];"
                     : "=r"(to[0]), "=r"(to[1])
                     : "l"(from));
    }
}

/* Keys first to first + 3 of the warp's. */
template <int BOXES>
static __device__ __forceinline__ void load_packed(packed_keys<BOXES> *to, const uint8_t *found,
                                                   int first) {
    constexpr int PLAIN = (BOXES - 1) * BOX_COLS, SCALES = PLAIN + 2 * BOX_COLS;
    const int lane = threadIdx.x % WARP;
    const uint64_t bits =
        __shfl_sync(ALL_LANES, reinterpret_cast<uint64_t>(found), first + lane / 8);
    const uint8_t *key = reinterpret_cast<const uint8_t *>(bits);
    const uint8_t *own = key + lane % 8 * 8, *plain = key + PLAIN + lane % 8 * 16;
#pragma unroll
    for (int box = 0; box < BOXES - 1; box++) {
        load_eight<BOXES>(to->codes[box], own + box * BOX_COLS);
    }
    load_eight<BOXES>(to->plain, plain);
    load_eight<BOXES>(to->plain + 2, plain + 8);
    if constexpr (N_SCALES < BOXES >> 4) {
        load_eight<BOXES>(to->scales, key + SCALES);
    } else {
        asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(to->scales[0]) : "l"(key + SCALES));
        to->scales[1] = 0;
    }
}

static __device__ __forceinline__ void put_eight(uint32_t at, uint4 x) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x.x), "r"(x.y),
                 "r"(x.z), "r"(x.w)
                 : "memory");
}

static __device__ __forceinline__ uint4 get_eight(uint32_t at) {
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(at)
                 : "memory");
    return x;
}

/* Of the columns in a box. */
template <int BOXES>
static __device__ __forceinline__ uint32_t scale_of(const packed_keys<BOXES> &x, int box) {
    const int i = box * BOX_COLS / SCALE_COLS<BOXES>;
    return x.scales[i / 4] >> i % 4 * 8 & 0xff;
}

/* The four keys into the rows of the tile that begin at `to`. */
template <int BOXES>
static __device__ __forceinline__ void put_packed(uint32_t to, const packed_keys<BOXES> &x) {
    bool large = false;
#pragma unroll
    for (int box = 0; box < BOXES - 1; box++) {
        const uint32_t scale = scale_of(x, box);
        large = large || scale > LARGEST_FIRST;
        put_eight(to + (uint32_t)(box * BOX_BYTES),
                  unpack_eight(x.codes[box][0], x.codes[box][1], first_factor(scale)));
    }
    put_eight(to + (uint32_t)((BOXES - 1) * BOX_BYTES),
              make_uint4(x.plain[0], x.plain[1], x.plain[2], x.plain[3]));
    if (!__any_sync(ALL_LANES, large)) return;
#pragma unroll
    for (int box = 0; box < BOXES - 1; box++) {
        const uint32_t at = to + (uint32_t)(box * BOX_BYTES);
        put_eight(at, multiply_eight(get_eight(at), second_factor(scale_of(x, box))));
    }
}

#endif
