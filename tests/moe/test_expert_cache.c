/* test_expert_cache.c - experts in staging slots: who gets one, who leaves, and what a reader may
 * see. The source poisons a slot before it fills it, and fetches only what the test lets pass. */
#include "check.h"

#include <pthread.h>

#include "moe/expert_cache.h"

enum { KEYS = 8, SLOTS = 3, BYTES = 4096, POISON = 0xff };

typedef struct source {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int32_t may_pass; /* fetches that may end; -1: all */
    int32_t fetched[KEYS];
    int32_t broken; /* a key that cannot be read; -1: none */
} source;

static hd_status fetch(void *ctx, int32_t key, uint8_t *slot, hd_err *err) {
    source *s = ctx;
    memset(slot, POISON, BYTES);
    pthread_mutex_lock(&s->lock);
    while (s->may_pass == 0) pthread_cond_wait(&s->changed, &s->lock);
    if (s->may_pass > 0) s->may_pass--;
    s->fetched[key]++;
    const bool broken = s->broken == key;
    pthread_mutex_unlock(&s->lock);
    if (broken) return HD_FAIL(err, HD_EIO, "shard-%d: cannot be read", key);
    memset(slot, key, BYTES);
    return HD_OK;
}

static void let_pass(source *s, int32_t n) {
    pthread_mutex_lock(&s->lock);
    s->may_pass = n;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
}

static hd_expert_cache *open_cache(source *s, int32_t slots) {
    hd_expert_cache *c;
    hd_err err = {0};
    *s = (source){.may_pass = -1, .broken = -1};
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->changed, NULL);
    const hd_expert_cache_options o = {
        .source = {"test", s, fetch},
        .n_keys = KEYS,
        .n_slots = slots,
        .slot_bytes = BYTES,
        .n_fetchers = 2
    };
    assert_int_equal(hd_expert_cache_open(&c, &o, &err), HD_OK);
    return c;
}

static void close_cache(hd_expert_cache *c, source *s) {
    hd_expert_cache_close(c);
    pthread_mutex_destroy(&s->lock);
    pthread_cond_destroy(&s->changed);
}

static void expect_bytes(hd_expert_cache *c, int32_t key) {
    const uint8_t *slot = NULL;
    hd_err err = {0};
    assert_int_equal(hd_expert_cache_wait(c, key, &slot, &err), HD_OK);
    for (int32_t i = 0; i < BYTES; i++) assert_int_equal(slot[i], key);
}

static void use(hd_expert_cache *c, int32_t key) {
    assert_int_equal(hd_expert_cache_pin(c, &key, 1), 1);
    expect_bytes(c, key);
    hd_expert_cache_unpin(c, &key, 1);
}

static void what_fits_is_fetched_once(void **state) {
    (void)state;
    source s;
    hd_expert_cache *c = open_cache(&s, SLOTS);
    for (int32_t round = 0; round < 3; round++) {
        for (int32_t key = 0; key < SLOTS; key++) use(c, key);
    }
    for (int32_t key = 0; key < SLOTS; key++) assert_int_equal(s.fetched[key], 1);
    const hd_expert_cache_stats stats = hd_expert_cache_read_stats(c);
    assert_int_equal(stats.used, 9);
    assert_int_equal(stats.staged, 6);
    assert_int_equal(stats.fetched, 3);
    close_cache(c, &s);
}

static void pinned_experts_keep_their_slots(void **state) {
    (void)state;
    static const int32_t keys[] = {4, 0, 7, 2, 5};
    source s;
    hd_expert_cache *c = open_cache(&s, SLOTS);
    assert_int_equal(hd_expert_cache_pin(c, keys, 5), SLOTS); /* there is no room for more */
    for (int32_t i = 0; i < SLOTS; i++) expect_bytes(c, keys[i]);
    assert_int_equal(hd_expert_cache_pin(c, keys + SLOTS, 2), 0);
    hd_expert_cache_unpin(c, keys, 1);
    assert_int_equal(hd_expert_cache_pin(c, keys + SLOTS, 2), 1);
    expect_bytes(c, 2);
    expect_bytes(c, 0);
    expect_bytes(c, 7);
    assert_int_equal(s.fetched[5], 0);
    hd_expert_cache_unpin(c, keys + 1, 3);
    close_cache(c, &s);
}

static void readers_wait_for_a_slow_source(void **state) {
    (void)state;
    static const int32_t keys[] = {1, 6};
    source s;
    hd_expert_cache *c = open_cache(&s, SLOTS);
    let_pass(&s, 0);
    assert_int_equal(hd_expert_cache_pin(c, keys, 2), 2);
    assert_false(hd_expert_cache_is_ready(c, 1));
    assert_false(hd_expert_cache_is_ready(c, 6));
    let_pass(&s, -1);
    expect_bytes(c, 6);
    expect_bytes(c, 1);
    assert_true(hd_expert_cache_is_ready(c, 1));
    hd_expert_cache_unpin(c, keys, 2);
    close_cache(c, &s);
}

static void the_least_used_leaves(void **state) {
    (void)state;
    static const int32_t uses[] = {0, 1, 2, 0, 2, 3}; /* 1 and then 0 leave */
    source s;
    hd_expert_cache *c = open_cache(&s, SLOTS);
    for (size_t i = 0; i < sizeof uses / sizeof *uses; i++) use(c, uses[i]);
    use(c, 0);
    use(c, 2);
    assert_int_equal(s.fetched[0], 1);
    assert_int_equal(s.fetched[2], 1);
    use(c, 4); /* 3 was used once */
    use(c, 0);
    use(c, 2);
    assert_int_equal(s.fetched[0], 1);
    assert_int_equal(s.fetched[2], 1);
    use(c, 3);
    assert_int_equal(s.fetched[3], 2);
    close_cache(c, &s);
}

static void a_failure_is_told_and_forgotten(void **state) {
    (void)state;
    const int32_t key = 5;
    const uint8_t *slot = NULL;
    hd_err err = {0};
    source s;
    hd_expert_cache *c = open_cache(&s, SLOTS);
    s.broken = key;
    assert_int_equal(hd_expert_cache_pin(c, &key, 1), 1);
    assert_int_equal(hd_expert_cache_wait(c, key, &slot, &err), HD_EIO);
    assert_string_equal(err.msg, "shard-5: cannot be read");
    assert_null(slot);
    hd_expert_cache_unpin(c, &key, 1);
    s.broken = -1;
    use(c, key);
    assert_int_equal(hd_expert_cache_read_stats(c).failed, 1);
    close_cache(c, &s);
}

/* After a failure elsewhere, a layer is given up while its experts are being fetched. */
static void pins_can_be_given_up(void **state) {
    (void)state;
    static const int32_t keys[] = {0, 1, 2};
    source s;
    hd_expert_cache *c = open_cache(&s, SLOTS);
    let_pass(&s, 0);
    assert_int_equal(hd_expert_cache_pin(c, keys, 3), 3);
    hd_expert_cache_unpin(c, keys, 3);
    let_pass(&s, -1);
    for (int32_t key = 3; key < KEYS; key++) use(c, key);
    close_cache(c, &s);
}

static void one_slot_is_enough(void **state) {
    (void)state;
    source s;
    hd_expert_cache *c = open_cache(&s, 1);
    for (int32_t i = 0; i < 100; i++) use(c, i * 5 % KEYS);
    close_cache(c, &s);
}

int test_expert_cache(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_fits_is_fetched_once),
        cmocka_unit_test(pinned_experts_keep_their_slots),
        cmocka_unit_test(readers_wait_for_a_slow_source),
        cmocka_unit_test(the_least_used_leaves),
        cmocka_unit_test(a_failure_is_told_and_forgotten),
        cmocka_unit_test(pins_can_be_given_up),
        cmocka_unit_test(one_slot_is_enough),
    };
    return cmocka_run_group_tests_name("expert_cache", tests, NULL, NULL);
}
