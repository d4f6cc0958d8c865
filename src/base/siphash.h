/* siphash.h - SipHash-2-4: a hash with a key. Who does not know the key can compute neither a value
 * nor two texts of the same one, so values may stand for texts that strangers choose. */
#ifndef HD_BASE_SIPHASH_H
#define HD_BASE_SIPHASH_H

#include <stddef.h>
#include <stdint.h>

typedef struct hd_siphash {
    uint64_t v[4];
    uint64_t word; /* the bytes that do not fill one yet, the first lowest */
    uint64_t n;    /* bytes so far */
} hd_siphash;

void hd_siphash_init(hd_siphash *s, const uint64_t key[2]);

/* Under a key that the process draws when it first needs one, and never shows. From any thread. */
void hd_siphash_init_secret(hd_siphash *s);

void hd_siphash_add(hd_siphash *s, const void *bytes, size_t n);

/* A text behind its length, so that texts cut elsewhere differ; NULL is no text, not an empty one. */
void hd_siphash_add_part(hd_siphash *s, const char *text);

/* Of all that was added; more may follow. */
uint64_t hd_siphash_value(const hd_siphash *s);

#endif
