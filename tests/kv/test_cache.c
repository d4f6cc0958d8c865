/* test_cache.c - the prefix cache against a world where every page remembers what it holds.
 *
 * Each simulated page stores, per token, a hash of all tokens up to it. Copies move contents,
 * computing writes them, and every page a lease would read is compared with what it must
 * hold: a stale, foreign or lost page is seen at the first read. */
#include "check.h"

#include <stdlib.h>
#include <string.h>

#include "base/philox.h"
#include "kv/cache.h"

enum { PAGE = 8, MAX_TOKENS = 256, N_LEASES = 6, MAX_PAGES = 512 };

typedef struct content {
    uint64_t token[PAGE]; /* 0: nothing */
} content;

typedef struct world {
    hd_cache *cache;
    hd_cache_options o;
    content pages[HD_N_LIFETIMES][MAX_PAGES], snapshots[MAX_PAGES];
    bool open[N_LEASES];
    uint64_t salt[N_LEASES];
    int32_t tokens[N_LEASES][MAX_TOKENS], n_tokens[N_LEASES], done[N_LEASES];
    uint64_t seed, draws;
} world;

static uint32_t draw(world *w, uint32_t below) {
    return hd_philox_at(w->seed, 0, w->draws++).v[0] % below;
}

static uint64_t chain(uint64_t before, int32_t token) {
    return (before ^ (uint64_t)(token + 1)) * 0x9E3779B97F4A7C15u + 1;
}

static void run_copies(world *w) {
    int32_t n;
    const hd_page_copy *copies = hd_cache_copies(w->cache, &n);
    for (int32_t i = 0; i < n; i++) {
        content *page = &w->pages[HD_LIFE_WINDOW][copies[i].page];
        content *snapshot = &w->snapshots[copies[i].snapshot];
        if (copies[i].save) {
            *snapshot = *page;
        } else {
            *page = *snapshot;
        }
    }
    hd_cache_copied(w->cache);
}

/* Everything the next step of a lease would read is there and is its own prefix. */
static void assert_readable(const world *w, int32_t l) {
    uint64_t hash = w->salt[l];
    const int32_t n = w->done[l];
    for (int32_t p = 0; p < n; p++) {
        hash = chain(hash, w->tokens[l][p]);
        int32_t page = hd_cache_table(w->cache, l, HD_LIFE_ENTRIES)[p / PAGE];
        assert_true(w->pages[HD_LIFE_ENTRIES][page].token[p % PAGE] == hash);
        if (p < n - w->o.reach || !w->o.reach) continue;
        page = hd_cache_table(w->cache, l, HD_LIFE_WINDOW)[p / PAGE];
        assert_true(page >= 0 && w->pages[HD_LIFE_WINDOW][page].token[p % PAGE] == hash);
    }
}

static void compute(world *w, int32_t l, int32_t end) {
    uint64_t hash = w->salt[l];
    run_copies(w);
    assert_readable(w, l);
    for (int32_t p = 0; p < end; p++) {
        hash = chain(hash, w->tokens[l][p]);
        if (p < w->done[l]) continue;
        for (int life = 0; life < (w->o.reach ? 2 : 1); life++) {
            int32_t page = hd_cache_table(w->cache, l, (hd_lifetime)life)[p / PAGE];
            w->pages[life][page].token[p % PAGE] = hash;
        }
    }
    w->done[l] = end;
    hd_cache_commit(w->cache, l, w->tokens[l], end);
}

static void start(world *w, int32_t l) {
    int32_t hit;
    w->salt[l] = 1 + draw(w, 2);
    w->n_tokens[l] = 1 + (int32_t)draw(w, MAX_TOKENS - 1);
    /* Few first tokens and few changes make long common prefixes of all lengths. */
    for (int32_t i = 0; i < w->n_tokens[l]; i++) {
        w->tokens[l][i] = draw(w, 40) == 0 ? (int32_t)draw(w, 3) : i % 5;
    }
    if (hd_cache_acquire(w->cache, l, w->salt[l], w->tokens[l], w->n_tokens[l], &hit) !=
        HD_OK) {
        return;
    }
    assert_true(hit < w->n_tokens[l] && hit % PAGE == 0);
    w->open[l] = true;
    w->done[l] = hit;
}

static void turn(world *w) {
    const int32_t l = (int32_t)draw(w, N_LEASES);
    if (!w->open[l]) {
        start(w, l);
    } else if (w->done[l] < w->n_tokens[l]) {
        int32_t end = w->done[l] + 1 + (int32_t)draw(w, 30);
        if (end > w->n_tokens[l]) end = w->n_tokens[l];
        if (hd_cache_extend(w->cache, l, end) == HD_OK)
            compute(w, l, end);
        else if (draw(w, 3) == 0) {
            hd_cache_release(w->cache, l, false);
            w->open[l] = false;
        }
    } else {
        hd_cache_release(w->cache, l, draw(w, 2));
        w->open[l] = false;
    }
    if (draw(w, 500) == 0) hd_cache_flush(w->cache);
}

static void open_world(world *w, const hd_cache_options *o, uint64_t seed) {
    memset(w, 0, sizeof *w);
    w->o = *o;
    w->seed = seed;
    assert_int_equal(hd_cache_open(&w->cache, o, NULL), HD_OK);
}

/* All pages come home when nobody holds any. */
static void close_world(world *w) {
    for (int32_t l = 0; l < N_LEASES; l++) {
        if (w->open[l]) hd_cache_release(w->cache, l, false);
    }
    hd_cache_flush(w->cache);
    hd_cache_stats s = hd_cache_read_stats(w->cache);
    for (int life = 0; life < HD_N_LIFETIMES; life++)
        assert_int_equal(s.free[life], s.pages[life]);
    assert_int_equal(s.nodes, 0);
    assert_int_equal(s.snapshots, 0);
    hd_cache_close(w->cache);
}

static void every_page_holds_its_own_prefix(void **state) {
    (void)state;
    world *w = malloc(sizeof *w);
    for (uint64_t seed = 0; seed < 60; seed++) {
        const int32_t reaches[] = {0, 1, 7, 8, 9, 20};
        const hd_cache_options o = {
            .page_tokens = PAGE,
            .reach = reaches[seed % 6],
            .n_pages = {40 + (int32_t)seed * 4, seed % 6 ? 20 + (int32_t)seed * 2 : 0},
            .n_snapshots = (int32_t)(seed % 5) * 10,
            .n_leases = N_LEASES,
            .lease_pages = MAX_TOKENS / PAGE
        };
        open_world(w, &o, seed);
        for (int i = 0; i < 3000; i++) {
            turn(w);
            if (i % 16) continue;
            hd_err err = {0};
            if (hd_cache_check(w->cache, &err) != HD_OK)
                fail_msg("seed %d: %s", (int)seed, err.msg);
        }
        close_world(w);
    }
    free(w);
}

static void run_alone(world *w, int32_t l, const int32_t *tokens, int32_t n) {
    int32_t hit;
    memcpy(w->tokens[l], tokens, (size_t)n * sizeof *tokens);
    w->n_tokens[l] = n;
    w->salt[l] = 7;
    assert_int_equal(hd_cache_acquire(w->cache, l, 7, tokens, n, &hit), HD_OK);
    w->done[l] = hit;
    while (w->done[l] < n) {
        int32_t end = w->done[l] + 5 < n ? w->done[l] + 5 : n;
        assert_int_equal(hd_cache_extend(w->cache, l, end), HD_OK);
        compute(w, l, end);
    }
    hd_cache_release(w->cache, l, true);
}

/* A hit is the common prefix less at most one page, for every length of it, although the
 * window moved on long ago: its pages come back from snapshots. With few device pages, too. */
static void a_hit_is_the_common_prefix(void **state) {
    (void)state;
    world *w = malloc(sizeof *w);
    for (int32_t window_pages = 6; window_pages <= 200; window_pages += 194) {
        const hd_cache_options o = {
            .page_tokens = PAGE,
            .reach = 12,
            .n_pages = {400, window_pages},
            .n_snapshots = 400,
            .n_leases = N_LEASES,
            .lease_pages = MAX_TOKENS / PAGE
        };
        int32_t tokens[MAX_TOKENS], other[MAX_TOKENS];
        open_world(w, &o, 1);
        for (int32_t i = 0; i < MAX_TOKENS; i++) tokens[i] = i;
        run_alone(w, 0, tokens, MAX_TOKENS);
        for (int32_t common = 0; common < MAX_TOKENS; common++) {
            memcpy(other, tokens, sizeof other);
            for (int32_t i = common; i < MAX_TOKENS; i++) other[i] = 1000 + common;
            int32_t hit = hd_cache_match(w->cache, 7, other, MAX_TOKENS);
            assert_true(hit <= common && hit > common - PAGE);
            assert_int_equal(hd_cache_match(w->cache, 8, other, MAX_TOKENS), 0); /* salt */
            assert_int_equal(hd_cache_acquire(w->cache, 1, 7, other, MAX_TOKENS, &hit), HD_OK);
            w->salt[1] = 7;
            memcpy(w->tokens[1], other, sizeof other);
            w->done[1] = hit;
            run_copies(w);
            assert_readable(w, 1);
            hd_cache_release(w->cache, 1, false);
        }
        close_world(w);
    }
    free(w);
}

/* Without host memory, ends of turns and branch points keep their window longest. */
static void turn_ends_outlive_the_middle(void **state) {
    (void)state;
    world *w = malloc(sizeof *w);
    const hd_cache_options o = {
        .page_tokens = PAGE,
        .reach = 8,
        .n_pages = {200, 8},
        .n_snapshots = 0,
        .n_leases = N_LEASES,
        .lease_pages = MAX_TOKENS / PAGE
    };
    int32_t a[64], b[128];
    for (int32_t i = 0; i < 64; i++) a[i] = i;
    for (int32_t i = 0; i < 128; i++) b[i] = 500 + i;
    open_world(w, &o, 1);
    run_alone(w, 0, a, 64);
    run_alone(w, 0, b, 128);
    int32_t next[80];
    memcpy(next, a, sizeof a);
    for (int32_t i = 64; i < 80; i++) next[i] = 9;
    assert_int_equal(hd_cache_match(w->cache, 7, next, 80), 64);
    assert_true(hd_cache_match(w->cache, 7, next, 40) < 32); /* the middle was given up */
    close_world(w);
    free(w);
}

static void a_full_pool_says_not_now(void **state) {
    (void)state;
    const hd_cache_options o = {
        .page_tokens = PAGE, .reach = 8, .n_pages = {4, 4},
                .n_leases = 2, .lease_pages = 8
    };
    hd_cache *c;
    int32_t hit, tokens[64] = {0};
    assert_int_equal(hd_cache_open(&c, &o, NULL), HD_OK);
    assert_int_equal(hd_cache_acquire(c, 0, 1, tokens, 64, &hit), HD_OK);
    assert_int_equal(hd_cache_extend(c, 0, 3 * PAGE), HD_OK);
    assert_int_equal(hd_cache_extend(c, 0, 5 * PAGE), HD_EAGAIN);
    assert_int_equal(hd_cache_read_stats(c).free[HD_LIFE_ENTRIES], 1);
    assert_int_equal(hd_cache_check(c, NULL), HD_OK);
    assert_int_equal(hd_cache_acquire(c, 1, 1, tokens, 9, &hit), HD_OK);
    assert_int_equal(hd_cache_extend(c, 1, 9), HD_EAGAIN);
    hd_cache_release(c, 0, false);
    assert_int_equal(hd_cache_extend(c, 1, 9), HD_OK);
    hd_cache_close(c);
}

int test_cache(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_page_holds_its_own_prefix),
        cmocka_unit_test(a_hit_is_the_common_prefix),
        cmocka_unit_test(turn_ends_outlive_the_middle),
        cmocka_unit_test(a_full_pool_says_not_now),
    };
    return cmocka_run_group_tests_name("cache", tests, NULL, NULL);
}
