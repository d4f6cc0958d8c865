/* test_read_ahead.c - whether reading ahead pays, as the formula of moe/read_ahead.h says. */
#include "check.h"

#include "moe/read_ahead.h"

static void nothing_is_read_before_something_is_known(void **state) {
    (void)state;
    const hd_read_ahead r = {0};
    assert_int_equal(hd_read_ahead_most(&r, 1000), 0);
}

static hd_read_ahead learned(int32_t predicted, int32_t right, int64_t lead_ns) {
    hd_read_ahead r = {0};
    for (int32_t i = 0; i < 1000; i++) hd_read_ahead_learn(&r, predicted, right, lead_ns);
    return r;
}

/* Simulated: what one read ahead gains in the mean, beside what it costs. */
static double gain(double p, double lead, double read) {
    return p * (lead < read ? lead : read) - (1 - p) * (lead < read ? read - lead : 0);
}

static void it_pays_where_it_gains(void **state) {
    (void)state;
    for (int32_t right = 0; right <= 8; right++) {
        for (int64_t lead = 1; lead <= 33; lead += 2) {
            const hd_read_ahead r = learned(8, right, lead * 100);
            const double g = gain(right / 8.0, (double)lead * 100, 1600);
            if (g > -1e-9 && g < 1e-9) continue;
            assert_int_equal(hd_read_ahead_most(&r, 1600) > 0, g > 0 && right > 4);
        }
    }
}

static void as_many_as_fit_and_one_more(void **state) {
    (void)state;
    const hd_read_ahead r = learned(6, 5, 1050);
    assert_int_equal(hd_read_ahead_most(&r, 100), 11);
    assert_int_equal(hd_read_ahead_most(&r, 1000), 2);
    assert_int_equal(hd_read_ahead_most(&r, 2000), 1);
    assert_int_equal(hd_read_ahead_most(&r, 10000), 0);
    assert_int_equal(hd_read_ahead_most(&r, 0), 1000000);
}

static void old_layers_count_less(void **state) {
    (void)state;
    hd_read_ahead r = learned(4, 4, 100);
    assert_true(hd_read_ahead_most(&r, 1000) > 0);
    for (int32_t i = 0; i < 20; i++) hd_read_ahead_learn(&r, 4, 1, 100);
    assert_true(hd_read_ahead_most(&r, 200) > 0);
    for (int32_t i = 0; i < 200; i++) hd_read_ahead_learn(&r, 4, 1, 100);
    assert_int_equal(hd_read_ahead_most(&r, 200), 0);
}

int test_read_ahead(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_is_read_before_something_is_known),
        cmocka_unit_test(it_pays_where_it_gains),
        cmocka_unit_test(as_many_as_fit_and_one_more),
        cmocka_unit_test(old_layers_count_less),
    };
    return cmocka_run_group_tests_name("read_ahead", tests, NULL, NULL);
}
