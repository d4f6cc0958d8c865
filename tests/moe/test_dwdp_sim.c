/* test_dwdp_sim.c - DWDP on paper: cases that can be computed by hand. */
#include "check.h"

#include <math.h>
#include <string.h>

#include "base/checked.h"
#include "moe/dwdp_sim.h"

static hd_dwdp_sim_result run(const hd_dwdp_sim_args *a) {
    hd_dwdp_sim_result r;
    hd_err err = {0};
    if (hd_dwdp_simulate(&r, a, &err) != HD_OK) fail_msg("%s", err.msg);
    return r;
}

static void is_near(double have, double want) {
    if (fabs(have - want) > 0.002 * want + 1e-6) fail_msg("%g, not %g", have, want);
}

/* Ranks in step: what is fetched in time costs nothing, and what is not costs the rest. */
static void without_jitter(void **state) {
    (void)state;
    hd_dwdp_sim_args a = {.ranks = 4,
                          .layers = 100,
                          .depth = 1,
                          .compute_us = 1000,
                          .slowdown = 1,
                          .exchange_us = 50,
                          .fetch_us = 600,
                          .slices = 10,
                          .order = HD_DWDP_SLICED,
                          .seed = 1};
    hd_dwdp_sim_result r = run(&a);
    is_near(r.ep_us, 1050);
    is_near(r.ep_wait_us, 0);
    is_near(r.dwdp_us, 1000);
    is_near(r.exposed_us, 0);
    is_near(r.copy_us, 600 * 0.99); /* but the first layer */
    a.slowdown = 1.25;              /* 600 us at 4 / 5 */
    is_near(run(&a).dwdp_us, 1000 + 0.99 * 600 * 0.2);
    a.slowdown = 1;
    a.fetch_us = 1500;
    r = run(&a);
    is_near(r.dwdp_us, (99 * 1500 + 1000) / 100.0);
    is_near(r.exposed_us, 500 * 0.99);
}

/* All ranks at the link of the same peer: it serves 3, then 2 of them, and others none. */
static void one_order_for_all_shares_links(void **state) {
    (void)state;
    hd_dwdp_sim_args a = {.ranks = 4,
                          .layers = 50,
                          .depth = 1,
                          .compute_us = 100,
                          .slowdown = 1,
                          .fetch_us = 1500,
                          .slices = 10,
                          .seed = 1};
    double us[HD_DWDP_N_COPY_KINDS];
    for (int32_t o = 0; o < HD_DWDP_N_COPY_KINDS; o++) {
        a.order = (hd_dwdp_order)o;
        us[o] = run(&a).dwdp_us;
    }
    is_near(us[HD_DWDP_STAGGERED], us[HD_DWDP_SLICED]);
    is_near(us[HD_DWDP_TOGETHER], us[HD_DWDP_SLICED]);
    is_near(us[HD_DWDP_SLICED], (49 * 1500 + 100) / 50.0);
    assert_true(us[HD_DWDP_SAME] > 1.2 * us[HD_DWDP_SLICED]);
}

/* Ranks out of step share links, unless slices of all peers are under way together. */
static void jitter_makes_ranks_share_links(void **state) {
    (void)state;
    hd_dwdp_sim_args a = hd_dwdp_sim_default();
    double us[HD_DWDP_N_COPY_KINDS];
    a.layers = 500;
    for (int32_t o = 0; o < HD_DWDP_N_COPY_KINDS; o++) {
        a.order = (hd_dwdp_order)o;
        us[o] = run(&a).copy_us;
    }
    is_near(us[HD_DWDP_TOGETHER], a.fetch_us * 499 / 500);
    for (int32_t o = 0; o < HD_DWDP_TOGETHER; o++) {
        assert_true(us[o] > 1.15 * us[HD_DWDP_TOGETHER]);
    }
}

/* The published layer: 1319.9 us with expert parallelism, 1131.6 with DWDP. */
static void the_published_layer(void **state) {
    (void)state;
    hd_dwdp_sim_args a = hd_dwdp_sim_default();
    a.layers = 5800;
    const hd_dwdp_sim_result r = run(&a);
    assert_true(fabs(r.ep_us / 1319.9 - 1) < 0.01);
    assert_true(fabs(r.ep_wait_us / 161.9 - 1) < 0.03);
    assert_true(fabs(r.dwdp_us / 1131.6 - 1) < 0.01);
}

static void what_is_out_of_range_is_named(void **state) {
    (void)state;
    hd_dwdp_sim_args a = hd_dwdp_sim_default();
    hd_dwdp_sim_result r;
    hd_err err = {0};
    a.slowdown = 0.5;
    assert_int_equal(hd_dwdp_simulate(&r, &a, &err), HD_EINVAL);
    assert_string_equal(err.msg, "slowdown is 0.5; must be 1 to 100");
    err = (hd_err){0};
    a.slowdown = NAN;
    assert_int_equal(hd_dwdp_simulate(&r, &a, &err), HD_EINVAL);
}

int test_dwdp_sim(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(without_jitter),
        cmocka_unit_test(one_order_for_all_shares_links),
        cmocka_unit_test(jitter_makes_ranks_share_links),
        cmocka_unit_test(the_published_layer),
        cmocka_unit_test(what_is_out_of_range_is_named),
    };
    return cmocka_run_group_tests_name("dwdp_sim", tests, NULL, NULL);
}
