/* test_ops.c - every operator on every table, and every table against values computed by
 * hand. */
#include "ops/ops_fixture.h"

#include <math.h>
#include <string.h>

static void assert_near(double got, double want, double tolerance) {
    if (!(fabs(got - want) <= tolerance)) fail_msg("%.9g and not %.9g", got, want);
}

/* a NULL entry would crash in a model */
static void tables_are_full(void **state) {
    (void)state;
    assert_true(fix.n_tables >= 2 || fix.brief);
    for (int32_t t = 0; t < fix.n_tables; t++) {
        assert_non_null(fix.table[t].name);
        assert_int_equal(fix.table[t].act_type, HD_F32);
#define X(op) assert_non_null(fix.table[t].op);
        HD_COMMON_OP_LIST(X)
#undef X
        const bool on_gpu = stream_for(&fix.table[t], NULL) != NULL;
#define X(op) assert_true((fix.table[t].op == NULL) == on_gpu);
        HD_CPU_OP_LIST(X)
#undef X
    }
}

/* models.md 9.3: hc 4, 20 iterations, eps 1e-6. A column of ones has a root mean square of one,
 * so column 0 of fn is the vector m itself. Inverting the sign of a stream shows its part of
 * the sum. */
static void sinkhorn_knows_its_answer(void **state) {
    (void)state;
    static const float pre[4] = {0.245086013f, 0.592667600f, 0.348646135f, 0.705786028f};
    static const float post[4] = {1.0f, 0.814666800f, 1.411570056f, 1.244918662f};
    static const float comb[16] = {0.1670321f, 0.4163343f, 0.3184671f, 0.0981654f,
                                   0.2829155f, 0.0113986f, 0.5394159f, 0.1662690f,
                                   0.2128001f, 0.5304138f, 0.1317221f, 0.1250631f,
                                   0.3372513f, 0.0418523f, 0.0103939f, 0.6105015f};
    typedef struct memory {
        float fn[24 * 4], base[24], scale[3], x[4], out, post[4], comb[16];
    } memory;
    memory *m = take_copy(
        &(memory){
            .scale = {0.5f, 1.0f, 1.5f}
    },
        sizeof *m);
    float all = 0.0f;
    for (int i = 0; i < 24; i++) {
        m->fn[4 * i] = (float)(7 * i % 11 - 5) / 4.0f;
        m->base[i] = (float)(5 * i % 9 - 4) / 8.0f;
    }
    for (int i = 0; i < 4; i++) all += pre[i];
    for (int32_t t = 0; t < fix.n_tables; t++) {
        hd_stream *stream = stream_for(&fix.table[t], fix.stream[0]);
        for (int flip = 0; flip < 4; flip++) { /* 0 inverts none: m comes from stream 0 */
            for (int i = 0; i < 4; i++) m->x[i] = flip && i == flip ? -1.0f : 1.0f;
            fix.table[t].hc_pre(stream, &(hd_hc_pre_args){.out = hd_f32(&m->out),
                                                          .post = m->post,
                                                          .comb = m->comb,
                                                          .x = hd_f32(m->x),
                                                          .fn = m->fn,
                                                          .scale = m->scale,
                                                          .base = m->base,
                                                          .rows = 1,
                                                          .cols = 1,
                                                          .hc = 4,
                                                          .iters = 20,
                                                          .eps = 1e-6f});
            finish("hc_pre", stream);
            const float want = flip ? all - 2.0f * pre[flip] : all;
            assert_near((double)m->out, (double)want, 1e-6);
            for (int i = 0; i < 4; i++) assert_near((double)m->post[i], (double)post[i], 5e-7);
            for (int i = 0; i < 16; i++) {
                assert_near((double)m->comb[i], (double)comb[i], 5e-7);
            }
        }
    }
}

/* models.md 9.3: with all experts selected and no normalization the weights are the scores,
 * best first. */
static void sqrt_softplus_knows_its_answers(void **state) {
    (void)state;
    const float values[12] = {-20, -10, -5, -2, -1, 0, 1, 2, 5, 10, 20, 30};
    static const double score[12] = {4.53999297e-05, 0.00673787053, 0.0819472249, 0.356269576,
                                     0.559697754,    0.832554611,   1.14597630,   1.45839913,
                                     2.23756907,     3.16228484,    4.47213596,   5.47722558};
    const float *logits = take_copy(values, sizeof values);
    int32_t *expert = take_ints(12);
    float *weight = take_nan(12);
    for (int32_t t = 0; t < fix.n_tables; t++) {
        hd_stream *stream = stream_for(&fix.table[t], fix.stream[0]);
        fix.table[t].moe_topk(stream, &(hd_moe_topk_args){
                                          .expert = expert,
                                          .weight = weight,
                                          .logits = logits,
                                          .rows = 1,
                                          .rule = {.score = HD_SCORE_SQRT_SOFTPLUS,
                                                   .n_experts = 12,
                                                   .top_k = 12,
                                                   .n_groups = 1,
                                                   .top_groups = 1,
                                                   .scale = 1.0f}
        });
        finish("moe_topk", stream);
        for (int i = 0; i < 12; i++) {
            assert_int_equal(expert[i], 11 - i);
            assert_near((double)weight[i], score[11 - i], 4e-7 * score[11 - i]);
        }
    }
}

/* V3's router with eight experts in four groups, computed by hand. Sigmoid scores are 0.5 for
 * all (logits 0), so the biases select. Groups {0,1} .. {6,7} have 0.9, 1.0, 0.8, 1.1 more than
 * their scores; the best two are {6,7} and {2,3}. Experts 6, 2, 7 win there, although expert 0
 * has the largest bias. */
static void groups_rank_by_their_two_best(void **state) {
    (void)state;
    const float biases[8] = {0.9f, 0.0f, 0.55f, 0.45f, 0.4f, 0.4f, 0.6f, 0.5f};
    const float *bias = take_copy(biases, sizeof biases);
    float *logits = take_nan(8), *weight = take_nan(3);
    int32_t *expert = take_ints(3);
    for (int i = 0; i < 8; i++) logits[i] = 0.0f;
    for (int32_t t = 0; t < fix.n_tables; t++) {
        hd_stream *stream = stream_for(&fix.table[t], fix.stream[0]);
        fix.table[t].moe_topk(stream, &(hd_moe_topk_args){
                                          .expert = expert,
                                          .weight = weight,
                                          .logits = logits,
                                          .bias = bias,
                                          .rows = 1,
                                          .rule = {.score = HD_SCORE_SIGMOID,
                                                   .group_rule = HD_GROUPS_TOP2SUM,
                                                   .n_experts = 8,
                                                   .top_k = 3,
                                                   .n_groups = 4,
                                                   .top_groups = 2,
                                                   .normalize = true,
                                                   .scale = 2.5f}
        });
        finish("moe_topk", stream);
        assert_int_equal(expert[0], 6);
        assert_int_equal(expert[1], 2);
        assert_int_equal(expert[2], 7);
        for (int i = 0; i < 3; i++) assert_near((double)weight[i], 2.5 / 3.0, 1e-6);
    }
}

/* models.md 2.1.4: (1, 0) rotated by the angle is (cos, sin); the inverse brings it back. */
static void rope_turns_pairs(void **state) {
    (void)state;
    typedef struct memory {
        int32_t position;
        float freq[2], angles[4], x[5];
    } memory;
    memory *m = take_copy(
        &(memory){
            3, {1.0f, 0.1f},
             {0   },
             {0}
    },
        sizeof *m);
    for (int32_t t = 0; t < fix.n_tables; t++) {
        const hd_ops *ops = &fix.table[t];
        hd_stream *stream = stream_for(ops, fix.stream[0]);
        ops->rope_table(stream, &(hd_rope_table_args){.out = m->angles,
                                                      .position = &m->position,
                                                      .freq = m->freq,
                                                      .rows = 1,
                                                      .pairs = 2,
                                                      .scale = 1.0f});
        finish("rope_table", stream);
        assert_near((double)m->angles[0], cos(3.0), 1e-7);
        assert_near((double)m->angles[3], sin(0.3), 1e-7);
        for (int half = 0; half < 2; half++) {
            const float x[5] = {1.0f, half ? 0.5f : 0.0f, half ? 0.0f : 0.5f, 0.0f, 9.0f};
            memcpy(m->x, x, sizeof x);
            hd_rope_args a = {.out = hd_f32(m->x),
                              .x = hd_f32(m->x),
                              .cos_sin = m->angles,
                              .rows = 1,
                              .heads = 1,
                              .pairs = 2,
                              .half_split = half};
            ops->rope(stream, &a);
            finish("rope", stream);
            assert_near((double)m->x[0], cos(3.0), 1e-6);
            assert_near((double)m->x[half ? 2 : 1], sin(3.0), 1e-6);
            assert_near((double)m->x[half ? 1 : 2], 0.5 * cos(0.3), 1e-6);
            assert_near((double)m->x[3], 0.5 * sin(0.3), 1e-6);
            a.inverse = true;
            ops->rope(stream, &a);
            finish("rope", stream);
            assert_near((double)m->x[0], 1.0, 1e-6);
            assert_near((double)m->x[3], 0.0, 1e-6);
            assert_true(m->x[4] == 9.0f);
        }
    }
}

/* What a query at pos sees of entries 1, 2, 3 ... with equal weights: their mean. */
static float mean_seen(const hd_ops *ops, int32_t pos, int32_t ratio, const float *sink) {
    typedef struct memory {
        float data[4], out, q, sink;
        int32_t table, seq, pos;
    } memory;
    const memory values = {
        .data = {1.0f, 2.0f, 3.0f, 4.0f},
          .out = -1.0f, .pos = pos
    };
    memory *m = take_copy(&values, sizeof values);
    hd_stream *stream = stream_for(ops, fix.stream[0]);
    if (sink) m->sink = *sink;
    ops->attention(stream, &(hd_attention_args){
                               .out = hd_f32(&m->out),
                               .q = hd_f32(&m->q),
                               .entries = {.rows = hd_f32(m->data),
                                           .table = &m->table,
                                           .table_stride = 1,
                                           .page_entries = 4,
                                           .width = 1},
                               .sink = sink ? &m->sink : NULL,
                               .seq = &m->seq,
                               .pos = &m->pos,
                               .rows = 1,
                               .heads = 1,
                               .k_dim = 1,
                               .v_dim = 1,
                               .ratio = ratio,
                               .scale = 1.0f
    });
    finish("attention", stream);
    return m->out;
}

/* models.md 9.3: visibility of compressed entries. The query that completes an entry sees
 * it. */
static void entries_show_when_complete(void **state) {
    (void)state;
    static const struct {
        int32_t ratio, pos;
        float mean;
    } cases[] = {
        {4,   2,   0.0f},
        {4,   3,   1.0f},
        {4,   6,   1.0f},
        {4,   7,   1.5f},
        {128, 126, 0.0f},
        {128, 127, 1.0f},
        {1,   0,   1.0f},
        {1,   3,   2.5f},
    };
    for (int32_t t = 0; t < fix.n_tables; t++) {
        for (size_t i = 0; i < HD_LEN(cases); i++) {
            const float mean = mean_seen(&fix.table[t], cases[i].pos, cases[i].ratio, NULL);
            assert_near((double)mean, (double)cases[i].mean, 1e-6);
        }
        /* The sink is one more key with score ln 2 = weight 2, and has no value. */
        const float sink = 0.69314718f;
        assert_near((double)mean_seen(&fix.table[t], 3, 1, &sink), 10.0 / 6.0, 1e-6);
        const float none = -INFINITY;
        assert_near((double)mean_seen(&fix.table[t], 3, 1, &none), 2.5, 1e-6);
        assert_true(mean_seen(&fix.table[t], 2, 4, &none) == 0.0f);
    }
}

/* Scores 0, 3, 3, 1, 3 of keys 0 .. 4: of three equal ones the lower two, in ascending
 * order. */
static void selection_breaks_ties_downwards(void **state) {
    (void)state;
    typedef struct memory {
        float data[5], q, weight;
        int32_t table, seq, pos[2], out[2];
    } memory;
    const memory values = {
        .data = {-1.0f, 3.0f, 3.0f, 1.0f, 3.0f},
          .q = 1.0f, .weight = 1.0f, .pos = {4, 0}
    };
    memory *m = take_copy(&values, sizeof values);
    for (int32_t t = 0; t < fix.n_tables; t++) {
        hd_stream *stream = stream_for(&fix.table[t], fix.stream[0]);
        hd_indexer_topk_args a = {
            .out = m->out,
            .q = hd_f32(&m->q),
            .weight = &m->weight,
            .keys = {.rows = hd_f32(m->data),
                     .table = &m->table,
                     .table_stride = 1,
                     .page_entries = 5,
                     .width = 1},
            .seq = &m->seq,
            .pos = m->pos,
            .rows = 1,
            .heads = 1,
            .ratio = 1,
            .top_k = 2,
            .scale = 1.0f
        };
        fix.table[t].indexer_topk(stream, &a);
        finish("indexer_topk", stream);
        assert_int_equal(m->out[0], 1);
        assert_int_equal(m->out[1], 2);
        a.pos = m->pos + 1;
        fix.table[t].indexer_topk(stream, &a);
        finish("indexer_topk", stream);
        assert_int_equal(m->out[0], 0);
        assert_int_equal(m->out[1], -1);
    }
}

/* A NaN score is selected last, and causes no access outside the arrays. */
static void selection_takes_nan_last(void **state) {
    (void)state;
    typedef struct memory {
        float data[4], q, weight;
        int32_t table, seq, pos, out[3];
    } memory;
    const memory values = {
        .data = {1.0f, 2.0f, -1.0f, 3.0f}, /* relu gives key 2 the score 0 */
        .q = 1.0f,
        .weight = NAN,
        .pos = 3
    };
    memory *m = take_copy(&values, sizeof values);
    const int32_t want[3] = {0, 1, 2};
    for (int32_t t = 0; t < fix.n_tables; t++) {
        hd_stream *stream = stream_for(&fix.table[t], fix.stream[0]);
        fix.table[t].indexer_topk(stream, &(hd_indexer_topk_args){
                                              .out = m->out,
                                              .q = hd_f32(&m->q),
                                              .weight = &m->weight,
                                              .keys = {.rows = hd_f32(m->data),
                                                       .table = &m->table,
                                                       .table_stride = 1,
                                                       .page_entries = 4,
                                                       .width = 1},
                                              .seq = &m->seq,
                                              .pos = &m->pos,
                                              .rows = 1,
                                              .heads = 1,
                                              .ratio = 1,
                                              .top_k = 3,
                                              .scale = 1.0f
        });
        finish("indexer_topk", stream);
        for (int i = 0; i < 3; i++) assert_int_equal(m->out[i], want[i]);
    }
}

/* silu(2) * 3 by hand; both clamps; the gate has no lower clamp */
static void swiglu_clamps(void **state) {
    (void)state;
    const float values[12] = {2.0f, 9.0f, 2.0f, -90.0f, 3.0f, 1.0f, -9.0f, 1.0f};
    const double silu2 = 2.0 / (1.0 + exp(-2.0)), silu5 = 5.0 / (1.0 + exp(-5.0));
    float *gate = take_copy(values, sizeof values), *out = gate + 8;
    for (int32_t t = 0; t < fix.n_tables; t++) {
        hd_stream *stream = stream_for(&fix.table[t], fix.stream[0]);
        fix.table[t].swiglu(stream, &(hd_swiglu_args){.out = hd_f32(out),
                                                      .gate = hd_f32(gate),
                                                      .up = hd_f32(gate + 4),
                                                      .rows = 1,
                                                      .cols = 4,
                                                      .limit = 5.0f});
        finish("swiglu", stream);
        assert_near((double)out[0], 3.0 * silu2, 1e-6);
        assert_near((double)out[1], silu5, 1e-6);
        assert_near((double)out[2], -5.0 * silu2, 2e-6);
        assert_near((double)out[3], 0.0, 1e-30);
    }
}

/* A NaN among the keys must reach the result; no maximum may hide it. */
static void nan_is_not_hidden(void **state) {
    (void)state;
    typedef struct memory {
        float data[8], q, out;
        int32_t table, seq, pos;
    } memory;
    const memory values = {
        .data = {1.0f, 1.0f, NAN, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f},
          .q = 1.0f, .pos = 7
    };
    memory *m = take_copy(&values, sizeof values);
    for (int32_t t = 0; t < fix.n_tables; t++) {
        hd_stream *stream = stream_for(&fix.table[t], fix.stream[0]);
        m->out = 0.0f;
        fix.table[t].attention(stream, &(hd_attention_args){
                                           .out = hd_f32(&m->out),
                                           .q = hd_f32(&m->q),
                                           .recent = {.rows = hd_f32(m->data),
                                                      .table = &m->table,
                                                      .table_stride = 1,
                                                      .page_entries = 8,
                                                      .width = 1},
                                           .seq = &m->seq,
                                           .pos = &m->pos,
                                           .rows = 1,
                                           .heads = 1,
                                           .k_dim = 1,
                                           .v_dim = 1,
                                           .window = 8,
                                           .scale = 1.0f
        });
        finish("attention", stream);
        assert_true(isnan(m->out));
    }
}

int test_ops(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tables_are_full),
#define X(op) cmocka_unit_test_teardown(op_##op, forget_all),
        HD_OP_LIST(X)
#undef X
#define X(test) cmocka_unit_test_teardown(test, forget_all),
            REAL_OPS_LIST(X)
#undef X
#define X(test) cmocka_unit_test_teardown(test, forget_all),
                CUBLASLT_TESTS_LIST(X) OFFICIAL_TESTS_LIST(X) CHECK_TESTS_LIST(X)
                    ENTRY_TESTS_LIST(X)
#undef X
                        cmocka_unit_test_teardown(fast_products, forget_all),
        cmocka_unit_test_teardown(few_places_on_gpu, forget_all),
        cmocka_unit_test_teardown(naive_on_gpu, forget_all),
        cmocka_unit_test_teardown(many_rows_on_gpu, forget_all),
        cmocka_unit_test_teardown(groups_are_rounded, forget_all),
        cmocka_unit_test_teardown(pools_are_those_of_whole_numbers, forget_all),
        cmocka_unit_test_teardown(resident_refuses_too_much, forget_all),
        cmocka_unit_test_teardown(pool_breaks_ties_downwards, forget_all),
        cmocka_unit_test_teardown(gates_know_their_answers, forget_all),
        cmocka_unit_test_teardown(sinkhorn_knows_its_answer, forget_all),
        cmocka_unit_test_teardown(sqrt_softplus_knows_its_answers, forget_all),
        cmocka_unit_test_teardown(groups_rank_by_their_two_best, forget_all),
        cmocka_unit_test_teardown(rope_turns_pairs, forget_all),
        cmocka_unit_test_teardown(entries_show_when_complete, forget_all),
        cmocka_unit_test_teardown(selection_breaks_ties_downwards, forget_all),
        cmocka_unit_test_teardown(selection_takes_nan_last, forget_all),
        cmocka_unit_test_teardown(swiglu_clamps, forget_all),
        cmocka_unit_test_teardown(nan_is_not_hidden, forget_all),
    };
    return cmocka_run_group_tests_name("ops", tests, open_fixture, close_fixture);
}
