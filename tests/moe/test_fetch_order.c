/* test_fetch_order.c - slices of a fetch: every byte once, each peer in turn. */
#include "check.h"

#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/random_fill.h"
#include "moe/fetch_order.h"

enum { MOST = 40, BYTES = 1000 };

static hd_fetch_order order_of(const hd_fetch_copy *copies, int32_t n, int32_t peers,
                               int32_t first, size_t slice) {
    hd_fetch_order o;
    hd_err err = {0};
    if (hd_fetch_order_open(&o, copies, n, peers, first, slice, &err) != HD_OK) {
        fail_msg("%s", err.msg);
    }
    return o;
}

static void each_peer_gives_a_slice_in_turn(void **state) {
    (void)state;
    static uint8_t to[3][100], from[3][100];
    const hd_fetch_copy copies[] = {
        {0, 70, to[0], from[0], 50 },
        {2, 72, to[2], from[2], 100},
        {1, 71, to[1], from[1], 30 },
    };
    static const struct {
        int32_t peer;
        size_t at, bytes;
    } want[] = {
        {2, 0,  40},
        {0, 0,  40},
        {1, 0,  30},
        {2, 40, 40},
        {0, 40, 10},
        {2, 80, 20},
    };
    hd_fetch_order o = order_of(copies, 3, 4, 2, 40);
    assert_int_equal(o.n, HD_LEN(want));
    for (int32_t i = 0; i < o.n; i++) {
        const int32_t p = want[i].peer;
        assert_int_equal(o.slices[i].peer, p);
        assert_int_equal(o.slices[i].what, 70 + p);
        assert_ptr_equal(o.slices[i].to, to[p] + want[i].at);
        assert_ptr_equal(o.slices[i].from, from[p] + want[i].at);
        assert_int_equal(o.slices[i].bytes, want[i].bytes);
    }
    hd_fetch_order_close(&o);
}

/* While several peers have slices left, no peer gives two in a row. */
static void check_turns(const hd_fetch_order *o, int32_t peers) {
    for (int32_t i = 0; i + 1 < o->n; i++) {
        bool others = false;
        for (int32_t k = i + 1; k < o->n; k++) others |= o->slices[k].peer != o->slices[i].peer;
        if (others) assert_int_not_equal(o->slices[i + 1].peer, o->slices[i].peer);
        assert_in_range(o->slices[i].peer, 0, peers - 1);
    }
}

static void every_byte_is_copied_once(void **state) {
    (void)state;
    static uint8_t to[MOST][BYTES], from[MOST][BYTES];
    hd_fetch_copy copies[MOST];
    for (uint64_t trial = 0; trial < 200; trial++) {
        const int32_t peers = 1 + (int32_t)(hd_random_fill_at(trial, 0) % 5);
        const int32_t n = (int32_t)(hd_random_fill_at(trial, 1) % MOST);
        const size_t slice = 1 + hd_random_fill_at(trial, 2) % 300;
        memset(to, 0, sizeof to);
        for (int32_t i = 0; i < n; i++) {
            const uint64_t at = 10 + 2 * (uint64_t)i;
            copies[i] =
                (hd_fetch_copy){(int32_t)(hd_random_fill_at(trial, at) % (uint64_t)peers), 0,
                                to[i], from[i], hd_random_fill_at(trial, at + 1) % BYTES};
            memset(from[i], 1 + i, copies[i].bytes);
        }
        hd_fetch_order o = order_of(copies, n, peers, (int32_t)trial % peers, slice);
        for (int32_t i = 0; i < o.n; i++) {
            uint8_t *at = o.slices[i].to;
            assert_in_range(o.slices[i].bytes, 1, slice);
            for (size_t b = 0; b < o.slices[i].bytes; b++) assert_int_equal(at[b], 0);
            memcpy(at, o.slices[i].from, o.slices[i].bytes);
        }
        for (int32_t i = 0; i < n; i++) assert_memory_equal(to[i], from[i], copies[i].bytes);
        check_turns(&o, peers);
        hd_fetch_order_close(&o);
    }
}

int test_fetch_order(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_peer_gives_a_slice_in_turn),
        cmocka_unit_test(every_byte_is_copied_once),
    };
    return cmocka_run_group_tests_name("fetch_order", tests, NULL, NULL);
}
