/* siphash.h - SipHash-2-4, a keyed hash. Without the key an attacker can compute neither a
 * value nor a collision, so values may identify texts that untrusted clients choose. */
#ifndef HD_BASE_SIPHASH_H
#define HD_BASE_SIPHASH_H

#include <stddef.h>
#include <stdint.h>

typedef struct hd_siphash {
    uint64_t v[4];
    uint64_t word; /* bytes that do not fill a word yet, the first lowest */
    uint64_t n;    /* bytes so far */
} hd_siphash;

void hd_siphash_init(hd_siphash *s, const uint64_t key[2]);

/* Starts a hash under a secret key that the process draws on first use. Thread-safe. */
void hd_siphash_init_secret(hd_siphash *s);

void hd_siphash_add(hd_siphash *s, const void *bytes, size_t n);

/* Adds the text's length and the text, so that other divisions into parts have other values.
 * NULL (no text) differs from an empty text. */
void hd_siphash_add_part(hd_siphash *s, const char *text);

/* Returns the hash of all bytes added so far; more may follow. */
uint64_t hd_siphash_value(const hd_siphash *s);

#endif
