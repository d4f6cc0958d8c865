/* philox_internal.cuh - base/philox.h on the device. */
#ifndef HD_OPS_CUDA_PHILOX_INTERNAL_CUH
#define HD_OPS_CUDA_PHILOX_INTERNAL_CUH

#include <stdint.h>

/* The first two words of one counter. */
static __device__ uint2 philox(uint64_t seed, uint32_t high, uint64_t low) {
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    uint32_t c0 = (uint32_t)low, c1 = (uint32_t)(low >> 32), c2 = high, c3 = 0;
    for (int round = 0; round < 10; round++) {
        const uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return make_uint2(c0, c1);
}

#endif
