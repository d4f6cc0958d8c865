/* test_cache_order.c - in which order pages leave their tiers (cache_worth.c), and which are written
 * through to host memory. */
#include "check.h"

#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "kv/cache_disk.h"
#include "kv/cache_world.h"

enum { PAGES = 4, N = PAGES * PAGE + 1, SALT = 7 };

static void write_text(int32_t *tokens, int32_t text, int32_t n) {
    for (int32_t i = 0; i < n; i++) tokens[i] = 1000 * text + i;
}

static void open_with(world *w, int32_t lookback, int32_t device, int32_t host,
                      int32_t windows) {
    const hd_cache_options o = {
        .page_tokens = PAGE,
        .lookback = lookback,
        .n_pages = {device, lookback ? 2 * windows : 0},
        .n_host = {host,   windows                   },
        .max_seqs = N_SEQS,
        .seq_pages = LONG / PAGE
    };
    cache_world_open(w, &o, 1);
}

/* Runs a request of n tokens alone and reads what it finds. Returns how many tokens it found. */
static int32_t run_text(world *w, int32_t text, int32_t n) {
    int32_t hit;
    write_text(w->tokens[0], text, n);
    w->n_tokens[0] = n;
    w->salt[0] = SALT;
    assert_int_equal(hd_cache_acquire(w->cache, 0, SALT, w->tokens[0], n, &hit), HD_OK);
    cache_world_begin(w, 0, hit);
    while (w->done[0] < n) {
        const int32_t end = hd_min_i32(w->done[0] + PAGE, n);
        assert_int_equal(hd_cache_extend(w->cache, 0, end), HD_OK);
        cache_world_compute(w, 0, end);
    }
    hd_cache_release(w->cache, 0, true);
    w->open[0] = false;
    return hit;
}

static int32_t cached_pages(const world *w, int32_t text, int32_t n) {
    int32_t tokens[LONG];
    write_text(tokens, text, n);
    return hd_cache_match(w->cache, SALT, tokens, n) / PAGE;
}

/* What many used stays while others come and go, and leaves when it was not used for long. */
static void pages_of_many_uses_stay_longer(void **state) {
    (void)state;
    world *w = malloc(sizeof *w);
    open_with(w, 0, 4 * (PAGES + 1), 0, 0);
    for (int i = 0; i < 3; i++) run_text(w, 1, N);
    int32_t others = 0;
    for (int32_t text = 2; cached_pages(w, 1, N) == PAGES; text++, others++) {
        assert_true(text < 100);
        run_text(w, text, N);
    }
    assert_true(others > 6); /* LRU: 4 */
    assert_true(others < 20);
    cache_world_close(w);
    free(w);
}

/* Texts that were used once leave in the order in which they were used. */
static void of_equal_worth_the_least_recently_used_leaves(void **state) {
    (void)state;
    enum { TEXTS = 6 };
    world *w = malloc(sizeof *w);
    open_with(w, 0, TEXTS * PAGES + 1, 0, 0);
    for (int32_t text = 0; text < TEXTS; text++) run_text(w, text, N);
    for (int32_t text = TEXTS; text < 5 * TEXTS; text++) {
        run_text(w, text, N);
        for (int32_t old = 0; old <= text; old++) {
            const int32_t left = cached_pages(w, old, N);
            if (old + TEXTS > text) {
                assert_int_equal(left, PAGES);
            } else {
                assert_true(old + TEXTS == text ? left < PAGES : left == 0);
            }
        }
    }
    cache_world_close(w);
    free(w);
}

/* A third of the requests have one of a few prompts, all others one that never comes again: more is found than
 * with the least recently used out first. */
static void what_is_used_often_is_found_more_often(void **state) {
    (void)state;
    enum { OFTEN = 6, ROOM = 10, ASKED = 4000 };
    world *w = malloc(sizeof *w);
    int32_t recent[ROOM + 1], n_recent = 0; /* the least recently used last */
    int64_t found = 0, found_lru = 0;
    open_with(w, 0, ROOM * PAGES / 2 + 1, ROOM * PAGES / 2, 0);
    for (int i = 0; i < ASKED; i++) {
        const bool often = cache_world_draw(w, 3) == 0;
        const int32_t text = often ? (int32_t)cache_world_draw(w, OFTEN) : OFTEN + i;
        int32_t at = 0;
        found += run_text(w, text, N) / PAGE;
        while (at < n_recent && recent[at] != text) at++;
        if (at < n_recent) {
            found_lru += PAGES;
        } else {
            at = n_recent < ROOM ? n_recent++ : ROOM - 1;
        }
        memmove(recent + 1, recent, (size_t)at * sizeof *recent);
        recent[0] = text;
    }
    print_message("found %d pages; least recently used first: %d\n", (int)found,
                  (int)found_lru);
    assert_true((double)found > 1.5 * (double)found_lru);
    cache_world_close(w);
    free(w);
}

/* Of two ends of turns the one behind which less was computed before loses its window first,
 * although it is the newer one. */
static void windows_that_save_more_stay_longer(void **state) {
    (void)state;
    enum { DEEP = 20 * PAGE + 1, SHORT = 2 * PAGE + 1 };
    world *w = malloc(sizeof *w);
    open_with(w, PAGE, 500, 0, 3);
    run_text(w, 1, DEEP);
    run_text(w, 2, SHORT);
    for (int32_t text = 3; cached_pages(w, 2, SHORT) > 0; text++) {
        assert_true(text < 50);
        assert_int_equal(cached_pages(w, 1, DEEP), DEEP / PAGE);
        run_text(w, text, 2 * PAGE + 1);
    }
    assert_int_equal(cached_pages(w, 1, DEEP), DEEP / PAGE);
    cache_world_close(w);
    free(w);
}

static int32_t host_pages(const world *w, hd_kv_group group) {
    return hd_cache_read_stats(w->cache).host[group];
}

static void save_all(const world *w) {
    for (int g = 0; g < HD_N_KV_GROUPS; g++) {
        hd_cache_save_unwritten(w->cache, (hd_kv_group)g, MAX_PAGES);
    }
}

/* A sequence that runs: all its FULL pages are in host memory as soon as they are whole, and the
 * window behind which its prompt would continue. Each page is copied once. */
static void pages_are_written_through(void **state) {
    (void)state;
    enum { PROMPT = 5 * PAGE + 3, END = 9 * PAGE };
    for (int through = 0; through < 2; through++) {
        int32_t hit;
        world *w = malloc(sizeof *w);
        hd_cache_options o = {
            .page_tokens = PAGE,
            .lookback = PAGE,
            .n_pages = {40, 40},
            .n_host = {40, 40},
            .max_seqs = N_SEQS,
            .seq_pages = LONG / PAGE,
            .write_through = through
        };
        cache_world_open(w, &o, 1);
        write_text(w->tokens[0], 1, END);
        w->n_tokens[0] = PROMPT;
        w->salt[0] = SALT;
        assert_int_equal(hd_cache_acquire(w->cache, 0, SALT, w->tokens[0], PROMPT, &hit),
                         HD_OK);
        cache_world_begin(w, 0, hit);
        for (int32_t end = 4; end <= END; end += 4) {
            assert_int_equal(hd_cache_extend(w->cache, 0, end), HD_OK);
            cache_world_compute(w, 0, end);
            save_all(w);
            cache_world_run_copies(w);
            assert_int_equal(host_pages(w, HD_KV_FULL), through ? end / PAGE : 0);
            assert_int_equal(host_pages(w, HD_KV_WINDOW), through && end >= 5 * PAGE);
            assert_int_equal(hd_cache_check(w->cache, false, NULL), HD_OK);
        }
        assert_int_equal(hd_cache_read_stats(w->cache).saved[HD_KV_FULL],
                         through ? END / PAGE : 0);
        hd_cache_release(w->cache, 0, true);
        w->open[0] = false;
        save_all(w);
        cache_world_run_copies(w);
        assert_int_equal(host_pages(w, HD_KV_WINDOW),
                         through ? 2 : 0); /* the end of the turn */
        cache_world_close(w);
        free(w);
    }
}

int test_cache_order(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pages_of_many_uses_stay_longer),
        cmocka_unit_test(of_equal_worth_the_least_recently_used_leaves),
        cmocka_unit_test(what_is_used_often_is_found_more_often),
        cmocka_unit_test(windows_that_save_more_stay_longer),
        cmocka_unit_test(pages_are_written_through),
    };
    return cmocka_run_group_tests_name("cache_order", tests, NULL, NULL);
}
