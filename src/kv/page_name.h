/* page_name.h - the name of a page: a keyed hash of everything that its content depends on.
 *
 * A name stands for the salt and all tokens up to the page's end, of weights that the root stands
 * for: the name of a page is made of the name of the page before. Pages with equal names have
 * equal bits, on whatever tier they lie and whichever process wrote them. Names are 128 bits of
 * SipHash, whose key the store of the pages keeps to itself, so that nobody who chooses tokens can
 * make two texts that share a name. */
#ifndef HD_KV_PAGE_NAME_H
#define HD_KV_PAGE_NAME_H

#include <stdbool.h>
#include <stdint.h>

typedef struct hd_page_name {
    uint64_t lo, hi;
} hd_page_name;

/* Returns the name of the page with tokens[n] behind the page `above`, or behind the root. */
hd_page_name hd_page_name_of(const uint64_t key[2], hd_page_name above, uint64_t salt,
                             const int32_t *tokens, int32_t n);

static inline bool hd_page_name_equal(hd_page_name a, hd_page_name b) {
    return a.lo == b.lo && a.hi == b.hi;
}

#endif
