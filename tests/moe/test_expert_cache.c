/* test_expert_cache.c - experts in staging slots: who gets one, who leaves, and what a reader may
 * see. The source poisons a slot before it fills it, and fetches only what the test lets pass. */
#include "check.h"

#include <pthread.h>
#include <sched.h>

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

/* Waits until the source has been asked n times in all. */
static void wait_for_fetches(hd_expert_cache *c, int64_t n) {
    while (hd_expert_cache_read_stats(c).fetched < n) sched_yield();
}

static void what_is_expected_is_fetched_ahead(void **state) {
    (void)state;
    static const int32_t keys[] = {3, 6, 1};
    int32_t elsewhere[] = {3, 0, 6, 1};
    source s;
    hd_expert_cache *c = open_cache(&s, SLOTS);
    use(c, 0);
    assert_int_equal(hd_expert_cache_elsewhere(c, elsewhere, 4), 3);
    assert_memory_equal(elsewhere, keys, sizeof keys);
    hd_expert_cache_expect(c, keys, 3, 2);
    wait_for_fetches(c, 3);
    assert_int_equal(s.fetched[3], 1);
    assert_int_equal(s.fetched[6], 1);
    assert_int_equal(s.fetched[1], 0); /* two at most */
    use(c, 3);
    use(c, 6);
    const hd_expert_cache_stats stats = hd_expert_cache_read_stats(c);
    assert_int_equal(stats.ahead, 2);
    assert_int_equal(stats.staged, 2);
    assert_int_equal(stats.fetched, 3);
    close_cache(c, &s);
}

static void what_is_pinned_is_fetched_first(void **state) {
    (void)state;
    static const int32_t pinned[] = {0, 1}, ahead[] = {2};
    source s;
    hd_expert_cache *c = open_cache(&s, SLOTS);
    let_pass(&s, 0);
    assert_int_equal(hd_expert_cache_pin(c, pinned, 2), 2);
    hd_expert_cache_expect(c, ahead, 1, 1);
    let_pass(&s, 1);
    wait_for_fetches(c, 1);
    let_pass(&s, 0);
    assert_int_equal(hd_expert_cache_read_stats(c).ahead, 0); /* one is on its way still */
    let_pass(&s, -1);
    wait_for_fetches(c, 3);
    assert_int_equal(hd_expert_cache_read_stats(c).ahead, 1);
    expect_bytes(c, 0);
    expect_bytes(c, 1);
    hd_expert_cache_unpin(c, pinned, 2);
    use(c, 2);
    assert_int_equal(s.fetched[2], 1);
    close_cache(c, &s);
}

/* Neither pinned keys nor expected ones leave for those that are fetched ahead. */
static void what_is_expected_stays(void **state) {
    (void)state;
    static const int32_t pinned[] = {0}, expected[] = {1, 5, 6};
    source s;
    hd_expert_cache *c = open_cache(&s, SLOTS);
    for (int32_t i = 0; i < 9; i++) use(c, 2);
    use(c, 1);
    assert_int_equal(hd_expert_cache_pin(c, pinned, 1), 1);
    expect_bytes(c, 0);
    hd_expert_cache_expect(c, expected, 3, 3);
    wait_for_fetches(c, 4); /* 5 takes the place of 2, and there is none for 6 */
    expect_bytes(c, 0);
    use(c, 1);
    use(c, 5);
    hd_expert_cache_expect(c, NULL, 0, 0);
    hd_expert_cache_unpin(c, pinned, 1);
    const hd_expert_cache_stats stats = hd_expert_cache_read_stats(c);
    assert_int_equal(stats.fetched, 4);
    assert_int_equal(stats.staged, 8 + 2);
    for (int32_t key = 3; key < KEYS; key++)
        use(c, key); /* all leave, when nothing is expected */
    close_cache(c, &s);
}

/* What was expected and not begun is no more, and takes no slot. */
static void expectations_are_given_up(void **state) {
    (void)state;
    static const int32_t pinned[] = {0}, ahead[] = {4, 5}, others[] = {6, 7};
    source s;
    hd_expert_cache *c = open_cache(&s, SLOTS);
    let_pass(&s, 0);
    assert_int_equal(hd_expert_cache_pin(c, pinned, 1), 1);
    hd_expert_cache_expect(c, ahead, 2, 2);
    assert_true(hd_expert_cache_is_full(c));
    hd_expert_cache_expect(c, others, 2, 1);
    assert_false(hd_expert_cache_is_full(c));
    let_pass(&s, -1);
    wait_for_fetches(c, 2);
    expect_bytes(c, 0);
    hd_expert_cache_unpin(c, pinned, 1);
    use(c, 6);
    assert_int_equal(s.fetched[6], 1);
    assert_int_equal(s.fetched[4] + s.fetched[5] + s.fetched[7], 0);
    close_cache(c, &s);
}

/* A key that is pinned before a thread has begun with it is fetched once. */
static void what_was_to_be_fetched_ahead_is_pinned(void **state) {
    (void)state;
    static const int32_t first[] = {0}, ahead[] = {4, 5};
    source s;
    hd_expert_cache *c = open_cache(&s, SLOTS);
    let_pass(&s, 0);
    assert_int_equal(hd_expert_cache_pin(c, first, 1), 1);
    hd_expert_cache_expect(c, ahead, 2, 2);
    assert_int_equal(hd_expert_cache_pin(c, ahead, 2), 2);
    let_pass(&s, -1);
    for (int32_t i = 0; i < 2; i++) expect_bytes(c, ahead[i]);
    expect_bytes(c, 0);
    assert_int_equal(s.fetched[4] + s.fetched[5], 2);
    assert_int_equal(hd_expert_cache_read_stats(c).ahead, 0);
    assert_int_equal(hd_expert_cache_read_stats(c).staged, 0);
    hd_expert_cache_unpin(c, ahead, 2);
    hd_expert_cache_unpin(c, first, 1);
    close_cache(c, &s);
}

/* A fetch that failed ahead is tried again, and fails nobody who did not ask. */
static void a_failure_ahead_is_tried_again(void **state) {
    (void)state;
    static const int32_t ahead[] = {5};
    source s;
    hd_expert_cache *c = open_cache(&s, SLOTS);
    s.broken = 5;
    hd_expert_cache_expect(c, ahead, 1, 1);
    wait_for_fetches(c, 1);
    s.broken = -1;
    use(c, 5);
    assert_int_equal(s.fetched[5], 2);
    close_cache(c, &s);
}

static void one_slot_is_enough(void **state) {
    (void)state;
    source s;
    hd_expert_cache *c = open_cache(&s, 1);
    for (int32_t i = 0; i < 100; i++) {
        const int32_t next[] = {(i + 1) * 5 % KEYS, i % KEYS};
        use(c, i * 5 % KEYS);
        hd_expert_cache_expect(c, next, 1 + i % 2 * (next[0] != next[1]), 2);
    }
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
        cmocka_unit_test(what_is_expected_is_fetched_ahead),
        cmocka_unit_test(what_is_pinned_is_fetched_first),
        cmocka_unit_test(what_is_expected_stays),
        cmocka_unit_test(expectations_are_given_up),
        cmocka_unit_test(what_was_to_be_fetched_ahead_is_pinned),
        cmocka_unit_test(a_failure_ahead_is_tried_again),
        cmocka_unit_test(one_slot_is_enough),
    };
    return cmocka_run_group_tests_name("expert_cache", tests, NULL, NULL);
}
