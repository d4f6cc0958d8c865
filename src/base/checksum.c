/* checksum.c - see checksum.h. */
#include "base/checksum.h"

uint64_t hd_checksum_blocks(uint64_t first, const void *bytes, size_t n) {
    const uint8_t *p = bytes;
    uint64_t sum = 0;
    for (size_t at = 0; at < n; at += HD_CHECKSUM_BLOCK) {
        const size_t some = n - at < HD_CHECKSUM_BLOCK ? n - at : HD_CHECKSUM_BLOCK;
        sum += hd_checksum(first++, p + at, some);
    }
    return sum;
}
