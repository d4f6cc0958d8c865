/* cache_world.h - a world for the prefix cache, where every page remembers its content.
 *
 * Each simulated page stores, per token, a hash of all tokens up to it. Copies move
 * contents, computing writes them. Every page that a sequence would read is compared with
 * what it must hold: a stale, foreign or lost page is detected at the first read. */
#ifndef HD_TESTS_KV_CACHE_WORLD_H
#define HD_TESTS_KV_CACHE_WORLD_H

#include "check.h"

#include "kv/cache.h"

/* PAGE, LONG: of the worlds that are not a released model's. */
enum { PAGE = 8, LONG = 256, MAX_PAGE = 128, MAX_TOKENS = 10240, N_SEQS = 6, MAX_PAGES = 512 };

/* Who moves pages between device and host memory. The faulty ones show that the world notices. */
typedef enum mover {
    MOVER_HONEST,
    MOVER_SAVES_NOTHING, /* says that it copied a page to host memory, and did not */
    MOVER_SAVES_LATE, /* copies it after the step: another sequence has written to it by then */
    MOVER_MIXES_NUMBERS, /* takes the number of a page in host memory for one on the device, and conversely */
    N_MOVERS
} mover;

typedef struct content {
    uint64_t token[MAX_PAGE]; /* 0: empty */
    uint8_t layers[MAX_PAGE]; /* a bit for every layer with a tail that stored its vector */
} content;

typedef struct world {
    hd_cache *cache;
    hd_cache_options o;
    hd_kv_shape shape; /* its tails */
    content pages[HD_N_KV_GROUPS][MAX_PAGES], host[HD_N_KV_GROUPS][MAX_PAGES];
    bool open[N_SEQS];
    uint64_t salt[N_SEQS];
    int32_t tokens[N_SEQS][MAX_TOKENS], n_tokens[N_SEQS], done[N_SEQS];
    uint64_t seed, draws;
    uint64_t weights;  /* with which pages are computed */
    int64_t tail_rows; /* computed by layers with tails */
    int64_t rebuilds;  /* sequences that began before their prefix ended */
    mover mover;
    int64_t wrong_reads; /* of a faulty mover */
    hd_page_copy late[MAX_PAGES];
    int32_t n_late;
} world;

void cache_world_open(world *w, const hd_cache_options *o, uint64_t seed);
void cache_world_close(world *w); /* all pages are free when no sequence is open */

uint32_t cache_world_draw(world *w, uint32_t below);
void cache_world_run_copies(world *w);

/* Everything that the next step of a sequence would read is present and is its own prefix. */
void cache_world_assert_readable(world *w, int32_t l);
void cache_world_compute(world *w, int32_t l, int32_t end);

/* A sequence has been opened. */
void cache_world_begin(world *w, int32_t l, int32_t hit);

/* Writes the tokens of sequence l, closed until now, and its salt. */
void cache_world_choose_text(world *w, int32_t l);

/* What happens at random in a turn: a sequence begins, computes, decodes or ends. */
void cache_world_step(world *w);

#endif
