/* unpack_internal.cuh - cached E4M3 as the bfloat16 numbers that it stands for, exactly.
 *
 * The bits of a code, moved to where those of bfloat16 are, are its value times 2^-120, also where
 * it has no leading one. So a product by a power of two gives four significant bits at their place.
 * A scale above 2^7 takes a second one. */
#ifndef HD_OPS_CUDA_UNPACK_INTERNAL_CUH
#define HD_OPS_CUDA_UNPACK_INTERNAL_CUH

#include <cuda_bf16.h>
#include <stdint.h>

/* Two factors, of a pair. */
struct code_factor {
    uint32_t first, second;
};

constexpr uint32_t LARGEST_FIRST = 127 + 7; /* a scale, as E8M0 */
constexpr uint32_t IN_PAIR = 0x00010001, BF16_ONE = 0x3f803f80, BF16_NAN = 0x7fff7fff;

static __device__ __forceinline__ uint32_t first_factor(uint32_t scale) {
    return (min(scale, LARGEST_FIRST) + 120) * (IN_PAIR << 7);
}

static __device__ __forceinline__ uint32_t second_factor(uint32_t scale) {
    if (scale <= LARGEST_FIRST) return BF16_ONE;
    return scale == 255 ? BF16_NAN : (scale - LARGEST_FIRST + 127) * (IN_PAIR << 7);
}

static __device__ __forceinline__ uint32_t multiply_pair(uint32_t a, uint32_t b) {
    uint32_t d;
#if __CUDA_ARCH__ >= 900
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
#else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;"
        : "=r"(d)
        : "r"(a), "r"(b), "r"(0x80008000u)); /* plus -0: the same bits */
#endif
    return d;
}

/* Four codes times a factor. */
static __device__ __forceinline__ uint2 unpack_four(uint32_t codes, uint32_t factor) {
    const uint32_t low = codes << 4 & 0xf0f0f0f0;
    const uint32_t high = (codes >> 4 & 0x07070707) | (codes & 0x80808080);
    return make_uint2(multiply_pair(__byte_perm(low, high, 0x5140), factor),
                      multiply_pair(__byte_perm(low, high, 0x7362), factor));
}

static __device__ __forceinline__ uint4 unpack_eight(uint32_t low, uint32_t high,
                                                     uint32_t factor) {
    const uint2 a = unpack_four(low, factor), b = unpack_four(high, factor);
    return make_uint4(a.x, a.y, b.x, b.y);
}

static __device__ __forceinline__ uint4 multiply_eight(uint4 x, uint32_t factor) {
    return make_uint4(multiply_pair(x.x, factor), multiply_pair(x.y, factor),
                      multiply_pair(x.z, factor), multiply_pair(x.w, factor));
}

#endif
