/* test_shard.c - a rectangle of a stored matrix has the elements of the complete matrix, in
 * every format; and the routings of dummy weights. */
#include "check.h"

#include <math.h>
#include <stdlib.h>

#include "base/random_fill.h"
#include "weights/shard_internal.h"
#include "weights/configs.h"
#include "weights/weights.h"

enum { ROWS = 256, COLS = 512 };

static const hd_slice slices[] = {
    {0,   256, 0,   512},
    {128, 128, 0,   512},
    {0,   256, 256, 128},
    {128, 128, 384, 128}
};

/* no code of these is NaN or infinity */
static void *make(size_t bytes, uint64_t seed) {
    uint8_t *data = malloc(bytes);
    assert_non_null(data);
    for (size_t i = 0; i < bytes; i++) data[i] = (uint8_t)(hd_random_fill_at(seed, i) & 0x3f);
    return data;
}

static void rectangles_have_the_elements(void **state) {
    (void)state;
    for (int f = HD_FORMAT_NONE + 1; f < HD_N_FORMATS; f++) {
        const hd_stored_format row = hd_format_stored((hd_format)f), *k = &row;
        void *data = make((size_t)ROWS * COLS * sizeof(float), (uint64_t)f);
        void *scale = make((size_t)ROWS * COLS * sizeof(float), (uint64_t)f + 100);
        const hd_weight whole = {.data = data,
                                 .scale = k->scale_type == HD_NONE ? NULL : scale,
                                 .type = k->type,
                                 .scale_type = k->scale_type,
                                 .rows = ROWS,
                                 .cols = COLS,
                                 .block_rows = k->block_rows,
                                 .block_cols = k->block_cols,
                                 .global = 1.5f};
        weights_pieces pieces = {0};
        for (size_t i = 0; i < HD_LEN(slices); i++) {
            const hd_slice *s = &slices[i];
            hd_weight w = whole;
            assert_int_equal(weights_shard(&w, s, &pieces, NULL), HD_OK);
            assert_int_equal(w.rows, s->rows);
            assert_int_equal(w.cols, s->cols);
            for (int32_t r = 0; r < w.rows; r++) {
                for (int32_t c = 0; c < w.cols; c++) {
                    assert_true(hd_weight_at(&w, r, c) ==
                                hd_weight_at(&whole, s->row0 + r, s->col0 + c));
                }
            }
        }
        weights_pieces_deinit(&pieces);
        free(data);
        free(scale);
    }
}

/* ---- draws ---- */

enum { EXPERTS = 256, RANKS = 32 };

static double balance(const double *fraction) {
    double most = 0;
    for (int32_t r = 0; r < RANKS; r++) {
        double sum = 0;
        for (int32_t e = 0; e < EXPERTS / RANKS; e++) sum += fraction[r * EXPERTS / RANKS + e];
        most = fmax(most, sum);
    }
    return 1.0 / RANKS / most;
}

static void shards_are_as_uneven_as_they_say(void **state) {
    (void)state;
    double fraction[EXPERTS], sum = 0;
    int32_t rows[EXPERTS];
    hd_routing_fractions(fraction, EXPERTS, RANKS, HD_ROUTING_UNIFORM, 3);
    assert_true(fabs(balance(fraction) - 1) < 1e-9);
    hd_routing_fractions(fraction, EXPERTS, RANKS, HD_ROUTING_SKEWED, 3);
    assert_true(fabs(balance(fraction) - 0.6) < 1e-3);
    for (int32_t e = 0; e < EXPERTS; e++) sum += fraction[e];
    assert_true(fabs(sum - 1) < 1e-9);
    hd_routing_draw(rows, fraction, EXPERTS, 1000000, 3);
    int64_t all = 0;
    for (int32_t e = 0; e < EXPERTS; e++) {
        const double want = 1e6 * fraction[e];
        assert_true(fabs(rows[e] - want) < 6 * sqrt(want) + 1);
        all += rows[e];
    }
    assert_int_equal(all, 1000000);
}

/* Returns how many experts of a token are those of the token before, and how many different
 * ones four consecutive tokens have. */
static void count_table(const hd_model_spec *spec, hd_routing routing, double *kept,
                        double *distinct) {
    const hd_dummy_options o = {.routing = routing};
    const int32_t k = spec->route.top_k, n = spec->vocab;
    hd_weights *w;
    assert_int_equal(hd_weights_open_dummy(&w, spec, &o, NULL), HD_OK);
    const int32_t *table = hd_weights_table(w, spec->n_layers - 1);
    int64_t same = 0, different = 0;
    assert_non_null(table);
    for (int32_t t = 4; t < n; t++) {
        uint64_t seen = 0;
        for (int32_t i = 0; i < 4 * k; i++) {
            assert_in_range(table[(t - 3) * k + i], 0, spec->route.n_experts - 1);
            seen |= (uint64_t)1 << table[(t - 3) * k + i];
        }
        for (int32_t i = 0; i < k; i++) {
            for (int32_t j = 0; j < k; j++) same += table[t * k + i] == table[(t - 1) * k + j];
            for (int32_t j = 0; j < i; j++) {
                assert_int_not_equal(table[t * k + i], table[t * k + j]);
            }
        }
        for (; seen; seen &= seen - 1) different++;
    }
    *kept = (double)same / ((double)(n - 4) * k);
    *distinct = (double)different / (n - 4);
    hd_weights_close(w);
}

static void tokens_choose_as_the_routing_says(void **state) {
    (void)state;
    hd_model_spec *spec = config_changed(
        "tiny_v3", "{\"n_routed_experts\": 64, \"vocab_size\": 4000, \"n_group\": 1, "
                   "\"topk_group\": 1}");
    const double k = spec->route.top_k, n = spec->route.n_experts;
    double kept, distinct, sticky, skewed;
    count_table(spec, HD_ROUTING_UNIFORM, &kept, &distinct);
    assert_true(fabs(kept - k / n) < 0.01);
    assert_true(fabs(distinct - n * (1 - pow(1 - k / n, 4))) < 0.1);
    count_table(spec, HD_ROUTING_STICKY, &sticky, &distinct);
    assert_true(fabs(sticky - (0.3 + 0.7 * k / n)) < 0.02);
    count_table(spec, HD_ROUTING_SKEWED, &skewed, &distinct);
    assert_true(skewed > 1.2 * kept); /* popular experts occur again */
    hd_model_spec_close(spec);
}

int test_shard(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rectangles_have_the_elements),
        cmocka_unit_test(shards_are_as_uneven_as_they_say),
        cmocka_unit_test(tokens_choose_as_the_routing_says),
    };
    return cmocka_run_group_tests_name("cut", tests, NULL, NULL);
}
