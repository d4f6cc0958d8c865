/* test_simulate.c - simulated steps of experts on ranks: a case by hand, conservation of rows,
 * what plans bring on later steps, the trigger. */
#include "check.h"

#include <math.h>
#include <stdlib.h>

#include "moe/simulate.h"

static hd_sim_result run(const hd_sim_args *a) {
    hd_sim_result r;
    hd_err err = {0};
    if (hd_simulate(&r, a, &err) != HD_OK) fail_msg("%s", err.msg);
    return r;
}

static void assert_near(double a, double b) {
    if (!(fabs(a - b) <= 1e-9 * fabs(b))) fail_msg("%.17g instead of %.17g", a, b);
}

static hd_traffic generate(const hd_traffic_spec *spec) {
    hd_traffic t;
    hd_err err = {0};
    if (hd_traffic_generate(&t, spec, &err) != HD_OK) fail_msg("%s", err.msg);
    return t;
}

/* Two ranks, four experts, one layer: 6 2 1 1 rows in every pass. */
static void a_case_by_hand(void **state) {
    (void)state;
    int64_t rows[12 * 4];
    int32_t layer = 3, tokens[12];
    for (int32_t p = 0; p < 12; p++) {
        tokens[p] = 5;
        rows[4 * p] = 6;
        rows[4 * p + 1] = 2;
        rows[4 * p + 2] = rows[4 * p + 3] = 1;
    }
    const hd_traffic t = {.passes = 12,
                          .layers = 1,
                          .experts = 4,
                          .top_k = 2,
                          .layer = &layer,
                          .tokens = tokens,
                          .rows = rows};
    hd_sim_args a = {
        .traffic = &t,
        .slots = 4,
        .ranks = 2,
        .batch = 2,
        .window = 1,
        .fabric = {.layer_us = 100,
                   .expert_us = 10,
                   .row_us = 1,
                   .row_bytes = 1000,
                   .link_gb_s = 1, /* a row takes a microsecond */
                   .expert_bytes = 1,
                   .move_gb_s = 1}
    };
    hd_sim_result r = run(&a); /* rows 16 and 4 of two passes */
    assert_int_equal(r.n_steps, 5);
    assert_near(r.total.balancedness, 10.0 / 16);
    assert_near(r.total.lowest, 10.0 / 16);
    assert_near(r.total.most, 5 * 16.0);
    assert_near(r.total.bound, 10.0 / 12); /* the hottest expert is on one rank */
    assert_near(r.step_us, 100 + 2 * 10 + 16 * 2);
    assert_near(r.tokens_per_s, 10 / 152e-6);
    assert_near(r.total.ranks_per_token, 2 - 0.2 * 0.2 - 0.8 * 0.8);
    assert_int_equal(r.total.moves + r.plans, 0);
    hd_sim_result_close(&r);
    a.plan = HD_SIM_HADAL; /* 12 + 2 and 4 + 2 */
    r = run(&a);
    assert_near(r.total.balancedness, 10.0 / 14);
    hd_sim_result_close(&r);
    a.slots = 6; /* a copy of the hottest on each rank */
    for (int split = HD_SIM_EVEN; split <= HD_SIM_EXACT; split++) {
        a.plan = HD_SIM_HADAL;
        a.split = (hd_sim_split)split;
        r = run(&a);
        if (split != HD_SIM_RANDOM) assert_near(r.total.balancedness, 1);
        assert_true(r.total.balancedness > 0.6 && r.total.bound >= 1 - 1e-12);
        assert_true(split != HD_SIM_RANDOM || r.total.balancedness < 1);
        hd_sim_result_close(&r);
    }
}

/* No split of any map is better than the bound, and the exact one is never worse than others. */
static void splits_keep_their_order(void **state) {
    (void)state;
    const hd_traffic_spec spec = {.passes = 24,
                                  .layers = 2,
                                  .experts = 64,
                                  .top_k = 6,
                                  .tokens = 512,
                                  .seed = 3,
                                  .lognormal = 1,
                                  .jitter = 0.3};
    hd_traffic t = generate(&spec);
    for (int32_t plan = HD_SIM_NONE; plan <= HD_SIM_FLOW; plan++) {
        double b[5];
        for (int split = HD_SIM_EVEN; split <= HD_SIM_LOCAL; split++) {
            const hd_sim_args a = {.traffic = &t,
                                   .slots = 80,
                                   .ranks = 8,
                                   .nodes = 1,
                                   .plan = (hd_sim_plan)plan,
                                   .split = (hd_sim_split)split,
                                   .batch = 1,
                                   .window = 8,
                                   .max_moves = -1,
                                   .fabric = hd_sim_default_fabric()};
            hd_sim_result r = run(&a);
            b[split] = r.total.balancedness;
            for (int32_t l = 0; l < 2; l++) {
                assert_true(r.of_layers[l].balancedness <= r.of_layers[l].bound + 1e-12);
                assert_true(r.of_layers[l].lowest <= r.of_layers[l].balancedness);
                assert_true(r.of_layers[l].most >= 16 * 512 * 6 / 8.0);
            }
            hd_sim_result_close(&r);
        }
        for (int split = HD_SIM_EVEN; split <= HD_SIM_LOCAL; split++) {
            assert_true(b[split] <= b[HD_SIM_EXACT] + 1e-12);
        }
        if (plan == HD_SIM_FLOW) assert_true(b[HD_SIM_LOCAL] > b[HD_SIM_EVEN] + 0.05);
    }
    hd_traffic_close(&t);
}

/* The figures of next batches: published 0.94, flow 0.99 at 32 ranks of 1024 rows. */
static void later_steps_judge_plans(void **state) {
    (void)state;
    const hd_traffic_spec spec = {.passes = 40,
                                  .layers = 1,
                                  .experts = 256,
                                  .top_k = 8,
                                  .tokens = 4096,
                                  .seed = 1,
                                  .lognormal = 1};
    hd_traffic t = generate(&spec);
    hd_sim_args a = {.traffic = &t,
                     .slots = 288,
                     .ranks = 32,
                     .nodes = 1,
                     .plan = HD_SIM_PUBLISHED,
                     .batch = 1,
                     .window = 30,
                     .max_moves = -1,
                     .fabric = hd_sim_default_fabric()};
    hd_sim_result published = run(&a);
    a.split = HD_SIM_RANDOM;
    hd_sim_result random = run(&a);
    assert_true(random.total.balancedness < published.total.balancedness);
    hd_sim_result_close(&random);
    a.plan = HD_SIM_FLOW;
    a.split = HD_SIM_EXACT;
    hd_sim_result flow = run(&a);
    assert_true(fabs(published.total.balancedness - 0.942) < 0.015);
    assert_true(flow.total.balancedness > 0.985);
    assert_true(flow.tokens_per_s > published.tokens_per_s);
    hd_sim_result_close(&published);
    hd_sim_result_close(&flow);
    hd_traffic_close(&t);
}

/* Repairs move few experts; a plan that does not pay within the horizon is not taken. */
static void moves_must_pay(void **state) {
    (void)state;
    const hd_traffic_spec spec = {.passes = 120,
                                  .layers = 1,
                                  .experts = 128,
                                  .top_k = 8,
                                  .tokens = 2048,
                                  .seed = 9,
                                  .lognormal = 0.8,
                                  .drift = 0.03};
    hd_traffic t = generate(&spec);
    hd_sim_args a = {.traffic = &t,
                     .slots = 144,
                     .ranks = 16,
                     .nodes = 1,
                     .plan = HD_SIM_PUBLISHED,
                     .batch = 1,
                     .window = 16,
                     .every = 16,
                     .max_moves = -1,
                     .fabric = hd_sim_default_fabric()};
    hd_sim_result anew = run(&a);
    a.plan = HD_SIM_HADAL;
    hd_sim_result repaired = run(&a);
    assert_int_equal(anew.looks, 7);
    assert_int_equal(anew.plans, 7);
    assert_true(repaired.total.moves > 0 && repaired.total.moves < anew.total.moves / 4);
    assert_true(repaired.total.balancedness > anew.total.balancedness - 0.03);
    int64_t moves = 0;
    for (int32_t i = 0; i < anew.n_steps; i++) moves += anew.steps[i].moves;
    assert_int_equal(moves, anew.total.moves);
    a.max_moves = 3;
    hd_sim_result few = run(&a);
    assert_true(few.total.moves <= 6 * 3);
    a.horizon = 1; /* one step saves less than any move costs */
    hd_sim_result never = run(&a);
    assert_true(never.plans <= 1 && never.total.moves == 0 && never.looks == 7);
    hd_sim_result_close(&anew);
    hd_sim_result_close(&repaired);
    hd_sim_result_close(&few);
    hd_sim_result_close(&never);
    hd_traffic_close(&t);
}

static void numbers_must_fit(void **state) {
    (void)state;
    const hd_traffic_spec spec = {
        .passes = 8, .layers = 1, .experts = 8, .top_k = 2, .tokens = 16, .lognormal = 1};
    hd_traffic t = generate(&spec);
    const hd_sim_args good = {.traffic = &t, .slots = 8, .ranks = 4, .batch = 1, .window = 7};
    hd_sim_result r;
    hd_err err = {0};
    hd_sim_args bad[] = {good, good, good, good, good};
    bad[0].slots = 7;
    bad[1].window = 8;
    bad[2].batch = 2;
    bad[3].ranks = 9;
    bad[4].batch = 0;
    for (size_t i = 0; i < HD_LEN(bad); i++) {
        assert_int_equal(hd_simulate(&r, &bad[i], &err), HD_EINVAL);
        assert_true(err.msg[0] != '\0');
    }
    hd_traffic_close(&t);
}

int test_simulate(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_case_by_hand),          cmocka_unit_test(splits_keep_their_order),
        cmocka_unit_test(later_steps_judge_plans), cmocka_unit_test(moves_must_pay),
        cmocka_unit_test(numbers_must_fit),
    };
    return cmocka_run_group_tests_name("simulate", tests, NULL, NULL);
}
