/* checksum.c - four lanes of multiplications over words of eight bytes, so that no chain of them
 * limits the speed. */
#include "base/checksum.h"

#include <string.h>

enum { LANES = 4, WORD = sizeof(uint64_t) };

static uint64_t mix(uint64_t h, uint64_t word) {
    h = (h ^ word) * 0x9E3779B97F4A7C15u;
    return h ^ h >> 29;
}

uint64_t hd_checksum(uint64_t before, const void *bytes, size_t n) {
    const uint8_t *p = bytes;
    uint64_t lanes[LANES], word;
    size_t i = 0;
    for (int k = 0; k < LANES; k++) lanes[k] = before + (uint64_t)k * 0xD6E8FEB86659FD93u;
    for (; i + (size_t)LANES * WORD <= n; i += (size_t)LANES * WORD) {
        for (int k = 0; k < LANES; k++) {
            memcpy(&word, p + i + (size_t)k * WORD, WORD);
            lanes[k] = mix(lanes[k], word);
        }
    }
    for (; i < n; i++) lanes[i % LANES] = mix(lanes[i % LANES], p[i]);
    uint64_t h = n;
    for (int k = 0; k < LANES; k++) h = mix(h, lanes[k]);
    return mix(h, h >> 32);
}
