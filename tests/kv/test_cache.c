/* test_cache.c - the prefix cache in a world where every page remembers its content
 * (cache_world.h). */
#include "check.h"

#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "kv/cache_disk.h"
#include "kv/cache_world.h"
#include "weights/configs.h"

/* Positions of tokens[n] that sequence l finds in the cache. */
static int32_t found(hd_cache *c, int32_t l, const int32_t *tokens, int32_t n) {
    int32_t hit = -1;
    assert_int_equal(hd_cache_acquire(c, l, 1, tokens, n, &hit), HD_OK);
    return hit;
}

/* What was computed before a renewal is never matched: neither kept prefixes nor what an open
 * sequence commits later, alone or below a node of the new epoch. */
static void nothing_old_is_matched_after_a_renewal(void **state) {
    (void)state;
    enum { N = 3 * PAGE + 1 };
    const hd_cache_options o = {
        .page_tokens = PAGE, .n_pages = {40}, .max_seqs = N_SEQS, .seq_pages = 8};
    int32_t tokens[N];
    hd_cache *c;
    for (int32_t i = 0; i < N; i++) tokens[i] = i;
    assert_int_equal(hd_cache_open(&c, &o, NULL), HD_OK);
    assert_int_equal(found(c, 0, tokens, N), 0);
    assert_int_equal(hd_cache_extend(c, 0, N), HD_OK);
    hd_cache_commit(c, 0, tokens, PAGE);
    assert_int_equal(hd_cache_match(c, 1, tokens, N), PAGE);
    hd_cache_renew(c);
    assert_int_equal(hd_cache_match(c, 1, tokens, N), 0);
    hd_cache_commit(c, 0, tokens, 2 * PAGE); /* computed by the old weights */
    assert_int_equal(hd_cache_match(c, 1, tokens, N), 0);
    assert_int_equal(found(c, 1, tokens, N), 0);
    assert_int_equal(hd_cache_extend(c, 1, N), HD_OK);
    hd_cache_commit(c, 1, tokens, PAGE); /* by the new ones */
    hd_cache_commit(c, 0, tokens, 3 * PAGE);
    assert_int_equal(hd_cache_match(c, 1, tokens, N), PAGE);
    hd_cache_release(c, 0, false);
    assert_int_equal(hd_cache_match(c, 1, tokens, N), PAGE);
    assert_int_equal(found(c, 2, tokens, N), PAGE);
    assert_int_equal(hd_cache_check(c, false, NULL), HD_OK);
    hd_cache_release(c, 1, false);
    hd_cache_release(c, 2, false);
    hd_cache_renew(c);
    assert_int_equal(hd_cache_check(c, true, NULL), HD_OK);
    assert_int_equal(hd_cache_read_stats(c).nodes, 0);
    hd_cache_close(c);
}

static void every_page_holds_its_own_prefix(void **state) {
    (void)state;
    world *w = malloc(sizeof *w);
    int64_t rebuilds = 0, rebuilt = 0; /* begun; and not given up */
    for (uint64_t seed = 0; seed < 120; seed++) {
        const int32_t reaches[] = {0, 1, 7, 8, 9, 20};
        const int32_t tiers[] = {0, 1, 2, 10, 40, 100, 400}; /* FULL pages of host memory */
        const hd_kv_shape shape = {
            .page_tokens = PAGE,
            .lookback = reaches[seed % 6],
            .tail = {.n = seed % 6 ? (int32_t)(seed % 5) : 0,
                     .step = reaches[seed % 6],
                     .rebuilds = seed / 6 % 2}
        };
        const hd_cache_options o = {
            .page_tokens = PAGE,
            .lookback = shape.lookback,
            .tail = hd_kv_longest_tail(&shape),
            .rebuild = hd_kv_rebuild_length(&shape),
            .n_pages = {40 + (int32_t)(seed % 60) * 4,
                        seed % 6 ? 20 + (int32_t)(seed % 60) * 2 : 0           },
            .n_host = {tiers[seed % 7],               (int32_t)(seed % 5) * 10},
            .max_seqs = N_SEQS,
            .seq_pages = LONG / PAGE,
            .write_through = seed / 2 % 3 == 0
        };
        cache_world_open(w, &o, seed);
        w->shape = shape;
        for (int i = 0; i < 3000; i++) {
            cache_world_step(w);
            if (i % 16) continue;
            hd_err err = {0};
            if (hd_cache_check(w->cache, false, &err) != HD_OK)
                fail_msg("seed %d: %s", (int)seed, err.msg);
        }
        assert_true(w->tail_rows > 0 || shape.tail.n == 0);
        rebuilds += w->rebuilds;
        rebuilt += hd_cache_read_stats(w->cache).rebuilt;
        cache_world_close(w);
    }
    assert_true(rebuilds > 200 && rebuilt > 200 && rebuilt < rebuilds);
    free(w);
}

/* Runs one request alone, in chunks; the longest fits any pool. */
static void run_alone(world *w, int32_t l, const int32_t *tokens, int32_t n, int32_t chunk) {
    int32_t hit;
    memcpy(w->tokens[l], tokens, (size_t)n * sizeof *tokens);
    w->n_tokens[l] = n;
    w->salt[l] = 7;
    assert_int_equal(hd_cache_acquire(w->cache, l, 7, tokens, n, &hit), HD_OK);
    cache_world_begin(w, l, hit);
    while (w->done[l] < n) {
        const int32_t end = hd_min_i32(w->done[l] + chunk, n);
        assert_int_equal(hd_cache_extend(w->cache, l, end), HD_OK);
        cache_world_compute(w, l, end);
    }
    hd_cache_release(w->cache, l, true);
    w->open[l] = false;
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
    cache_world_run_copies(w);
    cache_world_assert_readable(w, 1);
    hd_cache_release(w->cache, 1, false);
    return hit;
}

static void fill(int32_t *tokens, int32_t from, int32_t to, int32_t text) {
    for (int32_t i = from; i < to; i++) tokens[i] = text << 16 | i;
}

typedef struct pressure {
    int32_t entries, windows, host, snapshots; /* pages; host: FULL ones in host memory */
    int32_t others; /* another text after so many requests; 0: never */
} pressure;

/* As asking for one page after the other. */
static void check_first_lacking(const hd_cache *c, const int32_t *tokens, int32_t n) {
    for (int g = 0; g < HD_N_KV_GROUPS; g++) {
        for (int32_t from = 0; from <= n; from++) {
            int32_t at = from;
            while (at < n && hd_cache_has(c, 7, tokens, at, (hd_kv_group)g)) at++;
            assert_int_equal(hd_cache_first_lacking(c, 7, tokens, from, n, (hd_kv_group)g), at);
        }
    }
}

/* For every length of the common prefix, the hit is its complete pages: less than one block
 * short. If others took cached pages, it is the complete pages of what is left, from the
 * beginning. */
static void check_all_lengths(world *w, const hd_kv_shape *shape, const pressure *p) {
    enum { PAGES = 6, N = PAGES * MAX_PAGE + 50 };
    int32_t tokens[N], other[N];
    const int32_t size = shape->page_tokens, n = hd_min_i32(N, 12 * size + size / 2);
    cache_world_open(w,
                     &(hd_cache_options){
                         .page_tokens = size,
                         .lookback = shape->lookback,
                         .n_pages = {p->entries, shape->lookback ? p->windows : 0},
                         .n_host = {p->host,    p->snapshots                    },
                         .max_seqs = N_SEQS,
                         .seq_pages = n / size + 1
    },
                     1);
    fill(tokens, 0, n, 1);
    for (int32_t common = 0; common < n; common++) {
        if (common % 64 == 0) run_alone(w, 0, tokens, n, size / 2 + 1);
        if (p->others && common % p->others == 0) {
            fill(other, 0, n, 1000 + common);
            run_alone(w, 2, other, n - (int32_t)cache_world_draw(w, (uint32_t)n), size);
        }
        const int32_t left = hd_cache_match(w->cache, 7, tokens, n) / size;
        assert_int_equal(hd_cache_usable(w->cache, 7, tokens, (n - 1) / size), left);
        check_first_lacking(w->cache, tokens, (n - 1) / size);
        if (p->entries + p->host >= MAX_PAGES) assert_int_equal(left, (n - 1) / size);
        memcpy(other, tokens, sizeof other);
        fill(other, common, n, 2);
        assert_int_equal(hit_of(w, other, n), hd_min_i32(common / size, left) * size);
    }
    assert_int_equal(hd_cache_check(w->cache, false, NULL), HD_OK);
    cache_world_close(w);
}

/* Every family at its real page size, and small pages whose window spans two of them. */
static void a_hit_is_the_common_prefix(void **state) {
    (void)state;
    static const char *const names[] = {"v2_lite", "v3", "v3_2_exp", "v4_flash", "v4_pro"};
    const pressure pressures[] = {
        {MAX_PAGES, MAX_PAGES, 0,         0,         0  }, /* everything stays on the device */
        {MAX_PAGES, 6,         0,         MAX_PAGES, 0  }, /* WINDOW pages come from the host */
        {MAX_PAGES, 6,         0,         MAX_PAGES, 200}, /* beside requests that need them too */
        {20,        6,         0,         MAX_PAGES, 3  }, /* and FULL pages are evicted */
        {20,        6,         MAX_PAGES, MAX_PAGES, 3  }, /* to the host */
        {20,        6,         5,         MAX_PAGES, 3  }, /* which has room for few */
    };
    world *w = malloc(sizeof *w);
    for (size_t i = 0; i < sizeof pressures / sizeof pressures[0]; i++) {
        for (size_t k = 0; k < sizeof names / sizeof names[0]; k++) {
            hd_model_spec *spec = config_open(names[k]);
            const hd_kv_shape shape = hd_kv_shape_of(spec);
            check_all_lengths(w, &shape, &pressures[i]);
            hd_model_spec_close(spec);
        }
        check_all_lengths(w, &(hd_kv_shape){.page_tokens = PAGE, .lookback = 12},
                          &pressures[i]);
        check_all_lengths(w, &(hd_kv_shape){.page_tokens = PAGE, .lookback = PAGE},
                          &pressures[i]);
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
    cache_world_open(
        w,
        &(hd_cache_options){
            .page_tokens = size,
            .lookback = shape.lookback,
            .n_pages = {MAX_PAGES, 4            },
            .n_host = {0,         2 * TALKS + 2}, /* turn ends, the branch, the other's end */
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
    cache_world_close(w);
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
    cache_world_open(w,
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
        cache_world_compute(w, 0, end);
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
    cache_world_close(w);
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
        .max_seqs = N_SEQS,
        .seq_pages = LONG / PAGE
    };
    int32_t a[64], b[128];
    for (int32_t i = 0; i < 64; i++) a[i] = i;
    for (int32_t i = 0; i < 128; i++) b[i] = 500 + i;
    cache_world_open(w, &o, 1);
    run_alone(w, 0, a, 64, 5);
    run_alone(w, 0, b, 128, 5);
    int32_t next[80];
    memcpy(next, a, sizeof a);
    for (int32_t i = 64; i < 80; i++) next[i] = 9;
    assert_int_equal(hd_cache_match(w->cache, 7, next, 80), 64);
    assert_true(hd_cache_match(w->cache, 7, next, 40) < 32); /* the middle was evicted */
    for (int32_t n = 1; n <= 80; n++) {
        assert_int_equal(hd_cache_usable(w->cache, 7, next, (n - 1) / PAGE) * PAGE,
                         hd_cache_match(w->cache, 7, next, n));
    }
    cache_world_close(w);
    free(w);
}

/* Layers with tails: a request leaves whole pages at its own end. In the middle another one
 * continues only as far before its own end as the tails are long; it makes the pages whole where it
 * leaves the tree, and the next one continues there. */
static void tails_end_in_whole_pages(void **state) {
    (void)state;
    enum { TEXT = 200, COMMON = 100, N = 116 };
    const hd_kv_shape shape = {
        .page_tokens = PAGE, .lookback = PAGE, .tail = {.n = 3, .step = PAGE}
    };
    const hd_cache_options o = {
        .page_tokens = PAGE,
        .lookback = PAGE,
        .tail = hd_kv_longest_tail(&shape),
        .n_pages = {MAX_PAGES, MAX_PAGES},
        .max_seqs = N_SEQS,
        .seq_pages = LONG / PAGE
    };
    world *w = malloc(sizeof *w);
    int32_t tokens[TEXT + 1], other[N];
    assert_int_equal(o.tail, 3 * PAGE);
    cache_world_open(w, &o, 1);
    w->shape = shape;
    fill(tokens, 0, TEXT + 1, 1);
    run_alone(w, 0, tokens, TEXT, 30);
    assert_int_equal(w->tail_rows, 2 * PAGE + PAGE + 1 + 2 * PAGE);
    assert_int_equal(hit_of(w, tokens, TEXT + 1), TEXT);
    memcpy(other, tokens, sizeof other);
    for (int32_t text = 2; text < 4; text++) {
        const int32_t at = COMMON / PAGE * PAGE - (text == 2 ? o.tail : 0);
        fill(other, COMMON, N, text);
        assert_int_equal(hit_of(w, other, N), at);
        run_alone(w, 0, other, N, 30);
    }
    assert_int_equal(hd_cache_check(w->cache, false, NULL), HD_OK);
    cache_world_close(w);
    free(w);
}

/* Where no tier has the window any more, it is rebuilt if the prefix saves more than that takes, and
 * more than an earlier match; then it is cached again. */
static void a_window_is_rebuilt_where_that_is_sooner(void **state) {
    (void)state;
    enum { N = 14 * PAGE, REBUILD = 3 * PAGE, FIRST = 8 * PAGE };
    const hd_kv_shape shape = {
        .page_tokens = PAGE,
        .lookback = PAGE,
        .tail = {.n = 3, .step = PAGE, .rebuilds = true}
    };
    const hd_cache_options o = {
        .page_tokens = PAGE,
        .lookback = PAGE,
        .rebuild = hd_kv_rebuild_length(&shape),
        .n_pages = {MAX_PAGES, 8},
        .max_seqs = N_SEQS,
        .seq_pages = LONG / PAGE
    };
    world *w = malloc(sizeof *w);
    int32_t tokens[N + 1], other[N + 1];
    assert_true(o.rebuild == REBUILD && hd_kv_longest_tail(&shape) == 0);
    cache_world_open(w, &o, 1);
    w->shape = shape;
    fill(tokens, 0, N + 1, 1);
    fill(other, 0, N + 1, 2);
    run_alone(w, 0, tokens, N, 5);
    run_alone(w, 0, other, N, 5); /* it takes the windows of the first text, but for its end */
    for (int32_t n = 1; n <= N; n++) {
        const int32_t pages = (n - 1) / PAGE * PAGE;
        assert_int_equal(hd_cache_match(w->cache, 7, tokens, n), pages > REBUILD ? pages : 0);
        assert_int_equal(hd_cache_usable(w->cache, 7, tokens, pages / PAGE), 0);
    }
    assert_int_equal(hd_cache_match(w->cache, 7, tokens, N + 1), N);
    assert_int_equal(w->rebuilds, 0);
    for (int32_t chunk = 7, again = 0; again < 2; again++) { /* then its window is cached */
        run_alone(w, 0, tokens, FIRST + 1, chunk);
        assert_int_equal(w->rebuilds, 1);
    }
    const hd_cache_stats s = hd_cache_read_stats(w->cache);
    assert_true(s.rebuilt == 1 && s.rebuilt_tokens == REBUILD);
    for (int32_t n = FIRST + 1; n <= N; n++) {
        const int32_t pages = (n - 1) / PAGE * PAGE;
        const int32_t sooner = pages - REBUILD > FIRST ? pages : FIRST;
        assert_int_equal(hd_cache_match(w->cache, 7, tokens, n), sooner);
    }
    assert_int_equal(hd_cache_check(w->cache, false, NULL), HD_OK);
    cache_world_close(w);
    free(w);
}

/* A window for each layer and the drafter, the last one a whole page. */
static void a_rebuild_takes_a_window_for_each_layer(void **state) {
    (void)state;
    static const struct {
        const char *name;
        int32_t positions;
    } models[] = {
        {"v4_flash", 5589},
        {"v4_pro",   7875},
        {"v3_2_exp", 0   }
    };
    for (size_t i = 0; i < HD_LEN(models); i++) {
        hd_model_spec *spec = config_open(models[i].name);
        const hd_kv_shape shape = hd_kv_shape_of(spec);
        assert_int_equal(hd_kv_rebuild_length(&shape), models[i].positions);
        hd_model_spec_close(spec);
    }
}

/* A rebuild takes pages as it goes on, and gives them back when it is given up. */
static void a_rebuild_may_be_given_up(void **state) {
    (void)state;
    enum { N = 12 * PAGE };
    const hd_kv_shape shape = {
        .page_tokens = PAGE,
        .lookback = PAGE,
        .tail = {.n = 4, .step = PAGE, .rebuilds = true}
    };
    const hd_cache_options o = {
        .page_tokens = PAGE,
        .lookback = PAGE,
        .rebuild = hd_kv_rebuild_length(&shape),
        .n_pages = {MAX_PAGES, 6},
        .max_seqs = N_SEQS,
        .seq_pages = LONG / PAGE
    };
    world *w = malloc(sizeof *w);
    int32_t tokens[N], hit;
    for (int32_t done = 1; done < o.rebuild + PAGE; done++) {
        cache_world_open(w, &o, 1);
        w->shape = shape;
        fill(tokens, 0, N, 2);
        run_alone(w, 0, tokens, N, 5);
        fill(tokens, 0, N, 1);
        run_alone(w, 0, tokens, N, 5);
        fill(tokens, 0, N, 2);
        memcpy(w->tokens[0], tokens, sizeof tokens);
        w->n_tokens[0] = N;
        assert_int_equal(hd_cache_acquire(w->cache, 0, 7, tokens, N, &hit), HD_OK);
        cache_world_begin(w, 0, hit);
        assert_int_equal(w->rebuilds, 1);
        const int32_t free_before = hd_cache_read_stats(w->cache).free[HD_KV_WINDOW];
        const int32_t end = w->done[0] + done;
        assert_int_equal(hd_cache_extend(w->cache, 0, hd_min_i32(end, hit)), HD_OK);
        assert_int_equal(hd_cache_check(w->cache, false, NULL), HD_OK);
        hd_cache_release(w->cache, 0, false);
        w->open[0] = false;
        assert_true(hd_cache_read_stats(w->cache).free[HD_KV_WINDOW] >= free_before);
        assert_int_equal(hd_cache_check(w->cache, true, NULL), HD_OK);
        cache_world_close(w);
    }
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

/* A prefix is read from host memory as far as that is sooner than computing it. */
static void the_sooner_of_reading_and_computing_is_taken(void **state) {
    (void)state;
    enum { N = 12 * PAGE, ALL = 11, ON_DEVICE = 5 };
    static const struct {
        hd_cache_costs costs;
        int32_t pages; /* of the match */
    } cases[] = {
        {{0},                                      ALL      },
        {{.token = 1, .page = {0.5 * PAGE, 0}},    ALL      },
        {{.token = 1, .page = {PAGE, 0}},          ALL      }, /* as soon: it is read */
        {{.token = 1, .page = {1.1 * PAGE, 0}},    ON_DEVICE},
        {{.token = 1, .page = {0.5 * PAGE, 1000}}, ALL      }, /* windows are on the device */
    };
    world *w = malloc(sizeof *w);
    const hd_cache_options o = {
        .page_tokens = PAGE,
        .lookback = PAGE,
        .n_pages = {16, 40},
        .n_host = {40, 40},
        .max_seqs = N_SEQS,
        .seq_pages = LONG / PAGE
    };
    int32_t a[N], b[11 * PAGE];
    for (size_t i = 0; i < HD_LEN(cases); i++) {
        cache_world_open(w, &o, 1);
        fill(a, 0, N, 1);
        fill(b, 0, 11 * PAGE, 2);
        run_alone(w, 0, a, N, PAGE);
        run_alone(w, 0, b, 11 * PAGE, PAGE);
        hd_cache_set_costs(w->cache, &cases[i].costs);
        assert_int_equal(hit_of(w, a, N), cases[i].pages * PAGE);
        assert_int_equal(hd_cache_read_stats(w->cache).declined, cases[i].pages < ALL);
        run_alone(w, 0, a, N, PAGE); /* computes what it does not read, over what is cached */
        cache_world_close(w);
    }
    free(w);
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
        cmocka_unit_test(tails_end_in_whole_pages),
        cmocka_unit_test(a_window_is_rebuilt_where_that_is_sooner),
        cmocka_unit_test(a_rebuild_takes_a_window_for_each_layer),
        cmocka_unit_test(a_rebuild_may_be_given_up),
        cmocka_unit_test(a_full_pool_says_not_now),
        cmocka_unit_test(the_sooner_of_reading_and_computing_is_taken),
        cmocka_unit_test(a_leaked_seq_is_found_and_released),
        cmocka_unit_test(nothing_old_is_matched_after_a_renewal),
    };
    return cmocka_run_group_tests_name("cache", tests, NULL, NULL);
}
