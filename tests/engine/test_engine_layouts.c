/* test_engine_layouts.c - layouts of ranks that are refused, with the reason, and those that --layout auto
 * chooses by the memory of a rank. */
#include "check.h"

#include <string.h>

#include "engine/engine.h"
#include "fakes/engine_rig.h"

typedef struct layout {
    const char *model;
    int32_t tp, ep, dp;
    bool sums; /* sum_in_ranks */
    int32_t cp;
} layout;

static void what_cannot_be_divided_is_refused(void **state) {
    (void)state;
    static const struct {
        layout l;
        const char *backend;
        bool pin;
        const char *why;
    } cases[] = {
        {{TINY, 2, 1, 1, true, 1},                               "cpu",  false, "cuts through its quantization blocks"   },
        {{TINY, 4, 2, 1, true, 1},                               "cpu",  false, "sums in ranks with etp 2"               },
        {{TINY, 4, 6, 1, false, 1},                              "cpu",  false, "one must be a multiple of the other"    },
        {{TINY, 65, 1, 1, false, 1},                             "cpu",  false, "tp is 65; must be 1 to 64"              },
        {{TINY, 1, -1, 1, false, 1},                             "cpu",  false, "ep is -1; must be 1 to 64"              },
        {{TINY, 2, 1, 1, false, 1},                              "null", false, "tp, dp and ep have no meaning"          },
        {{TINY, 1, 1, 65, false, 1},                             "cpu",  false, "dp is 65; must be 1 to 64"              },
        {{TINY, 8, 1, 9, false, 1},
         "cpu",                                                          false,
         "tp 8 and dp 9, 72 ranks, with ep 1: at most"                                                                   },
        {{TINY, 2, 6, 2, false, 1},
         "cpu",                                                          false,
         "tp 2 and dp 2, 4 ranks, with ep 6: one must"                                                                   },
        {{TINY, 2, 3, 1, false, 2},                              "cpu",  false, "tp 2, cp 2 and dp 1, 4 ranks, with ep 3"},
        {{TINY, 1, 1, 1, false, 65},                             "cpu",  false, "cp is 65; must be 1 to 64"              },
        {{TINY, 1, 1, 1, false, -2},                             "cpu",  false, "cp is -2; must be 1 to 64"              },
        {{"tests/golden/v41_small", 1, 2, 1, false, HD_CP_AUTO}, "cpu",  false, "cp is not for"                          },
        {{"tests/golden/v41_small", 1, 1, 1, false, 2},          "cpu",  false, "cp is not for"                          },
        {{TINY, 1, 2, 1, false, 1},                              "cpu",  true,  "every rank would take the same cores"   },
    };
    for (size_t i = 0; i < HD_LEN(cases); i++) {
        char why[600];
        hd_engine *e;
        const hd_engine_options o = {.size = sizeof o,
                                     .model_dir = cases[i].l.model,
                                     .backend = cases[i].backend,
                                     .pin_threads = cases[i].pin,
                                     .tp = cases[i].l.tp,
                                     .ep = cases[i].l.ep,
                                     .dp = cases[i].l.dp,
                                     .cp = cases[i].l.cp,
                                     .sum_in_ranks = cases[i].l.sums};
        assert_int_not_equal(hd_engine_open(&e, &o, why, sizeof why), HD_OK);
        if (!strstr(why, cases[i].why)) fail_msg("%s, not %s", why, cases[i].why);
    }
}

static void bad_spare_slots_are_refused(void **state) {
    (void)state;
    static const struct {
        int32_t ep, redundant;
        const char *rebalance, *split, *why;
    } cases[] = {
        {1, 0, "auto", NULL,    "experts are on one rank"                  },
        {1, 4, NULL,   NULL,    "redundant experts need ep or dwdp above 1"},
        {2, 3, NULL,   NULL,    "must divide by ep 2"                      },
        {2, 0, "on",   NULL,    "must be off, auto or a number of steps"   },
        {2, 0, "0",    NULL,    "must be off, auto or a number of steps"   },
        {2, 0, "-1",   NULL,    "must be off, auto or a number of steps"   },
        {2, 0, "1x",   NULL,    "must be off, auto or a number of steps"   },
        {2, 4, NULL,   "exact", "'exact' is not turns, local or flow"      },
        {2, 0, NULL,   "flow",  "experts have no copies"                   },
        {1, 0, NULL,   "local", "experts have no copies"                   },
    };
    for (size_t i = 0; i < HD_LEN(cases); i++) {
        char why[600];
        hd_engine *e;
        const hd_engine_options o = {.size = sizeof o,
                                     .model_dir = TINY,
                                     .backend = "cpu",
                                     .ep = cases[i].ep,
                                     .redundant = cases[i].redundant,
                                     .rebalance = cases[i].rebalance,
                                     .expert_split = cases[i].split};
        assert_int_not_equal(hd_engine_open(&e, &o, why, sizeof why), HD_OK);
        if (!strstr(why, cases[i].why)) fail_msg("%s, not %s", why, cases[i].why);
    }
}

static void what_gpus_lack_is_refused(void **state) {
    (void)state;
    static const struct {
        hd_engine_options o;
        const char *why;
    } cases[] = {
        {{.dwdp = 2, .world = {.size = 2}},                    "not fetched from other processes"},
        {{.ep = 2, .rebalance = "auto", .world = {.size = 2}}, "do not move between processes"   },
        {{.tp = 2, .updatable = true, .world = {.size = 2}},   "of processes cannot be replaced" },
    };
    for (size_t i = 0; i < HD_LEN(cases); i++) {
        char why[600];
        hd_engine *e;
        hd_engine_options o = cases[i].o;
        o.size = sizeof o;
        o.model_dir = TINY;
        o.backend = "cuda";
        assert_int_not_equal(hd_engine_open(&e, &o, why, sizeof why), HD_OK);
        if (!strstr(why, cases[i].why)) fail_msg("%s, not %s", why, cases[i].why);
    }
}

static void layout_auto_goes_by_memory(void **state) {
    (void)state;
    static const struct {
        const char *model;
        int32_t ranks;
        int64_t memory;     /* bytes; 0: what is free */
        int32_t tp, dp, ep; /* 0: refused */
        const char *why;
    } cases[] = {
        {TINY,             2,  1 << 30, 1, 2, 2, "2 ranks as tp 1, dp 2, ep 2"},
        {TINY,             4,  1 << 30, 1, 4, 4, "4 ranks as tp 1, dp 4, ep 4"},
        {TINY,             4,  0,       1, 4, 4, "for each rank"              },
        {TINY,             1,  1 << 30, 1, 1, 1, "1 ranks as tp 1"            },
        {TINY,             3,  1 << 30, 1, 3, 3, "3 ranks as tp 1, dp 3, ep 3"},
        {"models/tiny-v3", 9,  1 << 30, 1, 9, 3, "ep 3"                       }, /* 8 experts */
        {TINY,             2,  1000,    0, 0, 0, "no layout of 2 ranks fits"  },
        {TINY,             65, 1 << 30, 0, 0, 0, "1 to 64 ranks, not for 65"  },
    };
    for (size_t i = 0; i < HD_LEN(cases); i++) {
        char why[600];
        hd_engine *e;
        const hd_engine_options o = {.size = sizeof o,
                                     .model_dir = cases[i].model,
                                     .backend = "cpu",
                                     .threads = 1,
                                     .max_running = 1,
                                     .max_context = 64,
                                     .layout = "auto",
                                     .ranks = cases[i].ranks,
                                     .rank_memory = cases[i].memory};
        const int st = hd_engine_open(&e, &o, why, sizeof why);
        if (cases[i].tp == 0) {
            assert_int_not_equal(st, HD_OK);
            if (!strstr(why, cases[i].why)) fail_msg("%s, not %s", why, cases[i].why);
            continue;
        }
        if (st != HD_OK) fail_msg("%s", why);
        const hd_parallel_config *l = hd_engine_parallel(e);
        const char *reason = hd_engine_layout_reason(e);
        assert_int_equal(l->tp, cases[i].tp);
        assert_int_equal(l->dp, cases[i].dp);
        assert_int_equal(l->ep, cases[i].ep);
        if (!strstr(reason, cases[i].why)) fail_msg("%s, not %s", reason, cases[i].why);
        hd_engine_close(e);
    }
}

/* Memory for the shards of two ranks per attention group, and not for one. */
static void less_memory_takes_larger_groups(void **state) {
    (void)state;
    char why[600];
    hd_engine *e;
    int32_t tp = 1;
    for (int64_t memory = 1 << 26; memory > 1 << 16 && tp <= 2; memory -= memory / 32) {
        const hd_engine_options o = {.size = sizeof o,
                                     .model_dir = TINY,
                                     .backend = "cpu",
                                     .threads = 1,
                                     .max_running = 1,
                                     .max_context = 64,
                                     .layout = "auto",
                                     .ranks = 4,
                                     .rank_memory = memory};
        if (hd_engine_open(&e, &o, why, sizeof why) != HD_OK) break;
        assert_true(hd_engine_parallel(e)->tp >= tp);
        tp = hd_engine_parallel(e)->tp;
        if (tp > 1) assert_non_null(strstr(hd_engine_layout_reason(e), "fewer ranks"));
        hd_engine_close(e);
    }
    assert_true(tp > 1);
}

int test_engine_layouts(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_cannot_be_divided_is_refused),
        cmocka_unit_test(bad_spare_slots_are_refused),
        cmocka_unit_test(what_gpus_lack_is_refused),
        cmocka_unit_test(layout_auto_goes_by_memory),
        cmocka_unit_test(less_memory_takes_larger_groups),
    };
    return cmocka_run_group_tests_name("engine_layouts", tests, NULL, NULL);
}
