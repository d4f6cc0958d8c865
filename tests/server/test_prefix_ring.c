/* test_prefix_ring.c - hashes that routers sent are told in their order, once, until they are overwritten or
 * the cache is flushed. */
#include "check.h"

#include <stdio.h>
#include <string.h>

#include "base/base64.h"
#include "base/checked.h"
#include "server/prefix_ring.h"

enum { PLACES = 16384, REPORTED = 4096, SENT = 96 };

static prefix_ring *ring;
static uint64_t got[REPORTED + 1];

static int open_ring(void **state) {
    (void)state;
    return prefix_ring_open(&ring, NULL) == HD_OK ? 0 : -1;
}

static int close_ring(void **state) {
    (void)state;
    prefix_ring_close(ring);
    return 0;
}

/* Sends hashes first .. first + n - 1 as routers do. */
static void send(uint64_t first, size_t n) {
    while (n) {
        uint64_t hashes[SENT];
        char text[SENT * 8 * 4 / 3 + 5];
        const size_t some = n < SENT ? n : SENT;
        for (size_t i = 0; i < some; i++) hashes[i] = first + i;
        hd_base64_encode(text, (const uint8_t *)hashes, some * sizeof *hashes);
        text[hd_base64_length(some * sizeof *hashes)] = '\0';
        prefix_ring_add(ring, text);
        first += some;
        n -= some;
    }
}

/* Reads what is behind a place, and moves it. Returns how many hashes there are. */
static size_t read_ring(char place[64]) {
    json_t *report = prefix_ring_report(ring, place);
    const json_t *text = json_object_get(report, "hashes");
    size_t n = 0;
    assert_non_null(text);
    if (json_string_length(text)) {
        assert_true(hd_base64_decode((uint8_t *)got, &n, json_string_value(text),
                                     json_string_length(text)));
    }
    snprintf(place, 64, "%lld.%lld",
             (long long)json_integer_value(json_object_get(report, "epoch")),
             (long long)json_integer_value(json_object_get(report, "next")));
    json_decref(report);
    return n / sizeof *got;
}

static void what_was_sent_is_told_once(void **state) {
    (void)state;
    char place[64] = "0.0", other[64] = "nonsense";
    assert_int_equal(read_ring(place), 0);
    send(1, 5);
    send(1, 7); /* the next turn of a conversation */
    assert_int_equal(read_ring(place), 7);
    for (uint64_t i = 0; i < 7; i++) assert_true(got[i] == i + 1);
    assert_int_equal(read_ring(place), 0);
    assert_int_equal(read_ring(other), 7); /* another router */
    assert_string_equal(place, other);
    send(8, 1);
    assert_int_equal(read_ring(place), 1);
}

static void the_newest_are_kept(void **state) {
    (void)state;
    char place[64] = "0.0";
    size_t n = 0, all = 0;
    send(1000, 3 * PLACES);
    send(1, 1); /* the oldest of all, sent again */
    while ((n = read_ring(place)) > 0) {
        assert_true(n <= REPORTED);
        all += n;
    }
    assert_int_equal(all, PLACES);
    assert_true(got[all % REPORTED ? all % REPORTED - 1 : REPORTED - 1] == 1);
}

static void a_flush_begins_an_epoch(void **state) {
    (void)state;
    char place[64] = "0.0", before[64];
    while (read_ring(place) > 0) {
    }
    memcpy(before, place, sizeof before);
    prefix_ring_forget(ring);
    assert_int_equal(read_ring(place), 0);
    assert_string_not_equal(place, before);
    send(1, 2);
    assert_int_equal(read_ring(before), 2); /* the place of the former epoch is none */
}

static void nonsense_changes_nothing(void **state) {
    (void)state;
    static const char *const bad[] = {
        "", "A", "AAAA", "AQAAAAAAAA==", "?QAAAAAAAAA=", "AAAAAAAAAAA="};
    char place[64] = "0.0", long_text[8 * 300];
    while (read_ring(place) > 0) {
    }
    prefix_ring_add(ring, NULL);
    for (size_t i = 0; i < HD_LEN(bad); i++) prefix_ring_add(ring, bad[i]);
    memset(long_text, 'A', sizeof long_text - 1);
    long_text[sizeof long_text - 1] = '\0';
    prefix_ring_add(ring, long_text);
    assert_int_equal(read_ring(place), 0);
}

int test_prefix_ring(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_was_sent_is_told_once),
        cmocka_unit_test(the_newest_are_kept),
        cmocka_unit_test(a_flush_begins_an_epoch),
        cmocka_unit_test(nonsense_changes_nothing),
    };
    return cmocka_run_group_tests_name("prefix_ring", tests, open_ring, close_ring);
}
