/* page_name.c - the hash behind the names of pages; see page_name.h. */
#include "kv/page_name.h"

#include "base/siphash.h"

/* Both halves are values of one state of 256 bits, the second after one more byte. */
hd_page_name hd_page_name_of(const uint64_t key[2], hd_page_name above, uint64_t salt,
                             const int32_t *tokens, int32_t n) {
    hd_siphash s;
    hd_page_name name;
    hd_siphash_init(&s, key);
    hd_siphash_add(&s, &above, sizeof above);
    hd_siphash_add(&s, &salt, sizeof salt);
    hd_siphash_add(&s, tokens, (size_t)n * sizeof *tokens);
    name.lo = hd_siphash_value(&s);
    hd_siphash_add(&s, "", 1);
    name.hi = hd_siphash_value(&s);
    return name;
}
