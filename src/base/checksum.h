/* checksum.h - a 64-bit checksum of bytes, at the speed of memory. Not for input that somebody
 * may choose to collide: siphash.h is. */
#ifndef HD_BASE_CHECKSUM_H
#define HD_BASE_CHECKSUM_H

#include <stddef.h>
#include <stdint.h>

/* The checksum of n bytes that follow those of which `before` is the checksum; 0: none. */
uint64_t hd_checksum(uint64_t before, const void *bytes, size_t n);

#endif
