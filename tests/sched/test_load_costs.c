/* test_load_costs.c - which of a prompt's pages are read, on simulated devices whose times are
 * known. */
#include "check.h"

#include <math.h>

#include "sched/load_costs.h"

enum { PAGE = 128, FULL_BYTES = 1000, WINDOW_BYTES = 9000 };

typedef struct device {
    double step, row, byte; /* ns */
} device;

static int64_t time_of(const device *d, int32_t rows, const int32_t copied[HD_N_KV_GROUPS]) {
    const double computing = d->step > rows * d->row ? d->step : rows * d->row;
    return (int64_t)(computing + d->byte * (copied[0] * FULL_BYTES + copied[1] * WINDOW_BYTES));
}

static void step(sched_load_costs *c, const device *d, int32_t rows, int32_t full,
                 int32_t window) {
    const int32_t copied[HD_N_KV_GROUPS] = {full, window};
    sched_load_costs_took(c, time_of(d, rows, copied), rows, copied);
}

static sched_load_costs fresh(void) {
    return (sched_load_costs){
        .least_rows = PAGE, .page_bytes = {FULL_BYTES, WINDOW_BYTES}
    };
}

static bool is_near(double value, double expected) {
    return fabs(value - expected) <= 0.01 * expected;
}

static void costs_are_those_of_the_device(void **state) {
    (void)state;
    const device d = {.step = 3e5, .row = 1e4, .byte = 20};
    sched_load_costs c = fresh();
    assert_true(sched_load_costs_of(&c).token == 0);
    step(&c, &d, 4, 8, 1); /* says nothing before a row's time is known */
    step(&c, &d, 4, 0, 0);
    step(&c, &d, 2 * PAGE, 0, 0);
    assert_true(sched_load_costs_of(&c).page[HD_KV_FULL] == 0);
    for (int i = 0; i < 10; i++) step(&c, &d, i * 40, 8 - i % 3, i % 2);
    const hd_cache_costs costs = sched_load_costs_of(&c);
    assert_true(is_near(costs.token, d.row));
    assert_true(is_near(costs.page[HD_KV_FULL], d.byte * FULL_BYTES));
    assert_true(is_near(costs.page[HD_KV_WINDOW], d.byte * WINDOW_BYTES));
}

/* Without the bytes of pages nothing is weighed. */
static void without_bytes_there_are_no_costs(void **state) {
    (void)state;
    const device d = {.step = 3e5, .row = 1e4, .byte = 20};
    sched_load_costs c = {.least_rows = PAGE};
    for (int i = 0; i < 10; i++) step(&c, &d, PAGE, i % 2, 0);
    assert_true(sched_load_costs_of(&c).token == 0);
}

/* How many of n requests read their pages, where reading takes so many times what computing
 * does. */
static int32_t reads_of(double times, int32_t n) {
    const device d = {.step = 1e5, .row = 1e4, .byte = times * 1e4 * PAGE / FULL_BYTES};
    sched_load_costs c = fresh();
    int32_t reads = 0;
    step(&c, &d, PAGE, 0, 0);
    for (int32_t i = 0; i < n; i++) {
        const hd_cache_costs costs = sched_load_costs_of(&c);
        const bool sooner = costs.page[HD_KV_FULL] <= costs.token * PAGE;
        reads += sooner;
        if (!sooner) sched_load_costs_declined(&c);
        step(&c, &d, sooner ? 4 : PAGE, sooner, 0);
    }
    return reads;
}

static void slow_reading_is_tried_rarely(void **state) {
    (void)state;
    assert_int_equal(reads_of(0.01, 1000), 1000);
    assert_int_equal(reads_of(0.9, 1000), 1000);
    assert_in_range(reads_of(2, 1000), 2, 60);
    assert_in_range(reads_of(20, 1000), 2, 15);
}

/* One slow step, as of a machine that paused, does not keep pages in host memory for ever. */
static void reading_is_tried_again(void **state) {
    (void)state;
    const device slow = {.step = 1e5, .row = 1e4, .byte = 1e6};
    const device fast = {.step = 1e5, .row = 1e4, .byte = 1};
    sched_load_costs c = fresh();
    step(&c, &slow, PAGE, 0, 0);
    step(&c, &slow, 4, 0, 0);
    step(&c, &slow, 4, 1, 0);
    int32_t declined = 0;
    for (; sched_load_costs_of(&c).page[HD_KV_FULL] > sched_load_costs_of(&c).token * PAGE;
         declined++) {
        sched_load_costs_declined(&c);
    }
    assert_in_range(declined, 100, 1000);
    for (int i = 0; i < 20; i++) step(&c, &fast, 4, 1, 0);
    assert_true(sched_load_costs_of(&c).page[HD_KV_FULL] < 2 * FULL_BYTES);
}

int test_load_costs(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(costs_are_those_of_the_device),
        cmocka_unit_test(without_bytes_there_are_no_costs),
        cmocka_unit_test(slow_reading_is_tried_rarely),
        cmocka_unit_test(reading_is_tried_again),
    };
    return cmocka_run_group_tests_name("load_costs", tests, NULL, NULL);
}
