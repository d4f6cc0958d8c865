/* checksum.h - a 64-bit checksum of bytes, at the speed of memory. Not for input that somebody
 * may choose to collide: siphash.h is.
 *
 * Four lanes of multiplications over words of eight bytes, so that no chain of them limits the
 * speed. A GPU computes the same. */
#ifndef HD_BASE_CHECKSUM_H
#define HD_BASE_CHECKSUM_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "base/status.h"

#ifdef __CUDACC__
#define HD_CHECKSUM_FN static inline __host__ __device__
#else
#define HD_CHECKSUM_FN static inline
#endif

enum { HD_CHECKSUM_BLOCK = 1024 }; /* bytes of hd_checksum_blocks() */

HD_CHECKSUM_FN uint64_t hd_checksum_mix(uint64_t h, uint64_t word) {
    h = (h ^ word) * 0x9E3779B97F4A7C15u;
    return h ^ h >> 29;
}

/* The checksum of n bytes that follow those of which `before` is the checksum; 0: none. On a GPU the
 * bytes are aligned to 8. */
HD_CHECKSUM_FN uint64_t hd_checksum(uint64_t before, const void *bytes, size_t n) {
    enum { LANES = 4, WORD = sizeof(uint64_t) };
    const uint8_t *p = (const uint8_t *)bytes;
    uint64_t lanes[LANES], word;
    size_t i = 0;
    for (int k = 0; k < LANES; k++) lanes[k] = before + (uint64_t)k * 0xD6E8FEB86659FD93u;
    for (; i + (size_t)LANES * WORD <= n; i += (size_t)LANES * WORD) {
        for (int k = 0; k < LANES; k++) {
#ifdef __CUDA_ARCH__
            word = *(const uint64_t *)(p + i + (size_t)k * WORD);
#else
            memcpy(&word, p + i + (size_t)k * WORD, WORD);
#endif
            lanes[k] = hd_checksum_mix(lanes[k], word);
        }
    }
    for (; i < n; i++) lanes[i % LANES] = hd_checksum_mix(lanes[i % LANES], p[i]);
    uint64_t h = n;
    for (int k = 0; k < LANES; k++) h = hd_checksum_mix(h, lanes[k]);
    return hd_checksum_mix(h, h >> 32);
}

HD_BEGIN_C

/* Of blocks of bytes in any order: the sum of their checksums, each of which depends on the block's
 * number. The first block has number `first`. */
uint64_t hd_checksum_blocks(uint64_t first, const void *bytes, size_t n);

HD_END_C

#endif
