/* test_engram.c - the constants of Engram's hashes, and the rows of the published example. */
#include "check.h"

#include "ops/csa2.h"
#include "weights/configs.h"
#include "weights/engram.h"

static void constants_are_the_published_ones(void **state) {
    (void)state;
    static const int64_t multipliers[2][4] = {
        {76632096046245, 4839876093313,  35959672319349, 73987337458391},
        {67716810739261, 51510806800915, 30921347202721, 82619226485591}
    };
    hd_model_spec *s = config_open("v4_1_flash");
    const hd_engram_hash *hash = s->engram.hash;
    for (int32_t i = 0; i < 2; i++) {
        for (int32_t k = 0; k < 4; k++)
            assert_true(hash[i].multipliers[k] == multipliers[i][k]);
    }
    assert_int_equal(hash[0].primes[0], 16000057);
    assert_int_equal(hash[0].primes[23], 16000463);
    assert_int_equal(hash[1].primes[0], 16000477);
    assert_int_equal(hash[1].primes[23], 16000889);
    assert_int_equal(hash[0].first_row[1], 16000057);
    hd_model_spec_close(s);
}

/* "Hello world!": position 4 in both layers, and position 0, before which there is padding. */
static void rows_are_those_of_the_example(void **state) {
    (void)state;
    static const struct {
        int32_t layer, classes[4], first[3], last;
    } examples[] = {
        {0, {3, 1751, 15844, 98615}, {4547813, 23607763, 44251298}, 375550856},
        {1, {3, 1751, 15844, 98615}, {4771272, 23388578, 36222173}, 368574706},
        {0, {0, 2, 2, 2},            {5702652, 24393184, 39183301}, 380066193},
    };
    hd_model_spec *s = config_open("v4_1_flash");
    for (size_t i = 0; i < HD_LEN(examples); i++) {
        const hd_engram_hash *h = &s->engram.hash[examples[i].layer];
        const hd_engram_embed_args a = {.multipliers = h->multipliers,
                                        .primes = h->primes,
                                        .first_row = h->first_row,
                                        .heads = 8};
        for (int32_t c = 0; c < 3; c++) {
            assert_int_equal(hd_engram_row(&a, examples[i].classes, c), examples[i].first[c]);
        }
        assert_int_equal(hd_engram_row(&a, examples[i].classes, 23), examples[i].last);
    }
    hd_model_spec_close(s);
}

/* numpy.random.default_rng(10007).integers(0, 1483811460240472, 4), in which 3,108 classes end */
static void numbers_are_those_of_numpy(void **state) {
    (void)state;
    uint64_t drawn[4];
    static const uint64_t expect[4] = {1221626071656150, 77154601325389, 573249010532329,
                                       1179464807501129};
    hd_engram_draw(10007, 1483811460240472, 4, drawn);
    for (int i = 0; i < 4; i++) assert_true(drawn[i] == expect[i]);
}

int test_engram(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(constants_are_the_published_ones),
        cmocka_unit_test(rows_are_those_of_the_example),
        cmocka_unit_test(numbers_are_those_of_numpy),
    };
    return cmocka_run_group_tests_name("engram", tests, NULL, NULL);
}
