/* nh.h - shortens bytes for a MAC, at the speed of memory: each block of 1 KiB to 16 bytes, which
 * SipHash takes. NH is the first stage of UMAC and VMAC (Black, Halevi, Krawczyk, Krovetz and Rogaway,
 * 1999): two texts of one length have the same short form with probability 2^-64, if nobody knows
 * the key. Texts of other lengths may have the same one: the length goes to SipHash, too. */
#ifndef HD_BASE_NH_H
#define HD_BASE_NH_H

#include "base/siphash.h"

enum { HD_NH_BLOCK = 1024 };

typedef struct hd_nh {
    uint64_t key[HD_NH_BLOCK / sizeof(uint64_t)];
} hd_nh;

/* Derives the key by SipHash. */
void hd_nh_init(hd_nh *h, const uint64_t key[2]);

/* Adds the short form of n bytes to s. */
void hd_nh_add(const hd_nh *h, hd_siphash *s, const void *bytes, size_t n);

#endif
