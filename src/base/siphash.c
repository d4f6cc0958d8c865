/* siphash.c - see siphash.h; the algorithm of Aumasson and Bernstein, 2012, with two rounds per word
 * and four at the end. */
#include "base/siphash.h"

#include <pthread.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/random.h>

static uint64_t rotate(uint64_t x, int bits) {
    return x << bits | x >> (64 - bits);
}

static void round_once(uint64_t v[4]) {
    v[0] += v[1];
    v[2] += v[3];
    v[1] = rotate(v[1], 13) ^ v[0];
    v[3] = rotate(v[3], 16) ^ v[2];
    v[0] = rotate(v[0], 32);
    v[2] += v[1];
    v[0] += v[3];
    v[1] = rotate(v[1], 17) ^ v[2];
    v[3] = rotate(v[3], 21) ^ v[0];
    v[2] = rotate(v[2], 32);
}

static void mix_word(uint64_t v[4], uint64_t word) {
    v[3] ^= word;
    round_once(v);
    round_once(v);
    v[0] ^= word;
}

void hd_siphash_init(hd_siphash *s, const uint64_t key[2]) {
    *s = (hd_siphash){
        .v = {key[0] ^ 0x736f6d6570736575u, key[1] ^ 0x646f72616e646f6du,
              key[0] ^ 0x6c7967656e657261u, key[1] ^ 0x7465646279746573u}
    };
}

static uint64_t secret[2];

/* Without another source, the 16 random bytes that the kernel passes to every process. */
static void draw_secret(void) {
    if (getrandom(secret, sizeof secret, 0) == sizeof secret) return;
    const void *given = (const void *)getauxval(AT_RANDOM);
    if (given) memcpy(secret, given, sizeof secret);
}

void hd_siphash_init_secret(hd_siphash *s) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, draw_secret);
    hd_siphash_init(s, secret);
}

/* Adds whole words, on a machine that reads them the lowest byte first. */
static size_t add_words(hd_siphash *s, const uint8_t *b, size_t n) {
    size_t i = 0;
    for (uint64_t word; s->n % 8 == 0 && i + sizeof word <= n; i += sizeof word) {
        memcpy(&word, b + i, sizeof word);
        mix_word(s->v, word);
        s->n += sizeof word;
    }
    return i;
}

void hd_siphash_add(hd_siphash *s, const void *bytes, size_t n) {
    const uint8_t *b = bytes;
    for (size_t i = add_words(s, b, n); i < n; i++) {
        s->word |= (uint64_t)b[i] << (s->n % 8 * 8);
        if (++s->n % 8) continue;
        mix_word(s->v, s->word);
        s->word = 0;
    }
}

void hd_siphash_add_part(hd_siphash *s, const char *text) {
    const uint64_t n = text ? strlen(text) : UINT64_MAX;
    hd_siphash_add(s, &n, sizeof n);
    if (text) hd_siphash_add(s, text, (size_t)n);
}

uint64_t hd_siphash_value(const hd_siphash *s) {
    uint64_t v[4];
    memcpy(v, s->v, sizeof v);
    mix_word(v, s->word | s->n << 56);
    v[2] ^= 0xff;
    for (int i = 0; i < 4; i++) round_once(v);
    return v[0] ^ v[1] ^ v[2] ^ v[3];
}
