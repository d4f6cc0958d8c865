/* engram.c - the constants of V4.1's Engram hashes.
 *
 * The multipliers are those of numpy's default_rng: a SeedSequence (four words of entropy,
 * mixed by O'Neill's seed_seq_fe128), PCG64 with the XSL-RR output, and Lemire's method for
 * numbers below a bound. */
#include "weights/engram.h"

#include <stdbool.h>

__extension__ typedef unsigned __int128 wide;

enum { POOL = 4, SEED_WORDS = 8 };

/* ---- numpy's generator ---- */

typedef struct hasher {
    uint32_t constant, factor;
} hasher;

static uint32_t hash(hasher *h, uint32_t value) {
    value ^= h->constant;
    h->constant *= h->factor;
    value *= h->constant;
    return value ^ value >> 16;
}

static uint32_t mix(uint32_t x, uint32_t y) {
    const uint32_t m = x * 0xca01f9ddu - y * 0x4973f715u;
    return m ^ m >> 16;
}

static void spread_seed(uint64_t seed, uint32_t out[SEED_WORDS]) {
    uint32_t pool[POOL];
    hasher in = {0x43b0d7e5u, 0x931e8875u}, made = {0x8b51f9ddu, 0x58f38dedu};
    for (int i = 0; i < POOL; i++) {
        pool[i] = hash(&in, i < 2 ? (uint32_t)(seed >> (32 * i)) : 0);
    }
    for (int from = 0; from < POOL; from++) {
        for (int to = 0; to < POOL; to++) {
            if (from != to) pool[to] = mix(pool[to], hash(&in, pool[from]));
        }
    }
    for (int i = 0; i < SEED_WORDS; i++) out[i] = hash(&made, pool[i % POOL]);
}

typedef struct pcg {
    wide state, step;
} pcg;

static wide pair(const uint32_t *words) {
    const uint64_t high = (uint64_t)words[1] << 32 | words[0];
    const uint64_t low = (uint64_t)words[3] << 32 | words[2];
    return (wide)high << 64 | low;
}

static uint64_t next(pcg *g) {
    const wide factor = (wide)0x2360ed051fc65da4u << 64 | 0x4385df649fccf645u;
    g->state = g->state * factor + g->step;
    const uint64_t x = (uint64_t)(g->state >> 64) ^ (uint64_t)g->state;
    const unsigned turn = (unsigned)(g->state >> 122);
    return x >> turn | x << (-turn & 63);
}

static pcg seeded(uint64_t seed) {
    uint32_t words[SEED_WORDS];
    spread_seed(seed, words);
    pcg g = {.state = 0, .step = pair(words + 4) << 1 | 1};
    next(&g);
    g.state += pair(words);
    next(&g);
    return g;
}

static uint64_t below(pcg *g, uint64_t bound) {
    wide m = (wide)next(g) * bound;
    if ((uint64_t)m < bound) {
        const uint64_t least = -bound % bound;
        while ((uint64_t)m < least) m = (wide)next(g) * bound;
    }
    return (uint64_t)(m >> 64);
}

void hd_engram_draw(uint64_t seed, uint64_t bound, int32_t n, uint64_t *out) {
    pcg g = seeded(seed);
    for (int32_t i = 0; i < n; i++) out[i] = below(&g, bound);
}

/* ---- the constants ---- */

static void draw_multipliers(const hd_engram_spec *e, int32_t layer, hd_engram_hash *out) {
    const uint64_t bound = (uint64_t)INT64_MAX / (uint64_t)e->classes / 2;
    uint64_t drawn[HD_MAX_NGRAM];
    hd_engram_draw(10007 * (uint64_t)layer, bound, e->max_ngram, drawn);
    for (int32_t i = 0; i < e->max_ngram; i++) {
        out->multipliers[i] = (int64_t)(drawn[i] * 2 + 1);
    }
}

static bool is_prime(int32_t n) {
    for (int32_t d = 2; (int64_t)d * d <= n; d++) {
        if (n % d == 0) return false;
    }
    return n > 1;
}

hd_status hd_engram_constants(hd_engram_spec *e, int32_t *layer) {
    int32_t prime = e->vocab - 1;
    for (*layer = 0; *layer < e->n_layers; ++*layer) {
        hd_engram_hash *h = &e->hash[*layer];
        int64_t rows = 0;
        draw_multipliers(e, e->layers[*layer], h);
        for (int32_t c = 0; c < e->columns; c++) {
            do {
                if (prime == INT32_MAX) return HD_EFORMAT;
                prime++;
            } while (!is_prime(prime));
            h->primes[c] = prime;
            h->first_row[c] = (int32_t)rows;
            rows += prime;
            if (rows > e->rows[*layer]) return HD_EFORMAT;
        }
        if (rows != e->rows[*layer]) return HD_EFORMAT;
    }
    return HD_OK;
}
