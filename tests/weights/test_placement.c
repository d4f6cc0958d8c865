/* test_placement.c - for many parallel configs of all families: every element of every tensor
 * is held exactly once per group of ranks, or the refusal names what cannot be divided. */
#include "check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "weights/configs.h"
#include "weights/placement.h"

/* Returns how many ranks of a world hold the same part of a tensor. */
static int32_t copies(const hd_parallel_config *l, const hd_tensor_decl *d) {
    int32_t world = hd_parallel_world(l);
    if (d->duplicate) return 0;
    switch (d->shard_axis) {
    case HD_SHARD_NONE:
        return world;
    case HD_SHARD_HEAD_ROWS:
    case HD_SHARD_HEAD_VECTOR:
    case HD_SHARD_GROUP_ROWS:
    case HD_SHARD_ATTENTION_OUT:
        return world / hd_parallel_head_parts(l);
    case HD_SHARD_DENSE_ROWS:
    case HD_SHARD_DENSE_OUT:
        return world / l->dense_tp;
    case HD_SHARD_EXPERT:
        return world / (l->ep * l->etp);
    case HD_SHARD_VOCAB_ROWS:
        return world / l->head_tp;
    }
    return -1;
}

/* Counts each row (or column, if columns are divided) of one tensor over all ranks. */
static void check_cover(const hd_plan *plans, const hd_parallel_config *l,
                        const hd_schema *schema, int32_t i, int32_t *count) {
    const hd_tensor_decl *d = &schema->decls[i];
    int32_t world = hd_parallel_world(l);
    bool by_cols = false;
    for (int32_t r = 0; r < world; r++) {
        const hd_slice *s = &plans[r].slices[i];
        if (s->rows > 0 && s->cols < d->cols) by_cols = true;
    }
    int32_t n = by_cols ? d->cols : d->rows;
    memset(count, 0, ((size_t)n + 1) * sizeof *count);
    for (int32_t r = 0; r < world; r++) {
        const hd_slice *s = &plans[r].slices[i];
        if (s->rows == 0) continue;
        assert_true(s->row0 >= 0 && s->row0 + s->rows <= d->rows);
        assert_true(s->col0 >= 0 && s->cols > 0 && s->col0 + s->cols <= d->cols);
        if (by_cols) {
            assert_int_equal(s->rows, d->rows);
        } else {
            assert_int_equal(s->cols, d->cols);
        }
        count[by_cols ? s->col0 : s->row0]++;
        count[by_cols ? s->col0 + s->cols : s->row0 + s->rows]--;
    }
    int32_t here = 0, want = copies(l, d);
    for (int32_t k = 0; k < n; k++) {
        here += count[k];
        if (here != want) fail_msg("%s: element %d held %d times", d->name, k, here);
    }
}

/* Columns have complete blocks; shard.c repeats the scales of rows that do not. */
static void check_blocks(const hd_plan *p, const hd_model_spec *spec, const hd_schema *schema,
                         int32_t i) {
    const hd_slice *s = &p->slices[i];
    const hd_tensor_decl *d = &schema->decls[i];
    hd_stored_format f = hd_declared_format(spec, d);
    if (f.scale_type == HD_NONE || s->rows == 0) return;
    assert_int_equal(s->col0 % f.block_cols, 0);
    assert_true(s->col0 + s->cols == d->cols || s->cols % f.block_cols == 0);
}

/* Returns true if the config was possible and right; false if it was refused with a reason. */
static bool try_parallel(const hd_parallel_config *l, const hd_model_spec *spec,
                         const hd_schema *schema, int32_t *count) {
    int32_t world = hd_parallel_world(l);
    hd_plan *plans = calloc((size_t)world, sizeof *plans);
    assert_non_null(plans);
    hd_err err = {0};
    hd_status first = HD_OK;
    for (int32_t r = 0; r < world; r++) {
        const hd_plan_args a = {
            .parallel = l, .rank = r, .spec = spec, .schema = schema, .n_mtp = spec->n_mtp};
        hd_status st = hd_plan_open(&plans[r], &a, &err);
        if (r == 0) first = st;
        assert_int_equal(st, first); /* all ranks agree on what is possible */
    }
    if (first != HD_OK) {
        assert_int_equal(first, HD_EINVAL);
        assert_true(strstr(err.msg, ".weight: ") || strstr(err.msg, "attn_sink: "));
        assert_non_null(strstr(err.msg, "cannot be shared by"));
    } else {
        for (int32_t i = 0; i < schema->n; i++) {
            check_cover(plans, l, schema, i, count);
            for (int32_t r = 0; r < world; r++) check_blocks(&plans[r], spec, schema, i);
        }
        int32_t heads = 0;
        for (int32_t r = 0; r < world; r++) {
            heads += plans[r].shard.n_heads;
            assert_int_equal(plans[r].shard.n_experts, spec->route.n_experts / l->ep);
        }
        assert_int_equal(heads, spec->n_heads * (world / hd_parallel_head_parts(l)));
    }
    for (int32_t r = 0; r < world; r++) hd_plan_close(&plans[r]);
    free(plans);
    return first == HD_OK;
}

static const int32_t divisors[] = {1, 2, 3, 4, 6, 8};

/* Tries every parallel config whose sizes are small divisors of its world. Returns how many
 * were possible. */
static int32_t try_all(const hd_model_spec *spec, int32_t max_world) {
    hd_schema schema;
    assert_int_equal(hd_schema_open(&schema, spec, NULL), HD_OK);
    int32_t *count = malloc(((size_t)1 << 21) * sizeof *count);
    assert_non_null(count);
    int32_t possible = 0;
    enum { N = HD_LEN(divisors) };
    for (int i = 0; i < N * N * N * N * N * N; i++) {
        int digit[6];
        for (int k = 0, rest = i; k < 6; k++, rest /= N) digit[k] = rest % N;
        const hd_parallel_config l = {.tp = divisors[digit[0]],
                                      .dp = divisors[digit[1]],
                                      .ep = divisors[digit[2]],
                                      .etp = divisors[digit[3]],
                                      .dense_tp = divisors[digit[4]],
                                      .head_tp = divisors[digit[5]]};
        if (hd_parallel_world(&l) > max_world || hd_parallel_check(&l, NULL) != HD_OK) continue;
        possible += try_parallel(&l, spec, &schema, count);
    }
    free(count);
    hd_schema_close(&schema);
    return possible;
}

static void small_models_in_every_parallel(void **state) {
    (void)state;
    static const char *const names[] = {"tiny_v2", "tiny_v3", "tiny_v32", "tiny_v4"};
    for (size_t i = 0; i < HD_LEN(names); i++) {
        hd_model_spec *s = config_open(names[i]);
        assert_true(try_all(s, 8) > 20);
        hd_model_spec_close(s);
    }
}

static void small_blocks_are_respected(void **state) {
    (void)state;
    static const char changes[] = "{\"quantization_config\": {\"quant_method\": \"fp8\", "
                                  "\"weight_block_size\": [16, 32]}}";
    static const char *const names[] = {"tiny_v3", "tiny_v32", "tiny_v4"};
    for (size_t i = 0; i < HD_LEN(names); i++) {
        hd_model_spec *s = config_changed(names[i], changes);
        assert_true(try_all(s, 8) > 10);
        hd_model_spec_close(s);
    }
}

/* Released models with a few of their layers, in common parallel configs, and the refusals of
 * impossible ones. */
static void released_models_in_their_parallel_configs(void **state) {
    (void)state;
    static const struct {
        const char *name;
        hd_parallel_config parallel; /* tp dp ep etp dense_tp head_tp */
        bool possible;
    } cases[] = {
        {"v2_lite",       {4, 2, 8, 1, 2, 8, 0, 0, 0, false, false, 0, 0},     true },
        {"v2_lite",
         {1, 3, 1, 1, 3, 1, 0, 0, 0, false, false, 0, 0},
         true                                                                       }, /* 2816 rows of the shared MLP */
        {"v3",            {8, 2, 16, 1, 16, 16, 0, 0, 0, false, false, 0, 0},  true },
        {"v3",            {16, 1, 1, 16, 16, 16, 0, 0, 0, false, false, 0, 0}, true },
        {"v3",            {1, 32, 32, 1, 1, 1, 0, 0, 0, false, false, 0, 0},   true },
        {"v3",
         {128, 1, 128, 1, 1, 1, 0, 0, 0, false, false, 0, 0},
         true                                                                       }, /* one head: 192 rows */
        {"v3",
         {1, 32, 1, 32, 1, 1, 0, 0, 0, false, false, 0, 0},
         true                                                                       }, /* 64 rows of an expert */
        {"v3",            {5, 1, 1, 5, 5, 5, 0, 0, 0, false, false, 0, 0},     true }, /* 26 or 25 heads */
        {"v3",            {256, 1, 256, 1, 1, 1, 0, 0, 0, false, false, 0, 0}, false}, /* 128 heads */
        {"v3_2_exp",      {8, 4, 32, 1, 8, 8, 0, 0, 0, false, false, 0, 0},    true },
        {"v4_flash",      {8, 1, 8, 1, 8, 8, 0, 0, 0, false, false, 0, 0},     true },
        {"v4_flash",      {4, 1, 2, 2, 4, 4, 0, 0, 0, false, false, 0, 0},     true },
        {"v4_flash",
         {16, 1, 16, 1, 1, 1, 0, 0, 0, false, false, 0, 0},
         false                                                                      }, /* 8 output groups */
        {"v4_pro",        {16, 2, 32, 1, 8, 16, 0, 0, 0, false, false, 0, 0},  true },
        {"v4_pro",        {1, 5, 5, 1, 1, 1, 0, 0, 0, false, false, 0, 0},     false}, /* 384 experts */
        {"v4_flash_0731", {8, 1, 8, 1, 8, 8, 0, 0, 0, false, false, 0, 0},     true },
    };
    int32_t *count = malloc(((size_t)1 << 21) * sizeof *count);
    assert_non_null(count);
    for (size_t i = 0; i < HD_LEN(cases); i++) {
        hd_model_spec *s = config_open(cases[i].name);
        s->n_layers = 4; /* dense, hash-routed, sparse and HCA layers are among the first */
        /* the stages have tensors of their own */
        if (s->drafter != HD_DRAFTER_DSPARK) s->n_mtp = 0;
        hd_schema schema;
        assert_int_equal(hd_schema_open(&schema, s, NULL), HD_OK);
        bool possible = try_parallel(&cases[i].parallel, s, &schema, count);
        if (possible != cases[i].possible) fail_msg("case %zu, %s", i, cases[i].name);
        hd_schema_close(&schema);
        hd_model_spec_close(s);
    }
    free(count);
}

static void bytes_of_all_ranks_add_up(void **state) {
    (void)state;
    hd_model_spec *s = config_open("v4_flash");
    hd_schema schema;
    hd_summary whole;
    assert_int_equal(hd_schema_open(&schema, s, NULL), HD_OK);
    hd_summarize(&whole, s, &schema);
    const hd_parallel_config l = {
        .tp = 2, .dp = 2, .ep = 4, .etp = 1, .dense_tp = 1, .head_tp = 4};
    int64_t experts = 0, head = 0, router = 0;
    for (int32_t r = 0; r < 4; r++) {
        hd_plan p;
        const hd_plan_args a = {
            .parallel = &l, .rank = r, .spec = s, .schema = &schema, .n_mtp = 1};
        assert_int_equal(hd_plan_open(&p, &a, NULL), HD_OK);
        experts += p.held.main[HD_PARAM_GROUP_EXPERTS].bytes +
                   p.held.mtp[HD_PARAM_GROUP_EXPERTS].bytes;
        head += p.held.main[HD_PARAM_GROUP_HEAD].bytes;
        router += p.held.main[HD_PARAM_GROUP_ROUTER].bytes;
        assert_int_equal(p.shard.expert0, 64 * r);
        assert_int_equal(p.shard.head0, 32 * (r % 2));
        hd_plan_close(&p);
    }
    assert_true(experts == whole.main[HD_PARAM_GROUP_EXPERTS].bytes +
                               whole.mtp[HD_PARAM_GROUP_EXPERTS].bytes);
    assert_true(head == whole.main[HD_PARAM_GROUP_HEAD].bytes);
    assert_true(router == 4 * whole.main[HD_PARAM_GROUP_ROUTER].bytes);
    hd_schema_close(&schema);
    hd_model_spec_close(s);
}

static void mtp_layers_may_be_left_out(void **state) {
    (void)state;
    hd_model_spec *s = config_open("v3");
    hd_schema schema;
    assert_int_equal(hd_schema_open(&schema, s, NULL), HD_OK);
    const hd_parallel_config one = hd_parallel_single();
    hd_plan p;
    hd_plan_args a = {.parallel = &one, .spec = s, .schema = &schema};
    assert_int_equal(hd_plan_open(&p, &a, NULL), HD_OK);
    assert_true(hd_summary_mtp(&p.held).bytes == 0);
    assert_true(hd_summary_main(&p.held).bytes == 673150611808);
    hd_plan_close(&p);

    a.n_mtp = 1; /* no rank holds the duplicates of embedding and head */
    assert_int_equal(hd_plan_open(&p, &a, NULL), HD_OK);
    assert_true(hd_summary_mtp(&p.held).bytes == 15424227552 - 2 * 1853358080LL);
    hd_plan_close(&p);
    a.n_mtp = 2;
    assert_int_equal(hd_plan_open(&p, &a, NULL), HD_EINVAL);
    hd_schema_close(&schema);
    hd_model_spec_close(s);
}

static void impossible_parallel_configs_are_refused(void **state) {
    (void)state;
    static const struct {
        hd_parallel_config parallel;
        const char *says;
    } cases[] = {
        {{0, 1, 1, 1, 1, 1, 0, 0, 0, false, false, 0, 0},             "tp is 0"      },
        {{1, 1, 1, 1, 1, -4, 0, 0, 0, false, false, 0, 0},            "head_tp is -4"},
        {{2, 2, 3, 1, 1, 1, 0, 0, 0, false, false, 0, 0},
         "ep 3 x etp 1 does not divide the world of 4"                               },
        {{2, 2, 4, 2, 1, 1, 0, 0, 0, false, false, 0, 0},
         "ep 4 x etp 2 does not divide the world of 4"                               },
        {{4, 1, 1, 1, 3, 1, 0, 0, 0, false, false, 0, 0},
         "dense_tp 3 does not divide the world of 4"                                 },
        {{4, 1, 1, 1, 1, 8, 0, 0, 0, false, false, 0, 0},
         "head_tp 8 does not divide the world of 4"                                  },
        {{1048576, 1048576, 1, 1, 1, 1, 0, 0, 0, false, false, 0, 0},
         "is a world of 1099511627776"                                               },
    };
    for (size_t i = 0; i < HD_LEN(cases); i++) {
        hd_err err = {0};
        assert_int_equal(hd_parallel_check(&cases[i].parallel, &err), HD_EINVAL);
        assert_non_null(strstr(err.msg, cases[i].says));
    }
}

static void refusals_name_tensor_and_number(void **state) {
    (void)state;
    static const struct {
        const char *name;
        hd_parallel_config parallel;
        const char *says;
    } cases[] = {
        {"v3",
         {256, 1, 1, 1, 1, 1, 0, 0, 0, false, false, 0, 0},
         "q_b_proj.weight: 128 heads cannot be shared by tp 256" },
        {"v3",
         {32, 1, 1, 32, 32, 1, 0, 0, 0, true, false, 0, 0},
         "down_proj.weight: columns 0 to 63 of 2048, by etp: that cuts through its "
         "quantization blocks of 128"                            },
        {"v3",
         {1, 7, 7, 1, 1, 1, 0, 0, 0, false, false, 0, 0},
         "gate_proj.weight: 256 experts cannot be shared by ep 7"},
        {"v4_flash",
         {16, 1, 1, 1, 1, 1, 0, 0, 0, false, false, 0, 0},
         "attn_sink: 8 output groups cannot be shared by tp 16"  },
    };
    for (size_t i = 0; i < HD_LEN(cases); i++) {
        hd_err err = {0};
        hd_plan p;
        hd_schema schema;
        hd_model_spec *s = config_open(cases[i].name);
        assert_int_equal(hd_schema_open(&schema, s, NULL), HD_OK);
        const hd_plan_args a = {.parallel = &cases[i].parallel, .spec = s, .schema = &schema};
        assert_int_equal(hd_plan_open(&p, &a, &err), HD_EINVAL);
        if (!strstr(err.msg, cases[i].says)) fail_msg("%s", err.msg);
        assert_null(p.slices);
        hd_schema_close(&schema);
        hd_model_spec_close(s);
    }
}

/* All parts of all sizes: in order, complete, nearly equal, and of whole blocks where the blocks
 * are many. */
static void parts_are_nearly_equal(void **state) {
    (void)state;
    for (int32_t n = 1; n < 40000; n += n < 300 ? 1 : 997) {
        for (int32_t parts = 1; parts <= 64 && parts <= n; parts++) {
            int32_t at = 0;
            for (int32_t i = 0; i < parts; i++) {
                const hd_extent p = hd_extent_of(n, i, parts);
                assert_int_equal(p.first, at);
                assert_true(p.n > 0 && (int64_t)p.n * parts <= n + n / 8 + parts);
                at += p.n;
            }
            assert_int_equal(at, n);
        }
    }
    const int32_t widths[] = {29 * 128, 28 * 128};
    for (int32_t i = 0; i < 5; i++) {
        const int32_t n = hd_extent_of(144 * 128, i, 5).n;
        assert_true(n == widths[0] || n == widths[1]);
    }
}

int test_placement(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(parts_are_nearly_equal),
        cmocka_unit_test(small_models_in_every_parallel),
        cmocka_unit_test(small_blocks_are_respected),
        cmocka_unit_test(released_models_in_their_parallel_configs),
        cmocka_unit_test(bytes_of_all_ranks_add_up),
        cmocka_unit_test(mtp_layers_may_be_left_out),
        cmocka_unit_test(impossible_parallel_configs_are_refused),
        cmocka_unit_test(refusals_name_tensor_and_number),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
