/* test_cache.c - the prefix cache in a simulation where every page remembers its content.
 *
 * Each simulated page stores, per token, a hash of all tokens up to it. Copies move
 * contents, computing writes them. Every page that a sequence would read is compared with
 * what it must hold: a stale, foreign or lost page is detected at the first read. */
#include "check.h"

#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/philox.h"
#include "kv/cache.h"
#include "weights/configs.h"

/* PAGE, LONG: of the worlds that are not a released model's. */
enum { PAGE = 8, LONG = 256, MAX_PAGE = 128, MAX_TOKENS = 10240, N_SEQS = 6, MAX_PAGES = 512 };

typedef struct content {
    uint64_t token[MAX_PAGE]; /* 0: empty */
} content;

typedef struct world {
    hd_cache *cache;
    hd_cache_options o;
    content pages[HD_N_KV_GROUPS][MAX_PAGES], snapshots[MAX_PAGES];
    bool open[N_SEQS];
    uint64_t salt[N_SEQS];
    int32_t tokens[N_SEQS][MAX_TOKENS], n_tokens[N_SEQS], done[N_SEQS];
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
        content *page = &w->pages[HD_KV_WINDOW][copies[i].page];
        content *snapshot = &w->snapshots[copies[i].snapshot];
        if (copies[i].save) {
            *snapshot = *page;
        } else {
            *page = *snapshot;
        }
    }
    hd_cache_copied(w->cache);
}

/* Everything that the next step of a sequence would read is present and is its own prefix. */
static void assert_readable(const world *w, int32_t l) {
    uint64_t hash = w->salt[l];
    const int32_t n = w->done[l], size = w->o.page_tokens;
    for (int32_t p = 0; p < n; p++) {
        hash = chain(hash, w->tokens[l][p]);
        int32_t page = hd_cache_block_table(w->cache, l, HD_KV_FULL)[p / size];
        if (w->pages[HD_KV_FULL][page].token[p % size] != hash) fail();
        if (p < n - w->o.lookback || !w->o.lookback) continue;
        page = hd_cache_block_table(w->cache, l, HD_KV_WINDOW)[p / size];
        if (page < 0 || w->pages[HD_KV_WINDOW][page].token[p % size] != hash) fail();
    }
}

static void compute(world *w, int32_t l, int32_t end) {
    const int32_t size = w->o.page_tokens;
    uint64_t hash = w->salt[l];
    run_copies(w);
    assert_readable(w, l);
    for (int32_t p = 0; p < end; p++) {
        hash = chain(hash, w->tokens[l][p]);
        if (p < w->done[l]) continue;
        for (int group = 0; group < (w->o.lookback ? 2 : 1); group++) {
            int32_t page = hd_cache_block_table(w->cache, l, (hd_kv_group)group)[p / size];
            w->pages[group][page].token[p % size] = hash;
        }
    }
    w->done[l] = end;
    hd_cache_commit(w->cache, l, w->tokens[l], end);
}

static void start(world *w, int32_t l) {
    int32_t hit;
    w->salt[l] = 1 + draw(w, 2);
    w->n_tokens[l] = 1 + (int32_t)draw(w, LONG - 1);
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

static void step_once(world *w) {
    const int32_t l = (int32_t)draw(w, N_SEQS);
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

/* All pages are free when no sequence is open. */
static void close_world(world *w) {
    for (int32_t l = 0; l < N_SEQS; l++) {
        if (w->open[l]) hd_cache_release(w->cache, l, false);
    }
    hd_cache_flush(w->cache);
    hd_cache_stats s = hd_cache_read_stats(w->cache);
    for (int group = 0; group < HD_N_KV_GROUPS; group++)
        assert_int_equal(s.free[group], s.pages[group]);
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
            .lookback = reaches[seed % 6],
            .n_pages = {40 + (int32_t)seed * 4, seed % 6 ? 20 + (int32_t)seed * 2 : 0},
            .n_snapshots = (int32_t)(seed % 5) * 10,
            .max_seqs = N_SEQS,
            .seq_pages = LONG / PAGE
        };
        open_world(w, &o, seed);
        for (int i = 0; i < 3000; i++) {
            step_once(w);
            if (i % 16) continue;
            hd_err err = {0};
            if (hd_cache_check(w->cache, false, &err) != HD_OK)
                fail_msg("seed %d: %s", (int)seed, err.msg);
        }
        close_world(w);
    }
    free(w);
}

/* Runs one request alone, in chunks; the longest fits any pool. */
static void run_alone(world *w, int32_t l, const int32_t *tokens, int32_t n, int32_t chunk) {
    int32_t hit;
    memcpy(w->tokens[l], tokens, (size_t)n * sizeof *tokens);
    w->n_tokens[l] = n;
    w->salt[l] = 7;
    assert_int_equal(hd_cache_acquire(w->cache, l, 7, tokens, n, &hit), HD_OK);
    w->done[l] = hit;
    while (w->done[l] < n) {
        const int32_t end = hd_min_i32(w->done[l] + chunk, n);
        assert_int_equal(hd_cache_extend(w->cache, l, end), HD_OK);
        compute(w, l, end);
    }
    hd_cache_release(w->cache, l, true);
}

/* Returns the cached prefix of a request of these tokens, after reading all of it. */
static int32_t hit_of(world *w, const int32_t *tokens, int32_t n) {
    int32_t hit;
    const int32_t matched = hd_cache_match(w->cache, 7, tokens, n);
    assert_int_equal(hd_cache_acquire(w->cache, 1, 7, tokens, n, &hit), HD_OK);
    assert_int_equal(hit, matched);
    assert_int_equal(hd_cache_match(w->cache, 8, tokens, n), 0); /* another salt */
    w->salt[1] = 7;
    memcpy(w->tokens[1], tokens, (size_t)n * sizeof *tokens);
    w->done[1] = hit;
    run_copies(w);
    assert_readable(w, 1);
    hd_cache_release(w->cache, 1, false);
    return hit;
}

static void fill(int32_t *tokens, int32_t from, int32_t to, int32_t text) {
    for (int32_t i = from; i < to; i++) tokens[i] = text << 16 | i;
}

typedef struct pressure {
    int32_t entries, windows, snapshots; /* pages */
    int32_t others;                      /* another text after so many requests; 0: never */
} pressure;

/* For every length of the common prefix, the hit is its complete pages: less than one block
 * short. If others took cached pages, it is the complete pages of what is left, from the
 * beginning. */
static void check_all_lengths(world *w, const hd_kv_shape *shape, const pressure *p) {
    enum { PAGES = 6, N = PAGES * MAX_PAGE + 50 };
    int32_t tokens[N], other[N];
    const int32_t size = shape->page_tokens, n = hd_min_i32(N, 12 * size + size / 2);
    open_world(w,
               &(hd_cache_options){
                   .page_tokens = size,
                   .lookback = shape->lookback,
                   .n_pages = {p->entries, shape->lookback ? p->windows : 0},
                   .n_snapshots = p->snapshots,
                   .max_seqs = N_SEQS,
                   .seq_pages = n / size + 1
    },
               1);
    fill(tokens, 0, n, 1);
    for (int32_t common = 0; common < n; common++) {
        if (common % 64 == 0) run_alone(w, 0, tokens, n, size / 2 + 1);
        if (p->others && common % p->others == 0) {
            fill(other, 0, n, 1000 + common);
            run_alone(w, 2, other, n - (int32_t)draw(w, (uint32_t)n), size);
        }
        const int32_t left = hd_cache_match(w->cache, 7, tokens, n) / size;
        if (p->entries >= MAX_PAGES) assert_int_equal(left, (n - 1) / size);
        memcpy(other, tokens, sizeof other);
        fill(other, common, n, 2);
        assert_int_equal(hit_of(w, other, n), hd_min_i32(common / size, left) * size);
    }
    assert_int_equal(hd_cache_check(w->cache, false, NULL), HD_OK);
    close_world(w);
}

/* Every family at its real page size, and small pages whose window spans two of them. */
static void a_hit_is_the_common_prefix(void **state) {
    (void)state;
    static const char *const names[] = {"v2_lite", "v3", "v3_2_exp", "v4_flash", "v4_pro"};
    const pressure pressures[] = {
        {MAX_PAGES, MAX_PAGES, 0,         0  }, /* everything stays on the device */
        {MAX_PAGES, 6,         MAX_PAGES, 0  }, /* WINDOW pages are restored from the host */
        {MAX_PAGES, 6,         MAX_PAGES, 200}, /* beside other requests that need them too */
        {20,        6,         MAX_PAGES, 3  }, /* and FULL pages are evicted */
    };
    world *w = malloc(sizeof *w);
    for (size_t i = 0; i < sizeof pressures / sizeof pressures[0]; i++) {
        for (size_t k = 0; k < sizeof names / sizeof names[0]; k++) {
            hd_model_spec *spec = config_open(names[k]);
            const hd_kv_shape shape = hd_kv_shape_of(spec);
            check_all_lengths(w, &shape, &pressures[i]);
            hd_model_spec_close(spec);
        }
        check_all_lengths(w, &(hd_kv_shape){PAGE, 12}, &pressures[i]);
        check_all_lengths(w, &(hd_kv_shape){PAGE, PAGE}, &pressures[i]);
    }
    free(w);
}

/* With host memory for few WINDOW pages, those at branch points and ends of turns are kept:
 * conversations that began alike continue, and new ones begin, without loss. */
static void branches_and_turn_ends_keep_their_window(void **state) {
    (void)state;
    enum { COMMON = 300, TURN = 450, TALKS = 6, N = COMMON + 2 * TURN + 1 };
    world *w = malloc(sizeof *w);
    hd_model_spec *spec = config_open("v4_flash");
    const hd_kv_shape shape = hd_kv_shape_of(spec);
    const int32_t size = shape.page_tokens;
    int32_t tokens[N];
    open_world(w,
               &(hd_cache_options){
                   .page_tokens = size,
                   .lookback = shape.lookback,
                   .n_pages = {MAX_PAGES, 4},
                   .n_snapshots = 2 * TALKS + 2, /* turn ends, the branch, the other's end */
                   .max_seqs = N_SEQS,
                   .seq_pages = N / size + 1
    },
               1);
    for (int32_t step_once = 1; step_once <= 2; step_once++) {
        for (int32_t talk = 0; talk < TALKS; talk++) {
            fill(tokens, 0, COMMON, 1);
            fill(tokens, COMMON, N, 2 + talk);
            run_alone(w, 0, tokens, COMMON + step_once * TURN, size);
        }
    }
    fill(tokens, 0, N, 50); /* another request, whose pages are the newest */
    run_alone(w, 0, tokens, N, size);
    for (int32_t talk = 0; talk < TALKS; talk++) {
        for (int32_t step_once = 1; step_once <= 2; step_once++) {
            const int32_t end = COMMON + step_once * TURN;
            fill(tokens, 0, COMMON, 1);
            fill(tokens, COMMON, end, 2 + talk);
            fill(tokens, end, N, 100);
            assert_int_equal(hit_of(w, tokens, N), end / size * size);
        }
        fill(tokens, COMMON, N, 101 + talk);
        assert_int_equal(hit_of(w, tokens, N), COMMON / size * size);
    }
    hd_model_spec_close(spec);
    close_world(w);
    free(w);
}

static int32_t held(const world *w, hd_kv_group group) {
    const hd_cache_stats s = hd_cache_read_stats(w->cache);
    return s.pages[group] - s.free[group] - s.evictable[group];
}

/* A V4 request of 10,000 tokens holds, while it runs, its window, the chunk and all entries.
 * After it ended and others took what they could, all its entries are left and one window of
 * 128 tokens. That is enough to continue from its last complete block. */
static void ten_thousand_tokens_keep_one_window(void **state) {
    (void)state;
    enum { N = 10000, CHUNK = 512, WINDOWS = 12 };
    world *w = malloc(sizeof *w);
    hd_model_spec *spec = config_open("v4_flash");
    const hd_kv_shape shape = hd_kv_shape_of(spec);
    const int32_t size = shape.page_tokens, whole = N / size;
    int32_t *tokens = calloc(N + 1, sizeof *tokens), hit;
    assert_true(size == 128 && shape.lookback == 127);
    open_world(w,
               &(hd_cache_options){
                   .page_tokens = size,
                   .lookback = shape.lookback,
                   .n_pages = {4 * (whole + 1), WINDOWS},
                   .max_seqs = N_SEQS,
                   .seq_pages = whole + 1
    },
               1);
    fill(tokens, 0, N + 1, 1);
    memcpy(w->tokens[0], tokens, N * sizeof *tokens);
    w->salt[0] = 7;
    assert_int_equal(hd_cache_acquire(w->cache, 0, 7, tokens, N, &hit), HD_OK);
    while (w->done[0] < N) {
        const int32_t end = hd_min_i32(w->done[0] + CHUNK, N);
        assert_int_equal(hd_cache_extend(w->cache, 0, end), HD_OK);
        assert_true(held(w, HD_KV_WINDOW) <= CHUNK / size + 2);
        compute(w, 0, end);
        assert_true(held(w, HD_KV_WINDOW) <= 2); /* the window and the page in progress */
    }
    assert_int_equal(held(w, HD_KV_FULL), whole + 1);
    hd_cache_release(w->cache, 0, true);
    for (int32_t text = 2; text < 4; text++) {
        int32_t *other = calloc(N, sizeof *other);
        fill(other, 0, N, text);
        run_alone(w, 2, other, N, CHUNK);
        free(other);
    }
    assert_int_equal(hit_of(w, tokens, N + 1), whole * size);
    assert_int_equal(hd_cache_acquire(w->cache, 0, 7, tokens, N + 1, &hit), HD_OK);
    assert_int_equal(held(w, HD_KV_FULL), whole);
    assert_int_equal(held(w, HD_KV_WINDOW), 1);
    hd_cache_release(w->cache, 0, false);
    assert_int_equal(hit_of(w, tokens, N / 2), 0); /* without snapshots the middle is gone */
    hd_model_spec_close(spec);
    free(tokens);
    close_world(w);
    free(w);
}

/* Without host memory, ends of turns and branch points keep their window longest. */
static void turn_ends_outlive_the_middle(void **state) {
    (void)state;
    world *w = malloc(sizeof *w);
    const hd_cache_options o = {
        .page_tokens = PAGE,
        .lookback = 8,
        .n_pages = {200, 8},
        .n_snapshots = 0,
        .max_seqs = N_SEQS,
        .seq_pages = LONG / PAGE
    };
    int32_t a[64], b[128];
    for (int32_t i = 0; i < 64; i++) a[i] = i;
    for (int32_t i = 0; i < 128; i++) b[i] = 500 + i;
    open_world(w, &o, 1);
    run_alone(w, 0, a, 64, 5);
    run_alone(w, 0, b, 128, 5);
    int32_t next[80];
    memcpy(next, a, sizeof a);
    for (int32_t i = 64; i < 80; i++) next[i] = 9;
    assert_int_equal(hd_cache_match(w->cache, 7, next, 80), 64);
    assert_true(hd_cache_match(w->cache, 7, next, 40) < 32); /* the middle was evicted */
    close_world(w);
    free(w);
}

static void a_full_pool_says_not_now(void **state) {
    (void)state;
    const hd_cache_options o = {
        .page_tokens = PAGE, .lookback = 8, .n_pages = {4, 4},
                .max_seqs = 2, .seq_pages = 8
    };
    hd_cache *c;
    int32_t hit, tokens[64] = {0};
    assert_int_equal(hd_cache_open(&c, &o, NULL), HD_OK);
    assert_int_equal(hd_cache_acquire(c, 0, 1, tokens, 64, &hit), HD_OK);
    assert_int_equal(hd_cache_extend(c, 0, 3 * PAGE), HD_OK);
    assert_int_equal(hd_cache_extend(c, 0, 5 * PAGE), HD_EAGAIN);
    assert_int_equal(hd_cache_read_stats(c).free[HD_KV_FULL], 1);
    assert_int_equal(hd_cache_check(c, false, NULL), HD_OK);
    assert_int_equal(hd_cache_acquire(c, 1, 1, tokens, 9, &hit), HD_OK);
    assert_int_equal(hd_cache_extend(c, 1, 9), HD_EAGAIN);
    hd_cache_release(c, 0, false);
    assert_int_equal(hd_cache_extend(c, 1, 9), HD_OK);
    hd_cache_close(c);
}

static void a_leaked_seq_is_found_and_released(void **state) {
    (void)state;
    const hd_cache_options o = {
        .page_tokens = PAGE, .lookback = 8, .n_pages = {8, 8},
                .max_seqs = 2, .seq_pages = 8
    };
    hd_cache *c;
    hd_err err = {0};
    int32_t hit, tokens[64] = {0};
    assert_int_equal(hd_cache_open(&c, &o, NULL), HD_OK);
    const hd_cache_stats fresh = hd_cache_read_stats(c);
    assert_int_equal(hd_cache_acquire(c, 1, 1, tokens, 64, &hit), HD_OK);
    assert_int_equal(hd_cache_extend(c, 1, 3 * PAGE), HD_OK);
    hd_cache_commit(c, 1, tokens, 2 * PAGE);
    assert_int_equal(hd_cache_check(c, false, NULL), HD_OK);
    assert_int_equal(hd_cache_check(c, true, &err), HD_EINVAL);
    assert_non_null(strstr(err.msg, "without an owner"));
    hd_cache_reset(c);
    assert_int_equal(hd_cache_check(c, true, NULL), HD_OK);
    const hd_cache_stats now = hd_cache_read_stats(c);
    assert_memory_equal(now.free, fresh.free, sizeof now.free);
    assert_int_equal(now.nodes, 0);
    assert_int_equal(now.asked_tokens, 64); /* counters go on */
    assert_int_equal(hd_cache_acquire(c, 1, 1, tokens, 64, &hit), HD_OK);
    assert_int_equal(hit, 0);
    assert_int_equal(hd_cache_extend(c, 1, 8 * PAGE), HD_OK);
    hd_cache_commit(c, 1, tokens, 64);
    hd_cache_release(c, 1, true);
    assert_int_equal(hd_cache_check(c, true, NULL), HD_OK);
    hd_cache_close(c);
}

int test_cache(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_page_holds_its_own_prefix),
        cmocka_unit_test(a_hit_is_the_common_prefix),
        cmocka_unit_test(branches_and_turn_ends_keep_their_window),
        cmocka_unit_test(ten_thousand_tokens_keep_one_window),
        cmocka_unit_test(turn_ends_outlive_the_middle),
        cmocka_unit_test(a_full_pool_says_not_now),
        cmocka_unit_test(a_leaked_seq_is_found_and_released),
    };
    return cmocka_run_group_tests_name("cache", tests, NULL, NULL);
}
