/* nh.c - see nh.h: the sum of products of two words each, to both of which words of the key are
 * added. */
#include "base/nh.h"

#include <string.h>

enum { WORD = sizeof(uint64_t), PAIR = 2 * WORD };

__extension__ typedef unsigned __int128 wide;

void hd_nh_init(hd_nh *h, const uint64_t key[2]) {
    for (uint64_t i = 0; i < HD_NH_BLOCK / WORD; i++) {
        hd_siphash s;
        hd_siphash_init(&s, key);
        hd_siphash_add(&s, (const uint64_t[2]){0x6e68, i}, PAIR);
        h->key[i] = hd_siphash_value(&s);
    }
}

static wide product(const uint64_t *key, const uint8_t *bytes) {
    uint64_t a, b;
    memcpy(&a, bytes, WORD);
    memcpy(&b, bytes + WORD, WORD);
    return (wide)(a + key[0]) * (b + key[1]);
}

/* n: at most a block; what lacks to whole pairs is 0. */
static wide sum_of(const hd_nh *h, const uint8_t *bytes, size_t n) {
    uint8_t last[PAIR] = {0};
    wide sum = 0;
    size_t i = 0;
    for (; i + PAIR <= n; i += PAIR) sum += product(h->key + i / WORD, bytes + i);
    if (i == n) return sum;
    memcpy(last, bytes + i, n - i);
    return sum + product(h->key + i / WORD, last);
}

void hd_nh_add(const hd_nh *h, hd_siphash *s, const void *bytes, size_t n) {
    const uint8_t *b = bytes;
    for (size_t i = 0; i < n; i += HD_NH_BLOCK) {
        const size_t left = n - i;
        const wide sum = sum_of(h, b + i, left < HD_NH_BLOCK ? left : HD_NH_BLOCK);
        hd_siphash_add(s, (const uint64_t[2]){(uint64_t)sum, (uint64_t)(sum >> 64)}, PAIR);
    }
}
