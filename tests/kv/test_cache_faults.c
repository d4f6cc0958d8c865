/* test_cache_faults.c - the world of cache_world.h notices what it is there for: a page that leaves the device
 * before its backup is there, and numbers of pages on the device and in host memory that are mixed up. */
#include "check.h"

#include <stdlib.h>

#include "kv/cache_world.h"

/* Pages so few that prefixes move between device and host memory all the time. */
static int64_t wrong_reads_of(mover who, uint64_t seed, int32_t lookback, bool through) {
    const hd_cache_options o = {
        .page_tokens = PAGE,
        .lookback = lookback,
        .n_pages = {44,  lookback ? 44 : 0},
        .n_host = {100, lookback ? 30 : 0},
        .max_seqs = N_SEQS,
        .seq_pages = LONG / PAGE,
        .write_through = through
    };
    world *w = malloc(sizeof *w);
    cache_world_open(w, &o, seed);
    w->mover = who;
    for (int i = 0; i < 3000; i++) cache_world_step(w);
    assert_int_equal(hd_cache_check(w->cache, false, NULL), HD_OK);
    const hd_cache_stats s = hd_cache_read_stats(w->cache);
    assert_true(s.saved[HD_KV_FULL] > 0 && s.loaded[HD_KV_FULL] > 0);
    const int64_t wrong = w->wrong_reads;
    cache_world_close(w);
    free(w);
    return wrong;
}

static void faulty_movers_are_noticed(void **state) {
    (void)state;
    for (int who = 0; who < N_MOVERS; who++) {
        for (uint64_t seed = 0; seed < 4; seed++) {
            const int64_t wrong =
                wrong_reads_of((mover)who, seed, seed % 2 ? 12 : 0, seed / 2 % 2);
            if ((wrong > 0) != (who != MOVER_HONEST)) {
                fail_msg("mover %d, seed %d: %lld wrong reads", who, (int)seed,
                         (long long)wrong);
            }
        }
    }
}

int test_cache_faults(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(faulty_movers_are_noticed),
    };
    return cmocka_run_group_tests_name("cache_faults", tests, NULL, NULL);
}
