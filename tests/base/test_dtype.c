/* test_dtype.c - the rows of the tables of number formats, and known codes. */
#include "check.h"

#include <math.h>
#include <string.h>

#include "base/dtype.h"

/* ---- every row ---- */

/* Codes that are numbers decode to finite ones, in order of size, and encode to themselves. */
static void rows_encode_what_they_decode(void **state) {
    (void)state;
    for (int t = 0; t < HD_N_DTYPES; t++) {
        const hd_dtype_row *row = &hd_dtypes[t];
        if (!row->decode) continue;
        const uint64_t n = (uint64_t)1 << row->bits, step = row->bits > 16 ? 65521 : 1;
        for (uint64_t i = 0; i < n; i += step) {
            const uint32_t code = (uint32_t)i, magnitude = code & ~row->sign;
            const float f = row->decode(code);
            if (magnitude > row->largest) {
                assert_true(!isfinite(f));
                continue;
            }
            assert_true(isfinite(f) && fabsf(f) <= row->decode(row->largest));
            assert_int_equal(row->encode(f), code);
            assert_int_equal(signbit(f) != 0, (code & row->sign) != 0);
        }
        if (row->sign) assert_true(row->decode(0) == 0);
    }
}

/* Between two neighbors an encoding takes the nearer one. */
static void rows_encode_the_nearest(void **state) {
    (void)state;
    for (int t = 0; t < HD_N_DTYPES; t++) {
        const hd_dtype_row *row = &hd_dtypes[t];
        const uint32_t step = row->bits > 16 ? 1000003 : 1;
        if (!row->decode) continue;
        for (uint32_t code = 0; code + step <= row->largest; code += step) {
            const float low = row->decode(code), high = row->decode(code + 1);
            assert_true(low < high);
            if (row->bits > 16) continue; /* nothing lies between */
            assert_int_equal(row->encode(low + 0.375f * (high - low)), code);
            assert_int_equal(row->encode(low + 0.625f * (high - low)), code + 1);
        }
    }
}

/* Elements are read where they lie, also across bytes, at any address. */
static void elements_lie_in_order_of_bits(void **state) {
    (void)state;
    uint8_t data[64];
    for (int t = 0; t < HD_N_DTYPES; t++) {
        const hd_dtype_row *row = &hd_dtypes[t];
        if (!row->decode) continue;
        for (uint32_t i = 0; i < sizeof data; i++) data[i] = (uint8_t)(i * 37 % 101);
        for (int32_t i = 0; i < 8; i++) {
            uint32_t code = 0;
            for (int32_t b = 0; b < row->bits; b++) {
                const int32_t bit = i * row->bits + b;
                code |= (uint32_t)(data[1 + bit / 8] >> bit % 8 & 1) << b;
            }
            assert_true(hd_dtype_at((hd_dtype)t, data + 1, i) == row->decode(code));
        }
    }
}

/* Random patterns are numbers of the size that the row says; repeated ones are that number. */
static void patterns_are_numbers_of_their_size(void **state) {
    (void)state;
    enum { WORDS = 4096 };
    static uint64_t words[WORDS];
    for (int t = 0; t < HD_N_DTYPES; t++) {
        const hd_dtype_row *row = &hd_dtypes[t];
        if (!row->decode) continue;
        if (row->bits >= 8) {
            const hd_random_fill one = hd_dtype_repeat((hd_dtype)t, 1.0f);
            for (int i = 0; i < WORDS; i++) words[i] = hd_random_fill_word(&one, (uint64_t)i);
            assert_true(hd_dtype_at((hd_dtype)t, words, 5) == 1.0f);
        }
        if (row->random_rms == 0) continue;
        const hd_random_fill random = hd_dtype_random((hd_dtype)t, 1.0f);
        const int64_t n = (int64_t)sizeof words * 8 / row->bits;
        double sum = 0, negative = 0;
        for (int i = 0; i < WORDS; i++) words[i] = hd_random_fill_word(&random, (uint64_t)i);
        for (int64_t i = 0; i < n; i++) {
            const float f = hd_dtype_at((hd_dtype)t, words, i);
            assert_true(isfinite(f));
            sum += (double)f * (double)f;
            negative += signbit(f) != 0;
        }
        assert_true(fabs(sqrt(sum / (double)n) / row->random_rms - 1) < 0.03);
        assert_true(fabs(negative / (double)n - 0.5) < 0.03);
    }
}

/* Every format can be stored, measured and found again. */
static void formats_are_complete(void **state) {
    (void)state;
    for (int f = HD_FORMAT_NONE + 1; f < HD_N_FORMATS; f++) {
        const hd_format_row *row = &hd_formats[f];
        const hd_stored_format stored = hd_format_stored((hd_format)f);
        const bool scaled = row->scale_types[0] != HD_NONE;
        assert_non_null(hd_dtypes[row->type].decode);
        assert_true(row->file_types[0] != HD_NONE);
        assert_int_equal(scaled, row->scale_names[0] != NULL);
        assert_int_equal(scaled, row->block_rows > 0 && row->block_cols > 0);
        assert_int_equal(row->global_name != NULL, row->n_scalars > 0);
        for (int i = 0; i < HD_FORMAT_TYPES && row->scale_types[i] != HD_NONE; i++) {
            assert_non_null(hd_dtypes[row->scale_types[i]].decode);
        }
        for (int g = HD_FORMAT_NONE + 1; g < f; g++) {
            assert_string_not_equal(row->name, hd_formats[g].name);
            assert_string_not_equal(row->key, hd_formats[g].key);
        }
        const hd_weight w = {.type = stored.type,
                             .scale = scaled ? row : NULL,
                             .scale_type = stored.scale_type,
                             .block_rows = stored.block_rows,
                             .block_cols = stored.block_cols};
        const hd_stored_format again = hd_weight_format(&w);
        assert_memory_equal(&again, &stored, sizeof stored);
        assert_int_equal(hd_stored_data_bytes(&stored, 129, 256),
                         129 * 32 * hd_dtype_bits(stored.type));
        assert_int_equal(hd_stored_scales(&stored, 0, 256), 0);
    }
    const hd_stored_format fp8 = hd_format_stored(HD_FORMAT_FP8);
    assert_int_equal(hd_stored_scale_bytes(&fp8, 129, 256), 4 * 4);
}

/* ---- known codes ---- */

static void every_e4m3_code_survives(void **state) {
    (void)state;
    for (int code = 0; code < 256; code++) {
        float f = hd_e4m3_to_f32((uint8_t)code);
        if ((code & 0x7f) == 0x7f) {
            assert_true(isnan(f));
        } else {
            assert_int_equal(hd_f32_to_e4m3(f), code);
        }
    }
    assert_true(hd_e4m3_to_f32(0x7e) == 448.0f && hd_e4m3_to_f32(1) == 0x1p-9f);
    assert_int_equal(hd_f32_to_e4m3(1e9f), 0x7e);
    assert_int_equal(hd_f32_to_e4m3(17.0f), hd_f32_to_e4m3(16.0f)); /* tie to even */
    assert_int_equal(hd_f32_to_e4m3(19.0f), hd_f32_to_e4m3(20.0f));
}

static void small_formats_round_to_even(void **state) {
    (void)state;
    const float ties[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
    const uint8_t codes[7] = {0, 2, 2, 4, 4, 6, 6};
    for (int i = 0; i < 7; i++) assert_int_equal(hd_f32_to_e2m1(ties[i]), codes[i]);
    for (uint8_t code = 0; code < 16; code++) {
        assert_int_equal(hd_f32_to_e2m1(hd_e2m1_to_f32(code)), code);
    }
    assert_int_equal(hd_f32_to_e2m1(-100.0f), 15);
    assert_int_equal(hd_f32_to_bf16(1.00390625f), 0x3f80); /* 1 + 2^-8: tie */
    assert_int_equal(hd_f32_to_bf16(1.01171875f), 0x3f82); /* 1 + 3 * 2^-8 */
    assert_true(isnan(hd_bf16_to_f32(hd_f32_to_bf16(NAN))));
    assert_true(hd_e8m0_to_f32(0) == 0x1p-127f && hd_e8m0_to_f32(0x7f) == 1.0f);
    assert_true(isnan(hd_e8m0_to_f32(255)));
    assert_true(hd_f16_to_f32(0x3c00) == 1.0f && hd_f16_to_f32(0x0001) == 0x1p-24f);
    assert_true(hd_f16_to_f32(0xfc00) == -INFINITY);
    assert_int_equal(hd_f32_to_f16(1.00048828125f), 0x3c00); /* 1 + 2^-11: tie */
    assert_int_equal(hd_f32_to_f16(65519.0f), 0x7bff);
    assert_int_equal(hd_f32_to_f16(-65520.0f), 0xfc00);
    assert_true(hd_f32_to_e8m0(0.7f) == 126 && hd_f32_to_e8m0(0.8f) == 127);
    assert_true(hd_f32_to_e8m0(-1.0f) == 255 && hd_f32_to_e8m0(INFINITY) == 254);
}

static void blocks_scale_their_elements(void **state) {
    (void)state;
    const uint8_t data[3 * 2] = {0x9f, 0x21, 0x00, 0x77, 0x42, 0x42}; /* E2M1 [3, 4] */
    const uint8_t scale[3 * 2] = {0x7f, 0x80, 0x7f, 0x7f, 0x7e, 0x81};
    hd_weight w = {.data = data,
                   .scale = scale,
                   .type = HD_E2M1,
                   .scale_type = HD_E8M0,
                   .rows = 3,
                   .cols = 4,
                   .block_rows = 1,
                   .block_cols = 2,
                   .global = 1.0f};
    assert_true(hd_weight_at(&w, 0, 0) == -6.0f && hd_weight_at(&w, 0, 1) == -0.5f);
    assert_true(hd_weight_at(&w, 0, 2) == 1.0f && hd_weight_at(&w, 0, 3) == 2.0f);
    assert_true(hd_weight_at(&w, 2, 0) == 0.5f && hd_weight_at(&w, 2, 3) == 8.0f);
}

int test_dtype(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_encode_what_they_decode),
        cmocka_unit_test(rows_encode_the_nearest),
        cmocka_unit_test(elements_lie_in_order_of_bits),
        cmocka_unit_test(patterns_are_numbers_of_their_size),
        cmocka_unit_test(formats_are_complete),
        cmocka_unit_test(every_e4m3_code_survives),
        cmocka_unit_test(small_formats_round_to_even),
        cmocka_unit_test(blocks_scale_their_elements),
    };
    return cmocka_run_group_tests_name("dtype", tests, NULL, NULL);
}
