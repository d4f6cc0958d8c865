/* test_residency.c - which experts are resident follows their use, and settles. */
#include "check.h"

#include <string.h>

#include "base/checked.h"
#include "base/random_fill.h"
#include "moe/residency.h"

enum { LAYERS = 3, EXPERTS = 8, ROOM = 3 };

static hd_residency *open_full(void) {
    hd_residency *r;
    hd_err err = {0};
    if (hd_residency_open(&r, LAYERS, EXPERTS, &err) != HD_OK) fail_msg("%s", err.msg);
    for (int32_t l = 0; l < LAYERS; l++) {
        for (int32_t e = 0; e < ROOM; e++) hd_residency_set(r, l, e, l * ROOM + e);
    }
    return r;
}

static int32_t apply(hd_residency *r, const hd_residency_swap *s) {
    const int32_t slot = hd_residency_slot(r, s->layer, s->out);
    assert_int_not_equal(slot, HD_NOT_RESIDENT);
    assert_int_equal(hd_residency_slot(r, s->layer, s->in), HD_NOT_RESIDENT);
    hd_residency_set(r, s->layer, s->in, slot);
    hd_residency_set(r, s->layer, s->out, HD_NOT_RESIDENT);
    return slot;
}

static void the_most_used_become_resident(void **state) {
    (void)state;
    int64_t rows[LAYERS][EXPERTS] = {
        [1] = {5,  0, 0, 0, 9,  0, 0, 0 },
          [2] = {10, 0, 0, 0, 30, 0, 0, 20}
    };
    hd_residency *r = open_full();
    hd_residency_swap s;
    assert_false(hd_residency_next(r, &s));
    hd_residency_look(r, rows[0]);
    static const hd_residency_swap want[] = {
        {2, 4, 1},
        {2, 7, 2},
        {1, 4, 1},
    };
    for (size_t i = 0; i < HD_LEN(want); i++) {
        assert_true(hd_residency_next(r, &s));
        assert_memory_equal(&s, &want[i], sizeof s);
        apply(r, &s);
    }
    assert_false(hd_residency_next(r, &s));
    hd_residency_close(r);
}

static void about_the_same_use_moves_nothing(void **state) {
    (void)state;
    int64_t rows[LAYERS][EXPERTS] = {
        {100, 100, 100, 125, 0, 0, 0, 0}
    };
    hd_residency *r = open_full();
    hd_residency_swap s;
    hd_residency_look(r, rows[0]);
    assert_false(hd_residency_next(r, &s));
    hd_residency_look(r, rows[0]); /* nothing since: old use counts half */
    rows[0][3] += 40;              /* 62 + 40 against 50 */
    hd_residency_look(r, rows[0]);
    assert_true(hd_residency_next(r, &s));
    assert_int_equal(s.in, 3);
    hd_residency_close(r);
}

/* Whatever is used, after the swaps no other expert has clearly more rows, and every slot has one
 * expert. */
static void swaps_end(void **state) {
    (void)state;
    int64_t rows[LAYERS][EXPERTS] = {{0}};
    hd_residency *r = open_full();
    hd_residency_swap s;
    for (uint64_t look = 0; look < 100; look++) {
        for (int32_t i = 0; i < LAYERS * EXPERTS; i++) {
            rows[i / EXPERTS][i % EXPERTS] +=
                (int64_t)(hd_random_fill_at(look, (uint64_t)i) % 1000);
        }
        hd_residency_look(r, rows[0]);
        int32_t swaps = 0;
        while (hd_residency_next(r, &s)) {
            apply(r, &s);
            assert_true(++swaps <= LAYERS * ROOM);
        }
        bool taken[LAYERS * ROOM] = {false};
        for (int32_t i = 0; i < LAYERS * EXPERTS; i++) {
            const int32_t slot = hd_residency_slot(r, i / EXPERTS, i % EXPERTS);
            if (slot == HD_NOT_RESIDENT) continue;
            assert_int_equal(slot / ROOM, i / EXPERTS);
            assert_false(taken[slot]);
            taken[slot] = true;
        }
        for (int32_t i = 0; i < LAYERS * ROOM; i++) assert_true(taken[i]);
    }
    hd_residency_close(r);
}

int test_residency(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_most_used_become_resident),
        cmocka_unit_test(about_the_same_use_moves_nothing),
        cmocka_unit_test(swaps_end),
    };
    return cmocka_run_group_tests_name("residency", tests, NULL, NULL);
}
